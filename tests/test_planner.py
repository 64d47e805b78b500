"""What the planner chooses, and what its cost model expects."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from machines import ada, big, cpu, hopper, slow, total
from overlap_torch import plan as plans
from overlap_torch.plan import (
    Collective,
    DType,
    Kernel,
    Layout,
    Machine,
    Problem,
    Schedule,
    Transport,
)

TRAIN_NK = [(8192, 7168), (8192, 2048), (4096, 3584), (16384, 4096)]

MACHINES = [hopper(), hopper(windows=True), slow(windows=True), ada(), ada(link_gbps=100.0), cpu()]
machines = st.sampled_from(MACHINES)
sizes = st.one_of(st.integers(0, 300), st.integers(0, 20_000), st.sampled_from([4096, 8192]))
problems = st.builds(
    Problem,
    m=sizes,
    n=sizes,
    k=sizes,
    dtype=st.sampled_from([DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32, DType.FLOAT64]),
    world_size=st.integers(1, 8),
)


# --- candidates -------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(problems, machines)
def test_planner_candidates_are_valid_and_distinct(problem: Problem, machine: Machine) -> None:
    found = plans.candidates(problem, machine)
    assert found[0] == plans.make_sequential(problem, machine)
    assert found[0].schedule == Schedule.SEQUENTIAL
    for plan in found:
        plan.validate()
        assert plan.problem == problem
    for plan in found[1:]:
        assert plan.schedule == Schedule.OVERLAPPED
    assert len({tuple(plans.encode(plan)) for plan in found}) == len(found)


@settings(max_examples=150, deadline=None)
@given(problems, machines)
def test_planner_candidates_leave_sms_to_all_lanes(problem: Problem, machine: Machine) -> None:
    for plan in plans.candidates(problem, machine)[1:]:
        left = plan.resources.comm_sms
        limits = {chunk.max_ctas for chunk in plan.chunks}
        if machine.arch == 0:
            assert (left, limits, plan.resources.lanes) == (0, {0}, 1)
            continue
        assert limits == {left // plan.resources.lanes}
        assert 0 < 2 * left <= machine.sm_count
        if machine.link_gbps < 60:
            assert left <= 8


@settings(max_examples=150, deadline=None)
@given(problems, machines)
def test_planner_takes_windows_and_exchanges_only_where_they_work(
    problem: Problem, machine: Machine
) -> None:
    for plan in plans.candidates(problem, machine):
        exchange = plan.collective == Collective.EXCHANGE
        assert (plan.layout == Layout.PACKED) == exchange
        if plan.resources.window or exchange:
            assert machine.windows and machine.link_gbps >= 60
        if exchange:
            assert problem.world_size == 2


PLAIN = (False, Collective.ALL_REDUCE, Layout.ROW_MAJOR)
WINDOW = (True, Collective.ALL_REDUCE, Layout.ROW_MAJOR)
EXCHANGE = (True, Collective.EXCHANGE, Layout.PACKED)


@pytest.mark.parametrize(
    ("machine", "world", "kinds"),
    [
        (hopper(windows=True), 2, {EXCHANGE}),
        (hopper(windows=True), 4, {WINDOW, PLAIN}),
        (hopper(), 2, {PLAIN}),
        (hopper(), 4, {PLAIN}),
        (slow(windows=True), 2, {PLAIN}),
        (slow(windows=True), 4, {PLAIN}),
    ],
)
def test_planner_tries_the_kinds_of_calls_that_suit(machine, world, kinds) -> None:
    found = plans.candidates(big(world_size=world), machine)[1:]
    assert {(p.resources.window, p.collective, p.layout) for p in found} == kinds
    assert max(p.resources.lanes for p in found) > 1


@pytest.mark.parametrize(
    ("problem", "machine", "kernel"),
    [
        (big(), hopper(), Kernel.SM90_PINGPONG),
        (big(dtype=DType.FLOAT16), hopper(), Kernel.SM90_PINGPONG),
        (big(), hopper(has_sm90_kernels=False), Kernel.SM80),
        (big(), ada(), Kernel.SM80),
        (big(), ada(has_sm80_kernels=False), Kernel.LIBRARY),
        (big(dtype=DType.FLOAT32), hopper(), Kernel.LIBRARY),
        (big(n=8190), hopper(), Kernel.LIBRARY),
        (big(k=7167), hopper(), Kernel.LIBRARY),
        (big(dtype=DType.FLOAT32), cpu(), Kernel.LIBRARY),
    ],
)
def test_planner_candidates_use_the_kernel_that_takes_the_problem(
    problem: Problem, machine: Machine, kernel: Kernel
) -> None:
    found = plans.candidates(problem, machine)[1:]
    assert {plan.kernel for plan in found} == {kernel}
    transport = Transport.GLOO if machine.arch == 0 else Transport.NCCL
    assert {chunk.transport for plan in found for chunk in plan.chunks} == {transport}


# --- choice -----------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(problems, machines)
def test_planner_choice_beats_the_sequence_by_its_margins(
    problem: Problem, machine: Machine
) -> None:
    sequential, *overlapped = plans.candidates(problem, machine)
    chosen = plans.make_plan(problem, machine)
    library_on_gpu = any(plan.kernel == Kernel.LIBRARY for plan in overlapped) and machine.arch
    share, margin_us = (0.90 if library_on_gpu else 0.95), (12.0 if machine.arch else 0.0)
    limit_us = share * total(sequential, machine) - margin_us
    best_us = min((total(plan, machine) for plan in overlapped), default=limit_us)
    if best_us < limit_us - 1e-6:
        assert chosen in overlapped
        assert total(chosen, machine) == best_us
    elif best_us > limit_us + 1e-6 or not overlapped:
        assert chosen == sequential


@pytest.mark.parametrize(
    ("dtype", "k", "share", "looser"),
    [(DType.BFLOAT16, 2048, 0.95, (0.95, 0.0)), (DType.FLOAT32, 1024, 0.90, (0.95, 12.0))],
)
def test_planner_keeps_the_sequence_inside_its_margins(dtype, k, share, looser) -> None:
    # The slower the link, the more overlap hides: first too little, then enough.
    problem = big(m=2048, k=k, dtype=dtype)
    inside = beyond = 0
    for gbps in range(600, 60, -5):
        machine = hopper(link_gbps=gbps, windows=True)
        sequential, *overlapped = plans.candidates(problem, machine)
        sequence_us = total(sequential, machine)
        best_us = min(total(plan, machine) for plan in overlapped)
        wins = best_us < share * sequence_us - 12
        assert (plans.make_plan(problem, machine) != sequential) == wins
        inside += not wins and best_us < looser[0] * sequence_us - looser[1]
        beyond += wins
    assert inside > 0
    assert beyond > 0


@settings(max_examples=50, deadline=None)
@given(problems, machines)
def test_planner_makes_the_same_plan_from_the_same_facts(
    problem: Problem, machine: Machine
) -> None:
    twin = Problem(problem.m, problem.n, problem.k, problem.dtype, problem.world_size)
    read = plans._parse_machine(repr(machine))  # as another rank receives it
    assert plans.encode(plans.make_plan(twin, read)) == plans.encode(
        plans.make_plan(problem, machine)
    )


@pytest.mark.parametrize("machine", [hopper(), hopper(windows=True), slow(), cpu()], ids=str)
@pytest.mark.parametrize(
    "changes", [{"world_size": 1}, {"m": 0}, {"n": 0}, {"k": 0}, {"m": 0, "k": 0}], ids=str
)
def test_planner_has_only_the_sequence_where_there_is_nothing_to_overlap(
    changes: dict[str, int], machine: Machine
) -> None:
    problem = big(**changes)
    assert plans.candidates(problem, machine) == [plans.make_sequential(problem, machine)]
    plan = plans.make_plan(problem, machine)
    assert (plan.schedule, plan.kernel) == (Schedule.SEQUENTIAL, Kernel.LIBRARY)


@pytest.mark.parametrize("changes", [{"link_gbps": 0.0}, {"sm_gflops": 0.0}, {"sm_count": 0}])
@pytest.mark.parametrize("machine_of", [hopper, cpu])
def test_planner_takes_the_sequence_on_an_unmeasured_machine(machine_of, changes) -> None:
    assert plans.make_plan(big(), machine_of(**changes)).schedule == Schedule.SEQUENTIAL


FAST = [
    (2, hopper()),
    (2, hopper(windows=True)),
    (4, hopper(windows=True)),
    (4, hopper(windows=True, link_gbps=210.0, link_latency_us=12.0)),
]


@pytest.mark.parametrize(("world", "machine"), FAST, ids=str)
@pytest.mark.parametrize("m", [1, 16, 128])
@pytest.mark.parametrize("nk", TRAIN_NK, ids=str)
def test_planner_takes_the_sequence_for_few_rows(m, nk, world, machine) -> None:
    problem = big(m=m, n=nk[0], k=nk[1], world_size=world)
    assert plans.make_plan(problem, machine).schedule == Schedule.SEQUENTIAL


@pytest.mark.parametrize(("world", "machine"), FAST[1:], ids=str)
@pytest.mark.parametrize(
    ("m", "nk"), list(itertools.product([4096, 8192, 16384], TRAIN_NK)), ids=str
)
def test_planner_overlaps_training_shapes_on_a_fast_link(m, nk, world, machine) -> None:
    problem = big(m=m, n=nk[0], k=nk[1], world_size=world)
    plan = plans.make_plan(problem, machine)
    assert plan.schedule == Schedule.OVERLAPPED
    assert len(plan.chunks) >= 2
    assert total(plan, machine) <= 0.95 * total(plans.make_sequential(problem, machine), machine)


def test_planner_leaves_few_sms_on_a_slow_link() -> None:
    plan = plans.make_plan(big(m=4096, k=32768), slow())
    assert plan.schedule == Schedule.OVERLAPPED
    assert 4 <= plan.resources.comm_sms <= 8


@pytest.mark.parametrize(("k", "unhidden"), [(1024, 0), (7168, -1)])
def test_planner_makes_the_chunk_small_that_nothing_hides(k: int, unhidden: int) -> None:
    # No communication runs before the first chunk is computed, no GEMM beside the last one's.
    plan = plans.make_plan(big(k=k, world_size=4), hopper(windows=True))
    tiles = [chunk.tiles for chunk in plan.chunks]
    assert plan.schedule == Schedule.OVERLAPPED
    assert tiles[unhidden] <= sum(tiles) / 4


def test_planner_overlaps_on_cpu() -> None:
    plan = plans.make_plan(big(m=2048, n=2048, k=2048, dtype=DType.FLOAT32), cpu())
    assert plan.schedule == Schedule.OVERLAPPED
    assert 2 <= len(plan.chunks) <= 4
    small = plans.make_plan(big(m=64, n=64, k=64, dtype=DType.FLOAT32), cpu())
    assert small.schedule == Schedule.SEQUENTIAL
