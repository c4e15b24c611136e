"""Train for a long time and record memory, descriptors and threads: nothing may grow.

    python benchmarks/soak.py --seconds 1200 --out soak                       # all four trainers at once, with one thread each
    python benchmarks/soak.py --seconds 1200 --out soak --only ppo arena      # some of them
    python benchmarks/soak.py --show soak --figure docs/images/soak.png       # table and figure of the records

`ppo`, `controller` and `arena` are `esper ppo train`, `esper controller train` and `esper arena train` with more steps than they will
reach, small networks and frequent checkpoints, so that everything that happens in a training happens many times. `grow` calls `esper.grow`
again and again in one process. After `--seconds` each is interrupted as by Ctrl-C and has to end with a checkpoint.

Every two seconds a record goes into OUT/TRAINER.jsonl: seconds, resident bytes, open descriptors, threads and the number of checkpoints
(of runs, for `grow`). The last record holds the exit code. The slope of the table is that of a straight line through the second half of the
records; before it, caches fill and the first league members enter. Linux only: the figures come from /proc.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TRAINERS = {
    "controller": "controller train --rounds 1000000 --hosts 8 --fleets 2 --source digits --families conv mlp --horizon 4 8"
    " --samples-of-a-life 2000 4000 --domain.batch-size 32 64 --domain.width 2 8 --blocks 1 2 --validation-samples 256"
    " --checkpoint-every 2 --no-host-events",
    "ppo": "ppo train cue --total-steps 1000000000000 --num-envs 16 --num-steps 64 --hidden-size 32 --checkpoint-every 20"
    " --eval-episodes 16",
    "arena": "arena train --total-steps 1000000000000 --team-size 2 --battles 16 --size 16 --maps 4 --seconds 10 --num-steps 16"
    " --hidden-size 16 --width 32 --eval-battles 8 --entry-battles 4 --enter-every 20 --checkpoint-every 20",
    "grow": "",
}
EVERY_S = 2.0
INTERRUPTED = 130  # exit code of a training that was stopped by Ctrl-C
TO_END_S = 120.0  # for the last checkpoint after the interrupt
MB = 1e6


def grow_again_and_again(folder: Path) -> None:
    """Grow small networks until an interrupt. Every tenth one fails on purpose, every fifth has no run folder."""
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy

    import esper

    inputs = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))
    targets = inputs[:, :6].argmax(dim=1)
    batches = list(zip(inputs.split(32), targets.split(32), strict=True))

    def failing_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise ValueError("on purpose")

    for number in range(10**9):
        torch.manual_seed(number)
        model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 6))
        run, loss = folder / f"grow-{number}", failing_loss if number % 10 == 9 else cross_entropy
        with contextlib.suppress(ValueError):
            grown = esper.grow(model, batches[:12], batches[12:], loss, epochs=8, run=None if number % 5 == 4 else run, progress=False)
            if grown.status == "stopped":  # by the interrupt at the end
                return
        shutil.rmtree(folder / f"grow-{number - 3}", ignore_errors=True)
        (folder / "count").write_text(str(number + 1))


def soak(trainer: str, seconds: float, out: Path) -> int:
    """Run a trainer for so many seconds, record what it uses, interrupt it, and return its exit code."""
    folder = out / f"{trainer}.run"
    shutil.rmtree(folder, ignore_errors=True)
    if trainer == "grow":
        folder.mkdir(parents=True)
        command = [sys.executable, __file__, "--grow", str(folder)]
    else:
        own = "from esper.cli.main import main; import sys; sys.exit(main(sys.argv[1:]))"
        command = [sys.executable, "-c", own, *TRAINERS[trainer].split(), "--threads", "1", "--device", "cpu", "--run", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

    begin = time.monotonic()
    with (out / f"{trainer}.log").open("w") as log, (out / f"{trainer}.jsonl").open("w", buffering=1) as records:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            while process.poll() is None and time.monotonic() - begin < seconds:
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                    records.write(
                        json.dumps({"seconds": round(time.monotonic() - begin, 2), **usage(process.pid), "done": done(folder)}) + "\n"
                    )
                time.sleep(EVERY_S)
            ended_early = process.poll() is not None
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(TO_END_S)
        finally:
            process.kill()
        code = process.wait()
        records.write(json.dumps({"exit_code": code, "ended_early": ended_early, "done": done(folder)}) + "\n")
    return code


def usage(pid: int) -> dict[str, int]:
    """Return the resident bytes, the open descriptors and the threads of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return {
        "rss": int(fields["VmRSS"].split()[0]) * 1024,
        "fds": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(fields["Threads"]),
    }


