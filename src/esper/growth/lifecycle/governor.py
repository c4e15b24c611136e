"""The governor: says at the end of an epoch whether the run is in a state to keep, or in one to go back from.

Three things are disasters:
- a loss that is not finite, at once;
- a spike that stays: losses above the limit that the run's own recent losses set, several in a row;
- a collapse: a run that had learned something is back at the loss of a model that knows nothing.

The rules are pure functions of numbers; a `Governor` only holds the recent losses of one run. Two lists of losses are watched: training
losses, several per epoch, each the mean of a chunk of it, and validation losses, one per epoch.

Who judges a host at the end of an epoch: the governor, and what is known of rollbacks before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from esper.growth.config import GovernorConfig
from esper.growth.lifecycle.stages import TEN_CLASSES, LossScale

ENOUGH = 5  # losses before anything finite can be wrong
RECENT = 5  # losses whose median is where the run is now

# Least spread, relative to the level and in units of the loss scale, which are nats for ten classes. At convergence the measured spread
# goes to zero, and a schedule's bump or a few samples that are forgotten for a while look like an explosion. With six sigmas a loss must
# nearly double before it can be a spike, and one below 0.003 units never is; yet ten times the level is a spike at every level from 0.0004
# units upwards.
RELATIVE_FLOOR = 0.15
ABSOLUTE_FLOOR = 5e-4

INFORMED = 0.8  # of the uninformed loss; a window with a lower mean has learned something
COLLAPSED = 0.97  # of the uninformed loss; higher losses know nothing

_QUANTILE, _QUANTILE_SIGMAS = 0.75, 1.1503  # so many of the distances from the middle of a normal distribution are within so many sigmas


class Diverged(RuntimeError):
    """The run is given up: going back to healthy snapshots has led to disaster again and again.

    Where `grow` gave up, `model` is its copy as it was after the last healthy epoch, with what was kept.
    """

    model: object = None  # an nn.Module


@dataclass(frozen=True, slots=True)
class Verdict:
    is_healthy: bool  # fit to be a snapshot
    is_disaster: bool  # go back now
    reason: str = ""  # in words with the values; empty where there is nothing to say


def spread(losses: Sequence[float]) -> float:
    """Standard deviation of the losses around their trend, robustly: 0 for fewer than three.

    From the differences of neighbours, in which a trend is only a constant: a falling loss spreads widely around its mean, and a spike
    would hide in that. By the upper quartile of their distances from the middle: a spike or a bad start in the window hardly moves it, and
    it varies less from window to window than the median, by which noise of 50 % is now and then taken for a spike that stays.

    >>> spread([5.0, 4.0, 3.0, 2.0, 1.0])
    0.0
    """
    steps = [later - earlier for earlier, later in pairwise(losses)]
    if len(steps) < 2:
        return 0.0
    middle = median(steps)
    distances = sorted(abs(step - middle) for step in steps)
    return distances[int(_QUANTILE * len(distances))] / _QUANTILE_SIGMAS / math.sqrt(2)  # a difference has twice the variance


def spike_limit(losses: Sequence[float], *, sigmas: float, may_drift: bool, scale: LossScale) -> float:
    """The loss above which the next one is a spike, given those before it.

    The level is the median of the last few where the run falls, since the mean of a falling window lies far above where the run is. Where
    it rises, the mean is lower and holds it back, so that a slow explosion is noticed too; losses that `may_drift` are compared with the
    median alone.
    """
    level = median(losses[-RECENT:])
    if not may_drift:
        level = min(level, fmean(losses))
    return level + sigmas * max(spread(losses), RELATIVE_FLOOR * abs(level - scale.floor), ABSOLUTE_FLOOR * scale.unit)


def is_informed(losses: Sequence[float], scale: LossScale) -> bool:
    """Whether a run with these recent losses has learned something."""
    return scale.relative(fmean(losses)) < INFORMED


class Watch:
    """The recent losses of one kind, and how many spikes in a row they end with."""

    def __init__(self, config: GovernorConfig, *, may_drift: bool) -> None:
        self.size, self.sigmas, self.may_drift = config.window, config.spike_sigmas, may_drift
        self.losses: list[float] = []  # oldest first
        self.spikes = 0
        self.limit = math.inf  # that the last loss was held against

    @property
    def is_enough(self) -> bool:
        return len(self.losses) >= min(ENOUGH, self.size)

    def see(self, loss: float, scale: LossScale) -> None:
        self.limit = math.inf
        if self.is_enough:
            self.limit = spike_limit(self.losses, sigmas=self.sigmas, may_drift=self.may_drift, scale=scale)
        self.spikes = self.spikes + 1 if loss > self.limit else 0
        # A spike enters only as high as the limit: it does not move the window much, but a run that has become noisier for good does.
        self.losses = [*self.losses, min(loss, self.limit)][-self.size :]

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses), "spikes": self.spikes, "limit": self.limit}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])[-self.size :]
        self.spikes, self.limit = state["spikes"], state["limit"]


class Governor:
    """Judges one run epoch by epoch. `scale` is what its losses are relative to; a collapse is watched for where it is not a guess.

    A snapshot of the host holds `loss_state()`. Load it after a rollback, so that the governor forgets the losses since then; the counts
    of rollbacks stay.

    >>> governor = Governor(GovernorConfig())
    >>> governor.judge([1.0, 0.9, 0.9, 0.8, 0.8, 0.8], val_loss=0.9)
    Verdict(is_healthy=True, is_disaster=False, reason='')
    >>> governor.judge([0.8, 0.7, 7.0, 7.0, 7.0], val_loss=5.0).reason
    'the training loss 7 was above 1.52 for 3 checks in a row'
    """

    def __init__(self, config: GovernorConfig, scale: LossScale | None = None) -> None:
        self.config = config
        self.scale = scale or LossScale.of(config.uninformed_loss or TEN_CLASSES, is_guess=config.uninformed_loss is None)
        self.rollbacks = 0
        self.rollbacks_in_a_row = 0  # without a healthy epoch between them
        self.forgive()

    def forgive(self) -> None:
        """Forgets everything, where what comes is not to be held against what was: after a deliberate change that raises the loss, or a
        spike that came again after a rollback with nothing to blame. Until some losses are known again, only non-finite ones count.
        """
        self._training = Watch(self.config, may_drift=False)
        self._validation = Watch(self.config, may_drift=True)  # overfitting raises it slowly, and no rollback helps against that
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
        self.rollbacks += 1
        self.rollbacks_in_a_row += 1

    def _verdict(self, train_losses: Sequence[float], val_loss: float | None) -> Verdict:
        if reason := _not_finite(train_losses, val_loss):
            return Verdict(is_healthy=False, is_disaster=True, reason=reason)
        spikes = [self._see_training(loss) for loss in train_losses]
        if val_loss is not None:
            spikes.append(self._see_validation(val_loss))
        if reason := next(filter(None, [self._collapse(), *spikes]), ""):  # a collapse is often a spike too, and says more
            return Verdict(is_healthy=False, is_disaster=True, reason=reason)
        worry = self._worry()
        return Verdict(is_healthy=not worry, is_disaster=False, reason=worry)

    def _see_training(self, loss: float) -> str:
        """Takes in one chunk; the disaster that it makes, or nothing."""
        self._training.see(loss, self.scale)
        if not self.scale.is_guess:
            self._is_informed |= self._training.is_enough and is_informed(self._training.losses, self.scale)
            knows_nothing = self._is_informed and self.scale.relative(loss) >= COLLAPSED
            self._uninformed_checks = self._uninformed_checks + 1 if knows_nothing else 0
        if self._training.spikes < self.config.spike_checks:
            return ""
        return f"the training loss {loss:.3g} was above {self._training.limit:.3g} for {self._training.spikes} checks in a row"

    def _collapse(self) -> str:
        if self._uninformed_checks < self.config.spike_checks:
            return ""
        return (
            f"the training loss fell back to that of a model that knows nothing: "
            f"at least {COLLAPSED:.0%} of {self.scale.uninformed:.3g} for {self._uninformed_checks} checks in a row"
        )

    def _see_validation(self, loss: float) -> str:
        """One validation loss is little evidence: it counts where the training loss jumps as well, or where it stays."""
        self._validation.see(loss, self.scale)
        spikes, limit = self._validation.spikes, self._validation.limit
        if spikes >= self.config.spike_checks:
            return f"the validation loss {loss:.3g} was above {limit:.3g} for {spikes} epochs in a row"
        if spikes and self._training.spikes:
            return f"the validation loss {loss:.3g} is above {limit:.3g}, and the training loss above {self._training.limit:.3g}"
        return ""

    def _worry(self) -> str:
        """Why the state is not fit to be kept although it is no disaster yet."""
        checks = self.config.spike_checks
        if self._training.spikes:
            return f"the training loss is above {self._training.limit:.3g} for {self._training.spikes} of {checks} checks"
        if self._uninformed_checks:
            return f"the training loss is that of a model that knows nothing for {self._uninformed_checks} of {checks} checks"
        if self._validation.spikes:  # until the next validation says otherwise
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
        self._training.load_state_dict(state["training"])
        self._validation.load_state_dict(state["validation"])
        self._is_informed, self._uninformed_checks = state["is_informed"], state["uninformed_checks"]


def _not_finite(train_losses: Sequence[float], val_loss: float | None) -> str:
    for number, loss in enumerate(train_losses, start=1):
        if not math.isfinite(loss):
            return f"the training loss of check {number} of {len(train_losses)} is {loss}"
    if val_loss is not None and not math.isfinite(val_loss):
        return f"the validation loss is {val_loss}"
    return ""
