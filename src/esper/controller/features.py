"""Features of a controller's observation, in three tables: HOST, SLOT (per slot) and CANDIDATE (per candidate of a slot).

A fourth table, MOVE, describes a move in a host (see `esper.controller.plans`) without any price.

No feature depends on the unit of the loss. Losses run from 0 (floor of the loss scale) to 1 (uninformed loss). Gains, rents, estimates of
the probe and norms of gradients are in units of that scale, which are nats for ten classes.

In the tables, `v` is the input of a feature: an `ObservedHost`, `ObservedSlot`, `ObservedCandidate` or `ObservedMove`. The functions that a
table needs are above it.

Names, units and ranges are part of the layout version of controller files: changing one makes existing files unusable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from esper.controller.plans import NORM, Move
from esper.controller.table import Feature, FeatureTable, Scale, flag, log, share, signed_log
from esper.growth.controllers.heuristic import projected_loss
from esper.growth.host.layout import Kind
from esper.growth.lifecycle.stages import Candidate, GrowthState, SlotState, Stage
from esper.growth.measure.contribution import rent_of
from esper.growth.seeds.blueprints import KINDS
from esper.statistics import Interval

SLOPE_EPOCHS = 4  # span of the longer slope of a loss
LOAD = "samples for each weight that a position must teach"

Thing = TypeVar("Thing")


@dataclass(frozen=True, slots=True)
class ObservedHost:
    """Input of the features of HOST."""

    state: GrowthState


@dataclass(frozen=True, slots=True)
class ObservedSlot:
    """Input of the features of SLOT."""

    state: GrowthState
    slot: SlotState
    may: Mapping[str, bool]  # op -> whether it passes its gate


@dataclass(frozen=True, slots=True)
class ObservedCandidate:
    """Input of the features of CANDIDATE."""

    state: GrowthState
    slot: SlotState
    name: str  # blueprint
    candidate: Candidate | None  # None: it cannot grow here now
    may: bool  # whether it may germinate


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


def rule(name: str) -> Feature[ObservedHost]:
    """Return the feature of one length in the rules of the run, such as that of a stage."""
    return signed_log(name, "epochs", 3, 30, lambda v: getattr(v.state.lifecycle, name))


HOST: FeatureTable[ObservedHost] = FeatureTable((
    flag("has_horizon", lambda v: v.state.epochs is not None),
    share("progress", "of the planned epochs", lambda v: ratio(v.state.epoch, v.state.epochs)),
    signed_log("epochs_left", "epochs", 3, 300, lambda v: epochs_left(v.state)),
    signed_log("epoch", "epochs", 3, 300, lambda v: v.state.epoch),
    Feature("train_loss", "of the uninformed loss", Scale.AS_IS, 0.0, 1.5, lambda v: relative(last(v.state.train_losses), v.state)),
    Feature("val_loss", "of the uninformed loss", Scale.AS_IS, 0.0, 1.5, lambda v: relative(last(v.state.val_losses), v.state)),
    log("train_loss_log", "of the uninformed loss", 1e-4, 2, lambda v: relative(last(v.state.train_losses), v.state)),
    log("val_loss_log", "of the uninformed loss", 1e-4, 2, lambda v: relative(last(v.state.val_losses), v.state)),
    log("projected_train_loss", "of the uninformed loss", 1e-4, 2, lambda v: projected(v.state)),
    signed_log("train_slope", "log loss per epoch", 0.01, 1, lambda v: slope(train_losses(v.state), 1)),
    signed_log("val_slope", "log loss per epoch", 0.01, 1, lambda v: slope(val_losses(v.state), 1)),
    signed_log("long_train_slope", "log loss per epoch", 0.01, 1, lambda v: slope(train_losses(v.state), SLOPE_EPOCHS)),
    signed_log("long_val_slope", "log loss per epoch", 0.01, 1, lambda v: slope(val_losses(v.state), SLOPE_EPOCHS)),
    signed_log("gap", "log of validation / training loss", 0.05, 3, lambda v: gap(v.state)),
    signed_log("above_best", "log of validation loss / its best", 0.02, 3, lambda v: above_best(val_losses(v.state))),
    flag("has_parameter_budget", lambda v: v.state.parameters_left is not None),
    flag("has_flops_budget", lambda v: v.state.flops_left is not None),
    signed_log("parameters_left", "of the host's", 0.05, 100, lambda v: ratio(v.state.parameters_left, v.state.host_cost.parameters)),
    signed_log("flops_left", "of the host's", 0.05, 100, lambda v: ratio(v.state.flops_left, v.state.host_cost.flops)),
    share("seeds_left", "of the slots", lambda v: ratio(v.state.seeds_left, len(v.state.slots))),
    signed_log("rent_of_parameters", "units", 1e-3, 10, lambda v: v.state.rent.parameters),
    signed_log("rent_of_flops", "units", 1e-3, 10, lambda v: v.state.rent.flops),
    signed_log("rent", "units", 1e-3, 3, lambda v: rent_of(v.state.added, v.state.host_cost, v.state.rent)),
    signed_log("added_parameters", "of the host's", 0.05, 100, lambda v: ratio(v.state.added.parameters, v.state.host_cost.parameters)),
    signed_log("added_flops", "of the host's", 0.05, 100, lambda v: ratio(v.state.added.flops, v.state.host_cost.flops)),
    signed_log("learning_rate", "", 1e-5, 1, lambda v: v.state.learning_rate),
    signed_log("rollbacks", "count", 1, 10, lambda v: v.state.rollbacks),
    log("host_parameters", "count", 1e2, 1e9, lambda v: v.state.host_cost.parameters),
    log("host_flops", "per sample", 1e3, 1e12, lambda v: v.state.host_cost.flops),
    log("steps_per_epoch", "count", 1, 1e5, lambda v: v.state.steps_per_epoch or None),
    log("samples_per_epoch", "count", 1e2, 1e7, lambda v: v.state.samples_per_epoch),
    log("samples", "count", 1e2, 1e7, lambda v: v.state.samples),
    log("samples_per_load", LOAD, 1e-3, 1e4, lambda v: ratio(v.state.samples, v.state.host_load)),
    signed_log("slots", "count", 3, 100, lambda v: len(v.state.slots)),
    flag("is_raised_in_shadow", lambda v: v.state.lifecycle.raise_mode == "shadow"),
    *map(rule, ("training_epochs", "blend_epochs", "holding_epochs", "withdraw_epochs", "embargo_epochs")),
    share("minimum_health", "", lambda v: v.state.lifecycle.minimum_health),
    share("alpha_target", "", lambda v: v.state.lifecycle.alpha_target),
))  # fmt: skip


def is_kind(kind: Kind) -> Feature[ObservedSlot]:
    return flag(f"is_{kind}", lambda v: v.slot.place.kind == kind)


def is_in_stage(stage: Stage) -> Feature[ObservedSlot]:
    return flag(f"is_{stage.name.lower()}", lambda v: v.slot.stage is stage)


def may(what: str) -> Feature[ObservedSlot]:
    return flag(f"may_{what}", lambda v: v.may[what])


def gain(name: str, end: Callable[[Interval], float]) -> tuple[Feature[ObservedSlot], Feature[ObservedSlot]]:
    """Return the features of one value of the interval of a seed's contribution, before and after rent."""
    return (
        signed_log(name, "units", 1e-3, 3, lambda v: when(v.slot.contribution, lambda c: in_units(end(c.gain), v.state))),
        signed_log(
            f"{name}_after_rent",
            "units",
            1e-3,
            3,
            lambda v: when(v.slot.contribution, lambda c: in_units(end(c.gain) - v.slot.rent, v.state)),
        ),
    )


