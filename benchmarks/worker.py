"""What each rank of a benchmark does: check, then time, shape by shape."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

import overlap_torch
from overlap_torch import _verify
from overlap_torch._launch import current_device
from overlap_torch._ops import group_name

from . import measure, plans, report
from .cli import Options
from .shapes import Shape

_BOUND_REPEATS = 5


class Computations:
    """The sequence, the op and the sequence's two parts on one shape, over rotating sets of operands."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device, group: str) -> None:
        self._group = group
        set_bytes = (shape.m + shape.n) * shape.k * dtype.itemsize
        count = measure.operand_sets(device, set_bytes)
        seed = 100 * dist.get_rank()
        self._operands = [
            _verify.normal_operands(shape.m, shape.n, shape.k, dtype, device, seed + index)
            for index in range(count)
        ]
        # Zeros, because they stay finite however often they are summed up.
        self._message = torch.zeros(shape.m, shape.n, dtype=dtype, device=device)

    def _set(self, turn: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._operands[turn % len(self._operands)]

    def sequence(self, turn: int) -> None:
        input, weight = self._set(turn)
        dist.all_reduce(torch.mm(input, weight.t()))

    def op(self, turn: int) -> None:
        input, weight = self._set(turn)
        overlap_torch.gemm_allreduce(input, weight, group=self._group)

    def gemm(self, turn: int) -> None:
        input, weight = self._set(turn)
        torch.mm(input, weight.t())

    def collective(self, turn: int) -> None:
        dist.all_reduce(self._message)


def run(options: Options) -> None:
    """Measures everything that the options name. Ends the process with status 1 if a result was wrong."""
    device = current_device()
    group = group_name()
    stopwatch = measure.Stopwatch(device)
    dtype = getattr(torch, options.dtype)
    writer = report.Writer(options, dist.get_rank() == 0)
    writer.header(device, dist.get_world_size())
    overrides = plans.parse(options.plans) if options.plans else []
    wrong = 0
    with torch.inference_mode():
        for shape in options.shapes:
            problem = plans.MeasuredProblem(shape.m, shape.n, shape.k, dtype, device, group)
            if options.sweep:
                choice = (
                    problem.candidates()
                    if options.sweep == "candidates"
                    else plans.parse(options.sweep)
                )
                choice = [plan for plan in choice if problem.fits(plan)]
                wrong += _sweep(options, writer, stopwatch, shape, problem, choice)
            else:
                fitting = [plan for plan in overrides if problem.fits(plan)]
                if fitting:
                    problem.set(fitting[-1])
                wrong += not _measure(options, writer, stopwatch, shape, problem)
            if device.type == "cuda":
                gc.collect()
                torch.cuda.empty_cache()
    overlap_torch.check()
    writer.finish()
    if wrong:
        print(f"{wrong} result(s) differ from the composition", file=sys.stderr)
        sys.exit(1)


def _checked(options: Options, shape: Shape, problem: plans.MeasuredProblem) -> bool | None:
    if not options.check:
        return None
    return _verify.exact_on_integers(
        shape.m, shape.n, shape.k, problem.dtype, problem.device, problem.group
    )


def _repeats(options: Options, mode: str) -> int:
    return options.call_repeats if mode == "call" else options.row_repeats


def _measure(
    options: Options,
    writer: report.Writer,
    stopwatch: measure.Stopwatch,
    shape: Shape,
    problem: plans.MeasuredProblem,
) -> bool:
    """One shape under the plan that the op uses for it; whether its result was right."""
    checked = _checked(options, shape, problem)
    computations = Computations(shape, problem.dtype, problem.device, problem.group)
    bounds = _bounds(stopwatch, computations)
    for mode in options.modes:
        times = stopwatch.compare(
            mode, [computations.sequence, computations.op], _repeats(options, mode)
        )
        writer.measurement(shape, mode, times[0], times[1], bounds, problem.current(), checked)
    return checked is not False


def _bounds(stopwatch: measure.Stopwatch, computations: Computations) -> report.Bounds:
    """The GEMM and the collective alone: what overlap cannot beat is the longer one."""
    mode = "row"
    times = stopwatch.compare(mode, [computations.gemm, computations.collective], _BOUND_REPEATS)
    return report.Bounds(gemm_us=times[0].median, collective_us=times[1].median)


def _sweep(
    options: Options,
    writer: report.Writer,
    stopwatch: measure.Stopwatch,
    shape: Shape,
    problem: plans.MeasuredProblem,
    choice: Sequence[plans.Plan],
) -> int:
    """One shape under each plan of the choice, each beside the sequence; the number of wrong results."""
    computations = Computations(shape, problem.dtype, problem.device, problem.group)
    bounds = _bounds(stopwatch, computations)
    wrong = 0
    best: dict[str, tuple[float, plans.Plan]] = {}
    for plan in choice:
        problem.set(plan)
        checked = _checked(options, shape, problem)
        if checked is False:
            wrong += 1
            writer.wrong_plan(shape, plan)
            continue
        for mode in options.modes:
            times = stopwatch.compare(
                mode, [computations.sequence, computations.op], _repeats(options, mode)
            )
            speedup = writer.measurement(shape, mode, times[0], times[1], bounds, plan, checked)
            if speedup > best.get(mode, (-math.inf, None))[0]:
                best[mode] = (speedup, plan)
    problem.clear()
    for mode, (speedup, plan) in best.items():
        writer.best(shape, mode, speedup, plan)
    return wrong
