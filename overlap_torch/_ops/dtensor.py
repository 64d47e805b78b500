"""The ops and torch.distributed's tensors: DTensors are refused, CommDebugMode counts the ops, and LocalTensors, which
simulate all ranks in one process, take the compositions.

These modules take a second to import, so the ops are registered with each of them only after something else imported it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.nn import functional
from torch.utils import _pytree as pytree

from overlap_torch._ops import composition as _composition
from overlap_torch._ops import library
from overlap_torch._ops.collectives import all_to_all

_STYLES = {  # of the ops that have one
    "gemm_allreduce": "OverlapRowwiseParallel",
    "gemm_reducescatter": "OverlapRowwiseParallel",
    "allgather_gemm": "OverlapColwiseParallel",
}
_DTENSOR = "torch.distributed.tensor"
_COMM_DEBUG_MODE = "torch.distributed.tensor.debug._comm_mode"
_LOCAL_TENSOR = "torch.distributed._local_tensor"
_known: set[str] = set()


def make_ops_known() -> None:
    """Registers the ops with the imported modules above, before an op reaches them."""
    if len(_known) == 3:
        return
    if _DTENSOR not in _known and (tensors := _imported(_DTENSOR, "DTensor")) is not None:
        _known.add(_DTENSOR)
        _dispatch_by(tensors.DTensor, _refuse)
    if _LOCAL_TENSOR not in _known and (local := _imported(_LOCAL_TENSOR, "LocalTensorMode")):
        _known.add(_LOCAL_TENSOR)
        _dispatch_by(local.LocalTensorMode, _compose)
    if _COMM_DEBUG_MODE not in _known and (mode := _imported(_COMM_DEBUG_MODE, "CommDebugMode")):
        _known.add(_COMM_DEBUG_MODE)
        counted = getattr(mode, "c10d_collective_ops", None)
        if isinstance(counted, set):  # as of PyTorch 2.11; elsewhere the ops are not counted
            counted.update(getattr(torch.ops.overlap, name) for name in library.OPS)


# The ops' autograd kernels call it for a subclass or within a mode.
_library = torch.library.Library("overlap", "IMPL")
_library.impl("_make_ops_known", make_ops_known, "CPU")


def _dispatch_by(cls: type, rule: Any) -> None:
    """Registers a rule for all ops, for calls with a tensor or a mode of this class."""
    for name, _ in library.overloads():
        torch.library.register_torch_dispatch(f"overlap::{name}", cls, rule)


def _imported(name: str, member: str) -> Any:
    """The module, if its import has already defined the member."""
    module = sys.modules.get(name)
    return module if hasattr(module, member) else None


def is_one(tensor: torch.Tensor) -> bool:
    """True if it is a DTensor."""
    tensors = _imported(_DTENSOR, "DTensor")
    return tensors is not None and isinstance(tensor, tensors.DTensor)


def _refuse(cls: type, op: torch._ops.OpOverload, types: Any, args: Any, kwargs: Any) -> None:
    name = op._schema.name.partition("::")[2]
    given = ", ".join(
        f"{argument.name} with placements {value.placements}"
        for argument, values in zip(op._schema.arguments, args, strict=False)
        for value in (values if isinstance(values, (list, tuple)) else [values])
        if isinstance(value, cls)
    )
    other = ""
    if name in _STYLES:
        other = f", or give the layer the style overlap_torch.parallel.{_STYLES[name]}, which takes DTensors"
    raise TypeError(
        f"{name}: takes and returns this rank's tensors, but got DTensors: {given}. Its group and its parts of rows and "
        f"features need not be those of a mesh. Call it with tensor.to_local(){other}"
    )


_OF_SCALES = ("scale_input", "scale_weight", "scale_weights", "recipe_input", "recipe_weight")
_OF_SCALED = ("output_dtype", "use_fast_accum", "shared_scale_input")


def _compose(mode: Any, op: torch._ops.OpOverload, types: Any, args: Any, kwargs: Any) -> Any:
    """The composition, because LocalTensorMode does its collectives for all ranks. The op would run once for each rank,
    alone."""
    local = sys.modules[_LOCAL_TENSOR].LocalTensor
    if not any(isinstance(leaf, local) for leaf in pytree.tree_leaves(args)):
        return op(*args, **kwargs)
    name, overload = op._schema.name.partition("::")[2], op._schema.overload_name
    names = [argument.name for argument in op._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    of_scales = [given.pop(key, None) for key in _OF_SCALES]
    if any(one is not None for one in of_scales):
        raise NotImplementedError(
            f"{name}: operands with scales cannot be LocalTensors; take operands without scales, or leave LocalTensorMode"
        )
    for key in _OF_SCALED:  # without meaning for other operands
        given.pop(key, None)
    if not overload:
        given.setdefault("bias", None)
    given["group_name"] = given.pop("group")
    if name == "gemm_alltoall":  # rows differ by rank, which functional collectives take
        rows = functional.linear(given["input"], given["weight"], given["bias"])
        return all_to_all(rows, given["send_rows"], given["recv_rows"], given["group_name"])
    compose = getattr(_composition, f"{name}_weights" if overload else name)
    dim = given.pop("dim", 0) % given["input"].dim()
    if dim == 0:
        return compose(**given)
    given["input"] = given["input"].movedim(dim, 0)
    return pytree.tree_map(lambda moved: moved.movedim(0, dim).contiguous(), compose(**given))
