"""Growing in Lightning's training loop, that of `lightning` or of `pytorch_lightning`.

    growth = GrowthCallback(x[:2], lambda module, batch: cross_entropy(module(batch[0]), batch[1]))
    Trainer(max_epochs=30, callbacks=[growth]).fit(module, train_loader, val_loader)
    model = growth.bake()

A checkpoint holds the seeds twice: in the module's state dict, for `esper.load(checkpoint["state_dict"], model=Module())`, and with their
stages and optimisers as the state of this callback. `fit(module, ..., ckpt_path=...)` with such a callback goes on where the saved run was.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from esper.growth.batches import StepLoss, checked, move, size_of
from esper.growth.config import GrowthConfig, GrowthError
from esper.growth.grower import Grower
from esper.growth.host.isolation import isolated
from esper.growth.host.slots import SeedsIgnored
from esper.growth.host.slotted import Slotted, add_slots
from esper.growth.lifecycle.stages import Controller
from esper.runs import Event


def _callback_class() -> Any:
    """Lightning comes under two names, often both at once, and a trainer takes callbacks of its own name only. This is one of both."""
    names = [name for name in ("lightning.pytorch", "pytorch_lightning") if importlib.util.find_spec(name.partition(".")[0])]
    if not names:
        raise ModuleNotFoundError("Lightning is not installed; pip install 'esper-grow[lightning]'", name="lightning")
    return type("Callback", tuple(importlib.import_module(name).Callback for name in names), {})


if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:
    Callback = _callback_class()


class GrowthCallback(Callback):
    """Owns a grower from the start of `fit` on; `grower.ledger` tells what was tried.

    `example_input` is a batch as the model gets it. `step_loss(module, batch)` gives the loss of a batch and logs nothing: it is called for
    every batch of the validation loaders after every epoch, again for each seed on trial, and in training for seeds in the shadow.
    `model_attribute` names the submodule that grows, where the LightningModule is not called as a whole. Settings are those of `Grower`.
    """

    def __init__(
        self,
        example_input: Any,
        step_loss: StepLoss,
        *,
        model_attribute: str | None = None,
        controller: Controller | str = "heuristic",
        config: GrowthConfig | None = None,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self.example_input, self.step_loss, self.model_attribute = example_input, step_loss, model_attribute
        self.controller, self.config, self.on_event = controller, config or GrowthConfig(), on_event
        self.grower: Grower | None = None
        self._saved: dict[str, Any] | None = None  # from a checkpoint, until there is a grower for it
        self._ignored: SeedsIgnored | None = None  # while Lightning loads a checkpoint
        self._steps = 0  # of the optimiser, as Lightning counts them
        self._losses: list[Tensor] = []  # since its last step
        self._samples = 0

    def bake(self) -> nn.Module:
        """The module (or its `model_attribute`) with the fossilized seeds in it, and nothing else of ours."""
        return self._grower().bake()

    def _grower(self) -> Grower:
        if self.grower is None:
            raise GrowthError("nothing has grown yet: trainer.fit(...) with this callback comes first")
        return self.grower

    # What Lightning calls, in this order

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The weights of a checkpoint come next, and then the state of this callback, which restores the seeds."""
        if stage == "fit" or self.grower is not None:
            self._ignored = SeedsIgnored(pl_module, [] if self.grower is None else self.grower.slotted.slots.values())

    def _weights_are_loaded(self) -> None:
        if self._ignored is not None:
            self._ignored.stop()
            self._ignored = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict
        if self.grower is not None:  # a checkpoint is tested: its weights and its seeds belong together
            self.grower.load_state_dict(state_dict)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Of a checkpoint, Lightning has loaded weights and callbacks. It loads optimiser and schedule later, and finds them equal."""
        self._weights_are_loaded()
        _check_can_follow(trainer, pl_module)
        if self.grower is not None:
            if self._saved is None:
                raise GrowthError("this callback has grown a model already; bake() it, and make another callback for another fit")
            self.grower.stop()
            self.grower.slotted.remove()
        slotted = self._add_slots(trainer, pl_module)
        try:
            grower = self._make_grower(trainer, slotted)
            if self._saved is not None:
                grower.load_state_dict(self._saved)
        except BaseException:
            slotted.remove()
            raise
        self.grower, self._saved = grower, None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        grower = self._grower()
        if trainer.val_dataloaders is None or trainer.val_dataloaders == []:
            grower.slotted.remove()
            self.grower = None
            raise GrowthError(
                "seeds are judged by validation data after every epoch, and there is none yet; "
                "pass val_dataloaders to fit, with limit_val_batches above 0 and check_val_every_n_epoch=1"
            )
        self._steps, self._losses, self._samples = trainer.global_step, [], 0
        grower.begin()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A checkpoint of an epoch's last step is resumed at the next epoch's first, and nothing else tells that the one is over."""
        if batch_idx == 0:
            self._end_epoch(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if isinstance(outputs, Mapping) and "loss" in outputs:  # otherwise training_step has skipped the batch
            self._losses.append(outputs["loss"].detach() * trainer.accumulate_grad_batches)  # Lightning had divided by it
            self._samples += size_of(batch)
        if trainer.global_step == self._steps:  # gradients are being accumulated
            return
        losses, samples = self._losses, self._samples
        self._steps, self._losses, self._samples = trainer.global_step, [], 0
        if losses:
            closure = partial(self._loss, trainer, pl_module, batch)
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
        """Lightning moves the module to a device and back; seeds are no part of it."""
        self._weights_are_loaded()
        if self.grower is not None:
            self.grower.slotted.to(pl_module.device)

    # How a grower is made

    def _add_slots(self, trainer: Any, pl_module: Any) -> Slotted:
        model = trainer.model  # under DistributedDataParallel, which the grower must know of
        if self.model_attribute is not None:
            model = dict(pl_module.named_modules()).get(self.model_attribute)
            if model is None:
                names = ", ".join(name for name, _ in pl_module.named_children())
                raise GrowthError(f"{type(pl_module).__name__} has no submodule {self.model_attribute!r}; it has {names}")
            if trainer.world_size > 1:
                raise GrowthError("on several processes the LightningModule grows as a whole; leave model_attribute out")
        example = trainer.precision_plugin.convert_input(move(self.example_input, pl_module.device))
        return add_slots(model, example, slots=self.config.slots)

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
            epochs=epochs if epochs is not None and epochs > 0 else None,  # -1: without end
            on_event=self.on_event,
        )

    # Losses

    def _end_epoch(self, trainer: Any, pl_module: Any) -> None:
        grower = self._grower()
        if grower.history.steps:  # of an epoch that is not over for the grower
            grower.after_epoch(lambda: list(self._evaluate(trainer, pl_module, grower)))

    def _evaluate(self, trainer: Any, pl_module: Any, grower: Grower) -> Iterator[tuple[Tensor, int]]:
        """The loss and the size of every validation batch. Draws nothing from the random streams that training uses."""
        with isolated(pl_module), torch.no_grad():
            pl_module.eval()
            for batch in _validation_batches(trainer, pl_module):
                yield self._loss(trainer, pl_module, batch), size_of(batch)
                grower.count_evaluation(size_of(batch))

    def _loss(self, trainer: Any, pl_module: Any, batch: Any) -> Tensor:
        with trainer.precision_plugin.forward_context():
            return checked(self.step_loss(pl_module, batch))


