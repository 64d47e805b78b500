"""Calls over peers, none of which waits for the one before."""

import random
import time
from collections import deque
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

import overlap_torch
from checks import Failures
from operands import Case, place, poison, rank_device
from ops import OPS, Arguments, tensors_of
from overlap_torch import plan as plan_module
from overlap_torch.plan import Plan

DISTINCT = 4  # operands by turns: a result of the call before is a wrong one
KEPT = 5  # calls whose results are looked at again: more than there are slots


def so_many_calls(short: int) -> pytest.MarkDecorator:
    """The parameter `calls`: a short race, and a long one, which `make test-races` runs."""
    long = pytest.param(1000, marks=[pytest.mark.long, pytest.mark.races])
    return pytest.mark.parametrize("calls", [short, long])


@dataclass
class Runner:
    """A participant of a race. Plans are set by problem: no two runners may have the same one."""

    label: str
    op: str
    case: Case
    plan: Plan | None  # None: the planner's


def prepare(
    op: str, case: Case, seeds: int = DISTINCT
) -> tuple[list[Arguments], list[list[torch.Tensor]]]:
    """This rank's arguments and right results, for several seeds."""
    return (
        [OPS[op].arguments(case, *place(), seed) for seed in range(seeds)],
        [OPS[op].expected(case, *place(), seed) for seed in range(seeds)],
    )


def come_late(chance: random.Random) -> None:
    """Now and then this rank is late by many calls, on the host or on the device: the others go on as far as they may."""
    if chance.random() < 0.03:
        time.sleep(chance.uniform(0, 0.03))
    if chance.random() < 0.03:
        torch.cuda._sleep(chance.randrange(40_000_000))


def wrong_elements(outputs: list[torch.Tensor], rights: list[torch.Tensor]) -> torch.Tensor:
    """How many there are; on the device."""
    pairs = zip(outputs, rights, strict=True)
    return torch.stack([(output != right).sum() for output, right in pairs]).sum()


def race(failures: Failures, runners: list[Runner], larger: Runner, calls: int, seed: int) -> None:
    """Calls of the runners, each once and then in any order; in the middle `larger`, which outgrows the slots.

    Slots grow once, in that call. Where more than two ranks have an all-to-all no pair knows the longest message: that
    call sends it by NCCL, and slots grow in a later one, when the ranks have told each other.

    Wrong elements are counted on the device: right behind the call, and again when later calls have used the slots.
    """
    device = rank_device()
    chance = random.Random(1000 * dist.get_rank() + seed)
    order = random.Random(seed)  # the same on all ranks
    group = dist.new_group()  # whose memory has not grown yet
    name = group.group_name
    for runner in (*runners, larger):
        if runner.plan is not None:
            plan_module.set_plan(runner.plan, group=group)
    prepared = [(runner, *prepare(runner.op, runner.case)) for runner in runners]
    outgrowing = (larger, *prepare(larger.op, larger.case, 1))
    wrong = torch.zeros(2, calls, dtype=torch.int64, device=device)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    kept: deque[tuple[int, list[torch.Tensor], list[torch.Tensor]]] = deque()
    held: list[int] = []  # bytes, before `larger` and after each call from there on
    labels: list[str] = []

    def look_again() -> None:
        turn, outputs, rights = kept.popleft()
        for output in outputs:
            output.record_stream(torch.cuda.current_stream())
        wrong[1, turn] = wrong_elements(outputs, rights)

    torch.cuda.synchronize()
    for turn in range(calls):
        grows = turn == calls // 2
        drawn = order.randrange(len(prepared))
        runner, arguments, rights = prepared[turn if turn < len(prepared) else drawn]
        which = order.randrange(DISTINCT)
        if grows:
            (runner, arguments, rights), which = outgrowing, 0
            held.append(torch.ops.overlap.memory(name)[1])
        labels.append(f"{runner.op} {runner.label}")
        expected = rights[which]
        torch.ops.overlap.delay_side_stream(chance.choice((0, 0, 0, 20, 200)))
        with torch.cuda.stream(streams[turn // 16 % len(streams)]):
            if chance.random() < 0.1:
                torch.cuda._sleep(chance.randrange(400_000))
            poison(device, *(right.numel() * right.element_size() for right in expected), 512)
            outputs = tensors_of(OPS[runner.op].wrapper(*arguments[which], group=group))
            wrong[0, turn] = wrong_elements(outputs, expected)
            kept.append((turn, outputs, expected))
            del outputs
            if len(kept) > KEPT:
                look_again()
        if held:
            held.append(torch.ops.overlap.memory(name)[1])
        come_late(chance)
    torch.cuda.synchronize()
    while kept:
        look_again()
    torch.ops.overlap.delay_side_stream(0)
    overlap_torch.check()
    growths = [turn for turn, (before, after) in enumerate(pairwise(held)) if after != before]
    to_all = dist.get_world_size() > 2 and any(one.op == "gemm_alltoall" for one in runners)
    grew_once = len(growths) == 1 and held[-1] > held[0] and (to_all or growths == [0])
    failures.expect(
        None if grew_once else f"memory grew in calls {growths} from `larger` on: {held}"
    )
    for turn, counts in enumerate(wrong.t().tolist()):
        for count, when in zip(counts, ("at once", "later"), strict=True):
            problem = f"{count} elements wrong {when}" if count else None
            failures.expect(problem, "call", turn, labels[turn])
    dist.destroy_process_group(group)
