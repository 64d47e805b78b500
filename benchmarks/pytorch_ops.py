"""PyTorch's own fused ops on symmetric memory, as further variants beside the sequence."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory  # registers the operators too

from .shapes import Shape

# There is none for an all-to-all after a GEMM, nor for a block.
OPS = ("gemm_allreduce", "gemm_reducescatter", "allgather_gemm")
_Computation = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]


def prepare_environment() -> None:
    """Sets the variables that the ops read at their first use; before the ranks start. A variable
    that is set already stays."""
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")


def baselines(
    op: str, shape: Shape, dtype: torch.dtype, device: torch.device, group: str
) -> dict[str, _Computation]:
    """PyTorch's functions for this op, by the operator's name; each takes input and weight and returns the op's result.

    Each is called once here, so that its workspace exists; one that refuses the problem is left out, and rank 0 says
    why. None off CUDA. Collective.
    """
    if device.type != "cuda" or op not in OPS:
        return {}
    input_rows = shape.m // dist.get_world_size() if op == "allgather_gemm" else shape.m
    input = torch.zeros(input_rows, shape.k, dtype=dtype, device=device)
    weight = torch.zeros(shape.n, shape.k, dtype=dtype, device=device)
    chosen: dict[str, _Computation] = {}
    for name, computation in _computations(op, shape, dtype, device, group).items():
        try:
            computation(input, weight)
            torch.cuda.synchronize()
        except (RuntimeError, ValueError) as error:
            # Shape and dtype decide, so all ranks leave it out.
            if dist.get_rank() == 0:
                reason = str(error).splitlines()[0]
                print(f"{op} {shape}: symm_mem.{name} left out: {reason}", file=sys.stderr)
        else:
            chosen[name] = computation
    return chosen


def _computations(
    op: str, shape: Shape, dtype: torch.dtype, device: torch.device, group: str
) -> dict[str, _Computation]:
    ops = torch.ops.symm_mem
    if op == "gemm_reducescatter":
        fused = ops.fused_matmul_reduce_scatter
        return {
            "fused_matmul_reduce_scatter": lambda input, weight: (
                fused(input, weight.t(), "sum", 0, group),
            )
        }
    if op == "allgather_gemm":

        def gather(input: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
            gathered, outputs = ops.fused_all_gather_matmul(input, [weight.t()], 0, group)
            return outputs[0], gathered

        return {"fused_all_gather_matmul": gather}
    # A GEMM into symmetric memory, then the sum: in place, by a part on each rank, or all of it on every rank.
    buffer = symmetric_memory.empty(shape.m, shape.n, dtype=dtype, device=device)
    symmetric_memory.rendezvous(buffer, group)

    def summed(by: Callable[..., torch.Tensor]) -> _Computation:
        def run(input: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
            torch.mm(input, weight.t(), out=buffer)
            return (by(buffer, "sum", group),)

        return run

    names = ("two_shot_all_reduce_", "one_shot_all_reduce")
    return {name: summed(getattr(ops, name)) for name in names}
