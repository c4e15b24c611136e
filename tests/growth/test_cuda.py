"""Growth on a GPU; skipped where there is none."""

from __future__ import annotations

import copy
import math
import time

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from esper.growth import Grower, Planned, add_slots, grow
from esper.growth.lifecycle.history import History
from esper.growth.lifecycle.stages import Advance, Fossilize, Germinate, Prune
from esper.tasks import ConvHost
from tests.conftest import sync_debug_mode
from tests.growth.builders import (
    QUICK,
    QUICK_SHADOW,
    SLOTS,
    Data,
    LifecycleConfig,
    Loop,
    Script,
    adamw,
    assert_same,
    config,
    make_data,
    make_host,
    make_loop,
    plain_losses,
    plain_training,
    snapshot,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

BOTH = {0: [Germinate(slot="first", reason="test", blueprint="mlp"), Germinate(slot="second", reason="test", blueprint="low_rank")]}


def on_gpu(data: Data) -> Data:
    return [(x.cuda(), y.cuda()) for x, y in data]


def gpu_loop(script: Script, lifecycle: LifecycleConfig = QUICK, **options) -> Loop:
    host = make_host().cuda()
    optimizer = adamw(host)
    events: list = []
    slotted = add_slots(host, torch.zeros(2, 6, device="cuda"), slots=list(SLOTS))
    grower = Grower(slotted, optimizer, controller=script, config=config(lifecycle, probe_steps=2), on_event=events.append, **options)
    return Loop(host, optimizer, slotted, grower, on_gpu(make_data()), on_gpu(make_data(3, seed=2)), events)


@pytest.mark.parametrize("replayed", [True, False])
def test_a_seed_in_the_shadow_leaves_the_host_bit_identical_on_the_gpu(replayed: bool) -> None:
    plain = make_host().cuda()
    optimizer = adamw(plain)
    torch.manual_seed(5)
    expected = plain_losses(plain, optimizer, on_gpu(make_data()), epochs=4)
    loop = gpu_loop(
        Script(
            {**BOTH, 2: [Prune(slot="first", reason="test")], 3: [Germinate(slot="first", reason="test", blueprint="mlp")]}, probes=[0, 2]
        ),
        QUICK_SHADOW,
    )
    loop.grower._steps.shadow._can_replay = replayed
    torch.manual_seed(5)
    loop.epoch(epochs=4)
    assert loop.losses == expected
    assert_same(snapshot(loop.host, loop.optimizer), snapshot(plain, optimizer))


@pytest.mark.parametrize("lifecycle", [QUICK, QUICK_SHADOW], ids=["joint", "shadow"])
def test_half_precision_with_a_loss_scale_grows(lifecycle: LifecycleConfig) -> None:
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40, growth_interval=4)  # it overflows at first
    loop = gpu_loop(Script({**BOTH, 1: [Advance(slot=slot, reason="test") for slot in SLOTS]}, probes=[0, 1]), lifecycle, scaler=scaler)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.float16):
            return cross_entropy(loop.slotted(x), y)

    loop.grower.begin()
    for _ in range(12):
        for x, y in loop.data:
            loss = loss_of(x, y)
            scaler.scale(loss).backward()
            scaler.step(loop.optimizer)
            scaler.update()
            loop.optimizer.zero_grad()
            loop.grower.after_step(loss, closure=lambda x=x, y=y: loss_of(x, y))
        loop.grower.after_epoch(loop.evaluate)
    assert loop.grower.rollbacks == 0
    assert scaler.get_scale() < 2.0**40
    first = next(event for event in loop.events if event.kind == "epoch_ended")
    assert all(slot.health is not None and slot.health < 1 for slot in first.slots)
    for backend in loop.grower.lifecycles.slots.values():
        assert backend.record.gradients.skipped <= 2
        assert backend.record.gradients.health > 0.4
        assert all(torch.isfinite(parameter).all() for parameter in backend.slot.seed.parameters())


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_step_with_a_loss_scale_never_waits_for_the_gpu(is_fused: bool) -> None:
    host = make_host(norm=False).cuda()
    optimizer = torch.optim.AdamW(host.parameters(), lr=0.01, fused=is_fused)
    slotted = add_slots(host, torch.zeros(2, 6, device="cuda"), slots=list(SLOTS))
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40 if is_fused else 1024.0)  # the one overflows at first
    grower = Grower(slotted, optimizer, scaler=scaler, controller=Script(BOTH, probes=[0]), config=config(probe_steps=3))
    grower.begin()
    data = on_gpu(make_data(8))
    for number, (x, y) in enumerate(data * 4):
        with torch.autocast("cuda", torch.float16):
            loss = cross_entropy(slotted(x), y)
        scaler.scale(loss).backward()
        if not is_fused:
            scaler.unscale_(optimizer)
        with sync_debug_mode("error" if number or is_fused else "default"):  # the first step of a seed waits
            if is_fused:
                scaler.step(optimizer)
            else:
                optimizer.step()  # as the scaler does, which itself reads whether there was an overflow
        with sync_debug_mode("error" if number else "default"):  # once, the grower looks whether frozen weights move
            scaler.update()
            optimizer.zero_grad()
            grower.after_step(loss)
    backend = grower.lifecycles.slots["first"]
    assert all(torch.isfinite(parameter).all() for parameter in backend.slot.seed.parameters())
    assert backend.learner.report().steps > 8
    assert not is_fused or scaler.get_scale() < 2.0**40


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_a_seed_whose_gradient_overflows_on_the_gpu_keeps_its_weights_and_moments(
    make: type[torch.optim.Optimizer], is_fused: bool
) -> None:
    host, more = make_host(norm=False).cuda(), {"momentum": 0.9} if make is torch.optim.SGD else {}
    optimizer = make(host.parameters(), lr=0.01, weight_decay=0.1, fused=is_fused, **more)
    slotted = add_slots(host, torch.zeros(2, 6, device="cuda"), slots=list(SLOTS))
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    grower = Grower(slotted, optimizer, scaler=scaler, controller=Script(BOTH), config=config())
    grower.begin()
    learner = grower.lifecycles.slots["first"].learner

    def state() -> list[Tensor]:
        moments = [value for one in learner.parameters for key, value in learner.optimizers[0].state.get(one, {}).items() if key != "step"]
        return copy.deepcopy([*learner.parameters, *moments])

    has_moved = []
    for number, (x, y) in enumerate(on_gpu(make_data(6))):
        with torch.autocast("cuda", torch.float16):
            loss = cross_entropy(slotted(x), y)
        scaler.scale(loss).backward()
        if number in (0, 3):
            learner.parameters[-1].grad.fill_(math.inf)
        before = state()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        grower.after_step(loss)
        has_moved.append(not all(torch.equal(now, then) for now, then in zip(state(), before, strict=False)))
    assert has_moved == [False, True, True, False, True, True]
    assert learner.report().skipped == 2


