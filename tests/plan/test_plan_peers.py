"""Plans whose chunks travel through memory that the ranks map into each other: rings of any rows; plans in one step, without fault."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_torch import plan as plans
from overlap_torch.plan import Plan, Problem
from overlap_torch.plan.types import Chunk, Collective, DType, Kernel, Op, Schedule, Transport
from tests.steps_proof import PEERS, Case


@pytest.mark.parametrize("kernel", ["library", "sm90_pingpong", "sm90_pingpong_wide"])
@pytest.mark.parametrize("world", range(2, 9))
def test_plan_of_a_ring_takes_any_rows_of_which_each_rank_has_some(world: int, kernel: str) -> None:
    options = {"kernel": kernel, "transport": "peer"}
    some = [0, 0]
    for m in [*range(1, 8 * world), 4095, 4096, 4097, 5001, 8193]:
        problem = Problem(m, 512, 64, DType.BFLOAT16, world)
        # Equal parts, one after the other, as far as there are rows.
        part = -(-m // world)
        parts = [min(part, m - begin) for begin in range(0, m, part)]
        some[len(parts) == world] += 1
        if len(parts) < world:
            expected = (
                f"the collective ring cuts m = {m} into {world} parts of {part} rows, .*direct"
            )
            with pytest.raises(ValueError, match=expected):
                plans.templates.row_panels(problem, 1, **options)
            continue
        plan = plans.templates.row_panels(problem, 1, **options)
        plan.validate()
        assert plan.collective == Collective.RING
        assert plan.chunk_rows(0) == (0, part)
        cluster = 256 if kernel != "library" else 128
        assert plan.tiles_m == world * -(-part // cluster) * (cluster // 128)
        assert plans.files.decode(plans.files.encode(plan)) == plan
    assert min(some) >= (1 if world == 2 else 2)


@pytest.mark.parametrize(
    ("op", "world", "tile_rows", "tiles"),
    [
        (Op.GEMM_ALLREDUCE, 2, 258, 132096),  # the other rank's finished ones, too
        (Op.GEMM_REDUCESCATTER, 2, 514, 131584),
        (Op.GEMM_ALLREDUCE, 4, 86, 132096),
        (Op.GEMM_REDUCESCATTER, 8, 74, 132608),
    ],
    ids=str,
)
@pytest.mark.parametrize("kernel", ["library", "sm90_pingpong"])
def test_plan_of_a_ring_has_a_flag_for_each_tile_that_it_passes_on(
    op: Op, world: int, tile_rows: int, tiles: int, kernel: str
) -> None:
    def ring(tile_rows: int) -> Plan:
        # Tiles of 128 x 128: 256 columns, and as many rows in each part.
        problem = Problem(world * tile_rows * 128, 32768, 64, DType.BFLOAT16, world, op)
        return plans.templates.row_panels(problem, 1, kernel=kernel, transport="peer")

    expected = (
        f"plan with the collective ring passes on {tiles} tiles, allowed are 131072, as each has a "
        "flag: take the transport nccl"
    )
    with pytest.raises(ValueError, match=expected):
        ring(tile_rows)
    ring(tile_rows - 2).validate()  # whole clusters of two


KERNELS = {Kernel.LIBRARY: Schedule.SEQUENTIAL, Kernel.SM90_PINGPONG: Schedule.OVERLAPPED}
BYTES = {DType.BFLOAT16: 2, DType.FLOAT16: 2, DType.FLOAT32: 4}
ACCESS = 16  # bytes


@st.composite
def problems_and_kernels(draw: st.DrawFn) -> tuple[Problem, Kernel]:
    """The problems that a direct plan takes."""
    op = draw(st.sampled_from([Op.GEMM_ALLREDUCE, Op.GEMM_REDUCESCATTER, Op.ALLGATHER_GEMM]))
    kernel, world = draw(st.sampled_from([*KERNELS])), draw(st.integers(2, 8))
    dtype = draw(st.sampled_from([*BYTES][: 3 if kernel == Kernel.LIBRARY else 2]))
    rows = draw(st.integers(1, 700))
    # Two ranks of an all-reduce send each other everything, and the framework's GEMM cuts no rows.
    any_rows = op == Op.GEMM_ALLREDUCE and (world == 2 or kernel == Kernel.LIBRARY)
    elements = ACCESS // BYTES[dtype]
    whole, other = elements * draw(st.integers(1, 1500 // elements)), draw(st.integers(1, 3000))
    n, k = (other, whole) if op == Op.ALLGATHER_GEMM else (whole, other)
    return Problem(rows if any_rows else rows * world, n, k, dtype, world, op), kernel


@settings(max_examples=150, deadline=None)
@given(problems_and_kernels())
def test_plan_direct_is_one_chunk_without_fault(case: tuple[Problem, Kernel]) -> None:
    problem, kernel = case
    plan = plans.templates.at_once(problem, kernel=kernel)
    gathers = problem.op == Op.ALLGATHER_GEMM
    assert (plan.kernel, plan.schedule) == (kernel, KERNELS[kernel])
    assert plan.collective == (Collective.ALL_GATHER if gathers else Collective.DIRECT)
    assert plan.chunks == (Chunk(plan.tiles_m * plan.tiles_n, Transport.PEER),)
    assert Case(plan, PEERS, (True,) * problem.world_size).fault() == ""
    if gathers and kernel != Kernel.LIBRARY:  # one chunk of the plan in phases
        assert plan == plans.templates.row_panels(problem, 1, kernel=kernel, transport="peer")
