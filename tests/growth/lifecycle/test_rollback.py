"""A rollback restores a healthy state, and training continues."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR

from esper.growth import Diverged, GrowthError
from esper.growth.config import GovernorConfig
from esper.growth.events import RolledBack
from esper.growth.lifecycle.stages import Advance, Fossilize, Germinate, Prune, Stage
from esper.growth.report.story import Story
from tests.growth.builders import (
    QUICK,
    QUICK_SHADOW,
    SAM,
    LifecycleConfig,
    Loop,
    Script,
    adamw,
    assert_same,
    config,
    make_host,
    make_loop,
    snapshot,
)

GROW = {0: [Germinate(slot="first", reason="test", blueprint="mlp")]}
BOTH = {0: [Germinate(slot="first", reason="test", blueprint="mlp"), Germinate(slot="second", reason="test", blueprint="low_rank")]}


def poison_host(loop: Loop) -> None:
    with torch.no_grad():
        loop.host.head.weight[0, 0] = math.nan


def poison_seed(loop: Loop, name: str) -> None:
    with torch.no_grad():
        next(loop.slotted.slots[name].seed.parameters()).fill_(math.nan)


def seeds_of(loop: Loop) -> dict:
    learners = {
        name: backend.learner.optimizers[0].state_dict()
        for name, backend in loop.grower.lifecycles.slots.items()
        if backend.learner is not None
    }
    seeds = {name: dict(slot.seed.state_dict()) for name, slot in loop.slotted.slots.items() if slot.seed is not None}
    return copy.deepcopy({"seeds": seeds, "learners": learners})


def test_a_rollback_restores_weights_buffers_both_optimisers_scaler_schedule_stages_and_alpha() -> None:
    host = make_host()
    optimizer = adamw(host)
    scaler, schedule = torch.amp.GradScaler("cpu", init_scale=8.0), StepLR(optimizer, 1, gamma=0.5)
    scaler.scale(torch.ones(1))
    rules = LifecycleConfig(raise_mode="shadow", training_epochs=1, blend_epochs=4)
    script = Script({**GROW, 1: [Advance(slot="first", reason="test")]})
    loop = make_loop(script, config(rules), host=host, make_optimizer=lambda model: optimizer, scaler=scaler, scheduler=schedule)
    loop.grower.begin()
    loop.epoch(epochs=2)
    slot, backend = loop.slotted.slots["first"], loop.grower.lifecycles.slots["first"]
    assert 0 < slot.alpha < 1
    slot.connect(False)  # so that it is not blamed for what the host does
    loop.grower._recovery.take_snapshot()

    def state() -> list:
        life = [slot.alpha, backend.stage, backend.record.ramp.done]
        return [snapshot(host, optimizer), seeds_of(loop), life, scaler.state_dict(), schedule.state_dict()]

    held = copy.deepcopy(state())
    slot.connect(True)
    for x, y in loop.data[:2]:
        loop.step(x, y)
    slot.connect(False)
    schedule.step()
    scaler.update(2.0)
    poison_host(loop)
    loop.step(*loop.data[2])
    assert loop.grower.rollbacks == 1
    assert_same(state(), held)
    assert optimizer.param_groups[0]["lr"] == schedule.get_last_lr()[0]
    assert all(parameter.grad is None for parameter in host.parameters())


def test_a_diverging_seed_is_put_under_embargo_and_training_continues() -> None:
    loop = make_loop(Script(BOTH), config(LifecycleConfig(holding_epochs=20, embargo_epochs=3)))
    loop.epoch(epochs=2)
    before = snapshot(loop.host, loop.optimizer)
    poison_seed(loop, "first")
    loop.step(*loop.data[0])
    (event,) = [event for event in loop.events if event.kind == "rolled_back"]
    assert (event.epoch, event.to_epoch, event.embargoed) == (2, 2, ["first", "second"])
    assert "is nan" in event.reason
    assert_same(snapshot(loop.host, loop.optimizer), before)
    assert {backend.stage for backend in loop.grower.lifecycles.slots.values()} == {Stage.EMBARGOED}
    assert [entry.outcome for entry in loop.grower.ledger.seeds] == ["rolled back", "rolled back"]
    loop.epoch(epochs=3)
    assert loop.grower.rollbacks == 1  # the end of the epoch does not count the same disaster again
    assert all(map(math.isfinite, loop.grower.history.train_losses))
    assert math.isfinite(loop.losses[-1])
    assert {backend.stage for backend in loop.grower.lifecycles.slots.values()} == {Stage.DORMANT}


def test_a_disaster_in_the_last_step_of_an_epoch_causes_one_rollback() -> None:
    loop = make_loop("never")
    loop.epoch()
    for x, y in loop.data[:-1]:
        loop.step(x, y)
    poison_host(loop)
    loop.step(*loop.data[-1])
    loop.grower.after_epoch(loop.evaluate)
    assert loop.grower.rollbacks == 1
    assert len(loop.grower.history.train_losses) == 2
    assert all(map(math.isfinite, loop.grower.history.train_losses))


def test_a_rollback_tells_the_steps_since_the_state_that_it_restored() -> None:
    loop = make_loop("never")
    loop.epoch(epochs=2)
    for _ in range(2):
        for x, y in loop.data:
            loop.step(x, y)
        loop.grower.after_epoch(lambda: [1.0, math.nan])
    lost = [event for event in loop.events if isinstance(event, RolledBack)]
    assert [event.to_epoch for event in lost] == [2, 1], "the second one goes back further"
    assert [event.steps_lost for event in lost] == [len(loop.data), 2 * len(loop.data)], "nothing is lost twice"
    loop.epoch()
    loop.step(*loop.data[0])
    poison_host(loop)
    loop.step(*loop.data[1])
    lost = [event for event in loop.events if isinstance(event, RolledBack)]
    assert (lost[2].to_epoch, lost[2].steps_lost) == (5, 2), "two steps of this epoch"
    assert all(event.seconds_lost is not None and event.seconds_lost > 0 for event in lost)


def test_a_validation_loss_that_is_not_finite_causes_a_rollback_at_the_end_of_the_epoch() -> None:
    loop = make_loop("never")
    loop.epoch(epochs=2)
    before = snapshot(loop.host, loop.optimizer)
    for x, y in loop.data:
        loop.step(x, y)
    ended = loop.grower.after_epoch(lambda: [1.0, math.nan])
    assert math.isnan(ended.val_loss)
    assert ended.decision.startswith("went back to a healthy state")
    assert_same(snapshot(loop.host, loop.optimizer), before)
    loop.epoch()
    assert loop.grower.rollbacks == 1


@pytest.mark.parametrize("lifecycle", [QUICK, QUICK_SHADOW], ids=["joint", "shadow"])
def test_a_rollback_removes_a_seed_that_germinated_after_the_snapshot(lifecycle: LifecycleConfig) -> None:
    loop = make_loop(Script({2: [Germinate(slot="first", reason="test", blueprint="mlp")]}), config(lifecycle))
    loop.epoch(epochs=2)
    poison_host(loop)
    loop.step(*loop.data[0])
    (entry,) = loop.grower.ledger.seeds
    assert entry.outcome == "rolled back"
    assert loop.slotted.slots["first"].seed is None
    expected = Stage.EMBARGOED if lifecycle is QUICK else Stage.DORMANT  # one that the host did not see is not to blame
    assert loop.grower.lifecycles.slots["first"].stage is expected


def test_a_rollback_restores_a_seed_that_was_pruned_after_the_snapshot() -> None:
    rules = LifecycleConfig(holding_epochs=1, withdraw_epochs=0, embargo_epochs=1)
    loop = make_loop(Script({**GROW, 2: [Prune(slot="first", reason="test")]}), config(rules))
    loop.epoch()
    loop.epoch()  # the snapshot of this epoch was taken before the decision
    assert loop.slotted.slots["first"].seed is None
    assert loop.grower.ledger.seeds[0].outcome == "pruned"
    poison_host(loop)
    loop.step(*loop.data[0])
    seed = loop.slotted.slots["first"].seed
    assert seed is not None
    assert any(parameter.abs().sum() > 0 for parameter in seed.parameters())
    assert loop.grower.lifecycles.slots["first"].learner.optimizers[0].state
    entry = loop.grower.ledger.seeds[0]
    assert (entry.outcome, entry.ended) == ("living", None)
    assert entry.stages[-1].stage is Stage.HOLDING
    loop.epoch(epochs=2)
    assert loop.grower.rollbacks == 1


@pytest.mark.slow
@pytest.mark.parametrize("withdraw_epochs", [0, 1, 3])
def test_a_seed_whose_removal_caused_a_rollback_comes_back_and_is_not_pruned_again_at_once(withdraw_epochs: int) -> None:
    """The controller wants to prune a seed without which the loss is fifty times as high."""
    rules = LifecycleConfig(holding_epochs=1, withdraw_epochs=withdraw_epochs, blend_epochs=1, embargo_epochs=3)
    script = Script({**GROW, **{epoch: [Prune(slot="first", reason="it does not pay")] for epoch in range(6, 30)}})
    loop = make_loop(script, config(rules, governor=GovernorConfig(uninformed_loss=100.0)))
    slot = loop.slotted.slots["first"]
    for _ in range(30):
        for _ in loop.data:
            loop.step_host()
            loop.grower.after_step(torch.tensor(1.0 if slot.seed is not None and slot.alpha > 0.5 else 50.0))
        loop.grower.after_epoch(lambda: [1.0])
    (entry,) = loop.grower.ledger.seeds
    assert entry.outcome == "living"
    assert slot.alpha > 0.5
    # The embargo on pruning it doubles: 3 epochs, then 6, then 12.
    events = [event for event in loop.events if event.kind == "rolled_back"]
    assert 2 <= len(events) <= 4
    assert all((event.embargoed, event.gone) == ([], []) for event in events)
    assert all([(one.number, one.slot, one.is_protected) for one in event.back] == [(1, "first", True)] for event in events)
    assert entry.brought_back == len(events)
    assert [step.reason.partition(":")[0] for step in entry.stages].count("it is back") == len(events)
    story = Story()
    for event in loop.events:
        story.take(event)
    (seed,) = story.seeds
    assert seed == entry
    assert [step.stage for step in seed.stages].count(Stage.GERMINATED) == 1
    refusals = {refused.reason for refused in loop.grower.ledger.refused}
    assert "the governor brought the seed back after its removal; it may be pruned in 5 epochs" in refusals


@pytest.mark.slow
def test_a_rollback_puts_a_seed_kept_after_the_snapshot_on_trial_again() -> None:
    loop = make_loop(Script({**GROW, 8: [Fossilize(slot="first", reason="test")]}))
    loop.val = loop.data
    loop.epoch(epochs=8)
    assert loop.slotted.slots["first"].is_kept
    poison_host(loop)
    loop.step(*loop.data[0])
    assert loop.grower.lifecycles.slots["first"].stage is Stage.HOLDING
    assert not loop.slotted.slots["first"].is_kept
    assert loop.grower.ledger.seeds[0].outcome == "living"


def test_repeated_failures_end_the_run_with_a_usable_model() -> None:
    settings = config(governor=GovernorConfig(max_rollbacks=2))
    loop = make_loop("never", settings)
    loop.epoch()
    before = snapshot(loop.host, loop.optimizer)

    def fail() -> None:
        poison_host(loop)
        loop.step(*loop.data[0])

    fail()
    fail()
    with pytest.raises(Diverged, match="lower the learning rate"):
        fail()
    assert sum(event.kind == "rolled_back" for event in loop.events) == 3
    assert all(torch.isfinite(parameter).all() for parameter in loop.host.parameters())
    assert before
    loop.epoch()
    assert math.isfinite(loop.losses[-1])


@pytest.mark.slow
def test_a_rollback_drops_pending_gradients() -> None:
    loop = make_loop(Script({**GROW, 8: [Fossilize(slot="first", reason="test")]}))
    loop.val = loop.data
    loop.epoch(epochs=9)
    seed = loop.slotted.slots["first"].seed
    x, y = loop.data[0]
    cross_entropy(loop.slotted(x), y).backward()
    loop.grower.after_step(torch.tensor(math.nan))
    assert loop.slotted.slots["first"].seed is seed
    assert all(parameter.grad is None for parameter in seed.parameters())
    loop.epoch()
    assert loop.grower.lifecycles.slots["first"].record.gradients.skipped == 0


@pytest.mark.slow
def test_a_lasting_change_in_the_data_is_rolled_back_once_and_then_accepted() -> None:
    loop = make_loop(Script({}), config(QUICK))
    loop.epoch(epochs=12)
    assert loop.grower.rollbacks == 0
    before = loop.grower.history.train_losses[-1]
    loop.data = [(x, (y + 1) % 3) for x, y in loop.data]  # everything it has learned is wrong now
    for _ in range(8):
        loop.epoch()
    assert loop.grower.rollbacks == 1
    losses = loop.grower.history.train_losses
    assert max(losses[12:14]) > 1.5 * before
    assert losses[-1] < 0.7 * max(losses[12:])  # it learns what is right now


def plain_step(loop: Loop, x: torch.Tensor, y: torch.Tensor) -> None:
    loss = cross_entropy(loop.slotted(x), y)
    loss.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    loop.losses.append(loss.item())
    loop.grower.after_step(loss)


@pytest.mark.parametrize("script", [{}, GROW], ids=["nothing grows", "something grows at once"])
def test_a_first_batch_that_breaks_the_weights_is_rolled_back(script: dict) -> None:
    loop = make_loop(Script(script))
    before = snapshot(loop.host)
    x, y = loop.data[0]
    plain_step(loop, torch.full_like(x, math.nan), y)
    assert loop.grower.rollbacks == 1
    assert_same(snapshot(loop.host), before)
    assert [entry.outcome for entry in loop.grower.ledger.seeds] == ["living"] * len(script)  # what was not there is not to blame
    for x, y in loop.data[1:]:
        plain_step(loop, x, y)
    loop.grower.after_epoch(loop.evaluate)
    loop.epoch()
    assert loop.grower.rollbacks == 1
    assert all(map(math.isfinite, loop.losses[1:]))
    assert all(torch.isfinite(parameter).all() for parameter in loop.host.parameters())


@pytest.mark.parametrize("whose", ["host", "seed"])
def test_weights_that_are_not_finite_are_never_kept_as_a_snapshot(whose: str) -> None:
    loop = make_loop(Script(GROW))
    loop.epoch(epochs=2)
    before = snapshot(loop.host, loop.optimizer)
    for x, y in loop.data:
        loop.step(x, y)
    (poison_host if whose == "host" else lambda loop: poison_seed(loop, "first"))(loop)
    loop.grower.after_epoch(lambda: [torch.tensor(0.5), torch.tensor(0.6)])
    assert loop.grower.rollbacks == 0
    loop.step(*loop.data[0])
    assert loop.grower.rollbacks == 1
    assert loop.grower.ledger.rollbacks[-1].to_epoch == 2
    assert_same(snapshot(loop.host, loop.optimizer), before)


def test_a_model_that_is_broken_before_the_training_is_refused() -> None:
    host = make_host()
    with torch.no_grad():
        host.head.bias[0] = math.inf
    with pytest.raises(GrowthError, match="NaN or infinite before the training"):
        make_loop(host=host)


def test_the_first_snapshot_holds_weights_loaded_before_training() -> None:
    loop = make_loop("never")
    loop.host.load_state_dict(make_host(seed=8).state_dict())
    loop.grower.begin()
    before = snapshot(loop.host)
    for _ in range(2):  # the second time to the snapshot before the latest, if there were one
        poison_host(loop)
        loop.step(*loop.data[0])
        assert_same(snapshot(loop.host), before)
    assert loop.grower.rollbacks == 2


# Buffers, parameters and groups that have appeared since the snapshot


class Cached(nn.Module):
    """Creates a buffer in its first forward pass, makes it larger where a batch needs it, and registers another one there."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.head = nn.Linear(8, 3)
        self.register_buffer("cache", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cache is None or len(self.cache) < len(x):
            self.cache = torch.zeros(len(x), 1)
        if "seen" not in self._buffers:
            self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.seen = self.seen + 1
        return self.head(torch.relu(self.first(x)) + self.cache[: len(x)])


def nan_step(loop: Loop) -> None:
    x, y = loop.data[0]
    loop.step(torch.full_like(x, math.nan), y)


def test_buffers_that_a_forward_pass_created_since_the_snapshot_are_gone_after_a_rollback() -> None:
    loop = make_loop("never", host=Cached(), slots=["first"])
    before = snapshot(loop.host)
    loop.step(*loop.data[0])
    nan_step(loop)
    assert loop.grower.rollbacks == 1
    assert loop.host.cache is None
    assert "seen" not in loop.host._buffers
    assert_same(snapshot(loop.host), before)
    loop.epoch()
    assert math.isfinite(loop.losses[-1])


def test_a_buffer_that_a_forward_pass_resized_or_replaced_since_the_snapshot_is_as_it_was() -> None:
    host = Cached()
    host(torch.zeros(2, 6))
    loop = make_loop("never", host=host, slots=["first"])
    loop.step(*loop.data[0])
    assert (len(host.cache), float(host.seen)) == (8, 2.0)
    del host._buffers["cache"]
    nan_step_with = {"cache": torch.zeros(2, 1), "seen": torch.tensor(1.0)}
    host.register_buffer("cache", None, persistent=False)
    nan_step(loop)
    assert_same({name: getattr(host, name) for name in nan_step_with}, nan_step_with)
    assert "cache" not in host.state_dict()
    loop.epoch()
    assert loop.grower.rollbacks == 1


@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_parameter_group_added_after_the_snapshot_stays_with_a_fresh_state(make_optimizer: type[torch.optim.Optimizer]) -> None:
    host = make_host(dropout=0.0)
    host.first.requires_grad_(False)
    trained = [parameter for parameter in host.parameters() if parameter.requires_grad]
    loop = make_loop(Script({}), host=host, make_optimizer=lambda model: make_optimizer(trained, lr=0.05))
    loop.epoch()
    before = snapshot(loop.host, loop.optimizer)
    host.first.requires_grad_(True)
    loop.optimizer.add_param_group({"params": list(host.first.parameters()), "lr": 0.01})
    loop.step(*loop.data[0])
    loop.step(*loop.data[1])
    assert not torch.equal(host.first.weight, before[0]["first.weight"])
    nan_step(loop)
    after = snapshot(loop.host, loop.optimizer)
    assert_same(after[0], before[0])
    assert_same(after[1]["state"], before[1]["state"])
    assert_same(after[1]["param_groups"][0], before[1]["param_groups"][0])
    assert [group["lr"] for group in loop.optimizer.param_groups] == [0.05, 0.01]
    loop.epoch(epochs=2)
    assert not torch.equal(host.first.weight, before[0]["first.weight"])
    assert loop.grower.rollbacks == 1


def test_a_parameter_unfrozen_after_the_snapshot_is_restored_to_its_frozen_value() -> None:
    host = make_host(dropout=0.0)
    host.first.requires_grad_(False)
    loop = make_loop(Script({}), host=host)  # the optimiser holds the frozen ones too
    loop.epoch()
    before = snapshot(loop.host, loop.optimizer)
    host.first.requires_grad_(True)
    loop.step(*loop.data[0])
    nan_step(loop)
    assert_same(snapshot(loop.host, loop.optimizer), before)


def frozen_loop(**options) -> Loop:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(6, 2000).requires_grad_(False)
            self.first = nn.Linear(2000, 4)
            self.head = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.relu(self.first(torch.relu(self.frozen(x)))))

    torch.manual_seed(0)
    return make_loop(Script({}), host=Large(), make_optimizer=adamw, slots=["first"], **options)


