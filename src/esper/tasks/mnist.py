"""The tasks `mnist` and `fashion-mnist`: four idx files, gzipped or not, in a folder. Nothing is downloaded.

An idx file has two zero bytes, the type of the values (8: bytes), the number of dimensions, each dimension as 32 bits (big-endian), and the
values.

Shapes: M = images.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from esper.tasks.hosts import ConvHost
from esper.tasks.images import Images, Labels, normalised, train_and_validation
from esper.tasks.options import TaskError, TaskOptions
from esper.tasks.task import Task

SPLIT_SEED = 28_281
CHANNELS = {"starved": (4, 8, 16), "right": (16, 32, 64), "oversized": (48, 96, 192)}

WANTED = (
    "the files train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte, "
    "each as it is or with .gz,"
)


def load_mnist(options: TaskOptions) -> Task:
    title = "MNIST, handwritten digits, 28×28 pixels"
    return _load(options, "mnist", title, "MNIST (Y. LeCun, C. Cortes and C. Burges), CC BY-SA 3.0", mean=0.1307, spread=0.3081)


def load_fashion_mnist(options: TaskOptions) -> Task:
    title = "Fashion-MNIST, articles of clothing, 28×28 pixels"
    return _load(options, "fashion-mnist", title, "Fashion-MNIST (Zalando Research), MIT", mean=0.2860, spread=0.3530)


def _load(options: TaskOptions, name: str, title: str, source: str, *, mean: float, spread: float) -> Task:
    options.refuse_sequence_length(name)
    folder = options.need_data_dir(name, WANTED)
    images, labels = _read_pair(folder, "train")
    train, validation = train_and_validation(labels, seed=SPLIT_SEED)
    split = partial(normalised, mean=[mean], spread=[spread])
    return Task(
        name=name,
        title=title,
        source=f"{folder}; {source}",
        num_classes=10,
        train=split(images[train], labels[train]),
        validation=split(images[validation], labels[validation]),
        test=split(*_read_pair(folder, "t10k")),
        hosts={size: partial(_host, channels) for size, channels in CHANNELS.items()},
        host_of=_host,
        batch_size=options.batch_size or 256,
        seed=options.seed,
    )


def _host(channels: tuple[int, ...]) -> ConvHost:
    return ConvHost(1, 10, channels, pool=(True, True, True))


def _read_pair(folder: Path, part: str) -> tuple[Images, Labels]:
    """Return images [M, 1, 28, 28] and labels [M] of a part, "train" or "t10k"."""
    images_path, labels_path = (_find(folder, f"{part}-{rest}") for rest in ("images-idx3-ubyte", "labels-idx1-ubyte"))
    images, labels = _read_idx(images_path, dimensions=3), _read_idx(labels_path, dimensions=1)
    if images.shape[1:] != (28, 28):
        raise TaskError(f"{images_path} holds images of {images.shape[1:]} pixels, but this task has 28×28; give the files of this task")
    if len(images) != len(labels) or not len(images):
        raise TaskError(
            f"{images_path} holds {len(images):,} images and {labels_path} {len(labels):,} labels; give two files that belong together"
        )
    if labels.max() > 9:
        raise TaskError(f"{labels_path} is damaged: it holds the label {labels.max()}, but classes are 0 to 9; copy it again")
    return images[:, None], labels.astype(np.int64)


def _find(folder: Path, name: str) -> Path:
    """Return the path of a file, gzipped or not."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise TaskError(f"no {name} and no {name}.gz in {folder}; put {WANTED} there, and pass it with --data-dir")


def _read_idx(path: Path, *, dimensions: int) -> NDArray[np.uint8]:
    """Return the values of an idx file in their shape. Raise TaskError if it is damaged or has another number of dimensions."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise TaskError(f"{path} is damaged ({error}); copy it again") from error
    header = 4 + 4 * dimensions
    if len(content) < header or content[:4] != bytes((0, 0, 8, dimensions)):
        raise TaskError(f"{path} is no idx file of bytes in {dimensions} dimensions: it begins with {content[:4].hex(' ') or 'nothing'}")
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    values = np.frombuffer(content, dtype=np.uint8, offset=header)
    if len(values) != np.prod(shape, dtype=np.int64):
        raise TaskError(f"{path} is damaged: its header announces {shape} values, but {len(values):,} follow; copy it again")
    return values.reshape(shape)
