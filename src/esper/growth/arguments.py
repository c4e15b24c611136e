"""Validate the arguments of `Grower` and `grow` before anything is changed. Errors say what is wrong and what to do.

For `grow`, this includes making the user's optimiser and schedule, and finding out when the schedule is stepped.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from esper.growth.batches import with_article
from esper.growth.config import GrowthConfig, GrowthError
from esper.growth.host.slotted import Slotted
from esper.growth.host.units import modules_of
from esper.growth.lifecycle.backend import AnyBackend
from esper.growth.lifecycle.lifecycles import Lifecycles
from esper.growth.seeds.blueprints import Option
from esper.growth.seeds.folding import check_trained
from esper.parallel import ALONE, Group, Ranks

MakeHostOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer | Sequence[Optimizer]]
MakeScheduler = Callable[[Optimizer], Any]


# Arguments of Grower


def check_fit_together(slotted: object, optimizer: object, config: object) -> tuple[Optimizer, ...]:
    """Return the optimisers. Raise a GrowthError unless they are those of the model, which has slots, and `config` is of the right type."""
    if not isinstance(slotted, Slotted):
        raise GrowthError(
            f"a Grower needs a model with slots, and got a {type(slotted).__name__}; "
            "call add_slots first: slotted = add_slots(model, example_input=x[:2]), then Grower(slotted, optimizer)"
        )
    if config is not None and not isinstance(config, GrowthConfig):
        raise GrowthError(f"config is a {type(config).__name__}; pass config=GrowthConfig(...)")
    given = (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer) if isinstance(optimizer, list | tuple) else ()
    optimizers = tuple(one for one in given if isinstance(one, Optimizer))
    if not optimizers or len(optimizers) < len(given) or len({id(one) for one in optimizers}) < len(given):
        raise GrowthError(f"a Grower needs the optimiser of the model, or a list of different ones, and got {optimizer!r}")
    own = {id(parameter) for parameter in slotted.host.parameters()}
    for one in optimizers:
        if not any(id(parameter) in own for group in one.param_groups for parameter in group["params"]):
            raise GrowthError(
                f"{type(one).__name__} holds none of the model's parameters; make it for this model, not for a copy of it: "
                "optimizer = torch.optim.AdamW(model.parameters())"
            )
        if any(group["lr"] is None for group in one.param_groups):
            raise GrowthError(
                f"{type(one).__name__} chooses its learning rate itself (lr is None), so that seeds cannot follow it; give it one, with "
                "relative_step=False for the Adafactor of transformers"
            )
        if _has_few_bits(one):
            raise GrowthError(
                f"{type(one).__name__} keeps its state in 8 bits or fewer, in blocks that cannot get new rows and columns; grow with the "
                "same optimiser in 32 bits, and go on with this one after bake()"
            )
    return optimizers


def _has_few_bits(optimizer: Optimizer) -> bool:
    """Return whether an optimiser is one of bitsandbytes or torchao with a quantised state, also before its first step has made one."""
    bits = getattr(getattr(optimizer, "args", None), "optim_bits", 32)
    tensors = [tensor for state in optimizer.state.values() for tensor in state.values() if isinstance(tensor, torch.Tensor)]
    is_quantised = any(tensor.dtype in (torch.uint8, torch.int8) and tensor.numel() > 1 for tensor in tensors)
    return is_quantised or bits == 8 or any(word in type(optimizer).__name__.lower() for word in ("8bit", "4bit", "fp8"))


def check_grown_are_trained(slotted: Slotted, optimizers: Sequence[Optimizer], options: Mapping[str, Sequence[Option]]) -> None:
    """Raise a GrowthError if a parameter that may get new rows or columns is trained by none of the optimisers.

    `options` are the blueprints that may grow in each slot.
    """
    chains = [slotted.slot(name).place.chain for name, some in options.items() if any(option.widened for option in some)]
    widened = [module for chain in chains for units in chain for module in modules_of(units)]
    check_trained(dict(slotted.host.named_modules()), widened, optimizers)


def ranks_of(model: nn.Module) -> Group:
    """Return the ranks that train this model together, after checks; `ALONE` if there is only this process."""
    wrappers = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    group = Ranks() if wrappers and dist.is_initialized() else ALONE
    check_ranks(model, group)
    if wrappers and wrappers[0].process_group.size() != group.world_size:
        raise GrowthError(
            f"the model is data-parallel over {wrappers[0].process_group.size()} of {group.world_size} processes, but all processes must "
            "grow it together; wrap it without process_group="
        )
    return group


def check_keep(keep: object, best_by: str | None) -> None:
    """Raise a GrowthError unless `keep` and `best_by` fit together."""
    if keep not in ("best", "last"):
        raise GrowthError(f'keep must be "best" or "last", and is {keep!r}')
    if best_by is not None and keep != "best":
        raise GrowthError('best_by says which epoch is the best, and keep="last" returns the last one; leave one of them out')


def check_ranks(model: nn.Module, group: Group) -> None:
    """Raise a GrowthError if there are several processes but the model is not data-parallel: each would grow another model."""
    if group.world_size == 1 and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise GrowthError(
            f"there are {dist.get_world_size()} processes, and this model is not in DistributedDataParallel, or was wrapped after it got "
            "its slots: every process would grow another model. Remove the slots by slotted.remove(), wrap the model first, "
            "and add slots to the wrapper: slotted = add_slots(DistributedDataParallel(model), example_input=x[:2])"
        )


def players(lifecycles: Lifecycles[AnyBackend], slots: Sequence[str] | None) -> list[str]:
    """Return the slots whose seeds get Shapley values: `slots`, or all slots with a living, connected seed."""
    living = [name for name in lifecycles.living() if lifecycles.slots[name].is_connected]
    names = living if slots is None else list(slots)
    strange = [name for name in names if name not in living]
    if strange:
        raise GrowthError(f"{strange[0]!r} has no living, connected seed; slots with one: {', '.join(living) or 'none'}")
    if not names:
        raise GrowthError("Shapley values need at least one living, connected seed, and there is none")
    return names


def check_alphas(slotted: Slotted, slot: str, alphas: Sequence[float]) -> None:
    """Raise a GrowthError if the slot is empty or an alpha is out of range."""
    if slotted.slot(slot).seed is None:
        raise GrowthError(f"there is no seed in {slot!r}, so it has no alpha")
    if not alphas or not all(0 <= alpha <= 1 for alpha in alphas):
        raise GrowthError(f"alphas must be a list of numbers from 0 to 1, not {list(alphas)}")


# Arguments of grow


def check_precision(model: nn.Module, precision: str, device: torch.device) -> None:
    """Raise a GrowthError if autocast to this precision does not work for the model or its device."""
    if precision == "float32":
        return
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.is_floating_point() and parameter.dtype is not torch.float32:
            kind = str(parameter.dtype).removeprefix("torch.")
            raise GrowthError(
                f"precision {precision!r} needs a model in float32, and {name} is {kind}; leave precision out, or pass model.float()"
            )
    try:
        with warnings.catch_warnings(action="error"), torch.autocast(device.type, dtype=getattr(torch, precision)):
            pass
    except (RuntimeError, UserWarning) as error:
        raise GrowthError(f"precision {precision!r} does not work on {device}: {error}; choose another, or another device") from error


def optimizers_from(make: MakeHostOptimizer, parameters: Sequence[nn.Parameter]) -> tuple[Optimizer, ...]:
    """Make the user's optimiser for these parameters, or several, and check them."""
    example = "optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
    if not callable(make):
        raise GrowthError(f"optimizer must be a function that makes one, and is {with_article(type(make).__name__)}: {example}")
    try:
        made = make(parameters)
    except TypeError as error:
        raise GrowthError(f"optimizer is called with the parameters, and raised TypeError: {error}; write {example}") from error
    optimizers = (made,) if isinstance(made, Optimizer) else tuple(made) if isinstance(made, list | tuple) else ()
    if not optimizers or not all(isinstance(one, Optimizer) for one in optimizers):
        raise GrowthError(f"optimizer must be a function that makes one, and made {with_article(type(made).__name__)}: {example}")
    own = {id(parameter) for parameter in parameters}
    for optimizer in optimizers:
        if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            raise GrowthError(
                f"the optimiser holds none of the parameters that grow trains, which are those of a copy of the model; use the function's "
                f"argument: {example}"
            )
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise GrowthError(
                f"{type(optimizer).__name__} computes the loss itself in every step, which grow does not support; "
                "use another optimiser, or write your own loop with esper.Grower(..., seed_optimizer=...)"
            )
    return optimizers


