"""The ops in Python: each module has its op's wrapper, and registers its fake kernel and gradients."""

from overlap_torch._ops import (  # noqa: F401  (registers what the ops count, and refuse)
    dtensor,
    flops,
    nested,
)
from overlap_torch._ops.allgather import allgather_gemm
from overlap_torch._ops.allreduce import gemm_allreduce
from overlap_torch._ops.alltoall import gemm_alltoall
from overlap_torch._ops.group import Group, group_name
from overlap_torch._ops.library import check
from overlap_torch._ops.reducescatter import gemm_reducescatter

dtensor.make_ops_known()

__all__ = [
    "Group", "allgather_gemm", "check", "gemm_allreduce", "gemm_alltoall", "gemm_reducescatter",
    "group_name",
]  # fmt: skip
