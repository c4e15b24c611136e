"""The league: past selves and bots that the learner plays against, their ratings, and how a league is saved.

Names are imported on first use, so `from esper.league.config import LeagueConfig` does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from esper.lazy import lazy_names

if TYPE_CHECKING:
    from esper.league.config import (
        ArenaTrainConfig as ArenaTrainConfig,
        LeagueConfig as LeagueConfig,
        SelfPlayConfig as SelfPlayConfig,
        UnitNetworkConfig as UnitNetworkConfig,
    )
    from esper.league.league import LEARNER as LEARNER, League as League, LeagueError as LeagueError, TrialResult as TrialResult
    from esper.league.player_file import load_player_file as load_player_file, save_player as save_player
    from esper.league.ratings import Rating as Rating
    from esper.league.record import WinRecord as WinRecord, WinTable as WinTable
    from esper.league.standing_table import PlayerStanding as PlayerStanding, standing_rows as standing_rows, standings as standings
    from esper.league.store import LeagueStore as LeagueStore
    from esper.league.training import load_player as load_player, play_against_bot as play_against_bot, train_arena as train_arena

__getattr__, __dir__, __all__ = lazy_names(__name__)
