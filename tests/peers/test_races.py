"""Calls back to back, with random delays on ranks, streams and chunks, in memory full of junk: all results are right.

The short version is part of the suite; the long one, 1,000 calls for each plan, is chosen with `-m long`.
"""

import random
import time

import pytest
import torch
import torch.distributed as dist

import overlap_torch
from checks import Failures
from operands import Case, poison, rank_device, world_name
from ops import OPS, every_op, tensors_of
from overlap_torch import plan as plan_module
from overlap_torch.plan.types import Kernel
from peer_races import DISTINCT, come_late, prepare, so_many_calls, wrong_elements
from plans import GPU_KERNELS, chunked_plan

# (label, layout, chunks, resources)
PLANS = [
    ("panels", "row panels", 8, {}),
    ("packed", "packed", 20, {}),
    ("one chunk", "packed", 1, {}),
]
GPU_PLANS = [
    ("panels", "row panels", 8, {"comm_sms": 16, "max_ctas": 8}),
    ("packed", "packed", 20, {"comm_sms": 16, "max_ctas": 8}),
    ("packed on all SMs", "packed", 20, {}),
    ("exchange", "exchange", 8, {"comm_sms": 8, "max_ctas": 8}),
    ("exchange in a window", "exchange", 8, {"comm_sms": 8, "max_ctas": 8, "window": True}),
    ("window", "packed", 8, {"comm_sms": 8, "max_ctas": 8, "window": True}),
]


def race_on_cpu(failures: Failures, op: str, calls: int, layout: str, chunks: int) -> None:
    rank, world, device = dist.get_rank(), dist.get_world_size(), rank_device()
    chance = random.Random(1000 * rank + chunks)
    case = Case((130,), 70, 33, torch.bfloat16, bias=True)
    operands, expected = prepare(op, case)
    poison(device)
    plan = chunked_plan(case, world, device.type, layout, chunks, tile=(16, 16), op=op)
    with plan_module.use_plan(plan):
        for turn in range(calls):
            torch.ops.overlap.delay_side_stream(chance.choice((0, 0, 0, 50, 400)))
            if chance.random() < 0.1:
                time.sleep(chance.uniform(0, 0.004))
            outputs = tensors_of(OPS[op].wrapper(*operands[turn % DISTINCT]))
            failures.expect_equal(outputs, expected[turn % DISTINCT], op, "call", turn)
            del outputs  # their memory is the next call's
    torch.ops.overlap.delay_side_stream(0)


def race_on_gpu(
    failures: Failures,
    op: str,
    calls: int,
    layout: str,
    chunks: int,
    kernel: Kernel,
    resources: dict[str, object],
) -> None:
    """No call waits for the one before: wrong elements are counted on the device, and looked at in the end."""
    rank, world, device = dist.get_rank(), dist.get_world_size(), rank_device()
    machine = plan_module.machine(device)
    chance = random.Random(1000 * rank + chunks)
    case = Case((1025,), 776, 136, torch.bfloat16, bias=True)
    operands, expected = prepare(op, case)
    sizes = [right.numel() * 2 for right in expected[0]]
    wrong = torch.zeros(calls, dtype=torch.int64, device=device)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    plan = chunked_plan(case, world, device.type, layout, chunks, kernel, op=op, **resources)
    with plan_module.use_plan(plan):
        for turn in range(calls):
            torch.ops.overlap.delay_side_stream(chance.choice((0, 0, 0, 20, 200)))
            with torch.cuda.stream(streams[turn // 16 % len(streams)]):
                if chance.random() < 0.1:
                    torch.cuda._sleep(chance.randrange(400_000))
                poison(device, *sizes, 512)
                outputs = tensors_of(OPS[op].wrapper(*operands[turn % DISTINCT]))
                wrong[turn] = wrong_elements(outputs, expected[turn % DISTINCT])
                del outputs
            come_late(chance)
    torch.cuda.synchronize()
    torch.ops.overlap.delay_side_stream(0)
    overlap_torch.check()
    for turn, count in enumerate(wrong.tolist()):
        problem = f"{count} elements wrong" if count else None
        failures.expect(
            problem, op, "call", turn, kernel.name, layout, f"of {machine.sm_count} SMs"
        )


def held_memory(op: str, calls: int) -> list[list[int]]:
    """The memory that the group holds after a warm-up and after many calls."""
    case = Case((300,), 264, 64, torch.bfloat16)
    device = rank_device()
    arguments = OPS[op].arguments(case, dist.get_rank(), dist.get_world_size(), device)
    held = []
    for count in (3, calls):
        for _ in range(count):
            OPS[op].wrapper(*arguments)
        held.append(list(torch.ops.overlap.memory(world_name())))
        if device.type == "cuda":
            torch.cuda.synchronize()
            held[-1].append(torch.cuda.memory_allocated())
    return held


def plans_of(op: str, plans: list[tuple]) -> list[tuple]:
    """The plans that the op takes: the others than gemm_allreduce have row panels only."""
    return [plan for plan in plans if op == "gemm_allreduce" or plan[1] == "row panels"]


@so_many_calls(60)
@every_op
@pytest.mark.ranks((2, "gloo"), (3, "gloo"), long=[(4, "gloo")])
@pytest.mark.seconds(1800)
def test_races_back_to_back_on_cpu(failures: Failures, op: str, calls: int) -> None:
    for _, layout, chunks, _ in plans_of(op, PLANS):
        race_on_cpu(failures, op, calls, layout, chunks)


@so_many_calls(100)
@pytest.mark.parametrize("kernel", GPU_KERNELS, ids=lambda kernel: kernel.name)
@every_op
@pytest.mark.ranks((2, "nccl"), (4, "nccl"))
@pytest.mark.seconds(900)
def test_races_back_to_back_on_gpu(failures: Failures, op: str, kernel: Kernel, calls: int) -> None:
    for _, layout, chunks, resources in plans_of(op, GPU_PLANS):
        race_on_gpu(failures, op, calls, layout, chunks, kernel, resources)


@every_op
@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_races_leave_no_memory_behind(ranks, op):
    """Nothing is registered, and no communicator made, once warm."""
    for before, after in ranks.run(held_memory, op, 200):
        assert before == after
