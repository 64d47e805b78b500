"""The tiles of each launch of an all-gather's GEMM, and the places of their rows; the order of a ring's tiles."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_torch import _plan
from overlap_torch import plan as plans
from overlap_torch.plan import Plan, Problem
from overlap_torch.plan.types import MAX_CHUNKS, DType, Kernel, Op
from plan_grids import Grid, parted_plans_and_grids
from tests import _plan_test

settings.register_profile("plan", deadline=None)
settings.load_profile("plan")


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[list[int], int, int, int]:
    """Tiles that arrive for each launch, a cluster's, and the CTAs of launches beside communication and of the last."""
    cluster = draw(st.integers(1, 3))
    counts = draw(st.lists(st.integers(0, 600), min_size=1, max_size=12))
    alone = draw(st.integers(1, 150))
    return [cluster * count for count in counts], cluster, draw(st.integers(1, alone)), alone


@given(arrivals())
def test_gather_launches_take_every_tile_once_and_none_too_early(case) -> None:
    arriving, cluster, _, _ = case
    launches = _plan_test.gather_launches(*case)
    assert len(launches) == len(arriving)
    there = end_before = 0
    for count, (begin, end, _) in zip(arriving, launches, strict=True):
        there += count
        assert begin == end_before <= end <= there
        assert begin % cluster == 0
        end_before = end
    assert end_before == there


def rounds_of(launches: list[tuple[int, int, int]]) -> int:
    return sum(math.ceil((end - begin) / at_once) for begin, end, at_once in launches)


