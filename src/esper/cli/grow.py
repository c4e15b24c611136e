"""`esper grow` trains a model and grows it where that pays; `esper grow report` writes the report of a run again."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import tyro

from esper.cli import report
from esper.cli.command import FAILED, USAGE, CommandError, CommandResult, check_run, failures, print_profile, show_plan
from esper.cli.parse import parse, settings_of, train_defaults
from esper.config import NonNegativeInt, PositiveInt, load_saved
from esper.experiment.config import GrowSeedsConfig, GrowTaskConfig
from esper.runs.folder import CONFIG, GROW
from esper.runs.seeds import SEEDS, holds_seeds, seeds_begun
from esper.runs.signals import StopSignals

if TYPE_CHECKING:
    from esper.runs import Sink

_Flag = tyro.conf.FlagCreatePairsOff[bool]


class GrowArguments(GrowTaskConfig):
    augment: _Flag = False
    """disturb the training images of a task that knows how, such as cifar10"""
    twin: _Flag = False
    """train a twin that never grows as well, from the same weights on the same batches"""
    run: Path | None = None
    """folder of the run; None: runs/<task or model>-<time>"""
    config: Path | None = None
    """TOML file with values for any of these options"""
    resume: _Flag = False
    """go on with the run in --run, as it was configured"""
    seeds: PositiveInt | None = None
    """train so many runs, each with its twin, in folders seed-N inside the run folder; their seeds are --seed, the next, and so on"""
    profile: NonNegativeInt = 0
    """profile this many steps after a warm-up: a trace in the run folder and a table of the shares of time; 0: none"""
    dry_run: _Flag = False
    """say what would be done and where something could grow, and touch nothing"""

    def settings(self) -> GrowTaskConfig:
        """Return the settings that are saved with the run."""
        return settings_of(self, GrowTaskConfig)


def with_long_names(argv: list[str]) -> list[str]:
    """Replace the short option `--raise` by `--lifecycle.raise-mode`.

    >>> with_long_names(["--raise", "shadow", "--raise=joint"])
    ['--lifecycle.raise-mode', 'shadow', '--lifecycle.raise-mode=joint']
    """
    full = "--lifecycle.raise-mode"
    return [full + word.removeprefix("--raise") if word == "--raise" or word.startswith("--raise=") else word for word in argv]


def _saved_config(folder: str | None, path: str | None) -> GrowTaskConfig:
    """Return the config of the run in a folder; `path` is the value of --config, which must not be given."""
    if folder is None:
        raise CommandError("--resume needs the folder of the run: --run RUN")
    if path is not None:
        raise CommandError("--resume reads the config of the run; leave --config out")
    place = Path(folder)
    if holds_seeds(place):
        return load_saved(GrowSeedsConfig, place / SEEDS)
    if (place / CONFIG).exists() or not (place / GROW).exists():  # a run that was killed before CONFIG was written begins anew
        check_run(place, "growth")
    if not (place / GROW).is_file():
        raise CommandError(
            f"the run in {folder} was not started by esper grow: it has no {GROW}. It takes esper report {shlex.quote(folder)}, "
            f"and in Python esper.grow(..., run={folder!r}, resume=True)"
        )
    return load_saved(GrowTaskConfig, place / GROW)


def _defaults(argv: list[str]) -> GrowArguments:
    """Return the values that the options start from."""
    return train_defaults(GrowArguments, GrowTaskConfig, argv, saved=_saved_config)


DESCRIPTION = """Trains a model, grows it where that pays, and keeps everything in a run folder with a report.

  esper grow --task digits                                              a task of esper, with its starved host
  esper grow --model mycode.nets:make_model --data mycode.data:loaders  your own code, from the current folder
  esper grow --task digits --controller learned                         the trained controller that comes with esper decides
  esper grow --task digits --controller runs/.../controller.safetensors what esper controller train has made decides
  esper grow --task digits --seeds 5                                    five runs and their twins, compared over seeds

