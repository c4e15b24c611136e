"""Telemetry of a growing training: callbacks and sinks of the user, anomalies, and the level of detail of the events.

    esper.grow(..., callbacks=[print, Watcher()], sinks=[TensorBoardSink("board")], telemetry="debug")

A callback is a function that is called with every event, or an object with methods named after events: `on_epoch_ended(event)`. It is
called in the thread of the training, so it should be fast. If it raises an error, a warning says so and it is not called again. A sink gets
records (events with time and step) in a thread of its own; see `esper.runs.sinks`. Neither can end the training.

Anomalies are looked for once per epoch, if anybody gets the events. Broken training is the governor's part; anomalies are slow and silent
faults. The levels are described in `esper.runs.telemetry`.
"""

from __future__ import annotations

import atexit
import inspect
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from esper.growth import events as growth_events
from esper.growth.batches import with_article
from esper.growth.config import GrowthError, ThresholdsConfig
from esper.growth.events import EpochEnded
from esper.growth.host.slots import tensors_in
from esper.profiling import TELEMETRY
from esper.runs import Event, EventRecord, Queued, Sink
from esper.runs.anomalies import Anomaly, Degradation, InputDrift, MemoryGrowth, Monitor, Plateau, Threshold, resident_bytes
from esper.runs.telemetry import MAX_NAMES, Internals, Level, Telemetry
from esper.text_table import did_you_mean

_KINDS = tuple(
    kind.__struct_config__.tag
    for kind in vars(growth_events).values()
    if isinstance(kind, type) and issubclass(kind, Event) and kind.__module__ == growth_events.__name__
)
_METHODS = tuple(f"on_{kind}" for kind in _KINDS)


def check_callbacks(callbacks: object) -> tuple[Any, ...]:
    """Return the callbacks. Raise a GrowthError for anything that no event could be passed to."""
    if not isinstance(callbacks, Sequence) or isinstance(callbacks, str):
        raise GrowthError(f"callbacks must be a list, and is {with_article(type(callbacks).__name__)}: callbacks=[...]")
    for callback in callbacks:
        if isinstance(callback, type):
            raise GrowthError(f"the callback {callback.__name__} is a class; pass an instance: {callback.__name__}()")
        own = [name for name, _ in inspect.getmembers_static(callback) if name.startswith("on_")]
        if wrong := next((name for name in own if not callable(callback) and name not in _METHODS), None):
            hint = did_you_mean(wrong, _METHODS, otherwise=f"methods: {', '.join(_METHODS)}")
            raise GrowthError(f"{type(callback).__name__}.{wrong} would never be called: there is no such event; {hint}")
        if not callable(callback) and not own:
            what = with_article(type(callback).__name__)
            raise GrowthError(f"a callback is {what}; pass functions of an event, or objects with methods such as on_epoch_ended(event)")
    return tuple(callbacks)


def check_sinks(sinks: object) -> tuple[Sink, ...]:
    """Return the sinks. Raise a GrowthError for anything without `write` and `close`."""
    if not isinstance(sinks, Sequence) or isinstance(sinks, str):
        raise GrowthError(f"sinks must be a list, and is {with_article(type(sinks).__name__)}: sinks=[...]")
    for sink in sinks:
        if isinstance(sink, type) or not all(callable(getattr(sink, name, None)) for name in ("write", "close")):
            what = f"the class {sink.__name__}" if isinstance(sink, type) else with_article(type(sink).__name__)
            raise GrowthError(
                f"a sink is {what}; it must be an object with write(record) and close(); a function belongs into callbacks=[...]"
            )
    return tuple(sinks)


