"""Plans whose chunks travel through memory that the ranks map into each other: right results, call after call."""

import pytest
import torch
import torch.distributed as dist

import overlap_torch
import peers
from checks import Failures, check_call, check_plan, message_of
from machines import over_peers
from operands import Case, rank_device, world_name
from ops import OPS
from overlap_torch import plan as plan_module
from overlap_torch.plan._library import plan_of
from overlap_torch.plan.templates import at_once, make_all_to_all, row_panels
from overlap_torch.plan.types import Kernel, Resources, Transport
from peer_races import Runner, race, so_many_calls
from plans import chunked_plan, stripes

# (rows of one rank's part, n, k), around tiles of 128 x 128 in clusters of two. Parts that end inside a tile and inside a
# cluster, odd numbers of tiles, eight chunks, and sizes that the kernels do not take.
SHAPES = [
    (131, 264, 72), (1, 8, 8), (257, 1000, 136), (384, 384, 64), (2000, 264, 72), (640, 1000, 2048),
    (96, 129, 33),
]  # fmt: skip


# --- results ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "kernel", "dtype"),
    [
        (op, kernel, dtype)
        for op in peers.PEER_OPS
        for kernel in peers.peer_kernels(op)
        for dtype in (*peers.HALVES, *([torch.float32] if kernel == Kernel.LIBRARY else []))
    ],
    ids=peers.parameter_id,
)
@pytest.mark.ranks((2, "nccl"), (4, "nccl"))
@pytest.mark.peers
def test_peers_are_exact(failures: Failures, op: str, kernel: Kernel, dtype: torch.dtype) -> None:
    cases = [peers.peer_case(op, rows, n, k, dtype) for rows, n, k in SHAPES]
    for case in cases + peers.cases_of_other_dims(op, dtype):
        for weight_layout in ("k_contiguous", "n_contiguous"):
            for bias in (False, True):
                case = case.with_(bias=bias, weight_layout=weight_layout)
                for chunks in (1, 3, 8):
                    plan = peers.peer_plan(case, op, chunks, kernel)
                    if len(plan.chunks) == chunks:
                        check_plan(failures, case, plan, chunks, "chunks", kernel.name, op=op)
                if kernel == Kernel.LIBRARY and peers.has_bias(op):
                    problem = OPS[op].problem(case, dist.get_world_size())
                    for label, plan in stripes(problem, "peer"):
                        check_plan(failures, case, plan, label, op=op)


OTHER_LAYOUTS = [
    *((op, kernel, 2, None) for op in peers.PEER_OPS for kernel in peers.peer_kernels(op)),
    *((op, Kernel.LIBRARY, peers.STRIPES, None) for op in peers.PEER_OPS if peers.has_bias(op)),
    # A ring of any rows.
    *(("gemm_allreduce", kernel, peers.RING, 261) for kernel in peers.KERNELS),
    *(
        (op, Kernel.SM90_PINGPONG, peers.OWNERS, None)
        for op in peers.PEER_OPS
        if peers.has_bias(op)
    ),
    ("gemm_allreduce", Kernel.SM90_PINGPONG, peers.OWNERS, 261),
    *((op, kernel, peers.DIRECT, None) for op in peers.PEER_OPS for kernel in peers.KERNELS),
]


@pytest.mark.parametrize(("op", "kernel", "way", "rows"), OTHER_LAYOUTS, ids=peers.parameter_id)
@pytest.mark.ranks((2, "nccl"), (4, "nccl"))
@pytest.mark.peers
def test_peers_take_layouts_that_differ_between_ranks(
    failures: Failures, op: str, kernel: Kernel, way: peers.Way, rows: int | None
) -> None:
    peers.check_other_layouts(failures, op, kernel, way, rows)


@pytest.mark.parametrize("dtype", peers.HALVES, ids=str)
@pytest.mark.parametrize(
    ("way", "kernel"),
    [
        *((peers.RING, kernel) for kernel in peers.KERNELS),
        (peers.OWNERS, Kernel.SM90_PINGPONG),
        (peers.STRIPES, Kernel.LIBRARY),
    ],
    ids=str,
)
@pytest.mark.ranks((2, "nccl"), (3, "nccl"), (4, "nccl"), (8, "nccl"))
@pytest.mark.peers
def test_peers_take_any_rows(
    failures: Failures, way: peers.Way, kernel: Kernel, dtype: torch.dtype
) -> None:
    """All-reduces whose last rank owns fewer rows than the others; of stripes also none."""
    world = dist.get_world_size()
    for part, n, k in [(2, 8, 8), *SHAPES, (1025, 520, 264)]:
        # By one row, by as many as the ranks allow; a single row is left where parts are that low.
        for rows in {world * part - 1, world * (part - 1) + 1}:
            if way in (peers.RING, peers.OWNERS) and rows <= (world - 1) * part:
                continue
            case = Case((rows,), n, k, dtype)
            for bias in (False, True):
                for weight_layout in ("k_contiguous", "n_contiguous"):
                    mine = case.with_(bias=bias, weight_layout=weight_layout)
                    plan = peers.peer_plan(mine, "gemm_allreduce", way, kernel)
                    check_plan(failures, mine, plan, rows, "rows", kernel.name, way)


# --- order ------------------------------------------------------------------------------------------


