"""Plans that go over peers in one step, of any size: their steps have no fault."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_torch import plan as plans
from overlap_torch.plan import Problem
from overlap_torch.plan.types import Chunk, Collective, DType, Kernel, Op, Schedule, Transport
from tests.steps_proof import PEERS, Case

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
