"""The four linear maps of tensor parallelism, as functions of one rank's operands; layers and styles build on them.

The column maps cut N over the ranks, the row maps K, and the `sequence` maps the tokens. A rank whose part of the
features is `padding` shorter than the largest pads its operands, so that all ranks run the same problem. The column maps
take several layers of one input. With a ``recipe`` the maps compute in fp8.

The `sequence` maps of styles ``keep``: as ``torch.nn.functional.linear`` after a collective keeps its input, so they keep the
gathered input, and backward does not gather it again. A row map's bias then gets its gradient from the rows that backward
gathers in any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from overlap_torch._layers import fp8
from overlap_torch._layers.fp8 import Map, Recipe
from overlap_torch._layers.sequence import gather_linears, scatter_linear
from overlap_torch._layers.sharding import SumGradient, cut_end, pad_end, shard_range
from overlap_torch._ops import allgather_gemm, gemm_allreduce, gemm_reducescatter
from overlap_torch._ops.gradients import (
    Gradient,
    TransformedFunction,
    in_parts,
    recorded,
    rows,
    side_by_side,
    transforms_are_active,
    weight_gradient,
)


class Place(NamedTuple):
    """A layer's ranks, and this one; and how the layer computes."""

    group: str
    world_size: int
    rank: int
    recipe: Recipe | None  # of fp8


class Operands(NamedTuple):
    """A layer's operands on this rank."""

    weight: torch.Tensor  # [N part, K], or [N, K part]
    bias: torch.Tensor | None  # [N part], or [N]
    padding: int  # how much shorter N part or K part is than the largest


def columns(
    input: torch.Tensor,
    layers: Sequence[Operands],
    place: Place,
    reduces: bool = True,
) -> Sequence[torch.Tensor]:
    """Replicated [..., K] to this rank's [..., N part] for each layer.

    Backward all-reduces the sum of the input's gradients, once, after one GEMM. With ``reduces`` False the input's gradient
    stays this rank's part of a sum over the ranks.
    """
    reduces = reduces and place.world_size > 1
    if place.recipe is not None:
        # Every rank's GEMM of the gradient must have the same size.
        how = Map(place.recipe, place.group, columns=True, sequence=False, reduces=reduces)
        outputs = fp8.linears(how, *_cast(input, *_padded(layers)))
        pairs = zip(outputs, layers, strict=True)
        return [cut_end(output, -1, layer.padding) for output, layer in pairs]
    # Here only the innermost of torch.func's levels knows if the input needs a gradient.
    records = input.requires_grad and torch.is_grad_enabled()
    if not reduces or not (records or transforms_are_active()):
        return [functional.linear(input, weight, bias) for weight, bias, _ in layers]
    weights, biases = [one.weight for one in layers], [one.bias for one in layers]
    paddings = [one.padding for one in layers]
    operands = as_under_autocast(input, *weights, *biases)
    return recorded(_Columns.apply(place.group, paddings, *operands))


