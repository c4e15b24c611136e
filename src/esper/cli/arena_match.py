"""`esper arena match`, `esper arena eval` and `esper arena league`: matches between players, and the ratings of a league."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import tyro

from esper.arena.config import ArenaConfig, BotName, MapSize, TeamSize
from esper.cli.arena_battles import (
    MAPS_OF_COMMANDS,
    MatchPlayer,
    check_fits,
    describe_arena,
    find_player,
    match_json,
    memory_errors,
    play_match,
    player_of_run,
    print_match,
    record_json,
    saved_train_config,
    user_errors,
)
from esper.cli.command import CommandError, CommandResult
from esper.cli.parse import parse
from esper.config import Config, NonNegativeInt
from esper.league.config import ArenaTrainConfig, EvenCount, PairedBattles

if TYPE_CHECKING:
    from esper.league.league import League


class MatchOptions(Config):
    """Options of `match` and of `eval`."""

    battles: PairedBattles = 512
    """battles, all fought at once: two on every map, one from each side"""
    seed: NonNegativeInt = 0
    """seed of the maps and of everything that is drawn"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one"""
    replay: Path | None = None
    """write the replay of one battle to this file, or into replays/ of this run: the first that the first player won, else the first"""


def _play(options: MatchOptions, arena: ArenaConfig, first: MatchPlayer, second: MatchPlayer, *, draw: bool, title: str) -> dict[str, Any]:
    """Play and print a match in this arena, with the number of battles of the options. Return its result as JSON."""
    from esper.devices import find_device

    device = find_device(options.device)
    arena = msgspec.structs.replace(arena, battles=options.battles, smallest_team=None, state_view=False)
    check_fits(arena, [first, second])
    print(f"{title}: {describe_arena(arena)}, on {device}", flush=True)
    played = play_match(arena, first, second, seed=options.seed, device=device, replay=options.replay, draw=draw)
    print_match(played)
    return match_json(played, arena)


DESCRIPTION = """Lets two players fight, twice on every map with sides swapped. The score is A's, draws half; the interval is over maps.

  esper arena match strong middle --battles 512
  esper arena match runs/first runs/second --team-size 3
  esper arena match runs/first runs/first:update-50

A and B are bots (random, weak, middle, strong, expert; middle-v1, strong-v1 and expert-v1 never change), folders of runs (their best
player; RUN:latest for the last), members of a run's league (RUN:member; esper arena league RUN lists them) or their files in
RUN/league/members, files of esper arena export, or names of players that come with esper. They fight in the arena that A was trained in,
or else in that of B. Players can meet when their arenas have the same contacts and allies; teams and maps may be of any size."""


class MatchArguments(MatchOptions):
    first: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="A")]
    """a bot, RUN, RUN:member, a player file, or a player that comes with esper"""
    second: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="B")]
    """the other player, named likewise"""
    draw: bool = True
    """draw the actions of policies, as in training; otherwise they take the likeliest ones, and a player draws every battle with itself"""
    team_size: TeamSize | None = None
    """units on each side; None: as A or B was trained, else 5"""
    size: MapSize | None = None
    """columns on a side of the map; None: as A or B was trained, else 64"""


def run(argv: list[str], prog: str) -> CommandResult:
    arguments = parse(MatchArguments, argv, prog, description=DESCRIPTION)
    from esper.devices import find_device

    with user_errors():
        device = find_device(arguments.device)
        first, second = (find_player(name, device=device) for name in (arguments.first, arguments.second))
        arena = first.arena or second.arena or ArenaConfig()
        team_size, size = arguments.team_size or arena.team_size, arguments.size or arena.size
        arena = msgspec.structs.replace(arena, team_size=team_size, size=size)
        result = _play(arguments, arena, first, second, draw=arguments.draw, title=f"{first.name} against {second.name}")
    return CommandResult({"first": first.name, "second": second.name, **result})


EVAL_DESCRIPTION = """Lets a player fight a scripted bot on maps that it was never trained on, twice on each with sides swapped.

  esper arena eval runs/arena-... --against strong --battles 512
  esper arena eval runs/arena-... --battles 16 --replay runs/arena-...
  esper arena eval player-2v2 --against expert

The player is that of a run, or any other that esper arena match takes.
The score counts draws half, and its 95 % interval is over the maps. For any other opponent: esper arena match."""


