"""The unfused compositions: the meaning of each op. Tests compare the ops with these lines.

Operands are the ops': ``input`` [..., K], ``weight`` [N, K] as in ``torch.nn.Linear``, ``bias`` [N] or None.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.nn import functional


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, products with shares, norms and activations of operands in ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def gemm_allreduce(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group_name: str
) -> torch.Tensor:
    """``all_reduce(input @ weight.T) + bias``: a GEMM, then a collective, one after the other. [..., N]."""
    output = torch.matmul(input, weight.t())
    if output.numel() > 0:
        dist.all_reduce(output, group=_resolve_process_group(group_name))
    return output if bias is None else output + bias


def gemm_reducescatter(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group_name: str
) -> torch.Tensor:
    """``reduce_scatter(input @ weight.T, dim 0) + bias``: [D0, ..., K] to [D0 / world size, ..., N]."""
    group = _resolve_process_group(group_name)
    partial = torch.matmul(input, weight.t())
    output = partial.new_empty(partial.shape[0] // group.size(), *partial.shape[1:])
    if partial.numel() > 0:
        dist.reduce_scatter_tensor(output, partial, group=group)
    return output if bias is None else output + bias


def allgather_gemm(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """``g = all_gather(input, dim 0)``, then ``(g @ weight.T + bias, g)``."""
    (output,), gathered = allgather_gemm_weights(input, [weight], [bias], group_name)
    return output, gathered


def allgather_gemm_weights(
    input: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    group_name: str,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """``g = all_gather(input, dim 0)``, then a product for each weight. ``biases`` is empty or one for each."""
    group = _resolve_process_group(group_name)
    gathered = input.new_empty(input.shape[0] * group.size(), *input.shape[1:])
    if gathered.numel() > 0:
        dist.all_gather_into_tensor(gathered, input.contiguous(), group=group)
    outputs = [
        functional.linear(gathered, weight, bias)
        for weight, bias in zip(weights, biases or [None] * len(weights), strict=True)
    ]
    return outputs, gathered


def finish(
    total: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    gain_offset: float = 0.0,
    round_before_gain: bool = False,
    quantize: str | None = None,
    scale: torch.Tensor | None = None,
    return_norm: bool = False,
) -> list[torch.Tensor]:
    """The results from a sum's rows [..., N]: norm or its cast, sum with residual, scales, the norm before the cast."""
    dtype = total.dtype
    wide = accumulated(dtype)
    for term in (bias, residual):
        total = total if term is None else total + term
    if gain_offset == 0.0 and not round_before_gain:  # one kernel of PyTorch's
        norm = functional.rms_norm(total, total.shape[-1:], norm_weight, eps)
    else:
        rows = total.to(wide)
        norm = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
        if round_before_gain:
            norm = norm.to(dtype).to(wide)
        norm = (norm * (norm_weight.to(wide) + gain_offset)).to(dtype)
    if quantize is None:
        return [norm, total]
    numbers, kept = norm.float(), [norm] if return_norm else []
    if quantize == "tensorwise":
        return [_to_fp8(numbers / scale), total, *kept]
    values, scales = quantized(numbers, numbers.shape[-1] if quantize == "rowwise" else 128)
    # Block after block: a block's scales for all rows.
    scales = scales.movedim(-1, 0).contiguous().movedim(0, -1)
    return [values, total, scales, *kept]


def quantized(numbers: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [..., N] to float8_e4m3fn, and the scale of each block of these columns, float32 [..., blocks]."""
    columns = numbers.shape[-1]
    if columns == 0:  # one scale all the same, where a row is a block
        return _to_fp8(numbers), numbers.new_full(
            (*numbers.shape[:-1], int(width == 0)), 1e-12 / 448
        )
    blocks = functional.pad(numbers, (0, -columns % width)).unflatten(-1, (-1, width))
    largest = blocks.abs().amax(-1).clamp(min=1e-12)
    scales = largest / largest.new_full((), 448.0)  # CUDA multiplies by a number's reciprocal
    values = (blocks / scales.unsqueeze(-1)).flatten(-2)[..., :columns]
    return _to_fp8(values), scales


def _to_fp8(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.clamp(-448, 448).to(torch.float8_e4m3fn)


def gemm_alltoall(
    input: torch.Tensor,
    weight: torch.Tensor,
    send_rows: Sequence[int],
    recv_rows: Sequence[int],
    bias: torch.Tensor | None,
    group_name: str,
) -> torch.Tensor:
    """Rows of ``input @ weight.T + bias`` to their ranks: [D0, ..., K] to [sum of recv_rows, ..., N]."""
    rows = functional.linear(input, weight, bias)
    output = rows.new_empty(sum(recv_rows), *rows.shape[1:])
    dist.all_to_all_single(
        output, rows, list(recv_rows), list(send_rows), group=_resolve_process_group(group_name)
    )
    return output
