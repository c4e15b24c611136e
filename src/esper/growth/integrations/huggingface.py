"""Growing in the training loop of Hugging Face transformers.

    growth = GrowthTrainerCallback()
    trainer = GrowthTrainer(model, arguments, train_dataset=train, eval_dataset=held_out, growth=growth)
    trainer.train()
    model = growth.bake()

A callback alone would not do: the Trainer tells callbacks neither the loss of a step nor the checkpoint that is resumed. GrowthTrainer
learns both by overriding `training_step` and `train`, as the Trainer's documentation invites to. It also works in front of a trainer
that has its own: class Growing(GrowthTrainer, SFTTrainer).

The seeds are in the model's file of every checkpoint: `esper.load(folder, model=Model(config))` reads it, where `from_pretrained` would
leave them out and name them as unexpected. Their stages and optimisers are in a folder `growth` beside it, and
`train(resume_from_checkpoint=...)` goes on where the saved run was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from esper.growth.batches import checked, size_of
from esper.growth.config import GrowthConfig, GrowthError
from esper.growth.grower import Grower
from esper.growth.host.isolation import isolated
from esper.growth.host.slots import SeedsIgnored
from esper.growth.host.slotted import Slotted, add_slots
from esper.growth.lifecycle.stages import Controller
from esper.runs import CheckpointStore, Event

FOLDER, KIND = "growth", "growth in transformers"


class GrowthTrainerCallback(TrainerCallback):
    """Owns a grower from the start of `train` on; `grower.ledger` tells what was tried. It belongs to one GrowthTrainer.

    Seeds are judged by the trainer's `eval_dataset` after every epoch, whether or not the trainer evaluates then. `example_input` is a
    batch as the model gets it; without it the first one of the `eval_dataset` is taken. Settings are those of `Grower`.
    """

    def __init__(
        self,
        *,
        example_input: Any = None,
        controller: Controller | str = "heuristic",
        config: GrowthConfig | None = None,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self.example_input, self.controller, self.config, self.on_event = example_input, controller, config or GrowthConfig(), on_event
        self.grower: Grower | None = None
        self.trainer: Trainer | None = None
        self.resumed: Path | None = None  # the checkpoint that this training goes on from
        self.ignored: SeedsIgnored | None = None  # while the Trainer loads it
        self._loaders: list[Iterable[Any]] = []
        self._losses: list[Tensor] = []  # since the optimiser's last step
        self._batches: list[Any] = []

    def bake(self) -> nn.Module:
        """The model with the fossilized seeds in it, and nothing else of ours. `esper.load` grows a fresh one to the same structure."""
        return self._grower().bake()

    def weights_are_loaded(self) -> None:
        if self.ignored is not None:
            self.ignored.stop()
            self.ignored = None

    def note(self, loss: Tensor, batch: Mapping[str, Any]) -> None:
        """What a forward and backward pass gave."""
        self._losses.append(loss.detach())
        self._batches.append(batch)

    # What the Trainer calls

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        trainer = self._trainer()
        self.weights_are_loaded()
        _check_can_follow(trainer, args, state)
        if self.grower is not None:
            if self.resumed is None:
                raise GrowthError("this callback has grown a model already; bake() it, and make another callback for another training")
            self.grower.stop()
            self.grower.slotted.remove()
        self._losses, self._batches = [], []
        self._loaders = _evaluation_loaders(trainer)
        slotted = self._add_slots(trainer)
        try:
            self.grower = self._make_grower(trainer, slotted, epochs=state.num_train_epochs)
            if self.resumed is not None:
                self.grower.load_state_dict(_read(self.resumed))
        except BaseException:
            slotted.remove()
            raise
        self.grower.begin()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """A checkpoint of an epoch's last step is resumed with the next epoch; then the end of that one is still to come."""
        if float(state.epoch or 0).is_integer():
            self._end_epoch()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        losses, batches = self._losses, self._batches
        self._losses, self._batches = [], []
        samples = sum(map(size_of, batches))
        # Every one is divided by their number already, or by the number of tokens in all of them.
        self._grower().after_step(torch.stack(losses).sum(), closure=partial(self._loss, batches[-1]), samples=samples)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._end_epoch()

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if args.should_save and not args.save_only_model:
            folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            CheckpointStore(folder / FOLDER, kind=KIND).save(state.global_step, self._grower().state_dict())

    # How a grower is made

    def _trainer(self) -> Any:
        if self.trainer is None:
            raise GrowthError("the trainer has to be a GrowthTrainer: GrowthTrainer(model, arguments, ..., growth=callback)")
        return self.trainer

    def _grower(self) -> Grower:
        if self.grower is None:
            raise GrowthError("nothing has grown yet: trainer.train() with this callback comes first")
        return self.grower

    def _add_slots(self, trainer: Any) -> Slotted:
        example = self.example_input
        if example is None:
            with isolated(trainer.model):  # a loader may draw random numbers
                example = dict(next(iter(self._loaders[0])))
        return add_slots(trainer.model_wrapped, example, slots=self.config.slots)

    def _make_grower(self, trainer: Any, slotted: Slotted, *, epochs: int) -> Grower:
        return Grower(
            slotted,
            getattr(trainer.optimizer, "optimizer", trainer.optimizer),  # without accelerate around it
            scaler=trainer.accelerator.scaler,
            scheduler=trainer.lr_scheduler,
            controller=self.controller,
            config=self.config,
            epochs=epochs,
            on_event=self.on_event,
        )

    # Losses

    def _end_epoch(self) -> None:
        grower = self._grower()
        if grower.history.steps:  # of an epoch that is not over for the grower
            grower.after_epoch(lambda: list(self._evaluate(grower)))

    def _evaluate(self, grower: Grower) -> Iterator[tuple[Tensor, int]]:
        """The loss and the size of every batch. Draws nothing from the random streams that training uses."""
        trainer = self._trainer()
        with isolated(trainer.model):
            trainer.model.eval()
            for loader in self._loaders:
                for batch in loader:
                    loss, _, _ = trainer.prediction_step(trainer.model, batch, prediction_loss_only=True)
                    if loss is None:
                        raise GrowthError(f"the eval_dataset gives no loss: it has no {' or '.join(trainer.label_names)}")
                    yield loss, size_of(batch)
                    grower.count_evaluation(size_of(batch))

    def _loss(self, batch: Mapping[str, Any]) -> Tensor:
        """Of a training batch, again."""
        trainer = self._trainer()
        with trainer.compute_loss_context_manager():
            return checked(trainer.compute_loss(trainer.model, dict(batch)))


