"""Runs the lists of steps of jobs, of all ranks, in memory and in random orders: what of them GPUs would do, without one.

A lane's steps follow each other, those of different lanes come in any order that their `after`, forks and joins allow, a collective
when all ranks have come to it, and the kernel takes its tiles one by one meanwhile. Memory is full of NaN at first. Values that
the kernel reads are checked when it reads them.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field

import torch

from overlap_torch import _plan
from overlap_torch._kernels import tile_orders
from overlap_torch.plan import Machine, Plan
from overlap_torch.plan.types import Op

ELEMENT = 4  # bytes, of float32
H200 = Machine(arch=90, sm_count=132, sm_gflops=5e3, link_latency_us=20.0, link_gbps=200.0)


def value(rank: int, row: int, column: int) -> float:
    """The values that a rank's kernel stores, or has as rows: sums of them are exact."""
    return float(1 + rank * 1000 + row * 7 % 101 + column % 13)


def values(rank: int, rows: range, columns: range) -> torch.Tensor:
    """The same of a block."""
    down, across = torch.arange(rows.start, rows.stop), torch.arange(columns.start, columns.stop)
    return (1.0 + rank * 1000 + down * 7 % 101)[:, None] + across % 13


@dataclass
class Rank:
    """One rank's call."""

    number: int
    steps: list[dict]
    tiles: list[int]
    chunks: list[int]
    columns: int
    memory: dict[tuple[str, int], torch.Tensor]
    counters: list[int]
    done: set[int] = field(default_factory=set)
    waits: dict[int, list[int]] = field(default_factory=dict)  # of each step, those before it
    taken: int = 0  # tiles
    signals: set[int] = field(default_factory=set)

    def at(self, where: dict, count: int) -> torch.Tensor:
        own = where["buffer"] in ("slot", "stripes")
        flat = self.memory[where["buffer"], where["index"] if own else 0]
        first = where["offset"] // ELEMENT
        assert first + count <= flat.numel(), (where, count, flat.numel())
        return flat[first : first + count]


