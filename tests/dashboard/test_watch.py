"""What is wrong with what shall be played is said before a page is served."""

from __future__ import annotations

import importlib.util
import json
import re
import socket
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import save_file

from esper.dashboard.watch import list_replays, serve
from esper.replay_file import DRAWN, ReplayError, write_replay
from tests.replays import WON, staged_battle


@pytest.fixture
def replay(tmp_path: Path) -> Path:
    return write_replay(tmp_path / "replays" / "one.safetensors", *staged_battle(teams=2, size=16, frames=12))


def test_a_file_is_played_itself_and_a_run_by_its_replays(replay: Path) -> None:
    assert list_replays(replay) == [replay]
    assert list_replays(replay.parent.parent) == [replay]


def test_a_run_without_replays_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match=r"there are no replays in .*replays; record one"):
        serve(tmp_path, show=False)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match=r"nothing\.safetensors does not exist"):
        serve(tmp_path / "nothing.safetensors", show=False)


def test_a_replay_of_another_version_is_refused_before_anything_is_served(tmp_path: Path) -> None:
    tensors, info = staged_battle(teams=2, size=16, frames=12)
    raw = {**json.loads(msgspec.json.encode(info)), "format_version": 0, "esper_version": "0.0.1"}
    path = tmp_path / "old.safetensors"
    save_file(tensors, path, metadata={"info": json.dumps(raw)})
    told: list[str] = []
    with pytest.raises(ReplayError, match=r"format 0, written by esper 0\.0\.1"):
        serve(path, show=False, announce=told.append)
    assert told == []


def test_without_nicegui_the_extra_is_named(replay: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None if name == "nicegui" else found(name, package))
    with pytest.raises(ImportError, match=r"needs NiceGUI; install it with: pip install 'esper\[dashboard\]'"):
        serve(replay, show=False)


def test_the_page_gets_of_a_recorded_battle_what_it_reads_in_types_that_it_knows() -> None:
    pytest.importorskip("nicegui")
    from esper.dashboard.page import HERE, for_the_browser

    sent = for_the_browser(WON)
    header = json.loads(sent[8 : 8 + int.from_bytes(sent[:8], "little")])
    assert set(header) == {"__metadata__", *DRAWN}
    known = re.findall(r"(\w+): \w+Array", (HERE / "player" / "replay.js").read_text(encoding="utf-8"))
    assert {entry["dtype"] for name, entry in header.items() if name in DRAWN} <= set(known)


def test_a_port_that_is_taken_is_refused_with_what_to_do(replay: Path) -> None:
    pytest.importorskip("nicegui")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"port {port} of 127\.0\.0\.1 cannot be used .*; choose another, or 0"):
            serve(replay, port=port, show=False)
