"""``python -m benchmarks NAME``: the studies. Each has problems, and prints a row for each variant line by line."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from overlap_torch._tools.launch import Ranks, launch

NAMES = {
    "tuned": "tuned plans beside the planner's and the sequence, over random problems",
    "experts": "a mixture of experts beside PyTorch's ops one after the other",
    "attention": "attention of a cut sequence beside Ulysses, a gather and a ring",
    "rmsnorm": "an all-reduce with residual and RMSNorm beside NCCL and a compiled norm",
    "decode": "steps of greedy decoding of a Llama's layers, in CUDA graphs",
    "transformers_models": "a Hugging Face model by transformers' styles and by ours",
}


@dataclass(frozen=True)
class Study:
    """How one study goes.

    Attributes:
        options: adds its options to a parser.
        rows: measures, on every rank, and gives a row for each problem or variant.
        line: the text to print for a row at once; "" prints nothing.
        summary: the text to print for all rows.
        prepare: completes the options before anything starts; ValueError where they are bad.
    """

    options: Callable[[argparse.ArgumentParser], None]
    rows: Callable[[argparse.Namespace], Iterable[Any]]
    line: Callable[[Any], str]
    summary: Callable[[list[Any], argparse.Namespace], str]
    prepare: Callable[[argparse.Namespace], None] = lambda args: None


def run_rank(args: argparse.Namespace) -> None:
    """Does the work of each rank."""
    study = importlib.import_module(f".{args.study}", __package__).STUDY
    begin = time.monotonic()
    rows = []
    first = dist.get_rank() == 0
    for row in study.rows(args):
        rows.append(row)
        if first and (line := study.line(row)):
            print(line, flush=True)
    if not first:
        return
    if summary := study.summary(rows, args):
        print(summary)
    print(f"{time.monotonic() - begin:.0f} s", file=sys.stderr)
    if getattr(args, "json", None):
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one study with the rest of the arguments; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        epilog="\n".join(f"{name:20} {meaning}" for name, meaning in NAMES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("study", choices=NAMES)
    name = parser.parse_args(argv[:1]).study
    module = importlib.import_module(f".{name}", __package__)
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    study = module.STUDY
    study.options(parser)
    parser.add_argument("--world", type=int, help="ranks (default: all GPUs, or 2 on CPU)")
    parser.add_argument("--device", choices=["cuda", "cpu"])
    args = parser.parse_args(argv[1:])
    args.study = name
    try:
        study.prepare(args)
        ranks = Ranks.choose(args.world, args.device)
    except ValueError as error:
        parser.error(str(error))
    args.device = ranks.device_type
    launch(ranks, run_rank, args)
    return 0
