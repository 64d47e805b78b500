"""The ops' short way in: as functions of their schema's parameters by position.

Each returns None for a call that is not for it, because of a gradient, a mode, a subclass or an argument of another
type: that one goes through torch.ops, which costs three times the host's time. A compiler must not meet them.
"""

from __future__ import annotations

from typing import Any

try:
    from overlap_torch._eager import (
        allgather_gemm,
        allgather_gemm_weights,
        gemm_allreduce,
        gemm_alltoall,
        gemm_reducescatter,
    )
except ImportError:  # built for another Python

    def gemm_allreduce(*arguments: Any) -> None:
        """No call is for it."""

    allgather_gemm = allgather_gemm_weights = gemm_alltoall = gemm_reducescatter = gemm_allreduce

__all__ = [
    "allgather_gemm",
    "allgather_gemm_weights",
    "gemm_allreduce",
    "gemm_alltoall",
    "gemm_reducescatter",
]
