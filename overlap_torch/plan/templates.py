"""Templates of plans: the sequence, chunks of rows or of tiles, and one step over peers."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from overlap_torch import _plan
from overlap_torch._kernels import occupancy
from overlap_torch._plan import (
    BAND_ROWS,
    Collective,
    Kernel,
    Plan,
    Problem,
    Resources,
    Schedule,
    Transport,
    make_plan,
    make_sequential,
    validate,
)
from overlap_torch.plan._names import enum_member, enum_name

__all__ = [
    "at_once", "hierarchical", "make_all_to_all", "make_plan", "make_sequential", "packed",
    "row_panels", "smem_pad_bytes",
]  # fmt: skip


def row_panels(
    problem: Problem,
    chunks: int | Sequence[int],
    *,
    kernel: Kernel | str = Kernel.LIBRARY,
    band_rows: int | None = None,
    max_ctas: int = 0,
    transport: Transport | str | None = None,
    tile: tuple[int, int] | None = None,
    collective: Collective | str | None = None,
    ranks_per_host: int = 0,
    **resources: int,
) -> Plan:
    """An overlapped plan with chunks that are row panels of the plain output, so nothing is reordered.

    Args:
        problem: ``plan_for(...).problem``, or ``Problem(m, n, k, torch.bfloat16, world_size)``.
        chunks: a number of chunks of about equal height, or the chunks' heights in tile rows, top to bottom. Heights are
            multiples of the kernel's cluster (2 for the sm90 kernels) and sum up to the tile grid's height, which is
            rounded up to a multiple of the cluster. If the rows are divided among the ranks (``gemm_reducescatter``,
            ``allgather_gemm``), the heights are those of one part, and ``parts * height`` is the multiple.
        kernel: the GEMM; ``library`` takes every dtype, the others bfloat16 and float16.
        band_rows: tile rows of a band, at most; None: ``BAND_ROWS``, 16, or the lowest chunk's height.
        max_ctas: CTA limit of a communicator, which each lane has; 0: NCCL's own choice.
        transport: ``nccl`` or ``peer`` for CUDA tensors, ``gloo`` for those on CPU. None: ``gloo`` if torch finds no CUDA
            device, the kernel is ``library``, max_ctas is 0 and no resource but ``lanes`` is set, because only GPUs have the
            others; else ``nccl``. Name it for a plan for another machine, or for CPU tensors beside a GPU. Over ``peer``
            chunks are cut from one rank's part of the rows, for every op.
        tile: (tile_m, tile_n) in elements; only ``library`` takes other tiles than its own.
        collective: None: the op's own; over ``peer``, reductions take ``ring``, which has one chunk. ``stripes`` is for
            reductions over ``peer`` by ``library``, in any number of chunks: a launch for each rank's rows of a chunk
            stores them into that rank's memory, and the rank adds them up beside the next chunk. Over ``gloo`` messages do
            the same. ``hierarchical`` is :func:`hierarchical`'s.
        ranks_per_host: of the collective ``hierarchical``.
        resources: fields of :class:`~overlap_torch.plan.types.Resources` by name, such as ``comm_sms=16, lanes=2``; lanes are
            1 to 4, and :func:`smem_pad_bytes` says how much a block takes.

    Raises:
        TypeError: a keyword that is neither an argument nor a field; the message says what is allowed.
        ValueError: a plan that could not run; the message says what is allowed.
    """
    kernel = enum_member(Kernel, kernel)
    collective = None if collective is None else enum_member(Collective, collective)
    room = _resources(row_panels, resources)
    transport = _transport(transport, kernel, room, max_ctas)
    shape = _shape(kernel, transport, tile)
    levels = collective == Collective.HIERARCHICAL
    owned = (transport.traits.maps_memory and not levels) or collective == Collective.STRIPES
    parts = problem.world_size if owned else problem.row_parts
    whole_clusters = problem.traits.gathers or owned
    grain = shape.cluster_m // (1 if whole_clusters else math.gcd(shape.cluster_m, parts))
    rows = _tiles(-(-problem.m // parts), shape.tile_m, grain)
    heights = _sizes(chunks, rows, grain, "tile rows")
    if band_rows is None:
        band_rows = max(shape.cluster_m, min([BAND_ROWS, *(parts * height for height in heights)]))
        band_rows -= band_rows % shape.cluster_m
    return _plan.make_row_panels(
        problem,
        kernel,
        heights,
        band_rows,
        room,
        max_ctas,
        transport,
        shape,
        collective,
        ranks_per_host,
    )


def hierarchical(
    problem: Problem, ranks_per_host: int, chunks: int | Sequence[int] = 1, **how: Any
) -> Plan:
    """A plan for ranks on several hosts, in which each row crosses between hosts once.

    A reduction's chunk is added up within each host first: each rank of a host adds up its share. Then ranks with the same
    place on their hosts add up these sums, and an all-reduce brings the results to all ranks of the host. An all-gather goes
    the other way round. Sums are in the ranks' order, in float32, and rounded once on each host and once between hosts.

    Args:
        problem: of ``gemm_allreduce``, ``gemm_reducescatter`` or ``allgather_gemm``. Ranks are numbered host by host.
        ranks_per_host: a divisor of the number of ranks, less than that number; over ``peer`` 2 to 8.
        chunks: as in :func:`row_panels`.
        how: the other arguments of :func:`row_panels`. With the transport ``peer`` copy engines move rows within a host, and
            NCCL's messages, of ``max_ctas`` CTAs, between hosts. With ``nccl`` and ``gloo`` messages do both. ``lanes`` is the
            number of chunks between hosts at a time, 1 or 2.

    Raises:
        ValueError: a plan that could not run; the message says what is allowed.
    """
    if problem.traits.rows_by_rank:
        raise ValueError(
            "hierarchical does not take gemm_alltoall, whose rows go straight to their rank: take "
            f"programs.one_shot(problem, transport=..., ranks_per_host={ranks_per_host})"
        )
    return row_panels(
        problem, chunks, collective=Collective.HIERARCHICAL, ranks_per_host=ranks_per_host, **how
    )


def packed(
    problem: Problem,
    chunks: int | Sequence[int],
    *,
    kernel: Kernel | str = Kernel.LIBRARY,
    band_rows: int | None = None,
    max_ctas: int = 0,
    transport: Transport | str | None = None,
    tile: tuple[int, int] | None = None,
    collective: Collective | str = Collective.ALL_REDUCE,
    **resources: int,
) -> Plan:
    """An overlapped plan that stores tiles in tile order and reorders them chunk by chunk.

    Chunks may end after any tile, so they can follow the GEMM's waves. ``chunks`` is a number of chunks of about equal size,
    or the chunks' sizes in tiles, which sum up to the number of tiles. ``band_rows`` None: ``BAND_ROWS``, or the tile grid's
    height if that is less. ``collective`` is ``all_reduce`` or, between two ranks, ``exchange``: one all-gather, then a sum
    when the chunk is put in place; only NCCL has it. All else is as in :func:`row_panels`.
    """
    kernel, collective = enum_member(Kernel, kernel), enum_member(Collective, collective)
    room = _resources(packed, resources)
    if transport is None and collective == Collective.EXCHANGE:
        transport = Transport.NCCL
    transport = _transport(transport, kernel, room, max_ctas)
    shape = _shape(kernel, transport, tile)
    rows = _tiles(problem.m, shape.tile_m, shape.cluster_m)
    tiles = rows * _tiles(problem.n, shape.tile_n)
    sizes = _sizes(chunks, tiles, 1, "tiles")
    if band_rows is None:
        band_rows = max(shape.cluster_m, min(BAND_ROWS, rows))
    plan = _plan.make_packed(problem, kernel, sizes, band_rows, room, max_ctas, transport, shape)
    plan.collective = collective
    validate(plan)
    return plan


def smem_pad_bytes(
    kernel: Kernel | str | int, ctas_per_sm: int, *, sm_bytes: int | None = None
) -> int:
    """Shared memory to add to each block of a kernel, in bytes, so that an SM has room for ``ctas_per_sm`` blocks and no
    more.

    Args:
        kernel: ``sm80``; without padding an SM holds two of its blocks, if they have room and no SMs are left free
            (``comm_sms``). Or the bytes of a block of your kernel without padding, static and dynamic together. The sm90
            kernels fill an SM with one block in any case.
        ctas_per_sm: 1 to 32.
        sm_bytes: shared memory of an SM; None: the current CUDA device's.

    Raises:
        ValueError: ``ctas_per_sm`` blocks have no room even without padding, or no padding leaves room for exactly that
            number.
    """
    if not isinstance(kernel, int):
        kernel = enum_member(Kernel, kernel)
        if not kernel.traits.block_bytes:
            padded = [enum_name(k) for k in Kernel.__members__.values() if k.traits.block_bytes]
            raise ValueError(
                f"kernel is {enum_name(kernel)}, allowed is {', '.join(padded)}, or a number of bytes: the framework's GEMM takes no "
                "padding, and a block of other kernels fills an SM"
            )
        kernel = kernel.traits.block_bytes
    if sm_bytes is None:
        sm_bytes = torch.cuda.get_device_properties("cuda").shared_memory_per_multiprocessor
    return occupancy.smem_pad_bytes(kernel, ctas_per_sm, sm_bytes)


def at_once(
    problem: Problem,
    *,
    kernel: Kernel | str = Kernel.LIBRARY,
    schedule: Schedule | str | None = None,
) -> Plan:
    """A plan in one step over peers, for few rows: lowest latency, nothing is cut into chunks.

    Every rank's partial sums (``gemm_allreduce``, ``gemm_reducescatter``) go straight to the ranks that add them up, the
    collective ``direct``: the ping-pong kernels' GEMM stores them there; ``library`` leaves them to the kernel that adds, after
    the framework's GEMM. ``allgather_gemm`` with ``library``: one kernel gathers, then the framework computes; with others
    it is the plan over peers in one chunk. Rows of the output, or of an all-gather's input, must
    be multiples of 16 bytes. ``gemm_alltoall`` has no such plan: ``make_all_to_all`` makes its plans.
    ``schedule="sequential"`` makes the kernel that adds send, too, after a GEMM by ``kernel``.

    Raises:
        ValueError: a plan that could not run; the message says what is allowed.
    """
    order = None if schedule is None else enum_member(Schedule, schedule)
    return _plan.make_at_once(problem, enum_member(Kernel, kernel), order)


def make_all_to_all(
    problem: Problem,
    kernel: Kernel | str = Kernel.LIBRARY,
    resources: Resources | None = None,
    max_ctas: int = 0,
    transport: Transport | str | None = None,
) -> Plan:
    """An overlapped plan of ``gemm_alltoall``: rows are sent while the GEMM computes others.

    ``problem.m`` is 0, because rows differ by rank; ``resources`` None means the defaults. ``kernel``, ``max_ctas`` and
    ``transport`` are as in :func:`row_panels`. Over peers ``Resources(one_launch=True)`` asks for one launch that computes
    the peers' rows first, stores and announces them, and copies arriving rows. A rank with few rows uses the framework's
    GEMM in any case.

    Raises:
        ValueError: a plan that could not run; the message says what is allowed.
    """
    kernel, resources = enum_member(Kernel, kernel), resources or Resources()
    transport = _transport(transport, kernel, resources, max_ctas)
    return _plan.make_all_to_all(problem, kernel, resources, max_ctas, transport)


def _resources(template: Callable[..., Plan], given: dict[str, int]) -> Resources:
    """The resources with these fields, which a template was given beside its own arguments."""
    fields: dict[str, type] = Resources.__fields__
    for name in given:
        if name not in fields:
            allowed = ", ".join([*(template.__kwdefaults__ or {}), *fields])
            raise TypeError(
                f"{template.__name__}() got an unexpected keyword argument {name!r}, allowed are {allowed}"
            )
    return Resources(**given)


def _transport(
    transport: Transport | str | None, kernel: Kernel, resources: Resources, max_ctas: int
) -> Transport:
    """The given transport, else the most likely transport for the plan's device."""
    if transport is not None:
        return enum_member(Transport, transport)
    plain = kernel == Kernel.LIBRARY and max_ctas == 0
    plain &= resources == Resources(lanes=resources.lanes)
    return Transport.GLOO if plain and not torch.cuda.is_available() else Transport.NCCL


