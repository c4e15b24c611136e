"""The league: past selves and bots that the learner plays against, their ratings, and how a league is saved.

Names are imported on first use, so `from esper.league.config import LeagueConfig` does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from esper.lazy import lazy_names

if TYPE_CHECKING:
    from esper.league.config import LeagueConfig as LeagueConfig
    from esper.league.league import LEARNER as LEARNER, League as League, LeagueError as LeagueError, Settled as Settled
    from esper.league.ratings import Rating as Rating
    from esper.league.record import WinRecord as WinRecord, WinTable as WinTable
    from esper.league.standing_table import Standing as Standing, standing_rows as standing_rows, standings as standings
    from esper.league.store import LeagueStore as LeagueStore
    from esper.league.training import against_bot as against_bot, load_player as load_player, train_arena as train_arena
    from esper.league.training_config import (
        ArenaTrainConfig as ArenaTrainConfig,
        SelfPlayConfig as SelfPlayConfig,
        UnitNetworkConfig as UnitNetworkConfig,
    )

__getattr__, __dir__, __all__ = lazy_names(__name__)
