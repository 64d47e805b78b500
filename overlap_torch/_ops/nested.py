"""The ops and nested tensors: the ops take one tensor of rows, and the error says how to make one of a nested tensor."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import torch
from torch.nested._internal.nested_tensor import NestedTensor

from overlap_torch._ops import library  # noqa: F401  (the library holds the ops)

_OPS = ("gemm_allreduce", "gemm_reducescatter", "allgather_gemm", "gemm_alltoall")
_kernels = torch.library.Library("overlap", "IMPL")


def refuse_nested(what: str, name: str, tensor: torch.Tensor) -> NoReturn:
    """Raises TypeError: ``what`` got a nested tensor as ``name``."""
    if tensor.layout == torch.jagged:
        remedy = (
            f"{name}.values(), and make a result of as many rows nested again with "
            f"torch.nested.nested_tensor_from_jagged(result, {name}.offsets())"
        )
    else:
        remedy = f"torch.cat({name}.unbind()), and cut a result of as many rows with result.split"
    raise TypeError(
        f"{what} takes one tensor of rows, but its {name} is a nested tensor of layout {tensor.layout}: call it with {remedy}"
    )


def _refuse(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> NoReturn:
    for argument, values in zip(op._schema.arguments, args, strict=False):
        for value in values if isinstance(values, (list, tuple)) else [values]:
            if isinstance(value, torch.Tensor) and value.is_nested:
                refuse_nested(op._schema.name.partition("::")[2], argument.name, value)
    raise TypeError(f"{op} takes no nested tensors: give it one tensor of rows in place of each")


def _dispatched(cls: type, op: torch._ops.OpOverload, types: Any, args: Any, kwargs: Any) -> None:
    _refuse(op, *args, **kwargs)


for _name in _OPS:
    for _overload in getattr(torch.ops.overlap, _name).overloads():
        _op = getattr(getattr(torch.ops.overlap, _name), _overload)
        _full = _op._schema.name + ("" if _overload == "default" else f".{_overload}")
        torch.library.register_torch_dispatch(_full, NestedTensor, _dispatched)
        for _key in ("NestedTensorCPU", "NestedTensorCUDA"):
            _kernels.impl(_full.partition("::")[2], functools.partial(_refuse, _op), _key)
