"""Kernels of a user's whose tiles are communicated by overlap_torch: exact results, orders, and what goes wrong."""

import gc
import itertools
import json
import math
import os
import re
import weakref
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import kernels
import overlap_torch
from checks import Failures, message_of
from kernels import (
    expect,
    interpreted,  # noqa: F401  (a fixture of every test here)
)
from machines import cpu, hopper
from operands import rank_device
from overlap_torch import _plan, plan
from overlap_torch._kernels import calls, tile_orders
from overlap_torch._kernels import request as requests
from overlap_torch.plan import Machine, Problem
from overlap_torch.plan.types import Op
from tests import _plan_test

TILE = (32, 32)
# Whole tiles, and tiles that reach beyond the matrix and across the ranks' parts.
SHAPES = [(128, 96, 64), (12 * 17, 50, 40)]
LARGE_SHAPES = [(4 * 96 + 4, 1064, 136), (2048, 512, 256)]
ORDERS = [
    ("all_reduce", "row_major", 4), ("all_reduce", "swizzled", 1),
    ("reduce_scatter", "grouped", 3), ("reduce_scatter", "column_major", 1),
]  # fmt: skip
# Shape, (collective, order, chunks), dtype, persistent.
REDUCTIONS = {
    "gloo": [
        (SHAPES[0], ("all_reduce", "row_major", 3), torch.float32, False),
        (SHAPES[1], ("reduce_scatter", "grouped", 2), torch.float32, False),
        (SHAPES[1], ("all_reduce", "swizzled", 1), torch.float16, True),
        (SHAPES[0], ("reduce_scatter", "column_major", 2), torch.float32, True),
    ],
    "nccl": [
        *itertools.product(LARGE_SHAPES, ORDERS, (torch.bfloat16, torch.float32), (False, True))
    ],
}


