"""Optimisers of seeds.

Every seed has its own, in a `SeedLearner`, with its own gradient clipping: of the same class as the host's, with the settings of its
parameter groups. Seeds are not added to the host's optimiser, because new parameters break schedules such as OneCycleLR. Every seed starts
with a new optimiser, so momentum never passes from one seed to another. Its learning rate rises from near 0: a new Adam makes full steps in
all weights at once, and the host's loss would jump (docs/log.md).

Several optimisers. A host may have more than one, such as Muon for its matrices and AdamW for the rest. Then a seed has one of each class
that it needs, and each steps when that of the host does. `routes_of` finds the optimiser and the group of each parameter of a seed.

Loss scale. With a GradScaler, a seed's gradients are unscaled before they are measured, clipped and used. If the scaler skips the host's
step, the seeds skip theirs. If only a seed's own gradient overflows, only that seed's step is skipped, and the loss scale, which belongs to
the host, is not lowered. A skipped step changes no weight and no moment. On the CPU it is not made. On a device the test would wait, so it
is made there and undone there, and fused optimisers skip it there themselves; the count of steps that Adam keeps on the CPU goes on. Only
the first step of a seed by an optimiser that is not fused is waited for: there is no state yet that could be restored.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from esper.gradients import GradientStats, unscaled
from esper.growth.config import GrowthError, SeedOptimizerConfig
from esper.growth.seeds.seed import Seed
from esper.parallel import ALONE, Group
from esper.torch_internals import skips_on_device

MakeOptimizer = Callable[[list[nn.Parameter], float], Optimizer]  # (parameters, learning rate) -> optimiser of a seed

_PASS_ANOTHER = "pass another one as seed_optimizer=lambda parameters, learning_rate: torch.optim.AdamW(parameters, lr=learning_rate)"


class Route(NamedTuple):
    """The optimiser of the host, as the user passed it, and the group in it that parameters of a seed follow.

    An index, because `load_state_dict` of an optimiser replaces its groups.
    """

    host: Optimizer
    group: int

    @property
    def learning_rate(self) -> float:
        return float(self.host.param_groups[self.group]["lr"])


class Routes(NamedTuple):
    """The routes of a seed: that of the slot as a whole, and that of each trained parameter, in the order of `seed.parameters()`."""

    of_slot: Route
    of_parameters: list[Route]


def routes_of(seed: nn.Module, optimizers: Sequence[Optimizer], place: str, host: nn.Module) -> Routes:
    """Return the routes of a seed behind the submodule `place`.

    A parameter that becomes rows or columns of a parameter of the host follows that one. Others follow the nearest one with as many
    dimensions: in the submodule, else in the host. Where there is none, they follow the nearest one.
    """
    routes = {
        id(parameter): Route(optimizer, number)
        for optimizer in reversed(optimizers)
        for number, group in reversed(list(enumerate(optimizer.param_groups)))
        for parameter in group["params"]
    }
    order = [*host.get_submodule(place).parameters(), *host.parameters()]  # the nearest ones first
    held = [(parameter.ndim, routes[id(parameter)]) for parameter in order if id(parameter) in routes]
    nearest = held[0][1] if held else Route(optimizers[0], 0)
    become = seed.become(dict(host.named_modules())) if isinstance(seed, Seed) else {}
    found = []
    for parameter in seed.parameters():
        if parameter.requires_grad:
            alike = next((route for ndim, route in held if ndim == parameter.ndim), nearest)
            found.append(routes.get(id(become.get(parameter)), alike))
    return Routes(nearest, found)


@dataclass(frozen=True, slots=True)
class _Part:
    """One of a seed's optimisers, the parameters in it, and the routes of its groups."""

    optimizer: Optimizer
    parameters: list[nn.Parameter]
    routes: list[Route]

    @property
    def host(self) -> Optimizer:
        return self.routes[0].host


