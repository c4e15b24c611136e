"""Maps of the arena: symmetric, connected, a function of their seed alone, and true to their landscape."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch import Tensor

from esper.arena.maps import MapBatch, _with_ways, are_connected, corner_side, generate_maps, spawn_points
from esper.arena.maps_walk import floor_height, has_a_wide_way
from esper.arena.specs import CLIMB_M, PHYSICS, Material
from esper.arena.terrain import BUILDERS, LANDSCAPES, HeightMap
from esper.arena.terrain_chance import Chance, wave

FAR_SEEDS = [0, 1, 2, 3, 17, -5, 2**62 + 1, 2**63 - 1]


def has_way_by_hand(maps: MapBatch, which: int) -> bool:
    """The reference: one queue, one column at a time."""
    size = maps.height.shape[1]
    height, material = maps.height[which].tolist(), maps.material[which].tolist()

    def floor(i: int, j: int) -> float:
        return 0.0 if material[i][j] == Material.FOLIAGE else height[i][j]

    def reached(corner: int) -> set[tuple[int, int]]:
        if material[corner][corner] == Material.LAVA:
            return set()
        seen = {(corner, corner)}
        queue = deque(seen)
        while queue:
            i, j = queue.popleft()
            for near in ((i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)):
                is_inside = 0 <= near[0] < size and 0 <= near[1] < size
                if (
                    is_inside
                    and near not in seen
                    and material[near[0]][near[1]] != Material.LAVA
                    and abs(floor(*near) - floor(i, j)) <= CLIMB_M
                ):
                    seen.add(near)
                    queue.append(near)
        return seen

    middle = {(i, j) for i in (size // 2 - 1, size // 2) for j in (size // 2 - 1, size // 2)}
    return bool(reached(0) & reached(size - 1) & middle)


def centred(size: int) -> tuple[Tensor, Tensor]:
    along = torch.arange(size) + 0.5 - size / 2
    return along[:, None], along[None, :]


def shares(condition: Tensor) -> Tensor:
    """[M] on what share of each map's columns it holds."""
    return condition.float().flatten(1).mean(1)


@pytest.fixture(scope="module")
def by_landscape() -> dict[str, MapBatch]:
    return {name: generate_maps(range(30), landscapes=(name,)) for name in LANDSCAPES}


