"""Plans whose chunks travel through memory that the ranks map into each other: results, order, graphs, refusals."""

from __future__ import annotations

import random
import time
from collections import deque

import pytest
import torch
import torch.distributed as dist

import overlap_torch
import rank_pool
from checks import Failures, check_call, check_plan, message_of
from operands import (
    INPUT_LAYOUTS,
    WEIGHT_LAYOUTS,
    Case,
    difference,
    poison,
    rank_device,
    world_name,
)
from ops import OPS, Arguments, tensors_of
from overlap_torch import plan as plan_module
from overlap_torch.plan import Chunk, Kernel, Op, Plan, Problem, Resources, Transport
from plans import chunked_plan

PEER_OPS = ["gemm_allreduce", "gemm_reducescatter", "allgather_gemm", "allgather_gemm.weights"]
KERNELS = [Kernel.SM90_PINGPONG, Kernel.LIBRARY]
every_op = pytest.mark.parametrize("op", PEER_OPS)
every_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)

# (rows of one rank's part, n, k), around tiles of 128 x 128 in clusters of two. Parts that end inside a tile and inside a
# cluster, odd numbers of tiles, eight chunks, and sizes that the kernels do not take.
SHAPES = [
    (131, 264, 72), (1, 8, 8), (257, 1000, 136), (384, 384, 64), (2000, 264, 72), (640, 1000, 2048),
    (96, 129, 33),
]  # fmt: skip


def peer_case(op: str, rows: int, n: int, k: int, dtype: torch.dtype, **rest: object) -> Case:
    """A call of which every rank's part is `rows` high."""
    parts = 1 if OPS[op].cuts_rows else dist.get_world_size()
    return Case((parts * rows,), n, k, dtype, **rest)


def peer_plan(case: Case, op: str, chunks: int, kernel: Kernel) -> Plan:
    return chunked_plan(case, dist.get_world_size(), "cuda", "peers", chunks, kernel, op=op)


def over_peers(plan: Plan) -> bool:
    return plan.chunks[0].transport == Transport.PEER


def skip_unless_it_runs(ranks, kernel: Kernel = Kernel.LIBRARY) -> None:
    ranks.skip_without_kernel(kernel)
    ranks.skip_without_peers()


# --- results ----------------------------------------------------------------------------------------


def check_shapes(op: str, dtype: torch.dtype, kernel: Kernel) -> tuple[int, list[str]]:
    failures = Failures()
    for rows, n, k in SHAPES:
        for weight_layout in ("k_contiguous", "n_contiguous"):
            for bias in (False, True):
                case = peer_case(op, rows, n, k, dtype, bias=bias, weight_layout=weight_layout)
                for chunks in (1, 3, 8):
                    plan = peer_plan(case, op, chunks, kernel)
                    if len(plan.chunks) == chunks:
                        check_plan(failures, case, plan, chunks, "chunks", kernel.name, op=op)
    return failures.result()


@every_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_op
@pytest.mark.ranks((2, "nccl"), (4, "nccl"))
def test_peers_are_exact(ranks, op, dtype, kernel):
    skip_unless_it_runs(ranks, kernel)
    ranks.expect_no_failures(check_shapes, op, dtype, kernel, timeout_s=300)


@every_op
@pytest.mark.ranks((2, "nccl"), (4, "nccl"))
def test_peers_are_exact_in_float32(ranks, op):
    skip_unless_it_runs(ranks)
    ranks.expect_no_failures(check_shapes, op, torch.float32, Kernel.LIBRARY, timeout_s=300)


def check_other_layouts(op: str, kernel: Kernel) -> tuple[int, list[str]]:
    """Operands that the kernel cannot take, on one rank at a time, and on each rank others."""
    failures = Failures()
    rank, world = dist.get_rank(), dist.get_world_size()
    case = peer_case(op, 260, 264, 64, torch.bfloat16)
    inputs = [layout for layout in INPUT_LAYOUTS if layout != "expanded"]
    for bias in (False, True):
        case = case.with_(bias=bias)
        plan = peer_plan(case, op, 2, kernel)
        for other in range(world):
            for field, layouts in (("input_layout", inputs), ("weight_layout", WEIGHT_LAYOUTS)):
                for layout in layouts:
                    mine = case.with_(**{field: layout}) if rank == other else case
                    check_plan(failures, mine, plan, "rank", other, "has", layout, op=op)
        for turn in range(len(WEIGHT_LAYOUTS)):
            mine = case.with_(
                input_layout=inputs[(turn + rank) % len(inputs)],
                weight_layout=WEIGHT_LAYOUTS[(turn + 3 * rank) % len(WEIGHT_LAYOUTS)],
            )
            check_plan(failures, mine, plan, "turn", turn, op=op)
    return failures.result()


