"""The shapes that are measured: those of suite.json by group, or given as MxNxK."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

SUITE = Path(__file__).with_name("suite.json")
GROUPS = ("m_train", "m_small", "slow_link")


@dataclass(frozen=True)
class Shape:
    """M rows (tokens), N output features, K input features on each rank."""

    group: str  # the suite's group, or "custom"
    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"


def suite_group(group: str) -> list[Shape]:
    """All shapes of one of the suite's groups."""
    suite = json.loads(SUITE.read_text())
    if group == "slow_link":
        return [
            Shape(group, shape["m"], shape["n"], shape["k"])
            for shape in suite["slow_link"]["shapes"]
        ]
    return [Shape(group, m, nk["n"], nk["k"]) for nk in suite["nk"] for m in suite[group]]


def parse(text: str) -> list[Shape]:
    """Shapes from a comma-separated list of group names and MxNxK.

    Raises:
        ValueError: an entry is neither.
    """
    shapes: list[Shape] = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        if entry in GROUPS:
            shapes += suite_group(entry)
        elif re.fullmatch(r"\d+x\d+x\d+", entry):
            shapes.append(Shape("custom", *(int(size) for size in entry.split("x"))))
        else:
            raise ValueError(
                f"shape {entry!r} is neither MxNxK, as in 4096x8192x7168, nor one of {', '.join(GROUPS)}"
            )
    if not shapes:
        raise ValueError("no shapes given")
    return shapes
