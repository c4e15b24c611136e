"""Averages of the weights that were made before the model got slots grow and are baked with it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from esper.growth import Grower, GrowthError, add_slots
from esper.growth.lifecycle.stages import Germinate
from tests.growth.builders import Script, config, make_data, make_host, sgd

DATA = make_data()
X = DATA[0][0]
GROWN = Script({0: [Germinate(slot="first", reason="now", blueprint="widen_100"), Germinate(slot="second", reason="now", blueprint="mlp")]})


class TimmLike(nn.Module):
    """An average that is computed over state dicts, as that of timm."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__()
        self.module, self.decay = copy.deepcopy(model), decay

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.module(x)
        return result

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for mine, theirs in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            mine.copy_(self.decay * mine + (1 - self.decay) * theirs)


def average_of(kind: str, host: nn.Module) -> nn.Module:
    if kind == "timm":
        return TimmLike(host, 0.5)
    return AveragedModel(host, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=kind == "buffers")


def update(average: Any, model: nn.Module) -> None:
    (average.update_parameters if isinstance(average, AveragedModel) else average.update)(model)


def outputs(model: Any) -> Tensor:
    model.eval()
    with torch.no_grad():
        result: Tensor = model(X)
    return result


def step(host: nn.Module, optimizer: torch.optim.Optimizer, grower: Grower | None) -> None:
    for x, y in DATA:
        loss = cross_entropy(host.train()(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        if grower is not None:
            grower.after_step(loss)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torch", "buffers", "timm"])
def test_an_average_made_before_the_slots_grows_and_is_baked_with_the_model(kind: str) -> None:
    host = make_host(dropout=0.0, norm=False)
    average, optimizer = average_of(kind, host), sgd(host)
    slotted = add_slots(host, X, slots=["first", "second"])
    grower = Grower(slotted, optimizer, controller=GROWN, config=config(), averages=[average])
    for _ in range(3):
        step(host, optimizer, grower)
        update(average, host)
    assert not torch.allclose(outputs(average), outputs(host), atol=1e-3), "it lags behind"
    for _ in range(40):
        update(average, host)
    assert torch.allclose(outputs(average), outputs(host), atol=1e-5)
    for slot in slotted.slots.values():
        slot.is_kept = True
    before = outputs(average)
    model = grower.bake()
    assert torch.allclose(outputs(average), before, atol=1e-5)
    assert [one.shape for one in average.parameters()] == [one.shape for one in model.parameters()]
    step(model, sgd(model), None)
    for _ in range(40):
        update(average, model)
    assert torch.allclose(outputs(average), outputs(model), atol=1e-5)


def test_the_seeds_of_an_average_are_averaged_as_the_host_is() -> None:
    host = make_host(dropout=0.0, norm=False)
    average, optimizer = AveragedModel(host, multi_avg_fn=get_ema_multi_avg_fn(0.9)), sgd(host)
    slotted = add_slots(host, X, slots=["first", "second"])
    grower = Grower(slotted, optimizer, controller=GROWN, config=config(), averages=[average])
    grower.begin()
    average.update_parameters(host)
    seed = slotted.slot("second").seed
    assert seed is not None
    expected = [one.detach().clone() for one in seed.parameters()]
    for _ in range(3):
        step(host, optimizer, grower)
        average.update_parameters(host)
        expected = [0.9 * old + 0.1 * new.detach() for old, new in zip(expected, seed.parameters(), strict=True)]
    mine = grower._averages[0].slotted.slot("second").seed
    assert mine is not None
    torch.testing.assert_close(list(mine.parameters()), [nn.Parameter(one) for one in expected])


def test_an_average_begins_anew_after_a_rollback() -> None:
    host = make_host(dropout=0.0, norm=False)
    average, optimizer = AveragedModel(host, multi_avg_fn=get_ema_multi_avg_fn(0.9)), sgd(host)
    slotted = add_slots(host, X, slots=["first", "second"])
    grower = Grower(slotted, optimizer, controller=GROWN, config=config(), averages=[average])
    step(host, optimizer, grower)
    average.update_parameters(host)
    with torch.no_grad():
        host.head.weight.fill_(float("nan"))
    average.update_parameters(host)
    grower.after_step(torch.tensor(float("nan")))
    assert grower.rollbacks == 1
    assert torch.isfinite(outputs(average)).all()
    assert torch.allclose(outputs(average), outputs(host), atol=1e-6)


def test_what_is_no_average_of_the_model_is_refused_before_anything_changes() -> None:
    host = make_host()
    slotted = add_slots(host, X, slots=["first"])
    for wrong, message in ((nn.Linear(6, 8), "neither is a copy of the model"), (host, "holds the model itself")):
        with pytest.raises(GrowthError, match=message):
            Grower(slotted, sgd(host), averages=[AveragedModel(make_host(), use_buffers=True), wrong])
    Grower(slotted, sgd(host))


@pytest.mark.parametrize("kind", ["torch", "timm"])
def test_an_average_is_saved_and_resumed_with_the_grower(kind: str, tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, Grower]:
        torch.manual_seed(0)
        host = make_host(dropout=0.0, norm=False)
        average, optimizer = average_of(kind, host), sgd(host)
        slotted = add_slots(host, X, slots=["first", "second"])
        return host, average, optimizer, Grower(slotted, optimizer, controller=GROWN, config=config(), averages=[average])

    def train(host: nn.Module, average: nn.Module, optimizer: torch.optim.Optimizer, grower: Grower) -> None:
        for _ in range(2):
            step(host, optimizer, grower)
            update(average, host)

    host, average, optimizer, grower = make()
    train(host, average, optimizer, grower)
    grower.save(tmp_path)
    train(host, average, optimizer, grower)
    resumed = make()
    resumed[-1].load(tmp_path)
    assert not torch.allclose(outputs(resumed[1]), outputs(resumed[0]), atol=1e-4), "it lags behind"
    train(*resumed)
    assert torch.equal(outputs(resumed[1]), outputs(average))
    assert {name: one.tolist() for name, one in resumed[1].state_dict().items()} == {
        name: one.tolist() for name, one in average.state_dict().items()
    }
    other = make_host(dropout=0.0, norm=False)
    without = Grower(add_slots(other, X, slots=["first", "second"]), sgd(other), controller=GROWN, config=config())
    with pytest.raises(GrowthError, match="the saved state has 1 averages, and this grower 0; pass the same"):
        without.load(tmp_path)
