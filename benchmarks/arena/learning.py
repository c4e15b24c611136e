"""Measure what the parts of the arena's learner are worth: train with all of them, and with one left out or replaced at a time.

    python benchmarks/arena/learning.py --part 0/2 --output first.jsonl &
    python benchmarks/arena/learning.py --part 1/2 --output second.jsonl
    python benchmarks/arena/learning.py --table first.jsonl second.jsonl --plot docs/arena_parts.png

Trains 2 against 2 with the settings of player-2v2. Every training takes the same number of steps, decisions of learning units. Trainings of
one seed have the same first maps, so differences are paired over seeds; intervals are over seeds. The last weights play, with their
likeliest actions, on maps that nobody trained on, the same for all. Settings were not chosen by these scores.

    python benchmarks/arena/learning.py --scenario 5v5-city-v1 --device cuda --battles 4096 --steps 100000000 --seeds 3 \\
        --changes "all parts" "no memory" "no central critic"

With a scenario, trainings use its settings, and the last weights play on its test maps against its opponents.

A training runs in one thread. Several processes can train at once, each with a part of the trainings and a file of its own. Trainings that
a file already holds are skipped.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch

from esper.arena.config import ArenaConfig
from esper.arena.scenarios import SCENARIOS, find_scenario
from esper.config import from_mapping
from esper.league.config import ArenaTrainConfig
from esper.league.matches import MatchArena
from esper.league.training import evaluation_arena, prepare_arena
from esper.rl.policy import Policy
from esper.statistics import student_interval

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository

from benchmarks.clock import now
from benchmarks.records import Output, Record

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
SMALL = {  # 2 against 2, as player-2v2 was trained
    "unit.width": 64, "unit.terrain_width": 32, "unit.entity_width": 16, "unit.state_width": 32, "ppo.network.hidden_size": 64,
    "ppo.network.core": "lstm", "ppo.num_epochs": 2, "selfplay.bot_share": 0.75, "selfplay.past_share": 0.0,
}  # fmt: skip
LARGE = {  # 5 against 5, as player-5v5 was trained
    "unit.width": 128, "unit.terrain_width": 64, "unit.entity_width": 32, "unit.state_width": 64, "ppo.network.hidden_size": 128,
    "ppo.network.core": "lstm", "ppo.num_epochs": 3, "selfplay.bot_share": 0.5, "selfplay.past_share": 0.25, "ppo.learning_rate": 2e-3,
}  # fmt: skip


def settings(change: str, seed: int, options: argparse.Namespace) -> ArenaTrainConfig:
    arena = find_scenario(options.scenario).arena if options.scenario else ArenaConfig(team_size=2, contacts=2, allies=1, state_view=True)
    config = ArenaTrainConfig(arena=arena, total_steps=options.steps, device=options.device, threads=1)
    fixed = {"ppo.seed": seed, "arena.battles": options.battles, "ppo.precision": options.precision, "selfplay.enter_every": 10**9}
    return with_values(config, {**(SMALL if arena.team_size == 2 else LARGE), **fixed, **CHANGES[change]})


def with_values(config: ArenaTrainConfig, values: dict[str, Any]) -> ArenaTrainConfig:
    """Return the config with the values at these paths."""
    mapping = msgspec.to_builtins(config)
    for path, value in values.items():
        *groups, name = path.split(".")
        functools.reduce(dict.__getitem__, groups, mapping)[name] = value
    return from_mapping(ArenaTrainConfig, mapping)


def trained(change: str, seed: int, options: argparse.Namespace) -> Record:
    """Train once, and return the scores of the last weights."""
    config, device = settings(change, seed, options), torch.device(options.device)
    with prepare_arena(config) as (ppo, _):
        began = now(device)
        ppo.learn(options.steps)
        seconds = round(now(device) - began, 1)
        return {**key(change, seed, options), "steps": ppo.step, "seconds": seconds, "scores": scores(ppo.policy, config, options)}


def key(change: str, seed: int, options: argparse.Namespace) -> Record:
    """Return what distinguishes the record of a training. Its `steps` may exceed the requested ones, because updates are whole."""
    names = ("scenario", "battles", "precision", "device", "eval_battles", "eval_seed")
    return {"change": change, "seed": seed, "requested_steps": options.steps, **{name: getattr(options, name) for name in names}}


def scores(policy: Policy, config: ArenaTrainConfig, options: argparse.Namespace) -> dict[str, float]:
    """Return the score against each opponent, draws half."""
    if options.scenario:
        scenario = find_scenario(options.scenario)
        test = msgspec.structs.replace(scenario.test_arena(options.eval_battles), state_view=config.arena.state_view)
        arena = MatchArena(test, seed=scenario.test_seed, device=policy.device)
        return {bot: arena.play(policy, bot).record.score for bot in scenario.opponents}
    arena = evaluation_arena(config, options.eval_battles, options.eval_seed, policy.device)
    return {bot: arena.play(policy, bot).record.score for bot in OPPONENTS}


Scores = dict[tuple[str, int], dict[str, float]]  # against each opponent, by change and seed


def read_scores(paths: list[Path]) -> dict[str, Scores]:
    """Return the scores by title: the scenario, or "" without one. Battles and steps are part of the title where they differ."""
    found: dict[tuple[str, int, int], Scores] = {}
    for record in (json.loads(line) for path in paths for line in path.read_text().splitlines()):
        if "change" in record:
            setting = record["scenario"] or "", record["battles"], record["steps"]
            found.setdefault(setting, {})[record["change"], record["seed"]] = record["scores"]
    names = [name for name, _, _ in found]
    return {
        name if names.count(name) == 1 else f"{name or '2 against 2'}, {battles:,} battles, {steps:,} steps": scored
        for (name, battles, steps), scored in found.items()
    }


def opponents_in(found: Scores) -> list[str]:
    return list(dict.fromkeys(bot for scored in found.values() for bot in scored))


def print_table(found: Scores) -> None:
    """Print the score of each seed, the mean, and the difference of the mean to all parts, paired over seeds, with a 95 % interval."""
    bots = opponents_in(found)
    print("| | " + " | ".join(f"{bot}: seeds | mean | difference" for bot in bots) + " |")
    print("|---" * (1 + 3 * len(bots)) + "|")
    for change in CHANGES:
        seeds = sorted(seed for name, seed in found if name == change and (ALL, seed) in found)
        if not seeds:
            continue
        cells = []
        for bot in bots:
            scored = [100 * found[change, seed][bot] for seed in seeds]
            cells += [" ".join(f"{score:.0f}" for score in scored), f"{statistics.mean(scored):.1f} %"]
            differences = [score - 100 * found[ALL, seed][bot] for score, seed in zip(scored, seeds, strict=True)]
            if change == ALL or len(seeds) < 2:
                cells.append("")
            else:
                interval = student_interval(differences)
                cells.append(f"{statistics.mean(differences):+.1f} [{interval.low:+.1f}, {interval.high:+.1f}]")
        print(f"| {change} | " + " | ".join(cells) + " |")


def draw(scenarios: dict[str, Scores], path: Path) -> None:
    """Draw the score of every training as a point, and the mean of each change as a line. Each scenario has a row of panels."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    changes = [change for change in CHANGES if any(change == name for found in scenarios.values() for name, _ in found)]
    bots = list(dict.fromkeys(bot for found in scenarios.values() for bot in opponents_in(found)))
    size = 2.2 + 2.6 * len(bots), (0.9 + 0.3 * len(changes)) * len(scenarios)
    figure, panels = plt.subplots(len(scenarios), len(bots), sharey=True, squeeze=False, figsize=size, layout="constrained")
    for (scenario, found), row_of_panels in zip(scenarios.items(), panels, strict=True):
        for axes, bot in zip(row_of_panels, bots, strict=True):
            for row, change in enumerate(changes):
                points = [100 * scored[bot] for (name, _), scored in found.items() if name == change and bot in scored]
                if points:
                    color = "tab:blue" if change == ALL else "tab:orange"
                    axes.plot(points, [row] * len(points), "o", color=color, alpha=0.6, markersize=5)
                    axes.plot([statistics.mean(points)] * 2, [row - 0.35, row + 0.35], color=color, linewidth=2)
            title = f"{scenario}: against {bot}" if scenario else f"against {bot}"
            axes.set(title=title, xlim=(-3, 103), yticks=range(len(changes)), yticklabels=changes)
            axes.grid(axis="x", alpha=0.3)
    for axes in panels[-1]:
        axes.set_xlabel("score, % (draws half)")
    panels[0][0].invert_yaxis()
    figure.savefig(path, dpi=110)


