"""Gates: whether a seed may make its next move, and why not. Pure functions of what is known about it.

The garden: every slot of a host, the life of the seed in it, and the moves from stage to stage.

It does as it is told. Whether a move is wise is the controller's business, whether it is allowed that of the gates.

From decision to deed: which gate an action has to pass, and what the garden does when it has passed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from esper.growth.config import GrowthConfig, GrowthError, Lifecycle
from esper.growth.host.layout import Place
from esper.growth.lifecycle.backend import Life, Ramp, SeedPlan, SlotBackend
from esper.growth.lifecycle.ledger import Entry, Ledger, Outcome, Step
from esper.growth.lifecycle.stages import (
    LIVING,
    MOVES,
    OCCUPIED,
    Action,
    Advance,
    Candidate,
    Contribution,
    Cost,
    Fossilize,
    Germinate,
    Prune,
    Retarget,
    SlotState,
    Stage,
)
from esper.growth.measure.rent import Allowance, allowance, marginal_rent, total
from esper.growth.seeds.blueprints import Blueprint, blueprints_for, cost_of, get_blueprint
from esper.growth.seeds.seed import GATE_WIDTH
from esper.rng import Streams


class Answer(NamedTuple):
    passed: bool
    reason: str


def _no(reason: str) -> Answer:
    return Answer(False, reason)


def may_move(stage: Stage, to: Stage) -> Answer:
    if to in MOVES[stage]:
        return Answer(True, f"{stage.name} leads to {to.name}")
    legal = ", ".join(sorted(move.name for move in MOVES[stage])) or "nothing"
    return _no(f"from {stage.name} a seed can go to {legal}, not to {to.name}")


def may_germinate(slot: SlotState, cost: Cost, allowance: Allowance) -> Answer:
    if slot.stage is Stage.EMBARGOED:
        return _no("the slot is under embargo after a pruned seed")
    if slot.stage is not Stage.DORMANT:
        return _no(f"the slot holds a seed that is {slot.stage.name}")
    refusal = allowance.refusal(cost)
    return _no(refusal) if refusal else Answer(True, "the slot is free and the budget allows it")


def may_blend(slot: SlotState, rules: Lifecycle) -> Answer:
    if slot.stage is not Stage.TRAINING:
        return _no(f"only a seed that is TRAINING can begin to blend, and this slot is {slot.stage.name}")
    if slot.epochs_in_stage < rules.training_epochs:
        return _no(f"it has learned for {slot.epochs_in_stage} of {rules.training_epochs} epochs")
    if slot.gradients is None or slot.gradients.steps == 0:
        return _no("its gradients have not been measured")
    if slot.gradients.health < rules.minimum_health:
        return _no(f"the health of its gradients is {slot.gradients.health:.2f}, below {rules.minimum_health:g}")
    return Answer(True, f"it has learned for {slot.epochs_in_stage} epochs with healthy gradients")


def may_fossilize(slot: SlotState, rules: Lifecycle, *, epoch: int) -> Answer:
    move = may_move(slot.stage, Stage.FOSSILIZED)
    if not move.passed:
        return move
    if slot.epochs_in_stage < rules.holding_epochs:
        return _no(f"it has been on probation for {slot.epochs_in_stage} of {rules.holding_epochs} epochs")
    if slot.contribution is None or slot.contribution.epoch != epoch:
        return _no("its contribution has not been measured in this epoch")
    return Answer(slot.contribution.gain.estimate > 0, slot.contribution.in_words())


def may_prune(slot: SlotState) -> Answer:
    if slot.stage not in LIVING:
        return _no(f"there is nothing to prune: the slot is {slot.stage.name}")
    if slot.is_withdrawing:
        return _no("it is already on its way out")
    return Answer(True, "it is not part of the host yet")


def may_retarget(slot: SlotState, alpha: float) -> Answer:
    if slot.stage not in (Stage.BLENDING, Stage.HOLDING):
        return _no(f"alpha moves only in BLENDING and HOLDING, and the seed is {slot.stage.name}")
    if slot.is_withdrawing:
        return _no("it is on its way out")
    if not 0 < alpha <= 1:
        return _no(f"alpha must be above 0 and at most 1, not {alpha:g}; to get rid of a seed, prune it")
    return Answer(True, "it is connected")


Promised = Mapping[tuple[str, str], float]  # slot and blueprint -> fall of the loss per step, as a probe has found
OnStage = Callable[[str, str, Stage, str], None]  # slot, blueprint, stage, reason
AnyBackend = TypeVar("AnyBackend", bound=SlotBackend)


def options_for(place: Place, config: GrowthConfig) -> tuple[Blueprint, ...]:
    """What may grow in a place; a gate looks at the whole sequence, which is not allowed everywhere."""
    is_closed = (place.is_causal or bool(place.alone)) and config.lifecycle.blending == "gate"
    return () if is_closed else blueprints_for(place, config.blueprints)


class SlotLifecycles(Generic[AnyBackend]):
    """`host` is what the host costs without seeds."""

    def __init__(self, backends: Mapping[str, AnyBackend], host: Cost, config: GrowthConfig, *, ledger: Ledger, on_stage: OnStage) -> None:
        self.backends, self.host, self.config, self.ledger = dict(backends), host, config, ledger
        self.epoch = 0
        self.steps_per_epoch = 0  # of the last epoch
        self.unit = 1.0  # of the loss, see LossScale
        self._on_stage = on_stage
        self._streams = Streams(config.seed)
        self.options: dict[str, tuple[Blueprint, ...]] = {
            name: options_for(backend.place, config) for name, backend in self.backends.items()
        }
        self._prices: dict[tuple[str, str], tuple[Blueprint, Cost]] = {}  # those that were asked for, by slot and blueprint

    # Moves

    def germinate(self, name: str, blueprint: str, reason: str) -> None:
        """A new seed, which starts to learn at once: with the host, or in the shadow."""
        backend, rules = self.backends[name], self.config.lifecycle
        number = len(self.ledger.entries) + 1
        is_joint = rules.raise_mode == "joint"
        random_seed = self._streams.integer(f"seed {number}")
        backend.plant(SeedPlan(blueprint, random_seed, rules.blending, is_joint, alpha=1.0 if is_joint else 0.0, warmup=self._warmup()))
        backend.life = Life(blueprint=blueprint, number=number, tried=backend.life.tried)
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
        backend, rules = self.backends[name], self.config.lifecycle
        target = rules.alpha_target if alpha is None else alpha
        backend.connect()
        if backend.life.stage is not Stage.BLENDING:
            self._enter(name, Stage.BLENDING, reason)
        self._ramp(backend, target, rules.blend_epochs)

    def fossilize(self, name: str, reason: str) -> None:
        backend = self.backends[name]
        self._enter(name, Stage.FOSSILIZED, reason)
        backend.keep()
        self._close(name, "kept")

    def withdraw(self, name: str, reason: str) -> None:
        """Prunes gently: alpha falls first, so that the host can take over."""
        backend, rules = self.backends[name], self.config.lifecycle
        if not backend.is_connected or rules.withdraw_epochs == 0 or backend.alpha == 0.0:
            self.prune(name, reason)
            return
        if backend.life.stage is not Stage.BLENDING:
            self._enter(name, Stage.BLENDING, f"{reason}; alpha falls to 0")
        backend.life.is_withdrawing, backend.life.why_withdrawn = True, reason
        self._ramp(backend, 0.0, rules.withdraw_epochs)

    def prune(self, name: str, reason: str, *, outcome: Outcome = "pruned") -> None:
        """Takes the seed out at once. The slot waits before anything may grow in it again."""
        backend = self.backends[name]
        self._enter(name, Stage.PRUNED, reason)
        self._close(name, outcome)
        blueprint = backend.life.blueprint
        assert blueprint is not None
        backend.uproot()
        backend.life = Life(stage=Stage.PRUNED, blueprint=blueprint, tried=[*backend.life.tried, blueprint])
        self._embargo(name)

    def banish(self, name: str, number: int, reason: str) -> None:
        """After a rollback: the seed with this number was there when it went wrong, whether or not it was there before."""
        life = self.backends[name].life
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
        there = {backend.life.number: backend.life for backend in self.backends.values() if backend.life.number is not None}
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
        life, epochs = self.backends[name].life, self.config.lifecycle.embargo_epochs
        self._enter(name, Stage.EMBARGOED, f"nothing grows here for {epochs} epochs")
        life.embargo_left = epochs
        if epochs == 0:
            self._enter(name, Stage.DORMANT, "there is no embargo")

    def _enter(self, name: str, stage: Stage, reason: str) -> None:
        life = self.backends[name].life
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
        entry = self._entry(self.backends[name].life)
        assert entry is not None
        entry.outcome, entry.ended = outcome, self.epoch

    def _entry(self, life: Life) -> Entry | None:
        return None if life.number is None else self.ledger.entries[life.number - 1]

    # Time

    def tick(self) -> None:
        """A training step is over: alphas move."""
        for backend in self.backends.values():
            ramp = backend.life.ramp
            if ramp is not None and ramp.done < ramp.steps:
                ramp.done += 1
                backend.alpha = ramp.alpha(self.config.lifecycle.alpha_curve)

    def _ramp(self, backend: AnyBackend, target: float, epochs: int) -> None:
        steps = epochs * max(self.steps_per_epoch, 1)
        if steps == 0:
            backend.alpha, backend.life.ramp = target, None
        else:
            backend.life.ramp = Ramp(backend.alpha, target, steps)

    def end_epoch(self) -> None:
        """Everyone is an epoch older, gradients are read, and moves that need no decision are made."""
        self.epoch += 1
        for name, backend in self.backends.items():
            life = backend.life
            life.epochs_in_stage += 1
            if life.stage in OCCUPIED:
                life.age += 1
            if (gradients := backend.gradients()) is not None:
                life.gradients = gradients
            if life.stage is Stage.BLENDING and (life.ramp is None or life.ramp.done >= life.ramp.steps):
                life.ramp = None
                if life.is_withdrawing:
                    self.prune(name, life.why_withdrawn)
                else:
                    self._enter(name, Stage.HOLDING, f"alpha has reached {backend.alpha:g}")
            elif life.stage is Stage.EMBARGOED:
                life.embargo_left -= 1
                if life.embargo_left <= 0:
                    self._enter(name, Stage.DORMANT, "the embargo is over")

    def set_unit(self, unit: float) -> None:
        """Of the loss: rents, the clipping of gradients and their health are relative to it."""
        self.unit = unit
        for backend in self.backends.values():
            backend.set_loss_unit(unit)

    # What there is

    def occupied(self) -> Iterator[tuple[str, AnyBackend]]:
        return ((name, backend) for name, backend in self.backends.items() if backend.life.stage in OCCUPIED)

    def living(self) -> list[str]:
        return [name for name, backend in self.backends.items() if backend.life.stage in LIVING]

    def cost(self, name: str) -> Cost:
        life = self.backends[name].life
        return self.price(name, str(life.blueprint)) if life.stage in OCCUPIED else Cost(0, 0)

    def price(self, name: str, blueprint: str) -> Cost:
        """What a seed of this blueprint would cost in a slot."""
        current = get_blueprint(blueprint)
        known = self._prices.get((name, blueprint))
        if known is None or known[0] is not current:  # it may have been replaced
            known = self._prices[name, blueprint] = current, self._priced(current, self.backends[name].place)
        return known[1]

    def _priced(self, blueprint: Blueprint, place: Place) -> Cost:
        branch = cost_of(blueprint, place)
        if self.config.lifecycle.blending != "gate":
            return branch
        products = GATE_WIDTH * (place.width + 1)
        return total([branch, Cost(products + GATE_WIDTH + 1, 2 * products)])

    def added(self) -> Cost:
        """By all seeds, connected or not: whoever learns has been paid for."""
        return total(self.cost(name) for name in self.backends)

    def connected(self) -> Cost:
        """By the seeds that take part in a forward pass of the host."""
        return total(self.cost(name) for name, backend in self.backends.items() if backend.is_connected)

    def allowance(self) -> Allowance:
        seeds = len(list(self.occupied()))
        return allowance(self.config.budget, host=self.host, added=self.added(), seeds=seeds, slots=len(self.backends))

    def view(self, name: str, promises: Promised) -> SlotState:
        return self._view(name, promises, self.added(), self.allowance())

    def views(self, promises: Promised) -> tuple[SlotState, ...]:
        """Of all slots."""
        added, allowed = self.added(), self.allowance()
        return tuple(self._view(name, promises, added, allowed) for name in self.backends)

    def _view(self, name: str, promises: Promised, added: Cost, allowed: Allowance) -> SlotState:
        backend, life = self.backends[name], self.backends[name].life
        cost = self.cost(name)
        return SlotState(
            place=backend.place,
            stage=life.stage,
            blueprint=life.blueprint if life.stage in OCCUPIED else None,
            cost=cost,
            rent=self._rent(cost, added),
            alpha=backend.alpha if backend.is_connected else 0.0,
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
        positions = self.backends[name].place.positions
        found = []
        for blueprint in self.options[name]:
            cost = self.price(name, blueprint.name)
            if allowed.refusal(cost) is None:
                rent = self.unit * marginal_rent(cost, added, self.host, self.config.rent)
                found.append(Candidate(blueprint.name, cost, rent, promises.get((name, blueprint.name)), cost.parameters / positions))
        return tuple(found)

    def note_contribution(self, name: str, contribution: Contribution) -> None:
        life = self.backends[name].life
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
        return {name: {"life": msgspec.to_builtins(backend.life), **backend.seed_state()} for name, backend in self.backends.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Everything in the slots becomes what it was: seeds that came later go, seeds that have gone come back."""
        for name, saved in state.items():
            backend, life = self.backends[name], msgspec.convert(saved["life"], Life)
            backend.load_seed_state(saved, life, self.config.lifecycle.blending)
            backend.life = life


