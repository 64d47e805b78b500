"""``python -m overlap_torch demo``: an op beside its sequence on this machine's devices, checked, timed and drawn."""

from __future__ import annotations

import argparse
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from overlap_torch import _plan
from overlap_torch._ops import check, group_name
from overlap_torch._tools import bench
from overlap_torch._tools.arguments import count, output
from overlap_torch._tools.launch import Ranks, add_options, current_device, launch
from overlap_torch._watch import timeline
from overlap_torch._watch.drawing import GEMM, Bar
from overlap_torch._watch.trace import trace
from overlap_torch.plan import Plan, Problem, set_plan
from overlap_torch.plan._explain import H200
from overlap_torch.plan._library import plan_of
from overlap_torch.plan.templates import make_all_to_all, row_panels
from overlap_torch.plan.types import Schedule

_REPEATS = 20
_TRACED_CALLS = 3  # the picture shows the last call, when everything is warm
_COLLECTIVES = {
    "gemm_allreduce": "all-reduce",
    "gemm_reducescatter": "reduce-scatter",
    "allgather_gemm": "all-gather",
    "gemm_alltoall": "all-to-all",
}


@dataclass(frozen=True)
class _Demo:
    """The demo's problem; the same on every rank."""

    op: str
    m: int  # rows of the whole GEMM; of each rank's input of an all-to-all
    n: int
    k: int
    dtype: torch.dtype
    out: Path

    def problem(self, world_size: int) -> Problem:
        m = 0 if self.op == "gemm_alltoall" else self.m
        return Problem(m, self.n, self.k, self.dtype, world_size, self.op)


