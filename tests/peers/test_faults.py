"""Ranks that die, never call, come late or disagree: clear errors within the stated time, on ranks of their own."""

import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

import overlap_torch
import rank_pool
from checks import Failures, check_call, message_of
from operands import Case, place, rank_device, world_name
from ops import OPS
from overlap_torch import plan as plan_module
from overlap_torch.plan.types import Kernel
from plans import chunked_plan, sequential_plan, stripes

# Ranks that share a GPU with a dozen others have come six seconds late.
GROUP_TIMEOUT_S = min(12.0, rank_pool.under_load(6.0))
# An error may come this long after the deadline: the watchdog's period, the store, a loaded
# machine.
MARGIN_S = rank_pool.under_load(7.0)
CASE = Case((256,), 128, 64, torch.float32, bias=True)
RANKS_PER_HOST = 2
PLANS = ["default", "sequential", "row panels", "packed"]
GPU_PLANS = [*PLANS, "exchange", "window"]
# Over peers: in phases, in one step, after the framework's GEMM and in the kernel's stores, and by stripes.
PEER_PLANS = ["peers", "direct", "direct stores", "stripes"]
PEER_KERNELS = [
    pytest.param(plan, Kernel.SM90_PINGPONG if plan == "direct stores" else Kernel.LIBRARY, id=plan)
    for plan in PEER_PLANS
]
SOON_S = rank_pool.under_load(2.0)
LATER_S = rank_pool.under_load(3.0)
BACKENDS = [
    pytest.param("gloo", id="gloo"),
    pytest.param("nccl", id="nccl", marks=[pytest.mark.gpu, pytest.mark.gpu2]),
]


def case_of(plan: str) -> Case:
    return CASE.with_(dtype=torch.bfloat16) if plan == "direct stores" else CASE


def set_plan_named(name: str, op: str = "gemm_allreduce") -> None:
    world, device = dist.get_world_size(), rank_device().type
    if name == "default":
        return
    if name == "sequential":
        plan = sequential_plan(CASE, world, device)
    elif name.startswith("direct"):
        kernel = Kernel.SM90_PINGPONG if name == "direct stores" else Kernel.LIBRARY
        plan = plan_module.templates.at_once(OPS[op].problem(case_of(name), world), kernel=kernel)
    elif name == "hosts":
        problem = OPS[op].problem(CASE, world)
        options = {"transport": "gloo", "tile": (32, 32)}
        plan = plan_module.templates.hierarchical(problem, RANKS_PER_HOST, 2, **options)
    elif name == "stripes":
        plan = stripes(OPS[op].problem(CASE, world), "peer", (32, 32))[1][1]
    else:
        layout = "packed" if name == "window" else name
        resources = {"window": True, "max_ctas": 8} if name == "window" else {}
        plan = chunked_plan(CASE, world, device, layout, 8, tile=(32, 32), op=op, **resources)
    plan_module.set_plan(plan)


def prepared(case: Case, op: str = "gemm_allreduce") -> Callable[[], object]:
    arguments = OPS[op].arguments(case, *place())
    return partial(OPS[op].wrapper, *arguments)


def call(op: str = "gemm_allreduce", case: Case = CASE) -> object:
    return prepared(case, op)()


def until_error(step: Callable[[], object], limit_s: float) -> tuple[float, str]:
    """Repeats `step` until it raises: seconds until then, and the message; "" if it never did.

    An error belongs at the next op or check(), and neither may block past the deadline.
    """
    start = time.monotonic()
    while time.monotonic() - start < limit_s:
        try:
            step()
        except RuntimeError as error:
            return time.monotonic() - start, str(error)
        time.sleep(0.25)  # launches that nobody runs any more must not fill the driver's queues
    return time.monotonic() - start, ""


def expect_reports(outcomes: list[rank_pool.Outcome], survivors: list[int], limit_s: float) -> None:
    for rank in survivors:
        seconds, message = outcomes[rank].result()
        assert message, f"rank {rank} saw no error in {seconds:.1f} s"
        assert seconds <= limit_s, f"rank {rank} raised after {seconds:.1f} s: {message}"
        assert "overlap_torch" in message, message
        assert f"rank {rank}" in message, message
        assert re.search(r"chunk \d+", message), message


