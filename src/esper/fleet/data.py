"""The data of a fleet: one copy on the device, and for every host its own share of the samples, their order, and its own labels.

Shapes: N = hosts, M = training samples, B = samples of a batch, T = steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from esper.devices import upload
from esper.fleet.config import FleetError, HostConfig
from esper.rng import Streams
from esper.tasks import Split, Task, shuffled_order, with_wrong_labels


class Order:
    """The endless sequence of one host's training samples, in a new order every epoch. `epoch` and `position` are its whole state."""

    def __init__(self, chosen: Tensor, *, seed: int) -> None:
        self.chosen, self.seed = chosen, seed  # `chosen`: numbers of the samples that this host sees, int64 on the CPU
        self.epoch = 0
        self.position = 0  # of the next sample in this epoch
        self._shuffled: Tensor | None = None

    def take(self, count: int) -> Tensor:
        """Return the numbers of the next samples [count]."""
        parts: list[Tensor] = []
        while count:
            if self._shuffled is None:
                self._shuffled = self.chosen[shuffled_order(len(self.chosen), seed=self.seed, epoch=self.epoch)]
            part = self._shuffled[self.position : self.position + count]
            parts.append(part)
            count -= len(part)
            self.position += len(part)
            if self.position == len(self.chosen):
                self.epoch, self.position, self._shuffled = self.epoch + 1, 0, None
        return torch.cat(parts)

    def move_to(self, epoch: int, position: int) -> None:
        """Continue at this position of this epoch."""
        self.epoch, self.position, self._shuffled = epoch, position, None


@dataclass(frozen=True, eq=False)
class TaskTensors:
    """Training and validation samples of a task on the device. Several fleets can share them. Test samples are not part of it."""

    inputs: Tensor  # [M, ...]
    targets: Tensor  # [M, ...]
    labels: Tensor  # the targets on the CPU, where samples are chosen by class
    validation: Split
    num_classes: int
    _rounded: dict[torch.dtype, Tensor] = field(default_factory=dict)  # cache of `rounded`

    @classmethod
    def of(cls, task: Task, *, device: torch.device, dtype: torch.dtype) -> TaskTensors:
        """Copy the samples of a task to the device, with inputs of floating-point numbers in `dtype`."""
        train, validation = task.train, task.validation
        placed = Split(placed_inputs(validation.inputs, device, dtype), validation.targets.to(device))
        return cls(placed_inputs(train.inputs, device, dtype), train.targets.to(device), train.targets, placed, task.num_classes)

    def __len__(self) -> int:
        return len(self.labels)

    def rounded(self, dtype: torch.dtype) -> Tensor:
        """Return the training inputs in a half precision, converted once: each step then gathers half the bytes and converts nothing."""
        if dtype not in self._rounded:
            self._rounded[dtype] = rounded_inputs(self.inputs, dtype)
        return self._rounded[dtype]


def rounded_inputs(inputs: Tensor, dtype: torch.dtype) -> Tensor:
    """Return floating-point inputs in `dtype` on a GPU; on a CPU, where that is not faster, as they are."""
    return inputs.to(dtype) if inputs.is_cuda and inputs.is_floating_point() else inputs


def placed_inputs(inputs: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the inputs on a device, in `dtype` where they are floating-point numbers."""
    return inputs.to(device, dtype if inputs.is_floating_point() else None).contiguous()


class FleetData:
    """The training data as every host of a fleet sees it."""

    def __init__(self, tensors: TaskTensors, *, hosts: int, precision: torch.dtype | None = None) -> None:
        self.tensors = tensors
        self._inputs = tensors.inputs if precision is None else tensors.rounded(precision)
        self.orders = [Order(torch.arange(len(tensors)), seed=0) for _ in range(hosts)]
        self._noisy_labels: dict[int, Tensor] = {}  # row -> labels [M] of a host with label noise
        self._labels_of_rows: Tensor | None = None  # [N, M] on the device; None: not needed, or out of date

    def reset(self, row: int, setting: HostConfig) -> None:
        """Start the data of a row anew, by this setting."""
        self.orders[row] = Order(self._choose_samples(setting), seed=setting.seed)
        self._noisy_labels.pop(row, None)
        if setting.label_noise:
            self._noisy_labels[row] = self._draw_noisy_labels(setting)
        self._labels_of_rows = None

    def copy(self, row: int, source: int) -> None:
        """Give a row the samples and labels of another one, and its place in them."""
        order = self.orders[source]
        self.orders[row] = Order(order.chosen, seed=order.seed)
        self.orders[row].move_to(order.epoch, order.position)
        self._noisy_labels.pop(row, None)
        if source in self._noisy_labels:
            self._noisy_labels[row] = self._noisy_labels[source]
        self._labels_of_rows = None

    def batches(self, steps: int, batch_size: int, *, rows: Sequence[int]) -> Tensor:
        """Take the samples that these hosts see in the next steps. Return their numbers [T, B, hosts], on the device."""
        taken = [self.orders[row].take(steps * batch_size) for row in rows]
        return upload(torch.stack(taken, dim=1).reshape(steps, batch_size, len(taken)), self.tensors.targets.device)

    def batch(self, index: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs [B, hosts, ...] and targets of the samples `index` [B, hosts], with the labels of the hosts in `rows` [hosts]."""
        if self._noisy_labels and self._labels_of_rows is None:
            # Some hosts have wrong labels: stack the labels of all rows [N, M] once, until a row is reset.
            labels = [self._noisy_labels.get(row, self.tensors.labels) for row in range(len(self.orders))]
            self._labels_of_rows = torch.stack(labels).to(self.tensors.targets.device)
        inputs = self._inputs.index_select(0, index.flatten()).view(*index.shape, *self._inputs.shape[1:])
        return inputs, self.tensors.targets[index] if self._labels_of_rows is None else self._labels_of_rows[rows, index]

    def _choose_samples(self, setting: HostConfig) -> Tensor:
        """Return the numbers of the samples that a host sees: its share of the samples of its classes."""
        chosen = torch.arange(len(self.tensors.labels))
        streams = Streams(setting.seed)
        if setting.classes_share < 1:
            count = max(round(setting.classes_share * self.tensors.num_classes), 2)
            classes = torch.randperm(self.tensors.num_classes, generator=streams.torch("classes"))[:count]
            chosen = chosen[torch.isin(self.tensors.labels, classes)]
            if not len(chosen):
                raise FleetError(
                    f"there are no training samples of the classes {classes.tolist()}, which the host with seed {setting.seed} would see; "
                    "choose another seed or a larger classes_share"
                )
        if setting.data_share < 1:
            count = max(round(setting.data_share * len(chosen)), 1)
            chosen = chosen[torch.randperm(len(chosen), generator=streams.torch("data share"))[:count]].sort().values
        return chosen

    def _draw_noisy_labels(self, setting: HostConfig) -> Tensor:
        """Return the labels [M] of a host, some of them replaced by another class drawn at random."""
        generator, classes = Streams(setting.seed).torch("label noise"), self.tensors.num_classes
        return with_wrong_labels(self.tensors.labels, setting.label_noise, num_classes=classes, generator=generator)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of every host in its data. Its samples and wrong labels follow from its setting and are not saved."""
        return {"orders": [[order.epoch, order.position] for order in self.orders]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for order, (epoch, position) in zip(self.orders, state["orders"], strict=True):
            order.move_to(epoch, position)
