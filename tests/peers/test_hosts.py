"""Groups of several hosts: ranks of a host map each other's memory, and NCCL goes between hosts.

On CPU messages do both. On GPUs four ranks of one machine are two hosts: OVERLAP_HOST_ID tells this package so, and
NCCL_HOSTID tells NCCL, which then takes its network between them.
"""

import itertools
import json
import math
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import overlap_torch
import rank_pool
from captures import capture, refill, replayed
from checks import Failures, check_call, check_plan, message_of
from machines import hopper
from operands import Case, place, rank_device, world_name
from ops import OPS, map_tensors, tensors_of
from overlap_torch import _plan
from overlap_torch import plan as plan_module
from overlap_torch.plan import Machine, Plan, Problem
from overlap_torch.plan.programs import Program, Transfer, one_shot, ring, two_shot
from overlap_torch.plan.templates import hierarchical, make_all_to_all, row_panels
from overlap_torch.plan.types import Collective, Engine, Kernel, Op, Transport
from peer_races import Runner, race, so_many_calls
from plans import GPU_KERNELS
from programs import by_engines, changed
from tests import _plan_test

RANKS_PER_HOST = 2
OP_NAMES = ("gemm_allreduce", "gemm_reducescatter", "allgather_gemm")
every_op = pytest.mark.parametrize("op", OP_NAMES)
with_messages = pytest.mark.parametrize("op", [*OP_NAMES, "gemm_alltoall"])


@pytest.fixture(autouse=True)
def two_hosts(request: pytest.FixtureRequest) -> None:
    """Ranks of a pool in which each two ranks have a host."""
    if "ranks" not in request.fixturenames:
        return
    ranks = request.getfixturevalue("ranks")
    if ranks.backend == "nccl":
        ranks.environment = {"OVERLAP_HOST_ID": "host{host}"}
        if not rank_pool.shares_gpus():
            ranks.environment |= {"NCCL_HOSTID": "host{host}", "NCCL_SOCKET_IFNAME": "lo"}


def messages(
    problem: Problem, ranks_per_host: int, chunks: int, transport: str, within: Engine = Engine.ANY
) -> Plan:
    """Every rank's messages, straight to their ranks: within a host by this engine."""
    plan = one_shot(problem, chunks, transport=transport, ranks_per_host=ranks_per_host)
    plan.program = Program(
        0,
        [
            changed(one, by=within) if within_host(one, ranks_per_host) else one
            for one in plan.program.transfers
        ],
    )
    plan.validate()
    return plan


def within_host(one: Transfer, ranks_per_host: int) -> bool:
    return one.source.rank // ranks_per_host == one.destination.rank // ranks_per_host


def plans_of(
    op: str, case: Case, world: int, kernel: Kernel, transports: tuple[str, ...], **options: object
) -> list[tuple[str, Plan]]:
    """(label, plan) of one chunk and of as many as there can be, up to three; in one lane between hosts and in two."""
    problem = OPS[op].problem(case, world)
    made = []
    if problem.op == Op.GEMM_ALLTOALL:
        for chunks, engine in itertools.product((1, 3), Engine.__members__.values()):
            plan = messages(problem, RANKS_PER_HOST, chunks, "peer", engine)
            made.append((f"messages in {chunks} pieces by {engine.name}", plan))
        return made
    for chunks, lanes, transport in itertools.product((1, 3), (1, 2), transports):
        how = {"kernel": kernel, "lanes": lanes, "transport": transport, **options}
        whole = hierarchical(problem, RANKS_PER_HOST, 1, **how)
        most = whole.tiles_m // problem.row_parts // whole.cluster_m
        plan = hierarchical(problem, RANKS_PER_HOST, min(chunks, most), **how)
        made.append((f"{len(plan.chunks)} chunks, {lanes} lanes, {transport}", plan))
    return made


# --- on CPU ---


