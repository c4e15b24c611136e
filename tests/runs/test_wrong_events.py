"""Logs whose lines are JSON with wrong values: every reader drops and counts the lines that do not fit, and shows the others."""

from __future__ import annotations

import importlib
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from esper.cli.watch import Screen
from esper.config import Config, ConfigError, save
from esper.controller.config import ControllerConfig
from esper.dashboard.data import Watcher, name_in_address
from esper.growth.config import GrowthConfig, GrowthError
from esper.growth.lifecycle.stages import Stage
from esper.growth.report.html import write_report
from esper.league.config import ArenaTrainConfig
from esper.rl import TrainConfig
from esper.runs import Event, EventError, EventLog
from esper.runs.cards import write_card
from esper.runs.catalog import find_runs, open_run
from esper.runs.compare import compare_runs
from esper.runs.events import _MODULES, fields_of
from esper.runs.folder import CONFIG, EVENTS, RunError
from esper.runs.report import write_run_report
from esper.runs.tables import events_table, query
from tests.runs.made import made_growth

WRONG: list[Any] = [None, "", -1, 0, 1e308, 10**30, True, "nan", "x", [], {}, [1], {"a": 1}, [{"a": "b"}], -5.5, "<b>", [[[]]], "2026"]
WRONG += [0.5, [None], {"a": None}]
DAMAGES = 4  # in one log, as showing a log takes long
OTHERS: dict[str, Config] = {"ppo": TrainConfig(env="cue"), "controller": ControllerConfig(), "arena": ArenaTrainConfig()}


def value_of(info: msgspec.inspect.Type, name: str) -> Any:
    """Return a plain value that a field of this type and name may have."""
    match info:
        case msgspec.inspect.StructType():
            return {field.encode_name: value_of(field.type, field.name) for field in info.fields}
        case msgspec.inspect.UnionType():
            return value_of(next(kind for kind in info.types if not isinstance(kind, msgspec.inspect.NoneType)), name)
        case msgspec.inspect.DictType():
            return {"a": value_of(info.value_type, name)}
        case msgspec.inspect.ListType() | msgspec.inspect.VarTupleType() | msgspec.inspect.SetType():
            return [value_of(info.item_type, name)]
        case msgspec.inspect.TupleType():
            return [value_of(kind, name) for kind in info.item_types]
        case msgspec.inspect.LiteralType():
            return info.values[0]
        case msgspec.inspect.StrType():
            return {"stage": "TRAINING", "slot": "conv1"}.get(name, "a")
        case msgspec.inspect.BoolType():
            return True
        case msgspec.inspect.EnumType():
            return next(iter(info.cls)).value
    return 1 if isinstance(info, msgspec.inspect.IntType) else 0.5


def events_of_all_kinds() -> Iterator[Event]:
    for name in _MODULES:
        for event_type in vars(importlib.import_module(name)).values():
            if isinstance(event_type, type) and issubclass(event_type, Event) and event_type.__module__ == name:
                fields = {
                    field.name: value_of(msgspec.inspect.type_info(field.type), field.name)
                    for field in msgspec.structs.fields(event_type)
                    if field.name != "env"
                }
                yield msgspec.convert(fields | {"kind": event_type.__struct_config__.tag}, event_type)


def made(folder: Path, kind: str) -> Path:
    """Write a run whose log has at least one event of each kind that esper has."""
    if kind == "growth":
        made_growth(folder, [1.0, 0.5])
        save(GrowthConfig(), folder / CONFIG)
    else:
        folder.mkdir(parents=True)
        save(OTHERS[kind], folder / CONFIG)
        EventLog(folder / EVENTS, run=folder.name).close()
    lines = (folder / EVENTS).read_bytes()
    (folder / EVENTS).unlink()
    with EventLog(folder / EVENTS, run=folder.name) as log:
        for event in events_of_all_kinds():
            log.emit(event, step=1)
    (folder / EVENTS).write_bytes(lines + (folder / EVENTS).read_bytes().partition(b"\n")[2])
    return folder


def damaged(lines: list[str], draw: random.Random) -> tuple[list[str], str]:
    """Remove or replace one value, at a random depth of a random line."""
    number = draw.randrange(len(lines))
    event = json.loads(lines[number])

    def places(value: Any) -> Iterator[tuple[Any, Any]]:
        for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
            yield value, key
            yield from places(value[key])

    container, key = draw.choice(list(places(event)))
    if draw.random() < 0.25 and isinstance(container, dict):
        del container[key]
        what = f"without {key}"
    else:
        container[key] = draw.choice(WRONG)
        what = f"{key} is {container[key]!r}"
    return [*lines[:number], json.dumps(event) + "\n", *lines[number + 1 :]], f"{event.get('kind')}: {what}"


