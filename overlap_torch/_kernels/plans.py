"""Plans for kernels of the caller's: how many chunks, and how they travel."""

from __future__ import annotations

from overlap_torch._plan import (
    Machine,
    Op,
    Plan,
    Problem,
    Resources,
    Transport,
    make_kernel_plan,
    validate,
)
from overlap_torch.plan.templates import make_all_to_all, row_panels

_DEFAULT_CHUNKS = 4
# NCCL's CTAs beside a kernel of unknown time: the number with which its all-reduce is nearly at full speed, and the number
# that fills a link.
_REDUCING_CTAS = 16
_MOVING_CTAS = 8


def make_plan(
    problem: Problem,
    tile: tuple[int, int],
    chunks: int | None,
    kernel_us: float | None,
    machine: Machine | None,
    comm_sms: int,
    on_cpu: bool,
) -> Plan:
    """Row panels. If the kernel's time is known, the planner chooses their number and transport. Else they have about equal
    heights. An all-to-all has one chunk, because its rows differ by rank.
    """
    to_all = problem.op == Op.GEMM_ALLTOALL
    if kernel_us is not None and machine is not None and not to_all:
        return make_kernel_plan(problem, machine, tile, kernel_us, comm_sms, chunks or 0)
    transport = Transport.GLOO if on_cpu else Transport.NCCL
    ctas = _MOVING_CTAS if problem.op in (Op.ALLGATHER_GEMM, Op.GEMM_ALLTOALL) else _REDUCING_CTAS
    ctas = 0 if on_cpu else min(ctas, comm_sms) if comm_sms else ctas
    if to_all:
        made = make_all_to_all(
            problem, resources=Resources(comm_sms), max_ctas=ctas, transport=transport
        )
        made.tile_m, made.tile_n = tile
        validate(made)
        return made
    rows = -(-(problem.m // problem.row_parts) // tile[0])
    return row_panels(
        problem,
        min(chunks or _DEFAULT_CHUNKS, rows),
        tile=tile,
        comm_sms=comm_sms,
        max_ctas=ctas,
        transport=transport,
    )
