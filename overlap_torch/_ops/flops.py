"""The counts of torch.utils.flop_counter.FlopCounterMode for the ops: this rank's GEMM, as for ``torch.mm``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from overlap_torch._ops import library  # noqa: F401  (the library holds the ops)

_ops = torch.ops.overlap


@register_flop_formula(
    [_ops.gemm_allreduce, _ops.gemm_reducescatter, _ops.gemm_alltoall, _ops.allreduce_rmsnorm]
)
def _produced(
    input_shape: torch.Size, weight_shape: torch.Size | None, *args: Any, **kwargs: Any
) -> int:
    return 0 if weight_shape is None else 2 * math.prod(input_shape) * weight_shape[0]


@register_flop_formula(_ops.allgather_gemm)
def _gathered(*args: Any, out_shape: Sequence[Any], **kwargs: Any) -> int:
    outputs, gathered_shape, *_ = out_shape  # of scaled operands, the scales too
    if isinstance(outputs, torch.Size):  # of one weight
        outputs = [outputs]
    return sum(2 * math.prod(shape) * gathered_shape[-1] for shape in outputs)
