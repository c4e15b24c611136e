"""Damaged files: each of 500 random damages per kind of file is refused with a reason or changes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import esper
from esper.config import Config, ConfigError, load_saved, save
from esper.controller.learned import ControllerError, load_controller, save_controller
from esper.experiment.config import GrowTaskConfig
from esper.growth import GrowthConfig, GrowthError, add_slots
from esper.growth.events import LoaderRestarted
from esper.league import LeagueError, LeagueStore
from esper.league.store import read_weights
from esper.replay_file import ReplayError, read_replay, write_replay
from esper.rl.run_config import TrainConfig
from esper.runs import CheckpointError, CheckpointStore, EventError, EventLog, read
from tests.faults import damaged
from tests.growth.host.helpers import plant_kept_seeds
from tests.league.leagues import promoted, small_league
from tests.replays import staged_battle

DAMAGES = 500


@dataclass(frozen=True)
class FileKind:
    """A file in a folder that `make` fills. `load` gives everything that comes out of it, in a form that can be compared."""

    make: Callable[[Path], object]
    file: str
    load: Callable[[Path], object]
    error: type[Exception]


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


def load_latest(folder: Path) -> object:
    return plain(store_at(folder).load("latest").state)


def load_best(folder: Path) -> object:
    return plain(store_at(folder).load("best").state)


def host() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def make_model(folder: Path) -> None:
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
    LeagueStore(folder).save(promoted(promoted(small_league(size=2), "one"), "two"))


def load_league(folder: Path) -> object:
    league = LeagueStore(folder).load()
    return repr(league.to_state()), {name: bits(weights) for name, weights in league.weights.items()}


def load_names_of_league(folder: Path) -> object:
    return repr(LeagueStore(folder).load(with_weights=False).to_state())


def make_replay(folder: Path) -> None:
    write_replay(folder / "a.safetensors", *staged_battle(team_size=2, size=4, frames=6))


def load_all_of_replay(folder: Path) -> object:
    replay = read_replay(folder / "a.safetensors")
    return repr(replay.info), bits(replay.tensors)


def config_kind(config: Config) -> FileKind:
    return FileKind(
        lambda folder: save(config, folder / "config.toml"),
        "config.toml",
        lambda folder: repr(load_saved(type(config), folder / "config.toml")),
        ConfigError,
    )


LAST = "step-000000000019"
KINDS = {
    "manifest": FileKind(make_checkpoints, f"{LAST}/manifest.json", load_19, CheckpointError),
    "state": FileKind(make_checkpoints, f"{LAST}/state.json", load_19, CheckpointError),
    "tensors": FileKind(make_checkpoints, f"{LAST}/tensors.safetensors", load_19, CheckpointError),
    "latest": FileKind(make_checkpoints, "latest", load_latest, CheckpointError),
    "best": FileKind(make_checkpoints, "best", load_best, CheckpointError),
    "model": FileKind(
        make_model,
        "model.safetensors",
        lambda folder: bits(dict(esper.load(folder / "model.safetensors", model=host()).state_dict())),
        GrowthError,
    ),
    "controller": FileKind(make_controller, "controller.safetensors", load_all_of_controller, ControllerError),
    "league": FileKind(make_league, "league.json", load_league, LeagueError),
    "league without weights": FileKind(make_league, "league.json", load_names_of_league, LeagueError),
    "league member": FileKind(make_league, "members/one.safetensors", load_league, LeagueError),
    "weights to start from": FileKind(
        make_league, "members/one.safetensors", lambda folder: bits(read_weights(folder / "members/one.safetensors")), LeagueError
    ),
    "config of a PPO run": config_kind(TrainConfig(env="cue", env_args={"delay": 20})),
    "config of a growth run": config_kind(GrowthConfig()),
    "config of esper grow": config_kind(GrowTaskConfig(task="digits", epochs=7)),
    "replay": FileKind(make_replay, "a.safetensors", load_all_of_replay, ReplayError),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_damaged_file_is_refused_or_loads_unchanged(name: str, tmp_path: Path) -> None:
    kind, random = KINDS[name], np.random.default_rng(sum(name.encode()))
    kind.make(tmp_path)
    path = tmp_path / kind.file
    content, expected = path.read_bytes(), kind.load(tmp_path)
    refused, wrong = 0, []
    for _ in range(DAMAGES):
        changed = damaged(content, random)
        path.unlink()  # a file that is truncated waits for the disk, a new one does not
        path.write_bytes(changed)
        try:
            if kind.load(tmp_path) != expected:
                wrong.append(changed)
        except kind.error:
            refused += 1
    assert not wrong, f"{len(wrong)} of {DAMAGES} loaded something else, such as {wrong[0][:300]!r}"
    assert refused > 0 or name in ("latest", "best"), "pointers that are lost are found again"


@pytest.mark.parametrize("file", ["manifest.json", "state.json", "tensors.safetensors"])
def test_a_damaged_latest_checkpoint_falls_back_to_the_one_before(file: str, tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    make_checkpoints(tmp_path)
    content = (tmp_path / LAST / file).read_bytes()
    states = {step: plain(store_at(tmp_path).load(tmp_path / f"step-{step:012d}").state) for step in (18, 19)}
    for _ in range(DAMAGES // 5):
        (tmp_path / LAST / file).write_bytes(damaged(content, random))
        loaded = store_at(tmp_path).load()
        assert plain(loaded.state) == states[loaded.step]
        assert [refused.path.name for refused in loaded.skipped] == ([LAST] if loaded.step == 18 else [])


def test_a_damaged_log_is_refused_or_read_without_an_internal_error(tmp_path: Path) -> None:
    """Its lines have no digest: they are for people to look at, and a run that goes on does not read them."""
    random = np.random.default_rng(0)
    path = tmp_path / "events.jsonl"
    with EventLog(path, run="run") as log:
        for epoch in range(5):
            log.emit(LoaderRestarted(epoch=epoch))
    content = path.read_bytes()
    for _ in range(DAMAGES):
        path.write_bytes(damaged(content, random))
        with contextlib.suppress(EventError):
            list(read(path))
