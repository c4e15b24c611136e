"""Line of sight, compared with an exact reference in fractions. Every line is a battle of two units whose eyes are its ends.

Shapes: M = maps, S = side of a map, L = lines on a map.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from esper.arena.arena import Arena
from esper.arena.native import layout as at
from esper.arena.native.simulation import LOOK
from esper.arena.specs import Material
from tests.arena.worlds import flat_arena

FAR = 1000.0
SIDE = 16  # columns on a side of the smallest map
TOLERANCE_M = 2.0**-14  # a line must enter a column this deep to be blocked
HALF_TURN = torch.tensor([-1.0, -1.0, 1.0])
Point = Sequence[Fraction]
Place = tuple[float, ...]


# The simulation


@functools.cache
def arena_of(maps: int, lines: int, side: int) -> Arena:
    """Return battles of one unit a side, the same number of them on every map. The eyes of units are at their feet."""
    arena = flat_arena(size=side, maps=maps, battles=maps * lines)
    arena.grids.material.fill_(int(Material.SOLID))
    arena.simulation.rules["eye"] = 0.0
    arena.simulation.status[at.MAP] = torch.arange(maps).repeat_interleave(lines)
    return arena


def lines_are_clear(tops: Tensor, eyes: Tensor, aims: Tensor, *, reach_m: float = FAR) -> Tensor:
    """Return [M, L] bool: whether units at `eyes` see enemies at `aims` [M, L, 3] on maps with `tops` [M, S, S]."""
    arena = arena_of(len(tops), eyes.shape[1], tops.shape[1])
    simulation = arena.simulation
    arena.grids.height.copy_(tops)
    simulation.set_maps(arena.grids)
    simulation.rules["sight"] = reach_m
    for unit, ends in enumerate((eyes, aims)):
        simulation.unit[at.X : at.Z + 1, :, unit] = ends.reshape(-1, 3).T
    simulation.run(LOOK)
    seen = simulation.number[at.SEEN]
    assert seen[:, 0].equal(seen[:, 1]), "sight is mutual"
    return (seen[:, 0] == 1).view(eyes.shape[:2])


def sees(tops: Tensor, eye: Place, aim: Place, *, reach_m: float = FAR) -> bool:
    """Return whether one line is clear. It must be the same from the other end."""
    there, back = (
        lines_are_clear(tops[None], torch.tensor([[one]]), torch.tensor([[other]]), reach_m=reach_m)
        for one, other in ((eye, aim), (aim, eye))
    )
    assert there.equal(back)
    return bool(there)


def towers(*columns: tuple[int, int, float], side: int = SIDE) -> Tensor:
    """Return ground of height 0 with towers: (3, -4, 2.0) is a tower of height 2 from (3, -4) to (4, -3)."""
    tops = torch.zeros(side, side)
    for x, y, top in columns:
        tops[x + side // 2, y + side // 2] = top
    return tops


# The reference


def is_clear_exactly(tops: list[list[Fraction]], eye: Point, aim: Point, *, reach_m: float = FAR) -> bool:
    """A piece of a line between neighbouring planes lies in one column, or on the edge of two or four: the lowest of them blocks it."""
    side = len(tops)
    steps = [end - start for start, end in zip(eye, aim, strict=True)]
    if sum(step * step for step in steps) > Fraction(reach_m) ** 2:
        return False

    def at_share(share: Fraction) -> list[Fraction]:
        return [start + share * step for start, step in zip(eye, steps, strict=True)]

    crossings = {
        (plane - eye[axis]) / steps[axis]
        for axis in (0, 1)
        if steps[axis]
        for plane in range(math.ceil(min(eye[axis], aim[axis])), math.floor(max(eye[axis], aim[axis])) + 1)
    }
    cuts = sorted({Fraction(0), Fraction(1)} | {share for share in crossings if 0 < share < 1})
    for share, next_share in itertools.pairwise(cuts):
        x, y, _ = at_share((share + next_share) / 2)
        columns = itertools.product(_touched(x, side), _touched(y, side))
        if min(at_share(share)[2], at_share(next_share)[2]) < min(tops[i][j] for i, j in columns):
            return False
    return True


def _touched(place: Fraction, side: int) -> list[int]:
    """Return the columns along one axis that contain this place; on the edge between two columns, both."""
    column = math.floor(place) + side // 2
    touched = [column] if place.denominator > 1 else [column - 1, column]
    return [number for number in touched if 0 <= number < side]


def exactly(tops: Tensor, eyes: Tensor, aims: Tensor, *, reach_m: float = FAR, shift: Point = (Fraction(0),) * 3) -> Tensor:
    """Return the exact answers [M, L]. All lines are moved by `shift`."""

    def points(ends: Tensor) -> list[list[Fraction]]:
        return [[Fraction(value) + off for value, off in zip(point, shift, strict=True)] for point in ends.tolist()]

    answers = []
    for heights, some_eyes, some_aims in zip(tops, eyes, aims, strict=True):
        fractions = [[Fraction(value) for value in row] for row in heights.tolist()]
        lines = zip(points(some_eyes), points(some_aims), strict=True)
        answers.append([is_clear_exactly(fractions, eye, aim, reach_m=reach_m) for eye, aim in lines])
    return torch.tensor(answers)


def random_lines(seed: int, *, side: int = SIDE, maps: int = 3, lines: int = 60, per_metre: int | None = None) -> tuple[Tensor, ...]:
    """Return heights and ends. With `per_metre`, they are on a lattice of so many points per metre, which is full of ties."""
    generator = torch.Generator().manual_seed(seed)
    tops = (4 * torch.rand(maps, side, side, generator=generator) ** 3 / at.HEIGHT_STEP).round() * at.HEIGHT_STEP
    ends = (torch.rand(2, maps, lines, 3, generator=generator) - 0.5) * torch.tensor([side, side, 4.0]) + torch.tensor([0.0, 0.0, 2.0])
    if per_metre is not None:
        tops, ends = (tops * per_metre).round() / per_metre, (ends * per_metre).round() / per_metre
    return tops, ends[0], ends[1]


# Any line


@pytest.mark.slow
@pytest.mark.parametrize("side", [16, 24])
@pytest.mark.parametrize("per_metre", [1, 2, 4, 8])
def test_lines_on_a_lattice_full_of_ties_equal_the_exact_answer(side: int, per_metre: int) -> None:
    world = random_lines(side * 10 + per_metre, side=side, per_metre=per_metre)
    clear = lines_are_clear(*world)
    assert 0.02 < clear.float().mean() < 0.9
    assert clear.equal(exactly(*world))


@pytest.mark.slow
@pytest.mark.parametrize("side", [16, 24])
def test_lines_anywhere_equal_the_exact_answer_where_rounding_cannot_change_it(side: int) -> None:
    tops, eyes, aims = random_lines(side, side=side, lines=40)
    world = (tops, eyes * 0.99, aims * 0.99)  # room at the border to be shifted
    signs = [(1, 1, 1), (1, -1, -1), (-1, 1, -1), (-1, -1, 1)]
    answers = torch.stack([exactly(*world, shift=[Fraction(sign, 10_000) for sign in shift]) for shift in signs])
    is_certain = answers.all(0) | ~answers.any(0)
    assert is_certain.float().mean() > 0.97
    assert 0.02 < answers.float().mean() < 0.9
    assert lines_are_clear(*world)[is_certain].equal(answers[0][is_certain])


def lattice_points(side: int) -> st.SearchStrategy[list[float]]:
    places, heights = (st.integers(low, high).map(lambda value: value / 4) for low, high in ((-2 * side, 2 * side), (0, 16)))
    return st.tuples(places, places, heights).map(list)


@pytest.mark.slow
@given(data=st.data(), seed=st.integers(0, 2**32 - 1), reach_m=st.sampled_from([0.5, 1.0, 2.5, 5.0, 7.25, FAR]))
def test_any_line_equals_the_exact_answer_from_both_ends_and_after_a_half_turn(data: st.DataObject, seed: int, reach_m: float) -> None:
    tops = random_lines(seed, maps=1, per_metre=4)[0]
    eyes, aims = (torch.tensor([data.draw(st.lists(lattice_points(SIDE), min_size=4, max_size=4))]) for _ in range(2))
    clear = lines_are_clear(tops, eyes, aims, reach_m=reach_m)
    assert clear.equal(exactly(tops, eyes, aims, reach_m=reach_m))
    assert clear.equal(lines_are_clear(tops, aims, eyes, reach_m=reach_m))
    assert clear.equal(lines_are_clear(tops.flip(1, 2), eyes * HALF_TURN, aims * HALF_TURN, reach_m=reach_m))


@pytest.mark.slow
@pytest.mark.parametrize("are_level", [False, True])
@pytest.mark.parametrize("are_straight", [False, True])
def test_both_ends_and_both_sides_of_the_map_see_the_same_bit_for_bit(are_level: bool, are_straight: bool) -> None:
    """The lines pass a corner at the distance of the tolerance, where the last bit decides in which column they are."""
    tops, eyes, aims = random_lines(5, side=64, maps=8, lines=250)
    tops = tops.masked_fill(tops < 2.0, 0.0)
    corners = (eyes / 4).round() + torch.tensor([0.0, TOLERANCE_M, 0.0]) * torch.tensor([[1.0], [-1.0]]).repeat(125, 1)
    arms = aims / 8 * torch.tensor([1.0, 0.0 if are_straight else 1.0, 0.0 if are_level else 1.0])
    eyes, aims = corners - arms * 1.1, corners + arms * 1.3
    clear = lines_are_clear(tops, eyes, aims, reach_m=20.0)
    assert 0.05 < clear.float().mean() < 0.95
    assert clear.equal(lines_are_clear(tops, aims, eyes, reach_m=20.0))
    assert clear.equal(lines_are_clear(tops.flip(1, 2), eyes * HALF_TURN, aims * HALF_TURN, reach_m=20.0))


# Lines by hand


@pytest.mark.parametrize(
    ("eye", "before", "behind"),
    [((-3.5, 0.5), (-0.1, 0.5), (3.5, 0.5)), ((0.5, -3.5), (0.5, -0.1), (0.5, 3.5)), ((-3.5, -3.5), (-0.1, -0.1), (3.5, 3.5))],
    ids=["along x", "along y", "diagonal"],
)
def test_a_wall_hides_points_behind_it_and_not_above_or_before_it(eye: Place, before: Place, behind: Place) -> None:
    wall = towers((0, 0, 1.25))
    assert sees(towers(), (*eye, 1.0), (*behind, 1.0))
    assert not sees(wall, (*eye, 1.0), (*behind, 1.0))
    assert sees(wall, (*eye, 1.25), (*behind, 1.25)), "level with its top"
    assert sees(wall, (*eye, 1.0), (*before, 1.0))


def test_a_falling_line_is_stopped_by_the_far_edge_of_a_roof() -> None:
    roof = towers((0, 0, 2.0))
    assert sees(roof, (-1.0, 0.5, 4.0), (3.0, 0.5, 0.0)), "exactly 2 at x = 1"
    assert not sees(roof, (-1.0, 0.5, 4.0), (2.75, 0.5, 0.0))


def test_a_line_through_a_corner_passes_between_two_towers_and_not_through_one() -> None:
    eye, aim = (-2.5, -2.5, 1.0), (2.5, 2.5, 1.0)
    assert sees(towers((-1, 0, 5.0), (0, -1, 5.0)), eye, aim)
    assert not sees(towers((-1, -1, 5.0)), eye, aim)
    assert not sees(towers((0, 0, 5.0)), eye, aim)


@pytest.mark.parametrize("start", [-20.1, *(pytest.param(start, marks=pytest.mark.slow) for start in (-13.37, -7.77, -3.3))])
@pytest.mark.parametrize("end", [20.7, *(pytest.param(end, marks=pytest.mark.slow) for end in (13.3, 9.99))])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_diagonal_whose_ends_are_rounded_meets_all_columns_on_it_and_none_beside_it(start: float, end: float, sign: float) -> None:
    index = torch.arange(64)
    across = index if sign > 0 else 63 - index
    street = torch.full((64, 64), 5.0)
    street[index, across] = 0.0
    tower = torch.zeros(64, 64, 64)  # one map for each column on the diagonal
    tower[index, index, across] = 5.0
    eye, aim = (torch.tensor([[[place, sign * place, 1.0]]]).expand(65, 1, 3) for place in (start, end))
    clear = lines_are_clear(torch.cat((street[None], tower)), eye, aim)[:, 0]
    is_on_line = (index >= math.floor(start) + 32) & (index <= math.floor(end) + 32)
    assert clear[0]
    assert clear[1:].equal(~is_on_line)


@pytest.mark.parametrize("is_along_x", [True, False])
@pytest.mark.parametrize(
    ("columns", "across", "is_clear"),
    [
        ([(0, -1, 5.0)], 0.0, True),
        ([(0, 0, 5.0)], 0.0, True),
        ([(0, -1, 5.0), (1, 0, 5.0)], 0.0, True),
        ([(0, -1, 5.0), (0, 0, 1.5)], 0.0, False),
        ([(0, -8, 5.0)], -8.0, False),  # along the border
        ([(0, 7, 5.0)], 8.0, False),
    ],
)
def test_along_an_edge_the_lower_of_two_columns_blocks(
    columns: list[tuple[int, int, float]], across: float, is_clear: bool, is_along_x: bool
) -> None:
    tops = towers(*columns)
    if is_along_x:
        assert sees(tops, (-2.5, across, 1.0), (2.5, across, 1.0)) == is_clear
    else:
        assert sees(tops.T, (across, -2.5, 1.0), (across, 2.5, 1.0)) == is_clear


@pytest.mark.parametrize(
    ("columns", "place", "is_clear"),
    [
        ([(0, 0, 2.0)], (0.5, 0.5, 1.0), False),
        ([(0, 0, 2.0)], (0.5, 0.5, 2.0), True),
        ([(0, 0, 2.0), (0, -1, 2.0), (-1, 0, 2.0)], (0.0, 0.0, 1.0), True),
        ([(0, 0, 2.0), (0, -1, 2.0), (-1, 0, 2.0), (-1, -1, 1.5)], (0.0, 0.0, 1.0), False),
        ([(0, 0, 2.0)], (0.0, 0.5, 1.0), True),
        ([(0, 0, 2.0), (-1, 0, 1.5)], (0.0, 0.5, 1.0), False),
        ([(7, 7, 2.0)], (8.0, 8.0, 1.0), False),  # in the corner of the map
    ],
)
def test_a_vertical_line_is_blocked_by_the_lowest_column_that_it_touches(
    columns: list[tuple[int, int, float]], place: Place, is_clear: bool
) -> None:
    assert sees(towers(*columns), place, (*place[:2], 5.0)) == is_clear


@pytest.mark.parametrize("step", [1e-3, 1e-6, 1e-12, 1e-30, 1e-44])
def test_almost_vertical_lines_behave_like_vertical_ones(step: float) -> None:
    assert sees(towers((0, 0, 2.0)), (0.5, 0.5, 2.0), (0.5 + step, 0.5, 5.0))
    assert not sees(towers((0, 0, 2.0)), (0.5, 0.5, 1.5), (0.5, 0.5 + step, 5.0))
    four = towers((0, 0, 2.0), (-1, -1, 2.0), (-1, 0, 2.0), (0, -1, 2.0))
    assert sees(four, (-step, step, 2.0), (step, -step, 5.0))
    assert not sees(four, (-step, step, 1.5), (step, -step, 5.0))


@pytest.mark.parametrize("place", [(0.5, 0.5), (0.0, 0.0), (-8.0, 8.0), (0.3, -1.7)])
def test_a_point_sees_itself_unless_it_lies_inside_a_column(place: Place) -> None:
    point = (*place, 1.0)
    assert sees(torch.full((SIDE, SIDE), 1.0), point, point, reach_m=0.0)
    assert not sees(torch.full((SIDE, SIDE), 1.5), point, point, reach_m=0.0)


def test_the_columns_of_both_ends_block_like_all_others() -> None:
    tower = towers((-3, -3, 3.0))
    assert not sees(tower, (-2.5, -2.5, 1.5), (2.5, 1.5, 1.5))
    assert sees(tower, (-2.5, -2.5, 3.5), (2.5, 1.5, 3.5))


def test_a_line_ends_at_the_reach_and_its_height_counts() -> None:
    eye, aim = (0.0, 0.0, 1.0), (3.0, 4.0, 1.0)
    assert sees(towers(), eye, aim, reach_m=5.0)
    assert not sees(towers(), eye, aim, reach_m=4.99)
    assert not sees(towers(), eye, (3.0, 4.0, 2.0), reach_m=5.0)
    assert sees(towers(), (-8.0, -8.0, 1.0), (8.0, 8.0, 1.0), reach_m=math.inf)


@pytest.mark.parametrize("reach_m", [1.0, 2.5, 7.0])
@pytest.mark.parametrize("start", [-3.75, -3.5, -3.25, -3.0])
def test_no_column_is_missed_at_the_end_of_the_reach(start: float, reach_m: float) -> None:
    end = start + reach_m
    for number in range(math.floor(start), math.ceil(end)):
        assert not sees(towers((number, 0, 5.0)), (start, 0.5, 1.0), (end, 0.5, 1.0), reach_m=reach_m)
