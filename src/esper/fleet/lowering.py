"""A module, lowered: a function that computes for N hosts, each with its own weights, what the module computes for one.

    stacked = lower(host, slots=["blocks.0", "blocks.1"])
    rows = ModuleRows.of(hosts)
    logits = stacked(rows.tensors(), images, training=True, at=seeds)       # [B, N, classes] of images [B, N, C, H, W]

What has a lowering is computed by one kernel for all hosts, the rest through vmap. The sum of the hosts' losses has for every host the
gradient that it has alone.

Shapes: B = samples of each host, N = hosts. Activations are [B, N, ...], weights and buffers [N, ...].
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from esper.fleet import composites, convolutions, layers
from esper.fleet.recompute import Recompute, blocks_of
from esper.fleet.rows import aliases
from esper.fleet.scope import Convolution, Scope, lowering_of
from esper.fleet.vmapped import At, run_vmapped

__all__ = ["At", "Stacked", "lower"]

_REGISTERED = (composites, convolutions, layers)  # importing them fills the table of lowerings


def lower(module: nn.Module, *, slots: Iterable[str] = (), convolution: Convolution | None = None) -> Stacked:
    """`slots` are names of submodules whose outputs the caller may replace.

    `convolution` is how convolutions are computed; None leaves it to `esper.fleet.convolutions.choose_convolution`.
    """
    return Stacked(module, slots=slots, convolution=convolution)


class Stacked:
    """Call it with the tensors of N hosts and their inputs. It has no state; running statistics are updated in the given tensors."""

    def __init__(self, module: nn.Module, *, slots: Iterable[str] = (), convolution: Convolution | None = None) -> None:
        self.slots = frozenset(slots)
        self._module = copy.deepcopy(module).train()  # its mode is switched, and in vmap it has hooks for a moment
        self.submodules = dict(self._module.named_modules(remove_duplicate=False))
        self._aliases = aliases(self._module)
        self.convolution = convolution
        unknown = sorted(self.slots - set(self.submodules))
        if unknown:
            raise ValueError(f"no submodule named {unknown[0]!r} to have a slot; this module has {sorted(filter(None, self.submodules))}")
        _check_embeddings(self.submodules)

    @cached_property
    def blocks(self) -> frozenset[str]:
        """Names of the submodules that can be computed a second time."""
        return blocks_of(self._module, self.slots)

    def __call__(
        self, tensors: Mapping[str, Tensor], x: Tensor, *, training: bool, at: At | None = None, recompute: Recompute | None = None
    ) -> Tensor:
        """[B, N, ...] to [B, N, ...]. `at(name, output)` is called behind every slot, and what it returns replaces the output.

        `training` holds for all submodules, whatever mode they were in when the module was lowered. Where a backward pass is to follow,
        `recompute` runs the blocks.
        """
        _check_hosts(tensors, x)
        if self._module.training != training:
            self._module.train(training)
        known = {**tensors, **{name: tensors[first] for name, first in self._aliases.items()}}
        again = recompute if training and torch.is_grad_enabled() else None
        return _Pass(self, known, training, at, again).run("", x)


@dataclass(frozen=True, slots=True)
class _Pass:
    """One way through a module. No closure, which would be a cycle that keeps the weights until garbage is collected."""

    stacked: Stacked
    tensors: Mapping[str, Tensor]
    training: bool
    at: At | None
    recompute: Recompute | None

    def run(self, name: str, x: Tensor) -> Tensor:
        """What the submodule of this name makes of x, with what acts behind it."""
        if self.recompute is not None and name in self.stacked.blocks:
            outputs = self.recompute(partial(self._compute, name), partial(self._with_copied_buffers(name)._compute, name), x)
        else:
            outputs = self._compute(name, x)
        return self.at(name, outputs) if self.at is not None and name in self.stacked.slots else outputs

    def _with_copied_buffers(self, name: str) -> _Pass:
        """The same pass, in which this submodule finds its buffers as they are now, and changes none of the host's."""
        full = [f"{name}.{buffer}" for buffer, _ in self.stacked.submodules[name].named_buffers(remove_duplicate=False)]
        return replace(self, tensors={**self.tensors, **{buffer: self.tensors[buffer].clone() for buffer in full}})

    def _compute(self, name: str, x: Tensor) -> Tensor:
        module, slots = self.stacked.submodules[name], self.stacked.slots
        scope = Scope(name, self.tensors, self.training, self.stacked.convolution, self.run, slots)
        lowering = lowering_of(module, training=self.training)
        if lowering is None:
            inside = [slot for slot in slots if slot != name]
            return run_vmapped(module, scope, x, at=self.at, slots=inside)
        return lowering(module, scope, x)


def _check_hosts(tensors: Mapping[str, Tensor], x: Tensor) -> None:
    hosts = {len(tensor) for tensor in tensors.values()}
    if hosts and hosts != {x.shape[1]}:
        raise ValueError(f"the input is [samples, hosts, ...]; got {list(x.shape)} with tensors of {sorted(hosts)} hosts")


def _check_embeddings(submodules: Mapping[str, nn.Module]) -> None:
    for name, layer in submodules.items():
        if isinstance(layer, nn.Embedding):
            settings = {"max_norm": layer.max_norm is not None, "scale_grad_by_freq": layer.scale_grad_by_freq, "sparse": layer.sparse}
            asked = [setting for setting, is_asked in settings.items() if is_asked]
            if asked:
                raise ValueError(f"embedding {name!r} asks for {', '.join(asked)}, which hosts of a fleet cannot have; build it without")
