"""Runs and events as tables: for files (CSV, Parquet) and for questions in SQL. Imports no torch.

    write_table(numbers_table(["runs/first"]), "first.csv")
    table = query("select run, min(val_loss) from epoch_ended group by run", ["runs"])

Tables for SQL are `runs`, `seeds` (the seeds of growing runs), `events` (all events, each as JSON), and one for each kind of event, with
its fields as columns. SQL needs DuckDB. It reads the log of each run once, and can neither change a run nor read other files.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from esper.jit import no_garbage_collection
from esper.runs.analysis import ledger_of
from esper.runs.catalog import Run, open_run
from esper.runs.compare import expand, seed_of, settings_read, short_names
from esper.runs.folder import RunError

PLACE = ("run", "step", "time", "rank", "env")  # first columns of the table of a kind of event
_NOT_FINITE = frozenset({"nan", "inf", "-inf"})  # texts that stand for numbers
_TYPES = {"BIGINT": "int64", "DOUBLE": "float64", "BOOLEAN": "bool", "VARCHAR": "string", "JSON": "string"}  # in SQL: in Parquet


class Table(NamedTuple):
    """Rows with named columns. The types are those of SQL; lists and dicts in a column of JSON are plain values."""

    columns: dict[str, str]  # name -> BIGINT, DOUBLE, BOOLEAN, VARCHAR or JSON
    rows: list[tuple[Any, ...]]


class NamedRun(NamedTuple):
    """A run with a name that no other run of the table has."""

    name: str
    run: Run


def opened(places: Iterable[Path | str]) -> list[NamedRun]:
    """Return the runs in these places, with their events read."""
    folders = expand(places)
    return [NamedRun(name, open_run(folder)) for name, folder in zip(short_names(folders), folders, strict=True)]


def runs_table(runs: Sequence[NamedRun]) -> Table:
    """Return one row for each run: what `esper runs ls` shows, its seed, and its settings as JSON."""
    columns = {"run": "VARCHAR", "folder": "VARCHAR", "kind": "VARCHAR", "state": "VARCHAR", "seed": "BIGINT", "progress": "DOUBLE"}
    columns |= {"step": "BIGINT", "started": "DOUBLE", "touched": "DOUBLE", "figure": "VARCHAR", "last": "DOUBLE", "best": "DOUBLE"}
    columns |= {"tags": "JSON", "note": "VARCHAR", "settings": "JSON"}
    rows = []
    for name, run in runs:
        config = settings_read(run)
        values = msgspec.structs.asdict(run.summary()) | {"run": name, "seed": seed_of(config), "settings": config}
        rows.append(tuple(values[column] for column in columns))
    return Table(columns, rows)


def seeds_table(runs: Sequence[NamedRun]) -> Table:
    """Return one row for each seed of the growing runs, from their ledgers."""
    columns = {"run": "VARCHAR", "number": "BIGINT", "slot": "VARCHAR", "blueprint": "VARCHAR", "raise_mode": "VARCHAR", "born": "BIGINT"}
    columns |= {"stage": "VARCHAR", "outcome": "VARCHAR", "ended": "BIGINT", "why": "VARCHAR", "gain": "DOUBLE", "gain_low": "DOUBLE"}
    columns |= {"gain_high": "DOUBLE", "rent": "DOUBLE", "parameters": "BIGINT", "flops": "BIGINT", "after": "BIGINT"}
    columns |= {"brought_back": "BIGINT", "skipped": "BIGINT", "stages": "JSON", "contributions": "JSON"}
    rows = []
    for name, run in runs:
        for seed in ledger_of(run.index).seeds if run.kind == "growth" else []:
            gains = {gain: getattr(seed, gain) for gain in ("gain", "gain_low", "gain_high")}
            values = seed.as_dict() | gains | {"run": name}
            rows.append(tuple(values[column] for column in columns))
    return Table(columns, rows)


def numbers_table(places: Iterable[Path | str]) -> Table:
    """Return all numbers of runs, one in each row: run, name of the series, step, time and value."""
    rows: list[tuple[Any, ...]] = []
    for name, run in opened(places):
        for series in run.index.names():
            steps, times, values = run.index.series(series)
            numbers = zip(steps.tolist(), times.tolist(), values.tolist(), strict=True)
            rows += [(name, series, None if step < 0 else step, time, value) for step, time, value in numbers]
    return Table({"run": "VARCHAR", "name": "VARCHAR", "step": "BIGINT", "time": "DOUBLE", "value": "DOUBLE"}, rows)


def events_table(places: Iterable[Path | str], kind: str) -> Table:
    """Return the events of one kind, one in each row, with a column for each field."""
    runs = opened(places)
    _check_kind(kind, runs)
    return _tables_of(runs, {kind})[kind]


def _check_kind(kind: str, runs: Sequence[NamedRun]) -> None:
    kinds = sorted({kind for _, run in runs for kind in run.index.kinds})
    if kind not in kinds:
        raise RunError(f"no run has events of the kind {kind!r}; there are {', '.join(kinds)}")


def _tables_of(runs: Sequence[NamedRun], kinds: set[str]) -> dict[str, Table]:
    """Return a table for each of the kinds of events that the runs have."""
    return {kind: _table_of([{**event, "run": name} for name, run in runs for event in run.index.events(kind)]) for kind in kinds}


def _table_of(events: list[dict[str, Any]]) -> Table:
    fields = dict.fromkeys(name for event in events for name in event if name not in (*PLACE, "kind"))
    types, columns = {}, []
    for name in (*PLACE, *fields):
        values = [event.get(name) for event in events]
        types[name] = kind = _type_of(values)
        columns.append([None if value is None else float(value) for value in values] if kind == "DOUBLE" else values)
    return Table(types, list(zip(*columns, strict=True)))


def _type_of(values: Sequence[Any]) -> str:
    """Return the narrowest type of a column that holds all values. Texts that stand for numbers are numbers, unless there are others.

    >>> _type_of([1, None]), _type_of([1, "nan"]), _type_of(["nan", "a"]), _type_of([True]), _type_of([[1]]), _type_of([2**64])
    ('BIGINT', 'DOUBLE', 'VARCHAR', 'BOOLEAN', 'JSON', 'DOUBLE')
    """
    types = set(map(type, values)) - {type(None)}
    if str in types and {value for value in values if isinstance(value, str)} <= _NOT_FINITE:
        types = types - {str} | {float}
    if types == {int} and all(value is None or -(2**63) <= value < 2**63 for value in values):
        return "BIGINT"
    if types and types <= {int, float}:
        return "DOUBLE"
    return {frozenset({str}): "VARCHAR", frozenset({bool}): "BOOLEAN"}.get(frozenset(types), "JSON")


# Files


def write_table(table: Table, path: Path | str) -> None:
    """Write a table into a .csv or .parquet file. Raise RunError for other names, and for Parquet without pyarrow and DuckDB."""
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in (".csv", ".parquet"):
        raise RunError(f"{path} is neither a .csv nor a .parquet file; name one of them")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        (_write_csv if suffix == ".csv" else _write_parquet)(table, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_csv(table: Table, path: Path) -> None:
    with open(path, "w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = csv.writer(file)
        writer.writerow(table.columns)
        writer.writerows([_text(value) for value in row] for row in table.rows)


def _text(value: Any) -> Any:
    """Return a cell of a CSV file: lists, dicts and truth as JSON."""
    return msgspec.json.encode(value).decode() if isinstance(value, list | dict | bool) else value


def _write_parquet(table: Table, path: Path) -> None:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        try:
            import duckdb
        except ImportError as error:
            how = "pip install 'esper-grow[data]' (pyarrow) or pip install 'esper-grow[query]' (duckdb), or write a .csv file"
            raise RunError(f"a Parquet file needs pyarrow or duckdb; install one with: {how}") from error
        with contextlib.closing(duckdb.connect()) as database:
            _create(database, "export", table)
            quoted = str(path).replace("'", "''")
            database.execute(f"copy export to '{quoted}' (format parquet)")
        return
    arrays = {}
    for index, (name, kind) in enumerate(table.columns.items()):
        values = [row[index] for row in table.rows]
        if kind == "JSON":
            values = [None if value is None else msgspec.json.encode(value).decode() for value in values]
        arrays[name] = pyarrow.array(values, type=getattr(pyarrow, _TYPES[kind])())
    parquet.write_table(pyarrow.table(arrays), path)


# SQL


def query(sql: str, places: Iterable[Path | str]) -> Table:
    """Answer one select statement about runs. Raise RunError if it is wrong, or if DuckDB is not installed."""
    try:
        import duckdb
    except ImportError as error:
        raise RunError("a query needs duckdb; install it with: pip install 'esper-grow[query]'") from error
    runs = opened(places)
    with contextlib.closing(duckdb.connect()) as database:
        try:
            statements = duckdb.extract_statements(sql)
            if len(statements) != 1 or statements[0].type not in (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN):
                raise RunError("a query is one select statement; runs are only read")
            with no_garbage_collection():
                names = _create_tables(database, sql, runs)
            # From here on the statement sees nothing but these tables.
            database.execute("set enable_external_access = false")
            database.execute("set lock_configuration = true")
            found = database.execute(statements[0])
            return Table({str(column[0]): str(column[1]) for column in found.description or ()}, found.fetchall())
        except duckdb.CatalogException as error:
            if "Table with name" not in str(error):
                raise RunError(f"the query is wrong: {error}") from error
            raise RunError(f"{str(error).splitlines()[0].removeprefix('Catalog Error: ')} The tables are {', '.join(names)}.") from error
        except duckdb.Error as error:
            raise RunError(f"the query is wrong: {error}") from error


def _create_tables(database: Any, sql: str, runs: Sequence[NamedRun]) -> list[str]:
    """Make the tables that the statement may be about; return the names of all that there could be."""
    kinds = sorted({kind for _, run in runs for kind in run.index.kinds} - {"runs", "seeds", "events"})
    words = {word.lower() for word in re.findall(r"\w+", sql)}
    lists_tables = bool(words & {"show", "describe", "summarize", "information_schema", "duckdb_tables"})
    wanted = {kind for kind in kinds if lists_tables or kind.lower() in words}
    _create(database, "runs", runs_table(runs))
    if lists_tables or "seeds" in words:
        _create(database, "seeds", seeds_table(runs))
    if lists_tables or "events" in words:
        _create(database, "events", _all_events(runs))
    for kind, table in _tables_of(runs, wanted).items():
        _create(database, kind, table)
    return ["runs", "seeds", "events", *kinds]


def _all_events(runs: Sequence[NamedRun]) -> Table:
    columns = {"run": "VARCHAR", "kind": "VARCHAR", "step": "BIGINT", "time": "DOUBLE", "rank": "BIGINT", "env": "BIGINT", "event": "JSON"}
    rows = [
        (name, *(event.get(key) for key in list(columns)[1:-1]), event)
        for name, run in runs
        for event in run.index.in_order(run.index.kinds)
    ]
    return Table(columns, rows)


def _create(database: Any, name: str, table: Table) -> None:
    """Copy a table into the database, by way of a file of JSON lines, which DuckDB reads faster than it takes rows from Python."""
    keys = [f"c{index}" for index in range(len(table.columns))]
    kinds = ", ".join(f"{key}: '{kind}'" for key, kind in zip(keys, table.columns.values(), strict=True))
    names = ", ".join(f"{key} as {_quoted(column)}" for key, column in zip(keys, _distinct(table.columns), strict=True))
    # JSON has no NaN and no infinity: they are written as texts, which DuckDB turns into numbers again.
    columns = [list(column) for column in zip(*table.rows, strict=True)]
    for column, kind in zip(columns, table.columns.values(), strict=False):
        if kind == "DOUBLE":
            column[:] = [value if value is None or value - value == 0 else str(value) for value in column]
    encoder = msgspec.json.Encoder()
    with tempfile.TemporaryDirectory(prefix="esper-query-") as folder:
        path = Path(folder) / "rows.json"
        with open(path, "wb") as file:
            for rows in _batches(zip(*columns, strict=True)):
                file.write(encoder.encode_lines([dict(zip(keys, row, strict=True)) for row in rows]))
        source = f"read_json('{path}', format = 'newline_delimited', columns = {{{kinds}}})"
        database.execute(f"create table {_quoted(name)} as select {names} from {source}")


def _batches(rows: Iterator[tuple[Any, ...]]) -> Iterator[list[tuple[Any, ...]]]:
    while batch := list(itertools.islice(rows, 10_000)):
        yield batch


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _distinct(names: Iterable[str]) -> list[str]:
    """Return names that stay apart in SQL, which ignores case.

    >>> _distinct(["a", "A", "b"])
    ['a', 'A_2', 'b']
    """
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name.lower()] = count = seen.get(name.lower(), 0) + 1
        found.append(name if count == 1 else f"{name}_{count}")
    return found
