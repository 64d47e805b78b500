"""``all_reduce(input @ weight.T) + bias``."""

from __future__ import annotations

import torch
from torch.nn.functional import ScalingType

from overlap_torch._ops import eager, scaled
from overlap_torch._ops.gradients import register_vmap
from overlap_torch._ops.group import Group
from overlap_torch._ops.ordering import register_fake

_op = eager.Op(torch.ops.overlap.gemm_allreduce.default)


@register_fake("overlap::gemm_allreduce")
def _fake(input, *operands, group, **keywords):
    return scaled.result_of("gemm_allreduce", input, *operands, **keywords)(*input.shape[:-1])


register_vmap(_op.overload)


def gemm_allreduce(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: Group = None,
    scale_input: torch.Tensor | None = None,
    scale_weight: torch.Tensor | None = None,
    recipe_input: ScalingType | None = None,
    recipe_weight: ScalingType | None = None,
    output_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
    invariance: str | None = None,
) -> torch.Tensor:
    """``all_reduce(input @ weight.T) + bias``, with the communication of finished tiles beside the GEMM.

    The result is that of the unfused composition::

        output = torch.matmul(input, weight.t())
        torch.distributed.all_reduce(output, group=group)
        output if bias is None else output + bias

    Every rank of the group calls it with the same M, N, K, dtype and order of calls; strides may
    differ. The composition runs what the fast path cannot take.

    Args:
        input: [..., K], this rank's part of the features; M is the product of the leading dims, which may be none.
        weight: [N, K], this rank's part, as in ``torch.nn.Linear``; contiguous along either dim for speed.
        bias: [N] or None, the same on every rank; added once, after the reduction.
        group: None (the default group), a process group's name, a ``ProcessGroup`` or a one-dimensional ``DeviceMesh``.
        scale_input, scale_weight: float32 scales of fp8 operands, float8_e4m3fn or float8_e5m2 (not both of the latter):
            one number each; or [M, 1] or [M], and [N, 1] or [N]; or [M, ceil(K / 128)] and [ceil(N / 128), ceil(K / 128)],
            for blocks of 1 x 128 and of 128 x 128. The scaled input is ``input * scale_input``, as in
            ``torch.nn.functional.scaled_mm``. docs/fp8.md says what travels.
        recipe_input, recipe_weight: a ``torch.nn.functional.ScalingType`` (``TensorWise`` or ``RowWise`` for both, or
            ``BlockWise1x128`` with ``BlockWise128x128``); None: from the scales' shapes, which must leave one.
        output_dtype: the type of scaled operands' result and of the bias: bfloat16, float16 or float32.
        use_fast_accum: for scaled operands: True lets a Hopper GPU sum with fewer bits, as in ``scaled_mm``; the same on all ranks.
        invariance: ``"batch"``: a row's bits depend only on the row, the weight and the number of ranks, not on the other
            rows; ``"world"``: not on the number of ranks either, which is 1, 2, 4 or 8 (docs/serving.md); ``"none"``: the
            fastest plan runs; None: ``OVERLAP_INVARIANCE`` says which. The same on all ranks.

    Returns:
        A fresh, contiguous tensor [..., N], equal on all ranks, of the operands' dtype: bfloat16, float16 or float32
        (float64 runs the composition). Sums within a rank accumulate in float32, TF32 only where PyTorch's own setting
        allows it. Under autocast the operands are cast as those of ``torch.nn.functional.linear``.

    Gradients are in reverse mode, of any order. The first are local: ``grad @ weight``, ``grad.T @ input``,
    ``grad.sum(rows)``. The gradient of the output is the same on every rank, so backward does not communicate. A second
    derivative communicates if it asks for the derivative by the output's gradient, which is a ``gemm_allreduce`` again.
    ``torch.func.grad``, ``vjp``, ``jacrev`` and ``vmap`` take it too; ``vmap`` makes one call for each element of the batch,
    whose size must be equal on all ranks.

    Raises:
        ValueError: shapes or devices that do not fit, an unknown ``invariance``, or an unknown group.
        TypeError: dtypes that do not fit, fp8 operands without scales, or a ``group`` that is none of the above.
        NotImplementedError: an operand has a tangent (forward mode), or a scaled operand requires grad: the layers of
            :mod:`overlap_torch.nn` train in fp8.
        RuntimeError: a first call inside a CUDA graph capture, or an earlier op that failed after it had returned (see
            :func:`overlap_torch.check`).

    The technique: GEMM tiles signal counters that communication waits for, FlashOverlap (arXiv 2504.19519) and Flux
    (arXiv 2406.06858).
    """
    return _op.call(
        group, input, weight, bias, scale_input, scale_weight, invariance,
        *scaled.numbers(scale_input, recipe_input, recipe_weight, output_dtype), use_fast_accum,
    )  # fmt: skip
