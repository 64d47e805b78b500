"""Problems of scaled operands: types and recipe in plans, their texts, JSON, prices, and what is refused."""

import copy

import pytest
import torch

from machines import gain, over_peers
from overlap_torch import plan as plans
from overlap_torch.plan import Plan, Problem
from overlap_torch.plan._explain import H200
from overlap_torch.plan.templates import make_plan, row_panels
from overlap_torch.plan.types import Collective, DType, Kernel, Op, Recipe, Schedule

every_op = pytest.mark.parametrize("op", list(Op.__members__.values()), ids=lambda op: op.name)

PINGPONG = {Kernel.SM90_PINGPONG, Kernel.SM90_PINGPONG_WIDE}
SCALED = Problem(8192, 8192, 7168, torch.float8_e4m3fn, 2, recipe="row_wise")


def scaled(op: Op, **changes: object) -> Problem:
    rows = 0 if op == Op.GEMM_ALLTOALL else 8192
    problem = Problem(rows, 8192, 7168, "float8_e4m3fn", 2, op, "tensor_wise")
    for name, value in changes.items():
        setattr(problem, name, value)
    return problem


def test_fp8_problem_says_types_and_recipe():
    assert (SCALED.dtype, SCALED.recipe) == (DType.FLOAT8_E4M3FN, Recipe.ROW_WISE)
    assert SCALED.output_dtype == DType.BFLOAT16
    assert repr(SCALED).endswith("float8_e4m3fn world_size=2 row_wise bfloat16")
    fast = Problem(8192, 8192, 7168, torch.float8_e4m3fn, 2, recipe="row_wise", fast_accum=True)
    assert (SCALED.fast_accum, fast.fast_accum) == (False, True) and fast != SCALED
    assert repr(fast) == f"{SCALED!r} fast_accum=1"
    half = Problem(8, 8, 8, "float8_e5m2", 2, recipe="block_wise", output_dtype=torch.float16)
    assert half.output_dtype == DType.FLOAT16 and half != SCALED
    plain = Problem(8, 8, 8, torch.float16, 2)
    assert (plain.recipe, plain.output_dtype) == (Recipe.NONE, DType.FLOAT16)
    assert repr(plain).endswith("float16 world_size=2")  # as ever


@every_op
def test_fp8_plans_are_sequential_on_cpu(op):
    cpu = plans.Machine(sm_count=4, sm_gflops=20.0, link_gbps=1.0)
    found = plans.candidates(scaled(op), cpu)
    assert [plan.schedule for plan in found] == [Schedule.SEQUENTIAL]
    assert make_plan(scaled(op), cpu) == found[0]


@every_op
@pytest.mark.parametrize("peers", [False, True])
@pytest.mark.parametrize("recipe", ["tensor_wise", "row_wise"])
def test_fp8_plans_on_hopper_are_ping_pongs_where_sums_may_be_their_own(op, peers, recipe):
    machine = copy.copy(H200)
    machine.peer_gbps = H200.peer_gbps if peers else 0.0
    problem = scaled(op, recipe=Recipe.__members__[recipe.upper()], fast_accum=True)
    found = in_chunks(problem, machine)
    kernels = {plan.kernel for plan in found}
    assert kernels & PINGPONG
    assert kernels <= PINGPONG | {Kernel.LIBRARY}
    for plan in found:
        plans.validate(plan)
        assert plans.files.from_json(plans.files.to_json(plan)) == plan
    if op != Op.GEMM_ALLTOALL:
        assert Kernel.LIBRARY in kernels
        assert any(over_peers(plan) for plan in found) == peers
    # Sums in float32 are the framework's, as are those of blocks, whatever the caller allows.
    for other in (scaled(op), scaled(op, recipe=Recipe.BLOCK_WISE, fast_accum=True)):
        assert {plan.kernel for plan in plans.candidates(other, machine, True)} == {Kernel.LIBRARY}


@pytest.mark.parametrize("m", [4096, 8192, 16384])
@pytest.mark.parametrize("nk", [(8192, 7168), (8192, 2048), (4096, 3584), (16384, 4096)])
@pytest.mark.parametrize("recipe", ["tensor_wise", "row_wise"])
@pytest.mark.parametrize("world", [2, 4])
def test_fp8_planner_takes_the_kernels_over_peers_with_fast_accumulation(m, nk, recipe, world):
    for op in (Op.GEMM_ALLREDUCE, Op.GEMM_REDUCESCATTER):
        problem = Problem(m, *nk, "float8_e4m3fn", world, op, recipe, fast_accum=True)
        plan = make_plan(problem, H200)
        assert plan.kernel in PINGPONG and over_peers(plan), problem
        # Between four ranks the shortest ones send all partial sums at once.
        assert plan.collective == Collective.RING or (world, m) == (4, 4096), problem
        assert gain(plan, H200) > (1.2 if world == 2 else 1.05), problem
    gather = Problem(m, *nk, "float8_e4m3fn", world, Op.ALLGATHER_GEMM, recipe, fast_accum=True)
    assert over_peers(make_plan(gather, H200)), gather


