"""A Triton kernel whose tiles are stored through tensor descriptors (TMA)."""

import torch
import triton
import triton.language as tl

import overlap_torch.triton as ot


@triton.jit
def copy_tiles(source, target, tile_order, tile_chunk, counters, M, N, BLOCK: tl.constexpr):
    tile = ot.tile(tile_order, tl.program_id(0))
    columns = tl.cdiv(N, BLOCK)
    row, column = tile // columns * BLOCK, tile % columns * BLOCK
    of_source = tl.make_tensor_descriptor(source, [M, N], [N, 1], [BLOCK, BLOCK])
    of_target = tl.make_tensor_descriptor(target, [M, N], [N, 1], [BLOCK, BLOCK])
    of_target.store([row, column], of_source.load([row, column]))
    ot.signal_bulk(counters, tl.load(tile_chunk + tile))


def launch(values: torch.Tensor, job) -> None:
    # Where the kernel keeps its descriptors.
    triton.set_allocator(
        lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=values.device)
    )
    m, n = values.shape
    copy_tiles[(job.tiles,)](
        values, job.output, job.tile_order, job.tile_chunk, job.counters, m, n, BLOCK=64
    )
