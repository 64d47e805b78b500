"""The work of each rank of a benchmark: check, then time, op by op and shape by shape."""

from __future__ import annotations

import gc
import math
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist

import overlap_torch
from overlap_torch._ops import group_name
from overlap_torch._ops.collectives import usual_invariance
from overlap_torch._tools.launch import current_device
from overlap_torch.plan import Plan, Problem, clear_plans, set_plan
from overlap_torch.plan._library import plan_of

from . import block, gemm, losses, measure, plans, report
from .computations import Case, Computations, cases
from .tables import Row

_BOUND_REPEATS = 5


def rows(args: Namespace) -> Iterator[Row]:
    """All that the options name: a row of the run, then those of each op and shape."""
    replaced = overlap_torch.replace_symm_mem() if args.replace_symm_mem else nullcontext()
    with replaced:
        yield from _rows(args)
        overlap_torch.check()


def _rows(args: Namespace) -> Iterator[Row]:
    device = current_device()
    group = group_name()
    stopwatch = measure.Stopwatch(device)
    yield report.header(args, device, dist.get_world_size())
    for op in args.op:
        if op == "block":
            for sizes in args.blocks:
                yield from block.rows(args, stopwatch, sizes)
                _release(device)
            continue
        with torch.inference_mode():
            for shape in args.shapes:
                if op == "gemm":
                    yield from gemm.rows(args, stopwatch, shape, group)
                else:
                    for case in cases(op, shape, dist.get_world_size()):
                        yield from _CaseRun(args, stopwatch, case, group).rows()
                        _release(device)
                _release(device)


def _release(device: torch.device) -> None:
    """Gives back one shape's memory before the next."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class _CaseRun:
    """One op on one shape, under the plan that the op uses for it, or under each plan of a sweep."""

    def __init__(
        self,
        args: Namespace,
        stopwatch: measure.Stopwatch,
        case: Case,
        group: str,
    ) -> None:
        self._args, self._stopwatch = args, stopwatch
        dtype = getattr(torch, args.dtype)
        shape = case.shape
        sizes = {"m": shape.m, "n": shape.n, "k": shape.k}
        self._problem, self._where = None, {"device": stopwatch.device, "group": group}
        if case.op in plans.OPS:
            self._problem = Problem(
                # The rows of an all-to-all differ by rank, and its plan is one for all.
                **sizes | ({"m": 0} if case.split else {}),
                dtype=dtype,
                world_size=dist.get_world_size(),
                op=case.op,
                recipe="none" if args.scales is None else f"{args.scales}_wise",
                fast_accum=args.fast_accum,
                invariance=usual_invariance(case.op),
            )
        self._subject = report.Subject(
            args,
            op=case.op,
            group=f"{shape.group} {case.split}".rstrip(),
            label=str(case),
            fields=sizes | ({"split": case.split} if case.split else {}),
        )
        how = (args.baselines, args.scales, args.fast_accum)
        self._computations = Computations(case, dtype, stopwatch.device, group, *how)
        self._baselines_checked = {} if args.no_check else self._computations.exact_baselines()

    def rows(self) -> Iterator[Row]:
        """Checks and times. Collective."""
        problem, args = self._problem, self._args
        if problem is not None:
            if args.sweep:
                if args.sweep == "candidates":
                    choice = plans.candidates(problem, **self._where)
                else:
                    choice = self._fitting(args.sweep)
                yield from self._sweep(choice)
                return
            for plan in self._fitting(args.plan or "[]")[-1:]:
                set_plan(plan, **self._where)
        plan = problem and plan_of(problem, **self._where)
        checked = self._checked()
        bounds = self._bounds()
        for mode in args.modes:
            yield self._measured(mode, bounds, plan, checked)
        if args.timeline and problem is not None:
            op, device = self._computations.variants()[1], self._stopwatch.device
            lost = losses.record(op, plan, bounds.compute_us, device)
            if lost is not None:
                found = lost.as_dict() | {"op_us": round(lost.op_us, 2)}
                yield self._subject.row("timeline", "call", found, plan)

    def _fitting(self, text: str) -> list[Plan]:
        """The plans in JSON that are for this problem."""
        return [plan for plan in plans.parse(text) if plan.problem == self._problem]

    def _checked(self) -> bool | None:
        return None if self._args.no_check else self._computations.exact_op()

    def _bounds(self) -> report.Bounds:
        """The times of the GEMM and the collective alone: overlap cannot beat the longer one."""
        parts = self._stopwatch.compare("row", self._computations.parts(), _BOUND_REPEATS)
        return report.Bounds(*(times.median for times in parts))

    def _measured(
        self, mode: str, bounds: report.Bounds, plan: Plan | None, checked: bool | None
    ) -> Row:
        """One mode, all variants in turns."""
        computations = self._computations
        repeats = measure.repeats_of(self._args, mode)
        sequence, op, *others = self._stopwatch.compare(mode, computations.variants(), repeats)
        by_name = dict(zip(computations.baselines, others, strict=True))
        times = report.Timed(sequence, op, by_name, self._baselines_checked)
        return report.measurement(self._subject, mode, times, checked, bounds, plan)

    def _sweep(self, choice: Sequence[Plan]) -> Iterator[Row]:
        """Each plan of the choice beside the sequence, then the best."""
        bounds = self._bounds()
        best: dict[str, tuple[float, Plan]] = {}
        for plan in choice:
            set_plan(plan, **self._where)
            checked = self._checked()
            if checked is False:
                yield self._subject.wrong(plan)
                continue
            for mode in self._args.modes:
                row = self._measured(mode, bounds, plan, checked)
                yield row
                if row["speedup"] > best.get(mode, (-math.inf, None))[0]:
                    best[mode] = (row["speedup"], plan)
        clear_plans(self._where["group"])
        for mode, (speedup, plan) in best.items():
            yield self._subject.row("best", mode, {"speedup": speedup}, plan)
