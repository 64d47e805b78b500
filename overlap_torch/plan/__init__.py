"""Plans: how an op runs, as data.

A plan says which kernel computes the tiles and in which order, how they are cut into chunks, how
each chunk is communicated, where tiles are stored meanwhile, and what the GEMM leaves to
communication. The planner makes one for each problem; this module shows it, and sets others::

    plan = plan_for(4096, 8192, 7168, torch.bfloat16)           # what the op would do now
    panels = row_panels(plan.problem, 4, kernel=Kernel.SM90_PINGPONG, comm_sms=16, max_ctas=16)
    with use_plan(panels):                                      # on every rank
        overlap_torch.gemm_allreduce(input, weight)

All ranks of a group must set the same plans at the same point between their calls of the ops.

``print(plan.explain())`` shows a plan's steps, what they hold and are expected to take, and why it was taken;
``plan.plot("plan.png")`` draws it. ``python -m overlap_torch explain`` does both.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from overlap_torch import _plan
from overlap_torch._kernels import occupancy
from overlap_torch._plan import (
    BAND_ROWS,
    MAX_BAND_RUNS,
    MAX_CHUNKS,
    BandRun,
    Chunk,
    Collective,
    DType,
    Engine,
    Kernel,
    Layout,
    Machine,
    Memory,
    Op,
    Plan,
    Prediction,
    Problem,
    Profile,
    Program,
    Recipe,
    Rectangle,
    Region,
    Resources,
    Schedule,
    Transfer,
    Transport,
    Way,
    candidates,
    decode,
    encode,
    make_plan,
    make_sequential,
    predict,
    validate,
)
from overlap_torch.plan._editor import Area, Editor, check_memory
from overlap_torch.plan._explain import Explanation, explain
from overlap_torch.plan._imports.msccl import from_msccl
from overlap_torch.plan._imports.mscclpp import from_mscclpp
from overlap_torch.plan._json import (
    enum_member,
    enum_name,
    from_dict,
    from_json,
    load,
    save,
    schema,
    to_dict,
    to_json,
)
from overlap_torch.plan._picture import plot
from overlap_torch.plan._program_templates import (
    double_ring,
    hierarchical,
    one_shot,
    ring,
    two_shot,
)

if TYPE_CHECKING:
    import torch

    from overlap_torch._ops import Group

    Device = str | torch.device | None

__all__ = [
    "BAND_ROWS",
    "MAX_BAND_RUNS",
    "MAX_CHUNKS",
    "BandRun",
    "Chunk",
    "Collective",
    "DType",
    "Area",
    "Editor",
    "Engine",
    "Explanation",
    "Kernel",
    "Layout",
    "Machine",
    "Memory",
    "Op",
    "Plan",
    "Prediction",
    "Problem",
    "Profile",
    "Program",
    "Rectangle",
    "Region",
    "Recipe",
    "Resources",
    "Schedule",
    "Transfer",
    "Transport",
    "Way",
    "at_once",
    "candidates",
    "clear_plans",
    "decode",
    "double_ring",
    "edit",
    "encode",
    "from_dict",
    "from_json",
    "from_msccl",
    "from_mscclpp",
    "hierarchical",
    "load",
    "machine",
    "make_all_to_all",
    "make_plan",
    "make_sequential",
    "one_shot",
    "packed",
    "plan_for",
    "predict",
    "ring",
    "row_panels",
    "save",
    "schema",
    "set_plan",
    "smem_pad_bytes",
    "to_dict",
    "to_json",
    "two_shot",
    "use_plan",
    "validate",
]

Plan.explain = explain  # type: ignore[method-assign]
Plan.plot = plot  # type: ignore[method-assign]

# --- templates ----------------------------------------------------------------------------------------------


def row_panels(
    problem: Problem,
    chunks: int | Sequence[int],
    *,
    kernel: Kernel | str = Kernel.LIBRARY,
    band_rows: int | None = None,
    comm_sms: int = 0,
    max_ctas: int = 0,
    window: bool = False,
    smem_pad_bytes: int = 0,
    finish_ctas: int = 0,
    lanes: int = 1,
    low_priority: bool = False,
    transport: Transport | str | None = None,
    tile: tuple[int, int] | None = None,
) -> Plan:
    """An overlapped plan whose chunks are row panels of the plain output, already in order.

    Args:
        problem: what all ranks share: ``plan_for(...).problem``, or
            ``Problem(m, n, k, torch.bfloat16, world_size)``.
        chunks: a number of chunks of about equal height, or the chunks' heights in tile rows, top
            to bottom; heights are multiples of the kernel's cluster (2 for the sm90 kernels) and
            sum up to the tile grid's height, which is rounded up to a multiple of the cluster.
            Where the rows are parts of the ranks (``gemm_reducescatter``, ``allgather_gemm``) the
            heights are those of one part, and ``parts * height`` is the multiple.
        kernel: the GEMM; ``library`` takes every dtype, the others bfloat16 and float16.
        band_rows: tile rows of a band, at most; None: ``BAND_ROWS``, 16, or the lowest chunk's height.
        comm_sms: SMs that the GEMM leaves free.
        max_ctas: CTA limit of the communicator; 0: NCCL's own choice.
        window: stage chunks in an NCCL symmetric window.
        smem_pad_bytes: shared memory added to each GEMM block, in bytes; :func:`smem_pad_bytes` says how much.
        finish_ctas: CTAs that put chunks in place behind their communication; 0: a default.
        lanes: chunks in flight at a time, 1 to 4; each takes ``max_ctas`` CTAs.
        low_priority: communication's streams have the lowest priority, not the highest.
        transport: ``nccl`` or ``peer`` for CUDA tensors, ``gloo`` for those on CPU; None: ``gloo``
            where torch finds no CUDA device, the kernel is ``library`` and no option above is set
            that only GPUs have (comm_sms, max_ctas, window, smem_pad_bytes, finish_ctas,
            low_priority), else ``nccl``. A plan for another machine, or for CPU tensors beside a GPU, names it. Over
            ``peer`` chunks are cut from one rank's part of the rows, whatever the op.
        tile: (tile_m, tile_n) in elements; only ``library`` takes other tiles than its own.

    Raises:
        ValueError: a plan that could not run; the message says what is allowed.
    """
    kernel = enum_member(Kernel, kernel)
    resources = Resources(
        comm_sms, smem_pad_bytes, window, finish_ctas, lanes, low_priority=low_priority
    )
    transport = _transport(transport, kernel, resources, max_ctas)
    shape = _shape(kernel, transport, tile)
    parts = problem.world_size if transport == Transport.PEER else problem.row_parts
    whole_clusters = problem.op == Op.ALLGATHER_GEMM or transport == Transport.PEER
    grain = shape.cluster_m // (1 if whole_clusters else math.gcd(shape.cluster_m, parts))
    rows = _tiles(-(-problem.m // parts), shape.tile_m, grain)
    heights = _split(rows, chunks, grain, "tile rows") if isinstance(chunks, int) else list(chunks)
    if band_rows is None:
        band_rows = max(shape.cluster_m, min([BAND_ROWS, *(parts * height for height in heights)]))
        band_rows -= band_rows % shape.cluster_m
    return _plan.make_row_panels(
        problem, kernel, heights, band_rows, resources, max_ctas, transport, shape
    )


def packed(
    problem: Problem,
    chunks: int | Sequence[int],
    *,
    kernel: Kernel | str = Kernel.LIBRARY,
    band_rows: int | None = None,
    comm_sms: int = 0,
    max_ctas: int = 0,
    window: bool = False,
    smem_pad_bytes: int = 0,
    finish_ctas: int = 0,
    lanes: int = 1,
    low_priority: bool = False,
    transport: Transport | str | None = None,
    tile: tuple[int, int] | None = None,
    collective: Collective | str = Collective.ALL_REDUCE,
) -> Plan:
    """An overlapped plan that stores tiles in tile order and reorders them chunk by chunk.

    Chunks may end after any tile, so they can follow the GEMM's waves. ``chunks`` is a number of
    chunks of about equal size, or the chunks' sizes in tiles, which sum up to the number of tiles.
    ``band_rows`` None: ``BAND_ROWS``, or the tile grid's height where that is less. ``collective`` is
    ``all_reduce`` or, between two ranks, ``exchange``: one all-gather, then a sum where the chunk
    is put in place; that is of NCCL's alone. All else is as in :func:`row_panels`.
    """
    kernel, collective = enum_member(Kernel, kernel), enum_member(Collective, collective)
    resources = Resources(
        comm_sms, smem_pad_bytes, window, finish_ctas, lanes, low_priority=low_priority
    )
    if transport is None and collective == Collective.EXCHANGE:
        transport = Transport.NCCL
    transport = _transport(transport, kernel, resources, max_ctas)
    shape = _shape(kernel, transport, tile)
    rows = _tiles(problem.m, shape.tile_m, shape.cluster_m)
    tiles = rows * _tiles(problem.n, shape.tile_n)
    sizes = _split(tiles, chunks, 1, "tiles") if isinstance(chunks, int) else list(chunks)
    if band_rows is None:
        band_rows = max(shape.cluster_m, min(BAND_ROWS, rows))
    plan = _plan.make_packed(
        problem, kernel, sizes, band_rows, resources, max_ctas, transport, shape
    )
    plan.collective = collective
    validate(plan)
    return plan


def smem_pad_bytes(
    kernel: Kernel | str | int, ctas_per_sm: int, *, sm_bytes: int | None = None
) -> int:
    """Shared memory to add to each block of a kernel, so that an SM has room for so many and not one more, in bytes.

    Args:
        kernel: ``sm80``, of which an SM holds two blocks without, where they have room and no SMs are left free
            (``comm_sms``); or the bytes that a block of a kernel of yours has without, static and dynamic together. The
            sm90 kernels fill an SM with one block in any case.
        ctas_per_sm: 1 to 32.
        sm_bytes: shared memory of an SM; None: of the current CUDA device.

    Raises:
        ValueError: so many blocks have no room even without padding, or no number of bytes leaves room for just so many.
    """
    if not isinstance(kernel, int):
        kernel = enum_member(Kernel, kernel)
        if kernel != Kernel.SM80:
            raise ValueError(
                f"kernel is {enum_name(kernel)}, allowed is sm80, or a number of bytes: the framework's GEMM takes no padding, and "
                "a block of the sm90 kernels fills an SM"
            )
        kernel = occupancy.MMA_SYNC_BYTES
    if sm_bytes is None:
        import torch

        sm_bytes = torch.cuda.get_device_properties("cuda").shared_memory_per_multiprocessor
    return occupancy.smem_pad_bytes(kernel, ctas_per_sm, sm_bytes)


def at_once(problem: Problem, *, kernel: Kernel | str = Kernel.LIBRARY) -> Plan:
    """A plan in one step over peers, for few rows: lowest latency, nothing is cut into chunks.

    Every rank's partial sums (``gemm_allreduce``, ``gemm_reducescatter``) go straight to the ranks
    that add them up, the collective ``direct``: with the ping-pong kernels from the GEMM's own stores, with ``library`` from the
    kernel that adds, behind the framework's GEMM. ``allgather_gemm`` with ``library``: one kernel
    gathers, then the framework computes; with others it is the plan over peers in one chunk. Rows of the output, or of an all-gather's input, must
    be multiples of 16 bytes. ``gemm_alltoall`` has no such plan: ``make_all_to_all`` makes its plans.

    Raises:
        ValueError: a plan that could not run; the message says what is allowed.
    """
    return _plan.make_at_once(problem, enum_member(Kernel, kernel))


def make_all_to_all(
    problem: Problem,
    kernel: Kernel | str = Kernel.LIBRARY,
    resources: Resources | None = None,
    max_ctas: int = 0,
    transport: Transport | str | None = None,
) -> Plan:
    """An overlapped plan of ``gemm_alltoall``: rows are sent while the GEMM computes others.

    ``problem.m`` is 0, as rows differ by rank; ``resources`` None: the defaults. ``kernel``, ``max_ctas``
    and ``transport`` are as in :func:`row_panels`. Over peers ``Resources(one_launch=True)`` asks for one launch that
    computes the peers' rows first, stores and announces them, and copies those that arrive; a rank with few rows has the
    framework's GEMM all the same.

    Raises:
        ValueError: a plan that could not run; the message says what is allowed.
    """
    kernel, resources = enum_member(Kernel, kernel), resources or Resources()
    transport = _transport(transport, kernel, resources, max_ctas)
    return _plan.make_all_to_all(problem, kernel, resources, max_ctas, transport)


def edit(
    problem: Problem,
    *,
    tile: tuple[int, int] | None = None,
    kernel: Kernel | str = Kernel.LIBRARY,
    transport: Transport | str | None = None,
    comm_sms: int | None = None,
    max_ctas: int = 0,
) -> Editor:
    """A plan whose communication is written by hand, transfer by transfer; one program for all ranks::

        with edit(problem, tile=(128, 128)) as p:
            for share in p.chunks(4):
                for step in range(1, p.world):                  # a ring of gemm_reducescatter
                    part = p.part(p.rank - step, share)
                    p.push(part, to=p.rank + 1, reduce=True, needs=[p.tiles(part), p.arrived(part)])
        ring = p.plan()

    ``problem`` is for 2 to 8 ranks. ``tile``, ``kernel``, ``transport``, ``comm_sms`` and ``max_ctas`` are as in
    :func:`row_panels`; ``allgather_gemm`` and ``gemm_alltoall`` compute by ``library``. Over ``peer``, ``max_ctas`` are the
    CTAs that move data, of all streams (0: 16), and ``comm_sms`` None leaves them as many SMs beside a kernel.
    docs/plans.md tells more.

    Raises:
        ValueError: what no plan of the problem can be; what the transfers cannot is found by ``p.plan()``.
    """
    return Editor(
        problem,
        tile=tile,
        kernel=kernel,
        transport=transport,
        comm_sms=comm_sms,
        max_ctas=max_ctas,
    )


# --- the op library's plans -----------------------------------------------------------------------------------


def plan_for(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype | DType | str = "bfloat16",
    *,
    device: Device = None,
    group: Group = None,
    op: Op | str = Op.GEMM_ALLREDUCE,
    recipe: Recipe | str = Recipe.NONE,
    output_dtype: torch.dtype | DType | str | None = None,
    fast_accum: bool = False,
) -> Plan:
    """The plan that the op would run now for an output [m, n] and inner dimension k on each rank.

    It is the one set for that problem, else the planner's. ``device`` None: the current CUDA
    device, or the CPU where there is none. ``group`` is as in
    :func:`overlap_torch.gemm_allreduce`. ``recipe``, ``output_dtype`` and ``fast_accum``, the ops'
    ``use_fast_accum``, are of scaled operands: ``dtype`` is the input's.
    """
    problem = Problem(
        m, n, k, dtype, op=op, recipe=recipe, output_dtype=output_dtype, fast_accum=fast_accum
    )
    return _plan_of(problem, device, group)


def _plan_of(problem: Problem, device: Device, group: Group) -> Plan:
    """As :func:`plan_for`; the group says how many ranks there are."""
    import torch

    code = torch.ops.overlap.plan_for(
        enum_name(problem.op),
        problem.m,
        problem.n,
        problem.k,
        getattr(torch, enum_name(problem.dtype)),
        _device(device),
        _group_name(group),
        enum_name(problem.recipe),
        getattr(torch, enum_name(problem.output_dtype)),
        problem.fast_accum,
    )
    return decode(list(code))


def set_plan(plan: Plan, *, device: Device = None, group: Group = None) -> None:
    """From now on the op runs ``plan`` for ``plan.problem``; every rank has to set the same.

    ``device`` None: the CPU for a plan over gloo, else the current CUDA device. Raises ValueError for what ``validate``
    refuses on a device of as many SMs, and for a program that needs more memory than the device has.
    """
    import torch

    where = _device(device, plan)
    check_on(where, plan)
    torch.ops.overlap.set_plan(encode(plan), where, _group_name(group))


def clear_plans(group: Group = None) -> None:
    """Forgets the plans set for the group, so that the planner's hold again. The same on every rank."""
    import torch

    torch.ops.overlap.clear_plans(_group_name(group))


