"""Plans that go over peers in one step: their form, and what is refused."""

from __future__ import annotations

import json
import math
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_torch import plan as plans
from overlap_torch.plan import Plan, Problem
from overlap_torch.plan.types import (
    Chunk,
    Collective,
    DType,
    Kernel,
    Layout,
    Op,
    Resources,
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

every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name.lower())
every_reduction = pytest.mark.parametrize("op", REDUCTIONS, ids=lambda op: op.name.lower())
every_kernel = pytest.mark.parametrize("kernel", [*KERNELS], ids=lambda kernel: kernel.name.lower())


def direct_plan(op: Op = Op.GEMM_ALLREDUCE, kernel: Kernel = Kernel.LIBRARY) -> Plan:
    """4 ranks, 8 x 4 tiles of 128 x 128."""
    return plans.templates.at_once(Problem(1024, 512, 64, DType.BFLOAT16, 4, op), kernel=kernel)


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


@given(problems_and_kernels())
def test_plan_direct_survives_encode_json_pickle_and_copy(case: tuple[Problem, Kernel]) -> None:
    problem, kernel = case
    plan = plans.templates.at_once(problem, kernel=kernel)
    code = plans.files.encode(plan)
    assert plans.files.decode(code) == plan
    assert plans.files.encode(plans.files.decode(code)) == code
    assert plans.files.from_json(plans.files.to_json(plan)) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan
    copy = plan.copy()
    assert copy == plan
    copy.chunks = [Chunk(chunk.tiles) for chunk in plan.chunks]
    assert copy != plan
    assert repr(copy) != repr(plan)
    assert plans.files.decode(plans.files.encode(copy)) == copy


@every_kernel
@every_op
def test_plan_direct_says_so_in_json_and_words(op: Op, kernel: Kernel) -> None:
    plan = direct_plan(op, kernel)
    data = json.loads(plans.files.to_json(plan))
    schedule = KERNELS[kernel].name.lower()
    assert (data["schedule"], data["kernel"]) == (schedule, kernel.name.lower())
    assert data["collective"] == collective_of(op).name.lower()
    assert data["chunks"] == [{"tiles": 32, "transport": "peer", "max_ctas": 0}]
    words = repr(plan)
    assert schedule in words
    assert "32 tiles (peer)" in words
    assert (", direct," in words) == (op != Op.ALLGATHER_GEMM)


@pytest.mark.parametrize("m", [2, 514, 8192])
@pytest.mark.parametrize("world", [2, 8])
def test_plan_direct_gather_of_a_kernel_is_the_ordinary_one(world: int, m: int) -> None:
    problem = Problem(m * world, 520, 72, DType.BFLOAT16, world, Op.ALLGATHER_GEMM)
    ordinary = plans.templates.row_panels(problem, 1, kernel="sm90_pingpong", transport="peer")
    assert plans.templates.at_once(problem, kernel="sm90_pingpong") == ordinary


def test_plan_direct_takes_the_library_unless_told() -> None:
    problem = Problem(17, 512, 64, DType.FLOAT32, 2)
    assert plans.templates.at_once(problem) == plans.templates.at_once(
        problem, kernel=Kernel.LIBRARY
    )
    assert plans.templates.at_once(problem).kernel == Kernel.LIBRARY
    with pytest.raises(ValueError, match="Kernel is 'fast', allowed are library, sm80, "):
        plans.templates.at_once(problem, kernel="fast")


# --- what is refused --------------------------------------------------------------------------------


