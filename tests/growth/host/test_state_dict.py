"""State dicts of growing models: they hold the seeds, another structure is refused, and incomplete copies warn."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import relu
from torch.optim.swa_utils import AveragedModel as TorchAverage, get_ema_multi_avg_fn

import esper
from esper.growth import Grower, GrowthError, Slotted, add_slots
from esper.growth.config import LifecycleConfig
from esper.growth.controllers.baselines import Planned
from tests.growth.builders import Host, config, make_data, make_host, make_loop, sgd
from tests.growth.host.helpers import germinate, is_same, perturb, plant_kept_seeds, run


class Branches(nn.Module):
    """The sum over its children, as in Inception or a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([child(x) for child in self.children()]).sum(0)


class Counted(nn.Module):
    """Divides by the number of its children."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x) / len(list(self.children()))
        return result


class ConditionalLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.condition = nn.Linear(6, 6), nn.Linear(2, 6)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return relu(self.layer(x) + self.condition(condition))


class ConditionalSequential(nn.Sequential):
    """Hands a second argument to every layer, as diffusion models do."""

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:  # type: ignore[override]
        for layer in self:
            x = layer(x, condition)
        return x


class LastLayerFirst(nn.Module):
    """Uses the layers of a block by their position."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.block(self.block[-1](self.block[:-1](x))) * len(self.block)
        return result


class Net(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.head = block, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        args = (x, x[:, :2]) if isinstance(self.block, ConditionalSequential) else (x,)
        result: Tensor = self.head(torch.tanh(self.block(*args)))
        return result


CONTAINERS: dict[str, Callable[[], nn.Module]] = {
    "sum over children": Branches,
    "counted children": Counted,
    "conditional sequential": lambda: ConditionalSequential(ConditionalLayer(), ConditionalLayer()),
    "sequential": lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh()),
}
every_container = pytest.mark.parametrize("make_block", CONTAINERS.values(), ids=CONTAINERS)


def inputs(size: int = 5) -> Tensor:
    return torch.randn(size, 6, generator=torch.Generator().manual_seed(3))


def growing_host() -> Slotted:
    """A host with a living seed that has learned something, and one in the shadow."""
    slotted = add_slots(make_host().eval(), inputs(2), slots=["first", "second"])
    perturb(germinate(slotted, "first", "low_rank"))
    slotted.slot("first").alpha = 0.5
    return slotted


# A model in the middle of its training


def test_a_model_saved_in_the_middle_of_its_training_keeps_its_growth(tmp_path: Path) -> None:
    slotted = growing_host()
    expected = run(slotted.model, inputs())
    file = io.BytesIO()
    torch.save(slotted.model.state_dict(), file)
    file.seek(0)
    assert is_same(run(esper.load(torch.load(file, weights_only=True), model=make_host(1).eval()), inputs()), expected)
    for what in (slotted, slotted.model):
        esper.save(what, tmp_path / "model.safetensors")
        assert is_same(run(esper.load(tmp_path / "model.safetensors", model=make_host(1).eval()), inputs()), expected)


def test_the_names_of_the_host_and_its_parameters_are_not_changed_by_a_seed() -> None:
    host = make_host()
    names, parameters = list(host.state_dict()), list(host.parameters())
    slotted = add_slots(host, inputs(2), slots=["first", "second"])
    germinate(slotted, "first", "low_rank")
    assert [name for name in host.state_dict() if name in names] == names
    assert all(one is other for one, other in zip(host.parameters(), parameters, strict=True))
    seeds = [name for name in host.state_dict() if name not in names]
    assert seeds
    assert all(name.startswith("first.esper_seed.") for name in seeds)
    slotted.slot("first").is_kept = True
    assert list(slotted.bake().state_dict()) == [*names[:2], *seeds, *names[2:]]  # baked, it has the same names


def test_a_fresh_model_refuses_a_state_dict_with_seeds_and_says_how_to_load_it() -> None:
    with pytest.raises(RuntimeError, match=r"Unexpected key.*first\.esper_seed\.use_esper_load"):
        make_host().load_state_dict(growing_host().model.state_dict())


