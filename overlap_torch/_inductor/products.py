"""Products of a graph in the ops' form: GEMMs, plain or with scales, and why other products stay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.nn.functional import ScalingType

from overlap_torch._inductor.editing import (
    Editor,
    NotFused,
    arguments,
    as_expr,
    aten,
    describe,
    name_of,
    value,
)
from overlap_torch._ops.fakes import DTYPES
from overlap_torch._ops.scaled import OPERANDS, OUTPUTS

_ops = torch.ops.overlap

_RECIPES = (ScalingType.TensorWise, ScalingType.RowWise)
_SCALED = ("_scaled_mm", "_scaled_mm_v2")
# Products that are not GEMMs, and why the ops do not take them.
_OTHER_PRODUCTS = {
    "_grouped_mm": "its GEMM is aten._grouped_mm: the ops take one GEMM, not a group of them",
    "_scaled_grouped_mm": "its GEMM is aten._scaled_grouped_mm: the ops take one GEMM, not a group of them",
    "bmm": "its GEMM is aten.bmm: the ops take no batches of weights",
    "baddbmm": "its GEMM is aten.baddbmm: the ops take no batches of weights",
    "_int_mm": "its GEMM is aten._int_mm: the ops take bf16, fp16, fp32 and fp64",
}


@dataclass(frozen=True)
class Scales:
    """The scales of a GEMM's fp8 operands: one number for both, or one for each row of the left and
    each column of the right."""

    left: Node  # one number, or one for each of M
    right: Node  # one number, or one for each of N
    recipe: ScalingType
    fast_accum: bool

    @property
    def of_rows(self) -> bool:
        return self.recipe is ScalingType.RowWise


@dataclass(frozen=True)
class Gemm:
    """``left @ right + bias``; the bias [N] or None. With scales the operands are their values times scales."""

    node: Node
    left: Node  # [M, K]
    right: Node  # [K, N]
    bias: Node | None
    scales: Scales | None = None


def product_of(node: Node) -> tuple[Gemm | None, str | None]:
    """The GEMM that the node computes, or why the ops do not take this product; None twice for other nodes."""
    name = _aten_name(node)
    if name in _OTHER_PRODUCTS:
        return None, _OTHER_PRODUCTS[name]
    if name in _SCALED:
        try:
            return _scaled(node), None
        except NotFused as error:
            return None, error.why
    if node.target is aten.mm.default:
        return Gemm(node, *node.args, None), None
    if node.target is aten.addmm.default:
        bias, left, right = node.args
        unscaled = all(node.kwargs.get(key, 1) == 1 for key in ("beta", "alpha"))
        if unscaled and _is_bias(bias, node):
            return Gemm(node, left, right, bias), None
    if name in ("mm", "addmm"):
        return None, f"its GEMM is {describe(node)} with scales or another result's dtype"
    return None, None


def check_dtype(gemm: Gemm) -> None:
    """Raises NotFused unless the ops take the GEMM's dtypes."""
    dtype = value(gemm.node).dtype
    operands = [value(operand).dtype for operand in (gemm.left, gemm.right)]
    if gemm.scales is None:
        if dtype not in DTYPES or any(operand != dtype for operand in operands):
            raise NotFused(
                f"its GEMM is in {name_of(dtype)}: the ops take bf16, fp16, fp32 and fp64"
            )
        return
    if not set(OPERANDS).issuperset(operands) or torch.float8_e4m3fn not in operands:
        raise NotFused(
            f"its GEMM multiplies {' by '.join(map(name_of, operands))}: with scales the ops take float8_e4m3fn and "
            "float8_e5m2, one of them float8_e4m3fn"
        )
    if dtype not in OUTPUTS:
        raise NotFused(
            f"its GEMM's result is in {name_of(dtype)}: with scales the ops give bf16, fp16 and fp32"
        )
    if gemm.bias is not None and value(gemm.bias).dtype != dtype:
        raise NotFused(
            f"its GEMM adds a bias in {name_of(value(gemm.bias).dtype)} to a result in {name_of(dtype)}"
        )


@dataclass(frozen=True)
class Operand:
    """[rows, K], and its scale: [rows, 1], one number, or None."""

    matrix: Node
    scale: Node | None


def operand_of(editor: Editor, gemm: Gemm, side: str) -> Operand:
    """The left operand, or the right one transposed, in the ops' form."""
    matrix = gemm.left if side == "left" else editor.transposed(gemm.right)
    if gemm.scales is None:
        return Operand(matrix, None)
    scale = getattr(gemm.scales, side)
    shape = value(scale).shape
    if not gemm.scales.of_rows or (len(shape) == 2 and as_expr(shape[1]) == 1):
        return Operand(matrix, scale)
    if len(shape) == 2:
        return Operand(matrix, editor.transposed(scale))
    return Operand(matrix, editor.call(aten.unsqueeze.default, scale, 1))


