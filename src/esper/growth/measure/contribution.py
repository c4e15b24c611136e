"""Contribution: what the validation loss gains by a seed, measured on the same batches with the seed on and off.

With k seeds there are k + 1 distinct settings: all on, and each one off. What ran before a slot is the same with its seed on and off, so it
is recorded while everything is on, and replayed; that this changes no bit is checked once for every slot.

Every sample counts alike: where the sizes of batches are told, a batch weighs as many samples as it holds. On several ranks, the batches
that have the same number are one batch: its loss is the mean over the samples of all ranks. So ranks may share the validation data out or
all go through the same; counted apart, batches that are the same would pass for more evidence than there is.

A seed is looked at after every epoch of its probation, so its intervals are wider than those of a single look: see `confidence_of_look`.

Shapley values: how the gain of several seeds together is to be divided among them.

A seed's contribution is measured beside all others, so two seeds that do the same work contribute nothing each, although one of them is
needed. The Shapley value is the mean of what a seed adds over all orders in which the seeds could have come; together they make up the
whole gain. With k seeds that takes 2^k evaluations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import combinations, zip_longest
from typing import Any, NamedTuple, SupportsFloat

import torch
from torch import Tensor

from esper.growth.config import GrowthError
from esper.growth.host.prefix_cache import PrefixCache
from esper.growth.host.slotted import Slotted
from esper.growth.lifecycle.stages import Contribution
from esper.parallel import ALONE, Group
from esper.statistics import LEAST_COUNT, Interval, effective_count, weighted_interval

MISJUDGED = 0.05  # chance that any interval of a seed misses its true gain, over all looks at it

Loss = float | Tensor
# The loss of every batch, or pairs of it and the number of samples in the batch; always in the same order.
Evaluate = Callable[[], Sequence[Loss] | Sequence[tuple[Loss, float]] | Tensor]


class Losses(NamedTuple):
    """Of the batches of one evaluation."""

    values: list[float]
    samples: list[float]  # in each batch; all 1 where nobody told

    @property
    def mean(self) -> float:
        """Over samples.

        >>> Losses([1.0, 4.0], [2, 1]).mean
        2.0
        """
        return weighted_mean(self.values, self.samples)

    @property
    def are_finite(self) -> bool:
        return all(map(math.isfinite, self.values))

    @property
    def have_spread(self) -> bool:
        """False where there is one batch, or as good as one: then nobody can tell how sure a difference is."""
        return effective_count(self.samples) >= LEAST_COUNT


class Measured(NamedTuple):
    losses: Losses  # with everything on
    contributions: dict[str, Contribution]


class Measurement:
    """Measures again and again, and remembers for which slots a replay can be trusted."""

    def __init__(self, slotted: Slotted, *, group: Group = ALONE) -> None:
        self.slotted = slotted
        self._group = group  # all ranks evaluate equally often, because their forward passes may talk to each other
        self._replays: dict[str, PrefixCache] = {}
        self._trusted: set[str] = set()
        self._distrusted: set[str] = set()

    def measure(self, evaluate: Evaluate, names: Sequence[str] | Mapping[str, float], *, epoch: int) -> Measured:
        """The losses of this moment, and the contribution of the seed in each of these slots. Losses that are not finite end it.

        A mapping gives the confidence of each slot's interval; it is 95 % otherwise.
        """
        confidences = names if isinstance(names, Mapping) else dict.fromkeys(names, 1 - MISJUDGED)
        with self._all_on(evaluate, list(confidences)) as with_all:
            if not with_all.are_finite:
                return Measured(with_all, {})
            without = {name: self._without(evaluate, [name], with_all) for name in confidences}
        gains = {name: gain_of(losses, with_all, confidence=confidences[name]) for name, losses in without.items()}
        return Measured(with_all, {name: Contribution(gain, epoch) for name, gain in gains.items()})

    def shapley(self, evaluate: Evaluate, names: Sequence[str]) -> dict[str, Interval]:
        """The Shapley value of the seed in each of these slots, exactly: every subset of them is evaluated once."""
        with self._all_on(evaluate, names) as with_all:
            losses = {off: (self._without(evaluate, off, with_all) if off else with_all).values for off in subsets(names)}
        return {name: _interval(values, with_all.samples) for name, values in shapley_values(losses, names).items()}

    def losses(self, evaluate: Evaluate) -> Losses:
        """Of all ranks together. An error on one of them is told on all, for the others would wait for it."""
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
        """The losses with everything on; inside, what was recorded with them can be replayed."""
        replays = [self._replay(name) for name in names if name not in self._distrusted]
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

    def _replay(self, name: str) -> PrefixCache:
        if name not in self._replays:
            self._replays[name] = PrefixCache(self.slotted.model, self.slotted.discovery.calls, name)
        return self._replays[name]

    def _without(self, evaluate: Evaluate, off: Collection[str], with_all: Losses) -> Losses:
        """The losses with these seeds off. What runs before the first of them is replayed."""
        first = next(name for name in self.slotted.slots if name in off)
        with ExitStack() as stack:
            if self._can_trust(evaluate, first, with_all):
                stack.enter_context(self._replays[first].replaying())
            stack.enter_context(self.slotted.without(list(off)))
            losses = self.losses(evaluate)
        _check_same_batches(with_all, losses)
        return losses

    def _can_trust(self, evaluate: Evaluate, name: str, with_all: Losses) -> bool:
        replay = self._replays.get(name)
        if self._group.any(name in self._distrusted or replay is None or not replay.is_usable or not replay.nbytes):
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
    """Which modules are in training mode is afterwards as it was, whatever happens."""
    seeds = [slot.seed for slot in slotted.slots.values() if slot.seed is not None]
    modes = [(module, module.training) for root in (slotted.model, *seeds) for module in root.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def losses_of(evaluate: Evaluate) -> Losses:
    """What the user's function gives, checked.

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
        losses = Losses(torch.stack(parts).tolist() if parts else [], [float(samples) for _, samples in pairs])  # read in one go
    if not losses.values:
        raise GrowthError("evaluate() gave no losses: the validation loader yields nothing; give it at least one batch")
    strange = [samples for samples in losses.samples if not 0 < samples < math.inf]
    if strange:
        raise GrowthError(f"a validation batch has {strange[0]:g} samples; every one needs at least one")
    return losses


