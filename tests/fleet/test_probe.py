"""The probe of a fleet finds the promises of a host alone, and does not change the training."""

from __future__ import annotations

import copy

import msgspec
import pytest
import torch

import esper
from esper.fleet.config import FleetConfig, HostConfig
from esper.fleet.fleet import Fleet
from esper.growth.config import GovernorConfig, GrowthConfig, HeuristicConfig, LifecycleConfig, RentConfig, SeedOptimizerConfig
from esper.growth.controllers.heuristic import Heuristic
from esper.growth.lifecycle.stages import Decision, Germinate, GrowthState, Stage
from esper.growth.measure import probe as promise
from esper.growth.seeds.blueprints import REGISTRY
from esper.tasks import Task
from tests.fleet.builders import BATCH, CONFIG, SLOTS, assert_row_equals, make_fleet, make_host, small_task, train_alone

Promises = dict[tuple[str, str], float]
# Without the widest blueprints, which take much longer and are asked in the same way.
NARROW = tuple(name for name, blueprint in REGISTRY.items() if blueprint.share is None or blueprint.share <= 1)


class Noting:
    """A heuristic that writes down what the probe has promised it."""

    name = "heuristic"

    def __init__(self, growth: GrowthConfig) -> None:
        self.heuristic = Heuristic(growth)
        self.seen: dict[int, Promises] = {}

    def decide(self, state: GrowthState) -> Decision:
        self.seen[state.epoch] = promises_in(state)
        return self.heuristic.decide(state)


def promises_in(state: GrowthState) -> Promises:
    return {
        (slot.place.name, candidate.blueprint): candidate.promise
        for slot in state.slots
        for candidate in slot.candidates
        if candidate.promise is not None
    }


class Asking(Noting):
    """Asks for a probe whenever it can, and grows nothing."""

    name = "asking"

    def decide(self, state: GrowthState) -> Decision:
        self.seen[state.epoch] = promises_in(state)
        return Decision(probe=True, not_probed=frozenset({(SLOTS[0], "norm")} if state.epoch == 1 else ()))


def train_noting(
    task: Task, setting: HostConfig, growth: GrowthConfig, config: FleetConfig = CONFIG, kind: type[Noting] = Noting
) -> tuple[esper.Grown, dict[int, Promises]]:
    """Train one host alone and return what its controller was promised."""
    controller = kind(growth)
    return train_alone(task, setting, growth, config, controller), controller.seen


# Weights in a portion: all candidates fit into one, into two, or the smaller ones alone fit into the two that four steps have room for.
# Portions and optimisers do not know of one another, so that not all of their pairs are tried.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "max_grad_norm", "least", "candidates"),
    [("adamw", None, 2**20, 38), ("adamw", None, 0, 17), ("sgd", None, 5_000, 33), ("sgd", 0.01, 0, 17), ("sgd", 0.01, 2**20, 38)],
)
def test_promises_equal_those_of_the_same_hosts_alone(
    optimizer: str, max_grad_norm: float | None, least: int, candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promise, "LEAST_PARAMETERS", least)
    growth = GrowthConfig(
        probe_steps=3, blueprints=NARROW, seed_optimizer=SeedOptimizerConfig(max_grad_norm=max_grad_norm, learning_rate_factor=0.5)
    )
    config = msgspec.structs.replace(CONFIG, optimizer=optimizer)
    settings = [HostConfig(seed=row, growth_seed=row, horizon=3, learning_rate=0.01 * (row + 1)) for row in range(2)]
    fleet = make_fleet(settings, growth, config)
    controllers = [Asking(growth) for _ in settings]
    rows = fleet.training()
    while rows:
        fleet.decide({row: controllers[row].decide(fleet.state(row)) for row in rows})
        rows = fleet.advance()
    for row, setting in enumerate(settings):
        grown, seen = train_noting(fleet.task, setting, growth, config, Asking)
        assert len(seen[2]) == candidates
        assert [(SLOTS[0], "norm") in seen[epoch] for epoch in (1, 2)] == [True, False]
        for epoch in (1, 2):
            assert controllers[row].seen[epoch] == pytest.approx(seen[epoch], rel=1e-7)  # a grower's losses are in float32
        assert fleet.rows[row].lifecycles.history.flops == pytest.approx(grown.gflops * 1e9, rel=1e-12)


