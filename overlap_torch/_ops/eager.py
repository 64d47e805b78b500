"""The ops' short way in: as functions of their schema's parameters by position.

Each returns None for a call that is not for it, because of a gradient, a mode, a subclass or an argument of another
type: that one goes through torch.ops, which costs three times the host's time. A compiler must not meet them. :func:`call`
takes one or the other way.
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
    )
except ImportError:  # built for another Python

    def gemm_allreduce(*arguments: Any) -> None:
        """No call is for it."""

    allgather_gemm = allgather_gemm_scaled = gemm_allreduce
    allgather_gemm_weights = allgather_gemm_scaled_weights = gemm_allreduce
    gemm_allreduce_scaled = gemm_alltoall = gemm_alltoall_scaled = gemm_allreduce
    gemm_reducescatter = gemm_reducescatter_scaled = gemm_allreduce

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
]


# What comes behind each call that is not traced, with its op, group and arguments: see overlap_torch._tune.
behind_calls: Callable[..., None] | None = None


def call(
    short: Callable[..., Any],
    op: torch._ops.OpOverload,
    group: Group,
    *arguments: Any,
    **keywords: Any,
) -> Any:
    """``op`` of the arguments, by its short way in if that takes them.

    ``keywords``: the parameters of the schema that are keywords, but for the group, all of them and in its order.
    """
    name = group if type(group) is str else group_name(group)
    if is_dynamo_compiling():
        return op(*arguments, **keywords, group=name)
    results = short(*arguments, *keywords.values(), name)
    if results is None:
        dtensor.make_ops_known()
        results = op(*arguments, **keywords, group=name)
    if behind_calls is not None:
        behind_calls(op, name, (*arguments, *keywords.values()))
    return results
