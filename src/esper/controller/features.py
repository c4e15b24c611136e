"""What a controller sees of a turn: numbers for the host, for every target, and for every option, which is a move at a target.

An observation holds sets of any size, padded with zeros:

    host      [H]         the host, the turn so far, and both prices of the rent
    targets   [T, F]      see `esper.controller.turn`
    options   [T, B, G]   what may germinate at each target

and masks say what is legal. Observations depend only on the turn, so a fleet and a single run give the same ones. No number depends on the
unit of the loss. Losses run from 0 (floor of the loss scale) to 1 (uninformed loss). Gains and the estimates of the probe are in units of
that scale, which are nats for ten classes.

In the tables, `v` is the input of a feature: a `GrowthState`, a `Turn`, an `ObservedMove` or a `Seen`. The functions that a table needs are
above it. Names, units and ranges are part of the version of controller files: changing one makes existing files unusable.

Shapes: T = targets, B = options of a target, N = turns.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from esper.controller.table import Feature, FeatureTable, Scale, flag, log, share, signed_log
from esper.controller.turn import KINDS, OPS, Op, Step, Target, Turn
from esper.growth.config import HeuristicConfig
from esper.growth.controllers import heuristic
from esper.growth.controllers.heuristic import projected_loss
from esper.growth.controllers.moves import NOTHING, Move
from esper.growth.host.layout import Kind
from esper.growth.lifecycle.stages import LIVING, GrowthState, SlotState, Stage
from esper.growth.measure.contribution import rent_of
from esper.growth.seeds.blueprints import KINDS as PLACES, get_blueprint
from esper.intervals import Interval

NORM = "norm"
BLUEPRINTS = (
    *("norm", "squeeze_excite", "conv1x1", "conv3x3", "double_conv3x3", "wide_conv3x3", "bottleneck", "depthwise"),
    *("low_rank", "mlp", "attention"),
)  # that a policy knows by name; it sees others by their numbers only
RULES = HeuristicConfig()

SLOPE_EPOCHS = 4  # span of the longer slope of a loss
LOAD = "samples for each weight that a position must teach"

Thing = TypeVar("Thing")
View = TypeVar("View", "Turn", "Seen")
Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ObservedMove:
    """Input of the features of MOVE."""

    state: GrowthState
    move: Move


def when(thing: Thing | None, value: Callable[[Thing], float | None]) -> float | None:
    """Return `value(thing)`; None for None."""
    return None if thing is None else value(thing)


def ratio(part: float | None, whole: float | None) -> float | None:
    """Return part / whole; None if one of them is unknown or `whole` is 0."""
    return None if part is None or not whole else part / whole


def relative(loss: float | None, state: GrowthState) -> float | None:
    """Return a loss relative to the scale: 0 for the floor, 1 for the uninformed loss, infinity for NaN. None before the scale is known."""
    if loss is None or state.scale is None:
        return None
    return math.inf if math.isnan(loss) else state.scale.relative(loss)


def in_units(loss: float | None, state: GrowthState) -> float | None:
    """Return a difference of losses, such as a gain or a rent, in units of the scale. Before that is known, rents already are in units."""
    return loss if loss is None or state.scale is None else loss / state.scale.unit


def train_losses(state: GrowthState) -> Sequence[float]:
    """Return the training losses above the floor of the scale, where ratios are meaningful."""
    return state.train_losses if state.scale is None else state.scale.above_floor(state.train_losses)


def val_losses(state: GrowthState) -> Sequence[float]:
    """Return the validation losses above the floor of the scale."""
    return state.val_losses if state.scale is None else state.scale.above_floor(state.val_losses)


def last(losses: Sequence[float]) -> float | None:
    return losses[-1] if losses else None


def lowest(losses: Sequence[float]) -> float | None:
    return min(losses, default=None)


def log_ratio(after: float | None, before: float | None) -> float | None:
    """Return log(after / before); None if one of them is unknown or not a positive finite number."""
    if after is None or before is None or not (0 < after < math.inf and 0 < before < math.inf):
        return None
    return math.log(after) - math.log(before)


def slope(losses: Sequence[float], epochs: int) -> float | None:
    """Return the change of the log loss per epoch, over the last `epochs` or as many as there are."""
    span = min(epochs, len(losses) - 1)
    change = log_ratio(losses[-1], losses[-1 - span]) if span > 0 else None
    return None if change is None else change / span


def projected(state: GrowthState) -> float | None:
    """Return the extrapolated training loss at the end of the run, relative to the scale."""
    if state.epochs is None or not state.train_losses or not all(map(math.isfinite, state.train_losses[-2:])):
        return None
    return None if state.scale is None else projected_loss(train_losses(state), state.epochs) / state.scale.range


def gap(state: GrowthState) -> float | None:
    """Return log(validation loss / training loss)."""
    return log_ratio(last(val_losses(state)), last(train_losses(state)))


def above_best(losses: Sequence[float]) -> float | None:
    """Return log(last loss / lowest loss)."""
    return log_ratio(last(losses), lowest(losses))


def epochs_left(state: GrowthState) -> float | None:
    return None if state.epochs is None else max(state.epochs - state.epoch, 0)


def passes(epochs: float | None, state: GrowthState) -> float | None:
    """Return how often every training sample is seen in this many epochs."""
    return None if epochs is None or state.samples_per_epoch is None else ratio(epochs * state.samples_per_epoch, state.samples)


def epochs_since_best(state: GrowthState) -> int | None:
    """Return the number of epochs since the lowest validation loss."""
    best = lowest(state.val_losses)
    return None if best is None else len(state.val_losses) - 1 - state.val_losses.index(best)


def is_kept(slot: SlotState) -> bool:
    return slot.stage is Stage.FOSSILIZED


def contribution_of_all(state: GrowthState) -> float | None:
    """Return the sum of the measured contributions of all seeds, in units of the scale."""
    return in_units(sum(slot.contribution.gain.estimate for slot in state.slots if slot.contribution is not None), state)


def share_of_kind(kind: Kind) -> Feature[GrowthState]:
    return share(f"share_{kind}", "of the slots", lambda v: ratio(sum(s.place.kind == kind for s in v.slots), len(v.slots)))


HOST: FeatureTable[GrowthState] = FeatureTable((
    share("progress", "of the planned epochs", lambda v: ratio(v.epoch, v.epochs)),
    signed_log("epochs_left", "epochs", 3, 300, lambda v: epochs_left(v)),
    log("steps_left", "count", 10, 1e6, lambda v: when(epochs_left(v), lambda left: max(left * v.steps_per_epoch, 1.0))),
    log("passes", "through the data", 0.1, 1e3, lambda v: passes(v.epoch, v)),
    log("passes_left", "through the data", 0.1, 1e3, lambda v: passes(epochs_left(v), v)),
    Feature("train_loss", "of the uninformed loss", Scale.AS_IS, 0.0, 1.5, lambda v: relative(last(v.train_losses), v)),
    Feature("val_loss", "of the uninformed loss", Scale.AS_IS, 0.0, 1.5, lambda v: relative(last(v.val_losses), v)),
    Feature("best_loss", "of the uninformed loss", Scale.AS_IS, 0.0, 1.5, lambda v: relative(lowest(v.val_losses), v)),
    log("train_loss_log", "of the uninformed loss", 1e-3, 2, lambda v: relative(last(v.train_losses), v)),
    log("val_loss_log", "of the uninformed loss", 1e-3, 2, lambda v: relative(last(v.val_losses), v)),
    log("projected_train_loss", "of the uninformed loss", 1e-3, 2, lambda v: projected(v)),
    signed_log("train_slope", "log loss per epoch", 0.01, 1, lambda v: slope(train_losses(v), 1)),
    signed_log("val_slope", "log loss per epoch", 0.01, 1, lambda v: slope(val_losses(v), 1)),
    signed_log("long_train_slope", "log loss per epoch", 0.01, 1, lambda v: slope(train_losses(v), SLOPE_EPOCHS)),
    signed_log("long_val_slope", "log loss per epoch", 0.01, 1, lambda v: slope(val_losses(v), SLOPE_EPOCHS)),
    signed_log("gap", "log of validation / training loss", 0.05, 3, lambda v: gap(v)),
    signed_log("above_best", "log of validation loss / its best", 0.02, 3, lambda v: above_best(val_losses(v))),
    share("since_best", "of the planned epochs", lambda v: ratio(epochs_since_best(v), v.epochs)),
    flag("has_readout", lambda v: v.scale is not None and v.scale.readout is not None),
    Feature("readout", "of the uninformed loss", Scale.AS_IS, 0.0, 1.5, lambda v: when(v.scale, lambda scale: scale.readout)),
    signed_log("learning_rate", "", 1e-4, 1, lambda v: v.learning_rate),
    log("samples", "count", 1e2, 1e7, lambda v: v.samples),
    log("samples_per_load", LOAD, 1e-3, 1e4, lambda v: ratio(v.samples, v.host_load)),
    log("narrowest", "channels or features", 1, 4096, lambda v: min((s.place.width for s in v.slots), default=None)),
    signed_log("slots", "count", 3, 100, lambda v: len(v.slots)),
    *map(share_of_kind, PLACES),
    signed_log("added_parameters", "of the host's", 0.05, 100, lambda v: ratio(v.added.parameters, v.host_cost.parameters)),
    signed_log("added_flops", "of the host's", 0.05, 100, lambda v: ratio(v.added.flops, v.host_cost.flops)),
    signed_log("kept", "seeds", 3, 100, lambda v: sum(map(is_kept, v.slots))),
    signed_log("growing", "seeds", 3, 100, lambda v: sum(slot.blueprint is not None and not is_kept(slot) for slot in v.slots)),
    signed_log("contribution", "units, of all seeds", 1e-2, 3, lambda v: contribution_of_all(v)),
))  # fmt: skip


def falls(view: ObservedMove) -> list[float]:
    """Return the fall of the loss in an epoch that the probe estimates for each seed of a move, in units of the scale."""
    steps = max(view.state.steps_per_epoch, 1)
    found = (in_units(when(candidate.promise, lambda fall: fall * steps), view.state) for _, candidate in view.move.choices)
    return [fall for fall in found if fall is not None]


def load_after(view: ObservedMove) -> float:
    return view.state.host_load + sum(candidate.load for _, candidate in view.move.choices)


MOVE: FeatureTable[ObservedMove] = FeatureTable((
    flag("is_wider", lambda v: any(candidate.widened for _, candidate in v.move.choices)),
    flag("is_deeper", lambda v: any(not one.widened and one.blueprint != NORM for _, one in v.move.choices)),
    signed_log("seeds", "count", 1, 30, lambda v: len(v.move.choices)),
    signed_log("parameters", "of the host's", 0.02, 100, lambda v: ratio(v.move.cost.parameters, v.state.host_cost.parameters)),
    signed_log("flops", "of the host's", 0.02, 100, lambda v: ratio(v.move.cost.flops, v.state.host_cost.flops)),
    log("samples_per_load_after", LOAD, 1e-3, 1e4, lambda v: ratio(v.state.samples, load_after(v))),
    signed_log("promise", "units per epoch, of all seeds", 1e-3, 10, lambda v: sum(falls(v))),
    signed_log("largest_promise", "units per epoch", 1e-3, 10, lambda v: max(falls(v), default=None)),
))  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """Input of the features of a target, and of an option, a move at it."""

    turn: Turn
    target: Target
    move: Move = NOTHING

    @property
    def state(self) -> GrowthState:
        return self.turn.state

    @cached_property
    def slot(self) -> SlotState | None:
        """The slot with a seed that the target stands for; None for several slots and for empty ones."""
        return self.target.slots[0] if self.target.kind == "slot" and self.target.slots[0].stage is not Stage.DORMANT else None


def since_look(turn: Turn) -> float | None:
    return when(turn.looked_at, lambda epoch: turn.state.epoch - epoch)


def with_losses(value: Callable[[View], float | None]) -> Callable[[View], float | None]:
    """Return the same function, but None as long as there are no losses or their scale is not known, and where the last are not finite."""

    def found(view: View) -> float | None:
        losses = view.state.train_losses
        return None if view.state.scale is None or not losses or not all(map(math.isfinite, losses[-2:])) else value(view)

    return found


def advises(op: Op) -> Feature[Turn]:
    return flag(f"advised_{op}", lambda turn: turn.advised.op == op)


def has_probe(state: GrowthState) -> bool:
    return any(candidate.promise is not None for slot in state.slots for candidate in slot.candidates)


def plateau(state: GrowthState) -> float | None:
    """Return log(the lowest training loss of the last epochs / that before them)."""
    count, losses = RULES.plateau_epochs, state.train_losses
    if state.scale is None or len(losses) <= count:
        return None
    return log_ratio(state.scale.relative(min(losses[-count:])), state.scale.relative(losses[-1 - count]))


TURN: FeatureTable[Turn] = FeatureTable((
    *(advises(op) for op in OPS),
    log("price_of_parameters", "per e times as many", 1e-4, 1, lambda v: max(v.state.rent.parameters, 1e-4)),
    log("price_of_flops", "per e times as many", 1e-4, 1, lambda v: max(v.state.rent.flops, 1e-4)),
    signed_log("since_look", "epochs", 1, 100, since_look),
    flag("has_looked", lambda v: v.looked_at is not None),
    flag("has_probe", lambda v: has_probe(v.state)),
    flag("looks", lambda v: v.looks),
    signed_log("steps", "of the turn", 1, 30, lambda v: len(v.actions)),
    flag("has_grown", lambda v: heuristic.has_grown(v.state)),
    signed_log("living", "seeds", 1, 30, lambda v: sum(slot.stage in LIVING for slot in v.state.slots)),
    signed_log("epoch", "finished", 1, 300, lambda v: v.state.epoch),
    Feature("overfitting", "of the uninformed loss", Scale.AS_IS, -0.5, 1.0, with_losses(lambda v: heuristic.gap(v.state))),
    log("samples_needed", "of the training samples, by the projected loss", 1e-3, 1e3, with_losses(
        lambda v: ratio(heuristic.samples_for_host(v.state, heuristic.NOTHING, RULES), v.state.samples))),
    signed_log("plateau", "log of training loss / before", 0.02, 2, lambda v: plateau(v.state)),
    signed_log("parameters_left", "of the host's", 0.05, 100, lambda v: ratio(v.state.parameters_left, v.state.host_cost.parameters)),
    signed_log("flops_left", "of the host's", 0.05, 100, lambda v: ratio(v.state.flops_left, v.state.host_cost.flops)),
    signed_log("rent_now", "units, of all seeds", 1e-3, 1, lambda v: rent_of(v.state.added, v.state.host_cost, v.state.rent)),
))  # fmt: skip


def is_kind(kind: str) -> Feature[Seen]:
    return flag(f"is_{kind}", lambda v: v.target.kind == kind)


def is_place(kind: str) -> Feature[Seen]:
    return flag(f"at_{kind}", lambda v: v.target.slots[0].place.kind == kind)


def is_stage(stage: Stage) -> Feature[Seen]:
    return flag(f"stage_{stage.name.lower()}", lambda v: v.slot is not None and v.slot.stage is stage)


def of_gain(name: str, value: Callable[[Interval, float], float]) -> Feature[Seen]:
    """Return a feature of the contribution of the seed in a slot and of its rent, in units."""

    def found(v: Seen) -> float | None:
        slot = v.slot
        return None if slot is None or slot.contribution is None else in_units(value(slot.contribution.gain, slot.rent), v.state)

    return signed_log(name, "units", 1e-3, 3, found)


TARGET: FeatureTable[Seen] = FeatureTable((
    *(is_kind(kind) for kind in KINDS),
    *(is_place(kind) for kind in PLACES),
    *(is_stage(stage) for stage in (Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED, Stage.EMBARGOED)),
    flag("is_advised", lambda v: v.turn.advised.target == v.target.name),
    signed_log("slots", "count", 1, 30, lambda v: len(v.target.slots)),
    signed_log("options", "count", 1, 30, lambda v: len(v.target.moves)),
    share("depth", "of the host's FLOPs", lambda v: v.target.slots[0].place.depth),
    share("behind", "of the host's FLOPs", lambda v: ratio(v.target.slots[-1].place.flops_behind, v.state.host_cost.flops)),
    log("width", "channels or features", 1, 4096, lambda v: v.target.slots[0].place.width),
    signed_log("earlier", "seeds at this place", 1, 4, lambda v: v.target.slots[0].place.earlier),
    signed_log("tried", "blueprints", 1, 10, lambda v: sum(len(slot.tried) for slot in v.target.slots)),
    share("alpha", "of the seed", lambda v: when(v.slot, lambda slot: slot.alpha)),
    signed_log("age", "epochs", 1, 100, lambda v: when(v.slot, lambda slot: slot.age)),
    signed_log("in_stage", "epochs", 1, 100, lambda v: when(v.slot, lambda slot: slot.epochs_in_stage)),
    signed_log("parameters", "of the host's", 0.02, 100, lambda v: when(
        v.slot, lambda slot: ratio(slot.cost.parameters, v.state.host_cost.parameters))),
    signed_log("flops", "of the host's", 0.02, 100, lambda v: when(v.slot, lambda slot: ratio(slot.cost.flops, v.state.host_cost.flops))),
    signed_log("rent", "units", 1e-3, 1, lambda v: when(v.slot, lambda slot: in_units(slot.rent, v.state))),
    flag("is_measured", lambda v: v.slot is not None and v.slot.contribution is not None and v.slot.contribution.epoch == v.state.epoch),
    of_gain("gain", lambda gain, rent: gain.estimate),
    of_gain("gain_over_rent", lambda gain, rent: gain.estimate - rent),
    of_gain("low_over_rent", lambda gain, rent: gain.low - rent),
    of_gain("high_over_rent", lambda gain, rent: gain.high - rent),
    share("health", "of the gradients", lambda v: when(v.slot, lambda slot: when(slot.gradients, lambda found: found.health))),
))  # fmt: skip


def of_move(feature: Feature[ObservedMove]) -> Feature[Seen]:
    """Return a feature of moves as a feature of options."""
    value = feature.value
    return Feature(feature.name, feature.unit, feature.scale, feature.low, feature.high, lambda v: value(ObservedMove(v.state, v.move)))


def is_blueprint(name: str) -> Feature[Seen]:
    return flag(f"is_{name}", lambda v: v.move.name == name)


def factor(view: Seen) -> float | None:
    """Return by how much a move widens, as a share of the present units."""
    first = view.move.choices[0][1]
    return get_blueprint(first.blueprint).share if first.widened else None


def new_rent(view: Seen) -> float:
    return sum(candidate.rent for _, candidate in view.move.choices)


def worth(view: Seen) -> float | None:
    """Return the fall of the loss in an epoch that the probe estimates, minus the rent, in units."""
    found = [one.promise for _, one in view.move.choices if one.promise is not None]
    return in_units(sum(found) * max(view.state.steps_per_epoch, 1) - new_rent(view), view.state) if found else None


@with_losses
def worth_at_the_end(view: Seen) -> float | None:
    return in_units(sum(heuristic.worth_at_the_end(one, view.state) for _, one in view.move.choices), view.state)


@with_losses
def over_longer_training(view: Seen) -> float | None:
    times = max(heuristic.speed_over_longer_training(view.state, one) for _, one in view.move.choices)
    return max(times, 1e-3) if math.isfinite(times) else 1e6


@with_losses
def samples_needed(view: Seen) -> float | None:
    return ratio(heuristic.samples_for_host(view.state, view.move.cost, RULES), view.state.samples)


OPTION: FeatureTable[Seen] = FeatureTable((
    *(of_move(feature) for feature in MOVE.features),
    *(is_blueprint(name) for name in BLUEPRINTS),
    flag("is_option", lambda v: True),
    flag("is_advised", lambda v: v.turn.advised == Step("germinate", v.target.name, v.move.name)),
    log("factor", "new units / present ones", 0.1, 30, factor),
    signed_log("rent", "units", 1e-3, 1, lambda v: in_units(new_rent(v), v.state)),
    signed_log("worth", "units", 1e-3, 3, worth),
    signed_log("worth_at_the_end", "units", 1e-3, 3, worth_at_the_end),
    log("over_longer_training", "fall of the loss for the same FLOPs", 0.1, 1e4, over_longer_training),
    log("samples_needed", "of the training samples, by the projected loss", 1e-3, 1e4, samples_needed),
    log("samples_per_load", LOAD, 1e-3, 1e5, lambda v: ratio(v.state.samples, sum(one.load for _, one in v.move.choices))),
    flag("was_tried", lambda v: any(one.blueprint in slot.tried for slot, one in v.move.choices)),
    share("probed", "of the seeds", lambda v: ratio(sum(one.promise is not None for _, one in v.move.choices), len(v.move.choices))),
))  # fmt: skip

HOST_WIDTH = HOST.width + TURN.width
# Columns that tell what the other controller would do.
ADVICE = {
    "host": [HOST.width + TURN.column(f"advised_{op}") for op in OPS],
    "targets": [TARGET.column("is_advised")],
    "options": [OPTION.column("is_advised")],
}


def _version() -> str:
    tables = "\n".join(table.description() for table in (HOST, TURN, TARGET, OPTION))
    return "7-" + hashlib.sha256(f"{tables}\n{OPS}".encode()).hexdigest()[:8]


# Raise the number before the dash when a feature changes its meaning but not its description. Other changes alter the hash behind it.
VERSION = _version()


class Observation(NamedTuple):
    """What a policy sees of one turn, and what it may do: names of the targets and of their options, in order."""

    host: Vector  # [H]
    targets: Vector  # [T, F]
    options: Vector  # [T, B, G]
    may: NDArray[np.bool_]  # [ops]
    where: NDArray[np.bool_]  # [ops, T]
    which: NDArray[np.bool_]  # [T, B]
    names: tuple[tuple[str, tuple[str, ...]], ...]  # of every target, and of the blueprints of its options

    def without_advice(self) -> Observation:
        """Return the same without what the other controller would do."""
        host, targets, options = self.host.copy(), self.targets.copy(), self.options.copy()
        host[ADVICE["host"]] = targets[:, ADVICE["targets"]] = options[..., ADVICE["options"]] = 0
        return self._replace(host=host, targets=targets, options=options)

    def numbers_of(self, step: Step) -> tuple[int, int, int]:
        """Return the numbers of a step's operation, target and blueprint; 0 for what it has not."""
        op = OPS.index(step.op)
        if not step.target:
            return op, 0, 0
        target = next(number for number, (name, _) in enumerate(self.names) if name == step.target)
        return op, target, self.names[target][1].index(step.blueprint) if step.blueprint else 0

    def step_of(self, op: int, target: int, blueprint: int) -> Step:
        """Return the step with these numbers."""
        name = OPS[op]
        if name in ("wait", "look"):
            return Step(name)
        return Step(name, self.names[target][0], self.names[target][1][blueprint] if name == "germinate" else "")


