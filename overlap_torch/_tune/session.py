"""One call of tune on one rank: how the ranks agree on plans, measure them and choose."""

from __future__ import annotations

import statistics
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from overlap_torch._ops import allgather_gemm, gemm_allreduce, gemm_reducescatter
from overlap_torch._ops.group import group_name, process_group
from overlap_torch._tune import files
from overlap_torch._tune.board import Board
from overlap_torch._tune.choose import corrections_of, ranked
from overlap_torch._tune.measure import clocks_for, is_close, operands, scaled_keywords, time_us
from overlap_torch.plan import Machine, Plan, Problem, machine, set_plan, validate
from overlap_torch.plan._library import plan_of
from overlap_torch.plan._names import enum_name
from overlap_torch.plan.files import decode, encode, plain
from overlap_torch.plan.types import Invariance, Op, Recipe

_FUNCTIONS: dict[Op, Callable[..., Any]] = {
    Op.GEMM_ALLREDUCE: gemm_allreduce,
    Op.GEMM_REDUCESCATTER: gemm_reducescatter,
    Op.ALLGATHER_GEMM: allgather_gemm,
}
# A plan replaces the sequence if it needs less than this share of the sequence's time. A plan's medians differ by as much
# from one time to the next, on CPU by more.
_SHARE = {"cuda": 0.98, "cpu": 0.9}
# The second look lasts this long, because disturbances of brief calls come and go. Its turns are between these multiples of
# the first look's.
_LOOK_US, _LEAST_LONGER, _MOST_LONGER = 2e5, 2, 40
_APART_S = 1.0  # least time between the second look and a last one


@dataclass(frozen=True)
class Tuned:
    """The result for one problem.

    Attributes:
        problem: the tuned problem.
        mode: "call" or "row".
        plan: the op's plan from now on, on all ranks.
        times: (plan, microseconds) of all measured plans, the sequence first; a plan's time is the median over turns of the
            slowest rank's time. Empty if nothing was measured.
        source: "measured", "cache", or "kept: " and why the plan did not change.
    """

    problem: Problem
    mode: str
    plan: Plan
    times: tuple[tuple[Plan, float], ...]
    source: str

    @property
    def gain(self) -> float | None:
        """The sequence's time divided by the plan's; None if they were not measured."""
        us = [time for plan, time in self.times if plan == self.plan]
        return self.times[0][1] / us[0] if us else None


@dataclass
class _Measured:
    """The measurements of a problem, the same on all ranks; plans by index, the sequence first."""

    problem: Problem
    mode: str
    takes: bool
    plans: list[Plan]
    before: Plan  # the op's plan so far
    us: list[float]
    right: list[int]
    chosen: int
    ended_s: float = 0.0  # by this rank's clock


# Calls of tune.
_boards: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def words(problem: Problem) -> str:
    text = f"{enum_name(problem.op)} {problem.m}x{problem.n}x{problem.k}"
    if problem.invariance != Invariance.NONE:
        text += f" {enum_name(problem.invariance)}-invariant"
    if problem.recipe == Recipe.NONE:
        return text
    fast = " fast_accum" if problem.fast_accum else ""
    return f"{text} {enum_name(problem.dtype)} {enum_name(problem.recipe)}{fast}"


