"""Recurrent cores: one step when acting, packed fragments when learning.

When learning, a core sees *fragments*: stretches of one environment's steps with no reset inside. They are packed the way
`torch.nn.utils.rnn` packs them: sorted by length, longest first; `sizes[t]` fragments have a step `t`; the steps lie time-major in one
tensor without padding. A reset therefore costs nothing and cannot be got wrong: the next fragment simply begins with a zero state.

Shapes: M = packed steps, F = fragments, N = environments, I = input width, H = hidden width, S = state width.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from esper.rl.packed_lstm import PackedLSTM


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


class Around(Core):
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


class Pair(Core):
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
