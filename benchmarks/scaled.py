"""fp8 operands and their scales: the arguments of the ops, the sequence and PyTorch's fused ops."""

from __future__ import annotations

from typing import Any

import torch

from overlap_torch._ops.scaled import BLOCK, RECIPES, scale_shapes

from .shapes import Shape

Results = tuple[torch.Tensor, ...]

OUTPUT = torch.bfloat16


def scaled(operand: torch.Tensor, dtype: torch.dtype, scales: str, block_rows: int) -> Results:
    """[rows, K] in fp8, and the scale: the largest number of each tensor, row or block divided by the type's largest."""
    rows, k = operand.shape
    magnitude = operand.abs().float()
    if scales == "tensor":
        scale = magnitude.amax().reshape(1)
    elif scales == "row":
        scale = magnitude.amax(1, keepdim=True)
    else:
        down, across = -rows % block_rows, -k % BLOCK
        padded = torch.nn.functional.pad(magnitude, (0, across, 0, down))
        scale = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, block_rows)).amax((1, 3))
    scale = scale.clamp(min=1e-12) / torch.finfo(dtype).max
    spread = scale
    if scales == "block":
        spread = scale.repeat_interleave(block_rows, 0)[:rows]
        spread = spread.repeat_interleave(BLOCK, 1)[:, :k]
    return (operand.float() / spread).to(dtype), scale


class Scaling:
    """How a case's operands are scaled ("tensor", "row" or "block"), and the arguments of its calls."""

    def __init__(self, scales: str, fast_accum: bool) -> None:
        self._scales, self._fast = scales, fast_accum
        self.shared = scales == "tensor"  # one scale for the rows of all ranks
        recipes = dict(zip(("recipe_input", "recipe_weight"), RECIPES[scales], strict=True))
        self.keywords = {"output_dtype": OUTPUT, "use_fast_accum": fast_accum, **recipes}
        self._values = self.keywords | {name: recipe.value for name, recipe in recipes.items()}

    def cast(self, input: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> Results:
        """Both operands in fp8, and their scales. No GEMM takes two operands of e5m2."""
        x, x_scale = scaled(input, dtype, self._scales, 1)
        w, w_scale = scaled(weight, torch.float8_e4m3fn, self._scales, BLOCK)
        return x, w, x_scale, w_scale

    def ones(self, input: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> Results:
        """Both operands as they are in fp8; scales of one."""
        sizes = scale_shapes(self._scales, input.shape[0], *weight.shape)
        ones = [torch.ones(size, device=input.device) for size in sizes]
        return input.to(dtype), weight.to(torch.float8_e4m3fn), *ones

    def product(self, x: torch.Tensor, w: torch.Tensor, xs: torch.Tensor, ws: torch.Tensor):
        """PyTorch's scaled GEMM if the device has one, else the product of dequantised operands."""
        return torch.ops.overlap.scaled_linear(x, w, None, xs, ws, **self._values)

    def pytorch(self, op: str, shape: Shape, group: str) -> dict[str, Any]:
        """PyTorch's fused ops of scaled operands."""
        tensor = self._scales == "tensor"

        def gather(x, w, xs, ws):
            gathered, (output,) = torch.ops.symm_mem.fused_all_gather_scaled_matmul(
                x, [w.t()], xs, [ws if tensor else ws.view(1, -1)], 0, group,
                [None], [None], [OUTPUT], [self._fast],
            )  # fmt: skip
            return output, gathered.view(torch.uint8)

        def scatter(x, w, xs, ws):
            output = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
                x, w.t(), xs, ws if tensor else ws.view(1, -1), "sum", 0, 0, group,
                [shape.m, shape.n], None, None, OUTPUT, self._fast,
            )  # fmt: skip
            return (output,)

        known = {
            "allgather_gemm": {"fused_all_gather_scaled_matmul": gather},
            "gemm_reducescatter": {"fused_scaled_matmul_reduce_scatter": scatter},
        }
        return {} if self._scales == "block" else known.get(op, {})