# A host in which a seed is too dear.
DEAR = HostConfig(seed=2, growth_seed=7, horizon=12, learning_rate=0.005, rent=RentConfig(parameters=0.15, flops=0.15))


@pytest.mark.slow
@pytest.mark.parametrize("raise_mode", ["joint", "shadow"])
def test_hosts_that_the_heuristic_decides_about_equal_the_same_hosts_alone(raise_mode: str) -> None:
    """They look at different times, different things grow in them, and not everything is kept."""
    growth = GrowthConfig(
        probe_steps=3,
        lifecycle=LifecycleConfig(
            raise_mode=raise_mode,
            training_epochs=1,
            minimum_health=0.0,
            blend_epochs=1,
            holding_epochs=1,
            embargo_epochs=1,
            withdraw_epochs=1,
        ),
        governor=GovernorConfig(uninformed_loss=2.3026),
        heuristic=HeuristicConfig(
            grow_at=0.2,
            evidence=0.05,
            evidence_of_host=0.05,
            evidence_at_the_end=0.05,
            plateau_epochs=1,
            longer_training=0.1,
            overfit_gap=1.0,
            lost_share=1.0,
        ),
    )
    settings = [
        HostConfig(seed=1, growth_seed=7, horizon=12, learning_rate=0.01),
        DEAR,
        HostConfig(seed=3, growth_seed=7, horizon=14, learning_rate=0.04),
    ]
    fleet = make_fleet(settings, growth)
    controllers = [Noting(growth) for _ in settings]
    rows = fleet.training()
    while rows:
        fleet.decide({row: controllers[row].decide(fleet.state(row)) for row in rows})
        rows = fleet.advance()
    fleet.finish(range(len(settings)))
    for row, setting in enumerate(settings):
        grown, seen = train_noting(fleet.task, setting, growth)
        assert {epoch: set(found) for epoch, found in controllers[row].seen.items()} == {epoch: set(found) for epoch, found in seen.items()}
        for epoch, promises in seen.items():
            for key, value in promises.items():
                assert controllers[row].seen[epoch][key] == pytest.approx(value, rel=1e-7)  # a grower's losses are in float32
        assert any(seen.values())
        assert_row_equals(fleet, row, grown, atol=1e-9)
    grew = [[(entry.slot, entry.blueprint, entry.born) for entry in host.lifecycles.ledger.seeds] for host in fleet.rows]
    assert all(grew), grew
    assert len({tuple(some) for some in grew}) == len(grew)
    assert {entry.outcome for host in fleet.rows for entry in host.lifecycles.ledger.seeds} == {"kept", "pruned"}


GROWTH = GrowthConfig(probe_steps=3, blueprints=NARROW)
DEEP = tuple(name for name, blueprint in REGISTRY.items() if blueprint.share is None)
TWO = [HostConfig(seed=row, growth_seed=row, horizon=4, learning_rate=0.01) for row in range(2)]


def advance_asking(fleet: Fleet, asking: list[int]) -> None:
    fleet.decide({row: Decision(probe=True) for row in asking})
    fleet.advance()


@pytest.mark.slow
def test_a_probe_leaves_every_host_bit_identical() -> None:
    plain, probed = (make_fleet(TWO, GROWTH) for _ in range(2))
    for asking in ([0], [0, 1], [1]):
        plain.advance()
        advance_asking(probed, asking)
    for name, tensor in plain.tensors().items():
        assert torch.equal(tensor, probed.tensors()[name]), name


@pytest.mark.slow
def test_only_hosts_that_asked_are_probed_and_only_once() -> None:
    fleet = make_fleet(TWO, GROWTH)
    advance_asking(fleet, [1])
    assert [len(promises_in(fleet.state(row))) for row in range(2)] == [0, len(SLOTS) * 8 + 15]  # in depth, and in width
    fleet.advance()
    assert not any(promises_in(fleet.state(row)) for row in range(2))


@pytest.mark.slow
def test_occupied_slots_and_finished_hosts_are_not_probed() -> None:
    fleet = make_fleet(TWO, GROWTH)
    fleet.decide({0: Decision((Germinate(slot="blocks.1", reason="", blueprint="norm"),), probe=True)})
    fleet.advance()
    assert {slot for slot, _ in promises_in(fleet.state(0))} == {"blocks.0", "blocks.2"}
    for _ in range(3):
        fleet.advance()
    fleet.decide({0: Decision(probe=True)})
    assert not fleet.rows[0].wants_probe