class Run:
    """Lists of one plan."""

    def __init__(
        self,
        plan: Plan,
        seed: int,
        awaits: bool = False,
        rows: list[list[int]] | None = None,
        pieces: int = 1,
    ) -> None:
        self.plan, self.chance = plan, random.Random(seed)
        self.problem = plan.problem
        self.world = self.problem.world_size
        self.gathers = self.problem.op == Op.ALLGATHER_GEMM
        self.rows = rows  # of an all-to-all: [from][to]
        self.slots: dict[int, torch.Tensor] = {}
        self.ranks = [self._rank(rank, awaits, pieces) for rank in range(self.world)]

    def _rank(self, number: int, awaits: bool, pieces: int) -> Rank:
        send = self.rows[number] if self.rows else []
        receive = [self.rows[source][number] for source in range(self.world)] if self.rows else []
        text, chunks, columns = _plan.kernel_steps_json(
            self.plan, number, H200, awaits, send, receive, pieces
        )
        made = json.loads(text)
        m, n, k = self.problem.m, self.problem.n, self.problem.k
        nan = float("nan")
        memory = {
            (one["buffer"], 0): torch.full((one["bytes"] // ELEMENT,), nan)
            for one in made["scratch"]
        }
        part = m // self.world
        if self.gathers:
            own = [[value(number, row, column) for column in range(k)] for row in range(part)]
            memory["input", 0] = torch.tensor(own).flatten()
            memory["gathered", 0] = torch.full((m * k,), nan)
        else:
            scattered = self.problem.op == Op.GEMM_REDUCESCATTER
            result = sum(receive) if self.rows else part if scattered else m
            memory["output", 0] = torch.full((result * n,), nan)
        if made["slot_bytes"]:
            self.slots.setdefault(number, torch.full((made["slot_bytes"] // ELEMENT,), nan))
        if '"stripes"' in text:  # all ranks' rows of this rank's part
            memory["stripes", 1] = torch.full((m * n,), nan)
        rank = Rank(
            number, made["steps"], tile_orders.by_chunks("grouped", chunks, columns), chunks, columns, memory,
            [0] * max(1, made["counters"]),
        )  # fmt: skip
        self._order(rank)
        return rank

    def _order(self, rank: Rank) -> None:
        last: dict[str, int] = {}
        forked: list[str] = []
        for index, step in enumerate(rank.steps):
            before = list(step["after"])
            if step["lane"] in last:
                before.append(last[step["lane"]])
            if step["step"] == "join":
                before += [last[lane] for lane in forked if lane in last]
            rank.waits[index] = before
            last[step["lane"]] = index
            if step["step"] == "fork":
                forked = [f"side{lane}" for lane in range(step["side_lanes"])] + ["copy"] * step[
                    "copies"
                ]
                last |= {lane: index for lane in forked}

    def __call__(self) -> list[torch.Tensor]:
        """Each rank's result, flat."""
        for rank in self.ranks:
            for peer, slot in self.slots.items():
                rank.memory["slot", peer] = slot
        while any(len(rank.done) < len(rank.steps) for rank in self.ranks):
            able = [
                (rank, index)
                for rank in self.ranks
                for index, step in enumerate(rank.steps)
                if index not in rank.done
                and all(before in rank.done for before in rank.waits[index])
                and self._able(rank, index, step)
            ]
            assert able, [sorted(set(range(len(rank.steps))) - rank.done) for rank in self.ranks]
            rank, index = self.chance.choice(able)
            self._take(rank, index, rank.steps[index])
        return [rank.memory["gathered" if self.gathers else "output", 0] for rank in self.ranks]

    # A collective's n-th call on its communicator, of all ranks.
    def _same_call(self, rank: Rank, index: int) -> list[tuple[Rank, int]] | None:
        def calls(of: Rank) -> list[int]:
            lane = rank.steps[index]["communicator_lane"]
            return [
                i
                for i, one in enumerate(of.steps)
                if one["step"] == "collective" and one["communicator_lane"] == lane
            ]

        turn = calls(rank).index(index)
        found = [(one, calls(one)[turn]) for one in self.ranks]
        ready = all(all(before in one.done for before in one.waits[i]) for one, i in found)
        return found if ready else None

    def _able(self, rank: Rank, index: int, step: dict) -> bool:
        kind = step["step"]
        if kind == "wait_for_tiles":
            return rank.counters[step["chunk"]] >= step["tiles"]
        if kind == "collective":
            return self._same_call(rank, index) is not None
        if kind == "send_receive":
            return self._same_exchange(rank, index) is not None
        if kind == "wait_for_peers":
            return all(step["number"] in peer.signals for peer in self.ranks if peer is not rank)
        if kind == "callers_kernel" and step.get("awaits") and rank.taken < len(rank.tiles):
            return rank.counters[rank.chunks[rank.tiles[rank.taken]]] == 1
        return True

    def _same_exchange(self, rank: Rank, index: int) -> list[tuple[Rank, int]] | None:
        def calls(of: Rank) -> list[int]:
            return [i for i, one in enumerate(of.steps) if one["step"] == "send_receive"]

        turn = calls(rank).index(index)
        found = [(one, calls(one)[turn]) for one in self.ranks]
        ready = all(all(before in one.done for before in one.waits[i]) for one, i in found)
        return found if ready else None

    def _take(self, rank: Rank, index: int, step: dict) -> None:
        kind = step["step"]
        if kind == "callers_kernel":
            if rank.taken < len(rank.tiles):
                self._tile(rank, step, rank.tiles[rank.taken])
                rank.taken += 1
            if rank.taken < len(rank.tiles):
                return
        elif kind == "arrive":
            rank.counters[step["chunk"]] = 1
        elif kind == "signal":
            rank.signals.add(step["number"])
        elif kind == "copy":
            count = step["bytes"] // ELEMENT
            rank.at(step["destination"], count).copy_(rank.at(step["source"], count))
        elif kind == "add_terms":
            count, total = step["rows"] * self.problem.n, 0.0
            for term in range(step.get("terms", 1)):
                offset = step["source"]["offset"] + term * step.get("stride", 0)
                total = total + rank.at({**step["source"], "offset": offset}, count)
            rank.at(step["destination"], count).copy_(total)
        elif kind in ("pack", "unpack"):
            self._repack(rank, step)
        elif kind == "collective":
            for one, at in self._collective(self._same_call(rank, index)):
                one.done.add(at)
        elif kind == "send_receive":
            found = self._same_exchange(rank, index)
            for one, at in found:
                for message in one.steps[at]["receives"]:
                    source, there = found[message["peer"]]
                    (sent,) = (
                        each for each in source.steps[there]["sends"] if each["peer"] == one.number
                    )
                    assert sent["bytes"] == message["bytes"]
                    count = message["bytes"] // ELEMENT
                    one.at(message["at"], count).copy_(source.at(sent["at"], count))
                one.done.add(at)
        else:
            assert kind in (
                "fork",
                "join",
                "wait_for_tiles",
                "wait_for_slots",
                "wait_for_peers",
                "end_call",
            ), kind
        rank.done.add(index)

    def _tile(self, rank: Rank, step: dict, tile: int) -> None:
        tile_m, tile_n = self.plan.tile_m, self.plan.tile_n
        row, column = tile // rank.columns * tile_m, tile % rank.columns * tile_n
        if self.gathers:
            part = self.problem.m // self.world
            there = rank.memory["gathered", 0].view(-1, self.problem.k)
            for at in range(row, min(row + tile_m, self.problem.m)):
                right = torch.tensor(
                    [value(at // part, at % part, k) for k in range(self.problem.k)]
                )
                assert torch.equal(there[at], right), (rank.number, tile, at)
            return
        places = (
            ("product", 0),
            ("window", 0),
            ("output", 0),
        )  # it stores in the first one that there is
        m, n = self.problem.m or sum(self.rows[rank.number]), self.problem.n
        rows, columns = range(row, min(row + tile_m, m)), range(column, min(column + tile_n, n))
        stored = values(rank.number, rows, columns)
        if ("stripes", 1) in rank.memory:
            for at, line in zip(rows, stored, strict=True):
                owner, own_row = divmod(at, m // self.world)
                theirs = self.ranks[owner].memory["stripes", 1].view(self.world, -1, n)
                theirs[rank.number, own_row, columns.start : columns.stop] = line
        else:
            product = next(rank.memory[place] for place in places if place in rank.memory)
            product.view(-1, n)[rows.start : rows.stop, columns.start : columns.stop] = stored
        if step.get("counts"):
            rank.counters[rank.chunks[tile]] += 1

    def _collective(self, found: list[tuple[Rank, int]]) -> list[tuple[Rank, int]]:
        steps = [one.steps[at] for one, at in found]
        kind, count = steps[0]["kind"], steps[0]["count"]
        assert all((step["kind"], step["count"]) == (kind, count) for step in steps)
        gathers = kind in ("all_gather", "exchange")
        length = count * self.world if kind == "reduce_scatter" else count
        sent = [one.at(one.steps[at]["source"], length).clone() for one, at in found]
        for one, at in found:
            if gathers:
                one.at(one.steps[at]["destination"], count * self.world).copy_(torch.cat(sent))
                continue
            total = torch.stack(sent).sum(0)
            if kind == "reduce_scatter":
                total = total[one.number * count :][:count]
            one.at(one.steps[at]["destination"], count).copy_(total)
        return found

    def _repack(self, rank: Rank, step: dict) -> None:
        """A chunk's tiles into the packed buffer, or the sum of their terms out of it."""
        plan, n = self.plan, self.problem.n
        size = plan.tile_m * plan.tile_n
        first = sum(chunk.tiles for chunk in plan.chunks[: step["chunk"]])
        tiles = plan.chunks[step["chunk"]].tiles
        packs = step["step"] == "pack"
        matrix = step["source" if packs else "destination"]["buffer"]
        rows = rank.memory[matrix, 0].view(-1, n)
        buffer = step["destination" if packs else "source"]["buffer"]
        for row in range(plan.tiles_m):
            for column in range(plan.tiles_n):
                index = plan.tile_index(row, column)
                if not first <= index < first + tiles:
                    continue
                place = rows[row * plan.tile_m :, column * plan.tile_n :][
                    : plan.tile_m, : plan.tile_n
                ]
                high, wide = place.shape
                total = torch.zeros(high, wide)
                for term in [step["term"]] if packs else range(step["terms"]):
                    slot = index + (step["terms"] - 1) * first + term * tiles
                    packed = rank.memory[buffer, 0][slot * size :][:size].view(
                        plan.tile_m, plan.tile_n
                    )
                    if packs:
                        packed[:high, :wide] = place
                    else:
                        total += packed[:high, :wide]
                if not packs:
                    place.copy_(total)


def expected(plan: Plan, rank: int, rows: list[list[int]] | None = None) -> torch.Tensor:
    """A rank's result, flat, by the equation."""
    problem, world = plan.problem, plan.problem.world_size
    n = problem.n
    if problem.op == Op.ALLGATHER_GEMM:
        part = problem.m // world
        return torch.tensor(
            [
                value(row // part, row % part, column)
                for row in range(problem.m)
                for column in range(problem.k)
            ]
        )
    if rows:
        return torch.tensor(
            [
                value(source, sum(rows[source][:rank]) + row, column)
                for source in range(world)
                for row in range(rows[source][rank])
                for column in range(n)
            ]
        )
    sums = sum(values(r, range(problem.m), range(n)) for r in range(world))
    return (sums.chunk(world)[rank] if problem.op == Op.GEMM_REDUCESCATTER else sums).flatten()
