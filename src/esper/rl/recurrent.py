"""Recurrent cores: one step when acting, packed fragments when learning.

When learning, a core sees *fragments*: consecutive steps of one environment with no reset inside. They are packed as in
`torch.nn.utils.rnn`: sorted by length, longest first; `sizes[t]` fragments have a step `t`; the steps are time-major in one tensor without
padding. A reset needs no code in the core: the next fragment begins with a zero state.

On the CPU, `PackedLSTM` computes the recurrence of one memory, or of several side by side on the same inputs. A recurrence is many tiny
operations in a row, and at the sizes of reinforcement learning most of their time is the cost of *calling* them. So all steps are one call
of a Numba kernel (`esper.rl.lstm_kernels`). Everything that does not depend on the step before is outside of it: the input product and the
weight gradients are one matrix product each.

Without Numba, and for products that are large enough for several threads, the steps are NumPy calls on the memory of the tensors (measured:
2 µs a call where torch takes 4, and a tanh that is 2.6 times as fast). Both give the same numbers up to rounding. The NumPy steps pass all
gates through one tanh, because σ(x) = ½ + ½·tanh(½x), and compute the local derivatives of all steps at once.

Shapes: M = packed steps, F = fragments, N = environments, G = memories, I = input width, H = hidden width, S = state width.
Gates are ordered output, input, forget, candidate.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from esper.jit import has_numba

Array = NDArray[Any]

# Steps whose products have at most this many multiplications run in the kernel, on the calling thread.
_LARGE_PRODUCT = 1 << 23
# Without the kernel, products of at most this many multiplications go to NumPy, whose BLAS keeps them on the calling thread. Larger ones
# go to torch, which obeys `torch.set_num_threads`.
SMALL_PRODUCT = 1 << 18


class PackedLSTM(torch.autograd.Function):
    """The LSTM recurrence on the CPU: `apply(inputs [M, I], state [F, 2GH], sizes, *weights) -> hidden [M, GH]`.

    The state is [h | c] of each memory in turn. The weights are weight_ih [I, 4H], weight_hh [H, 4H] and bias [4H] of each memory in turn.
    """

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)  # type: ignore[untyped-decorator]
    def forward(ctx: Any, inputs: Tensor, state: Tensor, sizes: list[int], *weights: Tensor) -> Tensor:
        weight_ih, bias = torch.cat(weights[::3], dim=1), torch.cat(weights[2::3])  # [I, G·4H], [G·4H]
        weight_hh = torch.stack(weights[1::3])  # [G, H, 4H]
        memories, width = weight_hh.shape[:2]
        state = state.reshape(len(state), 2 * memories, width).contiguous()
        gates = torch.addmm(bias, inputs, weight_ih).view(-1, memories, 4 * width)  # `run_steps` turns them into activations in place
        steps = run_steps(gates.numpy(), state.numpy(), weight_hh.numpy(), sizes)
        output, cells, tanh_cells = (torch.from_numpy(array) for array in steps)
        ctx.save_for_backward(inputs, state, weight_ih, weight_hh, gates, output, cells, tanh_cells)
        ctx.sizes = sizes
        return output.flatten(1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        inputs, state, weight_ih, weight_hh, gates, output, cells, tanh_cells = ctx.saved_tensors
        sizes, memories = ctx.sizes, len(weight_hh)
        grad_output = grad_output.reshape(output.shape).contiguous()
        grad_gates, grad_state = torch.empty_like(gates), torch.zeros_like(state)
        if _uses_kernel(weight_hh.shape[1], sizes):
            from esper.rl.lstm_kernels import run_backward

            tensors = (grad_output, gates, cells, tanh_cells, state, weight_hh, grad_gates, grad_state)
            run_backward(*(tensor.numpy() for tensor in (*tensors, torch.tensor(sizes, dtype=torch.int64))))
        else:
            for g in range(memories):
                local = _local_derivatives(gates[:, g], cells[:, g], tanh_cells[:, g], state[:, 2 * g + 1], sizes)
                given = (grad_output[:, g].clone(), gates[:, g], local, weight_hh[g].t().contiguous(), sizes)
                _run_backward(*given, grad_gates[:, g], grad_state[:, 2 * g + 1])
        # The weight gradients, from the gradients of the gates of all steps.
        before = _previous(output, state[:, ::2], sizes)  # [M, G, H]
        flat = grad_gates.flatten(1)  # [M, G·4H]
        # One product for inputs and bias: torch takes three times as long for a sum over rows as for a product with ones.
        with_ones = torch.cat((inputs, inputs.new_ones(len(inputs), 1)), dim=1)  # [M, I + 1]
        grad_ih = (with_ones.t() @ flat).chunk(memories, dim=1)
        grads = [(grad_ih[g][:-1], before[:, g].t() @ grad_gates[:, g], grad_ih[g][-1]) for g in range(memories)]
        grad_inputs = flat @ weight_ih.t() if ctx.needs_input_grad[0] else None
        if ctx.needs_input_grad[1]:
            for g in range(memories):
                grad_state[:, 2 * g] = grad_gates[: len(state), g] @ weight_hh[g].t()
        return grad_inputs, grad_state.flatten(1), None, *(grad for memory_grads in grads for grad in memory_grads)


def run_steps(gates: Array, state: Array, weight_hh: Array, sizes: list[int], recurrent: Array | None = None) -> tuple[Array, Array, Array]:
    """Return hidden states, cells and the tanh of the cells, [M, G, H] each.

    `gates` [M, G, 4H] are the products with the inputs; they become activations in place. `state` is [F, 2G, H], `weight_hh` [G, H, 4H].
    `recurrent` is `weight_hh` transposed, for callers that keep it.
    """
    memories, width, _ = weight_hh.shape
    output, cells, tanh_cells = (np.empty((len(gates), memories, width), gates.dtype) for _ in range(3))
    if _uses_kernel(width, sizes):
        from esper.rl.lstm_kernels import run_forward

        if recurrent is None:
            recurrent = np.ascontiguousarray(weight_hh.transpose(0, 2, 1))
        run_forward(gates, output, cells, tanh_cells, state, recurrent, np.array(sizes, dtype=np.int64))
    else:
        for g in range(memories):
            own = (array[:, g] for array in (gates, output, cells, tanh_cells))
            _run_forward(*own, hidden=state[:, 2 * g], cell=state[:, 2 * g + 1], weight_hh=weight_hh[g], sizes=sizes)
    return output, cells, tanh_cells


def _uses_kernel(width: int, sizes: list[int]) -> bool:
    """Return whether the Numba kernel runs the steps: it is there, and the products are not worth several threads."""
    return has_numba() and (sizes[0] if sizes else 0) * 4 * width * width <= _LARGE_PRODUCT


def _run_forward(
    gates: Array, output: Array, cells: Array, tanh_cells: Array, *, hidden: Array, cell: Array, weight_hh: Array, sizes: list[int]
) -> None:
    """Run one memory in NumPy: fill `output`, `cells` and `tanh_cells` [M, H] and turn `gates` [M, 4H] into activations."""
    if not sizes:
        return
    width = output.shape[1]
    # Halve the inputs of the three gates that are sigmoids, so that one tanh serves all four.
    halves = np.full(4 * width, 0.5, gates.dtype)
    halves[3 * width :] = 1.0
    gates *= halves
    product = _Product(torch.from_numpy(weight_hh * halves), sizes[0])
    scratch = np.empty_like(output[: sizes[0]])
    first = 0
    for size in sizes:
        rows = slice(first, first + size)
        first += size
        gate, out, new_cell, tanh_cell = gates[rows], output[rows], cells[rows], tanh_cells[rows]
        product.add_to(gate, hidden[:size])
        np.tanh(gate, out=gate)
        sigmoids = gate[:, : 3 * width]
        sigmoids *= 0.5
        sigmoids += 0.5
        np.multiply(gate[:, 2 * width : 3 * width], cell[:size], out=new_cell)
        new_cell += np.multiply(gate[:, width : 2 * width], gate[:, 3 * width :], out=scratch[:size])
        np.tanh(new_cell, out=tanh_cell)
        np.multiply(gate[:, :width], tanh_cell, out=out)
        hidden, cell = out, new_cell


def _run_backward(
    grad_hidden: Tensor,
    gates: Tensor,
    local: tuple[Tensor, Tensor, Tensor],
    recurrent: Tensor,
    sizes: list[int],
    grad_gates: Tensor,
    grad_cell: Tensor,
) -> None:
    """Run one memory backward in NumPy: fill the gradients of the gates before their activations [M, 4H] and of the initial cell [F, H].

    `grad_cell` must be zeros. `grad_hidden` [M, H] is overwritten. `local` are the results of `_local_derivatives`.
    """
    if not sizes:
        return
    width = recurrent.shape[1]
    product = _Product(recurrent, sizes[0])
    all_hidden, all_gates, all_grads, cell = (tensor.numpy() for tensor in (grad_hidden, gates, grad_gates, grad_cell))
    by_hidden, by_cell, carry = (tensor.numpy() for tensor in local)
    scratch = np.empty_like(cell)
    first = len(all_hidden)
    later: Array | None = None  # the gate gradients one step later
    for size in reversed(sizes):
        first -= size
        rows = slice(first, first + size)
        hidden, grads, alive = all_hidden[rows], all_grads[rows], cell[:size]
        if later is not None:
            product.add_to(hidden[: len(later)], later)
        alive += np.multiply(hidden, carry[rows], out=scratch[:size])
        np.multiply(hidden, by_hidden[rows], out=grads[:, :width])
        for gate in range(3):
            np.multiply(alive, by_cell[rows, gate], out=grads[:, (gate + 1) * width : (gate + 2) * width])
        alive *= all_gates[rows, 2 * width : 3 * width]
        later = grads


class _Product:
    """`target += rows @ matrix` for the rows of one step, by the library that is faster at that size."""

    def __init__(self, matrix: Tensor, max_rows: int) -> None:
        self.matrix, self.array = matrix, matrix.numpy()
        self.scratch = np.empty((max_rows, matrix.shape[1]), dtype=self.array.dtype)

    def add_to(self, target: Array, rows: Array) -> None:
        if len(rows) * self.array.size <= SMALL_PRODUCT:
            target += np.dot(rows, self.array, out=self.scratch[: len(rows)])
        else:
            torch.from_numpy(target).addmm_(torch.from_numpy(rows), self.matrix)


def _previous(packed: Tensor, initial: Tensor, sizes: list[int]) -> Tensor:
    """Return for each packed step the value one step earlier: that of `packed`, or at the first step of a fragment the initial one."""
    if not sizes:
        return packed
    counts = np.array(sizes, dtype=np.int64)
    earlier = np.arange(sizes[0], len(packed)) - np.repeat(counts[:-1], counts[1:])
    return torch.cat((initial, packed.index_select(0, torch.from_numpy(earlier))))


def _local_derivatives(gates: Tensor, cells: Tensor, tanh_cell: Tensor, cell: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return factors of the backward pass for every step.

    They turn the gradient of h into that of the output gate [M, H], the gradient of c into those of input, forget gate and candidate
    [M, 3, H], and the gradient of h into that of c [M, H].
    """
    width = tanh_cell.shape[1]
    out, inp, _, candidate = gates.chunk(4, dim=1)
    sigmoids = gates[:, : 3 * width]
    slopes = torch.addcmul(sigmoids, sigmoids, sigmoids, value=-1.0)  # σ' = σ - σ²
    by_hidden = slopes[:, :width] * tanh_cell
    by_cell = gates.new_empty(len(gates), 3, width)
    torch.mul(slopes[:, width : 2 * width], candidate, out=by_cell[:, 0])
    torch.mul(slopes[:, 2 * width :], _previous(cells, cell, sizes), out=by_cell[:, 1])
    torch.addcmul(inp, inp * candidate, candidate, value=-1.0, out=by_cell[:, 2])
    carry = torch.addcmul(out, out * tanh_cell, tanh_cell, value=-1.0)
    return by_hidden, by_cell, carry


