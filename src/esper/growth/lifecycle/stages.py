"""Stages of a seed, the state that a controller sees, the actions that it can return, and the gates that the actions must pass.

The stages depend on how a seed is raised (`LifecycleConfig.raise_mode`):

| stage      | joint                                       | shadow                                                            |
|------------|---------------------------------------------|-------------------------------------------------------------------|
| DORMANT    | the slot is empty                           | the same                                                          |
| GERMINATED | born as the identity, alpha 1               | born as the identity, outside the host                            |
| TRAINING   | –                                           | learns in a second forward pass that includes it; the host stays  |
|            |                                             | bit-identical to one without the seed                             |
| BLENDING   | alpha moves to a new target, or falls to 0  | alpha rises from 0 to its target; host and seed learn together;   |
|            | before the seed is pruned                   | also as for joint                                                 |
| HOLDING    | learns with the host, on probation          | the same                                                          |
| FOSSILIZED | permanent part of the host                  | the same                                                          |
| PRUNED     | removed; the host is without it             | the same                                                          |
| EMBARGOED  | the slot waits before a seed may grow in it | the same                                                          |

At the end of an epoch, a controller gets a `GrowthState`: plain numbers, nothing of the model itself. It returns a `Decision`: a set of
actions, at most one per slot, with reasons in words. A gate (`may_...`) may refuse an action; then it is not executed, and the ledger says
why. A decision may also ask for a probe: the next state then holds an estimate of the gain of every candidate. Or it asks for trials: sets
of actions of which copies of the training try each for some steps, and the best copy goes on (see `esper.growth.trials`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, get_args, runtime_checkable

from esper.growth.config import Curve, LifecycleConfig, RentConfig
from esper.growth.events import Unit
from esper.growth.lifecycle.governor import LossRange
from esper.growth.lifecycle.legal_moves import LIVING as LIVING, MOVES as MOVES, OCCUPIED as OCCUPIED, Stage as Stage
from esper.intervals import Interval
from esper.text_table import figure, with_interval

if TYPE_CHECKING:  # they import torch, which programs that only read a run do without
    from esper.gradients import GradientStats
    from esper.growth.host.layout import Place
    from esper.growth.lifecycle.ledger import SeedRecord


@dataclass(frozen=True, slots=True)
class Cost:
    """Size of a seed, of several seeds together, or of a host."""

    parameters: int
    flops: int  # per forward pass of one sample


@dataclass(frozen=True, slots=True)
class Candidate:
    """A blueprint that could grow in a slot."""

    blueprint: str
    cost: Cost
    rent: float  # in the unit of the loss, in addition to that of the seeds already in the host
    promise: float | None = None  # initial fall of the loss per step, estimated by the probe; None: not probed
    load: float = 0.0  # weights / positions that share them
    widened: tuple[str, ...] = ()  # layers that get new units; none if it grows in depth


@dataclass(frozen=True, slots=True)
class Contribution:
    """Cost of removing a seed now: validation loss without it minus validation loss with it, over the same batches.

    The host has learned to rely on the seed, so this overestimates the gain from growing it. That gain is the difference to a twin, which
    never grew.
    """

    gain: Interval  # in the unit of the loss; below 0 if the host does better without the seed
    epoch: int  # when it was measured
    unit: Unit = "batches"  # the interval rests on the differences of these
    count: int = 0  # number of them; 0: unknown

    def in_words(self) -> str:
        """Describe the contribution with its interval.

        >>> Contribution(Interval(0.0731, 0.0544, 0.0918), epoch=8).in_words()
        'its cost of removal is 0.0731 [0.0544, 0.0918]'
        >>> Contribution(Interval(0.0731, 0.0544, 0.0918), epoch=8, unit="samples", count=360).in_words()
        'its cost of removal is 0.0731 [0.0544, 0.0918] (360 samples)'
        """
        over = f" ({counted(self.count, self.unit)})" if self.count else ""
        return f"its cost of removal is {with_interval(self.gain.estimate, self.gain.low, self.gain.high)}{over}"


def counted(count: int, unit: Unit) -> str:
    """Return a number of units as text.

    >>> counted(1, "batches"), counted(1_289, "samples")
    ('1 batch', '1,289 samples')
    """
    return f"{count:,} {unit}" if count != 1 else {"samples": "1 sample", "groups": "1 group", "batches": "1 batch"}[unit]


@dataclass(frozen=True, slots=True)
class SlotState:
    """A slot as a controller sees it, with the seed in it if there is one."""

    place: Place
    stage: Stage = Stage.DORMANT
    seed: SeedRecord | None = None  # the life of the seed in it so far, as the ledger tells it; None: it is empty
    cost: Cost = Cost(0, 0)
    rent: float = 0.0  # in the unit of the loss
    alpha: float = 0.0  # 0 for a seed that is not connected
    age: int = 0  # epochs since the seed germinated
    epochs_in_stage: int = 0
    is_withdrawing: bool = False  # alpha is falling to 0, then the seed is pruned
    prune_embargo: int = 0  # epochs until it may be pruned; above 0 after a rollback that its removal may have caused
    gradients: GradientStats | None = None
    contribution: Contribution | None = None
    candidates: tuple[Candidate, ...] = ()  # blueprints that fit the slot and the rest of the budget; empty unless DORMANT
    tried: tuple[str, ...] = ()  # blueprints that grew here and were pruned

    @property
    def blueprint(self) -> str | None:
        return None if self.seed is None else self.seed.blueprint


@dataclass(frozen=True, slots=True)
class GrowthState:
    """Input of a controller: the state of one host at the end of an epoch, or before the first."""

    epoch: int  # number of finished epochs
    epochs: int | None  # planned length of the training; None: unknown
    steps_per_epoch: int
    train_losses: tuple[float, ...]  # mean per epoch, oldest first
    val_losses: tuple[float, ...]
    slots: tuple[SlotState, ...]
    host_cost: Cost
    added: Cost  # of all seeds in the host, connected or not
    parameters_left: int | None  # rest of the budget; None: no limit
    flops_left: int | None
    seeds_left: int
    rollbacks: int = 0
    scale: LossRange | None = None  # of all losses; None: not known before the end of the first epoch
    lifecycle: LifecycleConfig = field(default_factory=LifecycleConfig)  # the rules of the run
    learning_rate: float = 0.0  # of the first parameter group of the host's optimiser
    samples_per_epoch: int | None = None  # None: the grower was not told
    host_load: float = 0.0  # Σ over layers of weights / positions that share them
    rent: RentConfig = field(default_factory=RentConfig)  # the price level
    training_samples: int | None = None  # in the training data; None: unknown, so that an epoch is taken for one pass through them

    @property
    def samples(self) -> int | None:
        """Number of different training samples, as far as it is known."""
        return self.samples_per_epoch if self.training_samples is None else self.training_samples

    @property
    def uninformed_loss(self) -> float | None:
        return None if self.scale is None else self.scale.uninformed


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Something to do with one slot. `reason` is written into the ledger."""

    slot: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Germinate(Action):
    """Create a seed, raised in the way that the configuration says."""

    blueprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradual(Action):
    """An action that moves alpha over some epochs along a curve; None: as the configuration says."""

    epochs: int | None = None  # 0: at once
    curve: Curve | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance(Gradual):
    """Move a seed from TRAINING to BLENDING."""

    alpha: float | None = None  # target; None: that of the configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class Retarget(Gradual):
    """Move alpha of a seed in HOLDING or BLENDING to another target."""

    alpha: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fossilize(Action):
    """Make the seed a permanent part of the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prune(Gradual):
    """Remove the seed: at once if it is not connected, otherwise after alpha has fallen to 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrink(Action):
    """Remove a fossilized seed whose contribution no longer pays its rent. It must have been measured, see `Decision.measure_kept`."""


