"""How fast the whole loop of training a controller is: training of hosts and twins, measurements, policy, bookkeeping and learning.

    python benchmarks/fleet_loop.py --device cuda --precision bfloat16
    torchrun --nproc-per-node 2 benchmarks/fleet_loop.py --device cuda --precision bfloat16 --hosts 32
    python benchmarks/fleet_loop.py --device cuda --precision bfloat16 --task cifar10 --data-dir DIR
    python benchmarks/fleet_loop.py --shape 1x8x8 --width 2 --blocks 2 --hosts 4 --batch 8 --steps 2 --horizon 4 --samples 64

A round is a whole life of `--hosts` hosts, `--steps` training steps of `--batch` samples between two decisions, and the update that
follows. The policy is a fresh one that learns. All candidates are probed before every decision in which it may grow something; a host
holds one seed at most, and whatever grows stays on trial to the end. So a host has about one living seed, and what that one contributes is
measured at every decision: the dearest that one seed can be. How many there were is counted.

One round to warm up, then `--rounds` that are timed without a break, then one that is timed part by part; that last one waits for the
device whenever a part ends, so its seconds tell shares and no speed.

Under torchrun every rank has `--hosts` hosts of its own, and all learn one policy. Ranks that share a GPU record and keep their books while
the GPU computes for others. Speeds are those of all ranks together.

The never-grow twins train too. `samples_per_s` counts all hosts, twins included; `decided_samples_per_s` those that the policy decides
for, twins being what they cost, and it is the figure that is held against `--bar`. Without `--task` the data are noise of `--shape`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import msgspec
import torch

from clock import Parts, Timed, now
from esper.controller.config import ControllerConfig, DomainConfig, MoveNetworkConfig
from esper.controller.env import GrowthEnv
from esper.controller.network import make_parts
from esper.devices import find_device, threads
from esper.fleet import FleetConfig
from esper.fleet.device import Reading
from esper.fleet.fleet import Fleet
from esper.fleet.kernels import compiled_kernels
from esper.fleet.seed_groups import SeedStorage
from esper.growth.config import BudgetConfig, GrowthConfig, LifecycleConfig
from esper.parallel import ALONE, Group, joined
from esper.rl import PPO
from esper.rl.collector import Collector
from esper.rng import Streams
from esper.tasks import Task, load_task
from esper.vecenv import Actions, Timestep
from fleet import CudaMemory, ResidentMemory, compiles, synthetic_task
from records import Output, Record, metadata

BAR = 20 * 27_000  # training samples per second, of the hosts that are decided for
TIMED: list[Timed] = [
    ("training", Fleet, "plan"),
    ("training", Fleet, "_train"),
    ("validation and contributions", Fleet, "_measure"),
    ("validation and contributions", Reading, "read"),
    ("validation and contributions", Fleet, "validation_losses"),
    ("observation and policy", GrowthEnv, "_timestep"),
    ("observation and policy", Collector, "_step"),
    ("bookkeeping", GrowthEnv, "step"),
    ("planting", SeedStorage, "plant"),
    ("new hosts", GrowthEnv, "_begin_next"),
    ("update", PPO, "update"),
]


class Watched(GrowthEnv):
    """Counts what happens in it, on the CPU, in the time that one host's bookkeeping takes."""

    def begin(self) -> None:
        self.samples = self.decided_samples = self.segments = 0
        self.living: list[float] = []  # per host, of every training segment
        self.given_up = 0

    def step(self, actions: Actions) -> Timestep:
        twinned_fleets = list(self.twinned_fleets)
        training = [twinned.fleet.training() for twinned in twinned_fleets]
        answer = super().step(actions)
        size = twinned_fleets[0].fleet.config.batch_size * twinned_fleets[0].fleet.steps_per_decision
        for twinned, rows in zip(twinned_fleets, training, strict=True):
            if rows:
                hosts = twinned.fleet.rows[: twinned.hosts]
                self.segments += 1
                self.samples += size * len(rows)
                self.decided_samples += size * sum(row < twinned.hosts for row in rows)
                self.living.append(sum(len(host.lifecycles.living()) for host in hosts) / twinned.hosts)
            else:
                self.given_up += twinned.alive().count(False)
        return answer