def show_all(root: Path, folder: Path, cache: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield everything that shows a run, by name."""
    watcher = Watcher(root, cache=cache)
    yield "list", lambda: [run.brief() for run in find_runs(root)]
    yield "compare", lambda: str(compare_runs([root]))
    yield "report", lambda: (write_report if open_run(folder, cache=cache).kind == "growth" else write_run_report)(folder)
    yield "card", lambda: write_card(folder)
    yield "overview", watcher.overview
    yield "page", lambda: watcher.page(name_in_address(folder))
    with open(os.devnull, "w") as nowhere:
        screen = Screen(Watcher(folder, cache=cache), [folder], has_keys=False)
        yield "terminal", lambda: Console(file=nowhere).print(screen.view(120))


@pytest.mark.parametrize("kind", ["growth", *OTHERS])
@pytest.mark.parametrize("trials", [2, pytest.param(21, marks=pytest.mark.slow)])
def test_wrong_values_in_a_log_are_left_out_by_everything_that_shows_runs(kind: str, trials: int, tmp_path: Path) -> None:
    folder, draw = made(tmp_path / "runs" / kind, kind), random.Random(trials)
    whole = (folder / EVENTS).read_text().splitlines(keepends=True)
    for trial in range(trials):
        lines, what = whole, ["nothing wrong"]
        for _ in range(DAMAGES if trial else 0):
            lines, one = damaged(lines, draw)
            what.append(one)
        (folder / EVENTS).write_text("".join(lines))
        for name, show in show_all(folder.parent, folder, tmp_path / "cache"):
            try:
                show()
            except Exception as error:
                if trial == 0 or not isinstance(error, RunError | EventError | GrowthError | ConfigError):  # these are refused in words
                    raise AssertionError(f"{name} fails on {'; '.join(what)}") from error


def test_a_lost_field_does_not_stop_a_query(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    folder = made(tmp_path / "run", "growth")
    whole = (folder / EVENTS).read_text().splitlines(keepends=True)
    for where in ("env", "rank", "step"):
        (folder / EVENTS).write_text("".join([*whole, json.dumps(json.loads(whole[-1]) | {where: 10**30}) + "\n"]))
        assert query("select count(*) from events", [folder]).rows == [(len(whole),)]
    for seed in range(10):
        (folder / EVENTS).write_text("".join(damaged(whole, random.Random(seed))[0]))
        assert query("select count(*) from runs", [folder]).rows == [(1,)]


WRONG_FIELDS: list[tuple[str, dict[str, Any]]] = [
    ("calibration", {"high": [0.5]}),  # with bins that are not whole
    ("calibration", {"predicted": []}),
    ("calibration", {"steps": [-9]}),
    ("calibration", {"low": [-1e308], "high": [1e308], "achieved": [1e308], "predicted": [1e308], "steps": [99]}),
    ("round_fought", {"results": {"a": [-1, 0, 0]}}),
    ("league_changed", {"ratings": {"a": ["nan", "nan"], "b": [1.0, "nan"]}}),
    ("league_changed", {"against": {"a": [3, -1, 0]}}),
]


@pytest.mark.parametrize(("kind", "wrong"), WRONG_FIELDS)
def test_numbers_that_cannot_be_do_not_stop_a_page(kind: str, wrong: dict[str, Any], tmp_path: Path) -> None:
    folder = made(tmp_path / "runs" / "arena", "arena")
    lines = (folder / EVENTS).read_text().splitlines(keepends=True)
    line = next(line for line in lines if json.loads(line)["kind"] == kind)
    (folder / EVENTS).write_text("".join([*lines, json.dumps(json.loads(line) | wrong) + "\n"]))
    for _, show in show_all(folder.parent, folder, tmp_path / "cache"):
        show()
    watcher = Watcher(folder, cache=tmp_path / "cache")
    watcher.refresh()
    page = watcher.page(name := name_in_address(folder))
    assert page is not None
    watcher.series(name, [*page["series"], *page["computed"]], {}, None)


def test_a_line_without_one_of_its_fields_is_in_no_table_of_events(tmp_path: Path) -> None:
    folder = made_growth(tmp_path / "run", [1.0, 0.5, 0.25])
    lines = (folder / EVENTS).read_text().splitlines(keepends=True)
    number = next(number for number, line in enumerate(lines) if '"epoch":2,' in line)
    lines[number] = lines[number].replace('"train_loss"', '"lost"')
    (folder / EVENTS).write_text("".join(lines))
    run = open_run(folder)
    table = events_table([folder], "epoch_ended")
    epochs = [row[list(table.columns).index("epoch")] for row in table.rows]
    assert epochs == [event["epoch"] for event in run.index.events("epoch_ended")] == [1, 3]
    assert (run.index.skipped, table.columns["train_loss"], "lost" in table.columns) == (1, "DOUBLE", False)
    pytest.importorskip("duckdb")
    assert query("select epoch, train_loss + 0 from epoch_ended", [folder]).rows == [(1, 1.0), (3, 0.25)]
    assert query("select count(*) from events where kind = 'epoch_ended'", [folder]).rows == [(2,)]


def test_lines_that_do_not_fit_are_counted_where_the_run_is_shown(tmp_path: Path) -> None:
    folder = made_growth(tmp_path / "runs" / "one", [1.0, 0.5])
    save(GrowthConfig(), folder / CONFIG)
    lines = (folder / EVENTS).read_text().splitlines(keepends=True)
    (folder / EVENTS).write_text("".join(line.replace('"train_loss"', '"lost"') for line in lines))
    page = Watcher(folder, cache=tmp_path / "cache").page(name_in_address(folder))
    assert page is not None
    assert page["skipped"] == 2
    assert "2 damaged lines of its log are left out" in write_report(folder).read_text()


def test_a_line_with_an_unknown_stage_does_not_fit_its_kind() -> None:
    def line(stage: str) -> bytes:
        entered = {"epoch": 1, "slot": "a", "number": None, "blueprint": "mlp", "stage": stage, "reason": ""}
        return json.dumps({"kind": "stage_entered", "time": 1.0, "run": "run", "rank": 0, **entered}).encode()

    assert all(fields_of(line(stage.name)) is not None for stage in Stage)
    assert fields_of(line("GERMINATED\x1b[2J")) is None
