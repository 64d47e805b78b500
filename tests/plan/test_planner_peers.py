"""When the planner takes memory that the ranks map into each other, and what it expects of it."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from machines import ada, big, checked_candidates, hopper, over_peers, peers, slow, total
from overlap_torch import plan as plans
from overlap_torch.plan import Machine, Plan, Problem
from overlap_torch.plan.templates import make_all_to_all, make_plan, make_sequential
from overlap_torch.plan.types import Collective, DType, Kernel, Op, Schedule, Transport
from tests import _plan_test
from tests.lib.planner_problems import MACHINES

COLLECTIVES = {
    Op.GEMM_ALLREDUCE: Collective.RING,
    Op.GEMM_REDUCESCATTER: Collective.RING,
    Op.ALLGATHER_GEMM: Collective.ALL_GATHER,
}
every_op = pytest.mark.parametrize("op", [*COLLECTIVES], ids=lambda op: op.name.lower())

TRAIN_NK = [(8192, 7168), (8192, 2048), (16384, 4096)]
TRAIN = [
    *itertools.product(COLLECTIVES, [2, 4], [8192, 16384], TRAIN_NK),
    *itertools.product(COLLECTIVES, [8], [16384, 32768], TRAIN_NK),
]


def in_one_step(plan: Plan) -> bool:
    """Over peers, with all partial sums sent at once, or all of the input."""
    gathers = (plan.collective, plan.schedule) == (Collective.ALL_GATHER, Schedule.SEQUENTIAL)
    return over_peers(plan) and (plan.collective == Collective.DIRECT or gathers)


def in_phases(plan: Plan) -> bool:
    """Over peers by a kernel of this package's, as a ring, or chunk by chunk."""
    return over_peers(plan) and not in_one_step(plan) and plan.collective != Collective.STRIPES


@pytest.mark.parametrize(("world", "m"), [(2, 1), (2, 138), (4, 16), (8, 16384)])
def test_planner_overlaps_nothing_where_the_product_is_given(world: int, m: int) -> None:
    plan = make_plan(big(m=m, k=0, world_size=world), peers())
    plan.validate()
    assert (plan.schedule, plan.kernel) == (Schedule.SEQUENTIAL, Kernel.LIBRARY)
    assert in_one_step(plan) == (m < 1024)


@pytest.mark.parametrize(("op", "world", "m", "nk"), TRAIN, ids=str)
def test_planner_takes_peers_at_training_sizes(op: Op, world: int, m: int, nk) -> None:
    problem = big(m=m, n=nk[0], k=nk[1], world_size=world, op=op)
    plan = make_plan(problem, peers())
    plan.validate()
    assert over_peers(plan)
    assert plan.schedule == Schedule.OVERLAPPED
    short = 2 * m * nk[0] * nk[1] < 1e12  # FLOP: a GEMM of up to 1.4 ms
    cool = op == Op.ALLGATHER_GEMM and short and nk[1] > 2048
    assert plan.kernel == (Kernel.SM90_COOPERATIVE if cool else Kernel.SM90_PINGPONG_WIDE)
    assert plan.collective == COLLECTIVES[op] or in_one_step(plan)
    assert total(plan, peers()) < 0.97 * total(make_sequential(problem, peers()), peers()) - 8
    if op == Op.GEMM_REDUCESCATTER or in_one_step(plan):
        assert len(plan.chunks) == 1
    # SMs are left to what waits beside the GEMM: for rows that arrive, and for chunks of a reduction.
    waits = op == Op.ALLGATHER_GEMM or len(plan.chunks) > 1
    assert (plan.resources.comm_sms > 0) == waits


