"""Levels of telemetry: how much of a training is written as events. Imports no torch.

| level | events |
|---|---|
| off | start, end and checkpoints of the run |
| minimal | also one event per update or epoch without its heads or slots, and rare ones: stages, contributions, rollbacks, anomalies |
| normal | also heads, slots and gradient norms |
| debug | also `Internals`: hidden state, inputs, gradient norms per layer, memory |

An anomaly raises the level to debug for the next updates.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from esper.runs.anomalies import Anomaly, resident_bytes
from esper.runs.events import Event

Level = Literal["off", "minimal", "normal", "debug"]
LEVELS: tuple[Level, ...] = ("off", "minimal", "normal", "debug")
READ_EVERY_S = 1.0  # resources are read at most this often, because asking a GPU takes about a millisecond
MAX_NAMES = 500  # layers in one event, so that a line of the log does not become too long

# fmt: off
LEVEL_OF: dict[str, Level] = {
    # written at every level
    **dict.fromkeys(("header", "run_declared", "resumed", "checkpoint_refused", "sink_failed", "sink_dropped"), "off"),
    **dict.fromkeys(("run_started", "run_ended", "checkpoint_evaluated", "evaluated", "episodes_restarted", "compile_failed"), "off"),
    **dict.fromkeys(("growth_started", "growth_finished", "best_restored", "final_test", "twin_compared", "loader_restarted"), "off"),
    # one per update or epoch, and rare ones
    **dict.fromkeys(("update", "collected", "skipped", "rewards_not_finite", "anomaly"), "minimal"),
    **dict.fromkeys(("round_ended", "round_fought", "league_changed"), "minimal"),
    # all that the ledger of a growing run is folded from
    **dict.fromkeys(("epoch_ended", "stage_entered", "rolled_back", "measured", "action_refused"), "minimal"),
    "internals": "debug",
}
"""Kind of event -> least level at which it is written; "normal" for all others."""
DETAIL: dict[str, dict[str, Any]] = {"update": {"entropy": {}, "kl": {}}, "epoch_ended": {"slots": []}}
"""Kind of event -> fields that are emptied at the level "minimal"."""
# fmt: on


class Internals(Event, tag="internals"):
    """Details of an update or epoch, written at the level "debug". A value that a training does not have is None or empty."""

    step: int
    gradient_norms: dict[str, float] = {}  # L2 norm by layer; of a learner, `GradientNorms` has them
    hidden_state: float | None = None  # root mean square of the memory of a recurrent policy
    inputs: dict[str, dict[str, float]] = {}  # name -> statistics of the inputs: size (root mean square), spread
    memory_bytes: int = 0  # of this process
    device_memory_bytes: int | None = None  # allocated by torch on its device


class ResourceMeter:
    """Reads the use of the machine by this process, without waiting for a device. The figures of a reading:

    - `memory_bytes`: memory of the process in RAM
    - `cpu_cores`: mean number of cores that all threads of the process used since the reading before; workers of a loader do not count
    - `device_memory_bytes`, `device_peak_bytes`, `device_total_bytes`: CUDA memory that torch has allocated, at most so far, and of the GPU
    - `device_use`: share of the last moment in which the GPU computed, for whichever process; needs the package nvidia-ml-py
    """

    def __init__(self) -> None:
        self._read_at, self._cpu_at = time.monotonic(), time.process_time()
        self._latest: dict[str, float] = {}
        self._can_tell_use = True

    def read(self, device: Any) -> dict[str, float]:
        """Return the figures for a training on this torch device; the latest ones if they are less than a second old."""
        now, cpu = time.monotonic(), time.process_time()
        if self._latest and now - self._read_at < READ_EVERY_S:
            return self._latest
        self._latest = {"memory_bytes": resident_bytes(), "cpu_cores": (cpu - self._cpu_at) / max(now - self._read_at, 1e-6)}
        self._read_at, self._cpu_at = now, cpu
        if device.type == "cuda":
            self._latest |= self._read_cuda(device)
        return self._latest

    def _read_cuda(self, device: Any) -> dict[str, float]:
        import torch

        found: dict[str, float] = {
            "device_memory_bytes": torch.cuda.memory_allocated(device),
            "device_peak_bytes": torch.cuda.max_memory_allocated(device),
            "device_total_bytes": torch.cuda.get_device_properties(device).total_memory,
        }
        if self._can_tell_use:
            try:
                found["device_use"] = torch.cuda.utilization(device) / 100
            except Exception:  # the package is missing, or the driver does not tell it: NVML's errors share no base class
                self._can_tell_use = False
        return found


class Telemetry:
    """Level of a training, and which events are written at it. `escalation` is the number of updates that an anomaly raises it for."""

    def __init__(self, level: Level = "normal", *, escalation: int = 5) -> None:
        assert level in LEVELS, level
        self.configured, self.escalation = level, escalation
        self.raised_for = 0  # updates left at the level "debug"
        self.resources = ResourceMeter()

    @property
    def level(self) -> Level:
        return "debug" if self.raised_for > 0 else self.configured

    @property
    def is_on(self) -> bool:
        """Whether anomalies are looked for."""
        return self.configured != "off"

    @property
    def is_debug(self) -> bool:
        return self.raised_for > 0 or self.configured == "debug"

    def end_update(self, anomalies: Iterable[Anomaly]) -> None:
        """Count an update; raise the level for the next ones if an anomaly began in it."""
        self.raised_for = max(0, self.raised_for - 1)
        if any(not anomaly.has_ended for anomaly in anomalies):
            self.raised_for = self.escalation

    def shown(self, event: Event) -> Event | None:
        """Return the event as it is written at this level; None if it is left out."""
        level, kind = self.level, event.kind
        if LEVELS.index(LEVEL_OF.get(kind, "normal")) > LEVELS.index(level):
            return None
        return msgspec.structs.replace(event, **DETAIL[kind]) if level == "minimal" and kind in DETAIL else event

    def state_dict(self) -> dict[str, Any]:
        return {"raised_for": self.raised_for}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.raised_for = state["raised_for"]