class Core(nn.Module):
    """A memory between encoder and heads. Its state is one tensor [N, state_size], zero at the start of an episode."""

    output_size: int
    state_size: int

    def initial_state(self, num_envs: int, *, device: torch.device | None = None) -> Tensor:
        return torch.zeros(num_envs, self.state_size, device=device)

    def check_state(self, state: Tensor, rows: int) -> None:
        if state.shape != (rows, self.state_size):
            raise ValueError(f"the state of this policy must have shape ({rows}, {self.state_size}); got {tuple(state.shape)}")

    def step(self, inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Take one step in every environment: (inputs [N, I], state [N, S]) -> (output [N, H], next state [N, S])."""
        raise NotImplementedError

    def sequence(self, inputs: Tensor, state: Tensor, sizes: list[int]) -> Tensor:
        """Run packed fragments from their initial states: (inputs [M, I], states [F, S]) -> outputs [M, H]."""
        raise NotImplementedError


class NoMemory(Core):
    """The core of a feed-forward policy: its output is its input, its state is empty."""

    def __init__(self, input_size: int) -> None:
        super().__init__()
        self.output_size, self.state_size = input_size, 0

    def step(self, inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return inputs, state

    def sequence(self, inputs: Tensor, state: Tensor, sizes: list[int]) -> Tensor:
        return inputs


class LSTM(Core):
    """Long short-term memory; the state is [h | c].

    Gates are ordered output, input, forget, candidate, so that the three sigmoids are side by side, and so are the three that act through
    the cell. Weights are [inputs, gates], so that a step multiplies by them without a transpose, which on the CPU is up to twice as fast.
    There is a single bias, so `forget_bias` is the whole bias of the forget gate. On the CPU the recurrence is `PackedLSTM`, elsewhere
    torch's own.
    """

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = self.output_size = hidden_size
        self.state_size = 2 * hidden_size
        self.weight_ih = nn.Parameter(torch.empty(input_size, 4 * hidden_size))
        self.weight_hh = nn.Parameter(torch.empty(hidden_size, 4 * hidden_size))
        self.bias = nn.Parameter(torch.empty(4 * hidden_size))

    def initialize(self, generator: torch.Generator, *, forget_bias: float = 1.0) -> None:
        """Draw orthogonal weights per gate. Set the bias of the forget gate to `forget_bias` and all others to zero."""
        with torch.no_grad():
            _initialize_gates((self.weight_ih.t(), self.weight_hh.t()), 4, generator)
            self.bias.zero_()
            self.bias[2 * self.hidden_size : 3 * self.hidden_size] = forget_bias

    def step(self, inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        width = self.hidden_size
        gates = torch.addmm(torch.addmm(self.bias, inputs, self.weight_ih), state[:, :width], self.weight_hh)
        out, inp, forget = gates[:, : 3 * width].sigmoid().chunk(3, dim=1)
        cell = torch.addcmul(forget * state[:, width:], inp, gates[:, 3 * width :].tanh())
        hidden = out * cell.tanh()
        return hidden, torch.cat((hidden, cell), dim=1)

    def sequence(self, inputs: Tensor, state: Tensor, sizes: list[int]) -> Tensor:
        if inputs.device.type == "cpu":
            output: Tensor = PackedLSTM.apply(inputs, state, sizes, self.weight_ih, self.weight_hh, self.bias)  # type: ignore[no-untyped-call]
            return output
        hidden, cell = state[:, : self.hidden_size], state[:, self.hidden_size :]
        initial = (hidden.unsqueeze(0).contiguous(), cell.unsqueeze(0).contiguous())
        weights = [_torch_gate_order(tensor) for tensor in (self.weight_ih.t(), self.weight_hh.t(), self.bias)]
        weights.append(torch.zeros_like(self.bias))
        with _without_cudnn_warning():
            return torch.lstm(inputs, torch.tensor(sizes), initial, weights, True, 1, 0.0, self.training, False)[0]


class GRU(Core):
    """Gated recurrent unit; the state is h. Learning uses torch's packed GRU."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.output_size = self.state_size = hidden_size
        self.weight_ih = nn.Parameter(torch.empty(3 * hidden_size, input_size))
        self.weight_hh = nn.Parameter(torch.empty(3 * hidden_size, hidden_size))
        self.bias_ih = nn.Parameter(torch.empty(3 * hidden_size))
        self.bias_hh = nn.Parameter(torch.empty(3 * hidden_size))

    def initialize(self, generator: torch.Generator) -> None:
        """Draw orthogonal weights per gate and set the biases to zero."""
        with torch.no_grad():
            _initialize_gates((self.weight_ih, self.weight_hh), 3, generator)
            self.bias_ih.zero_()
            self.bias_hh.zero_()

    def step(self, inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.gru_cell(inputs, state, self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh)
        return hidden, hidden

    def sequence(self, inputs: Tensor, state: Tensor, sizes: list[int]) -> Tensor:
        weights = (self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh)
        with _without_cudnn_warning():
            return torch.gru(inputs, torch.tensor(sizes), state.unsqueeze(0), weights, True, 1, 0.0, self.training, False)[0]


def _initialize_gates(weights: tuple[Tensor, ...], gates: int, generator: torch.Generator) -> None:
    """Draw orthogonal weights per gate, scaled so that the variance of every unit is that of the inputs.

    An orthogonal matrix spreads few inputs thinly over many units; the factor √(units / inputs) makes up for it.
    """
    for weight in weights:
        for gate in weight.chunk(gates):
            units, inputs = gate.shape
            nn.init.orthogonal_(gate, gain=max(1.0, units / inputs) ** 0.5, generator=generator)


def _torch_gate_order(parameter: Tensor) -> Tensor:
    """Return a parameter with its gates in torch's order: from output, input, forget, candidate to input, forget, candidate, output."""
    out, inp, forget, candidate = parameter.chunk(4)
    return torch.cat((inp, forget, candidate, out))


@contextlib.contextmanager
def _without_cudnn_warning() -> Iterator[None]:
    """Silence torch's warning that the weights are not contiguous and must be copied for cuDNN. They are small."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
        yield


class Bypass(Core):
    """A core around which the last `bypass_size` inputs pass unchanged: they are appended to its output."""

    def __init__(self, inner: Core, bypass_size: int) -> None:
        super().__init__()
        self.inner, self.bypass_size = inner, bypass_size
        self.output_size, self.state_size = inner.output_size + bypass_size, inner.state_size

    def step(self, inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        output, state = self.inner.step(inputs[:, : -self.bypass_size], state)
        return torch.cat((output, inputs[:, -self.bypass_size :]), dim=1), state

    def sequence(self, inputs: Tensor, state: Tensor, sizes: list[int]) -> Tensor:
        output = self.inner.sequence(inputs[:, : -self.bypass_size], state, sizes)
        return torch.cat((output, inputs[:, -self.bypass_size :]), dim=1)


class ActorCriticCores(Core):
    """Two cores on the same input, one for the actor and one for the critic. Outputs and states are those of both, concatenated.

    On the CPU, two LSTMs run in one call of `PackedLSTM`.
    """

    def __init__(self, actor: Core, critic: Core) -> None:
        super().__init__()
        self.actor, self.critic = actor, critic
        self.output_size = actor.output_size + critic.output_size
        self.state_size = actor.state_size + critic.state_size

    def _apart(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the actor's and the critic's part of a state."""
        return state[:, : self.actor.state_size], state[:, self.actor.state_size :]

    def step(self, inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        for_actor, for_critic = self._apart(state)
        outputs, states = zip(self.actor.step(inputs, for_actor), self.critic.step(inputs, for_critic), strict=True)
        return torch.cat(outputs, dim=1), torch.cat(states, dim=1)

    def sequence(self, inputs: Tensor, state: Tensor, sizes: list[int]) -> Tensor:
        if inputs.device.type == "cpu" and isinstance(self.actor, LSTM) and isinstance(self.critic, LSTM):
            weights = (weight for core in (self.actor, self.critic) for weight in (core.weight_ih, core.weight_hh, core.bias))
            output: Tensor = PackedLSTM.apply(inputs, state, sizes, *weights)  # type: ignore[no-untyped-call]
            return output
        for_actor, for_critic = self._apart(state)
        return torch.cat((self.actor.sequence(inputs, for_actor, sizes), self.critic.sequence(inputs, for_critic, sizes)), dim=1)
