"""The dense layer equals torch's in outputs and gradients."""

import pytest
import torch
from torch import nn

from esper.rl.networks import Dense


@pytest.mark.parametrize("has_tanh", [False, True])
@pytest.mark.parametrize("rows", [1, 300])
def test_a_dense_layer_equals_torchs_in_outputs_and_gradients(has_tanh, rows):
    generator = torch.Generator().manual_seed(0)
    ours, theirs = Dense(5, 70, has_tanh=has_tanh), nn.Linear(5, 70)
    theirs.load_state_dict(ours.state_dict())
    inputs = [torch.randn(rows, 5, generator=generator.manual_seed(1)).requires_grad_() for _ in range(2)]
    outputs = [ours(inputs[0]), theirs(inputs[1]).tanh() if has_tanh else theirs(inputs[1])]
    assert torch.allclose(*outputs, atol=1e-6)
    for output in outputs:
        (output * torch.linspace(-1, 1, 70)).sum().backward()
    assert torch.allclose(inputs[0].grad, inputs[1].grad, atol=1e-5)
    assert torch.allclose(ours.weight.grad, theirs.weight.grad, atol=1e-4)
    assert torch.allclose(ours.bias.grad, theirs.bias.grad, atol=1e-4)
    with torch.no_grad():
        assert torch.equal(ours(inputs[0]), outputs[0])


def test_gradients_pass_gradcheck():
    layer = Dense(3, 4, has_tanh=True).double()
    rows = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(layer, (rows,))
    assert torch.autograd.gradcheck(lambda weight: torch.func.functional_call(layer, {"weight": weight}, rows), (layer.weight,))
