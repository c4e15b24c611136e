"""`esper`: finds the command, runs it, and turns its result or error into an exit code.

Exit codes: 0 fine, 1 the run failed, 2 the user's mistake, 130 after Ctrl-C, 143 after SIGTERM.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

import esper
from esper.cli.command import FAILED, GLOBAL_HELP, OK, USAGE, CommandError, CommandResult, code_of
from esper.runs.foreign import clean
from esper.runs.signals import INTERRUPTED
from esper.text_table import did_you_mean

# Errors of an output stream. Errors of a file may have the same numbers, but name the file.
_OUTPUT_FAILS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EPIPE, errno.EIO, errno.EBADF})


class Command(NamedTuple):
    """Where a command is implemented, and its line in the overview."""

    module: str  # imported when the command is run
    help: str
    function: str = "run"  # of the module: run(argv, prog) returns a CommandResult


COMMANDS = {
    "doctor": Command("esper.cli.doctor", "show what is installed, which devices there are, and what is missing"),
    "watch": Command("esper.cli.watch", "show runs in the browser or the terminal, while they train and afterwards"),
    "grow": Command("esper.cli.grow", "train a model and grow it where that pays; go on with a run"),
    "analyse": Command("esper.cli.analyse", "show what seeds are worth: blueprints, Shapley values, interaction of pairs"),
    "report": Command("esper.cli.report", "write the report of a run of any kind as one page"),
    "grow report": Command("esper.cli.grow", "write the report of a run again, also of one that was killed", "run_report"),
    "controller train": Command("esper.cli.controller_train", "train a controller that decides what grows; go on with a run"),
    "controller card": Command("esper.cli.controller_card", "show what a controller file holds and how it was trained"),
    "ppo train": Command("esper.cli.ppo_train", "train a recurrent policy; go on with a run"),
    "ppo eval": Command("esper.cli.ppo_eval", "play fresh episodes with the policy of a run"),
    "ppo envs": Command("esper.cli.ppo_eval", "list the built-in environments", "run_envs"),
    "arena train": Command("esper.cli.arena_train", "train a player for team battles by self-play; go on with a run"),
    "arena eval": Command("esper.cli.arena_match", "play battles of a run's player against a scripted bot", "run_eval"),
    "arena match": Command("esper.cli.arena_match", "play battles between any two: bots, runs, members of their leagues"),
    "arena league": Command("esper.cli.arena_match", "show the ratings of a run's league", "run_league"),
    "arena leaderboard": Command("esper.cli.arena_leaderboard", "score players on the frozen test maps of all scenarios"),
    "arena export": Command("esper.cli.arena_player", "write the player of a run to one file"),
    "arena card": Command("esper.cli.arena_player", "show what a player file says about its player", "run_card"),
    "arena replay": Command("esper.cli.arena_replay", "show what is in a replay, and compute it again to verify it"),
    "arena watch": Command("esper.cli.arena_replay", "play a replay in the browser", "run_watch"),
    "arena bench": Command("esper.cli.arena_bench", "measure how fast battles are fought on this machine"),
    "runs ls": Command("esper.cli.runs", "list the runs in a folder, live ones first", "run_ls"),
    "runs show": Command("esper.cli.runs", "show a run: state, figures, seeds, settings, and what to do next", "run_show"),
    "runs diff": Command("esper.cli.runs", "show the settings in which two runs differ, and their figures", "run_diff"),
    "runs tag": Command("esper.cli.runs", "add and remove tags of a run, and set its note", "run_tag"),
    "runs rm": Command("esper.cli.runs", "delete runs", "run_rm"),
    "runs export": Command("esper.cli.runs", "write the events of runs into a CSV or Parquet file", "run_export"),
    "compare": Command("esper.cli.runs", "compare runs, with intervals over seeds, and plot them", "run_compare"),
    "query": Command("esper.cli.runs", "answer questions about runs and events in SQL", "run_query"),
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    wants_json, wants_debug = (_take(arguments, flag) for flag in ("--json", "--debug"))
    _prepare_streams()
    try:
        result, code = _result_of(arguments, wants_debug=wants_debug)
        if wants_json and result is not None:
            print(_json(result))
        sys.stdout.flush()
        return code
    except OSError as error:  # the output cannot be written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python tries again when it ends
        if not isinstance(error, BrokenPipeError):  # after a broken pipe nobody would see a message
            from esper.files import reason_of

            _print_error(f"error: the output cannot be written: {reason_of(error)}; send it elsewhere, or free some space")
        return FAILED


def _prepare_streams() -> None:
    """Make sure that printing never raises because of a character, or because a stream was closed before the program began."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (for as long as the program runs)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _result_of(arguments: list[str], *, wants_debug: bool) -> tuple[dict[str, Any] | None, int]:
    """Run the command. Return the result that `--json` prints, None after help, and the exit code."""
    try:
        command_result = _dispatch(arguments)
        return command_result.result, command_result.exit_code
    except SystemExit as stop:  # tyro has printed the help
        return None, OK if stop.code is None else int(stop.code)
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, OSError) and error.filename is None and error.errno in _OUTPUT_FAILS:
            raise
        if wants_debug:
            traceback.print_exc()
        message, code = _explain(error)
        if not getattr(error, "is_printed", False):
            _print_error(f"error: {message}")
        return {"error": message}, code