class SeedLearner:
    """The optimisers of one seed: one for each optimiser of the host that its parameters follow. With `make`, there is a single one.

    `warmup` is the number of training steps over which the learning rate rises; `tick` counts them.
    """

    def __init__(
        self, seed: nn.Module, routes: Routes, config: SeedOptimizerConfig, make: MakeOptimizer | None, *, warmup: int = 0
    ) -> None:
        self._warmup, self._steps = warmup, 0
        self.parameters = [parameter for parameter in seed.parameters() if parameter.requires_grad]
        self.config, self._route = config, routes.of_slot
        if make is not None:
            self._parts = [_Part(make(self.parameters, self.rate), self.parameters, [routes.of_slot])]
        else:
            routed = list(zip(self.parameters, routes.of_parameters, strict=True))
            hosts = dict.fromkeys(route.host for route in routes.of_parameters)
            self._parts = [_like(host, [(one, route) for one, route in routed if route.host is host]) for host in hosts]
        for part in self._parts:
            _check_needs_no_closure(part.optimizer)
        self._in_step: set[int] = set()  # indices of the parts whose gradient norms are in the last entry of `_norms`
        self._norms: list[Tensor] = []  # gradient norms of the steps since the last report, on the device
        self._skipped: Tensor | int = 0  # steps since the last report that were skipped because of the host's gradient
        self._stepped: set[nn.Parameter] = set()  # parameters that this object has stepped, so that they have their state
        self.loss_unit = 1.0  # see LossRange: clipping and health are relative to it

    @property
    def optimizers(self) -> list[Optimizer]:
        return [part.optimizer for part in self._parts]

    @property
    def has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self.parameters)

    def step(
        self,
        *,
        with_: Optimizer | None = None,
        scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        group: Group = ALONE,
    ) -> None:
        """Make one step by the gradients that are there, which were multiplied by `scale`. They are unscaled and clipped in place.

        `with_` is the optimiser of the host that has stepped: the parameters that follow it step; None: all do. `found_inf` is above 0 if
        the host's own step is skipped on the device. A gradient that is not finite is not used on the CPU and under a loss scale; elsewhere
        the governor notices its effect.
        """
        for number, part in enumerate(self._parts):
            if with_ is None or part.host is with_:
                self._step_part(number, part, scale=scale, found_inf=found_inf, group=group)

    def _step_part(self, number: int, part: _Part, *, scale: Tensor | None, found_inf: Tensor | None, group: Group) -> None:
        if group.world_size > 1:
            _average(part.parameters, group)
        gradients = [parameter.grad for parameter in part.parameters if parameter.grad is not None]
        if not gradients:
            return
        if scale is not None:
            for gradient in gradients:
                gradient.copy_(unscaled(gradient, scale))
        # Skip the step here if the host skips its own, or if this gradient is not finite, where reading a tensor waits for no device. Wait
        # in a first step under a loss scale: its state could not be put back.
        norm = get_total_norm(gradients)
        is_new = any(one.grad is not None and one not in self._stepped for one in part.parameters)
        may_read = not reading_waits(norm) or (scale is not None and is_new and not skips_on_device(part.optimizer))
        if may_read and found_inf is not None and float(found_inf) > 0:
            self._skipped = self._skipped + 1
            return
        self._note_norm(number, norm)
        if may_read and not torch.isfinite(norm):
            return
        self.set_rates(min((self._steps + 1) / (self._warmup + 1), 1.0))
        if may_read or scale is None:
            self._clip(part, norm)
            part.optimizer.step()
            self._stepped.update(one for one in part.parameters if one.grad is not None)
            return
        # Under a loss scale on a device, decide there. A bad gradient becomes zero, for state that `_undone_where` does not find.
        is_bad = ~torch.isfinite(norm) if found_inf is None else ~torch.isfinite(norm) | (found_inf.to(norm.device) > 0)
        self._skipped = self._skipped + (is_bad & torch.isfinite(norm))
        for gradient in gradients:
            gradient.masked_fill_(is_bad, 0.0)
        self._clip(part, norm.masked_fill(is_bad, 0.0))
        with (_skipped_where if skips_on_device(part.optimizer) else _undone_where)(is_bad, part.optimizer):
            part.optimizer.step()

    def _note_norm(self, number: int, norm: Tensor) -> None:
        """Note the gradient norm of a part. Parts that step one after the other make one step of the seed."""
        if self._in_step and number not in self._in_step:
            self._norms[-1] = torch.hypot(self._norms[-1], norm)
            self._in_step.add(number)
        else:
            self._norms.append(norm)
            self._in_step = {number}

    def _clip(self, part: _Part, norm: Tensor) -> None:
        if self.config.max_grad_norm is not None:
            clip_grads_with_norm_(part.parameters, self.config.max_grad_norm * self.loss_unit, norm)

    def set_rates(self, factor: float) -> None:
        """Set the learning rates to this share of those after the warm-up."""
        for part in self._parts:
            for own, route in zip(part.optimizer.param_groups, part.routes, strict=False):
                own["lr"] = self._rate(route) * factor

    def tick(self, *, is_skipped: Tensor | bool = False) -> None:
        """Count a training step for the warm-up. `is_skipped` says that neither the host nor the seed has stepped in it."""
        self._steps += 1
        self._skipped = self._skipped + is_skipped

    def zero_grad(self, *, set_to_none: bool = True, with_: Optimizer | None = None) -> None:
        """Clear the gradients of the parameters that follow this optimiser of the host; None: of all."""
        for part in self._parts:
            if with_ is None or part.host is with_:
                part.optimizer.zero_grad(set_to_none=set_to_none)

    @property
    def rate(self) -> float:
        """Learning rate in the slot after the warm-up."""
        return self._rate(self._route)

    def _rate(self, route: Route) -> float:
        return route.learning_rate * self.config.learning_rate_factor

    def report(self) -> GradientStats:
        """Return statistics of the gradients since the last report. Reads from the device once."""
        *norms, skipped = torch.cat((self._gathered(), self._counted())).tolist()
        self._norms, self._skipped, self._in_step = [], 0, set()
        return GradientStats.of(norms, skipped=int(skipped), unit=self.loss_unit)

    def _gathered(self) -> Tensor:
        """Return the gradient norms as one tensor [steps] on the seed's device."""
        device = self.parameters[0].device
        return torch.stack([norm.float() for norm in self._norms]) if self._norms else torch.empty(0, device=device)

    def _counted(self) -> Tensor:
        """Return the skipped steps as a tensor [1] on the seed's device."""
        return torch.as_tensor(self._skipped, dtype=torch.float32, device=self.parameters[0].device).reshape(1)

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizers": [part.optimizer.state_dict() for part in self._parts],
            "norms": self._gathered(),
            "skipped": self._counted(),
            "steps": self._steps,
            "warmup": self._warmup,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part, saved in zip(self._parts, state["optimizers"], strict=True):
            part.optimizer.load_state_dict(saved)
        self._norms = list(state["norms"].to(self.parameters[0].device).unbind())
        self._skipped = state["skipped"][0].to(self.parameters[0].device)
        self._steps, self._warmup, self._in_step = state["steps"], state["warmup"], set()
        self._stepped.clear()
        self.zero_grad()


