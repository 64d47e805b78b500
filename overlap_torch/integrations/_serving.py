"""The common part of the serving plug-ins: which of a row-parallel layer's calls an op takes, and how `moe` runs experts."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from overlap_torch._moe.checks import way_of
from overlap_torch._moe.functions import moe
from overlap_torch._ops.collectives import ANY_WORLD

ROWS = "OVERLAP_MOE_ROWS"


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

    ``invariant``: the framework is in its batch-invariant mode; else, and where it asks for more, ``OVERLAP_INVARIANCE`` decides.
    """
    bias = None if layer.skip_bias_add else layer.bias
    invariance = "batch" if invariant and not ANY_WORLD else None
    with torch._C.DisableTorchFunctionSubclass():
        return op(input, layer.weight, bias, group=group, invariance=invariance)


def part_of(layer: torch.nn.Module, input: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """This rank's features of the layer's input."""
    return input if layer.input_is_parallel else input.chunk(ranks, dim=-1)[rank].contiguous()


def first_of(reasons: Iterable[tuple[object, str]]) -> str:
    """The first reason that applies, or ""."""
    return next((why for applies, why in reasons if applies), "")


@functools.cache
def say(framework: str, why: str) -> None:
    """Warns once in a process that the framework's own experts run."""
    text = f"OVERLAP_{framework.upper()}=1: {framework}'s own experts run, without overlap_torch.moe: {why}"
    warnings.warn(text, stacklevel=2)


def most_rows() -> int | None:
    """``OVERLAP_MOE_ROWS``, the same on all ranks; None without it."""
    value = os.environ.get(ROWS)
    if value is None:
        return None
    if not value.isdecimal() or int(value) == 0:
        raise ValueError(f"{ROWS} must be a number of rows, at least 1, but it is {value!r}")
    return int(value)


def limits(tokens: Sequence[int], choices: int) -> dict[str, int]:
    """`moe`'s limits for calls in which the ranks have so many tokens.

    Every routing fits, even if a token names an expert twice, as numbers in a graph's padding may. ``OVERLAP_MOE_ROWS``
    allows fewer rows.
    """
    rows = sum(tokens) * choices
    return {"max_tokens": max(1, *tokens), "max_rows": max(1, min(rows, most_rows() or rows))}


def why_not_captured(
    token: tuple[int, torch.dtype, torch.device], choices: int, tokens: int, group: str
) -> str:
    """A reason if the host would wait in calls with limits, or "". ``token``: H, dtype and device. A collective call."""
    width, dtype, device = token
    if device.type != "cuda":
        return ""  # no CUDA graph holds the call
    x = torch.empty((0, width), dtype=dtype, device=device)
    ids = torch.empty((0, choices), dtype=torch.int32, device=device)
    if way_of("", x, ids, "choices", (tokens, 1), None, group).peers:
        return ""
    return (
        "over NCCL the host would count rows, which a CUDA graph cannot hold, and memory of peers does not carry these tokens "
        "(python -m overlap_torch doctor says why)"
    )


def name_of_group(framework: str, group: Any, ranks: int, rank: int) -> str:
    """The name of the framework's group of experts, which must be the one that the layer's numbers are of."""
    if (group.world_size, group.rank_in_group) != (ranks, rank):
        raise RuntimeError(
            f"OVERLAP_{framework.upper()}=1: experts are made for rank {rank} of {ranks}, but {framework}'s group of experts has this "
            f"process as rank {group.rank_in_group} of {group.world_size}; set OVERLAP_{framework.upper()}=0 for this model"
        )
    return group.device_group.group_name


def run_experts(
    x: torch.Tensor, layer: torch.nn.Module, ids: torch.Tensor, shares: torch.Tensor, **how: Any
) -> torch.Tensor:
    """`moe` with the weights as both frameworks name them."""
    with torch._C.DisableTorchFunctionSubclass():
        return moe(x, ids, shares, layer.w13_weight, layer.w2_weight, **how)
