"""`make faults`: end, disturb and damage runs of all trainers, and write what came of it into docs/faults.md.

    python -m tests.faults                       # everything, in some minutes on two cores
    python -m tests.faults --short               # a part of it, as in `make test`; writes nothing
    python -m tests.faults --only damage hostile

Trials that are not good are printed, and then the exit code is 1.
"""

from __future__ import annotations

import argparse
import functools
import gc
import math
import os
import pickle
import re
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro._docstrings

import tests.preloaded  # noqa: F401 — loads what takes long before anything is forked
from tests.faults import damage, deaths, hostile
from tests.faults.disk import Disk
from tests.faults.runs import TRAINERS, command, prepare, ranks

PAGE = Path(__file__).parents[2] / "docs/faults.md"
BEGIN, END = "<!-- written by make faults -->\n", "<!-- end -->\n"
SHOWN = 5  # examples of what is not good, of each row and column
MEMORY = 3 * 2**30  # bytes that a trial may take beyond what is loaded; a reader of an endless file would take everything


@dataclass
class Row:
    """A row of the table: trials of one kind."""

    what: str
    trials: int = 0
    bad: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in COLUMNS})

    def add(self, trials: int, **bad: Sequence[str]) -> None:
        self.trials += trials
        for name, texts in bad.items():
            self.bad[name] += texts

    def cells(self) -> list[str]:
        count = sum(map(len, self.bad.values()))
        return [
            self.what,
            f"{self.trials:,}",
            *(str(len(texts)) for texts in self.bad.values()),
            f"{100 * upper_bound(count, self.trials):.2g} %",
        ]


COLUMNS = {"lost": "lost", "wrong": "silently wrong", "hung": "hangs", "raw": "raw messages"}


def upper_bound(count: int, trials: int, confidence: float = 0.95) -> float:
    """Return the upper end of the one-sided interval of Clopper and Pearson for a rate; 3 / trials for a count of 0, nearly.

    >>> round(upper_bound(0, 1000), 4), round(upper_bound(2, 1000), 4), upper_bound(3, 3)
    (0.003, 0.0063, 1.0)
    """
    if count >= trials:
        return 1.0
    low, high = count / trials, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        terms = (
            math.lgamma(trials + 1)
            - math.lgamma(k + 1)
            - math.lgamma(trials - k + 1)
            + k * math.log(rate)
            + (trials - k) * math.log1p(-rate)
            for k in range(count + 1)
        )
        low, high = (rate, high) if sum(map(math.exp, terms)) > 1 - confidence else (low, rate)
    return high


def warm(root: Path) -> None:
    """Run every trainer and reader once in this process, so that forked ones find all modules and compiled functions."""
    tokenization = tyro._docstrings._ClassTokenization
    tokenization.make = staticmethod(functools.cache(tokenization.make))  # type: ignore[method-assign]
    with chdir(root), open(os.devnull, "w") as nothing, redirect_stdout(nothing):
        for trainer in TRAINERS.values():
            folder = prepare(root / "warm")
            for argv in (trainer.begin(), *(argv for argv in damage.COMMANDS if "other" not in argv)):
                assert command(argv, folder) == 0, argv
    gc.collect()
    gc.freeze()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)


def shared(trials: Sequence[Any], function: Callable[[Any, Path], Any], root: Path, jobs: int) -> list[Any]:
    """Return `function(trial, folder)` of all trials, in so many forked processes."""
    children = []
    for share in range(jobs):
        file = tempfile.TemporaryFile()  # noqa: SIM115 (closed below)
        child = os.fork()
        if not child:
            code = 1
            try:
                file.write(pickle.dumps([function(trial, root / f"trial {share}") for trial in trials[share::jobs]]))
                file.flush()
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(code)
        children.append((child, file))
    results: list[Any] = []
    for child, file in children:
        _, status = os.waitpid(child, 0)
        assert status == 0, "a share of the trials ended with an error of the harness"
        file.seek(0)
        results += pickle.loads(file.read())
        file.close()
    return results


# What is tried


def run_deaths(root: Path, jobs: int, *, is_short: bool) -> list[Row]:
    whole = deaths.wholes(root)
    counts = (28, 2, 12, 8) if is_short else (950, 50, 360, 100)
    trials = deaths.planned(whole, **dict(zip(("deaths", "kills", "failures", "shorts"), counts, strict=True)))
    names = {
        "death": "death at a call that changes a file",
        "death while resuming": "death at such a call of a resumed training",
        "kill": "SIGKILL at a random time",
        "failure": "disk full, quota or input/output error at a call, once or for good",
        "short write": "a write that writes a half",
    }
    rows = {kind: Row(f"{name}: then read, resumed and compared") for kind, name in names.items()}

    def tried(trial: deaths.Trial, folder: Path) -> tuple[deaths.Trial, deaths.Verdict]:
        return trial, deaths.tried(trial, whole[trial.trainer], folder, reads=trial.at % 2 == 0)

    for trial, verdict in shared(trials, tried, root, jobs):
        rows[trial.kind].add(
            1, **{name: [f"{trial}: {text}" for text in getattr(verdict, name)[:1]] for name in COLUMNS if not _is_counted(verdict, name)}
        )
    return list(rows.values())


