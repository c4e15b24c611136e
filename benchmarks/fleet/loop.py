"""How fast the whole loop of training a controller is: training of hosts and twins, measurements, policy, bookkeeping and learning.

    python benchmarks/fleet/loop.py --device cuda --precision bfloat16
    torchrun --nproc-per-node 2 benchmarks/fleet/loop.py --device cuda --precision bfloat16 --hosts 32
    python benchmarks/fleet/loop.py --device cuda --precision bfloat16 --task cifar10 --data-dir DIR
    python benchmarks/fleet/loop.py --shape 1x8x8 --width 2 --blocks 2 --hosts 4 --batch 8 --steps 2 --horizon 8 --samples 64

A round is the lives of `--hosts` hosts in one fleet (`esper.controller.lives`), `--steps` training steps of `--batch` samples between two
decisions, and the update that follows. The policy is a fresh one that learns. At a `--trust` of 0 it draws all possible steps about equally
often, so that hosts soon differ. At 4, as trainings begin, most decide as the heuristic, and hosts that are decided alike train once.

One round to warm up, then `--rounds` that are timed without a break, then one that is timed part by part. That last one waits for the
device whenever a part ends, so its seconds tell shares and no speed.

Under torchrun every rank has `--hosts` hosts of its own, and all learn one policy. Ranks that share a GPU record and keep their books while
the GPU computes for others. Speeds are those of all ranks together.

`decided_samples_per_s` counts the whole life of every host that the policy decides for, and is held against `--bar`. `samples_per_s` counts
what the rows of the fleet trained on: less where hosts are decided alike, and more by the twins, which the heuristic decides for. Without
`--task` the data are noise of `--shape`. The results in `fleet_loop_h200.jsonl` are of an earlier loop, in which every host was a row.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean

import msgspec
import torch

from esper.controller import evaluation
from esper.controller.config import ControllerConfig, DomainConfig, StepNetworkConfig
from esper.controller.events import RoundEnded
from esper.controller.lives import Lives
from esper.controller.policy import StepController
from esper.controller.training import first_policy, make_learner
from esper.devices import find_device, threads
from esper.fleet import FleetConfig
from esper.fleet.device import Reading
from esper.fleet.fleet import Fleet
from esper.fleet.seed_groups import SeedStorage
from esper.growth.config import BudgetConfig, GrowthConfig
from esper.growth.controllers.heuristic import Heuristic
from esper.parallel import ALONE, Group, joined
from esper.rl import PPO
from esper.runs import Event
from esper.tasks import Task, load_task

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository

from benchmarks.clock import Parts, Timed, now
from benchmarks.fleet.speed import CudaMemory, ResidentMemory, compiles, synthetic_task
from benchmarks.records import Output, Record, metadata

BAR = 20 * 27_000  # training samples per second, of the hosts that are decided for
TIMED: list[Timed] = [
    ("training", Fleet, "plan"),
    ("training", Fleet, "_train"),
    ("validation and contributions", Fleet, "_measure"),
    ("validation and contributions", Reading, "read"),
    ("validation and contributions", Fleet, "losses"),
    ("observation and policy", StepController, "decide"),
    ("bookkeeping", evaluation, "_run_in_one_fleet"),  # type: ignore[list-item]
    ("planting", SeedStorage, "plant"),
    ("new hosts", evaluation, "_fleet"),  # type: ignore[list-item]
    ("new hosts", Fleet, "reset"),
    ("rollout", Lives, "_rollout"),
    ("update", PPO, "update"),
]


def settings(options: argparse.Namespace, task: str) -> ControllerConfig:
    """Return the settings of a training in which all hosts are of one cell."""
    steps = options.steps * options.horizon
    return ControllerConfig(
        hosts=options.hosts,
        fleets=1,
        hosts_per_twin=options.hosts_per_twin,
        domain=DomainConfig(
            sources=(task,),
            families=("conv",),
            width=(options.width, options.width),
            blocks=(options.blocks, options.blocks),
            samples=(2**20, 2**20),  # all
            classes=(10, 10),
            clean_share=1.0,
            optimizers=("adamw",),
            schedules=("cosine",),
            batch_size=(options.batch, options.batch),
            horizon=(options.horizon, options.horizon),
            samples_of_a_life=(options.batch * steps, options.batch * steps),
            most_steps=steps * options.blocks,
        ),
        fleet=FleetConfig(
            validation_samples=options.validation,
            validation_batch=min(options.validation_batch, options.validation),
            precision=options.precision,
        ),
        growth=GrowthConfig(
            blueprints=tuple(options.blueprints),
            budget=BudgetConfig(max_seeds=options.seeds, max_parameters=None, max_flops=None),
        ),
        network=StepNetworkConfig(trust=options.trust),
        ppo=msgspec.structs.replace(ControllerConfig().ppo, num_minibatches=min(4, options.hosts)),
    )


def make_loop(
    config: ControllerConfig, load: Callable[[str], Task], device: torch.device, on_event: Callable[[Event], None], group: Group = ALONE
) -> PPO:
    lives = partial(Lives, config, Heuristic, load, device=device, on_event=on_event, group=group)
    return make_learner(config, first_policy(config, None), lives, on_event=on_event, group=group)


def one_round(ppo: PPO) -> None:
    ppo.update(ppo.collect())


def measure(config: ControllerConfig, task: Task, device: torch.device, *, rounds: int, bar: float, group: Group = ALONE) -> Record:
    ended: list[RoundEnded] = []
    ppo = make_loop(config, lambda name: task, device, lambda event: ended.append(event) if isinstance(event, RoundEnded) else None, group)
    memory = CudaMemory(device) if device.type == "cuda" else ResidentMemory()
    one_round(ppo)
    ended.clear()
    before = compiles()
    memory.begin()
    group.any(False)  # waits for all ranks
    start = now(device)
    for _ in range(rounds):
        one_round(ppo)
    seconds = now(device) - start
    peak = memory.peak()
    seconds = max(group.gather_objects(seconds))
    of_a_life = config.domain.samples_of_a_life[0]
    lives, samples = (sum(group.gather_objects(sum(counts))) for counts in zip(*((one.hosts, one.samples) for one in ended), strict=True))
    return {
        "ranks": group.world_size,
        "samples_per_s": samples / seconds,
        "decided_samples_per_s": lives * of_a_life / seconds,
        "ratio_to_bar": lives * of_a_life / seconds / bar,
        "bar": bar,
        "lives_per_s": lives / seconds,
        "rows_per_life": samples / of_a_life / lives,
        "decided_alike": fmean(one.alike for one in ended),
        "policy_steps_per_life": fmean(one.steps / one.hosts for one in ended),
        "seeds_per_life": fmean(one.grown / one.hosts for one in ended),
        "seconds": seconds,
        "rounds": rounds,
        "peak_memory": peak,
        "compiles": compiles() - before,
        "kernels": ended[-1].kernels,
        "seconds_by_part": by_part(ppo, device),
        "host": ended[-1].host,
    }


def by_part(ppo: PPO, device: torch.device) -> dict[str, float]:
    """Of one round, with waiting in between: the dearest first."""
    parts = Parts(device)
    with parts.watching(TIMED):
        one_round(ppo)
    return dict(sorted(parts.seconds.items(), key=lambda part: -part[1]))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--hosts", type=int, default=64, help="that the policy decides for; twins come on top")
    parser.add_argument("--hosts-per-twin", type=int, default=4)
    parser.add_argument("--batch", type=int, default=512, help="samples of each host in a step")
    parser.add_argument("--steps", type=int, default=20, help="of training between two decisions")
    parser.add_argument("--horizon", type=int, default=20, help="decisions in a life, before the last one")
    parser.add_argument("--rounds", type=int, default=2, help="that are timed")
    parser.add_argument("--trust", type=float, default=0.0, help="in what the heuristic would do, at first")
    parser.add_argument("--task", help="such as cifar10; noise unless given")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--shape", default="3x32x32", help="of one sample of noise")
    parser.add_argument("--samples", type=int, default=45_000, help="of noise to train on")
    parser.add_argument("--validation", type=int, default=2_048, help="samples that hosts are validated on")
    parser.add_argument("--validation-batch", type=int, default=256)
    parser.add_argument("--width", type=int, default=8, help="channels of the first block; twice as many after each halving of the size")
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--precision", choices=["float32", "bfloat16", "float64"], default="float32")
    parser.add_argument("--blueprints", nargs="+", default=["norm", "double_conv3x3", "widen_100"])
    parser.add_argument("--seeds", type=int, default=1, help="that a host can hold")
    parser.add_argument("--bar", type=float, default=BAR, help="decided samples per second to reach")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="also written to this file")
    options = parser.parse_args(arguments)
    with joined(find_device(options.device)) as group:
        found = run(options, group.place(find_device(options.device)), group)
        if group.rank:
            return
    if options.output:
        Output(options.output).write(found)
    else:
        for record in (metadata(), found):
            print(json.dumps(record), flush=True)


def run(options: argparse.Namespace, device: torch.device, group: Group = ALONE) -> Record:
    if options.task:
        task = load_task(options.task, data_dir=options.data_dir)
    else:
        shape = tuple(map(int, options.shape.split("x")))
        task = synthetic_task(shape, options.batch, train=options.samples, validation=options.validation)
    with threads(options.threads):
        found = measure(settings(options, task.name), task, device, rounds=options.rounds, bar=options.bar, group=group)
    return {
        **found,
        "hosts": options.hosts,
        "trust": options.trust,
        "batch": options.batch,
        "steps": options.steps,
        "horizon": options.horizon,
        "validation": min(options.validation, len(task.validation)),
        "task": task.name,
        "precision": options.precision,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else metadata()["processor"],
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    main()
