"""The steps of plans as Python sees them: every candidate has them, and ranks whose lists differ communicate alike."""

from __future__ import annotations

import itertools
import json

import pytest

from machines import ada, big, cpu, hopper, slow
from overlap_torch import _plan
from overlap_torch import plan as plans
from overlap_torch.plan import Machine, Plan, Problem
from overlap_torch.plan.types import Kernel, Op, Resources, Transport
from tests import _plan_test

MACHINES = {
    "peers": hopper(windows=True, peer_gbps=350.0),
    "nccl": hopper(windows=True, peer_gbps=0.0),
    "slow": slow(),
    "ada": ada(),
    "cpu": cpu(),
}
REDUCTIONS_AND_GATHERS = [Op.GEMM_ALLREDUCE, Op.GEMM_REDUCESCATTER, Op.ALLGATHER_GEMM]


def steps(plan: Plan, rank: int, machine: Machine = MACHINES["peers"], **variant: object) -> dict:
    def once(pairs: list[tuple[str, object]]) -> dict:
        assert len({name for name, _ in pairs}) == len(pairs), pairs
        return dict(pairs)

    text = _plan.steps_json(plan, rank, machine, **variant)
    return json.loads(text, object_pairs_hook=once)


def collectives(made: dict) -> list[tuple]:
    """NCCL's, and all that ranks must agree on in them, in their order on each lane."""
    names = ("lane", "kind", "max_ctas", "communicator_lane", "count")
    found = [
        tuple(step[name] for name in names)
        for step in made["steps"]
        if step["step"] == "collective"
    ]
    return sorted(found, key=lambda one: one[0])


def head(made: dict) -> tuple:
    names = ("chunks", "communicators", "over_peers", "slot_bytes", "takes_slot", "hears_all")
    return tuple(json.dumps(made[name]) for name in names)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("op", REDUCTIONS_AND_GATHERS, ids=lambda op: op.name.lower())
def test_plan_steps_of_all_candidates_communicate_alike_on_all_ranks(op: Op, machine: str) -> None:
    shapes = [(16384, 8192, 7168), (2048, 4096, 4096), (64, 8192, 2048)]
    variants = [{}, {"kernel_takes": False}, {"bias": True}, {"kernel_takes": False, "bias": True}]
    lists = 0
    for (m, n, k), world in itertools.product(shapes, [2, 4, 8]):
        problem = big(m=m, n=n, k=k, world_size=world, op=op)
        for plan in _plan.candidates(problem, MACHINES[machine]):
            made = [
                steps(plan, rank, MACHINES[machine], **variant)
                for rank in {0, 1, world - 1}
                for variant in variants
            ]
            lists += len(made)
            for other in made[1:]:
                assert head(other) == head(made[0]), plan
                assert collectives(other) == collectives(made[0]), plan
            for one in made:
                check_order(one)
    assert lists >= len(shapes) * (2 + 3 + 3) * len(variants)  # of the sequences alone


def check_order(made: dict) -> None:
    """Steps wait for steps of other lanes in front of them, lanes are forked and joined, and orders exist."""
    forked = False
    for index, step in enumerate(made["steps"]):
        assert all(0 <= other < index for other in step["after"])
        assert all(made["steps"][other]["lane"] != step["lane"] for other in step["after"])
        forked = (forked or step["step"] == "fork") and step["step"] != "join"
        assert forked or step["lane"] == "caller", step
        assert step.get("order", 0) < max(1, len(made["orders"]))
    assert not forked


ROWS = {  # ROWS[name][a][b]: rows that rank a sends to rank b
    "two": [[4096, 4088], [8192, 12288]],
    "two, few": [[3, 0], [1, 8]],
    "four": [[100, 9000, 0, 64], [7, 4000, 30000, 1], [0, 0, 0, 0], [12000, 5, 6, 9999]],
}


def exchanges(made: dict, kind: str) -> list[dict]:
    return [step for step in made["steps"] if step["step"] == kind]


@pytest.mark.parametrize("takes", [True, False], ids=["kernel", "library"])
@pytest.mark.parametrize("name", ROWS)
def test_plan_steps_of_an_all_to_all_send_what_is_received(name: str, takes: bool) -> None:
    rows = ROWS[name]
    world = len(rows)
    plan = _plan.make_all_to_all(
        all_to_all(world), Kernel.SM90_PINGPONG, Resources(comm_sms=16), 16
    )
    made = [
        steps(
            plan,
            rank,
            # How its rows are computed is each rank's own choice.
            kernel_takes=takes and rank % 2 == 0,
            send_rows=rows[rank],
            receive_rows=[row[rank] for row in rows],
        )
        for rank in range(world)
    ]
    calls = [exchanges(one, "send_receive") for one in made]
    assert len({len(one) for one in calls}) == 1
    sent = 0
    for a, b in itertools.product(range(world), repeat=2):
        for sends, receives in zip(calls[a], calls[b], strict=True):
            out = [one["bytes"] for one in sends["sends"] if one["peer"] == b]
            into = [one["bytes"] for one in receives["receives"] if one["peer"] == a]
            assert out == into or a == b
            sent += sum(out) if a != b else 0
    others = sum(rows[a][b] for a in range(world) for b in range(world) if a != b)
    assert sent == others * 4096 * 2


