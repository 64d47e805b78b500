"""PyTorch's fused GEMMs, ``torch.ops.symm_mem.fused_*``, by the ops of this package: each operator's arguments and what runs."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import ScalingType

from overlap_torch._ops import allgather_gemm, gemm_reducescatter
from overlap_torch._ops.fakes import DTYPES
from overlap_torch._ops.group import group_rank, world_size

_SCALED = (torch.float8_e4m3fn, torch.float8_e5m2)  # that the ops take, with scales
_SCALED_OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)

Scales = Sequence[torch.Tensor | None]


@dataclass
class _AllGatherMatmul:
    """``fused_all_gather_matmul``."""

    A: torch.Tensor
    Bs: Sequence[torch.Tensor]
    gather_dim: int
    group_name: str
    return_A: bool = field(default=True, kw_only=True)

    def refused(self) -> str:
        if not self.Bs:
            return "no B is given"
        return _gather_dim_refused(self.A, self.gather_dim) or _operands_refused(self.A, self.Bs)

    def ours(self) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """Runs `allgather_gemm` with the gathered dim first, which is also the memory order of PyTorch's results."""
        dim = self.gather_dim
        outputs, gathered = allgather_gemm(
            self.A.movedim(dim, 0), [B.t() for B in self.Bs], group=self.group_name
        )
        outputs = [output.movedim(0, dim) for output in outputs]
        return gathered.movedim(0, dim) if self.return_A else None, outputs


@dataclass
class _MatmulReduceScatter:
    """``fused_matmul_reduce_scatter``."""

    A: torch.Tensor
    B: torch.Tensor
    reduce_op: str
    scatter_dim: int
    group_name: str

    def refused(self) -> str:
        return _scatter_refused(
            self.reduce_op, self.A.shape, self.scatter_dim, self.group_name
        ) or _operands_refused(self.A, [self.B])

    def ours(self) -> torch.Tensor:
        """By `gemm_reducescatter`; contiguous, as PyTorch's is."""
        output = gemm_reducescatter(
            self.A.movedim(self.scatter_dim, 0), self.B.t(), group=self.group_name
        )
        return output.movedim(0, self.scatter_dim).contiguous()


