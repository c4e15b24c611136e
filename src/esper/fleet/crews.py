"""Seeds while their hosts train. Those of one blueprint in one slot are a crew; all that learn by one backward pass are a cohort.

A crew computes as one. A cohort learns as one: its weights are rows of one tensor, and a step costs the same however many crews there are.

Shapes: A = hosts that train, R = seeds of a crew, Q = seeds of a cohort, P = weights of the widest of them, T = steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from esper.fleet.members import Member
from esper.fleet.optimizers import clip_rows_
from esper.fleet.seeds import SeedBank, Species
from esper.fleet.upload import upload
from esper.growth.config import SeedOptimizer


@dataclass(frozen=True)
class Crew:
    """Seeds of one blueprint in one slot, of some of the hosts at hand."""

    slot: str
    bank: SeedBank
    blueprint: str
    hosts: Sequence[int]  # places among the hosts at hand
    index: Tensor  # the same, on the device [R]
    rows: Tensor  # of the bank [R]
    alphas: Tensor  # [T, R], that hold in each step

    @classmethod
    def of(cls, slot: str, bank: SeedBank, blueprint: str, rows: Sequence[int], hosts: Sequence[int], alphas: Tensor) -> Crew:
        device = bank.place.device
        return cls(slot, bank, blueprint, hosts, upload(hosts, device), upload(rows, device), alphas)

    @property
    def species(self) -> Species:
        return self.bank.species[self.blueprint]

    def read(self, name: str) -> Tensor:
        """A copy of what the bank holds of its seeds, [R, ...]."""
        rows = self.bank.tensors[name].index_select(0, self.rows)
        return rows if rows.ndim == 1 else rows[:, : self.species.layout.width]

    def write(self, name: str, rows: Tensor) -> None:
        """Puts back rows that are as wide as those of `read`, or wider."""
        whole, width = self.bank.tensors[name], self.species.layout.width
        (whole if whole.ndim == 1 else whole[:, :width]).index_copy_(0, self.rows, rows if rows.ndim == 1 else rows[:, :width])

    def member(self, weights: Mapping[str, Tensor], alpha: Tensor, *, hosts: int) -> Member:
        """Its part in an ensemble of so many hosts."""
        index = None if list(self.hosts) == list(range(hosts)) else self.index
        return Member(self.slot, self.species, weights, alpha, index, self.hosts)


class Cohort:
    """`put_back` when they are done. There may be none."""

    def __init__(self, crews: Sequence[Crew]) -> None:
        self.crews = crews
        if not crews:
            return
        self._counts = [len(crew.hosts) for crew in crews]
        self.hosts = torch.cat([crew.index for crew in crews])  # [Q]
        self._alphas = torch.cat([crew.alphas for crew in crews], dim=1)  # [T, Q]
        self.norms = torch.zeros_like(self._alphas)  # of the gradients of each step
        self.skipped = torch.zeros(len(self.hosts), dtype=torch.int64, device=self.hosts.device)  # [Q], steps that the host alone prevented
        self.flat = self._read("weights").requires_grad_()  # [Q, P]
        self._warmup = self._read("warmup")
        self._optimizer = crews[0].bank.make(self.flat)
        for name, tensor in self._optimizer.state.items():
            tensor.copy_(self._read(name))

    def __len__(self) -> int:
        """Crews."""
        return len(self.crews)

    def weights(self) -> list[dict[str, Tensor]]:
        """Of every crew, by name."""
        parts = self.flat.split_with_sizes(self._counts)
        layouts = [crew.species.layout for crew in self.crews]
        return [layout.unflatten(part[:, : layout.width]) for layout, part in zip(layouts, parts, strict=True)]

    def alphas(self, now: Tensor) -> Sequence[Tensor]:
        """Of every crew [R], in the step whose number [1] is on the device."""
        return self._alphas.index_select(0, now)[0].split_with_sizes(self._counts)

    def members(self, now: Tensor, *, hosts: int) -> list[Member]:
        """All crews as parts of an ensemble of so many hosts."""
        if not self.crews:
            return []
        parts = zip(self.crews, self.weights(), self.alphas(now), strict=True)
        return [crew.member(weights, alpha, hosts=hosts) for crew, weights, alpha in parts]

    def learn(self, gradient: Tensor, now: Tensor, rates: Tensor, config: SeedOptimizer, *, active: Tensor | None = None) -> None:
        """One step by the gradient [Q, P]. `rates` [A] are those of all hosts that train, `active` [A] those whose seeds may step.

        What is not finite is not stepped on.
        """
        norms = clip_rows_(gradient, math.inf if config.max_grad_norm is None else config.max_grad_norm)
        self.norms.index_copy_(0, now, norms.unsqueeze(0))
        warm = (self._optimizer.state["steps"] + 1).to(rates.dtype) / (self._warmup + 1)
        self._optimizer.lr.copy_(rates.index_select(0, self.hosts) * config.learning_rate_factor * warm.clamp(max=1.0))
        may_step = norms.isfinite()
        if active is not None:
            host_steps = active.index_select(0, self.hosts)
            self.skipped.add_(may_step & ~host_steps)
            may_step = may_step & host_steps
        self._optimizer.step(gradient, active=may_step)

    @torch.no_grad()
    def put_back(self) -> None:
        for name, rows in {"weights": self.flat, **self._optimizer.state}.items() if self.crews else ():
            for crew, own in zip(self.crews, rows.split_with_sizes(self._counts), strict=True):
                crew.write(name, own)

    def by_seed(self, norms: Tensor, skipped: Tensor) -> list[tuple[str, int, list[float], int]]:
        """Return slot, host, norms and skipped steps of each seed, given `self.norms` and `self.skipped` as read from the device."""
        seeds = [(crew.slot, host) for crew in self.crews for host in crew.hosts]
        return [(*seed, own, int(count)) for seed, own, count in zip(seeds, norms.T.tolist(), skipped.tolist(), strict=True)]

    def _read(self, name: str) -> Tensor:
        """Of all crews, as wide as the widest."""
        rows = [crew.read(name) for crew in self.crews]
        width = max(own.shape[-1] for own in rows)
        return torch.cat(rows if rows[0].ndim == 1 else [F.pad(own, (0, width - own.shape[1])) for own in rows])
