"""The ops' short path: functions of their schemas' parameters by position.

Each function returns None for a call that it cannot take, because of a mode, a subclass or an argument of another type.
Such a call goes through torch.ops, which costs three times the host's time. A function returns True for a call that only
has a gradient to record. Such a call applies the op's autograd Function, and its forward takes the short path. A compiler
must not
see these functions. :func:`call` chooses the right path. ``recorded`` does not belong to an op: see `gradients.recorded`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from overlap_torch._ops import dtensor
from overlap_torch._ops.group import Group, group_name

try:
    from overlap_torch._eager import (
        allgather_gemm,
        allgather_gemm_scaled,
        allgather_gemm_scaled_weights,
        allgather_gemm_weights,
        gemm_allreduce,
        gemm_allreduce_scaled,
        gemm_alltoall,
        gemm_alltoall_scaled,
        gemm_reducescatter,
        gemm_reducescatter_scaled,
        recorded,
    )
except ImportError:  # built for another Python

    def gemm_allreduce(*arguments: Any) -> None:
        """Stands in where `_eager` is not built: takes no call."""

    allgather_gemm = allgather_gemm_scaled = gemm_allreduce
    allgather_gemm_weights = allgather_gemm_scaled_weights = gemm_allreduce
    gemm_allreduce_scaled = gemm_alltoall = gemm_alltoall_scaled = gemm_allreduce
    gemm_reducescatter = gemm_reducescatter_scaled = gemm_allreduce

    def recorded(outputs: Any, keeps_gradients: bool) -> Any:
        """Stands in where `_eager` is not built: the outputs keep their Python node."""
        return outputs


__all__ = [
    "allgather_gemm",
    "allgather_gemm_scaled",
    "allgather_gemm_scaled_weights",
    "allgather_gemm_weights",
    "gemm_allreduce",
    "gemm_allreduce_scaled",
    "gemm_alltoall",
    "gemm_alltoall_scaled",
    "gemm_reducescatter",
    "gemm_reducescatter_scaled",
    "recorded",
]


# Called after each call that is not traced, with its op, group and arguments: see overlap_torch._tune.first_calls.
behind_calls: Callable[..., None] | None = None


def call(
    short: Callable[..., Any],
    op: torch._ops.OpOverload,
    group: Group,
    *arguments: Any,
    record: Callable[..., Any] | None = None,
    **keywords: Any,
) -> Any:
    """Calls ``op``, by its short path if that takes the arguments.

    ``record``: takes the group's name, arguments and keywords, and applies the op's autograd Function; None if the op has
    no gradient. ``keywords``: all keyword parameters of the schema, in its order, except the group.
    """
    name = group if type(group) is str else group_name(group)
    if is_dynamo_compiling():
        return op(*arguments, **keywords, group=name)
    results = short(*arguments, *keywords.values(), name)
    if results is True and record is not None:
        results = record(name, *arguments, **keywords)
    elif results is None or results is True:
        dtensor.make_ops_known()
        results = op(*arguments, **keywords, group=name)
    if behind_calls is not None:
        behind_calls(op, name, (*arguments, *keywords.values()))
    return results
