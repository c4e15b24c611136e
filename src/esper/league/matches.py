"""Matches: battles of a player against one or several rivals, counted once each.

Two battles are fought on every map, one from each side, and no map is used for another pair: players that draw nothing would fight the
same battle again. All rivals of a match meet the player on the same maps. Intervals are over maps.

Shapes: R = rivals, P = pairs of battles with each of them = maps. Places of the arena are [P, R, 2], the last being the side of the player.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from esper.arena.arena import Arena, StepResult
from esper.arena.bots import Bot
from esper.arena.config import ArenaConfig
from esper.arena.recorder import Recorder
from esper.league.players import BotPlayer, Player, PolicyPlayer, join, side_rows
from esper.league.record import Record
from esper.rl.policy import Policy
from esper.rng import Streams

Contender = str | Policy  # the name of a bot, or a policy


@dataclass(frozen=True)
class MatchResult:
    record: Record  # of the first player
    by_time: int  # battles that only the clock ended
    decisions: float  # mean length
    by_side: tuple[Record, Record]  # of the first player, as the first and as the second team
    won: tuple[int, ...]  # places in which the first player won
    points: tuple[float, ...]  # of the first player by battle, 1, 1/2 or 0; each two neighbours were fought on one map


def unseen(purpose: str, seed: int) -> int:
    """The seed of a ground for some purpose. It is drawn by a label, so that whatever small number a training is given as its seed, its
    maps are others."""
    return Streams(seed).spawn(f"ground of {purpose}").integer("maps")


class MatchArena:
    """An arena for matches, made once: every match is fought on the maps of one seed, so that players meet the same battles.

    `config.battles` are those with each of `rivals` rivals. There are as many maps as pairs of them, whatever the config says.
    """

    def __init__(self, config: ArenaConfig, *, seed: int, device: torch.device | str, rivals: int = 1) -> None:
        if config.battles % 2:
            raise ValueError(f"battles of a match come in pairs, one map for both sides; got {config.battles}, use {config.battles + 1}")
        self.config, self.seed, self.rivals = config, seed, rivals
        paired = msgspec.structs.replace(config, battles=rivals * config.battles, maps=config.battles // 2, battles_per_map=2 * rivals)
        self.arena = Arena(paired, seed=seed, device=device)

    def open(self, seed: int) -> None:
        """Matches from now on are fought on the maps of another seed."""
        self.seed = seed
        self.arena.reset(seed)

    def play(
        self,
        first: Contender,
        second: Contender,
        *,
        on_step: Callable[[StepResult], None] | None = None,
        recorders: Sequence[Recorder] = (),
        draws: bool = False,
    ) -> MatchResult:
        """A match between two. The first player is the first team where the place is even. Policies take the likeliest actions, or with
        `draws` draw them.

        Recorders are of this ground's arena, and new: they see their battles from the beginning to the end.
        """
        return self.play_all(first, [second], on_step=on_step, recorders=recorders, draws=draws)[0]

    def play_all(
        self,
        first: Contender,
        rivals: Sequence[Contender],
        *,
        on_step: Callable[[StepResult], None] | None = None,
        recorders: Sequence[Recorder] = (),
        draws: bool = False,
    ) -> list[MatchResult]:
        """The player's results against each rival, all fought at once."""
        if len(rivals) != self.rivals:
            raise ValueError(f"this ground is made for {self.rivals} rivals; got {len(rivals)}")
        arena, config = self.arena, self.arena.config
        result = arena.reset()
        battles = torch.arange(config.battles, device=arena.device)
        side = battles % 2
        players = [self._seated(first, side_rows(battles, side, team_size=config.team_size), 1, draws=draws)]
        for number, rival in enumerate(rivals):
            theirs = battles[battles // 2 % self.rivals == number]
            players.append(self._seated(rival, side_rows(theirs, 1 - side[theirs], team_size=config.team_size), 2 + number, draws=draws))
        tally = Tally(config.battles, arena.device)
        for recorder in recorders:
            recorder.begin()
        for decision in range(config.decisions):
            actions = join([(player.rows, player.act(result)) for player in players], config.battles * config.units)
            result = arena.step(actions)
            tally.add(result, side)
            for recorder in recorders:
                recorder.add(actions, result)
            if on_step is not None:
                on_step(result)
            if decision % 10 == 9 and tally.is_over():
                break
        assert tally.is_over(), "a battle went on beyond its time"
        arena.check()
        return tally.results(self.rivals)

    def _seated(self, who: Contender, rows: Tensor, number: int, *, draws: bool) -> Player:
        streams = Streams(self.seed).spawn(f"match player {number}")
        if isinstance(who, str):
            return BotPlayer(Bot(who, self.arena, seed=streams.integer("bot")), rows)
        generator = streams.torch("actions", who.device) if draws else None
        return PolicyPlayer(who, rows, units=self.config.units, generator=generator)


class Tally:
    """The first battle in every place, counted on the device."""

    def __init__(self, battles: int, device: torch.device) -> None:
        self.points = torch.full((battles,), -1, dtype=torch.int64, device=device)  # -1 not yet; 0 lost, 1 draw, 2 won
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
        """By rival."""
        places = torch.arange(len(self.points)).view(-1, rivals, 2)  # [P, R, 2]
        halves, by_time, length = self.points.cpu(), self.by_time.cpu(), self.length.cpu()
        found = []
        for rival in range(rivals):
            theirs = places[:, rival].flatten()
            points = tuple((halves[theirs] / 2).tolist())
            sides = _record(points[0::2]), _record(points[1::2])
            won = tuple(theirs[halves[theirs] == 2].tolist())
            ended = int(by_time[theirs].sum()), float(length[theirs].mean())
            found.append(MatchResult(Record.of_pairs(points), *ended, sides, won, points))
        return found


def _record(points: Sequence[float]) -> Record:
    """Of battles on maps of which each has one."""
    return Record(wins=points.count(1.0), draws=points.count(0.5), losses=points.count(0.0))
