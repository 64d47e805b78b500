"""The experts' products and their gradients, by this package's grouped GEMM (Hopper), PyTorch's, or a GEMM for each
expert."""

from __future__ import annotations

import functools

import torch
from torch.utils.flop_counter import register_flop_formula

from overlap_torch._moe.activation import FORM, NO_ACTIVATION
from overlap_torch._moe.checks import present
from overlap_torch._moe.ops import ROUTES, combine, complete, define, library, peer_stride

_ops = torch.ops.overlap

_HIDDEN = "Tensor rows, Tensor weight, Tensor? up, Tensor? bias, Tensor? shares, Tensor offs"
_SCALED = "Tensor? scale=None, Tensor? up_scale=None) -> (Tensor, Tensor, Tensor)"
# For CUDA on Hopper only: csrc/binding/cuda/moe_cuda.cc and moe_home_cuda.cc.
for _schema in (
    f"_moe_grouped({_HIDDEN}, {FORM}, bool keep, {_SCALED}",
    "_moe_grouped_weights(Tensor grad, Tensor rows, Tensor offs) -> Tensor",
    "_moe_peer_down(Tensor hidden, Tensor weight, Tensor? bias, Tensor offs, Tensor? shares, Tensor home, Tensor source, int stride, int tokens, "
    "int choices, str group, Tensor? scale=None) -> Tensor",
):
    library.define(_schema)


# PyTorch's gradients of weights are faster if experts have fewer rows on average.
_FEW_ROWS = 256


def ends_of(offs: torch.Tensor) -> list[tuple[int, int]]:
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


def kernel_takes(rows: torch.Tensor, inner: int, experts: int, read: list[torch.Tensor]) -> bool:
    """True if the package's grouped GEMM can read rows [R, ...], and `read` beside them, whatever their types."""
    return (
        rows.is_cuda
        and rows.numel() > 0
        and 0 < experts <= 1024
        and inner >= 64
        and all(each.data_ptr() % 16 == 0 for each in (rows, *read))
        and _on_hopper(rows.device)
    )


def _ours_fit(
    rows: list[torch.Tensor], weights: list[torch.Tensor], others: list, experts: int
) -> bool:
    """True if this package's grouped GEMM takes the operands: 16-bit types, and rows of at least 128 bytes and multiples of
    16. ``rows``: [R, ...], contiguous. ``weights``: [e, N, K], contiguous along N, or all along K. ``others``: what it also
    reads by 16 bytes, or None."""
    turned = [weight.transpose(1, 2) for weight in weights]
    others = present(*others)
    read = [*rows[1:], *weights, *others]
    return (
        kernel_takes(rows[0], rows[0].shape[1], experts, read)
        and rows[0].dtype in (torch.bfloat16, torch.float16)
        and all(each.shape[1] > 0 and each.shape[1] % 8 == 0 for each in (*rows, *weights))
        and any(all(each.is_contiguous() for each in form) for form in (weights, turned))
        and all(each.is_contiguous() for each in (*rows, *others))
        and all(each.dtype == rows[0].dtype for each in read)
    )


@define("_moe_linear(Tensor rows, Tensor weight, Tensor offs) -> Tensor")
def _linear(rows, weight, offs):
    """[R, K] and [e, N, K] to [R, N]: each expert's rows with its own weight."""
    if _ours_fit([rows], [weight], [], offs.shape[0]):
        return _ops._moe_grouped(rows, weight, None, None, None, offs, *NO_ACTIVATION, False)[0]
    turned = weight.transpose(1, 2)
    if _groups_fit(rows, turned, offs):
        return torch._grouped_mm(rows, turned, offs=offs).contiguous()  # it pads short rows
    output = rows.new_zeros((rows.shape[0], weight.shape[1]))
    for expert, (begin, end) in enumerate(ends_of(offs)):
        if end > begin:
            torch.mm(rows[begin:end], turned[expert], out=output[begin:end])
    return output


@define("_moe_weight_gradient(Tensor grad, Tensor rows, Tensor offs) -> Tensor")
def _weight_gradient(grad, rows, offs):
    """[R, N] and [R, K] to [e, N, K]; zeros for an expert without rows."""
    few = rows.shape[0] < _FEW_ROWS * offs.shape[0]
    torchs = _groups_fit(grad.t(), rows, offs)
    if not (few and torchs) and _ours_fit([grad, rows], [], [], offs.shape[0]):
        return _ops._moe_grouped_weights(grad, rows, offs)
    if torchs:
        return torch._grouped_mm(grad.t(), rows, offs=offs).contiguous()
    output = grad.new_zeros((offs.shape[0], grad.shape[1], rows.shape[1]))
    for expert, (begin, end) in enumerate(ends_of(offs)):
        if end > begin:
            torch.mm(grad[begin:end].t(), rows[begin:end], out=output[expert])
    return output


