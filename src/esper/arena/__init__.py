"""Batched team battles: B battles × U units as one tensor program.

Names are imported when they are first used: `from esper.arena.config import ArenaConfig` does not wait for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from esper.lazy import names_of

if TYPE_CHECKING:
    from esper.arena.arena import Arena, Scene
    from esper.arena.bots import BOTS, Bot
    from esper.arena.config import ArenaConfig, RewardConfig
    from esper.arena.env import ArenaEnv
    from esper.arena.replay import Recorder, verify

_MODULES = {
    "BOTS": "bots",
    "Arena": "arena",
    "ArenaConfig": "config",
    "ArenaEnv": "env",
    "Bot": "bots",
    "Recorder": "replay",
    "RewardConfig": "config",
    "Scene": "arena",
    "verify": "replay",
}

__all__ = ["BOTS", "Arena", "ArenaConfig", "ArenaEnv", "Bot", "Recorder", "RewardConfig", "Scene", "verify"]


__getattr__, __dir__ = names_of(__name__, _MODULES)
