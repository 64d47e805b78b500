"""A requested job: its plan, and the tables that all calls of one kind share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from overlap_torch._kernels import tile_orders
from overlap_torch._kernels.resources import KernelResources
from overlap_torch._ops import library  # noqa: F401  (the library holds the jobs)
from overlap_torch._ops.group import process_group
from overlap_torch._plan import (
    MAX_CHUNKS,
    Collective,
    Plan,
    Problem,
    Resources,
    Transport,
    encode,
    make_kernel_plan,
    validate,
)
from overlap_torch.plan import machine
from overlap_torch.plan._library import check_on
from overlap_torch.plan.templates import make_all_to_all, row_panels

_DEFAULT_CHUNKS = 4
# NCCL's CTAs beside a kernel of unknown time: the number with which its all-reduce is nearly at full speed, and the number
# that fills a link.
_REDUCING_CTAS = 16
_MOVING_CTAS = 8
_STAND_IN_SMS = 4  # a CPU's, for persistent kernels in Triton's interpreter


class Prepared:
    """The op library's job and its tables on the device, which all calls of one kind share."""

    def __init__(self, request: Request, plan: Plan, job) -> None:
        device = request.device
        self.job, self.plan, self.what = job, plan, request.what
        self.device, self.resources = device, request.resources
        self.signals = request.signals
        self.on_gpu = device.type == "cuda"
        # Nothing waits for signals. On CPU they are counted all the same.
        self.stores = self.on_gpu and plan.collective == Collective.STRIPES
        self.chunks = job.tile_chunks()
        self.columns = job.tile_columns()
        order = tile_orders.by_chunks(request.tile_order, self.chunks, self.columns)
        self.tile_order = tile_orders.table(order, device)
        self.tile_chunk = tile_orders.table(self.chunks, device)
        self.aligned: dict[tuple, object] = {}  # proven launches of aligned kernels
        self.programs = _STAND_IN_SMS
        if self.on_gpu:
            self.programs = request.resources.programs(
                torch.cuda.get_device_properties(device).multi_processor_count
            )


@dataclass(frozen=True)
class Request:
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
    signals: bool = True

    def prepare(self) -> Prepared:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{self.what}: the first call with these arguments cannot be captured into a CUDA graph, because it makes "
                "tables and communicators; make one outside, with the same arguments"
            )
        problem, chunks = self.problem, self.chunks
        to_all = problem.traits.rows_by_rank
        rows = sum(self.send_rows) if to_all else problem.m
        if rows == 0 and not to_all or problem.n == 0 or problem.k == 0:
            raise ValueError(
                f"{self.what}: there is nothing to compute; leave the call out on all ranks"
            )
        if chunks is not None and (type(chunks) is not int or not 1 <= chunks <= MAX_CHUNKS):
            raise ValueError(f"{self.what}: chunks is {chunks!r}, allowed are 1 to {MAX_CHUNKS}")
        if self.plan is not None:
            check_plan(self.what, self.plan, problem, self.tile, self.device)
            return self._with(self.plan.copy(), chunks or 1)
        pieces = (chunks or _DEFAULT_CHUNKS) if to_all else 1
        us = None
        # An all-to-all's plan needs no time, and ranks come here each by its own rows: none may wait for the others.
        if self.kernel_us is not None and not (to_all and callable(self.kernel_us)):
            us = _time_of(self.kernel_us, self.device, self.group)
        prepared = self._with(self._planned(us), pieces)
        stores = prepared.plan.collective == Collective.STRIPES
        if stores and self.signals and not has_memory(prepared.job):
            prepared = self._with(self._planned(us, stripes=False), pieces)
        return prepared

    def _with(self, plan: Plan, pieces: int) -> Prepared:
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
        return Prepared(self, plan, job)

    def _planned(self, us: float | None, stripes: bool = True) -> Plan:
        """Row panels: if the kernel's time is known, the planner chooses their number and transport; else they have about
        equal heights. An all-to-all has one chunk, because its rows differ by rank. Without ``stripes`` the ranks cannot have
        memory for stores into it."""
        problem, tile, comm_sms = self.problem, self.tile, self.resources.comm_sms
        alone, to_all = problem.world_size == 1, problem.traits.rows_by_rank
        on_cpu = self.device.type == "cpu"
        if not self.signals and not alone:
            transport = Transport.GLOO if on_cpu else Transport.PEER
            return row_panels(problem, 1, tile=tile, transport=transport, collective="stripes")
        if us is not None and not alone and not to_all:
            here = machine(self.device, self.group)
            return make_kernel_plan(problem, here, tile, us, comm_sms, self.chunks or 0, stripes)
        transport, ctas = Transport.GLOO, 0
        if not on_cpu and not alone:
            moves = to_all or problem.traits.gathers
            transport, ctas = Transport.NCCL, _MOVING_CTAS if moves else _REDUCING_CTAS
            ctas = min(ctas, comm_sms) if comm_sms else ctas
        how = {"max_ctas": ctas, "transport": transport}
        if to_all:
            made = make_all_to_all(problem, resources=Resources(comm_sms), **how)
            made.tile_m, made.tile_n = tile
            validate(made)
            return made
        rows = -(-(problem.m // problem.row_parts) // tile[0])
        chunks = 1 if alone else max(1, min(self.chunks or _DEFAULT_CHUNKS, rows))
        return row_panels(problem, chunks, tile=tile, comm_sms=comm_sms, **how)


def has_memory(job) -> bool:
    """Makes the memory of the ranks that a planned job's kernel stores into; False if they cannot have it."""
    return job.reserve()


def check_plan(
    what: str, plan: Plan, problem: Problem, tile: tuple[int, int], device: torch.device
) -> None:
    same = all(
        getattr(plan.problem, field) == getattr(problem, field)
        for field in ("op", "m", "n", "dtype", "world_size")
    )
    if not same or (problem.traits.gathers and plan.problem.k != problem.k):
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
        begin = time.perf_counter()
        launch()
        return 1e6 * (time.perf_counter() - begin)
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        launch()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return statistics.median(times)
