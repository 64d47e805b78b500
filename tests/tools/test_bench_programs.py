"""The benchmark of plans with programs: what it measures, and what it says of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench_runs import bench
from overlap_torch._tune.session import default_session
from overlap_torch.plan import Problem
from plan_files import text_of


def rows_of(folder: str) -> tuple[dict[str, list[str]], list[str]]:
    """By op, which plans were right; and what was left out."""
    programs = bench("programs")
    files = {"ring.xml": ("msccl", "ring"), "put.json": ("mscclpp", "put")}
    for name, (kind, algorithm) in files.items():
        Path(folder, name).write_text(text_of(kind, algorithm, 2))
    left_out: list[str] = []
    session = default_session(torch.device("cpu"), 1)
    job = SimpleNamespace(
        modes=("call",), transport="gloo", turns=1, file=[f"{folder}/{name}" for name in files]
    )
    found = {}
    for op in ("gemm_allreduce", "gemm_reducescatter", "allgather_gemm"):
        problem = Problem(256, 64, 64, "float32", 2, op)
        (row,) = programs.measured(session, problem, job, left_out.append)
        assert all(us > 0.0 for us in row["us"].values())
        found[op] = list(row["us"])
    return found, left_out


@pytest.mark.ranks((2, "gloo"))
def test_programs_measures_templates_and_files_beside_the_planners_plan(ranks, tmp_path):
    found, left_out = ranks.run(rows_of, str(tmp_path))[0]
    for op, names in found.items():
        assert names[:2] == ["sequence", "planner"]
        assert {"ring, library, 1", "two_shot, library, 1", "by_copy_engines, library, 2"} <= set(
            names
        )
        assert any(name.startswith("ring.xml") for name in names) == (op == "gemm_allreduce")
        assert any(name.startswith("put.json") for name in names) == (op == "allgather_gemm")
    assert all("ring.xml" in why or "put.json" in why for why in left_out)
    assert any("allgather_gemm" in why and "ring.xml" in why for why in left_out)


def test_programs_says_the_best_of_each_name():
    programs = bench("programs")
    rows: list[dict[str, Any]] = [
        {"us": {"sequence": 100.0, "planner": 50.0, "ring, library, 1": 200.0, "ring, library, 2": 80.0}},
        {"us": {"sequence": 100.0, "planner": 100.0, "ring, library, 1": 125.0}},
    ]  # fmt: skip
    assert programs.gains(rows[0]) == {"planner": 2.0, "ring": 1.25}
    lines = programs.by_name(rows).split("\n")
    assert lines[0].split() == ["planner", "1.414", "(1.000),", "2", "shapes"]
    assert lines[1].split() == ["ring", "1.000", "(0.800),", "2", "shapes"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["experts", "--models", "gpt-5"], "--models: gpt-5: choose from qwen3-235b"),
        (["attention", "--models", "gpt-5"], "--models: gpt-5: choose from llama-3-8b"),
        (["programs", "--op", "gemm"], "--op has 'gemm', allowed are gemm_allreduce"),
        (["programs", "--modes", "graph"], "allowed are sequences of call, row"),
        (["programs", "--shapes", "12"], "shape '12' is neither MxNxK"),
    ],
    ids=str,
)
def test_studies_say_what_is_allowed(argv, message, capsys):
    with pytest.raises(SystemExit):
        bench("study").main([*argv, "--device", "cpu"])
    assert message in capsys.readouterr().err
