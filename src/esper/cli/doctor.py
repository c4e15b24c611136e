"""`esper doctor` shows what is installed, which devices there are, and how to install what is missing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

import esper
from esper.cli.command import FAILED, OK, CommandResult
from esper.cli.parse import parse
from esper.config import Config

DESCRIPTION = "Says what is installed, which devices there are, and what is missing."

REQUIRED = ("torch", "numpy", "msgspec", "tyro", "rich", "safetensors")
EXTRAS = {
    "numba": ("numba",),
    "gym": ("gymnasium", "pettingzoo"),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "data": ("pyarrow", "pillow"),
    "lightning": ("lightning",),
    "transformers": ("transformers", "accelerate"),
    "league": ("openskill", "numba"),
    "cuda": ("numba-cuda",),
    "dashboard": ("nicegui",),
    "plot": ("matplotlib",),
    "query": ("duckdb",),
}


class DoctorArguments(Config):
    """This command has no options."""


def run(argv: list[str], prog: str) -> CommandResult:
    parse(DoctorArguments, argv, prog, description=DESCRIPTION)
    versions = {name: _version(name) for name in REQUIRED}
    extras = {extra: all(_version(name) for name in names) for extra, names in EXTRAS.items()}
    devices: list[dict[str, Any]] = []
    if versions["torch"]:
        import torch

        versions["torch"] = str(torch.__version__)  # with its build, such as 2.11.0+cu130; the package's version is 2.11.0
        devices = _devices()
    is_writable = os.access(Path.cwd(), os.W_OK)
    _line("esper", f"{esper.__version__}")
    _line("python", f"{platform.python_version()} ({sys.executable})")
    for name, version in versions.items():
        _line(name, version or "MISSING; install it with: pip install esper-grow")
    for extra, is_there in extras.items():
        found = ", ".join(f"{name} {_version(name)}" for name in EXTRAS[extra])
        _line(f"extra {extra}", found if is_there else f"not installed; get it with: pip install 'esper-grow[{extra}]'")
    for device in devices:
        _line(device["name"], device["description"])
    _line("this folder", "can be written to" if is_writable else "CANNOT be written to; runs need --run with a folder that can")
    is_well = all(versions.values()) and is_writable
    print("everything that is needed is there" if is_well else "something is missing, see above")
    result = {"esper": esper.__version__, "python": platform.python_version(), "versions": versions, "extras": extras}
    return CommandResult({**result, "devices": devices, "folder_is_writable": is_writable}, OK if is_well else FAILED)


def _line(name: str, text: str) -> None:
    print(f"{name:<20}{text}")


def _version(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> list[dict[str, Any]]:
    import torch

    cores = os.cpu_count()
    devices = [{"name": "cpu", "description": f"{cores} cores, torch uses {torch.get_num_threads()} threads (--threads)"}]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append({"name": f"cuda:{index}", "description": f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"})
    return devices
