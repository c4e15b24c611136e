"""Cells: the ranges that they are drawn from, their data and settings of training, and the hosts of a round."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import msgspec
import pytest
import tyro
from hypothesis import given, settings, strategies as st

from esper.config import ConfigError, load as load_config, save
from esper.controller.cells import LEARNING_RATES, Cell, DrawnHost, FleetSetting, draw_cell, draw_round
from esper.controller.config import HELD_OUT_SEEDS, ControllerConfig, DomainConfig, rent_level
from esper.fleet.config import FleetConfig
from esper.growth.config import LifecycleConfig, RentConfig
from esper.tasks import load_task

load = cache(load_task)
CONFIG = ControllerConfig(hosts=8, fleets=2)
seeds = st.integers(0, 2**31 - 1)


def drawn(config: ControllerConfig = CONFIG, *, rounds: int = 30, seed: int = 0) -> list[FleetSetting]:
    return [fleet for number in range(rounds) for fleet in draw_round(config, round_number=number, seed=seed)]


def hosts_of(fleets: list[FleetSetting]) -> list[DrawnHost]:
    return [host for fleet in fleets for host in fleet.hosts]


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


# Rounds


@settings(max_examples=20)
@given(seed=seeds, number=st.integers(0, 10_000))
def test_the_same_seed_and_round_draw_the_same_hosts(seed: int, number: int) -> None:
    first = draw_round(CONFIG, round_number=number, seed=seed)
    assert first == draw_round(CONFIG, round_number=number, seed=seed)
    assert first != draw_round(CONFIG, round_number=number + 1, seed=seed)
    assert first != draw_round(CONFIG, round_number=number, seed=seed + 1)


@settings(max_examples=20)
@given(hosts=st.integers(1, 20), fleets=st.integers(1, 20), seed=seeds)
def test_a_round_has_as_many_hosts_as_asked_for_in_fleets_of_different_cells(hosts: int, fleets: int, seed: int) -> None:
    found = draw_round(ControllerConfig(hosts=hosts, fleets=fleets), round_number=0, seed=seed)
    sizes = [len(fleet.hosts) for fleet in found]
    assert sum(sizes) == hosts
    assert max(sizes) - min(sizes) <= 1
    assert len({fleet.cell for fleet in found}) == len(found) == min(fleets, hosts)


def test_more_hosts_leave_the_first_ones_as_they_are() -> None:
    few, many = (draw_round(msgspec.structs.replace(CONFIG, hosts=hosts), round_number=3, seed=1) for hosts in (8, 32))
    for fleet, larger in zip(few, many, strict=True):
        assert fleet.cell == larger.cell
        assert fleet.hosts == larger.hosts[: len(fleet.hosts)]


def test_rounds_draw_all_sources_and_families_and_never_a_cell_twice() -> None:
    cells = [fleet.cell for fleet in drawn(rounds=60)]
    assert len(set(cells)) == len(cells)
    assert {cell.source for cell in cells} == set(CONFIG.domain.sources)
    assert {cell.family for cell in cells} == set(CONFIG.domain.families)


def test_both_prices_are_log_uniform_but_a_quarter_of_the_hosts_pay_the_usual_ones() -> None:
    config = ControllerConfig(hosts=16, fleets=2, hosts_per_twin=1, domain=DomainConfig(price=(0.01, 1.0)))
    rents = [host.rent for host in hosts_of(drawn(config, rounds=60))]
    others = [rent for rent in rents if rent != RentConfig()]
    assert len(others) / len(rents) == pytest.approx(3 / 4)
    for prices in ([rent.parameters for rent in others], [rent.flops for rent in others]):
        assert 0.01 <= min(prices) < 0.012 < 0.8 < max(prices) <= 1.0
        assert sum(price < 0.1 for price in prices) / len(prices) == pytest.approx(0.5, abs=0.08)
    assert sum((rent.parameters < 0.1) == (rent.flops < 0.1) for rent in others) / len(others) == pytest.approx(0.5, abs=0.08)


def test_hosts_that_share_a_twin_are_the_same() -> None:
    for fleet in drawn(msgspec.structs.replace(CONFIG, hosts=14, hosts_per_twin=3), rounds=5):
        assert [fleet.hosts.count(host) for host in fleet.hosts] == [3, 3, 3, 3, 3, 3, 1]
        assert len({host.seed for host in fleet.hosts}) == len({host.growth_seed for host in fleet.hosts}) == 3
    found = [host.seed for host in hosts_of(drawn(msgspec.structs.replace(CONFIG, hosts_per_twin=1)))]
    assert len(set(found)) == len(found), "no two groups of a run share a seed"


def test_the_settings_of_the_hosts_are_those_of_variants_of_the_cell() -> None:
    for fleet in drawn(msgspec.structs.replace(CONFIG, hosts_per_twin=2), rounds=4):
        configs = [host.config(1_000) for host in fleet.hosts]
        assert [(host.seed, host.growth_seed, host.rent) for host in configs] == [
            (host.seed, host.growth_seed, host.rent) for host in fleet.hosts
        ]
        assert {host.horizon for host in configs} == {fleet.cell.horizon}
        assert [host.learning_rate for host in configs] == [host.cell.learning_rate for host in fleet.hosts]
        assert [host.data_share for host in configs] == [min((host.cell.samples or math.inf) / 1_000, 1.0) for host in fleet.hosts]
        assert len({host.learning_rate for host in configs}) == len({host.cell for host in fleet.hosts}) == 2
        common = {msgspec.structs.replace(host.cell, samples=None, learning_rate=1.0) for host in fleet.hosts}
        assert common == {msgspec.structs.replace(fleet.cell, samples=None, learning_rate=1.0)}


@settings(max_examples=30)
@given(seed=seeds, number=st.integers(0, 10_000))
def test_held_out_seeds_are_never_trained_on(seed: int, number: int) -> None:
    assert all(host.seed >= HELD_OUT_SEEDS for host in hosts_of(draw_round(CONFIG, round_number=number, seed=seed)))


# The config


def test_levels_of_rent_are_named_by_their_price() -> None:
    assert [rent_level(price) for price in (0.003, 0.01, 0.011, 0.03, 0.1, 5.0)] == ["low", "low", "middle", "middle", "high", "high"]


def test_a_horizon_that_keeps_no_seed_is_refused() -> None:
    growth = msgspec.structs.replace(CONFIG.growth, lifecycle=LifecycleConfig(holding_epochs=9))
    with pytest.raises(ConfigError, match=r"domain\.horizon: expected at least 9 decisions"):
        ControllerConfig(growth=growth)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"num_steps": 2}, r"ppo\.num_steps: expected 1, and no bptt_length, because a rollout is made of whole lives; set hosts"),
        ({"bptt_length": 1}, r"ppo\.num_steps: expected 1, and no bptt_length"),
        ({"normalize_values": True}, r"ppo\.normalize_values: expected false"),
        ({"normalize_observations": True}, r"ppo\.normalize_observations: expected false"),
    ],
)
def test_a_learner_that_does_not_fit_whole_lives_is_refused(fields: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        ControllerConfig(ppo=msgspec.structs.replace(CONFIG.ppo, **fields))


@pytest.mark.slow
def test_a_config_survives_its_file_and_the_command_line(tmp_path: Path) -> None:
    config = ControllerConfig(hosts=8, domain=DomainConfig(sources=("digits",), families=("conv", "mlp"), horizon=(5, 9)))
    save(config, tmp_path / "config.toml")
    assert load_config(ControllerConfig, tmp_path / "config.toml") == config
    arguments = ["--domain.sources", "digits", "--domain.families", "conv", "mlp", "--domain.horizon", "5", "9", "--hosts", "8"]
    assert tyro.cli(ControllerConfig, args=arguments, default=ControllerConfig()) == config


def test_nothing_is_discounted_by_default_and_a_round_is_one_rollout() -> None:
    config = ControllerConfig(hosts=8, rounds=3)
    assert (config.ppo.gamma, config.ppo.num_steps, config.total_steps) == (1, 1, 24)
