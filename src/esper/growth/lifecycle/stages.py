"""The life of a seed: its stages, the moves between them, and the gates that a move must pass.

| stage      | raised jointly                              | raised in the shadow                                              |
|------------|---------------------------------------------|-------------------------------------------------------------------|
| DORMANT    | the slot is empty                           | the same                                                          |
| GERMINATED | born as the identity, alpha 1               | born as the identity, outside the host                            |
| TRAINING   | –                                           | learns in a second forward pass that uses it; the host is as if   |
|            |                                             | it were not there, to the last bit                                |
| BLENDING   | only when alpha is moved:                   | alpha rises from 0 to its target; host and seed learn together    |
|            | on the way out it falls to 0                |                                                                   |
| HOLDING    | learns with the host, on probation          | the same                                                          |
| FOSSILIZED | part of the host for good                   | the same                                                          |
| PRUNED     | taken out, the host is as before            | the same                                                          |
| EMBARGOED  | the slot must wait before anything may grow | the same                                                          |

What a controller sees at the end of an epoch: plain numbers, nothing of the model itself.

What a controller may decide, and the protocol that every controller follows.

A decision is a set of actions, at most one for a slot, with the reason in words. What a gate refuses does not happen, and the ledger
says why. A decision may also ask for a probe: the next one then knows what every candidate promises.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol, runtime_checkable

from esper.gradients import gradient_health
from esper.growth.config import GrowthError, Lifecycle, Rent
from esper.growth.host.layout import Place
from esper.statistics import Interval
from esper.text_table import figure


class Stage(IntEnum):
    """In the order of life; the numbers are what checkpoints and observations hold."""

    DORMANT = 0
    GERMINATED = 1
    TRAINING = 2
    BLENDING = 3
    HOLDING = 4
    FOSSILIZED = 5
    PRUNED = 6
    EMBARGOED = 7


MOVES: dict[Stage, frozenset[Stage]] = {
    Stage.DORMANT: frozenset({Stage.GERMINATED}),
    Stage.GERMINATED: frozenset({Stage.TRAINING, Stage.HOLDING, Stage.PRUNED}),
    Stage.TRAINING: frozenset({Stage.BLENDING, Stage.PRUNED}),
    Stage.BLENDING: frozenset({Stage.HOLDING, Stage.PRUNED}),
    Stage.HOLDING: frozenset({Stage.BLENDING, Stage.FOSSILIZED, Stage.PRUNED}),
    Stage.FOSSILIZED: frozenset(),
    Stage.PRUNED: frozenset({Stage.EMBARGOED}),
    Stage.EMBARGOED: frozenset({Stage.DORMANT}),
}

LIVING = frozenset({Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING})  # may still be pruned
OCCUPIED = LIVING | {Stage.FOSSILIZED}  # there is a seed in the slot


TEN_CLASSES = math.log(10)  # loss of a constant predictor of ten equal classes, in nats: rents and thresholds were chosen there


@dataclass(frozen=True, slots=True)
class LossScale:
    """What losses are relative to, so that no decision depends on their unit.

    >>> LossScale.of(2.0).relative(0.5), LossScale.of(-1.0, loss_range=4.0).relative(-2.0)
    (0.25, 0.75)
    """

    uninformed: float  # loss of the best constant predictor
    range: float  # how far the loss can fall below it
    is_guess: bool = False  # it is only the loss that the training began with

    @classmethod
    def of(cls, uninformed: float, *, loss_range: float | None = None, is_guess: bool = False) -> LossScale:
        """Down to 0 where no range is given, which needs an uninformed loss above it."""
        if loss_range is None and not uninformed > 0:
            what = "the training began with a loss of" if is_guess else "a constant predictor has a loss of"
            raise GrowthError(
                f"{what} {uninformed:.4g}. Gains are judged as shares of that loss, so it must be above 0; say how far the loss can fall "
                "below it with GrowthConfig(loss_range=...), such as 3.0 for a log-likelihood"
            )
        return cls(uninformed, uninformed if loss_range is None else loss_range, is_guess)

    @property
    def floor(self) -> float:
        return self.uninformed - self.range

    @property
    def unit(self) -> float:
        """The loss that counts as one nat does for ten classes."""
        return self.range / TEN_CLASSES

    def relative(self, loss: float) -> float:
        """1 for the uninformed loss, 0 for the floor."""
        return (loss - self.floor) / self.range

    def above_floor(self, losses: Sequence[float]) -> tuple[float, ...]:
        return tuple(loss - self.floor for loss in losses)


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a seed, or of all of them."""

    parameters: int
    flops: int  # of a forward pass for one sample


@dataclass(frozen=True, slots=True)
class Candidate:
    """A blueprint that could grow in a slot."""

    blueprint: str
    cost: Cost
    rent: float  # in the unit of the loss, with everything that is in the host already
    promise: float | None = None  # fall of the loss per step at first, from the probe; None: not probed
    load: float = 0.0  # weights / positions that share them


