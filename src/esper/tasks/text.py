"""The task `text`: predict the next character of a text file or, without one, of the sources of Python's standard library.

The text is cut in order: 90 % train, 5 % validation, 5 % test. The input of a sample is a sequence of characters; its target is the same
sequence one character further on. The sequences of a part do not overlap, so an epoch predicts every character once. The id of a character
is its index in the sorted characters of the training part; the last id stands for all other characters.

Shapes: M = samples, T = characters of a sample.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from functools import partial
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor

from esper.tasks.gpt_host import GPTHost
from esper.tasks.options import TaskError, TaskOptions
from esper.tasks.task import Split, Task


class GPTShape(TypedDict):
    """Sizes of a GPT host."""

    width: int
    layers: int
    heads: int


SEQUENCE_LENGTH = 64  # characters of a sample
SHARES = (0.90, 0.05)  # shares of train and validation; the rest is test
HOSTS: dict[str, GPTShape] = {
    "starved": {"width": 32, "layers": 2, "heads": 2},
    "right": {"width": 128, "layers": 4, "heads": 4},
    "oversized": {"width": 256, "layers": 6, "heads": 8},
}

# fmt: off
MODULES = (  # modules of the standard library that are written in Python in every version since 3.11; about 1.5 MB together
    "argparse", "ast", "bdb", "calendar", "codecs", "configparser", "contextlib", "copy", "csv", "dataclasses", "difflib", "dis", "doctest",
    "enum", "fractions", "functools", "heapq", "inspect", "optparse", "pdb", "pickle", "random", "shlex", "shutil", "statistics",
    "subprocess", "textwrap", "threading", "tokenize", "traceback", "warnings", "weakref",
)
# fmt: on


def load_text(options: TaskOptions) -> Task:
    text, source = python_sources() if options.data_dir is None else read_text(options.data_dir)
    return text_task(text, source, options)


def text_task(text: str, source: str, options: TaskOptions, *, alphabet: str | None = None) -> Task:
    """Return the task for a text. Tasks of several texts have the same ids if they are given the same alphabet."""
    length = options.sequence_length or SEQUENCE_LENGTH
    parts = _cut(text)
    for part, part_text in parts.items():
        _check_length(part, len(part_text), length, len(text))
    alphabet = "".join(sorted(set(parts["train"] if alphabet is None else alphabet)))
    vocabulary_size = len(alphabet) + 1
    train, validation, test = (_sequences(_ids(part_text, alphabet), length) for part_text in parts.values())
    return Task(
        name="text",
        title=f"the next character of a text of {len(text):,}",
        source=f"{source}, SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:12]}",
        num_classes=vocabulary_size,
        train=train,
        validation=validation,
        test=test,
        hosts={size: partial(GPTHost, vocabulary_size, sequence_length=length, **shape) for size, shape in HOSTS.items()},
        batch_size=options.batch_size or 32,
        seed=options.seed,
    )


def _cut(text: str) -> dict[str, str]:
    """Return the texts of the three parts, by name."""
    first = int(len(text) * SHARES[0])
    second = first + int(len(text) * SHARES[1])
    return {"train": text[:first], "validation": text[first:second], "test": text[second:]}


def _check_length(part: str, length: int, sequence_length: int, total: int) -> None:
    """Raise TaskError if a part of this length has too few characters for its samples."""
    samples = 2 if part == "train" else 1  # so that `Task.example_input` has two samples
    if length < samples * sequence_length + 1:
        raise TaskError(
            f"a text of {total:,} characters leaves {length:,} for the {part} part, less than {samples} × {sequence_length} + 1; "
            "use a longer text or a smaller sequence length"
        )


def _ids(text: str, alphabet: str) -> Tensor:
    """Return the id of every character, [len(text)]. Characters that are not in the alphabet get the last id."""
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    known = np.array([ord(character) for character in alphabet], dtype=np.uint32)
    place = np.minimum(np.searchsorted(known, codes), len(known) - 1)
    return torch.from_numpy(np.where(known[place] == codes, place, len(known)).astype(np.int64))


def _sequences(ids: Tensor, length: int) -> Split:
    """Cut ids into inputs [M, T], with targets [M, T] that are one character further on."""
    count = (len(ids) - 1) // length
    return Split(ids[: count * length].view(count, length), ids[1 : count * length + 1].view(count, length))


def read_text(path: Path) -> tuple[str, str]:
    """Return the text of a file, or of `input.txt` in a folder, and a description of its source."""
    wanted = "pass a text file, or a folder with input.txt, with --data-dir"
    file = path / "input.txt" if path.is_dir() else path
    if not file.is_file():
        raise TaskError(f"no input.txt in {path}; {wanted}" if path.is_dir() else f"no file {path}; {wanted}")
    try:
        return file.read_text(encoding="utf-8"), str(file)
    except UnicodeDecodeError as error:
        raise TaskError(f"{file} is not a text in UTF-8 ({error}); {wanted}") from error
    except OSError as error:
        raise TaskError(f"cannot read {file}: {error.strerror}; {wanted}") from error


def python_sources() -> tuple[str, str]:
    """Return the sources of MODULES as one text, and a description of their source."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = [folder / f"{module}.py" for module in MODULES]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise TaskError(
            f"this Python has no {', '.join(missing)} in {folder}; pass a text file, or a folder with input.txt, with --data-dir"
        )
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    return text, f"{len(paths)} modules of the standard library of Python {platform.python_version()} (PSF licence)"
