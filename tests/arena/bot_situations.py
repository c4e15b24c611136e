"""Hand-made situations in which bots act. `test_bot_situations.py` says what they must do.

All situations are on a flat map without a route, so that no bot goes to the zone. Units of the first team are 0 and 1, a medium and a light
one; those of the second team are 2 and 3.
"""

from __future__ import annotations

from typing import Any

import torch

from esper.arena.arena import Arena
from esper.arena.config import BOTS, ArenaConfig
from esper.arena.native import layout as at
from esper.arena.orders import FIRE
from esper.arena.routes import ARRIVED
from esper.arena.specs import Material
from esper.arena.start import Grids

SIZE = 32
SECONDS = range(16, 24)  # in which bots with coins are watched
MEDIUM, LIGHT, ENEMY_MEDIUM, ENEMY_LIGHT = range(4)
Place = tuple[float, float]


class Situation:
    """Two battles of two against two on the same map, with the same seed. Units without a place are dead."""

    def __init__(self, places: dict[int, Place], *, wall: tuple[slice, slice] | None = None, way: int = ARRIVED) -> None:
        grid, material = torch.zeros(1, SIZE, SIZE), torch.full((1, SIZE, SIZE), int(Material.OPEN), dtype=torch.int8)
        if wall is not None:
            grid[0][wall], material[0][wall] = 3.0, int(Material.REINFORCED)
        grids = Grids(grid, material, torch.tensor([5.0]), torch.full_like(material, way), torch.zeros_like(grid))
        self.arena = Arena(ArenaConfig(battles=2, team_size=2, size=SIZE, maps=1), grids=grids)
        self.state, self.actions = self.arena.simulation.state, self.arena.simulation.actions
        self.state["seed"][:] = 0
        unit = self.state["unit"]
        unit[at.COS], unit[at.SIN] = 1.0, 0.0
        for u in range(4):
            unit[at.X, :, u], unit[at.Y, :, u] = places.get(u, (0.0, 0.0))
            if u not in places:
                unit[at.HIT_POINTS, :, u] = 0.0

    def act(self, first: list[int], second: list[int] | None = None) -> None:
        """Let the units sense, and bots choose actions. `first` and `second` are the bots of the teams, by battle."""
        self.arena.look()
        self.arena.simulation.act(torch.tensor([first, second or [-1, -1]], dtype=torch.int32))

    def chosen(self, name: str, u: int) -> dict[str, Any]:
        """Return the actions of a unit of the first team in the first battle."""
        self.act([BOTS.index(name)] * 2)
        slot, motion = int(self.actions["target"][u]), self.actions["motion"][u]
        return {
            "fire": FIRE[int(self.actions["fire"][u])],
            "target": int(self.state["contact"][slot, 0, u]),
            "vent": int(self.actions["vent"][u]),
            "forward": float(motion[0]),
            "strafe": float(motion[1]),
            "yaw": float(motion[2]),
            "jets": float(motion[3]),
        }


def situations() -> dict[str, Any]:
    """Return the actions in every situation, by its name."""
    found: dict[str, Any] = {}
    weak, strong, frozen = (BOTS.index(name) for name in ("weak", "strong", "strong-v1"))

    both = Situation({MEDIUM: (-5.0, 0.0), LIGHT: (-6.0, 4.0), ENEMY_MEDIUM: (1.0, 1.0), ENEMY_LIGHT: (2.0, -3.0)})
    both.actions["fire"][:] = 7
    both.act([strong, -1], [-1, weak])
    found["changed by battle and team"] = (both.actions["fire"] != 7).reshape(2, 2, 2).tolist()
    both.act([strong, frozen], [frozen, strong])
    found["strong and strong-v1 by battle"] = [part.reshape(2, 4, -1).tolist() for part in both.actions.values()]

    # The coins of a bot are drawn from the decision, so it stands in some seconds and walks in others.
    for name in ("weak", "middle"):
        walks = []
        for second in SECONDS:
            both.state["status"][at.DECISION] = 4 * second
            orders = both.chosen(name, MEDIUM)
            walks.append(abs(orders["forward"]) + abs(orders["strafe"]) > 0.1)
        found[f"{name} walks"] = walks

    # One of two enemies in reach is nearly dead.
    for u in (ENEMY_MEDIUM, ENEMY_LIGHT):
        one = Situation({MEDIUM: (-3.0, 0.0), ENEMY_MEDIUM: (2.0, 1.0), ENEMY_LIGHT: (2.5, -1.0)})
        one.state["unit"][at.HIT_POINTS, :, u] = 5.0
        found[f"expert, {u} is nearly dead"] = one.chosen("expert", MEDIUM)

    # An ally stands between the unit and its only enemy, or beside the line.
    for name, y in (("ally in the line of fire", 0.0), ("ally beside the line of fire", 3.0)):
        one = Situation({MEDIUM: (-5.0, 0.0), LIGHT: (0.0, y), ENEMY_MEDIUM: (5.0, 0.0)})
        found[f"expert, {name}"] = one.chosen("expert", MEDIUM)

    # No weapon is loaded, and the unit is warm.
    for name in ("strong", "expert"):
        one = Situation({MEDIUM: (-3.0, 0.0), ENEMY_MEDIUM: (3.0, 0.0)})
        one.state["cooldown"][:] = 20
        one.state["unit"][at.HEAT, :, MEDIUM] = 50.0
        found[f"{name}, no weapon loaded"] = one.chosen(name, MEDIUM)

    # A light unit, whole or hurt, whose enemy sees it.
    for name, points in (("whole", 80.0), ("hurt", 10.0)):
        one = Situation({LIGHT: (-5.0, 0.0), ENEMY_MEDIUM: (5.0, 0.0)})
        one.state["unit"][at.HIT_POINTS, :, LIGHT] = points
        found[f"expert, {name}"] = one.chosen("expert", LIGHT)

    # A wall, or none, between a light unit and its enemy, 14 m away.
    wall = (slice(SIZE // 2 - 6, SIZE // 2 - 4), slice(0, SIZE))
    for name, part in (("wall", wall), ("no wall", None)):
        one = Situation({LIGHT: (-7.0, 0.5), ENEMY_MEDIUM: (7.0, 0.5)}, wall=part)
        for bot in ("strong", "expert"):
            found[f"{bot}, {name}"] = one.chosen(bot, LIGHT)

    # No contacts; the route leads along the x axis. The ally is beside the unit or far behind.
    for name, x in (("ally beside", -10.0), ("ally far behind", -15.0)):
        one = Situation({LIGHT: (-2.0 if x < -12.0 else -10.0, 0.0), MEDIUM: (x, 3.0)}, way=0)
        found[f"expert, {name}"] = one.chosen("expert", LIGHT)

    # An enemy that is not sensed, 14.5 m away behind a wall, changes.
    acts = []
    for x, points in ((14.5, 150.0), (15.2, 3.0)):
        one = Situation({MEDIUM: (-6.0, 0.0), LIGHT: (-14.0, 8.0), ENEMY_MEDIUM: (x, 0.0), ENEMY_LIGHT: (2.0, 9.0)}, wall=wall)
        one.state["unit"][at.HIT_POINTS, :, ENEMY_MEDIUM] = points
        acts.append(one.chosen("expert", MEDIUM))
        assert one.state["number"][at.SENSED, 0, MEDIUM] == 2, "the test needs a hidden and a sensed enemy"
    found["expert, hidden enemy changes"] = acts
    return found
