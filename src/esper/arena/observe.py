"""Observations of units: one table of names, widths, meanings and formulas, and the code that fills an observation from it.

Directions are in the unit's own frame: ahead is x, left is y. Positions in the world frame are turned by half a turn for the second team,
so that both sides observe the same. Widths, slices, the order of the numbers and the tables of docs/arena_rules.md all come from here.

Each part of the observation (`parts`) has a table of fields. Values that several fields need are computed once, as a view (`OwnView`,
`OtherView`, `TerrainView`), and the formula of a field computes its numbers from the view. `fill` joins them in the order of the table.

Shapes: B = battles, U = units, N = observed others of a unit (contacts or allies), V = cells of the terrain view, W = kinds of weapons.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from esper.arena.config import ArenaConfig, ticks
from esper.arena.map_columns import columns, read, unit_at
from esper.arena.routes import STEPS
from esper.arena.sensing import nearest_first
from esper.arena.specs import CLASSES, PHYSICS, ROLES, WEAPONS, Material
from esper.arena.state import BattleStatus, State, Units, World
from esper.arena.tables import Tables, UnitTable

VIEW = 11  # cells on a side of the terrain that a unit observes around itself
CELL_M = 1.5  # distance between those cells

MATERIAL_SIGNALS = {
    Material.OPEN: 0.0,
    Material.SOLID: 0.5,
    Material.REINFORCED: 0.75,
    Material.GLASS: 0.25,
    Material.WATER: -0.75,
    Material.LAVA: 1.0,
    Material.FOLIAGE: -0.25,
}  # one number for each material; those that matter most for walking are far apart

_PAINT = ticks(max(weapon.paints_s for weapon in WEAPONS.values()))
_SUPPRESSION = ticks(max(weapon.suppresses_s for weapon in WEAPONS.values()))
_FALLEN = ticks(PHYSICS.fallen_s)

View = TypeVar("View")


class Field(NamedTuple, Generic[View]):
    """A named group of numbers in an observation."""

    name: str
    width: int
    meaning: str
    formula: Callable[[View], Tensor | Sequence[Tensor]]  # the numbers; one tensor where the width is 1


def width(fields: tuple[Field[Any], ...]) -> int:
    """Return how many numbers all fields have together."""
    return sum(field.width for field in fields)


def slices(fields: tuple[Field[Any], ...]) -> dict[str, slice]:
    """Return the slice of each field in its part."""
    found, start = {}, 0
    for field in fields:
        found[field.name] = slice(start, start + field.width)
        start += field.width
    return found


def fill(fields: tuple[Field[View], ...], view: View) -> Tensor:
    """Return the numbers of all fields [..., width], in the order of the table."""
    numbers: list[Tensor] = []
    for field in fields:
        values = field.formula(view)
        group = (values,) if isinstance(values, Tensor) else values
        assert len(group) == field.width, f"{field.name} has {len(group)} numbers; its width is {field.width}"
        numbers += group
    return torch.stack(numbers, -1)


# The unit itself


class OwnView(NamedTuple):
    """Values that the fields of `OWN` are computed from, [B, U] unless stated."""

    units: Units
    world: World
    status: BattleStatus
    table: UnitTable
    config: ArenaConfig
    half: float  # half a side of the map, in metres
    sides: Tensor  # [U] 1 for the first team, -1 for the second: turns its world by half a turn
    classes: Tensor  # [B, U, classes] one-hot
    roles: Tensor  # [B, U, roles] one-hot
    has_weapon: Tensor  # [B, U, W]
    loading: Tensor  # [B, U, W] share of the cooldown that is left
    cos: Tensor  # of the heading
    sin: Tensor
    x: Tensor
    y: Tensor
    z: Tensor
    velocity: tuple[Tensor, Tensor, Tensor]  # x, y, z
    ground: Tensor  # height of the ground below
    edge: Tensor  # distance to the edge of the zone; negative inside
    step: tuple[Tensor, Tensor]  # x and y of the next step of the route to the zone
    route_m: Tensor  # length of that route

    def by_side(self, pair: Tensor) -> tuple[Tensor, Tensor]:
        """Turn values of the two teams [B, 2] into those of the own team [B, U] and of the other team [B, U]."""
        is_first = (self.table.team == 0).unsqueeze(0)
        return torch.where(is_first, pair[:, :1], pair[:, 1:]), torch.where(is_first, pair[:, 1:], pair[:, :1])

    def for_all(self, value: Tensor) -> Tensor:
        """Give the value of a battle [B] to all its units."""
        return value.unsqueeze(1).expand(-1, self.cos.shape[1])


OWN: tuple[Field[OwnView], ...] = (
    Field("class", len(CLASSES), "one-hot: " + ", ".join(CLASSES), lambda own: own.classes.unbind(-1)),
    Field("role", len(ROLES), "one-hot: " + ", ".join(ROLES), lambda own: own.roles.unbind(-1)),
    Field("hit_points", 1, "share of the class's", lambda own: own.units.hit_points / own.table.hit_points),
    Field("legs", 1, "share of the class's", lambda own: own.units.legs / own.table.legs),
    Field("heat", 1, "share of the class's cap; above 1 it is shut down", lambda own: own.units.heat / own.table.heat_cap),
    Field("stability", 1, "share of 100", lambda own: own.units.stability / PHYSICS.stability),
    Field("fuel", 1, "share of the tank; 0 without jets", lambda own: own.units.fuel / PHYSICS.fuel_s * (own.table.jets > 0)),
    Field("heading", 2, "cosine and sine, in the team's world frame", lambda own: (own.cos * own.sides, own.sin * own.sides)),
    Field(
        "position",
        2,
        "x and y in half map sides, in the team's world frame",
        lambda own: (own.x * own.sides / own.half, own.y * own.sides / own.half),
    ),
    Field(
        "height",
        2,
        "height of the feet above the lowest ground, and above the ground below, in 10 m",
        lambda own: (own.z / 10.0, (own.z - own.ground) / 10.0),
    ),
    Field(
        "velocity",
        3,
        "ahead, left and up, in 10 m/s",
        lambda own: (*(part / 10.0 for part in _turned(*own.velocity[:2], own.cos, own.sin)), own.velocity[2] / 10.0),
    ),
    Field("is_grounded", 1, "0 or 1", lambda own: own.units.is_grounded.float()),
    Field("is_shut_down", 1, "0 or 1", lambda own: own.units.is_shut_down.float()),
    Field("is_venting", 1, "0 or 1", lambda own: own.units.is_venting.float()),
    Field("fallen", 1, "share of the 3 s that are left", lambda own: own.units.fallen / _FALLEN),
    Field("suppressed", 1, "share of the 1.2 s that are left", lambda own: own.units.suppressed / _SUPPRESSION),
    Field("painted", 1, "share of the 5 s that are left", lambda own: own.units.painted / _PAINT),
    Field("has_weapon", len(WEAPONS), "0 or 1: " + ", ".join(WEAPONS), lambda own: own.has_weapon.unbind(-1)),
    Field("loading", len(WEAPONS), "share of the cooldown that is left", lambda own: own.loading.unbind(-1)),
    Field(
        "zone",
        4,
        "its centre ahead and left, and the distance to its edge, in half map sides; 1 inside, else 0",
        lambda own: (
            (-own.x * own.cos - own.y * own.sin) / own.half,
            (own.x * own.sin - own.y * own.cos) / own.half,
            own.edge / own.half,
            (own.edge <= 0).float(),
        ),
    ),
    Field(
        "route",
        3,
        "next step of the route to the zone, ahead and left, and the length of the route in map sides",
        lambda own: (*_turned(*own.step, own.cos, own.sin), own.route_m / own.config.size),
    ),
    Field("zone_radius", 1, "in 10 m", lambda own: own.for_all(own.world.zone_radius / 10.0)),
    Field(
        "zone_holder",
        2,
        "0 or 1: held by the own team, by the other",
        lambda own: own.by_side(torch.stack((own.status.holder == 0, own.status.holder == 1), 1).float()),
    ),
    Field(
        "score",
        2,
        "of the own team and of the other, as a share of the score that wins",
        lambda own: own.by_side(own.status.score / (own.config.seconds * PHYSICS.win_share)),
    ),
    Field("clock", 1, "share of the battle's time that is left", lambda own: own.for_all(1.0 - own.status.decision / own.config.decisions)),
    Field(
        "living",
        2,
        "share of living units in the own team and in the other",
        lambda own: own.by_side(own.units.is_alive.view(len(own.cos), 2, -1).float().mean(2)),
    ),
)


# Other units


class OtherView(NamedTuple):
    """Values that the fields of `ALLY` and `CONTACT` are computed from: other units as a unit observes them, [B, U, N] unless stated."""

    state: State
    others: Tensor  # their indices among the units
    cos: Tensor  # [B, U, 1] of the observer's heading
    sin: Tensor  # [B, U, 1]
    ahead: Tensor  # from the observer to the other, in metres
    left: Tensor
    up: Tensor
    distance: Tensor
    classes: Tensor  # [B, U, N, classes] one-hot
    hit_points: Tensor  # share of the class's
    heat: Tensor  # share of the class's cap
    nose: tuple[Tensor, Tensor]  # x and y of the direction that the other looks in, in the world frame


def _bearing(other: OtherView) -> tuple[Tensor, Tensor]:
    ahead, left = other.ahead / 20.0, other.left / 20.0
    flat = (ahead.square() + left.square()).sqrt().clamp_min(1e-6)
    return ahead / flat, left / flat


def _velocity(other: OtherView) -> tuple[Tensor, Tensor]:
    velocity = unit_at(other.state.units.velocity[..., :2], other.others) / 10.0
    return _turned(velocity[..., 0], velocity[..., 1], other.cos, other.sin)


def _is_helpless(units: Units) -> Tensor:
    return ((units.fallen > 0) | units.is_shut_down).float()


_IS_THERE: Field[OtherView] = Field("is_there", 1, "0 or 1; all else is 0 where it is 0", lambda other: torch.ones_like(other.ahead))
_PLACE: tuple[Field[OtherView], ...] = (
    Field("place", 3, "ahead, left and up, in 20 m", lambda other: (other.ahead / 20.0, other.left / 20.0, other.up / 20.0)),
    Field("nearness", 1, "1 / (1 + distance / 5 m)", lambda other: 1.0 / (1.0 + other.distance / 5.0)),
)
_CONDITION: tuple[Field[OtherView], ...] = (
    Field("class", len(CLASSES), "one-hot", lambda other: other.classes.unbind(-1)),
    Field("hit_points", 1, "share of the class's", lambda other: other.hit_points),
    Field("heat", 1, "share of the class's cap", lambda other: other.heat),
    Field("heading", 2, "cosine and sine of the difference to one's own", lambda other: _turned(*other.nose, other.cos, other.sin)),
)
ALLY: tuple[Field[OtherView], ...] = (_IS_THERE, *_PLACE, *_CONDITION)
CONTACT: tuple[Field[OtherView], ...] = (
    _IS_THERE,
    Field(
        "is_seen",
        1,
        "1 with a clear line of sight, 0 if only sensed",
        lambda other: other.state.senses.seen.gather(2, other.others).float(),
    ),
    *_PLACE,
    Field("bearing", 2, "cosine and sine", _bearing),
    Field("velocity", 2, "ahead and left, in 10 m/s", _velocity),
    *_CONDITION,
    Field("is_helpless", 1, "0 or 1: fallen or shut down", lambda other: unit_at(_is_helpless(other.state.units), other.others)),
    Field("is_painted", 1, "0 or 1", lambda other: unit_at((other.state.units.painted > 0).float(), other.others)),
)


# The terrain around the unit


class TerrainView(NamedTuple):
    """Values that the fields of `TERRAIN` are computed from, [B, U, V] unless stated."""

    floor: Tensor  # height that carries units
    tops: Tensor  # height that blocks sight
    signal: Tensor  # number of the material
    feet: Tensor  # [B, U, 1] height of the unit's feet


TERRAIN: tuple[Field[TerrainView], ...] = (
    Field(
        "rise",
        1,
        "height that carries units, above the feet, in 4 m, from -1 to 1",
        lambda cell: ((cell.floor - cell.feet) / 4.0).clamp(-1.0, 1.0),
    ),
    Field(
        "cover",
        1,
        "height that blocks sight, above the feet, in 4 m, from 0 to 1",
        lambda cell: ((cell.tops - cell.feet) / 4.0).clamp(0.0, 1.0),
    ),
    Field(
        "material",
        1,
        ", ".join(f"{signal:g} {material.name.lower()}" for material, signal in MATERIAL_SIGNALS.items()),
        lambda cell: cell.signal,
    ),
)


# The whole battle, for a centralised critic


class BattleView(NamedTuple):
    """Values that the fields of `STATE_UNIT` are computed from."""

    units: Units
    table: UnitTable
    half: float  # half a side of the map, in metres


STATE_UNIT: tuple[Field[BattleView], ...] = (
    Field("is_alive", 1, "0 or 1", lambda battle: battle.units.is_alive.float()),
    Field(
        "position",
        3,
        "in the team's world frame, half map sides; z in 10 m",  # `Observer.whole_battle` turns it into the team's frame
        lambda battle: (*(battle.units.position[..., axis] / battle.half for axis in (0, 1)), battle.units.position[..., 2] / 10.0),
    ),
    Field("hit_points", 1, "share of the class's", lambda battle: battle.units.hit_points / battle.table.hit_points),
    Field("heat", 1, "share of the class's cap", lambda battle: battle.units.heat / battle.table.heat_cap),
    Field("is_helpless", 1, "0 or 1: fallen or shut down", lambda battle: _is_helpless(battle.units)),
)


# The whole observation


class Part(NamedTuple):
    """A part of the observation vector: the same fields, repeated `times` times."""

    name: str
    fields: tuple[Field[Any], ...]
    times: int

    @property
    def width(self) -> int:
        return self.times * width(self.fields)


def parts(config: ArenaConfig) -> tuple[Part, ...]:
    """Return the parts of the observation vector, in order."""
    return (
        Part("own", OWN, 1),
        Part("contacts", CONTACT, config.contacts),
        Part("allies", ALLY, config.allies),
        Part("terrain", TERRAIN, VIEW * VIEW),
    )


def observation_width(config: ArenaConfig) -> int:
    return sum(part.width for part in parts(config))


def state_width(config: ArenaConfig) -> int:
    """Return the width of the view of the whole battle for a centralised critic: every unit, own team first."""
    return config.units * width(STATE_UNIT)


class Observer:
    """Computes the observations of all units. Holds the constant tensors for it."""

    def __init__(self, config: ArenaConfig, tables: Tables, device: torch.device) -> None:
        self.config, self.tables = config, tables
        self.half = config.size / 2
        count = config.units
        self.sides = torch.where(tables.units.team == 0, 1.0, -1.0)  # [U] factor that turns the second team's world by half a turn
        self.classes = torch.nn.functional.one_hot(tables.units.kind, len(CLASSES)).float()  # [U, classes]
        self.roles = torch.nn.functional.one_hot(tables.units.role, len(ROLES)).float()  # [U, roles]
        self.weapons = tables.units.has_weapon.float()
        self.materials = torch.tensor([MATERIAL_SIGNALS[material] for material in Material], device=device)
        offsets = (torch.arange(VIEW, device=device) - (VIEW - 1) / 2) * CELL_M
        self.view_ahead, self.view_left = (grid.flatten() for grid in torch.meshgrid(offsets, offsets, indexing="ij"))  # [V] each
        directions = torch.tensor([*STEPS, (0, 0)], dtype=torch.float32, device=device)
        self.directions = torch.nn.functional.normalize(directions, dim=1)  # [9, 2]
        own, other = torch.arange(count, device=device), torch.arange(count, device=device).roll(config.team_size)
        self.team_order = torch.where((tables.units.team == 0).unsqueeze(1), own, other)  # [U, U] all units, own team first
        # [U, 1, state width] factors that turn x and y of the whole battle into the frame of each unit's team.
        first = slices(STATE_UNIT)["position"].start
        self.turns = torch.ones(count, 1, width(STATE_UNIT), device=device)
        self.turns[..., first : first + 2] = self.sides.view(count, 1, 1)

    def observe(self, state: State) -> Tensor:
        """Return the observations [B, U, width]. Rows of dead units are computed too, but not used."""
        cos, sin = state.units.heading.cos(), state.units.heading.sin()
        pieces = {
            "own": self._own(state, cos, sin),
            "contacts": self._contacts(state, cos, sin).flatten(2),
            "allies": self._allies(state, cos, sin).flatten(2),
            "terrain": self._terrain(state, cos, sin).flatten(2),
        }
        return torch.cat([pieces[part.name] for part in parts(self.config)], -1)

    def _own(self, state: State, cos: Tensor, sin: Tensor) -> Tensor:
        units, world = state.units, state.world
        battles = len(cos)
        x, y, z = units.position.unbind(-1)
        velocity_x, velocity_y, velocity_z = units.velocity.unbind(-1)
        column = columns(x, y, self.config.size)
        step = self.directions[read(world.way, column).long()]  # [B, U, 2]
        view = OwnView(
            units=units,
            world=world,
            status=state.status,
            table=self.tables.units,
            config=self.config,
            half=self.half,
            sides=self.sides,
            classes=self.classes.expand(battles, -1, -1),
            roles=self.roles.expand(battles, -1, -1),
            has_weapon=self.weapons.expand(battles, -1, -1),
            loading=units.cooldown / self.tables.weapons.cooldown,
            cos=cos,
            sin=sin,
            x=x,
            y=y,
            z=z,
            velocity=(velocity_x, velocity_y, velocity_z),
            ground=read(world.floor, column),
            edge=(x.square() + y.square()).sqrt() - world.zone_radius.unsqueeze(1),
            step=(step[..., 0], step[..., 1]),
            route_m=read(world.route_m, column).clamp_max(4.0 * self.config.size),
        )
        return fill(OWN, view)

    def _view(self, state: State, others: Tensor, cos: Tensor, sin: Tensor) -> OtherView:
        """Return the view that each unit has of the units `others` [B, U, N]. `cos` and `sin` [B, U] are of all headings."""
        units, table = state.units, self.tables.units
        # Gather all values of the others at once: position, four single numbers, class.
        singles = torch.stack((cos, sin, units.hit_points / table.hit_points, units.heat / table.heat_cap), -1)
        gathered = unit_at(torch.cat((units.position, singles, self.classes.expand(len(others), -1, -1)), -1), others)
        position, singles, classes = torch.split(gathered, [3, 4, len(CLASSES)], -1)
        nose_x, nose_y, hit_points, heat = singles.unbind(-1)

        cos, sin = cos.unsqueeze(-1), sin.unsqueeze(-1)
        line = position - units.position.unsqueeze(2)
        ahead, left = _turned(line[..., 0], line[..., 1], cos, sin)
        distance = torch.linalg.vector_norm(line, dim=-1)
        return OtherView(state, others, cos, sin, ahead, left, line[..., 2], distance, classes, hit_points, heat, (nose_x, nose_y))

    def _contacts(self, state: State, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the contacts [B, U, N, fields]; zeros in empty slots."""
        view = self._view(state, state.senses.contacts, cos, sin)
        return fill(CONTACT, view) * state.senses.is_contact.unsqueeze(-1)

    def _allies(self, state: State, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the allies [B, U, N, fields], nearest first; zeros in empty slots."""
        units = state.units
        there = self.tables.units.is_ally & units.is_alive.unsqueeze(1)
        apart = units.position.unsqueeze(2) - units.position.unsqueeze(1)
        away = torch.where(there, apart.square().sum(-1), torch.inf)
        order, is_there = nearest_first(away, slots=self.config.allies, of_others=False)
        return fill(ALLY, self._view(state, order, cos, sin)) * is_there.unsqueeze(-1)

    def _terrain(self, state: State, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the terrain view [B, U, V, fields]: rows of cells from behind to ahead, each row from right to left."""
        units, world = state.units, state.world
        x = units.position[..., 0:1] + self.view_ahead * cos.unsqueeze(-1) - self.view_left * sin.unsqueeze(-1)
        y = units.position[..., 1:2] + self.view_ahead * sin.unsqueeze(-1) + self.view_left * cos.unsqueeze(-1)
        column = columns(x, y, self.config.size)
        view = TerrainView(
            floor=read(world.floor, column),
            tops=read(world.tops, column),
            signal=self.materials[read(world.material, column).long()],
            feet=units.position[..., 2:3],
        )
        return fill(TERRAIN, view)

    def whole_battle(self, state: State) -> Tensor:
        """Return the view for a centralised critic [B, U, state width]: every unit, own team first, in the own team's world frame."""
        each = fill(STATE_UNIT, BattleView(state.units, self.tables.units, self.half))  # [B, U, fields]
        views = each[:, self.team_order] * self.turns  # [B, U, U, fields]
        return views.flatten(2)


def _turned(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return vectors in the frames of units whose headings have this cosine and sine, as (ahead, left)."""
    return x * cos + y * sin, y * cos - x * sin
