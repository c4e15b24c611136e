"""`esper controller train` trains a controller in a new run, or goes on with a run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from esper.cli.command import CommandError, CommandResult, failures, how_to_resume, in_group, print_profile, show_plan
from esper.cli.parse import gather_option, parse, saved_config, settings_of, train_defaults
from esper.config import NonNegativeInt
from esper.controller.config import QUICK, ControllerConfig
from esper.runs.foreign import quoted
from esper.runs.signals import StopSignals

if TYPE_CHECKING:
    from esper.cli.controller_progress import ControllerProgress
    from esper.parallel import Group
    from esper.rl.training import RunResult


_Flag = tyro.conf.FlagCreatePairsOff[bool]


class ControllerArguments(ControllerConfig):
    run: Path | None = None
    """folder of the run; None: runs/controller-<time>"""
    config: Path | None = None
    """TOML file with values for any of these options"""
    resume: _Flag = False
    """go on with the run in --run, as it was configured; --rounds may ask for more"""
    profile: NonNegativeInt = 0
    """profile this many updates after a warm-up: a trace in the run folder and a table of the shares of time; 0: none"""
    quick: _Flag = False
    """begin with the settings of a training of minutes: short trainings of small hosts on digits"""
    dry_run: _Flag = False
    """say what would be done, and touch nothing"""

    def settings(self) -> ControllerConfig:
        """Return the settings that are saved with the run."""
        return settings_of(self, ControllerConfig)


def train_words(argv: list[str]) -> list[str]:
    """Replace short options: `--source`, once for each source of data, means `--domain.sources`, and `--seed` means `--ppo.seed`.

    >>> train_words(["--source", "digits", "--seed=3", "--source=teacher"])
    ['--ppo.seed=3', '--domain.sources', 'digits', 'teacher']
    """
    words = ["--ppo.seed" + word.removeprefix("--seed") if word == "--seed" or word.startswith("--seed=") else word for word in argv]
    return gather_option(words, "--source", "--domain.sources")


DESCRIPTION = """Trains a controller, which decides when and how networks grow, and keeps everything in a run folder.

  esper controller train --rounds 100
  esper controller train --quick                        a curve that rises, in minutes on two cores
  esper grow --task digits --controller runs/controller-.../controller.safetensors

A round is the whole lives of --hosts small networks, drawn anew each time: data, label noise, architecture, size, optimiser, length and
rent differ (--domain.*); what a domain leaves out is held out. Each network is compared with a twin that has the same first weights and
data, and grows as the policy is advised. The policy begins by doing the same. It is paid, at the end of a life, for a lower validation loss
and rent than the twin's, and then learns from all lives of the round by PPO.

The advice is that of the heuristic; with --start learned or --start FILE, that of the ensemble in the controller file, if it has one, and
the training goes on from its policy, if it has one. A checkpoint is written after every --checkpoint-every rounds and after the last one,
and with it the controller file. Ctrl-C stops with a checkpoint after the round, which may take minutes; a second one stops at once.

Values come from the defaults, then from --config FILE.toml, then from the command line. The path of an option may be left out where its
last name is unique: --label-noise for --domain.label-noise; --source, once for each, stands for --domain.sources, and --seed for
--ppo.seed.

Several processes, each with --hosts hosts and, where there are, a GPU of its own, train one controller together:
  torchrun --nproc-per-node 2 --no-python -- esper controller train ..."""


def run(argv: list[str], prog: str) -> CommandResult:
    words = train_words(argv)
    arguments = parse(
        ControllerArguments,
        words,
        prog,
        default=_defaults(words),
        description=DESCRIPTION,
    )
    config = arguments.settings()
    with in_group(config.device) as group:
        return _dry_run(config, group) if arguments.dry_run else _train(config, arguments, group)


def _defaults(words: list[str]) -> ControllerArguments:
    """Return the values that the options start from: those of `--quick`, a resumed run, a TOML file, or the defaults."""
    if "--quick" not in words:
        return train_defaults(ControllerArguments, ControllerConfig, words, saved=partial(saved_config, ControllerConfig, "controller"))
    if other := next((word for word in words if word in ("--resume", "--config")), None):
        raise CommandError(f"--quick is for new runs; leave {other} out, or --quick")
    return ControllerArguments(**{name: getattr(QUICK, name) for name in ControllerConfig.__struct_fields__})


def _dry_run(config: ControllerConfig, group: Group) -> CommandResult:
    from esper.controller.training import prepare_controller
    from esper.rl.run_setup import count_parameters

    with prepare_controller(config, group) as (ppo, _):
        plan = {
            "device": str(ppo.device),
            "parameters": count_parameters(ppo.policy),
            "rounds": config.rounds,
            "lives_per_round": ppo.steps_per_update,
            "fleets": min(config.fleets, config.hosts),
        }
    return show_plan(config, plan)


def _train(config: ControllerConfig, arguments: ControllerArguments, group: Group) -> CommandResult:
    from esper.cli.controller_progress import ControllerProgress, read_progress
    from esper.cli.progress import progress_sink
    from esper.controller.training import CONTROLLER, train_controller
    from esper.fleet.config import FleetError
    from esper.growth.config import GrowthError
    from esper.rl.training import shared_folder

    with shared_folder(arguments.run, "controller", group) as folder:
        stop = StopSignals("round of lives, which may take minutes")
        options: dict[str, Any] = {
            "sinks": [progress_sink(ControllerProgress())],
            "should_stop": stop.was_asked,
            "group": group,
            "profile": arguments.profile,
        }
        with failures(folder, "controller train", FloatingPointError, FleetError, GrowthError), stop:
            result = train_controller(config, folder, resume=arguments.resume, **options)
            progress = group.first(lambda: read_progress(folder))
        controller = result.folder / CONTROLLER
        _print_summary(result, controller, progress, config)
        print_profile(result.profile)
        return CommandResult(_as_json(result, controller, progress), stop.exit_code if result.status == "stopped" else 0)


def _print_summary(result: RunResult, controller: Path, progress: ControllerProgress, config: ControllerConfig) -> None:
    from esper.fleet.memory import in_words

    folder, path = quoted(result.folder), quoted(controller)
    if result.status == "had finished":
        print(f"{folder} had already finished its {config.rounds} rounds; ask for more with --rounds")
    else:
        print(f"{result.status} after {progress.rounds}, {result.step:,} lives, in {result.seconds:.1f} s")
    print(f"the last hosts   {progress.recent.in_words()}")
    if progress.memory_per_host:
        print(f"memory           up to {in_words(progress.memory_per_host)} for a host")
    if progress.kernels:
        print(f"kernels          {progress.kernels} compiled for this GPU; they are kept for the next run")
    print(f"controller       {path}")
    print(f"grow with it     esper grow --task digits --controller {path}")
    if result.status == "stopped":
        print(f"a checkpoint is saved; {how_to_resume('controller train', result.folder)}")
    else:
        print(f"train it longer  esper controller train --resume --run {folder} --rounds {2 * config.rounds}")


def _as_json(result: RunResult, controller: Path, progress: ControllerProgress) -> dict[str, Any]:
    return {
        "status": result.status,
        "run": str(result.folder),
        "controller": str(controller),
        "lives": result.step,
        "seconds": round(result.seconds, 3),
        "mean_return": result.mean_return,
        **progress.figures(),
    }
