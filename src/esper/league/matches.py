"""Matches: battles between two players, sides swapped from one battle to the next, counted once each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.arena.arena import Arena, Scene
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


def unseen(purpose: str, seed: int) -> int:
    """The seed of a ground for some purpose. It is drawn by a label, so that whatever small number a training is given as its seed, its
    maps are others."""
    return Streams(seed).spawn(f"ground of {purpose}").integer("maps")


class Ground:
    """An arena for matches, made once: every match is fought on the maps of one seed, so that players meet the same battles."""

    def __init__(self, config: ArenaConfig, *, seed: int, device: torch.device | str) -> None:
        self.arena = Arena(config, seed=seed, device=device)
        self.config, self.seed = config, seed

    def play(
        self,
        first: Contender,
        second: Contender,
        *,
        on_scene: Callable[[Scene], None] | None = None,
        recorders: Sequence[Recorder] = (),
        draws: bool = False,
    ) -> MatchResult:
        """One battle in every place. The first player is the first team where the place is even. Policies take the likeliest actions, or
        with `draws` draw them.

        Recorders are of this ground's arena, and new: they see their battles from the beginning to the end.
        """
        arena, config = self.arena, self.config
        scene = arena.reset()
        battles = torch.arange(config.battles, device=arena.device)
        side = battles % 2
        players = [self._seated(first, side_rows(battles, side, teams=config.teams), 1, draws=draws)]
        players.append(self._seated(second, side_rows(battles, 1 - side, teams=config.teams), 2, draws=draws))
        tally = Tally(config.battles, arena.device)
        for recorder in recorders:
            recorder.begin()
        for decision in range(config.decisions):
            actions = join([(player.rows, player.act(scene)) for player in players], config.battles * config.units)
            scene = arena.step(actions)
            tally.add(scene, side)
            for recorder in recorders:
                recorder.add(actions, scene)
            if on_scene is not None:
                on_scene(scene)
            if decision % 10 == 9 and tally.is_over():
                break
        assert tally.is_over(), "a battle went on beyond its time"
        arena.check()
        return tally.result(side)

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

    def add(self, scene: Scene, side: Tensor) -> None:
        is_new = scene.ended & (self.points < 0)
        outcome = torch.where(scene.winner == -1, 1, torch.where(scene.winner == side, 2, 0))
        self.points = torch.where(is_new, outcome, self.points)
        self.by_time = self.by_time | (is_new & scene.by_time)
        self.length = torch.where(is_new, scene.last[:, 0], self.length)

    def is_over(self) -> bool:
        return bool((self.points >= 0).all())

    def result(self, side: Tensor) -> MatchResult:
        points, side = self.points.cpu(), side.cpu()
        sides = _record(points[side == 0]), _record(points[side == 1])
        won = tuple((points == 2).nonzero().flatten().tolist())
        return MatchResult(_record(points), int(self.by_time.sum()), float(self.length.mean()), sides, won)


def _record(points: Tensor) -> Record:
    return Record(wins=int((points == 2).sum()), draws=int((points == 1).sum()), losses=int((points == 0).sum()))
