"""The index of events: the same numbers as a plain loop over the lines, whatever was appended, cut, damaged or kept."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from esper.runs import index as event_index
from esper.runs.events import EventError
from esper.runs.foreign import clean
from esper.runs.index import EventIndex, Series, thinned


def line(kind: str = "update", *, step: int | None = 0, time: float = 1.0, rank: int = 0, env: int | None = None, **fields: Any) -> str:
    return json.dumps({"kind": kind, "time": time, "run": "r", "rank": rank, "env": env, "step": step, **fields}, separators=(",", ":"))


def write(path: Path, lines: list[str]) -> EventIndex:
    path.write_text("".join(text + "\n" for text in lines))
    return EventIndex(path)


def by_hand(path: Path, name: str) -> list[tuple[int, float, float]]:
    """A series by a plain loop over the lines: (step, time, value)."""
    found = []
    for text in path.read_text().splitlines():
        event = json.loads(text)
        value: Any = event
        for key in name.split("/")[1:]:
            value = value.get(key) if isinstance(value, dict) else None
        if event["kind"] == name.split("/")[0] and value is not None and not math.isnan(float(value)):
            found.append((-1 if event["step"] is None else event["step"], event["time"], float(value)))
    return found


def points(series: Series) -> list[tuple[int, float, float]]:
    return [(int(step), float(time), float(value)) for step, time, value in zip(*series, strict=True)]


VALUES = st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False), st.integers(-(2**40), 2**40), st.just("nan"))
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]), VALUES, st.dictionaries(st.sampled_from(["x", "y z", "1"]), VALUES, max_size=3), st.integers(0, 40)
    ),
    max_size=12,
)


@given(EVENTS)
def test_every_series_equals_a_plain_loop_over_the_lines(tmp_path_factory: pytest.TempPathFactory, events: Any) -> None:
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    lines = [
        line(kind, step=number, time=float(number), value=value, parts=parts, text="t")
        for number, (kind, value, parts, repeats) in enumerate(events)
        for _ in range(1 + repeats)
    ]
    index = write(path, lines)
    assert index.refresh() == len(lines)
    for name in ("a/value", "b/value", "a/parts/x", "b/parts/y z", "a/parts/1", "b/missing"):
        assert points(index.series(name)) == by_hand(path, name)


def test_only_what_was_appended_is_read_and_an_unfinished_line_waits(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    index = write(path, [line(step=1, loss=0.5)])
    assert index.refresh() == 1
    with path.open("a") as file:
        file.write(line(step=2, loss=0.25))
        file.flush()
        assert index.refresh() == 0
        file.write("\n" + line(step=3, loss=0.125) + "\n")
    assert index.refresh() == 2
    assert index.series("update/loss").values.tolist() == [0.5, 0.25, 0.125]


def test_a_log_that_was_cut_by_a_resume_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    index = write(path, [line(step=step, loss=float(step)) for step in range(5)])
    index.refresh()
    write(path, [line(step=step, loss=float(step)) for step in range(3)] + [line(step=3, loss=9.0), line(step=4, loss=8.0)])
    assert index.refresh() == -1
    assert index.series("update/loss").values.tolist() == [0.0, 1.0, 2.0, 9.0, 8.0]


def test_lines_that_cannot_be_read_are_counted_and_the_others_are_there(tmp_path: Path) -> None:
    lines = [line(step=step, loss=float(step)) for step in range(100)]
    lines[40] = "{broken"
    lines[41] = '{"kind":"update"}'
    lines[70] = "[1, 2]"
    index = write(tmp_path / "events.jsonl", lines)
    assert index.refresh() == 97
    assert index.skipped == 3
    assert index.series("update/loss").values.tolist() == [float(step) for step in range(100) if step not in (40, 41, 70)]


@pytest.mark.parametrize("name", ['with "quotes"', "back\\slash", "with \x08 control"])
def test_names_that_no_fast_reader_takes_are_read_all_the_same(name: str, tmp_path: Path) -> None:
    index = write(tmp_path / "events.jsonl", [line(step=step, loss=0.5, **{name: 1.0}, parts={name: float(step)}) for step in range(3)])
    assert index.refresh() == 3
    assert index.series(f"update/{clean(name)}").values.tolist() == [1.0, 1.0, 1.0]
    assert index.series(f"update/parts/{clean(name)}").values.tolist() == [0.0, 1.0, 2.0]


def test_records_in_lists_hosts_and_ranks_have_names_of_their_own(tmp_path: Path) -> None:
    slots = [{"slot": "conv1", "stage": "HOLDING", "alpha": 0.5}, {"slot": "conv2", "stage": "DORMANT", "alpha": 0.0}]
    index = write(tmp_path / "events.jsonl", [line("epoch", slots=slots), line("epoch", rank=2, loss=1.0), line("epoch", env=3, loss=2.0)])
    index.refresh()
    assert index.names() == ["epoch/slots/conv1/alpha", "epoch/slots/conv2/alpha", "rank2/epoch/loss", "env3/epoch/loss"]
    assert index.series("env3/epoch/loss").values.tolist() == [2.0]
    assert [event["rank"] for event in index.events("epoch")] == [0, 2, 0]
    assert index.events("epoch", start=2)[0]["loss"] == 2.0


def test_a_kept_index_is_used_only_for_the_file_it_was_made_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_index, "CACHED_FROM", 1)
    path, cache = tmp_path / "events.jsonl", tmp_path / "cache"
    lines = [line(step=step, loss=float(step), slots=[{"slot": "a", "alpha": 1.0}] if step % 7 == 0 else []) for step in range(200)]
    write(path, lines)
    first = EventIndex(path, cache=cache)
    assert first.refresh() == 200
    first.wait()
    again = EventIndex(path, cache=cache)
    assert again.refresh() == 0, "everything is in the kept index"
    assert again.names() == first.names()
    assert all(points(again.series(name)) == points(first.series(name)) for name in first.names())
    assert again.kinds == first.kinds
    with path.open("a") as file:
        file.write(line(step=200, loss=200.0) + "\n")
    longer = EventIndex(path, cache=cache)
    assert longer.refresh() == 1
    assert longer.series("update/loss").values[-1] == 200.0
    write(path, [text.replace('"step":3,', '"step":4,') for text in lines[::-1]])
    other = EventIndex(path, cache=cache)
    assert other.refresh() == 200, "the kept index is of another file"
    assert other.series("update/loss").values[0] == 199.0


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b'{"format": 1}\n' + data])
def test_a_damaged_kept_index_is_made_again(damage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_index, "CACHED_FROM", 1)
    path, cache = tmp_path / "events.jsonl", tmp_path / "cache"
    write(path, [line(step=step, loss=float(step)) for step in range(50)])
    first = EventIndex(path, cache=cache)
    first.refresh()
    first.wait()
    (kept,) = cache.iterdir()
    kept.write_bytes(damage(kept.read_bytes()))
    index = EventIndex(path, cache=cache)
    assert index.refresh() == 50
    assert index.series("update/loss").values.tolist() == [float(step) for step in range(50)]


def test_a_run_that_is_removed_while_it_is_watched_has_no_events_any_more(tmp_path: Path) -> None:
    index = write(tmp_path / "events.jsonl", [line(step=1, loss=0.5)])
    index.refresh()
    (tmp_path / "events.jsonl").unlink()
    assert index.events("update") == []
    assert index.series("update/loss").values.tolist() == [0.5], "what was read stays"


def test_kinds_in_turn_and_numbers_that_come_and_go_are_read_as_a_plain_loop_does(tmp_path: Path) -> None:
    lines = []
    for step in range(300):
        lines.append(line(step=step, loss="nan" if step % 5 == 0 else float(step), resources={"memory": step} if step % 10 == 0 else {}))
        lines.append(line(kind="norms", step=step, actor=float(-step)))
    index = write(tmp_path / "events.jsonl", lines)
    assert index.refresh() == 600
    assert index.series("update/loss").values.tolist() == [float(step) for step in range(300) if step % 5]
    assert index.series("update/resources/memory").values.tolist() == [float(step) for step in range(0, 300, 10)]
    assert index.series("norms/actor").steps.tolist() == list(range(300))
    assert [event["step"] for event in index.events("norms")] == list(range(300))


def test_a_missing_log_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(EventError, match=r"nothing\.jsonl cannot be read"):
        EventIndex(tmp_path / "nothing.jsonl").refresh()


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400), st.integers(3, 50))
def test_thinning_keeps_the_extremes_the_order_and_the_limit(values: list[float], most: int) -> None:
    steps = np.arange(len(values))
    thin = thinned(Series(steps, steps.astype(float), np.array(values)), most)
    assert len(thin.values) <= most
    assert thin.values[-1] == values[-1]
    assert (thin.values.min(), thin.values.max()) == (min(values), max(values))
    assert list(thin.steps) == sorted(thin.steps)
