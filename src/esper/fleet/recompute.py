"""Activations that are computed again in the backward pass instead of kept: those inside the blocks of a host.

A block is computed twice from the same input and, the second time, with copies of its buffers, so that running statistics move once. Only
modules that have lowerings all the way down are blocks: those draw no random numbers, and in a recorded step nothing could put the random
streams of a GPU back. A lowering of your own must not draw any either.

Shapes: B = samples, N = hosts. Activations are [B, N, ...].
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from esper.fleet.errors import FleetError
from esper.fleet.scope import lowering_of

Compute = Callable[[Tensor], Tensor]
Recompute = Callable[[Compute, Compute, Tensor], Tensor]  # what to compute, how to compute it again, of what input


def recomputed(first: Compute, again: Compute, x: Tensor) -> Tensor:
    """What `first` makes of x. Of all that a backward pass needs only x is kept, and `again` makes the rest from it."""
    passes, version = iter((first, again)), x._version
    outputs: Tensor = checkpoint(lambda x: next(passes)(x), x, use_reentrant=False, preserve_rng_state=False)
    if x._version != version:
        raise FleetError(
            "a block of the host works in place on its input, so it cannot be computed again from it; "
            "build its first layer with inplace=False, or leave `checkpoint` off"
        )
    return outputs


def blocks_of(module: nn.Module, slots: Collection[str]) -> frozenset[str]:
    """Names of the largest submodules that can be computed a second time, without slots inside, where seeds act once.

    The host itself is not one, nor is a sequence of blocks: while one of them is computed again, the others are not there.
    """
    return frozenset(_blocks_inside("", module, slots))


def _blocks_inside(name: str, module: nn.Module, slots: Collection[str]) -> Iterator[str]:
    for child_name, child in module.named_children():
        full = f"{name}.{child_name}" if name else child_name
        if not any(True for _ in child.children()):
            continue  # what a single layer keeps is little more than its input
        has_slots = any(slot.startswith(f"{full}.") for slot in slots)
        is_lowered = all(lowering_of(part, training=True) is not None for part in child.modules())
        if is_lowered and not has_slots and not _is_chain_of_blocks(child):
            yield full
        else:
            yield from _blocks_inside(full, child, slots)


def _is_chain_of_blocks(module: nn.Module) -> bool:
    return type(module) is nn.Sequential and any(True for child in module.children() for _ in child.children())
