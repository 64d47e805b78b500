"""The operator of an attention by a built-in kernel, its fake and its gradients; a caller's kernel has a Function."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from overlap_torch._attention.call import Attention
from overlap_torch._attention.kernels import AttentionKernel, Form
from overlap_torch._attention.work import Problem, share_of
from overlap_torch._ops.eager import is_seen
from overlap_torch._ops.group import group_rank
from overlap_torch._ops.ordering import register_fake

_library = torch.library.Library("overlap", "FRAGMENT")
_ops = torch.ops.overlap
_HOW = (
    "int[] numbers, bool zigzag, int heads, int kv_heads, int[] band, int[] documents, int head_parts, str kernel, "
    "float scale, str group, int chunks, int copied, bool keeps"
)
_SECOND = (
    "context_parallel_attention has gradients of first order only, as attention kernels do, but its gradients were "
    "differentiated: leave create_graph out"
)


def arguments(problem: Problem, kernel: str, scale: float, group: str, *by: int) -> tuple:
    """The operators' arguments after the tensors; ``by``: an `Attention`'s chunks, copied and keeps."""
    numbers, zigzag, heads, kv_heads, left, right, documents, parts = problem
    band = [-1 if side is None else side for side in (left, right)]
    cut = ([*numbers], zigzag, heads, kv_heads, band, [*documents], parts)
    return *cut, kernel, scale, group, *by


def _problem(numbers, zigzag, heads, kv_heads, band, documents, parts, *_) -> Problem:
    sides = [None if side < 0 else side for side in band]
    return Problem(tuple(numbers), zigzag, heads, kv_heads, *sides, tuple(documents), parts)


def _attention(form: Form, *how) -> Attention:
    kernel, scale, group, *by = how[7:]
    return known(_problem(*how), kernel, form, scale, group, group_rank(group), *by)


@functools.lru_cache(maxsize=256)
def known(*given: Any) -> Attention:
    """The `Attention` of these arguments; a name may come to mean another group, in which this rank is another."""
    return Attention(*given)


def _form(q: torch.Tensor, width: int, value_width: int) -> Form:
    # A compiler's sizes may be symbols, which a cache cannot have as keys.
    return Form(operator.index(q.shape[0]), q.dtype, *map(operator.index, (width, value_width)))


def _forward(q, k, v, *how):
    o, kept, saved = _attention(_form(q, q.shape[3], v.shape[3]), *how).forward(q, k, v)
    return o, [*kept, *(tensor for each in saved for tensor in each)]


def _backward(grad, q, k, v, o, kept, width, *how):
    attention = _attention(_form(grad, width, grad.shape[3]), *how)
    saved = attention.saved_of(kept[attention.kept :])
    return attention.backward(grad, q, k, v, o, kept[: attention.kept], saved)


def _keep(ctx, inputs, output) -> None:
    q, k, v, *ctx.how = inputs
    o, kept = output
    ctx.width = q.shape[3]
    form = _form(q, q.shape[3], v.shape[3])
    ctx.save_for_backward(*_attention(form, *ctx.how).wanted(q, k, v, o), *kept)
    ctx.set_materialize_grads(False)


def _gradients(ctx, grad, _):
    # torch takes an empty list for one of tensors, and wants a list of its gradients.
    nothing = [[] if one == [] else None for one in ctx.how]
    if grad is None:
        return None, None, None, *nothing
    q, k, v, o, *kept = ctx.saved_tensors
    given = (grad, q, k, v, o, kept, ctx.width, *ctx.how)
    return *_ops._context_parallel_attention_backward(*given), *nothing


def _refuse_second(ctx, *grads):
    raise RuntimeError(_SECOND)


def _register(name: str, schema: str, kernel, backward, keep=None) -> None:
    _library.define(
        f"{name}({schema}", tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
    )
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    # The lines that run are their own fake: their collectives and kernels have fakes.
    register_fake(f"overlap::{name}", kernel, lib=_library)
    torch.library.register_autograd(f"overlap::{name}", backward, setup_context=keep, lib=_library)


_register(
    "context_parallel_attention",
    f"Tensor q, Tensor k, Tensor v, {_HOW}) -> (Tensor, Tensor[])",
    _forward,
    _gradients,
    _keep,
)
_register(
    "_context_parallel_attention_backward",
    f"Tensor grad, Tensor? q, Tensor? k, Tensor? v, Tensor? o, Tensor[] kept, int width, {_HOW}) -> (Tensor, Tensor, Tensor)",
    _backward,
    _refuse_second,
)


def _flops(batch: int, widths: int, how: Sequence[Any]) -> int:
    """This rank's products forward, counted as PyTorch counts attention's: of each call's whole rectangle."""
    problem, group = _problem(*how), how[9]
    share = share_of(problem, group_rank(group))
    pieces = [piece for run in share.runs for piece in run]
    pairs = sum(math.prod(end - begin for begin, end in piece[:2]) for piece in pieces)
    return 2 * batch * len(share.heads) * pairs * widths


