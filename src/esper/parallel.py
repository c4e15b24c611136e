"""Training on several processes at once, each with environments of its own: what they exchange.

    torchrun --nproc-per-node 2 --no-python -- esper ppo train cue          # the lonely -- leaves our options to us

Every rank computes its share of every sum; divided by the counts of all ranks, the shares add up to what one rank with all the
environments would have computed. So weights, normalisers and decisions are the same everywhere, and what is sent is mostly sums.

Every method is called by all ranks, in the same order. Alone, they all give back what they were given.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from esper.runs.tensors import Tree, join, split
from esper.statistics import Sums, combine

Value = TypeVar("Value")


class GroupError(ValueError):
    """A group that cannot be, with the reason and what to do."""


class FirstFailed(RuntimeError):
    """Rank 0 failed at something that all ranks depend on. It raises the error itself, so nobody else needs to tell of it."""


class Group:
    """All ranks of a training; this class is the one that trains alone."""

    rank = 0
    world_size = 1

    def place(self, device: torch.device) -> torch.device:
        """The device of this rank among those of a kind."""
        return device

    def sum_(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        return tensor

    def gather(self, tensors: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """The tensors of every rank, in one transfer. Floating-point, and of the same shapes everywhere."""
        return [tensors]

    def gather_objects(self, value: Value) -> list[Value]:
        """What every rank gave. Small things only: they are pickled, and the device is read."""
        return [value]

    def gather_trees(self, state: Tree) -> list[Tree]:
        """The states of every rank, as checkpoints hold them."""
        return [state]

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Overwrites the tensors with those of rank 0."""

    def first(self, make: Callable[[], Value]) -> Value:
        """What `make()` gives on rank 0. It runs only there; where it raises, the other ranks raise FirstFailed."""
        return make()

    def any(self, flag: bool) -> bool:
        """Whether it is true on some rank."""
        return any(self.gather_objects(flag))

    def merge(self, sums: Sequence[Sums]) -> list[Sums]:
        """Each of these sums over the rows of all ranks."""
        by_rank = self.gather([part for some in sums for part in some])
        starts = range(0, len(Sums._fields) * len(sums), len(Sums._fields))
        return [functools.reduce(combine, (Sums(*parts[start : start + len(Sums._fields)]) for parts in by_rank)) for start in starts]

    @contextlib.contextmanager
    def only_first(self, make: Callable[[], AbstractContextManager[Value]]) -> Iterator[Value | None]:
        """Enters `make()` on rank 0, and nothing elsewhere. Errors on the way in are those of `first`."""
        with ExitStack() as stack:
            entered: list[Value] = []
            self.first(lambda: entered.append(stack.enter_context(make())))
            yield entered[0] if entered else None


ALONE = Group()
_PATIENCE = timedelta(days=30)


class Ranks(Group):
    """The ranks of torch.distributed, which has been initialised. Tensors live on a device that its backend takes."""

    def __init__(self, *, local_rank: int = 0) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.local_rank = local_rank  # on its machine
        # What rank 0 does alone, such as an evaluation, may take longer than the backend lets a collective wait.
        self.patient = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def place(self, device: torch.device) -> torch.device:
        return torch.device("cuda", self.local_rank) if device.type == "cuda" else device

    def sum_(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor)
        return tensor

    def gather(self, tensors: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        if not tensors:
            return [[] for _ in range(self.world_size)]
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        rows = [torch.empty_like(flat) for _ in range(self.world_size)]
        dist.all_gather(rows, flat)
        sizes = [tensor.numel() for tensor in tensors]
        return [
            [part.view(like.shape).to(like.dtype) for part, like in zip(row.split_with_sizes(sizes), tensors, strict=True)] for row in rows
        ]

    def gather_objects(self, value: Value) -> list[Value]:
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def gather_trees(self, state: Tree) -> list[Tree]:
        return [join(*parts) for parts in self.gather_objects(split(state))]  # on the CPU: the devices of others are not ours

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor, src=0)

    def first(self, make: Callable[[], Value]) -> Value:
        answer: list[Any] = [None, ""]  # the value, and the text of an error
        if self.rank > 0:
            dist.broadcast_object_list(answer, src=0, group=self.patient)
            if answer[1]:
                raise FirstFailed(answer[1])
        else:
            try:
                answer[0] = make()
            except Exception as error:
                answer[1] = f"{type(error).__name__}: {error}"
                raise
            finally:
                dist.broadcast_object_list(answer, src=0, group=self.patient)
        value: Value = answer[0]
        return value


@contextlib.contextmanager
def joined(device: torch.device) -> Iterator[Group]:
    """The group that torchrun started this process for, to compute on this kind of device; alone where it was not torchrun."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield ALONE
        return
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device.type == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise GroupError(
                f"rank {os.environ['RANK']} would compute on cuda:{local_rank}, and this machine has {torch.cuda.device_count()} of them; "
                "start fewer processes per machine, or use device 'cpu'"
            )
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Ranks(local_rank=local_rank)
    finally:
        dist.destroy_process_group()
