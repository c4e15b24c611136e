"""The class `Task`: data in three parts, hosts in three sizes, a loss, and the evaluation of a model.

Shapes: M = samples of a part, B = samples of a batch, T = tokens of a sequence (text only), K = classes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.rng import Streams
from esper.tasks.hosts import is_family_name, make_host
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


def with_wrong_labels(labels: Tensor, share: float, *, num_classes: int, generator: torch.Generator) -> Tensor:
    """Return the labels with this share of them replaced by another class, drawn at random."""
    is_wrong = torch.rand(labels.shape, generator=generator) < share
    shift = torch.randint(1, num_classes, labels.shape, generator=generator)
    return torch.where(is_wrong, (labels + shift) % num_classes, labels)


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

        `size` is a name; the channels of the blocks of a convolutional host, such as "5-10-20"; or a family with a width and a number of
        blocks, such as "residual-8x3".
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
        """Return the function that makes a host of a size, given by name, by the channels of its blocks, or by its family."""
        if size in self.hosts:
            return self.hosts[size]
        if is_family_name(size):
            return partial(make_host, size, self.example_input, self.num_classes)
        if self.host_of is None or not re.fullmatch(r"[1-9]\d*(-[1-9]\d*)*", size):
            known = list(self.hosts)
            known += [] if self.host_of is None else ['hosts by the channels of their blocks, such as "5-10-20"']
            known.append(f'hosts by family, width and blocks, such as "{"mlp" if self.train.inputs.is_floating_point() else "gpt"}-8x3"')
            raise TaskError(f"no host named {size!r}; {self.name} has {', '.join(known)}")
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

    def with_classes(self, count: int, *, seed: int) -> Task:
        """Return the task with the samples of `count` random classes, which are numbered from 0. Its hosts have names like "conv-8x3"."""
        if not 2 <= count <= self.num_classes or self.train.targets.ndim != 1:
            raise TaskError(f"{self.name} has {self.num_classes} classes; a part of them is 2 or more, and not of tokens; got {count}")
        kept = torch.randperm(self.num_classes, generator=Streams(seed).torch("classes"))[:count].sort().values

        def of_kept(name: str, split: Split) -> Split:
            chosen = torch.isin(split.targets, kept)
            return Split(split.inputs[chosen], torch.searchsorted(kept, split.targets[chosen]))

        return replace(self._with_parts(of_kept), num_classes=count, hosts={}, host_of=None)

    def with_label_noise(self, share: float, *, seed: int) -> Task:
        """Return the task with this share of the targets of every part replaced by another class, drawn at random."""
        if not 0 <= share < 1:
            raise TaskError(f"the share of wrong labels is at least 0 and less than 1; got {share!r}")

        def noisy(name: str, split: Split) -> Split:
            generator = Streams(seed).torch(f"label noise {name}")
            return Split(split.inputs, with_wrong_labels(split.targets, share, num_classes=self.num_classes, generator=generator))

        return self._with_parts(noisy)

    def _with_parts(self, change: Callable[[str, Split], Split]) -> Task:
        """Return the task with its three parts changed. `change` gets the name and the data of a part."""
        train, validation, test = (change(name, getattr(self, name)) for name in ("train", "validation", "test"))
        return replace(self, train=train, validation=validation, test=test)

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
