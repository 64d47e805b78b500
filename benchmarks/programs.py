"""``python -m benchmarks programs``: plans with programs beside the planner's own and the sequence.

The programs are templates (``overlap_torch.plan``) with several numbers of chunks and kernels, one that is written here, and files of
MSCCL (.xml) and MSCCL++ (.json) that are named, each for the op that has its collective. All plans of a problem take turns
in one run; a time is the median of the slowest rank's. Results are compared with the sequence's first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from overlap_torch import plan
from overlap_torch._tools.launch import current_device
from overlap_torch._tune import command as _tune_command
from overlap_torch._tune.session import Session, default_session, words
from overlap_torch._tune.tune import check_arguments
from overlap_torch.plan import Plan, Problem
from overlap_torch.plan._names import enum_name
from overlap_torch.plan.types import Op

from . import shapes, tables
from .study import Study

CHUNKS = (1, 2, 4)


def by_copy_engines(problem: Problem, chunks: int, **how: Any) -> Plan:
    """By hand: sums to each part's rank, then results to all, by copy engines where memory is mapped: they take no SM."""
    engine = "copy_engine" if how["transport"] == "peer" else "any"
    with plan.programs.edit(problem, **how) as p:
        for share in p.chunks(chunks):
            if problem.op != Op.ALLGATHER_GEMM:
                for distance in range(1, p.world):
                    to = p.rank + distance
                    p.push(p.part(to, share), to=to, reduce=True, by=engine)
            if problem.op != Op.GEMM_REDUCESCATTER:
                for distance in range(1, p.world):
                    p.push(p.part(p.rank, share), to=p.rank + distance, by=engine)
        return p.plan()


PROGRAMS = (
    plan.programs.ring,
    plan.programs.double_ring,
    plan.programs.one_shot,
    plan.programs.two_shot,
    by_copy_engines,
)


def makers(files: Sequence[str]) -> Iterator[tuple[str, Callable[..., Plan]]]:
    """The makers of a problem's plans, by name."""
    for program in PROGRAMS:
        yield program.__name__, program
    for path in files:
        read = plan.programs.from_msccl if path.endswith(".xml") else plan.programs.from_mscclpp

        def imported(problem: Problem, path: str = path, read: Any = read, **how: Any) -> Plan:
            return read(path, problem, **how)

        yield Path(path).name, imported


def programs(
    problem: Problem, transport: str, files: Sequence[str], refused: Callable[[str], None]
) -> dict[str, Plan]:
    """By a name of one's own: all that can be made. Each refusal is told, with its reason."""
    kernels = ["library"]
    if transport != "gloo" and problem.op != Op.ALLGATHER_GEMM:
        kernels.append("sm90_pingpong")
    found: dict[str, Plan] = {}
    for name, make in makers(files):
        for kernel in kernels:
            for chunks in CHUNKS:
                try:
                    made = make(problem, chunks=chunks, kernel=kernel, transport=transport)
                except ValueError as error:  # a file has one op's collective
                    refused(f"{enum_name(problem.op)}: {name}: {error}")
                    continue
                found[f"{name}, {kernel}, {chunks}"] = made
    return found


def measured(
    session: Session,
    problem: Problem,
    job: argparse.Namespace,
    refused: Callable[[str], None],
) -> list[dict[str, Any]]:
    """A row for each mode: microseconds of the sequence, the planner's plan, and of each program that is right."""
    named = {
        "sequence": plan.templates.make_sequential(problem, session.machine),
        "planner": session.current(problem),
    }
    named |= programs(problem, job.transport, job.file, refused)
    plans: list[Plan] = []
    for one in named.values():
        if one not in plans:  # templates may come to the same
            plans.append(one)
    rows = []
    for mode in job.modes:
        times = session.measure(problem, plans, mode, job.turns)
        us = {}
        for name, one in named.items():
            index = plans.index(one)
            if index in times["right"]:
                us[name] = times["us"][index]
            else:
                refused(f"{words(problem)}: {name}: its result is not the sequence's")
        op = enum_name(problem.op)
        rows.append({"problem": words(problem), "op": op, "mode": mode, "us": us})
    return rows


def gains(row: dict[str, Any]) -> dict[str, float]:
    """By name of a template or file, the sequence's time by that of its best plan; and the planner's."""
    best: dict[str, float] = {}
    for title, us in row["us"].items():
        name = title.partition(",")[0]
        if name != "sequence":
            best[name] = max(best.get(name, 0.0), row["us"]["sequence"] / us)
    return best


def line(row: dict[str, Any]) -> str:
    """The speed-ups of the planner's plan and of the fastest program."""
    us = row["us"]
    fastest = min((name for name in us if name not in ("sequence", "planner")), key=us.get)
    return (
        f"{row['problem']:36} {row['mode']:4} planner {us['sequence'] / us['planner']:5.2f}x  "
        f"{us['sequence'] / us[fastest]:5.2f}x {fastest}"
    )


def by_name(rows: Sequence[dict[str, Any]]) -> str:
    """One line for a plan's name: geometric mean of its speed-ups over the sequence, and the lowest."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, gain in gains(row).items():
            found.setdefault(name, []).append(gain)
    lines = []
    for name, values in found.items():
        mean = tables.geometric_mean(values)
        lines.append(f"    {name:24} {mean:.3f} ({min(values):.3f}), {len(values)} shapes")
    return "\n".join(lines)


def all_rows(job: argparse.Namespace) -> Iterator[dict[str, Any]]:
    device = current_device()
    session = default_session(device, job.turns)
    world = dist.get_world_size()
    told: set[str] = set()

    def refused(why: str) -> None:
        if dist.get_rank() == 0 and why not in told:
            told.add(why)
            print(f"left out: {why}", file=sys.stderr)

    dtype = "bfloat16" if device.type == "cuda" else "float32"
    for op in job.ops:
        for shape in shapes.parse(job.shapes):
            problem = Problem(-(-shape.m // world) * world, shape.n, shape.k, dtype, world, op)
            yield from measured(session, problem, job, refused)


def summary(rows: Sequence[dict[str, Any]], job: argparse.Namespace) -> str:
    lines = []
    for op in job.ops:
        for mode in job.modes:
            lines.append(f"{op}, {mode}: mean (lowest) over the sequence, by the best of its plans")
            own = [row for row in rows if (row["op"], row["mode"]) == (op, mode)]
            lines.append(by_name(own))
    return "\n".join(lines)


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shapes", default="m_train", help="as of bench (default: m_train)")
    add("--op", default="all", help=f"comma-separated: {', '.join(_tune_command.OPS)}, all")
    add("--modes", default="call,row", help="comma-separated: call, row")
    add("--transport", choices=["nccl", "peer", "gloo"], help="default: peer, on CPU gloo")
    add("--turns", type=int, default=10)
    add("--file", action="append", default=[], help="an .xml or .json; repeatable")
    add("--json", help="a file for all times")


def prepare(args: argparse.Namespace) -> None:
    args.modes = tuple(args.modes.split(","))
    args.ops = _tune_command.ops_of(args.op)
    check_arguments(args.modes, 1, args.turns)
    shapes.parse(args.shapes)
    on_gpu = args.device != "cpu" and torch.cuda.is_available()
    args.transport = args.transport or ("peer" if on_gpu else "gloo")


STUDY = Study(options, all_rows, line, summary, prepare)