@pytest.mark.slow
@pytest.mark.parametrize("size", [16, 30, 64])
def test_the_half_turn_leaves_every_map_exactly_as_it_is(size: int) -> None:
    maps = generate_maps(range(25), size=size)
    assert torch.equal(maps.height, maps.height.flip(1, 2))
    assert torch.equal(maps.material, maps.material.flip(1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("size", [16, 22, 64])
@pytest.mark.parametrize("name", LANDSCAPES)
def test_both_teams_reach_the_zone_on_foot_and_side_by_side(name: str, size: int) -> None:
    maps = generate_maps(range(24), size=size, landscapes=(name,))
    assert are_connected(maps).all()
    assert has_a_wide_way(maps.height, maps.material).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", LANDSCAPES)
def test_hundreds_of_maps_of_every_landscape_are_connected(name: str) -> None:
    assert are_connected(generate_maps(range(1000, 1200), landscapes=(name,))).all()
    large = generate_maps(range(2000, 2016), size=128, landscapes=(name,))
    assert are_connected(large).all()
    assert torch.equal(large.height, large.height.flip(1, 2))


@pytest.mark.slow
def test_the_batched_flood_fill_equals_one_column_at_a_time() -> None:
    made = generate_maps(range(10), size=32)
    # Unmended noise, so that both answers occur: about half of these are cut off.
    chance = Chance(torch.arange(60), size=16)
    height = (chance.uniform("heights", torch.arange(256).reshape(16, 16)) * 3.4).round()
    material = torch.where(chance.uniform("lava", torch.arange(256).reshape(16, 16)) < 0.05, Material.LAVA, Material.OPEN).to(torch.int8)
    material = torch.where(chance.uniform("trees", torch.arange(256).reshape(16, 16)) < 0.05, Material.FOLIAGE, material).to(torch.int8)
    noise = MapBatch(height, material, torch.full((60,), 2.0), torch.zeros(60, dtype=torch.int64))
    for maps in (made, noise):
        assert are_connected(maps).tolist() == [has_way_by_hand(maps, which) for which in range(len(maps.height))]
    assert 5 < are_connected(noise).sum() < 55


@pytest.mark.slow
def test_a_winding_way_is_found_and_a_wall_across_it_is_detected() -> None:
    size = 32
    height = torch.zeros(1, size, size)
    for number, row in enumerate(range(1, size - 1, 2)):  # walls with a gap at alternating ends
        height[0, row] = 5.0
        height[0, row, -1 if number % 2 else 0] = 0.0
    maps = MapBatch(height, torch.zeros(1, size, size, dtype=torch.int8), torch.tensor([4.0]), torch.zeros(1, dtype=torch.int64))
    assert are_connected(maps).item()
    maps.height[0, 5] = 1.5  # a step too high
    assert not are_connected(maps).item()
    maps.height[0, 5] = 1.0  # and one that is climbed
    assert are_connected(maps).item()
    maps.material[0, 6] = Material.LAVA
    assert not are_connected(maps).item()


def test_a_team_walled_in_on_one_side_is_detected() -> None:
    maps = generate_maps([1], size=32, landscapes=("forest",))
    maps.height[0, 20] = 9.0
    maps.material[0, 20] = Material.REINFORCED
    assert not are_connected(maps).item()


@pytest.mark.slow
@pytest.mark.parametrize("size", [16, 34, 64])
def test_a_way_is_opened_through_solid_rock(size: int) -> None:
    shape = (12, size, size)
    height_map = HeightMap(torch.full(shape, 9.0), torch.full(shape, Material.REINFORCED, dtype=torch.int8))
    side = corner_side(size)
    height_map.height[:, :side, :side] = height_map.height[:, -side:, -side:] = 0.0
    height_map.height[:, size // 2 - 1 : size // 2 + 1, size // 2 - 1 : size // 2 + 1] = 0.0
    assert not has_a_wide_way(*height_map).any()
    opened = _with_ways(height_map, Chance(torch.arange(12), size=size))
    assert has_a_wide_way(*opened).all()
    assert shares(opened.height == 0).max() < 0.6  # a way, and not a clearing
    assert torch.equal(opened.height, opened.height.flip(1, 2))


@pytest.mark.slow
def test_connected_maps_are_not_changed_by_the_repair() -> None:
    maps = generate_maps(range(20))
    again = _with_ways(HeightMap(maps.height, maps.material), Chance(torch.arange(20), size=64))
    assert torch.equal(again.height, maps.height)


@pytest.mark.slow
@pytest.mark.parametrize("size", [16, 64])
def test_a_seeds_map_does_not_depend_on_the_others_in_the_batch(size: int) -> None:
    together = generate_maps(FAR_SEEDS * 2 + list(range(100, 117)), size=size)
    for which, seed in list(enumerate(FAR_SEEDS))[::2]:
        alone = generate_maps([seed], size=size)
        for whole, part in zip(together, alone, strict=True):
            assert torch.equal(whole[which], part[0])
            assert torch.equal(whole[which + len(FAR_SEEDS)], part[0])


@pytest.mark.slow
def test_maps_are_made_on_the_cpu_whatever_the_defaults_are() -> None:
    plain = generate_maps([5, 6, 7, 8], size=32)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            other = generate_maps([5, 6, 7, 8], size=32)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(plain, other, strict=True))


@pytest.mark.slow
def test_the_same_seeds_give_the_same_maps_and_no_global_generator_is_drawn_from() -> None:
    state = torch.get_rng_state()
    first = generate_maps(FAR_SEEDS)
    torch.rand(3)
    second = generate_maps(torch.tensor(FAR_SEEDS))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    torch.set_rng_state(state)
    generate_maps([3])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
@pytest.mark.parametrize("name", LANDSCAPES)
def test_different_seeds_give_different_maps(name: str, by_landscape: dict[str, MapBatch]) -> None:
    maps = by_landscape[name]
    assert len({tuple(height.flatten().tolist()) for height in maps.height}) == len(maps.height)


@pytest.mark.slow
def test_exactly_the_requested_landscapes_are_drawn() -> None:
    assert set(BUILDERS) == set(LANDSCAPES)
    drawn = generate_maps(range(300), size=16).landscape
    assert drawn.bincount(minlength=len(LANDSCAPES)).min() > 30
    two = generate_maps(range(60), size=16, landscapes=("ruins", "forest")).landscape
    assert set(two.tolist()) == {LANDSCAPES.index("ruins"), LANDSCAPES.index("forest")}


@pytest.mark.parametrize("name", LANDSCAPES)
def test_most_of_a_map_is_walked_on_but_not_all_of_it_is_bare(name: str, by_landscape: dict[str, MapBatch]) -> None:
    maps = by_landscape[name]
    is_low = (floor_height(maps.height, maps.material) <= CLIMB_M) & (maps.material != Material.LAVA)
    assert shares(is_low).min() > 0.5
    hides = (maps.height >= PHYSICS.tall_m) & (maps.material != Material.GLASS)
    assert shares(hides).min() > 0.05
    assert shares(hides).max() < 0.65


@pytest.mark.parametrize("name", LANDSCAPES)
def test_distant_columns_rarely_see_each_other_and_near_ones_often_do(name: str, by_landscape: dict[str, MapBatch]) -> None:
    maps = by_landscape[name]
    size = maps.height.shape[1]
    tops = maps.height.masked_fill(maps.material == Material.GLASS, 0.0)
    generator = torch.Generator().manual_seed(5)
    starts, ends = torch.rand(2, len(tops), 800, 2, generator=generator) * size
    which = torch.arange(len(tops))[:, None]

    def at(grid: Tensor, points: Tensor) -> Tensor:
        return grid[which, points[..., 0].long().clamp(0, size - 1), points[..., 1].long().clamp(0, size - 1)]

    is_low = (at(tops, starts) <= 1) & (at(tops, ends) <= 1)
    highest = torch.stack([at(tops, starts + (ends - starts) * share) for share in torch.linspace(0, 1, 130)]).amax(0)
    distance = (starts - ends).norm(dim=-1)
    is_clear = highest < PHYSICS.eye_m
    far, near = is_low & (distance > 25), is_low & (distance < 8) & (distance > 2)
    assert (is_clear & far).sum() < 0.3 * far.sum()
    assert (is_clear & near).sum() > 0.3 * near.sum()


@pytest.mark.slow
@pytest.mark.parametrize("size", [16, 24, 64])
def test_corners_are_flat_and_the_zone_is_mostly_walkable_with_a_little_cover(size: int) -> None:
    maps = generate_maps(range(30), size=size)
    side = corner_side(size)
    assert (maps.height[:, :side, :side] == 0).all()
    assert (maps.material[:, :side, :side] == Material.OPEN).all()
    low, high = min(4.0, size / 6), min(11.0, size / 6)
    assert ((maps.zone_radius >= low - 1e-5) & (maps.zone_radius <= high + 1e-5)).all()
    x, y = centred(size)
    is_zone = x**2 + y**2 <= maps.zone_radius[:, None, None] ** 2
    is_cover = is_zone & (maps.height > CLIMB_M)
    assert not (is_zone & (maps.material == Material.LAVA)).any()
    assert (is_cover.flatten(1).sum(1) <= 0.35 * is_zone.flatten(1).sum(1)).all()
    assert is_cover.sum() > 0.02 * is_zone.sum()
    middle = slice(size // 2 - 1, size // 2 + 1)
    assert (maps.height[:, middle, middle] == 0).all()


def test_every_landscape_has_what_its_name_promises(by_landscape: dict[str, MapBatch]) -> None:
    def share(name: str, material: Material, *, above: float = -1.0) -> Tensor:
        maps = by_landscape[name]
        return shares((maps.material == material) & (maps.height > above))

    assert (share("city", Material.SOLID, above=1.5) + share("city", Material.REINFORCED, above=1.5)).min() > 0.08
    assert (share("city", Material.GLASS) > 0).float().mean() > 0.9
    houses = by_landscape["city"].material == Material.REINFORCED
    assert by_landscape["city"].height[houses].min() == 2
    assert by_landscape["city"].height[houses].max() == 8
    assert share("forest", Material.FOLIAGE, above=2.5).min() > 0.08
    assert (share("forest", Material.OPEN, above=0.0) > 0.01).float().mean() > 0.9
    assert share("river", Material.WATER).min() > 0.03
    assert share("ridges", Material.REINFORCED, above=2.5).min() > 0.02
    assert share("ridges", Material.OPEN, above=0.0).min() > 0.02  # ramps
    assert (share("ridges", Material.LAVA) > 0.003).float().mean() > 0.9
    assert 5 < by_landscape["ridges"].height.max() <= 6
    assert share("ruins", Material.SOLID, above=1.5).min() > 0.05
    assert (share("ruins", Material.SOLID) - share("ruins", Material.SOLID, above=1.0)).min() > 0.02  # rubble
    assert share("ruins", Material.FOLIAGE).min() > 0.005


def test_materials_have_heights_that_the_rules_can_use(by_landscape: dict[str, MapBatch]) -> None:
    for maps in by_landscape.values():
        assert maps.height.dtype == torch.float32
        assert maps.material.dtype == torch.int8
        is_liquid = (maps.material == Material.WATER) | (maps.material == Material.LAVA)
        assert (maps.height[is_liquid] == 0).all()
        assert (maps.height[maps.material == Material.FOLIAGE] > 0).all()
        assert torch.equal(maps.height * 2, (maps.height * 2).round())
        assert maps.height.min() >= 0
        assert maps.height.max() <= 8 < PHYSICS.ceiling_m


def test_a_river_parts_the_corners_and_is_crossed_by_bridges(by_landscape: dict[str, MapBatch]) -> None:
    is_water = by_landscape["river"].material == Material.WATER
    diagonal = is_water | is_water.roll(1, 1) | is_water.roll(-1, 1)
    crosses = torch.stack([diagonal.diagonal(offset, 1, 2).any(1) for offset in range(-20, 21, 5)])
    assert (crosses.float().mean(0) > 0.5).all()  # most straight ways from side to side get wet
    assert not crosses.all()  # and some do not


@pytest.mark.parametrize(("team_size", "size"), [(1, 16), (5, 16), (9, 16), (5, 64), (16, 64), (25, 128)])
def test_units_start_apart_in_opposite_corners(team_size: int, size: int) -> None:
    points = spawn_points(team_size, size=size)
    assert points.shape == (2, team_size, 2)
    assert points.dtype == torch.float32
    assert torch.equal(points[1], -points[0])
    assert (points[0] - PHYSICS.radius_m >= -size / 2).all()
    assert (points[0] + PHYSICS.radius_m <= corner_side(size) - size / 2).all()
    if team_size > 1:
        assert torch.pdist(points[0]).min() >= 2
    from_centre = points[0].norm(dim=-1)
    assert from_centre[0] == from_centre.min()


def test_a_map_too_small_for_the_teams_is_refused_with_what_to_do() -> None:
    with pytest.raises(
        ValueError, match=r"size 12 has room for 4 units, not for a team of 10; use a size of at least 22, or smaller teams"
    ):
        spawn_points(10, size=12)
    assert spawn_points(10, size=22).shape == (2, 10, 2)
    with pytest.raises(ValueError, match=r"size 64 .* team of 26; no map has room for more than 25"):
        spawn_points(26, size=64)
    with pytest.raises(ValueError, match=r"at least one unit; got team_size=0"):
        spawn_points(0, size=64)
    with pytest.raises(ValueError, match=r"even number of columns from 16 to 128.*got 33"):
        spawn_points(2, size=33)


@pytest.mark.parametrize("size", [14, 15, 63, 130, 0, -64])
def test_an_impossible_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=rf"even number of columns from 16 to 128, .* got {size}$"):
        generate_maps([1], size=size)


def test_unknown_landscapes_and_odd_seeds_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no landscape is named 'forrest'; there are city, .*; did you mean 'forest'\?"):
        generate_maps([1], landscapes=("city", "forrest"))
    with pytest.raises(ValueError, match="at least one landscape"):
        generate_maps([1], landscapes=())
    with pytest.raises(ValueError, match="at least one seed"):
        generate_maps([])
    with pytest.raises(ValueError, match=r"torch.float32 of shape \[2\]"):
        generate_maps(torch.tensor([1.0, 2.0]))
    with pytest.raises(ValueError, match=r"must fit into 64 bits with its sign; got 9223372036854775808"):
        generate_maps([1, 2**63])
    with pytest.raises(TypeError, match="float"):
        generate_maps([1.5])  # type: ignore[list-item]


def test_chance_is_uniform_and_labels_and_places_are_independent() -> None:
    chance = Chance(torch.arange(2000), size=16)
    columns = chance.uniform("a", torch.arange(64))
    assert columns.min() >= 0
    assert columns.max() < 1
    assert torch.allclose(columns.mean(0), torch.tensor(0.5), atol=0.03)
    assert torch.allclose(columns.mean(1), torch.tensor(0.5), atol=0.2)
    correlations = torch.corrcoef(torch.stack([*columns.T[:8], chance.uniform("b", 0), chance.uniform("b", 1)])).fill_diagonal_(0)
    assert correlations.abs().max() < 0.1
    assert set(chance.whole("c", low=2, high=4).tolist()) == {2, 3, 4}


def test_the_parabolic_wave_is_odd_and_close_to_a_sine() -> None:
    x = torch.linspace(-5, 5, 401)
    assert torch.allclose(wave(x), -wave(-x), atol=1e-5)
    assert (wave(x) - torch.sin(torch.pi * x)).abs().max() < 0.06
