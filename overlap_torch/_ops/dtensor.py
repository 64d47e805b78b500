"""The ops and torch.distributed.tensor: its tensors are no operands, and its CommDebugMode counts the ops.

Importing it takes a second, so the ops are made known to it when it has been imported by somebody else.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from overlap_torch._ops import library  # noqa: F401  (the library holds the ops)

_STYLES = {
    "gemm_allreduce": "OverlapRowwiseParallel",
    "gemm_reducescatter": "OverlapRowwiseParallel",
    "allgather_gemm": "OverlapColwiseParallel",
    "gemm_alltoall": None,
}
_DTENSOR = "torch.distributed.tensor"
_COMM_DEBUG_MODE = "torch.distributed.tensor.debug._comm_mode"
_known: set[str] = set()


def make_ops_known() -> None:
    """To those of the modules above that are there, before an op reaches them."""
    if len(_known) == 2:
        return
    if _DTENSOR not in _known and (tensors := _imported(_DTENSOR, "DTensor")) is not None:
        _known.add(_DTENSOR)
        for name in _STYLES:
            for overload in getattr(torch.ops.overlap, name).overloads():
                op = f"overlap::{name}" + ("" if overload == "default" else f".{overload}")
                torch.library.register_torch_dispatch(op, tensors.DTensor, _refuse)
    if _COMM_DEBUG_MODE not in _known and (mode := _imported(_COMM_DEBUG_MODE, "CommDebugMode")):
        _known.add(_COMM_DEBUG_MODE)
        counted = getattr(mode, "c10d_collective_ops", None)
        if isinstance(counted, set):  # as of PyTorch 2.11; elsewhere the ops are not counted
            counted.update(getattr(torch.ops.overlap, name) for name in _STYLES)


def _imported(name: str, member: str) -> Any:
    """The module, if its import has come as far as the member."""
    module = sys.modules.get(name)
    return module if hasattr(module, member) else None


def _refuse(cls: type, op: torch._ops.OpOverload, types: Any, args: Any, kwargs: Any) -> None:
    name = op._schema.name.partition("::")[2]
    given = ", ".join(
        f"{argument.name} with placements {value.placements}"
        for argument, values in zip(op._schema.arguments, args, strict=False)
        for value in (values if isinstance(values, (list, tuple)) else [values])
        if isinstance(value, cls)
    )
    style = _STYLES[name]
    other = (
        ""
        if style is None
        else f", or give the layer the style overlap_torch.parallel.{style}, which takes DTensors"
    )
    raise TypeError(
        f"{name}: takes and returns this rank's tensors, but got DTensors: {given}. Its group and its parts of rows and "
        f"features need not be those of a mesh. Call it with tensor.to_local(){other}"
    )