class Schedules:
    """The schedules of several optimisers, which are stepped together."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = list(parts)

    def step(self, *arguments: Any) -> None:
        for part in self.parts:
            part.step(*arguments)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part, saved in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(saved)


def scheduler_from(make: MakeScheduler | None, optimizers: Sequence[Optimizer]) -> Any:
    """Make the user's schedule for each optimiser, and check it; None if there is none."""
    if make is None:
        return None
    made = [_schedule_from(make, optimizer) for optimizer in optimizers]
    return made[0] if len(made) == 1 else Schedules(made)


def _schedule_from(make: MakeScheduler, optimizer: Optimizer) -> Any:
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
        raise GrowthError(f"the schedule belongs to another optimiser; use the function's argument: {example}")
    return scheduler


PER_STEP = (OneCycleLR, CyclicLR)  # schedules that count steps, by their documentation

PER_EPOCH = (  # schedules that count epochs, by their documentation, with the attribute that says when they end or change, if there is one
    (CosineAnnealingLR, "T_max"),
    (CosineAnnealingWarmRestarts, "T_0"),
    (ConstantLR, "total_iters"),
    (LinearLR, "total_iters"),
    (PolynomialLR, "total_iters"),
    (StepLR, "step_size"),
    (ExponentialLR, ""),
    (MultiStepLR, ""),
    (ReduceLROnPlateau, ""),
)


