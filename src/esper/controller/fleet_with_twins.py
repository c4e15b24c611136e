"""A fleet of hosts that a controller decides for, together with their twins, which never grow.

Hosts with the same initialisation, data and order share a twin. The life of a host has horizon + 1 decisions: one before every training
segment, and one after the last. After that, seeds that were not kept are pruned, and the host is measured once more in its final form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch

from esper.controller.config import ControllerConfig
from esper.controller.domain import FleetSetting
from esper.controller.reward import HostStanding, standing_after
from esper.fleet.config import HostConfig
from esper.fleet.data import TaskTensors
from esper.fleet.fleet import Fleet, FleetTimes
from esper.growth.config import RentConfig
from esper.growth.lifecycle.stages import Decision, GrowthState
from esper.runs import Event
from esper.tasks import Task


class FleetWithTwins:
    """Hosts 0 to `hosts` - 1 are decided for; the other rows of `fleet` are their twins.

    `on_event` gets the events of the hosts, not of the twins. The `env` of an event is the number of the host in this fleet.
    """

    def __init__(
        self,
        setting: FleetSetting,
        config: ControllerConfig,
        task: Task,
        tensors: TaskTensors,
        *,
        device: torch.device,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self.config, self.task = config, task
        self.hosts = hosts = len(setting.hosts)
        self.fleet = Fleet(
            task,
            task.maker(setting.cell.host),
            hosts=self.hosts + len(self._twins(setting)),
            growth=config.growth,
            config=setting.cell.fleet(config.fleet),
            device=device,
            tensors=tensors,
            on_event=lambda event: on_event(event) if event.env is not None and event.env < hosts else None,  # drop those of twins
        )
        self.begin(setting)

    def fits(self, setting: FleetSetting) -> bool:
        """Return whether this fleet can be reused for the next hosts: same data, architecture and steps, same number of hosts and twins."""

        def needed(one: FleetSetting) -> object:
            return one.cell.data, one.cell.host, one.cell.fleet(self.config.fleet), len(one.hosts)

        return needed(setting) == needed(self.setting) and self.hosts + len(self._twins(setting)) == self.fleet.hosts

    def begin(self, setting: FleetSetting) -> None:
        """Replace all hosts and twins by new ones."""
        self.setting, self.host_configs = setting, setting.host_configs(len(self.task.train))
        twins = self._twins(setting)
        self.twin_of = [self.hosts + twins.index(_twin_of(host)) for host in self.host_configs]
        self.fleet.reset(dict(enumerate((*self.host_configs, *twins))))
        self.fleet.samples_trained, self.fleet.times = 0, FleetTimes()
        self._recordings_before = self.fleet.recordings
        self._states: list[GrowthState] | None = None  # cache of `states()`

    def _twins(self, setting: FleetSetting) -> list[HostConfig]:
        """Return the settings of the twins: one for all hosts that share initialisation, data and order."""
        return list(dict.fromkeys(map(_twin_of, setting.host_configs(len(self.task.train)))))

    @property
    def recordings(self) -> int:
        """Number of times that training steps were recorded for replay on a GPU, since these hosts began."""
        return self.fleet.recordings - self._recordings_before

    # Decisions and training

    @property
    def is_last(self) -> bool:
        """Whether the next decision is the last one."""
        return not self.fleet.training()

    def alive(self) -> list[bool]:
        """Return for each host whether it has not been given up."""
        return [not host.is_given_up for host in self.fleet.rows[: self.hosts]]

    def states(self) -> list[GrowthState]:
        """Return the present state of each host. Cached, because observation, decision and reward all need it."""
        if self._states is None:
            self._states = [with_finite_losses(self.fleet.state(row)) for row in range(self.hosts)]
        return self._states

    def decide(self, decisions: Mapping[int, Decision]) -> None:
        """Carry out the decisions, by host."""
        self.fleet.decide(decisions, by="the policy")
        self._states = None

    def advance(self) -> None:
        """Train all hosts and twins up to the next decision."""
        self.fleet.advance()
        self._states = None

    def finish(self) -> None:
        """Prune all seeds that were not kept, and go back to the best validation states. Call it after the last decision."""
        self.fleet.finish(range(self.fleet.hosts))
        self._states = None

    # Standings: the figures that the reward is computed from

    def standing(self) -> HostStanding:
        """Return the standing of the hosts, by the validation losses after the last training segment."""
        start = self.task.uninformed_loss
        twins = {row: _without_nonfinite(self.fleet.rows[row].lifecycles.history.val_losses, start)[-1] for row in set(self.twin_of)}
        return self._standing(self.states(), [twins[row] for row in self.twin_of])

    def last_standing(self) -> HostStanding:
        """Return the standing of the finished hosts, by newly measured validation losses."""
        losses = [loss if math.isfinite(loss) else self.task.uninformed_loss for loss in self.fleet.validation_losses().tolist()]
        states = [replace(state, val_losses=(losses[row],)) for row, state in enumerate(self.states())]
        standing = self._standing(states, [losses[row] for row in self.twin_of])
        if self.config.reward.family == "contribution":  # measure them again, because older contributions may be out of date
            return replace(standing, contributions=self.fleet.kept_contributions()[: self.hosts])
        return standing

    def _standing(self, states: Sequence[GrowthState], twin_losses: Sequence[float]) -> HostStanding:
        # FLOPs spent on seeds that are gone, as a share of the FLOPs of the host's whole training.
        samples = self.fleet.config.batch_size * self.fleet.steps_per_decision * self.setting.horizon
        whole = 3 * samples * self.fleet.discovery.host.flops
        spent = [host.spent_flops / whole for host in self.fleet.rows[: self.hosts]]
        return standing_after(states, twin_losses=twin_losses, spent=spent)

    def state_dict(self) -> dict[str, Any]:
        return {"fleet": self.fleet.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.fleet.load_state_dict(state["fleet"])
        self._states = None


def _twin_of(host: HostConfig) -> HostConfig:
    """Return the setting of the twin of a host: the same without rent and without a seed of its growth."""
    return msgspec.structs.replace(host, rent=RentConfig(), growth_seed=0)


def with_finite_losses(state: GrowthState) -> GrowthState:
    """Replace losses that are not finite by the loss before them, since the host was rolled back to that state."""
    if all(map(math.isfinite, (*state.train_losses, *state.val_losses))):
        return state
    start = state.uninformed_loss or 0.0
    return replace(
        state, train_losses=_without_nonfinite(state.train_losses, start), val_losses=_without_nonfinite(state.val_losses, start)
    )


def _without_nonfinite(losses: Sequence[float], start: float) -> tuple[float, ...]:
    """Replace every loss that is not finite by the one before it; the first by `start`."""
    losses_so_far: list[float] = []
    for loss in losses:
        losses_so_far.append(loss if math.isfinite(loss) else (losses_so_far or [start])[-1])
    return tuple(losses_so_far)