class GrowthTrainer(Trainer):
    """A Trainer whose model grows."""

    def __init__(self, *arguments: Any, growth: GrowthTrainerCallback, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self.growth = growth
        growth.trainer = self
        self.add_callback(growth)

    def train(self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **others: Any) -> Any:
        found = get_last_checkpoint(self.args.output_dir) if resume_from_checkpoint is True else resume_from_checkpoint
        self.growth.resumed = Path(found) if found else None
        if found:
            self.growth.ignored = SeedsIgnored(self.model, [] if self.growth.grower is None else self.growth.grower.slotted.slots.values())
        try:
            return super().train(resume_from_checkpoint, *arguments, **others)
        finally:
            self.growth.weights_are_loaded()

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *arguments: Any, **others: Any) -> Tensor:
        loss: Tensor = super().training_step(model, inputs, *arguments, **others)
        self.growth.note(loss, inputs)
        return loss


def _check_can_follow(trainer: Any, args: Any, state: Any) -> None:
    """What would go wrong later, or silently."""
    if args.load_best_model_at_end:
        raise GrowthError(
            "load_best_model_at_end would put the weights of an earlier epoch beside the seeds of the last; set it to False, "
            "and resume from that checkpoint where it is wanted"
        )
    if state.is_hyper_param_search:
        raise GrowthError("a hyperparameter search makes many models, and this callback grows one; search without it")
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise GrowthError("on several devices a model grows under DistributedDataParallel, not under FSDP or DeepSpeed")


def _evaluation_loaders(trainer: Any) -> list[Iterable[Any]]:
    if not trainer.eval_dataset:
        raise GrowthError("seeds are judged by validation data after every epoch; pass eval_dataset to the trainer")
    names = list(trainer.eval_dataset) if isinstance(trainer.eval_dataset, dict) else [None]
    return [trainer.get_eval_dataloader(name) for name in names]


def _read(checkpoint: Path) -> dict[str, Any]:
    store = CheckpointStore(checkpoint / FOLDER, kind=KIND)
    if not store.has_any():
        raise GrowthError(f"{checkpoint} has no folder {FOLDER!r}: it was not written by a GrowthTrainer, or with save_only_model")
    state: dict[str, Any] = store.load("latest").state
    return state
