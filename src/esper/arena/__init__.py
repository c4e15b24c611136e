"""Batched team battles: B battles of U units as one tensor program.

Names are imported on first use, so `from esper.arena.config import ArenaConfig` does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from esper.lazy import lazy_names

if TYPE_CHECKING:
    from esper.arena.arena import Arena as Arena, StepResult as StepResult
    from esper.arena.bots import BOTS as BOTS, Bot as Bot
    from esper.arena.config import ArenaConfig as ArenaConfig, ArenaRewardConfig as ArenaRewardConfig
    from esper.arena.env import ArenaEnv as ArenaEnv
    from esper.arena.pettingzoo import parallel_env as parallel_env
    from esper.arena.recorder import Recorder as Recorder
    from esper.arena.replay import verify as verify

__getattr__, __dir__, __all__ = lazy_names(__name__)
