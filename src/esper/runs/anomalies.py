"""Anomalies of a training: detectors that are fed with numbers, and the event that says what is wrong and what to do.

    limit = Threshold("kl", above=0.5)
    anomaly = limit.see(update.total_kl, step=update.step)          # an Anomaly when it begins and when it ends, else None

A detector gets one reading per update or epoch. An anomaly begins after some wrong readings in a row and ends after some good ones, so it
gives two events however long it lasts. A reading of None or NaN is no reading and changes nothing. This module imports no torch.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Mapping
from typing import Any, TypeVar

from esper.runs.events import Event

ADVICE = {
    "plateau": "Check that the reward or loss can be improved and that the learning rate is neither too low nor too high.",
    "degradation": "Go back to the best checkpoint and lower the learning rate; if only the validation loss rises, train for less time.",
    "value_collapse": "The critic predicts the same value everywhere: raise value_coef or the learning rate, and check the observations.",
    "low_explained_variance": "The critic is worse than a constant: lower the learning rate, and check that rewards are finite and scaled.",
    "entropy_collapse": "The policy no longer explores: raise entropy_coef or set entropy_floor, or stop if the return is as wanted.",
    "ratio_explosion": "One update changes the policy too much: lower the learning rate, the number of epochs or clip_coef.",
    "ratio_collapse": "The policy does not change, so nothing is learned: raise the learning rate and check that no layer is frozen.",
    "kl": "One update moves the policy too far: lower the learning rate or the number of epochs, or set target_kl.",
    "gradient_health": "The gradient of this part vanishes or explodes: check that it is used and not frozen, and lower the learning rate.",
    "hidden_state": "The memory of the policy grows without bound: lower the learning rate, set norm_after, or use a GRU.",
    "input_drift": "The inputs have left the range that they had before: check the environment or the data, or set observation_momentum.",
    "memory_growth": "Memory grows with every update: look for tensors that a callback, an environment or a list keeps alive.",
}
"""Kind of anomaly -> one sentence that says what to do."""


class Anomaly(Event, tag="anomaly"):
    """Something is wrong with the training since `step`, or, if it `has_ended`, no longer."""

    step: int  # in the unit of the run: environment steps, or epochs of a growing host
    what: str  # a key of ADVICE
    subject: str  # head, part, slot or quantity that it concerns; "" for the whole training
    value: float
    limit: float
    advice: str  # one sentence that says what to do
    has_ended: bool = False

    def in_words(self) -> str:
        """Return one line for a display: "kl, 44.09 with a limit of 0.5. One update moves ..."."""
        name = " of ".join(filter(None, (self.what.replace("_", " "), self.subject)))
        if self.has_ended:
            return f"{name} is over"
        return f"{name}, {self.value:.4g} with a limit of {self.limit:.4g}. {self.advice}"

    def shown(self) -> Mapping[str, Any]:
        """Show the value under the names of kind and subject: gradient_health/actor."""
        return {self.what: {self.subject: self.value} if self.subject else self.value}


class Detector:
    """Turns right and wrong readings of one quantity into the beginning and the end of an anomaly."""

    _STATE: tuple[str, ...] = ("is_on", "in_a_row")  # attributes that a checkpoint holds; values of plain types

    def __init__(self, what: str, subject: str = "", *, begins_after: int = 1, ends_after: int = 3) -> None:
        assert what in ADVICE, what
        self.what, self.subject, self.begins_after, self.ends_after = what, subject, begins_after, ends_after
        self.is_on = False
        self.in_a_row = 0  # readings up to now that contradict `is_on`

    def decide(self, is_wrong: bool, *, value: float, limit: float, step: int) -> Anomaly | None:
        """Take one reading. Return the event if the anomaly begins or ends with it."""
        self.in_a_row = 0 if is_wrong == self.is_on else self.in_a_row + 1
        if self.in_a_row < (self.ends_after if self.is_on else self.begins_after):
            return None
        self.is_on, self.in_a_row = is_wrong, 0
        return Anomaly(
            step=step,
            what=self.what,
            subject=self.subject,
            value=value,
            limit=limit,
            advice=ADVICE[self.what],
            has_ended=not is_wrong,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values, so that a resumed run reports the same anomalies."""
        return {name: list(value) if isinstance(value := getattr(self, name), deque) else value for name in self._STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self._STATE:
            old = getattr(self, name)
            value = state[name]
            setattr(self, name, deque(value, old.maxlen) if isinstance(old, deque) else value)


class Threshold(Detector):
    """Finds values above or below a limit. Infinity is above every limit; NaN is no reading."""

    def __init__(
        self, what: str, subject: str = "", *, above: float | None = None, below: float | None = None, begins_after: int = 1
    ) -> None:
        super().__init__(what, subject, begins_after=begins_after)
        assert (above is None) != (below is None), "give one limit"
        self.above, self.below = above, below

    def see(self, value: float | None, *, step: int) -> Anomaly | None:
        if value is None or math.isnan(value):
            return None
        if self.above is not None:
            return self.decide(value > self.above, value=value, limit=self.above, step=step)
        assert self.below is not None
        return self.decide(value < self.below, value=value, limit=self.below, step=step)


class Vanished(Detector):
    """Finds gradients of a part that are zero, or as good as zero: the part is frozen, or not used."""

    LIMIT = 1e-9  # norm

    def see(self, norm: float | None, *, step: int) -> Anomaly | None:
        if norm is None or math.isnan(norm):
            return None
        return self.decide(norm < self.LIMIT, value=norm, limit=self.LIMIT, step=step)


class Standstill(Detector):
    """Finds a loss that does not fall: in `window` readings in a row, it is never lower than the first one by more than noise."""

    _STATE = (*Detector._STATE, "first", "first_error")
    SIGMAS = 3.0  # in standard errors

    def __init__(self, subject: str, *, window: int) -> None:
        super().__init__("plateau", subject, begins_after=window)
        self.first: float | None = None
        self.first_error = 0.0

    def see(self, loss: float | None, *, error: float, step: int, is_learning: bool = False) -> Anomaly | None:
        """Take a reading and its standard error. If something else shows that the training `is_learning`, the reading is good."""
        if loss is None or not math.isfinite(loss):
            return None
        if self.first is None:
            self.first, self.first_error = loss, error
            return None
        limit = self.first - self.SIGMAS * math.hypot(error, self.first_error)
        return self.decide(loss > limit and not is_learning, value=loss, limit=limit, step=step)


class Plateau(Detector):
    """Finds a high loss that has fallen by less than the share `fall` of itself over the last `window` readings."""

    _STATE = (*Detector._STATE, "losses")

    def __init__(self, subject: str, *, window: int, fall: float) -> None:
        super().__init__("plateau", subject, begins_after=2)
        self.window, self.fall = window, fall
        self.losses: deque[float] = deque(maxlen=window + 1)

    def see(self, loss: float | None, *, high: float, step: int) -> Anomaly | None:
        """Take a reading. A loss below `high` is good enough and is no plateau."""
        if loss is None or not math.isfinite(loss):
            return None
        self.losses.append(loss)
        if len(self.losses) <= self.window:
            return None
        limit = self.losses[0] - self.fall * abs(self.losses[0])
        return self.decide(loss > limit and loss > high, value=loss, limit=limit, step=step)


class Degradation(Detector):
    """Finds a loss that has lost the share `share` of all that was gained since its first reading."""

    _STATE = (*Detector._STATE, "first", "best")

    def __init__(self, subject: str, *, share: float, begins_after: int = 3) -> None:
        super().__init__("degradation", subject, begins_after=begins_after)
        self.share = share
        self.first: float | None = None
        self.best = math.inf

    def see(self, loss: float | None, *, least: float, step: int) -> Anomaly | None:
        """Take a reading. A rise above the best loss by less than `least`, its noise, is never a degradation."""
        if loss is None or not math.isfinite(loss):
            return None
        self.first = loss if self.first is None else self.first
        self.best = min(self.best, loss)
        limit = self.best + max(least, self.share * (self.first - self.best))
        return self.decide(loss > limit, value=loss, limit=limit, step=step)


class InputDrift(Detector):
    """Finds inputs that leave their range: their size exceeds `largest`, or they no longer vary though they did.

    The first readings are left out, because a normaliser knows nothing yet, and because environments that have all just begun are alike.
    The next ones define the usual size and spread. Inputs that no normaliser scales are measured by their usual size (`is_relative`): then
    `largest` is a multiple of it. Inputs that vary rarely, such as a signal every thousand steps, have updates without any; so only many
    of those in a row are an anomaly.
    """

    _STATE = (*Detector._STATE, "seen", "usual", "usual_size", "frozen")
    USUAL = 3  # number of readings that define the usual size and spread
    LEAST = 0.05  # share of the usual spread below which the inputs do not vary
    FROZEN = 6  # readings in a row

    def __init__(self, subject: str, *, largest: float, is_relative: bool = False, skipped: int = 2) -> None:
        super().__init__("input_drift", subject)
        self.largest, self.is_relative, self.skipped = largest, is_relative, skipped
        self.seen, self.frozen, self.usual, self.usual_size = 0, 0, 0.0, 0.0

    def see(self, size: float | None, spread: float | None, *, step: int) -> Anomaly | None:
        """Take the root mean square of the inputs of an update, and the spread of each input over it, averaged over the inputs."""
        if size is None or spread is None or math.isnan(size + spread):
            return None
        self.seen += 1
        counted = self.seen - self.skipped
        if counted <= 0:
            return None
        if counted <= self.USUAL:
            self.usual += spread / self.USUAL
            self.usual_size = max(self.usual_size, size)
        limit = self.LEAST * self.usual
        self.frozen = self.frozen + 1 if counted > self.USUAL and spread < limit else 0
        if self.frozen >= self.FROZEN:
            return self.decide(True, value=spread, limit=limit, step=step)
        if not self.is_relative:
            return self.decide(size > self.largest, value=size, limit=self.largest, step=step)
        if not self.usual_size:  # inputs that were all zero have no usual size
            return self.decide(False, value=size, limit=math.inf, step=step)
        return self.decide(size > self.largest * self.usual_size, value=size, limit=self.largest * self.usual_size, step=step)


class MemoryGrowth(Detector):
    """Finds memory that grows with every one of `window` readings, by `limit` bytes or more on average.

    Its state is not saved: a resumed run has other memory.
    """

    _STATE = ()
    SKIPPED = 3  # first readings, in which caches fill

    def __init__(self, subject: str = "", *, limit: float, window: int = 8) -> None:
        super().__init__("memory_growth", subject)
        self.limit, self.seen = limit, 0
        self.bytes: deque[int] = deque(maxlen=window + 1)

    def see(self, used: int, *, step: int) -> Anomaly | None:
        self.seen += 1
        if self.seen <= self.SKIPPED:
            return None
        self.bytes.append(used)
        if len(self.bytes) < (self.bytes.maxlen or 0):
            return None
        rises = [after - before for before, after in zip(self.bytes, list(self.bytes)[1:], strict=False)]
        mean = sum(rises) / len(rises)
        # A leak rises in every update; a cache or a new seed rises once.
        return self.decide(mean >= self.limit and min(rises) >= self.limit / 4, value=mean, limit=self.limit, step=step)


AnyDetector = TypeVar("AnyDetector", bound=Detector)


class Monitor:
    """The detectors of one training by kind and subject, made when they are first asked for. A subclass feeds them."""

    def __init__(self) -> None:
        self.largest_rate = 0.0  # largest learning rate so far
        self._detectors: dict[str, Detector] = {}
        self._saved: dict[str, Any] = {}  # states of detectors that were loaded and not asked for since

    def detector(self, kind: type[AnyDetector], subject: str, **options: Any) -> AnyDetector:
        """Return the detector of this kind, `what` and subject."""
        key = f"{kind.__name__} {options.get('what', '')} {subject}"
        detector = self._detectors.get(key)
        if detector is None:
            detector = self._detectors[key] = kind(subject=subject, **options)
            if key in self._saved:
                detector.load_state_dict(self._saved[key])
        assert isinstance(detector, kind)
        return detector

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all detectors that save one, so that a resumed run reports the same anomalies."""
        states = {key: detector.state_dict() for key, detector in self._detectors.items()}
        return {"largest_rate": self.largest_rate, "detectors": {**self._saved, **{key: state for key, state in states.items() if state}}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.largest_rate, self._saved, self._detectors = state["largest_rate"], dict(state["detectors"]), {}


_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def resident_bytes() -> int:
    """Return the memory of this process that is in RAM; 0 where the system does not tell it."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        return 0
