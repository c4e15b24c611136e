"""The file of a replay: exact round trips, atomic writing, and refused files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import esper
from esper.replay_file import LAYOUT, FeedItem, ReplayError, ReplayInfo, find_replays, read_replay, write_replay
from tests.replays import staged_battle

Battle = tuple[dict[str, Tensor], ReplayInfo]


@pytest.fixture(scope="module")
def battle() -> Battle:
    return staged_battle(team_size=2, size=16, frames=12)


def rewritten(path: Path, battle: Battle, change: Callable[[dict[str, object]], object]) -> Path:
    """The replay with another description, as another program might have written it."""
    raw = json.loads(msgspec.json.encode(battle[1]))
    change(raw)
    save_file(battle[0], path, metadata={"info": json.dumps(raw)})
    return path


def test_a_replay_comes_back_as_it_was_written(tmp_path: Path, battle: Battle) -> None:
    tensors, info = battle
    replay = read_replay(write_replay(tmp_path / "new" / "a.safetensors", tensors, info))
    assert replay.info == info
    assert replay.frames == 12
    assert set(replay.tensors) == set(tensors)
    for name, tensor in tensors.items():
        assert replay.tensors[name].dtype == tensor.dtype
        assert torch.equal(replay.tensors[name], tensor)


def test_tensors_that_share_memory_or_have_gaps_are_written_whole(tmp_path: Path, battle: Battle) -> None:
    tensors = dict(battle[0])
    tensors["frames/units"] = tensors["frames/units"].transpose(0, 1).contiguous().transpose(0, 1)
    tensors["keyframes/again"] = tensors["keyframes/at"]
    replay = read_replay(write_replay(tmp_path / "a.safetensors", tensors, battle[1]))
    assert torch.equal(replay.tensors["frames/units"], battle[0]["frames/units"])
    assert torch.equal(replay.tensors["keyframes/again"], battle[0]["keyframes/at"])


def test_a_crash_while_writing_leaves_the_older_file(tmp_path: Path, battle: Battle, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_replay(tmp_path / "a.safetensors", *battle)
    before = path.read_bytes()

    def crash(source: object, target: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(OSError, match="no space"):
        write_replay(path, battle[0], msgspec.structs.replace(battle[1], seed=8))
    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize("name", LAYOUT)
def test_a_missing_tensor_is_named(tmp_path: Path, battle: Battle, name: str) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {key: value for key, value in battle[0].items() if key != name}
    with pytest.raises(ReplayError, match=f"{name} is missing"):
        write_replay(path, tensors, battle[1])
    assert not path.exists()
    save_file(tensors, path, metadata={"info": msgspec.json.encode(battle[1]).decode()})
    with pytest.raises(ReplayError, match=rf"a\.safetensors is not a complete replay: {name} is missing; record"):
        read_replay(path)


@pytest.mark.parametrize("name", [name for name, (dimensions, _) in LAYOUT.items() if len(dimensions) > 1])
def test_a_wrong_shape_is_named_with_the_right_one(tmp_path: Path, battle: Battle, name: str) -> None:
    wrong = battle[0][name][..., :-1]
    with pytest.raises(ReplayError, match=rf"{name} has the shape \[[\d, ]+\], not \["):
        write_replay(tmp_path / "a.safetensors", {**battle[0], name: wrong}, battle[1])


@pytest.mark.parametrize("name", LAYOUT)
def test_a_wrong_type_is_named(tmp_path: Path, battle: Battle, name: str) -> None:
    with pytest.raises(ReplayError, match=rf"{name} is of float64, not (float32|u?int\d+)"):
        write_replay(tmp_path / "a.safetensors", {**battle[0], name: battle[0][name].double()}, battle[1])


@pytest.mark.parametrize(
    ("name", "length"), [("frames/score", 11), ("actions/fire", 12), ("actions/message", 12), ("keyframes/units/heat", 3)]
)
def test_tensors_that_do_not_fit_together_are_refused(tmp_path: Path, battle: Battle, name: str, length: int) -> None:
    shape = (length, *battle[0].get(name, torch.zeros(0, 4)).shape[1:])
    tensors = {**battle[0], name: torch.zeros(shape, dtype=getattr(torch, LAYOUT[name][1] if name in LAYOUT else "float32"))}
    with pytest.raises(ReplayError, match=f"{name} has the shape"):
        write_replay(tmp_path / "a.safetensors", tensors, battle[1])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"unit_columns": ("x", "y")}, "unit_columns lacks z, heading"),
        ({"unit_classes": ["medium", "tank", "medium", "tank"]}, "class_table lacks tank"),
        ({"unit_classes": ["medium", "light", "medium"]}, "3 units, which are not two teams"),
        ({"feed": [FeedItem(frame=12, kind="end", text="over")]}, "the feed item 'end' is at frame 12, but there are 12 frames"),
    ],
)
def test_a_description_that_does_not_fit_is_refused(tmp_path: Path, battle: Battle, changes: dict[str, object], problem: str) -> None:
    with pytest.raises(ReplayError, match=problem):
        write_replay(tmp_path / "a.safetensors", battle[0], msgspec.structs.replace(battle[1], **changes))


def test_a_replay_of_another_format_names_both_versions(tmp_path: Path, battle: Battle) -> None:
    def change(raw: dict[str, object]) -> None:
        raw.clear()
        raw.update(format_version=99, esper_version="7.5.0")

    path = rewritten(tmp_path / "later.safetensors", battle, change)
    with pytest.raises(
        ReplayError, match=rf"later\.safetensors is a replay of format 99, written by esper 7\.5\.0; this is esper {esper.__version__}"
    ):
        read_replay(path)


def test_a_description_that_lacks_something_is_refused_by_name(tmp_path: Path, battle: Battle) -> None:
    path = rewritten(tmp_path / "a.safetensors", battle, lambda raw: raw.pop("zone_radius"))
    with pytest.raises(ReplayError, match=r"a\.safetensors is not a replay: .*zone_radius"):
        read_replay(path)


def test_files_of_something_else_are_refused(tmp_path: Path, battle: Battle) -> None:
    text = tmp_path / "text.safetensors"
    text.write_text("this is not what you think")
    with pytest.raises(ReplayError, match=r"text\.safetensors cannot be read as a safetensors file"):
        read_replay(text)
    weights = tmp_path / "weights.safetensors"
    save_file({"weight": torch.zeros(2)}, weights)
    with pytest.raises(ReplayError, match=r"weights\.safetensors is not a replay but another safetensors file"):
        read_replay(weights)
    with pytest.raises(ReplayError, match="does not exist; give the file of a replay"):
        read_replay(tmp_path / "nothing")
    with pytest.raises(ReplayError, match="is a folder; give the file of a replay"):
        read_replay(tmp_path)


def test_a_truncated_replay_is_refused(tmp_path: Path, battle: Battle) -> None:
    path = write_replay(tmp_path / "a.safetensors", *battle)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ReplayError, match=r"a\.safetensors is damaged: .* copy it whole"):
        read_replay(path)


def test_other_programs_can_read_the_file(tmp_path: Path, battle: Battle) -> None:
    path = write_replay(tmp_path / "a.safetensors", *battle)
    assert torch.equal(load_file(path)["frames/score"], battle[0]["frames/score"])


def test_the_replays_of_a_run_are_found_newest_first(tmp_path: Path, battle: Battle) -> None:
    assert find_replays(tmp_path) == []
    paths = [write_replay(tmp_path / "replays" / f"{name}.safetensors", *battle) for name in ("b", "c", "a")]
    for age, path in enumerate(paths):
        os.utime(path, (1000 - age, 1000 - age))
    (tmp_path / "replays" / "notes.txt").write_text("no replay")
    assert find_replays(tmp_path) == paths
