"""Peers' memory as NCCL's symmetric windows in place of CUDA IPC: the same kernels and results, in graphs too, groups that come
and go, and what is said where windows cannot be had."""

import os
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

import overlap_torch
import rank_pool
from captures import capture
from checks import Failures, check_call, check_plan
from operands import Case, place
from ops import OPS, tensors_of
from overlap_torch import plan as plan_module
from overlap_torch.plan.templates import row_panels
from overlap_torch.plan.types import Kernel
from peer_races import Runner, race, wrong_elements
from peers import (
    ALL_TO_ALL,
    DIRECT,
    ONE_LAUNCH,
    OWNERS,
    PEER_OPS,
    RING,
    STRIPES,
    Way,
    has_bias,
    parameter_id,
    peer_case,
    peer_plan,
)
from tests import _plan_test
from tests.ops.test_rmsnorm import FUSED, case_of, check_case
from tests.peers.test_faults import GROUP_TIMEOUT_S, MARGIN_S, until_error
from tests.peers.test_peers_experts import FORMS
from tests.peers.test_peers_graphs import check_turns

PINGPONG = Kernel.SM90_PINGPONG
WINDOWS = {"OVERLAP_PEER_MEMORY": "nccl"}
# On one machine: CUDA IPC is not tried between ranks on hosts of these names, while NCCL, which is told nothing, sees one host.
OTHER_HOSTS = {"OVERLAP_HOST_ID": "host{rank}"}
by_itself = pytest.mark.skipif(
    "OVERLAP_PEER_MEMORY" in os.environ, reason="OVERLAP_PEER_MEMORY chooses the way"
)
on_peers = pytest.mark.ranks((2, "nccl"), (4, "nccl"))

OP_WAYS = [
    *((op, way, kernel) for op in PEER_OPS for way in (RING, 3) for kernel in (PINGPONG, Kernel.LIBRARY)),
    *((op, DIRECT, PINGPONG) for op in PEER_OPS),
    *((op, way, kernel) for op in PEER_OPS[:2] for way, kernel in ((OWNERS, PINGPONG), (STRIPES, Kernel.LIBRARY))),
    (ALL_TO_ALL, 1, Kernel.LIBRARY),
    (ALL_TO_ALL, 1, PINGPONG),
    (ALL_TO_ALL, ONE_LAUNCH, PINGPONG),
]  # fmt: skip


@pytest.fixture(autouse=True)
def with_windows(request: pytest.FixtureRequest) -> None:
    """Ranks of a pool that is to have no CUDA IPC."""
    if "ranks" in request.fixturenames:
        request.getfixturevalue("ranks").environment = WINDOWS


def expect_windows(failures: Failures, begin: str = "NCCL windows") -> None:
    text = plan_module.peer_memory()
    failures.expect(None if text.startswith(begin) else f"{text!r} does not begin so", begin)
    failures.alike(text)


# --- what is chosen, on CPU -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host_ranks", "team", "world", "found"),
    [
        (4, 4, 4, 4),
        (1, 4, 4, 4),  # several hosts whose GPUs are linked
        (4, 8, 8, 8),
        (4, 4, 8, 4),
        (4, 16, 16, 4),  # more than map each other
        (2, 4, 8, 2),
        (4, 2, 8, 1),  # a team without all of the host's ranks
        (1, 1, 2, 1),
        (4, 0, 4, 1),
    ],
)
def test_windows_reach_whole_groups_or_hosts(host_ranks, team, world, found):
    assert _plan_test.ranks_of_windows(host_ranks, team, world, 8) == found


@pytest.mark.parametrize(
    ("sources", "why"),
    [
        ([0, 0], ""),
        ([2, 2], ""),
        ([0, -1], "rank 1 has OVERLAP_PEERS=0 or NCCL_P2P_DISABLE=1"),
        ([-1, 2], "rank 0 has OVERLAP_PEERS=0 or NCCL_P2P_DISABLE=1"),
        ([1, 1, 2], "rank 2 has another OVERLAP_PEER_MEMORY than rank 0"),
    ],
)
def test_windows_need_ranks_of_one_mind(sources, why):
    assert _plan_test.why_no_peers(sources) == why


