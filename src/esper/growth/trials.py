"""Looking ahead: copies of a training try what the controller is considering, and the best copy goes on.

    ended = grower.after_epoch(evaluate)
    if grower.trials:
        grower.try_out(train)           # train() goes on with the training for some epochs; every copy starts from the same state

A copy is the whole state of the training: weights, buffers, optimisers, schedule, seeds, controller, ledger, snapshots and the global
random generators. The copies train one after the other, each by its own decisions. So the training goes on from the end of the best copy,
as if nothing else had been tried, and only the others are extra cost. Their FLOPs count as spent. Beside the live state, two copies are
held in CPU memory: the state before, and the best one so far.

The best copy is the one with the lowest validation loss of its epochs plus the rent of its seeds at the end, both in the unit of the loss.
The first is what the controller would do without trials; another one goes on only if it is ahead of the first by more than the margin.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from esper.growth.config import GrowthError
from esper.growth.events import TrialEnded, TrialsCompared
from esper.growth.lifecycle.backend import AnyBackend
from esper.growth.lifecycle.lifecycles import NOTHING, Lifecycles
from esper.growth.lifecycle.snapshots import copy_of
from esper.growth.lifecycle.stages import Decision, Trial
from esper.rng import global_state, set_global_state
from esper.runs import Event

MARGIN = 0.1  # lead over the first trial that another one needs, in nats for ten classes; measured (docs/log.md)


class TrialFailed(Exception):
    """A trial has come to a disaster. It is lost; nothing is rolled back."""


@runtime_checkable
class Stateful(Protocol):
    """A part of a training that can save its state and go on from it, such as a loader with a position within an epoch."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


def checked_trials(decision: Decision) -> tuple[Trial, ...]:
    """Return the trials of a decision. Raise GrowthError if they cannot be made."""
    names = [trial.name for trial in decision.trials]
    if len(set(names)) < len(names):
        raise GrowthError(f"two trials of a decision have one name ({', '.join(names)}); give each its own")
    if decision.trials and decision.probe:
        raise GrowthError("a decision asks for trials and for a probe; ask for the probe one epoch before the trials")
    return decision.trials


def untried(trials: Sequence[Trial], *, by: str) -> Trial:
    """Return the first of these trials, for a loop that goes on without making them. Warns."""
    warnings.warn(
        f"the controller {by!r} wants to try {', '.join(trial.name for trial in trials)}, and this loop goes on without trying them, so "
        "the first is carried out; call grower.try_out(train) after the epoch, or let esper.grow train",
        RuntimeWarning,
        stacklevel=3,
    )
    return trials[0]


def run_trials(
    trials: Sequence[Trial],
    lifecycles: Lifecycles[AnyBackend],
    parts: Sequence[Stateful],
    begin: Callable[[Trial], None],
    train: Callable[[], None],
) -> None:
    """Make these trials and go on with the best. The events of the others are not told.

    `parts` hold the whole state of the training, `begin` carries out the actions of a trial, and `train` goes on with the training. An
    error, or an interrupt, restores the state before the trials.
    """
    history, began, start, ended = lifecycles.history, time.perf_counter(), _copied(parts), list[TrialEnded]()
    flops, spent, best, events = history.flops, 0, start, list[Event]()
    try:
        for number, trial in enumerate(trials):
            if number:
                _restore(parts, start)
            found = _tried(trial, lifecycles, begin, train)
            spent += history.flops - flops
            taken = _taken_events(lifecycles)
            ended.append(found)
            if best_of(ended, lifecycles.unit) is found:
                # The last one need not be copied, because it is the live state.
                best, events = _copied(parts) if number + 1 < len(trials) else best, taken
        chosen = best_of(ended, lifecycles.unit)
        if chosen is not ended[-1]:
            _restore(parts, best)
    except BaseException:
        _taken_events(lifecycles)
        _restore(parts, start)
        raise
    # The state and the events are those of the best copy, the costs those of all.
    history.flops = flops + spent
    lost, seconds = spent / 1e9 - chosen.gflops, time.perf_counter() - began
    lifecycles.queue(events)
    lifecycles.emit(TrialsCompared(epoch=lifecycles.epoch, chosen=chosen.name, trials=ended, gflops_lost=lost, seconds=seconds))


def best_of(ended: Sequence[TrialEnded], unit: float) -> TrialEnded:
    """Return the best of several trials: the first unless another is ahead of it by more than the margin."""
    best = min(ended, key=lambda one: one.worth)
    return best if best.worth < ended[0].worth - MARGIN * unit else ended[0]


def ended_as(name: str, lifecycles: Lifecycles[AnyBackend], *, since: int, gflops: float, is_lost: bool = False) -> TrialEnded:
    """Return what came of a trial that began after `since` epochs."""
    losses = [loss for loss in lifecycles.history.val_losses[since:] if math.isfinite(loss)]
    return TrialEnded(
        name=name,
        val_loss=math.inf if is_lost else min(losses, default=math.inf),
        rent=lifecycles.rent_of(lifecycles.added(), NOTHING),
        epochs=lifecycles.epoch - since,
        gflops=gflops,
    )


def _tried(trial: Trial, lifecycles: Lifecycles[AnyBackend], begin: Callable[[Trial], None], train: Callable[[], None]) -> TrialEnded:
    epoch, flops, is_lost = lifecycles.epoch, lifecycles.history.flops, False
    begin(trial)
    try:
        train()
    except TrialFailed:
        is_lost = True
    return ended_as(trial.name, lifecycles, since=epoch, gflops=(lifecycles.history.flops - flops) / 1e9, is_lost=is_lost)


def _taken_events(lifecycles: Lifecycles[AnyBackend]) -> list[Event]:
    events: list[Event] = []
    lifecycles.tell(events.append)
    return events


def _copied(parts: Sequence[Stateful]) -> list[Any]:
    """Copy the state of the training to CPU memory."""
    return [copy_of([part.state_dict() for part in parts]), global_state()]


def _restore(parts: Sequence[Stateful], copied: list[Any]) -> None:
    states, random = copied
    for part, state in zip(parts, copy_of(states), strict=True):
        part.load_state_dict(state)
    set_global_state(random)
