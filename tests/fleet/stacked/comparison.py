"""Compare rows of stacked modules with the same modules alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from esper.fleet.stacked.layers import Convolution
from esper.fleet.stacked.lowering import lower
from esper.fleet.stacked.rows import ModuleRows

HOSTS, SAMPLES = 3, 5
EXACT = 1e-12


def make_different(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64, count: int = HOSTS) -> list[nn.Module]:
    """Hosts none of whose tensors equals that of another, those that are zero at birth included."""
    generator = torch.Generator().manual_seed(1)
    hosts = [make().to(dtype) for _ in range(count)]
    for host in hosts:
        for parameter in host.parameters():
            with torch.no_grad():
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=dtype)
    return hosts


def inputs_for(shape: Sequence[int], dtype: torch.dtype = torch.float64, *, requires_grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(SAMPLES, HOSTS, *shape, generator=generator, dtype=dtype).requires_grad_(requires_grad)


def loss_of(outputs: Tensor) -> Tensor:
    """Return the loss of one host, outputs [B, ...], without a symmetry that a norm would hide."""
    weights = torch.linspace(-1, 2, outputs.numel(), dtype=torch.float64, device=outputs.device).view(outputs.shape)
    return (outputs.double() * weights).sum() / len(outputs) + outputs.double().pow(2).mean()


def assert_rows_equal_hosts(
    hosts: Sequence[nn.Module],
    x: Tensor,
    *,
    tolerance: float = EXACT,
    training: bool = True,
    convolution: Convolution | None = None,
) -> None:
    """Outputs, gradients of weights and inputs, and buffers, after two passes."""
    rows = ModuleRows.of(hosts, device=x.device)
    stacked = lower(hosts[0], convolution=convolution)
    close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    for _ in range(2):
        outputs = stacked(rows.tensors(), x, training=training)
    losses = [loss_of(outputs[:, row]) for row in range(len(hosts))]
    torch.autograd.backward([sum(losses[1:], losses[0])])
    for row, host in enumerate(hosts):
        own = x.detach()[:, row].clone().requires_grad_(x.requires_grad)
        host.train(training)
        for _ in range(2):
            expected = host(own)
        close(outputs[:, row], expected)
        if list(host.parameters()) or x.requires_grad:
            torch.autograd.backward([loss_of(expected)])
        assert_gradients_equal(rows, row, host, close)
        if x.requires_grad:
            close(x.grad[:, row] if x.grad is not None else None, own.grad)
        state = rows.state_dict_of(row)
        for name, tensor in host.state_dict().items():
            close(state[name], tensor, msg=lambda text, name=name: f"{name}: {text}")


def assert_gradients_equal(rows: ModuleRows, row: int, host: nn.Module, close: Callable[..., None]) -> None:
    assert rows.parameters.flat.grad is not None or not list(host.parameters())
    if rows.parameters.flat.grad is None:
        return
    gradients = rows.parameters.layout.unflatten(rows.parameters.flat.grad)
    for name, parameter in host.named_parameters():
        if not parameter.requires_grad:
            continue
        close(gradients[name][row], parameter.grad, msg=lambda text, name=name: f"gradient of {name}: {text}")