@register_flop_formula(_ops.context_parallel_attention)
def _forward_flops(q, k, v, *how, out_shape=None, **_) -> int:
    return _flops(q[0], q[3] + v[3], how)


@register_flop_formula(_ops._context_parallel_attention_backward)
def _backward_flops(grad, q, k, v, o, kept, width, *how, out_shape=None, **_) -> int:
    return _flops(grad[0], width + grad[3], how) * 5 // 2


def _how(attention: Attention) -> tuple:
    by = (len(attention.chunks), attention.copied, attention.keeps)
    return arguments(attention.problem, attention.kernel, attention.scale, attention.group, *by)


def call(attention: Attention, q, k, v, *per_head, kernel=None) -> torch.Tensor:
    """The output, by a caller's ``kernel`` where the attention has none that is built in.

    A built-in kernel is called as an operator only if somebody has to see it: the dispatcher's way through Python is long.
    """
    if not attention.is_built_in or attention.keeps and not is_seen(q, k, v):
        found = ContextParallelAttention.apply(attention, kernel, q, k, v, *per_head)
        return found[0] if attention.kept else found
    if is_seen(q, k, v):
        return _ops.context_parallel_attention(q, k, v, *_how(attention))[0]
    with _quietly(attention):
        return attention.forward(q, k, v)[0]


def _quietly(attention: Attention) -> contextlib.AbstractContextManager:
    """A context without autograd's bookkeeping for each call of PyTorch that a built-in kernel makes. In forward mode autograd
    has to look, to refuse it."""
    below = attention.is_built_in and forward_ad._current_level < 0
    return torch._C._AutoDispatchBelowAutograd() if below else torch.no_grad()


class ContextParallelAttention(torch.autograd.Function):
    """An attention past the dispatcher, by a caller's kernel or one that is built in.

    Where backward does not read the output, a second output is one of the kept tensors: through it derivatives of gradients
    reach the inputs, and are refused.
    """

    @staticmethod
    def forward(ctx, attention: Attention, kernel: AttentionKernel | None, q, k, v, *per_head):
        with _quietly(attention):
            o, kept, ctx.saved = attention.forward(q, k, v, per_head, kernel)
        ctx.attention, ctx.kernel, tensors = attention, kernel, kept
        if attention.is_built_in:
            tensors, ctx.saved = [*kept, *(one for each in ctx.saved for one in each)], ()
        ctx.save_for_backward(*attention.wanted(q, k, v, o), *per_head, *tensors)
        ctx.set_materialize_grads(False)
        return (o, kept[-1]) if kept else o

    @staticmethod
    def backward(ctx, grad, *_):
        attention, more = ctx.attention, len(ctx.needs_input_grad) - 5
        if grad is None:
            return (None,) * (5 + more)
        q, k, v, o, *tensors = ctx.saved_tensors
        per_head, kept = tensors[:more], tensors[more : more + attention.kept]
        if attention.is_built_in and is_seen(grad):
            given = (grad, q, k, v, o, tensors, attention.form.width, *_how(attention))
            found = _ops._context_parallel_attention_backward(*given)
        else:
            saved = ctx.saved
            if attention.is_built_in:
                saved = attention.saved_of(tensors[attention.kept :])
            with _quietly(attention):
                found = attention.backward(grad, q, k, v, o, kept, saved, per_head, ctx.kernel)
                found = (*found[:3], *map(attention.whole, per_head, found[3:]))
        if torch.is_grad_enabled():  # create_graph
            found = _FirstOrder.apply(kept[-1] if kept else o, *found)
        return None, None, *found


class _FirstOrder(torch.autograd.Function):
    """Gradients that have no derivatives, of something that depends on the inputs."""

    @staticmethod
    def forward(ctx, of: torch.Tensor, *grads: torch.Tensor):
        return grads

    backward = staticmethod(_refuse_second)
