"""The steps of plans as Python sees them, the tiles of each launch of an all-gather's GEMM, and the order of a ring's tiles."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machines import KINDS, big
from overlap_torch import _plan
from overlap_torch.plan import Machine, Plan
from overlap_torch.plan.types import Kernel, Op, Resources
from tests import _plan_test


def steps(plan: Plan, rank: int, machine: Machine = KINDS["peers"], **variant: object) -> dict:
    def once(pairs: list[tuple[str, object]]) -> dict:
        assert len({name for name, _ in pairs}) == len(pairs), pairs
        return dict(pairs)

    text = _plan.steps_json(plan, rank, machine, **variant)
    return json.loads(text, object_pairs_hook=once)


def test_plan_steps_of_a_capture_stage_outside_of_the_window() -> None:
    problem = big(m=4096, n=2048, k=1024, world_size=2, op=Op.GEMM_REDUCESCATTER)
    resources = Resources(comm_sms=8, window=True)
    plan = _plan.make_row_panels(problem, Kernel.SM90_PINGPONG, [8, 8], 8, resources, 8)
    scratch = [steps(plan, 0, captured=captured)["scratch"] for captured in (False, True)]
    assert scratch == [
        [{"buffer": buffer, "bytes": 4096 * 2048 * 2}] for buffer in ("window", "staging")
    ]


def test_plan_steps_stage_parts_between_multiples_of_16_bytes_outside_of_the_window() -> None:
    """The last chunk's rows, of 2002 bytes each, are whole accesses in a window, or are not."""
    buffers = []
    for rows in (4096, 4095):
        problem = big(m=rows, n=1001, k=1024, world_size=2)
        resources = Resources(comm_sms=8, window=True)
        plan = _plan.make_row_panels(problem, Kernel.SM90_PINGPONG, [16, 16], 8, resources, 8)
        buffers += [one["buffer"] for one in steps(plan, 0, kernel_takes=False)["scratch"]]
    assert buffers == ["window", "staging"]


def test_plan_steps_refuse_what_does_not_fit_the_plan() -> None:
    plan = _plan.make_sequential(big(world_size=2), KINDS["windows"])
    exchange = big(op=Op.GEMM_ALLTOALL, n=4096, k=1024, world_size=2)
    rows = _plan.make_all_to_all(exchange, Kernel.SM90_PINGPONG, Resources(comm_sms=16), 16)
    gather = _plan.make_sequential(
        big(world_size=2, op=Op.ALLGATHER_GEMM, m=4096, n=1024), KINDS["windows"]
    )
    for asked, rank, how, said in (
        (plan, 2, {}, "rank 2 is not one of the plan's 2 ranks, 0 to 1"),
        (plan, 0, {"send_rows": [1, 1]}, "send_rows has 2 counts; the plan's op takes none"),
        (plan, 0, {"weights": [(8, True)]}, "weights are for plans of allgather_gemm"),
        (rows, 0, {"send_rows": [1, -1], "receive_rows": [1, 1]}, "some below 0; the plan's op takes one of 0 or more for"),
        (gather, 0, {"weights": [(512, True), (504, True)]}, "have 1016 columns together, and the plan's n is 1024"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            steps(asked, rank, **how)


def test_plan_steps_say_what_they_wait_for() -> None:
    plan = _plan.make_row_panels(
        big(m=4096, n=2048, k=1024, world_size=2),
        Kernel.SM90_PINGPONG,
        [16, 16],
        8,
        Resources(comm_sms=8),
        8,
    )
    made = steps(plan, 0, KINDS["windows"], bias=True)["steps"]
    assert [(one["lane"], one["step"], one["after"]) for one in made] == [
        ("caller", "fork", []),
        ("caller", "gemm", []),
        ("side0", "wait_for_tiles", []),
        ("side0", "collective", []),
        ("copy", "add_terms", [3]),
        ("side0", "wait_for_tiles", []),
        ("side0", "collective", []),
        ("copy", "add_terms", [6]),
        ("caller", "join", []),
    ]
    where = {"buffer": "output", "index": 0, "offset": 8 << 20}
    gemm = {"begin": 0, "end": 4096, "first_tile": 0, "end_tile": 512, "ctas": 124, "counts": True}
    wait = {"chunk": 1, "tiles": 256}
    collective = {"kind": "all_reduce", "max_ctas": 8, "communicator_lane": 0, "count": 4194304}
    places = {"source": where, "destination": where}
    for number, fields in ((1, gemm), (5, wait), (6, collective | places), (7, places)):
        assert made[number].items() >= fields.items()
    assert (made[1]["outputs"], made[7]["rows"]) == ([{"to": where | {"offset": 0}}], 2048)


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
