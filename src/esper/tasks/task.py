"""The class `Task`: data in three parts, hosts in three sizes, a loss, and the evaluation of a model.

Shapes: M = samples of a part, B = samples of a batch, T = tokens of a sequence (text only), K = classes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.rng import Streams
from esper.tasks.loader import Augmentation, BatchLoader
from esper.tasks.options import TaskError

HOST_SIZES = ("starved", "right", "oversized")


@dataclass(frozen=True, eq=False)
class Split:
    """One part of the data. The parts of a task are on the CPU."""

    inputs: Tensor  # float32 [M, channels, ...], or int64 [M, T]
    targets: Tensor  # int64 [M], or int64 [M, T], 0 .. K - 1

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class TaskEvaluation:
    """Loss and accuracy of a model in one pass over a loader."""

    loss: float  # nats, mean over all targets
    accuracy: float  # share of targets that have the highest logit, 0 .. 1
    losses: tuple[float, ...]  # mean loss of each batch, for paired comparisons


@dataclass(frozen=True, eq=False)
class Task:
    """A task, as `load_task` returns it. Neither decisions nor rewards may depend on `test`."""

    name: str
    title: str  # one line, shown to users
    source: str  # source of the data and their licence
    num_classes: int
    train: Split
    validation: Split
    test: Split
    hosts: Mapping[str, Callable[[], nn.Module]]  # size -> function that makes a host
    batch_size: int
    seed: int = 0  # default seed of hosts and data orders; the data and their parts never depend on it
    augmentation: Augmentation | None = None
    host_of: Callable[[tuple[int, ...]], nn.Module] | None = None  # makes a host whose blocks have these channels

    @property
    def host_sizes(self) -> tuple[str, ...]:
        return HOST_SIZES

    @cached_property
    def uninformed_loss(self) -> float:
        """Validation loss, in nats, of a model that always predicts the class frequencies of the validation part."""
        shares = torch.bincount(self.validation.targets.flatten()).double() / self.validation.targets.numel()
        return float(torch.special.entr(shares).sum())

    @property
    def example_input(self) -> Tensor:
        """Two training inputs, for a trial forward pass of a host."""
        return self.train.inputs[:2].clone()

    def make_host(self, size: str, *, seed: int | None = None) -> nn.Module:
        """Make a host on the CPU. Its weights depend only on the seed and the size, not on earlier random draws.

        `size` is a name, or for convolutional hosts the channels of the blocks, such as "5-10-20".
        """
        build = self._builder(size)
        stream = Streams(self.seed if seed is None else seed).integer(f"host {size}")
        # Layers draw their weights from the CPU's global generator. Seed only that one and restore it; `torch.manual_seed` would also seed
        # the generators of all other devices.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(stream)
            try:
                return build()
            except ValueError as error:
                raise TaskError(f"no host {size!r} for {self.name}: {error}") from error

    def maker(self, size: str) -> Callable[[int], nn.Module]:
        """Return a function that makes hosts of one size from seeds."""
        return lambda seed: self.make_host(size, seed=seed)

    def _builder(self, size: str) -> Callable[[], nn.Module]:
        """Return the function that makes a host of a size, given by name or by the channels of its blocks."""
        if size in self.hosts:
            return self.hosts[size]
        if self.host_of is None or not re.fullmatch(r"[1-9]\d*(-[1-9]\d*)*", size):
            or_channels = "" if self.host_of is None else ', or one by the channels of its blocks, such as "5-10-20"'
            raise TaskError(f"no host named {size!r}; {self.name} has {', '.join(self.hosts)}{or_channels}")
        return partial(self.host_of, tuple(map(int, size.split("-"))))

    def train_loader(
        self, *, seed: int | None = None, device: str | torch.device = "cpu", augment: bool = False, drop_last: bool = False
    ) -> BatchLoader:
        """Return a loader of the training part, which shuffles it in each epoch. The data are copied to `device` once."""
        if augment and self.augmentation is None:
            raise TaskError(f"{self.name} has no augmentation; leave augment off")
        return BatchLoader(
            self.train.inputs.to(device),
            self.train.targets.to(device),
            batch_size=self.batch_size,
            seed=self.seed if seed is None else seed,
            drop_last=drop_last,
            augmentation=self.augmentation if augment else None,
        )

    def val_loader(self, *, device: str | torch.device = "cpu") -> BatchLoader:
        """Return a loader of the validation part, always in the same order."""
        return self._fixed_loader(self.validation, device)

    def test_loader(self, *, device: str | torch.device = "cpu") -> BatchLoader:
        """Return a loader of the test part, always in the same order."""
        return self._fixed_loader(self.test, device)

    def _fixed_loader(self, split: Split, device: str | torch.device) -> BatchLoader:
        return BatchLoader(split.inputs.to(device), split.targets.to(device), batch_size=self.batch_size)

    def loss_fn(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy in nats of logits [B, K] or [B, T, K] and targets [B] or [B, T]."""
        return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())

    def accuracy(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the share of targets that have the highest logit, as a scalar tensor on the device, 0 .. 1."""
        return (outputs.argmax(dim=-1) == targets).float().mean()

    def evaluate(self, model: nn.Module, loader: Iterable[tuple[Tensor, Tensor]]) -> TaskEvaluation:
        """Evaluate a model in one pass, in evaluation mode and without gradients. Restores the mode of every module.

        Waits for the device only once, at the end.
        """
        rows, counts = [], []
        was_training = [(module, module.training) for module in model.modules()]
        model.eval()
        try:
            with torch.inference_mode():
                for inputs, targets in loader:
                    outputs = model(inputs)
                    rows.append(torch.stack([self.loss_fn(outputs, targets).float(), self.accuracy(outputs, targets)]))
                    counts.append(targets.numel())
        finally:
            for module, mode in was_training:
                module.training = mode
        if not rows:
            raise TaskError("the loader gave no batch to evaluate on; give one that is not empty")
        table = torch.stack(rows).cpu().double()  # [batches, 2]
        weights = torch.tensor(counts, dtype=torch.float64, device="cpu") / sum(counts)
        loss, accuracy = (weights @ table).tolist()
        return TaskEvaluation(loss=loss, accuracy=accuracy, losses=tuple(table[:, 0].tolist()))

    def num_parameters(self, size: str) -> int:
        """Return the number of parameters of the host of this size."""
        return sum(parameter.numel() for parameter in self.make_host(size).parameters())

    def describe(self) -> str:
        """Return a description of the task in a few lines."""
        hosts = " · ".join(f"{size} {self.num_parameters(size):,}" for size in self.host_sizes)
        shape = " × ".join(map(str, self.train.inputs.shape[1:]))
        return "\n".join(
            [
                f"{self.name}: {self.title}",
                f"  samples   train {len(self.train):,} · validation {len(self.validation):,} · test {len(self.test):,}, of {shape}",
                f"  classes   {self.num_classes}; the uninformed loss is {self.uninformed_loss:.3f}",
                f"  hosts     {hosts} parameters",
                f"  batches   of {self.batch_size}",
                f"  data      {self.source}",
            ]
        )
