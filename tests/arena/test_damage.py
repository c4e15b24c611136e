"""Damage of hits, and its attribution to attackers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from esper.arena.arena import Arena
from esper.arena.damage import Hits, one_hot, strike, together
from tests.arena.worlds import flat_arena, put, unit_field


def hits_on(arena: Arena, damage: dict[tuple[int, int], float] | None = None, **parts: Any) -> Hits:
    """Damage by (attacker, victim), and what else strikes unit 1."""
    count = arena.config.units
    by_whom = torch.zeros(1, count, count)
    for (attacker, victim), amount in (damage or {}).items():
        by_whom[0, attacker, victim] = amount
    kinds = {"legs": torch.float32, "stability": torch.float32, "heat": torch.float32, "suppressed": torch.int32, "painted": torch.int32}
    others = {name: torch.zeros(1, count, dtype=kind) for name, kind in kinds.items()}
    for name, amount in parts.items():
        others[name][0, 1] = amount
    return Hits(damage=by_whom, **others)


def apply_hits(arena: Arena, hits: Hits) -> torch.Tensor:
    """The state after the hits; gives what each attacker took from each victim [U, U]."""
    units, taken = strike(arena.state.units, hits, arena.tables)
    arena.state = arena.state._replace(units=units)
    return taken[0]


def test_damage_is_reported_as_a_fraction_of_the_full_hit_points() -> None:
    arena = flat_arena()
    taken = apply_hits(arena, hits_on(arena, {(0, 1): 30.0}))
    assert unit_field(arena, "hit_points", 1) == 120
    assert taken[0, 1] == pytest.approx(0.2)
    assert unit_field(arena, "harm", 0) == [0, 200]  # remembered for ten seconds
    assert taken.sum() == pytest.approx(0.2)


def test_damage_is_limited_to_the_hit_points_left_and_shared_among_attackers() -> None:
    arena = flat_arena("medium", "medium")
    put(arena, 2, hit_points=15.0)
    taken = apply_hits(arena, hits_on(arena, {(0, 2): 40.0, (1, 2): 20.0}))
    assert unit_field(arena, "hit_points", 2) == 0
    assert taken[:, 2].tolist() == pytest.approx([15 / 150 * 2 / 3, 15 / 150 / 3, 0, 0])


def test_dead_units_take_no_damage() -> None:
    arena = flat_arena()
    put(arena, 1, hit_points=0.0, stability=50.0)
    taken = apply_hits(arena, hits_on(arena, {(0, 1): 40.0}, heat=10.0, stability=20.0))
    assert not taken.any()
    assert unit_field(arena, "heat", 1) == 0
    assert unit_field(arena, "stability", 1) == 50


def test_two_units_kill_each_other_in_one_tick() -> None:
    arena = flat_arena()
    apply_hits(arena, hits_on(arena, {(0, 1): 500.0, (1, 0): 500.0}))
    assert not arena.state.units.is_alive.any()


def test_legs_and_stability_break_and_do_not_go_below_zero() -> None:
    arena = flat_arena()
    apply_hits(arena, hits_on(arena, legs=30.0, stability=60.0))
    assert (unit_field(arena, "legs", 1), unit_field(arena, "stability", 1)) == (45, 40)
    apply_hits(arena, hits_on(arena, legs=80.0, stability=60.0))
    assert (unit_field(arena, "legs", 1), unit_field(arena, "stability", 1)) == (0, 0)
    assert unit_field(arena, "hit_points", 1) == 150


def test_the_longer_of_two_suppressions_and_of_two_paints_counts() -> None:
    arena = flat_arena()
    put(arena, 1, suppressed=10, painted=60)
    apply_hits(arena, hits_on(arena, suppressed=24, painted=20))
    assert (unit_field(arena, "suppressed", 1), unit_field(arena, "painted", 1)) == (24, 60)


def test_weapons_can_add_heat_besides_damage() -> None:
    arena = flat_arena()
    apply_hits(arena, hits_on(arena, heat=15.0))
    assert unit_field(arena, "heat", 1) == 15


def test_hits_of_one_tick_add_up() -> None:
    arena = flat_arena()
    first = hits_on(arena, {(0, 1): 10.0}, legs=1.0, stability=2.0, heat=3.0, suppressed=24, painted=5)
    second = hits_on(arena, {(0, 1): 5.0}, legs=1.0, stability=2.0, heat=3.0, suppressed=10, painted=100)
    both = together(first, second)
    assert both.damage[0, 0, 1] == 15
    assert [float(part[0, 1]) for part in both[1:]] == [2, 4, 6, 24, 100]


def test_one_hot_marks_the_index() -> None:
    assert one_hot(torch.tensor([2, 0]), 3).tolist() == [[False, False, True], [True, False, False]]