def reports_of(
    world: int,
    backend: str,
    job: Callable[..., object],
    *args: object,
    deadline_s: float | None = None,
) -> list[str]:
    """Messages of all ranks but the last, which fails: by the group's timeout, or by the environment's deadline."""
    how: dict[str, object] = {"group_timeout_s": GROUP_TIMEOUT_S}
    if deadline_s is not None:
        how = {"group_timeout_s": 40.0, "environment": {"OVERLAP_TIMEOUT_S": str(deadline_s)}}
    outcomes = rank_pool.run_fresh(world, backend, job, *args, **how)
    limit_s = MARGIN_S + (GROUP_TIMEOUT_S if deadline_s is None else deadline_s)
    expect_reports(outcomes, list(range(world - 1)), limit_s)
    return [outcome.value[1] for outcome in outcomes[:-1]]


def synchronize() -> None:
    if rank_device().type == "cuda":
        torch.cuda.synchronize()


def die_in_mid_op(plan: str, use_check: bool, dead: int = 1) -> tuple[float, str] | None:
    """The last ranks, so many, are killed while their ops hold their chunks back; the others go on calling."""
    set_plan_named(plan)
    step = partial(call, case=case_of(plan))
    step()
    synchronize()
    dist.barrier()
    if dist.get_rank() >= dist.get_world_size() - dead:
        torch.ops.overlap.delay_side_stream(400_000)
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
        while True:
            step()
            synchronize()
    start = time.monotonic()
    limit_s = GROUP_TIMEOUT_S + MARGIN_S + 5.0
    if use_check:  # calls until the rank is dead, then none
        seconds, message = until_error(step, 2.0)
        if message:
            return seconds, message
    _, message = until_error(overlap_torch.check if use_check else step, limit_s)
    seconds = time.monotonic() - start
    if rank_device().type == "cuda":  # what was found stays found
        for again in (overlap_torch.check, step):
            found = until_error(again, 1.0)[1]
            assert found == message, f"{found!r} after {message!r}"
    return seconds, message


def expect_killed_is_reported(
    world: int, backend: str, plan: str, use_check: bool, dead: int = 1
) -> None:
    outcomes = rank_pool.run_fresh(
        world, backend, die_in_mid_op, plan, use_check, dead, group_timeout_s=GROUP_TIMEOUT_S
    )
    assert [outcome.kind for outcome in outcomes[-dead:]] == ["died"] * dead, outcomes
    expect_reports(outcomes, list(range(world - dead)), GROUP_TIMEOUT_S + MARGIN_S)


@pytest.mark.parametrize("plan", PLANS)
def test_faults_killed_rank_is_reported_on_cpu(plan):
    expect_killed_is_reported(3, "gloo", plan, False)


def test_faults_host_that_vanishes_is_reported_on_cpu():
    expect_killed_is_reported(4, "gloo", "hosts", False, dead=RANKS_PER_HOST)


@pytest.mark.gpu
@pytest.mark.gpu2
@pytest.mark.parametrize(
    ("plan", "use_check"),
    [("default", False), ("exchange", False), ("packed", True), ("window", True)],
)
def test_faults_killed_rank_is_reported_on_gpu(plan, use_check):
    expect_killed_is_reported(2, "nccl", plan, use_check)


def never_call(plan: str, warm: bool, op: str = "gemm_allreduce") -> tuple[float, str] | None:
    """The last rank does not call the op; `warm`: it did so before."""
    if warm:
        set_plan_named(plan, op)
        # An all-to-all's first two calls compare messages on the host, its third does not.
        for _ in range(2):
            call(op, case_of(plan))
            synchronize()
    return report_of_others(partial(call, op, case_of(plan)))


def report_of_others(
    step: Callable[[], object], of_last: Callable[[], object] = lambda: None
) -> tuple[float, str] | None:
    """Seconds and message of a call that the last rank does not make: it does something else, and waits for the others' reports."""
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        of_last()
        end = time.monotonic() + GROUP_TIMEOUT_S + MARGIN_S + 10.0
        while time.monotonic() < end and not store.check(["reported"]):
            time.sleep(0.1)
        return None
    start = time.monotonic()
    try:
        step()
        message = until_error(overlap_torch.check, GROUP_TIMEOUT_S + MARGIN_S + 5.0)[1]
    except RuntimeError as error:
        message = str(error)
    seconds = time.monotonic() - start
    store.set("reported", "")
    return seconds, message


