"""Matches: battles of one player against one or several rivals, and the replay of one of them.

On every map the player fights two battles against each rival, one from each side. They never fight another pair of battles on the same map,
because players that choose the likeliest actions would repeat it. All rivals meet the player on the same maps. Confidence intervals are
over maps.

Shapes: R = rivals, P = pairs of battles with each rival = maps. The battles of the arena are ordered as [P, R, 2]; the last index is the
side of the player.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from esper.arena.arena import Arena, StepResult
from esper.arena.bots import Bot
from esper.arena.config import ArenaConfig
from esper.arena.recorder import Recorder
from esper.league.players import BotPlayer, Player, PolicyPlayer, join_actions, side_rows
from esper.league.record import WinRecord
from esper.rl.policy import Policy
from esper.rng import Streams

Contender = str | Policy  # name of a bot, or a policy
_RECORDED = 8  # battles recorded at the same time, to find one that the first player wins


@dataclass(frozen=True)
class MatchResult:
    """Result of a match against one rival, from the side of the first player."""

    record: WinRecord
    by_time: int  # battles that ended because the time was up
    decisions: float  # mean length of a battle, in decisions
    by_side: tuple[WinRecord, WinRecord]  # records as the first team and as the second team
    won: tuple[int, ...]  # indices of the battles that the first player won
    points: tuple[float, ...]  # points of each battle: 1, 1/2 or 0; battles 2i and 2i + 1 share a map


def seed_of_unseen_maps(purpose: str, seed: int) -> int:
    """Return the arena seed for a purpose such as "evaluation".

    It is derived from a label, so its maps differ from those of any run, whatever seed the run was given.
    """
    return Streams(seed).spawn(f"ground of {purpose}").integer("maps")


class MatchArena:
    """An arena for matches. All its matches use the maps of one seed, so their results can be compared.

    `config.battles` is the number of battles with each of `rivals` rivals. There is one map per pair of battles; `config.maps` is ignored.
    """

    def __init__(self, config: ArenaConfig, *, seed: int, device: torch.device | str, rivals: int = 1) -> None:
        if config.battles % 2:
            raise ValueError(f"battles of a match come in pairs, one map for both sides; got {config.battles}, use {config.battles + 1}")
        # One map serves 2 battles with every rival.
        self.config, self.seed, self.rivals = config, seed, rivals
        paired = msgspec.structs.replace(config, battles=rivals * config.battles, maps=config.battles // 2, battles_per_map=2 * rivals)
        self.arena = Arena(paired, seed=seed, device=device)
        self._bots: dict[int, Bot] = {}  # by number of the player, kept for the next match

    def use_maps(self, seed: int) -> None:
        """Use the maps of another seed from now on."""
        self.seed = seed
        self.arena.reset(seed)

    def play(
        self,
        first: Contender,
        second: Contender,
        *,
        on_step: Callable[[StepResult], None] | None = None,
        recorders: Sequence[Recorder] = (),
        sample: bool = False,
    ) -> MatchResult:
        """Play a match between two players and return the result of the first.

        The first player is the first team in battles with an even index. Policies take the likeliest actions, or sample them with `sample`.
        `recorders` must be new and belong to `self.arena`; they record their battles from beginning to end.
        """
        return self.play_all(first, [second], on_step=on_step, recorders=recorders, sample=sample)[0]

    def play_all(
        self,
        first: Contender,
        rivals: Sequence[Contender],
        *,
        on_step: Callable[[StepResult], None] | None = None,
        recorders: Sequence[Recorder] = (),
        sample: bool = False,
    ) -> list[MatchResult]:
        """Play against all rivals at the same time and return the result against each. The arguments are those of `play`."""
        if len(rivals) != self.rivals:
            raise ValueError(f"this arena is made for {self.rivals} rivals; got {len(rivals)}")
        arena, config = self.arena, self.arena.config
        result = arena.reset()
        battles = torch.arange(config.battles, device=arena.device)
        # The player is on alternating sides of all battles; each rival is on the other side of its own battles.
        side = battles % 2
        players = [self._make_player(first, side_rows(battles, side, team_size=config.team_size), 1, sample=sample)]
        for number, rival in enumerate(rivals):
            theirs = battles[battles // 2 % self.rivals == number]
            rows = side_rows(theirs, 1 - side[theirs], team_size=config.team_size)
            players.append(self._make_player(rival, rows, 2 + number, sample=sample))
        tally = Tally(config.battles, arena.device)
        for recorder in recorders:
            recorder.begin()
        for decision in range(config.decisions):
            actions = join_actions([(player.rows, player.act(result)) for player in players], config.battles * config.units)
            result = arena.step(actions)
            tally.add(result, side)
            for recorder in recorders:
                recorder.add(actions, result)
            if on_step is not None:
                on_step(result)
            if decision % 10 == 9 and tally.is_over():  # asked rarely, because it waits for the device
                break
        assert tally.is_over(), "a battle has lasted longer than its time limit"
        arena.check()
        return tally.results(self.rivals)

    def _make_player(self, contender: Contender, rows: Tensor, number: int, *, sample: bool) -> Player:
        streams = Streams(self.seed).spawn(f"match player {number}")
        if isinstance(contender, str):
            if number not in self._bots:
                self._bots[number] = Bot(contender, self.arena)
            self._bots[number].become(contender, seed=streams.integer("bot"))
            return BotPlayer(self._bots[number], rows)
        generator = streams.torch("actions", contender.device) if sample else None
        return PolicyPlayer(contender, rows, units=self.config.units, generator=generator)


class Tally:
    """Results of the first battle at every index of the arena, kept on the device. Later battles at the same index are not counted."""

    def __init__(self, battles: int, device: torch.device) -> None:
        self.points = torch.full((battles,), -1, dtype=torch.int64, device=device)  # in half points: -1 not over, 0 lost, 1 drawn, 2 won
        self.by_time = torch.zeros(battles, dtype=torch.bool, device=device)
        self.length = torch.zeros(battles, device=device)

    def add(self, result: StepResult, side: Tensor) -> None:
        is_new = result.ended & (self.points < 0)
        outcome = torch.where(result.winner == -1, 1, torch.where(result.winner == side, 2, 0))
        self.points = torch.where(is_new, outcome, self.points)
        self.by_time = self.by_time | (is_new & result.by_time)
        self.length = torch.where(is_new, result.last[:, 0], self.length)

    def is_over(self) -> bool:
        return bool((self.points >= 0).all())

    def results(self, rivals: int) -> list[MatchResult]:
        """Return the result against each rival."""
        places = torch.arange(len(self.points)).view(-1, rivals, 2)  # [P, R, 2]
        halves, by_time, length = self.points.cpu(), self.by_time.cpu(), self.length.cpu()
        found = []
        for rival in range(rivals):
            theirs = places[:, rival].flatten()
            points = tuple((halves[theirs] / 2).tolist())
            sides = _record(points[0::2]), _record(points[1::2])
            won = tuple(theirs[halves[theirs] == 2].tolist())
            decisions = float(length[theirs].mean())
            found.append(MatchResult(WinRecord.of_pairs(points), int(by_time[theirs].sum()), decisions, sides, won, points))
        return found


def _record(points: Sequence[float]) -> WinRecord:
    """Return the record of battles that share no map with each other."""
    return WinRecord(wins=points.count(1.0), draws=points.count(0.5), losses=points.count(0.0))


# Replays


@dataclass(frozen=True)
class RecordedMatch:
    """The result of a match and the replay of one of its battles. `path` is None if the wanted battle could not be repeated."""

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
    sample: bool = False,
) -> RecordedMatch:
    """Play a match as `MatchArena.play` does and save the replay of one battle.

    It is the battle with the index `battle`. Without an index, it is one that the first player won, or the first one if it won none.
    `names` are the names of the two players in the replay.
    """
    match_arena = MatchArena(config, seed=seed, device=device)
    names = names or (_name(first), _name(second))
    watched = range(min(_RECORDED, config.battles)) if battle is None else [battle]
    recorders = [_recorder(match_arena, index, names) for index in watched]
    result = match_arena.play(first, second, on_step=on_step, recorders=recorders, sample=sample)
    wanted = (result.won or (0,)) if battle is None else (battle,)
    kept = next((recorder for recorder in recorders if recorder.battle in wanted), None)
    if kept is None:
        # The first player won, but in a battle that was not recorded. Play again: the same seed gives the same battles.
        kept = _recorder(match_arena, wanted[0], names)
        match_arena.play(first, second, recorders=[kept], sample=sample)
        # On devices whose results vary, the first player may lose it this time. Then there is no replay.
        if kept.winner != kept.battle % 2:
            return RecordedMatch(result, None, None, None)
    return RecordedMatch(result, kept.write(path), kept.battle, kept.winner)


def _recorder(match_arena: MatchArena, battle: int, names: tuple[str, str]) -> Recorder:
    """Return a recorder of one battle. The first player is the first team in battles with an even index."""
    return Recorder(match_arena.arena, battle, teams=names if battle % 2 == 0 else (names[1], names[0]))


def _name(player: Contender) -> str:
    return player if isinstance(player, str) else "policy"
