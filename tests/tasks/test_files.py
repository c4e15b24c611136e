"""Tasks that read files: good, missing, damaged and pickled ones."""

from __future__ import annotations

import gzip
import importlib
import io
import platform
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from esper.tasks import TaskError, load_task

BINARY = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]


def write_cifar_binary(folder: Path, per_file: int = 20) -> None:
    generator = np.random.Generator(np.random.PCG64(0))
    for name in BINARY:
        pixels = generator.integers(0, 256, (per_file, 3072), dtype=np.uint8)
        labels = (np.arange(per_file) % 10).astype(np.uint8)
        (folder / name).write_bytes(np.concatenate([labels[:, None], pixels], axis=1).tobytes())


def write_parquet(path: Path, *, rows: int = 20, size: int = 32, label: int | None = None) -> None:
    """Where it is called, the test is marked `extra`."""
    pyarrow, parquet, image_module = map(importlib.import_module, ("pyarrow", "pyarrow.parquet", "PIL.Image"))
    cells = []
    for row in range(rows):
        file = io.BytesIO()
        image_module.fromarray(np.full((size, size, 3), (row, 2 * row, 255), dtype=np.uint8)).save(file, format="PNG")
        cells.append({"bytes": file.getvalue(), "path": None})
    labels = [row % 10 if label is None else label for row in range(rows)]
    parquet.write_table(pyarrow.table({"img": cells, "label": labels}), path)


# CIFAR-10, binary


def test_the_binary_version_is_read_with_its_channels_in_place(tmp_path: Path) -> None:
    write_cifar_binary(tmp_path)
    task = load_task("cifar10", data_dir=tmp_path)
    assert (len(task.train), len(task.validation), len(task.test)) == (90, 10, 20)
    assert task.train.targets.bincount().tolist() == [9] * 10
    record = np.frombuffer((tmp_path / "test_batch.bin").read_bytes(), dtype=np.uint8)[:3073]
    red = (record[1:1025].reshape(32, 32) / 255 - 0.4914) / 0.2470
    assert torch.allclose(task.test.inputs[0, 0], torch.from_numpy(red).float(), atol=1e-5)
    assert task.test.targets[0] == record[0]
    rows = [row.numpy().tobytes() for row in torch.cat([task.train.inputs, task.validation.inputs])]
    assert len(set(rows)) == 100


def test_the_hosts_for_colour_images_have_the_stated_parameters(tmp_path: Path) -> None:
    write_cifar_binary(tmp_path)
    task = load_task("cifar10", data_dir=tmp_path)
    assert [task.num_parameters(size) for size in task.host_sizes] == [6_418, 94_762, 373_834]
    assert task.make_host("starved")(task.example_input).shape == (2, 10)


def test_augmentation_is_off_unless_asked_for_and_repeats_with_the_seed(tmp_path: Path) -> None:
    write_cifar_binary(tmp_path)
    task = load_task("cifar10", data_dir=tmp_path)
    plain, augmented, again = (next(iter(task.train_loader(seed=1, augment=augment))) for augment in (False, True, True))
    assert torch.equal(plain[1], augmented[1])
    assert not torch.equal(plain[0], augmented[0])
    assert torch.equal(augmented[0], again[0])
    known = {row.numpy().tobytes() for row in task.train.inputs}
    assert all(row.numpy().tobytes() in known for row in plain[0])


def test_a_missing_file_is_named_with_what_to_put_there(tmp_path: Path) -> None:
    write_cifar_binary(tmp_path)
    (tmp_path / "data_batch_3.bin").unlink()
    with pytest.raises(TaskError, match=r"no data_batch_3\.bin in .*; put CIFAR-10's train\.parquet"):
        load_task("cifar10", data_dir=tmp_path)


def test_a_torn_binary_file_is_named(tmp_path: Path) -> None:
    write_cifar_binary(tmp_path)
    torn = tmp_path / "data_batch_2.bin"
    torn.write_bytes(torn.read_bytes()[:-5])
    with pytest.raises(TaskError, match=r"data_batch_2\.bin is damaged: it has 61,455 bytes"):
        load_task("cifar10", data_dir=tmp_path)


def test_too_few_images_for_a_validation_part_are_refused(tmp_path: Path) -> None:
    write_cifar_binary(tmp_path, per_file=1)
    with pytest.raises(TaskError, match="5 training images are too few"):
        load_task("cifar10", data_dir=tmp_path)


