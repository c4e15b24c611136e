"""`grow`: the whole training loop around a grower, for a model, two loaders and a loss.

grown = esper.grow(model, train_loader, val_loader, loss_fn=F.cross_entropy, epochs=30)
print(grown.report())
torch.save(grown.model.state_dict(), "model.pt")
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR, ReduceLROnPlateau

from esper.events import Event
from esper.growth.arguments import MakeHostOptimizer, MakeScheduler, check_call, optimizer_from, scheduler_from
from esper.growth.batches import (
    Listener,
    LossFunction,
    StepLoss,
    check_data,
    check_loader,
    checked,
    device_of,
    example_of,
    explained,
    move,
    size_of,
    step_loss_of,
)
from esper.growth.config import GrowthConfig
from esper.growth.contribution import Losses, losses_of
from esper.growth.decisions import Controller
from esper.growth.errors import GrowthError
from esper.growth.events import GrowthStarted
from esper.growth.governor import Diverged
from esper.growth.grower import Grower
from esper.growth.isolation import isolated
from esper.growth.result import Grown, Status, finished
from esper.growth.run import NO_RUN, Run, open_run
from esper.growth.slotted import add_slots

EVERY_STEP = (OneCycleLR, CyclicLR)  # schedules whose time is counted in steps, by their own documentation
ONE_BATCH = (
    "the validation data come in one batch, or as good as one, so nobody can tell how sure a gain is, and seeds are judged at the end "
    "only; a smaller batch size helps"
)


def default_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def grow(
    model: nn.Module,
    train_loader: Iterable[Any],
    val_loader: Iterable[Any],
    loss_fn: LossFunction | None = None,
    *,
    epochs: int,
    step_loss: StepLoss | None = None,
    optimizer: MakeHostOptimizer = default_optimizer,
    scheduler: MakeScheduler | None = None,
    controller: Controller | str = "heuristic",
    config: GrowthConfig | None = None,
    run: Path | str | None = None,
    resume: bool = False,
) -> Grown:
    """Trains a copy of the model for some epochs and grows it where that pays. The model itself is not touched.

    A batch is (inputs, targets) with `loss_fn(outputs, targets)`, or anything with `step_loss(model, batch)`. `optimizer` makes one for the
    parameters, `scheduler` a schedule for it, stepped after every epoch (OneCycleLR and CyclicLR: after every step). The loaders are
    iterated as they are, on the model's device. With `run`, everything is kept in that folder, and `resume` goes on with what is there:
    from the last epoch's end, or from the very step where the training loader has a `state_dict`. Ctrl-C ends the training with what is
    fossilized by then, and the status "stopped".
    """
    check_call(model, epochs=epochs, config=config, run=run)
    training = Training(
        copy.deepcopy(model),
        train_loader,
        val_loader,
        step_loss_of(loss_fn, step_loss),
        epochs=epochs,
        make_optimizer=optimizer,
        make_scheduler=scheduler,
        config=config or GrowthConfig(),
    )
    grower = training.prepare(controller)
    if why := objection(grower):
        warnings.warn(why, stacklevel=2)
    with open_run(run, resume=resume, config=training.config) as opened:
        return training.run(controller, opened, may_interrupt=True)


class Training:
    """A model of its own, its data, its optimiser; `run` trains it, once."""

    def __init__(
        self,
        model: nn.Module,
        train_loader: Iterable[Any],
        val_loader: Iterable[Any],
        step_loss: StepLoss,
        *,
        epochs: int,
        make_optimizer: MakeHostOptimizer,
        make_scheduler: MakeScheduler | None,
        config: GrowthConfig,
    ) -> None:
        self.model, self.train_loader, self.val_loader, self.step_loss = model, train_loader, val_loader, step_loss
        self.epochs, self.config = epochs, config
        self._prepared: tuple[Grower, Losses] | None = None
        self._run = NO_RUN
        check_loader(train_loader, "training")
        check_loader(val_loader, "validation")
        self.device = device_of(model)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not trained:
            raise GrowthError("all parameters of the model are frozen (requires_grad is False); there is nothing to train")
        self.optimizer = optimizer_from(make_optimizer, trained)
        self.scheduler = scheduler_from(make_scheduler, self.optimizer)

    def prepare(self, controller: Controller | str) -> Grower:
        """The first look at model, loss, data and settings. What is wrong with them comes up here, before anything is written."""
        if self._prepared is not None:
            return self._prepared[0]
        before, example = self._first_look()
        slotted = add_slots(self.model, example, slots=self.config.slots)
        try:
            grower = Grower(
                slotted,
                self.optimizer,
                scheduler=self.scheduler,
                controller=controller,
                config=self.config,
                epochs=self.epochs,
                on_event=lambda event: self._run.emit(event),
            )
        except BaseException:
            slotted.remove()
            raise
        self._prepared = grower, before
        return grower

    def run(self, controller: Controller | str, run: Run = NO_RUN, *, may_interrupt: bool = False) -> Grown:
        """With `may_interrupt`, a KeyboardInterrupt stops the training; without, it comes through."""
        began = time.perf_counter()
        self.prepare(controller)
        assert self._prepared is not None
        (grower, first), self._run = self._prepared, run
        try:
            before = run.restore(grower, self.train_loader, first.mean)
            had_finished = run.is_resumed and self._is_over(grower)
            run.emit(self._started(grower, first))
            status = self._train(grower, run, before, may_interrupt=may_interrupt)
        except Diverged as error:
            error.model = grower.bake()
            raise
        except BaseException:
            grower.stop()
            grower.slotted.remove()
            raise
        return self._finish(grower, run, status, before, time.perf_counter() - began, had_finished=had_finished)

    def _train(self, grower: Grower, run: Run, before: float, *, may_interrupt: bool) -> Status:
        try:
            if not run.is_resumed:
                grower.begin()
                run.save(grower, self.train_loader, before, at_end_of_epoch=True)
            while not self._is_over(grower):
                if run.should_stop() or not self._train_epoch(grower, run, before):
                    return "stopped"
                self._end_epoch(grower)
                run.save(grower, self.train_loader, before, at_end_of_epoch=True)
        except KeyboardInterrupt:
            # In the middle of a step, which is no state to go on from: the last checkpoint stands.
            if not may_interrupt:
                raise
            return "stopped"
        return "finished" if grower.epoch >= self.epochs else "stopped early"

    def _is_over(self, grower: Grower) -> bool:
        return grower.chronicle.steps == 0 and (grower.epoch >= self.epochs or self._is_stuck(grower))

    def _train_epoch(self, grower: Grower, run: Run, before: float) -> bool:
        """False where it was stopped."""
        self.model.train()
        for number, raw in enumerate(self.train_loader, start=grower.chronicle.steps + 1):
            batch = move(raw, self.device)
            where = f"batch {number} of the training loader"
            loss = self._train_loss(batch, grower, where)
            torch.autograd.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if isinstance(self.scheduler, EVERY_STEP):
                self.scheduler.step()
            rollbacks = grower.rollbacks
            grower.after_step(loss, closure=partial(self._loss, batch), samples=size_of(batch))
            if grower.rollbacks > rollbacks:
                check_data(batch, math.nan, where)
            if run.should_stop():
                run.save(grower, self.train_loader, before, at_end_of_epoch=False)
                return False
        if not grower.chronicle.steps:
            raise GrowthError("the training loader yields nothing; it needs at least one batch")
        return True

    def _end_epoch(self, grower: Grower) -> None:
        # Before the epoch is over, so that a snapshot holds the schedule as the next epoch needs it. One that follows the loss has to wait.
        if self.scheduler is not None and not isinstance(self.scheduler, (*EVERY_STEP, ReduceLROnPlateau)):
            self.scheduler.step()
        ended = grower.after_epoch(lambda: list(self._evaluate(grower)))
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(ended.val_loss)

    def _train_loss(self, batch: Any, grower: Grower, where: str) -> Tensor:
        try:
            with grower.recording():
                loss = self._loss(batch)
        except Exception as error:
            raise explained(error, batch, where) from error
        if not loss.requires_grad:
            raise GrowthError(
                "the training loss has no gradient; compute it from the model's outputs, without detach(), no_grad() or argmax()"
            )
        return loss

    def _loss(self, batch: Any) -> Tensor:
        return checked(self.step_loss(self.model, batch))

    def _evaluate(self, grower: Grower | None) -> Iterator[tuple[Tensor, int]]:
        """The loss of every validation batch, and its samples. Draws nothing from the random streams that training uses."""
        with isolated(self.model), torch.no_grad():
            self.model.eval()
            for raw in self.val_loader:
                batch = move(raw, self.device)
                yield self._loss(batch).detach(), size_of(batch)
                if grower is not None:
                    grower.count_evaluation(size_of(batch))

    def _first_look(self) -> tuple[Losses, Any]:
        """The validation losses before anything was done, and what the model is called with."""
        found: list[tuple[float, int]] = []
        first = None
        listener = Listener(self.model)
        try:
            with isolated(self.model), torch.no_grad():
                self.model.eval()
                for number, raw in enumerate(self.val_loader, start=1):
                    batch = move(raw, self.device)
                    first = batch if first is None else first
                    where = f"batch {number} of the validation loader"
                    try:
                        loss = float(self._loss(batch))
                    except Exception as error:
                        raise explained(error, batch, where) from error
                    check_data(batch, loss, where)
                    found.append((loss, size_of(batch)))
        finally:
            listener.stop()
        if not found:
            raise GrowthError("the validation loader yields nothing; it needs at least one batch")
        return losses_of(lambda: found), example_of(first) if listener.heard is None else listener.heard

    def _is_stuck(self, grower: Grower) -> bool:
        """Early stopping: no better validation loss for long, and no seed on its way."""
        losses, patience = grower.chronicle.val_losses, self.config.patience
        if patience is None or len(losses) <= patience or grower.garden.living():
            return False
        recent, before = ([loss for loss in some if math.isfinite(loss)] for some in (losses[-patience:], losses[:-patience]))
        return min(recent, default=math.inf) >= min(before, default=math.inf)

    def _started(self, grower: Grower, losses: Losses) -> Event:
        host = grower.slotted.survey.host
        return GrowthStarted(
            epoch=grower.epoch,
            epochs=self.epochs,
            controller=grower.controller.name,
            raise_mode=self.config.lifecycle.raise_mode,
            slots=list(grower.slotted.slots),
            parameters=host.parameters,
            flops=host.flops,
            optimizer=describe_optimizer(self.optimizer),
            device=str(self.device),
            note="; ".join(filter(None, [objection(grower), "" if losses.have_spread else ONE_BATCH])),
        )

    def _finish(self, grower: Grower, run: Run, status: Status, before: float, seconds: float, *, had_finished: bool) -> Grown:
        if status != "stopped":
            for name in grower.garden.living():
                grower.garden.prune(name, "the training is over and it has not earned its place")
        model = grower.bake()
        grown = Grown(
            model=model,
            status=status,
            epochs=grower.epoch,
            val_loss_before=before,
            val_loss=losses_of(lambda: list(self._evaluate(None))).mean,
            train_losses=tuple(grower.chronicle.train_losses),
            val_losses=tuple(grower.chronicle.val_losses),
            host=grower.slotted.survey.host,
            added=grower.garden.added(),
            gflops=grower.chronicle.flops / 1e9,
            rollbacks=grower.rollbacks,
            ledger=grower.ledger,
            controller=grower.controller.name,
            optimizer=describe_optimizer(self.optimizer),
            seconds=seconds,
            folder=run.folder,
            had_finished=had_finished,
        )
        run.emit(finished(grown))
        return grown


def objection(grower: Grower) -> str:
    """Why nothing could ever grow as it is planned, where the controller knows; empty where something could."""
    ask = getattr(grower.controller, "why_nothing_can_grow", None)
    return "" if ask is None else str(ask(grower.epochs))


def describe_optimizer(optimizer: Optimizer) -> str:
    """Such as "AdamW, learning rate 0.001"; the rate is the one it began with."""
    rates = sorted({float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups})
    return f"{type(optimizer).__name__}, learning rate {' / '.join(f'{rate:g}' for rate in rates)}"
