"""Line of sight, compared with an exact reference in fractions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from esper.arena.sight import TOLERANCE_M, lines_are_clear

FAR = 1000.0
Point = Sequence[Fraction]


def is_clear_exactly(tops: Tensor, eye: Point, aim: Point, *, reach_m: float = FAR) -> bool:
    """A piece of a line between neighbouring planes lies in one column, or on the edge of two or four: the lowest of them blocks it."""
    side = len(tops)
    steps = [end - start for start, end in zip(eye, aim, strict=True)]
    if sum(step * step for step in steps) > Fraction(reach_m) ** 2:
        return False

    def at(t: Fraction) -> list[Fraction]:
        return [start + t * step for start, step in zip(eye, steps, strict=True)]

    planes = [Fraction(2 * number - side, 2) for number in range(side + 1)]
    crossings = {(plane - eye[axis]) / steps[axis] for axis in (0, 1) if steps[axis] for plane in planes}
    cuts = sorted({Fraction(0), Fraction(1)} | {t for t in crossings if 0 < t < 1})
    for t, next_t in itertools.pairwise(cuts):
        x, y, _ = at((t + next_t) / 2)
        columns = itertools.product(_touched(x, side), _touched(y, side))
        if min(at(t)[2], at(next_t)[2]) < min(Fraction(tops[i][j].item()) for i, j in columns):
            return False
    return True


def _touched(place: Fraction, side: int) -> list[int]:
    """The columns along one axis whose closed footprints hold this place."""
    return [i for i in range(side) if i <= place + Fraction(side, 2) <= i + 1]


def exactly(tops: Tensor, eyes: Tensor, aims: Tensor, *, reach_m: float = FAR, shift: Point = (Fraction(0),) * 3) -> Tensor:
    def points(ends: Tensor) -> list[list[Fraction]]:
        return [[Fraction(value) + off for value, off in zip(point, shift, strict=True)] for point in ends.tolist()]

    answers = [
        [is_clear_exactly(top, eye, aim, reach_m=reach_m) for eye, aim in zip(points(some_eyes), points(some_aims), strict=True)]
        for top, some_eyes, some_aims in zip(tops, eyes, aims, strict=True)
    ]
    return torch.tensor(answers)


def random_world(seed: int, *, side: int, battles: int = 3, lines: int = 60, per_metre: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Heights and ends, on a lattice of so many points per metre where one is asked for: it is full of ties."""
    generator = torch.Generator().manual_seed(seed)

    tops = 4 * torch.rand(battles, side, side, generator=generator) ** 3
    ends = (torch.rand(2, battles, lines, 3, generator=generator) - 0.5) * torch.tensor([side, side, 4.0]) + torch.tensor([0.0, 0.0, 2.0])
    if per_metre is not None:
        tops, ends = (tops * per_metre).round() / per_metre, (ends * per_metre).round() / per_metre
        ends[..., :2].clamp_(-side / 2, side / 2)
    return tops, ends[0], ends[1]


def sees(tops: Tensor, eye: Sequence[float], aim: Sequence[float], *, reach_m: float = FAR) -> bool:
    """One line of one battle, which must look the same from its other end."""
    there, back = (
        lines_are_clear(tops[None], torch.tensor([[one]]), torch.tensor([[other]]), reach_m=reach_m)
        for one, other in ((eye, aim), (aim, eye))
    )
    assert there.shape == (1, 1)
    assert there.dtype == torch.bool
    assert there.equal(back)
    return bool(there.item())


def flat(side: int = 8, **columns: float) -> Tensor:
    """Ground of height 0 with towers: `c34=2` is a tower of 2 in column (3, 4)."""
    tops = torch.zeros(side, side)
    for name, top in columns.items():
        tops[int(name[1]), int(name[2])] = top
    return tops


@pytest.mark.slow
@pytest.mark.parametrize("side", [8, 11, 16])
@pytest.mark.parametrize("per_metre", [1, 2, 4, 8])
def test_lines_on_a_lattice_full_of_ties_equal_the_exact_answer(side: int, per_metre: int):
    world = random_world(side * 10 + per_metre, side=side, per_metre=per_metre)
    assert lines_are_clear(*world, reach_m=FAR).equal(exactly(*world))


