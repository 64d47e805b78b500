"""Forward and backward of one attention: exchange, kernel's calls, exchange."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from overlap_torch._attention.exchange import Came, Exchange, Heads, Later
from overlap_torch._attention.kernels import (
    AttentionKernel,
    BuiltInKernel,
    Call,
    Form,
    calls_of,
    kernels_of,
)
from overlap_torch._attention.peers import PeerExchange, Route, kept_of, places_of, route_of
from overlap_torch._attention.work import (
    AttentionWork,
    Chunk,
    Problem,
    Share,
    cut_heads,
    share_of,
)
from overlap_torch._ops import collectives
from overlap_torch._ops.composition import accumulated

Tensors = Sequence[torch.Tensor]


class Attention:
    """All that is known of an attention's calls before their tensors arrive; calls with the same arguments share it.

    Args:
        problem: what all ranks compute.
        kernel: a name in BUILT_IN, or what a caller's kernel takes, `traits_of` it.
        form: B, dtype and sizes of heads.
        scale: the factor of the products of queries and keys.
        group: the group's name.
        rank: this one.
        chunks: the number of chunks of heads that travel one after the other.
        copied: the passes that copy engines carry: none, forward, or both. The group's collectives carry the others.
        keeps: backward will follow.
    """

    def __init__(
        self,
        problem: Problem,
        kernel: str | AttentionKernel,
        form: Form,
        scale: float,
        group: str,
        rank: int,
        chunks: int = 1,
        copied: int = 0,
        keeps: bool = True,
    ) -> None:
        self.problem, self.kernel, self.form, self.scale = problem, kernel, form, scale
        self.group, self.is_built_in = group, isinstance(kernel, str)
        self.share: Share = share_of(problem, rank)
        self.copied, self.keeps = copied, keeps
        part = (len(self.share.heads), len(self.share.kv_heads))
        self.chunks: tuple[Chunk, ...] = cut_heads(*part, chunks)
        self._text = self._said("an attention")
        self._text_of_gradients = self._said("the gradients of an attention")
        self._keeps_keys = problem.parts == problem.ranks
        # The number of tensors that forward keeps beside what kernels saved.
        by_copies, by_collectives = 1 + chunks if keeps else 0, 2 * chunks
        self.kept = 0 if problem.parts == 1 else by_copies if copied else by_collectives

    def _said(self, what: str) -> str:
        problem, documents = self.problem, self.problem.documents
        said = [*documents] if len(documents) <= 8 else f"{len(documents)} ({hash(documents)})"
        mask = f"left {problem.left}, right {problem.right}, documents {said}"
        cut = f"tokens {[*problem.numbers]}{' in a zigzag' if problem.zigzag else ''}, head parts {problem.parts}"
        passes = ("", " over peers", " over peers both ways")[self.copied]
        by = f", {len(self.chunks)} chunks{passes}"
        name = kernels_of(self.kernel)[0].name
        return f"{what} by {name}, {mask}, {cut}{by}, scale {self.scale}, batch, heads and sizes"

    def _compare(self, what: str, tensor: torch.Tensor) -> None:
        """Raises on every rank if the ranks' calls differ, before anything is sent."""
        if self.problem.ranks > 1 and collectives.compares(tensor):
            problem, form = self.problem, self.form
            sizes = [form.batch, problem.heads, problem.kv_heads, form.width, form.value_width]
            collectives.compare(what, tensor, sizes, self.group)

    @functools.cached_property
    def calls(self) -> tuple[tuple[Chunk, tuple[Call, ...]], ...]:
        """Each chunk's calls; see `calls_of`."""
        whole = [*calls_of(self.share, kernels_of(self.kernel), self.form, self.scale)]
        return tuple(
            (chunk, tuple((kernel, _of_heads(work, chunk), *rows) for kernel, work, *rows in whole))
            for chunk in self.chunks
        )

    def _calls_by(self, kernel: AttentionKernel | None) -> Sequence[tuple[Chunk, Sequence[Call]]]:
        """The calls, each by a caller's kernel, if there is one, in place of what it takes."""
        if kernel is None:
            return self.calls
        return [(chunk, [(kernel, *of[1:]) for of in calls]) for chunk, calls in self.calls]

    @functools.cached_property
    def route(self) -> Route:
        """The exchange over peers."""
        return route_of(self.problem, self.chunks, self.form, False)

    @functools.cached_property
    def route_back(self) -> Route:
        """The gradients' exchange over peers."""
        return route_of(self.problem, self.chunks, self.form, True)

    @functools.cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """The exchanges by collectives: of each chunk, or of all heads, where copies brought these in chunks."""
        chunks = (None,) if self.copied else self.chunks
        return tuple(Exchange(self.share, self.form, self.group, chunk) for chunk in chunks)

    def _of_chunk(self, per_head: Tensors, chunk: Chunk) -> Tensors:
        """The heads of a chunk of this rank's part."""
        if not per_head:
            return ()
        first = self.share.heads.start
        run = slice(first + chunk.heads.start, first + chunk.heads.stop)
        return [one[run] for one in per_head]

    def whole(self, tensor: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """The gradient of a tensor of `per_head` by that of this rank's heads."""
        found = torch.zeros_like(tensor)
        found[self.share.heads.start : self.share.heads.stop] = own
        return found

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        per_head: Tensors = (),
        kernel: AttentionKernel | None = None,
    ):
        """This rank's output [B, T, H, Dv]; what came and the kernels' own output, if backward reads them; and what kernels saved.
        ``kernel``: the caller's."""
        self._compare(self._text, q)
        if self.copied:
            return self._forward_by_copies(q, k, v, per_head, kernel)
        homes, kept, saved = [], [], []
        coming = _ahead(lambda exchange: exchange.start_in(q, k, v), self.exchanges)
        for exchange, later, (chunk, calls) in zip(
            self.exchanges, coming, self._calls_by(kernel), strict=True
        ):
            came = later()
            heads = exchange.heads(came, q, k, v)
            o, states = _attend(calls, *heads, self._of_chunk(per_head, chunk))
            homes.append(exchange.start_home(o))
            saved += states
            if exchange.moves_queries:
                # All heads' keys and values, cut by heads, are as many bytes as this rank's own. Others come again in backward.
                kept += [*(came if self._keeps_keys else came[:1]), o]
        results = [home() for home in homes]
        return _joined(results, self.problem.parts), kept, saved

    def _forward_by_copies(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        per_head: Tensors,
        kernel: AttentionKernel | None,
    ):
        """As `forward`. It keeps for backward what came, in one dim, and each chunk's output."""
        gathers, outputs, saved, kept = self.problem.parts == 1, [], [], []
        route, rank = self.route, self.share.rank
        if _is_fake(q):
            return self._fake_forward(q)
        with PeerExchange(route, rank, q, self.group, self._text) as exchange:
            exchange.send(*((k, v) if gathers else (q, k, v)))
            for c, (chunk, calls) in enumerate(self._calls_by(kernel)):
                came = exchange.came(c)
                heads = (_part(q, 2, chunk.heads), *came) if gathers else came
                o, states = _attend(calls, *heads, self._of_chunk(per_head, chunk))
                if kernel is not None:
                    o, states = tree_map(exchange.owned, (o, states))
                outputs.append(o)
                saved += states
                if not gathers:
                    exchange.send_home(c, o)
            if gathers:
                return _joined(outputs, 1).contiguous(), [], saved
            if self.keeps:
                size = places_of(route, rank).kept_bytes // route.item
                kept = [exchange.slot[:size].clone(), *outputs]
            return exchange.results()[0], kept, saved

    def _fake_forward(self, q: torch.Tensor):
        """The shapes of `_forward_by_copies`."""
        outputs, saved, rank, form, route = [], [], self.share.rank, self.form, self.route
        for chunk, calls in self.calls:
            heads = [_part(q, 2, chunk.heads)] if self.problem.parts == 1 else []
            for kind in route.sent:
                run = chunk.of(kind.queries)
                sizes = (form.batch, route.rows(kind, rank), len(run), kind.width)
                heads.append(q.new_empty(sizes))
            o, states = _attend(calls, *heads)
            outputs.append(o)
            saved += states
        result = q.new_empty((*q.shape[:3], form.value_width))
        if not self.kept:
            return result, [], saved
        came = q.new_empty(places_of(route, rank).kept_bytes // route.item)
        return result, [came, *outputs], saved

    def wanted(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor) -> list:
        """q, k, v and o as backward reads them: None in the place of a tensor that is kept in the kernels' layout instead."""
        own, gathers = self.problem.parts == 1, not self._keeps_keys
        return [
            tensor if takes else None
            for tensor, takes in ((q, own), (k, own or gathers), (v, own or gathers), (o, own))
        ]

    def saved_of(self, tensors: Tensors) -> list[Tensors]:
        """The tensors of each call of a built-in kernel, out of all that these saved."""
        found, at = [], 0
        for _, calls in self.calls:
            for kernel, *_ in calls:
                found.append(tensors[at : at + kernel.keeps])
                at += kernel.keeps
        return found

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor | None,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        o: torch.Tensor | None,
        kept: Tensors,
        saved: Sequence[Any],
        per_head: Tensors = (),
        kernel: AttentionKernel | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """The gradients of this rank's q, k and v, and of its slices of per_head. q, k, v and o are as `wanted` leaves them."""
        self._compare(self._text_of_gradients, grad)
        if self.copied == 2:
            return self._backward_by_copies(grad, q, k, v, o, kept, saved, per_head, kernel)
        states, homes, more = iter(saved), [], []
        coming = _ahead(lambda exchange: self._start_back(exchange, grad, k, v), self.exchanges)
        rounds = self._rounds(kernel)
        for at, (exchange, (grad_of, again)) in enumerate(zip(self.exchanges, coming, strict=True)):
            *came, result = kept[2 * at : 2 * at + 2] or [exchange.own(o, exchange.chunk.heads)]
            arrived = grad_of()
            # Copies keep what came as it lay. A part has one key head then: its gradient has terms of several ranks.
            if self.copied and self._keeps_keys:
                heads = kept_of(self.route, self.share.rank, 0, came[0])
            else:
                heads = exchange.heads(came if again is None else [*came, *again()], q, k, v)
            operands = (arrived, *heads, result)
            grads, others = self._differentiated(rounds[at], operands, states, per_head)
            homes.append(exchange.start_gradients(*grads))
            more.append(others)
        found = [home() for home in homes]
        if len(found) > 1:
            parts, kv_heads = self.problem.parts, self.problem.kv_heads
            counts = (parts, *(min(parts, kv_heads),) * 2)
            found = [tuple(map(_joined, zip(*found, strict=True), counts))]
        return *found[0], *(map(torch.cat, zip(*more, strict=True)) if len(more) > 1 else more[0])

    def _rounds(
        self, kernel: AttentionKernel | None
    ) -> Sequence[Sequence[tuple[Chunk, Sequence[Call]]]]:
        """The chunks of each of the exchanges."""
        calls = self._calls_by(kernel)
        return [calls] if len(self.exchanges) == 1 else [[one] for one in calls]

    def _start_back(
        self,
        exchange: Exchange,
        grad: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
    ) -> tuple[Later, Callable[[], Came] | None]:
        """Begins to send the output's gradient and, unless they were kept, keys and values again."""
        again = None if self._keeps_keys else exchange.start_in(None, k, v)
        return exchange.start_grad(grad), again

    def _differentiated(
        self,
        calls: Sequence[tuple[Chunk, Sequence[Call]]],
        operands: Tensors,
        states: Iterator[Any],
        per_head: Tensors,
    ) -> tuple[Sequence[torch.Tensor], Tensors]:
        """The gradients of q, k and v of these chunks, whose heads lie beside each other in the operands, and of their slices of per_head."""
        found, more = [], []
        for chunk, of in calls:
            cut = operands
            if len(calls) > 1:  # all chunks of this rank's part
                heads, keys = chunk.heads, chunk.kv_heads
                runs = (heads, heads, keys, keys, heads)
                cut = [_part(one, 2, run) for one, run in zip(operands, runs, strict=True)]
            slices = self._of_chunk(per_head, chunk)
            grads, others = _differentiate(of, *cut, states, slices)
            found.append(grads)
            more.append(others or [torch.zeros_like(one) for one in slices])
        if len(found) == 1:
            return found[0], more[0]
        joined = [torch.cat(chunks, 2) for chunks in zip(*found, strict=True)]
        return joined, [torch.cat(slices) for slices in zip(*more, strict=True)]

    def _backward_by_copies(
        self,
        grad: torch.Tensor,
        q: torch.Tensor | None,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        o: torch.Tensor | None,
        kept: Tensors,
        saved: Sequence[Any],
        per_head: Tensors,
        kernel: AttentionKernel | None,
    ) -> tuple[torch.Tensor, ...]:
        """As `backward`, whose order of operands is q, k and v: what was kept comes before what comes again."""
        route, rank, states = self.route_back, self.share.rank, iter(saved)
        gathers, for_q, more = self.problem.parts == 1, [], []
        if _is_fake(grad):
            return self._fake_backward(grad)
        with PeerExchange(route, rank, grad, self.group, self._text_of_gradients) as exchange:
            again = () if self._keeps_keys else (k, v)
            exchange.send(*(again if gathers else (grad, *again)))
            for c, (chunk, calls) in enumerate(self._calls_by(kernel)):
                came = exchange.came(c)
                if gathers:
                    own, query, result = (_part(one, 2, chunk.heads) for one in (grad, q, o))
                    operands = (own, query, *came, result)
                else:
                    arrived, *keys = came
                    first = kept_of(self.route, rank, c, kept[0])
                    operands = (arrived, *first, *keys, kept[1 + c])
                grads, others = self._differentiated([(chunk, calls)], operands, states, per_head)
                more.append(others)
                if gathers:
                    dq, *grads = grads
                    for_q.append(dq if kernel is None else exchange.owned(dq))
                exchange.send_home(c, *grads)
            found = exchange.results()
        if gathers:
            found.insert(0, _joined(for_q, 1))
        return *found, *(torch.cat(slices) for slices in zip(*more, strict=True))

    def _fake_backward(self, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The shapes of `_backward_by_copies`."""
        problem, form, rows = self.problem, self.form, grad.shape[:2]
        return (
            grad.new_empty((*rows, problem.heads, form.width)),
            grad.new_empty((*rows, problem.kv_heads, form.width)),
            grad.new_empty((*rows, problem.kv_heads, form.value_width)),
        )


def _ahead(start: Callable[[Exchange], Any], exchanges: Sequence[Exchange]) -> Iterator[Any]:
    """The results of ``start`` of each exchange, each begun before the one before is used."""
    begun = start(exchanges[0])
    for exchange in exchanges[1:]:
        following = start(exchange)
        yield begun
        begun = following
    yield begun


def _joined(chunks: Tensors, parts: int) -> torch.Tensor:
    """The heads [B, T, parts * h, D] of all chunks, which have a run of each part's heads."""
    if len(chunks) == 1:
        return chunks[0]
    return torch.cat([one.unflatten(2, (parts, -1)) for one in chunks], 3).flatten(2, 3)


def _is_fake(tensor: torch.Tensor) -> bool:
    """True for a compiler's tensors, which hold no numbers."""
    return type(tensor) not in (torch.Tensor, torch.nn.Parameter)


def _of_heads(work: AttentionWork, chunk: Chunk) -> AttentionWork:
    """A call's work of a chunk of its heads."""
    heads, kv_heads = (slice(run.start, run.stop) for run in (chunk.heads, chunk.kv_heads))
    return replace(work, heads=work.heads[heads], kv_heads=work.kv_heads[kv_heads])


def _part(tensor: torch.Tensor, dim: int, run: slice | range) -> torch.Tensor:
    """A run of heads or rows of [B, T, H, D], a view."""
    count = run.stop - run.start
    return tensor if count == tensor.shape[dim] else tensor.narrow(dim, run.start, count)


def _rows(tensors: Sequence[tuple[torch.Tensor, slice]]) -> list[torch.Tensor]:
    return [_part(tensor, 1, rows) for tensor, rows in tensors]


def _attend(
    calls: Sequence[Call], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, per_head: Tensors = ()
) -> tuple[torch.Tensor, list]:
    """The output [B, rows, h, Dv] of these calls, and what each one saved."""
    outputs, saved = [], []
    for kernel, work, rows, keys in calls:
        if per_head:
            work = replace(work, per_head=tuple(per_head))
        o, kept = kernel.forward(*_rows(((q, rows), (k, keys), (v, keys))), work)
        if not isinstance(kernel, BuiltInKernel):
            _check_output(
                kernel.name, o, (q.shape[0], rows.stop - rows.start, q.shape[2], v.shape[3]), q
            )
        outputs.append(o)
        saved.append(kept)
    if not outputs:
        outputs.append(q.new_empty((q.shape[0], 0, q.shape[2], v.shape[3])))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)), saved


