"""What a grower is given, looked at before anything is done with it. Mistakes are told with what to do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from esper.growth.config import GrowthConfig
from esper.growth.errors import GrowthError
from esper.growth.garden import AnyBed, Garden
from esper.growth.shapley import MOST
from esper.growth.slotted import Slotted
from esper.parallel import ALONE, Group, Ranks


def check_fit_together(slotted: object, optimizer: Optimizer, config: object) -> None:
    if not isinstance(slotted, Slotted):
        raise GrowthError(
            f"a Grower is made for a model with slots, and this is a {type(slotted).__name__}; "
            "call add_slots first: slotted = add_slots(model, example_input=x[:2]), then Grower(slotted, optimizer)"
        )
    if config is not None and not isinstance(config, GrowthConfig):
        raise GrowthError(f"config is a {type(config).__name__}; pass config=GrowthConfig(...)")
    own = {id(parameter) for parameter in slotted.host.parameters()}
    if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        raise GrowthError(
            "the optimiser holds none of the model's parameters; make it for this very model, of which a copy has others: "
            "optimizer = torch.optim.AdamW(model.parameters())"
        )


def check_evaluate(evaluate: object) -> None:
    if not callable(evaluate):
        what = "nothing" if evaluate is None else f"a {type(evaluate).__name__}"
        raise GrowthError(
            f"after_epoch takes a function that gives the loss of every validation batch, and got {what}; it calls the function once more "
            "for each seed on trial, with the seed off, so losses alone do not do: grower.after_epoch(evaluate)"
        )


def ranks_of(model: nn.Module) -> Group:
    """The ranks that train this model together, checked; without a process group, none but this one."""
    wrappers = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    group = Ranks() if wrappers and dist.is_initialized() else ALONE
    check_ranks(model, group)
    if wrappers and wrappers[0].process_group.size() != group.world_size:
        raise GrowthError(
            f"the model is data-parallel over {wrappers[0].process_group.size()} of {group.world_size} processes, and growth is decided by "
            "all of them; wrap it without process_group="
        )
    return group


def check_ranks(model: nn.Module, group: Group) -> None:
    """Processes that train together must know of each other: seeds and decisions would differ between them otherwise."""
    if group.world_size == 1 and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise GrowthError(
            f"{dist.get_world_size()} processes train together, and this model is not under DistributedDataParallel, or was put there "
            "after it got its slots: every process would grow another model. Take the slots out by slotted.remove(), wrap the model first, "
            "and add slots to the wrapper: slotted = add_slots(DistributedDataParallel(model), example_input=x[:2])"
        )


def one_number(loss: Tensor | float) -> Tensor:
    if not isinstance(loss, Tensor):
        return torch.tensor(float(loss))
    if loss.numel() != 1:
        raise GrowthError(f"the loss of a step must be one number, and has the shape {list(loss.shape)}; take its mean")
    return loss.detach().reshape(())


def players(garden: Garden[AnyBed], slots: Sequence[str] | None) -> list[str]:
    """Whose gain is to be divided: these, or all living seeds that the host sees."""
    living = [name for name in garden.living() if garden.beds[name].is_connected]
    names = living if slots is None else list(slots)
    strange = [name for name in names if name not in living]
    if strange:
        raise GrowthError(f"no living seed is connected in {strange[0]!r}; there is one in {', '.join(living) or 'no slot'}")
    if not 0 < len(names) <= MOST:
        raise GrowthError(f"Shapley values are for 1 to {MOST} seeds, and these are {len(names)}; name some: slots=[...]")
    return names


def check_alphas(slotted: Slotted, slot: str, alphas: Sequence[float]) -> None:
    if slotted.slot(slot).seed is None:
        raise GrowthError(f"there is no seed in {slot!r}, so it has no alpha")
    if not alphas or not all(0 <= alpha <= 1 for alpha in alphas):
        raise GrowthError(f"alphas are some numbers from 0 to 1, not {list(alphas)}")
