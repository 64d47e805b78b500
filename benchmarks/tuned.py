"""``python -m benchmarks.tuned``: tuned plans beside the planner's own and the sequence, over random problems.

Each problem is tuned (``overlap_torch.tune``, without a cache), then the three are measured again, in turns. A plan's time
is the lowest of several medians of the slowest rank's times. Where two of the three are the same plan they are one.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import overlap_torch
from overlap_torch import _tune
from overlap_torch._launch import Ranks, current_device, launch
from overlap_torch.plan import Plan, Problem, machine, make_sequential, plan_for, set_plan

OPS = ("gemm_allreduce", "gemm_reducescatter", "allgather_gemm")


@dataclass(frozen=True)
class Job:
    """What each rank does."""

    problems: int
    most: int
    repeats: int
    medians: int
    turns: int
    seed: int
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


def lowest_medians(problem: Problem, plans: Sequence[Plan], job: Job) -> list[float]:
    """Microseconds of each plan, the same on all ranks."""
    device = current_device()
    function = getattr(overlap_torch, _tune.enum_name(problem.op))
    input, weight = _tune.operands(problem, device, dist.get_rank())
    flush = None
    if device.type == "cuda":
        flush = torch.empty(_tune.FLUSH_BYTES, dtype=torch.uint8, device=device)
    own: list[list[float]] = [[] for _ in plans]
    with torch.inference_mode():
        for turn in range(job.medians * job.turns):
            for index in range(len(plans)):
                index = (index + turn) % len(plans)
                set_plan(plans[index], device=device)
                function(input, weight)
                own[index].append(_tune._time_us(lambda: function(input, weight), "call", flush))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    slowest = [
        [max(times) for times in zip(*(rank[i] for rank in everyone), strict=True)]
        for i in range(len(plans))
    ]
    step = job.turns
    return [
        min(statistics.median(us[at : at + step]) for at in range(0, len(us), step))
        for us in slowest
    ]


def run_rank(job: Job) -> None:
    """What each rank does."""
    device, world = current_device(), dist.get_world_size()
    rows: list[dict[str, Any]] = []
    begin = time.monotonic()
    problems = random_problems(job.problems, world, device.type == "cuda", job.seed)
    for number, problem in enumerate(problems):
        sizes = (problem.m, problem.n, problem.k, problem.dtype)
        planned = plan_for(*sizes, device=device, op=problem.op)
        sequence = make_sequential(problem, machine(device))
        (one,) = overlap_torch.tune(
            [problem], device=device, most=job.most, repeats=job.repeats, cache=False
        )
        plans: list[Plan] = []
        for candidate in (sequence, planned, one.plan):
            if candidate not in plans:
                plans.append(candidate)
        us = lowest_medians(problem, plans, job) if len(plans) > 1 else [1.0]
        sequence_us, planned_us, tuned_us = (
            us[plans.index(candidate)] for candidate in (sequence, planned, one.plan)
        )
        rows.append(
            {
                "problem": _tune.words(problem),
                "plan": str(one.plan).partition(": ")[2],
                "untuned": sequence_us / planned_us,
                "tuned": sequence_us / tuned_us,
                "us": us if len(plans) > 1 else None,
            }
        )
        if dist.get_rank() == 0:
            row = rows[-1]
            print(
                f"{number + 1:4}/{len(problems)} {row['problem']:40} untuned {row['untuned']:5.2f}x"
                f"  tuned {row['tuned']:5.2f}x  {row['plan']}",
                flush=True,
            )
    if dist.get_rank() != 0:
        return
    for op in OPS:
        print(summary(op, [row for row in rows if row["problem"].startswith(op + " ")]))
    print(summary("all", rows))
    print(f"{time.monotonic() - begin:.0f} s", file=sys.stderr)
    if job.json is not None:
        with open(job.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


def summary(name: str, rows: Sequence[dict[str, Any]]) -> str:
    """One line: lowest and geometric mean of the speed-ups over the sequence."""

    def mean(column: str) -> float:
        return math.exp(statistics.fmean(math.log(row[column]) for row in rows))

    lowest = {column: min(row[column] for row in rows) for column in ("tuned", "untuned")}
    other = sum("sequential" not in row["plan"] for row in rows)
    return (
        f"{name:20} {len(rows)} problems, {other} not the sequence: tuned lowest {lowest['tuned']:.3f}x, mean "
        f"{mean('tuned'):.3f}x; untuned lowest {lowest['untuned']:.3f}x, mean {mean('untuned'):.3f}x"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs with these command line arguments; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tuned", description=__doc__)
    parser.add_argument("--problems", type=int, default=40, help="of each op (default: 40)")
    parser.add_argument("--most", type=int, default=4, help="plans beside the sequence")
    parser.add_argument("--repeats", type=int, default=10, help="turns of tuning")
    parser.add_argument("--medians", type=int, default=5, help="of which the lowest counts")
    parser.add_argument("--turns", type=int, default=5, help="behind each median")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", help="a file for all times")
    parser.add_argument("--world", type=int, help="ranks (default: all GPUs, or 2 on CPU)")
    parser.add_argument("--device", choices=["cuda", "cpu"])
    args = parser.parse_args(argv)
    try:
        ranks = Ranks.choose(args.world, args.device)
    except ValueError as error:
        parser.error(str(error))
    job = Job(
        args.problems, args.most, args.repeats, args.medians, args.turns, args.seed, args.json
    )
    launch(ranks, run_rank, job)
    return 0


if __name__ == "__main__":
    sys.exit(main())
