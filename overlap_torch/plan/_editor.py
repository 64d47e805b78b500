"""Programs: hand-written transfers that replace a plan's collective."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from overlap_torch import _plan
from overlap_torch._plan import (
    MAX_CHUNKS,
    Chunk,
    Collective,
    Engine,
    Kernel,
    Memory,
    Op,
    Plan,
    Problem,
    Program,
    Rectangle,
    Region,
    Transfer,
    Transport,
    Way,
)
from overlap_torch.plan._areas import AnyRank, Area, Rank, Share, number_on
from overlap_torch.plan._names import enum_member
from overlap_torch.plan._transfers import Transfers
from overlap_torch.plan.templates import make_all_to_all, row_panels

_COLLECTIVES = {
    Op.GEMM_ALLREDUCE: Collective.ALL_REDUCE,
    Op.GEMM_REDUCESCATTER: Collective.REDUCE_SCATTER,
}
MESSAGE_SHARES = 64  # rows of a message, as an all-to-all's program counts them


@dataclass(frozen=True)
class Tiles:
    """A need: the source's tiles of this area are computed."""

    area: Area


@dataclass(frozen=True)
class Earlier:
    """A need: earlier transfers, by their numbers, found by the rank that runs the transfer."""

    numbers: Callable[[int], Sequence[int]]


Need = Tiles | Earlier


