"""`esper arena replay` and `esper arena watch`, and the replays written by `eval` and `match`."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import msgspec
import pytest

from esper.cli.main import main
from esper.replay_file import read_replay, write_replay
from tests.commands import assert_explains, last_line
from tests.replays import staged_battle

MATCH = ["arena", "match", "strong", "weak", "--team-size", "1", "--size", "16", "--battles", "2", "--device", "cpu"]
pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


@pytest.fixture(scope="module")
def won(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The replay of a battle between bots."""
    path = tmp_path_factory.mktemp("replays") / "won.safetensors"
    assert main([*MATCH, "--replay", str(path)]) == 0
    return path


@pytest.fixture
def staged(tmp_path: Path) -> Path:
    """A folder with one replay of a staged battle."""
    tensors, info = staged_battle(team_size=2, size=32, frames=40)
    write_replay(tmp_path / "run/replays/staged.safetensors", tensors, info)
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["replay"], "FILE_OR_RUN"),
        (["replay", "nowhere"], "there is no file or folder nowhere; give a replay, or the folder of a run"),
        (["replay", "empty"], "there are no replays in empty/replays"),
        (["replay", "text"], "text cannot be read as a safetensors file"),
        (["watch", "nowhere"], "there is no file or folder nowhere; give a replay, or the folder of a run"),
        (["watch", "empty"], "there are no replays in empty/replays"),
        (["watch", "text"], "text cannot be read as a safetensors file"),
        (["watch", "run", "--port", "70000", "--no-show"], "port 70000 of 127.0.0.1 cannot be used"),
        (["match", "strong", "weak", "--replay", "text/file"], "no replay can be written to text/file.safetensors; choose another file"),
    ],
)
def test_a_mistake_is_explained(argv: list[str], message: str, staged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if argv[0] == "watch":
        pytest.importorskip("nicegui")
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("a text")
    assert_explains(["arena", *argv], message, capsys)


def test_a_page_without_nicegui_is_refused_with_how_to_get_it(
    staged: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["arena", "watch", str(staged)]) == 2
    assert "pip install 'esper-grow[dashboard]'" in capsys.readouterr().err


def test_a_replay_is_described_with_players_winner_and_feed(staged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = staged / "replays/staged.safetensors"
    info = read_replay(path).info
    assert main(["arena", "replay", str(path), "--json"]) == 0
    shown = capsys.readouterr().out
    result = last_line(shown)
    assert f"{info.teams[0]} against {info.teams[1]}, 2 on each side (medium, light)" in shown
    assert info.winner is not None
    assert (result["winner"], result["seconds"], result["decisions"]) == (info.teams[info.winner], 39 * info.decision_s, 39)
    assert "map         32 × 32" in shown
    assert all(item.text in shown for item in info.feed)
    assert [item["text"] for item in result["feed"]] == [item.text for item in info.feed]


def test_the_replays_of_a_run_are_listed_and_a_broken_one_does_not_hide_the_others(
    staged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, torn = staged / "replays/staged.safetensors", staged / "replays/torn.safetensors"
    torn.write_bytes(whole.read_bytes()[:1000])
    os.utime(torn, (1, 1))
    assert main(["arena", "replay", "run", "--json"]) == 0
    shown = capsys.readouterr().out
    result = last_line(shown)
    assert [Path(entry["file"]).name for entry in result["replays"]] == ["staged.safetensors", "torn.safetensors"]
    assert "error" not in result["replays"][0]
    assert "cannot be read" in result["replays"][1]["error"]
    assert "esper arena watch run" in shown


@pytest.mark.slow
def test_a_match_keeps_a_battle_that_was_won_which_is_computed_again_bit_for_bit(won: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["arena", "replay", str(won), "--verify", "--json"]) == 0
    shown = capsys.readouterr().out
    result = last_line(shown)
    assert sorted(result["players"]) == ["strong", "weak"]
    assert result["winner"] == "strong"
    assert result["verified"]["ok"]
    assert result["verified"]["device_matches"]
    assert result["verified"]["frames"] == result["decisions"] + 1
    assert "verify      all " in shown


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_without_numba_cuda")
def test_without_numba_cuda_a_replay_is_verified_on_the_cpu(won: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replay = read_replay(won)
    of_gpu = msgspec.structs.replace(replay.info, device="NVIDIA H200, numba-cuda 0.30.4")
    write_replay(Path("of_gpu.safetensors"), replay.tensors, of_gpu)
    for path, matches in ((won, True), ("of_gpu.safetensors", False)):
        capsys.readouterr()
        assert main(["arena", "replay", str(path), "--verify", "--json"]) == 0
        verified = last_line(capsys.readouterr().out)["verified"]
        assert (verified["ok"], verified["device_matches"]) == (True, matches)
    assert main(["arena", "replay", str(won), "--verify", "--device", "cuda"]) == 1
    assert "the arena on CUDA needs numba-cuda, which is not installed: pip install 'esper-grow[cuda]'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_replay_that_was_tampered_with_fails_to_verify(won: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replay = read_replay(won)
    units = replay.tensors["frames/units"].clone()
    units[-1, 0, 0] += 1.0
    write_replay(tmp_path / "tampered.safetensors", {**replay.tensors, "frames/units": units}, replay.info)
    assert main(["arena", "replay", "tampered.safetensors", "--verify", "--json"]) == 1
    verified = last_line(capsys.readouterr().out)["verified"]
    assert (verified["ok"], verified["first_wrong_frame"]) == (False, replay.frames - 1)


@pytest.mark.slow
def test_replays_of_a_run_are_written_where_watch_finds_them(arena_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = shutil.copytree(arena_run, tmp_path / "run")
    assert main([*MATCH, "--replay", "run", "--json"]) == 0
    result = last_line(capsys.readouterr().out)
    assert Path(result["replay"]).parent == Path("run/replays")
    assert (run / "replays" / Path(result["replay"]).name).is_file()
    assert main(["arena", "eval", "run", "--battles", "2", "--against", "strong", "--replay", "never", "--device", "cpu", "--json"]) == 0
    shown = capsys.readouterr().out
    lost = last_line(shown)
    assert lost["replay"] == "never.safetensors"
    assert (lost["wins"] == 0) == ("the first battle: none was won" in shown)
    assert (tmp_path / "never.safetensors").is_file()


@pytest.mark.slow
def test_the_page_is_served_until_ctrl_c(staged: Path) -> None:
    pytest.importorskip("nicegui")
    command = [sys.executable, "-m", "esper.cli.main", "arena", "watch", str(staged), "--no-show", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "plays 1 replay of" in line
        address = line.split()[0]
        assert address.startswith("http://127.0.0.1:")
        assert b"esper" in urllib.request.urlopen(address, timeout=60).read()
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert last_line(rest) == {"address": address}
    finally:
        process.kill()
        process.wait()
