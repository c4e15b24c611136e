"""Native battles on CUDA devices, in Numba's simulator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from esper.arena.arena import Arena
from esper.arena.config import ArenaConfig
from esper.arena.native.cuda import require_cuda
from esper.runs.folder import RunError

HERE = Path(__file__).parent


@pytest.mark.slow
def test_simulated_device_agrees_with_interpreted_cpu() -> None:
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run([sys.executable, str(HERE / "native_simulator.py")], env=environment, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert (found["differing"], found["decisions"], found["episodes"]) == ([], 5, [1, 1])
    assert len(set(found["stored"])) == found["kernels"], "a kernel is stored under a name of its own"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_missing_device_is_named() -> None:
    from esper.arena.native.cuda import CudaKernels

    with pytest.raises((ImportError, RunError), match="the arena on CUDA needs"):
        CudaKernels(battles=1, units=2)
    with pytest.raises((ImportError, RunError), match="the arena on CUDA needs"):
        Arena(ArenaConfig(battles=1), device="cuda")


def test_interpreted_rules_are_refused_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for where, value in (("torch.cuda.is_available", True), ("esper.arena.native.cuda.cuda.is_available", True)):
        monkeypatch.setattr(where, lambda value=value: value)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("esper.arena.native.cuda.IS_INTERPRETED", True)
    with pytest.raises(RunError, match="needs compiled rules: unset ESPER_ARENA_NUMBA"):
        require_cuda()