def _print_error(text: str) -> None:
    text = "\n".join(map(clean, text.split("\n")))  # it may name a folder or quote a file of a stranger
    with contextlib.suppress(OSError):  # the exit code still reports the failure
        print(text, file=sys.stderr, flush=True)


def _take(arguments: list[str], flag: str) -> bool:
    """Remove a flag that may stand anywhere; return whether it was there."""
    found = flag in arguments
    arguments[:] = [argument for argument in arguments if argument != flag]
    return found


def _dispatch(arguments: list[str]) -> CommandResult:
    """Run the command that the first one or two words name, or print help."""
    if arguments == ["--version"]:
        print(f"esper {esper.__version__}")
        return CommandResult({"version": esper.__version__})
    words = list(itertools.takewhile(lambda argument: not argument.startswith("-"), arguments))
    if words and words[-1] == "help" and len(words) <= 2:
        words, arguments = words[:-1], [*words[:-1], "--help"]
    for count in (2, 1):
        name = " ".join(words[:count])
        if len(words) >= count and name in COMMANDS:
            return function_of(COMMANDS[name])(arguments[count:], f"esper {name}")
    return _help_or_mistake(words, arguments)


def function_of(command: Command) -> Callable[[list[str], str], CommandResult]:
    """Import the module of a command and return its function."""
    function: Callable[[list[str], str], CommandResult] = getattr(importlib.import_module(command.module), command.function)
    return function


def _help_or_mistake(words: list[str], arguments: list[str]) -> CommandResult:
    """Print the overview of all commands or of one group, or raise CommandError for a word or flag that is none of them."""
    group = words[0] if words and any(name.startswith(f"{words[0]} ") for name in COMMANDS) else ""
    unknown = words[1:] if group else words
    if unknown:
        wanted = " ".join(words[:2])
        nearest_to_group = did_you_mean(words[0], COMMANDS, before="esper ", otherwise="see: esper --help")
        hint = did_you_mean(wanted, COMMANDS, before="esper ", otherwise=nearest_to_group)
        raise CommandError(f"unknown command {wanted!r}; {hint}")
    flags = [argument for argument in arguments[len(words) :] if argument not in ("-h", "--help")]
    if flags:
        raise CommandError(f"{flags[0]!r} needs a command before it; see: esper --help")
    print(_overview(group))
    return CommandResult({"commands": _names_in(group)}, OK)


def _names_in(group: str) -> list[str]:
    """Return the commands of a group, or all commands if the group is empty."""
    return [name for name in COMMANDS if not group or name.startswith(f"{group} ")]


def _overview(group: str) -> str:
    names = _names_in(group)
    lines = [f"usage: esper {group + ' ' if group else ''}COMMAND [--help] ...", "", "Commands:"]
    lines += [f"  {name:<{max(map(len, names))}}  {COMMANDS[name].help}" for name in names]
    lines += ["", GLOBAL_HELP]
    return "\n".join(lines if group else [*lines, "", "  --version   the version of esper"])


def _explain(error: BaseException) -> tuple[str, int]:
    """Return the message for the user and the exit code."""
    if isinstance(error, CommandError):
        return str(error), error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED
    from esper.config import ConfigError
    from esper.files import FileError

    if isinstance(error, ConfigError):
        return str(error), USAGE
    if isinstance(error, FileError):
        return str(error), FAILED
    if isinstance(error, OSError) and error.filename is not None:
        from esper.files import reason_of

        hint = "; change its permissions, or choose another place" if error.errno in (errno.EACCES, errno.EPERM) else ""
        return f"{reason_of(error)}{hint}", code_of(error)
    if _is_lack_of_memory(error):
        return f"there is not enough memory for this; ask for smaller sizes ({' '.join(str(error).split())})", FAILED
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{text} (unexpected; run again with --debug for the traceback)", FAILED


def _is_lack_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out. torch has an error class for GPUs only; on a CPU the text tells."""
    text = str(error)
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator: " in text


def _json(result: object) -> str:
    try:
        return msgspec.json.encode(result, enc_hook=str).decode()
    except UnicodeEncodeError:  # a file name that is not UTF-8
        return msgspec.json.encode(_printable(msgspec.to_builtins(result, enc_hook=str))).decode()


def _printable(value: Any) -> Any:
    """Return nested values with every text made printable as UTF-8."""
    from esper.files import printable

    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(item) for item in value]
    return printable(value) if isinstance(value, str) else value


if __name__ == "__main__":
    sys.exit(main())
