"""Measure telemetry: its share of the time of a training, and how soon the dashboard shows a new event.

    python benchmarks/runs/telemetry.py
    python benchmarks/runs/telemetry.py --device cuda --what fleet
    python benchmarks/runs/telemetry.py --repeats 3 --steps 20 --out /tmp/telemetry.jsonl
    python benchmarks/runs/telemetry.py --what page          # needs the extra dashboard, Chromium and chromedriver

`grow` trains a small network with steps of about 1 ms, `ppo` a small recurrent policy, `fleet` a controller on a fleet of hosts. Each
writes its events into a log. A repeat is an epoch, an update or a round; the time inside telemetry is divided by the time of the whole
repeat. The result is the mean share over the repeats with Student's 95 % interval, whose upper end must not exceed `--bar`. On CUDA, the
clock waits for the device whenever telemetry begins or ends. A repeat before the first one is not counted.

`page` opens a run of `--points` updates in Chromium. It first measures the cores that server and browser use while the run writes an update
per second. Then, while as many processes as there are cores compute, it measures the seconds from the writing of an update until the page
shows it: in its figures, in a painted chart, and in the table of all runs. 95 % of them must be below `--latency-bar`.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import esper.growth.grower
import esper.rl.batch
import esper.rl.learner
from esper.controller.lives import Lives
from esper.devices import find_device, threads
from esper.fleet.fleet import Fleet
from esper.growth.config import TrainingConfig
from esper.growth.grower import Grower
from esper.growth.telemetry import GrowthTelemetry
from esper.growth.training_loop import Training, step_loss_of
from esper.rl import PPO, PPOConfig, TrainConfig, train_run
from esper.rl.config import NetworkConfig
from esper.runs import Event, EventLog, read
from esper.runs.folder import EVENTS
from esper.runs.telemetry import ResourceMeter
from esper.statistics import student_interval

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository

from benchmarks.clock import Parts, Timed
from benchmarks.fleet import loop as fleet_loop
from benchmarks.fleet.speed import synthetic_task
from benchmarks.records import RESULTS, Output, Record

BAR = 0.02
LATENCY_BAR_S = 1.0
INSIDE = "telemetry"
TIMED: list[Timed] = [
    (INSIDE, PPO, "_report"),
    (INSIDE, esper.rl.learner, "gradient_norms"),  # type: ignore[list-item]
    (INSIDE, esper.rl.batch, "_size_and_spread"),  # type: ignore[list-item]
    (INSIDE, esper.rl.batch, "calibration"),  # type: ignore[list-item]
    (INSIDE, ResourceMeter, "read"),
    (INSIDE, esper.growth.grower, "epoch_ended"),  # type: ignore[list-item]
    (INSIDE, Lives, "_report"),
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
        width=8,
        blocks=3,
        hosts_per_twin=4,
        validation_batch=256,
        blueprints=["norm", "double_conv3x3", "widen_100"],
        seeds=1,
        trust=0.0,
    )
    ppo = fleet_loop.make_loop(fleet_loop.settings(defaults, task.name), lambda name: task, device, emit)
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


SERVE = """
import sys
from esper.dashboard.watch import serve_runs

