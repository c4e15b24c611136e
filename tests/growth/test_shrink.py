"""Structure that does not pay its rent is removed by evidence: kept seeds, and units of any layer, also after a fold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrizations import weight_norm

import esper
from esper.growth.config import BudgetConfig, GrowthConfig, GrowthError, RentConfig
from esper.growth.events import Folded, Shrunk, Widened
from esper.growth.host.find_units import find_units
from esper.growth.host.units import layer_of
from esper.growth.lifecycle.stages import Fossilize, Germinate, Shrink, Stage
from tests.growth.builders import QUICK, Loop, Script, adamw, make_host, make_loop
from tests.growth.host.test_units import Attention, ConvNeXt, InvertedResidual, Residual

IMAGES = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
KEPT = 4


class Wrapped(nn.Module):
    """A block between a stem and a head."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Conv2d(3, 8, 3, padding=1), block, nn.Linear(8 * 64, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.block(self.stem(x)).flatten(1))
        return logits


def plain() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 12, 3), nn.GroupNorm(4, 12), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(12 * 16, 6), nn.ReLU(), nn.Linear(6, 4))


HOSTS = {
    "plain": plain,
    "residual": lambda: Wrapped(Residual(8)),
    "inverted residual": lambda: Wrapped(InvertedResidual(8)),
    "weight norm": lambda: nn.Sequential(nn.Flatten(), weight_norm(nn.Linear(192, 6)), nn.ReLU(), nn.Linear(6, 4)),
    "convnext": lambda: Wrapped(ConvNeXt(8)),
    "grouped queries": lambda: nn.Sequential(nn.Flatten(1, 2), Attention(8, heads=4, shared_by=2), nn.Flatten(), nn.Linear(192, 4)),
}