def test_snapshots_leave_frozen_weights_out_and_checkpoints_hold_them() -> None:
    loop = frozen_loop()
    loop.epoch(epochs=2)
    trained = sum(parameter.nbytes for parameter in loop.host.parameters() if parameter.requires_grad)
    frozen = sum(parameter.nbytes for parameter in loop.host.parameters() if not parameter.requires_grad)
    assert len(loop.grower._recovery._snapshots) == 2
    assert loop.grower._recovery._snapshots.nbytes < 2 * 3 * trained + 1000  # weights and two moments, twice
    state = loop.grower.state_dict()
    assert state["recovery"]["now"]["parameters"]["frozen.weight"].nbytes + 8000 == frozen
    twin = frozen_loop()
    with torch.no_grad():
        twin.host.frozen.weight.zero_()
    twin.grower.load_state_dict(copy.deepcopy(state))
    assert_same(snapshot(twin.host, twin.optimizer), snapshot(loop.host, loop.optimizer))
    nan_step(twin)
    assert_same(snapshot(twin.host, twin.optimizer), snapshot(loop.host, loop.optimizer))


def test_tied_weights_are_held_once() -> None:
    host = make_host()
    host.second[0].weight = nn.Parameter(torch.randn(8, 8))
    host.second[0].register_parameter("tied", host.second[0].weight)
    loop = make_loop("never", host=host)
    names = loop.grower._recovery._snapshots.latest().state["now"]["parameters"]
    assert ("second.0.weight" in names) is not ("second.0.tied" in names)


