"""What is computed on: the device that was asked for, whether reading from it waits, and the number of threads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch

from esper.run_folder import RunError


def find_device(wanted: Literal["auto", "cpu", "cuda"]) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise RunError("device 'cuda' was asked for, and torch finds none here; use device 'cpu' or 'auto'")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def reading_waits(tensor: torch.Tensor) -> bool:
    """Whether a look at its values waits for a device to be done with all that it was asked to compute."""
    return tensor.device.type != "cpu"


@contextlib.contextmanager
def threads(count: int | None) -> Iterator[None]:
    """For a while, torch computes on so many threads; None: on as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
