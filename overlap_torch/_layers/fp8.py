"""The four linear maps of tensor parallelism with GEMMs in fp8: casts, forward, gradients; layers and styles build on them.

Forward and the input's gradient are the ops with scaled operands; the weights' gradients are local products. Casts are
dynamic: a scale is the largest cast number divided by the type's largest, for a whole tensor or for each row that a GEMM
sums over.

The single scale of a whole tensor is this rank's own, except for a gathered tensor. There it is the largest of all ranks'
scales, so that the weight's gradient can be computed with one scale as well. This takes an all-reduce of one number before
the gather. Scales of rows travel with their rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import ScalingType

from overlap_torch._ops import allgather_gemm, gemm_allreduce, gemm_reducescatter
from overlap_torch._ops.collectives import start_reduce_scatter, wait
from overlap_torch._ops.gradients import (
    Gradient,
    in_one,
    in_parts,
    kept,
    of_each,
    one_after_the_other,
    recorded,
    rows,
    weight_gradient,
)

_SMALLEST = 1e-12  # lower bound of the largest number: zeros have a scale, too


@dataclass(frozen=True)
class Cast:
    """The cast of one operand of one GEMM to fp8: with one scale, or with one for each row that the GEMM sums over."""

    dtype: torch.dtype
    by_rows: bool = False


@dataclass(frozen=True)
class Recipe:
    """The casts of a layer's three GEMMs; None for the weight's gradient: it is computed in the layer's own dtype."""

    input: Cast
    weight: Cast
    grad: Cast  # with weight_for_grad: the input's gradient
    weight_for_grad: Cast
    grad_for_weight: Cast | None
    input_for_weight: Cast | None
    powers_of_two: bool = False  # scales
    fast_accum: bool = True  # of the output
    fast_accum_grad: bool = False  # of the input's gradient
    fast_accum_weight: bool = False  # of the weight's gradient


_E4M3 = Cast(torch.float8_e4m3fn)
_E5M2 = Cast(torch.float8_e5m2)
_ROWS = Cast(torch.float8_e4m3fn, by_rows=True)

# The same as torchao's recipes of these names.
RECIPES = {
    "tensorwise": Recipe(_E4M3, _E4M3, _E5M2, _E4M3, _E5M2, _E4M3),
    "rowwise": Recipe(_ROWS, _ROWS, _ROWS, _ROWS, _ROWS, _ROWS, powers_of_two=True),
}


def recipe_of(fp8: str | None) -> Recipe | None:
    """The recipe that a layer's ``fp8`` names.

    Raises:
        ValueError: there is no recipe of this name.
    """
    if fp8 is None:
        return None
    if fp8 not in RECIPES:
        raise ValueError(f"fp8 is {fp8!r}, allowed are None, {', '.join(map(repr, RECIPES))}")
    return RECIPES[fp8]


def recipe_of_config(config: Any) -> Recipe | None:
    """The recipe of a torchao ``Float8LinearConfig``; None where output or input's gradient are not computed in fp8."""

    def cast(name: str) -> Cast | None:
        given = getattr(config, f"cast_config_{name}")
        if given.scaling_type.value == "disabled":
            return None
        return Cast(given.target_dtype, given.scaling_granularity.value == "axiswise")

    casts = [cast(name) for name in ("input", "weight", "grad_output", "weight_for_grad_input")]
    if None in casts:
        return None
    return Recipe(
        *casts,
        cast("grad_output_for_grad_weight"),
        cast("input_for_grad_weight"),
        powers_of_two=config.round_scales_to_power_of_2,
        fast_accum=config.gemm_config_output.use_fast_accum,
        fast_accum_grad=config.gemm_config_grad_input.use_fast_accum,
        fast_accum_weight=config.gemm_config_grad_weight.use_fast_accum,
    )


class Scaled(NamedTuple):
    """fp8 values [..., K], and the scale by which they are multiplied: [1], or [..., 1]."""

    values: torch.Tensor
    scale: torch.Tensor

    @property
    def by_rows(self) -> bool:
        return self.scale.dim() > 1

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        return (self.values.float() * self.scale).to(dtype)


def scaled(tensor: torch.Tensor, cast: Cast, recipe: Recipe, group: str | None = None) -> Scaled:
    """The tensor [..., K] in fp8. ``group``: one scale is the same on all of its ranks."""
    magnitude = tensor.detach().abs()
    if cast.by_rows:
        largest = (
            magnitude.amax(-1, keepdim=True)
            if tensor.shape[-1] > 0
            else magnitude.new_zeros((*tensor.shape[:-1], 1))
        )
    else:
        largest = magnitude.amax().reshape(1) if tensor.numel() > 0 else magnitude.new_zeros(1)
        if group is not None:
            largest = wait(torch.ops._c10d_functional.all_reduce(largest.float(), "max", group))
    limit = torch.finfo(cast.dtype).max
    # In float64, so that compiled and eager code make the same scale.
    factor = (limit / largest.double().clamp(min=_SMALLEST)).float()
    if recipe.powers_of_two:
        factor = torch.exp2(torch.floor(torch.log2(factor)))
    values = (tensor.float() * factor).clamp(-limit, limit).to(cast.dtype)
    return Scaled(values, factor.reciprocal())


