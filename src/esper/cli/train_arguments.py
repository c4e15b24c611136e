"""The options of `esper ppo train`, and where they start from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import tyro

from esper.cli.failures import check_run
from esper.cli.outcome import CommandError
from esper.cli.parse import take_option
from esper.config import ConfigT, load, load_saved
from esper.rl.run_config import PRESETS, EnvValue, TrainConfig
from esper.runs.folder import CONFIG, Kind


def parse_env_args(words: list[str]) -> dict[str, EnvValue]:
    pairs = [word.partition("=") for word in words]
    wrong = [key for key, sign, _ in pairs if not (key and sign)]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is not of the form KEY=VALUE")
    return {key: _env_value(text) for key, _, text in pairs}


def _env_value(text: str) -> EnvValue:
    """JSON where it is JSON, Python's names for true, false and none, else the text itself."""
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
    """What a TOML file may say; the command line can name the environment instead."""

    env: str = ""


class TrainArguments(FileConfig):
    env: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ENV_ID", help_behavior_hint="")] = ""
    """a built-in environment (esper ppo envs), a Gymnasium id, or package.module:function of your own; not needed with --resume"""
    env_args: Annotated[dict[str, EnvValue], _ENV_ARGS] = {}
    """keywords for the environment, such as delay=20"""
    run: Path | None = None
    """folder of the run; None: runs/<environment>-<time>"""
    config: Path | None = None
    """TOML file with values for any of the options below"""
    preset: Annotated[str | None, tyro.conf.arg(metavar="NAME", help=PRESET_HELP)] = None
    resume: _Flag = False
    """go on with the run in --run, as it was configured"""
    dry_run: _Flag = False
    """say what would be done, and touch nothing"""


def defaults_for(argv: list[str]) -> TrainArguments:
    """What the options start from: the saved config of a run that is resumed, a TOML file, a preset, or nothing."""
    words = list(argv)
    path, folder, preset = (take_option(words, name) for name in ("--config", "--run", "--preset"))
    if preset is not None:
        base: TrainConfig = _preset(preset, is_alone=path is None and "--resume" not in words)
    elif "--resume" in words:
        base = saved_config(TrainConfig, "ppo", folder, path)
    elif path is not None:
        base = load(FileConfig, path)
    else:
        return TrainArguments()
    return TrainArguments(**{name: getattr(base, name) for name in TrainConfig.__struct_fields__})


def _preset(name: str, *, is_alone: bool) -> TrainConfig:
    if not is_alone:
        raise CommandError("--preset sets what --config and --resume read from a file; give one of them")
    if name not in PRESETS:
        raise CommandError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]


def saved_config(config_type: type[ConfigT], kind: Kind, folder: str | None, path: str | None) -> ConfigT:
    """The config of the run in a folder; `path` is what --config says."""
    if folder is None:
        raise CommandError("--resume needs the folder of the run: --run RUN")
    if path is not None:
        raise CommandError("--resume reads the config of the run; leave --config out")
    check_run(Path(folder), kind)
    return load_saved(config_type, Path(folder) / CONFIG)
