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

from overlap_torch._layers.linear import as_under_autocast, cut, padded
from overlap_torch._layers.sharding import pad_end, shard_range
from overlap_torch._ops import allgather_gemm, gemm_allreduce, gemm_reducescatter
from overlap_torch._ops.collectives import start_reduce_scatter, wait
from overlap_torch._ops.gradients import (
    kept,
    of_each,
    one_after_the_other,
    recorded,
    rows,
    weight_gradient,
)

_SMALLEST = 1e-12  # lower bound of the largest number: zeros have a scale, too

Gradient = torch.Tensor | None


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


def _together(*operands: Scaled) -> tuple[list[Scaled], ScalingType]:
    """The operands of one op: if one has scales of rows, all have; and their recipe."""
    if not any(operand.by_rows for operand in operands):
        return list(operands), ScalingType.TensorWise
    with_rows = [
        each if each.by_rows else Scaled(each.values, each.scale.expand(*each.values.shape[:-1], 1))
        for each in operands
    ]
    return with_rows, ScalingType.RowWise


def _local(
    input: Scaled, weight: Scaled, bias: torch.Tensor | None, dtype: torch.dtype, fast_accum: bool
) -> torch.Tensor:
    (input, weight), recipe = _together(input, weight)
    return torch.ops.overlap.scaled_linear(
        input.values,
        weight.values,
        input.scale,
        weight.scale,
        bias,
        recipe_input=recipe.value,
        recipe_weight=recipe.value,
        output_dtype=dtype,
        use_fast_accum=fast_accum,
    )


def _reduced(
    op: Any,
    input: Scaled,
    weight: Scaled,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    fast_accum: bool,
    group: str,
) -> torch.Tensor:
    """`gemm_allreduce` or `gemm_reducescatter`."""
    (input, weight), recipe = _together(input, weight)
    return op(
        input.values,
        weight.values,
        bias,
        group=group,
        scale_input=input.scale,
        scale_weight=weight.scale,
        recipe_input=recipe,
        recipe_weight=recipe,
        output_dtype=dtype,
        use_fast_accum=fast_accum,
    )


def _gathered(
    input: Scaled,
    weights: Sequence[Scaled],
    biases: Sequence[torch.Tensor | None],
    dtype: torch.dtype,
    fast_accum: bool,
    group: str,
) -> tuple[list[torch.Tensor], Scaled]:
    """`allgather_gemm` of several weights. One scale of the input is the same on all ranks."""
    (x, *ws), recipe = _together(input, *weights)
    outputs, values, scale = allgather_gemm(
        x.values,
        [w.values for w in ws],
        list(biases),
        group=group,
        scale_input=x.scale,
        scale_weight=[w.scale for w in ws],
        recipe_input=recipe,
        recipe_weight=recipe,
        output_dtype=dtype,
        use_fast_accum=fast_accum,
        shared_scale_input=recipe is ScalingType.TensorWise,
    )
    return outputs, Scaled(values, scale if input.by_rows else input.scale)


class _Place(NamedTuple):
    """The layer's map, and where its parts are."""

    columns: bool  # N is cut, else K
    sequence: bool  # tokens are cut
    group: str
    recipe: Recipe
    biases: tuple[bool, ...]  # which weights have a bias
    gathers: bool = False  # the gathered input is a result, too
    reduces: bool = True  # the gradient of the columns' input is summed over the ranks


