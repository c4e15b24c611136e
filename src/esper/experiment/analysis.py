"""Analyses the seeds of an `esper grow` run: rebuilds its model and validation data from the folder, and measures the seeds.

    found = analyse_run("runs/digits")           # also written into the folder, as analysis.json

A finished run has its model file, with the seeds that were kept. Before that, the seeds come from the latest checkpoint, kept and living.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import length_hint
from pathlib import Path
from typing import Literal

from torch import nn

from esper.config import load_saved
from esper.devices import determinism, find_device, threads
from esper.experiment.config import GrowTaskConfig
from esper.experiment.training import COPY, make_controller
from esper.experiment.work import Work, make_work
from esper.files import check_in_run
from esper.growth.analysis import analyse, seeds_in
from esper.growth.host.saving import load as load_grown
from esper.growth.measure.shapley import EXACT_UP_TO, GROUPS, plan_orders
from esper.growth.run import KIND, MODEL
from esper.runs import CheckpointStore
from esper.runs.analysis import Analysis, write_analysis
from esper.runs.catalog import open_run
from esper.runs.folder import GROW, RunError, check_holds_a_run

Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True)
class RunSeeds:
    """The model of a run with its seeds, and the data to measure them on."""

    model: nn.Module
    work: Work
    epoch: int

    @property
    def names(self) -> list[str]:
        return [seed.name for seed in seeds_in(self.model)]


@contextmanager
def opened_seeds(folder: Path | str, *, device: Device | None = None) -> Iterator[RunSeeds]:
    """Rebuild the model of a run inside the `with` block. Raise RunError if the folder does not say how.

    `device` is by default that of the run.
    """
    place = Path(folder)
    check_holds_a_run(place, "growth")
    if not (place / GROW).is_file():
        raise RunError(
            f"the run in {place} was started from Python, so its model and data are not known here; analyse it there: "
            f"esper.analyse(esper.load({str(place)!r}, model=Net()), val_loader, loss_fn=..., run={str(place)!r})"
        )
    config = load_saved(GrowTaskConfig, place / GROW)
    with threads(config.threads), determinism(config.deterministic):
        work = make_work(config, find_device(device or config.device))
        if (place / MODEL).is_file():
            check_in_run(place / MODEL)
            yield RunSeeds(load_grown(place, model=work.model), work, open_run(place).step())
            return
        store = CheckpointStore.of_run(place, kind=KIND)
        if not store.has_any():
            raise RunError(f"the run in {place} has neither a {MODEL} nor a checkpoint yet; try again after its first epoch")
        training = work.training(config)
        grower = training.prepare(make_controller(config, place / COPY))
        try:
            grower.load_state_dict(store.load().state["grower"])
            yield RunSeeds(training.model, work, grower.epoch)
        finally:
            grower.stop()


def evaluations(seeds: RunSeeds, *, batches: int | None, exact_up_to: int, groups: int) -> tuple[int, int | None]:
    """Return how many coalitions `analyse_run` evaluates, and on how many batches; None if the loader has no length."""
    length = length_hint(seeds.work.val_loader) or None
    return len(plan_orders(seeds.names, exact_up_to=exact_up_to, groups=groups).coalitions), length and min(length, batches or length)


def analyse_run(
    folder: Path | str,
    *,
    device: Device | None = None,
    batches: int | None = None,
    exact_up_to: int = EXACT_UP_TO,
    groups: int = GROUPS,
    on_progress: Callable[[int, int | None], None] = lambda done, total: None,
) -> Analysis | None:
    """Measure the seeds of a run on its validation data, write analysis.json into its folder, and return it; None if it has no seeds.

    The options are those of `esper.analyse`; `batches` is its `max_batches`.
    """
    with opened_seeds(folder, device=device) as seeds:
        if not seeds.names:
            return None
        given = seeds.work.step_loss
        loss_fn = getattr(given, "loss_fn", None)  # set by `step_loss_of`
        found = analyse(
            seeds.model,
            seeds.work.val_loader,
            loss_fn,
            step_loss=None if loss_fn is not None else given,
            metrics=seeds.work.metrics,
            precision=seeds.work.growth.precision,
            max_batches=batches,
            exact_up_to=exact_up_to,
            groups=groups,
            epoch=seeds.epoch,
            on_progress=on_progress,
        )
    write_analysis(folder, found)
    return found
