"""Communication between the ranks of a training run: several processes, each with its own environments.

    torchrun --nproc-per-node 2 --no-python -- esper ppo train cue          # `--` separates torchrun's options from esper's

Ranks on GPUs have one each. If there are more ranks than GPUs, several share one.

Every rank computes sums over its own environments. Their total over all ranks, divided by the total count, is the mean that one process
with all environments would compute. So weights, normalisers and decisions are the same on all ranks.

All ranks must call the methods of their group in the same order. `ALONE` is the group of a single process: its methods return their input.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from esper.runs.tensors import Tree, join, split
from esper.statistics import Sums, combine

Value = TypeVar("Value")


class FirstRankFailed(RuntimeError):
    """Raised on all other ranks when rank 0 failed at something they depend on. Rank 0 raises and reports the original error."""


class RankLost(RuntimeError):
    """Another rank ended in the middle of the training. The message names its process."""


class Group:
    """The ranks of a training run, seen from one of them. This base class is the group of a single process."""

    rank = 0
    world_size = 1

    def place(self, device: torch.device) -> torch.device:
        """Return the device of this rank, such as "cuda:1", given the kind of device."""
        return device

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replace the tensor by its sum over all ranks, and return it."""
        return tensor

    def gather(self, tensors: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """Return the tensors of every rank, in one transfer. They must be floating-point and have the same shapes on all ranks."""
        return [tensors]

    def gather_objects(self, value: Value) -> list[Value]:
        """Return the value of every rank. For small values only: they are pickled, and this waits for the device."""
        return [value]

    def gather_trees(self, state: Tree) -> list[Tree]:
        """Return the state of every rank, with tensors on the CPU, as in a checkpoint."""
        return [state]

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite the tensors with those of rank 0."""

    def first(self, make: Callable[[], Value]) -> Value:
        """Run `make()` on rank 0 only, and return its result on all ranks. If it raises, the other ranks raise FirstRankFailed."""
        return make()

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is true on any rank."""
        return any(self.gather_objects(flag))

    def merge(self, sums: Sequence[Sums]) -> list[Sums]:
        """Return each of the sums combined over all ranks."""
        # Send the fields of all sums as one flat list, then cut it into sums again.
        by_rank = self.gather([part for some in sums for part in some])
        starts = range(0, len(Sums._fields) * len(sums), len(Sums._fields))
        return [functools.reduce(combine, (Sums(*parts[start : start + len(Sums._fields)]) for parts in by_rank)) for start in starts]

    @contextlib.contextmanager
    def only_first(self, make: Callable[[], AbstractContextManager[Value]]) -> Iterator[Value | None]:
        """Enter the context `make()` on rank 0, and yield None on the other ranks. Errors on entry are raised as in `first`."""
        with ExitStack() as stack:
            entered: list[Value] = []
            self.first(lambda: entered.append(stack.enter_context(make())))
            yield entered[0] if entered else None


ALONE = Group()
_PATIENCE = timedelta(days=30)  # timeout of `Ranks.first`
_ENDING_S = 2.0  # until the process of a lost rank has ended
_LOST = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|socket", re.IGNORECASE)  # in texts of the backends


class Ranks(Group):
    """The ranks of torch.distributed, which must be initialised. Tensors must be on a device that its backend supports."""

    def __init__(self, *, local_rank: int = 0) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.local_rank = local_rank  # rank among the processes of this machine
        # A separate group with a long timeout: rank 0's work in `first`, such as an evaluation, may exceed the backend's usual timeout.
        self.patient = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self._processes = [(socket.gethostname(), os.getpid())] * self.world_size  # machine and process of every rank
        self._processes = self.gather_objects((socket.gethostname(), os.getpid()))

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        """Turn the error of a transfer that another rank did not live to see into RankLost."""
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and not _LOST.search(str(error)):
                raise
            raise RankLost(f"{self._who_ended()}, so the training cannot go on") from error

    def _who_ended(self) -> str:
        """Name the ranks whose processes have ended; those of other machines cannot be seen from here."""
        machine = socket.gethostname()
        end = time.monotonic() + _ENDING_S
        while not (gone := [rank for rank, (at, process) in enumerate(self._processes) if at == machine and not _lives(process)]):
            if time.monotonic() > end:
                return "another rank has ended or cannot be reached"
            time.sleep(0.05)
        return " and ".join(f"rank {rank} (process {self._processes[rank][1]}) has ended" for rank in gone)

    def place(self, device: torch.device) -> torch.device:
        return gpu_of(self.local_rank) if device.type == "cuda" else device

    def sum_(self, tensor: Tensor) -> Tensor:
        with self._reached():
            dist.all_reduce(tensor)
        return tensor

    def gather(self, tensors: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        if not tensors:
            return [[] for _ in range(self.world_size)]
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        rows = [torch.empty_like(flat) for _ in range(self.world_size)]
        with self._reached():
            dist.all_gather(rows, flat)
        sizes = [tensor.numel() for tensor in tensors]
        return [
            [part.view(like.shape).to(like.dtype) for part, like in zip(row.split_with_sizes(sizes), tensors, strict=True)] for row in rows
        ]

    def gather_objects(self, value: Value) -> list[Value]:
        values: list[Any] = [None] * self.world_size
        with self._reached():
            dist.all_gather_object(values, value)
        return values

    def gather_trees(self, state: Tree) -> list[Tree]:
        return [join(*parts) for parts in self.gather_objects(split(state))]  # `split` moves tensors to the CPU: devices differ by rank

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        with self._reached():
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def first(self, make: Callable[[], Value]) -> Value:
        answer: list[Any] = [None, ""]  # value, text of an error
        if self.rank > 0:
            with self._reached():
                dist.broadcast_object_list(answer, src=0, group=self.patient)
            if answer[1]:
                raise FirstRankFailed(answer[1])
        else:
            try:
                answer[0] = make()
            except BaseException as error:  # Ctrl-C too: without a text, the other ranks would go on without a value
                answer[1] = ": ".join(filter(None, (type(error).__name__, str(error))))
                raise
            finally:
                with self._reached():
                    dist.broadcast_object_list(answer, src=0, group=self.patient)
        value: Value = answer[0]
        return value


def _lives(process: int) -> bool:
    """Return whether a process of this machine runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gpu_of(local_rank: int) -> torch.device:
    """Return the GPU of a rank of this machine. If there are more ranks than GPUs, several share one."""
    return torch.device("cuda", local_rank % torch.cuda.device_count())


@contextlib.contextmanager
def joined(device: torch.device) -> Iterator[Group]:
    """Join the group of ranks that torchrun started, for this kind of device. Yield ALONE if torchrun did not start this process."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield ALONE
        return
    local_rank, local_ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(gpu_of(local_rank))
        backend = "nccl" if local_ranks <= torch.cuda.device_count() else "gloo"  # NCCL refuses ranks that share a GPU
    try:
        dist.init_process_group(backend)
    except dist.DistError as error:
        raise RankLost("the ranks did not find each other: another one has ended, or its address cannot be reached") from error
    try:
        yield Ranks(local_rank=local_rank)
    finally:
        dist.destroy_process_group()