@every_kernel
@every_reduction
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"chunks": [Chunk(16, Transport.PEER)] * 2},
            "plan with the collective direct has 2 chunks, allowed is one of all tiles, as nothing",
        ),
        (
            {"chunks": [Chunk(32)]},
            "collective is direct with the transport nccl, allowed is peer: take that, or the "
            "collective (all_reduce|reduce_scatter)",
        ),
        (
            {"chunks": [Chunk(32, Transport.GLOO)]},
            "collective is direct with the transport gloo, allowed is peer",
        ),
        (
            {"resources": Resources(window=True)},
            "window = true with the transport peer, but symmetric windows are NCCL's: take nccl",
        ),
        (
            {"resources": Resources(lanes=2)},
            "travels by peer with the collective direct, .* lanes = 2, allowed are .* one lane",
        ),
        (
            {"layout": Layout.PACKED},
            "travels by peer with the collective direct, .* the layout packed, .*allowed are .*"
            "row_major",
        ),
    ],
)
def test_plan_validate_names_what_is_wrong_with_a_direct_plan(op, kernel, changes, message) -> None:
    plan = direct_plan(op, kernel)
    plan.validate()
    for field, value in changes.items():
        setattr(plan, field, value)
    with pytest.raises(ValueError, match=message):
        plan.validate()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"chunks": [Chunk(16, Transport.PEER)] * 2},
            "sequential plan has 2 chunks, allowed is one of all tiles: join them, or take the "
            "schedule overlapped",
        ),
        (
            {"collective": Collective.DIRECT},
            "collective of allgather_gemm is direct, allowed is all_gather: take that",
        ),
        ({"layout": Layout.PACKED}, "the layout packed, .*allowed are .*row_major"),
        ({"resources": Resources(lanes=2)}, "lanes = 2, allowed are .* one lane"),
        ({"resources": Resources(window=True)}, "window = true with the transport peer"),
    ],
)
def test_plan_validate_names_what_is_wrong_with_a_gather_in_one_step(changes, message) -> None:
    plan = direct_plan(Op.ALLGATHER_GEMM)
    plan.validate()
    for field, value in changes.items():
        setattr(plan, field, value)
    with pytest.raises(ValueError, match=message):
        plan.validate()


@every_reduction
def test_plan_direct_and_ring_are_told_apart(op: Op) -> None:
    """A ring has phases, so it cannot come after the GEMM; with the kernel's grid it may take its place."""
    plan = direct_plan(op)
    plan.collective = Collective.RING
    with pytest.raises(ValueError, match="collective ring, the schedule sequential, .*overlapped"):
        plan.validate()
    ring = plans.templates.row_panels(plan.problem, 1, kernel="sm90_pingpong", transport="peer")
    assert ring.collective == Collective.RING
    assert ring != direct_plan(op, Kernel.SM90_PINGPONG)


@pytest.mark.parametrize("world", range(3, 9))
def test_plan_direct_with_a_kernel_wants_equal_parts_of_an_all_reduce(world: int) -> None:
    for m in (1, 128 * world - 1, 128 * world + 1):
        problem = Problem(m, 512, 64, DType.BFLOAT16, world)
        expected = f"by peer with m = {m} on {world} ranks, allowed are multiples .* transport nccl"
        with pytest.raises(ValueError, match=expected):
            plans.templates.at_once(problem, kernel="sm90_pingpong")
        plans.templates.at_once(problem).validate()  # whose pieces need not be rows


@every_kernel
@pytest.mark.parametrize("m", [1, 17, 1023])
def test_plan_direct_all_reduce_of_two_ranks_takes_any_rows(kernel: Kernel, m: int) -> None:
    plan = plans.templates.at_once(Problem(m, 512, 64, DType.BFLOAT16, 2), kernel=kernel)
    plan.validate()
    assert plan.chunk_rows(0) == (0, m)


@every_kernel
@pytest.mark.parametrize("op", [Op.GEMM_REDUCESCATTER, Op.ALLGATHER_GEMM])
def test_plan_direct_wants_equal_parts_of_other_ops(op: Op, kernel: Kernel) -> None:
    problem = Problem(1023, 512, 64, DType.BFLOAT16, 2, op)
    with pytest.raises(ValueError, match="m = 1023 rows on 2 ranks, allowed are multiples"):
        plans.templates.at_once(problem, kernel=kernel)


