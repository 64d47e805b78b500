"""Operands with scales (fp8), and the checks of fake kernels, for operands with scales or without."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import ScalingType

from overlap_torch._ops import fakes, library  # noqa: F401  (the library holds the ops)
from overlap_torch._ops.ordering import register_fake

# The types of scaled operands, of which one is the first, and of their results.
OPERANDS = (torch.float8_e4m3fn, torch.float8_e5m2)
OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)
BLOCK = 128

# By the name of the common recipe: the name of each operand's recipe.
RECIPES = {
    "tensor": (ScalingType.TensorWise, ScalingType.TensorWise),
    "row": (ScalingType.RowWise, ScalingType.RowWise),
    "block": (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128),
}


def scale_shapes(recipe: str, rows: int, n: int, k: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the input's scales, by a name of RECIPES, and of the weight's."""
    return {
        "tensor": ((1,), (1,)),
        "row": ((rows, 1), (n, 1)),
        "block": ((rows, _blocks(k)), (_blocks(n), _blocks(k))),
    }[recipe]


def numbers(
    scale_input: torch.Tensor | None,
    recipe_input: ScalingType | None,
    recipe_weight: ScalingType | None,
    output_dtype: torch.dtype | None,
) -> tuple[Any, ...]:
    """Recipes and dtype as schemas have them: all None for operands without scales."""
    if scale_input is recipe_input is recipe_weight is None:
        return None, None, None
    return _number(recipe_input), _number(recipe_weight), output_dtype


def _number(recipe: ScalingType | None) -> int | None:
    if recipe is None:
        return None
    if not isinstance(recipe, ScalingType):
        raise TypeError(
            f"a recipe is a torch.nn.functional.ScalingType or None, but got {recipe!r}"
        )
    return recipe.value


# Dtypes are numbers in a schema, c10::ScalarType's.
_DTYPES = {5: torch.float16, 6: torch.float32, 15: torch.bfloat16, None: torch.bfloat16}


def _blocks(size: int) -> int:
    return (size + BLOCK - 1) // BLOCK


# --- fake kernels ---------------------------------------------------------------------------------------------


def _fits(recipe: str, shape: Sequence[int], leading: Sequence[int], k: int) -> bool:
    """True if scales of this shape are the recipe's for an operand [*leading, k]."""
    if recipe == "tensor":
        return all(size == 1 for size in shape)
    rows, columns = math.prod(leading), 1 if recipe == "row" else _blocks(k)
    allowed = [(rows, columns), (*leading, columns), *([(rows,)] if recipe == "row" else [])]
    alike = (one for one in allowed if len(one) == len(shape))
    return any(all(a == b for a, b in zip(shape, one, strict=True)) for one in alike)


class _Scales(NamedTuple):
    """The scales of one call, and the numbers of the recipes that it names."""

    input: torch.Tensor
    weights: Sequence[torch.Tensor]
    recipe_input: int | None
    recipe_weight: int | None


def given(op: str, dim: int, *found: Any) -> _Scales | None:
    """The scales that a call has, if any, which are in the order of ``_Scales``."""
    if all(one is None for one in found):
        return None
    if dim != 0:
        raise ValueError(
            f"{op}: with scaled operands dim must be 0, but is {dim}; move it to the front"
        )
    for name, one in zip(("scale_input", "scale_weight"), found, strict=False):
        if one is None:
            raise ValueError(
                f"{op}: {name} is None, but scaled operands need scale_input and scale_weight, "
                "and operands without scales take no recipes; give both scales, or none of these"
            )
    return _Scales(*found)