@every_op
@pytest.mark.ranks((4, "gloo"), long=[(8, "gloo")])
def test_hosts_results_are_exact_on_cpu(failures: Failures, op: str) -> None:
    """Rows that come out even, and an all-reduce's that leave the last ranks fewer, or none."""
    world = dist.get_world_size()
    rows = (8 * world, 40 * world, *((37, 3, 1) if op == "gemm_allreduce" else ()))
    for count, dtype, bias in zip(
        rows, itertools.cycle((torch.float64, torch.bfloat16)), itertools.cycle((True, False))
    ):
        case = Case((count,), 24, 16, dtype, bias=bias)
        problem = OPS[op].problem(case, world)
        options = {"transport": "gloo", "tile": (4, 8)}
        for ranks_per_host, chunks in itertools.product({1, 2, world // 2}, (1, 2)):
            whole = hierarchical(problem, ranks_per_host, 1, **options)
            most = max(1, min(chunks, whole.tiles_m // problem.row_parts))
            plan = hierarchical(problem, ranks_per_host, most, **options)
            check_plan(failures, case, plan, "ranks per host", ranks_per_host, op=op)


# --- plans ---


def test_hosts_plans_are_refused_with_what_is_allowed() -> None:
    reduce = Problem(1024, 512, 256, torch.bfloat16, 4)
    for arguments, options, part in [
        ((reduce, 3), {}, "clique = 3 on 4 ranks, allowed are divisors"),
        ((reduce, 4), {}, "except that number itself"),
        ((reduce, 0), {}, "clique = 0 on 4 ranks"),
        ((reduce, 1), {"transport": "peer"}, "within cliques of 1 ranks, allowed are 2 to 8"),
        ((reduce, 2), {"lanes": 3, "transport": "nccl"}, "and 3 lanes, allowed are overlapped"),
        ((reduce, 2), {"window": True, "transport": "nccl"}, "window = 1"),
    ]:
        with pytest.raises(ValueError, match=part):
            hierarchical(*arguments, **options)
    to_all = Problem(0, 512, 256, torch.bfloat16, 4, "gemm_alltoall")
    plan = make_all_to_all(to_all, transport="nccl")
    plan.collective, plan.clique = Collective.HIERARCHICAL, 2
    with pytest.raises(ValueError, match="gemm_alltoall is hierarchical, allowed is all_to_all"):
        plan.validate()
    with pytest.raises(ValueError, match=r"take programs.one_shot\(.*ranks_per_host=2\)"):
        hierarchical(to_all, 2)
    plan = row_panels(reduce, 1, transport="nccl")
    plan.clique = 2
    with pytest.raises(ValueError, match="clique = 2 with the collective all_reduce, allowed is 0"):
        plan.validate()


@pytest.mark.parametrize("make", [one_shot, two_shot, ring], ids=lambda make: make.__name__)
def test_hosts_programs_go_between_hosts_by_nccl(make) -> None:
    """Every rank's steps are proved when the plan is made."""
    for world, op in itertools.product((4, 8), OP_NAMES):
        problem = Problem(512 * world, 256, 128, torch.bfloat16, world, op)
        plan = make(problem, 1, transport="peer", ranks_per_host=world // 2)
        messages = 0
        for rank in range(world):
            steps = json.loads(_plan.steps_json(plan, rank, described(2, 50.0)))["steps"]
            for one in (one for step in steps for one in step.get("sends", [])):
                assert one["peer"] // (world // 2) != rank // (world // 2)
                messages += 1
        assert messages > 0
        slow, fast = (_plan.predict(plan, described(2, gbps)) for gbps in (12.5, 50.0))
        assert fast.communication_us < slow.communication_us < math.inf
        plan = by_engines(plan, ["copy_engine"])
        with pytest.raises(
            ValueError, match="to another host, as each has . ranks: take by = nccl"
        ):
            plan.validate()


def test_hosts_plans_are_saved_loaded_and_agreed_on() -> None:
    plan = hierarchical(Problem(1024, 512, 256, torch.bfloat16, 4), 2, 2, transport="peer")
    files = plan_module.files
    assert files.from_json(files.to_json(plan)) == plan
    assert files.decode(files.encode(plan)) == plan
    assert "hierarchical" in str(plan)
    assert "cliques of 2" in str(plan)


def described(hosts: int, across_gbps: float) -> Machine:
    """Hosts of eight Hopper GPUs; NCCL's rate is that of the network, too."""
    rates = {"link_gbps": 4 * across_gbps, "clique_gbps": 365.0, "across_gbps": across_gbps}
    return hopper(link_latency_us=40.0 + 10.0 * hosts, clique=8, across_latency_us=20.0, **rates)


@every_op
def test_hosts_plans_are_the_tuners_to_weigh_and_not_the_planners(op: str) -> None:
    problem = Problem(16384, 8192, 1024, torch.bfloat16, 16, op)
    machine = described(2, 50.0)
    offered = [plan for plan in _plan.candidates(problem, machine, all=True) if plan.clique]
    assert offered
    assert {plan.clique for plan in offered} == {8}
    assert {plan.chunks[0].transport for plan in offered} == {Transport.PEER}
    assert not [plan for plan in _plan.candidates(problem, machine) if plan.clique]


@every_op
def test_hosts_plans_take_less_time_over_a_faster_network(op: str) -> None:
    problem = Problem(16384, 8192, 1024, torch.bfloat16, 16, op)
    plan = hierarchical(problem, 8, 4, kernel="sm90_pingpong", transport="peer", comm_sms=16)
    slow, fast = (_plan.predict(plan, described(2, gbps)).total_us for gbps in (12.5, 50.0))
    assert fast < slow
    # Each rank sends an eighth of the rows to the other host, half of which stay, and receives as much.
    moved = problem.m * (problem.k if op == "allgather_gemm" else problem.n) * 2
    across = moved / 16 * (2 if op == "gemm_allreduce" else 1)
    assert slow > across / 12.5e3


@pytest.mark.parametrize(
    ("hosts", "found"),
    [
        ("aabb", 2),
        ("aaaabbbb", 4),
        ("aaaa", 4),
        ("abcd", 1),
        ("abab", 1),  # ranks of a host do not follow each other
        ("aaab", 1),
        ("aabbb", 1),
        ("aabbaa", 1),
        ("a" * 9, 1),  # more than map each other
        ("a" * 9 + "b" * 9, 1),
        ("".join(host * 8 for host in "abcdefgh"), 8),
    ],
)
def test_hosts_are_told_apart_by_their_ranks_names(hosts: str, found: int) -> None:
    assert _plan_test.ranks_of_each_host(list(hosts), 8) == found


# --- on GPUs ---


@pytest.mark.ranks((4, "nccl"))
def test_hosts_are_found_and_measured(failures: Failures) -> None:
    machine = plan_module.machine()
    failures.equal(machine.clique, RANKS_PER_HOST)
    failures.equal(machine.peer_gbps, 0.0)
    failures.equal(machine.clique_gbps > 0.0, True)
    failures.equal(machine.across_gbps > 0.0, True)
    failures.equal(machine.across_latency_us > 0.0, True)
    failures.alike(repr(machine))


@with_messages
@pytest.mark.parametrize("kernel", GPU_KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.ranks((4, "nccl"))
def test_hosts_results_are_exact(failures: Failures, op: str, kernel: Kernel) -> None:
    world = dist.get_world_size()
    uneven = [Case((1500,), 264, 64, torch.bfloat16, bias=True), Case((3,), 136, 64, torch.float16)]
    even = [Case((512 * world,), 512, 128, torch.bfloat16, bias=True)]
    for case in even + (uneven if op == "gemm_allreduce" else []):
        options = {"comm_sms": 8, "max_ctas": 4} if kernel != Kernel.LIBRARY else {}
        for label, plan in plans_of(op, case, world, kernel, ("peer", "nccl"), **options):
            check_plan(failures, case, plan, label, kernel.name, op=op)


@pytest.mark.ranks((4, "nccl"))
def test_hosts_plans_over_the_memory_of_all_ranks_are_refused(failures: Failures) -> None:
    case = Case((1024,), 512, 128, torch.bfloat16)
    whole = row_panels(
        OPS["gemm_allreduce"].problem(case, 4), 1, kernel="sm90_pingpong", transport="peer"
    )
    code = plan_module.files.encode(whole)
    message = message_of(torch.ops.overlap.set_plan, code, rank_device(), world_name())
    failures.holds(
        "do not map each other's memory; use nccl, or the collective hierarchical", message
    )
    check_call(failures, case, "after")


@so_many_calls(100)
@pytest.mark.ranks((4, "nccl"))
@pytest.mark.seconds(600)
def test_hosts_calls_in_a_row_are_right_whoever_is_late(failures: Failures, calls: int) -> None:
    runners = []
    for number, op in enumerate((*OP_NAMES, "gemm_alltoall")):
        for kernel in (Kernel.LIBRARY, Kernel.SM90_PINGPONG):
            case = Case((1024 + 512 * number,), 512 + 128 * len(runners), 128, torch.bfloat16)
            plan = plans_of(op, case, 4, kernel, ("peer",), comm_sms=8, max_ctas=4)[-1][1]
            runners.append(Runner(kernel.name, op, case, plan))
    large = Case((8192,), 4096, 128, torch.bfloat16)
    outgrows = plans_of("gemm_allreduce", large, 4, Kernel.LIBRARY, ("peer",))[0][1]
    race(failures, runners, Runner("larger", "gemm_allreduce", large, outgrows), calls, seed=5)


@every_op
@pytest.mark.ranks((4, "nccl"))
def test_hosts_graphs_replay_with_new_inputs(failures: Failures, op: str) -> None:
    case = Case((2048,), 512, 128, torch.bfloat16)
    plan = plans_of(op, case, 4, Kernel.LIBRARY, ("peer",))[-1][1]
    arguments = [OPS[op].arguments(case, *place(), seed) for seed in range(3)]
    rights = [OPS[op].expected(case, *place(), seed) for seed in range(3)]
    held = map_tensors(torch.clone, arguments[0])
    with plan_module.use_plan(plan):
        graph, outputs = capture(lambda: tensors_of(OPS[op].wrapper(*held)))
        for turn in range(6):
            refill(held, arguments[turn % 3])
            failures.expect_equal(replayed(graph, outputs), rights[turn % 3], "replay", turn)
            between = tensors_of(OPS[op].wrapper(*arguments[1]))
            failures.expect_equal(between, rights[1], "after replay", turn)
    torch.cuda.synchronize()


@pytest.mark.ranks((4, "nccl"))
@pytest.mark.fresh(group_timeout_s=60.0, environment={"OVERLAP_HOST_ID": "host{host}"})
def test_hosts_rank_that_leaves_a_call_out_is_named(failures: Failures) -> None:
    """The ranks of its host wait for its rows, those of the other host for its messages: none hangs."""
    case = Case((2048,), 512, 128, torch.bfloat16)
    group = dist.new_group(timeout=timedelta(seconds=rank_pool.under_load(2.0)))
    arguments = OPS["gemm_allreduce"].arguments(case, *place(), 0)
    plan = plans_of("gemm_allreduce", case, 4, Kernel.LIBRARY, ("peer",))[0][1]
    plan_module.set_plan(plan, group=group)

    def step() -> None:
        OPS["gemm_allreduce"].wrapper(*arguments, group=group)

    step()
    torch.cuda.synchronize()
    overlap_torch.check()
    dist.barrier()
    if dist.get_rank() < 3:
        step()
        torch.cuda.synchronize()
        message = message_of(step)
        failures.holds(f"group '{group.group_name}'", message)
        failures.holds("rank 3", message)
    else:  # nothing has failed here
        failures.expect(message_of(overlap_torch.check) or None)
    dist.barrier()
