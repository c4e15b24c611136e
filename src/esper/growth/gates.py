"""Gates: whether a seed may make its next move, and why not. Pure functions of what is known about it."""

from __future__ import annotations

from typing import NamedTuple

from esper.growth.config import Lifecycle
from esper.growth.lifecycle import LIVING, MOVES, Stage
from esper.growth.rent import Allowance
from esper.growth.state import Cost, SlotState


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
