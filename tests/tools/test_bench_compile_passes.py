"""The table of docs/compile.md is what `python -m overlap_torch.benchmarks compile_passes` prints."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from bench_runs import bench
from frameworks import needs_transformers

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/compile.md"


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:erase_node")  # PyTorch's pass erases some nodes twice
def test_compile_passes_fuse_what_the_table_says(caplog):
    caplog.set_level(logging.ERROR, "torch._inductor.fx_passes.micro_pipeline_tp")
    text = DOCUMENT.read_text().partition("## Beside PyTorch's pass")[2]
    written = [cells(line) for line in text.splitlines() if line.startswith("|")]
    if needs_transformers.args[0]:  # said by the tests that it marks
        written = [row for row in written if not row[0].startswith("Hugging Face")]
    found = [cells(line) for line in bench("compile_passes").table()]
    columns = 4 if torch.__version__.startswith("2.11.") else 3  # PyTorch's pass, of its release
    assert [row[:columns] for row in found] == [row[:columns] for row in written]
    assert len(written) > 2
