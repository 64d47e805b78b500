"""Queries, keys and values to the ranks that compute with them, and results home: one collective each way, or one for each chunk.

A message is rows of tokens, so that what arrives from ranks in order is the whole sequence, and a kernel reads its heads as
strided views of it. Rows are put in order by a copy only where ranks do not hold them in order (a zigzag), or send unlike rows
(head parts between 1 and the number of ranks).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from overlap_torch._attention.kernels import Form
from overlap_torch._attention.work import Chunk, Rows, Share, cut_heads, part_of
from overlap_torch._ops import collectives
from overlap_torch._ops.composition import accumulated

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q, k, v of this rank's part, [B, T, h, D]
Later = Callable[[], torch.Tensor]
# The rows that came, in order: of all three in one tensor, of queries and of keys and values, or without queries.
Came = list[torch.Tensor]
_WORD = 16  # bytes


def _send(flat: torch.Tensor, sent: Sequence[int], come: Sequence[int], group: str) -> Later:
    """Begins an all-to-all of numbers; the result waits for it."""
    begun = collectives.start_all_to_all(flat, sent, come, group)
    return lambda: collectives.wait(begun)


def _words(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """The tensors as numbers of 16 bytes, views, if all lie so; else as they are.

    PyTorch copies strided tensors number by number, and finds each one's place.
    """
    each = _WORD // tensors[0].element_size()
    for tensor in tensors:
        *steps, last = tensor.stride()
        if last != 1 or tensor.shape[-1] % each or tensor.storage_offset() % each:
            return tensors
        if any([step % each for step in steps]):
            return tensors
        if type(tensor) is torch.Tensor and tensor.data_ptr() % _WORD:
            return tensors
    return [tensor.view(torch.complex128) for tensor in tensors]


def _beside(tensors: Sequence[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
    """Several tensors' heads [..., h, D] beside each other in each row, fresh or into ``out`` [..., columns], by one operation."""
    width = tensors[0].shape[-1]
    if all([tensor.shape[-1] == width for tensor in tensors]):
        return torch.cat(tensors, -2, out=out if out is None else out.unflatten(-1, (-1, width)))
    return torch.cat([tensor.flatten(-2) for tensor in tensors], -1, out=out)


def _heads_of(rows: torch.Tensor, first: int, heads: int, width: int) -> torch.Tensor:
    """The columns of [T, B, columns] from ``first`` on as [B, T, heads, width], a view."""
    (count, batch, _), (row, sequence, _) = rows.shape, rows.stride()
    at = rows.storage_offset() + first
    return rows.as_strided((batch, count, heads, width), (sequence, row, width, 1), at)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its last dim contiguous, as kernels want it."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def sums_of_terms(result: torch.Tensor, terms: Sequence[torch.Tensor], parts: int) -> torch.Tensor:
    """``result`` [B, T, H, D], filled with sums of the ranks' terms [B, T, heads of their part, D]: in float32 (float64 of float64), in rank order."""
    sums: dict[range, torch.Tensor] = {}
    for rank, term in enumerate(terms):
        heads = part_of(result.shape[2], parts, rank % parts)
        if heads in sums:
            sums[heads] += term
        else:
            sums[heads] = term.to(accumulated(term.dtype), copy=True)
    for heads, total in sums.items():
        result[:, :, heads.start : heads.stop] = total
    return result


