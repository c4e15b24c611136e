"""Parse the command line into a typed config: tyro, with two additions.

`--config FILE.toml` changes the defaults, and the path of a nested option may be left out where its last name is unique:
`--seed 3` means `--ppo.seed 3`.
"""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TypeVar, get_type_hints

import tyro

from esper.cli.command import GLOBAL_HELP, OK, CommandError, check_run
from esper.config import Config, load, load_saved, to_toml
from esper.runs.folder import CONFIG

ConfigT = TypeVar("ConfigT", bound=Config)

WIDEST_TEXT = 100  # columns; options take the width of the terminal

# A ConfigError as tyro prints it: the config that could not be built (our class, or the dotted name of a nested one), the field, the rule.
_RULE = re.compile(r"Error parsing ([\w.-]+): ([\w.]+)[\w.\[\]]*?: (expected .*?) For full helptext")

# Title of tyro's box: in its upper edge or, where only plain characters are printed, above a line of dashes.
_TITLE = re.compile(r"\A(╭─.*|.*\n *-{3,} *)\n")


def parse(arguments_type: type[ConfigT], argv: list[str], prog: str, *, default: ConfigT | None = None, description: str) -> ConfigT:
    """Return the typed arguments. Raise CommandError after tyro has printed what is wrong; `--help` prints and raises SystemExit."""
    given = [_full_name(word, short_names(arguments_type)) for word in argv]
    errors, help_text = io.StringIO(), _HelpText()
    is_help = not {"-h", "--help"}.isdisjoint(argv)  # tyro also prints completions for shells, which must not be wrapped
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(help_text if is_help else sys.stdout):
            text = _joined(f"{description}\n\n{GLOBAL_HELP}")
            return tyro.cli(arguments_type, prog=prog, args=given, description=text, default=tyro.MISSING if default is None else default)
    except SystemExit as stop:
        if stop.code == OK or stop.code is None:
            sys.stdout.write(_wrapped(help_text.getvalue(), min(shutil.get_terminal_size().columns, WIDEST_TEXT)))
            raise
        message = _without_frame(errors.getvalue())
        broken_rule = _RULE.search(message)
        if broken_rule is not None:
            raise CommandError(f"{_flag(arguments_type, *broken_rule.group(1, 2))}: {broken_rule[3]}; see: {prog} --help") from None
        sys.stderr.write(errors.getvalue())
        raise CommandError(message, is_printed=True) from None


class _HelpText(io.StringIO):
    """Collects the help text that tyro prints. It answers for the real output whether colours and lines of boxes can be shown."""

    def __init__(self) -> None:
        super().__init__()
        self._output = sys.stdout

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._output.encoding

    def isatty(self) -> bool:
        return self._output.isatty()


def _joined(text: str) -> str:
    """Return a text with each paragraph in one line. tyro joins only lines that begin with a letter.

    >>> _joined("Use\\n--option.\\n\\n  example\\n  another one")
    'Use --option.\\n\\n  example\\n  another one'
    """
    lines: list[str] = []
    for line in text.split("\n"):
        if lines and line[:1].strip() and lines[-1][:1].strip():
            lines[-1] += f" {line}"
        else:
            lines.append(line)
    return "\n".join(lines)


def _wrapped(text: str, width: int) -> str:
    """Return a help text with its long paragraphs wrapped and with single blank lines. Examples and options stay as they are.

    >>> print(_wrapped("One paragraph.\\n  example --of a --command", 8))
    One
    paragraph.
      example --of a --command
    """
    wrap = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    lines = text.replace("\n\n\n", "\n\n").split("\n")
    return "\n".join(wrap.fill(line) if len(line) > width and line[0] not in " \x1b" else line for line in lines)


def settings_of(arguments: Config, config_type: type[ConfigT]) -> ConfigT:
    """Return the part of the arguments that is saved with a run, after checking that it can be saved."""
    config = config_type(**{name: getattr(arguments, name) for name in config_type.__struct_fields__})
    to_toml(config)
    return config


