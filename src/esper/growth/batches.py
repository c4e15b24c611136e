"""What `grow` does with a user's batches: to the model's device, through the model, to a loss, with errors that help."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from esper.growth.errors import GrowthError
from esper.growth.survey import tensors_in

LossFunction = Callable[[Any, Any], Tensor]  # (outputs, targets)
StepLoss = Callable[[nn.Module, Any], Tensor]  # (model, batch)


def step_loss_of(loss_fn: LossFunction | None, step_loss: StepLoss | None) -> StepLoss:
    """One way from a batch to a loss, whichever the user gave."""
    if (loss_fn is None) == (step_loss is None):
        raise GrowthError(
            "pass loss_fn for batches of (inputs, targets), or step_loss=lambda model, batch: ... for anything else; one of them"
        )
    if step_loss is not None:
        return step_loss
    assert loss_fn is not None

    def from_pair(model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = pair_of(batch)
        outputs = model(inputs)
        if not isinstance(outputs, Tensor):
            raise GrowthError(
                f"the model returns a {type(outputs).__name__}, and loss_fn expects a tensor; "
                "pass step_loss=lambda model, batch: ... which computes the loss from it"
            )
        return loss_fn(outputs, targets)

    return from_pair


def pair_of(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    raise GrowthError(
        f"a batch is a {type(batch).__name__}{f' of {len(batch)}' if isinstance(batch, tuple | list | Mapping) else ''}, "
        "and loss_fn needs (inputs, targets); pass step_loss=lambda model, batch: ..."
    )


class Listener:
    """Hears what a model is called with, for a step_loss may take anything out of its batches."""

    def __init__(self, model: nn.Module) -> None:
        self.heard: Any = None  # the arguments of the first call: a tuple of them, or a dict by name
        self._model = model
        self._handle = model.register_forward_pre_hook(self._hear, with_kwargs=True)

    def _hear(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self.heard is None:
            self.heard = inspect.signature(self._model.forward).bind(*arguments, **named).arguments if named else arguments

    def stop(self) -> None:
        self._handle.remove()


def example_of(batch: Any) -> Any:
    """What the model gets of a batch, as far as that can be guessed: the inputs of a pair, or the batch itself."""
    return batch[0] if isinstance(batch, tuple | list) and len(batch) == 2 else batch


def check_can_repeat(loader: Iterable[Any], which: str) -> None:
    if isinstance(loader, Iterator):  # asking it for an iterator would make a DataLoader draw random numbers
        raise GrowthError(f"the {which} loader is an iterator, which can be gone through once; pass a DataLoader or a list of batches")


def explained(error: Exception, batch: Any) -> Exception:
    """The same error, or one that says what to do where the batch is too small for batch norm."""
    if "more than 1 value per channel" not in str(error):
        return error
    return GrowthError(
        f"a training batch of {size_of(batch)} is too small for batch norm ({error}); "
        "build the DataLoader with drop_last=True, or choose a batch size that leaves no rest of one"
    )


def move(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: move(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(value, device) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(move(value, device) for value in batch)
    return batch


def checked(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise GrowthError(f"the loss of a batch must be one number in a tensor, and is {what}; take its mean")
    return loss


def check_data(batch: Any, loss: float, where: str) -> None:
    """A loss that is not finite may be the data's fault, which no rollback can mend."""
    if math.isfinite(loss):
        return
    for tensor in tensors_in(batch):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            count = int((~torch.isfinite(tensor)).sum())
            raise GrowthError(f"{where} holds {count} values that are NaN or infinite, so its loss is {loss}; clean the data")


def size_of(batch: Any) -> int:
    """Samples in a batch, as far as its first tensor tells."""
    return next((len(tensor) for tensor in tensors_in(batch) if tensor.ndim > 0), 1)


def device_of(model: nn.Module) -> torch.device:
    return next((tensor.device for tensors in (model.parameters(), model.buffers()) for tensor in tensors), torch.device("cpu"))
