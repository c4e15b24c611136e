"""The league: who the learner plays against, how strong each of them is, and what is kept of it on the disk.

Names are imported when they are first used: `from esper.league.config import LeagueConfig` does not wait for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from esper.lazy import names_of

if TYPE_CHECKING:
    from esper.league.config import LeagueConfig
    from esper.league.league import LEARNER, League, LeagueError, Settled
    from esper.league.ratings import Rating
    from esper.league.record import Record, WinTable
    from esper.league.standing_table import Standing, standing_rows, standings
    from esper.league.store import LeagueStore

_MODULES = {
    "LEARNER": "league",
    "League": "league",
    "LeagueConfig": "config",
    "LeagueError": "league",
    "LeagueStore": "store",
    "Rating": "ratings",
    "Record": "record",
    "Settled": "league",
    "Standing": "standing_table",
    "WinTable": "record",
    "standing_rows": "standing_table",
    "standings": "standing_table",
}

__all__ = [
    "LEARNER", "League", "LeagueConfig", "LeagueError", "LeagueStore", "Rating", "Record", "Settled", "Standing", "WinTable",
    "standing_rows", "standings",
]  # fmt: skip


__getattr__, __dir__ = names_of(__name__, _MODULES)
