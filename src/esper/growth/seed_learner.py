"""How a seed learns: an optimiser of its own, clipped on its own, at the learning rate of the host's group it belongs to.

The optimiser is of the host's kind and has the settings of that group. The host's optimiser does not know of seeds: parameters that are
added to it break schedules such as OneCycleLR. A seed is born with a fresh optimiser, so no momentum outlives the seed it belonged to.
Its learning rate rises from 0 at first: a fresh Adam makes full steps in all weights at once, and the host's loss jumps (docs/log.md).

Under a GradScaler the seed's gradients are unscaled here, before they are measured, clipped and stepped on. A gradient that is not finite
is not stepped on, and counted. Each looks at its own: an overflow in the seed skips the seed's step and not the host's, one in the host
skips the host's and not the seed's. The loss scale is the host's business; what overflows in seeds alone does not lower it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from esper.gradients import gradient_norm
from esper.growth.config import SeedOptimizer
from esper.growth.errors import GrowthError
from esper.growth.state import GradientStats
from esper.parallel import ALONE, Group

MakeOptimizer = Callable[[list[nn.Parameter], float], Optimizer]


class SeedLearner:
    """`group` is the number of the host optimiser's group whose learning rate the seed follows.

    A number, because an optimiser has new groups after its `load_state_dict`. `warmup` is the number of steps in which the rate rises.
    """

    def __init__(
        self, seed: nn.Module, host: Optimizer, group: int, config: SeedOptimizer, make: MakeOptimizer | None, *, warmup: int = 0
    ) -> None:
        self._warmup, self._steps = warmup, 0
        self.parameters = [parameter for parameter in seed.parameters() if parameter.requires_grad]
        self.config = config
        self._host, self._group = host, group
        self.optimizer = make(self.parameters, self._rate()) if make is not None else _like(host, group, self.parameters)
        _check_steps_alone(self.optimizer)
        self._norms: list[Tensor] = []  # of the steps since the last report, on the device
        self._skipped = 0

    def step(self, *, scale: float = 1.0, must_check: bool = False, group: Group = ALONE) -> None:
        """One step by the gradients that are there, which were multiplied by `scale`; then they are gone.

        On the CPU, or where `must_check`, a gradient that is not finite is skipped here; elsewhere that would wait for the device at every
        step, and the governor finds out.
        """
        if group.world_size > 1:
            _average(self.parameters, group)
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if not gradients:
            return
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
            for own in self.optimizer.param_groups:
                own["lr"] = self._rate() * min((self._steps + 1) / (self._warmup + 1), 1.0)
            self.optimizer.step()
            self._steps += 1
        self.forget_gradients()

    def forget_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def _rate(self) -> float:
        return float(self._host.param_groups[self._group]["lr"]) * self.config.learning_rate_factor

    def report(self) -> GradientStats:
        """What the gradients were like since the last report. Reads the device once."""
        norms, skipped = self._gathered().tolist(), self._skipped
        self._norms, self._skipped = [], 0
        return GradientStats.of(norms, skipped=skipped)

    def _gathered(self) -> Tensor:
        return torch.stack([norm.float() for norm in self._norms]) if self._norms else torch.empty(0)

    def state_dict(self) -> dict[str, Any]:
        counts = {"skipped": self._skipped, "steps": self._steps, "warmup": self._warmup}
        return {"optimizer": self.optimizer.state_dict(), "norms": self._gathered(), **counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self._norms = list(state["norms"].to(self.parameters[0].device).unbind())
        self._skipped, self._steps, self._warmup = state["skipped"], state["steps"], state["warmup"]
        self.forget_gradients()


def _average(parameters: list[nn.Parameter], group: Group) -> None:
    """In one transfer: the data-parallel wrapper does not know of these parameters. A rank that has no gradient sends zeros."""
    with torch.no_grad():
        own = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in parameters]
        flat = group.sum_(torch.cat([gradient.reshape(-1) for gradient in own])) / group.world_size
        for parameter, part in zip(parameters, flat.split_with_sizes([gradient.numel() for gradient in own]), strict=True):
            parameter.grad = part.view_as(parameter).clone()


def _like(host: Optimizer, group: int, parameters: list[nn.Parameter]) -> Optimizer:
    kind, settings = type(host), host.param_groups[group]
    accepted = inspect.signature(kind).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values())
    try:
        return kind(parameters, **{name: settings[name] for name in host.defaults if name in settings and (takes_all or name in accepted)})
    except Exception as error:
        raise GrowthError(f"no optimiser like the host's ({kind.__name__}) can be made for seeds: {error}; {_OWN}") from error


def _check_steps_alone(optimizer: Optimizer) -> None:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise GrowthError(f"{type(optimizer).__name__} computes the loss itself in every step, which seeds cannot do; {_OWN}")


_OWN = "pass another one as seed_optimizer=lambda parameters, learning_rate: torch.optim.AdamW(parameters, lr=learning_rate)"


def group_of(optimizer: Optimizer, module: nn.Module, host: nn.Module) -> int:
    """The number of the group that holds a submodule's parameters; for one that has none, or is frozen, that of any of the host's."""

    def find(parameters: Iterable[nn.Parameter]) -> int | None:
        wanted = {id(parameter) for parameter in parameters}
        found = (index for index, group in enumerate(optimizer.param_groups) if any(id(one) in wanted for one in group["params"]))
        return next(found, None)

    own = find(module.parameters())
    anywhere = find(host.parameters()) if own is None else own
    return 0 if anywhere is None else anywhere