class _Schedules:
    """All of one optimiser, as one."""

    def __init__(self, schedules: list[Any]) -> None:
        self.schedules = schedules

    def state_dict(self) -> dict[str, Any]:
        return {"schedules": [schedule.state_dict() for schedule in self.schedules]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for schedule, saved in zip(self.schedules, state["schedules"], strict=True):
            schedule.load_state_dict(saved)


def _check_can_follow(trainer: Any, pl_module: Any) -> None:
    if not pl_module.automatic_optimization:
        raise GrowthError("with manual optimization only training_step knows when a step is over; use esper.Grower there")
    if len(trainer.optimizers) != 1:
        raise GrowthError(f"growing follows one optimiser, and configure_optimizers gave {len(trainer.optimizers)}")
    if trainer.world_size > 1 and not isinstance(trainer.model, nn.parallel.DistributedDataParallel):
        raise GrowthError(f"on several processes a model grows under strategy='ddp', not under {type(trainer.strategy).__name__}")


def _validation_batches(trainer: Any, pl_module: Any) -> Iterator[Any]:
    """As many of every loader as Lightning takes, made ready as Lightning does."""
    loaders = trainer.val_dataloaders
    several = list(loaders.values()) if isinstance(loaders, Mapping) else loaders if isinstance(loaders, list | tuple) else [loaders]
    for index, (loader, limit) in enumerate(zip(several, trainer.num_val_batches, strict=True)):
        for raw in islice(loader, None if math.isinf(limit) else int(limit)):
            batch = trainer.precision_plugin.convert_input(raw)
            for owner in filter(None, (pl_module, trainer.datamodule)):  # whichever of them has its own; the other passes it on
                batch = owner.on_before_batch_transfer(batch, index)
            yield trainer.strategy.batch_to_device(batch, dataloader_idx=index)
