"""``python -m benchmarks NAME``: the studies. Each has problems, and prints a row for each variant line by line."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from overlap_torch._tools.launch import Ranks, add_options, launch

NAMES = {
    "tuned": "tuned plans beside the planner's and the sequence, over random problems",
    "experts": "a mixture of experts beside PyTorch's ops one after the other",
    "attention": "attention of a cut sequence beside Ulysses, a gather and a ring",
    "rmsnorm": "an all-reduce with residual and RMSNorm beside NCCL and a compiled norm",
    "invariance": "all-reduces whose bits depend on no other row or rank beside NCCL",
    "hosts": "groups on several hosts by the cost model, beside NCCL; measures nothing",
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


# --- options that several studies have ------------------------------------------------------------------------


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


def add_models(parser: argparse.ArgumentParser, models: Iterable[str], tokens: str) -> None:
    """``--models``, ``--tokens`` (``tokens`` says whose) and ``--passes``."""
    known = ",".join(name for name in models if name != "tiny")
    parser.add_argument("--models", default=known, help=f"of {', '.join(models)}")
    parser.add_argument("--tokens", type=numbers, help=tokens)
    parser.add_argument("--passes", default="forward,both")


def prepare_models(args: argparse.Namespace, models: Collection[str]) -> None:
    args.models = args.models.split(",")
    args.passes = [each == "both" for each in args.passes.split(",")]
    if unknown := set(args.models) - set(models):
        raise ValueError(f"--models: {', '.join(sorted(unknown))}: choose from {', '.join(models)}")


def model_cases(args: argparse.Namespace) -> Iterator[tuple[str, int, bool]]:
    """Each model, number of tokens, and whether backward comes after forward."""
    return itertools.product(args.models, args.tokens, args.passes)


def check_close(what: str, found: torch.Tensor, right: torch.Tensor, most: float) -> None:
    """Raises RuntimeError unless the root mean square error is less than ``most`` of the right values': NaN fails, too."""
    error = ((found - right).norm() / right.norm()).item()
    if not error < most:
        raise RuntimeError(f"{what} off by {error:.3f}")


def pass_of(row: dict) -> str:
    return "forward and backward" if row["backward"] else "forward"


# --- running them ---------------------------------------------------------------------------------------------


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
    if args.json:
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
    parser.add_argument("--json", help="a file for the rows")
    add_options(parser)
    args = parser.parse_args(argv[1:])
    args.study = name
    try:
        study.prepare(args)
        ranks = Ranks.choose(args.world, args.device)
    except ValueError as error:
        parser.error(str(error))
    args.device = ranks.device_type
    return launch(ranks, run_rank, args)
