"""Plans for kernels of the caller's: how many chunks, and how they travel."""

from __future__ import annotations

import torch

from overlap_torch._plan import Machine, Op, Plan, Problem, Resources, Transport
from overlap_torch._plan_json import enum_name

_MOST_CHUNKS = 16
_DEFAULT_CHUNKS = 4
_MARGIN = 0.97  # of the sequence's time: what overlap has to gain
# NCCL's CTAs beside a kernel: those that its all-reduce nearly needs for full speed, and those that fill a link.
_REDUCING_CTAS = 16
_MOVING_CTAS = 8


def expected_us(kernel_us: float, message_us: float, latency_us: float, chunks: int) -> float:
    """The time of a kernel whose equal chunks are communicated one after the other beside it."""
    end = 0.0
    for chunk in range(chunks):
        end = max(end, kernel_us * (chunk + 1) / chunks) + latency_us + message_us / chunks
    return end


def choose_chunks(problem: Problem, most: int, kernel_us: float, machine: Machine) -> int:
    """How many chunks take the least time; 1, which is the sequence, where that gains little."""
    columns = problem.k if problem.op == Op.ALLGATHER_GEMM else problem.n
    message = problem.m * columns * getattr(torch, enum_name(problem.dtype)).itemsize
    # The link was measured with all-reduces, which move everything twice.
    share = 1.0 if problem.op == Op.GEMM_ALLREDUCE else 0.5
    message_us = share * message / (1e3 * machine.link_gbps)
    times = {
        chunks: expected_us(kernel_us, message_us, machine.link_latency_us, chunks)
        for chunks in range(1, min(most, _MOST_CHUNKS) + 1)
    }
    best = min(times, key=times.__getitem__)
    return best if times[best] < _MARGIN * times[1] else 1


def make_plan(
    problem: Problem,
    tile: tuple[int, int],
    chunks: int | None,
    kernel_us: float | None,
    machine: Machine,
    comm_sms: int,
    on_cpu: bool,
) -> Plan:
    """Row panels of about equal height; of an all-to-all one chunk, as its rows differ by rank."""
    from overlap_torch import plan

    transport = Transport.GLOO if on_cpu else Transport.NCCL
    moves = problem.op in (Op.ALLGATHER_GEMM, Op.GEMM_ALLTOALL)
    ctas = 0 if on_cpu else _MOVING_CTAS if moves else _REDUCING_CTAS
    if comm_sms and not on_cpu:
        ctas = min(ctas, comm_sms)
    if problem.op == Op.GEMM_ALLTOALL:
        made = plan.make_all_to_all(
            problem, resources=Resources(comm_sms), max_ctas=ctas, transport=transport
        )
        made.tile_m, made.tile_n = tile
        plan.validate(made)
        return made
    rows = -(-(problem.m // problem.row_parts) // tile[0])
    if chunks is None:
        chunks = min(rows, _DEFAULT_CHUNKS)
        if kernel_us is not None:
            chunks = choose_chunks(problem, rows, kernel_us, machine)
    return plan.row_panels(
        problem,
        min(chunks, rows),
        tile=tile,
        comm_sms=comm_sms,
        max_ctas=ctas,
        transport=transport,
    )
