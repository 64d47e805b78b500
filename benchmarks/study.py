"""``python -m benchmarks NAME``: the studies. Each has problems, and prints a row for each variant line by line."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import pickle
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from overlap_torch._tools import bench as bench_entry
from overlap_torch._tools.arguments import count, counts, output
from overlap_torch._tools.launch import Ranks, launch, rank_options

from .measure import MODES

NAMES = {
    "bench": "each op beside its sequence: python -m overlap_torch bench",
    "tuned": "tuned plans beside the planner's and the sequence, over random problems",
    "experts": "a mixture of experts beside PyTorch's ops one after the other",
    "attention": "attention of a cut sequence beside Ulysses, a gather and a ring",
    "rmsnorm": "an all-reduce with residual and RMSNorm beside NCCL and a compiled norm",
    "invariance": "all-reduces whose bits depend on no other row or rank beside NCCL",
    "hosts": "groups on several hosts by the cost model, beside NCCL; measures nothing",
    "decode": "steps of greedy decoding of a Llama's layers, in CUDA graphs",
    "transformers_models": "a Hugging Face model by transformers' styles and by ours",
}


class Option:
    """One option of a study.

    Attributes:
        allowed: the option is a comma-separated list of these names; its value is a tuple, each name once.
        check: gives the value that ranks get, from the value and all options, of which those before it are checked; ValueError
            where they do not go together.
        arguments: argparse's.
    """

    def __init__(
        self,
        *flags: str,
        allowed: Sequence[str] = (),
        check: Callable[[Any, argparse.Namespace], Any] | None = None,
        **arguments: Any,
    ) -> None:
        self.flags, self.arguments = flags, arguments
        self.allowed, self.check = tuple(allowed), check
        arguments["help"] = self._help(arguments.get("help", ""), arguments.get("default"))
        self.name = flags[0].lstrip("-").replace("-", "_")

    def _help(self, meaning: str, default: Any) -> str:
        if self.allowed and not meaning:
            meaning = f"comma-separated: {', '.join(self.allowed)}"
        if default in (None, "") or "default" in meaning:
            return meaning
        text = ",".join(map(str, default)) if isinstance(default, list | tuple) else default
        return f"{meaning} (default: {text})".lstrip()

    def value(self, args: argparse.Namespace) -> Any:
        """The value that ranks get."""
        found = getattr(args, self.name)
        if self.allowed:
            found = self._listed(found)
        return self.check(found, args) if self.check else found

    def _listed(self, text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(filter(None, (part.strip() for part in text.split(",")))))
        if unknown := [name for name in names if name not in self.allowed]:
            allowed = ", ".join(self.allowed)
            raise ValueError(f"{self.flags[0]} takes {allowed}, not {', '.join(unknown)}")
        if not names and self.arguments["default"]:
            raise ValueError(f"{self.flags[0]} names no {self.name}")
        return names


@dataclass(frozen=True)
class Study:
    """How one study goes.

    Attributes:
        options: its own options; with ``--world`` among them, a check chooses the ranks.
        rows: measures, on every rank, and gives a row for each problem or variant.
        line: the text to print for a row at once; "" prints nothing.
        summary: the text to print for all rows.
        prepare: completes what several options decide, before anything starts; ValueError where they are bad.
        log: as ``line``, on stderr.
        json_line: what ``--json`` takes of a row, a line of it at once; without it, all rows in the end.
        fault: the reason why the study failed, from all rows.
    """

    options: Sequence[Option]
    rows: Callable[[argparse.Namespace], Iterable[Any]]
    line: Callable[[Any], str] = lambda row: ""
    summary: Callable[[list[Any], argparse.Namespace], str] = lambda rows, args: ""
    prepare: Callable[[argparse.Namespace], None] = lambda args: None
    log: Callable[[Any], str] = lambda row: ""
    json_line: Callable[[Any], dict] | None = None
    fault: Callable[[list[Any]], str] = lambda rows: ""


# --- options that several studies have ------------------------------------------------------------------------

JSON = Option("--json", type=output, help="a file for the rows")
REPEATS = partial(Option, "--repeats", type=count, help="turns of all variants")


def rank_rows(world: str = "all GPUs, or 2 on CPU") -> list[Option]:
    return [Option(flag, **arguments) for flag, arguments in rank_options(world).items()]


def choose_ranks(args: argparse.Namespace) -> None:
    """Puts in what ``--world`` and ``--device`` leave open, before checks that depend on it."""
    ranks = Ranks.choose(args.world, args.device)
    args.world, args.device = ranks.world_size, ranks.device_type


def modes_here(modes: Sequence[str], args: argparse.Namespace) -> Sequence[str]:
    """The modes; raises ValueError for CUDA graphs on ranks without a GPU."""
    if "graph" in modes and args.device == "cpu":
        raise ValueError(
            "mode graph measures nothing on CPU: CUDA graphs need a GPU; take call, row"
        )
    return modes


MODE = Option(
    "--mode",
    choices=MODES,
    check=lambda mode, args: modes_here(
        [mode or ("row" if args.device == "cpu" else "graph")], args
    )[0],
    help="default: graph, on CPU row",
)


def model_rows(models: Iterable[str], whose: str, tokens: list[int]) -> list[Option]:
    """``--models``, ``--tokens`` and ``--passes``."""
    known = ",".join(name for name in models if name != "tiny")
    return [
        Option("--models", default=known, allowed=models, help=f"of {', '.join(models)}"),
        Option("--tokens", type=counts, default=tokens, help=whose),
        Option("--passes", default="forward,both", allowed=("forward", "both")),
    ]


def model_cases(args: argparse.Namespace) -> Iterator[tuple[str, int, bool]]:
    """Each model, number of tokens, and whether backward comes after forward."""
    return itertools.product(args.models, args.tokens, [each == "both" for each in args.passes])


def check_close(what: str, found: torch.Tensor, right: torch.Tensor, most: float) -> None:
    """Raises RuntimeError unless the root mean square error is less than ``most`` of the right values': NaN fails, too."""
    error = ((found - right).norm() / right.norm()).item()
    if not error < most:
        raise RuntimeError(f"{what} off by {error:.3f}")


