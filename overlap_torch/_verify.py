"""Holds an op's result to the unfused composition: bit for bit where nothing rounds, by its error where it does."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from overlap_torch import _composition
from overlap_torch._ops import gemm_allreduce

MAX_ERROR_RATIO = 1.05  # RMS error against float64, as a multiple of the composition's


def integer_operands(
    m: int, n: int, k: int, dtype: torch.dtype, device: torch.device, world_size: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Operands [M, K] and [N, K] out of {-1, 0, 1}, so sparse that no sum over K and all ranks rounds, in any order.

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
    """Operands [M, K] and [N, K], normally distributed, the weight scaled as a layer's."""
    generator = torch.Generator(device).manual_seed(seed)
    input = torch.randn(m, k, device=device, dtype=dtype, generator=generator)
    weight = torch.randn(n, k, device=device, dtype=dtype, generator=generator)
    return input, weight.mul_(1 / math.sqrt(max(1, k)))


@dataclass(frozen=True)
class Verdict:
    """Whether the op may be trusted with a problem; the same on every rank."""

    exact: bool  # equal to the composition on integer operands, on every rank
    error: float  # RMS error of the op against float64, largest over ranks
    reference_error: float  # that of the composition

    @property
    def passed(self) -> bool:
        return self.exact and self.error <= MAX_ERROR_RATIO * self.reference_error

    def __str__(self) -> str:
        exact = (
            "bit-exact on integer data"
            if self.exact
            else "DIFFERS from the composition on integer data"
        )
        return (
            f"{exact}; RMS error against float64 {self.error:.3g}, the composition's {self.reference_error:.3g} "
            f"(allowed: {MAX_ERROR_RATIO}x)"
        )


def exact_on_integers(
    m: int, n: int, k: int, dtype: torch.dtype, device: torch.device, group: str
) -> bool:
    """Whether the op equals the composition bit for bit on integer operands, on every rank of the group."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    input, weight = integer_operands(m, n, k, dtype, device, world_size, seed=1 + rank)
    output = gemm_allreduce(input, weight, group=group)
    equal = torch.equal(output, _composition.gemm_allreduce(input, weight, None, group))
    agreed = torch.tensor([int(equal)], device=device, dtype=torch.int32)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    return bool(agreed.item())


def verify(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device, group: str) -> Verdict:
    """Runs the op and the composition on integer and on normal operands, with a bias, in the default group."""
    rank = dist.get_rank()
    input, weight = normal_operands(m, n, k, dtype, device, seed=1001 + rank)
    bias = torch.linspace(-1, 1, n, device=device).to(dtype)
    exact = _composition.gemm_allreduce(input.double(), weight.double(), bias.double(), group)
    errors = torch.stack(
        [
            (result.double() - exact).square_().mean().sqrt()
            for result in (
                gemm_allreduce(input, weight, bias, group=group),
                _composition.gemm_allreduce(input, weight, bias, group),
            )
        ]
    )
    dist.all_reduce(errors, op=dist.ReduceOp.MAX)
    return Verdict(exact_on_integers(m, n, k, dtype, device, group), *errors.tolist())