def widest(state: GrowthState) -> int:
    """Return the largest width of any slot."""
    return max(slot.place.width for slot in state.slots)


def largest(state: GrowthState) -> int:
    """Return the largest number of positions of any slot."""
    return max(slot.place.positions for slot in state.slots)


SLOT: FeatureTable[ObservedSlot] = FeatureTable((
    flag("exists", lambda v: True),
    *map(is_kind, KINDS),
    *map(is_in_stage, Stage),
    *map(may, ("germinate", "advance", "retarget", "fossilize", "prune")),
    share("depth", "of the host", lambda v: v.slot.place.depth),
    log("width", "channels or features", 1, 4096, lambda v: v.slot.place.width),
    log("positions", "count", 1, 1e5, lambda v: v.slot.place.positions),
    log("relative_width", "of the widest slot", 0.01, 1, lambda v: v.slot.place.width / widest(v.state)),
    log("relative_positions", "of the slot with most", 1e-4, 1, lambda v: v.slot.place.positions / largest(v.state)),
    share("flops_behind", "of the host's", lambda v: ratio(v.slot.place.flops_behind, v.state.host_cost.flops)),
    share("alpha", "", lambda v: v.slot.alpha),
    share("relative_age", "of the planned epochs", lambda v: ratio(v.slot.age, v.state.epochs)),
    share("relative_epochs_in_stage", "of the planned epochs", lambda v: ratio(v.slot.epochs_in_stage, v.state.epochs)),
    signed_log("age", "epochs", 2, 100, lambda v: v.slot.age),
    signed_log("epochs_in_stage", "epochs", 2, 100, lambda v: v.slot.epochs_in_stage),
    flag("is_withdrawing", lambda v: v.slot.is_withdrawing),
    signed_log("parameters", "of the host's", 0.02, 10, lambda v: ratio(v.slot.cost.parameters, v.state.host_cost.parameters)),
    signed_log("flops", "of the host's", 0.02, 10, lambda v: ratio(v.slot.cost.flops, v.state.host_cost.flops)),
    signed_log("rent", "units", 1e-3, 3, lambda v: in_units(v.slot.rent, v.state)),
    flag("has_gradients", lambda v: v.slot.gradients is not None),
    log("gradient_norm", "mean L2, units", 1e-6, 1e3, lambda v: when(v.slot.gradients, lambda g: in_units(g.mean_norm, v.state))),
    share("gradient_health", "", lambda v: when(v.slot.gradients, lambda g: g.health)),
    flag("is_measured", lambda v: v.slot.contribution is not None),
    *gain("contribution", lambda interval: interval.estimate),
    *gain("contribution_low", lambda interval: interval.low),
    *gain("contribution_high", lambda interval: interval.high),
    signed_log("measured_ago", "epochs", 1, 30, lambda v: when(v.slot.contribution, lambda c: v.state.epoch - c.epoch)),
    signed_log("tried", "blueprints", 1, 10, lambda v: len(v.slot.tried)),
))  # fmt: skip


