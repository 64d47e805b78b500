"""The counts of FlopCounterMode for the ops: as much as for the matrix products of their compositions."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from checks import Failures
from operands import Case, from_all_ranks, place, rank_device, world_name
from ops import OPS, every_op, tensors_of

CASES = [
    Case((6,), 5, 7), Case((2, 3), 4, 5, bias=True), Case((4,), 3, 6, torch.bfloat16),
    Case((4,), 3, 0), Case((0, 3), 4, 5), Case((8,), 5, 7, weight_layout="n_contiguous"),
]  # fmt: skip


def counted(call: Callable[..., Any], *arguments: Any, **keywords: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        call(*arguments, **keywords)
    return counter.get_total_flops()


@every_op
@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (2, "nccl"))
def test_flops_are_those_of_the_composition(failures: Failures, op: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for case in OPS[op].of(CASES):
        arguments = OPS[op].arguments(case, rank, world, rank_device())
        expected = counted(OPS[op].composition, *arguments, world_name())
        for call in (OPS[op].wrapper, OPS[op].operator):
            failures.equal(counted(call, *arguments, group=world_name()), expected, case)


@every_op
@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (2, "nccl"))
def test_flops_of_a_training_step_are_three_products(failures: Failures, op: str) -> None:
    """Forward, the input's gradient, the weight's: each multiplies as much."""
    arguments = OPS[op].arguments(Case((6,), 5, 7), *place())
    forward = counted(OPS[op].composition, *arguments, world_name())
    for leaf in tensors_of(arguments):
        leaf.requires_grad_()

    def step() -> None:
        outputs = tensors_of(OPS[op].wrapper(*arguments, group=world_name()))
        sum(output.sum() for output in outputs).backward()

    failures.equal(counted(step), 3 * forward)
    # An all-to-all leaves some rank without rows.
    failures.expect(None if any(from_all_ranks(forward)) else "no rank has products")
