"""A fleet: independence of its hosts, data, snapshots, precision, and refused requests."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from esper import devices
from esper.fleet import Fleet, FleetConfig, FleetError, HostConfig, TaskTensors
from esper.fleet.device import Reading
from esper.fleet.measure import losses_of
from esper.growth import GrowthError, register_blueprint
from esper.growth.config import GovernorConfig, GrowthConfig, LifecycleConfig, RentConfig, SeedOptimizerConfig
from esper.growth.events import ActionRefused, StageEntered
from esper.growth.host.layout import Place
from esper.growth.lifecycle.stages import Advance, Decision, Fossilize, Germinate, Prune, Stage
from esper.growth.seeds import blueprints
from esper.runs import Event
from esper.tasks import ConvHost, Split, load_task, shuffled_order
from esper.tasks.gpt_host import GPTHost
from tests.fleet.builders import (
    BATCH,
    CONFIG,
    JOINT,
    LIFECYCLES,
    SHADOW,
    SLOTS,
    Script,
    Scripted,
    assert_identical,
    assert_row_equals,
    build_seeded,
    copy_rows,
    decide,
    germinate,
    germinate_in_every_slot,
    host_settings,
    make_fleet,
    make_gpt_host,
    make_host,
    small_task,
    step_in_two_precisions,
    text_task,
    train_alone,
    train_fleet,
)

# Disasters


@pytest.mark.slow
def test_a_host_whose_loss_is_not_finite_is_rolled_back_and_the_others_are_unchanged() -> None:
    explodes = host_settings(3)
    explodes[1] = msgspec.structs.replace(explodes[1], learning_rate=1e300)
    calm, other = make_fleet(host_settings(3)), make_fleet(explodes)
    for fleet in (calm, other):
        germinate_in_every_slot(fleet, 0)
        for _ in range(3):
            fleet.advance()
    assert_identical(copy_rows(calm, [0, 2]), copy_rows(other, [0, 2]))
    assert [host.lifecycles.governor.rollbacks for host in other.rows] == [0, 3, 0]
    beginning = make_fleet(explodes)
    assert_identical(copy_rows(other, [1]), copy_rows(beginning, [1]))
    assert "is nan" in other.rows[1].lifecycles.ledger.rollbacks[0].reason


@pytest.mark.slow
def test_a_host_that_fails_repeatedly_is_given_up_and_the_others_continue() -> None:
    settings = host_settings(2)
    settings[0] = msgspec.structs.replace(settings[0], learning_rate=1e300)
    fleet = make_fleet(settings, GrowthConfig(governor=GovernorConfig(max_rollbacks=1)))
    fleet.advance()
    assert fleet.training() == [0, 1]
    fleet.advance()
    assert fleet.rows[0].is_given_up
    assert fleet.advance() == [1]


@pytest.mark.slow
def test_a_seed_that_explodes_is_rolled_back_as_in_a_host_alone() -> None:
    """The loss stays finite, so that a host alone is checked at the end of the epoch too."""
    task = small_task()
    growth = GrowthConfig(lifecycle=JOINT, seed_optimizer=SeedOptimizerConfig(learning_rate_factor=3000.0, warmup_epochs=0.0))
    scripts = [{}, {4: [germinate("blocks.2", "conv3x3")], 7: [germinate("blocks.0", "norm")]}, {}]
    settings = host_settings(3, horizon=9, learning_rate=0.001)
    fleet = train_fleet(task, settings, scripts, growth, CONFIG)
    assert [host.lifecycles.governor.rollbacks > 0 for host in fleet.rows] == [False, True, False]
    assert fleet.rows[1].lifecycles.ledger.seeds[0].outcome == "rolled back"
    for row, (setting, script) in enumerate(zip(settings, scripts, strict=True)):
        grown = train_alone(task, setting, growth, CONFIG, Scripted(script))
        assert grown.rollbacks == fleet.rows[row].lifecycles.governor.rollbacks
        assert grown.ledger.rollbacks == fleet.rows[row].lifecycles.ledger.rollbacks
        assert_row_equals(fleet, row, grown, atol=1e-9)


@pytest.mark.slow
def test_a_rollback_restores_seeds_weights_moments_and_alphas() -> None:
    growth = GrowthConfig(lifecycle=msgspec.structs.replace(SHADOW, blend_epochs=3))
    fleet = make_fleet(host_settings(2), growth)
    germinate_in_every_slot(fleet, 0)
    for _ in range(3):
        fleet.advance()
    decide(fleet, 0, Advance(slot="blocks.0", reason=""))
    fleet.advance()
    before, lifecycles = copy_rows(fleet, [0]), copy.deepcopy(fleet.rows[0].lifecycles.slots_state())
    fleet.advance()  # a snapshot of a healthy epoch
    host = fleet.rows[0]
    host.lifecycles.governor.note_rollback()  # so that the one before it is asked for
    assert host.recovery.go_back(is_repeated=True) == 4
    fleet._pending.carry_out(fleet._snapshots)
    assert_identical(before, copy_rows(fleet, [0]))
    assert host.lifecycles.slots_state() == lifecycles
    assert 0 < host.lifecycles.slots["blocks.0"].alpha < 1


# Freezing


@pytest.mark.slow
def test_a_finished_host_stays_bit_identical_while_others_train() -> None:
    settings = [msgspec.structs.replace(setting, horizon=horizon) for setting, horizon in zip(host_settings(3), (2, 5, 4), strict=True)]
    fleet = make_fleet(settings)
    germinate_in_every_slot(fleet, 0)
    fleet.advance()
    fleet.advance()
    before, position = copy_rows(fleet, [0]), (fleet.data.orders[0].epoch, fleet.data.orders[0].position)
    samples = fleet.samples_trained
    assert fleet.advance() == [1, 2]
    assert fleet.samples_trained - samples == 2 * 4 * BATCH
    fleet.advance()
    assert_identical(before, copy_rows(fleet, [0]))
    assert position == (fleet.data.orders[0].epoch, fleet.data.orders[0].position)
    assert len(fleet.rows[0].lifecycles.history.val_losses) == 2
    while fleet.training():
        fleet.advance()
    assert fleet.advance() == []


@pytest.mark.slow
def test_a_reset_host_equals_one_in_a_new_fleet_and_the_others_continue() -> None:
    fleet, straight = make_fleet(host_settings(2)), make_fleet(host_settings(2))
    again = HostConfig(seed=5, growth_seed=6, horizon=8, learning_rate=0.02)
    for each in (fleet, straight):
        germinate_in_every_slot(each, 0)
        each.advance()
    fleet.reset({0: again})
    new = make_fleet([again, host_settings(2)[1]])
    for each in (fleet, straight, new):
        each.advance()
    # Seeds of other hosts may change only the order of summation.
    for row, other in ((0, new), (1, straight)):
        for name, tensor in fleet.host.tensors.items():
            torch.testing.assert_close(tensor[row], other.host.tensors[name][row], atol=1e-12, rtol=1e-12)
    assert [backend.stage for backend in fleet.rows[0].lifecycles.slots.values()] == [Stage.DORMANT] * 3


@pytest.mark.slow
def test_a_host_that_was_never_reset_does_not_train() -> None:
    fleet = Fleet(small_task(), make_host, hosts=3, config=CONFIG)
    assert fleet.advance() == []
    fleet.reset({1: HostConfig(horizon=2)})
    assert fleet.advance() == [1]


# Data


def test_a_fleet_tells_the_time_of_a_step_and_of_its_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(devices.time, "perf_counter", lambda: float(next(clock)))  # every look at the clock takes a second
    fleet = make_fleet(host_settings(2))
    assert fleet.times.step_seconds is None
    for _ in range(3):
        fleet.advance()
    assert fleet.times.steps == 3 * fleet.steps_per_decision
    assert fleet.times.measure_seconds > 0
    assert fleet.times.step_seconds == fleet.times.train_seconds / fleet.times.steps > 0


def test_every_host_sees_all_training_samples_in_its_own_order() -> None:
    fleet = make_fleet(host_settings(3))
    first = fleet.data.batches(4, BATCH, rows=[0, 1, 2]).reshape(-1, 3)
    second = fleet.data.batches(4, BATCH, rows=[0, 2]).reshape(-1, 2)
    for row in range(3):
        assert first[:, row].tolist() == shuffled_order(100, seed=row, epoch=0).tolist()
    assert sorted(second[:, 1].tolist()) == list(range(100))
    assert len({tuple(order.tolist()) for order in (*first.T, *second.T)}) == 5


@pytest.mark.slow
def test_hosts_train_on_the_labels_and_the_share_of_data_of_their_setting() -> None:
    task = small_task()
    train, test = task.train.targets.clone(), task.test.targets.clone()
    settings = host_settings(4)
    changes: list[dict[str, float]] = [{}, {"label_noise": 0.3}, {"data_share": 0.25}, {"classes_share": 0.3}]
    settings = [msgspec.structs.replace(setting, **change) for setting, change in zip(settings, changes, strict=True)]
    fleet = make_fleet(settings, task=task)
    index = fleet.data.batches(8, BATCH, rows=[0, 1, 2, 3]).reshape(-1, 4)  # twice as many as there are
    inputs, labels = fleet.data.batch(index, torch.arange(4))
    assert torch.equal(inputs, task.train.inputs[index])
    assert torch.equal(labels[:, [0, 2, 3]], train[index[:, [0, 2, 3]]])
    is_wrong = labels[:, 1] != train[index[:, 1]]
    assert 0.2 < is_wrong.double().mean() < 0.4
    by_sample = {(sample, label) for sample, label in zip(index[:, 1].tolist(), labels[:, 1].tolist(), strict=True)}
    assert len(by_sample) == 100  # wrong for good: in the second epoch as in the first
    assert len(set(index[:, 2].tolist())) == 25
    assert len(set(labels[:, 3].tolist())) == 3
    for _ in range(2):
        fleet.advance()
    assert torch.equal(task.train.targets, train)
    assert torch.equal(task.test.targets, test)


@pytest.mark.slow
def test_the_test_split_is_not_read_during_training() -> None:
    task = small_task()
    poisoned = replace(task, test=Split(torch.full_like(task.test.inputs, math.nan), task.test.targets))
    clean, other = make_fleet(host_settings(1), task=task), make_fleet(host_settings(1), task=poisoned)
    for fleet in (clean, other):
        fleet.advance()
    assert_identical(copy_rows(clean, [0]), copy_rows(other, [0]))
    assert clean.losses(task.test).isfinite().all()
    assert other.losses(poisoned.test).isnan().all()


@pytest.mark.slow
def test_losses_of_a_row_equal_those_of_the_host_with_its_kept_seeds() -> None:
    task = small_task()
    settings = host_settings(2, horizon=4)
    growth = GrowthConfig(lifecycle=JOINT)
    scripts = [{0: [germinate("blocks.1", "conv3x3")], 2: [Fossilize(slot="blocks.1", reason="")], 3: [germinate("blocks.0", "norm")]}, {}]
    fleet = train_fleet(task, settings, scripts, growth, CONFIG)
    for row, (setting, script) in enumerate(zip(settings, scripts, strict=True)):
        model = train_alone(task, setting, growth, CONFIG, Scripted(script)).model.eval()
        expected = nn.functional.cross_entropy(model(task.test.inputs), task.test.targets)
        torch.testing.assert_close(fleet.losses(task.test)[row], expected.detach(), atol=1e-9, rtol=0)


# Copies


@pytest.mark.slow
@pytest.mark.parametrize("lifecycle", [JOINT, SHADOW], ids=["joint", "shadow"])
def test_a_copied_host_goes_on_as_the_host_does_and_then_apart_from_it(lifecycle: LifecycleConfig) -> None:
    config = msgspec.structs.replace(CONFIG, keep="best")
    settings = host_settings(3, label_noise=0.3)
    fleet = make_fleet(settings, GrowthConfig(lifecycle=lifecycle), config)
    germinate_in_every_slot(fleet, 1)
    for _ in range(2):
        fleet.advance()
    untouched = copy_rows(fleet, [0])
    fleet.copy({2: 1})
    assert_identical(copy_rows(fleet, [0]), untouched)
    assert_identical(copy_rows(fleet, [1]), copy_rows(fleet, [2]))
    assert fleet.state(1) == fleet.state(2)
    assert fleet.state(0) != fleet.state(1)
    for _ in range(2):
        fleet.advance()
    for name, tensor in fleet.tensors().items():  # rows of one tensor may be rounded differently
        torch.testing.assert_close(tensor[1], tensor[2], rtol=1e-9, atol=1e-9, msg=name)
    decide(fleet, 2, Prune(slot=SLOTS[0], reason="in one of them only"))
    while fleet.advance():
        pass
    assert [len(fleet.rows[row].lifecycles.living()) for row in (1, 2)] == [3, 2]
    fleet.finish(range(3))
    alone = make_fleet(settings, GrowthConfig(lifecycle=lifecycle), config)
    germinate_in_every_slot(alone, 1)
    while alone.advance():
        pass
    alone.finish(range(3))
    torch.testing.assert_close(fleet.validation_losses()[:2], alone.validation_losses()[:2], rtol=1e-4, atol=1e-5)


def test_the_rent_of_a_host_can_change() -> None:
    fleet = make_fleet(host_settings(2))
    before = fleet.state(1)
    fleet.set_rent(1, RentConfig(parameters=9.0))
    dear = fleet.state(1)
    assert dear.rent.parameters == 9.0
    assert dear.slots[0].candidates[0].rent > before.slots[0].candidates[0].rent
    assert fleet.state(0).rent == before.rent
    fleet.advance()
    fleet.copy({0: 1})
    assert fleet.state(0).rent == dear.rent


# Saving


@pytest.mark.parametrize("lifecycle", [JOINT, pytest.param(SHADOW, marks=pytest.mark.slow)], ids=["joint", "shadow"])
def test_a_saved_fleet_goes_on_bit_for_bit_with_seeds_alive(lifecycle: LifecycleConfig) -> None:
    growth = GrowthConfig(lifecycle=lifecycle)
    settings = host_settings(3, horizon=9)
    settings[2] = msgspec.structs.replace(settings[2], label_noise=0.2, data_share=0.5)
    fleet = make_fleet(settings, growth)

    def go_on(fleet: Fleet) -> None:
        fleet.decide({1: Decision((germinate("blocks.2", "wide_conv3x3"),)), 0: Decision((Advance(slot="blocks.0", reason=""),))})
        for _ in range(5):
            fleet.advance()
        fleet.decide({0: Decision((Fossilize(slot="blocks.0", reason=""),))})
        fleet.finish(range(3))

    germinate_in_every_slot(fleet, 0)
    fleet.advance()
    fleet.advance()
    saved = copy.deepcopy(fleet.state_dict())
    resumed = make_fleet(host_settings(3), growth)  # whose hosts were others
    resumed.advance()
    resumed.load_state_dict(saved)
    for each in (fleet, resumed):
        go_on(each)
    assert_identical(copy_rows(fleet, [0, 1, 2]), copy_rows(resumed, [0, 1, 2]))
    for own, other in zip(fleet.rows, resumed.rows, strict=True):
        assert own.lifecycles.ledger == other.lifecycles.ledger
        assert own.lifecycles.history.val_losses == other.lifecycles.history.val_losses
        assert own.lifecycles.history.flops == other.lifecycles.history.flops
        assert own.seed_flops == other.seed_flops
    assert fleet.samples_trained == resumed.samples_trained
    assert torch.equal(fleet.losses(fleet.task.test), resumed.losses(fleet.task.test))


@pytest.mark.slow
def test_a_state_of_another_fleet_is_refused_before_anything_changes() -> None:
    fleet, larger = make_fleet(host_settings(2)), make_fleet(host_settings(3))
    before = copy_rows(fleet, [0, 1])
    with pytest.raises(FleetError, match="has 3 hosts, and this one 2"):
        fleet.load_state_dict(larger.state_dict())
    other = make_fleet(host_settings(2), config=msgspec.structs.replace(CONFIG, optimizer="sgd"))
    with pytest.raises(FleetError, match="make one of the same hosts"):
        fleet.load_state_dict(other.state_dict())
    with pytest.raises(FleetError, match=r"make one with the same governor\.keep"):
        fleet.load_state_dict({**fleet.state_dict(), "snapshots": {str(number): {} for number in range(9)}})
    assert_identical(before, copy_rows(fleet, [0, 1]))


# Precision


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-5), pytest.param("bfloat16", 2e-2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("lifecycle", [JOINT, pytest.param(SHADOW, marks=pytest.mark.slow)], ids=["joint", "shadow"])
def test_one_step_in_lower_precision_agrees_with_float64(precision: str, tolerance: float, lifecycle: LifecycleConfig) -> None:
    exact, lower = step_in_two_precisions(lifecycle, precision, epochs=5, tolerance=tolerance)
    for own, there in zip(exact.rows, lower.rows, strict=True):
        assert there.lifecycles.history.train_losses[-1] == pytest.approx(own.lifecycles.history.train_losses[-1], rel=tolerance)
        assert there.lifecycles.history.val_losses[-1] == pytest.approx(own.lifecycles.history.val_losses[-1], rel=tolerance)


# Reading


@pytest.mark.slow
def test_the_device_is_read_once_in_a_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that wait for a device are forbidden until the one read."""
    fleet = make_fleet(host_settings(2), GrowthConfig(lifecycle=JOINT, probe_steps=2))
    germinate_in_every_slot(fleet, 0)
    fleet.advance()
    fleet.decide({1: Decision(probe=True)})
    reads: list[int] = []
    read = Reading.read

    def counted(self: Reading) -> dict[str, Tensor]:
        reads.append(1)
        with monkeypatch.context() as inside:
            for name, method in allowed.items():
                inside.setattr(Tensor, name, method)
            return read(self)

    names = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__")
    allowed = {name: getattr(Tensor, name) for name in names}

    def guarded(name: str) -> Any:
        def method(self: Tensor, *arguments: Any, **named: Any) -> Any:
            assert reads, f"{name} before the read would wait for the device"
            return allowed[name](self, *arguments, **named)

        return method

    with monkeypatch.context() as patch:
        for name in names:
            patch.setattr(Tensor, name, guarded(name))
        patch.setattr(Reading, "read", counted)
        fleet.advance()
    assert reads == [1]
    assert fleet.rows[0].lifecycles.slots["blocks.0"].seed.contributions
    assert fleet.state(1).slots[0].candidates[0].promise is not None


