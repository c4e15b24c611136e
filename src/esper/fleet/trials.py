"""Looking ahead in a fleet: free rows try what a controller considers, and the best of them takes the place of the host.

    trials = RowTrials(fleet)
    trials.decide(decisions, free=spare_rows)       # in place of fleet.decide
    rows = trials.settle(fleet.advance())           # the rows of hosts; those that have tried are free again

A trial lasts until the next decision. In all else it is what `esper.growth.trials` does for a single model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from esper.fleet.config import FleetError
from esper.fleet.fleet import Fleet
from esper.growth.events import TrialEnded, TrialsCompared
from esper.growth.lifecycle.lifecycles import NOTHING
from esper.growth.lifecycle.stages import Decision, Trial


@dataclass(frozen=True)
class _Tried:
    """The trials of one host, and what it had cost and survived before them."""

    trials: dict[int, Trial]  # row -> what it tries; the first row is that of the host
    flops: int
    rollbacks: int


class RowTrials:
    """The trials that the rows of a fleet make until the next decision."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._tried: dict[int, _Tried] = {}  # by the row of the host

    def decide(self, decisions: Mapping[int, Decision], *, free: Iterable[int], by: str = "controller") -> None:
        """Carry out decisions as `Fleet.decide` does. A host makes the first of its trials itself, and free rows make the others."""
        spare, copies = iter(free), dict[int, int]()
        for row, decision in decisions.items():
            if decision.trials:
                try:
                    rows = [row, *(next(spare) for _ in decision.trials[1:])]
                except (StopIteration, RuntimeError) as error:
                    raise FleetError(f"host {row} wants to try {len(decision.trials)} plans, and too few rows are free") from error
                lifecycles = self.fleet.rows[row].lifecycles
                trials = dict(zip(rows, decision.trials, strict=True))
                self._tried[row] = _Tried(trials, lifecycles.history.flops, lifecycles.governor.rollbacks)
                copies |= dict.fromkeys(rows[1:], row)
        self.fleet.decide({row: replace(decision, trials=()) for row, decision in decisions.items()}, by=by)
        self.fleet.copy(copies)
        tried = {row: trial for one in self._tried.values() for row, trial in one.trials.items()}
        for row, trial in tried.items():
            self.fleet.rows[row].decide(Decision(trial.actions), by=by)  # keeps a probe from being asked for twice

    def settle(self, rows: Sequence[int]) -> list[int]:
        """Go on with the best row of every host that has tried something. Return the rows of `rows` that are hosts."""
        ended = {host: {row: self._ended(row, one) for row in one.trials} for host, one in self._tried.items()}
        best = {host: min(found, key=lambda row: found[row].worth) for host, found in ended.items()}
        self.fleet.copy({host: row for host, row in best.items() if row != host})
        for host, found in ended.items():
            lifecycles, chosen = self.fleet.rows[host].lifecycles, found[best[host]]
            lost = sum(one.gflops for one in found.values()) - chosen.gflops
            lifecycles.history.flops += round(1e9 * lost)
            trials = list(found.values())
            lifecycles.emit(TrialsCompared(epoch=lifecycles.epoch - 1, chosen=chosen.name, trials=trials, gflops_lost=lost, seconds=0.0))
        free = {row for host, found in ended.items() for row in found if row != host}
        for row in free:
            self.fleet.rows[row].is_given_up = True  # so that it costs nothing until a host is copied into it
        self._tried = {}
        return [row for row in rows if row not in free]

    def _ended(self, row: int, tried: _Tried) -> TrialEnded:
        """Return what came of the trial of a row. One that was rolled back is lost."""
        lifecycles = self.fleet.rows[row].lifecycles
        history, loss = lifecycles.history, lifecycles.history.val_losses[-1]
        is_lost = not math.isfinite(loss) or lifecycles.governor.rollbacks > tried.rollbacks
        return TrialEnded(
            name=tried.trials[row].name,
            val_loss=math.inf if is_lost else loss,
            rent=lifecycles.rent_of(lifecycles.added(), NOTHING),
            steps=self.fleet.steps_per_decision,
            gflops=(history.flops - tried.flops) / 1e9,
        )
