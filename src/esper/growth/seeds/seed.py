"""Seeds: modules that grow after a submodule of the host and change its output h to h + alpha·delta(h); and their optimisers.

A blueprint builds the branch of a seed. The blending says how the branch makes the delta:

    add        branch(h)
    multiply   h · tanh(branch(h))
    gate       σ(gate(mean of h)) · branch(h)                     the gate is a small network of its own

A branch is zero at birth, so with every blending a seed starts as the identity and has a gradient. A seed with alpha 0 has no effect.

Optimiser. Every seed has its own, a `SeedLearner`: of the same class as the host's, with the settings of one of its parameter groups, and
with its own gradient clipping. Seeds are not added to the host's optimiser, because new parameters break schedules such as OneCycleLR.
Every seed starts with a new optimiser, so momentum never passes from one seed to another. Its learning rate rises from near 0: a new Adam
makes full steps in all weights at once, and the host's loss would jump (docs/log.md).

Loss scale. With a GradScaler, a seed's gradients are unscaled before they are measured, clipped and used. If the scaler skips the host's
step, the seeds skip theirs. If only a seed's own gradient overflows, only that seed's step is skipped, and the loss scale, which belongs to
the host, is not lowered. A skipped step changes no weight and no moment. On the CPU it is not made. On a device the test would wait, so it
is made there and undone there, and fused optimisers skip it there themselves; the count of steps that Adam keeps on the CPU goes on. Only
the first step of a seed by an optimiser that is not fused is waited for: there is no state yet that could be restored.

Shapes: h and delta are [B, *place.shape].
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from esper.gradients import GradientStats, unscaled
from esper.growth.config import GrowthError, SeedOptimizerConfig
from esper.growth.host.layout import Place
from esper.growth.seeds.blueprints import build_branch, get_blueprint
from esper.parallel import ALONE, Group
from esper.torch_internals import skips_on_device

Blending = Literal["add", "multiply", "gate"]

GATE_WIDTH = 8

# Key for the spec of a seed in a state dict. Torch prints it if the state dict is loaded into a model without that seed, so it says what to
# do.
SPEC_KEY = "use_esper_load"


class WidePlan(msgspec.Struct, frozen=True):
    """Part of a width seed in one module of the host: how many inputs and outputs it adds there. See `esper.growth.seeds.width`."""

    module: str
    inputs: int  # new input features; 0 for a producer
    outputs: int  # new outputs; 0 for a reader
    seen_inputs: int = 0  # inputs that seeds which were kept before have added to the module
    seen_outputs: int = 0  # outputs that they have added
    axis: int | None = None  # dimension of the units, for a module that does not determine it


class SeedSpec(msgspec.Struct, frozen=True):
    """Everything that is needed to build a seed again. A state dict holds it as a tensor beside the seed's weights."""

    blueprint: str
    kind: Literal["conv", "token", "dense"]
    shape: tuple[int, ...]
    is_causal: bool
    blending: Blending
    batch_axis: int = 0  # 1 in a sequence [T, B, D]
    levels_up: int = 0  # from the module that the seed is registered in to the module whose output it changes
    wide: tuple[WidePlan, ...] = ()  # of a width seed: its parts, in the order in which the modules run
    order: int = 0  # of a width seed: its units come behind those of the seeds with a smaller number
    is_joined: bool = False  # of a width seed: it is computed as a part of wide layers, not block by block

    def builds_same(self, other: SeedSpec) -> bool:
        """Return whether both specs describe the same weights. Where the seed is registered and how it is computed does not matter."""
        return msgspec.structs.replace(self, levels_up=other.levels_up, order=other.order, is_joined=other.is_joined) == other

    def as_tensor(self) -> Tensor:
        """Return the spec as JSON in a tensor of bytes."""
        return torch.frombuffer(bytearray(msgspec.json.encode(self)), dtype=torch.uint8)

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> SeedSpec:
        return msgspec.json.decode(bytes(tensor.tolist()), type=cls)


