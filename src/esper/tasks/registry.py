"""The list of tasks, and `load_task`, which loads one by its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from esper.tasks.cifar10 import load_cifar10
from esper.tasks.digits import load_digits
from esper.tasks.digits_1d import load_digits_1d
from esper.tasks.mnist import load_fashion_mnist, load_mnist
from esper.tasks.options import TaskError, TaskOptions
from esper.tasks.task import Task
from esper.tasks.teacher import load_teacher
from esper.tasks.text import load_text
from esper.text_table import did_you_mean


@dataclass(frozen=True)
class TaskEntry:
    """One task in the list of tasks."""

    title: str
    data: str  # files that --data-dir must hold, as shown to users
    load: Callable[[TaskOptions], Task]
    has_own_data: bool = False  # whether its data come with esper, so that it takes no --data-dir


TASKS: dict[str, TaskEntry] = {
    "digits": TaskEntry("handwritten digits, 8×8 pixels", "none: comes with esper", load_digits, has_own_data=True),
    "digits-1d": TaskEntry("distorted curves of digits, series of 40 values", "none: made by esper", load_digits_1d, has_own_data=True),
    "teacher": TaskEntry("smooth random images, labelled by a random network", "none: made by esper", load_teacher, has_own_data=True),
    "cifar10": TaskEntry("CIFAR-10, colour photographs, 32×32 pixels", "train.parquet and test.parquet, or *.bin", load_cifar10),
    "mnist": TaskEntry("MNIST, handwritten digits, 28×28 pixels", "the four idx files", load_mnist),
    "fashion-mnist": TaskEntry("Fashion-MNIST, articles of clothing, 28×28 pixels", "the four idx files", load_fashion_mnist),
    "text": TaskEntry("the next character of a text", "input.txt; without it, Python's own sources", load_text),
}


def load_task(
    name: str,
    *,
    data_dir: str | Path | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    sequence_length: int | None = None,
) -> Task:
    """Load a task: read and check its data. `seed` is the default seed of hosts and data orders; the data never depend on it.

    >>> load_task("digits").host_sizes
    ('starved', 'right', 'oversized')
    """
    if name not in TASKS:
        hint = did_you_mean(name.lower(), TASKS, otherwise=f"there are {', '.join(TASKS)}", cutoff=0.5)
        raise TaskError(f"no task named {name!r}; {hint}")
    folder = None if data_dir is None else Path(data_dir).expanduser()
    return TASKS[name].load(TaskOptions(folder, seed=seed, batch_size=batch_size, sequence_length=sequence_length))