def _shape(kernel: Kernel, transport: Transport, tile: tuple[int, int] | None) -> _plan.KernelShape:
    if tile is None:
        return _plan.kernel_shape(kernel, transport.traits.on_cpu)
    if min(tile) < 1:
        raise ValueError(f"tile is {tile}, allowed are two numbers of 1 or more")
    own = _plan.kernel_shape(kernel, False)
    return _plan.KernelShape(tile[0], tile[1], own.cluster_m)


def _tiles(size: int, tile: int, cluster: int = 1) -> int:
    return -(-size // (tile * cluster)) * cluster


def _sizes(chunks: int | Sequence[int], total: int, grain: int, unit: str) -> list[int]:
    """The chunks' sizes. A number of chunks divides ``total`` into multiples of ``grain`` that differ by at most one grain."""
    if isinstance(chunks, Iterable):
        return list(chunks)
    parts = operator.index(chunks)
    grains = total // grain
    if not 1 <= parts <= grains:
        raise ValueError(
            f"{parts} chunks of {total} {unit}, allowed are 1 to {grains}, as a chunk has {grain} or more: "
            "take fewer chunks, or smaller tiles where the kernel is 'library'"
        )
    each, larger = divmod(grains, parts)
    return [grain * (each + (i < larger)) for i in range(parts)]
