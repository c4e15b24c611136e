"""What a controller sees of a host, and what becomes of its decision: plain numbers, gates, actions, and the event that ends an epoch.

state = growth_state(lifecycles, learning_rate=0.001)
decision = controller.decide(state)
carry_out(lifecycles, decision, by="heuristic")     # refused actions are written into the ledger
"""

from __future__ import annotations

from collections.abc import Mapping

from esper.growth.config import GrowthError
from esper.growth.events import ActionRefused, EpochEnded, PassedOver, Shrunk, SlotView, Widened
from esper.growth.lifecycle.backend import AnyBackend
from esper.growth.lifecycle.lifecycles import Lifecycles
from esper.growth.lifecycle.stages import (
    Action,
    Advance,
    Answer,
    Candidate,
    Contribution,
    Decision,
    Fossilize,
    Germinate,
    Gradual,
    GrowthState,
    Prune,
    Retarget,
    Shrink,
    SlotState,
    Stage,
    may_blend,
    may_fossilize,
    may_germinate,
    may_move_alpha,
    may_prune,
    may_retarget,
    may_shrink,
)
from esper.growth.seeds.blueprints import get_blueprint, widened_by
from esper.text_table import figure

# What a controller sees


def growth_state(lifecycles: Lifecycles[AnyBackend], *, learning_rate: float) -> GrowthState:
    """Return the input of a controller."""
    allowed, history = lifecycles.allowance(), lifecycles.history
    return GrowthState(
        epoch=lifecycles.epoch,
        epochs=lifecycles.epochs,
        steps_per_epoch=lifecycles.steps_per_epoch,
        train_losses=tuple(history.train_losses),
        val_losses=tuple(history.val_losses),
        slots=slot_states(lifecycles),
        host_cost=lifecycles.host,
        added=lifecycles.added(),
        parameters_left=allowed.parameters,
        flops_left=allowed.flops,
        seeds_left=allowed.seeds,
        rollbacks=lifecycles.governor.rollbacks,
        scale=lifecycles.scale,
        lifecycle=lifecycles.config.lifecycle,
        learning_rate=learning_rate,
        samples_per_epoch=history.samples,
        host_load=lifecycles.load,
        rent=lifecycles.config.rent,
        training_samples=lifecycles.samples,
    )


def slot_states(lifecycles: Lifecycles[AnyBackend], *names: str) -> tuple[SlotState, ...]:
    """Return the states of these slots, by default of all. They are copies, which stay as they are when the training goes on."""
    added, allowed = lifecycles.added(), lifecycles.allowance()
    states = []
    for name in names or lifecycles.slots:
        slot, record, seed = lifecycles.slots[name], lifecycles.slots[name].record, lifecycles.slots[name].seed
        cost, candidates = lifecycles.cost(name), list[Candidate]()
        if record.stage is Stage.DORMANT:
            # The blueprints that fit the slot and the rest of the budget.
            for option in lifecycles.options[name]:
                price = lifecycles.price(name, option.name)
                if allowed.refusal(price) is None:
                    own_rent, promise = lifecycles.rent_of(price, added), lifecycles.promises.get((name, option.name))
                    candidates.append(Candidate(option.name, price, own_rent, promise, lifecycles.load_of(name, price), option.widened))
        states.append(
            SlotState(
                place=slot.place,
                stage=record.stage,
                seed=None if seed is None else seed.copy(),
                cost=cost,
                rent=lifecycles.rent_beside(cost, added),
                alpha=slot.alpha if slot.is_connected else 0.0,
                age=record.age,
                epochs_in_stage=record.epochs_in_stage,
                is_withdrawing=record.is_withdrawing,
                prune_embargo=record.prune_embargo,
                gradients=record.gradients,
                contribution=lifecycles.contribution(name),
                candidates=tuple(candidates),
                tried=tuple(record.tried),
            )
        )
    return tuple(states)


# What becomes of its decision


def carry_out(lifecycles: Lifecycles[AnyBackend], decision: Decision, *, by: str) -> None:
    """Execute the actions that pass their gates; emit an event for each refused one.

    `by` is the name of the controller. More than one action for a slot raises GrowthError before anything is done.
    """
    slots = [action.slot for action in decision.actions]
    if len(set(slots)) < len(slots):
        raise GrowthError(f"the controller {by!r} decided twice about one slot ({', '.join(slots)}); return at most one action per slot")
    for action in decision.actions:
        (state,) = slot_states(lifecycles, action.slot)
        answer = ask_gate(lifecycles, action, state)
        if answer.passed:
            _execute(lifecycles, action, state)
        else:
            blueprint = action.blueprint if isinstance(action, Germinate) else state.blueprint or ""
            lifecycles.emit(
                ActionRefused(
                    epoch=lifecycles.epoch,
                    slot=action.slot,
                    number=None if state.seed is None else state.seed.number,
                    action=type(action).__name__.lower(),
                    reason=answer.reason,
                    blueprint=blueprint,
                )
            )
    lifecycles.measures_kept = decision.measure_kept
    if decision.passed_over:
        reasons = {slot: dict(row) for slot, row in decision.passed_over.items()}
        lifecycles.emit(PassedOver(epoch=lifecycles.epoch, reasons=reasons))


