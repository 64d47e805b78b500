"""``reduce_scatter(input @ weight.T, dim 0) + bias``."""

from __future__ import annotations

import torch
from torch.nn.functional import ScalingType

from overlap_torch._ops import eager, fakes, scaled
from overlap_torch._ops.gradients import register_vmap
from overlap_torch._ops.group import Group, world_size
from overlap_torch._ops.ordering import register_fake

_op = eager.Op(torch.ops.overlap.gemm_reducescatter.default)


@register_fake("overlap::gemm_reducescatter")
def _fake(input, *operands, dim=0, group, **keywords):
    place = fakes.row_dim("gemm_reducescatter", input, dim)
    make = scaled.result_of("gemm_reducescatter", input, *operands, dim=dim, **keywords)
    world = world_size(group)
    fakes.check_divisible("gemm_reducescatter", input, place, world)
    return make(*fakes.with_size(input.shape[:-1], place, input.shape[place] // world))


register_vmap(_op.overload)


def gemm_reducescatter(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    dim: int = 0,
    group: Group = None,
    scale_input: torch.Tensor | None = None,
    scale_weight: torch.Tensor | None = None,
    recipe_input: ScalingType | None = None,
    recipe_weight: ScalingType | None = None,
    output_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
    invariance: str | None = None,
) -> torch.Tensor:
    """``reduce_scatter(input @ weight.T, dim) + bias``, with the communication of finished tiles beside the GEMM.

    The result is that of the unfused composition, here of dim 0::

        partial = torch.matmul(input, weight.t())
        output = partial.new_empty(partial.shape[0] // world_size, *partial.shape[1:])
        torch.distributed.reduce_scatter_tensor(output, partial, group=group)
        output if bias is None else output + bias

    Every rank of the group calls it with the same shapes and dtype, in the same order of calls; strides may differ.
    The composition runs what the fast path cannot take.

    Args:
        input: [D0, ..., K], this rank's part of the features of all rows; its size in ``dim``, D0 if that is 0, must be
            divisible by the world size.
        weight: [N, K], this rank's part, as in ``torch.nn.Linear``; contiguous along either dim for speed.
        bias: [N] or None, the same on every rank; added once, after the reduction.
        dim: the input's dim that is cut between the ranks, any but the last; 0 for scaled operands.
        group: None (the default group), a process group's name, a ``ProcessGroup`` or a one-dimensional ``DeviceMesh``.
        scale_input, scale_weight, recipe_input, recipe_weight, output_dtype, use_fast_accum: for fp8 operands, as in
            :func:`overlap_torch.gemm_allreduce`.
        invariance: as in :func:`overlap_torch.gemm_allreduce`.

    Returns:
        A fresh, contiguous tensor [D0 / world size, ..., N], or shorter by that factor along ``dim``, of the
        operands' dtype: rank r holds the r-th part of the sum's rows. Dtypes, accumulation and autocast are as in
        :func:`overlap_torch.gemm_allreduce`.

    Gradients are in reverse mode, of any order. Backward is an :func:`overlap_torch.allgather_gemm` of the output's gradient,
    which every rank has to run; the gradients of ``input`` and ``weight`` share the gathered rows. The bias's gradient covers
    this rank's rows; sum it over the group for the whole bias. Transforms of ``torch.func``, other errors and the technique
    are as in :func:`overlap_torch.gemm_allreduce`.

    Raises:
        ValueError: D0 is not divisible by the world size, no such ``dim``, shapes or devices do not fit, or an unknown
            ``invariance`` or group.
    """
    return _op.call(
        group, input, weight, bias, scale_input, scale_weight, dim, invariance,
        *scaled.numbers(scale_input, recipe_input, recipe_weight, output_dtype), use_fast_accum,
    )  # fmt: skip