@every_reduction
@pytest.mark.parametrize(
    ("kernel", "dtype", "n"),
    [
        (Kernel.LIBRARY, DType.BFLOAT16, 12),
        (Kernel.LIBRARY, DType.FLOAT16, 1001),
        (Kernel.LIBRARY, DType.FLOAT32, 1),
        (Kernel.LIBRARY, DType.FLOAT32, 1002),
        (Kernel.LIBRARY, DType.FLOAT64, 513),
        (Kernel.SM90_PINGPONG, DType.BFLOAT16, 516),
        (Kernel.SM90_PINGPONG, DType.FLOAT16, 7),
    ],
)
def test_plan_direct_wants_rows_of_whole_accesses(op, kernel, dtype, n) -> None:
    expected = (
        f"by peer with the collective direct and rows of {n * BYTES[dtype]} bytes, "
        "allowed are multiples of 16, .*take the transport nccl"
    )
    # K may be anything.
    with pytest.raises(ValueError, match=expected):
        plans.templates.at_once(Problem(1024, n, 64, dtype, 4, op), kernel=kernel)
    whole = n + -n % (ACCESS // BYTES[dtype])
    plans.templates.at_once(Problem(1024, whole, 63, dtype, 4, op), kernel=kernel).validate()


@pytest.mark.parametrize(("dtype", "k"), [(DType.BFLOAT16, 68), (DType.FLOAT32, 63)])
def test_plan_direct_gather_wants_input_rows_of_whole_accesses(dtype: DType, k: int) -> None:
    problem = Problem(1024, 511, k, dtype, 4, Op.ALLGATHER_GEMM)
    expected = (
        f"by peer with the collective all_gather and rows of {k * BYTES[dtype]} bytes, "
        "allowed are multiples of 16"
    )
    with pytest.raises(ValueError, match=expected):
        plans.templates.at_once(problem)
    # Copy engines move rows of any size.
    plans.templates.row_panels(problem, 1, transport="peer").validate()
    plans.templates.at_once(Problem(1024, 511, 64, dtype, 4, Op.ALLGATHER_GEMM)).validate()


@every_kernel
@every_op
@pytest.mark.parametrize("world", [1, 9, 16])
def test_plan_direct_is_for_the_ranks_of_one_host(op: Op, kernel: Kernel, world: int) -> None:
    problem = Problem(256 * world, 512, 64, DType.BFLOAT16, world, op)
    expected = f"by peer between {world} ranks, allowed are 2 to 8: take the transport nccl"
    with pytest.raises(ValueError, match=expected):
        plans.templates.at_once(problem, kernel=kernel)


@every_op
@pytest.mark.parametrize("empty", ["m", "n", "k"])
def test_plan_direct_is_not_for_an_empty_problem(op: Op, empty: str) -> None:
    problem = Problem(1024, 512, 64, DType.BFLOAT16, 4, op)
    setattr(problem, empty, 0)
    with pytest.raises(ValueError, match=f"by peer for an empty problem .*{empty}=0.* nccl"):
        plans.templates.at_once(problem)
    with pytest.raises(ValueError, match=f"overlapped plan for an empty problem .*{empty}=0"):
        plans.templates.at_once(problem, kernel="sm90_pingpong")


@every_kernel
def test_plan_direct_is_not_for_an_all_to_all(kernel: Kernel) -> None:
    problem = Problem(0, 512, 64, DType.BFLOAT16, 2, Op.GEMM_ALLTOALL)
    expected = "collective of gemm_alltoall is direct, allowed is all_to_all: take that"
    with pytest.raises(ValueError, match=expected):
        plans.templates.at_once(problem, kernel=kernel)


def test_plan_direct_kernels_take_their_dtypes() -> None:
    problem = Problem(1024, 512, 64, DType.FLOAT32, 2)
    expected = "sm90_pingpong was given float32, but it computes bfloat16, float16 and fp8"
    with pytest.raises(ValueError, match=expected):
        plans.templates.at_once(problem, kernel="sm90_pingpong")