def call(
    editor: Editor,
    name: str,
    gemm: Gemm,
    input: Operand,
    weight: Operand,
    bias: Node | None,
    group: str,
) -> Node:
    """A call of ``gemm_allreduce`` or ``gemm_reducescatter``, with the GEMM's scales."""
    operands = (input.matrix, weight.matrix, bias, input.scale, weight.scale)
    return editor.call(getattr(_ops, name).default, *operands, **keywords_of(gemm), group=group)


def keywords_of(gemm: Gemm) -> dict[str, Any]:
    """The keywords that say how a GEMM with scales is computed."""
    if gemm.scales is None:
        return {}
    return {
        "recipe_input": gemm.scales.recipe.value,
        "recipe_weight": gemm.scales.recipe.value,
        "output_dtype": value(gemm.node).dtype,
        "use_fast_accum": gemm.scales.fast_accum,
    }


def _aten_name(node: Node) -> str | None:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    return target._overloadpacket.__name__


def _is_bias(bias: Node, product: Node) -> bool:
    """True for a bias [N]."""
    own = value(bias)
    return own.dim() == 1 and as_expr(own.shape[0]) == as_expr(value(product).shape[1])


# --- aten._scaled_mm ------------------------------------------------------------------------------------------


def _scaled(node: Node) -> Gemm:
    """The GEMM of a scaled product; raises NotFused if the ops do not take it."""
    name = f"its GEMM is {describe(node)}"
    given = arguments(node)
    left, right, bias = given["self"], given["mat2"], given["bias"]
    if given.get("scale_result") is not None:
        raise NotFused(f"{name} with a scale for its result: the ops' results have none")
    if bias is not None and not _is_bias(bias, node):
        raise NotFused(f"{name} with a bias of other sizes than [N]")
    scales = [given["scale_a"], given["scale_b"]]
    if isinstance(scales[0], Node):
        recipe = _recipe_of_shapes(scales, left, right)
    else:
        recipe, scales = _named_recipe(given, left, right)
    if recipe is None:
        shapes = " and ".join(
            str([str(size) for size in value(scale).shape]).replace("'", "") for scale in scales
        )
        raise NotFused(
            f"{name} with scales of shapes {shapes}: the pass takes those of tensors and of rows"
        )
    if any(value(scale).dtype != torch.float32 for scale in scales):
        raise NotFused(f"{name} with scales that are not float32")
    return Gemm(node, left, right, bias, Scales(*scales, recipe, given["use_fast_accum"]))


def _recipe_of_shapes(scales: Sequence[Node], left: Node, right: Node) -> ScalingType | None:
    """The recipe that ``aten._scaled_mm`` takes for scales of these shapes; None unless they are of tensors or of rows."""
    shapes = [[as_expr(size) for size in value(scale).shape] for scale in scales]
    if all(math.prod(shape) == 1 for shape in shapes):
        return ScalingType.TensorWise
    m, n = as_expr(value(left).shape[0]), as_expr(value(right).shape[1])
    return ScalingType.RowWise if shapes == [[m, 1], [1, n]] else None


def _named_recipe(
    given: dict[str, Any], left: Node, right: Node
) -> tuple[ScalingType | None, list[Node]]:
    """The recipe that ``aten._scaled_mm_v2`` names, and the scales; None for a recipe that the pass does not take."""
    lists = [given["scale_a"], given["scale_b"]]
    scales = [scale for each in lists for scale in each]
    names = [list(given["recipe_a"]), list(given["recipe_b"])]
    plain = not any(given["swizzle_a"]) and not any(given["swizzle_b"])
    whole = list(given["contraction_dim"]) in ([], [1, 0], [-1, -2])
    sizes = [as_expr(value(left).shape[0]), as_expr(value(right).shape[1])]
    for recipe in _RECIPES:
        wanted = sizes if recipe is ScalingType.RowWise else [1, 1]
        if names != [[recipe.value]] * 2 or len(scales) != 2 or not plain or not whole:
            continue
        if all(_holds(scale, size) for scale, size in zip(scales, wanted, strict=True)):
            return recipe, scales
    return None, scales


def _holds(scale: Node, size: Any) -> bool:
    """True for a vector of this size: a tensor with one dim, not counting dims of size 1."""
    shape = [as_expr(size) for size in value(scale).shape]
    return len(shape) <= 2 and math.prod(shape) == size
