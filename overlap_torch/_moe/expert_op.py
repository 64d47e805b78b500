"""The second half of a rank's experts, with the gradients of both halves: backward needs no results and no activations."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import register_flop_formula

from overlap_torch._moe.activation import FORM, gate_backward, sums_of_experts
from overlap_torch._moe.ops import ROUTES, after, complete, define, row_shares, share_gradients
from overlap_torch._moe.products import flops
from overlap_torch._ops.composition import accumulated

_ops = torch.ops.overlap


@define(
    "_moe_experts(Tensor? x, Tensor rows, Tensor hidden, Tensor? kept, Tensor? kept_up, Tensor gate_up, Tensor? up, Tensor? bias, Tensor down, "
    f"Tensor? down_bias, Tensor? topk_weights, Tensor offs, {FORM}, bool early, SymInt tokens, int choices, {ROUTES}, bool ranks_first, bool keep_rows, "
    "str group) -> Tensor"
)
def _experts(x, rows, hidden, kept, kept_up, gate_up, up, bias, down, down_bias, *rest):
    """`_moe_down` of ``hidden``, which `_moe_hidden` made of the rows, with the gradients of both and of the way to the rows.

    The shares multiplied the hidden rows if they are `early`, else they multiply the results. `x` [T, H]: the tokens that became
    the rows; it gets the rows' gradients, summed. Without it the rows get them. ``kept``, ``kept_up``: the products before the
    gate; None: backward makes them again, and the rows, too, unless it may ``keep_rows``.
    """
    topk_weights, offs, *how = rest
    early, tokens, choices = how[6:9]
    *routes, ranks_first, _, group = how[9:]
    late = None if early else topk_weights
    how = (late, tokens, choices, *routes, ranks_first, group)
    return _ops._moe_down(hidden, down, down_bias, offs, *how)


def _fake_experts(x, rows, hidden, kept, kept_up, gate_up, up, bias, down, *rest):
    return rows.new_empty((rest[10], down.shape[1]))


def _keep(ctx, inputs, output) -> None:
    (x, rows, _, *operands), how = inputs[:12], inputs[12:]
    *ctx.form, ctx.early, ctx.tokens, ctx.choices = how[:9]
    *routes, ctx.ranks_first, keep_rows, ctx.group = how[9:]
    ctx.save_for_backward(x, rows if keep_rows else None, *operands, *routes)


def _backward(ctx, grad, *_):
    saved = ctx.saved_tensors  # checkpoints let it be read once
    x, rows, *parts, gate_up, up, bias, down, down_bias, weights, offs = saved[:11]
    routes = saved[11:]
    needs_x, needs_rows, _, _, _, needs_gate, needs_up, *needs = ctx.needs_input_grad[:11]
    needs_bias, needs_down, needs_down_bias, needs_shares = needs
    way = (ctx.choices, *routes, ctx.ranks_first, ctx.group)
    wide = accumulated(grad.dtype)
    shares = None if weights is None else row_shares(after(weights, grad), routes, ctx.group, wide)
    compute = _ops._moe_gate_backward
    again = torch.is_grad_enabled()  # a second derivative: of operators that have one
    if again:
        compute = gate_backward
    given = _ops._moe_spread(grad, *way)
    product = _ops._moe_linear(given, down.transpose(1, 2), offs)
    if rows is None or (again and x is not None):
        rows = _ops._moe_spread(after(x, grad), *way)
    if parts[0] is None or again:
        parts = [None if w is None else _ops._moe_linear(rows, w, offs) for w in (gate_up, up)]
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
        *(None,) * 3,
        _ops._moe_weight_gradient(of_hidden, rows, offs) if needs_gate else None,
        _ops._moe_weight_gradient(of_up, rows, offs) if needs_up else None,
        sums_of_experts(both, None, offs) if needs_bias else None,
        _ops._moe_weight_gradient(given, active, offs) if needs_down else None,
        sums_of_experts(given, late, offs) if needs_down_bias else None,
        share_gradients(dots, weights, routes, ctx.group) if needs_shares else None,
        *(None,) * (len(ctx.needs_input_grad) - 11),
    )


complete({"_moe_experts": _fake_experts}, {"_moe_experts": (_backward, _keep)})


@register_flop_formula(_ops._moe_experts)
def _flops(*args: object, **kwargs: object) -> int:
    return flops(args[2], args[8])
