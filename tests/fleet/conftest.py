"""Fixtures of the tests of fleets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from esper.fleet import measure
from esper.growth.measure import probe


@pytest.fixture
def full_float32() -> Iterator[None]:
    """Products in float32 keep all its digits on a GPU too."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture(autouse=True)
def _fewer_steps_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the optimisers of a fleet and of a host alone take 4 steps along a gradient instead of 32, which take most of the time."""
    for module in (probe, measure):
        monkeypatch.setattr(module, "STEPS_ALONG", 4)
