"""How much of a classification can be learned at all: the loss of a readout of random features of the inputs.

It tells a controller whether a high loss is that of a small network, or of wrong labels and hard data. A linear readout of random features
is fitted to three quarters of the samples by ridge regression, and measured on the rest. This needs no network and takes 35 ms for small
images.

Shapes: S = samples, I = numbers of an input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

MOST_SAMPLES, LEAST_SAMPLES = 1_000, 64
MOST_INPUTS = 1_024  # of larger inputs, so many numbers are drawn
FEATURES = 256
RIDGES = (1.0, 10.0, 100.0)
TEMPERATURES = (1.0, 3.0, 6.0, 12.0)  # factors of the outputs, which a regression of classes makes too small


class ReadoutSamples:
    """Keeps the first samples of the data, as long as they are floating-point numbers with one class each."""

    def __init__(self) -> None:
        self._inputs: list[Tensor] = []
        self._classes: list[Tensor] = []
        self._size = 0  # numbers of an input
        self._is_possible = True

    @property
    def count(self) -> int:
        return sum(map(len, self._classes))

    def note(self, inputs: Any, targets: Any) -> None:
        """Add a batch."""
        missing = MOST_SAMPLES - self.count
        if not self._is_possible or missing <= 0:
            return
        if not _are_classified(inputs, targets):
            self._is_possible = False
            return
        flat = inputs.detach()[:missing].flatten(1)
        self._size = self._size or flat.shape[1]
        if flat.shape[1] != self._size:
            self._is_possible = False  # inputs of different sizes
            return
        if self._size > MOST_INPUTS:
            order = torch.randperm(self._size, generator=torch.Generator().manual_seed(0))
            flat = flat[:, order[:MOST_INPUTS].sort().values.to(flat.device)]
        self._inputs.append(flat.cpu().double())
        self._classes.append(targets.detach()[:missing].cpu().long())

    def loss(self) -> float | None:
        """Return the loss of the readout, relative to that of the best constant predictor; None if it cannot be measured."""
        if not self._is_possible or not self._classes:
            return None
        return readout_loss(torch.cat(self._inputs), torch.cat(self._classes))


def _are_classified(inputs: Any, targets: Any) -> bool:
    """Return whether a batch has floating-point inputs [S, ...] and class numbers [S]."""
    if not isinstance(inputs, Tensor) or not isinstance(targets, Tensor):
        return False
    are_classes = targets.ndim == 1 and not targets.is_floating_point() and not targets.is_complex() and targets.dtype != torch.bool
    return inputs.is_floating_point() and inputs.ndim > 1 and are_classes and len(inputs) == len(targets)


def readout_loss(inputs: Tensor, classes: Tensor) -> float | None:
    """Return the loss of a readout of inputs [S, I] of float64, relative to that of the best constant predictor; None if there is none."""
    is_known = classes >= 0  # others are ignored by loss functions
    inputs, classes = inputs[is_known], classes[is_known]
    if len(classes) < LEAST_SAMPLES or not inputs.isfinite().all():
        return None
    found, numbers = torch.unique(classes, return_inverse=True)
    if len(found) < 2 or not inputs.shape[1]:
        return None
    fitted = len(classes) * 3 // 4
    share = torch.bincount(numbers, minlength=len(found)).double() / len(numbers)
    constant = -(share * share.log()).sum()
    features = _random_features(inputs, fitted)
    wanted = F.one_hot(numbers, len(found)).double() - share
    products, targets = features[:fitted].T @ features[:fitted], features[:fitted].T @ wanted[:fitted]
    losses = []
    for ridge in RIDGES:
        weights = torch.linalg.solve(products + ridge * torch.eye(len(products), dtype=torch.float64), targets)
        outputs = features[fitted:] @ weights
        losses += [F.cross_entropy(share.log() + temperature * outputs, numbers[fitted:]) for temperature in TEMPERATURES]
    return float(torch.stack(losses).min() / constant)


def _random_features(inputs: Tensor, fitted: int) -> Tensor:
    """Return rectified random projections of the inputs, and a column of ones [S, FEATURES + 1]."""
    deviation, mean = torch.std_mean(inputs[:fitted], dim=0)
    scaled = (inputs - mean) / deviation.clamp(min=1e-3)
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(inputs.shape[1], FEATURES, generator=generator, dtype=torch.float64) / inputs.shape[1] ** 0.5
    offsets = 0.5 * torch.randn(FEATURES, generator=generator, dtype=torch.float64)
    return torch.cat([torch.relu(scaled @ directions + offsets), torch.ones(len(inputs), 1, dtype=torch.float64)], dim=1)
