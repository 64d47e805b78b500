"""Programs from other compilers' files: MSCCL's XML algorithms and MSCCL++'s JSON execution plans.

Both are read in the same way. Each operation of the file is a node; nodes are ordered as the file's runtime orders them: within a
thread block, by dependencies and semaphores, from a send to its receive, from a signal to its wait. Operations become transfers in
one order that keeps to this; what a transfer needs is then what its data ask for. Operations that touch the same data without an
order between them are refused.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from overlap_torch._plan import MAX_TRANSFERS, Op, Plan, Problem
from overlap_torch._program import MESSAGE_SHARES, Area, Editor

_STREAMS = 4


@dataclass(frozen=True)
class _Span:
    """Units of a buffer of a rank: ``i``, ``o``, ``s``, or ``t``, what passes through a rank without a place in the file."""

    rank: int
    buffer: str
    first: int
    count: int

    def overlaps(self, other: _Span) -> bool:
        same = (self.rank, self.buffer) == (other.rank, other.buffer)
        ends = (self.first + self.count, other.first + other.count)
        return same and self.first < ends[1] and other.first < ends[0]


@dataclass
class _Node:
    """One operation: what it moves, in order, and where it stands in the file."""

    place: str
    rank: int
    stream: int = 0
    moves: list[_Move] = field(default_factory=list)
    before: list[int] = field(default_factory=list)


@dataclass
class _Move:
    """A copy or an addition. ``sent``, ``received``: one half of a message, whose other half is another node's."""

    source: _Span | None
    destination: _Span | None
    reduces: bool = False
    message: int | None = None


