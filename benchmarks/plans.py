"""Plans of a measured problem: the one in use, others from JSON, the planner's candidates."""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch

from overlap_torch import plan as plan_api
from overlap_torch._ops.group import broadcast_integers
from overlap_torch.plan import Plan, Problem
from overlap_torch.plan._library import plan_of

__all__ = ["OPS", "MeasuredProblem", "Plan", "parse"]

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


@dataclass(frozen=True)
class MeasuredProblem:
    """A problem on this rank's device in the default group, and the plan table's entry for it."""

    problem: Problem
    device: torch.device
    group: str

    def fitting(self, text: str) -> list[Plan]:
        """The plans in JSON that are for this problem."""
        return [plan for plan in parse(text) if plan.problem == self.problem]

    def current(self) -> Plan:
        """The plan that the op uses now."""
        return plan_of(self.problem, self.device, self.group)

    def set(self, plan: Plan) -> None:
        """Makes the op use the plan for this problem. Collective: every rank sets the same."""
        plan_api.set_plan(plan, device=self.device, group=self.group)

    def clear(self) -> None:
        """Gives the planner back all problems of the group. Collective."""
        plan_api.clear_plans(self.group)

    def candidates(self) -> list[Plan]:
        """Rank 0's candidates of the planner, on every rank; for scaled operands also the candidates that it does not
        weigh, because nobody has measured them. Collective."""
        machine = plan_api.machine(self.device, self.group)
        scaled = self.problem.recipe != plan_api.types.Recipe.NONE
        found = plan_api.candidates(self.problem, machine, scaled)
        text = json.dumps([plan_api.files.encode(plan) for plan in found])
        shared = bytes(broadcast_integers(list(text.encode()), self.group))
        return [plan_api.files.decode(code) for code in json.loads(shared)]
