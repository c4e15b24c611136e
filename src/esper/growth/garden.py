"""The garden: every slot of a host, the life of the seed in it, and the moves from stage to stage.

It does as it is told. Whether a move is wise is the controller's business, whether it is allowed that of the gates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from esper.growth.bed import Bed, Life, Ramp, SeedPlan
from esper.growth.blueprints import Blueprint, blueprints_for, cost_of, get_blueprint
from esper.growth.config import GrowthConfig
from esper.growth.gates import may_move
from esper.growth.ledger import Entry, Ledger, Outcome, Step
from esper.growth.lifecycle import LIVING, OCCUPIED, Stage
from esper.growth.place import Place
from esper.growth.rent import Allowance, allowance, marginal_rent, total
from esper.growth.seed import GATE_WIDTH
from esper.growth.state import Candidate, Contribution, Cost, SlotState
from esper.rng import Streams

Promised = Mapping[tuple[str, str], float]  # slot and blueprint -> fall of the loss per step, as a probe has found
OnStage = Callable[[str, str, Stage, str], None]  # slot, blueprint, stage, reason
AnyBed = TypeVar("AnyBed", bound=Bed)


def options_for(place: Place, config: GrowthConfig) -> tuple[Blueprint, ...]:
    """What may grow in a place; a gate looks at the whole sequence, which is not allowed everywhere."""
    is_closed = (place.is_causal or bool(place.alone)) and config.lifecycle.blending == "gate"
    return () if is_closed else blueprints_for(place, config.blueprints)


class Garden(Generic[AnyBed]):
    """`host` is what the host costs without seeds."""

    def __init__(self, beds: Mapping[str, AnyBed], host: Cost, config: GrowthConfig, *, ledger: Ledger, on_stage: OnStage) -> None:
        self.beds, self.host, self.config, self.ledger = dict(beds), host, config, ledger
        self.epoch = 0
        self.steps_per_epoch = 0  # of the last epoch
        self.unit = 1.0  # of the loss, see LossScale
        self._on_stage = on_stage
        self._streams = Streams(config.seed)
        self.options: dict[str, tuple[Blueprint, ...]] = {name: options_for(bed.place, config) for name, bed in self.beds.items()}
        self._prices: dict[tuple[str, str], tuple[Blueprint, Cost]] = {}  # those that were asked for, by slot and blueprint

    # Moves

    def germinate(self, name: str, blueprint: str, reason: str) -> None:
        """A new seed, which starts to learn at once: with the host, or in the shadow."""
        bed, rules = self.beds[name], self.config.lifecycle
        number = len(self.ledger.entries) + 1
        is_joint = rules.raise_mode == "joint"
        random_seed = self._streams.integer(f"seed {number}")
        bed.plant(SeedPlan(blueprint, random_seed, rules.blending, is_joint, alpha=1.0 if is_joint else 0.0, warmup=self._warmup()))
        bed.life = Life(blueprint=blueprint, number=number, tried=bed.life.tried)
        cost = self.price(name, blueprint)
        self.ledger.entries.append(
            Entry(number, name, blueprint, rules.raise_mode, self.epoch, reason, cost.parameters, cost.flops, steps=[])
        )
        self._enter(name, Stage.GERMINATED, reason)
        if is_joint:
            self._enter(name, Stage.HOLDING, "it is the identity, so it learns with the host from the start")
        else:
            self._enter(name, Stage.TRAINING, "it learns in the shadow")

    def blend(self, name: str, reason: str, *, alpha: float | None = None) -> None:
        """Alpha begins to move to a target; from TRAINING, the seed is connected."""
        bed, rules = self.beds[name], self.config.lifecycle
        target = rules.alpha_target if alpha is None else alpha
        bed.connect()
        if bed.life.stage is not Stage.BLENDING:
            self._enter(name, Stage.BLENDING, reason)
        self._ramp(bed, target, rules.blend_epochs)

    def fossilize(self, name: str, reason: str) -> None:
        bed = self.beds[name]
        self._enter(name, Stage.FOSSILIZED, reason)
        bed.keep()
        self._close(name, "kept")

    def withdraw(self, name: str, reason: str) -> None:
        """Prunes gently: alpha falls first, so that the host can take over."""
        bed, rules = self.beds[name], self.config.lifecycle
        if not bed.is_connected or rules.withdraw_epochs == 0 or bed.alpha == 0.0:
            self.prune(name, reason)
            return
        if bed.life.stage is not Stage.BLENDING:
            self._enter(name, Stage.BLENDING, f"{reason}; alpha falls to 0")
        bed.life.is_withdrawing, bed.life.why_withdrawn = True, reason
        self._ramp(bed, 0.0, rules.withdraw_epochs)

    def prune(self, name: str, reason: str, *, outcome: Outcome = "pruned") -> None:
        """Takes the seed out at once. The slot waits before anything may grow in it again."""
        bed = self.beds[name]
        self._enter(name, Stage.PRUNED, reason)
        self._close(name, outcome)
        blueprint = bed.life.blueprint
        assert blueprint is not None
        bed.uproot()
        bed.life = Life(stage=Stage.PRUNED, blueprint=blueprint, tried=[*bed.life.tried, blueprint])
        self._embargo(name)

    def banish(self, name: str, number: int, reason: str) -> None:
        """After a rollback: the seed with this number was there when it went wrong, whether or not it was there before."""
        life = self.beds[name].life
        if life.number == number:
            self.prune(name, reason, outcome="rolled back")
            return
        entry = self.ledger.entries[number - 1]
        if entry.outcome != "rolled back":
            self._undo(entry, reason)
        if life.stage is Stage.DORMANT:
            life.stage, life.blueprint, life.tried = Stage.PRUNED, entry.blueprint, [*life.tried, entry.blueprint]
            self._embargo(name)

    def square_ledger(self, reason: str) -> None:
        """After a rollback: seeds that have come back live again, whatever became of them since; those that are gone never were."""
        there = {bed.life.number: bed.life for bed in self.beds.values() if bed.life.number is not None}
        for entry in self.ledger.entries:
            life = there.get(entry.number)
            if life is None and entry.outcome in ("living", "kept"):
                self._undo(entry, reason)
            elif life is not None and life.stage in LIVING and entry.outcome != "living":
                entry.outcome, entry.ended = "living", None
                entry.steps.append(Step(self.epoch, life.stage, f"it is back: {reason}"))

    def _undo(self, entry: Entry, reason: str) -> None:
        entry.outcome, entry.ended = "rolled back", self.epoch
        entry.steps.append(Step(self.epoch, Stage.PRUNED, reason))

    def _embargo(self, name: str) -> None:
        life, epochs = self.beds[name].life, self.config.lifecycle.embargo_epochs
        self._enter(name, Stage.EMBARGOED, f"nothing grows here for {epochs} epochs")
        life.embargo_left = epochs
        if epochs == 0:
            self._enter(name, Stage.DORMANT, "there is no embargo")

    def _enter(self, name: str, stage: Stage, reason: str) -> None:
        life = self.beds[name].life
        answer = may_move(life.stage, stage)
        assert answer.passed, f"{name}: {answer.reason}"
        life.stage, life.epochs_in_stage = stage, 0
        entry = self._entry(life)
        if entry is not None:
            entry.steps.append(Step(self.epoch, stage, reason))
        self._on_stage(name, life.blueprint or "", stage, reason)
        if stage is Stage.DORMANT:
            life.blueprint = None

    def _close(self, name: str, outcome: Outcome) -> None:
        entry = self._entry(self.beds[name].life)
        assert entry is not None
        entry.outcome, entry.ended = outcome, self.epoch

    def _entry(self, life: Life) -> Entry | None:
        return None if life.number is None else self.ledger.entries[life.number - 1]

    # Time

    def tick(self) -> None:
        """A training step is over: alphas move."""
        for bed in self.beds.values():
            ramp = bed.life.ramp
            if ramp is not None and ramp.done < ramp.steps:
                ramp.done += 1
                bed.alpha = ramp.alpha(self.config.lifecycle.alpha_curve)

    def _ramp(self, bed: AnyBed, target: float, epochs: int) -> None:
        steps = epochs * max(self.steps_per_epoch, 1)
        if steps == 0:
            bed.alpha, bed.life.ramp = target, None
        else:
            bed.life.ramp = Ramp(bed.alpha, target, steps)

    def end_epoch(self) -> None:
        """Everyone is an epoch older, gradients are read, and moves that need no decision are made."""
        self.epoch += 1
        for name, bed in self.beds.items():
            life = bed.life
            life.epochs_in_stage += 1
            if life.stage in OCCUPIED:
                life.age += 1
            if (gradients := bed.gradients()) is not None:
                life.gradients = gradients
            if life.stage is Stage.BLENDING and (life.ramp is None or life.ramp.done >= life.ramp.steps):
                life.ramp = None
                if life.is_withdrawing:
                    self.prune(name, life.why_withdrawn)
                else:
                    self._enter(name, Stage.HOLDING, f"alpha has reached {bed.alpha:g}")
            elif life.stage is Stage.EMBARGOED:
                life.embargo_left -= 1
                if life.embargo_left <= 0:
                    self._enter(name, Stage.DORMANT, "the embargo is over")

    def set_unit(self, unit: float) -> None:
        """Of the loss: rents, the clipping of gradients and their health are relative to it."""
        self.unit = unit
        for bed in self.beds.values():
            bed.set_loss_unit(unit)

    # What there is

    def occupied(self) -> Iterator[tuple[str, AnyBed]]:
        return ((name, bed) for name, bed in self.beds.items() if bed.life.stage in OCCUPIED)

    def living(self) -> list[str]:
        return [name for name, bed in self.beds.items() if bed.life.stage in LIVING]

    def cost(self, name: str) -> Cost:
        life = self.beds[name].life
        return self.price(name, str(life.blueprint)) if life.stage in OCCUPIED else Cost(0, 0)

    def price(self, name: str, blueprint: str) -> Cost:
        """What a seed of this blueprint would cost in a slot."""
        current = get_blueprint(blueprint)
        known = self._prices.get((name, blueprint))
        if known is None or known[0] is not current:  # it may have been replaced
            known = self._prices[name, blueprint] = current, self._priced(current, self.beds[name].place)
        return known[1]

    def _priced(self, blueprint: Blueprint, place: Place) -> Cost:
        branch = cost_of(blueprint, place)
        if self.config.lifecycle.blending != "gate":
            return branch
        products = GATE_WIDTH * (place.width + 1)
        return total([branch, Cost(products + GATE_WIDTH + 1, 2 * products)])

    def added(self) -> Cost:
        """By all seeds, connected or not: whoever learns has been paid for."""
        return total(self.cost(name) for name in self.beds)

    def connected(self) -> Cost:
        """By the seeds that take part in a forward pass of the host."""
        return total(self.cost(name) for name, bed in self.beds.items() if bed.is_connected)

    def allowance(self) -> Allowance:
        seeds = len(list(self.occupied()))
        return allowance(self.config.budget, host=self.host, added=self.added(), seeds=seeds, slots=len(self.beds))

    def view(self, name: str, promises: Promised) -> SlotState:
        return self._view(name, promises, self.added(), self.allowance())

    def views(self, promises: Promised) -> tuple[SlotState, ...]:
        """Of all slots."""
        added, allowed = self.added(), self.allowance()
        return tuple(self._view(name, promises, added, allowed) for name in self.beds)

    def _view(self, name: str, promises: Promised, added: Cost, allowed: Allowance) -> SlotState:
        bed, life = self.beds[name], self.beds[name].life
        cost = self.cost(name)
        return SlotState(
            place=bed.place,
            stage=life.stage,
            blueprint=life.blueprint if life.stage in OCCUPIED else None,
            cost=cost,
            rent=self._rent(cost, added),
            alpha=bed.alpha if bed.is_connected else 0.0,
            age=life.age,
            epochs_in_stage=life.epochs_in_stage,
            is_withdrawing=life.is_withdrawing,
            gradients=life.gradients,
            contribution=life.contribution,
            candidates=self._candidates(name, promises, added, allowed) if life.stage is Stage.DORMANT else (),
            tried=tuple(life.tried),
        )

    def rent(self, name: str) -> float:
        """Of the seed in a slot, beside all others."""
        return self._rent(self.cost(name), self.added())

    def _rent(self, own: Cost, added: Cost) -> float:
        """Of what is part of `added`."""
        others = Cost(added.parameters - own.parameters, added.flops - own.flops)
        return self.unit * marginal_rent(own, others, self.host, self.config.rent)

    def _candidates(self, name: str, promises: Promised, added: Cost, allowed: Allowance) -> tuple[Candidate, ...]:
        positions = self.beds[name].place.positions
        found = []
        for blueprint in self.options[name]:
            cost = self.price(name, blueprint.name)
            if allowed.refusal(cost) is None:
                rent = self.unit * marginal_rent(cost, added, self.host, self.config.rent)
                found.append(Candidate(blueprint.name, cost, rent, promises.get((name, blueprint.name)), cost.parameters / positions))
        return tuple(found)

    def note_contribution(self, name: str, contribution: Contribution) -> None:
        life = self.beds[name].life
        life.contribution, life.looks = contribution, life.looks + 1
        entry = self._entry(life)
        if entry is not None:
            gain = contribution.gain
            entry.gain, entry.gain_low, entry.gain_high = gain.estimate, gain.low, gain.high
            entry.rent = self.rent(name)

    def _warmup(self) -> int:
        """Steps; none for a seed that the host does not see yet, and before the first epoch, when the host is as young as the seed."""
        is_joint = self.config.lifecycle.raise_mode == "joint"
        return round(self.config.seed_optimizer.warmup_epochs * self.steps_per_epoch) if is_joint else 0

    # State

    def state_dict(self) -> dict[str, Any]:
        return {name: {"life": msgspec.to_builtins(bed.life), **bed.seed_state()} for name, bed in self.beds.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Everything in the slots becomes what it was: seeds that came later go, seeds that have gone come back."""
        for name, saved in state.items():
            bed, life = self.beds[name], msgspec.convert(saved["life"], Life)
            bed.load_seed_state(saved, life, self.config.lifecycle.blending)
            bed.life = life
