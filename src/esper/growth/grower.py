"""Grow a model inside a training loop of the user's own.

A `Grower` is called after every optimiser step and after every epoch. It trains the seeds, asks the controller for a decision once per
epoch, and lets the governor restore a healthy state when the training breaks down.

    slotted = add_slots(model, example_input=x[:2])
    grower = Grower(slotted, optimizer, epochs=30)
    for epoch in range(30):
        for x, y in loader:
            loss = loss_fn(slotted(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            grower.after_step(loss)
        grower.after_epoch(evaluate)            # evaluate() returns the losses of the samples of every validation batch
    grower.restore_best(evaluate)               # optional: the state after the best epoch
    model = slotted.bake()

Seeds step whenever the user's optimiser steps, and their gradients are cleared whenever the host's are. `after_step` records the loss,
advances the alphas and checks that the loss is finite.

`save` writes everything that is needed to resume, between two steps. Load it into a new grower that was made in the same way:

    grower.save("checkpoints")
    grower = Grower(add_slots(Net(), example_input=x[:2]), optimizer, epochs=30)
    grower.load("checkpoints")

Under DistributedDataParallel every rank runs this loop. The grower averages the seeds' gradients over the ranks, and the controller of
rank 0 decides for all ranks.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from esper.display import Card
from esper.growth.arguments import check_alphas, check_fit_together, check_grown_are_trained, check_keep, check_ranks, players, ranks_of
from esper.growth.config import GrowthConfig, GrowthError
from esper.growth.controllers.baselines import as_controller
from esper.growth.events import BestRestored, EpochEnded, Folded
from esper.growth.host.foreign_averages import growing_averages, load_averages
from esper.growth.host.isolation import unwrap
from esper.growth.host.slotted import Slotted
from esper.growth.host.units import layer_of, part_of
from esper.growth.lifecycle.backend import ModuleBackend, make_backends
from esper.growth.lifecycle.decisions import carry_out, epoch_ended, growth_state, shrink_least
from esper.growth.lifecycle.governor import Diverged, LossRange
from esper.growth.lifecycle.lifecycles import Lifecycles
from esper.growth.lifecycle.recovery import Recovery
from esper.growth.lifecycle.stages import Controller, Decision, GrowthState, Stage, Trial
from esper.growth.measure.contribution import AlphaSearch, Evaluate, Measurement, check_evaluate, modes_kept, search_alpha
from esper.growth.metrics import averaged, check_metrics, noting
from esper.growth.report.summary import ProgressLines, training_card
from esper.growth.seed_steps import SeedSteps
from esper.growth.seeds.learner import MakeOptimizer, innermost, reading_waits
from esper.growth.seeds.shadow import Closure
from esper.growth.telemetry import Callbacks, GrowthTelemetry, SinksWithoutLog, check_sinks
from esper.growth.trials import Stateful, TrialFailed, checked_trials, run_trials, untried
from esper.runs import CheckpointStore, Event, Sink
from esper.runs.versions import Versions
from esper.statistics import Interval

KIND = Versions("growth")  # of checkpoints that hold the state of a grower, as their part "grower"
STEPS_PER_EPOCH = 1_000_000  # more than any epoch has: checkpoints are numbered epoch * STEPS_PER_EPOCH + step


class Grower:
    """Owner of the seeds' optimisers, the lifecycles of the slots, the snapshots and the ledger of one model.

    `optimizer`, `scaler` and `scheduler` are the user's own. A loop with several optimisers, such as Muon for matrices and AdamW for the
    rest, passes them in a list: a seed follows those that train the parameters next to it, or that it becomes a part of. The first one
    counts the steps. The grower follows the learning rates and keeps the states of all of them in its snapshots; `scheduler` may be any
    object with `state_dict` and `load_state_dict`. The first snapshot is taken here and again in `begin`, so load weights and optimiser
    states before one of the two. `epochs` is the planned length of the training: a controller that knows it does not grow too late.

    Rents and thresholds are fractions of the loss of a constant predictor. That loss is `config.governor.uninformed_loss` if set, else
    `scale` if given, else the mean training loss of the first epoch.

    `averages` are averages of the weights that were made before the model got slots, such as torch.optim.swa_utils.AveragedModel(model) or
    those of timm. They grow with the model and are baked with it; call their own update after every step. After a rollback or
    `restore_best` they begin anew from the restored weights.

    With `keep="best"`, the states of the best epochs are held in CPU memory for `restore_best`; with "last" they are not. The best epoch
    has the lowest validation loss, or the highest value of the metric `best_by`, which `after_epoch` must then be given.

    `progress` prints a line per epoch on stderr. `on_event`, `callbacks` and `sinks` get every event. A callback is a function of an event,
    or an object with methods such as `on_epoch_ended(event)`; one that fails is switched off with a warning. A sink, such as
    `TensorBoardSink(folder)`, gets records with the epoch as step, in a thread of its own, until `bake` or `stop` closes it.
    """

    def __init__(
        self,
        slotted: Slotted,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        scaler: GradScaler | None = None,
        scheduler: Any = None,
        controller: Controller | str = "heuristic",
        config: GrowthConfig | None = None,
        epochs: int | None = None,
        scale: LossRange | None = None,
        seed_optimizer: MakeOptimizer | None = None,
        averages: Sequence[nn.Module] = (),
        keep: Literal["best", "last"] = "best",
        best_by: str | None = None,
        progress: bool = False,
        on_event: Callable[[Event], None] | None = None,
        callbacks: Sequence[Any] = (),
        sinks: Sequence[Sink] = (),
        telemetry: GrowthTelemetry | None = None,
    ) -> None:
        self.optimizers = check_fit_together(slotted, optimizer, config)
        check_keep(keep, best_by)
        own_callbacks, sinks = Callbacks(callbacks), check_sinks(sinks)
        self.slotted, self.scaler, self.epochs = slotted, scaler, epochs
        self.config = config or GrowthConfig()
        self.controller = as_controller(controller, self.config)
        self._keeps_best = keep == "best"
        backends = make_backends(slotted, self.optimizers, self.config.seed_optimizer, seed_optimizer)
        self.lifecycles: Lifecycles[ModuleBackend] = Lifecycles(
            backends, self.config, host=slotted.discovery.host, load=slotted.discovery.load, epochs=epochs, scale=scale
        )
        check_grown_are_trained(slotted, self.optimizers, self.lifecycles.options)
        self.history, self.ledger = self.lifecycles.history, self.lifecycles.ledger
        self._recovery = Recovery(slotted, self.optimizers, self.lifecycles, scaler=scaler, scheduler=scheduler, best_by=best_by)
        if not self._recovery.has_finite_weights():
            raise GrowthError("the model has weights that are NaN or infinite before the training; initialise or load it again")
        self._recovery.take_snapshot()
        self._group = ranks_of(slotted.model)
        self._measurement = Measurement(slotted, group=self._group)
        self._sinks = SinksWithoutLog(sinks, run=type(unwrap(slotted.model)).__name__, rank=self._group.rank)
        self._listeners: list[Callable[[Event], None]] = [
            *([ProgressLines(type(unwrap(slotted.model)).__name__)] if progress and self._group.rank == 0 else []),
            *([] if on_event is None else [on_event]),
            *([own_callbacks] if callbacks else []),
            *([self._sinks] if sinks else []),
        ]
        # None: nobody gets the events.
        self.telemetry = telemetry or (GrowthTelemetry(thresholds=self.config.thresholds) if self._listeners else None)
        self._metrics: dict[str, float] = {}  # of the last epoch, or of the one that was restored as the best
        self._restored: BestRestored | None = None  # None: the state is that of the last epoch
        self._has_begun, self._is_trying = False, False
        self.trials: tuple[Trial, ...] = ()  # what the controller wants to be tried before the next epoch, see `try_out`
        self._averages = growing_averages(averages, slotted)
        # From here on this grower follows the optimisers. A grower that was made earlier for the same slots stops.
        self._steps = SeedSteps(
            slotted,
            self.optimizers,
            self.lifecycles,
            self._recovery,
            scaler=scaler,
            seed_optimizer=seed_optimizer,
            group=self._group,
            on_first_step=self._note_gradients,
        )
        slotted.on_bake = self._close_lives

    def _note_gradients(self) -> None:
        """At the level "debug", note the gradients with which the host steps first in an epoch."""
        if self.telemetry is not None and self.telemetry.is_debug:
            self.telemetry.note_gradients(unwrap(self.slotted.model))

    @property
    def epoch(self) -> int:
        """Number of epochs finished so far."""
        return self.lifecycles.epoch

    @property
    def rollbacks(self) -> int:
        """Number of times the governor has restored a snapshot."""
        return self.lifecycles.governor.rollbacks

    # Called by the training loop

    def begin(self) -> None:
        """Make the first decision before any training, so that a schedule can grow at once. Later calls do nothing.

        A loop may leave this call out; then the first `after_step` makes the first decision, without a new snapshot.
        """
        self._check_is_active()
        if not self._has_begun:
            self._recovery.take_snapshot()  # again, because states may have been loaded since the grower was made
            self._make_first_decision()

    def _make_first_decision(self) -> None:
        """Make the first decision, unless it was made before."""
        if self._has_begun:
            return
        check_ranks(self.slotted.model, self._group)  # again, because processes may have joined since the grower was made
        self._has_begun = True
        self._decide()
        self._steps.note_seeds()
        self._steps.prepare()
        self.history.lap()
        self._emit_events()

    def after_step(self, loss: Tensor | float, *, closure: Closure | None = None, samples: int | None = None) -> None:
        """Record a training step. Call it after every step of the optimiser.

        `closure` computes the loss of this step again; seeds with raise_mode "shadow" learn from it. `samples` is the batch size, needed to
        count FLOPs; by default it is taken from the calls of the model.

        With gradient accumulation it may also be called after every partial batch. Each call then counts as one step: losses are those of
        partial batches, and alphas still reach their targets in the same number of epochs. Seeds step with the optimiser in both cases;
        seeds in the shadow use the closure of the first call after the optimiser's step.
        """
        self._check_is_active()
        # Check the arguments.
        value = loss.detach() if isinstance(loss, Tensor) else torch.tensor(float(loss))
        if value.numel() != 1:
            raise GrowthError(f"the loss of a step must be one number, and has the shape {list(value.shape)}; take its mean")
        value = value.reshape(())
        if closure is None and self.config.lifecycle.raise_mode == "shadow":
            raise GrowthError(
                'raise_mode "shadow" needs a closure for a second forward pass; '
                'call after_step(loss, closure=lambda: loss_fn(slotted(x), y)), or use raise_mode "joint"'
            )
        # Count the samples of all ranks; their batches have the same size. The count of the model's calls is 0 if none was seen.
        samples = (self.slotted.calls.samples or None) if samples is None else samples
        samples = None if samples is None else samples * self._group.world_size
        # On a GPU, or with several ranks, reading every loss would wait; there the governor checks the losses at the end of the epoch.
        is_read = not reading_waits(value) and self._group.world_size == 1
        if self.trials:
            self._begin_trial(self.trials[0] if self._is_trying else untried(self.trials, by=self.controller.name))
        is_lost, is_skipped = is_read and not math.isfinite(float(value)), self._steps.has_overflowed()
        self.history.skipped = self.history.skipped + is_skipped
        if not is_lost:
            self._make_first_decision()
        # Record the loss and the FLOPs, including those that the probe has spent in this step.
        self.history.note_step(value, samples=samples, flops_per_sample=self._steps.flops())
        if self._steps.prober.probe is not None:
            probe_flops = self._steps.prober.take_flops()
            self.history.flops += 0 if samples is None else probe_flops
        self._steps.follower.forget_failed_steps()
        # Restore a snapshot if the loss is not finite; otherwise train the seeds in the shadow, and advance warm-ups and alphas.
        if is_lost:
            self._go_back(f"the training loss of step {self.history.steps} is {float(value)}")
            self._make_first_decision()  # only now, so that a seed that germinates in it is not blamed for this step
        else:
            if self.epoch == 0 and self.history.steps == 1:
                self._recovery.hold_moving()  # find frozen parameters that the training loop changes by hand
            self._steps.step_shadow_seeds(closure)
            self._steps.tick(is_skipped)
        for average in self._averages:
            average.follow()
        self._steps.has_stepped = False
        self._steps.prepare()
        self._emit_events()

    def recording(self) -> AbstractContextManager[None]:
        """Record the forward pass inside the `with` block, so that seeds in the shadow need not compute all of it again.

        A call of the slotted model does this itself.
        """
        return self._steps.recording()

    def after_epoch(self, evaluate: Evaluate, *, metrics: Mapping[str, float | Callable[[], float]] | None = None) -> EpochEnded:
        """Measure the seeds, let the governor judge the epoch, and carry out the controller's decision. Call it after every epoch.

        `evaluate()` returns an item for every validation batch, always in the same order. Best is a 1-D tensor with the loss of each
        sample: intervals then rest on samples, and are as narrow as the data allow. If samples belong together, such as those of one
        patient, return tuples (losses, keys) with a key for each sample; then groups are compared. Otherwise return the loss of the batch,
        as a tuple (loss, number of samples) if batches differ in size, so that every sample has the same weight; intervals then rest on
        batches.

        The function is called once for the model as it is and once more for each seed on trial, with that seed switched off. When a slot is
        on trial for the first time, another call checks whether the layers before it can be replayed. `evaluate` has to switch to eval mode
        and turn gradients off itself; the grower restores the modes of all modules afterwards. With several ranks, each rank must go
        through the same number of batches; the losses of all ranks count.

        `metrics` are further figures of the epoch by name, such as the accuracy, for `EpochEnded.metrics`: numbers, or functions without
        arguments, which are called once, after the evaluation of the model as it is. Ranks are averaged.

        Nothing is changed before all evaluations are done, so an error in `evaluate` leaves everything as it was.
        """
        self._check_is_active()
        check_evaluate(evaluate)
        values: dict[str, float] = {}
        if found := self._checked_metrics(metrics):
            evaluate = noting(evaluate, found, values)
        self._make_first_decision()
        # Nothing but the connected seeds may run in the model during the evaluation.
        self._steps.stop_watching()
        # Average the training losses over the ranks, or take those of rank 0 if the ranks differ in their number.
        by_rank = self._group.gather_objects(self.history.chunks())
        is_even = len({len(chunks) for chunks in by_rank}) == 1
        chunks = [fmean(values) for values in zip(*by_rank, strict=True)] if is_even else by_rank[0]
        self._steps.check_epoch()
        # Measure the losses and the contributions. They, and so the verdict, are the same on all ranks.
        measured = self._measurement.measure(evaluate, self.lifecycles.on_trial(), epoch=self.epoch + 1)
        val_loss = measured.losses.mean
        verdict = self.lifecycles.verdict(chunks, val_loss)
        # Close the epoch.
        promises = self._steps.end_epoch()
        self.lifecycles.end_epoch(chunks, val_loss, measured.contributions, self._group.first(lambda: promises))
        if values:
            self._metrics = averaged(values, self._group)
        # Restore a snapshot after a disaster; otherwise let the controller decide.
        if verdict.is_disaster:
            self._go_back(verdict.reason)
            decision = Decision(reason=f"went back to a healthy state: {verdict.reason}")
        else:
            self.lifecycles.settle(verdict, chunks, self._recovery)
            if self._keeps_best:
                self._recovery.note_best(val_loss, dict(self._metrics))
            decision = self._decide()
        self._steps.note_seeds()
        self._steps.prepare()
        device, shown = next(self.slotted.model.parameters()).device, self._metrics if values else {}
        resources = {} if self.telemetry is None else self.telemetry.resources.read(device)
        ended = epoch_ended(self.lifecycles, decision, learning_rate=self._learning_rate(), resources=resources, metrics=shown)
        self.lifecycles.emit(ended)
        if self.telemetry is not None:
            scale = self.lifecycles.scale
            for event in self.telemetry.events_of(ended, uninformed=None if scale is None else scale.uninformed, device=device):
                self.lifecycles.emit(event)
        self._emit_events()
        if self.telemetry is not None:
            self.telemetry.end_epoch()
        return ended

    def count_evaluation(self, samples: int) -> None:
        """Add the FLOPs of a forward pass over this many samples per rank. Optional; call it inside `evaluate`."""
        self.history.flops += samples * self._group.world_size * self._steps.forward_flops

    def restore_best(self, evaluate: Evaluate, *, metrics: Mapping[str, float | Callable[[], float]] | None = None) -> BestRestored | None:
        """Restore the state after the best epoch. Call it once, after the last epoch and before `bake`.

        The best epoch has the lowest validation loss, or the highest value of the metric `best_by`, which `metrics` must then have. They
        are as for `after_epoch`; pass functions, which are called after `evaluate`, because it runs without the seeds on trial.

        An epoch counts if all seeds that were connected in it are kept by now and none of them was blending. Its seeds are kept in the
        restored state too. Kept seeds that were not connected yet are taken out, and the ledger says so. Weights, buffers and seeds are
        those of the epoch. The optimisers, the schedule and the loss scale stay as they are, so this is the end of a training and not a
        point to continue from.

        The present state is evaluated without the seeds on trial, because `bake` removes them. Nothing happens if it is at least as good,
        or if the last epoch was the best. Return the event, or None if nothing happened.
        """
        self._check_is_active()
        if not self._keeps_best:
            raise GrowthError('this Grower holds no earlier states; make it with keep="best", or bake the last state')
        states, values, found = self._recovery.best_states, dict[str, float](), self._checked_metrics(metrics)
        best = states.best()
        if best is None and states.by is not None:
            warnings.warn(f"no epoch with a finite {states.by} counts, so the last state is the result", RuntimeWarning, stacklevel=2)
        if best is None or (best.epoch == self.epoch and self.history.steps == 0):
            return None
        on_trial = [name for name in self.lifecycles.living() if self.lifecycles.slots[name].is_connected]
        if states.by is not None:
            evaluate = noting(evaluate, found, values)
        with self._steps.prober.paused(), modes_kept(self.slotted), self.slotted.without(on_trial):
            last_loss = self._measurement.losses(evaluate).mean
        last_metrics = averaged(values, self._group) if values else {}
        if states.rank(last_loss, last_metrics) <= states.rank(best.val_loss, best.metrics):
            return None
        self._steps.stop_watching(discard=True)
        self._recovery.restore(best.state)
        for average in self._averages:
            average.restart()
        self._metrics = best.metrics
        self._restored = self.lifecycles.note_restored(
            best.epoch,
            states.why_left_out(best),
            val_loss=best.val_loss,
            last_val_loss=last_loss,
            by=states.by or "",
            value=None if states.by is None else best.metrics[states.by],
            last_value=None if states.by is None else last_metrics[states.by],
        )
        self._steps.note_seeds()
        self._steps.prepare()
        self._emit_events()
        return self._restored

    def bake(self, *, fold: bool = True) -> nn.Module:
        """Return the model with its fossilized seeds built in and all slots removed. If baking fails, the grower stays usable.

        With `fold`, the layers are truly wider where width seeds were kept, and the host's optimiser goes on with them: its parameters are
        the same objects, and hold the moments of the seeds' own optimisers for the new rows and columns. See `Slotted.bake`.
        """
        self._steps.stop_watching(discard=True)
        learners = [(backend.slot.seed, backend.learner) for backend in self.lifecycles.slots.values()]
        of_seeds = {seed: learner.optimizers for seed, learner in learners if seed is not None and learner is not None}
        kept = [slot.seed for slot in self.slotted.slots.values() if slot.is_kept and slot.seed is not None]
        model = self.slotted.bake(fold=fold, optimizer=[innermost(one) for one in self.optimizers], of_seeds=of_seeds)
        for average in self._averages:
            average.follow()
            average.bake(fold=fold)
        wide = sorted({plan.module for seed in kept for plan in seed.spec.wide if part_of(model.get_submodule(plan.module)) == "layer"})
        if fold and wide:
            shapes = {name: layer_of(model.get_submodule(name)).weight.shape for name in wide}
            self.lifecycles.emit(Folded(epoch=self.epoch, layers={name: [shape[1], shape[0]] for name, shape in shapes.items()}))
        self._emit_events()  # such as the end of seeds that were pruned since the last epoch
        self.stop()
        return model

    def stop(self) -> None:
        """Remove all hooks from the model and its optimiser. Connected seeds stay in the model and no longer learn."""
        self._steps.stop()
        for average in self._averages:
            average.stop()
        self._sinks.close()

    def card(self) -> Card:
        """Return the training so far for notebooks and for the model card of the baked model: figures, and all seeds."""
        return training_card(
            type(unwrap(self.slotted.model)).__name__,
            self.lifecycles,
            restored=self._restored,
            metrics=self._metrics,
            controller=self.controller.name,
            optimizers=[type(one).__name__ for one in self.optimizers],
        )

    def _close_lives(self) -> Card:
        """Note that the model was baked, which removes the seeds that still live. Return the card of the training."""
        self.lifecycles.note_baked()
        self._emit_events()
        return self.card()

    def _check_is_active(self) -> None:
        """Raise a GrowthError if the slots were removed or this grower was stopped."""
        if not self.slotted.is_attached:
            raise GrowthError(
                "the slots were removed by bake() or remove(), so nothing can grow any more; to continue, call add_slots again and make a "
                "new Grower, with an optimiser that holds the parameters of the fossilized seeds"
            )
        if not self._steps.follower.is_active:
            raise GrowthError(
                "this Grower is not active: stop() was called, or another Grower was made for the same slots; use the latest one"
            )

    # Measurements that need extra evaluations

    def shapley(self, evaluate: Evaluate, slots: Sequence[str] | None = None) -> dict[str, Interval]:
        """Return the Shapley value of each living seed in `slots` (default: all connected ones). Calls `evaluate` 2^k times for k seeds.

        As in `after_epoch`, there is one more call for each slot that is measured for the first time. With more than 8 seeds, orders are
        sampled (`esper.growth.measure.shapley`). `esper.analyse` also measures fossilized seeds and the interaction of pairs.
        """
        names = players(self.lifecycles, slots)
        with self._steps.prober.paused():
            return self._measurement.shapley(evaluate, names).values

    def search_alpha(self, slot: str, evaluate: Evaluate, *, alphas: Sequence[float] = (0.25, 0.5, 0.75, 1.0)) -> AlphaSearch:
        """Find which of these alphas has the lowest validation loss, for a `Retarget` action. Calls `evaluate` once per alpha."""
        check_alphas(self.slotted, slot, alphas)
        with self._steps.prober.paused():
            return search_alpha(self._measurement, slot, evaluate, alphas)

    def shrink(self, evaluate: Evaluate) -> list[str]:
        """Remove kept seeds that no longer pay their rent, and return their slots.

        All kept seeds are measured on the validation batches. The one that pays least is removed if the whole interval of its contribution
        is below its rent; then the others are measured again. `esper.shrink` removes units after the seeds were folded into layers.
        """
        self._check_is_active()
        removed: list[str] = []
        while kept := [name for name, backend in self.lifecycles.slots.items() if backend.stage is Stage.FOSSILIZED]:
            with self._steps.prober.paused():
                found = self._measurement.measure(evaluate, kept, epoch=self.epoch).contributions
            if not (least := shrink_least(self.lifecycles, found)):
                break
            removed.append(least)
        self._steps.note_seeds()
        self._steps.prepare()
        self._emit_events()
        return removed

    # Decisions, trials and rollbacks

    def state(self) -> GrowthState:
        """Return the input of the controller: the numbers of this epoch and of every slot."""
        return growth_state(self.lifecycles, learning_rate=self._learning_rate())

    def _learning_rate(self) -> float:
        return float(self.optimizers[0].param_groups[0]["lr"])

    def _decide(self) -> Decision:
        """Ask the controller of rank 0, and carry out its decision on all ranks."""
        decision = self._group.first(lambda: self.controller.decide(self.state()))
        for action in (*decision.actions, *(action for trial in decision.trials for action in trial.actions)):
            self.slotted.slot(action.slot)  # raises an error that lists the slots, if this one does not exist
        carry_out(self.lifecycles, decision, by=self.controller.name)
        self.trials = checked_trials(decision) if decision.trials else ()
        if decision.probe and not self.lifecycles.is_over:
            self._steps.prober.request(without=decision.not_probed)
        return decision

    def try_out(self, train: Callable[[], None], *, also: Sequence[Stateful] = ()) -> None:
        """Let a copy of the training make each of `trials`, and go on with the best one. Call it between two epochs.

        `train` goes on with the training for some epochs, as the loop does, with `after_step` and `after_epoch`. It is called once for each
        trial, and starts from the same state each time: that of the grower, of the global random generators, and of the objects in `also`,
        such as a loader with a position. Every rank calls this. An error or an interrupt restores the state before the trials.
        """
        self._check_is_active()
        self._emit_events()
        self._is_trying = True
        try:
            run_trials(self.trials, self.lifecycles, [self, *also], self._begin_trial, train)
        finally:
            self._is_trying = False
        self._emit_events()

    def _begin_trial(self, trial: Trial) -> None:
        self.trials = ()
        carry_out(self.lifecycles, Decision(trial.actions), by=self.controller.name)
        self._steps.note_seeds()
        self._steps.prepare()

    def _go_back(self, reason: str) -> None:
        """Restore a snapshot. Raise Diverged if that has happened too often."""
        if self._is_trying:
            raise TrialFailed(reason)
        self._steps.stop_watching(discard=True)
        self.lifecycles.go_back(reason, self._recovery)
        for average in self._averages:
            average.restart()
        self._steps.note_seeds()
        try:
            self.lifecycles.check_not_diverged(reason)
        except Diverged:
            self._emit_events()
            raise

    def _emit_events(self) -> None:
        if not self._is_trying:  # the events of a copy are told if it goes on
            self.lifecycles.tell(*self._listeners)

    def _checked_metrics(self, metrics: object) -> dict[str, Any]:
        """Return the metrics by name. Raise a GrowthError if the one that decides about the best epoch is missing."""
        found, by = check_metrics(metrics) if metrics else {}, self._recovery.best_states.by
        if by is not None and by not in found:
            raise GrowthError(f"the best epoch is chosen by the metric {by!r}, which is missing; pass metrics={{{by!r}: ...}}")
        return found

    # Resuming

    def save(self, folder: Path | str) -> None:
        """Write a checkpoint into the folder; call it between two steps. The last three checkpoints are kept.

        A checkpoint holds host, seeds, optimisers, averages, the loss scale, the schedule, the stages, the ledger and the best states.
        The training loop has to save its position in the data and its random states itself.
        """
        step = self.epoch * STEPS_PER_EPOCH + self.history.steps
        CheckpointStore(folder, kind=KIND).save(step, {"grower": self.state_dict()}, note={"epoch": self.epoch})

    def load(self, folder: Path | str) -> None:
        """Restore the latest checkpoint in the folder. Model, optimiser, schedule and controller must be made as they were for `save`."""
        self.load_state_dict(CheckpointStore(folder, kind=KIND).load("latest").state["grower"])

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, including host, optimiser, schedule and loss scale; call it between two steps."""
        return {
            "recovery": self._recovery.state_dict(),
            "controller": {"name": self.controller.name, "state": self.controller.state_dict()},
            "lifecycles": self.lifecycles.state_dict(),
            "has_begun": self._has_begun,
            "best_by": self._recovery.best_states.by,
            "steps": self._steps.state_dict(),
            "trials": [trial.state_dict() for trial in self.trials],
            "measurement": self._measurement.state_dict(),
            "averages": [one.average.state_dict() for one in self._averages],
            **({} if self.telemetry is None else {"telemetry": self.telemetry.state_dict()}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state of `state_dict`. Model, optimiser, schedule and controller must be made as they were then."""
        if (saved := state["controller"]["name"]) != self.controller.name:
            raise GrowthError(
                f"the saved state is of a run with the controller {saved!r}, not {self.controller.name!r}; resume it with that controller"
            )
        if (saved := state["best_by"]) != (by := self._recovery.best_states.by):
            raise GrowthError(f"the saved state is of a run with best_by={saved!r}, not {by!r}; resume it with that")
        self._steps.stop_watching(discard=True)
        self._recovery.load_state_dict(state["recovery"])
        self.lifecycles.load_state_dict(state["lifecycles"])
        self.controller.load_state_dict(state["controller"]["state"])
        self._has_begun = state["has_begun"]
        self.trials = tuple(map(Trial.of, state["trials"]))
        self._measurement.load_state_dict(state["measurement"])
        if self.telemetry is not None and "telemetry" in state:  # a run without telemetry has none
            self.telemetry.load_state_dict(state["telemetry"])
        self._steps.load_state_dict(state["steps"])
        load_averages(self._averages, state["averages"])
        self._steps.note_seeds()
        self._steps.prepare()
