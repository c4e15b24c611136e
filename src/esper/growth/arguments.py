"""What a user may get wrong in a call of `grow`, told before anything is done."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from esper.growth.config import GrowthConfig
from esper.growth.errors import GrowthError

MakeHostOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
MakeScheduler = Callable[[Optimizer], Any]


def check_call(model: object, *, epochs: object, config: object) -> None:
    if isinstance(model, type) or not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise GrowthError(f"model must be an nn.Module, and is {what}")
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise GrowthError(f"epochs must be a number from 1 on, and is {epochs!r}")
    if config is not None and not isinstance(config, GrowthConfig):
        raise GrowthError(f"config must be a GrowthConfig, and is a {type(config).__name__}; write config=esper.GrowthConfig(...)")


def optimizer_from(make: MakeHostOptimizer, parameters: Iterable[nn.Parameter]) -> Optimizer:
    optimizer = make(parameters) if callable(make) else None
    if not isinstance(optimizer, Optimizer):
        raise GrowthError(
            f"optimizer must be a function that makes one{_instead(make)}: optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise GrowthError(
            f"{type(optimizer).__name__} computes the loss itself in every step, which grow does not offer; "
            "use another optimiser, or a loop of your own with esper.Grower(..., seed_optimizer=...)"
        )
    return optimizer


def scheduler_from(make: MakeScheduler | None, optimizer: Optimizer) -> Any:
    if make is None:
        return None
    if not callable(make):
        raise GrowthError(
            f"scheduler must be a function that makes one{_instead(make)}: "
            "scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)"
        )
    return make(optimizer)


def _instead(make: object) -> str:
    return "" if callable(make) else f", and is a {type(make).__name__}"
