"""Runs in a folder: what they are, how far they are, and whether they live."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import esper
from esper.files import FileError, with_digest, without_digest
from esper.rl import PPOConfig, TrainConfig, train_run
from esper.runs import RunError, index as event_index
from esper.runs.analysis import read_analysis
from esper.runs.cards import write_card
from esper.runs.catalog import (
    DEAD_AFTER_S,
    LABELS,
    SUMMARY,
    differing_settings,
    find_runs,
    kept_summaries,
    label,
    left_summary,
    list_runs,
    open_run,
    remove_run,
)
from esper.runs.folder import EVENTS, GROW, locked
from esper.runs.index import EventIndex
from tests.runs.made import made_growth

pytestmark = pytest.mark.slow  # trains two runs

PPO = TrainConfig(env="cue", num_envs=4, total_steps=128, eval_episodes=0, ppo=PPOConfig(num_steps=16))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs in one folder: a growth run and a PPO run."""
    root = tmp_path_factory.mktemp("runs")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    batches = [(torch.randn(16, 4), torch.randint(0, 3, (16,))) for _ in range(4)]
    esper.grow(model, batches, batches[:2], loss_fn=cross_entropy, epochs=3, controller="never", run=root / "grown", progress=False)
    train_run(PPO, root / "group" / "cue")
    return root


def copied(runs: Path, name: str, to: Path) -> Path:
    return Path(shutil.copytree(runs / name, to / Path(name).name))


def test_runs_are_found_with_kind_figure_and_progress(runs: Path) -> None:
    found = {run.name: run for run in find_runs(runs)}
    assert set(found) == {"grown", "cue"}
    for run in found.values():
        run.refresh()
    grown, cue = found["grown"].summary(), found["cue"].summary()
    assert (grown.kind, grown.state, grown.progress, grown.figure) == ("growth", "finished", 1.0, "validation loss")
    losses = [json.loads(line)["val_loss"] for line in (runs / "grown" / EVENTS).read_text().splitlines() if '"epoch_ended"' in line]
    assert (grown.last, grown.best, grown.spark) == (losses[-1], min(losses), losses)
    assert (cue.kind, cue.state, cue.progress, cue.step) == ("ppo", "finished", 1.0, 128)


def test_a_run_without_an_end_is_running_while_its_log_is_touched_and_dead_afterwards(runs: Path, tmp_path: Path) -> None:
    folder = copied(runs, "group/cue", tmp_path)
    lines = (folder / EVENTS).read_text().splitlines()
    (folder / EVENTS).write_text("\n".join(line for line in lines if '"run_ended"' not in line) + "\n")
    run = open_run(folder, cache=tmp_path / "cache")
    now = time.time()
    os.utime(folder / EVENTS, (now, now))
    assert run.state(now + DEAD_AFTER_S / 2) == "running"
    assert run.state(now + 2 * DEAD_AFTER_S) == "dead"


def test_a_log_is_touched_while_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from esper.runs import log as log_module

    monkeypatch.setattr(log_module, "FLUSH_EVERY_S", 0.02)
    monkeypatch.setattr(log_module, "HEARTBEAT_EVERY_S", 0.02)
    with log_module.EventLog(tmp_path / EVENTS, run="r"):
        os.utime(tmp_path / EVENTS, (1.0, 1.0))
        end = time.monotonic() + 20
        while os.stat(tmp_path / EVENTS).st_mtime < 2 and time.monotonic() < end:
            time.sleep(0.01)
        assert os.stat(tmp_path / EVENTS).st_mtime > 2


def test_a_stopped_run_is_stopped_and_runs_again_after_a_resume(runs: Path, tmp_path: Path) -> None:
    train_run(PPO, tmp_path / "cue", should_stop=lambda: True)
    assert open_run(tmp_path / "cue", cache=tmp_path / "cache").state() == "stopped"
    train_run(None, tmp_path / "cue", resume=True)
    run = open_run(tmp_path / "cue", cache=tmp_path / "cache")
    assert run.state() == "finished"
    assert run.index.kinds["run_ended"] == 1


