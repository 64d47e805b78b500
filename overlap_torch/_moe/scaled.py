"""Experts with fp8 weights: rows travel and are multiplied in float8_e4m3fn, with scales of their own.

A *packed row* has its K numbers in float8_e4m3fn and then its float32 scales, filled up to 16 bytes: one of the row or, by
blocks, one of each 128 numbers. The operators that carry rows take packed rows as rows of bfloat16.

    x | pack | tokens to peers | rows | gate, up, activation | pack | down | results home, in bfloat16 | sums |
"""

from __future__ import annotations

import torch
from torch.utils.flop_counter import register_flop_formula

from overlap_torch._moe import ops
from overlap_torch._moe.activation import FORM, NO_ACTIVATION
from overlap_torch._moe.checks import BLOCK, Operands, Way, present
from overlap_torch._moe.ops import ROUTES, combine, complete, define, peer_stride, row_shares
from overlap_torch._moe.products import ends_of, kernel_takes
from overlap_torch._ops.composition import quantized
from overlap_torch._ops.eager import is_seen

_ops = torch.ops.overlap
FP8 = torch.float8_e4m3fn


def _scales(width: int, by_blocks: bool) -> int:
    """The scales of a packed row of `width` numbers."""
    return -(-width // BLOCK) if by_blocks else 1


def _packed_bytes(width, by_blocks: bool):
    return width + -(-_scales(width, by_blocks) // 4) * 16


@define("_moe_pack(Tensor rows, Tensor? offs, bool by_blocks) -> Tensor")
def _pack(rows, offs, by_blocks):
    """[R, K] to packed rows. A CUDA kernel leaves rows after the last end undefined."""
    width = rows.shape[1]
    values, scales = quantized(rows.float(), BLOCK if by_blocks else width)
    room = (_packed_bytes(width, by_blocks) - width) // 4
    after = torch.nn.functional.pad(scales, (0, room - scales.shape[1]))
    return torch.cat([values.view(torch.uint8), after.view(torch.uint8)], 1).view(FP8)


def scales_of_rows(packed: torch.Tensor, width: int, by_blocks: bool) -> torch.Tensor:
    """A view, float32 [R, 1] or [R, blocks], of packed rows of ``width`` numbers."""
    first = width // 4
    return packed.view(torch.float32)[:, first : first + _scales(width, by_blocks)]


def of_numbers(scales: torch.Tensor, width: int) -> torch.Tensor:
    """Scales of blocks [..., blocks] to those of their numbers [..., width]."""
    return scales.repeat_interleave(BLOCK, -1)[..., :width]


def row_quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., N, K] to float8_e4m3fn, and the scale of each row, float32 [..., N]."""
    values, scales = quantized(weight.float(), weight.shape[-1])
    return values, scales[..., 0]


def block_quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., N, K] to float8_e4m3fn, and the scale of each block of 128 rows and columns, float32 [..., blocks, blocks]."""
    rows, columns = weight.shape[-2:]
    whole = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = whole.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK)).transpose(-3, -2)
    values, scales = quantized(blocks.flatten(-2), BLOCK * BLOCK)
    values = values.unflatten(-1, (BLOCK, BLOCK)).transpose(-3, -2).flatten(-2).flatten(-3, -2)
    return values[..., :rows, :columns].contiguous(), scales[..., 0]


def _fits(packed, weights, scales, others, gates=False) -> bool:
    """True if this package's grouped GEMM takes the operands: contiguous weights [e, N, K], N and K multiples of 16, K at least 64.
    ``others``: what it also reads by 8 bytes or more, or None. ``gates``: a weight's halves are gate and up, whose tiles of 64
    columns must not have scales of two blocks."""
    experts, columns, inner = weights[0].shape
    by_blocks = scales[0].dim() == 3
    if by_blocks and gates and len(weights) == 1 and columns % 128 != 0:
        return False
    read = present(*weights, *others, *(() if by_blocks else scales))
    whole = all(each.is_contiguous() for each in (*read, *present(*scales)))
    return whole and kernel_takes(packed, inner, experts, read)


def packed_linear(packed, weight, scale, bias, offs):
    """Packed rows and [e, N, K] to [R, N]: sums times the scales of row and column, or sums of blocks, each times its scales,
    rounded to bfloat16; then plus a bias [e, N]."""
    if _fits(packed, [weight], (scale,), (bias,)):
        call = (packed, weight, None, bias, None, offs, *NO_ACTIVATION, False, scale)
        return _ops._moe_grouped(*call)[0]
    output = packed.new_zeros((packed.shape[0], weight.shape[1]), dtype=torch.bfloat16)
    if packed.shape[0] == 0:
        return output
    columns, inner = weight.shape[1:]
    by_blocks = scale.dim() == 3
    scales = scales_of_rows(packed, inner, by_blocks)
    for expert, (begin, end) in enumerate(ends_of(offs)):
        if begin == end:
            continue
        rows, matrix = packed[begin:end, :inner].float(), weight[expert].float()
        if by_blocks:
            rows *= of_numbers(scales[begin:end], inner)
            matrix *= of_numbers(of_numbers(scale[expert], inner).t(), columns).t()
            output[begin:end] = rows @ matrix.t()
        else:
            output[begin:end] = rows @ matrix.t() * scales[begin:end] * scale[expert]
        if bias is not None:
            output[begin:end] += bias[expert]
    return output