def test_a_label_that_is_no_class_is_named(tmp_path: Path) -> None:
    write_cifar_binary(tmp_path)
    (tmp_path / "test_batch.bin").write_bytes(bytes([10]) + bytes(3072))
    with pytest.raises(TaskError, match=r"test_batch\.bin .*label of image 0 is 10"):
        load_task("cifar10", data_dir=tmp_path)


@pytest.mark.parametrize("name", ["data_batch_1", "cifar-10-python.tar.gz"])
def test_the_pickled_version_is_refused_with_the_two_formats_that_are_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(TaskError, match=r"pickled .*train\.parquet.* or .*data_batch_1\.bin"):
        load_task("cifar10", data_dir=tmp_path)


@pytest.mark.parametrize("name", ["cifar10", "mnist", "fashion-mnist"])
def test_a_task_that_needs_files_says_where_to_put_them(tmp_path: Path, name: str) -> None:
    with pytest.raises(TaskError, match=r"needs a folder .*--data-dir"):
        load_task(name)
    with pytest.raises(TaskError, match=r"no folder .*nowhere; put"):
        load_task(name, data_dir=tmp_path / "nowhere")
    with pytest.raises(TaskError, match=r"no train.* in .*put .* there, and pass it with --data-dir"):
        load_task(name, data_dir=tmp_path)


# CIFAR-10, parquet


