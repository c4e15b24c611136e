"""Measure the dashboard: how long a run of a million events takes to load, and what lists of a thousand runs cost.

    python benchmarks/runs/dashboard.py                    # a run of a million events: cold, and by the kept index
    python benchmarks/runs/dashboard.py --what lists       # `esper runs ls` and the first page of `esper watch`: cold, and by the kept list

Events are those of PPO updates, 24 numbers each. Costs of lists are processor seconds and peak memory of the whole command, with imports.
`telemetry.py --what page` measures how soon a new event is on the page.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from esper.dashboard.data import POINTS, Watcher, name_in_address
from esper.rl import PPOConfig, TrainConfig, train_run
from esper.runs.catalog import SUMMARY
from esper.runs.folder import CONFIG, EVENTS

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository

from benchmarks.records import RESULTS, Output

UPDATE = "update"
STEPS_OF_A_RUN = 2624  # of a run whose log has 55 kB


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


def measure_page(output: Output, place: Path, events: int) -> None:
    folder = make_run(place, events)
    size = (folder / EVENTS).stat().st_size / 1e6
    cold, points = load_seconds(folder, place / "cache")
    kept, _ = load_seconds(folder, place / "cache")
    output.write({"events": events, "megabytes": size, "cold_s": cold, "kept_index_s": kept, "points_sent": points})


def make_runs(root: Path, count: int) -> int:
    """Train one PPO run and copy its settings, events and summary into many folders. Return the size of its log."""
    first = root / "run-0000"
    train_run(TrainConfig(env="cue", num_envs=4, total_steps=STEPS_OF_A_RUN, eval_episodes=0, ppo=PPOConfig(num_steps=16)), first)
    for number in range(1, count):
        folder = root / f"run-{number:04d}"
        folder.mkdir()
        for name in (CONFIG, EVENTS, SUMMARY):
            shutil.copyfile(first / name, folder / name)
    return (first / EVENTS).stat().st_size


# A process begins with the peak memory of the one that starts it, so a small one starts the command.
STARTER = """
import json, os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
process = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, setsigdef=[signal.SIGINT])
_, status, used = os.wait4(process, 0)
print(json.dumps([os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, used.ru_maxrss / 1024]), file=sys.stderr)
"""


def cost_of(arguments: list[str], cache: Path, *, is_server: bool) -> dict[str, float]:
    """Run a command of esper; of a server, ask for its first page and end it. Return processor seconds and peak memory of the process."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "COLUMNS": "140"}
    command = [sys.executable, "-S", "-c", STARTER, sys.executable, "-m", "esper.cli.main", *arguments]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    shown = 0
    if is_server:
        address = process.stdout.readline().split()[0]
        with urllib.request.urlopen(f"{address}api/overview") as answer:
            shown = len(json.load(answer)["runs"])
        os.killpg(process.pid, signal.SIGINT)
    out, errors = process.communicate()
    code, seconds, memory = json.loads(errors.splitlines()[-1])
    assert code in (0, 130), errors
    return {"shown": shown or len(out.splitlines()) - 1, "cpu_s": seconds, "peak_mb": memory}


def measure_lists(output: Output, place: Path, count: int) -> None:
    size = make_runs(place / "runs", count)
    runs = str(place / "runs")
    commands: dict[str, list[str]] = {
        "runs ls": ["runs", "ls", runs],
        "watch": ["watch", runs, "--no-show"],
        "watch --terminal": ["watch", "--terminal", runs],
    }
    for name, arguments in commands.items():
        cache = place / f"cache of {name}"
        for state in ("cold", "warm"):
            cost: dict[str, Any] = cost_of(arguments, cache, is_server=name == "watch")
            output.write({"command": name, "runs": count, "kilobytes": size / 1e3, "kept list": state, **cost})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--what", choices=("page", "lists"), default="page")
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    output = Output(options.out or RESULTS / ("dashboard.jsonl" if options.what == "page" else "run_lists.jsonl"))
    with tempfile.TemporaryDirectory() as place:
        if options.what == "page":
            measure_page(output, Path(place), options.events)
        else:
            measure_lists(output, Path(place), options.runs)


if __name__ == "__main__":
    main()
