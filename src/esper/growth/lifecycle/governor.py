"""The governor: decides at the end of an epoch whether the state of a run is worth keeping, or whether to roll it back.

Three events are disasters:
- a loss that is not finite, at once;
- a lasting spike: several losses in a row above a limit that is derived from the run's own recent losses;
- a collapse: a run that had learned something is back at the loss of a model that knows nothing.

The rules are pure functions of numbers. `LossRange` makes losses dimensionless for them, and for rents and thresholds. A `Governor` holds
the recent losses of one run and its counts of rollbacks. It watches two lists of losses: training losses, several per epoch, each the mean
of a chunk of the epoch; and validation losses, one per epoch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from esper.growth.config import GovernorConfig, GrowthError

TEN_CLASSES = math.log(10)  # loss of a constant predictor for ten equal classes, in nats; rents and thresholds were chosen for it


@dataclass(frozen=True, slots=True)
class LossRange:
    """Scale that makes losses dimensionless, so that no decision depends on their unit.

    >>> LossRange.of(2.0).relative(0.5), LossRange.of(-1.0, loss_range=4.0).relative(-2.0)
    (0.25, 0.75)
    """

    uninformed: float  # loss of the best constant predictor
    range: float  # how far the loss can fall below `uninformed`
    is_guess: bool = False  # `uninformed` is only the loss at the start of the training
    readout: float | None = None  # loss of a readout of the inputs, relative to `uninformed`, see `ReadoutSamples`; None: unknown

    @classmethod
    def of(cls, uninformed: float, *, loss_range: float | None = None, is_guess: bool = False, readout: float | None = None) -> LossRange:
        """Build a scale. Without `loss_range` the loss can fall to 0, so `uninformed` must be above 0."""
        if loss_range is None and not uninformed > 0:
            subject = "the training began with a loss of" if is_guess else "a constant predictor has a loss of"
            raise GrowthError(
                f"{subject} {uninformed:.4g}. Gains are judged as shares of that loss, so it must be above 0; say how far the loss can "
                "fall below it with GrowthConfig(loss_range=...), such as 3.0 for a log-likelihood"
            )
        return cls(uninformed, uninformed if loss_range is None else loss_range, is_guess, readout)

    @property
    def floor(self) -> float:
        """Lowest possible loss."""
        return self.uninformed - self.range

    @property
    def unit(self) -> float:
        """Difference of losses that is worth as much as one nat is for ten classes."""
        return self.range / TEN_CLASSES

    def relative(self, loss: float) -> float:
        """Return the loss on a scale from 0 (floor) to 1 (uninformed)."""
        return (loss - self.floor) / self.range

    def above_floor(self, losses: Sequence[float]) -> tuple[float, ...]:
        return tuple(loss - self.floor for loss in losses)


ENOUGH = 5  # number of losses before a finite loss can be a spike
RECENT = 5  # number of losses whose median is the present level of the run

# Lower bounds of the spread: relative to the level, and absolute in units of the loss scale (nats for ten classes). At convergence the
# measured spread goes to zero, and then a bump of the schedule, or a few samples that are forgotten for a while, would look like an
# explosion. With six sigmas a loss must nearly double before it is a spike, and a loss below 0.003 units never is one. Ten times the level
# is still a spike at every level from 0.0004 units upwards.
RELATIVE_FLOOR = 0.15
ABSOLUTE_FLOOR = 5e-4

INFORMED = 0.8  # share of the uninformed loss; a window with a lower mean has learned something
COLLAPSED = 0.97  # share of the uninformed loss; a model with a higher loss knows nothing

# In a normal distribution, this share of the values lies within this many sigmas of the median.
_QUANTILE, _QUANTILE_SIGMAS = 0.75, 1.1503


class Diverged(RuntimeError):
    """The run is given up, because training from healthy snapshots led to a disaster too many times in a row.

    If `grow` raises it, `model` is the copy that `grow` trained, restored to its last healthy epoch, with the seeds that were kept.
    """

    model: object = None  # an nn.Module


@dataclass(frozen=True, slots=True)
class Verdict:
    """The governor's judgement of one epoch. An epoch may be neither healthy nor a disaster."""

    is_healthy: bool  # the state may become a snapshot
    is_disaster: bool  # roll back now
    reason: str = ""  # in words with the values; empty for a healthy epoch, unless a spike was accepted


def spread(losses: Sequence[float]) -> float:
    """Return a robust standard deviation of the losses around their trend; 0 for fewer than three losses.

    It is computed from the differences of neighbours, where a trend is only a constant. (A falling loss has a wide spread around its mean,
    in which a spike would hide.) The estimate is the upper quartile of the distances from the median difference. A spike or a bad start in
    the window hardly moves that quartile. It also varies less between windows than the median of the distances, with which noise of 50 %
    is occasionally taken for a lasting spike.

    >>> spread([5.0, 4.0, 3.0, 2.0, 1.0])
    0.0
    """
    steps = [later - earlier for earlier, later in pairwise(losses)]
    if len(steps) < 2:
        return 0.0
    middle = median(steps)
    distances = sorted(abs(step - middle) for step in steps)
    return distances[int(_QUANTILE * len(distances))] / _QUANTILE_SIGMAS / math.sqrt(2)  # √2: a difference has twice the variance