def part(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not 0 <= int(number) < int(count):
        raise argparse.ArgumentTypeError(f"expected a part such as 0/2 or 1/2, got {text}")
    return int(number), int(count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--scenario", default=None, choices=list(SCENARIOS))
    parser.add_argument("--battles", type=int, default=256)
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--steps", type=int, default=2_000_000, help="of learning units, alive or not, in each training")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--changes", nargs="*", default=list(CHANGES), choices=list(CHANGES))
    parser.add_argument("--part", type=part, default=(0, 1), help="do the trainings of one of several processes: 0/2 and 1/2 are halves")
    parser.add_argument("--eval-battles", type=int, default=512)
    parser.add_argument("--eval-seed", type=int, default=9)
    parser.add_argument("--output", type=Path, default=Path("arena_learning.jsonl"))
    parser.add_argument("--table", type=Path, nargs="*", default=None, help="train nothing, and print the table of these records")
    parser.add_argument("--plot", type=Path, default=None, help="with --table, draw a picture of all trainings into this file")
    options = parser.parse_args()
    if options.table is not None:
        scenarios = read_scores(options.table)
        for scenario, found in scenarios.items():
            if scenario:
                print(f"\n{scenario}\n")
            print_table(found)
        if options.plot is not None:
            draw(scenarios, options.plot)
        return
    output = Output(options.output, resume=True)
    number, count = options.part
    jobs = list(itertools.product(range(options.seeds), options.changes))  # seed by seed, so that what is interrupted can be compared
    for seed, change in jobs[number::count]:
        if not any(key(change, seed, options).items() <= record.items() for record in output.earlier):
            output.write(trained(change, seed, options))


if __name__ == "__main__":
    main()
