"""``all_reduce(input @ weight.T) + bias``."""

from __future__ import annotations

import torch

from overlap_torch._ops import eager, fakes, library  # noqa: F401  (the library holds the op)
from overlap_torch._ops.gradients import autograd_kernels, first_order, rows, weight_gradient
from overlap_torch._ops.group import Group

_op = torch.ops.overlap.gemm_allreduce.default


@torch.library.register_fake("overlap::gemm_allreduce")
def _fake(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, group: str
) -> torch.Tensor:
    fakes.check_operands("gemm_allreduce", input, weight, bias)
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


def _setup_context(ctx, inputs, keyword_only_inputs, output) -> None:
    input, weight, _ = inputs
    needs_input, needs_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(input if needs_weight else None, weight if needs_input else None)


# The output is replicated, and so is its gradient: each rank's gradients follow from its own operands, without any
# communication (as in Megatron's row-parallel layer, arXiv 1909.08053).
def _backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    input, weight = ctx.saved_tensors
    grad_input = grad_weight = grad_bias = None
    with torch.no_grad():
        if weight is not None:
            grad_input = grad @ weight
        if input is not None:
            grad_weight = weight_gradient(grad, input)
        if any(ctx.needs_input_grad[2:]):  # empty where the dispatcher dropped a bias that was None
            grad_bias = rows(grad).sum(0)
    return first_order(
        "gemm_allreduce", (grad_input, grad_weight, grad_bias)[: len(ctx.needs_input_grad)]
    )


torch.library.register_autograd(
    "overlap::gemm_allreduce", _backward, setup_context=_setup_context, lib=autograd_kernels
)


def gemm_allreduce(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: Group = None,
) -> torch.Tensor:
    """``all_reduce(input @ weight.T) + bias``, with the communication of finished tiles beside the GEMM.

    The result is that of the unfused composition::

        output = torch.matmul(input, weight.t())
        torch.distributed.all_reduce(output, group=group)
        output if bias is None else output + bias

    Every rank of the group calls it with the same M, N, K, dtype and order of calls; strides may differ. What the fast
    path cannot take runs the composition.

    Args:
        input: [..., K], this rank's part of the features; M is the product of the leading dims, which may be none.
        weight: [N, K], this rank's part, as in ``torch.nn.Linear``; contiguous along either dim for speed.
        bias: [N] or None, the same on every rank; added once, after the reduction.
        group: None (the default group), a process group's name, a ``ProcessGroup`` or a one-dimensional ``DeviceMesh``.

    Returns:
        A fresh, contiguous tensor [..., N], equal on all ranks, of the operands' dtype: bfloat16, float16 or float32
        (float64 runs the composition). Sums within a rank accumulate in float32, TF32 only where PyTorch's own setting
        allows it. Under autocast the operands are cast as those of ``torch.nn.functional.linear``.

    Gradients are first order, in reverse mode, and local: ``grad @ weight``, ``grad.T @ input``, ``grad.sum(rows)``. The
    gradient of the output is the same on every rank, so backward does not communicate.

    Raises:
        ValueError: shapes or devices that do not fit, or an unknown group.
        TypeError: dtypes that do not fit, or a ``group`` that is none of the above.
        NotImplementedError: an operand has a tangent (forward mode).
        RuntimeError: a first call inside a CUDA graph capture, or an earlier op that failed after it had returned (see
            :func:`overlap_torch.check`).

    The technique: GEMM tiles signal counters that communication waits for, FlashOverlap (arXiv 2504.19519) and Flux
    (arXiv 2406.06858).
    """
    return eager.call(eager.gemm_allreduce, _op, group, input, weight, bias)
