"""Seeds: modules that grow after a submodule of the host and change its output h to h + alpha·delta(h).

A blueprint builds the branch of a seed. The blending says how the branch makes the delta:

    add        branch(h)
    multiply   h · tanh(branch(h))
    gate       σ(gate(mean of h)) · branch(h)                     the gate is a small network of its own

A branch is zero at birth, so with every blending a seed starts as the identity and has a gradient. A seed with alpha 0 has no effect.

Shapes: h and delta are [B, *place.shape].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn

from esper.growth.config import GrowthError
from esper.growth.host.layout import Place
from esper.growth.seeds.blueprints import build_branch, get_blueprint

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

    def become(self, modules: Mapping[str, nn.Module]) -> dict[nn.Parameter, Tensor]:
        """Return own parameter -> the parameter of the host that it becomes a part of. Only a width seed has any."""
        return {}

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
