"""Look at the data of `grow`: check the loaders, explain errors in data, model or loss, and find what the model is called with.

`PairLoss` makes the loss of a batch from a loss function, and the losses of its samples where the function can be applied to them one by
one; `samples_of` checks that these are the parts of the loss of the batch. `ConstantPredictor` computes the loss of a model that gives all
samples the same output, with which losses are compared.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from esper.growth.config import GrowthError
from esper.growth.host.slots import tensors_in

LossFunction = Callable[[Any, Any], Tensor]  # (outputs, targets)
StepLoss = Callable[[nn.Module, Any], Tensor]  # (model, batch); returns one loss, or one per sample

IN_MODEL, IN_LOSS = "the model cannot run the inputs", "loss_fn fails"  # how the notes begin that `step_loss_of` adds to errors

ROUNDING = 1e-5  # difference between the loss of a batch and the mean over its samples that is taken for rounding

_TYPES = ("dtype", "scalar type")  # torch 2.11 says "expected scalar type Long but found Int"

_HINTS = (  # (parts of torch's messages, where the error was raised, what to do)
    (_TYPES, IN_MODEL, "convert them to float32, as the weights are, or the model to their precision"),
    (("missing",), IN_MODEL, "loss_fn calls the model with the inputs alone; pass step_loss=lambda model, batch: ... for anything else"),
    (_TYPES, IN_LOSS, "use targets.long() if they are class numbers, targets.float() if they are values"),
    (("out of bounds",), IN_LOSS, "class numbers start at 0, and the outputs need one column per class"),
)


def explained(error: Exception, samples: int, where: str) -> GrowthError | None:
    """Return the error as a GrowthError that says where it happened and what to do; None if it is not known to be about the data.

    Use it only for the first computation of a batch's loss. An error in a second pass, such as a closure, must be raised unchanged.
    """
    text = str(error)
    if isinstance(error, GrowthError):
        return GrowthError(f"{where}: {error}")
    if "more than 1 value per channel" in text:
        return GrowthError(
            f"{where}: a training batch of {samples} is too small for batch norm ({error}); "
            "build the DataLoader with drop_last=True, or choose a batch size that does not leave a last batch of one"
        )
    note = next((note for note in getattr(error, "__notes__", ()) if note.startswith((IN_MODEL, IN_LOSS))), None)
    is_about_data = isinstance(error, RuntimeError | TypeError | ValueError | IndexError) and not isinstance(error, torch.OutOfMemoryError)
    if note is None or not is_about_data:
        return None
    hints = [hint for parts, place, hint in _HINTS if any(part in text for part in parts) and note.startswith(place)]
    return GrowthError(f"{where}: {note}: {text}{''.join(f'; {hint}' for hint in hints)}")


def described(value: Any) -> str:
    """Return a text such as "[8, 3] float32".

    >>> described(torch.zeros(8, 3)), described([1, 2])
    ('[8, 3] float32', 'a list')
    """
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return f"a {type(value).__name__}"


class Listener:
    """Hooks that record the arguments and outputs of a model, because a step_loss may call it with any part of a batch."""

    def __init__(self, model: nn.Module) -> None:
        self.heard: Any = None  # the arguments of the first call: a tuple, or a dict by name
        self.outputs: Any = None  # of the last call
        self._model = model
        self._handles = [model.register_forward_pre_hook(self._hear, with_kwargs=True), model.register_forward_hook(self._keep)]

    def _hear(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self.heard is not None:
            return
        if not arguments or not named:
            self.heard = arguments or dict(named)
            return
        # Positional and keyword arguments: give all of them their names.
        signature = inspect.signature(self._model.forward)
        self.heard = dict(signature.bind(*arguments, **named).arguments)
        for parameter in signature.parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                self.heard |= self.heard.pop(parameter.name, {})

    def _keep(self, module: nn.Module, arguments: tuple[Any, ...], outputs: Any) -> None:
        self.outputs = outputs

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()


class PairLoss:
    """The loss of a batch (inputs, targets) by `loss_fn(outputs, targets)`, as a step loss, and the losses of the batch's samples."""

    def __init__(self, loss_fn: LossFunction) -> None:
        self.loss_fn = loss_fn
        # Ways to get the losses of the samples, fastest first. One that fails is dropped.
        self._ways = [way for way in (_unreduced(loss_fn), self._by_vmap, self._one_by_one) if way is not None]

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return self._computed(model, batch)[0]

    def with_samples(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | None]:
        """Return the loss of a batch, and the losses [B] of its samples; None where they cannot be computed one by one.

        Nothing says that the mean of the samples is the loss of the batch: that is so for a mean over samples, but not for a sum or for
        classes with weights. The caller has to compare.
        """
        loss, outputs, targets = self._computed(model, batch)
        is_by_sample = isinstance(outputs, Tensor) and isinstance(targets, Tensor) and min(outputs.ndim, targets.ndim) > 0
        if not is_by_sample or not len(outputs) == len(targets) == size_of(batch):
            return loss, None
        while self._ways:
            try:
                return loss, self._ways[0](outputs, targets).detach().reshape(len(outputs), -1).mean(1)
            except torch.OutOfMemoryError:
                raise
            except Exception:  # such as a function that vmap cannot run, or one that needs the whole batch
                self._ways.pop(0)
        return loss, None

    def _computed(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any, Any]:
        """Return the loss, the outputs and the targets of a batch. Errors get a note that says where they were raised."""
        inputs, targets = pair_of(batch)
        try:
            outputs = model(inputs)
        except Exception as error:
            error.add_note(f"{IN_MODEL} ({described(inputs)})")
            raise
        if not isinstance(outputs, Tensor):
            raise GrowthError(
                f"the model returns a {type(outputs).__name__}, and loss_fn expects a tensor; "
                "pass step_loss=lambda model, batch: ... which computes the loss from it"
            )
        try:
            return self.loss_fn(outputs, targets), outputs, targets
        except Exception as error:
            error.add_note(f"{IN_LOSS}, with outputs {described(outputs)} and targets {described(targets)}")
            raise

    def _by_vmap(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses: Tensor = torch.func.vmap(self.loss_fn)(outputs.unsqueeze(1), targets.unsqueeze(1))
        return losses

    def _one_by_one(self, outputs: Tensor, targets: Tensor) -> Tensor:
        pairs = zip(torch.split(outputs, 1), torch.split(targets, 1), strict=True)
        return torch.stack([self.loss_fn(output, target) for output, target in pairs])


def _unreduced(loss_fn: LossFunction) -> LossFunction | None:
    """Return the loss function without its mean over the batch, if it has an option for that, as those of torch."""
    if isinstance(loss_fn, nn.Module) and hasattr(loss_fn, "reduction"):
        unreduced = copy.copy(loss_fn)
        vars(unreduced)["reduction"] = "none"
        return unreduced
    try:
        has_option = "reduction" in inspect.signature(loss_fn).parameters
    except (TypeError, ValueError):  # some built-in functions have no signature
        return None
    return partial(cast(Callable[..., Tensor], loss_fn), reduction="none") if has_option else None


class ValidationLoss(NamedTuple):
    """The loss of one validation batch."""

    loss: Tensor
    samples: int
    by_sample: Tensor | None  # the losses [B] of its samples; None: not asked for, or they cannot be computed


def validation_loss(step_loss: StepLoss, model: nn.Module, batch: Any, *, by_sample: bool) -> ValidationLoss:
    """Return the loss of a validation batch, with the losses of its samples if they are asked for and may be known."""
    losses, samples = None, size_of(batch)
    if by_sample and isinstance(step_loss, PairLoss):
        loss, losses = step_loss.with_samples(model, batch)
    else:
        loss = step_loss(model, batch)
    loss = checked(loss, samples).detach()
    if loss.shape == (samples,):
        loss, losses = loss.mean(), loss
    return ValidationLoss(loss, samples, losses)


def samples_of(found: Sequence[ValidationLoss]) -> list[Tensor] | None:
    """Return the losses [B] of the samples of every batch; None unless all are known and their means are the losses of the batches."""
    by_sample = [one.by_sample for one in found if one.by_sample is not None]
    if not found or len(by_sample) < len(found):
        return None
    losses = torch.stack([one.loss.reshape(()) for one in found]).double()
    means = torch.stack([one.double().mean() for one in by_sample])
    is_same = (losses - means).abs() <= ROUNDING * losses.abs().clamp(min=1)
    # Losses that are not finite say nothing, and end the measurement.
    return by_sample if bool((is_same | ~losses.isfinite()).all()) else None


def checked(loss: Any, samples: int = 1) -> Tensor:
    """Return the loss of a batch, or the losses [B] of its samples. Raise a GrowthError for anything else."""
    rule = "the loss of a batch must be one number in a tensor, and is"
    if not isinstance(loss, Tensor):
        raise GrowthError(f"{rule} {with_article(type(loss).__name__)}; return the tensor itself, without .item() or float()")
    if loss.numel() != 1 and loss.shape != (samples,):
        raise GrowthError(
            f"{rule} a tensor of shape {list(loss.shape)}; take its mean, or return one loss for each of the {samples} samples"
        )
    return loss


def pair_of(batch: Any) -> tuple[Any, Any]:
    """Return inputs and targets of a batch. Raise a GrowthError if it is not a pair."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    # Describe the batch, and suggest a step_loss with its first and last key.
    kind, names = type(batch).__name__, []
    if isinstance(batch, Mapping):
        names = [repr(name) for name in batch]
        what = f"a {kind} with {', '.join(map(str, batch))}"
    else:
        what = f"a {kind} of {len(batch)}" if isinstance(batch, tuple | list) else f"a {kind}"
    example = f"loss(model(batch[{names[0]}]), batch[{names[-1]}])" if names else "..."
    raise GrowthError(f"a batch is {what}, and loss_fn needs (inputs, targets); pass step_loss=lambda model, batch: {example}")


def size_of(batch: Any) -> int:
    """Return the number of samples in a batch: the leading size of its first tensor that has one, else 1."""
    return next((len(tensor) for tensor in tensors_in(batch) if tensor.ndim > 0), 1)


class ConstantPredictor:
    """Finds the smallest loss of a model that gives all samples the same output. Losses are compared with it.

    If targets are class numbers, the best output is the logarithm of the class frequencies, the same at all positions of a sample.
    Otherwise L-BFGS searches for it, starting at the mean of the first batch's outputs. That works for any loss function with a gradient;
    the output may then differ from position to position.
    """

    MOST = 2**22  # elements of outputs that a step of L-BFGS uses at most

    def __init__(self, loss_fn: LossFunction) -> None:
        self._loss_fn = loss_fn
        self._pairs: list[tuple[torch.Size, Any]] = []  # (shape of a batch's outputs, its targets)
        self._numbers = 0  # elements of the outputs of these batches
        self._first: Tensor | None = None  # outputs of the first batch

    def note(self, outputs: Tensor, targets: Any) -> None:
        """Add a batch. If targets are not class numbers, only the first batches are used, up to `MOST` elements."""
        if self._first is None:
            self._first = outputs.detach()
        is_enough = self._numbers > 0 and self._numbers + outputs.numel() > self.MOST
        if outputs.ndim == 0 or (is_enough and not class_dims(outputs.shape, targets)):
            return
        self._pairs.append((outputs.shape, targets))
        self._numbers += outputs.numel()

    def loss(self) -> float | None:
        """Return the smallest loss that was found, or None if none is finite."""
        if not self._pairs or self._first is None:
            return None
        shape, targets = self._pairs[0]
        if dims := class_dims(shape, targets):  # if several dimensions could be the classes, the one with the smaller loss counts
            least = min(self._loss_of(self._log_frequencies(dim)) for dim in dims)
        else:
            least = self._least(self._first.float().mean(dim=0, keepdim=True))
        return least if math.isfinite(least) else None

    def _log_frequencies(self, dim: int) -> Tensor:
        """Return the logarithm of the class frequencies, with the classes in dimension `dim` and size 1 in all others."""
        assert self._first is not None
        size, shape = self._first.shape[dim], [1] * self._first.ndim
        shape[dim] = size
        known = [targets[(targets >= 0) & (targets < size)] for _, targets in self._pairs]
        counts = torch.bincount(torch.cat(known).flatten().long(), minlength=size).double()
        return (counts.clamp(min=1e-3) / max(float(counts.sum()), 1.0)).log().view(shape)

    @torch.no_grad()
    def _loss_of(self, constant: Tensor) -> float:
        return float(self._total(constant))

    @torch.enable_grad()
    def _least(self, start: Tensor) -> float:
        """Return the smallest finite loss that L-BFGS finds for a constant output, starting at `start`."""
        found = [self._loss_of(start)]
        constant = start.clone().requires_grad_()
        optimizer = torch.optim.LBFGS([constant], max_iter=100, tolerance_change=1e-12, line_search_fn="strong_wolfe")
        unit = abs(found[0]) or 1.0  # the tolerances of L-BFGS are absolute, so divide the loss by its start value

        def closure() -> Tensor:
            optimizer.zero_grad()
            total = self._total(constant) / unit
            found.append(unit * float(total.detach()))
            if not math.isfinite(found[-1]) or not total.requires_grad:
                raise _CannotImproveError
            total.backward()  # type: ignore[no-untyped-call]
            return total

        with contextlib.suppress(_CannotImproveError):
            optimizer.step(closure)  # type: ignore[no-untyped-call]
        return min((loss for loss in found if math.isfinite(loss)), default=math.inf)

    def _total(self, constant: Tensor) -> Tensor:
        """Return the mean loss over samples of a constant output, in the batches whose outputs it can be expanded to."""
        assert self._first is not None
        fitting = [(shape, targets) for shape, targets in self._pairs if _can_expand(constant.shape, shape)]
        losses = []
        for shape, targets in fitting:
            outputs = constant.to(self._first.dtype).expand(shape).contiguous()
            losses.append(shape[0] * self._loss_fn(outputs, targets).double().mean())
        return torch.stack(losses).sum() / sum(shape[0] for shape, _ in fitting)


class _CannotImproveError(Exception):
    """Ends L-BFGS when the loss is not finite or has no gradient."""


def class_dims(shape: torch.Size, targets: Any) -> list[int]:
    """Return the dimensions of the outputs that could be the classes: without one of them, the shape is that of the targets.

    >>> class_dims(torch.Size([8, 5, 16]), torch.zeros(8, 16, dtype=torch.int64))
    [1]
    """
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        return []
    return [dim for dim in range(1, len(shape)) if shape[:dim] + shape[dim + 1 :] == targets.shape]


def _can_expand(shape: torch.Size, to: torch.Size) -> bool:
    return len(shape) == len(to) and all(own in (1, wanted) for own, wanted in zip(shape, to, strict=True))


def example_of(batch: Any) -> Any:
    """Guess what the model is called with: the inputs if the batch is a pair, else the batch itself."""
    return batch[0] if isinstance(batch, tuple | list) and len(batch) == 2 else batch


def check_loader(loader: object, which: str) -> None:
    """Raise a GrowthError for anything that cannot be iterated batch by batch in every epoch."""
    wanted, subject = "pass a DataLoader or a list of batches", f"the {which} loader is"
    pairs = f"{wanted}: [(inputs, targets), ...]"
    if loader is None:
        reason = "seeds are judged by validation data, so " if which == "validation" else ""
        raise GrowthError(f"{subject} None; {reason}{wanted}")
    if isinstance(loader, Tensor):
        raise GrowthError(f"{subject} a tensor; {pairs}")
    if isinstance(loader, tuple) and loader and all(isinstance(item, Tensor) for item in loader):
        raise GrowthError(f"{subject} a tuple of tensors, each of which would be a batch; {pairs}")
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise GrowthError(f"{subject} a {type(loader).__name__}, which gives single samples; wrap it: DataLoader(dataset, batch_size=32)")
    if isinstance(loader, Iterator):  # asking it for an iterator would make a DataLoader draw random numbers
        raise GrowthError(f"{subject} an iterator, which can be used only once; {wanted}")
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise GrowthError(f"{subject} {with_article(type(loader).__name__)}; {wanted}")


def with_article(noun: str) -> str:
    """Return a noun with its indefinite article.

    >>> with_article("int"), with_article("str")
    ('an int', 'a str')
    """
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


def check_data(batch: Any, loss: float, where: str) -> None:
    """Raise a GrowthError if the loss is not finite because of NaN or infinite values in the batch, which no rollback can repair."""
    if math.isfinite(loss):
        return
    for tensor in tensors_in(batch):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            count = int((~torch.isfinite(tensor)).sum())
            raise GrowthError(f"{where} holds {count} values that are NaN or infinite, so its loss is {loss}; clean the data")
