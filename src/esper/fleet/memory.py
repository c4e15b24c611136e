"""How much memory a host of a fleet takes, and how many fit.

Shapes: B = samples of a training batch.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from esper.fleet.config import FleetError
from esper.fleet.optimizers import LossScales
from esper.fleet.seed_groups import MakeRowOptimizer, SeedKind, SeedKinds
from esper.fleet.stacked.lowering import Compute, Recompute, lower
from esper.fleet.stacked.rows import ModuleRows
from esper.fleet.stacked_model import StackedModel


@dataclass(frozen=True)
class Memory:
    """Bytes for one host. `state` is counted, the others are what a backward pass was seen to keep, and the largest of it once more."""

    state: int  # weights, buffers and moments, with room for a seed in every slot: as they are, as they train, and in every snapshot
    step: int  # of a training step of the host alone
    seeds: int  # of the same step beyond that, with the largest seed in every slot

    @property
    def least(self) -> int:
        return self.state + self.step

    @property
    def most(self) -> int:
        return self.state + self.step + self.seeds

    def __str__(self) -> str:
        return f"{in_words(self.state)} of state, {in_words(self.step)} for a step and up to {in_words(self.seeds)} for its seeds"


def in_words(count: int) -> str:
    """
    >>> in_words(1_500_000), in_words(20)
    ('1.5 MB', '20 B')
    """
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"


# What it takes


def state_bytes(template: nn.Module, seed_kind: SeedKinds, make: MakeRowOptimizer, *, scales: bool = False) -> int:
    """Of one row of a fleet."""
    rows = ModuleRows(template, 1, device="meta")
    widest = [max((one.layout for one in some.values()), key=lambda layout: layout.width) for some in seed_kind.values()]
    learning = [rows.parameters.flat, *(torch.empty(1, layout.width, dtype=layout.dtype, device="meta") for layout in widest)]
    moments = [moment for flat in learning for moment in make(flat).state.values()]
    warmups = torch.empty(len(widest), dtype=torch.int64, device="meta")
    of_loss = LossScales.fresh(1, "meta").tensors.values() if scales else ()
    return sum(tensor.nbytes for tensor in (*learning, *moments, *(part.flat for part in rows.constants), warmups, *of_loss))


def step_bytes(
    template: nn.Module, inputs: Tensor, targets: Tensor, precision: torch.dtype | None, *, slots: Collection[str], recomputes: bool
) -> int:
    """Of a training step of one host on samples such as these, inputs [B, ...] and targets [B, ...]."""
    rows = ModuleRows.of([template], device=inputs.device)

    def losses(recompute: Recompute) -> Tensor:
        stacked_model = StackedModel(lower(template, slots=slots), rows.tensors(), [], precision, recompute if recomputes else None)
        return stacked_model.losses(inputs.unsqueeze(1), targets.unsqueeze(1), training=True)

    with _undisturbed(inputs.device):
        return _kept(losses, apart_from=[part.flat for part in rows.parts])


def seed_bytes(seed_kind: SeedKind, samples: int, precision: torch.dtype | None) -> int:
    """What one seed adds to a training step."""
    place = seed_kind.place
    h = torch.zeros(samples, 1, *place.shape, dtype=place.dtype, device=place.device, requires_grad=True)
    flat = torch.zeros(1, seed_kind.layout.width, dtype=place.dtype, device=place.device, requires_grad=True)

    def act(recompute: Recompute) -> Tensor:
        with torch.autocast(place.device.type, dtype=precision, enabled=precision is not None):
            return h + seed_kind.delta(seed_kind.layout.unflatten(flat), h)

    with _undisturbed(place.device):
        return _kept(act, apart_from=[h, flat])


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """A host with dropout draws random numbers, which must not change what comes after."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
        yield