# Other hosts


class Custom(nn.Module):
    """A user's own module: its layers can be lowered, its forward method cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 8)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x.flatten(1)).tanh()).relu_()
        return self.head(hidden + self.second(hidden).sin())


def make_custom_host(seed: int) -> nn.Module:
    return build_seeded(seed, Custom)


def sequence_loss(outputs: Tensor, targets: Tensor, **named: Any) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten(), **named)


@pytest.mark.slow
@LIFECYCLES
@pytest.mark.parametrize("kind", ["custom", "text"])
def test_hosts_of_other_kinds_equal_themselves_alone(kind: str, lifecycle: LifecycleConfig) -> None:
    task = small_task() if kind == "custom" else text_task()
    slots = ("norm", "second") if kind == "custom" else ("blocks.0", "blocks.1")
    make = make_custom_host if kind == "custom" else make_gpt_host
    # A single run measures the loss of a constant predictor, with noise of its own.
    growth = GrowthConfig(lifecycle=lifecycle, slots=slots, governor=GovernorConfig(uninformed_loss=task.uninformed_loss))
    scripts: list[Script] = [
        {},
        {
            0: [germinate(slots[0], "mlp")],
            3: [Advance(slot=slots[0], reason=""), germinate(slots[1], "low_rank")],
            5: [Fossilize(slot=slots[0], reason="")],
        },
        {1: [germinate(slots[1], "norm" if kind == "text" else "mlp")]},
    ]
    settings = host_settings(3, horizon=6)
    fleet = train_fleet(task, settings, scripts, growth, CONFIG, make_host=make)
    for row, (setting, script) in enumerate(zip(settings, scripts, strict=True)):
        grown = train_alone(task, setting, growth, CONFIG, Scripted(script), make_host=make, loss_fn=sequence_loss)
        assert_row_equals(fleet, row, grown, atol=1e-9)


# Refused requests


def test_a_fleet_without_hosts_is_refused() -> None:
    with pytest.raises(FleetError, match="at least one host; got 0"):
        Fleet(small_task(), make_host, hosts=0)


@pytest.mark.slow
def test_slots_that_do_not_exist_are_refused() -> None:
    with pytest.raises(GrowthError, match=r"blocks\.7"):
        Fleet(small_task(), make_host, hosts=1, growth=GrowthConfig(slots=("blocks.7",)), config=CONFIG)
    fleet = make_fleet(host_settings(1))
    with pytest.raises(FleetError, match=r"no slot named 'blocks\.7'.*blocks\.0, blocks\.1, blocks\.2"):
        decide(fleet, 0, germinate("blocks.0", "norm"), Germinate(slot="blocks.7", reason="", blueprint="norm"))
    assert not fleet.rows[0].lifecycles.ledger.seeds


def test_hosts_that_do_not_exist_are_refused() -> None:
    fleet = make_fleet(host_settings(2))
    for row in (2, -1):
        with pytest.raises(FleetError, match=f"no host {row}; a fleet of 2 has the hosts 0 to 1"):
            decide(fleet, row)
        with pytest.raises(FleetError, match=f"no host {row}"):
            fleet.reset({0: HostConfig(), row: HostConfig()})


@pytest.mark.slow
def test_blueprints_that_do_not_fit_are_refused() -> None:
    with pytest.raises(FleetError, match=r"none of the blueprints \('mlp',\) fits any of the slots blocks\.0"):
        Fleet(small_task(), make_host, hosts=1, growth=GrowthConfig(blueprints=("mlp",)), config=CONFIG)
    fleet = make_fleet(host_settings(1))
    decide(fleet, 0, germinate("blocks.0", "mlp"))
    assert "'mlp' cannot grow there" in fleet.rows[0].lifecycles.ledger.refused[0].reason


def test_a_blueprint_with_buffers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blueprints, "REGISTRY", dict(blueprints.REGISTRY))

    @register_blueprint("with_buffers", kinds=["conv"])
    def with_buffers(place: Place) -> nn.Module:
        branch = nn.BatchNorm2d(place.width)
        nn.init.zeros_(branch.weight)
        return branch

    with pytest.raises(FleetError, match="'with_buffers' holds buffers"):
        Fleet(small_task(), make_host, hosts=1, growth=GrowthConfig(blueprints=("with_buffers",)), config=CONFIG)


@pytest.mark.slow
@pytest.mark.parametrize("setting", [HostConfig(classes_share=0.5), HostConfig(label_noise=0.1)], ids=["classes", "noise"])
def test_some_classes_and_wrong_labels_of_a_text_are_refused(setting: HostConfig) -> None:
    task = text_task()
    fleet = Fleet(task, lambda seed: GPTHost(task.num_classes, sequence_length=8, width=8, layers=1, heads=2), hosts=1, config=CONFIG)
    with pytest.raises(FleetError, match="leave classes_share at 1 and label_noise at 0"):
        fleet.reset({0: setting})


@pytest.mark.slow
def test_data_on_the_device_are_shared_by_fleets() -> None:
    task = small_task()
    tensors = TaskTensors.of(task, device=torch.device("cpu"), dtype=torch.float64)
    fleets = [
        Fleet(task, lambda seed, width=width: ConvHost(1, 10, (width, 4, 4)), hosts=1, config=CONFIG, tensors=tensors) for width in (2, 3)
    ]
    assert fleets[0].data.tensors is fleets[1].data.tensors
    for fleet in fleets:
        fleet.reset({0: HostConfig()})
        fleet.advance()


@pytest.mark.slow
def test_events_of_every_host_have_its_row() -> None:
    events: list[Event] = []
    settings = host_settings(3, horizon=3)
    fleet = Fleet(small_task(), make_host, hosts=3, growth=GrowthConfig(lifecycle=JOINT), config=CONFIG, on_event=events.append)
    fleet.reset(dict(enumerate(settings)))
    decide(fleet, 1, germinate(SLOTS[0], "norm"))
    decide(fleet, 2, germinate(SLOTS[1], "conv3x3"), Fossilize(slot=SLOTS[2], reason="too soon"))
    while fleet.training():
        fleet.advance()
    fleet.finish(range(3))
    told = [(event.env, event.slot, event.stage) for event in events if isinstance(event, StageEntered)]
    for row, slot in ((1, SLOTS[0]), (2, SLOTS[1])):
        stages = [step.stage.name for entry in fleet.rows[row].lifecycles.ledger.seeds for step in entry.stages]
        assert [stage for env, where, stage in told if env == row] == [*stages, "EMBARGOED"]  # which is of the slot
        assert {where for env, where, _ in told if env == row} == {slot}
    assert [(event.env, event.slot) for event in events if isinstance(event, ActionRefused)] == [(2, SLOTS[2])]
    assert all(event.env in (1, 2) for event in events)


@pytest.mark.slow
def test_validation_runs_in_inference_mode() -> None:
    fleet = make_fleet(host_settings(2))
    losses = losses_of(fleet.stacked_model(range(2)), fleet.samples).of_batches
    assert losses.is_inference()
    fleet.advance()  # and nothing of it is in the way of training


def test_a_host_knows_how_many_samples_it_has_where_a_decision_is_not_one_pass_through_them() -> None:
    task = load_task("digits")
    whole, few = HostConfig(), HostConfig(data_share=0.25)
    for steps, rows in ((None, [None, round(0.25 * len(task.train))]), (5, [len(task.train), round(0.25 * len(task.train))])):
        fleet = Fleet(task, task.maker("conv-2x1"), hosts=2, config=FleetConfig(steps_per_decision=steps))
        fleet.reset({0: whole, 1: few})
        assert [fleet.state(row).training_samples for row in range(2)] == rows
        fleet.advance()
        per_decision = 64 * (steps or len(task.train) // 64)
        assert [fleet.state(row).samples for row in range(2)] == [per_decision if rows[0] is None else rows[0], rows[1]]
