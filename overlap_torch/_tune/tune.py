"""Plans by measuring: :func:`tune`; ``OVERLAP_TUNE=1`` calls it at each problem's first call.

Rank 0 alone reads the cache and decides; all ranks plan from what it sends, over the store of the group. So no rank can
come to another plan than the others, and none makes a collective call that another leaves out. For each problem:

1. rank 0 says which plans to measure, or which one the cache has;
2. every rank says which of them it can run, and what it was built from; what one rank cannot run none does;
3. all run the same plans in the same order, a fixed number of times, and send their times;
4. rank 0 takes the slowest rank's time of each turn, and their median of each plan, and says which plan it is;
5. what won by that is measured again and longer, and once more when the other problems have been: times move between
   levels that last for seconds.

Every wait has the group's deadline, and says which rank did not come.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.compiler import is_compiling
from torch.utils._python_dispatch import _get_current_dispatch_mode

from overlap_torch._ops import allgather_gemm, eager, gemm_allreduce, gemm_reducescatter, scaled
from overlap_torch._ops.group import Group, group_name, process_group
from overlap_torch._tune import files
from overlap_torch.plan import (
    Machine,
    Plan,
    Problem,
    candidates,
    machine,
    predict,
    set_plan,
    validate,
)
from overlap_torch.plan._library import plan_of
from overlap_torch.plan._names import enum_name
from overlap_torch.plan.files import decode, encode, plain
from overlap_torch.plan.templates import make_sequential
from overlap_torch.plan.types import Op, Recipe

MODES = ("call", "row")
_ROW = 4  # calls
FLUSH_BYTES = 256 << 20  # more than the L2 cache of any GPU
_FUNCTIONS: dict[Op, Callable[..., Any]] = {
    Op.GEMM_ALLREDUCE: gemm_allreduce,
    Op.GEMM_REDUCESCATTER: gemm_reducescatter,
    Op.ALLGATHER_GEMM: allgather_gemm,
}
# A plan is taken in the sequence's place if it needs less than this share of its time: what the same plan's medians
# differ by from one time to the next, and on CPU more.
_SHARE = {"cuda": 0.98, "cpu": 0.9}
# The second look lasts so long, as what disturbs brief calls comes and goes; in turns, so many times the first one's.
_LOOK_US, _LEAST_LONGER, _MOST_LONGER = 2e5, 2, 40
_APART_S = 1.0  # between the second look and the last one, at least; else there is no last one


@dataclass(frozen=True)
class Tuned:
    """The result for one problem.

    Attributes:
        problem: it.
        mode: "call" or "row".
        plan: what the op runs by from now on, on all ranks.
        times: (plan, microseconds) of all that were measured, the sequence first; a plan's time is the median over turns
            of the slowest rank's. Empty if nothing was measured.
        source: "measured", "cache", or "kept: " and why the plan is as before.
    """

    problem: Problem
    mode: str
    plan: Plan
    times: tuple[tuple[Plan, float], ...]
    source: str

    @property
    def gain(self) -> float | None:
        """The sequence's time by the plan's; None if they were not measured."""
        us = [time for plan, time in self.times if plan == self.plan]
        return self.times[0][1] / us[0] if us else None


@dataclass
class _Measured:
    """The measurements of a problem, the same on all ranks; plans by index, the sequence first."""

    problem: Problem
    mode: str
    takes: bool
    plans: list[Plan]
    before: Plan  # what the op ran by
    us: list[float]
    right: list[int]
    chosen: int
    ended_s: float = 0.0  # by this rank's clock


@dataclass
class _Board:
    """The messages between ranks over their group's store, one turn after the other. Keys go once they were read."""

    store: Any
    rank: int
    world: int
    timeout_s: float
    name: str
    turn: int = 0
    old: list[str] = field(default_factory=list)

    def gather(self, own: Any) -> list[Any] | None:
        """Every rank's on rank 0, by rank; None on the others."""
        self._next(self.rank != 0, str(self.rank), own)
        if self.rank != 0:
            return None
        said = [own] + [self._hear(str(rank), rank) for rank in range(1, self.world)]
        self._forget()
        return said

    def broadcast(self, own: Any) -> Any:
        """Rank 0's on all."""
        self._next(self.rank == 0, "all", own)
        if self.rank == 0:
            return json.loads(json.dumps(own))
        said = self._hear("all", 0)
        self._forget()
        return said

    def close(self) -> None:
        """A later group of the same name on the same store must not find what was said here."""
        if self.gather(None) is not None and self.world > 1:
            for rank in range(1, self.world):
                self.store.delete_key(self._key(str(rank)))

    def _next(self, says: bool, who: str, own: Any) -> None:
        self.turn += 1
        if says and self.world > 1:
            key = self._key(who)
            self.store.set(key, json.dumps(own))
            self.old.append(key)

    def _key(self, who: str) -> str:
        return f"overlap_torch/tune/{self.name}/{self.turn}/{who}"

    def _forget(self) -> None:
        # Whoever has said something now has read what was said to it before.
        for key in self.old:
            self.store.delete_key(key)
        self.old.clear()

    def _hear(self, who: str, rank: int) -> Any:
        key, pause_s = self._key(who), 0.001
        deadline = time.monotonic() + self.timeout_s
        # Polled: the store's own wait keeps other threads from it.
        while not self.store.check([key]):
            if time.monotonic() >= deadline:
                raise RuntimeError(
                    f"tune: rank {self.rank} heard nothing from rank {rank} within {self.timeout_s:g} s. It died, or "
                    "does not call tune: every rank of the group has to."
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.02)
        return json.loads(self.store.get(key))