def observe(turn: Turn) -> Observation:
    """Return what a policy sees of a turn."""
    targets, state = turn.targets, turn.state
    width = max((len(target.moves) for target in targets), default=1) or 1
    host = np.concatenate([HOST.scaled(np.array(HOST.values(state), float)), TURN.scaled(np.array(TURN.values(turn), float))])
    of_targets = TARGET.scaled(np.array([TARGET.values(Seen(turn, target)) for target in targets], float).reshape(-1, TARGET.width))
    raw = np.zeros((len(targets), width, OPTION.width), np.float32)
    which = np.zeros((len(targets), width), bool)
    where = np.zeros((len(OPS), len(targets)), bool)
    for row, target in enumerate(targets):
        if allowed := turn.may_germinate(target):
            values = np.array([OPTION.values(Seen(turn, target, target.moves[name])) for name in allowed], float)
            raw[row, : len(values)], which[row, : len(values)] = OPTION.scaled(values), True
        where[OPS.index("germinate"), row] = bool(allowed)
        for op in OPS[3:]:
            where[OPS.index(op), row] = turn.may(op, target)
    may: NDArray[np.bool_] = np.array(where.any(1))
    may[OPS.index("wait")], may[OPS.index("look")] = True, turn.may_look()
    return Observation(host, of_targets, raw, may, where, which, tuple((target.name, tuple(target.moves)) for target in targets))


def stacked(some: Sequence[Observation], targets: int, width: int) -> dict[str, NDArray[np.generic]]:
    """Return observations and masks of several turns, padded to these numbers of targets and options."""
    found: dict[str, NDArray[np.generic]] = {
        "host": np.stack([one.host for one in some]),
        "targets": np.zeros((len(some), targets, TARGET.width), np.float32),
        "options": np.zeros((len(some), targets, width, OPTION.width), np.float32),
        "may": np.stack([one.may for one in some]),
        "where": np.zeros((len(some), len(OPS), targets), bool),
        "which": np.zeros((len(some), targets, width), bool),
    }
    for row, one in enumerate(some):
        count, options = one.which.shape
        found["targets"][row, :count], found["options"][row, :count, :options] = one.targets, one.options
        found["where"][row, :, :count], found["which"][row, :count, :options] = one.where, one.which
    return found