class _Chunks:
    """Which rows the units of a file's buffers are, and in which memory."""

    def __init__(
        self, p: Editor, total: int, scratch: int, inplace: bool, runs: int, run: int
    ) -> None:
        """``run``: which of ``runs`` runs of each part's rows the file is gone through for."""
        self.p = p
        self.runs = runs
        self.run = run
        op, world = p.problem.op, p.world
        self.parts = 1 if op == Op.GEMM_ALLREDUCE else world
        if total % self.parts != 0:
            raise ValueError(
                f"{total} chunks, allowed are multiples of the {world} ranks, as each has as many"
            )
        self.each = total // self.parts
        self.inplace = inplace
        rows = MESSAGE_SHARES * world if op == Op.GEMM_ALLTOALL else p.problem.m
        self.part_rows = rows // self.parts
        self.first = self._cut(run)
        self.height = -(-max(self._cut(i + 1) - self._cut(i) for i in range(runs)) // self.each)
        self.scratch = None
        if op != Op.GEMM_ALLTOALL:
            self.scratch = p.scratch(scratch * self.height)
        self.passing: Area | None = None

    def _cut(self, run: int) -> int:
        return self.part_rows * run // self.runs

    def whole(self, span: _Span) -> _Span:
        """The same place under the one name that it has."""
        op = self.p.problem.op
        if not self.inplace or span.buffer not in "io":
            return span
        if op == Op.GEMM_ALLREDUCE or op == Op.GEMM_ALLTOALL:
            return _Span(span.rank, "i", span.first, span.count)
        own = span.rank * self.each
        if op == Op.GEMM_REDUCESCATTER and span.buffer == "o":
            return _Span(span.rank, "i", own + span.first, span.count)
        if op == Op.ALLGATHER_GEMM and span.buffer == "i":
            return _Span(span.rank, "o", own + span.first, span.count)
        return span

    def units(self, buffer: str, scratch: int) -> int:
        op = self.p.problem.op
        short = {Op.GEMM_REDUCESCATTER: "o", Op.ALLGATHER_GEMM: "i"}.get(op)
        if buffer == "s":
            return scratch
        return self.each if buffer == short else self.each * self.parts

    def rows(self, buffer: str, number: int) -> tuple[int, int]:
        """First and last row of one unit; in scratch memory, of as many rows as it has room for."""
        if buffer in "st":
            return number * self.height, (number + 1) * self.height
        part, unit = divmod(number, self.each)
        last = self._cut(self.run + 1)
        begin = min(self.first + unit * self.height, last)
        end = min(begin + self.height, last)
        return part * self.part_rows + begin, part * self.part_rows + end

    def memory(self, buffer: str) -> Area:
        p, gathers = self.p, self.p.problem.op == Op.ALLGATHER_GEMM
        memory = {
            "i": p.input if gathers else p.product,
            "o": p.gathered if gathers else p.output,
            "s": self.scratch,
            "t": self.passing,
        }[buffer]
        assert memory is not None
        return memory


class _File:
    """The operations of a file, on their way to a program."""

    def __init__(self, name: str, p: Editor, chunks: _Chunks, scratch: int) -> None:
        self.name = name
        self.p = p
        self.chunks = chunks
        self.scratch = scratch
        self.nodes: list[_Node] = []
        self.passing = 0  # units of what passes through

    def refuse(self, place: str, what: str) -> ValueError:
        return ValueError(f"{self.name}, {place}: {what}")

    def span(self, place: str, rank: int, buffer: str, first: int, count: int) -> _Span:
        if buffer not in ("i", "o", "s"):
            raise self.refuse(place, f"buffer is {buffer!r}, allowed are i, o and s")
        if not 0 <= rank < self.p.world:
            raise self.refuse(place, f"rank is {rank}, allowed are 0 to {self.p.world - 1}")
        whole = self.chunks.whole(_Span(rank, buffer, first, count))
        units = self.chunks.units(whole.buffer, self.scratch)
        if count < 1 or whole.first < 0 or whole.first + count > units:
            raise self.refuse(
                place,
                f"chunks {first} to {first + count} of buffer {buffer}, which has {units} of them",
            )
        if buffer == "s" and self.p.problem.op == Op.GEMM_ALLTOALL:
            raise self.refuse(
                place,
                "buffer s in an alltoall: rows of messages are known to sender and receiver alone, so they go from i to o",
            )
        return whole

    def pass_through(self, rank: int, count: int) -> _Span:
        made = _Span(rank, "t", self.passing, count)
        self.passing += count
        return made

    def add(
        self, place: str, rank: int, stream: int, moves: list[_Move], before: Iterable[int]
    ) -> int:
        # Runs of rows go on beside each other.
        stream = (stream + self.chunks.run) % _STREAMS
        self.nodes.append(_Node(place, rank, stream, moves, list(before)))
        return len(self.nodes) - 1

    # --- from nodes to a program --------------------------------------------------------------------------------

    def write(self) -> None:
        """The file's operations as transfers of the editor's."""
        order = self._order()
        self._check_races(order)
        writer = _Writer(self)
        if self.passing > 0:
            self.chunks.passing = self.p.scratch(self.passing * self.chunks.height)
        for number in order:
            writer.write(self.nodes[number])

    def _order(self) -> list[int]:
        """Receives soon behind their sends, so that few messages wait in memory of their own."""
        after: list[list[int]] = [[] for _ in self.nodes]
        left = [len(node.before) for node in self.nodes]
        for number, node in enumerate(self.nodes):
            for before in node.before:
                after[before].append(number)

        def key(number: int) -> tuple[bool, int]:
            receives = any(
                move.message is not None and move.source is None
                for move in self.nodes[number].moves
            )
            return not receives, number

        ready = [key(number) for number in range(len(self.nodes)) if left[number] == 0]
        heapq.heapify(ready)
        order = []
        while ready:
            _, number = heapq.heappop(ready)
            order.append(number)
            for next_one in after[number]:
                left[next_one] -= 1
                if left[next_one] == 0:
                    heapq.heappush(ready, key(next_one))
        if len(order) < len(self.nodes):
            stuck = next(node for node, count in zip(self.nodes, left, strict=True) if count > 0)
            raise self.refuse(
                stuck.place,
                f"rank {stuck.rank} cannot end: operations from here on wait for each other in a circle; "
                "make one of them go first",
            )
        return order

    def _check_races(self, order: list[int]) -> None:
        """That of two operations on the same data, of which one writes, one comes before the other."""
        seen = [0] * len(self.nodes)  # those before each, as bits
        touched: dict[tuple[int, str], list[tuple[_Span, bool, int]]] = defaultdict(list)
        for number in order:
            for before in self.nodes[number].before:
                seen[number] |= seen[before] | 1 << before
            for span, writes in _accesses(self.nodes[number]):
                accesses = touched[span.rank, span.buffer]
                for other, other_writes, other_number in accesses:
                    if not (writes or other_writes) or not span.overlaps(other):
                        continue
                    if other_number != number and not seen[number] >> other_number & 1:
                        other_place = self.nodes[other_number].place
                        raise self.refuse(
                            self.nodes[number].place,
                            f"a race: it {'writes' if writes else 'reads'} chunks {span.first} to {span.first + span.count} of "
                            f"buffer {span.buffer} of rank {span.rank}, which {other_place} "
                            f"{'writes' if other_writes else 'reads'}, and neither comes before the other; add a dependency",
                        )
                accesses.append((span, writes, number))


def _accesses(node: _Node) -> Iterable[tuple[_Span, bool]]:
    for move in node.moves:
        if move.source is not None:
            yield move.source, False
        if move.destination is not None:
            yield move.destination, True


class _Writer:
    """Writes nodes' moves into the program, one after the other.

    A message's transfer is made when it is received. Where its source is written again before that, it is made at once,
    into memory of its own, and put in its place when it is received.
    """

    def __init__(self, file: _File) -> None:
        self.p = file.p
        self.chunks = file.chunks
        self.heights: dict[tuple[int, str, int], int] = {}  # rows of what lies in scratch units
        self.sent: dict[int, tuple[_Span, int, int]] = {}  # source, to whom, stream
        self.staged: dict[int, tuple[Area, list[int]]] = {}  # and each unit's rows
        self.receivers = {
            move.message: node.rank
            for node in file.nodes
            for move in node.moves
            if move.message is not None and move.source is None
        }

    def write(self, node: _Node) -> None:
        for move in node.moves:
            if move.message is None:
                assert move.source is not None and move.destination is not None
                self._before_writing(move.destination)
                self._move(move.source, move.destination, move.reduces, node.rank, node.stream)
            elif move.source is not None:
                to = self.receivers[move.message]
                self.sent[move.message] = (move.source, to, node.stream)
            else:
                assert move.destination is not None
                self._receive(move, node)

    def _receive(self, move: _Move, node: _Node) -> None:
        assert move.message is not None and move.destination is not None
        self._before_writing(move.destination, move.message)
        if move.message in self.sent:
            source, _, stream = self.sent.pop(move.message)
            self._move(source, move.destination, move.reduces, node.rank, stream)
            return
        area, heights = self.staged.pop(move.message)
        rows = zip(itertools.accumulate(heights, initial=0), heights, strict=False)
        into = self.chunks.memory(move.destination.buffer)
        for read, written in self._joined(rows, move.destination):
            self.p.copy(
                area.rows(*read),
                into.rows(*written),
                reduce=move.reduces,
                rank=node.rank,
                stream=node.stream,
            )

    def _before_writing(self, span: _Span, but: int | None = None) -> None:
        """Messages that leave from there leave first."""
        for message, (source, to, stream) in list(self.sent.items()):
            if message == but or not source.overlaps(span):
                continue
            del self.sent[message]
            rows = self._rows(source)
            heights = [height for _, height in rows]
            area = self.p.scratch(sum(heights))
            for row, height, offset in _join(rows, itertools.accumulate(heights, initial=0)):
                self.p.push(
                    self.chunks.memory(source.buffer).rows(row, row + height),
                    to=to,
                    into=area.rows(offset, offset + height),
                    rank=source.rank,
                    stream=stream,
                )
            self.staged[message] = (area, heights)

    def _move(
        self, source: _Span, destination: _Span, reduces: bool, rank: int, stream: int
    ) -> None:
        if source == destination:
            return
        areas = [self.chunks.memory(span.buffer) for span in (source, destination)]
        for from_rows, into_rows in self._joined(self._rows(source), destination):
            area, into = areas[0].rows(*from_rows), areas[1].rows(*into_rows)
            if source.rank == destination.rank:
                if self.p.problem.op == Op.GEMM_ALLTOALL:
                    continue  # a rank's own rows are computed in their place
                self.p.copy(area, into, reduce=reduces, rank=source.rank, stream=stream)
            elif rank == destination.rank:
                self.p.pull(
                    area, of=source.rank, into=into, reduce=reduces, rank=rank, stream=stream
                )
            else:
                self.p.push(
                    area,
                    to=destination.rank,
                    into=into,
                    reduce=reduces,
                    rank=source.rank,
                    stream=stream,
                )

    def _rows(self, span: _Span) -> list[tuple[int, int]]:
        """Each unit's first row, and how many rows lie there."""
        found = []
        for unit in range(span.first, span.first + span.count):
            begin, end = self.chunks.rows(span.buffer, unit)
            found.append((begin, self.heights.get((span.rank, span.buffer, unit), end - begin)))
        return found

    def _joined(
        self, rows: Iterable[tuple[int, int]], destination: _Span
    ) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Rows that move to the units of a span, first and last on both sides."""
        rows = list(rows)
        into = []
        for unit, (_, height) in enumerate(rows, destination.first):
            into.append(self.chunks.rows(destination.buffer, unit)[0])
            if destination.buffer in "st":
                self.heights[destination.rank, destination.buffer, unit] = height
        return [((row, row + height), (to, to + height)) for row, height, to in _join(rows, into)]


def _join(rows: Iterable[tuple[int, int]], into: Iterable[int]) -> list[tuple[int, int, int]]:
    """First row, number of rows and where they go, of which those that follow each other on both sides are one."""
    joined: list[tuple[int, int, int]] = []
    for (row, height), to in zip(rows, into, strict=False):
        if joined and (row, to) == tuple(joined[-1][side] + joined[-1][1] for side in (0, 2)):
            joined[-1] = (joined[-1][0], joined[-1][1] + height, joined[-1][2])
        elif height > 0:
            joined.append((row, height, to))
    return joined


_COLLECTIVES = {
    "allreduce": Op.GEMM_ALLREDUCE,
    "allgather": Op.ALLGATHER_GEMM,
    "reducescatter": Op.GEMM_REDUCESCATTER,
    "alltoall": Op.GEMM_ALLTOALL,
}


def _check_problem(name: str, collective: str, ranks: int, problem: Problem) -> None:
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
            f"{name} is for {ranks} ranks, the problem has {problem.world_size}: take a file for as many"
        )


# --- MSCCL ----------------------------------------------------------------------------------------------------


def from_msccl(path: str | Path, problem: Problem, *, chunks: int = 1, **how: Any) -> Plan:
    """The plan that runs the algorithm of an MSCCL XML file for the problem.

    Of the file the order of steps, their dependencies and chunks hold; its protocol, channels and range of sizes are left out.

    Args:
        path: an ``<algo>`` of allreduce, allgather, reduce_scatter or alltoall for as many ranks as the problem has, 2 to 8.
        problem: of the op that has this collective. A chunk of the file is a run of rows.
        chunks: into how many runs the rows are cut, each of which goes through the whole file as soon as it is computed.
        how: ``tile``, ``kernel``, ``transport``, ``comm_sms`` and ``max_ctas`` as of ``plan.edit``.

    Raises:
        ValueError: what is not supported, or what is wrong, with its place in the file; or a plan that cannot run.
    """
    name = Path(path).name
    try:
        algo = ElementTree.parse(path).getroot()
    except ElementTree.ParseError as error:
        raise ValueError(f"{name} is no XML: {error}") from error
    if algo.tag != "algo":
        raise ValueError(f"{name} is <{algo.tag}>, expected <algo>")
    gpus = sorted(algo.findall("gpu"), key=lambda gpu: _number(name, gpu, "id"))
    _check_problem(name, algo.get("coll", ""), _number(name, algo, "ngpus"), problem)
    if [_number(name, gpu, "id") for gpu in gpus] != list(range(problem.world_size)):
        raise ValueError(f"{name}: <gpu> elements are not one for each of {len(gpus)} ranks")
    p = Editor(problem, **how)
    scratch = max(_number(name, gpu, "s_chunks", 0) for gpu in gpus)
    inplace = algo.get("inplace", "0") == "1" and algo.get("outofplace", "0") != "1"
    total = _number(name, algo, "nchunksperloop")
    for run in range(_runs(chunks)):
        cut = _checked(name, lambda run=run: _Chunks(p, total, scratch, inplace, chunks, run))
        file = _File(name, p, cut, scratch)
        _MscclNodes(file).add(gpus)
        file.write()
    return _plan_of(name, p, chunks)


def _plan_of(name: str, p: Editor, chunks: int) -> Plan:
    count = len(p.program().transfers)
    if count > MAX_TRANSFERS:
        advice = (
            f"give fewer chunks than {chunks}"
            if chunks > 1
            else "take a file with fewer steps, as of fewer instances or channels"
        )
        raise ValueError(f"{name}: {count} transfers, allowed are 1 to {MAX_TRANSFERS}: {advice}")
    return p.plan()


def _runs(chunks: int) -> int:
    if chunks < 1:
        raise ValueError(f"{chunks} chunks, allowed is 1 or more")
    return chunks


def _number(
    name: str, element: ElementTree.Element, attribute: str, default: int | None = None
) -> int:
    text = element.get(attribute)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ValueError(
            f"{name}: <{element.tag}> has {attribute}={text!r}, expected an integer"
        ) from None


def _checked(name: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


class _MscclNodes:
    """Steps of thread blocks. The n-th send of a rank to a peer on a channel is the peer's n-th receive of it there."""

    def __init__(self, file: _File) -> None:
        self.file = file
        self.last: dict[tuple[int, int, int], int] = {}  # of rank, block and step: its node
        self.depends: list[tuple[int, tuple[int, int, int]]] = []
        self.sends: dict[tuple[int, int, int], deque[tuple[int, _Move]]] = defaultdict(deque)
        self.receives: dict[tuple[int, int, int], deque[tuple[int, _Move]]] = defaultdict(deque)

    def add(self, gpus: list[ElementTree.Element]) -> None:
        for rank, gpu in enumerate(gpus):
            for block in gpu.findall("tb"):
                self._add_block(rank, block)
        for number, key in self.depends:
            if key not in self.last:
                raise self.file.refuse(
                    self.file.nodes[number].place,
                    f"depends on step {key[2]} of tb {key[1]}, which is not there",
                )
            self.file.nodes[number].before.append(self.last[key])
        self._match()

    def _add_block(self, rank: int, block: ElementTree.Element) -> None:
        name = self.file.name
        number = _number(name, block, "id")
        peers = (_number(name, block, "send", -1), _number(name, block, "recv", -1))
        channel = _number(name, block, "chan", 0)
        before: list[int] = []
        steps = sorted(block.findall("step"), key=lambda step: _number(name, step, "s"))
        for step in steps:
            index = _number(name, step, "s")
            place = f"gpu {rank}, tb {number}, step {index}"
            node = self._add_step(place, rank, step, peers, channel, before)
            depends = (_number(name, step, "depid", -1), _number(name, step, "deps", -1))
            if depends[0] >= 0:
                self.depends.append((node, (rank, *depends)))
            self.last[rank, number, index] = node
            before = [node]

    def _add_step(
        self,
        place: str,
        rank: int,
        step: ElementTree.Element,
        peers: tuple[int, int],
        channel: int,
        before: list[int],
    ) -> int:
        file, kind = self.file, step.get("type", "")
        count = _number(file.name, step, "cnt", 1)

        def span(side: str) -> _Span:
            offset = _number(file.name, step, f"{side}off")
            return file.span(place, rank, step.get(f"{side}buf", ""), offset, count)

        receives, sends = kind.startswith("r") and kind != "re", kind in ("s", "rcs", "rrs", "rrcs")
        if kind not in ("s", "r", "rcs", "rrs", "rrc", "rrcs", "cpy", "re", "nop"):
            raise file.refuse(
                place,
                f"type {kind!r} is not supported, allowed are s, r, rcs, rrs, rrc, rrcs, cpy, re and nop",
            )
        for wanted, peer, what in ((sends, peers[0], "send"), (receives, peers[1], "recv")):
            if wanted and not (0 <= peer < file.p.world and peer != rank):
                raise file.refuse(place, f"type {kind} in a tb with {what}={peer}, no other rank")
        moves: list[_Move] = []
        held = None
        if kind in ("cpy", "re"):
            moves.append(_Move(span("src"), span("dst"), kind == "re"))
        elif kind == "s":
            held = span("src")
        elif kind in ("r", "rcs"):
            held = span("dst")
            moves.append(_Move(None, held, False, -1))
        elif kind in ("rrc", "rrcs", "rrs"):
            own = span("src")
            held = file.pass_through(rank, count) if kind == "rrs" else span("dst")
            if held != own:
                if held.overlaps(own):
                    raise file.refuse(place, "source and destination overlap in part")
                moves.append(_Move(own, held))
            moves.append(_Move(None, held, True, -1))
        received = [move for move in moves if move.message is not None]
        if sends:
            moves.append(_Move(held, None, False, -1))
        node = file.add(place, rank, channel, moves, before)
        for move in received:
            self.receives[peers[1], rank, channel].append((node, move))
        if sends:
            self.sends[rank, peers[0], channel].append((node, moves[-1]))
        return node

    def _match(self) -> None:
        number = 0
        for key in sorted(self.sends.keys() | self.receives.keys()):
            sends, receives = self.sends[key], self.receives[key]
            while sends and receives:
                (sender, sent), (receiver, received) = sends.popleft(), receives.popleft()
                assert sent.source is not None and received.destination is not None
                if sent.source.count != received.destination.count:
                    raise self.file.refuse(
                        self.file.nodes[receiver].place,
                        f"receives {received.destination.count} chunks, and {self.file.nodes[sender].place} sends "
                        f"{sent.source.count}",
                    )
                sent.message = received.message = number
                self.file.nodes[receiver].before.append(sender)
                number += 1
            for node, what in (
                [(sends[0][0], "receives")]
                if sends
                else ([(receives[0][0], "sends")] if receives else [])
            ):
                raise self.file.refuse(
                    self.file.nodes[node].place,
                    f"rank {key[1] if what == 'receives' else key[0]} {what} nothing for it on channel {key[2]}: "
                    "it would wait for ever",
                )


# --- MSCCL++ --------------------------------------------------------------------------------------------------


def from_mscclpp(path: str | Path, problem: Problem, *, chunks: int = 1, **how: Any) -> Plan:
    """The plan that runs an MSCCL++ execution plan, a JSON file, for the problem.

    Of the file the operations hold, and what orders them: thread blocks, signals, semaphores and barriers. What only concerns its
    own runtime is left out: threads, alignment, sizes, double scratch buffers.

    Args:
        path: an allreduce, allgather, reducescatter or alltoall of the protocol Simple for as many ranks as the problem has.
            Its channels are of memory: ports, switches, packets and pipelines are refused by name.
        problem: of the op that has this collective. A chunk of the file is a run of rows.
        chunks: into how many runs the rows are cut, each of which goes through the whole file as soon as it is computed.
        how: ``tile``, ``kernel``, ``transport``, ``comm_sms`` and ``max_ctas`` as of ``plan.edit``.

    Raises:
        ValueError: what is not supported, or what is wrong, with its place in the file; or a plan that cannot run.
    """
    name = Path(path).name
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is no JSON: {error}") from error
    try:
        return _from_mscclpp(name, data, problem, chunks, how)
    except (KeyError, TypeError, AttributeError, IndexError, ZeroDivisionError) as error:
        raise ValueError(
            f"{name} lacks something, or has it in another form, than an execution plan: {error!r}"
        ) from error


def _from_mscclpp(
    name: str, data: dict[str, Any], problem: Problem, runs: int, how: dict[str, Any]
) -> Plan:
    gpus = data["gpus"]
    _check_problem(name, data["collective"], len(gpus), problem)
    if data.get("protocol", "Simple") != "Simple":
        raise ValueError(
            f"{name}: protocol {data['protocol']!r} is not supported, allowed is Simple"
        )
    if [gpu["id"] for gpu in gpus] != list(range(len(gpus))):
        raise ValueError(f"{name}: gpus are not in the order of their ids, 0 to {len(gpus) - 1}")
    slices = 1  # of a chunk, which thread blocks of a group share
    for gpu in gpus:
        for block in gpu["threadblocks"]:
            for op in block["ops"]:
                size = op.get("tbg_info", {}).get("tbg_size", 1)
                slices = slices * size // math.gcd(slices, size)
    whole = max(gpu[side] for gpu in gpus for side in ("input_chunks", "output_chunks"))
    scratch = max(gpu["scratch_chunks"] for gpu in gpus) * slices
    p = Editor(problem, **how)
    inplace = bool(data["inplace"])
    for run in range(_runs(runs)):
        chunks = _checked(
            name, lambda run=run: _Chunks(p, whole * slices, scratch, inplace, runs, run)
        )
        file = _File(name, p, chunks, scratch)
        nodes = _MscclppNodes(file, slices)
        for gpu in gpus:
            nodes.add_gpu(gpu)
        nodes.match()
        file.write()
    return _plan_of(name, p, runs)


class _MscclppNodes:
    """Operations of thread blocks, which signal and wait over channels between two ranks."""

    def __init__(self, file: _File, slices: int) -> None:
        self.file = file
        self.slices = slices
        # By what is counted: (block, node) of those that count, (block, node, how many) of those that wait.
        self.counts: dict[tuple, list[tuple[int, int]]] = defaultdict(list)
        self.waits: dict[tuple, list[tuple[int, int, int]]] = defaultdict(list)
        self.initial: dict[tuple, int] = {}  # of semaphores
        self.barriers: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)

    def add_gpu(self, gpu: dict[str, Any]) -> None:
        rank = gpu["id"]
        peers: list[int] = []
        for channel in gpu.get("channels", []):
            kind = channel["channel_type"]
            if kind != "memory":
                raise self.file.refuse(
                    f"gpu {rank}", f"channel_type {kind!r} is not supported, allowed is memory"
                )
            peers += channel["connected_to"]
        initial = [one["init_value"] for one in gpu.get("semaphores", [])]
        for block in gpu["threadblocks"]:
            _Block(self, gpu, block, peers, initial).add()

    def match(self) -> None:
        nodes = self.file.nodes
        for key, waits in self.waits.items():
            counts = self.counts.get(key, [])
            blocks = {block for block, _ in counts}
            spare = self.initial.get(key, 0) + len(counts) - len(waits)
            for _, node, number in waits:
                if number > len(counts) or spare < 0:
                    raise self.file.refuse(
                        nodes[node].place,
                        f"waits for signal {number}, and {len(counts)} are given for {len(waits)} waits: it would wait for ever",
                    )
                if number <= 0:
                    continue
                if len(blocks) > 1 and number < len(counts):
                    raise self.file.refuse(
                        nodes[node].place,
                        f"waits for {number} of {len(counts)} signals of {len(blocks)} thread blocks, in an order that is not "
                        "given; take a channel or semaphore for each",
                    )
                nodes[node].before += [one for _, one in counts[:number]]
        for (rank, number), arrivals in self.barriers.items():
            self._match_barrier(rank, number, arrivals)

    def _match_barrier(self, rank: int, number: int, arrivals: list[tuple[int, int, int]]) -> None:
        """The n-th arrivals of all its blocks are one meeting: what follows comes behind all that went before."""
        by_block: dict[int, list[int]] = defaultdict(list)
        for block, node, _ in arrivals:
            by_block[block].append(node)
        expected = arrivals[0][2]
        lengths = {len(nodes) for nodes in by_block.values()}
        if len(by_block) != expected or len(lengths) != 1:
            raise self.file.refuse(
                self.file.nodes[arrivals[0][1]].place,
                f"barrier {number} of rank {rank} is for {expected} thread blocks, and {len(by_block)} come to it, "
                f"{'as often' if len(lengths) == 1 else 'not as often'}: they would wait for ever",
            )
        for together in zip(*by_block.values(), strict=True):
            arrived = [one for node in together for one in self.file.nodes[node].before]
            for node in together:
                self.file.nodes[node].before = list(arrived)


