"""The signalling GEMM beside the framework's: the cost of its counters and tile order, without any communication.

The framework's is torch.mm, or for fp8 torch._scaled_mm with the same scales and fast accumulation, as in the kernels.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator

import torch

from overlap_torch import plan as plan_api
from overlap_torch._tools import verify
from overlap_torch.plan import Plan, Problem
from overlap_torch.plan._explain import short
from overlap_torch.plan._names import enum_member, enum_name
from overlap_torch.plan.types import Collective, Kernel, Layout, Recipe

from . import measure, plans, report, scaled, tables
from .shapes import Shape

_CHUNKS = 8
_PLANNED_RANKS = 2  # that a plan is made for; its GEMM is the same for any


def available() -> bool:
    """True if this build has the operator that runs a plan's GEMM alone."""
    return hasattr(torch.ops.overlap, "gemm_alone")


def default_plans(problem: Problem, machine: plan_api.Machine) -> list[Plan]:
    """Up to eight equal chunks in each of the device's own kernels, row-major and packed; all SMs are the GEMM's.

    Row panels are as high as the planner's highest bands, or higher: lower ones share less of the operands in L2.

    Raises:
        ValueError: this build has no signalling kernel for the device.
    """
    if not machine.kernel_arch:
        raise ValueError("gemm: this build has no signalling kernel for this device")
    kernels = [
        kernel
        for kernel in Kernel.__members__.values()
        if kernel.traits.least_arch == machine.kernel_arch
        and (kernel.traits.takes_fp8 or problem.recipe == Recipe.NONE)
    ]
    if not kernels:
        raise ValueError("gemm: this build has no signalling kernel of fp8 for this device")
    chosen = []
    for kernel in kernels:
        whole = plan_api.templates.row_panels(problem, 1, kernel=kernel)
        panels = max(1, min(_CHUNKS, whole.tiles_m // plan_api.types.BAND_ROWS))
        chunks = min(_CHUNKS, whole.tiles_m * whole.tiles_n)
        chosen.append(plan_api.templates.row_panels(problem, panels, kernel=kernel))
        chosen.append(plan_api.templates.packed(problem, chunks, kernel=kernel))
    return chosen


def given_plans(text: str | None, problem: Problem) -> list[Plan]:
    """The plans of gemm_allreduce in JSON, for any number of ranks, with the problem's M, N, K and dtype."""
    chosen = []
    for plan in plans.parse(text) if text else []:
        own = plan.problem
        names = ("op", "m", "n", "k", "dtype", "recipe")
        if all(getattr(own, name) == getattr(problem, name) for name in names):
            plan.collective = Collective.ALL_REDUCE  # one part a chunk: the GEMM is the same
            chosen.append(plan)
    return chosen


def rows(
    args: Namespace, stopwatch: measure.Stopwatch, shape: Shape, group: str
) -> Iterator[tables.Row]:
    """Checks and times one shape's plans, all in turns with cuBLAS. Collective."""
    device, dtype = stopwatch.device, getattr(torch, args.dtype)
    problem = Problem(
        shape.m,
        shape.n,
        shape.k,
        enum_member(plan_api.types.DType, args.dtype),
        _PLANNED_RANKS,
        recipe=f"{args.scales}_wise" if args.scales else "none",
        fast_accum=args.scales is not None,  # the kernels have no other
    )
    chosen = given_plans(args.plan, problem)
    chosen = chosen or default_plans(problem, plan_api.machine(device, group))
    sets = measure.operand_sets(device, (shape.m + shape.n) * shape.k * dtype.itemsize)
    operands = [_operands(shape, args, dtype, device, seed) for seed in range(sets)]

    def variant(compute: Callable[..., torch.Tensor], *first: list[int]) -> measure.Variant:
        return lambda turn: compute(*first, *operands[turn % sets])

    variants = [variant(_signalling, plan_api.files.encode(plan)) for plan in chosen]
    checked = [
        None if args.no_check else exact(plan, dtype, device, args.scales) for plan in chosen
    ]
    subject = report.Subject(
        args, "gemm", shape.group, str(shape), {"m": shape.m, "n": shape.n, "k": shape.k}
    )
    for mode in args.modes:
        repeats = measure.repeats_of(args, mode)
        samples = stopwatch.samples(mode, [variant(_library), *variants], repeats)
        times = measure.summary(samples)
        for index, (plan, right) in enumerate(zip(chosen, checked, strict=True), start=1):
            ratio = (samples[0, index] / samples[0, 0]).median().item()
            found = {
                "kernel": enum_name(plan.kernel),
                "layout": enum_name(plan.layout),
                "library_us": times[0].as_dict(),
                "kernel_us": times[index].as_dict(),
                "ratio": round(ratio, 4),  # the kernel's time over cuBLAS's
                "checked": right,
            }
            text = f"{ratio:.3f} of cuBLAS's time  {short(plan)}"
            yield subject.row("gemm", mode, found, plan, text)


def _operands(
    shape: Shape, args: Namespace, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[torch.Tensor, ...]:
    """Normally distributed ones: input and weight, and with scales both of these."""
    if args.scales is None:
        return verify.normal_operands(shape.m, shape.n, shape.k, dtype, device, seed)
    types = (torch.bfloat16, device, seed)
    operands = verify.normal_operands(shape.m, shape.n, shape.k, *types)
    return scaled.Scaling(args.scales, True).cast(*operands, dtype)


def _library(
    input: torch.Tensor,
    weight: torch.Tensor,
    scale_input: torch.Tensor | None = None,
    scale_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    if scale_input is None or scale_weight is None:
        return torch.mm(input, weight.t())
    if scale_weight.numel() > 1:
        scale_weight = scale_weight.view(1, -1)
    return torch._scaled_mm(
        input, weight.t(), scale_input, scale_weight, out_dtype=scaled.OUTPUT, use_fast_accum=True
    )


def _signalling(
    code: list[int], input: torch.Tensor, weight: torch.Tensor, *scales: torch.Tensor
) -> torch.Tensor:
    return torch.ops.overlap.gemm_alone(input, weight, code, *scales)


def exact(plan: Plan, dtype: torch.dtype, device: torch.device, scales: str | None = None) -> bool:
    """True if the plan's GEMM equals the library's bit for bit on integer operands, on every rank. Collective."""
    problem = plan.problem
    as_bf16 = dtype if scales is None else torch.bfloat16
    operands = verify.integer_operands(problem.m, problem.n, problem.k, as_bf16, device, 1)
    if scales is not None:
        operands = scaled.Scaling(scales, True).ones(*operands, dtype)
    buffer = _signalling(plan_api.files.encode(plan), *operands)
    equal = torch.equal(output_of(plan, buffer), _library(*operands))
    return measure.on_all_ranks([equal], device)[0]


def output_of(plan: Plan, buffer: torch.Tensor) -> torch.Tensor:
    """The output [M, N] from a plan's buffer, packed or row-major."""
    m, n = plan.problem.m, plan.problem.n
    if plan.layout == Layout.ROW_MAJOR:
        return buffer.flatten()[: m * n].view(m, n)
    rows, columns = plan.tiles_m, plan.tiles_n
    slots = [plan.tile_index(row, column) for row in range(rows) for column in range(columns)]
    tiles = buffer.flatten()[: len(slots) * plan.tile_m * plan.tile_n]
    tiles = tiles.view(-1, plan.tile_m, plan.tile_n)[slots]
    grid = tiles.view(rows, columns, plan.tile_m, plan.tile_n).transpose(1, 2)
    return grid.reshape(rows * plan.tile_m, columns * plan.tile_n)[:m, :n]
