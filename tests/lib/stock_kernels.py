"""Triton kernels that know nothing of overlap_torch, in the forms in which people write them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def product_of_tile(
    a_ptr, b_ptr, row, column, M, N, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    rows = row * BM + tl.arange(0, BM)
    columns = column * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    sums = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        in_a = (rows[:, None] < M) & (k + inner[None, :] < K)
        in_b = (k + inner[:, None] < K) & (columns[None, :] < N)
        left = tl.load(a_ptr + rows[:, None] * K + k + inner[None, :], mask=in_a, other=0.0)
        right = tl.load(b_ptr + (k + inner[:, None]) * N + columns[None, :], mask=in_b, other=0.0)
        sums = tl.dot(left, right, sums)
    return sums


@triton.jit
def store_tile(c_ptr, sums, row, column, M, N, BM: tl.constexpr, BN: tl.constexpr):
    rows = row * BM + tl.arange(0, BM)
    columns = column * BN + tl.arange(0, BN)
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(
        c_ptr + rows[:, None] * N + columns[None, :], sums.to(c_ptr.dtype.element_ty), mask=inside
    )


@triton.jit
def grouped_place(index, M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """A tile of groups of this number of rows, each group column by column."""
    columns = tl.cdiv(N, BN)
    first = index // (GROUP * columns) * GROUP
    height = min(tl.cdiv(M, BM) - first, GROUP)
    return first + index % height, index % (GROUP * columns) // height


@triton.jit
def grouped(a_ptr, b_ptr, c_ptr, M, N, K: tl.constexpr,
            BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """c = a @ b with all arithmetic in one body, as it is mostly written."""
    pid = tl.program_id(axis=0)
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    in_group = GROUP * tiles_n
    first_m = pid // in_group * GROUP
    group_m = min(tiles_m - first_m, GROUP)
    pid_m = first_m + pid % in_group % group_m
    pid_n = pid % in_group // group_m
    tl.assume(pid_m >= 0)

    rows = (pid_m * BM + tl.arange(0, BM)) % M
    columns = (pid_n * BN + tl.arange(0, BN)) % N
    inner = tl.arange(0, BK)
    a_ptrs = a_ptr + rows[:, None] * K + inner[None, :]
    b_ptrs = b_ptr + inner[:, None] * N + columns[None, :]
    sums = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        left = tl.load(a_ptrs, mask=inner[None, :] < K - k, other=0.0)
        right = tl.load(b_ptrs, mask=inner[:, None] < K - k, other=0.0)
        sums = tl.dot(left, right, sums)
        a_ptrs += BK
        b_ptrs += BK * N
    c = sums.to(c_ptr.dtype.element_ty)

    rows = pid_m * BM + tl.arange(0, BM)
    columns = pid_n * BN + tl.arange(0, BN)
    c_ptrs = c_ptr + rows[:, None] * N + columns[None, :]
    tl.store(c_ptrs, c, mask=(rows[:, None] < M) & (columns[None, :] < N))


@triton.jit
def over_axes(
    a_ptr, b_ptr, c_ptr, M, N, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """A grid of columns and rows of tiles."""
    sums = product_of_tile(a_ptr, b_ptr, tl.program_id(1), tl.program_id(0), M, N, K, BM, BN, BK)
    store_tile(c_ptr, sums, tl.program_id(1), tl.program_id(0), M, N, BM, BN)


@triton.jit
def swizzled(a_ptr, b_ptr, c_ptr, M, N, K: tl.constexpr,
             BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    row, column = tl.program_id(0), tl.program_id(1)
    row, column = tl.swizzle2d(row, column, tl.num_programs(0), tl.num_programs(1), GROUP)
    sums = product_of_tile(a_ptr, b_ptr, row, column, M, N, K, BM, BN, BK)
    store_tile(c_ptr, sums, row, column, M, N, BM, BN)


@triton.jit
def persistent(a_ptr, b_ptr, c_ptr, M, N, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
               GROUP: tl.constexpr, PROGRAMS: tl.constexpr):  # fmt: skip
    """A loop over tiles, with a second count for its end."""
    start = tl.program_id(0)
    tiles = tl.cdiv(M, BM) * tl.cdiv(N, BN)
    stored = start - PROGRAMS
    for tile in tl.range(start, tiles, PROGRAMS, flatten=True):
        row, column = grouped_place(tile, M, N, BM, BN, GROUP)
        sums = product_of_tile(a_ptr, b_ptr, row, column, M, N, K, BM, BN, BK)
        stored += PROGRAMS
        row, column = grouped_place(stored, M, N, BM, BN, GROUP)
        store_tile(c_ptr, sums, row, column, M, N, BM, BN)


@triton.jit
def in_turns(
    a_ptr, b_ptr, c_ptr, M, N, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """Persistent, by ``while``."""
    index = tl.program_id(0)
    columns = tl.cdiv(N, BN)
    while index < tl.cdiv(M, BM) * columns:
        sums = product_of_tile(a_ptr, b_ptr, index // columns, index % columns, M, N, K, BM, BN, BK)
        store_tile(c_ptr, sums, index // columns, index % columns, M, N, BM, BN)
        index += tl.num_programs(0)


@triton.jit
def experts(a_ptr, b_ptr, c_ptr, N, K: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr,
            BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """A grouped GEMM: ROWS rows for each expert, one problem after the other, each over the same programs."""
    index = tl.program_id(0)
    end = 0
    columns = tl.cdiv(N, BN)
    for expert in range(EXPERTS):
        tiles = tl.cdiv(ROWS, BM) * columns
        while index >= end and index < end + tiles:
            place = index - end
            a = a_ptr + expert * ROWS * K
            b = b_ptr + expert * K * N
            sums = product_of_tile(a, b, place // columns, place % columns, ROWS, N, K, BM, BN, BK)
            store_tile(
                c_ptr + expert * ROWS * N, sums, place // columns, place % columns, ROWS, N, BM, BN
            )
            index += tl.num_programs(0)
        end += tiles


@triton.jit
def normed(x_ptr, y_ptr, weight_ptr, mean_ptr, stride, N: tl.constexpr, eps, BLOCK: tl.constexpr):
    """A layer norm, a row a program, in several stores."""
    row = tl.program_id(0)
    x_ptr += row * stride
    y_ptr += row * stride
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for begin in range(0, N, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / N
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for begin in range(0, N, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)
        x = tl.where(columns < N, x - mean, 0.0)
        total += x * x
    scale = 1 / tl.sqrt(tl.sum(total, axis=0) / N + eps)
    tl.store(mean_ptr + row, mean)
    for begin in range(0, N, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + columns, mask=columns < N)
        tl.store(y_ptr + columns, (x - mean) * scale * weight, mask=columns < N)


@triton.jit
def attended(sums, q, k_desc, v_desc, begin, first, last,
             BM: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    rows = first + tl.arange(0, BM)
    columns = tl.arange(0, BN)
    at = first if MASKED else 0
    while at < last:
        scores = tl.dot(q, k_desc.load([begin + at, 0]).T)
        if MASKED:
            scores = tl.where(rows[:, None] >= at + columns[None, :], scores, 0.0)
        sums = tl.dot(scores, v_desc.load([begin + at, 0]), sums)
        at += BN
    return sums


@triton.jit
def attention(
    q_desc, k_desc, v_desc, o_desc, L, H, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """Causal and linear, so that small integers stay exact: blocks of queries on one axis, heads on the other."""
    block = tl.program_id(0)
    head = tl.program_id(1)
    begin = head // H * (H * L) + head % H * L
    q = q_desc.load([begin + block * BM, 0])
    sums = tl.zeros([BM, D], dtype=tl.float32)
    sums = attended(sums, q, k_desc, v_desc, begin, block * BM, block * BM, BM, BN, False)
    sums = attended(sums, q, k_desc, v_desc, begin, block * BM, (block + 1) * BM, BM, BN, True)
    o_desc.store([begin + block * BM, 0], sums)


@triton.jit
def descriptors(a_ptr, b_ptr, c_ptr, M, N, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                HALVES: tl.constexpr, PROGRAMS: tl.constexpr):  # fmt: skip
    """Persistent, by descriptors that the kernel makes, the tile in one store or in two."""
    a_desc = tl.make_tensor_descriptor(a_ptr, shape=[M, K], strides=[K, 1], block_shape=[BM, BK])
    b_desc = tl.make_tensor_descriptor(b_ptr, shape=[K, N], strides=[N, 1], block_shape=[BK, BN])
    c_desc = tl.make_tensor_descriptor(
        c_ptr, shape=[M, N], strides=[N, 1], block_shape=[BM, BN // 2 if HALVES else BN]
    )
    columns = tl.cdiv(N, BN)
    for tile in range(tl.program_id(0), tl.cdiv(M, BM) * columns, PROGRAMS):
        row, column = tile // columns * BM, tile % columns * BN
        sums = tl.zeros((BM, BN), dtype=tl.float32)
        for k in range(0, K, BK):
            sums = tl.dot(a_desc.load([row, k]), b_desc.load([k, column]), sums)
        if HALVES:
            left, right = tl.split(tl.permute(tl.reshape(sums, (BM, 2, BN // 2)), (0, 2, 1)))
            c_desc.store([row, column], left.to(c_ptr.dtype.element_ty))
            c_desc.store([row, column + BN // 2], right.to(c_ptr.dtype.element_ty))
        else:
            c_desc.store([row, column], sums.to(c_ptr.dtype.element_ty))


@triton.jit
def block_pointers(
    a_ptr, b_ptr, c_ptr, M, N, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    columns = tl.cdiv(N, BN)
    row, column = tl.program_id(0) // columns, tl.program_id(0) % columns
    sums = product_of_tile(a_ptr, b_ptr, row, column, M, N, K, BM, BN, BK)
    place = tl.make_block_ptr(c_ptr, (M, N), (N, 1), (row * BM, column * BN), (BM, BN), (1, 0))
    tl.store(place, sums.to(c_ptr.dtype.element_ty), boundary_check=(0, 1))


BLOCKS = {"BM": 32, "BN": 32, "BK": 32}


def blocks_of_descriptors(named: dict) -> None:
    for name, rows in (("q_desc", "BM"), ("k_desc", "BN"), ("v_desc", "BN"), ("o_desc", "BM")):
        named[name].block_shape = [named[rows], named["D"]]


tuned = triton.autotune(
    [
        triton.Config({"BM": 16, "BN": 32, "BK": 32}, num_warps=4),
        triton.Config({"BM": 32, "BN": 32, "BK": 16}, num_warps=4),
        triton.Config({"BM": 32, "BN": 32, "BK": 32}, num_warps=8),
    ],
    key=["M", "N"],
)(triton.heuristics({"GROUP": lambda named: 3 if named["BM"] == 32 else 1})(grouped))
tuned_attention = triton.autotune(
    [triton.Config({"BM": rows, "BN": 16}, pre_hook=blocks_of_descriptors) for rows in (16, 32)],
    key=["L"],
)(attention)


@dataclass(frozen=True)
class Form:
    """A kernel, and its launch with operands a and b and an output [m, n]."""

    kernel: object
    launch: Callable[..., None]
    output: str = "c_ptr"
    tile: tuple[int, int] = (32, 32)


def grid(m: int, n: int) -> Callable[[dict], tuple[int]]:
    return lambda named: (triton.cdiv(m, named["BM"]) * triton.cdiv(n, named["BN"]),)


def one_a_program(**more: object) -> Callable[..., None]:
    def launch(kernel, a, b, c, programs) -> None:
        kernel[grid(*c.shape)](a, b, c, *c.shape, a.shape[1], **{**BLOCKS, **more})

    return launch


def on_axes(**more: object) -> Callable[..., None]:
    def launch(kernel, a, b, c, programs) -> None:
        tiles = tuple(-(-size // 32) for size in c.shape)
        tiles = tiles if more else tiles[::-1]
        kernel[tiles](a, b, c, *c.shape, a.shape[1], **BLOCKS, **more)

    return launch


def of_programs(counted: bool, **more: object) -> Callable[..., None]:
    def launch(kernel, a, b, c, programs) -> None:
        given = {"PROGRAMS": programs, **more} if counted else more
        kernel[(programs,)](a, b, c, *c.shape, a.shape[1], **BLOCKS, **given)

    return launch


def launch_tuned(kernel, a, b, c, programs) -> None:
    kernel[grid(*c.shape)](a, b, c, *c.shape, a.shape[1])


def launch_described(kernel, a, b, c, programs, halves: bool = False) -> None:
    if c.is_cuda:
        triton.set_allocator(
            lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=c.device)
        )
    kernel[(programs,)](a, b, c, *c.shape, a.shape[1], **BLOCKS, HALVES=halves, PROGRAMS=programs)


def launch_halves(kernel, a, b, c, programs) -> None:
    launch_described(kernel, a, b, c, programs, True)


PRODUCTS = {
    "grouped order": Form(grouped, one_a_program(GROUP=3)),
    "autotuned": Form(tuned, launch_tuned),
    "two axes": Form(over_axes, on_axes()),
    "swizzle2d": Form(swizzled, on_axes(GROUP=2)),
    "persistent": Form(persistent, of_programs(True, GROUP=2)),
    "persistent, while": Form(in_turns, of_programs(False)),
    "descriptors": Form(descriptors, launch_described),
    "descriptors, halves": Form(descriptors, launch_halves),
    "block pointers": Form(block_pointers, one_a_program()),
}


def described(tensor: torch.Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block)
