"""`grow`: the whole training loop around a grower, for a model, two loaders and a loss.

grown = esper.grow(model, train_loader, val_loader, loss_fn=F.cross_entropy, epochs=30)
print(grown.report())
torch.save(grown.model.state_dict(), "model.pt")
"""

from __future__ import annotations

import copy
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from operator import length_hint
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from esper.growth.arguments import (
    MakeHostOptimizer,
    MakeScheduler,
    check_call,
    check_precision,
    is_stepped_per_step,
    optimizer_from,
    scheduler_from,
    training_config,
)
from esper.growth.batches import (
    ConstantPredictor,
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
    pair_of,
    size_of,
    step_loss_of,
)
from esper.growth.config import GrowthConfig, GrowthError, TrainingConfig
from esper.growth.events import GrowthStarted
from esper.growth.grower import Grower
from esper.growth.host.isolation import isolated
from esper.growth.host.saving import save
from esper.growth.host.slotted import add_slots
from esper.growth.lifecycle.governor import Diverged
from esper.growth.lifecycle.stages import Controller, LossScale, Stage
from esper.growth.measure.contribution import Losses, losses_of
from esper.growth.measure.rent import total
from esper.growth.report.html import REPORT, write_report
from esper.growth.report.summary import ProgressLines
from esper.growth.run import MODEL, NO_RUN, Grown, GrowthRun, Status, finished, open_run
from esper.runs import Event, Sink, WandbMode, check_installed, sinks_in

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
    step_schedule: Literal["auto", "epoch", "step"] = "auto",
    precision: Literal["float32", "bfloat16", "float16"] = "float32",
    accumulate: int = 1,
    max_grad_norm: float | None = None,
    controller: Controller | str = "heuristic",
    config: GrowthConfig | None = None,
    run: Path | str | None = None,
    resume: bool = False,
    tensorboard: bool = False,
    wandb: WandbMode | None = None,
    progress: bool | None = None,
) -> Grown:
    """Trains a copy of the model for some epochs and grows it where that pays. The model itself is not touched.

    A batch is (inputs, targets) with `loss_fn(outputs, targets)`, or anything with `step_loss(model, batch)`. The loaders are iterated as
    they are, on the model's device. `optimizer` makes one for the parameters, and `scheduler` a schedule for it.

    `step_schedule` says when the schedule is stepped: after every "epoch", after every "step" of the optimiser, or "auto": OneCycleLR and
    CyclicLR after every step, all others after every epoch, ReduceLROnPlateau with the validation loss. What a LambdaLR or a schedule of
    your own counts cannot be known; "auto" warns of them, and of schedules that would end long after the training.

    `precision` is that of forward passes, in training and validation, by autocast; "float16" comes with a GradScaler. The weights stay
    float32. `accumulate` batches make one step of the optimiser, with the mean over their samples; the batches that are left at the end of
    an epoch make one too. `max_grad_norm` clips the gradient of the host; `config.seed_optimizer` clips each seed on its own.

    With `run`, everything is kept in that folder, and `resume` goes on with what is there: from the last epoch's end, or from the very step
    where the training loader has a `state_dict`. Ctrl-C ends the training with what is fossilized by then, and the status "stopped". The
    folder gets the model that is returned, for `esper.load(run, model=...)`, and report.html; after Ctrl-C too, and where the training
    diverged, with the model that the governor went back to. After any other error there is the last checkpoint to go on from.

    `tensorboard` and `wandb` ("offline" or "online") also write losses, slots and results into that folder, for those programs to show.

    `progress` prints a line on stderr for every epoch, with what was decided; None: where stderr is a terminal.
    """
    check_call(model, epochs=epochs, config=config, run=run)
    if (tensorboard or wandb) and run is None:
        raise GrowthError("tensorboard and wandb write into the folder of a run; name one: run=...")
    check_installed(tensorboard=tensorboard, wandb=wandb)
    training = Training(
        copy.deepcopy(model),
        train_loader,
        val_loader,
        step_loss_of(loss_fn, step_loss),
        epochs=epochs,
        make_optimizer=optimizer,
        make_scheduler=scheduler,
        config=training_config(
            config, precision=precision, accumulate=accumulate, max_grad_norm=max_grad_norm, step_schedule=step_schedule
        ),
    )
    if progress or (progress is None and sys.stderr is not None and sys.stderr.isatty()):
        training.on_event = ProgressLines(type(model).__name__)
    grower = training.prepare(controller)
    if why := objection(grower):
        warnings.warn(why, stacklevel=2)

    def sinks() -> list[Sink]:
        settings = msgspec.to_builtins(training.config)
        return [] if run is None else sinks_in(Path(run), tensorboard=tensorboard, wandb=wandb, config=settings)

    with open_run(run, resume=resume, config=training.config, results=(MODEL, REPORT), sinks=sinks) as opened:
        try:
            grown = training.run(controller, opened, may_interrupt=True)
        except Diverged as error:
            _leave_result(
                opened, error.model if isinstance(error.model, nn.Module) else None, otherwise="it is the `model` of the error that follows"
            )
            raise
        _leave_result(opened, grown.model, otherwise="keep the model by grown.save(path)")
        return grown


