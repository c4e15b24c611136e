"""Scenarios: their maps, rules and opponents are frozen, and nobody trains on the test maps.

python -m tests.arena.test_scenarios      # print what `FROZEN` holds for the scenarios of now
"""

from __future__ import annotations

import hashlib
import itertools

import msgspec
import pytest
import torch

from esper.arena.config import BOTS, ArenaConfig
from esper.arena.maps import generate_maps
from esper.arena.replay import device_kind
from esper.arena.scenarios import FIRST_TEST_SEED, SCENARIOS, SEEDS, TEST_MAPS, Scenario, find_scenario
from esper.arena.skills import SKILLS
from esper.arena.specs import CLASSES, MATERIALS, PHYSICS, RULES_VERSION, WEAPONS
from esper.arena.start import first_of, make_grids
from esper.league.matches import MatchArena
from esper.rng import Streams

# Settings of an arena that change what a test measures. Numbers of battles, rewards and the view of a critic do not.
MEASURED = ("team_size", "smallest_team", "pack", "size", "landscapes", "seconds", "contacts", "allies")

# Scenario -> sha256 of its test maps, sha256 of the tables of its rules and opponents, and results of the opponents against each other.
FROZEN = {
    "2v2-open-v1": (
        "0227719e4ddf833c3893a46545a90965e272e731aa8a149a437ec1730b9c5025",
        "04017ca45543b2ccce3bf90da078a65f2a4e566e8d3302a22c9c6dcb2afc89b0",
        "lllwllww-406 llllllll-438 llllllll-476",
    ),
    "5v5-city-v1": (
        "060aa30241196a0dd7ded774c60230fde124987f36015894f551c08c2b110ab8",
        "c1ac589d775eecbd6e420fedff0379a6b78c2e723e344a6ad8e222a79e9d256c",
        "llwllwll-985 llllllll-685 lllllwll-723",
    ),
}
KINDS = "cpu x86_64, numba 0.68.1", "cpu aarch64, numba 0.68.1"  # kinds of devices that have these results
CHANGED = "{} has changed, and scores of before cannot be compared any more: leave it as it was, and add a scenario of a higher version"


def hash_of_maps(scenario: Scenario) -> str:
    first, arena = first_of(scenario.test_seed), scenario.arena
    maps = generate_maps(range(first, first + TEST_MAPS), size=arena.size, landscapes=arena.landscapes)
    digest = hashlib.sha256()
    for grid in (maps.height, maps.material, maps.zone_radius):
        digest.update(grid.numpy().tobytes())
    return digest.hexdigest()


def hash_of_rules(scenario: Scenario) -> str:
    """Return the hash of everything in tables. `results_of_opponents` changes with the code."""
    arena = {name: getattr(scenario.arena, name) for name in MEASURED}
    bots = {name: SKILLS[name] for name in scenario.opponents}
    tables = [{material.name: spec for material, spec in MATERIALS.items()}, WEAPONS, CLASSES, PHYSICS, RULES_VERSION]
    content = msgspec.to_builtins([scenario.test_seed, arena, bots, *tables])
    return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()


def results_of_opponents(scenario: Scenario) -> str:
    """Return the results of each opponent against the next one on the first test maps: won, drawn and lost battles, and their length."""
    match_arena = MatchArena(scenario.test_arena(8), seed=scenario.test_seed, device="cpu")
    results = [match_arena.play(first, second) for first, second in itertools.combinations(scenario.opponents, 2)]
    return " ".join("".join("ldw"[round(2 * points)] for points in result.points) + f"-{8 * result.decisions:.0f}" for result in results)


def frozen_parts(scenario: Scenario) -> tuple[str, str, str]:
    return hash_of_maps(scenario), hash_of_rules(scenario), results_of_opponents(scenario)


def test_every_scenario_is_frozen() -> None:
    assert FROZEN.keys() == SCENARIOS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_test_maps_of_a_scenario_are_frozen(name: str) -> None:
    assert hash_of_maps(SCENARIOS[name]) == FROZEN[name][0], CHANGED.format(f"the test maps of {name}")


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_rules_and_opponents_of_a_scenario_are_frozen(name: str) -> None:
    assert hash_of_rules(SCENARIOS[name]) == FROZEN[name][1], CHANGED.format(f"the rules, settings or opponents of {name}")


@pytest.mark.slow
@pytest.mark.skipif(device_kind(torch.device("cpu")) not in KINDS, reason=f"the results are those of {' and '.join(KINDS)}")
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_opponents_of_a_scenario_fight_as_before(name: str) -> None:
    assert results_of_opponents(SCENARIOS[name]) == FROZEN[name][2], CHANGED.format(f"the code of the rules or bots of {name}")


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_a_scenario_can_be_trained_and_tested(scenario: Scenario) -> None:
    assert scenario.arena.state_view
    assert set(scenario.opponents) <= {name for name in BOTS if "-v" in name}, "a bot without a version may change"
    test = scenario.test_arena(64)
    assert (test.battles, test.maps, test.battles_per_map) == (64, 32, 2)
    assert {name: getattr(test, name) for name in MEASURED} == {name: getattr(scenario.arena, name) for name in MEASURED}


@pytest.mark.slow
def test_a_smaller_test_is_fought_on_the_first_test_maps() -> None:
    scenario = find_scenario("2v2-open-v1")
    few, more = (make_grids(scenario.test_arena(battles), seed=scenario.test_seed) for battles in (4, 8))
    assert torch.equal(few.height, more.height[:2])
    assert not torch.equal(more.height[:2], more.height[2:])


def test_seeds_of_test_maps_are_out_of_reach_of_derived_seeds_and_refused_for_training() -> None:
    largest = 2**31 - 1
    assert all(Streams(seed).integer("maps") <= largest for seed in range(100))
    seeds = [scenario.test_seed for scenario in SCENARIOS.values()]
    assert len(set(seeds)) == len(seeds)
    for scenario in SCENARIOS.values():
        assert largest < FIRST_TEST_SEED <= scenario.test_seed < SEEDS
        scenario.check_training_seed(0)
        for seed in (scenario.test_seed, scenario.test_seed + SEEDS):
            assert first_of(seed) == first_of(scenario.test_seed)
            with pytest.raises(ValueError, match=f"seed {seed} makes the test maps of {scenario.name}"):
                scenario.check_training_seed(seed)


@pytest.mark.parametrize("battles", [0, 3, 2 * TEST_MAPS + 2])
def test_a_test_has_two_battles_on_each_test_map(battles: int) -> None:
    with pytest.raises(ValueError, match=f"an even number of battles from 2 to 1024, two on each test map; got {battles}"):
        find_scenario("2v2-open-v1").test_arena(battles)


def test_a_wrong_name_is_explained() -> None:
    with pytest.raises(ValueError, match="there is no scenario '2v2-opne-v1'; did you mean '2v2-open-v1'"):
        find_scenario("2v2-opne-v1")
    with pytest.raises(ValueError, match="there is no scenario 'chess'; there are 2v2-open-v1, 5v5-city-v1"):
        find_scenario("chess")


def test_a_change_of_a_setting_or_a_rule_is_noticed() -> None:
    scenario = find_scenario("2v2-open-v1")
    other = Scenario(scenario.name, "", ArenaConfig(team_size=2, seconds=60.0), scenario.test_seed)
    assert hash_of_rules(other) != hash_of_rules(scenario)


if __name__ == "__main__":
    for name, scenario in SCENARIOS.items():
        print(f'    "{name}": {frozen_parts(scenario)},')