@pytest.mark.extra("pyarrow", "PIL")
def test_parquet_files_are_decoded(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet", rows=40)
    write_parquet(tmp_path / "test.parquet")
    task = load_task("cifar10", data_dir=tmp_path)
    assert (len(task.train), len(task.validation), len(task.test)) == (36, 4, 20)
    expected = (torch.tensor([3, 6, 255]) / 255 - torch.tensor([0.4914, 0.4822, 0.4465])) / torch.tensor([0.2470, 0.2435, 0.2616])
    assert torch.allclose(task.test.inputs[3], expected[:, None, None].expand(3, 32, 32), atol=1e-5)
    assert task.test.targets[3] == 3


@pytest.mark.extra("pyarrow", "PIL")
def test_damaged_parquet_files_are_named(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet", rows=40)
    with pytest.raises(TaskError, match=r"no test\.parquet in"):
        load_task("cifar10", data_dir=tmp_path)
    (tmp_path / "test.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(TaskError, match=r"test\.parquet is damaged or no parquet file"):
        load_task("cifar10", data_dir=tmp_path)
    write_parquet(tmp_path / "test.parquet", size=16)
    with pytest.raises(TaskError, match=r"test\.parquet, row 0: an image of shape \(16, 16, 3\)"):
        load_task("cifar10", data_dir=tmp_path)
    write_parquet(tmp_path / "test.parquet", label=11)
    with pytest.raises(TaskError, match=r"test\.parquet .*label of image 0 is 11"):
        load_task("cifar10", data_dir=tmp_path)


@pytest.mark.extra("pyarrow", "PIL")
def test_an_image_or_a_column_that_is_not_there_is_named(tmp_path: Path) -> None:
    write_parquet(tmp_path / "test.parquet")
    import pyarrow
    import pyarrow.parquet as parquet

    parquet.write_table(pyarrow.table({"img": [{"bytes": b"no image", "path": "x.png"}], "label": [0]}), tmp_path / "train.parquet")
    with pytest.raises(TaskError, match=r"train\.parquet, row 0: the image cannot be decoded"):
        load_task("cifar10", data_dir=tmp_path)
    parquet.write_table(pyarrow.table({"pixels": [1], "label": [0]}), tmp_path / "train.parquet")
    with pytest.raises(TaskError, match=r"columns \['pixels', 'label'\]; it needs img and label"):
        load_task("cifar10", data_dir=tmp_path)


def test_without_pyarrow_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train.parquet", "test.parquet"):
        (tmp_path / name).write_bytes(b"")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)  # what Python does for a module that cannot be imported
    with pytest.raises(TaskError, match=r"pyarrow is not installed: pip install 'esper-grow\[data\]'"):
        load_task("cifar10", data_dir=tmp_path)


# MNIST


def write_idx(path: Path, values: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> None:
    content = bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_mnist(folder: Path) -> None:
    for part, count in (("train", 50), ("t10k", 20)):
        images = np.arange(count, dtype=np.uint8)[:, None, None] + np.zeros((28, 28), dtype=np.uint8)
        write_idx(folder / f"{part}-images-idx3-ubyte.gz", images)
        write_idx(folder / f"{part}-labels-idx1-ubyte", np.arange(count, dtype=np.uint8) % 10)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx_files_are_read_gzipped_or_not(tmp_path: Path, name: str) -> None:
    write_mnist(tmp_path)
    task = load_task(name, data_dir=tmp_path)
    assert (len(task.train), len(task.validation), len(task.test)) == (45, 5, 20)
    assert task.make_host("starved")(task.example_input).shape == (2, 10)
    pixels = torch.cat([task.train.inputs, task.validation.inputs])[:, 0, 0, 0]
    assert len(pixels.unique()) == 50
    assert task.test.targets.tolist() == [*range(10), *range(10)]


def test_damaged_idx_files_are_named(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    images, labels = tmp_path / "train-images-idx3-ubyte.gz", tmp_path / "t10k-labels-idx1-ubyte"
    whole = images.read_bytes()
    images.write_bytes(whole[:-20])
    with pytest.raises(TaskError, match=r"train-images-idx3-ubyte\.gz is damaged"):
        load_task("mnist", data_dir=tmp_path)
    images.write_bytes(whole)
    labels.write_bytes(labels.read_bytes()[:-1])
    with pytest.raises(TaskError, match=r"t10k-labels-idx1-ubyte is damaged: its header announces \(20,\) values, but 19 follow"):
        load_task("mnist", data_dir=tmp_path)
    write_idx(labels, np.zeros(19, dtype=np.uint8))
    with pytest.raises(TaskError, match=r"20 images and .* 19 labels"):
        load_task("mnist", data_dir=tmp_path)
    labels.write_bytes(b"text")
    with pytest.raises(TaskError, match=r"t10k-labels-idx1-ubyte is no idx file .* begins with 74 65 78 74"):
        load_task("mnist", data_dir=tmp_path)


# Text


def test_a_text_is_cut_in_order_and_targets_are_the_next_characters(tmp_path: Path) -> None:
    text = "".join(chr(97 + number % 7) for number in range(1_800)) + "zz" + "b" * 198  # z is not in the first nine tenths
    (tmp_path / "input.txt").write_text(text)
    task = load_task("text", data_dir=tmp_path, sequence_length=9)
    assert task.num_classes == 8
    assert (len(task.train), len(task.validation), len(task.test)) == (199, 11, 11)
    assert task.train.inputs[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1]
    assert torch.equal(task.train.targets.flatten()[:-1], task.train.inputs.flatten()[1:])
    assert task.validation.inputs[0].tolist() == [7, 7, *[1] * 7]
    assert torch.equal(load_task("text", data_dir=tmp_path / "input.txt", sequence_length=9).train.inputs, task.train.inputs)


@pytest.mark.slow
def test_without_a_file_the_text_is_that_of_the_standard_library() -> None:
    task, again = load_task("text"), load_task("text")
    assert torch.equal(task.train.inputs, again.train.inputs)
    assert task.train.inputs.numel() > 1_000_000
    assert platform.python_version() in task.describe()
    assert task.example_input.shape == (2, 64)
    assert task.example_input.dtype == torch.int64
    counts = [task.num_parameters(size) for size in task.host_sizes]
    assert counts == sorted(counts)


@pytest.mark.slow
def test_a_starved_language_host_learns_a_simple_text(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("to be or not to be, " * 300)
    task = load_task("text", data_dir=tmp_path, sequence_length=20, batch_size=32)
    host = task.make_host("starved", seed=0)
    optimizer = torch.optim.AdamW(host.parameters(), lr=1e-2)
    for _ in range(6):
        for inputs, targets in task.train_loader(seed=0):
            optimizer.zero_grad()
            task.loss_fn(host(inputs), targets).backward()
            optimizer.step()
    found = task.evaluate(host, task.val_loader())
    assert found.loss < task.uninformed_loss / 4
    assert found.accuracy > 0.8


def test_unusable_texts_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"no input\.txt in .*; pass a text file"):
        load_task("text", data_dir=tmp_path)
    with pytest.raises(TaskError, match=r"no file .*missing\.txt"):
        load_task("text", data_dir=tmp_path / "missing.txt")
    file = tmp_path / "input.txt"
    file.write_bytes(b"\xff\xfe\xfa" * 100)
    with pytest.raises(TaskError, match=r"input\.txt is not a text in UTF-8"):
        load_task("text", data_dir=tmp_path)
    file.write_text("too short")
    with pytest.raises(TaskError, match=r"a text of 9 characters leaves 8 for the train part, less than 2 × 64 \+ 1"):
        load_task("text", data_dir=tmp_path)
