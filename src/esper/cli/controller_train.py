"""`esper controller train`: a new training of a controller, or a saved one that goes on."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esper.cli.controller_arguments import ControllerArguments, train_defaults, train_words
from esper.cli.failures import failures, how_to_resume
from esper.cli.outcome import Outcome
from esper.cli.parse import parse
from esper.cli.ranks import in_group
from esper.config import describe
from esper.controller.config import ControllerConfig
from esper.runs.signals import StopSignals

if TYPE_CHECKING:
    from esper.cli.controller_progress import Progress
    from esper.parallel import Group
    from esper.rl.training import RunResult

DESCRIPTION = """Trains a controller, which decides when, where and what networks grow, and keeps everything in a run folder.

  esper controller train --task digits --task digits-1d --hosts 64 --rounds 100
  esper grow --task digits --controller runs/controller-.../controller.safetensors

It decides for many small networks at once, drawn anew again and again: tasks, widths, horizons, noise and rents differ (--domain.*). Each
is held against a twin with the same first weights and data that never grows; the controller is paid what growing gained, less the rent. In
a round it makes --num-steps decisions for each host, and then learns from them. Ctrl-C stops after the round, which may take minutes,
with a checkpoint.

Values come from the defaults, then from --config FILE.toml, then from the command line. The path of an option may be left out where its
last name is unique: --steps-per-decision for --fleet.steps-per-decision; --task, once for each, stands for --domain.tasks, and --seed
for --ppo.seed.

Several processes, each with --hosts hosts and, where there are, a GPU of its own, train one controller together:
  torchrun --nproc-per-node 2 --no-python -- esper controller train ..."""


def run(argv: list[str], prog: str) -> Outcome:
    words = train_words(argv)
    arguments = parse(ControllerArguments, words, prog, default=train_defaults(words), description=DESCRIPTION)
    config = arguments.settings()
    with in_group(config.device) as group:
        return _dry_run(config, group) if arguments.dry_run else _train(config, arguments, group)


def _dry_run(config: ControllerConfig, group: Group) -> Outcome:
    from esper.controller.training import prepare_controller
    from esper.rl.run_setup import count_parameters

    with prepare_controller(config, group) as (ppo, _):
        slots, blueprints, _ = ppo.env.observation_spec["candidates"].shape
        plan = {
            "device": str(ppo.device),
            "parameters": count_parameters(ppo.policy),
            "rounds": config.rounds,
            "decisions_per_round": ppo.steps_per_update,
            "most_slots": slots,
            "most_blueprints": blueprints,
        }
    rows = describe(config)
    width = max(len(name) for name, _, _ in rows)
    for name, value, _ in rows:
        print(f"{name:<{width}}  {value}")
    print()
    for name, value in plan.items():
        print(f"{name.replace('_', ' '):<{width}}  {value}")
    return Outcome({"plan": plan, "config": {name: value for name, value, _ in rows}})


def _train(config: ControllerConfig, arguments: ControllerArguments, group: Group) -> Outcome:
    from esper.cli.controller_progress import Progress, read_progress
    from esper.cli.progress import progress_sink
    from esper.controller.training import CONTROLLER, train_controller
    from esper.fleet.config import FleetError
    from esper.growth.config import GrowthError
    from esper.runs.folder import default_folder

    folder = group.first(lambda: arguments.run or default_folder("controller"))
    stop = StopSignals("round of decisions, which may take minutes")
    options: dict[str, Any] = {
        "sinks": [progress_sink(Progress())],
        "should_stop": stop.was_asked,
        "group": group,
    }
    with failures(folder, "controller train", FloatingPointError, FleetError, GrowthError), stop:
        result = train_controller(config, folder, resume=arguments.resume, **options)
        progress = group.first(lambda: read_progress(folder))
    controller = result.folder / CONTROLLER
    _print_summary(result, controller, progress, config)
    return Outcome(_as_json(result, controller, progress), stop.exit_code if result.status == "stopped" else 0)


def _print_summary(result: RunResult, controller: Path, progress: Progress, config: ControllerConfig) -> None:
    from esper.fleet.memory import in_words

    folder, path = shlex.quote(str(result.folder)), shlex.quote(str(controller))
    if result.status == "had finished":
        print(f"{folder} had already finished its {config.rounds} rounds; ask for more with --rounds")
    else:
        print(f"{result.status} after {progress.rounds}, {result.step:,} decisions, in {result.seconds:.1f} s")
    print(f"the last hosts   {progress.recent.in_words()}")
    if progress.memory_per_host:
        print(f"memory           up to {in_words(progress.memory_per_host)} for a host")
    if progress.kernels:
        print(f"kernels          {progress.kernels} compiled for this GPU; they are kept for the next run")
    print(f"controller       {path}")
    print(f"grow with it     esper grow --task {config.domain.tasks[0]} --controller {path}")
    if result.status == "stopped":
        print(f"a checkpoint is saved; {how_to_resume('controller train', result.folder)}")
    else:
        print(f"train it longer  esper controller train --resume --run {folder} --rounds {2 * config.rounds}")


def _as_json(result: RunResult, controller: Path, progress: Progress) -> dict[str, Any]:
    return {
        "status": result.status,
        "run": str(result.folder),
        "controller": str(controller),
        "decisions": result.step,
        "seconds": round(result.seconds, 3),
        "mean_return": result.mean_return,
        **progress.figures(),
    }
