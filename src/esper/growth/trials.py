"""Looking ahead: copies of a training try what the controller is considering, and the best copy goes on.

    ended = grower.after_epoch(evaluate)
    if grower.trials:
        grower.try_out(train, evaluate)     # train() makes the next steps of the training; every copy makes the same ones

A copy is the whole state of the training: weights, buffers, optimisers, schedule, seeds, ledger and the global random generators. The
copies train one after the other, from the same state and with the same batches. So the training goes on from the end of the best copy, as
if nothing else had been tried, and only the others are extra cost. Their FLOPs count as spent. Beside the live state, two copies are held
in CPU memory: the state before, and the best one so far.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from esper.growth.config import GrowthError
from esper.growth.events import TrialEnded, TrialsCompared
from esper.growth.host.averages import GrowingAverage, load_averages
from esper.growth.host.slotted import Slotted
from esper.growth.lifecycle.backend import ModuleBackend
from esper.growth.lifecycle.decisions import carry_out
from esper.growth.lifecycle.lifecycles import NOTHING, Lifecycles
from esper.growth.lifecycle.recovery import Recovery
from esper.growth.lifecycle.snapshots import copy_of
from esper.growth.lifecycle.stages import Decision, Trial
from esper.growth.measure.contribution import Evaluate, Measurement, modes_kept
from esper.growth.seed_steps import SeedSteps
from esper.rng import global_state, set_global_state
from esper.runs import Event


class TrialFailed(Exception):
    """The loss of a step in a trial is not finite. A trial that fails is lost; nothing is rolled back."""


@dataclass
class _Copy:
    """The state of a training, and what the events since the trials began say of it."""

    state: dict[str, Any]
    events: list[Event]


class Trials:
    """The trials that a controller has asked for, and the copies that make them."""

    def __init__(
        self,
        slotted: Slotted,
        lifecycles: Lifecycles[ModuleBackend],
        recovery: Recovery,
        steps: SeedSteps,
        measurement: Measurement,
        averages: Sequence[GrowingAverage],
    ) -> None:
        self._slotted, self._lifecycles, self._recovery, self._steps = slotted, lifecycles, recovery, steps
        self._measurement, self._averages = measurement, averages
        self.pending: tuple[Trial, ...] = ()
        self.are_running = False

    def request(self, decision: Decision) -> None:
        """Take the trials of a decision in place of those before."""
        if decision.trials and decision.probe:
            raise GrowthError("a decision asks for trials and for a probe; ask for the probe one epoch before the trials")
        names = [trial.name for trial in decision.trials]
        if len(set(names)) < len(names):
            raise GrowthError(f"two trials of a decision have one name ({', '.join(names)}); give each its own")
        self.pending = decision.trials

    def take_first(self, *, by: str) -> None:
        """Carry out the first trial if any are pending: the training loop goes on without trying them."""
        if self.pending and not self.are_running:
            first, self.pending = self.pending[0], ()
            carry_out(self._lifecycles, Decision(first.actions), by=by)
            self._steps.note_seeds()

    def run(self, train: Callable[[], None], evaluate: Evaluate, *, by: str) -> None:
        """Try everything that is pending, in turn, and go on with the best. The events of the others are not told.

        An error in `train` or `evaluate`, or an interrupt, restores the state before the trials.
        """
        trials, self.pending = self.pending, ()
        history, began, start, ended = self._lifecycles.history, time.perf_counter(), self._copy(), list[TrialEnded]()
        flops, spent, best = history.flops, 0, start
        self.are_running = True
        try:
            for number, trial in enumerate(trials):
                if number:
                    self._return_to(start)
                found = self._try(trial, train, evaluate, by=by)
                spent += history.flops - flops
                if all(found.worth < other.worth for other in ended):
                    best = self._copy()
                ended.append(found)
            chosen = min(ended, key=lambda one: one.worth)
            if chosen is not ended[-1]:
                self._return_to(best)
        except BaseException:
            self._return_to(start)
            raise
        finally:
            self.are_running = False
        # The result: the state and the events of the best copy, and the costs of all.
        history.flops = flops + spent
        self._lifecycles.queue(best.events)
        lost, seconds = spent / 1e9 - chosen.gflops, time.perf_counter() - began
        self._lifecycles.emit(
            TrialsCompared(epoch=self._lifecycles.epoch, chosen=chosen.name, trials=ended, gflops_lost=lost, seconds=seconds)
        )

    def _try(self, trial: Trial, train: Callable[[], None], evaluate: Evaluate, *, by: str) -> TrialEnded:
        """Go on with the actions of a trial, and evaluate it."""
        history = self._lifecycles.history
        flops, steps, loss = history.flops, history.steps, math.inf
        carry_out(self._lifecycles, Decision(trial.actions), by=by)
        self._steps.note_seeds()
        self._steps.prepare()
        rent = self._lifecycles.rent_of(self._lifecycles.added(), NOTHING)
        with suppress(TrialFailed):
            train()
            self._steps.stop_watching()
            with modes_kept(self._slotted):
                loss = self._measurement.losses(evaluate).mean
            self._steps.prepare()
        return TrialEnded(
            name=trial.name,
            val_loss=loss if math.isfinite(loss) else math.inf,
            rent=rent,
            steps=history.steps - steps,
            gflops=(history.flops - flops) / 1e9,
        )

    def _taken_events(self) -> list[Event]:
        events: list[Event] = []
        self._lifecycles.tell(events.append)
        return events

    def _copy(self) -> _Copy:
        """Copy the state of the training to CPU memory, and take the events that have not been told."""
        live = {
            "now": self._recovery.changing(),
            "governor": self._lifecycles.governor.state_dict(),
            "lifecycles": self._lifecycles.state_dict(),
            "measurement": self._measurement.state_dict(),
            "steps": self._steps.state_dict(),
            "averages": [one.average.state_dict() for one in self._averages],
            "random": global_state(),
        }
        return _Copy({**copy_of(live), "history": self._lifecycles.history.mark()}, self._taken_events())

    def _return_to(self, copy: _Copy) -> None:
        """Restore a copy, which stays as it is."""
        state = copy_of({name: part for name, part in copy.state.items() if name != "history"})
        self._taken_events()
        self._steps.stop_watching(discard=True)
        self._recovery.restore(state["now"])
        self._lifecycles.governor.load_state_dict(state["governor"])
        self._lifecycles.load_state_dict(state["lifecycles"])
        self._lifecycles.history.return_to(copy.state["history"])
        self._measurement.load_state_dict(state["measurement"])
        self._steps.load_state_dict(state["steps"])
        load_averages(self._averages, state["averages"])
        set_global_state(state["random"])
        self._steps.note_seeds()
        self._steps.prepare()

    def state_dict(self) -> list[dict[str, Any]]:
        return [trial.state_dict() for trial in self.pending]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        self.pending = tuple(map(Trial.of, state))
