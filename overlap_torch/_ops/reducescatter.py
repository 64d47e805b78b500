"""``reduce_scatter(input @ weight.T, dim 0) + bias``."""

from __future__ import annotations

import torch

from overlap_torch._ops import (  # noqa: F401  (the library holds the op)
    allgather,
    eager,
    fakes,
    library,
)
from overlap_torch._ops.gradients import (
    autograd_kernels,
    first_order,
    rows,
    start_all_gather,
    wait,
    weight_gradient,
)
from overlap_torch._ops.group import Group, world_size

_op = torch.ops.overlap.gemm_reducescatter.default


@torch.library.register_fake("overlap::gemm_reducescatter")
def _fake(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, group: str
) -> torch.Tensor:
    fakes.check_row_dim("gemm_reducescatter", input)
    fakes.check_operands("gemm_reducescatter", input, weight, bias)
    world = world_size(group)
    torch._check_value(
        input.shape[0] % world == 0,
        lambda: (
            f"gemm_reducescatter: dim 0 of input must be divisible by the world size {world}, "
            f"but got shape {tuple(input.shape)}; pad it"
        ),
    )
    return input.new_empty((input.shape[0] // world, *input.shape[1:-1], weight.shape[0]))


def _setup_context(ctx, inputs, keyword_only_inputs, output) -> None:
    input, weight, _ = inputs
    needs_input, needs_weight = ctx.needs_input_grad[:2]
    ctx.group = keyword_only_inputs["group"]
    ctx.save_for_backward(input if needs_weight else None, weight if needs_input else None)


# The gradient of the partial products is the gathered gradient of the output: gathered once, for input and weight.
# Whether it is depends on requires_grad alone, which all ranks share.
def _backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    input, weight = ctx.saved_tensors
    grad_input = grad_weight = grad_bias = None
    with torch.no_grad():
        if weight is not None:
            grad_input, gathered = allgather.allgather_gemm(grad, weight.t(), group=ctx.group)
        elif input is not None:
            gathered = wait(start_all_gather(grad, ctx.group))
        if input is not None:
            grad_weight = weight_gradient(gathered, input)
        if any(ctx.needs_input_grad[2:]):  # empty where the dispatcher dropped a bias that was None
            grad_bias = rows(grad).sum(0)
    grads = (grad_input, grad_weight, grad_bias)[: len(ctx.needs_input_grad)]
    return first_order("gemm_reducescatter", grads)


torch.library.register_autograd(
    "overlap::gemm_reducescatter", _backward, setup_context=_setup_context, lib=autograd_kernels
)


def gemm_reducescatter(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: Group = None,
) -> torch.Tensor:
    """``reduce_scatter(input @ weight.T, dim 0) + bias``, with the communication of finished tiles beside the GEMM.

    The result is that of the unfused composition::

        partial = torch.matmul(input, weight.t())
        output = partial.new_empty(partial.shape[0] // world_size, *partial.shape[1:])
        torch.distributed.reduce_scatter_tensor(output, partial, group=group)
        output if bias is None else output + bias

    Every rank of the group calls it with the same shapes and dtype, in the same order of calls; strides may differ.
    What the fast path cannot take runs the composition.

    Args:
        input: [D0, ..., K], this rank's part of the features of all rows; D0 must be divisible by the world size.
        weight: [N, K], this rank's part, as in ``torch.nn.Linear``; contiguous along either dim for speed.
        bias: [N] or None, the same on every rank; added once, after the reduction.
        group: None (the default group), a process group's name, a ``ProcessGroup`` or a one-dimensional ``DeviceMesh``.

    Returns:
        A fresh, contiguous tensor [D0 / world size, ..., N], of the operands' dtype: rank r holds the r-th part of the
        sum's rows. Dtypes, accumulation and autocast are as in :func:`overlap_torch.gemm_allreduce`.

    Gradients are first order, in reverse mode. Backward is an :func:`overlap_torch.allgather_gemm` of the output's gradient,
    which every rank has to run; ``input`` and ``weight`` share what it gathers. The bias's gradient is that of this
    rank's rows: sum it over the group for that of the whole bias.

    Raises:
        ValueError: D0 is not divisible by the world size, shapes or devices do not fit, or an unknown group.
        TypeError: dtypes that do not fit, or a ``group`` that is none of the above.
        NotImplementedError: an operand has a tangent (forward mode).
        RuntimeError: a first call inside a CUDA graph capture, or an earlier op that failed after it had returned (see
            :func:`overlap_torch.check`).

    The technique: GEMM tiles signal counters that communication waits for, FlashOverlap (arXiv 2504.19519) and Flux
    (arXiv 2406.06858).
    """
    return eager.call(eager.gemm_reducescatter, _op, group, input, weight, bias)
