"""Plans whose chunks travel through memory that the ranks map into each other: right results, call after call."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from checks import Failures, check_plan
from operands import Case
from ops import OPS
from overlap_torch.plan.types import Kernel
from peer_races import Runner, race, so_many_calls
from peers import (
    ALL_TO_ALL,
    KERNELS,
    PEER_OPS,
    RING,
    STRIPES,
    Way,
    cases_of_other_dims,
    check_other_layouts,
    every_kernel,
    has_bias,
    kernel_id,
    peer_case,
    peer_kernels,
    peer_plan,
    skip_unless_it_runs,
)
from plans import chunked_plan, stripes

every_op = pytest.mark.parametrize("op", PEER_OPS)
every_op_and_kernel = pytest.mark.parametrize(
    ("op", "kernel"),
    [(op, kernel) for op in PEER_OPS for kernel in peer_kernels(op)],
    ids=kernel_id,
)

# (rows of one rank's part, n, k), around tiles of 128 x 128 in clusters of two. Parts that end inside a tile and inside a
# cluster, odd numbers of tiles, eight chunks, and sizes that the kernels do not take.
SHAPES = [
    (131, 264, 72), (1, 8, 8), (257, 1000, 136), (384, 384, 64), (2000, 264, 72), (640, 1000, 2048),
    (96, 129, 33),
]  # fmt: skip


# --- results ----------------------------------------------------------------------------------------


def check_shapes(op: str, dtype: torch.dtype, kernel: Kernel) -> tuple[int, list[str]]:
    failures = Failures()
    cases = [peer_case(op, rows, n, k, dtype) for rows, n, k in SHAPES]
    for case in cases + cases_of_other_dims(op, dtype):
        for weight_layout in ("k_contiguous", "n_contiguous"):
            for bias in (False, True):
                case = case.with_(bias=bias, weight_layout=weight_layout)
                for chunks in (1, 3, 8):
                    plan = peer_plan(case, op, chunks, kernel)
                    if len(plan.chunks) == chunks:
                        check_plan(failures, case, plan, chunks, "chunks", kernel.name, op=op)
                if kernel == Kernel.LIBRARY and has_bias(op):
                    problem = OPS[op].problem(case, dist.get_world_size())
                    for label, plan in stripes(problem, "peer"):
                        check_plan(failures, case, plan, label, op=op)
    return failures.result()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_op_and_kernel
@pytest.mark.ranks((2, "nccl"), (4, "nccl"))
def test_peers_are_exact(ranks, op, dtype, kernel):
    skip_unless_it_runs(ranks, kernel)
    ranks.expect_no_failures(check_shapes, op, dtype, kernel, timeout_s=300)


@every_op
@pytest.mark.ranks((2, "nccl"), (4, "nccl"))
def test_peers_are_exact_in_float32(ranks, op):
    skip_unless_it_runs(ranks)
    ranks.expect_no_failures(check_shapes, op, torch.float32, Kernel.LIBRARY, timeout_s=300)


@every_op_and_kernel
@pytest.mark.ranks((2, "nccl"), (4, "nccl"))
def test_peers_take_layouts_that_differ_between_ranks(ranks, op, kernel):
    skip_unless_it_runs(ranks, kernel)
    ranks.expect_no_failures(check_other_layouts, op, kernel, 2, timeout_s=300)
    if kernel == Kernel.LIBRARY and has_bias(op):
        ranks.expect_no_failures(check_other_layouts, op, kernel, STRIPES, timeout_s=300)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("way", "kernel"), [*((RING, kernel) for kernel in KERNELS), (STRIPES, Kernel.LIBRARY)], ids=str
)
@pytest.mark.ranks((2, "nccl"), (3, "nccl"), (4, "nccl"), (8, "nccl"))
@pytest.mark.peers
def test_peers_take_any_rows(
    failures: Failures, way: Way, kernel: Kernel, dtype: torch.dtype
) -> None:
    """All-reduces whose last rank owns fewer rows than the others; of stripes also none."""
    world = dist.get_world_size()
    for part, n, k in [(2, 8, 8), *SHAPES, (1025, 520, 264)]:
        # By one row, by as many as the ranks allow; a single row is left where parts are that low.
        for rows in {world * part - 1, world * (part - 1) + 1}:
            if way == RING and rows <= (world - 1) * part:
                continue
            case = Case((rows,), n, k, dtype)
            for bias in (False, True):
                for weight_layout in ("k_contiguous", "n_contiguous"):
                    mine = case.with_(bias=bias, weight_layout=weight_layout)
                    plan = peer_plan(mine, "gemm_allreduce", way, kernel)
                    check_plan(failures, mine, plan, rows, "rows", kernel.name, way)


@every_kernel
@pytest.mark.ranks((2, "nccl"), (4, "nccl"))
def test_peers_ring_of_any_rows_takes_layouts_that_differ_between_ranks(ranks, kernel):
    skip_unless_it_runs(ranks, kernel)
    ranks.expect_no_failures(
        check_other_layouts, "gemm_allreduce", kernel, RING, 261, timeout_s=300
    )


# --- order ------------------------------------------------------------------------------------------


def runner(
    op: str, rows: int, n: int, k: int, way: int, kernel: Kernel, short_by: int = 0
) -> Runner:
    case = peer_case(op, rows, n, k, torch.bfloat16, bias=has_bias(op))
    case = case.with_(leading=(case.leading[0] - short_by,))
    plan = peer_plan(case, op, way, kernel)
    return Runner(f"{kernel.name} in {way} chunks", op, case, plan)


def over_nccl(rows: int, n: int, k: int, kernel: Kernel) -> Runner:
    """An all-to-all that does not travel over peers."""
    case = Case((rows,), n, k, torch.bfloat16)
    plan = chunked_plan(
        case, dist.get_world_size(), "cuda", "row panels", 1, kernel, op=ALL_TO_ALL, comm_sms=16
    )
    return Runner(f"{kernel.name} over NCCL", ALL_TO_ALL, case, plan)


def race_of_ops(ops: list[str], calls: int, kernel: Kernel, chunks: int) -> tuple[int, list[str]]:
    runners = [runner(op, 643, 776, 136, chunks, kernel) for op in ops]
    if "gemm_allreduce" in ops:  # whose last rank may own fewer rows
        runners.append(runner("gemm_allreduce", 643, 776, 136, chunks, kernel, short_by=1))
    if ALL_TO_ALL in ops:
        runners.append(over_nccl(643, 776, 144, kernel))
    return race(runners, runner(ops[0], 4200, 4096, 4096, chunks, kernel), calls, chunks)


RACES = pytest.mark.parametrize(
    ("ops", "kernel"),
    [
        *(([op], kernel) for op in PEER_OPS for kernel in peer_kernels(op)),
        *(([*PEER_OPS, ALL_TO_ALL], kernel) for kernel in KERNELS),
    ],
    ids=lambda value: kernel_id(value) or "+".join(value),
)


@so_many_calls(100)
@RACES
@pytest.mark.ranks((2, "nccl"), (4, "nccl"))
def test_peers_back_to_back(ranks, ops, kernel, calls):
    skip_unless_it_runs(ranks, kernel)
    for chunks in (1, 3):
        ranks.expect_no_failures(race_of_ops, ops, calls, kernel, chunks, timeout_s=300)
