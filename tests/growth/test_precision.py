"""Loss scaling and half precision: gradients of seeds are unscaled, and skipped steps are skipped for seeds too."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from esper.growth import grower
from esper.growth.lifecycle.stages import Advance, Germinate
from esper.growth.seeds import learner as seed_learner
from tests.growth.builders import QUICK, QUICK_SHADOW, SLOTS, LifecycleConfig, Loop, Script, config, make_host, make_loop

DEPTH, WIDTH = ("mlp", "low_rank"), ("widen_50", "widen_100")
every_direction = pytest.mark.parametrize("blueprints", [DEPTH, WIDTH], ids=["depth", "width"])


def scaled_loop(lifecycle: LifecycleConfig, scaler: torch.amp.GradScaler | None, blueprints: tuple[str, str] = DEPTH, **options) -> Loop:
    torch.manual_seed(1)
    born = [Germinate(slot=slot, reason="test", blueprint=blueprint) for slot, blueprint in zip(SLOTS, blueprints, strict=True)]
    script = Script({0: born, 1: [Advance(slot=slot, reason="test") for slot in SLOTS]}, probes=[0])
    loop = make_loop(script, config(lifecycle), scaler=scaler, slots=("first", "after", "second"), **options)
    loop.grower.begin()
    return loop


def step(loop: Loop, scaler: torch.amp.GradScaler | None, x: Tensor, y: Tensor, *, spoil=lambda: None) -> None:
    loss = cross_entropy(loop.slotted(x), y)
    (loss if scaler is None else scaler.scale(loss)).backward()
    spoil()
    if scaler is None:
        loop.optimizer.step()
    else:
        scaler.step(loop.optimizer)
        scaler.update()
    loop.optimizer.zero_grad()
    loop.grower.after_step(loss, closure=lambda: cross_entropy(loop.slotted(x), y))


@pytest.mark.slow
@every_direction
@pytest.mark.parametrize("lifecycle", [QUICK, QUICK_SHADOW], ids=["joint", "shadow"])
def test_seeds_learn_the_same_with_and_without_a_loss_scale(lifecycle: LifecycleConfig, blueprints: tuple[str, str]) -> None:
    def trained(scaler: torch.amp.GradScaler | None) -> Loop:
        loop = scaled_loop(lifecycle, scaler, blueprints, dtype=torch.float64)
        for _ in range(3):
            for x, y in loop.data:
                step(loop, scaler, x, y)
            loop.grower.after_epoch(loop.evaluate)
        return loop

    # The scale grows on the way, so that it has to be the one of the right step.
    scaled, plain = trained(torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_factor=2.0, growth_interval=2)), trained(None)
    for name in SLOTS:
        backend, other = scaled.grower.lifecycles.slots[name], plain.grower.lifecycles.slots[name]
        for found, expected in zip(backend.slot.seed.parameters(), other.slot.seed.parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
        assert backend.record.gradients.mean_norm == pytest.approx(other.record.gradients.mean_norm, rel=1e-5)
        assert backend.record.gradients.skipped == 0
    found, expected = (next(event for event in loop.events if event.kind == "probed").promises for loop in (scaled, plain))
    for slot, promises in expected.items():
        assert found[slot] == pytest.approx(promises, rel=1e-4)


def test_an_overflow_in_a_seed_skips_only_its_own_step_and_is_counted() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    loop = scaled_loop(QUICK, scaler)
    x, y = loop.data[0]
    step(loop, scaler, x, y)
    seed, other = (loop.slotted.slots[name].seed for name in SLOTS)
    before, others, host = copy.deepcopy(list(seed.parameters())), copy.deepcopy(list(other.parameters())), loop.host.head.weight.clone()

    def spoil() -> None:
        list(seed.parameters())[-1].grad.fill_(math.inf)

    step(loop, scaler, x, y, spoil=spoil)
    assert all(torch.equal(now, then) for now, then in zip(seed.parameters(), before, strict=True))
    assert not all(torch.equal(now, then) for now, then in zip(other.parameters(), others, strict=True))
    assert not torch.equal(loop.host.head.weight, host)
    assert scaler.get_scale() == 16.0
    for x, y in loop.data[2:]:
        step(loop, scaler, x, y)
    loop.grower.after_epoch(loop.evaluate)
    assert [loop.grower.lifecycles.slots[name].record.gradients.skipped for name in SLOTS] == [1, 0]
    assert loop.grower.lifecycles.slots["first"].record.gradients.health < 1


def test_an_overflow_in_the_host_skips_the_steps_of_host_and_seed() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=32.0)
    loop = scaled_loop(QUICK, scaler)
    x, y = loop.data[0]
    step(loop, scaler, x, y, spoil=lambda: loop.host.head.weight.grad.fill_(math.inf))  # the first step of all
    step(loop, scaler, x, y)
    seed = loop.slotted.slots["first"].seed
    before, host = copy.deepcopy(list(seed.parameters())), copy.deepcopy(list(loop.host.parameters()))
    step(loop, scaler, x, y, spoil=lambda: loop.host.head.weight.grad.fill_(math.inf))
    assert all(torch.equal(now, then) for now, then in zip(loop.host.parameters(), host, strict=True))
    assert all(torch.equal(now, then) for now, then in zip(seed.parameters(), before, strict=True))
    assert scaler.get_scale() == 8.0
    assert loop.grower.rollbacks == 0
    step(loop, scaler, x, y)  # at the new scale
    assert not all(torch.equal(now, then) for now, then in zip(seed.parameters(), before, strict=True))
    report = loop.grower.lifecycles.slots["first"].learner.report()
    assert report.max_norm < 10
    assert report.skipped == 2


def test_parts_of_an_accumulated_batch_do_not_count_as_skipped_steps() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    loop = scaled_loop(QUICK, scaler)
    x, y = loop.data[0]
    step(loop, scaler, x, y)
    for _ in range(2):
        loss = cross_entropy(loop.slotted(x), y)
        scaler.scale(loss).backward()
        loop.grower.after_step(loss)
    step(loop, scaler, x, y)
    assert loop.grower.lifecycles.slots["first"].learner.report().skipped == 0


@every_direction
@pytest.mark.parametrize("lifecycle", [QUICK, QUICK_SHADOW], ids=["joint", "shadow"])
def test_a_host_in_half_precision_has_seeds_in_half_precision(lifecycle: LifecycleConfig, blueprints: tuple[str, str]) -> None:
    loop = scaled_loop(lifecycle, None, blueprints, host=make_host(dtype=torch.bfloat16), dtype=torch.bfloat16)
    loop.epoch(epochs=3)
    for name in SLOTS:
        backend = loop.grower.lifecycles.slots[name]
        assert {parameter.dtype for parameter in backend.slot.seed.parameters()} == {torch.bfloat16}
        assert backend.record.gradients.mean_norm > 0
    assert all(map(math.isfinite, loop.grower.history.val_losses))


@every_direction
def test_under_autocast_seeds_stay_in_full_precision_and_learn(blueprints: tuple[str, str]) -> None:
    loop = scaled_loop(QUICK, None, blueprints)
    for x, y in loop.data:
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(loop.slotted(x), y)
        loss.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        loop.grower.after_step(loss)
    loop.grower.after_epoch(loop.evaluate)
    for name in SLOTS:
        backend = loop.grower.lifecycles.slots[name]
        assert {parameter.dtype for parameter in backend.slot.seed.parameters()} == {torch.float32}
        assert backend.record.gradients.mean_norm > 0


class Reads(TorchDispatchMode):
    """Counts how often a value is read from a tensor, which waits for the device where the tensor is on one."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is taken for a device that one has to wait for."""
    for module in (seed_learner, grower):
        monkeypatch.setattr(module, "reading_waits", lambda tensor: True)