serve_runs(sys.argv[1], show=False, announce=lambda address: print(address, flush=True))
"""
COMPUTE = "import torch\nx = torch.randn(512, 512)\nwhile True: x = torch.tanh(x @ x)"
# Notes the time whenever the watched place of the page shows something new. `painted` is set after a chart has been painted.
WATCH = """
const look = {
  figures: () => document.querySelector("[data-last]")?.innerText,
  chart: () => document.querySelector("[data-chart=losses] .plot")?.dataset.painted,
};
window.seen = [];
const before = {};
const note = () => {
  for (const [place, text] of Object.entries(look)) {
    if (text() !== before[place]) window.seen.push([place, before[place] = text(), Date.now() / 1000]);
  }
};
new MutationObserver(note).observe(document.body, {subtree: true, childList: true, characterData: true, attributes: true});
"""


def measure_page(options: argparse.Namespace) -> Record:
    """Return the cores that the page of a live run takes, and the seconds until it shows a new event while all cores compute."""
    from esper.dashboard.data import name_in_address
    from tests.dashboard.chromium import Page, start_chromium

    busy: list[subprocess.Popen[bytes]] = []
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as place:
        root = Path(place) / "runs"
        folder = root / "live"
        train_run(TrainConfig(env="cue", num_envs=4, total_steps=128, eval_episodes=0, ppo=PPOConfig(num_steps=16)), folder)
        update: Any = [record.event for record in read(folder / EVENTS) if record.kind == "update"][-1]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": place}
        server = subprocess.Popen([sys.executable, "-c", SERVE, str(root)], stdout=subprocess.PIPE, text=True, env=environment)
        driver = start_chromium(Path(place) / "profile", webgl=False)
        page = Page(driver)
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            with EventLog.resume(folder / EVENTS, (folder / EVENTS).stat().st_size) as log:
                numbers = iter(range(1001, 10_000))  # the page shows four digits
                draw = random.Random(0)

                def emit() -> tuple[int, float]:
                    """Write an update whose step and return no other has, and return them and the time."""
                    number = next(numbers)
                    losses = {"value_loss": draw.random(), "policy_loss": draw.random()}
                    log.emit(msgspec.structs.replace(update, step=number, update=number, mean_return=float(number), **losses))
                    return number, time.time()

                for _ in range(options.points):
                    emit()
                driver.get(f"{address}#/runs/{name_in_address(folder)}")
                page.wait(lambda: "value_loss" in page.driver.page_source, "the page did not appear")
                time.sleep(5)  # until the page has settled
                processes = (server.pid, driver.service.process.pid)
                used, began = [cpu_seconds(pid) for pid in processes], time.perf_counter()
                for _ in range(options.repeats):
                    emit()
                    time.sleep(1)
                took = time.perf_counter() - began
                cores = [(cpu_seconds(pid) - before) / took for pid, before in zip(processes, used, strict=True)]
                busy += [subprocess.Popen([sys.executable, "-c", COMPUTE], env=environment) for _ in range(os.cpu_count() or 1)]
                time.sleep(3)
                for where, places in ((f"runs/{name_in_address(folder)}", ("figures", "chart")), ("", ("table",))):
                    driver.get("about:blank")
                    driver.get(f"{address}#/{where}")
                    page.wait(lambda: page.text("[data-last]") not in ("", "–"), "the page did not appear")
                    time.sleep(3)
                    driver.execute_script(WATCH)
                    emitted = {}
                    for _ in range(2 * options.repeats):
                        number, at = emit()
                        emitted[number] = at
                        time.sleep(draw.uniform(0.6, 1.6))
                    time.sleep(2)
                    seen = [
                        (shown, float(text.replace(",", "")), at) for shown, text, at in driver.execute_script("return window.seen") if text
                    ]
                    for name in places:
                        of_place = [(number, at) for shown, number, at in seen if shown == ("figures" if name == "table" else name)]
                        # An update that was shown together with a later one counts from its own writing.
                        ends = [min((at for other, at in of_place if other >= number), default=float("inf")) for number in emitted]
                        seconds[name] = sorted(end - began for end, began in zip(ends, emitted.values(), strict=True))
        finally:
            driver.quit()
            for process in (server, *busy):
                process.terminate()
                process.wait()
    late = {name: found[int(0.95 * len(found))] for name, found in seconds.items()}
    return {
        "what": "page",
        "points": options.points,
        "server_cores": cores[0],
        "browser_cores": cores[1],
        "events": 2 * options.repeats,
        "median_s": {name: statistics.median(found) for name, found in seconds.items()},
        "95_percent_s": late,
        "bar_s": options.latency_bar,
        "is_within": max(late.values()) <= options.latency_bar,
    }


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and of all processes below it."""
    children: dict[int, list[int]] = {}
    used: dict[int, float] = {}
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            own, rest = place.read_text().rsplit(")", 1)
        except OSError:  # it has ended meanwhile
            continue
        fields = rest.split()
        number = int(own.split()[0])
        children.setdefault(int(fields[1]), []).append(number)
        used[number] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    total, left = 0.0, [pid]
    while left:
        number = left.pop()
        total += used.get(number, 0.0)
        left += children.get(number, [])
    return total


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--what", nargs="+", choices=["grow", "ppo", "fleet", "page"], help="default: grow and ppo; on cuda: fleet")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--steps", type=int, default=100, help="of an epoch of grow, or between two decisions of a fleet")
    parser.add_argument("--hosts", type=int, default=64, help="of the fleet")
    parser.add_argument("--batch", type=int, default=512, help="of each host of the fleet")
    parser.add_argument("--horizon", type=int, default=20, help="decisions in the life of a host")
    parser.add_argument("--samples", type=int, default=45_000)
    parser.add_argument("--validation", type=int, default=2_048)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--points", type=int, default=2000, help="updates that the run of the page has at first")
    parser.add_argument("--bar", type=float, default=BAR, help="for the share of telemetry")
    parser.add_argument("--latency-bar", type=float, default=LATENCY_BAR_S, help="seconds until the page shows an event")
    parser.add_argument("--out", type=Path, default=RESULTS / "telemetry.jsonl")
    options = parser.parse_args(arguments)
    device = find_device(options.device)
    output = Output(options.out)
    with threads(1 if device.type == "cpu" else None):
        for what in options.what or (["fleet"] if device.type == "cuda" else ["grow", "ppo"]):
            output.write(measure_page(options) if what == "page" else measure(what, options, device))


if __name__ == "__main__":
    main()
