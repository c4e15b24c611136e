"""Measure how long the dashboard takes to load a run of a million events: cold, and by the kept index.

    python benchmarks/dashboard.py

Events are those of PPO updates, 24 numbers each. `telemetry.py --what page` measures how soon a new event is on the page.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, default=RESULTS / "dashboard.jsonl")
    options = parser.parse_args()
    output = Output(options.out)
    with tempfile.TemporaryDirectory() as place:
        folder = make_run(Path(place), options.events)
        size = (folder / EVENTS).stat().st_size / 1e6
        cold, points = load_seconds(folder, Path(place) / "cache")
        kept, _ = load_seconds(folder, Path(place) / "cache")
        output.write({"events": options.events, "megabytes": size, "cold_s": cold, "kept_index_s": kept, "points_sent": points})


if __name__ == "__main__":
    main()
