"""The order in which a kernel takes the tiles of its matrix, so that chunks are complete early and one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

# (rows of tiles, columns of tiles) -> the tiles' numbers, row * columns + column, in the order of a kernel.
Order = Callable[[int, int], Sequence[int]]

_BAND = 8  # rows or columns of tiles that share operands in the cache


def row_major(rows: int, columns: int) -> list[int]:
    """Row after row, along N."""
    return list(range(rows * columns))


def column_major(rows: int, columns: int) -> list[int]:
    """Column after column, along M."""
    return [row * columns + column for column in range(columns) for row in range(rows)]


def grouped(rows: int, columns: int) -> list[int]:
    """Groups of 8 rows, each column by column, as in Triton's matmul tutorial."""
    return [
        row * columns + column
        for first in range(0, rows, _BAND)
        for column in range(columns)
        for row in range(first, min(first + _BAND, rows))
    ]


def swizzled(rows: int, columns: int) -> list[int]:
    """Groups of 8 columns, each row by row."""
    return [
        row * columns + column
        for first in range(0, columns, _BAND)
        for row in range(rows)
        for column in range(first, min(first + _BAND, columns))
    ]


ORDERS: dict[str, Order] = {
    order.__name__: order for order in (row_major, column_major, grouped, swizzled)
}


def by_chunks(order: str | Order, chunks: Sequence[int], columns: int) -> list[int]:
    """The kernel's own order, divided: first the tiles of chunk 0, then those of chunk 1, each in the kernel's order.

    ``chunks`` is the chunk of each tile.

    Raises:
        ValueError: no order of this name, or one that does not take each tile once.
    """
    if isinstance(order, str):
        if order not in ORDERS:
            raise ValueError(
                f"tile_order is {order!r}, allowed are {', '.join(map(repr, ORDERS))} or a function of the numbers of "
                "rows and columns of tiles"
            )
        order = ORDERS[order]
    rows = len(chunks) // columns if columns else 0
    own = [int(tile) for tile in order(rows, columns)]
    if sorted(own) != list(range(len(chunks))):
        raise ValueError(
            f"tile_order gave {len(own)} tiles for {rows} x {columns} tiles, and not each of the numbers 0 to "
            f"{len(chunks) - 1} once: let it return row * columns + column of every tile"
        )
    return sorted(own, key=chunks.__getitem__)


def table(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """An int32 tensor on the device."""
    return torch.tensor(values, dtype=torch.int32, device="cpu").to(device)
