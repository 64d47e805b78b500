"""The steps of plans as Python sees them: every candidate has them, and ranks whose lists differ communicate alike."""

from __future__ import annotations

import json

import pytest

from machines import ada, big, cpu, hopper, slow
from overlap_torch import _plan
from overlap_torch.plan import Machine, Plan
from overlap_torch.plan.types import Kernel, Op, Resources
from tests import _plan_test

MACHINES = {
    "peers": hopper(windows=True, peer_gbps=350.0),
    "nccl": hopper(windows=True, peer_gbps=0.0),
    "slow": slow(),
    "ada": ada(),
    "cpu": cpu(),
}


def steps(plan: Plan, rank: int, machine: Machine = MACHINES["peers"], **variant: object) -> dict:
    def once(pairs: list[tuple[str, object]]) -> dict:
        assert len({name for name, _ in pairs}) == len(pairs), pairs
        return dict(pairs)

    text = _plan.steps_json(plan, rank, machine, **variant)
    return json.loads(text, object_pairs_hook=once)


def test_plan_steps_of_a_capture_stage_outside_of_the_window() -> None:
    problem = big(m=4096, n=2048, k=1024, world_size=2, op=Op.GEMM_REDUCESCATTER)
    resources = Resources(comm_sms=8, window=True)
    plan = _plan.make_row_panels(problem, Kernel.SM90_PINGPONG, [8, 8], 8, resources, 8)
    scratch = [steps(plan, 0, captured=captured)["scratch"] for captured in (False, True)]
    assert scratch == [
        [{"buffer": buffer, "bytes": 4096 * 2048 * 2}] for buffer in ("window", "staging")
    ]


def test_plan_steps_stage_parts_between_multiples_of_16_bytes_outside_of_the_window() -> None:
    """The last chunk's rows, of 2002 bytes each, are whole accesses in a window, or are not."""
    buffers = []
    for rows in (4096, 4095):
        problem = big(m=rows, n=1001, k=1024, world_size=2)
        resources = Resources(comm_sms=8, window=True)
        plan = _plan.make_row_panels(problem, Kernel.SM90_PINGPONG, [16, 16], 8, resources, 8)
        buffers += [one["buffer"] for one in steps(plan, 0, kernel_takes=False)["scratch"]]
    assert buffers == ["window", "staging"]


def test_plan_steps_refuse_what_does_not_fit_the_plan() -> None:
    plan = _plan.make_sequential(big(world_size=2), MACHINES["nccl"])
    with pytest.raises(ValueError, match="rank 2 is not one of the plan's 2 ranks, 0 to 1"):
        steps(plan, 2)
    with pytest.raises(ValueError, match="send_rows has 2 counts; the plan's op takes none"):
        steps(plan, 0, send_rows=[1, 1])
    with pytest.raises(ValueError, match="weights are for plans of allgather_gemm"):
        steps(plan, 0, weights=[(8, True)])
    exchange = big(op=Op.GEMM_ALLTOALL, n=4096, k=1024, world_size=2)
    rows = _plan.make_all_to_all(exchange, Kernel.SM90_PINGPONG, Resources(comm_sms=16), 16)
    with pytest.raises(ValueError, match="some below 0; the plan's op takes one of 0 or more for"):
        steps(rows, 0, send_rows=[1, -1], receive_rows=[1, 1])
    gather = _plan.make_sequential(
        big(world_size=2, op=Op.ALLGATHER_GEMM, m=4096, n=1024), MACHINES["nccl"]
    )
    with pytest.raises(ValueError, match="have 1016 columns together, and the plan's n is 1024"):
        steps(gather, 0, weights=[(512, True), (504, True)])


def test_plan_steps_as_text_say_what_they_wait_for() -> None:
    plan = _plan.make_row_panels(
        big(m=4096, n=2048, k=1024, world_size=2),
        Kernel.SM90_PINGPONG,
        [16, 16],
        8,
        Resources(comm_sms=8),
        8,
    )
    text = _plan_test.steps_text(plan, 0, MACHINES["nccl"], bias=True).splitlines()
    mib = 8 << 20
    assert text[2:] == [
        "#0 caller fork side_lanes=1 copies=1",
        "#1 caller gemm begin=0 end=4096 input=input+0 outputs=[{to=output+0}] order=0 first_tile=0 end_tile=512 "
        "ctas=124 counts=1",
        "#2 side0 wait_for_tiles chunk=0 tiles=256",
        "#3 side0 collective kind=all_reduce max_ctas=8 communicator_lane=0 source=output+0 destination=output+0 "
        "count=4194304",
        f"#4 copy add_terms source=output+0 destination=output+0 rows=2048 ctas={2**31 - 1} after #3",
        "#5 side0 wait_for_tiles chunk=1 tiles=256",
        f"#6 side0 collective kind=all_reduce max_ctas=8 communicator_lane=0 source=output+{mib} "
        f"destination=output+{mib} count=4194304",
        f"#7 copy add_terms source=output+{mib} destination=output+{mib} rows=2048 ctas={2**31 - 1} after #6",
        "#8 caller join",
    ]
