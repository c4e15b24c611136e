"""`esper arena league`: who is how strong in the league of a run."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import tyro

from esper.cli.arena_players import COMMANDS, enough_memory, mistakes, record_json, saved_arena
from esper.cli.outcome import CommandError, Outcome
from esper.cli.parse import parse
from esper.config import Config, NonNegativeInt
from esper.league.config import EvenCount
from esper.league.training_config import ArenaTrainConfig

if TYPE_CHECKING:
    from esper.league.league import League

DESCRIPTION = """Shows the league of a run: past selves and bots, their ratings, and their scores against the bots with 95 % intervals.

  esper arena league runs/arena-...
  esper arena league runs/arena-... --battles 64

--battles plays a round robin of all of them first, on maps that nobody was trained on. It takes long: there are as many matches as pairs,
66 for 8 past selves and 4 bots, each seconds on a GPU and a minute or more on a CPU. Its results are shown, and not saved with the run."""


class LeagueArguments(Config):
    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """folder of the run"""
    battles: EvenCount = 0
    """of each pair of players, fought now, two on every map; 0: none, show what training has recorded"""
    retired: tyro.conf.FlagCreatePairsOff[bool] = False
    """show those who have left the league too"""
    seed: NonNegativeInt = 0
    """of the maps"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one"""


def run(argv: list[str], prog: str) -> Outcome:
    arguments = parse(LeagueArguments, argv, prog, description=DESCRIPTION)
    from esper.league.standing_table import standing_rows, standings
    from esper.league.store import FOLDER, LeagueStore

    with mistakes():
        config = saved_arena(arguments.run)
        store = LeagueStore(arguments.run / FOLDER)
        if not store.exists():
            raise CommandError(f"{arguments.run} has no league yet; it is written with the first checkpoint, so train for longer")
        league = store.load(with_weights=arguments.battles > 0)
        if arguments.battles:
            _round_robin(league, config, arguments)
    print(standings(league, with_retired=arguments.retired))
    if len(league.members) == 0:
        print(f"no past self has joined yet; the first is sent after {config.selfplay.enter_every} updates (--enter-every)")
    if arguments.battles:
        print(f"\nscore of the row against the column, in percent\n{_pairs(league)}")
    rows = [msgspec.to_builtins(row) for row in standing_rows(league, with_retired=arguments.retired)]
    return Outcome({"run": str(arguments.run), "best": league.best, "standings": rows, "pairs": _pairs_json(league)})


def _round_robin(league: League, config: ArenaTrainConfig, arguments: LeagueArguments) -> None:
    """Every member and anchor against every other, on the same maps. Members draw their actions, as in the battles of training that these
    are shown with."""
    from esper.devices import find_device
    from esper.league.matches import MatchArena, unseen
    from esper.league.network import make_player

    device = find_device(arguments.device)
    arena = msgspec.structs.replace(config.arena, battles=arguments.battles, smallest_team=None)
    names = _players(league)
    players: dict[str, Any] = {
        name: name if name in league.anchors else make_player(config, league.weights[name], device=device) for name in names
    }
    pairs = list(itertools.combinations(names, 2))
    print(f"{len(names)} players, {len(pairs)} matches of {arguments.battles} battles on {device}", flush=True)
    began = time.monotonic()
    with enough_memory(arena):
        match_arena = MatchArena(arena, seed=unseen(COMMANDS, arguments.seed), device=device)
        for number, (first, second) in enumerate(pairs, 1):
            record = match_arena.play(players[first], players[second], draws=True).record
            try:
                league.record(first, second, record)
            except ImportError as error:
                raise CommandError(str(error)) from error
            print(
                f"{number:>{len(str(len(pairs)))}}/{len(pairs)}  {first} against {second}: {record}{_left(began, number, len(pairs))}",
                flush=True,
            )
    print()


def _left(began: float, done: int, total: int) -> str:
    from esper.text_table import duration

    return f"  {duration((time.monotonic() - began) / done * (total - done))} left" if done < total else ""


def _players(league: League) -> list[str]:
    return [*reversed(league.members), *reversed(league.anchors)]


def _pairs(league: League) -> str:
    from esper.text_table import aligned

    names = _players(league)

    def cell(row: str, column: str) -> str:
        record = league.table.between(row, column)
        return f"{100 * record.score:.0f}" if row != column and record.battles else "-"

    return aligned([["", *names], *([row, *(cell(row, column) for column in names)] for row in names)], numbers=True)


def _pairs_json(league: League) -> list[dict[str, Any]]:
    return [{"first": first, "second": second, **record_json(record)} for first, second, record in league.table]
