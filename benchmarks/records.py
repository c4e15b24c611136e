"""What every benchmark writes: JSON lines, the first of which says on which machine, with which versions and by which command."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
Record = dict[str, Any]


def metadata() -> Record:
    return {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": processor(),
        "cores": os.cpu_count(),
        "gpu": _gpu(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # with its build, 2.11.0+cu130, where the package's version is 2.11.0
        **{package: _version(package) for package in ("numpy", "stable-baselines3", "sb3-contrib", "gromo", "growingnn", "peft")},
    }


def processor() -> str:
    """The processor's model as lscpu names it, or else what Python knows."""
    if lscpu := shutil.which("lscpu"):
        lines = subprocess.run([lscpu], capture_output=True, text=True, check=True, env={"LC_ALL": "C"}).stdout.splitlines()
        for line in lines:
            if line.startswith("Model name:"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _gpu() -> str | None:
    """Return the name of the first GPU, or None."""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


class Output:
    """A file of records that are also printed. `resume` keeps what an earlier run wrote."""

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume and path.exists():
            self.earlier = list(_whole_lines(path))
            path.write_text("".join(_line(record) for record in self.earlier))  # without a torn last line
        else:
            self.earlier = []
            path.write_text("")
        if not self.earlier:
            self.append(metadata())

    def write(self, record: Record) -> None:
        self.append(record)
        print(_line(record), end="", flush=True)

    def append(self, record: Record) -> None:
        """Without printing it."""
        with self.path.open("a") as file:
            file.write(_line(record))


def _whole_lines(path: Path) -> Iterator[Record]:
    """The records of a file; a run that was killed may have left half of the last one."""
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines):
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            if number + 1 < len(lines):
                raise


def _line(record: Record) -> str:
    return json.dumps(_rounded(record), allow_nan=False) + "\n"


def _rounded(value: Any) -> Any:
    """Six significant digits, and null for what no number exists, which JSON cannot write."""
    if isinstance(value, dict):
        return {str(key): _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
