"""Cells: kinds of data, host and training. A controller is worth having where it treats different cells differently.

    cell = draw_cell(DomainConfig(), number=0, seed=0)
    task = cell.task(load_task)                  # its classes and label noise
    settings = [cell.host_config(seed, len(task.train), rent=RentConfig()) for seed in range(16)]

All hosts of a cell can be rows of one fleet. They differ in their first weights, in the samples they see and in the order of these. So can
the hosts of its variants (`draw_variant`). A name that is left out of a `DomainConfig` is held out: its cells are never drawn.

A round of a training draws several cells, each with the hosts of a fleet (`draw_round`). Rounds take turns with a few shapes of cells: data
of one size and kind, architecture, batch size and optimiser. So a fleet can be used again for the next cell of its shape. Groups of hosts
are the same in all: variant, first weights, data, order and rent. They differ by what the policy draws. A draw depends only on the seed,
the round and the config, so a resumed run needs no saved state for it. Each quantity of a host has a random stream of its own, so adding
hosts to a fleet does not change its first ones. Seeds below HELD_OUT_SEEDS are never drawn; comparisons use them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

from esper.config import Config, Count, Fraction, NonNegativeInt, PositiveFloat, PositiveInt
from esper.controller.config import HELD_OUT_SEEDS, SOURCES_OF_TOKENS, ControllerConfig, DomainConfig, Optimizer, Schedule
from esper.fleet.config import FleetConfig, HostConfig
from esper.growth.config import RentConfig
from esper.rng import Streams
from esper.tasks import Task
from esper.tasks.teacher import TEACHER, make_teacher_task

SEED_LIMIT = 2**31  # host seeds are below this, so that every random generator accepts them
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
    return _draw_cell(domain, domain.sources[number % len(domain.sources)], of_shape=rng, of_rest=rng)


def draw_cell_of_shape(domain: DomainConfig, shape: int, *, rng: np.random.Generator, seed: int) -> Cell:
    """Draw a cell of one of the domain's shapes, given by number. The shape depends only on the seed and the domain, the rest on `rng`."""
    of_shape = Streams(seed).numpy(f"shape {shape}")
    return _draw_cell(domain, domain.sources[shape % len(domain.sources)], of_shape=of_shape, of_rest=rng)


def _draw_cell(domain: DomainConfig, source: str, *, of_shape: np.random.Generator, of_rest: np.random.Generator) -> Cell:
    """Draw a cell: what its fleet is built for from one generator, and the rest from another, which may be the same.

    Results refer to cells by number, so the order of the draws must stay as it is.
    """
    families = domain.families_for(source)
    family = families[of_shape.integers(len(families))]
    is_text, is_clean = source in SOURCES_OF_TOKENS, of_rest.random() < domain.clean_share
    optimizer = domain.optimizers[of_shape.integers(len(domain.optimizers))]
    if is_text and "adamw" in domain.optimizers:
        optimizer = "adamw"  # small transformers hardly learn with sgd
    batch = _draw_integer(of_shape, *domain.batch_size)
    horizon, samples = _draw_integer(of_rest, *domain.horizon), _draw_integer(of_rest, *domain.samples_of_a_life)
    width, blocks = _draw_integer(of_shape, *domain.width), _draw_integer(of_shape, *domain.blocks)
    if family == "mlp":
        blocks = min(blocks, max(MOST_MLP_BLOCKS, domain.blocks[0]))
    horizon = max(min(horizon, domain.most_decisions // blocks), domain.horizon[0])
    steps = min(samples // batch, domain.most_steps // blocks)  # deep hosts take shorter trainings, because each step costs more
    classes, noise = int(of_shape.integers(*domain.classes, endpoint=True)), float(of_rest.uniform(*domain.label_noise))
    cell = Cell(
        source=source,
        host=f"{family}-{8 * math.ceil(width / 8) if is_text else width}x{blocks}",  # a gpt of fewer features learns next to nothing
        samples=_draw_integer(of_rest, *domain.samples),
        classes=None if is_text or classes >= MOST_CLASSES else classes,
        label_noise=0.0 if is_clean else round(noise, 3),
        teacher=TEACHERS[of_shape.integers(len(TEACHERS))],
        data_seed=int(of_rest.integers(2**31)),
        optimizer=optimizer,
        learning_rate=_draw_learning_rate(of_rest, optimizer),
        schedule=domain.schedules[of_rest.integers(len(domain.schedules))],
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


# Rounds


@dataclass(frozen=True, slots=True)
class DrawnHost:
    """Cell, random seeds and rent of one host."""

    cell: Cell  # a variant of the cell of its fleet
    seed: int  # of first weights and data
    growth_seed: int
    rent: RentConfig

    def config(self, samples: int) -> HostConfig:
        """Return the setting of the host, for a task with this many training samples."""
        return self.cell.host_config(self.seed, samples, rent=self.rent, growth_seed=self.growth_seed)


@dataclass(frozen=True, slots=True)
class FleetSetting:
    """The hosts of one fleet."""

    cell: Cell  # as that of the hosts, but for the number of samples and the learning rate
    hosts: tuple[DrawnHost, ...]


def draw_round(config: ControllerConfig, *, round_number: int, seed: int) -> list[FleetSetting]:
    """Return the settings of a round's fleets, each of another cell. The hosts of the config are divided as evenly as possible."""
    count = min(config.fleets, config.hosts)
    sizes = [len(share) for share in np.array_split(np.arange(config.hosts), count)]
    streams = Streams(seed).spawn(f"round {round_number}")
    settings = []
    for number, size in enumerate(sizes):
        shape, own = (round_number * count + number) % config.domain.shapes, streams.spawn(f"fleet {number}")
        cell = draw_cell_of_shape(config.domain, shape, rng=own.numpy("cell"), seed=seed)
        settings.append(FleetSetting(cell, draw_hosts(config.domain, cell, size, hosts_per_twin=config.hosts_per_twin, streams=own)))
    return settings


def draw_hosts(domain: DomainConfig, cell: Cell, count: int, *, hosts_per_twin: int, streams: Streams) -> tuple[DrawnHost, ...]:
    """Draw hosts in groups that share a twin: the variant, the seeds and the rent of each group. One rent in four has the usual prices."""
    groups = math.ceil(count / hosts_per_twin)
    seeds, growth_seeds = (_draw_seeds(streams, groups, name) for name in ("host seeds", "growth seeds"))
    rng, of_prices = streams.numpy("variants"), streams.numpy("prices")
    low, high = map(math.log, domain.price)
    drawn = []
    for number, (seed, growth_seed) in enumerate(zip(seeds, growth_seeds, strict=True)):
        parameters, flops = np.exp(of_prices.uniform(low, high, size=2)).tolist()
        rent = RentConfig(parameters=parameters, flops=flops) if number % 4 else RentConfig()
        drawn.append(DrawnHost(draw_variant(cell, domain, rng), seed, growth_seed, rent))
    return tuple(drawn[number // hosts_per_twin] for number in range(count))


def _draw_seeds(streams: Streams, count: int, name: str) -> list[int]:
    return [int(seed) for seed in streams.numpy(name).integers(HELD_OUT_SEEDS, SEED_LIMIT, size=count)]
