"""PyTorch's fused GEMMs, ``torch.ops.symm_mem.fused_*``, by the ops of this package: each operator's arguments and what runs."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import ScalingType

from overlap_torch._ops import allgather_gemm, gemm_reducescatter
from overlap_torch._ops.fakes import DTYPES
from overlap_torch._ops.group import group_rank, world_size
from overlap_torch._ops.scaled import OPERANDS, OUTPUTS

Scales = Sequence[torch.Tensor | None]


@functools.cache
def _arguments(name: str) -> tuple[list[str], dict[str, Any]]:
    """The names of an operator's arguments, and the defaults of those that have one."""
    arguments = getattr(torch.ops.symm_mem, name).default._schema.arguments
    defaults = {one.name: one.default_value for one in arguments if one.has_default_value()}
    return [one.name for one in arguments], defaults


class _StandIn:
    """One call of an operator, whose arguments are attributes under their names in its schema; some have scales.

    `refused` says why this package's op does not take them, and is empty if it does. `ours` runs that op.
    """

    def __init__(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        names, defaults = _arguments(name)
        self.__dict__.update(defaults)
        self.__dict__.update(zip(names, args, strict=False))
        self.__dict__.update(kwargs)
        self.is_scaled = hasattr(self, "A_scale")

    def _scale_refused(self) -> str:
        if self.A_scale.dtype != torch.float32:
            return f"A_scale is {self.A_scale.dtype}"
        if self._scale_of_own_rows() is None:
            return f"A_scale has the shape {(*self.A_scale.shape,)}"
        return ""

    def _scale_of_own_rows(self) -> torch.Tensor | None:
        """The scale of this rank's rows of A, a number or one for each row; None for another shape."""
        of_rows = (*self.A_scale.shape,) == (*self.A.shape[:-1], 1)
        return self.A_scale if self.A_scale.numel() == 1 or of_rows else None


class _Gather(_StandIn):
    """``fused_all_gather_matmul``, ``fused_all_gather_scaled_matmul``."""

    def refused(self) -> str:
        A, Bs, dim = self.A, self.Bs, self.gather_dim
        if not Bs:
            return "no B is given"
        if self.is_scaled and any(len(values) != len(Bs) for values in self._lists()):
            return "there is not one value for each B"
        if not -A.dim() <= dim < A.dim():
            return f"gather_dim is {dim}, and A has {A.dim()} dims"
        if A.dim() >= 2 and dim in (-1, A.dim() - 1):
            return "the features are gathered, not the rows"
        if not self.is_scaled:
            return _operands_refused(A, Bs)
        dtypes = _as_dtypes(self.out_dtypes)
        if why := _scaled_operands_refused(A, Bs, self.B_scales, self.result_scales, dtypes):
            return why
        if len(set(dtypes)) > 1 or len(set(self.use_fast_accum)) > 1:
            return "the results' dtypes or accumulation differ"
        if any(bias is not None and bias.dtype != dtypes[0] for bias in self.biases):
            return "a bias is of another dtype than the result"
        return self._scale_refused()

    def ours(self) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """Runs `allgather_gemm` with the gathered dim first, which is also the memory order of PyTorch's results.

        A single scale of A is the same on every rank, as in PyTorch's kernel.
        """
        dim = self.gather_dim % self.A.dim()
        front, biases, how = self.A.movedim(dim, 0), None, {}
        if self.is_scaled:
            own = self._scale_of_own_rows()
            own = own if own.numel() == 1 else own.movedim(dim, 0)
            biases, how = list(self.biases), _scales(front, own, self.Bs, self.B_scales)
            how["shared_scale_input"] = how["recipe_input"] is ScalingType.TensorWise
            how["output_dtype"] = _as_dtypes(self.out_dtypes)[0]
            how["use_fast_accum"] = self.use_fast_accum[0]
        weights = [B.t() for B in self.Bs]
        outputs, gathered, *_ = allgather_gemm(front, weights, biases, group=self.group_name, **how)
        outputs = [output.movedim(0, dim) for output in outputs]
        returns = self.is_scaled or self.return_A
        return gathered.movedim(0, dim) if returns else None, outputs

    def _lists(self) -> tuple[Sequence[Any], ...]:
        others = (self.out_dtypes, self.use_fast_accum)
        return (self.B_scales, self.biases, self.result_scales, *others)

    def _scale_of_own_rows(self) -> torch.Tensor | None:
        """From that scale, or from all ranks' scales."""
        A_scale, dim = self.A_scale, self.gather_dim % self.A.dim()
        world, own = world_size(self.group_name), (*self.A.shape[:-1], 1)
        if A_scale.numel() != 1 and (*A_scale.shape,) == (
            *own[:dim],
            own[dim] * world,
            *own[dim + 1 :],
        ):
            A_scale = A_scale.chunk(world, dim)[group_rank(self.group_name)]
        return A_scale if A_scale.numel() == 1 or (*A_scale.shape,) == own else None


class _Scatter(_StandIn):
    """``fused_matmul_reduce_scatter``, ``fused_scaled_matmul_reduce_scatter``."""

    @property
    def _dim(self) -> int:
        return self.orig_scatter_dim if self.is_scaled else self.scatter_dim

    @property
    def _leading(self) -> Sequence[int]:
        """The output's shape before the scatter, without the last dim."""
        shape = getattr(self, "output_shape", None)
        return self.A.shape[:-1] if shape is None else shape[:-1]

    def refused(self) -> str:
        if self.is_scaled and self.bias is not None and self.reduce_op == "sum":
            return "there is a bias, which every rank adds before the reduction"
        if why := self._scatter_refused():
            return why
        if not self.is_scaled:
            return _operands_refused(self.A, [self.B])
        return self._scale_refused() or _scaled_operands_refused(
            self.A, [self.B], [self.B_scale], [self.result_scale], _as_dtypes([self.out_dtype])
        )

    def _scatter_refused(self) -> str:
        dim, dims = self._dim, len(self._leading)
        if self.reduce_op != "sum":
            return f"reduce_op is {self.reduce_op!r}, not 'sum'"
        if dim == dims:
            return "the features are scattered, not the rows"
        if not 0 <= dim < dims:
            return f"scatter_dim is {dim}"
        if self._leading[dim] % world_size(self.group_name) != 0:
            return "the scattered dim does not divide by the ranks"
        return ""

    def ours(self) -> torch.Tensor:
        """By `gemm_reducescatter`; contiguous, as PyTorch's is."""
        dim, front, how = self._dim, self.A, {}
        if self.is_scaled:
            front = front.reshape(*self._leading, front.shape[-1])
        front = front.movedim(dim, 0)
        if self.is_scaled:
            own = self.A_scale
            own = own if own.numel() == 1 else own.reshape(*self._leading, 1).movedim(dim, 0)
            how = _scales(front, own, [self.B], [self.B_scale])
            (how["scale_weight"],) = how["scale_weight"]
            how["output_dtype"] = _as_dtypes([self.out_dtype])[0]
            how["use_fast_accum"] = self.use_fast_accum
        output = gemm_reducescatter(front, self.B.t(), group=self.group_name, **how)
        return output.movedim(0, dim).contiguous()


STAND_INS = {
    "fused_all_gather_matmul": _Gather,
    "fused_matmul_reduce_scatter": _Scatter,
    "fused_all_gather_scaled_matmul": _Gather,
    "fused_scaled_matmul_reduce_scatter": _Scatter,
}


# --- common parts ---------------------------------------------------------------------------------------------


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
        if not set(pair) <= set(OPERANDS) or torch.float8_e4m3fn not in pair:
            return f"the dtypes are {A.dtype} and {B.dtype}"
        if B.device != A.device:
            return "the operands' devices differ"
        if B_scale.numel() != 1 and (*B_scale.shape,) != (1, B.shape[1]):
            return f"B_scale has the shape {(*B_scale.shape,)}"
        if B_scale.dtype != torch.float32:
            return f"B_scale is {B_scale.dtype}"
        if out_dtype not in OUTPUTS:
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
