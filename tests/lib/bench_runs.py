"""The benchmark in rank processes that tests hold ready, and what its rows must hold."""

import importlib
import json
import pickle
from pathlib import Path
from types import ModuleType

import pytest

from overlap_torch._tools import bench as _bench_entry

SEQUENCES = ("gemm_allreduce", "gemm_reducescatter", "allgather_gemm", "gemm_alltoall")


def bench(name: str) -> ModuleType:
    """A module of the benchmark package."""
    _bench_entry.load()
    return importlib.import_module(f"overlap_torch.benchmarks.{name}")


def measure(argv: list[str]) -> None:
    """One rank's part of a benchmark, in a group that exists already. A wrong result raises."""
    args = bench("study").parse("bench", argv)
    try:
        _bench_entry.run_rank(pickle.dumps(args))
    except SystemExit as error:
        raise AssertionError(f"the benchmark ended with status {error.code}") from error


def lines_of(ranks, folder: Path, command: str, *more: str) -> list[dict]:
    """The JSON lines that ranks write of a benchmark; the first is of the run."""
    path = folder / "rows.jsonl"
    ranks.run(measure, [*command.split(), *more, "--json", str(path)])
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_times(row: dict) -> None:
    for key in ("sequence_us", "op_us"):
        times = row[key]
        assert 0 < times["p10"] <= times["median"] <= times["p90"]
        assert times["host"] > 0
    assert row["speedup"] == pytest.approx(
        row["sequence_us"]["median"] / row["op_us"]["median"], rel=0.01
    )
    alone = max(row.get("gemm_us", 0.0), row.get("compute_us", 0.0), row["collective_us"])
    assert row["bound_speedup"] == pytest.approx(row["sequence_us"]["median"] / alone, rel=0.01)