class ArenaEvalArguments(MatchOptions):
    player: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PLAYER")]
    """folder of a run, RUN:member, a player file, or a player that comes with esper"""
    against: BotName = "strong"
    """scripted bot that it fights"""
    draw: bool = False
    """draw the actions of policies, as in training; otherwise they take the likeliest ones, as in evaluations of training"""
    checkpoint: Literal["best", "latest"] | None = None
    """which player, if PLAYER is the folder of a run; None: the best"""


def run_eval(argv: list[str], prog: str) -> CommandResult:
    arguments = parse(ArenaEvalArguments, argv, prog, description=EVAL_DESCRIPTION)
    from esper.devices import find_device

    with user_errors():
        device, name, which = find_device(arguments.device), arguments.player, arguments.checkpoint or "best"
        is_run = Path(name).is_dir()
        player = player_of_run(Path(name), which, device=device) if is_run else find_player(name, device=device)
        if arguments.checkpoint is not None and not is_run:
            raise CommandError(f"--checkpoint {which} chooses a player of a run, and {name} is not the folder of one; leave it out")
        bot = MatchPlayer(arguments.against, arguments.against)
        title = f"{f'{which} player of ' if is_run else ''}{name} against {bot.name}"
        result = _play(arguments, player.arena or ArenaConfig(), player, bot, draw=arguments.draw, title=title)
    return CommandResult({"player": name, "checkpoint": which if is_run else None, "against": bot.name, **result})


LEAGUE_DESCRIPTION = """Shows the league of a run: past selves and bots, their ratings, and scores against the bots with 95 % intervals.

  esper arena league runs/arena-...
  esper arena league runs/arena-... --battles 64

--battles plays a round robin of all of them first, on maps that nobody was trained on. It takes long: there are as many matches as pairs,
66 for 8 past selves and 4 bots. A match takes seconds on a GPU and a minute or more on a CPU. The results are not saved with the run."""


class LeagueArguments(Config):
    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """folder of the run"""
    battles: EvenCount = 0
    """battles of each pair of players, fought now, two on every map; 0: none, show what training has recorded"""
    retired: tyro.conf.FlagCreatePairsOff[bool] = False
    """also show past selves that have left the league"""
    seed: NonNegativeInt = 0
    """seed of the maps"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one"""


def run_league(argv: list[str], prog: str) -> CommandResult:
    arguments = parse(LeagueArguments, argv, prog, description=LEAGUE_DESCRIPTION)
    from esper.league.standing_table import standing_rows, standings
    from esper.league.store import FOLDER, LeagueStore

    with user_errors():
        config = saved_train_config(arguments.run)
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
    pairs = [{"first": first, "second": second, **record_json(record)} for first, second, record in league.table]
    return CommandResult({"run": str(arguments.run), "best": league.best, "standings": rows, "pairs": pairs})


def _round_robin(league: League, config: ArenaTrainConfig, arguments: LeagueArguments) -> None:
    """Play every member and anchor against every other on the same maps. Members draw their actions, as in their training."""
    from esper.devices import find_device
    from esper.league.matches import MatchArena, seed_of_unseen_maps
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
    with memory_errors(arena):
        match_arena = MatchArena(arena, seed=seed_of_unseen_maps(MAPS_OF_COMMANDS, arguments.seed), device=device)
        for number, (first, second) in enumerate(pairs, 1):
            record = match_arena.play(players[first], players[second], sample=True).record
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
    """Return the estimated time left, or an empty text after the last match."""
    from esper.text_table import duration

    return f"  {duration((time.monotonic() - began) / done * (total - done))} left" if done < total else ""


def _players(league: League) -> list[str]:
    """Return the players of a league: newest member first, then the anchors in reverse order."""
    return [*reversed(league.members), *reversed(league.anchors)]


def _pairs(league: League) -> str:
    """Return a table of the scores of every player against every other."""
    from esper.text_table import aligned

    names = _players(league)

    def cell(row: str, column: str) -> str:
        record = league.table.between(row, column)
        return f"{100 * record.score:.0f}" if row != column and record.battles else "-"

    return aligned([["", *names], *([row, *(cell(row, column) for column in names)] for row in names)], numbers=True)
