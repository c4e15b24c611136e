"""A match for a command: fought with a sign of life, told to people and to programs."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from esper.arena.config import DECISION_S, ArenaConfig
from esper.cli.arena_players import COMMANDS, Contender, enough_memory, record_json
from esper.cli.outcome import FAILED, CommandError
from esper.files import reason_of

if TYPE_CHECKING:
    import torch

    from esper.league.matches import MatchResult


Actions = Literal["likeliest", "drawn"]


class Fought(NamedTuple):
    result: MatchResult
    wants_replay: bool
    replay: Path | None  # of a battle that the first player won
    actions: Actions | None  # how policies chose; None: only bots fought


def fight(
    arena: ArenaConfig, first: Contender, second: Contender, *, seed: int, device: torch.device, replay: Path | None, draw: bool
) -> Fought:  # fmt: skip
    """A match, with the replay of one battle if a file or folder for it is given. Policies take the likeliest actions, as in the
    evaluations of their training, or with `draw` draw them."""
    from esper.league.matches import MatchArena, unseen
    from esper.league.recording import play_and_record

    path = None if replay is None else _replay_file(replay, first, second)
    has_policy = not isinstance(first.player, str) or not isinstance(second.player, str)
    actions: Actions | None = None if not has_policy else "drawn" if draw else "likeliest"
    ground_seed = unseen(COMMANDS, seed)
    with enough_memory(arena), sign_of_life("battles", arena.decisions) as on_step:
        if path is None:
            match_arena = MatchArena(arena, seed=ground_seed, device=device)
            result = match_arena.play(first.player, second.player, on_step=on_step, draws=draw)
            return Fought(result, wants_replay=False, replay=None, actions=actions)
        try:
            recorded = play_and_record(
                arena,
                first.player,
                second.player,
                seed=ground_seed,
                path=path,
                names=_names(first, second),
                device=device,
                on_step=on_step,
                draws=draw,
            )
        except OSError as error:
            raise CommandError(f"the replay cannot be written to {path}: {reason_of(error)}", exit_code=FAILED) from error
    return Fought(recorded.result, wants_replay=True, replay=recorded.path, actions=actions)


def _names(first: Contender, second: Contender) -> tuple[str, str]:
    """What the two are called in a replay: a run by its folder alone."""
    one, other = (Path(who.name).absolute().name for who in (first, second))
    return (f"{one} (A)", f"{other} (B)") if one == other else (one, other)


def _replay_file(given: Path, first: Contender, second: Contender) -> Path:
    """A file that can be written: the given one, or one of its own name where a folder is given. Checked before anybody fights."""
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
def sign_of_life(what: str, decisions: int) -> Iterator[Callable[..., None]]:
    """A bar on a terminal, and nothing elsewhere. What is yielded is called once for each decision of all battles; most end early."""
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("decisions at most"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=decisions)
        yield lambda *_: bars.advance(task)


def in_words(arena: ArenaConfig) -> str:
    return f"{arena.team_size} against {arena.team_size} on maps of {arena.size} × {arena.size}"


def print_match(fought: Fought) -> None:
    result = fought.result
    battles = result.record.battles
    print(f"score            {result.record.in_words()}")
    for title, record in zip(("as first team", "as second team"), result.by_side, strict=True):
        if record.battles:
            print(f"{title:<15}  {record} of {record.battles}")
    length = f"a battle took {result.decisions * DECISION_S:.1f} s, {result.decisions:.0f} decisions"
    print(f"ended by time    {100 * result.by_time / battles:.1f} % of the battles; {length}")
    if fought.actions is not None:
        print(f"actions          {'drawn' if fought.actions == 'drawn' else 'the likeliest ones; --draw draws them'}")
    if fought.replay is not None:
        file = shlex.quote(str(fought.replay))
        print(f"replay           {file}\nsee it           esper arena watch {file}")
    elif fought.wants_replay:
        print("replay           none: no battle was won; try another --seed, or more --battles")


def match_json(fought: Fought, arena: ArenaConfig) -> dict[str, Any]:
    result = fought.result
    return {
        "team_size": arena.team_size,
        "actions": fought.actions,
        **record_json(result.record),
        "by_side": [record_json(record) for record in result.by_side],
        "by_time": result.by_time,
        "by_time_share": result.by_time / result.record.battles,
        "mean_decisions": result.decisions,
        "mean_seconds": result.decisions * DECISION_S,
        "replay": None if fought.replay is None else str(fought.replay),
    }
