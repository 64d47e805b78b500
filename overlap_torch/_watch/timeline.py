"""A trace of the ops: calls, a Chrome trace, a picture, and how much communication was hidden."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from overlap_torch._watch import drawing
from overlap_torch._watch.drawing import GEMM, Bar, Row

CHUNKS = ("#e8a33d", "#c9742b")  # neighbours differ


@dataclass(frozen=True)
class Chunk:
    """A chunk of one call; times in microseconds from the call's start.

    Attributes:
        index: the chunk's number, from 0.
        ready_us: when its last tile was finished; if the input is gathered, when its rows could be used.
        begin_us: when its communication began. Communication by the GEMM itself, tile by tile over peers, begins with the
            GEMM.
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
        m, n, k: the GEMM's sizes on this rank, as in :class:`overlap_torch.plan.Problem`; m is 0 for
            ``gemm_alltoall``, whose rows differ by rank.
        dtype: ``"bfloat16"``, ``"float16"``, ``"float32"`` or ``"float64"``.
        world_size: ranks of the group.
        group: the process group's name.
        device: ``"cpu"``, ``"cuda:0"``, ...
        start_us: when it started, in microseconds from the start of the trace's first call on that device. The devices'
            and the ranks' clocks are not aligned.
        gemm_end_us: when its GEMM ended, in microseconds from the call's start.
        end_us: when it ended, in microseconds from the call's start.
        chunks: the communicated chunks, by index; one chunk if nothing was cut.
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
        """The share of the communication's time before the GEMM's end; 0 without communication.

        A gather before the GEMM, as in the sequence, counts as hidden, too: :func:`overlap_torch.report` says which calls
        ran as the sequence.
        """
        return hidden_fraction([self])

    @property
    def title(self) -> str:
        """Op and problem in words."""
        return f"{self.op} {self.m} x {self.n} x {self.k} {self.dtype}"


def calls_of(rows: torch.Tensor, columns: Sequence[Mapping[str, str]]) -> list[Call]:
    """The calls that ``torch.ops.overlap._trace_stop`` returns, by device in the order of their starts.

    ``rows`` is float64 [rows, 5]: call, chunk, ready_us, begin_us, end_us, times from the call's start. The row with chunk
    -1 says when the GEMM had ended (ready_us) and the op (end_us), and when the call started (begin_us), from an arbitrary
    instant of the device. ``columns[call]`` describes the call.
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
        own = sorted(chunks.get(number, []), key=lambda chunk: chunk.index)
        calls.append(
            Call(
                **{name: column[name] for name in ("op", "dtype", "group", "device")},
                **{name: int(column[name]) for name in ("m", "n", "k", "world_size")},
                start_us=start_us - origins[column["device"]],
                gemm_end_us=gemm_end_us,
                end_us=end_us,
                chunks=tuple(own),
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


def write_picture(
    lanes: Mapping[str, Sequence[Call]],
    path: str | Path,
    title: str,
    before: Mapping[str, Sequence[Bar]] | None = None,
) -> None:
    """Draws each lane's calls: the GEMMs, a tick where each chunk was ready, the communication.

    A lane's times are from the start of its first call. ``before``: rows above, of bars one after the other.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is no call.
    """
    lanes = {name: calls for name, calls in lanes.items() if calls}
    if not lanes:
        raise ValueError(
            "no call to draw: no op communicated anything while the trace was on (a group of one has nothing to communicate)"
        )
    rows = [Row(name, bars, begins_group=True) for name, bars in (before or {}).items()]
    total_us = max([0.0, *(bar.end for row in rows for bar in row.bars)])
    for name, calls in lanes.items():
        first_us = min(call.start_us for call in calls)
        total_us = max([total_us, *(call.start_us - first_us + call.end_us for call in calls)])
        rows += _rows(name, calls, first_us)
    figure = drawing.figure(11, 1.7 + 0.5 * len(rows), "the timeline's picture")
    drawing.draw_rows(figure.subplots(), rows, total_us, "the first call's start", title)
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    marks = [
        Patch(color=GEMM, label="GEMM"),
        Patch(color=CHUNKS[0], label="communication, with the chunk's number"),
        Line2D([], [], color="black", marker="|", ls="", ms=9, label="a chunk is ready"),
        Line2D([], [], color=GEMM, ls="--", lw=1, label="the GEMM has ended"),
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)


def _rows(name: str, calls: Sequence[Call], first_us: float) -> tuple[Row, Row]:
    """A lane's GEMMs, and their communication below them."""
    starts = [call.start_us - first_us for call in calls]
    pairs = list(zip(calls, starts, strict=True))
    gemms = [Bar(start, start + call.gemm_end_us, GEMM) for call, start in pairs]
    chunks = [(chunk, start) for call, start in pairs for chunk in call.chunks]
    sent = [
        Bar(start + one.begin_us, start + one.end_us, CHUNKS[one.index % 2], str(one.index))
        for one, start in chunks
    ]
    ends = [bar.end for bar in gemms]
    ready = [start + chunk.ready_us for chunk, start in chunks]
    note = f"{hidden_fraction(calls):.0%} hidden"
    return (
        Row(f"{name}: GEMM", gemms, ready, ends, begins_group=True),
        Row("communication", sent, ends=ends, note=note),
    )


def hidden_fraction(calls: Iterable[Call]) -> float:
    """The share of all these calls' communication time that lies before their GEMMs' ends; 0 without communication."""
    chunks = [(chunk, call.gemm_end_us) for call in calls for chunk in call.chunks]
    total = sum(chunk.end_us - chunk.begin_us for chunk, _ in chunks)
    hidden = sum(max(0.0, min(chunk.end_us, end) - chunk.begin_us) for chunk, end in chunks)
    return hidden / total if total > 0 else 0.0
