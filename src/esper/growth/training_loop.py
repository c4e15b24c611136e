"""The training loop of `grow`: steps over batches, evaluations, checkpoints, and the result.

`Training` holds the model, the data, the optimiser and the grower. Most of the functions after it handle one batch: compute its loss, move
it to the device, and count its samples.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice
from operator import length_hint
from typing import Any

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
    Schedules,
    check_precision,
    is_stepped_per_step,
    optimizers_from,
    scheduler_from,
)
from esper.growth.batches import (
    ConstantPredictor,
    Listener,
    LossFunction,
    PairLoss,
    StepLoss,
    ValidationLoss,
    check_data,
    check_loader,
    checked,
    example_of,
    explained,
    pair_of,
    samples_of,
    size_of,
    validation_loss,
)
from esper.growth.config import GrowthError, TrainingConfig
from esper.growth.events import DECLARED, GrowthStarted
from esper.growth.grower import Grower
from esper.growth.host.isolation import evaluated, isolated
from esper.growth.host.slotted import add_slots
from esper.growth.lifecycle.governor import Diverged, LossRange
from esper.growth.lifecycle.stages import Controller, counted
from esper.growth.measure.contribution import REMEDY, Evaluate, Losses, losses_of
from esper.growth.measure.readout import ReadoutSamples
from esper.growth.metrics import Metric, MetricSums, check_functions
from esper.growth.run import Grown, GrowthRun, Status, finished
from esper.growth.telemetry import GrowthTelemetry
from esper.growth.trials import Stateful
from esper.profiling import BACKWARD, DATA_WAIT, FORWARD, OPTIMIZER, TELEMETRY, Part, Profiler
from esper.runs import Event
from esper.text_table import did_you_mean


class _Stopped(Exception):
    """The run was asked to stop within a trial."""


class Training:
    """Data, optimiser, schedule and GradScaler for one training of a model, which is changed in place. Call `run` once."""

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
        metrics: Mapping[str, Metric] | None = None,
    ) -> None:
        self.model, self.train_loader, self.val_loader, self.step_loss = model, train_loader, val_loader, step_loss
        self.epochs, self.config, self.metrics = epochs, config, check_functions(metrics)
        if config.best_by is not None and config.best_by not in self.metrics:
            raise GrowthError(
                f"best_by={config.best_by!r} is not a metric of this training; "
                + did_you_mean(
                    config.best_by,
                    self.metrics,
                    otherwise=f"it has {', '.join(self.metrics)}" if self.metrics else f"pass metrics={{{config.best_by!r}: ...}}",
                )
            )
        self._metrics_before: dict[str, float] = {}  # on the validation data before any training
        self._prepared: tuple[Grower, Losses] | None = None  # the grower, and the validation losses before any training
        self._has_samples = True  # the losses of validation samples can be computed, and their mean is the loss of the batch
        self._run: GrowthRun | None = None
        self._loss_before = math.nan  # mean validation loss before any training
        self.profiler: Profiler | None = None  # set before `run` to profile some steps
        self.listeners: list[Callable[[Event], None]] = []  # called with every event, after the run has written it
        self.telemetry: GrowthTelemetry | None = None  # None: nobody gets the events
        check_loader(train_loader, "training")
        check_loader(val_loader, "validation")
        self.device = device_of(model)
        check_precision(model, config.precision, self.device)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not trained:
            raise GrowthError("all parameters of the model are frozen (requires_grad is False); there is nothing to train")
        self.optimizers = optimizers_from(make_optimizer, trained)
        self.scheduler = scheduler_from(make_scheduler, self.optimizers)
        if self.scheduler is None and config.step_schedule != "auto":
            raise GrowthError(
                f"step_schedule={config.step_schedule!r} needs a schedule, and there is none; pass scheduler=lambda optimizer: ..."
            )
        steps = math.ceil(length_hint(train_loader) / config.accumulate) or None  # per epoch; None if the loader has no length
        self._is_stepped_per_step = is_stepped_per_step(self.scheduler, config.step_schedule, epochs=epochs, steps=steps)
        self.scaler = GradScaler(self.device.type) if config.precision == "float16" else None
        self._is_trying = False  # a copy of the training makes a trial
        self._has_stepped = False  # the optimiser has stepped in the last call of _step_optimizer; a GradScaler may skip the step
        for optimizer in self.optimizers:
            optimizer.register_step_post_hook(self._note_step)

    def prepare(self, controller: Controller | str) -> Grower:
        """Evaluate the model once, add slots and make the grower. Mistakes in the arguments are raised here, before anything is written."""
        if self._prepared is not None:
            return self._prepared[0]
        before, example, scale = self._first_look()
        slotted = add_slots(self.model, example, slots=self.config.slots)
        try:
            grower = Grower(
                slotted,
                self.optimizers,
                scaler=self.scaler,
                scheduler=self.scheduler,
                controller=controller,
                config=self.config,
                epochs=self.epochs,
                scale=scale,
                keep=self.config.keep,
                best_by=self.config.best_by,
                on_event=self._emit,
            )
        except BaseException:
            slotted.remove()
            raise
        self._prepared = grower, before
        return grower

    def _first_look(self) -> tuple[Losses, Any, LossRange | None]:
        """Evaluate the untrained model. Return its losses, an example input, and the `LossRange` (None if unknown).

        The example input holds the arguments of the model's first call, as a listener saw them. If it saw no call, the example is made from
        the first batch.
        """
        constant = ConstantPredictor(self.step_loss.loss_fn) if isinstance(self.step_loss, PairLoss) else None
        readout = ReadoutSamples()
        found: list[ValidationLoss] = []
        first = None  # the first batch
        listener, sums = Listener(self.model), self._metric_sums()
        try:
            with isolated(self.model), torch.no_grad(), sums.recording():
                self.model.eval()
                for number, raw in enumerate(self.val_loader, start=1):
                    batch = move(raw, self.device)
                    first = batch if first is None else first
                    where = f"batch {number} of the validation loader"
                    try:
                        found.append(self._validation_loss(batch, by_sample=True))
                    except Exception as error:
                        if explanation := explained(error, size_of(batch), where):
                            raise explanation from error
                        raise
                    check_data(batch, float(found[-1].loss), where)
                    sums.note(batch, size_of(batch), where=where)
                    if constant is not None:
                        inputs, targets = pair_of(batch)
                        constant.note(listener.outputs, targets)
                        readout.note(inputs, targets)
        finally:
            listener.stop()
        if not found:
            raise GrowthError("the validation loader yields nothing; it needs at least one batch")
        self._metrics_before = sums.means()
        losses = losses_of(lambda: self._finest(found))
        return losses, example_of(first) if listener.heard is None else listener.heard, self._loss_range(constant, readout, losses)

    def _loss_range(self, constant: ConstantPredictor | None, readout: ReadoutSamples, before: Losses) -> LossRange | None:
        """Return the `LossRange` of a constant predictor, or that of the losses before the training as a guess; None if unknown."""
        uninformed = self.config.governor.uninformed_loss
        if uninformed is None:
            with self._autocast():
                uninformed = None if constant is None else constant.loss()
        if uninformed is not None:
            return LossRange.of(uninformed, loss_range=self.config.loss_range, readout=readout.loss())
        return LossRange.of(before.mean, loss_range=self.config.loss_range, is_guess=True) if before.are_finite else None

    def run(self, controller: Controller | str, run: GrowthRun | None = None, *, may_interrupt: bool = False) -> Grown:
        """Train the model and return the result. With `may_interrupt`, Ctrl-C stops the training; otherwise it raises."""
        began = time.perf_counter()
        self.prepare(controller)
        assert self._prepared is not None
        (grower, before), self._run = self._prepared, run
        if run is not None or self.listeners:
            self.telemetry = GrowthTelemetry(
                self.config.telemetry, escalation=self.config.telemetry_escalation, thresholds=self.config.thresholds
            )
        grower.telemetry = self.telemetry
        try:
            # A resumed run has the validation loss before any training in its checkpoint.
            self._loss_before = before.mean if run is None else run.restore(grower, self.train_loader, before.mean)
            had_finished = run is not None and run.is_resumed and self._is_over(grower)  # there is nothing left to train
            if self._run is not None:
                self._run.emit(msgspec.structs.replace(DECLARED, total=self.epochs))
            self._emit(self._started(grower, before))
            status = self._train(grower, may_interrupt=may_interrupt)
        except Diverged as error:
            error.model = grower.bake()
            raise
        except BaseException:
            grower.stop()
            grower.slotted.remove()
            raise
        return self._finish(grower, status, time.perf_counter() - began, had_finished=had_finished)

    def _started(self, grower: Grower, losses: Losses) -> Event:
        host, scale = grower.slotted.discovery.host, grower.lifecycles.scale
        return GrowthStarted(
            epoch=grower.epoch,
            epochs=self.epochs,
            controller=grower.controller.name,
            raise_mode=self.config.lifecycle.raise_mode,
            slots=list(grower.slotted.slots),
            parameters=host.parameters,
            flops=host.flops,
            optimizer=describe_optimizers(self.optimizers),
            device=str(self.device),
            uninformed_loss=None if scale is None else scale.uninformed,
            metrics=self._metrics_before,
            note="; ".join(filter(None, [objection(grower), *self._notes(scale, losses)])),
        )

    def _notes(self, scale: LossRange | None, losses: Losses) -> Iterator[str]:
        """Yield remarks about the losses, for the note of GrowthStarted."""
        if scale is not None and scale.is_guess:
            yield (
                f"losses are compared with {scale.uninformed:.4g}, the validation loss before the training, because the loss of a constant "
                "predictor cannot be computed from step_loss; if you know it, set governor.uninformed_loss"
            )
        if losses.unit == "batches":
            yield (
                f"intervals rest on {counted(len(losses.values), losses.unit)} of validation data, because the losses of single samples "
                f"are not known{'' if losses.have_spread else ', and a single batch decides nothing: no seed can be kept'}; {REMEDY}"
            )

    def _emit(self, event: Event) -> None:
        if self.telemetry is None:
            return
        with self._part(TELEMETRY):
            shown = self.telemetry.shown(event)
            if self._run is not None and shown is not None:
                self._run.emit(shown)
            for listener in self.listeners:
                listener(event)

    def _part(self, part: Part) -> AbstractContextManager[None]:
        """Return a mark of the profiler; one that does nothing if no step is profiled."""
        return nullcontext() if self.profiler is None else part

    def _train(self, grower: Grower, *, may_interrupt: bool) -> Status:
        """Train all epochs that are left, with a checkpoint after each, and before the first."""
        try:
            if self._run is None or not self._run.is_resumed:
                grower.begin()
                self._save(grower, at_end_of_epoch=True)
            while not self._is_over(grower):
                if self._should_stop() or not (self._try_out(grower) if grower.trials else self._go_on(grower)):
                    return "stopped"
                self._save(grower, at_end_of_epoch=True)
        except KeyboardInterrupt:
            # The interrupt came in the middle of a step. A checkpoint of that state would be useless, so keep the last one.
            if not may_interrupt:
                raise
            return "stopped"
        return "finished" if grower.epoch >= self.epochs else "stopped early"

    def _is_over(self, grower: Grower) -> bool:
        """Return whether the last epoch has ended: all epochs are trained, or the validation loss no longer improves."""
        return grower.history.steps == 0 and (grower.epoch >= self.epochs or grower.lifecycles.is_stuck())

    def _should_stop(self) -> bool:
        return self._run is not None and self._run.should_stop()

    def _save(self, grower: Grower, *, at_end_of_epoch: bool) -> None:
        """Write a checkpoint if the run has a folder."""
        if self._run is not None and not self._is_trying:
            self._run.save(grower, self.train_loader, self._loss_before, at_end_of_epoch=at_end_of_epoch)

    def _train_epoch(self, grower: Grower) -> bool:
        """Train one epoch, or the rest of one after a resume. Return False if the run was asked to stop."""
        self.model.train()
        batches = iter(self.train_loader)
        number = grower.history.steps * self.config.accumulate + 1  # of the next batch in the epoch, for errors
        grower.history.start_clock(self.device)
        while group := self._next_batches(batches, grower):
            self._train_step(group, grower, first=number)
            number += len(group)
            if self.profiler is not None:
                self.profiler.step()
            if self._should_stop():
                self._save(grower, at_end_of_epoch=False)
                return False
        if not grower.history.steps:
            raise GrowthError("the training loader yields nothing; it needs at least one batch")
        return True

    def _go_on(self, grower: Grower) -> bool:
        """Train for an epoch and decide. Return False if the run was asked to stop."""
        if not self._train_epoch(grower):
            return False
        self._end_epoch(grower)
        return True

    def _try_out(self, grower: Grower) -> bool:
        """Make the trials that the controller wants. Return False if the run was asked to stop."""

        def train() -> None:
            for _ in range(self.config.lookahead.epochs):
                if not self._is_over(grower) and not self._go_on(grower):
                    raise _Stopped

        self._is_trying = True
        try:
            grower.try_out(train, also=[self.train_loader] if isinstance(self.train_loader, Stateful) else [])
        except _Stopped:
            return False
        finally:
            self._is_trying = False
        return True

    def _next_batches(self, batches: Iterator[Any], grower: Grower) -> list[Any]:
        """Return the batches of the next step, empty at the end of the epoch, and record how long the loader took."""
        began = time.perf_counter()
        with self._part(DATA_WAIT):
            group = list(islice(batches, self.config.accumulate))
        grower.history.data_wait = (grower.history.data_wait or 0.0) + time.perf_counter() - began
        return group

    def _train_step(self, raw: Sequence[Any], grower: Grower, *, first: int) -> None:
        """Make one step of the optimiser by the mean loss over the samples of the batches. `first` is the number of the first batch."""
        # The loss of the step is the sum of the batches' losses, each weighted by its share of the samples.
        sizes = [size_of(batch) for batch in raw]
        shares = [size / sum(sizes) if any(sizes) else 1 / len(sizes) for size in sizes]
        batches, losses = [], []
        for number, (part, share) in enumerate(zip(raw, shares, strict=True), start=first):
            batch = move(part, self.device)
            if number == 1 and self.telemetry is not None and self.telemetry.is_on:
                self.telemetry.note_inputs(batch)
            # Seeds in the shadow can reuse one recorded forward pass, so record only if the step has a single batch.
            loss = self._train_loss(batch, grower if len(raw) == 1 else None, f"batch {number} of the training loader")
            loss = loss if len(raw) == 1 else loss * share
            with self._part(BACKWARD):
                torch.autograd.backward(loss if self.scaler is None else self.scaler.scale(loss))
            batches.append(batch)
            losses.append(loss.detach())
        with self._part(OPTIMIZER):
            self._step_optimizer(grower.history.steps + 1)
        rollbacks = grower.rollbacks
        mean_loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        grower.after_step(mean_loss, closure=lambda: self._mean_loss(batches, shares), samples=sum(sizes))
        # If this step led to a rollback, look for NaN or infinite values in its batches and name them in an error.
        if grower.rollbacks > rollbacks:
            for number, batch in enumerate(batches, start=first):
                check_data(batch, math.nan, f"batch {number} of the training loader")

    def _train_loss(self, batch: Any, grower: Grower | None, where: str) -> Tensor:
        """Return the loss of a training batch, which errors call `where`. If a grower is given, it records the forward pass."""
        try:
            with self._part(FORWARD), nullcontext() if grower is None else grower.recording():
                loss = self._loss(batch)
        except Exception as error:
            if explanation := explained(error, size_of(batch), where):
                raise explanation from error
            raise
        if not loss.requires_grad:
            raise GrowthError(
                "the training loss has no gradient; compute it from the model's outputs, without detach(), no_grad() or argmax()"
            )
        return loss

    def _step_optimizer(self, step: int) -> None:
        """Clip the gradient, step the optimiser, clear the gradients, and step the schedule if it counts steps. `step` is for errors."""
        if self.config.max_grad_norm is not None:
            if self.scaler is not None:
                for optimizer in self.optimizers:
                    self.scaler.unscale_(optimizer)
            groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
            clip_grad_norm_([parameter for group in groups for parameter in group["params"]], self.config.max_grad_norm)
        self._has_stepped = False
        for optimizer in self.optimizers:
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        if self._is_stepped_per_step and self._has_stepped:
            try:
                self.scheduler.step()
            except ValueError as error:
                raise GrowthError(f"the schedule failed at step {step} of the epoch: {error}") from error

    def _note_step(self, *_: Any) -> None:
        """Hook that runs after a step of the optimiser, but not after one that the GradScaler skipped."""
        self._has_stepped = True

    def _mean_loss(self, batches: Sequence[Any], shares: Sequence[float]) -> Tensor:
        """Return the loss of a step, computed again: the closure for seeds in the shadow."""
        if len(batches) == 1:
            return self._loss(batches[0])
        return torch.stack([self._loss(batch) * share for batch, share in zip(batches, shares, strict=True)]).sum()

    def _end_epoch(self, grower: Grower) -> None:
        """Evaluate, let the grower decide, and step a schedule that counts epochs."""
        # Step the schedule before `after_epoch`, so that its snapshot holds the learning rate of the next epoch. ReduceLROnPlateau needs
        # the validation loss and has to be stepped afterwards.
        parts = self.scheduler.parts if isinstance(self.scheduler, Schedules) else [self.scheduler]
        is_plateau = any(isinstance(part, ReduceLROnPlateau) for part in parts)
        if self.scheduler is not None and not self._is_stepped_per_step and not is_plateau:
            self.scheduler.step()
        evaluate, metrics = self._evaluation(grower, with_metrics=bool(self.metrics))
        ended = grower.after_epoch(evaluate, metrics=metrics)
        if is_plateau:
            self.scheduler.step(ended.val_loss)

    def _evaluation(self, grower: Grower, *, with_metrics: bool) -> tuple[Evaluate, dict[str, Callable[[], float]]]:
        """Return a function that evaluates the validation data, and functions of the metrics, which its first call computes.

        The losses of single samples take time, and are computed only where seeds are on trial.
        """
        by_sample = bool(grower.lifecycles.on_trial())
        sums = self._metric_sums() if with_metrics else None
        passes = iter([] if sums is None else [sums])

        def evaluate() -> list[Any]:
            return self._finest(list(self._evaluate(grower, next(passes, None), by_sample=by_sample)))

        return evaluate, {} if sums is None else {name: partial(sums.mean, name) for name in self.metrics}

    def _finest(self, found: Sequence[ValidationLoss]) -> list[Any]:
        """Return what `losses_of` expects: the losses of all samples if they are known and agree with those of the batches."""
        by_sample = samples_of(found) if self._has_samples else None
        if by_sample is not None:
            return by_sample
        if any(one.by_sample is not None for one in found):
            self._has_samples = False  # such as of a sum over samples, or of classes with weights
        return [(one.loss, one.samples) for one in found]

    def _metric_sums(self) -> MetricSums:
        return MetricSums(self.model, self.metrics, of_pairs=hasattr(self.step_loss, "loss_fn"))

    def _evaluate(self, grower: Grower | None, sums: MetricSums | None = None, *, by_sample: bool = False) -> Iterator[ValidationLoss]:
        """Yield the loss of every validation batch. The random streams of the training are not advanced.

        `sums` takes the metrics of every batch, from the same forward passes.
        """
        with evaluated(self.model) as in_inference, nullcontext() if sums is None else sums.recording():
            for number, raw in enumerate(self.val_loader, start=1):
                batch = move(raw, self.device)
                with in_inference():
                    loss = self._validation_loss(batch, by_sample=by_sample)
                if sums is not None:
                    sums.note(batch, size_of(batch), where=f"batch {number} of the validation loader")
                yield loss
                if grower is not None:
                    grower.count_evaluation(size_of(batch))

    def _loss(self, batch: Any) -> Tensor:
        with self._autocast():
            loss = checked(self.step_loss(self.model, batch), size_of(batch))
            return loss if loss.numel() == 1 else loss.mean()

    def _validation_loss(self, batch: Any, *, by_sample: bool) -> ValidationLoss:
        """Return the loss of a validation batch, with the losses of its samples if they are asked for and may be known."""
        with self._autocast():
            return validation_loss(self.step_loss, self.model, batch, by_sample=by_sample and self._has_samples)

    def _autocast(self) -> AbstractContextManager[Any]:
        precision = self.config.precision
        return nullcontext() if precision == "float32" else torch.autocast(self.device.type, dtype=getattr(torch, precision))

    def _finish(self, grower: Grower, status: Status, seconds: float, *, had_finished: bool) -> Grown:
        """Prune the seeds that are not fossilized, restore the best state, bake the model, evaluate it and return the result."""
        lifecycles = grower.lifecycles
        # A stopped training may be resumed; its seeds are not entered into the ledger as pruned.
        if status != "stopped":
            for name in lifecycles.living():
                lifecycles.prune(name, "the training is over and it has not earned its place")
        evaluate, metrics = self._evaluation(grower, with_metrics=self.config.best_by is not None)
        restored = grower.restore_best(evaluate, metrics=metrics) if self.config.keep == "best" else None
        model, sums = grower.bake(), self._metric_sums()
        grown = Grown(
            model=model,
            status=status,
            epochs=grower.epoch,
            val_loss_before=self._loss_before,
            val_loss=losses_of(lambda: self._finest(list(self._evaluate(None, sums)))).mean,
            metrics=sums.means(),
            train_losses=tuple(grower.history.train_losses),
            val_losses=tuple(grower.history.val_losses),
            host=grower.slotted.discovery.host,
            added=lifecycles.added(),  # only kept seeds are left
            gflops=grower.history.flops / 1e9,
            rollbacks=grower.rollbacks,
            ledger=grower.ledger,
            controller=grower.controller.name,
            optimizer=describe_optimizers(self.optimizers),
            seconds=seconds,
            folder=None if self._run is None else self._run.folder,
            had_finished=had_finished,
            note=objection(grower),
            best_epoch=None if restored is None else restored.epoch,
        )
        self._emit(finished(grown))
        return grown


def objection(grower: Grower) -> str:
    """Return the controller's reason why nothing can grow in this training, or "" if something can or the controller cannot say."""
    ask = getattr(grower.controller, "why_nothing_can_grow", None)
    return "" if ask is None else str(ask(grower.epochs))


