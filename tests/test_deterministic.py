"""Two equal trainings under `deterministic` are the same to the last bit, on the CPU and on a GPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks import deterministic

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("name", deterministic.trainings(1))
def test_two_equal_trainings_give_the_same_bits(name: str, device: str) -> None:
    found = deterministic.compared(deterministic.trainings(1)[name], device)
    assert found["differ"] == 0, found["first"]
    assert found["tensors"] > 10
    assert found["values"] > 50


def test_a_difference_is_found() -> None:
    runs = iter([{"losses/0": 1.0, "step_seconds": 1.0}, {"losses/0": 1.0 + 1e-15, "step_seconds": 2.0}])
    found = deterministic.compared(lambda *_: next(runs), "cpu")
    assert found["first"] == ["losses/0"]
