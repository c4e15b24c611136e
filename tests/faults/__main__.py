"""`make faults`: end, disturb and damage runs of all trainers, and write what came of it into docs/faults.md.

python -m tests.faults                       # everything, in some minutes on two cores
python -m tests.faults --scale 0.05          # a twentieth of all trials
python -m tests.faults --only deaths
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tyro._docstrings

import tests.preloaded  # noqa: F401 — loads what takes long before anything is forked
from tests.faults import deaths
from tests.faults.runs import TRAINERS, Verdict, command, prepare


def warm(root: Path) -> None:
    """Run every trainer and reader once in this process, so that forked ones find all modules and compiled functions."""
    tokenization = tyro._docstrings._ClassTokenization
    tokenization.make = staticmethod(functools.cache(tokenization.make))  # type: ignore[method-assign]
    here, out = Path.cwd(), sys.stdout
    with open(os.devnull, "w") as sys.stdout:
        for trainer in TRAINERS.values():
            folder = prepare(root / "warm")
            for argv in (trainer.begin(), ["report", "run"], ["runs", "ls", "."], ["runs", "show", "run"]):
                assert command(argv, folder) == 0, argv
    sys.stdout = out
    os.chdir(here)
    gc.collect()
    gc.freeze()


def shared(function: Callable[[int], list[Any]], jobs: int) -> list[Any]:
    """Call `function(share)` in so many forked processes and return all of their results."""
    children = []
    for share in range(jobs):
        file = tempfile.TemporaryFile()  # noqa: SIM115
        child = os.fork()
        if not child:
            code = 1
            try:
                file.write(pickle.dumps(function(share)))
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


def run_deaths(root: Path, scale: float, jobs: int, log: Callable[[str], None]) -> dict[str, list[Verdict]]:
    whole = deaths.wholes(root)
    log("; ".join(f"{name}: {len(one.calls)} calls" for name, one in whole.items()))
    trials = deaths.planned(
        whole, deaths=round(950 * scale), kills=round(50 * scale), failures=round(600 * scale), shorts=round(100 * scale)
    )

    def share(number: int) -> list[tuple[deaths.Trial, Verdict, float]]:
        results = []
        for place, trial in enumerate(trials[number::jobs]):
            verdict, seconds = deaths.timed(
                trial, whole[trial.trainer], root / f"trial {number}", reads=place % 2 == 0 or trial.kind == "kill"
            )
            if not verdict.is_good:
                log(f"{trial}: {[text for texts in (verdict.lost, verdict.wrong, verdict.hung, verdict.raw) for text in texts]}")
            results.append((trial, verdict, seconds))
        return results

    found: dict[str, list[Verdict]] = {}
    for trial, verdict, _ in shared(share, jobs):
        found.setdefault(trial.kind, []).append(verdict)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the trials")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    begin = time.monotonic()

    def log(text: str) -> None:
        print(f"{time.monotonic() - begin:6.0f} s  {text}", flush=True)

    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    root = Path(tempfile.mkdtemp(prefix="esper-faults-", dir=memory))
    try:
        warm(root)
        log("loaded")
        found = run_deaths(root, options.scale, options.jobs, log)
        for kind, verdicts in found.items():
            log(f"{kind}: {len(verdicts)} trials, {sum(not verdict.is_good for verdict in verdicts)} not good")
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