_boards: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = (
    weakref.WeakKeyDictionary()
)  # calls of tune


def tune(
    problems: Iterable[Problem] | None = None,
    *,
    modes: Sequence[str] = ("call",),
    group: Group = None,
    device: torch.device | str | None = None,
    most: int = 4,
    repeats: int = 10,
    cache: bool = True,
    progress: bool = False,
    plans: Iterable[Plan] = (),
) -> list[Tuned]:
    """Measures plans for problems, sets the fastest, and remembers the times. Every rank of the group calls it.

    The sequence is always measured, and stays unless another plan is clearly faster: nothing gets slower. The cost model
    says which others are worth it, corrected by what was measured nearby. Times in the cache are
    not measured again; a damaged, foreign or unwritable cache is no error. Where ranks differ, rank
    0's ``problems`` hold.

    Args:
        problems: with the group's number of ranks; None: all that this process has called so far. All-to-alls, which
            have one plan, are left out.
        modes: of "call" (one call at a time, with cold caches) and "row" (calls back to back). The op runs by the
            first one's plan; the others are remembered. On GPUs the host's time is in neither.
        group: as in :func:`overlap_torch.gemm_allreduce`.
        device: None: the current CUDA device, or the CPU where there is none.
        most: plans to measure beside the sequence, 1 or more.
        repeats: turns, 1 or more; each plan runs once a turn.
        cache: whether to read and write ``$OVERLAP_CACHE``, or ``overlap_torch`` in the user's cache folder.
        progress: whether rank 0 draws a bar on stderr, or writes lines where that is no terminal.
        plans: to measure as well, for those of the problems that are theirs: what was edited, or has a program.

    Returns:
        One for each problem and mode, in order; the same on all ranks.

    Raises:
        ValueError: an argument that is not allowed, inside a CUDA graph's capture, or a problem of another number of ranks.
        RuntimeError: a rank did not come within the group's timeout.
    """
    check_arguments(modes, most, repeats)
    name = group_name(group)
    members = process_group(name)
    where = torch.device(device) if device is not None else _usual_device()
    if where.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ValueError("tune cannot run inside a CUDA graph's capture: call it before")
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    if problems is None:
        wanted = [problem for problem, _ in called(name, where.type)]
    else:
        wanted = list(problems)
    session = Session(name, members, where, most, repeats, cache, list(plans))
    wanted = session.agree_on(wanted)
    for problem in wanted:
        if problem.world_size != members.size():
            raise ValueError(
                f"tune: {problem} is for {problem.world_size} ranks, but the group has {members.size()}"
            )
    pairs = [(one, mode) for one in wanted for mode in modes]
    draws = progress and session.board.rank == 0
    results = []
    for index, (problem, mode) in enumerate(pairs):
        if draws:
            draw_bar(index, len(pairs), f"{words(problem)} {mode}")
        results.append(session.tune(index, problem, mode, takes=mode == modes[0]))
    for index in session.to_look_at_again():
        if draws:
            draw_bar(index, len(pairs), f"{words(pairs[index][0])} again")
        results[index] = session.look_once_more(index)
    if draws and wanted:
        draw_bar(len(results), len(results), "done")
    session.board.close()
    return results