def useless(model: nn.Module, example: Tensor) -> dict[str, int]:
    """Let nothing read some units of every layer that can be widened, and return their number by layer."""
    silent = {}
    for units in find_units(model, example)[0]:
        count = max(units.width // 2 // units.step, 1) * units.step
        if count >= units.width:
            continue
        for reader in units.readers:
            with torch.no_grad():
                layer_of(model.get_submodule(reader.name)).weight[:, : count * reader.features] = 0.0
        silent[units.name] = count
    return silent


@pytest.mark.parametrize("name", HOSTS)
def test_units_that_nothing_reads_are_removed_and_the_outputs_stay(name: str) -> None:
    torch.manual_seed(0)
    model = HOSTS[name]().double().eval()
    example = IMAGES.double()
    silent = useless(model, example)
    assert silent
    before, parameters = model(example).detach(), sum(parameter.numel() for parameter in model.parameters())

    def evaluate() -> list[Tensor]:
        with torch.no_grad():
            return [(model(example[part]) - before[part]).square().sum() for part in (slice(0, 2), slice(2, 4), slice(4, 6))]

    removed = esper.shrink(model, evaluate, example_input=example, rent=RentConfig(parameters=1e-9, flops=1e-9))
    assert torch.allclose(model(example), before, rtol=0, atol=1e-12)
    counts: dict[str, int] = {}
    for event in removed.events:
        counts[event.what] = counts.get(event.what, 0) + event.units
    assert counts == silent
    left = sum(parameter.numel() for parameter in model.parameters())
    assert parameters - left == sum(event.parameters for event in removed.events) == removed.before.parameters - removed.after.parameters
    assert all(layer in str(removed) for layer in silent)


def test_units_that_pay_stay_and_a_high_rent_removes_them() -> None:
    loop = loop_of("widen_100_chain")
    model = loop.grower.bake().eval()
    parameters = [parameter.clone() for parameter in model.parameters()]
    data = loop.data

    def evaluate() -> list[Tensor]:
        with torch.no_grad():
            return [cross_entropy(model(x), y) for x, y in data]

    before = sum(evaluate()) / len(data)
    assert not esper.shrink(model, evaluate, example_input=data[0][0], rent=RentConfig(parameters=0.0, flops=0.0)).events
    assert all(torch.equal(one, other) for one, other in zip(parameters, model.parameters(), strict=True))
    events: list[Shrunk] = []
    high = RentConfig(parameters=0.3, flops=0.3)
    removed = esper.shrink(model, evaluate, example_input=data[0][0], rent=high, optimizer=loop.optimizer, on_event=events.append)
    assert events == list(removed.events)
    assert all(event.gain_high < event.rent for event in events)
    assert sum(evaluate()) / len(data) < before + sum(event.rent for event in events)
    for parameter in model.parameters():  # the optimiser goes on with what is left
        assert all(value.shape == parameter.shape for value in loop.optimizer.state[parameter].values() if value.ndim)
    cross_entropy(model(data[0][0]), data[0][1]).backward()
    loop.optimizer.step()


def test_a_share_that_is_no_share_and_a_model_with_slots_are_refused() -> None:
    with pytest.raises(GrowthError, match=r"share must be above 0 and at most 0\.5"):
        esper.shrink(plain(), lambda: [1.0], example_input=IMAGES, share=0.9)
    with pytest.raises(GrowthError, match="already has slots"):
        esper.shrink(esper.add_slots(plain(), IMAGES).model, lambda: [1.0], example_input=IMAGES)


# Kept seeds


def loop_of(*blueprints: str, rent: RentConfig | None = None) -> Loop:
    """Grow and keep seeds at one place, one after another."""
    slots = ["first", "first#2"][: len(blueprints)]
    actions: dict[int, list[Fossilize | Germinate]] = {}
    for number, (slot, blueprint) in enumerate(zip(slots, blueprints, strict=True)):
        actions[number * (KEPT + 1)] = [Germinate(slot=slot, reason="now", blueprint=blueprint)]
        actions[number * (KEPT + 1) + KEPT] = [Fossilize(slot=slot, reason="it pays")]
    budget = BudgetConfig(max_parameters=None, max_flops=None)
    settings = GrowthConfig(lifecycle=QUICK, budget=budget, rent=rent or RentConfig())
    loop = make_loop(Script(actions), settings, host=make_host(dropout=0.0), make_optimizer=adamw)  # type: ignore[arg-type]
    loop.val = loop.data
    loop.grower.begin()
    loop.epoch(epochs=(KEPT + 1) * len(blueprints))
    assert loop.grower.ledger.count("kept") == len(blueprints)
    return loop


def evaluation(loop: Loop) -> list[Tensor]:
    with torch.no_grad():
        loop.host.eval()
        return [cross_entropy(loop.slotted(x), y) for x, y in loop.data]


def test_a_kept_seed_that_no_longer_pays_is_removed_by_the_same_evidence() -> None:
    for blueprint in ("widen_100", "low_rank"):
        loop = loop_of(blueprint)
        assert loop.grower.shrink(lambda: evaluation(loop)) == []  # noqa: B023
        assert loop.slotted.slot("first").seed is not None
        for parameter in loop.slotted.slot("first").seed.parameters():
            parameter.data.zero_()
        loop.events.clear()
        assert loop.grower.shrink(lambda: evaluation(loop)) == ["first"]  # noqa: B023
        assert loop.slotted.slot("first").seed is None
        (shrunk,) = [event for event in loop.events if isinstance(event, Shrunk)]
        assert (shrunk.what, shrunk.gain, shrunk.parameters) == ("first", 0.0, loop.grower.ledger.seeds[0].parameters)
        assert loop.grower.ledger.seeds[0].outcome == "pruned"
        assert loop.grower.lifecycles.added().parameters == 0
        loop.epoch(epochs=2)


def test_units_that_a_later_seed_reads_are_removed_last() -> None:
    loop = loop_of("widen_100", "widen_100")
    for name in ("first", "first#2"):
        for parameter in loop.slotted.slot(name).seed.parameters():  # type: ignore[union-attr]
            parameter.data.zero_()
    assert "'first#2' reads its units" in loop.slotted.why_not_removed("first")
    assert loop.grower.shrink(lambda: evaluation(loop)) == ["first#2", "first"]


def test_a_controller_can_have_kept_seeds_measured_and_remove_them() -> None:
    class Tidy(Script):
        def decide(self, state):  # type: ignore[no-untyped-def]
            return replace(super().decide(state), measure_kept=True)

    actions = {
        0: [Germinate(slot="first", reason="now", blueprint="low_rank")],
        3: [Fossilize(slot="first", reason="it pays")],
        5: [Shrink(slot="first", reason="it is useless")],
    }
    loop = make_loop(Tidy(actions), GrowthConfig(lifecycle=QUICK), host=make_host(dropout=0.0), make_optimizer=adamw)
    loop.val = loop.data
    loop.grower.begin()
    loop.epoch(epochs=5)
    assert loop.grower.lifecycles.slots["first"].stage is Stage.FOSSILIZED, "it pays, so the gate refuses"
    assert "its rent is" in loop.grower.ledger.refused[-1].reason
    loop.grower.controller.actions[6] = [Shrink(slot="first", reason="it is useless")]  # type: ignore[attr-defined]
    for x, y in loop.data:
        loop.step(x, y)
    for parameter in loop.slotted.slot("first").seed.parameters():  # type: ignore[union-attr]
        parameter.data.zero_()
    loop.grower.after_epoch(loop.evaluate)
    assert loop.slotted.slot("first").seed is None
    assert [event.what for event in loop.events if isinstance(event, Shrunk)] == ["first"]


def test_growing_wider_and_folding_are_events() -> None:
    loop = loop_of("widen_50_chain")
    (widened,) = [event for event in loop.events if isinstance(event, Widened)]
    assert (widened.slot, widened.blueprint, widened.units) == ("first", "widen_50_chain", {"first": 4, "second.0": 4})
    assert widened.before == {"first": 8, "second.0": 8}
    loop.grower.bake()
    (folded,) = [event for event in loop.events if isinstance(event, Folded)]
    assert folded.layers == {"first": [6, 12], "second.0": [12, 12], "head": [12, 3]}
