"""Settings of the suite: modes restored on a GPU, and the extras that `make test-all` installs."""

from __future__ import annotations

import fcntl
import os
import re
import tomllib
import warnings
from pathlib import Path

import pytest
import torch

from tests.conftest import sync_debug_mode

ROOT = Path(__file__).parents[1]


def test_a_torch_mode_whose_setter_warns_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = ["default"]

    def as_torch_does(mode: str) -> None:
        modes.append(mode)
        if len(modes) == 2:
            warnings.warn("Synchronization debug mode is a prototype feature and does not yet detect all operations", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", as_torch_does)
    with sync_debug_mode("warn"):
        assert modes[-1] == "warn"
    assert modes[-1] == "default"
    with pytest.raises(ZeroDivisionError), sync_debug_mode("error"):
        raise ZeroDivisionError
    assert modes[-1] == "default"


@pytest.mark.slow
@pytest.mark.usefixtures("alone_with_device_memory")
def test_two_processes_never_measure_the_memory_of_a_device_at_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp()
    shared = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with (shared / "device-memory.lock").open("w") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_makefile_installs_every_extra_and_every_requirement_is_pinned() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    makefile = (ROOT / "Makefile").read_text()
    own, more = (re.search(rf"^{name} := (\S+)$", makefile, re.MULTILINE) for name in ("EXTRAS", "ALL_EXTRAS"))
    assert own is not None
    assert more is not None
    needs_gpu = {"cuda"}  # gigabytes of CUDA's libraries, which are of no use without a GPU
    assert set(more[1].replace("$(EXTRAS)", own[1]).split(",")) == set(extras) - needs_gpu
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    wanted = {re.split(r"[^\w-]", requirement)[0].lower() for requirements in extras.values() for requirement in requirements}
    assert wanted - pinned == {"triton"}, "comes with torch's builds"
