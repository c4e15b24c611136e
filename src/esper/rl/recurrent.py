"""The LSTM recurrence over packed fragments on the CPU, for one memory or several side by side on the same inputs.

A recurrence is many tiny operations in a row, and at the sizes of reinforcement learning the cost of *calling* an operation is most of
its time. So all steps are one call of a Numba kernel (`esper.rl.lstm_kernels`), and what does not depend on the step before is outside of
it: the input product and the weight gradients are one matrix product each.

Without Numba, and for products so large that several threads are worth their while, the steps are NumPy calls on the tensors' own memory
(measured: 2 µs a call where torch takes 4, and a tanh that is 2.6 times as fast). Both give the same numbers up to rounding. In NumPy's
steps all gates go through one tanh, because σ(x) = ½ + ½·tanh(½x), and the local derivatives of all steps are computed at once.

Shapes: M = packed steps, F = fragments, b = fragments alive at a step, G = memories, I = input width, H = hidden width.
Gates are ordered output, input, forget, candidate.

Recurrent cores: one step when acting, packed fragments when learning.

When learning, a core sees *fragments*: stretches of one environment's steps with no reset inside. They are packed the way
`torch.nn.utils.rnn` packs them: sorted by length, longest first; `sizes[t]` fragments have a step `t`; the steps lie time-major in one
tensor without padding. A reset therefore costs nothing and cannot be got wrong: the next fragment simply begins with a zero state.

Shapes: M = packed steps, F = fragments, N = environments, I = input width, H = hidden width, S = state width.
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

# Products of one step up to this many multiplications go to the kernel, which runs on the calling thread.
_LARGE_PRODUCT = 1 << 23
# Other products up to this many multiplications go to NumPy, whose BLAS keeps them on the calling thread; larger ones to torch,
# which obeys `torch.set_num_threads`.
SMALL_PRODUCT = 1 << 18


class PackedLSTM(torch.autograd.Function):
    """`apply(inputs [M, I], state [F, 2GH], sizes, *weights) -> hidden [M, GH]`.

    The state is [h | c] of one memory after another. The weights are weight_ih [I, 4H], weight_hh [H, 4H] and bias [4H] of one memory after
    another.
    """

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)  # type: ignore[untyped-decorator]
    def forward(ctx: Any, inputs: Tensor, state: Tensor, sizes: list[int], *weights: Tensor) -> Tensor:
        weight_ih, bias = torch.cat(weights[::3], dim=1), torch.cat(weights[2::3])  # [I, G·4H], [G·4H]
        weight_hh = torch.stack(weights[1::3])  # [G, H, 4H]
        memories, width = weight_hh.shape[:2]
        state = state.reshape(len(state), 2 * memories, width).contiguous()
        gates = torch.addmm(bias, inputs, weight_ih).view(-1, memories, 4 * width)  # becomes the activations
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
        before = _previous(output, state[:, ::2], sizes)  # [M, G, H]
        flat = grad_gates.flatten(1)  # [M, G·4H]
        # One product for inputs and bias: a sum over rows takes torch three times as long as a product with ones.
        with_ones = torch.cat((inputs, inputs.new_ones(len(inputs), 1)), dim=1)  # [M, I + 1]
        grad_ih = (with_ones.t() @ flat).chunk(memories, dim=1)
        grads = [(grad_ih[g][:-1], before[:, g].t() @ grad_gates[:, g], grad_ih[g][-1]) for g in range(memories)]
        grad_inputs = flat @ weight_ih.t() if ctx.needs_input_grad[0] else None
        if ctx.needs_input_grad[1]:
            for g in range(memories):
                grad_state[:, 2 * g] = grad_gates[: len(state), g] @ weight_hh[g].t()
        return grad_inputs, grad_state.flatten(1), None, *(grad for of_memory in grads for grad in of_memory)


def run_steps(gates: Array, state: Array, weight_hh: Array, sizes: list[int], recurrent: Array | None = None) -> tuple[Array, Array, Array]:
    """Return hidden states, cells and their tanh [M, G, H]. Turns `gates` [M, G, 4H], the products with the inputs, into activations.

    `state` is [F, 2G, H], `weight_hh` [G, H, 4H]; `recurrent` is the same transposed, for callers that keep it.
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
    return has_numba() and (sizes[0] if sizes else 0) * 4 * width * width <= _LARGE_PRODUCT


def _run_forward(
    gates: Array, output: Array, cells: Array, tanh_cells: Array, *, hidden: Array, cell: Array, weight_hh: Array, sizes: list[int]
) -> None:
    """Fills `output`, `cells` and `tanh_cells` [M, H] and turns `gates` [M, 4H] into its activations."""
    if not sizes:
        return
    width = output.shape[1]
    halves = np.full(4 * width, 0.5, gates.dtype)  # for the three gates that are sigmoids
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
    """Fills the gradients of the gates before their activations [M, 4H], and adds those of the initial cell [F, H] to zeros. Uses up
    `grad_hidden` [M, H]."""
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
    """`target += rows @ matrix` for the rows of one step, by whichever library is quicker at that size."""

    def __init__(self, matrix: Tensor, max_rows: int) -> None:
        self.matrix, self.array = matrix, matrix.numpy()
        self.scratch = np.empty((max_rows, matrix.shape[1]), dtype=self.array.dtype)

    def add_to(self, target: Array, rows: Array) -> None:
        if len(rows) * self.array.size <= SMALL_PRODUCT:
            target += np.dot(rows, self.array, out=self.scratch[: len(rows)])
        else:
            torch.from_numpy(target).addmm_(torch.from_numpy(rows), self.matrix)


