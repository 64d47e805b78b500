"""``python -m overlap_torch tune``: tunes given or recorded problems, or records the problems that a program calls."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import runpy
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from overlap_torch._ops.collectives import usual_invariance
from overlap_torch._tools import arguments
from overlap_torch._tools.launch import Ranks, add_options, current_device, launch
from overlap_torch._tune import tune as _tune
from overlap_torch._tune.session import words
from overlap_torch.plan import Problem
from overlap_torch.plan._names import enum_name
from overlap_torch.plan.files import plain

_FP8 = ("float8_e4m3fn", "float8_e5m2")
_SCALES = ("tensor", "row", "block")
OPS = ("gemm_allreduce", "gemm_reducescatter", "allgather_gemm")
_SCHEMA, _KIND = 1, "overlap_torch.problems"
# A record has these fields of each problem, by name, and more for scaled operands.
_NAMES = ("op", "m", "n", "k", "dtype", "world_size")
_OF_SCALED = ("recipe", "output_dtype", "fast_accum")


def main(argv: Sequence[str] | None = None) -> int:
    """Tunes or records, with these command line arguments; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m overlap_torch tune",
        description="Measures plans for problems on all GPUs, or on two CPU ranks, and keeps the times in "
        "$OVERLAP_CACHE or the user's cache folder. overlap_torch.tune() and OVERLAP_TUNE=1 in a program read them from "
        "there. The command starts the ranks itself, or joins the ranks that torchrun started.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--shapes",
        help="comma-separated MxNxK: M the whole GEMM's rows, N its columns, K one rank's part",
    )
    what.add_argument("--recorded", metavar="FILE", help="tunes the problems in a file of --record")
    what.add_argument(
        "--record",
        type=arguments.output,
        metavar="FILE",
        help="runs a program and records its problems: torchrun ... -m overlap_torch tune --record FILE train.py ...",
    )
    parser.add_argument(
        "--op", default=OPS[0], help=f"comma-separated: {', '.join(OPS)}, all (default: {OPS[0]})"
    )
    parser.add_argument(
        "--dtype",
        type=arguments.short_dtype,
        choices=[*arguments.SHORT_DTYPES, *_FP8],
        help="the input's type (default: bf16, on CPU fp32). Weights of fp8 are float8_e4m3fn",
    )
    parser.add_argument(
        "--scales", choices=_SCALES, help="how operands of fp8 are scaled; the output is bfloat16"
    )
    parser.add_argument("--fast-accum", action="store_true", help="for fp8: use_fast_accum=True")
    parser.add_argument(
        "--modes", default="call,row", help="comma-separated: call, row (default: both)"
    )
    parser.add_argument(
        "--most",
        type=arguments.count,
        default=4,
        help="plans to measure beside the sequence (default: 4)",
    )
    parser.add_argument(
        "--repeats",
        type=arguments.count,
        default=10,
        help="turns; all plans run in each turn (default: 10)",
    )
    parser.add_argument("--no-cache", action="store_true", help="measure everything, save nothing")
    add_options(parser)
    parser.add_argument(
        "program",
        nargs=argparse.REMAINDER,
        help="for --record: script, or -m module, and arguments",
    )
    own = list(sys.argv[1:] if argv is None else argv)
    module = own.index("-m") if "-m" in own else len(own)  # argparse takes it for an option
    args = parser.parse_args(own[:module])
    args.program = [*args.program, *own[module:]]
    if bool(args.program) != bool(args.record):
        parser.error("--record FILE takes a program after it; no other option does")
    if args.record:
        if why := _not_runnable(*args.program[:2]):
            parser.error(f"--record runs a script, or -m and a module, but {why}")
        record(args.record, args.program)
        return 0
    try:
        ranks = Ranks.choose(args.world, args.device)
        modes = tuple(args.modes.split(","))
        _tune.check_arguments(modes, args.most, args.repeats)
        problems = _read(args.recorded, _world(ranks)) if args.recorded else _given(args, ranks)
    except ValueError as error:
        parser.error(str(error))
    how = {"modes": modes, "most": args.most, "repeats": args.repeats, "cache": not args.no_cache}
    return launch(ranks, run_rank, {"problems": problems, **how})


def _not_runnable(script: str, module: str = "") -> str:
    """Why runpy would not find it; empty if it would."""
    if script != "-m":
        return "" if os.path.exists(script) else f"there is no file {script}"
    with contextlib.suppress(ImportError, ValueError):
        if module and importlib.util.find_spec(module):
            return ""
    return f"there is no module {module}".rstrip()


def _world(ranks: Ranks) -> int:
    return int(os.environ.get("WORLD_SIZE", 0)) or ranks.world_size


def ops_of(text: str) -> tuple[str, ...]:
    """The ops that --op names; raises ValueError for an op that cannot be tuned."""
    ops = OPS if text == "all" else tuple(text.split(","))
    if unknown := [op for op in ops if op not in OPS]:
        raise ValueError(f"--op has {unknown[0]!r}, allowed are {', '.join(OPS)}, all")
    return ops


