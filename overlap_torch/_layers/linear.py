"""The four linear maps of tensor parallelism, as functions of one rank's operands; layers and styles build on them.

The column maps cut N over the ranks, the row maps K, and the `sequence` maps tokens (dim 0). A rank whose part of the
features is `padding` shorter than the largest pads its operands, so that all ranks run the same problem. The column maps
also take several weights of one input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from overlap_torch._layers.sharding import SumGradient, pad_end, shard_range
from overlap_torch._ops import allgather_gemm, gemm_allreduce, gemm_reducescatter
from overlap_torch._ops.gradients import (
    Gradient,
    TransformedFunction,
    recorded,
    rows,
    side_by_side,
    transforms_are_active,
    weight_gradient,
)


def column(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    group: str,
    world_size: int,
    padding: int,
) -> torch.Tensor:
    """Replicated [..., K] to this rank's [..., N part]. Backward all-reduces the input's gradient after its GEMM."""
    if world_size == 1 or not _may_need_gradient(input):
        return functional.linear(input, weight, bias)
    input, weight, bias = as_under_autocast(input, weight, bias)
    return recorded(_Column.apply(input, weight, bias, group, padding))


def columns(
    input: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    *,
    group: str,
    world_size: int,
    paddings: Sequence[int],
) -> tuple[torch.Tensor, ...]:
    """`column` for each weight. Backward all-reduces the sum of the input's gradients, once, after one GEMM."""
    if world_size == 1 or not _may_need_gradient(input):
        return tuple(
            functional.linear(input, weight, bias)
            for weight, bias in zip(weights, biases, strict=True)
        )
    operands = as_under_autocast(input, *weights, *biases)
    return recorded(_Columns.apply(group, tuple(paddings), *operands))


