"""Features of a controller's observation, in two tables: HOST, and MOVE for each move that it could make (see `esper.controller.plans`).

No feature depends on the unit of the loss or on a price. Losses run from 0 (floor of the loss scale) to 1 (uninformed loss). Gains and the
estimates of the probe are in units of that scale, which are nats for ten classes.

In the tables, `v` is the input of a feature: a `GrowthState` or an `ObservedMove`. The functions that a table needs are above it.

Names, units and ranges are part of the layout version of controller files: changing one makes existing files unusable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from esper.controller.config import NORM
from esper.controller.table import Feature, FeatureTable, Scale, flag, log, share, signed_log
from esper.growth.controllers.heuristic import projected_loss
from esper.growth.controllers.moves import Move
from esper.growth.host.layout import Kind
from esper.growth.lifecycle.stages import GrowthState, SlotState, Stage
from esper.growth.seeds.blueprints import KINDS

SLOPE_EPOCHS = 4  # span of the longer slope of a loss
LOAD = "samples for each weight that a position must teach"

Thing = TypeVar("Thing")


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
    *map(share_of_kind, KINDS),
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
