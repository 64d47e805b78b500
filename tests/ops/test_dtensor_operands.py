"""DTensors as operands of the ops: an error that says what to call, never a result."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import overlap_torch
from checks import Failures, message_of
from layers import integers
from meshes import mesh
from operands import world_name


def operands(op: str, distributed: str, gradients: bool) -> tuple[list[object], object]:
    """Input and weight, of which those that `distributed` names are DTensors."""
    input_cut, weight_cut = (0, 0) if op == "allgather_gemm" else (-1, 1)
    input = distribute_tensor(integers(8, 4, seed=1), mesh(), [Shard(input_cut)])
    weight = distribute_tensor(integers(6, 4, seed=2), mesh(), [Shard(weight_cut)])
    input = input if "input" in distributed else input.to_local()
    weight = weight if "weight" in distributed else weight.to_local()
    bias = integers(len(weight), seed=3)
    if "bias" in distributed:
        bias = distribute_tensor(bias, mesh(), [Replicate()])
    if gradients:
        input, weight = (tensor.detach().requires_grad_() for tensor in (input, weight))
    counts = [0] * dist.get_world_size()
    counts[dist.get_rank()] = len(input)
    rows = (counts, counts) if op == "gemm_alltoall" else ()
    return [input, weight, *rows], bias


def ways(op: str) -> list[Callable[..., object]]:
    function, operator = getattr(overlap_torch, op), getattr(torch.ops.overlap, op)
    found = [
        lambda args, bias: function(*args, bias),
        lambda args, bias: operator(*args, bias, group=world_name()),
    ]
    if op == "allgather_gemm":
        found += [
            lambda args, bias: function(args[0], [args[1]], [bias]),
            lambda args, bias: operator.weights(args[0], [args[1]], [bias], group=world_name()),
        ]
    return found


@pytest.mark.parametrize(
    "op", ["gemm_allreduce", "gemm_reducescatter", "allgather_gemm", "gemm_alltoall"]
)
@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_dtensor_operands_are_refused_with_what_to_call(failures: Failures, op: str) -> None:
    style = {"allgather_gemm": "OverlapColwiseParallel", "gemm_alltoall": ""}.get(
        op, "OverlapRowwiseParallel"
    )
    for distributed in ("input weight", "input", "weight", "bias"):
        for gradients in (False, True):
            args, bias = operands(op, distributed, gradients)
            for i, way in enumerate(ways(op)):
                named = [name.strip("s") for name in distributed.split()]
                parts = (op, "to_local()", style, *named)
                failures.says(message_of(way, args, bias), parts, distributed, gradients, i)
    with torch.inference_mode():
        args, bias = operands(op, "input weight", False)
        for i, way in enumerate(ways(op)):
            failures.holds("to_local()", message_of(way, args, bias), "inference", i)