class _Linear(torch.autograd.Function):
    """All four maps. Operands are padded; `weights_and_biases`: all weights, then the biases of those that have one."""

    @staticmethod
    def forward(
        ctx, place: _Place, input: torch.Tensor, *weights_and_biases: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        recipe, count = place.recipe, len(place.biases)
        weights, biases = of_each(place.biases, weights_and_biases)
        ctx.place, ctx.dtype, ctx.kept = place, input.dtype, None
        needs_weights = any(ctx.needs_input_grad[2 : 2 + count])
        gathering = place.columns and place.sequence
        x = scaled(input, recipe.input, recipe, place.group if gathering else None)
        ws = [scaled(weight, recipe.weight, recipe) for weight in weights]
        how = (input.dtype, recipe.fast_accum)
        saved: tuple[torch.Tensor, ...] = (input,)
        if gathering:
            outputs, x = _gathered(x, ws, biases, *how, place.group)
            saved = (x.values, x.scale)
        elif place.columns:
            outputs = [_local(x, w, bias, *how) for w, bias in zip(ws, biases, strict=True)]
        else:
            op = gemm_reducescatter if place.sequence else gemm_allreduce
            outputs = [_reduced(op, x, ws[0], biases[0], *how, place.group)]
        if not gathering and recipe.input_for_weight == recipe.input and not x.by_rows:
            saved = (x.values, x.scale)  # half of the input's memory
        ctx.save_for_backward(*weights, *(saved if needs_weights else ()))
        ctx.set_materialize_grads(False)  # an unused output costs neither work nor communication
        if not place.gathers:
            return tuple(outputs)
        gathered = x.dequantised(input.dtype)
        if not ctx.needs_input_grad[1]:
            ctx.mark_non_differentiable(gathered)
        return (*outputs, gathered)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Gradient) -> tuple[Gradient, ...]:
        place = ctx.place
        count = len(place.biases)
        weights, inputs = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        output_grads = grads[:count]
        gathered_grad = grads[count] if place.gathers else None
        _, needs_input, *needs = ctx.needs_input_grad
        needs_weights, needs_biases = of_each(place.biases, needs)
        used = [i for i in range(count) if output_grads[i] is not None]

        summed = None
        if gathered_grad is not None and needs_input:
            summed = start_reduce_scatter(gathered_grad, place.group)
        grad_input, grad_weights = None, [None] * count
        if used:
            grad, weight = one_after_the_other(
                [output_grads[i] for i in used], [weights[i] for i in used]
            )
            wanted = any(needs_weights[i] for i in used)
            grad_input, made = _backward(ctx, grad, weight, inputs, needs_input, wanted)
            begin = 0
            for i in used:
                size = output_grads[i].shape[-1]
                if needs_weights[i]:
                    grad_weights[i] = made.narrow(0, begin, size)
                begin += size
        if summed is not None:
            grad_input = wait(summed) if grad_input is None else grad_input + wait(summed)
        grad_biases = [
            rows(output_grads[i]).sum(0)
            if needs_biases[i] and output_grads[i] is not None
            else None
            for i in range(count)
            if place.biases[i]
        ]
        return None, grad_input, *grad_weights, *grad_biases


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
            (grad_input,), whole = _gathered(g, [w], [None], *how, place.group)
            if not needs_input:
                grad_input = None
            elif inputs and not needs_weight:  # whose gradient is wanted later
                ctx.kept = grad, whole
        elif place.columns and place.reduces:
            op = gemm_reducescatter if place.sequence else gemm_allreduce
            grad_input = _reduced(op, g, w, None, *how, place.group)
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


# --- the maps, as overlap_torch._layers.linear has them --------------------------------------------------------------


@dataclass(frozen=True)
class Maps:
    """The functions of ``overlap_torch._layers.linear``, computed with a recipe."""

    recipe: Recipe

    def _run(
        self,
        place: dict[str, Any],
        input: torch.Tensor,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
    ) -> tuple[torch.Tensor, ...]:
        input, *operands = as_under_autocast(input, *weights, *biases)
        weights, biases = operands[: len(weights)], operands[len(weights) :]
        given = [bias for bias in biases if bias is not None]
        has = tuple(bias is not None for bias in biases)
        where = _Place(recipe=self.recipe, biases=has, **place)
        return recorded(
            _Linear.apply(where, input, *weights, *given),
            keeps_gradients=where.sequence and not where.columns,
        )

    def columns(self, input, weights, biases, *, group, world_size, paddings, reduces=True):
        """With ``reduces`` False the input's gradient stays this rank's part of a sum over the ranks."""
        place = {"columns": True, "sequence": False, "group": group}
        place["reduces"] = reduces and world_size > 1
        # Every rank's GEMM of the gradient must have the same size.
        outputs = self._run(place, input, *padded(weights, biases, paddings))
        return tuple(
            output[..., : output.shape[-1] - padding]
            for output, padding in zip(outputs, paddings, strict=True)
        )

    def column(self, input, weight, bias, *, padding, **place):
        return self.columns(input, [weight], [bias], paddings=[padding], **place)[0]

    def columns_sequence(
        self, input, weights, biases, *, group, world_size, tokens, paddings, gathers=False
    ):
        """With ``gathers`` the last result is the gathered input, with the values of fp8 times scales."""
        results = self._run(
            {"columns": True, "sequence": True, "group": group, "gathers": gathers},
            pad_end(input, 0, -(-tokens // world_size) - input.shape[0]),
            *padded(weights, biases, paddings),
        )
        outputs = cut(results[: len(paddings)], tokens, paddings)
        return (*outputs, results[-1][:tokens]) if gathers else outputs

    def column_sequence(self, input, weight, bias, *, padding, **place):
        return self.columns_sequence(input, [weight], [bias], paddings=[padding], **place)[0]

    def row(self, input, weight, bias, *, group, padding):
        place = {"columns": False, "sequence": False, "group": group}
        (output,) = self._run(
            place, pad_end(input, -1, padding), [pad_end(weight, -1, padding)], [bias]
        )
        return output

    def row_sequence(self, input, weight, bias, *, group, world_size, rank, padding):
        """The bias's gradient is the local rows' sum."""
        tokens = input.shape[0]
        input = pad_end(pad_end(input, -1, padding), 0, -tokens % world_size)
        place = {"columns": False, "sequence": True, "group": group}
        (output,) = self._run(place, input, [pad_end(weight, -1, padding)], [bias])
        _, size = shard_range(tokens, world_size, rank)
        return output[:size]