def describe_optimizers(optimizers: Sequence[Optimizer]) -> str:
    """Return a text such as "AdamW, learning rate 0.001"; the learning rate is the one before the schedule's first step."""
    found = []
    for optimizer in optimizers:
        rates = sorted({float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups})
        found.append(f"{type(optimizer).__name__}, learning rate {' / '.join(f'{rate:g}' for rate in rates)}")
    return " and ".join(found)


def step_loss_of(loss_fn: LossFunction | None, step_loss: StepLoss | None) -> StepLoss:
    """Return the step loss: `step_loss` itself, or a `PairLoss` of `loss_fn`. One of them is None."""
    if (loss_fn is None) == (step_loss is None):
        raise GrowthError("pass either loss_fn, for batches of (inputs, targets), or step_loss=lambda model, batch: ..., for anything else")
    name, given = ("loss_fn", loss_fn) if step_loss is None else ("step_loss", step_loss)
    if isinstance(given, type):
        raise GrowthError(f"{name} is the class {given.__name__}; pass an instance: {name}={given.__name__}()")
    if not callable(given):
        raise GrowthError(f"{name} is a {type(given).__name__}, and must be a function, such as torch.nn.functional.cross_entropy")
    if step_loss is not None:
        return step_loss
    assert loss_fn is not None
    return PairLoss(loss_fn)


def move(batch: Any, device: torch.device) -> Any:
    """Return the batch on another device. Mappings, tuples and lists without a `to` method are moved item by item."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: move(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(value, device) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(move(value, device) for value in batch)
    return batch


def device_of(model: nn.Module) -> torch.device:
    return next((tensor.device for tensors in (model.parameters(), model.buffers()) for tensor in tensors), torch.device("cpu"))
