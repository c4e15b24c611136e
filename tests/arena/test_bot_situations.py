"""What bots do in hand-made situations."""

from __future__ import annotations

from typing import Any

import pytest

from tests.arena import bot_situations


@pytest.fixture(scope="module")
def situations() -> dict[str, Any]:
    return bot_situations.situations()


def test_every_battle_and_team_has_its_own_bot(situations: dict[str, Any]) -> None:
    (first, second), (first_of_other, second_of_other) = situations["changed by battle and team"]
    assert all(first)
    assert not any(second)
    assert not any(first_of_other)
    assert all(second_of_other)


def test_strong_v1_is_strong(situations: dict[str, Any]) -> None:
    fire, target, vent, motion = situations["strong and strong-v1 by battle"]
    for one in (fire, target, vent):
        assert one[0] == one[1]
    # The battles have the same seed here, so the coins are the same too.
    assert motion[0] == motion[1]


@pytest.mark.parametrize("name", ["weak", "middle"])
def test_weak_and_middle_stand_in_some_seconds_and_walk_in_others(situations: dict[str, Any], name: str) -> None:
    walks = situations[f"{name} walks"]
    assert any(walks)
    assert not all(walks)


def test_expert_shoots_at_the_enemy_that_is_nearly_dead(situations: dict[str, Any]) -> None:
    for enemy in (2, 3):
        orders = situations[f"expert, {enemy} is nearly dead"]
        assert orders["fire"] != "none"
        assert orders["target"] == enemy


def test_expert_does_not_fire_projectiles_through_an_ally(situations: dict[str, Any]) -> None:
    assert situations["expert, ally in the line of fire"]["fire"] == "none"
    assert situations["expert, ally beside the line of fire"]["fire"] != "none"


def test_expert_vents_while_its_weapons_load(situations: dict[str, Any]) -> None:
    assert situations["strong, no weapon loaded"]["vent"] == 0
    assert situations["expert, no weapon loaded"]["vent"] == 1


def test_expert_fires_smoke_when_it_is_hurt(situations: dict[str, Any]) -> None:
    assert situations["expert, whole"]["fire"] != "smoke"
    assert situations["expert, hurt"]["fire"] == "smoke"
    assert situations["expert, hurt"]["target"] == 2


def test_expert_flies_over_a_wall_on_the_way_to_its_enemy(situations: dict[str, Any]) -> None:
    assert situations["strong, wall"]["jets"] < 0
    assert situations["expert, no wall"]["jets"] < 0
    assert situations["expert, wall"]["jets"] > 0


def test_expert_waits_for_allies_that_are_far_behind(situations: dict[str, Any]) -> None:
    assert situations["expert, ally beside"]["forward"] == 1.0
    assert situations["expert, ally far behind"]["forward"] == 0.0


def test_expert_ignores_an_enemy_that_it_does_not_sense(situations: dict[str, Any]) -> None:
    before, after = situations["expert, hidden enemy changes"]
    assert before == after