@pytest.mark.parametrize("moves", [lambda weight: weight.data.mul_(0.9), lambda weight: setattr(weight, "data", 0.9 * weight.data)])
def test_frozen_weights_changed_by_hand_are_restored(moves) -> None:
    """As those of a momentum encoder, which no gradient reaches."""
    loop = frozen_loop()
    for x, y in loop.data:
        moves(loop.host.frozen.weight)
        loop.step(x, y)
    loop.grower.after_epoch(loop.evaluate)
    before = snapshot(loop.host)
    moves(loop.host.frozen.weight)
    nan_step(loop)
    assert_same(snapshot(loop.host), before)


def test_frozen_weights_changed_in_the_first_steps_are_restored_to_their_value_after_the_first() -> None:
    loop = frozen_loop()
    moved = []
    for x, y in loop.data[:3]:
        loop.host.frozen.weight.data.mul_(0.9)
        loop.step(x, y)
        moved.append(loop.host.frozen.weight.clone())
    nan_step(loop)
    assert torch.equal(loop.host.frozen.weight, moved[0])


def test_frozen_weights_that_are_not_finite_and_in_no_snapshot_are_reported() -> None:
    loop = frozen_loop()
    loop.epoch()
    before = snapshot(loop.host, loop.optimizer)
    loop.host.frozen.weight.data.fill_(math.nan)
    with pytest.raises(GrowthError, match=r"frozen.weight is not finite, and no snapshot holds it"):
        loop.grower.after_step(torch.tensor(math.nan))
    before[0]["frozen.weight"].fill_(math.nan)
    assert torch.isnan(loop.host.frozen.weight).all()
    assert_same(snapshot(loop.optimizer), before[1:])


