"""The learning curve of a training in the arena: scores against each opponent over the minutes, as a picture.

    python benchmarks/arena/curve.py runs/arena-5v5-... --output docs/arena_learning.png

Scores are those of the battles that the learner fought while it learned, drawing its actions, over `--window` rollouts at a time.
"""

from __future__ import annotations

import argparse
from collections import deque
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from esper.league.events import RoundFought
from esper.rl.events import Update
from esper.runs import read
from esper.runs.folder import EVENTS

SHOWN = ("weak", "middle", "strong-v1")


def scores(folder: Path, window: int) -> dict[str, tuple[list[float], list[float]]]:
    """Minutes and scores, by opponent. Minutes are those of collecting and learning; evaluations and checkpoints are left out."""
    minutes = 0.0
    recent: dict[str, deque[tuple[int, int, int]]] = {}
    curves: dict[str, tuple[list[float], list[float]]] = {}
    for record in read(folder / EVENTS):
        event = record.event
        if isinstance(event, Update):
            minutes += (event.collect_seconds + event.update_seconds) / 60
        if not isinstance(event, RoundFought):
            continue
        for name in SHOWN:
            if name in event.results:
                battles = recent.setdefault(name, deque(maxlen=window))
                battles.append(event.results[name])
                won, drawn, lost = (sum(parts) for parts in zip(*battles, strict=True))
                if won + drawn + lost:
                    times, values = curves.setdefault(name, ([], []))
                    times.append(minutes)
                    values.append(100 * (won + 0.5 * drawn) / (won + drawn + lost))
    return curves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--output", type=Path, default=Path("arena_learning.png"))
    parser.add_argument("--window", type=int, default=8)
    options = parser.parse_args()
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, (minutes, values) in scores(options.run, options.window).items():
        axes.plot(minutes, values, label=f"against {name}")
    axes.axhline(50, color="grey", linewidth=0.8, linestyle=":")
    axes.set(xlabel="minutes of training", ylabel="score, % (draws half)", ylim=(0, 100))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(options.output, dpi=120)


if __name__ == "__main__":
    main()
