"""Lifecycles of the slots of one host: the moves of seeds from stage to stage, their costs, and the slots as a controller sees them.

`SlotLifecycles` makes the moves. It does not check whether a move is allowed, which the gates (`stages.may_...`) decide, or useful, which
the controller decides. It holds its seeds through a `SlotBackend` per slot. `ModuleBackend` is the one for a single model: the seed is a
module behind a submodule of the host, with an optimiser of its own. A fleet has another one, whose seeds are rows of stacked tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer

from esper.gradients import GradientStats
from esper.growth.config import GrowthConfig, SeedOptimizerConfig
from esper.growth.host.layout import Place
from esper.growth.host.slots import Slot
from esper.growth.host.slotted import Slotted
from esper.growth.lifecycle.backend import Life, Ramp, SeedPlan, SlotBackend
from esper.growth.lifecycle.ledger import Entry, Ledger, Outcome, Step
from esper.growth.lifecycle.stages import (
    LIVING,
    OCCUPIED,
    Candidate,
    Contribution,
    Cost,
    SlotState,
    Stage,
    may_move,
)
from esper.growth.measure.contribution import Allowance, allowance, marginal_rent, total
from esper.growth.seeds.blueprints import REGISTRY, Blueprint, blueprints_for, check_branch, cost_of, get_blueprint, is_built_in, widened_by
from esper.growth.seeds.seed import GATE_WIDTH, MakeOptimizer, SeedLearner, group_of
from esper.growth.seeds.width import IN_SHADOW
from esper.rng import Streams

Promised = Mapping[tuple[str, str], float]  # (slot, blueprint) -> fall of the loss per step, as estimated by the probe
OnStage = Callable[[str, str, Stage, str], None]  # slot, blueprint, stage, reason
AnyBackend = TypeVar("AnyBackend", bound=SlotBackend)


class Option(NamedTuple):
    """A blueprint that may grow in a place, and the names of the units that it widens there."""

    name: str
    widened: tuple[str, ...]


def options_for(place: Place, config: GrowthConfig) -> tuple[Option, ...]:
    """Return what may grow in a place.

    There are none in a causal place, or where a seed must treat every position alone, if seeds blend by a gate: a gate reads all positions.
    Units can be added only by the blending "add": otherwise they would not become a part of the layers.
    """
    is_closed = (place.is_causal or bool(place.alone)) and config.lifecycle.blending == "gate"
    fitting = () if is_closed else blueprints_for(place, config.blueprints)
    options = []
    for blueprint in fitting:
        if blueprint.share is None:
            options.append(Option(blueprint.name, ()))
        elif config.lifecycle.blending == "add":
            options.append(Option(blueprint.name, tuple(units.name for units in widened_by(blueprint, place))))
    return tuple(options)


class SlotLifecycles(Generic[AnyBackend]):
    """All slots of one host, each with the life of the seed in it.

    `backends` maps slot names to the objects that hold the seeds, `host` is the cost of the host without seeds, and `on_stage` is called
    after every change of a stage. Seeds are numbered from 1; seed n is `ledger.entries[n - 1]`.
    """

    def __init__(self, backends: Mapping[str, AnyBackend], host: Cost, config: GrowthConfig, *, ledger: Ledger, on_stage: OnStage) -> None:
        self.backends, self.host, self.config, self.ledger = dict(backends), host, config, ledger
        self.epoch = 0
        self.steps_per_epoch = 0  # of the last epoch
        self.unit = 1.0  # unit of the loss, see LossRange
        self._on_stage = on_stage
        self._streams = Streams(config.seed)
        self.options: dict[str, tuple[Option, ...]] = {name: options_for(backend.place, config) for name, backend in self.backends.items()}
        self._prices: dict[tuple[str, str], tuple[Blueprint, Cost]] = {}  # cache of `price`, by slot and blueprint
        self._positions = {name: backend.place.positions for name, backend in self.backends.items()}

    # Moves

    def germinate(self, name: str, blueprint: str, reason: str) -> None:
        """Create a seed in a slot. It trains from now on: with the host ("joint"), or beside it in the shadow."""
        backend, rules = self.backends[name], self.config.lifecycle
        # The random seed depends on the number of the seed, so it does not repeat within a run.
        number = len(self.ledger.entries) + 1
        is_joint = rules.raise_mode == "joint"
        random_seed = self._streams.integer(f"seed {number}")
        cost, alpha = self.price(name, blueprint), 1.0 if is_joint else 0.0
        backend.plant(SeedPlan(blueprint, random_seed, rules.blending, is_joint, alpha=alpha, warmup=self._warmup()))
        backend.life = Life(blueprint=blueprint, number=number, tried=backend.life.tried)
        self.ledger.entries.append(
            Entry(
                number,
                name,
                blueprint,
                rules.raise_mode,
                self.epoch,
                reason,
                cost.parameters,
                cost.flops,
                steps=[],
                after=self._below(name),
            )
        )
        # A seed leaves GERMINATED at once, because it learns from its first step on.
        self._enter(name, Stage.GERMINATED, reason)
        if is_joint:
            self._enter(name, Stage.HOLDING, "it is the identity, so it learns with the host from the start")
        else:
            self._enter(name, Stage.TRAINING, "it learns in the shadow")

    def _below(self, name: str) -> int | None:
        """Return the number of the kept seed behind which the seed of a slot grows; None in the first slot at a place."""
        place = self.backends[name].place
        numbers = [
            backend.life.number
            for backend in self.backends.values()
            if backend.place.module == place.module and backend.place.earlier == place.earlier - 1
        ]
        return numbers[0] if numbers else None

    def _warmup(self) -> int:
        """Return the number of steps over which the learning rate of a new seed rises.

        It is 0 for a seed raised in the shadow, which the host does not see yet, and before the first epoch, when the host is untrained
        too.
        """
        is_joint = self.config.lifecycle.raise_mode == "joint"
        return round(self.config.seed_optimizer.warmup_epochs * self.steps_per_epoch) if is_joint else 0

    def blend(self, name: str, reason: str, *, alpha: float | None = None) -> None:
        """Start to move alpha to `alpha`, or to the configured target. Connect a seed that was raised in the shadow."""
        backend, rules = self.backends[name], self.config.lifecycle
        target = rules.alpha_target if alpha is None else alpha
        backend.connect()
        if backend.life.stage is not Stage.BLENDING:
            self._enter(name, Stage.BLENDING, reason)
        self._ramp(backend, target, rules.blend_epochs)

    def fossilize(self, name: str, reason: str) -> None:
        """Make the seed a permanent part of the host."""
        backend = self.backends[name]
        self._enter(name, Stage.FOSSILIZED, reason)
        backend.keep()
        self._close(name, "kept")
        self._prices.clear()  # the host may be wider now
        if backend.place.earlier + 1 < self.config.budget.max_seeds_per_place:
            self._open_again(name)

    def _open_again(self, name: str) -> str | None:
        """Open another slot at the place of a slot, and return its name; None if a place has only one slot."""
        backend = self.backends[name].open_again()
        if backend is None:
            return None
        behind = {key: self.backends.pop(key) for key in list(self.backends)[list(self.backends).index(name) + 1 :]}
        self.backends |= {backend.place.name: backend, **behind}
        self.options[backend.place.name], self._positions[backend.place.name] = self.options[name], self._positions[name]
        backend.set_loss_unit(self.unit)
        return backend.place.name

    def _shut(self, name: str) -> None:
        """Remove a slot that was opened again."""
        self.backends.pop(name).close()
        del self.options[name], self._positions[name]

    def withdraw(self, name: str, reason: str) -> None:
        """Prune a seed gradually: lower alpha to 0 first, so that the host adapts. Without anything to lower, prune it at once."""
        backend, rules = self.backends[name], self.config.lifecycle
        if not backend.is_connected or rules.withdraw_epochs == 0 or backend.alpha == 0.0:
            self.prune(name, reason)
            return
        if backend.life.stage is not Stage.BLENDING:
            self._enter(name, Stage.BLENDING, f"{reason}; alpha falls to 0")
        backend.life.is_withdrawing, backend.life.why_withdrawn = True, reason
        self._ramp(backend, 0.0, rules.withdraw_epochs)

    def prune(self, name: str, reason: str, *, outcome: Outcome = "pruned") -> None:
        """Remove the seed at once, with its weights, and put the slot under embargo."""
        backend = self.backends[name]
        # Write the end into the ledger first: the new life below does not have the number of the seed.
        self._enter(name, Stage.PRUNED, reason)
        self._close(name, outcome)
        blueprint = backend.life.blueprint
        assert blueprint is not None
        backend.uproot()
        backend.life = Life(stage=Stage.PRUNED, blueprint=blueprint, tried=[*backend.life.tried, blueprint])
        self._embargo(name)

    def shrink(self, name: str, reason: str) -> None:
        """Remove a kept seed at once, with its weights, and put the slot under embargo."""
        self.prune(name, reason)
        self._prices.clear()  # the host may be less wide now

    def banish(self, name: str, number: int, reason: str) -> None:
        """After a rollback: prune seed `number`, which was connected when the disaster happened, and put its slot under embargo.

        The rollback may have removed the seed already, because it is younger than the snapshot. Then only the ledger and the slot change.
        It may also have closed the slot, which was opened behind a seed that is on trial again. Then `square_ledger` has done everything.
        """
        if name not in self.backends:
            return
        life = self.backends[name].life
        if life.number == number:
            self.prune(name, reason, outcome="rolled back")
            return
        # The rollback has removed the seed. If it restored an older one, that one stays; an empty slot gets the embargo.
        entry = self.ledger.entries[number - 1]
        if entry.outcome != "rolled back":
            self._undo(entry, reason)
        if life.stage is Stage.DORMANT:
            life.stage, life.blueprint, life.tried = Stage.PRUNED, entry.blueprint, [*life.tried, entry.blueprint]
            self._embargo(name)

    def bring_back(self, removed: Collection[int]) -> list[str]:
        """After a rollback: keep the restored seeds among `removed`, whose removal may have caused the disaster. Return their slots.

        A withdrawal that had begun before the snapshot is cancelled. The seed may not be pruned for `embargo_epochs` epochs (at least
        one), and for twice as long each further time. Otherwise a controller would prune it again, and the governor would go back again.
        """
        found = []
        for name, backend in self.backends.items():
            life = backend.life
            if life.number not in removed or life.stage not in LIVING or not backend.is_connected:
                continue
            entry = self._entry(life)
            assert entry is not None
            if life.is_withdrawing:
                assert life.ramp is not None
                life.is_withdrawing, life.why_withdrawn = False, ""
                self._ramp(backend, life.ramp.start, self.config.lifecycle.blend_epochs)
            entry.brought_back += 1
            life.prune_embargo = max(self.config.lifecycle.embargo_epochs, 1) * 2 ** (entry.brought_back - 1)
            found.append(name)
        return found

    def square_ledger(self, reason: str, *, removed: Collection[int]) -> None:
        """After a rollback: make the ledger agree with the slots. `removed` are the seeds that were pruned or being withdrawn before it.

        An entry whose seed is gone becomes "rolled back". An entry whose seed was restored becomes "living" again.
        """
        lives = {backend.life.number: backend.life for backend in self.backends.values() if backend.life.number is not None}
        for entry in self.ledger.entries:
            life = lives.get(entry.number)
            if life is None and entry.outcome in ("living", "kept"):
                self._undo(entry, reason)
            elif life is not None and life.stage in LIVING and (entry.outcome != "living" or entry.number in removed):
                entry.outcome, entry.ended = "living", None
                entry.steps.append(Step(self.epoch, life.stage, f"it is back: {reason}"))

    def note_left_out(self, reason: str) -> list[str]:
        """After an earlier state was restored as the result: mark the kept seeds that are not in it as pruned. Return their slots."""
        found: list[str] = []
        present = {backend.life.number for backend in self.backends.values()}
        for entry in self.ledger.entries:
            if entry.outcome == "kept" and entry.number not in present:
                entry.outcome, entry.ended = "pruned", self.epoch
                entry.steps.append(Step(self.epoch, Stage.PRUNED, reason))
                self._on_stage(entry.slot, entry.blueprint, Stage.PRUNED, reason)
                found.append(entry.slot)
        return found

    def _undo(self, entry: Entry, reason: str) -> None:
        """Mark an entry as rolled back."""
        entry.outcome, entry.ended = "rolled back", self.epoch
        entry.steps.append(Step(self.epoch, Stage.PRUNED, reason))

    def _embargo(self, name: str) -> None:
        """Move a slot from PRUNED to EMBARGOED, and on to DORMANT if the embargo lasts 0 epochs."""
        life, epochs = self.backends[name].life, self.config.lifecycle.embargo_epochs
        self._enter(name, Stage.EMBARGOED, f"nothing grows here for {epochs} epochs")
        life.embargo_left = epochs
        if epochs == 0:
            self._enter(name, Stage.DORMANT, "there is no embargo")

    def _enter(self, name: str, stage: Stage, reason: str) -> None:
        """Move a slot to a stage, note the step in the ledger and call `on_stage`. An illegal move is a programming error."""
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
        """Write the outcome of the seed in a slot into the ledger."""
        entry = self._entry(self.backends[name].life)
        assert entry is not None
        entry.outcome, entry.ended = outcome, self.epoch

    def _entry(self, life: Life) -> Entry | None:
        return None if life.number is None else self.ledger.entries[life.number - 1]

    # Ramps, ends of epochs and measurements

    def _ramp(self, backend: AnyBackend, target: float, epochs: int) -> None:
        """Let alpha move to `target` over this number of epochs; 0 moves it at once."""
        steps = epochs * max(self.steps_per_epoch, 1)
        if steps == 0:
            backend.alpha, backend.life.ramp = target, None
        else:
            backend.life.ramp = Ramp(backend.alpha, target, steps)

    def end_epoch(self) -> None:
        """Count the epoch, read the statistics of the gradients, and make the moves that need no decision.

        Those moves are the end of a ramp of alpha (to HOLDING, or to PRUNED for a withdrawn seed) and the end of an embargo.
        """
        self.epoch += 1
        for name, backend in self.backends.items():
            life = backend.life
            life.epochs_in_stage += 1
            life.prune_embargo = max(life.prune_embargo - 1, 0)
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

    def note_contribution(self, name: str, contribution: Contribution) -> None:
        """Remember a measured contribution of the seed in a slot, in its life and in the ledger."""
        life = self.backends[name].life
        life.contribution, life.looks = contribution, life.looks + 1
        entry = self._entry(life)
        if entry is not None:
            gain = contribution.gain
            entry.gain, entry.gain_low, entry.gain_high = gain.estimate, gain.low, gain.high
            entry.rent = self.rent(name)

    def set_unit(self, unit: float) -> None:
        """Set the unit of the loss. Rents, the clipping of gradients and their health are relative to it."""
        self.unit = unit
        for backend in self.backends.values():
            backend.set_loss_unit(unit)

    # Costs and views

    def occupied(self) -> Iterator[tuple[str, AnyBackend]]:
        """Yield the slots that hold a seed, fossilized ones included."""
        return ((name, backend) for name, backend in self.backends.items() if backend.life.stage in OCCUPIED)

    def living(self) -> list[str]:
        """Return the slots whose seed may still be pruned."""
        return [name for name, backend in self.backends.items() if backend.life.stage in LIVING]

    def cost(self, name: str) -> Cost:
        """Return the cost of the seed in a slot; 0 for an empty slot."""
        life = self.backends[name].life
        entry = self._entry(life)
        return Cost(entry.parameters, entry.flops) if entry is not None and life.stage in OCCUPIED else Cost(0, 0)

    def price(self, name: str, blueprint: str) -> Cost:
        """Return the cost of a seed of this blueprint in a slot."""
        known = self._prices.get((name, blueprint))
        if known is None or known[0] is not REGISTRY.get(blueprint):  # a user may have registered another blueprint under this name
            current = get_blueprint(blueprint)
            known = self._prices[name, blueprint] = current, self._compute_price(current, self.backends[name].place_now())
        return known[1]

    def _compute_price(self, blueprint: Blueprint, place: Place) -> Cost:
        """Compute the cost of a seed: its branch, and the gate if seeds blend by one."""
        branch = cost_of(blueprint, place)
        if self.config.lifecycle.blending != "gate":
            return branch
        # Gated blending adds two linear layers: place.width -> GATE_WIDTH -> 1.
        products = GATE_WIDTH * (place.width + 1)
        return total([branch, Cost(products + GATE_WIDTH + 1, 2 * products)])

    def added(self) -> Cost:
        """Return the cost of all seeds, including those not connected yet."""
        return total(self.cost(name) for name in self.backends)

    def connected(self) -> Cost:
        """Return the cost of the seeds that take part in the host's forward pass."""
        return total(self.cost(name) for name, backend in self.backends.items() if backend.is_connected)

    def allowance(self) -> Allowance:
        """Return the rest of the budget."""
        seeds = len(list(self.occupied()))
        return allowance(self.config.budget, host=self.host, added=self.added(), seeds=seeds, slots=len(self.backends))

    def view(self, name: str, promises: Promised) -> SlotState:
        """Return the state of one slot as a controller sees it."""
        return self._view(name, promises, self.added(), self.allowance())

    def views(self, promises: Promised) -> tuple[SlotState, ...]:
        """Return the states of all slots as a controller sees them."""
        added, allowed = self.added(), self.allowance()
        return tuple(self._view(name, promises, added, allowed) for name in self.backends)

    def _view(self, name: str, promises: Promised, added: Cost, allowed: Allowance) -> SlotState:
        # `added` and `allowed` are the same for all slots, so the caller computes them once.
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
            prune_embargo=life.prune_embargo,
            gradients=life.gradients,
            contribution=life.contribution,
            candidates=self._candidates(name, promises, added, allowed) if life.stage is Stage.DORMANT else (),
            tried=tuple(life.tried),
        )

    def rent(self, name: str) -> float:
        """Return the rent of the seed in a slot: the rise of the total rent that it causes in addition to all other seeds."""
        return self._rent(self.cost(name), self.added())

    def _rent(self, own: Cost, added: Cost) -> float:
        """Return the rent of a seed with cost `own`, which is part of `added`."""
        others = Cost(added.parameters - own.parameters, added.flops - own.flops)
        return self.unit * marginal_rent(own, others, self.host, self.config.rent)

    def _candidates(self, name: str, promises: Promised, added: Cost, allowed: Allowance) -> tuple[Candidate, ...]:
        """Return the blueprints that fit the slot and the rest of the budget."""
        positions = self._positions[name]
        found = []
        for option in self.options[name]:
            cost = self.price(name, option.name)
            if allowed.refusal(cost) is None:
                rent = self.unit * marginal_rent(cost, added, self.host, self.config.rent)
                promise, load = promises.get((name, option.name)), cost.parameters / positions
                found.append(Candidate(option.name, cost, rent, promise, load, option.widened))
        return tuple(found)

    # State

    def state_dict(self) -> dict[str, Any]:
        return {name: {"life": msgspec.to_builtins(backend.life), **backend.seed_state()} for name, backend in self.backends.items()}

    def state_if_kept(self) -> dict[str, Any]:
        """Return the state as if all connected seeds were kept and no others had grown, without the optimisers of the seeds."""
        state = {}
        for name, backend in self.backends.items():
            life = backend.life
            if backend.is_connected:
                life = msgspec.structs.replace(life, stage=Stage.FOSSILIZED)
            elif life.stage in OCCUPIED:
                life = Life(tried=life.tried)
            state[name] = {"life": msgspec.to_builtins(life), **backend.state_if_kept()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore all slots: remove seeds that are younger than the state, and rebuild seeds that have been pruned since."""
        self._prices.clear()
        for name in [name for name in reversed(self.backends) if name not in state]:
            self._shut(name)
        for name in [name for name in state if name not in self.backends]:
            module = name.rpartition("#")[0]
            self._open_again(next(last for last, backend in reversed(self.backends.items()) if backend.place.module == module))
        for name, saved in state.items():
            backend, life = self.backends[name], msgspec.convert(saved["life"], Life)
            backend.load_seed_state(saved, life)
            backend.life = life


def first_slots(names: Collection[str]) -> list[str]:
    """Return the names of the slots without those that were opened again behind a kept seed.

    >>> first_slots(["layer1", "layer1#2", "a#2"])
    ['layer1', 'a#2']
    """
    return [name for name in names if name.rpartition("#")[0] not in names]


class ModuleBackend(SlotBackend):
    """A slot of a model, whose seed is an `nn.Module`. `learner` trains the seed; it is None without a seed.

    The constructor builds a learner for a trial, so that an optimiser that cannot train seeds fails now rather than at germination.
    """

    def __init__(self, slot: Slot, slotted: Slotted, optimizer: Optimizer, config: SeedOptimizerConfig, make: MakeOptimizer | None) -> None:
        super().__init__(slot.place)
        self.slot = slot
        self.learner: SeedLearner | None = None
        self._slotted, self._optimizer, self._config, self._make = slotted, optimizer, config, make
        self._make_learner(nn.ParameterList([torch.zeros(2, 2), torch.zeros(2)]))

    @property
    def is_connected(self) -> bool:
        return self.slot.is_connected

    @property
    def alpha(self) -> float:
        return self.slot.alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        self.slot.alpha = value

    def plant(self, plan: SeedPlan) -> None:
        # Check and build everything that may fail before the slot changes.
        if not is_built_in(get_blueprint(plan.blueprint)):
            check_branch(get_blueprint(plan.blueprint), self.place)
        seed = self._slotted.new_seed(self.place.name, plan.blueprint, random_seed=plan.random_seed, blending=plan.blending)
        if seed.spec.wide and not plan.is_connected:
            seed.spec = msgspec.structs.replace(seed.spec, order=seed.spec.order + IN_SHADOW)
        learner = self._make_learner(seed, warmup=plan.warmup)
        self.slot.plant(seed, connected=plan.is_connected)
        self.slot.alpha = plan.alpha
        self.learner = learner

    def uproot(self) -> None:
        self.slot.plant(None)
        self.learner = None

    def connect(self) -> None:
        seed = self.slot.seed
        if seed is not None and seed.spec.order >= IN_SHADOW:
            seed.spec = msgspec.structs.replace(seed.spec, order=self._slotted.next_order())
        self.slot.connect(True)

    def keep(self) -> None:
        self.slot.is_kept = True
        self._slotted.join_kept()

    def place_now(self) -> Place:
        return self._slotted.place(self.place.name)

    def why_not_removed(self) -> str:
        return self._slotted.why_not_removed(self.place.name)

    def open_again(self) -> ModuleBackend:
        return ModuleBackend(self._slotted.open_again(self.place.name), self._slotted, self._optimizer, self._config, self._make)

    def close(self) -> None:
        self._slotted.close(self.place.name)

    def set_loss_unit(self, unit: float) -> None:
        super().set_loss_unit(unit)
        if self.learner is not None:
            self.learner.loss_unit = unit

    def gradients(self) -> GradientStats | None:
        return None if self.learner is None else self.learner.report()

    def seed_state(self) -> dict[str, Any]:
        return {
            "seed": None if self.slot.seed is None else dict(self.slot.seed.state_dict()),
            "learner": None if self.learner is None else self.learner.state_dict(),
            "alpha": self.slot.alpha,
            "is_connected": self.slot.is_connected,
        }

    def state_if_kept(self) -> dict[str, Any]:
        seed = dict(self.slot.seed.state_dict()) if self.slot.seed is not None and self.slot.is_connected else None
        return {"seed": seed, "learner": None, "alpha": self.slot.alpha, "is_connected": self.slot.is_connected}

    def load_seed_state(self, state: dict[str, Any], life: Life) -> None:
        if state["seed"] is None:
            self.uproot()
            return
        # Build a new seed unless the slot still holds the same one. The weights are loaded below.
        if self.life.number != life.number or self.slot.seed is None:
            seed = self._slotted.rebuilt_seed(self.place.name, state["seed"])
            self.slot.plant(seed)
            self.learner = self._make_learner(seed)
        assert self.slot.seed is not None
        assert self.learner is not None
        self.slot.seed.load_state_dict(state["seed"])
        if state["learner"] is not None:
            self.learner.load_state_dict(state["learner"])
        self.slot.alpha = state["alpha"]
        self.slot.is_kept = life.stage is Stage.FOSSILIZED
        self.slot.connect(state["is_connected"])

    def _make_learner(self, seed: nn.Module, *, warmup: int = 0) -> SeedLearner:
        """Build a learner with the settings of the optimiser's group that holds the parameters of the slot's submodule."""
        group = group_of(self._optimizer, self._slotted.host.get_submodule(self.place.module), self._slotted.host)
        learner = SeedLearner(seed, self._optimizer, group, self._config, self._make, warmup=warmup)
        learner.loss_unit = self.loss_unit
        return learner


def make_backends(
    slotted: Slotted, optimizer: Optimizer, config: SeedOptimizerConfig, make: MakeOptimizer | None
) -> dict[str, ModuleBackend]:
    """Return a backend for every slot of a model, by name."""
    return {name: ModuleBackend(slot, slotted, optimizer, config, make) for name, slot in slotted.slots.items()}
