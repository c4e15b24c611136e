"""`make faults`: end, disturb and damage runs of all trainers, and write what came of it into docs/faults.md.

    python -m tests.faults                                        # everything, in some minutes on 16 cores; then the page
    python -m tests.faults --jobs 14 --seconds 500 --out faults   # the same on another machine: faults.json, and the table as faults.md
    python -m tests.faults --page faults/faults.json              # the page from such a record
    python -m tests.faults --share 0.1 --out faults               # a tenth of the trials of each kind
    python -m tests.faults --short --only damage hostile          # as little as in `make test`

The record is written again every few seconds, so that it is there when the process is killed. Trials that are not good are printed, and the
exit code is 1 if there are any.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import gc
import json
import math
import multiprocessing
import os
import platform
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro._docstrings

import tests.preloaded  # noqa: F401 — loads what takes long before anything is forked
from tests.faults import damage, deaths, hostile
from tests.faults.runs import TRAINERS, Tally, command, prepare

PAGE = Path(__file__).parents[2] / "docs/faults.md"
BEGIN, END = "<!-- written by make faults -->\n", "<!-- end -->\n"
SHOWN = 5  # examples of what is not good, of each row and column
MEMORY = 3 * 2**30  # bytes that a trial may take beyond what is loaded; a reader of an endless file would take everything
COLUMNS = {"lost": "lost", "wrong": "silently wrong", "hung": "hangs", "raw": "raw messages"}
EVERY_S = 5.0  # between two writings of the record

Job = Callable[[Path], Tally]  # one or more trials of the same kind, in a folder that it may empty


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
    """Run every trainer and reader in this process, so that forked ones find all modules and compiled functions."""
    tokenization = tyro._docstrings._ClassTokenization
    tokenization.make = staticmethod(functools.cache(tokenization.make))  # type: ignore[method-assign]
    with chdir(root), open(os.devnull, "w") as nothing, redirect_stdout(nothing):
        for trainer in TRAINERS.values():
            folder = prepare(root / "warm")
            for argv in (trainer.begin(), ["report", "run"]):
                assert command(argv, folder) == 0, argv
        for argv in (argv for argv in damage.COMMANDS if "other" not in argv):
            assert command(argv, folder) == 0, argv
    gc.collect()
    gc.freeze()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)


# What is tried: jobs with the names of their rows

DEATHS = {
    "death": "death at a call that changes a file",
    "death while resuming": "death at such a call of a resumed training",
    "kill": "SIGKILL at a random time",
    "failure": "disk full, quota or input/output error at a call, once or for good",
    "short write": "a write that writes a half",
}
RUNS_OF_SHORT_FORM = ("ppo train", "grow")  # for damaged and hostile files
Jobs = list[tuple[str, Job]]


def jobs_of_deaths(whole: deaths.Wholes, *, share: float, is_short: bool) -> Jobs:
    def job(trial: deaths.Trial, folder: Path) -> Tally:
        verdict = deaths.tried(trial, whole.of(trial.trainer), folder, reads=trial.at % 2 == 0)
        for name in COLUMNS:  # a trial counts once: a lost run is often one with a raw message too
            if texts := getattr(verdict, name):
                return Tally(1, **{name: [f"{trial}: {texts[0]}"]})
        return Tally(1)

    trials = deaths.planned(whole, share)
    trials = deaths.few(trials) if is_short else trials
    for name in {trial.trainer for trial in trials}:
        whole.of(name)  # before anything is forked
    return [(f"{DEATHS[trial.kind]}: then read, resumed and compared", functools.partial(job, trial)) for trial in trials]


def jobs_of_damage(whole: deaths.Wholes, *, share: float, is_short: bool) -> Jobs:
    def reads(name: str, count: int, seed: int, folder: Path) -> Tally:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return damage.read_damaged(name, count, folder, seed=seed)

    def commands(name: str, count: int, seed: int, folder: Path) -> Tally:
        return damage.command_damaged(whole.stopped(name), TRAINERS[name].resume(), count, folder, seed=seed)

    # 400 of each kind of file in four parts, and 300 in the runs of each trainer in ten.
    found: Jobs = []
    count, parts = (20, 1) if is_short else (round(100 * share), 4)
    for group, names in damage.GROUPS.items():
        found += [(f"damaged file: {group}", functools.partial(reads, name, count, seed)) for name in names for seed in range(parts)]
    count, parts = (6, 1) if is_short else (round(30 * share), 10)
    for name in RUNS_OF_SHORT_FORM if is_short else TRAINERS:
        whole.stopped(name)  # before anything is forked
        row = "damaged file of a run: commands and a resumed training"
        found += [(row, functools.partial(commands, name, count, seed)) for seed in range(parts)]
    return found


def jobs_of_hostile(whole: deaths.Wholes, *, share: float, is_short: bool) -> Jobs:
    def job(name: str, file: str, kind: tuple[str, str], folder: Path) -> Tally:
        return hostile.command_hostile(whole.stopped(name), TRAINERS[name].resume(), file, kind, folder)

    def escapes(name: str, folder: Path) -> Tally:
        return hostile.command_escapes(whole.stopped(name), TRAINERS[name].resume(), folder)

    names = RUNS_OF_SHORT_FORM if is_short else TRAINERS
    trials = [(name, *trial) for name in names for trial in hostile.trials(whole.stopped(name))]
    trials = trials[:: 53 if is_short else round(1 / share)]
    found: Jobs = [
        (f"{group} in place of a file of a run, all commands", functools.partial(job, name, file, (group, kind)))
        for name, file, group, kind in trials
    ]
    row = "escape sequences in all texts of a run, all commands"
    return found + [(row, functools.partial(escapes, name)) for name in (["grow"] if is_short else TRAINERS)]


PARTS = {"deaths": jobs_of_deaths, "damage": jobs_of_damage, "hostile": jobs_of_hostile}


# Running them, and the record


class Workers:
    """Forked processes that take one job after the other, and write what came of it as a line of JSON into a file of their own."""

    def __init__(self, jobs: Jobs, count: int, root: Path, seconds: float) -> None:
        self._next = multiprocessing.get_context("fork").Value("l", 0)
        self._ends_at = time.monotonic() + seconds
        self._files = [root / f"done {number}" for number in range(count)]
        self._read = [0] * count
        self._children: list[int] = []
        self.failed = 0  # processes that ended with an error of the harness
        for number, file in enumerate(self._files):
            file.touch()
            child = os.fork()
            if not child:
                self._work(jobs, file, root / f"trial {number}")
            self._children.append(child)

    def _work(self, jobs: Jobs, file: Path, folder: Path) -> None:
        """Do jobs until there are none or the time is over, and end the process."""
        os.setpgid(0, 0)  # so that all processes of its trials can be ended with it
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        code = 1
        try:
            with file.open("a", buffering=1) as done:
                while time.monotonic() < self._ends_at:
                    with self._next.get_lock():
                        number, self._next.value = self._next.value, self._next.value + 1
                    if number >= len(jobs):
                        break
                    done.write(json.dumps([jobs[number][0], vars(jobs[number][1](folder))]) + "\n")
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def finished(self) -> list[tuple[str, Tally]]:
        """Return what came of the jobs that were finished since the last call."""
        found = []
        for number, file in enumerate(self._files):
            with file.open() as done:
                done.seek(self._read[number])
                for line in iter(done.readline, ""):
                    if line.endswith("\n"):
                        found.append((json.loads(line)[0], Tally(**json.loads(line)[1])))
                        self._read[number] += len(line.encode())
        return found

    def wait(self, seconds: float) -> bool:
        """Wait for so long or until all have ended, and return whether they have."""
        ends_at = time.monotonic() + seconds
        while self._children and time.monotonic() < ends_at:
            for child in list(self._children):
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    self._children.remove(child)
                    self.failed += status != 0
            time.sleep(0.05)
        return not self._children

    def end(self) -> None:
        for child in self._children:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)


def environment() -> dict[str, Any]:
    """Describe where and when the trials are run."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"^model name\s*: (.*)$", info, re.MULTILINE)
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "processor": model[1] if model else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "left_out": damage.LEFT_OUT,
    }