def _is_counted(verdict: deaths.Verdict, name: str) -> bool:
    """Return whether a trial counts already in a column before this one: a lost run is often one with a raw message too."""
    return any(getattr(verdict, before) for before in list(COLUMNS)[: list(COLUMNS).index(name)])


def run_damage(root: Path, jobs: int, *, is_short: bool) -> list[Row]:
    count = 60 if is_short else 400
    rows = {group: Row(f"damaged file: {group}") for group in damage.GROUPS}
    group_of = {name: group for group, names in damage.GROUPS.items() for name in names}
    for name, tally in shared(list(damage.KINDS), lambda name, folder: (name, _read(name, count, folder)), root, jobs):
        rows[group_of[name]].add(tally.trials, wrong=tally.wrong, hung=tally.hung, raw=tally.raw)
    runs = stopped_runs(root)
    row = Row("damaged file of a run: commands and a resumed training")
    parts = [(name, seed) for name in runs for seed in range(2 if is_short else 10)]
    for tally in shared(parts, lambda part, folder: _commands(runs[part[0]], *part, 4 if is_short else 30, folder), root, jobs):
        row.add(tally.trials, wrong=tally.wrong, hung=tally.hung, raw=tally.raw)
    return [*rows.values(), row]


def _read(name: str, count: int, folder: Path) -> damage.Tally:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return damage.read_damaged(name, count, folder)


def _commands(run: Path, trainer: str, seed: int, count: int, folder: Path) -> damage.Tally:
    return damage.command_damaged(run, TRAINERS[trainer].resume(), count, folder, seed=seed)


def stopped_runs(root: Path) -> dict[str, Path]:
    """Return a run of every trainer that died after its first checkpoint."""
    for name, trainer in TRAINERS.items():
        calls = deaths.uninterrupted(trainer, root / f"counted {name}")[1]
        ranks(trainer.begin(), prepare(root / f"stopped {name}"), 1, Disk(root / f"stopped {name}" / "run", at=len(calls) * 3 // 4))
    return {name: root / f"stopped {name}" / "run" for name in TRAINERS}


def run_hostile(root: Path, jobs: int, *, is_short: bool) -> list[Row]:
    runs = stopped_runs(root)
    trials = [(name, *trial) for name, run in runs.items() for trial in hostile.trials(run)]
    trials = trials[:: 40 if is_short else 1]

    def tried(trial: tuple[str, str, str, str], folder: Path) -> tuple[str, damage.Tally]:
        name, file, group, kind = trial
        return group, hostile.command_hostile(runs[name], TRAINERS[name].resume(), file, (group, kind), folder)

    rows = {group: Row(f"{group} in place of a file of a run, all commands") for group in hostile.HOSTILE}
    for group, tally in shared(trials, tried, root, jobs):
        rows[group].add(tally.trials, wrong=tally.wrong, hung=tally.hung, raw=tally.raw)
    escapes = Row("escape sequences in all texts of a run, all commands")
    for tally in shared(list(runs), lambda name, folder: hostile.command_escapes(runs[name], TRAINERS[name].resume(), folder), root, jobs):
        escapes.add(tally.trials, wrong=tally.wrong, hung=tally.hung, raw=tally.raw)
    return [*rows.values(), escapes]


PARTS = {"deaths": run_deaths, "damage": run_damage, "hostile": run_hostile}


# The table


def table(rows: Sequence[Row]) -> str:
    heading = ["what was done", "trials", *COLUMNS.values(), "rate of all four, at most"]
    total = Row("all")
    for row in rows:
        total.add(row.trials, **row.bad)
    lines = [heading, ["---"] * len(heading), *(row.cells() for row in [*rows, total])]
    left_out = "".join(f"\nLeft out: `esper {name}`; {package} is not installed.\n" for name, package in damage.LEFT_OUT.items())
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + left_out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    return run(**vars(parser.parse_args()))


def run(*, short: bool, only: Sequence[str], jobs: int) -> int:
    """Run these parts, print what is not good, and return 1 if there was anything. The whole of it writes the table."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    root = Path(tempfile.mkdtemp(prefix="esper-faults-", dir=memory))
    os.environ["XDG_CACHE_HOME"] = str(root / "cache")
    rows: list[Row] = []
    try:
        warm(root)
        for part in only:
            begin = time.monotonic()
            rows += PARTS[part](root, jobs, is_short=short)
            print(f"{part}: {time.monotonic() - begin:.0f} s", flush=True)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    for row in rows:
        for name, texts in row.bad.items():
            for text in texts[:SHOWN]:
                print(f"{COLUMNS[name]}, {row.what}: {text}")
            if len(texts) > SHOWN:
                print(f"... and {len(texts) - SHOWN} more")
    print(table(rows))
    if not short and list(only) == list(PARTS):
        PAGE.write_text(re.sub(f"{BEGIN}.*{END}", lambda found: BEGIN + "\n" + table(rows) + "\n" + END, PAGE.read_text(), flags=re.DOTALL))
    return int(any(texts for row in rows for texts in row.bad.values()))


if __name__ == "__main__":
    sys.exit(main())
