"""Free rows of a fleet try what a controller considers, and the best takes the place of its host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch

import esper.growth.trials
from esper.fleet import Fleet, FleetError
from esper.fleet.trials import RowTrials
from esper.growth.config import GrowthConfig, LookaheadConfig
from esper.growth.events import TrialsCompared
from esper.growth.lifecycle.stages import Action, Decision, GrowthState, Trial
from esper.runs import Event
from tests.fleet.builders import CONFIG, JOINT, Scripted, germinate, host_settings, make_host, small_task

WIDE, DEEP = [germinate("blocks.0", "widen_300")], [germinate("blocks.2", "double_conv3x3")]
TRIALS = [Trial("nothing"), Trial("wide", tuple(WIDE)), Trial("deep", tuple(DEEP))]
GROWTH = GrowthConfig(lifecycle=JOINT, lookahead=LookaheadConfig(epochs=2))


@dataclass
class Trying:
    """Asks for trials after these epochs, and decides nothing else."""

    trials: Mapping[int, Sequence[Trial]]

    def decide(self, state: GrowthState) -> Decision:
        return Decision(trials=tuple(self.trials.get(state.epoch, ())))


def lives(rows: int, controllers: dict[int, Trying | Scripted]) -> tuple[list[list[float]], list[float], list[Event]]:
    """Train a fleet to its end. Return the validation losses and the FLOPs of the hosts, and all events."""
    settings, events = host_settings(len(controllers)), list[Event]()
    fleet = Fleet(small_task(), make_host, hosts=rows, growth=GROWTH, config=CONFIG, on_event=events.append)
    fleet.reset(dict(enumerate(settings)))
    trials = RowTrials(fleet, free=range(len(settings), rows))
    training = fleet.training()
    while training:
        trials.decide({row: controllers[row].decide(fleet.state(row)) for row in training}, controllers)
        training = trials.settle(fleet.advance(), controllers)
    hosts = [fleet.rows[row].lifecycles.history for row in range(len(settings))]
    return [host.val_losses for host in hosts], [host.flops / 1e9 for host in hosts], events


def test_a_host_goes_on_as_if_only_the_best_had_been_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(esper.growth.trials, "MARGIN", 0.0)
    losses, gflops, events = lives(6, {0: Trying({1: TRIALS}), 1: Trying({2: TRIALS})})
    compared = {event.env: event for event in events if isinstance(event, TrialsCompared)}
    assert compared.keys() == {0, 1}
    assert [(one.epoch, {trial.epochs for trial in one.trials}) for one in compared.values()] == [(3, {2}), (4, {2})]
    chosen: dict[str, list[Action]] = {"nothing": [], "wide": [*WIDE], "deep": [*DEEP]}
    direct, costs, _ = lives(2, {row: Scripted({row + 1: chosen[compared[row].chosen]}) for row in (0, 1)})
    for row in (0, 1):
        assert losses[row] == pytest.approx(direct[row], rel=1e-9)
        assert gflops[row] == pytest.approx(costs[row] + compared[row].gflops_lost, rel=1e-6)
    assert compared[0].chosen != "nothing", "the copies differ from the host"


def test_rows_are_free_again_after_the_trials_and_too_few_are_an_error() -> None:
    losses, _, events = lives(3, {0: Trying({1: TRIALS, 4: TRIALS})})
    assert len(losses[0]) == 8
    assert [event.epoch for event in events if isinstance(event, TrialsCompared)] == [3, 6]
    with pytest.raises(FleetError, match="host 0 wants to try 3 plans, and 1 rows are free"):
        lives(2, {0: Trying({1: TRIALS})})


def test_a_row_that_tries_something_tries_nothing_else() -> None:
    asked: list[int] = []

    class Always(Trying):
        def decide(self, state: GrowthState) -> Decision:
            asked.append(state.epoch)
            return Decision(trials=(Trial("nothing"), Trial("again"))) if state.epoch < 4 else Decision()

    losses, _, events = lives(2, {0: Always({})})
    assert len(losses[0]) == 8
    assert [event.epoch for event in events if isinstance(event, TrialsCompared)] == [2, 4]
    assert torch.isfinite(torch.tensor(losses)).all()
    assert max(asked) == 8
