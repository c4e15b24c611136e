"""The controller that lets copies try what it may grow: when it looks, what it tries, and what it leaves to the heuristic."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from esper.growth import GrowthConfig, grow
from esper.growth.config import LookaheadConfig
from esper.growth.controllers.lookahead import Lookahead, host_wide
from esper.growth.events import TrialsCompared
from esper.growth.lifecycle.stages import Candidate, Cost, Decision, Germinate, GrowthState, Prune, Stage, Trial
from esper.runs import Event
from tests.growth.builders import QUICK, SLOTS, config, make_data, make_host
from tests.growth.controllers.test_heuristic import slot, state

FIRST = 4  # epoch of the first look in 80 epochs
WIDER = tuple(
    Candidate(name, Cost(size, 10 * size), 0.01, 0.002, 1.0, ("a.layer", "b.layer"))
    for name, size in (("widen_300", 3_000), ("widen_50", 500), ("widen_100", 1_000))
)
DEEPER = (Candidate("conv3x3", Cost(900, 9_000), 0.01, 0.001), Candidate("depthwise", Cost(300, 900), 0.001, 0.003))


def host(epoch: int = FIRST, *, loss: float = 1.8, seed: Stage = Stage.DORMANT, epochs: int = 80, samples: int = 1_000) -> GrowthState:
    """Two slots, of which the first can also be widened together with the second."""
    first = slot("a", candidates=(*WIDER, *DEEPER)) if seed is Stage.DORMANT else slot("a", blueprint="norm", stage=seed, candidates=())
    losses = (2.2, *[loss] * (epoch - 1))
    return state(epoch, train=losses, slots=(first, slot("b", candidates=DEEPER)), epochs=epochs, samples_per_epoch=samples)


def names(trials: tuple[Trial, ...]) -> list[str]:
    return [trial.name for trial in trials]


def test_it_asks_for_a_probe_and_then_for_trials_at_the_first_look_only() -> None:
    controller = Lookahead(GrowthConfig())
    asked = {epoch: controller.decide(host(epoch)) for epoch in range(1, 12)}
    assert [epoch for epoch, decision in asked.items() if decision.trials] == [FIRST]
    assert asked[FIRST - 1].probe
    assert not asked[FIRST].probe
    assert not any(decision.trials or decision.probe for epoch, decision in asked.items() if epoch < FIRST - 1)


def test_it_tries_nothing_branches_and_the_smallest_step_in_width_beside_the_plan_of_the_heuristic() -> None:
    starved, full = host(samples=100_000), host(samples=10)
    trials = Lookahead(GrowthConfig()).decide(starved).trials
    assert names(trials)[-3:] == ["nothing", "branches", "widen_100"]
    for now in (full, starved):
        fewer = Lookahead(GrowthConfig(lookahead=LookaheadConfig(plans=1))).decide(now).trials
        assert names(fewer)[-2:] == ["nothing", "branches"]
    chosen = {trial.name: [action.slot for action in trial.actions] for trial in trials}
    assert (chosen["nothing"], chosen["branches"], chosen["widen_100"]) == ([], ["a", "b"], ["a"])
    assert {move.name: [one.blueprint for _, one in move.choices] for move in host_wide(starved)} == {
        "branches": ["depthwise", "depthwise"],
        "widen_100": ["widen_100"],
        "widen_300": ["widen_300"],
    }


def test_what_the_heuristic_would_grow_is_tried_first_and_its_other_actions_are_carried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, prune = Lookahead(GrowthConfig()), Prune(slot="c", reason="it does not pay")
    grown = tuple(Germinate(slot=name, reason="it pays", blueprint="depthwise") for name in ("a", "b"))
    monkeypatch.setattr(controller.heuristic, "decide", lambda state: Decision((prune, *grown), "grows"))
    decision = controller.decide(host())
    assert decision.actions == (prune,)
    assert decision.trials[0] == Trial("heuristic", grown)
    assert names(decision.trials) == ["heuristic", "nothing", "widen_100", "widen_300"], "the branches are what the heuristic would grow"


@pytest.mark.parametrize(
    "now",
    [
        pytest.param(host(loss=0.05), id="no lead above the margin is possible"),
        pytest.param(host(seed=Stage.HOLDING), id="a seed is on trial"),
        pytest.param(host(epochs=5), id="a seed could not be kept in time"),
    ],
)
def test_it_tries_nothing_where_nothing_can_come_of_it(now: GrowthState) -> None:
    assert Lookahead(GrowthConfig()).decide(now).trials == ()


def test_a_training_with_it_says_what_was_tried_and_counts_it(capsys: pytest.CaptureFixture[str]) -> None:
    events: list[Event] = []
    grown = grow(
        make_host(),
        make_data(),
        make_data(3, seed=2),
        cross_entropy,
        epochs=10,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        controller="lookahead",
        config=config(QUICK, slots=SLOTS, lookahead=LookaheadConfig(epochs=2)),
        callbacks=[events.append],
        progress=True,
    )
    (compared,) = (event for event in events if isinstance(event, TrialsCompared))
    assert compared.epoch == 4
    assert {trial.epochs for trial in compared.trials} == {2}
    assert 0 < compared.gflops_lost < grown.gflops
    assert f"epoch 4: tried {compared.trials[0].name} " in capsys.readouterr().err
    assert grown.controller == "lookahead"
