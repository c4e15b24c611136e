"""Damaged files: what is read from one is right, a part of the right content that says so, or refused in one sentence that names the file.

`KINDS` are files of their own, each with the function that reads it. `COMMANDS` read files of whole runs, as a user does.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn

import esper
import esper.runs.index
from esper.config import Config, ConfigError, load_saved, save
from esper.controller.learned import ControllerError, load_controller, save_controller
from esper.experiment.config import GrowTaskConfig
from esper.growth import GrowthConfig, GrowthError, add_slots
from esper.league import LeagueError, LeagueStore
from esper.league.player_file import PlayerError, load_player_file, save_player
from esper.league.store import read_weights
from esper.replay_file import ReplayError, read_replay, write_replay
from esper.rl import PPO, Policy, PPOConfig
from esper.rl.checkpoints import load_learner
from esper.rl.config import NetworkConfig
from esper.rl.run_config import TrainConfig
from esper.runs import CheckpointError, CheckpointStore, EventError, read
from esper.runs.analysis import AnalysedSeed, Analysis, Estimate, MeasureResult, read_analysis, write_analysis
from esper.runs.catalog import label, open_run
from esper.runs.folder import RunError
from esper.runs.index import EventIndex
from esper.vecenv import make
from tests.faults import damaged
from tests.faults.runs import Tally, command, is_raw
from tests.runs.made import made_growth

HANGS_AFTER_S = 20.0


class Hang(BaseException):
    """A reader takes for ever; no `except Exception` sees it."""


@contextlib.contextmanager
def limited(seconds: float = HANGS_AFTER_S) -> Iterator[None]:
    """Raise Hang in the code inside if it takes longer."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True)
class FileKind:
    """A file in a folder that `make` fills. `load` gives everything that comes out of it, in a form that can be compared."""

    make: Callable[[Path], object]
    file: str
    load: Callable[[Path], object]
    error: type[Exception] | tuple[type[Exception], ...]
    others: tuple[str, ...] = ()  # files of the folder that may stand in its place
    is_part: Callable[[Any, Any], bool] = lambda found, expected: False  # whether something less was found, with a word about the rest
    has_digest: bool = True  # without one, a change that leaves something of the right form cannot be noticed


def bits(tensors: dict[str, torch.Tensor]) -> list[tuple[object, ...]]:
    return [(name, tensor.dtype, tensor.shape, tensor.numpy().tobytes()) for name, tensor in sorted(tensors.items())]


def store_at(folder: Path) -> CheckpointStore:
    return CheckpointStore(folder, kind="test")


def make_checkpoints(folder: Path) -> None:
    for step in (17, 18, 19):
        state = {"weight": torch.arange(3.0) + step, "step": step, "names": ("a", "b"), 3: None}
        store_at(folder).save(step, state, is_best=step == 18, note={"score": float(step)})


def plain(state: dict[Any, Any]) -> str:
    return repr([(key, value.tolist() if isinstance(value, torch.Tensor) else value) for key, value in state.items()])


def load_19(folder: Path) -> object:
    loaded = store_at(folder).load(folder / "step-000000000019")
    return loaded.step, loaded.note, plain(loaded.state)


def host() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def make_model(folder: Path) -> None:
    from tests.growth.host.helpers import plant_kept_seeds

    slotted = add_slots(host(), torch.zeros(2, 4), slots=["0"])
    plant_kept_seeds(slotted, "0")
    esper.save(slotted.bake(), folder / "model.safetensors")


def make_controller(folder: Path) -> None:
    from tests.controller.policies import trained_policy

    save_controller(folder / "controller.safetensors", trained_policy(), {"rounds": 3})


def load_all_of_controller(folder: Path) -> object:
    controller = load_controller(folder / "controller.safetensors")
    return repr(controller.description), bits(controller._weights)


def make_league(folder: Path) -> None:
    from tests.league.leagues import promoted, small_league

    LeagueStore(folder).save(promoted(promoted(small_league(size=2), "one"), "two"))


