"""Measure the dashboard: loading a million events, and the time until a new event is on the page.

    python benchmarks/dashboard.py                      # load: cold, and by the kept index
    python benchmarks/dashboard.py --latency            # needs Chromium: seconds from emit to the page, while a training uses all cores,
                                                        # and the cores that server and browser use without that load

Events are those of PPO updates, 24 numbers each.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from esper.dashboard.data import POINTS, Watcher, name_in_address
from esper.rl import PPOConfig, TrainConfig, train_run
from esper.runs.folder import EVENTS
from records import RESULTS, Output

UPDATE = "update"


def make_run(root: Path, events: int) -> Path:
    """Train a short PPO run and append copies of its updates until it has this many events."""
    folder = root / "many"
    train_run(TrainConfig(env="cue", num_envs=4, total_steps=128, eval_episodes=0, ppo=PPOConfig(num_steps=16)), folder)
    update = next(json.loads(line) for line in (folder / EVENTS).read_text().splitlines() if f'"{UPDATE}"' in line)
    draw, resources = random.Random(0).random, update["resources"]
    with (folder / EVENTS).open("a") as file:
        for number in range(events):
            update |= {"step": 1000 + 128 * number, "value_loss": draw(), "policy_loss": draw(), "mean_return": draw()}
            # A run reads its resources once a second; a hundred updates a second are many.
            update["resources"] = resources if number % 100 == 0 else {}
            file.write(json.dumps(update, separators=(",", ":")) + "\n")
    return folder


def load_seconds(folder: Path, cache: Path) -> tuple[float, int]:
    """Return the seconds until the page of a run has its figures and one series, and the number of points sent."""
    began = time.perf_counter()
    watcher = Watcher(folder, cache=cache)
    watcher.refresh()
    watcher.page(name_in_address(folder))
    points = watcher.series(name_in_address(folder), ["update/value_loss"], {}, None)["series"]["update/value_loss"]["values"]
    assert len(points) <= POINTS
    seconds = time.perf_counter() - began
    for run in watcher._runs.values():
        run.index.wait()  # the next call uses the kept index
    return seconds, len(points)


SERVE = """
import sys
from esper.dashboard.watch import serve_runs

serve_runs(sys.argv[1], show=False, announce=lambda address: print(address, flush=True))
"""
TRAIN = "import torch\nx = torch.randn(512, 512)\nwhile True: x = torch.tanh(x @ x)"


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


def latencies(root: Path, *, events: int, seconds: float) -> dict[str, Any]:
    """Measure the page of a live run.

    First without other load: the share of a core that server and browser use, while the run writes an update per second for `seconds`. Then
    the seconds from `EventLog.emit` to the page for single events, while other processes use all cores.
    """
    from esper.rl.events import GradientNorms
    from esper.runs import EventLog, read

    sys.path.insert(0, str(Path(__file__).parent.parent))
    from tests.dashboard.chromium import Page, start_chromium

    folder = root / "live"
    train_run(TrainConfig(env="cue", num_envs=4, total_steps=128, eval_episodes=0, ppo=PPOConfig(num_steps=16)), folder)
    update = [record.event for record in read(folder / EVENTS) if record.kind == UPDATE][-1]
    server = subprocess.Popen([sys.executable, "-c", SERVE, str(root)], stdout=subprocess.PIPE, text=True)
    driver = start_chromium(root / "profile", webgl=False)
    busy: list[subprocess.Popen[bytes]] = []
    found: list[float] = []
    try:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        page = Page(driver)
        driver.get(f"{address}#/runs/{name_in_address(folder)}")
        page.wait(lambda: page.text("[data-progress]") != "", "the page did not appear")
        with EventLog.resume(folder / EVENTS, (folder / EVENTS).stat().st_size) as log:
            browser = driver.service.process.pid
            time.sleep(5)  # until the page has settled
            before, began = (cpu_seconds(server.pid), cpu_seconds(browser)), time.perf_counter()
            for number in range(round(seconds)):
                log.emit(msgspec.structs.replace(update, step=1000 + 64 * number, update=10 + number))
                time.sleep(1)
            took = time.perf_counter() - began
            cores = [
                (after - at_first) / took for after, at_first in zip((cpu_seconds(server.pid), cpu_seconds(browser)), before, strict=True)
            ]
            alone = {**os.environ, "OMP_NUM_THREADS": "1"}
            busy += [subprocess.Popen([sys.executable, "-c", TRAIN], env=alone) for _ in range(os.cpu_count() or 1)]
            time.sleep(3)
            seen = "return [...document.querySelectorAll('details option')].some((item) => item.value.endsWith(arguments[0]))"
            for number in range(events):
                name = f"part{number}"
                log.emit(GradientNorms(step=100_000 + number, norms={name: 1.0}, health={name: 1.0}))
                began = time.perf_counter()
                while not driver.execute_script(seen, f"norms/{name}"):
                    time.sleep(0.02)
                found.append(time.perf_counter() - began)
    finally:
        driver.quit()
        for process in (server, *busy):
            process.terminate()
    found.sort()
    return {
        "server_cores": cores[0],
        "browser_cores": cores[1],
        "latency_median_s": statistics.median(found),
        "latency_95_s": found[int(0.95 * len(found))],
        "events": events,
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--latency", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "dashboard.jsonl")
    options = parser.parse_args()
    output = Output(options.out, resume=options.latency)
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        if options.latency:
            output.write(latencies(root, events=40, seconds=20))
        else:
            folder = make_run(root, options.events)
            size = (folder / EVENTS).stat().st_size / 1e6
            cold, points = load_seconds(folder, root / "cache")
            kept, _ = load_seconds(folder, root / "cache")
            output.write({"events": options.events, "megabytes": size, "cold_s": cold, "kept_index_s": kept, "points_sent": points})


if __name__ == "__main__":
    main()