def columns_sequence(
    input: torch.Tensor,
    layers: Sequence[Operands],
    place: Place,
    tokens: int,
    dim: int = 0,
    keeps: bool = False,
) -> list[torch.Tensor]:
    """This rank's tokens [..., K] to all tokens' [..., N part] for each layer, by one all-gather; tokens are dim `dim`.

    Backward scatters the sum of the input's gradients, once. With ``keeps`` all results are contiguous, and the last one is
    the gathered input [..., K], in fp8 the values times their scales. Its gradient is this rank's part of a sum over the
    ranks, and is reduced together with the layers' gradients.
    """
    group, world_size, _, recipe = place
    at = dim if recipe is None else 0
    input = _moved(input, dim, at)
    input = pad_end(input, at, -(-tokens // world_size) - input.shape[at])
    input, weights, biases = _cast(input, *_padded(layers))
    if recipe is not None:
        how = Map(recipe, group, columns=True, sequence=True, gathers=keeps)
        results = fp8.linears(how, input, weights, biases)
    elif keeps and (torch.is_grad_enabled() or torch.compiler.is_compiling()):
        results = gather_linears(group, dim, input, weights, biases)
    elif len(layers) == 1 and not keeps:  # the op of one weight takes the host less
        results = [allgather_gemm(input, weights[0], biases[0], dim=dim, group=group)[0]]
    else:
        outputs, gathered = allgather_gemm(input, weights, biases, dim=dim, group=group)
        results = (*outputs, gathered) if keeps else outputs
    paddings = [layer.padding for layer in layers] + [0] * keeps
    results = [
        _moved(cut_end(cut_end(result, -1, padding), at, result.shape[at] - tokens), at, dim)
        for result, padding in zip(results, paddings, strict=True)
    ]
    # Copies if parts are padded; else these are contiguous.
    return [result.contiguous() for result in results] if keeps else results


def row(input: torch.Tensor, operands: Operands, place: Place) -> torch.Tensor:
    """[..., K part] to the replicated [..., N]: GEMM, all-reduce, bias. Backward does not communicate."""
    weight, bias, padding = operands
    input, weight = pad_end(input, -1, padding), pad_end(weight, -1, padding)
    if place.recipe is None:
        return gemm_allreduce(input, weight, bias, group=place.group)
    how = Map(place.recipe, place.group, columns=False, sequence=False)
    return fp8.linears(how, *_cast(input, [weight], [bias]))[0]


def row_sequence(
    input: torch.Tensor, operands: Operands, place: Place, dim: int = 0, keeps: bool = False
) -> torch.Tensor:
    """[..., K part] of all tokens to this rank's tokens [..., N], contiguous: GEMM, reduce-scatter, bias; tokens are dim `dim`.

    The bias's gradient is the sum over all ranks' rows. It is summed at once, not left Partial, because clip_grad_norm_
    does not scale a Partial gradient (torch 2.11).
    """
    (weight, bias, padding), (group, world_size, rank, recipe) = operands, place
    at = dim if recipe is None else 0
    tokens = input.shape[dim]
    input = pad_end(pad_end(_moved(input, dim, at), -1, padding), at, -tokens % world_size)
    weight = pad_end(weight, -1, padding)
    by_rows = keeps and recipe is None and bias is not None and bias.requires_grad
    if by_rows and (input.requires_grad or weight.requires_grad):
        output = scatter_linear(group, dim, *as_under_autocast(input, weight, bias))
    else:
        bias = None if bias is None else SumGradient.apply(bias, group)
        if recipe is None:
            output = gemm_reducescatter(input, weight, bias, dim=dim, group=group)
        else:
            how = Map(recipe, group, columns=False, sequence=True)
            (output,) = fp8.linears(how, *_cast(input, [weight], [bias]))
    _, size = shard_range(tokens, world_size, rank)
    return _moved(cut_end(output, at, output.shape[at] - size), at, dim).contiguous()


def _moved(tensor: torch.Tensor, dim: int, to: int) -> torch.Tensor:
    """The tensor with its tokens in dim `to`: first for fp8's GEMMs."""
    return tensor if dim == to else tensor.movedim(dim, to)


def _padded(layers: Sequence[Operands]) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Column layers' weights and biases of the largest part's size."""
    weights = [pad_end(layer.weight, 0, layer.padding) for layer in layers]
    pairs = [(layer.bias, layer.padding) for layer in layers]
    return weights, [None if bias is None else pad_end(bias, 0, padding) for bias, padding in pairs]


def _cast(
    input: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor | None]]:
    """The operands as under autocast."""
    input, *others = as_under_autocast(input, *weights, *biases)
    return input, others[: len(weights)], others[len(weights) :]


class _Columns(TransformedFunction):
    """`functional.linear` of a replicated input by several weights; the input's gradient is summed over the ranks.

    Their gradients are parts of those of one weight, all of them one after the other.
    """

    @staticmethod
    def forward(
        group: str, paddings: Sequence[int], input: torch.Tensor, *weights_and_biases: Gradient
    ) -> tuple[torch.Tensor, ...]:
        """``weights_and_biases``: all weights, then a bias or None for each."""
        count, operands = len(paddings), weights_and_biases
        return tuple(
            [functional.linear(input, operands[i], operands[count + i]) for i in range(count)]
        )

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.group, ctx.paddings, input, *operands = inputs
        count, needs = len(output), ctx.needs_input_grad
        ctx.save_for_backward(
            input if any(needs[3 : 3 + count]) else None,
            *(operands[:count] if needs[2] else [None] * count),
        )
        # Dynamo refuses the call; it materializes gradients.
        if count > 1 and not torch.compiler.is_compiling():
            ctx.set_materialize_grads(False)  # an output that nobody used costs nothing

    @staticmethod
    def backward(ctx, *grads: Gradient) -> tuple[Gradient, ...]:
        input, *weights = ctx.saved_tensors
        count = len(grads)
        used = [i for i in range(count) if grads[i] is not None]
        _, _, needs_input, *needs = ctx.needs_input_grad
        if not used:
            return (None,) * (3 + 2 * count)
        weight = None
        if needs_input:
            weight = weights[used[0]]
            if len(used) > 1:
                weight = torch.cat([weights[i] for i in used])
        grad_input, grad_weight, grad_bias = _gradients(
            side_by_side([grads[i] for i in used]),
            input if any(needs[i] for i in used) else None,
            weight,
            any(needs[count + i] for i in used),
            ctx.group,
            sum(ctx.paddings[i] for i in used),
        )
        grad_weights = in_parts(grad_weight, grads, needs[:count])
        return None, None, grad_input, *grad_weights, *in_parts(grad_bias, grads, needs[count:])


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
    if not is_dynamo_compiling() and not torch._C._is_any_autocast_enabled():  # the quick answer
        return [input, *others]
    dtype = autocast_dtype(input.device.type)
    if dtype is None:
        return [input, *others]
    return [
        tensor
        if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64
        else tensor.to(dtype)
        for tensor in (input, *others)
    ]
