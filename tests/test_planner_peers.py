"""When the planner takes memory that the ranks map into each other, and what it expects of it."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from machines import ada, big, hopper, slow, total
from overlap_torch import plan as plans
from overlap_torch.plan import Collective, DType, Kernel, Machine, Op, Plan, Problem, Transport

COLLECTIVES = {
    Op.GEMM_ALLREDUCE: Collective.RING,
    Op.GEMM_REDUCESCATTER: Collective.RING,
    Op.ALLGATHER_GEMM: Collective.ALL_GATHER,
}
every_op = pytest.mark.parametrize("op", [*COLLECTIVES], ids=lambda op: op.name.lower())

# Between more than two ranks an all-reduce is left to NCCL.
TRAIN_NK = [(8192, 7168), (8192, 2048), (16384, 4096)]
TRAIN = [
    (op, world, m, nk)
    for op, world, m, nk in itertools.product(COLLECTIVES, [2, 4], [8192, 16384], TRAIN_NK)
    if (op, world) != (Op.GEMM_ALLREDUCE, 4)
]


def fast(**changes: object) -> Machine:
    """H200s that map each other's memory."""
    return hopper(**{"windows": True, "peer_gbps": 350.0, **changes})


def over_peers(plan: Plan) -> bool:
    return plan.chunks[0].transport == Transport.PEER


@pytest.mark.parametrize(("op", "world", "m", "nk"), TRAIN, ids=str)
def test_planner_takes_peers_at_training_sizes(op: Op, world: int, m: int, nk) -> None:
    problem = big(m=m, n=nk[0], k=nk[1], world_size=world, op=op)
    plan = plans.make_plan(problem, fast())
    plan.validate()
    assert over_peers(plan)
    assert (plan.kernel, plan.collective) == (Kernel.SM90_PINGPONG, COLLECTIVES[op])
    assert total(plan, fast()) < 0.97 * total(plans.make_sequential(problem, fast()), fast()) - 8
    if op == Op.GEMM_REDUCESCATTER:  # which waits for nobody beside its GEMM, and sends no chunks
        assert (len(plan.chunks), plan.resources.comm_sms) == (1, 0)
    else:
        assert plan.resources.comm_sms > 0


@every_op
def test_planner_tries_peers_with_a_fast_link_between_them_only(op: Op) -> None:
    cases = [
        (big(op=op), fast(), True),
        (big(op=op), fast(windows=False), True),
        (big(op=op, world_size=8), fast(), op != Op.GEMM_ALLREDUCE),
        (big(op=op, dtype=DType.FLOAT16), fast(), True),
        (big(op=op), fast(peer_gbps=0.0), False),
        (big(op=op), fast(peer_gbps=50.0), False),
        (big(op=op, world_size=16), fast(), False),
        (big(op=op), fast(has_sm90_kernels=False), False),
        (big(op=op), ada(peer_gbps=350.0), False),
        (big(op=op), slow(peer_gbps=350.0), False),
        (big(op=op, dtype=DType.FLOAT32), fast(), False),
        (big(op=op, n=8190), fast(), False),
        (big(op=op, k=7167), fast(), False),
    ]
    for problem, machine, tries in cases:
        found = plans.candidates(problem, machine)
        assert any(over_peers(plan) for plan in found) == tries, (problem, machine)
        assert over_peers(plans.make_plan(problem, machine)) <= tries


def test_planner_takes_nccl_for_rows_that_are_no_equal_parts() -> None:
    assert over_peers(plans.make_plan(big(m=8192), fast()))
    for plan in (*plans.candidates(big(m=8193), fast()), plans.make_plan(big(m=8193), fast())):
        assert not over_peers(plan)


def test_planner_does_not_take_peers_for_an_all_to_all() -> None:
    for plan in plans.candidates(big(m=0, op=Op.GEMM_ALLTOALL), fast()):
        assert not over_peers(plan)