def load_league(folder: Path) -> object:
    league = LeagueStore(folder).load()
    return repr(league.to_state()), {name: bits(weights) for name, weights in league.weights.items()}


def make_replay(folder: Path) -> None:
    from tests.replays import staged_battle

    write_replay(folder / "a.safetensors", *staged_battle(team_size=2, size=4, frames=6))


def load_all_of_replay(folder: Path) -> object:
    replay = read_replay(folder / "a.safetensors")
    return repr(replay.info), bits(replay.tensors)


def make_player(folder: Path) -> None:
    from tests.league.arenas import small_policy, small_training

    config = small_training()
    save_player(folder / "player.safetensors", small_policy(config).state_dict(), config, "It was never trained.")


def load_player(folder: Path) -> object:
    policy, description = load_player_file(folder / "player.safetensors")
    return repr(description), bits(policy.state_dict())


def make_learner(folder: Path) -> None:
    ppo = PPO(make("cue", 2), PPOConfig(num_steps=4, num_minibatches=1, network=NetworkConfig(hidden_size=4, encoder_sizes=(4,))))
    ppo.save(folder / "learner.safetensors")
    ppo.policy.save(folder / "policy.safetensors")


# Files of a run that are read by their own functions


def make_run(folder: Path) -> None:
    """A growth run with a log, labels and an analysis."""
    made_growth(folder / "run", [1.0 / (1 + epoch) for epoch in range(5)])
    label(folder / "run", add=["keep"], note="the first one")
    seeds = [AnalysedSeed(name="1", blueprint="mlp", outcome="kept", alpha=1.0, parameters=10, flops=20)]
    one = {"1": Estimate(0.5, 0.25, 0.75)}
    measure = MeasureResult("loss", True, without=1.0, with_all=0.5, shapley=one, removal=one, alone=one, pairs=[])
    write_analysis(folder / "run", Analysis(seeds=seeds, measures=[measure], batches=4, samples=32, coalitions=2, orders=0))


def load_events(folder: Path) -> object:
    """Return the records of the log, and the kinds of the lines that were left out."""
    skipped: list[str] = []
    return [repr(record) for record in read(folder / "run/events.jsonl", on_skip=skipped.append)], skipped


def is_part_of_log(found: Any, expected: Any) -> bool:
    """Return whether a log lost lines and says so: the last ones without a word, as of a run that is being written, or others, counted."""
    records, skipped = found
    whole = expected[0]
    rest = iter(whole)
    return records == whole[: len(records)] or (all(record in rest for record in records) and bool(skipped))


def load_labels(folder: Path) -> object:
    return repr(open_run(folder / "run").labels())


def make_index(folder: Path) -> None:
    """The kept index of a log. Small logs have none otherwise."""
    esper.runs.index.CACHED_FROM = 0
    make_run(folder)
    index = EventIndex(folder / "run/events.jsonl", cache=folder / "cache")
    index.refresh()
    index.keep()
    index.wait()
    (kept,) = [path for path in (folder / "cache").iterdir() if path.name != "kept"]
    (folder / "cache" / "kept").symlink_to(kept.name)


def load_index(folder: Path) -> object:
    index = EventIndex(folder / "run/events.jsonl", cache=folder / "cache")
    index.refresh()
    return [(name, *(part.tolist() for part in index.series(name))) for name in index.names()], index.kinds


def config_kind(config: Config) -> FileKind:
    return FileKind(
        lambda folder: save(config, folder / "config.toml"),
        "config.toml",
        lambda folder: repr(load_saved(type(config), folder / "config.toml")),
        ConfigError,
    )