def column_sequence(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    group: str,
    world_size: int,
    tokens: int,
    padding: int,
) -> torch.Tensor:
    """This rank's rows [tokens part, ..., K] to [tokens, ..., N part]: all-gather, GEMM; backward the reverse."""
    input = pad_end(input, 0, -(-tokens // world_size) - input.shape[0])
    weight = pad_end(weight, 0, padding)
    bias = None if bias is None else pad_end(bias, 0, padding)
    output, _ = allgather_gemm(input, weight, bias, group=group)
    return output[:tokens, ..., : output.shape[-1] - padding]


def columns_sequence(
    input: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    *,
    group: str,
    world_size: int,
    tokens: int,
    paddings: Sequence[int],
) -> tuple[torch.Tensor, ...]:
    """`column_sequence` for each weight: one all-gather; backward scatters the sum of the input's gradients, once."""
    input = pad_end(input, 0, -(-tokens // world_size) - input.shape[0])
    outputs, _ = allgather_gemm(input, *padded(weights, biases, paddings), group=group)
    return cut(outputs, tokens, paddings)


def padded(
    weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None], paddings: Sequence[int]
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Column layers' parameters of the largest part's size."""
    return (
        [pad_end(weight, 0, padding) for weight, padding in zip(weights, paddings, strict=True)],
        [
            None if bias is None else pad_end(bias, 0, padding)
            for bias, padding in zip(biases, paddings, strict=True)
        ],
    )


def cut(
    outputs: Sequence[torch.Tensor], tokens: int, paddings: Sequence[int]
) -> tuple[torch.Tensor, ...]:
    """The outputs [tokens, ..., N part] of padded tokens and parameters."""
    return tuple(
        output[:tokens, ..., : output.shape[-1] - padding]
        for output, padding in zip(outputs, paddings, strict=True)
    )


def row(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    group: str,
    padding: int,
) -> torch.Tensor:
    """[..., K part] to the replicated [..., N]: GEMM, all-reduce, bias. Backward does not communicate."""
    input, weight = pad_end(input, -1, padding), pad_end(weight, -1, padding)
    return gemm_allreduce(input, weight, bias, group=group)


def row_sequence(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    group: str,
    world_size: int,
    rank: int,
    padding: int,
) -> torch.Tensor:
    """[tokens, ..., K part] to this rank's rows [tokens part, ..., N]: GEMM, reduce-scatter, bias.

    The bias's gradient is the local rows' sum.
    """
    tokens = input.shape[0]
    input = pad_end(pad_end(input, -1, padding), 0, -tokens % world_size)
    weight = pad_end(weight, -1, padding)
    _, size = shard_range(tokens, world_size, rank)
    return gemm_reducescatter(input, weight, bias, group=group)[:size]


class _Column(TransformedFunction):
    """`functional.linear` of a replicated input, whose gradient is summed over the ranks."""

    @staticmethod
    def forward(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        group: str,
        padding: int,
    ) -> torch.Tensor:
        return functional.linear(input, weight, bias)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        input, weight, _, group, padding = inputs
        needs_input, needs_weight, *_ = ctx.needs_input_grad
        ctx.group, ctx.padding = group, padding
        ctx.save_for_backward(input if needs_weight else None, weight if needs_input else None)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[Gradient, ...]:
        input, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, _, _ = ctx.needs_input_grad
        gradients = _gradients(
            grad,
            input if needs_weight else None,
            weight if needs_input else None,
            needs_bias,
            ctx.group,
            ctx.padding,
        )
        return *gradients, None, None


class _Columns(TransformedFunction):
    """`_Column` of several weights. Their gradients are parts of those of one weight, all of them one after the other."""

    @staticmethod
    def forward(
        group: str, paddings: Sequence[int], input: torch.Tensor, *weights_and_biases: Gradient
    ) -> tuple[torch.Tensor, ...]:
        """``weights_and_biases``: all weights, then a bias or None for each."""
        count = len(paddings)
        weights, biases = weights_and_biases[:count], weights_and_biases[count:]
        return tuple(
            functional.linear(input, weight, bias)
            for weight, bias in zip(weights, biases, strict=True)
        )

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.group, ctx.paddings, input, *operands = inputs
        count = len(ctx.paddings)
        _, _, needs_input, *needs = ctx.needs_input_grad
        ctx.save_for_backward(
            input if any(needs[:count]) else None,
            *(operands[:count] if needs_input else [None] * count),
        )
        if not torch.compiler.is_compiling():  # Dynamo refuses the call; it materializes gradients
            ctx.set_materialize_grads(False)  # an output that nobody used costs nothing

    @staticmethod
    def backward(ctx, *grads: Gradient) -> tuple[Gradient, ...]:
        input, *weights = ctx.saved_tensors
        count = len(grads)
        used = [i for i in range(count) if grads[i] is not None]
        _, _, needs_input, *needs = ctx.needs_input_grad
        needs_weights, needs_biases = needs[:count], needs[count:]
        grad_input = None
        grad_weights, grad_biases = [None] * count, [None] * count
        if used:
            weight = None
            if needs_input:
                weight = weights[used[0]]
                if len(used) > 1:
                    weight = torch.cat([weights[i] for i in used])
            grad_input, grad_weight, grad_bias = _gradients(
                side_by_side([grads[i] for i in used]),
                input if any(needs_weights[i] for i in used) else None,
                weight,
                any(needs_biases[i] for i in used),
                ctx.group,
                sum(ctx.paddings[i] for i in used),
            )
            begin = 0
            for i in used:
                size = grads[i].shape[-1]
                if needs_weights[i]:
                    grad_weights[i] = grad_weight.narrow(0, begin, size)
                if needs_biases[i]:
                    grad_biases[i] = grad_bias.narrow(0, begin, size)
                begin += size
        return None, None, grad_input, *grad_weights, *grad_biases


def _gradients(
    grad: torch.Tensor, input: Gradient, weight: Gradient, with_bias: bool, group: str, padding: int
) -> tuple[Gradient, Gradient, Gradient]:
    """The gradients of a replicated input, of a weight and of a bias: the first if the weight is given, the second if the
    input is. They can be differentiated where gradients are recorded."""
    grad_input = grad_weight = None
    if weight is not None:
        whole = pad_end(weight.t(), -1, padding)
        grad_input = gemm_allreduce(pad_end(grad, -1, padding), whole, group=group)
    if input is not None:
        # The derivative of this rank's gradient by the replicated input is a part of a sum.
        records = torch.is_grad_enabled() and not is_dynamo_compiling()
        grad_weight = weight_gradient(grad, SumGradient.apply(input, group) if records else input)
    return grad_input, grad_weight, rows(grad).sum(0) if with_bias else None


def _may_need_gradient(input: torch.Tensor) -> bool:
    # Here only the innermost of torch.func's levels knows if the input needs a gradient.
    return input.requires_grad or transforms_are_active()


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype of autocast; None where it is off, and on ``meta``, for which PyTorch has none."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def as_under_autocast(
    input: torch.Tensor, *others: torch.Tensor | None
) -> list[torch.Tensor | None]:
    """The operands of a linear map, cast by autocast's rules (all floating-point ones except float64), because backward uses
    the Function's saved tensors as they are."""
    dtype = autocast_dtype(input.device.type)
    if dtype is None:
        return [input, *others]
    return [
        tensor
        if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64
        else tensor.to(dtype)
        for tensor in (input, *others)
    ]
