"""Batches from tensors in memory, in an order that is a pure function of seed and epoch, so that a loader resumes from three numbers.

Shapes: M = samples, B = samples of one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from esper.rng import Streams
from esper.tasks.errors import TaskError

Augmentation = Callable[[Tensor, torch.Generator], Tensor]  # inputs [B, ...] and a generator of the CPU -> changed inputs [B, ...]


def shuffled_order(num_samples: int, *, seed: int, epoch: int) -> Tensor:
    """The order in which the loader of this seed gives the samples in this epoch: int64 [M] on the CPU, the same for all devices."""
    return torch.randperm(num_samples, generator=Streams(seed).torch(f"data order of epoch {epoch}"), device="cpu")


def batch_bounds(num_samples: int, batch_size: int, *, drop_last: bool = False) -> list[tuple[int, int]]:
    """First and last + 1 of every batch. A rest of one sample joins the batch before it, since batch norm cannot train on one.

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
    """Iterating gives the (inputs, targets) of one epoch; with a `seed` in a new order each time, without one always in the given order.

    `state_dict` may be taken anywhere, also within an epoch; after `load_state_dict` the next iteration gives the rest of that epoch. A
    state taken while the last batch was at work has no rest: the next iteration is empty, as the rest of that loop would have been.
    An iteration that was broken off is not taken up again: the next one is a new epoch. With two at once, the state follows the newer.

    Batches are copies, on the device of the tensors; whatever is done to them leaves the data as they are.
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
        self._epoch = 0  # the one that runs, or the next one where none runs
        self._position = 0  # batches of it that were given
        self._is_loaded = False  # the position comes from a state whose epoch is still to be finished
        self._iteration = 0  # counts them, so that an older one knows that it is not the newest

    @property
    def num_samples(self) -> int:
        return len(self.inputs)

    @property
    def epoch(self) -> int:
        """The epoch that runs, from 0; between two epochs the next one."""
        return self._epoch

    def __len__(self) -> int:
        """Batches of one epoch."""
        return len(self._bounds)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self._position and not self._is_loaded:
            self._epoch, self._position = self._epoch + 1, 0
        self._is_loaded = False
        self._iteration += 1
        return self._batches(self._iteration, self._epoch, self._position)

    def _batches(self, iteration: int, epoch: int, position: int) -> Iterator[tuple[Tensor, Tensor]]:
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
            # A stream for each batch: what an epoch draws does not depend on where it was interrupted.
            inputs = self._augmentation(inputs, Streams(self.seed).torch(f"augmentation of epoch {epoch} batch {index}"))
        return inputs, targets

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is, and what that depends on; plain values."""
        return {"epoch": self._epoch, "position": self._position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state_dict` was taken, on a loader of the same data, seed and batch size."""
        for name, own in self._identity().items():
            if state[name] != own:
                raise TaskError(f"the saved place in the data was made with {name} {state[name]}, this loader has {own}; use the saved one")
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._is_loaded = True
        self._iteration += 1

    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "num_samples": self.num_samples,
            "batch_size": self.batch_size,
            "batches": len(self),
            "augmented": self._augmentation is not None,
        }
