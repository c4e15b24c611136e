"""The cells and hosts of a round: drawn within the config, reproducible, and never the held-out seeds."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
import tyro
from hypothesis import given, settings, strategies as st

from esper.config import ConfigError, load, save
from esper.controller.config import HELD_OUT_SEEDS, ControllerConfig, DomainConfig, rent_at, rent_level
from esper.controller.domain import DrawnHost, FleetSetting, draw_round
from esper.growth.config import LifecycleConfig

CONFIG = ControllerConfig(hosts=8, fleets=2)
seeds = st.integers(0, 2**31 - 1)


def drawn(config: ControllerConfig = CONFIG, *, rounds: int = 30, seed: int = 0) -> list[FleetSetting]:
    return [fleet for number in range(rounds) for fleet in draw_round(config, round_number=number, seed=seed)]


def hosts_of(fleets: list[FleetSetting]) -> list[DrawnHost]:
    return [host for fleet in fleets for host in fleet.hosts]


# Drawing


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


def test_prices_are_log_uniform_and_independent_of_the_cell() -> None:
    config = msgspec.structs.replace(CONFIG, domain=DomainConfig(price=(0.01, 1.0)))
    prices = [host.rent.parameters for host in hosts_of(drawn(config, rounds=60))]
    assert 0.01 <= min(prices) < 0.012 < 0.8 < max(prices) <= 1.0
    assert sum(price < 0.1 for price in prices) / len(prices) == pytest.approx(0.5, abs=0.08)
    assert all(host.rent == rent_at(host.rent.parameters) for host in hosts_of(drawn(rounds=3)))


def test_hosts_that_share_a_twin_differ_only_in_rent_and_growth_seed() -> None:
    for fleet in drawn(msgspec.structs.replace(CONFIG, hosts_per_twin=3), rounds=5):
        for start in range(0, len(fleet.hosts), 3):
            group = fleet.hosts[start : start + 3]
            assert len({host.seed for host in group}) == len({host.cell for host in group}) == 1
            assert len({host.growth_seed for host in group}) == len({host.rent for host in group}) == len(group)
    found = [host.seed for host in hosts_of(drawn(msgspec.structs.replace(CONFIG, hosts_per_twin=1)))]
    assert len(set(found)) == len(found), "no two groups of a run share a seed"


def test_the_settings_of_the_hosts_are_those_of_variants_of_the_cell() -> None:
    for fleet in drawn(msgspec.structs.replace(CONFIG, hosts_per_twin=2), rounds=4):
        configs = fleet.host_configs(samples=1_000)
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


@pytest.mark.slow
def test_a_config_survives_its_file_and_the_command_line(tmp_path: Path) -> None:
    config = ControllerConfig(hosts=8, domain=DomainConfig(sources=("digits",), families=("conv", "mlp"), horizon=(5, 9)))
    save(config, tmp_path / "config.toml")
    assert load(ControllerConfig, tmp_path / "config.toml") == config
    arguments = ["--domain.sources", "digits", "--domain.families", "conv", "mlp", "--domain.horizon", "5", "9", "--hosts", "8"]
    assert tyro.cli(ControllerConfig, args=arguments, default=ControllerConfig()) == config


def test_gamma_is_1_by_default_and_the_horizon_terminates() -> None:
    ppo = ControllerConfig().ppo
    assert ppo.gamma == 1
    assert ppo.time_limit_is_end
    assert ppo.num_steps >= ControllerConfig().domain.horizon[1]
