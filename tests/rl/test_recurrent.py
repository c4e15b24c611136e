"""Recurrent cores over packed fragments of episodes."""

import numpy as np
import pytest
import torch

from esper.rl import recurrent as packed_lstm
from esper.rl.batch import minibatches, pack, split
from esper.rl.recurrent import GRU, LSTM, ActorCriticCores, Core, NoMemory, _torch_gate_order

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
    """Step as acting does: one step at a time, the state cleared where an episode starts; also return the states that a rollout stores."""
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


@pytest.fixture(params=["numba", "numpy"])
def way(request, monkeypatch):
    """Which implementation of the recurrence runs: the compiled one or the fallback."""
    if request.param == "numba":
        pytest.importorskip("numba")
    monkeypatch.setattr(packed_lstm, "has_numba", lambda: request.param == "numba")
    return request.param


def random_case(sizes: list[int], width: int, memories: int = 1, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    """Inputs, state and weights of `PackedLSTM` that all want gradients."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()

    weights = [normal(*shape) for _ in range(memories) for shape in ((INPUT, 4 * width), (width, 4 * width), (4 * width,))]
    return normal(sum(sizes), INPUT), normal(max(sizes, default=0), 2 * memories * width), *weights


def packed(case: tuple[torch.Tensor, ...], sizes: list[int]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The output of `PackedLSTM`, and the gradients of a function of it that tells units apart."""
    inputs, state, *weights = case
    output = packed_lstm.PackedLSTM.apply(inputs, state, sizes, *weights)
    scale = torch.linspace(-1.0, 1.0, output.numel(), dtype=output.dtype).view_as(output)
    return output, torch.autograd.grad((output.sin() * scale).sum(), case)


def by_torch(case: tuple[torch.Tensor, ...], sizes: list[int]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The same by torch's own LSTM, one memory after another."""
    inputs, state, *weights = case
    outputs = []
    for memory, own in enumerate(state.chunk(len(weights) // 3, dim=1)):
        weight_ih, weight_hh, bias = weights[3 * memory : 3 * memory + 3]
        initial = tuple(part.unsqueeze(0).contiguous() for part in own.chunk(2, dim=1))
        in_torchs_order = [_torch_gate_order(weight) for weight in (weight_ih.T, weight_hh.T, bias)]
        of_torch = [*in_torchs_order, torch.zeros_like(bias)]
        outputs.append(torch.lstm(inputs, torch.tensor(sizes), initial, of_torch, True, 1, 0.0, True, False)[0])
    output = torch.cat(outputs, dim=1)
    scale = torch.linspace(-1.0, 1.0, output.numel(), dtype=output.dtype).view_as(output)
    return output, torch.autograd.grad((output.sin() * scale).sum(), case)


def largest_difference(one, other) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in zip((one[0], *one[1]), (other[0], *other[1]), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[4, 3, 3, 1], [4, 4], [4]])
def test_the_packed_lstm_passes_gradcheck(sizes, way):
    case = random_case(sizes, 3)
    assert torch.autograd.gradcheck(lambda inputs, state, *rest: packed_lstm.PackedLSTM.apply(inputs, state, sizes, *rest), case)


# Steps in fours, twos and ones; widths that no vector register divides; a single number; large products, which take another way in NumPy.
CASES = [([5, 4, 4, 3, 1], 7), ([7, 6, 2], 5), ([1, 1, 1], 1), ([9, 8, 8, 3], 16), ([2, 2], 6), ([70, 64, 3], 96)]


@pytest.mark.parametrize("memories", [1, 2])
@pytest.mark.parametrize(("sizes", "width"), CASES)
def test_the_packed_lstm_equals_torchs_lstm_in_outputs_and_gradients(sizes, width, memories, way):
    case = random_case(sizes, width, memories)
    assert largest_difference(packed(case, sizes), by_torch(case, sizes)) < 1e-10


def test_the_packed_lstm_equals_torchs_lstm_in_float32(way):
    sizes = [6, 5, 5, 2]
    case = tuple((0.3 * tensor).detach().requires_grad_() for tensor in random_case(sizes, 24, memories=2, dtype=torch.float32))
    output, gradients = packed(case, sizes)
    assert output.dtype == torch.float32
    assert largest_difference((output, gradients), by_torch(case, sizes)) < 2e-5


def test_the_kernel_equals_its_numpy_fallback(monkeypatch):
    pytest.importorskip("numba")
    sizes = [11, 9, 4, 4, 1]
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
        case = random_case(sizes, 12, memories=2, dtype=dtype)
        answers = []
        for has_numba in (True, False):
            monkeypatch.setattr(packed_lstm, "has_numba", lambda has_numba=has_numba: has_numba)
            answers.append(packed(case, sizes))
        assert largest_difference(*answers) < tolerance * max(1.0, *(float(gradient.abs().max()) for gradient in answers[1][1]))


def test_no_steps_at_all_give_no_outputs_and_gradients_of_zero(way):
    output, gradients = packed(random_case([], 4), [])
    assert output.shape == (0, 4)
    assert [float(gradient.abs().sum()) for gradient in gradients] == [0.0] * 5


def test_a_number_that_is_not_finite_reaches_the_output_and_no_other_fragment(way):
    sizes = [3, 3]
    inputs, state, *weights = (tensor.detach() for tensor in random_case(sizes, 8, dtype=torch.float32))
    for bad in (torch.nan, torch.inf):
        broken = inputs.clone()
        broken[1] = bad
        output = packed_lstm.PackedLSTM.apply(broken, state, sizes, *weights)
        right = packed_lstm.PackedLSTM.apply(inputs, state, sizes, *weights)
        others = [0, 2, 3, 5]
        assert torch.equal(output[others], right[others])
        assert output[1].isnan().all() or bad == torch.inf
        assert not torch.equal(output[4], right[4])


def test_a_fragment_that_starts_an_episode_does_not_depend_on_the_episode_before(rollout):
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


def test_two_memories_in_one_pass_equal_two_passes(rollout, way):
    inputs, _ = rollout
    pair = ActorCriticCores(core(LSTM), LSTM(INPUT, HIDDEN).double())
    pair.critic.initialize(torch.Generator().manual_seed(5))
    sizes = [ENVS, ENVS, 3, 1]
    rows, state = inputs.flatten(0, 1)[: sum(sizes)], 0.1 * torch.ones(ENVS, pair.state_size, dtype=torch.float64)
    apart = [half.sequence(rows, own, sizes) for half, own in zip((pair.actor, pair.critic), pair._apart(state), strict=True)]
    together = pair.sequence(rows, state, sizes)
    assert torch.allclose(together, torch.cat(apart, dim=1), atol=1e-14)
    parameters = list(pair.parameters())
    one = torch.autograd.grad(together.square().sum(), parameters)
    two = torch.autograd.grad(torch.cat(apart, dim=1).square().sum(), parameters)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(one, two, strict=True))


def test_recurrent_weights_are_orthogonal_per_gate():
    for gate in core(LSTM).weight_hh.T.chunk(4):
        assert torch.allclose(gate @ gate.T, torch.eye(HIDDEN, dtype=torch.float64), atol=1e-6)


def test_initial_gate_inputs_have_unit_spread_for_any_number_of_inputs():
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
