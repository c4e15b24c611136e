"""Compiled models with slots: growth takes effect after compilation, and nothing recompiles while nothing grows."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from esper.growth import Grower, add_slots
from esper.growth.host.saving import load
from esper.growth.host.slotted import Slotted
from esper.growth.lifecycle.stages import Germinate
from tests.growth.builders import Script, config, sgd
from tests.growth.host.helpers import germinate, hooks_of, perturb, plant_kept_seeds
from tests.growth.hosts import FAMILIES

pytestmark = pytest.mark.slow  # the compiler takes its time

FAMILY = FAMILIES["functional mlp"]


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@contextmanager
def compilations(counter: CompileCounter, expected: int) -> Iterator[None]:
    before = counter.frame_count
    yield
    assert counter.frame_count - before == expected


def out(model: Any, batch: Tensor) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(batch)
    return result


def compiled_host(*, is_in_place: bool = False, name: str = "functional mlp") -> tuple[nn.Module, nn.Module, CompileCounter]:
    """A compiled model, the same one eager, and how often it was compiled."""
    model, counter = FAMILIES[name].model(), CompileCounter()
    if is_in_place:
        model.compile(backend=counter)
        return model, model, counter
    return torch.compile(model, backend=counter), model, counter  # type: ignore[return-value]


def eager_output(slotted: Slotted, batch: Tensor) -> Tensor:
    with torch.compiler.set_stance("force_eager"):
        return out(slotted, batch)


@pytest.mark.parametrize("name", ["resnet", "unet", "vit", "gpt", "functional mlp", "conv1d"])
def test_idle_slots_cause_no_graph_breaks(name: str) -> None:
    family = FAMILIES[name]
    model, batch = family.model(), family.batch()
    slotted = add_slots(model, batch)
    explained = torch._dynamo.explain(model)(batch)
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)
    germinate(slotted, family.slots[0], "norm")
    torch.compiler.reset()
    explained = torch._dynamo.explain(model)(batch)
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)


@pytest.mark.parametrize("is_in_place", [False, True], ids=["torch.compile", "module.compile"])
@pytest.mark.parametrize("is_called_before", [False, True], ids=["fresh", "called before"])
def test_a_seed_that_germinates_after_compilation_equals_eager_and_compiles_once(is_in_place: bool, is_called_before: bool) -> None:
    model, host, counter = compiled_host(is_in_place=is_in_place)
    batch = FAMILY.batch()
    if is_called_before:
        out(model, batch)
    before = out(FAMILY.model(), batch)
    slotted = add_slots(model, batch)
    assert slotted.host is host
    with compilations(counter, 1):
        assert torch.equal(out(slotted, batch), before)
    with compilations(counter, 0):  # while it is idle
        for seed in range(5):
            out(slotted, FAMILY.batch(seed))
    for name in slotted.slots:
        with compilations(counter, 1):
            seed_ = germinate(slotted, name, "mlp")
            torch.testing.assert_close(out(slotted, batch), before)
        with compilations(counter, 0):
            perturb(seed_)
            grown = out(slotted, batch)
            assert not torch.allclose(grown, before)
            torch.testing.assert_close(grown, eager_output(slotted, batch))
        slotted.slot(name).plant(None)
        with compilations(counter, 0):  # what it was before is still known
            torch.testing.assert_close(out(slotted, batch), before)


def test_changes_of_alpha_and_weights_cause_no_recompilation() -> None:
    model, _, counter = compiled_host()
    batch = FAMILY.batch()
    slotted = add_slots(model, batch)
    perturb(germinate(slotted, "first", "mlp"))
    slot, seen = slotted.slot("first"), []
    out(slotted, batch)
    with compilations(counter, 0):
        for alpha in (0.0, 0.1, 0.5, 1.0):
            slot.alpha = alpha
            seen.append(out(slotted, batch))
            torch.testing.assert_close(seen[-1], eager_output(slotted, batch))
        with slotted.without(["first"]):
            assert torch.equal(out(slotted, batch), seen[0])
    assert len({float(output.sum()) for output in seen}) == len(seen)


@pytest.mark.parametrize("is_training", [False, True])
def test_a_compiled_model_is_widened_and_joined_as_an_eager_one(is_training: bool) -> None:
    model, _, _ = compiled_host(name="resnet")
    model.train(is_training)  # not `slotted.train`, which would tell the seed
    batch = FAMILIES["resnet"].batch()
    slotted = add_slots(model, batch)
    before = out(slotted, batch)
    name = next(name for name in slotted.slots if slotted.place(name).chain)
    seed = germinate(slotted, name, "widen_50")
    seed.train(not is_training)
    torch.testing.assert_close(out(slotted, batch), before)
    perturb(seed)
    grown = out(slotted, batch)
    assert not torch.allclose(grown, before)
    assert seed.training is not is_training
    torch.testing.assert_close(grown, eager_output(copy.deepcopy(slotted), batch))
    slotted.slot(name).is_kept = True
    slotted.join_kept()
    torch.testing.assert_close(out(slotted, batch), grown, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(eager_output(slotted, batch), grown, rtol=1e-4, atol=1e-5)


def test_two_seeds_of_one_blueprint_compile_once_each_at_most() -> None:
    model, _, counter = compiled_host()
    batch = FAMILY.batch()
    slotted = add_slots(model, batch)
    out(slotted, batch)
    with compilations(counter, 1):
        perturb(germinate(slotted, "first", "low_rank"))
        first = out(slotted, batch)
    with compilations(counter, 1):
        perturb(germinate(slotted, "second", "low_rank"))
        both = out(slotted, batch)
    torch.testing.assert_close(both, eager_output(slotted, batch))
    assert not torch.allclose(first, both)


def test_a_compiled_model_runs_the_latest_seed_of_a_slot() -> None:
    model, _, _ = compiled_host()
    batch = FAMILY.batch()
    slotted = add_slots(model, batch)
    before = out(slotted, batch)
    perturb(germinate(slotted, "first", "mlp"))
    out(slotted, batch)
    slotted.slot("first").plant(None)
    assert torch.equal(out(slotted, batch), before)
    successor = germinate(slotted, "first", "mlp")
    torch.testing.assert_close(out(slotted, batch), before)
    perturb(successor)
    perturb(successor)
    torch.testing.assert_close(out(slotted, batch), eager_output(slotted, batch))


@pytest.mark.parametrize("is_in_place", [False, True], ids=["torch.compile", "module.compile"])
def test_removing_and_baking_take_effect_in_a_compiled_model(is_in_place: bool) -> None:
    model, host, _ = compiled_host(is_in_place=is_in_place)
    batch = FAMILY.batch()
    before = out(model, batch)
    slotted = add_slots(model, batch)
    perturb(germinate(slotted, "first", "mlp"))
    assert not torch.allclose(out(model, batch), before)
    assert slotted.remove() is model
    assert torch.equal(out(model, batch), before)

    slotted = add_slots(model, batch)
    plant_kept_seeds(slotted, "second")
    expected = out(slotted, batch)
    assert slotted.bake() is host
    torch.testing.assert_close(out(model, batch), expected)
    torch.testing.assert_close(out(host, batch), expected)
    torch.testing.assert_close(out(copy.deepcopy(host), batch), expected)


def test_a_model_compiled_with_slots_runs_without_them_after_removal() -> None:
    host, batch = FAMILY.model(), FAMILY.batch()
    slotted = add_slots(host, batch)
    before = out(host, batch)
    perturb(germinate(slotted, "first", "mlp"))
    model: Any = torch.compile(host, backend="eager")
    torch.testing.assert_close(out(model, batch), out(host, batch))
    slotted.remove()
    assert not hooks_of(host)
    torch.testing.assert_close(out(model, batch), before)


def test_a_part_that_is_compiled_on_its_own_takes_slots() -> None:
    family = FAMILIES["resnet"]
    model, batch, counter = family.model(), family.batch(), CompileCounter()
    model.get_submodule("layer1").compile(backend=counter)
    before = out(model, batch)
    slotted = add_slots(model, batch)
    perturb(germinate(slotted, "layer1.0", "conv1x1"))
    grown = out(slotted, batch)
    assert not torch.allclose(grown, before)
    torch.testing.assert_close(grown, eager_output(slotted, batch))
    assert counter.frame_count > 0


def test_a_baked_model_compiles_as_a_whole() -> None:
    batch = FAMILY.batch()
    slotted = add_slots(FAMILY.model(), batch)
    plant_kept_seeds(slotted, "first", "second")
    baked = slotted.bake()
    expected = out(baked, batch)
    explained = torch._dynamo.explain(baked)(batch)
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)
    torch.testing.assert_close(out(torch.compile(baked, backend="aot_eager"), batch), expected)


def test_a_saved_model_loads_into_a_compiled_model_that_has_run() -> None:
    batch = FAMILY.batch()
    slotted = add_slots(FAMILY.model(), batch)
    plant_kept_seeds(slotted, "first")
    baked = slotted.bake()
    expected = out(baked, batch)
    state: Any = torch.compile(baked, backend="eager").state_dict()
    assert all(name.startswith("_orig_mod.") for name in state)
    fresh, _, _ = compiled_host()
    out(fresh, batch)
    assert load(state, model=fresh) is fresh
    torch.testing.assert_close(out(fresh, batch), expected)


def test_gradients_of_a_compiled_seed_equal_eager_ones() -> None:
    batch, gradients = FAMILY.batch(), []
    for is_compiled in (False, True):
        host = FAMILY.model()
        model: Any = torch.compile(host, backend="aot_eager") if is_compiled else host
        slotted = add_slots(model, batch)
        slotted(batch).square().mean().backward()  # compiled before anything grew
        seed = germinate(slotted, "first", "mlp")
        perturb(seed)
        slotted(batch).square().mean().backward()
        gradients.append([parameter.grad for parameter in (*seed.parameters(), *host.parameters())])
    torch.testing.assert_close(*gradients)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what the compiler itself imports
@pytest.mark.usefixtures("scalar_inductor")
def test_the_default_compiler_equals_eager_before_and_after_germination() -> None:
    family = FAMILIES["resnet"]
    batch = family.batch()
    model: Any = torch.compile(family.model())
    slotted = add_slots(model, batch)
    torch.testing.assert_close(out(slotted, batch), out(family.model(), batch))
    perturb(germinate(slotted, "layer1.0", "conv3x3"))
    torch.testing.assert_close(out(slotted, batch), eager_output(slotted, batch))


def watched(model: nn.Module, batch: Tensor) -> tuple[Slotted, Grower]:
    """The probe looks from the first step on."""
    slotted = add_slots(model, batch)
    grower = Grower(slotted, sgd(slotted.host), controller=Script(probes=[0]), config=config(probe_steps=2))
    grower.begin()
    return slotted, grower


def train_step(call: Any, grower: Grower, batch: Tensor) -> None:
    loss = call(batch).square().mean()
    loss.backward()
    grower.optimizers[0].step()
    grower.optimizers[0].zero_grad()
    grower.after_step(loss)


@pytest.mark.parametrize("is_in_place", [False, True], ids=["torch.compile", "module.compile"])
@pytest.mark.parametrize("is_called_by_slotted", [False, True], ids=["model(x)", "slotted(x)"])
def test_probed_steps_compile_nothing_and_later_steps_run_compiled(is_in_place: bool, is_called_by_slotted: bool) -> None:
    model, _, counter = compiled_host(is_in_place=is_in_place)
    batch = FAMILY.batch()
    slotted, grower = watched(model, batch)
    call = slotted if is_called_by_slotted else model
    with compilations(counter, 0):
        for _ in range(2):
            train_step(call, grower, batch)
    assert grower._steps.prober.end_epoch(steps=2, reported=2)
    with compilations(counter, 1):
        for _ in range(2):
            train_step(call, grower, batch)


@pytest.mark.parametrize("is_in_place", [False, True], ids=["torch.compile", "module.compile"])
@pytest.mark.parametrize("end", ["remove", "bake"])
def test_a_loop_abandoned_during_a_probe_leaves_compilation_enabled(is_in_place: bool, end: str) -> None:
    model, _, counter = compiled_host(is_in_place=is_in_place)
    other, _, other_counter = compiled_host()
    batch = FAMILY.batch()
    slotted, grower = watched(model, batch)
    train_step(slotted, grower, batch)
    with compilations(other_counter, 1):  # another model does not notice
        out(other, batch)
    getattr(slotted, end)()
    with compilations(counter, 1):
        out(model, batch)


def test_a_compiler_stance_set_by_the_user_survives_a_probe() -> None:
    model, _, counter = compiled_host()
    batch = FAMILY.batch()
    with torch.compiler.set_stance("force_eager"), compilations(counter, 0):
        slotted, grower = watched(model, batch)
        for _ in range(4):
            train_step(slotted, grower, batch)
    with compilations(counter, 1):
        train_step(slotted, grower, batch)


def test_a_copy_made_during_a_probe_runs_compiled() -> None:
    host, batch = FAMILY.model(), FAMILY.batch()
    slotted, grower = watched(torch.compile(host, backend="eager"), batch)
    twin = copy.deepcopy(slotted)
    assert torch.equal(out(twin, batch), out(slotted, batch))
    twin.model(batch)
    assert twin.calls.samples == len(batch)
    twin.remove()
    train_step(slotted, grower, batch)
    assert torch.equal(out(twin.model, batch), out(FAMILY.model(), batch))


def test_seeds_follow_a_compiled_step_of_the_optimiser_and_compile_nothing_in_it() -> None:
    host, batch, counter = FAMILY.model(), FAMILY.batch(), CompileCounter()
    optimizer = sgd(host)
    slotted = add_slots(host, batch)
    name = next(iter(slotted.slots))
    grower = Grower(slotted, optimizer, controller=Script({0: [Germinate(slot=name, reason="test", blueprint="mlp")]}), config=config())
    grower.begin()
    step = torch.compile(optimizer.step, backend=counter)
    counts = []
    for _ in range(4):
        loss = slotted(batch).square().mean()
        loss.backward()
        step()
        optimizer.zero_grad()
        grower.after_step(loss)
        counts.append(counter.frame_count)
    assert grower.lifecycles.slots[name].learner.report().steps == 4
    assert counts[1] == counts[-1]  # momentum appears in the first step


@pytest.mark.parametrize("when", ["before", "after", "in place before", "in place after"])
def test_calls_are_counted_wherever_the_compiler_allows_it(when: str) -> None:
    """A model that is compiled after it got its slots is counted by calls of the slotted model alone; so is one compiled in place."""
    host, batch = FAMILY.model(), FAMILY.batch()
    model = torch.compile(host, backend="eager") if when == "before" else host
    if when == "in place before":
        host.compile(backend="eager")
    slotted = add_slots(model, batch)
    if when == "in place after":
        host.compile(backend="eager")
    called = torch.compile(host, backend="eager") if when == "after" else model
    for _ in range(2):
        called(batch)
    assert slotted.calls.samples == (2 * len(batch) if when == "before" else 0)
    slotted.calls.samples = 0
    slotted(batch)
    assert slotted.calls.samples == len(batch)


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")  # torch's, of the counter of FLOPs
def test_a_part_compiled_on_its_own_runs_eagerly_during_a_probe() -> None:
    family = FAMILIES["resnet"]
    model, batch, counter = family.model(), family.batch(), CompileCounter()
    model.layer1 = torch.compile(model.layer1, backend=counter)
    before = hooks_of(model)
    slotted, grower = watched(model, batch)
    with compilations(counter, 0):
        train_step(slotted, grower, batch)
    slotted.remove()
    assert hooks_of(model) == before
    out(model, batch)
    assert counter.frame_count > 0
