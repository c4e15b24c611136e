"""`esper arena train` trains a player by self-play in a new run, or goes on with a run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import tyro

from esper.arena.scenarios import Scenario, find_scenario
from esper.cli.arena_battles import memory_errors, user_errors
from esper.cli.command import OK, CommandError, CommandResult, failures, how_to_resume, in_group, print_profile, show_plan
from esper.cli.parse import parse, saved_config, settings_of, short_names, take_option, train_defaults
from esper.config import NonNegativeInt, describe
from esper.league.config import ArenaTrainConfig
from esper.runs.foreign import quoted
from esper.runs.signals import StopSignals
from esper.text_table import did_you_mean

if TYPE_CHECKING:
    from esper.cli.arena_progress import ArenaProgress
    from esper.league.record import WinRecord
    from esper.league.selfplay import SelfPlay
    from esper.parallel import Group
    from esper.rl.evaluate import PolicyEvaluation
    from esper.rl.training import RunResult


_ALIASES = ("size", "gamma")  # options that `train_words` replaces
_Flag = tyro.conf.FlagCreatePairsOff[bool]


class ArenaArguments(ArenaTrainConfig):
    run: Path | None = None
    """folder of the run; None: runs/arena-<teams>-<time>"""
    config: Path | None = None
    """TOML file with values for any of these options"""
    scenario: str | None = None
    """settings of the arena from a scenario: 2v2-open-v1 or 5v5-city-v1; other options change them"""
    resume: _Flag = False
    """go on with the run in --run and its settings; --total-steps and --minutes, which count the whole training, may ask for more"""
    profile: NonNegativeInt = 0
    """profile this many updates after a warm-up: a trace in the run folder and a table of the shares of time; 0: none"""
    dry_run: _Flag = False
    """say what would be done, and touch nothing"""

    def settings(self) -> ArenaTrainConfig:
        """Return the settings that are saved with the run."""
        return settings_of(self, ArenaTrainConfig)


def check_options(argv: list[str], prog: str) -> None:
    """Raise CommandError for an unknown option, and name the nearest known one."""
    short = short_names(ArenaArguments)
    known = {path.replace("_", "-") for path, _, _ in describe(ArenaArguments())} | set(short) | set(_ALIASES) | {"help"}
    for word in argv:
        name = word.partition("=")[0].removeprefix("--").replace("_", "-")
        if not word.startswith("--") or name in known or name.replace("no-", "", 1) in known:
            continue
        raise CommandError(f"there is no option --{name}; {did_you_mean(name, known, before='--', otherwise=f'see: {prog} --help')}")


def train_words(argv: list[str]) -> list[str]:
    """Replace short options: `--size` is that of the map; `--gamma` sets that of the learner and of the reward, which must be the same.

    >>> train_words(["--size", "32", "--gamma=0.98"])
    ['--arena.size', '32', '--ppo.gamma', '0.98', '--arena.reward.gamma', '0.98']
    """
    words = ["--arena.size" + word.removeprefix("--size") if word == "--size" or word.startswith("--size=") else word for word in argv]
    gamma = take_option(words, "--gamma")
    return words if gamma is None else [*words, "--ppo.gamma", gamma, "--arena.reward.gamma", gamma]


DESCRIPTION = """Trains a player for team battles against scripted bots, past selves and itself, and keeps everything in a run folder.

  esper arena train --scenario 2v2-open-v1 --minutes 3
  esper arena train --team-size 3 --size 48 --minutes 30
  esper arena train --device cuda --team-size 5 --battles 4096 --minutes 10
  esper arena eval runs/arena-... --against strong

One policy drives every unit of its side. In --bot-share of the battles it fights scripted bots, in --past-share past selves from its
league, drawn by how hard they are, and in the others itself, where both sides learn. Sides are swapped from battle to battle.

A copy of the player is sent to the league every --enter-every updates. It stays if it beats the best member: the lower end of the 95 %
interval of its score, on maps that no training uses, must be at least --promote-at. At every checkpoint the player fights --eval-battles
battles against --eval-against, and the checkpoint with the best score is kept as the best; one battle of each evaluation is recorded, and
esper watch plays the newest one. A step is one decision of one unit that learns, whether it lives or not. Ctrl-C stops after the update,
with a checkpoint.

Players can meet if they observe the same numbers of contacts and allies: 5 and 4, unless --contacts, --allies or --scenario say otherwise.

Values come from the defaults, then from --config FILE.toml, then from the command line. The path of an option may be left out where its
last name is unique: --battles for --arena.battles, --learning-rate for --ppo.learning-rate; --size is that of the map, and --gamma
sets it for learner and reward alike.

