"""Ranks that call other problems: on CPU every rank raises before anything is communicated."""

import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

import overlap_torch
import rank_pool
from checks import Failures, check_call, message_of
from operands import Case, place
from ops import OPS, every_op
from overlap_torch import plan as plan_module
from overlap_torch.nn import ColumnParallelLinear, RowParallelLinear
from plans import chunked_plan

CASE = Case((256,), 128, 64, torch.float32, bias=True)
# The last rank calls these, where the others call CASE: the parts of both that every message must
# name.
OTHERS = {
    "half the rows": (CASE.with_(leading=(128,)), "m=256", "m=128"),
    "some rows fewer": (CASE.with_(leading=(252,)), "m=256", "m=252"),
    "no rows": (CASE.with_(leading=(0,)), "m=256", "m=0"),
    "N": (CASE.with_(n=64), "n=128", "n=64"),
    "K": (CASE.with_(k=32), "k=64", "k=32"),
    "dtype": (CASE.with_(dtype=torch.float64), "float32", "float64"),
}
GATHERS_ROWS = ("allgather_gemm", "allgather_gemm.weights")  # a rank's M is a part of the problem's


def call(op: str, case: Case) -> object:
    arguments = OPS[op].arguments(case, *place())
    return OPS[op].wrapper(*arguments)


def expect_named(failures: Failures, message: str, parts: tuple[str, ...], *where: object) -> None:
    last = dist.get_world_size() - 1
    told = ("rank 0 called", f"rank {last} called", "Nothing was communicated")
    failures.says(message, (*parts, *told), *where)


def disagree(failures: Failures, op: str) -> None:
    """One rank calls something else, between calls on which all agree."""
    last = dist.get_rank() == dist.get_world_size() - 1
    check_call(failures, CASE, "before", op=op)
    for name, (other, *parts) in OTHERS.items():
        if op == "gemm_alltoall" and "rows" in name:  # rows differ by rank
            continue
        arguments = OPS[op].arguments(other if last else CASE, *place())
        message = message_of(OPS[op].wrapper, *arguments)
        # The problem's M is that of all ranks, its N that of all weights.
        if op in GATHERS_ROWS or (op == "gemm_reducescatter" and "rows" in name):
            parts = [part if part[:2] not in ("m=", "n=") else part[:2] for part in parts]
        expect_named(failures, message, tuple(parts), op, name)
        check_call(failures, CASE, "after", name, seed=1, op=op)


@every_op
@pytest.mark.ranks((2, "gloo"), (3, "gloo"))
def test_disagreement_about_the_problem_raises_on_every_rank(failures: Failures, op: str) -> None:
    disagree(failures, op)


@pytest.mark.ranks((2, "gloo"))
def test_disagreement_about_the_choices_of_experts_is_named(failures: Failures) -> None:
    choices = 1 + dist.get_rank()
    ids, shares = torch.zeros(2, choices, dtype=torch.int64), torch.ones(2, choices)
    operands = (torch.ones(2, 6), ids, shares, torch.ones(1, 6, 6), torch.ones(1, 6, 3))
    message = message_of(overlap_torch.moe, *operands)
    for part in ("top 1 of [1, 1]", "top 2 of [1, 1]"):
        failures.holds(part, message, "experts")
    check_call(failures, CASE, "after")


@pytest.mark.ranks((2, "gloo"), (3, "gloo"))
def test_disagreement_about_the_order_raises_on_every_rank(failures: Failures) -> None:
    """One rank makes two calls in the other order; then two other ops."""
    last = dist.get_rank() == dist.get_world_size() - 1
    large = CASE.with_(leading=(512,), n=256)
    for first, second in (
        (("gemm_allreduce", CASE), ("gemm_allreduce", large)),
        (("gemm_allreduce", CASE), ("gemm_reducescatter", CASE)),
        (("allgather_gemm", CASE), ("gemm_alltoall", CASE)),
    ):
        for op, case in (second, first) if last else (first, second):
            arguments = OPS[op].arguments(case, *place())
            message = message_of(OPS[op].wrapper, *arguments)
            expect_named(failures, message, (first[0], second[0]), "order", first, second)
    check_call(failures, CASE, "after", seed=1)


