"""The hosts of a round: drawn within the config, reproducible, and never the held-out ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import tyro
from hypothesis import given, settings, strategies as st

from esper.config import ConfigError, from_mapping, load, save
from esper.controller.config import HELD_OUT_SEEDS, RENT_LEVELS, ControllerConfig, DomainConfig
from esper.controller.domain import FleetSetting, draw_round, training_seeds
from esper.fleet.config import HostConfig
from esper.growth.config import RentConfig

CONFIG = DomainConfig()
seeds = st.integers(0, 2**31 - 1)


def drawn(config: DomainConfig = CONFIG, *, rounds: int = 30, hosts: int = 16, seed: int = 0) -> list[FleetSetting]:
    return [fleet for number in range(rounds) for fleet in draw_round(config, round_number=number, hosts=hosts, seed=seed)]


def hosts_of(fleets: list[FleetSetting]) -> Iterator[HostConfig]:
    return (host for fleet in fleets for host in fleet.hosts)


# Drawing


@pytest.mark.slow
@settings(max_examples=20)
@given(seed=seeds, number=st.integers(0, 10_000))
def test_the_same_seed_and_round_draw_the_same_hosts(seed: int, number: int) -> None:
    first = draw_round(CONFIG, round_number=number, hosts=8, seed=seed)
    assert first == draw_round(CONFIG, round_number=number, hosts=8, seed=seed)
    assert first != draw_round(CONFIG, round_number=number + 1, hosts=8, seed=seed)
    assert first != draw_round(CONFIG, round_number=number, hosts=8, seed=seed + 1)


@pytest.mark.slow
@settings(max_examples=20)
@given(hosts=st.integers(1, 20), fleets=st.integers(1, 20), seed=seeds)
def test_a_round_has_as_many_hosts_as_asked_for_in_fleets_of_different_architectures(hosts: int, fleets: int, seed: int) -> None:
    round_ = draw_round(DomainConfig(fleets=fleets), round_number=0, hosts=hosts, seed=seed)
    sizes = [len(fleet.hosts) for fleet in round_]
    assert sum(sizes) == hosts
    assert max(sizes) - min(sizes) <= 1
    assert len({(fleet.task, fleet.host) for fleet in round_}) == len(round_) == min(fleets, hosts, 12)


def test_more_hosts_leave_the_first_ones_as_they_are() -> None:
    few = draw_round(CONFIG, round_number=3, hosts=8, seed=1)
    many = draw_round(CONFIG, round_number=3, hosts=32, seed=1)
    for fleet, larger in zip(few, many, strict=True):
        assert larger.hosts[: len(fleet.hosts)] == fleet.hosts


def test_everything_drawn_lies_in_its_range_and_reaches_both_ends_of_it() -> None:
    config = DomainConfig(classes_share=(0.5, 1.0))
    hosts = list(hosts_of(drawn(config)))
    for name in ("horizon", "learning_rate", "label_noise", "data_share", "classes_share"):
        values = [getattr(host, name) for host in hosts]
        least, most = getattr(config, name)
        near = 0.15 * (most - least)
        assert least <= min(values) < least + near, name
        assert most - near < max(values) <= most + 1e-12, name


@pytest.mark.slow
def test_every_architecture_is_drawn() -> None:
    found = {(fleet.task, fleet.host) for fleet in drawn(rounds=100, hosts=2)}
    assert found == {(task, host) for task in CONFIG.tasks for host in CONFIG.hosts}


def test_tasks_take_turns_and_no_architecture_comes_twice_before_all_have_come() -> None:
    fleets = drawn(DomainConfig(fleets=1), rounds=36, hosts=2)
    assert all(one.task != next_one.task for one, next_one in pairwise(fleets))
    cycles = [[(fleet.task, fleet.host) for fleet in fleets[start : start + 12]] for start in (0, 12, 24)]
    assert all(len(set(cycle)) == 12 for cycle in cycles)
    assert cycles[0] != cycles[1]


def test_half_of_the_learning_rates_lie_below_the_middle_of_the_log_scale() -> None:
    rates = [host.learning_rate for host in hosts_of(drawn())]
    middle = math.sqrt(math.prod(CONFIG.learning_rate))
    assert sum(rate < middle for rate in rates) / len(rates) == pytest.approx(0.5, abs=0.08)


@pytest.mark.slow
def test_the_plain_share_of_the_hosts_trains_on_the_task_as_it_is() -> None:
    def share(plain_share: float) -> float:
        hosts = list(hosts_of(drawn(DomainConfig(plain_share=plain_share))))
        return sum((host.label_noise, host.data_share, host.classes_share) == (0, 1, 1) for host in hosts) / len(hosts)

    assert share(0) == 0
    assert share(0.5) == pytest.approx(0.5, abs=0.08)
    assert share(1) == 1


def test_rents_are_levels_or_values_between_low_and_high() -> None:
    rents = [host.rent for host in hosts_of(drawn())]
    levels = list(RENT_LEVELS.values())
    counts = [rents.count(level) for level in levels]
    assert sum(counts) / len(rents) == pytest.approx(CONFIG.rent_level_share, abs=0.08)
    assert min(counts) > 0.7 * max(counts)
    low, high = RENT_LEVELS["low"], RENT_LEVELS["high"]
    between = [rent for rent in rents if rent not in levels]
    assert all(low.parameters < rent.parameters < high.parameters and low.flops < rent.flops < high.flops for rent in between)
    middle = math.sqrt(low.parameters * high.parameters)
    assert sum(rent.parameters < middle for rent in between) / len(between) == pytest.approx(0.5, abs=0.1)


def test_hosts_that_share_a_twin_differ_only_in_rent_and_growth_seed() -> None:
    for fleet in drawn(DomainConfig(hosts_per_twin=3), rounds=5):
        for start in range(0, len(fleet.hosts), 3):
            group = fleet.hosts[start : start + 3]
            alike = {msgspec.structs.replace(host, rent=RentConfig(), growth_seed=0) for host in group}
            assert len(alike) == 1
            assert len({host.growth_seed for host in group}) == len(group)


def test_no_two_groups_of_a_run_share_a_seed() -> None:
    found = [host.seed for host in hosts_of(drawn(DomainConfig(hosts_per_twin=1)))]
    assert len(set(found)) == len(found)


def test_a_round_without_hosts_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one host; got hosts=0"):
        draw_round(CONFIG, round_number=0, hosts=0, seed=0)


# Held out


@pytest.mark.slow
@settings(max_examples=30)
@given(seed=seeds, number=st.integers(0, 10_000))
def test_held_out_hosts_are_never_trained_on(seed: int, number: int) -> None:
    for fleet in draw_round(CONFIG, round_number=number, hosts=64, seed=seed):
        assert fleet.host not in CONFIG.held_out_hosts
        assert all(host.seed >= HELD_OUT_SEEDS for host in fleet.hosts)


@settings(max_examples=20)
@given(seed=seeds)
def test_seeds_for_tuning_are_not_held_out(seed: int) -> None:
    found = training_seeds(50, seed=seed)
    assert min(found) >= 10_000
    assert found == training_seeds(50, seed=seed)


# The config


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"held_out_hosts": ["2-4-8"]}, "held_out_hosts: expected channels that are not among hosts"),
        ({"hosts": ["4-x"]}, "hosts: expected a list"),
        ({"hosts": []}, "hosts: expected names, at least one"),
        ({"tasks": ["digits", "digits"]}, "tasks: expected names, at least one and each once"),
        ({"horizon": [40, 12]}, r"horizon: expected a range, the smaller number first, got \(40, 12\)"),
        ({"data_share": [0.0, 1.0]}, "data_share: expected"),
    ],
)
def test_an_impossible_domain_is_refused(mapping: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_mapping(DomainConfig, mapping)


@pytest.mark.slow
def test_a_config_survives_its_file_and_the_command_line(tmp_path: Path) -> None:
    config = ControllerConfig(hosts=8, domain=DomainConfig(hosts=("2-2", "3-3-3"), horizon=(5, 9)))
    save(config, tmp_path / "config.toml")
    assert load(ControllerConfig, tmp_path / "config.toml") == config
    arguments = ["--domain.hosts", "2-2", "3-3-3", "--domain.horizon", "5", "9", "--hosts", "8"]
    assert tyro.cli(ControllerConfig, args=arguments, default=ControllerConfig()) == config


def test_gamma_is_1_by_default_and_the_horizon_terminates() -> None:
    ppo = ControllerConfig().ppo
    assert ppo.gamma == 1
    assert ppo.time_limit_is_end
    assert ppo.num_steps >= ControllerConfig().domain.horizon[1]
