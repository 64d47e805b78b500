"""A rank's share of an attention: whose heads and queries it computes, by which calls of a kernel. Host integers only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from overlap_torch._attention.cuts import Span, spans_of_ranks


class Problem(NamedTuple):
    """An attention as all ranks know it.

    ``window`` and ``causal`` are one band: a query at position p sees keys from p - left to p + right; None is no bound.
    ``parts`` are head parts: neighbouring ranks share their queries' heads, and each computes a part of them.
    """

    numbers: tuple[int, ...]  # each rank's tokens
    zigzag: bool
    heads: int
    kv_heads: int
    left: int | None
    right: int | None
    documents: tuple[int, ...]
    parts: int

    @property
    def ranks(self) -> int:
        return len(self.numbers)

    @property
    def adds_terms(self) -> bool:
        """True if several ranks compute with a key/value head, whose gradient is then the sum of their terms."""
        return self.parts != self.ranks or self.kv_heads % self.parts != 0


class Piece(NamedTuple):
    """Positions of queries of one document, and of the keys that they see; the band is aligned at the lower right.

    So row i of n queries sees column j of m keys where ``-left <= j - i - (m - n) <= right``.
    """

    queries: Span
    keys: Span
    left: int | None
    right: int | None

    @property
    def area(self) -> int:
        """About how many pairs of a query and a key are computed."""
        rows, columns = self.queries[1] - self.queries[0], self.keys[1] - self.keys[0]
        if self.right == 0:
            return rows * columns - rows * (rows - 1) // 2
        return rows * columns


@dataclass(frozen=True)
class AttentionWork:
    """The part of an attention that one call of a kernel computes, beside its tensors.

    Attributes:
        heads, kv_heads: the query heads and key/value heads, numbered over the whole model.
        queries, keys: first and last + 1 position in the whole sequence of this call's rows.
        causal: True if a query sees no later key. Queries and keys end together: the mask is aligned at the lower right.
        window: (left, right), as flash attention's ``window_size``, aligned at the lower right; -1 is no bound. None: no
            window beside ``causal``.
        scale: the factor of the products of queries and keys.
        query_ends, key_ends: where each document's rows end in this call, host integers; empty without documents. A kernel
            that takes no ``documents`` gets one call for each and never sees them.
        per_head: the slices ``[heads, ...]`` of the call's ``per_head``.
    """

    heads: range
    kv_heads: range
    queries: Span
    keys: Span
    causal: bool
    window: tuple[int, int] | None
    scale: float
    query_ends: tuple[int, ...] = ()
    key_ends: tuple[int, ...] = ()
    per_head: tuple[torch.Tensor, ...] = field(default=(), compare=False)

    def cu_seqlens(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        """The starts of the documents' queries and keys with their ends, int32 on ``device``, and the longest of each."""
        starts = [_on_device(ends, device) for ends in (self.query_ends, self.key_ends)]
        return *starts, _longest(self.query_ends), _longest(self.key_ends)


def _longest(ends: tuple[int, ...]) -> int:
    return max(end - begin for begin, end in zip((0, *ends), ends, strict=False))


