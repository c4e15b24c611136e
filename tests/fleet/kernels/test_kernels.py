"""Kernels of the fleet: a row of hosts computed by them equals the host alone.

On a GPU they run there; without one they run in Triton's interpreter, which computes the same slowly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.fleet.stacked.lowering import lower
from esper.fleet.stacked.rows import ModuleRows
from esper.tasks.hosts import ConvBlock, ConvHost
from tests.fleet.stacked.comparison import assert_rows_equal_hosts, inputs_for, make_different

pytest.importorskip("triton")

from esper.fleet.kernels import convolution as tiled, host_rows, norm_pool

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 2e-5


def _frozen(layer: nn.Conv2d) -> nn.Module:
    """Only its bias learns."""
    layer.weight.requires_grad_(False)
    return layer


LAYERS: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (lambda: nn.Conv2d(3, 8, 3, padding=1, bias=False), (3, 8, 8)),
    (lambda: nn.Conv2d(4, 20, 3, padding=1), (4, 5, 6)),
    (lambda: nn.Conv2d(6, 70, 1), (6, 3, 5)),
    (lambda: nn.Conv2d(5, 4, (3, 2), padding=(2, 0), dilation=(2, 1)), (5, 7, 6)),
    (lambda: nn.Conv1d(4, 5, 3, padding=1), (4, 12)),
    (lambda: nn.Conv2d(3, 4, 3), (3, 5, 6)),
    (lambda: _frozen(nn.Conv2d(3, 4, 3, padding=1)), (3, 5, 6)),
    # Layers that other lowerings compute, in the same host.
    (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), (4, 6, 6)),
    (lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4), (4, 6, 6)),
    (lambda: nn.Conv2d(4, 4, 3, padding=3), (4, 3, 3)),
]


pytestmark = [
    pytest.mark.slow,  # in the interpreter
    pytest.mark.usefixtures("full_float32"),  # what they are held against
]


def on_device(hosts: list[nn.Module]) -> list[nn.Module]:
    return [host.to(DEVICE) for host in hosts]


@pytest.mark.parametrize(("make", "shape"), LAYERS, ids=[str(make()) for make, _ in LAYERS])
def test_a_row_equals_the_convolution_alone(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    x = inputs_for(shape, torch.float32).to(DEVICE).requires_grad_()
    assert_rows_equal_hosts(on_device(make_different(make, torch.float32)), x, tolerance=TOLERANCE, convolution="tiled")


@pytest.mark.parametrize(
    ("make", "shape", "training"),
    [
        (partial(ConvHost, 1, 3, (2, 4, 3), pool=(True, True, False)), (1, 8, 8), True),
        (partial(ConvHost, 2, 3, (2, 4), pool=(True, True)), (2, 6, 6), True),
        (partial(ConvHost, 1, 3, (2, 4), pool=(True, False), spatial=1), (1, 12), True),
        (partial(ConvHost, 2, 3, (2, 4), pool=(True, True)), (2, 6, 6), False),
    ],
    ids=["images", "sizes that are odd", "series", "evaluation"],
)
def test_a_row_equals_the_conv_host_alone(make: Callable[[], nn.Module], shape: tuple[int, ...], training: bool) -> None:
    x = inputs_for(shape, torch.float32).to(DEVICE)
    assert_rows_equal_hosts(on_device(make_different(make, torch.float32)), x, tolerance=5e-5, training=training, convolution="tiled")


def test_hosts_in_evaluation_need_no_gradient_to_be_fused() -> None:
    hosts = on_device(make_different(partial(ConvHost, 1, 3, (2, 4), pool=(True, False)), torch.float32))
    x = inputs_for((1, 8, 8), torch.float32).to(DEVICE)
    rows = ModuleRows.of(hosts, device=DEVICE)
    with torch.no_grad():
        outputs = lower(hosts[0], convolution="tiled")(rows.tensors(), x, training=False)
        for row, host in enumerate(hosts):
            torch.testing.assert_close(outputs[:, row], host.eval()(x[:, row]), atol=TOLERANCE, rtol=TOLERANCE)


def test_inputs_that_all_hosts_share_are_not_copied_for_each() -> None:
    layer = nn.Conv2d(3, 4, 3, padding=1)
    hosts = on_device(make_different(lambda: nn.Conv2d(3, 4, 3, padding=1), torch.float32))
    x = inputs_for((3, 5, 6), torch.float32).to(DEVICE)[:, :1].expand(-1, 3, -1, -1, -1)
    outputs = lower(layer, convolution="tiled")(ModuleRows.of(hosts, device=DEVICE).tensors(), x, training=True)
    for row, host in enumerate(hosts):
        torch.testing.assert_close(outputs[:, row], host(x[:, row]), atol=TOLERANCE, rtol=TOLERANCE)


def test_a_seed_inside_a_fused_block_gets_the_inner_activations() -> None:
    host = ConvHost(1, 3, (2, 4), pool=(True, False)).to(DEVICE)
    seen: list[str] = []

    def at(name: str, h: Tensor) -> Tensor:
        seen.append(name)
        return h

    stacked = lower(host, slots=["blocks.0", "blocks.1.norm"], convolution="tiled")
    stacked(ModuleRows.of([host], device=DEVICE).tensors(), torch.ones(2, 1, 1, 8, 8, device=DEVICE), training=True, at=at)
    assert seen == ["blocks.0", "blocks.1.norm"]


def test_many_tiles_have_the_mean_and_variance_of_the_whole() -> None:
    """Far from zero, where sums of squares would lose their digits; the last tile is not full."""
    x = 100 + torch.randn(11, 2, 1, 9, 9, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    weight = torch.ones(2, 1, 1, 1, 1, device=DEVICE)
    _, mean, variance = tiled.convolve_and_describe(x, weight, tiled.Shape(1, 9, 9, 1, 1, 1, 0, 0, 1, 1))
    exact = x.double()
    torch.testing.assert_close(mean.double(), exact.mean((0, 3, 4)), atol=0, rtol=1e-6)
    torch.testing.assert_close(variance.double(), exact.var((0, 3, 4), unbiased=False), atol=0, rtol=1e-4)


NO_BFLOAT16 = pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter has no products in bfloat16")


@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, marks=NO_BFLOAT16), torch.float16])
def test_a_block_in_half_precision_is_near_the_same_in_float32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 2, 3, 8, 8, generator=generator).to(DEVICE, dtype)
    hosts = on_device(make_different(lambda: ConvBlock(3, 8), torch.float32, count=2))
    rows = ModuleRows.of(hosts, device=DEVICE)
    outputs = lower(hosts[0], convolution="tiled")(rows.tensors(), x, training=True)
    assert outputs.dtype == dtype
    for row, host in enumerate(hosts):
        torch.testing.assert_close(outputs[:, row].float(), host(x[:, row].float()), atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("pools", [True, False])
def test_nan_values_stay_nan_in_the_kernels(pools: bool) -> None:
    """A host whose weights are lost must show it in its loss."""
    y = torch.ones(2, 1, 2, 4, 4, device=DEVICE)
    y[0, 0, 0, 1, 1] = torch.nan
    zero, one = torch.zeros(1, 2, device=DEVICE), torch.ones(1, 2, device=DEVICE)
    outputs = norm_pool.norm_relu_pool(y, zero, one, one, zero, eps=0.0, pools=pools)
    assert outputs.isnan().sum() == 1


def test_the_first_of_equal_pixels_gets_the_gradient_of_the_pool() -> None:
    y = torch.tensor([[1.0, 2.0, 0.5, 0.5], [2.0, 2.0, 0.5, 0.5]], device=DEVICE).view(1, 1, 1, 2, 4)
    own, theirs = y.clone().requires_grad_(), y.clone().requires_grad_()
    one, zero = torch.ones(1, 1, device=DEVICE), torch.zeros(1, 1, device=DEVICE)
    mean, variance = y.mean().view(1, 1), y.var(unbiased=False).view(1, 1)
    outputs = norm_pool.norm_relu_pool(own, mean, variance, one, zero, eps=1e-5, pools=True)
    expected = F.max_pool2d(F.batch_norm(theirs[0], None, None, training=True).relu(), 2)
    (found,) = torch.autograd.grad(outputs.sum(), [own])
    (wanted,) = torch.autograd.grad(expected.sum(), [theirs])
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_of_hosts_are_gathered_and_their_deltas_scatter_added(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    h, delta = (torch.randn(3, hosts, 5, 2, generator=generator, dtype=dtype).to(DEVICE) for hosts in (4, 2))
    index, alpha = torch.tensor([3, 1], device=DEVICE), torch.tensor([0.5, 2.0], dtype=dtype, device=DEVICE)
    ours, theirs = ([tensor.clone().requires_grad_() for tensor in (h, delta)] for _ in range(2))
    found = host_rows.blend(ours[0], index, alpha, ours[1]), host_rows.gather(ours[0], index)
    wanted = theirs[0].index_add(1, index, alpha.view(1, -1, 1, 1) * theirs[1]), theirs[0].index_select(1, index)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
        pulls = [torch.autograd.grad(both[0].sin().sum(), both[1], allow_unused=True) for both in ((one, ours), (other, theirs))]
        for a, b in zip(*pulls, strict=True):
            torch.testing.assert_close(a, b)