def test_labels_are_added_removed_and_kept_apart_from_the_run(runs: Path, tmp_path: Path) -> None:
    folder = copied(runs, "grown", tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert label(folder, add=["good", "baseline"], note="first try").tags == ["good", "baseline"]
    assert label(folder, add=["good"], remove=["baseline"]).tags == ["good"]
    summary = open_run(folder, cache=tmp_path / "cache").summary()
    assert (summary.tags, summary.note) == (["good"], "first try")
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != LABELS} == before
    with pytest.raises(RunError, match="cannot be a tag"):
        label(folder, add=["a,b"])


def test_damaged_labels_are_an_error_and_are_not_overwritten(runs: Path, tmp_path: Path) -> None:
    folder = copied(runs, "grown", tmp_path)
    (folder / LABELS).write_text("{broken")
    with pytest.raises(RunError, match=r"cannot be read \(.*labels\.json: .*; mend the file, or remove it"):
        label(folder, add=["good"])
    assert (folder / LABELS).read_text() == "{broken"
    assert open_run(folder, cache=tmp_path / "cache").summary().tags == [], "and a table shows the run"


def test_only_a_run_that_nobody_trains_is_removed(runs: Path, tmp_path: Path) -> None:
    folder = copied(runs, "grown", tmp_path)
    with locked(folder), pytest.raises(RunError, match="another process is training"):
        remove_run(folder)
    remove_run(folder)
    assert not folder.exists()
    with pytest.raises(RunError, match="there is no run in"):
        remove_run(tmp_path)


def test_settings_that_differ_are_listed_with_missing_ones(runs: Path) -> None:
    one, other = ({"env": "cue", "ppo": {"gamma": gamma}, **extra} for gamma, extra in ((0.9, {}), (0.8, {"seed": 1})))
    assert differing_settings({"a": one, "b": other}) == {"ppo.gamma": {"a": 0.9, "b": 0.8}, "seed": {"a": None, "b": 1}}


def test_a_log_that_is_a_link_out_of_its_run_is_not_read(tmp_path: Path) -> None:
    folder, secret = made_growth(tmp_path / "run", [1.0]), tmp_path / "secret.jsonl"
    whole = open_run(folder, cache=tmp_path / "cache")
    assert (len(whole.index.events("epoch_ended")), whole.problem) == (1, "")
    (folder / EVENTS).rename(secret)
    (folder / EVENTS).symlink_to(secret)
    linked = open_run(folder, cache=tmp_path / "cache")
    assert len(linked.index) == 0
    assert "is a link, and links in the folder of a run are not followed" in linked.problem
    assert whole.index.events("epoch_ended") == [], "a log that becomes a link is not read any more"


@pytest.mark.parametrize("name", [GROW, "labels.json", "analysis.json"])
def test_a_link_out_of_a_run_is_not_followed(tmp_path: Path, name: str) -> None:
    folder = made_growth(tmp_path / "run", [1.0])
    secret = tmp_path / "secret"
    secret.write_text({GROW: 'password = "x"', "labels.json": '{"tags":["x"],"note":"x"}', "analysis.json": "{}"}[name])
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    run = open_run(folder, cache=tmp_path / "cache")
    assert run.summary().tags == []
    if name == "labels.json":
        with pytest.raises(RunError, match=r"tags and the note of the run cannot be read .*is a link"):
            run.labels()
    if name == "analysis.json":
        with pytest.raises(RunError, match="is a link"):
            read_analysis(folder)
    if name == GROW:
        with pytest.raises(FileError, match="is a link"):
            run.config()


def test_a_second_listing_reads_only_the_runs_that_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, cache = tmp_path / "runs", tmp_path / "cache"
    for name in ("one", "other"):
        made_growth(root / name, [1.0, 0.5], twin=[1.0])
    first = list_runs(root, cache=cache)
    read = read_logs(monkeypatch)
    assert list_runs(root, cache=cache) == first
    assert read == []
    label(root / "one", add=["good"])
    read.clear()
    assert [(summary.name, summary.tags) for summary in list_runs(root, cache=cache)] == [("one", ["good"]), ("other", [])]
    assert set(read) == {"one", "twin"}


