"""``python -m overlap_torch demo``: the op on this machine's devices, checked, timed and drawn."""

from __future__ import annotations

import argparse
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

from overlap_torch import _bench_entry, _composition, _timeline, _verify
from overlap_torch._launch import Ranks, current_device, launch
from overlap_torch._ops import check, gemm_allreduce, group_name
from overlap_torch._trace import trace
from overlap_torch.plan import Plan, Schedule, plan_for, row_panels, set_plan

_REPEATS = 20
_TRACED_CALLS = 3  # the picture shows the last one, when everything is warm


@dataclass(frozen=True)
class _Demo:
    """What the demo runs; the same on every rank."""

    m: int
    n: int
    k: int
    dtype: torch.dtype
    out: Path


def _demo_for(ranks: Ranks, out: Path) -> _Demo:
    if ranks.device_type == "cpu":
        return _Demo(2048, 2048, 512, torch.float32, out)
    small = torch.cuda.get_device_properties(0).total_memory < 20 << 30
    return (
        _Demo(4096, 4096, 4096, torch.bfloat16, out)
        if small
        else _Demo(8192, 8192, 7168, torch.bfloat16, out)
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo with these command line arguments; returns the exit status: 1 if a check failed."""
    parser = argparse.ArgumentParser(
        prog="python -m overlap_torch demo",
        description="Runs gemm_allreduce on all GPUs with NCCL, or on two CPU ranks with gloo: checks it against the "
        "unfused composition, times both, and writes timeline.png and trace.json.",
    )
    parser.add_argument("--world", type=int, help="ranks (default: all GPUs, or 2 on CPU)")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], help="default: cuda where there is a GPU"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("."),
        help="folder for timeline.png and trace.json (default: .)",
    )
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    try:
        ranks = Ranks.choose(args.world, args.device)
    except ValueError as error:
        parser.error(str(error))
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        launch(ranks, run_rank, _demo_for(ranks, args.out))
    except torch.multiprocessing.ProcessExitedException as error:
        return error.exit_code or 1
    return 0


def run_rank(demo: _Demo) -> None:
    """What each rank of the demo does."""
    first = dist.get_rank() == 0
    device, group = current_device(), group_name()
    plan, why = _choose_plan(demo, device, group)
    if first:
        _describe(demo, device, plan, why)
    with torch.inference_mode():
        verdict = _verify.verify(demo.m, demo.n, demo.k, demo.dtype, device, group)
        if first:
            print(f"check     {verdict}", flush=True)
        operands = _verify.normal_operands(
            demo.m, demo.n, demo.k, demo.dtype, device, seed=dist.get_rank()
        )
        sequence_us, op_us = _time(operands, device, group)
        traced = _trace(operands, device, group)
    check()
    if first:
        print(f"sequence  {sequence_us:10.1f} us   a GEMM, then an all-reduce")
        print(
            f"op        {op_us:10.1f} us   speed-up {sequence_us / op_us:.3f}x  (medians of the slowest rank)"
        )
        if device.type == "cpu" and dist.get_world_size() > 1:
            print(
                "          (gloo moves bytes with the cores that compute: few of them gain little)"
            )
        _draw(demo, traced)
    if not verdict.passed:
        if first:
            print("the check FAILED", file=sys.stderr, flush=True)
        sys.exit(1)


def _choose_plan(demo: _Demo, device: torch.device, group: str) -> tuple[Plan, str]:
    """The plan that the demo runs, and whose it is. Where the planner would not overlap on CPU, a template does.

    gloo moves bytes with the cores that also compute, so on a machine with few cores overlap hides communication but
    gains little time, and the planner may rightly prefer the sequence.
    """
    plan = plan_for(demo.m, demo.n, demo.k, demo.dtype, device=device, group=group)
    if device.type == "cuda" or plan.schedule == Schedule.OVERLAPPED or dist.get_world_size() == 1:
        return plan, "the planner's"
    plan = row_panels(plan.problem, 4, transport="gloo")
    set_plan(plan, device=device, group=group)
    return (
        plan,
        "a template's; the planner would take the sequence here: gloo needs the cores that compute",
    )


def _describe(demo: _Demo, device: torch.device, plan: Plan, why: str) -> None:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    world_size = dist.get_world_size()
    alone = "; a group of one has nothing to communicate" if world_size == 1 else ""
    print(f"ranks     {world_size} x {name}, {dist.get_backend()}{alone}")
    print(
        f"problem   gemm_allreduce, M={demo.m} N={demo.n} K={demo.k} per rank, {str(demo.dtype).split('.')[1]}"
    )
    print(f"plan      {why}\n          {plan}", flush=True)


def _time(
    operands: tuple[torch.Tensor, torch.Tensor], device: torch.device, group: str
) -> tuple[float, float]:
    """Median times of the sequence and of the op in microseconds, measured in turns."""
    _bench_entry.load()
    from overlap_torch.benchmarks.measure import Stopwatch

    input, weight = operands
    variants = [
        lambda turn: _composition.gemm_allreduce(input, weight, None, group),
        lambda turn: gemm_allreduce(input, weight, group=group),
    ]
    sequence, op = Stopwatch(device).compare("call", variants, _REPEATS)
    return sequence.median, op.median


def _trace(
    operands: tuple[torch.Tensor, torch.Tensor], device: torch.device, group: str
) -> dict[int, list[_timeline.Call]]:
    """Every rank's calls."""
    dist.barrier()
    with trace() as traced:
        for _ in range(_TRACED_CALLS):
            gemm_allreduce(*operands, group=group)
    # torch.distributed's functions for objects need numpy.
    own = torch.frombuffer(bytearray(pickle.dumps(traced.calls)), dtype=torch.uint8)
    parts = _gather_rows(own.to(device))
    return {rank: pickle.loads(bytes(part.tolist())) for rank, part in enumerate(parts)}


def _gather_rows(own: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's rows on the CPU; as many as each has."""
    counts = [torch.tensor([len(own)], device=own.device) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, counts[dist.get_rank()].clone())
    longest = int(max(counts).item())
    padded = own.new_zeros(longest, *own.shape[1:])
    padded[: len(own)] = own
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return [part[: int(count.item())].cpu() for part, count in zip(parts, counts, strict=True)]


def _draw(demo: _Demo, traced: dict[int, list[_timeline.Call]]) -> None:
    last_calls = {f"rank {rank}": calls[-1:] for rank, calls in traced.items() if calls}
    for rank, (call,) in last_calls.items():
        print(
            f"{rank}    {call.hidden_fraction:.0%} of its communication ran while its GEMM went on"
        )
    trace_path, picture_path = demo.out / "trace.json", demo.out / "timeline.png"
    if not last_calls:
        print(
            "no timeline: the op recorded no call, as in a group of one, which has nothing to communicate"
        )
        return
    _timeline.write_chrome_trace(traced, trace_path)
    print(f"wrote     {trace_path} (open it in ui.perfetto.dev)")
    title = (
        f"gemm_allreduce {demo.m} x {demo.n} x {demo.k}, {len(traced)} ranks, {dist.get_backend()}"
    )
    try:
        _timeline.write_picture(last_calls, picture_path, title)
        print(f"wrote     {picture_path}")
    except ImportError as error:
        print(f"no picture: {error}", file=sys.stderr)
