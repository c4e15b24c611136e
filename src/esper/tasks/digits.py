"""The task `digits`: 1,797 handwritten digits of 8×8 pixels that come with the package."""

from __future__ import annotations

import zipfile
import zlib
from functools import partial
from importlib.resources import files

import numpy as np
import torch
from numpy.typing import NDArray

from esper.tasks.hosts import ConvHost
from esper.tasks.images import Indices, stratified_parts
from esper.tasks.options import TaskError, TaskOptions
from esper.tasks.task import Split, Task

PART_SIZES = (1_000, 397, 400)  # train, validation, test
SPLIT_SEED = 1_797
MEAN, SPREAD = 4.884, 6.017  # mean and standard deviation of the training part's pixels, which are 0 .. 16
CHANNELS = {"starved": (4, 8, 16), "right": (16, 32, 64), "oversized": (48, 96, 192)}

SOURCE = (
    "the test part of 'Optical Recognition of Handwritten Digits' (E. Alpaydin and C. Kaynak, UCI Machine Learning Repository), CC BY 4.0"
)


def load_digits(options: TaskOptions) -> Task:
    options.refuse_data_dir("digits")
    options.refuse_sequence_length("digits")
    images, labels = _read()
    train, validation, test = (_split(images, labels, part) for part in stratified_parts(labels, PART_SIZES, seed=SPLIT_SEED))
    return Task(
        name="digits",
        title="handwritten digits, 8×8 pixels",
        source=SOURCE,
        num_classes=10,
        train=train,
        validation=validation,
        test=test,
        hosts={size: partial(_host, channels) for size, channels in CHANNELS.items()},
        host_of=_host,
        batch_size=options.batch_size or 64,
        seed=options.seed,
    )


def _host(channels: tuple[int, ...]) -> ConvHost:
    return ConvHost(1, 10, channels, pool=(True, True, False))


def _read() -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return images [1797, 8, 8], pixels 0 .. 16, and labels [1797]."""
    resource = files("esper.tasks") / "data" / "digits.npz"
    try:
        with resource.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            images, labels = archive["images"], archive["labels"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise TaskError(f"{resource}, a file of esper itself, is missing or damaged ({error}); install esper again") from error
    return images, labels


def _split(images: NDArray[np.uint8], labels: NDArray[np.uint8], part: Indices) -> Split:
    inputs = (torch.from_numpy(images[part]).float() - MEAN) / SPREAD
    return Split(inputs.unsqueeze(1), torch.from_numpy(labels[part]).long())