class Seed(nn.Module):
    """Module that computes h + alpha·delta(h) of the output h of a submodule."""

    alpha: Tensor

    def __init__(self, place: Place, blueprint: str, *, random_seed: int, blending: Blending = "add") -> None:
        super().__init__()
        self.branch = build_branch(get_blueprint(blueprint), place, seed=random_seed)
        self.gate = _make_gate(place, random_seed) if blending == "gate" else None
        self.blending = blending
        self.baked_as = ""  # name relative to the module whose output it changes; "" unless it is baked, when a forward hook applies it
        self._pooled = _pooled_dimensions(place)
        self.register_buffer("alpha", torch.zeros((), dtype=place.dtype, device=place.device))
        # Not a buffer, because an average of models would average its bytes.
        self.spec = SeedSpec(blueprint, place.kind, place.shape, place.is_causal, blending, batch_axis=place.batch_axis)

    def delta(self, h: Tensor) -> Tensor:
        """Return the delta [B, *place.shape] for h of the same shape."""
        branch: Tensor = self.branch(h)
        if self.blending == "multiply":
            return h * branch.tanh()
        if self.gate is not None:
            opening: Tensor = self.gate(h.mean(dim=self._pooled) if self._pooled else h).sigmoid()  # [B, 1], within (0, 1)
            sizes = [1] * h.ndim
            sizes[self.spec.batch_axis] = -1  # B
            return opening.reshape(sizes) * branch
        return branch

    def grown(self, h: Tensor) -> Tensor:
        """Return h + alpha·delta(h)."""
        if h.is_nested:  # sequences without padding, which torch's transformer encoder passes on in eval mode
            return torch.nested.as_nested_tensor([self.grown(sequence.unsqueeze(0)).squeeze(0) for sequence in h.unbind()])
        # If width seeds have widened the output, only the host's own units go through this seed.
        axis, width = (1, self.spec.shape[0]) if self.spec.kind == "conv" else (-1, self.spec.shape[-1])
        if h.shape[axis] > width:
            own, new = torch.split(h, [width, h.shape[axis] - width], axis)
            return torch.cat([self.grown(own.clone(memory_format=torch.preserve_format)), new], axis)
        # Autocast computes norms in float32. Convert back, so that the precision of the host does not change.
        return h + (self.alpha * self.delta(h)).to(h.dtype)

    def connect(self, patches: Mapping[str, Any], is_connected: bool) -> None:
        """Tell the seed that its slot is connected or not. Only a width seed acts on it: it is not applied by the slot."""

    def forward(self, h: Tensor) -> Tensor:
        # A host that runs all of its children in turn, as nn.Sequential does, also runs a baked seed. That must change nothing, because the
        # forward hook applies the seed.
        return h if self.baked_as else self.grown(h)

    def after(self, module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        """Change the output of `module`: the forward hook of a baked seed."""
        if self.baked_as and not torch.compiler.is_compiling() and _child(module, self.baked_as) is not self:
            raise GrowthError(
                f"the layer that held the seed {self.baked_as!r} of this {type(module).__name__} was replaced, so optimisers and state "
                "dicts no longer contain the seed's weights; put the seed into the new layer: new.add_module('esper_seed', seed)"
            )
        return self.grown(output)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + SPEC_KEY] = self.spec.as_tensor()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        given = state_dict.pop(prefix + SPEC_KEY, None)
        if given is None:
            missing.append(prefix + SPEC_KEY)
        elif not (spec := SeedSpec.from_tensor(given)).builds_same(self.spec):
            errors.append(f"{prefix[:-1]} is another seed: the state dict holds {spec}, the model {self.spec}")
        else:
            self.spec = msgspec.structs.replace(self.spec, order=spec.order, is_joined=spec.is_joined)
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)


