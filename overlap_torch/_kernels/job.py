"""``produce`` and ``consume``: chunks, signals and communication for kernels that are not this package's."""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from overlap_torch._kernels import occupancy, plans, tile_orders
from overlap_torch._kernels import resources as _resources
from overlap_torch._kernels.resources import KernelResources
from overlap_torch._ops import library  # noqa: F401  (the library holds the jobs)
from overlap_torch._ops.group import Group, group_name, process_group
from overlap_torch._plan import MAX_CHUNKS, Op, Plan, Problem, encode

_OPS = {
    "all_reduce": Op.GEMM_ALLREDUCE,
    "reduce_scatter": Op.GEMM_REDUCESCATTER,
    "all_to_all": Op.GEMM_ALLTOALL,
}
_Function = TypeVar("_Function", bound=Callable[..., Any])
_STAND_IN_SMS = 4  # a CPU's, for persistent kernels in Triton's interpreter
_COMPILED = "a kernel between overlap_torch.produce or consume and its result is no op that torch.compile could trace"


def _outside_graphs(function: _Function) -> _Function:
    """A function that torch.compile does not trace, and says why. Its compiler takes a second to
    load: not before it is there.
    """

    @functools.cache
    def disabled() -> _Function:
        return torch.compiler.disable(function, reason=_COMPILED)

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        chosen = disabled() if "torch._dynamo" in sys.modules else function
        return chosen(*arguments, **keywords)

    call._torchdynamo_disable, call._torchdynamo_disable_msg = True, _COMPILED
    return call


class _Prepared:
    """A job as the op library has it, and its tables on the device: what all calls of one kind share."""

    def __init__(self, request: _Request, plan: Plan, job) -> None:
        device = request.device
        self.job, self.plan, self.what = job, plan, request.what
        self.device, self.resources = device, request.resources
        self.on_gpu = device.type == "cuda"
        self.chunks = job.tile_chunks()
        self.columns = job.tile_columns()
        order = tile_orders.by_chunks(request.tile_order, self.chunks, self.columns)
        self.tile_order = tile_orders.table(order, device)
        self.tile_chunk = tile_orders.table(self.chunks, device)
        self.programs = _STAND_IN_SMS
        if self.on_gpu:
            self.programs = request.resources.programs(
                torch.cuda.get_device_properties(device).multi_processor_count
            )


# By what is called, whose arguments are looked at once; graphs may hold the tables' addresses, so that they are never dropped.
_prepared: dict[tuple, _Prepared] = {}


def _found(key: tuple) -> _Prepared | None:
    try:
        found = _prepared.get(key)
    except TypeError:  # something that cannot be a key, and that is refused later
        return None
    return found if found is not None and found.job.current() else None


