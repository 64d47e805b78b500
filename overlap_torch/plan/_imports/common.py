"""Files of other compilers as plans: what MSCCL's XML and MSCCL++'s JSON have in common.

Each operation of a file is a node. Nodes have the order of the file's runtime: within a thread block, by dependencies and
semaphores, from a send to its receive, from a signal to its wait. Operations become transfers in one order that keeps these
orders. A transfer then needs the transfers that its data require. Operations that touch the same data without an order
between them are refused.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from overlap_torch._plan import MAX_TRANSFERS, Op, Plan, Problem
from overlap_torch.plan._editor import MESSAGE_SHARES, Area, Editor

_STREAMS = 4
_MOST_UNITS = 1 << 16  # of a buffer
_COLLECTIVES = {
    "allreduce": Op.GEMM_ALLREDUCE,
    "allgather": Op.ALLGATHER_GEMM,
    "reducescatter": Op.GEMM_REDUCESCATTER,
    "alltoall": Op.GEMM_ALLTOALL,
}


@dataclass(frozen=True)
class Span:
    """Units of a rank's buffer: ``i``, ``o``, ``s``, or ``t`` for data that passes through a rank without a place in the
    file."""

    rank: int
    buffer: str
    first: int
    count: int

    def overlaps(self, other: Span) -> bool:
        same = (self.rank, self.buffer) == (other.rank, other.buffer)
        ends = (self.first + self.count, other.first + other.count)
        return same and self.first < ends[1] and other.first < ends[0]

    @property
    def units(self) -> range:
        return range(self.first, self.first + self.count)

    def __str__(self) -> str:
        end = self.first + self.count
        return f"chunks {self.first} to {end} of buffer {self.buffer} of rank {self.rank}"


@dataclass
class Move:
    """A copy or an addition. With a ``message`` it is one half of the message: a source that sends, or a destination that
    receives."""

    source: Span | None
    destination: Span | None
    reduces: bool = False
    message: int | None = None


@dataclass
class Node:
    """One operation: its moves in order, its place in the file, and the nodes that must come before it."""

    place: str
    rank: int
    stream: int
    moves: list[Move]
    before: list[int] = field(default_factory=list)

    @property
    def receives(self) -> bool:
        return any(move.message is not None and move.source is None for move in self.moves)


class File:
    """The operations of a file, for a problem."""

    def __init__(
        self,
        name: str,
        problem: Problem,
        collective: str,
        ranks: int,
        units: int,
        scratch: int,
        inplace: bool,
    ) -> None:
        """``units``: of the longer of input and output, ``scratch``: of scratch memory, on each rank.

        Raises:
            ValueError: the problem has another collective or number of ranks than the file.
        """
        op = _COLLECTIVES.get(collective.replace("_", "").lower())
        if op is None:
            raise ValueError(
                f"{name}: collective {collective!r} is not supported, allowed are {', '.join(_COLLECTIVES)}"
            )
        if op != problem.op:
            raise ValueError(
                f"{name} is an {collective}, the problem of {problem.op.name.lower()}: take a file or a problem of the other's kind"
            )
        if ranks != problem.world_size:
            raise ValueError(
                f"{name} is for {ranks} ranks, the problem has {problem.world_size}: take a file for that number of ranks"
            )
        self.name, self.problem, self.op, self.world = name, problem, op, ranks
        self.parts = 1 if problem.traits.all_reduces else ranks
        most = max(units, scratch)
        if most > _MOST_UNITS:
            raise ValueError(
                f"{name}: {most} chunks of a buffer, allowed are at most {_MOST_UNITS}"
            )
        if units % self.parts != 0:
            raise ValueError(
                f"{name}: {units} chunks, allowed are multiples of the {ranks} ranks, because each rank has equally many"
            )
        self.each = units // self.parts  # of a rank's part
        short = {Op.GEMM_REDUCESCATTER: "o", Op.ALLGATHER_GEMM: "i"}.get(op)
        self.sizes = {buffer: self.each if buffer == short else units for buffer in "io"}
        self.sizes |= {"s": scratch, "t": 0}
        self.inplace = inplace
        self.nodes: list[Node] = []

    def refuse(self, place: str | Node, what: str) -> ValueError:
        return ValueError(
            f"{self.name}, {place.place if isinstance(place, Node) else place}: {what}"
        )

    def span(self, place: str, rank: int, buffer: str, first: int, count: int) -> Span:
        """Units of a buffer under their common name."""
        if buffer not in ("i", "o", "s"):
            raise self.refuse(place, f"buffer is {buffer!r}, allowed are i, o and s")
        if not 0 <= rank < self.world:
            raise self.refuse(place, f"rank is {rank}, allowed are 0 to {self.world - 1}")
        whole = self._in_place(Span(rank, buffer, first, count))
        size = self.sizes[whole.buffer]
        if count < 1 or whole.first < 0 or whole.first + count > size:
            raise self.refuse(
                place,
                f"chunks {first} to {first + count} of buffer {buffer}, which has {size} of them",
            )
        if buffer == "s" and self.problem.traits.rows_by_rank:
            raise self.refuse(
                place,
                "buffer s in an alltoall: only sender and receiver know the rows of a message, so they go from i to o",
            )
        return whole

    def _in_place(self, span: Span) -> Span:
        if not self.inplace or span.buffer == "s":
            return span
        own = span.rank * self.each + span.first
        if self.problem.traits.scatters and span.buffer == "o":
            return Span(span.rank, "i", own, span.count)
        if self.problem.traits.gathers and span.buffer == "i":
            return Span(span.rank, "o", own, span.count)
        both = not self.problem.traits.parts_of_ranks
        return Span(span.rank, "i", span.first, span.count) if both else span

    def pass_through(self, rank: int, count: int) -> Span:
        self.sizes["t"] += count
        return Span(rank, "t", self.sizes["t"] - count, count)

    def add(
        self, place: str, rank: int, stream: int, moves: list[Move], before: Iterable[int]
    ) -> int:
        self.nodes.append(Node(place, rank, stream, moves, list(before)))
        return len(self.nodes) - 1

    def plan(self, chunks: int, how: dict[str, Any]) -> Plan:
        """The plan: each of ``chunks`` runs of rows goes through the file; ``how`` as in ``plan.programs.edit``."""
        if chunks < 1:
            raise ValueError(f"{chunks} chunks, allowed is 1 or more")
        order = self._order()
        self._check_races(order)
        p = Editor(self.problem, **how)
        for run in range(chunks):
            writer = _Writer(self, p, run, chunks)
            for number in order:
                writer.write(self.nodes[number])
        count = len(p.program().transfers)
        if count > MAX_TRANSFERS:
            fewer = f"give fewer chunks than {chunks}"
            other = "take a file with fewer steps, as of fewer instances or channels"
            raise ValueError(
                f"{self.name}: {count} transfers, allowed are 1 to {MAX_TRANSFERS}: {fewer if chunks > 1 else other}"
            )
        return p.plan()

    def _order(self) -> list[int]:
        """Puts receives soon after their sends, so that few messages wait in their own memory."""
        after: list[list[int]] = [[] for _ in self.nodes]
        left = [len(node.before) for node in self.nodes]
        for number, node in enumerate(self.nodes):
            for before in node.before:
                after[before].append(number)
        ready = [(not node.receives, n) for n, node in enumerate(self.nodes) if left[n] == 0]
        heapq.heapify(ready)
        order = []
        while ready:
            order.append(heapq.heappop(ready)[1])
            for number in after[order[-1]]:
                left[number] -= 1
                if left[number] == 0:
                    heapq.heappush(ready, (not self.nodes[number].receives, number))
        if len(order) < len(self.nodes):
            stuck = next(node for node, count in zip(self.nodes, left, strict=True) if count > 0)
            raise self.refuse(
                stuck,
                f"rank {stuck.rank} cannot end: operations from here on wait for each other in a circle; "
                "make one of them go first",
            )
        return order

    def _check_races(self, order: list[int]) -> None:
        """Checks that two operations on the same data, at least one of them a write, have an order."""
        seen = [0] * len(self.nodes)  # those before each, as bits
        touched: dict[tuple[int, str], list[tuple[Span, bool, int]]] = defaultdict(list)
        for number in order:
            node = self.nodes[number]
            for before in node.before:
                seen[number] |= seen[before] | 1 << before
            spans = [
                (span, i > 0)
                for m in node.moves
                for i, span in enumerate((m.source, m.destination))
            ]
            for span, writes in spans:
                if span is None:
                    continue
                accesses = touched[span.rank, span.buffer]
                for other, other_writes, earlier in accesses:
                    ordered = earlier == number or seen[number] >> earlier & 1
                    if ordered or not (writes or other_writes) or not span.overlaps(other):
                        continue
                    verbs = ["writes" if one else "reads" for one in (writes, other_writes)]
                    raise self.refuse(
                        node,
                        f"a race: it {verbs[0]} {span}, which {self.nodes[earlier].place} {verbs[1]}, and neither comes "
                        "before the other; add a dependency",
                    )
                accesses.append((span, writes, number))


class _Writer:
    """Writes nodes' moves into the program, one after the other, for one run of each part's rows.

    A message usually becomes a transfer when the file receives it. If the file writes the message's source before that, the
    transfer comes before this write, into memory of the message's own; the receive then copies the data to its place.
    """

    def __init__(self, file: File, p: Editor, run: int, runs: int) -> None:
        self.file, self.p, self.run = file, p, run
        rows = MESSAGE_SHARES * p.world if file.problem.traits.rows_by_rank else p.problem.m
        self.part = rows // file.parts
        cuts = [self.part * i // runs for i in range(runs + 1)]
        self.begin, self.end = cuts[run], cuts[run + 1]
        self.height = -(-max(b - a for a, b in itertools.pairwise(cuts)) // file.each)
        gathers = file.problem.traits.gathers
        self.memory = {
            "i": p.input if gathers else p.product,
            "o": p.gathered if gathers else p.output,
        }
        for buffer in "st":
            if file.sizes[buffer] > 0 and not file.problem.traits.rows_by_rank:
                self.memory[buffer] = p.scratch(file.sizes[buffer] * self.height)
        self.heights: dict[tuple[int, str, int], int] = {}  # rows of the data in scratch units
        self.sent: dict[int, tuple[Span, int]] = {}  # source and stream
        self.staged: dict[int, tuple[Area, list[int]]] = {}  # and each unit's rows
        halves = [(move, node.rank) for node in file.nodes if node.receives for move in node.moves]
        self.receivers = {
            m.message: rank for m, rank in halves if m.message is not None and m.source is None
        }

    def write(self, node: Node) -> None:
        stream = (node.stream + self.run) % _STREAMS  # runs of rows proceed independently
        for move in node.moves:
            source, into = move.source, move.destination
            if into is None:
                assert move.message is not None and source is not None
                self.sent[move.message] = (source, stream)
                continue
            self._before_writing(into, move.message)
            if source is not None:
                self._move(source, into, move.reduces, node.rank, stream)
            elif move.message in self.sent:
                source, stream_of_send = self.sent.pop(move.message)
                self._move(source, into, move.reduces, node.rank, stream_of_send)
            else:
                assert move.message is not None
                area, heights = self.staged.pop(move.message)
                rows = zip(itertools.accumulate(heights, initial=0), heights, strict=False)
                for read, written in self._joined(rows, into):
                    self.p.copy(
                        area.rows(*read), self.memory[into.buffer].rows(*written),
                        reduce=move.reduces, rank=node.rank, stream=stream,
                    )  # fmt: skip

    def _before_writing(self, span: Span, but: int | None) -> None:
        """Makes the transfers of messages whose source is about to be written."""
        for message, (source, stream) in list(self.sent.items()):
            if message == but or not source.overlaps(span):
                continue
            del self.sent[message]
            rows = self._rows(source)
            heights = [height for _, height in rows]
            area = self.p.scratch(sum(heights))
            for row, height, offset in _join(rows, itertools.accumulate(heights, initial=0)):
                self.p.push(
                    self.memory[source.buffer].rows(row, row + height), to=self.receivers[message],
                    into=area.rows(offset, offset + height), rank=source.rank, stream=stream,
                )  # fmt: skip
            self.staged[message] = (area, heights)

    def _move(self, source: Span, into: Span, reduces: bool, rank: int, stream: int) -> None:
        if source == into:
            return
        for from_rows, to_rows in self._joined(self._rows(source), into):
            read = self.memory[source.buffer].rows(*from_rows)
            written = self.memory[into.buffer].rows(*to_rows)
            how: dict[str, Any] = {"reduce": reduces, "stream": stream}
            if source.rank == into.rank:
                if (
                    not self.file.problem.traits.rows_by_rank
                ):  # own rows are computed in their place
                    self.p.copy(read, written, rank=into.rank, **how)
            elif rank == into.rank:
                self.p.pull(read, of=source.rank, into=written, rank=rank, **how)
            else:
                self.p.push(read, to=into.rank, into=written, rank=source.rank, **how)

    def _unit(self, buffer: str, number: int) -> tuple[int, int]:
        """First row and number of rows of a unit; in scratch memory, the number for which it has room."""
        if buffer in "st":
            return number * self.height, self.height
        part, unit = divmod(number, self.file.each)
        begin = min(self.begin + unit * self.height, self.end)
        return part * self.part + begin, min(self.height, self.end - begin)

    def _rows(self, span: Span) -> list[tuple[int, int]]:
        """Each unit's first row, and its number of rows."""
        found = []
        for unit in span.units:
            begin, rows = self._unit(span.buffer, unit)
            found.append((begin, self.heights.get((span.rank, span.buffer, unit), rows)))
        return found

    def _joined(
        self, rows: Iterable[tuple[int, int]], into: Span
    ) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Rows that move to the units of a span: where each piece begins and ends on both sides."""
        rows = list(rows)
        for unit, (_, height) in zip(into.units, rows, strict=False):
            if into.buffer in "st":
                self.heights[into.rank, into.buffer, unit] = height
        firsts = [self._unit(into.buffer, unit)[0] for unit in into.units]
        return [((a, a + height), (b, b + height)) for a, height, b in _join(rows, firsts)]


def _join(rows: Iterable[tuple[int, int]], into: Iterable[int]) -> list[tuple[int, int, int]]:
    """First row, number of rows and where they go; those that follow each other on both sides are one piece."""
    joined: list[tuple[int, int, int]] = []
    for (row, height), to in zip(rows, into, strict=False):
        if joined and (row, to) == (joined[-1][0] + joined[-1][1], joined[-1][2] + joined[-1][1]):
            joined[-1] = (joined[-1][0], joined[-1][1] + height, joined[-1][2])
        elif height > 0:
            joined.append((row, height, to))
    return joined
