"""The task `digits-1d`: classify series of 40 values, each a distorted curve of one of ten digits. This file makes the data.

A curve is the horizontal position of the pen, from left (-1) to right (+1), while it draws the digit. A sample has its curve at a random
position, stretched, scaled and sheared, with slow noise over the whole series. The idea of a small task that still distinguishes good
networks from poor ones comes from MNIST-1D (S. Greydanus and D. Kobak); curves, distortions and code are our own.

Shapes: M = samples, L = values of a series.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from esper.rng import Streams
from esper.tasks.hosts import ConvHost
from esper.tasks.options import TaskOptions
from esper.tasks.task import Split, Task

Floats = NDArray[np.float64]

LENGTH = 40
PART_SIZES = {"train": 4_000, "validation": 1_000, "test": 1_000}
DATA_SEED = 1_401
CHANNELS = {"starved": (2, 4, 8), "right": (16, 32, 64), "oversized": (32, 64, 128)}

# fmt: off
CURVES = np.array([  # one row per digit, points at equal time steps
    [ 0.2, -0.5, -0.9, -1.0, -0.8, -0.3,  0.4,  0.9,  1.0,  0.7],  # 0: round to the left, round to the right
    [-0.6, -0.2,  0.3,  0.4,  0.4,  0.4,  0.4,  0.4,  0.4,  0.4],  # 1: a short rise, then straight down
    [-0.8, -0.1,  0.7,  0.9,  0.4, -0.3, -0.9, -0.3,  0.4,  1.0],  # 2: a bow, back to the left, the foot to the right
    [-0.7,  0.3,  0.8,  0.3, -0.2,  0.4,  0.9,  0.6,  0.0, -0.8],  # 3: two bows
    [ 0.4,  0.0, -0.4, -0.9, -0.3,  0.3,  0.9,  0.3,  0.3,  0.3],  # 4: down to the left, across, a stem
    [ 0.9,  0.0, -0.8, -0.8, -0.7,  0.1,  0.8,  0.7,  0.0, -0.8],  # 5: the roof to the left, down, one bow
    [ 0.7,  0.0, -0.6, -0.9, -0.9, -0.4,  0.5,  0.7,  0.1, -0.6],  # 6: a long bow to the left, a small circle
    [-0.9, -0.3,  0.3,  0.9,  0.6,  0.3,  0.0, -0.2, -0.4, -0.6],  # 7: the roof to the right, a slope to the left
    [ 0.5, -0.4, -0.6,  0.1,  0.7,  0.6, -0.2, -0.7,  0.0,  0.6],  # 8: an S and back
    [ 0.6, -0.2, -0.7, -0.3,  0.5,  0.7,  0.6,  0.6,  0.4,  0.1],  # 9: a small circle, a stem
])
# fmt: on

WIDTHS = (10.0, 30.0)  # range of the curve's length, in values of the series
AMPLITUDES = (0.6, 1.4)
SHEAR = 0.8  # standard deviation of the added slope, in amplitudes over the length of the curve
NOISE = 0.12  # standard deviation of the slow noise
NOISE_WIDTH = 1.6  # standard deviation of the Gaussian that smooths the noise, in values of the series
MEAN, SPREAD = 0.031, 0.431  # mean and standard deviation of the training part


def load_digits_1d(options: TaskOptions) -> Task:
    options.refuse_data_dir("digits-1d")
    options.refuse_sequence_length("digits-1d")
    streams = Streams(DATA_SEED)
    train, validation, test = (make_series(count, streams.numpy(part)) for part, count in PART_SIZES.items())
    return Task(
        name="digits-1d",
        title="distorted curves of digits, series of 40 values",
        source=f"made by esper.tasks.digits_1d from the data seed {DATA_SEED}; no licence needed",
        num_classes=10,
        train=train,
        validation=validation,
        test=test,
        hosts={size: partial(_host, channels) for size, channels in CHANNELS.items()},
        host_of=_host,
        batch_size=options.batch_size or 100,
        seed=options.seed,
    )


def _host(channels: tuple[int, ...]) -> ConvHost:
    return ConvHost(1, 10, channels, pool=(True, True, True), spatial=1)


def make_series(count: int, generator: np.random.Generator) -> Split:
    """Make `count` samples [M, 1, L], equally many of each digit."""
    labels = generator.permutation(np.arange(count) % len(CURVES))
    # Random distortion of each curve, all [M, 1].
    width = generator.uniform(*WIDTHS, (count, 1))
    start = generator.uniform(0, 1, (count, 1)) * (LENGTH - 1 - width)
    amplitude = generator.uniform(*AMPLITUDES, (count, 1))
    slope = generator.normal(0, SHEAR, (count, 1))
    time = (np.arange(LENGTH) - start) / width  # [M, L], 0 .. 1 where the curve is
    within = (time >= 0) & (time <= 1)
    curve = _curves_at(labels, np.clip(time, 0, 1)) + slope * (time - 0.5)
    series = amplitude * curve * within + NOISE * _slow_noise(count, generator)
    return Split(torch.from_numpy((series - MEAN) / SPREAD).float().unsqueeze(1), torch.from_numpy(labels).long())


def _curves_at(labels: NDArray[np.int64], time: Floats) -> Floats:
    """Return the curve of each label at times [M, L] from 0 to 1, by linear interpolation between its points."""
    place = time * (CURVES.shape[1] - 1)
    before = np.minimum(place.astype(np.int64), CURVES.shape[1] - 2)
    share = place - before
    row = labels[:, None]
    return np.asarray(CURVES[row, before] * (1 - share) + CURVES[row, before + 1] * share)


def _slow_noise(count: int, generator: np.random.Generator) -> Floats:
    """Return smooth noise [M, L] of variance 1: white noise convolved with a Gaussian."""
    reach = int(4 * NOISE_WIDTH)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / NOISE_WIDTH) ** 2)
    kernel /= np.sqrt((kernel**2).sum())
    white = generator.normal(size=(count, LENGTH + 2 * reach))
    return np.asarray(np.lib.stride_tricks.sliding_window_view(white, len(kernel), axis=1) @ kernel)