_ACTIONS: dict[str, type[Action]] = {kind.__name__: kind for kind in (Germinate, Advance, Retarget, Fossilize, Prune, Shrink)}


@dataclass(frozen=True, slots=True)
class Trial:
    """Actions that a controller wants to try before it takes them: a copy of the training goes on with them for some steps."""

    name: str
    actions: tuple[Action, ...] = ()  # at most one per slot; none: the copy goes on as it is

    def state_dict(self) -> dict[str, Any]:
        return {"name": self.name, "actions": [{"kind": type(action).__name__, **asdict(action)} for action in self.actions]}

    @staticmethod
    def of(state: dict[str, Any]) -> Trial:
        """Return the trial that `state_dict` describes."""
        fields = [dict(action) for action in state["actions"]]
        return Trial(state["name"], tuple(_ACTIONS[one.pop("kind")](**one) for one in fields))


@dataclass(frozen=True, slots=True)
class Decision:
    """Output of a controller."""

    actions: tuple[Action, ...] = ()  # at most one per slot
    reason: str = ""  # why nothing is done, or the common purpose of the actions
    probe: bool = False  # probe all candidates during the next epoch, apart from those in `not_probed`
    not_probed: frozenset[tuple[str, str]] = frozenset()  # (slot, blueprint) of candidates that will not be grown whatever a probe says
    measure_kept: bool = False  # measure the contributions of fossilized seeds too at the end of the next epoch
    passed_over: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # slot -> blueprint -> why it does not grow, after a probe
    trials: tuple[Trial, ...] = ()
    """Alternatives to try after the actions, the one to take where none can be tried first. The copy with the lowest validation loss plus
    rent goes on. A decision with trials may not ask for a probe."""


class Controller(Protocol):
    """Decides about one host before the first epoch and after every epoch.

    A controller may also have a `name` (the default is the name of its class). One that remembers something between decisions also needs
    `state_dict` and `load_state_dict`.
    """

    def decide(self, state: GrowthState) -> Decision:
        """Return the actions to try now."""
        ...


@runtime_checkable
class CompleteController(Controller, Protocol):
    """A controller with all optional members."""

    @property
    def name(self) -> str: ...

    def state_dict(self) -> dict[str, object]: ...

    def load_state_dict(self, state: dict[str, object]) -> None: ...


# Gates