def check_arguments(modes: Sequence[str], most: int, repeats: int) -> None:
    if isinstance(modes, str) or not modes or any(mode not in MODES for mode in modes):
        raise ValueError(f"modes is {modes!r}, allowed are sequences of {', '.join(MODES)}")
    if most < 1 or repeats < 1:
        raise ValueError(f"most is {most} and repeats {repeats}, allowed are 1 and more")


def _usual_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def called(group: str, device_type: str) -> list[tuple[Problem, int]]:
    """The problems that this process has called in the group on such devices, and how often."""
    found: dict[str, tuple[Problem, int]] = {}
    for row in torch.ops.overlap.plan_table():
        if row["group"] != group or row["device"] != device_type:
            continue
        problem = Problem(
            *(int(row[size]) for size in ("m", "n", "k")),
            row["input_dtype"],
            int(row["world_size"]),
            row["op"],
            row["recipe"],
            row["output_dtype"],
            row["fast_accum"] == "1",
        )
        _, calls = found.get(repr(problem), (problem, 0))
        found[repr(problem)] = (problem, calls + int(row["calls"]))
    return list(found.values())


def words(problem: Problem) -> str:
    text = f"{enum_name(problem.op)} {problem.m}x{problem.n}x{problem.k}"
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
        _boards[members] = _boards.get(members, 0) + 1
        timeout_s = float(os.environ.get("OVERLAP_TIMEOUT_S") or _timeout_s(members, device))
        self.board = _Board(
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
        """Rank 0's, but all-to-alls."""
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
        """The problems whose winner is to be measured once more, the same on all ranks: those that
        were measured a while ago.
        """
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
        """The plan that is taken in the end. The fastest of several was lucky, too: beside the
        sequence and the previous plan, and longer, it has to gain once more over both. A plan
        whose results were wrong, then or now, is not taken.
        """
        places = [i for i in one.right if i in (0, one.chosen) or one.plans[i] == one.before]
        # The fastest comes last: it has to gain over the one from before, too.
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
        """Rank 0's: the cache's plans and times, or what is to be measured, the sequence first."""
        entries = self.files.read(problem) if self.files is not None else {}
        found = entries.get((problem.m, mode))
        more = [encode(plan) for plan in self.more if plan.problem == problem]
        if found is not None and all(code in found.plans for code in more):
            return {"plans": found.plans, "us": found.us, "chosen": found.chosen}
        corrections = _corrections(problem, mode, entries, self.machine)
        plans = ranked(problem, self.machine, self.most, corrections)
        codes = [encode(plan) for plan in plans]
        codes += [code for code in more if code not in codes]
        return {"plans": codes, "us": [], "chosen": 0}

    def _refusal(self, plan: Plan) -> str:
        """Why this rank cannot run it; "" if it can. Nothing is communicated."""
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
        """Runs them in turns, the sequence first among them, and leaves the problem's plan as it was. The same on all ranks:
        microseconds of each, which of them are right, and which one is to be taken, by index."""
        before = self.current(problem)
        try:
            own = self._measure(problem, plans, mode, turns or self.repeats)
        finally:
            self._set(before, True)
        said = self.board.gather(own)
        return self.board.broadcast(self._decide(said) if said is not None else None)

    def share(self, own: Any) -> Any:
        """Rank 0's, on all ranks."""
        return self.board.broadcast(own)

    def ranked(self, problem: Problem, most: int) -> list[Plan]:
        """The sequence, and up to ``most`` plans, as this rank's machine has them."""
        return ranked(problem, self.machine, most)

    def current(self, problem: Problem) -> Plan:
        """The plan that the op would run now."""
        return plan_of(problem, self.device, self.name)

    def _measure(
        self, problem: Problem, plans: list[Plan], mode: str, turns: int
    ) -> dict[str, Any]:
        """Times by plan and turn in microseconds, and which plans' results are the sequence's."""
        function = _FUNCTIONS[problem.op]
        input, weight = operands(problem, self.device, self.board.rank)
        keywords = _scaled_keywords(problem, self.device, self.board.rank)

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
                right.append(_close(result, expected))
            clocks = _clocks(self.device, len(plans))
            for turn in range(turns):
                # Each turn begins with another plan, in the same order on all ranks.
                for index in (*range(turn % len(plans), len(plans)), *range(turn % len(plans))):
                    set_plan(plans[index], device=self.device, group=self.name)
                    us[index].append(_time_us(call, mode, clocks[index]))
        return {"right": right, "us": us}

    def _decide(self, said: list[dict[str, Any]]) -> dict[str, Any]:
        """Each plan's time, of every rank's times, and the plan to take."""
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


def session(device: torch.device, repeats: int) -> Session:
    """The session of the default group, without a cache. Every rank makes it."""
    name = group_name(None)
    return Session(name, process_group(name), device, 1, repeats, False, [])


def _timeout_s(members: dist.ProcessGroup, device: torch.device) -> float:
    return members._get_backend(device).options._timeout.total_seconds()


def _kept(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """The plans that all ranks can run, by index; or why none may be taken."""
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


# --- what is measured -----------------------------------------------------------------------------------------


def way(plan: Plan) -> tuple[str, ...]:
    """How it computes and communicates, whatever its chunks."""
    chunk, resources = plan.chunks[0], plan.resources
    names = map(enum_name, (plan.schedule, plan.kernel, plan.collective, plan.layout))
    numbers = map(str, (chunk.max_ctas, resources.lanes, int(resources.window)))
    return (*names, enum_name(chunk.transport), *numbers, str(len(plan.program.transfers)))


def family(plan: Plan) -> tuple[str, ...]:
    """The properties that plans of one problem for other M share: the way, how many chunks, and
    whether the ends are small.
    """
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


def _corrections(
    problem: Problem,
    mode: str,
    entries: dict[tuple[int, str], files.Entry],
    on: Machine,
) -> Callable[[Plan], float] | None:
    """By how much the model is off for a plan: as for its family at the nearest M, else for its way, else for all."""
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
    usual = _mean([ratio for _, ratio in families.values()])

    def correction(plan: Plan) -> float:
        if family(plan) in families:
            return families[family(plan)][1]
        return _mean(ways[way(plan)]) if way(plan) in ways else usual

    return correction


def _mean(ratios: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios)))


