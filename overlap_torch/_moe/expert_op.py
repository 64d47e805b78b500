"""A rank's experts with the way home of their results: one operator, whose backward needs no results and no activations."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import register_flop_formula

from overlap_torch._moe.activation import FORM, gate_backward, sums_of_experts
from overlap_torch._moe.ops import ROUTES, complete, define, row_shares, share_gradients
from overlap_torch._moe.products import flops_hidden
from overlap_torch._ops.composition import accumulated

_ops = torch.ops.overlap
_SAVE_PRODUCTS = ("rows", "gate_up")


@define(
    "_moe_experts(Tensor? x, Tensor rows, Tensor gate_up, Tensor? up, Tensor? bias, Tensor down, Tensor? down_bias, "
    f"Tensor? topk_weights, Tensor offs, {FORM}, bool early, SymInt tokens, int choices, {ROUTES}, bool ranks_first, str save, str group) -> (Tensor, Tensor, Tensor)"
)
def _experts(x, rows, gate_up, up, bias, down, down_bias, topk_weights, offs, *how):
    """`_moe_hidden`, then `_moe_down`; and the products before the gate, if they are saved.

    The shares multiply before down if they are `early`, else after it. `x` [T, H]: the tokens that became the rows; it gets
    the rows' gradients, summed. Without it the rows get them. ``save`` is what `moe` saves, or empty: there is no backward.
    """
    *form, early, tokens, choices = how[:9]
    *routes, ranks_first, save, group = how[9:]
    weighs = early and topk_weights is not None
    shares = row_shares(topk_weights, routes, group, accumulated(rows.dtype)) if weighs else None
    hidden, *parts = _ops._moe_hidden(
        rows, gate_up, up, bias, shares, offs, *form, save in _SAVE_PRODUCTS
    )
    late = None if early else topk_weights
    how = (late, tokens, choices, *routes, ranks_first, group)
    return _ops._moe_down(hidden, down, down_bias, offs, *how), *parts


def _fake_experts(x, rows, gate_up, up, bias, down, down_bias, topk_weights, offs, *how):
    tokens, keep = how[7], how[-2] in _SAVE_PRODUCTS
    kept = (rows.shape[0], gate_up.shape[1])
    shapes = [kept if keep else 0, kept if keep and up is not None else 0]
    return rows.new_empty((tokens, down.shape[1])), *(rows.new_empty(each) for each in shapes)


def _keep(ctx, inputs, output) -> None:
    (x, rows, *operands), how = inputs[:9], inputs[9:]
    *ctx.form, ctx.early, ctx.tokens, ctx.choices = how[:9]
    *routes, ctx.ranks_first, save, ctx.group = how[9:]
    rows = rows if save == "rows" else None
    parts = output[1:] if save in _SAVE_PRODUCTS else (None, None)
    ctx.save_for_backward(x, rows, *operands, *parts, *routes)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, *_):
    if grad is None:
        return (None,) * len(ctx.needs_input_grad)
    saved = ctx.saved_tensors  # checkpoints let it be read once
    x, rows, gate_up, up, bias, down, down_bias, weights, offs, *parts = saved[:11]
    routes = saved[11:]
    needs_x, needs_rows, needs_gate, needs_up, needs_bias, *needs = ctx.needs_input_grad[:8]
    needs_down, needs_down_bias, needs_shares = needs
    given = _ops._moe_spread(grad, ctx.choices, *routes, ctx.ranks_first, ctx.group)
    wide = accumulated(given.dtype)
    shares = None if weights is None else row_shares(weights, routes, ctx.group, wide)
    compute = _ops._moe_gate_backward
    again = torch.is_grad_enabled()  # a second derivative: of operators that have one
    if again:
        compute = gate_backward
    if rows is None or (again and x is not None):
        rows = _ops._moe_spread(x, ctx.choices, *routes, ctx.ranks_first, ctx.group)
    if parts[0] is None or again:
        parts = [None if w is None else _ops._moe_linear(rows, w, offs) for w in (gate_up, up)]
    product = _ops._moe_linear(given, down.transpose(1, 2), offs)
    operands = (parts[0], None if up is None else parts[1], bias, shares, offs)
    of_hidden, of_up, active, dots = compute(product, *operands, *ctx.form)
    late = None if ctx.early else shares
    if down_bias is not None and late is not None:
        # Eight times the bias, as the columns of a weight are multiples of eight.
        eight = down_bias[:, None, :].expand(-1, 8, -1).contiguous()
        dots = dots + _ops._moe_linear(given, eight, offs)[:, :1].to(dots.dtype)
    pairs = [(of_hidden, gate_up)] if up is None else [(of_hidden, gate_up), (of_up, up)]
    of_x = of_rows = None
    both = of_hidden if up is None else torch.cat((of_hidden, of_up), 1) if needs_bias else None
    how = (None, ctx.tokens, ctx.choices, *routes, ctx.ranks_first, ctx.group)
    if needs_x and up is None and not again:
        of_x = _ops._moe_down(of_hidden, gate_up.transpose(1, 2), None, offs, *how)
    elif needs_x or needs_rows:
        terms = [_ops._moe_linear(part, w.transpose(1, 2), offs) for part, w in pairs]
        of_rows = terms[0] if up is None else terms[0] + terms[1]
        if needs_x:
            of_x, of_rows = _ops.moe_combine(of_rows, *how), None
    return (
        of_x,
        of_rows,
        _ops._moe_weight_gradient(of_hidden, rows, offs) if needs_gate else None,
        _ops._moe_weight_gradient(of_up, rows, offs) if needs_up else None,
        sums_of_experts(both, None, offs) if needs_bias else None,
        _ops._moe_weight_gradient(given, active, offs) if needs_down else None,
        sums_of_experts(given, late, offs) if needs_down_bias else None,
        share_gradients(dots, weights, routes, ctx.group) if needs_shares else None,
        *(None,) * (len(ctx.needs_input_grad) - 8),
    )


complete({"_moe_experts": _fake_experts}, {"_moe_experts": (_backward, _keep)})


@register_flop_formula(_ops._moe_experts)
def _flops(x, rows: torch.Size, gate_up: torch.Size, up, bias, down: torch.Size, *args, **kwargs):
    return flops_hidden(rows, gate_up, up) + 2 * rows[0] * down[-2] * down[-1]
