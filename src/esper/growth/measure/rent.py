"""Rent: the price of parameters and FLOPs in units of the loss, and the rest of the budget.

`rent_of` is in nats for ten classes. Multiplied by `LossRange.unit`, it can be compared with the gain of a seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from esper.growth.config import BudgetConfig, RentConfig
from esper.growth.lifecycle.stages import Cost


def total(costs: Iterable[Cost]) -> Cost:
    """Return the sum of several costs."""
    costs = list(costs)
    return Cost(sum(cost.parameters for cost in costs), sum(cost.flops for cost in costs))


def rent_of(added: Cost, host: Cost, rent: RentConfig) -> float:
    """Return the rent of everything that was added to a host."""
    return rent.parameters * math.log1p(added.parameters / max(host.parameters, 1)) + rent.flops * added.flops / max(host.flops, 1)


def marginal_rent(seed: Cost, others: Cost, host: Cost, rent: RentConfig) -> float:
    """Return the rise of the total rent when one seed is added to the others."""
    both = Cost(seed.parameters + others.parameters, seed.flops + others.flops)
    return rent_of(both, host, rent) - rent_of(others, host, rent)


@dataclass(frozen=True, slots=True)
class Allowance:
    """The rest of a budget: seeds, parameters and FLOPs that may still be added."""

    seeds: int
    parameters: int | None  # None: no limit
    flops: int | None

    def refusal(self, cost: Cost) -> str | None:
        """Return why a seed of this cost may not be added; None if it may."""
        if self.seeds < 1:
            return "there are as many seeds as the budget allows"
        if self.parameters is not None and cost.parameters > self.parameters:
            return f"it needs {cost.parameters:,} parameters and the budget has {self.parameters:,} left"
        if self.flops is not None and cost.flops > self.flops:
            return f"it needs {cost.flops:,} FLOPs per sample and the budget has {self.flops:,} left"
        return None

    def after(self, cost: Cost) -> Allowance:
        """Return the rest of the budget after a seed of this cost has been added."""
        return Allowance(
            seeds=self.seeds - 1,
            parameters=None if self.parameters is None else self.parameters - cost.parameters,
            flops=None if self.flops is None else self.flops - cost.flops,
        )


def allowance(budget: BudgetConfig, *, host: Cost, added: Cost, seeds: int, slots: int) -> Allowance:
    """Return the rest of a budget for a host that already holds `seeds` seeds of cost `added` in `slots` slots."""
    return Allowance(
        seeds=(budget.max_seeds or slots) - seeds,
        parameters=None if budget.max_parameters is None else int(budget.max_parameters * host.parameters) - added.parameters,
        flops=None if budget.max_flops is None else int(budget.max_flops * host.flops) - added.flops,
    )