class Stubborn:
    """A schedule that does not take its state back."""

    def state_dict(self) -> dict:
        return {"place": 1}

    def load_state_dict(self, state: dict) -> None:
        raise OSError("no way back")


def test_a_rollback_that_cannot_be_done_changes_nothing() -> None:
    loop = make_loop(Script({1: GROW[0]}), scheduler=Stubborn())
    loop.epoch(epochs=2)
    loop.step(*loop.data[0])
    before, seeds = snapshot(loop.host, loop.optimizer), seeds_of(loop)
    with pytest.raises(OSError, match="no way back"):
        loop.grower.after_step(torch.tensor(math.nan))
    assert_same(snapshot(loop.host, loop.optimizer), before)
    assert_same(seeds_of(loop), seeds)

    loop = make_loop(Script({1: GROW[0]}))
    loop.epoch(epochs=2)
    loop.host.head = nn.Linear(8, 5)
    before, seeds = snapshot(loop.host, loop.optimizer), seeds_of(loop)
    with pytest.raises(GrowthError, match=r"head.weight is \[5, 8\] now and was \[3, 8\]"):
        loop.grower.after_step(torch.tensor(math.nan))
    assert_same(snapshot(loop.host, loop.optimizer), before)
    assert_same(seeds_of(loop), seeds)


