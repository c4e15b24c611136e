"""The options of `esper controller train` and `esper controller compare`, and where they start from."""

from __future__ import annotations

from pathlib import Path

import tyro

from esper.cli.outcome import CommandError
from esper.cli.parse import settings_of, take_option
from esper.cli.train_arguments import saved_config
from esper.config import load
from esper.controller.compare_config import CompareConfig
from esper.controller.config import ControllerConfig

_Flag = tyro.conf.FlagCreatePairsOff[bool]


class ControllerArguments(ControllerConfig):
    run: Path | None = None
    """folder of the run; None: runs/controller-<time>"""
    config: Path | None = None
    """TOML file with values for any of these options"""
    resume: _Flag = False
    """go on with the run in --run, as it was configured; --rounds may ask for more"""
    dry_run: _Flag = False
    """say what would be done, and touch nothing"""

    def settings(self) -> ControllerConfig:
        """What is saved with the run."""
        return settings_of(self, ControllerConfig)


class CompareArguments(CompareConfig):
    config: Path | None = None
    """TOML file with values for any of these options"""

    def settings(self) -> CompareConfig:
        return CompareConfig(**{name: getattr(self, name) for name in CompareConfig.__struct_fields__})


# Short names


def train_words(argv: list[str]) -> list[str]:
    """`--task`, once for each task, is short for `--domain.tasks`, and `--seed` for that of everything drawn in a run.

    >>> train_words(["--task", "digits", "--seed=3", "--task=digits-1d"])
    ['--ppo.seed=3', '--domain.tasks', 'digits', 'digits-1d']
    """
    words = ["--ppo.seed" + word.removeprefix("--seed") if word == "--seed" or word.startswith("--seed=") else word for word in argv]
    return _gathered(words, "--task", "--domain.tasks")


def compare_words(argv: list[str]) -> list[str]:
    """`--task` and `--host`, once for each, and `--controllers` as one word with commas.

    >>> compare_words(["--controllers", "never,a.safetensors", "--task", "digits", "--host=4-8-16", "--host", "5-10-20"])
    ['--controllers', 'never', 'a.safetensors', '--tasks', 'digits', '--hosts', '4-8-16', '5-10-20']
    """
    words: list[str] = []
    for word in argv:
        name, sign, values = word.partition("=")
        if name == "--controllers" and sign:
            words += [name, *values.split(",")]
        else:
            words += word.split(",") if words[-1:] == ["--controllers"] else [word]
    return _gathered(_gathered(words, "--task", "--tasks"), "--host", "--hosts")


def _gathered(argv: list[str], short: str, full: str) -> list[str]:
    """What was given piece by piece, behind one option."""
    words, values = list(argv), []
    while (value := take_option(words, short)) is not None:
        values.append(value)
    if values and any(word.partition("=")[0] == full for word in words):
        raise CommandError(f"{short} is short for {full}; leave one of them out")
    return [*words, full, *values] if values else words


# Defaults


def compare_defaults(argv: list[str]) -> CompareArguments:
    """A TOML file, or nothing."""
    path = take_option(list(argv), "--config")
    base = CompareConfig() if path is None else load(CompareConfig, path)
    return CompareArguments(**{name: getattr(base, name) for name in CompareConfig.__struct_fields__})


def train_defaults(argv: list[str]) -> ControllerArguments:
    """The saved config of a run that is resumed, a TOML file, or nothing."""
    words = list(argv)
    path, folder = take_option(words, "--config"), take_option(words, "--run")
    if "--resume" in words:
        base = saved_config(ControllerConfig, "controller", folder, path)
    elif path is not None:
        base = load(ControllerConfig, path)
    else:
        return ControllerArguments()
    return ControllerArguments(**{name: getattr(base, name) for name in ControllerConfig.__struct_fields__})
