"""Growth of one host, epoch by epoch: its losses, the lifecycles of its slots, its ledger and its governor; everything except weights.

`HostGrowth` joins these parts. A `Grower` has one for the user's model, and a fleet has one per host, so both follow the same rules.
`History` holds losses, samples, FLOPs and seconds; losses stay on the device and are read once per epoch. The functions between them build
the events for the end of an epoch; those at the end of the file check and execute the actions of a controller.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import astuple
from typing import Any, Generic, Protocol

import msgspec
import torch
from torch import Tensor

from esper.growth.config import GrowthConfig, GrowthError, RentConfig
from esper.growth.events import (
    ActionRefused,
    EpochEnded,
    Measured,
    PassedOver,
    Probed,
    RolledBack,
    Shrunk,
    SlotView,
    StageEntered,
    Widened,
)
from esper.growth.lifecycle.governor import Diverged, Governor, LossRange, Verdict
from esper.growth.lifecycle.ledger import Ledger, Refused, Rollback
from esper.growth.lifecycle.slots import AnyBackend, SlotLifecycles
from esper.growth.lifecycle.stages import (
    OCCUPIED,
    Action,
    Advance,
    Answer,
    Contribution,
    Cost,
    Decision,
    Fossilize,
    Germinate,
    GrowthState,
    Prune,
    Retarget,
    Shrink,
    Stage,
    may_blend,
    may_fossilize,
    may_germinate,
    may_prune,
    may_retarget,
    may_shrink,
)
from esper.growth.measure.contribution import confidence_of_look
from esper.growth.measure.probe import Promises, capped
from esper.growth.seeds.blueprints import get_blueprint, widened_by
from esper.runs import Event


class History:
    """Losses, counts and times of one run. `checks_per_epoch` is the number of chunks into which the losses of an epoch are split."""

    def __init__(self, checks_per_epoch: int) -> None:
        self.train_losses: list[float] = []  # mean per epoch
        self.val_losses: list[float] = []
        self.flops = 0  # spent so far, over the steps whose number of samples is known
        self.length: int | None = None  # steps in the last epoch; None before the end of the first
        self.samples: int | None = None  # samples in the last epoch; None if unknown
        self.steps = 0  # steps of this epoch, so far
        # The way to the present state, without the steps and the time that rollbacks undid.
        self._way_steps = 0
        self._way_began = time.perf_counter()  # moved forward by the time that a rollback undid
        self._steps_at = {0: 0}  # epoch -> steps on the way to its end
        self._seconds_at = {0: 0.0}  # epoch -> seconds on the way to its end, for the epochs of this session
        self._checks = checks_per_epoch
        self._losses: list[Tensor] = []  # losses of this epoch, on the device
        self._loaded = torch.empty(0)  # losses of this epoch from before the run was resumed
        self._samples = 0  # samples of this epoch, so far
        self._lap_samples = 0  # samples since the last call of `lap`
        self._lap_began = time.perf_counter()
        self.data_wait: float | None = None  # seconds spent waiting for data in this epoch; None: not measured
        self.skipped: Tensor | int = 0  # steps that the host's optimiser skipped since the last EpochEnded event; may be on the device
        self.step_seconds: float | None = None  # mean seconds per step of the last epoch; None: not measured
        self._clock_began: float | None = None  # when the clock was started in this epoch; None: the steps are not timed
        self._untimed_steps = 0  # steps of this epoch before the clock was started, which happens after a resume

    def start_clock(self) -> None:
        """Start to measure the training steps of an epoch, or the rest of it after a resume. `chunks` ends the measurement."""
        self._clock_began, self._untimed_steps, self.data_wait = time.perf_counter(), self.steps, 0.0

    def note_step(self, loss: Tensor, *, samples: int | None, flops_per_sample: int) -> None:
        """Note one training step. `loss` is not read before the end of the epoch."""
        self.steps += 1
        self._way_steps += 1
        self._losses.append(loss)
        if samples is not None:
            self._samples += samples
            self._lap_samples += samples
            self.flops += samples * flops_per_sample

    def note_steps(self, steps: int, *, samples: int, flops: int) -> None:
        """Note several steps at once. The caller keeps their losses."""
        self.steps += steps
        self._way_steps += steps
        self._samples += samples
        self._lap_samples += samples
        self.flops += flops

    def forget_losses(self) -> None:
        """Drop the losses of this epoch. After a rollback, they say nothing about the restored state."""
        self._losses, self._loaded = [], torch.empty(0)

    def chunks(self) -> list[float]:
        """Return the mean training losses of the chunks of this epoch; empty if all losses were dropped."""
        if not self.steps:
            raise GrowthError(
                "an epoch is over without a single after_step: the training loader yields nothing, or after_step is not called"
            )
        losses = self._read()
        # All steps are done now: reading their losses has waited for the device.
        if self._clock_began is not None:
            seconds, self._clock_began = time.perf_counter() - self._clock_began, None
            timed_steps = self.steps - self._untimed_steps
            self.step_seconds = seconds / timed_steps if timed_steps else None
        means: list[float] = chunk_means(losses, self._checks).tolist() if len(losses) else []
        return means

    def _read(self) -> Tensor:
        """Return the losses of this epoch [steps] on the CPU."""
        if not self._losses:
            return self._loaded
        # Keep float64 losses exact, because the scale of all losses is derived from them.
        losses = torch.stack([loss if loss.dtype == torch.float64 else loss.float() for loss in self._losses])
        return torch.cat([self._loaded.double(), losses.cpu().double()])

    def end_epoch(self, chunks: list[float], val_loss: float) -> None:
        """Append the losses of an epoch and start the next. Without chunks, the previous training loss is repeated."""
        self.train_losses.append(sum(chunks) / len(chunks) if chunks else (self.train_losses or [val_loss])[-1])
        self.val_losses.append(val_loss)
        self.length, self.steps = self.steps, 0
        self.samples, self._samples = self._samples or None, 0
        self.forget_losses()

    def reach(self, epoch: int) -> None:
        """Note that the host is in the state of the end of this epoch now."""
        self._steps_at[epoch], self._seconds_at[epoch] = self._way_steps, time.perf_counter() - self._way_began

    def go_back(self, epoch: int) -> tuple[int | None, float | None]:
        """Note that the host is back in the state of the end of an epoch. Return the steps and seconds that this undid; None: not known."""
        steps, seconds = self._steps_at.get(epoch), self._seconds_at.get(epoch)
        lost_steps = None if steps is None else self._way_steps - steps
        lost_seconds = None if seconds is None else time.perf_counter() - self._way_began - seconds
        self._way_steps -= lost_steps or 0
        self._way_began += lost_seconds or 0.0
        return lost_steps, lost_seconds

    def take_skipped(self) -> int:
        """Return the number of skipped steps and reset it."""
        taken, self.skipped = int(self.skipped), 0
        return taken

    def lap(self) -> tuple[float, int]:
        """Return the seconds and samples since the last call."""
        now = time.perf_counter()
        seconds, self._lap_began = now - self._lap_began, now
        samples, self._lap_samples = self._lap_samples, 0
        return seconds, samples

    def state_dict(self) -> dict[str, Any]:
        return {
            "train_losses": list(self.train_losses),
            "val_losses": list(self.val_losses),
            "flops": self.flops,
            "length": self.length,
            "samples_per_epoch": self.samples,
            "steps": self.steps,
            "losses": self._read(),
            "samples": self._samples,
            "skipped": int(self.skipped),
            "way_steps": self._way_steps,
            "steps_at": [[epoch, steps] for epoch, steps in self._steps_at.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.train_losses, self.val_losses = list(state["train_losses"]), list(state["val_losses"])
        self.flops, self.length, self.steps, self._samples = state["flops"], state["length"], state["steps"], state["samples"]
        self.samples = state["samples_per_epoch"]
        self.skipped = state.get("skipped", 0)  # missing in files of earlier versions
        self._losses, self._loaded = [], state["losses"].cpu()
        self._lap_began = time.perf_counter()
        self._way_steps = state.get("way_steps", 0)
        self._steps_at, self._seconds_at = {epoch: steps for epoch, steps in state.get("steps_at", [])}, {}


def chunk_means(losses: Tensor, checks: int) -> Tensor:
    """Split losses [T, ...] into `checks` consecutive parts and return their means [min(checks, T), ...].

    >>> chunk_means(torch.tensor([1.0, 2.0, 3.0, 5.0]), 2).tolist()
    [1.5, 4.0]
    """
    return torch.stack([part.mean(dim=0) for part in losses.tensor_split(min(len(losses), checks))])


def epoch_ended(
    lifecycles: SlotLifecycles[AnyBackend], history: History, decision: Decision, *, learning_rate: float, resources: dict[str, float]
) -> EpochEnded:
    """Build the event for the end of an epoch. Starts the next lap of `history` and resets its count of skipped steps."""
    host = lifecycles.host
    seconds, samples = history.lap()
    actions = [f"{type(action).__name__.lower()} {action.slot}: {action.reason}" for action in decision.actions]
    return EpochEnded(
        epoch=lifecycles.epoch,
        train_loss=history.train_losses[-1],
        val_loss=history.val_losses[-1],
        learning_rate=learning_rate,
        decision="; ".join(filter(None, [*actions, decision.reason])),
        slots=[_slot_view(lifecycles, name) for name in lifecycles.backends],
        parameters=host.parameters + lifecycles.added().parameters,
        flops=host.flops + lifecycles.connected().flops,
        seconds=seconds,
        samples_per_second=samples / seconds if samples else None,
        total_gflops=history.flops / 1e9 if history.flops else None,
        step_seconds=history.step_seconds,
        data_wait_seconds=history.data_wait,
        resources=resources,
        skipped=history.take_skipped(),
    )


def _slot_view(lifecycles: SlotLifecycles[AnyBackend], name: str) -> SlotView:
    """Build the part of the event about one slot."""
    slot = lifecycles.view(name, {})
    gain = slot.contribution.gain if slot.contribution is not None else None
    gradients = slot.gradients
    return SlotView(
        slot=name,
        stage=slot.stage.name,
        blueprint=slot.blueprint,
        alpha=slot.alpha,
        age=slot.age,
        health=None if gradients is None else gradients.health,
        gain=None if gain is None else gain.estimate,
        gain_low=None if gain is None else gain.low,
        gain_high=None if gain is None else gain.high,
        parameters=slot.cost.parameters,
        rent=slot.rent,
        grad_norm=None if gradients is None else gradients.mean_norm,
        skipped=0 if gradients is None else gradients.skipped,
        flops=slot.cost.flops,
    )


def probed(epoch: int, promises: Promises) -> Probed:
    """Build the event for the results of a probe, nested as slot -> blueprint -> estimate."""
    nested: dict[str, dict[str, float]] = {}
    for (slot, blueprint), promise in promises.items():
        nested.setdefault(slot, {})[blueprint] = promise
    return Probed(epoch=epoch, promises=nested)


class Recovers(Protocol):
    """Keeps snapshots of healthy states of a host and restores them."""

    def take_snapshot(self) -> None: ...

    def go_back(self, *, is_repeated: bool) -> int:
        """Restore the latest snapshot and return its epoch.

        `is_repeated` means that the latest snapshot has already led to another disaster; the one before it is restored then.
        """
        ...


class HostGrowth(Generic[AnyBackend]):
    """State and rules of growing one host, epoch by epoch.

    `host` (its cost) and `load` come from the discovery of the host; `epochs` is the planned length of the training, None if unknown.
    `samples` is the number of training samples, where an epoch is not one pass through them. `scale` makes losses comparable. Without it
    and without `config.governor.uninformed_loss`, the mean training loss of the first epoch becomes the uninformed loss.
    """

    def __init__(
        self,
        backends: Mapping[str, AnyBackend],
        config: GrowthConfig,
        *,
        host: Cost,
        load: float,
        epochs: int | None,
        samples: int | None = None,
        scale: LossRange | None = None,
    ) -> None:
        self.config, self.epochs, self.load, self.samples = config, epochs, load, samples
        self.ledger = Ledger(entries=[], refused=[], rollbacks=[])
        self.history = History(config.governor.checks_per_epoch)
        self.lifecycles: SlotLifecycles[AnyBackend] = SlotLifecycles(
            backends, host, config, ledger=self.ledger, on_stage=self._stage_entered
        )
        check_can_grow(self.lifecycles)
        if config.governor.uninformed_loss is not None:
            readout = None if scale is None else scale.readout
            scale = LossRange.of(config.governor.uninformed_loss, loss_range=config.loss_range, readout=readout)
        self.governor = Governor(config.governor, scale)
        self.scale: LossRange | None = None
        if scale is not None:
            self._set_scale(scale)
        self.promises: Promises = {}
        self.measures_kept = False  # the contributions of kept seeds are measured at the end of this epoch
        self._events: deque[Event] = deque()  # events to deliver by `tell`, once all work of the epoch is done

    @property
    def epoch(self) -> int:
        """Number of finished epochs."""
        return self.lifecycles.epoch

    @property
    def is_over(self) -> bool:
        return self.epochs is not None and self.epoch >= self.epochs

    def set_rent(self, rent: RentConfig) -> None:
        """Change the rent from now on."""
        self.config = self.lifecycles.config = msgspec.structs.replace(self.config, rent=rent)

    def is_stuck(self) -> bool:
        """Return whether the validation loss has not improved for `config.patience` epochs while no seed is living."""
        losses, patience = self.history.val_losses, self.config.patience
        if patience is None or len(losses) <= patience or self.lifecycles.living():
            return False
        recent, before = ([loss for loss in some if math.isfinite(loss)] for some in (losses[-patience:], losses[:-patience]))
        return min(recent, default=math.inf) >= min(before, default=math.inf)

    def _set_scale(self, scale: LossRange) -> None:
        self.scale = self.governor.scale = scale
        self.lifecycles.set_unit(scale.unit)

    # Deciding

    def state(self, *, learning_rate: float) -> GrowthState:
        """Return the input of a controller."""
        allowed = self.lifecycles.allowance()
        return GrowthState(
            epoch=self.epoch,
            epochs=self.epochs,
            steps_per_epoch=self.history.length or 0,
            train_losses=tuple(self.history.train_losses),
            val_losses=tuple(self.history.val_losses),
            slots=self.lifecycles.views(self.promises),
            host_cost=self.lifecycles.host,
            added=self.lifecycles.added(),
            parameters_left=allowed.parameters,
            flops_left=allowed.flops,
            seeds_left=allowed.seeds,
            rollbacks=self.governor.rollbacks,
            scale=self.scale,
            lifecycle=self.config.lifecycle,
            learning_rate=learning_rate,
            samples_per_epoch=self.history.samples,
            host_load=self.load,
            rent=self.config.rent,
            training_samples=self.samples,
        )

    def carry_out(self, decision: Decision, *, by: str) -> None:
        """Execute the actions that pass their gates; note the refused ones in the ledger and as events.

        `by` is the name of the controller. More than one action for a slot raises GrowthError before anything is done.
        """
        slots = [action.slot for action in decision.actions]
        if len(set(slots)) < len(slots):
            raise GrowthError(
                f"the controller {by!r} decided twice about one slot ({', '.join(slots)}); return at most one action per slot"
            )
        for action in decision.actions:
            answer = ask_gate(self.lifecycles, action)
            if answer.passed:
                self._carry_out(action)
            else:
                self._refuse(action, answer.reason)
        self.measures_kept = decision.measure_kept
        if decision.passed_over:
            self.emit(PassedOver(epoch=self.epoch, reasons={slot: dict(row) for slot, row in decision.passed_over.items()}))

    def _carry_out(self, action: Action) -> None:
        """Execute an action that has passed its gate, and emit the event of a host that becomes wider or smaller."""
        backend = self.lifecycles.backends[action.slot]
        if isinstance(action, Germinate) and (blueprint := get_blueprint(action.blueprint)).share is not None:
            chain = widened_by(blueprint, backend.place_now())
            units, before = {one.name: one.added(blueprint.share) for one in chain}, {one.name: one.width + one.kept for one in chain}
            self.emit(Widened(epoch=self.epoch, slot=action.slot, blueprint=action.blueprint, units=units, before=before))
        if isinstance(action, Shrink):
            view = self.lifecycles.view(action.slot, {})
            assert view.contribution is not None  # the gate has asked for it
            self.emit(Shrunk.of(action.slot, view.cost, view.contribution.gain, view.rent, epoch=self.epoch))
        carry_out(self.lifecycles, action, is_over=self.is_over)

    def _refuse(self, action: Action, reason: str) -> None:
        name = type(action).__name__.lower()
        life = self.lifecycles.backends[action.slot].life
        blueprint = action.blueprint if isinstance(action, Germinate) else (life.blueprint or "") if life.stage in OCCUPIED else ""
        self.ledger.refused.append(Refused(self.epoch, action.slot, name, reason, blueprint))
        self.emit(ActionRefused(epoch=self.epoch, slot=action.slot, action=name, reason=reason, blueprint=blueprint))

    # The end of an epoch

    def on_trial(self) -> dict[str, float]:
        """Return the slots whose seeds' contributions are measured at the end of this epoch, with the confidence of each interval.

        These are the seeds whose shortest probation is over by then, and kept seeds if the controller asked for them. Each is measured
        again after every further epoch, up to the end of the training, and the confidence accounts for all of these looks.
        """
        least = self.config.lifecycle.holding_epochs
        later = None if self.epochs is None else max(self.epochs - self.epoch - 1, 0)  # looks after this one; None: unknown
        return {
            name: confidence_of_look(backend.life.looks + 1, None if later is None else backend.life.looks + 1 + later)
            for name, backend in self.lifecycles.backends.items()
            if (backend.life.stage is Stage.HOLDING and backend.life.epochs_in_stage + 1 >= least and not backend.life.is_withdrawing)
            or (backend.life.stage is Stage.FOSSILIZED and self.measures_kept)
        }

    def suspects(self) -> dict[str, int]:
        """Return the slots with a connected seed that is not fossilized, and the seeds' numbers. One of them may have caused a disaster.

        A seed that is being withdrawn is none of them: if it had a part in the disaster, then by its removal.
        """
        return {
            name: backend.life.number
            for name, backend in self.lifecycles.backends.items()
            if backend.is_connected
            and backend.life.stage is not Stage.FOSSILIZED
            and backend.life.number is not None
            and not backend.life.is_withdrawing
        }

    def _withdrawn(self) -> set[int]:
        """Return the numbers of the seeds that are being withdrawn."""
        lives = (backend.life for backend in self.lifecycles.backends.values())
        return {life.number for life in lives if life.is_withdrawing and life.number is not None}

    def find_scale(self, chunks: list[float], val_loss: float) -> None:
        """Set the scale from the losses of an epoch, usually the first, if it is not known yet. All ranks must pass the same losses."""
        first = sum(chunks) / len(chunks) if chunks else val_loss
        if self.scale is None and math.isfinite(first):
            self._set_scale(LossRange.of(first, loss_range=self.config.loss_range, is_guess=True))

    def verdict(self, chunks: list[float], val_loss: float) -> Verdict:
        """Return the governor's verdict on an epoch. `chunks` are the mean training losses of its parts, in order. May set the scale."""
        self.find_scale(chunks, val_loss)
        return self.governor.judge(chunks, val_loss, is_blameless=not self.suspects() and not self._withdrawn())

    def end_epoch(self, chunks: list[float], val_loss: float, measured: Mapping[str, Contribution], promises: Promises | None) -> None:
        """Close an epoch: note losses, contributions and the results of the probe, and emit their events.

        `promises` is None if no probe ran in this epoch.
        """
        self.history.end_epoch(chunks, val_loss)
        self.lifecycles.steps_per_epoch = self.history.length or 0
        self.lifecycles.end_epoch()
        self.history.reach(self.epoch)
        # Contributions belong to the epoch that has just ended, so they are noted after the lifecycles have counted it.
        for name, contribution in measured.items():
            self.lifecycles.note_contribution(name, contribution)
            gain, rent = contribution.gain, self.lifecycles.rent(name)
            self.emit(Measured(epoch=self.epoch, slot=name, gain=gain.estimate, gain_low=gain.low, gain_high=gain.high, rent=rent))
        self.promises = capped(promises, loss=self._loss_left(), steps=self.history.length or 0) if promises else {}
        if promises is not None:
            self.emit(probed(self.epoch, self.promises))

    def _loss_left(self) -> float | None:
        """Return how far the training loss can still fall; None before the scale is known."""
        return None if self.scale is None else self.history.train_losses[-1] - self.scale.floor

    def settle(self, verdict: Verdict, chunks: list[float], recovery: Recovers) -> None:
        """After an epoch without a disaster: reset the count of rollbacks in a row, and take a snapshot if one is due."""
        # Without chunks, all losses of the epoch were forgotten by a rollback, so nothing shows that the state is healthy.
        if chunks:
            self.governor.rollbacks_in_a_row = 0
        if chunks and verdict.is_healthy and self.epoch % self.config.governor.snapshot_every == 0:
            recovery.take_snapshot()

    def go_back(self, reason: str, recovery: Recovers) -> None:
        """After a disaster: restore the host to a healthy snapshot and put the slots of all suspects under embargo.

        Seeds that were pruned or began to be withdrawn since the snapshot come back, see `SlotLifecycles.bring_back`.
        """
        suspects = self.suspects()
        removed = self._withdrawn() | {entry.number for entry in self.ledger.entries if entry.outcome == "pruned"}
        # Restore first: if that is not possible, it raises before anything else has changed.
        to_epoch = recovery.go_back(is_repeated=self.governor.rollbacks_in_a_row > 0)
        steps_lost, seconds_lost = self.history.go_back(to_epoch)
        self.governor.note_rollback()
        self.history.forget_losses()
        # The seeds are those of the snapshot again. Correct the ledger, then prune and embargo the suspects.
        why = f"the governor went back: {reason}"
        self.lifecycles.square_ledger(why, removed=removed)
        for name, number in suspects.items():
            self.lifecycles.banish(name, number, why)
        back = self.lifecycles.bring_back(removed)
        self.ledger.rollbacks.append(Rollback(self.epoch, to_epoch, reason))
        self.emit(
            RolledBack(
                epoch=self.epoch,
                to_epoch=to_epoch,
                reason=reason,
                embargoed=[name for name in suspects if name in self.lifecycles.backends],
                brought_back=back,
                steps_lost=steps_lost,
                seconds_lost=seconds_lost,
            )
        )

    def check_not_diverged(self, reason: str) -> None:
        """Raise Diverged after more rollbacks in a row than the config allows."""
        if self.governor.rollbacks_in_a_row > self.config.governor.max_rollbacks:
            to_epoch = self.ledger.rollbacks[-1].to_epoch
            raise Diverged(
                f"the training fails again and again from a healthy state: {reason}. The model was restored to its state after epoch "
                f"{to_epoch}; look for NaN in the data, or lower the learning rate"
            )

    # Events

    def emit(self, event: Event) -> None:
        """Queue an event until `tell` is called."""
        self._events.append(event)

    def tell(self, on_event: Callable[[Event], None]) -> None:
        """Pass all queued events to `on_event`, oldest first."""
        while self._events:
            on_event(self._events.popleft())

    def _stage_entered(self, slot: str, blueprint: str, stage: Stage, reason: str) -> None:
        self.emit(StageEntered(epoch=self.epoch, slot=slot, blueprint=blueprint, stage=stage.name, reason=reason))

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the state except for the seeds and the governor's losses, which are saved together with the weights of the host."""
        return {
            "ledger": msgspec.to_builtins(self.ledger),
            "chronicle": self.history.state_dict(),  # "chronicle" is the name that History had in earlier versions
            "epoch": self.epoch,
            "measures_kept": self.measures_kept,
            "promises": [[slot, blueprint, value] for (slot, blueprint), value in self.promises.items()],
            "scale": None if self.scale is None else list(astuple(self.scale)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        ledger = msgspec.convert(state["ledger"], Ledger)
        self.ledger.entries, self.ledger.refused, self.ledger.rollbacks = ledger.entries, ledger.refused, ledger.rollbacks
        self.history.load_state_dict(state["chronicle"])
        self.lifecycles.epoch = state["epoch"]
        self.lifecycles.steps_per_epoch = self.history.length or 0
        self.promises = {(slot, blueprint): value for slot, blueprint, value in state["promises"]}
        self.measures_kept = state.get("measures_kept", False)  # missing in files of earlier versions
        if state["scale"] is not None:
            self._set_scale(LossRange(*state["scale"]))  # of three numbers in files of earlier versions, which know no readout


def ask_gate(lifecycles: SlotLifecycles[AnyBackend], action: Action) -> Answer:
    """Return the answer of the gate that `action` has to pass."""
    slot, rules = lifecycles.view(action.slot, {}), lifecycles.config.lifecycle
    match action:
        case Germinate():
            names = [option.name for option in lifecycles.options[action.slot]]
            if action.blueprint not in names:
                return Answer(False, f"{action.blueprint!r} cannot grow there; blueprints that can: {', '.join(names) or 'none'}")
            return may_germinate(slot, lifecycles.allowance().refusal(lifecycles.price(action.slot, action.blueprint)))
        case Advance():
            return may_blend(slot, rules)
        case Retarget():
            return may_retarget(slot, action.alpha)
        case Fossilize():
            return may_fossilize(slot, rules, epoch=lifecycles.epoch)
        case Prune():
            return may_prune(slot)
        case Shrink():
            return may_shrink(slot, epoch=lifecycles.epoch, refusal=lifecycles.backends[action.slot].why_not_removed())
    raise GrowthError(
        f"{type(action).__name__} is not an action of a controller; use Germinate, Advance, Retarget, Fossilize, Prune or Shrink"
    )


def carry_out(lifecycles: SlotLifecycles[AnyBackend], action: Action, *, is_over: bool) -> None:
    """Execute an action that has passed its gate.

    A connected seed is pruned gradually, unless the training is over: then no epochs are left in which alpha could fall.
    """
    match action:
        case Germinate():
            lifecycles.germinate(action.slot, action.blueprint, action.reason)
        case Advance():
            lifecycles.blend(action.slot, action.reason)
        case Retarget():
            lifecycles.blend(action.slot, action.reason, alpha=action.alpha)
        case Fossilize():
            lifecycles.fossilize(action.slot, action.reason)
        case Prune():
            (lifecycles.prune if is_over else lifecycles.withdraw)(action.slot, action.reason)
        case Shrink():
            lifecycles.shrink(action.slot, action.reason)


def check_can_grow(lifecycles: SlotLifecycles[AnyBackend]) -> None:
    """Raise GrowthError unless at least one blueprint fits at least one slot and the budget."""
    options = [(name, option.name) for name, options in lifecycles.options.items() for option in options]
    if not options:
        raise GrowthError(f"none of the blueprints {lifecycles.config.blueprints} fits into any slot; see describe()")
    allowed = lifecycles.allowance()
    refusals = [(name, option, allowed.refusal(lifecycles.price(name, option))) for name, option in options]
    if all(refusal is not None for _, _, refusal in refusals):
        name, option, refusal = refusals[0]
        raise GrowthError(f"the budget is smaller than any blueprint; {option} after {name!r}: {refusal}. Raise the budget")