def test_windows_map_nothing_on_cpu():
    assert plan_module.peer_memory("cpu", "no group") == ""


# --- results ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "way", "kernel"), OP_WAYS, ids=parameter_id)
@on_peers
@pytest.mark.peers
def test_windows_are_exact(failures: Failures, op: str, way: Way, kernel: Kernel) -> None:
    expect_windows(failures)
    for rows, n, k in [(131, 264, 72), (1, 8, 8), (640, 1000, 2048)]:
        case = peer_case(op, rows, n, k, torch.bfloat16)
        plan = peer_plan(case, op, way, kernel)
        for bias in {False, has_bias(op)}:
            check_plan(failures, case.with_(bias=bias), plan, op=op)
    overlap_torch.check()


@on_peers
@pytest.mark.peers
def test_windows_carry_norms_and_experts(failures: Failures) -> None:
    expect_windows(failures)
    for turn, how in enumerate(FUSED):
        for m in (1, 7, 300):
            check_case(failures, case_of((m,), 4096), turn % 2 == 0, how, turn)
    for form in FORMS:
        drawn = form.draw(0)
        failures.expect_equal(form.call("peer", *drawn), form.call("nccl", *drawn), form)
    overlap_torch.check()


# --- order ------------------------------------------------------------------------------------------


def runner(op: str, way: Way, kernel: Kernel = PINGPONG, rows: int = 643, n: int = 776) -> Runner:
    case = peer_case(op, rows, n, 136, torch.bfloat16, bias=has_bias(op))
    return Runner(f"{kernel.name} {way}", op, case, peer_plan(case, op, way, kernel))


@on_peers
@pytest.mark.peers
@pytest.mark.seconds(600)
def test_windows_race(failures: Failures) -> None:
    """Hundreds of calls, none of which waits for the one before; slots grow in the middle of them."""
    expect_windows(failures)
    runners = [runner(op, RING) for op in (*PEER_OPS, ALL_TO_ALL)]
    runners.append(runner("gemm_allreduce", DIRECT, rows=3, n=1032))  # of low latency
    race(failures, runners, runner("gemm_allreduce", RING, rows=4200, n=4096), 400, 0)


@on_peers
@pytest.mark.peers
def test_windows_in_graphs(failures: Failures) -> None:
    """Replays of a graph, with plain calls between them, by ranks that come late."""
    expect_windows(failures)
    runners = [runner(op, RING) for op in (*PEER_OPS, ALL_TO_ALL)]
    runners.append(runner("gemm_allreduce", DIRECT, rows=3, n=1032))
    for seed in range(4):
        check_turns(failures, [runners], seed=seed)


# --- groups -----------------------------------------------------------------------------------------


@on_peers
@pytest.mark.peers
def test_windows_of_groups_come_and_go(failures: Failures) -> None:
    """Groups that are made, called and destroyed in a row, one of them while a graph still holds its memory."""
    case = Case((dist.get_world_size() * 640,), 1000, 136, torch.bfloat16)
    op = OPS["gemm_allreduce"]
    plan = peer_plan(case, op.name, RING, PINGPONG)
    graphs = []
    for turn in range(4):
        group = dist.new_group()
        failures.holds("NCCL windows", plan_module.peer_memory(group=group), turn)
        plan_module.set_plan(plan, group=group)
        arguments, right = op.arguments(case, *place(), turn), op.expected(case, *place(), turn)
        call = partial(op.wrapper, *arguments, group=group)
        failures.expect_equal(tensors_of(call()), right, turn)
        if turn == 1:
            graph, outputs = capture(call)
            graph.replay()
            failures.expect_equal(tensors_of(outputs), right, "replay")
            graphs.append(graph)
        torch.cuda.synchronize()
        dist.destroy_process_group(group)
    check_call(failures, case, "after them")


