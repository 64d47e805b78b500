"""Times one plan's calls: operands, clocks, and the check of results."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from overlap_torch._ops import scaled
from overlap_torch.plan import Problem
from overlap_torch.plan._names import enum_name
from overlap_torch.plan.types import Recipe

FLUSH_BYTES = 256 << 20  # more than the L2 cache of any GPU
_ROW = 4  # calls


def operands(
    problem: Problem, device: torch.device, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and weight of one rank, normally distributed, because a GPU's clock depends on the numbers."""
    dtype = getattr(torch, enum_name(problem.dtype))
    is_scaled = problem.recipe != Recipe.NONE
    # Operands to be cast are drawn first; no GEMM takes two operands of e5m2.
    drawn = torch.bfloat16 if is_scaled else dtype
    weight_dtype = torch.float8_e4m3fn if is_scaled else dtype
    generator = torch.Generator(device).manual_seed(rank)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=drawn)

    input, weight = make(_input_rows(problem), problem.k), make(problem.n, problem.k)
    return input.to(dtype), weight.to(weight_dtype)


def _input_rows(problem: Problem) -> int:
    if problem.traits.gathers:
        return problem.m // problem.world_size
    return problem.m


def scaled_keywords(problem: Problem, device: torch.device, rank: int) -> dict[str, Any]:
    """The ops' keywords beside the operands: scales from 1/2 to 2, and the problem's own; no keywords without scales."""
    if problem.recipe == Recipe.NONE:
        return {}
    recipe = enum_name(problem.recipe).partition("_")[0]
    shapes = scaled.scale_shapes(recipe, _input_rows(problem), problem.n, problem.k)
    generator = torch.Generator(device).manual_seed(rank)
    scale_input, scale_weight = (
        2 ** (2 * torch.rand(shape, generator=generator, device=device) - 1) for shape in shapes
    )
    of_input, of_weight = scaled.RECIPES[recipe]
    return {
        "scale_input": scale_input,
        "scale_weight": scale_weight,
        "recipe_input": of_input,
        "recipe_weight": of_weight,
        "output_dtype": getattr(torch, enum_name(problem.output_dtype)),
        "use_fast_accum": problem.fast_accum,
    }


def is_close(result: torch.Tensor, expected: torch.Tensor) -> bool:
    """True if the results differ by no more than roundings."""
    if result.shape != expected.shape:
        return False
    if result.numel() == 0:
        return True
    return ((result - expected).abs().max() <= 0.02 * expected.abs().max()).item()


@dataclass
class Clock:
    """The clock of one plan's calls on a GPU."""

    flush: torch.Tensor
    host_us: float = 1000.0  # the host's last time to enqueue a turn

    # The fastest clock's cycles, so that the GPU spins at least for the requested time.
    CYCLES_PER_US = 2000
    MOST_US = 3000.0


def clocks_for(device: torch.device, plans: int) -> list[Clock | None]:
    if device.type != "cuda":
        return [None] * plans
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    return [Clock(flush) for _ in range(plans)]


def time_us(call: Callable[[], Any], mode: str, clock: Clock | None) -> float:
    """The time of one call; in "row" the mean of several. An untimed call comes first: it brings the ranks together and makes
    the list of steps."""
    calls = 1 if mode == "call" else _ROW
    if clock is None:
        call()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        return 1e6 * (time.perf_counter() - begin) / calls
    # The GPU spins until the host has enqueued everything, so the measured time has no host time in it. The call that
    # brings the ranks together on the GPU ends on all of them at once, even if their hosts are late.
    spin_us = min(1.5 * clock.host_us, clock.MOST_US)
    begin = time.perf_counter()
    torch.cuda._sleep(int(spin_us * clock.CYCLES_PER_US))
    call()
    if mode == "call":
        clock.flush.zero_()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        call()
    end.record()
    clock.host_us = 1e6 * (time.perf_counter() - begin)
    end.synchronize()
    return 1e3 * start.elapsed_time(end) / calls