def done(folder: Path) -> int:
    """Return the step of the newest checkpoint; for `grow`, the number of runs."""
    with contextlib.suppress(OSError, ValueError):
        if (folder / "count").exists():
            return int((folder / "count").read_text())
        return max((int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*")), default=0)
    return 0


def slope_per_hour(records: list[dict[str, Any]], what: str) -> float:
    """Return the slope of a straight line through the second half of the records."""
    half = records[len(records) // 2 :]
    return statistics.linear_regression([record["seconds"] / 3600 for record in half], [record[what] for record in half]).slope


def show(folder: Path, picture: Path | None) -> None:
    """Print a table of all trainers' records, and draw their curves."""
    print(
        "| trainer | minutes | done | resident MB after a tenth, at half, at the end | slope, MB per hour | descriptors | threads | end |"
    )
    print("|---|---|---|---|---|---|---|---|")
    found = {}
    for trainer in TRAINERS:
        path = folder / f"{trainer}.jsonl"
        if not path.exists():
            continue
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        end = lines.pop() if "exit_code" in lines[-1] else {"exit_code": "no end recorded", "done": lines[-1]["done"]}
        found[trainer] = lines
        places = [len(lines) // 10, len(lines) // 2, len(lines) - 1]
        sizes = ", ".join(f"{statistics.median(record['rss'] for record in lines[max(0, at - 2) : at + 3]) / MB:.0f}" for at in places)
        spans = []
        for what in ("fds", "threads"):
            half = [record[what] for record in lines[len(lines) // 2 :]]
            spans.append(f"{min(half)} to {max(half)} ({slope_per_hour(lines, what):+.1f} per hour)")
        cells = [
            trainer,
            f"{lines[-1]['seconds'] / 60:.1f}",
            f"{end['done']:,} {'runs' if trainer == 'grow' else 'steps'}",
            sizes,
            f"{slope_per_hour(lines, 'rss') / MB:+.1f}",
            *spans,
            f"exit code {end['exit_code']}",
        ]
        print(f"| {' | '.join(cells)} |")
    if picture is not None:
        draw(found, picture)


def draw(found: dict[str, list[dict[str, Any]]], picture: Path) -> None:
    """Draw one row per trainer, one column per figure."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = {"rss": "resident MB", "fds": "descriptors", "threads": "threads"}
    figure, axes = plt.subplots(len(found), len(columns), figsize=(9, 1.7 * len(found) + 0.6), sharex=True, squeeze=False)
    for row, (trainer, lines) in zip(axes, found.items(), strict=True):
        minutes = [record["seconds"] / 60 for record in lines]
        for axis, (what, title) in zip(row, columns.items(), strict=True):
            axis.plot(minutes, [record[what] / (MB if what == "rss" else 1) for record in lines], color="#1f6f8b", linewidth=1)
            axis.set_ylim(bottom=0, top=1.25 * max(record[what] / (MB if what == "rss" else 1) for record in lines))
            axis.set_title(f"{trainer}: {title}", fontsize=9)
            axis.tick_params(labelsize=8)
            axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel("minutes", fontsize=8)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--out", type=Path, default=Path("soak"))
    parser.add_argument("--only", nargs="+", choices=list(TRAINERS), default=list(TRAINERS), help="trainers to run, all at once")
    parser.add_argument("--show", type=Path, metavar="OUT", help="print the table of the records in this folder, and train nothing")
    parser.add_argument("--figure", type=Path, help="with --show, a file for the picture")
    parser.add_argument("--grow", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.show is not None:
        show(options.show, options.figure)
        return 0
    if options.grow is not None:
        with contextlib.suppress(KeyboardInterrupt):
            grow_again_and_again(options.grow)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(len(options.only)) as pool:
        codes = dict(zip(options.only, pool.map(lambda trainer: soak(trainer, options.seconds, options.out), options.only), strict=True))
    print(codes)
    return 0 if set(codes.values()) <= {0, INTERRUPTED} else 1


if __name__ == "__main__":
    sys.exit(main())
