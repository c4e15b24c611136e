"""Files are written atomically and durably, and refused when they were changed."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import esper.files
from esper.files import TEMPORARY, FileError, RunMode, make_folder, open_in_run, remove, remove_temporaries, write_file, write_in_run
from esper.runs import NotTensorsError, read_tensors, write_tensors
from tests.faults import Crash, crash_at


def test_a_crash_at_any_call_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    answers = []
    for number in range(1, 50):
        path = tmp_path / str(number) / "file"
        write_file(path, b"old")
        with crash_at(number):
            try:
                write_file(path, b"new and ", b"longer")
                break
            except Crash:
                answers.append(path.read_bytes())
    assert path.read_bytes() == b"new and longer"
    assert set(answers) == {b"old", b"new and longer"}
    assert answers == sorted(answers, reverse=True)


def test_file_and_new_folders_are_synced_before_the_writer_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync
    monkeypatch.setattr(esper.files.os, "fsync", lambda file: (synced.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file)))
    write_file(tmp_path / "a" / "b" / "file", b"content")
    assert synced[:2] == [str(tmp_path), str(tmp_path / "a")], "the names of the new folders"
    assert synced[2].startswith(str(tmp_path / "a" / "b" / ".tmp-")), "the content"
    assert synced[3:] == [str(tmp_path / "a" / "b")], "the name of the file"


def test_a_written_file_has_the_usual_mode_and_keeps_a_changed_one(tmp_path: Path) -> None:
    (tmp_path / "ordinary").write_bytes(b"")
    path = tmp_path / "file"
    write_file(path, b"first")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "ordinary").stat().st_mode)
    path.chmod(0o640)
    write_file(path, b"second")
    assert (stat.S_IMODE(path.stat().st_mode), path.read_bytes()) == (0o640, b"second")


def test_a_link_is_replaced_and_its_target_stays(tmp_path: Path) -> None:
    target, path = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"precious")
    path.symlink_to(target)
    write_file(path, b"content")
    assert (path.is_symlink(), path.read_bytes(), target.read_bytes()) == (False, b"content", b"precious")


@pytest.mark.parametrize("mode", ["rb", "r+b", "ab"])
def test_a_file_of_a_run_is_opened_without_following_a_link_or_waiting_for_a_pipe(tmp_path: Path, mode: RunMode) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    (outside / "inner").mkdir(parents=True)
    (outside / "inner" / "file").write_bytes(b"precious")
    (run / "folder").mkdir(parents=True)
    (run / "folder" / "link").symlink_to(outside / "inner" / "file")
    (run / "linked").symlink_to(outside / "inner")
    (tmp_path / "alias").symlink_to(run)
    for path in (run / "folder" / "link", run / "linked" / "file"):
        with pytest.raises(FileError, match="is a link, and links in the folder of a run are not followed"):
            open_in_run(path, mode, run=run)
    with pytest.raises(FileError, match="is a link"):
        write_in_run(run / "linked" / "file", b"", run=run)
    os.mkfifo(run / "pipe")
    with pytest.raises(FileError, match="pipe is a device or a pipe"):
        open_in_run(run / "pipe", mode)
    write_in_run(tmp_path / "alias" / "folder" / "file", b"ours", run=tmp_path / "alias")
    with open_in_run(tmp_path / "alias" / "folder" / "file", mode, run=tmp_path / "alias") as file:
        assert mode == "ab" or file.read() == b"ours", "the folder of the run may be a link"
    assert (outside / "inner" / "file").read_bytes() == b"precious"


def test_temporary_files_of_ended_processes_are_removed_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    ended = os.spawnlp(os.P_NOWAIT, "true", "true")
    os.waitpid(ended, 0)
    kept = [tmp_path / f"{TEMPORARY}{os.getppid()}-a", tmp_path / "other"]
    for path in (*kept, *(tmp_path / f"{TEMPORARY}{name}" for name in (f"{ended}-a", f"{os.getpid()}-a", "step-1"))):
        path.touch()
    remove_temporaries(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(kept)


def test_a_folder_or_a_device_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="is a folder"):
        write_file(tmp_path, b"")
    with pytest.raises(OSError, match=r"not a regular file: '/dev/null'"):
        write_file("/dev/null", b"")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_names_the_file_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, content: object) -> int:
        raise OSError(28, "No space left on device")

    write_file(tmp_path / "file", b"old")
    monkeypatch.setattr(esper.files.os, "write", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*file'"):
        write_file(tmp_path / "file", b"new")
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


def test_only_created_folders_are_reported_as_made(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    assert make_folder(tmp_path / "there" / "a" / "b") == [tmp_path / "there" / "a" / "b", tmp_path / "there" / "a"]
    assert make_folder(tmp_path / "there" / "a" / "b") == []


def test_removing_a_folder_removes_links_and_not_their_targets(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_bytes(b"")
    (tmp_path / "doomed" / "inner").mkdir(parents=True)
    (tmp_path / "doomed" / "inner" / "link").symlink_to(tmp_path / "kept")
    remove(tmp_path / "doomed")
    remove(tmp_path / "doomed")
    assert [path.name for path in tmp_path.rglob("*")] == ["kept", "file"]


# Files of tensors


def some_tensors() -> dict[str, Tensor]:
    base = torch.arange(12.0).reshape(3, 4)
    return {
        "weight": base,
        "tied": base,
        "part": base[1:, ::2],
        "turned": base.T,
        "half": torch.full((2,), 0.1, dtype=torch.bfloat16),
        "none": torch.zeros(0, 3),
        "scalar": torch.tensor(True),
        "parameter/é": torch.nn.Parameter(torch.ones(2)),
    }


def test_tensors_and_metadata_come_back(tmp_path: Path) -> None:
    path, tensors = tmp_path / "new" / "a.safetensors", some_tensors()
    write_tensors(path, tensors, {"about": 'a "model"', "é": "ü"})
    found, metadata = read_tensors(path)
    assert metadata == {"about": 'a "model"', "é": "ü"}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor.detach())
    found["weight"].resize_(20)
    write_tensors(path, {})
    assert read_tensors(path) == ({}, {})


def test_a_file_of_tensors_is_an_ordinary_one_for_other_programs(tmp_path: Path) -> None:
    path, tensors = tmp_path / "a.safetensors", some_tensors()
    write_tensors(path, tensors, {"about": "a model"})
    plain = load_file(path)
    assert all(torch.equal(plain[name], tensor.detach()) for name, tensor in tensors.items())
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["format"] == "pt"
        assert file.metadata()["about"] == "a model"
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0, "the tensors lie at addresses that can be mapped"


def test_a_file_that_another_program_wrote_again_keeps_its_digest(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path, some_tensors(), {"about": "a model"})
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    save_file(dict(reversed(tensors.items())), path, metadata)
    assert read_tensors(path)[0].keys() == tensors.keys()
    tensors["weight"][0, 0] = 7
    save_file(tensors, path, metadata)
    with pytest.raises(FileError, match=r"a\.safetensors is damaged: its sha256 is not that of its content"):
        read_tensors(path)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"esper controller": "{}"}])
def test_files_without_a_digest_are_read(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors", metadata)
    found, kept = read_tensors(tmp_path / "a.safetensors")
    assert torch.equal(found["w"], torch.ones(2))
    assert kept == {name: value for name, value in (metadata or {}).items() if name != "format"}


@pytest.mark.parametrize("missing", ["sha256", "esper"])
def test_a_lost_digest_is_detected(tmp_path: Path, missing: str) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"w": torch.ones(2)})
    content = path.read_bytes()
    path.write_bytes(content.replace(f'"{missing}"'.encode(), b'"' + b"x" * len(missing) + b'"'))
    with pytest.raises(FileError, match="is damaged: a part of its metadata is missing"):
        read_tensors(path)


def test_a_newer_format_and_a_file_of_something_else_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"w": torch.ones(2)})
    path.write_bytes(path.read_bytes().replace(b'"esper":"2"', b'"esper":"3"'))
    with pytest.raises(FileError, match="written by a newer esper: its format is 3, this one reads up to 2"):
        read_tensors(path)
    torch.save({"w": torch.ones(2)}, path)
    with pytest.raises(NotTensorsError, match=r"a\.safetensors cannot be read as a safetensors file"):
        read_tensors(path)
    for content in (b"", b"\0" * 7, b"\0" * 8, (2).to_bytes(8, "little") + b"[]", json.dumps({}).encode()):
        path.write_bytes(content)
        with pytest.raises(NotTensorsError):
            read_tensors(path)


def test_equal_tensors_give_equal_bytes(tmp_path: Path) -> None:
    contents = set()
    for _ in range(8):
        write_tensors(tmp_path / "a", some_tensors(), {name: name for name in "abcdefgh"})
        contents.add((tmp_path / "a").read_bytes())
    assert len(contents) == 1


def test_metadata_that_esper_writes_itself_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must not have entries named format, sha256"):
        write_tensors(tmp_path / "a", {}, {"sha256": "", "format": "pt"})
    assert list(tmp_path.iterdir()) == []