class Editor:
    """A program that is written statement by statement, transfer by transfer; ``plan.programs.edit`` is this class::

        with edit(problem, tile=(128, 128)) as p:
            for share in p.chunks(4):
                for step in range(1, p.world):                  # a ring of gemm_reducescatter
                    part = p.part(p.rank - step, share)
                    p.push(part, to=p.rank + 1, reduce=True, needs=[p.tiles(part), p.arrived(part)])
        ring = p.plan()

    A statement describes all ranks: ``p.rank`` has a different value on each rank, and so have the areas and ranks computed
    from it. docs/plans.md tells more.

    Args:
        problem: of 2 to 8 ranks, or up to 16 on several hosts. ``allgather_gemm`` and ``gemm_alltoall`` compute by
            ``library``.
        tile, kernel, transport: as in :func:`row_panels`.
        comm_sms, max_ctas: as in :func:`row_panels`. Copy engines move data over ``peer`` and take no SM; additions are
            kernels, which need SMs.
        ranks_per_host: how many ranks of each host map each other's memory; over ``peer`` NCCL's messages go between hosts.

    Raises:
        ValueError: arguments with which the problem can have no plan. :meth:`plan` finds faults of the transfers.

    Attributes:
        world: number of ranks.
        rank: the rank that runs the program, a :class:`Rank`.
        product: [M, N], each rank's own product; for ``gemm_alltoall`` see :meth:`message`.
        output: the result, [M, N] or, for ``gemm_reducescatter``, [M / world, N]. If no transfer writes to it, the result
            is the content of ``product`` (for ``gemm_reducescatter``, of this rank's part).
        input: for ``allgather_gemm``: [M / world, K], this rank's rows.
        gathered: for ``allgather_gemm``: [M, K], all ranks' rows; it has this rank's rows from the start.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        tile: tuple[int, int] | None = None,
        kernel: Kernel | str = Kernel.LIBRARY,
        transport: Transport | str | None = None,
        comm_sms: int = 0,
        max_ctas: int = 0,
        ranks_per_host: int = 0,
    ) -> None:
        self.problem = problem
        self.world = problem.world_size
        self.rank = Rank(lambda rank: rank)
        kernel = enum_member(Kernel, kernel)
        self.over_peers = (
            transport is not None and enum_member(Transport, transport).traits.maps_memory
        )
        # Messages know no hosts.
        self._clique = ranks_per_host if self.over_peers else 0
        # Here plans for NCCL's chunks are over peers, which makes the checks refuse them without a program.
        transport = Transport.NCCL if self.over_peers else transport
        self._kernel = kernel
        self._how = {"transport": transport, "max_ctas": max_ctas}
        self._of_panels = {"comm_sms": comm_sms, "tile": tile}
        self._scratch_rows = 0
        self._transfers = Transfers()
        gathers = problem.traits.gathers
        self._width = problem.k if gathers else problem.n
        tile_m = self._without_program(()).tile_m  # raises if there can be no such plan
        self._grain = 1 if problem.traits.rows_by_rank else max(1, tile_m)
        rows = problem.m
        if problem.traits.rows_by_rank:
            rows = MESSAGE_SHARES * self.world
        part = rows // problem.row_parts
        self.product = self._whole(Memory.PRODUCT, rows)
        self.output = self._whole(Memory.OUTPUT, part)
        self.input = self._whole(Memory.INPUT, part)
        self.gathered = self._whole(Memory.GATHERED, rows)
        self._data = self.gathered if gathers else self.product

    def __enter__(self) -> Editor:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    # --- areas ------------------------------------------------------------------------------------------------

    def chunks(self, count: int) -> list[Share]:
        """``count`` equal shares of each part's rows, for :meth:`part`."""
        if count < 1:
            raise ValueError(f"{count} chunks, allowed is 1 or more")
        return [Share(index, count) for index in range(count)]

    def part(self, index: AnyRank, share: Share | None = None) -> Area:
        """Rank ``index``'s rows (modulo the number of ranks) of the product, or of the gathered rows; or a share of them."""
        area = self._data.part(index, self.world)
        return area if share is None else area.chunk(share)

    def message(self, to: AnyRank, share: Share | None = None) -> Area:
        """For ``gemm_alltoall``: the rows that this rank sends to rank ``to``, or a share of them.
        They arrive where they belong."""
        if not self.problem.traits.rows_by_rank:
            raise ValueError(f"{self.problem.op.name.lower()} has no messages: take part()")
        return self.part(to, share)

    def scratch(self, rows: int) -> Area:
        """The program's own memory on each rank: ``rows`` rows, as wide as the rows that travel."""
        first = self._scratch_rows
        self._scratch_rows += rows
        return self._whole(Memory.SCRATCH, rows, first)

    # --- needs ------------------------------------------------------------------------------------------------

    def tiles(self, area: Area) -> Need:
        """The need that the source's tiles of the product in this area are computed."""
        return Tiles(area)

    def arrived(self, area: Area, at: AnyRank | None = None) -> Need:
        """The need that all transfers so far that write to this area are complete, on the rank that runs the transfer or on
        ``at``."""
        return self._earlier(self._transfers.writing, area, at)

    def left(self, area: Area, at: AnyRank | None = None) -> Need:
        """The need that all transfers so far that read this area are complete; the rank as in :meth:`arrived`."""
        return self._earlier(self._transfers.reading, area, at)

    # --- transfers --------------------------------------------------------------------------------------------

    def push(
        self,
        area: Area,
        *,
        to: AnyRank,
        into: Area | None = None,
        reduce: bool = False,
        needs: Sequence[Need] | None = None,
        by: Engine | str = Engine.ANY,
        stream: int = 0,
        rank: int | Iterable[int] | None = None,
    ) -> Need:
        """Each rank sends its ``area`` to ``into`` on rank ``to``; by default ``into`` is the same area.

        Args:
            reduce: adds to the data in ``into``, which must be computed or have arrived before.
            needs: the transfer waits for these: :meth:`tiles`, :meth:`arrived`, :meth:`left`, or an earlier
                transfer's return value. None: everything that its own reads and writes require.
            by: ``any``, ``copy_engine`` or ``nccl``. On CPU gloo moves everything.
            stream: 0 to 3; a rank's transfers of one stream run one after the other.
            rank: the rank or ranks that do this; None: all.

        Returns:
            A need: this transfer is complete.
        """
        return self._transfer(Way.PUSH, area, into, to, reduce, needs, by, stream, rank)

    def pull(
        self,
        area: Area,
        *,
        of: AnyRank,
        into: Area | None = None,
        reduce: bool = False,
        needs: Sequence[Need] | None = None,
        by: Engine | str = Engine.ANY,
        stream: int = 0,
        rank: int | Iterable[int] | None = None,
    ) -> Need:
        """Each rank fetches ``area`` of rank ``of`` into its own ``into``, by default the same place; else as :meth:`push`."""
        return self._transfer(Way.PULL, area, into, of, reduce, needs, by, stream, rank)

    def copy(
        self,
        area: Area,
        into: Area,
        *,
        reduce: bool = False,
        needs: Sequence[Need] | None = None,
        by: Engine | str = Engine.ANY,
        stream: int = 0,
        rank: int | Iterable[int] | None = None,
    ) -> Need:
        """Each rank copies one of its areas into another one, or adds it; else as :meth:`push`."""
        return self._transfer(Way.COPY, area, into, self.rank, reduce, needs, by, stream, rank)

    # --- the plan ---------------------------------------------------------------------------------------------

    def program(self) -> Program:
        """The transfers so far."""
        return Program(self._scratch_rows, self._transfers.all)

    def plan(self) -> Plan:
        """The plan whose chunks end where transfers wait for tiles.

        Raises:
            ValueError: the plan cannot run: it does not end, has a race, leaves rows out or adds them twice, or does not
                fit. The message names rank and step, or the transfer.
        """
        made = self._without_program(self._transfers.all)
        if self.over_peers:
            made.chunks = [Chunk(one.tiles, Transport.PEER, one.max_ctas) for one in made.chunks]
        made.program = self.program()
        made.clique = self._clique
        _plan.validate(made)
        return made

    # --- parts ------------------------------------------------------------------------------------------------

    def _without_program(self, transfers: Sequence[Transfer]) -> Plan:
        """The plan whose chunks end where these transfers wait for tiles."""
        problem, kernel = self.problem, self._kernel
        if problem.traits.rows_by_rank:
            return make_all_to_all(problem, kernel, **self._how)
        options = {"kernel": kernel, **self._how, **self._of_panels}
        if problem.op not in _COLLECTIVES:
            return row_panels(problem, 1, **options)
        # Its rows are one part for any op, because transfers name rows themselves.
        whole = Problem(problem.m, problem.n, problem.k, problem.dtype, problem.world_size)
        made = row_panels(whole, 1, **options)
        if cuts := _tile_cuts(made, transfers):
            edges = [0, *cuts, made.tiles_m]
            made = row_panels(whole, [b - a for a, b in itertools.pairwise(edges)], **options)
        made.problem = problem
        made.collective = _COLLECTIVES[problem.op]
        return made

    def _whole(self, memory: Memory, rows: int, first: int = 0) -> Area:
        return Area(memory, self._grain, lambda rank: (first, rows, 0, self._width))

    def _transfer(
        self,
        way: Way,
        area: Area,
        into: Area | None,
        other: AnyRank,
        reduce: bool,
        needs: Sequence[Need] | None,
        by: Engine | str,
        stream: int,
        ranks: int | Iterable[int] | None,
    ) -> Need:
        by = enum_member(Engine, by)
        made: list[Transfer] = []
        if ranks is None:
            ranks = range(self.world)
        for rank in [ranks] if isinstance(ranks, int) else ranks:
            peer = number_on(other, rank) % self.world
            source, destination = (peer, rank) if way == Way.PULL else (rank, peer)
            if source == destination and way != Way.COPY:
                continue  # a message that has no place
            read = Region(area.memory, source, area.at(rank))
            if self.problem.traits.rows_by_rank and into is None:
                # A share of a message arrives among the receiver's rows of its sender.
                row = source * MESSAGE_SHARES + read.area.row % MESSAGE_SHARES
                area_there = Rectangle(row, read.area.rows, read.area.column, read.area.columns)
                written = Region(Memory.OUTPUT, destination, area_there)
            else:
                place = area if into is None else into
                written = Region(place.memory, destination, place.at(rank))
            if read.area.rows == 0 or read.area.columns == 0:
                continue
            tiles, after = self._needs(read, written, needs, rank)
            made.append(Transfer(way, reduce, read, written, by, stream, tiles, after))
        ends = [(one.source.rank, one.destination.rank) for one in made]
        numbers = self._transfers.add(made)
        return Earlier(
            lambda rank: [n for n, ranks in zip(numbers, ends, strict=True) if rank in ranks]
        )

    def _needs(
        self, read: Region, written: Region, needs: Sequence[Need] | None, rank: int
    ) -> tuple[list[Rectangle], list[int]]:
        if needs is None:
            tiles = [read.area] if read.memory == Memory.PRODUCT else []
            return tiles, self._transfers.data_needs(read, written)
        tiles = []
        after: set[int] = set()
        for need in needs:
            if isinstance(need, Tiles):
                tiles.append(need.area.at(rank))
            elif isinstance(need, Earlier):
                after.update(need.numbers(rank))
            else:
                raise ValueError(
                    f"needs have {need!r}, allowed are tiles(), arrived(), left() and what a transfer returned"
                )
        return tiles, sorted(after)

    def _earlier(
        self, touching: Callable[[Region, int], Iterable[int]], area: Area, at: AnyRank | None
    ) -> Need:
        before = len(self._transfers.all)

        def found(rank: int) -> list[int]:
            where = rank if at is None else number_on(at, rank) % self.world
            return sorted(touching(Region(area.memory, where, area.at(rank)), before))

        return Earlier(found)


def _tile_cuts(plan: Plan, transfers: Sequence[Transfer]) -> list[int]:
    """Tile rows between chunks: the ends of the areas for whose tiles transfers wait."""
    areas = [area for one in transfers for area in one.tiles]
    areas += [one.destination.area for one in transfers if one.destination.memory == Memory.PRODUCT]
    tile, grain = plan.tile_m, plan.cluster_m
    cuts = set()
    for area in areas:
        cuts.add(area.row // (tile * grain) * grain)
        cuts.add(-(-(area.row + area.rows) // (tile * grain)) * grain)
    tile_rows = -(-plan.problem.m // tile)
    inner = sorted(cut for cut in cuts if 0 < cut < tile_rows)
    thin = -(-len(inner) // (MAX_CHUNKS - 1))
    return inner[thin - 1 :: thin] if thin > 1 else inner
