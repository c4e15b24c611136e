"""Draws the hosts of one round of training from the ranges of a `DomainConfig`, and the host seeds for tuning baselines.

The hosts of a fleet share an architecture, because they are one tensor program, and a horizon, because a host that stopped early would
still be computed. Within a fleet, groups of hosts share everything but the rent and the seed of their growth: initialisation, data and
order are the same, so that one twin serves the whole group. All other settings differ between groups.

A draw depends only on the seed, the round and the config, so a resumed run needs no saved state for it. Each quantity has a random stream
of its own, so adding hosts to a fleet does not change its first ones. Seeds below HELD_OUT_SEEDS are never drawn; comparisons use them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from esper.controller.config import HELD_OUT_SEEDS, RENT_LEVELS, DomainConfig
from esper.fleet.config import HostConfig
from esper.growth.config import RentConfig
from esper.rng import Streams

Floats = NDArray[np.float64]

SEED_LIMIT = 2**31  # host seeds are below this, so that every random generator accepts them


@dataclass(frozen=True, slots=True)
class FleetSetting:
    """Hosts of one task, one architecture and one horizon."""

    task: str
    host: str  # channels of the blocks, such as "4-8-16"
    hosts: tuple[HostConfig, ...]

    def __post_init__(self) -> None:
        assert len({host.horizon for host in self.hosts}) == 1

    @property
    def horizon(self) -> int:
        return self.hosts[0].horizon


def draw_round(config: DomainConfig, *, round_number: int, hosts: int, seed: int) -> list[FleetSetting]:
    """Return the settings of a round's fleets, each with another architecture. `hosts` is their total, divided as evenly as possible."""
    if hosts < 1:
        raise ValueError(f"a round needs at least one host; got hosts={hosts}")
    streams = Streams(seed).spawn(f"round {round_number}")
    count = min(config.fleets, hosts, len(config.tasks) * len(config.hosts))
    architectures = _draw_architectures(config, round_number=round_number, count=count, seed=seed)
    sizes = [len(share) for share in np.array_split(np.arange(hosts), count)]
    return [
        _draw_fleet(config, *architecture, hosts=size, streams=streams.spawn(f"fleet {number}"))
        for number, (architecture, size) in enumerate(zip(architectures, sizes, strict=True))
    ]


def training_seeds(count: int, *, seed: int) -> list[int]:
    """Return host seeds for tuning a controller before it is compared. None of them is held out."""
    return _draw_seeds(Streams(seed), count)


# Draws of single quantities


def _draw_architectures(config: DomainConfig, *, round_number: int, count: int, seed: int) -> list[tuple[str, str]]:
    """Return the (task, host) pairs of one round.

    Tasks take turns. A cycle of rounds goes through the architectures in random order without repeats, and leaves out the last few if they
    do not fill a round. Independent draws would be worse: a policy is biased towards the hosts that it saw last, and the last rounds of a
    training could all be of one task.
    """
    cycle, place = divmod(round_number, len(config.tasks) * len(config.hosts) // count)
    streams = Streams(seed).spawn(f"cycle {cycle}")
    turns = Streams(seed).numpy("tasks").permutation(len(config.tasks))
    hosts = {task: streams.numpy(f"hosts of {task}").permutation(len(config.hosts)) for task in config.tasks}
    order = [(config.tasks[turn], config.hosts[hosts[config.tasks[turn]][number]]) for number in range(len(config.hosts)) for turn in turns]
    return order[place * count : (place + 1) * count]


def _draw_fleet(config: DomainConfig, task: str, host: str, *, hosts: int, streams: Streams) -> FleetSetting:
    """Draw the settings of the hosts of one fleet: one set per group of `hosts_per_twin` hosts, and a rent per host."""
    least, most = config.horizon
    horizon = int(streams.numpy("horizon").integers(least, most, endpoint=True))
    # Plain hosts train on the unchanged task. Values are drawn for them all the same, so that those of the other hosts stay the same.
    groups = math.ceil(hosts / config.hosts_per_twin)
    is_plain = streams.numpy("plain").random(groups) < config.plain_share
    seeds = _draw_seeds(streams, groups)
    rates = [_log_between(*config.learning_rate, share) for share in _uniform(streams, "learning rate", 0.0, 1.0, groups)]
    noise = np.where(is_plain, 0.0, _uniform(streams, "label noise", *config.label_noise, groups))
    data = np.where(is_plain, 1.0, _uniform(streams, "data share", *config.data_share, groups))
    classes = np.where(is_plain, 1.0, _uniform(streams, "classes share", *config.classes_share, groups))
    rents, growth_seeds = _draw_rents(config, streams, hosts), _draw_seeds(streams, hosts, "growth seeds")
    drawn = []
    for number, (rent, growth_seed) in enumerate(zip(rents, growth_seeds, strict=True)):
        group = number // config.hosts_per_twin
        setting = HostConfig(
            seed=seeds[group],
            growth_seed=growth_seed,
            horizon=horizon,
            learning_rate=rates[group],
            label_noise=float(noise[group]),
            data_share=float(data[group]),
            classes_share=float(classes[group]),
            rent=rent,
        )
        drawn.append(setting)
    return FleetSetting(task, host, tuple(drawn))


def _draw_seeds(streams: Streams, count: int, name: str = "host seeds") -> list[int]:
    return [int(seed) for seed in streams.numpy(name).integers(HELD_OUT_SEEDS, SEED_LIMIT, size=count)]


def _draw_rents(config: DomainConfig, streams: Streams, hosts: int) -> list[RentConfig]:
    """Draw a rent per host: one of the fixed levels, or log-uniform between the lowest and the highest."""
    levels = list(RENT_LEVELS.values())
    is_level = streams.numpy("is level").random(hosts) < config.rent_level_share
    numbers = streams.numpy("level").integers(len(levels), size=hosts)
    shares = _uniform(streams, "rent", 0.0, 1.0, hosts)
    drawn = zip(is_level, numbers, shares, strict=True)
    return [levels[number] if is_fixed else _rent_between(float(share)) for is_fixed, number, share in drawn]


def _rent_between(share: float) -> RentConfig:
    """Interpolate both prices between the low level (share 0) and the high one (share 1), on a log scale."""
    low, high = RENT_LEVELS["low"], RENT_LEVELS["high"]
    return RentConfig(parameters=_log_between(low.parameters, high.parameters, share), flops=_log_between(low.flops, high.flops, share))


def _log_between(low: float, high: float, share: float) -> float:
    return math.exp((1 - share) * math.log(low) + share * math.log(high))


def _uniform(streams: Streams, name: str, low: float, high: float, count: int) -> Floats:
    return streams.numpy(name).uniform(low, high, size=count)
