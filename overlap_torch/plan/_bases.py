"""The plan around a program: how it computes, and where its chunks end."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from overlap_torch._plan import (
    MAX_CHUNKS,
    Collective,
    Kernel,
    Memory,
    Op,
    Plan,
    Problem,
    Transfer,
    Transport,
)
from overlap_torch.plan.templates import make_all_to_all, row_panels

_COLLECTIVES = {
    Op.GEMM_ALLREDUCE: Collective.ALL_REDUCE,
    Op.GEMM_REDUCESCATTER: Collective.REDUCE_SCATTER,
}


@dataclass(frozen=True)
class Base:
    """The fields that all plans of one program share, and the plan without its program."""

    problem: Problem
    tile: tuple[int, int] | None
    kernel: Kernel
    transport: Transport | str | None
    comm_sms: int
    max_ctas: int

    def plan(self, transfers: Sequence[Transfer] = ()) -> Plan:
        """The plan whose chunks end where these transfers wait for tiles."""
        problem = self.problem
        if problem.op == Op.GEMM_ALLTOALL:
            return make_all_to_all(
                problem, self.kernel, max_ctas=self.max_ctas, transport=self.transport
            )
        options = {
            "kernel": self.kernel,
            "transport": self.transport,
            "comm_sms": self.comm_sms,
            "max_ctas": self.max_ctas,
            "tile": self.tile,
        }
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