def _previous(packed: Tensor, initial: Tensor, sizes: list[int]) -> Tensor:
    """What each packed step found: the packed value one step earlier, or the initial one."""
    if not sizes:
        return packed
    counts = np.array(sizes, dtype=np.int64)
    earlier = np.arange(sizes[0], len(packed)) - np.repeat(counts[:-1], counts[1:])
    return torch.cat((initial, packed.index_select(0, torch.from_numpy(earlier))))


def _local_derivatives(gates: Tensor, cells: Tensor, tanh_cell: Tensor, cell: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Per step: d(output gate)/dh [M, H], d(input, forget, candidate)/dc [M, 3, H], and dc/dh [M, H]."""
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
    """A memory between encoder and heads. `state` is one tensor [N, state_size], zero at the start of an episode."""

    output_size: int
    state_size: int

    def initial_state(self, num_envs: int, *, device: torch.device | None = None) -> Tensor:
        return torch.zeros(num_envs, self.state_size, device=device)

    def check_state(self, state: Tensor, rows: int) -> None:
        if state.shape != (rows, self.state_size):
            raise ValueError(f"this policy's state has shape ({rows}, {self.state_size}); got {tuple(state.shape)}")

    def step(self, inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One step of every environment: ([N, I], [N, S]) -> ([N, H], [N, S])."""
        raise NotImplementedError

    def sequence(self, inputs: Tensor, state: Tensor, sizes: list[int]) -> Tensor:
        """Packed fragments from their initial states: ([M, I], [F, S]) -> [M, H]."""
        raise NotImplementedError


class NoMemory(Core):
    """The feed-forward case: output is input, the state is empty."""

    def __init__(self, input_size: int) -> None:
        super().__init__()
        self.output_size, self.state_size = input_size, 0

    def step(self, inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return inputs, state

    def sequence(self, inputs: Tensor, state: Tensor, sizes: list[int]) -> Tensor:
        return inputs


class LSTM(Core):
    """Long short-term memory; the state is [h | c].

    Gates are ordered output, input, forget, candidate, so that the three sigmoids lie together, and so do the three that act through
    the cell. Weights are [inputs, gates]: a step multiplies by them as they lie, which on the CPU is up to twice as quick. There is one
    bias, so the forget bias is the stated one. On CPU the recurrence is `PackedLSTM`, elsewhere torch's own.
    """

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = self.output_size = hidden_size
        self.state_size = 2 * hidden_size
        self.weight_ih = nn.Parameter(torch.empty(input_size, 4 * hidden_size))
        self.weight_hh = nn.Parameter(torch.empty(hidden_size, 4 * hidden_size))
        self.bias = nn.Parameter(torch.empty(4 * hidden_size))

    def initialize(self, generator: torch.Generator, *, forget_bias: float = 1.0) -> None:
        """Orthogonal weights per gate, forget-gate bias as stated, all other biases zero."""
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
        with _weights_apart():
            return torch.lstm(inputs, torch.tensor(sizes), initial, weights, True, 1, 0.0, self.training, False)[0]


def _initialize_gates(weights: tuple[Tensor, ...], gates: int, generator: torch.Generator) -> None:
    """Orthogonal per gate, and a gate hears its inputs at full strength however few they are.

    An orthogonal matrix spreads a short input thinly over many units: of 2 numbers, each of 64 units would hear an eighth. Scaled by
    √(units / inputs), every unit's variance is that of the inputs.
    """
    for weight in weights:
        for gate in weight.chunk(gates):
            units, inputs = gate.shape
            nn.init.orthogonal_(gate, gain=max(1.0, units / inputs) ** 0.5, generator=generator)


class Bypass(Core):
    """A core of which only the first inputs know; the other `bypass_size` go around it and are joined to its output as they are."""

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
    """Two cores side by side on the same input, the actor's and the critic's: outputs and states are theirs joined.

    On the CPU, two LSTMs run through their fragments in one pass.
    """

    def __init__(self, actor: Core, critic: Core) -> None:
        super().__init__()
        self.actor, self.critic = actor, critic
        self.output_size = actor.output_size + critic.output_size
        self.state_size = actor.state_size + critic.state_size

    def _apart(self, state: Tensor) -> tuple[Tensor, Tensor]:
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


@contextlib.contextmanager
def _weights_apart() -> Iterator[None]:
    """cuDNN warns that it must copy weights that do not lie in one piece. They are small, and here they never do."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
        yield


def _torch_gate_order(parameter: Tensor) -> Tensor:
    """From output, input, forget, candidate to torch's input, forget, candidate, output."""
    out, inp, forget, candidate = parameter.chunk(4)
    return torch.cat((inp, forget, candidate, out))


class GRU(Core):
    """Gated recurrent unit; the state is h. Learning runs torch's own packed GRU."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.output_size = self.state_size = hidden_size
        self.weight_ih = nn.Parameter(torch.empty(3 * hidden_size, input_size))
        self.weight_hh = nn.Parameter(torch.empty(3 * hidden_size, hidden_size))
        self.bias_ih = nn.Parameter(torch.empty(3 * hidden_size))
        self.bias_hh = nn.Parameter(torch.empty(3 * hidden_size))

    def initialize(self, generator: torch.Generator) -> None:
        """Orthogonal weights per gate, zero biases."""
        with torch.no_grad():
            _initialize_gates((self.weight_ih, self.weight_hh), 3, generator)
            self.bias_ih.zero_()
            self.bias_hh.zero_()

    def step(self, inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.gru_cell(inputs, state, self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh)
        return hidden, hidden

    def sequence(self, inputs: Tensor, state: Tensor, sizes: list[int]) -> Tensor:
        weights = (self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh)
        with _weights_apart():
            return torch.gru(inputs, torch.tensor(sizes), state.unsqueeze(0), weights, True, 1, 0.0, self.training, False)[0]
