"""Finds the players that a command of the arena names (bots, runs, members of leagues), plays their matches and prints the results."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from esper.arena.config import BOTS, DECISION_S, ArenaConfig
from esper.cli.command import FAILED, CommandError
from esper.files import reason_of
from esper.league.config import ArenaTrainConfig
from esper.runs.foreign import quoted
from esper.text_table import did_you_mean

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from esper.league.matches import MatchResult
    from esper.league.record import WinRecord
    from esper.rl.policy import Policy


MAPS_OF_COMMANDS = "commands"  # purpose of the maps of commands, see `seed_of_unseen_maps`; no training uses these maps
_OBSERVED = ("contacts", "allies")  # fields of an arena that determine what a player observes


class MatchPlayer(NamedTuple):
    """A player of a match."""

    name: str  # as the user gave it
    player: str | Policy  # the name of a bot, or a policy
    arena: ArenaConfig | None = None  # arena of its training


def find_player(text: str, *, device: torch.device) -> MatchPlayer:
    """Return the player that a word names.

    That is a bot, a player that comes with esper, RUN (its best player), RUN:latest, RUN:member of its league, a member's file, or a file
    of `esper arena export`.
    """
    from esper.league.trained import SUFFIX, shipped_players

    if text in BOTS:
        return MatchPlayer(text, text)
    shipped = shipped_players()
    if text in shipped:
        return _player_of_file(shipped[text], device=device, name=text)
    path = Path(text)
    if path.is_dir():
        return player_of_run(path, "best", device=device, name=text)
    if path.is_file():
        if path.suffix != SUFFIX:
            raise CommandError(f"{text} is a file; give the folder of a run, or a player file (*{SUFFIX})")
        return _player_of_file(path, device=device, name=text)
    folder, colon, member = text.rpartition(":")
    if colon and Path(folder).is_dir():
        if member in ("best", "latest"):
            return player_of_run(Path(folder), "latest" if member == "latest" else "best", device=device, name=text)
        return _player_of_league(Path(folder), member, device=device)
    named = f"a player of esper ({', '.join(shipped)}), " if shipped else ""
    choices = f"give a bot ({', '.join(BOTS)}), {named}the folder of a run, RUN:member of its league, or a player file"
    raise CommandError(f"there is no player {text!r}; {did_you_mean(text, [*BOTS, *shipped], otherwise=choices)}")


def player_of_run(folder: Path, which: Literal["best", "latest"], *, device: torch.device, name: str | None = None) -> MatchPlayer:
    from esper.league.training import load_player

    saved_train_config(folder)  # explains a wrong folder
    policy, config = load_player(folder, which=which)
    return _trained_player(name or str(folder), config, policy.state_dict(), device=device)


def _trained_player(name: str, config: ArenaTrainConfig, weights: Mapping[str, Tensor], *, device: torch.device) -> MatchPlayer:
    """Return the player with these weights of a run."""
    from esper.league.player_file import make_playing_policy

    policy = make_playing_policy(config.unit, config.ppo.network, config.arena, weights, device=device)
    return MatchPlayer(name, policy, config.arena)


def saved_train_config(folder: Path) -> ArenaTrainConfig:
    """Return the config of the run in a folder."""
    from esper.config import load_saved
    from esper.runs.folder import CONFIG, check_holds_a_run

    if not folder.exists():
        raise CommandError(f"there is no folder {folder}; give that of a run of esper arena train")
    check_holds_a_run(folder, "arena")
    return load_saved(ArenaTrainConfig, folder / CONFIG)


def _player_of_league(folder: Path, member: str, *, device: torch.device) -> MatchPlayer:
    from esper.league.store import FOLDER, LeagueStore

    config = saved_train_config(folder)
    weights = LeagueStore(folder / FOLDER).load().weights
    if member not in weights:
        members = f"there are {', '.join(weights) or 'none yet'}; {folder}:latest is the player of today"
        hint = did_you_mean(member, weights, otherwise=members)
        raise CommandError(f"the league of {folder} has no member {member!r}; {hint}")
    return _trained_player(f"{folder}:{member}", config, weights[member], device=device)


def _player_of_file(path: Path, *, device: torch.device, name: str) -> MatchPlayer:
    """Return the player of a file of `esper arena export`, or of a member's file in the folder of its run."""
    from esper.league.player_file import load_player_file
    from esper.league.store import FOLDER, MEMBERS, read_weights

    place = path.resolve().parent
    if (place.parent.name, place.name) != (FOLDER, MEMBERS):
        policy, description = load_player_file(path, device)
        return MatchPlayer(name, policy, description.arena)
    config = saved_train_config(place.parent.parent)
    try:
        return _trained_player(name, config, read_weights(path), device=device)
    except ValueError as error:
        raise CommandError(f"{path} is no player: {error}") from error