def record_of(rows: dict[str, Tally], **more: Any) -> dict[str, Any]:
    return environment() | more | {"rows": {name: vars(tally) for name, tally in rows.items()}}


def table(record: dict[str, Any]) -> str:
    """Return the table of a record, and what has to be known to read it."""
    heading = ["what was done", "trials", *COLUMNS.values(), "rate of all four, at most"]
    lines, total = [heading, ["---"] * len(heading)], Tally()
    rows = {name: Tally(**fields) for name, fields in record["rows"].items()}
    for tally in rows.values():
        total += tally
    for name, tally in {**rows, "all": total}.items():
        bad = [len(getattr(tally, column)) for column in COLUMNS]
        if tally.trials:
            lines.append([name, f"{tally.trials:,}", *map(str, bad), f"{100 * upper_bound(sum(bad), tally.trials):.2g} %"])
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    text += (
        f"\nOn {record['date']}, in {record['seconds'] / 60:.1f} minutes with {record['jobs']} processes on {record['cores']} cores"
        f" ({record['processor']}), with Python {record['python']} and torch {record['torch']}.\n"
    )
    if total.unnoticed:
        text += f"\nNot counted: {total.unnoticed:,} changed values in lines of `events.jsonl`, which have no digest.\n"
    for name, package in record["left_out"].items():
        text += f"\nLeft out: `esper {name}`; {package} is not installed there.\n"
    if record["done"] < record["planned"]:
        text += f"\nStopped before the end: {record['done']:,} of {record['planned']:,} parts were done, in a random order.\n"
    return text


