"""Programs: plans with transfers that are written by hand, made by a template, or read from a file of MSCCL or MSCCL++."""

from __future__ import annotations

from overlap_torch._plan import Kernel, Problem, Program, Rectangle, Region, Transfer, Transport
from overlap_torch.plan._editor import Area, Editor
from overlap_torch.plan._imports.msccl import from_msccl
from overlap_torch.plan._imports.mscclpp import from_mscclpp
from overlap_torch.plan._program_templates import double_ring, one_shot, ring, two_shot

__all__ = [
    "Area",
    "Editor",
    "Program",
    "Rectangle",
    "Region",
    "Transfer",
    "double_ring",
    "edit",
    "from_msccl",
    "from_mscclpp",
    "one_shot",
    "ring",
    "two_shot",
]


def edit(
    problem: Problem,
    *,
    tile: tuple[int, int] | None = None,
    kernel: Kernel | str = Kernel.LIBRARY,
    transport: Transport | str | None = None,
    comm_sms: int | None = None,
    max_ctas: int = 0,
    ranks_per_host: int = 0,
) -> Editor:
    """Yields an editor, in which you write a plan's communication transfer by transfer; one program for all ranks::

        with edit(problem, tile=(128, 128)) as p:
            for share in p.chunks(4):
                for step in range(1, p.world):                  # a ring of gemm_reducescatter
                    part = p.part(p.rank - step, share)
                    p.push(part, to=p.rank + 1, reduce=True, needs=[p.tiles(part), p.arrived(part)])
        ring = p.plan()

    ``problem`` is for 2 to 8 ranks, or up to 16 on several hosts: ``ranks_per_host`` says how many ranks of each host map
    each other's memory, and over ``peer`` NCCL's messages go between hosts. ``tile``, ``kernel``, ``transport``, ``comm_sms`` and ``max_ctas`` are as in
    :func:`row_panels`; ``allgather_gemm`` and ``gemm_alltoall`` compute by ``library``. Over ``peer``, ``max_ctas`` is the
    number of CTAs that move data, for all streams (0: 16). ``comm_sms`` None leaves them this number of SMs beside a
    kernel. docs/plans.md tells more.

    Raises:
        ValueError: arguments with which the problem can have no plan. ``p.plan()`` finds faults of the transfers.
    """
    return Editor(
        problem,
        tile=tile,
        kernel=kernel,
        transport=transport,
        comm_sms=comm_sms,
        max_ctas=max_ctas,
        ranks_per_host=ranks_per_host,
    )