def test_fp8_planner_leaves_parts_whole_that_the_frameworks_gemm_of_blocks_does_not_take():
    """8204 rows are fours, 4102 are not."""
    for op in (Op.GEMM_REDUCESCATTER, Op.ALLGATHER_GEMM):
        problem = scaled(op, recipe=Recipe.BLOCK_WISE, m=8204)
        schedules = {plan.schedule for plan in plans.candidates(problem, H200, True)}
        assert schedules == {Schedule.SEQUENTIAL}
        assert len(in_chunks(scaled(op, m=8204))) > 1
    # Nobody takes 8206.
    assert len(in_chunks(scaled(op, recipe=Recipe.BLOCK_WISE, m=8206))) > 1


def in_chunks(problem: Problem, machine: plans.Machine = H200) -> list[Plan]:
    found = plans.candidates(problem, machine, True)
    return [plan for plan in found if plan.schedule == Schedule.OVERLAPPED]


@every_op
def test_fp8_plans_of_few_rows_are_direct(op):
    rows = {Op.GEMM_ALLREDUCE: 16, Op.GEMM_REDUCESCATTER: 256, Op.ALLGATHER_GEMM: 128}
    if op not in rows:
        pytest.skip("all-to-alls have one plan")
    kernels = set()
    for fast in (False, True):
        problem = Problem(rows[op], 8192, 7168, "float8_e4m3fn", 2, op, "row_wise", fast_accum=fast)
        direct = [
            plan
            for plan in plans.candidates(problem, H200)
            if over_peers(plan) and plan.collective != Collective.RING and len(plan.chunks) == 1
        ]
        assert direct
        kernels |= {(fast, plan.kernel) for plan in direct if plan.collective == Collective.DIRECT}
        assert make_plan(problem, H200) in direct
    if op != Op.ALLGATHER_GEMM:
        both = {(fast, Kernel.LIBRARY) for fast in (False, True)}
        assert kernels == both | {(True, Kernel.SM90_PINGPONG)}


@every_op
@pytest.mark.parametrize(
    "changes",
    [
        {"recipe": Recipe.BLOCK_WISE},
        {"output_dtype": DType.FLOAT16},
        {"k": 7176},
        {"dtype": DType.FLOAT8_E5M2, "n": 8196},
        {"fast_accum": False},
    ],
    ids=str,
)
def test_fp8_plans_of_what_no_kernel_takes_are_the_librarys(op, changes):
    for plan in plans.candidates(scaled(op, **{"fast_accum": True, **changes}), H200):
        assert plan.kernel == Kernel.LIBRARY


@pytest.mark.parametrize(
    ("changes", "way", "message"),
    [
        ({}, "sm90_cooperative", "float8_e4m3fn tensor_wise to bfloat16.*sm90_pingpong"),
        ({}, "sm80", "given float8_e4m3fn"),
        ({"recipe": Recipe.BLOCK_WISE}, "sm90_pingpong", "block_wise.*library"),
        ({"output_dtype": DType.FLOAT32}, "sm90_pingpong_wide", "to float32"),
        ({"fast_accum": False}, "sm90_pingpong", "without fast_accum.*use_fast_accum.*library"),
        ({"recipe": Recipe.ROW_WISE}, "gloo", "scaled .*row_wise.* transport gloo.*sequential"),
    ],
)
def test_fp8_plans_of_ways_that_do_not_take_them_are_refused(changes, way, message):
    problem = scaled(Op.GEMM_ALLREDUCE, **{"fast_accum": True, **changes})
    with pytest.raises(ValueError, match=message):
        row_panels(problem, 4, **{"transport" if way == "gloo" else "kernel": way})


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (Problem(8, 8, 8, "float8_e4m3fn", 2), "float8_e4m3fn has the recipe none"),
        (Problem(8, 8, 8, "bfloat16", 2, recipe="row_wise"), "bfloat16 has the recipe row_wise"),
        (
            Problem(8, 8, 8, "float8_e5m2", 2, recipe="row_wise", output_dtype="float64"),
            "output_dtype float64, allowed are bfloat16",
        ),
        (
            Problem(8, 8, 8, "float8_e5m2", 2, recipe="row_wise", output_dtype="float8_e5m2"),
            "output_dtype",
        ),
        (Problem(8, 8, 8, "bfloat16", 2, fast_accum=True), "bfloat16 has fast_accum"),
    ],
)
def test_fp8_problems_that_are_none_are_refused(problem, message):
    with pytest.raises(ValueError, match=message):
        make_plan(problem, H200)
    plan = make_plan(Problem(8, 8, 8, "bfloat16", 2), H200)
    plan.problem = problem
    with pytest.raises(ValueError, match=message):
        plans.validate(plan)