sizes = st.one_of(st.integers(1, 3000), st.sampled_from([4096, 8192]))


@settings(max_examples=80, deadline=None)
@given(st.sampled_from([*COLLECTIVES]), sizes, sizes, sizes, st.integers(2, 8), st.booleans())
def test_planner_candidates_over_peers_are_valid_and_distinct(
    op, rows, n, k, world, windows
) -> None:
    problem = Problem(rows * world, n, k, DType.BFLOAT16, world, op)
    machine = fast(windows=windows)
    found = plans.candidates(problem, machine)
    for plan in found:
        plan.validate()
        assert plan.problem == problem
        assert plans.decode(plans.encode(plan)) == plan
        if over_peers(plan):
            assert plan.collective == COLLECTIVES[op]
            assert (plan.resources.lanes, plan.resources.window) == (1, False)
    assert len({tuple(plans.encode(plan)) for plan in found}) == len(found)
    chosen = plans.make_plan(problem, machine)
    assert chosen in found
    assert plans.make_plan(problem, plans._parse_machine(repr(machine))) == chosen
    if over_peers(chosen):
        sequential_us = total(found[0], machine)
        assert total(chosen, machine) + 8.0 < 0.97 * sequential_us


def bytes_sent(plan: Plan) -> float:
    """What every rank has to send to its peers, at least, in bytes."""
    problem = plan.problem
    width = problem.k if problem.op == Op.ALLGATHER_GEMM else problem.n
    part = problem.m // problem.world_size * width * 2
    times = 2 if problem.op == Op.GEMM_ALLREDUCE else 1  # to sum up, and to spread
    return times * part * (problem.world_size - 1)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([*COLLECTIVES]),
    st.integers(1, 9000),
    sizes,
    sizes,
    st.integers(2, 8),
    st.integers(1, 8),
    st.floats(1.0, 900.0),
    st.floats(1.0, 4.0),
)
def test_predict_over_peers_is_finite_and_falls_with_the_rate(
    op, rows, n, k, world, chunks, gbps, faster
) -> None:
    problem = Problem(rows * world, n, k, DType.BFLOAT16, world, op)
    chunks = min(chunks, -(-rows // 256))
    plan = plans.row_panels(problem, chunks, kernel="sm90_pingpong", transport="peer")
    slower_link, faster_link = fast(peer_gbps=gbps), fast(peer_gbps=gbps * faster)
    prediction = plans.predict(plan, slower_link)
    times = (prediction.gemm_us, prediction.communication_us, prediction.total_us)
    assert all(math.isfinite(time) and time > 0 for time in times)
    assert prediction.total_us >= prediction.gemm_us * (1 - 1e-9)
    assert prediction.total_us >= bytes_sent(plan) / (1e3 * gbps)
    assert total(plan, faster_link) <= prediction.total_us * (1 + 1e-9)
    # More work takes no less time.
    for change in ({"k": 2 * k}, {"n": 2 * n}):
        fields = {"m": problem.m, "n": n, "k": k, **change}
        more = Problem(**fields, dtype=DType.BFLOAT16, world_size=world, op=op)
        larger = plans.row_panels(more, chunks, kernel="sm90_pingpong", transport="peer")
        assert total(larger, slower_link) >= prediction.total_us * (1 - 1e-9)


@pytest.mark.parametrize("gbps", [0.0, 351.25, 1 / 3, 1e-7, 123456789.125])
def test_machine_is_read_as_it_is_printed(gbps: float) -> None:
    machine = fast(peer_gbps=gbps, link_gbps=0.1 + 0.2)
    assert f"peer_gbps={gbps:g}" in repr(machine) or gbps not in (0.0, 351.25)
    read = plans._parse_machine(repr(machine))
    assert repr(read) == repr(machine)
    assert (read.peer_gbps, read.link_gbps, read.windows) == (gbps, 0.1 + 0.2, True)
