"""Common programs for any op: rings, one and two shots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from overlap_torch._plan import Plan, Problem
from overlap_torch.plan._editor import Area, Editor, Share


def ring(problem: Problem, chunks: int = 1, **how: Any) -> Plan:
    """Each rank sends only to the next one: first partial sums go round, and each rank adds its own; then results go round.

    Args:
        chunks: the number of pieces of each rank's part of the rows, which go round one after the other.
        how: ``tile``, ``kernel``, ``transport``, ``comm_sms``, ``max_ctas`` and ``ranks_per_host`` as in
            ``plan.programs.edit``.

    Raises:
        ValueError: ``gemm_alltoall``, because only sender and receiver know its rows; or a plan that cannot run.
    """
    p = _editor("ring", problem, how)
    for share in p.chunks(chunks):
        _once_round(p, share, 1, 0)
    return p.plan()


def double_ring(problem: Problem, chunks: int = 1, **how: Any) -> Plan:
    """Two rings at a time, one in each direction, each on its own stream with half of the rows; otherwise as :func:`ring`.
    ``chunks`` counts for each direction."""
    p = _editor("double_ring", problem, how)
    for share in p.chunks(2 * chunks):
        backwards = share.index % 2
        _once_round(p, share, -1 if backwards else 1, backwards)
    return p.plan()


def one_shot(problem: Problem, chunks: int = 1, **how: Any) -> Plan:
    """One step: each rank sends all other ranks the rows that they need, and each rank adds up. The fewest steps; for sums
    the most bytes.

    ``chunks``: the number of pieces of each message. The rest is as in :func:`ring`. It serves all four ops.
    """
    p = Editor(problem, **how)
    for share in p.chunks(chunks):
        if problem.traits.all_reduces:
            _sum_of_all(p, [p.product.chunk(share)] * p.world, p.output.chunk(share))
        elif problem.traits.scatters:
            parts = [p.part(rank, share) for rank in range(p.world)]
            _sum_of_all(p, parts, p.output.chunk(share))
        else:
            for distance in range(1, p.world):  # to the next rank first
                to = p.rank + distance
                sends_to_one = problem.traits.rows_by_rank
                p.push(p.message(to, share) if sends_to_one else p.part(p.rank, share), to=to)
    return p.plan()


def two_shot(problem: Problem, chunks: int = 1, **how: Any) -> Plan:
    """Two steps: each rank adds up its part of all ranks' rows, and then sends the sums to all. Ops that need only one of
    the two steps take one, as in :func:`one_shot`."""
    if not problem.traits.all_reduces:
        return one_shot(problem, chunks, **how)
    p = Editor(problem, **how)
    for share in p.chunks(chunks):
        parts = [p.part(rank, share) for rank in range(p.world)]
        results = [p.output.part(rank, p.world).chunk(share) for rank in range(p.world)]
        _sum_of_all(p, parts, p.output.part(p.rank, p.world).chunk(share))
        for distance in range(1, p.world):
            for rank in range(p.world):
                p.push(results[rank], to=(rank + distance) % p.world, rank=rank)
    return p.plan()


# --- parts ----------------------------------------------------------------------------------------------------


def _editor(name: str, problem: Problem, how: dict[str, Any]) -> Editor:
    if problem.traits.rows_by_rank:
        raise ValueError(
            f"{name} does not take gemm_alltoall, whose rows go straight to their rank: take one_shot"
        )
    return Editor(problem, **how)


def _once_round(p: Editor, share: Share, step_to: int, stream: int) -> None:
    """A ring to the next rank (1) or the previous one (-1): sums, then results, if the op has them."""
    to = p.rank + step_to
    if not p.problem.traits.gathers:
        for step in range(1, p.world):
            part = p.part(p.rank - step * step_to, share)
            needs = [p.tiles(part), p.arrived(part)]
            p.push(part, to=to, reduce=True, needs=needs, by="any", stream=stream)
    if not p.problem.traits.scatters:
        for step in range(p.world - 1):
            p.push(p.part(p.rank - step * step_to, share), to=to, stream=stream)


def _sum_of_all(p: Editor, terms: Sequence[Area], result: Area) -> None:
    """Adds all ranks' ``terms[rank]`` to that rank's result, in the ranks' order, so that all ranks make equal sums."""
    height = max(area.at(0).rows for area in terms)
    slots = [p.scratch(height) for _ in range(p.world - 1)]  # of the ranks after this one
    for distance in range(1, p.world):
        for rank in range(p.world):
            to = (rank + distance) % p.world
            rows = terms[to].at(rank).rows
            slot = slots[(rank - to) % p.world - 1]
            p.push(terms[to], to=to, into=slot.rows(0, rows), rank=rank)
    for rank in range(p.world):
        rows = terms[rank].at(rank).rows
        for source in range(p.world):
            slot = slots[(source - rank) % p.world - 1].rows(0, rows)
            term = terms[rank] if source == rank else slot
            p.copy(term, result, reduce=source > 0, rank=rank)
