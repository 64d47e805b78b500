"""``python -m benchmarks tuned``: tuned plans beside the planner's own and the sequence, over random problems.

The problems are tuned (``overlap_torch.tune``, without a cache), then the three are measured again, in turns. A plan's time
is the lowest of several medians of the slowest rank's times; a median of each problem is measured before the next one of
any, as times move between levels that last for seconds. Where two of the three are the same plan they are one.

With ``--best N`` the model's first N candidates are measured, too, and then the fastest of them beside the three. This
shows how much the tuner has missed.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import geometric_mean
from typing import Any

import torch.distributed as dist

import overlap_torch
from overlap_torch._tools.arguments import count
from overlap_torch._tools.launch import current_device
from overlap_torch._tune.choose import ranked
from overlap_torch._tune.command import OPS
from overlap_torch._tune.session import Session, default_session, words
from overlap_torch.plan import Plan, Problem, machine
from overlap_torch.plan.templates import make_sequential

from .study import Option, Study

NEAR = 1.03  # of the best one's time


def random_problems(count: int, world: int, on_gpu: bool, seed: int) -> list[Problem]:
    """`count` for each op, with sizes that are spread evenly by their logarithms."""
    generator = random.Random(seed)

    def size(least: int, most: int, multiple: int) -> int:
        value = math.exp(generator.uniform(math.log(least), math.log(most)))
        return max(multiple, round(value / multiple) * multiple)

    found = []
    for op in OPS:
        for _ in range(count):
            if on_gpu:
                m, n, k = size(64, 16384, 1), size(512, 16384, 8), size(512, 16384, 8)
            else:
                m, n, k = size(64, 4096, 1), size(64, 1024, 8), size(64, 1024, 8)
            dtype = "bfloat16" if on_gpu else "float32"
            found.append(Problem(-(-m // world) * world, n, k, dtype, world, op))
    return found


@dataclass
class Entry:
    """A problem and its plans, the sequence first."""

    problem: Problem
    planned: Plan
    tuned: Plan
    plans: list[Plan]
    medians: list[list[float]]  # by pass, microseconds of each plan
    best: Plan | None = None  # the fastest of many

    def us(self, plan: Plan) -> float:
        index = self.plans.index(plan)
        return min(one[index] for one in self.medians) if self.medians else 1.0


def fastest(session: Session, problem: Problem, job: argparse.Namespace) -> Plan:
    """The fastest of the sequence and the model's first candidates; the same on all ranks."""
    plans = ranked(problem, session.machine, job.best)
    found = session.measure(problem, plans, "call", 2 * job.turns)
    return plans[min(found["right"], key=lambda i: found["us"][i])]


def prepare(session: Session, problems: Sequence[Problem], job: argparse.Namespace) -> list[Entry]:
    """Tunes them all."""
    device = session.device
    planned = [session.current(problem) for problem in problems]
    tuned = overlap_torch.tune(
        problems,
        device=device,
        most=job.most,
        repeats=job.repeats,
        cache=False,
        progress=sys.stderr.isatty(),
    )
    entries = []
    for problem, by_model, one in zip(problems, planned, tuned, strict=True):
        entry = Entry(problem, by_model, one.plan, [make_sequential(problem, machine(device))], [])
        entry.best = fastest(session, problem, job) if job.best else None
        for plan in (by_model, one.plan, entry.best):
            if plan is not None and plan not in entry.plans:
                entry.plans.append(plan)
        entries.append(entry)
    return entries


def measured(job: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each problem."""
    device = current_device()
    session = default_session(device, job.turns)
    problems = random_problems(job.problems, dist.get_world_size(), device.type == "cuda", job.seed)
    entries = prepare(session, problems, job)
    for _ in range(job.medians):
        for entry in entries:
            if len(entry.plans) > 1:
                found = session.measure(entry.problem, entry.plans, "call")
                entry.medians.append(found["us"])
    yield from map(row_of, entries)


def line(row: dict[str, Any]) -> str:
    missed = f"  {row['of_best']:.2f} of the best" if "of_best" in row else ""
    return f"{row['problem']:40} untuned {row['untuned']:5.2f}x  tuned {row['tuned']:5.2f}x{missed}  {row['plan']}"


def row_of(entry: Entry) -> dict[str, Any]:
    sequence_us, tuned_us = entry.us(entry.plans[0]), entry.us(entry.tuned)
    row = {
        "problem": words(entry.problem),
        "plan": str(entry.tuned).partition(": ")[2],
        "sequence": entry.tuned == entry.plans[0],
        "untuned": sequence_us / entry.us(entry.planned),
        "tuned": sequence_us / tuned_us,
        "us": entry.medians,
    }
    if entry.best is not None:
        row |= {
            "best": str(entry.best).partition(": ")[2],
            "of_best": tuned_us / entry.us(entry.best),
        }
    return row


def summary(name: str, rows: Sequence[dict[str, Any]], best: int = 0) -> str:
    """One line: lowest and geometric mean of the speed-ups over the sequence."""

    columns = {column: [row[column] for row in rows] for column in ("tuned", "untuned")}
    tuned, untuned = (
        f"lowest {min(column):.3f}x, mean {geometric_mean(column):.3f}x"
        for column in columns.values()
    )
    other = sum(not row["sequence"] for row in rows)
    line = f"{name:20} {len(rows)} problems, {other} not the sequence: tuned {tuned}; untuned {untuned}"
    if best:
        near = sum(row["of_best"] <= NEAR for row in rows) / len(rows)
        line += f"; {near:.0%} within {NEAR - 1:.0%} of the best of {best}"
    return line


def summaries(rows: Sequence[dict[str, Any]], job: argparse.Namespace) -> str:
    """A line for each op, and one for all."""
    by_op = {op: [row for row in rows if row["problem"].startswith(op + " ")] for op in OPS}
    return "\n".join(summary(op, own, job.best) for op, own in {**by_op, "all": rows}.items())


OPTIONS = (
    Option("--problems", type=count, default=40, help="of each op (default: 40)"),
    Option("--most", type=count, default=4, help="plans beside the sequence"),
    Option("--repeats", type=count, default=10, help="turns of tuning"),
    Option("--medians", type=count, default=5, help="the lowest counts"),
    Option("--turns", type=count, default=15, help="for each median"),
    Option("--seed", type=int, default=1),
    Option(
        "--best",
        type=partial(count, least=0),
        default=0,
        metavar="N",
        help="of the first N candidates",
    ),
)


STUDY = Study(OPTIONS, measured, line, summaries)
