"""The choice of plans that are worth measuring, and corrections of the cost model for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import geometric_mean
from typing import Any

from overlap_torch._tune import files
from overlap_torch.plan import Machine, Plan, Problem, candidates, predict
from overlap_torch.plan._names import enum_name
from overlap_torch.plan.files import decode
from overlap_torch.plan.templates import make_sequential


def way(plan: Plan) -> tuple[str, ...]:
    """The plan's kernel and transport, without its chunks."""
    chunk, resources = plan.chunks[0], plan.resources
    names = map(enum_name, (plan.schedule, plan.kernel, plan.collective, plan.layout))
    numbers = map(str, (chunk.max_ctas, resources.lanes, int(resources.window)))
    return (*names, enum_name(chunk.transport), *numbers, str(len(plan.program.transfers)))


def family(plan: Plan) -> tuple[str, ...]:
    """The properties that plans of one problem share across M: the way, the number of chunks, and whether the ends are
    small."""
    tiles = [one.tiles for one in plan.chunks]
    mean = sum(tiles) / len(tiles)
    ends = (
        "small" if end < 0.7 * mean else "large" if end > 1.4 * mean else ""
        for end in (tiles[0], tiles[-1])
    )
    return (*way(plan), str(len(tiles)), *ends)


def ranked(
    problem: Problem, on: Machine, most: int, corrections: Callable[[Plan], float] | None = None
) -> list[Plan]:
    """The sequence, and up to ``most`` other candidates: the best of each way to communicate first, then by time."""
    sequence = make_sequential(problem, on)

    def expected(plan: Plan) -> float:
        us = predict(plan, on).total_us
        return us * corrections(plan) if corrections is not None else us

    others = sorted(
        (one for one in candidates(problem, on, all=True) if one != sequence), key=expected
    )
    firsts: dict[tuple[Any, ...], Plan] = {}
    for plan in others:
        own = (plan.kernel, plan.collective, plan.chunks[0].transport, plan.resources.window)
        firsts.setdefault(own, plan)
    chosen = list(firsts.values())[:most]
    chosen += [plan for plan in others if plan not in chosen][: most - len(chosen)]
    return [sequence, *chosen]


def corrections_of(
    problem: Problem, mode: str, entries: dict[tuple[int, str], files.Entry], on: Machine
) -> Callable[[Plan], float] | None:
    """The model's error for a plan: its family's at the nearest M, else its way's, else all plans'."""
    families: dict[tuple[str, ...], tuple[float, float]] = {}  # how far away, measured by expected
    for (m, entry_mode), entry in entries.items():
        if entry_mode != mode:
            continue
        distance = abs(math.log(m / problem.m)) if m > 0 and problem.m > 0 else math.inf
        for code, us in zip(entry.plans, entry.us, strict=True):
            plan = decode(code)
            expected = predict(plan, on).total_us
            nearest, _ = families.get(family(plan), (math.inf, 1.0))
            if distance < nearest and math.isfinite(expected) and expected > 0.0:
                families[family(plan)] = (distance, us / expected)
    if not families:
        return None
    length = len(way(make_sequential(problem, on)))
    ways: dict[tuple[str, ...], list[float]] = {}
    for one, (_, ratio) in families.items():
        ways.setdefault(one[:length], []).append(ratio)
    usual = geometric_mean([ratio for _, ratio in families.values()])

    def correction(plan: Plan) -> float:
        if family(plan) in families:
            return families[family(plan)][1]
        return geometric_mean(ways[way(plan)]) if way(plan) in ways else usual

    return correction
