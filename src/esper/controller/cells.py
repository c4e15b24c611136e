"""Cells: kinds of data, host and training. A controller is worth having where it treats different cells differently.

    cell = draw_cell(DomainConfig(), number=0, seed=0)
    task = cell.task(load_task)                  # its classes and label noise
    settings = [cell.host_config(seed, len(task.train), rent=RentConfig()) for seed in range(16)]

All hosts of a cell can be rows of one fleet. They differ in their first weights, in the samples they see and in the order of these. So can
the hosts of its variants (`draw_variant`). A name that is left out of a `DomainConfig` is held out: its cells are never drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import numpy as np

from esper.config import Config, Count, Fraction, NonNegativeInt, PositiveFloat, PositiveInt
from esper.controller.config import SOURCES_OF_TOKENS, DomainConfig, Optimizer, Schedule
from esper.fleet.config import FleetConfig, HostConfig
from esper.growth.config import RentConfig
from esper.rng import Streams
from esper.tasks import Task
from esper.tasks.teacher import TEACHER, make_teacher_task

TEACHERS = tuple(f"conv-{width}x{blocks}" for width in (2, 4, 8) for blocks in (1, 2, 3))  # from easy to hard, about
MOST_CLASSES = 10  # of all sources but text
MOST_MLP_BLOCKS = 4  # without norms, a deeper one hardly learns
LEARNING_RATES: dict[Optimizer, tuple[float, float]] = {"adamw": (0.001, 0.02), "sgd": (0.01, 0.2)}  # log-uniform between these


class Cell(Config):
    """A kind of data, a kind of host, and how it is trained."""

    source: str = "digits"  # name of a task
    host: str = "conv-4x3"  # family, width and blocks
    samples: Count | None = None  # training samples that a host sees; None: all
    classes: Count | None = None  # None: all
    label_noise: Fraction = 0.0  # share of wrong labels, in all parts of the data
    teacher: str = TEACHER  # network that labels the data of the source "teacher"
    data_seed: NonNegativeInt = 0  # of the teacher, the choice of classes and the wrong labels
    optimizer: Optimizer = "adamw"
    learning_rate: PositiveFloat = 0.01
    schedule: Schedule = "cosine"
    batch_size: Count = 64
    steps_per_decision: PositiveInt = 20
    horizon: PositiveInt = 16  # decisions

    @property
    def family(self) -> str:
        return self.host.partition("-")[0]

    @property
    def data(self) -> tuple[str, int | None, float, str, int]:
        """All that the data depend on. Two cells with the same have the same task."""
        is_drawn = self.source == "teacher" or self.classes is not None or self.label_noise > 0
        return self.source, self.classes, self.label_noise, self.teacher, self.data_seed if is_drawn else 0

    @property
    def samples_per_decision(self) -> int:
        return self.batch_size * self.steps_per_decision

    @property
    def samples_of_a_life(self) -> int:
        return self.samples_per_decision * self.horizon

    def task(self, load: Callable[[str], Task]) -> Task:
        """Return the data of the cell; `load` returns a task by its name."""
        if self.source == "teacher":
            task = make_teacher_task(self.teacher, classes=self.classes or 10, data_seed=self.data_seed)
        else:
            task = load(self.source)
            if self.classes is not None and self.classes < task.num_classes:
                task = task.with_classes(self.classes, seed=self.data_seed)
        return task.with_label_noise(self.label_noise, seed=self.data_seed) if self.label_noise else task

    def fleet(self, config: FleetConfig) -> FleetConfig:
        """Return the settings of a fleet of this cell. Every host keeps its best validation state."""
        return msgspec.structs.replace(
            config,
            batch_size=self.batch_size,
            steps_per_decision=self.steps_per_decision,
            optimizer=self.optimizer,
            schedule=self.schedule,
            keep="best",
        )

    def host_config(self, seed: int, samples: int, *, rent: RentConfig, growth_seed: int = 0) -> HostConfig:
        """Return the settings of one host of a fleet of this cell, whose task has this many training samples."""
        share = 1.0 if self.samples is None else min(self.samples / samples, 1.0)
        return HostConfig(
            seed=seed, growth_seed=growth_seed, horizon=self.horizon, learning_rate=self.learning_rate, data_share=share, rent=rent
        )


def draw_cell(domain: DomainConfig, *, number: int, seed: int) -> Cell:
    """Draw a cell. Sources take turns; everything else is random, and depends only on the seed, the number and the domain."""
    rng = Streams(seed).numpy(f"cell {number}")
    source = domain.sources[number % len(domain.sources)]
    families = domain.families_for(source)
    family = families[rng.integers(len(families))]
    is_text, is_clean = source in SOURCES_OF_TOKENS, rng.random() < domain.clean_share
    optimizer = domain.optimizers[rng.integers(len(domain.optimizers))]
    if is_text and "adamw" in domain.optimizers:
        optimizer = "adamw"  # small transformers hardly learn with sgd
    batch, horizon, samples = (_draw_integer(rng, *span) for span in (domain.batch_size, domain.horizon, domain.samples_of_a_life))
    width, blocks = _draw_integer(rng, *domain.width), _draw_integer(rng, *domain.blocks)
    if family == "mlp":
        blocks = min(blocks, max(MOST_MLP_BLOCKS, domain.blocks[0]))
    horizon = max(min(horizon, domain.most_decisions // blocks), domain.horizon[0])
    steps = min(samples // batch, domain.most_steps // blocks)  # deep hosts take shorter trainings, because each step costs more
    classes, noise = int(rng.integers(*domain.classes, endpoint=True)), float(rng.uniform(*domain.label_noise))
    cell = Cell(
        source=source,
        host=f"{family}-{8 * math.ceil(width / 8) if is_text else width}x{blocks}",  # a gpt of fewer features learns next to nothing
        samples=_draw_integer(rng, *domain.samples),
        classes=None if is_text or classes >= MOST_CLASSES else classes,
        label_noise=0.0 if is_clean else round(noise, 3),
        teacher=TEACHERS[rng.integers(len(TEACHERS))],
        data_seed=int(rng.integers(2**31)),
        optimizer=optimizer,
        learning_rate=_draw_learning_rate(rng, optimizer),
        schedule=domain.schedules[rng.integers(len(domain.schedules))],
        batch_size=batch,
        steps_per_decision=max(steps // horizon, 1),
        horizon=horizon,
    )
    return cell if source == "teacher" else msgspec.structs.replace(cell, teacher=TEACHER)


def draw_variant(cell: Cell, domain: DomainConfig, rng: np.random.Generator) -> Cell:
    """Return the cell with another number of samples and another learning rate. Hosts of both can share a fleet."""
    return msgspec.structs.replace(
        cell, samples=_draw_integer(rng, *domain.samples), learning_rate=_draw_learning_rate(rng, cell.optimizer)
    )


def _draw_learning_rate(rng: np.random.Generator, optimizer: Optimizer) -> float:
    return float(f"{_draw(rng, *LEARNING_RATES[optimizer]):.3g}")


def _draw(rng: np.random.Generator, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def _draw_integer(rng: np.random.Generator, low: int, high: int) -> int:
    """Draw log-uniformly from low to high, both included."""
    return min(int(_draw(rng, low, high + 1)), high)
