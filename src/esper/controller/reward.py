"""Reward of a controller: the change of a host's potential by one decision.

A `HostStanding` holds the figures of the hosts after a decision. The potential of a host is a sum of terms, one function each, and a
decision is rewarded by the change of the potential:

    dense     gamma · potential(after) - potential(before)
    sparse    0, and gamma · potential(after) at the last decision

A host starts with potential 0, because it is equal to its twin and has no seeds. The discounted return of both forms is therefore
gamma^T · potential(end), whatever happens in between: a gain that is lost again pays nothing, so the reward cannot be exploited by
temporary gains. This needs the learner's gamma in the formula. With gamma < 1 and plain differences, (1 - gamma) of the potential would be
paid again at every decision, and a seed would earn by looking good for a while. The default gamma is 1: horizons are finite and observed,
only the end counts, and a long episode counts as much as a short one.

At the end only fossilized seeds count: the environment prunes all living seeds, measures the host again, and takes its last standing. The
FLOPs of a pruned seed count as spent.

The family `loss` compares the validation loss with that of the twin. The family `contribution` takes the sum of the measured contributions
of all seeds. Because a host learns to rely on its seeds, contributions can be large although growing gained nothing, so `loss` is the
better measure.

Shapes: N = hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.controller.config import ControllerRewardConfig
from esper.growth.lifecycle.stages import OCCUPIED, GrowthState
from esper.growth.measure.contribution import rent_of


@dataclass(frozen=True, slots=True, eq=False)
class HostStanding:
    """Figures of N hosts after a decision; all float64 [N]. Losses are divided by the unit of the loss scale (nats for ten classes)."""

    gain: Tensor  # validation loss of the twin minus that of the host
    contributions: Tensor  # sum over the seeds in all slots
    rent: Tensor  # of all seeds, connected or not, from germination on
    spent: Tensor  # FLOPs spent on pruned seeds, as a share of those of the host's whole training; never falls
    rollbacks: Tensor  # so far

    def __post_init__(self) -> None:
        assert all(value.shape == self.gain.shape and value.dtype == torch.float64 for value in self.values())

    def values(self) -> tuple[Tensor, ...]:
        return (self.gain, self.contributions, self.rent, self.spent, self.rollbacks)

    @classmethod
    def start(cls, hosts: int) -> HostStanding:
        """Return the standing before the first decision: all zero."""
        return cls(*(torch.zeros(hosts, dtype=torch.float64) for _ in range(5)))


def standing_after(states: Sequence[GrowthState], *, twin_losses: Sequence[float], spent: Sequence[float]) -> HostStanding:
    """Compute the standing of the hosts.

    `states` are the states that their controllers see, `twin_losses` the validation losses of their twins, and `spent` the shares of FLOPs
    that went into pruned seeds.
    """
    units = [1.0 if state.scale is None else state.scale.unit for state in states]
    rows = [
        (
            (twin_loss - state.val_losses[-1]) / unit,
            sum(slot.contribution.gain.estimate for slot in state.slots if slot.stage in OCCUPIED and slot.contribution is not None) / unit,
            rent_of(state.added, state.host_cost, state.rent),
            share,
            float(state.rollbacks),
        )
        for state, twin_loss, share, unit in zip(states, twin_losses, spent, units, strict=True)
    ]
    return HostStanding(*torch.tensor(rows, dtype=torch.float64).reshape(-1, 5).unbind(dim=1))


# Terms of the potential, each [N], in nats, weighted


def gain_term(standing: HostStanding, config: ControllerRewardConfig) -> Tensor:
    """Return the gain from growing, measured as the family of the reward says."""
    nats = standing.gain if config.family == "loss" else standing.contributions
    return config.gain * nats


def rent_term(standing: HostStanding, config: ControllerRewardConfig) -> Tensor:
    """Return the cost of all seeds in the host."""
    return -config.rent * standing.rent


def spent_term(standing: HostStanding, config: ControllerRewardConfig) -> Tensor:
    """Return the cost of the FLOPs that went into pruned seeds."""
    return -config.spent * standing.spent


def rollback_term(standing: HostStanding, config: ControllerRewardConfig) -> Tensor:
    """Return the cost of rollbacks, in addition to the lost training."""
    return -config.rollback * standing.rollbacks


TERMS = {"gain": gain_term, "rent": rent_term, "spent": spent_term, "rollback": rollback_term}


def potential(standing: HostStanding, config: ControllerRewardConfig) -> Tensor:
    """Return the potential of each host [N], in nats, clipped to ±`config.most`.

    At a high rent, a bad seed can cost a hundred times the gain of a good one elsewhere. Without the limit, such losses would dominate the
    training of a policy on hosts of all rents.
    """
    whole = sum((term(standing, config) for term in TERMS.values()), start=torch.zeros_like(standing.gain))
    return whole.clamp(-config.most, config.most)


def rewards(before: HostStanding, after: HostStanding, is_last: Tensor, config: ControllerRewardConfig, *, gamma: float = 1.0) -> Tensor:
    """Return the reward of each host's decision [N], in nats. `is_last` [N] marks the ends of episodes; `gamma` is the learner's."""
    worth = gamma * potential(after, config)
    if config.is_sparse:
        return torch.where(is_last, worth, torch.zeros_like(worth))
    return worth - potential(before, config)
