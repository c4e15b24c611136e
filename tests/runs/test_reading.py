"""Files that are too deep, too large, of impossible shapes or not regular: each reader refuses them in one sentence."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import nn

import esper
from esper.config import Config, ConfigError, load
from esper.controller.learned import ControllerError, load_controller
from esper.growth import GrowthError
from esper.league.league import LeagueError
from esper.league.store import LeagueStore, read_weights
from esper.replay_file import ReplayError, read_replay
from esper.runs import CheckpointError, EventError, EventLog, read
from esper.runs.checkpoints import read_manifest

DEPTH = 100_000
DEEP_JSON = {"lists": "[" * DEPTH + "]" * DEPTH, "objects": '{"a":' * DEPTH + "1" + "}" * DEPTH, "middling": "[" * 500 + "]" * 500}
DEEP_TOML = {
    "lists": "a = " + "[" * DEPTH + "]" * DEPTH,
    "inline tables": "a = " + "{a = " * DEPTH + "1" + "}" * DEPTH,
    "dotted key": ".".join("a" * DEPTH) + " = 1",
    "dotted table": f"[{'.'.join('a' * DEPTH)}]",
    "quoted parts": ".".join(['"a"'] * DEPTH) + " = 1",
    "middling": "a = " + "[" * 200 + "]" * 200,
    "tables one by one": "\n".join(f"[{'.'.join('a' * depth)}]" for depth in range(1, 200)),
}


class Anything(Config):
    a: dict[str, Any] | list[Any] = {}


def model_from(path: Path) -> object:
    return esper.load(path, model=nn.Linear(2, 2))


def manifest_of(path: Path) -> object:
    return read_manifest(path.parent)


def league_of(path: Path) -> object:
    return LeagueStore(path.parent).load()


JSON_READERS: dict[str, tuple[str, Callable[[Path], object], type[Exception]]] = {
    "checkpoint": ("manifest.json", manifest_of, CheckpointError),
    "league": ("league.json", league_of, LeagueError),
}
TENSOR_READERS: dict[str, tuple[Callable[[Path], object], type[Exception]]] = {
    "replay": (read_replay, ReplayError),
    "controller": (load_controller, ControllerError),
    "member of a league": (read_weights, LeagueError),
    "model": (model_from, GrowthError),
}
READERS = {
    **JSON_READERS,
    **{reader: ("a.safetensors", *call) for reader, call in TENSOR_READERS.items()},
    "config": ("a.toml", lambda path: load(Anything, path), ConfigError),
}


@pytest.mark.parametrize("reader", JSON_READERS)
@pytest.mark.parametrize("content", DEEP_JSON)
def test_json_that_is_too_deep_is_refused(reader: str, content: str, tmp_path: Path) -> None:
    name, call, error = JSON_READERS[reader]
    (tmp_path / name).write_text(DEEP_JSON[content])
    with pytest.raises(error, match=f"{name}.*nested more than 100 levels deep"):
        call(tmp_path / name)


@pytest.mark.parametrize(("reader", "key"), [("replay", "info"), ("controller", "esper controller")])
@pytest.mark.parametrize("content", DEEP_JSON)
def test_a_description_that_is_too_deep_is_refused(reader: str, key: str, content: str, tmp_path: Path) -> None:
    call, error = TENSOR_READERS[reader]
    (tmp_path / "a.safetensors").write_bytes(save({"w": torch.ones(1)}, {key: DEEP_JSON[content]}))
    with pytest.raises(error, match=r"a\.safetensors.*nested more than 100 levels deep"):
        call(tmp_path / "a.safetensors")


@pytest.mark.parametrize("content", DEEP_TOML)
def test_toml_that_is_too_deep_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(DEEP_TOML[content])
    with pytest.raises(ConfigError, match=r"a\.toml.*nested more than 100 levels deep"):
        load(Anything, tmp_path / "a.toml")


def test_text_that_only_looks_deep_is_read(tmp_path: Path) -> None:
    text = f"\"{'[' * 1000}\" and '{'.'.join('a' * 50)}'"
    (tmp_path / "a.toml").write_text(f"# {'a.' * 40}\na = {{text = {json.dumps(text)}}}\n")
    assert load(Anything, tmp_path / "a.toml").a == {"text": text}


def test_an_event_that_is_too_deep_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    header = '{"kind":"header","time":0.0,"run":"a","rank":0,"env":null,"schema":1,"esper":"0"}'
    deep = "[" * 20_000 + "]" * 20_000  # still within the length of a line
    path.write_text("\n".join([header, '{"kind":"resumed","deep":' + deep + "}", header, ""]))
    with pytest.raises(EventError, match=r"line 2 of .*events\.jsonl is broken"):
        list(read(path))
    path.write_text(deep + "\n")
    with pytest.raises(EventError, match=r"events\.jsonl does not begin with the header"):
        list(read(path))


def test_an_event_log_of_one_endless_line_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path, run="a"):
        pass
    os.truncate(path, 2**40)  # takes no room on the disk
    with pytest.raises(EventError, match=r"line 2 of .*events\.jsonl is broken: it has more than 65,536 bytes"):
        list(read(path))
    with pytest.raises(EventError, match=r"cannot resume .*events\.jsonl at byte 1000: no line ends there"):
        EventLog.resume(path, 1000)
    path.write_bytes(b"")
    os.truncate(path, 2**40)
    for call in (lambda: list(read(path)), lambda: EventLog.resume(path, 1000)):
        with pytest.raises(EventError, match=r"events\.jsonl"):
            call()


def test_a_very_long_wrong_value_is_shown_by_its_beginning(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(f'a = "{"x" * 100_000}"')
    with pytest.raises(ConfigError, match=r"got 'xxx.*… \(100,002 characters\)") as caught:
        load(Anything, tmp_path / "a.toml")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_is_not_regular_is_refused_without_waiting(reader: str, tmp_path: Path) -> None:
    name, call, error = READERS[reader]
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        make(tmp_path / name)
        with pytest.raises(error, match=name):
            call(tmp_path / name)
        (tmp_path / name).unlink()


@pytest.mark.parametrize("reader", [*TENSOR_READERS, "config"])
def test_a_file_that_the_system_refuses_is_refused_with_the_reason(reader: str, tmp_path: Path) -> None:
    name, call, error = READERS[reader]
    (tmp_path / name).mkdir()
    with pytest.raises(error, match="folder"):
        call(tmp_path / name)
    with pytest.raises(error, match="the name xxxxxxxxxxxxxxxxxxxx… is too long"):
        call(tmp_path / ("x" * 300))
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(error, match="loop"):
        call(tmp_path / "loop")


@pytest.mark.parametrize("reader", READERS)
def test_a_file_of_impossible_size_is_refused_unread(reader: str, tmp_path: Path) -> None:
    name, call, error = READERS[reader]
    (tmp_path / name).touch()
    os.truncate(tmp_path / name, 2**43)  # takes no room on the disk
    with pytest.raises(error, match=rf"{name}.*8,796,093,022,208 bytes"):
        call(tmp_path / name)


SHAPES = {"beyond torch": [2**64 - 1, 0], "empty but huge": [0, 2**62], "many dimensions": [1] * 100}


@pytest.mark.parametrize("reader", TENSOR_READERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_tensor_of_an_impossible_shape_is_refused_by_name(reader: str, shape: str, tmp_path: Path) -> None:
    call, error = TENSOR_READERS[reader]
    size = 0 if 0 in SHAPES[shape] else 4
    metadata = {"info": "{}", "esper controller": "{}"}
    header = json.dumps({"__metadata__": metadata, "some/w": {"dtype": "F32", "shape": SHAPES[shape], "data_offsets": [0, size]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))
    with pytest.raises(error, match=r"a\.safetensors.*some/w has (the shape|\d+ dimensions)"):
        call(tmp_path / "a.safetensors")