@functools.lru_cache(maxsize=64)
def _kept_on_device(ends: tuple[int, ...], device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor([0, *ends], dtype=torch.int32, device=device)


_of_graphs: dict[tuple, torch.Tensor] = {}  # CUDA graphs read them as long as the process lives


def _on_device(ends: tuple[int, ...], device: torch.device) -> torch.Tensor:
    if torch._C._len_torch_dispatch_stack() > 0:  # a compiler's fakes are not kept
        return _kept_on_device.__wrapped__(ends, device)
    kept = _kept_on_device(ends, device)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _of_graphs[ends, device] = kept
    return kept


class Rows(NamedTuple):
    """A run of one rank's rows."""

    rank: int
    begin: int
    end: int


@dataclass(frozen=True)
class Share:
    """A rank's part in a :class:`Problem`.

    ``sharing``: the ranks whose queries come together here, this one's neighbours. ``query_order``, ``key_order``: their rows in
    order of positions. ``runs``: the pieces of each run of adjacent queries.
    """

    problem: Problem
    rank: int
    part: int
    sharing: range
    query_order: tuple[Rows, ...]
    key_order: tuple[Rows, ...]
    runs: tuple[tuple[Piece, ...], ...]

    @property
    def rows(self) -> int:
        """The number of queries that come together here."""
        return sum(self.problem.numbers[rank] for rank in self.sharing)

    @property
    def total(self) -> int:
        return sum(self.problem.numbers)

    @property
    def heads(self) -> range:
        return part_of(self.problem.heads, self.problem.parts, self.part)

    @property
    def kv_heads(self) -> range:
        return part_of(self.problem.kv_heads, self.problem.parts, self.part)


def part_of(heads: int, parts: int, part: int) -> range:
    """The heads of a part; of fewer heads than parts the one that several parts share."""
    if heads % parts == 0:
        own = heads // parts
        return range(part * own, (part + 1) * own)
    head = part // (parts // heads)
    return range(head, head + 1)


class Chunk(NamedTuple):
    """Heads that a kernel's call computes, counted within a rank's part."""

    heads: range
    kv_heads: range
    brings_keys: bool  # the first of the chunks with these keys

    def of(self, queries: bool) -> range:
        return self.heads if queries else self.kv_heads


def cut_heads(heads: int, kv_heads: int, count: int) -> tuple[Chunk, ...]:
    """``count`` runs of whole key/value heads, or, of one such head, of its query heads; the first are the smallest."""
    units = kv_heads if kv_heads > 1 else heads
    bounds = [units * i // count for i in range(count + 1)]
    runs = [range(*pair) for pair in zip(bounds, bounds[1:], strict=False)]
    if kv_heads == 1:
        return tuple(Chunk(run, range(1), run.start == 0) for run in runs)
    group = heads // kv_heads
    return tuple(Chunk(range(run.start * group, run.stop * group), run, True) for run in runs)


def one_band(run: tuple[Piece, ...]) -> bool:
    """True if one band serves all pieces, so that a kernel may take them in one call."""
    return all(piece[2:] == run[0][2:] for piece in run)


def parts_allowed(ranks: int, heads: int, kv_heads: int) -> list[int]:
    """The numbers of head parts that ranks and heads allow: divisors of both, with whole key/value heads or one for several."""
    return [
        parts
        for parts in range(1, ranks + 1)
        if ranks % parts == 0
        and heads % parts == 0
        and (kv_heads % parts == 0 or parts % kv_heads == 0)
    ]


def _in_order(ranks: range, spans: tuple[tuple[Span, ...], ...]) -> list[tuple[Span, Rows]]:
    """The positions of the ranks' rows, in order, and whose they are."""
    found = []
    for rank in ranks:
        at = 0
        for begin, end in spans[rank]:
            if end > begin:
                found.append(((begin, end), Rows(rank, at, at + end - begin)))
            at += end - begin
    return sorted(found)


def _pieces(run: Span, problem: Problem, total: int) -> tuple[Piece, ...]:
    """The parts of a run of queries that lie in one document each."""
    found, end = [], 0
    for length in problem.documents or (total,):
        begin, end = end, end + length
        first, last = max(begin, run[0]), min(end, run[1])
        if first >= last:
            continue
        left, right = problem.left, problem.right
        keys_begin = begin if left is None else max(begin, first - left)
        keys_end = end if right is None else min(end, last + right)
        beyond = keys_end - last  # the keys end this much later than the queries
        found.append(
            Piece(
                (first, last),
                (keys_begin, keys_end),
                None if left is None else left + beyond,
                None if right is None else right - beyond,
            )
        )
    return tuple(found)


@functools.lru_cache(maxsize=256)
def share_of(problem: Problem, rank: int) -> Share:
    spans = spans_of_ranks(problem.numbers, problem.zigzag)
    first = rank // problem.parts * problem.parts
    sharing = range(first, first + problem.parts)
    queries = _in_order(sharing, spans)
    runs: list[Span] = []
    for (begin, end), _ in queries:
        if runs and runs[-1][1] == begin:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((begin, end))
    total = sum(problem.numbers)
    return Share(
        problem,
        rank,
        rank - first,
        sharing,
        tuple(rows for _, rows in queries),
        tuple(rows for _, rows in _in_order(range(problem.ranks), spans)),
        tuple(_pieces(run, problem, total) for run in runs),
    )


def work_of(share: Share, pieces: tuple[Piece, ...], scale: float) -> AttentionWork:
    """The work of one call: of several documents, or of one piece, whose band is left out where it hides nothing."""
    queries = (pieces[0].queries[0], pieces[-1].queries[1])
    keys = (pieces[0].keys[0], pieces[-1].keys[1])
    left, right, ends = pieces[0].left, pieces[0].right, ((), ())
    if len(pieces) > 1:
        ends = (
            tuple(piece.queries[1] - queries[0] for piece in pieces),
            tuple(piece.keys[1] - keys[0] for piece in pieces),
        )
    else:
        rows, columns = queries[1] - queries[0], keys[1] - keys[0]
        left = None if left is None or left >= columns - 1 else left
        right = None if right is None or right >= rows - 1 else right
    causal = right == 0
    window = None
    if left is not None or right not in (None, 0):
        window = (-1 if left is None else left, -1 if right is None else right)
    heads = (share.heads, share.kv_heads)
    return AttentionWork(*heads, queries, keys, causal, window, scale, *ends)


def seconds(
    problem: Problem,
    width: int,
    value_width: int,
    item: int,
    backward: bool,
    is_slow: Callable[[AttentionWork], bool],
) -> float:
    """The expected time of an attention's bytes and of the slowest rank's products, one after the other, for a choice of parts.

    ``width``, ``value_width``: sizes of a query's and a value's head; ``item``: bytes of a number. ``is_slow`` says which calls
    the fastest kernel does not take. They cost twice as much: flash attention takes twice cuDNN's time on Hopper. The rates
    are round numbers for GPUs of one host.
    """
    ranks, parts = problem.ranks, problem.parts
    tokens = max(problem.numbers)
    keys = max(problem.kv_heads, parts) * (ranks - 1) / parts * (width + value_width)
    queries = problem.heads * (parts - 1) / parts * (width + value_width)
    passes = 1 if not backward else 2 if parts == ranks else 3
    moved = tokens * item * (queries * (2 if backward else 1) + keys * passes)
    areas = []
    for rank in range(0, ranks, parts):
        share = share_of(problem, rank)
        works = [(sum(piece.area for piece in run), work_of(share, run, 1.0)) for run in share.runs]
        areas.append(sum(area * (2 if is_slow(work) else 1) for area, work in works))
    products = 2 * max(areas) * problem.heads / parts * (width + value_width)
    return moved / 300e9 + products * (3.5 if backward else 1) / 500e12
