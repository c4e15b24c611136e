"""Fleets that stay on the device and are used again, for hosts of the same architecture on data of the same shape.

    pool = FleetPool(size=16)
    for task in tasks:
        fleet = pool.fleet(task, "conv-8x3", rows=32, growth=growth, config=config, device=device)
        fleet.reset({row: HostConfig(seed=row) for row in range(32)})

A new fleet has to find the slots of its architecture and the kinds of seeds that fit them, to measure its memory and to allocate it. A
fleet of the pool only gets other data, another schedule and other steps per decision (`Fleet.begin`). Its hosts train as in a new one.
"""

from __future__ import annotations

import gc
from functools import partial

import torch

from esper.fleet.config import FleetConfig, FleetError
from esper.fleet.data import TaskTensors
from esper.fleet.fleet import Fleet, FleetShape
from esper.fleet.memory import free_bytes
from esper.growth.config import GrowthConfig
from esper.tasks import Task

_Key = tuple[str, str, FleetShape, GrowthConfig, torch.device]


class FleetPool:
    """Up to `size` fleets, each of another architecture or shape. The one that was not used for the longest time makes room for others."""

    def __init__(self, size: int = 16) -> None:
        self.size = size
        self.built = self.reused = 0  # number of fleets that were given out, new ones and ones that were used before
        self._fleets: dict[_Key, Fleet] = {}  # the one that was used last is the last
        self._given: Fleet | None = None  # the one that was given out last, if it stays in the pool

    def fleet(
        self,
        task: Task,
        host: str,
        *,
        rows: int,
        growth: GrowthConfig,
        config: FleetConfig,
        device: torch.device,
        tensors: TaskTensors | None = None,
    ) -> Fleet:
        """Return a fleet of at least so many rows, none of them reset. It is valid until the next call, which makes it forget its hosts.

        `host` names the architecture, see `Task.make_host`. Some names mean another one in every task, so only tasks of the same name share
        a fleet.
        """
        if self._given is not None:
            self._given.forget()
            self._given = None
        key = (task.name, host, FleetShape.of(task, config), growth, device)
        fleet = self._fleets.pop(key, None)
        if fleet is not None and fleet.hosts < rows:
            fleet = None  # it makes room for one with more rows
            gc.collect()
        if fleet is not None:
            fleet.begin(task, task.maker(host), config=config, tensors=tensors)
            self.reused += 1
        else:
            make = partial(Fleet, task, task.maker(host), hosts=rows, growth=growth, config=config, device=device, tensors=tensors)
            try:
                fleet = make()
            except FleetError:
                if not self._fleets:
                    raise
                self._drop(len(self._fleets))  # it may fit where there are no others
                fleet = make()
            self.built += 1

        # Keep the others as long as the memory suffices for all that the hosts of this fleet may grow.
        self._drop(len(self._fleets) + 1 - self.size)
        needed = fleet.hosts * fleet.memory_per_host().most if self._fleets else 0
        while self._fleets and (room := free_bytes(device)) is not None and room < needed:
            self._drop(1)
        if self.size:
            self._fleets[key] = self._given = fleet
        return fleet

    def _drop(self, count: int) -> None:
        """Drop the fleets that were not used for the longest time. Each is a cycle with its hosts, which only a collection frees."""
        dropped = list(self._fleets)[: max(count, 0)]
        for key in dropped:
            del self._fleets[key]
        if dropped:
            gc.collect()