class Job:
    """A kernel of the caller's and its communication: what :func:`produce` and :func:`consume` give.

    A kernel is launched with the tensors, which are int32 and on the device but for the first two.

    Attributes:
        output: ``produce``: [rows, N], where the kernel stores its product, row-major; not the result, and the group's memory
            behind the ``with``.
        gathered: ``consume``: [world * rows, K], all ranks' rows, of which the kernel may read a tile's when its chunk has
            arrived.
        tile_order: the tiles in the order in which to take them, each as row * columns + column of the grid of tiles.
        tile_chunk: for each tile the chunk that it is counted for, or that it awaits.
        counters: ``produce``: to be signalled. Zero at first.
        arrived: ``consume``: to be waited for.
        tiles: how many tiles there are; rows of tiles times ``columns``.
        programs: how many programs a persistent kernel launches: the SMs that it does not leave to communication, times the
            blocks of an SM where ``resources`` say how many.
        plan: the :class:`overlap_torch.Plan` of its communication.
    """

    output: torch.Tensor
    gathered: torch.Tensor
    tile_order: torch.Tensor
    tile_chunk: torch.Tensor
    counters: torch.Tensor
    arrived: torch.Tensor

    def __init__(self, prepared: _Prepared, rows: torch.Tensor | None = None) -> None:
        self._prepared, self._rows = prepared, rows
        self._call = None
        self._result: torch.Tensor | None = None
        self._entered = self._failed = False
        self._debug: torch.Tensor | None = None
        self._context = None
        self.plan = prepared.plan
        self.tiles = len(prepared.chunks)
        self.columns = prepared.columns
        self.programs = prepared.programs

    @_outside_graphs
    def __enter__(self) -> Job:
        prepared = self._prepared
        if self._entered:
            raise RuntimeError(
                f"{prepared.what}: a job is entered once; make another one for the next call"
            )
        self._entered = True
        context = None
        resources = prepared.resources
        if resources.by == "green_context" and resources.comm_sms and prepared.on_gpu:
            context = _resources.green_context(self.programs, prepared.device)
        self._call, matrix, counters = prepared.job.begin(self._rows)
        self.tile_order, self.tile_chunk = prepared.tile_order, prepared.tile_chunk
        if self._rows is None:
            self.output = matrix
            self.counters = self._counters = counters
            if _debugs() and not self._capturing:
                # Each tile has a counter of its own.
                device = prepared.device
                self._debug = torch.zeros(self.tiles, dtype=torch.int32, device=device)
                self.counters = self._debug
                self.tile_chunk = torch.arange(self.tiles, dtype=torch.int32, device=device)
        else:
            self.gathered, self.arrived = matrix, counters
        if context is not None:
            self._stream = torch.cuda.current_stream(prepared.device)
            context.set_context()
            self._context = context
        return self

    @_outside_graphs
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._context is not None:
            self._context.pop_context()
            torch.cuda.set_stream(self._stream)
            self._context = None
        call, self._call = self._call, None
        if kind is not None:
            self._failed = True
            call.abandon(f"{self._prepared.what} by an exception, {kind.__name__}: {error}")
            return
        self._failed = True  # until it has been finished
        if self._debug is not None:
            self._check_tiles(call)
        self._result = call.finish()
        self._failed = False

    @_outside_graphs
    def result(self) -> torch.Tensor:
        """The communicated product (``produce``), or the gathered rows (``consume``); the same tensor each time.

        The caller's stream is behind it, as behind any op. A kernel that never signals a tile makes the wait for its chunk
        pass the group's deadline: :func:`overlap_torch.check`, or the next op, raises then.

        Raises:
            RuntimeError: the ``with`` has not ended, or was left by an exception.
        """
        if self._result is None:
            state = "was left by an exception" if self._failed else "has not ended"
            raise RuntimeError(f"{self._prepared.what} has no result: its `with` {state}")
        return self._result

    def smem_pad_bytes(self, shared_bytes: int) -> int:
        """Shared memory to add to each block of a CUDA kernel: the plan's, or what ``resources(by="padding")`` come to.

        Args:
            shared_bytes: what a block has without, static and dynamic together.

        Raises:
            ValueError: as many blocks as ``ctas_per_sm`` have no room on an SM.
        """
        if self.plan.resources.smem_pad_bytes:
            return self.plan.resources.smem_pad_bytes
        prepared = self._prepared
        if not (prepared.on_gpu and prepared.resources.ctas_per_sm):
            return 0
        properties = torch.cuda.get_device_properties(prepared.device)
        return occupancy.smem_pad_bytes(
            shared_bytes,
            prepared.resources.ctas_per_sm,
            properties.shared_memory_per_multiprocessor,
        )

    @property
    def _capturing(self) -> bool:
        return self._prepared.on_gpu and torch.cuda.is_current_stream_capturing()

    def _check_tiles(self, call) -> None:
        """Under OVERLAP_DEBUG=1: each tile has been signalled once. The chunks' counters follow."""
        wrong = [
            f"({tile // self.columns}, {tile % self.columns}) {'never' if count == 0 else f'{count} times'}"
            for tile, count in enumerate(self._debug.tolist())
            if count != 1
        ]
        if wrong:
            shown = ", ".join(wrong[:8]) + (f" and {len(wrong) - 8} more" if len(wrong) > 8 else "")
            text = f"the kernel signalled tile {shown}; each tile (row, column) is signalled once"
            call.abandon(f"{self._prepared.what}: {text}")
            raise RuntimeError(f"{self._prepared.what}: {text}")
        counts = torch.tensor(self._prepared.job.chunk_tiles(), dtype=torch.int32)
        self._counters[: len(counts)].copy_(counts)


