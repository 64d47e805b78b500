"""Plans from MSCCL's XML algorithms: steps of thread blocks, which send and receive over channels."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from overlap_torch._plan import Plan, Problem
from overlap_torch.plan._imports.common import File, Move, Span

_TYPES = ("s", "r", "rcs", "rrs", "rrc", "rrcs", "cpy", "re", "nop")


def from_msccl(path: str | Path, problem: Problem, *, chunks: int = 1, **how: Any) -> Plan:
    """The plan that runs the algorithm of an MSCCL XML file for the problem.

    The plan keeps the file's order of steps, dependencies and chunks. It ignores the protocol, channels and range of sizes.

    Args:
        path: an ``<algo>`` of allreduce, allgather, reduce_scatter or alltoall for the problem's number of ranks, 2 to 8.
        problem: a problem of the op with this collective. A chunk of the file is a run of rows.
        chunks: the number of runs into which the rows are divided; each goes through the whole file as soon as it is
            computed.
        how: ``tile``, ``kernel``, ``transport``, ``comm_sms`` and ``max_ctas`` as in ``plan.programs.edit``.

    Raises:
        ValueError: an unsupported or wrong operation, with its place in the file; or a plan that cannot run.
    """
    name = Path(path).name
    try:
        algo = ElementTree.parse(path).getroot()
    except ElementTree.ParseError as error:
        raise ValueError(f"{name} is no XML: {error}") from error
    if algo.tag != "algo":
        raise ValueError(f"{name} is <{algo.tag}>, expected <algo>")
    gpus = sorted(algo.findall("gpu"), key=lambda gpu: _number(name, gpu, "id"))
    file = File(
        name,
        problem,
        algo.get("coll", ""),
        _number(name, algo, "ngpus"),
        _number(name, algo, "nchunksperloop"),
        max((_number(name, gpu, "s_chunks", 0) for gpu in gpus), default=0),
        algo.get("inplace", "0") == "1" and algo.get("outofplace", "0") != "1",
    )
    if [_number(name, gpu, "id") for gpu in gpus] != list(range(problem.world_size)):
        raise ValueError(
            f"{name}: <gpu> elements are not one for each of {problem.world_size} ranks"
        )
    _Steps(file).add(gpus)
    return file.plan(chunks, how)


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


class _Steps:
    """The steps of all thread blocks. A rank's n-th send to a peer on a channel matches the peer's n-th receive on it."""

    def __init__(self, file: File) -> None:
        self.file = file
        self.last: dict[tuple[int, int, int], int] = {}  # of rank, block and step: its node
        # By sender, receiver and channel: nodes and their halves of messages.
        self.sends: dict[tuple[int, int, int], list[tuple[int, Move]]] = defaultdict(list)
        self.receives: dict[tuple[int, int, int], list[tuple[int, Move]]] = defaultdict(list)

    def add(self, gpus: list[ElementTree.Element]) -> None:
        name, depends = self.file.name, []
        for rank, gpu in enumerate(gpus):
            for block in gpu.findall("tb"):
                number, before = _number(name, block, "id"), []
                for step in sorted(block.findall("step"), key=lambda s: _number(name, s, "s")):
                    index = _number(name, step, "s")
                    place = f"gpu {rank}, tb {number}, step {index}"
                    node = self._add_step(place, rank, block, step, before)
                    key = (rank, _number(name, step, "depid", -1), _number(name, step, "deps", -1))
                    if key[1] >= 0:
                        depends.append((node, key))
                    self.last[rank, number, index] = node
                    before = [node]
        for node, key in depends:
            if key not in self.last:
                raise self.file.refuse(
                    self.file.nodes[node],
                    f"depends on step {key[2]} of tb {key[1]}, which is not there",
                )
            self.file.nodes[node].before.append(self.last[key])
        self._match()

    def _add_step(
        self,
        place: str,
        rank: int,
        block: ElementTree.Element,
        step: ElementTree.Element,
        before: list[int],
    ) -> int:
        file, name, kind = self.file, self.file.name, step.get("type", "")
        if kind not in _TYPES:
            raise file.refuse(
                place, f"type {kind!r} is not supported, allowed are {', '.join(_TYPES)}"
            )
        channel = _number(name, block, "chan", 0)
        peers = {side: _number(name, block, side, -1) for side in ("send", "recv")}
        sends, receives = kind[-1] == "s", kind[0] == "r" and kind != "re"
        for wanted, side in ((sends, "send"), (receives, "recv")):
            if wanted and not (0 <= peers[side] < file.world and peers[side] != rank):
                raise file.refuse(
                    place, f"type {kind} in a tb with {side}={peers[side]}, no other rank"
                )
        moves = self._moves(place, rank, kind, step)
        node = file.add(place, rank, channel, moves, before)
        for move in moves:
            if move.source is None:
                self.receives[peers["recv"], rank, channel].append((node, move))
            elif move.destination is None:
                self.sends[rank, peers["send"], channel].append((node, move))
        return node

    def _moves(self, place: str, rank: int, kind: str, step: ElementTree.Element) -> list[Move]:
        file, name = self.file, self.file.name
        count = _number(name, step, "cnt", 1)

        def span(side: str) -> Span:
            offset = _number(name, step, f"{side}off")
            return file.span(place, rank, step.get(f"{side}buf", ""), offset, count)

        if kind == "nop":
            return []
        if kind in ("cpy", "re"):
            return [Move(span("src"), span("dst"), kind == "re")]
        if kind == "s":
            return [Move(span("src"), None)]
        adds = kind.startswith("rr")
        held = file.pass_through(rank, count) if kind == "rrs" else span("dst")
        moves = []
        if adds and (own := span("src")) != held:
            if held.overlaps(own):
                raise file.refuse(place, "source and destination overlap in part")
            moves.append(Move(own, held))
        moves.append(Move(None, held, adds))
        return [*moves, Move(held, None)] if kind[-1] == "s" else moves

    def _match(self) -> None:
        nodes, message = self.file.nodes, 0
        for key in sorted(self.sends.keys() | self.receives.keys()):
            sends, receives = self.sends[key], self.receives[key]
            for (sender, sent), (receiver, received) in zip(sends, receives, strict=False):
                assert sent.source is not None and received.destination is not None
                if sent.source.count != received.destination.count:
                    raise self.file.refuse(
                        nodes[receiver],
                        f"receives {received.destination.count} chunks, and {nodes[sender].place} sends {sent.source.count}",
                    )
                sent.message = received.message = message
                nodes[receiver].before.append(sender)
                message += 1
            if len(sends) != len(receives):
                longer, rank, verb = max(
                    (sends, key[1], "receives"),
                    (receives, key[0], "sends"),
                    key=lambda x: len(x[0]),
                )
                raise self.file.refuse(
                    nodes[longer[min(len(sends), len(receives))][0]],
                    f"rank {rank} {verb} nothing for it on channel {key[2]}: the wait would never end",
                )