ALLREDUCE, ON_GPUS = "gemm_allreduce", BACKENDS[1].marks
# Backend, plan, op, and OVERLAP_TIMEOUT_S where it is set instead of the group's timeout.
NEVER_CALLED = [
    pytest.param("gloo", "default", ALLREDUCE, None),
    pytest.param("gloo", "packed", ALLREDUCE, None, marks=pytest.mark.long),
    *(pytest.param("nccl", plan, ALLREDUCE, None, marks=ON_GPUS) for plan in ("default", "packed", "window")),
    *(
        pytest.param(backend, "default", op, None, marks=marks) for backend,
        marks in (("gloo", pytest.mark.whole), ("nccl", ON_GPUS)) for op in OPS if op != ALLREDUCE),
    *(pytest.param("gloo", plan, ALLREDUCE, SOON_S) for plan in ("default", "row panels")),
    pytest.param("nccl", "row panels", ALLREDUCE, SOON_S, marks=ON_GPUS),
]  # fmt: skip


@pytest.mark.parametrize(("backend", "plan", "op", "deadline_s"), NEVER_CALLED)
def test_faults_rank_that_never_calls_is_reported(backend, plan, op, deadline_s):
    reports_of(2, backend, never_call, plan, True, op, deadline_s=deadline_s)


class Raises(overlap_torch.AttentionKernel):
    name = "raises"

    def forward(self, q, k, v, work):
        raise ArithmeticError("no numbers today")


def attend_without(kind: str) -> tuple[float, str] | None:
    """An attention over peers that the last rank does not call, or leaves half-way because its kernel raises."""
    q = torch.zeros(1, 256, 8, 64, dtype=torch.bfloat16, device=rank_device())
    keywords = {"head_parts": dist.get_world_size(), "transport": "peer"}
    overlap_torch.context_parallel_attention(q, q, q, **keywords)
    synchronize()

    def raises() -> None:
        with pytest.raises(ArithmeticError, match="no numbers today"):
            overlap_torch.context_parallel_attention(q, q, q, kernel=Raises(), **keywords)

    step = partial(overlap_torch.context_parallel_attention, q, q, q, **keywords)
    return report_of_others(step, *([raises] if kind == "raises" else []))


@pytest.mark.gpu
@pytest.mark.gpu2
@pytest.mark.parametrize("kind", ["never calls", "raises"])
def test_faults_rank_that_leaves_an_attention_is_named(kind):
    outcomes = rank_pool.run_fresh(2, "nccl", attend_without, kind, group_timeout_s=GROUP_TIMEOUT_S)
    seconds, message = outcomes[0].result()
    assert seconds <= GROUP_TIMEOUT_S + MARGIN_S and "rank 1" in message, (seconds, message)
    assert kind != "raises" or "no numbers today" in message, message


def skip_unless_it_runs(ranks, plan: str) -> None:
    ranks.skip_without_peers()
    if plan == "direct stores":
        ranks.skip_without_kernel(Kernel.SM90_PINGPONG)


OVER_PEERS = [
    *itertools.product(["gemm_allreduce", "gemm_reducescatter"], PEER_PLANS),
    *itertools.product(["allgather_gemm"], PEER_PLANS[:-1]),
    ("gemm_alltoall", "peers"),
]


@pytest.mark.parametrize(("op", "plan"), OVER_PEERS)
@pytest.mark.ranks((2, "nccl"), (4, "nccl"))
def test_faults_rank_that_never_calls_is_named_over_peers(ranks, op, plan):
    skip_unless_it_runs(ranks, plan)
    messages = reports_of(ranks.world, "nccl", never_call, plan, True, op, deadline_s=SOON_S)
    for message in messages:
        # Around a ring of more, a rank may wait for one that waits for the missing one.
        if ranks.world == 2 or op in ("allgather_gemm", "gemm_alltoall") or plan != "peers":
            assert f"rank {ranks.world - 1}" in message, message


