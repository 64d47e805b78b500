"""The rows of ``bench`` and what it prints: JSON lines at once, progress on stderr, tables and plot in the end."""

from __future__ import annotations

import json
import os
import platform
from argparse import Namespace
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from overlap_torch.plan import Plan
from overlap_torch.plan._explain import short
from overlap_torch.plan.files import to_dict

from . import plot, tables
from .measure import Times

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

    args: Namespace
    op: str
    group: str  # the geometric mean to which it counts
    label: str  # in tables
    fields: Mapping[str, object]  # in JSON: sizes, dtype, and all else that distinguishes subjects

    def row(
        self,
        kind: str,
        mode: str,
        found: tables.Row,
        plan: Plan | None = None,
        text: str = "",
    ) -> tables.Row:
        """The row of one mode; ``found`` is its numbers, and the log shows ``text``."""
        row = {
            "kind": kind,
            "op": self.op,
            "group": self.group,
            "mode": mode,
            **self.fields,
            "dtype": self.args.dtype,
            "scales": self.args.scales,
            "fast_accum": self.args.fast_accum,
            **found,
            "label": self.label,
        }
        if plan is not None:
            row |= {"plan": to_dict(plan), "summary": short(plan)}
        if text:
            note = "  WRONG RESULT" if row["checked"] is False else ""
            row["text"] = f"{self.op} {self.label} {mode}: {text}{note}"
        return row

    def wrong(self, plan: Plan) -> tables.Row:
        """A plan of a sweep whose result differs from the sequence's; it is not timed."""
        text = f"{self.op} {self.label} WRONG RESULT under {short(plan)}"
        row = {"kind": "wrong", "op": self.op, **self.fields, "plan": to_dict(plan)}
        return row | {"label": self.label, "text": text}


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


def header(args: Namespace, device: torch.device, world_size: int) -> tables.Row:
    """The command line and what it ran on."""
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else platform.machine()
    backend = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if cuda else "gloo"
    title = (
        f"{world_size} x {name}, {backend}, torch {torch.__version__}, {args.dtype}"
        + (f" scaled by {args.scales}" if args.scales else "")
        + (", fast accumulation" if args.fast_accum else "")
    )
    return {
        "kind": "run",
        "command": args.command,
        "device": name,
        "world_size": world_size,
        "backend": backend,
        "torch": torch.__version__,
        "build": torch.ops.overlap.build_info(),
        "environment": {
            key: os.environ[key] for key in sorted(os.environ) if key.startswith(_ENVIRONMENT)
        },
        "label": title,
    }


def measurement(
    subject: Subject,
    mode: str,
    times: Timed,
    checked: bool | None,
    bounds: Bounds,
    plan: Plan | None = None,
) -> tables.Row:
    """One subject in one mode."""
    found = {
        "sequence_us": times.sequence.as_dict(),
        "op_us": times.op.as_dict(),
        "speedup": round(times.speedup, 4),
        **times.pytorch_fields(),
        f"{bounds.compute}_us": round(bounds.compute_us, 2),
        "collective_us": round(bounds.collective_us, 2),
        "bound_speedup": round(times.sequence.median / bounds.us, 4),
        "checked": checked,
    }
    text = f"{times.speedup:.3f}x  {times.op.median:.1f} us  {short(plan) if plan else ''}"
    kind = "sweep" if subject.args.sweep else "measurement"
    return subject.row(kind, mode, found, plan, text)


# --- what the study prints ------------------------------------------------------------------------


def json_line(row: tables.Row) -> dict[str, object]:
    return {key: value for key, value in row.items() if key not in ("label", "summary", "text")}


def line(row: tables.Row) -> str:
    return f"`{row['command']}`\n\n{row['label']}" if row["kind"] == "run" else ""


def log(row: tables.Row) -> str:
    return row.get("text", "")


def summary(rows: Sequence[tables.Row], args: Namespace) -> str:
    """The tables; draws the plot."""
    kept = defaultdict(list)
    for row in rows:
        kept[row["kind"]].append(row)
    compared = kept["best" if args.sweep else "measurement"]
    texts = []
    for op in dict.fromkeys(row["op"] for row in compared):
        own = [row for row in compared if row["op"] == op]
        lines = tables.best_plans(own) if args.sweep else tables.measurements(own)
        texts.append(f"\n### {op}\n\n{lines}\n\n{tables.means(own)}")
        if lost := [row for row in kept["timeline"] if row["op"] == op]:
            texts.append(f"\n{tables.losses(lost)}")
    if kept["gemm"]:
        texts.append(f"\n### gemm\n\n{tables.gemms(kept['gemm'])}")
    if args.plot and compared:
        plot.draw(compared, kept["run"][0]["label"], args.plot)
    return "\n".join(texts)


def fault(rows: Sequence[tables.Row]) -> str:
    """The number of wrong results, or that nothing was measured."""
    wrong = {
        (row["op"], row["label"], json.dumps(row.get("plan")))
        for row in rows
        if row["kind"] == "wrong" or row.get("checked") is False
    }
    if wrong:
        return f"{len(wrong)} result(s) differ from the sequence's"
    if any(row["kind"] in ("measurement", "sweep", "gemm") for row in rows):
        return ""
    return (
        "nothing was measured: no plan of --sweep is for a problem of these ops, shapes, dtype and "
        f"world size ({rows[0]['world_size']})"
    )
