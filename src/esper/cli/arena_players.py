"""Who fights in a command of the arena: bots by their names, and players of runs and of their leagues."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from esper.arena.config import ArenaConfig
from esper.cli.outcome import FAILED, CommandError
from esper.league.training_config import ANCHORS, ArenaTrainConfig

if TYPE_CHECKING:
    import torch

    from esper.league.record import Record
    from esper.rl.policy import Policy

COMMANDS = "commands"  # what the ground of their matches is for: its maps are neither those of trainings nor of their own evaluations
_OBSERVED = ("contacts", "allies", "state_view")  # fields of an arena that its observations are made of


class Contender(NamedTuple):
    name: str  # as the user gave it
    player: str | Policy  # the name of a bot, or a policy
    arena: ArenaConfig | None = None  # that it was trained in


def contender(text: str, *, device: torch.device) -> Contender:
    """A bot, RUN (its best player), RUN:latest, RUN:member of its league, or the file of a member in RUN/league/members."""
    if text in ANCHORS:
        return Contender(text, text)
    path = Path(text)
    if path.is_dir():
        return of_run(path, "best", device=device, name=text)
    if path.is_file():
        return _of_file(path, device=device)
    folder, colon, member = text.rpartition(":")
    if colon and Path(folder).is_dir():
        if member in ("best", "latest"):
            return of_run(Path(folder), "latest" if member == "latest" else "best", device=device, name=text)
        return _of_league(Path(folder), member, device=device)
    near = difflib.get_close_matches(text, ANCHORS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"give a bot ({', '.join(ANCHORS)}), the folder of a run, or RUN:member of its league"
    raise CommandError(f"there is no player {text!r}; {hint}")


def of_run(folder: Path, which: Literal["best", "latest"], *, device: torch.device, name: str | None = None) -> Contender:
    from esper.league.training import load_player

    config = saved_arena(folder)
    return Contender(name or str(folder), load_player(folder, which=which, device=device)[0], config.arena)


def saved_arena(folder: Path) -> ArenaTrainConfig:
    """What the run in a folder was trained with."""
    from esper.config import load_saved
    from esper.runs.folder import CONFIG, check_holds_a_run

    if not folder.exists():
        raise CommandError(f"there is no folder {folder}; give that of a run of esper arena train")
    check_holds_a_run(folder, "arena")
    return load_saved(ArenaTrainConfig, folder / CONFIG)


def _of_league(folder: Path, member: str, *, device: torch.device) -> Contender:
    from esper.league.network import make_player
    from esper.league.store import FOLDER, LeagueStore

    config = saved_arena(folder)
    weights = LeagueStore(folder / FOLDER).load().weights
    if member not in weights:
        near = difflib.get_close_matches(member, weights, n=1)
        hint = (
            f"did you mean {near[0]!r}?"
            if near
            else f"there are {', '.join(weights) or 'none yet'}; {folder}:latest is the player of today"
        )
        raise CommandError(f"the league of {folder} has no member {member!r}; {hint}")
    return Contender(f"{folder}:{member}", make_player(config, weights[member], device=device), config.arena)


def _of_file(path: Path, *, device: torch.device) -> Contender:
    from esper.league.network import make_player
    from esper.league.store import FOLDER, MEMBERS, read_weights

    place = path.resolve().parent
    if (place.parent.name, place.name) != (FOLDER, MEMBERS):
        raise CommandError(f"{path} is no player: those are the files in RUN/{FOLDER}/{MEMBERS}, beside the config of their run")
    config = saved_arena(place.parent.parent)
    try:
        return Contender(str(path), make_player(config, read_weights(path), device=device), config.arena)
    except ValueError as error:
        raise CommandError(f"{path} is no player: {error}") from error


def check_fits(arena: ArenaConfig, contenders: list[Contender]) -> None:
    """Whoever was trained in another arena must observe the same things in this one. Sizes of maps and teams may differ."""
    for who in contenders:
        trained = who.arena
        if trained is None:
            continue
        fields = (*_OBSERVED, "team_size") if trained.state_view and arena.state_view else _OBSERVED
        for name in fields:
            was, given = getattr(trained, name), getattr(arena, name)
            if was != given:
                why = "whose network reads the whole battle" if name == "team_size" else "so that its units observe other things"
                told = f"it was trained with arena.{name} {_text(was)}, {why}, and this arena has {_text(given)}"
                raise CommandError(f"{who.name} cannot fight here: {told}; let players meet that have the same {', '.join(fields)}")


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@contextlib.contextmanager
def mistakes() -> Iterator[None]:
    """What the user has to put right, in one line, and what is broken."""
    from esper.league.league import LeagueError
    from esper.replay_file import ReplayError
    from esper.runs import CheckpointError
    from esper.runs.folder import RunError

    try:
        yield
    except (RunError, LeagueError, ReplayError) as error:
        raise CommandError(str(error)) from error
    except CheckpointError as error:
        raise CommandError(str(error), exit_code=FAILED) from error


@contextlib.contextmanager
def enough_memory(arena: ArenaConfig) -> Iterator[None]:
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        what = f"{arena.battles} battles of {arena.team_size} against {arena.team_size} do not fit into the memory of the GPU"
        raise CommandError(f"{what}; use fewer --battles ({' '.join(str(error).split())})", exit_code=FAILED) from error


def record_json(record: Record) -> dict[str, Any]:
    """For a machine. `interval` is at 95 %, over `maps`; Wilson's over battles where these are null."""
    counts = {"battles": record.battles, "wins": record.wins, "draws": record.draws, "losses": record.losses}
    maps = sum(record.maps) if record.maps else None
    if not record.battles:
        return {**counts, "maps": maps, "score": None, "interval": None}
    interval = record.interval()
    return {**counts, "maps": maps, "score": interval.estimate, "interval": [interval.low, interval.high]}
