"""`esper arena leaderboard`: scores of players on the test maps of all scenarios, against their frozen opponents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import tyro

from esper.arena.scenarios import SCENARIOS, TEST_MAPS, Scenario, find_scenario
from esper.cli.arena_battles import MatchPlayer, find_player, memory_errors, misfit, progress_bar, record_json, user_errors
from esper.cli.command import CommandError, CommandResult
from esper.cli.parse import parse
from esper.config import Config, ConfigError
from esper.league.config import PairedBattles

if TYPE_CHECKING:
    import torch

    from esper.league.record import WinRecord

DESCRIPTION = """Scores players on the frozen test maps of all scenarios that they fit, against the frozen opponents of these.

  esper arena leaderboard runs/first player.safetensors expert
  esper arena leaderboard runs/first --scenarios 2v2-open-v1 --battles 1024

Players are named as in esper arena match. A player fits a scenario if it was trained with the same number of contacts and allies. On every
test map a player fights an opponent twice, with sides swapped; it takes its likeliest actions. Scores count draws half, and the 95 %
intervals are over maps. The same player gets the same score each time on one kind of device."""


class LeaderboardArguments(Config):
    players: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="PLAYER [PLAYER ...]")]
    """bots, runs, player files, or players that come with esper"""
    scenarios: tuple[str, ...] = ()
    """names of scenarios; without names, all: 2v2-open-v1 and 5v5-city-v1"""
    battles: PairedBattles = TEST_MAPS
    """battles against each opponent, two on every test map; at most 1024, which uses all test maps"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one"""

    def check(self) -> None:
        if not self.players:
            raise ConfigError("players", expected="at least one player", got=self.players)
        if self.battles > 2 * TEST_MAPS:
            raise ConfigError("battles", expected=f"at most {2 * TEST_MAPS}, two on each of {TEST_MAPS} test maps", got=self.battles)


class Standing(NamedTuple):
    """Result of one player in one scenario: a record against each opponent, or why it does not fit."""

    scenario: Scenario
    player: MatchPlayer
    records: dict[str, WinRecord]
    problem: str


def run(argv: list[str], prog: str) -> CommandResult:
    arguments = parse(LeaderboardArguments, argv, prog, description=DESCRIPTION)
    try:
        scenarios = [find_scenario(name) for name in arguments.scenarios] or list(SCENARIOS.values())
    except ValueError as error:
        raise CommandError(str(error)) from error
    from esper.devices import find_device

    standings: list[Standing] = []
    with user_errors():
        device = find_device(arguments.device)
        players = [find_player(name, device=device) for name in arguments.players]
        for scenario in scenarios:
            standings += _play(scenario, players, battles=arguments.battles, device=device)
    print(_table(standings))
    maps = arguments.battles // 2
    over = f"{maps} map{'s' * (maps != 1)}"
    print(f"score of {arguments.battles} battles against each opponent, draws half [95 % interval over {over}], on {device}")
    return CommandResult({"battles": arguments.battles, "device": str(device), "results": [_as_json(standing) for standing in standings]})


def _play(scenario: Scenario, players: list[MatchPlayer], *, battles: int, device: torch.device) -> list[Standing]:
    """Let the players that fit a scenario fight its opponents, one after the other, on the same maps."""
    from esper.league.matches import MatchArena

    arena = scenario.test_arena(battles)
    problems = [misfit(arena, player) for player in players]
    if all(problems):
        return [Standing(scenario, player, {}, problem) for player, problem in zip(players, problems, strict=True)]
    standings = []
    with memory_errors(arena):
        match_arena = MatchArena(arena, seed=scenario.test_seed, device=device)
        for player, problem in zip(players, problems, strict=True):
            records = {}
            for opponent in () if problem else scenario.opponents:
                with progress_bar(f"{scenario.name}: {player.name} against {opponent}", arena.decisions) as on_step:
                    records[opponent] = match_arena.play(player.player, opponent, on_step=on_step).record
            standings.append(Standing(scenario, player, records, problem))
    return standings


def _table(standings: list[Standing]) -> str:
    """Return one table with a line for every player in every scenario."""
    from esper.text_table import aligned

    opponents = list(dict.fromkeys(name for standing in standings for name in standing.scenario.opponents))
    rows = [["scenario", "player", *opponents, ""]]
    for standing in standings:
        cells = [str(standing.records[name]) if name in standing.records else "-" for name in opponents]
        note = f"does not fit: {standing.problem}" if standing.problem else ""
        rows.append([standing.scenario.name, standing.player.name, *cells, note])
    return aligned(rows)


def _as_json(standing: Standing) -> dict[str, Any]:
    return {
        "scenario": standing.scenario.name,
        "player": standing.player.name,
        "problem": standing.problem or None,
        "opponents": {name: record_json(record) for name, record in standing.records.items()},
    }
