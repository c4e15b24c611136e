"""A staged battle for tests of replays and their page: two teams walk to the centre, shoot, fall and die by a simple plan."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from esper.replay_file import UNIT_COLUMNS, FeedItem, ReplayInfo, StateHash

WON = Path(__file__).parents[1] / "docs" / "arena_won.safetensors"  # a battle that was fought and recorded
WEAPONS = ["laser", "flamer", "missile", "gauss", "autocannon", "painter", "smoke"]
CLASSES = {
    "scout": {"hit_points": 60.0, "legs": 30.0, "heat_cap": 75.0, "tons": 20.0},
    "light": {"hit_points": 80.0, "legs": 40.0, "heat_cap": 80.0, "tons": 35.0},
    "medium": {"hit_points": 150.0, "legs": 75.0, "heat_cap": 100.0, "tons": 55.0},
    "heavy": {"hit_points": 200.0, "legs": 100.0, "heat_cap": 130.0, "tons": 85.0},
}
PACK = ("medium", "light", "heavy", "scout", "medium")
OPEN, SOLID, REINFORCED, GLASS, WATER, LAVA, FOLIAGE = range(7)
COLUMN = {name: index for index, name in enumerate(UNIT_COLUMNS)}
PROJECTILES = 4  # places of one unit
DECISION_S = 0.25


def staged_battle(*, team_size: int = 5, size: int = 64, frames: int = 120) -> tuple[dict[str, Tensor], ReplayInfo]:
    """Tensors and info of a replay. The last unit of the second team is killed halfway by the first unit of the first."""
    units = 2 * team_size
    classes = [PACK[index % len(PACK)] for index in range(team_size)] * 2
    height, material = staged_terrain(size)
    state = _units(classes, frames, size)
    dies_at = frames // 2
    state[dies_at:, units - 1, COLUMN["hit_points"]] = 0.0
    shots = torch.full((frames, units, 2), -1, dtype=torch.int8)
    for unit in range(units):
        shots[2 + unit % 5 :: 5, unit] = torch.tensor([unit % len(WEAPONS), (unit + team_size) % units], dtype=torch.int8)
    shots[dies_at:, units - 1] = -1
    holder = torch.full((frames,), -1, dtype=torch.int8)
    holder[frames // 4 :], holder[frames // 2 :] = 1, 0
    held = torch.stack([holder == 0, holder == 1], dim=-1).float() * DECISION_S
    tensors = {
        "terrain/height": height,
        "terrain/material": material,
        "terrain/changes": torch.tensor([[frames // 3, size // 2 + 8, size // 2 + 2]], dtype=torch.int32),
        "frames/units": state,
        "frames/projectiles": _projectiles(state, shots),
        "frames/clouds": _clouds(state),
        "frames/shots": shots,
        "frames/sensed": _sensed(state, team_size),
        "frames/score": held.cumsum(0),
        "frames/holder": holder,
        **_actions(state, shots),
        "keyframes/at": torch.tensor([0, dies_at]),
        "keyframes/units/heat": state[[0, dies_at], :, COLUMN["heat"]],
    }
    feed = [
        FeedItem(frame=frames // 4, kind="zone", text="red takes the zone"),
        FeedItem(frame=frames // 3, kind="fall", unit=1, text="light 2 of blue falls"),
        FeedItem(frame=frames // 2, kind="kill", by=0, unit=units - 1, text="medium 1 of blue destroys medium 5 of red"),
        FeedItem(frame=frames - 1, kind="end", text="blue wins by time"),
    ]
    info = ReplayInfo(
        rules_version=1,
        seed=7,
        device="cpu",
        decision_s=DECISION_S,
        seconds=125.0,
        zone_radius=size / 8,
        teams=("blue", "red"),
        size=size,
        unit_classes=classes,
        class_table=CLASSES,
        weapons=WEAPONS,
        feed=feed,
        winner=0,
        hashes=[StateHash(frame=0, sha256="0" * 64)],
        score_to_win=62.5,
    )
    return tensors, info


def staged_terrain(size: int) -> tuple[Tensor, Tensor]:
    """Every material, mirrored by a half turn."""
    place = torch.arange(size) + 0.5 - size / 2
    x, y = torch.meshgrid(place, place, indexing="ij")
    unit = size / 64
    height = (3.0 * torch.sin(x / (7 * unit)) * torch.cos(y / (9 * unit))).abs().floor() * (x.abs() + y.abs() > 20 * unit)
    material = torch.full((size, size), OPEN, dtype=torch.int8)

    def paint(where: Tensor, what: int, top: float | Tensor) -> None:
        both = where | where.flip(0, 1)
        material[both] = what
        height[both] = torch.as_tensor(top).expand(size, size)[both]

    corner = (x + y).abs() > 44 * unit
    paint((x.remainder(9 * unit) < 4 * unit) & (y.remainder(11 * unit) < 5 * unit) & (x < -4 * unit) & (y > 3 * unit), SOLID, 4.0)
    paint(((x + 10 * unit).abs() < 2 * unit) & ((y + 12 * unit).abs() < 6 * unit), REINFORCED, 5.0)
    paint(((x - 9 * unit).abs() < 1.5 * unit) & ((y - 3 * unit).abs() < 2 * unit), GLASS, 2.0)
    paint((x - y / 2 - 20 * unit).abs() < 2.5 * unit, WATER, 0.0)
    paint((x + 20 * unit) ** 2 + (y + 4 * unit) ** 2 < (3 * unit) ** 2, LAVA, 0.0)
    paint(((x + 4 * unit) ** 2 + (y - 14 * unit) ** 2 < (5 * unit) ** 2) & ((x * 3 + y * 5).floor() % 3 < 2), FOLIAGE, 3.0)
    paint(corner & (x.abs() + y.abs() > 44 * unit), OPEN, 0.0)
    return height.float(), material


def _units(classes: list[str], frames: int, size: int) -> Tensor:
    """From the corners to the centre and around it; heat swings, hit points fall."""
    units, team_size = len(classes), len(classes) // 2
    state = torch.zeros(frames, units, len(UNIT_COLUMNS))
    time = torch.linspace(0, 1, frames)
    for unit in range(units):
        side, place = (-1.0 if unit < team_size else 1.0), (unit % team_size) - (team_size - 1) / 2
        spread = size / (2.4 * team_size)
        start = torch.tensor([side * size * 0.4 + place * spread * 0.5, side * size * 0.4 - place * spread * 0.5])
        angle = 4 * time + unit * 2 * math.pi / units
        ring = size / 8 * (1 + 0.4 * (unit % 3))
        goal = torch.stack([ring * angle.cos(), ring * angle.sin()], dim=-1)
        share = (time * 2.5).clamp(max=1)[:, None]
        state[:, unit, :2] = (1 - share) * start + share * goal
        step = state[1:, unit, :2] - state[:-1, unit, :2]
        state[1:, unit, COLUMN["heading"]] = torch.atan2(step[:, 1], step[:, 0])
        state[0, unit, COLUMN["heading"]] = state[1, unit, COLUMN["heading"]]
        table = CLASSES[classes[unit]]
        state[:, unit, COLUMN["hit_points"]] = table["hit_points"] * (1 - 0.6 * (time - 0.3).clamp(min=0))
        state[:, unit, COLUMN["legs"]] = table["legs"] * (1 - 0.3 * time)
        state[:, unit, COLUMN["heat"]] = table["heat_cap"] * (0.45 + 0.45 * torch.sin(9 * time + unit))
    state[..., COLUMN["stability"]] = 100.0
    state[..., COLUMN["fuel"]] = 1.5
    state[frames // 3 : frames // 3 + 12, 1, COLUMN["fallen"]] = 1.0
    state[frames // 3 : frames // 3 + 12, 1, COLUMN["stability"]] = 0.0
    state[frames // 3 : frames // 2, 2, COLUMN["shut_down"]] = 1.0
    state[frames // 4 : frames // 2, 0, COLUMN["venting"]] = 1.0
    state[frames // 4 : frames // 2, team_size, COLUMN["painted"]] = 1.0
    return state


def _projectiles(state: Tensor, shots: Tensor) -> Tensor:
    """Every shot of a weapon that flies takes four decisions to its target."""
    frames, units = shots.shape[:2]
    found = torch.zeros(frames, units * PROJECTILES, 5)
    for frame in range(frames):
        for unit in range(units):
            weapon, target = shots[frame, unit].tolist()
            if weapon not in (2, 3, 4):
                continue
            place, flight = unit * PROJECTILES + frame % PROJECTILES, min(4, frames - frame)
            share = torch.linspace(0, 0.9, 4)[:flight, None]
            ends = state[frame, [unit, target], :3] + torch.tensor([0.0, 0.0, 1.2])
            path = (1 - share) * ends[0] + share * ends[1]
            path[:, 2] += 3 * share[:, 0] * (1 - share[:, 0])
            found[frame : frame + flight, place] = torch.cat([torch.tensor([[1.0, weapon]]).expand(flight, 2), path], dim=-1)
    return found


def _clouds(state: Tensor) -> Tensor:
    frames, units = state.shape[:2]
    clouds = torch.zeros(frames, units, 4)
    first, last = frames // 3, frames // 3 + 40
    clouds[first:last, 0, :3] = state[first, 0, :3]
    clouds[first:last, 0, 3] = torch.linspace(10, 0.1, 40)[: len(clouds[first:last])]
    return clouds


def _sensed(state: Tensor, team_size: int) -> Tensor:
    position = state[..., :2]
    distance = (position[:, :, None] - position[:, None]).norm(dim=-1)
    sensed = (distance < 22).to(torch.uint8) + (distance < 12).to(torch.uint8)
    sensed[:, :team_size, :team_size] = 0
    sensed[:, team_size:, team_size:] = 0
    alive: Tensor = state[..., COLUMN["hit_points"]] > 0
    return sensed * alive[:, :, None] * alive[:, None]


def _actions(state: Tensor, shots: Tensor) -> dict[str, Tensor]:
    decisions, units = len(state) - 1, state.shape[1]
    motion = torch.zeros(decisions, units, 4)
    motion[..., 0] = 1.0
    motion[..., 1] = torch.linspace(-1, 1, units)
    motion[..., 2] = 0.5
    return {
        "actions/motion": motion,
        "actions/fire": (shots[1:, :, 0] + 1).to(torch.int8),
        "actions/target": shots[1:, :, 1].clone(),
        "actions/vent": state[1:, :, COLUMN["venting"]].to(torch.int8),
    }