@every_op
def test_planner_tries_phases_with_a_fast_link_between_peers_only(op: Op) -> None:
    cases = [
        (big(op=op), peers(), True),
        (big(op=op), peers(windows=False), True),
        (big(op=op, world_size=8), peers(), True),
        (big(op=op, dtype=DType.FLOAT16), peers(), True),
        (big(op=op), peers(peer_gbps=0.0), False),
        (big(op=op), peers(peer_gbps=50.0), False),
        (big(op=op, world_size=16), peers(), False),
        (big(op=op), peers(kernel_arch=80), False),
        (big(op=op), ada(peer_gbps=350.0), op == Op.ALLGATHER_GEMM),  # by copy engines
        (big(op=op), slow(peer_gbps=350.0), False),
        (big(op=op, dtype=DType.FLOAT32), peers(), False),
        (big(op=op, n=8190), peers(), False),
        (big(op=op, k=7167), peers(), False),
    ]
    for problem, machine, tries in cases:
        found = plans.candidates(problem, machine)
        assert any(in_phases(plan) for plan in found) == tries, (problem, machine)
        assert in_phases(make_plan(problem, machine)) <= tries


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_planner_takes_phases_for_rows_that_are_no_equal_parts(world: int) -> None:
    # Parts of 16 tile rows, as those of 2048 rows have.
    equal = make_plan(big(m=2048 * world, world_size=world), peers())
    assert in_phases(equal)
    for m in (2048 * world - 1, 2047 * world + 1, 1999 * world + 1):
        plan = make_plan(big(m=m, world_size=world), peers())
        plan.validate()
        assert in_phases(plan)
        assert (plan.kernel, plan.chunks, plan.bands) == (equal.kernel, equal.chunks, equal.bands)


# --- all-to-all -------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("changes", "kernel"),
    [
        ({}, Kernel.SM90_PINGPONG),
        ({"dtype": DType.FLOAT16, "n": 8, "k": 8}, Kernel.SM90_PINGPONG),
        ({"k": 7167}, Kernel.LIBRARY),
        ({"dtype": DType.FLOAT32, "n": 4}, Kernel.LIBRARY),
    ],
    ids=str,
)
def test_planner_takes_peers_for_an_all_to_all(changes, kernel: Kernel, world: int) -> None:
    problem = big(op=Op.GEMM_ALLTOALL, world_size=world, **changes)
    for windows in (False, True):
        machine = peers(windows=windows)
        plan = make_plan(problem, machine)
        plan.validate()
        assert plans.candidates(problem, machine)[1:] == [plan]
        assert over_peers(plan)
        # For two ranks one launch does everything, in wide tiles where the kernels take the
        # problem.
        once = world == 2 and kernel == Kernel.SM90_PINGPONG
        own = Kernel.SM90_PINGPONG_WIDE if once else kernel
        assert (plan.collective, plan.kernel) == (Collective.ALL_TO_ALL, own)
        assert plan.resources.one_launch == once
        assert (plan.schedule, len(plan.chunks)) == (Schedule.OVERLAPPED, 1)
        # Between more ranks, where long messages travel by NCCL, it gets its SMs.
        assert plan.resources.comm_sms == (0 if world == 2 else 16)
        assert plan.chunks[0].max_ctas > 0
        assert (plan.resources.lanes, plan.resources.window) == (1, False)


@pytest.mark.parametrize("op", list(Op.__members__.values()), ids=str)
@pytest.mark.parametrize("machine", [peers(), peers(peer_gbps=0.0), slow()], ids=str)
def test_planner_leaves_float64_on_gpus_to_the_composition(op, machine: Machine) -> None:
    problem = big(op=op, dtype=DType.FLOAT64)
    assert [one.schedule for one in plans.candidates(problem, machine)] == [Schedule.SEQUENTIAL]
    assert make_plan(problem, machine).schedule == Schedule.SEQUENTIAL


@pytest.mark.parametrize(
    ("changes", "machine", "ctas"),
    [
        ({}, peers(peer_gbps=0.0), 24),
        ({}, peers(peer_gbps=99.0), 24),
        ({}, slow(), 4),
        ({}, slow(peer_gbps=50.0), 4),
        ({"n": 8190}, peers(), 24),
        ({"n": 4095, "dtype": DType.FLOAT32}, peers(), 24),
        ({"world_size": 4}, peers(peer_gbps=0.0), 16),
        ({"world_size": 4}, slow(), 4),
        ({"world_size": 9}, peers(), 16),
    ],
    ids=str,
)
def test_planner_leaves_other_all_to_alls_to_nccl(changes, machine: Machine, ctas: int) -> None:
    plan = make_plan(big(op=Op.GEMM_ALLTOALL, **changes), machine)
    plan.validate()
    assert [chunk.transport for chunk in plan.chunks] == [Transport.NCCL]
    assert (plan.schedule, plan.collective) == (Schedule.OVERLAPPED, Collective.ALL_TO_ALL)
    assert (plan.resources.comm_sms, plan.chunks[0].max_ctas) == (ctas, ctas)


