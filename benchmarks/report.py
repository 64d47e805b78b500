"""Results as they come: JSON lines at once, progress on stderr, tables and plot in the end."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import torch

from overlap_torch.plan._explain import short
from overlap_torch.plan._names import enum_name
from overlap_torch.plan.files import to_dict

from . import plans, plot, tables
from .losses import Losses
from .measure import Times
from .options import Options

# These variables change results besides the command line.
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
class Subject:
    """The subject of a measurement: an op on one shape, or a block."""

    op: str
    group: str  # the geometric mean to which it counts
    label: str  # in tables
    fields: Mapping[str, object]  # in JSON: sizes, dtype, and all else that distinguishes subjects


@dataclass(frozen=True)
class Bounds:
    """The sequence's two parts, each alone, in a row; microseconds."""

    compute_us: float
    collective_us: float
    compute: str = "gemm"  # the computing part; for a block "compute", all except its communication

    @property
    def us(self) -> float:
        return max(self.compute_us, self.collective_us)


@dataclass(frozen=True)
class Timed:
    """One comparison: the sequence, the op, PyTorch's own ops by name."""

    sequence: Times
    op: Times
    pytorch: Mapping[str, Times] = field(default_factory=dict)
    pytorch_checked: Mapping[str, bool] = field(default_factory=dict)

    @property
    def speedup(self) -> float:
        """The ratio of the medians."""
        return self.sequence.median / self.op.median

    def pytorch_fields(self) -> dict[str, object]:
        """For JSON: all times, and the fastest of those that were not found wrong."""
        if not self.pytorch:
            return {}
        right = [name for name in self.pytorch if self.pytorch_checked.get(name, True)]
        best = min(right, key=lambda name: self.pytorch[name].median, default=None)
        speedup = best and round(self.sequence.median / self.pytorch[best].median, 4)
        return {
            "pytorch_us": {name: times.as_dict() for name, times in self.pytorch.items()},
            "pytorch_checked": dict(self.pytorch_checked),
            "pytorch_best": best,
            "pytorch_speedup": speedup,
        }


class Writer:
    """Collects results on rank 0 and writes them: JSON lines at once, tables and plot in the end. Silent elsewhere."""

    def __init__(self, options: Options, writes: bool) -> None:
        self._options = options
        self._writes = writes
        self._kept: defaultdict[str, list[tables.Row]] = defaultdict(list)  # by kind, for tables
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
            + (f" scaled by {self._options.scales}" if self._options.scales else "")
            + (", fast accumulation" if self._options.fast_accum else "")
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
        subject: Subject,
        mode: str,
        times: Timed,
        checked: bool | None,
        *,
        bounds: Bounds | None = None,
        plan: plans.Plan | None = None,
    ) -> float:
        """One subject in one mode; returns the speed-up."""
        row = self._row("sweep" if self._options.sweep else "measurement", subject, mode)
        row |= {
            "sequence_us": times.sequence.as_dict(),
            "op_us": times.op.as_dict(),
            "speedup": round(times.speedup, 4),
        }
        row |= times.pytorch_fields()
        if bounds is not None:
            row |= {
                f"{bounds.compute}_us": round(bounds.compute_us, 2),
                "collective_us": round(bounds.collective_us, 2),
                "bound_speedup": round(times.sequence.median / bounds.us, 4),
            }
        row["checked"] = checked
        self._keep(row, subject, plan)
        note = "" if checked is not False else "  WRONG RESULT"
        text = f"{times.speedup:.3f}x  {times.op.median:.1f} us"
        self._progress(subject, f"{mode}: {text}  {short(plan) if plan else ''}{note}")
        return times.speedup

    def gemm(
        self,
        subject: Subject,
        mode: str,
        library: Times,
        kernel: Times,
        ratio: float,
        plan: plans.Plan,
        checked: bool | None,
    ) -> None:
        """A plan's GEMM alone beside cuBLAS; `ratio` is the time over cuBLAS's."""
        row = self._row("gemm", subject, mode) | {
            "kernel": enum_name(plan.kernel),
            "layout": enum_name(plan.layout),
            "library_us": library.as_dict(),
            "kernel_us": kernel.as_dict(),
            "ratio": round(ratio, 4),
            "checked": checked,
        }
        self._keep(row, subject, plan)
        note = "" if checked is not False else "  WRONG RESULT"
        self._progress(subject, f"{mode}: {ratio:.3f} of cuBLAS's time  {short(plan)}{note}")

    def losses(self, subject: Subject, lost: Losses, plan: plans.Plan) -> None:
        """Where the time of an op's calls went."""
        row = self._row("timeline", subject, "call") | lost.as_dict()
        self._keep(row | {"op_us": round(lost.op_us, 2)}, subject, plan)

    def wrong_plan(self, subject: Subject, plan: plans.Plan) -> None:
        """A plan of a sweep whose result differs from the sequence's; it is not timed."""
        self._emit({"kind": "wrong", "op": subject.op, **subject.fields, "plan": to_dict(plan)})
        self._progress(subject, f"WRONG RESULT under {short(plan)}")

    def best(self, subject: Subject, mode: str, speedup: float, plan: plans.Plan) -> None:
        """The fastest plan of a sweep for one subject in one mode."""
        row = self._row("best", subject, mode) | {"speedup": round(speedup, 4)}
        self._keep(row, subject, plan)

    @property
    def measured(self) -> bool:
        """True if there are any results yet; the same on every rank."""
        return any(self._kept[kind] for kind in ("measurement", "sweep", "gemm"))

    def finish(self) -> None:
        """Prints the tables, draws the plot."""
        if not self._writes:
            return
        compared = self._kept["best" if self._options.sweep else "measurement"]
        for op in dict.fromkeys(row["op"] for row in compared):
            rows = [row for row in compared if row["op"] == op]
            lines = tables.best_plans(rows) if self._options.sweep else tables.measurements(rows)
            print(f"\n### {op}\n\n{lines}\n\n{tables.means(rows)}", flush=True)
            if lost := [row for row in self._kept["timeline"] if row["op"] == op]:
                print(f"\n{tables.losses(lost)}", flush=True)
        if gemms := self._kept["gemm"]:
            print(f"\n### gemm\n\n{tables.gemms(gemms)}", flush=True)
        if self._options.plot_path and compared:
            plot.draw(compared, self._title, self._options.plot_path)
        if self._file not in (None, sys.stdout):
            self._file.close()

    def _row(self, kind: str, subject: Subject, mode: str) -> tables.Row:
        return {
            "kind": kind,
            "op": subject.op,
            "group": subject.group,
            "mode": mode,
            **subject.fields,
            "dtype": self._options.dtype,
            "scales": self._options.scales,
            "fast_accum": self._options.fast_accum,
        }

    def _keep(self, row: tables.Row, subject: Subject, plan: plans.Plan | None) -> None:
        """Writes the row with its plan, and keeps it for a table."""
        if plan is not None:
            row = row | {"plan": to_dict(plan)}
        self._emit(row)
        shown = {"label": subject.label} | ({"summary": short(plan)} if plan else {})
        self._kept[row["kind"]].append(row | shown)

    def _progress(self, subject: Subject, text: str) -> None:
        if self._writes:
            print(f"{subject.op} {subject.label} {text}", file=sys.stderr, flush=True)

    def _emit(self, row: dict[str, object]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
