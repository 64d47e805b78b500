"""The tiles of each launch of an all-gather's GEMM, and the places of their rows; the order of a ring's tiles."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_torch import _plan
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


@st.composite
def rings(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """Parts, tile rows of each, tile columns and tile rows of a round."""
    round_rows = draw(st.integers(1, 8))
    rounds = draw(st.integers(1, 12))
    return draw(st.integers(2, 8)), rounds * round_rows, draw(st.integers(1, 9)), round_rows


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


@pytest.mark.parametrize(
    "ring", [(1, 4, 4, 2), (9, 4, 4, 2), (2, 5, 4, 2), (2, 4, 0, 2), (2, 4, 4, 0)]
)
def test_rings_that_cannot_be_are_refused(ring) -> None:
    with pytest.raises(ValueError, match=f"a ring of {ring[0]} parts of {ring[1]} x"):
        _plan.ring_tiles(*ring)
