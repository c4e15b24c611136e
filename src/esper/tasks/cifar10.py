"""The task `cifar10`: CIFAR-10 from a folder, as parquet files with encoded images or in its binary version. Nothing is downloaded.

The binary version consists of data_batch_1.bin .. data_batch_5.bin and test_batch.bin. Their records have 1 + 3,072 bytes: the label, then
the red, green and blue plane. The Python version is never read: it is pickled, and unpickling a file can run any code in it.

Shapes: M = images.
"""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from esper.tasks.hosts import ConvHost
from esper.tasks.images import Images, Labels, crop_and_flip, normalised, train_and_validation
from esper.tasks.options import TaskError, TaskOptions, import_for_data
from esper.tasks.task import Task

SPLIT_SEED = 32_323
MEAN, SPREAD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # mean and standard deviation per channel, for pixels of 0 .. 1
CHANNELS = {"starved": (8, 16, 32), "right": (32, 64, 128), "oversized": (64, 128, 256)}

WANTED = (
    "CIFAR-10's train.parquet and test.parquet (columns img, with the bytes of encoded images, and label) or the files data_batch_1.bin .. "
    "data_batch_5.bin and test_batch.bin of its binary version"
)
_RECORD = 1 + 3 * 32 * 32  # bytes


def load_cifar10(options: TaskOptions) -> Task:
    options.refuse_sequence_length("cifar10")
    folder = options.need_data_dir("cifar10", WANTED)
    images, labels, test_images, test_labels = _read(folder)
    train, validation = train_and_validation(labels, seed=SPLIT_SEED)
    split = partial(normalised, mean=MEAN, spread=SPREAD)
    return Task(
        name="cifar10",
        title="CIFAR-10, colour photographs, 32×32 pixels",
        source=f"{folder}; CIFAR-10 (A. Krizhevsky, 2009), which states no licence",
        num_classes=10,
        train=split(images[train], labels[train]),
        validation=split(images[validation], labels[validation]),
        test=split(test_images, test_labels),
        hosts={size: partial(_host, channels) for size, channels in CHANNELS.items()},
        host_of=_host,
        batch_size=options.batch_size or 256,
        seed=options.seed,
        augmentation=crop_and_flip,
    )


def _host(channels: tuple[int, ...]) -> ConvHost:
    return ConvHost(3, 10, channels, pool=(True, True, True))


def _read(folder: Path) -> tuple[Images, Labels, Images, Labels]:
    """Return training images and labels, then test images and labels."""
    parquet = [folder / "train.parquet", folder / "test.parquet"]
    binary = [*(folder / f"data_batch_{number}.bin" for number in range(1, 6)), folder / "test_batch.bin"]
    if any(path.is_file() for path in parquet):
        _check_complete(parquet)
        (images, labels), (test_images, test_labels) = (_read_parquet(path) for path in parquet)
    elif any(path.is_file() for path in binary):
        _check_complete(binary)
        *batches, (test_images, test_labels) = (_read_binary(path) for path in binary)
        images, labels = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
    else:
        raise TaskError(f"{_why_unusable(folder)}; put {WANTED} there, and pass it with --data-dir")
    return images, labels, test_images, test_labels


def _check_complete(paths: list[Path]) -> None:
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise TaskError(f"no {' and no '.join(missing)} in {paths[0].parent}; put {WANTED} there")


def _why_unusable(folder: Path) -> str:
    """Return why a folder has no usable data, for an error message."""
    pickled = [folder / "data_batch_1", folder / "cifar-10-batches-py", folder / "cifar-10-python.tar.gz"]
    found = next((path.name for path in pickled if path.exists()), None)
    if found is not None:
        return (
            f"{folder} holds the Python version of CIFAR-10 ({found}), which is pickled and could run any code when read, so it is not read"
        )
    nested = folder / "cifar-10-batches-bin"
    if nested.is_dir():
        return f"the data are in a subfolder: pass {nested}"
    return f"no train.parquet and no data_batch_1.bin in {folder}"


def _checked_labels(labels: Labels, path: Path) -> Labels:
    """Return the labels, or raise TaskError if one of them is not a class."""
    wrong = np.flatnonzero((labels < 0) | (labels > 9))
    if len(wrong):
        raise TaskError(f"{path} is damaged or not CIFAR-10: the label of image {wrong[0]} is {labels[wrong[0]]}, but classes are 0 to 9")
    return labels


# The binary version


def _read_binary(path: Path) -> tuple[Images, Labels]:
    size = path.stat().st_size
    if size == 0 or size % _RECORD:
        raise TaskError(f"{path} is damaged: it has {size:,} bytes, which is not a multiple of {_RECORD:,}; copy it again")
    records = np.fromfile(path, dtype=np.uint8).reshape(-1, _RECORD)
    return records[:, 1:].reshape(-1, 3, 32, 32), _checked_labels(records[:, 0].astype(np.int64), path)


# Parquet


def _read_parquet(path: Path) -> tuple[Images, Labels]:
    parquet = import_for_data("pyarrow.parquet", f"{path} is read with pyarrow")
    pyarrow = import_for_data("pyarrow", f"{path} is read with pyarrow")
    try:
        table = parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise TaskError(f"{path} is damaged or no parquet file ({error}); copy it again") from error
    column = next((name for name in ("img", "image") if name in table.column_names), None)
    if column is None or "label" not in table.column_names or not table.num_rows:
        raise TaskError(f"{path} has {table.num_rows} rows of the columns {table.column_names}; it needs img and label")
    if not pyarrow.types.is_integer(table.schema.field("label").type) or table.column("label").null_count:
        raise TaskError(f"{path}: label must be an integer in every row; its type is {table.schema.field('label').type}, or a row is empty")
    labels = _checked_labels(table.column("label").to_numpy().astype(np.int64), path)
    return _decoded(table.column(column), path), labels


def _decoded(column: Any, path: Path) -> Images:
    """Return the images [M, 3, 32, 32] of a column of encoded images."""
    image_module = import_for_data("PIL.Image", f"the images in {path} are decoded with pillow")
    images = np.empty((len(column), 32, 32, 3), dtype=np.uint8)
    for row, cell in enumerate(column.to_pylist()):
        encoded = cell.get("bytes") if isinstance(cell, dict) else cell
        if not isinstance(encoded, bytes):
            raise TaskError(f"{path}, row {row}: no bytes of an encoded image; use a file that holds the images, not their paths")
        try:
            with image_module.open(io.BytesIO(encoded)) as image:
                pixels = np.asarray(image)
        except (OSError, SyntaxError, ValueError) as error:  # pillow raises any of these for a broken file
            raise TaskError(f"{path}, row {row}: the image cannot be decoded ({error}); copy the file again") from error
        if pixels.shape != (32, 32, 3) or pixels.dtype != np.uint8:
            raise TaskError(
                f"{path}, row {row}: an image of shape {pixels.shape} and type {pixels.dtype}; CIFAR-10 has (32, 32, 3) and uint8"
            )
        images[row] = pixels
    return np.ascontiguousarray(images.transpose(0, 3, 1, 2))