@_outside_graphs
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
    resources: KernelResources | None = None,
    device: torch.device | str | None = None,
    group: Group = None,
) -> Job:
    """A kernel of your own whose finished tiles are communicated while it computes the next ones::

        with overlap_torch.produce("all_reduce", (M, N), torch.bfloat16, tile=(128, 128), chunks=8) as job:
            kernel[(job.tiles,)](a, b, job.output, job.tile_order, job.tile_chunk, job.counters, ...)
        y = job.result()                                   # all_reduce of what the kernel stored

    The kernel takes the tiles that ``job.tile_order`` names and says of each that it is stored; see
    :mod:`overlap_torch.triton`, ``overlap/signal.cuh`` and docs/kernels.md. Its launch must be the only work inside the
    ``with``; no op of this package may be called there. All ranks make the same calls in the same order, with the same
    arguments, but that an all-to-all's rows differ.

    Args:
        collective: ``"all_reduce"``, ``"reduce_scatter"`` (of the rows, equal parts) or ``"all_to_all"`` (rows to the ranks
            that own them).
        shape: (rows, N) of the kernel's output on this rank, any numbers; rows of a reduce-scatter are a multiple of
            the number of ranks.
        dtype: of the output: bfloat16, float16, float32 or float64.
        tile: (rows, columns) of a tile, in elements. Tiles begin at row and column 0; the last ones may be partly outside.
        chunks: how many pieces are communicated one by one, 1 to 64, or as many as there are rows of tiles (of one rank's
            part) where that is less; of an all-to-all, pieces of what each pair exchanges, 1 to 63. None: what the planner expects to
            take the least time beside a kernel of ``kernel_us``; without that, and of an all-to-all, 4.
        tile_order: the kernel's own order, by name or as a function: ``"row_major"`` (along N), ``"column_major"`` (along M),
            ``"grouped"`` (8 rows at a time, as in Triton's tutorial), ``"swizzled"`` (8 columns at a time), or a function of the
            numbers of rows and columns of tiles that returns all tiles as row * columns + column. ``job.tile_order`` keeps it
            within each chunk, and takes the chunks one after the other.
        plan: in place of ``chunks``: a plan of this shape, with row panels, packed, direct, sequential or by a program, of the
            kernel ``library`` and this tile. A ring over peers needs this package's GEMMs.
        kernel_us: the kernel's time in microseconds, by itself and on all SMs, the same number on all ranks; or a function that
            launches the kernel without a job, which is called a few times now, timed, and averaged over the ranks; make that
            function once, for another one is timed again. The planner weighs chunks and ways to communicate them with it,
            by what the job's steps are expected to take on the measured link; one chunk stays where several are not
            expected to gain clearly, as on CPU.
        send_rows, recv_rows: of an all-to-all: how many rows of the output go to each rank, in their order, and come from it.
        operands: tensors that the kernel reads, to be checked for gradients; see Raises.
        resources: what the kernel leaves to communication; None: as the innermost :func:`overlap_torch.resources` says.
        device: None: the current CUDA device under an NCCL group, else the CPU.
        group: as in :func:`overlap_torch.gemm_allreduce`.

    Returns:
        A :class:`Job`, to be entered once. ``job.result()``: [rows, N], [rows / world, N], or [sum(recv_rows), N].

    Inside a CUDA graph's capture it works after one call with the same arguments outside. The result has no gradient: write
    a ``torch.autograd.Function`` around the call, as docs/kernels.md shows.

    Raises:
        ValueError: arguments that are not allowed, as the message says.
        NotImplementedError: an operand requires grad, and grad mode is on: the gradient would be lost.
        RuntimeError: the kernel signalled a tile twice or never: on CPU, and everywhere under ``OVERLAP_DEBUG=1``, when the
            ``with`` ends; on CUDA otherwise when the wait's deadline passes. A rank that left its ``with`` by an exception, which
            all other ranks are told: nothing is communicated. On CUDA the group is of no use afterwards.
    """
    name = group_name(group)
    resources = _resources_of(resources, plan)
    key = (
        collective, tuple(shape), dtype, tuple(tile), chunks, tile_order, _code(plan), kernel_us,
        None if send_rows is None else tuple(send_rows), None if recv_rows is None else tuple(recv_rows), resources,
        device, _current_device(), name,
    )  # fmt: skip
    prepared = _found(key)
    if prepared is None:
        request = _produce_request(
            collective, shape, dtype, tile, chunks, tile_order, plan, kernel_us, send_rows, recv_rows, resources, device, name
        )  # fmt: skip
        _check_gradients(request.what, operands)
        prepared = _prepared[key] = request.prepare()
    else:
        _check_gradients(prepared.what, operands)
    return Job(prepared)