def test_a_disaster_on_the_gpu_is_found_at_the_end_of_the_epoch_and_undone() -> None:
    loop = gpu_loop(Script(BOTH))
    loop.epoch(epochs=2)
    before = snapshot(loop.host, loop.optimizer)
    with torch.no_grad():
        next(loop.slotted.slots["first"].seed.parameters()).fill_(math.nan)
    loop.epoch()
    assert loop.grower.rollbacks == 1
    assert_same(snapshot(loop.host, loop.optimizer), before)
    loop.epoch(epochs=2)
    assert math.isfinite(loop.grower.history.train_losses[-1])


def test_a_grower_on_the_gpu_goes_on_from_its_state_in_the_middle_of_an_epoch() -> None:
    script = {**BOTH, 3: [Fossilize(slot="first", reason="test"), Prune(slot="second", reason="test")]}
    whole = gpu_loop(Script(script, probes=[0, 1]))
    torch.manual_seed(8)
    whole.epoch(epochs=4)
    first = gpu_loop(Script(script, probes=[0, 1]))
    torch.manual_seed(8)
    first.epoch()
    first.step(*first.data[0])
    state = copy.deepcopy(first.grower.state_dict())
    numbers = torch.get_rng_state(), torch.cuda.get_rng_state()
    second = gpu_loop(Script(script, probes=[0, 1]))
    second.grower.load_state_dict(state)
    torch.set_rng_state(numbers[0])
    torch.cuda.set_rng_state(numbers[1])
    for x, y in second.data[1:]:
        second.step(x, y)
    second.grower.after_epoch(second.evaluate)
    second.epoch(epochs=2)
    assert second.losses == whole.losses[-len(second.losses) :]
    assert second.grower.ledger == whole.grower.ledger