class Answer(NamedTuple):
    """Answer of a gate. `reason` says why the move is allowed or refused."""

    passed: bool
    reason: str


def _refuse(reason: str) -> Answer:
    return Answer(False, reason)


def may_move(stage: Stage, to: Stage) -> Answer:
    """Check a move against the table of legal moves."""
    if to in MOVES[stage]:
        return Answer(True, f"{stage.name} leads to {to.name}")
    legal = ", ".join(sorted(move.name for move in MOVES[stage])) or "nothing"
    return _refuse(f"from {stage.name} a seed can go to {legal}, not to {to.name}")


def may_germinate(slot: SlotState, refusal: str | None) -> Answer:
    """Check that the slot is free and that the budget does not refuse the seed; see `Allowance.refusal`."""
    if slot.stage is Stage.EMBARGOED:
        return _refuse("the slot is under embargo after a pruned seed")
    if slot.stage is not Stage.DORMANT:
        return _refuse(f"the slot holds a seed that is {slot.stage.name}")
    return _refuse(refusal) if refusal else Answer(True, "the slot is free and the budget allows it")


def may_move_alpha(action: Gradual, alpha: float | None) -> Answer:
    """Check the target of alpha, the epochs and the curve of an action."""
    if alpha is not None and not 0 < alpha <= 1:
        return _refuse(f"alpha must be above 0 and at most 1, not {alpha:g}; to get rid of a seed, prune it")
    if action.epochs is not None and (isinstance(action.epochs, bool) or not isinstance(action.epochs, int) or action.epochs < 0):
        return _refuse(f"alpha moves over a whole number of epochs from 0 on, not {action.epochs!r}")
    if action.curve is not None and action.curve not in get_args(Curve):
        return _refuse(f"alpha moves along one of {', '.join(get_args(Curve))}, not {action.curve!r}")
    return Answer(True, "alpha may move so")


def may_blend(slot: SlotState, rules: LifecycleConfig) -> Answer:
    """Check that a seed raised in the shadow has trained long enough, with healthy gradients, to be connected."""
    if slot.stage is not Stage.TRAINING:
        return _refuse(f"only a seed that is TRAINING can begin to blend, and this slot is {slot.stage.name}")
    if slot.epochs_in_stage < rules.training_epochs:
        return _refuse(f"it has learned for {slot.epochs_in_stage} of {rules.training_epochs} epochs")
    if slot.gradients is None or slot.gradients.steps == 0:
        return _refuse("its gradients have not been measured")
    if slot.gradients.health < rules.minimum_health:
        return _refuse(f"the health of its gradients is {slot.gradients.health:.2f}, below {rules.minimum_health:g}")
    return Answer(True, f"it has learned for {slot.epochs_in_stage} epochs with healthy gradients")


def may_fossilize(slot: SlotState, rules: LifecycleConfig, *, epoch: int) -> Answer:
    """Check that the shortest probation is over and that the contribution, measured in this epoch, is above 0."""
    move = may_move(slot.stage, Stage.FOSSILIZED)
    if not move.passed:
        return move
    if slot.epochs_in_stage < rules.holding_epochs:
        return _refuse(f"it has been on probation for {slot.epochs_in_stage} of {rules.holding_epochs} epochs")
    if slot.contribution is None or slot.contribution.epoch != epoch:
        return _refuse("its cost of removal has not been measured in this epoch")
    return Answer(slot.contribution.gain.estimate > 0, slot.contribution.in_words())


def may_prune(slot: SlotState) -> Answer:
    """Check that the slot holds a seed that is neither fossilized nor being withdrawn, and whose pruning is not under embargo."""
    if slot.stage not in LIVING:
        return _refuse(f"there is nothing to prune: the slot is {slot.stage.name}")
    if slot.is_withdrawing:
        return _refuse("it is already being withdrawn")
    if slot.prune_embargo:
        return _refuse(f"the governor brought the seed back after its removal; it may be pruned in {slot.prune_embargo} epochs")
    return Answer(True, "it is not part of the host yet")


def may_shrink(slot: SlotState, *, epoch: int, refusal: str) -> Answer:
    """Check that the slot holds a kept seed whose contribution, measured in this epoch, is below its rent with its whole interval."""
    if slot.stage is not Stage.FOSSILIZED:
        return _refuse(f"only a fossilized seed can be removed so, and this slot is {slot.stage.name}; prune a seed that is not kept")
    if slot.contribution is None or slot.contribution.epoch != epoch:
        return _refuse("its cost of removal has not been measured in this epoch")
    if slot.contribution.gain.high >= slot.rent:
        return _refuse(f"{slot.contribution.in_words()}, and its rent is {figure(slot.rent)}")
    return _refuse(refusal) if refusal else Answer(True, slot.contribution.in_words())


def may_retarget(slot: SlotState) -> Answer:
    """Check that the seed is connected and is not being withdrawn."""
    if slot.stage not in (Stage.BLENDING, Stage.HOLDING):
        return _refuse(f"alpha moves only in BLENDING and HOLDING, and the seed is {slot.stage.name}")
    if slot.is_withdrawing:
        return _refuse("it is being withdrawn")
    return Answer(True, "it is connected")
