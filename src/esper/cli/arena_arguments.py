"""The options of `esper arena train`, and where they start from."""

from __future__ import annotations

import difflib
from pathlib import Path

import tyro

from esper.cli.outcome import CommandError
from esper.cli.parse import settings_of, short_names, take_option
from esper.cli.train_arguments import saved_config
from esper.config import PositiveFloat, describe, load
from esper.league.training_config import ArenaTrainConfig

_ALIASES = ("size", "gamma")  # see `train_words`
_Flag = tyro.conf.FlagCreatePairsOff[bool]


class ArenaArguments(ArenaTrainConfig):
    run: Path | None = None
    """folder of the run; None: runs/arena-<teams>-<time>"""
    config: Path | None = None
    """TOML file with values for any of these options"""
    resume: _Flag = False
    """go on with the run in --run, as it was configured; --total-steps may ask for more"""
    minutes: PositiveFloat | None = None
    """stop after this time, with a checkpoint and a last evaluation. Learning rate and entropy follow --total-steps: set it to what the
    time allows, else they end high"""
    dry_run: _Flag = False
    """say what would be done, and touch nothing"""

    def settings(self) -> ArenaTrainConfig:
        """What is saved with the run."""
        return settings_of(self, ArenaTrainConfig)


def check_options(argv: list[str], prog: str) -> None:
    """An option that there is not is answered with the nearest one, by its short name where it has one."""
    short = short_names(ArenaArguments)
    known = {path.replace("_", "-") for path, _, _ in describe(ArenaArguments())} | set(short) | set(_ALIASES) | {"help"}
    for word in argv:
        name = word.partition("=")[0].removeprefix("--").replace("_", "-")
        if not word.startswith("--") or name in known or name.replace("no-", "", 1) in known:
            continue
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean --{near[0]}?" if near else f"see: {prog} --help"
        raise CommandError(f"there is no option --{name}; {hint}")


def train_words(argv: list[str]) -> list[str]:
    """`--size` is that of the map, and `--gamma` that of the learner and of the reward, which must be the same.

    >>> train_words(["--size", "32", "--gamma=0.98"])
    ['--arena.size', '32', '--ppo.gamma', '0.98', '--arena.reward.gamma', '0.98']
    """
    words = ["--arena.size" + word.removeprefix("--size") if word == "--size" or word.startswith("--size=") else word for word in argv]
    gamma = take_option(words, "--gamma")
    return words if gamma is None else [*words, "--ppo.gamma", gamma, "--arena.reward.gamma", gamma]


def train_defaults(argv: list[str]) -> ArenaArguments:
    """The saved config of a run that is resumed, a TOML file, or nothing."""
    words = list(argv)
    path, folder = take_option(words, "--config"), take_option(words, "--run")
    if "--resume" in words:
        base = saved_config(ArenaTrainConfig, "arena", folder, path)
    elif path is not None:
        base = load(ArenaTrainConfig, path)
    else:
        return ArenaArguments()
    return ArenaArguments(**{name: getattr(base, name) for name in ArenaTrainConfig.__struct_fields__})