Several processes can train one player together. Each has --battles battles of its own, and a GPU of its own if there are enough:
  torchrun --nproc-per-node 2 --no-python -- esper arena train ..."""


def run(argv: list[str], prog: str) -> CommandResult:
    check_options(argv, prog)
    words = train_words(argv)
    scenario = _scenario(words)
    default = train_defaults(ArenaArguments, ArenaTrainConfig, words, saved=partial(saved_config, ArenaTrainConfig, "arena"))
    if scenario is not None:
        default = msgspec.structs.replace(default, arena=msgspec.structs.replace(scenario.arena, battles=default.arena.battles))
    arguments = parse(ArenaArguments, words, prog, default=default, description=DESCRIPTION)
    config = arguments.settings()
    if scenario is not None and scenario.is_test_seed(config.ppo.seed):
        raise CommandError(
            f"--seed {config.ppo.seed} makes the test maps of {scenario.name}, which nobody may train on; choose another one"
        )
    with in_group(config.device) as group, memory_errors(config.arena):
        return _dry_run(config, arguments, group) if arguments.dry_run else _train(config, arguments, group)


def _scenario(words: list[str]) -> Scenario | None:
    """Return the scenario that the options name, or None."""
    name = take_option(list(words), "--scenario")
    if name is None:
        return None
    given = [word for word in words if word.partition("=")[0] in ("--config", "--resume")]
    if given:
        raise CommandError(f"--scenario and {given[0].partition('=')[0]} both set the arena; leave one out")
    try:
        return find_scenario(name)
    except ValueError as error:
        raise CommandError(str(error)) from error


def _dry_run(config: ArenaTrainConfig, arguments: ArenaArguments, group: Group) -> CommandResult:
    from esper.league.selfplay import SelfPlay
    from esper.league.training import ARENA, prepare_arena
    from esper.rl.run_setup import count_parameters
    from esper.rl.training import check_start

    with user_errors():
        check_start(ARENA, config, arguments.run, resume=arguments.resume)
    with prepare_arena(config, group, begins=not arguments.resume) as (ppo, _):
        assert isinstance(ppo.env, SelfPlay)
        plan = {
            "device": str(ppo.device),
            "parameters": count_parameters(ppo.policy),
            "units_that_learn": ppo.env.num_envs,
            "battles_against": _battles_by_opponent(ppo.env),
            "steps_per_update": ppo.steps_per_update,
            "updates" if config.minutes is None else "most_updates": -(-config.total_steps // ppo.steps_per_update),
        }
    return show_plan(config, plan)


def _battles_by_opponent(env: SelfPlay) -> dict[str, int]:
    """Return the number of battles against bots, past selves and itself."""
    from esper.league.opponents import is_slot

    counts: dict[str, int] = {}
    for group, battles in env.groups.items():
        name = "past selves" if is_slot(group) else group
        counts[name] = counts.get(name, 0) + len(battles)
    return counts


def _train(config: ArenaTrainConfig, arguments: ArenaArguments, group: Group) -> CommandResult:
    from esper.cli.arena_progress import ArenaProgress, read_progress
    from esper.cli.progress import progress_sink
    from esper.league.league import LeagueError
    from esper.league.training import train_arena
    from esper.rl.training import shared_folder

    with shared_folder(arguments.run, f"arena-{config.arena.team_size}v{config.arena.team_size}", group) as folder:
        stop = StopSignals("update and the battles of its checkpoint")
        options: dict[str, Any] = {
            "sinks": [progress_sink(ArenaProgress(_members(folder) if arguments.resume else (), bot=config.eval_against))],
            "should_stop": stop.was_asked,
            "group": group,
            "profile": arguments.profile,
        }
        with failures(folder, "arena train", FloatingPointError, LeagueError), stop:
            result = train_arena(config, folder, resume=arguments.resume, **options)
            progress = group.first(lambda: read_progress(folder))
        record = None if result.evaluation is None else _record(result.evaluation)
        _print_summary(result, record, progress, config)
        print_profile(result.profile)
        return CommandResult(_as_json(result, record, progress, config), stop.exit_code if result.status == "stopped" else OK)


def _members(folder: Path) -> tuple[str, ...]:
    """Return the members of the league of a resumed run, by its files. The league that it really goes on with is in the checkpoint."""
    from esper.league.league import LeagueError
    from esper.league.store import FOLDER, LeagueStore

    try:
        return LeagueStore(folder / FOLDER).load(with_weights=False).members
    except LeagueError:
        return ()


def _record(evaluation: PolicyEvaluation) -> WinRecord:
    from esper.league.record import WinRecord

    return WinRecord.of_pairs(evaluation.returns)


def _print_summary(result: RunResult, record: WinRecord | None, progress: ArenaProgress, config: ArenaTrainConfig) -> None:
    folder = quoted(result.folder)
    if result.status == "had finished":
        if config.minutes is None or result.step >= config.total_steps:
            print(f"{folder} has done its {result.step:,} steps; ask for more with --total-steps")
        else:
            used = f"{folder} has used its {config.minutes:g} minutes, in {result.step:,} steps"
            print(f"{used}; ask for more with --minutes, which counts the whole training")
    else:
        print(f"{result.status} after {progress.updates}, {result.step:,} steps, in {result.seconds:.1f} s")
    print(f"in training      {progress.against}")
    if record is not None:
        print(f"best player      against {config.eval_against} {record.in_words()}")
    print(f"league           {progress.league}: esper arena league {folder}")
    print(f"run folder       {folder}")
    if result.status == "stopped":
        print(f"a checkpoint is saved; {how_to_resume('arena train', result.folder)}")
    if result.status != "stopped":
        print(f"how good is it   esper arena eval {folder} --against {config.eval_against}")
        print(f"see it fight     esper arena eval {folder} --battles 16 --replay {folder} && esper arena watch {folder}")


def _as_json(result: RunResult, record: WinRecord | None, progress: ArenaProgress, config: ArenaTrainConfig) -> dict[str, Any]:
    from esper.cli.arena_battles import record_json

    return {
        "status": result.status,
        "run": str(result.folder),
        "step": result.step,
        "seconds": round(result.seconds, 3),
        "mean_return": result.mean_return,
        "evaluation": None if record is None else {"against": config.eval_against, **record_json(record)},
        **progress.figures(),
    }
