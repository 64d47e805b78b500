"""The command line of the benchmark."""

from __future__ import annotations

import argparse
import os
import pickle
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.multiprocessing

from overlap_torch import _bench_entry
from overlap_torch._launch import Ranks, launch

from . import measure, shapes

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class Options:
    """What a benchmark measures; every rank gets the same."""

    command: str
    op: str
    shapes: tuple[shapes.Shape, ...]
    modes: tuple[str, ...]
    dtype: str  # name of a torch dtype
    call_repeats: int
    row_repeats: int  # repetitions of ten calls, in the modes row and graph
    plans: str | None  # JSON: one plan or a list, each for the problem that it names
    sweep: str | None  # "candidates": those of the planner; else JSON as in `plans`
    check: bool
    json_path: str | None
    plot_path: str | None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m overlap_torch bench",
        description="Times an op against the sequence (a GEMM, then a collective), in turns in one run; each time is "
        "that of the slowest rank. Starts the ranks itself, or is one of those that torchrun started.",
    )
    add = parser.add_argument
    add("--ops", default="allreduce", choices=["allreduce"], help="the op to measure")
    add(
        "--shapes",
        help="comma-separated: m_train, m_small, slow_link, MxNxK, K that of one rank (default: m_train; on CPU "
        "1024x1024x1024)",
    )
    add("--modes", default="call,row,graph", help="of call, row, graph (default: all)")
    add("--dtype", choices=list(DTYPES), help="default: bf16, on CPU fp32")
    add(
        "--repeats",
        type=int,
        help="repetitions of a call (default: 20, in a sweep 10); in row and graph a quarter, of ten calls each",
    )
    add("--world", type=int, help="ranks (default: all GPUs, or 2 on CPU)")
    add("--device", choices=["cuda", "cpu"], help="default: cuda where there is a GPU")
    add(
        "--slow-link",
        action="store_true",
        help="NCCL_P2P_DISABLE=1: NCCL goes through host memory; the default shapes are slow_link",
    )
    add(
        "--plan",
        help="a plan, or a list of plans, as JSON or as a JSON file, instead of the planner's for the problems that "
        "they name",
    )
    add(
        "--sweep",
        nargs="?",
        const="candidates",
        help="measure the planner's candidates for each shape, or those of a JSON file, and print the best",
    )
    add("--no-check", action="store_true", help="do not compare with the composition first")
    add("--json", metavar="FILE", help="write JSON lines here ('-': to stdout)")
    add("--plot", metavar="FILE", help="draw the speed-ups into this PNG")
    return parser


def _json_text(value: str | None) -> str | None:
    """JSON given on the command line itself or as a file's name."""
    if value is None or value.lstrip()[:1] in ("{", "["):
        return value
    return Path(value).read_text()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status: 1 if a result was wrong, 2 for a bad command line."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        ranks = Ranks.choose(args.world, args.device)
        on_cpu = ranks.device_type == "cpu"
        default_shapes = (
            "slow_link" if args.slow_link else ("1024x1024x1024" if on_cpu else "m_train")
        )
        wanted = tuple(shapes.parse(args.shapes or default_shapes))
        modes = tuple(filter(None, args.modes.split(",")))
        if unknown := set(modes) - set(measure.MODES):
            raise ValueError(
                f"modes are {', '.join(measure.MODES)}, not {', '.join(sorted(unknown))}"
            )
        sweep = args.sweep if args.sweep in (None, "candidates") else _json_text(args.sweep)
        plans = _json_text(args.plan)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if on_cpu and "graph" in modes:
        print("mode graph left out: CUDA graphs need a GPU", file=sys.stderr)
        modes = tuple(mode for mode in modes if mode != "graph")
    if args.slow_link:
        os.environ["NCCL_P2P_DISABLE"] = "1"
    repeats = args.repeats or (10 if sweep else 20)
    options = Options(
        command=shlex.join(["python", "-m", "overlap_torch", "bench", *argv]),
        op=args.ops,
        shapes=wanted,
        modes=modes,
        dtype=DTYPES[args.dtype or ("fp32" if on_cpu else "bf16")],
        call_repeats=repeats,
        row_repeats=max(3, repeats // 4),
        plans=plans,
        sweep=sweep,
        check=not args.no_check,
        json_path=args.json,
        plot_path=args.plot,
    )
    try:
        launch(ranks, _bench_entry.run_rank, pickle.dumps(options))
    except torch.multiprocessing.ProcessExitedException as error:
        return error.exit_code or 1
    return 0