@pytest.mark.parametrize(
    ("once", "n", "k", "send_rows", "expected"),
    [
        # 64 tiles a tile row, on 132 SMs. Two launches of 16 rounds where the framework's one takes 31, and 67 MB that
        # are sent while tiles are computed rather than afterwards.
        (False, 8192, 7168, [4096, 4096], True),
        (False, 8192, 7168, [8192, 8192, 8192, 8192], True),
        # The other rank's rows, or the own, are most of them.
        (False, 8192, 7168, [16384, 4096], True),
        (False, 8192, 7168, [4096, 16384], True),
        # Sending takes longer than the launch that it hides behind: less is hidden, but nothing is lost.
        (False, 8192, 1024, [4096, 4096], True),
        # Hardly anything is computed: stores of a GEMM carry less than the kernel that only sends.
        (False, 8192, 8, [4096, 4096], False),
        # Everything fits into one round: two launches take twice as long, and hide a message of 256 KiB.
        (False, 8192, 7168, [16, 16], False),
        (False, 8192, 7168, [128, 128], False),
        (False, 8192, 7168, [1, 1, 1, 1], False),
        # Measured on two H100s, in one launch over launches apart or the framework's: 1.18 to 1.28 of the gain.
        (True, 8192, 7168, [2048, 2048], True),
        (True, 8192, 7168, [1365, 2731], True),
        (True, 8192, 2048, [683, 1365], True),
        (True, 4096, 3584, [2048, 2048], True),
        # 0.81: four rounds of tiles for what the framework's GEMM has three and a quarter of.
        (True, 8192, 7168, [341, 683], False),
        # One round of tiles, as the framework's, that takes longer.
        (True, 8192, 7168, [1, 1], False),
    ],
    ids=str,
)
def test_all_to_all_stores_rows_where_they_go_where_that_was_faster(
    once, n, k, send_rows, expected
) -> None:
    """In launches apart, or at once in wide tiles."""
    problem = big(op=Op.GEMM_ALLTOALL, world_size=len(send_rows), n=n, k=k)
    kernel = Kernel.SM90_PINGPONG_WIDE if once else Kernel.SM90_PINGPONG
    resources = plans.types.Resources(one_launch=True) if once else None
    plan = make_all_to_all(problem, kernel, resources, 0, Transport.PEER)
    for rank in range(len(send_rows)):
        assert _plan_test.stores_messages(plan, peers(), rank, send_rows) == expected


