"""Operands to compare an op with its unfused composition, bit for bit, and to time it."""

from __future__ import annotations

import math

import torch


def integer_operands(
    m: int, n: int, k: int, dtype: torch.dtype, device: torch.device, world_size: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Operands [M, K] and [N, K] of -1, 0 and 1, so sparse that no sum over K and all ranks rounds, in any order.

    A sum has a standard deviation of 16, and bfloat16 holds integers up to 256 exactly.
    """
    generator = torch.Generator(device).manual_seed(seed)
    density = min(1.0, 16.0 / math.sqrt(max(1, k * world_size)))

    def draw(rows: int) -> torch.Tensor:
        uniform = torch.rand(rows, k, device=device, generator=generator)
        return (
            (uniform < density / 2).to(dtype) - (uniform > 1 - density / 2).to(dtype)
        ).contiguous()

    return draw(m), draw(n)


def normal_operands(
    m: int, n: int, k: int, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normally distributed operands [M, K] and [N, K]; the weight is scaled as in a layer."""
    generator = torch.Generator(device).manual_seed(seed)
    input = torch.randn(m, k, device=device, dtype=dtype, generator=generator)
    weight = torch.randn(n, k, device=device, dtype=dtype, generator=generator)
    return input, weight.mul_(1 / math.sqrt(max(1, k)))
