"""Triton kernels as people write them, whose tiles are communicated while they compute the next ones.

    python examples/05_triton_kernels.py                    starts a rank on each GPU, or 2 on the CPU (Triton's interpreter)
    torchrun --nproc-per-node 2 examples/05_triton_kernels.py

A kernel for one GPU would not have the lines that end with `# overlap`. There the kernel takes its tile from a table, and
signals that the tile is stored, or waits for the rows that the tile reads. Each result is compared with the same computation and
a collective, one after the other.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl

import overlap_torch
import overlap_torch.triton as ot
from ranks import add_arguments, current_device, launch

TILE = (32, 32)  # a toy's; 128 x 256 is a GPU's
BLOCK_K = 32


@triton.jit
def product_of_tile(a, b, row, column, M, N, K: tl.constexpr,
                    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """One tile of a [M, K] @ b [K, N], both row-major, in float32."""
    rows = row * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        of_a = (rows[:, None] < M) & (k + inner[None, :] < K)
        of_b = (k + inner[:, None] < K) & (columns[None, :] < N)
        left = tl.load(a + rows[:, None] * K + k + inner[None, :], mask=of_a, other=0.0)
        right = tl.load(b + (k + inner[:, None]) * N + columns[None, :], mask=of_b, other=0.0)
        sums = tl.dot(left, right, sums)
    return sums


@triton.jit
def store_tile(c, values, row, column, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = row * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(c + rows[:, None] * N + columns[None, :], values.to(c.dtype.element_ty), mask=inside)


@triton.jit
def matmul(a, b, c, tile_order, tile_chunk, counters, M, N, K: tl.constexpr,
           BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """c = a @ b, a tile a program. In row-major or any other order: that is the table's affair."""
    tile = ot.tile(tile_order, tl.program_id(0))  # overlap
    columns = tl.cdiv(N, BLOCK_N)
    row, column = tile // columns, tile % columns
    sums = product_of_tile(a, b, row, column, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K)
    store_tile(c, sums, row, column, M, N, BLOCK_M, BLOCK_N)
    ot.signal(counters, tl.load(tile_chunk + tile))  # overlap


