"""CUDA graphs of calls over memory that the ranks map into each other: replayed between plain calls and other graphs."""

import gc
import random
import re
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

import overlap_torch
from captures import capture, refill, refusal_of_capture, replayed
from checks import Failures, check_call
from machines import over_peers
from operands import place, world_name
from ops import OPS, tensors_of
from overlap_torch import plan as plan_module
from overlap_torch.plan.types import Kernel
from peer_races import Runner, come_late, wrong_elements
from peers import (
    ALL_TO_ALL,
    DIRECT,
    PEER_OPS,
    STRIPES,
    Way,
    every_kernel,
    fixed_counts,
    has_bias,
    kernel_id,
    peer_case,
    peer_kernels,
    peer_plan,
    skip_unless_it_runs,
)

WAYS: list[Way] = [1, 3, DIRECT, STRIPES]
# A ring is in one chunk, and no gather has stripes.
OP_WAYS = [
    (op, way)
    for op in PEER_OPS
    for way in WAYS
    if way != (STRIPES if op.startswith("allgather") else 3)
]
every_op_and_way = pytest.mark.parametrize(("op", "way"), OP_WAYS)
with_all_to_all = pytest.mark.parametrize(
    ("op", "way", "kernel"),
    [
        (op, way, kernel)
        for op, way in [*OP_WAYS, (ALL_TO_ALL, 1)]
        for kernel in ([Kernel.LIBRARY] if way == STRIPES else peer_kernels(op))
    ],
    ids=kernel_id,
)
every_way = pytest.mark.parametrize("way", WAYS)
pytestmark = [pytest.mark.ranks((2, "nccl"), (4, "nccl"))]

TURNS = 12
SEEDS = 3  # operands by turns


def runner(op: str, rows: int, way: Way, kernel: Kernel, n: int = 1032, k: int = 136) -> Runner:
    case = peer_case(op, rows, n, k, torch.bfloat16, bias=has_bias(op))
    return Runner(f"{kernel.name} {way}", op, case, peer_plan(case, op, way, kernel))


def sizes(way: Way) -> list[int]:
    """Rows of a part. Direct: of low latency, and not."""
    return [17, 2100] if way == DIRECT else [643]


class Captured:
    """Calls in one graph, with operands that can be changed."""

    def __init__(self, runners: list[Runner], group: dist.ProcessGroup | None = None) -> None:
        self.runners = runners
        self.group = group
        self.seed = 0
        self.arguments = [
            OPS[runner.op].arguments(runner.case, *place(), self.seed_of(call, 0))
            for call, runner in enumerate(runners)
        ]
        self.rights = [
            [
                OPS[runner.op].expected(runner.case, *place(), self.seed_of(call, seed))
                for seed in range(SEEDS)
            ]
            for call, runner in enumerate(runners)
        ]
        self.graph, self.outputs = capture(
            lambda: [self.call(call) for call in range(len(runners))]
        )

    @staticmethod
    def seed_of(call: int, seed: int) -> int:
        return 100 * call + seed

    def call(self, call: int) -> list[torch.Tensor]:
        wrapper = OPS[self.runners[call].op].wrapper
        return tensors_of(wrapper(*self.arguments[call], group=self.group))

    def refill(self, seed: int) -> None:
        self.seed = seed
        for call, (runner, mine) in enumerate(zip(self.runners, self.arguments, strict=True)):
            others = OPS[runner.op].arguments(runner.case, *place(), self.seed_of(call, seed))
            refill(mine, others)

    def replay(self) -> list[torch.Tensor]:
        """Wrong elements of each call's results, on the device. Does not wait for them."""
        found = replayed(self.graph, self.outputs)
        return [self.wrong(call, outputs) for call, outputs in enumerate(found)]

    def wrong(self, call: int, outputs: list[torch.Tensor]) -> torch.Tensor:
        return wrong_elements(outputs, self.rights[call][self.seed])


class Found:
    """Numbers of wrong elements, looked at when all is done."""

    def __init__(self) -> None:
        self.counts: list[torch.Tensor] = []
        self.where: list[tuple[object, ...]] = []

    def replay(self, captured: Captured, *where: object) -> None:
        for call, count in enumerate(captured.replay()):
            self._add(count, captured, call, "replay", *where)

    def call(self, captured: Captured, call: int, *where: object) -> None:
        self._add(captured.wrong(call, captured.call(call)), captured, call, "plain call", *where)

    def _add(self, count: torch.Tensor, captured: Captured, call: int, *where: object) -> None:
        runner = captured.runners[call]
        self.counts.append(count)
        self.where.append((runner.op, runner.label, runner.case, "call", call, *where))

    def report(self, failures: Failures) -> None:
        torch.cuda.synchronize()
        overlap_torch.check()
        for count, where in zip(torch.stack(self.counts).tolist(), self.where, strict=True):
            failures.expect(f"{count} elements wrong" if count else None, *where)


