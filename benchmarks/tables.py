"""Measured rows as markdown tables with geometric means."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import geometric_mean

# A line of the JSON output, with "label" and, where it has a plan, "summary".
Row = dict[str, object]


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(titles) + " |", "|" + " --- |" * len(titles)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _spread(times: dict[str, float]) -> str:
    return f"{times['median']:.1f} ({times['p10']:.1f}–{times['p90']:.1f})"


def _first_title(rows: Sequence[Row]) -> str:
    return "M x N x K" if "m" in rows[0] else "block"


def _by_group(rows: Sequence[Row], *keys: str) -> Iterable[tuple[tuple, list[Row]]]:
    """Rows that agree in all keys, in the order in which they come first."""
    for values in dict.fromkeys(tuple(row[key] for key in keys) for row in rows):
        yield values, [row for row in rows if tuple(row[key] for key in keys) == values]


def measurements(rows: Sequence[Row]) -> str:
    """One op beside its sequence, a line for each shape and mode. Columns that no row has are left out."""
    has_baseline = any(row.get("pytorch_us") for row in rows)
    has_bound = any("bound_speedup" in row for row in rows)
    has_plan = any("summary" in row for row in rows)
    titles = [_first_title(rows), "mode", "sequence µs", "op µs", "speed-up"]
    titles += ["PyTorch µs", "PyTorch's speed-up"] if has_baseline else []
    computed, computed_title = (
        ("gemm_us", "GEMM µs") if "m" in rows[0] else ("compute_us", "compute µs")
    )
    titles += [computed_title, "collective µs", "bound"] if has_bound else []
    titles += ["plan"] if has_plan else []
    lines = []
    for row in rows:
        right = row["checked"] is not False
        cells = [row["label"], row["mode"], _spread(row["sequence_us"]), _spread(row["op_us"])]
        cells.append(f"**{row['speedup']:.3f}**" if right else "WRONG RESULT")
        if has_baseline:
            cells += _baseline(row)
        if has_bound:
            cells += [f"{row[computed]:.1f}", f"{row['collective_us']:.1f}"]
            cells.append(f"{row['bound_speedup']:.2f}")
        lines.append(cells + ([row["summary"]] if has_plan else []))
    note = "Median (10th to 90th percentile) of the slowest rank's times."
    return f"{table(titles, lines)}\n\n{note}"


def _baseline(row: Row) -> list[str]:
    """The faster one of PyTorch's ops that are right."""
    if row.get("pytorch_speedup") is None:
        return ["", "WRONG RESULT" if row.get("pytorch_us") else ""]
    name = row["pytorch_best"]
    return [f"{_spread(row['pytorch_us'][name])} {name}", f"{row['pytorch_speedup']:.3f}"]


def means(rows: Sequence[Row]) -> str:
    """Geometric means of the speed-ups over each group of shapes in each mode."""
    has_baseline = any(row.get("pytorch_speedup") for row in rows)
    has_bound = any("bound_speedup" in row for row in rows)
    has_host = any("op_us" in row for row in rows)
    titles = ["shapes", "mode", "count", "geometric mean", "lowest"]
    titles += ["PyTorch"] if has_baseline else []
    titles += ["bound"] if has_bound else []
    titles += ["host µs, sequence", "host µs, op"] if has_host else []
    lines = []
    for (group, mode), chosen in _by_group(rows, "group", "mode"):
        lowest = min(chosen, key=lambda row: row["speedup"])
        cells = [group, mode, str(len(chosen))]
        cells.append(f"{geometric_mean(row['speedup'] for row in chosen):.3f}")
        cells.append(f"{lowest['speedup']:.3f} ({lowest['label']})")
        if has_baseline:
            found = [row["pytorch_speedup"] for row in chosen if row.get("pytorch_speedup")]
            cells.append(f"{geometric_mean(found):.3f} of {len(found)}" if found else "")
        if has_bound:
            cells.append(f"{geometric_mean(row['bound_speedup'] for row in chosen):.2f}")
        if has_host:
            cells += [
                f"{geometric_mean(row[key]['host'] for row in chosen):.1f}"
                for key in ("sequence_us", "op_us")
            ]
        lines.append(cells)
    return table(titles, lines)


def best_plans(rows: Sequence[Row]) -> str:
    """A sweep's fastest plan for each shape and mode."""
    lines = [[row["label"], row["mode"], f"{row['speedup']:.3f}", row["summary"]] for row in rows]
    return table([_first_title(rows), "mode", "speed-up", "best plan"], lines)


def losses(rows: Sequence[Row]) -> str:
    """Where an op's time goes, a line for each shape."""
    titles = ["M x N x K", "GEMM alone µs", "+ fewer SMs", "+ waiting", "+ tail", "= op µs"]
    keys = ["gemm_us", "fewer_sms_us", "waiting_us", "tail_us", "op_us"]
    lines = [
        [row["label"], *(f"{row[key]:.1f}" for key in keys), f"{row['hidden']:.0%}"] for row in rows
    ]
    note = (
        "One call on the slowest rank, by its timeline. Fewer SMs: their share, computed. Waiting: the rest until the "
        "GEMM's last tile; below 0 where the op's GEMM is faster than the sequence's alone."
    )
    return f"{table([*titles, 'hidden'], lines)}\n\n{note}"


def gemms(rows: Sequence[Row]) -> str:
    """The signalling GEMM beside cuBLAS, a line for each shape, mode and plan, and their geometric means."""
    lines = []
    for row in rows:
        ratio = f"**{row['ratio']:.3f}**" if row["checked"] is not False else "WRONG RESULT"
        times = [_spread(row["library_us"]), _spread(row["kernel_us"])]
        lines.append([row["label"], row["mode"], *times, ratio, row["summary"]])
    titles = ["M x N x K", "mode", "cuBLAS µs", "signalling µs", "signalling / cuBLAS", "plan"]
    summary = []
    names = ("group", "mode", "kernel", "layout")
    for name, chosen in _by_group(rows, *names):
        highest = max(chosen, key=lambda row: row["ratio"])
        mean = geometric_mean(row["ratio"] for row in chosen)
        worst = f"{highest['ratio']:.3f} ({highest['label']})"
        summary.append([*name, str(len(chosen)), f"{mean:.3f}", worst])
    mean_titles = ["shapes", *names[1:], "count", "geometric mean", "highest"]
    note = "Medians (10th to 90th percentile); the ratio is the median of each turn's."
    return f"{table(titles, lines)}\n\n{note}\n\n{table(mean_titles, summary)}"
