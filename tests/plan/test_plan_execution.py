"""Plans set by hand: the op runs them, whatever they are, and its results do not depend on them."""

import pytest
import torch
import torch.distributed as dist

import overlap_torch
from checks import Failures, check_call, check_plan
from operands import Case, in_layouts_of_rank, place, rank_device, subgroup, world_name
from ops import OPS, every_op
from overlap_torch import plan as plan_module
from overlap_torch.plan import Plan
from overlap_torch.plan.types import Kernel, Layout, Schedule
from peers import fixed_counts
from plans import GPU_KERNELS, overlapped_plans, sequential_plan
from tests import _plan_test

# Tiles of 16 x 8, so that small outputs have many chunks.
CPU_TILE = (16, 8)
CPU_CASES = [
    Case((64,), 32, 24), Case((63,), 31, 5, bias=True), Case((65,), 33, 1), Case((5, 13), 40, 16),
    Case((1,), 1, 3, bias=True), Case((1,), 70, 9), Case((70,), 1, 9), Case((97,), 8, 20, bias=True),
    Case((128,), 64, 16, bias=True, weight_layout="n_contiguous"), Case((3, 33), 17, 24, bias=True, dim=1),
    Case((2, 2, 32), 17, 24, dim=-2),
]  # fmt: skip
# Around tiles of 128 x 128 and 128 x 256, in clusters of two; N and K multiples of 8, as kernels with 16-byte copies
# take them, and others, which they do not.
GPU_CASES = [
    Case((512,), 512, 128), Case((500,), 520, 136, bias=True), Case((129,), 264, 64), Case((1,), 128, 8),
    Case((127,), 8, 72, bias=True), Case((3, 300), 768, 256), Case((1024,), 1024, 64, bias=True),
    Case((513,), 129, 33), Case((257,), 250, 40, bias=True), Case((640,), 384, 1),
    Case((512,), 512, 192, bias=True, weight_layout="n_contiguous"),
    Case((385,), 520, 64, weight_layout="n_padded"), Case((300,), 256, 64, input_layout="offset"),
    Case((300,), 256, 64, weight_layout="k_offset"), Case((256,), 256, 2048), Case((2, 256), 512, 128, dim=1),
    Case((5, 128), 264, 64, bias=True, dim=1), Case((3, 100), 264, 64, dim=1), Case((2, 600), 264, 64, bias=True, dim=1),
    Case((2, 3, 256), 256, 64, weight_layout="n_contiguous", dim=-2), Case((150, 2), 264, 64, bias=True, dim=1),
]  # fmt: skip
GPU_RESOURCES = [
    {"comm_sms": 0, "max_ctas": 0},
    {"comm_sms": 16, "max_ctas": 8},
    {"comm_sms": 8, "max_ctas": 8, "window": True},
]


def check_plans(
    failures: Failures,
    op: str,
    cases: list[Case],
    kernel: Kernel,
    tile: tuple[int, int] | None,
    resources: dict[str, object],
) -> None:
    world, device_type = dist.get_world_size(), rank_device().type
    for case in OPS[op].of(cases):
        plans = overlapped_plans(case, world, device_type, kernel, tile, op, **resources)
        for label, plan in plans:
            check_plan(failures, case, plan, label, kernel.name, resources, op=op)
        sequential = sequential_plan(case, world, device_type, op)
        check_plan(failures, case, sequential, "sequential", op=op)


@every_op
@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (3, "gloo"), long=[(4, "gloo")])
def test_plan_execution_is_exact_under_every_plan_on_cpu(ranks, op):
    """Each number of ranks has a data type of its own."""
    dtype = (torch.float64, torch.float32, torch.bfloat16, torch.float16)[ranks.world - 1]
    cases = [case.with_(dtype=dtype) for case in CPU_CASES]
    if ranks.world == 1:
        cases = cases[:4]
    ranks.expect_no_failures(check_plans, op, cases, Kernel.LIBRARY, CPU_TILE, {})


@pytest.mark.long
@every_op
@pytest.mark.ranks((8, "gloo"))
def test_plan_execution_is_exact_between_eight_ranks_on_cpu(ranks, op):
    cases = [Case((49,), 31, 5, torch.bfloat16, bias=True), Case((40,), 8, 12, torch.float32)]
    ranks.expect_no_failures(check_plans, op, cases, Kernel.LIBRARY, CPU_TILE, {})