@given(arrivals())
def test_gather_launches_take_all_that_is_there_or_leave_less_than_a_round(case) -> None:
    arriving, cluster, beside, alone = case
    grid = max(beside // cluster, 1) * cluster
    *launches, last = _plan_test.gather_launches(*case)
    there = 0
    for count, (begin, end, at_once) in zip(arriving, launches, strict=False):
        there += count
        assert at_once == grid
        left = there - begin
        assert end - begin in (left, left // grid * grid)
        assert end > begin or left == 0
    assert last[1:] == (sum(arriving), max(alone // cluster, 1) * cluster)


@given(arrivals())
def test_gather_launches_leave_tiles_only_to_save_a_round(case) -> None:
    arriving, cluster, beside, _ = case
    launches = _plan_test.gather_launches(*case)
    grid = max(beside // cluster, 1) * cluster
    # Each computing all that has arrived.
    apart = sum(math.ceil(count / grid) for count in arriving[:-1])
    apart += math.ceil(arriving[-1] / launches[-1][2])
    assert rounds_of(launches) <= apart
    there = 0
    for i, (_, end, _) in enumerate(launches[:-1]):
        there += arriving[i]
        if end < there:  # taking them now, and all after as before, is a round more
            taken, *behind = [there - end + arriving[i + 1], *arriving[i + 2 :]]
            rest = _plan_test.gather_launches([taken, *behind], *case[1:])
            without = _plan_test.gather_launches(arriving[i + 1 :], *case[1:])
            assert rounds_of(rest) < 1 + rounds_of(without)


@given(arrivals())
def test_gather_launches_take_no_more_rounds_than_one_launch(case) -> None:
    """But for those that find less than a round: one more for each. Rounds of one launch: beside communication."""
    arriving, cluster, beside, _ = case
    launches = _plan_test.gather_launches(*case)
    grid = max(beside // cluster, 1) * cluster
    short = sum((end - begin) % grid != 0 for begin, end, _ in launches[:-1])
    assert rounds_of(launches) <= math.ceil(sum(arriving) / grid) + short


def test_gather_launches_of_two_ranks() -> None:
    # 32 x 32 tiles on 132 SMs, of which communication takes 8: four rounds of own rows, then all the rest in four more.
    assert _plan_test.gather_launches([512, 512], 2, 124, 132) == [(0, 496, 124), (496, 1024, 132)]
    # In chunks {1, 3} the own rows' fifth round costs nothing, but what is left of the first chunk's goes into the last
    # launch: four rounds, or one and three.
    chunks = _plan_test.gather_launches([512, 128, 384], 2, 124, 132)
    assert chunks == [(0, 512, 124), (512, 636, 124), (636, 1024, 132)]
    # 16 x 64 tiles, of which communication takes 2 SMs: two rounds now and two later, or one now and three later.
    assert _plan_test.gather_launches([256, 256], 2, 130, 132) == [(0, 256, 130), (256, 512, 132)]
    # An odd grid is of whole clusters; less than a round is taken whole, and nothing is left.
    few = _plan_test.gather_launches([6, 0, 2, 2], 2, 7, 9)
    assert few == [(0, 6, 6), (6, 6, 6), (6, 8, 6), (8, 10, 8)]


@given(parted_plans_and_grids(Op.ALLGATHER_GEMM), st.integers(1, 200))
def test_plan_gather_launches_cover_the_grid(case: tuple[Plan, Grid], sms: int) -> None:
    plan, grid = case
    per_part = [tiles // grid.parts for tiles in grid.chunks]
    arriving = [sum(per_part), *(tiles * (grid.parts - 1) for tiles in per_part)]
    beside = max(1, sms - plan.resources.comm_sms)
    launches = _plan_test.plan_gather_launches(plan, sms)
    if plan.kernel != Kernel.LIBRARY:
        assert launches == _plan_test.gather_launches(arriving, plan.cluster_m, beside, sms)
        return
    # The framework's GEMM computes what has arrived.
    assert [end - begin for begin, end, _ in launches] == arriving
    assert {at_once for _, _, at_once in launches} == {beside}


def check_rows(plan: Plan, columns: int, rank: int) -> None:
    """Each tile of each part is there once; it reads the rows that it stores, once they have arrived."""
    world = plan.problem.world_size
    part_rows = plan.problem.m // world
    height = plan.tiles_m // world
    # The rows of the staging buffer: chunk by chunk all parts' rows.
    staged: list[tuple[int, int, int]] = []
    for chunk in range(len(plan.chunks)):
        begin, end = plan.chunk_rows(chunk)
        assert plan.chunk_extent(chunk)[0] == len(staged) * plan.problem.k
        staged += [(chunk, part, row) for part in range(world) for row in range(begin, end)]
    assert len(staged) == plan.problem.m
    seen = set()
    arrivals = []
    for arrival, column, own, input_row, part, tile_row in _plan.gather_rows(plan, columns, rank):
        arrivals.append(arrival)
        seen.add((part, tile_row, column))
        assert own == (part == rank) == (arrival == 0)
        rows = range(tile_row * plan.tile_m, min((tile_row + 1) * plan.tile_m, part_rows))
        if own:
            assert input_row == tile_row * plan.tile_m
        elif rows:
            expected = [(arrival - 1, part, row) for row in rows]
            assert staged[input_row : input_row + len(rows)] == expected
    assert arrivals == sorted(arrivals)
    tile_columns = -(-columns // plan.tile_n)
    assert len(arrivals) == world * height * tile_columns
    assert seen == {
        (part, row, column)
        for part in range(world)
        for row in range(height)
        for column in range(tile_columns)
    }


@given(parted_plans_and_grids(Op.ALLGATHER_GEMM), st.data())
def test_plan_gather_rows_are_those_that_have_arrived(
    case: tuple[Plan, Grid], data: st.DataObject
) -> None:
    plan, grid = case
    rank = data.draw(st.integers(0, grid.parts - 1))
    check_rows(plan, data.draw(st.integers(1, 3 * plan.tile_n)), rank)


@pytest.mark.parametrize(("kernel", "tile_rows"), [("sm80", 1), ("sm90_pingpong", 2)])
def test_plan_gather_rows_of_as_many_chunks_as_a_plan_may_have(kernel: str, tile_rows: int) -> None:
    # The own rows come before all of them.
    rows = (MAX_CHUNKS * tile_rows - 1) * 128 + 40
    problem = Problem(3 * rows, 256, 64, DType.BFLOAT16, 3, Op.ALLGATHER_GEMM)
    plan = plans.templates.row_panels(problem, [tile_rows] * MAX_CHUNKS, kernel=kernel)
    assert len(plan.chunks) == MAX_CHUNKS
    for rank in range(3):
        check_rows(plan, 256, rank)


def test_plan_gather_rows_are_of_overlapped_all_gathers() -> None:
    problem = Problem(512, 256, 64, DType.BFLOAT16, 2, Op.GEMM_REDUCESCATTER)
    scatter = plans.templates.row_panels(problem, 1)
    for call in (_plan_test.plan_gather_launches, lambda plan, n: _plan.gather_rows(plan, n, 0)):
        with pytest.raises(ValueError, match="overlapped plans of allgather_gemm, not of gemm_red"):
            call(scatter, 132)
    problem.op = Op.ALLGATHER_GEMM
    plan = plans.templates.row_panels(problem, 1, comm_sms=8)
    with pytest.raises(IndexError, match="rank 2 is out of range"):
        _plan.gather_rows(plan, 256, 2)


@st.composite
def rings(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """Parts, tile rows of each, tile columns and tile rows of a round."""
    round_rows = draw(st.integers(1, 8))
    rounds = draw(st.integers(1, 12))
    return draw(st.integers(2, 8)), rounds * round_rows, draw(st.integers(1, 9)), round_rows


@given(rings())
def test_rings_take_each_tile_once_in_every_turn(ring) -> None:
    parts, part_tile_rows, tiles_n, _ = ring
    every = itertools.product(range(parts), range(part_tile_rows), range(tiles_n))
    assert sorted(_plan.ring_tiles(*ring)) == list(every)


@given(rings())
def test_rings_take_a_tile_only_behind_a_whole_round_of_the_turn_before(ring) -> None:
    """So that what it adds to has been on its way for a while."""
    round_rows = ring[3]
    tiles = _plan.ring_tiles(*ring)
    place = {tile: index for index, tile in enumerate(tiles)}
    for (turn, row, _), index in place.items():
        if turn > 0:
            first_row = row - row % round_rows
            assert all(
                place[turn - 1, first_row + other, last] < index
                for other in range(round_rows)
                for last in range(ring[2])
            )


@given(rings())
def test_rings_keep_the_rows_of_a_round_together(ring) -> None:
    """A cluster's tiles are those of consecutive rows, whatever divisor of a round it has."""
    round_rows = ring[3]
    tiles = _plan.ring_tiles(*ring)
    for index in range(0, len(tiles), round_rows):
        turn, row, column = tiles[index]
        assert row % round_rows == 0
        assert tiles[index : index + round_rows] == [
            (turn, row + further, column) for further in range(round_rows)
        ]


@given(rings())
def test_rings_have_last_turns_from_early_on(ring) -> None:
    """Once all turns have begun and while none has ended, every band holds a round of each."""
    parts, part_tile_rows, tiles_n, round_rows = ring
    rounds = part_tile_rows // round_rows
    tiles = _plan.ring_tiles(*ring)
    round_tiles = round_rows * tiles_n
    rising = sum(range(1, parts)) * round_tiles
    for band in range(rounds - parts + 1):
        begin = rising + band * parts * round_tiles
        turns = [turn for turn, _, _ in tiles[begin : begin + parts * round_tiles]]
        assert all(turns.count(turn) == round_tiles for turn in range(parts))


@pytest.mark.parametrize(
    "ring", [(1, 4, 4, 2), (9, 4, 4, 2), (2, 5, 4, 2), (2, 4, 0, 2), (2, 4, 4, 0)]
)
def test_rings_that_cannot_be_are_refused(ring) -> None:
    with pytest.raises(ValueError, match=f"a ring of {ring[0]} parts of {ring[1]} x"):
        _plan.ring_tiles(*ring)
