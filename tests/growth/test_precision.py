"""Loss scaling and half precision: the seed's gradients are unscaled, and a step that the host skips is skipped for the seed."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from esper.growth.decisions import Advance, Germinate
from tests.growth.small import QUICK, QUICK_SHADOW, SLOTS, Lifecycle, Loop, Script, config, make_host, make_loop

BOTH = {0: [Germinate("first", "test", "mlp"), Germinate("second", "test", "low_rank")], 1: [Advance(slot, "test") for slot in SLOTS]}


def scaled_loop(lifecycle: Lifecycle, scaler: torch.amp.GradScaler | None, **options) -> Loop:
    torch.manual_seed(1)
    loop = make_loop(Script(BOTH, probes=[0]), config(lifecycle), scaler=scaler, slots=("first", "after", "second"), **options)
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


@pytest.mark.parametrize("lifecycle", [QUICK, QUICK_SHADOW], ids=["joint", "shadow"])
def test_seeds_learn_the_same_with_and_without_a_loss_scale(lifecycle: Lifecycle) -> None:
    def trained(scaler: torch.amp.GradScaler | None) -> Loop:
        loop = scaled_loop(lifecycle, scaler, dtype=torch.float64)
        for _ in range(3):
            for x, y in loop.data:
                step(loop, scaler, x, y)
            loop.grower.after_epoch(loop.evaluate)
        return loop

    # The scale grows on the way, so that it has to be the one of the right step.
    scaled, plain = trained(torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_factor=2.0, growth_interval=2)), trained(None)
    for name in SLOTS:
        bed, other = scaled.grower.garden.beds[name], plain.grower.garden.beds[name]
        for found, expected in zip(bed.slot.seed.parameters(), other.slot.seed.parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
        assert bed.life.gradients.mean_norm == pytest.approx(other.life.gradients.mean_norm, rel=1e-5)
        assert bed.life.gradients.skipped == 0
    found, expected = (next(event for event in loop.events if event.kind == "probed").promises for loop in (scaled, plain))
    for slot, promises in expected.items():
        assert found[slot] == pytest.approx(promises, rel=1e-4)


def test_an_overflow_in_the_seed_skips_the_seeds_step_alone_and_is_counted() -> None:
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
    assert [loop.grower.garden.beds[name].life.gradients.skipped for name in SLOTS] == [1, 0]
    assert loop.grower.garden.beds["first"].life.gradients.health < 1


def test_an_overflow_in_the_host_skips_the_steps_of_host_and_seed() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    loop = scaled_loop(QUICK, scaler)
    x, y = loop.data[0]
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
    assert loop.grower.garden.beds["first"].learner.report().max_norm < 10


@pytest.mark.parametrize("lifecycle", [QUICK, QUICK_SHADOW], ids=["joint", "shadow"])
def test_a_host_in_half_precision_has_seeds_in_half_precision(lifecycle: Lifecycle) -> None:
    loop = scaled_loop(lifecycle, None, host=make_host(dtype=torch.bfloat16), dtype=torch.bfloat16)
    loop.epoch(epochs=3)
    for name in SLOTS:
        bed = loop.grower.garden.beds[name]
        assert {parameter.dtype for parameter in bed.slot.seed.parameters()} == {torch.bfloat16}
        assert bed.life.gradients.mean_norm > 0
    assert all(map(math.isfinite, loop.grower.chronicle.val_losses))


def test_under_autocast_seeds_stay_in_full_precision_and_learn() -> None:
    loop = scaled_loop(QUICK, None)
    for x, y in loop.data:
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(loop.slotted(x), y)
        loss.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        loop.grower.after_step(loss)
    loop.grower.after_epoch(loop.evaluate)
    for name in SLOTS:
        bed = loop.grower.garden.beds[name]
        assert {parameter.dtype for parameter in bed.slot.seed.parameters()} == {torch.float32}
        assert bed.life.gradients.mean_norm > 0
