"""Queries, keys and values to the ranks that compute with them, and results home: one collective each way.

A message is rows of tokens, so that what arrives from ranks in order is the whole sequence, and a kernel reads its heads as
strided views of it. Rows are put in order by a copy only where ranks do not hold them in order (a zigzag), or send unlike rows
(head parts between 1 and the number of ranks).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from overlap_torch._attention.work import Rows, Share, part_of
from overlap_torch._ops import collectives
from overlap_torch._ops.composition import accumulated

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q, k, v of this rank's part, [B, T, h, D]
Later = Callable[[], torch.Tensor]
# The rows that came, in order: of all three in one tensor, of queries and of keys and values, or without queries.
Came = list[torch.Tensor]


def _send(flat: torch.Tensor, sent: Sequence[int], come: Sequence[int], group: str) -> Later:
    """Begins an all-to-all of numbers; the result waits for it."""
    begun = collectives.start_all_to_all(flat, sent, come, group)
    return lambda: collectives.wait(begun)


def _words(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor as numbers of 16 bytes, a view; None where it does not lie so."""
    each = 16 // tensor.element_size()
    whole = [tensor.storage_offset(), tensor.shape[-1], *tensor.stride()[:-1]]
    if tensor.stride(-1) != 1 or any(number % each for number in whole):
        return None
    if type(tensor) is torch.Tensor and tensor.data_ptr() % 16 != 0:
        return None
    return tensor.view(torch.complex128)


def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
    """Copies heads by 16 bytes: PyTorch copies strided tensors number by number, and finds each one's place."""
    wide, wide_source = _words(to), _words(source)
    if wide is None or wide_source is None:
        to.copy_(source)
    else:
        wide.copy_(wide_source)