def test_a_large_log_that_is_listed_and_then_opened_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_index, "CACHED_FROM", 1)
    write = event_index._write_index
    monkeypatch.setattr(event_index, "_write_index", lambda *args: (time.sleep(0.1), write(*args)))  # a large one takes its time
    made_growth(tmp_path / "runs" / "one", [1.0, 0.5])
    read: list[int] = []
    take = EventIndex._take
    monkeypatch.setattr(EventIndex, "_take", lambda index, lines: (read.append(len(lines)), take(index, lines))[1])
    (run,) = find_runs(tmp_path / "runs", cache=tmp_path / "cache")
    assert run.brief().state == "finished"
    run.refresh()
    assert (run.step(), sum(read)) == (2, (run.folder / EVENTS).stat().st_size)


def read_logs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the name of every run whose events are read from now on."""
    read: list[str] = []
    refresh = EventIndex.refresh
    monkeypatch.setattr(EventIndex, "refresh", lambda index, *rest: (read.append(index.path.parent.name), refresh(index, *rest))[1])
    return read


def test_runs_that_ended_are_listed_without_reading_their_events(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("grown", "group/cue"):
        copied(runs, name, tmp_path / "runs")
    label(tmp_path / "runs" / "cue", add=["good"])
    made_growth(tmp_path / "runs" / "twins", [1.0, 0.5], twin=[2.0, 1.0])
    write_card(tmp_path / "runs" / "twins")
    wanted = []
    for run in find_runs(tmp_path / "runs"):
        run.refresh()
        wanted.append(run.summary())
    read = read_logs(monkeypatch)
    assert list_runs(tmp_path / "runs", cache=tmp_path / "cache") == wanted
    assert (read, [summary.tags for summary in wanted]) == ([], [["good"], [], []])


def test_a_summary_that_a_run_left_is_not_used_when_it_is_damaged_or_older_than_the_log(runs: Path, tmp_path: Path) -> None:
    folder = copied(runs, "group/cue", tmp_path)
    before = left_summary(folder)
    assert before is not None
    # A resume writes the log anew; a run that trains again is not what it was when it ended.
    log = (folder / EVENTS).read_bytes()
    (folder / EVENTS).write_bytes(log + b'{"kind":"resumed"}\n')
    assert left_summary(folder) is None
    (folder / EVENTS).write_bytes(log)
    assert left_summary(folder) is None, "its events may be others of the same size"
    os.utime(folder / EVENTS, ns=(0, 0))
    assert left_summary(folder) is not None
    left = (folder / SUMMARY).read_bytes()
    for place in range(0, len(left), 5):
        (folder / SUMMARY).write_bytes(left[:place] + bytes([left[place] ^ 1]) + left[place + 1 :])
        found = left_summary(folder)
        assert found is None or found.summary == msgspec.structs.replace(before.summary, touched=0.0), place
    # Texts of strangers are shown as they are everywhere else, and numbers outside of their range are none.
    changed = without_digest(json.loads(left))
    for field, value in (("figure", "\x1b[2J"), ("progress", -1.0), ("state", "running"), ("spark", "a")):
        hostile = with_digest(changed | {"summary": changed["summary"] | {field: value}})
        (folder / SUMMARY).write_text(json.dumps(hostile))
        found = left_summary(folder)
        assert found is None or (field, found.summary.figure) == ("figure", "\\x1b[2J"), field


def test_a_damaged_list_of_runs_is_not_used(tmp_path: Path) -> None:
    root, cache = tmp_path / "runs", tmp_path / "cache"
    made_growth(root / "one", [1.0, 0.5])
    first = list_runs(root, cache=cache)
    (kept,) = cache.glob("list-*")
    content = kept.read_bytes()
    for place in range(0, len(content), 7):
        kept.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert kept_summaries(root, cache) == {}, place
    assert list_runs(root, cache=cache) == first


def test_a_kept_summary_of_a_run_without_signs_of_life_becomes_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made_growth(tmp_path / "runs" / "one", [1.0, 0.5], has_ended=False)
    states = [summary.state for summary in list_runs(tmp_path / "runs", cache=tmp_path / "cache")]
    now = (folder / EVENTS).stat().st_mtime + DEAD_AFTER_S + 1
    monkeypatch.setattr(time, "time", lambda: now)
    states += [summary.state for summary in list_runs(tmp_path / "runs", cache=tmp_path / "cache")]
    assert states == ["running", "dead"]
