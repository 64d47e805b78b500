"""Plans of scaled operands on GPUs: whatever plan is set, results are equal bit for bit."""

import itertools
import math
from functools import partial

import pytest
import torch
import torch.distributed as dist

import overlap_torch
import scaled
from captures import capture
from checks import Failures
from operands import rank_device
from overlap_torch import plan as plan_api
from overlap_torch.plan import Plan, Problem
from overlap_torch.plan._explain import H200
from overlap_torch.plan.types import Kernel, Op, Resources, Transport
from peers import ALWAYS_ONE_LAUNCH
from plans import peers_work
from scaled import E4M3, E5M2, Case

every_op = pytest.mark.parametrize("op", scaled.OPS)
by_pingpong = pytest.mark.parametrize("kernel", [Kernel.SM90_PINGPONG], ids=lambda one: one.name)

FP8_KERNELS = (Kernel.SM90_PINGPONG, Kernel.SM90_PINGPONG_WIDE)

# Around tiles of 128 x 128 and 128 x 192; K a multiple of 16, N of 8, as kernels take them, and others.
CASES = [
    Case((512,), 512, 128, "row", fast=True),
    Case((300,), 520, 272, "row", bias=True, fast=True),
    Case((129,), 264, 64, "row", (E5M2, E4M3), fast=True),
    Case((256,), 384, 192, "tensor", fast=True),
    Case((256,), 384, 192, "tensor", shared=True, bias=True, fast=True),
    Case((1,), 128, 16, "row", fast=True),
    Case((3, 100), 256, 144, "row", fast=True, layout="leading"),
    Case((256,), 384, 192, "row", fast=True, layout="transposed"),
    # Sums in float32 and blocks are the framework's, as is the third pair of types, whatever the plan.
    Case((384,), 256, 256, "row"),
    Case((384,), 256, 256, "tensor", (E4M3, E5M2), fast=True),
    Case((384,), 256, 512, "block"),
    Case((130,), 100, 40, "row", bias=True, fast=True),
]


@pytest.fixture
def ranks(ranks):
    ranks.environment = ALWAYS_ONE_LAUNCH
    return ranks