@pytest.mark.slow
@pytest.mark.parametrize("side", [8, 9, 12, 16])
def test_lines_anywhere_equal_the_exact_answer_where_rounding_cannot_change_it(side: int):
    tops, eyes, aims = random_world(side, side=side, lines=40)
    world = (tops, eyes * 0.99, aims * 0.99)  # room at the border to be shifted
    signs = [(1, 1, 1), (1, -1, -1), (-1, 1, -1), (-1, -1, 1)]
    answers = torch.stack([exactly(*world, shift=[Fraction(sign, 10_000) for sign in shift]) for shift in signs])
    is_certain = answers.all(0) | ~answers.any(0)
    assert is_certain.float().mean() > 0.97
    assert 0.02 < answers.float().mean() < 0.9
    assert lines_are_clear(*world, reach_m=FAR)[is_certain].equal(answers[0][is_certain])


def lattice_points(side: int) -> st.SearchStrategy[list[float]]:
    places, heights = (st.integers(low, high).map(lambda value: value / 4) for low, high in ((-2 * side, 2 * side), (0, 16)))
    return st.tuples(places, places, heights).map(list)


@pytest.mark.slow
@given(data=st.data(), side=st.integers(2, 12), seed=st.integers(0, 2**32 - 1), reach_m=st.sampled_from([0.5, 1.0, 2.5, 5.0, 7.25, FAR]))
def test_any_line_equals_the_exact_answer_from_both_ends_and_after_a_half_turn(data: st.DataObject, side: int, seed: int, reach_m: float):
    tops = random_world(seed, side=side, battles=1, per_metre=4)[0]
    eyes, aims = (torch.tensor([data.draw(st.lists(lattice_points(side), min_size=4, max_size=4))]) for _ in range(2))
    clear = lines_are_clear(tops, eyes, aims, reach_m=reach_m)
    assert clear.equal(exactly(tops, eyes, aims, reach_m=reach_m))
    assert clear.equal(lines_are_clear(tops, aims, eyes, reach_m=reach_m))
    turn = torch.tensor([-1.0, -1.0, 1.0])
    assert clear.equal(lines_are_clear(tops.flip(1, 2), eyes * turn, aims * turn, reach_m=reach_m))


@pytest.mark.parametrize("are_level", [False, True])
@pytest.mark.parametrize("are_straight", [False, True])
def test_both_ends_and_both_sides_of_the_map_see_the_same_bit_for_bit(are_level: bool, are_straight: bool):
    """Lines that pass a corner as far as the tolerance, where the last bit decides in which column they are."""
    tops, eyes, aims = random_world(5, side=64, battles=16, lines=2000)
    tops = tops.masked_fill(tops < 2.0, 0.0)
    corners = (eyes / 4).round() + torch.tensor([0.0, TOLERANCE_M, 0.0]) * torch.tensor([[1.0], [-1.0]]).repeat(1000, 1)
    arms = aims / 8 * torch.tensor([1.0, 0.0 if are_straight else 1.0, 0.0 if are_level else 1.0])
    eyes, aims = corners - arms * 1.1, corners + arms * 1.3
    clear = lines_are_clear(tops, eyes, aims, reach_m=20.0)
    assert 0.05 < clear.float().mean() < 0.95
    assert clear.equal(lines_are_clear(tops, aims, eyes, reach_m=20.0))
    turn = torch.tensor([-1.0, -1.0, 1.0])
    assert clear.equal(lines_are_clear(tops.flip(1, 2), eyes * turn, aims * turn, reach_m=20.0))


