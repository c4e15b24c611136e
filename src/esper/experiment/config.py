"""Settings of an experiment: model, data, training, the controller of the growth, and the twin. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeVar

from esper.config import ConfigError, Count, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Threads
from esper.growth.config import TrainingConfig

CONTROLLERS = ("heuristic", "lookahead", "learned", "random", "schedule", "never")  # all others are paths of controller files
Settings = TypeVar("Settings", bound=TrainingConfig)


def is_file_name(controller: str) -> bool:
    """Return whether this is a path: it has a slash or ends in .safetensors. Any other word is the name of a controller.

    >>> is_file_name("./mine"), is_file_name("mine.safetensors"), is_file_name("heuristc")
    (True, True, False)
    """
    return Path(controller).suffix == ".safetensors" or "/" in controller


def file_of_controller(controller: str) -> Path | None:
    """Return the file of a trained controller: the one that comes with the package, or that of a path; None for all others."""
    from esper.controller.trained import NAME, file_of

    return file_of(controller) if controller == NAME or is_file_name(controller) else None


class GrowTaskConfig(TrainingConfig):
    """Settings of one run: a task of esper with one of its hosts, or a model and loaders from the user's own code."""

    seed: NonNegativeInt = 0  # of everything that is random: weights, order of the data, seeds that grow, plans
    task: str | None = None  # a task of esper, such as digits; `esper grow` alone lists them
    host: str = "starved"
    """host of the task: starved, right or oversized, or any by family, width and blocks, such as residual-8x3 (conv, residual, mlp, gpt)"""
    data_dir: Path | None = None  # folder with the data of a task that does not bring its own
    batch_size: Count | None = None  # of a task; None: the task's own
    sequence_length: Count | None = None  # of the text task, in characters; None: the task's own
    augment: bool = False  # crop and flip training images at random, in tasks that support it, such as cifar10
    model: str | None = None  # package.module:make_model, which returns an nn.Module
    data: str | None = None  # package.module:make_loaders, which returns loaders: (train, validation) or (train, validation, test)
    loss: str | None = None  # package.module:loss, called as loss(outputs, targets); None: cross entropy
    step_loss: str | None = None  # package.module:step_loss, called as step_loss(model, batch), for batches that are not (inputs, targets)
    controller: str = "heuristic"  # heuristic, lookahead, learned, random, schedule, never, or the file of a trained one
    twin: bool = False  # train a twin that never grows as well, from the same weights on the same batches
    epochs: PositiveInt = 40
    optimizer: Literal["adamw", "sgd"] = "adamw"  # of the host; sgd: with Nesterov momentum 0.9
    learning_rate: PositiveFloat = 1e-3
    weight_decay: NonNegativeFloat | None = None  # None: the default of the optimizer
    schedule: Literal["none", "cosine"] = "none"  # of the learning rate; cosine: falls towards 0, by epochs or by step_schedule
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda where there is one
    threads: Threads | None = None  # CPU threads of torch; None: torch's default
    deterministic: bool = False  # bit-identical runs on a GPU too, with slower kernels; otherwise cuDNN chooses the fastest
    tensorboard: bool = False  # also write scalars for TensorBoard into the run folder
    wandb: Literal["offline", "online"] | None = None
    """also write scalars for Weights & Biases into the run folder; online: and send them to your account"""

    def check(self) -> None:
        super().check()
        of_model = {name: getattr(self, name) for name in ("data", "loss", "step_loss")}
        of_task = {name: getattr(self, name) for name in ("data_dir", "batch_size", "sequence_length", "augment")}
        if self.task is not None and self.model is not None:
            raise ConfigError("model", expected="no model together with a task: either a task of esper or your own model", got=self.model)
        for name, value in of_model.items():
            if value is not None and self.model is None:
                raise ConfigError(name, expected="a model of your own with it (model = package.module:make_model)", got=value)
        for name, value in of_task.items():
            if value not in (None, False) and self.model is not None:
                raise ConfigError(name, expected="nothing, because make_loaders decides about the data of your own model", got=value)
        if self.model is not None and self.data is None:
            raise ConfigError("data", expected="package.module:make_loaders, which the model needs", got=self.data)
        if self.loss is not None and self.step_loss is not None:
            raise ConfigError("step_loss", expected="only one of loss and step_loss", got=self.step_loss)
        if self.schedule == "none" and self.step_schedule != "auto":
            raise ConfigError("step_schedule", expected="a schedule with it (--schedule cosine)", got=self.step_schedule)
        if self.controller not in CONTROLLERS and self.controller_file is None:
            expected = f"one of {', '.join(CONTROLLERS)}, or the path of a trained one, such as ./controller.safetensors"
            raise ConfigError("controller", expected=expected, got=self.controller)

    @property
    def controller_file(self) -> Path | None:
        """Return the file of a trained controller, or None."""
        return file_of_controller(self.controller)

    @property
    def title(self) -> str:
        """Return the name of what is grown."""
        return f"{self.task}, {self.host} host" if self.task is not None else str(self.model)


class GrowSeedsConfig(GrowTaskConfig):
    """Settings of several runs with their twins, whose seeds are `seed`, `seed` + 1 and so on."""

    seeds: PositiveInt = 5  # number of runs
