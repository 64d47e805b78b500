"""The options of a benchmark."""

from __future__ import annotations

from dataclasses import dataclass

from .shapes import Block, Shape


@dataclass(frozen=True)
class Options:
    """The choices of a benchmark; every rank gets the same."""

    command: str
    ops: tuple[str, ...]
    shapes: tuple[Shape, ...]  # for all but block
    blocks: tuple[Block, ...]  # for block
    modes: tuple[str, ...]
    dtype: str  # name of a torch dtype
    scales: str | None  # of fp8 operands: "tensor", "row" or "block"
    fast_accum: bool  # of fp8 operands: use_fast_accum, of the ops and of what is beside them
    call_repeats: int
    row_repeats: int  # repetitions of ten calls, in the modes row and graph
    baselines: tuple[str, ...]
    replaces_symm_mem: bool  # the baselines' fused ops are the stand-ins
    plans: str | None  # JSON: one plan or a list, each for the problem that it names
    sweep: str | None  # "candidates": those of the planner; else JSON as in `plans`
    check: bool
    timeline: bool  # say where the op's time goes
    json_path: str | None
    plot_path: str | None

    def repeats(self, mode: str) -> int:
        """How often a mode measures each variant."""
        return self.call_repeats if mode == "call" else self.row_repeats