def relative_parameters(view: ObservedCandidate) -> float | None:
    return when(view.candidate, lambda candidate: ratio(candidate.cost.parameters, view.state.host_cost.parameters))


def relative_flops(view: ObservedCandidate) -> float | None:
    return when(view.candidate, lambda candidate: ratio(candidate.cost.flops, view.state.host_cost.flops))


def estimated_fall(view: ObservedCandidate) -> float | None:
    """Return the fall of the loss in an epoch that the probe estimates, in units of the scale."""
    estimate = None if view.candidate is None else view.candidate.promise
    return in_units(when(estimate, lambda fall: fall * max(view.state.steps_per_epoch, 1)), view.state)


def rent_in_units(view: ObservedCandidate) -> float | None:
    return when(view.candidate, lambda candidate: in_units(candidate.rent, view.state))


def estimated_fall_after_rent(view: ObservedCandidate) -> float | None:
    return when(estimated_fall(view), lambda fall: fall - (rent_in_units(view) or 0.0))


def weights_per_width(view: ObservedCandidate) -> float | None:
    """Return weights / width²: 1 for a square dense layer, 9 for a 3×3 convolution."""
    return when(view.candidate, lambda candidate: candidate.cost.parameters / view.slot.place.width**2)


def reuse(view: ObservedCandidate) -> float | None:
    """Return the multiplications per weight and position: 1 for a convolution, less for a branch on pooled values, more for attention."""
    return when(view.candidate, lambda candidate: ratio(candidate.cost.flops, 2 * candidate.cost.parameters * view.slot.place.positions))


CANDIDATE: FeatureTable[ObservedCandidate] = FeatureTable((
    flag("exists", lambda v: True),
    flag("fits", lambda v: v.candidate is not None),
    flag("may_germinate", lambda v: v.may),
    flag("grows_here", lambda v: v.slot.blueprint == v.name),
    flag("was_tried", lambda v: v.name in v.slot.tried),
    flag("is_wider", lambda v: v.candidate is not None and bool(v.candidate.widened)),
    signed_log("widened", "layers", 1, 30, lambda v: when(v.candidate, lambda c: len(c.widened))),
    signed_log("parameters", "of the host's", 0.02, 100, relative_parameters),
    signed_log("flops", "of the host's", 0.02, 100, relative_flops),
    signed_log("rent", "units", 1e-3, 3, rent_in_units),
    log("samples_per_load", LOAD, 1e-2, 1e5, lambda v: when(v.candidate, lambda c: ratio(v.state.samples, c.load))),
    log("weights_per_width", "weights / width²", 1e-3, 1e2, weights_per_width),
    log("reuse", "multiplications of a weight at each position", 1e-3, 10, reuse),
    flag("is_probed", lambda v: v.candidate is not None and v.candidate.promise is not None),
    signed_log("promise", "units per epoch", 1e-3, 3, estimated_fall),
    signed_log("promise_after_rent", "units per epoch", 1e-3, 3, estimated_fall_after_rent),
))  # fmt: skip


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


def share_of_kind(kind: Kind) -> Feature[ObservedMove]:
    return share(f"share_{kind}", "of the slots", lambda v: ratio(sum(s.place.kind == kind for s in v.state.slots), len(v.state.slots)))


def falls(view: ObservedMove) -> list[float]:
    """Return the fall of the loss in an epoch that the probe estimates for each seed of a move, in units of the scale."""
    seen = (ObservedCandidate(view.state, slot, candidate.blueprint, candidate, True) for slot, candidate in view.move.choices)
    return [fall for fall in map(estimated_fall, seen) if fall is not None]


def load_after(view: ObservedMove) -> float:
    return view.state.host_load + sum(candidate.load for _, candidate in view.move.choices)


