"""A turn: steps that see one another, and what a policy sees of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from esper.controller.features import ADVICE, HOST_WIDTH, OPTION, TARGET, TURN, observe, stacked
from esper.controller.turn import LOOK, OPS, WAIT, Step, Turn, steps_of, targets_of
from esper.fleet import Fleet, FleetConfig, HostConfig
from esper.growth.config import GrowthConfig, RentConfig
from esper.growth.controllers.heuristic import Heuristic
from esper.growth.lifecycle.stages import Candidate, Cost, Decision, Fossilize, Germinate, GrowthState, Prune, Stage
from esper.tasks import load_task
from tests.controller.hosts import LARGE, SMALL, drawn_state, seed_on_trial, slot, state
from tests.growth.builders import in_other_units


def wide(*units: str, name: str = "widen_100", cost: int = 400) -> Candidate:
    return Candidate(name, Cost(cost * len(units), 10_000), rent=0.01, promise=0.001, load=3.0, widened=units)


def row_of_three() -> GrowthState:
    """Three slots at layers in a row, and a fourth at a layer of its own."""
    return state(
        slot("a", candidates=(LARGE, wide("a"), wide("a", "b", "c", name="widen_100_chain"))),
        slot("b", candidates=(LARGE, wide("b"), wide("b", "c", name="widen_100_chain"))),
        slot("c", candidates=(SMALL, wide("c"))),
        slot("d", candidates=(SMALL, wide("d"))),
    )


def fleet_of(rent: RentConfig | None = None) -> Fleet:
    task = load_task("digits")
    config = FleetConfig(batch_size=16, steps_per_decision=4, validation_samples=64)
    fleet = Fleet(task, task.maker("conv-2x2"), hosts=1, growth=GrowthConfig(), config=config)
    fleet.reset({0: HostConfig(horizon=16, rent=rent or RentConfig())})
    return fleet


def germinated(turn: Turn) -> set[tuple[str, str]]:
    return {(action.slot, action.blueprint) for action in turn.actions if isinstance(action, Germinate)}


# Targets and steps


def test_targets_are_slots_rows_all_rows_and_all_slots() -> None:
    targets = {target.name: target for target in targets_of(row_of_three())}
    assert [(name, target.kind) for name, target in targets.items()] == [
        *((name, "slot") for name in "abcd"),
        ("row a", "row"),
        ("row d", "row"),
        ("all rows", "rows"),
        ("all slots", "slots"),
    ]
    chosen = {
        name: {move.name: [one.place.name for one, _ in move.choices] for move in target.moves.values()} for name, target in targets.items()
    }
    assert chosen["row a"] == {"widen_100": ["a"]}, "by the candidate that widens all three layers"
    assert chosen["all rows"] == {"widen_100": ["a", "d"]}
    assert chosen["a"] == {"double_conv3x3": ["a"], "widen_100": ["a"]}, "the widening of the whole row is that of the row"
    assert chosen["d"] == {"conv1x1": ["d"]}
    assert chosen["all slots"] == {"double_conv3x3": ["a", "b"], "conv1x1": ["c", "d"]}


def test_no_two_steps_mean_the_same() -> None:
    rng = np.random.default_rng(0)
    for now in [row_of_three(), *(drawn_state(rng) for _ in range(50))]:
        turn = Turn(now)
        found = [(step.op, frozenset(map(repr, turn.after(step, "why").actions))) for step in turn.legal()]
        assert len(set(found)) == len(found)


def test_a_turn_waits_looks_and_grows_only_where_a_seed_could_still_be_kept() -> None:
    late = replace(row_of_three(), epoch=14, epochs=16)
    assert Turn(late).legal() == [WAIT]
    assert LOOK not in Turn(replace(late, epoch=13)).legal(), "a probe takes an epoch"
    assert {step.op for step in Turn(replace(late, epoch=13)).legal()} == {"wait", "germinate"}
    assert LOOK in Turn(late := replace(late, epoch=12)).legal()
    assert LOOK not in Turn(late).after(LOOK).legal(), "once in a turn"
    assert Turn(late).after(LOOK).after(WAIT).decision("why") == Decision((), "why", probe=True)


def test_seeds_are_judged_alone_or_all_at_once() -> None:
    turn = Turn(state(seed_on_trial("a"), seed_on_trial("b"), seed_on_trial("c", gain=-0.1)))
    assert [step for step in turn.legal() if step.op == "fossilize"] == [Step("fossilize", name) for name in ("a", "b", "all slots")]
    after = turn.after(Step("fossilize", "all slots")).after(Step("prune", "c"), "it harms").after(WAIT)
    assert [(type(action), action.slot) for action in after.actions] == [(Fossilize, "a"), (Fossilize, "b"), (Prune, "c")]
    assert after.actions[0].reason.startswith("its cost of removal is ")
    assert after.actions[2].reason == "it harms"
    assert after.is_over
    assert [one.stage for one in after.state.slots] == [Stage.FOSSILIZED, Stage.FOSSILIZED, Stage.BLENDING]


def test_a_seed_uses_up_its_slot_and_the_budget_for_the_steps_behind_it() -> None:
    turn = Turn(replace(row_of_three(), parameters_left=1_300, seeds_left=2))
    after = turn.after(Step("germinate", "row a", "widen_100"))
    assert germinated(after) == {("a", "widen_100_chain")}
    assert [step.blueprint for step in after.legal() if step.target == "a"] == []
    assert ("b", "double_conv3x3") not in {(step.target, step.blueprint) for step in after.legal()}, "the budget has 100 parameters left"
    assert Step("germinate", "d", "conv1x1") in after.legal()
    assert [step for step in after.after(Step("germinate", "d", "conv1x1")).legal() if step.op == "germinate"] == [], "two seeds at most"


@pytest.mark.parametrize("step", [Step("germinate", "row blocks.0.conv", "widen_100"), Step("germinate", "all slots", "conv3x3")])
def test_the_state_of_a_turn_is_what_the_host_becomes(step: Step) -> None:
    fleet = fleet_of(RentConfig(parameters=0.02, flops=0.007))
    fleet.decide({0: Decision()})
    fleet.advance()
    turn = Turn(fleet.state(0)).after(step)
    fleet.decide({0: turn.decision()})
    found, expected = fleet.state(0), turn.state
    assert (found.added, found.seeds_left, found.parameters_left, found.flops_left) == (
        expected.added,
        expected.seeds_left,
        expected.parameters_left,
        expected.flops_left,
    )
    for one, other in zip(found.slots, expected.slots, strict=True):
        assert (one.cost, one.tried) == (other.cost, other.tried)
        assert [(seed.blueprint, seed.cost) for seed in one.candidates] == [(seed.blueprint, seed.cost) for seed in other.candidates]
        assert [seed.rent for seed in one.candidates] == pytest.approx([seed.rent for seed in other.candidates])


def test_the_gates_of_growth_refuse_no_legal_step() -> None:
    fleet, rng = fleet_of(), np.random.default_rng(1)
    done = set()
    while fleet.training():
        turn = Turn(fleet.state(0))
        while not turn.is_over:
            legal = [step for step in turn.legal() if step.op != "prune" or rng.random() < 0.05]
            op = rng.choice(sorted({step.op for step in legal}))
            some = [step for step in legal if step.op == op]
            step = some[rng.integers(len(some))]
            done.add(step.op)
            turn = turn.after(step)
        fleet.decide({0: turn.decision()})
        fleet.advance()
    assert not fleet.rows[0].lifecycles.ledger.refused
    assert done >= {"wait", "look", "germinate", "fossilize"}


# Advice


def test_the_steps_of_the_heuristic_make_its_decisions() -> None:
    fleet, heuristic = fleet_of(), Heuristic(GrowthConfig())
    grown = 0
    while fleet.training():
        now = fleet.state(0)
        decision = heuristic.decide(now)
        turn = Turn(now, steps_of(decision, now))
        while not turn.is_over:
            turn = turn.after(turn.advised)
        made, wanted = turn.decision(), decision
        assert {(type(action), action.slot) for action in made.actions} == {(type(action), action.slot) for action in wanted.actions}
        assert germinated(turn) == {(action.slot, action.blueprint) for action in wanted.actions if isinstance(action, Germinate)}
        assert made.probe == wanted.probe
        grown += len(germinated(turn))
        fleet.decide({0: decision})
        fleet.advance()
    assert grown


def test_advice_that_is_no_longer_possible_is_passed_over() -> None:
    turn = Turn(row_of_three(), (Step("germinate", "row a", "widen_100"), Step("germinate", "d", "conv1x1")))
    assert turn.advised == Step("germinate", "row a", "widen_100")
    turn = turn.after(Step("germinate", "all slots", "double_conv3x3"))
    assert turn.advised == Step("germinate", "d", "conv1x1"), "the slot of the row is taken"
    assert turn.after(turn.advised).advised == WAIT


# What a policy sees


def test_observations_are_finite_and_of_one_size_in_any_state() -> None:
    rng = np.random.default_rng(2)
    turns = [Turn(now, (LOOK,), looked_at=now.epoch - 1) for now in (drawn_state(rng, slots=1 + number % 4) for number in range(60))]
    turns += [Turn(state(epoch=0, epochs=None, train_losses=(), val_losses=(), scale=None)), Turn(row_of_three())]
    for turn in turns:
        seen = observe(turn)
        assert seen.host.shape == (HOST_WIDTH,)
        assert seen.targets.shape == (len(turn.targets), TARGET.width)
        assert seen.options.shape[2] == OPTION.width
        for part in (seen.host, seen.targets, seen.options):
            assert np.isfinite(part).all()
            assert np.abs(part).max(initial=0) <= 1.5
        numbers = [seen.numbers_of(step) for step in turn.legal()]
        assert [seen.step_of(*three) for three in numbers] == turn.legal()
        assert all(
            seen.may[op] and (op < 2 or seen.where[op, target]) and (op != 2 or seen.which[target, which]) for op, target, which in numbers
        )
        assert seen.may.sum() == len({step.op for step in turn.legal()})


@pytest.mark.parametrize("factor", [1 / 1024, 1_000.0])
def test_an_observation_does_not_depend_on_the_unit_of_the_loss(factor: float) -> None:
    rng = np.random.default_rng(3)
    for now in (drawn_state(rng) for _ in range(30)):
        here, there = observe(Turn(now)), observe(Turn(in_other_units(now, factor)))
        for part, other in ((here.host, there.host), (here.targets, there.targets), (here.options, there.options)):
            np.testing.assert_allclose(part, other, atol=2e-5)


def test_observations_of_several_hosts_are_padded() -> None:
    some = [observe(Turn(row_of_three())), observe(Turn(state(slot())))]
    together = stacked(some, 8, 5)
    for row, one in enumerate(some):
        count, options = one.which.shape
        np.testing.assert_array_equal(together["options"][row, :count, :options], one.options)
        np.testing.assert_array_equal(together["where"][row, :, :count], one.where)
        assert together["which"][row].sum() == one.which.sum()
    assert together["targets"].shape == (2, 8, TARGET.width)
    assert together["where"].shape == (2, len(OPS), 8)


def test_advice_is_seen_in_columns_of_its_own() -> None:
    now = row_of_three()
    seen, without = observe(Turn(now, (Step("germinate", "row a", "widen_100"),))), observe(Turn(now))
    op = ADVICE["host"][OPS.index("germinate")]
    assert (seen.host[op], without.host[op]) == (1, 0)
    assert seen.targets[:, ADVICE["targets"][0]].tolist() == [0, 0, 0, 0, 1, 0, 0, 0]
    assert seen.options[4, :, ADVICE["options"][0]].sum() == seen.options[..., ADVICE["options"][0]].sum() == 1
    same = np.ones(HOST_WIDTH, bool)
    same[ADVICE["host"]] = False
    np.testing.assert_array_equal(seen.host[same], without.host[same])
    alone = seen.without_advice()
    assert alone.host[op] == alone.targets[4, ADVICE["targets"][0]] == alone.options[..., ADVICE["options"][0]].sum() == 0
    np.testing.assert_array_equal(alone.host[same], seen.host[same])


def test_both_prices_of_the_rent_and_the_last_look_are_seen() -> None:
    turn = Turn(state(slot(), rent=RentConfig(parameters=0.01, flops=1.0)), looked_at=3)
    values = dict(zip((feature.name for feature in TURN.features), TURN.values(turn), strict=True))
    assert (values["price_of_parameters"], values["price_of_flops"], values["since_look"]) == (0.01, 1.0, 1)