def misfit(arena: ArenaConfig, player: MatchPlayer) -> str:
    """Return why a player cannot fight in an arena, or an empty text. Sizes of maps and teams may differ from those of its training."""
    for name in _OBSERVED:
        was, given = None if player.arena is None else getattr(player.arena, name), getattr(arena, name)
        if was is not None and was != given:
            return f"it was trained with arena.{name} {was}, and this arena has {given}"
    return ""


def check_fits(arena: ArenaConfig, players: list[MatchPlayer]) -> None:
    """Raise CommandError if a player was trained on other observations than this arena gives."""
    for player in players:
        problem = misfit(arena, player)
        if problem:
            raise CommandError(f"{player.name} cannot fight here: {problem}; choose players with the same {', '.join(_OBSERVED)}")


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turn mistakes of the user, and damaged files, into a CommandError of one line."""
    from esper.league.league import LeagueError
    from esper.replay_file import ReplayError
    from esper.runs import CheckpointError
    from esper.runs.folder import RunError

    try:
        yield
    except (RunError, LeagueError, ReplayError) as error:
        raise CommandError(str(error)) from error
    except ImportError as error:
        raise CommandError(str(error), exit_code=FAILED) from error
    except CheckpointError as error:
        raise CommandError(str(error), exit_code=FAILED) from error


@contextlib.contextmanager
def memory_errors(arena: ArenaConfig) -> Iterator[None]:
    """Turn a lack of GPU memory into a CommandError that advises fewer battles."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        what = f"{arena.battles} battles of {arena.team_size} against {arena.team_size} do not fit into the memory of the GPU"
        raise CommandError(f"{what}; use fewer --battles ({' '.join(str(error).split())})", exit_code=FAILED) from error


def record_json(record: WinRecord) -> dict[str, Any]:
    """Return a record as JSON. `interval` is at 95 %, over `maps`; without maps it is Wilson's, over battles."""
    counts = {"battles": record.battles, "wins": record.wins, "draws": record.draws, "losses": record.losses}
    maps = sum(record.maps) if record.maps else None
    if not record.battles:
        return {**counts, "maps": maps, "score": None, "interval": None}
    interval = record.interval()
    return {**counts, "maps": maps, "score": interval.estimate, "interval": [interval.low, interval.high]}


ActionChoice = Literal["likeliest", "drawn"]


class PlayedMatch(NamedTuple):
    """Result of a match, and its replay."""

    result: MatchResult
    wants_replay: bool
    replay: Path | None  # of a battle that the first player won, or of the first one if it won none
    actions: ActionChoice | None  # how policies chose; None: only bots fought
    mirrors_itself: bool  # a policy that takes the likeliest actions fought itself


def play_match(
    arena: ArenaConfig, first: MatchPlayer, second: MatchPlayer, *, seed: int, device: torch.device, replay: Path | None, draw: bool
) -> PlayedMatch:  # fmt: skip
    """Play a match, and record one battle if a file or folder for it is given.

    Policies take the likeliest actions, as in the evaluations of their training; with `draw`, they draw them.
    """
    from esper.league.matches import MatchArena, play_and_record, seed_of_unseen_maps

    path = None if replay is None else _replay_file(replay, first, second)
    has_policy = not isinstance(first.player, str) or not isinstance(second.player, str)
    actions: ActionChoice | None = None if not has_policy else "drawn" if draw else "likeliest"
    mirrors_itself = not draw and _are_the_same(first.player, second.player)
    map_seed = seed_of_unseen_maps(MAPS_OF_COMMANDS, seed)
    with memory_errors(arena), progress_bar("battles", arena.decisions) as on_step:
        if path is None:
            match_arena = MatchArena(arena, seed=map_seed, device=device)
            result = match_arena.play(first.player, second.player, on_step=on_step, sample=draw)
            return PlayedMatch(result, wants_replay=False, replay=None, actions=actions, mirrors_itself=mirrors_itself)
        try:
            recorded = play_and_record(
                arena,
                first.player,
                second.player,
                seed=map_seed,
                path=path,
                names=_names(first, second),
                device=device,
                on_step=on_step,
                sample=draw,
            )
        except OSError as error:
            raise CommandError(f"the replay cannot be written to {path}: {reason_of(error)}", exit_code=FAILED) from error
    return PlayedMatch(recorded.result, wants_replay=True, replay=recorded.path, actions=actions, mirrors_itself=mirrors_itself)