def problem_of(case: Case, op: str, world: int) -> Problem:
    rows = math.prod(case.leading)
    widths = [case.n, (case.n + 1) // 2, case.n % 2] if op == "weights" else [case.n]
    m = {"gemm_allreduce": rows, "gemm_alltoall": 0}.get(op, rows * world)
    kind = "allgather_gemm" if op == "weights" else op
    types = (case.pair[0], world, kind, f"{case.recipe}_wise", case.output, case.fast)
    return Problem(m, sum(widths), case.k, *types)


def plans_of(problem: Problem, kernel: Kernel, transport: str) -> list[Plan]:
    """Row panels in several cuts; packed tiles; in one step; what a problem has one way of."""
    peers = transport == "peer"
    if problem.op == Op.GEMM_ALLTOALL:
        made = Transport.__members__[transport.upper()]
        resources = Resources(comm_sms=0 if peers and problem.world_size == 2 else 8)
        plans = [plan_api.templates.make_all_to_all(problem, kernel, resources, 8, made)]
        if peers and kernel in FP8_KERNELS:
            one = plan_api.templates.make_all_to_all(
                problem, kernel, Resources(one_launch=True), 0, made
            )
            plans.append(one)
        return plans
    options = {"kernel": kernel, "transport": transport}
    whole = plan_api.templates.row_panels(problem, 1, **options)
    plans = [whole]
    if not peers or problem.op == Op.ALLGATHER_GEMM:
        rows = whole.tiles_m // (problem.world_size if peers else problem.row_parts)
        plans.append(
            plan_api.templates.row_panels(
                problem, max(1, min(4, rows // whole.cluster_m)), **options
            )
        )
    if peers and _in_one_step(problem, kernel):
        plans.append(plan_api.templates.at_once(problem, kernel=kernel))
    if problem.op == Op.GEMM_ALLREDUCE and not peers:
        chunks = min(5, whole.tiles_m * whole.tiles_n)
        plans.append(plan_api.templates.packed(problem, chunks, **options))
        if problem.world_size == 2:
            plans.append(
                plan_api.templates.packed(problem, chunks, collective="exchange", **options)
            )
    return plans


def _in_one_step(problem: Problem, kernel: Kernel) -> bool:
    """True if at_once makes a plan of it that row_panels does not."""
    if problem.op == Op.ALLGATHER_GEMM:
        return kernel == Kernel.LIBRARY and problem.k % 16 == 0
    element = getattr(torch, problem.output_dtype.name.lower()).itemsize
    parted = kernel == Kernel.LIBRARY or problem.m % problem.world_size == 0
    return problem.n * element % 16 == 0 and parted


@pytest.mark.parametrize("transport", ["nccl", pytest.param("peer", marks=pytest.mark.peers)])
@pytest.mark.parametrize("kernel", [Kernel.LIBRARY, *FP8_KERNELS], ids=lambda kernel: kernel.name)
@every_op
@pytest.mark.ranks((2, "nccl"), (4, "nccl"))
def test_fp8_plan_execution_is_exact_under_every_plan(
    failures: Failures, op: str, kernel: Kernel, transport: str
) -> None:
    world = dist.get_world_size()
    tried = 0
    for seed, case in enumerate(CASES):
        problem = problem_of(case, op, world)
        try:
            plans = plans_of(problem, kernel, transport)
        except ValueError as error:  # a kernel or a transport that this problem does not have
            failures.expect(
                None if "allowed" in str(error) or "take" in str(error) else str(error), case
            )
            continue
        for plan in plans:
            plan_api.set_plan(plan)
            scaled.check(failures, case, op, seed)
            scaled.check(failures, case, op, seed)  # warm
            tried += 1
        plan_api.clear_plans()
    failures.expect(None if tried > 3 else f"only {tried} plans", op, kernel, transport)


# Enough for all kinds of plans: blocks take K a multiple of 512, gathers over peers 128 KiB.
WEIGHED = [
    Case((rows,), 512, 512, recipe, fast=fast)
    for rows in (512, 64)
    for recipe in scaled.RECIPES
    for fast in (False, True)
]


@every_op
@pytest.mark.ranks((2, "nccl"), (4, "nccl"))
def test_fp8_plans_that_the_planner_weighs_are_exact(failures: Failures, op: str) -> None:
    """A plan of each kind that the planner weighs as between H200s, and what it takes here."""
    world = dist.get_world_size()
    machine = plan_api.machine(rank_device())
    machine.link_gbps, machine.link_latency_us = H200.link_gbps, H200.link_latency_us
    machine.peer_gbps = H200.peer_gbps if machine.peer_gbps > 0 else 0.0
    kinds = set()
    for seed, case in enumerate(WEIGHED):
        scaled.check(failures, case, op, seed)
        plans = {}
        for plan in plan_api.candidates(problem_of(case, op, world), machine, True):
            transport = plan.chunks[0].transport
            kind = (plan.kernel, transport, plan.collective, plan.layout, plan.resources.window)
            plans.setdefault((*kind, len(plan.chunks) > 1), plan)
        for kind, plan in plans.items():
            plan_api.set_plan(plan)
            scaled.check(failures, case, op, seed)
            kinds.add(kind[:2])
        plan_api.clear_plans()
    kernels = {kernel for kernel, _ in kinds}
    own = bool(kernels & set(FP8_KERNELS)) or machine.kernel_arch < 90
    failures.expect(None if own and Kernel.LIBRARY in kernels else f"only {kinds}", op)
    over = {transport for _, transport in kinds}
    failures.equal(Transport.PEER in over, machine.peer_gbps > 0, op)


@pytest.mark.races
@by_pingpong
@pytest.mark.ranks((2, "nccl"), (4, "nccl"))
def test_fp8_calls_in_flight_do_not_race(failures: Failures, kernel: Kernel) -> None:
    """Calls in flight, none waiting for the one before; operands by turns, ranks delayed at random."""
    world, rank, device = dist.get_world_size(), dist.get_rank(), rank_device()
    runs = []
    transports = ("nccl", "peer") if peers_work() else ("nccl",)
    cases = [Case((512,), 512, 512, "row", fast=True), Case((256,), 768, 256, "tensor", fast=True)]
    for (op, transport), case in zip(
        itertools.product(scaled.OPS, transports), itertools.cycle(cases)
    ):
        problem = problem_of(case, op, world)
        plan_api.set_plan(plans_of(problem, kernel, transport)[-1])
        for seed in range(3):
            calls = [scaled.make(case, op, r, world, seed) for r in range(world)]
            right = [t.to(device) for t in scaled.expected(case, op, calls, rank)]
            runs.append((op, transport, case, calls[rank], right))
    generator = torch.Generator().manual_seed(rank)
    wrong = torch.zeros(len(runs), dtype=torch.int64, device=device)
    order = torch.Generator().manual_seed(0)  # the same on all ranks
    for _ in range(1000):
        index = int(torch.randint(len(runs), (), generator=order))
        op, _, case, call, right = runs[index]
        if int(torch.randint(4, (), generator=generator)) == 0:
            torch.cuda._sleep(int(torch.randint(200_000, (), generator=generator)))
        results = scaled.invoke(case, op, call, device)
        for result, value in zip(results, right, strict=True):
            same = scaled.as_comparable(result) == scaled.as_comparable(value)
            wrong[index] += (~same).sum()
    plan_api.clear_plans()
    for (op, transport, case, *_), count in zip(runs, wrong.tolist(), strict=True):
        failures.expect(f"{count} wrong elements" if count else None, op, transport, case)


@by_pingpong
@pytest.mark.ranks((2, "nccl"))
def test_fp8_plans_are_captured_and_replayed(failures: Failures, kernel: Kernel) -> None:
    world, rank, device = dist.get_world_size(), dist.get_rank(), rank_device()
    for op in ("gemm_allreduce", "gemm_reducescatter", "allgather_gemm"):
        case = Case((256,), 256, 256, "row", fast=True)
        problem = problem_of(case, op, world)
        plan_api.set_plan(
            plan_api.templates.row_panels(problem, 1, kernel=kernel, transport="nccl")
        )
        call = scaled.make(case, op, rank, world, 5)
        inputs = [
            each.to(device)
            for each in (call.input, call.weights[0], call.scale_input, call.scale_weights[0])
        ]
        scales = {"scale_input": inputs[2], "scale_weight": inputs[3]}
        function = partial(getattr(overlap_torch, op), *inputs[:2], **scales, use_fast_accum=True)
        graph, results = capture(function)
        results = results if isinstance(results, tuple) else (results,)
        calls = [scaled.make(case, op, r, world, 6) for r in range(world)]
        own = calls[rank]
        for place, value in zip(
            inputs, (own.input, own.weights[0], own.scale_input, own.scale_weights[0]), strict=True
        ):
            place.copy_(value)
        for result in results:
            result.view(torch.uint8).fill_(0xFF)
        graph.replay()
        torch.cuda.synchronize()
        for result, value in zip(results, scaled.expected(case, op, calls, rank), strict=True):
            same = torch.equal(scaled.as_comparable(result).cpu(), scaled.as_comparable(value))
            failures.expect(None if same else "differs", op)
    plan_api.clear_plans()