@pytest.mark.parametrize(
    ("eye", "before", "behind"),
    [((-3.5, 0.5), (-0.1, 0.5), (3.5, 0.5)), ((0.5, -3.5), (0.5, -0.1), (0.5, 3.5)), ((-3.5, -3.5), (-0.1, -0.1), (3.5, 3.5))],
    ids=["along x", "along y", "diagonal"],
)
def test_a_wall_hides_points_behind_it_and_not_above_or_before_it(
    eye: tuple[float, float], before: tuple[float, float], behind: tuple[float, float]
):
    wall = flat(c44=1.25)
    assert sees(flat(), (*eye, 1.0), (*behind, 1.0))
    assert not sees(wall, (*eye, 1.0), (*behind, 1.0))
    assert sees(wall, (*eye, 1.25), (*behind, 1.25)), "level with its top"
    assert sees(wall, (*eye, 1.0), (*before, 1.0))


def test_a_falling_line_is_stopped_by_the_far_edge_of_a_roof():
    roof = flat(c44=2.0)  # x from 0 to 1
    assert sees(roof, (-1.0, 0.5, 4.0), (3.0, 0.5, 0.0)), "exactly 2 at x = 1"
    assert not sees(roof, (-1.0, 0.5, 4.0), (2.75, 0.5, 0.0))


def test_a_line_through_a_corner_passes_between_two_towers_and_not_through_one():
    eye, aim = (-2.5, -2.5, 1.0), (2.5, 2.5, 1.0)  # through columns (3, 3) and (4, 4), touching (3, 4) and (4, 3)
    assert sees(flat(c34=5.0, c43=5.0), eye, aim)
    assert not sees(flat(c33=5.0), eye, aim)
    assert not sees(flat(c44=5.0), eye, aim)


@pytest.mark.slow
@pytest.mark.parametrize("start", [-20.1, -13.37, -7.77, -3.3])
@pytest.mark.parametrize("end", [20.7, 13.3, 9.99])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_diagonal_whose_ends_are_rounded_meets_all_columns_on_it_and_none_beside_it(start: float, end: float, sign: float):
    tops = torch.full((64, 64), 5.0)
    index = torch.arange(64)
    tops[index, index if sign > 0 else 63 - index] = 0.0
    eye, aim = (start, sign * start, 1.0), (end, sign * end, 1.0)
    assert sees(tops, eye, aim)
    for number in range(math.floor(start) + 32, math.floor(end) + 33):
        tower = torch.zeros(64, 64)
        tower[number, number if sign > 0 else 63 - number] = 5.0
        assert not sees(tower, eye, aim)


@pytest.mark.parametrize("is_along_x", [True, False])
def test_along_an_edge_the_lower_of_two_columns_blocks(is_along_x: bool):
    def sees_along(tops: Tensor, across: float) -> bool:
        ends = ((-2.5, across, 1.0), (2.5, across, 1.0))
        return sees(tops, *ends) if is_along_x else sees(tops.T, *((y, x, z) for x, y, z in ends))

    assert sees_along(flat(c43=5.0), 0.0)
    assert sees_along(flat(c44=5.0), 0.0)
    assert sees_along(flat(c43=5.0, c54=5.0), 0.0)
    assert not sees_along(flat(c43=5.0, c44=1.5), 0.0)
    assert not sees_along(flat(c40=5.0), -4.0), "along the border"
    assert not sees_along(flat(c47=5.0), 4.0), "along the other border"


def test_a_vertical_line_is_blocked_by_the_lowest_column_that_it_touches():
    assert not sees(flat(c44=2.0), (0.5, 0.5, 1.0), (0.5, 0.5, 5.0))
    assert sees(flat(c44=2.0), (0.5, 0.5, 2.0), (0.5, 0.5, 5.0))
    assert sees(flat(c44=2.0, c43=2.0, c34=2.0), (0.0, 0.0, 1.0), (0.0, 0.0, 5.0))
    assert not sees(flat(c44=2.0, c43=2.0, c34=2.0, c33=1.5), (0.0, 0.0, 1.0), (0.0, 0.0, 5.0))
    assert sees(flat(c44=2.0), (0.0, 0.5, 1.0), (0.0, 0.5, 5.0))
    assert not sees(flat(c44=2.0, c34=1.5), (0.0, 0.5, 1.0), (0.0, 0.5, 5.0))
    assert not sees(flat(c77=2.0), (4.0, 4.0, 1.0), (4.0, 4.0, 5.0)), "in the map's corner"