def reading_waits(tensor: Tensor) -> bool:
    """Return whether reading the tensor's values waits for a device to finish its queued work."""
    return tensor.device.type != "cpu"


@contextmanager
def _undone_where(is_bad: Tensor, optimizer: Optimizer) -> Iterator[None]:
    """Make the step inside the `with` block change nothing if `is_bad`, which stays on its device."""
    kept = [
        (parameter, parameter.detach().clone(), {name: value.clone() for name, value in _tensors_of(optimizer, parameter, is_bad.device)})
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    yield
    with torch.no_grad():
        for parameter, weights, state in kept:
            parameter.copy_(torch.where(is_bad, weights, parameter))
            for name, value in _tensors_of(optimizer, parameter, is_bad.device):
                value.copy_(torch.where(is_bad, state.get(name, value), value))


@contextmanager
def _skipped_where(is_bad: Tensor, optimizer: Optimizer) -> Iterator[None]:
    """Let a fused optimiser skip the step inside the `with` block if `is_bad`, which it reads on the device."""
    had = {parameter: set(state) for parameter, state in optimizer.state.items()}
    optimizer.grad_scale, optimizer.found_inf = None, is_bad.float()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    # A skipped first step leaves the momentum of SGD uninitialised.
    for parameter, state in optimizer.state.items():
        for name in state.keys() - had.get(parameter, set()):
            if isinstance(state[name], Tensor):
                state[name].masked_fill_(is_bad, 0.0)


def _tensors_of(optimizer: Optimizer, parameter: nn.Parameter, device: torch.device) -> list[tuple[str, Tensor]]:
    """Return the tensors on a device in the state of a parameter, by name."""
    state = optimizer.state.get(parameter, {})  # indexing would make an entry
    return [(name, value) for name, value in state.items() if isinstance(value, Tensor) and value.device == device]


def nested(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimiser and those that it wraps, outermost first. Accelerate, Lightning and SAM wrap optimisers."""
    found = [optimizer]
    while len(inner := [value for value in vars(found[-1]).values() if isinstance(value, Optimizer)]) == 1 and inner[0] not in found:
        found.append(inner[0])
    return found


def innermost(optimizer: Optimizer) -> Optimizer:
    """Return the wrapped optimiser that changes the weights."""
    return nested(optimizer)[-1]


def _average(parameters: list[nn.Parameter], group: Group) -> None:
    """Average the gradients over all ranks in one transfer, because DistributedDataParallel does not know these parameters.

    A rank without a gradient contributes zeros.
    """
    with torch.no_grad():
        own = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in parameters]
        flat = group.sum_(torch.cat([gradient.reshape(-1) for gradient in own])) / group.world_size
        for parameter, part in zip(parameters, flat.split_with_sizes([gradient.numel() for gradient in own]), strict=True):
            parameter.grad = part.view_as(parameter).clone()


def _like(host: Optimizer, routed: Sequence[tuple[nn.Parameter, Route]]) -> _Part:
    """Make an optimiser of the host's class with the settings of the groups that these parameters follow."""
    kind, defaults = type(innermost(host)), innermost(host).defaults
    accepted = inspect.signature(kind).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values())

    def settings(route: Route) -> dict[str, Any]:
        given: Mapping[str, Any] = host.param_groups[route.group]
        return {name: given[name] for name in defaults if name in given and (takes_all or name in accepted)}

    routes = list(dict.fromkeys(route for _, route in routed))
    groups = [{"params": [one for one, its_route in routed if its_route == route], **settings(route)} for route in routes]
    try:
        optimizer = kind(groups, **settings(routes[0]))
    except Exception as error:
        raise GrowthError(f"an optimiser for seeds cannot be made like the host's ({kind.__name__}): {error}; {_PASS_ANOTHER}") from error
    return _Part(optimizer, [one for one, _ in routed], routes)


def _check_needs_no_closure(optimizer: Optimizer) -> None:
    """Raise a GrowthError if the optimiser's `step` requires a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise GrowthError(f"{type(optimizer).__name__} computes the loss itself in every step, which seeds cannot do; {_PASS_ANOTHER}")
