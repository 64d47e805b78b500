"""The terms of a program's statements: ranks relative to the rank that runs it, shares of rows, and areas of memories."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

from overlap_torch._plan import Memory, Rectangle


def _operator(of_numbers: Callable[[int, int], int]) -> Callable[[AnyRank, AnyRank], Rank]:
    """An operator of ranks, from that of their numbers."""
    return lambda a, b: Rank(lambda rank: of_numbers(number_on(a, rank), number_on(b, rank)))


class Rank:
    """A rank relative to the rank that runs the program: ``p.rank + 1`` is the next one, modulo the number of ranks.

    It takes ``+``, ``-``, ``*``, ``//``, ``%`` and ``^`` with integers and other such ranks.
    """

    def __init__(self, of: Callable[[int], int]) -> None:
        self.of = of

    __add__ = __radd__ = _operator(operator.add)
    __mul__ = __rmul__ = _operator(operator.mul)
    __sub__ = _operator(operator.sub)
    __rsub__ = _operator(lambda a, b: b - a)
    __floordiv__ = _operator(operator.floordiv)
    __mod__ = _operator(operator.mod)
    __xor__ = _operator(operator.xor)


AnyRank = int | Rank


def number_on(rank: AnyRank, on: int) -> int:
    return rank.of(on) if isinstance(rank, Rank) else rank


@dataclass(frozen=True)
class Share:
    """The ``index``-th of ``count`` equal shares of rows; ``p.chunks`` yields these."""

    index: int
    count: int


class Area:
    """Rows and columns of one of the memories, on the rank that a transfer names; made by an :class:`Editor`."""

    def __init__(
        self, memory: Memory, grain: int, at: Callable[[int], tuple[int, int, int, int]]
    ) -> None:
        self.memory = memory
        self._grain = grain
        self._at = at  # on a rank: first row, rows, first column, columns

    def at(self, rank: int) -> Rectangle:
        return Rectangle(*self._at(rank))

    def rows(self, begin: AnyRank, end: AnyRank) -> Area:
        """Rows ``begin`` to ``end`` of this area."""

        def cut(rank: int) -> tuple[int, int, int, int]:
            row, _, column, columns = self._at(rank)
            first, last = number_on(begin, rank), number_on(end, rank)
            return row + first, last - first, column, columns

        return Area(self.memory, self._grain, cut)

    def columns(self, begin: int, end: int) -> Area:
        """Columns ``begin`` to ``end`` of this area."""

        def cut(rank: int) -> tuple[int, int, int, int]:
            row, rows, column, _ = self._at(rank)
            return row, rows, column + begin, end - begin

        return Area(self.memory, self._grain, cut)

    def part(self, index: AnyRank, count: int) -> Area:
        """The ``index``-th, modulo ``count``, of ``count`` parts of the rows. Parts begin at whole tiles if there are
        enough tiles, and are equal if the rows divide evenly."""

        def cut(rank: int) -> tuple[int, int, int, int]:
            row, rows, column, columns = self._at(rank)
            number = number_on(index, rank) % count
            begin, end = (_cut(rows, count, self._grain, i) for i in (number, number + 1))
            return row + begin, end - begin, column, columns

        return Area(self.memory, self._grain, cut)

    def chunk(self, share: Share) -> Area:
        """One of the shares that ``p.chunks`` yields."""
        return self.part(share.index, share.count)


def _cut(rows: int, count: int, grain: int, index: int) -> int:
    """The row at which the part begins: after whole grains, unless there are too few for all parts, or equal parts are
    possible."""
    grains = -(-rows // grain)
    if rows % count == 0 or grains < count:
        return index * rows // count
    return min(rows, index * grains // count * grain)


def overlap(a: Rectangle, b: Rectangle) -> bool:
    """True if the two have elements in common."""
    return (
        a.row < b.row + b.rows
        and b.row < a.row + a.rows
        and a.column < b.column + b.columns
        and b.column < a.column + a.columns
    )


def covers(a: Rectangle, b: Rectangle) -> bool:
    """True if ``a`` contains all of ``b``."""
    return (
        a.row <= b.row
        and b.row + b.rows <= a.row + a.rows
        and a.column <= b.column
        and b.column + b.columns <= a.column + a.columns
    )