class Callbacks:
    """Calls the callbacks with every event, and switches off those that fail."""

    def __init__(self, callbacks: object) -> None:
        self._active = list(check_callbacks(callbacks))

    def __call__(self, event: Event) -> None:
        for callback in tuple(self._active):
            function: Callable[[Event], object] | None = callback if callable(callback) else getattr(callback, f"on_{event.kind}", None)
            if function is None:
                continue
            try:
                function(event)
            except Exception as error:
                self._active.remove(callback)
                name = getattr(callback, "__name__", type(callback).__name__)
                warnings.warn(
                    f"the callback {name} failed at {event.kind} and is not called any more: {type(error).__name__}: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )


class SinksWithoutLog:
    """Passes events to sinks where no run folder has a log. Each sink has a queue and a thread of its own."""

    def __init__(self, sinks: object, *, run: str, rank: int = 0) -> None:
        self._run, self._rank, self._step = run, rank, 0
        self._queues = [sink if isinstance(sink, Queued) else Queued(sink) for sink in check_sinks(sinks)]
        self._failures: list[str] = []  # noted by the threads of the sinks; the thread of the training warns of them
        for queue in self._queues:
            queue.on_failure = lambda error, name=queue.name: self._failures.append(f"{name} failed: {type(error).__name__}: {error}")
        if self._queues:
            atexit.register(self.close)

    def __call__(self, event: Event) -> None:
        if not self._queues:
            return
        step = getattr(event, "step", getattr(event, "epoch", None))
        self._step = step if isinstance(step, int) else self._step
        record = EventRecord(time=time.time(), run=self._run, rank=self._rank, event=event, step=self._step)
        for queue in self._queues:
            queue.write(record)
        self._warn()

    def close(self) -> None:
        """Wait until everything is written. Further events are ignored."""
        queues, self._queues = self._queues, []
        for queue in queues:
            queue.close()
        if queues:
            atexit.unregister(self.close)
            self._warn()

    def _warn(self) -> None:
        while self._failures:
            warnings.warn(f"the sink {self._failures.pop()}; it gets no more events", RuntimeWarning, stacklevel=3)


class GrowthMonitor(Monitor):
    """Finds anomalies in the epochs of a growing training."""

    def __init__(self, thresholds: ThresholdsConfig | None = None) -> None:
        super().__init__()
        self.thresholds = thresholds or ThresholdsConfig()

    def see(
        self,
        ended: EpochEnded,
        *,
        uninformed: float | None,
        memory: Mapping[str, int],
        inputs: Mapping[str, Mapping[str, float]] | None = None,
    ) -> list[Anomaly]:
        """Return the anomalies that begin or end with this epoch. `uninformed` is the loss of a constant predictor, None if unknown.

        `inputs` are size and spread of the inputs in the first batch, by name. They are compared with those of the first epochs.
        """
        epoch, limits, seen = ended.epoch, self.thresholds, list[Anomaly | None]()
        self.largest_rate = max(self.largest_rate, ended.learning_rate)
        may_learn = ended.learning_rate >= limits.small_rate * self.largest_rate
        plateau = self.detector(Plateau, "train_loss", window=limits.plateau_epochs, fall=limits.plateau_fall)
        if uninformed is not None:
            seen.append(plateau.see(ended.train_loss if may_learn else None, high=limits.high_loss * uninformed, step=epoch))
        for name in ("train_loss", "val_loss"):
            loss = getattr(ended, name)
            seen.append(self.detector(Degradation, name, share=limits.degradation).see(loss, least=limits.noise * abs(loss), step=epoch))
        for slot in ended.slots:
            health = self.detector(Threshold, slot.slot, what="gradient_health", below=limits.gradient_health)
            seen.append(health.see(slot.health, step=epoch))
        for name, now in (inputs or {}).items():
            drift = self.detector(InputDrift, name, largest=limits.input_drift, is_relative=True, skipped=0)
            seen.append(drift.see(now["size"], now["spread"], step=epoch))
        for place, used in memory.items():
            seen.append(self.detector(MemoryGrowth, place, limit=limits.memory_growth * 2**20).see(used, step=epoch))
        return [anomaly for anomaly in seen if anomaly is not None]


class GrowthTelemetry(Telemetry):
    """The anomalies and internals of one training, and the level at which its events are written."""

    def __init__(self, level: Level = "normal", *, escalation: int = 5, thresholds: ThresholdsConfig | None = None) -> None:
        super().__init__(level, escalation=escalation)
        self.monitor = GrowthMonitor(thresholds)
        self.layer_norms: dict[str, Tensor] = {}  # L2 norms of the gradients in the first step of the epoch
        self.inputs: dict[str, dict[str, float]] = {}  # statistics of the first batch of the epoch
        self._anomalies: list[Anomaly] = []  # of the present epoch

    def note_inputs(self, batch: Any) -> None:
        """Note size (root mean square) and spread of each floating-point tensor of a batch, by its number."""
        floats = [(number, tensor.float()) for number, tensor in enumerate(tensors_in(batch)) if tensor.is_floating_point()]
        self.inputs = {
            f"tensor {number}": {"size": float(tensor.square().mean().sqrt()), "spread": float(tensor.std(correction=0))}
            for number, tensor in floats
        }

    def note_gradients(self, model: nn.Module) -> None:
        """Note the L2 norm of the gradients of each layer, as the optimiser gets them. They stay on their device."""
        self.layer_norms = {}
        for name, module in model.named_modules():
            gradients = [parameter.grad for parameter in module.parameters(recurse=False) if parameter.grad is not None]
            if gradients and len(self.layer_norms) < MAX_NAMES:
                self.layer_norms[name or "model"] = nn.utils.get_total_norm(gradients)

    def events_of(self, ended: EpochEnded, *, uninformed: float | None, device: torch.device) -> list[Event]:
        """Return the anomalies that begin or end with this epoch; at the level "debug", also its internals."""
        if not self.is_on:
            return []
        with TELEMETRY:
            memory = {"": resident_bytes()}
            if device.type == "cuda":
                memory["device"] = torch.cuda.memory_allocated(device)
            self._anomalies = self.monitor.see(ended, uninformed=uninformed, memory=memory, inputs=self.inputs)
            if not self.is_debug:
                return [*self._anomalies]
            norms = torch.stack(list(self.layer_norms.values())).tolist() if self.layer_norms else []
            internals = Internals(
                step=ended.epoch,
                gradient_norms=dict(zip(self.layer_norms, norms, strict=True)),
                inputs=self.inputs,
                memory_bytes=memory[""],
                device_memory_bytes=memory.get("device"),
            )
            return [internals, *self._anomalies]

    def end_epoch(self) -> None:
        """Raise the level for the next epochs if an anomaly began in this one. Call it after the events of the epoch are written."""
        self.end_update(self._anomalies)
        self._anomalies, self.layer_norms, self.inputs = [], {}, {}

    def state_dict(self) -> dict[str, Any]:
        return {**self.monitor.state_dict(), **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.monitor.load_state_dict(state)
        super().load_state_dict(state)