def operands(
    problem: Problem, device: torch.device, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and weight of one rank, normally distributed: a GPU's clock depends on what it multiplies."""
    dtype = getattr(torch, enum_name(problem.dtype))
    is_scaled = problem.recipe != Recipe.NONE
    # Operands that are cast are drawn before; and no GEMM takes two operands of e5m2.
    drawn = torch.bfloat16 if is_scaled else dtype
    weight_dtype = torch.float8_e4m3fn if is_scaled else dtype
    generator = torch.Generator(device).manual_seed(rank)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=drawn)

    input, weight = make(_input_rows(problem), problem.k), make(problem.n, problem.k)
    return input.to(dtype), weight.to(weight_dtype)


def _input_rows(problem: Problem) -> int:
    if problem.op == Op.ALLGATHER_GEMM:
        return problem.m // problem.world_size
    return problem.m


def _scaled_keywords(problem: Problem, device: torch.device, rank: int) -> dict[str, Any]:
    """The ops' keywords beside the operands: scales from 1/2 to 2, and the problem's own. None without scales."""
    if problem.recipe == Recipe.NONE:
        return {}
    recipe = enum_name(problem.recipe).partition("_")[0]
    shapes = scaled.scale_shapes(recipe, _input_rows(problem), problem.n, problem.k)
    generator = torch.Generator(device).manual_seed(rank)
    scale_input, scale_weight = (
        2 ** (2 * torch.rand(shape, generator=generator, device=device) - 1) for shape in shapes
    )
    of_input, of_weight = scaled.RECIPES[recipe]
    return {
        "scale_input": scale_input,
        "scale_weight": scale_weight,
        "recipe_input": of_input,
        "recipe_weight": of_weight,
        "output_dtype": getattr(torch, enum_name(problem.output_dtype)),
        "use_fast_accum": problem.fast_accum,
    }


def _close(result: torch.Tensor, expected: torch.Tensor) -> bool:
    """True if they differ by no more than roundings do."""
    if result.shape != expected.shape:
        return False
    if result.numel() == 0:
        return True
    return ((result - expected).abs().max() <= 0.02 * expected.abs().max()).item()