class HalfWay:
    """A schedule that fails in the middle of loading, once."""

    def __init__(self) -> None:
        self.places, self.factor, self.fails = [0], 0.0, True

    def step(self) -> None:
        self.places[0] += 1
        self.factor += 1.0

    def state_dict(self) -> dict:
        return {"places": self.places, "factor": self.factor}

    def load_state_dict(self, state: dict) -> None:
        self.places[:] = state["places"]  # in place
        if self.fails:
            self.fails = False
            raise OSError("the disk is gone")
        self.factor = state["factor"]


def test_a_schedule_that_fails_half_way_through_loading_is_as_it_was_before() -> None:
    schedule = HalfWay()
    loop = make_loop(Script(), scheduler=schedule)
    loop.epoch(epochs=2)
    schedule.step()
    before = snapshot(loop.host, loop.optimizer)
    with pytest.raises(OSError, match="the disk is gone"):
        loop.grower.after_step(torch.tensor(math.nan))
    assert (schedule.places, schedule.factor) == ([1], 1.0)
    assert_same(snapshot(loop.host, loop.optimizer), before)


def test_a_saved_run_with_buffers_that_forward_passes_made_goes_on_in_a_fresh_model() -> None:
    def made() -> Loop:
        torch.manual_seed(3)
        return make_loop("never", host=Cached(), slots=["first"])

    loop = made()
    loop.step(*loop.data[0])
    state = copy.deepcopy(loop.grower.state_dict())
    twin = made()
    twin.grower.load_state_dict(state)
    assert (len(twin.host.cache), float(twin.host.seen)) == (8, 1.0)
    assert list(twin.host.state_dict()) == list(loop.host.state_dict())
    for x, y in loop.data[1:]:
        loop.step(x, y)
        twin.step(x, y)
    assert twin.losses == loop.losses[1:]
    nan_step(twin)
    assert twin.host.cache is None


