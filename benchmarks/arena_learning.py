"""What the parts of the arena's learner are worth: train with all of them, and with one left out or replaced at a time.

    python benchmarks/arena_learning.py --device cuda --workers 14 --output benchmarks/results/arena_learning.jsonl
    python benchmarks/arena_learning.py --table benchmarks/results/arena_learning.jsonl

Every training takes the same number of steps, decisions of learning units, in 2 against 2. Trainings of one seed have the same first maps,
so differences are paired over seeds; intervals are over seeds. The last weights play, with their likeliest actions, on maps that nobody
trained on, the same for all. Settings were not chosen by these scores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import msgspec
import torch

from clock import now
from esper.arena.config import ArenaConfig
from esper.league.config import ArenaTrainConfig
from esper.league.training import play_against_bot, prepare_arena
from esper.statistics import student_interval
from records import Output, Record

ALL = "all parts"
CHANGES: dict[str, dict[str, Any]] = {
    ALL: {},
    "motion as Gaussians": {"unit.motion": "gaussian"},
    "outcome for the living only": {"arena.reward.pays_dead": False},
    "no zero-sum rewards": {"arena.reward.zero_sum": 0.0},
    "gamma 0.99, lambda 0.95": {"arena.reward.gamma": 0.99, "ppo.gamma": 0.99, "ppo.gae_lambda": 0.95},
    "no central critic": {"arena.state_view": False},
    "no pointer": {"unit.points": False},
    "constant learning rate": {"ppo.learning_rate_schedule": "constant"},
    "128 maps": {"arena.maps": 128},
    "all bots equally often": {"selfplay.bot_draw": "even"},
    "no memory": {"ppo.network.core": "none"},
}
OPPONENTS = ("middle", "strong-v1")


def changed(config: Any, path: str, value: Any) -> Any:
    """Return a config in which the field at a dotted path has another value."""
    name, _, rest = path.partition(".")
    return msgspec.structs.replace(config, **{name: changed(getattr(config, name), rest, value) if rest else value})


def settings(change: str, seed: int, options: argparse.Namespace) -> ArenaTrainConfig:
    config = ArenaTrainConfig(
        arena=ArenaConfig(battles=options.battles, team_size=2, contacts=2, allies=1, state_view=True), total_steps=options.steps,
        device=options.device, threads=1,
    )  # fmt: skip
    config = changed(changed(config, "ppo.seed", seed), "selfplay.enter_every", 10**9)
    for path, value in CHANGES[change].items():
        config = changed(config, path, value)
    return config


def trained(change: str, seed: int, options: argparse.Namespace) -> Record:
    """Train once, and return the scores of the last weights."""
    config, device = settings(change, seed, options), torch.device(options.device)
    with prepare_arena(config) as (ppo, _):
        began = now(device)
        ppo.learn(options.steps)
        seconds = now(device) - began
        scores = {
            bot: play_against_bot(ppo.policy, config, bot, battles=options.eval_battles, seed=options.eval_seed).record.score
            for bot in OPPONENTS
        }
    return {"change": change, "seed": seed, "steps": ppo.step, "seconds": round(seconds, 1), "scores": scores}


def print_table(records: list[Record]) -> None:
    """Print the mean score of each change and its difference to all parts, paired over seeds, with a 95 % interval."""
    found = {(record["change"], record["seed"]): record["scores"] for record in records if "change" in record}
    print("| | seeds | " + " | ".join(f"{bot} | difference" for bot in OPPONENTS) + " |")
    print("|---" * (2 + 2 * len(OPPONENTS)) + "|")
    for change in CHANGES:
        seeds = [seed for name, seed in found if name == change and (ALL, seed) in found]
        if not seeds:
            continue
        cells = []
        for bot in OPPONENTS:
            scores = [found[change, seed][bot] for seed in seeds]
            cells.append(f"{statistics.mean(scores):.1%}")
            differences = [score - found[ALL, seed][bot] for score, seed in zip(scores, seeds, strict=True)]
            if change == ALL or len(seeds) < 2:
                cells.append("")
            else:
                interval = student_interval(differences)
                cells.append(f"{statistics.mean(differences):+.1%} [{interval.low:+.1%}, {interval.high:+.1%}]")
        print(f"| {change} | {len(seeds)} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--battles", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=10_000_000, help="of learning units, alive or not, in each training")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--changes", nargs="*", default=list(CHANGES), choices=list(CHANGES))
    parser.add_argument("--workers", type=int, default=1, help="trainings at the same time")
    parser.add_argument("--eval-battles", type=int, default=512)
    parser.add_argument("--eval-seed", type=int, default=9)
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--table", type=Path, default=None, help="train nothing, and print the table of these records")
    options = parser.parse_args()
    if options.table is not None:
        print_table([json.loads(line) for line in options.table.read_text().splitlines()])
        return
    write = Output(options.output).write if options.output else lambda record: print(json.dumps(record), flush=True)
    jobs = list(itertools.product(range(options.seeds), options.changes))  # seed by seed, so that what is interrupted can be compared
    with ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        records = []
        for job in as_completed([pool.submit(trained, change, seed, options) for seed, change in jobs]):
            records.append(job.result())
            write(records[-1])
    print_table(records)


if __name__ == "__main__":
    main()
