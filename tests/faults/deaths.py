"""Deaths and failing disks: a training is ended or disturbed at a chosen call, or killed at a random time, and then goes on."""

from __future__ import annotations

import time
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


def wholes(root: Path) -> dict[str, Whole]:
    found: dict[str, Whole] = {}
    for name, trainer in ALL.items():
        found[name] = Whole(*uninterrupted(trainer, root / f"whole {name}"))
        if trainer.ranks > 1:  # rank 0 makes the calls that a single process makes
            found[name].calls = found[name.partition(",")[0]].calls
    return found


def spread(whole: Whole, count: int, *, only: str = "") -> list[int]:
    """Return `count` numbers of calls, evenly over all of them; some twice if there are fewer."""
    numbers = [number for number, name in enumerate(whole.calls, 1) if name.startswith(only)]
    return [numbers[int(place * len(numbers) / count)] for place in range(count)]


def planned(whole: dict[str, Whole], *, deaths: int, kills: int, failures: int, shorts: int) -> list[Trial]:
    """Return all trials, in a random order so that the shares of several processes take equally long.

    A tenth of the deaths is for two ranks. Of the others, a quarter happens while a run that had died before is resumed.
    """
    random = np.random.default_rng(0)
    trials: list[Trial] = []
    for group, share in ((TRAINERS, deaths - deaths // 10), (TWO_RANKS, deaths // 10)):
        for place, name in enumerate(group):
            count = share // len(group) + (place < share % len(group))
            again = count // 4 if group is TRAINERS else 0
            trials += [Trial("death", name, at) for at in spread(whole[name], count - again)]
            trials += [Trial("death while resuming", name, at) for at in spread(whole[name], again)]
    for number in range(kills):
        name = list(ALL)[number % len(ALL)]
        trials.append(Trial("kill", name, after=float(random.uniform(0, 1.1)), victim=number // len(ALL) % ALL[name].ranks))
    for number, (name, fault) in enumerate((name, fault) for name in TRAINERS for fault in NAMES):
        count = failures // (len(TRAINERS) * len(NAMES)) + (number < failures % (len(TRAINERS) * len(NAMES)))
        trials += [Trial("failure", name, at, fault, lasts=place % 2 == 0) for place, at in enumerate(spread(whole[name], count))]
    for place, name in enumerate(TRAINERS):
        count = shorts // len(TRAINERS) + (place < shorts % len(TRAINERS))
        trials += [Trial("short write", name, at, "short") for at in spread(whole[name], count, only="write")]
    return [trials[place] for place in random.permutation(len(trials))]


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


def timed(trial: Trial, whole: Whole, folder: Path, *, reads: bool) -> tuple[Verdict, float]:
    begin = time.monotonic()
    return tried(trial, whole, folder, reads=reads), time.monotonic() - begin
