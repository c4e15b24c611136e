"""The folder of a run: one process at a time, and no process removes files of another."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from esper.growth import GrowthConfig
from esper.growth.run import open_run
from esper.runs.folder import LOCK, RunError, locked, new_folder
from tests.processes import Process


def fail_in(folder: Path, *, meanwhile: Callable[[], None] = lambda: None, **options: Any) -> None:
    with open_run(folder, resume=False, config=GrowthConfig(), **options):
        meanwhile()
        raise ValueError("the data are wrong")


def test_a_new_run_that_fails_at_once_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="data are wrong"):
        fail_in(tmp_path / "a" / "b" / "run", files={"grow.toml": b"epochs = 1\n"})
    assert list(tmp_path.iterdir()) == []


def test_a_new_run_that_fails_removes_only_what_it_made(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"

    def others_write() -> None:
        (folder / "notes.txt").write_text("somebody else's")
        (folder.parent / "other run").mkdir()

    with pytest.raises(ValueError, match="data are wrong"):
        fail_in(folder, meanwhile=others_write)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["new", "notes.txt", "other run", "run"]


def test_an_existing_folder_is_not_removed_after_a_failure(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(ValueError, match="data are wrong"):
        fail_in(tmp_path / "run")
    assert [path.name for path in tmp_path.rglob("*")] == ["run"]


@pytest.mark.parametrize("name", ["model.safetensors", "report.html"])
def test_a_folder_with_a_file_that_the_run_would_replace_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("somebody else's")
    with pytest.raises(RunError, match=f"holds a {name}, which the run would replace"):
        fail_in(tmp_path, results=("model.safetensors", "report.html"))
    assert (tmp_path / name).read_text() == "somebody else's"
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_concurrent_run_is_detected_under_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both processes found the folder free; the other one has trained in it and is gone."""
    import esper.runs.folder

    lock = esper.runs.folder._lock

    def late(folder: Path) -> object:
        (folder / "config.toml").write_text("theirs")
        return lock(folder)

    monkeypatch.setattr(esper.runs.folder, "_lock", late)
    with pytest.raises(RunError, match=r"already holds a run \(config\.toml\)"), new_folder(tmp_path / "run"):
        pass
    assert (tmp_path / "run" / "config.toml").read_text() == "theirs"


def test_a_lock_on_a_removed_file_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that gives a folder up removes the lock's file, and another one may have opened it just before."""
    import fcntl

    flock, opened = fcntl.flock, []

    def removed_meanwhile(file: object, how: int) -> None:
        opened.append(file)
        if len(opened) == 1:
            (tmp_path / LOCK).unlink()
        flock(file, how)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "flock", removed_meanwhile)
    with locked(tmp_path):
        assert len(opened) == 2
        with pytest.raises(RunError, match="another process is training"), locked(tmp_path):
            pass


FIGHTERS = 3


def fight(place: Path) -> None:
    (place / f"ready {os.getpid()}").mkdir()
    while len(list(place.glob("ready *"))) < FIGHTERS:  # all begin at the same moment
        pass
    for number in range(15):
        folder = place / str(number) / "run"
        try:
            with open_run(folder, resume=False, config=GrowthConfig()):
                mine = folder / f"of {os.getpid()}"
                mine.touch()
                time.sleep(0.002)
                assert (folder / "config.toml").exists()
                assert (folder / "events.jsonl").exists()
                assert mine.exists()
                assert len(list(folder.glob("of *"))) == 1, "two at once"
                mine.unlink()
                raise KeyError("wrong data")
        except (RunError, KeyError):
            pass


@pytest.mark.slow
def test_competing_processes_never_share_a_new_folder_and_leave_nothing_behind(tmp_path: Path) -> None:
    processes = [Process(fight, tmp_path) for _ in range(FIGHTERS)]
    for process in processes:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