def call_behind_one_that_gives_up(op: str) -> tuple[float, str] | None:
    """The last rank does not call; each other calls later than the one before, which gives up first, and lets it go on."""
    set_plan_named("peers", op)
    for _ in range(2):
        call(op, case_of("peers"))
        synchronize()
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    rank, missing = dist.get_rank(), dist.get_world_size() - 1

    def ends() -> None:
        call(op, case_of("peers"))
        synchronize()
        overlap_torch.check()

    time.sleep(0.8 * rank)
    start = time.monotonic()
    message = message_of(ends) if rank < missing else ""
    seconds = time.monotonic() - start
    store.add("ended", 1)
    while store.add("ended", 0) <= missing and time.monotonic() - start < 30.0:
        time.sleep(0.1)
    return (seconds, message) if rank < missing else None


@pytest.mark.ranks((3, "nccl"), (4, "nccl"))
def test_faults_rank_behind_one_that_gave_up_is_told(ranks):
    """The rank's waits all ended in time: with what is not right."""
    ranks.skip_without_peers()
    job = (call_behind_one_that_gives_up, "gemm_reducescatter")
    first, *others = reports_of(ranks.world, "nccl", *job, deadline_s=LATER_S)
    assert f"from rank {ranks.world - 1} passed its deadline" in first
    for message in others:
        assert "rank 0 has failed, and what it sent since is not right" in message


@pytest.mark.parametrize("plan", PEER_PLANS)
@pytest.mark.parametrize("use_check", [False, True])
@pytest.mark.ranks((2, "nccl"))
def test_faults_killed_rank_is_reported_over_peers(ranks, use_check, plan):
    skip_unless_it_runs(ranks, plan)
    expect_killed_is_reported(2, "nccl", plan, use_check)


@pytest.mark.parametrize("backend", BACKENDS)
def test_faults_rank_that_never_makes_its_first_call_is_reported(backend):
    """Before the first call there is no communicator: making it must not wait for ever either."""
    outcomes = rank_pool.run_fresh(
        2, backend, never_call, "default", False, group_timeout_s=GROUP_TIMEOUT_S
    )
    seconds, message = outcomes[0].result()
    assert message, "no error"
    assert seconds <= GROUP_TIMEOUT_S + MARGIN_S, f"raised after {seconds:.1f} s: {message}"


def come_late(failures: Failures, plans: list[str]) -> None:
    """Each rank by turns starts its call two seconds after the others; results are right on all of them."""
    for seed, plan in enumerate(plans):
        set_plan_named(plan)
        case = case_of(plan)
        check_call(failures, case, plan, seed=seed)
        if dist.get_rank() == seed % dist.get_world_size():
            time.sleep(2.0)
        check_call(failures, case, plan, "late", seed=seed + 10)
    overlap_torch.check()


patient = pytest.mark.fresh(group_timeout_s=GROUP_TIMEOUT_S)


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
@patient
def test_faults_late_rank_is_waited_for(failures: Failures) -> None:
    come_late(failures, GPU_PLANS if dist.get_backend() == "nccl" else ["sequential", "packed"])


@pytest.mark.parametrize(("plan", "kernel"), PEER_KERNELS)
@pytest.mark.ranks((2, "nccl"))
@pytest.mark.peers
@patient
def test_faults_late_rank_is_waited_for_over_peers(
    failures: Failures, plan: str, kernel: Kernel
) -> None:
    come_late(failures, [plan, plan])


def check_behind_failure(failures: Failures, groups: list, checks: int, *where: object) -> None:
    """The last rank leaves a call of each group out: what the others find as soon as they have synchronized, by so many checks
    and the group's next call."""
    steps = [partial(prepared(CASE), group=group) for group in groups]
    for step in steps:
        step()
    torch.cuda.synchronize()
    overlap_torch.check()
    dist.barrier()
    if dist.get_rank() < dist.get_world_size() - 1:
        for step in steps:
            step()
        torch.cuda.synchronize()
        for group, step in zip(groups, steps, strict=True):
            for again in (*[overlap_torch.check] * checks, step):
                failures.holds(f"group '{group.group_name}'", message_of(again), *where)
    else:  # nothing has failed here
        failures.expect(message_of(overlap_torch.check) or None, *where)
    dist.barrier()


def warm_up() -> None:
    """A process's first call takes longer on one rank than on another: by more than a short deadline."""
    call()
    torch.cuda.synchronize()
    overlap_torch.check()
    dist.barrier()