@pytest.mark.parametrize("takes", [True, False], ids=["kernel", "library"])
@pytest.mark.parametrize("name", ROWS)
def test_plan_steps_of_an_all_to_all_over_peers_meet_in_slots(name: str, takes: bool) -> None:
    rows = ROWS[name]
    world = len(rows)
    plan = _plan.make_all_to_all(
        all_to_all(world), Kernel.SM90_PINGPONG, Resources(comm_sms=16), 16, Transport.PEER
    )
    longest = 30000 * 4096 * 2
    made = [
        steps(
            plan,
            rank,
            kernel_takes=takes,
            send_rows=rows[rank],
            receive_rows=[row[rank] for row in rows],
            longest_message=longest,
        )
        for rank in range(world)
    ]
    assert len({one["slot_bytes"] for one in made}) == 1
    messages = [exchanges(one, "peer_exchange")[0]["messages"] for one in made]
    for a, b in itertools.permutations(range(world), 2):
        to, received = messages[a][b]["destination"], messages[b][a]["received"]
        assert to == received == {**received, "buffer": "slot", "index": b}
        assert messages[b][a]["receive_bytes"] == rows[a][b] * 4096 * 2


def all_to_all(world: int) -> Problem:
    return big(op=Op.GEMM_ALLTOALL, m=0, n=4096, k=1024, world_size=world)


@pytest.mark.parametrize("rank", range(4))
def test_plan_steps_of_a_ring_end_with_the_rows(rank: int) -> None:
    """Parts of 65 rows, the last one of 62; in slots all have the same room. By the framework's GEMM and by the kernel."""
    problem = big(m=257, n=512, k=64, world_size=4)
    plan = plans.templates.row_panels(problem, 1, kernel="sm90_pingpong", transport="peer")
    slot_bytes = (3 + 4) * 65 * 512 * 2
    rows = [65, 65, 65, 62]
    turns = [
        (rank + 7 - phase) % 4 for phase in range(4)
    ]  # whose part is computed, the own one last
    made = steps(plan, rank, kernel_takes=False)
    assert made["slot_bytes"] == slot_bytes
    gemms = exchanges(made, "library_gemm")
    assert [(one["begin"], one["end"]) for one in gemms] == [
        (65 * part, 65 * part + rows[part]) for part in turns
    ]
    assert [one["input"]["offset"] for one in gemms] == [65 * part * 64 * 2 for part in turns]
    copies = exchanges(made, "copy")
    before = [(rank + 4 - distance) % 4 for distance in (1, 2, 3)]
    moved = [*turns[:3], rank, rank, rank, *before]
    assert [copy["bytes"] for copy in copies] == [rows[part] * 512 * 2 for part in moved]
    into = [copy["destination"] for copy in copies[6:]]
    assert [place["buffer"] for place in into] == ["output"] * 3
    assert [place["offset"] for place in into] == [65 * part * 512 * 2 for part in before]
    (gemm,) = exchanges(steps(plan, rank), "gemm")
    assert (gemm["begin"], gemm["end"], gemm["rows"]["part_rows"]) == (0, 257, 65)


def test_plan_steps_of_weights_store_into_an_output_each() -> None:
    problem = big(m=8192, n=1536, k=1024, world_size=2, op=Op.ALLGATHER_GEMM)
    plan = _plan.make_row_panels(
        problem, Kernel.SM90_PINGPONG, [16, 16], 8, Resources(comm_sms=8), 8
    )
    made = steps(plan, 1, weights=[(1024, True), (512, False)])
    gemms = exchanges(made, "gemm")
    assert len(gemms) == 3  # own rows, then each chunk's
    assert {gemm["outputs"][0]["to"]["index"] for gemm in gemms} == {0}
    assert [gemm["first_tile"] for gemm in gemms[1:]] == [gemm["end_tile"] for gemm in gemms[:-1]]
    assert (gemms[0]["first_tile"], gemms[-1]["end_tile"]) == (0, 64 * 8)
    library = exchanges(made, "library_gemm")
    assert [(one["weight"], one["begin"], one["end"], one["output"]) for one in library] == [
        (1, begin, begin + count, {"buffer": "output", "index": 1, "offset": begin * 512 * 2})
        for begin, count in [(4096, 4096), (0, 2048), (2048, 2048)]
    ]


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
    rows = _plan.make_all_to_all(all_to_all(2), Kernel.SM90_PINGPONG, Resources(comm_sms=16), 16)
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
        f"#4 copy add_bias source=output+0 destination=output+0 rows=2048 ctas={2**31 - 1} after #3",
        "#5 side0 wait_for_tiles chunk=1 tiles=256",
        f"#6 side0 collective kind=all_reduce max_ctas=8 communicator_lane=0 source=output+{mib} "
        f"destination=output+{mib} count=4194304",
        f"#7 copy add_bias source=output+{mib} destination=output+{mib} rows=2048 ctas={2**31 - 1} after #6",
        "#8 caller join",
    ]