def runner(
    op: str, rows: int, n: int, k: int, way: int, kernel: Kernel, short_by: int = 0
) -> Runner:
    case = peers.peer_case(op, rows, n, k, torch.bfloat16, bias=peers.has_bias(op))
    case = case.with_(leading=(case.leading[0] - short_by,))
    plan = peers.peer_plan(case, op, way, kernel)
    return Runner(f"{kernel.name} in {way} chunks", op, case, plan)


def over_nccl(rows: int, n: int, k: int, kernel: Kernel) -> Runner:
    """An all-to-all that does not travel over peers."""
    case = Case((rows,), n, k, torch.bfloat16)
    plan = chunked_plan(
        case,
        dist.get_world_size(),
        "cuda",
        "row panels",
        1,
        kernel,
        op=peers.ALL_TO_ALL,
        comm_sms=16,
    )
    return Runner(f"{kernel.name} over NCCL", peers.ALL_TO_ALL, case, plan)


RACES = pytest.mark.parametrize(
    ("ops", "kernel"),
    [
        *(([op], kernel) for op in peers.PEER_OPS for kernel in peers.peer_kernels(op)),
        *(([*peers.PEER_OPS, peers.ALL_TO_ALL], kernel) for kernel in peers.KERNELS),
    ],
    ids=lambda value: peers.kernel_id(value) or "+".join(value),
)


@so_many_calls(100)
@RACES
@pytest.mark.ranks((2, "nccl"), (4, "nccl"))
@pytest.mark.peers
@pytest.mark.seconds(600)
def test_peers_back_to_back(failures: Failures, ops: list[str], kernel: Kernel, calls: int) -> None:
    for chunks in (1, 3):
        runners = [runner(op, 643, 776, 136, chunks, kernel) for op in ops]
        if "gemm_allreduce" in ops:  # whose last rank may own fewer rows
            runners.append(runner("gemm_allreduce", 643, 776, 136, chunks, kernel, short_by=1))
        if peers.ALL_TO_ALL in ops:
            runners.append(over_nccl(643, 776, 144, kernel))
        larger = runner(ops[0], 4200, 4096, 4096, chunks, kernel)
        race(failures, runners, larger, calls, chunks)


# --- refusals ---------------------------------------------------------------------------------------


def check_refused(failures: Failures) -> None:
    """Ranks that do not map each other's memory take no plan over it; test_plan_refused.py has what no ranks take."""
    case = Case((512,), 64, 32, bias=True)
    problem, exchange = (
        OPS[op].problem(case, dist.get_world_size()) for op in ("gemm_allreduce", "gemm_alltoall")
    )
    for plan in (
        row_panels(problem, 1, transport="peer"),
        at_once(problem),
        make_all_to_all(exchange, Kernel.LIBRARY, Resources(), 0, Transport.PEER),
    ):
        code = plan_module.files.encode(plan)
        message = message_of(torch.ops.overlap.set_plan, code, rank_device(), world_name())
        failures.holds("transport is peer, but the ranks of this group do not map", message, plan)
        check_call(failures, case, "after", plan)


@pytest.mark.ranks((2, "gloo"))
def test_peers_are_refused_where_they_cannot_work(failures: Failures) -> None:
    check_refused(failures)


# Rank 0 has 0, rank 1 has 1.
@pytest.mark.ranks((2, "nccl"))
@pytest.mark.peers
@pytest.mark.fresh(environment={"OVERLAP_PEERS": "{rank}"})
def test_peers_are_not_used_if_one_rank_forbids_it(failures: Failures) -> None:
    failures.equal(plan_module.machine().peer_gbps, 0.0)
    for op in [*peers.PEER_OPS[:3], "gemm_alltoall"]:
        problem = OPS[op].problem(peers.peer_case(op, 8192, 8192, 7168, torch.bfloat16), 2)
        plan = plan_of(problem, None, None)
        failures.expect(f"plan_for says {plan}" if over_peers(plan) else None, op)
        case = peers.peer_case(op, 2048, 1024, 512, torch.bfloat16)
        for seed in range(3):
            check_call(failures, case, seed=seed, op=op)
    check_refused(failures)
    overlap_torch.check()


def expect_transport(failures: Failures, used: bool) -> None:
    """The rate between peers, and how a large all-reduce travels."""
    plan = plan_module.plan_for(8192, 8192, 2048, torch.bfloat16)
    failures.equal(plan_module.machine().peer_gbps > 0, used)
    right = used or plan.chunks[0].transport == Transport.NCCL
    failures.expect(None if right else f"travels by {plan.chunks[0].transport}")


@pytest.mark.ranks((2, "nccl"))
@pytest.mark.peers
@pytest.mark.fresh(environment={"NCCL_P2P_DISABLE": "1"})
def test_peers_are_not_used_where_nccl_must_not_use_them(failures: Failures) -> None:
    expect_transport(failures, False)


@pytest.mark.ranks((2, "nccl"))
@pytest.mark.peers
@pytest.mark.fresh(environment={"NCCL_P2P_DISABLE": "1", "OVERLAP_PEERS": "1"})
def test_peers_are_used_where_only_nccl_must_not(failures: Failures) -> None:
    expect_transport(failures, True)


@pytest.mark.ranks((2, "nccl"))
@pytest.mark.fresh(environment={"OVERLAP_PEERS": "perhaps"})
def test_peers_setting_is_0_or_1(failures: Failures) -> None:
    failures.raises("OVERLAP_PEERS is 'perhaps'; it must be 0 or 1", plan_module.machine)
