import numpy as np
import pytest
import torch

from esper.rl.fragments import minibatches, pack, split
from esper.rl.packed_lstm import PackedLSTM
from esper.rl.recurrent import GRU, LSTM, Core, NoMemory, _torch_gate_order

STEPS, ENVS, INPUT, HIDDEN = 24, 5, 3, 7


def core(kind: type[Core]) -> Core:
    built = kind(INPUT, HIDDEN)
    built.initialize(torch.Generator().manual_seed(1))
    return built.double()


@pytest.fixture
def rollout():
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(STEPS, ENVS, INPUT, generator=generator, dtype=torch.float64)
    starts = torch.rand(STEPS, ENVS, generator=generator) < 0.15
    return inputs, starts


def step_through(built: Core, inputs: torch.Tensor, starts: torch.Tensor, length: int):
    """What acting does: one step at a time, the state cleared where an episode starts; also the states that a rollout stores."""
    state = torch.randn(ENVS, built.state_size, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    outputs, stored = [], []
    for step in range(len(inputs)):
        state = state.masked_fill(starts[step].unsqueeze(1), 0.0)
        if step % length == 0:
            stored.append(state)
        output, state = built.step(inputs[step], state)
        outputs.append(output)
    return torch.stack(outputs), torch.cat((*stored, torch.zeros(1, built.state_size, dtype=torch.float64)))


@pytest.mark.parametrize("kind", [LSTM, GRU])
@pytest.mark.parametrize("length", [STEPS, 8, 1])
def test_packed_fragments_equal_stepping_with_resets_whatever_the_chunk_length(kind, length, rollout):
    inputs, starts = rollout
    built = core(kind)
    expected, stored = step_through(built, inputs, starts, length)
    seen = torch.zeros(STEPS * ENVS, dtype=torch.int64)
    for fragments in minibatches(starts.numpy(), length=length, parts=3, rng=np.random.default_rng(0)):
        rows = torch.from_numpy(fragments.rows)
        output = built.sequence(inputs.flatten(0, 1)[rows], stored[torch.from_numpy(fragments.states)], fragments.sizes)
        assert torch.allclose(output, expected.flatten(0, 1)[rows], atol=1e-12)
        seen[rows] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("parts", [2, 3, 50])
def test_the_pieces_of_a_minibatch_give_the_same_outputs_as_the_whole(parts, rollout):
    inputs, starts = rollout
    built = core(LSTM)
    expected, stored = step_through(built, inputs, starts, STEPS)
    whole = pack(starts.numpy(), np.arange(ENVS), length=STEPS)
    seen = []
    for piece in split(whole, parts):
        rows = torch.from_numpy(piece.rows)
        output = built.sequence(inputs.flatten(0, 1)[rows], stored[torch.from_numpy(piece.states)], piece.sizes)
        assert torch.allclose(output, expected.flatten(0, 1)[rows], atol=1e-12)
        seen += piece.rows.tolist()
    assert sorted(seen) == list(range(STEPS * ENVS))


@pytest.mark.parametrize("sizes", [[4, 3, 3, 1], [4, 4], [4]])
def test_the_packed_lstm_passes_gradcheck(sizes):
    built = core(LSTM)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(sum(sizes), INPUT, generator=generator, dtype=torch.float64)]
    tensors += [torch.randn(4, HIDDEN, generator=generator, dtype=torch.float64) for _ in range(2)]
    arguments = [tensor.requires_grad_() for tensor in tensors] + [built.weight_ih, built.weight_hh, built.bias]
    assert torch.autograd.gradcheck(lambda *given: PackedLSTM.apply(*given, sizes), arguments)


@pytest.mark.parametrize("rows", [3, 64])  # small products and large ones take different ways
def test_the_packed_lstm_equals_torchs_lstm_in_outputs_and_gradients(rows):
    width, sizes = 96, [rows, rows, rows - 1, 1]
    built = LSTM(INPUT, width)
    built.initialize(torch.Generator().manual_seed(0))
    inputs = torch.randn(sum(sizes), INPUT, generator=torch.Generator().manual_seed(1))
    ours = built.sequence(inputs, torch.zeros(rows, 2 * width), sizes)
    ours_grads = torch.autograd.grad(ours.square().sum(), list(built.parameters()))
    weights = [_torch_gate_order(weight) for weight in (built.weight_ih.T, built.weight_hh.T, built.bias)]
    zero = torch.zeros(1, rows, width)
    theirs = torch.lstm(inputs, torch.tensor(sizes), (zero, zero), [*weights, torch.zeros(4 * width)], True, 1, 0.0, True, False)[0]
    theirs_grads = torch.autograd.grad(theirs.square().sum(), list(built.parameters()))
    assert torch.allclose(ours, theirs, atol=1e-6)
    for one, other in zip(ours_grads, theirs_grads, strict=True):
        assert torch.allclose(one, other, atol=1e-4, rtol=1e-4)


def test_a_fragment_that_starts_an_episode_does_not_feel_the_episode_before(rollout):
    inputs, starts = rollout
    built = core(LSTM)
    starts[10] = True
    changed = inputs.clone()
    changed[:10] += 1.0
    first, _ = step_through(built, inputs, starts, STEPS)
    second, _ = step_through(built, changed, starts, STEPS)
    assert not torch.equal(first[:10], second[:10])
    assert torch.equal(first[10:], second[10:])


def test_the_effective_forget_bias_is_the_stated_one():
    built = LSTM(INPUT, HIDDEN)
    built.initialize(torch.Generator().manual_seed(0), forget_bias=2.5)
    weights = [_torch_gate_order(weight) for weight in (built.weight_ih.T, built.weight_hh.T, built.bias)]
    reference = torch.nn.LSTM(INPUT, HIDDEN)
    parameters = (reference.weight_ih_l0, reference.weight_hh_l0, reference.bias_ih_l0)
    with torch.no_grad():
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.copy_(weight)
        reference.bias_hh_l0.zero_()
    assert (reference.bias_ih_l0 + reference.bias_hh_l0)[HIDDEN : 2 * HIDDEN].tolist() == [2.5] * HIDDEN
    inputs = torch.randn(1, 4, INPUT, generator=torch.Generator().manual_seed(0))
    output, _ = built.step(inputs[0], built.initial_state(4))
    assert torch.allclose(output, reference(inputs)[0][0], atol=1e-6)


def test_recurrent_weights_are_orthogonal_per_gate():
    for gate in core(LSTM).weight_hh.T.chunk(4):
        assert torch.allclose(gate @ gate.T, torch.eye(HIDDEN, dtype=torch.float64), atol=1e-6)


def test_a_gate_hears_few_inputs_as_loudly_as_many():
    for inputs in (2, 64):
        built = LSTM(inputs, 64)
        built.initialize(torch.Generator().manual_seed(0))
        drive = torch.randn(1000, inputs, generator=torch.Generator().manual_seed(1)) @ built.weight_ih
        assert drive.std().item() == pytest.approx(1.0, abs=0.1)


def test_a_state_of_the_wrong_shape_is_refused_with_both_shapes():
    with pytest.raises(ValueError, match=r"shape \(4, 14\); got \(4, 7\)"):
        core(LSTM).check_state(torch.zeros(4, HIDDEN), 4)


def test_without_memory_the_output_is_the_input():
    built = NoMemory(INPUT)
    inputs = torch.ones(2, INPUT)
    assert built.step(inputs, built.initial_state(2))[0] is inputs