def averaged(by_rank: Sequence[Losses]) -> Losses:
    """Batch by batch over ranks, of which one may have fewer.

    >>> averaged([Losses([1.0, 2.0], [3, 1]), Losses([5.0], [1])])
    Losses(values=[2.0, 2.0], samples=[4, 1])
    """
    pairs = [list(zip(losses.values, losses.samples, strict=True)) for losses in by_rank]
    batches = [[pair for pair in batch if pair is not None] for batch in zip_longest(*pairs)]
    samples = [sum(size for _, size in batch) for batch in batches]
    return Losses([sum(loss * size for loss, size in batch) / size for batch, size in zip(batches, samples, strict=True)], samples)


def _check_same_batches(first: Losses, then: Losses) -> None:
    if first.samples == then.samples:
        return
    counts = len(first.values), len(then.values)
    found = "batches of other sizes" if counts[0] == counts[1] else f"{counts[1]}"
    raise GrowthError(f"evaluate() gave {counts[0]} losses and then {found}; it must go through the same batches in the same order")


def confidence_of_look(look: int, looks: int | None) -> float:
    """Confidence of the interval at one look of so many that are planned for a seed; None: nobody knows how many.

    A verdict at any look ends the probation, so the chances of a miss add up. Look k of n spends (1 + 1/n) / (k (k + 1)) of MISJUDGED,
    which sums to exactly MISJUDGED over all of them. The first look spends half of it, because most seeds are decided there.

    >>> [round(confidence_of_look(look, 3), 4) for look in (1, 2, 3)], confidence_of_look(1, 1)
    ([0.9667, 0.9889, 0.9944], 0.95)
    """
    whole = 1 if looks is None else 1 + 1 / looks
    return 1 - MISJUDGED * whole / (look * (look + 1))


def gain_of(without: Losses, with_all: Losses, *, confidence: float = 1 - MISJUDGED) -> Interval:
    """The paired difference, batch by batch."""
    differences = [off - on for off, on in zip(without.values, with_all.values, strict=True)]
    return _interval(differences, with_all.samples, confidence=confidence)


def _interval(differences: Sequence[float], samples: Sequence[float], *, confidence: float = 1 - MISJUDGED) -> Interval:
    if not all(map(math.isfinite, differences)):
        mean = weighted_mean(differences, samples)
        return Interval(mean, mean, mean)
    return weighted_interval(differences, samples, confidence=confidence)


def weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


class AlphaSearch(NamedTuple):
    alpha: float  # the best of those that were tried
    losses: dict[float, float]  # mean validation loss of each


def search_alpha(measurement: Measurement, name: str, evaluate: Evaluate, alphas: Sequence[float]) -> AlphaSearch:
    """Which alpha of one seed gives the lowest validation loss. Alpha is afterwards what it was."""
    slotted = measurement.slotted
    found: dict[float, float] = {}
    for alpha in alphas:
        with modes_kept(slotted), slotted.slot(name).held_at(alpha):
            losses = measurement.losses(evaluate)
        found[alpha] = losses.mean
    return AlphaSearch(min(found, key=lambda alpha: (not math.isfinite(found[alpha]), found[alpha])), found)


MOST = 4  # seeds, which is 16 evaluations

LossesWithout = Mapping[frozenset[str], Sequence[float]]  # which seeds are off -> the loss of every batch


def subsets(names: Sequence[str]) -> list[frozenset[str]]:
    """All of them, the empty one first."""
    return [frozenset(some) for size in range(len(names) + 1) for some in combinations(names, size)]


def shapley_values(losses: LossesWithout, names: Sequence[str]) -> dict[str, list[float]]:
    """In the unit of the loss, for every seed and batch.

    >>> shapley_values({frozenset(): [1.0], frozenset("a"): [2.0], frozenset("b"): [1.0], frozenset("ab"): [4.0]}, "ab")
    {'a': [2.0], 'b': [1.0]}
    """
    return {name: _value(losses, name, [other for other in names if other != name]) for name in names}


def _value(losses: LossesWithout, name: str, others: Sequence[str]) -> list[float]:
    count = len(others) + 1
    value = [0.0] * len(losses[frozenset()])
    for off in subsets(others):
        present = len(others) - len(off)  # of the others, when the seed comes
        weight = math.factorial(present) * math.factorial(count - present - 1) / math.factorial(count)
        gains = [without - with_it for without, with_it in zip(losses[off | {name}], losses[off], strict=True)]
        value = [so_far + weight * gain for so_far, gain in zip(value, gains, strict=True)]
    return value
