"""`esper ppo train` trains a policy in a new run, or goes on with a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import tyro

from esper.cli.command import CommandError, CommandResult, failures, how_to_resume, in_group, print_profile, show_plan
from esper.cli.parse import parse, saved_config, settings_of, take_option, train_defaults
from esper.config import Config, NonNegativeInt, PositiveInt, load_saved
from esper.rl.run_config import PRESETS, EnvValue, TrainConfig, TrainSeedsConfig
from esper.runs.folder import CONFIG
from esper.runs.foreign import quoted
from esper.runs.seeds import SEEDS, holds_seeds, seeds_begun
from esper.runs.signals import StopSignals

if TYPE_CHECKING:
    from esper.parallel import Group
    from esper.rl.training import RunResult


def parse_env_args(words: list[str]) -> dict[str, EnvValue]:
    """Parse words of the form KEY=VALUE."""
    pairs = [word.partition("=") for word in words]
    wrong = [key for key, sign, _ in pairs if not (key and sign)]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is not of the form KEY=VALUE")
    return {key: _env_value(text) for key, _, text in pairs}


def _env_value(text: str) -> EnvValue:
    """Parse JSON and Python's True, False and None; return other text as it is."""
    if text in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[text]
    try:
        value: EnvValue = json.loads(text)
    except json.JSONDecodeError:
        return text
    return value


_ENV_ARGS = tyro.constructors.PrimitiveConstructorSpec[dict[str, EnvValue]](
    nargs="*",
    metavar="KEY=VALUE",
    instance_from_str=parse_env_args,
    is_instance=lambda value: isinstance(value, dict),
    str_from_instance=lambda value: [f"{key}={json.dumps(item)}" for key, item in value.items()],
)
PRESET_HELP = f"environment and settings of a classic task: {', '.join(PRESETS)}; what else is given changes them"
_Flag = tyro.conf.FlagCreatePairsOff[bool]


class FileConfig(TrainConfig):
    """Settings in a TOML file, which may leave the environment to the command line."""

    env: str = ""


class TrainArguments(FileConfig):
    env: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ENV_ID", help_behavior_hint="")] = ""
    """a built-in environment (esper ppo envs), a Gymnasium id, package.module:id, or package.module:function of your own; not needed with
    --resume"""
    env_args: Annotated[dict[str, EnvValue], _ENV_ARGS] = {}
    """keywords for the environment, such as delay=20"""
    run: Path | None = None
    """folder of the run; None: runs/<environment>-<time>"""
    config: Path | None = None
    """TOML file with values for any of the options below"""
    preset: Annotated[str | None, tyro.conf.arg(metavar="NAME", help=PRESET_HELP)] = None
    resume: _Flag = False
    """go on with the run in --run, as it was configured"""
    seeds: PositiveInt | None = None
    """train so many runs, in folders seed-N inside the run folder; their seeds are --seed, the next, and so on"""
    profile: NonNegativeInt = 0
    """profile this many updates after a warm-up: a trace in the run folder and a table of the shares of time; 0: none"""
    dry_run: _Flag = False
    """say what would be done, and touch nothing"""


def defaults_for(argv: list[str]) -> TrainArguments:
    """Return the values that the options start from: a preset, those of a resumed run, of a TOML file, or the defaults."""
    words = list(argv)
    preset = take_option(words, "--preset")
    if preset is None:
        return train_defaults(TrainArguments, TrainConfig, words, saved=_saved_config, file_type=FileConfig)
    is_alone = take_option(words, "--config") is None and "--resume" not in words
    base = _preset(preset, is_alone=is_alone)
    return TrainArguments(**{name: getattr(base, name) for name in TrainConfig.__struct_fields__})


def _saved_config(folder: str | None, path: str | None) -> Config:
    if folder is not None and path is None and holds_seeds(Path(folder)):
        return load_saved(TrainSeedsConfig, Path(folder) / SEEDS)
    return saved_config(TrainConfig, "ppo", folder, path)


def _preset(name: str, *, is_alone: bool) -> TrainConfig:
    """Return a preset by name. `is_alone` says that neither --config nor --resume was given."""
    if not is_alone:
        raise CommandError("--preset sets what --config and --resume read from a file; give one of them")
    if name not in PRESETS:
        raise CommandError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]


DESCRIPTION = """Trains a recurrent policy and keeps everything in a run folder.

Values come from the defaults, then from --config FILE.toml or --preset NAME, then from the command line. The path of an option may be left
out where its last name is unique: --seed for --ppo.seed, --hidden-size for --ppo.network.hidden-size.

Several processes, each with --num-envs environments and, where there are, a GPU of its own, train one policy together:
  torchrun --nproc-per-node 2 --no-python -- esper ppo train ENV_ID ..."""


def run(argv: list[str], prog: str) -> CommandResult:
    arguments = parse(TrainArguments, argv, prog, default=defaults_for(argv), description=DESCRIPTION)
    if not arguments.env:
        raise CommandError(f"name an environment: {prog} ENV_ID (esper ppo envs lists them)")
    config = settings_of(arguments, TrainConfig)
    with in_group(config.device) as group:
        if arguments.dry_run:
            return _dry_run(config, group)
        is_many = arguments.seeds is not None or (arguments.resume and arguments.run is not None and holds_seeds(arguments.run))
        return _train_seeds(config, arguments, group) if is_many else _train(config, arguments, group)