def _produce_request(
    collective: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    tile: tuple[int, int],
    chunks: int | None,
    tile_order: str | tile_orders.Order,
    plan: Plan | None,
    kernel_us: float | Callable[[], object] | None,
    send_rows: Sequence[int] | None,
    recv_rows: Sequence[int] | None,
    resources: KernelResources,
    device: torch.device | str | None,
    name: str,
) -> _Request:
    if collective not in _OPS:
        raise ValueError(
            f"collective is {collective!r}, allowed are {', '.join(map(repr, _OPS))}"
            + (
                '; take overlap_torch.consume for "all_gather"'
                if collective == "all_gather"
                else ""
            )
        )
    op = _OPS[collective]
    what = f"overlap_torch.produce({collective!r}, {tuple(shape)})"
    rows, columns = _two(shape, "shape", 0)
    world = process_group(name).size()
    to_all = op == Op.GEMM_ALLTOALL
    send, receive = list(send_rows or ()), list(recv_rows or ())
    if to_all != (send_rows is not None and recv_rows is not None):
        raise ValueError(
            f"{what}: send_rows and recv_rows are {send_rows} and {recv_rows}; give both to all_to_all, and neither to "
            "the others"
        )
    if to_all and sum(send) != rows:
        raise ValueError(
            f"{what}: send_rows must add up to the rows, {rows}, but add up to {sum(send)}"
        )
    problem = Problem(0 if to_all else rows, columns, 1, dtype, world, op)
    return _Request(
        what=what,
        problem=problem,
        tile=_two(tile, "tile", 1),
        chunks=chunks,
        tile_order=tile_order,
        plan=plan,
        kernel_us=kernel_us,
        send_rows=tuple(send),
        recv_rows=tuple(receive),
        resources=resources,
        device=_device(device, name),
        group=name,
    )


@_outside_graphs
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

    A kernel that waits holds its SMs, and what it waits for may need some: with ``resources`` that leave SMs free it begins at
    once, and must not hold the others (a persistent kernel of ``job.programs`` programs, or a green context). Without, it
    begins when everything has arrived: right, but nothing overlaps. docs/kernels.md has a picture of the deadlock.

    Args:
        collective: ``"all_gather"``.
        input: [rows, K], this rank's rows; as many on every rank.
        columns: N of the kernel's result, which says how many tiles a row of tiles has.
        tile: (rows, columns) of a tile of the result, in elements.
        chunks: how many pieces of each rank's rows travel one by one, 1 to 64, or as many as its rows of tiles if those are less.
            None: as in :func:`produce`.
        tile_order, plan, kernel_us, resources, group: as in :func:`produce`. A plan is of ``allgather_gemm``.

    Returns:
        A :class:`Job`, to be entered once. ``job.result()`` is ``job.gathered``, [world * rows, K].

    Raises:
        ValueError: arguments that are not allowed, as the message says.
        NotImplementedError: ``input`` requires grad, and grad mode is on.
        RuntimeError: as :func:`produce`. An exception inside the ``with`` is this rank's own affair: others have its rows.
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
    name = group_name(group)
    resources = _resources_of(resources, plan)
    key = (
        collective, tuple(input.shape), input.dtype, columns, tuple(tile), chunks, tile_order, _code(plan), kernel_us,
        resources, input.device, name,
    )  # fmt: skip
    prepared = _found(key)
    if prepared is not None:
        return Job(prepared, input)
    world = process_group(name).size()
    problem = Problem(
        input.shape[0] * world, columns, input.shape[1], input.dtype, world, Op.ALLGATHER_GEMM
    )
    request = _Request(
        what=what,
        problem=problem,
        tile=_two(tile, "tile", 1),
        chunks=chunks,
        tile_order=tile_order,
        plan=plan,
        kernel_us=kernel_us,
        resources=resources,
        device=_device(input.device, name),
        group=name,
    )
    prepared = _prepared[key] = request.prepare()
    return Job(prepared, input)


