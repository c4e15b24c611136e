"""Some hosts of a fleet with the seeds in them, as one network.

The same code serves training (weights with gradients), the second pass of seeds in the shadow, validation, and validation without a seed.

Shapes: B = samples, N = the hosts of this ensemble, R = those of them with a seed of one crew; what flows is [B, N, ...].
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from esper.fleet.lowering import Stacked
from esper.fleet.members import Member, act
from esper.fleet.recompute import Recompute

Watch = Callable[[str, Tensor], Tensor]  # slot, what flows there before any seed -> what flows on


@dataclass(frozen=True)
class Ensemble:
    host: Stacked
    tensors: Mapping[str, Tensor]  # of the hosts: parameters and buffers by name, [N, ...]
    members: Sequence[Member]
    precision: torch.dtype | None = None  # of activations, where they are not the weights'
    recompute: Recompute | None = None  # how blocks are computed in training whose activations are not kept

    def losses(self, inputs: Tensor, targets: Tensor, *, training: bool, watch: Watch | None = None) -> Tensor:
        """Mean loss of every host [N] on its samples: inputs [B, N, ...], targets [B, N, ...]."""
        return self.losses_of_samples(inputs, targets, training=training, watch=watch).mean(0)

    def losses_of_samples(self, inputs: Tensor, targets: Tensor, *, training: bool, watch: Watch | None = None) -> Tensor:
        """[B, N]."""
        device = inputs.device.type
        with torch.autocast(device, dtype=self.precision, enabled=self.precision is not None):
            logits = self.host(self.tensors, inputs, training=training, at=self._at(watch), recompute=self.recompute)
        if self.precision is not None:
            logits = logits.float()
        each = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), reduction="none")
        return each.view(len(inputs), inputs.shape[1], -1).mean(dim=2)

    def _at(self, watch: Watch | None) -> Watch:
        by_slot: dict[str, list[Member]] = defaultdict(list)
        for member in self.members:
            by_slot[member.slot].append(member)

        def at(slot: str, h: Tensor) -> Tensor:
            if watch is not None:
                h = watch(slot, h)
            return act(by_slot[slot], h) if slot in by_slot else h

        return at
