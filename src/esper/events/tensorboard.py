"""Scalars for TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from esper.events.event import Header, Record
from esper.events.scalars import scalars_of
from esper.files import printable


class TensorBoardSink:
    """Writes each finite number of each event at the record's step, named as `scalars_of` names it."""

    def __init__(self, folder: Path | str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(f"TensorBoard cannot be imported ({error}); install it with: pip install 'esper[tensorboard]'") from error
        if printable(folder) != str(folder):
            raise RuntimeError(
                f"TensorBoard cannot write to {folder}: the name is not UTF-8; choose another folder, or do without TensorBoard"
            )
        _wait_for_a_later_name(Path(folder))
        self._writer: Any = SummaryWriter(str(folder))

    def restart(self, records: Iterable[Record]) -> None:
        """Hide what earlier sessions wrote, and write what is left of the run: some of theirs, at any step, was cut from its log."""
        self._hide()
        for record in records:
            self._write_scalars(record)

    def write(self, record: Record) -> None:
        if isinstance(record.event, Header):
            self._hide()
        self._write_scalars(record)

    def _write_scalars(self, record: Record) -> None:
        for name, value in scalars_of(record).items():
            self._writer.add_scalar(name, value, record.step, walltime=record.time)

    def _hide(self) -> None:
        """Hide all that earlier sessions wrote into the folder."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._writer.file_writer.add_event(Event(session_log=SessionLog(status=SessionLog.START)), 0)

    def close(self) -> None:
        self._writer.close()


def _wait_for_a_later_name(folder: Path) -> None:
    """Wait until the second of the newest file is over: TensorBoard reads files by name, and within a second a later one may come first."""
    seconds = {path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*")}
    if str(int(time.time())) in seconds:
        time.sleep(1 - time.time() % 1)
