"""The memory of a fleet: how many bytes a host takes, how many are free, and an error that says how many hosts would fit.

Shapes: B = samples of a training batch.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from esper.fleet.config import FleetError
from esper.fleet.seed_groups import AnyKind, MakeRowOptimizer, SeedKind, SeedKinds, StackedSeed, least_width
from esper.fleet.stacked.lowering import Compute, Recompute, lower
from esper.fleet.stacked.rows import ModuleRows
from esper.fleet.stacked_model import Arrangement, StackedModel
from esper.fleet.width import Formations, WidthKind
from esper.gradients import LossScales


@dataclass(frozen=True)
class Memory:
    """Bytes of one host. `state` is computed; `step` and `seeds` are estimated from the tensors that autograd keeps for a backward pass."""

    state: int  # weights, buffers and moments with a seed in depth in every slot, in all copies: stored, training, and in every snapshot
    step: int  # a training step of the host alone
    seeds: int  # added by the largest seed in every slot to the step, and to the state if it is a width seed

    @property
    def least(self) -> int:
        """Bytes without seeds."""
        return self.state + self.step

    @property
    def most(self) -> int:
        """Bytes with the largest seed in every slot."""
        return self.state + self.step + self.seeds

    def __str__(self) -> str:
        return f"{in_words(self.state)} of state, {in_words(self.step)} for a step and up to {in_words(self.seeds)} for its seeds"


def in_words(count: int) -> str:
    """Return a number of bytes with a decimal unit.

    >>> in_words(1_500_000), in_words(20)
    ('1.5 MB', '20 B')
    """
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"


# Bytes that a host takes


def state_bytes(template: nn.Module, seed_kinds: SeedKinds, make: MakeRowOptimizer, *, scales: bool = False) -> int:
    """Return the bytes of one copy of a host's state, with room for the largest seed in depth in every slot."""
    # The tensors are on the meta device: they have sizes but no memory.
    rows = ModuleRows(template, 1, device="meta")
    dtype = rows.parameters.layout.dtype
    seeds = [torch.empty(1, least_width(kinds), dtype=dtype, device="meta") for kinds in seed_kinds.values()]
    learning = [rows.parameters.flat, *seeds]
    moments = [moment for flat in learning for moment in make(flat).state.values()]
    warmups = torch.empty(len(seeds), dtype=torch.int64, device="meta")
    loss_scales = LossScales.fresh(1, "meta").tensors.values() if scales else ()
    constants = [part.flat for part in rows.constants]
    return sum(tensor.nbytes for tensor in (*learning, *moments, *constants, warmups, *loss_scales))


def width_bytes(kind: WidthKind, seed_kinds: Mapping[str, AnyKind], make: MakeRowOptimizer) -> int:
    """Return the bytes that a width seed of this kind adds to one copy of the state of its slot, whose kinds are `seed_kinds`."""
    missing = max(kind.layout.width - least_width(seed_kinds), 0)
    row = torch.empty(1, missing, dtype=kind.place.dtype, device="meta")
    wider = [row, *(moment for moment in make(row).state.values() if moment.ndim > 1)]
    return sum(tensor.nbytes for tensor in wider) + kind.buffers.width * kind.place.dtype.itemsize


def step_bytes(
    template: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    precision: torch.dtype | None,
    *,
    slots: Collection[str],
    recomputes: bool,
    wider: tuple[Formations, WidthKind] | None = None,
) -> int:
    """Return the bytes of a training step of one host on samples like these, inputs [B, ...] and targets [B, ...].

    `wider` is a kind of width seed that the host has, and the formations of the fleet.
    """
    rows, seeds, arrangement = ModuleRows.of([template], device=inputs.device), list[StackedSeed](), None
    weights = [part.flat for part in rows.parts]
    if wider is not None:
        formations, kind = wider
        weights.append(torch.zeros(1, kind.layout.width, dtype=kind.place.dtype, device=inputs.device, requires_grad=True))
        buffers = torch.zeros(1, kind.buffers.width, dtype=kind.place.dtype, device=inputs.device)
        alpha = torch.ones(1, dtype=kind.place.dtype, device=inputs.device)
        seeds = [StackedSeed(kind.place, kind, weights[-1], alpha, None, [0], [1], buffers)]
        arrangement = Arrangement.of(formations, seeds, 1)

    def losses(recompute: Recompute) -> Tensor:
        recompute_or_not = recompute if recomputes else None
        stacked_model = StackedModel(lower(template, slots=slots), rows.tensors(), seeds, precision, recompute_or_not, arrangement)
        return stacked_model.losses(inputs.unsqueeze(1), targets.unsqueeze(1), training=True)

    with _own_random_state(inputs.device):
        return _backward_bytes(losses, apart_from=weights)


def seed_bytes(seed_kind: SeedKind, samples: int, precision: torch.dtype | None) -> int:
    """Return the bytes that one seed of this kind, in depth, adds to a training step on `samples` samples."""
    place = seed_kind.place
    h = torch.zeros(samples, 1, *place.shape, dtype=place.dtype, device=place.device, requires_grad=True)
    flat = torch.zeros(1, seed_kind.layout.width, dtype=place.dtype, device=place.device, requires_grad=True)

    def outputs(recompute: Recompute) -> Tensor:
        with torch.autocast(place.device.type, dtype=precision, enabled=precision is not None):
            return h + seed_kind.delta(flat, h)

    with _own_random_state(place.device):
        return _backward_bytes(outputs, apart_from=[h, flat])


