"""Plans whose chunks travel through memory that the ranks map into each other: right results, call after call."""

from __future__ import annotations

import random
import time
from collections import deque

import pytest
import torch
import torch.distributed as dist

import overlap_torch
from checks import Failures, check_plan
from operands import (
    INPUT_LAYOUTS,
    WEIGHT_LAYOUTS,
    Case,
    poison,
    rank_device,
)
from ops import OPS, Arguments, tensors_of
from overlap_torch import plan as plan_module
from overlap_torch.plan import Kernel
from peers import PEER_OPS, peer_case, peer_plan, skip_unless_it_runs

KERNELS = [Kernel.SM90_PINGPONG, Kernel.LIBRARY]
every_op = pytest.mark.parametrize("op", PEER_OPS)
every_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)

# (rows of one rank's part, n, k), around tiles of 128 x 128 in clusters of two. Parts that end inside a tile and inside a
# cluster, odd numbers of tiles, eight chunks, and sizes that the kernels do not take.
SHAPES = [
    (131, 264, 72), (1, 8, 8), (257, 1000, 136), (384, 384, 64), (2000, 264, 72), (640, 1000, 2048),
    (96, 129, 33),
]  # fmt: skip


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
