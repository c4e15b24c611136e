"""`esper arena match`: battles between any two players."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import tyro

from esper.arena.config import ArenaConfig, MapSize, TeamSize
from esper.cli.arena_battles import fight, in_words, match_json, print_match
from esper.cli.arena_players import Contender, check_fits, contender, mistakes
from esper.cli.outcome import Outcome
from esper.cli.parse import parse
from esper.config import Config, NonNegativeInt
from esper.league.config import PairedBattles

DESCRIPTION = """Lets two players fight, twice on every map with sides swapped. The score is A's, draws half; the interval is over maps.

  esper arena match strong middle --battles 512
  esper arena match runs/first runs/second --team-size 3
  esper arena match runs/first runs/first:update-50

A and B are bots (random, weak, middle, strong), folders of runs (their best player; RUN:latest for the last), members of a run's league
(RUN:member; esper arena league RUN lists them) or their files in RUN/league/members. They fight in the arena that A was trained in, or
else B. Runs can meet when their arenas have the same contacts, allies and state_view; teams and maps may be of any size."""


class MatchArguments(Config):
    first: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="A")]
    """a bot, RUN, RUN:member, or a member's file"""
    second: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="B")]
    """likewise"""
    battles: PairedBattles = 512
    """how many, all at once: two on every map, one from each side"""
    team_size: TeamSize | None = None
    """units on each side; None: as A or B was trained, else 5"""
    size: MapSize | None = None
    """columns on a side of the map; None: as A or B was trained, else 64"""
    seed: NonNegativeInt = 0
    """of the maps and of all that is drawn"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one"""
    draw: tyro.conf.FlagCreatePairsOff[bool] = False
    """draw the actions of policies, as in training; else they take the likeliest ones"""
    replay: Path | None = None
    """keep the first battle that A won, in this file, or in the folder replays of this run"""


def run(argv: list[str], prog: str) -> Outcome:
    arguments = parse(MatchArguments, argv, prog, description=DESCRIPTION)
    from esper.devices import find_device

    with mistakes():
        device = find_device(arguments.device)
        first, second = (contender(name, device=device) for name in (arguments.first, arguments.second))
        arena = _arena(arguments, first, second)
        check_fits(arena, [first, second])
        print(f"{first.name} against {second.name}: {in_words(arena)}, on {device}", flush=True)
        fought = fight(arena, first, second, seed=arguments.seed, device=device, replay=arguments.replay, draw=arguments.draw)
    print_match(fought)
    return Outcome({"first": first.name, "second": second.name, **match_json(fought, arena)})


def _arena(arguments: MatchArguments, first: Contender, second: Contender) -> ArenaConfig:
    base = first.arena or second.arena or ArenaConfig()
    team_size, size = arguments.team_size or base.team_size, arguments.size or base.size
    return msgspec.structs.replace(base, battles=arguments.battles, smallest_team=None, team_size=team_size, size=size)
