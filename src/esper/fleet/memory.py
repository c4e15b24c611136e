"""How much memory a host of a fleet takes, and how many fit.

Shapes: B = samples of a training batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from esper.fleet.ensemble import Ensemble
from esper.fleet.errors import FleetError
from esper.fleet.formation import SpeciesOf
from esper.fleet.lowering import lower
from esper.fleet.rows import ModuleRows
from esper.fleet.seeds import MakeRowOptimizer, Species


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


def state_bytes(template: nn.Module, species: SpeciesOf, make: MakeRowOptimizer) -> int:
    """Of one row of a fleet."""
    rows = ModuleRows(template, 1, device="meta")
    widest = [max((one.layout for one in some.values()), key=lambda layout: layout.width) for some in species.values()]
    learning = [rows.parameters.flat, *(torch.empty(1, layout.width, dtype=layout.dtype, device="meta") for layout in widest)]
    moments = [moment for flat in learning for moment in make(flat).state.values()]
    warmups = torch.empty(len(widest), dtype=torch.int64, device="meta")
    return sum(tensor.nbytes for tensor in (*learning, *moments, *(part.flat for part in rows.constants), warmups))


def step_bytes(template: nn.Module, inputs: Tensor, targets: Tensor, precision: torch.dtype | None) -> int:
    """Of a training step of one host on samples such as these, inputs [B, ...] and targets [B, ...]."""
    rows = ModuleRows.of([template], device=inputs.device)
    ensemble = Ensemble(lower(template), rows.tensors(), [], precision)
    with _undisturbed(inputs.device):
        return _kept(
            lambda: ensemble.losses(inputs.unsqueeze(1), targets.unsqueeze(1), training=True), apart_from=[part.flat for part in rows.parts]
        )


def seed_bytes(species: Species, samples: int, precision: torch.dtype | None) -> int:
    """What one seed adds to a training step."""
    place = species.place
    h = torch.zeros(samples, 1, *place.shape, dtype=place.dtype, device=place.device, requires_grad=True)
    flat = torch.zeros(1, species.layout.width, dtype=place.dtype, device=place.device, requires_grad=True)

    def act() -> Tensor:
        with torch.autocast(place.device.type, dtype=precision, enabled=precision is not None):
            return h + species.delta(species.layout.unflatten(flat), h)

    with _undisturbed(place.device):
        return _kept(act, apart_from=[h, flat])


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """A host with dropout draws random numbers, which must not change what comes after."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
        yield


def _kept(compute: Callable[[], Tensor], *, apart_from: Iterable[Tensor]) -> int:
    """What autograd keeps for the backward pass, and its largest part once more: a gradient on its way through."""
    known = {tensor.untyped_storage().data_ptr() for tensor in apart_from}
    sizes: dict[int, int] = {}

    def see(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        outcome = compute()
    assert outcome.requires_grad  # and holds all of it until here, so that no two of them had the same place
    return sum(sizes.values()) + max(sizes.values(), default=0)


# What there is


def free_bytes(device: torch.device) -> int | None:
    """That a program can still have; None where nobody knows."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    table = Path("/proc/meminfo")
    if device.type != "cpu" or not table.exists():
        return None
    lines = dict(line.split(":", 1) for line in table.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in lines else None


def check_fits(hosts: int, each: int, *, room: int | None, device: torch.device) -> None:
    """Raises FleetError where there is no room for so many hosts of `each` bytes; a room of None is as large as it needs to be."""
    if room is not None and hosts * each > room:
        raise FleetError(_too_many(hosts, each, room // each, room, device))


@contextmanager
def explained(hosts: int, memory: Callable[[], Memory], *, room: int | None, device: torch.device) -> Iterator[None]:
    """Inside, a device that is out of memory is told by a FleetError that says how many hosts would fit. `room` was there before them."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        each, room = memory().most, room or 0
        raise FleetError(_too_many(hosts, each, min(room // each, hosts - 1), room, device)) from error


def _too_many(hosts: int, each: int, fitting: int, room: int, device: torch.device) -> str:
    return (
        f"{hosts} hosts do not fit: one takes about {in_words(each)}, and {device} had {in_words(room)} for them; "
        f"{fitting or 'not even one'} would fit. Take fewer hosts, a smaller batch_size, or governor.keep = 1"
    )
