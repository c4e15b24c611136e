"""Turn arrays of images and labels into parts of a task.

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
    """Return images of bytes as float32 with a mean of about 0 and a standard deviation of about 1.

    `mean` and `spread` are the mean and standard deviation of each channel, for pixels of 0 .. 1.
    """
    inputs = torch.from_numpy(images.astype(np.float32))
    for channel, (middle, scale) in enumerate(zip(mean, spread, strict=True)):
        inputs[:, channel].sub_(255 * middle).div_(255 * scale)
    return Split(inputs, torch.from_numpy(np.ascontiguousarray(labels)))


def train_and_validation(labels: Labels, *, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of the training part and of the validation part: a stratified tenth that is always the same."""
    held_out = len(labels) // 10
    if not held_out:
        raise TaskError(
            f"{len(labels)} training images are too few, because a tenth of them becomes the validation part; use the complete file"
        )
    train, validation = stratified_parts(labels, (len(labels) - held_out, held_out), seed=seed)
    return train, validation
