"""An all-reduce with residual and RMSNorm, fused and not, beside NCCL and a compiled norm; few rows, in CUDA graphs.

``input`` is a GEMM's, or without ``--gemm`` the product that is added up.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

import overlap_torch
from overlap_torch._tools.arguments import count, counts
from overlap_torch._tools.launch import current_device

from .measure import Stopwatch
from .study import MODE, REPEATS, Option, Study
from .tables import table

VARIANTS = ("fused", "not fused", "NCCL, compiled norm", "GEMM")
_EPS = 1e-6


@torch.compile
def _add_and_norm(total, residual, gain):
    residual = residual + total
    return torch.nn.functional.rms_norm(residual, gain.shape, gain, _EPS), residual


def _variants(m: int, n: int, k: int, device: torch.device) -> dict[str, Callable]:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16) / shape[-1] ** 0.5

    torch.manual_seed(dist.get_rank())
    operands = [draw(m, k), draw(n, k)] if k else [draw(m, n)]
    torch.manual_seed(0)
    residual, gain = draw(m, n), torch.ones(n, device=device, dtype=torch.bfloat16)
    op = overlap_torch.gemm_allreduce_rmsnorm if k else overlap_torch.allreduce_rmsnorm

    def product() -> torch.Tensor:
        return torch.mm(operands[0], operands[1].t()) if k else operands[0].clone()

    def sequence() -> tuple[torch.Tensor, torch.Tensor]:
        total = product()
        dist.all_reduce(total)
        return _add_and_norm(total, residual, gain)

    return {
        "fused": lambda: op(*operands, residual, gain, eps=_EPS, fused=True),
        "not fused": lambda: op(*operands, residual, gain, eps=_EPS),
        "NCCL, compiled norm": sequence,
        "GEMM": product,
    }


def _rows(args: argparse.Namespace) -> Iterator[dict]:
    device = current_device()
    watch, ranks = Stopwatch(device), dist.get_world_size()
    for m in args.rows:
        for n in args.columns:
            calls = _variants(m, n, args.k // ranks if args.gemm else 0, device)
            with torch.no_grad():
                sums = [calls[name]()[1].float() for name in VARIANTS[:3]]
                worst = max((one - sums[0]).abs().max().item() for one in sums)
                if not worst < 0.1:  # roundings of bfloat16; NaN fails, too
                    raise RuntimeError(f"{m} x {n}: the sums differ by {worst}")
                variants = {name: lambda _, call=call: call() for name, call in calls.items()}
                times = watch.named(args.mode, variants, args.repeats)
            yield {"m": m, "n": n} | times


def _cells(row: dict) -> list[str]:
    times = [row[name] for name in VARIANTS]
    spread = [time.spread(1) for time in times]
    return [str(row["m"]), str(row["n"]), *spread, f"{times[2].median / times[0].median:.2f}"]


def _k(k: int, args: argparse.Namespace) -> int:
    if k < args.world:
        raise ValueError(f"--k is {k}, allowed are {args.world} and more: each rank has a part")
    return k


OPTIONS = (
    Option("--rows", type=counts, default=[1, 6, 16, 64, 128, 512], help="M"),
    Option("--columns", type=counts, default=[4096, 6144, 8192], help="N"),
    Option("--gemm", action="store_true", help="begin with a GEMM; each rank has K / ranks"),
    Option("--k", type=count, default=8192, check=_k, help="K of all ranks"),
    MODE,
    REPEATS(default=15),
)


def _summary(found: list[dict], args: argparse.Namespace) -> str:
    head = ["rows", "N", *(f"{name}, us (10 to 90 %)" for name in VARIANTS), "over NCCL"]
    return table(head, [_cells(row) for row in found])


STUDY = Study(OPTIONS, _rows, summary=_summary)
