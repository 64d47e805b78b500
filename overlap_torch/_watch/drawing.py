"""Draws rows of bars on one axis of time, by matplotlib, for pictures of plans and of traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GEMM, OTHER = "#4878a8", "#b0b0b0"


@dataclass(frozen=True)
class Bar:
    """One piece of a stream's work, from begin to end in microseconds; its label is drawn if there is room."""

    begin: float
    end: float
    color: str | tuple[float, ...]
    label: str = ""


@dataclass(frozen=True)
class Row:
    """Bars beside a name, from the top down.

    Attributes:
        ticks: when a chunk is ready: black lines.
        ends: when a GEMM has ended: dashed lines.
        note: words after the last bar.
        begins_group: whether there is a gap above the row.
    """

    name: str
    bars: Sequence[Bar]
    ticks: Sequence[float] = ()
    ends: Sequence[float] = ()
    note: str = ""
    begins_group: bool = False


def figure(width: float, height: float, what: str) -> Figure:
    """An empty figure, in inches; ImportError without matplotlib, which names `what` needs it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"{what} needs matplotlib: pip install matplotlib") from error
    return Figure(figsize=(width, height), layout="constrained")


def draw_rows(axes: Axes, rows: Sequence[Row], total_us: float, since: str, title: str) -> None:
    """Draws the rows over `total_us`; the axis says that times are from `since`."""
    scale, unit = (1e-3, "ms") if total_us >= 10_000 else (1.0, "µs")
    positions: list[float] = []
    for row in rows:
        at = positions[-1] + (1.4 if row.begins_group else 1.0) if positions else 0.0
        positions.append(at)
        for bar in row.bars:
            left, width = bar.begin * scale, (bar.end - bar.begin) * scale
            look = {"color": bar.color, "edgecolor": "white", "linewidth": 0.4}
            axes.barh(at, width, left=left, height=0.8, **look)
            if bar.label and bar.end - bar.begin > 0.008 * len(bar.label) * total_us:
                middle = left + width / 2
                axes.text(middle, at, bar.label, ha="center", va="center", fontsize=7)
        for times, look in (
            (row.ticks, {"color": "black"}),
            (row.ends, {"color": GEMM, "ls": "--"}),
        ):
            axes.vlines([us * scale for us in times], at - 0.4, at + 0.4, lw=1.0, **look)
        if row.note:
            end = max(bar.end for bar in row.bars) * scale
            axes.annotate(row.note, (end, at), (4, 0), textcoords="offset points", va="center")
    axes.set_yticks(positions, [row.name for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, (1.13 if any(row.note for row in rows) else 1.02) * total_us * scale)
    axes.set_xlabel(f"{unit} from {since}")
    axes.set_title(title, fontsize=9)
