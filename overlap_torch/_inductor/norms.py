"""Residual and RMSNorm after an all-reduce: one op does all three."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from overlap_torch._inductor.editing import (
    WAIT,
    Editor,
    NotFused,
    added_to,
    arguments,
    as_expr,
    aten,
    c10d,
    cast_dtype,
    erase_unused,
    is_tensor,
    is_view,
    only_user,
    value,
)
from overlap_torch._layers.rmsnorm import MOST_ROWS, kernels_finish

_ops = torch.ops.overlap


@dataclass(frozen=True)
class Summed:
    """An all-reduce, maybe of a GEMM's product; ``nodes`` end with its result."""

    input: Node
    weight: Node | None
    bias: Node | None
    group: str
    nodes: tuple[Node, ...]
    invariance: str | None = None


@dataclass(frozen=True)
class Norm:
    """``nodes``: from the sum's first reader to the norm."""

    weight: Node
    eps: float
    gain_offset: float
    round_before_gain: bool
    nodes: tuple[Node, ...]


def fuse_norm(total: Node) -> str | None:
    """Replaces an all-reduce, an addition to its result, and the sum's RMSNorm by one op.

    ``total`` is the all-reduce's result. Returns the op's name; None: there is no such norm or it gains nothing, and the
    graph is as it was.
    """
    summed = sum_of(total)
    if summed is None:
        return None
    at, views = _behind_views(total)
    rows = summed.bias is None and value(at).dim() > 1
    if rows and (bias := added_to(at, value(at).shape[-1:])) is not None:
        summed, at = replace(summed, bias=bias), only_user(at)
        views.append(at)
    residual = added_to(at, value(at).shape)
    last = at if residual is None else next(iter(at.users))
    norm = _norm_of(last)
    if norm is None or not _gains(last):
        return None
    result = norm.nodes[-1]
    try:
        normed, added = emit(result, summed, residual, norm, last)
    except NotFused:
        return None
    result.replace_all_uses_with(normed)
    erase_unused(reversed(norm.nodes))
    last.replace_all_uses_with(added)
    erase_unused(reversed([*summed.nodes, *views, *([] if residual is None else [last])]))
    return "allreduce_rmsnorm" if summed.weight is None else "gemm_allreduce_rmsnorm"


def emit(
    place: Node, summed: Summed, residual: Node | None, norm: Norm, last: Node
) -> tuple[Node, Node]:
    """The norm and the sum, in the shape of the sum, made before ``place``."""
    with Editor(place, value(last).fake_mode) as editor:
        return _emit(editor, summed, residual, norm, last)


def _emit(
    editor: Editor, summed: Summed, residual: Node | None, norm: Norm, last: Node
) -> tuple[Node, Node]:
    rows = [editor.size(as_expr(size)) for size in value(summed.input).shape[:-1]]
    columns = editor.size(as_expr(value(last).shape[-1]))
    if residual is not None:
        residual = editor.call(aten.reshape.default, residual, [*rows, columns])
    both = editor.call(
        _ops.allreduce_rmsnorm.default,
        summed.input,
        summed.weight,
        residual,
        norm.weight,
        summed.bias,
        eps=norm.eps,
        gain_offset=norm.gain_offset,
        round_before_gain=norm.round_before_gain,
        invariance=summed.invariance,
        group=summed.group,
    )
    shape = [editor.size(as_expr(size)) for size in value(last).shape]
    normed, added = (
        editor.call(aten.reshape.default, editor.call(operator.getitem, both, i), shape)
        for i in range(2)
    )
    return normed, added


def sum_of(total: Node) -> Summed | None:
    nodes = [total]
    while is_view(nodes[0]) and is_tensor(nodes[0].args[0]):
        nodes.insert(0, nodes[0].args[0])
    if any(len(node.users) != 1 for node in nodes[:-1]):
        return None
    if len({as_expr(value(node).shape[-1]) if value(node).dim() else None for node in nodes}) > 1:
        return None  # a norm of parts of the rows
    op = nodes[0]
    if op.target is _ops.gemm_allreduce.default:
        of_op = arguments(op)
        if of_op["scale_input"] is not None:
            return None
        given = (of_op[name] for name in ("input", "weight", "bias", "group"))
        return Summed(*given, tuple(nodes), of_op["invariance"])
    if op.target is not WAIT or op.args[0].target is not c10d.all_reduce.default:
        return None
    collective = op.args[0]
    input, kind, group = collective.args
    if kind != "sum" or len(collective.users) != 1:
        return None
    return Summed(input, None, None, group, (collective, *nodes))


