"""Growth in the training loop of Hugging Face transformers.

    growth = GrowthTrainerCallback()
    trainer = GrowthTrainer(model, arguments, train_dataset=train, eval_dataset=held_out, growth=growth)
    trainer.train()
    model = growth.bake()

A callback alone is not enough: the Trainer tells callbacks neither the loss of a step nor the checkpoint that is resumed. GrowthTrainer
gets both by overriding `training_step` and `train`. It also works as a mixin before another trainer:
class Growing(GrowthTrainer, SFTTrainer).

The model file of every checkpoint holds the seeds. Read it with `esper.load(folder, model=Model(config))`; `from_pretrained` would leave
the seeds out and report unexpected keys. The stages and optimisers of the seeds are in a folder `growth` beside it, and
`train(resume_from_checkpoint=...)` resumes the saved run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from esper.growth.batches import checked, size_of
from esper.growth.config import GrowthConfig, GrowthError
from esper.growth.grower import KIND, Grower
from esper.growth.host.isolation import isolated
from esper.growth.host.slotted import Slotted, add_slots
from esper.growth.host.state_dict import SeedsIgnored
from esper.growth.lifecycle.stages import Controller
from esper.growth.metrics import Metric, MetricSums, check_functions
from esper.growth.telemetry import check_callbacks, check_sinks
from esper.runs import CheckpointStore, Event, Sink

FOLDER = "growth"


class GrowthTrainerCallback(TrainerCallback):
    """Callback of one GrowthTrainer that grows its model during `train`. It owns a grower; `grower.ledger` lists the tried seeds.

    Seeds are judged by the trainer's `eval_dataset` after every epoch, whether or not the trainer evaluates then. The Trainer knows one
    loss per batch, so intervals rest on batches: choose `per_device_eval_batch_size` for many of them. `example_input` is an input of the
    model; by default the first batch of `eval_dataset`.

    `metrics` maps names to functions `fn(model, batch)` that return one number, as beside the `step_loss` of `esper.grow`; a batch is a
    dictionary, and `model(**batch)` returns the outputs that the loss was computed from. They are computed on `eval_dataset` after every
    epoch, and are in the events. `progress`, `on_event`, `callbacks` (of events, not of the Trainer), `sinks` and the other settings are
    those of `Grower`. Sinks are closed by `bake`, and when a second `train` begins; pass open ones to another callback.
    """

    def __init__(
        self,
        *,
        example_input: Any = None,
        controller: Controller | str = "heuristic",
        config: GrowthConfig | None = None,
        metrics: Mapping[str, Metric] | None = None,
        progress: bool = False,
        on_event: Callable[[Event], None] | None = None,
        callbacks: Sequence[Any] = (),
        sinks: Sequence[Sink] = (),
    ) -> None:
        self.example_input, self.controller, self.config = example_input, controller, config
        self.metrics, self.progress, self.on_event = check_functions(metrics), progress, on_event
        self.callbacks, self.sinks = check_callbacks(callbacks), check_sinks(sinks)
        self.grower: Grower | None = None
        self.trainer: Trainer | None = None
        self.resumed: Path | None = None  # checkpoint from which this training resumes
        self.ignored: SeedsIgnored | None = None  # set while the Trainer loads that checkpoint
        self._loaders: list[Iterable[Any]] = []  # of the validation data
        self._batches: list[Any] = []  # batches since the last optimiser step
        self._losses: list[Tensor] = []  # losses of these batches

    def bake(self) -> nn.Module:
        """Return the model with the fossilized seeds as ordinary modules. `esper.load` gives a fresh model the same structure."""
        return self._grower().bake()

    def weights_are_loaded(self) -> None:
        """Stop ignoring the seeds in a state dict, once the Trainer has loaded the weights of a checkpoint."""
        if self.ignored is not None:
            self.ignored.stop()
            self.ignored = None

    def note(self, loss: Tensor, batch: Mapping[str, Any]) -> None:
        """Remember the loss and the batch of one forward and backward pass."""
        self._losses.append(loss.detach())
        self._batches.append(batch)

    # Hooks that the Trainer calls

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Add the slots, build the grower, and load its state when resuming."""
        trainer = self._trainer()
        self.weights_are_loaded()
        _check_can_follow(trainer, args, state)
        if self.grower is not None:
            if self.resumed is None:
                raise GrowthError("this callback has grown a model already; bake() it, and make another callback for another training")
            self.grower.stop()
            self.grower.slotted.remove()
            self.grower = None  # the Trainer has loaded other weights, so its seeds are of no use even if the start fails
        self._losses, self._batches = [], []
        self._loaders = _evaluation_loaders(trainer)
        # Leave the user's model without slots, and its optimiser without hooks, if anything fails.
        with ExitStack() as undo:
            slotted = self._add_slots(trainer)
            undo.callback(slotted.remove)
            grower = self._make_grower(trainer, slotted, epochs=state.num_train_epochs)
            undo.callback(grower.stop)
            if self.resumed is not None:
                grower.load_state_dict(_read(self.resumed))
            undo.pop_all()
        self.grower = grower
        grower.begin()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """End the previous epoch if that has not happened: a run saved at the last step of an epoch resumes with the next epoch."""
        if float(state.epoch or 0).is_integer():
            self._end_epoch()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        losses, batches = self._losses, self._batches
        self._losses, self._batches = [], []
        samples = sum(map(size_of, batches))
        # Sum the losses: the Trainer has already divided each by the number of batches, or by the number of tokens in all of them.
        self._grower().after_step(torch.stack(losses).sum(), closure=partial(self._loss, batches[-1]), samples=samples)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._end_epoch()

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if args.should_save and not args.save_only_model:
            folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            CheckpointStore(folder / FOLDER, kind=KIND).save(state.global_step, {"grower": self._grower().state_dict()})

    # Construction of the grower

    def _trainer(self) -> Any:
        if self.trainer is None:
            raise GrowthError("the trainer has to be a GrowthTrainer: GrowthTrainer(model, arguments, ..., growth=callback)")
        return self.trainer

    def _grower(self) -> Grower:
        if self.grower is None:
            raise GrowthError("nothing has grown yet; call trainer.train() with this callback first")
        return self.grower

    def _add_slots(self, trainer: Any) -> Slotted:
        example = self.example_input
        if example is None:
            with isolated(trainer.model):  # because a loader may draw random numbers
                example = dict(next(iter(self._loaders[0])))
        return add_slots(trainer.model_wrapped, example, slots=None if self.config is None else self.config.slots)

    def _make_grower(self, trainer: Any, slotted: Slotted, *, epochs: int) -> Grower:
        return Grower(
            slotted,
            getattr(trainer.optimizer, "optimizer", trainer.optimizer),  # without the wrapper of accelerate
            scaler=trainer.accelerator.scaler,
            scheduler=trainer.lr_scheduler,
            controller=self.controller,
            config=self.config,
            keep="last",  # the trainer chooses the checkpoint to keep
            epochs=epochs,
            progress=self.progress,
            on_event=self.on_event,
            callbacks=self.callbacks,
            sinks=self.sinks,
        )

    # Losses

    def _end_epoch(self) -> None:
        grower = self._grower()
        if grower.history.steps:  # otherwise the grower has ended this epoch already
            # The Trainer adds the number of tokens, by which the loss is divided, to the batch.
            sums = MetricSums(self._trainer().model, self.metrics, of_pairs=False, ignored=("num_items_in_batch",))
            passes = iter([sums])  # the metrics are computed in the first pass, with all seeds on
            metrics = {name: partial(sums.mean, name) for name in self.metrics}
            grower.after_epoch(lambda: list(self._evaluate(grower, next(passes, None))), metrics=metrics)

    def _evaluate(self, grower: Grower, sums: MetricSums | None) -> Iterator[tuple[Tensor, int]]:
        """Yield the loss and the size of every validation batch, without drawing from the random streams of the training.

        `sums` takes the metrics of every batch, from the same forward passes.
        """
        trainer = self._trainer()
        with isolated(trainer.model), nullcontext() if sums is None else sums.recording():
            trainer.model.eval()
            for loader in self._loaders:
                for number, batch in enumerate(loader, start=1):
                    loss, _, _ = trainer.prediction_step(trainer.model, batch, prediction_loss_only=True)
                    if loss is None:
                        raise GrowthError(
                            f"the model gives no loss for eval_dataset; add the column {' or '.join(trainer.label_names)} to it"
                        )
                    yield loss, size_of(batch)
                    grower.count_evaluation(size_of(batch))
                    if sums is not None:
                        with trainer.compute_loss_context_manager(), torch.no_grad():
                            sums.note(batch, size_of(batch), where=f"batch {number} of eval_dataset")

    def _loss(self, batch: Mapping[str, Any]) -> Tensor:
        """Compute the loss of a training batch once more."""
        trainer = self._trainer()
        with trainer.compute_loss_context_manager():
            return checked(trainer.compute_loss(trainer.model, dict(batch)))