@every_kernel
@every_op
@pytest.mark.ranks((2, "nccl"), (4, "nccl"))
def test_peers_take_layouts_that_differ_between_ranks(ranks, op, kernel):
    skip_unless_it_runs(ranks, kernel)
    ranks.expect_no_failures(check_other_layouts, op, kernel, timeout_s=300)


# --- order ------------------------------------------------------------------------------------------

DISTINCT = 4  # operands by turns: a result of the call before is a wrong one
KEPT = 5  # calls whose results are looked at again: more than there are slots

Prepared = tuple[str, list[Arguments], list[list[torch.Tensor]]]


def prepare(op: str, rows: int, n: int, k: int, seeds: int) -> tuple[Case, Prepared]:
    """Arguments and right results of this rank, for several seeds. No bias: with one a gather leaves its kernels."""
    place = (dist.get_rank(), dist.get_world_size(), rank_device())
    case = peer_case(op, rows, n, k, torch.bfloat16, bias=not op.startswith("allgather"))
    arguments = [OPS[op].arguments(case, *place, seed) for seed in range(seeds)]
    return case, (op, arguments, [OPS[op].expected(case, *place, seed) for seed in range(seeds)])


def wrong_elements(outputs: list[torch.Tensor], rights: list[torch.Tensor]) -> torch.Tensor:
    pairs = zip(outputs, rights, strict=True)
    return torch.stack([(output != right).sum() for output, right in pairs]).sum()


