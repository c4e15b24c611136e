"""Looking ahead in a fleet: free rows try what a controller considers, and the best of them takes the place of its host.

    trials = RowTrials(fleet, controllers, free=spare_rows)     # controllers by row
    rows = fleet.training()
    while rows:
        trials.decide(rows)
        rows = trials.settle(fleet.advance())

In all else trials are what `esper.growth.trials` makes of a single model. The events of a row that tries something carry its number.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from esper.fleet.config import FleetError
from esper.fleet.fleet import Fleet
from esper.growth.events import TrialEnded, TrialsCompared
from esper.growth.lifecycle.stages import Controller, Decision, Trial
from esper.growth.trials import best_of, ended_as


@dataclass(frozen=True)
class _Trials:
    """The trials of one host, and what it had come to before them."""

    by_row: dict[int, Trial]  # what each row tries; the first row is that of the host
    epoch: int
    flops: int
    rollbacks: int


class RowTrials:
    """Lets the controllers of a fleet decide, and makes the trials that they ask for in free rows."""

    def __init__(self, fleet: Fleet, controllers: Mapping[int, Controller], *, free: Iterable[int]) -> None:
        self.fleet, self.controllers, self._free = fleet, dict(controllers), list(free)
        self._length = fleet.growth.lookahead.epochs
        self._tried: dict[int, _Trials] = {}  # by the row of the host

    def decide(self, rows: Sequence[int]) -> None:
        """Let the controllers of these rows decide. A host makes the first of its trials itself, and free rows make the others."""
        decisions = {row: self.controllers[row].decide(self.fleet.state(row)) for row in rows}
        busy = {row for trials in self._tried.values() for row in trials.by_row}
        self.fleet.decide(
            {row: _with_first(decision) if row in busy else replace(decision, trials=()) for row, decision in decisions.items()}
        )
        begun = {row: self._begin(row, decision.trials) for row, decision in decisions.items() if decision.trials and row not in busy}
        self.fleet.copy({row: host for host, trials in begun.items() for row in trials.by_row if row != host})
        actions = {row: Decision(trial.actions) for trials in begun.values() for row, trial in trials.by_row.items()}
        for host, trials in begun.items():
            for row in trials.by_row:
                self.controllers[row] = copy.deepcopy(self.controllers[host])
        self.fleet.decide(actions)
        self._tried |= begun

    def _begin(self, host: int, trials: Sequence[Trial]) -> _Trials:
        if len(self._free) < len(trials) - 1:
            raise FleetError(f"host {host} wants to try {len(trials)} plans, and {len(self._free)} rows are free")
        rows, lifecycles = [host, *(self._free.pop() for _ in trials[1:])], self.fleet.rows[host].lifecycles
        return _Trials(dict(zip(rows, trials, strict=True)), lifecycles.epoch, lifecycles.history.flops, lifecycles.governor.rollbacks)

    def settle(self, rows: Sequence[int]) -> list[int]:
        """After a segment of training: end the trials that have taken long enough. Return the rows of `rows` that go on."""
        over = [
            host
            for host, trials in self._tried.items()
            if host not in rows or self.fleet.rows[host].lifecycles.epoch - trials.epoch >= self._length
        ]
        gone = {row for host in over for row in self._end(host, self._tried.pop(host)) if row != host}
        return [row for row in rows if row not in gone]

    def _end(self, host: int, trials: _Trials) -> list[int]:
        """Go on with the best row of a host. Return all rows of its trials; the others are free again."""
        rows, ended = list(trials.by_row), [self._ended(row, trials) for row in trials.by_row]
        chosen = best_of(ended, self.fleet.rows[host].lifecycles.unit)
        best = rows[ended.index(chosen)]
        if best != host:
            self.fleet.copy({host: best})
            self.controllers[host] = self.controllers[best]
        lifecycles, lost = self.fleet.rows[host].lifecycles, sum(one.gflops for one in ended) - chosen.gflops
        lifecycles.history.flops += round(1e9 * lost)
        lifecycles.emit(TrialsCompared(epoch=lifecycles.epoch, chosen=chosen.name, trials=ended, gflops_lost=lost, seconds=0.0))
        for row in rows[1:]:
            self.fleet.rows[row].is_given_up = True  # so that it costs nothing until a host is copied into it
        self._free += rows[1:]
        return rows

    def _ended(self, row: int, trials: _Trials) -> TrialEnded:
        lifecycles = self.fleet.rows[row].lifecycles
        return ended_as(
            trials.by_row[row].name,
            lifecycles,
            since=trials.epoch,
            gflops=(lifecycles.history.flops - trials.flops) / 1e9,
            is_lost=lifecycles.governor.rollbacks > trials.rollbacks,
        )


def _with_first(decision: Decision) -> Decision:
    """Return a decision that takes the first of its trials: a row that tries something tries nothing else."""
    first = decision.trials[0].actions if decision.trials else ()
    return replace(decision, actions=(*decision.actions, *first), trials=())
