"""Seeds at work in an ensemble of hosts: taken out are the hosts that have them, and what they add is put back.

Shapes: B = samples, N = hosts of the ensemble, R = those of them with a seed of one blueprint in one slot; h is [B, N, ...].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from esper.fleet.convolutions import has_triton
from esper.fleet.seeds import Species


@dataclass(frozen=True)
class Member:
    """Seeds of one blueprint in one slot, of some of the hosts."""

    slot: str
    species: Species
    weights: Mapping[str, Tensor]  # [R, ...]
    alpha: Tensor  # [R]
    index: Tensor | None  # which of the ensemble's hosts they belong to [R]; None: all of them, in order
    owners: Sequence[int] = ()  # the index as numbers, where somebody will ask without waiting for the device

    def delta(self, own: Tensor) -> Tensor:
        """What they have to add to what flows in their hosts, [B, R, ...], before alpha."""
        # Autocast computes norms in float32, which must not change the precision of the host.
        return self.species.delta(self.weights, own).to(own.dtype)


def act(members: Sequence[Member], h: Tensor) -> Tensor:
    """h with what these seeds add to it, all of one slot and no two of one host. Hosts are gathered once for all of them."""
    if len(members) == 1 and members[0].index is None:
        return h + _times(members[0].alpha, members[0].delta(h), hosts=1)
    indices = [member.index for member in members if member.index is not None]
    assert len(indices) == len(members)  # who has all hosts is alone
    index, alpha = torch.cat(indices), torch.cat([member.alpha for member in members])
    parts = of_hosts(h, index).split_with_sizes([len(member.alpha) for member in members], dim=1)
    return _blended(h, index, alpha, [member.delta(own) for member, own in zip(members, parts, strict=True)])


def of_hosts(h: Tensor, index: Tensor) -> Tensor:
    """What flows in some hosts, [B, N, ...] to [B, R, ...], in the order in which h lies in memory.

    A kernel that left samples or channels innermost did so because what comes after it is faster that way.
    """
    order, back = _order_in_memory(h)
    lying = h.permute(order)
    own: Tensor = _rows().gather(lying, index) if _has_rows(h, order) else lying.index_select(order.index(1), index)
    return own.permute(back)


def _blended(h: Tensor, index: Tensor, alpha: Tensor, deltas: Sequence[Tensor]) -> Tensor:
    """h with alpha [R] times the deltas added in the hosts of the index [R]; together the deltas are [B, R, ...]."""
    order, back = _order_in_memory(h)
    lying, hosts = h.permute(order), order.index(1)
    delta = torch.cat([part.permute(order) for part in deltas], dim=hosts)
    blended: Tensor = (
        _rows().blend(lying, index, alpha, delta)
        if _has_rows(h, order)
        else lying.index_add(hosts, index, _times(alpha, delta, hosts=hosts))
    )
    return blended.permute(back)


def _times(alpha: Tensor, delta: Tensor, *, hosts: int) -> Tensor:
    """Alpha [R] times delta, whose dimension `hosts` is that of the hosts, in delta's precision."""
    return (alpha.view(*[1] * hosts, -1, *[1] * (delta.ndim - hosts - 1)) * delta).to(delta.dtype)


def _has_rows(h: Tensor, order: Sequence[int]) -> bool:
    """Whether our own kernels move the hosts: on a GPU, where a host's part of a sample lies in one piece."""
    return h.is_cuda and has_triton() and order[:2] == [0, 1]


def _rows() -> Any:
    from esper.fleet import host_rows

    return host_rows


def _order_in_memory(h: Tensor) -> tuple[list[int], list[int]]:
    """Its dimensions from the outermost to the innermost, and the way back."""
    order = sorted(range(h.ndim), key=h.stride, reverse=True)
    return order, sorted(range(h.ndim), key=order.__getitem__)
