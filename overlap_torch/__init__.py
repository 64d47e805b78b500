"""Tensor-parallel GEMMs that communicate finished output tiles while they compute the next ones.

    output = overlap_torch.gemm_allreduce(input, weight, bias, group=group)

is ``all_reduce(input @ weight.T) + bias``; :func:`gemm_reducescatter`, :func:`allgather_gemm` and :func:`gemm_alltoall`
are similar. :func:`gemm_allreduce_rmsnorm` and :func:`allreduce_rmsnorm` add a residual and an RMSNorm. :func:`moe` is a
mixture of experts over ranks; :func:`context_parallel_attention` is attention of a sequence that is cut over ranks. The
same operators are ``torch.ops.overlap.gemm_allreduce`` and so on. :mod:`overlap_torch.nn` has layers, and
:mod:`overlap_torch.parallel` has styles for ``parallelize_module``. :mod:`overlap_torch.plan` shows and sets the plans of
the ops. :mod:`overlap_torch.inductor` puts the ops into models that ``torch.compile`` compiles. :func:`report` says what
overlapped in a step, :func:`trace` when it ran. :func:`tune` chooses plans by measuring. :func:`replace_symm_mem` replaces
PyTorch's own fused ops, :func:`replace_context_parallel` its ring attention. :func:`produce` and :func:`consume`
communicate the tiles of your own kernels. ``python -m overlap_torch doctor`` says what this machine has.
"""

import importlib
from types import ModuleType

from overlap_torch import _built, plan  # noqa: F401  (_built comes first: it says what is missing)
from overlap_torch._attention.cuts import Documents, cut_tokens, token_positions
from overlap_torch._attention.functions import context_parallel_attention
from overlap_torch._attention.kernels import AttentionKernel
from overlap_torch._attention.replace import replace_context_parallel
from overlap_torch._attention.work import AttentionWork
from overlap_torch._kernels.calls import consume, include_path, produce
from overlap_torch._kernels.job import Job
from overlap_torch._kernels.resources import resources
from overlap_torch._layers.rmsnorm import allreduce_rmsnorm, gemm_allreduce_rmsnorm
from overlap_torch._moe.activation import Gate
from overlap_torch._moe.functions import Route, moe, moe_combine, moe_dispatch
from overlap_torch._ops import (
    allgather_gemm,
    check,
    gemm_allreduce,
    gemm_alltoall,
    gemm_reducescatter,
)
from overlap_torch._symm_mem.replace import replace_symm_mem
from overlap_torch._tune import first_calls  # noqa: F401  (OVERLAP_TUNE=1)
from overlap_torch._tune.tune import tune
from overlap_torch._watch.report import report
from overlap_torch._watch.trace import trace
from overlap_torch.plan import Plan

__version__ = "0.1.0"

__all__ = [
    "AttentionKernel", "AttentionWork", "Documents", "Gate", "Job", "Plan", "Route", "__version__",
    "allgather_gemm", "allreduce_rmsnorm", "check", "consume", "context_parallel_attention",
    "cut_tokens", "gemm_allreduce", "gemm_allreduce_rmsnorm", "gemm_alltoall", "gemm_reducescatter",
    "include_path", "inductor", "moe", "moe_combine", "moe_dispatch", "nn", "parallel", "plan",
    "produce", "replace_context_parallel", "replace_symm_mem", "report", "resources",
    "token_positions", "trace", "triton", "tune",
]  # fmt: skip


def __getattr__(name: str) -> ModuleType:
    # Imported when asked for: torch.distributed.tensor, torch._inductor and Triton take a second to load.
    if name in ("inductor", "nn", "parallel", "triton"):
        return importlib.import_module(f"overlap_torch.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
