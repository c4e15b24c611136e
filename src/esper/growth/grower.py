"""The grower: lives beside a training loop, lets the controller decide once an epoch, and lets the governor watch.

    slotted = add_slots(model, example_input=x[:2])
    grower = Grower(slotted, optimizer, epochs=30)
    for epoch in range(30):
        for x, y in loader:
            loss = loss_fn(slotted(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            grower.after_step(loss)
        grower.after_epoch(evaluate)            # evaluate() gives the validation loss of every batch, always in the same order
    model = slotted.bake()

Under DistributedDataParallel every rank does the same, the seeds' gradients are averaged here, and rank 0 decides for all.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from esper.events import Event
from esper.growth.chronicle import Chronicle
from esper.growth.config import GrowthConfig
from esper.growth.contribution import Evaluate, Measurement
from esper.growth.controllers import make_controller
from esper.growth.decisions import Action, Advance, Controller, Decision, Fossilize, Germinate, Prune, Retarget
from esper.growth.errors import GrowthError
from esper.growth.events import ActionRefused, EpochEnded, Probed, RolledBack, SlotView, StageEntered
from esper.growth.garden import Garden
from esper.growth.gates import Answer, may_blend, may_fossilize, may_germinate, may_prune, may_retarget
from esper.growth.governor import Diverged
from esper.growth.ledger import Ledger, Refused, Rollback
from esper.growth.lifecycle import Stage
from esper.growth.prober import Prober, Promises
from esper.growth.recovery import Recovery
from esper.growth.seed_learner import MakeOptimizer
from esper.growth.shadow import Closure, Shadow
from esper.growth.slotted import Slotted
from esper.growth.state import Contribution, GrowthState
from esper.parallel import ALONE, Ranks


class Grower:
    """Owns the seeds' optimisers, their lives, the snapshots and the ledger.

    `optimizer`, `scaler` and `scheduler` are the user's, needed to follow learning rates and to go back after a disaster; `scheduler` is
    anything with a `state_dict`. `epochs` is how long the training is planned to be: a controller that knows it does not grow too late.
    """

    def __init__(
        self,
        slotted: Slotted,
        optimizer: Optimizer,
        *,
        scaler: GradScaler | None = None,
        scheduler: Any = None,
        controller: Controller | str = "heuristic",
        config: GrowthConfig | None = None,
        epochs: int | None = None,
        seed_optimizer: MakeOptimizer | None = None,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self.slotted, self.optimizer, self.scaler, self.epochs = slotted, optimizer, scaler, epochs
        self.config = config or GrowthConfig()
        self.controller = make_controller(controller, self.config) if isinstance(controller, str) else controller
        self.ledger = Ledger(entries=[], refused=[], rollbacks=[])
        self.chronicle = Chronicle(self.config.governor.checks_per_epoch)
        self.garden = Garden(
            slotted, optimizer, self.config, ledger=self.ledger, on_stage=self._stage_entered, make_optimizer=seed_optimizer
        )
        self._check_budget()
        self._recovery = Recovery(slotted, optimizer, self.garden, self.config.governor, scaler=scaler, scheduler=scheduler)
        self._prober = Prober(slotted, self.garden, optimizer)
        self._measurement = Measurement(slotted)
        self._shadow = Shadow(slotted, alpha=self.config.lifecycle.alpha_target)
        self._promises: Promises = {}
        self._emit = on_event
        self._group = Ranks() if isinstance(slotted.model, nn.parallel.DistributedDataParallel) and dist.is_initialized() else ALONE
        self._scale = self._current_scale()  # that of the backward pass to come
        self._has_begun = False

    @property
    def epoch(self) -> int:
        """Finished so far."""
        return self.garden.epoch

    @property
    def rollbacks(self) -> int:
        return self._recovery.rollbacks

    # What the training loop calls

    def begin(self) -> None:
        """The first decision, before any training: a schedule may grow at once. Later calls do nothing."""
        if self._has_begun:
            return
        self._has_begun = True
        self._recovery.take_snapshot()
        self._decide()
        self._get_ready(scale=1.0)
        self.chronicle.lap()

    def after_step(self, loss: Tensor | float, *, closure: Closure | None = None, samples: int | None = None) -> None:
        """Call it after every step of the optimiser. `closure` computes this step's loss again, for seeds that are raised in the shadow.

        `samples` in this step, if told, make the FLOPs countable.
        """
        if closure is None and self.config.lifecycle.raise_mode == "shadow":
            raise GrowthError(
                "seeds in the shadow learn by a second forward pass; pass after_step(loss, closure=lambda: loss_fn(slotted(x), y)), "
                "or raise them jointly"
            )
        self.begin()
        value = loss.detach().reshape(()) if isinstance(loss, Tensor) else torch.tensor(float(loss))
        self.chronicle.note_step(value, samples=samples, flops_per_sample=self._step_flops())
        scale, self._scale = self._scale, self._current_scale()
        # Elsewhere a look at every loss would wait for the device, or for the other ranks; there the end of the epoch shows it.
        if value.device.type == "cpu" and self._group.world_size == 1 and not math.isfinite(float(value)):
            self._go_back(f"the training loss of step {self.chronicle.steps} is {float(value)}")
            return
        self.garden.step(scale=scale, must_check=self.scaler is not None, group=self._group)
        learning = self.garden.in_shadow()
        if learning and closure is not None:
            self._shadow.step(learning, closure, scale=self._scale, group=self._group)
        self.garden.tick()
        self._get_ready(scale=scale)

    def after_epoch(self, evaluate: Evaluate) -> EpochEnded:
        """Call it after every epoch. `evaluate()` gives the validation loss of every batch; it is called once more for each seed on trial.

        It is the user's: it puts the model into eval mode and switches gradients off. The modes of all modules are put back after it.
        Until it has given everything that is needed nothing is changed, so an error in it leaves all as it was.
        """
        self.begin()
        self._shadow.rest()
        promises = self._prober.finish()
        with _modes_kept(self.slotted):
            measured = self._agreed(self._measurement.measure(evaluate, self._on_trial(), epoch=self.epoch + 1))
        chunks = self.chronicle.chunks()
        val_loss = sum(measured.losses) / len(measured.losses)
        verdict = self._group.first(lambda: self._recovery.judge(chunks, val_loss))
        self._end_epoch(chunks, val_loss, measured.contributions, self._agreed(promises))
        if verdict.is_disaster:
            self._go_back(verdict.reason)
            decision = Decision(reason=f"went back to a healthy state: {verdict.reason}")
        else:
            self._recovery.in_a_row = 0
            if verdict.is_healthy and self.epoch % self.config.governor.snapshot_every == 0:
                self._recovery.take_snapshot()
            decision = self._decide()
        self._get_ready(scale=1.0)
        return self._report(decision)

    def bake(self) -> nn.Module:
        """The model with the fossilized seeds in it, and nothing else of ours."""
        self._rest()
        return self.slotted.bake()

    def count_evaluation(self, samples: int) -> None:
        """Adds the FLOPs of a forward pass over so many samples; `evaluate` may call it."""
        self.chronicle.flops += samples * (self.slotted.survey.host.flops + self.garden.connected().flops)

    # Deciding

    def state(self) -> GrowthState:
        """What a controller sees."""
        allowed = self.garden.allowance()
        return GrowthState(
            epoch=self.epoch,
            epochs=self.epochs,
            steps_per_epoch=self.chronicle.length or 0,
            train_losses=tuple(self.chronicle.train_losses),
            val_losses=tuple(self.chronicle.val_losses),
            slots=tuple(self.garden.view(name, self._promises) for name in self.garden.beds),
            host_cost=self.slotted.survey.host,
            added=self.garden.added(),
            parameters_left=allowed.parameters,
            flops_left=allowed.flops,
            seeds_left=allowed.seeds,
            rollbacks=self.rollbacks,
            uninformed_loss=self.config.governor.uninformed_loss,
            learning_rate=float(self.optimizer.param_groups[0]["lr"]),
        )

    def _decide(self) -> Decision:
        decision = self._group.first(lambda: self.controller.decide(self.state()))
        slots = [self.slotted.slot(action.slot).place.name for action in decision.actions]
        if len(set(slots)) < len(slots):
            raise GrowthError(f"the controller {self.controller.name!r} decided twice about one slot: {', '.join(slots)}")
        for action in decision.actions:
            answer = self._agreed(self._gate(action))
            if answer.passed:
                self._do(action)
            else:
                self._refuse(action, answer.reason)
        if decision.probe:
            self._prober.request()
        return decision

    def _gate(self, action: Action) -> Answer:
        slot = self.garden.view(action.slot, {})
        match action:
            case Germinate():
                names = [option.name for option in self.garden.options[action.slot]]
                if action.blueprint not in names:
                    return Answer(False, f"{action.blueprint!r} cannot grow there; what can is {', '.join(names)}")
                return may_germinate(slot, self.garden.price(action.slot, action.blueprint), self.garden.allowance())
            case Advance():
                return may_blend(slot, self.config.lifecycle)
            case Retarget():
                return may_retarget(slot, action.alpha)
            case Fossilize():
                return may_fossilize(slot, self.config.lifecycle, epoch=self.epoch)
            case Prune():
                return may_prune(slot)
        raise GrowthError(f"{type(action).__name__} is no action that a controller can decide on")

    def _do(self, action: Action) -> None:
        match action:
            case Germinate():
                self.garden.germinate(action.slot, action.blueprint, action.reason)
            case Advance():
                self.garden.blend(action.slot, action.reason)
            case Retarget():
                self.garden.blend(action.slot, action.reason, alpha=action.alpha)
            case Fossilize():
                self.garden.fossilize(action.slot, action.reason)
            case Prune():
                is_over = self.epochs is not None and self.epoch >= self.epochs
                (self.garden.prune if is_over else self.garden.withdraw)(action.slot, action.reason)

    def _refuse(self, action: Action, reason: str) -> None:
        name = type(action).__name__.lower()
        self.ledger.refused.append(Refused(self.epoch, action.slot, name, reason))
        self._emit(ActionRefused(epoch=self.epoch, slot=action.slot, action=name, reason=reason))

    def _on_trial(self) -> list[str]:
        """Seeds that will have been on probation long enough when this epoch is over."""
        least = self.config.lifecycle.holding_epochs
        return [
            name
            for name, bed in self.garden.beds.items()
            if bed.life.stage is Stage.HOLDING and bed.life.epochs_in_stage + 1 >= least and not bed.life.is_withdrawing
        ]

    # What happens around decisions

    def _go_back(self, reason: str) -> None:
        self._rest()
        suspects = {name: bed.life.number for name, bed in self.garden.beds.items() if bed.slot.is_connected and not bed.slot.is_kept}
        to_epoch = self._recovery.go_back()
        self._scale = self._current_scale()
        for name, number in suspects.items():
            assert number is not None
            self.garden.banish(name, number, f"the governor went back: {reason}")
        self.ledger.rollbacks.append(Rollback(self.epoch, to_epoch, reason))
        self._emit(RolledBack(epoch=self.epoch, to_epoch=to_epoch, reason=reason, embargoed=list(suspects)))
        if self._recovery.in_a_row > self.config.governor.max_rollbacks:
            raise Diverged(
                f"the training fails again and again from a healthy state: {reason}. The model is as it was after epoch {to_epoch}; "
                "look for NaN in the data, or lower the learning rate"
            )

    def _get_ready(self, *, scale: float) -> None:
        """For the next forward pass."""
        self._prober.after_step(self.chronicle.steps, length=self.chronicle.length, scale=scale)
        self._shadow.prepare(self.garden.in_shadow())

    def _rest(self) -> None:
        """Nothing of ours is at work in the model but connected seeds."""
        self._prober.finish()
        self._shadow.rest()

    def _end_epoch(self, chunks: list[float], val_loss: float, measured: dict[str, Contribution], promises: Promises | None) -> None:
        self.chronicle.end_epoch(chunks, val_loss)
        self.garden.steps_per_epoch = self.chronicle.length or 0
        self.garden.end_epoch()
        for name, contribution in measured.items():
            self.garden.note_contribution(name, contribution)
        self._promises = promises or {}
        if promises is not None:
            nested: dict[str, dict[str, float]] = {}
            for (slot, blueprint), promise in promises.items():
                nested.setdefault(slot, {})[blueprint] = promise
            self._emit(Probed(epoch=self.epoch, promises=nested))

    def _check_budget(self) -> None:
        allowed = self.garden.allowance()
        options = [(name, option.name) for name, options in self.garden.options.items() for option in options]
        if not options:
            raise GrowthError(f"none of the blueprints {self.config.blueprints} fits into any slot; see describe()")
        refusals = [(name, option, allowed.refusal(self.garden.price(name, option))) for name, option in options]
        if all(refusal is not None for _, _, refusal in refusals):
            name, option, refusal = refusals[0]
            raise GrowthError(f"the budget is smaller than any blueprint; {option} after {name!r}: {refusal}. Raise the budget")

    def _agreed(self, value: Any) -> Any:
        """What rank 0 has found."""
        return self._group.first(lambda: value)

    def _current_scale(self) -> float:
        return self.scaler.get_scale() if self.scaler is not None and self.scaler.is_enabled() else 1.0

    def _step_flops(self) -> int:
        shadow = self.garden.in_shadow()
        second = self._shadow.flops(shadow, [self.garden.cost(bed.slot.place.name) for bed in shadow])
        return 3 * (self.slotted.survey.host.flops + self.garden.connected().flops) + second + self._prober.flops

    def _stage_entered(self, slot: str, blueprint: str, stage: Stage, reason: str) -> None:
        self._emit(StageEntered(epoch=self.epoch, slot=slot, blueprint=blueprint, stage=stage.name, reason=reason))

    def _report(self, decision: Decision) -> EpochEnded:
        host = self.slotted.survey.host
        seconds, samples = self.chronicle.lap()
        actions = [f"{type(action).__name__.lower()} {action.slot}: {action.reason}" for action in decision.actions]
        event = EpochEnded(
            epoch=self.epoch,
            train_loss=self.chronicle.train_losses[-1],
            val_loss=self.chronicle.val_losses[-1],
            learning_rate=float(self.optimizer.param_groups[0]["lr"]),
            decision="; ".join(filter(None, [*actions, decision.reason])),
            slots=[_slot_view(self.garden, name) for name in self.garden.beds],
            parameters=host.parameters + self.garden.added().parameters,
            flops=host.flops + self.garden.connected().flops,
            seconds=seconds,
            samples_per_second=samples / seconds if samples else None,
            total_gflops=self.chronicle.flops / 1e9 if self.chronicle.flops else None,
        )
        self._emit(event)
        return event

    # Resuming

    def state_dict(self) -> dict[str, Any]:
        """Everything, host, optimiser, schedule and loss scale included; between two steps."""
        return {
            "recovery": self._recovery.state_dict(),
            "controller": {"name": self.controller.name, "state": self.controller.state_dict()},
            "ledger": msgspec.to_builtins(self.ledger),
            "chronicle": self.chronicle.state_dict(),
            "epoch": self.epoch,
            "has_begun": self._has_begun,
            "promises": [[slot, blueprint, value] for (slot, blueprint), value in self._promises.items()],
            "probe": self._prober.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = state["controller"]["name"]
        if saved != self.controller.name:
            raise GrowthError(f"the saved run was decided by {saved!r}, not by {self.controller.name!r}")
        self._rest()
        ledger = msgspec.convert(state["ledger"], Ledger)
        self.ledger.entries, self.ledger.refused, self.ledger.rollbacks = ledger.entries, ledger.refused, ledger.rollbacks
        self.garden.epoch = state["epoch"]
        self._recovery.load_state_dict(state["recovery"])
        self.controller.load_state_dict(state["controller"]["state"])
        self.chronicle.load_state_dict(state["chronicle"])
        self.garden.steps_per_epoch = self.chronicle.length or 0
        self._has_begun = state["has_begun"]
        self._promises = {(slot, blueprint): value for slot, blueprint, value in state["promises"]}
        self._scale = self._current_scale()
        self._prober.load_state_dict(state["probe"])
        self._get_ready(scale=1.0)
        self.chronicle.lap()


def _slot_view(garden: Garden, name: str) -> SlotView:
    slot = garden.view(name, {})
    gain = slot.contribution.gain if slot.contribution is not None else None
    return SlotView(
        slot=name,
        stage=slot.stage.name,
        blueprint=slot.blueprint,
        alpha=slot.alpha,
        age=slot.age,
        health=None if slot.gradients is None else slot.gradients.health,
        gain=None if gain is None else gain.estimate,
        gain_low=None if gain is None else gain.low,
        gain_high=None if gain is None else gain.high,
        parameters=slot.cost.parameters,
        rent=slot.rent,
    )


@contextlib.contextmanager
def _modes_kept(slotted: Slotted) -> Iterator[None]:
    """Which modules are in training mode is afterwards as it was, whatever happens."""
    seeds = [slot.seed for slot in slotted.slots.values() if slot.seed is not None]
    modes = [(module, module.training) for root in (slotted.model, *seeds) for module in root.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
