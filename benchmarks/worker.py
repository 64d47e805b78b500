"""The work of each rank of a benchmark: check, then time, op by op and shape by shape."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

import overlap_torch
from overlap_torch._ops import group_name
from overlap_torch._tools.launch import current_device
from overlap_torch.plan import Problem

from . import block, gemm, losses, measure, plans, report
from .computations import Case, Computations, cases
from .options import Options

_BOUND_REPEATS = 5


def run(options: Options) -> None:
    """Measures everything that the options name. Ends the process with status 1 if a result was wrong, or nothing was measured."""
    if options.replaces_symm_mem:
        with overlap_torch.replace_symm_mem():
            _run(options)
    else:
        _run(options)


def _run(options: Options) -> None:
    device = current_device()
    group = group_name()
    stopwatch = measure.Stopwatch(device)
    writer = report.Writer(options, dist.get_rank() == 0)
    writer.header(device, dist.get_world_size())
    wrong = 0
    for op in options.ops:
        if op == "block":
            for sizes in options.blocks:
                wrong += not block.run(options, writer, stopwatch, sizes)
                _release(device)
            continue
        with torch.inference_mode():
            for shape in options.shapes:
                if op == "gemm":
                    wrong += gemm.run(options, writer, stopwatch, shape, group)
                else:
                    for case in cases(op, shape, dist.get_world_size()):
                        wrong += _CaseRun(options, writer, stopwatch, case, group).run()
                        _release(device)
                _release(device)
    overlap_torch.check()
    writer.finish()
    if wrong:
        print(f"{wrong} result(s) differ from the sequence's", file=sys.stderr)
        sys.exit(1)
    if not writer.measured:
        print(
            "nothing was measured: no plan of --sweep is for a problem of these ops, shapes, dtype and "
            f"world size ({dist.get_world_size()})",
            file=sys.stderr,
        )
        sys.exit(1)


def _release(device: torch.device) -> None:
    """Gives back one shape's memory before the next."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class _CaseRun:
    """One op on one shape, under the plan that the op uses for it, or under each plan of a sweep."""

    def __init__(
        self,
        options: Options,
        writer: report.Writer,
        stopwatch: measure.Stopwatch,
        case: Case,
        group: str,
    ) -> None:
        self._options, self._writer, self._stopwatch = options, writer, stopwatch
        dtype = getattr(torch, options.dtype)
        shape = case.shape
        sizes = {"m": shape.m, "n": shape.n, "k": shape.k}
        self._problem = None
        if case.op in plans.OPS:
            problem = Problem(
                # The rows of an all-to-all differ by rank, and its plan is one for all.
                **sizes | ({"m": 0} if case.split else {}),
                dtype=dtype,
                world_size=dist.get_world_size(),
                op=case.op,
                recipe="none" if options.scales is None else f"{options.scales}_wise",
                fast_accum=options.fast_accum,
            )
            self._problem = plans.MeasuredProblem(problem, stopwatch.device, group)
        self._subject = report.Subject(
            op=case.op,
            group=f"{shape.group} {case.split}".rstrip(),
            label=str(case),
            fields=sizes | ({"split": case.split} if case.split else {}),
        )
        how = (options.baselines, options.scales, options.fast_accum)
        self._computations = Computations(case, dtype, stopwatch.device, group, *how)
        self._baselines_checked = self._computations.exact_baselines() if options.check else {}

    def run(self) -> int:
        """Checks and times; returns the number of wrong results. Collective."""
        problem, options = self._problem, self._options
        if problem is not None:
            if options.sweep == "candidates":
                return self._sweep(problem, problem.candidates())
            if options.sweep:
                return self._sweep(problem, problem.fitting(options.sweep))
            if options.plans and (fitting := problem.fitting(options.plans)):
                problem.set(fitting[-1])
        checked = self._checked()
        bounds = self._bounds()
        for mode in options.modes:
            self._measure(mode, bounds, problem.current() if problem else None, checked)
        if options.timeline and problem is not None:
            self._trace(problem.current(), bounds)
        return int(checked is False)

    def _trace(self, plan: plans.Plan, bounds: report.Bounds) -> None:
        op = self._computations.variants()[1]
        lost = losses.record(op, plan, bounds.compute_us, self._stopwatch.device)
        if lost is not None:
            self._writer.losses(self._subject, lost, plan)

    def _checked(self) -> bool | None:
        return self._computations.exact_op() if self._options.check else None

    def _bounds(self) -> report.Bounds:
        """The times of the GEMM and the collective alone: overlap cannot beat the longer one."""
        parts = self._stopwatch.compare("row", self._computations.parts(), _BOUND_REPEATS)
        return report.Bounds(*(times.median for times in parts))

    def _measure(
        self, mode: str, bounds: report.Bounds, plan: plans.Plan | None, checked: bool | None
    ) -> float:
        """One mode, all variants in turns; returns the op's speed-up."""
        computations = self._computations
        sequence, op, *others = self._stopwatch.compare(
            mode, computations.variants(), self._options.repeats(mode)
        )
        by_name = dict(zip(computations.baselines, others, strict=True))
        times = report.Timed(sequence, op, by_name, self._baselines_checked)
        return self._writer.measurement(
            self._subject, mode, times, checked, bounds=bounds, plan=plan
        )

    def _sweep(self, problem: plans.MeasuredProblem, choice: Sequence[plans.Plan]) -> int:
        """Each plan of the choice beside the sequence; the number of wrong results."""
        bounds = self._bounds()
        wrong = 0
        best: dict[str, tuple[float, plans.Plan]] = {}
        for plan in choice:
            problem.set(plan)
            checked = self._checked()
            if checked is False:
                wrong += 1
                self._writer.wrong_plan(self._subject, plan)
                continue
            for mode in self._options.modes:
                speedup = self._measure(mode, bounds, plan, checked)
                if speedup > best.get(mode, (-math.inf, None))[0]:
                    best[mode] = (speedup, plan)
        problem.clear()
        for mode, (speedup, plan) in best.items():
            self._writer.best(self._subject, mode, speedup, plan)
        return wrong