def gate_fits(rows, weight, up, bias, experts: int, gated: bool, interleaved: bool) -> bool:
    """True if this package's grouped GEMM takes the operands, with the gate."""
    fits = weight.shape[1] % 16 == 0 if up is None else not interleaved
    weights = [weight] if up is None else [weight, up]
    return gated and fits and _ours_fit([rows], weights, [bias], experts)


@define(f"_moe_hidden({_HIDDEN}, {FORM}, bool keep) -> (Tensor, Tensor, Tensor)")
def _hidden(rows, weight, up, bias, shares, offs, *form_and_keep):
    """`_moe_linear` of one weight or two, and `_moe_gate`; and the products themselves if they are kept. Missing tensors
    are empty."""
    *form, keep = form_and_keep
    if gate_fits(rows, weight, up, bias, offs.shape[0], *form[-2:]):
        return _ops._moe_grouped(rows, weight, up, bias, shares, offs, *form_and_keep)
    parts = [_linear(rows, each, offs) for each in (weight, up) if each is not None]
    hidden = _ops._moe_gate(*parts, *(None,) * (2 - len(parts)), bias, shares, offs, *form)
    kept = parts if keep else []
    return hidden, *kept, *(rows.new_empty(0) for _ in range(2 - len(kept)))


@define(
    f"_moe_down(Tensor hidden, Tensor weight, Tensor? bias, Tensor offs, Tensor? topk_weights, SymInt tokens, int choices, {ROUTES}, "
    "bool ranks_first, str group) -> Tensor"
)
def _down(hidden, weight, bias, offs, topk_weights, tokens, choices, *how):
    """`_moe_linear` with a bias [e, N], then `moe_combine`. It has no gradients.

    On Hopper, over peers, results travel back as the GEMM's tiles are finished, unless each rank sums its own results
    first.
    """
    *routes, ranks_first, group = how
    stride, fits = peer_stride(routes[4]), _ours_fit([hidden], [weight], [bias], offs.shape[0])
    if stride is not None and not ranks_first and fits:
        form = (routes[0], routes[3], stride, tokens, choices, group)
        return _ops._moe_peer_down(hidden, weight, bias, offs, topk_weights, *form)
    if fits:
        call = (hidden, weight, None, bias, None, offs)
        results = _ops._moe_grouped(*call, *NO_ACTIVATION, False)[0]
    else:
        results = _linear(hidden, weight, offs)
        if bias is not None:
            results = _ops._moe_gate(results, None, bias, None, offs, *NO_ACTIVATION)
    return combine(results, topk_weights, tokens, choices, *routes, ranks_first, group)


def _fake_hidden(rows, weight, up, bias, shares, offs, *form_and_keep):
    *_, gated, _, keep = form_and_keep
    count, width = rows.shape[0], weight.shape[1]
    shapes = [(count, width) if keep else 0, (count, width) if keep and up is not None else 0]
    hidden = rows.new_empty((count, width // (2 if gated and up is None else 1)))
    return hidden, *(rows.new_empty(shape) for shape in shapes)


def _fake_down(hidden, weight, bias, offs, topk_weights, tokens, choices, *how):
    return hidden.new_empty((tokens, weight.shape[1]))


def _keep_linear(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _linear_backward(ctx, grad):
    rows, weight, offs = ctx.saved_tensors
    needs_rows, needs_weight, _ = ctx.needs_input_grad
    return (
        _ops._moe_linear(grad, weight.transpose(1, 2), offs) if needs_rows else None,
        _ops._moe_weight_gradient(grad, rows, offs) if needs_weight else None,
        None,
    )


def _weight_gradient_backward(ctx, grad):
    of_output, rows, offs = ctx.saved_tensors
    needs_output, needs_rows, _ = ctx.needs_input_grad
    return (
        _ops._moe_linear(rows, grad, offs) if needs_output else None,
        _ops._moe_linear(of_output, grad.transpose(1, 2), offs) if needs_rows else None,
        None,
    )


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
    },
)


@register_flop_formula([_ops._moe_linear, _ops._moe_weight_gradient, _ops._moe_down])
def flops(left: torch.Size, right: torch.Size, *args: object, **kwargs: object) -> int:
    """Rows by columns by columns: of [R, K] and [e, N, K], or [R, N] and [R, K]."""
    return 2 * left[0] * left[1] * (right[1] if len(right) == 2 else right[-2])


@register_flop_formula(_ops._moe_hidden)
def _flops_hidden(
    rows: torch.Size, weight: torch.Size, up: torch.Size | None, *args: object, **kwargs: object
) -> int:
    return flops(rows, weight) * (1 if up is None else 2)
