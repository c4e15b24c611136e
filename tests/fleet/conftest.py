"""Fixtures of the tests of fleets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def full_float32() -> Iterator[None]:
    """Products in float32 keep all its digits on a GPU too."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before
