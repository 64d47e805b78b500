"""The Functions of `sequence` maps that keep what they gathered."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.compiler import is_dynamo_compiling

from overlap_torch._layers.sharding import SumGradient
from overlap_torch._ops import allgather_gemm, gemm_reducescatter
from overlap_torch._ops.collectives import (
    start_all_gather,
    start_reduce_scatter,
    wait,
    wait_for_gather,
)
from overlap_torch._ops.gradients import (
    in_one,
    kept,
    of_each,
    one_after_the_other,
    recorded,
    rows,
    weight_gradient,
)
from overlap_torch._ops.group import world_size


def let_compile() -> None:
    """Called once before anything is compiled. It imports torch._dynamo, which takes seconds; making a DTensor also does."""
    torch.compiler.allow_in_graph(_gather_linears)
    torch.compiler.allow_in_graph(scatter_linear)


def gather_linears(
    group: str,
    dim: int,
    input: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
) -> tuple[torch.Tensor, ...]:
    """An output for each weight, and the gathered input."""
    with_bias, operands = in_one(weights, biases)
    return _gather_linears(group, dim, with_bias, input, *operands)


# If Dynamo traced this, every output would have a gradient in its backward.
def _gather_linears(*arguments):
    return recorded(_GatherLinears.apply(*arguments))


class _GatherLinears(torch.autograd.Function):
    """`allgather_gemm` of several weights that keeps what it gathered."""

    @staticmethod
    def forward(
        ctx,
        group: str,
        dim: int,
        with_bias: Sequence[bool],
        input: torch.Tensor,
        *weights_and_biases: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """``weights_and_biases``: all weights, then the biases of those that have one."""
        weights, biases = of_each(with_bias, weights_and_biases)
        outputs, gathered = allgather_gemm(input, weights, biases, dim=dim, group=group)
        needs_input, *needs_weights = ctx.needs_input_grad[3 : 4 + len(weights)]
        ctx.group, ctx.dim, ctx.with_bias = group, dim, with_bias
        ctx.set_materialize_grads(False)  # an unused output costs neither work nor communication
        if not needs_input:
            ctx.mark_non_differentiable(gathered)
        # Kept only if a gradient reads it.
        kept = gathered if any(needs_weights) else None
        ctx.save_for_backward(input, kept, *weights)
        return (*outputs, gathered)

    @staticmethod
    def backward(ctx, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        *output_grads, gathered_grad = grads
        input, gathered, *weights = ctx.saved_tensors
        needs_input, *needs = ctx.needs_input_grad[3:]
        needs_weights, needs_biases = needs[: len(weights)], needs[len(weights) :]
        if torch.is_grad_enabled() and not is_dynamo_compiling():  # create_graph=True
            grad_input, grad_weights = _recorded_gradients(ctx, input, weights, grads)
        else:
            with torch.no_grad():
                summed = None
                if needs_input:
                    summed = _start_input_gradient(
                        output_grads, weights, gathered_grad, ctx.dim, ctx.group
                    )
                grad_weights = [
                    weight_gradient(grad, gathered) if grad is not None and need else None
                    for grad, need in zip(output_grads, needs_weights, strict=True)
                ]
                grad_input = None if summed is None else wait(summed)
        biased = [grad for grad, has in zip(output_grads, ctx.with_bias, strict=True) if has]
        grad_biases = [
            rows(grad).sum(0) if grad is not None and need else None
            for grad, need in zip(biased, needs_biases, strict=True)
        ]
        return None, None, None, grad_input, *grad_weights, *grad_biases


def _start_input_gradient(
    output_grads: Sequence[torch.Tensor | None],
    weights: Sequence[torch.Tensor],
    gathered_grad: torch.Tensor | None,
    dim: int,
    group: str,
) -> torch.Tensor | None:
    """Begins one reduce-scatter: beside the GEMM, or after it if a gradient of another reader is added. The caller waits
    for it."""
    parts = [
        (grad, weight)
        for grad, weight in zip(output_grads, weights, strict=True)
        if grad is not None
    ]
    if gathered_grad is not None:
        whole = gathered_grad
        for grad, weight in parts:
            whole = whole + grad @ weight
        return start_reduce_scatter(whole, group, dim)
    if not parts:
        return None
    grad, weight = one_after_the_other(*zip(*parts, strict=True))
    return gemm_reducescatter(grad, weight.t(), dim=dim, group=group)


def _recorded_gradients(ctx, input, weights, grads):
    """The gradients of input and weights as the op records them, so that they can be differentiated; it gathers again."""
    with torch.enable_grad():
        outputs, gathered = allgather_gemm(input, weights, dim=ctx.dim, group=ctx.group)
        grad_input, *grad_weights = _recorded((*outputs, gathered), (input, *weights), grads)
    return grad_input, grad_weights


def _recorded(outputs, tensors, grads) -> list[torch.Tensor | None]:
    """The gradients of the tensors that want one, from the outputs that have one; they can be differentiated."""
    used = [
        (output, grad)
        for output, grad in zip(outputs, grads, strict=True)
        if grad is not None and output.requires_grad
    ]
    outputs, grads = [output for output, _ in used], [grad for _, grad in used]
    needed = [tensor for tensor in tensors if tensor.requires_grad]
    how = {"create_graph": True, "allow_unused": True}
    found = iter(torch.autograd.grad(outputs, needed, grads, **how))
    return [next(found) if tensor.requires_grad else None for tensor in tensors]


def scatter_linear(*arguments):
    """The output of `_ScatterLinear`, for its arguments."""
    return recorded(_ScatterLinear.apply(*arguments), keeps_gradients=True)


class _ScatterLinear(torch.autograd.Function):
    """`gemm_reducescatter` whose bias is replicated: its gradient is that of all rows."""

    @staticmethod
    def forward(
        ctx, group: str, dim: int, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.kept = group, dim, None
        ctx.save_for_backward(input, weight, bias)
        return gemm_reducescatter(input, weight, bias, dim=dim, group=group)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight, bias = ctx.saved_tensors
        _, _, needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        if torch.is_grad_enabled() and not is_dynamo_compiling():  # create_graph=True
            return None, None, *_recorded_scatter_gradients(ctx, input, weight, bias, grad)
        with torch.no_grad():
            grad_input, gathered = None, kept(ctx, grad)
            if needs_input:
                grad_input, gathered = allgather_gemm(
                    grad, weight.t(), dim=ctx.dim, group=ctx.group
                )
                if not (needs_weight or needs_bias):  # the weights' gradients are wanted later
                    ctx.kept = grad, gathered
            elif gathered is None:
                ranks = world_size(ctx.group)
                gathered = start_all_gather(grad, ctx.group)
                gathered = wait_for_gather(gathered, ranks, ctx.dim)
            grad_weight = weight_gradient(gathered, input) if needs_weight else None
            grad_bias = rows(gathered).sum(0) if needs_bias else None
        return None, None, grad_input, grad_weight, grad_bias


def _recorded_scatter_gradients(ctx, input, weight, bias, grad):
    """The gradients as the op records them."""
    with torch.enable_grad():
        summed = SumGradient.apply(bias, ctx.group)
        output = gemm_reducescatter(input, weight, summed, dim=ctx.dim, group=ctx.group)
        return _recorded([output], (input, weight, bias), [grad])
