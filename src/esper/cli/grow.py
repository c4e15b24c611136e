"""`esper grow`: trains a model and grows it where that pays, on a task of esper or on the user's own code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from esper.cli.failures import failures
from esper.cli.grow_arguments import SAVED, GrowArguments, defaults_for, with_long_names
from esper.cli.grow_config import GrowTaskConfig
from esper.cli.outcome import CommandError, Outcome
from esper.cli.parse import parse
from esper.config import describe
from esper.runs.signals import StopSignals

DESCRIPTION = """Trains a model, grows it where that pays, and keeps everything in a run folder with a report.

  esper grow --task digits                                              a task of esper, with its starved host
  esper grow --model mycode.nets:make_model --data mycode.data:loaders  your own code, from the current folder
  esper grow --task digits --controller runs/.../controller.safetensors what esper controller train has made decides

make_model() gives an nn.Module, loaders() gives (train, validation) or (train, validation, test). The test part is looked at once, when
everything is over. Values come from the defaults, then from --config FILE.toml, then from the command line. The path of an option may be
left out where its last name is unique: --max-seeds for --budget.max-seeds; --raise stands for --lifecycle.raise-mode."""


def run(argv: list[str], prog: str) -> Outcome:
    words = with_long_names(argv)
    arguments = parse(GrowArguments, words, prog, default=defaults_for(words), description=DESCRIPTION)
    if arguments.task is None and arguments.model is None:
        raise CommandError(f"name what to grow: --task TASK, or --model and --data of your own. {_known_tasks()}")
    from esper.devices import determinism, threads

    with threads(arguments.threads), determinism(arguments.deterministic), _mistakes():
        return _dry_run(arguments.settings()) if arguments.dry_run else _grow(arguments)


def _known_tasks() -> str:
    from esper.tasks import TASKS

    return "Tasks: " + "; ".join(f"{name} ({entry.title})" for name, entry in TASKS.items())


def _dry_run(config: GrowTaskConfig) -> Outcome:
    from esper.cli.grow_plan import plan, print_plan
    from esper.devices import find_device

    figures, places = plan(config, find_device(config.device))
    print_plan(config, figures, places)
    return Outcome({"plan": figures, "config": {name: value for name, value, _ in describe(config)}})


def _grow(arguments: GrowArguments) -> Outcome:
    from esper.cli.grow_progress import Progress
    from esper.cli.grow_run import grow_in, has_begun, run_folder
    from esper.cli.grow_summary import as_json, print_summary
    from esper.cli.progress import progress_sink
    from esper.devices import find_device
    from esper.growth.config import GrowthError
    from esper.growth.lifecycle.governor import Diverged
    from esper.runs import Sink

    def show(title: str) -> Sink:
        return progress_sink(Progress(title))

    config, stop = arguments.settings(), StopSignals()
    device = find_device(config.device)
    with (
        run_folder(config, arguments.run) as folder,
        failures(folder, "grow", Diverged, GrowthError, saved=SAVED, has_begun=has_begun),
        stop,
    ):
        result = grow_in(folder, config, resume=arguments.resume, device=device, make_sink=show, should_stop=stop.was_asked)
    print_summary(result, config)
    return Outcome(as_json(result), stop.exit_code if result.status == "stopped" else 0)


@contextlib.contextmanager
def _mistakes() -> Iterator[None]:
    """What the user has to put right, in one line."""
    from esper.growth.config import GrowthError
    from esper.runs.folder import RunError
    from esper.tasks import TaskError

    try:
        yield
    except (GrowthError, RunError, TaskError) as error:
        raise CommandError(str(error)) from error
