"""The benchmark's transformer block: the same computation as an unsharded one, and what is written."""

from __future__ import annotations

import pytest

from bench_runs import check_times, lines_of

BLOCK = "--op block --device cpu --blocks 32x4x2x48@8 --repeats 2 --modes row"


@pytest.mark.ranks((2, "gloo"))
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bench_measures_a_block(ranks, tmp_path, dtype):
    _, row = lines_of(ranks, tmp_path, BLOCK, "--dtype", dtype)
    assert (row["op"], row["block"], row["mode"]) == ("block", "custom", "row")
    sizes = ("hidden", "heads", "kv_heads", "intermediate", "tokens")
    assert [row[name] for name in sizes] == [32, 4, 2, 48, 8]
    assert row["checked"] is True
    assert "plan" not in row
    assert "pytorch_us" not in row
    check_times(row)


@pytest.mark.ranks((2, "gloo"))
def test_bench_measures_a_block_beside_pytorchs_styles(ranks, tmp_path):
    _, row = lines_of(ranks, tmp_path, BLOCK, *"--baselines pytorch --dtype fp32".split())
    assert row["checked"] is True
    assert row["pytorch_checked"] == {"styles": True} and row["pytorch_best"] == "styles"
    ratio = row["sequence_us"]["median"] / row["pytorch_us"]["styles"]["median"]
    assert row["pytorch_speedup"] == pytest.approx(ratio, abs=1e-3)
    check_times(row)