@pytest.mark.parametrize(
    ("shape", "apart"),
    [
        # Half of the rows in whole rounds of SMs, and an exchange that the other half hides: 1.17x to 1.42x of the
        # sequence.
        ((4096, 16384, 8192), True),
        ((8192, 5120, 2560), True),
        ((5000, 1600, 3200), True),
        ((20480, 8192, 1024), True),
        ((16384, 8192, 2048), True),
        ((4096, 4096, 3584), True),
        # Rounds that two launches do not fill: 0.66x to 0.92x.
        ((1536, 4096, 14336), False),
        ((1026, 28672, 4096), False),
        ((778, 4096, 4096), False),
        ((2, 8192, 7168), False),
    ],
)
def test_all_to_all_of_two_ranks_computes_apart_where_that_was_faster(shape, apart) -> None:
    m, n, k = shape
    problem = big(n=n, k=k, op=Op.GEMM_ALLTOALL)
    plan = make_all_to_all(problem, Kernel.SM90_PINGPONG)
    machine = hopper(windows=True)
    halves = [m // 2, m - m // 2]
    for rank in (0, 1):
        assert _plan_test.computes_apart(plan, machine, rank, halves, halves, 108) == apart


# --- what is expected -------------------------------------------------------------------------------


sizes = st.one_of(st.integers(1, 3000), st.sampled_from([4096, 8192]))


@settings(max_examples=80)
@given(st.sampled_from([*COLLECTIVES]), sizes, sizes, sizes, st.integers(2, 8), st.booleans())
def test_planner_candidates_over_peers_are_valid_and_distinct(
    op, rows, n, k, world, windows
) -> None:
    problem = Problem(rows * world, n, k, DType.BFLOAT16, world, op)
    machine = peers(windows=windows)
    found = checked_candidates(problem, machine)
    for plan in found:
        if over_peers(plan):
            stripes = plan.kernel == Kernel.LIBRARY and plan.collective == Collective.STRIPES
            assert plan.collective == COLLECTIVES[op] or in_one_step(plan) or stripes
            assert (plan.resources.lanes, plan.resources.window) == (1, False)
    chosen = make_plan(problem, machine)
    assert chosen in found
    if over_peers(chosen):
        overlapped = chosen.schedule == Schedule.OVERLAPPED
        share, margin_us = (0.97, 8.0) if overlapped else (1.0, 0.0)
        assert total(chosen, machine) + margin_us < share * total(found[0], machine)


# --- in one step ------------------------------------------------------------------------------------

DECODE_NK = [(4096, 3584), (8192, 2048), (8192, 7168)]


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("nk", DECODE_NK, ids=str)
@pytest.mark.parametrize("m", [1, 2, 16, 17, 64, 128])
def test_planner_reduces_few_rows_in_one_step(m: int, nk, world: int, windows: bool) -> None:
    for dtype in (DType.BFLOAT16, DType.FLOAT16):
        problem = big(m=m, n=nk[0], k=nk[1], world_size=world, dtype=dtype)
        plan = make_plan(problem, peers(windows=windows))
        plan.validate()
        assert over_peers(plan)
        assert (plan.collective, plan.schedule) == (Collective.DIRECT, Schedule.SEQUENTIAL)
        assert (plan.kernel, len(plan.chunks)) == (Kernel.LIBRARY, 1)
        assert not over_peers(make_plan(problem, peers(windows=windows, peer_gbps=0.0)))


KERNELS = {
    "batch": (Kernel.SM90_PINGPONG, Kernel.SM90_PINGPONG_WIDE),
    "world": (Kernel.SM90_PINGPONG,),
}


@pytest.mark.parametrize("op", [Op.GEMM_ALLREDUCE, Op.GEMM_REDUCESCATTER], ids=str)
@pytest.mark.parametrize(
    ("world", "invariance"),
    [*((n, "batch") for n in (2, 3, 4, 8)), *((n, "world") for n in (2, 4, 8))],
)
def test_planner_invariant_calls_have_one_gemm_whatever_the_rows(
    world: int, invariance: str, op: Op
) -> None:
    """A plan over peers with a kernel of this package for each M; where none serves all, the sequence for each."""
    for rows in (1, 2, 7, 16, 127, 513, 4095, 8192, 65536):
        rows *= world if op == Op.GEMM_REDUCESCATTER else 1
        problem = Problem(rows, 8192, 1024, "bfloat16", world, op, invariance=invariance)
        plan = make_plan(problem, MACHINES["hopper"])
        assert plan.kernel in KERNELS[invariance], plan
        assert plan.collective in (Collective.DIRECT, Collective.OWNERS), plan
        for without in ("hopper without peers", "cpu"):
            sequence = make_sequential(problem, MACHINES[without])
            assert make_plan(problem, MACHINES[without]) == sequence
        # K of 960 is cut into groups that are no multiples of 64.
        for n, k in ((8191, 1024), *(((8192, 960 // world),) if invariance == "world" else ())):
            odd = Problem(rows, n, k, "bfloat16", world, op, invariance=invariance)
            sequence = make_sequential(odd, MACHINES["hopper"])
            assert make_plan(odd, MACHINES["hopper"]) == sequence
