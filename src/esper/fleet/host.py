"""One host of a fleet, as far as it is not tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from esper.fleet.config import HostSetting
from esper.fleet.row_bed import RowBed
from esper.fleet.snapshots import RowRecovery
from esper.growth.contribution import Losses, gain_of
from esper.growth.decisions import Decision
from esper.growth.lifecycle import Stage
from esper.growth.plot import Plot
from esper.growth.promise import Promises
from esper.growth.state import Contribution


@dataclass
class Host:
    setting: HostSetting
    plot: Plot[RowBed]
    recovery: RowRecovery
    is_given_up: bool = False  # it failed again and again
    wants_probe: bool = False  # until the next decision
    validation_flops: int = 0  # of all measurements; they are part of the chronicle's
    seed_flops: dict[int, int] = field(default_factory=dict)  # number of a seed -> FLOPs that its training has cost so far

    @property
    def is_over(self) -> bool:
        has_ended = self.is_given_up or not self.recovery.has_begun or self.plot.epoch >= self.setting.horizon
        return has_ended or self.plot.is_stuck()

    @property
    def spent_flops(self) -> int:
        """Of training, on seeds that are gone."""
        gone = {entry.number for entry in self.plot.ledger.entries if entry.outcome in ("pruned", "rolled back")}
        return sum(flops for number, flops in self.seed_flops.items() if number in gone)

    def rate(self, schedule: str) -> float:
        """The learning rate of the next steps."""
        if schedule == "cosine":
            return self.setting.learning_rate * (1 + math.cos(math.pi * self.recovery.clock / self.setting.horizon)) / 2
        return self.setting.learning_rate

    def decide(self, decision: Decision, *, by: str) -> None:
        self.plot.carry_out(decision, by=by)
        self.wants_probe = decision.probe and not self.plot.is_over

    # What was done

    def note_steps(self, steps: int, *, samples: int, probe_flops: int) -> None:
        """Training steps on so many samples together; `probe_flops` is what a probe has cost on the way."""
        garden = self.plot.garden
        self.plot.chronicle.note_steps(steps, samples=samples, flops=samples * self._step_flops() + probe_flops)
        self.recovery.clock += 1
        for name, bed in garden.occupied():
            assert bed.life.number is not None
            flops = 3 * samples * garden.cost(name).flops
            self.seed_flops[bed.life.number] = self.seed_flops.get(bed.life.number, 0) + flops

    def _step_flops(self) -> int:
        """Of one sample."""
        garden = self.plot.garden
        flops = 3 * (garden.host.flops + garden.connected().flops)
        shadow = [(name, bed) for name, bed in garden.beds.items() if bed.life.stage is Stage.TRAINING]
        if shadow:  # the second pass: the stacked program computes it from the input on
            flops += garden.host.flops + 2 * shadow[0][1].place.flops_behind + 3 * sum(garden.cost(name).flops for name, _ in shadow)
        return flops

    def note_validation(self, *, samples: int, passes: int) -> None:
        garden = self.plot.garden
        flops = passes * samples * (garden.host.flops + garden.connected().flops)
        self.plot.chronicle.flops += flops
        self.validation_flops += flops

    def end_epoch(self, chunks: list[float], validation: Losses, without: Mapping[str, Losses], promises: Promises | None) -> None:
        """`validation` are the losses with everything on, `without` those without the seed on trial in a slot."""
        plot = self.plot
        measured = {}
        if validation.are_finite:
            confidences = plot.on_trial()
            gains = {slot: gain_of(losses, validation, confidence=confidences[slot]) for slot, losses in without.items()}
            measured = {slot: Contribution(gain, plot.epoch + 1) for slot, gain in gains.items()}
        verdict = plot.verdict(chunks, validation.mean)
        plot.end_epoch(chunks, validation.mean, measured, promises)
        self.wants_probe = False
        if verdict.is_disaster:
            plot.go_back(verdict.reason, self.recovery)
            self.is_given_up = plot.judge.in_a_row > plot.config.governor.max_rollbacks
        else:
            plot.settle(verdict, chunks, self.recovery)

    # Saving

    def state_dict(self) -> dict[str, Any]:
        return {
            "setting": msgspec.to_builtins(self.setting),
            "plot": self.plot.state_dict(),
            "garden": self.plot.garden.state_dict(),
            "judge": self.plot.judge.state_dict(),
            "recovery": self.recovery.state_dict(),
            "is_given_up": self.is_given_up,
            "wants_probe": self.wants_probe,
            "validation_flops": self.validation_flops,
            "seed_flops": [[number, flops] for number, flops in self.seed_flops.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.plot.load_state_dict(state["plot"])
        self.plot.garden.load_state_dict(state["garden"])
        self.plot.judge.load_state_dict(state["judge"])
        self.recovery.load_state_dict(state["recovery"])
        self.is_given_up, self.wants_probe = state["is_given_up"], state["wants_probe"]
        self.validation_flops = state["validation_flops"]
        self.seed_flops = {number: flops for number, flops in state["seed_flops"]}
