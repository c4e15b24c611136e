"""How a seed learns: an optimiser of its own, clipped on its own, at the learning rate of the host's group it belongs to.

The optimiser is of the host's kind and has the settings of that group. The host's optimiser does not know of seeds: parameters that are
added to it break schedules such as OneCycleLR. A seed is born with a fresh optimiser, so no momentum outlives the seed it belonged to.

A gradient that is not finite is not stepped on, and counted; what the host's optimiser does is its own business, and the other way round.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from esper.gradients import gradient_health, gradient_norm
from esper.growth.config import SeedOptimizer
from esper.growth.errors import GrowthError
from esper.growth.state import GradientStats
from esper.parallel import Group

MakeOptimizer = Callable[[list[nn.Parameter], float], Optimizer]


class SeedLearner:
    """`host_group` is the group of the host's optimiser whose learning rate the seed follows."""

    def __init__(
        self, seed: nn.Module, host: Optimizer, host_group: dict[str, Any], config: SeedOptimizer, make: MakeOptimizer | None
    ) -> None:
        self.parameters = [parameter for parameter in seed.parameters() if parameter.requires_grad]
        self.config = config
        self._host_group = host_group
        self.optimizer = make(self.parameters, self._rate()) if make is not None else _of_the_same_kind(host, host_group, self.parameters)
        self._norms: list[Tensor] = []  # of the steps since the last report, on the device
        self._skipped = 0

    def step(self, *, scale: float = 1.0, must_check: bool = False, group: Group | None = None) -> None:
        """One step by the gradients that are there, which were multiplied by `scale`; then they are gone.

        On the CPU, or where `must_check`, a gradient that is not finite is skipped here; elsewhere that would wait for the device at every
        step, and the governor finds out.
        """
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if not gradients:
            return
        if group is not None and group.world_size > 1:
            _average(gradients, group)
        if scale != 1.0:
            for gradient in gradients:
                gradient /= scale
        norm = gradient_norm(self.parameters)
        self._norms.append(norm)
        if (must_check or norm.device.type == "cpu") and not torch.isfinite(norm):
            self._skipped += 1
        else:
            if self.config.max_grad_norm is not None:
                clip_grads_with_norm_(self.parameters, self.config.max_grad_norm, norm)
            for group_ in self.optimizer.param_groups:
                group_["lr"] = self._rate()
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _rate(self) -> float:
        return float(self._host_group["lr"]) * self.config.learning_rate_factor

    def report(self) -> GradientStats:
        """What the gradients were like since the last report. Reads the device once."""
        norms = torch.stack([norm.float() for norm in self._norms]).tolist() if self._norms else []
        finite = [norm for norm in norms if norm < float("inf")]
        skipped, self._norms, self._skipped = self._skipped, [], 0
        mean = sum(finite) / len(finite) if finite else 0.0
        broken = len(norms) - len(finite)
        health = (sum(map(gradient_health, finite)) / len(norms)) if norms else 0.0
        return GradientStats(len(norms), mean, max(finite, default=0.0), health, max(skipped, broken))

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)


def _average(gradients: list[Tensor], group: Group) -> None:
    """In one transfer: the data-parallel wrapper does not know of these parameters."""
    flat = group.sum_(torch.cat([gradient.reshape(-1) for gradient in gradients])) / group.world_size
    for gradient, part in zip(gradients, flat.split_with_sizes([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def _of_the_same_kind(host: Optimizer, host_group: dict[str, Any], parameters: list[nn.Parameter]) -> Optimizer:
    kind = type(host)
    accepted = inspect.signature(kind).parameters
    settings = {name: host_group[name] for name in host.defaults if name in accepted and name in host_group}
    try:
        return kind(parameters, **settings)
    except Exception as error:
        raise GrowthError(
            f"no optimiser like the host's ({kind.__name__}) can be made for seeds: {error}; "
            "pass one as seed_optimizer=lambda parameters, learning_rate: ..."
        ) from error


def group_of(optimizer: Optimizer, module: nn.Module, host: nn.Module) -> dict[str, Any]:
    """The group of the host's optimiser that holds a submodule's parameters; for one without parameters, or frozen, the first group."""

    def find(parameters: Iterable[nn.Parameter]) -> dict[str, Any] | None:
        wanted = {id(parameter) for parameter in parameters}
        return next((group for group in optimizer.param_groups if any(id(parameter) in wanted for parameter in group["params"])), None)

    return find(module.parameters()) or find(host.parameters()) or optimizer.param_groups[0]
