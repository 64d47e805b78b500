"""``python -m overlap_torch explain``: what a plan does and why it was chosen, in words and as a picture."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch.distributed as dist

from overlap_torch import _plan
from overlap_torch._ops.collectives import usual_invariance
from overlap_torch._plan import Op, Problem
from overlap_torch._tools.arguments import count, dtype, picture
from overlap_torch._tools.launch import Ranks, add_options, current_device, launch
from overlap_torch._tools.variables import environment
from overlap_torch.plan import _library as library
from overlap_torch.plan import files
from overlap_torch.plan._explain import H200, explain
from overlap_torch.plan._names import enum_name
from overlap_torch.plan._picture import plot

# The words that describe a problem, and their defaults. A saved plan has a problem of its own.
_PROBLEM = {
    "op": "gemm_allreduce",
    **dict.fromkeys("mnk", 0),
    "dtype": "bfloat16",
    "scales": None,
    "fast_accum": False,
    "world": None,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Explains the planner's plan for one problem, or a saved one; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m overlap_torch explain",
        description="Shows the plan of one problem: its steps, their memory and expected times, and why it was chosen.",
    )
    ops = [name.lower() for name in Op.__members__]
    parser.add_argument("--op", choices=ops, help="default: gemm_allreduce")
    for name, meaning in (
        ("m", "rows of the whole GEMM; not for gemm_alltoall, which has --rows"),
        ("n", "columns of the output"),
        ("k", "inner dimension on each rank"),
    ):
        parser.add_argument(f"--{name}", type=partial(count, least=0), help=meaning)
    parser.add_argument("--dtype", type=dtype, help="default: bfloat16")
    parser.add_argument(
        "--scales",
        choices=["tensor", "row", "block"],
        help="how operands of float8_e4m3fn or float8_e5m2 are scaled; the output is bfloat16",
    )
    parser.add_argument(
        "--fast-accum",
        action="store_const",
        const=True,
        help="for scaled operands: use_fast_accum=True",
    )
    add_options(parser, world="all GPUs, or 2")
    parser.add_argument(
        "--machine",
        default="here",
        help="'here' (default): ranks measure this machine; 'h200': two H200s; or the text that "
        "overlap_torch.plan.machine() prints",
    )
    parser.add_argument(
        "--plan", type=Path, help="a saved plan to explain instead of the planner's"
    )
    parser.add_argument("--plot", type=picture, help="also draws the plan: PNG, SVG or PDF")
    parser.add_argument(
        "--rows",
        type=partial(count, least=0),
        help="for gemm_alltoall: rows from each rank to each rank",
    )
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    try:
        _complete(args)
        if args.machine is None:
            return launch(Ranks.choose(args.problem.world_size, args.device), run_rank, args)
        _show(args)
    except ValueError as error:
        parser.error(str(error))
    return 0


def _complete(args: argparse.Namespace) -> None:
    """Puts a machine (None: this one), a plan (None: the planner's) and its problem in the place of their words."""
    environment()
    machine = {"here": None, "h200": H200}.get(args.machine, args.machine)
    if isinstance(machine, str):
        try:
            machine = library.parse_machine(machine)
        except (AttributeError, ValueError) as error:
            raise ValueError(
                f"--machine is '{args.machine}', allowed are here, h200, or fields like 'arch=90 sm_count=132': {error}"
            ) from error
    if machine is not None and args.device is not None:
        raise ValueError(
            f"--device is {args.device}, but no ranks run for --machine {args.machine}: give one of them"
        )
    args.machine = machine
    try:
        plan = files.load(args.plan) if args.plan is not None else None
    except (OSError, ValueError) as error:
        raise ValueError(f"--plan is {args.plan}, which is no saved plan: {error}") from error
    given = [name for name in _PROBLEM if getattr(args, name) is not None]
    sizes = ("rows" if args.op == "gemm_alltoall" else "m", "n", "k")
    missing = [f"--{name}" for name in sizes if getattr(args, name) is None]
    if plan is None and missing:
        raise ValueError(f"{', '.join(missing)} missing: give the problem's sizes, or a --plan")
    for name in _PROBLEM.keys() - given:
        setattr(args, name, _PROBLEM[name])
    if plan is None:
        world = args.world
        if world is None:
            world = Ranks.choose(None, args.device).world_size if machine is None else 2
        recipe = "none" if args.scales is None else f"{args.scales}_wise"
        asked = {"fast_accum": args.fast_accum, "invariance": usual_invariance(args.op)}
        args.problem = Problem(args.m, args.n, args.k, args.dtype, world, args.op, recipe, **asked)
    elif given:
        flag = given[0].replace("_", "-")
        raise ValueError(f"--plan has a problem of its own, without --{flag}: leave that out")
    else:
        args.problem = plan.problem
    if args.rows is not None and not args.problem.traits.rows_by_rank:
        op = enum_name(args.problem.op)
        raise ValueError(f"--rows is for gemm_alltoall, not for {op}, whose rows are --m")
    args.plan = plan


def run_rank(args: argparse.Namespace) -> None:
    """Does the work of each rank where the machine is measured: the first one shows the plan."""
    args.machine = library.machine(current_device())
    if dist.get_rank() == 0:
        _show(args)


def _show(args: argparse.Namespace) -> None:
    problem, machine = args.problem, args.machine
    plan = args.plan or _plan.make_plan(problem, machine)
    rows = (args.rows or 0,) * problem.world_size if problem.traits.rows_by_rank else ()
    print(explain(plan, machine, send_rows=rows, receive_rows=rows), flush=True)
    if args.plot is not None:
        plot(plan, args.plot, machine, send_rows=(rows,) * len(rows))
        print(f"\npicture  {args.plot}")
