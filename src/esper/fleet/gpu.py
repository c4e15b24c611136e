"""What holds while a fleet computes on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def on_gpu(device: torch.device) -> Iterator[None]:
    """Kernels of our own are launched on this device, and convolutions in float32 keep all its digits.

    By default cuDNN rounds their inputs to TF32, with three digits; who wants that speed has more of it in bfloat16.
    """
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        with torch.cuda.device(device):
            yield
    finally:
        torch.backends.cudnn.allow_tf32 = before