@pytest.mark.parametrize("kernel", GPU_KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_op
@pytest.mark.ranks((2, "nccl"), (4, "nccl"))
def test_plan_execution_is_exact_under_every_plan_and_kernel(ranks, op, dtype, kernel):
    ranks.skip_without_kernel(kernel)
    cases = [case.with_(dtype=dtype) for case in GPU_CASES]
    for resources in GPU_RESOURCES if dtype == torch.bfloat16 else GPU_RESOURCES[1:2]:
        ranks.expect_no_failures(check_plans, op, cases, kernel, None, resources)


@every_op
@pytest.mark.ranks((2, "nccl"))
def test_plan_execution_is_exact_in_float32_on_gpu(ranks, op):
    cases = [case.with_(dtype=torch.float32) for case in GPU_CASES]
    ranks.expect_no_failures(check_plans, op, cases, Kernel.LIBRARY, (64, 64), {"comm_sms": 8})


def check_layouts_under_plans(
    failures: Failures, op: str, kernel: Kernel, tile: tuple[int, int] | None
) -> None:
    """Every rank has other strides and alignments: some take the kernel, others must follow with another GEMM."""
    rank, world, device_type = dist.get_rank(), dist.get_world_size(), rank_device().type
    case = Case((260,), 264, 64, torch.bfloat16, bias=True)
    plans = overlapped_plans(case, world, device_type, kernel, tile, op)
    for turn, (label, plan) in enumerate(plans):
        mine = in_layouts_of_rank(case, turn, rank)
        check_plan(failures, mine, plan, label, kernel.name, op=op)


@every_op
@pytest.mark.ranks((2, "gloo"), (3, "gloo"))
def test_plan_execution_takes_layouts_that_differ_between_ranks_on_cpu(ranks, op):
    ranks.expect_no_failures(check_layouts_under_plans, op, Kernel.LIBRARY, (64, 32))


@pytest.mark.parametrize("kernel", GPU_KERNELS, ids=lambda kernel: kernel.name)
@every_op
@pytest.mark.ranks((2, "nccl"), (4, "nccl"))
def test_plan_execution_takes_layouts_that_differ_between_ranks(ranks, op, kernel):
    ranks.skip_without_kernel(kernel)
    ranks.expect_no_failures(check_layouts_under_plans, op, kernel, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.ranks((2, "gloo"), (3, "gloo"))
def test_plan_execution_cuts_many_rows_of_an_alltoall(
    failures: Failures, dtype: torch.dtype
) -> None:
    """Rows for a peer that are many travel in pieces, which leave while later ones are computed."""
    case = Case((3000,), 1027, 16, dtype, bias=True)
    op = OPS["gemm_alltoall"]
    rank = dist.get_rank()
    with overlap_torch.trace() as traced:
        for seed in range(3):
            check_call(failures, case, seed=seed, op=op.name)
    for seed in range(3):
        counts = op.arguments(case, *place(), seed)[2]
        sent = [count for peer, count in enumerate(counts) if peer != rank and count > 0]
        pieces = len(traced.calls[seed].chunks)
        # Three megabytes at least.
        cut = pieces > len(sent) if max(sent, default=0) >= case.m / 2 else pieces >= len(sent)
        failures.expect(None if cut else f"{pieces} pieces of rows {counts}", case, seed)


@pytest.mark.parametrize("kernel", GPU_KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.ranks((2, "nccl"), (4, "nccl"))
def test_plan_execution_sends_many_rows_of_an_alltoall_over_nccl(
    failures: Failures, kernel: Kernel
) -> None:
    """Between two ranks one exchange beside the own rows, between more of them pieces; few rows one step of either."""
    world = dist.get_world_size()
    for rows in (9000, 640, 100):
        for bias in (False, True):  # with one the framework computes
            case = Case((rows,), 2056, 64, torch.bfloat16, bias=bias)
            for label, plan in overlapped_plans(
                case, world, "cuda", kernel, op="gemm_alltoall", comm_sms=24, max_ctas=24
            ):
                check_plan(failures, case, plan, label, kernel.name, op="gemm_alltoall")
                # Ranks of which some have operands that the kernel cannot take make the same calls.
                layout = "offset" if dist.get_rank() == 0 else "contiguous"
                mine = case.with_(input_layout=layout)
                check_plan(failures, mine, plan, label, kernel.name, op="gemm_alltoall")


@pytest.mark.parametrize("kernel", GPU_KERNELS[1:], ids=lambda kernel: kernel.name)
@pytest.mark.ranks((2, "nccl"))
def test_plan_execution_computes_rows_of_an_alltoall_apart_or_in_turn(
    failures: Failures, kernel: Kernel
) -> None:
    """Each of two ranks chooses by its own rows: first the peer's, then its own beside the exchange, or all and then it."""
    rank = dist.get_rank()
    case = Case((0,), 2056, 2048, torch.bfloat16)
    resources = {"comm_sms": 24, "max_ctas": 24}
    ((_, plan),) = overlapped_plans(case, 2, "cuda", kernel, op="gemm_alltoall", **resources)
    machine = plan_module.machine(rank_device())
    for counts in (
        [[16384, 16384], [16384, 16384]],
        [[6000, 3000], [3000, 6000]],
        # One rank sends nearly all that it has, the other hardly anything.
        [[200, 16000], [40, 300]],
        [[4000, 5000], [0, 0]],
        [[100, 130], [130, 100]],
    ):
        receive = [row[rank] for row in counts]
        sms = machine.sm_count - 24
        apart = _plan_test.computes_apart(plan, machine, rank, counts[rank], receive, sms)
        with fixed_counts(counts):
            for _ in range(3):
                check_plan(failures, case, plan, counts, "apart", apart, op="gemm_alltoall")


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_plan_execution_keeps_plans_by_group_and_problem(failures: Failures) -> None:
    """A plan belongs to one group and one problem, and goes with the end of use_plan, or with clear_plans."""
    world, device = dist.get_world_size(), rank_device()
    case = Case((64,), 32, 24, torch.float32, bias=True)
    second = subgroup(tuple(range(world)), "second")
    tile = CPU_TILE if device.type == "cpu" else (16, 16)
    plan = dict(overlapped_plans(case, world, device.type, tile=tile))["packed 1, bands of 1"]

    def current(group: dist.ProcessGroup | None, m: int = 64) -> Plan:
        return plan_module.plan_for(m, 32, 24, torch.float32, device=device, group=group)

    planned = current(None)
    failures.equal(planned.layout, Layout.ROW_MAJOR, "is packed from the start")
    with plan_module.use_plan(plan):
        failures.equal(current(None), plan, "use_plan did not set the plan")
        failures.equal(current(second), planned, "the plan reached another group")
        other = current(None, m=65)
        failures.equal(other.problem.m, 65)
        for group in (None, second):
            check_call(failures, case, "beside another group", group=group)
    failures.equal(current(None), planned, "use_plan left its plan behind")
    plan_module.set_plan(plan)
    failures.equal(current(None), plan, "set_plan did not set the plan")
    plan_module.clear_plans()
    failures.equal(current(None), planned, "clear_plans left a plan behind")
    check_call(failures, case, "after clear_plans")
    try:
        with plan_module.use_plan(plan):
            raise KeyError("from inside")
    except KeyError:
        pass
    failures.equal(current(None), planned, "use_plan left its plan after an exception")
    # Names come back: a group that follows a destroyed one must not inherit its plans.
    for _ in range(3):
        third = dist.new_group()
        check_call(failures, case, "in a new group", group=third)
        failures.equal(current(third), planned, third.group_name, "a new group has plans")
        plan_module.set_plan(plan, group=third)
        check_call(failures, case, "in a new group", group=third)
        dist.destroy_process_group(third)


@pytest.mark.ranks((2, "gloo"), (4, "gloo"))
def test_plan_execution_has_one_piece_for_small_problems_on_cpu(failures: Failures) -> None:
    for op in ("gemm_allreduce", "gemm_reducescatter", "allgather_gemm"):
        for sizes in ((1500, 64, 64), (1500, 64, 256), (600, 256, 256)):
            plan = plan_module.plan_for(*sizes, torch.float32, device="cpu", op=op)
            failures.equal(plan.schedule, Schedule.SEQUENTIAL, op, sizes)


@pytest.mark.ranks((2, "gloo"))
def test_plan_execution_keeps_plans_of_what_was_called_last(failures: Failures) -> None:
    """More problems than a group keeps plans of, one called between all others, one planned by hand."""
    first, problems = 4000, 5000
    plan_module.clear_plans()

    def ask(m: int) -> Plan:
        return plan_module.plan_for(m, 64, 64, "float32", device="cpu")

    def held() -> int:
        return torch.ops.overlap.plan_count(world_name())

    def called(m: int) -> None:
        for _ in range(2):  # what was not called has no row in the table
            overlap_torch.gemm_allreduce(torch.ones(m, 64), torch.ones(64, 64))

    failures.equal(held(), 0, "clear_plans left plans")
    by_hand = plan_module.candidates(ask(1024).problem, plan_module.machine("cpu"))[-1]
    failures.expect(None if by_hand != ask(1024) else "the planner's own plan")
    plan_module.set_plan(by_hand)
    called(first)
    most = 0
    for m in range(first + 1, first + problems):
        ask(m)
        ask(first)
        most = max(most, held())
    called(first)
    failures.expect(None if 2048 <= held() <= most <= 4097 else f"up to {most} plans")
    failures.equal(ask(1024), by_hand, "the plan that was set is gone")
    rows = [row for row in torch.ops.overlap.plan_table() if row["m"] == str(first)]
    counted = [row["calls"] for row in rows if row["n"] == "64" and row["device"] == "cpu"]
    failures.equal(counted, ["4"])
    plan_module.clear_plans()
    failures.equal(held(), 0, "clear_plans left plans")
