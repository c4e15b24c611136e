"""Scalars for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from esper.events.event import Header, Record, Resumed
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
        self._writer: Any = SummaryWriter(str(folder))

    def write(self, record: Record) -> None:
        if isinstance(record.event, (Header, Resumed)):
            self._cut(0 if record.step is None or isinstance(record.event, Header) else record.step + 1)
        for name, value in scalars_of(record).items():
            self._writer.add_scalar(name, value, record.step, walltime=record.time)

    def _cut(self, step: int) -> None:
        """Hide what an earlier session wrote from `step` on: the run goes on before it, and it will happen again."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._writer.file_writer.add_event(Event(session_log=SessionLog(status=SessionLog.START)), step)

    def close(self) -> None:
        self._writer.close()
