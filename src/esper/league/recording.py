"""Play a match and save one of its battles as a replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from esper.arena.arena import StepResult
from esper.arena.config import ArenaConfig
from esper.arena.recorder import Recorder
from esper.league.matches import Contender, MatchArena, MatchResult

_WATCHED = 8  # battles recorded at the same time, in search of one that the first player wins


@dataclass(frozen=True)
class Recorded:
    """The result of a match and the replay of one of its battles. `path` is None if no battle was the wanted one."""

    result: MatchResult
    path: Path | None
    battle: int | None  # index of the recorded battle
    winner: int | None  # team that won it; None: a draw


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
    """Play a match as `MatchArena.play` does and save the replay of one battle: `battle`, or one that the first player won.

    `names` are the names of the two players in the replay.
    """
    match_arena = MatchArena(config, seed=seed, device=device)
    names = names or (_name(first), _name(second))
    watched = range(min(_WATCHED, config.battles)) if battle is None else [battle]
    recorders = [_recorder(match_arena, index, names) for index in watched]
    result = match_arena.play(first, second, on_step=on_step, recorders=recorders, draws=draws)
    wanted = result.won if battle is None else (battle,)
    kept = next((recorder for recorder in recorders if recorder.battle in wanted), None)
    if kept is None and wanted:
        # The first player won, but in a battle that was not recorded. Play again: the same seed gives the same battles.
        kept = _recorder(match_arena, wanted[0], names)
        match_arena.play(first, second, recorders=[kept], draws=draws)
        if kept.winner != kept.battle % 2:
            return Recorded(result, None, None, None)
    if kept is None:
        return Recorded(result, None, None, None)
    return Recorded(result, kept.write(path), kept.battle, kept.winner)


def _recorder(match_arena: MatchArena, battle: int, names: tuple[str, str]) -> Recorder:
    """Return a recorder of one battle. The first player is the first team in battles with an even index."""
    return Recorder(match_arena.arena, battle, teams=names if battle % 2 == 0 else (names[1], names[0]))


def _name(player: Contender) -> str:
    return player if isinstance(player, str) else "policy"