LAST, BEFORE = "step-000000000019", "step-000000000018"
STEP = {name: f"{LAST}/{name}" for name in ("manifest.json", "state.json", "tensors.safetensors")}
KINDS = {
    "manifest": FileKind(make_checkpoints, STEP["manifest.json"], load_19, CheckpointError, (f"{BEFORE}/manifest.json",)),
    "state": FileKind(make_checkpoints, STEP["state.json"], load_19, CheckpointError, (f"{BEFORE}/state.json",)),
    "tensors": FileKind(make_checkpoints, STEP["tensors.safetensors"], load_19, CheckpointError, (f"{BEFORE}/tensors.safetensors",)),
    "latest": FileKind(make_checkpoints, "latest", lambda folder: plain(store_at(folder).load("latest").state), CheckpointError),
    "best": FileKind(make_checkpoints, "best", lambda folder: plain(store_at(folder).load("best").state), CheckpointError),
    "model": FileKind(
        make_model,
        "model.safetensors",
        lambda folder: bits(dict(esper.load(folder / "model.safetensors", model=host()).state_dict())),
        GrowthError,
    ),
    "controller": FileKind(make_controller, "controller.safetensors", load_all_of_controller, ControllerError),
    "league": FileKind(make_league, "league.json", load_league, LeagueError),
    "league without weights": FileKind(
        make_league, "league.json", lambda folder: repr(LeagueStore(folder).load(with_weights=False).to_state()), LeagueError
    ),
    "league member": FileKind(make_league, "members/one.safetensors", load_league, LeagueError, ("members/two.safetensors",)),
    "weights to start from": FileKind(
        make_league, "members/one.safetensors", lambda folder: bits(read_weights(folder / "members/one.safetensors")), LeagueError
    ),
    "player": FileKind(make_player, "player.safetensors", load_player, PlayerError),
    "policy": FileKind(
        make_learner,
        "policy.safetensors",
        lambda folder: bits(Policy.load(folder / "policy.safetensors").state_dict()),
        CheckpointError,
    ),
    "learner": FileKind(
        make_learner,
        "learner.safetensors",
        lambda folder: bits(load_learner(folder / "learner.safetensors")["policy"]),
        CheckpointError,
        ("policy.safetensors",),
    ),
    "config of a PPO run": config_kind(TrainConfig(env="cue", env_args={"delay": 20})),
    "config of a growth run": config_kind(GrowthConfig()),
    "config of esper grow": config_kind(GrowTaskConfig(task="digits", epochs=7)),
    "replay": FileKind(make_replay, "a.safetensors", load_all_of_replay, ReplayError),
    "events": FileKind(make_run, "run/events.jsonl", load_events, EventError, is_part=is_part_of_log, has_digest=False),
    "labels": FileKind(make_run, "run/labels.json", load_labels, RunError, ("run/analysis.json",)),
    "analysis": FileKind(make_run, "run/analysis.json", lambda folder: repr(read_analysis(folder / "run")), RunError, ("run/labels.json",)),
    "kept index": FileKind(make_index, "cache/kept", load_index, EventError),
}
GROUPS = {  # rows of the table
    "checkpoint, latest, best": ("manifest", "state", "tensors", "latest", "best"),
    "model, policy, learner": ("model", "policy", "learner"),
    "controller": ("controller",),
    "player, league": ("player", "league", "league without weights", "league member", "weights to start from"),
    "config.toml, grow.toml": ("config of a PPO run", "config of a growth run", "config of esper grow"),
    "replay": ("replay",),
    "events.jsonl": ("events",),
    "labels.json": ("labels",),
    "analysis.json": ("analysis",),
    "kept index of events": ("kept index",),
}