# Ranks that share a GPU wait for their turns of it.
SHORT = timedelta(seconds=rank_pool.under_load(0.5))
over_peers_and_nccl = pytest.mark.parametrize(
    "transport",
    [
        pytest.param("peers", marks=[pytest.mark.peers, pytest.mark.fresh(group_timeout_s=60.0)]),
        pytest.param(
            "nccl",
            marks=pytest.mark.fresh(group_timeout_s=60.0, environment={"OVERLAP_PEERS": "0"}),
        ),
    ],
)


@over_peers_and_nccl
@pytest.mark.parametrize(
    "repeats",
    # 200 in all, in parts that several workers take.
    [5, *(pytest.param(10, marks=pytest.mark.long, id=f"10-{part}") for part in range(20))],
)
@pytest.mark.ranks((2, "nccl"))
@pytest.mark.seconds(150)
def test_faults_check_right_behind_synchronize_misses_nothing(
    failures: Failures, repeats: int, transport: str
) -> None:
    warm_up()
    for repeat in range(repeats):
        group = dist.new_group(timeout=SHORT)
        check_behind_failure(failures, [group], 2, "repeat", repeat)
        dist.destroy_process_group(group)
        overlap_torch.check()  # whoever still holds the group does not want to know


@over_peers_and_nccl
@pytest.mark.ranks((2, "nccl"))
def test_faults_two_groups_that_fail_both_end(failures: Failures, transport: str) -> None:
    """Two groups whose calls the last rank leaves out: what ends one of them must not wait for the other."""
    warm_up()
    check_behind_failure(failures, [dist.new_group(timeout=SHORT) for _ in range(2)], 0)


OTHER_CALLS = {
    "K": CASE.with_(k=32),
    "M": CASE.with_(leading=(128,)),
    "M and N": CASE.with_(leading=(512,), n=64),
}


def disagree_at_last(other: str, way: str) -> tuple[str, str]:
    """The last rank calls something else, once: what its next calls, or check(), say."""
    last = dist.get_rank() == dist.get_world_size() - 1
    for case in (CASE, OTHER_CALLS[other]):
        for _ in range(2):
            call(case=case)
    torch.cuda.synchronize()
    dist.barrier()
    odd = prepared(OTHER_CALLS[other] if last else CASE)
    if way == "captured":
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            odd()
    else:
        odd()
    if way == "checked":  # its flags are waited for in vain, until the watchdog knows why
        torch.cuda.synchronize()
        return "", message_of(overlap_torch.check)
    return until_error(call, 20.0)[1], message_of(overlap_torch.check)


@pytest.mark.parametrize(
    ("transport", "other", "way"),
    [
        *itertools.product(["nccl"], ["K", "M and N"], ["called", "captured"]),
        ("peers", "K", "captured"),
        *itertools.product(["peers"], OTHER_CALLS, ["checked"]),
    ],
)
@pytest.mark.ranks((2, "nccl"), (3, "nccl"))
def test_faults_disagreement_is_found_by_the_watchdog(ranks, transport, other, way):
    if transport == "peers":
        ranks.skip_without_peers()
    outcomes = rank_pool.run_fresh(
        ranks.world, "nccl", disagree_at_last, other, way, group_timeout_s=60.0, timeout_s=90.0,
        environment={"OVERLAP_PEERS": "0"} if transport == "nccl" else {},
    )  # fmt: skip
    problems = [
        rf"gemm_allreduce m={case.leading[0]} n={case.n} k={case.k}"
        for case in (CASE, OTHER_CALLS[other])
    ]
    for outcome in outcomes:
        raised, checked = outcome.result()
        pattern = (
            rf"in call 5 rank 0 called {problems[0]} .*, rank {ranks.world - 1} called {problems[1]} "
            r".*undefined since call 5"
        )
        for message in [checked] if way == "checked" else [raised, checked]:
            assert re.search(pattern, message), message


def disagree_and_end() -> str:
    last = dist.get_rank() == dist.get_world_size() - 1
    call()
    torch.cuda.synchronize()
    dist.barrier()
    call(case=OTHER_CALLS["K"] if last else CASE)
    return until_error(call, 20.0)[1]


