"""Benchmarks of the ops against the sequence of a GEMM and a collective: ``python -m overlap_torch bench --help``."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark with these command line arguments; returns the exit status."""
    from . import cli

    return cli.main(argv)