def pass_of(row: dict) -> str:
    return "forward and backward" if row["backward"] else "forward"


# --- running them ---------------------------------------------------------------------------------------------


def _module(name: str) -> ModuleType:
    return importlib.import_module(f".{name}", __package__)


def run_rank(args: argparse.Namespace) -> None:
    """Does the work of each rank. Ends the process with status 1 where the study has a fault."""
    study, first, begin = _module(args.study).STUDY, dist.get_rank() == 0, time.monotonic()
    rows = []
    path = (args.json if first else None) or os.devnull
    with open(1 if path == "-" else path, "w", encoding="utf-8", closefd=path != "-") as file:
        for row in study.rows(args):
            rows.append(row)
            if not first:
                continue
            if study.json_line:
                print(json.dumps(study.json_line(row)), file=file, flush=True)
            for show, stream in ((study.line, sys.stdout), (study.log, sys.stderr)):
                if text := show(row):
                    print(text, file=stream, flush=True)
        if first:
            if text := study.summary(rows, args):
                print(text, flush=True)
            print(f"{time.monotonic() - begin:.0f} s", file=sys.stderr)
            if not study.json_line:
                print(json.dumps(rows, indent=1, default=lambda times: times.as_dict()), file=file)
    if fault := study.fault(rows):
        if first:
            print(fault, file=sys.stderr)
        dist.barrier()  # a rank that ends with status 1 ends the others
        sys.exit(1)


def parse(name: str, argv: Sequence[str]) -> argparse.Namespace:
    """A study's options as the ranks get them. Ends the process with status 2 where they are bad."""
    study = _module(name).STUDY
    program = f"python -m {'overlap_torch bench' if name == 'bench' else f'benchmarks {name}'}"
    parser = argparse.ArgumentParser(
        prog=program,
        description=_module(name).__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    own = {row.name for row in study.options}
    rows = [*study.options, *(row for row in (JSON, *rank_rows()) if row.name not in own)]
    for row in rows:
        parser.add_argument(*row.flags, **row.arguments)
    args = parser.parse_args(argv)
    args.study, args.command = name, shlex.join([*program.split(), *argv])
    try:
        if "world" not in own:
            choose_ranks(args)
        for row in rows:
            setattr(args, row.name, row.value(args))
        study.prepare(args)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one study with the rest of the arguments; returns the exit status: 1 where it has a fault, 2 for bad options."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        epilog="\n".join(f"{name:20} {meaning}" for name, meaning in NAMES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("study", choices=NAMES)
    args = parse(parser.parse_args(argv[:1]).study, argv[1:])
    return launch(Ranks(args.world, args.device), bench_entry.run_rank, pickle.dumps(args))
