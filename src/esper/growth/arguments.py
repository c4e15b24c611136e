"""What a user may get wrong in a call of `grow`, told before anything is done."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from os import PathLike
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from esper.growth.batches import with_article
from esper.growth.config import GrowthConfig
from esper.growth.errors import GrowthError
from esper.growth.slotted import Slotted

MakeHostOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
MakeScheduler = Callable[[Optimizer], Any]


def check_call(model: object, *, epochs: object, config: object, run: object) -> None:
    if isinstance(model, type) or not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        hint = "; pass the model itself, grow adds its own slots" if isinstance(model, Slotted) else ""
        raise GrowthError(f"model must be an nn.Module, and is {what}{hint}")
    empty = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if empty is not None:
        raise GrowthError(f"{empty} is on the device meta, so it has no values; make the model on another device, or load its weights")
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise GrowthError(f"epochs must be a whole number from 1 on, and is {epochs!r}")
    if config is not None and not isinstance(config, GrowthConfig):
        raise GrowthError(
            f"config must be a GrowthConfig, and is {with_article(type(config).__name__)}; write config=esper.GrowthConfig(...)"
        )
    if run is not None and not isinstance(run, str | PathLike):
        raise GrowthError(f"run must be the path of a folder, and is {run!r}")
    if torch.is_inference_mode_enabled():
        raise GrowthError("grow was called in torch.inference_mode, in which nothing can be trained; call it outside")


def optimizer_from(make: MakeHostOptimizer, parameters: Sequence[nn.Parameter]) -> Optimizer:
    example = "optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
    if not callable(make):
        raise GrowthError(f"optimizer must be a function that makes one, and is {with_article(type(make).__name__)}: {example}")
    try:
        optimizer = make(parameters)
    except TypeError as error:
        raise GrowthError(f"optimizer is called with the parameters, and raised TypeError: {error}; write {example}") from error
    if not isinstance(optimizer, Optimizer):
        raise GrowthError(f"optimizer must be a function that makes one, and made {with_article(type(optimizer).__name__)}: {example}")
    own = {id(parameter) for parameter in parameters}
    if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        raise GrowthError(
            f"the optimiser holds none of the parameters that grow trains, those of a copy; make it for what it is given: {example}"
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
    example = "scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)"
    if not callable(make):
        raise GrowthError(f"scheduler must be a function that makes one, and is {with_article(type(make).__name__)}: {example}")
    try:
        scheduler = make(optimizer)
    except TypeError as error:
        kind = make if isinstance(make, type) and issubclass(make, LRScheduler) else CosineAnnealingLR
        raise GrowthError(
            f"scheduler is called with the optimizer alone, and raised TypeError: {error}; "
            f"write scheduler=lambda optimizer: torch.optim.lr_scheduler.{kind.__name__}(optimizer, ...)"
        ) from error
    if not all(callable(getattr(scheduler, name, None)) for name in ("step", "state_dict", "load_state_dict")):
        what = "None" if scheduler is None else with_article(type(scheduler).__name__)
        raise GrowthError(f"scheduler made {what}; it must make a schedule, with step, state_dict and load_state_dict: {example}")
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise GrowthError(f"the schedule is of another optimiser; make it for the one it is given: {example}")
    return scheduler
