"""Growth in Lightning's training loop, for `lightning` and `pytorch_lightning`.

    growth = GrowthCallback(x[:2], lambda module, batch: cross_entropy(module(batch[0]), batch[1]))
    Trainer(max_epochs=30, callbacks=[growth]).fit(module, train_loader, val_loader)
    model = growth.bake()

A checkpoint holds the seeds twice: in the module's state dict, for `esper.load(checkpoint["state_dict"], model=Module())`, and with their
stages and optimisers in the state of this callback. `fit(module, ..., ckpt_path=...)` with such a callback resumes the saved run.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from esper.growth.batches import StepLoss, checked, size_of
from esper.growth.config import GrowthConfig, GrowthError
from esper.growth.grower import Grower
from esper.growth.host.isolation import evaluated
from esper.growth.host.slotted import Slotted, add_slots
from esper.growth.host.state_dict import SeedsIgnored
from esper.growth.lifecycle.stages import Controller
from esper.growth.metrics import Metric, MetricSums, check_functions
from esper.growth.telemetry import check_callbacks, check_sinks
from esper.growth.training_loop import move
from esper.runs import Event, Sink


def _callback_class() -> Any:
    """Return a base class that derives from the `Callback` of every installed Lightning package.

    Lightning comes under two names, often both installed, and a trainer only accepts callbacks of its own package.
    """
    names = [name for name in ("lightning.pytorch", "pytorch_lightning") if importlib.util.find_spec(name.partition(".")[0])]
    if not names:
        raise ModuleNotFoundError("Lightning is not installed; pip install 'esper-grow[lightning]'", name="lightning")
    return type("Callback", tuple(importlib.import_module(name).Callback for name in names), {})


if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:
    Callback = _callback_class()


class GrowthCallback(Callback):
    """Lightning callback that grows a model during `fit`. It owns a grower; `grower.ledger` lists the seeds that were tried.

    `example_input` is an input of the model. `step_loss(module, batch)` returns the loss of a batch and must not log: it is called for
    every batch of the validation loaders after every epoch, again for every seed whose contribution is measured, and in training for seeds
    in the shadow. `model_attribute` names the submodule to grow, if the LightningModule is not called as a whole.

    `metrics` maps names to functions `fn(module, batch)` that return one number, as beside the `step_loss` of `esper.grow`. They are
    computed on the validation batches after every epoch, and are in the events. `progress`, `on_event`, `callbacks` (of events, not of
    Lightning), `sinks` and the other settings are those of `Grower`. Sinks are closed by `bake`, and when a second `fit` begins; pass open
    ones to another callback.
    """

    def __init__(
        self,
        example_input: Any,
        step_loss: StepLoss,
        *,
        model_attribute: str | None = None,
        controller: Controller | str = "heuristic",
        config: GrowthConfig | None = None,
        metrics: Mapping[str, Metric] | None = None,
        progress: bool = False,
        on_event: Callable[[Event], None] | None = None,
        callbacks: Sequence[Any] = (),
        sinks: Sequence[Sink] = (),
    ) -> None:
        self.example_input, self.step_loss, self.model_attribute = example_input, step_loss, model_attribute
        self.controller, self.config, self.metrics = controller, config, check_functions(metrics)
        self.progress, self.on_event, self.callbacks, self.sinks = progress, on_event, check_callbacks(callbacks), check_sinks(sinks)
        self.grower: Grower | None = None
        self._saved: dict[str, Any] | None = None  # state from a checkpoint, until there is a grower for it
        self._ignored: SeedsIgnored | None = None  # set while Lightning loads a checkpoint
        self._steps = 0  # optimiser steps, as Lightning counts them
        self._losses: list[Tensor] = []  # losses of the batches since the last optimiser step
        self._samples = 0  # samples of these batches

    def bake(self) -> nn.Module:
        """Return the module (or its `model_attribute`) with the fossilized seeds as ordinary modules, without slots."""
        return self._grower().bake()

    def _grower(self) -> Grower:
        if self.grower is None:
            raise GrowthError("nothing has grown yet; call trainer.fit(...) with this callback first")
        return self.grower

    # Hooks, in the order in which Lightning calls them

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Let Lightning load a checkpoint without the seeds. It loads the state of this callback next, which restores them."""
        if stage == "fit" or self.grower is not None:
            self._ignored = SeedsIgnored(pl_module, [] if self.grower is None else self.grower.slotted.slots.values())

    def _weights_are_loaded(self) -> None:
        """Stop ignoring the seeds in a state dict, once Lightning has loaded the weights of a checkpoint."""
        if self._ignored is not None:
            self._ignored.stop()
            self._ignored = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict
        if self.grower is not None:  # a checkpoint is loaded for a test after fit: its seeds belong to its weights
            self.grower.load_state_dict(state_dict)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Add the slots and build the grower.

        When resuming, Lightning has loaded the weights and the callbacks of the checkpoint by now. The grower restores optimiser and
        schedule; Lightning loads the same states again later.
        """
        self._weights_are_loaded()
        _check_can_follow(trainer, pl_module)
        if self.grower is not None:
            if self._saved is None:
                raise GrowthError("this callback has grown a model already; bake() it, and make another callback for another fit")
            self.grower.stop()
            self.grower.slotted.remove()
            self.grower = None  # Lightning has loaded other weights, so its seeds are of no use even if the start fails
        # Leave the user's model without slots, and its optimiser without hooks, if anything fails.
        with ExitStack() as undo:
            slotted = self._add_slots(trainer, pl_module)
            undo.callback(slotted.remove)
            grower = self._make_grower(trainer, slotted)
            undo.callback(grower.stop)
            if self._saved is not None:
                grower.load_state_dict(self._saved)
            undo.pop_all()
        self.grower, self._saved = grower, None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        grower = self._grower()
        if trainer.val_dataloaders is None or trainer.val_dataloaders == []:
            grower.slotted.remove()
            self.grower = None
            raise GrowthError(
                "there is no validation data, by which seeds are judged after every epoch; "
                "pass val_dataloaders to fit, with limit_val_batches above 0 and check_val_every_n_epoch=1"
            )
        self._steps, self._losses, self._samples = trainer.global_step, [], 0
        grower.begin()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """End the previous epoch if that has not happened.

        A run that was saved at the last step of an epoch resumes at the first step of the next, without a call of `on_train_epoch_end`.
        """
        if batch_idx == 0:
            self._end_epoch(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if isinstance(outputs, Mapping) and "loss" in outputs:  # otherwise training_step has skipped the batch
            self._losses.append(outputs["loss"].detach() * trainer.accumulate_grad_batches)  # Lightning has divided by it
            self._samples += size_of(batch)
        # The grower counts steps of the optimiser. Several batches make one step if gradients are accumulated.
        if trainer.global_step == self._steps:
            return
        losses, samples = self._losses, self._samples
        self._steps, self._losses, self._samples = trainer.global_step, [], 0
        if losses:

            def closure() -> Tensor:
                return self._loss(trainer, pl_module, batch).mean()

            self._grower().after_step(torch.stack(losses).mean(), closure=closure, samples=samples)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._end_epoch(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        return (self._saved or {}) if self.grower is None else self.grower.state_dict()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._weights_are_loaded()
        self._saved = None
        self._move_seeds(pl_module)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._move_seeds(pl_module)

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        self._move_seeds(pl_module)

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        self._move_seeds(pl_module)

    def _move_seeds(self, pl_module: Any) -> None:
        """Move the seeds to the device of the module. Lightning does not, because seeds are not submodules of it."""
        self._weights_are_loaded()
        if self.grower is not None:
            self.grower.slotted.to(pl_module.device)

    # Construction of the grower

    def _add_slots(self, trainer: Any, pl_module: Any) -> Slotted:
        model = trainer.model  # may be wrapped in DistributedDataParallel, which the grower must know
        if self.model_attribute is not None:
            model = dict(pl_module.named_modules()).get(self.model_attribute)
            if model is None:
                names = ", ".join(name for name, _ in pl_module.named_children())
                raise GrowthError(f"{type(pl_module).__name__} has no submodule {self.model_attribute!r}; it has {names}")
            if trainer.world_size > 1:
                raise GrowthError(
                    f"model_attribute={self.model_attribute!r} is not possible on {trainer.world_size} processes, where the whole "
                    "LightningModule grows; leave it out"
                )
        example = trainer.precision_plugin.convert_input(move(self.example_input, pl_module.device))
        return add_slots(model, example, slots=None if self.config is None else self.config.slots)

    def _make_grower(self, trainer: Any, slotted: Slotted) -> Grower:
        schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
        epochs = trainer.max_epochs
        return Grower(
            slotted,
            trainer.optimizers[0],
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            scheduler=_Schedules(schedules) if schedules else None,
            controller=self.controller,
            config=self.config,
            keep="last",  # the trainer chooses the checkpoint to keep
            epochs=epochs if epochs is not None and epochs > 0 else None,  # -1: unlimited
            progress=self.progress,
            on_event=self.on_event,
            callbacks=self.callbacks,
            sinks=self.sinks,
        )

    # Losses

    def _end_epoch(self, trainer: Any, pl_module: Any) -> None:
        grower = self._grower()
        if grower.history.steps:  # otherwise the grower has ended this epoch already
            sums = MetricSums(pl_module, self.metrics, of_pairs=False)
            passes = iter([sums])  # the metrics are computed in the first pass, with all seeds on
            metrics = {name: partial(sums.mean, name) for name in self.metrics}
            grower.after_epoch(lambda: list(self._evaluate(trainer, pl_module, grower, next(passes, None))), metrics=metrics)

    def _evaluate(self, trainer: Any, pl_module: Any, grower: Grower, sums: MetricSums | None) -> Iterator[tuple[Tensor, int]]:
        """Yield the loss and the size of every validation batch, without drawing from the random streams of the training.

        `sums` takes the metrics of every batch, from the same forward passes.
        """
        with evaluated(pl_module) as in_inference, nullcontext() if sums is None else sums.recording():
            for number, batch in enumerate(_validation_batches(trainer, pl_module), start=1):
                with in_inference():
                    loss = self._loss(trainer, pl_module, batch)
                yield loss, size_of(batch)
                grower.count_evaluation(size_of(batch))
                if sums is not None:
                    with trainer.precision_plugin.forward_context():
                        sums.note(batch, size_of(batch), where=f"validation batch {number}")

    def _loss(self, trainer: Any, pl_module: Any, batch: Any) -> Tensor:
        with trainer.precision_plugin.forward_context():
            return checked(self.step_loss(pl_module, batch), size_of(batch))


class _Schedules:
    """All schedules of an optimiser, with one state."""

    def __init__(self, schedules: list[Any]) -> None:
        self.schedules = schedules

    def state_dict(self) -> dict[str, Any]:
        return {"schedules": [schedule.state_dict() for schedule in self.schedules]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for schedule, saved in zip(self.schedules, state["schedules"], strict=True):
            schedule.load_state_dict(saved)


def _check_can_follow(trainer: Any, pl_module: Any) -> None:
    """Raise GrowthError for a kind of training that the callback does not support."""
    if not pl_module.automatic_optimization:
        raise GrowthError("with manual optimization only training_step knows when a step is over; use esper.Grower there")
    if len(trainer.optimizers) != 1:
        raise GrowthError(f"growing follows one optimiser, but configure_optimizers returned {len(trainer.optimizers)}; return one")
    if trainer.world_size > 1 and not isinstance(trainer.model, nn.parallel.DistributedDataParallel):
        raise GrowthError(f"on several processes a model grows under strategy='ddp', not under {type(trainer.strategy).__name__}")


def _validation_batches(trainer: Any, pl_module: Any) -> Iterator[Any]:
    """Yield the validation batches that Lightning would use, prepared in the same way."""
    loaders = trainer.val_dataloaders  # one loader, or several in a list or by name
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    elif not isinstance(loaders, list | tuple):
        loaders = [loaders]
    for index, (loader, limit) in enumerate(zip(loaders, trainer.num_val_batches, strict=True)):
        for raw in islice(loader, None if math.isinf(limit) else int(limit)):
            batch = trainer.precision_plugin.convert_input(raw)
            for owner in filter(None, (pl_module, trainer.datamodule)):  # by default this hook returns the batch as it is
                batch = owner.on_before_batch_transfer(batch, index)
            yield trainer.strategy.batch_to_device(batch, dataloader_idx=index)