def _are_the_same(one: str | Policy, other: str | Policy) -> bool:
    """Return whether two policies have the same weights. Bots draw even against themselves."""
    if isinstance(one, str) or isinstance(other, str):
        return False
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(value.equal(theirs[name]) for name, value in ours.items())


def _names(first: MatchPlayer, second: MatchPlayer) -> tuple[str, str]:
    """Return the names of the two players in a replay: a run is named by its folder."""
    one, other = (Path(player.name).absolute().name for player in (first, second))
    return (f"{one} (A)", f"{other} (B)") if one == other else (one, other)


def _replay_file(given: Path, first: MatchPlayer, second: MatchPlayer) -> Path:
    """Return a file that can be written: the given one, or a new one in the given folder. Checked before a battle is played."""
    from esper.replay_file import SUFFIX

    path = given
    if given.is_dir():
        one, other = (re.sub(r"[^\w.-]+", "-", name.removesuffix(SUFFIX)).strip("-") for name in _names(first, second))
        path = given / "replays" / f"{one}-against-{other}-{time.strftime('%Y%m%d-%H%M%S')}{SUFFIX}"
    elif given.suffix != SUFFIX:
        path = given.with_name(f"{given.name}{SUFFIX}")
    place = next(folder for folder in path.absolute().parents if folder.exists())
    if not place.is_dir() or not os.access(place, os.W_OK) or path.is_dir():
        raise CommandError(f"no replay can be written to {path}; choose another file, or the folder of a run, with --replay")
    return path


@contextlib.contextmanager
def progress_bar(what: str, decisions: int) -> Iterator[Callable[..., None]]:
    """Show a progress bar on a terminal. Yield a function to call after each decision of all battles; most battles end early."""
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("decisions at most"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=decisions)
        yield lambda *_: bars.advance(task)


def describe_arena(arena: ArenaConfig) -> str:
    return f"{arena.team_size} against {arena.team_size} on maps of {arena.size} × {arena.size}"


def print_match(played: PlayedMatch) -> None:
    """Print the result of a match, from the view of the first player."""
    result = played.result
    battles = result.record.battles
    print(f"score            {result.record.in_words()}")
    for title, record in zip(("as first team", "as second team"), result.by_side, strict=True):
        if record.battles:
            print(f"{title:<15}  {record} of {record.battles}")
    length = f"a battle took {result.decisions * DECISION_S:.1f} s, {result.decisions:.0f} decisions"
    print(f"ended by time    {100 * result.by_time / battles:.1f} % of the battles; {length}")
    if played.actions is not None:
        how = "drawn; --no-draw takes the likeliest ones" if played.actions == "drawn" else "the likeliest ones; --draw draws them"
        print(f"actions          {how}")
    if played.mirrors_itself:
        print("                 both players are the same and draw nothing, so each battle is its own mirror image: a draw")
    if played.replay is not None:
        file = quoted(played.replay)
        which = "" if result.won else ", the first battle: none was won"
        print(f"replay           {file}{which}\nsee it           esper arena watch {file}")
    elif played.wants_replay:
        print("replay           none: the battle could not be repeated on this device; try another --seed")


def match_json(played: PlayedMatch, arena: ArenaConfig) -> dict[str, Any]:
    """Return the result of a match for `--json`."""
    result = played.result
    return {
        "team_size": arena.team_size,
        "actions": played.actions,
        **record_json(result.record),
        "by_side": [record_json(record) for record in result.by_side],
        "by_time": result.by_time,
        "by_time_share": result.by_time / result.record.battles,
        "mean_decisions": result.decisions,
        "mean_seconds": result.decisions * DECISION_S,
        "replay": None if played.replay is None else str(played.replay),
    }
