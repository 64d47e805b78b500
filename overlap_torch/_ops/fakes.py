"""The checks of the ops' fake kernels: the real kernels' checks, on shapes that may be symbolic."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from overlap_torch._ops.group import group_rank, world_size

# The types of operands without scales, as the real kernels take them.
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_operands(
    op: str, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    check_shapes(op, input, weight, bias)
    torch._check_type(
        input.dtype == weight.dtype and (bias is None or bias.dtype == input.dtype),
        lambda: (
            f"{op}: input, weight and bias must have one dtype, but got "
            f"{input.dtype}, {weight.dtype} and {None if bias is None else bias.dtype}"
        ),
    )
    torch._check_type(
        input.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2),
        lambda: f"{op}: input is {input.dtype}; fp8 operands need scale_input and scale_weight",
    )
    torch._check_type(
        input.dtype in DTYPES,
        lambda: (
            f"{op}: input is {input.dtype}; supported are bfloat16, float16, float32 and float64"
        ),
    )


def check_shapes(
    op: str, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Checks operands of any dtypes, which must be on one device."""
    torch._check_value(
        input.dim() >= 1 and weight.dim() == 2,
        lambda: (
            f"{op}: input must be [..., K] and weight [N, K], "
            f"but got shapes {tuple(input.shape)} and {tuple(weight.shape)}"
        ),
    )
    torch._check_value(
        input.shape[-1] == weight.shape[1],
        lambda: (
            f"{op}: the last dims of input and weight must be equal, "
            f"but got shapes {tuple(input.shape)} and {tuple(weight.shape)}"
        ),
    )
    check_device(op, input, "weight", weight)
    if bias is not None:
        check_device(op, input, "bias", bias)
        torch._check_value(
            bias.dim() == 1 and bias.shape[0] == weight.shape[0],
            lambda: (
                f"{op}: bias must be [N] for a weight [N, K], "
                f"but got shapes {tuple(bias.shape)} and {tuple(weight.shape)}"
            ),
        )


def check_device(op: str, input: torch.Tensor, name: str, operand: torch.Tensor) -> None:
    torch._check_value(
        operand.device == input.device,
        lambda: (
            f"{op}: input is on {input.device} but {name} on {operand.device}; move them to one device"
        ),
    )


def check_invariance(op: str, invariance: str | None) -> None:
    if invariance not in (None, "none", "batch", "world"):
        raise ValueError(
            f"{op}: invariance is {invariance!r}; allowed are None, which leaves it to OVERLAP_INVARIANCE, "
            "'none', 'batch' and 'world'"
        )


def check_divisible(op: str, input: torch.Tensor, dim: int, world: int) -> None:
    """Checks a reduce-scatter's rows."""
    torch._check_value(
        input.shape[dim] % world == 0,
        lambda: (
            f"{op}: dim {dim} of input must be divisible by the world size {world}, "
            f"but got shape {tuple(input.shape)}; pad it"
        ),
    )


def check_number_of_biases(
    op: str, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> None:
    torch._check_value(len(weights) > 0, lambda: f"{op}: weights must hold one tensor or more")
    torch._check_value(
        len(biases) in (0, len(weights)),
        lambda: (
            f"{op}: biases must be empty or {len(weights)}, one for each weight, "
            f"but there are {len(biases)}"
        ),
    )


def row_dim(op: str, input: torch.Tensor, dim: int = 0) -> int:
    """The dim that is divided among the ranks, counted from the front."""
    torch._check_value(
        input.dim() >= 2,
        lambda: (
            f"{op}: input must be [D0, ..., K], because dim 0 is cut between the ranks, "
            f"but got shape {tuple(input.shape)}"
        ),
    )
    from_front = dim + input.dim() if dim < 0 else dim
    torch._check_value(
        0 <= from_front < input.dim() - 1,
        lambda: (
            f"{op}: dim must be one of the input's before the last, but is {dim} "
            f"and the input's shape is {tuple(input.shape)}"
        ),
    )
    return from_front


def with_size(shape: Sequence[int], dim: int, size: int) -> list[int]:
    """The shape with another size of one dim."""
    return [*shape[:dim], size, *shape[dim + 1 :]]


def check_counts(
    input: torch.Tensor, send_rows: Sequence[int], recv_rows: Sequence[int], group: str
) -> None:
    """Checks an all-to-all's counts."""
    world = world_size(group)
    for name, counts in (("send_rows", send_rows), ("recv_rows", recv_rows)):
        torch._check_value(
            len(counts) == world,
            lambda name=name, counts=counts: (
                f"gemm_alltoall: {name} must hold {world} counts, one for each rank of group '{group}', "
                f"but is {list(counts)}"
            ),
        )
        for count in counts:
            torch._check_value(
                count >= 0,
                lambda name=name, counts=counts: (
                    f"gemm_alltoall: {name} must not be negative, but is {list(counts)}"
                ),
            )
    torch._check_value(
        sum(send_rows) == input.shape[0],
        lambda: (
            f"gemm_alltoall: send_rows must add up to dim 0 of input, {input.shape[0]}, "
            f"but {list(send_rows)} add up to {sum(send_rows)}"
        ),
    )
    rank = group_rank(group)
    torch._check_value(
        send_rows[rank] == recv_rows[rank],
        lambda: (
            f"gemm_alltoall: rank {rank} sends itself {send_rows[rank]} rows and expects "
            f"{recv_rows[rank]}; these must be equal"
        ),
    )
