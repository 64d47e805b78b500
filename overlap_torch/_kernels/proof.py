"""A run of an aligned kernel's probe tells which tile each program computes, and proves that a job can rely on it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from overlap_torch._kernels.job import Job


class Mismatch(Exception):
    """The kernel's tiles are not the job's tiles, or its signals are wrong."""


def prove(
    job: Job,
    probe: Callable[..., None],
    output: torch.Tensor,
    input: str | None,
    programs: int,
    in_order: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The order of the kernel's tile numbers, and the chunk of each, as tables for a launch of this number of programs.

    ``probe`` stores each tile's number + 1 into its first argument, and takes the probe's parameters after it. ``in_order``:
    programs keep their tiles.

    Raises:
        Mismatch: a number does not store one whole tile of the job, does not signal it once, or loads other tiles' rows.
    """
    if not output.is_contiguous():
        raise Mismatch(f"the output has strides {output.stride()}, but must be contiguous")
    prepared = job._prepared
    shape = (
        tuple(job.output.shape) if input is None else (len(job.gathered), prepared.plan.problem.n)
    )
    if output.numel() != shape[0] * shape[1]:
        raise Mismatch(
            f"the output is {tuple(output.shape)}, but the job's product is {shape[0]} x {shape[1]}"
        )
    tile = (prepared.plan.tile_m, prepared.plan.tile_n)
    device, tiles = output.device, job.tiles
    identity = torch.arange(tiles, dtype=torch.int32, device=device)

    def probed(order: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        owner = torch.zeros(shape, dtype=torch.int32, device=device)
        counts = torch.zeros(tiles + 1, dtype=torch.int32, device=device)
        rows = torch.tensor([1 << 30, -1], dtype=torch.int32).repeat(tiles).to(device)
        source = owner if input is None else job.gathered
        probe(owner, tiles, source, source.shape[1], rows, order, identity, counts)
        return owner, counts[:tiles], rows, int(counts[tiles])

    owner, counts, rows, beyond = probed(identity)
    number_of = _numbers(owner, tile, tiles)
    wrong = (counts != 1).nonzero().flatten()
    if len(wrong):
        number = int(wrong[0])
        raise Mismatch(
            f"program {number} reaches the end of its tile {int(counts[number])} times, not once"
        )
    if beyond and input is None:
        raise Mismatch(
            f"{beyond} of {programs} programs have none of the job's {tiles} tiles, and reach the end of one: give the kernel as many "
            "programs, or let these return before"
        )
    if input is not None:
        _own_rows(rows, number_of, tile, shape)
    order = number_of[job.tile_order.long()].contiguous()
    again, counts, *_ = probed(order)
    if in_order or not torch.equal(again, owner) or bool((counts != 1).any()):
        order = identity  # its loops go over parts of the numbers, which must stay there
    tile_of = torch.empty_like(number_of)
    tile_of[number_of.long()] = identity
    chunks = job.tile_chunk[tile_of.long()].contiguous()
    if programs <= tiles:
        return order, chunks
    # Programs without a tile read numbers that they find to be none.
    numbers = torch.arange(tiles, programs, dtype=torch.int32, device=device)
    return torch.cat([order, numbers]), torch.cat([chunks, torch.zeros_like(numbers)])


def _numbers(owner: torch.Tensor, tile: tuple[int, int], tiles: int) -> torch.Tensor:
    """The kernel's number for each tile."""
    rows, columns = owner.shape
    first = owner[:: tile[0], :: tile[1]]
    spread = first.repeat_interleave(tile[0], 0)[:rows].repeat_interleave(tile[1], 1)[:, :columns]
    number_of = first.flatten() - 1
    missing = (owner == 0).nonzero()
    if len(missing) == owner.numel():
        raise Mismatch("nothing is stored")
    if len(missing):
        row, column = missing[0].tolist()
        raise Mismatch(
            f"row {row}, column {column} of the output is stored by no program{_seen(owner, tile)}"
        )
    if not torch.equal(owner, spread) or len(number_of.unique()) != tiles:
        raise Mismatch("the tiles are not the job's" + _seen(owner, tile))
    if int(number_of.max()) >= tiles:
        raise Mismatch(
            f"number {int(number_of.max())} stores a tile, but the job has {tiles}: give the kernel as many programs"
        )
    return number_of


def _seen(owner: torch.Tensor, tile: tuple[int, int]) -> str:
    """The place that one program stores, for a message."""
    number = int(owner[owner > 0][0])
    places = (owner == number).nonzero()
    (top, left), (bottom, right) = places.amin(0).tolist(), places.amax(0).tolist()
    height, width = bottom - top + 1, right - left + 1
    text = (
        f": a program stores rows {top} to {bottom} and columns {left} to {right}, and the job's tiles are "
        f"{tile[0]} x {tile[1]}"
    )
    if len(places) == height * width and (height, width) != tile:
        text += f"; make the job with tile=({height}, {width})"
    return text


def _own_rows(
    rows: torch.Tensor, number_of: torch.Tensor, tile: tuple[int, int], shape: tuple[int, int]
) -> None:
    """Checks that no tile loads rows of the input that only other tiles await."""
    columns = -(-shape[1] // tile[1])
    first, last = rows.view(-1, 2)[number_of.long()].unbind(1)
    top = torch.arange(len(number_of), device=rows.device) // columns * tile[0]
    wrong = ((last >= 0) & ((first < top) | (last >= top + tile[0]))).nonzero().flatten()
    if len(wrong):
        place = int(wrong[0])
        raise Mismatch(
            f"the tile of rows {int(top[place])} to {int(top[place]) + tile[0] - 1} loads rows {int(first[place])} to "
            f"{int(last[place])} of the input, and waits for its own rows only; rows beyond the last are left out by a mask, not by % or tl.where"
        )
