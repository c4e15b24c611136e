"""Draws the cells and hosts of one round of training from the ranges of a `DomainConfig`.

The hosts of a fleet are of variants of one cell, because they are one tensor program. Groups of hosts share everything but the rent and the
seed of their growth: variant, initialisation, data and order are the same, so that one twin serves the whole group.

A draw depends only on the seed, the round and the config, so a resumed run needs no saved state for it. Each quantity has a random stream
of its own, so adding hosts to a fleet does not change its first ones. Seeds below HELD_OUT_SEEDS are never drawn; comparisons use them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from esper.controller.cells import Cell, draw_cell, draw_variant
from esper.controller.config import HELD_OUT_SEEDS, ControllerConfig, DomainConfig, rent_at
from esper.fleet.config import HostConfig
from esper.growth.config import RentConfig
from esper.rng import Streams

SEED_LIMIT = 2**31  # host seeds are below this, so that every random generator accepts them


@dataclass(frozen=True, slots=True)
class DrawnHost:
    """Cell, random seeds and rent of one host."""

    cell: Cell  # a variant of the cell of its fleet
    seed: int  # hosts of the same seed share a twin
    growth_seed: int
    rent: RentConfig


@dataclass(frozen=True, slots=True)
class FleetSetting:
    """The hosts of one fleet."""

    cell: Cell  # as that of the hosts, but for the number of samples and the learning rate
    hosts: tuple[DrawnHost, ...]

    @property
    def horizon(self) -> int:
        return self.cell.horizon

    def host_configs(self, samples: int) -> list[HostConfig]:
        """Return the settings of the hosts, for a task with this many training samples."""
        return [host.cell.host_config(host.seed, samples, rent=host.rent, growth_seed=host.growth_seed) for host in self.hosts]


def draw_round(config: ControllerConfig, *, round_number: int, seed: int) -> list[FleetSetting]:
    """Return the settings of a round's fleets, each of another cell. The hosts of the config are divided as evenly as possible."""
    count = min(config.fleets, config.hosts)
    sizes = [len(share) for share in np.array_split(np.arange(config.hosts), count)]
    streams = Streams(seed).spawn(f"round {round_number}")
    cells = [draw_cell(config.domain, number=round_number * count + number, seed=seed) for number in range(count)]
    return [
        FleetSetting(
            cell, draw_hosts(config.domain, cell, size, hosts_per_twin=config.hosts_per_twin, streams=streams.spawn(f"fleet {number}"))
        )
        for number, (cell, size) in enumerate(zip(cells, sizes, strict=True))
    ]


def draw_hosts(domain: DomainConfig, cell: Cell, count: int, *, hosts_per_twin: int, streams: Streams) -> tuple[DrawnHost, ...]:
    """Draw the variants and seeds of hosts, one for each group with a common twin, and for every host a seed of its growth and a price."""
    seeds, rng = _draw_seeds(streams, math.ceil(count / hosts_per_twin), "host seeds"), streams.numpy("variants")
    variants = [draw_variant(cell, domain, rng) for _ in seeds]
    growth_seeds = _draw_seeds(streams, count, "growth seeds")
    low, high = map(math.log, domain.price)
    prices = np.exp(streams.numpy("price").uniform(low, high, size=count))
    drawn = zip(growth_seeds, prices, strict=True)
    return tuple(
        DrawnHost(variants[number // hosts_per_twin], seeds[number // hosts_per_twin], growth_seed, rent_at(float(price)))
        for number, (growth_seed, price) in enumerate(drawn)
    )


def _draw_seeds(streams: Streams, count: int, name: str) -> list[int]:
    return [int(seed) for seed in streams.numpy(name).integers(HELD_OUT_SEEDS, SEED_LIMIT, size=count)]
