"""The common part of the serving plug-ins: which of a row-parallel layer's calls an op takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def takes(layer: torch.nn.Module, unquantized: type, input: torch.Tensor) -> bool:
    """True if the layer computes ``functional.linear(input, weight)`` with this rank's part of a weight [N, K].

    ``unquantized`` is the framework's method class for layers that are not quantized. Some methods pack the weight for a
    kernel.
    """
    if type(layer.quant_method) is not unquantized:
        return False
    weight = getattr(layer, "weight", None)
    return (
        weight is not None
        and weight.dim() == 2
        and weight.shape == (layer.output_size, layer.input_size_per_partition)
        and weight.dtype == input.dtype
        and weight.device == input.device
        and weight.dtype in (torch.bfloat16, torch.float16, torch.float32)
    )


def run(
    op: Callable[..., Any], layer: torch.nn.Module, input: torch.Tensor, group: str, invariant: bool
) -> Any:
    """Runs the op, with the layer's own bias. Frameworks' parameters are tensor subclasses; results are plain tensors.

    ``invariant``: the framework is in its batch-invariant mode; else ``OVERLAP_INVARIANCE`` decides.
    """
    bias = None if layer.skip_bias_add else layer.bias
    invariance = "batch" if invariant else None
    with torch._C.DisableTorchFunctionSubclass():
        return op(input, layer.weight, bias, group=group, invariance=invariance)


def part_of(layer: torch.nn.Module, input: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """This rank's features of the layer's input."""
    return input if layer.input_is_parallel else input.chunk(ranks, dim=-1)[rank].contiguous()
