"""A seed raised in the shadow leaves the host unchanged."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel

from esper.growth import Grower, GrowthError, add_slots
from esper.growth.config import BudgetConfig
from esper.growth.lifecycle.stages import Advance, Germinate, Prune, Stage
from esper.growth.seeds.width import WidthSeed
from tests.growth.builders import (
    QUICK_SHADOW,
    Script,
    adamw,
    assert_same,
    config,
    make_data,
    make_host,
    make_loop,
    plain_losses,
    sgd,
    snapshot,
)

GROW = {0: [Germinate(slot="first", reason="test", blueprint="mlp"), Germinate(slot="second", reason="test", blueprint="low_rank")]}
AGAIN = {
    0: [Germinate(slot="first", reason="test", blueprint="mlp"), Germinate(slot="second", reason="test", blueprint="low_rank")],
    2: [Prune(slot="first", reason="test"), Prune(slot="second", reason="test")],
    4: [Germinate(slot="first", reason="test", blueprint="low_rank"), Germinate(slot="second", reason="test", blueprint="mlp")],
}


@pytest.mark.slow
@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
@pytest.mark.parametrize("replayed", [True, False], ids=["with replay", "without replay"])
@pytest.mark.parametrize(("actions", "epochs"), [(GROW, 3), (AGAIN, 6)], ids=["germinate", "germinate, prune, germinate"])
def test_a_seed_in_the_shadow_leaves_a_host_with_batch_norm_and_dropout_bit_identical(make_optimizer, replayed, actions, epochs) -> None:
    settings = config(QUICK_SHADOW)
    torch.manual_seed(5)
    plain = make_host()
    optimizer = make_optimizer(plain)
    expected = plain_losses(plain, optimizer, make_data(), epochs=epochs)

    torch.manual_seed(5)
    loop = make_loop(Script(actions), settings, host=make_host(), make_optimizer=make_optimizer)
    loop.grower._steps.shadow._can_replay = replayed
    for _ in range(epochs):
        loop.host.train()
        loop.epoch()

    assert loop.losses == expected
    assert_same(snapshot(loop.host, loop.optimizer), snapshot(plain, optimizer))
    assert torch.equal(torch.rand(3), _next_numbers(make_host, make_optimizer, epochs))
    seeds = [slot.seed for slot in loop.slotted.slots.values()]
    assert all(seed is not None and any(parameter.abs().sum() > 0 for parameter in _last_layer(seed)) for seed in seeds)
    assert {backend.stage for backend in loop.grower.lifecycles.slots.values()} == {Stage.TRAINING}


def _next_numbers(make, make_optimizer, epochs: int) -> torch.Tensor:
    torch.manual_seed(5)
    host = make()
    plain_losses(host, make_optimizer(host), make_data(), epochs=epochs)
    return torch.rand(3)


def _last_layer(seed: nn.Module) -> list[nn.Parameter]:
    """The parameters that are zero at birth are among these."""
    return list(seed.parameters())[-2:]


def test_the_second_pass_of_a_recorded_prefix_is_shorter_and_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = make_loop(Script({0: [Germinate(slot="second", reason="test", blueprint="mlp")]}), config(QUICK_SHADOW))
    loop.grower.begin()
    original = loop.host.second[0].forward
    computed = []
    monkeypatch.setattr(loop.host.second[0], "forward", lambda x: (computed.append(1), original(x))[1])
    loop.epoch()
    steps = len(loop.data)
    assert len(computed) == steps + len(loop.val)  # in the user's own passes and in evaluation, never in the second pass
    assert loop.grower.lifecycles.slots["second"].record.gradients.steps == steps


def test_a_copy_of_the_model_made_while_a_seed_is_in_the_shadow_is_a_model_of_its_own() -> None:
    loop = make_loop(Script({0: [Germinate(slot="second", reason="test", blueprint="mlp")]}), config(QUICK_SHADOW))
    loop.epoch()
    twin, average = copy.deepcopy(loop.host), AveragedModel(loop.host)
    pickled = pickle.loads(pickle.dumps(loop.host.second))
    x = make_data(1, seed=9)[0][0]
    loop.host.eval(), twin.eval(), average.eval(), pickled.eval()
    before = loop.host(x)
    with torch.no_grad():
        for parameter in loop.host.parameters():
            parameter.zero_()
    assert torch.equal(twin(x), before)
    assert torch.equal(average(x), before)
    assert not torch.equal(loop.host(x), before)


def test_shadow_without_a_closure_is_refused_before_anything_happens() -> None:
    loop = make_loop(Script(GROW), config(QUICK_SHADOW))
    with pytest.raises(GrowthError, match="closure=lambda"):
        loop.grower.after_step(torch.tensor(1.0))
    assert not loop.events
    assert loop.grower.history.steps == 0


@pytest.mark.parametrize("wrong", [lambda: 1.0, lambda: torch.tensor(1.0), lambda: torch.ones(3, requires_grad=True)])
def test_a_closure_without_a_loss_is_refused(wrong) -> None:
    loop = make_loop(Script(GROW), config(QUICK_SHADOW))
    loop.step_host()
    with pytest.raises(GrowthError, match="must compute the loss of the batch again"):
        loop.grower.after_step(torch.tensor(1.0), closure=wrong)


def test_a_closure_that_fails_leaves_the_host_as_it_was_and_training_goes_on() -> None:
    loop = make_loop(Script(GROW), config(QUICK_SHADOW))
    loop.step_host()
    before = snapshot(loop.host, loop.optimizer)

    def fail():
        cross_entropy(loop.slotted(loop.data[0][0]), loop.data[0][1])
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="disk is gone"):
        loop.grower.after_step(torch.tensor(1.0), closure=fail)
    assert_same(snapshot(loop.host, loop.optimizer), before)
    assert all(slot.alpha == 0.0 and not slot.is_connected for slot in loop.slotted.slots.values())
    loop.epoch(epochs=2)
    assert loop.grower.epoch == 2
    assert all(backend.record.gradients.health > 0 for backend in loop.grower.lifecycles.slots.values())


def test_a_closure_that_calls_the_model_differently_is_computed_without_the_prefix_cache() -> None:
    loop = make_loop(Script({0: [Germinate(slot="second", reason="test", blueprint="mlp")]}), config(QUICK_SHADOW))
    for x, y in loop.data:
        loss = cross_entropy(loop.slotted(x), y)
        loss.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        loop.grower.after_step(loss, closure=lambda x=x, y=y: cross_entropy(loop.slotted(torch.cat([x, x])), torch.cat([y, y])))
    loop.grower.after_epoch(loop.evaluate)
    assert loop.grower.lifecycles.slots["second"].record.gradients.steps == len(loop.data)


def test_the_gradient_in_the_shadow_is_that_of_the_host_with_the_seed_in_it() -> None:
    """Without a replay the second pass is that of the stepped host, so it can be computed by hand."""
    host = make_host(dtype=torch.float64, dropout=0.0)
    optimizer = sgd(host)
    x, y = make_data(1, dtype=torch.float64)[0]
    slotted = add_slots(host, x[:2], slots=["second"])
    settings = config(QUICK_SHADOW)
    grower = Grower(slotted, optimizer, controller=Script({0: [Germinate(slot="second", reason="test", blueprint="mlp")]}), config=settings)
    grower.begin()
    seed = slotted.slots["second"].seed
    assert seed is not None
    grower._steps.shadow._can_replay = False
    cross_entropy(host(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    twin_host, twin_seed = copy.deepcopy(host), copy.deepcopy(seed)
    twin_host.second.register_forward_hook(lambda module, arguments, output: output + twin_seed.branch(output))
    grower.after_step(torch.tensor(1.0), closure=lambda: cross_entropy(host(x), y))
    cross_entropy(twin_host(x), y).backward()
    norm = torch.linalg.vector_norm(torch.cat([parameter.grad.reshape(-1) for parameter in twin_seed.parameters()]))
    assert grower.lifecycles.slots["second"].learner.report().mean_norm == pytest.approx(float(norm), rel=1e-6)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("out of memory"), RuntimeError("a mistake of the user's")], ids=["memory", "user"]
)
def test_an_error_in_the_closure_is_raised_at_once_and_replay_stays_enabled(error: RuntimeError) -> None:
    loop = make_loop(Script({0: [Germinate(slot="second", reason="test", blueprint="mlp")]}), config(QUICK_SHADOW))
    loop.step(*loop.data[0])
    loop.step_host()
    calls = []

    def fail() -> torch.Tensor:
        calls.append(1)
        cross_entropy(loop.slotted(loop.data[0][0]), loop.data[0][1])
        raise error

    with pytest.raises(type(error), match=str(error)):
        loop.grower.after_step(torch.tensor(1.0), closure=fail)
    assert len(calls) == 1
    assert loop.grower._steps.shadow._can_replay


def test_a_closure_on_another_batch_is_computed_without_the_prefix_cache() -> None:
    """A batch of the same shape, such as another part of an accumulated one, would be replayed without anyone noticing."""

    def trained(*, can_replay: bool) -> dict:
        loop = make_loop(
            Script({0: [Germinate(slot="second", reason="test", blueprint="mlp")]}), config(QUICK_SHADOW), host=make_host(dropout=0.0)
        )
        loop.grower._steps.shadow._can_replay = can_replay
        loop.grower.begin()
        for (x, y), (other_x, other_y) in zip(loop.data, loop.data[1:], strict=False):
            for part_x, part_y in ((x, y), (other_x, other_y)):
                loss = cross_entropy(loop.host(part_x), part_y) / 2
                loss.backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            loop.grower.after_step(loss, closure=lambda x=x, y=y: cross_entropy(loop.host(x), y))
        return dict(loop.slotted.slots["second"].seed.state_dict())

    assert_same(trained(can_replay=True), trained(can_replay=False))


def test_a_second_pass_leaves_the_statistics_of_connected_width_seeds_unchanged() -> None:
    actions = {
        0: [Germinate(slot="first", reason="test", blueprint="widen_100")],
        1: [Advance(slot="first", reason="test")],
        3: [Germinate(slot="second", reason="test", blueprint="low_rank")],
    }
    loop = make_loop(Script(actions), config(QUICK_SHADOW, budget=BudgetConfig(max_parameters=None, max_flops=None)), host=make_host())
    loop.grower._steps.shadow._can_replay = False
    for _ in range(3):
        loop.host.train()
        loop.epoch()
    seed = loop.slotted.slots["first"].seed
    assert isinstance(seed, WidthSeed)
    (norm,) = (module for module in seed.modules() if isinstance(module, nn.BatchNorm1d))
    assert loop.grower.lifecycles.slots["second"].stage is Stage.TRAINING
    before = int(norm.num_batches_tracked)
    loop.host.train()
    loop.epoch()
    assert int(norm.num_batches_tracked) == before + len(loop.data)