@contextmanager
def _own_random_state(device: torch.device) -> Iterator[None]:
    """Compute with gradients, and restore torch's random state afterwards: a host with dropout draws from it."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
        yield


def _backward_bytes(compute: Callable[[Recompute], Tensor], *, apart_from: Iterable[Tensor]) -> int:
    """Return the bytes that autograd keeps for the backward pass of `compute`, plus its largest tensor once more.

    The largest tensor counts twice because its gradient has the same size. Tensors of `apart_from` do not count.

    `compute` is called with a function that runs the blocks whose activations are recomputed. Such a block keeps only its input. In the
    backward pass the blocks are recomputed one at a time, so the largest of them is added.
    """
    known = {tensor.untyped_storage().data_ptr() for tensor in apart_from}
    kept: dict[int, int] = {}  # address -> bytes
    blocks: list[dict[int, int]] = [{}]  # the same for each block that is recomputed, and an empty one, because there may be none

    def note(tensor: Tensor, sizes: dict[int, int]) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # a graph that holds its own outputs would never be freed

    def noting(sizes: dict[int, int]) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(lambda tensor: note(tensor, sizes), lambda tensor: tensor)

    def block(first: Compute, again: Compute, x: Tensor) -> Tensor:
        blocks.append({})
        with noting(blocks[-1]):
            note(x, kept)
            return first(x)

    with noting(kept):
        outcome = compute(block)
    assert outcome.requires_grad  # `outcome` holds the graph until here, so no address was used twice
    largest = max(max(sizes.values(), default=0) for sizes in (kept, *blocks))
    return sum(kept.values()) + max(sum(sizes.values()) for sizes in blocks) + largest


# Bytes that are free


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that this process can still allocate on a device; None where they cannot be found out."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    rooms = [*_room_of_machine(Path("/proc/meminfo")), *rooms_of_groups(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))]
    return min(rooms, default=None)


def _room_of_machine(table: Path) -> Iterator[int]:
    """Yield the available memory of the machine, from /proc/meminfo, if there is such a file."""
    for line in table.read_text().splitlines() if table.exists() else ():
        name, value = line.split(":", 1)
        if name == "MemAvailable":
            yield int(value.split()[0]) * 1024


# Controllers of a control group (v2: empty) -> file of its limit, file of its use, and name of the cached files in memory.stat.
_GROUP_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def rooms_of_groups(root: Path, membership: Path) -> Iterator[int]:
    """Yield the bytes left under the memory limit of each control group (v1 or v2) of this process: containers, batch jobs."""
    lines = membership.read_text().splitlines() if membership.exists() else []
    for _, controllers, own in (line.split(":", 2) for line in lines):
        if controllers in ("", "memory"):
            top = root / controllers
            group = top / own.lstrip("/")
            # Look at the group and all its parents. In a container the group's own folder may not exist: its files are in the topmost one.
            for folder in (group, *group.parents[: len(group.parts) - len(top.parts)]):
                yield from _room_of_group(folder, *_GROUP_FILES[controllers])


def _room_of_group(folder: Path, limit: str, used: str, cached: str) -> Iterator[int]:
    """Yield the bytes left under the limit of one group, if it has one. The system drops cached files when memory is needed."""
    if not (folder / limit).exists() or (most := (folder / limit).read_text().strip()) == "max":
        return
    statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    yield max(int(most) - int((folder / used).read_text()) + int(statistics.get(cached, 0)), 0)


# Errors


def check_fits(hosts: int, each: int, *, room: int | None, device: torch.device) -> None:
    """Raise FleetError if `hosts` hosts of `each` bytes do not fit into `room` bytes. None: the room is unknown, so nothing is checked."""
    if room is not None and hosts * each > room:
        raise FleetError(_too_many(hosts, each, room, device))


@contextmanager
def explained(hosts: int, memory: Callable[[], Memory], least: int, *, room: int | None, device: torch.device) -> Iterator[None]:
    """Turn an out-of-memory error inside the context into a FleetError that says how many hosts would fit.

    `room` is the number of free bytes before the fleet was made; None if it is unknown. `memory` is called to estimate the bytes of a host.
    Where even that runs out of memory, `least` is used.
    """
    try:
        yield
    except RuntimeError as error:
        # On a CPU, an error about memory has no class of its own, only a text.
        if not (isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)):
            raise
        traceback.clear_frames(error.__traceback__)  # free the tensors that the failed frames hold
        if device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            each = memory().most
        except torch.OutOfMemoryError:
            each = least
        raise FleetError(_too_many(hosts, each, room, device)) from error


def _too_many(hosts: int, each: int, room: int | None, device: torch.device) -> str:
    """Return the message of the error for `hosts` hosts of `each` bytes. None: the room is unknown."""
    if room is None:
        free = f"the free memory of {device} is unknown"
    else:
        fitting = min(room // each, hosts - 1)  # an estimate: all of them did not fit
        free = f"{device} had {in_words(room)} for them; {fitting or 'not even one'} would fit"
    return (
        f"{hosts} hosts do not fit: one takes about {in_words(each)}, and {free}. Take fewer hosts, a smaller batch_size, "
        "a larger accumulate, checkpoint = true, or governor.keep = 1"
    )
