"""``python -m benchmarks gemm_tuned``: the signalling GEMM, kernel and tiles by measuring, beside cuBLAS on one GPU.

For each of some random shapes all our kernels, in several chunks, take turns with ``torch.mm`` in flushed caches. The kernel
with the lowest median is chosen. It is then measured again, and the table shows that ratio. Nothing is
asserted.

With ``--exchanged`` the same kernels also multiply the weight by the input: their tiles then lie along N, and their widths
along M. No op does that, as the result is the transposed one: it shows what such tiles would bring.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from overlap_torch import plan as plan_api
from overlap_torch._tune.measure import FLUSH_BYTES, operands
from overlap_torch.plan import Plan, Problem
from overlap_torch.plan.types import Kernel

from .study import Study

_HOPPER = (Kernel.SM90_PINGPONG, Kernel.SM90_PINGPONG_WIDE, Kernel.SM90_COOPERATIVE)
_LONG_US = 50.0  # of cuBLAS: what is shorter is launches


def medians_us(calls: Sequence[Callable[[], object]], turns: int) -> list[float]:
    """Microseconds of each on the current CUDA device, in turns, each in flushed caches."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    us: list[list[float]] = [[] for _ in calls]
    with torch.inference_mode():
        for call in calls:
            call()
        for turn in range(turns):
            events = []
            for place in range(len(calls)):
                index = (turn + place) % len(calls)
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                flush.zero_()
                begin.record()
                calls[index]()
                end.record()
                events.append((index, begin, end))
            torch.cuda.synchronize()
            for index, begin, end in events:
                us[index].append(1e3 * begin.elapsed_time(end))
    return [statistics.median(times) for times in us]


def shapes(count: int, seed: int) -> list[tuple[int, int, int]]:
    """M from 64 to 16384, N and K from 512 to 16384, evenly by their logarithms; N and K multiples of 8."""
    generator = random.Random(seed)

    def size(least: int, multiple: int) -> int:
        value = math.exp(generator.uniform(math.log(least), math.log(16384)))
        return max(least, round(value / multiple) * multiple)

    return [(size(64, 1), size(512, 8), size(512, 8)) for _ in range(count)]