@dataclass(frozen=True, slots=True)
class Contribution:
    """What removing a seed now would cost: validation loss without it minus loss with it, over the same batches.

    The host has learned to rely on the seed, so this is more than growing it gained. That is the difference to a twin that never grew.
    """

    gain: Interval  # in the unit of the loss; below 0 where the host does better without the seed
    epoch: int  # when it was measured

    def in_words(self) -> str:
        """
        >>> Contribution(Interval(0.0731, 0.0544, 0.0918), epoch=8).in_words()
        'removing it now would raise the loss by 0.0731 [0.0544, 0.0918]'
        >>> Contribution(Interval(-0.01, -0.02, 0.005), epoch=8).in_words()
        'removing it now would lower the loss by 0.0100 [-0.0050, 0.0200]'
        """
        gain = self.gain
        what, ends = ("raise", (gain.low, gain.high)) if gain.estimate >= 0 else ("lower", (-gain.high, -gain.low))
        return f"removing it now would {what} the loss by {figure(abs(gain.estimate))} [{figure(ends[0])}, {figure(ends[1])}]"


@dataclass(frozen=True, slots=True)
class GradientStats:
    """Of a seed's gradient since the last epoch; norms are global L2, unscaled, before clipping."""

    steps: int
    mean_norm: float
    max_norm: float
    health: float  # in [0, 1], see esper.gradients.gradient_health
    skipped: int  # steps not taken because a gradient was not finite, that of the seed or that of its host

    @classmethod
    def of(cls, norms: Sequence[float], *, skipped: int = 0, unit: float = 1.0) -> GradientStats:
        """From the norm of every step, which is not finite where the gradient was not. `unit` is that of the loss, see LossScale.

        `skipped` counts the steps that were not taken although the seed's own gradient was finite.

        >>> GradientStats.of([0.5, 1.5]).mean_norm
        1.0
        """
        finite = [norm for norm in norms if math.isfinite(norm)]
        mean = sum(finite) / len(finite) if finite else 0.0
        health = sum(gradient_health(norm / unit) for norm in finite) / len(norms) if norms else 0.0
        return cls(len(norms), mean, max(finite, default=0.0), health, skipped + len(norms) - len(finite))


@dataclass(frozen=True, slots=True)
class SlotState:
    place: Place
    stage: Stage = Stage.DORMANT
    blueprint: str | None = None
    cost: Cost = Cost(0, 0)
    rent: float = 0.0
    alpha: float = 0.0
    age: int = 0  # epochs since it germinated
    epochs_in_stage: int = 0
    is_withdrawing: bool = False  # alpha falls, then the seed is pruned
    gradients: GradientStats | None = None
    contribution: Contribution | None = None
    candidates: tuple[Candidate, ...] = ()  # what may grow here and fits the budget; empty unless the slot is dormant
    tried: tuple[str, ...] = ()  # blueprints that grew here and were pruned


@dataclass(frozen=True, slots=True)
class GrowthState:
    epoch: int  # finished so far
    epochs: int | None  # planned; None: unknown
    steps_per_epoch: int
    train_losses: tuple[float, ...]  # mean per epoch, oldest first
    val_losses: tuple[float, ...]
    slots: tuple[SlotState, ...]
    host_cost: Cost
    added: Cost  # by all seeds that are in the host
    parameters_left: int | None  # of the budget; None: no limit
    flops_left: int | None
    seeds_left: int
    rollbacks: int = 0
    scale: LossScale | None = None  # of all losses; None: before the first epoch, where nobody has told it
    lifecycle: Lifecycle = field(default_factory=Lifecycle)  # the rules of the run
    learning_rate: float = 0.0  # of the host's first group
    samples_per_epoch: int | None = None  # where the grower was told
    host_load: float = 0.0  # Σ over layers of weights / positions that share them
    rent: Rent = field(default_factory=Rent)  # the price level

    @property
    def uninformed_loss(self) -> float | None:
        return None if self.scale is None else self.scale.uninformed


@dataclass(frozen=True, slots=True)
class Action:
    slot: str
    reason: str


@dataclass(frozen=True, slots=True)
class Germinate(Action):
    """A new seed, raised as the configuration says."""

    blueprint: str


@dataclass(frozen=True, slots=True)
class Advance(Action):
    """From TRAINING to BLENDING."""


@dataclass(frozen=True, slots=True)
class Retarget(Action):
    """Alpha moves to another target: HOLDING or BLENDING."""

    alpha: float


@dataclass(frozen=True, slots=True)
class Fossilize(Action):
    """Keep it for good."""


@dataclass(frozen=True, slots=True)
class Prune(Action):
    """Take it out: at once where it is not connected, else after alpha has fallen."""


@dataclass(frozen=True, slots=True)
class Decision:
    actions: tuple[Action, ...] = ()
    reason: str = ""  # why nothing, or what the actions are for together
    probe: bool = False  # look during the next epoch at what each candidate would do for the loss


class Controller(Protocol):
    """Decides before the first epoch and after every one.

    It may also have a `name` (else it goes by that of its class), and `state_dict` with `load_state_dict` where it remembers something.
    """

    def decide(self, state: GrowthState) -> Decision: ...


@runtime_checkable
class CompleteController(Controller, Protocol):
    """With all that it may have. What it remembers is in its state."""

    @property
    def name(self) -> str: ...

    def state_dict(self) -> dict[str, object]: ...

    def load_state_dict(self, state: dict[str, object]) -> None: ...
