"""Growing any PyTorch model while it trains: slots, seeds, their lives, a governor and controllers.

Names are imported when they are first used, so that a command line can show its help at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from esper.lazy import names_of

if TYPE_CHECKING:
    from esper.growth.baked import load, save
    from esper.growth.blueprints import register_blueprint
    from esper.growth.config import GrowthConfig
    from esper.growth.controllers import Never, Planned, Random, Schedule
    from esper.growth.decisions import Controller, Decision
    from esper.growth.errors import GrowthError
    from esper.growth.governor import Diverged
    from esper.growth.grower import Grower
    from esper.growth.heuristic import Heuristic
    from esper.growth.result import Grown
    from esper.growth.slotted import Slotted, add_slots
    from esper.growth.state import GrowthState
    from esper.growth.training import grow

_MODULES = {
    "Controller": "decisions",
    "Decision": "decisions",
    "Diverged": "governor",
    "Grower": "grower",
    "Grown": "result",
    "GrowthConfig": "config",
    "GrowthError": "errors",
    "GrowthState": "state",
    "Heuristic": "heuristic",
    "Never": "controllers",
    "Planned": "controllers",
    "Random": "controllers",
    "Schedule": "controllers",
    "Slotted": "slotted",
    "add_slots": "slotted",
    "grow": "training",
    "load": "baked",
    "register_blueprint": "blueprints",
    "save": "baked",
}

__all__ = [
    "Controller", "Decision", "Diverged", "Grower", "Grown", "GrowthConfig", "GrowthError", "GrowthState", "Heuristic", "Never", "Planned",
    "Random", "Schedule", "Slotted", "add_slots", "grow", "load", "register_blueprint", "save",
]  # fmt: skip


__getattr__, __dir__ = names_of(__name__, _MODULES)
