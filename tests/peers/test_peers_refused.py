"""Where plans over the ranks' memory of each other give way to others, and where they are refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import overlap_torch
from checks import Failures, check_call, message_of
from operands import Case, rank_device, world_name
from ops import OPS
from overlap_torch import plan as plan_module
from overlap_torch.plan import Plan, Problem
from overlap_torch.plan.types import Chunk, Kernel, Op, Resources, Schedule, Transport
from peers import PEER_OPS, over_peers, peer_case
from plans import peers_work


def refused_plans(maps: bool) -> dict[str, tuple[Plan, str]]:
    """what is wrong -> (plan, what the message must hold)."""
    world = dist.get_world_size()
    problem = plan_module.types.DType.FLOAT32, world
    good = plan_module.templates.row_panels(Problem(512, 64, 32, *problem), 1, transport="peer")
    few = plan_module.templates.row_panels(Problem(world, 64, 32, *problem), 1, transport="peer")
    few.problem = Problem(1, 64, 32, *problem)
    over_nccl = good.copy()
    over_nccl.chunks = [Chunk(chunk.tiles) for chunk in good.chunks]
    sent = plan_module.templates.at_once(Problem(512, 64, 32, *problem))
    sent_over_nccl = sent.copy()
    sent_over_nccl.chunks = [Chunk(chunk.tiles) for chunk in sent.chunks]
    narrow = sent.copy()
    narrow.problem = Problem(512, 63, 32, *problem)
    exchange = Problem(0, 64, 32, *problem, Op.GEMM_ALLTOALL)
    to_all = plan_module.templates.make_all_to_all(
        exchange, Kernel.LIBRARY, Resources(), 0, Transport.PEER
    )
    narrow_to_all = to_all.copy()
    narrow_to_all.problem = Problem(0, 63, 32, *problem, Op.GEMM_ALLTOALL)
    to_all_in_turn = to_all.copy()
    to_all_in_turn.schedule = Schedule.SEQUENTIAL
    plans = {
        "fewer rows than ranks": (few, f"the collective ring cuts m = 1 into {world} parts of 1"),
        "a ring over NCCL": (over_nccl, "ring with the transport nccl, allowed is peer"),
        "a direct reduction over NCCL": (sent_over_nccl, "direct with the transport nccl, allowed"),
        "rows of no whole accesses": (narrow, "rows of 252 bytes, allowed are multiples of 16"),
        "an all-to-all of no whole accesses": (narrow_to_all, "rows of 252 bytes, allowed are"),
        "a sequential all-to-all": (to_all_in_turn, "gemm_alltoall travels by peer with"),
    }
    if not maps:
        missing = "transport is peer, but the ranks of this group do not map"
        plans["no such memory"] = (good, missing)
        plans["no such memory for a direct reduction"] = (sent, missing)
        plans["no such memory for an all-to-all"] = (to_all, missing)
    return plans


def check_refused(failures: Failures, maps: bool) -> None:
    case = Case((512,), 64, 32, bias=True)
    for what, (plan, part) in refused_plans(maps).items():
        code = plan_module.files.encode(plan)
        message = message_of(torch.ops.overlap.set_plan, code, rank_device(), world_name())
        failures.holds(part, message, what)
        check_call(failures, case, "after", what)


@pytest.mark.ranks((2, "gloo"), (2, "nccl"), (4, "nccl"))
def test_peers_are_refused_where_they_cannot_work(failures: Failures) -> None:
    check_refused(failures, peers_work())


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
    check_refused(failures, False)
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
