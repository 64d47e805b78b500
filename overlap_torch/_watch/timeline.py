"""What a trace of the ops shows: calls, a Chrome trace, a picture, and how much communication was hidden."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GEMM, _CHUNKS = "#4878a8", ("#e8a33d", "#c9742b")


@dataclass(frozen=True)
class Chunk:
    """A chunk of one call; times in microseconds from the call's start.

    Attributes:
        index: of the chunk, from 0.
        ready_us: when its last tile was finished, or, where the input is gathered, when its rows could be used.
        begin_us: when its communication began. What a GEMM communicates itself, tile by tile, over peers, begins with it.
        end_us: when its communication had ended.
    """

    index: int
    ready_us: float
    begin_us: float
    end_us: float


@dataclass(frozen=True)
class Call:
    """One call of an op on one rank.

    Attributes:
        op: its name, ``"gemm_allreduce"`` and so on.
        m, n, k: what the GEMM multiplies on this rank, as in :class:`overlap_torch.plan.Problem`; m is 0 for
            ``gemm_alltoall``, whose rows differ by rank.
        dtype: ``"bfloat16"``, ``"float16"``, ``"float32"`` or ``"float64"``.
        world_size: ranks of the group.
        group: the process group's name.
        device: ``"cpu"``, ``"cuda:0"``, ...
        start_us: when it started, in microseconds from the start of the trace's first call on that device. The devices'
            and the ranks' clocks are not aligned.
        gemm_end_us: when its GEMM ended, in microseconds from the call's start.
        end_us: when it ended, in microseconds from the call's start.
        chunks: what was communicated, by index; one chunk where nothing was cut.
    """

    op: str
    m: int
    n: int
    k: int
    dtype: str
    world_size: int
    group: str
    device: str
    start_us: float
    gemm_end_us: float
    end_us: float
    chunks: tuple[Chunk, ...]

    @property
    def hidden_fraction(self) -> float:
        """The share of the communication's time that lies before the GEMM's end; 0 without communication.

        A gather that is waited for in front of the GEMM, as the sequence's is, counts as well: :func:`overlap_torch.report`
        says which calls ran as the sequence.
        """
        total = sum(chunk.end_us - chunk.begin_us for chunk in self.chunks)
        hidden = sum(
            max(0.0, min(chunk.end_us, self.gemm_end_us) - chunk.begin_us) for chunk in self.chunks
        )
        return hidden / total if total > 0 else 0.0

    @property
    def title(self) -> str:
        """Op and problem in words."""
        return f"{self.op} {self.m} x {self.n} x {self.k} {self.dtype}"


def calls_of(rows: torch.Tensor, columns: Sequence[Mapping[str, str]]) -> list[Call]:
    """The calls that ``torch.ops.overlap._trace_stop`` returns, by device in the order of their starts.

    ``rows`` is float64 [rows, 5]: call, chunk, ready_us, begin_us, end_us, times from the call's start. The row with chunk
    -1 says when the GEMM had ended (ready_us) and the op (end_us), and when the call started (begin_us), from some instant
    of the device's own. ``columns[call]`` says what was called.
    """
    chunks: dict[int, list[Chunk]] = {}
    ends: dict[int, tuple[float, float, float]] = {}
    for number, index, ready_us, begin_us, end_us in rows.tolist():
        if index < 0:
            ends[int(number)] = (begin_us, ready_us, end_us)
        else:
            chunks.setdefault(int(number), []).append(Chunk(int(index), ready_us, begin_us, end_us))
    origins: dict[str, float] = {}
    for number, (start_us, _, _) in ends.items():
        device = columns[number]["device"]
        origins[device] = min(start_us, origins.get(device, start_us))
    calls = []
    for number, (start_us, gemm_end_us, end_us) in ends.items():
        column = columns[number]
        calls.append(
            Call(
                op=column["op"],
                m=int(column["m"]),
                n=int(column["n"]),
                k=int(column["k"]),
                dtype=column["dtype"],
                world_size=int(column["world_size"]),
                group=column["group"],
                device=column["device"],
                start_us=start_us - origins[column["device"]],
                gemm_end_us=gemm_end_us,
                end_us=end_us,
                chunks=tuple(sorted(chunks.get(number, []), key=lambda chunk: chunk.index)),
            )
        )
    return sorted(calls, key=lambda call: (call.device, call.start_us))


def chrome_trace(ranks: Mapping[int, Iterable[Call]]) -> dict[str, object]:
    """Calls by rank as a Chrome trace: ranks are processes, GEMMs and communication of a device are threads."""
    events: list[dict[str, object]] = []
    for rank, calls in ranks.items():
        threads: dict[str, int] = {}

        def name(event: str, title: str, rank: int = rank, **more: object) -> None:
            events.append({"ph": "M", "name": event, "pid": rank, "args": {"name": title}, **more})

        name("process_name", f"rank {rank}")
        for call in calls:
            if call.device not in threads:
                threads[call.device] = 2 * len(threads)
                name("thread_name", f"{call.device} GEMM", tid=threads[call.device])
                name("thread_name", f"{call.device} communication", tid=threads[call.device] + 1)
            gemm = {"pid": rank, "tid": threads[call.device]}
            communication = {"pid": rank, "tid": threads[call.device] + 1}
            args = {"group": call.group, "hidden": round(call.hidden_fraction, 4)}
            shown = {"ph": "X", "name": call.title, "ts": call.start_us, "dur": call.gemm_end_us}
            events.append({**shown, **gemm, "args": args})
            for chunk in call.chunks:
                title = f"chunk {chunk.index}"
                ready = {"ph": "i", "s": "t", "name": f"{title} ready", **gemm}
                events.append({**ready, "ts": call.start_us + chunk.ready_us})
                sent = {"ph": "X", "name": title, **communication, "args": {"call": call.title}}
                begin, duration = call.start_us + chunk.begin_us, chunk.end_us - chunk.begin_us
                events.append({**sent, "ts": begin, "dur": duration})
    return {"displayTimeUnit": "ms", "traceEvents": events}


def write_chrome_trace(ranks: Mapping[int, Iterable[Call]], path: str | Path) -> None:
    """Writes :func:`chrome_trace` as JSON, for chrome://tracing or ui.perfetto.dev."""
    Path(path).write_text(json.dumps(chrome_trace(ranks)) + "\n")


