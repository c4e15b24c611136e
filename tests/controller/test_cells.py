"""Cells: the ranges that they are drawn from, and their data and settings of training."""

from __future__ import annotations

from functools import cache

import pytest

from esper.config import ConfigError
from esper.controller.cells import LEARNING_RATES, Cell, draw_cell
from esper.controller.config import DomainConfig
from esper.fleet.config import FleetConfig
from esper.growth.config import RentConfig
from esper.tasks import load_task

load = cache(load_task)


def test_a_cell_depends_on_the_seed_and_its_number_alone() -> None:
    cells = [draw_cell(DomainConfig(), number=number, seed=3) for number in range(20)]
    assert cells == [draw_cell(DomainConfig(), number=number, seed=3) for number in range(20)]
    assert len(set(cells)) == 20
    assert cells[0] != draw_cell(DomainConfig(), number=0, seed=4)


def test_cells_are_within_their_ranges_and_reach_their_ends() -> None:
    domain = DomainConfig(width=(2, 9), blocks=(1, 3), samples=(300, 500), classes=(2, 4), label_noise=(0.1, 0.3), batch_size=(16, 20))
    cells = [draw_cell(domain, number=number, seed=0) for number in range(400)]
    of_values = [cell for cell in cells if cell.source != "text"]
    widths, blocks = zip(*(map(int, cell.host.partition("-")[2].split("x")) for cell in of_values), strict=True)
    assert (min(widths), max(widths), min(blocks), max(blocks)) == (2, 9, 1, 3)
    assert {cell.classes for cell in of_values} == {2, 3, 4}
    assert all(300 <= (cell.samples or 0) <= 500 and 16 <= cell.batch_size <= 20 and 8 <= cell.horizon <= 32 for cell in cells)
    noise = [cell.label_noise for cell in cells if cell.label_noise]
    assert 0.4 < len(noise) / len(cells) < 0.6
    assert 0.1 <= min(noise) < 0.12 < 0.28 < max(noise) <= 0.3
    assert all(least <= cell.learning_rate <= most for cell in cells for least, most in [LEARNING_RATES[cell.optimizer]])
    assert all(cell.samples_of_a_life <= 300_000 for cell in cells)
    assert all(cell.samples_of_a_life > 36_000 for cell in of_values if cell.host.endswith("x1")), (
        "a whole number of steps cuts off a little"
    )


def test_deep_hosts_are_trained_for_fewer_steps_and_decisions() -> None:
    domain = DomainConfig(most_steps=1_000, most_decisions=40, horizon=(8, 32))
    for number in range(100):
        cell = draw_cell(domain, number=number, seed=0)
        blocks = int(cell.host.split("x")[1])
        assert cell.horizon <= max(40 // blocks, 8)
        assert cell.steps_per_decision * cell.horizon <= 1_000 // blocks


def test_a_source_that_is_named_twice_is_drawn_twice_as_often() -> None:
    domain = DomainConfig(sources=("digits", "teacher", "digits"), families=("conv",))
    assert [draw_cell(domain, number=number, seed=0).source for number in range(4)] == ["digits", "teacher", "digits", "digits"]


def test_what_a_domain_does_not_name_is_held_out() -> None:
    domain = DomainConfig(sources=("digits", "text"), families=("conv", "gpt"), horizon=(8, 12), optimizers=("sgd",), schedules=("none",))
    cells = [draw_cell(domain, number=number, seed=0) for number in range(50)]
    assert {(cell.source, cell.family) for cell in cells} == {("digits", "conv"), ("text", "gpt")}
    assert {cell.optimizer for cell in cells} == {"sgd"}
    assert {cell.schedule for cell in cells} == {"none"}
    assert all(8 <= cell.horizon <= 12 for cell in cells)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"sources": ()}, "sources: expected names, at least one"),
        ({"families": ("conv", "conv")}, "families: expected names, at least one and each once"),
        ({"families": ("conv",)}, "families: expected one that can read text"),
        ({"width": (8, 4)}, "width: expected a range, the smaller number first"),
    ],
)
def test_a_domain_that_cannot_be_drawn_from_is_refused(fields: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        DomainConfig(**fields)  # type: ignore[arg-type]


def test_all_parts_of_the_data_have_the_classes_and_the_wrong_labels_of_the_cell() -> None:
    clean = Cell(source="digits", classes=3, data_seed=5).task(load)
    noisy = Cell(source="digits", classes=3, label_noise=0.4, data_seed=5).task(load)
    assert clean.num_classes == noisy.num_classes == 3
    for part in ("train", "validation", "test"):
        wrong = getattr(clean, part).targets != getattr(noisy, part).targets
        assert 0.25 < wrong.float().mean() < 0.55
    assert Cell(source="digits", classes=10).task(load) is load("digits"), "all classes are the task itself"


def test_a_teacher_depends_on_the_data_seed_and_on_its_size() -> None:
    one, other, larger = (
        Cell(source="teacher", classes=4, **fields).task(load).train.targets
        for fields in ({"data_seed": 1}, {"data_seed": 2}, {"data_seed": 1, "teacher": "conv-2x1"})
    )
    assert one.unique().tolist() == [0, 1, 2, 3]
    assert (one != other).any()
    assert (one != larger).any()


def test_hosts_see_as_many_samples_as_the_cell_says_and_train_as_it_says() -> None:
    cell = Cell(source="digits", samples=300, optimizer="sgd", schedule="none", batch_size=32, steps_per_decision=7, horizon=9)
    task, rent = cell.task(load), RentConfig(parameters=0.5)
    host = cell.host_config(17, len(task.train), rent=rent)
    assert (host.seed, host.horizon, host.rent, round(host.data_share * len(task.train))) == (17, 9, rent, 300)
    assert Cell(source="digits", samples=100_000).host_config(0, len(task.train), rent=rent).data_share == 1
    fleet = cell.fleet(FleetConfig(validation_samples=100))
    assert (fleet.optimizer, fleet.schedule, fleet.batch_size, fleet.steps_per_decision) == ("sgd", "none", 32, 7)
    assert (fleet.keep, fleet.validation_samples) == ("best", 100)