@triton.jit
def persistent_matmul(a, b, c, tile_order, tile_chunk, counters, tiles, M, N, K: tl.constexpr,
                      BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """c = a @ b by as many programs as there are SMs for it."""
    columns = tl.cdiv(N, BLOCK_N)
    index = tl.program_id(0)
    while index < tiles:
        tile = ot.tile(tile_order, index)  # overlap
        row, column = tile // columns, tile % columns
        sums = product_of_tile(a, b, row, column, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K)
        store_tile(c, sums, row, column, M, N, BLOCK_M, BLOCK_N)
        ot.signal(counters, tl.load(tile_chunk + tile))  # overlap
        index += tl.num_programs(0)


@triton.jit
def swiglu(x, gate, up, c, tile_order, tile_chunk, arrived, tiles, M, N, K: tl.constexpr,
           BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """c = silu(x @ gate) * (x @ up), persistent; x has rows of all ranks, which arrive meanwhile."""
    columns = tl.cdiv(N, BLOCK_N)
    index = tl.program_id(0)
    while index < tiles:
        tile = ot.tile(tile_order, index)  # overlap
        row, column = tile // columns, tile % columns
        ot.wait(arrived, tl.load(tile_chunk + tile))  # overlap
        gates = product_of_tile(x, gate, row, column, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K)
        ups = product_of_tile(x, up, row, column, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K)
        store_tile(c, gates * tl.sigmoid(gates) * ups, row, column, M, N, BLOCK_M, BLOCK_N)
        index += tl.num_programs(0)


@triton.jit
def experts_matmul(a, b, c, tile_order, tile_chunk, counters, M, N, K: tl.constexpr, CAPACITY: tl.constexpr,
                   EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """A grouped GEMM: rows in runs of CAPACITY, whole tiles, for experts 0, 1, ... in turns; b is [EXPERTS, K, N]."""
    tile = ot.tile(tile_order, tl.program_id(0))  # overlap
    columns = tl.cdiv(N, BLOCK_N)
    row, column = tile // columns, tile % columns
    expert = row * BLOCK_M // CAPACITY % EXPERTS
    sums = product_of_tile(a, b + expert * K * N, row, column, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K)
    store_tile(c, sums, row, column, M, N, BLOCK_M, BLOCK_N)
    ot.signal(counters, tl.load(tile_chunk + tile))  # overlap


def blocks() -> dict[str, int]:
    return {"BLOCK_M": TILE[0], "BLOCK_N": TILE[1], "BLOCK_K": BLOCK_K}


def row_parallel(
    a: torch.Tensor, b: torch.Tensor, collective: str, order: str, chunks: int, group=None
):
    """collective(a @ b), by one program for each tile."""
    shape = (a.shape[0], b.shape[1])
    with overlap_torch.produce(
        collective,
        shape,
        a.dtype,
        tile=TILE,
        tile_order=order,
        chunks=chunks,
        device=a.device,
        group=group,
    ) as job:
        matmul[(job.tiles,)](
            a, b, job.output, job.tile_order, job.tile_chunk, job.counters, *shape, a.shape[1], **blocks()
        )  # fmt: skip
    return job.result()


def persistent_row_parallel(
    a: torch.Tensor, b: torch.Tensor, collective: str, chunks: int, group=None
):
    """The same by a persistent kernel."""
    shape = (a.shape[0], b.shape[1])
    with overlap_torch.produce(
        collective, shape, a.dtype, tile=TILE, chunks=chunks, device=a.device, group=group
    ) as job:
        persistent_matmul[(job.programs,)](
            a, b, job.output, job.tile_order, job.tile_chunk, job.counters, job.tiles, *shape, a.shape[1], **blocks()
        )  # fmt: skip
    return job.result()


def column_parallel_swiglu(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, chunks: int, group=None
):
    """swiglu(all_gather(x)), on SMs that leave some to the all-gather."""
    n = gate.shape[1]
    with overlap_torch.resources(comm_sms=8), overlap_torch.consume(
        "all_gather", x, columns=n, tile=TILE, chunks=chunks, group=group
    ) as job:  # fmt: skip
        m, k = job.gathered.shape
        out = x.new_empty(m, n)
        swiglu[(job.programs,)](
            job.gathered, gate, up, out, job.tile_order, job.tile_chunk, job.arrived, job.tiles, m, n, k, **blocks()
        )  # fmt: skip
    return out, job.result()


def experts(a: torch.Tensor, b: torch.Tensor, capacity: int, chunks: int, group=None):
    """Rows of a through their experts, and home: each rank's runs of `capacity` rows for each expert, in turns."""
    world = dist.get_world_size(group)
    shape, rows = (a.shape[0], b.shape[2]), [a.shape[0] // world] * world
    with overlap_torch.produce(
        "all_to_all", shape, a.dtype, tile=TILE, chunks=chunks, send_rows=rows, recv_rows=rows, device=a.device, group=group
    ) as job:  # fmt: skip
        experts_matmul[(job.tiles,)](
            a, b, job.output, job.tile_order, job.tile_chunk, job.counters, *shape, b.shape[1], capacity, b.shape[0],
            **blocks(),
        )  # fmt: skip
    return job.result()


def whole_numbers(*shape: int, seed: int, device: torch.device) -> torch.Tensor:
    """Small ones, whose products and sums float32 has exactly; others on each rank."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    return torch.randint(-3, 4, shape, generator=generator).float().to(device)


def show(name: str, result: torch.Tensor, expected: torch.Tensor) -> None:
    worst = (result - expected).abs().max().item()
    if dist.get_rank() == 0:
        print(f"{name}: largest difference {worst:g}")


def work(options: argparse.Namespace) -> None:
    m, n, k = options.rows, options.columns, options.inner
    device, world = current_device(), dist.get_world_size()
    a, b = whole_numbers(m, k, seed=1, device=device), whole_numbers(k, n, seed=2, device=device)
    expected = a @ b
    dist.all_reduce(expected)
    for order in ("row_major", "grouped"):
        show(f"matmul, {order}, all_reduce", row_parallel(a, b, "all_reduce", order, 4), expected)
    part = m // world
    scattered = persistent_row_parallel(a, b, "reduce_scatter", 2)
    show("persistent matmul, reduce_scatter", scattered, expected[dist.get_rank() * part :][:part])

    x, up = a[:part] / 8, whole_numbers(k, n, seed=3, device=device)
    out, gathered = column_parallel_swiglu(x, b / 8, up, 2)
    show("SwiGLU, all_gather", out, torch.nn.functional.silu(gathered @ b / 8) * (gathered @ up))

    capacity, count = TILE[0], 2
    tokens = whole_numbers(world * count * capacity, k, seed=4, device=device)
    weights = whole_numbers(count, k, n, seed=5, device=device)
    runs = tokens.view(world, count, capacity, k)
    rows = torch.einsum("reck,ekn->recn", runs, weights).reshape(-1, n)
    home = torch.empty_like(rows)
    dist.all_to_all_single(home, rows)
    show("experts, all_to_all", experts(tokens, weights, capacity, 2), home)
    overlap_torch.check()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, "as many as there are GPUs, or 2 on the CPU")
    for size, default in (("rows", 256), ("columns", 96), ("inner", 64)):
        parser.add_argument(f"--{size}", type=int, default=default)
    launch(work, parser.parse_args())


if __name__ == "__main__":
    main()
