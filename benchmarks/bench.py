"""Times each op against its sequence (torch.mm and a collective of
torch.distributed), or a transformer block with the ops against one with
sequences. Checks results first; then all variants take turns in one run. Each
time is the slowest rank's. The command starts the ranks itself, or joins the
ranks that torchrun started.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from overlap_torch._tools.arguments import SHORT_DTYPES, count, output, picture, short_dtype

from . import block, computations, gemm, measure, plans, pytorch_ops, report, shapes, worker
from .study import Option, Study, choose_ranks, rank_rows

DTYPES = SHORT_DTYPES | {name: name for name in ("float8_e4m3fn", "float8_e5m2")}
ALL = (*computations.OPS, "block")  # the ops of "all"; gemm has no sequence


def _op(names: Sequence[str], args: Namespace) -> tuple[str, ...]:
    """All ops. They decide the ranks, which decide other options."""
    ops = tuple(dict.fromkeys(op for name in names for op in (ALL if name == "all" else (name,))))
    world = 1 if args.world is None and ops == ("gemm",) else args.world
    args.world = world
    choose_ranks(args)
    if "gemm" in ops and args.device == "cpu":
        raise ValueError("--op gemm needs a GPU: it times CUDA kernels")
    if "gemm" in ops and not gemm.available():
        raise ValueError("--op gemm needs a build with CUDA: this one has no gemm_alone")
    return ops


def _shapes(text: str | None, args: Namespace) -> list[shapes.Shape]:
    default = "1024x1024x1024" if args.device == "cpu" else "m_train"
    return shapes.parse(text or ("slow_link" if args.slow_link else default))


def _blocks(text: str | None, args: Namespace) -> list[shapes.Block]:
    models = [f"{model}@{tokens}" for model in shapes.MODELS for tokens in (4096, 8192)]
    default = "512x8x4x1024@512" if args.device == "cpu" else ",".join(models)
    blocks = shapes.parse_blocks(text or default) if "block" in args.op else []
    for sizes in blocks:
        sizes.check_divisible(args.world, "tokens")
    return blocks


def _modes(modes: tuple[str, ...], args: Namespace) -> tuple[str, ...]:
    possible = tuple(mode for mode in modes if args.device != "cpu" or mode != "graph")
    text = ",".join(modes)
    if not possible:
        raise ValueError(
            f"--modes {text} measures nothing on CPU: CUDA graphs need a GPU; take call, row"
        )
    if args.op == ("block",) and not set(possible) & set(block.MODES):
        raise ValueError(f"--modes {text} measures nothing of block: take {', '.join(block.MODES)}")
    if len(possible) < len(modes):
        print("mode graph left out: CUDA graphs need a GPU", file=sys.stderr)
    if "block" in args.op and "graph" in possible:
        print(f"block: only the modes {', '.join(block.MODES)}", file=sys.stderr)
    return possible


def _dtype(name: str | None, args: Namespace) -> str:
    fp8 = name is not None and name.startswith("float8")
    if fp8 != (args.scales is not None):
        raise ValueError(
            f"--dtype is {name} and --scales {args.scales}: float8_e4m3fn and float8_e5m2 take --scales tensor, row or "
            "block, other types take none"
        )
    if fp8 and "block" in args.op:
        raise ValueError(f"--dtype {name} is not for block: name other ops with --op")
    if args.scales == "block" and "gemm" in args.op:
        raise ValueError(
            "--scales block is not for gemm: no signalling kernel has it; take tensor or row"
        )
    if args.fast_accum and args.scales not in ("tensor", "row"):
        raise ValueError(
            f"--fast-accum with --scales {args.scales}: allowed are tensor and row; leave it out"
        )
    return DTYPES[name or ("fp32" if args.device == "cpu" else "bf16")]


def _baselines(names: tuple[str, ...], args: Namespace) -> tuple[str, ...]:
    if args.replace_symm_mem and not names:
        raise ValueError("--replace-symm-mem changes what --baselines pytorch measures: give both")
    if not names:
        return names
    text = ",".join(names)
    if args.device == "cpu" and "block" not in args.op:
        raise ValueError(
            f"--baselines {text} measures nothing on CPU: PyTorch's symmetric memory needs GPUs; leave it out"
        )
    possible = ("block", *(() if args.device == "cpu" else pytorch_ops.OPS))
    without = [op for op in args.op if op not in possible]
    if len(without) == len(args.op):
        raise ValueError(
            f"--baselines {text} measures nothing of {', '.join(args.op)}: it is for {', '.join(possible)}"
        )
    if without:
        print(f"{', '.join(without)}: without the baselines of PyTorch", file=sys.stderr)
    return names


def _json_text(value: str | None, args: Namespace) -> str | None:
    """JSON given on the command line itself or as a file's name."""
    if value is None:
        return value
    text = value if value.lstrip()[:1] in ("{", "[") else Path(value).read_text(encoding="utf-8")
    try:
        plans.parse(text)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{value[:200]} has no plans: {error}; allowed is what plan.files or --json wrote"
        ) from error
    return text