@define(
    "_moe_scaled_hidden(Tensor rows, Tensor weight, Tensor? up, Tensor scale, Tensor? up_scale, Tensor? bias, Tensor? shares, Tensor offs, "
    f"{FORM}) -> Tensor"
)
def _hidden(packed, weight, up, scale, up_scale, bias, shares, offs, *form):
    """The product of packed rows with one weight or two, then `_moe_gate`."""
    *_, gated, interleaved = form
    gate = gated and not (interleaved and up is not None)
    weights = present(weight, up)
    if gate and _fits(packed, weights, (scale, up_scale), (bias,), not interleaved):
        call = (packed, weight, up, bias, shares, offs, *form, False, scale, up_scale)
        return _ops._moe_grouped(*call)[0]
    parts = [packed_linear(packed, weight, scale, None, offs), None]
    if up is not None:
        parts[1] = packed_linear(packed, up, up_scale, None, offs)
    return _ops._moe_gate(*parts, bias, shares, offs, *form)


@define(
    "_moe_scaled_down(Tensor hidden, Tensor weight, Tensor scale, Tensor? bias, Tensor offs, Tensor? topk_weights, SymInt tokens, int choices, "
    f"{ROUTES}, bool ranks_first, str group) -> Tensor"
)
def _down(packed, weight, scale, bias, offs, topk_weights, tokens, choices, *how):
    """As `_moe_down`, of packed rows."""
    *routes, ranks_first, group = how
    stride = peer_stride(routes[4])
    if stride is not None and not ranks_first and _fits(packed, [weight], (scale,), (bias,)):
        form = (routes[0], routes[3], stride, tokens, choices, group)
        return _ops._moe_peer_down(packed, weight, bias, offs, topk_weights, *form, scale)
    results = packed_linear(packed, weight, scale, bias, offs)
    return combine(results, topk_weights, tokens, choices, *routes, ranks_first, group)


def experts(given: Operands, scales, form, shares_on: str, own: list[int], way: Way):
    """`moe` of fp8 weights with their scales; ``own``: the experts of each rank."""
    tokens, ids, shares, gate_up, up, gate_up_bias, down, down_bias = given
    scale, up_scale, scale_down = (scales[0], None, scales[1]) if up is None else scales
    short, by_blocks = not is_seen(*present(*given)), scale.dim() == 3
    home_bytes = tokens.shape[1] * tokens.element_size()
    with torch.no_grad():
        packed = _ops._moe_pack(tokens, None, by_blocks).view(torch.bfloat16)
        # The GPU waits for the host after the number of rows is known: these calls leave the dispatcher out.
        dispatch, multiply = _ops.moe_dispatch, _ops._moe_scaled_hidden
        if short:
            dispatch, multiply = ops.dispatch, _hidden
        rows, offs, _, *routes = dispatch(packed, ids, own, 1, *way, home_bytes)
        rows, of_rows = rows.view(FP8), None
        if shares_on != "output":
            of_rows, shares = row_shares(shares, routes, way.group, torch.float32), None
        if shares_on == "input":
            scales_of_rows(rows, tokens.shape[1], by_blocks).mul_(of_rows)
            of_rows = None
        call = (rows, gate_up, up, scale, up_scale, gate_up_bias, of_rows, offs)
        hidden = multiply(*call, *form)
        packed = _ops._moe_pack(hidden, offs, by_blocks)
        call = (packed, down, scale_down, down_bias, offs, shares, *ids.shape)
        return _ops._moe_scaled_down(*call, *routes, way.ranks_first, way.group)


def _fake_hidden(packed, weight, up, scale, up_scale, bias, shares, offs, *form):
    *_, gated, _ = form
    width = weight.shape[1] // (2 if gated and up is None else 1)
    return packed.new_empty((packed.shape[0], width), dtype=torch.bfloat16)


def _fake_down(packed, weight, scale, bias, offs, topk_weights, tokens, *how):
    return packed.new_empty((tokens, weight.shape[1]), dtype=torch.bfloat16)


complete(
    {
        "_moe_pack": lambda rows, _, by_blocks: rows.new_empty(
            (rows.shape[0], _packed_bytes(rows.shape[1], by_blocks)), dtype=FP8
        ),
        "_moe_scaled_hidden": _fake_hidden,
        "_moe_scaled_down": _fake_down,
    },
    {},
)


@register_flop_formula(_ops._moe_scaled_hidden)
def _flops_hidden(packed: torch.Size, weight: torch.Size, up: torch.Size | None, *args, **kwargs):
    return 2 * packed[0] * weight[1] * weight[2] * (1 if up is None else 2)


@register_flop_formula(_ops._moe_scaled_down)
def _flops_down(packed: torch.Size, weight: torch.Size, *args: object, **kwargs: object) -> int:
    return 2 * packed[0] * weight[1] * weight[2]
