"""The folder of a league: exact loading after crashes and beside other files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from esper.files import with_digest
from esper.league import LEARNER, League, LeagueError, LeagueStore, WinRecord
from tests.faults import Crash, _without_syncs, crash_at  # noqa: F401 — a fixture
from tests.league.leagues import promoted, small_league, weights_of


def equal(first: League, second: League) -> bool:
    return (
        first.to_state() == second.to_state()
        and first.weights.keys() == second.weights.keys()
        and all(
            torch.equal(tensor, second.weights[name][key]) for name, weights in first.weights.items() for key, tensor in weights.items()
        )
    )


def old_and_new() -> tuple[League, League]:
    """Two leagues, one later than the other: someone has left, someone has come, and battles were fought."""
    old, new = (promoted(promoted(small_league(size=2), "one"), "two") for _ in range(2))
    promoted(new, "three").enter("four", 4, weights_of(4))
    new.record(LEARNER, "three", WinRecord(wins=3, losses=4))
    assert set(old.weights) == {"one", "two"}
    assert set(new.weights) == {"two", "three", "four"}
    return old, new


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_saved_league_is_loaded_unchanged(tmp_path: Path) -> None:
    _, league = old_and_new()
    LeagueStore(tmp_path / "run" / "league").save(league)
    assert equal(LeagueStore(tmp_path / "run" / "league").load(), league)
    assert files_in(tmp_path / "run" / "league") == {"league.json", *(f"members/{name}.safetensors" for name in ("two", "three", "four"))}


def test_a_league_without_past_selves_is_saved(tmp_path: Path) -> None:
    LeagueStore(tmp_path).save(small_league())
    assert equal(LeagueStore(tmp_path).load(), small_league())


def test_a_league_can_be_looked_at_without_its_weights(tmp_path: Path) -> None:
    league = promoted(small_league(), "one")
    LeagueStore(tmp_path).save(league)
    (tmp_path / "members" / "one.safetensors").unlink()
    seen = LeagueStore(tmp_path).load(with_weights=False)
    assert seen.to_state() == league.to_state()
    assert seen.weights == {}


@pytest.mark.slow
@pytest.mark.usefixtures("_without_syncs")
@pytest.mark.parametrize("is_resumed", [False, True], ids=["going on", "resumed"])
def test_a_crash_at_any_step_leaves_the_old_league_or_the_new_one(tmp_path: Path, is_resumed: bool) -> None:
    old, new = old_and_new()
    outcomes = []
    for when in range(1, 100):
        folder = tmp_path / str(when)
        store = LeagueStore(folder)
        store.save(old)
        store = LeagueStore(folder) if is_resumed else store
        with crash_at(when):
            try:
                store.save(new)
                break
            except Crash:
                pass
        found = LeagueStore(folder).load()
        assert equal(found, old) or equal(found, new)
        outcomes.append("old" if equal(found, old) else "new")

        LeagueStore(folder).save(new)  # by the process that resumes the run
        assert equal(LeagueStore(folder).load(), new)
        assert files_in(folder) == {"league.json", *(f"members/{name}.safetensors" for name in ("two", "three", "four"))}
    assert outcomes == sorted(outcomes, reverse=True)  # from some step on it is the new one
    assert outcomes.count("old") >= 8  # two weights and the json: write, sync, rename each; and the folder of the weights
    assert outcomes.count("new") >= 1


@pytest.mark.usefixtures("_without_syncs")
def test_a_crash_in_the_first_save_leaves_no_league_or_a_whole_one(tmp_path: Path) -> None:
    league = promoted(small_league(), "one")
    for when in range(1, 100):
        store = LeagueStore(tmp_path / str(when))
        with crash_at(when):
            try:
                store.save(league)
                break
            except Crash:
                pass
        assert not store.exists() or equal(store.load(), league)
    assert when > 6


@pytest.mark.usefixtures("_without_syncs")
def test_a_resumed_run_that_enters_other_weights_under_an_old_name_never_mixes_them(tmp_path: Path) -> None:
    before, after = small_league(), small_league()
    before.enter("one", 1, weights_of(1))
    after.enter("one", 1, weights_of(2))
    for when in range(1, 100):
        folder = tmp_path / str(when)
        LeagueStore(folder).save(before)
        with crash_at(when):
            try:
                LeagueStore(folder).save(after)
                break
            except Crash:
                pass
        found = LeagueStore(folder).load()
        assert equal(found, before) or equal(found, after)
    assert when > 6
    assert equal(LeagueStore(folder).load(), after)
    assert files_in(folder) == {"league.json", "members/one~2.safetensors"}


def test_files_not_written_by_the_league_stay(tmp_path: Path) -> None:
    (tmp_path / "members" / "mine").mkdir(parents=True)
    (tmp_path / "members" / "notes.txt").write_text("three is good at bridges")
    (tmp_path / "members" / "gone.safetensors").write_bytes(b"")
    LeagueStore(tmp_path).save(small_league())
    assert files_in(tmp_path) == {"league.json", "members/notes.txt"}
    assert (tmp_path / "members" / "mine").is_dir()


def test_weights_are_written_once(tmp_path: Path) -> None:
    store, league = LeagueStore(tmp_path), promoted(small_league(), "one")
    store.save(league)
    before = (tmp_path / "members" / "one.safetensors").stat()
    promoted(league, "two")
    store.save(league)
    LeagueStore(tmp_path).save(store.load())
    after = (tmp_path / "members" / "one.safetensors").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_removed_file_of_a_player_is_written_again(tmp_path: Path) -> None:
    store, league = LeagueStore(tmp_path), promoted(small_league(), "one")
    store.save(league)
    (tmp_path / "members" / "one.safetensors").unlink()
    store.save(league)
    assert equal(store.load(), league)


def test_a_reader_repeats_its_read_after_a_concurrent_save(tmp_path: Path) -> None:
    old, new = old_and_new()
    LeagueStore(tmp_path).save(old)

    class Overtaken(LeagueStore):
        reads = 0

        def _read_json(self) -> bytes:
            content = super()._read_json()
            self.reads += 1
            if self.reads == 1:
                LeagueStore(tmp_path).save(new)  # which removes the weights of "one"
            return content

    assert equal(Overtaken(tmp_path).load(), new)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    LeagueStore(tmp_path).save(promoted(small_league(), "one"))
    (tmp_path / "members" / "one.safetensors").unlink()
    with pytest.raises(
        LeagueError, match=r"league\.json: the weights of 'one' are missing: there is no .*one\.safetensors; restore it, or"
    ):
        LeagueStore(tmp_path).load()


@pytest.mark.parametrize("damage", [lambda content: content[:-1], lambda content: content[:-1] + b"?", lambda _: b""])
def test_damaged_weights_are_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    LeagueStore(tmp_path).save(promoted(small_league(), "one"))
    path = tmp_path / "members" / "one.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(LeagueError, match=r"the weights of 'one' in .* are not those that were saved"):
        LeagueStore(tmp_path).load()


def test_weights_outside_of_the_folder_are_not_read(tmp_path: Path) -> None:
    LeagueStore(tmp_path).save(promoted(small_league(), "one"))
    content = (tmp_path / "league.json").read_text()
    values = json.loads(content.replace("one.safetensors", "../../one.safetensors"))
    del values["sha256"]
    (tmp_path / "league.json").write_text(json.dumps(with_digest(values)))
    with pytest.raises(LeagueError, match="outside of"):
        LeagueStore(tmp_path).load()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"format": "x"}', b'{"format": 1}'])
def test_a_file_that_is_no_league_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "league.json").write_bytes(content)
    with pytest.raises(LeagueError, match=r"league\.json is corrupt: it is not the file of a league"):
        LeagueStore(tmp_path).load()


def test_a_league_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    LeagueStore(tmp_path).save(small_league())
    content = json.loads((tmp_path / "league.json").read_text())
    (tmp_path / "league.json").write_text(json.dumps({"format": 3, "new": content}))
    with pytest.raises(LeagueError, match="written by a newer esper: its format is 3, this one reads up to 1"):
        LeagueStore(tmp_path).load()


def test_a_league_without_a_digest_is_refused(tmp_path: Path) -> None:
    league = promoted(small_league(), "one")
    LeagueStore(tmp_path).save(league)
    values = json.loads((tmp_path / "league.json").read_text())
    del values["sha256"]
    (tmp_path / "league.json").write_text(json.dumps(values))
    with pytest.raises(LeagueError, match="its sha256 is missing"):
        LeagueStore(tmp_path).load()


def test_a_folder_without_a_league_says_so(tmp_path: Path) -> None:
    assert not LeagueStore(tmp_path).exists()
    with pytest.raises(LeagueError, match=r"there is no league in .*: it has no league\.json"):
        LeagueStore(tmp_path).load()


def test_weights_that_share_memory_or_are_views_come_back(tmp_path: Path) -> None:
    league, base = small_league(), torch.arange(6.0)
    league.enter("one", 1, {"whole": base, "part": base[2:4], "turned": base.reshape(2, 3).T, "scalar": torch.tensor(3)})
    LeagueStore(tmp_path).save(league)
    assert equal(LeagueStore(tmp_path).load(), league)
