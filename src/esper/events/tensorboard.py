"""Scalars for TensorBoard."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from esper.events.event import Record


class TensorBoardSink:
    """Writes each finite number of each event that has a `step`, as the scalar `kind/field` at that step."""

    def __init__(self, folder: Path | str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(f"TensorBoard cannot be imported ({error}); install it with: pip install 'esper[tensorboard]'") from error
        self._writer: Any = SummaryWriter(str(folder))

    def write(self, record: Record) -> None:
        step = getattr(record.event, "step", None)
        if step is None:
            return
        for field in record.event.__struct_fields__:
            value = getattr(record.event, field)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if field not in ("step", "env") and is_number and math.isfinite(value):
                self._writer.add_scalar(f"{record.kind}/{field}", value, step, walltime=record.time)

    def close(self) -> None:
        self._writer.close()
