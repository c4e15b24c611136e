"""How much of a training is spent in telemetry at its normal level: building events, looking for anomalies, writing lines.

    python benchmarks/telemetry.py
    python benchmarks/telemetry.py --device cuda --what fleet
    python benchmarks/telemetry.py --repeats 3 --steps 20 --out /tmp/telemetry.jsonl

`grow` trains a small network with steps of about 1 ms, `ppo` a small recurrent policy, `fleet` a controller on a fleet of hosts. Each
writes its events into a log. A repeat is an epoch, an update or a round; the time inside telemetry is divided by the time of the whole
repeat. The result is the mean share over the repeats with Student's 95 % interval, whose upper end must not exceed `--bar`. On CUDA, the
clock waits for the device whenever telemetry begins or ends. A repeat before the first one is not counted.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import esper.growth.grower
import esper.rl.batch
import esper.rl.learner
import fleet_loop
from clock import Parts, Timed
from esper.controller.env import GrowthEnv
from esper.devices import find_device, threads
from esper.fleet.fleet import Fleet
from esper.growth.config import TrainingConfig
from esper.growth.grower import Grower
from esper.growth.telemetry import GrowthTelemetry
from esper.growth.training_loop import Training, step_loss_of
from esper.rl import PPO, PPOConfig
from esper.rl.config import NetworkConfig
from esper.runs import Event, EventLog
from esper.runs.telemetry import ResourceMeter
from esper.statistics import student_interval
from fleet import synthetic_task
from records import RESULTS, Output, Record

BAR = 0.02
INSIDE = "telemetry"
TIMED: list[Timed] = [
    (INSIDE, PPO, "_report"),
    (INSIDE, esper.rl.learner, "gradient_norms"),  # type: ignore[list-item]
    (INSIDE, esper.rl.batch, "_size_and_spread"),  # type: ignore[list-item]
    (INSIDE, esper.rl.batch, "calibration"),  # type: ignore[list-item]
    (INSIDE, ResourceMeter, "read"),
    (INSIDE, esper.growth.grower, "epoch_ended"),  # type: ignore[list-item]
    (INSIDE, GrowthEnv, "_report_hosts"),
    (INSIDE, Grower, "_emit_events"),
    (INSIDE, GrowthTelemetry, "events_of"),
    (INSIDE, Fleet, "_emit_events"),
    (INSIDE, EventLog, "emit"),
]
Emit = Callable[[Event], None]


def grow_repeats(emit: Emit, *, repeats: int, steps: int, device: torch.device) -> Iterator[int]:
    """Train a network, and yield the number of steps after every epoch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
    inputs, targets = torch.randn(64, 32), torch.randint(10, (64,))
    training = Training(
        model,
        [(inputs, targets)] * steps,
        [(inputs[:32], targets[:32]), (inputs[32:], targets[32:])],
        step_loss_of(cross_entropy, None),
        epochs=repeats,
        make_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        make_scheduler=None,
        config=TrainingConfig(),
    )
    training.listeners.append(emit)
    grower = training.prepare("heuristic")
    training.telemetry = grower.telemetry = GrowthTelemetry()
    grower.begin()
    for _ in range(repeats):  # the loop of `Training._train`, which yields between epochs
        training._train_epoch(grower)
        training._end_epoch(grower)
        yield steps
    grower.stop()


def ppo_repeats(emit: Emit, *, repeats: int, steps: int, device: torch.device) -> Iterator[int]:
    """Train a policy, and yield the number of gradient steps after every update."""
    config = PPOConfig(num_steps=32, num_epochs=4, num_minibatches=4, network=NetworkConfig(hidden_size=64))
    ppo = PPO("cartpole-hidden", config, num_envs=8, device=device, on_event=emit)
    for update in ppo.train(repeats * ppo.steps_per_update):
        yield update.gradient_steps


def fleet_repeats(emit: Emit, options: argparse.Namespace, *, repeats: int, device: torch.device) -> Iterator[int]:
    """Train a controller on a fleet of hosts, and yield the training steps of a host after every round."""
    task = synthetic_task((3, 32, 32), options.batch, train=options.samples, validation=options.validation)
    defaults = argparse.Namespace(
        **vars(options),
        ops=["germinate"],
        channels="8-16-32",
        hosts_per_twin=4,
        validation_batch=256,
        blueprints=list(fleet_loop.BLUEPRINTS),
        seeds=1,
    )
    ppo, env = fleet_loop.make_loop(fleet_loop.settings(defaults, task.name), lambda name: task, device)
    env.begin()
    ppo.on_event = env.on_event = emit
    for _ in ppo.train(repeats * ppo.steps_per_update):
        yield options.horizon * options.steps


def measure(what: str, options: argparse.Namespace, device: torch.device) -> Record:
    """Return the share of telemetry in the time of a training, with its interval over the repeats."""
    repeats, parts, shares, steps_ms = options.repeats + 1, Parts(device), list[float](), list[float]()
    with tempfile.TemporaryDirectory() as folder, EventLog(Path(folder) / "events.jsonl", run="telemetry") as log:
        each = {
            "grow": lambda: grow_repeats(log.emit, repeats=repeats, steps=options.steps, device=device),
            "ppo": lambda: ppo_repeats(log.emit, repeats=repeats, steps=options.steps, device=device),
            "fleet": lambda: fleet_repeats(log.emit, options, repeats=repeats, device=device),
        }[what]()
        before = dict.fromkeys((INSIDE, "else"), 0.0)
        with parts.watching(TIMED):
            for steps in each:
                parts._turn()
                spent = {name: parts.seconds[name] - before[name] for name in before}
                before = {name: parts.seconds[name] for name in before}
                shares.append(spent[INSIDE] / sum(spent.values()))
                steps_ms.append(sum(spent.values()) / steps * 1e3)
    interval = student_interval(shares[1:])
    return {
        "what": what,
        "device": str(device),
        "repeats": options.repeats,
        "step_ms": sum(steps_ms[1:]) / options.repeats,
        "share": {"estimate": interval.estimate, "low": interval.low, "high": interval.high},
        "bar": options.bar,
        "is_within": interval.high <= options.bar,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--what", nargs="+", choices=["grow", "ppo", "fleet"], help="default: grow and ppo; on cuda: fleet")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--steps", type=int, default=100, help="of an epoch of grow, or between two decisions of a fleet")
    parser.add_argument("--hosts", type=int, default=64, help="of the fleet")
    parser.add_argument("--batch", type=int, default=512, help="of each host of the fleet")
    parser.add_argument("--horizon", type=int, default=20, help="decisions in the life of a host")
    parser.add_argument("--samples", type=int, default=45_000)
    parser.add_argument("--validation", type=int, default=2_048)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--bar", type=float, default=BAR)
    parser.add_argument("--out", type=Path, default=RESULTS / "telemetry.jsonl")
    options = parser.parse_args(arguments)
    device = find_device(options.device)
    output = Output(options.out)
    with threads(1 if device.type == "cpu" else None):
        for what in options.what or (["fleet"] if device.type == "cuda" else ["grow", "ppo"]):
            output.write(measure(what, options, device))


if __name__ == "__main__":
    main()
