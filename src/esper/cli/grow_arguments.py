"""The options of `esper grow`, and where they start from."""

from __future__ import annotations

import shlex
from pathlib import Path

import tyro

from esper.cli.failures import check_run
from esper.cli.grow_config import GrowTaskConfig
from esper.cli.outcome import CommandError
from esper.cli.parse import settings_of, take_option
from esper.config import load, load_saved
from esper.runs.folder import CONFIG, GROW

SAVED = GROW
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
    dry_run: _Flag = False
    """say what would be done and where something could grow, and touch nothing"""

    def settings(self) -> GrowTaskConfig:
        """What is saved with the run."""
        return settings_of(self, GrowTaskConfig)


def with_long_names(argv: list[str]) -> list[str]:
    """`--raise` is short for what only the configuration needs to call `lifecycle.raise_mode`.

    >>> with_long_names(["--raise", "shadow", "--raise=joint"])
    ['--lifecycle.raise-mode', 'shadow', '--lifecycle.raise-mode=joint']
    """
    full = "--lifecycle.raise-mode"
    return [full + word.removeprefix("--raise") if word == "--raise" or word.startswith("--raise=") else word for word in argv]


def defaults_for(argv: list[str]) -> GrowArguments:
    """What the options start from: the saved config of a run that is resumed, a TOML file, or nothing."""
    words = list(argv)
    path, folder = take_option(words, "--config"), take_option(words, "--run")
    if "--resume" in words:
        base = _saved_config(folder, path)
    elif path is not None:
        base = load(GrowTaskConfig, path)
    else:
        return GrowArguments()
    return GrowArguments(**{name: getattr(base, name) for name in GrowTaskConfig.__struct_fields__})


def _saved_config(folder: str | None, path: str | None) -> GrowTaskConfig:
    if folder is None:
        raise CommandError("--resume needs the folder of the run: --run RUN")
    if path is not None:
        raise CommandError("--resume reads the config of the run; leave --config out")
    place = Path(folder)
    if (place / CONFIG).exists() or not (place / SAVED).exists():  # a run that was killed between the two files begins from the start
        check_run(place, "growth")
    if not (place / SAVED).is_file():
        raise CommandError(
            f"the run in {folder} was not started by esper grow: it has no {SAVED}. It takes esper grow report {shlex.quote(folder)}, "
            f"and in Python esper.grow(..., run={folder!r}, resume=True)"
        )
    return load_saved(GrowTaskConfig, place / SAVED)