def _child(module: nn.Module, name: str) -> nn.Module | None:
    """Return the submodule of this name, or None."""
    found: nn.Module | None = module
    for part in name.split("."):
        found = None if found is None else found._modules.get(part)
    return found


def _pooled_dimensions(place: Place) -> tuple[int, ...]:
    """Return the position dimensions of h, over which the gate takes the mean."""
    if place.kind == "conv":
        return tuple(range(2, 2 + place.spatial))
    if place.batch_axis == 1:
        return (0,)
    return () if place.kind == "dense" else tuple(range(1, len(place.shape)))


def _make_gate(place: Place, random_seed: int) -> nn.Module:
    """Build the gate: [B, place.width] to [B, 1]. Raise GrowthError where a seed must not use all positions."""
    if place.is_causal or place.alone:
        reason = "is causal" if place.is_causal else f"must not: {place.alone}"
        raise GrowthError(
            f"the gate looks at the mean of the whole sequence, and {place.name!r} {reason}; use blending 'add' or 'multiply'"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(random_seed + 1)
        gate = nn.Sequential(nn.Linear(place.width, GATE_WIDTH), nn.ReLU(), nn.Linear(GATE_WIDTH, 1))
    return gate.to(device=place.device, dtype=place.dtype)


def reading_waits(tensor: Tensor) -> bool:
    """Return whether reading the tensor's values waits for a device to finish its queued work."""
    return tensor.device.type != "cpu"


MakeOptimizer = Callable[[list[nn.Parameter], float], Optimizer]  # (parameters, learning rate) -> optimiser of a seed

_PASS_ANOTHER = "pass another one as seed_optimizer=lambda parameters, learning_rate: torch.optim.AdamW(parameters, lr=learning_rate)"


class SeedLearner:
    """Optimiser of one seed.

    `group` is the index of the host optimiser's parameter group whose learning rate the seed follows; an index, because `load_state_dict`
    of an optimiser replaces its groups. `warmup` is the number of training steps over which the learning rate rises; `tick` counts them.
    """

    def __init__(
        self, seed: nn.Module, host: Optimizer, group: int, config: SeedOptimizerConfig, make: MakeOptimizer | None, *, warmup: int = 0
    ) -> None:
        self._warmup, self._steps = warmup, 0
        self.parameters = [parameter for parameter in seed.parameters() if parameter.requires_grad]
        self.config = config
        self._host, self._group = host, group
        self.optimizer = make(self.parameters, self.rate) if make is not None else _like(innermost(host), group, self.parameters)
        _check_needs_no_closure(self.optimizer)
        self._norms: list[Tensor] = []  # gradient norms of the steps since the last report, on the device
        self._skipped: Tensor | int = 0  # steps since the last report that were skipped because of the host's gradient
        self._stepped: set[nn.Parameter] = set()  # parameters that this object has stepped, so that they have their state
        self.loss_unit = 1.0  # see LossRange: clipping and health are relative to it

    @property
    def has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self.parameters)

    def step(self, *, scale: Tensor | None = None, found_inf: Tensor | None = None, group: Group = ALONE) -> None:
        """Make one step by the gradients that are there, which were multiplied by `scale`. They are unscaled and clipped in place.

        `found_inf` is above 0 if the host's own step is skipped on the device. A gradient that is not finite is not used on the CPU and
        under a loss scale; elsewhere the governor notices its effect.
        """
        if group.world_size > 1:
            _average(self.parameters, group)
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if not gradients:
            return
        if scale is not None:
            for gradient in gradients:
                gradient.copy_(unscaled(gradient, scale))
        # Skip the step here if the host skips its own, or if this gradient is not finite, where reading a tensor waits for no device. Wait
        # in a first step under a loss scale: its state could not be put back.
        norm = get_total_norm(gradients)
        is_new = any(one.grad is not None and one not in self._stepped for one in self.parameters)
        may_read = not reading_waits(norm) or (scale is not None and is_new and not skips_on_device(self.optimizer))
        if may_read and found_inf is not None and float(found_inf) > 0:
            self._skipped = self._skipped + 1
            return
        self._norms.append(norm)
        if may_read and not torch.isfinite(norm):
            return
        for own in self.optimizer.param_groups:
            own["lr"] = self.rate * min((self._steps + 1) / (self._warmup + 1), 1.0)
        if may_read or scale is None:
            self._clip(norm)
            self.optimizer.step()
            self._stepped.update(one for one in self.parameters if one.grad is not None)
            return
        # Under a loss scale on a device, decide there. A bad gradient becomes zero, for state that `_undone_where` does not find.
        is_bad = ~torch.isfinite(norm) if found_inf is None else ~torch.isfinite(norm) | (found_inf.to(norm.device) > 0)
        self._skipped = self._skipped + (is_bad & torch.isfinite(norm))
        for gradient in gradients:
            gradient.masked_fill_(is_bad, 0.0)
        self._clip(norm.masked_fill(is_bad, 0.0))
        with (_skipped_where if skips_on_device(self.optimizer) else _undone_where)(is_bad, self.optimizer):
            self.optimizer.step()

    def _clip(self, norm: Tensor) -> None:
        if self.config.max_grad_norm is not None:
            clip_grads_with_norm_(self.parameters, self.config.max_grad_norm * self.loss_unit, norm)

    def tick(self, *, is_skipped: Tensor | bool = False) -> None:
        """Count a training step for the warm-up. `is_skipped` says that neither the host nor the seed has stepped in it."""
        self._steps += 1
        self._skipped = self._skipped + is_skipped

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)

    @property
    def rate(self) -> float:
        """Learning rate of the seed after the warm-up."""
        return float(self._host.param_groups[self._group]["lr"]) * self.config.learning_rate_factor

    def report(self) -> GradientStats:
        """Return statistics of the gradients since the last report. Reads from the device once."""
        *norms, skipped = torch.cat((self._gathered(), self._counted())).tolist()
        self._norms, self._skipped = [], 0
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
            "optimizer": self.optimizer.state_dict(),
            "norms": self._gathered(),
            "skipped": self._counted(),
            "steps": self._steps,
            "warmup": self._warmup,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self._norms = list(state["norms"].to(self.parameters[0].device).unbind())
        self._skipped = state["skipped"][0].to(self.parameters[0].device)
        self._steps, self._warmup = state["steps"], state["warmup"]
        self._stepped.clear()
        self.zero_grad()


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


