"""Calls over memory that the ranks map into each other."""

from __future__ import annotations

import torch
import torch.distributed as dist

from operands import Case
from ops import OPS
from overlap_torch.plan import Kernel, Plan, Transport
from plans import chunked_plan

PEER_OPS = ["gemm_allreduce", "gemm_reducescatter", "allgather_gemm", "allgather_gemm.weights"]


def peer_case(op: str, rows: int, n: int, k: int, dtype: torch.dtype, **rest: object) -> Case:
    """A call of which every rank's part is `rows` high."""
    parts = 1 if OPS[op].cuts_rows else dist.get_world_size()
    return Case((parts * rows,), n, k, dtype, **rest)


def peer_plan(case: Case, op: str, chunks: int, kernel: Kernel) -> Plan:
    return chunked_plan(case, dist.get_world_size(), "cuda", "peers", chunks, kernel, op=op)


def over_peers(plan: Plan) -> bool:
    return plan.chunks[0].transport == Transport.PEER


def skip_unless_it_runs(ranks, kernel: Kernel = Kernel.LIBRARY) -> None:
    ranks.skip_without_kernel(kernel)
    ranks.skip_without_peers()
