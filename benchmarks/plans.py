"""Plans of a measured problem: the one in use, others from JSON, the planner's candidates."""

from __future__ import annotations

import json

import torch

from overlap_torch import plan as plan_api
from overlap_torch._ops.group import broadcast_integers
from overlap_torch.plan import Plan, Problem

# The ops that run by plans.
OPS = tuple(name.lower() for name in plan_api.types.Op.__members__)


def parse(text: str) -> list[Plan]:
    """One plan or a list of plans, as ``plan.files.to_dict`` gives them, from JSON; lines of a benchmark's JSON output do too.

    Each plan once, in the order in which the text names them last; lines without a plan are passed over.

    Raises:
        ValueError: no JSON, or no valid plan.
    """
    try:
        entries = json.loads(text)
    except json.JSONDecodeError:
        entries = [json.loads(line) for line in text.splitlines() if line.strip()]
    if isinstance(entries, dict):
        entries = [entries]
    plans: list[Plan] = []
    for entry in entries:
        if isinstance(entry, dict) and "kind" in entry:
            entry = entry.get("plan")
            if entry is None:
                continue
        plan = plan_api.files.from_dict(entry)
        if plan in plans:
            plans.remove(plan)  # named again: its last place counts
        plans.append(plan)
    return plans


def candidates(problem: Problem, device: torch.device, group: str) -> list[Plan]:
    """Rank 0's candidates of the planner, on every rank; for scaled operands also the candidates that it does not
    weigh, because nobody has measured them. Collective."""
    scaled = problem.recipe != plan_api.types.Recipe.NONE
    found = plan_api.candidates(problem, plan_api.machine(device, group), scaled)
    text = json.dumps([plan_api.files.encode(plan) for plan in found])
    shared = bytes(broadcast_integers(list(text.encode()), group))
    return [plan_api.files.decode(code) for code in json.loads(shared)]