@pytest.mark.parametrize("lifecycle", [QUICK, QUICK_SHADOW], ids=["joint", "shadow"])
@pytest.mark.usefixtures("far")
def test_steps_with_a_loss_scale_read_nothing_from_the_device(lifecycle: LifecycleConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    loop = scaled_loop(lifecycle, scaler)
    monkeypatch.setattr(scaler, "get_scale", lambda: pytest.fail("get_scale reads the device"))
    step(loop, scaler, *loop.data[0])  # once, the grower looks whether frozen weights move
    for x, y in loop.data[1:3]:
        loss = cross_entropy(loop.slotted(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(loop.optimizer)
        with Reads() as reads:
            loop.optimizer.step()  # as scaler.step does, which reads by itself whether there was an overflow
        loop.optimizer.zero_grad()
        scaler.update()
        with reads:
            loop.grower.after_step(loss, closure=lambda x=x, y=y: cross_entropy(loop.slotted(x), y))
        assert reads.count == 0
    assert loop.grower.lifecycles.slots["first"].learner.report().steps == 3


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, amsgrad=True),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01, weight_decay=0.1),
    "fused sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=0.1, fused=True),
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.usefixtures("far")
def test_a_seed_whose_gradient_overflows_on_a_device_keeps_its_weights_and_moments(name: str) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    loop = scaled_loop(QUICK, scaler, make_optimizer=lambda model: OPTIMIZERS[name](model.parameters()))
    x, y = loop.data[0]
    backend = loop.grower.lifecycles.slots["first"]
    learner, parameters = backend.learner, list(backend.slot.seed.parameters())

    def state() -> list[Tensor]:
        moments = [value for one in parameters for key, value in learner.optimizers[0].state.get(one, {}).items() if key != "step"]
        return copy.deepcopy([*parameters, *moments])

    def spoil() -> None:
        parameters[-1].grad.fill_(math.inf)

    born = state()
    step(loop, scaler, x, y, spoil=spoil)  # the first step of all
    assert all(torch.equal(now, then) for now, then in zip(state(), born, strict=False))  # a fused optimiser has zeros as moments now
    for _ in range(2):
        step(loop, scaler, x, y)
    before = state()
    assert len(before) > len(born)
    step(loop, scaler, x, y, spoil=spoil)
    assert all(torch.equal(now, then) for now, then in zip(state(), before, strict=True))
    step(loop, scaler, x, y)
    assert not any(torch.equal(now, then) for now, then in zip(parameters, before, strict=False))
    stats = learner.report()
    assert (stats.steps, stats.skipped) == (5, 2)


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("where", ["near", "far"])
def test_skipped_steps_of_the_host_are_counted_in_a_loop_of_the_users_own(
    where: str, is_fused: bool, request: pytest.FixtureRequest
) -> None:
    if where == "far":
        request.getfixturevalue("far")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    loop = scaled_loop(QUICK, scaler, make_optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=is_fused))
    for number, (x, y) in enumerate(loop.data):
        step(loop, scaler, x, y, spoil=(lambda: loop.host.head.weight.grad.fill_(math.inf)) if number in (0, 2) else lambda: None)
    saved = loop.grower.state_dict()
    assert loop.grower.after_epoch(loop.evaluate).skipped == 2
    for x, y in loop.data:
        step(loop, scaler, x, y)
    assert loop.grower.after_epoch(loop.evaluate).skipped == 0
    loop.grower.load_state_dict(saved)
    assert loop.grower.after_epoch(loop.evaluate).skipped == 2


@pytest.mark.usefixtures("far")
def test_a_fused_step_that_the_device_skips_is_skipped_for_the_seed_on_the_device() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    loop = scaled_loop(QUICK, scaler, make_optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True))
    x, y = loop.data[0]
    step(loop, scaler, x, y)
    backend = loop.grower.lifecycles.slots["first"]
    before = copy.deepcopy(list(backend.slot.seed.parameters()))
    step(loop, scaler, x, y, spoil=lambda: loop.host.head.weight.grad.fill_(math.inf))
    assert all(torch.equal(now, then) for now, then in zip(backend.slot.seed.parameters(), before, strict=True))
