"""Results as JSON lines, as a markdown table with geometric means, and as a plot."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import torch

from . import plans
from .measure import Times
from .shapes import Shape

if TYPE_CHECKING:
    from .cli import Options

# What changes results besides the command line.
_ENVIRONMENT = (
    "NCCL_",
    "TORCH_NCCL_",
    "OVERLAP_",
    "CUDA_",
    "NVSHMEM_",
    "TORCH_SYMM_MEM_",
    "OMP_NUM_THREADS",
)


@dataclass(frozen=True)
class Bounds:
    """The sequence's two parts, each alone, in a row; microseconds."""

    gemm_us: float
    collective_us: float

    @property
    def us(self) -> float:
        return max(self.gemm_us, self.collective_us)


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def _table(titles: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(titles) + " |", "|" + " --- |" * len(titles)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _spread(times: dict[str, float]) -> str:
    return f"{times['median']:.1f} ({times['p10']:.1f}–{times['p90']:.1f})"


class Writer:
    """Collects results on rank 0 and writes them: JSON lines at once, tables and plot in the end. Silent elsewhere."""

    def __init__(self, options: Options, writes: bool) -> None:
        self._options = options
        self._writes = writes
        self._rows: list[dict] = []
        self._best: list[dict] = []
        self._title = ""
        self._file: TextIO | None = None
        if writes and options.json_path:
            self._file = (
                sys.stdout if options.json_path == "-" else Path(options.json_path).open("w")  # noqa: SIM115 (finish closes it)
            )

    def header(self, device: torch.device, world_size: int) -> None:
        """The command line and what it ran on."""
        cuda = device.type == "cuda"
        name = torch.cuda.get_device_name(device) if cuda else platform.machine()
        backend = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if cuda else "gloo"
        self._title = (
            f"{world_size} x {name}, {backend}, torch {torch.__version__}, {self._options.dtype}"
        )
        self._emit(
            {
                "kind": "run",
                "command": self._options.command,
                "device": name,
                "world_size": world_size,
                "backend": backend,
                "torch": torch.__version__,
                "build": torch.ops.overlap.build_info(),
                "environment": {
                    key: os.environ[key]
                    for key in sorted(os.environ)
                    if key.startswith(_ENVIRONMENT)
                },
            }
        )
        if self._writes:
            print(f"`{self._options.command}`\n\n{self._title}", flush=True)

    def measurement(
        self,
        shape: Shape,
        mode: str,
        sequence: Times,
        op: Times,
        bounds: Bounds,
        plan: plans.Plan,
        checked: bool | None,
    ) -> float:
        """One shape in one mode; returns the speed-up, the ratio of the medians."""
        speedup = sequence.median / op.median
        row = {
            "kind": "sweep" if self._options.sweep else "measurement",
            "op": self._options.op,
            "group": shape.group,
            "mode": mode,
            "m": shape.m,
            "n": shape.n,
            "k": shape.k,
            "dtype": self._options.dtype,
            "sequence_us": sequence.as_dict(),
            "op_us": op.as_dict(),
            "speedup": round(speedup, 4),
            "gemm_us": round(bounds.gemm_us, 2),
            "collective_us": round(bounds.collective_us, 2),
            "bound_speedup": round(sequence.median / bounds.us, 4),
            "checked": checked,
            "plan": plans.as_dict(plan),
        }
        self._emit(row)
        row |= {"shape": str(shape), "summary": plans.summary(plan)}
        self._rows.append(row)
        if self._writes:
            note = "" if checked is not False else "  WRONG RESULT"
            line = f"{shape} {mode}: {speedup:.3f}x  {op.median:.1f} us  {row['summary']}{note}"
            print(line, file=sys.stderr, flush=True)
        return speedup

    def wrong_plan(self, shape: Shape, plan: plans.Plan) -> None:
        """A plan of a sweep whose result differs from the composition; it is not timed."""
        self._emit(
            {"kind": "wrong", "m": shape.m, "n": shape.n, "k": shape.k, "plan": plans.as_dict(plan)}
        )
        if self._writes:
            print(f"{shape}: WRONG RESULT under {plans.summary(plan)}", file=sys.stderr, flush=True)

    def best(self, shape: Shape, mode: str, speedup: float, plan: plans.Plan) -> None:
        """The fastest plan of a sweep for one shape in one mode."""
        row = {
            "kind": "best",
            "mode": mode,
            "m": shape.m,
            "n": shape.n,
            "k": shape.k,
            "speedup": round(speedup, 4),
        }
        self._emit({**row, "plan": plans.as_dict(plan)})
        self._best.append(
            {**row, "shape": str(shape), "group": shape.group, "summary": plans.summary(plan)}
        )

    def finish(self) -> None:
        """Prints the tables, draws the plot."""
        if not self._writes:
            return
        print()
        if self._options.sweep:
            titles = ["M x N x K", "mode", "speed-up", "best plan"]
            rows = [
                [row["shape"], row["mode"], f"{row['speedup']:.3f}", row["summary"]]
                for row in self._best
            ]
            print(_table(titles, rows))
            means = self._best
        else:
            print(self._measurements())
            means = self._rows
        print("\n" + self._means(means), flush=True)
        if self._options.plot_path:
            self._plot(means)
        if self._file not in (None, sys.stdout):
            self._file.close()

    def _measurements(self) -> str:
        titles = [
            "M x N x K",
            "mode",
            "sequence µs",
            "op µs",
            "speed-up",
            "GEMM µs",
            "collective µs",
            "bound",
            "plan",
        ]
        rows = []
        for row in self._rows:
            speedup = f"**{row['speedup']:.3f}**" if row["checked"] is not False else "WRONG RESULT"
            alone = [
                f"{row['gemm_us']:.1f}",
                f"{row['collective_us']:.1f}",
                f"{row['bound_speedup']:.2f}",
            ]
            times = [_spread(row["sequence_us"]), _spread(row["op_us"])]
            rows.append([row["shape"], row["mode"], *times, speedup, *alone, row["summary"]])
        return (
            _table(titles, rows)
            + "\n\nMedian (10th to 90th percentile) of the slowest rank's times."
        )

    def _means(self, measured: list[dict]) -> str:
        rows = []
        for group, mode in dict.fromkeys((row["group"], row["mode"]) for row in measured):
            chosen = [row for row in measured if (row["group"], row["mode"]) == (group, mode)]
            lowest = min(chosen, key=lambda row: row["speedup"])
            cells = [
                group,
                mode,
                str(len(chosen)),
                f"{geometric_mean(row['speedup'] for row in chosen):.3f}",
            ]
            cells.append(f"{lowest['speedup']:.3f} ({lowest['shape']})")
            if "bound_speedup" in lowest:
                cells.append(f"{geometric_mean(row['bound_speedup'] for row in chosen):.2f}")
                cells += [
                    f"{geometric_mean(row[key]['host'] for row in chosen):.1f}"
                    for key in ("sequence_us", "op_us")
                ]
            rows.append(cells)
        titles = [
            "shapes",
            "mode",
            "count",
            "geometric mean",
            "lowest",
            "bound",
            "host µs, sequence",
            "host µs, op",
        ]
        return _table(titles[: len(rows[0])], rows) if rows else "nothing measured"

    def _plot(self, measured: list[dict]) -> None:
        try:
            from matplotlib.figure import Figure
        except ImportError:
            print("no plot: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
            return
        labels = list(dict.fromkeys(row["shape"] for row in measured))
        modes = list(dict.fromkeys(row["mode"] for row in measured))
        figure = Figure(figsize=(max(6.0, 0.9 * len(labels) + 2), 4.5), layout="constrained")
        axes = figure.subplots()
        width = 0.8 / max(1, len(modes))
        for position, mode in enumerate(modes):
            chosen = [row for row in measured if row["mode"] == mode]
            places = [
                labels.index(row["shape"]) + (position - (len(modes) - 1) / 2) * width
                for row in chosen
            ]
            axes.bar(places, [row["speedup"] for row in chosen], width, label=mode)
            if chosen and "bound_speedup" in chosen[0]:
                axes.scatter(
                    places,
                    [row["bound_speedup"] for row in chosen],
                    marker="_",
                    s=120,
                    color="black",
                    zorder=3,
                )
        axes.axhline(1.0, color="gray", lw=0.8)
        axes.set_xticks(range(len(labels)), labels, rotation=40, ha="right", fontsize=8)
        axes.set_ylabel("speed-up over the sequence (marks: bound)")
        axes.set_title(f"gemm_{self._options.op}: {self._title}", fontsize=9)
        axes.legend()
        figure.savefig(self._options.plot_path, dpi=150)

    def _emit(self, row: dict) -> None:
        if self._file is not None:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
