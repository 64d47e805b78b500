"""Triton kernels that cannot be aligned by their source. `# here` ends the line that is at fault."""

import triton
import triton.language as tl

BLOCK = tl.constexpr(32)


@triton.jit
def no_store(a_ptr, c_ptr, N):  # here
    tile = tl.program_id(0)
    tl.store(a_ptr + tile, tl.load(c_ptr + tile))


@triton.jit
def no_number(a_ptr, c_ptr, N):  # here
    tl.store(c_ptr + tl.arange(0, BLOCK), tl.load(a_ptr + tl.arange(0, BLOCK)))


@triton.jit
def split_k(a_ptr, c_ptr, N):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.load(a_ptr + tl.program_id(1) * N + place)
    tl.atomic_add(c_ptr + place, part)  # here


@triton.jit
def chosen(a_ptr, b_ptr, c_ptr, N):
    tile = tl.program_id(0)
    out = c_ptr if tile < N else b_ptr  # here
    tl.store(out + tile, tl.load(a_ptr + tile))


@triton.jit
def assigned_on_one_way(a_ptr, b_ptr, c_ptr, N):
    tile = tl.program_id(0)
    out = b_ptr + tile
    if tile < N:
        out = c_ptr + tile
    tl.store(out, tl.load(a_ptr + tile))  # here


def plain(pointer):
    return pointer


@triton.jit
def unknown_function(a_ptr, c_ptr, N):
    tile = tl.program_id(0)
    tl.store(plain(c_ptr) + tile, tl.load(a_ptr + tile))  # here


@triton.jit
def kept_with_others(a_ptr, c_ptr, N):
    both = (a_ptr, c_ptr)  # here
    tl.store(both[1] + tl.program_id(0), tl.load(both[0] + tl.program_id(0)))


@triton.jit
def by_flags(a_ptr, c_ptr, flags, N):
    tile = tl.program_id(0)
    if tl.load(flags + tile) > 0:  # here
        tl.store(c_ptr + tile, tl.load(a_ptr + tile))


@triton.jit
def by_indices(a_ptr, c_ptr, indices, N):
    tile = tl.program_id(0)
    row = tl.load(indices + tile)  # here
    tl.store(c_ptr + row, tl.load(a_ptr + tile))


@triton.jit
def many_outputs(a_ptrs, c_ptr, N):
    group = tl.program_id(0)
    out = tl.load(c_ptr + group).to(tl.pointer_type(tl.float32))  # here
    tl.store(out, tl.load(tl.load(a_ptrs + group).to(tl.pointer_type(tl.float32))))


@triton.jit
def ask(N):
    return tl.program_id(0) * N


@triton.jit
def asks_elsewhere(a_ptr, c_ptr, N):
    place = ask(N)  # here
    tl.store(c_ptr + place + tl.program_id(1), tl.load(a_ptr + place))


@triton.jit
def two_loops(a_ptr, c_ptr, N):
    pid = tl.program_id(0)
    for tile in range(pid, N, 4):
        tl.store(c_ptr + tile, tl.load(a_ptr + tile))
    for tile in range(pid, N, 4):  # here
        tl.store(c_ptr + tile, tl.load(a_ptr + tile))


@triton.jit
def stores_after_its_loop(a_ptr, c_ptr, N):
    pid = tl.program_id(0)
    for tile in range(pid, N, 4):
        tl.store(c_ptr + tile, tl.load(a_ptr + tile))
    tl.store(c_ptr + N, 0.0)  # here


@triton.jit
def read_when_increased(a_ptr, c_ptr, N):
    tile = tl.program_id(0)
    while tile < N:
        value = tl.load(a_ptr + tile)
        tile += 4
        tl.store(c_ptr + tile - 4, value)  # here


@triton.jit
def by_block_pointers(a_ptr, c_ptr, N):
    tile = tl.program_id(0)
    rows = tl.make_block_ptr(a_ptr, (N, 32), (32, 1), (tile, 0), (1, 32), (1, 0))  # here
    tl.store(c_ptr + tile * 32 + tl.arange(0, 32)[None, :], tl.load(rows))