def settings(options: argparse.Namespace, task: str) -> ControllerConfig:
    """Return the settings of a training in which all hosts are of one cell, so that its fleet is used again and again."""
    samples = options.batch * options.steps * options.horizon
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
            samples_of_a_life=(samples, samples),
        ),
        fleet=FleetConfig(
            validation_samples=options.validation,
            validation_batch=min(options.validation_batch, options.validation),
            precision=options.precision,
        ),
        growth=GrowthConfig(
            blueprints=tuple(options.blueprints),
            budget=BudgetConfig(max_seeds=options.seeds, max_parameters=None, max_flops=None),
            lifecycle=LifecycleConfig(holding_epochs=options.horizon),
        ),
        network=MoveNetworkConfig(temperature=1.0),  # nearly uniform at first
        ppo=msgspec.structs.replace(
            ControllerConfig().ppo,
            num_steps=options.horizon + 1,  # a whole life
            num_minibatches=min(4, options.hosts),
        ),
    )


def make_loop(config: ControllerConfig, load: Callable[[str], Task], device: torch.device, group: Group = ALONE) -> tuple[PPO, Watched]:
    env = Watched(config, load, seed=group.rank, device=device)
    parts = make_parts(config.network, config.ppo.network, generator=Streams(0).torch("controller"))
    return PPO(env, config.ppo, parts.encoder, actor=parts.actor, critic=parts.critic, device=device, group=group), env


def one_round(ppo: PPO) -> None:
    ppo.update(ppo.collect())


def measure(ppo: PPO, env: Watched, rounds: int, bar: float, group: Group = ALONE) -> Record:
    device = ppo.device
    memory = CudaMemory(device) if device.type == "cuda" else ResidentMemory()
    env.begin()
    one_round(ppo)
    env.begin()
    before = compiles()
    memory.begin()
    group.any(False)  # waits for all ranks
    start = now(device)
    for _ in range(rounds):
        one_round(ppo)
    seconds = now(device) - start
    peak = memory.peak()
    seconds = max(group.gather_objects(seconds))
    samples, decided = (sum(group.gather_objects(count)) / seconds for count in (env.samples, env.decided_samples))
    return {
        "ranks": group.world_size,
        "samples_per_s": samples,
        "decided_samples_per_s": decided,
        "ratio_to_bar": decided / bar,
        "bar": bar,
        "decisions_per_s": group.world_size * rounds * env.num_envs * ppo.config.num_steps / seconds,
        "living_seeds_per_host": fmean(env.living),
        "given_up": env.given_up,
        "seconds": seconds,
        "rounds": rounds,
        "stretches": env.segments,
        "twins": env.twinned_fleets[0].fleet.hosts - env.twinned_fleets[0].hosts,
        "peak_memory": peak,
        "compiles": compiles() - before,
        "kernels": compiled_kernels(),
        "seconds_by_part": by_part(ppo),
    }


def by_part(ppo: PPO) -> dict[str, float]:
    """Of one round, with waiting in between: the dearest first."""
    parts = Parts(ppo.device)
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
        ppo, env = make_loop(settings(options, task.name), lambda name: task, device, group)
        found = measure(ppo, env, options.rounds, options.bar, group)
    return {
        **found,
        "hosts": options.hosts,
        "batch": options.batch,
        "steps": options.steps,
        "horizon": options.horizon,
        "validation": min(options.validation, len(task.validation)),
        "host": env.twinned_fleets[0].setting.cell.host,
        "task": task.name,
        "precision": options.precision,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else metadata()["processor"],
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    main()
