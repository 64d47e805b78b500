"""Work that knows nothing of communication: the framework's GEMM, a compiled Triton template, a grouped GEMM of experts.

    python examples/07_any_kernel.py                        starts a rank on each GPU, or two on CPU
    torchrun --nproc-per-node 2 examples/07_any_kernel.py

Each stores `job.output`, whose rows are in the memory of the ranks that own them, so its stores are the communication. The
result is compared with the work and a collective, one after the other; on GPUs both are timed.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist

import overlap_torch
from ranks import add_arguments, current_device, launch

EXPERTS = 4
Work = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]  # (a, b, out): stores a @ b


def library(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(a, b[0], out=out)


@functools.cache
def compiled() -> Work:
    """Inductor stores its template's tiles straight into `out`."""
    options = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "TRITON"}
    return torch.compile(library, options=options, dynamic=False)


def template(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    compiled()(a, b, out)


def grouped(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Equal rows for each expert. The grouped GEMM takes no `out`, so that copies travel, one to each rank."""
    rows = a.shape[0] // EXPERTS
    ends = torch.arange(rows, a.shape[0] + 1, rows, device=a.device, dtype=torch.int32)
    product = torch.nn.functional.grouped_mm(a, b, offs=ends)
    world = dist.get_world_size()
    for part, computed in zip(out.chunk(world), product.chunk(world), strict=True):
        part.copy_(computed)


def reduced(collective: str, work: Work, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    shape = a.shape[0], b.shape[2]
    with overlap_torch.produce(collective, shape, a.dtype, tile=(128, 128), signals=False) as job:
        work(a, b, job.output)
    return job.result()


def sequence(collective: str, work: Work, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    product = a.new_empty(a.shape[0], b.shape[2])
    work(a, b, product)
    if collective == "all_reduce":
        dist.all_reduce(product)
        return product
    part = product.new_empty(len(product) // dist.get_world_size(), product.shape[1])
    dist.reduce_scatter_tensor(part, product)
    return part


def slowest_us(calls: list[Callable[[], object]], turns: int = 9, inner: int = 10) -> list[float]:
    """Medians of calls in a row, measured by turns, of the slowest rank."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(turns):
        for call, found in zip(calls, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(inner):
                call()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) * 1e3 / inner)
    medians = torch.tensor([statistics.median(found) for found in times], device="cuda")
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return medians.tolist()


def work(options: argparse.Namespace) -> None:
    device, world = current_device(), dist.get_world_size()
    generator = torch.Generator().manual_seed(dist.get_rank())

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator).to(device, torch.bfloat16)

    a = integers(options.rows * world, options.inner)
    works = [("torch.mm", library, 1), ("grouped GEMM", grouped, EXPERTS)]
    if device.type == "cuda":
        works.insert(1, ("compiled template", template, 1))
    for name, stores, experts in works:
        b = integers(experts, options.inner, options.columns)
        for collective in ("reduce_scatter", "all_reduce"):
            ours, theirs = (
                functools.partial(way, collective, stores, a, b) for way in (reduced, sequence)
            )
            worst = (ours() - theirs()).abs().max().item()
            gain = ""
            if device.type == "cuda":
                ours_us, theirs_us = slowest_us([ours, theirs])
                gain = f", {theirs_us / ours_us:.2f} times as fast as the sequence"
            if dist.get_rank() == 0:
                print(f"{name}, {collective}: largest difference {worst:g}{gain}")
    overlap_torch.check()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, "as many as there are GPUs, or two")
    small = not torch.cuda.is_available()
    sizes = (("rows", 64, 4096), ("columns", 96, 8192), ("inner", 64, 2048))
    for size, on_cpu, on_gpus in sizes:
        default = on_cpu if small else on_gpus
        parser.add_argument(f"--{size}", type=int, default=default, help="of a rank's matrices")
    launch(work, parser.parse_args())


if __name__ == "__main__":
    main()
