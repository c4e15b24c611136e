"""Commands that train in the group that torchrun started, if it did."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from esper.cli.outcome import FAILED, CommandError

if TYPE_CHECKING:
    from esper.parallel import Group


@contextlib.contextmanager
def in_group(device: Literal["auto", "cpu", "cuda"]) -> Iterator[Group]:
    """Only rank 0 writes to the standard output. What goes wrong is told once."""
    from esper.devices import find_device
    from esper.parallel import FirstFailed, GroupError, joined
    from esper.runs.folder import RunError

    try:
        with joined(find_device(device)) as group:
            if group.rank:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            yield group
    except (RunError, GroupError) as error:
        raise CommandError(str(error)) from error
    except FirstFailed as error:
        raise CommandError(str(error), exit_code=FAILED, is_printed=True) from error
