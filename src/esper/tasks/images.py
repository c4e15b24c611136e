"""Image files' arrays as parts of a task.

Shapes: M = images, C = channels, H, W = height and width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from esper.tasks.errors import TaskError
from esper.tasks.splits import stratified_parts
from esper.tasks.task import Split

Images = NDArray[np.uint8]  # [M, C, H, W]
Labels = NDArray[np.int64]  # [M]


def normalised(images: Images, labels: Labels, *, mean: Sequence[float], spread: Sequence[float]) -> Split:
    """Pixels 0 .. 255 as float32 of about mean 0 and spread 1; `mean` and `spread` are of each channel, for pixels of 0 .. 1."""
    inputs = torch.from_numpy(images.astype(np.float32))
    for channel, (middle, scale) in enumerate(zip(mean, spread, strict=True)):
        inputs[:, channel].sub_(255 * middle).div_(255 * scale)
    return Split(inputs, torch.from_numpy(np.ascontiguousarray(labels)))


def train_and_validation(labels: Labels, *, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """A tenth of the training images, stratified and always the same, is the validation part."""
    held_out = len(labels) // 10
    if not held_out:
        raise TaskError(f"{len(labels)} training images are too few: a tenth of them is the validation part; use the whole file")
    train, validation = stratified_parts(labels, (len(labels) - held_out, held_out), seed=seed)
    return train, validation
