"""A match of which one battle is kept as a replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from esper.arena.arena import StepResult
from esper.arena.config import ArenaConfig
from esper.arena.recorder import Recorder
from esper.league.matches import Contender, MatchArena, MatchResult

_WATCHED = 8  # battles that are recorded at once in search of one that is won


@dataclass(frozen=True)
class Recorded:
    """A match, and where the replay of one of its battles lies: None where none was as wanted."""

    result: MatchResult
    path: Path | None
    battle: int | None  # its place
    winner: int | None  # the team that won it; None: a draw


def play_and_record(
    config: ArenaConfig,
    first: Contender,
    second: Contender,
    *,
    seed: int,
    path: Path | str,
    battle: int | None = None,
    names: tuple[str, str] | None = None,
    device: torch.device | str = "cpu",
    on_step: Callable[[StepResult], None] | None = None,
    draws: bool = False,
) -> Recorded:
    """Play a match as `MatchArena.play` does, and record the battle in one place. Without `battle`, record one that the first player won,
    if it won any. `names` are those of the players in the replay."""
    match_arena = MatchArena(config, seed=seed, device=device)
    called = names or (_name(first), _name(second))
    places = range(min(_WATCHED, config.battles)) if battle is None else [battle]
    recorders = [_recorder(match_arena, place, called) for place in places]
    result = match_arena.play(first, second, on_step=on_step, recorders=recorders, draws=draws)
    wanted = result.won if battle is None else (battle,)
    kept = next((recorder for recorder in recorders if recorder.battle in wanted), None)
    if kept is None and wanted:
        # It won elsewhere. The same match once more is the same battles once more.
        kept = _recorder(match_arena, wanted[0], called)
        match_arena.play(first, second, recorders=[kept], draws=draws)
        if kept.winner != kept.battle % 2:
            return Recorded(result, None, None, None)
    if kept is None:
        return Recorded(result, None, None, None)
    return Recorded(result, kept.write(path), kept.battle, kept.winner)


def _recorder(match_arena: MatchArena, place: int, names: tuple[str, str]) -> Recorder:
    """The first player is the first team in even places."""
    return Recorder(match_arena.arena, place, teams=names if place % 2 == 0 else (names[1], names[0]))


def _name(player: Contender) -> str:
    return player if isinstance(player, str) else "policy"
