"""``produce`` and ``consume``: chunks, signals and communication for kernels that are not this package's."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from overlap_torch._kernels import resources as _resources
from overlap_torch._kernels import tile_orders
from overlap_torch._kernels.job import Job, untraced
from overlap_torch._kernels.request import Prepared, Request
from overlap_torch._kernels.resources import KernelResources
from overlap_torch._ops import library  # noqa: F401  (the library holds the jobs)
from overlap_torch._ops.group import Group, group_name, process_group
from overlap_torch._plan import Op, Plan, Problem, encode
from overlap_torch.plan._library import device_of

_OPS = {
    "all_reduce": Op.GEMM_ALLREDUCE,
    "reduce_scatter": Op.GEMM_REDUCESCATTER,
    "all_to_all": Op.GEMM_ALLTOALL,
}
_MOST = 2048  # jobs that are kept of a group; those that follow replace the older half


class _Kept(dict[tuple, Prepared]):
    """A group's jobs by their calls, so that a call's arguments are checked once."""

    def add(self, call: tuple, prepared: Prepared) -> Prepared:
        if len(self) >= _MOST:
            old = [self.pop(one) for one in list(self)[: _MOST // 2]]
            for device in {job.device for job in old if job.on_gpu}:
                torch.cuda.synchronize(device)  # kernels on any stream may read the tables
        self[call] = prepared
        return prepared

    def find(self, call: tuple) -> Prepared | None:
        try:
            return self.get(call)
        except TypeError:  # something that cannot be a key, and that is refused later
            return None


class _Jobs:
    """A group's jobs. Making one may be collective, so all ranks drop the same ones: all-to-alls, whose rows are a rank's own,
    are apart."""

    def __init__(self) -> None:
        self.alike, self.by_rows = _Kept(), _Kept()


_jobs: weakref.WeakKeyDictionary[dist.ProcessGroup, _Jobs] = weakref.WeakKeyDictionary()


def _jobs_of(name: str, collective: str = "") -> _Kept:
    group = process_group(name)
    jobs = _jobs.get(group) or _jobs.setdefault(group, _Jobs())
    return jobs.by_rows if collective == "all_to_all" else jobs.alike


@untraced
def produce(
    collective: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    tile: tuple[int, int],
    chunks: int | None = None,
    tile_order: str | tile_orders.Order = "grouped",
    plan: Plan | None = None,
    kernel_us: float | Callable[[], object] | None = None,
    send_rows: Sequence[int] | None = None,
    recv_rows: Sequence[int] | None = None,
    operands: Sequence[torch.Tensor] = (),
    signals: bool = True,
    resources: KernelResources | None = None,
    device: torch.device | str | None = None,
    group: Group = None,
) -> Job:
    """A kernel of your own whose finished tiles are communicated while it computes the next ones::

        with overlap_torch.produce("all_reduce", (M, N), torch.bfloat16, tile=(128, 128), chunks=8) as job:
            kernel[(job.tiles,)](a, b, job.output, job.tile_order, job.tile_chunk, job.counters, ...)
        y = job.result()                                   # all_reduce of what the kernel stored

    The kernel takes its tiles in the order of ``job.tile_order`` and signals each one after it is stored; see
    :mod:`overlap_torch.triton`, ``overlap/signal.cuh`` and docs/kernels.md. Its launch must be the only work inside the
    ``with``; no op of this package may be called there. All ranks make the same calls in the same order, with the same
    arguments; only an all-to-all's rows may differ.

    Args:
        collective: ``"all_reduce"``, ``"reduce_scatter"`` (of the rows, equal parts) or ``"all_to_all"`` (rows to the ranks
            that own them).
        shape: (rows, N) of the kernel's output on this rank, any numbers; rows of a reduce-scatter are a multiple of
            the number of ranks.
        dtype: of the output: bfloat16, float16, float32 or float64.
        tile: (rows, columns) of a tile, in elements. Tiles begin at row and column 0; the last ones may be partly outside.
        chunks: the number of pieces that are communicated one by one, 1 to 64, at most the number of rows of tiles (of one
            rank's part). For an all-to-all: pieces of what each pair exchanges, 1 to 63. None: the number that the planner
            expects to take the least time beside a kernel of ``kernel_us``; without ``kernel_us``, and for an all-to-all,
            4.
        tile_order: the kernel's own order, by name or as a function: ``"row_major"`` (along N), ``"column_major"`` (along M),
            ``"grouped"`` (8 rows at a time, as in Triton's tutorial), ``"swizzled"`` (8 columns at a time), or a function of the
            numbers of rows and columns of tiles that returns all tiles as row * columns + column. ``job.tile_order`` keeps it
            within each chunk, and takes the chunks one after the other.
        plan: instead of ``chunks``, a plan of this shape: row panels, packed, direct, sequential, or a program, with the
            kernel ``library`` and this tile. A ring over peers needs this package's GEMMs.
        kernel_us: the kernel's time in microseconds, without communication and on all SMs, the same number on all ranks. Or
            a function that launches the kernel without a job: it is called a few times now, timed, and averaged over the
            ranks. Make that function only once, because each new function is timed again. With this time the planner
            chooses the number of chunks and the transport, by the expected time of the job's steps on the measured link. It
            may also let a reduction's stores travel, as without ``signals``; the kernel signals all the same. It
            keeps one chunk unless another plan is expected to gain clearly; on CPU none is.
        send_rows, recv_rows: for an all-to-all, the number of the output's rows that go to each rank, in rank order, and
            that come from it.
        operands: tensors that the kernel reads, to be checked for gradients; see Raises.
        signals: False takes any work that stores ``job.output``, row-major, without signals or a table of tiles, such as
            ``torch.mm(a, b, out=job.output)``. Parts of ``job.output`` are in the memory of the ranks that own them, so the
            stores themselves travel; the owner adds them up (the collective ``stripes``). It is for ``all_reduce`` and
            ``reduce_scatter``, without ``chunks``, ``plan`` and ``kernel_us``. On CUDA the ranks must map each other's
            memory, and each part must have at least 2 MiB, a page of a GPU's memory.
        resources: what the kernel leaves to communication; None: the innermost :func:`overlap_torch.resources`.
        device: None: the current CUDA device under an NCCL group, else the CPU.
        group: as in :func:`overlap_torch.gemm_allreduce`.

    Returns:
        A :class:`Job`, to be entered once. ``job.result()``: [rows, N], [rows / world, N], or [sum(recv_rows), N].

    Inside a CUDA graph's capture it works after one call with the same arguments outside; a group keeps at least the last 1,024
    kinds of jobs. The result has no gradient: write a ``torch.autograd.Function`` around the call, as docs/kernels.md shows.

    Raises:
        ValueError: arguments that are not allowed, as the message says.
        NotImplementedError: an operand requires grad, and grad mode is on: the gradient would be lost.
        RuntimeError: the kernel signalled a tile twice or never. On CPU, and everywhere with ``OVERLAP_DEBUG=1``, the end of
            the ``with`` raises; otherwise the wait's deadline does. Or a rank left its ``with`` by an exception: all other
            ranks raise, too, and nothing is communicated. On CUDA the group cannot be used afterwards.
    """
    name, tile = group_name(group), _two(tile, "tile", 1)
    resources = _resources_of(resources, plan)
    key = (
        collective, tuple(shape), dtype, tile, chunks, tile_order, _code(plan), kernel_us,
        None if send_rows is None else tuple(map(int, send_rows)), None if recv_rows is None else tuple(map(int, recv_rows)), resources,
        device, torch.cuda.current_device() if torch.cuda.is_initialized() else -1, name, signals,
    )  # fmt: skip
    jobs = _jobs_of(name, collective)
    prepared = jobs.find(key)
    if prepared is None:
        what = f"overlap_torch.produce({collective!r}, {tuple(shape)})"
        problem = _produced(what, collective, shape, dtype, send_rows, recv_rows, name)
        to_all = problem.traits.rows_by_rank
        if not signals and (to_all or (chunks, plan, kernel_us) != (None, None, None)):
            raise ValueError(
                f"{what}: signals is False, allowed is that for all_reduce and reduce_scatter, without chunks, plan and kernel_us: "
                "leave these out, or let the kernel signal"
            )
        request = Request(
            what=what,
            problem=problem,
            tile=tile,
            chunks=chunks,
            tile_order=tile_order,
            plan=plan,
            kernel_us=kernel_us,
            send_rows=tuple(send_rows or ()),
            recv_rows=tuple(recv_rows or ()),
            signals=signals,
            resources=resources,
            device=_device(device, name),
            group=name,
        )
        _check_gradients(what, operands)
        prepared = jobs.add(key, request.prepare())
    else:
        _check_gradients(prepared.what, operands)
    return Job(prepared)


def _produced(
    what: str,
    collective: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    send_rows: Sequence[int] | None,
    recv_rows: Sequence[int] | None,
    name: str,
) -> Problem:
    """The problem of a kernel's product; raises ValueError unless the arguments fit each other."""
    if collective not in _OPS:
        raise ValueError(
            f"collective is {collective!r}, allowed are {', '.join(map(repr, _OPS))}"
            + (
                '; take overlap_torch.consume for "all_gather"'
                if collective == "all_gather"
                else ""
            )
        )
    rows, columns = _two(shape, "shape", 0)
    to_all = collective == "all_to_all"
    if to_all != (send_rows is not None and recv_rows is not None):
        raise ValueError(
            f"{what}: send_rows and recv_rows are {send_rows} and {recv_rows}; give both to all_to_all, and neither to "
            "the others"
        )
    if to_all and sum(send_rows) != rows:
        raise ValueError(
            f"{what}: send_rows must add up to the rows, {rows}, but add up to {sum(send_rows)}"
        )
    world = process_group(name).size()
    return Problem(0 if to_all else rows, columns, 1, dtype, world, _OPS[collective])


@untraced
def consume(
    collective: str,
    input: torch.Tensor,
    *,
    columns: int,
    tile: tuple[int, int],
    chunks: int | None = None,
    tile_order: str | tile_orders.Order = "grouped",
    plan: Plan | None = None,
    kernel_us: float | Callable[[], object] | None = None,
    resources: KernelResources | None = None,
    group: Group = None,
) -> Job:
    """A kernel of your own that computes on rows of all ranks while later ones arrive::

        with overlap_torch.consume("all_gather", x, columns=N, tile=(128, 128), chunks=4) as job:
            kernel[(job.programs,)](job.gathered, w, out, job.tile_order, job.tile_chunk, job.arrived, job.tiles, ...)
        g = job.result()                                   # all ranks' rows

    The kernel takes the tiles of its result [world * rows, N] in the order of ``job.tile_order``, this rank's own rows first, and
    waits for each tile's chunk before it reads rows of it.

    A kernel that waits holds its SMs, and the communication that it waits for may need some. With ``resources`` that leave
    SMs free it begins at once, and must not use those SMs: launch a persistent kernel of ``job.programs`` programs, or use
    a green context. Without ``resources`` it begins when everything has arrived: the result is right, but nothing overlaps.
    docs/kernels.md has a picture of the deadlock.

    Args:
        collective: ``"all_gather"``.
        input: [rows, K], this rank's rows; the same number on every rank.
        columns: N of the kernel's result, which gives the number of tiles in a row of tiles.
        tile: (rows, columns) of a tile of the result, in elements.
        chunks: the number of pieces of each rank's rows that travel one by one, 1 to 64, at most the number of its rows of
            tiles. None: as in :func:`produce`.
        tile_order, plan, kernel_us, resources, group: as in :func:`produce`. A plan is of ``allgather_gemm``.

    Returns:
        A :class:`Job`, to be entered once. ``job.result()`` is ``job.gathered``, [world * rows, K].

    Raises:
        ValueError: arguments that are not allowed, as the message says.
        NotImplementedError: ``input`` requires grad, and grad mode is on.
        RuntimeError: as :func:`produce`. An exception inside the ``with`` affects only this rank: the others have its rows.
    """
    if collective != "all_gather":
        raise ValueError(
            f"collective is {collective!r}, allowed is 'all_gather'; overlap_torch.produce takes {', '.join(_OPS)}"
        )
    if input.dim() != 2:
        raise ValueError(
            f"overlap_torch.consume: input must be [rows, K], but has shape {tuple(input.shape)}"
        )
    what = f"overlap_torch.consume('all_gather', {tuple(input.shape)})"
    _check_gradients(what, [input])
    name, tile = group_name(group), _two(tile, "tile", 1)
    resources = _resources_of(resources, plan)
    key = (
        collective, tuple(input.shape), input.dtype, columns, tile, chunks, tile_order, _code(plan), kernel_us,
        resources, input.device, name,
    )  # fmt: skip
    jobs = _jobs_of(name)
    prepared = jobs.find(key)
    if prepared is not None:
        return Job(prepared, input)
    world = process_group(name).size()
    problem = Problem(
        input.shape[0] * world, columns, input.shape[1], input.dtype, world, Op.ALLGATHER_GEMM
    )
    request = Request(
        what=what,
        problem=problem,
        tile=tile,
        chunks=chunks,
        tile_order=tile_order,
        plan=plan,
        kernel_us=kernel_us,
        resources=resources,
        device=_device(input.device, name),
        group=name,
    )
    return Job(jobs.add(key, request.prepare()), input)


def include_path() -> str:
    """The folder of ``overlap/signal.cuh``, which CUDA kernels include that signal or await chunks.

    For ``extra_include_paths`` of ``torch.utils.cpp_extension.load_inline``.
    """
    return str(Path(__file__).parents[1] / "include")


def _code(plan: Plan | None) -> tuple[int, ...] | None:
    return None if plan is None else tuple(encode(plan))


def _resources_of(resources: KernelResources | None, plan: Plan | None) -> KernelResources:
    """The plan's resources, if it names any, override those that the caller asked for."""
    resources = _resources.current() if resources is None else resources
    if not isinstance(resources, KernelResources) or not isinstance(plan, Plan | None):
        raise TypeError(
            "resources is an overlap_torch.KernelResources and plan an overlap_torch.plan.Plan, but got "
            f"{type(resources).__name__} and {type(plan).__name__}; `with overlap_torch.resources(...)` sets those of a block"
        )
    if plan is None or not plan.resources.comm_sms:
        return resources
    by = "grid" if resources.by == "padding" else resources.by
    return KernelResources(plan.resources.comm_sms, by, priority=resources.priority)


def _check_gradients(what: str, operands: Sequence[torch.Tensor]) -> None:
    if torch.is_grad_enabled() and any(operand.requires_grad for operand in operands):
        raise NotImplementedError(
            f"{what}: an operand requires grad, which a kernel of your own does not pass on; call it in the forward of a "
            "torch.autograd.Function with a backward of its own (docs/kernels.md has one), or detach the operand"
        )


def _two(values: Sequence[int], name: str, least: int) -> tuple[int, int]:
    pair = tuple(values) if isinstance(values, Sequence) else (values,)
    if len(pair) != 2 or any(type(value) is not int or value < least for value in pair):
        raise ValueError(f"{name} is {values}, allowed are two integers of {least} or more")
    return pair


def _device(device: torch.device | str | None, name: str) -> torch.device:
    if device is None:
        backend = dist.get_backend(process_group(name))
        device = "cuda" if "nccl" in backend else "cpu"
    device = device_of(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {device}, allowed are the CPU and CUDA devices")
    return device
