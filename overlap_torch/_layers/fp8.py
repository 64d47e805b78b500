"""The four linear maps of tensor parallelism with GEMMs in fp8: casts, forward, gradients; layers and styles build on them.

Forward and the input's gradient are the ops with scaled operands; the weights' gradients are local products. Casts are
dynamic: a scale is the largest cast number divided by the type's largest, for a whole tensor or for each row that a GEMM
sums over.

The single scale of a whole tensor is this rank's own, except for a gathered tensor. There it is the largest of all ranks'
scales, so that the weight's gradient can be computed with one scale as well. This takes an all-reduce of one number before
the gather. Scales of rows travel with their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import ScalingType

from overlap_torch._layers.maps import Plain
from overlap_torch._ops import allgather_gemm, gemm_allreduce, gemm_reducescatter
from overlap_torch._ops.collectives import wait
from overlap_torch._ops.gradients import rows, weight_gradient

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


Operand = Scaled | torch.Tensor


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


class Fp8(Plain):
    """The policy of a call with GEMMs in fp8. Operands are padded; ``recipe`` and ``dtype`` are given."""

    __slots__ = ()

    def column(
        self,
        input: torch.Tensor,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
    ) -> tuple[list[torch.Tensor], Sequence[torch.Tensor]]:
        recipe = self.recipe
        x = scaled(input, recipe.input, recipe, self.group if self.sequence else None)
        ws = [scaled(weight, recipe.weight, recipe) for weight in weights]
        if self.sequence:
            return self._gathered(x, ws, biases, recipe.fast_accum)
        pairs = zip(ws, biases, strict=True)
        outputs = [self._local(x, w, bias, recipe.fast_accum) for w, bias in pairs]
        return outputs, self._saved(x, input)

    def result(self, saved: Sequence[torch.Tensor]) -> torch.Tensor:
        return self._dequantised(Scaled(*saved))

    def row(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        recipe = self.recipe
        x, w = scaled(input, recipe.input, recipe), scaled(weight, recipe.weight, recipe)
        output = self._reduced(x, w, bias, recipe.fast_accum)
        return output, self._saved(x, input)

    def row_input(self, saved: Sequence[torch.Tensor]) -> Operand:
        return saved[0] if len(saved) == 1 else Scaled(*saved)

    def column_input(self, saved: Sequence[torch.Tensor], again: bool) -> Callable[[], Operand]:
        return partial(self.row_input, saved)

    def column_gradient(
        self, grad: torch.Tensor, weight: torch.Tensor, reduces: bool, padding: int
    ) -> tuple[torch.Tensor, Operand]:
        recipe = self.recipe
        g = scaled(grad, recipe.grad, recipe)
        w = scaled(weight.t(), recipe.weight_for_grad, recipe)
        product = self._reduced if reduces else self._local
        grad_input = product(g, w, None, recipe.fast_accum_grad)
        serves_both = not g.by_rows and recipe.grad_for_weight == recipe.grad
        return grad_input, g if serves_both else grad

    def row_gradient(
        self, grad: torch.Tensor, weight: torch.Tensor, needs_input: bool, again: bool
    ) -> tuple[torch.Tensor | None, Operand]:
        if not self.sequence:
            return self.column_gradient(grad, weight, False, 0) if needs_input else (None, grad)
        recipe = self.recipe
        g = scaled(grad, recipe.grad, recipe, self.group)
        transposed = weight.t() if needs_input else weight.t()[:0]
        w = scaled(transposed, recipe.weight_for_grad, recipe)
        (grad_input,), read = self._gathered(g, [w], [None], recipe.fast_accum_grad)
        return grad_input if needs_input else None, read

    def weight_gradient(self, grad: Operand, input: Operand) -> torch.Tensor:
        """[..., N], [..., K] -> [N, K], summed over the rows."""
        recipe = self.recipe
        if recipe.grad_for_weight is None or recipe.input_for_weight is None:
            return weight_gradient(self._dequantised(grad), self._dequantised(input))
        g = self._along_rows(grad, recipe.grad_for_weight)
        x = self._along_rows(input, recipe.input_for_weight)
        return self._local(g, x, None, recipe.fast_accum_weight)

    def _saved(self, x: Scaled, input: torch.Tensor) -> Sequence[torch.Tensor]:
        serves_both = not x.by_rows and self.recipe.input_for_weight == self.recipe.input
        return x if serves_both else (input,)  # the cast is half of the input's memory

    def _dequantised(self, read: Operand) -> torch.Tensor:
        if not isinstance(read, Scaled):
            return read
        return (read.values.float() * read.scale).to(self.dtype)

    def _along_rows(self, operand: Operand, cast: Cast) -> Scaled:
        """[..., C] -> fp8 [C, rows], for a GEMM that sums over the rows."""
        if isinstance(operand, Scaled) and not operand.by_rows and not cast.by_rows:
            return Scaled(rows(operand.values).t(), operand.scale)
        return scaled(rows(self._dequantised(operand)).t(), cast, self.recipe)

    def _together(
        self, input: Scaled, weights: Sequence[Scaled], fast_accum: bool
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
        how = {**recipes, "output_dtype": self.dtype, "use_fast_accum": fast_accum}
        return operands[0], operands[1:], how

    def _local(
        self, input: Scaled, weight: Scaled, bias: torch.Tensor | None, fast_accum: bool
    ) -> torch.Tensor:
        x, (w,), how = self._together(input, [weight], fast_accum)
        how |= {name: recipe.value for name, recipe in how.items() if name.startswith("recipe")}
        return torch.ops.overlap.scaled_linear(x.values, w.values, bias, x.scale, w.scale, **how)

    def _reduced(
        self, input: Scaled, weight: Scaled, bias: torch.Tensor | None, fast_accum: bool
    ) -> torch.Tensor:
        op = gemm_reducescatter if self.sequence else gemm_allreduce
        x, (w,), how = self._together(input, [weight], fast_accum)
        scales = {"scale_input": x.scale, "scale_weight": w.scale}
        return op(x.values, w.values, bias, group=self.group, **scales, **how)

    def _gathered(
        self,
        input: Scaled,
        weights: Sequence[Scaled],
        biases: Sequence[torch.Tensor | None],
        fast_accum: bool,
    ) -> tuple[list[torch.Tensor], Scaled]:
        """`allgather_gemm` of several weights. One scale of the input is the same on all ranks."""
        x, ws, how = self._together(input, weights, fast_accum)
        how["shared_scale_input"] = how["recipe_input"] is ScalingType.TensorWise
        scales = {"scale_input": x.scale, "scale_weight": [w.scale for w in ws]}
        outputs, values, scale = allgather_gemm(
            x.values, [w.values for w in ws], list(biases), group=self.group, **scales, **how
        )
        return outputs, Scaled(values, scale if input.by_rows else input.scale)