@pytest.mark.ranks((2, "gloo"), (3, "gloo"))
def test_disagreement_about_the_plan_raises_on_every_rank(failures: Failures) -> None:
    last = dist.get_rank() == dist.get_world_size() - 1
    world = dist.get_world_size()
    check_call(failures, CASE, "before")
    # As many bytes a chunk, in half as many chunks: gloo would pair them.
    chunks = 2 if last else 4
    plan_module.set_plan(chunked_plan(CASE, world, "cpu", "row panels", chunks, tile=(32, 32)))
    message = message_of(call, "gemm_allreduce", CASE)
    expect_named(failures, message, ("by another plan",), "plans")
    plan_module.set_plan(chunked_plan(CASE, world, "cpu", "row panels", 4, tile=(32, 32)))
    check_call(failures, CASE, "after", seed=1)


@pytest.mark.ranks((2, "gloo"), (3, "gloo"))
def test_disagreement_about_the_rows_of_an_alltoall_is_named(failures: Failures) -> None:
    """The op, with columns and without, and a job of a kernel; calls before and after are right."""
    world = dist.get_world_size()
    last = dist.get_rank() == world - 1
    sends, receives = [4] * world, [4] * world
    if last:
        receives[0] = 3

    def op(columns: int) -> object:
        x, weight = torch.ones(4 * world, 8), torch.ones(columns, 8)
        return overlap_torch.gemm_alltoall(x, weight, sends, receives)

    def job() -> None:
        how = {"tile": (2, 8), "send_rows": sends, "recv_rows": receives}
        with overlap_torch.produce("all_to_all", (4 * world, 8), torch.float32, **how) as made:
            made.output.fill_(1.0)
            for tile in range(made.tiles):
                made.counters[made.tile_chunk[tile]] += 1

    parts = (
        f"rank 0 sends 4 rows to rank {world - 1}, which expects 3",
        "Nothing was communicated",
    )
    for compute in (lambda: op(8), lambda: op(0), job):
        check_call(failures, CASE, "before", op="gemm_alltoall")
        failures.says(message_of(compute), parts)
    check_call(failures, CASE, "after", op="gemm_alltoall")


@pytest.mark.ranks((2, "gloo"))
def test_disagreement_that_one_rank_does_not_come_to_ends_with_its_call(failures: Failures) -> None:
    """Rank 0 expects more rows than it has memory for, and fails before ranks compare: the calls after it are paired."""
    group, rank = dist.new_group(), dist.get_rank()
    x, weight = torch.ones(8, 3), torch.ones(5, 3)
    receives = [4, 2**50 if rank == 0 else 4]
    message = message_of(overlap_torch.gemm_alltoall, x, weight, [4, 4], receives, group=group)
    failures.holds("can't allocate" if rank == 0 else f"which expects {2**50}", message)
    for factor in (1, 2, 3):
        found = overlap_torch.gemm_allreduce(factor * x, weight, group=group)
        failures.equal(found.unique().tolist(), [6.0 * factor], factor)


@pytest.mark.ranks((3, "gloo"))
def test_disagreement_of_a_subgroup_is_its_own(failures: Failures) -> None:
    """The other group's calls are not concerned, and are counted by themselves."""
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    if rank < 2:
        x, w = torch.ones(64 * (1 + rank), 32), torch.ones(16, 32)
        for _ in range(3):  # more calls than the other group has
            overlap_torch.gemm_allreduce(x[:64], w, group=pair)
        message = message_of(lambda: overlap_torch.gemm_allreduce(x, w, group=pair))
        failures.says(message, ("m=64", "m=128", "call 4", pair.group_name))
    check_call(failures, CASE, "in the whole group", seed=2)


