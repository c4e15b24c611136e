"""Validation losses of all hosts, and what each seed on trial contributes: one pass with everything on, and one for each slot without it.

Shapes: A = hosts that are looked at, R = those with a seed on trial in one slot, V = batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.fleet.ensemble import Ensemble
from esper.fleet.members import Member
from esper.fleet.upload import upload


@dataclass(frozen=True)
class Samples:
    """What is measured on, in batches of a fixed order."""

    inputs: Tensor  # [M, ...]
    targets: Tensor
    batch_size: int
    at_once: int  # samples of a pass, whole batches

    @property
    def sizes(self) -> list[int]:
        """Samples of every batch."""
        return [len(part) for part in torch.split(self.targets, self.batch_size)]

    def passes(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(torch.split(self.inputs, self.at_once), torch.split(self.targets, self.at_once), strict=True))

    def __len__(self) -> int:
        return len(self.targets)


@torch.inference_mode()
def losses_of(ensemble: Ensemble, samples: Samples) -> Tensor:
    """Mean loss of every host on every batch [V, hosts]; all hosts see the same samples."""
    found: list[Tensor] = []
    hosts = len(next(iter(ensemble.tensors.values())))
    for inputs, targets in samples.passes():
        shared = (tensor.unsqueeze(1).expand(-1, hosts, *tensor.shape[1:]) for tensor in (inputs, targets))
        each = ensemble.losses_of_samples(*shared, training=False)
        found += [batch.mean(0) for batch in torch.split(each, samples.batch_size)]
    return torch.stack(found)


def losses_without(ensemble: Ensemble, samples: Samples, trials: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """For every slot with seeds on trial, slot -> positions of their hosts: the losses of those hosts without that seed [V, R]."""
    found = {}
    for slot, hosts in trials.items():
        some = part_of(ensemble, hosts, without=slot)
        found[slot] = losses_of(some, samples)
    return found


def mean_losses(ensemble: Ensemble, samples: Samples) -> Tensor:
    """Mean loss of every host on all samples [hosts], on the CPU."""
    return _over_samples(losses_of(ensemble, samples), samples)


def contributions(ensemble: Ensemble, samples: Samples, seeds: Mapping[str, Sequence[int]]) -> Tensor:
    """What these seeds, slot -> positions of their hosts, give to each host [hosts], every one against the host without it, on the CPU."""
    whole = mean_losses(ensemble, samples)
    total = torch.zeros_like(whole)
    for slot, losses in losses_without(ensemble, samples, seeds).items():
        total[seeds[slot]] += _over_samples(losses, samples) - whole[seeds[slot]]
    return total


def _over_samples(losses: Tensor, samples: Samples) -> Tensor:
    """The mean over all samples of what was measured batch by batch [V, hosts]."""
    weights = torch.tensor(samples.sizes, dtype=torch.float64)
    return (losses.double().cpu() * weights.unsqueeze(1)).sum(0) / weights.sum()


def part_of(ensemble: Ensemble, hosts: Sequence[int], *, without: str | None = None) -> Ensemble:
    """Some of the hosts, by position; those seeds of theirs that are in the slot `without` are left out."""
    device = next(iter(ensemble.tensors.values())).device
    index = upload(hosts, device)
    tensors = {name: tensor.index_select(0, index) for name, tensor in ensemble.tensors.items()}
    places = {host: place for place, host in enumerate(hosts)}
    members = [part for member in ensemble.members if member.slot != without and (part := _member(member, places)) is not None]
    return Ensemble(ensemble.host, tensors, members, ensemble.precision)


def _member(member: Member, places: Mapping[int, int]) -> Member | None:
    owners = range(len(member.alpha)) if member.index is None else member.owners
    staying = [(number, places[owner]) for number, owner in enumerate(owners) if owner in places]
    if not staying:
        return None
    chosen = upload([number for number, _ in staying], member.alpha.device)
    weights = {name: tensor.index_select(0, chosen) for name, tensor in member.weights.items()}
    remaining = [place for _, place in staying]
    index = upload(remaining, member.alpha.device)
    return Member(member.slot, member.species, weights, member.alpha.index_select(0, chosen), index, remaining)


@torch.inference_mode()
def are_finite(ensemble: Ensemble, trained: Iterable[str], hosts: int) -> Tensor:
    """Which hosts have weights that are all finite [hosts], their seeds included; `trained` are the names of those that learn."""
    found = torch.stack([ensemble.tensors[name].flatten(1).isfinite().all(1) for name in trained]).all(0)
    for member in ensemble.members:
        own = torch.stack([weight.flatten(1).isfinite().all(1) for weight in member.weights.values()]).all(0)
        index = torch.arange(hosts, device=own.device) if member.index is None else member.index
        found = found.index_copy(0, index, found.index_select(0, index) & own)
    return found