def test_a_state_dict_of_another_structure_is_refused_before_anything_is_changed() -> None:
    slotted = growing_host()
    before = copy.deepcopy(slotted.model.state_dict())
    with pytest.raises(GrowthError, match=r"model has the seed 'first\.esper_seed', and the state dict does not.*grower\.load"):
        slotted.model.load_state_dict(make_host(1).state_dict())
    empty = add_slots(make_host(2), inputs(2), slots=["first", "second"])
    weights = copy.deepcopy(empty.model.state_dict())
    with pytest.raises(GrowthError, match=r"state dict has the seed 'first\.esper_seed', and the model has nothing there.*esper\.load"):
        empty.model.load_state_dict(slotted.model.state_dict())
    germinate(empty, "first", "mlp")
    with pytest.raises(GrowthError, match=r"is a low_rank in the state dict and a mlp in the model"):
        empty.model.load_state_dict(slotted.model.state_dict(), strict=False)
    empty.slot("first").plant(None)
    for state, kept in ((slotted.model.state_dict(), before), (empty.model.state_dict(), weights)):
        assert list(state) == list(kept)
        assert is_same(list(state.values()), list(kept.values()))


def test_a_part_with_another_structure_is_refused() -> None:
    slotted = growing_host()
    with pytest.raises(RuntimeError, match="the model has a seed after 'first', and the state dict has none"):
        slotted.host.get_submodule("first").load_state_dict(make_host(1).first.state_dict())


def test_the_state_dict_of_the_same_structure_loads_with_its_alpha() -> None:
    slotted = growing_host()
    saved, expected = copy.deepcopy(slotted.model.state_dict()), run(slotted, inputs())
    perturb(slotted.slot("first").seed)  # type: ignore[arg-type]
    slotted.slot("first").alpha = 1.0
    assert not is_same(run(slotted, inputs()), expected)
    slotted.model.load_state_dict(saved)
    assert is_same(run(slotted, inputs()), expected)
    assert slotted.slot("first").alpha == 0.5


def test_a_slotted_model_is_saved_and_loaded_in_three_lines() -> None:
    saved = growing_host()
    plant_kept_seeds(saved, "second")
    slotted = add_slots(make_host(1).eval(), inputs(2), slots=["first", "second"])
    slotted.load_state_dict(saved.state_dict())
    assert is_same(run(slotted, inputs()), run(saved, inputs()))
    other = add_slots(make_host(1), inputs(2), slots=["first"])
    with pytest.raises(GrowthError, match="has no slot there"):
        other.load_state_dict(saved.state_dict())


def test_baking_a_loaded_model_keeps_the_seeds_that_were_loaded() -> None:
    saved = growing_host()
    plant_kept_seeds(saved, "second")
    slotted = add_slots(make_host(1).eval(), inputs(2), slots=["first", "second"])
    slotted.load_state_dict(saved.state_dict())
    before = run(slotted, inputs())
    assert is_same([slotted.bake()(inputs())], before)


def test_a_slotted_model_with_a_grower_is_loaded_through_it() -> None:
    loop = make_loop()
    with pytest.raises(GrowthError, match=r"grower\.save\(folder\) and grower\.load\(folder\)"):
        loop.slotted.load_state_dict(loop.slotted.state_dict())


@pytest.mark.slow
def test_a_grower_is_saved_and_resumed_in_three_lines(tmp_path: Path) -> None:
    """The resumed training goes on as the one that was not interrupted, to the last bit."""
    plan = [(0, "first", "low_rank"), (1, "second", "mlp")]
    settings = config(LifecycleConfig(holding_epochs=3))
    loop = make_loop(Planned(plan), settings, epochs=6)
    loop.epoch(epochs=2)
    loop.grower.save(tmp_path / "last")
    random = torch.get_rng_state()
    loop.epoch(epochs=2)

    again = make_loop(Planned(plan), settings, host=make_host(5), epochs=6)
    again.grower.load(tmp_path / "last")
    torch.set_rng_state(random)
    again.epoch(epochs=2)
    assert again.losses == loop.losses[-len(again.losses) :]
    assert again.grower.epoch == 4
    assert is_same(list(again.host.state_dict().values()), list(loop.host.state_dict().values()))
    with pytest.raises(ValueError, match="there is no checkpoint in"):
        again.grower.load(tmp_path / "nothing")


