"""The four linear maps of tensor parallelism, as functions of one rank's operands; layers and styles build on them.

The column maps cut N over the ranks, the row maps K, and the `sequence` maps the tokens. A rank whose part of the
features is `padding` shorter than the largest pads its operands, so that all ranks run the same problem. The column maps
take several layers of one input. With a ``recipe`` the maps compute in fp8.

The `sequence` maps of styles ``keep``: as ``torch.nn.functional.linear`` after a collective keeps its input, so they keep the
gathered input, and backward does not gather it again. A row map's bias then gets its gradient from the rows that backward
gathers in any case. Compiled code keeps the gathered input, too: AOTAutograd would move backward's gather to forward, on one
rank perhaps and not on another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from overlap_torch._layers import maps
from overlap_torch._layers.fp8 import Fp8, Recipe
from overlap_torch._layers.maps import Plain, TransformedColumn
from overlap_torch._layers.sharding import SumGradient, cut_end, pad_end, shard_range
from overlap_torch._ops import allgather_gemm, gemm_allreduce, gemm_reducescatter
from overlap_torch._ops.gradients import recorded, transforms_are_active


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
        input, weights, biases = _cast(input, *_padded(layers))
        by = _fp8(place, input, sequence=False, reduces=reduces)
        outputs = maps.column(by, input, weights, biases)
        pairs = zip(outputs, layers, strict=True)
        return [cut_end(output, -1, layer.padding) for output, layer in pairs]
    # Here only the innermost of torch.func's levels knows if the input needs a gradient.
    records = input.requires_grad and torch.is_grad_enabled()
    if not reduces or not (records or transforms_are_active()):
        return [functional.linear(input, weight, bias) for weight, bias, _ in layers]
    weights, biases, paddings = zip(*layers, strict=True)
    by = Plain(place.group, False, paddings=paddings)
    operands = as_under_autocast(input, *weights, *biases)
    return recorded(TransformedColumn.apply(by, *operands))


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
    records, compiles = torch.is_grad_enabled(), torch.compiler.is_compiling()
    if recipe is not None:
        by = _fp8(place, input, sequence=True, returns=keeps)
        results = maps.column(by, input, weights, biases)
    elif (compiles and (records or keeps)) or (keeps and records and not transforms_are_active()):
        results = maps.gather_linears(group, dim, keeps, input, *weights, *biases)
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
    input, weight, bias = as_under_autocast(input, weight, bias)
    return maps.row(_fp8(place, input, sequence=False), input, weight, bias)


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
    if at != dim:
        input = input.movedim(dim, at)
    input = pad_end(pad_end(input, -1, padding), at, -tokens % world_size)
    weight = pad_end(weight, -1, padding)
    by_rows = keeps and recipe is None and bias is not None and bias.requires_grad
    # torch.func takes the ops, but not the Function that keeps tensors.
    transformed = not torch.compiler.is_compiling() and transforms_are_active()
    if by_rows and (input.requires_grad or weight.requires_grad) and not transformed:
        output = maps.scatter_linear(group, dim, *as_under_autocast(input, weight, bias))
    else:
        bias = None if bias is None else SumGradient.apply(bias, group)
        if recipe is None:
            output = gemm_reducescatter(input, weight, bias, dim=dim, group=group)
        else:
            input, weight, bias = as_under_autocast(input, weight, bias)
            output = maps.row(_fp8(place, input, sequence=True), input, weight, bias)
    _, size = shard_range(tokens, world_size, rank)
    output = cut_end(output, at, output.shape[at] - size)
    return (output if at == dim else output.movedim(at, dim)).contiguous()


def _fp8(place: Place, input: torch.Tensor, **flags: bool) -> Fp8:
    return Fp8(place.group, recipe=place.recipe, dtype=input.dtype, **flags)


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