def race(ops: list[str], calls: int, kernel: Kernel, chunks: int) -> tuple[int, list[str]]:
    """Calls of the ops by turns, none of which waits for the one before; in the middle, one that outgrows the slots.

    Wrong elements are counted on the device: right behind the call, and again when later calls have used the slots.
    """
    failures = Failures()
    device = rank_device()
    chance = random.Random(1000 * dist.get_rank() + chunks)
    group = dist.new_group()  # whose memory has not grown yet
    name = group.group_name
    prepared = []
    for op in ops:
        case, ready = prepare(op, 643, 776, 136, DISTINCT)
        prepared.append(ready)
        if op in PEER_OPS:
            plan_module.set_plan(peer_plan(case, op, chunks, kernel), group=group)
    case, larger = prepare(ops[0], 4200, 4096, 4096, 1)
    plan_module.set_plan(peer_plan(case, ops[0], chunks, kernel), group=group)
    wrong = torch.zeros(2, calls, dtype=torch.int64, device=device)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    kept: deque[tuple[int, list[torch.Tensor], list[torch.Tensor]]] = deque()
    held: list[list[int]] = []

    def look_again() -> None:
        turn, outputs, rights = kept.popleft()
        for output in outputs:
            output.record_stream(torch.cuda.current_stream())
        wrong[1, turn] = wrong_elements(outputs, rights)

    torch.cuda.synchronize()
    for turn in range(calls):
        grows = turn == calls // 2
        op, arguments, expected = larger if grows else prepared[turn % len(prepared)]
        seed = turn // len(prepared) % len(arguments)
        if grows:
            held.append(list(torch.ops.overlap.memory(name)))
        torch.ops.overlap.delay_side_stream(chance.choice((0, 0, 0, 20, 200)))
        with torch.cuda.stream(streams[turn // 16 % len(streams)]):
            if chance.random() < 0.1:
                torch.cuda._sleep(chance.randrange(400_000))
            poison(device, *(2 * right.numel() for right in expected[seed]), 512)
            outputs = tensors_of(OPS[op].wrapper(*arguments[seed], group=group))
            wrong[0, turn] = wrong_elements(outputs, expected[seed])
            kept.append((turn, outputs, expected[seed]))
            del outputs
            if len(kept) > KEPT:
                look_again()
        if grows:
            held.append(list(torch.ops.overlap.memory(name)))
        if chance.random() < 0.02:
            time.sleep(chance.uniform(0, 0.01))
    torch.cuda.synchronize()
    while kept:
        look_again()
    torch.ops.overlap.delay_side_stream(0)
    overlap_torch.check()
    held.append(list(torch.ops.overlap.memory(name)))
    failures.expect(None if held[1][1] > held[0][1] else f"memory did not grow: {held}")
    failures.expect(None if held[2] == held[1] else f"memory grew without need: {held}")
    for turn, counts in enumerate(wrong.t().tolist()):
        for count, when in zip(counts, ("at once", "later"), strict=True):
            problem = f"{count} elements wrong {when}" if count else None
            failures.expect(problem, ops[turn % len(ops)], "call", turn, kernel.name)
    dist.destroy_process_group(group)
    return failures.result()


RACES = pytest.mark.parametrize(
    "ops", [*([op] for op in PEER_OPS), [*PEER_OPS, "gemm_alltoall"]], ids="+".join
)


def race_peers(ranks, ops: list[str], kernel: Kernel, calls: int) -> None:
    skip_unless_it_runs(ranks, kernel)
    for chunks in (1, 3):
        ranks.expect_no_failures(race, ops, calls, kernel, chunks, timeout_s=300)


@every_kernel
@RACES
@pytest.mark.ranks((2, "nccl"), (4, "nccl"))
def test_peers_back_to_back(ranks, ops, kernel):
    race_peers(ranks, ops, kernel, 100)


@pytest.mark.long
@pytest.mark.races
@every_kernel
@RACES
@pytest.mark.ranks((2, "nccl"), (4, "nccl"))
def test_peers_back_to_back_long(ranks, ops, kernel):
    race_peers(ranks, ops, kernel, 1000)


# --- CUDA graphs ------------------------------------------------------------------------------------


def planned_case(op: str) -> Case | None:
    """A call that the planner sends over peers."""
    world = dist.get_world_size()
    for rows, n, k in ((2048, 4096, 4096), (4096, 8192, 7168)):
        case = peer_case(op, rows, n, k, torch.bfloat16)
        if over_peers(plan_module.make_plan(OPS[op].problem(case, world), plan_module.machine())):
            return case
    return None


def check_capture(op: str, case: Case) -> tuple[int, list[str]]:
    """Captured under another plan than plain calls have, which come between replays."""
    failures = Failures()
    place = (dist.get_rank(), dist.get_world_size(), rank_device())
    arguments = OPS[op].arguments(case, *place)
    problem = OPS[op].problem(case, dist.get_world_size())
    planned = plan_module.plan_for(problem.m, problem.n, problem.k, problem.dtype, op=problem.op)
    failures.expect(None if over_peers(planned) else f"plan_for says {planned}", op)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        OPS[op].wrapper(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = tensors_of(OPS[op].wrapper(*arguments))
    for seed in (4, 9):
        expected = OPS[op].expected(case, *place, seed)
        others = tensors_of(OPS[op].arguments(case, *place, seed))
        for mine, other in zip(tensors_of(arguments), others, strict=True):
            mine.copy_(other)
        for output in captured:
            output.fill_(float("nan"))
        for _ in range(3):
            graph.replay()
            plain = tensors_of(OPS[op].wrapper(*arguments))
        torch.cuda.synchronize()
        for what, outputs in (("replay", captured), ("plain call", plain)):
            for output, right in zip(outputs, expected, strict=True):
                failures.expect(difference(output, right), op, what, seed)
    overlap_torch.check()
    return failures.result()


@pytest.mark.parametrize("op", PEER_OPS[:3])
@pytest.mark.ranks((2, "nccl"), (4, "nccl"))
def test_peers_give_way_to_another_plan_in_a_capture(ranks, op):
    skip_unless_it_runs(ranks)
    case = ranks.run(planned_case, op)[0]
    if case is None:
        pytest.skip("the planner takes no peers on this machine")
    ranks.expect_no_failures(check_capture, op, case)


def capture_plan_set_by_hand(op: str) -> tuple[str, int, list[str]]:
    """(message, checks, failures); afterwards the plan must still run, outside of captures."""
    failures = Failures()
    place = (dist.get_rank(), dist.get_world_size(), rank_device())
    case = peer_case(op, 131, 264, 72, torch.bfloat16)
    message = ""
    with plan_module.use_plan(peer_plan(case, op, 1, Kernel.LIBRARY)):
        arguments = OPS[op].arguments(case, *place)
        check_call(failures, case, "before the capture", op=op)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                OPS[op].wrapper(*arguments)
        except RuntimeError as error:
            message = str(error)
        del graph
        for seed in range(3):
            check_call(failures, case, "after the capture", seed=seed, op=op)
    return message, *failures.result()


@every_op
@pytest.mark.ranks((2, "nccl"), (4, "nccl"))
def test_peers_set_by_hand_are_refused_in_a_capture(ranks, op):
    skip_unless_it_runs(ranks)
    for message, checks, failures in ranks.run(capture_plan_set_by_hand, op):
        assert "captures a plan with the transport peer" in message, message
        assert "nccl" in message, message
        assert checks > 0 and not failures, failures


# --- refusals ---------------------------------------------------------------------------------------


def refused_plans(maps: bool) -> dict[str, tuple[Plan, str]]:
    """what is wrong -> (plan, what the message must hold)."""
    world = dist.get_world_size()
    problem = plan_module.DType.FLOAT32, world
    good = plan_module.row_panels(Problem(512, 64, 32, *problem), 1, transport="peer")
    uneven = good.copy()
    uneven.problem = Problem(511, 64, 32, *problem)
    over_nccl = good.copy()
    over_nccl.chunks = [Chunk(chunk.tiles) for chunk in good.chunks]
    exchange = Problem(0, 64, 32, *problem, Op.GEMM_ALLTOALL)
    to_all = plan_module.make_all_to_all(exchange, Kernel.LIBRARY, Resources(), 0)
    to_all.chunks = [Chunk(0, Transport.PEER)]
    plans = {
        "rows that are no equal parts": (uneven, f"m = 511 on {world} ranks"),
        "a ring over NCCL": (over_nccl, "ring with the transport nccl, allowed is peer"),
        "an all-to-all": (to_all, "gemm_alltoall travels by peer"),
    }
    if not maps:
        plans["no such memory"] = (
            good,
            "transport is peer, but the ranks of this group do not map",
        )
    return plans


def check_refused(maps: bool) -> tuple[int, list[str]]:
    failures = Failures()
    case = Case((512,), 64, 32, bias=True)
    for what, (plan, part) in refused_plans(maps).items():
        code = plan_module.encode(plan)
        message = message_of(torch.ops.overlap.set_plan, code, rank_device(), world_name())
        failures.expect(None if part in message else f"{part!r} is not in {message!r}", what)
        check_call(failures, case, "after", what)
    return failures.result()


@pytest.mark.ranks((2, "gloo"), (2, "nccl"), (4, "nccl"))
def test_peers_are_refused_where_they_cannot_work(ranks):
    if ranks.backend == "nccl":
        ranks.skip_without_peers()
    ranks.expect_no_failures(check_refused, ranks.backend == "nccl")


def without_peers() -> tuple[float, int, list[str]]:
    """(the machine's rate between peers, checks, failures)."""
    failures = Failures()
    machine = plan_module.machine()
    for op in PEER_OPS[:3]:
        problem = OPS[op].problem(peer_case(op, 8192, 8192, 7168, torch.bfloat16), 2)
        sizes = (problem.m, problem.n, problem.k)
        plan = plan_module.plan_for(*sizes, problem.dtype, op=problem.op)
        failures.expect(f"plan_for says {plan}" if over_peers(plan) else None, op)
        case = peer_case(op, 2048, 1024, 512, torch.bfloat16)
        for seed in range(3):
            check_call(failures, case, seed=seed, op=op)
    checks, lines = check_refused(False)
    overlap_torch.check()
    return machine.peer_gbps, checks + failures.checks, lines + failures.lines


@pytest.mark.ranks((2, "nccl"))
def test_peers_are_not_used_if_one_rank_forbids_it(ranks):
    ranks.skip_without_peers()
    # Rank 0 has 0, rank 1 has 1.
    outcomes = rank_pool.run_fresh(
        2, "nccl", without_peers, environment={"OVERLAP_PEERS": "{rank}"}, timeout_s=120.0
    )
    for outcome in outcomes:
        assert outcome.kind == "returned", outcome.detail
        gbps, checks, failures = outcome.value
        assert gbps == 0.0
        assert checks > 0 and not failures, "\n".join(failures)


def machine_message() -> str:
    return message_of(plan_module.machine)


@pytest.mark.gpu
@pytest.mark.gpu2
def test_peers_setting_is_0_or_1():
    outcomes = rank_pool.run_fresh(
        2, "nccl", machine_message, environment={"OVERLAP_PEERS": "perhaps"}
    )
    for outcome in outcomes:
        assert outcome.kind == "returned", outcome.detail
        assert "OVERLAP_PEERS is 'perhaps'; it must be 0 or 1" in outcome.value, outcome.value
