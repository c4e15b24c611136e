"""Contribution of a seed, and the rent that it must exceed.

The contribution is the validation loss with the seed off minus the loss with it on, over the same batches.

Settings. With k seeds, k + 1 settings are evaluated: all on, and each one off. The layers before a slot compute the same values with its
seed on and off, so their outputs are recorded while all seeds are on, and replayed. One more evaluation, once per slot, checks that the
replay gives bit-identical losses.

Units. Differences are paired, and intervals rest, on the finest losses that `evaluate` returns: those of samples, of groups of samples that
belong together, or else of batches. Few batches give wide intervals: 89 samples gave one of ±10 in three batches, and of ±0.5 one by one.

Weights. Every sample has the same weight: a group is weighted by its samples, and a batch by its size if `evaluate` tells it. On several
ranks, the units with the same number, or groups with the same key, are merged into one, whose loss is the mean over the samples of all
ranks. Ranks may therefore split the validation data or all use the same data. (If the same samples were counted separately, the intervals
would be too narrow.)

Confidence. A seed is measured after every epoch once its shortest probation (`holding_epochs`) is over, so each interval is wider than that
of a single look; see `confidence_of_look`.

Shapley values (`esper.growth.measure.shapley`) divide the joint gain of several seeds among them. A contribution is measured beside all
other seeds, so two seeds that do the same work each contribute nothing, although one of them is needed. The Shapley value of a seed is the
mean of its gain over all orders in which the seeds could be added. With k seeds, up to 8, this takes 2^k evaluations, and the checks.

`search_alpha` compares the validation losses of one seed at several alphas.

Rent is the price of parameters and FLOPs. `rent_of` is in nats for ten classes; multiplied by `LossRange.unit`, it can be compared with the
gain of a seed. `Allowance` is the rest of the budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import Any, NamedTuple, SupportsFloat

import numpy as np
import torch
from torch import Tensor

from esper.growth.config import BudgetConfig, GrowthError, RentConfig
from esper.growth.events import Unit
from esper.growth.host.prefix_cache import PrefixCache
from esper.growth.host.slotted import Slotted
from esper.growth.lifecycle.stages import Contribution, Cost, counted
from esper.growth.measure.shapley import Solution, plan_orders, solve
from esper.parallel import ALONE, Group
from esper.statistics import LEAST_COUNT, Interval, effective_count, weighted_interval
from esper.text_table import figure

MISJUDGED = 0.05  # chance that at least one of all intervals of a seed misses its true gain

REMEDY = "return the loss of every sample (1-D, without a mean) from evaluate() or step_loss, or use smaller and more validation batches"

Loss = float | Tensor

PerSample = Tensor | np.ndarray[Any, Any] | list[float]  # the losses [B] of the samples of a batch
BatchLoss = Loss | tuple[Loss, float] | PerSample | tuple[PerSample, Sequence[Hashable] | Tensor]

# Returns for every validation batch, always in the same order: the losses of its samples, best of all; these with the key of each sample's
# group (its sequence, its patient, ...), as a tuple; or one loss, alone or as a tuple with the number of samples.
Evaluate = Callable[[], Sequence[BatchLoss] | Tensor]


class Losses(NamedTuple):
    """Losses of one evaluation: of samples, of groups of samples, or of batches."""

    values: list[float]
    samples: list[float]  # number in each unit; all 1 if unknown
    unit: Unit = "batches"
    keys: list[Hashable] | None = None  # of the groups
    batches: list[int] | None = None  # of samples: how many of them each batch has

    @property
    def mean(self) -> float:
        """Mean over all samples.

        >>> Losses([1.0, 4.0], [2, 1]).mean
        2.0
        """
        return weighted_mean(self.values, self.samples)

    def by_batch(self) -> Losses:
        """Return the losses of the batches that these samples came in.

        >>> Losses([1.0, 2.0, 6.0], [1, 1, 1], "samples", batches=[2, 1]).by_batch()[:3]
        ([1.5, 6.0], [2.0, 1.0], 'batches')
        """
        if self.batches is None:
            return self
        ends = list(accumulate(self.batches))
        values = [fmean(self.values[end - size : end]) for end, size in zip(ends, self.batches, strict=True)]
        return Losses(values, [float(size) for size in self.batches])

    @property
    def are_finite(self) -> bool:
        return all(map(math.isfinite, self.values))

    @property
    def have_spread(self) -> bool:
        """Whether there are enough units for an interval. One batch, or one that outweighs all others, is not enough."""
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
        found = {name: contribution_of(losses, with_all, epoch, confidence=confidences[name]) for name, losses in without.items()}
        return Measured(with_all, found)

    def shapley(self, evaluate: Evaluate, names: Sequence[str]) -> Solution:
        """Return the Shapley values of the seeds in these slots and the interactions of all pairs. Evaluates every coalition once."""
        plan = plan_orders(names)
        with self._all_on(evaluate, names) as with_all:
            by_coalition = {}
            for on in plan.coalitions:
                off = [name for name in names if name not in on]
                losses = self._without(evaluate, off, with_all) if off else with_all
                by_coalition[on] = losses
        alike = _alike(*by_coalition.values())
        gains = {on: -np.array(losses.values) for on, losses in zip(by_coalition, alike, strict=True)}
        return solve(plan, gains, alike[0].samples)

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


RULE = (
    "return a list with an item for every validation batch: the losses of its samples as a 1-D tensor, these with a key for each sample's "
    "group as a tuple, the loss of the batch, or a tuple (loss, number of samples)"
)


def check_evaluate(evaluate: object) -> None:
    """Raise a GrowthError unless `evaluate` is a function."""
    if not callable(evaluate):
        raise GrowthError(
            f"after_epoch needs a function that returns the loss of every validation batch, and got "
            f"{'nothing' if evaluate is None else f'a {type(evaluate).__name__}'}; pass the function itself, which is called again for "
            "each seed on trial with the seed off: grower.after_epoch(evaluate)"
        )


def losses_of(evaluate: Evaluate) -> Losses:
    """Call the user's function and validate its result.

    >>> losses_of(lambda: [(0.5, 160), (2.0, 1)])[:3]
    ([0.5, 2.0], [160.0, 1.0], 'batches')
    >>> losses_of(lambda: [torch.tensor([0.5, 1.0]), torch.tensor([3.0])])[:3]
    ([0.5, 1.0, 3.0], [1.0, 1.0, 1.0], 'samples')
    >>> losses_of(lambda: [(torch.tensor([0.5, 1.0, 3.0]), ["a", "b", "a"])])[:3]
    ([1.75, 1.0], [2.0, 1.0], 'groups')
    """
    answer: Any = evaluate()
    if not isinstance(answer, Iterable):
        raise GrowthError(f"evaluate() gave {'None' if answer is None else f'a {type(answer).__name__}'}; {RULE}")
    if isinstance(answer, Tensor):  # a loss for every batch
        answer = list(answer.detach().reshape(-1))
    # What belongs to each batch: its losses [B] or [1], and their weights or the keys of their groups.
    items = [item if isinstance(item, tuple) and len(item) == 2 else (item, None) for item in answer]
    parts = [_as_losses(loss) for loss, _ in items]
    if not parts:
        raise GrowthError("evaluate() gave no losses: the validation loader yields nothing; give it at least one batch")
    values = torch.cat([part.reshape(-1) for part in parts]).tolist()  # one read of the device
    if all(part.numel() == 1 for part in parts) and not any(_are_keys(about) for _, about in items):
        return Losses(values, _sizes([1.0 if about is None else about for _, about in items]))
    if any(part.ndim == 0 for part in parts):
        raise GrowthError(f"evaluate() gave the losses of samples for one batch, and the loss of a whole batch for another; {RULE}")
    if all(about is None or (not _are_keys(about) and about == part.numel()) for part, (_, about) in zip(parts, items, strict=True)):
        return Losses(values, [1.0] * len(values), "samples", batches=[part.numel() for part in parts])
    # Merge the samples of each group, in the order in which groups appear.
    sums: dict[Hashable, list[float]] = {}  # key -> sum of the losses, number of samples
    keys = [key for part, (_, about) in zip(parts, items, strict=True) for key in _keys(about, part.numel())]
    for key, value in zip(keys, values, strict=True):
        of_group = sums.setdefault(key, [0.0, 0.0])
        of_group[0] += value
        of_group[1] += 1
    return Losses([loss / count for loss, count in sums.values()], [count for _, count in sums.values()], "groups", list(sums))


def _as_losses(loss: Any) -> Tensor:
    """Return what `evaluate` gave as the loss or the losses of a batch as a tensor [] or [B] of float64."""
    if isinstance(loss, np.ndarray | list) or (isinstance(loss, Tensor) and loss.ndim):
        losses = torch.as_tensor(loss).detach()
        if losses.ndim != 1 or not losses.numel():
            raise GrowthError(f"evaluate() gave losses of shape {list(losses.shape)} for a batch; {RULE}")
        return losses.double()
    if not isinstance(loss, Tensor | SupportsFloat):
        raise GrowthError(f"evaluate() gave a {type(loss).__name__} for a batch; {RULE}")
    return torch.as_tensor(loss).detach().double()


def _are_keys(about: Any) -> bool:
    """Return whether what stands beside the losses of a batch are the keys of groups."""
    return isinstance(about, Sequence | np.ndarray) or (isinstance(about, Tensor) and about.ndim > 0)


def _keys(about: Any, samples: int) -> list[Hashable]:
    keys: list[Hashable] = about.tolist() if isinstance(about, Tensor | np.ndarray) else list(about) if _are_keys(about) else []
    if len(keys) != samples:
        raise GrowthError(
            f"evaluate() gave {samples} losses of samples with {len(keys)} keys of their groups; give one key for each sample"
        )
    return keys


def _sizes(given: Sequence[Any]) -> list[float]:
    """Return the numbers of samples of the batches."""
    sizes = [float(size) for size in given]
    if strange := [size for size in sizes if not 0 < size < math.inf]:
        raise GrowthError(f"evaluate() gave a validation batch with {strange[0]:g} samples; give a number above 0 for every batch")
    return sizes


def averaged(by_rank: Sequence[Losses]) -> Losses:
    """Average the losses over ranks, unit by unit. Ranks may have different numbers of units.

    >>> averaged([Losses([1.0, 2.0], [3, 1]), Losses([5.0], [1])])[:2]
    ([2.0, 2.0], [4, 1])
    >>> averaged([Losses([1.0, 2.0], [1, 1], "groups", ["a", "b"]), Losses([4.0], [2], "groups", ["b"])]).values
    [1.0, 3.3333333333333335]
    """
    by_rank = _alike(*by_rank)
    merged: dict[Hashable, list[tuple[float, float]]] = {}  # key or number -> (loss, samples) on every rank that has it
    for losses in by_rank:
        keys = range(len(losses.values)) if losses.keys is None else losses.keys
        for key, loss, size in zip(keys, losses.values, losses.samples, strict=True):
            merged.setdefault(key, []).append((loss, size))
    samples = [sum(size for _, size in unit) for unit in merged.values()]
    values = [sum(loss * size for loss, size in unit) / size for unit, size in zip(merged.values(), samples, strict=True)]
    first = max(by_rank, key=lambda losses: len(losses.values))
    return Losses(values, samples, first.unit, None if first.keys is None else list(merged), first.batches)


def _alike(*evaluations: Losses) -> list[Losses]:
    """Return evaluations in the same unit: if only some know the losses of their samples, all are by batch."""
    units = {losses.unit for losses in evaluations}
    if len(units) > 1 and "groups" in units:
        kinds = " and of ".join(sorted(units))
        raise GrowthError(f"evaluate() gave losses of {kinds}; it must return the same kind every time, on all ranks")
    return [losses.by_batch() for losses in evaluations] if len(units) > 1 else list(evaluations)


def _check_same_batches(first: Losses, then: Losses) -> None:
    """Raise GrowthError if two evaluations did not use batches of the same sizes."""
    first, then = _alike(first, then)
    if (first.samples, first.unit, first.keys) == (then.samples, then.unit, then.keys):
        return
    counts = len(first.values), len(then.values)
    found = f"{first.unit} of other sizes" if counts[0] == counts[1] else f"{counts[1]}"
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


def contribution_of(without: Losses, with_all: Losses, epoch: int, *, confidence: float = 1 - MISJUDGED) -> Contribution:
    """Return the contribution of a seed from the losses without it and with all seeds."""
    finest = _alike(without, with_all)[0]
    return Contribution(gain_of(without, with_all, confidence=confidence), epoch, finest.unit, len(finest.values))


def why_undecided(measured: Contribution, most: float) -> str:
    """Return why no further look at a seed would decide about it, with the remedy; empty if one may.

    Its interval is infinite, or reaches further than `most`, all that a model can gain over a constant predictor (`LossRange.range`), and
    longer training does not make it narrower.
    """
    reach = (measured.gain.high - measured.gain.low) / 2
    if reach <= most:
        return ""
    over = f" over {counted(measured.count, measured.unit)}" if measured.count else ""
    remedy = REMEDY if measured.unit == "batches" else "use more validation samples"
    return f"its interval{over} of validation data is ±{figure(reach)}, which cannot decide; {remedy}"


def gain_of(without: Losses, with_all: Losses, *, confidence: float = 1 - MISJUDGED) -> Interval:
    """Return the mean of the paired differences between losses without a seed and with all seeds, with an interval."""
    without, with_all = _alike(without, with_all)
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
