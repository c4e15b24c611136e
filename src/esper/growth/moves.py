"""From decision to deed: which gate an action has to pass, and what the garden does when it has passed."""

from __future__ import annotations

from esper.growth.decisions import Action, Advance, Fossilize, Germinate, Prune, Retarget
from esper.growth.errors import GrowthError
from esper.growth.garden import AnyBed, Garden
from esper.growth.gates import Answer, may_blend, may_fossilize, may_germinate, may_prune, may_retarget


def ask_gate(garden: Garden[AnyBed], action: Action) -> Answer:
    slot, rules = garden.view(action.slot, {}), garden.config.lifecycle
    match action:
        case Germinate():
            names = [option.name for option in garden.options[action.slot]]
            if action.blueprint not in names:
                return Answer(False, f"{action.blueprint!r} cannot grow there; what can is {', '.join(names) or 'nothing'}")
            return may_germinate(slot, garden.price(action.slot, action.blueprint), garden.allowance())
        case Advance():
            return may_blend(slot, rules)
        case Retarget():
            return may_retarget(slot, action.alpha)
        case Fossilize():
            return may_fossilize(slot, rules, epoch=garden.epoch)
        case Prune():
            return may_prune(slot)
    raise GrowthError(f"{type(action).__name__} is no action that a controller can decide on")


def carry_out(garden: Garden[AnyBed], action: Action, *, is_over: bool) -> None:
    """When the training is over there is no time left for a gentle end."""
    match action:
        case Germinate():
            garden.germinate(action.slot, action.blueprint, action.reason)
        case Advance():
            garden.blend(action.slot, action.reason)
        case Retarget():
            garden.blend(action.slot, action.reason, alpha=action.alpha)
        case Fossilize():
            garden.fossilize(action.slot, action.reason)
        case Prune():
            (garden.prune if is_over else garden.withdraw)(action.slot, action.reason)


def check_can_grow(garden: Garden[AnyBed]) -> None:
    """Raises where there is no slot and no blueprint that could ever come together within the budget."""
    options = [(name, option.name) for name, options in garden.options.items() for option in options]
    if not options:
        raise GrowthError(f"none of the blueprints {garden.config.blueprints} fits into any slot; see describe()")
    allowed = garden.allowance()
    refusals = [(name, option, allowed.refusal(garden.price(name, option))) for name, option in options]
    if all(refusal is not None for _, _, refusal in refusals):
        name, option, refusal = refusals[0]
        raise GrowthError(f"the budget is smaller than any blueprint; {option} after {name!r}: {refusal}. Raise the budget")