@pytest.mark.ranks((2, "nccl"))
def test_faults_failure_ends_the_process_if_asked_to(ranks):
    outcomes = rank_pool.run_fresh(
        2, "nccl", disagree_and_end, group_timeout_s=60.0, timeout_s=90.0,
        environment={"OVERLAP_ON_FAILURE": "abort"},
    )  # fmt: skip
    assert "died" in {outcome.kind for outcome in outcomes}
    # The other one may see its peer die before it knows of the disagreement.
    for outcome in outcomes:
        assert outcome.kind == "died", outcome
        assert "OVERLAP_ON_FAILURE=abort" in outcome.detail, outcome.detail


WEIGHTS = "allgather_gemm.weights"

# what -> (rank 0's case, rank 1's case, patterns of both that every rank's message must hold)
DISAGREEMENTS = {
    "M": (CASE.with_(leading=(253,)), CASE.with_(leading=(251,)), r"\b253\b", r"\b251\b"),
    "N": (CASE.with_(n=149), CASE.with_(n=151), r"\b149\b", r"\b151\b"),
    "K": (CASE.with_(k=73), CASE.with_(k=79), r"\b73\b", r"\b79\b"),
    "dtype": (CASE.with_(dtype=torch.float16), CASE, r"\bfloat16\b", r"\bfloat32\b"),
    "no rows": (CASE.with_(leading=(0,)), CASE.with_(leading=(251,)), r"\b[mM]\s*=\s*0\b", r"\b251\b"),
    "no K": (CASE.with_(k=0), CASE.with_(k=79), r"\b[kK]\s*=\s*0\b", r"\b79\b"),
}  # fmt: skip


in_debug_mode = pytest.mark.fresh(
    group_timeout_s=GROUP_TIMEOUT_S, environment={"OVERLAP_DEBUG": "1"}
)
DISAGREE_ABOUT = [
    *(("gemm_allreduce", names) for names in (["M", "N", "K", "dtype"], ["no rows"], ["no K"])),
    *((op, ["N", "K", "dtype"]) for op in OPS if op not in ("gemm_allreduce", WEIGHTS)),
    (WEIGHTS, ["K", "dtype"]),
]


@pytest.mark.parametrize(("op", "names"), DISAGREE_ABOUT, ids=str)
@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
@in_debug_mode
def test_faults_disagreement_is_found_in_debug_mode(
    failures: Failures, op: str, names: list[str]
) -> None:
    """Calls on which the ranks disagree, between calls on which they agree."""
    rank = dist.get_rank()
    check_call(failures, CASE, "before", op=op)
    for name in names:
        arguments = OPS[op].arguments(DISAGREEMENTS[name][rank], *place())
        message = message_of(OPS[op].wrapper, *arguments)
        for pattern in (*DISAGREEMENTS[name][2:], "rank 0", "rank 1"):
            missing = None if re.search(pattern, message) else f"{pattern} is not in {message!r}"
            failures.expect(missing, "disagreement about", name)
        check_call(failures, CASE, "after the disagreement about", name, seed=1, op=op)


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
@in_debug_mode
def test_faults_disagreement_about_counts_is_found_in_debug_mode(failures: Failures) -> None:
    """Rank 0 sends three rows of which rank 1 expects four; then other dims between the first and the last."""
    rank, device = dist.get_rank(), rank_device()
    x, w = torch.ones(5, 3, device=device), torch.ones(4, 3, device=device)
    send = [[2, 3], [5, 0]][rank]
    message = message_of(overlap_torch.gemm_alltoall, x, w, send, [[2, 5], [4, 0]][rank])
    failures.says(message, ("rank 0 sends 3 rows to rank 1", "expects 4"))
    x = x.unsqueeze(1).expand(5, rank + 1, 3)
    message = message_of(overlap_torch.gemm_alltoall, x, w, send, [[2, 5], [3, 0]][rank])
    failures.says(message, ("[1]", "[2]", "rank 0", "rank 1"))
    check_call(failures, CASE, "after the disagreements", seed=1, op="gemm_alltoall")


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
@in_debug_mode
def test_faults_different_plans_are_found_in_debug_mode(failures: Failures) -> None:
    check_call(failures, CASE, "before")
    if dist.get_rank() == 1:
        set_plan_named("packed")
    failures.says(message_of(call), ("packed", "row_major"))
    torch.ops.overlap.clear_plans(world_name())
    check_call(failures, CASE, "after", seed=1)
    set_plan_named("row panels")
    check_call(failures, CASE, "with the same plan", seed=2)