def _together(
    input: Scaled, weights: Sequence[Scaled], dtype: torch.dtype, fast_accum: bool
) -> tuple[Scaled, list[Scaled], dict[str, Any]]:
    """The operands of one op, and its keywords beside scales: if one operand has scales of rows, all have."""
    operands, recipe = [input, *weights], ScalingType.TensorWise
    if any(operand.by_rows for operand in operands):
        recipe = ScalingType.RowWise
        operands = [
            each
            if each.by_rows
            else Scaled(each.values, each.scale.expand(*each.values.shape[:-1], 1))
            for each in operands
        ]
    recipes = {"recipe_input": recipe, "recipe_weight": recipe}
    how = {**recipes, "output_dtype": dtype, "use_fast_accum": fast_accum}
    return operands[0], operands[1:], how


def _local(
    input: Scaled, weight: Scaled, bias: torch.Tensor | None, dtype: torch.dtype, fast_accum: bool
) -> torch.Tensor:
    x, (w,), how = _together(input, [weight], dtype, fast_accum)
    how |= {name: recipe.value for name, recipe in how.items() if name.startswith("recipe")}
    return torch.ops.overlap.scaled_linear(x.values, w.values, x.scale, w.scale, bias, **how)


def _reduced(
    op: Any, input: Scaled, weight: Scaled, bias: torch.Tensor | None, group: str, *how: Any
) -> torch.Tensor:
    """`gemm_allreduce` or `gemm_reducescatter`."""
    x, (w,), how = _together(input, [weight], *how)
    scales = {"scale_input": x.scale, "scale_weight": w.scale}
    return op(x.values, w.values, bias, group=group, **scales, **how)


def _gathered(
    input: Scaled,
    weights: Sequence[Scaled],
    biases: Sequence[torch.Tensor | None],
    group: str,
    *how: Any,
) -> tuple[list[torch.Tensor], Scaled]:
    """`allgather_gemm` of several weights. One scale of the input is the same on all ranks."""
    x, ws, how = _together(input, weights, *how)
    how["shared_scale_input"] = how["recipe_input"] is ScalingType.TensorWise
    scales = {"scale_input": x.scale, "scale_weight": [w.scale for w in ws]}
    outputs, values, scale = allgather_gemm(
        x.values, [w.values for w in ws], list(biases), group=group, **scales, **how
    )
    return outputs, Scaled(values, scale if input.by_rows else input.scale)


class Map(NamedTuple):
    """One of the four maps, and what a layer asks of it."""

    recipe: Recipe
    group: str
    columns: bool  # N is cut, else K
    sequence: bool  # tokens are cut
    gathers: bool = False  # the gathered input is a result, too
    reduces: bool = True  # the gradient of the columns' input is summed over the ranks


def linears(
    kind: Map,
    input: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
) -> tuple[torch.Tensor, ...]:
    """The map of padded operands: an output for each weight, and the gathered input if the map says so."""
    with_bias, operands = in_one(weights, biases)
    outputs = _Linear.apply(kind, with_bias, input, *operands)
    return recorded(outputs, keeps_gradients=kind.sequence and not kind.columns)


