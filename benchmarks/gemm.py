"""The signalling GEMM alone beside cuBLAS: what its counters and its tile order cost, without any communication."""

from __future__ import annotations

import torch
import torch.distributed as dist

from overlap_torch import _verify
from overlap_torch import plan as plan_api
from overlap_torch.plan import Collective, Kernel, Layout, Plan, Problem

from . import measure, plans, report
from .options import Options
from .shapes import Shape

_CHUNKS = 8
_PLANNED_RANKS = 2  # that a plan is made for; its GEMM is the same for any


def available() -> bool:
    """Whether this build has the operator that runs a plan's GEMM alone."""
    return hasattr(torch.ops.overlap, "gemm_alone")


def default_plans(problem: Problem, machine: plan_api.Machine) -> list[Plan]:
    """Up to eight equal chunks in each of the device's own kernels, row-major and packed; all SMs are the GEMM's.

    Row panels are as high as the planner's highest bands, or higher: lower ones share less of the operands in L2.

    Raises:
        ValueError: this build has no signalling kernel for the device.
    """
    if not (machine.has_sm90_kernels or machine.has_sm80_kernels):
        raise ValueError("gemm: this build has no signalling kernel for this device")
    hopper = [Kernel.SM90_PINGPONG, Kernel.SM90_PINGPONG_WIDE, Kernel.SM90_COOPERATIVE]
    chosen = []
    for kernel in hopper if machine.has_sm90_kernels else [Kernel.SM80]:
        whole = plan_api.row_panels(problem, 1, kernel=kernel)
        panels = max(1, min(_CHUNKS, whole.tiles_m // plan_api.BAND_ROWS))
        chunks = min(_CHUNKS, whole.tiles_m * whole.tiles_n)
        chosen.append(plan_api.row_panels(problem, panels, kernel=kernel))
        chosen.append(plan_api.packed(problem, chunks, kernel=kernel))
    return chosen


def given_plans(text: str | None, problem: Problem) -> list[Plan]:
    """gemm_allreduce's plans in JSON, of whatever number of ranks, for the problem's M, N, K and dtype."""
    chosen = []
    for plan in plans.parse(text) if text else []:
        own = plan.problem
        names = ("op", "m", "n", "k", "dtype")
        if all(getattr(own, name) == getattr(problem, name) for name in names):
            plan.collective = Collective.ALL_REDUCE  # one part a chunk: the GEMM is the same
            chosen.append(plan)
    return chosen


def run(
    options: Options,
    writer: report.Writer,
    stopwatch: measure.Stopwatch,
    shape: Shape,
    group: str,
) -> int:
    """Checks and times one shape's plans, all in turns with cuBLAS; the number of wrong results. Collective."""
    device, dtype = stopwatch.device, getattr(torch, options.dtype)
    problem = Problem(
        shape.m,
        shape.n,
        shape.k,
        plan_api.enum_member(plan_api.DType, options.dtype),
        _PLANNED_RANKS,
    )
    chosen = given_plans(options.plans, problem)
    chosen = chosen or default_plans(problem, plan_api.machine(device, group))
    operands = [
        _verify.normal_operands(shape.m, shape.n, shape.k, dtype, device, seed)
        for seed in range(
            measure.operand_sets(device, (shape.m + shape.n) * shape.k * dtype.itemsize)
        )
    ]

    def library(turn: int) -> None:
        input, weight = operands[turn % len(operands)]
        torch.mm(input, weight.t())

    def signalling(plan: Plan) -> measure.Variant:
        code = plan_api.encode(plan)

        def run_once(turn: int) -> None:
            torch.ops.overlap.gemm_alone(*operands[turn % len(operands)], code)

        return run_once

    checked = [exact(plan, dtype, device) if options.check else None for plan in chosen]
    subject = report.Subject(
        "gemm", shape.group, str(shape), {"m": shape.m, "n": shape.n, "k": shape.k}
    )
    for mode in options.modes:
        samples = stopwatch.samples(
            mode, [library, *map(signalling, chosen)], options.repeats(mode)
        )
        times = measure.summary(samples)
        for index, (plan, right) in enumerate(zip(chosen, checked, strict=True), start=1):
            ratio = (samples[0, index] / samples[0, 0]).median().item()
            writer.gemm(subject, mode, times[0], times[index], ratio, plan, right)
    return checked.count(False)


def exact(plan: Plan, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the plan's GEMM equals cuBLAS's bit for bit on integer operands, on every rank. Collective."""
    problem = plan.problem
    operands = _verify.integer_operands(problem.m, problem.n, problem.k, dtype, device, 1)
    buffer = torch.ops.overlap.gemm_alone(*operands, plan_api.encode(plan))
    equal = torch.equal(output_of(plan, buffer), torch.mm(operands[0], operands[1].t()))
    agreed = torch.tensor([int(equal)], device=device, dtype=torch.int32)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    return bool(agreed.item())


def output_of(plan: Plan, buffer: torch.Tensor) -> torch.Tensor:
    """The output [M, N] that lies in a plan's buffer, packed or row-major."""
    m, n = plan.problem.m, plan.problem.n
    if plan.layout == Layout.ROW_MAJOR:
        return buffer.flatten()[: m * n].view(m, n)
    rows, columns = plan.tiles_m, plan.tiles_n
    slots = [plan.tile_index(row, column) for row in range(rows) for column in range(columns)]
    tiles = buffer.flatten()[: len(slots) * plan.tile_m * plan.tile_n]
    tiles = tiles.view(-1, plan.tile_m, plan.tile_n)[slots]
    grid = tiles.view(rows, columns, plan.tile_m, plan.tile_n).transpose(1, 2)
    return grid.reshape(rows * plan.tile_m, columns * plan.tile_n)[:m, :n]
