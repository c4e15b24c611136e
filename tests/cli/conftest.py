"""Fixtures of the tests of commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.arena_runs import train


@pytest.fixture(scope="session")
def arena_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two updates in the arena that were never interrupted, with a league of one past self. Tests that change it work on a copy."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    assert train(folder, 2) == 0
    return folder
