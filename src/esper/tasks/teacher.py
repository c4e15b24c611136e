"""The task `teacher`: smooth random images, labelled by a random network. Such data can be made in any number and of any difficulty.

The teacher is a convolutional host with the weights it was born with. Its logits are scaled to mean 0 and variance 1 for each class, so
that all classes are about equally frequent. A wider teacher with more blocks is harder to learn.

Shapes: M = samples, K = classes.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from esper.rng import Streams
from esper.tasks.hosts import make_host
from esper.tasks.options import TaskOptions
from esper.tasks.task import HOST_SIZES, Split, Task

SIZE = 8  # pixels of a side
SMOOTHING = 1.0  # standard deviation of the Gaussian that smooths the noise, in pixels
DATA_SEED = 7_919
TEACHER = "conv-8x2"
PART_SIZES = (4_000, 1_000, 1_000)  # train, validation, test
HOSTS = dict(zip(HOST_SIZES, ("conv-4x3", "conv-16x3", "conv-48x3"), strict=True))


def load_teacher(options: TaskOptions) -> Task:
    options.refuse_data_dir("teacher")
    options.refuse_sequence_length("teacher")
    return make_teacher_task(batch_size=options.batch_size or 64, seed=options.seed)


def make_teacher_task(
    teacher: str = TEACHER,
    *,
    classes: int = 10,
    samples: tuple[int, int, int] = PART_SIZES,
    data_seed: int = DATA_SEED,
    batch_size: int = 64,
    seed: int = 0,
) -> Task:
    """Return the task of a teacher, such as "conv-8x2". `samples` are those of the training, validation and test part."""
    streams = Streams(data_seed)
    images = _smooth_images(sum(samples), streams.torch("images"))
    labels = _labels(teacher, images, classes, streams)
    inputs, targets = torch.split(images, list(samples)), torch.split(labels, list(samples))
    train, validation, test = (Split(*part) for part in zip(inputs, targets, strict=True))
    return Task(
        name="teacher",
        title="smooth random images, labelled by a random network",
        source=f"made by esper.tasks.teacher from the data seed {data_seed} and the teacher {teacher}; no licence needed",
        num_classes=classes,
        train=train,
        validation=validation,
        test=test,
        hosts={size: partial(make_host, name, images[:2], classes) for size, name in HOSTS.items()},
        batch_size=batch_size,
        seed=seed,
    )


def _smooth_images(count: int, generator: torch.Generator) -> Tensor:
    """Return images [M, 1, SIZE, SIZE] of noise with variance 1: white noise convolved with a Gaussian."""
    reach = int(3 * SMOOTHING)
    places = torch.arange(-reach, reach + 1).float()
    kernel = torch.exp(-0.5 * (places / SMOOTHING) ** 2)
    kernel = kernel / kernel.square().sum().sqrt()
    white = torch.randn(count, 1, SIZE + 2 * reach, SIZE + 2 * reach, generator=generator)
    return F.conv2d(F.conv2d(white, kernel.view(1, 1, -1, 1)), kernel.view(1, 1, 1, -1))


def _labels(teacher: str, images: Tensor, classes: int, streams: Streams) -> Tensor:
    """Return the class [M] with the highest logit of a new network. Its batch norms see all images as one batch."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(streams.integer("teacher"))
        logits: Tensor = make_host(teacher, images, classes)(images)
    return ((logits - logits.mean(0)) / logits.std(0)).argmax(1)
