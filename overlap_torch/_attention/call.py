"""Forward and backward of one attention: exchange, kernel's calls, exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from overlap_torch._attention.exchange import Exchange
from overlap_torch._attention.kernels import AttentionKernel, Call, Form, calls_of
from overlap_torch._attention.work import Problem, Share, share_of
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
        per_head: this rank's slices of the tensors that go with the heads.
    """

    def __init__(
        self,
        problem: Problem,
        kernels: Sequence[AttentionKernel],
        scale: float,
        group: str,
        per_head: tuple[torch.Tensor, ...] = (),
    ) -> None:
        self.problem, self.kernels, self.scale, self.group = problem, kernels, scale, group
        self.share: Share = share_of(problem, group_rank(group))
        self._known: dict[Form, tuple[Call, ...]] = {}
        heads = self.share.heads
        self.per_head = tuple(tensor[heads.start : heads.stop] for tensor in per_head)

    def _compare(self, what: str, tensor: torch.Tensor, form: Form) -> None:
        """Raises on every rank if the ranks' calls differ, before anything is sent."""
        if self.problem.ranks > 1 and collectives.compares(tensor):
            problem, documents = self.problem, self.problem.documents
            said = [*documents] if len(documents) <= 8 else f"{len(documents)} ({hash(documents)})"
            mask = f"left {problem.left}, right {problem.right}, documents {said}"
            cut = f"tokens {[*problem.numbers]}{' in a zigzag' if problem.zigzag else ''}, head parts {problem.parts}"
            text = f"{what} by {self.kernels[0].name}, {mask}, {cut}, scale {self.scale}, batch, heads and sizes"
            sizes = [form.batch, problem.heads, problem.kv_heads, form.width, form.value_width]
            collectives.compare(text, tensor, sizes, self.group)

    def calls(self, form: Form) -> tuple[Call, ...]:
        """See `calls_of`."""
        if form not in self._known:
            found = calls_of(self.share, self.kernels, form, self.scale, self.per_head)
            self._known[form] = tuple(found)
        return self._known[form]

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
        """This rank's output [B, T, H, Dv], what came and the head layout's output where backward wants them, and what kernels saved."""
        form = Form(q.shape[0], q.dtype, q.shape[3], v.shape[3])
        self._compare("an attention", q, form)
        exchange = Exchange(self.share, form.batch, form.width, form.value_width, self.group)
        came = exchange.start_in(q, k, v)()
        q, k, v = exchange.heads(came, q, k, v)
        outputs, saved = [], []
        for kernel, work, rows, keys in self.calls(form):
            o, kept = kernel.forward(q[:, rows], k[:, keys], v[:, keys], work)
            outputs.append(o)
            saved.append(kept)
        if not outputs:
            outputs.append(q.new_empty((q.shape[0], 0, q.shape[2], v.shape[3])))
        o = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
        result = exchange.results_home(o)
        if not exchange.moves_queries:
            return result, [], saved
        # All heads' keys and values, cut by heads, are as many bytes as this rank's own. Others come again in backward.
        return result, [*(came if self._keeps_keys else came[:1]), o], saved

    @property
    def _keeps_keys(self) -> bool:
        return self.problem.parts == self.problem.ranks

    @property
    def kept(self) -> int:
        """The number of tensors that forward keeps beside what kernels saved."""
        return 0 if self.problem.parts == 1 else 2

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
        self._compare("the gradients of an attention", grad, form)
        exchange = Exchange(self.share, form.batch, width, form.value_width, self.group)
        *came, o = kept or [o]
        again = None if self._keeps_keys else exchange.start_in(None, k, v)
        grad = exchange.start_grad(grad)()
        q, k, v = exchange.heads(came if again is None else [*came, *again()], q, k, v)
        for_q, terms, more = [], [], [torch.zeros_like(one) for one in self.per_head]
        for (kernel, work, rows, keys), own in zip(self.calls(form), saved, strict=True):
            operands = (grad[:, rows], q[:, rows], k[:, keys], v[:, keys], o[:, rows])
            dq, dk, dv, *others = kernel.backward(*operands, own, work)
            for_q.append((rows, dq))
            terms.append((keys, dk, dv))
            for total, other in zip(more, others, strict=True):
                total += other
        dk, dv = (
            total_of(one, [(term[0], term[i]) for term in terms]) for i, one in ((1, k), (2, v))
        )
        return *exchange.gradients_home(total_of(q, for_q), dk, dv), *more


def total_of(like: torch.Tensor, terms: Sequence[tuple[slice, torch.Tensor]]) -> torch.Tensor:
    """The sum of the terms of some of the rows [B, S, h, D], rounded once."""
    if len(terms) == 1 and terms[0][1].shape == like.shape:
        return terms[0][1]
    wide = accumulated(like.dtype)
    total = like.new_zeros(like.shape, dtype=wide if len(terms) > 1 else like.dtype)
    for rows, term in terms:
        total[:, rows] += term
    return total.to(like.dtype)
