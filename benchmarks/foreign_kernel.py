"""The cost and the gain of overlap_torch.produce for a Triton GEMM.

    python -m overlap_torch.benchmarks foreign_kernel                                    one GPU: the cost
    torchrun --nproc-per-node 2 -m overlap_torch.benchmarks foreign_kernel               two and more: the gain

On one GPU nothing is communicated. Two kernels that differ in nothing else take turns: the bare one in the grouped order of
Triton's matmul tutorial, and the one that takes the same order, cut into chunks, from a table and signals each tile.

On several, the kernel's own sequence (the bare kernel, then NCCL's collective) takes turns with jobs. Communication needs SMs: a
kernel of one tile a program leaves none until tiles end, a persistent one as many as it is told, a green context keeps some from
any kernel. The grouped order is cut into chunks; the same chunks column by column complete all at the end: what the order of
tiles is worth. One job's chunks and ways are what the planner makes of the bare kernel's time. Times are those of the slowest rank.

Medians, and the ratio shape by shape; results are compared first, on integers, bit for bit.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import overlap_torch
import overlap_torch.triton as ot
from overlap_torch._kernels import tile_orders
from overlap_torch._kernels.resources import KernelResources
from overlap_torch.plan import Plan, Problem
from overlap_torch.plan.programs import two_shot
from overlap_torch.plan.templates import packed, row_panels
from overlap_torch.plan.types import Op

from .shapes import suite_group
from .study import Study

# m, n, k of m_train with 4096 rows and more on two GPUs.
SHAPES = [
    (4096, 8192, 7168),
    (8192, 8192, 7168),
    (8192, 8192, 2048),
    (8192, 4096, 3584),
    (4096, 16384, 4096),
    (16384, 16384, 4096),
]
CHUNKS = 8
GROUP = 8


@triton.jit
def _tile_of(index, M, N, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The index-th tile of the grouped order of Triton's tutorial."""
    columns = tl.cdiv(N, BLOCK_N)
    first = index // (GROUP * columns) * GROUP
    size = min(tl.cdiv(M, BLOCK_M) - first, GROUP)
    place = index % (GROUP * columns)
    return (first + place % size) * columns + place // size