MOVE: FeatureTable[ObservedMove] = FeatureTable((
    share("progress", "of the planned epochs", lambda v: ratio(v.state.epoch, v.state.epochs)),
    signed_log("epochs_left", "epochs", 3, 300, lambda v: epochs_left(v.state)),
    log("steps_left", "count", 10, 1e6, lambda v: when(epochs_left(v.state), lambda left: max(left * v.state.steps_per_epoch, 1.0))),
    log("passes", "through the data", 0.1, 1e3, lambda v: passes(v.state.epoch, v.state)),
    log("passes_left", "through the data", 0.1, 1e3, lambda v: passes(epochs_left(v.state), v.state)),
    Feature("train_loss", "of the uninformed loss", Scale.AS_IS, 0.0, 1.5, lambda v: relative(last(v.state.train_losses), v.state)),
    Feature("val_loss", "of the uninformed loss", Scale.AS_IS, 0.0, 1.5, lambda v: relative(last(v.state.val_losses), v.state)),
    Feature("best_loss", "of the uninformed loss", Scale.AS_IS, 0.0, 1.5, lambda v: relative(lowest(v.state.val_losses), v.state)),
    log("train_loss_log", "of the uninformed loss", 1e-3, 2, lambda v: relative(last(v.state.train_losses), v.state)),
    log("val_loss_log", "of the uninformed loss", 1e-3, 2, lambda v: relative(last(v.state.val_losses), v.state)),
    log("projected_train_loss", "of the uninformed loss", 1e-3, 2, lambda v: projected(v.state)),
    signed_log("train_slope", "log loss per epoch", 0.01, 1, lambda v: slope(train_losses(v.state), 1)),
    signed_log("val_slope", "log loss per epoch", 0.01, 1, lambda v: slope(val_losses(v.state), 1)),
    signed_log("long_train_slope", "log loss per epoch", 0.01, 1, lambda v: slope(train_losses(v.state), SLOPE_EPOCHS)),
    signed_log("long_val_slope", "log loss per epoch", 0.01, 1, lambda v: slope(val_losses(v.state), SLOPE_EPOCHS)),
    signed_log("gap", "log of validation / training loss", 0.05, 3, lambda v: gap(v.state)),
    signed_log("above_best", "log of validation loss / its best", 0.02, 3, lambda v: above_best(val_losses(v.state))),
    share("since_best", "of the planned epochs", lambda v: ratio(epochs_since_best(v.state), v.state.epochs)),
    log("uninformed_loss", "nats", 0.3, 10, lambda v: v.state.uninformed_loss),
    signed_log("learning_rate", "", 1e-4, 1, lambda v: v.state.learning_rate),
    log("samples", "count", 1e2, 1e7, lambda v: v.state.samples),
    log("samples_per_load", LOAD, 1e-3, 1e4, lambda v: ratio(v.state.samples, v.state.host_load)),
    log("narrowest", "channels or features", 1, 4096, lambda v: min((s.place.width for s in v.state.slots), default=None)),
    signed_log("slots", "count", 3, 100, lambda v: len(v.state.slots)),
    *map(share_of_kind, KINDS),
    signed_log("added_parameters", "of the host's", 0.05, 100, lambda v: ratio(v.state.added.parameters, v.state.host_cost.parameters)),
    signed_log("added_flops", "of the host's", 0.05, 100, lambda v: ratio(v.state.added.flops, v.state.host_cost.flops)),
    signed_log("kept", "seeds", 3, 100, lambda v: sum(map(is_kept, v.state.slots))),
    signed_log("growing", "seeds", 3, 100, lambda v: sum(slot.blueprint is not None and not is_kept(slot) for slot in v.state.slots)),
    signed_log("contribution", "units, of all seeds", 1e-2, 3, lambda v: contribution_of_all(v.state)),
    flag("grows", lambda v: bool(v.move.choices)),
    flag("is_wider", lambda v: any(candidate.widened for _, candidate in v.move.choices)),
    flag("is_deeper", lambda v: any(not one.widened and one.blueprint != NORM for _, one in v.move.choices)),
    signed_log("seeds", "count", 1, 30, lambda v: len(v.move.choices)),
    signed_log("parameters", "of the host's", 0.02, 100, lambda v: ratio(v.move.cost.parameters, v.state.host_cost.parameters)),
    signed_log("flops", "of the host's", 0.02, 100, lambda v: ratio(v.move.cost.flops, v.state.host_cost.flops)),
    log("samples_per_load_after", LOAD, 1e-3, 1e4, lambda v: ratio(v.state.samples, load_after(v))),
    signed_log("promise", "units per epoch, of all seeds", 1e-3, 10, lambda v: sum(falls(v))),
    signed_log("largest_promise", "units per epoch", 1e-3, 10, lambda v: max(falls(v), default=None)),
))  # fmt: skip
