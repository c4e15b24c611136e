"""Scenarios: named settings of the arena for research, with frozen test maps and opponents, so that scores can be compared.

    scenario = find_scenario("2v2-open-v1")
    arena = Arena(scenario.arena, seed=0)            # train on the maps of any seed but `test_seed`
    scenario.test_arena(battles=512)                 # two battles on each of the first 256 test maps; the seed is `test_seed`

A scenario never changes. To change its maps, rules or opponents, add a scenario with a higher version; `tests/arena/test_scenarios.py`
holds hashes of the frozen ones. Imports no torch, so that the command line starts quickly.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from esper.arena.config import ArenaConfig
from esper.text_table import did_you_mean

TEST_MAPS = 512  # number of test maps of a scenario
FIRST_TEST_SEED = 2**41  # seeds of test maps start here; seeds that esper derives for trainings and evaluations are below 2**31
SEEDS = 2**42  # seeds that differ by a multiple of this have the same maps


@dataclass(frozen=True)
class Scenario:
    """Settings for training, test maps and opponents."""

    name: str  # ends with the version
    description: str
    arena: ArenaConfig  # for training; the whole battle is part of the observations
    test_seed: int  # its first 512 maps are the test maps
    opponents: tuple[str, ...] = ("middle-v1", "strong-v1", "expert-v1")  # bots that a player is tested against

    def test_arena(self, battles: int = TEST_MAPS) -> ArenaConfig:
        """Return the settings of a test: two battles on each map, one from each side. Battles 2i and 2i + 1 are on test map i."""
        if battles < 2 or battles % 2 or battles > 2 * TEST_MAPS:
            raise ValueError(f"a test has an even number of battles from 2 to {2 * TEST_MAPS}, two on each test map; got {battles}")
        changes = {"battles": battles, "maps": battles // 2, "battles_per_map": 2, "smallest_team": None, "state_view": False}
        return msgspec.structs.replace(self.arena, **changes)

    def is_test_seed(self, seed: int) -> bool:
        """Return whether the maps of a seed are the test maps."""
        return (seed - self.test_seed) % SEEDS == 0

    def check_training_seed(self, seed: int) -> None:
        """Raise ValueError if the maps of a seed are the test maps."""
        if self.is_test_seed(seed):
            raise ValueError(f"seed {seed} makes the test maps of {self.name}, which nobody may train on; choose another seed")


_ALL = (
    Scenario(
        name="2v2-open-v1",
        description="2 against 2 in forests, by rivers and between ridges",
        arena=ArenaConfig(team_size=2, landscapes=("forest", "river", "ridges"), contacts=2, allies=1, state_view=True),
        test_seed=FIRST_TEST_SEED + 201,
    ),
    Scenario(
        name="5v5-city-v1",
        description="5 against 5 in the streets of a city",
        arena=ArenaConfig(team_size=5, landscapes=("city",), contacts=5, allies=4, state_view=True),
        test_seed=FIRST_TEST_SEED + 501,
    ),
)
SCENARIOS = {scenario.name: scenario for scenario in _ALL}


def find_scenario(name: str) -> Scenario:
    """Return the scenario of a name; another name raises ValueError, which names the nearest one."""
    if name not in SCENARIOS:
        hint = did_you_mean(name, SCENARIOS, otherwise=f"there are {', '.join(SCENARIOS)}")
        raise ValueError(f"there is no scenario {name!r}; {hint}")
    return SCENARIOS[name]