def _demo_for(ranks: Ranks, args: argparse.Namespace) -> _Demo:
    if ranks.device_type == "cpu":
        sizes, dtype = (2048, 2048, 512), torch.float32
    else:
        small = torch.cuda.get_device_properties(0).total_memory < 20 << 30
        sizes, dtype = (4096, 4096, 4096) if small else (8192, 8192, 7168), torch.bfloat16
    m, n, k = (given or own for given, own in zip((args.m, args.n, args.k), sizes, strict=True))
    if args.op in ("gemm_reducescatter", "allgather_gemm"):
        m = -(-m // ranks.world_size) * ranks.world_size  # as layers pad it
    return _Demo(args.op, m, n, k, dtype, args.out)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo with these command line arguments; returns the exit status: 1 if a check failed."""
    parser = argparse.ArgumentParser(
        prog="python -m overlap_torch demo",
        description="Runs an op on all GPUs with NCCL, or on two CPU ranks with gloo. Checks it against its sequence (a GEMM "
        "and a collective, one after the other), times both, draws both in timeline.png, and writes trace.json.",
    )
    ops = list(_COLLECTIVES)
    parser.add_argument("--op", choices=ops, default=ops[0], help=f"default: {ops[0]}")
    for name, meaning in (
        ("m", "rows of the whole GEMM; for gemm_alltoall, rows of each rank's input"),
        ("n", "columns of the output"),
        ("k", "inner dimension on each rank"),
    ):
        parser.add_argument(f"--{name}", type=count, help=f"{meaning} (default: by the device)")
    add_options(parser)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("."),
        help="folder for timeline.png and trace.json (default: .)",
    )
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    try:
        ranks = Ranks.choose(args.world, args.device)
        args.out.mkdir(parents=True, exist_ok=True)
        output(str(args.out / "timeline.png"))
    except ValueError as error:
        parser.error(str(error))
    except (OSError, argparse.ArgumentTypeError) as error:
        parser.error(f"--out is {args.out}, allowed is a folder that you may write: {error}")
    return launch(ranks, run_rank, _demo_for(ranks, args))


def run_rank(demo: _Demo) -> None:
    """Does the work of each rank of the demo."""
    bench.load()
    from overlap_torch.benchmarks.computations import Case, Computations
    from overlap_torch.benchmarks.measure import Stopwatch
    from overlap_torch.benchmarks.shapes import Shape

    first = dist.get_rank() == 0
    device, group = current_device(), group_name()
    plan, why = _choose_plan(demo, device, group)
    if first:
        _describe(demo, device, plan, why)
    split = "even" if demo.op == "gemm_alltoall" else ""
    case = Case(demo.op, Shape("custom", demo.m, demo.n, demo.k), split)
    computations = Computations(case, demo.dtype, device, group)
    with torch.inference_mode():
        exact = computations.exact_op()
        if first:
            verdict = "equals the sequence, bit for bit, on integers, on every rank"
            print(f"check     {verdict if exact else 'DIFFERS from the sequence'}", flush=True)
        sequence, op = computations.variants()
        gemm, _ = computations.parts()
        times = Stopwatch(device).compare("call", [sequence, op, gemm], _REPEATS)
        traced = _trace(lambda: op(0))
    check()
    if first:
        sequence_us, op_us, gemm_us = (time.median for time in times)
        _report(demo, device, sequence_us, op_us)
        _draw(demo, traced, _sequence_bars(demo, sequence_us, gemm_us))
        if not exact:
            print("the check FAILED", file=sys.stderr, flush=True)
    if not exact:
        sys.exit(1)


def _choose_plan(demo: _Demo, device: torch.device, group: str) -> tuple[Plan, str]:
    """The plan that the demo runs, and its origin. If the planner would not overlap on CPU, a template does.

    gloo moves bytes with the cores that also compute, so on a machine with few cores overlap hides communication but
    gains little time, and the planner may rightly prefer the sequence.
    """
    problem = demo.problem(dist.get_world_size())
    plan = plan_of(problem, device, group)
    rows = demo.m // problem.row_parts
    alone = dist.get_world_size() == 1 or rows < 2
    if device.type == "cuda" or plan.schedule == Schedule.OVERLAPPED or alone:
        return plan, "the planner's"
    if problem.traits.rows_by_rank:
        plan = make_all_to_all(problem, transport="gloo")
    else:
        chunks = min(4, rows)
        plan = row_panels(problem, chunks, transport="gloo", tile=(min(256, rows // chunks), 512))
    set_plan(plan, device=device, group=group)
    return (
        plan,
        "a template's, to show overlap; the planner would take the sequence",
    )


def _describe(demo: _Demo, device: torch.device, plan: Plan, why: str) -> None:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    world_size = dist.get_world_size()
    alone = "; a group of one has nothing to communicate" if world_size == 1 else ""
    print(f"ranks     {world_size} x {name}, {dist.get_backend()}{alone}")
    print(
        f"problem   {demo.op}, M={demo.m} N={demo.n} K={demo.k} per rank, {str(demo.dtype).split('.')[1]}"
    )
    print(f"plan      {why}\n          {plan}", flush=True)


def _report(demo: _Demo, device: torch.device, sequence_us: float, op_us: float) -> None:
    parts = [
        f"{'a' if _COLLECTIVES[demo.op][0] == 'r' else 'an'} {_COLLECTIVES[demo.op]}",
        "a GEMM",
    ]
    parts = parts if demo.op == "allgather_gemm" else parts[::-1]
    print(f"sequence  {sequence_us:10.1f} us   {', then '.join(parts)}")
    print(f"op        {op_us:10.1f} us   medians of {_REPEATS}, of the slowest rank")
    if device.type == "cuda":
        print(f"speed-up  {sequence_us / op_us:10.2f}x")
        return
    print(
        "          A CPU shows that results are right, not what overlap gains: gloo moves bytes with the cores that compute."
    )
    if demo.op == "gemm_alltoall":
        return
    shown = Problem(8192, 8192, 7168, "bfloat16", 2, demo.op)
    apart_us = _plan.predict(_plan.make_sequential(shown, H200), H200).total_us
    beside_us = _plan.predict(_plan.make_plan(shown, H200), H200).total_us
    print(
        f"          On two H200s the cost model expects, for 8192 x 8192 x 7168 in bfloat16, {apart_us:.0f} us by the "
        f"sequence\n          and {beside_us:.0f} us by the op: {apart_us / beside_us:.2f}x."
    )


def _trace(call: Callable[[], None]) -> dict[int, list[timeline.Call]]:
    """Every rank's calls, on rank 0."""
    dist.barrier()
    with trace() as traced:
        for _ in range(_TRACED_CALLS):
            call()
    # torch.distributed's functions for objects need numpy.
    store, rank, world_size = _get_default_store(), dist.get_rank(), dist.get_world_size()
    store.set(f"overlap_torch/demo/{rank}", pickle.dumps(traced.calls))
    others = range(world_size if rank == 0 else 0)
    return {other: pickle.loads(store.get(f"overlap_torch/demo/{other}")) for other in others}


def _sequence_bars(demo: _Demo, sequence_us: float, gemm_us: float) -> list[Bar]:
    """The bars of the sequence as it was timed: the GEMM's time alone, and the rest for the collective."""
    computed = min(gemm_us, sequence_us)
    if demo.op == "allgather_gemm":
        middle = sequence_us - computed
        looks = [(timeline.CHUNKS[0], _COLLECTIVES[demo.op]), (GEMM, "GEMM")]
    else:
        middle, looks = computed, [(GEMM, "GEMM"), (timeline.CHUNKS[0], _COLLECTIVES[demo.op])]
    return [Bar(0.0, middle, *looks[0]), Bar(middle, sequence_us, *looks[1])]


def _draw(demo: _Demo, traced: dict[int, list[timeline.Call]], sequence: list[Bar]) -> None:
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
    timeline.write_chrome_trace(traced, trace_path)
    print(f"wrote     {trace_path} (open it in ui.perfetto.dev)")
    title = f"{demo.op} {demo.m} x {demo.n} x {demo.k}, {len(traced)} ranks, {dist.get_backend()}"
    try:
        before = {"one after the other": sequence}
        timeline.write_picture(last_calls, picture_path, title, before)
        print(f"wrote     {picture_path} (above one after the other, below the op)")
    except ImportError as error:
        print(f"no picture: {error}", file=sys.stderr)
