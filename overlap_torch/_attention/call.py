"""Forward and backward of one attention: exchange, kernel's calls, exchange."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from overlap_torch._attention.exchange import Exchange, Heads
from overlap_torch._attention.kernels import AttentionKernel, Call, Form, calls_of
from overlap_torch._attention.peers import (
    Chunk,
    PeerExchange,
    Route,
    cut_heads,
    operands_of,
    places_of,
    route_of,
)
from overlap_torch._attention.work import AttentionWork, Problem, Share, share_of
from overlap_torch._ops import collectives
from overlap_torch._ops.composition import accumulated
from overlap_torch._ops.group import group_rank


class Attention:
    """A call on this rank.

    Args:
        problem: what all ranks compute.
        kernels: the first that takes a call computes it.
        scale: the factor of the products of queries and keys.
        group: the group's name.
        per_head: tensors [H, ...] of which the kernels get their heads' slices.
        chunks: the number of chunks of heads that copy engines bring; 0: the group's collectives bring all heads at once.
        keeps: backward will follow.
    """

    def __init__(
        self,
        problem: Problem,
        kernels: Sequence[AttentionKernel],
        scale: float,
        group: str,
        per_head: tuple[torch.Tensor, ...] = (),
        chunks: int = 0,
        keeps: bool = True,
    ) -> None:
        self.problem, self.kernels, self.scale, self.group = problem, kernels, scale, group
        self.share: Share = share_of(problem, group_rank(group))
        self.by_copies, self.keeps = chunks > 0, keeps
        part = (len(self.share.heads), len(self.share.kv_heads))
        self.chunks: tuple[Chunk, ...] = cut_heads(*part, max(chunks, 1))
        self._routes: dict[tuple[Form, bool], Route] = {}
        self._text = self._said("an attention")
        self._text_of_gradients = self._said("the gradients of an attention")
        self._known: dict[Form, tuple[tuple[Chunk, tuple[Call, ...]], ...]] = {}
        heads = self.share.heads
        self.per_head = tuple(tensor[heads.start : heads.stop] for tensor in per_head)

    def _said(self, what: str) -> str:
        problem, documents = self.problem, self.problem.documents
        said = [*documents] if len(documents) <= 8 else f"{len(documents)} ({hash(documents)})"
        mask = f"left {problem.left}, right {problem.right}, documents {said}"
        cut = f"tokens {[*problem.numbers]}{' in a zigzag' if problem.zigzag else ''}, head parts {problem.parts}"
        by = f", {len(self.chunks)} chunks over peers" if self.by_copies else ""
        return f"{what} by {self.kernels[0].name}, {mask}, {cut}{by}, scale {self.scale}, batch, heads and sizes"

    def _compare(self, what: str, tensor: torch.Tensor, form: Form) -> None:
        """Raises on every rank if the ranks' calls differ, before anything is sent."""
        if self.problem.ranks > 1 and collectives.compares(tensor):
            problem = self.problem
            sizes = [form.batch, problem.heads, problem.kv_heads, form.width, form.value_width]
            collectives.compare(what, tensor, sizes, self.group)

    def calls(self, form: Form) -> tuple[tuple[Chunk, tuple[Call, ...]], ...]:
        """Each chunk's calls; see `calls_of`."""
        if form not in self._known:
            whole = [*calls_of(self.share, self.kernels, form, self.scale, self.per_head)]
            self._known[form] = tuple(
                (
                    chunk,
                    tuple((kernel, _of_heads(work, chunk), *rows) for kernel, work, *rows in whole),
                )
                for chunk in self.chunks
            )
        return self._known[form]

    def route(self, form: Form, backward: bool = False) -> Route:
        """The exchange over peers, forward or backward."""
        key = (form, backward)
        if key not in self._routes:
            self._routes[key] = route_of(self.problem, self.chunks, *key)
        return self._routes[key]

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        """This rank's output [B, T, H, Dv], what came and the head layout's output where backward wants them, and what kernels saved."""
        form = Form(q.shape[0], q.dtype, q.shape[3], v.shape[3])
        self._compare(self._text, q, form)
        if self.by_copies:
            return self._forward_by_copies(form, q, k, v)
        exchange = Exchange(self.share, form.batch, form.width, form.value_width, self.group)
        came = exchange.start_in(q, k, v)()
        q, k, v = exchange.heads(came, q, k, v)
        o, saved = _attend(self.calls(form)[0][1], q, k, v)
        result = exchange.results_home(o)
        if not exchange.moves_queries:
            return result, [], saved
        # All heads' keys and values, cut by heads, are as many bytes as this rank's own. Others come again in backward.
        return result, [*(came if self._keeps_keys else came[:1]), o], saved

    def _forward_by_copies(self, form: Form, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        """As `forward`. The head layout that is kept: what came, in one dim, and each chunk's output."""
        gathers, outputs, saved, kept = self.problem.parts == 1, [], [], []
        route = self.route(form)
        if _is_fake(q):
            return self._fake_forward(route, form, q)
        with PeerExchange(route, self.share.rank, q, self.group, self._text) as exchange:
            exchange.send(*((k, v) if gathers else (q, k, v)))
            for c, (chunk, calls) in enumerate(self.calls(form)):
                came = exchange.came(c)
                heads = (_cut(q, chunk.heads), *came) if gathers else came
                o, states = _attend(calls, *heads)
                outputs.append(o)
                saved += states
                if not gathers:
                    exchange.send_home(c, o)
            if gathers:
                return torch.cat(outputs, 2) if len(outputs) > 1 else o.contiguous(), [], saved
            if self.keeps:
                size = places_of(route, self.share.rank).came_bytes // route.item
                kept = [exchange.slot[:size].clone(), *outputs]
            return exchange.results()[0], kept, saved

    def _fake_forward(self, route: Route, form: Form, q: torch.Tensor):
        """The shapes of `_forward_by_copies`."""
        outputs, saved, rank = [], [], self.share.rank
        for chunk, calls in self.calls(form):
            heads = [_cut(q, chunk.heads)] if self.problem.parts == 1 else []
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
        came = q.new_empty(places_of(route, rank).came_bytes // route.item)
        return result, [came, *outputs], saved

    @property
    def _keeps_keys(self) -> bool:
        return self.problem.parts == self.problem.ranks

    @property
    def kept(self) -> int:
        """The number of tensors that forward keeps beside what kernels saved."""
        if self.problem.parts == 1:
            return 0
        if self.by_copies:
            return 1 + len(self.chunks) if self.keeps else 0
        return 2

    def wanted(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor) -> list:
        """The tensors that backward reads, None in the place of others, of which the head layout is kept."""
        own, gathers = self.problem.parts == 1, not self._keeps_keys
        return [
            tensor if takes else None
            for tensor, takes in ((q, own), (k, own or gathers), (v, own or gathers), (o, own))
        ]

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor | None,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        o: torch.Tensor | None,
        width: int,
        kept: Sequence[torch.Tensor],
        saved: Sequence[Any],
    ) -> tuple[torch.Tensor, ...]:
        """The gradients of this rank's q, k and v, and of its slices of per_head. q, k, v and o are as `wanted` leaves them."""
        form = Form(grad.shape[0], grad.dtype, width, grad.shape[3])
        self._compare(self._text_of_gradients, grad, form)
        laid = self.by_copies and self._keeps_keys
        if laid and self.problem.kv_heads % self.problem.parts == 0:
            return self._backward_by_copies(form, grad, kept, saved)
        exchange = Exchange(self.share, form.batch, width, form.value_width, self.group)
        *came, o = kept or [o]
        again = None if self._keeps_keys else exchange.start_in(None, k, v)
        grad = exchange.start_grad(grad)()
        if (
            laid
        ):  # one chunk, as several ranks have terms of a key's gradient, which are summed once
            route = self.route(form)
            q, k, v = operands_of(route, self.share.rank, 0, came[0])
        else:
            q, k, v = exchange.heads(came if again is None else [*came, *again()], q, k, v)
        saved, found = iter(saved), []
        more = [torch.zeros_like(one) for one in self.per_head]
        for chunk, calls in self.calls(form):
            cut = [_cut(one, chunk.heads) for one in (grad, q, o)]
            keys = [_cut(one, chunk.kv_heads) for one in (k, v)]
            grads, others = _differentiate(calls, cut[0], cut[1], *keys, cut[2], saved)
            found.append(grads)
            for total, other in zip(more, others, strict=bool(calls)):
                total += other
        grads = (one[0] if len(one) == 1 else torch.cat(one, 2) for one in zip(*found, strict=True))
        return *exchange.gradients_home(*grads), *more

    def _backward_by_copies(
        self, form: Form, grad: torch.Tensor, kept: Sequence[torch.Tensor], saved: Sequence[Any]
    ) -> tuple[torch.Tensor, ...]:
        came, *outputs = kept
        route, forward = self.route(form, backward=True), self.route(form)
        if _is_fake(grad):
            sizes = ((self.problem.heads, form.width), (self.problem.kv_heads, form.width))
            sizes = (*sizes, (self.problem.kv_heads, form.value_width))
            return tuple(grad.new_empty((*grad.shape[:2], *size)) for size in sizes)
        states = iter(saved)
        with PeerExchange(
            route, self.share.rank, grad, self.group, self._text_of_gradients
        ) as exchange:
            exchange.send(grad)
            for c, (_, calls) in enumerate(self.calls(form)):
                operands = operands_of(forward, self.share.rank, c, came)
                (arrived,) = exchange.came(c)
                grads, _ = _differentiate(calls, arrived, *operands, outputs[c], states)
                exchange.send_home(c, *grads)
            return tuple(exchange.results())


def _is_fake(tensor: torch.Tensor) -> bool:
    """True of a compiler's tensors, which hold no numbers."""
    return type(tensor) not in (torch.Tensor, torch.nn.Parameter)


def _of_heads(work: AttentionWork, chunk: Chunk) -> AttentionWork:
    """A call's work of a chunk of its heads."""
    heads, kv_heads = (slice(run.start, run.stop) for run in (chunk.heads, chunk.kv_heads))
    per_head = tuple(tensor[heads] for tensor in work.per_head)
    return replace(
        work, heads=work.heads[heads], kv_heads=work.kv_heads[kv_heads], per_head=per_head
    )


def _cut(tensor: torch.Tensor, heads: range) -> torch.Tensor:
    """The heads of [B, T, H, D], a view."""
    return tensor[:, :, heads.start : heads.stop]


def _attend(
    calls: Sequence[Call], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, list]:
    """The output [B, rows, h, Dv] of these calls, and what each one saved."""
    outputs, saved = [], []
    for kernel, work, rows, keys in calls:
        o, kept = kernel.forward(q[:, rows], k[:, keys], v[:, keys], work)
        outputs.append(o)
        saved.append(kept)
    if not outputs:
        outputs.append(q.new_empty((q.shape[0], 0, q.shape[2], v.shape[3])))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)), saved


def _differentiate(
    calls: Sequence[Call],
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    saved: Iterator[Any],
) -> tuple[Heads, list[torch.Tensor]]:
    """The gradients of q, k and v by these calls, and of the slices of per_head; the next of ``saved`` are theirs."""
    for_q, terms, more = [], [], []
    for kernel, work, rows, keys in calls:
        operands = (grad[:, rows], q[:, rows], k[:, keys], v[:, keys], o[:, rows])
        dq, dk, dv, *others = kernel.backward(*operands, next(saved), work)
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
