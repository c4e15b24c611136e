"""Seeds: modules that grow after a submodule of the host and change its output h to h + alpha·delta(h).

A blueprint builds the branch of a seed. The blending says how the branch makes the delta:

    add        branch(h)
    multiply   h · tanh(branch(h))
    gate       σ(gate(mean of h)) · branch(h)                     the gate is a small network of its own

A branch is zero at birth, so with every blending a seed starts as the identity and has a gradient. A seed with alpha 0 has no effect.

Shapes: h and delta are [B, *place.shape].
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn

from esper.growth.config import GrowthError
from esper.growth.host.layout import Place
from esper.growth.seeds.blueprints import build_branch, get_blueprint

Blending = Literal["add", "multiply", "gate"]
GATE_WIDTH = 8


# Keys for the spec of a seed in a state dict. The first is the current one: torch prints it if the state dict is loaded into a model
# without that seed, so it says what to do. Files of earlier versions have the second.
SPEC_KEYS = ("use_esper_load", "spec")


class SeedSpec(msgspec.Struct, frozen=True):
    """Everything that is needed to build a seed again. A state dict holds it as a tensor beside the seed's weights."""

    blueprint: str
    kind: Literal["conv", "token", "dense"]
    shape: tuple[int, ...]
    is_causal: bool
    blending: Blending
    batch_axis: int = 0  # 1 in a sequence [T, B, D]
    levels_up: int = 0  # from the module that the seed is registered in to the module whose output it changes

    def builds_same(self, other: SeedSpec) -> bool:
        """Return whether both specs describe the same seed, apart from the module it is registered in."""
        return msgspec.structs.replace(self, levels_up=other.levels_up) == other

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
        self.baked_as = ""  # in a baked seed, which a forward hook applies: its name relative to the module whose output it changes
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
            opening: Tensor = self.gate(h.mean(dim=self._pooled) if self._pooled else h).sigmoid()  # [B, 1]
            sizes = [1] * h.ndim
            sizes[self.spec.batch_axis] = -1
            return opening.reshape(sizes) * branch
        return branch

    def grown(self, h: Tensor) -> Tensor:
        """Return h + alpha·delta(h)."""
        if h.is_nested:  # sequences without padding, which torch's transformer encoder passes on in eval mode
            return torch.nested.as_nested_tensor([self.grown(sequence.unsqueeze(0)).squeeze(0) for sequence in h.unbind()])
        # Autocast computes norms in float32. Convert back, so that the precision of the host does not change.
        return h + (self.alpha * self.delta(h)).to(h.dtype)

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
        destination[prefix + SPEC_KEYS[0]] = self.spec.as_tensor()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        given = [state_dict.pop(prefix + key) for key in SPEC_KEYS if prefix + key in state_dict]
        if not given:
            missing.append(prefix + SPEC_KEYS[0])
        elif not (spec := SeedSpec.from_tensor(given[0])).builds_same(self.spec):
            errors.append(f"{prefix[:-1]} is another seed: the state dict holds {spec}, the model {self.spec}")
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
    if place.is_causal or place.alone:
        reason = "is causal" if place.is_causal else f"must not: {place.alone}"
        raise GrowthError(
            f"the gate looks at the mean of the whole sequence, and {place.name!r} {reason}; use blending 'add' or 'multiply'"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(random_seed + 1)
        gate = nn.Sequential(nn.Linear(place.width, GATE_WIDTH), nn.ReLU(), nn.Linear(GATE_WIDTH, 1))
    return gate.to(device=place.device, dtype=place.dtype)