def test_a_saved_run_whose_optimiser_got_a_group_needs_the_same_group() -> None:
    def made(*, is_added: bool) -> Loop:
        host = make_host(dropout=0.0)
        trained = [parameter for name, parameter in host.named_parameters() if not name.startswith("first")]
        host.first.requires_grad_(False)
        loop = make_loop("never", host=host, make_optimizer=lambda model: torch.optim.AdamW(trained, lr=0.01))
        if is_added:
            host.first.requires_grad_(True)
            loop.optimizer.add_param_group({"params": list(host.first.parameters())})
        return loop

    loop = made(is_added=True)
    loop.epoch()
    state = copy.deepcopy(loop.grower.state_dict())
    twin = made(is_added=False)
    before = snapshot(twin.host, twin.optimizer)
    with pytest.raises(GrowthError, match=r"groups of \[6, 2\] parameters, this one has \[6\]; .*add_param_group"):
        twin.grower.load_state_dict(state)
    assert_same(snapshot(twin.host, twin.optimizer), before)
    twin = made(is_added=True)
    twin.grower.load_state_dict(state)
    assert_same(snapshot(twin.host, twin.optimizer), snapshot(loop.host, loop.optimizer))


def test_a_rollback_restores_an_inner_optimiser_that_shares_its_groups() -> None:
    """The base optimiser of SAM holds the momentum; a schedule sets the rates of the groups that both share."""
    host = make_host(dropout=0.0)
    sam = SAM(host.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
    loop = make_loop("never", host=host, make_optimizer=lambda model: sam)

    def step() -> None:
        x, y = loop.data[0]
        loss = cross_entropy(loop.slotted(x), y)
        loss.backward()
        sam.first_step()
        cross_entropy(loop.slotted(x), y).backward()
        sam.second_step()
        loop.grower.after_step(loss)

    step()
    loop.grower.after_epoch(loop.evaluate)
    before = snapshot(host, sam.base_optimizer)
    step()
    loop.grower.after_step(torch.tensor(math.nan))
    assert_same(snapshot(host, sam.base_optimizer), before)
    assert sam.param_groups is sam.base_optimizer.param_groups
