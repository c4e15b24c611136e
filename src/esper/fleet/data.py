"""The data of a fleet: on the device once, and for every host its own part of it, its own order and its own labels.

Shapes: N = hosts, M = training samples, B = samples of a batch, T = steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from esper.fleet.config import FleetError, HostSetting
from esper.fleet.device import upload
from esper.rng import Streams
from esper.tasks import Split, Task, shuffled_order


class Order:
    """The training samples of one host, epoch after epoch without end, each epoch in a new order: where it is takes two numbers."""

    def __init__(self, chosen: Tensor, *, seed: int) -> None:
        self.chosen, self.seed = chosen, seed  # [m] int64 on the CPU: the samples that this host may see
        self.epoch = 0
        self.position = 0  # of the next sample in this epoch
        self._shuffled: Tensor | None = None

    def take(self, count: int) -> Tensor:
        """The next samples [count]."""
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
        self.epoch, self.position, self._shuffled = epoch, position, None


@dataclass(frozen=True, eq=False)
class TaskTensors:
    """Training and validation samples on the device, for as many fleets as there are. Nothing of the test part."""

    inputs: Tensor  # [M, ...]
    targets: Tensor
    labels: Tensor  # the targets on the CPU, to choose by
    validation: Split
    num_classes: int
    _rounded: dict[torch.dtype, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, task: Task, *, device: torch.device, dtype: torch.dtype) -> TaskTensors:
        train, validation = task.train, task.validation
        placed = Split(placed_inputs(validation.inputs, device, dtype), validation.targets.to(device))
        return cls(placed_inputs(train.inputs, device, dtype), train.targets.to(device), train.targets, placed, task.num_classes)

    def __len__(self) -> int:
        return len(self.labels)

    def rounded(self, dtype: torch.dtype) -> Tensor:
        """The training inputs in half precision, made once: half as much to gather in every step, and nothing to convert."""
        if dtype not in self._rounded:
            self._rounded[dtype] = rounded_inputs(self.inputs, dtype)
        return self._rounded[dtype]


def rounded_inputs(inputs: Tensor, dtype: torch.dtype) -> Tensor:
    """On a GPU; a CPU is not faster for it."""
    return inputs.to(dtype) if inputs.is_cuda and inputs.is_floating_point() else inputs


def placed_inputs(inputs: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    return inputs.to(device, dtype if inputs.is_floating_point() else None).contiguous()


class FleetData:
    """What every host of a fleet sees of the training data."""

    def __init__(self, tensors: TaskTensors, *, hosts: int, precision: torch.dtype | None = None) -> None:
        self.tensors = tensors
        self._inputs = tensors.inputs if precision is None else tensors.rounded(precision)
        self.orders = [Order(torch.arange(len(tensors)), seed=0) for _ in range(hosts)]
        self._noisy: dict[int, Tensor] = {}  # row -> its labels [M], where some of them are wrong
        self._stacked: Tensor | None = None  # labels of every row [N, M], where any row has its own

    def reset(self, row: int, setting: HostSetting) -> None:
        self.orders[row] = Order(self._chosen(setting), seed=setting.seed)
        self._noisy.pop(row, None)
        if setting.label_noise:
            self._noisy[row] = self._wrong_labels(setting)
        self._stacked = None

    def batches(self, steps: int, batch_size: int, *, rows: Sequence[int]) -> Tensor:
        """Which samples these hosts see in the next steps: [T, B, hosts] on the device. The others stay where they are."""
        taken = [self.orders[row].take(steps * batch_size) for row in rows]
        return upload(torch.stack(taken, dim=1).reshape(steps, batch_size, len(taken)), self.tensors.targets.device)

    def batch(self, index: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs [B, hosts, ...] and labels of the samples [B, hosts]; `rows` [hosts] says whose labels."""
        labels = self._labels()
        inputs = self._inputs.index_select(0, index.flatten()).view(*index.shape, *self._inputs.shape[1:])
        return inputs, self.tensors.targets[index] if labels is None else labels[rows, index]

    def _labels(self) -> Tensor | None:
        if self._noisy and self._stacked is None:
            rows = [self._noisy.get(row, self.tensors.labels) for row in range(len(self.orders))]
            self._stacked = torch.stack(rows).to(self.tensors.targets.device)
        return self._stacked

    def _chosen(self, setting: HostSetting) -> Tensor:
        """The samples of some classes, and a share of those."""
        chosen = torch.arange(len(self.tensors.labels))
        streams = Streams(setting.seed)
        if setting.classes_share < 1:
            count = max(round(setting.classes_share * self.tensors.num_classes), 2)
            classes = torch.randperm(self.tensors.num_classes, generator=streams.torch("classes"))[:count]
            chosen = chosen[torch.isin(self.tensors.labels, classes)]
            if not len(chosen):
                raise FleetError(
                    f"host seed {setting.seed} would see the classes {classes.tolist()}, of which there are no training samples"
                )
        if setting.data_share < 1:
            count = max(round(setting.data_share * len(chosen)), 1)
            chosen = chosen[torch.randperm(len(chosen), generator=streams.torch("data share"))[:count]].sort().values
        return chosen

    def _wrong_labels(self, setting: HostSetting) -> Tensor:
        generator = Streams(setting.seed).torch("label noise")
        is_wrong = torch.rand(len(self.tensors.labels), generator=generator) < setting.label_noise
        shift = torch.randint(1, self.tensors.num_classes, self.tensors.labels.shape, generator=generator)
        return torch.where(is_wrong, (self.tensors.labels + shift) % self.tensors.num_classes, self.tensors.labels)

    def state_dict(self) -> dict[str, Any]:
        """Where every host is in its data. What it sees and which labels are wrong comes from its setting."""
        return {"orders": [[order.epoch, order.position] for order in self.orders]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for order, (epoch, position) in zip(self.orders, state["orders"], strict=True):
            order.move_to(epoch, position)