@dataclass(frozen=True)
class Bar:
    """A GEMM, which is named so, or a collective, beside which nothing runs; times in microseconds."""

    name: str
    begin_us: float
    end_us: float


def write_picture(
    lanes: Mapping[str, Sequence[Call]],
    path: str | Path,
    title: str,
    before: Mapping[str, Sequence[Bar]] | None = None,
) -> None:
    """Draws each lane's calls: the GEMMs, a tick where each chunk was ready, the communication.

    A lane's times are from the start of its first call. ``before``: lanes that stand above, of bars one after the other.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is no call.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(
            "the timeline's picture needs matplotlib: pip install matplotlib"
        ) from error

    lanes = {name: calls for name, calls in lanes.items() if calls}
    if not lanes:
        raise ValueError(
            "no call to draw: no op communicated anything while the trace was on (a group of one has nothing to communicate)"
        )
    starts = {name: min(call.start_us for call in calls) for name, calls in lanes.items()}
    total_us = max(
        call.start_us + call.end_us - starts[name]
        for name, calls in lanes.items()
        for call in calls
    )
    above = list((before or {}).items())
    total_us = max([total_us, *(bar.end_us for _, bars in above for bar in bars)])
    scale, unit = (1e-3, "ms") if total_us >= 10_000 else (1.0, "µs")
    figure = Figure(figsize=(11, 1.7 + 0.6 * len(above) + 1.1 * len(lanes)), layout="constrained")
    axes = figure.subplots()
    for row, (_, bars) in enumerate(above):
        _draw_bars(axes, 1.4 * row, bars, total_us, scale)
    first = 1.4 * len(above)
    for row, (name, calls) in enumerate(lanes.items()):
        _draw_calls(axes, first + 2.4 * row, calls, starts[name], total_us, scale)
    labels = [name for name, _ in above]
    for name in lanes:
        labels += [f"{name}: GEMM", "communication"]
    positions = [1.4 * row for row in range(len(above))]
    positions += [first + 2.4 * row + lane for row in range(len(lanes)) for lane in (0, 1)]
    axes.set_yticks(positions, labels)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.13 * total_us * scale)
    axes.set_xlabel(f"{unit} from the first call's start")
    axes.set_title(title, fontsize=10)
    marks = [
        Patch(color=_GEMM, label="GEMM"),
        Patch(color=_CHUNKS[0], label="communication, with the chunk's number"),
        Line2D([], [], color="black", marker="|", ls="", ms=9, label="a chunk is ready"),
        Line2D([], [], color=_GEMM, ls="--", lw=1, label="the GEMM has ended"),
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)


def _draw_bars(axes: Axes, at: float, bars: Sequence[Bar], total_us: float, scale: float) -> None:
    for bar in bars:
        left, width = bar.begin_us * scale, (bar.end_us - bar.begin_us) * scale
        color = _GEMM if bar.name == "GEMM" else _CHUNKS[0]
        axes.barh(at, width, left=left, height=0.8, color=color)
        if width > 0.08 * total_us * scale:  # room for a word
            axes.text(left + width / 2, at, bar.name, ha="center", va="center", fontsize=8)


def _draw_calls(
    axes: Axes, gemm: float, calls: Sequence[Call], first_us: float, total_us: float, scale: float
) -> None:
    """A lane's GEMMs, and its communication below them."""
    communication = gemm + 1
    for call in calls:
        start = call.start_us - first_us
        end = (start + call.gemm_end_us) * scale
        axes.barh(gemm, call.gemm_end_us * scale, left=start * scale, height=0.8, color=_GEMM)
        ready = [(start + chunk.ready_us) * scale for chunk in call.chunks]
        axes.vlines(ready, gemm - 0.4, gemm + 0.4, color="black", lw=1.2)
        for chunk in call.chunks:
            color = _CHUNKS[chunk.index % 2]
            width = (chunk.end_us - chunk.begin_us) * scale
            left = (start + chunk.begin_us) * scale
            axes.barh(communication, width, left=left, height=0.8, color=color)
            if width > 0.01 * total_us * scale:  # room for a number
                middle = left + width / 2
                number = str(chunk.index)
                axes.text(middle, communication, number, ha="center", va="center", fontsize=7)
        axes.vlines(end, gemm - 0.4, communication + 0.4, color=_GEMM, ls="--", lw=1)
    last = calls[-1]
    axes.annotate(
        f"{hidden_fraction(calls):.0%} hidden",
        ((last.start_us - first_us + last.end_us) * scale, communication),
        (4, 0),
        textcoords="offset points",
        va="center",
    )


def hidden_fraction(calls: Iterable[Call]) -> float:
    """The share of all these calls' communication time that lies before their GEMMs' ends; 0 without communication."""
    total = hidden = 0.0
    for call in calls:
        communication = sum(chunk.end_us - chunk.begin_us for chunk in call.chunks)
        total += communication
        hidden += call.hidden_fraction * communication
    return hidden / total if total > 0 else 0.0
