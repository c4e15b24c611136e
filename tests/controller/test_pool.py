"""Resident fleets: the cells of a training take turns with a few shapes, and its fleets are used again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from esper.config import ConfigError
from esper.controller.cells import Cell, draw_round
from esper.controller.config import ControllerConfig, DomainConfig
from esper.controller.training import train_controller
from esper.fleet.config import FleetConfig
from esper.growth.config import GrowthConfig, LifecycleConfig
from esper.rl.config import NetworkConfig
from tests.commands import events_of

SHAPES = 3
CONFIG = ControllerConfig(
    hosts=5,  # of one fleet three, of the other two
    rounds=8,
    device="cpu",
    threads=1,
    fleets=2,
    hosts_per_twin=2,
    domain=DomainConfig(
        shapes=SHAPES,
        sources=("digits", "teacher"),
        families=("mlp",),
        width=(2, 4),
        blocks=(1, 2),
        batch_size=(16, 32),
        horizon=(8, 12),
        samples_of_a_life=(2_000, 4_000),
    ),
    fleet=FleetConfig(validation_samples=64),
    growth=GrowthConfig(lifecycle=LifecycleConfig(holding_epochs=1)),
    ppo=msgspec.structs.replace(ControllerConfig().ppo, num_minibatches=1, num_epochs=1, network=NetworkConfig(hidden_size=8)),
)


def rounds_of(folder: Path) -> list[dict[str, Any]]:
    """Return the events of the fleets of a run, in order."""
    return [event for event in events_of(folder) if event["kind"] == "round_ended"]


def shape_of(cell: Cell) -> tuple[object, ...]:
    teacher = cell.teacher if cell.source == "teacher" else ""
    return cell.source, cell.classes, cell.host, cell.batch_size, cell.optimizer, teacher


def test_the_cells_of_all_rounds_have_as_many_shapes_as_the_domain_says_and_differ_in_the_rest() -> None:
    cells = [fleet.cell for number in range(3) for fleet in draw_round(ControllerConfig(), round_number=number, seed=0)]
    shapes = [shape_of(cell) for cell in cells]
    assert shapes[:16] == shapes[16:32] == shapes[32:]
    assert len(set(shapes)) == 16
    of_one = cells[5::16]
    for name in ("data_seed", "samples", "learning_rate"):
        assert len({getattr(cell, name) for cell in of_one}) == len(of_one), name
    of_all = [cells[number::16] for number in range(16)]
    for name in ("label_noise", "schedule", "horizon", "steps_per_decision"):
        assert any(len({getattr(cell, name) for cell in some}) > 1 for some in of_all), name


def test_the_shapes_depend_on_the_seed_and_the_domain_alone() -> None:
    def shapes(config: ControllerConfig, *, seed: int = 0) -> list[tuple[object, ...]]:
        rounds = -(-config.domain.shapes // config.fleets)
        cells = [fleet.cell for number in range(rounds) for fleet in draw_round(config, round_number=number, seed=seed)]
        return [shape_of(cell) for cell in cells]

    few = ControllerConfig(hosts=8, fleets=2)
    assert shapes(few) == shapes(ControllerConfig(hosts=32, fleets=4))
    assert shapes(few) != shapes(few, seed=1)
    more = ControllerConfig(hosts=8, fleets=2, domain=DomainConfig(shapes=20))
    assert shapes(more)[:16] == shapes(few)


def test_fewer_shapes_than_sources_are_refused() -> None:
    with pytest.raises(ConfigError, match="shapes: expected at least 4, one for each of the sources, got 3"):
        DomainConfig(shapes=3)


@pytest.mark.slow
def test_a_training_uses_its_fleets_again_and_gives_the_same_as_with_new_ones(tmp_path: Path) -> None:
    kept = train_controller(CONFIG, tmp_path / "kept")
    ended = [line for line in (kept.folder / "events.jsonl").read_text().splitlines() if '"round_ended"' in line]
    reused = [msgspec.json.decode(line)["reused"] for line in ended]
    assert len(reused) == 16
    assert not any(reused[:SHAPES])
    assert sum(reused) >= 0.8 * (16 - SHAPES)
    assert sum(event["grown"] for event in rounds_of(kept.folder)) > 10
    for size in (0, 1):
        new = train_controller(msgspec.structs.replace(CONFIG, resident=size), tmp_path / str(size))
        assert events_of(new.folder) == events_of(kept.folder)
