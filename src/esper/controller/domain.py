"""The hosts of one round of training, drawn from what a `DomainConfig` allows, and those that are held out for comparisons.

The hosts of a fleet share an architecture, because they are one tensor program, and a horizon, because one that stopped early would be
carried along frozen. Groups of them share all but the rent: the same initialisation, data and order, so that one never-grow twin serves
them all. Everything else differs from group to group.

A draw depends on the seed, the round and the config alone, and each quantity has a stream of its own: more hosts leave the first ones as
they are, and a run that is resumed needs no state of this.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from esper.controller.config import HELD_OUT_SEEDS, RENT_LEVELS, DomainConfig
from esper.fleet.config import HostSetting
from esper.growth.config import Rent
from esper.rng import Streams

Floats = NDArray[np.float64]

SEED_LIMIT = 2**31  # of host seeds, so that anything takes them


@dataclass(frozen=True, slots=True)
class FleetSetting:
    """Hosts of one architecture and one horizon."""

    task: str
    host: str  # channels of its blocks, such as "4-8-16"
    hosts: tuple[HostSetting, ...]

    def __post_init__(self) -> None:
        assert len({host.horizon for host in self.hosts}) == 1

    @property
    def horizon(self) -> int:
        return self.hosts[0].horizon


def draw_round(config: DomainConfig, *, round_number: int, hosts: int, seed: int) -> list[FleetSetting]:
    """The fleets of a round, each of another architecture; `hosts` is shared out as evenly as it goes."""
    if hosts < 1:
        raise ValueError(f"a round needs one host at least; got hosts={hosts}")
    streams = Streams(seed).spawn(f"round {round_number}")
    count = min(config.fleets, hosts, len(config.tasks) * len(config.hosts))
    architectures = _draw_architectures(config, round_number=round_number, count=count, seed=seed)
    sizes = [len(share) for share in np.array_split(np.arange(hosts), count)]
    return [
        _draw_fleet(config, *architecture, hosts=size, streams=streams.spawn(f"fleet {number}"))
        for number, (architecture, size) in enumerate(zip(architectures, sizes, strict=True))
    ]


def training_seeds(count: int, *, seed: int) -> list[int]:
    """Host seeds for whoever has to be tuned before it is compared. None is held out."""
    return _draw_seeds(Streams(seed), count)


# Drawing


def _draw_architectures(config: DomainConfig, *, round_number: int, count: int, seed: int) -> list[tuple[str, str]]:
    """Tasks take turns, and no architecture comes twice before all have come, less those that do not fill a round.

    A policy leans towards what it saw last: were every round drawn by itself, the end of a training could be all one task.
    """
    cycle, place = divmod(round_number, len(config.tasks) * len(config.hosts) // count)
    streams = Streams(seed).spawn(f"cycle {cycle}")
    turns = Streams(seed).numpy("tasks").permutation(len(config.tasks))
    hosts = {task: streams.numpy(f"hosts of {task}").permutation(len(config.hosts)) for task in config.tasks}
    order = [(config.tasks[turn], config.hosts[hosts[config.tasks[turn]][number]]) for number in range(len(config.hosts)) for turn in turns]
    return order[place * count : (place + 1) * count]


def _draw_fleet(config: DomainConfig, task: str, host: str, *, hosts: int, streams: Streams) -> FleetSetting:
    least, most = config.horizon
    horizon = int(streams.numpy("horizon").integers(least, most, endpoint=True))
    groups = math.ceil(hosts / config.hosts_per_twin)
    is_plain = streams.numpy("plain").random(groups) < config.plain_share
    seeds = _draw_seeds(streams, groups)
    rates = [_log_between(*config.learning_rate, share) for share in _uniform(streams, "learning rate", 0.0, 1.0, groups)]
    noise = np.where(is_plain, 0.0, _uniform(streams, "label noise", *config.label_noise, groups))
    data = np.where(is_plain, 1.0, _uniform(streams, "data share", *config.data_share, groups))
    classes = np.where(is_plain, 1.0, _uniform(streams, "classes share", *config.classes_share, groups))
    rents, growth_seeds = _draw_rents(config, streams, hosts), _draw_seeds(streams, hosts, "growth seeds")
    drawn = [
        HostSetting(
            seed=seeds[number // config.hosts_per_twin],
            growth_seed=growth_seed,
            horizon=horizon,
            learning_rate=rates[number // config.hosts_per_twin],
            label_noise=float(noise[number // config.hosts_per_twin]),
            data_share=float(data[number // config.hosts_per_twin]),
            classes_share=float(classes[number // config.hosts_per_twin]),
            rent=rent,
        )
        for number, (rent, growth_seed) in enumerate(zip(rents, growth_seeds, strict=True))
    ]
    return FleetSetting(task, host, tuple(drawn))


def _draw_seeds(streams: Streams, count: int, name: str = "host seeds") -> list[int]:
    return [int(seed) for seed in streams.numpy(name).integers(HELD_OUT_SEEDS, SEED_LIMIT, size=count)]


def _draw_rents(config: DomainConfig, streams: Streams, hosts: int) -> list[Rent]:
    levels = list(RENT_LEVELS.values())
    is_level = streams.numpy("is level").random(hosts) < config.rent_level_share
    level = streams.numpy("level").integers(len(levels), size=hosts)
    height = _uniform(streams, "rent", 0.0, 1.0, hosts)
    return [levels[index] if is_one else _rent_between(float(share)) for is_one, index, share in zip(is_level, level, height, strict=True)]


def _rent_between(share: float) -> Rent:
    """0 is the low level and 1 the high one, both prices on a log scale."""
    low, high = RENT_LEVELS["low"], RENT_LEVELS["high"]
    return Rent(parameters=_log_between(low.parameters, high.parameters, share), flops=_log_between(low.flops, high.flops, share))


def _log_between(low: float, high: float, share: float) -> float:
    return math.exp((1 - share) * math.log(low) + share * math.log(high))


def _uniform(streams: Streams, name: str, low: float, high: float, count: int) -> Floats:
    return streams.numpy(name).uniform(low, high, size=count)
