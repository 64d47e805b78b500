"""Where plans over the ranks' memory of each other give way to others, and where they are refused."""

import pytest
import torch
import torch.distributed as dist

import overlap_torch
from checks import Failures, check_call, message_of
from operands import Case, rank_device, world_name
from ops import OPS
from overlap_torch import plan as plan_module
from overlap_torch.plan.templates import at_once, make_all_to_all, row_panels
from overlap_torch.plan.types import Kernel, Resources, Transport
from peers import PEER_OPS, over_peers, peer_case


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
    for op in [*PEER_OPS[:3], "gemm_alltoall"]:
        problem = OPS[op].problem(peer_case(op, 8192, 8192, 7168, torch.bfloat16), 2)
        sizes = (problem.m, problem.n, problem.k)
        plan = plan_module.plan_for(*sizes, problem.dtype, op=problem.op)
        failures.expect(f"plan_for says {plan}" if over_peers(plan) else None, op)
        case = peer_case(op, 2048, 1024, 512, torch.bfloat16)
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