def _leave_result(run: GrowthRun, model: object, *, otherwise: str) -> None:
    """Write the model and the report into the folder of a run. A failure is a warning, so that the result of the training is not lost."""
    if run.folder is None:
        return
    try:
        if isinstance(model, nn.Module):
            save(model, run.folder / MODEL)
        run.flush()  # the report is made from the file of events
        write_report(run.folder)
    except Exception as error:
        warnings.warn(
            f"the model and the report could not be written into {run.folder}: {error}; {otherwise}",
            RuntimeWarning,
            stacklevel=3,
        )


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
        config: TrainingConfig,
    ) -> None:
        self.model, self.train_loader, self.val_loader, self.step_loss = model, train_loader, val_loader, step_loss
        self.epochs, self.config = epochs, config
        self._prepared: tuple[Grower, Losses] | None = None
        self._run = NO_RUN
        self.on_event: Callable[[Event], None] = lambda event: None  # hears every event that the run keeps
        check_loader(train_loader, "training")
        check_loader(val_loader, "validation")
        self.device = device_of(model)
        check_precision(model, config.precision, self.device)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not trained:
            raise GrowthError("all parameters of the model are frozen (requires_grad is False); there is nothing to train")
        self.optimizer = optimizer_from(make_optimizer, trained)
        self.scheduler = scheduler_from(make_scheduler, self.optimizer)
        if self.scheduler is None and config.step_schedule != "auto":
            raise GrowthError(
                f"step_schedule {config.step_schedule!r} is for a schedule, and there is none; pass scheduler=lambda optimizer: ..."
            )
        steps = math.ceil(length_hint(train_loader) / config.accumulate) or None  # in an epoch; None: the loader does not tell
        self._is_stepped_per_step = is_stepped_per_step(self.scheduler, config.step_schedule, epochs=epochs, steps=steps)
        self.scaler = GradScaler(self.device.type) if config.precision == "float16" else None
        self._has_stepped = False  # a GradScaler skips steps
        self.optimizer.register_step_post_hook(self._note_step)

    def prepare(self, controller: Controller | str) -> Grower:
        """The first look at model, loss, data and settings. What is wrong with them comes up here, before anything is written."""
        if self._prepared is not None:
            return self._prepared[0]
        before, example, scale = self._first_look()
        slotted = add_slots(self.model, example, slots=self.config.slots)
        try:
            grower = Grower(
                slotted,
                self.optimizer,
                scaler=self.scaler,
                scheduler=self.scheduler,
                controller=controller,
                config=self.config,
                epochs=self.epochs,
                scale=scale,
                on_event=self._emit,
            )
        except BaseException:
            slotted.remove()
            raise
        self._prepared = grower, before
        return grower

    def run(self, controller: Controller | str, run: GrowthRun = NO_RUN, *, may_interrupt: bool = False) -> Grown:
        """With `may_interrupt`, a KeyboardInterrupt stops the training; without, it comes through."""
        began = time.perf_counter()
        self.prepare(controller)
        assert self._prepared is not None
        (grower, first), self._run = self._prepared, run
        try:
            before = run.restore(grower, self.train_loader, first.mean)
            had_finished = run.is_resumed and self._is_over(grower)
            self._emit(self._started(grower, first))
            status = self._train(grower, run, before, may_interrupt=may_interrupt)
        except Diverged as error:
            error.model = grower.bake()
            raise
        except BaseException:
            grower.stop()
            grower.slotted.remove()
            raise
        return self._finish(grower, run, status, before, time.perf_counter() - began, had_finished=had_finished)

    def _train(self, grower: Grower, run: GrowthRun, before: float, *, may_interrupt: bool) -> Status:
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
        return grower.history.steps == 0 and (grower.epoch >= self.epochs or grower.host_growth.is_stuck())

    def _train_epoch(self, grower: Grower, run: GrowthRun, before: float) -> bool:
        """False where it was stopped."""
        self.model.train()
        batches, number = iter(self.train_loader), grower.history.steps * self.config.accumulate + 1
        grower.history.watch(self.device)
        while group := self._next_batches(batches, grower):
            self._train_step(group, grower, first=number)
            number += len(group)
            if run.should_stop():
                run.save(grower, self.train_loader, before, at_end_of_epoch=False)
                return False
        if not grower.history.steps:
            raise GrowthError("the training loader yields nothing; it needs at least one batch")
        grower.history.watched()
        return True

    def _next_batches(self, batches: Iterator[Any], grower: Grower) -> list[Any]:
        """Return those of the next step, and note how long the loader took for them; nothing at the end of the epoch."""
        began = time.perf_counter()
        group = list(islice(batches, self.config.accumulate))
        grower.history.data_wait = (grower.history.data_wait or 0.0) + time.perf_counter() - began
        return group

    def _train_step(self, raw: Sequence[Any], grower: Grower, *, first: int) -> None:
        """One step of the optimiser by the mean loss over the samples of some batches; `first` is the number of the first of them."""
        sizes = [size_of(batch) for batch in raw]
        shares = [size / sum(sizes) if any(sizes) else 1 / len(sizes) for size in sizes]
        batches, losses = [], []
        for number, (part, share) in enumerate(zip(raw, shares, strict=True), start=first):
            batch = move(part, self.device)
            # What a seed in the shadow does not have to compute again is recorded for one forward pass, and here may be several.
            loss = self._train_loss(batch, grower if len(raw) == 1 else None, f"batch {number} of the training loader")
            loss = loss if len(raw) == 1 else loss * share
            torch.autograd.backward(loss if self.scaler is None else self.scaler.scale(loss))
            batches.append(batch)
            losses.append(loss.detach())
        self._step_optimizer(grower.history.steps + 1)
        grower.history.skipped += not self._has_stepped
        rollbacks = grower.rollbacks
        total = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        grower.after_step(total, closure=lambda: self._mean_loss(batches, shares), samples=sum(sizes))
        if grower.rollbacks > rollbacks:
            for number, batch in enumerate(batches, start=first):
                check_data(batch, math.nan, f"batch {number} of the training loader")

    def _step_optimizer(self, step: int) -> None:
        if self.config.max_grad_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            clip_grad_norm_(
                [parameter for group in self.optimizer.param_groups for parameter in group["params"]], self.config.max_grad_norm
            )
        self._has_stepped = False
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        if self._is_stepped_per_step and self._has_stepped:
            try:
                self.scheduler.step()
            except ValueError as error:
                raise GrowthError(f"the schedule fails at step {step} of the epoch: {error}") from error

    def _note_step(self, *_: Any) -> None:
        self._has_stepped = True

    def _end_epoch(self, grower: Grower) -> None:
        # Before the epoch is over, so that a snapshot holds the schedule as the next epoch needs it. One that follows the loss has to wait.
        is_plateau = isinstance(self.scheduler, ReduceLROnPlateau)
        if self.scheduler is not None and not self._is_stepped_per_step and not is_plateau:
            self.scheduler.step()
        ended = grower.after_epoch(lambda: list(self._evaluate(grower)))
        if is_plateau:
            self.scheduler.step(ended.val_loss)

    def _train_loss(self, batch: Any, grower: Grower | None, where: str) -> Tensor:
        """The loss of a batch of the user's own step, recorded by the grower where one is given."""
        try:
            with nullcontext() if grower is None else grower.recording():
                loss = self._loss(batch)
        except Exception as error:
            if told := explained(error, batch, where):
                raise told from error
            raise
        if not loss.requires_grad:
            raise GrowthError(
                "the training loss has no gradient; compute it from the model's outputs, without detach(), no_grad() or argmax()"
            )
        return loss

    def _mean_loss(self, batches: Sequence[Any], shares: Sequence[float]) -> Tensor:
        """The loss of a step once more."""
        if len(batches) == 1:
            return self._loss(batches[0])
        return torch.stack([self._loss(batch) * share for batch, share in zip(batches, shares, strict=True)]).sum()

    def _loss(self, batch: Any) -> Tensor:
        with self._autocast():
            return checked(self.step_loss(self.model, batch))

    def _autocast(self) -> AbstractContextManager[Any]:
        precision = self.config.precision
        return nullcontext() if precision == "float32" else torch.autocast(self.device.type, dtype=getattr(torch, precision))

    def _evaluate(self, grower: Grower | None) -> Iterator[tuple[Tensor, int]]:
        """The loss of every validation batch, and its samples. Draws nothing from the random streams that training uses."""
        with isolated(self.model), torch.no_grad():
            self.model.eval()
            for raw in self.val_loader:
                batch = move(raw, self.device)
                yield self._loss(batch).detach(), size_of(batch)
                if grower is not None:
                    grower.count_evaluation(size_of(batch))

    def _first_look(self) -> tuple[Losses, Any, LossScale | None]:
        """The validation losses before anything was done, what the model is called with, and what losses are relative to."""
        loss_fn = getattr(self.step_loss, "loss_fn", None)
        constant = None if loss_fn is None else ConstantPredictor(loss_fn)
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
                        if told := explained(error, batch, where):
                            raise told from error
                        raise
                    check_data(batch, loss, where)
                    found.append((loss, size_of(batch)))
                    if constant is not None:
                        constant.note(listener.outputs, pair_of(batch)[1])
        finally:
            listener.stop()
        if not found:
            raise GrowthError("the validation loader yields nothing; it needs at least one batch")
        losses = losses_of(lambda: found)
        return losses, example_of(first) if listener.heard is None else listener.heard, self._scale(constant, losses)

    def _scale(self, constant: ConstantPredictor | None, before: Losses) -> LossScale | None:
        """By a constant predictor where the outputs are known, else by the validation loss before the training."""
        if self.config.governor.uninformed_loss is not None:
            return None  # the grower knows it from the config
        with self._autocast():
            uninformed = None if constant is None else constant.loss()
        if uninformed is not None:
            return LossScale.of(uninformed, loss_range=self.config.loss_range)
        return LossScale.of(before.mean, loss_range=self.config.loss_range, is_guess=True) if before.are_finite else None

    def _emit(self, event: Event) -> None:
        self._run.emit(event)
        self.on_event(event)

    def _started(self, grower: Grower, losses: Losses) -> Event:
        host, scale = grower.slotted.discovery.host, grower.host_growth.scale
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
            uninformed_loss=None if scale is None else scale.uninformed,
            note="; ".join(filter(None, [objection(grower), *self._notes(scale, losses)])),
        )

    def _notes(self, scale: LossScale | None, losses: Losses) -> Iterator[str]:
        if scale is not None and scale.is_guess:
            yield (
                f"losses are judged as shares of {scale.uninformed:.4g}, the validation loss before the training, for step_loss hides what "
                "a constant output would cost; if you know that, set governor.uninformed_loss"
            )
        if not losses.have_spread:
            yield ONE_BATCH

    def _finish(self, grower: Grower, run: GrowthRun, status: Status, before: float, seconds: float, *, had_finished: bool) -> Grown:
        lifecycles = grower.lifecycles
        if status != "stopped":
            for name in lifecycles.living():
                lifecycles.prune(name, "the training is over and it has not earned its place")
        model = grower.bake()
        grown = Grown(
            model=model,
            status=status,
            epochs=grower.epoch,
            val_loss_before=before,
            val_loss=losses_of(lambda: list(self._evaluate(None))).mean,
            train_losses=tuple(grower.history.train_losses),
            val_losses=tuple(grower.history.val_losses),
            host=grower.slotted.discovery.host,
            added=total(
                lifecycles.cost(name) for name, backend in lifecycles.backends.items() if backend.life.stage is Stage.FOSSILIZED
            ),  # what bake() keeps
            gflops=grower.history.flops / 1e9,
            rollbacks=grower.rollbacks,
            ledger=grower.ledger,
            controller=grower.controller.name,
            optimizer=describe_optimizer(self.optimizer),
            seconds=seconds,
            folder=run.folder,
            had_finished=had_finished,
            note=objection(grower),
        )
        self._emit(finished(grown))
        return grown


def objection(grower: Grower) -> str:
    """Why nothing could ever grow as it is planned, where the controller knows; empty where something could."""
    ask = getattr(grower.controller, "why_nothing_can_grow", None)
    return "" if ask is None else str(ask(grower.epochs))


def describe_optimizer(optimizer: Optimizer) -> str:
    """Such as "AdamW, learning rate 0.001"; the rate is the one it began with."""
    rates = sorted({float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups})
    return f"{type(optimizer).__name__}, learning rate {' / '.join(f'{rate:g}' for rate in rates)}"