def _kept(compute: Callable[[Recompute], Tensor], *, apart_from: Iterable[Tensor]) -> int:
    """What autograd keeps for the backward pass, and its largest part once more: a gradient on its way through.

    `compute` is given what to run the blocks by that keep no more than their input: they are here again one at a time, the largest counts.
    """
    known = {tensor.untyped_storage().data_ptr() for tensor in apart_from}
    kept: dict[int, int] = {}  # by place in memory
    blocks: list[dict[int, int]] = [{}]

    def note(tensor: Tensor, sizes: dict[int, int]) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    def noting(sizes: dict[int, int]) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(lambda tensor: note(tensor, sizes), lambda tensor: tensor)

    def block(first: Compute, again: Compute, x: Tensor) -> Tensor:
        blocks.append({})
        with noting(blocks[-1]):
            return first(note(x, kept))

    with noting(kept):
        outcome = compute(block)
    assert outcome.requires_grad  # and holds all of it until here, so that no two of them had the same place
    largest = max(max(sizes.values(), default=0) for sizes in (kept, *blocks))
    return sum(kept.values()) + max(sum(sizes.values()) for sizes in blocks) + largest


# What there is


def free_bytes(device: torch.device) -> int | None:
    """That a program can still have; None where nobody knows."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    rooms = [*_room_of_machine(Path("/proc/meminfo")), *rooms_of_groups(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))]
    return min(rooms, default=None)


def _room_of_machine(table: Path) -> Iterator[int]:
    for line in table.read_text().splitlines() if table.exists() else ():
        name, value = line.split(":", 1)
        if name == "MemAvailable":
            yield int(value.split()[0]) * 1024


def rooms_of_groups(root: Path, membership: Path) -> Iterator[int]:
    """What the limits of containers and batch jobs leave, those of all control groups that this process is in, of version 2 or 1."""
    lines = membership.read_text().splitlines() if membership.exists() else []
    for _, controllers, own in (line.split(":", 2) for line in lines):
        if controllers in ("", "memory"):
            top = root / controllers
            group = top / own.lstrip("/")
            # A container sees its own group as the topmost, whatever the name by which the machine knows it.
            for folder in (group, *group.parents[: len(group.parts) - len(top.parts)]):
                yield from _room_of_group(folder, *(_GROUP_FILES[controllers]))


# By version: the limit, what is used of it, and what of that is files that the system forgets where memory is needed.
_GROUP_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def _room_of_group(folder: Path, limit: str, used: str, forgettable: str) -> Iterator[int]:
    if not (folder / limit).exists() or (most := (folder / limit).read_text().strip()) == "max":
        return
    statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    yield max(int(most) - int((folder / used).read_text()) + int(statistics.get(forgettable, 0)), 0)


def check_fits(hosts: int, each: int, *, room: int | None, device: torch.device) -> None:
    """Raises FleetError where there is no room for so many hosts of `each` bytes; a room of None is as large as it needs to be."""
    if room is not None and hosts * each > room:
        raise FleetError(_too_many(hosts, each, room // each, room, device))


@contextmanager
def explained(hosts: int, memory: Callable[[], Memory], least: int, *, room: int | None, device: torch.device) -> Iterator[None]:
    """Inside, a device that is out of memory is told by a FleetError that says how many hosts would fit. `room` was there before them.

    Where there is not even room to find out, a host takes the `least` that is known.
    """
    try:
        yield
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # what they hold is what there was no room for
        if device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            each = memory().most
        except torch.OutOfMemoryError:
            each = least
        room = room or 0
        raise FleetError(_too_many(hosts, each, min(room // each, hosts - 1), room, device)) from error


def _is_out_of_memory(error: RuntimeError) -> bool:
    """A CPU says so in words."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _too_many(hosts: int, each: int, fitting: int, room: int, device: torch.device) -> str:
    return (
        f"{hosts} hosts do not fit: one takes about {in_words(each)}, and {device} had {in_words(room)} for them; "
        f"{fitting or 'not even one'} would fit. Take fewer hosts, a smaller batch_size, accumulate, checkpoint, or governor.keep = 1"
    )
