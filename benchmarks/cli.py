"""The command line of the benchmark."""

from __future__ import annotations

import argparse
import os
import pickle
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from overlap_torch._tools import bench as _bench_entry
from overlap_torch._tools.launch import Ranks, add_options, launch

from . import block, computations, gemm, measure, plans, pytorch_ops, shapes
from .options import Options

DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "float8_e4m3fn": "float8_e4m3fn",
    "float8_e5m2": "float8_e5m2",
}
ALL = (*computations.OPS, "block")  # the ops of "all"; gemm has no sequence
OPS = (*ALL, "gemm")
BASELINES = ("pytorch",)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m overlap_torch bench",
        description="Times each op against its sequence (torch.mm and a collective of torch.distributed), or a "
        "transformer block with the ops against one with sequences. Checks results first; then all variants take turns in "
        "one run. Each time is the slowest rank's. The command starts the ranks itself, or joins the ranks that torchrun started.",
    )
    add = parser.add_argument
    add(
        "--op",
        default="gemm_allreduce",
        help=f"comma-separated: {', '.join(ALL)}, all (these), or gemm: only the signalling GEMM, beside cuBLAS, "
        "on one GPU (default: gemm_allreduce)",
    )
    add(
        "--shapes",
        help=f"comma-separated: {', '.join(shapes.GROUPS)} (groups of suite.json), or MxNxK, M the whole GEMM's rows, "
        "K one rank's part (default: m_train; on CPU 1024x1024x1024)",
    )
    add(
        "--blocks",
        help=f"for block, comma-separated: MODEL@TOKENS, MODEL {' or '.join(shapes.MODELS)}, or "
        "HIDDENxHEADSxKV_HEADSxINTERMEDIATE@TOKENS, sizes before sharding (default: both models at 4096 and 8192 "
        "tokens; on CPU 512x8x4x1024@512)",
    )
    add(
        "--modes",
        default="call,row,graph",
        help="comma-separated: call (one call after a barrier), row (ten in a row after a GEMM; time / 10), graph (ten in a CUDA "
        "graph; time / 10; not for block); default: all",
    )
    add(
        "--dtype",
        choices=list(DTYPES),
        help="the operands' type (default: bf16, on CPU fp32); for fp8 the input's",
    )
    add(
        "--scales",
        choices=["tensor", "row", "block"],
        help="scales of fp8 operands; the output is bf16 (not for --op block; block scales not for gemm)",
    )
    add(
        "--fast-accum",
        action="store_true",
        help="for fp8 operands with scales of tensors or rows: use_fast_accum=True, in the ops and the sequence (gemm "
        "always has it)",
    )
    add(
        "--repeats",
        type=int,
        help="repetitions of a call (default: 20, in a sweep 10); row and graph take a quarter, of ten calls each",
    )
    add(
        "--baselines",
        default="",
        help="pytorch: adds PyTorch's own ops on symmetric memory to the same turns (not for "
        "gemm_alltoall, CPU), for block PyTorch's styles; sets TORCH_SYMM_MEM_DISABLE_MULTICAST=1 unless it is set",
    )
    add(
        "--replace-symm-mem",
        action="store_true",
        help="the baselines' fused ops run the replacements of overlap_torch.replace_symm_mem()",
    )
    add_options(parser, world="all GPUs, or 2 on CPU; for only gemm 1")
    add(
        "--slow-link",
        action="store_true",
        help="NCCL_P2P_DISABLE=1, OVERLAP_PEERS=0: all goes through host memory; the default shapes are "
        "slow_link",
    )
    add(
        "--plan",
        "--plans",
        help="a plan, or a list of plans, as JSON or as a JSON file, instead of the planner's for the problems that "
        "they name",
    )
    add(
        "--sweep",
        nargs="?",
        const="candidates",
        help="measure the planner's candidates for each shape, or those of a JSON file, and print the best (for "
        f"{', '.join(plans.OPS)})",
    )
    add(
        "--timeline",
        action="store_true",
        help="trace some calls of each shape and say where the time goes: the GEMM alone, SMs given up, waiting, the tail "
        f"(for {', '.join(plans.OPS)}; not in a sweep)",
    )
    add("--no-check", action="store_true", help="do not compare with the sequence's results first")
    add("--json", metavar="FILE", help="write JSON lines here ('-': to stdout)")
    add("--plot", metavar="FILE", help="draw the speed-ups into this PNG")
    return parser


def _json_text(value: str | None) -> str | None:
    """JSON given on the command line itself or as a file's name."""
    if value is None or value.lstrip()[:1] in ("{", "["):
        return value
    return Path(value).read_text()


def _names(option: str, text: str, allowed: Sequence[str]) -> tuple[str, ...]:
    """The names in a comma-separated list, each once; ValueError for one that is not allowed."""
    names = tuple(dict.fromkeys(filter(None, (part.strip() for part in text.split(",")))))
    if unknown := [name for name in names if name not in allowed]:
        raise ValueError(f"--{option} takes {', '.join(allowed)}, not {', '.join(unknown)}")
    return names


def _ops(text: str) -> tuple[str, ...]:
    names = _names("op", text, (*OPS, "all"))
    if not names:
        raise ValueError("--op names no op")
    expanded = [op for name in names for op in (ALL if name == "all" else (name,))]
    return tuple(dict.fromkeys(expanded))