def _behind_views(total: Node) -> tuple[Node, list[Node]]:
    """The last of a result's views, if nothing else reads them, and all these views."""
    at, views = total, []
    while (user := only_user(at)) is not None and is_view(user) and user.args[0] is at:
        if as_expr(value(user).shape[-1]) != as_expr(value(at).shape[-1]):
            break
        at = user
        views.append(user)
    return at, views


def _gains(total: Node) -> bool:
    *rows, columns = value(total).shape
    few = statically_known_true(math.prod(rows) <= MOST_ROWS)
    return few and kernels_finish(value(total).dtype, columns)


def _norm_of(total: Node) -> Norm | None:
    """The RMSNorm over the last dim of a tensor, among its readers."""
    for user in total.users:
        norm = None
        if user.target is aten._fused_rms_norm.default:
            norm = _one_op(user)
        elif cast_dtype(user) == torch.float32:
            norm = _decomposed(user, value(total))
        if norm is not None and is_gain(norm.weight, total):
            return norm
    return None


def is_gain(weight: Any, total: Node) -> bool:
    """True for a vector [N] of the sum's dtype that is an input of the graph, so it does not depend on the sum."""
    if not is_tensor(weight) or weight.op not in ("placeholder", "get_attr"):
        return False
    gain, rows = value(weight), value(total)
    fits = gain.dim() == 1 and as_expr(gain.shape[0]) == as_expr(rows.shape[-1])
    return fits and gain.dtype == rows.dtype


def _one_op(node: Node) -> Norm | None:
    """``aten._fused_rms_norm``, whose second result nothing reads."""
    _, _, weight, eps = (*node.args, None, None)[:4]
    read = [user for user in node.users if user.users]
    whole = len(read) == 1 and read[0].target is operator.getitem and read[0].args[1] == 0
    if not whole or eps is None:
        return None
    others = [user for user in node.users if user is not read[0]]
    return Norm(weight, eps, 0.0, False, (node, *others, read[0]))


def _decomposed(wide: Node, total: torch.Tensor) -> Norm | None:
    """The norm of ``wide``, the sum in float32, as PyTorch and transformers' models write it."""
    squares = [user for user in wide.users if _is_square(user, wide)]
    if len(squares) != 1 or len(wide.users) != 2:
        return None
    mean = only_user(squares[0])
    biased = None if mean is None or not _is_mean(mean, total.dim()) else only_user(mean)
    eps = None if biased is None else _added_number(biased)
    root = None if eps is None else only_user(biased)
    norm = None if root is None or root.target is not aten.rsqrt.default else only_user(root)
    if norm is None or _other_factor(norm, root) is not wide:
        return None
    nodes = (wide, squares[0], mean, biased, root, norm)
    rounded = only_user(norm)
    if rounded is not None and cast_dtype(rounded) == total.dtype:
        product = only_user(rounded)
        gain = None if product is None else _other_factor(product, rounded)
        return None if gain is None else Norm(gain, eps, 0.0, True, (*nodes, rounded, product))
    gain = None if rounded is None else _other_factor(rounded, norm)
    result = None if gain is None else only_user(rounded)
    if result is None or cast_dtype(result) != total.dtype:
        return None
    offset = _added_number(gain)
    weight = gain if offset is None else gain.args[0]
    if offset is not None and value(weight).dtype != torch.float32:
        return None  # the sum of weight and offset is rounded
    if cast_dtype(weight) == torch.float32:
        weight = weight.args[0]
    return Norm(weight, eps, offset or 0.0, False, (*nodes, rounded, result))


def _is_square(node: Node, of: Node) -> bool:
    if node.target is aten.pow.Tensor_Scalar:
        return node.args == (of, 2)
    return node.target is aten.mul.Tensor and node.args == (of, of)


def _is_mean(node: Node, dims: int) -> bool:
    return (
        node.target is aten.mean.dim
        and len(node.args) == 3
        and [dim % dims for dim in node.args[1]] == [dims - 1]
        and node.args[2] is True
        and not node.kwargs
    )


def _added_number(node: Node) -> float | None:
    """The number that the node adds to a tensor; None for other nodes."""
    adds = node.target in (aten.add.Tensor, aten.add.Scalar) and not node.kwargs
    if not adds or len(node.args) != 2 or not is_tensor(node.args[0]):
        return None
    number = node.args[1]
    return float(number) if isinstance(number, (int, float)) else None


def _other_factor(node: Node, factor: Node) -> Node | None:
    """The tensor that the node multiplies ``factor`` by; None for other nodes."""
    if node.target is not aten.mul.Tensor or factor not in node.args:
        return None
    left, right = node.args
    other = right if left is factor else left
    return other if is_tensor(other) and other is not factor else None
