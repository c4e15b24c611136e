"""A model that was grown, baked and perhaps saved and loaded grows again, any number of times."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import esper
from esper.growth import GrowthConfig, Planned, add_slots
from esper.growth.host.slotted import Slotted
from esper.growth.host.state_dict import agree
from esper.growth.seeds.blueprints import get_blueprint
from esper.growth.seeds.seed import Seed
from tests.growth.builders import QUICK, SLOTS, make_data, make_host
from tests.growth.host.helpers import germinate, perturb, possible_growths, run
from tests.growth.hosts import FAMILIES

X = torch.randn(5, 6, generator=torch.Generator().manual_seed(3))


def grow_at_random(slotted: Slotted, draw: random.Random) -> list[tuple[str, str]]:
    """Plant one to three seeds with moved weights in random slots, and keep them."""
    growths = [growth for growth in possible_growths(slotted) if (get_blueprint(growth[1]).share or 0) <= 1]
    draw.shuffle(growths)
    chosen = list(dict(growths).items())[: draw.randint(1, 3)]
    for name, blueprint in chosen:
        perturb(germinate(slotted, name, blueprint))
        slotted.slot(name).is_kept = True
    return chosen


def check_saved(model: nn.Module, fresh: nn.Module, batch: Tensor, expected: list[Tensor], path: Path) -> nn.Module:
    esper.save(model, path)
    loaded = esper.load(path, model=fresh).eval()
    assert agree(run(loaded, batch), expected)
    return loaded


@pytest.mark.slow
@pytest.mark.parametrize("draws", range(6))
def test_a_model_grows_three_times_and_is_saved_and_loaded_each_time(draws: int, tmp_path: Path) -> None:
    draw, path, make = random.Random(draws), tmp_path / "model.safetensors", lambda: make_host(dropout=0.0).eval()
    model: nn.Module = make()
    for _ in range(3):
        slotted = add_slots(model, X, slots=[*SLOTS, "after.1"])
        before = run(slotted, X)
        chosen = grow_at_random(slotted, draw)
        expected = run(slotted, X)
        assert not agree(before, expected), chosen
        # The state of a living model, a copy of it, and the baked model all give the same.
        check_saved(slotted.model, make(), X, expected, path)
        assert agree(run(copy.deepcopy(slotted).bake(), X), expected), chosen
        model = slotted.bake()
        assert agree(run(model, X), expected), chosen
        loaded = check_saved(model, make(), X, expected, path)
        model = draw.choice([model, loaded, copy.deepcopy(model)])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet", "gpt", "encoder", "vit"])
def test_models_of_other_kinds_grow_three_times(name: str, tmp_path: Path) -> None:
    family, draw = FAMILIES[name], random.Random(name)
    model, batch = family.model().eval(), family.batch()
    for _ in range(3):
        slotted = add_slots(model, batch[:2])
        grow_at_random(slotted, draw)
        expected = run(slotted, batch)
        model = slotted.bake()
        assert agree(run(model, batch), expected)
        model = check_saved(model, family.model(), batch, expected, tmp_path / "model.safetensors")


def test_a_width_seed_that_is_narrower_than_its_place_is_loaded() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 9000), nn.ReLU(), nn.Linear(9000, 2))

    model = make()
    slotted = add_slots(model, X[:, :2], slots=["0"])
    perturb(germinate(slotted, "0", "widen_25"))
    assert agree(run(esper.load(model.state_dict(), model=make()), X[:, :2]), run(slotted, X[:, :2]))


def test_a_seed_in_a_slot_comes_behind_those_that_were_baked_there_and_before_the_hooks_of_the_user() -> None:
    """Both before it is baked and afterwards, and `remove` puts everything back."""
    host = make_host(dropout=0.0).eval()
    order: list[str] = []
    host.second.register_forward_hook(lambda *_: order.append("user"))
    for number in range(3):
        slotted = add_slots(host, X, slots=["second"])
        seed = germinate(slotted, "second", "low_rank")
        perturb(seed)
        for name, one in [(name, one) for name, one in host.named_modules() if isinstance(one, Seed)] + [("new", seed)]:
            monkeypatched = vars(one).setdefault("grown", one.grown)
            vars(one)["grown"] = lambda h, name=name, inner=monkeypatched: (order.append(name), inner(h))[1]
        slotted.slot("second").is_kept = True
        order.clear()
        expected = run(slotted, X)
        seeds = ["second.0.esper_seed", "second.0.esper_seed_2"][:number]
        assert order == [*seeds, "new", "user"]
        for one in [*host.modules(), seed]:
            vars(one).pop("grown", None)
        slotted.bake()
        order.clear()
        assert agree(run(host, X), expected)
        assert order == ["user"]
    hooks = list(host.second._forward_hooks)
    add_slots(host, X, slots=["second"]).remove()
    assert list(host.second._forward_hooks) == hooks


@pytest.mark.slow
def test_grow_takes_a_model_that_it_has_grown() -> None:
    data = make_data()
    model: nn.Module = make_host(dropout=0.0)
    for blueprint in ("mlp", "widen_100", "mlp"):
        grown = esper.grow(
            model,
            data,
            data,
            cross_entropy,
            epochs=3,
            controller=Planned([(0, "second", blueprint)]),
            config=GrowthConfig(lifecycle=QUICK, slots=SLOTS),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
            progress=False,
        )
        assert grown.ledger.count("kept") == 1
        model = grown.model
    assert model.get_submodule("second.0.esper_seed_2") is not None


def test_a_submodule_of_a_model_with_slots_is_copied() -> None:
    host = make_host(dropout=0.0).eval()
    slotted = add_slots(host, X, slots=["second"])
    perturb(germinate(slotted, "second", "low_rank"))
    h = torch.randn(3, 8)
    assert torch.equal(copy.deepcopy(host.second)(h), host.second(h))


def test_a_widened_encoder_layer_is_baked_without_folding() -> None:
    """torch would compute the layer by a fused kernel, and leave the new units out."""
    host = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), nn.Linear(16, 2)).eval()
    x = torch.randn(3, 4, 16)
    slotted = add_slots(host, x, slots=["0"])
    perturb(germinate(slotted, "0", "widen_100"))
    slotted.slot("0").is_kept = True
    expected = run(slotted, x)
    assert agree(run(slotted.bake(fold=False), x), expected)


@pytest.mark.parametrize("blueprint", ["mlp", "widen_50"])
@pytest.mark.parametrize("way", ["same", "loaded", "copied"])
def test_a_model_with_a_width_seed_that_was_not_folded_grows_again(way: str, blueprint: str, tmp_path: Path) -> None:
    path, make = tmp_path / "model.safetensors", lambda: make_host(dropout=0.0).eval()
    model: nn.Module = make()
    for again in ("widen_100", blueprint):
        slotted = add_slots(model, X, slots=["second"])
        before = run(slotted, X)
        seed = germinate(slotted, "second", again)
        assert agree(run(slotted, X), before)
        perturb(seed)
        slotted.slot("second").is_kept = True
        expected = run(slotted, X)
        assert not agree(before, expected)
        model = slotted.bake(fold=False)
        assert agree(run(model, X), expected)
        loaded = check_saved(model, make(), X, expected, path)
        model = {"same": model, "loaded": loaded, "copied": copy.deepcopy(model)}[way]
    assert agree(run(model, X), expected)