@pytest.mark.ranks((2, "gloo"), (2, "nccl"), (4, "nccl"))
def test_kernels_reduce_exactly(failures: Failures) -> None:
    example, world = kernels.example(), dist.get_world_size()
    for seed, (shape, how, dtype, persistent) in enumerate(REDUCTIONS[dist.get_backend()]):
        collective, order, chunks = how
        if collective == "reduce_scatter":  # each rank has an equal part of the rows
            shape = (-(-shape[0] // world) * world, *shape[1:])
        a, b = kernels.operands(*shape, seed=seed, dtype=dtype)
        expected = kernels.reduced(*shape, seed, collective)
        if persistent:
            result = example.persistent_row_parallel(a, b, collective, chunks)
        else:
            result = example.row_parallel(a, b, collective, order, chunks)
        label = (
            f"{shape} {collective} {order} in {chunks} chunks of {dtype}, persistent={persistent}"
        )
        expect(failures, label, result, expected)
        failures.equal(result.dtype, dtype, label)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (3, "gloo"))
def test_kernels_that_do_not_signal_reduce_exactly(failures: Failures, dtype: torch.dtype) -> None:
    world = dist.get_world_size()
    kernels.check_unchanged(failures, [(128 * world, 96, 64), (17 * world, 50, 40)], dtype)


@pytest.mark.ranks((1, "gloo"))
@pytest.mark.fresh(environment={"OVERLAP_DEBUG": "1"})
def test_kernels_that_do_not_signal_are_taken_in_debug_mode(failures: Failures) -> None:
    """A group of one, too, which communicates nothing."""
    kernels.check_unchanged(failures, [(128, 96, 64)], torch.float32)


@pytest.mark.ranks((2, "gloo"), (2, "nccl"), (4, "nccl"))
def test_kernels_exchange_exactly(failures: Failures) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    capacity, count, k, n = 2 * TILE[0], 2, 40, 50
    for seed, pieces in enumerate((1, 3)):
        tokens = [
            kernels.numbers(world * count * capacity, k, seed=seed, rank=r) for r in range(world)
        ]
        weights = [kernels.numbers(count, k, n, seed=100 + seed, rank=r) for r in range(world)]
        home = []
        for source in range(world):
            runs = tokens[source].double().view(world, count, capacity, k)[rank]
            home.append((runs @ weights[source].double()).reshape(-1, n))
        mine = [one[rank].to(rank_device()) for one in (tokens, weights)]
        result = kernels.example().experts(*mine, capacity, pieces)
        expect(failures, f"experts in {pieces} pieces", result, torch.cat(home))


@pytest.mark.ranks((2, "gloo"), (3, "gloo"), (2, "nccl"), (4, "nccl"))
def test_kernels_exchange_uneven_rows(failures: Failures) -> None:
    """All ranks' rows for all ranks, some none; tiles lie across destinations."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for seed, (scale, chunks) in enumerate(((37, 2), (53, 4))):
        rows = [
            [(scale * (to + 2 * source)) % 71 for to in range(world)] for source in range(world)
        ]
        rows[0][world - 1] = 0
        n, k = 40, 24
        send, receive = rows[rank], [rows[source][rank] for source in range(world)]
        a, b = kernels.operands(sum(send), n, k, seed=seed, dtype=torch.float32)
        with overlap_torch.produce(
            "all_to_all", (sum(send), n), a.dtype, tile=TILE, chunks=chunks, send_rows=send, recv_rows=receive,
            device=a.device,
        ) as job:  # fmt: skip
            if job.tiles > 0:
                kernels.multiply(job, a, b)
        expected = [
            kernels.product(sum(rows[source]), n, k, seed, source)[sum(rows[source][:rank]) :][
                : receive[source]
            ]
            for source in range(world)
        ]
        expect(failures, f"rows {rows} in {chunks}", job.result(), torch.cat(expected))


# Sizes, chunks and dtype for each backend; the second one's parts end within tiles.
GATHERS = {
    "gloo": (((64, 50, 40), 2, torch.float32), ((75, 40, 24), 3, torch.float32)),
    "nccl": (((1024, 512, 256), 4, torch.bfloat16), ((204, 96, 64), 3, torch.float32)),
}


@pytest.mark.ranks((2, "gloo"), (2, "nccl"), (4, "nccl"))
def test_kernels_gather_exactly(failures: Failures) -> None:
    """SwiGLU equals the same kernel on rows that are all there, bit for bit; and the equation."""
    example, rank, world = kernels.example(), dist.get_rank(), dist.get_world_size()
    for seed, ((m, n, k), chunks, dtype) in enumerate(GATHERS[dist.get_backend()]):
        rows = [kernels.numbers(m, k, seed=seed, rank=r, dtype=dtype) for r in range(world)]
        gate, up = (
            kernels.numbers(k, n, seed=10 + seed + i, rank=rank, dtype=dtype).to(rank_device())
            for i in (0, 1)
        )
        out, gathered = example.column_parallel_swiglu(
            rows[rank].to(rank_device()), gate / 16, up, chunks
        )
        expect(failures, f"gathered {m, n, k}", gathered, torch.cat(rows).double())
        label = f"out {m, n, k} in {chunks}"
        kernels.check_swiglu(failures, label, out, gathered, gate / 16, up, TILE)
        x = gathered.double()
        right = torch.nn.functional.silu(x @ (gate / 16).double()) * (x @ up.double())
        rtol = 2e-2 if dtype == torch.bfloat16 else 1e-5
        failures.near(out.double(), right, "the equation", m, n, k, rtol=rtol, atol=1e-4)


@pytest.mark.ranks((2, "gloo"))
def test_kernels_run_by_plans(failures: Failures) -> None:
    transport, (m, n, k) = "gloo", (12 * 17, 50, 40)
    all_reduce = Problem(m, n, 1, torch.float32, dist.get_world_size())
    made = {
        "packed": plan.templates.packed(all_reduce, [3, 5, 4, 2], tile=TILE, transport=transport),
        "sequential": plan.templates.row_panels(all_reduce, 1, tile=TILE, transport=transport),
        "uneven": plan.templates.row_panels(
            all_reduce, [1, 4, 2], tile=TILE, transport=transport, lanes=2
        ),
        "ring": plan.programs.ring(all_reduce, chunks=2, tile=TILE, transport=transport),
        "two_shot": plan.programs.two_shot(all_reduce, tile=TILE, transport=transport),
    }
    for seed, (label, chosen) in enumerate(made.items()):
        a, b = kernels.operands(m, n, k, seed=seed, dtype=torch.float32)
        with overlap_torch.produce(
            "all_reduce", (m, n), a.dtype, tile=TILE, plan=chosen, device=a.device
        ) as job:
            kernels.multiply(job, a, b)
        expect(failures, label, job.result(), kernels.reduced(m, n, k, seed))
        failures.equal(job.plan, chosen, label)


def fill(job: overlap_torch.Job) -> None:
    """Ones in all tiles of an entered job, each of them signalled."""
    job.output.fill_(1)
    for tile in job.tile_order.tolist():
        job.counters[job.tile_chunk[tile]] += 1


def made_by_hand(**given: object) -> overlap_torch.Job:
    with overlap_torch.produce("all_reduce", (64, 8), torch.float32, tile=(16, 8), **given) as job:
        fill(job)
    return job


# --- what goes wrong ------------------------------------------------------------------------------------------


def small_job(**changes) -> overlap_torch.Job:
    arguments = {"tile": TILE, "chunks": 2, "device": rank_device()} | changes
    return overlap_torch.produce("all_reduce", (128, 96), torch.float32, **arguments)


def run_kernel(job: overlap_torch.Job, seed: int = 1, tiles: torch.Tensor | None = None) -> None:
    kernels.multiply(job, *kernels.operands(128, 96, 32, seed=seed, dtype=torch.float32), tiles)


@pytest.mark.ranks((2, "gloo"), (3, "gloo"))
def test_kernels_exception_is_told_to_all_ranks(failures: Failures) -> None:
    message = ""
    try:
        with small_job() as job:
            run_kernel(job)
            if dist.get_rank() == 1:
                raise KeyError("boom")
    except (KeyError, RuntimeError) as error:
        message = f"{type(error).__name__} {error}"
    try:
        job.result()
    except RuntimeError as error:
        message += f"; {error}"
    parts = ["KeyError 'boom'"]
    if dist.get_rank() != 1:
        parts = ["RuntimeError", "rank 1 called", "by an exception, KeyError: 'boom'"]
    failures.says(message, (*parts, "was left by an exception"))
    with small_job() as again:
        run_kernel(again)
    expect(failures, "the next call", again.result(), kernels.reduced(128, 96, 32, 1))


@pytest.mark.ranks((2, "gloo"))
def test_kernels_outlive_no_process_group(failures: Failures) -> None:
    """The group is destroyed after the job was made, or while its kernel runs: an error, and the process goes on."""

    def run(*, enters_first: bool) -> None:
        group = dist.new_group()
        job = small_job(group=group)
        if not enters_first:
            dist.destroy_process_group(group)
            del group
        with job:
            run_kernel(job)
            if enters_first:
                dist.destroy_process_group(group)
                del group

    for enters_first in (False, True):
        said = message_of(run, enters_first=enters_first)
        failures.says(said, ["the process group was destroyed", "Make a new one"], enters_first)
    with small_job() as job:
        run_kernel(job)
    expect(failures, "the next call", job.result(), kernels.reduced(128, 96, 32, 1))


@pytest.mark.ranks((2, "gloo"))
def test_kernels_jobs_are_kept_up_to_a_bound_and_for_a_group(failures: Failures) -> None:
    """Each rank drops the same jobs, whatever rows all-to-alls have; nothing of a destroyed group stays."""
    rank, open_files = dist.get_rank(), []
    for _ in range(4):
        group, alike, by_rows = dist.new_group(), [], []
        with mock.patch.object(calls, "_MOST", 8):
            for number in range(1, 30):
                job = small_job(group=group, kernel_us=number)
                alike.append(weakref.ref(job._prepared))
                rows = [number, 1] if rank == 0 else [1, 1]  # rank 1 makes one job
                given = {"tile": TILE, "send_rows": rows, "recv_rows": rows, "group": group}
                job = overlap_torch.produce("all_to_all", (sum(rows), 32), torch.float32, **given)
                by_rows.append(weakref.ref(job._prepared))
        with small_job(group=group, kernel_us=1) as job:
            run_kernel(job)
        expect(failures, "made again", job.result(), kernels.reduced(128, 96, 32, 1))
        del job, given
        alive = [[one() is not None for one in refs] for refs in (alike, by_rows)]
        failures.equal(alive[0][-4:], [True] * 4)
        failures.holds(sum(alive[0]), range(9))
        failures.holds(sum(alive[1]), range(9) if rank == 0 else [29])
        texts = [None, None]
        dist.all_gather_object(texts, alive[0])
        failures.equal(texts[0], texts[1])
        dist.destroy_process_group(group)
        del group
        gc.collect()
        failures.equal([one() for one in alike + by_rows if one() is not None], [])
        open_files.append(len(os.listdir("/proc/self/fd")))
    failures.equal(open_files[-1], open_files[0])


@pytest.mark.ranks((2, "gloo"))
def test_kernels_all_to_all_is_made_by_each_rank_alone(failures: Failures) -> None:
    """Ranks make jobs by their own rows: a function that takes the kernel's time would wait for ranks that have theirs."""
    timed, rank = [], dist.get_rank()
    for last in range(3):
        rows = [1, 1] if rank == 0 else [1, last]
        given = {"tile": TILE, "kernel_us": lambda: timed.append(1)}
        overlap_torch.produce(
            "all_to_all", (sum(rows), 32), torch.float32, send_rows=rows, recv_rows=rows, **given
        )
    failures.equal(timed, [])


def check_wrong_signals(failures: Failures, kind: str, text: str) -> None:
    """Rank 0 leaves a signal out, gives it twice, or gives it for another tile of the chunk, and both ranks say so."""

    def run() -> None:
        with small_job() as job:
            order = job.tile_order
            tiles = {
                "never": order[:-1],
                "twice": torch.cat([order, order[-1:]]),
                "another": torch.cat([order[:-1], order[-2:-1]]),
            }[kind]
            run_kernel(job, tiles=tiles if dist.get_rank() == 0 else order)

    parts = [f"signalled {text}"] if dist.get_rank() == 0 else ["rank 0 called"]
    failures.says(message_of(run), parts, kind)


@pytest.mark.ranks((2, "gloo"))
def test_kernels_wrong_signals_are_named_by_tile(failures: Failures) -> None:
    for kind, how in (
        ("never", "(3, 2) never"),
        ("twice", "(3, 2) 2 times"),
        ("another", "(2, 2) 2 times, (3, 2) never"),
    ):
        check_wrong_signals(failures, kind, f"tile {how}")


@pytest.mark.ranks((2, "gloo"))
def test_kernels_misuse_is_refused(failures: Failures) -> None:
    def expect_said(pattern: str, call, *arguments, **keywords) -> None:
        """By a call that raises this type of error with this message; "" is none."""
        said = ""
        try:
            call(*arguments, **keywords)
        except (RuntimeError, NotImplementedError, ValueError, AttributeError) as error:
            said = f"{type(error).__name__}: {error}"
        fits = re.match(pattern or "$", said, re.DOTALL)
        failures.expect(None if fits else f"said {said!r}", pattern)

    job = small_job()
    expect_said("RuntimeError: .* has no result: its `with` has not ended", job.result)
    said = "AttributeError: .* has no output: inside its `with`, this job has .*output, counters"
    expect_said(said, lambda: job.output)
    with job:
        run_kernel(job)
        expect_said("RuntimeError: .* has no result: its `with` has not ended", job.result)
    failures.expect(None if job.result() is job.result() else "another tensor", "result")
    expect_said("RuntimeError: .* a job is entered once", job.__enter__)
    x = torch.ones(32, 16, device=rank_device(), requires_grad=True)
    sizes, tile = (32, 32), {"tile": TILE}
    consume, produce = overlap_torch.consume, overlap_torch.produce
    gather = partial(consume, input=x, columns=32, tile=TILE)
    expect_said(
        "NotImplementedError: .*consume.* requires grad.*autograd.Function", gather, "all_gather"
    )
    expect_said("NotImplementedError: .*produce.* requires grad", small_job, operands=[x])
    with torch.no_grad():
        expect_said("", small_job, operands=[x])
    other = Problem(64, 96, 1, torch.float32, dist.get_world_size())
    other = plan.templates.row_panels(other, 1, transport="gloo")
    said = "ValueError: collective is 'all_gather', allowed are .*consume"
    expect_said(said, produce, "all_gather", sizes, x.dtype, **tile)
    expect_said(
        "ValueError: collective is 'all_reduce', allowed is 'all_gather'", gather, "all_reduce"
    )
    said = "ValueError: .*send_rows and recv_rows are None"
    expect_said(said, produce, "all_to_all", sizes, x.dtype, **tile)
    expect_said("ValueError: .*nothing to compute", produce, "all_reduce", (0, 32), x.dtype, **tile)
    said = "ValueError: .* has m = 1 rows on 2 ranks, allowed are multiples"
    expect_said(said, produce, "reduce_scatter", (1, 32), x.dtype, **tile)
    for changes, said in (
        ({"chunks": 65}, "ValueError: .*chunks is 65, allowed are 1 to 64"),
        ({"chunks": 5}, ""),
        ({"tile": (0, 32)}, "ValueError: tile is .*allowed are two integers of 1 or more"),
        ({"tile": 4}, "ValueError: tile is 4, allowed are two integers of 1 or more"),
        ({"tile_order": "spiral"}, "ValueError: tile_order is 'spiral', allowed are 'row_major'"),
        (
            {"tile_order": lambda m, n: [0] * m * n},
            "ValueError: tile_order gave 12 tiles for 4 x 3",
        ),
        ({"plan": other}, "ValueError: .*the plan is for another problem"),
        ({"signals": False}, "ValueError: .*signals is False, allowed is that for all_reduce and"),
    ):
        expect_said(said, small_job, **changes)


@pytest.mark.ranks((2, "gloo"))
def test_kernels_break_graphs_and_say_why(failures: Failures) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        with small_job() as job:
            torch.compiler.disable(run_kernel)(job)  # Triton's interpreter is nothing to be traced
        return job.result() + x.sum()

    x = torch.zeros(2)
    expect(failures, "compiled", torch.compile(step, backend="eager")(x), step(x))
    torch._dynamo.reset()
    said = message_of(torch.compile(step, backend="eager", fullgraph=True), x)
    failures.holds("a kernel between overlap_torch.produce or consume and its result", said, "why")


# --- one process ----------------------------------------------------------------------------------------------


def test_kernels_orders_keep_within_chunks_what_the_kernel_does():
    # 4 x 3 tiles, two rows of them a chunk.
    chunks = [0] * 6 + [1] * 6
    cut = {name: tile_orders.by_chunks(name, chunks, 3) for name in tile_orders.ORDERS}
    assert cut == {
        "row_major": list(range(12)),
        "column_major": [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11],
        "grouped": [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11],
        "swizzled": list(range(12)),
    }
    backwards = tile_orders.by_chunks(
        lambda rows, columns: range(rows * columns - 1, -1, -1), chunks, 3
    )
    assert backwards == [5, 4, 3, 2, 1, 0, 11, 10, 9, 8, 7, 6]
    # Groups of 8.
    assert tile_orders.grouped(10, 2) == [*range(0, 16, 2), *range(1, 16, 2), 16, 18, 17, 19]
    assert tile_orders.swizzled(2, 10) == [*range(8), *range(10, 18), 8, 9, 18, 19]


def fast_link() -> Machine:
    """Two H200s, as the profile has them."""
    return hopper(sm_gflops=5e3, windows=True, peer_gbps=365.0)


def slow_link() -> Machine:
    return hopper(arch=80, sm_count=108, sm_gflops=2e3, link_latency_us=20.0, link_gbps=20.0)


REDUCING = Problem(8192, 8192, 1, torch.bfloat16, 2)  # 128 MiB
OVERLAPPING_OPS = [Op.GEMM_ALLREDUCE, Op.GEMM_REDUCESCATTER, Op.ALLGATHER_GEMM]


def price_us(chosen: plan.Plan, machine: Machine, kernel_us: float) -> float:
    return _plan.price_kernel(chosen, machine, kernel_us).expected.total_us


def test_kernels_chunks_follow_the_kernels_time():
    def chunks(kernel_us: float, problem: Problem = REDUCING, **more) -> int:
        made = _plan.make_kernel_plan(problem, fast_link(), (128, 256), kernel_us, **more)
        plan.validate(made)
        assert (made.kernel, made.tile_m, made.tile_n) == (plan.types.Kernel.LIBRARY, 128, 256)
        return len(made.chunks)

    assert chunks(1000.0, comm_sms=16) > 3
    assert chunks(1000.0, chunks=2) == 2
    assert chunks(1000.0, Problem(256, 8192, 1, torch.bfloat16, 2), chunks=9) == 2  # rows of tiles
    # Too short a kernel to hide anything, and too little to be hidden.
    assert chunks(10.0, comm_sms=16) == 1
    assert chunks(1000.0, Problem(256, 512, 1, torch.bfloat16, 2), comm_sms=16) == 1
    # On all SMs communication waits for tiles to end: more than a doubt has to be gained.
    assert chunks(1000.0) == 1
    assert chunks(100.0, Problem(65536, 8192, 1, torch.bfloat16, 2)) == 1
    made = _plan.make_kernel_plan(REDUCING, slow_link(), (128, 256), 10000.0)
    assert len(made.chunks) > 1


@pytest.mark.parametrize("op", OVERLAPPING_OPS)
@pytest.mark.parametrize(
    ("stores", "m", "arguments"),
    [
        (True, 8192, {}),
        (True, 8192, {"comm_sms": 2}),
        (False, 8192, {"stripes": False}),
        (False, 8192, {"machine": hopper(sm_gflops=5e3, windows=True)}),  # maps no memory
        (False, 8192, {"chunks": 1}),
        (False, 8192, {"dtype": torch.float64}),  # no kernel adds it up
        (False, 128, {}),  # parts of 1 MiB
    ],
)
def test_kernels_stores_travel_into_mapped_memory(op, stores, m, arguments):
    n = 8192
    usual = {"machine": fast_link(), "tile": (128, 256), "kernel_us": 420.0}
    given = usual | {name: value for name, value in arguments.items() if name != "dtype"}
    problem = Problem(m, n, n, arguments.get("dtype", torch.bfloat16), 2, op)
    made = _plan.make_kernel_plan(problem, **given)
    plan.validate(made)
    reduces = op != Op.ALLGATHER_GEMM
    assert (made.collective == plan.types.Collective.STRIPES) == (stores and reduces)


@pytest.mark.ranks((2, "gloo"))
def test_kernels_are_planned_without_memory_for_their_stores(failures: Failures) -> None:
    """If the ranks cannot have it, the planner is asked again, and the kernel's result is the same."""
    asked = []

    def planned(problem, here, tile, us, comm_sms, chunks, stripes):
        asked.append(stripes)
        how = {"collective": "stripes"} if stripes else {}
        return plan.templates.row_panels(problem, 1, tile=tile, transport="gloo", **how)

    for has_memory in (True, False):
        asked.clear()
        # A time of its own makes the request a new one.
        request = {"tile": (16, 8), "kernel_us": 5.0 + has_memory}
        with (
            mock.patch.object(requests, "make_kernel_plan", planned),
            mock.patch.object(requests, "has_memory", lambda job, found=has_memory: found),
        ):
            job = overlap_torch.produce("all_reduce", (64, 8), torch.float32, **request)
        failures.equal(asked, [True] if has_memory else [True, False], has_memory)
        collective = plan.types.Collective
        taken = collective.STRIPES if has_memory else collective.ALL_REDUCE
        failures.equal(job.plan.collective, taken, has_memory)
        with job:
            fill(job)
        failures.expect_equal(job.result(), torch.full((64, 8), 2.0), has_memory)


@pytest.mark.parametrize("op", OVERLAPPING_OPS)
@pytest.mark.parametrize("machine", [fast_link(), slow_link()], ids=["fast", "slow"])
@pytest.mark.parametrize("comm_sms", [0, 4, 16])
def test_kernels_plans_are_expected_to_gain(op, machine, comm_sms):
    problem = Problem(8192, 4096, 4096, torch.bfloat16, 2, op)
    for kernel_us in (5.0, 80.0, 400.0, 2000.0, 20000.0):
        sequence, *_ = _plan_test.kernel_candidates(
            problem, machine, (128, 128), kernel_us, comm_sms
        )
        chosen = _plan.make_kernel_plan(problem, machine, (128, 128), kernel_us, comm_sms)
        prices = [price_us(one, machine, kernel_us) for one in (chosen, sequence)]
        assert len(sequence.chunks) == 1 and kernel_us <= prices[0] <= prices[1]
        ctas = chosen.chunks[0].max_ctas * chosen.resources.lanes
        assert chosen.resources.comm_sms == comm_sms and (ctas <= comm_sms or comm_sms == 0)


def test_kernels_that_await_overlap_where_sms_are_set_apart():
    problem = Problem(8192, 4096, 4096, torch.bfloat16, 2, Op.ALLGATHER_GEMM)
    behind = _plan.make_kernel_plan(problem, fast_link(), (128, 128), 500.0)
    beside = _plan.make_kernel_plan(problem, fast_link(), (128, 128), 500.0, 16)
    assert len(behind.chunks) == 1  # the kernel begins when everything is there
    assert price_us(beside, fast_link(), 500.0) < 0.95 * price_us(behind, fast_link(), 500.0)


@pytest.mark.parametrize("op", OVERLAPPING_OPS)
def test_kernels_price_has_what_the_list_has(op):
    """Four equal chunks on a link that takes longer than the kernel: the first chunk's tiles, then all that travels."""
    problem = Problem(8192, 4096, 4096, torch.bfloat16, 2, op)
    machine = fast_link()
    made = plan.templates.row_panels(
        problem, 4, tile=(128, 128), comm_sms=8, max_ctas=8, transport="nccl"
    )
    price = _plan.price_kernel(made, machine, 100.0)
    steps = json.loads(_plan.kernel_steps_json(made, 0, machine, True)[0])["steps"]
    spans = dict(enumerate(price.steps))
    calls = [spans[i] for i, one in enumerate(steps) if one["step"] == "collective"]
    (kernel,) = (spans[i] for i, one in enumerate(steps) if one["step"] == "callers_kernel")
    assert len(calls) == 4 and all(a[1] <= b[0] for a, b in itertools.pairwise(calls))
    assert kernel[1] - kernel[0] >= 100.0
    if op == Op.ALLGATHER_GEMM:
        # The last arrival is an eighth of the rows, which the kernel computes after it.
        assert kernel[1] >= calls[-1][1] + 100.0 / 8
        assert kernel[0] <= calls[0][1]
    else:
        assert price.computed_us == pytest.approx(
            [kernel[0] + (kernel[1] - kernel[0]) * (i + 1) / 4 for i in range(4)]
        )
        assert all(
            begin >= computed for (begin, _), computed in zip(calls, price.computed_us, strict=True)
        )
        assert price.expected.total_us >= calls[-1][1]


def test_kernels_plans_on_cpu_have_one_chunk():
    """Nothing there goes on beside the kernel."""
    made = _plan.make_kernel_plan(REDUCING, cpu(), (64, 64), 1e6)
    assert len(made.chunks) == 1 and made.chunks[0].transport == plan.types.Transport.GLOO
    assert len(_plan.make_kernel_plan(REDUCING, cpu(), (64, 64), 1e6, chunks=3).chunks) == 3


@pytest.mark.parametrize(
    "arguments",
    [
        {"kernel_us": 0.0},
        {"kernel_us": float("nan")},
        {"tile": (0, 64)},
        {"comm_sms": -1},
        {"problem": Problem(0, 64, 1, torch.bfloat16, 2, Op.GEMM_ALLTOALL)},
        {"problem": Problem(0, 64, 1, torch.bfloat16, 2)},
    ],
)
def test_kernels_plans_say_what_is_allowed(arguments):
    usual = {"problem": REDUCING, "machine": fast_link(), "tile": (64, 64), "kernel_us": 10.0}
    with pytest.raises(ValueError, match="allowed are times above 0"):
        _plan.make_kernel_plan(**usual | arguments)
    with pytest.raises(ValueError, match="nothing is known of the machine's link"):
        _plan.make_kernel_plan(**usual | {"machine": Machine()})


@pytest.mark.ranks((2, "gloo"))
def test_kernels_times_are_measured(failures: Failures) -> None:
    calls: list[int] = []
    job = made_by_hand(kernel_us=lambda: calls.append(1))
    assert len(calls) == 2 and len(job.plan.chunks) == 1
    failures.equal(job.result().unique(), dist.get_world_size(), "sums")


# --- resources ------------------------------------------------------------------------------------------------


def test_kernels_resources_say_what_there_is():
    with overlap_torch.resources(16, by="green_context") as outer:
        assert (outer.comm_sms, outer.by, outer.programs(132)) == (16, "green_context", 116)
        with pytest.raises(ValueError, match="comm_sms is 16, allowed are 0 to 15"):
            outer.programs(16)
    with overlap_torch.resources(by="padding", ctas_per_sm=2, priority="low") as outer:
        assert (outer.comm_sms, outer.priority, outer.programs(132)) == (0, "low", 264)
    for arguments, more in (
        ((-1,), {}),
        ((1.5,), {}),
        ((4, "magic"), {}),
        ((4,), {"priority": "middle"}),
        ((4,), {"ctas_per_sm": 1}),
        ((0, "padding"), {}),
        ((0, "padding"), {"ctas_per_sm": 33}),
        ((4, "padding"), {"ctas_per_sm": 1}),
    ):
        with (
            pytest.raises(ValueError, match="allowed"),
            overlap_torch.resources(*arguments, **more),
        ):
            pass


HOPPER, AMPERE, ADA = 228 << 10, 164 << 10, 100 << 10  # shared memory of an SM


@pytest.mark.parametrize("sm_bytes", [HOPPER, AMPERE, ADA])
@pytest.mark.parametrize("own", [0, 100, 8192, 16 << 10, 40_000, 64 << 10, 98 << 10])
@pytest.mark.parametrize("ctas", [1, 2, 3, 5, 16, 31, 32])
def test_kernels_padding_leaves_room_for_just_so_many_blocks(sm_bytes, own, ctas):
    def blocks(padding: int) -> int:
        """As the hardware counts them: 1 KiB more for each, in pieces of 128 bytes."""
        return sm_bytes // (math.ceil((own + padding + 1024) / 128) * 128)

    # Paddings that a block may have; each piece of the hardware's holds four of them.
    if not any(blocks(padding) == ctas for padding in range(0, sm_bytes - 1024 - own + 1, 32)):
        with pytest.raises(ValueError, match=f"ctas_per_sm is {ctas}"):
            plan.templates.smem_pad_bytes(own, ctas, sm_bytes=sm_bytes)
        return
    found = plan.templates.smem_pad_bytes(own, ctas, sm_bytes=sm_bytes)
    assert blocks(found) == ctas
    # The fewest bytes, except what the hardware rounds up.
    assert found == 0 or blocks(found - 128) > ctas or found < 128


def test_kernels_padding_of_the_mma_sync_kernel():
    # By hand: one block of 65,536 + 50,304 + 1,024 = 116,864 bytes, of which two are 256 bytes more than 228 KiB.
    assert plan.templates.smem_pad_bytes("sm80", 1, sm_bytes=HOPPER) == 50_304
    assert plan.templates.smem_pad_bytes("sm80", 2, sm_bytes=HOPPER) == 77_824 - 1024 - 65_536 + 128
    assert plan.templates.smem_pad_bytes("sm80", 3, sm_bytes=HOPPER) == 0  # three have room
    assert plan.templates.smem_pad_bytes("sm80", 1, sm_bytes=ADA) == 0  # holds one in any case
    made = plan.templates.row_panels(
        Problem(512, 512, 64, torch.bfloat16, 2), 2, kernel="sm80", transport="nccl",
        smem_pad_bytes=plan.templates.smem_pad_bytes("sm80", 1, sm_bytes=HOPPER), low_priority=True,
    )  # fmt: skip
    assert made.resources.smem_pad_bytes == 50_304 and made.resources.low_priority
    assert "at low priority" in repr(made)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sm80", 4), "ctas_per_sm is 4, allowed are 1 to 3"),
        (("sm80", 0), "ctas_per_sm is 0, allowed are 1 to 32"),
        ((227 << 10, 2), "ctas_per_sm is 2, allowed are 1 to 1"),
        (((227 << 10) + 1, 1), "shared_bytes is 232449, allowed are 0 to 232448"),
        ((-1, 1), "shared_bytes is -1, allowed is"),
        (("library", 1), "kernel is library, allowed is sm80, or a number of bytes"),
        (("sm90_pingpong", 1), "kernel is sm90_pingpong, allowed is sm80"),
    ],
)
def test_kernels_padding_says_what_is_allowed(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan.templates.smem_pad_bytes(*arguments, sm_bytes=HOPPER)


@pytest.mark.ranks((2, "gloo"))
def test_kernels_resources_are_the_plans(failures: Failures) -> None:
    usual = plan.templates.row_panels(
        Problem(64, 8, 1, torch.float32, dist.get_world_size()), 2, tile=(16, 8)
    )
    for given in ({"chunks": 2}, {"plan": usual}):
        with overlap_torch.resources(by="padding", ctas_per_sm=1, priority="low"):
            job = made_by_hand(**given)
            assert job.smem_pad_bytes(1024) == 0  # a CPU has no SMs
        assert job.plan.resources.low_priority and len(job.plan.chunks) == 2
        failures.equal(job.result().unique(), dist.get_world_size(), "sums", *given)
    assert not usual.resources.low_priority
    usual.resources = plan.types.Resources(smem_pad_bytes=4096)
    assert made_by_hand(plan=usual).smem_pad_bytes(1024) == 4096


def test_kernels_headers_are_installed_and_agree_with_the_library():
    header = Path(overlap_torch.include_path(), "overlap", "signal.cuh").read_text()
    root = Path(__file__).resolve().parents[2]
    counters = (root / "csrc/binding/kernels/kernel_job.h").read_text()
    python = (root / "overlap_torch/triton.py").read_text()
    most = int(re.search(r"kMaxChunks = (\d+)", (root / "csrc/plan/tile_order.h").read_text())[1])
    assert "kReport = plan::kMaxChunks;" in counters and "kDeadline = kReport + 2;" in counters
    caller = re.search(r"kCallersKernel = (\d+)", (root / "csrc/runtime/group.h").read_text())[1]
    for text, pattern in ((header, r"k{}\w* = (\d+)"), (python, r"_{} = tl.constexpr\((\d+)\)")):
        names = ["Report", "Deadline", "CallersKernel"]
        if text is python:
            names = ["REPORT", "DEADLINE", "CALLERS_KERNEL"]
        values = [re.search(pattern.format(name), text)[1] for name in names]
        assert values == [str(most), str(most + 2), caller]


def lists_of(op: Op, m: int, world: int) -> list[tuple[str, plan.Plan, bool]]:
    """Plans for GPUs, and whether the kernel awaits chunks."""
    problem = Problem(m, 20, 6, torch.float32, world, op)
    some = {"tile": (8, 8), "transport": "nccl", "max_ctas": 8, "comm_sms": 16}
    panels = partial(plan.templates.row_panels, problem, **some)
    packed = partial(plan.templates.packed, problem, [4, 1, 7, 3], **some)
    if op == Op.ALLGATHER_GEMM:
        return [
            ("awaits", panels(2), True),
            ("behind", panels(2), False),
            ("lanes", panels([1, 1, 1], lanes=2), True),
            ("window", panels(2, window=True), True),
            ("peers", panels(3, transport="peer", max_ctas=0), True),
        ]
    plans = {
        "panels": panels(3),
        "lanes": panels(3, lanes=3),
        "window": panels(2, window=True, lanes=2),
        "one": panels(1),
    }
    if op == Op.GEMM_ALLREDUCE:
        plans["packed"] = packed(lanes=2)
        if world == 2:
            plans["exchange"] = packed(collective="exchange")
    return [(label, made, False) for label, made in plans.items()]


H200 = hopper(link_latency_us=20.0, link_gbps=200.0)

# A lane waits again for a chunk that it has awaited; and no tile of rank 1's lies across two chunks of rank 0's.
REDUNDANT = {
    (Op.GEMM_REDUCESCATTER, 2): {"wait_for_tiles left out"},
    (Op.GEMM_REDUCESCATTER, 3): {"wait_for_tiles left out"},
    (Op.ALLGATHER_GEMM, 2): {"arrive without after #6", "arrive without after #10"},
}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("op", OVERLAPPING_OPS)
def test_kernels_lists_for_gpus_are_right_in_any_order(op, world):
    """And nothing of them can be left out."""
    # 15 tiles; parts that end within rows of tiles.
    m = 38 if op == Op.GEMM_ALLREDUCE else 21 * world
    for label, chosen, awaits in lists_of(op, m, world):
        ranks = (chosen, H200, [False] * world)
        assert _plan_test.find_fault(*ranks, awaits=awaits) == "", label
        assert _plan_test.unnoticed(*ranks, 1, work=True, awaits=awaits)[1] == [], label
        if label not in ("behind", "peers"):
            left = {what for _, what, _ in _plan_test.unnoticed(*ranks, 1, awaits=awaits)[1]}
            assert left <= REDUNDANT.get((op, world), set()), label


@pytest.mark.parametrize("op", OVERLAPPING_OPS)
@pytest.mark.parametrize(("world", "ranks_per_host"), [(4, 2), (8, 4)])
def test_kernels_lists_between_hosts_are_right_in_any_order(op, world, ranks_per_host):
    problem = Problem(64 * world, 20, 6, torch.float32, world, op)
    for transport, chunks in itertools.product(("peer", "nccl"), (1, 3)):
        how = {"tile": (8, 8), "transport": transport, "max_ctas": 8, "comm_sms": 16}
        made = plan.templates.hierarchical(problem, ranks_per_host, chunks, **how)
        for awaits in (False, True) if op == Op.ALLGATHER_GEMM else (False,):
            fault = _plan_test.find_fault(made, H200, [False] * world, awaits=awaits)
            assert fault == "", (transport, chunks, awaits)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("op", [Op.GEMM_ALLREDUCE, Op.GEMM_REDUCESCATTER])
@pytest.mark.parametrize("rows", [512, 700, 6144])
def test_kernels_lists_of_stripes_are_right_in_any_order(rows, op, world):
    """Parts end with a page and within one, and within rows of tiles. An all-reduce shares 6144 rows in three pieces."""
    problem = Problem(rows * world, 1024, 1, torch.float32, world, op)
    chosen = plan.templates.row_panels(
        problem, 1, tile=(192, 512), transport="peer", collective="stripes"
    )
    call = (chosen, H200, [False] * world)
    assert _plan_test.find_fault(*call, awaits=False) == ""
    assert _plan_test.unnoticed(*call, 1, work=True, awaits=False)[1] == []
    # Steps that only make an all-reduce's sums come sooner are as redundant beside the framework's GEMM.
    found, beside = (
        [what.split("#")[0] for _, what, _ in _plan_test.unnoticed(*call, 1, awaits=awaits)[1]]
        for awaits in (False, None)
    )
    assert found == (beside if op == Op.GEMM_ALLREDUCE else [])


@pytest.mark.parametrize("world", [2, 3])
def test_kernels_lists_of_exchanges_are_right_in_any_order(world):
    chosen = plan.templates.make_all_to_all(
        Problem(0, 20, 1, torch.float32, world, Op.GEMM_ALLTOALL), transport="nccl"
    )
    chosen.tile_m, chosen.tile_n = 8, 8
    rows = [[(5 * to + 11 * source) % 17 for to in range(world)] for source in range(world)]
    call = (chosen, H200, [False] * world)
    assert _plan_test.find_fault(*call, rows=rows, awaits=False, pieces=3) == ""
    assert _plan_test.unnoticed(*call, 1, rows=rows, awaits=False)[1] == []


def test_kernels_lists_of_a_kernel_on_all_sms_that_waits_are_found():
    chosen = lists_of(Op.ALLGATHER_GEMM, 42, 2)[0][1]
    chosen.resources.comm_sms = 0
    fault = _plan_test.find_fault(chosen, H200, [False] * 2, awaits=True)
    assert "(callers_kernel on caller): lower max_ctas or lanes, or raise comm_sms" in fault


@pytest.mark.parametrize("rows, tiles", [(384, 6), (129, 4)])
def test_kernels_lists_of_programs_await_the_tiles_of_the_matrix(rows, tiles):
    """Plans of this package's kernels round rows of tiles up to clusters, and a caller's kernel counts none beyond the matrix."""
    problem = Problem(rows, 256, 64, torch.bfloat16, 2, Op.GEMM_ALLREDUCE)
    chosen = plan.programs.one_shot(problem, 1, kernel="sm90_pingpong", transport="peer")
    text, _, _ = _plan.kernel_steps_json(chosen, 0, H200)
    steps = json.loads(text)["steps"]
    waits = {(step["chunk"], step["tiles"]) for step in steps if step["step"] == "wait_for_tiles"}
    assert waits == {(0, tiles)}


def test_kernels_lists_refuse_what_needs_kernels_of_ours():
    ring = plan.templates.row_panels(Problem(64, 16, 1, torch.float32, 2), 1, transport="peer")
    for m, chunks in ((4096, 2), (1533, 1)):
        stripes = plan.templates.row_panels(
            Problem(m, 1024, 1, torch.float32, 3), chunks, transport="peer", collective="stripes"
        )
        with pytest.raises(ValueError, match=f"{chunks} chunks and parts of .*, allowed are one"):
            _plan.kernel_steps_json(stripes, 0, H200)
    exchange = plan.templates.make_all_to_all(
        Problem(0, 16, 1, torch.float32, 2, Op.GEMM_ALLTOALL), transport="peer"
    )
    for chosen, name, rows in ((ring, "ring", []), (exchange, "all_to_all", [1, 1])):
        with pytest.raises(
            ValueError, match=f"cannot run by the plan's collective {name} over peers"
        ):
            _plan.kernel_steps_json(chosen, 0, H200, False, rows, rows)


def test_kernels_lists_refuse_calls_that_do_not_fit_the_plan():
    two = Problem(0, 16, 1, torch.float32, 2, Op.GEMM_ALLTOALL)
    exchange = plan.templates.make_all_to_all(two, transport="gloo")
    for rank, sends, receives, pieces, said in (
        (2, [4, 4], [4, 4], 1, "rank 2 is not one of the plan's 2 ranks, 0 to 1"),
        (0, [], [], 1, "send_rows has 0 counts; the plan's op takes one of 0 or more for each"),
        (1, [4, 4], [-4, 4], 1, "receive_rows has 2 counts, some below 0"),
        (1, [4, 4], [4, 4], 0, "pieces is 0, allowed are 1 to 63"),
    ):
        with pytest.raises(ValueError, match=said):
            _plan.kernel_steps_json(exchange, rank, H200, False, sends, receives, pieces)