def spike_limit(losses: Sequence[float], *, sigmas: float, may_drift: bool, scale: LossRange) -> float:
    """Return the limit above which the next loss is a spike, given the losses before it.

    The limit lies `sigmas` times the spread above the level of the run. In a falling run the level is the median of the last few losses,
    because the mean of the window lies far above the present losses. In a rising run it is the mean of the window, which is lower, so that
    a slow explosion is noticed too. With `may_drift` it is always the median.
    """
    level = median(losses[-RECENT:])
    if not may_drift:
        level = min(level, fmean(losses))
    return level + sigmas * max(spread(losses), RELATIVE_FLOOR * abs(level - scale.floor), ABSOLUTE_FLOOR * scale.unit)


def is_informed(losses: Sequence[float], scale: LossRange) -> bool:
    """Return whether a run with these recent losses has learned something."""
    return scale.relative(fmean(losses)) < INFORMED


class Watch:
    """Recent losses of one kind (training or validation), and the number of spikes in a row at their end."""

    def __init__(self, config: GovernorConfig, *, may_drift: bool) -> None:
        self.size, self.sigmas, self.may_drift = config.window, config.spike_sigmas, may_drift
        self.losses: list[float] = []  # oldest first
        self.spikes = 0
        self.limit = math.inf  # limit that the last loss was compared with

    @property
    def is_enough(self) -> bool:
        """Whether there are enough losses to derive a limit."""
        return len(self.losses) >= min(ENOUGH, self.size)

    def see(self, loss: float, scale: LossRange) -> None:
        """Compare a loss with the limit and add it to the window."""
        self.limit = math.inf
        if self.is_enough:
            self.limit = spike_limit(self.losses, sigmas=self.sigmas, may_drift=self.may_drift, scale=scale)
        self.spikes = self.spikes + 1 if loss > self.limit else 0
        # Clip a spike at the limit: one spike hardly moves the window, but a run that has become noisier for good does.
        self.losses = [*self.losses, min(loss, self.limit)][-self.size :]

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses), "spikes": self.spikes, "limit": self.limit}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])[-self.size :]
        self.spikes, self.limit = state["spikes"], state["limit"]


