"""``python -m benchmarks.tuned``: tuned plans beside the planner's own and the sequence, over random problems.

The problems are tuned (``overlap_torch.tune``, without a cache), then the three are measured again, in turns. A plan's time
is the lowest of several medians of the slowest rank's times; a median of each problem is measured before the next one of
any, as times move between levels that last for seconds. Where two of the three are the same plan they are one.

With ``--best N`` the model's first N candidates are measured, too, and the fastest of these then beside the three: how
much the tuner has missed.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

import overlap_torch
from overlap_torch._tools.launch import Ranks, current_device, launch
from overlap_torch._tune.command import OPS
from overlap_torch._tune.session import Session, default_session, words
from overlap_torch.plan import Plan, Problem, machine
from overlap_torch.plan.templates import make_sequential

from . import tables

NEAR = 1.03  # of the best one's time


@dataclass(frozen=True)
class Job:
    """The work of each rank."""

    problems: int
    most: int
    repeats: int
    medians: int
    turns: int
    seed: int
    best: int
    json: str | None


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


def fastest(session: Session, problem: Problem, job: Job) -> Plan:
    """The fastest of the sequence and the model's first candidates; the same on all ranks."""
    plans = session.ranked(problem, job.best)
    found = session.measure(problem, plans, "call", 2 * job.turns)
    return plans[min(found["right"], key=lambda i: found["us"][i])]


def prepare(session: Session, problems: Sequence[Problem], job: Job) -> list[Entry]:
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


def run_rank(job: Job) -> None:
    """Does the work of each rank."""
    begin = time.monotonic()
    device = current_device()
    session = default_session(device, job.turns)
    problems = random_problems(job.problems, dist.get_world_size(), device.type == "cuda", job.seed)
    entries = prepare(session, problems, job)
    for _ in range(job.medians):
        for entry in entries:
            if len(entry.plans) > 1:
                found = session.measure(entry.problem, entry.plans, "call")
                entry.medians.append(found["us"])
    if dist.get_rank() != 0:
        return
    rows = [row_of(entry) for entry in entries]
    for number, row in enumerate(rows):
        missed = f"  {row['of_best']:.2f} of the best" if job.best else ""
        print(
            f"{number + 1:4}/{len(rows)} {row['problem']:40} untuned {row['untuned']:5.2f}x"
            f"  tuned {row['tuned']:5.2f}x{missed}  {row['plan']}"
        )
    for op in OPS:
        print(summary(op, [row for row in rows if row["problem"].startswith(op + " ")], job.best))
    print(summary("all", rows, job.best))
    print(f"{time.monotonic() - begin:.0f} s", file=sys.stderr)
    if job.json is not None:
        with open(job.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


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

    def mean(column: str) -> float:
        return tables.geometric_mean(row[column] for row in rows)

    lowest = {column: min(row[column] for row in rows) for column in ("tuned", "untuned")}
    other = sum(not row["sequence"] for row in rows)
    line = (
        f"{name:20} {len(rows)} problems, {other} not the sequence: tuned lowest {lowest['tuned']:.3f}x, mean "
        f"{mean('tuned'):.3f}x; untuned lowest {lowest['untuned']:.3f}x, mean {mean('untuned'):.3f}x"
    )
    if best:
        near = sum(row["of_best"] <= NEAR for row in rows) / len(rows)
        line += f"; {near:.0%} within {NEAR - 1:.0%} of the best of {best}"
    return line


def main(argv: Sequence[str] | None = None) -> int:
    """Runs with these command line arguments; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tuned", description=__doc__)
    parser.add_argument(
        "--problems", type=int, default=40, help="problems of each op (default: 40)"
    )
    parser.add_argument("--most", type=int, default=4, help="plans beside the sequence")
    parser.add_argument("--repeats", type=int, default=10, help="turns of tuning")
    parser.add_argument("--medians", type=int, default=5, help="medians; the lowest counts")
    parser.add_argument("--turns", type=int, default=15, help="turns for each median")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--best", type=int, default=0, metavar="N", help="compare with the first N candidates"
    )
    parser.add_argument("--json", help="a file for all times")
    parser.add_argument("--world", type=int, help="ranks (default: all GPUs, or 2 on CPU)")
    parser.add_argument("--device", choices=["cuda", "cpu"])
    args = parser.parse_args(argv)
    try:
        ranks = Ranks.choose(args.world, args.device)
    except ValueError as error:
        parser.error(str(error))
    job = Job(
        args.problems, args.most, args.repeats, args.medians, args.turns, args.seed, args.best,
        args.json,
    )  # fmt: skip
    launch(ranks, run_rank, job)
    return 0


if __name__ == "__main__":
    sys.exit(main())
