"""A loader of batches from tensors in memory that can be saved and resumed in the middle of an epoch.

The order of samples depends only on seed and epoch, so the position in the data is a few numbers.

Shapes: M = samples, B = samples of one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from esper.rng import Streams
from esper.tasks.options import TaskError

Augmentation = Callable[[Tensor, torch.Generator], Tensor]  # (inputs [B, ...], CPU generator) -> changed inputs [B, ...]


def shuffled_order(num_samples: int, *, seed: int, epoch: int) -> Tensor:
    """Return the order of the samples in one epoch, int64 [M] on the CPU. It is the same for all devices."""
    return torch.randperm(num_samples, generator=Streams(seed).torch(f"data order of epoch {epoch}"), device="cpu")


def batch_bounds(num_samples: int, batch_size: int, *, drop_last: bool = False) -> list[tuple[int, int]]:
    """Return (start, stop) of every batch. A single remaining sample joins the batch before it, because batch norm cannot train on one.

    >>> batch_bounds(7, 3), batch_bounds(8, 3), batch_bounds(8, 3, drop_last=True)
    ([(0, 3), (3, 7)], [(0, 3), (3, 6), (6, 8)], [(0, 3), (3, 6)])
    """
    starts = list(range(0, num_samples, batch_size))
    rest = num_samples % batch_size
    if rest and (drop_last or (rest == 1 and len(starts) > 1)):
        starts.pop()
    stops = [*starts[1:], len(starts) * batch_size if drop_last else num_samples]
    return list(zip(starts, stops, strict=True))


class BatchLoader:
    """Yields the (inputs, targets) of one epoch: in a new order each time if there is a `seed`, else always in the given order.

    `state_dict` may be called at any time, also within an epoch; after `load_state_dict`, the next iteration yields the rest of that epoch.
    If the state was saved during the last batch, that rest is empty. An iteration that was left early is not continued: the next one is a
    new epoch. If there are two iterations at the same time, the state describes the newer one.

    Batches are copies on the device of the tensors, so changing them does not change the data.
    """

    def __init__(
        self,
        inputs: Tensor,  # [M, ...]
        targets: Tensor,  # [M, ...]
        *,
        batch_size: int,
        seed: int | None = None,
        drop_last: bool = False,
        augmentation: Augmentation | None = None,
    ) -> None:
        assert len(inputs) == len(targets) > 0
        assert augmentation is None or seed is not None, "augmentation needs a seed"
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise TaskError(f"a batch size is an int >= 1; got {batch_size!r}")
        if drop_last and batch_size > len(inputs):
            raise TaskError(f"with drop_last, batches of {batch_size} leave nothing of {len(inputs)} samples; use a smaller batch size")
        self.inputs, self.targets, self.batch_size, self.seed = inputs, targets, batch_size, seed
        self._bounds = batch_bounds(len(inputs), batch_size, drop_last=drop_last)
        self._augmentation = augmentation
        self._epoch = 0  # the current epoch, or the next one between two epochs
        self._position = 0  # batches of this epoch that were yielded
        self._is_loaded = False  # whether the position was loaded, so that the next iteration finishes that epoch
        self._iteration = 0  # number of iterations so far; an older iteration sees that it is not the newest

    @property
    def num_samples(self) -> int:
        return len(self.inputs)

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 0; between two epochs, the next one."""
        return self._epoch

    def __len__(self) -> int:
        """Return the number of batches in one epoch."""
        return len(self._bounds)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self._position and not self._is_loaded:  # the iteration before was left early: start the next epoch
            self._epoch, self._position = self._epoch + 1, 0
        self._is_loaded = False
        self._iteration += 1
        return self._batches(self._iteration, self._epoch, self._position)

    def _batches(self, iteration: int, epoch: int, position: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of an epoch from a position on. Only the newest iteration moves the position of the loader."""
        order = None if self.seed is None else shuffled_order(self.num_samples, seed=self.seed, epoch=epoch).to(self.inputs.device)
        for index in range(position, len(self)):
            batch = self._batch(order, epoch, index)
            if iteration == self._iteration:
                self._position = index + 1
            yield batch
        if iteration == self._iteration:
            self._epoch, self._position = epoch + 1, 0

    def _batch(self, order: Tensor | None, epoch: int, index: int) -> tuple[Tensor, Tensor]:
        start, stop = self._bounds[index]
        if order is None:
            return self.inputs[start:stop].clone(), self.targets[start:stop].clone()
        chosen = order[start:stop]
        inputs, targets = self.inputs[chosen], self.targets[chosen]
        if self._augmentation is not None and self.seed is not None:
            # Each batch has its own random stream, so that the draws do not depend on where an epoch was interrupted.
            inputs = self._augmentation(inputs, Streams(self.seed).torch(f"augmentation of epoch {epoch} batch {index}"))
        return inputs, targets

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, and the settings it depends on, as plain values."""
        return {"epoch": self._epoch, "position": self._position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position. The loader must have the same data, seed and batch size."""
        for name, own in self._identity().items():
            if state[name] != own:
                raise TaskError(f"the saved position was made with {name} {state[name]}, but this loader has {own}; use the saved value")
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._is_loaded = True
        self._iteration += 1

    def _identity(self) -> dict[str, Any]:
        """Return the settings that must be the same when a position is loaded."""
        return {
            "seed": self.seed,
            "num_samples": self.num_samples,
            "batch_size": self.batch_size,
            "batches": len(self),
            "augmented": self._augmentation is not None,
        }