def candidates(problem: Problem, kernels: Sequence[Kernel]) -> list[Plan]:
    """Each kernel in one chunk, and in up to eight row panels that are as high as the planner's highest bands."""
    found: list[Plan] = []
    for kernel in kernels:
        whole = plan_api.templates.row_panels(problem, 1, kernel=kernel)
        panels = max(1, min(8, whole.tiles_m // plan_api.types.BAND_ROWS))
        for count in sorted({1, panels}):
            found.append(plan_api.templates.row_panels(problem, count, kernel=kernel))
    return found


def exchanged_problem(problem: Problem) -> Problem:
    """The product's of weight and input, whose rows are the weight's. Its columns, the input's rows, are padded to whole 16
    bytes, as the kernels store them."""
    rows = -(-problem.m // 8) * 8
    return Problem(problem.n, rows, problem.k, problem.dtype, problem.world_size)


@dataclass(frozen=True)
class Way:
    """A kernel of ours, and the factors that it gets: [rows, K] and [columns, K]."""

    plan: Plan
    first: torch.Tensor
    second: torch.Tensor
    exchanged: bool

    @property
    def product(self) -> Callable[[], torch.Tensor]:
        code = plan_api.files.encode(self.plan)
        return lambda: torch.ops.overlap.gemm_alone(self.first, self.second, code)

    def result(self, m: int) -> torch.Tensor:
        """[M, N], as the product that was asked for."""
        rows, columns = self.plan.problem.m, self.plan.problem.n
        found = self.product().flatten()[: rows * columns].view(rows, columns)
        return found[:, :m].t() if self.exchanged else found


def ways_of(
    problem: Problem,
    input: torch.Tensor,
    weight: torch.Tensor,
    kernels: Sequence[Kernel],
    exchanged: bool,
) -> list[Way]:
    """All that are measured beside the library."""
    ways = [Way(plan, input, weight, False) for plan in candidates(problem, kernels)]
    if exchanged:
        other = exchanged_problem(problem)
        padded = torch.zeros(other.n, problem.k, dtype=input.dtype, device=input.device)
        padded[: problem.m] = input
        ways += [Way(plan, weight, padded, True) for plan in candidates(other, kernels)]
    return ways


def measure(
    shape: tuple[int, int, int], kernels: Sequence[Kernel], turns: int, exchanged: bool
) -> dict[str, Any]:
    """One shape's row."""
    m, n, k = shape
    problem = Problem(m, n, k, "bfloat16", 2)
    input, weight = operands(problem, torch.device("cuda"), 0)
    ways = ways_of(problem, input, weight, kernels, exchanged)

    def library() -> torch.Tensor:
        return torch.mm(input, weight.t())

    expected = library()
    right = [
        bool((way.result(m) - expected).abs().max() <= 0.02 * expected.abs().max()) for way in ways
    ]
    calls = [library, *(way.product for way in ways)]
    first = medians_us(calls, turns)
    best = min((i for i in range(1, len(calls)) if right[i - 1]), key=lambda i: first[i], default=0)
    again = medians_us([library, calls[best]], 2 * turns)
    return {
        "shape": list(shape),
        "cublas_us": again[0],
        "ours_us": again[1],
        "ratio": again[1] / again[0],
        "chosen": bool(best) and first[best] < first[0],
        "kernel": ways[best - 1].plan.kernel.name.lower() if best else "",
        "chunks": len(ways[best - 1].plan.chunks) if best else 0,
        "exchanged": bool(best) and ways[best - 1].exchanged,
        "wrong": [
            way.plan.kernel.name.lower() for way, ok in zip(ways, right, strict=True) if not ok
        ],
        "first_us": first,
    }


def summary(rows: Sequence[dict[str, Any]], args: argparse.Namespace) -> str:
    """The requirements on the GEMM, in three lines."""
    long = [row for row in rows if row["cublas_us"] > _LONG_US]
    chosen = [row["ratio"] for row in rows if row["chosen"]]
    share = sum(row["chosen"] for row in long) / max(1, len(long))
    mean = math.exp(statistics.fmean(map(math.log, chosen))) if chosen else math.nan
    return (
        f"ours chosen in {share:.0%} of {len(long)} shapes that take cuBLAS over {_LONG_US:.0f} us, in {len(chosen)} of "
        f"all {len(rows)}\nchosen over cuBLAS: geometric mean {mean:.3f}, highest {max(chosen, default=math.nan):.3f}\n"
        f"wrong results: {sum(bool(row['wrong']) for row in rows)}; {torch.cuda.get_device_name()}"
    )


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", type=int, default=60)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--exchanged", action="store_true", help="also with the operands exchanged")
    parser.add_argument("--json", help="a file for all times")


def prepare(args: argparse.Namespace) -> None:
    if not torch.cuda.is_available():
        raise ValueError("needs a CUDA device, this machine has none")


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    hopper = torch.cuda.get_device_capability() == (9, 0)
    kernels = _HOPPER if hopper else (Kernel.SM80,)
    print(f"{'M x N x K':>20} {'cuBLAS us':>10} {'ours us':>10} {'ratio':>7}  kernel, chunks")
    with torch.inference_mode():
        for shape in shapes(args.shapes, args.seed):
            yield measure(shape, kernels, args.turns, args.exchanged)


def line(row: dict[str, Any]) -> str:
    kernel = row["kernel"] + (" exchanged" if row["exchanged"] else "")
    name = f"{kernel}, {row['chunks']}" if row["chosen"] else f"cuBLAS ({kernel})"
    return (
        f"{' x '.join(map(str, row['shape'])):>20} {row['cublas_us']:10.1f} {row['ours_us']:10.1f} "
        f"{row['ratio']:7.3f}  {name}{'  WRONG' if row['wrong'] else ''}"
    )


STUDY = Study(options, rows, line, summary, prepare, on_ranks=False)
