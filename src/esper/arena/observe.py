"""Compute what each unit observes from the state of the battles. `esper.arena.layout` is the table of the observation.

Shapes: B = battles, U = units, C = contacts, A = allies, V = cells of the terrain view.
"""

from __future__ import annotations

import torch
from torch import Tensor

from esper.arena.config import ArenaConfig, ticks
from esper.arena.ground import columns, read, unit_at
from esper.arena.layout import CELL_M, MATERIAL_SIGNALS, STATE_UNIT, VIEW, parts, width
from esper.arena.routes import STEPS
from esper.arena.sensing import nearest_first
from esper.arena.specs import CLASSES, PHYSICS, ROLES, WEAPONS, Material
from esper.arena.state import State
from esper.arena.tables import Tables

_PAINT = ticks(max(weapon.paints_s for weapon in WEAPONS.values()))
_SUPPRESSION = ticks(max(weapon.suppresses_s for weapon in WEAPONS.values()))
_FALLEN = ticks(PHYSICS.fallen_s)


class Observer:
    """Computes the observations of all units. Holds the constant tensors for it."""

    def __init__(self, config: ArenaConfig, tables: Tables, device: torch.device) -> None:
        self.config, self.tables = config, tables
        count = config.units
        self.sides = torch.where(tables.units.team == 0, 1.0, -1.0)  # [U] factor that turns the second team's world by half a turn
        kinds = torch.nn.functional.one_hot(tables.units.kind, len(CLASSES)).float()  # [U, classes]
        roles = torch.nn.functional.one_hot(tables.units.role, len(ROLES)).float()
        self.kinds, self.identity = kinds, torch.cat((kinds, roles), 1)
        self.weapons = tables.units.has_weapon.float()
        self.materials = torch.tensor([MATERIAL_SIGNALS[material] for material in Material], device=device)
        offsets = (torch.arange(VIEW, device=device) - (VIEW - 1) / 2) * CELL_M
        self.view_ahead, self.view_left = (grid.flatten() for grid in torch.meshgrid(offsets, offsets, indexing="ij"))  # [V] each
        directions = torch.tensor([*STEPS, (0, 0)], dtype=torch.float32, device=device)
        self.directions = torch.nn.functional.normalize(directions, dim=1)  # [9, 2]
        own, other = torch.arange(count, device=device), torch.arange(count, device=device).roll(config.team_size)
        self.team_order = torch.where((tables.units.team == 0).unsqueeze(1), own, other)  # [U, U] all units, own team first

    def observe(self, state: State) -> Tensor:
        """Return the observations [B, U, width]. Rows of dead units are computed too, but not used."""
        units = state.units
        cos, sin = units.heading.cos(), units.heading.sin()
        column = columns(units.position[..., 0], units.position[..., 1], self.config.size)
        pieces = [
            self._own(state, cos, sin, column),
            self._contacts(state, cos, sin).flatten(2),
            self._allies(state, cos, sin).flatten(2),
            self._terrain(state, cos, sin).flatten(2),
        ]
        observed = torch.cat(pieces, -1)
        assert observed.shape[-1] == sum(part.width for part in parts(self.config)), [piece.shape[-1] for piece in pieces]
        return observed

    def _own(self, state: State, cos: Tensor, sin: Tensor, column: Tensor) -> Tensor:
        units, world, contest, table = state.units, state.world, state.contest, self.tables.units
        half, sides = self.config.size / 2, self.sides
        battles, count = units.heat.shape
        x, y, z = units.position.unbind(-1)
        velocity_x, velocity_y, velocity_z = units.velocity.unbind(-1)
        away = (x.square() + y.square()).sqrt()
        edge = away - world.zone_radius.unsqueeze(1)
        step = self.directions[read(world.way, column).long()]  # [B, U, 2]
        reach = read(world.route_m, column).clamp_max(4.0 * self.config.size)
        living = units.is_alive.view(battles, 2, -1).float().mean(2)
        first = (table.team == 0).unsqueeze(0)

        def by_side(pair: Tensor) -> list[Tensor]:
            """Turn values of the two teams [B, 2] into those of the own team [B, U] and of the other team [B, U]."""
            return [torch.where(first, pair[:, :1], pair[:, 1:]), torch.where(first, pair[:, 1:], pair[:, :1])]

        holder = torch.stack((contest.holder == 0, contest.holder == 1), 1).float()
        left = 1.0 - contest.decision / self.config.decisions
        singles = [
            units.hit_points / table.hit_points,
            units.legs / table.legs,
            units.heat / table.heat_cap,
            units.stability / PHYSICS.stability,
            units.fuel / PHYSICS.fuel_s * (table.jets > 0),
            cos * sides,
            sin * sides,
            x * sides / half,
            y * sides / half,
            z / 10.0,
            (z - read(world.floor, column)) / 10.0,
            (velocity_x * cos + velocity_y * sin) / 10.0,
            (velocity_y * cos - velocity_x * sin) / 10.0,
            velocity_z / 10.0,
            units.is_grounded.float(),
            units.is_shut_down.float(),
            units.is_venting.float(),
            units.fallen / _FALLEN,
            units.suppressed / _SUPPRESSION,
            units.painted / _PAINT,
        ]
        weapons = [self.weapons.expand(battles, -1, -1), units.cooldown / self.tables.weapons.cooldown]
        rest = [
            (-x * cos - y * sin) / half,
            (x * sin - y * cos) / half,
            edge / half,
            (edge <= 0).float(),
            step[..., 0] * cos + step[..., 1] * sin,
            step[..., 1] * cos - step[..., 0] * sin,
            reach / self.config.size,
            (world.zone_radius / 10.0).unsqueeze(1).expand(-1, count),
            *by_side(holder),
            *by_side(contest.score / (self.config.seconds * PHYSICS.win_share)),
            left.unsqueeze(1).expand(-1, count),
            *by_side(living),
        ]
        return torch.cat((self.identity.expand(battles, -1, -1), torch.stack(singles, -1), *weapons, torch.stack(rest, -1)), -1)

    def _others(self, state: State, index: Tensor, cos: Tensor, sin: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return what each unit observes of the units `index` [B, U, N]: place and nearness, then class, condition and heading."""
        units, table = state.units, self.tables.units
        battles = len(index)
        gathered = torch.cat(
            (
                units.position,
                units.heading.cos().unsqueeze(-1),
                units.heading.sin().unsqueeze(-1),
                (units.hit_points / table.hit_points).unsqueeze(-1),
                (units.heat / table.heat_cap).unsqueeze(-1),
                self.kinds.expand(battles, -1, -1),
            ),
            -1,
        )
        theirs = unit_at(gathered, index)  # [B, U, N, 7 + classes]
        line = theirs[..., :3] - units.position.unsqueeze(2)
        ahead, left = _turned(line[..., 0], line[..., 1], cos, sin)
        nose_ahead, nose_left = _turned(theirs[..., 3], theirs[..., 4], cos, sin)
        distance = torch.linalg.vector_norm(line, dim=-1)
        place = [ahead / 20.0, left / 20.0, line[..., 2] / 20.0, 1.0 / (1.0 + distance / 5.0)]
        condition = [*theirs[..., 7:].unbind(-1), theirs[..., 5], theirs[..., 6], nose_ahead, nose_left]
        return place, condition

    def _contacts(self, state: State, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the contacts [B, U, C, fields]; zeros in empty slots."""
        units, senses = state.units, state.senses
        place, condition = self._others(state, senses.contacts, cos, sin)
        flat = (place[0].square() + place[1].square()).sqrt().clamp_min(1e-6)
        velocity = unit_at(units.velocity[..., :2], senses.contacts) / 10.0
        velocity_ahead, velocity_left = _turned(velocity[..., 0], velocity[..., 1], cos, sin)
        is_helpless = ((units.fallen > 0) | units.is_shut_down).float()
        fields = [
            torch.ones_like(flat),
            senses.seen.gather(2, senses.contacts).float(),
            *place,
            place[0] / flat,
            place[1] / flat,
            velocity_ahead,
            velocity_left,
            *condition,
            unit_at(is_helpless, senses.contacts),
            unit_at((units.painted > 0).float(), senses.contacts),
        ]
        return torch.stack(fields, -1) * senses.is_contact.unsqueeze(-1)

    def _allies(self, state: State, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the allies [B, U, A, fields], nearest first; zeros in empty slots."""
        units, wanted = state.units, self.config.allies
        there = self.tables.units.is_ally & units.is_alive.unsqueeze(1)
        apart = units.position.unsqueeze(2) - units.position.unsqueeze(1)
        away = torch.where(there, apart.square().sum(-1), torch.inf)
        order, is_there = nearest_first(away, slots=wanted, of_others=False)
        place, condition = self._others(state, order, cos, sin)
        return torch.stack([torch.ones_like(place[0]), *place, *condition], -1) * is_there.unsqueeze(-1)

    def _terrain(self, state: State, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the terrain view [B, U, V, fields]: rows of cells from behind to ahead, each row from right to left."""
        units, world = state.units, state.world
        x = units.position[..., 0:1] + self.view_ahead * cos.unsqueeze(-1) - self.view_left * sin.unsqueeze(-1)
        y = units.position[..., 1:2] + self.view_ahead * sin.unsqueeze(-1) + self.view_left * cos.unsqueeze(-1)
        column = columns(x, y, self.config.size)
        feet = units.position[..., 2:3]
        rise = ((read(world.floor, column) - feet) / 4.0).clamp(-1.0, 1.0)
        cover = ((read(world.tops, column) - feet) / 4.0).clamp(0.0, 1.0)
        material = self.materials[read(world.material, column).long()]
        return torch.stack((rise, cover, material), -1)

    def whole_battle(self, state: State) -> Tensor:
        """Return the view for a centralised critic [B, U, state width]: every unit, own team first, in the own team's world frame."""
        units, table = state.units, self.tables.units
        battles, count = units.heat.shape
        half = self.config.size / 2
        each = torch.stack(
            (
                units.is_alive.float(),
                units.position[..., 0] / half,
                units.position[..., 1] / half,
                units.position[..., 2] / 10.0,
                units.hit_points / table.hit_points,
                units.heat / table.heat_cap,
                ((units.fallen > 0) | units.is_shut_down).float(),
            ),
            -1,
        )  # [B, U, fields]
        assert each.shape[-1] == width(STATE_UNIT)
        views = each[:, self.team_order]  # [B, U, U, fields]
        turned = self.sides.view(1, count, 1, 1)
        views = torch.cat((views[..., :1], views[..., 1:3] * turned, views[..., 3:]), -1)
        return views.reshape(battles, count, -1)


def _turned(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return vectors [B, U, N] in the frames of the units, as (ahead, left)."""
    cos, sin = cos.unsqueeze(-1), sin.unsqueeze(-1)
    return x * cos + y * sin, y * cos - x * sin
