"""What a controller is paid: the worth of a host now, less what it was worth before.

A `HostStanding` says how a host stands after a decision. Its potential is a sum of terms, one function each. A decision is paid by the
change of the potential:

    dense     gamma · potential(after) - potential(before)
    sparse    0, and gamma · potential(after) at the last decision

A host starts with potential 0: it is its own never-grow twin, and nothing is in it. So the discounted return of both forms is
gamma^T · potential(end), whatever the path: what was gained on the way and lost again pays nothing, and there is nothing to farm. That
needs the learner's gamma in the formula. With gamma < 1 and plain differences, (1 - gamma) of the potential would be paid again at every
decision, and a seed that looks good for a while would earn by being there. Our choice is gamma 1: horizons are finite and observed, only
the end counts, and a long life counts as much as a short one.

At the end only fossilized seeds count: the environment prunes what is still living, measures the host again, and then takes the last
standing. So the FLOPs of a seed that nobody decided on are spent for nothing.

The family `loss` takes the validation loss against the twin's, `contribution` the sum of what all seeds were measured at. A host leans on
what grew in it, so contributions can be large where growing gained nothing: `loss` is the honest one.

Shapes: N = hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.controller.config import RewardConfig
from esper.growth.lifecycle.stages import OCCUPIED, GrowthState
from esper.growth.measure.rent import rent_of


@dataclass(frozen=True, slots=True, eq=False)
class HostStanding:
    """How N hosts stand after a decision; all float64 [N]. Losses are in nats for ten classes: divided by the unit of the loss scale."""

    gain: Tensor  # validation loss of the never-grow twin, with the same initialisation and data order, minus the host's
    contributions: Tensor  # of the seeds in all slots together
    rent: Tensor  # of everything that is in the host, connected or not, from germination on
    spent: Tensor  # FLOPs that went into seeds that were pruned, over those of the host's whole training; never falls
    rollbacks: Tensor  # so far

    def __post_init__(self) -> None:
        assert all(value.shape == self.gain.shape and value.dtype == torch.float64 for value in self.values())

    def values(self) -> tuple[Tensor, ...]:
        return (self.gain, self.contributions, self.rent, self.spent, self.rollbacks)

    @classmethod
    def start(cls, hosts: int, *, device: str | torch.device = "cpu") -> HostStanding:
        """Before anything was decided: every host is its own twin."""
        return cls(*(torch.zeros(hosts, dtype=torch.float64, device=device) for _ in range(5)))


def standing_of(states: Sequence[GrowthState], *, twin_losses: Sequence[float], spent: Sequence[float]) -> HostStanding:
    """The standing of each host, from what its controller sees, its twin's validation loss and the share it spent on pruned seeds."""
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


# The terms: each [N], in nats, times its weight


def gain_term(standing: HostStanding, config: RewardConfig) -> Tensor:
    """What growing gained, by the family's measure."""
    nats = standing.gain if config.family == "loss" else standing.contributions
    return config.gain * nats


def rent_term(standing: HostStanding, config: RewardConfig) -> Tensor:
    """What everything in the host costs."""
    return -config.rent * standing.rent


def spent_term(standing: HostStanding, config: RewardConfig) -> Tensor:
    """What was spent for nothing."""
    return -config.spent * standing.spent


def rollback_term(standing: HostStanding, config: RewardConfig) -> Tensor:
    """What disasters cost, beside the training that was lost."""
    return -config.rollback * standing.rollbacks


TERMS = {"gain": gain_term, "rent": rent_term, "spent": spent_term, "rollback": rollback_term}


def potential(standing: HostStanding, config: RewardConfig) -> Tensor:
    """What each host is worth [N], in nats, within ±`config.most`.

    Where the rent is high, a careless seed can owe a hundred times what a good one earns elsewhere, and a learner that sees hosts of all
    rents would see nothing else. So a ruin is a ruin, whatever its size, and what lies above it keeps its scale.
    """
    whole = sum((term(standing, config) for term in TERMS.values()), start=torch.zeros_like(standing.gain))
    return whole.clamp(-config.most, config.most)


def rewards(before: HostStanding, after: HostStanding, is_last: Tensor, config: RewardConfig, *, gamma: float = 1.0) -> Tensor:
    """What each host's decision is paid [N], in nats. `is_last` [N] says where a life ended with it; `gamma` is the learner's."""
    worth = gamma * potential(after, config)
    if config.is_sparse:
        return torch.where(is_last, worth, torch.zeros_like(worth))
    return worth - potential(before, config)
