"""A seed: what grows after a submodule of the host, and adds to that submodule's output.

The output becomes h + alpha·delta(h). How the branch that a blueprint builds makes the delta is the blending:

    add        branch(h)
    multiply   h · tanh(branch(h))
    gate       σ(gate(mean of h)) · branch(h)                     the gate is a small network of its own

A branch is zero at birth, so each of them starts as the identity with a gradient that is alive. Because all of them add, a seed with
alpha 0 is no seed.

Shapes: h and delta are [B, *place.shape].
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn

from esper.growth.blueprints import build_branch, get_blueprint
from esper.growth.errors import GrowthError
from esper.growth.place import Place

Blending = Literal["add", "multiply", "gate"]
GATE_WIDTH = 8


class SeedSpec(msgspec.Struct, frozen=True):
    """What is needed to build a seed again. It lies in the seed as a tensor, so that a state dict tells the whole structure."""

    blueprint: str
    kind: Literal["conv", "token", "dense"]
    shape: tuple[int, ...]
    is_causal: bool
    blending: Blending

    def as_tensor(self) -> Tensor:
        return torch.frombuffer(bytearray(msgspec.json.encode(self)), dtype=torch.uint8)

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> SeedSpec:
        return msgspec.json.decode(bytes(tensor.tolist()), type=cls)


class Seed(nn.Module):
    """h -> h + alpha·delta(h)."""

    alpha: Tensor
    spec: Tensor

    def __init__(self, place: Place, blueprint: str, *, random_seed: int, blending: Blending = "add") -> None:
        super().__init__()
        self.branch = build_branch(get_blueprint(blueprint), place, seed=random_seed)
        self.gate = _make_gate(place, random_seed) if blending == "gate" else None
        self.blending = blending
        self.is_baked = False  # part of the host, and applied by a hook
        self._pooled = _pooled_dimensions(place)
        self.register_buffer("alpha", torch.zeros((), dtype=place.dtype, device=place.device))
        self.register_buffer("spec", SeedSpec(blueprint, place.kind, place.shape, place.is_causal, blending).as_tensor().to(place.device))

    def delta(self, h: Tensor) -> Tensor:
        branch: Tensor = self.branch(h)
        if self.blending == "multiply":
            return h * branch.tanh()
        if self.gate is not None:
            opening: Tensor = self.gate(h.mean(dim=self._pooled) if self._pooled else h).sigmoid()
            return opening.reshape(len(h), *([1] * (h.ndim - 1))) * branch
        return branch

    def grown(self, h: Tensor) -> Tensor:
        # Autocast computes norms in float32, which must not change the precision of the host.
        return h + (self.alpha * self.delta(h)).to(h.dtype)

    def forward(self, h: Tensor) -> Tensor:
        # A host that runs all of its children in turn, as nn.Sequential does, runs a baked seed too; the hook comes after that.
        return h if self.is_baked else self.grown(h)

    def after(self, module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        """The forward hook of the submodule that a baked seed belongs to."""
        return self.grown(output)


def _pooled_dimensions(place: Place) -> tuple[int, ...]:
    if place.kind == "conv":
        return tuple(range(2, 2 + place.spatial))
    return () if place.kind == "dense" else (1,)


def _make_gate(place: Place, random_seed: int) -> nn.Module:
    if place.is_causal:
        raise GrowthError(f"the gate looks at the mean of the whole sequence, and {place.name!r} is causal; blend by 'add' or 'multiply'")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(random_seed + 1)
        gate = nn.Sequential(nn.Linear(place.width, GATE_WIDTH), nn.ReLU(), nn.Linear(GATE_WIDTH, 1))
    return gate.to(device=place.device, dtype=place.dtype)