@contextmanager
def use_plan(plan: Plan, *, device: Device = None, group: Group = None) -> Iterator[Plan]:
    """``with use_plan(plan):`` sets the plan for its problem, and afterwards the one that held before."""
    where = _device(device, plan)
    before = _plan_of(plan.problem, where, group)
    set_plan(plan, device=where, group=group)
    try:
        yield plan
    finally:
        set_plan(before, device=where, group=group)


def machine(device: Device = None, group: Group = None) -> Machine:
    """The planner's view of device and link, for ``candidates`` and ``predict``.

    The first call for a group measures its link, so every rank of the group has to make it.
    ``device`` None: the current CUDA device, or the CPU where there is none.
    """
    import torch

    where = (_device(device), _group_name(group))
    result = _parse_machine(torch.ops.overlap.machine(*where))
    result.profile = Profile.parse(*torch.ops.overlap.machine_profile(*where))
    return result


# --- helpers --------------------------------------------------------------------------------------------------


def _transport(
    transport: Transport | str | None, kernel: Kernel, resources: Resources, max_ctas: int
) -> Transport:
    """The given transport, else that of the device that the plan is for, as far as one can tell."""
    if transport is not None:
        return enum_member(Transport, transport)
    import torch

    plain = kernel == Kernel.LIBRARY and max_ctas == 0
    plain &= resources == Resources(lanes=resources.lanes)
    return Transport.GLOO if plain and not torch.cuda.is_available() else Transport.NCCL


