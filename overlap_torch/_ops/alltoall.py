"""Sends rows of ``input @ weight.T + bias`` to the ranks that own them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import ScalingType

from overlap_torch._ops import eager, fakes, scaled
from overlap_torch._ops.gradients import register_vmap
from overlap_torch._ops.group import Group
from overlap_torch._ops.ordering import register_fake

_op = eager.Op(torch.ops.overlap.gemm_alltoall.default)


@register_fake("overlap::gemm_alltoall")
def _fake(input, weight, send_rows, recv_rows, *operands, group, **keywords):
    fakes.row_dim("gemm_alltoall", input)
    make = scaled.result_of("gemm_alltoall", input, weight, *operands, **keywords)
    fakes.check_counts(input, send_rows, recv_rows, group)
    return make(sum(recv_rows), *input.shape[1:-1])


register_vmap(_op.overload)


def gemm_alltoall(
    input: torch.Tensor,
    weight: torch.Tensor,
    send_rows: Sequence[int],
    recv_rows: Sequence[int],
    bias: torch.Tensor | None = None,
    *,
    group: Group = None,
    scale_input: torch.Tensor | None = None,
    scale_weight: torch.Tensor | None = None,
    recipe_input: ScalingType | None = None,
    recipe_weight: ScalingType | None = None,
    output_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """Sends rows of ``input @ weight.T + bias`` to their ranks, while the GEMM computes later ranks' rows.

    If 2 to 8 GPUs of one host map each other's memory over a fast link, the GEMM itself stores rows into their rank's
    memory. This needs many rows, no bias, and operands that the kernels take (Hopper, bf16 and fp16); otherwise one kernel
    sends the rows after the GEMM. NCCL sends them if there is no such memory, if rows of the output are not multiples of 16
    bytes, and for float64. On CPU the process group does.

    The result equals the unfused composition::

        rows = torch.nn.functional.linear(input, weight, bias)
        output = rows.new_empty(sum(recv_rows), *rows.shape[1:])
        torch.distributed.all_to_all_single(output, rows, recv_rows, send_rows, group=group)
        output

    Every rank of the group calls it with the same N, K, dims between the first and the last and dtype, in the same order
    of calls; a rank that has nothing to send or to receive takes part, too. Weights, biases and numbers of rows may differ
    by rank. The composition runs if the fast path cannot.

    Args:
        input: [D0, ..., K], this rank's rows, in order of their destination ranks.
        weight: [N, K], as in ``torch.nn.Linear``; fastest if it is contiguous along one of its dims.
        send_rows: the number of rows of dim 0 for each rank: one count >= 0 for each rank, D0 in all.
        recv_rows: the number of rows from each rank; rank r's ``send_rows[s]`` is rank s's ``recv_rows[r]``.
        bias: [N] or None; the sender adds it.
        group: None (the default group), a process group's name, a ``ProcessGroup`` or a one-dimensional ``DeviceMesh``.
        scale_input, scale_weight, recipe_input, recipe_weight, output_dtype, use_fast_accum: for fp8 operands, as in
            :func:`overlap_torch.gemm_allreduce`.

    Returns:
        A fresh, contiguous tensor [sum(recv_rows), ..., N], of the operands' dtype, in order of the sending ranks. Dtypes,
        accumulation and autocast are as in :func:`overlap_torch.gemm_allreduce`.

    Gradients are in reverse mode, of any order. Backward sends the gradient's rows back, and every rank has to take part. The
    rest is local, so gradients of weight and bias are this rank's own. Transforms of ``torch.func`` and other errors are as in
    :func:`overlap_torch.gemm_allreduce`.

    Raises:
        ValueError: counts that are not one for each rank, negative or do not add up to D0, shapes or devices that do
            not fit, or an unknown group.
        RuntimeError: with ``OVERLAP_DEBUG=1`` also ranks that disagree about the counts.
    """
    return _op.call(
        group, input, weight, send_rows, recv_rows, bias, scale_input, scale_weight,
        *scaled.numbers(scale_input, recipe_input, recipe_weight, output_dtype), use_fast_accum,
    )  # fmt: skip
