"""Batched team battles: many battles at once, by rules that Numba compiles.

Names are imported on first use, so `from esper.arena.config import ArenaConfig` does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from esper.lazy import lazy_names

if TYPE_CHECKING:
    from esper.arena.arena import Arena as Arena, StepResult as StepResult
    from esper.arena.bots import Bot as Bot
    from esper.arena.config import BOTS as BOTS, ArenaConfig as ArenaConfig, ArenaRewardConfig as ArenaRewardConfig
    from esper.arena.env import ArenaEnv as ArenaEnv
    from esper.arena.gymnasium_vector import ArenaVectorEnv as ArenaVectorEnv
    from esper.arena.pettingzoo import parallel_env as parallel_env
    from esper.arena.recorder import Recorder as Recorder
    from esper.arena.replay import verify as verify
    from esper.arena.scenarios import SCENARIOS as SCENARIOS, Scenario as Scenario, find_scenario as find_scenario

__getattr__, __dir__, __all__ = lazy_names(__name__)
