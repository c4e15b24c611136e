"""GradMax: start weights of new units, other than the random incoming and zero outgoing weights that a width seed has at birth.

New units get zero incoming weights, and the outgoing weights that give them the largest gradient (Evci et al., 2022). That needs gradients.
So the seed measures them in its first training steps, in which it does not learn: it shows one set of outgoing weights after the other,
always as the identity, and takes its own weights when the measurement is over. `SeedLearner.step` calls `take` instead of a step of the
optimiser. The state of the search is saved with the seed.

The best of several random draws, by the estimate of the probe, was tried too, and won nowhere (docs/log.md).

With zero incoming weights, their gradient is linear in the outgoing weights v of a unit: M·v, with M from the data. The right
singular vectors of M with the largest singular values, as outgoing weights of unit length, maximise the length of the whole gradient. The
seed finds M column by column: its units show unit vectors as outgoing weights, so that the gradient of their incoming weights is a column.
If there are more columns than the steps allow, a random part of them is measured, and the other outgoing weights stay zero. If there are
more new units than singular vectors, the others start as at birth. The outgoing weights are as long as those of the host's units.

This needs f(0) = 0 and f'(0) > 0 for all that is between the layers. A ReLU has no gradient at 0, but has one at 1e-30, so that is the
bias of a new unit; in the sum with the host's values it is lost by rounding. `reason_against_gradmax` tries out whether f is like that. A
batch norm is not: it divides by the spread of the units, √eps if they are all zero. The gradient of the incoming weights would be 300
times too large, and the units would jump from zero to full size in one step, however small. So there the seed starts as at birth, as it
does behind group norms, in gated layers and in attention heads, where the product of two zeros has no gradient.

Shapes: k = new units, D = outgoing weights of a unit, K = measured columns, I = incoming weights of a unit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from esper.growth.host.discover import call
from esper.growth.host.isolation import isolated
from esper.growth.host.layout import Units
from esper.growth.host.slots import tensors_in
from esper.growth.host.slotted import Slotted
from esper.growth.host.units import Layer, has_weight_norm, layer_of
from esper.growth.seeds.blueprints import get_blueprint, widened_by
from esper.growth.seeds.width import CANDIDATE, WidePart, WidthSeed

NEARLY_ZERO = 1e-30  # bias of a unit that starts at zero, on the side on which a ReLU has a gradient
Weights = dict[str, Tensor]  # the parameters of a seed, by name


class _Outgoing:
    """The outgoing weights of new units as one matrix [k, D], their incoming weights [k, I], and the columns measured so far."""

    def __init__(self, units: Units, parts: Mapping[str, WidePart], host: Mapping[str, nn.Module], *, steps: int, random_seed: int) -> None:
        new, self.inner = parts[units.name].new, parts[units.name].inner
        assert new is not None
        self.new: Layer = new
        self.units = new.weight.shape[0]  # k
        self._backs = [layer_of(back) for reader in units.readers if (back := parts[reader.name].back) is not None]
        self.size = sum(back.weight.numel() for back in self._backs) // self.units  # D
        self.rounds = min(math.ceil(self.size / self.units), max(steps // 2, 1))
        generator = torch.Generator().manual_seed(random_seed)
        self.columns = torch.randperm(self.size, generator=generator)[: self.rounds * self.units].sort().values  # [K]
        of_host = sum(float(layer_of(host[reader.name]).weight.detach().double().square().sum()) for reader in units.readers)
        self.length = math.sqrt(of_host / units.width)
        self.sums = torch.zeros(len(self.columns), new.weight[0].numel(), dtype=torch.float64)  # [K, I]

    def set_outgoing(self, weights: Tensor) -> None:
        """Set the outgoing weights [k, D]."""
        sizes = [back.weight.numel() // self.units for back in self._backs]
        for back, own in zip(self._backs, torch.split(weights, sizes, 1), strict=True):
            outputs, inputs, *kernel = back.weight.shape
            own = own.reshape(self.units, outputs, inputs // self.units, *kernel)
            back.weight.data.copy_(own.transpose(0, 1).reshape(back.weight.shape))

    def set_incoming_to_zero(self, count: int) -> None:
        """Set the incoming weights of the first units to zero."""
        self.new.weight.data[:count] = 0.0
        if self.new.bias is not None:
            self.new.bias.data[:count] = NEARLY_ZERO
        if self.inner is not None:
            self.inner.weight.data[:count] = 0.0

    def shown(self, number: int) -> slice:
        """Return the columns that are measured in a step."""
        first = number % self.rounds * self.units
        return slice(first, min(first + self.units, len(self.columns)))

    def show(self, number: int) -> None:
        """Let every unit show one column: a unit vector as its outgoing weights."""
        columns = self.columns[self.shown(number)]
        weights = torch.zeros(self.units, self.size, dtype=torch.float64)
        weights[torch.arange(len(columns)), columns] = self.length
        self.set_outgoing(weights)

    def note(self, number: int, is_finite: Tensor) -> None:
        if self.new.weight.grad is not None and bool(is_finite):
            shown = self.shown(number)
            self.sums[shown] += self.new.weight.grad.flatten(1)[: shown.stop - shown.start].double().cpu()

    def choose(self, steps: int) -> str:
        """Set the outgoing weights to the singular vectors, and the incoming ones of these units to zero; or return why it cannot."""
        counts = [len(range(number % self.rounds, steps, self.rounds)) for number in range(self.rounds)]
        rows = torch.tensor(counts, dtype=torch.float64).repeat_interleave(self.units)[: len(self.columns), None]
        means = self.sums / rows
        if not bool(means.isfinite().all()) or not bool(means.any()):
            return "no gradient reached new units that start at zero"
        vectors, values, _ = torch.linalg.svd(means, full_matrices=False)  # [K, min(K, I)]
        count = min(self.units, int((values > 1e-6 * values[0]).sum()))
        weights = torch.zeros(self.units, self.size, dtype=torch.float64)
        weights[:count, self.columns] = self.length * vectors[:, :count].T
        self.set_outgoing(weights)
        self.set_incoming_to_zero(count)
        return ""


class GradMax:
    """Search for the start weights of a seed. It lasts `steps` training steps, in which the seed does not learn.

    `born` are the weights that the seed has at birth. Units for which GradMax has no weights keep them; if the search fails, all do.
    """

    def __init__(
        self, seed: WidthSeed, born: Weights, chain: Sequence[Units], host: Mapping[str, nn.Module], *, steps: int, random_seed: int = 0
    ) -> None:
        self.seed, self.steps = seed, steps
        self.failure = ""  # why the weights of birth were kept; "" if they were not
        self._born, self._number = born, 0
        parts = {plan.module: part for plan, part in zip(seed.spec.wide, seed.parts, strict=True)}
        self._sets = [_Outgoing(units, parts, host, steps=steps, random_seed=random_seed) for units in chain]

    @property
    def is_over(self) -> bool:
        return self._number >= self.steps

    def show(self) -> None:
        """Give the seed the weights for the next step."""
        for one in self._sets:
            one.set_incoming_to_zero(one.units)
            one.show(self._number)

    def take(self, norm: Tensor) -> None:
        """Note the gradients of a training step, whose norm is `norm`. Then show the next weights, or, after the last step, choose."""
        with torch.no_grad():
            for one in self._sets:
                one.note(self._number, torch.isfinite(norm))
            self._number += 1
            if not self.is_over:
                self.show()
                return
            self._use_born()  # for units without a singular vector of their own
            self.failure = next(filter(None, [one.choose(self.steps) for one in self._sets]), "")
            if self.failure:
                self._use_born()
            # The statistics are those of other weights than the chosen ones.
            for part in self.seed.parts:
                if isinstance(part.own, _NormBase):
                    part.own.reset_running_stats()
            self._born = {}

    def _use_born(self) -> None:
        for name, parameter in self.seed.named_parameters():
            parameter.data.copy_(self._born[name])

    def state_dict(self) -> dict[str, Any]:
        sets = [{"columns": one.columns, "length": one.length, "sums": one.sums.clone()} for one in self._sets]
        return {"number": self._number, "steps": self.steps, "failure": self.failure, "born": self._born, "sets": sets}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        device = self.seed.alpha.device
        self._number, self.steps, self.failure = state["number"], state["steps"], state["failure"]
        self._born = {name: tensor.to(device) for name, tensor in state["born"].items()}
        for one, saved in zip(self._sets, state["sets"], strict=True):
            one.columns, one.length, one.sums = saved["columns"].cpu(), saved["length"], saved["sums"].cpu().clone()


def reason_against_gradmax(slotted: Slotted, slot: str, blueprint: str) -> str:
    """Return why new units cannot start with zero incoming weights, by running the host on its example with such units; "" if they can."""
    modules = dict(slotted.host.named_modules())
    chain = widened_by(get_blueprint(blueprint), slotted.place(slot))
    if any(len(units.producers) > 1 for units in chain):
        return "several layers make its units, and the product of two zeros has no gradient"
    if any(has_weight_norm(modules[units.name]) for units in chain):
        return "a weight norm divides by the length of the incoming weights, which cannot be zero"
    seed = slotted.new_seed(slot, blueprint, random_seed=0)
    assert isinstance(seed, WidthSeed)
    seed.alpha.fill_(1.0)
    seed.is_candidate = True
    seed.spec = msgspec.structs.replace(seed.spec, order=seed.spec.order + CANDIDATE)
    try:
        largest = {}  # factor of the incoming weights -> largest value that a layer reads of the new units
        for factor in (1.0, 1e-3):
            for part in seed.parts:
                for layer in (part.new, part.inner):
                    for parameter in () if layer is None else layer.parameters():
                        parameter.data.mul_(factor)
            largest[factor] = _tried(slotted, seed)[0]
        GradMax(seed, {}, chain, modules, steps=2).show()
        at_zero, gradients = _tried(slotted, seed)
    except (RuntimeError, ValueError) as error:
        return f"the host cannot be tried on its example in training mode: {error}"
    negligible = 1e3 * NEARLY_ZERO
    if at_zero > negligible:
        return f"its units are {at_zero:.2g} for an input of zero, and have to be 0"
    if largest[1e-3] > 1e-2 * largest[1.0]:
        return "a norm between the layers divides by the spread of the units, so that zero ones would jump to full size in one step"
    if not all(float(gradient.abs().max()) > negligible for gradient in gradients):
        return "its units have no gradient at zero"
    return ""


def _tried(slotted: Slotted, seed: WidthSeed) -> tuple[float, list[Tensor]]:
    """Run the host with a seed, in training mode. Return the largest value of new units as layers read them, and incoming gradients."""
    read: list[Tensor] = []
    hooks = [
        part.back.register_forward_pre_hook(lambda module, arguments: read.append(arguments[0].detach().abs().max()))
        for part in seed.parts
        if part.back is not None
    ]
    incoming = [part.new.weight for part in seed.parts if part.new is not None]
    seed.connect(slotted.wide, True)
    try:
        with isolated(slotted.host), torch.enable_grad(), torch.random.fork_rng(devices=[]):
            slotted.host.train()
            torch.manual_seed(0)
            outputs = [tensor for tensor in tensors_in(call(slotted.host, slotted.example_input)) if tensor.requires_grad]
            total = torch.stack([(tensor.double() * torch.randn(tensor.shape).to(tensor.device)).sum() for tensor in outputs]).sum()
            gradients = torch.autograd.grad(total, incoming, allow_unused=True)
    finally:
        seed.connect(slotted.wide, False)
        for hook in hooks:
            hook.remove()
    zeros = [torch.zeros(1) if gradient is None else gradient for gradient in gradients]
    return float(torch.stack(read).max()), zeros
