"""Analyse the seeds of a grown model: Shapley values and pairwise interaction, on the same validation batches.

    grown = esper.grow(model, train_loader, val_loader, loss_fn=F.cross_entropy, epochs=30)
    print(esper.analyse(grown, val_loader, loss_fn=F.cross_entropy).card())

A coalition is a set of seeds; its value is the validation loss with all other seeds off (alpha 0). Every batch is loaded once and evaluated
with all coalitions, so the differences between them are paired even if the loader shuffles. Intervals of the loss rest on samples where
their losses are known, as in `grow`; otherwise, and those of metrics, on batches. The seeds may be baked, as in the result of
`grow` or `esper.load`, or in slots, kept or still living.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from operator import length_hint
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from esper.growth.arguments import check_precision
from esper.growth.batches import LossFunction, StepLoss, ValidationLoss, samples_of, size_of, validation_loss
from esper.growth.config import GrowthError
from esper.growth.grower import Grower
from esper.growth.host.averages import AveragedModel
from esper.growth.host.isolation import isolated, unwrap
from esper.growth.host.layout import Place
from esper.growth.host.slots import Slot, around
from esper.growth.host.slotted import Slotted
from esper.growth.measure.shapley import EXACT_UP_TO, GROUPS, Coalition, OrderPlan, plan_orders, solve
from esper.growth.metrics import Metric, MetricSums, check_functions
from esper.growth.run import Grown
from esper.growth.seeds.blueprints import cost_of, get_blueprint
from esper.growth.seeds.seed import Seed
from esper.growth.training_loop import device_of, move, step_loss_of
from esper.runs.analysis import AnalysedSeed, Analysis, Estimate, Interaction, MeasureResult, write_analysis

LOSS = "loss"


@dataclass(frozen=True)
class SeedInModel:
    """A connected seed of a model: baked, or in a slot."""

    name: str
    seed: Seed
    slot: Slot | None  # None: the seed is baked

    @contextmanager
    def off(self) -> Iterator[None]:
        """Switch the seed off inside the `with` block."""
        if self.slot is not None:
            with self.slot.held_at(0.0):
                yield
            return
        before = self.seed.alpha.clone()
        self.seed.alpha.fill_(0.0)
        try:
            yield
        finally:
            self.seed.alpha.copy_(before)

    def described(self) -> AnalysedSeed:
        spec, is_kept = self.seed.spec, self.slot is None or self.slot.is_kept
        place = Place(self.name, spec.kind, spec.shape, batch_axis=spec.batch_axis, is_causal=spec.is_causal)
        return AnalysedSeed(
            name=self.name,
            blueprint=spec.blueprint,
            outcome="kept" if is_kept else "living",
            alpha=float(self.seed.alpha),
            parameters=sum(parameter.numel() for parameter in self.seed.parameters()),
            flops=cost_of(get_blueprint(spec.blueprint), place).flops,
        )


def analyse(
    model: nn.Module | Grown | Slotted | AveragedModel | Grower,
    val_loader: Iterable[Any],
    loss_fn: LossFunction | None = None,
    *,
    step_loss: StepLoss | None = None,
    metrics: Mapping[str, Metric] | None = None,
    precision: Literal["float32", "bfloat16", "float16"] = "float32",
    max_batches: int | None = None,
    exact_up_to: int = EXACT_UP_TO,
    groups: int = GROUPS,
    seed: int = 0,
    run: Path | str | None = None,
    epoch: int | None = None,
    on_progress: Callable[[int, int | None], None] = lambda done, total: None,
) -> Analysis:
    """Return the Shapley value of every seed of a model and the interaction of every pair, by the validation loss and the metrics.

    Data, loss, metrics and precision are those of `grow`. Only the first `max_batches` batches are used if it is given. Up to
    `exact_up_to` seeds, all 2^k coalitions are evaluated; with more, `groups` groups of orders are sampled with the random `seed`.

    `run` is the folder of a run that gets the result as analysis.json, for its report and the dashboard, and `epoch` is noted in it.
    `on_progress(done, total)` is called after every evaluation of a batch; the total is None if the loader has no length.

    The model is left as it was.
    """
    module = _module_of(model)
    found = {one.name: one for one in seeds_in(module)}
    if not found:
        raise GrowthError("the model has no seeds, so there is nothing to analyse; grow it first, or load a grown one: esper.load(...)")
    if max_batches is not None and max_batches < 1:
        raise GrowthError(f"max_batches must be at least 1, and is {max_batches}")
    try:
        plan = plan_orders(list(found), exact_up_to=exact_up_to, groups=groups, seed=seed)
    except ValueError as error:
        raise GrowthError(str(error)) from error
    loss, functions = step_loss_of(loss_fn, step_loss), check_functions(metrics)
    if LOSS in functions:
        raise GrowthError(f"{LOSS!r} cannot be the name of a metric here; rename it")
    device = device_of(module)
    check_precision(module, precision, device)
    autocast = nullcontext() if precision == "float32" else torch.autocast(device.type, dtype=getattr(torch, precision))
    sizes: list[int] = []
    by_batch: dict[str, dict[Coalition, list[Any]]] = {name: {on: [] for on in plan.coalitions} for name in (LOSS, *functions)}
    by_sample: list[np.ndarray[Any, Any]] | None = []  # losses [coalitions, B] of the samples of every batch; None: they are not known
    described = [one.described() for one in found.values()]
    number_of = length_hint(val_loader) or None
    total = None if number_of is None else min(number_of, max_batches or number_of) * len(plan.coalitions)
    with isolated(module), torch.no_grad(), autocast:
        module.eval()
        for raw in islice(val_loader, max_batches):
            batch = move(raw, device)
            sizes.append(size_of(batch))
            losses: list[ValidationLoss] = []  # of all coalitions
            for on in plan.coalitions:
                sums = MetricSums(module, functions, of_pairs=step_loss is None)
                with ExitStack() as off:
                    for name in found.keys() - on:
                        off.enter_context(found[name].off())
                    off.enter_context(sums.recording())
                    losses.append(validation_loss(loss, module, batch, by_sample=by_sample is not None))
                    sums.note(batch, sizes[-1], where=f"batch {len(sizes)} of the validation loader")
                for name, value in sums.means().items():
                    by_batch[name][on].append(value)
                on_progress((len(sizes) - 1) * len(plan.coalitions) + len(losses), total)
            # Read the losses of all coalitions from the device at once.
            for on, value in zip(plan.coalitions, torch.stack([one.loss.reshape(()).double() for one in losses]).tolist(), strict=True):
                by_batch[LOSS][on].append(value)
            rows = None if by_sample is None else samples_of(losses)
            by_sample = None if by_sample is None or rows is None else [*by_sample, torch.stack(rows).double().cpu().numpy()]
    if not sizes:
        raise GrowthError("the validation loader yields nothing; it needs at least one batch")
    measures = [_solved(name, plan, {on: np.array(values) for on, values in of.items()}, sizes, "batches") for name, of in by_batch.items()]
    if by_sample is not None:
        of_samples = dict(zip(plan.coalitions, np.concatenate(by_sample, axis=1), strict=True))
        measures[0] = _solved(LOSS, plan, of_samples, [1] * sum(sizes), "samples")
    result = Analysis(
        seeds=described,
        measures=measures,
        batches=len(sizes),
        samples=sum(sizes),
        coalitions=len(plan.coalitions),
        orders=plan.orders,
        epoch=epoch,
    )
    if run is not None:
        write_analysis(run, result)
    return result


def seeds_in(model: nn.Module) -> list[SeedInModel]:
    """Return the connected seeds of a model in the order of its modules, named by the module whose output they change."""
    host, found = unwrap(model), list[tuple[str, str, Seed, Slot | None]]()
    for name, module in host.named_modules():
        patch = around(module)
        if isinstance(module, Seed) and module.baked_as:
            parts = name.split(".")[:-1]
            found.append((".".join(parts[: len(parts) - module.spec.levels_up]), name, module, None))
        if isinstance(patch, Slot) and patch.seed is not None and patch.is_connected:
            found.append((name, f"{name}.{patch.home.baked_as}", patch.seed, patch))
    places = [place for place, _, _, _ in found]
    return [SeedInModel(place if places.count(place) == 1 else name, seed, slot) for place, name, seed, slot in found]


def _module_of(model: object) -> nn.Module:
    inner = model.model if isinstance(model, Grown) else getattr(model, "slotted", model)  # a Grower or an AveragedModel has a Slotted
    module = inner.model if isinstance(inner, Slotted) else inner
    if not isinstance(module, nn.Module):
        raise GrowthError(f"a {type(model).__name__} is not a model; pass an nn.Module, or the result of grow or add_slots")
    return module


def _solved(
    name: str,
    plan: OrderPlan,
    measured: Mapping[Coalition, np.ndarray[Any, Any]],
    weights: Sequence[int],
    unit: Literal["samples", "batches"],
) -> MeasureResult:
    """Return the Shapley values and interactions by the loss or by one metric, from its values [units] with every coalition."""
    sign = -1.0 if name == LOSS else 1.0
    values = {on: sign * measured[on] for on in plan.coalitions}
    solution = solve(plan, values, weights)
    without, with_all = (sign * float(np.average(values[on], weights=weights)) for on in (frozenset[str](), frozenset(plan.players)))
    return MeasureResult(
        name=name,
        is_better_low=name == LOSS,
        without=without if np.isfinite(without) else None,
        with_all=with_all if np.isfinite(with_all) else None,
        shapley={seed: Estimate.of(value) for seed, value in solution.values.items()},
        removal={seed: Estimate.of(value) for seed, value in solution.removal.items()},
        alone={seed: Estimate.of(value) for seed, value in solution.alone.items()},
        pairs=[Interaction(one, other, Estimate.of(value)) for (one, other), value in solution.pairs.items()],
        unit=unit,
    )
