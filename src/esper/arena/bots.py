"""Scripted players in three strengths, and a random one. They are batched functions of what their units sense.

A bot knows what a policy observes: its own condition, the zone and the route to it, and the contacts that its unit senses, nearest first.
It returns the same kind of actions.

    weak     walks to the zone, stands still to shoot, with the first weapon that reaches a contact, at the nearest contact that it reaches
    middle   keeps moving while it shoots, picks the weapon with the most damage per time, vents when it is hot
    strong   prefers targets that are nearly dead, never overheats by firing, vents when no enemy is near, keeps the best distance for its
             class, and a longer one when it is damaged or hot

Shapes: B = battles, U = units, C = contacts, W = kinds of weapons. Everything is [B, U] unless stated.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from esper.arena.arena import Arena
from esper.arena.map_columns import columns, read, unit_at
from esper.arena.motion import can_act
from esper.arena.orders import action_masks, in_reach
from esper.arena.routes import STEPS
from esper.arena.specs import CLASSES, PHYSICS, WEAPONS
from esper.arena.terrain_chance import mixed
from esper.vecenv import Actions

BOTS = ("random", "weak", "middle", "strong")
_TURN_GAIN = 3.0  # yaw order per radian of error


class Tactics(NamedTuple):
    """Settings of the strong bot."""

    focus: float = 1.0  # additional preference for a target that is nearly dead over one with full hit points
    caution: float = 0.95  # share of the heat cap that it does not exceed by firing
    idle_vents_at: float = 0.5  # share of the heat cap above which it vents without contacts
    spacing: float = 1.0  # factor on the preferred distance of its class
    retreat_m: float = 3.0  # additional distance when it is damaged or hot
    sway: float = 1.0  # speed sideways to the line of fire
    pull: float = 0.5  # weight of the way to the zone while it fights


class Skill(NamedTuple):
    """Settings that distinguish the strengths."""

    keeps_moving: bool  # whether it moves while it shoots
    picks_weapon: bool  # whether it picks the weapon with the most damage per time instead of the first that reaches a contact
    vents_at: float  # share of the heat cap above which it vents; above 1: never
    tactics: Tactics | None = None


SKILLS = {
    "weak": Skill(keeps_moving=False, picks_weapon=False, vents_at=2.0),
    "middle": Skill(keeps_moving=True, picks_weapon=True, vents_at=0.9),
    "strong": Skill(keeps_moving=True, picks_weapon=True, vents_at=0.85, tactics=Tactics()),
}
_SWAY = 4  # decisions between two random changes of the sideways direction
_BATTLE, _EPISODE = 1_000_003, 7_919  # factors that keep indices and episodes apart in the hash of a battle
_NAMES = list(WEAPONS)
_TOUGHEST = max(unit.hit_points for unit in CLASSES.values())
_LIKED_M = {"scout": 7.0, "light": 4.0, "medium": 7.0, "heavy": 8.0}  # preferred distance to enemies


class Bot:
    """A scripted player of one arena. `act` returns actions for all units of all battles; callers take the rows they need."""

    def __init__(self, name: str, arena: Arena, *, seed: int = 0) -> None:
        if name not in BOTS:
            raise ValueError(f"no bot is named {name!r}; there are {', '.join(BOTS)}")
        self.name, self.arena, self.seed = name, arena, seed
        self.skill = SKILLS.get(name)
        self.generator = torch.Generator(device=arena.device).manual_seed(seed)
        device = arena.device
        directions = torch.tensor([*STEPS, (0, 0)], dtype=torch.float32, device=device)
        self.directions = torch.nn.functional.normalize(directions, dim=1)  # [9, 2]
        weapons = arena.tables.weapons
        # Damage per tick; a weapon fires at most once per decision. The painter does no damage, so it gets a value by hand.
        worth = weapons.damage / weapons.cooldown.clamp_min(PHYSICS.ticks_per_decision)
        worth[_NAMES.index("painter")] = 0.9
        self.worth = worth  # [W]
        self.liked_m = torch.tensor([_LIKED_M[name] for name in arena.config.unit_classes], device=device)  # [U]

    def act(self) -> Actions:
        """Return actions of all units in the present state of the arena."""
        return self._random() if self.skill is None else self._scripted(self.skill)

    def _random(self) -> Actions:
        """Return uniformly random allowed actions."""
        arena = self.arena
        rows = arena.config.battles * arena.config.units
        masks = action_masks(arena.state.senses, arena.state.units, arena.tables)

        def drawn(mask: Tensor) -> Tensor:
            noise = torch.rand(mask.shape, generator=self.generator, device=mask.device)
            return torch.where(mask, noise, -1.0).argmax(-1)

        fire = drawn(masks["fire"])
        targets = masks["target"].gather(1, fire.view(-1, 1, 1).expand(-1, 1, masks["target"].shape[2])).squeeze(1)
        motion = torch.rand(rows, 4, generator=self.generator, device=arena.device) * 2 - 1
        return {"fire": fire, "target": drawn(targets), "vent": drawn(masks["vent"]), "motion": motion}

    def _scripted(self, skill: Skill) -> Actions:
        """Return the actions of a bot with this skill."""
        state, tables, config = self.arena.state, self.arena.tables, self.arena.config
        units, senses = state.units, state.senses
        reach = in_reach(senses, units, tables) & tables.units.has_weapon.unsqueeze(-1)  # [B, U, W, C]
        if skill.tactics is not None:
            cool_enough = units.heat.unsqueeze(-1) + tables.weapons.heat <= skill.tactics.caution * tables.units.heat_cap.unsqueeze(-1)
            reach = reach & cool_enough.unsqueeze(-1)
        fire, slot, has_target = self._choose(reach, skill)
        has_contact = senses.is_contact.any(-1)
        watched = torch.where(has_target, slot, 0)  # the target, else the nearest contact
        line = unit_at(units.position, senses.contacts.gather(2, watched.unsqueeze(-1)).squeeze(-1)) - units.position

        wanted = self._direction(skill, line, has_contact, has_target)  # [B, U, 2] in the world's frame; orders are clamped below
        look = torch.where(has_contact.unsqueeze(-1), line[..., :2], wanted)
        cos, sin = units.heading.cos(), units.heading.sin()
        error = torch.atan2(look[..., 1] * cos - look[..., 0] * sin, look[..., 0] * cos + look[..., 1] * sin)
        yaw = (error * _TURN_GAIN).clamp(-1.0, 1.0)
        forward = wanted[..., 0] * cos + wanted[..., 1] * sin
        strafe = wanted[..., 0] * sin - wanted[..., 1] * cos
        jets = torch.full_like(forward, -1.0)
        vents_at = torch.where(has_contact, skill.vents_at, skill.tactics.idle_vents_at) if skill.tactics is not None else skill.vents_at
        vent = (units.heat > vents_at * tables.units.heat_cap) & can_act(units)
        motion = torch.stack((forward, strafe, yaw, jets), -1).clamp(-1.0, 1.0)
        return {
            "fire": torch.where(has_target & ~vent, fire, 0).flatten(),
            "target": slot.flatten(),
            "vent": vent.long().flatten(),
            "motion": motion.reshape(config.battles * config.units, -1),
        }

    def _choose(self, reach: Tensor, skill: Skill) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weapon (as the head `fire` counts), the contact slot, and whether there is anything to shoot at."""
        state = self.arena.state
        units, senses = state.units, state.senses
        is_ready = units.cooldown <= PHYSICS.ticks_per_decision - 1  # [B, U, W] within this decision
        can = reach & is_ready.unsqueeze(-1)
        can[:, :, _NAMES.index("smoke")] = False
        # The value of every weapon against every contact [B, U, W, C]; 0 where it cannot be used.
        if not skill.picks_weapon:
            value = reach.float() / (1.0 + torch.arange(reach.shape[2], device=reach.device)).view(-1, 1)
        else:
            value = can * self.worth.view(-1, 1)
            painted = unit_at(units.painted, senses.contacts).unsqueeze(2) > 0
            value[:, :, _NAMES.index("painter")] *= ~painted.squeeze(2)
        if skill.tactics is not None:
            left = unit_at(units.hit_points, senses.contacts) / _TOUGHEST  # [B, U, C]
            value = value * (1.0 + skill.tactics.focus * (1.0 - left)).unsqueeze(2)
        else:
            nearer = 1.0 - 0.01 * torch.arange(reach.shape[3], device=reach.device)
            value = value * nearer
        best, which = value.flatten(2).max(-1)
        slots = reach.shape[3]
        return which // slots + 1, which % slots, best > 0

    def _direction(self, skill: Skill, line: Tensor, has_contact: Tensor, has_target: Tensor) -> Tensor:
        """Return the direction to go [B, U, 2]: to the zone, or near enemies as the skill says. `line` [B, U, 3] leads to an enemy."""
        state, tables = self.arena.state, self.arena.tables
        units, world = state.units, state.world
        x, y = units.position[..., 0], units.position[..., 1]
        column = columns(x, y, self.arena.config.size)
        to_zone = self.directions[read(world.way, column).long()]  # [B, U, 2], zero in the middle of the zone
        distance = torch.linalg.vector_norm(line[..., :2], dim=-1, keepdim=True).clamp_min(1e-3)
        towards = line[..., :2] / distance
        tactics = skill.tactics
        if tactics is None:
            seeks = to_zone + 0.7 * towards * (has_contact & ~has_target).unsqueeze(-1)  # approach contacts that cannot be shot at yet
            return torch.where(has_target.unsqueeze(-1), to_zone * (0.5 if skill.keeps_moving else 0.0), seeks)
        around = torch.stack((-towards[..., 1], towards[..., 0]), -1)
        sway = around * (tactics.sway * self._coins()).unsqueeze(-1)
        hurt = units.hit_points < 0.35 * tables.units.hit_points
        hot = units.heat > 0.7 * tables.units.heat_cap
        wanted_m = self.liked_m * tactics.spacing + tactics.retreat_m * (hurt | hot)
        gap = (distance.squeeze(-1) - wanted_m).clamp(-3.0, 3.0) / 3.0
        fight = towards * gap.unsqueeze(-1) + sway + tactics.pull * to_zone
        close = has_contact & (distance.squeeze(-1) < 16.0)
        return torch.where(close.unsqueeze(-1), fight, to_zone)

    def _coins(self) -> Tensor:
        """Return 1 or -1 for every unit, drawn again every second: the direction of the sideways motion that makes a unit hard to hit."""
        status, count = self.arena.state.status, self.arena.config.units
        battle = mixed(self.arena.place * _BATTLE + status.episode * _EPISODE + status.decision // _SWAY + self.seed)
        words = mixed(battle.unsqueeze(1) + torch.arange(count, device=battle.device))
        return 1.0 - 2.0 * ((words >> 40) & 1)
