"""Plant seeds in slots by hand, without a grower, and compare the outputs of models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.growth.host.causality import tensors_in
from esper.growth.host.slotted import Slotted
from esper.growth.seeds.blueprints import blueprints_for
from esper.growth.seeds.seed import Blending, Seed
from tests.growth.hosts import FAMILIES

every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def hooks_of(model: nn.Module) -> list[Any]:
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = [hook for module in model.modules() for table in tables for hook in getattr(module, table).values()]
    return [*hooks, *(vars(module)["forward"] for module in model.modules() if "forward" in vars(module))]


def run(model: Any, batch: Any) -> list[Tensor]:
    with torch.no_grad():
        return list(tensors_in(model(batch)))


def is_same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) and one.dtype == other.dtype for one, other in zip(some, others, strict=True))


def is_close(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.allclose(one, other, atol=1e-5) for one, other in zip(some, others, strict=True))


def germinate(slotted: Slotted, name: str, blueprint: str, *, blending: Blending = "add") -> Seed:
    """Plant a new seed at full strength."""
    slot = slotted.slot(name)
    seed = slotted.new_seed(name, blueprint, random_seed=1, blending=blending)
    slot.plant(seed, connected=True)
    slot.alpha = 1.0
    return seed


def perturb(seed: Seed) -> None:
    """Move the weights of a seed, as training would."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in seed.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter)
        # One of few new units may be below zero for all of few samples. Behind a norm, none is now.
        for name, parameter in seed.named_parameters():
            if name.endswith("own.bias"):
                parameter += 1.0


def plant_kept_seeds(slotted: Slotted, *names: str) -> None:
    """Plant a seed with moved weights in each of these slots, and keep it."""
    for name in names:
        slot = slotted.slot(name)
        deep = [blueprint for blueprint in blueprints_for(slot.place) if blueprint.share is None]
        perturb(germinate(slotted, name, deep[-1].name))
        slot.is_kept = True


def possible_growths(slotted: Slotted) -> Iterator[tuple[str, str]]:
    return ((name, blueprint.name) for name, slot in slotted.slots.items() for blueprint in blueprints_for(slot.place))