def test_a_point_sees_itself_unless_it_lies_inside_a_column():
    for place in ((0.5, 0.5), (0.0, 0.0), (-4.0, 4.0), (0.3, -1.7)):
        assert sees(torch.full((8, 8), 1.0), (*place, 1.0), (*place, 1.0), reach_m=0.0)
        assert not sees(torch.full((8, 8), 1.5), (*place, 1.0), (*place, 1.0), reach_m=0.0)


def test_a_unit_in_foliage_neither_sees_nor_is_seen():
    assert not sees(flat(c11=3.0), (-2.5, -2.5, 1.5), (2.5, 1.5, 1.5))
    assert sees(flat(c11=3.0), (-2.5, -2.5, 3.5), (2.5, 1.5, 3.5))


def test_a_line_ends_at_the_reach_and_its_height_counts():
    assert sees(flat(16), (0.0, 0.0, 1.0), (3.0, 4.0, 1.0), reach_m=5.0)
    assert not sees(flat(16), (0.0, 0.0, 1.0), (3.0, 4.0, 1.0), reach_m=4.99)
    assert not sees(flat(16), (0.0, 0.0, 1.0), (3.0, 4.0, 2.0), reach_m=5.0)
    assert sees(flat(16), (-8.0, -8.0, 1.0), (8.0, 8.0, 1.0), reach_m=math.inf)


@pytest.mark.parametrize("reach_m", [1.0, 2.5, 7.0])
def test_no_column_is_missed_at_the_end_of_the_reach(reach_m: float):
    for start in (-3.75, -3.5, -3.25, -3.0):
        end = start + reach_m
        for number in range(math.floor(start) + 4, math.ceil(end) + 4):
            assert not sees(flat(**{f"c{number}4": 5.0}), (start, 0.5, 1.0), (end, 0.5, 1.0), reach_m=reach_m)


def test_line_ends_outside_the_map_are_moved_to_the_border():
    tops, eyes, aims = random_world(3, side=8, per_metre=4)
    beyond = (eyes * 2, aims * 2)
    border = tuple(torch.cat((ends[..., :2].clamp(-4, 4), ends[..., 2:]), -1) for ends in beyond)
    assert lines_are_clear(tops, *beyond, reach_m=FAR).equal(lines_are_clear(tops, *border, reach_m=FAR))


def test_almost_vertical_lines_behave_like_vertical_ones():
    for step in (1e-3, 1e-6, 1e-12, 1e-30, 1e-44):
        assert sees(flat(c44=2.0), (0.5, 0.5, 2.0), (0.5 + step, 0.5, 5.0))
        assert not sees(flat(c44=2.0), (0.5, 0.5, 1.5), (0.5, 0.5 + step, 5.0))
        assert sees(flat(c44=2.0, c33=2.0, c34=2.0, c43=2.0), (-step, step, 2.0), (step, -step, 5.0))


@pytest.mark.slow  # torch loads its decompositions for it
def test_no_operation_depends_on_the_data():
    """Tensors on the device `meta` have shapes and no values: whatever reads one, or makes a shape of one, fails."""
    tops, ends = torch.zeros(4, 16, 16, device="meta"), torch.zeros(4, 5, 3, device="meta")
    assert lines_are_clear(tops, ends, ends, reach_m=10.0).shape == (4, 5)


def test_an_empty_set_of_lines_gives_an_empty_result():
    assert lines_are_clear(torch.zeros(3, 8, 8), torch.zeros(3, 0, 3), torch.zeros(3, 0, 3), reach_m=10.0).shape == (3, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_cuda_graph_of_the_sight_test_equals_the_cpu():
    worlds = [random_world(seed, side=16, per_metre=4) for seed in (1, 2)]
    inputs = [tensor.cuda() for tensor in worlds[0]]
    lines_are_clear(*inputs, reach_m=10.0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        clear = lines_are_clear(*inputs, reach_m=10.0)
    for world in worlds:
        for target, source in zip(inputs, world, strict=True):
            target.copy_(source)
        graph.replay()
        assert clear.cpu().equal(lines_are_clear(*world, reach_m=10.0))
