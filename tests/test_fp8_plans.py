"""Problems of scaled operands: types and recipe in plans, their texts, JSON, prices, and what is refused."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from overlap_torch import plan as plans
from overlap_torch._explain import H200
from overlap_torch.plan import DType, Kernel, Op, Problem, Recipe, Schedule

every_op = pytest.mark.parametrize("op", list(Op.__members__.values()), ids=lambda op: op.name)

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
    half = Problem(8, 8, 8, "float8_e5m2", 2, recipe="block_wise", output_dtype=torch.float16)
    assert half.output_dtype == DType.FLOAT16 and half != SCALED
    plain = Problem(8, 8, 8, torch.float16, 2)
    assert (plain.recipe, plain.output_dtype) == (Recipe.NONE, DType.FLOAT16)
    assert repr(plain).endswith("float16 world_size=2")  # as ever


def test_fp8_plans_are_saved_and_read():
    plan = plans.make_plan(SCALED, H200)
    assert plans.decode(plans.encode(plan)) == plan
    assert plans.from_json(plans.to_json(plan)) == plan
    # Plans of a release that knew no scales.
    old = json.loads(plans.to_json(plans.make_plan(Problem(8, 8, 8, torch.float16, 2), H200)))
    del old["problem"]["recipe"], old["problem"]["output_dtype"]
    assert plans.from_dict(old).problem == Problem(8, 8, 8, torch.float16, 2)


@every_op
def test_fp8_plans_are_sequential_on_cpu(op):
    cpu = plans.Machine(sm_count=4, sm_gflops=20.0, link_gbps=1.0)
    found = plans.candidates(scaled(op), cpu)
    assert [plan.schedule for plan in found] == [Schedule.SEQUENTIAL]
    assert plans.make_plan(scaled(op), cpu) == found[0]


@every_op
@pytest.mark.parametrize("peers", [False, True])
def test_fp8_plans_on_hopper_are_ping_pongs_or_the_librarys(op, peers):
    machine = copy.copy(H200)
    machine.peer_gbps = machine.link_gbps if peers else 0.0
    found = [
        plan
        for plan in plans.candidates(scaled(op), machine)
        if plan.schedule == Schedule.OVERLAPPED
    ]
    pingpong = {Kernel.SM90_PINGPONG, Kernel.SM90_PINGPONG_WIDE}
    kernels = {plan.kernel for plan in found}
    assert kernels & pingpong
    assert kernels <= pingpong | {Kernel.LIBRARY}
    for plan in found:
        plans.validate(plan)
        assert plans.from_json(plans.to_json(plan)) == plan
    # Whether a caller takes the kernels' sums the planner does not know.
    if op != Op.GEMM_ALLTOALL:
        assert Kernel.LIBRARY in kernels
        assert plans.make_plan(scaled(op), machine).kernel == Kernel.LIBRARY


@every_op
@pytest.mark.parametrize(
    "changes",
    [
        {"recipe": Recipe.BLOCK_WISE},
        {"output_dtype": DType.FLOAT16},
        {"k": 7176},
        {"dtype": DType.FLOAT8_E5M2, "n": 8196},
    ],
    ids=str,
)
def test_fp8_plans_of_what_no_kernel_takes_are_the_librarys(op, changes):
    for plan in plans.candidates(scaled(op, **changes), H200):
        assert plan.kernel == Kernel.LIBRARY


@pytest.mark.parametrize(
    ("changes", "kernel", "message"),
    [
        ({}, "sm90_cooperative", "float8_e4m3fn tensor_wise to bfloat16.*sm90_pingpong"),
        ({}, "sm80", "given float8_e4m3fn"),
        ({"recipe": Recipe.BLOCK_WISE}, "sm90_pingpong", "block_wise.*library"),
        ({"output_dtype": DType.FLOAT32}, "sm90_pingpong_wide", "to float32"),
    ],
)
def test_fp8_plans_of_kernels_that_do_not_take_them_are_refused(changes, kernel, message):
    with pytest.raises(ValueError, match=message):
        plans.row_panels(scaled(Op.GEMM_ALLREDUCE, **changes), 4, kernel=kernel)


def test_fp8_plans_in_chunks_over_gloo_are_refused():
    with pytest.raises(ValueError, match="scaled operands .*row_wise.* transport gloo.*sequential"):
        plans.row_panels(SCALED, 4, transport="gloo")


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
    ],
)
def test_fp8_problems_that_are_none_are_refused(problem, message):
    with pytest.raises(ValueError, match=message):
        plans.make_plan(problem, H200)
    plan = plans.make_plan(Problem(8, 8, 8, "bfloat16", 2), H200)
    plan.problem = problem
    with pytest.raises(ValueError, match=message):
        plans.validate(plan)


def test_fp8_gemm_takes_half_the_time_and_a_gather_half_the_bytes():
    for op in (Op.GEMM_ALLREDUCE, Op.GEMM_REDUCESCATTER, Op.ALLGATHER_GEMM):
        plain = Problem(8192, 8192, 7168, torch.bfloat16, 2, op)
        before, after = (
            plans.make_sequential(problem, H200).explain(H200) for problem in (plain, scaled(op))
        )
        gemms, collectives = zip(*(_times(one) for one in (before, after)), strict=True)
        assert 1.9 < gemms[0] / gemms[1] <= 2.01, op
        sizes = [_collective_size(one) for one in (before, after)]
        assert sizes[0] / sizes[1] == (2.0 if op == Op.ALLGATHER_GEMM else 1.0), op
        if op == Op.ALLGATHER_GEMM:
            assert collectives[1] < 0.6 * collectives[0]
        else:
            assert collectives[1] == pytest.approx(collectives[0])


def _times(explanation) -> tuple[float, float]:
    gemm = collective = 0.0
    for step in explanation.steps:
        if "gemm" in step.words:
            gemm += step.end_us - step.begin_us
        else:
            collective += step.end_us - step.begin_us
    return gemm, collective


def _collective_size(explanation) -> float:
    """MiB a rank, as its words say."""
    (words,) = [step.words for step in explanation.steps if "a rank" in step.words]
    return float(words.split(", ")[1].removesuffix(" MiB a rank"))