def take_option(argv: list[str], name: str) -> str | None:
    """Remove the first `name VALUE` or `name=VALUE` from the arguments, in place. Return the value, or None."""
    for index, word in enumerate(argv):
        if word == name:
            if index + 1 == len(argv):
                raise CommandError(f"{name} needs a value")
            value = argv[index + 1]
            del argv[index : index + 2]
            return value
        if word.startswith(f"{name}="):
            del argv[index]
            return word.removeprefix(f"{name}=")
    return None


@cache
def short_names(config_type: type[Config]) -> dict[str, str]:
    """Map last name -> dotted name for the options in nested configs whose last name is unique.

    >>> from esper.rl.run_config import TrainConfig
    >>> short_names(TrainConfig)["hidden-size"]
    'ppo.network.hidden-size'
    """
    paths = [path.replace("_", "-") for path in _paths(config_type)]
    last_names = [path.rpartition(".")[2] for path in paths]
    return {last: path for last, path in zip(last_names, paths, strict=True) if last_names.count(last) == 1 and last != path}


def _paths(config_type: type[Config], prefix: str = "") -> Iterator[str]:
    """Yield the dotted name of every option, also in nested configs."""
    for name, annotation in get_type_hints(config_type).items():
        if name not in config_type.__struct_fields__:
            continue
        if isinstance(annotation, type) and issubclass(annotation, Config):
            yield from _paths(annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _full_name(word: str, names: Mapping[str, str]) -> str:
    """Return a short option with its whole path, and any other word as it is. `names` are those of `short_names`.

    >>> _full_name("--no-deep=1", {"deep": "ppo.deep"})
    '--ppo.no-deep=1'
    """
    match = re.fullmatch(r"--(no-)?([a-z][\w-]*)(=.*)?", word, re.DOTALL)
    if match is None:
        return word
    negation, name, value = (group or "" for group in match.groups())
    path = names.get(name.replace("_", "-"))
    if path is None:
        return word
    parent, _, last = path.rpartition(".")
    return f"--{parent}.{negation}{last}{value}"


def _flag(arguments_type: type[Config], config: str, field: str) -> str:
    """Return the option of a field, given the config that tyro names: the arguments themselves, or the dotted name of a nested one."""
    path = field if config == arguments_type.__name__ else f"{config}.{field}"
    return f"--{path.replace('_', '-')}"


def _without_frame(text: str) -> str:
    """Return tyro's message on one line, without its box and title."""
    return " ".join(re.sub(r"[│╭╮╰╯─|+]|-{3,}", " ", _TITLE.sub("", text)).split())


def saved_config(config_type: type[ConfigT], kind: str, folder: str | None, path: str | None) -> ConfigT:
    """Return the config of the run in a folder; `path` is the value of --config, which must not be given."""
    if folder is None:
        raise CommandError("--resume needs the folder of the run: --run RUN")
    if path is not None:
        raise CommandError("--resume reads the config of the run; leave --config out")
    check_run(Path(folder), kind)
    return load_saved(config_type, Path(folder) / CONFIG)


def train_defaults(
    arguments_type: type[ConfigT],
    config_type: type[Config],
    argv: list[str],
    *,
    saved: Callable[[str | None, str | None], Config],
    file_type: type[Config] | None = None,
) -> ConfigT:
    """Return the values that the options of a training start from: those of a resumed run, of a TOML file, or the defaults.

    `saved(folder, path)` reads the config of a run, given the values of --run and --config. `file_type` is the type of a TOML file, if it
    may leave out more than `config_type`.
    """
    words = list(argv)
    path, folder = take_option(words, "--config"), take_option(words, "--run")
    if "--resume" in words:
        base = saved(folder, path)
    elif path is not None:
        base = load(file_type or config_type, path)
    else:
        return arguments_type()
    return arguments_type(**{name: getattr(base, name) for name in config_type.__struct_fields__})


def gather_option(argv: list[str], short: str, full: str) -> list[str]:
    """Put the values of a short option, which may be given several times, behind one full option.

    >>> gather_option(["--task", "digits", "--seed=3", "--task=digits-1d"], "--task", "--tasks")
    ['--seed=3', '--tasks', 'digits', 'digits-1d']
    """
    words, values = list(argv), []
    while (value := take_option(words, short)) is not None:
        values.append(value)
    if values and any(word.partition("=")[0] == full for word in words):
        raise CommandError(f"{short} is short for {full}; leave one of them out")
    return [*words, full, *values] if values else words
