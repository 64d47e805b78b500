"""What the ops' fake kernels check: the same as the real ones, on shapes that may be symbolic."""

from __future__ import annotations

import torch


def check_operands(
    op: str, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
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
    torch._check_type(
        input.dtype == weight.dtype and (bias is None or bias.dtype == input.dtype),
        lambda: (
            f"{op}: input, weight and bias must have one dtype, but got "
            f"{input.dtype}, {weight.dtype} and {None if bias is None else bias.dtype}"
        ),
    )
    for name, operand in (("weight", weight), ("bias", bias)):
        torch._check_value(
            operand is None or operand.device == input.device,
            lambda name=name, operand=operand: (
                f"{op}: input is on {input.device} but {name} on {operand.device}; move them to one device"
            ),
        )
    if bias is not None:
        torch._check_value(
            bias.dim() == 1 and bias.shape[0] == weight.shape[0],
            lambda: (
                f"{op}: bias must be [N] for a weight [N, K], "
                f"but got shapes {tuple(bias.shape)} and {tuple(weight.shape)}"
            ),
        )


def check_row_dim(op: str, input: torch.Tensor) -> None:
    """Dim 0 is the one that is cut between the ranks."""
    torch._check_value(
        input.dim() >= 2,
        lambda: (
            f"{op}: input must be [D0, ..., K], because dim 0 is cut between the ranks, "
            f"but got shape {tuple(input.shape)}"
        ),
    )
