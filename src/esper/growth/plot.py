"""The plot of one host: its garden, its losses, its ledger and its judge. Everything about growing a host that is not tensors.

A `Grower` has one, for a model of the user's; a fleet has one for every host. So both live by the same rules.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol

import msgspec

from esper.events import Event
from esper.growth.chronicle import Chronicle
from esper.growth.config import GrowthConfig
from esper.growth.contribution import confidence_of_look
from esper.growth.decisions import Action, Decision
from esper.growth.errors import GrowthError
from esper.growth.events import ActionRefused, Measured, RolledBack, StageEntered
from esper.growth.garden import AnyBed, Garden
from esper.growth.governor import Diverged, Verdict
from esper.growth.judge import Judge
from esper.growth.ledger import Ledger, Refused, Rollback
from esper.growth.lifecycle import Stage
from esper.growth.moves import ask_gate, carry_out, check_can_grow
from esper.growth.promise import Promises, capped
from esper.growth.reporting import probed
from esper.growth.state import Contribution, Cost, GrowthState, LossScale


class Recovers(Protocol):
    """Holds the healthy states of a host."""

    def take_snapshot(self) -> None: ...

    def go_back(self, *, is_repeated: bool) -> int:
        """To the latest state, or to the one before it where the latest has led to disaster again. Gives the epoch it is of."""
        ...


class Plot(Generic[AnyBed]):
    """`host` and `load` are what the survey of the host has found; `epochs` is how long the training is planned to be.

    `scale` is what losses are relative to. Where neither it nor the config tells, it is the mean training loss of the first epoch.
    """

    def __init__(
        self,
        beds: Mapping[str, AnyBed],
        config: GrowthConfig,
        *,
        host: Cost,
        load: float,
        epochs: int | None,
        scale: LossScale | None = None,
    ) -> None:
        self.config, self.epochs, self.load = config, epochs, load
        self.ledger = Ledger(entries=[], refused=[], rollbacks=[])
        self.chronicle = Chronicle(config.governor.checks_per_epoch)
        self.garden: Garden[AnyBed] = Garden(beds, host, config, ledger=self.ledger, on_stage=self._stage_entered)
        check_can_grow(self.garden)
        if config.governor.uninformed_loss is not None:
            scale = LossScale.of(config.governor.uninformed_loss, loss_range=config.loss_range)
        self.judge = Judge(config.governor, scale)
        self.scale: LossScale | None = None
        if scale is not None:
            self._set_scale(scale)
        self.promises: Promises = {}
        self._events: deque[Event] = deque()  # those not told yet: the user hears of them when all is done

    @property
    def epoch(self) -> int:
        """Finished so far."""
        return self.garden.epoch

    @property
    def is_over(self) -> bool:
        return self.epochs is not None and self.epoch >= self.epochs

    def is_stuck(self) -> bool:
        """Return whether there was no better validation loss for as long as the config waits, and no seed is on its way."""
        losses, patience = self.chronicle.val_losses, self.config.patience
        if patience is None or len(losses) <= patience or self.garden.living():
            return False
        recent, before = ([loss for loss in some if math.isfinite(loss)] for some in (losses[-patience:], losses[:-patience]))
        return min(recent, default=math.inf) >= min(before, default=math.inf)

    def _set_scale(self, scale: LossScale) -> None:
        self.scale = self.judge.governor.scale = scale
        self.garden.set_unit(scale.unit)

    # Deciding

    def state(self, *, learning_rate: float) -> GrowthState:
        """What a controller sees."""
        allowed = self.garden.allowance()
        return GrowthState(
            epoch=self.epoch,
            epochs=self.epochs,
            steps_per_epoch=self.chronicle.length or 0,
            train_losses=tuple(self.chronicle.train_losses),
            val_losses=tuple(self.chronicle.val_losses),
            slots=self.garden.views(self.promises),
            host_cost=self.garden.host,
            added=self.garden.added(),
            parameters_left=allowed.parameters,
            flops_left=allowed.flops,
            seeds_left=allowed.seeds,
            rollbacks=self.judge.rollbacks,
            scale=self.scale,
            lifecycle=self.config.lifecycle,
            learning_rate=learning_rate,
            samples_per_epoch=self.chronicle.samples,
            host_load=self.load,
            rent=self.config.rent,
        )

    def carry_out(self, decision: Decision, *, by: str) -> None:
        """What the gates let pass happens; what they refuse is told. `by` is the name of the controller."""
        slots = [action.slot for action in decision.actions]
        if len(set(slots)) < len(slots):
            raise GrowthError(f"the controller {by!r} decided twice about one slot: {', '.join(slots)}")
        for action in decision.actions:
            answer = ask_gate(self.garden, action)
            if answer.passed:
                carry_out(self.garden, action, is_over=self.is_over)
            else:
                self._refuse(action, answer.reason)

    def _refuse(self, action: Action, reason: str) -> None:
        name = type(action).__name__.lower()
        self.ledger.refused.append(Refused(self.epoch, action.slot, name, reason))
        self.emit(ActionRefused(epoch=self.epoch, slot=action.slot, action=name, reason=reason))

    # The end of an epoch

    def on_trial(self) -> dict[str, float]:
        """Seeds that will have been on probation long enough when this epoch is over, and the confidence of the look at each.

        From then on they are looked at after every epoch, up to the end of the training.
        """
        least = self.config.lifecycle.holding_epochs
        later = None if self.epochs is None else max(self.epochs - self.epoch - 1, 0)  # looks after this one
        return {
            name: confidence_of_look(bed.life.looks + 1, None if later is None else bed.life.looks + 1 + later)
            for name, bed in self.garden.beds.items()
            if bed.life.stage is Stage.HOLDING and bed.life.epochs_in_stage + 1 >= least and not bed.life.is_withdrawing
        }

    def suspects(self) -> dict[str, int]:
        """Seeds that take part in the host and are not part of it yet, with their numbers."""
        return {
            name: bed.life.number
            for name, bed in self.garden.beds.items()
            if bed.is_connected and bed.life.stage is not Stage.FOSSILIZED and bed.life.number is not None
        }

    def find_scale(self, chunks: list[float], val_loss: float) -> None:
        """Take the scale from the losses of the first epoch, where nobody told it. Every rank calls it, with the same losses."""
        first = sum(chunks) / len(chunks) if chunks else val_loss
        if self.scale is None and math.isfinite(first):
            self._set_scale(LossScale.of(first, loss_range=self.config.loss_range, is_guess=True))

    def verdict(self, chunks: list[float], val_loss: float) -> Verdict:
        self.find_scale(chunks, val_loss)
        return self.judge.judge(chunks, val_loss, is_blameless=not self.suspects())

    def end_epoch(self, chunks: list[float], val_loss: float, measured: Mapping[str, Contribution], promises: Promises | None) -> None:
        """`promises` is None where no probe has looked."""
        self.chronicle.end_epoch(chunks, val_loss)
        self.garden.steps_per_epoch = self.chronicle.length or 0
        self.garden.end_epoch()
        for name, contribution in measured.items():
            self.garden.note_contribution(name, contribution)
            gain, rent = contribution.gain, self.garden.rent(name)
            self.emit(Measured(epoch=self.epoch, slot=name, gain=gain.estimate, gain_low=gain.low, gain_high=gain.high, rent=rent))
        self.promises = capped(promises or {}, loss=self._loss_left(), steps=self.chronicle.length or 0)
        if promises is not None:
            self.emit(probed(self.epoch, self.promises))

    def _loss_left(self) -> float | None:
        """How far the training loss could fall; None where nobody knows."""
        return None if self.scale is None else self.chronicle.train_losses[-1] - self.scale.floor

    def settle(self, verdict: Verdict, chunks: list[float], recovery: Recovers) -> None:
        """After an epoch that was no disaster."""
        if chunks:  # else every step of the epoch has been gone back from, and nothing is healthy yet
            self.judge.in_a_row = 0
        if chunks and verdict.is_healthy and self.epoch % self.config.governor.snapshot_every == 0:
            recovery.take_snapshot()

    def go_back(self, reason: str, recovery: Recovers) -> None:
        """After a disaster: the host is as it was when it was healthy, and what could have done it is under embargo."""
        suspects = self.suspects()
        to_epoch = recovery.go_back(is_repeated=self.judge.in_a_row > 0)  # first: where there is no way back, nothing has happened
        self.judge.note_rollback()
        self.chronicle.forget_losses()
        why = f"the governor went back: {reason}"
        self.garden.square_ledger(why)
        for name, number in suspects.items():
            self.garden.banish(name, number, why)
        self.ledger.rollbacks.append(Rollback(self.epoch, to_epoch, reason))
        self.emit(RolledBack(epoch=self.epoch, to_epoch=to_epoch, reason=reason, embargoed=list(suspects)))

    def check_not_diverged(self, reason: str) -> None:
        if self.judge.in_a_row > self.config.governor.max_rollbacks:
            to_epoch = self.ledger.rollbacks[-1].to_epoch
            raise Diverged(
                f"the training fails again and again from a healthy state: {reason}. The model is as it was after epoch {to_epoch}; "
                "look for NaN in the data, or lower the learning rate"
            )

    # Telling

    def emit(self, event: Event) -> None:
        self._events.append(event)

    def tell(self, on_event: Callable[[Event], None]) -> None:
        while self._events:
            on_event(self._events.popleft())

    def _stage_entered(self, slot: str, blueprint: str, stage: Stage, reason: str) -> None:
        self.emit(StageEntered(epoch=self.epoch, slot=slot, blueprint=blueprint, stage=stage.name, reason=reason))

    # State, without what the garden and the judge hold, which snapshots have too

    def state_dict(self) -> dict[str, Any]:
        return {
            "ledger": msgspec.to_builtins(self.ledger),
            "chronicle": self.chronicle.state_dict(),
            "epoch": self.epoch,
            "promises": [[slot, blueprint, value] for (slot, blueprint), value in self.promises.items()],
            "scale": None if self.scale is None else [self.scale.uninformed, self.scale.range, self.scale.is_guess],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        ledger = msgspec.convert(state["ledger"], Ledger)
        self.ledger.entries, self.ledger.refused, self.ledger.rollbacks = ledger.entries, ledger.refused, ledger.rollbacks
        self.chronicle.load_state_dict(state["chronicle"])
        self.garden.epoch = state["epoch"]
        self.garden.steps_per_epoch = self.chronicle.length or 0
        self.promises = {(slot, blueprint): value for slot, blueprint, value in state["promises"]}
        if state["scale"] is not None:
            self._set_scale(LossScale(*state["scale"]))