@triton.jit
def of_a_part(a_ptr, c_ptr, N):
    tile = tl.program_id(0)
    rows = tl.make_tensor_descriptor(a_ptr + 32, [N, 32], [32, 1], [1, 32])  # here
    tl.store(c_ptr + tile * 32 + tl.arange(0, 32)[None, :], rows.load([tile, 0]))


@triton.jit
def by_blocks(a_ptr, c_ptr, indices, N):
    row = tl.max(tl.load_tensor_descriptor(indices, [tl.program_id(0), 0]))  # here
    tl.store(c_ptr + row, tl.load(a_ptr + row))


@triton.jit
def of_special_warps(a_ptr, c_ptr, N):
    for tile in tl.range(tl.program_id(0), N, 4, warp_specialize=True):  # here
        tl.store(c_ptr + tile, tl.load(a_ptr + tile))


# By a launch.


@triton.jit
def of_special_warps_maybe(a_ptr, c_ptr, N, SPECIAL: tl.constexpr):
    for tile in tl.range(tl.program_id(0), N, 4, warp_specialize=SPECIAL):  # here
        place = tile * BLOCK + tl.arange(0, BLOCK)
        tl.store(c_ptr + place, tl.load(a_ptr + place))


@triton.jit
def in_place(a_ptr, c_ptr, N):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(c_ptr + place, tl.load(a_ptr + place))  # here


@triton.jit
def half_a_row(a_ptr, c_ptr, N):
    place = tl.program_id(0) * 16 + tl.arange(0, 16)
    tl.store(c_ptr + place, tl.load(a_ptr + place))  # here


@triton.jit
def some_rows(a_ptr, c_ptr, N):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(0) < 5:
        tl.store(c_ptr + place, tl.load(a_ptr + place))  # here


@triton.jit
def twice(a_ptr, c_ptr, N):
    place = tl.program_id(0) // 2 * BLOCK + tl.arange(0, BLOCK)
    tl.store(c_ptr + place, tl.load(a_ptr + place))  # here


@triton.jit
def any_width(a_ptr, c_ptr, N, BM: tl.constexpr):
    place = tl.program_id(0) * BM + tl.arange(0, BM)
    tl.store(c_ptr + place, tl.load(a_ptr + place))  # here


tuned = triton.autotune([triton.Config({"BM": 8}), triton.Config({"BM": 16})], key=["N"])(any_width)


@triton.jit
def all_rows(a_ptr, c_ptr, N: tl.constexpr):
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(N):
        sums += tl.load(a_ptr + row * BLOCK + tl.arange(0, BLOCK))
    tl.store(c_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), sums)  # here


@triton.jit
def every_other_row(a_ptr, c_ptr, N):
    tile = tl.program_id(0)
    rows = tl.make_tensor_descriptor(a_ptr, [N // 2, 32], [64, 1], [1, 32])
    tl.store(c_ptr + tile * 32 + tl.arange(0, 32)[None, :], rows.load([tile, 0]))  # here


@triton.jit
def index(pointer, tile):
    return tl.load(pointer + tile).to(tl.int32)


@triton.jit
def placed(a_ptr, c_ptr, N, F: tl.constexpr = (index,)):
    place = F[0](a_ptr, tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK)  # here
    tl.store(c_ptr + place, tl.load(a_ptr + place))


@triton.jit
def counted(a_ptr, c_ptr, N: tl.constexpr):
    for turn in range(N // 2):
        place = (tl.program_id(0) + turn * 2) * BLOCK + tl.arange(0, BLOCK)
        tl.store(c_ptr + place, tl.load(a_ptr + place))  # here


@triton.jit
def by_position(a_ptr, c_ptr, /, N):  # here
    tile = tl.program_id(0)
    tl.store(c_ptr + tile * BLOCK + tl.arange(0, BLOCK), tl.load(a_ptr + tl.arange(0, BLOCK)))


@triton.jit
def by_keyword(a_ptr, c_ptr, *, N):  # here
    tile = tl.program_id(0)
    tl.store(c_ptr + tile * BLOCK + tl.arange(0, BLOCK), tl.load(a_ptr + tl.arange(0, BLOCK)))
