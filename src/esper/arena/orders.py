"""Actions of units: their heads, and checks of their values.

Shapes: B = battles, U = units, N = B·U.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from esper.arena.config import ArenaConfig
from esper.arena.specs import WEAPONS
from esper.vecenv import Actions, ActionSpec, Continuous, Discrete, Head, Relevance

MOTION = ("forward", "strafe", "yaw", "jets")  # strafe is to the right, yaw to the left; jets below 0 are off
MOTION_CHOICES = {"forward": (-1.0, 0.0, 1.0), "strafe": (-1.0, 0.0, 1.0), "yaw": (-1.0, -0.3, 0.0, 0.3, 1.0), "jets": (-1.0, 1.0)}
FIRE = ("none", *WEAPONS)
FIRST_WRONG = (*MOTION, "fire", "target", "vent")  # names of the values that `first_wrong` returns for the error message


def action_spec(config: ArenaConfig, *, is_categorical: bool = False) -> ActionSpec:
    """Return the action spec. The head `target` is relevant only where a weapon is fired, and its mask depends on the weapon.

    With `is_categorical`, motion has four discrete heads, whose choices are those of `MOTION_CHOICES`; `as_motion` translates them.
    """
    choices = (Discrete("fire", len(FIRE)), Discrete("target", config.contacts, parent="fire"), Discrete("vent", 2))
    motion: tuple[Head, ...] = (Continuous("motion", len(MOTION)),)
    if is_categorical:
        motion = tuple(Discrete(name, len(values)) for name, values in MOTION_CHOICES.items())
    return ActionSpec(heads=(*choices, *motion), relevance=(Relevance("target", given="fire", choices=tuple(range(1, len(FIRE)))),))


def as_motion(actions: Actions) -> Actions:
    """Translate discrete heads of motion into the head `motion`. Actions that have it already are returned as they are."""
    if "motion" in actions:
        return actions
    chosen = torch.stack([actions[name] for name in MOTION], dim=1)  # [N, 4]
    motion = _motion_values(chosen.device).gather(1, chosen.T).T
    return {**{name: value for name, value in actions.items() if name not in MOTION}, "motion": motion}


@functools.cache
def _motion_values(device: torch.device) -> Tensor:
    """Return the values of the choices of each head of motion, [4, most choices]; unused ones are 0."""
    most = max(map(len, MOTION_CHOICES.values()))
    with torch.inference_mode(False):  # the first caller may be in inference mode
        return torch.tensor([(*MOTION_CHOICES[name], *[0.0] * (most - len(MOTION_CHOICES[name]))) for name in MOTION], device=device)


def check_actions(actions: Actions, config: ArenaConfig) -> None:
    """Raise ValueError if actions do not have the heads, shapes and types of the spec. Does not read values, so it never waits."""
    rows = config.battles * config.units
    spec = action_spec(config)
    expected = {head.name: ((rows,), torch.int64) for head in spec.discrete}
    given = set(actions)
    names = {head.name for head in spec.heads}
    if given != names:
        raise ValueError(f"an action has the heads {sorted(names)}; got {sorted(given)}")
    for name, value in actions.items():
        shape, dtype = expected.get(name, ((rows, len(MOTION)), torch.float32))
        if tuple(value.shape) != shape:
            raise ValueError(
                f"action {name!r} should have shape {shape}, one row for each of {config.units} units in {config.battles} battles; "
                f"got {tuple(value.shape)}"
            )
        if value.dtype != dtype:
            raise ValueError(f"action {name!r} should be of type {dtype}; got {value.dtype}: convert it with .to({dtype})")


def wrong_values(actions: Actions, config: ArenaConfig) -> Tensor:
    """Return the rows [N] bool with a choice that does not exist, or a motion that is NaN or outside of [-1, 1]."""
    wrong = ~(actions["motion"].abs() <= 1.0).all(-1)
    for head in action_spec(config).discrete:
        wrong = wrong | (actions[head.name] < 0) | (actions[head.name] >= head.size)
    return wrong


def first_wrong(actions: Actions, config: ArenaConfig) -> Tensor:
    """Return the index of the first wrong row, or -1, and its values in the order of `FIRST_WRONG`, [1 + 7]. Never waits for the device."""
    wrong = wrong_values(actions, config)
    row = wrong.int().argmax().unsqueeze(0)
    choices = [actions[head.name].index_select(0, row) for head in action_spec(config).discrete]
    held = [actions["motion"].index_select(0, row).squeeze(0), *choices]
    index = row.masked_fill(~wrong.any(), -1)  # torch.where would copy -1 to the device, which cannot be recorded in a CUDA graph
    return torch.cat([part.to(torch.float64) for part in (index, *held)])


def raise_on_wrong_values(row: int, held: dict[str, float], config: ArenaConfig) -> None:
    """Raise ValueError that names the battle, the unit and the wrong value of the action in `row`. `held` are its values by name."""
    battle, unit = divmod(row, config.units)
    place = f"battle {battle}, unit {unit} ({config.unit_classes[unit]} of team {unit // config.team_size})"
    motion = [held[name] for name in MOTION]
    if not all(abs(number) <= 1.0 for number in motion):
        raise ValueError(f"{place}: motion is {motion}, but must be numbers from -1 to 1; clamp it, and find the cause of a NaN")
    for head in action_spec(config).discrete:
        if not 0 <= held[head.name] < head.size:
            raise ValueError(f"{place}: {head.name} is {int(held[head.name])}, but must be from 0 to {head.size - 1}")
