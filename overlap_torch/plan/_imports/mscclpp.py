"""Plans from MSCCL++'s JSON execution plans: operations of thread blocks, which signal and wait, or read packets."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from overlap_torch._plan import Plan, Problem
from overlap_torch.plan._imports.common import File, Move, Span

_CHANNELS = ("memory", "port")
_PROTOCOLS = ("Simple", "LL")
_COPIES = ("put", "pws", "pwsf", "get", "copy", "ppkt", "rppkt", "cpkt", "upkt")
_SUMS = ("re", "res", "rre", "rres", "repkt", "respkt", "recpkt", "recspkt")
_SIGNALS = ("signal", "rlxsignal", "pws", "pwsf")
_WAITS = ("wait", "rlxwait")
_ORDERS = (
    *("signal", "rlxsignal", *_WAITS),
    *("flush", "nop", "barrier", "sem_acquire", "sem_release"),
)


def from_mscclpp(path: str | Path, problem: Problem, *, chunks: int = 1, **how: Any) -> Plan:
    """The plan that runs an MSCCL++ execution plan, a JSON file, for the problem.

    The plan keeps the file's operations and their order, given by thread blocks, signals, semaphores, barriers, and packets
    of protocol LL, which are read after they were written. It ignores details of MSCCL++'s runtime: threads, alignment,
    sizes, double scratch buffers, flags of packets, and whether a proxy thread moves the data.

    Args:
        path: an allreduce, allgather, reducescatter or alltoall of the protocol Simple or LL for the problem's number of
            ranks. Errors name switches and pipelines, which are not supported.
        problem, chunks, how: as in :func:`from_msccl`.

    Raises:
        ValueError: an unsupported or wrong operation, with its place in the file; or a plan that cannot run.
    """
    name = Path(path).name
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is no JSON: {error}") from error
    try:
        file = _read(name, data, problem)
    except (KeyError, TypeError, AttributeError, IndexError, ZeroDivisionError) as error:
        raise ValueError(f"{name} is not in the form of an execution plan: {error!r}") from error
    return file.plan(chunks, how)


def _read(name: str, data: dict[str, Any], problem: Problem) -> File:
    gpus = data["gpus"]
    slices = 1  # of a chunk, which thread blocks of a group share
    for gpu in gpus:
        for block in gpu["threadblocks"]:
            for op in block["ops"]:
                slices = math.lcm(slices, op.get("tbg_info", {}).get("tbg_size", 1))
    units = max(gpu[side] for gpu in gpus for side in ("input_chunks", "output_chunks"))
    scratch = max(gpu["scratch_chunks"] for gpu in gpus)
    file = File(
        name,
        problem,
        data["collective"],
        len(gpus),
        units * slices,
        scratch * slices,
        bool(data["inplace"]),
    )
    if data.get("protocol", "Simple") not in _PROTOCOLS:
        raise ValueError(
            f"{name}: protocol {data['protocol']!r} is not supported, allowed are {' and '.join(_PROTOCOLS)}"
        )
    if [gpu["id"] for gpu in gpus] != list(range(len(gpus))):
        raise ValueError(f"{name}: gpus are not in the order of their ids, 0 to {len(gpus) - 1}")
    operations = _Operations(file, slices)
    for gpu in gpus:
        operations.add(gpu)
    operations.match()
    return file


class _Operations:
    """Operations of all thread blocks, and the order between those of different blocks."""

    def __init__(self, file: File, slices: int) -> None:
        self.file = file
        self.slices = slices
        # By the counted thing: (block, node) of each operation that counts, (block, node, number) of each that waits.
        self.counts: dict[tuple, list[tuple[int, int]]] = defaultdict(list)
        self.waits: dict[tuple, list[tuple[int, int, int]]] = defaultdict(list)
        self.initial: dict[tuple, int] = {}  # of semaphores
        self.barriers: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
        self.packets: list[tuple[int, list[Span], list[Span]]] = []  # node, read, written

    def add(self, gpu: dict[str, Any]) -> None:
        peers: dict[str, list[int]] = defaultdict(list)
        for channel in gpu.get("channels", []):
            self.check_channel(f"gpu {gpu['id']}", channel["channel_type"])
            peers[channel["channel_type"]] += channel["connected_to"]
        for block in gpu["threadblocks"]:
            _Block(self, gpu, block, peers).add()

    def check_channel(self, place: str, kind: str) -> None:
        if kind not in _CHANNELS:
            raise self.file.refuse(
                place,
                f"channel_type {kind!r} is not supported, allowed are {' and '.join(_CHANNELS)}",
            )

    def match(self) -> None:
        for key, waits in self.waits.items():
            self._match_counts(key, waits)
        for (rank, number), arrivals in self.barriers.items():
            self._match_barrier(rank, number, arrivals)
        self._match_packets()

    def _match_counts(self, key: tuple, waits: list[tuple[int, int, int]]) -> None:
        nodes, counts = self.file.nodes, self.counts.get(key, [])
        blocks = {block for block, _ in counts}
        spare = self.initial.get(key, 0) + len(counts) - len(waits)
        for _, node, number in waits:
            if number > len(counts) or spare < 0:
                raise self.file.refuse(
                    nodes[node],
                    f"waits for signal {number}, and {len(counts)} are given for {len(waits)} waits: the wait would never end",
                )
            if number > 0 and len(blocks) > 1 and number < len(counts):
                raise self.file.refuse(
                    nodes[node],
                    f"waits for {number} of {len(counts)} signals of {len(blocks)} thread blocks, in an order that is not "
                    "given; take a channel or semaphore for each",
                )
            nodes[node].before += [one for _, one in counts[: max(number, 0)]]

    def _match_barrier(self, rank: int, number: int, arrivals: list[tuple[int, int, int]]) -> None:
        """The n-th arrivals of all its blocks are one meeting: later operations come after all earlier ones."""
        nodes = self.file.nodes
        by_block: dict[int, list[int]] = defaultdict(list)
        for block, node, _ in arrivals:
            by_block[block].append(node)
        expected = arrivals[0][2]
        lengths = {len(met) for met in by_block.values()}
        if len(by_block) != expected or len(lengths) != 1:
            raise self.file.refuse(
                nodes[arrivals[0][1]],
                f"barrier {number} of rank {rank} is for {expected} thread blocks, and {len(by_block)} come to it, "
                f"{'as often' if len(lengths) == 1 else 'not as often'}: they would wait without end",
            )
        for together in zip(*by_block.values(), strict=True):
            arrived = [one for node in together for one in nodes[node].before]
            for node in together:
                nodes[node].before = list(arrived)

    def _match_packets(self) -> None:
        """Orders reads of packets after their writes, by any writer."""
        writers: dict[tuple[int, int], list[int]] = defaultdict(list)
        for node, _, written in self.packets:
            for span in written:
                for unit in span.units:
                    writers[span.rank, unit].append(node)
        for node, read, _ in self.packets:
            for span in read:
                for unit in span.units:
                    found = writers[span.rank, unit]
                    if not found:
                        raise self.file.refuse(
                            self.file.nodes[node],
                            f"reads packets of chunk {unit} of buffer s, which nobody writes: the wait would never end",
                        )
                    self.file.nodes[node].before += found


class _Block:
    """One thread block, operation after operation."""

    def __init__(
        self,
        operations: _Operations,
        gpu: dict[str, Any],
        block: dict[str, Any],
        peers: dict[str, list[int]],
    ) -> None:
        self.all = operations
        self.file = operations.file
        self.rank = gpu["id"]
        self.number = block["id"]
        self.ops = block["ops"]
        self.peers = peers
        self.initial = [one["init_value"] for one in gpu.get("semaphores", [])]
        self.remote_buffers = gpu.get("remote_buffers", [])
        self.channels: dict[str, list[int]] = defaultdict(list)
        for one in block.get("channels", []):
            self.channels[one["channel_type"]] += one["channel_ids"]
        self.remote_ids: dict[str, list[int]] = defaultdict(list)
        for one in block.get("remote_buffer_refs", []):
            self.remote_ids[one["access_channel_type"]] += one["remote_buffer_ids"]
        self.waited: dict[tuple, int] = defaultdict(int)

    def add(self) -> None:
        before: list[int] = []
        for index, op in enumerate(self.ops):
            place = f"gpu {self.rank}, threadblock {self.number}, op {index} ({op['name']})"
            if op.get("channel_type", "none") != "none":
                self.all.check_channel(place, op["channel_type"])
            moves = self._moves(place, op)
            node = self.file.add(place, self.rank, self.number, moves, before)
            if op["name"].endswith("pkt"):
                self._note_packets(node, op["name"], moves)
            self._order(place, op, node)
            before = [node]

    # --- the moves of an operation ----------------------------------------------------------------------------------

    def _moves(self, place: str, op: dict[str, Any]) -> list[Move]:
        name = op["name"]
        if name in _ORDERS:
            return []
        if name not in _COPIES and name not in _SUMS:
            allowed = ", ".join(dict.fromkeys((*_COPIES, *_SUMS, *_ORDERS)))
            raise self.file.refuse(place, f"this operation is not supported, allowed are {allowed}")
        sources = [self._span(place, op, one) for one in op["src_buff"]]
        targets = [self._span(place, op, one) for one in op["dst_buff"]]
        if name == "rppkt" and len(sources) == 1:
            sources *= len(targets)
        if len({span.count for span in (*sources, *targets)}) != 1:
            raise self.file.refuse(place, "its buffers are not of one size")
        if name in _COPIES:
            if len(sources) != len(targets):
                raise self.file.refuse(
                    place,
                    f"{len(sources)} sources for {len(targets)} destinations, expected equal numbers",
                )
            return [Move(*pair) for pair in zip(sources, targets, strict=True)]
        if op.get("reduce_op", "sum") != "sum":
            raise self.file.refuse(
                place, f"reduce_op {op['reduce_op']!r} is not supported, allowed is sum"
            )
        # The sum is made in the first destination, and goes from there to the others.
        result, others = targets[0], targets[1:]
        if result.rank != self.rank:
            raise self.file.refuse(place, "its first destination is not of this rank")
        moves = []
        if result in sources:
            sources.remove(result)
        else:
            moves.append(Move(sources.pop(0), result))
        if any(result.overlaps(span) for span in sources):
            raise self.file.refuse(place, "its result overlaps a source that it has not added yet")
        moves += [Move(span, result, True) for span in sources]
        return moves + [Move(result, span) for span in others]

    def _span(self, place: str, op: dict[str, Any], ref: dict[str, Any]) -> Span:
        if "switch_channel_id" in ref:
            raise self.file.refuse(place, "switch channels (multimem) are not supported")
        rank, buffer = self.rank, ref.get("type", "")
        if "buffer_id" in ref:
            known = self.remote_ids[op.get("channel_type", "memory")]
            remote = self.remote_buffers[self._at(place, known, ref["buffer_id"], "buffer")]
            rank, buffer = remote["rank"], remote["type"]
        share = op.get("tbg_info", {"tb_id": 0, "tbg_size": 1})
        units = ref["size"] * self.all.slices
        begin, end = (
            units * part // share["tbg_size"] for part in (share["tb_id"], share["tb_id"] + 1)
        )
        first = ref["index"] * self.all.slices + begin
        return self.file.span(place, rank, buffer, first, end - begin)

    def _note_packets(self, node: int, name: str, moves: list[Move]) -> None:
        """A sum's first source and destination are plain data; all other scratch memory holds packets."""
        plain = moves[0].destination if name in _SUMS else None
        read = [m.source for m in moves if m.reduces or (name in ("rppkt", "upkt"))]
        written = [m.destination for m in moves if m.destination != plain and name != "upkt"]
        self.all.packets.append(
            (
                node,
                [span for span in read if span is not None and span.buffer == "s"],
                [span for span in written if span is not None and span.buffer == "s"],
            )
        )

    def _at(self, place: str, items: list[int], index: int, what: str) -> int:
        if not 0 <= index < len(items):
            raise self.file.refuse(
                place, f"{what} {index} is not one of its thread block's {len(items)}"
            )
        return items[index]

    # --- its waits --------------------------------------------------------------------------------------------------

    def _order(self, place: str, op: dict[str, Any], node: int) -> None:
        name = op["name"]
        if name in _SIGNALS:
            for key in self._keys(place, op, sends=True):
                self.all.counts[key].append((self.number, node))
        elif name in _WAITS:
            for key in self._keys(place, op, sends=False):
                self.waited[key] += 1
                self.all.waits[key].append((self.number, node, self.waited[key]))
        elif name == "barrier":
            key = (self.rank, op["barrier_id"])
            self.all.barriers[key].append((self.number, node, op["num_threadblocks"]))
        elif name in ("sem_acquire", "sem_release"):
            for number in op["semaphore_ids"]:
                counter = ("semaphore", self.rank, number)
                if name == "sem_release":
                    self.all.counts[counter].append((self.number, node))
                    continue
                self.waited[counter] += 1
                self.all.initial[counter] = self.initial[number]
                needed = self.waited[counter] - self.initial[number]
                self.all.waits[counter].append((self.number, node, needed))

    def _keys(self, place: str, op: dict[str, Any], sends: bool) -> list[tuple]:
        """The channels between two ranks, as both count them: type, sender, receiver, number."""
        keys = []
        kind = op.get("channel_type", "memory")
        for local in op["channel_ids"]:
            number = self._at(place, self.channels[kind], local, "channel")
            peer = self.peers[kind][number]
            which = self.peers[kind][:number].count(peer)
            pair = (self.rank, peer) if sends else (peer, self.rank)
            keys.append((kind, *pair, which))
        return keys