def _recipe(op: str, input: torch.Tensor, weights: Sequence[torch.Tensor], scales: _Scales) -> str:
    named = scales[2:]
    fitting = [
        name
        for name, kinds in RECIPES.items()
        if all(one in (None, kind.value) for one, kind in zip(named, kinds, strict=True))
    ]
    torch._check_value(
        len(fitting) > 0,
        lambda: (
            f"{op}: recipes {named[0]} and {named[1]} (of torch.nn.functional.ScalingType) are none of "
            "TensorWise for both, RowWise for both, and BlockWise1x128 with BlockWise128x128"
        ),
    )
    for weight, scale in zip(weights, scales.weights, strict=True):
        n, k = weight.shape
        fitting = [
            name
            for name in fitting
            if _fits(name, scales.input.shape, input.shape[:-1], k)
            and _fits(name, scale.shape, [_blocks(n) if name == "block" else n], k)
        ]
        torch._check_value(
            len(fitting) == 1,
            lambda weight=weight, scale=scale, fitting=fitting: (
                f"{op}: input {tuple(input.shape)} and weight {tuple(weight.shape)} have scales of shapes "
                f"{tuple(scales.input.shape)} and {tuple(scale.shape)}, which fit "
                f"{' and '.join(fitting) if fitting else 'no recipe'}; name the recipe if two fit"
            ),
        )
    return fitting[0]


def _check(
    op: str,
    input: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    scales: _Scales,
    output_dtype: torch.dtype,
) -> str:
    """Does the real kernels' checks; returns the recipe."""
    torch._check_value(
        len(weights) > 0 and len(scales.weights) == len(weights),
        lambda: (
            f"{op}: there must be as many scales as weights, one or more, but there are {len(weights)} weights and "
            f"{len(scales.weights)} scales"
        ),
    )
    torch._check_type(
        output_dtype in OUTPUTS,
        lambda: (
            f"{op}: output_dtype is {output_dtype}; supported are bfloat16, float16 and float32"
        ),
    )
    for weight, bias in zip(weights, biases, strict=True):
        torch._check_type(
            input.dtype in OPERANDS
            and weight.dtype in OPERANDS
            and torch.float8_e4m3fn in (input.dtype, weight.dtype)
            and (bias is None or bias.dtype == output_dtype),
            lambda weight=weight, bias=bias: (
                f"{op}: scaled operands are float8_e4m3fn and float8_e5m2, one of them float8_e4m3fn, and the bias is "
                f"of output_dtype {output_dtype}, but got {input.dtype}, {weight.dtype} and "
                f"{None if bias is None else bias.dtype}"
            ),
        )
        fakes.check_shapes(op, input, weight, bias)
    of_weights = (("scale_weight", scale) for scale in scales.weights)
    for name, scale in (("scale_input", scales.input), *of_weights):
        torch._check_type(
            scale.dtype == torch.float32,
            lambda name=name, scale=scale: f"{op}: {name} is {scale.dtype}; scales are float32",
        )
        fakes.check_device(op, input, name, scale)
    return _recipe(op, input, weights, scales)


def checked(
    op,
    input,
    weights,
    biases,
    scale_input=None,
    scale_weights=None,
    *,
    dim=0,
    invariance=None,
    recipe_input=None,
    recipe_weight=None,
    output_dtype=None,
    **others,
):
    """Checks the operands of some weights; returns the results' dtype, and the recipe, which is None without scales."""
    fakes.check_invariance(op, invariance)
    scales = given(op, dim, scale_input, scale_weights, recipe_input, recipe_weight)
    if scales is not None:
        output_dtype = _DTYPES.get(output_dtype, output_dtype)
        return output_dtype, _check(op, input, weights, biases, scales, output_dtype)
    for weight, bias in zip(weights, biases, strict=True):
        fakes.check_operands(op, input, weight, bias)
    return input.dtype, None


def result_of(op, input, weight, bias=None, scale_input=None, scale_weight=None, **how):
    """Checks the operands of one weight; returns a function from the result's leading dims to the fake result."""
    scale_weights = None if scale_weight is None else [scale_weight]
    dtype, _ = checked(op, input, [weight], [bias], scale_input, scale_weights, **how)
    return lambda *leading: input.new_empty((*leading, weight.shape[0]), dtype=dtype)


@register_fake("overlap::scaled_linear")
def _fake_linear(input, *operands, **keywords):
    return result_of("scaled_linear", input, *operands, **keywords)(*input.shape[:-1])
