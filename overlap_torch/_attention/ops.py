"""The operator of an attention by a built-in kernel, its fake and its gradients; a caller's kernel has a Function."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils.flop_counter import register_flop_formula

from overlap_torch._attention.call import Attention
from overlap_torch._attention.kernels import BUILT_IN, Form
from overlap_torch._attention.work import Problem
from overlap_torch._ops.group import group_rank

_library = torch.library.Library("overlap", "FRAGMENT")
_ops = torch.ops.overlap
_HOW = (
    "int[] numbers, bool zigzag, int heads, int kv_heads, int[] band, int[] documents, int head_parts, str kernel, "
    "float scale, str group, int chunks, bool keeps"
)
_SECOND = (
    "context_parallel_attention has gradients of first order only, as attention kernels do, but its gradients were "
    "differentiated: leave create_graph out"
)


def arguments(
    problem: Problem, kernel: str, scale: float, group: str, chunks: int, keeps: bool
) -> tuple:
    """The operators' arguments after the tensors."""
    numbers, zigzag, heads, kv_heads, left, right, documents, parts = problem
    band = [-1 if side is None else side for side in (left, right)]
    cut = ([*numbers], zigzag, heads, kv_heads, band, [*documents], parts)
    return *cut, kernel, scale, group, chunks, keeps


def _attention(numbers, zigzag, heads, kv_heads, band, documents, parts, kernel, scale, group, *by):
    sides = [None if side < 0 else side for side in band]
    problem = Problem(tuple(numbers), zigzag, heads, kv_heads, *sides, tuple(documents), parts)
    return _known(problem, kernel, scale, group, group_rank(group), *by)


@functools.lru_cache(maxsize=64)
def _known(
    problem: Problem, kernel: str, scale: float, group: str, rank: int, chunks: int, keeps: bool
) -> Attention:
    """Layers share it; a name may come to mean another group, in which this rank is another."""
    return Attention(problem, BUILT_IN[kernel], scale, group, (), chunks, keeps)


def may_call_past_dispatcher(q: torch.Tensor, backward: bool) -> bool:
    """True of a call that no gradient, mode, subclass or compiler has to see: the dispatcher's way through Python takes 60 us."""
    return not (
        backward
        or type(q) is not torch.Tensor
        or is_dynamo_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd._profiler_enabled()
    )


def forward(q, k, v, *how):
    o, kept, saved = _attention(*how).forward(q, k, v)
    return o, [*kept, *(tensor for each in saved for tensor in each)]


def _backward(grad, q, k, v, o, kept, width, *how):
    attention = _attention(*how)
    tensors, saved = [*kept[attention.kept :]], []
    for _, calls in attention.calls(Form(grad.shape[0], grad.dtype, width, grad.shape[3])):
        for kernel, *_ in calls:
            saved.append(tensors[: kernel.keeps])
            del tensors[: kernel.keeps]
    return attention.backward(grad, q, k, v, o, width, kept[: attention.kept], saved)


def _keep(ctx, inputs, output) -> None:
    q, k, v, *ctx.how = inputs
    o, kept = output
    ctx.width = q.shape[3]
    ctx.save_for_backward(*_attention(*ctx.how).wanted(q, k, v, o), *kept)
    ctx.set_materialize_grads(False)


def _gradients(ctx, grad, _):
    # torch takes an empty list for one of tensors, and wants a list of its gradients.
    nothing = [[] if one == [] else None for one in ctx.how]
    if grad is None:
        return None, None, None, *nothing
    q, k, v, o, *kept = ctx.saved_tensors
    given = (grad, q, k, v, o, kept, ctx.width, *ctx.how)
    return *_ops._context_parallel_attention_backward(*given), *nothing


def _keep_nothing(ctx, inputs, output) -> None:
    pass


def _refuse_second(ctx, *grads):
    raise RuntimeError(_SECOND)


def _register(name: str, schema: str, kernel, backward, keep) -> None:
    _library.define(
        f"{name}({schema}", tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
    )
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    # The lines that run are their own fake: their collectives and kernels have fakes.
    torch.library.register_fake(f"overlap::{name}", kernel, lib=_library)
    torch.library.register_autograd(f"overlap::{name}", backward, setup_context=keep, lib=_library)


_register(
    "context_parallel_attention",
    f"Tensor q, Tensor k, Tensor v, {_HOW}) -> (Tensor, Tensor[])",
    forward,
    _gradients,
    _keep,
)
_register(
    "_context_parallel_attention_backward",
    f"Tensor grad, Tensor? q, Tensor? k, Tensor? v, Tensor? o, Tensor[] kept, int width, {_HOW}) -> (Tensor, Tensor, Tensor)",
    _backward,
    _refuse_second,
    _keep_nothing,
)


def _flops(batch: int, widths: int, how: Sequence[Any]) -> int:
    """This rank's products forward, counted as PyTorch counts attention's: of each call's whole rectangle."""
    share = _attention(*how).share
    pieces = [piece for run in share.runs for piece in run]
    pairs = sum(math.prod(end - begin for begin, end in piece[:2]) for piece in pieces)
    return 2 * batch * len(share.heads) * pairs * widths


@register_flop_formula(_ops.context_parallel_attention)
def _forward_flops(q, k, v, *how, out_shape=None, **_) -> int:
    return _flops(q[0], q[3] + v[3], how)


@register_flop_formula(_ops._context_parallel_attention_backward)
def _backward_flops(grad, q, k, v, o, kept, width, *how, out_shape=None, **_) -> int:
    return _flops(grad[0], width + grad[3], how) * 5 // 2


class CallersAttention(torch.autograd.Function):
    """An attention by a caller's kernel."""

    @staticmethod
    def forward(ctx, attention: Attention, q, k, v, *per_head):
        o, kept, ctx.saved = attention.forward(q, k, v)
        ctx.attention, ctx.kept, ctx.width = attention, kept, q.shape[3]
        ctx.save_for_backward(*attention.wanted(q, k, v, o), *per_head)
        return o

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        q, k, v, o, *per_head = ctx.saved_tensors
        found = ctx.attention.backward(grad, q, k, v, o, ctx.width, ctx.kept, ctx.saved)
        heads = ctx.attention.share.heads
        more = []
        for tensor, own in zip(per_head, found[3:], strict=True):
            whole = torch.zeros_like(tensor)
            whole[heads.start : heads.stop] = own
            more.append(whole)
        return None, *found[:3], *more