class Governor:
    """Judges one run epoch by epoch. `scale` makes its losses dimensionless; collapses are only detected if it is not a guess.

    A snapshot of the host holds `loss_state()`. Load it after a rollback, so that the governor forgets the losses since then; the counts
    of rollbacks stay.

    >>> governor = Governor(GovernorConfig())
    >>> governor.judge([1.0, 0.9, 0.9, 0.8, 0.8, 0.8], val_loss=0.9)
    Verdict(is_healthy=True, is_disaster=False, reason='')
    >>> governor.judge([0.8, 0.7, 7.0, 7.0, 7.0], val_loss=5.0).reason
    'the training loss 7 was above 1.52 for 3 checks in a row'
    """

    def __init__(self, config: GovernorConfig, scale: LossRange | None = None) -> None:
        self.config = config
        self.scale = scale or LossRange.of(config.uninformed_loss or TEN_CLASSES, is_guess=config.uninformed_loss is None)
        self.rollbacks = 0
        self.rollbacks_in_a_row = 0  # without a healthy epoch between them
        self.forgive()

    def forgive(self) -> None:
        """Forget all losses, so that later ones are not compared with them.

        Call it after a deliberate change that raises the loss. The governor itself calls it when a spike returns after a rollback although
        no seed could have caused it. Until enough new losses are known, only losses that are not finite are disasters.
        """
        self._training = Watch(self.config, may_drift=False)
        self._validation = Watch(self.config, may_drift=True)  # overfitting raises it slowly, and a rollback does not help against that
        self._is_informed = False
        self._uninformed_checks = 0  # in a row

    def judge(self, train_losses: Sequence[float], val_loss: float | None, *, is_blameless: bool = False) -> Verdict:
        """Judge an epoch by the means of its chunks, in order, and by the validation loss if there is one.

        `is_blameless` means that no seed could have caused a spike. If such a spike comes back after a rollback, it lies in the data and is
        accepted. Losses that are not finite are not remembered.
        """
        verdict = self._verdict(train_losses, val_loss)
        is_finite = _not_finite(train_losses, val_loss) == ""
        if verdict.is_disaster and is_finite and is_blameless and self.rollbacks_in_a_row > 0:
            self.forgive()
            return Verdict(is_healthy=True, is_disaster=False, reason=f"accepted, with no seed to blame: {verdict.reason}")
        return verdict

    def note_rollback(self) -> None:
        """Count a rollback."""
        self.rollbacks += 1
        self.rollbacks_in_a_row += 1

    def _verdict(self, train_losses: Sequence[float], val_loss: float | None) -> Verdict:
        """Apply the three rules to an epoch, and remember its losses if all are finite."""
        if reason := _not_finite(train_losses, val_loss):
            return Verdict(is_healthy=False, is_disaster=True, reason=reason)
        spikes = [self._see_training(loss) for loss in train_losses]
        if val_loss is not None:
            spikes.append(self._see_validation(val_loss))
        if reason := next(filter(None, [self._collapse(), *spikes]), ""):  # collapse first: it is often a spike too, and says more
            return Verdict(is_healthy=False, is_disaster=True, reason=reason)
        worry = self._worry()
        return Verdict(is_healthy=not worry, is_disaster=False, reason=worry)

    def _see_training(self, loss: float) -> str:
        """Add the loss of one chunk; return the reason if it is a disaster, else an empty string."""
        self._training.see(loss, self.scale)
        # Once the run has learned something, count the losses in a row of a model that knows nothing.
        if not self.scale.is_guess:
            self._is_informed |= self._training.is_enough and is_informed(self._training.losses, self.scale)
            knows_nothing = self._is_informed and self.scale.relative(loss) >= COLLAPSED
            self._uninformed_checks = self._uninformed_checks + 1 if knows_nothing else 0
        if self._training.spikes < self.config.spike_checks:
            return ""
        return f"the training loss {loss:.3g} was above {self._training.limit:.3g} for {self._training.spikes} checks in a row"

    def _collapse(self) -> str:
        """Return the reason if the run has collapsed, else an empty string."""
        if self._uninformed_checks < self.config.spike_checks:
            return ""
        return (
            f"the training loss fell back to that of a model that knows nothing: "
            f"at least {COLLAPSED:.0%} of {self.scale.uninformed:.3g} for {self._uninformed_checks} checks in a row"
        )

    def _see_validation(self, loss: float) -> str:
        """Add the validation loss of an epoch; return the reason if it is a disaster, else an empty string.

        One high validation loss is weak evidence: it only counts if the training loss spikes too, or if it lasts.
        """
        self._validation.see(loss, self.scale)
        spikes, limit = self._validation.spikes, self._validation.limit
        if spikes >= self.config.spike_checks:
            return f"the validation loss {loss:.3g} was above {limit:.3g} for {spikes} epochs in a row"
        if spikes and self._training.spikes:
            return f"the validation loss {loss:.3g} is above {limit:.3g}, and the training loss above {self._training.limit:.3g}"
        return ""

    def _worry(self) -> str:
        """Return why the state should not become a snapshot although it is not a disaster; empty if it may."""
        checks = self.config.spike_checks
        if self._training.spikes:
            return f"the training loss is above {self._training.limit:.3g} for {self._training.spikes} of {checks} checks"
        if self._uninformed_checks:
            return f"the training loss is that of a model that knows nothing for {self._uninformed_checks} of {checks} checks"
        if self._validation.spikes:  # of the last validation, which may be older than this epoch
            return f"the validation loss is above {self._validation.limit:.3g} for {self._validation.spikes} of {checks} epochs"
        return ""

    def state_dict(self) -> dict[str, Any]:
        return {"governor": self.loss_state(), "rollbacks": self.rollbacks, "in_a_row": self.rollbacks_in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.load_loss_state(state["governor"])
        self.rollbacks, self.rollbacks_in_a_row = state["rollbacks"], state["in_a_row"]

    def loss_state(self) -> dict[str, Any]:
        """Return the losses that the governor remembers; a snapshot of the host holds them too."""
        return {
            "training": self._training.state_dict(),
            "validation": self._validation.state_dict(),
            "is_informed": self._is_informed,
            "uninformed_checks": self._uninformed_checks,
        }

    def load_loss_state(self, state: dict[str, Any]) -> None:
        """Restore the remembered losses; keep the counts of rollbacks."""
        self._training.load_state_dict(state["training"])
        self._validation.load_state_dict(state["validation"])
        self._is_informed, self._uninformed_checks = state["is_informed"], state["uninformed_checks"]


def _not_finite(train_losses: Sequence[float], val_loss: float | None) -> str:
    """Return a description of the first loss that is not finite; an empty string if all are."""
    for number, loss in enumerate(train_losses, start=1):
        if not math.isfinite(loss):
            return f"the training loss of check {number} of {len(train_losses)} is {loss}"
    if val_loss is not None and not math.isfinite(val_loss):
        return f"the validation loss is {val_loss}"
    return ""
