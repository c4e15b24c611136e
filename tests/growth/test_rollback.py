"""After a disaster everything is as it was in a healthy state, and training goes on."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import StepLR

from esper.growth import Diverged, GrowthError
from esper.growth.config import GovernorConfig
from esper.growth.decisions import Advance, Fossilize, Germinate, Prune
from esper.growth.lifecycle import Stage
from tests.growth.small import QUICK, QUICK_SHADOW, Lifecycle, Loop, Script, adamw, assert_same, config, make_host, make_loop, snapshot

GROW = {0: [Germinate("first", "test", "mlp")]}
BOTH = {0: [Germinate("first", "test", "mlp"), Germinate("second", "test", "low_rank")]}


def poison_host(loop: Loop) -> None:
    with torch.no_grad():
        loop.host.head.weight[0, 0] = math.nan


def poison_seed(loop: Loop, name: str) -> None:
    with torch.no_grad():
        next(loop.slotted.slots[name].seed.parameters()).fill_(math.nan)


def seeds_of(loop: Loop) -> dict:
    learners = {name: bed.learner.optimizer.state_dict() for name, bed in loop.grower.garden.beds.items() if bed.learner is not None}
    seeds = {name: dict(slot.seed.state_dict()) for name, slot in loop.slotted.slots.items() if slot.seed is not None}
    return copy.deepcopy({"seeds": seeds, "learners": learners})


def test_a_rollback_restores_weights_buffers_both_optimisers_scaler_schedule_stages_and_alpha() -> None:
    host = make_host()
    optimizer = adamw(host)
    scaler, schedule = torch.amp.GradScaler("cpu", init_scale=8.0), StepLR(optimizer, 1, gamma=0.5)
    scaler.scale(torch.ones(1))
    rules = Lifecycle(raise_mode="shadow", training_epochs=1, blend_epochs=4)
    script = Script({**GROW, 1: [Advance("first", "test")]})
    loop = make_loop(script, config(rules), host=host, make_optimizer=lambda model: optimizer, scaler=scaler, scheduler=schedule)
    loop.grower.begin()
    loop.epoch(epochs=2)
    slot, bed = loop.slotted.slots["first"], loop.grower.garden.beds["first"]
    assert 0 < slot.alpha < 1
    slot.connect(False)  # so that it is not blamed for what the host does
    loop.grower._recovery.take_snapshot()

    def state() -> list:
        life = [slot.alpha, bed.life.stage, bed.life.ramp.done]
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


def test_a_seed_that_went_mad_goes_to_embargo_and_training_goes_on() -> None:
    loop = make_loop(Script(BOTH), config(Lifecycle(holding_epochs=20, embargo_epochs=3)))
    loop.epoch(epochs=2)
    before = snapshot(loop.host, loop.optimizer)
    poison_seed(loop, "first")
    loop.step(*loop.data[0])
    (event,) = [event for event in loop.events if event.kind == "rolled_back"]
    assert (event.epoch, event.to_epoch, event.embargoed) == (2, 2, ["first", "second"])
    assert "is nan" in event.reason
    assert_same(snapshot(loop.host, loop.optimizer), before)
    assert {bed.life.stage for bed in loop.grower.garden.beds.values()} == {Stage.EMBARGOED}
    assert [entry.outcome for entry in loop.grower.ledger.entries] == ["rolled back", "rolled back"]
    loop.epoch(epochs=3)
    assert loop.grower.rollbacks == 1  # the end of the epoch does not count the same disaster again
    assert all(map(math.isfinite, loop.grower.chronicle.train_losses))
    assert math.isfinite(loop.losses[-1])
    assert {bed.life.stage for bed in loop.grower.garden.beds.values()} == {Stage.DORMANT}


def test_a_disaster_in_the_last_step_of_an_epoch_is_no_second_one_at_its_end() -> None:
    loop = make_loop("never")
    loop.epoch()
    for x, y in loop.data[:-1]:
        loop.step(x, y)
    poison_host(loop)
    loop.step(*loop.data[-1])
    loop.grower.after_epoch(loop.evaluate)
    assert loop.grower.rollbacks == 1
    assert len(loop.grower.chronicle.train_losses) == 2
    assert all(map(math.isfinite, loop.grower.chronicle.train_losses))


def test_validation_that_is_not_finite_goes_back_at_the_end_of_the_epoch() -> None:
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
def test_a_seed_that_germinated_since_the_snapshot_goes(lifecycle: Lifecycle) -> None:
    loop = make_loop(Script({2: [Germinate("first", "test", "mlp")]}), config(lifecycle))
    loop.epoch(epochs=2)
    poison_host(loop)
    loop.step(*loop.data[0])
    (entry,) = loop.grower.ledger.entries
    assert entry.outcome == "rolled back"
    assert loop.slotted.slots["first"].seed is None
    expected = Stage.EMBARGOED if lifecycle is QUICK else Stage.DORMANT  # one that the host did not see is not to blame
    assert loop.grower.garden.beds["first"].life.stage is expected


def test_a_seed_that_was_pruned_since_the_snapshot_comes_back_and_lives_in_the_ledger() -> None:
    rules = Lifecycle(holding_epochs=1, withdraw_epochs=0, embargo_epochs=1)
    loop = make_loop(Script({**GROW, 2: [Prune("first", "test")]}), config(rules))
    loop.epoch()
    loop.epoch()  # the snapshot of this epoch was taken before the decision
    assert loop.slotted.slots["first"].seed is None
    assert loop.grower.ledger.entries[0].outcome == "pruned"
    poison_host(loop)
    loop.step(*loop.data[0])
    seed = loop.slotted.slots["first"].seed
    assert seed is not None
    assert any(parameter.abs().sum() > 0 for parameter in seed.parameters())
    assert loop.grower.garden.beds["first"].learner.optimizer.state
    entry = loop.grower.ledger.entries[0]
    assert (entry.outcome, entry.ended) == ("living", None)
    assert entry.steps[-1].stage is Stage.HOLDING
    loop.epoch(epochs=2)
    assert loop.grower.rollbacks == 1


def test_a_seed_that_was_kept_since_the_snapshot_is_on_probation_again() -> None:
    loop = make_loop(Script({**GROW, 8: [Fossilize("first", "test")]}))
    loop.val = loop.data
    loop.epoch(epochs=8)
    assert loop.slotted.slots["first"].is_kept
    poison_host(loop)
    loop.step(*loop.data[0])
    assert loop.grower.garden.beds["first"].life.stage is Stage.HOLDING
    assert not loop.slotted.slots["first"].is_kept
    assert loop.grower.ledger.entries[0].outcome == "living"


def test_a_run_that_fails_again_and_again_is_given_up_with_a_usable_model() -> None:
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


def test_a_gradient_that_was_on_its_way_does_not_outlive_the_rollback() -> None:
    loop = make_loop(Script({**GROW, 8: [Fossilize("first", "test")]}))
    loop.val = loop.data
    loop.epoch(epochs=9)
    seed = loop.slotted.slots["first"].seed
    x, y = loop.data[0]
    cross_entropy(loop.slotted(x), y).backward()
    loop.grower.after_step(torch.tensor(math.nan))
    assert loop.slotted.slots["first"].seed is seed
    assert all(parameter.grad is None for parameter in seed.parameters())
    loop.epoch()
    assert loop.grower.garden.beds["first"].life.gradients.skipped == 0


def test_a_change_in_the_data_is_gone_back_from_once_and_then_accepted() -> None:
    loop = make_loop(Script({}), config(QUICK))
    loop.epoch(epochs=12)
    assert loop.grower.rollbacks == 0
    before = loop.grower.chronicle.train_losses[-1]
    loop.data = [(x, (y + 1) % 3) for x, y in loop.data]  # everything it has learned is wrong now
    for _ in range(8):
        loop.epoch()
    assert loop.grower.rollbacks == 1
    losses = loop.grower.chronicle.train_losses
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
def test_a_first_batch_that_breaks_the_weights_is_gone_back_from(script: dict) -> None:
    loop = make_loop(Script(script))
    before = snapshot(loop.host)
    x, y = loop.data[0]
    plain_step(loop, torch.full_like(x, math.nan), y)
    assert loop.grower.rollbacks == 1
    assert_same(snapshot(loop.host), before)
    assert [entry.outcome for entry in loop.grower.ledger.entries] == ["living"] * len(script)  # what was not there is not to blame
    for x, y in loop.data[1:]:
        plain_step(loop, x, y)
    loop.grower.after_epoch(loop.evaluate)
    loop.epoch()
    assert loop.grower.rollbacks == 1
    assert all(map(math.isfinite, loop.losses[1:]))
    assert all(torch.isfinite(parameter).all() for parameter in loop.host.parameters())


@pytest.mark.parametrize("whose", ["host", "seed"])
def test_weights_that_are_not_finite_are_no_state_to_go_back_to_however_healthy_the_losses(whose: str) -> None:
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


def test_what_was_loaded_before_the_training_begins_is_what_is_gone_back_to() -> None:
    loop = make_loop("never")
    loop.host.load_state_dict(make_host(seed=8).state_dict())
    loop.grower.begin()
    before = snapshot(loop.host)
    for _ in range(2):  # the second time to the snapshot before the latest, if there were one
        poison_host(loop)
        loop.step(*loop.data[0])
        assert_same(snapshot(loop.host), before)
    assert loop.grower.rollbacks == 2