def _given(args: argparse.Namespace, ranks: Ranks) -> tuple[Problem, ...]:
    """The problems of each op and each shape, with rows rounded up to parts of all ranks and the process's invariance."""
    ops = ops_of(args.op)
    dtype = args.dtype or ("fp32" if ranks.device_type == "cpu" else "bf16")
    if dtype in _FP8 and args.scales is None:
        raise ValueError(f"--dtype {dtype} needs --scales; allowed are {', '.join(_SCALES)}")
    if dtype not in _FP8 and (args.scales is not None or args.fast_accum):
        raise ValueError(
            f"--scales and --fast-accum are for fp8, but --dtype is {dtype}; allowed are {', '.join(_FP8)}"
        )
    recipe = f"{args.scales}_wise" if args.scales else "none"
    shapes = []
    for text in args.shapes.split(","):
        if not re.fullmatch(r"\d{1,9}(x\d{1,9}){2}", text):
            raise ValueError(f"--shapes has {text!r}, allowed is MxNxK, as in 4096x8192x7168")
        shapes.append([int(size) for size in text.split("x")])
    world = _world(ranks)
    dtype = arguments.dtype(dtype)

    def problem(op: str, m: int, n: int, k: int) -> Problem:
        rows = -(-m // world) * world
        asked = {"fast_accum": args.fast_accum, "invariance": usual_invariance(op)}
        return Problem(rows, n, k, dtype, world, op, recipe, **asked)

    return tuple(problem(op, *shape) for op in ops for shape in shapes)


def run_rank(job: dict[str, Any]) -> None:
    """Does the work of each rank of the command: ``job`` has arguments of :func:`overlap_torch.tune`."""
    results = _tune.tune(**job, device=current_device(), progress=True)
    if dist.get_rank() != 0:
        return
    for one in results:
        gain = "" if one.gain is None else f"{one.gain:5.2f}x of the sequence"
        print(f"{words(one.problem):44} {one.mode:5} {one.source:9} {gain}")
        print(f"    {str(one.plan).partition(': ')[2]}")
        for plan, us in one.times:
            print(f"    {us:10.1f} us  {str(plan).partition(': ')[2]}")


# --- the calls of a program -----------------------------------------------------------------------------------


def record(path: str, program: Sequence[str]) -> None:
    """Runs the program in this process, and writes the problems of its ops' calls to a file, on rank 0."""
    calls: dict[tuple[Any, ...], int] = {}
    destroy = dist.destroy_process_group

    def note_and_destroy(*arguments: Any, **keywords: Any) -> None:
        _note(calls)  # while the groups' calls are still known
        destroy(*arguments, **keywords)

    dist.destroy_process_group = note_and_destroy
    script, *arguments = program
    try:
        if script == "-m":
            sys.argv = arguments or [script]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [script, *arguments]
            sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
            runpy.run_path(script, run_name="__main__")
    finally:
        _note(calls)
        dist.destroy_process_group = destroy
        if calls and int(os.environ.get("RANK", 0)) == 0:  # else an older record stays
            _write(path, calls)


def _note(calls: dict[tuple[Any, ...], int]) -> None:
    groups = {(row["group"], row["device"]) for row in torch.ops.overlap.plan_table()}
    for group, device in sorted(groups):
        for problem, count in _tune.called(group, device):
            if enum_name(problem.op) not in OPS:
                continue
            key = tuple(plain(problem).items())
            calls[key] = max(calls.get(key, 0), count)


def _write(path: str, calls: dict[tuple[Any, ...], int]) -> None:
    problems = []
    for fields, count in calls.items():
        one = dict(fields)
        if one["recipe"] == "none":
            for name in _OF_SCALED:
                del one[name]
        problems.append({**one, "calls": count})
    problems.sort(key=lambda one: (-one["calls"], *one.values()))
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"schema": _SCHEMA, "kind": _KIND, "problems": problems}, file, indent=1)
        file.write("\n")
    print(f"overlap_torch tune: {len(problems)} problems in {path}", file=sys.stderr)


def _read(path: str, world: int) -> tuple[Problem, ...]:
    """The file's problems for this number of ranks, the most often called first. Raises ValueError for a file of another
    kind."""
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
        if data["schema"] != _SCHEMA or data["kind"] != _KIND:
            raise ValueError(f"schema {data['schema']!r}, kind {data['kind']!r}")
        found = [
            Problem(
                **{name: one[name] for name in _NAMES},
                **{name: one[name] for name in (*_OF_SCALED, "invariance") if name in one},
            )
            for one in data["problems"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--recorded {path}: {error!r}; allowed is what --record writes, schema {_SCHEMA}, kind {_KIND!r}"
        ) from error
    own = tuple(one for one in found if one.world_size == world)
    if not own:
        worlds = sorted({one.world_size for one in found})
        raise ValueError(f"--recorded {path}: problems of {worlds} ranks, but there are {world}")
    return own
