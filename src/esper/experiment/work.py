"""Makes a model with its data, loss and optimiser, from a task of esper or from the user's code, and scores it on the test part."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import length_hint
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from esper.experiment.config import GrowTaskConfig
from esper.experiment.user_code import find_function, make_loaders, make_model
from esper.growth.batches import StepLoss, size_of
from esper.growth.config import GrowthError, TrainingConfig
from esper.growth.metrics import Metric, accuracy
from esper.growth.training_loop import Training, move, step_loss_of
from esper.tasks import load_task


class ModelScore(NamedTuple):
    """Score of a model on the test part."""

    loss: float
    accuracy: float | None  # None: the loss is not that of a classifier


# Takes two models; returns the difference of their accuracies per sample, [samples], or None if the loss is not that of a classifier.
Compare = Callable[[nn.Module, nn.Module], Tensor | None]


@dataclass(frozen=True)
class Work:
    """A model, its data and its losses. It is made again for the twin, so that the twin gets the same weights and batches."""

    model: nn.Module
    train_loader: Iterable[Any]
    val_loader: Iterable[Any]
    step_loss: StepLoss
    score: Callable[[nn.Module], ModelScore] | None  # on the test part; None: there is none
    compare: Compare | None  # on the test part; None: there is none, or the loss is not that of a classifier
    growth: TrainingConfig
    metrics: Mapping[str, Metric] = field(default_factory=dict)  # of the validation data, beside the loss

    def training(self, config: GrowTaskConfig) -> Training:
        """Return the training of a copy of the model."""
        return Training(
            copy.deepcopy(self.model),
            self.train_loader,
            self.val_loader,
            self.step_loss,
            epochs=config.epochs,
            make_optimizer=partial(_make_optimizer, config),
            make_scheduler=None if config.schedule == "none" else partial(_make_scheduler, config, self.train_loader),
            config=self.growth,
            metrics=self.metrics,
        )


def make_work(config: GrowTaskConfig, device: torch.device) -> Work:
    """Make the work that a config describes, with the model on the device."""
    return _from_task(config, device) if config.task is not None else _from_user_code(config, device)


def _from_task(config: GrowTaskConfig, device: torch.device) -> Work:
    assert config.task is not None
    task = load_task(
        config.task, data_dir=config.data_dir, seed=config.seed, batch_size=config.batch_size, sequence_length=config.sequence_length
    )
    test_loader = task.test_loader(device=device)

    def score(model: nn.Module) -> ModelScore:
        result = task.evaluate(model, test_loader)
        return ModelScore(result.loss, result.accuracy)

    return Work(
        model=task.make_host(config.host).to(device),
        train_loader=task.train_loader(device=device, augment=config.augment),
        val_loader=task.val_loader(device=device),
        step_loss=step_loss_of(task.loss_fn, None),
        score=score,
        compare=partial(_compare, test_loader, device, -1),  # logits of a task are [..., classes]
        growth=_growth_part(config),
        metrics={"accuracy": task.accuracy},
    )


def _from_user_code(config: GrowTaskConfig, device: torch.device) -> Work:
    """Make the work from the user's own functions. They draw from the global generators, which are seeded first."""
    assert config.model is not None
    assert config.data is not None
    random.seed(config.seed)
    np.random.seed(config.seed % 2**32)  # noqa: NPY002
    torch.manual_seed(config.seed)
    model = make_model(config.model).to(device)
    train_loader, val_loader, test_loader = make_loaders(config.data)
    is_classifier = config.loss is None and config.step_loss is None
    loss_fn = None if config.step_loss else find_function(config.loss, "--loss") if config.loss else F.cross_entropy
    step_loss = step_loss_of(loss_fn, find_function(config.step_loss, "--step-loss") if config.step_loss else None)
    score = None if test_loader is None else partial(_score, test_loader, step_loss, device, is_classifier)
    # F.cross_entropy takes logits [samples, classes, ...].
    compare = partial(_compare, test_loader, device, 1) if is_classifier and test_loader is not None else None
    metrics: dict[str, Metric] = {"accuracy": accuracy} if is_classifier else {}
    return Work(model, train_loader, val_loader, step_loss, score, compare, _growth_part(config), metrics)


def _growth_part(config: GrowTaskConfig) -> TrainingConfig:
    """Return the settings of the config that `Training` needs."""
    return TrainingConfig(**{name: getattr(config, name) for name in TrainingConfig.__struct_fields__})


def _score(loader: Iterable[Any], step_loss: StepLoss, device: torch.device, is_classifier: bool, model: nn.Module) -> ModelScore:
    """Return the mean loss over samples, and the accuracy of a classifier."""
    losses, hits, counts = [], [], []
    with torch.inference_mode():
        model.eval()
        for raw in loader:
            batch = move(raw, device)
            counts.append(size_of(batch))
            losses.append(float(step_loss(model, batch)))
            is_right = _is_right(model(batch[0]), batch[1], class_dim=1) if is_classifier else None
            hits.append(math.nan if is_right is None else float(is_right.float().mean()))
    total = sum(counts)
    if not total:
        return ModelScore(math.nan, None)
    loss, share = (sum(value * count for value, count in zip(values, counts, strict=True)) / total for values in (losses, hits))
    return ModelScore(loss, share if math.isfinite(share) else None)


def _compare(loader: Iterable[Any], device: torch.device, class_dim: int, grown: nn.Module, never: nn.Module) -> Tensor | None:
    """Return the differences in accuracy, sample by sample: [samples]. The targets of one sample are averaged.

    Both models see a batch before the next one is loaded, because a loader may shuffle.
    """
    differences = []
    with torch.inference_mode():
        for raw in loader:
            inputs, targets = move(raw, device)[:2]
            shares = []
            for model in (grown, never):
                is_right = _is_right(model.eval()(inputs), targets, class_dim=class_dim)
                if is_right is None:
                    return None
                shares.append(is_right.double().reshape(len(targets), -1).mean(dim=1))
            differences.append(shares[0] - shares[1])
    return torch.cat(differences).cpu() if differences else None


def _is_right(outputs: Tensor, targets: Tensor, *, class_dim: int) -> Tensor | None:
    """Return whether each target has the highest score along the dimension `class_dim`; None if the targets are not class numbers."""
    if targets.is_floating_point() or outputs.ndim < 2:
        return None
    return outputs.argmax(dim=class_dim) == targets


def _make_optimizer(config: GrowTaskConfig, parameters: Iterable[nn.Parameter]) -> Optimizer:
    options: dict[str, Any] = {"lr": config.learning_rate}
    if config.weight_decay is not None:
        options["weight_decay"] = config.weight_decay
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, momentum=0.9, nesterov=True, **options)
    return torch.optim.AdamW(parameters, **options)


def _make_scheduler(config: GrowTaskConfig, loader: Iterable[Any], optimizer: Optimizer) -> Any:
    """Make a cosine schedule over the whole training, in epochs or in steps of the optimiser."""
    times = config.epochs
    if config.step_schedule == "step":
        batches = length_hint(loader)
        if not batches:
            raise GrowthError("the training loader does not tell how many batches it has; leave --step-schedule out")
        times *= math.ceil(batches / config.accumulate)
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=times)
