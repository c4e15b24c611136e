"""Runs and events as tables: CSV, Parquet and SQL."""

from __future__ import annotations

import csv
import json
import math
import sys
from pathlib import Path

import pytest

from esper.runs import RunError, events_table, numbers_table, query, write_table
from esper.runs.folder import EVENTS
from tests.runs.made import made_growth, made_ppo


def test_a_csv_file_holds_every_number_of_every_event(tmp_path: Path) -> None:
    made_growth(tmp_path / "a", [1.0, 0.25])
    made_growth(tmp_path / "b", [3.0], seed=1)
    write_table(numbers_table([tmp_path / "a", tmp_path / "b"]), tmp_path / "all.csv")
    with open(tmp_path / "all.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    losses = [(row["run"], int(row["step"]), float(row["value"])) for row in rows if row["name"] == "epoch_ended/val_loss"]
    assert losses == [("a", 1, 1.0), ("a", 2, 0.25), ("b", 1, 3.0)]


def test_events_of_one_kind_have_a_column_for_each_field(tmp_path: Path) -> None:
    made_growth(tmp_path / "a", [1.0, 0.25])
    table = events_table([tmp_path / "a"], "epoch_ended")
    names = list(table.columns)
    assert names[:5] == ["run", "step", "time", "rank", "env"]
    assert (table.columns["val_loss"], table.columns["epoch"], table.columns["slots"]) == ("DOUBLE", "BIGINT", "JSON")
    assert [row[names.index("val_loss")] for row in table.rows] == [1.0, 0.25]
    with pytest.raises(RunError, match="no run has events of the kind 'epoch'; there are epoch_ended"):
        events_table([tmp_path / "a"], "epoch")


def test_numbers_that_are_not_finite_stay_numbers(tmp_path: Path) -> None:
    folder = made_ppo(tmp_path / "a", [1.0, math.nan, -math.inf])
    table = events_table([folder], "checkpoint_evaluated")
    values = [row[list(table.columns).index("mean_return")] for row in table.rows]
    assert table.columns["mean_return"] == "DOUBLE"
    assert values[0] == 1.0
    assert math.isnan(values[1])
    assert values[2] == -math.inf


def test_a_file_that_is_neither_csv_nor_parquet_is_refused_and_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    made_ppo(tmp_path / "a", [1.0])
    table = numbers_table([tmp_path / "a"])
    with pytest.raises(RunError, match=r"neither a \.csv nor a \.parquet file"):
        write_table(table, tmp_path / "a.xlsx")
    with pytest.raises(FileNotFoundError):
        write_table(table, tmp_path / "nowhere" / "a.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_missing_packages_are_named_with_the_command_that_installs_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_ppo(tmp_path / "a", [1.0])
    for name in ("duckdb", "pyarrow"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(RunError, match=r"pip install 'esper-grow\[query\]'"):
        query("select 1", [tmp_path])
    with pytest.raises(RunError, match=r"pip install 'esper-grow\[data\]'"):
        write_table(numbers_table([tmp_path / "a"]), tmp_path / "a.parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


# With DuckDB and pyarrow


@pytest.mark.extra("duckdb", "pyarrow")
@pytest.mark.parametrize("absent", ["duckdb", "pyarrow"])
def test_a_parquet_file_holds_the_same_whichever_package_writes_it(tmp_path: Path, absent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.parquet

    made_growth(tmp_path / "a", [1.0, math.nan, 0.25])
    table = events_table([tmp_path / "a"], "epoch_ended")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, absent, None)
        write_table(table, tmp_path / "a.parquet")
    read = pyarrow.parquet.read_table(tmp_path / "a.parquet")
    assert read.column_names == list(table.columns)
    assert str(read.column("val_loss").to_pylist()) == "[1.0, nan, 0.25]"
    assert json.loads(read.column("slots").to_pylist()[0]) == []


@pytest.mark.extra("duckdb")
def test_sql_sees_runs_all_events_and_a_table_for_each_kind(tmp_path: Path) -> None:
    made_growth(tmp_path / "a", [1.0, 0.25], learning_rate=0.5)
    made_growth(tmp_path / "b", [3.0, math.inf], seed=7)
    best = query("select run, min(val_loss) as best, max(val_loss) from epoch_ended group by run order by run", [tmp_path])
    assert best.rows == [("a", 0.25, 1.0), ("b", 3.0, math.inf)]
    assert list(best.columns)[:2] == ["run", "best"]
    joined = "select r.run, r.seed, r.state, (r.settings->>'learning_rate')::double, count(*) from runs r join epoch_ended e using (run)"
    assert query(f"{joined} group by all order by 1", [tmp_path]).rows == [("a", 0, "finished", 0.5, 2), ("b", 7, "finished", 0.001, 2)]
    assert query("select count(*) from events where kind = 'epoch_ended' and (event->>'epoch') = '2'", [tmp_path]).rows == [(2,)]
    assert ("final_test",) in query("show tables", [tmp_path]).rows


@pytest.mark.extra("duckdb")
def test_sql_can_neither_change_anything_nor_read_other_files(tmp_path: Path) -> None:
    folder = made_ppo(tmp_path / "a", [1.0])
    (tmp_path / "secret.csv").write_text("a\n1\n")
    before = (folder / EVENTS).read_bytes()
    for sql in (
        f"copy runs to '{tmp_path / 'out.csv'}'",
        "drop table runs",
        f"attach '{tmp_path / 'x.db'}'",
        "select 1; select 2",
        "set enable_external_access = true",
        "",
    ):
        with pytest.raises(RunError, match="one select statement"):
            query(sql, [folder])
    for sql in (f"select * from '{tmp_path / 'secret.csv'}'", f"select * from read_text('{tmp_path / 'secret.csv'}')"):
        with pytest.raises(RunError, match="query is wrong: Permission Error"):
            query(sql, [folder])
    assert (folder / EVENTS).read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "secret.csv"]


@pytest.mark.extra("duckdb")
def test_a_wrong_table_is_answered_with_the_names_of_all_tables(tmp_path: Path) -> None:
    made_ppo(tmp_path / "a", [1.0])
    with pytest.raises(RunError, match=r"The tables are runs, seeds, events, checkpoint_evaluated, evaluated"):
        query("select * from epoch_ended", [tmp_path])
    with pytest.raises(RunError, match="query is wrong: Parser Error"):
        query("selec", [tmp_path])


@pytest.mark.extra("duckdb")
def test_names_with_quotes_and_unusual_kinds_become_no_sql(tmp_path: Path) -> None:
    folder = made_ppo(tmp_path / "it's", [1.0])
    with open(folder / EVENTS, "a") as file:
        file.write('{"kind":"x\\"; drop table runs; --","time":1.0,"run":"r","rank":0,"env":null,"step":1,"a\\"b":2,"A\\"B":3}\n')
    assert query("select run from runs", [tmp_path]).rows == [("it's",)]
    assert ('x"; drop table runs; --',) in query("show tables", [tmp_path]).rows