class GrowthTrainer(Trainer):
    """A Trainer whose model grows. `growth` is the callback with the settings."""

    def __init__(self, *arguments: Any, growth: GrowthTrainerCallback, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self.growth = growth
        growth.trainer = self
        self.add_callback(growth)

    def train(self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **others: Any) -> Any:
        # Let the Trainer load a checkpoint without the seeds; `on_train_begin` restores them.
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
    """Raise GrowthError for settings of the Trainer that would fail later or give wrong results."""
    if args.load_best_model_at_end:
        raise GrowthError(
            "load_best_model_at_end would put the weights of an earlier epoch beside the seeds of the last; set it to False, "
            "and resume from that checkpoint if you want its weights"
        )
    if state.is_hyper_param_search:
        raise GrowthError("a hyperparameter search makes many models, and this callback grows one; search without it")
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise GrowthError("on several devices a model grows under DistributedDataParallel, not under FSDP or DeepSpeed")


def _evaluation_loaders(trainer: Any) -> list[Iterable[Any]]:
    """Return a loader for every evaluation data set of the trainer."""
    if not trainer.eval_dataset:
        raise GrowthError("there is no validation data, by which seeds are judged after every epoch; pass eval_dataset to the trainer")
    names = list(trainer.eval_dataset) if isinstance(trainer.eval_dataset, dict) else [None]
    return [trainer.get_eval_dataloader(name) for name in names]


def _read(checkpoint: Path) -> dict[str, Any]:
    """Return the saved state of the grower from a checkpoint of the Trainer."""
    store = CheckpointStore(checkpoint / FOLDER, kind=KIND)
    if not store.has_any():
        raise GrowthError(f"{checkpoint} has no folder {FOLDER!r}; resume from a checkpoint of a GrowthTrainer without save_only_model")
    state: dict[str, Any] = store.load("latest").state["grower"]
    return state
