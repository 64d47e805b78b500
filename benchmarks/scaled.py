"""The ops with fp8 operands and their scales, beside PyTorch's scaled GEMM and a collective, one after the other."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import overlap_torch
from overlap_torch._ops.scaled import BLOCK, RECIPES, scale_shapes
from overlap_torch._tools import verify

from .shapes import Shape

Results = tuple[torch.Tensor, ...]
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # and both scales

OUTPUT = torch.bfloat16


def scaled(operand: torch.Tensor, dtype: torch.dtype, scales: str, block_rows: int) -> Results:
    """[rows, K] in fp8, and the scale: the largest number of each tensor, row or block by the type's largest."""
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


class ScaledSides:
    """As computations.Sides, of operands with scales."""

    def __init__(
        self,
        op: str,
        shape: Shape,
        send_rows: list[int] | None,
        scales: str,
        group: str,
        fast_accum: bool,
    ) -> None:
        self._op, self._shape, self._scales, self._group = op, shape, scales, group
        self._fast = fast_accum
        self._whole: tuple[torch.Tensor, torch.Tensor] | None = None
        self._recipes = dict(zip(("recipe_input", "recipe_weight"), RECIPES[scales], strict=True))
        world = dist.get_world_size()
        self.input_rows = shape.m // world if op == "allgather_gemm" else shape.m
        self._send = send_rows or []
        self._receive = [self._send[dist.get_rank()]] * world if self._send else []

    def operands(self, dtype: torch.dtype, device: torch.device, seed: int) -> Operands:
        """Normally distributed ones, cast."""
        shape = self._shape
        input, weight = verify.normal_operands(
            self.input_rows, shape.n, shape.k, torch.bfloat16, device, seed
        )
        x, x_scale = scaled(input, dtype, self._scales, 1)
        # No GEMM takes two operands of e5m2.
        w, w_scale = scaled(weight, torch.float8_e4m3fn, self._scales, BLOCK)
        return x, w, x_scale, w_scale

    def integer_operands(self, dtype: torch.dtype, device: torch.device) -> Operands:
        """Operands of which no sum rounds; scales are one."""
        shape = self._shape
        x, w = verify.integer_operands(
            self.input_rows,
            shape.n,
            shape.k,
            torch.bfloat16,
            device,
            dist.get_world_size(),
            seed=1 + dist.get_rank(),
        )
        sizes = scale_shapes(self._scales, self.input_rows, shape.n, shape.k)
        ones = [torch.ones(size, device=device) for size in sizes]
        return x.to(dtype), w.to(torch.float8_e4m3fn), *ones

    def gemm(self, x: torch.Tensor, w: torch.Tensor, xs: torch.Tensor, ws: torch.Tensor) -> Results:
        """The sequence's alone, of all ranks' rows where these are gathered: the same ones each time."""
        if self._op == "allgather_gemm":
            if self._whole is None:
                world = dist.get_world_size()
                copies = 1 if self._scales == "tensor" else world
                rows = torch.cat([x.view(torch.uint8)] * world).view(x.dtype)
                self._whole = rows, torch.cat([xs] * copies)
            x, xs = self._whole
        return self._product(x, w, xs, ws)

    def _product(
        self, x: torch.Tensor, w: torch.Tensor, xs: torch.Tensor, ws: torch.Tensor
    ) -> Results:
        """PyTorch's where the device has one, else the product of dequantised operands."""
        keywords = {name: recipe.value for name, recipe in self._recipes.items()}
        keywords |= {"output_dtype": OUTPUT, "use_fast_accum": self._fast}
        return (torch.ops.overlap.scaled_linear(x, w, xs, ws, **keywords),)

    def sequence(
        self, x: torch.Tensor, w: torch.Tensor, xs: torch.Tensor, ws: torch.Tensor
    ) -> Results:
        if self._op == "allgather_gemm":
            gathered, scales = self._gathered(x, xs)
            return (*self._product(gathered, w, scales, ws), gathered.view(torch.uint8))
        (product,) = self._product(x, w, xs, ws)
        if self._op == "gemm_allreduce":
            dist.all_reduce(product)
            return (product,)
        if self._op == "gemm_reducescatter":
            output = product.new_empty(self._shape.m // dist.get_world_size(), self._shape.n)
            dist.reduce_scatter_tensor(output, product)
            return (output,)
        output = product.new_empty(sum(self._receive), self._shape.n)
        dist.all_to_all_single(output, product, self._receive, self._send)
        return (output,)

    def _gathered(self, x: torch.Tensor, xs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One scale of all is every rank's: it does not travel."""
        world = dist.get_world_size()
        gathered = x.new_empty(world * x.shape[0], x.shape[1])
        dist.all_gather_into_tensor(gathered.view(torch.uint8), x.view(torch.uint8))
        if self._scales == "tensor":
            return gathered, xs
        scales = xs.new_empty(world * xs.shape[0], xs.shape[1])
        dist.all_gather_into_tensor(scales, xs)
        return gathered, scales

    def op(self, x: torch.Tensor, w: torch.Tensor, xs: torch.Tensor, ws: torch.Tensor) -> Results:
        keywords: dict[str, Any] = {
            "group": self._group,
            "scale_input": xs,
            "scale_weight": ws,
            "output_dtype": OUTPUT,
            "use_fast_accum": self._fast,
            **self._recipes,
        }
        if self._op == "allgather_gemm":
            shared = self._scales == "tensor"
            output, gathered, _ = overlap_torch.allgather_gemm(
                x, w, shared_scale_input=shared, **keywords
            )
            return output, gathered.view(torch.uint8)
        rows = (self._send, self._receive) if self._op == "gemm_alltoall" else ()
        return (getattr(overlap_torch, self._op)(x, w, *rows, **keywords),)

    def collective(self) -> None:
        """The sequence's alone, of zeros."""
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        shape, world = self._shape, dist.get_world_size()
        if self._op == "allgather_gemm":
            own = torch.zeros(self.input_rows, shape.k, dtype=torch.uint8, device=device)
            dist.all_gather_into_tensor(own.new_empty(world * self.input_rows, shape.k), own)
            return
        whole = torch.zeros(shape.m, shape.n, dtype=OUTPUT, device=device)
        if self._op == "gemm_allreduce":
            dist.all_reduce(whole)
        elif self._op == "gemm_reducescatter":
            dist.reduce_scatter_tensor(whole.new_empty(shape.m // world, shape.n), whole)
        else:
            received = whole.new_empty(sum(self._receive), shape.n)
            dist.all_to_all_single(received, whole, self._receive, self._send)

    def pytorch(self) -> dict[str, Any]:
        """PyTorch's fused ops of scaled operands."""
        shape, group = self._shape, self._group
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

        if self._scales == "block":
            return {}
        known = {"allgather_gemm": gather, "gemm_reducescatter": scatter}
        names = {
            "allgather_gemm": "fused_all_gather_scaled_matmul",
            "gemm_reducescatter": "fused_scaled_matmul_reduce_scatter",
        }
        return {names[self._op]: known[self._op]} if self._op in known else {}
