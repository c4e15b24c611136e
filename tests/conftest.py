"""Settings for all tests: properties may take their time, and torch computes on one thread so that results are the same everywhere."""

from __future__ import annotations

import os
from collections.abc import Iterator

# Before torch is imported, and inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is defined
settings.register_profile("esper", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=20)  # for the development loop
settings.load_profile("esper")


@pytest.fixture(autouse=True)
def _kernels_kept() -> Iterator[None]:
    """On processors without bfloat16, a product of such numbers makes torch change the kernels of all that comes after."""
    is_enabled = torch.backends.mkldnn.enabled
    yield
    torch.backends.mkldnn.set_flags(is_enabled)


@pytest.fixture
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
