"""Fixtures of the tests of commands."""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

from tests.cli.arena_runs import train


@pytest.fixture(scope="session")
def arena_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two updates in the arena that were never interrupted, with a league of one past self. Tests that change it work on a copy."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    assert train(folder, 2) == 0
    return folder


@pytest.fixture
def gpu_without_numba_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch finds a GPU, and numba-cuda is not installed."""
    find_spec = importlib.util.find_spec

    def version_of(package: str) -> str:
        if package == "numba-cuda":
            raise PackageNotFoundError(package)
        return version(package)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "numba_cuda" else find_spec(name, *rest))
    monkeypatch.setattr("esper.arena.recorder.version", version_of)
