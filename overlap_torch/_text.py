"""Tables of text, as reports print them."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row, the titles first. Columns with nothing below their title are left out; the last may be long."""
    shown = [i for i in range(len(rows[0])) if any(row[i] for row in rows[1:])]
    widths = {i: max(len(row[i]) for row in rows) for i in shown[:-1]}
    return ["  ".join(row[i].ljust(widths.get(i, 0)) for i in shown).rstrip() for row in rows]


def first_of(names: Sequence[str]) -> str:
    """The first name, and how many more there are."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