def _sweep(value: str | None, args: Namespace) -> str | None:
    if value and (unplanned := [op for op in args.op if op not in plans.OPS]):
        raise ValueError(
            f"--sweep is for {', '.join(plans.OPS)}: there are no plans to choose from for {', '.join(unplanned)}"
        )
    if value and args.timeline:
        raise ValueError("--timeline is for one plan a shape, not for a sweep: leave one out")
    return value if value == "candidates" else _json_text(value, args)


# Each check sees the values of the options above it.
OPTIONS = (
    Option(
        "--op",
        default="gemm_allreduce",
        allowed=(*ALL, "gemm", "all"),
        check=_op,
        help=f"comma-separated: {', '.join(ALL)}, all (these), or gemm: only the signalling GEMM, beside cuBLAS, "
        "on one GPU (default: gemm_allreduce)",
    ),
    Option(
        "--shapes",
        check=_shapes,
        help=f"comma-separated: {', '.join(shapes.GROUPS)} (groups of suite.json), or MxNxK, M the whole GEMM's rows, "
        "K one rank's part (default: m_train; on CPU 1024x1024x1024)",
    ),
    Option(
        "--blocks",
        check=_blocks,
        help=f"for block, comma-separated: MODEL@TOKENS, MODEL {' or '.join(shapes.MODELS)}, or "
        "HIDDENxHEADSxKV_HEADSxINTERMEDIATE@TOKENS, sizes before sharding (default: both models at 4096 and 8192 "
        "tokens; on CPU 512x8x4x1024@512)",
    ),
    Option(
        "--modes",
        default=",".join(measure.MODES),
        allowed=measure.MODES,
        check=_modes,
        help="comma-separated: call (one call after a barrier), row (ten in a row after a GEMM; time / 10), graph (ten in a CUDA "
        "graph; time / 10; not for block); default: all",
    ),
    Option(
        "--dtype",
        type=short_dtype,
        choices=list(DTYPES),
        check=_dtype,
        help="the operands' type (default: bf16, on CPU fp32); for fp8 the input's",
    ),
    Option(
        "--scales",
        choices=["tensor", "row", "block"],
        help="scales of fp8 operands; the output is bf16 (not for --op block; block scales not for gemm)",
    ),
    Option(
        "--fast-accum",
        action="store_true",
        help="for fp8 operands with scales of tensors or rows: use_fast_accum=True, in the ops and the sequence (gemm "
        "always has it)",
    ),
    Option(
        "--repeats",
        type=count,
        check=lambda repeats, args: repeats or (10 if args.sweep else 20),
        help="repetitions of a call (default: 20, in a sweep 10); row and graph take a quarter, of ten calls each",
    ),
    Option(
        "--baselines",
        default="",
        allowed=["pytorch"],
        check=_baselines,
        help="pytorch: adds PyTorch's own ops on symmetric memory to the same turns (not for "
        "gemm_alltoall, CPU), for block PyTorch's styles; sets TORCH_SYMM_MEM_DISABLE_MULTICAST=1 unless it is set",
    ),
    Option(
        "--replace-symm-mem",
        action="store_true",
        help="the baselines' fused ops run the replacements of overlap_torch.replace_symm_mem()",
    ),
    *rank_rows("all GPUs, or 2 on CPU; for only gemm 1"),
    Option(
        "--slow-link",
        action="store_true",
        help="NCCL_P2P_DISABLE=1, OVERLAP_PEERS=0: all goes through host memory; the default shapes are "
        "slow_link",
    ),
    Option(
        "--plan",
        "--plans",
        check=_json_text,
        help="a plan, or a list of plans, as JSON or as a JSON file, instead of the planner's for the problems that "
        "they name",
    ),
    Option(
        "--sweep",
        nargs="?",
        const="candidates",
        check=_sweep,
        help="measure the planner's candidates for each shape, or those of a JSON file, and print the best (for "
        f"{', '.join(plans.OPS)})",
    ),
    Option(
        "--timeline",
        action="store_true",
        help="trace some calls of each shape and say where the time goes: the GEMM alone, SMs given up, waiting, the tail "
        f"(for {', '.join(plans.OPS)}; not in a sweep)",
    ),
    Option(
        "--no-check", action="store_true", help="do not compare with the sequence's results first"
    ),
    Option("--json", type=output, metavar="FILE", help="write JSON lines here ('-': to stdout)"),
    Option("--plot", type=picture, metavar="FILE", help="draw the speed-ups: PNG, SVG or PDF"),
)


def _prepare(args: Namespace) -> None:
    if args.slow_link:
        # Peers' memory does not use that link.
        os.environ.update(NCCL_P2P_DISABLE="1", OVERLAP_PEERS="0")
    if args.baselines:
        pytorch_ops.prepare_environment()


STUDY = Study(
    OPTIONS, worker.rows, report.line, report.summary, _prepare, report.log, report.json_line, report.fault
)  # fmt: skip