@dataclass
class _AllGatherScaledMatmul:
    """``fused_all_gather_scaled_matmul``."""

    A: torch.Tensor
    Bs: Sequence[torch.Tensor]
    A_scale: torch.Tensor
    B_scales: Sequence[torch.Tensor]
    gather_dim: int
    group_name: str
    biases: Scales
    result_scales: Scales
    out_dtypes: Sequence[Any]
    use_fast_accum: Sequence[bool]

    def refused(self) -> str:
        A, Bs = self.A, self.Bs
        if not Bs:
            return "no B is given"
        lists = (
            self.B_scales,
            self.biases,
            self.result_scales,
            self.out_dtypes,
            self.use_fast_accum,
        )
        if any(len(values) != len(Bs) for values in lists):
            return "there is not one value for each B"
        if why := _gather_dim_refused(A, self.gather_dim):
            return why
        dtypes = _as_dtypes(self.out_dtypes)
        if why := _scaled_operands_refused(A, Bs, self.B_scales, self.result_scales, dtypes):
            return why
        if len(set(dtypes)) > 1 or len(set(self.use_fast_accum)) > 1:
            return "the results' dtypes or accumulation differ"
        if any(bias is not None and bias.dtype != dtypes[0] for bias in self.biases):
            return "a bias is of another dtype than the result"
        if self.A_scale.dtype != torch.float32:
            return f"A_scale is {self.A_scale.dtype}"
        if self._scale_of_own_rows() is None:
            return f"A_scale has the shape {(*self.A_scale.shape,)}"
        return ""

    def ours(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Runs `allgather_gemm`. A single scale of A is the same on every rank, as in PyTorch's kernel."""
        dim = self.gather_dim % self.A.dim()
        own = self._scale_of_own_rows()
        front = self.A.movedim(dim, 0)
        own = own if own.numel() == 1 else own.movedim(dim, 0)
        scales = _scales(front, own, self.Bs, self.B_scales)
        outputs, gathered, _ = allgather_gemm(
            front,
            [B.t() for B in self.Bs],
            list(self.biases),
            group=self.group_name,
            output_dtype=_as_dtypes(self.out_dtypes)[0],
            use_fast_accum=self.use_fast_accum[0],
            shared_scale_input=scales["recipe_input"] is ScalingType.TensorWise,
            **scales,
        )
        return gathered.movedim(0, dim), [output.movedim(0, dim) for output in outputs]

    def _scale_of_own_rows(self) -> torch.Tensor | None:
        """The scale of this rank's rows, from that scale or from all ranks' scales; None for another shape."""
        A_scale, dim = self.A_scale, self.gather_dim % self.A.dim()
        own = (*self.A.shape[:-1], 1)
        if A_scale.numel() == 1 or (*A_scale.shape,) == own:
            return A_scale
        world = world_size(self.group_name)
        whole = (*own[:dim], own[dim] * world, *own[dim + 1 :])
        if (*A_scale.shape,) != whole:
            return None
        return A_scale.chunk(world, dim)[group_rank(self.group_name)]


@dataclass
class _ScaledMatmulReduceScatter:
    """``fused_scaled_matmul_reduce_scatter``."""

    A: torch.Tensor
    B: torch.Tensor
    A_scale: torch.Tensor
    B_scale: torch.Tensor
    reduce_op: str
    orig_scatter_dim: int
    scatter_dim_after_maybe_reshape: int
    group_name: str
    output_shape: Sequence[int] | None
    bias: torch.Tensor | None = None
    result_scale: torch.Tensor | None = None
    out_dtype: Any = None
    use_fast_accum: bool = False

    @property
    def _leading(self) -> Sequence[int]:
        """The output's shape before the scatter, without the last dim."""
        return self.A.shape[:-1] if self.output_shape is None else self.output_shape[:-1]

    def refused(self) -> str:
        if self.bias is not None and self.reduce_op == "sum":
            return "there is a bias, which every rank adds before the reduction"
        if why := _scatter_refused(
            self.reduce_op, (*self._leading, 0), self.orig_scatter_dim, self.group_name
        ):
            return why
        if self.A_scale.dtype != torch.float32:
            return f"A_scale is {self.A_scale.dtype}"
        of_rows = (*self.A_scale.shape,) == (*self.A.shape[:-1], 1)
        if self.A_scale.numel() != 1 and not of_rows:
            return f"A_scale has the shape {(*self.A_scale.shape,)}"
        return _scaled_operands_refused(
            self.A, [self.B], [self.B_scale], [self.result_scale], _as_dtypes([self.out_dtype])
        )

    def ours(self) -> torch.Tensor:
        """By `gemm_reducescatter`; contiguous, as PyTorch's is."""
        leading, dim, A_scale = self._leading, self.orig_scatter_dim, self.A_scale
        front = self.A.reshape(*leading, self.A.shape[-1]).movedim(dim, 0)
        if A_scale.numel() != 1:
            A_scale = A_scale.reshape(*leading, 1).movedim(dim, 0)
        scales = _scales(front, A_scale, [self.B], [self.B_scale])
        output = gemm_reducescatter(
            front,
            self.B.t(),
            group=self.group_name,
            output_dtype=_as_dtypes([self.out_dtype])[0],
            use_fast_accum=self.use_fast_accum,
            **{**scales, "scale_weight": scales["scale_weight"][0]},
        )
        return output.movedim(0, dim).contiguous()


# An operator's class takes its arguments. `refused` says why this package's op does not take them, and is empty if it does.
# `ours` runs that op.
STAND_INS = {
    "fused_all_gather_matmul": _AllGatherMatmul,
    "fused_matmul_reduce_scatter": _MatmulReduceScatter,
    "fused_all_gather_scaled_matmul": _AllGatherScaledMatmul,
    "fused_scaled_matmul_reduce_scatter": _ScaledMatmulReduceScatter,
}


# --- common parts ---------------------------------------------------------------------------------------------


def _gather_dim_refused(A: torch.Tensor, dim: int) -> str:
    if A.dim() >= 2 and dim in (-1, A.dim() - 1):
        return "the features are gathered, not the rows"
    return ""


def _scatter_refused(reduce_op: str, shape: Sequence[int], dim: int, group: str) -> str:
    """`shape` is the output's before it is scattered; its last dim holds the features."""
    if reduce_op != "sum":
        return f"reduce_op is {reduce_op!r}, not 'sum'"
    if dim == len(shape) - 1:
        return "the features are scattered, not the rows"
    if not 0 <= dim < len(shape) - 1:
        return f"scatter_dim is {dim}"
    if shape[dim] % world_size(group) != 0:
        return "the scattered dim does not divide by the ranks"
    return ""


def _operands_refused(A: torch.Tensor, Bs: Sequence[torch.Tensor]) -> str:
    if A.dtype not in DTYPES:
        return f"the dtype is {A.dtype}"
    if A.dim() < 2 or any(B.dim() != 2 or B.shape[0] != A.shape[-1] for B in Bs):
        return "the shapes do not fit"
    if any(B.dtype != A.dtype or B.device != A.device for B in Bs):
        return "the operands' dtypes or devices differ"
    return ""


def _scaled_operands_refused(
    A: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    B_scales: Sequence[torch.Tensor],
    result_scales: Scales,
    out_dtypes: Sequence[torch.dtype | None],
) -> str:
    if A.dim() < 2 or any(B.dim() != 2 or B.shape[0] != A.shape[-1] for B in Bs):
        return "the shapes do not fit"
    for B, B_scale, result_scale, out_dtype in zip(
        Bs, B_scales, result_scales, out_dtypes, strict=True
    ):
        pair = (A.dtype, B.dtype)
        if not set(pair) <= set(_SCALED) or torch.float8_e4m3fn not in pair:
            return f"the dtypes are {A.dtype} and {B.dtype}"
        if B.device != A.device:
            return "the operands' devices differ"
        if B_scale.numel() != 1 and (*B_scale.shape,) != (1, B.shape[1]):
            return f"B_scale has the shape {(*B_scale.shape,)}"
        if B_scale.dtype != torch.float32:
            return f"B_scale is {B_scale.dtype}"
        if out_dtype not in _SCALED_OUTPUTS:
            return f"the result is {out_dtype or A.dtype}"
        if result_scale is not None:
            return "the result has a scale"
    return ""


def _scales(
    A: torch.Tensor,
    A_scale: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    B_scales: Sequence[torch.Tensor],
) -> dict[str, Any]:
    """Scales and recipes in the ops' form: TensorWise, or RowWise for both if either scales rows."""
    if all(scale.numel() == 1 for scale in (A_scale, *B_scales)):
        recipe = ScalingType.TensorWise
        of_weights = [scale.reshape(1) for scale in B_scales]
        of_input = A_scale.reshape(1)
    else:
        recipe = ScalingType.RowWise
        of_weights = [
            scale.reshape(-1).expand(B.shape[1]) for B, scale in zip(Bs, B_scales, strict=True)
        ]
        of_input = (A_scale.reshape(1) if A_scale.numel() == 1 else A_scale).expand(
            *A.shape[:-1], 1
        )
    return {
        "scale_input": of_input,
        "scale_weight": of_weights,
        "recipe_input": recipe,
        "recipe_weight": recipe,
    }


def _as_dtypes(given: Sequence[Any]) -> list[torch.dtype | None]:
    """Dtypes from numbers, because the dispatcher passes a list of dtypes as a list of numbers."""
    if all(dtype is None or isinstance(dtype, torch.dtype) for dtype in given):
        return list(given)
    return symmetric_memory()._maybe_convert_scalar_types_to_dtypes(list(given))


def symmetric_memory() -> Any:
    # Imported when asked for: it loads torch.distributed's functional collectives and more.
    return importlib.import_module("torch.distributed._symmetric_memory")
