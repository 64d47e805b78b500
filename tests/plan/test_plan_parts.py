"""Plans of ops that cut their rows into the ranks' parts, and of all-to-all, which has no rows that all ranks know."""

import pickle
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_torch import plan as plans
from overlap_torch.plan import Machine, Plan, Problem
from overlap_torch.plan.types import Chunk, Collective, DType, Op, Schedule, Transport
from plan_grids import Grid, parted_plans_and_grids

settings.register_profile("plan", deadline=None)
settings.load_profile("plan")

PARTED = st.one_of(parted_plans_and_grids(), parted_plans_and_grids(peers=True))


@given(PARTED)
def test_plan_part_row_puts_every_tile_row_into_one_part(case: tuple[Plan, Grid]) -> None:
    plan, grid = case
    plan.validate()
    places = [plan.part_row(row) for row in range(grid.rows)]
    assert places == grid.part_rows()
    height = grid.rows // grid.parts
    assert sorted(places) == [(p, row) for p in range(grid.parts) for row in range(height)]


@given(PARTED)
def test_plan_parted_chunks_hold_the_same_rows_of_each_part(case: tuple[Plan, Grid]) -> None:
    plan, grid = case
    part_rows = -(-grid.m // grid.parts)  # the last part may have fewer
    rows_of: list[dict[int, set[int]]] = [{} for _ in grid.chunks]
    for (row, _), chunk in zip(grid.tiles(), grid.chunk_of_tiles(), strict=True):
        part, top = grid.part_rows()[row]
        rows = range(top * grid.tile_m, min((top + 1) * grid.tile_m, part_rows))
        rows_of[chunk].setdefault(part, set()).update(rows)
    covered: list[int] = []
    for chunk, of_parts in enumerate(rows_of):
        begin, end = plan.chunk_rows(chunk)
        assert begin < end
        assert sorted(of_parts) == list(range(grid.parts))
        assert all(rows == set(range(begin, end)) for rows in of_parts.values())
        covered += range(begin, end)
    assert covered == list(range(part_rows))


@given(parted_plans_and_grids(Op.GEMM_REDUCESCATTER))
def test_plan_scattered_chunks_are_part_after_part(case: tuple[Plan, Grid]) -> None:
    # Kernels store whole tiles of each part; on CPU the framework's GEMM makes rows.
    plan, grid = case
    whole_tiles = plan.chunks[0].transport != Transport.GLOO
    assert plan.buffer_elements() == grid.n * (grid.rows * grid.tile_m if whole_tiles else grid.m)
    for chunk, tiles in enumerate(grid.chunks):
        begin, end = plan.chunk_rows(chunk)
        rows = tiles // (grid.columns * grid.parts) * grid.tile_m if whole_tiles else end - begin
        assert plan.chunk_extent(chunk) == (grid.parts * begin * grid.n, rows * grid.n)


@given(parted_plans_and_grids(Op.ALLGATHER_GEMM))
def test_plan_gathered_chunks_are_input_rows_part_after_part(case: tuple[Plan, Grid]) -> None:
    plan, grid = case
    k = plan.problem.k
    assert plan.buffer_elements() == grid.m * k
    for chunk in range(len(grid.chunks)):
        begin, end = plan.chunk_rows(chunk)
        assert plan.chunk_extent(chunk) == (grid.parts * begin * k, (end - begin) * k)


# --- all-to-all: rows differ by rank, so a plan has none ----------------------------------------------


def all_to_all(**changes: int) -> Plan:
    """As the planner makes it, for either schedule the same problem."""
    fields = {"m": 0, "n": 8, "k": 16, **changes}
    problem = Problem(**fields, dtype=DType.FLOAT32, world_size=3, op=Op.GEMM_ALLTOALL)
    return plans.templates.make_plan(
        problem, Machine(sm_count=2, sm_gflops=50.0, link_gbps=1.0, link_latency_us=200.0)
    )


def test_plan_of_all_to_all_is_one_empty_chunk() -> None:
    plan = all_to_all()
    plan.validate()
    assert (plan.schedule, plan.collective) == (Schedule.OVERLAPPED, Collective.ALL_TO_ALL)
    assert [chunk.tiles for chunk in plan.chunks] == [0]
    assert plan.bands == ()
    assert (plan.tiles_m, plan.buffer_elements(), plan.chunk_extent(0)) == (0, 0, (0, 0))
    assert plans.files.decode(plans.files.encode(plan)) == plan
    assert plans.files.from_json(plans.files.to_json(plan)) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert "gemm_alltoall m=0 n=8 k=16 float32 world_size=3: overlapped" in repr(plan)


def test_plan_of_all_to_all_has_no_rows_of_its_own() -> None:
    plan = all_to_all()
    plan.problem.m = 4
    with pytest.raises(ValueError, match="gemm_alltoall has m = 4, allowed is 0: its rows differ"):
        plan.validate()
    with pytest.raises(ValueError, match="gemm_alltoall has m = 4, allowed is 0: its rows differ"):
        all_to_all(m=4)


@pytest.mark.parametrize(
    ("n", "k", "chunks"), [(0, 16, 1), (8, 0, 1), (0, 0, 1), (8, 16, 2)], ids=str
)
def test_plan_of_all_to_all_overlapped_is_of_one_chunk_and_some_work(n, k, chunks) -> None:
    plan = all_to_all()
    plan.problem.n, plan.problem.k = n, k
    plan.chunks = [Chunk(0, Transport.GLOO)] * chunks
    expected = f"n = {n}, k = {k} with {chunks} chunks, allowed are n and k of 1 or more and one"
    with pytest.raises(ValueError, match=re.escape(expected)):
        plan.validate()
    plan.schedule = Schedule.SEQUENTIAL
    if chunks == 1:
        plan.validate()
