"""Contribution of a seed, and the rent that it must exceed.

The contribution is the validation loss with the seed off minus the loss with it on, over the same batches.

Settings. With k seeds, k + 1 settings are evaluated: all on, and each one off. The layers before a slot compute the same values with its
seed on and off, so their outputs are recorded while all seeds are on, and replayed. One more evaluation, once per slot, checks that the
replay gives bit-identical losses.

Weights. Every sample has the same weight: if `evaluate` tells the sizes of the batches, a batch is weighted by its size. On several ranks,
the batches with the same number are merged into one, whose loss is the mean over the samples of all ranks. Ranks may therefore split the
validation data or all use the same data. (If the same batches were counted separately, the intervals would be too narrow.)

Confidence. A seed is measured after every epoch once its shortest probation (`holding_epochs`) is over, so each interval is wider than that
of a single look; see `confidence_of_look`.

Shapley values (`esper.shapley`) divide the joint gain of several seeds among them. A contribution is measured beside all other seeds, so
two seeds that do the same work each contribute nothing, although one of them is needed. The Shapley value of a seed is the mean of its gain
over all orders in which the seeds could be added. With k seeds, up to 8, this takes 2^k evaluations, and the checks.

`search_alpha` compares the validation losses of one seed at several alphas.

Rent is the price of parameters and FLOPs. `rent_of` is in nats for ten classes; multiplied by `LossRange.unit`, it can be compared with the
gain of a seed. `Allowance` is the rest of the budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple, SupportsFloat

import numpy as np
import torch
from torch import Tensor

from esper.growth.config import BudgetConfig, GrowthError, RentConfig
from esper.growth.host.prefix_cache import PrefixCache
from esper.growth.host.slotted import Slotted
from esper.growth.lifecycle.stages import Contribution, Cost
from esper.parallel import ALONE, Group
from esper.shapley import Solution, plan_orders, solve
from esper.statistics import LEAST_COUNT, Interval, effective_count, weighted_interval

MISJUDGED = 0.05  # chance that at least one of all intervals of a seed misses its true gain

Loss = float | Tensor

# Returns the loss of every validation batch, or pairs of (loss, number of samples); always in the same order.
Evaluate = Callable[[], Sequence[Loss] | Sequence[tuple[Loss, float]] | Tensor]


class Losses(NamedTuple):
    """Losses of the batches of one evaluation."""

    values: list[float]
    samples: list[float]  # number in each batch; all 1 if unknown

    @property
    def mean(self) -> float:
        """Mean over all samples.

        >>> Losses([1.0, 4.0], [2, 1]).mean
        2.0
        """
        return weighted_mean(self.values, self.samples)

    @property
    def are_finite(self) -> bool:
        return all(map(math.isfinite, self.values))

    @property
    def have_spread(self) -> bool:
        """Whether there are enough batches for an interval. One batch, or one that outweighs all others, is not enough."""
        return effective_count(self.samples) >= LEAST_COUNT


class Measured(NamedTuple):
    """Result of a measurement: the losses with all seeds on, and the contribution of each seed, by slot."""

    losses: Losses
    contributions: dict[str, Contribution]


class Measurement:
    """Measures contributions during a run, and remembers for which slots a replay gives the same losses."""

    def __init__(self, slotted: Slotted, *, group: Group = ALONE) -> None:
        self.slotted = slotted
        self._group = group  # all ranks evaluate equally often, because their forward passes may communicate
        self._replays: dict[str, PrefixCache] = {}  # by slot
        self._trusted: set[str] = set()  # slots for which a replay was compared and gave the same losses
        self._distrusted: set[str] = set()  # slots for which it gave other losses

    def measure(self, evaluate: Evaluate, names: Sequence[str] | Mapping[str, float], *, epoch: int) -> Measured:
        """Return the present losses and the contribution of the seed in each of these slots.

        A mapping gives the confidence of the interval of each slot; otherwise it is 95 %. If a loss with all seeds on is not finite, no
        contributions are measured.
        """
        confidences = names if isinstance(names, Mapping) else dict.fromkeys(names, 1 - MISJUDGED)
        with self._all_on(evaluate, list(confidences)) as with_all:
            if not with_all.are_finite:
                return Measured(with_all, {})
            without = {name: self._without(evaluate, [name], with_all) for name in confidences}
        gains = {name: gain_of(losses, with_all, confidence=confidences[name]) for name, losses in without.items()}
        return Measured(with_all, {name: Contribution(gain, epoch) for name, gain in gains.items()})

    def shapley(self, evaluate: Evaluate, names: Sequence[str]) -> Solution:
        """Return the Shapley values of the seeds in these slots and the interactions of all pairs. Evaluates every coalition once."""
        plan = plan_orders(names)
        with self._all_on(evaluate, names) as with_all:
            by_coalition = {}
            for on in plan.coalitions:
                off = [name for name in names if name not in on]
                losses = self._without(evaluate, off, with_all) if off else with_all
                by_coalition[on] = -np.array(losses.values)
        return solve(plan, by_coalition, with_all.samples)

    def losses(self, evaluate: Evaluate) -> Losses:
        """Return the losses, averaged over all ranks. An error on one rank is raised on all of them, so that none waits forever."""
        if self._group.world_size == 1:
            return losses_of(evaluate)
        own, error = None, None
        try:
            own = losses_of(evaluate)
        except Exception as caught:
            error = caught
        by_rank = self._group.gather_objects((own, "" if error is None else f"{type(error).__name__}: {error}"))
        if error is not None:
            raise error
        for rank, (_, reason) in enumerate(by_rank):
            if reason:
                raise GrowthError(f"evaluate() failed on rank {rank}: {reason}")
        return averaged([losses for losses, _ in by_rank if losses is not None])

    @contextmanager
    def _all_on(self, evaluate: Evaluate, names: Sequence[str]) -> Iterator[Losses]:
        """Evaluate with all seeds on and record the outputs before these slots. They can be replayed inside the context."""
        modules = dict.fromkeys(self.slotted.slot(name).begins_at for name in names)
        replays = [self._replay(module) for module in modules if module not in self._distrusted]
        try:
            with modes_kept(self.slotted):
                with ExitStack() as stack:
                    for replay in replays:
                        stack.enter_context(replay.recording())
                    losses = self.losses(evaluate)
                yield losses
        finally:
            for replay in replays:
                replay.clear()

    def _replay(self, module: str) -> PrefixCache:
        if module not in self._replays:
            self._replays[module] = PrefixCache(self.slotted.model, self.slotted.discovery.calls, module)
        return self._replays[module]

    def _without(self, evaluate: Evaluate, off: Collection[str], with_all: Losses) -> Losses:
        """Return the losses with these seeds off. Replay the layers before the first that one of them changes, where that is exact."""
        ends = {call.name: call.end for call in self.slotted.discovery.calls}
        first = min((self.slotted.slot(name).begins_at for name in off), key=ends.__getitem__)
        with ExitStack() as stack:
            if self._can_trust(evaluate, first, with_all):
                stack.enter_context(self._replays[first].replaying())
            stack.enter_context(self.slotted.without(list(off)))
            losses = self.losses(evaluate)
        _check_same_batches(with_all, losses)
        return losses

    def _can_trust(self, evaluate: Evaluate, name: str, with_all: Losses) -> bool:
        """Return whether the layers before a submodule may be replayed. The first time, compare a replay with all seeds on."""
        replay = self._replays.get(name)
        is_unusable = name in self._distrusted or replay is None or not replay.is_usable or not replay.nbytes
        if self._group.world_size > 1:
            is_unusable = self._group.any(is_unusable)  # all ranks must evaluate equally often
        if is_unusable:
            return False
        assert replay is not None
        if name not in self._trusted:
            with replay.replaying():
                is_different = self.losses(evaluate) != with_all
            (self._distrusted if is_different else self._trusted).add(name)
        return name in self._trusted

    def state_dict(self) -> dict[str, Any]:
        return {"trusted": sorted(self._trusted), "distrusted": sorted(self._distrusted)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._trusted, self._distrusted = set(state["trusted"]), set(state["distrusted"])


@contextmanager
def modes_kept(slotted: Slotted) -> Iterator[None]:
    """Restore the training mode of every module of host and seeds on exit."""
    seeds = [slot.seed for slot in slotted.slots.values() if slot.seed is not None]
    modes = [(module, module.training) for root in (slotted.model, *seeds) for module in root.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def losses_of(evaluate: Evaluate) -> Losses:
    """Call the user's function and validate its result.

    >>> losses_of(lambda: [(0.5, 160), (2.0, 1)])
    Losses(values=[0.5, 2.0], samples=[160.0, 1.0])
    """
    answer: Any = evaluate()
    rule = "return a list with the loss of every validation batch, or with pairs of (loss, number of samples)"
    if isinstance(answer, Tensor):
        losses = Losses(answer.detach().reshape(-1).tolist(), [1.0] * answer.numel())
    elif not isinstance(answer, Iterable):
        raise GrowthError(f"evaluate() gave {'None' if answer is None else f'a {type(answer).__name__}'}; {rule}")
    else:
        pairs = [item if isinstance(item, tuple | list) and len(item) == 2 else (item, 1.0) for item in answer]
        for loss, _ in pairs:
            if isinstance(loss, Tensor) and loss.numel() != 1:
                raise GrowthError(f"evaluate() gave a tensor of shape {list(loss.shape)} for a batch; {rule}")
            if not isinstance(loss, Tensor | SupportsFloat):
                raise GrowthError(f"evaluate() gave a {type(loss).__name__} for a batch; {rule}")
        parts = [torch.as_tensor(loss).detach().reshape(()).double() for loss, _ in pairs]
        losses = Losses(torch.stack(parts).tolist() if parts else [], [float(samples) for _, samples in pairs])  # one read of the device
    if not losses.values:
        raise GrowthError("evaluate() gave no losses: the validation loader yields nothing; give it at least one batch")
    strange = [samples for samples in losses.samples if not 0 < samples < math.inf]
    if strange:
        raise GrowthError(f"evaluate() gave a validation batch with {strange[0]:g} samples; give a number above 0 for every batch")
    return losses


def averaged(by_rank: Sequence[Losses]) -> Losses:
    """Average the losses over ranks, batch by batch. Ranks may have different numbers of batches.

    >>> averaged([Losses([1.0, 2.0], [3, 1]), Losses([5.0], [1])])
    Losses(values=[2.0, 2.0], samples=[4, 1])
    """
    pairs = [list(zip(losses.values, losses.samples, strict=True)) for losses in by_rank]
    batches = [[pair for pair in batch if pair is not None] for batch in zip_longest(*pairs)]
    samples = [sum(size for _, size in batch) for batch in batches]
    return Losses([sum(loss * size for loss, size in batch) / size for batch, size in zip(batches, samples, strict=True)], samples)


def _check_same_batches(first: Losses, then: Losses) -> None:
    """Raise GrowthError if two evaluations did not use batches of the same sizes."""
    if first.samples == then.samples:
        return
    counts = len(first.values), len(then.values)
    found = "batches of other sizes" if counts[0] == counts[1] else f"{counts[1]}"
    raise GrowthError(f"evaluate() gave {counts[0]} losses and then {found}; it must go through the same batches in the same order")


def confidence_of_look(look: int, looks: int | None) -> float:
    """Return the confidence of the interval at look number `look` of the `looks` planned for a seed; None if their number is unknown.

    A verdict at any look ends the probation, so the chances of an error add up. Look k of n gets the share (1 + 1/n) / (k (k + 1)) of
    MISJUDGED, where 1/n is 0 for an unknown n. These shares sum to 1. The first look gets at least half, because most seeds are decided
    there.

    >>> [round(confidence_of_look(look, 3), 4) for look in (1, 2, 3)], confidence_of_look(1, 1)
    ([0.9667, 0.9889, 0.9944], 0.95)
    """
    whole = 1 if looks is None else 1 + 1 / looks
    return 1 - MISJUDGED * whole / (look * (look + 1))


def gain_of(without: Losses, with_all: Losses, *, confidence: float = 1 - MISJUDGED) -> Interval:
    """Return the mean of the paired differences between losses without a seed and with all seeds, with an interval."""
    differences = [off - on for off, on in zip(without.values, with_all.values, strict=True)]
    return _interval(differences, with_all.samples, confidence=confidence)


def _interval(differences: Sequence[float], samples: Sequence[float], *, confidence: float = 1 - MISJUDGED) -> Interval:
    """Return the weighted mean of the differences with its interval. If a difference is not finite, both ends are the mean."""
    if not all(map(math.isfinite, differences)):
        mean = weighted_mean(differences, samples)
        return Interval(mean, mean, mean)
    return weighted_interval(differences, samples, confidence=confidence)


def weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


class AlphaSearch(NamedTuple):
    """Result of `search_alpha`."""

    alpha: float  # the best of the tried values
    losses: dict[float, float]  # mean validation loss of each tried value


def search_alpha(measurement: Measurement, name: str, evaluate: Evaluate, alphas: Sequence[float]) -> AlphaSearch:
    """Find the alpha of one seed with the lowest validation loss. The seed's own alpha does not change."""
    slotted = measurement.slotted
    found: dict[float, float] = {}
    for alpha in alphas:
        with modes_kept(slotted), slotted.slot(name).held_at(alpha):
            losses = measurement.losses(evaluate)
        found[alpha] = losses.mean
    return AlphaSearch(min(found, key=lambda alpha: (not math.isfinite(found[alpha]), found[alpha])), found)


def total(costs: Iterable[Cost]) -> Cost:
    """Return the sum of several costs."""
    costs = list(costs)
    return Cost(sum(cost.parameters for cost in costs), sum(cost.flops for cost in costs))


def rent_of(added: Cost, host: Cost, rent: RentConfig) -> float:
    """Return the rent of everything that was added to a host."""
    parameters, flops = added.parameters / max(host.parameters, 1), added.flops / max(host.flops, 1)
    return rent.parameters * math.log1p(parameters) + rent.flops * math.log1p(flops)


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