def _like(host: Optimizer, group: int, parameters: list[nn.Parameter]) -> Optimizer:
    """Make an optimiser of the host's class with the settings of one of its groups."""
    kind, settings = type(host), host.param_groups[group]
    accepted = inspect.signature(kind).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values())
    try:
        return kind(parameters, **{name: settings[name] for name in host.defaults if name in settings and (takes_all or name in accepted)})
    except Exception as error:
        raise GrowthError(f"an optimiser for seeds cannot be made like the host's ({kind.__name__}): {error}; {_PASS_ANOTHER}") from error


def _check_needs_no_closure(optimizer: Optimizer) -> None:
    """Raise a GrowthError if the optimiser's `step` requires a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise GrowthError(f"{type(optimizer).__name__} computes the loss itself in every step, which seeds cannot do; {_PASS_ANOTHER}")


def group_of(optimizer: Optimizer, module: nn.Module, host: nn.Module) -> int:
    """Return the index of the first group with a parameter of the submodule; if none has one, of the first with one of the host; else 0."""

    def find(parameters: Iterable[nn.Parameter]) -> int | None:
        wanted = {id(parameter) for parameter in parameters}
        found = (index for index, group in enumerate(optimizer.param_groups) if any(id(one) in wanted for one in group["params"]))
        return next(found, None)

    own = find(module.parameters())
    anywhere = find(host.parameters()) if own is None else own
    return 0 if anywhere is None else anywhere
