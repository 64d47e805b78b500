"""What a trace of the op shows: a Chrome trace, a picture, and how much communication was hidden.

A trace is the tensor that ``torch.ops.overlap.trace_stop`` returns on one rank: float64 [rows, 5] with the columns
call, chunk, ready_us, begin_us, end_us, times from the call's start. Rows with chunk >= 0 say when a chunk's tiles were
finished and its communication ran; the row with chunk -1 says when the GEMM (ready_us) and the op (end_us) ended. What a
GEMM communicates itself, tile by tile, over peers, begins with it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

_GEMM, _COMMUNICATION = 0, 1  # thread numbers in the Chrome trace
_GAP_US = 50.0  # drawn between calls, whose distance the trace does not tell


@dataclass(frozen=True)
class Chunk:
    """When a chunk's last tile was finished and when its communication ran; microseconds from the call's start."""

    index: int
    ready_us: float
    begin_us: float
    end_us: float


@dataclass(frozen=True)
class Call:
    """One call of an op on one rank; microseconds from its start."""

    number: int
    gemm_end_us: float
    end_us: float
    chunks: tuple[Chunk, ...]

    @property
    def hidden_fraction(self) -> float:
        """The share of the communication's time that lies before the GEMM's end; 0 without communication."""
        total = sum(chunk.end_us - chunk.begin_us for chunk in self.chunks)
        hidden = sum(
            max(0.0, min(chunk.end_us, self.gemm_end_us) - chunk.begin_us) for chunk in self.chunks
        )
        return hidden / total if total > 0 else 0.0


def calls_of(trace: torch.Tensor) -> list[Call]:
    """The calls in one rank's trace [rows, 5], by number; those without a closing row are left out."""
    if trace.dim() != 2 or trace.shape[1] != 5:
        raise ValueError(f"a trace is [rows, 5], but this one has shape {tuple(trace.shape)}")
    chunks: dict[int, list[Chunk]] = {}
    ends: dict[int, tuple[float, float]] = {}
    for number, index, ready_us, begin_us, end_us in trace.tolist():
        if index < 0:
            ends[int(number)] = (ready_us, end_us)
        else:
            chunks.setdefault(int(number), []).append(Chunk(int(index), ready_us, begin_us, end_us))
    return [
        Call(
            number,
            *ends[number],
            tuple(sorted(chunks.get(number, []), key=lambda chunk: chunk.index)),
        )
        for number in sorted(ends)
    ]


def hidden_fraction(traces: Sequence[torch.Tensor]) -> float:
    """The share of communication time before the GEMM's end, over all ranks' traces and calls."""
    total = hidden = 0.0
    for trace in traces:
        for call in calls_of(trace):
            communication = sum(chunk.end_us - chunk.begin_us for chunk in call.chunks)
            total += communication
            hidden += call.hidden_fraction * communication
    return hidden / total if total > 0 else 0.0


def chrome_trace(traces: Sequence[torch.Tensor]) -> dict[str, object]:
    """All ranks' traces (traces[r]: rank r's) as a Chrome trace; GEMM and communication are threads."""
    events: list[dict[str, object]] = []
    for rank, trace in enumerate(traces):
        events.append(
            {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        )
        for thread, title in ((_GEMM, "GEMM"), (_COMMUNICATION, "communication")):
            events.append(
                {
                    "ph": "M",
                    "name": "thread_name",
                    "pid": rank,
                    "tid": thread,
                    "args": {"name": title},
                }
            )
        start_us = 0.0
        for call in calls_of(trace):
            args = {"call": call.number, "hidden": round(call.hidden_fraction, 4)}
            gemm = {"ph": "X", "name": "GEMM", "pid": rank, "tid": _GEMM, "args": args}
            events.append({**gemm, "ts": start_us, "dur": call.gemm_end_us})
            for chunk in call.chunks:
                title = f"chunk {chunk.index}"
                ready = {"ph": "i", "s": "t", "name": f"{title} ready", "pid": rank, "tid": _GEMM}
                events.append({**ready, "ts": start_us + chunk.ready_us})
                sent = {
                    "ph": "X",
                    "name": title,
                    "pid": rank,
                    "tid": _COMMUNICATION,
                    "args": {"call": call.number},
                }
                events.append(
                    {**sent, "ts": start_us + chunk.begin_us, "dur": chunk.end_us - chunk.begin_us}
                )
            start_us += call.end_us + _GAP_US
    return {"displayTimeUnit": "ms", "traceEvents": events}


def write_chrome_trace(traces: Sequence[torch.Tensor], path: str | Path) -> None:
    """Writes :func:`chrome_trace` as JSON, for chrome://tracing or ui.perfetto.dev."""
    Path(path).write_text(json.dumps(chrome_trace(traces)) + "\n")


def write_picture(traces: Sequence[torch.Tensor], path: str | Path, title: str) -> None:
    """Draws each rank's last call as a PNG: the GEMM, a tick where each chunk was ready, the communication.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no rank recorded a call.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "the timeline's picture needs matplotlib: pip install matplotlib"
        ) from error

    last_calls = [
        (rank, calls[-1]) for rank, trace in enumerate(traces) if (calls := calls_of(trace))
    ]
    if not last_calls:
        raise ValueError("the traces hold no call: nothing ran between trace_start and trace_stop")
    scale, unit = (
        (1e-3, "ms") if max(call.end_us for _, call in last_calls) >= 10_000 else (1.0, "µs")
    )
    figure = Figure(figsize=(11, 1.2 + 1.1 * len(last_calls)), layout="constrained")
    axes = figure.subplots()
    labels: list[str] = []
    for row, (rank, call) in enumerate(last_calls):
        gemm, communication = 2.4 * row, 2.4 * row + 1
        axes.barh(gemm, call.gemm_end_us * scale, height=0.8, color="#4878a8")
        axes.vlines(
            [chunk.ready_us * scale for chunk in call.chunks],
            gemm - 0.4,
            gemm + 0.4,
            color="black",
            lw=1.2,
        )
        for chunk in call.chunks:
            color = "#e8a33d" if chunk.index % 2 == 0 else "#c9742b"
            width = (chunk.end_us - chunk.begin_us) * scale
            axes.barh(communication, width, left=chunk.begin_us * scale, height=0.8, color=color)
            middle = (chunk.begin_us + chunk.end_us) / 2 * scale
            axes.text(middle, communication, str(chunk.index), ha="center", va="center", fontsize=7)
        axes.vlines(
            call.gemm_end_us * scale,
            gemm - 0.4,
            communication + 0.4,
            color="#4878a8",
            ls="--",
            lw=1,
        )
        hidden = f"{call.hidden_fraction:.0%} hidden"
        axes.annotate(
            hidden,
            (call.end_us * scale, communication),
            (4, 0),
            textcoords="offset points",
            va="center",
        )
        labels += [f"rank {rank}: GEMM", "communication"]
    positions = [2.4 * row + lane for row in range(len(last_calls)) for lane in (0, 1)]
    axes.set_yticks(positions, labels)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.13 * max(call.end_us for _, call in last_calls) * scale)
    axes.set_xlabel(f"{unit} from the call's start; ticks: a chunk's tiles are finished")
    axes.set_title(title, fontsize=10)
    figure.savefig(path, dpi=150)
