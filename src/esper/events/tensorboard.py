"""Scalars for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from esper.events.event import Record
from esper.events.scalars import scalars
from esper.files import printable


class TensorBoardSink:
    """Writes each finite number of each event that has a `step` at that step, named as `scalars` names it."""

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
        step = getattr(record.event, "step", None)
        if step is None:
            return
        for name, value in scalars(record.event).items():
            self._writer.add_scalar(name, value, step, walltime=record.time)

    def close(self) -> None:
        self._writer.close()
