"""Speed-ups as a bar chart, a panel for each op."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from overlap_torch._watch.drawing import figure

from .tables import Row


def draw(rows: Sequence[Row], title: str, path: str | Path) -> None:
    """Draws the rows' speed-ups into a picture."""
    ops = list(dict.fromkeys(row["op"] for row in rows))
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    labels = {op: list(dict.fromkeys(r["label"] for r in rows if r["op"] == op)) for op in ops}
    widest = max(len(names) for names in labels.values())
    page = figure(max(6.0, 0.9 * widest + 2), 4.5 * len(ops), "--plot")
    panels = page.subplots(len(ops), squeeze=False)[:, 0]
    width = 0.8 / max(1, len(modes))
    for axes, op in zip(panels, ops, strict=True):
        for position, mode in enumerate(modes):
            chosen = [row for row in rows if (row["op"], row["mode"]) == (op, mode)]
            shift = (position - (len(modes) - 1) / 2) * width
            places = [labels[op].index(row["label"]) + shift for row in chosen]
            axes.bar(places, [row["speedup"] for row in chosen], width, label=mode)
            for key, marker, color in (
                ("bound_speedup", "_", "black"),
                ("pytorch_speedup", "x", "tab:red"),
            ):
                found = [
                    (place, row[key])
                    for place, row in zip(places, chosen, strict=True)
                    if row.get(key)
                ]
                if found:
                    axes.scatter(*zip(*found, strict=True), marker=marker, color=color, zorder=3)
        axes.axhline(1.0, color="gray", lw=0.8)
        axes.set_xticks(range(len(labels[op])), labels[op], rotation=40, ha="right", fontsize=8)
        axes.set_ylabel("speed-up over the sequence")
        axes.set_title(op, fontsize=9)
        axes.legend()
    page.suptitle(f"{title}\ndashes: bound, crosses: PyTorch's own ops", fontsize=9)
    page.savefig(path, dpi=150)