def _check_output(name: str, o: object, shape: tuple[int, ...], q: torch.Tensor) -> None:
    """Raises ValueError unless a caller's kernel returned a tensor of this shape and of q's dtype."""
    if not isinstance(o, torch.Tensor) or tuple(o.shape) != shape or o.dtype != q.dtype:
        got = f"{tuple(o.shape)} in {o.dtype}" if isinstance(o, torch.Tensor) else type(o).__name__
        raise ValueError(
            f"{name} returned {got}, but the output of its queries is [B, Tq, h, Dv], {shape} in {q.dtype}"
        )


def _check_gradients(name: str, grads: object, inputs: Sequence[torch.Tensor]) -> None:
    """Raises ValueError unless a caller's kernel returned a gradient of the shape of each of its inputs."""
    found = tuple(grads) if isinstance(grads, (list, tuple)) else (grads,)
    shapes = [tuple(one.shape) if isinstance(one, torch.Tensor) else one for one in found]
    wanted = [tuple(one.shape) for one in inputs]
    if shapes != wanted:
        raise ValueError(
            f"{name} returned gradients of the shapes {shapes}, but q, k, v and per_head have {wanted}: give zeros where there is none"
        )


def _differentiate(
    calls: Sequence[Call],
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    saved: Iterator[Any],
    per_head: Tensors = (),
) -> tuple[Heads, list[torch.Tensor]]:
    """The gradients of q, k and v by these calls, and of the slices of per_head; the next of ``saved`` are theirs."""
    for_q, terms, more = [], [], []
    for kernel, work, rows, keys in calls:
        if per_head:
            work = replace(work, per_head=tuple(per_head))
        operands = _rows(((grad, rows), (q, rows), (k, keys), (v, keys), (o, rows)))
        grads = kernel.backward(*operands, next(saved), work)
        if not isinstance(kernel, BuiltInKernel):
            _check_gradients(kernel.name, grads, (*operands[1:4], *work.per_head))
        dq, dk, dv, *others = grads
        for_q.append((rows, dq))
        terms.append((keys, dk, dv))
        more = [*others] if not more else [a + b for a, b in zip(more, others, strict=True)]
    for_k, for_v = ([(term[0], term[i]) for term in terms] for i in (1, 2))
    return (total_of(q, for_q), total_of(k, for_k), total_of(v, for_v)), more


def total_of(like: torch.Tensor, terms: Sequence[tuple[slice, torch.Tensor]]) -> torch.Tensor:
    """The sum of the terms of some of the rows [B, S, h, D], rounded once."""
    if len(terms) == 1 and terms[0][1].shape == like.shape:
        return terms[0][1]
    wide = accumulated(like.dtype)
    total = like.new_zeros(like.shape, dtype=wide if len(terms) > 1 else like.dtype)
    for rows, term in terms:
        total[:, rows] += term
    return total.to(like.dtype)
