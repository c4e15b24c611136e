"""Lifecycles of the slots of one host: the moves of seeds from stage to stage, rollbacks, the end of an epoch, and the costs.

A `Grower` has one `Lifecycles` for the user's model, and a fleet has one per host, so both follow the same rules. It knows everything but
weights, which its slots hold (`backend.SlotBackend`). It does not check whether a move is allowed, which the gates (`stages.may_...`)
decide, or useful, which the controller decides; see `decisions`.

Every change is an event. `emit` folds it into the ledger at once and queues it until `tell`, so the ledger holds what the events say.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import astuple
from typing import Any, Generic, Protocol

import msgspec

from esper.growth.config import GrowthConfig, GrowthError, RentConfig
from esper.growth.events import BestRestored, Birth, Measured, Outcome, Probed, RolledBack, SeedBack, StageEntered
from esper.growth.lifecycle.backend import AnyBackend, Ramp, SeedPlan, SlotRecord
from esper.growth.lifecycle.governor import Diverged, Governor, LossRange, Verdict
from esper.growth.lifecycle.history import History
from esper.growth.lifecycle.ledger import Ledger
from esper.growth.lifecycle.stages import LIVING, OCCUPIED, Contribution, Cost, Gradual, Stage, may_move
from esper.growth.measure.contribution import Allowance, allowance, confidence_of_look, marginal_rent, total
from esper.growth.measure.promises import Promises, capped
from esper.growth.seeds.blueprints import REGISTRY, Blueprint, cost_of, get_blueprint, options_for
from esper.growth.seeds.seed import GATE_WIDTH
from esper.growth.seeds.width import cost_between
from esper.intervals import Interval
from esper.rng import Streams
from esper.runs import Event

NOTHING = Cost(0, 0)


class Recovers(Protocol):
    """Keeps snapshots of healthy states of a host and restores them."""

    def take_snapshot(self) -> None: ...

    def go_back(self, *, is_repeated: bool) -> int:
        """Restore the latest snapshot and return its epoch.

        `is_repeated` means that the latest snapshot has already led to another disaster; the one before it is restored then.
        """
        ...


class Lifecycles(Generic[AnyBackend]):
    """State and rules of growing one host, epoch by epoch.

    `slots` maps names to the objects that hold the seeds, in the order in which the slots run. `host` (its cost) and `load` come from the
    discovery of the host; `epochs` is the planned length of the training, None if unknown. `samples` is the number of training samples,
    where an epoch is not one pass through them. `scale` makes losses comparable. Without it and without `config.governor.uninformed_loss`,
    the mean training loss of the first epoch becomes the uninformed loss.
    """

    def __init__(
        self,
        slots: Mapping[str, AnyBackend],
        config: GrowthConfig,
        *,
        host: Cost,
        load: float,
        epochs: int | None,
        samples: int | None = None,
        scale: LossRange | None = None,
    ) -> None:
        self.slots, self.config, self.host, self.load, self.epochs, self.samples = dict(slots), config, host, load, epochs, samples
        self.ledger = Ledger()
        for slot in self.slots.values():
            slot.ledger = self.ledger
        self.epoch = 0  # number of finished epochs
        self.history = History(config.governor.checks_per_epoch)
        self.options = {name: options_for(slot.place, config) for name, slot in self.slots.items()}
        self._positions = {name: slot.place.positions for name, slot in self.slots.items()}
        self._prices: dict[tuple[str, str], tuple[Blueprint, Cost]] = {}  # cache of `price`, by slot and blueprint
        self._streams = Streams(config.seed)
        self._check_can_grow()
        self.unit = 1.0  # unit of the loss, see LossRange
        if config.governor.uninformed_loss is not None:
            readout = None if scale is None else scale.readout
            scale = LossRange.of(config.governor.uninformed_loss, loss_range=config.loss_range, readout=readout)
        self.governor = Governor(config.governor, scale)
        self.scale: LossRange | None = None
        if scale is not None:
            self._set_scale(scale)
        self.promises: Promises = {}  # of the last probe
        self.measures_kept = False  # the contributions of kept seeds are measured at the end of this epoch
        self._events: deque[Event] = deque()  # not told yet

    def _check_can_grow(self) -> None:
        """Raise GrowthError unless at least one blueprint fits at least one slot and the budget."""
        options = [(name, option.name) for name, options in self.options.items() for option in options]
        if not options:
            raise GrowthError(f"none of the blueprints {self.config.blueprints} fits into any slot; see describe()")
        allowed = self.allowance()
        refusals = [(name, option, allowed.refusal(self.price(name, option))) for name, option in options]
        if all(refusal is not None for _, _, refusal in refusals):
            name, option, refusal = refusals[0]
            raise GrowthError(f"the budget is smaller than any blueprint; {option} after {name!r}: {refusal}. Raise the budget")

    @property
    def is_over(self) -> bool:
        return self.epochs is not None and self.epoch >= self.epochs

    @property
    def steps_per_epoch(self) -> int:
        """Steps of the last epoch; 0 before the end of the first."""
        return self.history.length or 0

    def is_stuck(self) -> bool:
        """Return whether the validation loss has not improved for `config.patience` epochs while no seed is living."""
        losses, patience = self.history.val_losses, self.config.patience
        if patience is None or len(losses) <= patience or self.living():
            return False
        recent, before = ([loss for loss in some if math.isfinite(loss)] for some in (losses[-patience:], losses[:-patience]))
        return min(recent, default=math.inf) >= min(before, default=math.inf)

    # Events

    def emit(self, event: Event) -> None:
        """Fold an event into the ledger, and queue it until `tell` is called."""
        self.ledger.take(event)
        self._events.append(event)

    def tell(self, *listeners: Callable[[Event], None]) -> None:
        """Pass all queued events to the listeners, oldest first."""
        while self._events:
            event = self._events.popleft()
            for listener in listeners:
                listener(event)

    def queue(self, events: Iterable[Event]) -> None:
        """Queue events that the ledger knows already."""
        self._events.extend(events)

    # Moves

    def germinate(self, name: str, blueprint: str, reason: str) -> None:
        """Create a seed in a slot. It trains from now on: with the host ("joint"), or beside it in the shadow."""
        slot, rules = self.slots[name], self.config.lifecycle
        # The random seed depends on the number of the seed, so it does not repeat within a run.
        number, is_joint = self.next_number, rules.raise_mode == "joint"
        random_seed = self._streams.integer(f"seed {number}")
        # The learning rate of a joint seed rises slowly, unless the host is untrained too.
        warmup = round(self.config.seed_optimizer.warmup_epochs * self.steps_per_epoch) if is_joint else 0
        cost, alpha = self.price(name, blueprint), 1.0 if is_joint else 0.0
        slot.plant(SeedPlan(blueprint, random_seed, rules.blending, is_joint, alpha=alpha, warmup=warmup))
        slot.record = SlotRecord(number=number, tried=slot.record.tried)
        # It grows behind the kept seed in the slot before this one at the same place.
        before = [
            other.record.number
            for other in self.slots.values()
            if other.place.module == slot.place.module and other.place.earlier == slot.place.earlier - 1
        ]
        birth = Birth(rules.raise_mode, cost.parameters, cost.flops, after=before[0] if before else None)
        # A seed leaves GERMINATED at once, because it learns from its first step on.
        self._enter(name, Stage.GERMINATED, reason, blueprint=blueprint, birth=birth)
        if is_joint:
            self._enter(name, Stage.HOLDING, "it is the identity, so it learns with the host from the start")
        else:
            self._enter(name, Stage.TRAINING, "it learns in the shadow")

    @property
    def next_number(self) -> int:
        """The number of the next seed."""
        return self.ledger.seeds[-1].number + 1 if self.ledger.seeds else 1

    def blend(self, name: str, reason: str, *, alpha: float | None = None, over: Gradual | None = None) -> None:
        """Start to move alpha to `alpha`, or to the configured target, as `over` says. Connect a seed that was raised in the shadow."""
        slot, rules = self.slots[name], self.config.lifecycle
        slot.connect()
        if slot.stage is not Stage.BLENDING:
            self._enter(name, Stage.BLENDING, reason)
        self._ramp(slot, rules.alpha_target if alpha is None else alpha, rules.blend_epochs, over)

    def fossilize(self, name: str, reason: str) -> None:
        """Make the seed a permanent part of the host. Another slot opens behind it, as far as the budget allows."""
        slot = self.slots[name]
        self._enter(name, Stage.FOSSILIZED, reason)
        slot.keep()
        self._prices.clear()  # the host may be wider now
        if slot.place.earlier + 1 < self.config.budget.max_seeds_per_place:
            self._open_again(name)

    def withdraw(self, name: str, reason: str, *, over: Gradual | None = None) -> None:
        """Prune a seed gradually: lower alpha to 0 first, so that the host adapts. Without anything to lower, prune it at once."""
        slot, epochs = self.slots[name], self.config.lifecycle.withdraw_epochs
        if not slot.is_connected or slot.alpha == 0.0 or (epochs if over is None or over.epochs is None else over.epochs) == 0:
            self.prune(name, reason)
            return
        if slot.stage is not Stage.BLENDING:
            self._enter(name, Stage.BLENDING, f"{reason}; alpha falls to 0")
        slot.record.is_withdrawing, slot.record.why_withdrawn = True, reason
        self._ramp(slot, 0.0, epochs, over)

    def prune(self, name: str, reason: str) -> None:
        """Remove the seed at once, with its weights, and put the slot under embargo."""
        self._enter(name, Stage.PRUNED, reason)
        self._clear(name)

    def shrink(self, name: str, reason: str) -> None:
        """Remove a kept seed at once, with its weights, and put the slot under embargo."""
        self.prune(name, reason)
        self._prices.clear()  # the host may be less wide now

    def _clear(self, name: str, blueprint: str = "") -> None:
        """Remove the weights of the seed in a slot and put the slot under embargo. If the seed is gone already, pass its `blueprint`."""
        slot, epochs = self.slots[name], self.config.lifecycle.embargo_epochs
        if slot.seed is not None:
            blueprint = slot.seed.blueprint
            slot.uproot()
        slot.record = SlotRecord(stage=Stage.PRUNED, tried=[*slot.record.tried, blueprint], embargo_left=epochs)
        self._enter(name, Stage.EMBARGOED, f"nothing grows here for {epochs} epochs")
        if epochs == 0:
            self._enter(name, Stage.DORMANT, "there is no embargo")

    def _enter(self, name: str, stage: Stage, reason: str, *, blueprint: str = "", birth: Birth | None = None) -> None:
        """Move a slot to a stage and emit the event, which writes it into the ledger. An illegal move is a programming error."""
        record, seed = self.slots[name].record, self.slots[name].seed
        answer = may_move(record.stage, stage)
        assert answer.passed, f"{name}: {answer.reason}"
        record.stage, record.epochs_in_stage = stage, 0
        blueprint = blueprint or (record.tried[-1] if seed is None else seed.blueprint)
        self._tell_stage(name, record.number, blueprint, stage, reason, birth)

    def _tell_stage(self, slot: str, number: int | None, blueprint: str, stage: Stage, reason: str, birth: Birth | None = None) -> None:
        self.emit(
            StageEntered(epoch=self.epoch, slot=slot, number=number, blueprint=blueprint, stage=stage.name, reason=reason, birth=birth)
        )

    def _ramp(self, slot: AnyBackend, target: float, epochs: int, over: Gradual | None = None) -> None:
        """Let alpha move to `target` over this number of epochs, unless `over` has another; 0 moves it at once."""
        steps = (epochs if over is None or over.epochs is None else over.epochs) * max(self.steps_per_epoch, 1)
        curve = (over.curve if over is not None else None) or self.config.lifecycle.alpha_curve
        slot.record.ramp = Ramp(slot.alpha, target, steps, curve) if steps else None
        slot.alpha = slot.alpha if steps else target

    def _open_again(self, name: str) -> None:
        """Open another slot at the place of a slot, behind it, if the place can have several."""
        slot = self.slots[name].open_again()
        if slot is None:
            return
        slot.ledger = self.ledger
        behind = {key: self.slots.pop(key) for key in list(self.slots)[list(self.slots).index(name) + 1 :]}
        self.slots |= {slot.place.name: slot, **behind}
        self.options[slot.place.name], self._positions[slot.place.name] = self.options[name], self._positions[name]
        slot.set_loss_unit(self.unit)

    # Rollbacks and the best state

    def suspects(self) -> dict[str, int]:
        """Return the slots with a connected seed that is not fossilized, and the seeds' numbers. One of them may have caused a disaster.

        A seed that is being withdrawn is none of them: if it had a part in the disaster, then by its removal.
        """
        return {
            name: slot.record.number
            for name, slot in self.slots.items()
            if slot.is_connected
            and slot.stage is not Stage.FOSSILIZED
            and slot.record.number is not None
            and not slot.record.is_withdrawing
        }

    def _withdrawn(self) -> set[int]:
        """Return the numbers of the seeds that are being withdrawn."""
        records = (slot.record for slot in self.slots.values())
        return {record.number for record in records if record.is_withdrawing and record.number is not None}

    def go_back(self, reason: str, recovery: Recovers) -> None:
        """After a disaster: restore the host to a healthy snapshot and put the slots of all suspects under embargo.

        Seeds that were pruned or began to be withdrawn since the snapshot come back, because their removal may have caused the disaster.
        They may not be pruned for `embargo_epochs` epochs (at least one), and for twice as long each further time. Otherwise a controller
        would prune them again, and the governor would go back again.
        """
        suspects = self.suspects()
        removed = self._withdrawn() | {seed.number for seed in self.ledger.seeds if seed.outcome == "pruned"}
        # Restore first: if that is not possible, it raises before anything else has changed.
        to_epoch = recovery.go_back(is_repeated=self.governor.rollbacks_in_a_row > 0)
        steps_lost, seconds_lost = self.history.go_back(to_epoch)
        self.governor.note_rollback()
        self.history.forget_losses()
        # The slots hold the seeds of the snapshot again, except for the suspects. A suspect that is younger than the snapshot is gone
        # already: then its slot is closed, because it was opened behind a seed that is on trial again, or empty, or has an older seed,
        # which stays.
        cleared = {
            name: number
            for name, number in suspects.items()
            if name in self.slots and (self.slots[name].record.number == number or self.slots[name].stage is Stage.DORMANT)
        }
        protected = [slot for slot in self.slots.values() if slot.record.number in removed and slot.stage in LIVING and slot.is_connected]
        gone, back = self._changes(gone=suspects.values(), protected=[slot.record.number for slot in protected])
        self.emit(
            RolledBack(
                epoch=self.epoch,
                to_epoch=to_epoch,
                reason=reason,
                embargoed=list(cleared),
                gone=gone,
                back=back,
                steps_lost=steps_lost,
                seconds_lost=seconds_lost,
            )
        )
        for name, number in cleared.items():
            suspect = self.ledger.seed(number)
            assert suspect is not None
            self._clear(name, suspect.blueprint)
        for slot in protected:
            record, seed = slot.record, slot.seed
            assert seed is not None
            if record.is_withdrawing:  # cancel a withdrawal that had begun before the snapshot
                assert record.ramp is not None
                record.is_withdrawing, record.why_withdrawn = False, ""
                self._ramp(slot, record.ramp.start, self.config.lifecycle.blend_epochs)
            record.prune_embargo = max(self.config.lifecycle.embargo_epochs, 1) * 2 ** (seed.brought_back - 1)

    def check_not_diverged(self, reason: str) -> None:
        """Raise Diverged after more rollbacks in a row than the config allows."""
        if self.governor.rollbacks_in_a_row > self.config.governor.max_rollbacks:
            to_epoch = self.ledger.rollbacks[-1].to_epoch
            raise Diverged(
                f"the training fails again and again from a healthy state: {reason}. The model was restored to its state after epoch "
                f"{to_epoch}; look for NaN in the data, or lower the learning rate"
            )

    def note_restored(self, epoch: int, why_left_out: str, **figures: Any) -> BestRestored:
        """After the state after an `epoch` was restored as the result: mark the seeds that are not in it as pruned.

        Emit and return the event; `figures` are those of `BestRestored`.
        """
        gone, back = self._changes()
        seeds = [seed for seed in self.ledger.seeds if seed.number in gone]
        for seed in seeds:
            self._tell_stage(seed.slot, seed.number, seed.blueprint, Stage.PRUNED, why_left_out)
        left_out = [seed.slot for seed in seeds]
        event = BestRestored(epoch=epoch, last_epoch=self.epoch, left_out=left_out, gone=gone, back=back, **figures)
        self.emit(event)
        return event

    def note_baked(self) -> None:
        """After the model was baked, which has removed the seeds that still lived: mark them as pruned."""
        for name in self.living():
            slot, seed = self.slots[name], self.slots[name].seed
            assert seed is not None
            self._tell_stage(name, seed.number, seed.blueprint, Stage.PRUNED, "not fossilized when the model was baked")
            slot.record = SlotRecord()

    def _changes(self, *, gone: Collection[int] = (), protected: Collection[int | None] = ()) -> tuple[list[int], list[SeedBack]]:
        """After an earlier state was restored: return the seeds that are gone, and those in another stage than the ledger says.

        The seeds in `gone` go too, and those in `protected` are among those that come back.
        """
        slots = {slot.record.number: name for name, slot in self.slots.items() if slot.record.number not in gone}
        missing, back = [], []
        for seed in self.ledger.seeds:
            if seed.number not in slots:
                missing += [seed.number] if seed.is_present else []
                continue
            name, is_protected = slots[seed.number], seed.number in protected
            stage = self.slots[name].stage
            if not seed.is_present or seed.stage is not stage or is_protected:
                outcome: Outcome = "kept" if stage is Stage.FOSSILIZED else "living"
                back.append(SeedBack(seed.number, name, stage.name, outcome, is_protected))
        return missing, back

    # The end of an epoch

    def on_trial(self) -> dict[str, float]:
        """Return the slots whose seeds' contributions are measured at the end of this epoch, with the confidence of each interval.

        These are the seeds whose shortest probation is over by then, and kept seeds if the controller asked for them. Each is measured
        again after every further epoch, up to the end of the training, and the confidence accounts for all of these looks.
        """
        least = self.config.lifecycle.holding_epochs
        later = None if self.epochs is None else max(self.epochs - self.epoch - 1, 0)  # looks after this one; None: unknown
        found = {}
        for name, slot in self.slots.items():
            is_due = slot.stage is Stage.HOLDING and slot.record.epochs_in_stage + 1 >= least and not slot.record.is_withdrawing
            if slot.seed is not None and (is_due or (slot.stage is Stage.FOSSILIZED and self.measures_kept)):
                look = len(slot.seed.contributions) + 1
                found[name] = confidence_of_look(look, None if later is None else look + later)
        return found

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
        """Close an epoch: note losses, contributions and the results of the probe, make the moves that need no decision, and emit events.

        `promises` is None if no probe ran in this epoch.
        """
        self.history.end_epoch(chunks, val_loss)
        self.epoch += 1
        for name in list(self.slots):
            self._end_epoch_of(name)
        self.history.reach(self.epoch)
        # Contributions belong to the epoch that has just ended, so they are noted after it was counted.
        for name, contribution in measured.items():
            self.note_contribution(name, contribution)
        # A probe cannot promise more than the training loss can still fall.
        left = None if self.scale is None else self.history.train_losses[-1] - self.scale.floor
        self.promises = capped(promises, loss=left, steps=self.steps_per_epoch) if promises else {}
        if promises is not None:
            nested: dict[str, dict[str, float]] = {}  # slot -> blueprint -> estimate
            for (slot, blueprint), promise in self.promises.items():
                nested.setdefault(slot, {})[blueprint] = promise
            self.emit(Probed(epoch=self.epoch, promises=nested))

    def _end_epoch_of(self, name: str) -> None:
        """Count the epoch of a slot, read the statistics of the seed's gradients, and end a ramp of alpha or an embargo."""
        slot, record = self.slots[name], self.slots[name].record
        record.epochs_in_stage += 1
        record.prune_embargo = max(record.prune_embargo - 1, 0)
        if record.stage in OCCUPIED:
            record.age += 1
        if (gradients := slot.gradients()) is not None:
            record.gradients = gradients
        if record.stage is Stage.BLENDING and (record.ramp is None or record.ramp.done >= record.ramp.steps):
            record.ramp = None
            if record.is_withdrawing:
                self.prune(name, record.why_withdrawn)
            else:
                self._enter(name, Stage.HOLDING, f"alpha has reached {slot.alpha:g}")
        elif record.stage is Stage.EMBARGOED:
            record.embargo_left -= 1
            if record.embargo_left <= 0:
                self._enter(name, Stage.DORMANT, "the embargo is over")

    def note_contribution(self, name: str, contribution: Contribution) -> None:
        """Emit the measured contribution of the seed in a slot, which writes it into the ledger."""
        number, gain = self.slots[name].record.number, contribution.gain
        assert number is not None
        rent = self.rent(name)
        self.emit(
            Measured(
                epoch=self.epoch,
                slot=name,
                number=number,
                gain=gain.estimate,
                gain_low=gain.low,
                gain_high=gain.high,
                rent=rent,
                unit=contribution.unit,
                count=contribution.count,
            )
        )

    def contribution(self, name: str) -> Contribution | None:
        """Return the contribution of the seed in a slot, as measured last."""
        seed = self.slots[name].seed
        if seed is None or not seed.contributions:
            return None
        last = seed.contributions[-1]
        return Contribution(Interval(last.gain, last.gain_low, last.gain_high), last.epoch, last.unit, last.count)

    def settle(self, verdict: Verdict, chunks: list[float], recovery: Recovers) -> None:
        """After an epoch without a disaster: reset the count of rollbacks in a row, and take a snapshot if one is due."""
        # Without chunks, all losses of the epoch were forgotten by a rollback, so nothing shows that the state is healthy.
        if chunks:
            self.governor.rollbacks_in_a_row = 0
        if chunks and verdict.is_healthy and self.epoch % self.config.governor.snapshot_every == 0:
            recovery.take_snapshot()

    # Costs

    def occupied(self) -> Iterator[tuple[str, AnyBackend]]:
        """Yield the slots that hold a seed, fossilized ones included."""
        return ((name, slot) for name, slot in self.slots.items() if slot.stage in OCCUPIED)

    def living(self) -> list[str]:
        """Return the slots whose seed may still be pruned."""
        return [name for name, slot in self.slots.items() if slot.stage in LIVING]

    def cost(self, name: str) -> Cost:
        """Return the cost of the seed in a slot; 0 for an empty slot."""
        seed = self.slots[name].seed
        return NOTHING if seed is None else Cost(seed.parameters, seed.flops)

    def added(self) -> Cost:
        """Return the cost of all seeds, including those not connected yet, and of the weights between units of kept ones."""
        kept = [(slot.wide, slot.place.chain) for slot in self.slots.values() if slot.stage is Stage.FOSSILIZED and slot.wide]
        between = [cost_between(kept)] if len(kept) > 1 else []
        return total([*(self.cost(name) for name in self.slots), *between])

    def connected(self) -> Cost:
        """Return the cost of the seeds that take part in the host's forward pass."""
        return total(self.cost(name) for name, slot in self.slots.items() if slot.is_connected)

    def allowance(self) -> Allowance:
        """Return the rest of the budget."""
        seeds = len(list(self.occupied()))
        return allowance(self.config.budget, host=self.host, added=self.added(), seeds=seeds, slots=len(self.slots))

    def price(self, name: str, blueprint: str) -> Cost:
        """Return the cost of a seed of this blueprint in a slot: its branch, and the gate if seeds blend by one."""
        known = self._prices.get((name, blueprint))
        if known is None or known[0] is not REGISTRY.get(blueprint):  # a user may have registered another blueprint under this name
            current, place = get_blueprint(blueprint), self.slots[name].place_now()
            cost = cost_of(current, place)
            if self.config.lifecycle.blending == "gate":
                # Gated blending adds two linear layers: place.width -> GATE_WIDTH -> 1.
                products = GATE_WIDTH * (place.width + 1)
                cost = total([cost, Cost(products + GATE_WIDTH + 1, 2 * products)])
            known = self._prices[name, blueprint] = current, cost
        return known[1]

    def load_of(self, name: str, cost: Cost) -> float:
        """Return the weights of a seed in a slot, divided by the positions that share them."""
        return cost.parameters / self._positions[name]

    def rent(self, name: str) -> float:
        """Return the rent of the seed in a slot: the rise of the total rent that it causes in addition to all other seeds."""
        return self.rent_beside(self.cost(name), self.added())

    def rent_beside(self, own: Cost, added: Cost) -> float:
        """Return the rent of a seed with cost `own`, which is part of `added`."""
        return self.rent_of(own, Cost(added.parameters - own.parameters, added.flops - own.flops))

    def rent_of(self, own: Cost, others: Cost) -> float:
        """Return the rent of a seed in addition to others."""
        return self.unit * marginal_rent(own, others, self.host, self.config.rent)

    def set_rent(self, rent: RentConfig) -> None:
        """Change the rent from now on."""
        self.config = msgspec.structs.replace(self.config, rent=rent)

    def _set_scale(self, scale: LossRange) -> None:
        """Set the scale of all losses. Rents, the clipping of gradients and their health are relative to its unit."""
        self.scale = self.governor.scale = scale
        self.unit = scale.unit
        for slot in self.slots.values():
            slot.set_loss_unit(scale.unit)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the state except for the slots and the governor's losses, which are saved together with the weights of the host."""
        return {
            "ledger": msgspec.to_builtins(self.ledger),
            "history": self.history.state_dict(),
            "epoch": self.epoch,
            "measures_kept": self.measures_kept,
            "promises": [[slot, blueprint, value] for (slot, blueprint), value in self.promises.items()],
            "scale": None if self.scale is None else list(astuple(self.scale)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        ledger = msgspec.convert(state["ledger"], Ledger)
        self.ledger.seeds, self.ledger.refused, self.ledger.rollbacks = ledger.seeds, ledger.refused, ledger.rollbacks
        self.history.load_state_dict(state["history"])
        self.epoch = state["epoch"]
        self.promises = {(slot, blueprint): value for slot, blueprint, value in state["promises"]}
        self.measures_kept = state["measures_kept"]
        if state["scale"] is not None:
            self._set_scale(LossRange(*state["scale"]))

    def slots_state(self) -> dict[str, Any]:
        """Return the state of the slots and their seeds, which snapshots hold."""
        return {name: {"record": msgspec.to_builtins(slot.record), **slot.seed_state()} for name, slot in self.slots.items()}

    def slots_if_kept(self) -> dict[str, Any]:
        """Return the state as if all connected seeds were kept and no others had grown, without the optimisers of the seeds."""
        state = {}
        for name, slot in self.slots.items():
            record = slot.record
            if slot.is_connected:
                record = msgspec.structs.replace(record, stage=Stage.FOSSILIZED)
            elif record.stage in OCCUPIED:
                record = SlotRecord(tried=record.tried)
            state[name] = {"record": msgspec.to_builtins(record), **slot.state_if_kept()}
        return state

    def load_slots(self, state: dict[str, Any]) -> None:
        """Restore all slots: remove seeds that are younger than the state, and rebuild seeds that have been pruned since."""
        self._prices.clear()
        for name in [name for name in reversed(self.slots) if name not in state]:
            self.slots.pop(name).close()
            del self.options[name], self._positions[name]
        for name in [name for name in state if name not in self.slots]:
            module = name.rpartition("#")[0]
            self._open_again(next(last for last, slot in reversed(self.slots.items()) if slot.place.module == module))
        for name, saved in state.items():
            slot, record = self.slots[name], msgspec.convert(saved["record"], SlotRecord)
            slot.load_seed_state(saved, record)
            slot.record = record