def fail_and_go_on() -> tuple[str, float, str, int]:
    """A call that rank 1 leaves out; then the same on a new group."""
    case = Case((2 * 640,), 1000, 136, torch.bfloat16)
    op, group = OPS["gemm_allreduce"], dist.new_group(timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    arguments, right = op.arguments(case, *place(), 0), op.expected(case, *place(), 0)
    plan = row_panels(op.problem(case, 2), 1, transport="peer", kernel="library")

    def step(group: dist.ProcessGroup) -> list[torch.Tensor]:
        outputs = tensors_of(op.wrapper(*arguments, group=group))
        torch.cuda.synchronize()
        overlap_torch.check()
        return outputs

    plan_module.set_plan(plan, group=group)
    step(group)
    way = plan_module.peer_memory(group=group)
    seconds, message = 0.0, ""
    if dist.get_rank() == 0:
        seconds, message = until_error(lambda: step(group), GROUP_TIMEOUT_S + MARGIN_S)
    dist.barrier()
    dist.destroy_process_group(group)
    group = dist.new_group()
    plan_module.set_plan(plan, group=group)
    wrong = wrong_elements(tensors_of(op.wrapper(*arguments, group=group)), right)
    return way, seconds, message, int(wrong)


@pytest.mark.gpu
@pytest.mark.gpu2
def test_windows_outlive_a_failed_group():
    outcomes = rank_pool.run_fresh(
        2, "nccl", fail_and_go_on, group_timeout_s=60.0, environment=WINDOWS
    )
    for rank, outcome in enumerate(outcomes):
        way, seconds, message, wrong = outcome.result()
        assert way.startswith("NCCL windows"), way
        assert wrong == 0
        assert rank == 1 or "rank 1" in message, (seconds, message)


# --- the choice -------------------------------------------------------------------------------------


def check_of_planner(failures: Failures) -> None:
    for op in ("gemm_allreduce", "allgather_gemm", ALL_TO_ALL):
        for seed in range(3):
            check_call(failures, peer_case(op, 1024, 1024, 512, torch.bfloat16), seed=seed, op=op)
    overlap_torch.check()


@on_peers
@pytest.mark.peers
def test_windows_are_named_with_their_setting(failures: Failures) -> None:
    expect_windows(failures, "NCCL windows (OVERLAP_PEER_MEMORY=nccl)")
    check_of_planner(failures)
    failures.holds("memory of peers: NCCL windows", str(overlap_torch.report()))
    explained = plan_module.plan_for(4096, 1024, 512, torch.bfloat16).explain()
    failures.holds("\npeers    NCCL windows", str(explained))


@on_peers
@by_itself
@pytest.mark.fresh(environment=OTHER_HOSTS)
def test_windows_are_taken_where_ipc_is_refused(failures: Failures) -> None:
    expect_windows(failures, "NCCL windows; CUDA IPC is refused: ")
    failures.equal(plan_module.machine().peer_gbps > 0.0, True)
    check_of_planner(failures)


def expect_none(failures: Failures, *parts: str) -> None:
    failures.says(plan_module.peer_memory(), ["none: ", *parts])
    failures.equal(plan_module.machine().peer_gbps, 0.0)
    check_of_planner(failures)


@pytest.mark.ranks((2, "nccl"))
@pytest.mark.fresh(environment={**OTHER_HOSTS, "OVERLAP_PEER_MEMORY": "ipc"})
def test_windows_are_not_taken_where_a_setting_says_ipc(failures: Failures) -> None:
    expect_none(failures, "CUDA IPC (OVERLAP_PEER_MEMORY=ipc): ")


@pytest.mark.ranks((2, "nccl"))
@pytest.mark.fresh(environment={**WINDOWS, "NCCL_CUMEM_ENABLE": "0"})
def test_windows_are_refused_where_nccl_has_none(failures: Failures) -> None:
    expect_none(failures, "NCCL windows (OVERLAP_PEER_MEMORY=nccl): ", "no symmetric window")


@pytest.mark.ranks((2, "nccl"))
@by_itself
@pytest.mark.fresh(
    environment={**OTHER_HOSTS, "NCCL_HOSTID": "host{rank}", "NCCL_SOCKET_IFNAME": "lo"}
)
def test_windows_are_refused_where_nccl_sees_other_hosts(failures: Failures) -> None:
    expect_none(failures, "as NCCL sees it, 1 ranks load and store", "CUDA IPC is refused: ")
