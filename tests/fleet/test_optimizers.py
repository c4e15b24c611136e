"""Optimisers over rows: each row equals torch.optim on that row alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from esper.fleet.optimizers import SGD, Adam, AdamW, RowOptimizer, clip_rows_

ROWS, WIDTH, STEPS = 4, 7, 20
RATES = [0.1, 0.01, 0.05, 0.0]

KINDS = [
    (AdamW, torch.optim.AdamW, {}),
    (AdamW, torch.optim.AdamW, {"betas": (0.0, 0.99), "eps": 1e-4, "weight_decay": 0.3}),
    (AdamW, torch.optim.AdamW, {"weight_decay": 0.0}),
    (Adam, torch.optim.Adam, {}),
    (Adam, torch.optim.Adam, {"weight_decay": 0.1}),
    (SGD, torch.optim.SGD, {}),
    (SGD, torch.optim.SGD, {"momentum": 0.9, "weight_decay": 5e-4}),
]
Kind = tuple[Callable[..., RowOptimizer], Callable[..., torch.optim.Optimizer], dict[str, Any]]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0].__name__}{kind[2] or ''}")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_every_row_equals_a_torch_optimiser_on_that_row_alone(kind: Kind, dtype: torch.dtype, tolerance: float) -> None:
    ours, theirs, settings = kind
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(ROWS, WIDTH, dtype=dtype, generator=generator)
    gradients = torch.randn(STEPS, ROWS, WIDTH, dtype=dtype, generator=generator)
    active = torch.rand(STEPS, ROWS, generator=generator) < 0.7
    flat = start.clone()
    optimizer = ours(flat, lr=torch.tensor(RATES, dtype=dtype), **settings)
    for gradient, mask in zip(gradients, active, strict=True):
        optimizer.step(gradient, active=mask)
    for row, rate in enumerate(RATES):
        alone = nn.Parameter(start[row].clone())
        expected = theirs([alone], lr=rate, **settings)
        for step in range(STEPS):
            if active[step, row]:
                alone.grad = gradients[step, row].clone()
                expected.step()
        torch.testing.assert_close(flat[row], alone.detach(), rtol=tolerance, atol=tolerance)
        assert optimizer.state["steps"][row] == active[:, row].sum()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0].__name__}{kind[2] or ''}")
def test_rows_outside_a_step_stay_bit_identical_whatever_their_gradient(kind: Kind) -> None:
    flat = torch.randn(ROWS, WIDTH)
    flat[1, 0] = -0.0
    optimizer = kind[0](flat, lr=0.1, **kind[2])
    optimizer.step(torch.randn(ROWS, WIDTH))
    outside = torch.tensor([True, False, False, True])
    bad = torch.randn(ROWS, WIDTH)
    bad[1], bad[2] = torch.nan, torch.inf
    before = {name: bits(tensor) for name, tensor in {"flat": flat, **optimizer.state}.items()}
    optimizer.step(bad, active=outside)
    for name, tensor in {"flat": flat, **optimizer.state}.items():
        assert torch.equal(bits(tensor)[1:3], before[name][1:3]), name
    assert flat.isfinite().all()
    assert not torch.equal(bits(flat)[[0, 3]], before["flat"][[0, 3]])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0].__name__}{kind[2] or ''}")
def test_the_update_along_one_gradient_equals_that_of_a_fresh_optimiser_without_decay(kind: Kind) -> None:
    gradient = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    weights = torch.zeros_like(gradient)
    optimizer = kind[0](weights, lr=1.0, **kind[2])
    found = optimizer.moves(gradient, STEPS)
    for _ in range(STEPS):
        weights.zero_()  # so that nothing decays
        optimizer.step(gradient)
    torch.testing.assert_close(found, -weights, rtol=1e-12, atol=1e-12)


def bits(tensor: Tensor) -> Tensor:
    """A copy in which -0 differs from 0."""
    return tensor.clone().view(torch.int32) if tensor.dtype == torch.float32 else tensor.clone()


def test_a_step_leaves_the_gradient_as_it_was() -> None:
    gradient = torch.randn(ROWS, WIDTH)
    given = gradient.clone()
    AdamW(torch.randn(ROWS, WIDTH), lr=0.1).step(gradient)
    SGD(torch.randn(ROWS, WIDTH), lr=0.1, momentum=0.9, weight_decay=0.1).step(gradient)
    assert torch.equal(gradient, given)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_are_clipped_as_torch_clips_each_alone(dtype: torch.dtype) -> None:
    gradient = (torch.randn(ROWS, WIDTH, dtype=torch.float64) * torch.tensor([[0.01], [1.0], [30.0], [0.0]])).to(dtype)
    clipped = gradient.clone()
    norms = clip_rows_(clipped, 1.0)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    for row in range(ROWS):
        parts = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in (3, WIDTH - 3)]
        for parameter, part in zip(parts, gradient[row].split([3, WIDTH - 3]), strict=True):
            parameter.grad = part.clone()
        norm = clip_grad_norm_(parts, 1.0)
        alone = torch.cat([parameter.grad for parameter in parts if parameter.grad is not None])
        assert norms.dtype == norm.dtype
        torch.testing.assert_close(norms[row], norm, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(clipped[row], alone, rtol=tolerance, atol=tolerance)


def test_a_row_that_overflowed_does_not_touch_the_others() -> None:
    gradient = torch.ones(3, 4)
    gradient[1, 2] = torch.inf
    norms = clip_rows_(gradient, 1.0)
    assert norms.isfinite().tolist() == [True, False, True]
    torch.testing.assert_close(gradient[[0, 2]], torch.full((2, 4), 0.5), rtol=1e-5, atol=0)