def _joined(blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Blocks [T, B, h, D] of all heads, fresh [B, T, H, D]."""
    heads = sum(block.shape[2] for block in blocks)
    rows, batch, _, width = blocks[0].shape
    out, at = blocks[0].new_empty((batch, rows, heads, width)), 0
    for block in blocks:
        _copy(out[:, :, at : at + block.shape[2]], block.transpose(0, 1))
        at += block.shape[2]
    return out


def _fill(rows: torch.Tensor, heads: torch.Tensor) -> None:
    """Copies ``heads`` [B, T, H, D] into the columns of each part: ``rows`` [parts, T, B, h * D], one head for several parts too."""
    parts, own = rows.shape[0], heads.shape[2]
    rows = rows.unflatten(-1, (-1, heads.shape[-1]))
    if own % parts == 0:
        _copy(rows, heads.unflatten(2, (parts, own // parts)).permute(2, 1, 0, 3, 4))
    else:
        rows.unflatten(0, (own, parts // own)).copy_(heads.permute(2, 1, 0, 3)[:, None, :, :, None])


def _heads_of(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """[T, B, heads * D] to [B, T, heads, D], a view."""
    return rows.unflatten(-1, (heads, -1)).transpose(0, 1)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """With a last dim that lies together, as kernels want it."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _in_order(blocks: dict[int, torch.Tensor], order: Sequence[Rows]) -> torch.Tensor:
    """The ranks' rows in order of positions, one copy."""
    parts = [blocks[rows.rank][rows.begin : rows.end] for rows in order]
    return torch.cat(parts) if len(parts) != 1 else parts[0]


def _is_straight(order: Sequence[Rows]) -> bool:
    """True if whole ranks follow each other."""
    return [rows.rank for rows in order] == sorted({rows.rank for rows in order})


class Exchange:
    """The collectives of one call, for this rank's share.

    Args:
        share: what this rank computes.
        batch, width, value_width: B, D and Dv.
        group: the group's name.
    """

    def __init__(self, share: Share, batch: int, width: int, value_width: int, group: str) -> None:
        self.share, self.problem, self.group = share, share.problem, group
        self.batch, self.width, self.value_width = batch, width, value_width
        self.q_columns = len(share.heads) * width
        self.k_columns = len(share.kv_heads) * width
        self.v_columns = len(share.kv_heads) * value_width
        self.own = self.problem.numbers[share.rank]
        self.moves_queries = self.problem.parts > 1

    def _query_columns(self, rank: int) -> int:
        """The columns that a query's row adds to a message between this rank and ``rank``."""
        return self.q_columns if self.moves_queries and rank in self.share.sharing else 0

    def _query_sizes(self, columns: int) -> tuple[list[int], list[int]]:
        """Numbers in messages of queries' rows: for each rank those of this rank's, and those of the rank's own."""
        ranks = range(self.problem.ranks)
        shares = [columns if rank in self.share.sharing else 0 for rank in ranks]
        numbers = self.problem.numbers
        return self._sizes([self.own] * len(ranks), shares), self._sizes(numbers, shares)

    def _sizes(self, tokens: Sequence[int], columns: Sequence[int]) -> list[int]:
        return [n * self.batch * width for n, width in zip(tokens, columns, strict=True)]

    def start_in(
        self, q: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor
    ) -> Callable[[], Came]:
        """Begins to send this rank's tokens; with q None only keys and values. The result waits; :meth:`heads` reads what came."""
        problem, ranks = self.problem, self.problem.ranks
        parts, kv = problem.parts, self.k_columns + self.v_columns
        if ranks == 1:
            return lambda: []
        moves = self.moves_queries and q is not None
        columns = [(self._query_columns(rank) if moves else 0) + kv for rank in range(ranks)]
        if parts == 1 and len({*problem.numbers}) == 1:
            shard = k.new_empty((1, self.own, self.batch, kv))
            self._fill_keys(shard, k, v)
            begun = collectives.start_all_gather(shard[0], self.group, ranks)
            return lambda: self._arrived(collectives.wait(begun).view(-1), columns)
        sent = self._sizes([self.own] * ranks, columns)
        flat = k.new_empty(sum(sent))
        first, last = self.share.sharing.start, self.share.sharing.stop
        regions = [(0, first), (first, last), (last, ranks)] if moves else [(0, ranks)]
        for begin, end in regions:
            at = sum(sent[:begin])
            block = flat[at : at + sum(sent[begin:end])]
            block = block.view(
                (end - begin) // parts, parts, self.own, self.batch, columns[min(begin, ranks - 1)]
            )
            for one in block:
                self._fill_keys(one[..., -kv:], k, v)
            if moves and (begin, end) == (first, last):
                _fill(block[0][..., : self.q_columns], q)
        come = self._sizes(problem.numbers, columns)
        later = _send(flat, sent, come, self.group)
        return lambda: self._arrived(later(), columns)

    def _fill_keys(self, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        _fill(rows[..., : self.k_columns], k)
        _fill(rows[..., self.k_columns :], v)

    def _arrived(self, flat: torch.Tensor, columns: Sequence[int]) -> Came:
        share, kv = self.share, self.k_columns + self.v_columns
        if len({*columns}) == 1 and _is_straight(share.key_order):
            return [flat.view(share.total, self.batch, columns[0])]
        sizes = self._sizes(self.problem.numbers, columns)
        pairs = zip(flat.split(sizes), self.problem.numbers, columns, strict=True)
        blocks = {
            rank: one.view(n, self.batch, width) for rank, (one, n, width) in enumerate(pairs)
        }
        if len({*columns}) == 1:  # whole rows, in which queries are as the keys are
            return [_in_order(blocks, share.key_order)]
        keys = {rank: one[..., -kv:] for rank, one in blocks.items()}
        came = [_in_order(keys, share.key_order)]
        if columns[share.rank] > kv:
            own = {rank: blocks[rank][..., : self.q_columns] for rank in share.sharing}
            came.insert(0, _in_order(own, share.query_order))
        return came

    def heads(self, came: Came, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Heads:
        """This part's heads as views of what came, or this rank's own operands."""
        if not came:
            return _dense(q), _dense(k), _dense(v)
        keys = came[-1]
        if keys.shape[-1] > self.k_columns + self.v_columns:
            q = _heads_of(keys[..., : self.q_columns], len(self.share.heads))
            keys = keys[..., self.q_columns :]
        elif len(came) == 2:
            q = _heads_of(came[0], len(self.share.heads))
        else:
            q = _dense(q)
        heads = len(self.share.kv_heads)
        k, v = keys[..., : self.k_columns], keys[..., self.k_columns :]
        return q, _heads_of(k, heads), _heads_of(v, heads)

    def _own_rows(self, tensor: torch.Tensor) -> dict[int, list[torch.Tensor]]:
        """``tensor`` [T, ...] of the queries here, by the rank that they are of, each in that rank's order."""
        found: dict[int, list[torch.Tensor]] = {rank: [] for rank in self.share.sharing}
        at = 0
        for rows in self.share.query_order:
            found[rows.rank].append(tensor[at : at + rows.end - rows.begin])
            at += rows.end - rows.begin
        return found

    def results_home(self, o: torch.Tensor) -> torch.Tensor:
        """``o`` [B, T, h, Dv] of the queries here to their ranks: this rank's [B, T, H, Dv], fresh."""
        if not self.moves_queries:
            return o.contiguous()
        share, rows = self.share, o.transpose(0, 1)
        if not _is_straight(share.query_order):
            rows = torch.cat([part for parts in self._own_rows(rows).values() for part in parts])
        come, sent = self._query_sizes(len(share.heads) * self.value_width)
        home = _send(rows.reshape(-1), sent, come, self.group)()
        shape = (len(share.sharing), self.own, self.batch, len(share.heads), self.value_width)
        return _joined(home.view(shape).unbind(0))

    def start_grad(self, grad: torch.Tensor) -> Later:
        """Begins to send the output's gradient the way of the queries; the result waits: [B, T, h, Dv] of the queries here."""
        if not self.moves_queries:
            return lambda: grad.contiguous()
        share, columns = self.share, len(self.share.heads) * self.value_width
        rows = grad.new_empty((len(share.sharing), self.own, self.batch, columns))
        _fill(rows, grad)
        later = _send(rows.view(-1), *self._query_sizes(columns), self.group)

        def arrived() -> torch.Tensor:
            came = later().view(share.rows, self.batch, columns)
            if not _is_straight(share.query_order):
                counts = [self.problem.numbers[rank] for rank in share.sharing]
                blocks = dict(zip(share.sharing, came.split(counts), strict=True))
                came = _in_order(blocks, share.query_order)
            return _heads_of(came, len(share.heads))

        return arrived

    def gradients_home(self, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> Heads:
        """The gradients of the queries here and this rank's terms of all keys' and values' to their ranks, where terms are summed.

        Sums are in float32 (float64 of float64), in rank order.
        """
        share, numbers, ranks = self.share, self.problem.numbers, self.problem.ranks
        if ranks == 1:
            return dq, dk, dv
        columns = [
            self._query_columns(rank) + self.k_columns + self.v_columns for rank in range(ranks)
        ]
        queries = self._own_rows(dq.transpose(0, 1)) if self.moves_queries else {}
        found = [queries.get(rank, []) for rank in range(ranks)]
        keys, values, at = [[] for _ in found], [[] for _ in found], 0
        for rows in share.key_order:
            for tensor, lists in ((dk, keys), (dv, values)):
                lists[rows.rank].append(tensor[:, at : at + rows.end - rows.begin].transpose(0, 1))
            at += rows.end - rows.begin
        pieces = [
            piece for rank in range(ranks) for one in (found, keys, values) for piece in one[rank]
        ]
        flat = dk.new_empty(sum(piece.numel() for piece in pieces))
        places = flat.split([piece.numel() for piece in pieces]) if pieces else ()
        for place, piece in zip(places, pieces, strict=True):
            _copy(place.view(piece.shape), piece)
        come = self._sizes([self.own] * ranks, columns)
        arrived = _send(flat, self._sizes(numbers, columns), come, self.group)().split(come)
        if self.moves_queries:
            size = self.own * self.batch * self.q_columns
            shape = (self.own, self.batch, len(share.heads), self.width)
            blocks = [arrived[rank][:size].view(shape) for rank in share.sharing]
            dq = _joined(blocks)
        return dq, *self._summed(arrived)

    def _summed(self, arrived: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The sums of the terms that came for this rank's keys and values."""
        problem, results = self.problem, []
        alone = problem.parts == problem.ranks and problem.kv_heads % problem.parts == 0
        for width, behind in ((self.width, self.v_columns), (self.value_width, 0)):
            size = self.own * self.batch * len(self.share.kv_heads) * width
            skip = self.own * self.batch * behind
            terms = [one[one.numel() - skip - size : one.numel() - skip] for one in arrived]
            shape = (self.own, self.batch, len(self.share.kv_heads), width)
            terms = [one.view(shape) for one in terms]
            if alone:  # each head has one term
                results.append(_joined(terms))
                continue
            wide = accumulated(terms[0].dtype)
            total = terms[0].new_zeros((self.own, self.batch, problem.kv_heads, width), dtype=wide)
            for rank, term in enumerate(terms):
                heads = part_of(problem.kv_heads, problem.parts, rank % problem.parts)
                total[:, :, heads.start : heads.stop] += term
            total = total.to(terms[0].dtype)
            results.append(total.transpose(0, 1).contiguous())
        return results[0], results[1]