@pytest.mark.slow
@pytest.mark.parametrize("blending", ["multiply", "gate"])
def test_a_promise_does_not_depend_on_the_blending(blending: str) -> None:
    """As in a host alone: the branch is asked, and every blending begins with it."""
    found = []
    for each in ("add", blending):
        fleet = make_fleet(TWO[:1], msgspec.structs.replace(GROWTH, lifecycle=LifecycleConfig(blending=each)))
        advance_asking(fleet, [0])
        found.append(promises_in(fleet.state(0)))
    deep = {key: promise for key, promise in found[0].items() if key[1] in DEEP}  # units can only be added
    assert deep == found[1]


@pytest.mark.slow
def test_hosts_probed_at_different_steps_equal_the_same_hosts_alone() -> None:
    """A host in its first epoch is looked at in the first steps of it, the others in their last."""
    task = small_task()
    both, young, old = (Fleet(task, make_host, hosts=hosts, growth=GROWTH, config=CONFIG) for hosts in (2, 1, 1))
    both.reset({0: TWO[0]})
    old.reset({0: TWO[0]})
    both.reset({1: msgspec.structs.replace(TWO[1], horizon=9)})
    for fleet in (both, old):
        fleet.advance()
    both.reset({1: TWO[1]})
    young.reset({0: TWO[1]})
    for fleet in (both, young, old):
        advance_asking(fleet, list(range(fleet.hosts)))
    for row, fleet in enumerate((old, young)):
        expected = promises_in(fleet.state(0))
        assert expected
        assert promises_in(both.state(row)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
def test_a_requested_probe_survives_saving_and_loading() -> None:
    fleet, resumed = (make_fleet(TWO, GROWTH) for _ in range(2))
    fleet.decide({1: Decision(probe=True)})
    resumed.load_state_dict(copy.deepcopy(fleet.state_dict()))
    fleet.advance()
    resumed.advance()
    assert promises_in(resumed.state(1)) == promises_in(fleet.state(1)) != {}


@pytest.mark.slow
def test_the_flops_of_a_probe_are_counted() -> None:
    plain, probed = (make_fleet(TWO[:1], GROWTH) for _ in range(2))
    plain.advance()
    advance_asking(probed, [0])
    state = plain.state(0)
    each = sum(candidate.cost.flops for slot in state.slots for candidate in slot.candidates)
    extra = probed.rows[0].lifecycles.history.flops - plain.rows[0].lifecycles.history.flops
    assert extra == GROWTH.probe_steps * BATCH * 2 * each


@pytest.mark.slow
def test_a_probe_of_a_long_epoch_takes_at_most_the_flops_of_a_training_step_in_each_of_its_steps() -> None:
    # Only candidates in depth: a single chain of wider layers already costs more FLOPs than a training step.
    growth = msgspec.structs.replace(GROWTH, blueprints=DEEP)
    fleet = make_fleet(TWO[:1], growth, msgspec.structs.replace(CONFIG, steps_per_decision=40))
    fleet.advance()
    fleet.decide({0: Decision(probe=True)})
    plan = fleet.plan([0])
    assert len(plan.probes) > 3
    for step in range(40):
        asking = [probe for probe in plan.probes if step in probe.window]
        assert len(asking) <= 1
        assert sum(probe.flops[0] for probe in asking) <= 3 * fleet.discovery.host.flops
    assert {probe.window.stop for probe in plan.probes} >= {40}
    assert {len(probe.window) for probe in plan.probes} == {3}


@pytest.mark.slow
def test_an_overflow_in_one_host_does_not_change_the_promises_of_another() -> None:
    good, bad = TWO[0], HostConfig(seed=1, growth_seed=1, horizon=4, learning_rate=1e300)
    fleet, other = make_fleet([good, bad], GROWTH), make_fleet([good, TWO[1]], GROWTH)
    for each in (fleet, other):
        advance_asking(each, [0, 1])
    assert promises_in(fleet.state(0)) == promises_in(other.state(0))
    assert fleet.rows[1].lifecycles.governor.rollbacks == 1
    assert fleet.state(1).slots[0].stage is Stage.DORMANT