def _shape(kernel: Kernel, transport: Transport, tile: tuple[int, int] | None) -> _plan.KernelShape:
    if tile is None:
        return _plan.kernel_shape(kernel, transport == Transport.GLOO)
    if min(tile) < 1:
        raise ValueError(f"tile is {tile}, allowed are two numbers of 1 or more")
    own = _plan.kernel_shape(kernel, False)
    return _plan.KernelShape(tile[0], tile[1], own.cluster_m)


def _tiles(size: int, tile: int, cluster: int = 1) -> int:
    return -(-size // (tile * cluster)) * cluster


def _split(total: int, parts: int, grain: int, unit: str) -> list[int]:
    """``total`` in ``parts`` multiples of ``grain`` that differ by one grain at most."""
    grains = total // grain
    if not 1 <= parts <= grains:
        raise ValueError(
            f"{parts} chunks of {total} {unit}, allowed are 1 to {grains}, as a chunk has {grain} or more: "
            "take fewer chunks, or smaller tiles where the kernel is 'library'"
        )
    each, larger = divmod(grains, parts)
    return [grain * (each + (i < larger)) for i in range(parts)]


def _parse_machine(text: str) -> Machine:
    result = Machine()
    for field in text.split():
        name, _, value = field.partition("=")
        kind = type(getattr(result, name))
        setattr(result, name, value == "1" if kind is bool else kind(value))
    return result


def _device(device: Device, plan: Plan | None = None) -> torch.device:
    import torch

    if device is not None:
        device = torch.device(device)
    elif plan is not None and plan.chunks:
        device = torch.device("cpu" if plan.chunks[0].transport == Transport.GLOO else "cuda")
    else:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def check_on(device: torch.device, plan: Plan) -> None:
    """Raises ValueError for what cannot run there: what `validate` refuses with as many SMs, and a program that needs more
    memory than the device has."""
    validate(plan, _machine(device, plan))
    if plan.program.transfers:
        check_memory(plan, _total_bytes(device))


def _machine(device: torch.device, plan: Plan) -> Machine:
    """The usual one, with the device's SMs: where there are few, what waits may leave none to the GEMM."""
    import torch

    machine = _plan.usual_machine(plan)
    if device.type == "cuda" and machine.arch > 0:
        machine.sm_count = torch.cuda.get_device_properties(device).multi_processor_count
    return machine


def _total_bytes(device: torch.device) -> int:
    """The device's memory."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _group_name(group: Group) -> str:
    from overlap_torch._ops import group_name

    return group_name(group)
