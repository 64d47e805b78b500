"""``all_reduce(input @ weight.T) + bias``."""

from __future__ import annotations

import torch

from overlap_torch._ops import eager, fakes, library  # noqa: F401  (the library holds the op)
from overlap_torch._ops.gradients import (
    Gradient,
    Gradients,
    autograd_kernels,
    register_vmap,
    rows,
    run_product,
    weight_gradient,
)
from overlap_torch._ops.group import Group

_op = torch.ops.overlap.gemm_allreduce.default


@torch.library.register_fake("overlap::gemm_allreduce")
def _fake(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, group: str
) -> torch.Tensor:
    fakes.check_operands("gemm_allreduce", input, weight, bias)
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


class _Product:
    """The op as its gradients see it: its output and the output's gradient are replicated."""

    name = "gemm_allreduce"

    def __init__(self, group: str) -> None:
        self.group = group

    def __call__(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return gemm_allreduce(input, weight, bias, group=self.group)

    def redispatch(self, keyset, input, weight, bias) -> torch.Tensor:
        return _op.redispatch(keyset, input, weight, bias, group=self.group)

    def leading_dims(self, grad: torch.Tensor) -> tuple[int, ...]:
        return grad.shape[:-1]

    # Each rank's gradients follow from its own operands, without any communication (as in Megatron's row-parallel
    # layer, arXiv 1909.08053).
    def gradients(
        self, grad: torch.Tensor, input: Gradient, weight: Gradient, with_bias: bool
    ) -> Gradients:
        return (
            None if weight is None else grad @ weight,
            None if input is None else weight_gradient(grad, input),
            rows(grad).sum(0) if with_bias else None,
        )


def _autograd(keyset, input, weight, bias=None, *, group: str) -> torch.Tensor:
    return run_product(_Product(group), keyset, input, weight, bias)


autograd_kernels.impl("gemm_allreduce", _autograd, "Autograd", with_keyset=True)
register_vmap(_op)


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

    Gradients are in reverse mode, of any order. The first are local: ``grad @ weight``, ``grad.T @ input``,
    ``grad.sum(rows)``. The gradient of the output is the same on every rank, so backward does not communicate. A second
    derivative does, where it asks for that of the output's gradient: it is a ``gemm_allreduce`` again.
    ``torch.func.grad``, ``vjp``, ``jacrev`` and ``vmap`` take it too; ``vmap`` is one call for each element of the batch, of
    which every rank needs as many.

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
