"""The ops and nested, sparse and quantized tensors: the ops take one dense tensor of rows, and the error says how to make
one."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import torch
from torch.compiler import is_dynamo_compiling
from torch.nested._internal.nested_tensor import NestedTensor

from overlap_torch._ops import dtensor, library

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


def check_tensors(what: str, **operands: object) -> None:
    """Raises TypeError unless all operands of a call of ``what`` are tensors: none is nested, sparse or a DTensor."""
    for name, value in operands.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{what}: {name} must be a tensor, but it is a {type(value).__name__}")
        if value.is_nested:
            refuse_nested(what, name, value)
        if value.layout != torch.strided:
            raise TypeError(
                f"{what} takes dense tensors, but its {name} is of layout {value.layout}: call it with {name}.to_dense()"
            )
        plain = type(value) is torch.Tensor or is_dynamo_compiling()
        if not plain and dtensor.is_one(value):
            raise TypeError(
                f"{what} takes this rank's tensors, but its {name} is a DTensor with placements {value.placements}: call it with "
                f"{name}.to_local()"
            )


def check_input(what: str, input: torch.Tensor) -> None:
    """Raises TypeError or ValueError unless a layer's input is one tensor [..., features]. ``what`` names the layer."""
    if not isinstance(input, torch.Tensor):
        raise TypeError(
            f"{what} takes a tensor [..., features], but its input is a {type(input).__name__}"
        )
    if input.is_nested:
        refuse_nested(what, "input", input)
    if input.dim() == 0:
        raise ValueError(
            f"{what} takes a tensor [..., features], but its input is a number, of shape ()"
        )


def _refuse(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> NoReturn:
    for argument, values in zip(op._schema.arguments, args, strict=False):
        for value in values if isinstance(values, (list, tuple)) else [values]:
            if isinstance(value, torch.Tensor) and value.is_nested:
                refuse_nested(op._schema.name.partition("::")[2], argument.name, value)
            if isinstance(value, torch.Tensor) and (
                value.is_quantized or value.layout != torch.strided
            ):
                what = "quantized" if value.is_quantized else f"of layout {value.layout}"
                raise TypeError(
                    f"{op._schema.name.partition('::')[2]} takes dense tensors, but its {argument.name} is {what}: call it "
                    f"with {argument.name}.{'dequantize' if value.is_quantized else 'to_dense'}()"
                )
    raise TypeError(f"{op} takes no nested tensors: give it one tensor of rows in place of each")


def _dispatched(cls: type, op: torch._ops.OpOverload, types: Any, args: Any, kwargs: Any) -> None:
    _refuse(op, *args, **kwargs)


for _name, _op in library.overloads():
    torch.library.register_torch_dispatch(f"overlap::{_name}", NestedTensor, _dispatched)
    for _key in ("NestedTensor", "Sparse", "SparseCsr", "Quantized"):
        for _device in ("CPU", "CUDA"):
            _kernels.impl(_name, functools.partial(_refuse, _op), _key + _device)
