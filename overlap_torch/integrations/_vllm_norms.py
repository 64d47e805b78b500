"""vLLM's compiled graphs: an all-reduce, the addition to the residual and the RMSNorm after it become one op.

vLLM has an operator of its own for each norm until a later pass lowers it. The pass here stands before vLLM's own fusion of
these norms, and behind the pass that makes them, if there is one. It takes the sums of vLLM's all-reduce and of
``gemm_allreduce``, for any number of rows.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.fx import Graph, Node

from overlap_torch._inductor import VERSION
from overlap_torch._inductor.editing import (
    NotFused,
    erase_unused,
    is_tensor,
    same_shape,
    value,
)
from overlap_torch._inductor.norms import Norm, Summed, emit, is_gain, sum_of
from overlap_torch._layers import rmsnorm
from overlap_torch._ops.group import sizes

# vLLM's pass that joins additions and norms of models of its Transformers backend to the norms that add.
_JOINS = "AddRMSNormFusionPass"
_SOURCES = (__file__, rmsnorm.__file__)
_HERE = hashlib.sha256(b"".join(Path(each).read_bytes() for each in _SOURCES)).hexdigest()


def key() -> str:
    """The part of a compiled graph's key that fusions depend on: this package's passes, and the groups' names and sizes."""
    return f"overlap_torch {VERSION} {_HERE} {sizes()}"


def fuse(graph: Graph, group_of: Callable[[str], str]) -> int:
    """Replaces the norms after all-reduces by ops, and returns their number. ``group_of``: the process group's name by vLLM's."""
    return sum(_fuse_one(node, group_of) for node in list(graph.nodes))


def _named(node: Any, name: str) -> bool:
    return isinstance(node, Node) and str(node.target) == f"{name}.default"


def _fuse_one(norm: Node, group_of: Callable[[str], str]) -> bool:
    """True if the node was a norm (x, weight, eps, columns=None), or one that adds (x, residual, weight, ...), and is replaced."""
    adds = _named(norm, "vllm_ir.fused_add_rms_norm")
    if not adds and not _named(norm, "vllm_ir.rms_norm"):
        return False
    total, *others = norm.args
    residual = others.pop(0) if adds else None
    weight, eps, *columns = others
    summed = _summed(total, group_of) if is_tensor(total) else None
    if summed is None or columns not in ([], [None]) or not is_gain(weight, total):
        return False
    if not rmsnorm.kernels_finish(value(total).dtype, value(total).shape[-1]):
        return False
    if adds and not (len(total.users) == 1 and _fits(residual, total)):
        return False  # the sum without the residual is read, too, or vLLM's norm converts or expands the residual
    if not adds and weight.op != "placeholder":
        return False  # the op comes right after the sum
    how = Norm(weight, eps, 0.0, True, (norm,))
    try:
        normed, added = emit(norm if adds else total.next, summed, residual, how, total)
    except NotFused:
        return False
    if adds:
        results = list(norm.users)  # items of the pair
        for item in results:
            item.replace_all_uses_with((normed, added)[item.args[1]])
        erase_unused(results)
    else:
        norm.replace_all_uses_with(normed)
        total.replace_all_uses_with(added, delete_user_cb=lambda user: user is not norm)
    erase_unused([norm, *reversed(summed.nodes)])
    return True


def _fits(residual: Any, total: Node) -> bool:
    if not is_tensor(residual):
        return False
    added, rows = value(residual), value(total)
    return added.dtype == rows.dtype and same_shape(added, rows)


def _summed(total: Node, group_of: Callable[[str], str]) -> Summed | None:
    if not _named(total, "vllm.all_reduce"):
        return sum_of(total)
    names = {**dict(zip(("tensor", "group_name"), total.args, strict=False)), **total.kwargs}
    return Summed(names["tensor"], None, None, group_of(names["group_name"]), (total,))


def add_pass(
    manager: type, base: type, group_of: Callable[[str], str], batch_invariant: Callable[[], bool]
) -> None:
    """Lets vLLM's pass managers run :func:`fuse`, except in vLLM's batch-invariant mode, which has no such fusion.

    ``base``: vLLM's class of passes.
    """

    class OverlapNormPass(base):
        def __call__(self, graph: Graph) -> None:
            if not batch_invariant():
                fuse(graph, group_of)

        def uuid(self) -> str:
            return key()

    configure = manager.configure

    @functools.wraps(configure)
    def configured(self, config: Any) -> None:
        configure(self, config)
        kinds = [type(each).__name__ for each in self.passes]
        place = kinds.index(_JOINS) + 1 if _JOINS in kinds else 0
        self.passes.insert(place, OverlapNormPass())

    manager.configure = configured