def read_damaged(name: str, count: int, folder: Path, *, seed: int = 0) -> Tally:
    """Damage a file of one kind so often, and read it each time."""
    kind, random, tally = KINDS[name], np.random.default_rng([seed, *name.encode()]), Tally()
    kind.make(folder)
    path = (folder / kind.file).resolve()
    content, expected = path.read_bytes(), kind.load(folder)
    others = [other for other in ((folder / other).read_bytes() for other in kind.others) if other != content]
    for number in range(count):
        is_swapped = bool(others) and number % 20 == 0
        changed = others[number // 20 % len(others)] if is_swapped else damaged(content, random)
        path.unlink()  # a file that is truncated waits for the disk, a new one does not
        path.write_bytes(changed)
        tally.trials += 1
        what = f"{name}, damage {number}{' (swapped)' if is_swapped else ''}"
        try:
            with limited():
                found = kind.load(folder)
        except Hang:
            tally.hung.append(what)
        except kind.error as error:
            text = str(error)
            if "\n" in text.strip() or not ({*path.parts[-2:], Path(kind.file).name} & set(_words(text)) or str(folder) in text):
                tally.raw.append(f"{what}: does not name the file in one line: {text[:300]}")
            else:
                tally.refused += 1
        except Exception as error:
            tally.raw.append(f"{what}: {type(error).__name__}: {str(error)[:300]}")
        else:
            if found == expected:
                tally.right += 1
            elif kind.is_part(found, expected):
                tally.part += 1
            elif not kind.has_digest:
                tally.unnoticed += 1
            else:
                tally.wrong.append(f"{what}: {_difference(content, changed)}")
    return tally


def _words(text: str) -> list[str]:
    return [part for word in text.split() for part in word.strip(",;:()'\"").split("/")]


def _difference(content: bytes, changed: bytes) -> str:
    """Show the first place at which two contents differ."""
    place = next(
        (at for at, (one, other) in enumerate(zip(content, changed, strict=False)) if one != other), min(len(content), len(changed))
    )
    return f"{content[max(0, place - 20) : place + 20]!r} became {changed[max(0, place - 20) : place + 20]!r}"


# Commands on whole runs

ALL_COMMANDS = (
    ["runs", "ls", "."],
    ["runs", "show", "run"],
    ["report", "run"],
    ["compare", "run", "other"],
    ["runs", "diff", "run", "other"],
    ["runs", "export", "run", "--to", "out.csv"],
    ["query", "select count(*) from events", "run"],
    ["watch", "--terminal", "run"],
    ["runs", "tag", "run", "x"],
)
NEEDS = {"query": "duckdb"}  # commands that need an extra, and its package


def is_importable(package: str) -> bool:
    try:
        importlib.import_module(package)
    except ImportError:
        return False
    return True


LEFT_OUT = {name: package for name, package in NEEDS.items() if not is_importable(package)}
COMMANDS = [argv for argv in ALL_COMMANDS if argv[0] not in LEFT_OUT]


def files_of(run: Path) -> list[Path]:
    """Return the files of a run that something reads."""
    return sorted(path.relative_to(run) for path in run.rglob("*") if path.is_file() and path.suffix not in (".html", ".md", ".lock"))


def run_quietly(argv: list[str], folder: Path) -> tuple[int, str]:
    """Run a command in this process and return its exit code and what it printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), limited():
        return command(argv, folder), out.getvalue()


def command_damaged(run: Path, resume: list[str], count: int, folder: Path, *, seed: int = 0) -> Tally:
    """Damage one file of a run after the other, so often, and run two commands and, each third time, a resumed training on it."""
    random, tally, files = np.random.default_rng(seed), Tally(), files_of(run)
    here = Path.cwd()
    for number in range(count):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(run.parent, folder)
        shutil.copytree(run, folder / "other")
        file = files[number % len(files)]
        content = (folder / "run" / file).read_bytes()
        if not content:
            continue
        (folder / "run" / file).write_bytes(damaged(content, random))
        chosen = [COMMANDS[(number + at) % len(COMMANDS)] for at in (0, 4)] + ([resume] if number % 3 == 0 else [])
        for argv in chosen:
            tally.trials += 1
            what = f"{' '.join(argv[:3])} with a damaged {file} ({number})"
            try:
                code, printed = run_quietly(argv, folder)
            except Hang:
                tally.hung.append(what)
                continue
            except BaseException as error:
                tally.raw.append(f"{what}: {type(error).__name__}: {error}")
                continue
            text = " ".join(printed.split())[-300:]
            if is_raw(printed) or code not in (0, 1, 2):
                tally.raw.append(f"{what}: exit code {code}: {text}")
            elif code:
                tally.refused += 1
            else:
                tally.right += 1
    os.chdir(here)
    return tally
