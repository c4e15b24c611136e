"""Metrics beside the loss, such as accuracy, from the forward passes that the validation loss makes anyway.

    esper.grow(model, train, val, loss_fn=F.cross_entropy, epochs=30, metrics={"accuracy": accuracy})

A metric is a function of one batch: `fn(outputs, targets)` beside a `loss_fn`, `fn(model, batch)` beside a `step_loss`. Its values are
averaged over the samples. In `fn(model, batch)`, a call of the model with the inputs that step_loss used returns the outputs that step_loss
got; any other call computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from statistics import fmean
from typing import Any, SupportsFloat

import torch
from torch import Tensor, nn

from esper.growth.batches import with_article
from esper.growth.config import GrowthError
from esper.growth.host.prefix_cache import unrecorded
from esper.parallel import Group

Metric = Callable[[Any, Any], Any]  # (outputs, targets), or (model, batch) beside a step_loss
LONGEST_NAME = 80


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the share of targets that have the highest score, as a tensor of one number. Classes are in dimension 1 of the outputs.

    >>> float(accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1])))
    0.5
    """
    wanted = targets.argmax(dim=1) if targets.is_floating_point() else targets
    return (outputs.argmax(dim=1) == wanted).float().mean()


def check_metrics(metrics: object) -> dict[str, Any]:
    """Return the metrics by name. Raise a GrowthError for anything that is not a mapping from names to values or functions."""
    if metrics is None:
        return {}
    example = 'metrics={"accuracy": lambda outputs, targets: (outputs.argmax(1) == targets).float().mean()}'
    if not isinstance(metrics, Mapping):
        raise GrowthError(f"metrics must be a dict from names to functions, and is {with_article(type(metrics).__name__)}: {example}")
    for name in metrics:
        if not isinstance(name, str) or not name.strip() or not name.isprintable() or len(name) > LONGEST_NAME:
            raise GrowthError(f"{name!r} cannot be the name of a metric; use a short text without line breaks: {example}")
    return dict(metrics)


def check_functions(metrics: object) -> dict[str, Metric]:
    """Return the metrics of `grow`. Raise a GrowthError for one that is not a function."""
    found = check_metrics(metrics)
    for name, function in found.items():
        if isinstance(function, type):
            raise GrowthError(f"the metric {name!r} is the class {function.__name__}; pass an instance or a function of a batch")
        if not callable(function):
            raise GrowthError(f"the metric {name!r} is {with_article(type(function).__name__)}, and must be a function of a batch")
    return found


def as_number(name: str, value: object) -> float:
    """Return the value of a metric as a number."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise GrowthError(f"the metric {name!r} gave a tensor of shape {list(value.shape)}; return one number, such as its mean")
    if isinstance(value, Tensor):
        return float(value.detach())
    if isinstance(value, str) or not isinstance(value, SupportsFloat):
        raise GrowthError(f"the metric {name!r} gave {'None' if value is None else f'a {type(value).__name__}'}; return one number")
    return float(value)


class MetricSums:
    """Values of the metrics over the batches of one evaluation. `recording` listens to the model; then call `note` after every batch.

    `of_pairs` says that metrics are functions of outputs and targets, not of model and batch. `ignored` are arguments of the model by name
    that change the loss it returns but none of its other outputs, so that a metric may leave them out.
    """

    def __init__(self, model: nn.Module, metrics: Mapping[str, Metric], *, of_pairs: bool, ignored: Sequence[str] = ()) -> None:
        self.model, self.metrics, self.of_pairs, self.ignored = model, metrics, of_pairs, ignored
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = []  # arguments and outputs of the model for this batch
        self._values: dict[str, list[Any]] = {name: [] for name in metrics}  # per batch; tensors are read at the end
        self._samples: list[int] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep the outputs of the model for the metrics of a batch."""
        if not self.metrics:
            yield
            return

        def keep(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], outputs: Any) -> None:
            self._calls.append((args, {name: value for name, value in named.items() if name not in self.ignored}, outputs))

        handle = self.model.register_forward_hook(keep, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()
            self._calls.clear()

    def note(self, batch: Any, samples: int, *, where: str = "") -> None:
        """Compute the metrics of a batch whose loss was just computed. An error names the metric, and `where` the batch is from."""
        if not self.metrics:
            return
        for name, function in self.metrics.items():
            try:
                with unrecorded():
                    value = self._value(function, batch)
            except Exception as error:
                place = f" on {where}" if where else ""
                raise GrowthError(f"the metric {name!r} failed{place}: {type(error).__name__}: {error}") from error
            self._values[name].append(value.detach() if isinstance(value, Tensor) and value.numel() == 1 else as_number(name, value))
        self._samples.append(samples)
        self._calls.clear()

    def _value(self, function: Metric, batch: Any) -> Any:
        if not self.of_pairs:
            return function(_Replayed(self.model, self._calls), batch)
        if not self._calls:
            raise GrowthError("the model was not called")
        return function(self._calls[-1][2], batch[1])

    def mean(self, name: str) -> float:
        """Return the mean of a metric over all samples."""
        sums = [as_number(name, value) * samples for value, samples in zip(self._values[name], self._samples, strict=True)]
        return sum(sums) / sum(self._samples)

    def means(self) -> dict[str, float]:
        """Return the mean of every metric; nothing if there was no batch."""
        return {name: self.mean(name) for name in self.metrics} if self._samples else {}


class _Replayed:
    """The model as `fn(model, batch)` sees it: a call with arguments that it was called with before returns the outputs of that call."""

    def __init__(self, model: nn.Module, calls: list[tuple[tuple[Any, ...], dict[str, Any], Any]]) -> None:
        self._model, self._calls = model, list(calls)

    def __call__(self, *args: Any, **named: Any) -> Any:
        for old_args, old_named, outputs in self._calls:
            is_same = len(args) == len(old_args) and named.keys() == old_named.keys()
            if is_same and all(
                one is other for one, other in chain(zip(args, old_args, strict=True), ((named[key], old_named[key]) for key in named))
            ):
                return outputs
        with torch.no_grad():
            return self._model(*args, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def noting(evaluate: Callable[[], Any], metrics: Mapping[str, Any], values: dict[str, float]) -> Callable[[], Any]:
    """Return an evaluation that puts the metrics into `values` after its first pass, in which all seeds are on."""

    def evaluate_and_note() -> Any:
        losses = evaluate()
        losses = list(losses) if isinstance(losses, Iterator) else losses
        if not values:
            values.update({name: as_number(name, value() if callable(value) else value) for name, value in metrics.items()})
        return losses

    return evaluate_and_note


def averaged(values: dict[str, float], group: Group) -> dict[str, float]:
    """Return metrics averaged over the ranks that have them."""
    by_rank = group.gather_objects(values)
    return {name: fmean(rank[name] for rank in by_rank if name in rank) for name in values}
