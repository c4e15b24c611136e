"""Deaths and failing disks: a training is ended or disturbed at a chosen call, or killed at a random time, and then goes on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.faults.disk import BROKEN, DIED, FULL, QUOTA, Disk
from tests.faults.runs import TRAINERS, TWO_RANKS, Verdict, afterwards, is_begun, prepare, ranks, uninterrupted

ALL = {**TRAINERS, **TWO_RANKS}
NAMES = {FULL: "disk full", BROKEN: "input/output error", QUOTA: "quota"}


@dataclass(frozen=True)
class Trial:
    """One fault: what happens, to which trainer, and where."""

    kind: str  # "death", "death while resuming", "kill", "failure" or "short write"
    trainer: str
    at: int = 0  # number of the call
    fault: str | int = "die"
    lasts: bool = False
    after: float = 0.0  # share of the time of a whole training, for a kill
    victim: int = 0  # rank that is killed

    def __str__(self) -> str:
        where = f"after {self.after:.2f} of the time, rank {self.victim}" if self.kind == "kill" else f"call {self.at}"
        fault = "" if self.kind != "failure" else f" ({NAMES[int(self.fault)]}{', for good' if self.lasts else ''})"
        return f"{self.kind}{fault} of {self.trainer}, {where}"


@dataclass
class Whole:
    """A training without a fault."""

    expected: dict[str, str]
    calls: list[str]
    seconds: float


class Wholes:
    """Trainings without a fault, and runs that died after their first checkpoint; each made when it is first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._found: dict[str, Whole] = {}
        self._stopped: dict[str, Path] = {}

    def of(self, name: str) -> Whole:
        if name not in self._found:
            self._found[name] = Whole(*uninterrupted(ALL[name], self._root / f"whole {name}"))
        return self._found[name]

    def calls_of(self, name: str) -> list[str]:
        """Return the calls of a trainer that touch the disk. Rank 0 of two makes those that a single process makes."""
        return self.of(name.partition(",")[0]).calls

    def stopped(self, name: str) -> Path:
        if name not in self._stopped:
            folder = prepare(self._root / f"stopped {name}")
            ranks(TRAINERS[name].begin(), folder, 1, Disk(folder / "run", at=len(self.calls_of(name)) * 3 // 4))
            self._stopped[name] = folder / "run"
        return self._stopped[name]


def spread(calls: list[str], count: int, *, only: str = "") -> list[int]:
    """Return `count` numbers of calls, evenly over all of them; some twice if there are fewer."""
    numbers = [number for number, name in enumerate(calls, 1) if name.startswith(only)]
    return [numbers[int((place + 0.5) * len(numbers) / count)] for place in range(count)]


def planned(whole: Wholes, share: float) -> list[Trial]:
    """Return this share of 950 deaths, 50 kills, and all failures and short writes at each call of each trainer.

    A tenth of the deaths is for two ranks. Of the others, a quarter happens while a run that had died before is resumed.
    """
    random = np.random.default_rng(0)
    trials: list[Trial] = []
    for group, deaths in ((TRAINERS, round(855 * share)), (TWO_RANKS, round(95 * share))):
        for place, name in enumerate(group):
            count = deaths // len(group) + (place < deaths % len(group))
            again = count // 4 if group is TRAINERS else 0
            trials += [Trial("death", name, at) for at in spread(whole.calls_of(name), count - again)]
            trials += [Trial("death while resuming", name, at) for at in spread(whole.calls_of(name), again)]
    for number in range(round(50 * share)):
        name = list(ALL)[number % len(ALL)]
        trials.append(Trial("kill", name, after=float(random.uniform(0, 1.1)), victim=number // len(ALL) % ALL[name].ranks))
    for name in TRAINERS:
        calls = whole.calls_of(name)
        for fault in NAMES:
            places = enumerate(spread(calls, round(share * len(calls))))
            trials += [Trial("failure", name, at, fault, lasts=place % 2 == 0) for place, at in places]
        trials += [Trial("short write", name, at, "short") for at in spread(calls, round(share * calls.count("write")), only="write")]
    return trials


def few(trials: list[Trial]) -> list[Trial]:
    """Return some trials of every kind and fault, of the trainers in turn: of two ranks, a death of `ppo train`."""
    random = np.random.default_rng(0)
    found: list[Trial] = []
    for kind, count in {"death": 8, "death while resuming": 2, "kill": 2, "failure": 4, "short write": 2}.items():
        names = [*TRAINERS, next(iter(TWO_RANKS))]
        for number in range(count):
            fault = list(NAMES)[number % len(NAMES)] if kind == "failure" else None
            of_one = [trial for trial in trials if (trial.kind, trial.trainer) == (kind, names[number % len(names)])]
            of_one = [trial for trial in of_one if fault in (None, trial.fault)]
            found.append(of_one[random.integers(len(of_one))])
    return found


def tried(trial: Trial, whole: Whole, folder: Path, *, reads: bool) -> Verdict:
    """Let the fault of a trial happen in a new folder, train on, and compare."""
    trainer, verdict = ALL[trial.trainer], Verdict(str(trial))
    prepare(folder)
    if trial.kind == "kill":
        ended = ranks(trainer.begin(), folder, trainer.ranks, kill_after=trial.after * whole.seconds, victim=trial.victim)
    elif trial.kind == "death while resuming":
        ranks(trainer.begin(), folder, 1, Disk(folder / "run", at=len(whole.calls) * 2 // 3))
        if not is_begun(trainer, folder):
            verdict.lost.append("two thirds of the calls made no run")
            return verdict
        ended = ranks(trainer.resume(), folder, 1, Disk(folder / "run", at=1 + trial.at // 2))
    else:
        ended = ranks(trainer.begin(), folder, trainer.ranks, Disk(folder / "run", at=trial.at, fault=trial.fault, lasts=trial.lasts))

    for rank, one in enumerate(ended):
        if one.code != DIED or rank:
            verdict.look(one, f"rank {rank}")
        if trial.kind == "short write" and one.code:
            verdict.lost.append(f"a short write ended the training with {one.code}: {one.printed[-300:]}")
    if trial.kind == "failure" and ended[0].code not in (0, 1, 2):
        verdict.wrong.append(f"ended with {ended[0].code}: {ended[0].printed[-300:]}")
    afterwards(trainer, folder, whole.expected, verdict, reads=reads)
    return verdict
