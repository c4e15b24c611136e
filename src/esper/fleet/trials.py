"""Looking ahead in a fleet: free rows try what a controller considers, and the best of them takes the place of its host.

    trials = RowTrials(fleet, free=spare_rows)
    rows = fleet.training()
    while rows:
        trials.decide({row: controllers[row].decide(fleet.state(row)) for row in rows}, controllers)
        rows = trials.settle(fleet.advance(), controllers)

In all else trials are what `esper.growth.trials` makes of a single model. The events of a row that tries something carry its number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
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
    """Carries out the decisions about the hosts of a fleet, and makes the trials that they ask for in free rows.

    A host makes the first of its trials in its own row, by its own controller, and free rows make the others by copies of the controller.
    """

    def __init__(self, fleet: Fleet, *, free: Iterable[int]) -> None:
        self.fleet, self._free, self._length = fleet, list(free), fleet.growth.lookahead.epochs
        self._tried: dict[int, _Trials] = {}  # by the row of the host
        self._copies: dict[int, Controller] = {}  # of controllers, by row
        self.compared: dict[int, list[TrialsCompared]] = {}  # the trials that have ended, by the row of the host

    def decide(self, decisions: Mapping[int, Decision], controllers: Mapping[int, Controller]) -> None:
        """Carry out these decisions about hosts, made by these controllers, and what the copies of controllers decide in other rows."""
        copies = {row: copy.decide(self.fleet.state(row)) for row, copy in self._copies.items() if not self.fleet.rows[row].is_over}
        carried_out = {row: _with_first(decision) for row, decision in copies.items()}
        carried_out |= {row: _with_first(one) if row in self._tried else replace(one, trials=()) for row, one in decisions.items()}
        self.fleet.decide(carried_out)
        begun = {row: self._begin(row, one.trials) for row, one in decisions.items() if one.trials and row not in self._tried}
        others = {row: host for host, trials in begun.items() for row in trials.by_row if row != host}
        self.fleet.copy(others)
        self._copies |= {row: deepcopy(controllers[host]) for row, host in others.items()}
        self.fleet.decide({row: Decision(trial.actions) for trials in begun.values() for row, trial in trials.by_row.items()})
        self._tried |= begun

    def _begin(self, host: int, trials: Sequence[Trial]) -> _Trials:
        if len(self._free) < len(trials) - 1:
            raise FleetError(f"host {host} wants to try {len(trials)} plans, and {len(self._free)} rows are free")
        rows, lifecycles = [host, *(self._free.pop() for _ in trials[1:])], self.fleet.rows[host].lifecycles
        return _Trials(dict(zip(rows, trials, strict=True)), lifecycles.epoch, lifecycles.history.flops, lifecycles.governor.rollbacks)

    def settle(self, rows: Sequence[int], controllers: Mapping[int, Controller]) -> list[int]:
        """After a segment of training: end the trials that have taken long enough. Return the rows of hosts among `rows`.

        Where another row is the best, the controller of the host goes on from the state of the copy there.
        """
        for host in list(self._tried):
            begun = self._tried[host].epoch
            if host not in rows or self.fleet.rows[host].lifecycles.epoch - begun >= self._length:
                best = self._end(host, self._tried.pop(host))
                if best is not None and (save := getattr(best, "state_dict", None)) is not None:
                    controllers[host].load_state_dict(save())  # type: ignore[attr-defined]
        others = {row for trials in self._tried.values() for row in trials.by_row} - self._tried.keys()
        return [row for row in rows if row not in others and row not in self._free]

    def _end(self, host: int, trials: _Trials) -> Controller | None:
        """Go on with the best row of a host. Return the controller of that row if it is another."""
        rows, ended = list(trials.by_row), [self._ended(row, trials) for row in trials.by_row]
        chosen = best_of(ended, self.fleet.rows[host].lifecycles.unit)
        best = rows[ended.index(chosen)]
        if best != host:
            self.fleet.copy({host: best})
        lifecycles, lost = self.fleet.rows[host].lifecycles, sum(one.gflops for one in ended) - chosen.gflops
        lifecycles.history.flops += round(1e9 * lost)
        compared = TrialsCompared(epoch=lifecycles.epoch, chosen=chosen.name, trials=ended, gflops_lost=lost, seconds=0.0)
        lifecycles.emit(compared)
        self.compared.setdefault(host, []).append(compared)
        controller = self._copies.get(best)
        for row in rows[1:]:
            self.fleet.rows[row].is_given_up = True  # so that it costs nothing until a host is copied into it
            del self._copies[row]
        self._free += rows[1:]
        return controller

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