class Session:
    """One call of tune on one rank."""

    def __init__(
        self,
        name: str,
        members: dist.ProcessGroup,
        device: torch.device,
        most: int,
        repeats: int,
        cache: bool,
        plans: list[Plan],
    ) -> None:
        variables = torch.ops.overlap.environment()
        if variables["OVERLAP_PLANS"] == "0":
            raise ValueError("no plans can be tuned: OVERLAP_PLANS=0 turns them off")
        timeout_s = float(variables["OVERLAP_TIMEOUT_S"] or _timeout_s(members, device))
        _boards[members] = _boards.get(members, 0) + 1
        self.board = Board(
            store=dist.distributed_c10d._get_process_group_store(members),
            rank=members.rank(),
            world=members.size(),
            timeout_s=timeout_s,
            name=f"{name}/{_boards[members]}",
        )
        self.name, self.device, self.most, self.repeats = name, device, most, repeats
        self.more = plans
        self.machine: Machine = machine(device, name)
        self.environment = files.environment(device, self.machine, members.size())
        self.files = files.Files(self.environment) if cache else None
        self.measured: dict[int, _Measured] = {}  # by the index of problem and mode

    def agree_on(self, problems: list[Problem]) -> list[Problem]:
        """Rank 0's problems, without all-to-alls."""
        own = [plain(problem) for problem in problems if problem.op in _FUNCTIONS]
        return [Problem(**item) for item in self.board.broadcast(own)]

    def tune(self, index: int, problem: Problem, mode: str, takes: bool) -> Tuned:
        before = self.current(problem)
        offer = self.board.broadcast(self._offer(problem, mode) if self.board.rank == 0 else None)
        plans = [decode(code) for code in offer["plans"]]
        answers = self.board.gather(
            {"refused": [self._refusal(plan) for plan in plans], "environment": self.environment}
        )
        kept = self.board.broadcast(_kept(answers) if answers is not None else None)
        if kept["why"] or (offer["us"] and kept["plans"] != list(range(len(plans)))):
            why = kept["why"] or "what the cache has does not run on all ranks"
            if self.board.rank == 0:
                warnings.warn(
                    f"overlap_torch.tune: {words(problem)} keeps its plan: {why}", stacklevel=3
                )
            return Tuned(problem, mode, self._set(before, takes), (), f"kept: {why}")
        if offer["us"]:
            times = tuple(zip(plans, offer["us"], strict=True))
            return Tuned(problem, mode, self._set(plans[offer["chosen"]], takes), times, "cache")
        plans = [plans[index] for index in kept["plans"]]
        verdict = self.measure(problem, plans, mode)
        one = _Measured(problem, mode, takes, plans, before, **verdict)
        if one.chosen != 0:
            one.chosen = self._look_again(one)
        one.ended_s = time.monotonic()
        self.measured[index] = one
        return self._take(one)

    def to_look_at_again(self) -> list[int]:
        """The problems whose winner must be measured once more, the same on all ranks: those measured some time ago."""
        now = time.monotonic()
        return self.board.broadcast(
            [
                index
                for index, one in self.measured.items()
                if one.chosen != 0 and now - one.ended_s >= _APART_S
            ]
        )

    def look_once_more(self, index: int) -> Tuned:
        one = self.measured[index]
        one.chosen = self._look_again(one)
        return self._take(one)

    def _look_again(self, one: _Measured) -> int:
        """The plan that is chosen in the end. The fastest of several plans was perhaps only lucky. So it is measured again,
        longer, beside the sequence and the previous plan, and has to beat both. No plan with a wrong result is chosen."""
        places = [i for i in one.right if i in (0, one.chosen) or one.plans[i] == one.before]
        # The fastest plan comes last, because it has to gain over the previous plan, too.
        places.sort(key=lambda i: i == one.chosen)
        turns = int(_LOOK_US / sum(one.us[i] for i in places))
        turns = min(max(turns, _LEAST_LONGER * self.repeats), _MOST_LONGER * self.repeats)
        again = self.measure(one.problem, [one.plans[i] for i in places], one.mode, turns)
        us, taken = again["us"], 0
        for place in again["right"]:
            if us[place] < _SHARE[self.device.type] * us[taken]:
                taken = place
        return places[taken]

    def _take(self, one: _Measured) -> Tuned:
        """Sets the plan that was chosen, and remembers all times."""
        times = tuple((one.plans[i], one.us[i]) for i in one.right)
        if self.board.rank == 0 and self.files is not None:
            codes = [encode(plan) for plan, _ in times]
            chosen = one.right.index(one.chosen)
            self.files.write(one.problem, one.mode, codes, [us for _, us in times], chosen)
        plan = self._set(one.plans[one.chosen], one.takes)
        return Tuned(one.problem, one.mode, plan, times, "measured")

    def _set(self, plan: Plan, takes: bool) -> Plan:
        if takes:
            set_plan(plan, device=self.device, group=self.name)
        return plan

    def _offer(self, problem: Problem, mode: str) -> dict[str, Any]:
        """Rank 0's offer: the cache's plans and times, or the plans to measure, the sequence first."""
        entries = self.files.read(problem) if self.files is not None else {}
        found = entries.get((problem.m, mode))
        more = [encode(plan) for plan in self.more if plan.problem == problem]
        if found is not None and all(code in found.plans for code in more):
            return {"plans": found.plans, "us": found.us, "chosen": found.chosen}
        corrections = corrections_of(problem, mode, entries, self.machine)
        plans = ranked(problem, self.machine, self.most, corrections)
        codes = [encode(plan) for plan in plans]
        codes += [code for code in more if code not in codes]
        return {"plans": codes, "us": [], "chosen": 0}

    def _refusal(self, plan: Plan) -> str:
        """Why this rank cannot run the plan; "" if it can. Does not communicate."""
        try:
            validate(plan)
            before = self.current(plan.problem)
            set_plan(plan, device=self.device, group=self.name)
            set_plan(before, device=self.device, group=self.name)
        except (ValueError, RuntimeError) as error:
            return str(error).split("\n")[0]
        return ""

    def measure(
        self, problem: Problem, plans: list[Plan], mode: str, turns: int | None = None
    ) -> dict[str, Any]:
        """Runs the plans in turns, the sequence first, and leaves the problem's plan as it was. The results are the same on
        all ranks: microseconds of each plan, which plans are right, and which one to choose, by index."""
        before = self.current(problem)
        try:
            own = self._measure(problem, plans, mode, turns or self.repeats)
        finally:
            self._set(before, True)
        said = self.board.gather(own)
        return self.board.broadcast(self._decide(said) if said is not None else None)

    def current(self, problem: Problem) -> Plan:
        """The plan that the op would run now."""
        return plan_of(problem, self.device, self.name)

    def _measure(
        self, problem: Problem, plans: list[Plan], mode: str, turns: int
    ) -> dict[str, Any]:
        """Times by plan and turn in microseconds, and which plans' results equal the sequence's."""
        function = _FUNCTIONS[problem.op]
        input, weight = operands(problem, self.device, self.board.rank)
        keywords = scaled_keywords(problem, self.device, self.board.rank)
        if not problem.traits.gathers:
            keywords["invariance"] = enum_name(problem.invariance)

        def call() -> torch.Tensor:
            result = function(input, weight, group=self.name, **keywords)
            return result[0] if isinstance(result, tuple) else result

        right, us = [], [[] for _ in plans]
        with torch.inference_mode():
            expected = None
            for plan in plans:
                set_plan(plan, device=self.device, group=self.name)
                result = call()
                if expected is None:
                    expected = result
                right.append(is_close(result, expected))
            clocks = clocks_for(self.device, len(plans))
            for turn in range(turns):
                # Each turn begins with another plan, in the same order on all ranks.
                for index in (*range(turn % len(plans), len(plans)), *range(turn % len(plans))):
                    set_plan(plans[index], device=self.device, group=self.name)
                    us[index].append(time_us(call, mode, clocks[index]))
        return {"right": right, "us": us}

    def _decide(self, said: list[dict[str, Any]]) -> dict[str, Any]:
        """Each plan's time, from every rank's times, and the plan to choose."""
        plans = len(said[0]["us"])
        right = [i for i in range(plans) if i == 0 or all(rank["right"][i] for rank in said)]
        us = [
            statistics.median(
                max(turns) for turns in zip(*(rank["us"][i] for rank in said), strict=True)
            )
            for i in range(plans)
        ]
        best = min(right, key=lambda i: us[i])
        chosen = best if us[best] < _SHARE[self.device.type] * us[0] else 0
        return {"right": right, "us": us, "chosen": chosen}


def default_session(device: torch.device, repeats: int) -> Session:
    """The session of the default group, without a cache. Every rank makes it."""
    name = group_name(None)
    return Session(name, process_group(name), device, 1, repeats, False, [])


def _timeout_s(members: dist.ProcessGroup, device: torch.device) -> float:
    backend = members._get_backend(device)
    if getattr(backend, "options", None) is None:
        raise ValueError(
            f"no plans can be tuned: the group's backend for {device.type} tensors is {dist.get_backend(members)}, which "
            "runs none; give a group over gloo or NCCL"
        )
    return backend.options._timeout.total_seconds()


def _kept(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """The plans that all ranks can run, by index; or why none may be chosen."""
    for rank, answer in enumerate(answers):
        for name, value in answers[0]["environment"].items():
            theirs = answer["environment"].get(name)
            if theirs != value:
                return {"plans": [], "why": f"rank {rank} has {name} {theirs!r}, rank 0 {value!r}"}
        if answer["refused"][0]:
            return {"plans": [], "why": f"rank {rank} cannot run it: {answer['refused'][0]}"}
    count = len(answers[0]["refused"])
    plans = [i for i in range(count) if not any(answer["refused"][i] for answer in answers)]
    return {"plans": plans, "why": ""}