def test_growing_on_the_gpu_equals_growing_on_the_cpu() -> None:
    """In float64, with batches that come from the CPU."""
    settings = config(slots=SLOTS)
    results = []
    for device in ("cpu", "cuda"):
        host = make_host(dtype=torch.float64, dropout=0.0).to(device)
        data = make_data(dtype=torch.float64)
        results.append(grow(host, data, data, cross_entropy, epochs=6, controller=Script(BOTH, probes=[0]), config=settings))
    assert results[0].val_losses == pytest.approx(results[1].val_losses, rel=1e-9)


def test_seeds_on_the_gpu_start_as_those_on_the_cpu() -> None:
    here, there = make_loop(Script(BOTH)), gpu_loop(Script(BOTH))
    here.grower.begin()
    there.grower.begin()
    for name in SLOTS:
        for one, other in zip(here.slotted.slots[name].seed.parameters(), there.slotted.slots[name].seed.parameters(), strict=True):
            assert torch.equal(one, other.cpu())


@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_on_the_gpu_equals_the_plain_loop_with_autocast_and_a_scaler(precision: str, max_grad_norm: float | None) -> None:
    options = {"precision": precision, "max_grad_norm": max_grad_norm, "controller": "never", "keep": "last", "config": config(slots=SLOTS)}
    torch.manual_seed(11)
    grown = grow(make_host().cuda(), make_data(), make_data(2), cross_entropy, epochs=3, **options)  # the data are moved
    torch.manual_seed(11)
    expected = plain_training(make_host().cuda(), make_data(), epochs=3, precision=getattr(torch, precision), max_grad_norm=max_grad_norm)
    assert_same(dict(grown.model.state_dict()), dict(expected.state_dict()))


@pytest.mark.parametrize("lifecycle", [QUICK, QUICK_SHADOW], ids=["joint", "shadow"])
def test_grow_with_half_precision_accumulation_clipping_and_a_schedule_by_steps_keeps_a_seed(lifecycle: LifecycleConfig) -> None:
    seen = set()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.add((outputs.dtype, outputs.device.type))
        return cross_entropy(outputs, targets)

    data = make_data(6)
    grown = grow(
        make_host().cuda(),
        data,
        data,
        loss,
        epochs=10,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),  # skips overflows on the device
        scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=30),
        precision="float16",
        accumulate=2,
        max_grad_norm=0.5,
        controller=Planned([(1, "first", "mlp")]),
        config=config(lifecycle, slots=SLOTS),
    )
    assert seen == {(torch.float16, "cuda")}
    assert [entry.outcome for entry in grown.ledger.seeds] == ["kept"]
    assert grown.val_losses[-1] < grown.val_losses[0]


def test_layers_fold_where_convolutions_are_rounded_to_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    host = ConvHost(3, 10, (8, 16, 32), pool=(True, True, True)).cuda()
    slotted = add_slots(host, torch.randn(4, 3, 32, 32, device="cuda"))
    slot = slotted.slot("blocks.0")
    slot.plant(slotted.new_seed("blocks.0", "widen_100_chain", random_seed=0))
    with torch.no_grad():
        for parameter in slot.seed.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        slot.seed.alpha.fill_(1.0)
    slot.connect(True)
    slot.is_kept = True
    model = slotted.bake()
    assert model.blocks[0].conv.out_channels == 16
    assert torch.backends.cudnn.allow_tf32


def test_steps_are_timed_by_events_of_the_gpu() -> None:
    steps = History(checks_per_epoch=2)
    weights = torch.randn(4096, 4096, device="cuda")
    with sync_debug_mode("error"):
        steps.start_clock(torch.device("cuda"))
        for _ in range(20):
            weights = (weights @ weights).clamp(-1, 1)
            steps.note_step(weights[0, 0], samples=1, flops_per_sample=1)
    before = time.perf_counter()
    steps.chunks()
    waited = time.perf_counter() - before
    assert steps.step_seconds is not None
    assert 20 * steps.step_seconds > 0.5 * waited  # the device was busy, although the calls had returned long before