def _modes(text: str, ops: tuple[str, ...], on_cpu: bool) -> tuple[str, ...]:
    modes = _names("modes", text, measure.MODES)
    if not modes:
        raise ValueError("--modes names no mode")
    possible = [mode for mode in modes if not (on_cpu and mode == "graph")]
    if not possible:
        raise ValueError(
            f"--modes {text} measures nothing on CPU: CUDA graphs need a GPU; take call, row"
        )
    if ops == ("block",) and not set(possible) & set(block.MODES):
        raise ValueError(f"--modes {text} measures nothing of block: take {', '.join(block.MODES)}")
    if len(possible) < len(modes):
        print("mode graph left out: CUDA graphs need a GPU", file=sys.stderr)
    if "block" in ops and "graph" in possible:
        print(f"block: only the modes {', '.join(block.MODES)}", file=sys.stderr)
    return tuple(possible)


def _baselines(text: str, ops: tuple[str, ...], on_cpu: bool) -> tuple[str, ...]:
    names = _names("baselines", text, BASELINES)
    if not names:
        return names
    if on_cpu and "block" not in ops:
        raise ValueError(
            f"--baselines {text} measures nothing on CPU: PyTorch's symmetric memory needs GPUs; leave it out"
        )
    possible = ("block", *(() if on_cpu else pytorch_ops.OPS))
    without = [op for op in ops if op not in possible]
    if len(without) == len(ops):
        raise ValueError(
            f"--baselines {text} measures nothing of {', '.join(ops)}: it is for {', '.join(possible)}"
        )
    if without:
        print(f"{', '.join(without)}: without the baselines of PyTorch", file=sys.stderr)
    return names


def options_of(argv: Sequence[str]) -> tuple[Ranks, Options]:
    """Reads the command line. Ends the process with status 2 if it is bad."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        ops = _ops(args.op)
        ranks = Ranks.choose(
            1 if args.world is None and ops == ("gemm",) else args.world, args.device
        )
        on_cpu = ranks.device_type == "cpu"
        if "gemm" in ops and on_cpu:
            raise ValueError("--op gemm needs a GPU: it times CUDA kernels")
        if "gemm" in ops and not gemm.available():
            raise ValueError("--op gemm needs a build with CUDA: this one has no gemm_alone")
        if args.sweep and (unplanned := [op for op in ops if op not in plans.OPS]):
            raise ValueError(
                f"--sweep is for {', '.join(plans.OPS)}: there are no plans to choose from for "
                f"{', '.join(unplanned)}"
            )
        if args.timeline and args.sweep:
            raise ValueError("--timeline is for one plan a shape, not for a sweep: leave one out")
        default_shapes = (
            "slow_link" if args.slow_link else ("1024x1024x1024" if on_cpu else "m_train")
        )
        default_blocks = (
            "512x8x4x1024@512"
            if on_cpu
            else ",".join(f"{model}@{tokens}" for model in shapes.MODELS for tokens in (4096, 8192))
        )
        blocks = shapes.parse_blocks(args.blocks or default_blocks) if "block" in ops else []
        for sizes in blocks:
            sizes.check_divisible(ranks.world_size)
        _check_scales(args.scales, args.dtype, args.fast_accum, ops)
        if args.replace_symm_mem and not args.baselines:
            raise ValueError(
                "--replace-symm-mem changes what --baselines pytorch measures: give both"
            )
        repeats = args.repeats or (10 if args.sweep else 20)
        options = Options(
            command=shlex.join(["python", "-m", "overlap_torch", "bench", *argv]),
            ops=ops,
            shapes=tuple(shapes.parse(args.shapes or default_shapes)),
            blocks=tuple(blocks),
            modes=_modes(args.modes, ops, on_cpu),
            dtype=DTYPES[args.dtype or ("fp32" if on_cpu else "bf16")],
            scales=args.scales,
            fast_accum=args.fast_accum,
            call_repeats=repeats,
            row_repeats=max(3, repeats // 4),
            baselines=_baselines(args.baselines, ops, on_cpu),
            replaces_symm_mem=args.replace_symm_mem,
            plans=_json_text(args.plan),
            sweep=args.sweep if args.sweep in (None, "candidates") else _json_text(args.sweep),
            check=not args.no_check,
            timeline=args.timeline,
            json_path=args.json,
            plot_path=args.plot,
        )
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if args.slow_link:
        # Peers' memory does not use that link.
        os.environ.update(NCCL_P2P_DISABLE="1", OVERLAP_PEERS="0")
    if options.baselines:
        pytorch_ops.prepare_environment()
    return ranks, options


def _check_scales(
    scales: str | None, dtype: str | None, fast_accum: bool, ops: Sequence[str]
) -> None:
    """Raises ValueError unless fp8 operands have scales, other operands have none, and both accumulations exist."""
    fp8 = dtype is not None and dtype.startswith("float8")
    if fp8 != (scales is not None):
        raise ValueError(
            f"--dtype is {dtype} and --scales {scales}: float8_e4m3fn and float8_e5m2 take --scales tensor, row or block, "
            "other types take none"
        )
    if fp8 and "block" in ops:
        raise ValueError(f"--dtype {dtype} is not for block: name other ops with --op")
    if scales == "block" and "gemm" in ops:
        raise ValueError(
            "--scales block is not for gemm: no signalling kernel has it; take tensor or row"
        )
    if fast_accum and scales not in ("tensor", "row"):
        raise ValueError(
            f"--fast-accum with --scales {scales}: allowed are tensor and row; leave it out"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status: 1 if a result was wrong or nothing was measured, 2 for a bad command line."""
    ranks, options = options_of(list(sys.argv[1:] if argv is None else argv))
    return launch(ranks, _bench_entry.run_rank, pickle.dumps(options))