@dataclass
class _Clock:
    """The clock of one plan's calls on a GPU."""

    flush: torch.Tensor
    host_us: float = 1000.0  # that the host needed last for all it enqueues in a turn

    # As many as the fastest clock has, so that what spins does so for no less than what is asked for.
    CYCLES_PER_US = 2000
    MOST_US = 3000.0


def _clocks(device: torch.device, plans: int) -> list[_Clock | None]:
    if device.type != "cuda":
        return [None] * plans
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    return [_Clock(flush) for _ in range(plans)]


def _time_us(call: Callable[[], Any], mode: str, clock: _Clock | None) -> float:
    """The time of one call, in "row" of the mean one; after a call that brings the ranks together,
    and makes the list of steps.
    """
    calls = 1 if mode == "call" else _ROW
    if clock is None:
        call()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        return 1e6 * (time.perf_counter() - begin) / calls
    # The GPU spins until the host has enqueued all of it: no time of the host's is in what is measured, and what brings
    # the ranks together on the GPU ends on all of them at once, however apart their hosts are.
    spin_us = min(1.5 * clock.host_us, clock.MOST_US)
    begin = time.perf_counter()
    torch.cuda._sleep(int(spin_us * clock.CYCLES_PER_US))
    call()
    if mode == "call":
        clock.flush.zero_()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        call()
    end.record()
    clock.host_us = 1e6 * (time.perf_counter() - begin)
    end.synchronize()
    return 1e3 * start.elapsed_time(end) / calls


def draw_bar(done: int, of: int, what: str) -> None:
    """On stderr; a line of its own each time where that is no terminal."""
    if not sys.stderr.isatty():
        print(f"{done}/{of} {what}".rstrip(), file=sys.stderr, flush=True)
        return
    width = 30
    filled = width * done // max(1, of)
    bar = "#" * filled + "." * (width - filled)
    end = "\n" if done == of else ""
    print(f"\r[{bar}] {done}/{of} {what:60}", end=end, file=sys.stderr, flush=True)


# --- at first calls -------------------------------------------------------------------------------------------


class _FirstCalls:
    """Comes behind each call of an op: tunes what was called for the first time.

    Its key is the same on all ranks of a group: op, sizes, dtypes and how operands are scaled. Rank 0 says which
    problems these are.
    """

    def __init__(self) -> None:
        # Each group, which may have the name of one that has gone, has calls, and problems by the
        # kind of device.
        self._seen: weakref.WeakKeyDictionary[dist.ProcessGroup, set[tuple[Any, ...]]]
        self._seen = weakref.WeakKeyDictionary()
        self._busy = False

    def __call__(self, op: object, group: str, arguments: tuple[Any, ...]) -> None:
        tensors = [
            one
            for argument in arguments
            for one in (argument if isinstance(argument, (list, tuple)) else [argument])
            if isinstance(one, torch.Tensor)
        ]
        device = tensors[0].device
        # Scaled operands have recipes, the output's type and the accumulation.
        others = (one for one in arguments if isinstance(one, (int, torch.dtype)))
        shapes = ((tuple(one.shape), one.dtype) for one in tensors)
        key = (op, device.type, *shapes, *others)
        seen = self._seen.setdefault(process_group(group), set())
        if self._busy or key in seen or _hidden(device):
            return
        seen.add(key)
        fresh = [
            problem
            for problem, _ in called(group, device.type)
            if (device.type, repr(problem)) not in seen
        ]
        seen.update((device.type, repr(problem)) for problem in fresh)
        self._busy = True
        try:
            tune(fresh, group=group, device=device)
        finally:
            self._busy = False


def _hidden(device: torch.device) -> bool:
    """True if operations are recorded, traced or transformed now, and not simply done."""
    if device.type not in ("cpu", "cuda") or is_compiling():
        return True
    if torch._C._functorch.peek_interpreter_stack() is not None or _get_current_dispatch_mode():
        return True
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def wanted_at_first_calls() -> _FirstCalls | None:
    """The answer to OVERLAP_TUNE. Raises ValueError if it is neither 0 nor 1."""
    value = os.environ.get("OVERLAP_TUNE", "0")
    if value not in ("0", "1"):
        raise ValueError(f"OVERLAP_TUNE must be 0 or 1, but it is {value!r}")
    return _FirstCalls() if value == "1" else None


eager.behind_calls = wanted_at_first_calls()