class _Block:
    """One thread block, operation after operation."""

    _SYNCHRONISES = ("nop", "flush")

    def __init__(
        self,
        nodes: _MscclppNodes,
        gpu: dict[str, Any],
        block: dict[str, Any],
        peers: list[int],
        initial: list[int],
    ) -> None:
        self.nodes = nodes
        self.file = nodes.file
        self.rank = gpu["id"]
        self.number = block["id"]
        self.ops = block["ops"]
        self.peers = peers
        self.initial = initial
        self.remote_buffers = gpu.get("remote_buffers", [])
        self.channels = [
            channel for one in block.get("channels", []) for channel in one["channel_ids"]
        ]
        self.remote_ids = [
            one for ref in block.get("remote_buffer_refs", []) for one in ref["remote_buffer_ids"]
        ]
        self.last: list[int] = []
        self.waited: dict[tuple, int] = defaultdict(int)

    def add(self) -> None:
        for index, op in enumerate(self.ops):
            place = f"gpu {self.rank}, threadblock {self.number}, op {index} ({op['name']})"
            if op.get("channel_type", "memory") not in ("memory", "none"):
                raise self.file.refuse(
                    place,
                    f"channel_type {op['channel_type']!r} is not supported, allowed is memory",
                )
            moves = self._moves(place, op)
            node = self.file.add(place, self.rank, self.number, moves, self.last)
            self._order(place, op, node)
            self.last = [node]

    # --- what an operation moves --------------------------------------------------------------------------------

    def _moves(self, place: str, op: dict[str, Any]) -> list[_Move]:
        name = op["name"]
        if name in (
            "signal",
            "wait",
            "rlxsignal",
            "rlxwait",
            "barrier",
            "sem_acquire",
            "sem_release",
        ):
            return []
        if name in self._SYNCHRONISES:
            return []
        if name not in ("put", "pws", "pwsf", "get", "copy", "re", "res", "rre", "rres"):
            raise self.file.refuse(
                place,
                "this operation is not supported, allowed are put, pws, pwsf, get, copy, re, res, rre, rres, signal, wait, "
                "rlxsignal, rlxwait, flush, nop, barrier, sem_acquire and sem_release",
            )
        sources = [self._span(place, op, one) for one in op["src_buff"]]
        targets = [self._span(place, op, one) for one in op["dst_buff"]]
        if len({span.count for span in (*sources, *targets)}) != 1:
            raise self.file.refuse(place, "its buffers are not of one size")
        if name in ("put", "pws", "pwsf", "get", "copy"):
            if len(sources) != len(targets):
                raise self.file.refuse(
                    place,
                    f"{len(sources)} sources for {len(targets)} destinations, expected as many",
                )
            return [_Move(*pair) for pair in zip(sources, targets, strict=True)]
        if op.get("reduce_op", "sum") != "sum":
            raise self.file.refuse(
                place, f"reduce_op {op['reduce_op']!r} is not supported, allowed is sum"
            )
        # The sum is made in the first destination, and goes from there to the others.
        result, others = targets[0], targets[1:]
        if result.rank != self.rank:
            raise self.file.refuse(place, "its first destination is not of this rank")
        rest = list(sources)
        moves = []
        if result in rest:
            rest.remove(result)
        else:
            moves.append(_Move(rest.pop(0), result))
        if any(result.overlaps(span) for span in rest):
            raise self.file.refuse(place, "its result overlaps what it has yet to add")
        moves += [_Move(span, result, True) for span in rest]
        return moves + [_Move(result, span) for span in others]

    def _span(self, place: str, op: dict[str, Any], ref: dict[str, Any]) -> _Span:
        if "switch_channel_id" in ref:
            raise self.file.refuse(place, "switch channels (multimem) are not supported")
        rank, buffer = self.rank, ref.get("type", "")
        if "buffer_id" in ref:
            remote = self.remote_buffers[
                self._at(place, self.remote_ids, ref["buffer_id"], "buffer")
            ]
            rank, buffer = remote["rank"], remote["type"]
        share = op.get("tbg_info", {"tb_id": 0, "tbg_size": 1})
        units = ref["size"] * self.nodes.slices
        begin, end = (
            units * part // share["tbg_size"] for part in (share["tb_id"], share["tb_id"] + 1)
        )
        first = ref["index"] * self.nodes.slices + begin
        return self.file.span(place, rank, buffer, first, end - begin)

    def _at(self, place: str, items: list[int], index: int, what: str) -> int:
        if not 0 <= index < len(items):
            raise self.file.refuse(
                place, f"{what} {index} is not one of its thread block's {len(items)}"
            )
        return items[index]

    # --- what it waits for --------------------------------------------------------------------------------------

    def _order(self, place: str, op: dict[str, Any], node: int) -> None:
        name = op["name"]
        if name in ("signal", "rlxsignal", "pws", "pwsf"):
            for key in self._channels(place, op, sends=True):
                self.nodes.counts[key].append((self.number, node))
        elif name in ("wait", "rlxwait"):
            for key in self._channels(place, op, sends=False):
                self.waited[key] += 1
                self.nodes.waits[key].append((self.number, node, self.waited[key]))
        elif name == "barrier":
            key = (self.rank, op["barrier_id"])
            self.nodes.barriers[key].append((self.number, node, op["num_threadblocks"]))
        elif name in ("sem_acquire", "sem_release"):
            for number in op["semaphore_ids"]:
                counter = ("semaphore", self.rank, number)
                if name == "sem_release":
                    self.nodes.counts[counter].append((self.number, node))
                    continue
                self.waited[counter] += 1
                self.nodes.initial[counter] = self.initial[number]
                needed = self.waited[counter] - self.initial[number]
                self.nodes.waits[counter].append((self.number, node, needed))

    def _channels(self, place: str, op: dict[str, Any], sends: bool) -> list[tuple]:
        """Which of the channels between two ranks, as both count them: from whom, to whom, which."""
        keys = []
        for local in op["channel_ids"]:
            number = self._at(place, self.channels, local, "channel")
            peer = self.peers[number]
            which = self.peers[:number].count(peer)
            keys.append((self.rank, peer, which) if sends else (peer, self.rank, which))
        return keys