def ask_gate(lifecycles: Lifecycles[AnyBackend], action: Action, slot: SlotState) -> Answer:
    """Return the answer of the gate that `action` has to pass, for a slot in this state."""
    rules = lifecycles.config.lifecycle
    if isinstance(action, Gradual) and not (answer := may_move_alpha(action, getattr(action, "alpha", None))).passed:
        return answer
    match action:
        case Germinate():
            names = [option.name for option in lifecycles.options[action.slot]]
            if action.blueprint not in names:
                return Answer(False, f"{action.blueprint!r} cannot grow there; blueprints that can: {', '.join(names) or 'none'}")
            return may_germinate(slot, lifecycles.allowance().refusal(lifecycles.price(action.slot, action.blueprint)))
        case Advance():
            return may_blend(slot, rules)
        case Retarget():
            return may_retarget(slot)
        case Fossilize():
            return may_fossilize(slot, rules, epoch=lifecycles.epoch)
        case Prune():
            return may_prune(slot)
        case Shrink():
            return may_shrink(slot, epoch=lifecycles.epoch, refusal=lifecycles.slots[action.slot].why_not_removed())
    raise GrowthError(
        f"{type(action).__name__} is not an action of a controller; use Germinate, Advance, Retarget, Fossilize, Prune or Shrink"
    )


def _execute(lifecycles: Lifecycles[AnyBackend], action: Action, state: SlotState) -> None:
    """Execute an action that has passed its gate. Emit an event before the host becomes wider or smaller."""
    name, slot = action.slot, lifecycles.slots[action.slot]
    match action:
        case Germinate():
            if (blueprint := get_blueprint(action.blueprint)).share is not None:
                chain = widened_by(blueprint, slot.place_now())
                lifecycles.emit(
                    Widened(
                        epoch=lifecycles.epoch,
                        slot=name,
                        number=lifecycles.next_number,
                        blueprint=action.blueprint,
                        units={one.name: one.added(blueprint.share) for one in chain},
                        before={one.name: one.width + one.kept for one in chain},
                    )
                )
            lifecycles.germinate(name, action.blueprint, action.reason)
        case Advance() | Retarget():
            lifecycles.blend(name, action.reason, alpha=action.alpha, over=action)
        case Fossilize():
            lifecycles.fossilize(name, action.reason)
        case Prune():
            # A connected seed is pruned gradually, unless no epochs are left in which alpha could fall.
            if lifecycles.is_over:
                lifecycles.prune(name, action.reason)
            else:
                lifecycles.withdraw(name, action.reason, over=action)
        case Shrink():
            assert state.contribution is not None  # the gate has asked for it
            number, gain = slot.record.number, state.contribution.gain
            parameters, flops = state.cost.parameters, state.cost.flops
            lifecycles.emit(
                Shrunk.of(name, gain, parameters=parameters, flops=flops, rent=state.rent, number=number, epoch=lifecycles.epoch)
            )
            lifecycles.shrink(name, action.reason)


def shrink_least(lifecycles: Lifecycles[AnyBackend], measured: Mapping[str, Contribution]) -> str | None:
    """Note these contributions of kept seeds, and remove the seed that pays least of those that do not pay their rent. Return its slot.

    Return None if all of them pay.
    """
    for name, contribution in measured.items():
        lifecycles.note_contribution(name, contribution)
    rents, actions = {name: lifecycles.rent(name) for name in measured}, list[Shrink]()
    for state in slot_states(lifecycles, *measured):
        name = state.place.name
        action = Shrink(slot=name, reason=f"{measured[name].in_words()}, and its rent is {figure(rents[name])}")
        actions += [action] if ask_gate(lifecycles, action, state).passed else []
    if not actions:
        return None
    least = min(actions, key=lambda action: measured[action.slot].gain.estimate - rents[action.slot])
    carry_out(lifecycles, Decision((least,), "shrinks"), by="shrink")
    return least.slot


# The end of an epoch


def epoch_ended(
    lifecycles: Lifecycles[AnyBackend],
    decision: Decision,
    *,
    learning_rate: float,
    resources: dict[str, float],
    metrics: dict[str, float],
) -> EpochEnded:
    """Build the event for the end of an epoch. Starts the next lap of the history and resets its count of skipped steps."""
    host, history = lifecycles.host, lifecycles.history
    seconds, samples = history.lap()
    actions = [f"{type(action).__name__.lower()} {action.slot}: {action.reason}" for action in decision.actions]
    views = []
    for state in slot_states(lifecycles):
        seed, gradients = state.seed, state.gradients
        gain = None if state.contribution is None else state.contribution.gain
        views.append(
            SlotView(
                slot=state.place.name,
                number=None if seed is None else seed.number,
                stage=state.stage.name,
                blueprint=None if seed is None else seed.blueprint,
                alpha=state.alpha,
                age=state.age,
                health=None if gradients is None else gradients.health,
                gain=None if gain is None else gain.estimate,
                gain_low=None if gain is None else gain.low,
                gain_high=None if gain is None else gain.high,
                parameters=state.cost.parameters,
                rent=state.rent,
                grad_norm=None if gradients is None else gradients.mean_norm,
                skipped=0 if gradients is None else gradients.skipped,
                flops=state.cost.flops,
            )
        )
    return EpochEnded(
        epoch=lifecycles.epoch,
        train_loss=history.train_losses[-1],
        val_loss=history.val_losses[-1],
        learning_rate=learning_rate,
        decision="; ".join(filter(None, [*actions, decision.reason])),
        slots=views,
        parameters=host.parameters + lifecycles.added().parameters,
        flops=host.flops + lifecycles.connected().flops,
        seconds=seconds,
        samples_per_second=samples / seconds if samples else None,
        total_gflops=history.flops / 1e9 if history.flops else None,
        step_seconds=history.step_seconds,
        data_wait_seconds=history.data_wait,
        resources=resources,
        skipped=history.take_skipped(),
        metrics=metrics,
    )