@triton.jit
def _compute(a, b, c, tile, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    columns = tl.cdiv(N, BLOCK_N)
    rows = tile // columns * BLOCK_M + tl.arange(0, BLOCK_M)
    of_columns = tile % columns * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    left = a + rows[:, None] * K + inner[None, :]
    right = b + of_columns[None, :] * K + inner[:, None]
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in range(0, K, BLOCK_K):
        sums = tl.dot(tl.load(left), tl.load(right), sums)
        left += BLOCK_K
        right += BLOCK_K
    tl.store(c + rows.to(tl.int64)[:, None] * N + of_columns[None, :], sums.to(c.dtype.element_ty))


@triton.jit
def _gemm(a, b, c, tile_order, tile_chunk, counters, M, N, K, SIGNALS: tl.constexpr, GROUP: tl.constexpr,
          BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """c = a @ b.T, all row-major, of whole tiles, one a program."""
    tile = _tile_of(tl.program_id(0), M, N, GROUP, BLOCK_M, BLOCK_N)
    if SIGNALS:
        tile = ot.tile(tile_order, tl.program_id(0))
    _compute(a, b, c, tile, N, K, BLOCK_M, BLOCK_N, BLOCK_K)
    if SIGNALS:
        ot.signal(counters, tl.load(tile_chunk + tile))


@triton.jit
def _persistent_gemm(a, b, c, tile_order, tile_chunk, counters, tiles, M, N, K, SIGNALS: tl.constexpr, GROUP: tl.constexpr,
                     BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """The same by as many programs as there are."""
    for index in range(tl.program_id(0), tiles, tl.num_programs(0)):
        tile = _tile_of(index, M, N, GROUP, BLOCK_M, BLOCK_N)
        if SIGNALS:
            tile = ot.tile(tile_order, index)
        _compute(a, b, c, tile, N, K, BLOCK_M, BLOCK_N, BLOCK_K)
        if SIGNALS:
            ot.signal(counters, tl.load(tile_chunk + tile))


def compare(m: int, n: int, k: int, tile: tuple[int, int], rounds: int) -> tuple[float, float]:
    """Microseconds, medians: the bare kernel and the one that signals."""
    device = torch.device("cuda", torch.cuda.current_device())
    a, b = (torch.randn(rows, k, device=device, dtype=torch.bfloat16) for rows in (m, n))
    products = [torch.empty(m, n, device=device, dtype=torch.bfloat16) for _ in range(2)]
    rows, columns = -(-m // tile[0]), -(-n // tile[1])
    chunks = [row * CHUNKS // rows for row in range(rows) for _ in range(columns)]
    order = tile_orders.table(tile_orders.by_chunks("grouped", chunks, columns), device)
    of_chunks = tile_orders.table(chunks, device)
    counters = torch.zeros(72, dtype=torch.int32, device=device)

    def run(signals: bool) -> None:
        _gemm[(rows * columns,)](
            a, b, products[signals], order, of_chunks, counters, m, n, k, SIGNALS=signals, GROUP=GROUP,
            BLOCK_M=tile[0], BLOCK_N=tile[1], BLOCK_K=64, num_warps=8, num_stages=3,
        )  # fmt: skip

    times: list[list[float]] = [[], []]
    for turn in range(rounds + 3):
        for signals in ((False, True), (True, False))[turn % 2]:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run(signals)
            end.record()
            end.synchronize()
            if turn >= 3:
                times[signals].append(1e3 * begin.elapsed_time(end))
    if not torch.equal(*products):
        raise RuntimeError(f"{m} x {n} x {k}: the two kernels' products differ")
    calls = rounds + 3
    if counters.tolist()[:CHUNKS] != [calls * chunks.count(chunk) for chunk in range(CHUNKS)]:
        raise RuntimeError(f"{m} x {n} x {k}: the counters are {counters.tolist()[:CHUNKS]}")
    return statistics.median(times[0]), statistics.median(times[1])


# --- several GPUs ---------------------------------------------------------------------------------------------

COLLECTIVES = {"all_reduce": Op.GEMM_ALLREDUCE, "reduce_scatter": Op.GEMM_REDUCESCATTER}


@dataclass(frozen=True)
class Setting:
    """How a job runs: its chunks, the SMs that the kernel leaves to communication, and how; NCCL's CTAs."""

    chunks: int
    sms: int = 0
    # "tiles": one a program; "green": the same in a green context; "grid": persistent; and persistent "window": in an NCCL
    # window; "exchange": tiles that two ranks send each other and add; "peer": by a program over peers.
    by: str = "tiles"
    ctas: int = 16

    def __str__(self) -> str:
        return f"{self.chunks}, {self.by} {self.sms}, {self.ctas}"


SETTINGS = [
    Setting(4),
    Setting(2, 16, "grid"),
    Setting(4, 16, "grid"),
    Setting(8, 16, "grid"),
    Setting(4, 8, "grid", 8),
    Setting(4, 24, "grid", 24),
    Setting(4, 16, "green"),
    Setting(8, 16, "green"),
    Setting(4, 8, "window", 8),
    Setting(8, 8, "window", 8),
    Setting(8, 16, "window", 16),
    Setting(4, 16, "exchange", 16),
    Setting(8, 16, "peer"),
]
FREE_SMS = 16  # in the planner's job
GREEN = KernelResources(16, "green_context")


def _launch(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    tile: tuple[int, int],
    job=None,
    programs: int = 0,
) -> None:
    """By so many persistent programs; 0: by one a tile."""
    (m, k), n = a.shape, b.shape[0]
    tiles = -(-m // tile[0]) * -(-n // tile[1])
    tables = (job.tile_order, job.tile_chunk, job.counters) if job else (None, None, None)
    options = dict(
        SIGNALS=job is not None, GROUP=GROUP, BLOCK_M=tile[0], BLOCK_N=tile[1], BLOCK_K=64, num_warps=8, num_stages=3
    )  # fmt: skip
    if programs:
        _persistent_gemm[(programs,)](a, b, c, *tables, tiles, m, n, k, **options)
    else:
        _gemm[(tiles,)](a, b, c, *tables, m, n, k, **options)


def _sequence(
    collective: str, a: torch.Tensor, b: torch.Tensor, tile: tuple[int, int], programs: int
) -> torch.Tensor:
    c = torch.empty(a.shape[0], b.shape[0], device=a.device, dtype=a.dtype)
    _launch(a, b, c, tile, programs=programs)
    if collective == "all_reduce":
        dist.all_reduce(c)
        return c
    part = c.new_empty(c.shape[0] // dist.get_world_size(), c.shape[1])
    dist.reduce_scatter_tensor(part, c)
    return part


def _job(
    collective: str,
    a: torch.Tensor,
    b: torch.Tensor,
    tile: tuple[int, int],
    plan: Plan,
    by: str,
    order: str = "cut",
) -> torch.Tensor:
    shape = (a.shape[0], b.shape[0])
    resources = GREEN if by == "green" else None
    with overlap_torch.produce(
        collective, shape, a.dtype, tile=tile, plan=plan, tile_order="grouped", resources=resources
    ) as job:
        if order == "uncut":
            job.tile_order = _uncut(
                *(-(-size // side) for size, side in zip(shape, tile, strict=True)), a.device
            )
        _launch(a, b, job.output, tile, job, 0 if by in ("tiles", "green") else job.programs)
    return job.result()


def _plan(one: Setting, problem: Problem, tile: tuple[int, int]) -> Plan:
    if one.by == "peer":
        return two_shot(
            problem, one.chunks, tile=tile, kernel="library", transport="peer", comm_sms=one.sms, max_ctas=one.ctas
        )  # fmt: skip
    if one.by == "exchange":
        return packed(
            problem, one.chunks, tile=tile, comm_sms=one.sms, max_ctas=one.ctas, window=True, collective="exchange"
        )  # fmt: skip
    how = dict(
        tile=tile, comm_sms=one.sms, max_ctas=one.ctas, transport="nccl", window=one.by == "window"
    )
    return row_panels(problem, one.chunks, **how)


_orders: dict[tuple, torch.Tensor] = {}


def _uncut(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    key = (rows, columns, device)
    if key not in _orders:
        _orders[key] = tile_orders.table(tile_orders.column_major(rows, columns), device)
    return _orders[key]


ROW = 4  # calls


def _take_turns(variants: list[Callable[[], object]], rounds: int, mode: str) -> list[float]:
    """Microseconds of a call, medians over the rounds of the slowest rank's times: of one call, whose host's time is in it, or
    of `ROW` in a row, which the host enqueues behind other work, as a training step does."""
    calls = 1 if mode == "call" else ROW
    other = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    times = torch.zeros(rounds, len(variants), dtype=torch.float64, device="cuda")
    for turn in range(rounds):
        for step in range(len(variants)):
            index = (turn + step) % len(variants)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            dist.barrier()
            torch.cuda.synchronize()
            if mode == "row":
                for _ in range(calls):  # for longer than the host needs
                    torch.mm(other, other)
            begin.record()
            for _ in range(calls):
                variants[index]()
            end.record()
            end.synchronize()
            times[turn, index] = 1e3 * begin.elapsed_time(end) / calls
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.median(0).values.tolist()


@dataclass
class Gain:
    """Microseconds of a call."""

    kernel: float  # by itself
    sequence: float  # the faster one of its kernel with one tile a program, and the persistent one
    job: float  # the fastest one
    setting: str  # its
    tiles: float  # the job by one tile a program with no SM left free
    uncut: float  # the fastest job without an order of tiles
    planned: float  # the planner's


def gain(
    collective: str, shape: tuple[int, int, int], tile: tuple[int, int], rounds: int, mode: str
) -> Gain:
    """Jobs by all settings and by the planner's plan, beside the kernel's own sequence."""
    m, n, k = shape
    world = dist.get_world_size()
    generator = torch.Generator(device="cuda").manual_seed(dist.get_rank())
    a, b = (
        torch.randint(-2, 3, (rows, k), device="cuda", generator=generator).bfloat16()
        for rows in (m, n)
    )
    problem = Problem(m, n, 1, torch.bfloat16, world, COLLECTIVES[collective])
    all_sms = torch.cuda.get_device_properties(a.device).multi_processor_count
    bare = torch.empty(m, n, device=a.device, dtype=a.dtype)
    planned = overlap_torch.produce(
        collective,
        (m, n),
        a.dtype,
        tile=tile,
        kernel_us=lambda: _launch(a, b, bare, tile, programs=all_sms),
        resources=KernelResources(FREE_SMS),
    ).plan
    jobs = [(planned, "grid", "the planner's")]
    for one in SETTINGS:
        if one.by == "exchange" and (collective != "all_reduce" or world != 2):
            continue
        jobs.append((_plan(one, problem, tile), one.by, str(one)))
    uncut = [(plan, by) for plan, by, _ in jobs if by == "grid"]
    variants: list[Callable[[], object]] = [
        lambda programs=programs: _sequence(collective, a, b, tile, programs)
        for programs in (0, all_sms)
    ]
    variants += [
        lambda plan=plan, by=by: _job(collective, a, b, tile, plan, by) for plan, by, _ in jobs
    ]
    variants += [
        lambda plan=plan, by=by: _job(collective, a, b, tile, plan, by, "uncut")
        for plan, by in uncut
    ]
    right = variants[0]()
    for variant in variants[1:]:
        if not torch.equal(variant(), right):
            raise RuntimeError(f"{collective} {shape}: results differ from the sequence's")
    variants.append(lambda: _launch(a, b, bare, tile))
    _take_turns(variants, 3, mode)
    times = _take_turns(variants, rounds, mode)
    by_job = times[2 : 2 + len(jobs)]
    best = min(range(len(jobs)), key=by_job.__getitem__)
    tiles = min(time for time, (_, by, _) in zip(by_job, jobs, strict=True) if by == "tiles")
    return Gain(
        kernel=times[-1],
        sequence=min(times[:2]),
        job=by_job[best],
        setting=jobs[best][2],
        tiles=tiles,
        uncut=min(times[2 + len(jobs) : -1]),
        planned=by_job[0],
    )


def measure_gain(tile: tuple[int, int], rounds: int) -> Iterator[str]:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    for mode in ("call", "row"):
        for collective in COLLECTIVES:
            yield from _gains(collective, tile, rounds, mode)
    dist.destroy_process_group()


def _gains(collective: str, tile: tuple[int, int], rounds: int, mode: str) -> Iterator[str]:
    """The lines of a table."""
    ratios, planned, bounds = [], [], []
    gpu = torch.cuda.get_device_name()
    yield f"\n{collective}, {mode}, {dist.get_world_size()} x {gpu}; us"
    yield (
        "| M x N x K | kernel alone | sequence | job | gain | chunks, SMs, CTAs | planner's job | one tile a program, no SM free | "
        "without order | order's worth |"
    )
    yield "| --- |" + " --- |" * 9
    for shape in suite_group("m_train"):
        one = gain(collective, (shape.m, shape.n, shape.k), tile, rounds, mode)
        ratios.append(one.sequence / one.job)
        planned.append(one.sequence / one.planned)
        bounds.append(one.sequence / one.kernel)
        yield (
            f"| {shape} | {one.kernel:.0f} | {one.sequence:.0f} | {one.job:.0f} | {ratios[-1]:.2f} | {one.setting} | {one.planned:.0f} | "
            f"{one.tiles:.0f} | {one.uncut:.0f} | {one.uncut / one.job:.2f} |"
        )
    for name, each in (("best", ratios), ("planner's", planned), ("kernel alone", bounds)):
        mean = math.prod(each) ** (1 / len(each))
        yield f"{name}: geometric mean {mean:.3f}, lowest {min(each):.3f}"


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--tile", type=int, nargs=2, default=(128, 256))


def rows(args: argparse.Namespace) -> Iterator[str]:
    """The lines of the tables: on one GPU what the signals cost, under torchrun what jobs gain."""
    tile = tuple(args.tile)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        yield from measure_gain(tile, args.rounds)
        return
    gpu = torch.cuda.get_device_name()
    yield f"{gpu}, bf16, tiles of {tile[0]} x {tile[1]}, {CHUNKS} chunks; us"
    yield "| M x N x K | bare | with table and signals | ratio |\n| --- | --- | --- | --- |"
    ratios = []
    for shape in SHAPES:
        bare, signalling = compare(*shape, tile, args.rounds)
        ratios.append(signalling / bare)
        yield f"| {' x '.join(map(str, shape))} | {bare:.0f} | {signalling:.0f} | {ratios[-1]:.4f} |"
    yield f"geometric mean {math.prod(ratios) ** (1 / len(ratios)):.4f}, largest {max(ratios):.4f}"


STUDY = Study(options, rows, str, lambda rows, args: "", on_ranks=False)