# Copies


@pytest.mark.slow
@pytest.mark.parametrize("what", ["slot first", "slots and model", "model first", "slotted"])
def test_pickled_slots_work_whatever_is_pickled_first(what: str) -> None:
    slotted = growing_host()
    expected = run(slotted, inputs())
    slot = slotted.slot("first")
    thing: Any = {"slot first": [slot, slotted.model], "slots and model": [slotted.slots, slotted.model]}.get(what, [slotted.model, slot])
    if what == "slotted":
        assert is_same(run(pickle.loads(pickle.dumps(slotted)), inputs()), expected)
        return
    for clone in (pickle.loads(pickle.dumps(thing)), copy.deepcopy(thing)):
        model = next(part for part in clone if isinstance(part, nn.Module))
        assert is_same(run(model, inputs()), expected)


def test_an_average_of_weights_without_the_seeds_warns() -> None:
    slotted = add_slots(make_host().eval(), inputs(2), slots=["first", "second"])
    average = TorchAverage(slotted.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    average.update_parameters(slotted.model)
    run(average, inputs())  # nothing has grown yet
    perturb(germinate(slotted, "first", "low_rank"))
    average.update_parameters(slotted.model)
    with pytest.warns(RuntimeWarning, match=r"lacks the seed that grew after 'first'.*slotted\.averaged"):
        run(average, inputs())
    run(average, inputs())  # once is enough


@pytest.mark.slow
def test_a_copy_that_is_no_average_does_not_warn() -> None:
    slotted = add_slots(make_host().eval(), inputs(2), slots=["first", "second"])
    best = copy.deepcopy(slotted.model)
    expected = run(best, inputs())
    perturb(germinate(slotted, "first", "low_rank"))
    assert is_same(run(best, inputs()), expected)
    del slotted
    gc.collect()
    with torch.no_grad():
        best.get_submodule("first").weight += 1.0  # type: ignore[operator]
    run(best, inputs())


def test_an_average_that_grows_with_the_model_is_the_average_of_host_and_seeds() -> None:
    slotted = add_slots(make_host().eval(), inputs(2), slots=["first", "second"])
    same, average = slotted.averaged(decay=0.0), slotted.averaged(decay=0.75)
    seed = germinate(slotted, "first", "low_rank")
    perturb(seed)
    same.update()
    average.update()
    assert is_same(run(same, inputs()), run(slotted, inputs()))
    start = [parameter.detach().clone() for parameter in seed.parameters()]
    with torch.no_grad():
        for parameter in (*slotted.host.parameters(), *seed.parameters()):
            parameter += 1.0
    same.update()
    average.update()
    assert is_same(run(same, inputs()), run(slotted, inputs()))
    twin = average.slotted.slot("first").seed
    assert twin is not None
    for mine, before in zip(twin.parameters(), start, strict=True):
        torch.testing.assert_close(mine, before + 0.25)
    slotted.slot("first").plant(None)
    same.update()
    assert is_same(run(same, inputs()), run(slotted, inputs()))
    plant_kept_seeds(slotted, "second")
    same.update()
    baked = same.bake()
    assert is_same(run(baked, inputs()), run(slotted, inputs()))


def test_averaging_the_buffers_of_a_baked_model_leaves_its_structure_readable() -> None:
    slotted = add_slots(make_host().eval(), inputs(2), slots=["first"])
    plant_kept_seeds(slotted, "first")
    baked = slotted.bake()
    average = TorchAverage(baked, multi_avg_fn=get_ema_multi_avg_fn(0.999), use_buffers=True)
    for _ in range(3):
        average.update_parameters(baked)
    assert is_same(run(esper.load(average.module.state_dict(), model=make_host(1).eval()), inputs()), run(average, inputs()))


# Baking


@every_container
def test_baking_changes_neither_the_function_nor_the_children_of_a_container(make_block: Callable[[], nn.Module]) -> None:
    model = Net(make_block())
    children = list(model.block.children())
    slotted = add_slots(model, inputs(2), slots=["block"])
    plant_kept_seeds(slotted, "block")
    expected, state = run(slotted, inputs()), copy.deepcopy(slotted.state_dict())
    baked = slotted.bake()
    assert is_same(run(baked, inputs()), expected)
    assert list(model.block.children()) == children
    assert set(baked.state_dict()) == set(state)
    fresh = Net(make_block())
    assert is_same(run(esper.load(state, model=fresh), inputs()), expected)
    assert len(list(fresh.block.children())) == len(children)
    assert all(any(parameter is own for own in baked.parameters()) for parameter in slotted.slot("block").seed.parameters())  # type: ignore[union-attr]


def test_positions_in_a_sequential_are_the_same_after_baking() -> None:
    model = Net(LastLayerFirst())
    slotted = add_slots(model, inputs(2), slots=["block.block"])
    plant_kept_seeds(slotted, "block.block")
    inner = add_slots(slotted.bake(), inputs(2), slots=["head"])  # and grown again
    plant_kept_seeds(inner, "head")
    expected = run(inner, inputs())
    block = model.block.block
    assert isinstance(block, nn.Sequential)
    assert is_same(run(inner.bake(), inputs()), expected)
    assert len(block) == 3
    assert isinstance(block[-1], nn.Linear)
    assert [type(layer) for layer in block[:-1]] == [nn.Linear, nn.Tanh]


def test_a_seed_whose_layer_is_replaced_says_so() -> None:
    model = Net(nn.Sequential(nn.Linear(6, 6), nn.Tanh()))
    slotted = add_slots(model, inputs(2), slots=["block"])
    plant_kept_seeds(slotted, "block")
    slotted.bake()
    model.block[0] = nn.Linear(6, 6)  # type: ignore[operator]
    with pytest.raises(GrowthError, match=r"held the seed '0\.esper_seed' of this Sequential was replaced"):
        model(inputs())


class CountsLater(nn.Module):
    """Counts the modules of its block only while `is_counting` is set."""

    is_counting = False

    def __init__(self) -> None:
        super().__init__()
        self.block = Branches()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.block.left(x)
        return result * len(list(self.modules())) if self.is_counting else result


def test_a_model_that_baking_would_change_is_left_as_it_was() -> None:
    model = Net(CountsLater()).eval()
    slotted = add_slots(model, inputs(2), slots=["block.block.left"])
    plant_kept_seeds(slotted, "block.block.left")
    model.block.is_counting = True
    expected, names = run(slotted, inputs()), list(model.state_dict())
    with pytest.raises(GrowthError, match=r"baking would change the model's outputs.*block\.block\.left"):
        slotted.bake()
    assert is_same(run(slotted, inputs()), expected)
    assert list(model.state_dict()) == names
    model.block.is_counting = False
    expected = run(slotted, inputs())
    assert is_same(run(slotted.bake(), inputs()), expected)


def test_a_grown_run_can_be_trained_on_from_a_state_dict_in_its_middle() -> None:
    """With only `model.state_dict()` saved, the seeds are ordinary parameters of the loaded model."""
    slotted = growing_host()
    model = esper.load(slotted.state_dict(), model=make_host(1))
    optimizer = sgd(model)
    (x, y), *_ = make_data()
    before = [parameter.detach().clone() for parameter in model.get_submodule("first.esper_seed").parameters()]
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert not any(torch.equal(one, other) for one, other in zip(before, model.get_submodule("first.esper_seed").parameters(), strict=True))
    assert isinstance(model, Host)
    Grower(add_slots(model, inputs(2), slots=["first"]), optimizer).bake()