@dataclass(frozen=True)
class _Request:
    """A caller's request, for which the tables are made once."""

    what: str
    problem: Problem
    tile: tuple[int, int]
    chunks: int | None
    tile_order: str | tile_orders.Order
    plan: Plan | None
    kernel_us: float | Callable[[], object] | None
    resources: KernelResources
    device: torch.device
    group: str
    send_rows: tuple[int, ...] = ()
    recv_rows: tuple[int, ...] = ()

    def prepare(self) -> _Prepared:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{self.what}: the first call with these arguments cannot be captured into a CUDA graph, because it makes "
                "tables and communicators; make one outside, with the same arguments"
            )
        problem, chunks = self.problem, self.chunks
        to_all = problem.op == Op.GEMM_ALLTOALL
        rows = sum(self.send_rows) if to_all else problem.m
        if rows == 0 and not to_all or problem.n == 0 or problem.k == 0:
            raise ValueError(
                f"{self.what}: there is nothing to compute; leave the call out on all ranks"
            )
        if chunks is not None and (type(chunks) is not int or not 1 <= chunks <= MAX_CHUNKS):
            raise ValueError(f"{self.what}: chunks is {chunks!r}, allowed are 1 to {MAX_CHUNKS}")
        if self.plan is None:
            plan, pieces = self._planned(), (chunks or 4) if to_all else 1
        else:
            _check_plan(self.what, self.plan, problem, self.tile, self.device)
            plan, pieces = self.plan.copy(), chunks or 1
        if self.resources.priority == "low":
            made = plan.resources
            made.low_priority = True
            plan.resources = made
        job = torch.classes.overlap.KernelJob(
            encode(plan),
            self.device,
            self.group,
            self.resources.comm_sms > 0,
            self.send_rows,
            self.recv_rows,
            pieces,
        )
        return _Prepared(self, plan, job)

    def _planned(self) -> Plan:
        from overlap_torch.plan import machine

        measured = None
        if self.kernel_us is not None:
            measured = _time_of(self.kernel_us, self.device, self.group)
        alone = self.problem.world_size == 1
        return plans.make_plan(
            self.problem,
            self.tile,
            1 if alone else self.chunks,
            measured,
            machine(self.device, self.group) if measured is not None and not alone else None,
            self.resources.comm_sms,
            self.device.type == "cpu" or alone,
        )


def _code(plan: Plan | None) -> tuple[int, ...] | None:
    return None if plan is None else tuple(encode(plan))


def _current_device() -> int:
    """The one that is meant where no device or no index is given, of a key."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else -1


def _resources_of(resources: KernelResources | None, plan: Plan | None) -> KernelResources:
    """The resources of the plan, if it names any, go before those that were asked for."""
    resources = _resources.current() if resources is None else resources
    if plan is None or not plan.resources.comm_sms:
        return resources
    by = "grid" if resources.by == "padding" else resources.by
    return KernelResources(plan.resources.comm_sms, by, priority=resources.priority)


def _check_plan(
    what: str, plan: Plan, problem: Problem, tile: tuple[int, int], device: torch.device
) -> None:
    from overlap_torch.plan._library import check_on

    same = all(
        getattr(plan.problem, field) == getattr(problem, field)
        for field in ("op", "m", "n", "dtype", "world_size")
    )
    if not same or (problem.op == Op.ALLGATHER_GEMM and plan.problem.k != problem.k):
        raise ValueError(
            f"{what}: the plan is for another problem, {plan.problem}; this is {problem}"
        )
    if (plan.tile_m, plan.tile_n) != tile:
        raise ValueError(
            f"{what}: the plan has tiles of {plan.tile_m} x {plan.tile_n}, the kernel of {tile[0]} x {tile[1]}: make the "
            "plan with tile="
        )
    try:
        check_on(device, plan)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


def _check_gradients(what: str, operands: Sequence[torch.Tensor]) -> None:
    if torch.is_grad_enabled() and any(operand.requires_grad for operand in operands):
        raise NotImplementedError(
            f"{what}: an operand requires grad, which a kernel of your own does not pass on; call it in the forward of a "
            "torch.autograd.Function with a backward of its own (docs/kernels.md has one), or detach the operand"
        )


def _time_of(kernel_us: float | Callable[[], object], device: torch.device, name: str) -> float:
    """Microseconds, the same on all ranks."""
    if not callable(kernel_us):
        if not kernel_us > 0:
            raise ValueError(f"kernel_us is {kernel_us}, allowed is a time above 0, or a function")
        return float(kernel_us)
    times = torch.tensor([_measure(kernel_us, device)], dtype=torch.float64, device=device)
    dist.all_reduce(times, group=process_group(name))
    return times.item() / process_group(name).size()


def _measure(launch: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    launch()  # compiles
    if device.type == "cpu":
        from time import perf_counter

        begin = perf_counter()
        launch()
        return 1e6 * (perf_counter() - begin)
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        launch()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return statistics.median(times)


def _two(values: Sequence[int], name: str, least: int) -> tuple[int, int]:
    pair = tuple(values)
    if len(pair) != 2 or any(type(value) is not int or value < least for value in pair):
        raise ValueError(f"{name} is {values}, allowed are two integers of {least} or more")
    return pair


def _device(device: torch.device | str | None, name: str) -> torch.device:
    if device is None:
        backend = dist.get_backend(process_group(name))
        device = "cuda" if "nccl" in backend else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {device}, allowed are the CPU and CUDA devices")
    return device


@functools.cache
def _debugs() -> bool:
    return torch.ops.overlap.environment()["OVERLAP_DEBUG"] == "1"
