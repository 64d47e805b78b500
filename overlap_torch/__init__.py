"""Tensor-parallel GEMMs that communicate finished output tiles while they go on computing.

    output = overlap_torch.gemm_allreduce(input, weight, bias, group=group)

is ``all_reduce(input @ weight.T) + bias``. The same operator is ``torch.ops.overlap.gemm_allreduce``; a layer built on
it is :class:`overlap_torch.nn.RowParallelLinear`; :mod:`overlap_torch.plan` shows and sets the plans it runs by.
``python -m overlap_torch doctor`` says what was found on this machine.
"""

from overlap_torch import nn, plan
from overlap_torch._ops import check, gemm_allreduce
from overlap_torch.plan import Plan

__version__ = "0.1.0"

__all__ = ["Plan", "__version__", "check", "gemm_allreduce", "nn", "plan"]
