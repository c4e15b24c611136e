"""Moves grow a host as a whole: seeds that germinate together, as many as slots and budget allow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from esper.growth.lifecycle.stages import Action, Candidate, Cost, Germinate, GrowthState, SlotState, may_germinate
from esper.growth.measure.contribution import Allowance, total

Choice = tuple[SlotState, Candidate]


@dataclass(frozen=True)
class Move:
    """Seeds that germinate together, each in a slot of its own. Without any seed, it grows nothing."""

    name: str
    choices: tuple[Choice, ...] = ()

    @cached_property
    def cost(self) -> Cost:
        return total(candidate.cost for _, candidate in self.choices)

    @property
    def seeds(self) -> tuple[tuple[str, str], ...]:
        """Slot and blueprint of every seed."""
        return tuple((slot.place.name, candidate.blueprint) for slot, candidate in self.choices)

    def germinate(self, reason: str) -> list[Action]:
        return [Germinate(slot=slot.place.name, reason=reason, blueprint=candidate.blueprint) for slot, candidate in self.choices]


NOTHING = Move("nothing")


def allowance_of(state: GrowthState) -> Allowance:
    """Return the rest of the budget."""
    return Allowance(state.seeds_left, state.parameters_left, state.flops_left)


def possible_choices(state: GrowthState) -> dict[str, list[Choice]]:
    """Return blueprint -> the slots in which it may germinate. The budget is checked for each of them as if it were the only one."""
    allowed = allowance_of(state)
    found: dict[str, list[Choice]] = {}
    for slot in state.slots:
        for candidate in slot.candidates:
            if may_germinate(slot, allowed.refusal(candidate.cost)).passed:
                found.setdefault(candidate.blueprint, []).append((slot, candidate))
    return found


def longest_rows(widenings: Iterable[Choice]) -> list[Choice]:
    """Return the widenings of the longest rows of layers, such that no layer is widened twice."""
    chosen: list[Choice] = []
    widened = set[str]()
    for slot, candidate in sorted(widenings, key=lambda choice: len(choice[1].widened), reverse=True):
        if not widened & set(candidate.widened):
            chosen.append((slot, candidate))
            widened |= set(candidate.widened)
    return chosen


def affordable(wanted: Iterable[Choice], allowed: Allowance) -> tuple[Choice, ...]:
    """Return the choices that fit the budget together, the first one of every slot."""
    chosen: dict[str, Choice] = {}
    for slot, candidate in wanted:
        if slot.place.name not in chosen and allowed.refusal(candidate.cost) is None:
            chosen[slot.place.name] = (slot, candidate)
            allowed = allowed.after(candidate.cost)
    return tuple(chosen.values())
