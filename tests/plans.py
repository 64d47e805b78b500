"""Hand-made plans for the op's tests: every schedule, layout and cut into chunks that a problem takes."""

from __future__ import annotations

import torch

from operands import Case, rank_device
from overlap_torch.plan import (
    DType,
    Kernel,
    Machine,
    Plan,
    Problem,
    machine,
    make_sequential,
    packed,
    row_panels,
)

GPU_KERNELS = [Kernel.LIBRARY, Kernel.SM80, Kernel.SM90_PINGPONG, Kernel.SM90_COOPERATIVE]


def available_kernels() -> list[Kernel]:
    """The kernels that this build has for this rank's device."""
    found = machine(rank_device())
    kernels = [Kernel.LIBRARY]
    if found.has_sm80_kernels:
        kernels.append(Kernel.SM80)
    if found.has_sm90_kernels:
        kernels += [Kernel.SM90_PINGPONG, Kernel.SM90_COOPERATIVE]
    return kernels


_DTYPES = {
    torch.bfloat16: DType.BFLOAT16,
    torch.float16: DType.FLOAT16,
    torch.float32: DType.FLOAT32,
    torch.float64: DType.FLOAT64,
}


def problem_of(case: Case, world: int) -> Problem:
    return Problem(case.m, case.n, case.k, _DTYPES[case.dtype], world)


def sequential_plan(case: Case, world: int, device_type: str) -> Plan:
    # arch 0 is the CPU; a plan over NCCL needs any other.
    return make_sequential(problem_of(case, world), Machine(arch=0 if device_type == "cpu" else 80))


def _thirds(total: int, grain: int) -> list[list[int]]:
    """Unequal cuts of `total` into at most three parts, multiples of `grain`: short first, short last."""
    if total < 3 * grain:
        return []
    return [[grain, grain, total - 2 * grain], [total - grain, grain]]


def overlapped_plans(
    case: Case,
    world: int,
    device_type: str,
    kernel: Kernel = Kernel.LIBRARY,
    tile: tuple[int, int] | None = None,
    **resources: object,
) -> list[tuple[str, Plan]]:
    """(label, plan): row panels and packed tiles in one chunk, in unequal ones and in as many as there can be.

    `tile` is the library kernel's, `resources` go to the templates (comm_sms, max_ctas, window).
    """
    problem = problem_of(case, world)
    options = {"kernel": kernel, "tile": tile, "transport": "nccl", **resources}
    if device_type == "cpu":
        options["transport"] = "gloo"
    whole = row_panels(problem, 1, **options)
    rows, columns, grain = whole.tiles_m, whole.tiles_n, whole.cluster_m
    plans = [("1 row panel", whole)]
    for heights in [*_thirds(rows, grain), min(rows // grain, 20)]:
        for band_rows in (grain, 3 * grain):
            plan = row_panels(problem, heights, band_rows=band_rows, **options)
            plans.append((f"row panels {heights}, bands of {band_rows}", plan))
    tiles = rows * columns
    for sizes in [1, *_thirds(tiles, 1), min(tiles, 20)]:
        for band_rows in (grain, 3 * grain, rows):
            plan = packed(problem, sizes, band_rows=band_rows, **options)
            plans.append((f"packed {sizes}, bands of {band_rows}", plan))
        if device_type == "cuda" and world == 2:
            plan = packed(problem, sizes, collective="exchange", **options)
            plans.append((f"exchange {sizes}", plan))
    return plans


def chunked_plan(
    case: Case,
    world: int,
    device_type: str,
    layout: str,
    chunks: int,
    kernel: Kernel = Kernel.LIBRARY,
    tile: tuple[int, int] | None = None,
    **resources: object,
) -> Plan:
    """One plan, in this many chunks, or as many as the tile grid allows.

    `layout` is "row panels", "packed" or "exchange" (packed, two GPUs; with other numbers of ranks it is "packed").
    """
    problem = problem_of(case, world)
    options = {"kernel": kernel, "tile": tile, "transport": "nccl", **resources}
    if device_type == "cpu":
        options["transport"] = "gloo"
    whole = row_panels(problem, 1, **options)
    if layout == "row panels":
        return row_panels(problem, min(chunks, whole.tiles_m // whole.cluster_m), **options)
    if layout == "exchange" and world == 2:
        options["collective"] = "exchange"
    return packed(problem, min(chunks, whole.tiles_m * whole.tiles_n), **options)
