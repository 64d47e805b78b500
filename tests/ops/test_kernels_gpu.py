"""Kernels of a user's on GPUs: all transports, graphs, deadlines, kernels in CUDA and with TMA, and races."""

import functools
import random
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import kernels
import overlap_torch
import rank_pool
from captures import capture, refill, replayed
from checks import Failures
from kernels import expect
from operands import rank_device
from overlap_torch import plan
from overlap_torch._kernels import job as job_module
from overlap_torch.plan import Problem
from overlap_torch.plan.types import Collective, Kernel, Op
from peer_races import come_late, so_many_calls
from plans import peers_work
from tests.ops.test_kernels import TILE

TWO = pytest.mark.ranks((2, "nccl"))


# --- plans and resources --------------------------------------------------------------------------------------


def reductions(m: int, n: int, op: Op, dtype: torch.dtype) -> dict[str, plan.Plan]:
    """Plans of every kind that a kernel of a user's runs by."""
    world = dist.get_world_size()
    problem = Problem(m, n, 1, dtype, world, op)
    arguments = {"tile": TILE, "transport": "nccl", "max_ctas": 8, "comm_sms": 8}
    plans = {
        "panels": plan.templates.row_panels(problem, 4, lanes=2, **arguments),
        "window": plan.templates.row_panels(problem, 3, window=True, **arguments),
        "low priority": plan.templates.row_panels(
            problem, 4, lanes=2, low_priority=True, **arguments
        ),
        "one collective": plan.templates.row_panels(problem, 1, **arguments),
        "two_shot": plan.programs.two_shot(problem, tile=TILE, transport="nccl"),
    }
    if op == Op.GEMM_ALLREDUCE:
        plans["packed"] = plan.templates.packed(problem, 5, **arguments)
        plans["packed in a window"] = plan.templates.packed(problem, 5, window=True, **arguments)
        if world == 2:
            plans["exchange"] = plan.templates.packed(
                problem, 5, collective="exchange", **arguments
            )
    if peers_work():
        made = plan.templates.at_once(problem, kernel=Kernel.LIBRARY)
        made.tile_m, made.tile_n = TILE
        rows, columns = -(-m // TILE[0]), -(-n // TILE[1])
        made.bands = [plan.types.BandRun(1, rows)]
        made.chunks = [plan.types.Chunk(rows * columns, plan.types.Transport.PEER, 0)]
        plans["direct"] = made
    return plans


@pytest.mark.ranks((2, "nccl"), (4, "nccl"))
@pytest.mark.parametrize(
    "op", [Op.GEMM_ALLREDUCE, Op.GEMM_REDUCESCATTER], ids=lambda op: op.name.lower()
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_kernels_on_gpus_run_by_plans(failures: Failures, op: Op, dtype: torch.dtype) -> None:
    example = kernels.example()
    m, n, k = 1024, 512, 128
    collective = {Op.GEMM_ALLREDUCE: "all_reduce", Op.GEMM_REDUCESCATTER: "reduce_scatter"}[op]
    plans = reductions(m, n, op, dtype)
    for seed, (label, chosen) in enumerate(plans.items()):
        for turn in range(3):
            a, b = kernels.operands(m, n, k, seed=3 * seed + turn, dtype=dtype)
            with overlap_torch.produce(collective, (m, n), dtype, tile=TILE, plan=chosen) as job:
                example.persistent_matmul[(job.programs,)](
                    a, b, job.output, job.tile_order, job.tile_chunk, job.counters, job.tiles, m, n, k,
                    **example.blocks(),
                )  # fmt: skip
            expected = kernels.reduced(m, n, k, 3 * seed + turn, collective)
            expect(failures, f"{collective} {label}, call {turn}", job.result(), expected)
    overlap_torch.check()


@pytest.mark.ranks((2, "nccl"), (4, "nccl"))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.peers
def test_kernels_on_gpus_that_do_not_signal_reduce_exactly(
    failures: Failures, dtype: torch.dtype
) -> None:
    world = dist.get_world_size()
    pages = [(1024 * world, 1024, 64), (2048 * world, 3072, 72)]
    shared = [(1100 * world, 1090, 64), (3000 * world, 5001, 8), (2100 * world - 1, 1030, 72)]
    # Parts end with a page, and within one.
    kernels.check_unchanged(failures, pages + shared, dtype)


def swiglu(x, gate, up, job, programs: int) -> torch.Tensor:
    example = kernels.example()
    m, n, k = job.gathered.shape[0], gate.shape[1], gate.shape[0]
    out = x.new_empty(m, n)
    example.swiglu[(programs,)](
        job.gathered, gate, up, out, job.tile_order, job.tile_chunk, job.arrived, job.tiles, m, n, k, **example.blocks()
    )  # fmt: skip
    return out


def gathering(m: int, n: int, k: int) -> dict[str, plan.Plan]:
    """Plans of every kind that feed a kernel of a user's; m: the gathered rows."""
    problem = Problem(m, n, k, torch.bfloat16, dist.get_world_size(), Op.ALLGATHER_GEMM)
    arguments = {"tile": TILE, "comm_sms": 16}
    plans = {
        "panels": plan.templates.row_panels(problem, 4, transport="nccl", lanes=2, max_ctas=8, **arguments),
        "window": plan.templates.row_panels(problem, 3, transport="nccl", window=True, max_ctas=8, **arguments),
        # Begins when all have arrived.
        "behind": plan.templates.row_panels(problem, 3, transport="nccl", max_ctas=8, tile=TILE),
    }  # fmt: skip
    if peers_work():
        plans["peers"] = plan.templates.row_panels(problem, 3, transport="peer", **arguments)
        plans["peers, behind"] = plan.templates.row_panels(problem, 3, transport="peer", tile=TILE)
    return plans


@pytest.mark.ranks((2, "nccl"), (4, "nccl"))
def test_kernels_on_gpus_gather_by_plans(failures: Failures) -> None:
    m, n, k = 512, 256, 128
    rank, world = dist.get_rank(), dist.get_world_size()
    plans = gathering(m * world, n, k)
    for seed, (label, chosen) in enumerate(plans.items()):
        for turn in range(3):
            rows = [
                kernels.numbers(m, k, seed=seed + turn, rank=r).bfloat16() for r in range(world)
            ]
            gate = torch.eye(k, n, device=rank_device(), dtype=torch.bfloat16) * 8
            up = torch.ones_like(gate)
            x = rows[rank].to(rank_device())
            with overlap_torch.consume("all_gather", x, columns=n, tile=TILE, plan=chosen) as job:
                out = swiglu(x, gate, up, job, job.programs)
            expect(failures, f"{label}, rows", job.result(), torch.cat(rows).double())
            kernels.check_swiglu(failures, f"{label}, out", out, job.result(), gate, up, TILE)
    overlap_torch.check()


@TWO
def test_kernels_on_gpus_run_in_green_contexts(failures: Failures) -> None:
    m, n, k = 1024, 256, 64
    sms = torch.cuda.get_device_properties(rank_device()).multi_processor_count
    a, b = kernels.operands(m, n, k, seed=1, dtype=torch.bfloat16)
    before = torch.cuda.current_stream()
    with overlap_torch.resources(16, by="green_context"):
        with overlap_torch.produce("all_reduce", (m, n), a.dtype, tile=TILE, chunks=4) as job:
            kernels.multiply(job, a, b)
        expect(failures, "all_reduce", job.result(), kernels.reduced(m, n, k, 1))
    failures.equal(job.programs, sms - 16, "programs")
    failures.equal(torch.cuda.current_stream(), before, "the stream")


# --- graphs and traces ----------------------------------------------------------------------------------------


@TWO
def test_kernels_on_gpus_are_captured(failures: Failures) -> None:
    example = kernels.example()
    m, n, k = 1024, 256, 64
    rows = m // dist.get_world_size()
    a, b = kernels.operands(m, n, k, seed=0, dtype=torch.float32)
    x = kernels.numbers(rows, k, seed=0, rank=dist.get_rank()).to(a.device)

    def calls() -> tuple[torch.Tensor, ...]:
        y = example.row_parallel(a, b, "all_reduce", "grouped", 4)
        z = example.persistent_row_parallel(a, b, "reduce_scatter", 3)
        return y, z, example.column_parallel_swiglu(x, b, b, 2)[1]

    graph, results = capture(calls)
    for seed in range(1, 5):
        refill([a, b], kernels.operands(m, n, k, seed=seed, dtype=torch.float32))
        x.copy_(kernels.numbers(rows, k, seed=seed, rank=dist.get_rank()))
        y, z, gathered = replayed(graph, results)
        expected = kernels.reduced(m, n, k, seed)
        expect(failures, f"replay {seed}, all_reduce", y, expected)
        part = expected.chunk(dist.get_world_size())[dist.get_rank()]
        expect(failures, f"replay {seed}, reduce_scatter", z, part)
        world = range(dist.get_world_size())
        everyone = torch.cat([kernels.numbers(rows, k, seed=seed, rank=r) for r in world])
        expect(failures, f"replay {seed}, gathered", gathered, everyone.double())
    overlap_torch.check()


@TWO
def test_kernels_on_gpus_are_traced(failures: Failures) -> None:
    a, b = kernels.operands(1024, 256, 64, seed=0, dtype=torch.float32)
    with overlap_torch.trace() as traced:
        kernels.example().row_parallel(a, b, "all_reduce", "grouped", 4)
    right = [(call.m, call.n, len(call.chunks)) for call in traced.calls] == [(1024, 256, 4)]
    failures.expect(None if right else f"{traced.calls}", "calls")


# --- what goes wrong ------------------------------------------------------------------------------------------


def failing_call(kind: str) -> str:
    example = kernels.example()
    m, n, k = 128, 96, 32
    a, b = kernels.operands(m, n, k, seed=0, dtype=torch.float32)
    example.row_parallel(a, b, "all_reduce", "grouped", 2)
    torch.cuda.synchronize()
    rank = dist.get_rank()
    try:
        if kind == "arrival":
            with (
                overlap_torch.resources(8),
                overlap_torch.consume("all_gather", a, columns=n, tile=TILE) as job,
            ):
                chunks = torch.full_like(job.tile_chunk, 60 if rank == 0 else 0)
                job.tile_chunk = chunks
                swiglu(a, b, b, job, 1)
        else:
            with overlap_torch.produce("all_reduce", (m, n), a.dtype, tile=TILE, chunks=2) as job:
                order = job.tile_order[:-1] if kind == "signal" and rank == 0 else job.tile_order
                kernels.multiply(job, a, b, order)
                if kind == "exception" and rank == 1:
                    raise KeyError("boom")
                if kind == "op":
                    overlap_torch.gemm_allreduce(a, a)
        for _ in range(200):
            torch.cuda._sleep(10_000_000)
            torch.cuda.synchronize()
            overlap_torch.check()
    except (KeyError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


MESSAGES = {  # what each rank says
    "signal": ["the wait for the finished tiles of chunk 1", ""],
    "exception": ["rank 1 left .*by an exception, KeyError: 'boom'", "KeyError"],
    "arrival": ["a kernel of the caller's waited for the arrival of chunk 60", ""],
    "op": ["an op was called inside", "an op was called inside"],
}


def expect_messages(kind: str) -> None:
    outcomes = rank_pool.run_fresh(
        2, "nccl", failing_call, kind, environment={"OVERLAP_TIMEOUT_S": "5"}, timeout_s=100
    )
    for outcome, message in zip(outcomes, MESSAGES[kind], strict=True):
        assert re.search(message, outcome.result(), re.DOTALL), outcome.value


@pytest.mark.gpu2
@pytest.mark.parametrize("kind", list(MESSAGES))
def test_kernels_on_gpus_say_what_went_wrong(kind):
    expect_messages(kind)


@pytest.mark.long
@pytest.mark.races
@pytest.mark.gpu2
def test_kernels_on_gpus_say_what_went_wrong_each_time():
    """Whatever a rank is doing when the other one has left, it is not kept."""
    for _ in range(20):
        expect_messages("exception")


# --- other ways to write kernels ------------------------------------------------------------------------------


@TWO
def test_kernels_on_gpus_signal_behind_bulk_stores(failures: Failures) -> None:
    import bulk_kernel

    if torch.cuda.get_device_capability() < (9, 0):
        failures.expect(None)  # tensor descriptors store in bulk from compute capability 9.0 on
        return
    m, n = 2048, 1024
    rank, world = dist.get_rank(), dist.get_world_size()
    for turn in range(20):
        values = kernels.numbers(m, n, seed=turn, rank=rank, dtype=torch.bfloat16).to(rank_device())
        with overlap_torch.produce(
            "all_reduce", (m, n), values.dtype, tile=(64, 64), chunks=8
        ) as job:
            job.output.fill_(float("nan"))
            bulk_kernel.launch(values, job)
        expected = sum(kernels.numbers(m, n, seed=turn, rank=r).double() for r in range(world))
        expect(failures, f"turn {turn}", job.result(), expected)


@TWO
@pytest.mark.seconds(400)
def test_kernels_on_gpus_in_cuda(failures: Failures) -> None:
    example = kernels.example("06_cuda_kernel")
    m, n, k = 512, 192, 64
    for seed in range(4):
        a, b = kernels.operands(m, n, k, seed=seed, dtype=torch.float32)
        for padded in ({}, {"by": "padding", "ctas_per_sm": 1, "priority": "low"}):
            with overlap_torch.resources(**padded):
                result = example.row_parallel(a, b, 4)
            expect(failures, f"seed {seed}, {padded}", result, kernels.reduced(m, n, k, seed))


@TWO
def test_kernels_on_gpus_are_planned_by_their_time(failures: Failures) -> None:
    """Chunks by a time that is measured."""
    example = kernels.example()
    m, n, k = 4096, 1024, 256
    for seed, chunks in enumerate((None, 4)):
        a, b = kernels.operands(m, n, k, seed=seed, dtype=torch.bfloat16)
        out = torch.empty(m, n, device=a.device, dtype=a.dtype)
        tiles = -(-m // TILE[0]) * -(-n // TILE[1])
        order = torch.arange(tiles, dtype=torch.int32, device=a.device)
        none = torch.zeros_like(order)  # a chunk of all tiles, and its counter
        bare = functools.partial(
            example.matmul[(tiles,)], a, b, out, order, none, none.clone(), m, n, k, **example.blocks()
        )  # fmt: skip
        with overlap_torch.produce(
            "all_reduce", (m, n), a.dtype, tile=TILE, chunks=chunks, kernel_us=bare
        ) as job:
            kernels.multiply(job, a, b)
        expect(failures, f"{chunks} chunks", job.result(), kernels.reduced(m, n, k, seed))
        made = len(job.plan.chunks)
        failures.equal(made, chunks or made, f"{chunks} chunks")
    overlap_torch.check()


@TWO
@pytest.mark.peers
def test_kernels_on_gpus_store_into_the_ranks_memory(failures: Failures) -> None:
    """Stores that the planner lets travel, of a kernel that signals: plain calls, graphs, and tiles that are compared."""
    m, n, k = 4096, 1024, 256
    for collective in ("all_reduce", "reduce_scatter"):
        a, b = kernels.operands(m, n, k, seed=0, dtype=torch.bfloat16)

        def call(collective: str = collective, a=a, b=b) -> torch.Tensor:
            request = {"tile": TILE, "kernel_us": 100.0}
            with overlap_torch.produce(collective, (m, n), a.dtype, **request) as job:
                kernels.multiply(job, a, b)
            failures.equal(job.plan.collective, Collective.STRIPES, collective)
            return job.result()

        right = kernels.reduced(m, n, k, 0, collective)
        expect(failures, collective, call(), right)
        graph, result = capture(call)
        expect(failures, f"{collective}, in a graph", replayed(graph, result), right)
        with mock.patch.object(job_module, "compares_all", lambda: True):
            expect(failures, f"{collective}, tiles compared", call(), right)
    overlap_torch.check()


# --- races ----------------------------------------------------------------------------------------------------


@so_many_calls(60)
@TWO
@pytest.mark.seconds(500)
def test_kernels_on_gpus_races(failures: Failures, calls: int) -> None:
    """Jobs back to back in memory full of junk, ranks and chunks delayed at random."""
    rank, world = dist.get_rank(), dist.get_world_size()
    chance = random.Random(rank)
    m, n, k = 768, 256, 64
    part = m // world
    dtype = torch.bfloat16
    distinct = 4
    operands = [kernels.operands(m, n, k, seed=seed, dtype=dtype) for seed in range(distinct)]
    sums = [kernels.reduced(m, n, k, seed).to(rank_device(), dtype) for seed in range(distinct)]
    rows = [
        torch.cat([kernels.numbers(part, k, seed=seed, rank=r) for r in range(world)]).to(
            rank_device(), dtype
        )
        for seed in range(distinct)
    ]
    wrong = torch.zeros(calls, dtype=torch.int64, device=rank_device())
    junk = torch.full((1 << 22,), float("nan"), device=rank_device())
    del junk
    plans = [
        [
            dict(chunks=6),  # by the planner
            *(
                dict(plan=chosen)
                for label, chosen in reductions(m, n, op, dtype).items()
                if label in ("window", "packed in a window", "exchange", "direct")
            ),
        ]
        for op in (Op.GEMM_ALLREDUCE, Op.GEMM_REDUCESCATTER)
    ]
    gathers = [dict(chunks=3), *(dict(plan=chosen) for chosen in gathering(m, n, k).values())]
    assert len(plans[0]) > 2 and any("plan" in given for given in plans[1])
    for turn in range(calls):
        seed = turn % distinct
        a, b = operands[seed]
        torch.ops.overlap.delay_side_stream(chance.choice((0, 0, 0, 50, 400)))
        if chance.random() < 0.2:
            torch.cuda._sleep(chance.randrange(200_000))
        come_late(chance)
        kind = turn % 3
        if kind < 2:
            collective = ("all_reduce", "reduce_scatter")[kind]
            given = plans[kind][turn // 3 % len(plans[kind])]
            with overlap_torch.produce(collective, (m, n), dtype, tile=TILE, **given) as job:
                job.output.fill_(float("nan"))
                kernels.multiply(job, a, b)
            right = sums[seed] if kind == 0 else sums[seed].chunk(world)[rank]
            wrong[turn] = (job.result() != right).sum()
        else:
            x = rows[seed][rank * part :][:part]
            gate = torch.eye(k, n, device=x.device, dtype=dtype)
            given = gathers[turn // 3 % len(gathers)]
            with (
                overlap_torch.resources(16),
                overlap_torch.consume("all_gather", x, columns=n, tile=TILE, **given) as job,
            ):
                out = swiglu(x, gate, gate, job, job.programs)
            wrong[turn] = (job.result() != rows[seed]).sum() + (out[:, :k].isnan().any(1).sum())
            wanted = torch.nn.functional.silu(rows[seed].float()) * rows[seed].float()
            wrong[turn] += ((out[:, :k].float() - wanted).abs() > 0.05).sum()
    torch.ops.overlap.delay_side_stream(0)
    bad = wrong.nonzero().flatten().tolist()
    wrong_ones = f"{len(bad)} of {calls}, the first {bad[:5]}"
    failures.expect(wrong_ones if bad else None, "rounds")
    overlap_torch.check()