def stagger(chance: random.Random) -> None:
    """Puts this rank behind, on the host or on the device."""
    if chance.random() < 0.2:
        time.sleep(chance.uniform(0, 0.005))
    if chance.random() < 0.4:
        torch.cuda._sleep(chance.randrange(600_000))
    come_late(chance)


@fixed_counts()
def check_turns(
    failures: Failures, graphs: list[list[Runner]], *, plain: int = 1, seed: int = 0
) -> None:
    """Replays of the graphs, each once and then in any order with plain calls; none waits for the one before.

    About `plain` of each `len(graphs) + plain` turns are a plain call.
    """
    shared = random.Random(seed)  # the same on all ranks
    own = random.Random(1000 * dist.get_rank() + seed)
    for mine in {id(runner): runner for runners in graphs for runner in runners}.values():
        if mine.plan is not None:
            plan_module.set_plan(mine.plan)
    captured = []
    for runners in graphs:
        torch.ops.overlap.delay_side_stream(own.choice((0, 0, 50)))
        captured.append(Captured(runners))
    torch.ops.overlap.delay_side_stream(0)
    found = Found()
    for turn in range(TURNS):
        drawn = shared.randrange(len(graphs) + plain)
        which = turn if turn < len(graphs) else drawn
        mine = captured[which if which < len(graphs) else shared.randrange(len(graphs))]
        if shared.random() < 0.6:
            mine.refill(shared.randrange(SEEDS))
        stagger(own)
        if which < len(graphs):
            for _ in range(shared.choice((1, 1, 2, 3))):
                found.replay(mine, "of graph", which, "in turn", turn)
        else:
            found.call(mine, shared.randrange(len(mine.runners)), "in turn", turn)
    found.report(failures)
    torch.ops.overlap.clear_plans(world_name())


# --- replays ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("plain", [1, 0], ids=["between_plain_calls", "back_to_back"])
@with_all_to_all
@pytest.mark.peers
def test_peers_graphs_replay(
    failures: Failures, op: str, way: Way, kernel: Kernel, plain: int
) -> None:
    """One to three calls in a graph: with odd numbers a replay begins on the slot on which the one before ended."""
    for rows in sizes(way):
        for calls in (1, 2, 3):
            graphs = [[runner(op, rows, way, kernel)] * calls]
            check_turns(failures, graphs, plain=plain, seed=calls)


@with_all_to_all
@pytest.mark.peers
def test_peers_graphs_replay_in_turns(
    failures: Failures, op: str, way: Way, kernel: Kernel
) -> None:
    for rows in sizes(way):
        mine = runner(op, rows, way, kernel)
        for calls in ((1, 1), (1, 2), (3, 2)):
            check_turns(failures, [[mine] * count for count in calls], seed=sum(calls))


@every_kernel
@pytest.mark.peers
def test_peers_graphs_hold_calls_of_all_kinds(failures: Failures, kernel: Kernel) -> None:
    """Calls of all ops and ways in one graph, of some in others."""
    runners = []
    for op, way in [*OP_WAYS, (ALL_TO_ALL, 1)]:
        for rows in sizes(way):
            own = Kernel.LIBRARY if way == STRIPES else kernel
            runners.append(runner(op, rows, way, own, k=136 + 8 * len(runners)))
    check_turns(failures, [runners, runners[::3], runners[:1]], plain=3, seed=1)
    check_turns(failures, [runners[::-1]], seed=2)


# --- the planner ------------------------------------------------------------------------------------

SMALL = [(1, 4096, 4096), (16, 4096, 4096), (2048, 4096, 4096)]
LARGE = [(3072, 8192, 7168), (4096, 8192, 7168)]  # for more than the slots that a group begins with


def planned_runners(op: str, sizes: list[tuple[int, int, int]]) -> list[Runner]:
    """The runners that the planner sends over peers."""
    cases = [peer_case(op, *size, torch.bfloat16) for size in sizes]
    problems = [OPS[op].problem(case, dist.get_world_size()) for case in cases]
    plans = [
        plan_module.templates.make_plan(problem, plan_module.machine()) for problem in problems
    ]
    found = zip(cases, plans, strict=True)
    return [Runner("planned", op, case, None) for case, plan in found if over_peers(plan)]