class _Runs:
    """Runs of ranks' rows in order of positions, and the same in order of ranks."""

    def __init__(self, order: Sequence[Rows]) -> None:
        self.by_rank = sorted(order)
        self.straight = self.by_rank == [*order]
        self.sizes, self.sizes_by_rank = (
            [rows.end - rows.begin for rows in runs] for runs in (order, self.by_rank)
        )
        self.places = [self.by_rank.index(rows) for rows in order]
        self.places_by_rank = [order.index(rows) for rows in self.by_rank]

    def in_order(self, rows: torch.Tensor) -> torch.Tensor:
        """The ranks' rows, one rank's after the other's, in order of positions."""
        if self.straight:
            return rows
        runs = rows.split(self.sizes_by_rank)
        return torch.cat([runs[place] for place in self.places])

    def together(self, blocks: Sequence[torch.Tensor], first: int = 0) -> torch.Tensor:
        """The same for one block of rows from each rank, beginning with rank ``first``: one copy."""
        runs = [blocks[rows.rank - first][rows.begin : rows.end] for rows in self.by_rank]
        return torch.cat([runs[place] for place in self.places]) if runs else blocks[0]

    def of_ranks(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Runs of rows that lie in order of positions, in order of ranks."""
        runs = rows.split(self.sizes)
        return [runs[place] for place in self.places_by_rank]


class Exchange:
    """The collectives of calls alike, for this rank's share.

    Args:
        share: what this rank computes.
        form: B and the sizes of heads.
        group: the group's name.
        chunk: the heads of each part, as they are counted within it, that this exchange brings; None: all.
    """

    def __init__(self, share: Share, form: Form, group: str, chunk: Chunk | None = None) -> None:
        self.share, self.problem, self.group = share, share.problem, group
        self.batch, self.width, self.value_width = form.batch, form.width, form.value_width
        (whole,) = cut_heads(len(share.heads), len(share.kv_heads), 1)
        self.chunk: Chunk = chunk or whole
        self.is_whole = self.chunk == whole
        heads, kv_heads = len(self.chunk.heads), len(self.chunk.kv_heads)
        self.q_columns, self.k_columns = heads * self.width, kv_heads * self.width
        self.kv_columns = self.k_columns + kv_heads * self.value_width
        self.tokens = self.problem.numbers[share.rank]
        self.moves_queries = self.problem.parts > 1
        self.keys, self.queries = _Runs(share.key_order), _Runs(share.query_order)
        # The numbers of a row in messages with each rank, and of whole messages.
        ranks = range(self.problem.ranks)
        shares = [self.moves_queries and rank in share.sharing for rank in ranks]
        self.columns = [self.kv_columns + self.q_columns * one for one in shares]
        self.sizes = self._sizes(self.columns)
        self.key_sizes = self._sizes([self.kv_columns for _ in ranks])
        self.result_sizes = self._sizes([heads * self.value_width * one for one in shares])
        self.alike = len({*self.columns}) == 1

    def _sizes(self, columns: Sequence[int]) -> tuple[list[int], list[int]]:
        """Numbers in messages: with each rank, of this rank's rows, and of that rank's own rows."""
        pairs = zip(self.problem.numbers, columns, strict=True)
        own = [self.tokens * self.batch * width for width in columns]
        return own, [rows * self.batch * width for rows, width in pairs]

    def _by_part(self, tensor: torch.Tensor, run: range) -> torch.Tensor:
        """[B, T, H, D] as [groups, parts / groups, T, B, h, D], a run of the heads of each part, a view; fewer heads than parts are a group's.

        Dims of 1 are left out, as torch.cat is one kernel up to four dims.
        """
        parts, groups = self.problem.parts, min(self.problem.parts, self.problem.kv_heads)
        (batch, rows, heads, width), (sequence, row, head, number) = tensor.shape, tensor.stride()
        own, step = max(heads // parts, 1), heads // groups * head
        shape, strides = [groups, rows, len(run), width], [step, row, head, number]
        if batch != 1:
            shape.insert(2, batch)
            strides.insert(2, sequence)
        if parts > groups:
            shape.insert(1, parts // groups)
            strides.insert(1, own * head if heads >= parts else 0)
        return tensor.as_strided(shape, strides, tensor.storage_offset() + run.start * head)

    def own(self, tensor: torch.Tensor, run: range) -> torch.Tensor:
        """A run of heads of a tensor [B, T, H, D] that does not travel."""
        return _dense(tensor if self.is_whole else tensor.narrow(2, run.start, len(run)))

    def start_in(
        self, q: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor
    ) -> Callable[[], Came]:
        """Begins to send this rank's tokens; with q None only keys and values. The result waits; :meth:`heads` reads what came."""
        problem, ranks = self.problem, self.problem.ranks
        if ranks == 1:
            return lambda: []
        moves = self.moves_queries and q is not None
        tensors = _words(*((q, k, v) if moves else (k, v)))
        queries, keys = self.chunk.heads, self.chunk.kv_heads
        runs = (queries, keys, keys) if moves else (keys, keys)
        laid = [self._by_part(*pair) for pair in zip(tensors, runs, strict=True)]
        flat = _beside(laid).view(k.dtype)
        if problem.parts == 1 and len({*problem.numbers}) == 1:
            shard = flat.view(self.tokens, self.batch, self.kv_columns)
            begun = collectives.start_all_gather(shard, self.group)
            return lambda: self._arrived(collectives.wait(begun), self.kv_columns)
        if problem.parts < ranks:
            messages = [_beside(laid[1:]).view(k.dtype) if moves else flat]
            messages *= ranks // problem.parts
            messages[self.share.rank // problem.parts] = flat
            flat = torch.cat([one.view(-1) for one in messages])
        later = _send(flat.view(-1), *(self.sizes if moves else self.key_sizes), self.group)
        columns = self.kv_columns if not moves else self.columns[0] if self.alike else None
        return lambda: self._arrived(later(), columns)

    def _arrived(self, flat: torch.Tensor, columns: int | None) -> Came:
        """The rows in order of positions; ``columns``: those of a row in all messages, if they are alike."""
        share, kv = self.share, self.kv_columns
        if columns is not None:  # whole rows, in which queries are as the keys are
            return [self.keys.in_order(flat.view(share.total, self.batch, columns))]
        pairs = zip(flat.split(self.sizes[1]), self.columns, strict=True)
        blocks = [one.view(-1, self.batch, columns) for one, columns in pairs]
        own = [blocks[rank][..., : self.q_columns] for rank in share.sharing]
        keys = [one[..., -kv:] for one in blocks]
        return [self.queries.together(own, share.sharing.start), self.keys.together(keys)]

    def heads(self, came: Came, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Heads:
        """This part's heads as views of what came, or this rank's own operands."""
        queries, keys = self.chunk.heads, self.chunk.kv_heads
        if not came:
            return self.own(q, queries), self.own(k, keys), self.own(v, keys)
        rows, heads = came[-1], len(keys)
        at = rows.shape[2] - self.kv_columns
        if at > 0 or len(came) == 2:
            q = _heads_of(came[0], 0, len(queries), self.width)
        else:
            q = self.own(q, queries)
        k = _heads_of(rows, at, heads, self.width)
        return q, k, _heads_of(rows, at + self.k_columns, heads, self.value_width)

    def _assembled(self, flat: torch.Tensor, columns: int, first: int, heads: int, width: int):
        """All parts' heads, fresh [B, T, H, D], out of messages of this rank's rows; a part's are in the columns from ``first`` on."""
        each, at = _WORD // flat.element_size(), flat.storage_offset()
        rows, dtype = self.batch * columns, flat.dtype
        if not any([number % each for number in (columns, first, width, at)]):
            flat, at = flat.view(torch.complex128), at // each
            rows, columns, first, width = (one // each for one in (rows, columns, first, width))
        shape = (self.batch, self.tokens, self.problem.parts, heads, width)
        parts = flat.as_strided(shape, (columns, rows, self.tokens * rows, width, 1), at + first)
        return parts.clone(memory_format=torch.contiguous_format).flatten(2, 3).view(dtype)

    def start_home(self, o: torch.Tensor) -> Later:
        """Begins to send ``o`` [B, T, h, Dv] of the queries here to their ranks; the result waits: this rank's [B, T, H, Dv], fresh."""
        if not self.moves_queries:
            return lambda: o.contiguous()
        rows = _words(o)[0].transpose(0, 1)
        if not self.queries.straight:
            rows = torch.cat(self.queries.of_ranks(rows))
        come, sent = self.result_sizes
        later = _send(rows.reshape(-1).view(o.dtype), sent, come, self.group)
        heads = len(self.chunk.heads)
        columns = heads * self.value_width
        return lambda: self._assembled(later(), columns, 0, heads, self.value_width)

    def start_grad(self, grad: torch.Tensor) -> Later:
        """Begins to send the output's gradient the way of the queries; the result waits: [B, T, h, Dv] of the queries here."""
        run = self.chunk.heads
        if not self.moves_queries:
            return lambda: self.own(grad, run).contiguous()
        flat = self._by_part(_words(grad)[0], run).reshape(-1).view(grad.dtype)
        later, heads = _send(flat, *self.result_sizes, self.group), len(run)

        def arrived() -> torch.Tensor:
            rows = later().view(self.share.rows, self.batch, heads * self.value_width)
            return _heads_of(self.queries.in_order(rows), 0, heads, self.value_width)

        return arrived

    def start_gradients(
        self, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor
    ) -> Callable[[], Heads]:
        """Begins to send the gradients of the queries here and this rank's terms of all keys' and values' to their ranks.

        The result waits, and adds the terms up, in float32 (float64 of float64), in rank order.
        """
        if self.problem.ranks == 1:
            return lambda: (dq, dk, dv)
        grads = _words(*((dq, dk, dv) if self.moves_queries else (dk, dv)))
        rows = [one.transpose(0, 1) for one in grads]
        whole = self.alike and self.keys.straight
        flat = (_beside(rows) if whole else self._by_runs(rows)).view(dk.dtype).view(-1)
        come, sent = self.sizes
        later = _send(flat, sent, come, self.group)

        def arrived() -> Heads:
            numbers, query = later(), dq
            if self.moves_queries:
                mine = numbers[sum(come[: self.share.sharing.start]) :]
                columns, heads = self.columns[self.share.rank], len(self.chunk.heads)
                query = self._assembled(mine, columns, 0, heads, self.width)
            return query, *self._summed(numbers)

        return arrived

    def _by_runs(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Rows [T, B, h, D] of gradients as messages, each run of a rank's rows written to its place."""
        found, at = rows[0].new_empty(sum([one.numel() for one in rows])), 0
        queries = iter(self.queries.of_ranks(rows[0]) if self.moves_queries else ())
        keys = [self.keys.of_ranks(one) for one in rows[-2:]]
        for run, *own in zip(self.keys.by_rank, *keys, strict=True):
            if self.moves_queries and run.rank in self.share.sharing:
                own.insert(0, next(queries))
            columns = sum([one.shape[2] * one.shape[3] for one in own])
            shape = (*own[0].shape[:2], columns)
            _beside(own, found.as_strided(shape, (self.batch * columns, columns, 1), at))
            at += shape[0] * shape[1] * columns
        return found

    def _summed(self, arrived: torch.Tensor) -> list[torch.Tensor]:
        """The sums of the terms that came for this rank's keys and values."""
        problem, heads, wide = self.problem, len(self.chunk.kv_heads), accumulated(arrived.dtype)
        places = (
            (self.kv_columns, self.width),
            (self.kv_columns - self.k_columns, self.value_width),
        )
        if not problem.adds_terms:
            columns = self.columns[0]
            return [
                self._assembled(arrived, columns, columns - at, heads, width)
                for at, width in places
            ]
        pairs = zip(arrived.split(self.sizes[0]), self.columns, strict=True)
        terms = [one.view(self.tokens, self.batch, columns) for one, columns in pairs]
        if problem.parts == 1:
            sums = terms[0].to(wide, copy=True)
            for term in terms[1:]:
                sums += term
            totals = [_heads_of(sums, self.kv_columns - at, heads, width) for at, width in places]
            return [one.to(arrived.dtype).contiguous() for one in totals]
        totals = []
        for at, width in places:
            shape = (self.batch, self.tokens, heads * min(problem.parts, problem.kv_heads), width)
            pairs = zip(terms, self.columns, strict=True)
            own = [_heads_of(term, columns - at, heads, width) for term, columns in pairs]
            totals.append(sums_of_terms(arrived.new_empty(shape), own, problem.parts))
        return totals