def is_stepped_per_step(scheduler: Any, asked: str, *, epochs: int, steps: int | None) -> bool:
    """Return whether a schedule is stepped after every step of the optimiser, rather than after every epoch.

    `steps` is the number of steps in an epoch; None if the loader has no length. "auto" follows the documentation of a schedule. It warns
    if that says nothing, or if the schedule would end long after the training.
    """
    parts = _parts(scheduler)
    is_plateau = any(isinstance(part, ReduceLROnPlateau) for part in parts)
    if asked == "step" and is_plateau:
        raise GrowthError("ReduceLROnPlateau follows the validation loss, which is known once an epoch; leave step_schedule out")
    per_step = asked == "step" or (asked == "auto" and any(isinstance(part, PER_STEP) for part in parts))
    # `times` is the number of times the schedule will be stepped; None if it is unknown.
    times, unit = (epochs, "once an epoch") if not per_step else (steps and epochs * steps, "after every step")
    for part in parts:
        name = type(part).__name__
        if isinstance(part, OneCycleLR) and len(parts) == 1 and times is not None and part.total_steps < times:
            other = f'step_schedule="{"epoch" if per_step else "step"}"'
            raise GrowthError(
                f"{name} is stepped {unit}, {times} times in all, and ends after {part.total_steps}; make it with total_steps={times}, "
                f"or pass {other} if it counts {'epochs' if per_step else 'steps'}"
            )
        doubt = "" if per_step or asked != "auto" or steps == 1 else _doubt(part, epochs)
        if doubt:
            warnings.warn(
                f'{name} is stepped {unit}, {times} times in all, and {doubt}; pass step_schedule="step" if it counts steps of the '
                'optimiser, or step_schedule="epoch" if this is what you want',
                stacklevel=4,  # the call of grow
            )
    return per_step


def _parts(scheduler: Any) -> list[Any]:
    """Return the schedules inside a SequentialLR, a ChainedScheduler or Schedules, or the schedule itself."""
    if isinstance(scheduler, SequentialLR | ChainedScheduler):
        return [inner for part in scheduler._schedulers for inner in _parts(part)]
    if isinstance(scheduler, Schedules):
        return [inner for part in scheduler.parts for inner in _parts(part)]
    return [] if scheduler is None else [scheduler]


def _doubt(scheduler: Any, epochs: int) -> str:
    """Return why a schedule may count steps rather than epochs; "" if there is no reason to think so."""
    for kind, name in PER_EPOCH:
        if isinstance(scheduler, kind):
            end = getattr(scheduler, name) if name else 0
            return f"its {name} is {end}" if end > 2 * epochs else ""
    what = "function" if isinstance(scheduler, LambdaLR | MultiplicativeLR) else "code"
    return f"esper cannot know whether its {what} counts epochs or steps"