class _Raises(torch.autograd.Function):
    """Its backward raises on the last rank, as where memory is out."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if dist.get_rank() == dist.get_world_size() - 1:
            raise RuntimeError("out of memory")
        return grad


COLUMN, ROW = partial(ColumnParallelLinear, 6, 12), partial(RowParallelLinear, 12, 6)
# Layers whose backward communicates, by an op or a collective of its own first; which part of 12 features they take, if it is not
# all 6; and whether the input's gradient is wanted.
SKIPPED = {
    "column, cut tokens": (partial(COLUMN, sequence_parallel=True), False, True),
    "column": (COLUMN, False, True),
    "column, gathered": (partial(COLUMN, gather_output=True), False, True),
    "row, cut tokens": (partial(ROW, sequence_parallel=True), True, True),
    "row, cut tokens, weights alone": (partial(ROW, sequence_parallel=True), True, False),
}


@pytest.mark.parametrize("name", list(SKIPPED))
@pytest.mark.ranks((2, "gloo"), (3, "gloo"))
def test_disagreement_about_a_backward_leaves_nothing_on_its_way(
    failures: Failures, name: str
) -> None:
    """The last rank leaves a layer's backward out, and all are told at its next call; then all is right again."""
    make, takes_part, wants_gradient = SKIPPED[name]
    layer, world = make(), dist.get_world_size()
    x = torch.ones(4 * world, 12 // world if takes_part else 6, requires_grad=wants_gradient)
    check_call(failures, CASE, "before")
    message = message_of(lambda: _Raises.apply(layer(x)).sum().backward())
    if dist.get_rank() == world - 1:
        failures.equal(message, "out of memory", name)
        message = message_of(call, "gemm_alltoall", CASE)
    told = (f"rank {world - 1} called gemm_alltoall", "Nothing was communicated")
    failures.says(message, told, name)
    layer(x).sum().backward()
    for seed in (1, 2):
        check_call(failures, CASE, "after", name, seed=seed)


@pytest.mark.ranks((2, "gloo"))
@pytest.mark.fresh(group_timeout_s=20.0)
def test_disagreement_is_found_without_shared_memory(failures: Failures) -> None:
    """Where ranks share no memory, as on several hosts, they gather what they call."""
    if dist.get_rank() == 0:
        import resource

        # The file cannot be made as large as it has to be.
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        call("gemm_allreduce", CASE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    else:
        call("gemm_allreduce", CASE)
    disagree(failures, "gemm_allreduce")


NO_ROOM = """
import os, sys, torch, torch.distributed as dist, overlap_torch
child = os.fork()
rank = 0 if child else 1
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=rank, world_size=2)
found = overlap_torch.gemm_allreduce(torch.ones(2, 3), torch.ones(5, 3))
dist.destroy_process_group()
failed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child else 0
sys.exit(failed or not found.eq(6).all())
"""
FULL = "mount -t tmpfs -o size=8k tmpfs /dev/shm && head -c 8192 /dev/zero > /dev/shm/full"


def test_disagreement_full_shared_memory_ends_no_process(tmp_path):
    """Pages of /dev/shm that there is no room for: ranks gather what they call."""
    own_mounts = ["unshare", "--mount", "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*own_mounts, FULL]).returncode != 0:
        pytest.skip("this user may mount nothing")
    ranks = [sys.executable, "-c", NO_ROOM, str(tmp_path / "store")]
    done = subprocess.run(
        [*own_mounts, f"{FULL} && exec {shlex.join(ranks)}"],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def messages_without_last() -> list[str]:
    """The messages of two calls in which the last rank takes no part: it waits for them, and has none."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == dist.get_world_size() - 1:
        store.wait(["reported"])
        return []
    messages = [message_of(call, "gemm_allreduce", CASE) for _ in range(2)]
    store.set("reported", "")
    return messages


@pytest.mark.ranks((2, "gloo"))
@pytest.mark.fresh(group_timeout_s=40.0, environment={"OVERLAP_TIMEOUT_S": "2"})
def test_disagreement_missing_call_is_named_at_the_deadline(failures: Failures) -> None:
    """The last rank leaves out its third call: the others' deadline passes, and what was found stays found."""
    for _ in range(2):
        call("gemm_allreduce", CASE)
    start = time.monotonic()
    messages = messages_without_last()
    seconds = time.monotonic() - start
    if not messages:
        return failures.expect(None)
    failures.expect(None if 1.9 <= seconds <= 15.0 else f"after {seconds:.1f} s")
    failures.equal(messages[0], messages[1])
    pattern = r"chunk 0 of call 3, gemm_allreduce m=256 .*: rank 1 has not made this call"
    failures.expect(None if re.search(pattern, messages[0]) else messages[0])


@pytest.mark.ranks((2, "gloo"))
@pytest.mark.fresh(group_timeout_s=40.0, environment={"OVERLAP_TIMEOUT_S": "1"})
def test_disagreement_rank_that_never_comes_is_named_and_nothing_is_left(
    failures: Failures,
) -> None:
    """The last rank makes no call at all: what the others say, twice, and what they leave in /dev/shm."""
    messages = messages_without_last()
    if not messages:
        return failures.expect(None)
    own = f"overlap_torch-{os.getpid()}-"
    left = [name for name in os.listdir("/dev/shm") if name.startswith(own)]
    failures.equal(left, [])
    failures.equal(messages[0], messages[1])
    failures.holds("rank 1 has not made its first call on CPU within 1", messages[0])


def die_before_the_call() -> tuple[float, str]:
    call("gemm_allreduce", CASE)
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    message = message_of(call, "gemm_allreduce", CASE)
    return time.monotonic() - start, message


def test_disagreement_dead_rank_is_found_long_before_the_deadline():
    outcomes = rank_pool.run_fresh(2, "gloo", die_before_the_call, group_timeout_s=60.0)
    assert outcomes[1].kind == "died", outcomes[1]
    seconds, message = outcomes[0].result()
    assert seconds < 30.0
    assert "rank 1 has ended" in message and "chunk 0 of call 2" in message, message


def fail_by(what: str) -> str:
    """Returns the message where the process does not end."""
    call("gemm_allreduce", CASE)
    last = dist.get_rank() == dist.get_world_size() - 1
    if what == "bad argument":
        return message_of(overlap_torch.gemm_allreduce, torch.ones(3, 4), torch.ones(5, 6))
    if what == "deadline" and last:
        time.sleep(8.0)
        return ""
    case = CASE.with_(n=64) if what == "disagreement" and last else CASE
    return message_of(call, "gemm_allreduce", case)


@pytest.mark.parametrize(
    ("action", "what"),
    [
        *itertools.product(["abort", "raise"], ["disagreement", "bad argument"]),
        ("abort", "deadline"),
        pytest.param("raise", "deadline", marks=pytest.mark.long),
    ],
)
def test_on_failure_ends_the_process_or_raises(action, what):
    outcomes = rank_pool.run_fresh(
        2, "gloo", fail_by, what, group_timeout_s=40.0,
        environment={"OVERLAP_ON_FAILURE": action, "OVERLAP_TIMEOUT_S": "1.5"},
    )  # fmt: skip
    failed = [outcomes[0]] if what == "deadline" else outcomes
    for outcome in failed:
        if action == "abort" and what != "bad argument":
            assert outcome.kind == "died", outcome
            assert "exit code -6" in outcome.detail, outcome.detail
            assert "(OVERLAP_ON_FAILURE=abort)" in outcome.detail, outcome.detail
        else:
            assert outcome.result(), outcome


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("OVERLAP_DEBUG", "true", "0 or 1"),
        ("OVERLAP_TIMEOUT_S", "soon", "a number of seconds"),
        ("OVERLAP_TIMEOUT_S", "-1", "a number of seconds"),
        ("OVERLAP_PEERS", "perhaps", "0 or 1"),
        ("OVERLAP_PLANS", "off", "0 or 1"),
        ("OVERLAP_PEER_MEMORY", "both", "ipc or nccl"),
        ("OVERLAP_ON_FAILURE", "exit", "raise or abort"),
        ("OVERLAP_LOG", "all", "none or plans"),
    ],
)
def test_environment_says_what_is_allowed(monkeypatch, name, value, allowed):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name} is '{value}'; it must be {allowed}"):
        torch.ops.overlap.environment()


@pytest.mark.ranks((2, "gloo"))
@pytest.mark.fresh(environment={"OVERLAP_DEBUG": "true"})
def test_environment_is_read_by_ops(failures: Failures) -> None:
    failures.raises("OVERLAP_DEBUG is 'true'; it must be 0 or 1", call, "gemm_allreduce", CASE)


@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (3, "gloo"), (2, "nccl"))
@pytest.mark.fresh(environment={"OVERLAP_DEBUG": "1"})
def test_debug_mode_leaves_no_keys_in_the_store(failures: Failures) -> None:
    """However many calls there are; so a second group on the same store, whose calls differ, finds nothing of the first one."""
    store = dist.distributed_c10d._get_default_store()
    keys = []
    for _ in range(3):
        call("gemm_allreduce", CASE)
        call("gemm_alltoall", CASE)
        dist.barrier()
        keys.append(store.num_keys())
        dist.barrier()
    failures.equal(keys[1:], keys[:1] * 2)
    rank, world, backend = dist.get_rank(), dist.get_world_size(), dist.get_backend()
    dist.destroy_process_group()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    check_call(failures, CASE.with_(n=64), "in a second group", op="gemm_allreduce")