def write_page(record: dict[str, Any]) -> None:
    PAGE.write_text(re.sub(f"{BEGIN}.*{END}", lambda found: BEGIN + "\n" + table(record) + "\n" + END, PAGE.read_text(), flags=re.DOTALL))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing new after so many")
    parser.add_argument("--share", type=float, default=1.0, help="of the trials of each kind")
    parser.add_argument("--out", type=Path, help="folder for the record")
    parser.add_argument("--page", type=Path, metavar="RECORD", help="write the page from a record, and try nothing")
    options = vars(parser.parse_args())
    if page := options.pop("page"):
        write_page(json.loads(page.read_text()))
        return 0
    return run(**options)


def run(*, short: bool, only: Sequence[str], jobs: int, seconds: float = math.inf, share: float = 1.0, out: Path | None = None) -> int:
    """Run these parts, print what is not good, and return 1 if there was anything. The whole of it writes the page."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    root = Path(tempfile.mkdtemp(prefix="esper-faults-", dir=memory))
    os.environ["XDG_CACHE_HOME"] = str(root / "cache")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # autograd that has seen a GPU refuses to work in forked processes
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rows: dict[str, Tally] = {}
    planned: Jobs = []
    done, workers = 0, None

    def record() -> dict[str, Any]:
        return record_of(rows, jobs=jobs, seconds=time.monotonic() - begin, done=done, planned=len(planned))

    try:
        # Everything that the trials share is made before anything is forked.
        warm(root)
        whole = deaths.Wholes(root)
        planned = [job for part in only for job in PARTS[part](whole, share=share, is_short=short)]
        rows |= {name: Tally() for name, _ in planned}
        planned = [planned[place] for place in np.random.default_rng(0).permutation(len(planned))]
        print(f"prepared in {time.monotonic() - begin:.0f} s; {len(planned):,} parts", flush=True)

        workers = Workers(planned, jobs, root, seconds - (time.monotonic() - begin))
        has_ended = False
        while not has_ended:
            has_ended = workers.wait(EVERY_S)
            for name, tally in workers.finished():
                rows[name] += tally
                done += 1
            if out is not None:
                write_record(record(), out)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    finally:
        if workers is not None:
            workers.end()
        shutil.rmtree(root, ignore_errors=True)
    for row, tally in rows.items():
        for name, title in COLUMNS.items():
            texts = getattr(tally, name)
            for text in texts[:SHOWN]:
                print(f"{title}, {row}: {text}")
            if len(texts) > SHOWN:
                print(f"... and {len(texts) - SHOWN} more")
    print(table(record()))
    if out is None and not short and share == 1 and list(only) == list(PARTS) and done == len(planned):
        write_page(record())
    is_bad = any(getattr(tally, name) for tally in rows.values() for name in COLUMNS)
    return int(is_bad or workers is None or workers.failed > 0)


def write_record(record: dict[str, Any], out: Path) -> None:
    """Replace the record in a folder, and its table."""
    out.mkdir(parents=True, exist_ok=True)
    for name, text in (("faults.json", json.dumps(record, indent=1)), ("faults.md", table(record))):
        (out / f"{name}.new").write_text(text)
        (out / f"{name}.new").replace(out / name)


if __name__ == "__main__":
    sys.exit(main())