class _Linear(torch.autograd.Function):
    """All four maps. Operands are padded; `weights_and_biases`: all weights, then the biases of those that have one."""

    @staticmethod
    def forward(
        ctx,
        place: Map,
        with_bias: Sequence[bool],
        input: torch.Tensor,
        *weights_and_biases: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        recipe, count = place.recipe, len(with_bias)
        weights, biases = of_each(with_bias, weights_and_biases)
        ctx.place, ctx.with_bias, ctx.dtype, ctx.kept = place, with_bias, input.dtype, None
        needs_weights = any(ctx.needs_input_grad[3 : 3 + count])
        gathering = place.columns and place.sequence
        x = scaled(input, recipe.input, recipe, place.group if gathering else None)
        ws = [scaled(weight, recipe.weight, recipe) for weight in weights]
        how = (input.dtype, recipe.fast_accum)
        saved: tuple[torch.Tensor, ...] = (input,)
        if gathering:
            outputs, x = _gathered(x, ws, biases, place.group, *how)
            saved = (x.values, x.scale)
        elif place.columns:
            pairs = zip(ws, biases, strict=True)
            outputs = [_local(x, w, bias, *how) for w, bias in pairs]
        else:
            op = gemm_reducescatter if place.sequence else gemm_allreduce
            outputs = [_reduced(op, x, ws[0], biases[0], place.group, *how)]
        if not gathering and recipe.input_for_weight == recipe.input and not x.by_rows:
            saved = (x.values, x.scale)  # half of the input's memory
        ctx.save_for_backward(*weights, *(saved if needs_weights else ()))
        ctx.set_materialize_grads(False)  # an unused output costs neither work nor communication
        if not place.gathers:
            return tuple(outputs)
        gathered = x.dequantised(input.dtype)
        if not ctx.needs_input_grad[2]:
            ctx.mark_non_differentiable(gathered)
        return (*outputs, gathered)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Gradient) -> tuple[Gradient, ...]:
        place, with_bias = ctx.place, ctx.with_bias
        count = len(with_bias)
        weights, inputs = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        output_grads = grads[:count]
        gathered_grad = grads[count] if place.gathers else None
        _, _, needs_input, *needs = ctx.needs_input_grad
        needs_weights, needs_biases = of_each(with_bias, needs)
        used = [i for i in range(count) if output_grads[i] is not None]

        summed = None
        if gathered_grad is not None and needs_input:
            summed = start_reduce_scatter(gathered_grad, place.group)
        grad_input = made = None
        if used:
            grad, weight = one_after_the_other(
                [output_grads[i] for i in used], [weights[i] for i in used]
            )
            wanted = any(needs_weights[i] for i in used)
            grad_input, made = _backward(ctx, grad, weight, inputs, needs_input, wanted)
        if summed is not None:
            grad_input = wait(summed) if grad_input is None else grad_input + wait(summed)
        grad_biases = [
            rows(output_grads[i]).sum(0) if needs_biases[i] and i in used else None
            for i in range(count)
            if with_bias[i]
        ]
        return None, None, grad_input, *in_parts(made, output_grads, needs_weights), *grad_biases


def _backward(
    ctx: Any,
    grad: torch.Tensor,
    weight: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    needs_input: bool,
    needs_weight: bool,
) -> tuple[Gradient, Gradient]:
    """Gradients of input and weight, for all weights one after the other."""
    place, recipe, dtype = ctx.place, ctx.place.recipe, ctx.dtype
    how = (dtype, recipe.fast_accum_grad)
    gathering = not place.columns and place.sequence
    whole: torch.Tensor | Scaled = grad
    grad_input = None
    gathered = None if needs_input else kept(ctx, grad)
    if gathered is not None:
        whole = gathered
    elif needs_input or gathering:
        g = scaled(grad, recipe.grad, recipe, place.group if gathering else None)
        transposed = weight.t() if needs_input else weight.t()[:0]
        w = scaled(transposed, recipe.weight_for_grad, recipe)
        if gathering:
            (grad_input,), whole = _gathered(g, [w], [None], place.group, *how)
            if not needs_input:
                grad_input = None
            elif inputs and not needs_weight:  # whose gradient is wanted later
                ctx.kept = grad, whole
        elif place.columns and place.reduces:
            op = gemm_reducescatter if place.sequence else gemm_allreduce
            grad_input = _reduced(op, g, w, None, place.group, *how)
        else:
            grad_input = _local(g, w, None, *how)
        if not gathering and not g.by_rows and recipe.grad_for_weight == recipe.grad:
            whole = g  # serves both
    if not needs_weight:
        return grad_input, None
    input = inputs[0] if len(inputs) == 1 else Scaled(*inputs)
    return grad_input, _weight_gradient(whole, input, recipe, dtype)


def _weight_gradient(
    grad: torch.Tensor | Scaled, input: torch.Tensor | Scaled, recipe: Recipe, dtype: torch.dtype
) -> torch.Tensor:
    """[..., N], [..., K] -> [N, K], summed over the rows."""
    if recipe.grad_for_weight is None or recipe.input_for_weight is None:
        return weight_gradient(_plain(grad, dtype), _plain(input, dtype))
    return _local(
        _along_rows(grad, recipe.grad_for_weight, recipe, dtype),
        _along_rows(input, recipe.input_for_weight, recipe, dtype),
        None,
        dtype,
        recipe.fast_accum_weight,
    )


def _plain(operand: torch.Tensor | Scaled, dtype: torch.dtype) -> torch.Tensor:
    return operand.dequantised(dtype) if isinstance(operand, Scaled) else operand


def _along_rows(
    operand: torch.Tensor | Scaled, cast: Cast, recipe: Recipe, dtype: torch.dtype
) -> Scaled:
    """[..., C] -> fp8 [C, rows], for a GEMM that sums over the rows."""
    if isinstance(operand, Scaled) and not operand.by_rows and not cast.by_rows:
        return Scaled(rows(operand.values).t(), operand.scale)
    return scaled(rows(_plain(operand, dtype)).t(), cast, recipe)
