"""All-reduces whose bits depend on no other row, or not on the number of ranks either, beside a GEMM and NCCL.

On one rank the op is its product, and shows what the order of additions costs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
import torch.distributed as dist

import overlap_torch
from overlap_torch._tools.arguments import counts
from overlap_torch._tools.launch import current_device

from .measure import Stopwatch
from .study import MODE, REPEATS, Option, Study, check_close
from .tables import table

INVARIANCES = ("none", "batch", "world")
VARIANTS = ("GEMM", "GEMM, NCCL", *INVARIANCES)


def _rows(args: argparse.Namespace) -> Iterator[dict]:
    device, ranks = current_device(), dist.get_world_size()
    watch = Stopwatch(device)
    for n, k in args.shapes:
        for m in args.rows:
            torch.manual_seed(dist.get_rank())
            input = torch.randn(m, k // ranks, device=device, dtype=torch.bfloat16)
            weight = torch.randn(n, k // ranks, device=device, dtype=torch.bfloat16) / k**0.5

            def product(_: object, input=input, weight=weight) -> torch.Tensor:
                return torch.mm(input, weight.t())

            def sequence(_: object, product=product) -> torch.Tensor:
                total = product(None)
                dist.all_reduce(total)
                return total

            calls = [product, sequence]
            for invariance in INVARIANCES:
                calls.append(
                    lambda _, x=input, w=weight, how=invariance: overlap_torch.gemm_allreduce(
                        x, w, invariance=how
                    )
                )
            for invariance, call in zip(INVARIANCES, calls[2:], strict=True):
                check_close(invariance, call(None).float(), sequence(None).float(), 0.02)
            times = watch.compare(args.mode, calls, args.repeats)
            yield {"m": m, "n": n, "k": k} | dict(zip(VARIANTS, times, strict=True))


def _cells(row: dict) -> list[str]:
    times = [row[name] for name in VARIANTS]
    speeds = [f"{times[1].median / time.median:.2f}" for time in times[2:]]
    shape = f"{row['m']} x {row['n']} x {row['k']}"
    return [shape, *(time.spread(1) for time in times), *speeds]


def _sizes(text: str, args: argparse.Namespace) -> list[tuple[int, int]]:
    try:
        sizes = [tuple(int(size) for size in shape.split("x")) for shape in text.split(",")]
    except ValueError:
        sizes = [()]
    if any(
        len(size) != 2 or not 0 < min(size) <= max(size) < 1 << 31 or size[1] % 64 for size in sizes
    ):
        raise ValueError(
            f"--shapes takes N x K from 1, K a multiple of 64, such as 4096x8192, not {text}"
        )
    if args.world not in (1, 2, 4, 8):
        raise ValueError(
            f"--world is {args.world}, allowed are 1, 2, 4 and 8, as sums of invariance world have"
        )
    return sizes


OPTIONS = (
    Option("--rows", type=counts, default=[1, 16, 128, 512, 2048, 8192], help="M"),
    Option(
        "--shapes",
        default="4096x4096,4096x14336,8192x8192,8192x28672",
        check=_sizes,
        help="N x K of all ranks",
    ),
    MODE,
    REPEATS(default=9),
)


def _summary(found: list[dict], args: argparse.Namespace) -> str:
    head = ["M x N x K", *(f"{name}, us (10 to 90 %)" for name in VARIANTS)]
    head += [f"{name} over NCCL" for name in INVARIANCES]
    return table(head, [_cells(row) for row in found])


STUDY = Study(OPTIONS, _rows, summary=_summary)
