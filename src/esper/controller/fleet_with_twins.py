"""A squad: the hosts of one fleet that a controller decides for, and the twins that never grow.

Hosts with the same initialisation, data and order share a twin. A life has horizon + 1 decisions: one before every stretch of training, and
a last one after it. Then what was not kept is taken out, and the host is measured once more, as it will be used.

Shapes: H = hosts that are decided for.
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
from esper.controller.reward import HostStanding, standing_of
from esper.fleet.config import HostSetting
from esper.fleet.data import TaskTensors
from esper.fleet.fleet import Fleet
from esper.growth.config import Rent
from esper.growth.lifecycle.stages import Decision, GrowthState
from esper.runs import Event
from esper.tasks import Task


class FleetWithTwins:
    """`on_event` hears what happens to the hosts that are decided for; the `env` of an event is the host's number in the squad."""

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
            task.maker(setting.host),
            hosts=self.hosts + len(_twins(setting)),
            growth=config.growth,
            config=config.fleet,
            device=device,
            tensors=tensors,
            on_event=lambda event: on_event(event) if event.env is not None and event.env < hosts else None,  # else a twin's
        )
        self.begin(setting)

    def fits(self, setting: FleetSetting) -> bool:
        """Return whether the next hosts can live in this fleet: they are of the same architecture, on the same task and as many."""
        is_same = (setting.task, setting.host, len(setting.hosts)) == (self.setting.task, self.setting.host, self.hosts)
        return is_same and self.hosts + len(_twins(setting)) == self.fleet.hosts

    def begin(self, setting: FleetSetting) -> None:
        """New hosts and their twins, in the place of those before."""
        twins = _twins(setting)
        self.setting = setting
        self.twin_of = [self.hosts + twins.index(_training_of(host)) for host in setting.hosts]
        self.fleet.reset(dict(enumerate((*setting.hosts, *twins))))
        self.fleet.samples_trained = 0
        self._recordings_before = self.fleet.recordings
        self._states: list[GrowthState] | None = None  # as they are now, once somebody has asked

    @property
    def recordings(self) -> int:
        """Of steps, in the life of these hosts."""
        return self.fleet.recordings - self._recordings_before

    # Lives

    @property
    def is_last(self) -> bool:
        """The next decision is the last one."""
        return not self.fleet.training()

    def alive(self) -> list[bool]:
        """Which hosts have not been given up."""
        return [not host.is_given_up for host in self.fleet.rows[: self.hosts]]

    def states(self) -> list[GrowthState]:
        """What is observed, decided by and paid for: the same three times, so it is put together once."""
        if self._states is None:
            self._states = [finite(self.fleet.state(row)) for row in range(self.hosts)]
        return self._states

    def decide(self, decisions: Mapping[int, Decision]) -> None:
        self.fleet.decide(decisions, by="the policy")
        self._states = None

    def advance(self) -> None:
        self.fleet.advance()
        self._states = None

    def finish(self) -> None:
        """After the last decision."""
        self.fleet.finish(range(self.hosts))
        self._states = None

    # What it was worth

    def standing(self) -> HostStanding:
        """How the hosts stand, by the validation losses of the last stretch."""
        start = self.task.uninformed_loss
        twins = {row: _mended(self.fleet.rows[row].host_growth.history.val_losses, start)[-1] for row in set(self.twin_of)}
        return self._standing(self.states(), [twins[row] for row in self.twin_of])

    def last_standing(self) -> HostStanding:
        """As they are when everything is over: with what was kept, and measured anew."""
        losses = [loss if math.isfinite(loss) else self.task.uninformed_loss for loss in self.fleet.validation_losses().tolist()]
        states = [replace(state, val_losses=(losses[row],)) for row, state in enumerate(self.states())]
        standing = self._standing(states, [losses[row] for row in self.twin_of])
        if self.config.reward.family == "contribution":  # measured now: what a seed once gave may be long gone
            return replace(standing, contributions=self.fleet.kept_contributions()[: self.hosts])
        return standing

    def _standing(self, states: Sequence[GrowthState], twin_losses: Sequence[float]) -> HostStanding:
        return standing_of(states, twin_losses=twin_losses, spent=[self._spent(row) for row in range(self.hosts)])

    def _spent(self, row: int) -> float:
        """FLOPs that went into seeds that are gone, over those of the host's whole training."""
        samples = self.fleet.config.batch_size * self.fleet.steps_per_decision * self.setting.horizon
        return self.fleet.rows[row].spent_flops / (3 * samples * self.fleet.discovery.host.flops)

    def state_dict(self) -> dict[str, Any]:
        return {"fleet": self.fleet.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.fleet.load_state_dict(state["fleet"])
        self._states = None


def _twins(setting: FleetSetting) -> list[HostSetting]:
    """One for all hosts that share its initialisation, data and order."""
    return list(dict.fromkeys(map(_training_of, setting.hosts)))


def _training_of(host: HostSetting) -> HostSetting:
    """What a host is without growth: the setting of its twin."""
    return msgspec.structs.replace(host, rent=Rent(), growth_seed=0)


def finite(state: GrowthState) -> GrowthState:
    """With finite losses: where one was not, the run went back, and the loss before it is where the host stands."""
    if all(map(math.isfinite, (*state.train_losses, *state.val_losses))):
        return state
    start = state.uninformed_loss or 0.0
    return replace(state, train_losses=_mended(state.train_losses, start), val_losses=_mended(state.val_losses, start))


def _mended(losses: Sequence[float], start: float) -> tuple[float, ...]:
    mended: list[float] = []
    for loss in losses:
        mended.append(loss if math.isfinite(loss) else (mended or [start])[-1])
    return tuple(mended)