make_model() gives an nn.Module, loaders() gives (train, validation) or (train, validation, test). The test part is looked at once, when
everything is over. Values come from the defaults, then from --config FILE.toml, then from the command line. The path of an option may be
left out where its last name is unique: --max-seeds for --budget.max-seeds; --raise stands for --lifecycle.raise-mode."""


def run(argv: list[str], prog: str) -> CommandResult:
    words = with_long_names(argv)
    arguments = parse(
        GrowArguments,
        words,
        prog,
        default=_defaults(words),
        description=DESCRIPTION,
    )
    if arguments.task is None and arguments.model is None:
        from esper.tasks import TASKS

        tasks = "; ".join(f"{name} ({entry.title})" for name, entry in TASKS.items())
        raise CommandError(f"name what to grow: --task TASK, or --model and --data of your own. Tasks: {tasks}")
    with _user_errors():
        if arguments.dry_run:
            return _dry_run(arguments.settings())
        is_many = arguments.seeds is not None or (arguments.resume and arguments.run is not None and holds_seeds(arguments.run))
        return _grow_seeds(arguments) if is_many else _grow(arguments)


def _dry_run(config: GrowTaskConfig) -> CommandResult:
    from esper.devices import threads
    from esper.experiment.training import plan

    with threads(config.threads):
        return show_plan(config, *plan(config))


def _grow(arguments: GrowArguments) -> CommandResult:
    from esper.cli.grow_progress import GrowProgress
    from esper.cli.grow_summary import as_json, print_summary
    from esper.cli.progress import progress_sink
    from esper.experiment.training import grow_task, has_begun, run_folder
    from esper.growth.config import GrowthError
    from esper.growth.lifecycle.governor import Diverged

    def show(title: str) -> Sink:
        return progress_sink(GrowProgress(title))

    config, stop = arguments.settings(), StopSignals()
    with (
        run_folder(config, arguments.run) as folder,
        failures(folder, "grow", Diverged, GrowthError, saved=GROW, has_begun=has_begun),
        stop,
    ):
        result = grow_task(config, folder, resume=arguments.resume, make_sink=show, should_stop=stop.was_asked, profile=arguments.profile)
    print_summary(result, config)
    if config.telemetry == "off":
        print("telemetry was off, so summary and report know nothing of the epochs")
    print_profile(result.profile)
    return CommandResult(as_json(result), stop.exit_code if result.status == "stopped" else 0)


def _grow_seeds(arguments: GrowArguments) -> CommandResult:
    """Grow with several seeds, each run with its twin."""
    from esper.cli.grow_progress import GrowProgress
    from esper.cli.progress import progress_sink
    from esper.cli.seeds import train_seeds
    from esper.experiment.training import check_same, grow_task, has_begun, run_folder
    from esper.growth.config import GrowthError
    from esper.growth.lifecycle.governor import Diverged

    if arguments.profile:
        raise CommandError("--profile profiles one run; leave out --seeds")
    base, saved = msgspec.structs.replace(arguments.settings(), twin=True), None
    if arguments.resume:
        assert arguments.run is not None
        if not holds_seeds(arguments.run):
            raise CommandError(f"{arguments.run} is one run and not several seeds; go on with it without --seeds")
        saved = load_saved(GrowSeedsConfig, arguments.run / SEEDS)
        check_same(saved, base, arguments.run)
    count, stop = arguments.seeds or (saved.seeds if saved is not None else 1), StopSignals()

    def train_one(seed: int, folder: Path) -> str:
        config = msgspec.structs.replace(base, seed=seed)
        with failures(folder, "grow", Diverged, GrowthError, saved=GROW, has_begun=has_begun):
            has_settings = (folder / GROW).is_file()
            return grow_task(config, folder, resume=has_settings, make_sink=show, should_stop=stop.was_asked).status

    def show(title: str) -> Sink:
        return progress_sink(GrowProgress(title))

    values = {name: getattr(base, name) for name in GrowTaskConfig.__struct_fields__}
    all_settings, seeds = GrowSeedsConfig(**values, seeds=count), range(base.seed, base.seed + count)
    with (
        run_folder(base, arguments.run) as folder,
        seeds_begun(folder, all_settings, saved, count=lambda config: config.seeds),
        stop,
    ):
        return train_seeds(folder, seeds, train_one, command="grow", stop=stop, figures=("test loss", "test accuracy"))


@contextlib.contextmanager
def _user_errors() -> Iterator[None]:
    """Turn mistakes of the user into a CommandError of one line."""
    from esper.experiment import UserCodeError
    from esper.growth.config import GrowthError
    from esper.runs.folder import RunError
    from esper.tasks import TaskError

    try:
        yield
    except UserCodeError as error:
        raise CommandError(str(error), exit_code=FAILED if error.was_raised else USAGE) from error
    except (GrowthError, RunError, TaskError) as error:
        raise CommandError(str(error)) from error


REPORT_DESCRIPTION = "Writes report.html into the folder of a run, from what happened in it so far."


def run_report(argv: list[str], prog: str) -> CommandResult:
    return report.write(parse(report.ReportArguments, argv, prog, description=REPORT_DESCRIPTION).run, only="growth")
