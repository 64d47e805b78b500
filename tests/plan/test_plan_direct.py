"""Plans that go over peers in one step: their form, and what is refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_torch import plan as plans
from overlap_torch.plan import Problem
from overlap_torch.plan.types import (
    Chunk,
    Collective,
    DType,
    Kernel,
    Layout,
    Op,
    Schedule,
    Transport,
)
from plan_grids import SHAPES

settings.register_profile("plan", deadline=None)
settings.load_profile("plan")

REDUCTIONS = [Op.GEMM_ALLREDUCE, Op.GEMM_REDUCESCATTER]
OPS = [*REDUCTIONS, Op.ALLGATHER_GEMM]
KERNELS = {Kernel.LIBRARY: Schedule.SEQUENTIAL, Kernel.SM90_PINGPONG: Schedule.OVERLAPPED}
TILES = {Kernel.LIBRARY: (128, 128, 1), **SHAPES}
BYTES = {DType.BFLOAT16: 2, DType.FLOAT16: 2, DType.FLOAT32: 4, DType.FLOAT64: 8}
ACCESS = 16  # bytes


def collective_of(op: Op) -> Collective:
    return Collective.ALL_GATHER if op == Op.ALLGATHER_GEMM else Collective.DIRECT


def sums_everything(op: Op, world: int) -> bool:
    """Two ranks of an all-reduce send each other everything, so that nobody owns a part."""
    return op == Op.GEMM_ALLREDUCE and world == 2


# --- form -------------------------------------------------------------------------------------------


@st.composite
def problems_and_kernels(draw: st.DrawFn) -> tuple[Problem, Kernel]:
    """The problems that a direct plan takes."""
    op, kernel = draw(st.sampled_from(OPS)), draw(st.sampled_from([*KERNELS]))
    dtypes = list(BYTES) if kernel == Kernel.LIBRARY else [DType.BFLOAT16, DType.FLOAT16]
    dtype, world = draw(st.sampled_from(dtypes)), draw(st.integers(2, 8))
    rows = draw(st.integers(1, 700))
    if not sums_everything(op, world) and (op != Op.GEMM_ALLREDUCE or kernel != Kernel.LIBRARY):
        rows *= world
    elements = ACCESS // BYTES[dtype]
    whole, other = elements * draw(st.integers(1, 1500 // elements)), draw(st.integers(1, 3000))
    n, k = (other, whole) if op == Op.ALLGATHER_GEMM else (whole, other)
    return Problem(rows, n, k, dtype, world, op), kernel


@settings(max_examples=200)
@given(problems_and_kernels())
def test_plan_direct_is_one_chunk_of_all_tiles(case: tuple[Problem, Kernel]) -> None:
    problem, kernel = case
    plan = plans.templates.at_once(problem, kernel=kernel)
    plan.validate()
    assert plan.problem == problem
    assert (plan.kernel, plan.schedule) == (kernel, KERNELS[kernel])
    assert (plan.collective, plan.layout) == (collective_of(problem.op), Layout.ROW_MAJOR)
    assert (plan.tile_m, plan.tile_n, plan.cluster_m) == TILES[kernel]
    assert (plan.resources.lanes, plan.resources.window) == (1, False)
    tiles = plan.tiles_m * plan.tiles_n
    assert plan.chunks == (Chunk(tiles, Transport.PEER),)
    coordinates = {plan.tile_coord(i) for i in range(tiles)}
    assert coordinates == {(r, c) for r in range(plan.tiles_m) for c in range(plan.tiles_n)}
    assert {plan.tile_chunk(i) for i in range(tiles)} == {0}


@settings(max_examples=200)
@given(problems_and_kernels())
def test_plan_direct_cuts_the_rows_where_ranks_own_parts(case: tuple[Problem, Kernel]) -> None:
    problem, kernel = case
    plan = plans.templates.at_once(problem, kernel=kernel)
    world, op = problem.world_size, problem.op
    tile_m, tile_n, cluster = TILES[kernel]
    # The framework's GEMM makes the whole output of an all-reduce, whose pieces need not be rows.
    whole = op == Op.GEMM_ALLREDUCE and kernel == Kernel.LIBRARY
    whole = whole or sums_everything(op, world)
    parts = 1 if whole else world
    rows = problem.m // parts
    assert plan.tiles_n == -(-problem.n // tile_n)
    assert plan.chunk_rows(0) == (0, rows)
    # Whole clusters: of each part where parts are computed one by one, else of all together.
    grain = cluster if op == Op.ALLGATHER_GEMM else math.lcm(cluster, parts) // parts
    height = -(-rows // (tile_m * grain)) * grain
    assert plan.tiles_m == parts * height
    places = [plan.part_row(row) for row in range(plan.tiles_m)]
    assert places == [(part, row) for part in range(parts) for row in range(height)]


@pytest.mark.parametrize("m", [2, 514, 8192])
@pytest.mark.parametrize("world", [2, 8])
def test_plan_direct_gather_of_a_kernel_is_the_ordinary_one(world: int, m: int) -> None:
    problem = Problem(m * world, 520, 72, DType.BFLOAT16, world, Op.ALLGATHER_GEMM)
    ordinary = plans.templates.row_panels(problem, 1, kernel="sm90_pingpong", transport="peer")
    assert plans.templates.at_once(problem, kernel="sm90_pingpong") == ordinary


# --- what is refused --------------------------------------------------------------------------------
