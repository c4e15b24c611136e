"""What commands and `main` share: the result that a command hands back, the mistake that kept it from one, and the exit codes."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Any

OK, FAILED, USAGE = 0, 1, 2  # exit codes; a signal ends with INTERRUPTED or TERMINATED

# What the system refuses because of the name or folder that the user gave.
_MISTAKES = frozenset({errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EROFS, errno.ELOOP})

GLOBAL_HELP = """On every command:
  --json      the last line of the output is a JSON object with the result, or {"error": ...}
  --debug     show the traceback of an error"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """`result` is what `--json` prints."""

    result: dict[str, Any]
    exit_code: int = OK


class CommandError(Exception):
    """Ends the program with one line on stderr. `is_printed` where the text already is there."""

    def __init__(self, message: str, *, exit_code: int = USAGE, is_printed: bool = False) -> None:
        super().__init__(message)
        self.exit_code, self.is_printed = exit_code, is_printed


def code_of(error: OSError) -> int:
    """Return the exit code: a disk that is full or broken has failed, a name that cannot be is the user's mistake."""
    return USAGE if error.errno in _MISTAKES or error.errno is None else FAILED