def check_planned(failures: Failures, runners: list[Runner]) -> None:
    check_turns(failures, [runners, runners[:1]])
    for runner in runners:
        check_turns(failures, [[runner]], seed=1)


@pytest.mark.parametrize("op", [*PEER_OPS[:3], ALL_TO_ALL])
def test_peers_graphs_of_what_the_planner_takes(ranks, op):
    skip_unless_it_runs(ranks)
    runners = ranks.run(planned_runners, op, SMALL + LARGE)[0]
    if not runners:
        pytest.skip("the planner takes no peers on this machine")
    ranks.expect_no_failures(check_planned, runners, timeout_s=300)


# --- memory -----------------------------------------------------------------------------------------


@fixed_counts()
def check_too_early(failures: Failures, large: Runner, small: Runner) -> None:
    """`large` captured before it was called, which is refused, then called, captured again and replayed."""
    group = dist.new_group()
    for mine in (small, large):
        if mine.plan is not None:
            plan_module.set_plan(mine.plan, group=group)
    kept = Captured([small], group)
    found = Found()
    arguments = OPS[large.op].arguments(large.case, *place())
    message = refusal_of_capture(partial(OPS[large.op].wrapper, *arguments, group=group))
    refused = re.search(r"has not mapped slots of \d+ bytes", message)
    failures.expect(None if refused else message, "too early")
    once = "Call the op once with the same shapes before the capture"
    failures.says(message, ("while a CUDA graph is captured", once))
    for seed in range(3):
        check_call(failures, large.case, "after the capture", seed=seed, group=group, op=large.op)
    captured = Captured([large], group)
    # The first graph has the memory that it was captured with, though the group has other slots now.
    for seed in (1, 2, 0):
        for mine in (captured, kept):
            mine.refill(seed)
            found.call(mine, 0, "seed", seed)
            for _ in range(2):
                found.replay(mine, "seed", seed)
    found.report(failures)
    del kept, captured
    dist.destroy_process_group(group)


def check_way_too_early(failures: Failures, op: str, way: Way) -> None:
    small = runner(op, 643, way, Kernel.LIBRARY)
    check_too_early(failures, runner(op, 4200, way, Kernel.LIBRARY, 4096, 4096), small)


def check_planned_too_early(failures: Failures, large: Runner) -> None:
    check_too_early(failures, large, runner(large.op, 643, 1, Kernel.LIBRARY))


@every_op_and_way
def test_peers_graphs_refuse_a_capture_before_memory_is_mapped(ranks, op, way):
    skip_unless_it_runs(ranks)
    ranks.expect_no_failures(check_way_too_early, op, way)


@pytest.mark.parametrize("op", PEER_OPS[:3])
def test_peers_graphs_capture_the_plan_of_plain_calls(ranks, op):
    """The captured plan is over peers: a capture that comes too early is refused for their memory."""
    skip_unless_it_runs(ranks)
    runners = ranks.run(planned_runners, op, LARGE)[0]
    if not runners:
        pytest.skip("the planner takes no peers on this machine")
    for large in runners:
        ranks.expect_no_failures(check_planned_too_early, large)


@pytest.mark.ranks((2, "nccl"))  # of more the first call maps what any call takes
def test_peers_graphs_refuse_an_alltoall_before_memory_is_mapped(ranks):
    skip_unless_it_runs(ranks)
    ranks.expect_no_failures(check_way_too_early, ALL_TO_ALL, 1)


@every_way
@pytest.mark.peers
def test_peers_graphs_and_groups_end_in_any_order(failures: Failures, way: Way) -> None:
    """Groups that end before the graphs that hold their memory: neither end may wait for the other, or free it."""
    for turn, op in enumerate(PEER_OPS):
        if way == STRIPES and not has_bias(op):  # of reductions alone
            continue
        group = dist.new_group()
        mine = runner(op, 643, way, Kernel.LIBRARY)
        plan_module.set_plan(mine.plan, group=group)
        captured = Captured([mine] * 3, group)
        found = Found()
        found.replay(captured, turn)
        found.report(failures)
        dist.destroy_process_group(group)
        captured.group = group = None
        gc.collect()
        # The watchdog ends the group a moment later; what then went wrong would show in the next calls.
        for wait_s in (0.0, 0.2):
            time.sleep(wait_s)
            check_call(failures, mine.case, "in another group", seed=turn, op=op)
        del captured
        gc.collect()
        torch.cuda.synchronize()
        check_call(failures, mine.case, "after the graph", seed=turn, op=op)
    overlap_torch.check()
