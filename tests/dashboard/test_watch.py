"""`esper arena watch` without a browser: refused replays, and the requests the server answers."""

from __future__ import annotations

import base64
import http.client
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import msgspec
import pytest
from safetensors.torch import save_file

from esper.dashboard.watch import list_replays, serve
from esper.replay_file import DRAWN, ReplayError, drawn_part, read_replay, write_replay
from tests.replays import WON, staged_battle


@pytest.fixture
def replay(tmp_path: Path) -> Path:
    return write_replay(tmp_path / "replays" / "one.safetensors", *staged_battle(team_size=2, size=16, frames=12))


def test_a_file_or_the_replays_of_a_run_are_played(replay: Path) -> None:
    assert list_replays(replay) == [replay]
    assert list_replays(replay.parent.parent) == [replay]


def test_a_run_without_replays_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match=r"there are no replays in .*replays; record one"):
        serve(tmp_path, show=False)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match=r"nothing\.safetensors does not exist"):
        serve(tmp_path / "nothing.safetensors", show=False)


def test_a_replay_of_another_version_is_refused_before_anything_is_served(tmp_path: Path) -> None:
    tensors, info = staged_battle(team_size=2, size=16, frames=12)
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
    with pytest.raises(ImportError, match=r"needs NiceGUI; install it with: pip install 'esper-grow\[dashboard\]'"):
        serve(replay, show=False)


def test_the_page_gets_the_tensors_of_a_battle_in_known_types() -> None:
    pytest.importorskip("nicegui")
    from esper.dashboard.page import HERE

    sent = drawn_part(WON)
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
        with pytest.raises(OSError, match=rf"port {port} of 127\.0\.0\.1 cannot be used .*; choose another port, or 0"):
            serve(replay, port=port, show=False)


# Replays that are not there


def test_a_broken_replay_does_not_hide_the_others_and_a_link_is_not_one(replay: Path) -> None:
    lost, link = replay.with_name("lost.safetensors"), replay.with_name("link.safetensors")
    lost.write_bytes(b"broken")
    link.symlink_to("nowhere.safetensors")
    assert set(list_replays(replay.parent.parent)) == {lost, replay}
    with pytest.raises(ReplayError, match=r"link\.safetensors is a link to nowhere\.safetensors, which does not exist"):
        read_replay(link)


def test_a_run_whose_replays_are_all_broken_is_refused_with_the_reason(replay: Path) -> None:
    replay.write_bytes(b"broken")
    with pytest.raises(ReplayError, match=r"one\.safetensors cannot be read as a safetensors file"):
        serve(replay.parent.parent, show=False)


# Requests


SERVE = """
import sys
from esper.dashboard.watch import serve

serve(sys.argv[1], show=False, announce=lambda address: print(address, flush=True))
"""
SOCKET = "/_nicegui_ws/socket.io/?EIO=4&transport="


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a server that plays the replays of a run: the newest is broken, and one has a name that is not UTF-8."""
    pytest.importorskip("nicegui")
    run = tmp_path_factory.mktemp("run")
    path = write_replay(run / "replays" / "one.safetensors", *staged_battle(team_size=2, size=16, frames=12))
    os.rename(path, os.fsencode(run / "replays") + b"/odd-\xff.safetensors")
    write_replay(path, *staged_battle(team_size=2, size=16, frames=12))
    (run / "replays" / "lost.safetensors").write_bytes(b"broken")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    with subprocess.Popen([sys.executable, "-c", SERVE, str(run)], stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        try:
            yield int(server.stdout.readline().strip().rstrip("/").rpartition(":")[2])
        finally:
            server.send_signal(signal.SIGINT)
            assert server.wait(timeout=60) == 0


def ask(port: int, path: str, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.putrequest("GET", path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    text = "" if answer.status == 101 else answer.read().decode(errors="replace")
    connection.close()
    return answer.status, text


def handshake(port: int, **headers: str) -> int:
    key = base64.b64encode(os.urandom(16)).decode()
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec_WebSocket_Version": "13", "Sec_WebSocket_Key": key}
    return ask(port, f"{SOCKET}websocket", **upgrade, **headers)[0]


FOREIGN = ["http://evil.example", "https://127.0.0.1.evil.example", "null", "http://127.0.0.1:1", "http://127.0.0.1", "file://", "x", ""]


@pytest.mark.slow
@pytest.mark.parametrize("origin", FOREIGN)
def test_pages_of_other_sites_get_neither_a_websocket_nor_files(port: int, origin: str) -> None:
    assert handshake(port, Origin=origin) == 403
    assert ask(port, f"{SOCKET}polling", Origin=origin)[0] == 403
    assert ask(port, "/replays/one.safetensors", Origin=origin)[0] == 403


@pytest.mark.slow
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_page_itself_gets_a_websocket_and_its_files(port: int, host: str) -> None:
    own = {"Host": f"{host}:{port}", "Origin": f"http://{host}:{port}"}
    assert handshake(port, **own) == 101
    assert ask(port, f"{SOCKET}polling", **own)[0] == 200
    assert ask(port, "/replays/one.safetensors", **own)[0] == 200
    assert ask(port, "/")[0] == 200, "a browser sends no origin with the address that was typed into it"
    assert handshake(port) == 101, "a program that is no browser sends none at all"


@pytest.mark.slow
def test_a_foreign_host_name_that_resolves_here_is_refused(port: int) -> None:
    rebound = {"Host": f"evil.example:{port}", "Origin": f"http://evil.example:{port}"}
    assert handshake(port, **rebound) in (400, 403)
    assert ask(port, "/", **rebound)[0] in (400, 403)
    assert ask(port, "/", Host=f"evil.example:{port}")[0] == 400


@pytest.mark.slow
def test_the_page_lists_replays_beside_a_broken_one_and_names_it(port: int) -> None:
    assert ask(port, "/")[0] == 200
    rows = {row["name"]: row for row in json.loads(ask(port, "/replays")[1])}
    assert (rows["one"]["url"], rows["one"]["problem"]) == ("/replays/one.safetensors", None)
    assert "lost.safetensors cannot be read as a safetensors file" in rows["lost"]["problem"]
    status, text = ask(port, "/replays/lost.safetensors")
    assert (status, "cannot be read as a safetensors file" in text) == (422, True)
    assert ask(port, "/replays/never.safetensors")[0] == 404


@pytest.mark.slow
def test_a_replay_whose_name_is_not_utf8_is_played(port: int) -> None:
    assert "odd-" in ask(port, "/replays")[1]
    assert ask(port, f"/replays/{quote('odd-' + chr(92) + 'udcff.safetensors')}")[0] == 200
