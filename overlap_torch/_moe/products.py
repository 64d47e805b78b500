"""The experts' products and their gradients, by this package's grouped GEMM (Hopper), PyTorch's, or a GEMM for each
expert."""

from __future__ import annotations

import functools

import torch
from torch.utils.flop_counter import register_flop_formula

from overlap_torch._moe.activation import FORM, NO_ACTIVATION
from overlap_torch._moe.ops import (
    ROUTES,
    combine,
    combine_gradients,
    complete,
    define,
    library,
    peer_stride,
)

_ops = torch.ops.overlap

# For CUDA on Hopper only: csrc/binding/cuda/moe_cuda.cc.
library.define(
    f"_moe_grouped(Tensor rows, Tensor weight, Tensor? up, Tensor? bias, Tensor offs, {FORM}) -> Tensor"
)


def _ends(offs: torch.Tensor) -> list[tuple[int, int]]:
    ends = offs.tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True)) if ends else []


def _groups_fit(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> bool:
    """True if torch's grouped_mm takes the operands without waiting for the host: bfloat16 on CUDA, 16-byte strides and
    pointers."""
    return (
        a.is_cuda
        and a.dtype == b.dtype == torch.bfloat16
        and a.numel() > 0
        and b.numel() > 0
        and 0 < offs.shape[0] < 1024
        and torch.cuda.get_device_capability(a.device) >= (8, 0)
        and all(_aligned(tensor) for tensor in (a, b))
    )


def _aligned(tensor: torch.Tensor) -> bool:
    wide = [stride for stride in tensor.stride()[-2:] if stride != 1]
    outer = tensor.stride()[:-2]
    aligned = all(stride * tensor.element_size() % 16 == 0 for stride in (*wide, *outer))
    return aligned and len(wide) == 1 and tensor.data_ptr() % 16 == 0


@functools.cache
def _on_hopper(device: torch.device) -> bool:
    built = torch._C._dispatch_has_kernel_for_dispatch_key("overlap::_moe_grouped", "CUDA")
    return built and torch.cuda.get_device_capability(device) == (9, 0)


def _ours_fit(
    rows: torch.Tensor, read: list[torch.Tensor], offs: torch.Tensor, columns: int
) -> bool:
    """True if this package's grouped GEMM takes the operands: 16-bit types, and contiguous rows of at least 128 bytes and
    multiples of 16. Rows of the output, [R, columns], are multiples of 16 bytes, too. ``read``: weights and biases, which
    it reads by 16 bytes."""
    return (
        rows.is_cuda
        and rows.dtype in (torch.bfloat16, torch.float16)
        and rows.numel() > 0
        and 0 < offs.shape[0] <= 1024
        and rows.shape[1] >= 64
        and rows.shape[1] % 8 == 0
        and columns > 0
        and columns % 8 == 0
        and all(
            each.is_contiguous() and each.dtype == rows.dtype and each.data_ptr() % 16 == 0
            for each in (rows, *read)
        )
        and _on_hopper(rows.device)
    )


@define("_moe_linear(Tensor rows, Tensor weight, Tensor offs) -> Tensor")
def _linear(rows, weight, offs):
    """[R, K] and [e, N, K] to [R, N]: each expert's rows with its own weight."""
    if _ours_fit(rows, [weight], offs, weight.shape[1]):
        return _ops._moe_grouped(rows, weight, None, None, offs, *NO_ACTIVATION)
    turned = weight.transpose(1, 2)
    if _groups_fit(rows, turned, offs):
        return torch._grouped_mm(rows, turned, offs=offs).contiguous()  # it pads short rows
    output = rows.new_zeros((rows.shape[0], weight.shape[1]))
    for expert, (begin, end) in enumerate(_ends(offs)):
        if end > begin:
            torch.mm(rows[begin:end], turned[expert], out=output[begin:end])
    return output


@define("_moe_weight_gradient(Tensor grad, Tensor rows, Tensor offs) -> Tensor")
def _weight_gradient(grad, rows, offs):
    """[R, N] and [R, K] to [e, N, K]; zeros for an expert without rows."""
    if _groups_fit(grad.t(), rows, offs):
        return torch._grouped_mm(grad.t(), rows, offs=offs).contiguous()
    output = grad.new_zeros((offs.shape[0], grad.shape[1], rows.shape[1]))
    for expert, (begin, end) in enumerate(_ends(offs)):
        if end > begin:
            torch.mm(grad[begin:end].t(), rows[begin:end], out=output[expert])
    return output


@define(
    f"_moe_hidden(Tensor rows, Tensor weight, Tensor? up, Tensor? bias, Tensor offs, {FORM}) -> Tensor"
)
def _hidden(rows, weight, up, bias, offs, *form):
    """`_moe_linear` of one weight or two, and `_moe_gate`. It has no gradients."""
    gated, interleaved = form[-2:]
    weights = [weight] if up is None else [weight, up]
    columns = weight.shape[1] if up is not None else weight.shape[1] // 2
    read = weights if bias is None else [*weights, bias]
    if gated and not (up is not None and interleaved) and _ours_fit(rows, read, offs, columns):
        return _ops._moe_grouped(rows, weight, up, bias, offs, *form)
    parts = [_linear(rows, each, offs) for each in weights]
    return _ops._moe_gate(*parts, *(None,) * (2 - len(parts)), bias, offs, *form)


@define(
    f"_moe_down(Tensor hidden, Tensor weight, Tensor offs, Tensor? topk_weights, SymInt tokens, int choices, {ROUTES}, "
    "bool ranks_first, bool keep, str group) -> (Tensor, Tensor)"
)
def _down(hidden, weight, offs, topk_weights, tokens, choices, *how):
    """`_moe_linear`, then `moe_combine`; returns also the experts' results if they are kept, else an empty tensor.

    On Hopper, over peers, results travel back as the GEMM's tiles are finished, unless each rank sums its own results
    first.
    """
    *routes, ranks_first, keep, group = how
    stride = peer_stride(routes[4])
    if (
        stride is not None
        and not ranks_first
        and _ours_fit(hidden, [weight], offs, weight.shape[1])
    ):
        home, source = routes[0], routes[3]
        form = (stride, tokens, choices, keep, group)
        return _ops._moe_peer_down(hidden, weight, offs, topk_weights, home, source, *form)
    results = _linear(hidden, weight, offs)
    output = combine(results, topk_weights, tokens, choices, *routes, ranks_first, group)
    return output, results if keep else results.new_empty(0)


def _fake_hidden(rows, weight, up, bias, offs, *form):
    return rows.new_empty((rows.shape[0], weight.shape[1] // (2 if form[-2] and up is None else 1)))


def _fake_down(hidden, weight, offs, topk_weights, tokens, choices, *how):
    kept = (hidden.shape[0], weight.shape[1]) if how[-2] else 0
    return hidden.new_empty((tokens, weight.shape[1])), hidden.new_empty(kept)


def _keep_linear(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _linear_gradients(grad, rows, weight, offs, needs_rows: bool, needs_weight: bool):
    return (
        _ops._moe_linear(grad, weight.transpose(1, 2), offs) if needs_rows else None,
        _ops._moe_weight_gradient(grad, rows, offs) if needs_weight else None,
    )


def _linear_backward(ctx, grad):
    return *_linear_gradients(grad, *ctx.saved_tensors, *ctx.needs_input_grad[:2]), None


def _weight_gradient_backward(ctx, grad):
    of_output, rows, offs = ctx.saved_tensors
    needs_output, needs_rows, _ = ctx.needs_input_grad
    return (
        _ops._moe_linear(rows, grad, offs) if needs_output else None,
        _ops._moe_linear(of_output, grad.transpose(1, 2), offs) if needs_rows else None,
        None,
    )


def _keep_down(ctx, inputs, output) -> None:
    *operands, _, ctx.choices, a, b, c, d, e, ctx.ranks_first, _, ctx.group = inputs
    ctx.save_for_backward(*operands, output[1], a, b, c, d, e)
    ctx.set_materialize_grads(False)


def _down_backward(ctx, grad, more):
    """`more`: the results' gradient, of a second derivative."""
    hidden, weight, offs, shares, results, *routes = ctx.saved_tensors
    for_results, for_shares = more, None
    if grad is not None:
        form = (ctx.choices, ctx.ranks_first, ctx.group, ctx.needs_input_grad[3])
        for_results, for_shares = combine_gradients(grad, results, shares, routes, *form)
        if more is not None:
            for_results = for_results + more
    if for_results is None:
        return (None,) * 14
    products = _linear_gradients(for_results, hidden, weight, offs, *ctx.needs_input_grad[:2])
    return *products, None, for_shares, *(None,) * 10


complete(
    {
        "_moe_linear": lambda rows, weight, _: rows.new_empty((rows.shape[0], weight.shape[1])),
        "_moe_weight_gradient": lambda grad, rows, offs: grad.new_empty(
            (offs.shape[0], grad.shape[1], rows.shape[1])
        ),
        "_moe_hidden": _fake_hidden,
        "_moe_down": _fake_down,
    },
    {
        "_moe_linear": (_linear_backward, _keep_linear),
        "_moe_weight_gradient": (_weight_gradient_backward, _keep_linear),
        "_moe_down": (_down_backward, _keep_down),
    },
)


@register_flop_formula([_ops._moe_linear, _ops._moe_weight_gradient, _ops._moe_down])
def _flops(left: torch.Size, right: torch.Size, *args: object, **kwargs: object) -> int:
    """Rows by columns by columns: of [R, K] and [e, N, K], or [R, N] and [R, K]."""
    return 2 * left[0] * left[1] * (right[1] if len(right) == 2 else right[-2])


@register_flop_formula(_ops._moe_hidden)
def _flops_hidden(
    rows: torch.Size, weight: torch.Size, up: torch.Size | None, *args, **kwargs
) -> int:
    return _flops(rows, weight) * (1 if up is None else 2)