def ask_gate(lifecycles: SlotLifecycles[AnyBackend], action: Action) -> Answer:
    slot, rules = lifecycles.view(action.slot, {}), lifecycles.config.lifecycle
    match action:
        case Germinate():
            names = [option.name for option in lifecycles.options[action.slot]]
            if action.blueprint not in names:
                return Answer(False, f"{action.blueprint!r} cannot grow there; what can is {', '.join(names) or 'nothing'}")
            return may_germinate(slot, lifecycles.price(action.slot, action.blueprint), lifecycles.allowance())
        case Advance():
            return may_blend(slot, rules)
        case Retarget():
            return may_retarget(slot, action.alpha)
        case Fossilize():
            return may_fossilize(slot, rules, epoch=lifecycles.epoch)
        case Prune():
            return may_prune(slot)
    raise GrowthError(f"{type(action).__name__} is no action that a controller can decide on")


def carry_out(lifecycles: SlotLifecycles[AnyBackend], action: Action, *, is_over: bool) -> None:
    """When the training is over there is no time left for a gentle end."""
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


def check_can_grow(lifecycles: SlotLifecycles[AnyBackend]) -> None:
    """Raises where there is no slot and no blueprint that could ever come together within the budget."""
    options = [(name, option.name) for name, options in lifecycles.options.items() for option in options]
    if not options:
        raise GrowthError(f"none of the blueprints {lifecycles.config.blueprints} fits into any slot; see describe()")
    allowed = lifecycles.allowance()
    refusals = [(name, option, allowed.refusal(lifecycles.price(name, option))) for name, option in options]
    if all(refusal is not None for _, _, refusal in refusals):
        name, option, refusal = refusals[0]
        raise GrowthError(f"the budget is smaller than any blueprint; {option} after {name!r}: {refusal}. Raise the budget")
