"""The communication of a computation: its collectives, and their bytes."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_KINDS = {
    "all_reduce": "all-reduce",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_gather_into_tensor": "all-gather",
    "all_to_all_single": "all-to-all",
    "gemm_allreduce": "all-reduce",
    "gemm_reducescatter": "reduce-scatter",
    "allgather_gemm": "all-gather",
    "gemm_alltoall": "all-to-all",
}


class Traffic(TorchDispatchMode):
    """Counts the functional collectives and this package's ops that are called while it is on, in every thread's backward.

    Bytes are those of the whole tensor that a collective works on: of what it gathers, reduces or scatters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes = 0

    @property
    def total(self) -> int:
        return sum(self.calls.values())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, torch.distributed.tensor.DTensor) for kind in types):
            return NotImplemented  # what a DTensor does with it comes here too
        result = function(*args, **(kwargs or {}))
        namespace, _, name = function._overloadpacket._qualified_op_name.partition("::")
        if namespace in ("_c10d_functional", "overlap") and name in _KINDS:
            self.calls[_KINDS[name]] += 1
            self.bytes += _whole_bytes(name, args, result)
        elif namespace in ("c10d", "_dtensor", "c10d_functional", "_c10d_functional_autograd"):
            self.calls[f"other: {name}"] += 1
        return result


def _whole_bytes(name: str, args: Any, result: Any) -> int:
    world = dist.get_world_size()
    if name == "allgather_gemm":
        return result[1].nbytes
    results = sum(tensor.nbytes for tensor in tree_leaves(result))
    scatters = name in ("gemm_reducescatter", "reduce_scatter_tensor")
    # A gather by all-to-all sends copies: what arrives is the whole.
    return results * world if scatters else results


def traffic_of(job: Callable[[], object]) -> Traffic:
    with Traffic() as traffic:
        job()
    return traffic
