"""Triton kernels of rare forms: each doubles rows of 32 numbers, a tile of one row for each number. ``L`` programs loop over them."""

import triton
import triton.language as tl

BLOCK = tl.constexpr(32)
WIDTH = tl.constexpr(32)


@triton.jit
def prefetched(a_ptr, c_ptr, tiles, L: tl.constexpr):
    tile = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    following = tl.load(a_ptr + tile * BLOCK + place, mask=(place >= 0) & (tile < tiles))
    while tile < tiles:
        row = following
        ahead = tile + L
        following = tl.load(a_ptr + ahead * BLOCK + place, mask=(place >= 0) & (ahead < tiles))
        tl.store(c_ptr + tile * BLOCK + place, 2 * row)
        tile += L


@triton.jit
def counted_twice(a_ptr, c_ptr, tiles, L: tl.constexpr):
    first = tl.program_id(0)
    other = first
    place = tl.arange(0, BLOCK)
    for tile in range(first, tiles, L):
        row = tl.load(a_ptr + other * BLOCK + place)
        other += L
        tl.store(c_ptr + tile * BLOCK + place, 2 * row)


@triton.jit
def aliased(a_ptr, c_ptr, tiles, L: tl.constexpr):
    pid, place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    tile = pid
    while tile < tiles:
        tl.static_assert(tile.dtype == tl.int64)
        tl.store(c_ptr + tile * BLOCK + place, 2 * tl.load(a_ptr + tile * BLOCK + place))
        tile += L


@triton.jit
def by_step(a_ptr, c_ptr, tiles, L: tl.constexpr):
    first: tl.int32 = tl.program_id(0)
    for tile in tl.range(first, tiles, step=L):
        place = tile * BLOCK + tl.arange(0, BLOCK)
        tl.store(c_ptr + place, 2 * tl.load(a_ptr + place))


@triton.jit
def by_functions(a_ptr, c_ptr, tiles, L: tl.constexpr):
    """Descriptors, by functions in place of their methods."""
    tile = tl.program_id(0)
    a = tl.make_tensor_descriptor(a_ptr, [tiles, 32], [32, 1], [1, 32])
    c = tl.make_tensor_descriptor(c_ptr, [tiles, 32], [32, 1], [1, 32])
    tl.store_tensor_descriptor(c, [tile, 0], 2 * tl.load_tensor_descriptor(a, [tile, 0]))


@triton.jit
def awaits(a_ptr, c_ptr, tiles, flags):
    """Each program awaits the one before, and takes its flag back."""
    tile = tl.program_id(0)
    place = tile * BLOCK + tl.arange(0, BLOCK)
    polls = 0
    while (tile > 0) & (tl.atomic_cas(flags + tile, 1, 1) == 0) & (polls < 9):
        polls += 1
    tl.store(c_ptr + place, tl.load(a_ptr + place) * tl.where(polls < 9, 2, 0))
    tl.atomic_xchg(flags + tile, 0)
    tl.atomic_xchg(flags + tile + 1, 1)


@triton.jit
def first_turn(a_ptr, c_ptr, tiles, L: tl.constexpr):
    first = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    factor = tl.full((BLOCK,), 3.0, tl.float32)
    for tile in range(first, tiles, L):
        if tile == first:
            factor = factor - 1
        tl.store(c_ptr + tile * BLOCK + place, factor * tl.load(a_ptr + tile * BLOCK + place))


@triton.jit
def returns(a_ptr, c_ptr, tiles, L: tl.constexpr):
    tile = tl.program_id(0)
    if tile >= tiles:
        return
    place = tile * BLOCK + tl.arange(0, BLOCK)
    tl.store(c_ptr + place, 2 * tl.load(a_ptr + place, mask=None))


@triton.jit
def keywords(a_ptr, c_ptr, tiles, L: tl.constexpr):
    """Statements that share a line."""; tile = tl.program_id(0)  # fmt: skip  # noqa: E702
    place = tile * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(pointer=a_ptr + place); tl.store(pointer=c_ptr + place, value=2 * row)  # fmt: skip  # noqa: E702


@triton.jit
def masked(a_ptr, c_ptr, tiles, L: tl.constexpr):
    tile = tl.program_id(0)
    place = tile * BLOCK + tl.arange(0, BLOCK)
    there = (place >= 0) & (tile < tiles)
    tl.store(c_ptr + place, 2 * tl.load(a_ptr + place, mask=there), mask=there)


@triton.jit
def put(pointer, row, tile, B: tl.constexpr = WIDTH):
    tl.store(pointer + tile * B + tl.arange(0, B), row)


@triton.jit
def by_argument(a_ptr, c_ptr, tiles, F: tl.constexpr):
    tile = tl.program_id(0)
    place = tile * BLOCK + tl.arange(0, BLOCK)
    tl.store(c_ptr + place, F(tl.load(a_ptr + place)))


@triton.jit
def twice(row):
    return 2 * row


@triton.jit
def by_number(row):
    return row * 0 + tl.program_id(0)