def _dry_run(config: TrainConfig, group: Group) -> CommandResult:
    from esper.rl.run_setup import count_parameters, prepare

    learner = config.ppo
    sequences = learner.num_steps // learner.sequence_length * config.num_envs / learner.minibatches_of(config.num_envs)
    with prepare(config, group=group) as (ppo, _):
        plan = {
            "env": config.env,
            "device": str(ppo.device),
            "parameters": count_parameters(ppo.policy),
            "steps_per_update": ppo.steps_per_update,
            "updates": -(-config.total_steps // ppo.steps_per_update),
            "minibatch": f"{sequences:g} sequences of {learner.sequence_length} steps",
        }
    return show_plan(config, plan)


def _train(config: TrainConfig, arguments: TrainArguments, group: Group) -> CommandResult:
    from esper.cli.ppo_progress import PPOProgress
    from esper.cli.progress import progress_sink
    from esper.rl.training import shared_folder, train_run

    with shared_folder(arguments.run, config.env, group) as folder:
        stop = StopSignals()
        options: dict[str, Any] = {
            "sinks": [progress_sink(PPOProgress())],
            "should_stop": stop.was_asked,
            "group": group,
            "profile": arguments.profile,
        }
        with failures(folder, "ppo train", FloatingPointError), stop:
            result = train_run(config, folder, resume=arguments.resume, **options)
        _print_summary(result)
        print_profile(result.profile)
        return CommandResult(_as_json(result), stop.exit_code if result.status == "stopped" else 0)


def _train_seeds(base: TrainConfig, arguments: TrainArguments, group: Group) -> CommandResult:
    """Train with several seeds, one run after another."""
    from esper.runs.folder import chosen_folder

    if arguments.profile:
        raise CommandError("--profile profiles one run; leave out --seeds")
    if group.world_size > 1:
        raise CommandError("--seeds trains one run after another in one process; leave out torchrun, or --seeds")
    with chosen_folder(arguments.run, base.env) as folder:
        return _train_seeds_in(folder, base, arguments, group)


def _train_seeds_in(folder: Path, base: TrainConfig, arguments: TrainArguments, group: Group) -> CommandResult:
    from esper.cli.ppo_progress import PPOProgress
    from esper.cli.progress import progress_sink
    from esper.cli.seeds import train_seeds
    from esper.rl.training import ENVIRONMENT, check_changes, train_run

    saved, stop = None, StopSignals()
    values = {name: getattr(base, name) for name in TrainConfig.__struct_fields__}
    if arguments.resume:
        if not holds_seeds(folder):
            raise CommandError(f"{folder} is one run and not several seeds; go on with it without --seeds")
        saved = load_saved(TrainSeedsConfig, folder / SEEDS)
    config = TrainSeedsConfig(**values, seeds=arguments.seeds or (saved.seeds if saved is not None else 1))
    if saved is not None:
        check_changes(saved, config, (*ENVIRONMENT.changeable, "seeds"))

    def train_one(seed: int, own: Path) -> str:
        of_seed = msgspec.structs.replace(base, ppo=msgspec.structs.replace(base.ppo, seed=seed))
        with failures(own, "ppo train", FloatingPointError):
            has_begun = (own / CONFIG).is_file()
            options: dict[str, Any] = {"sinks": [progress_sink(PPOProgress())], "should_stop": stop.was_asked, "group": group}
            return train_run(of_seed, own, resume=has_begun, **options).status

    seeds = range(base.ppo.seed, base.ppo.seed + config.seeds)
    with seeds_begun(folder, config, saved, count=lambda config: config.seeds), stop:
        return train_seeds(folder, seeds, train_one, command="ppo train", stop=stop, figures=())


def _print_summary(result: RunResult) -> None:
    folder = quoted(result.folder)
    if result.status == "had finished":
        print(f"{folder} had already finished its {result.step:,} steps; ask for more with --total-steps")
        return
    print(f"{result.status} after {result.step:,} steps in {result.seconds:.1f} s")
    print(f"mean return of the last episodes  {result.mean_return:.3f}  ({min(result.episodes, 100)} episodes)")
    if result.evaluation is not None:
        print(f"best policy on fresh episodes     {result.evaluation.mean_return:.3f}  ({len(result.evaluation.returns)} episodes)")
    print(f"run folder                        {folder}")
    if result.status == "stopped":
        print(f"a checkpoint is saved; {how_to_resume('ppo train', result.folder)}")
    else:
        print(f"evaluate again with               esper ppo eval {folder}")


def _as_json(result: RunResult) -> dict[str, Any]:
    evaluation = result.evaluation
    return {
        "status": result.status,
        "run": str(result.folder),
        "step": result.step,
        "seconds": round(result.seconds, 3),
        "episodes": result.episodes,
        "mean_return": result.mean_return,
        "mean_length": result.mean_length,
        "evaluation": None
        if evaluation is None
        else {"episodes": len(evaluation.returns), "mean_return": evaluation.mean_return, "mean_length": evaluation.mean_length},
    }
