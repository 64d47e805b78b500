"""Where the benchmark says that an op's time goes."""

from __future__ import annotations

import pytest

from bench_runs import SEQUENCES, bench, lines_of

PARTS = ("gemm_us", "fewer_sms_us", "waiting_us", "tail_us")


def test_losses_add_up_to_the_op() -> None:
    # A GEMM of 110 us that has 110 of 132 SMs, ends after 150 us in an op of 170 us.
    lost = bench("losses").Losses.of(150.0, 170.0, 0.75, gemm_us=110.0, sms_left=110 / 132)
    assert [getattr(lost, part) for part in PARTS] == pytest.approx([110.0, 22.0, 18.0, 20.0])
    assert lost.op_us == pytest.approx(170.0)
    assert lost.hidden == 0.75


def test_losses_of_a_faster_gemm_are_a_gain() -> None:
    lost = bench("losses").Losses.of(90.0, 95.0, 1.0, gemm_us=100.0, sms_left=1.0)
    assert (lost.fewer_sms_us, lost.waiting_us, lost.tail_us) == (0.0, -10.0, 5.0)


@pytest.mark.ranks((2, "gloo"))
@pytest.mark.parametrize("op", SEQUENCES)
def test_bench_says_where_the_time_goes(ranks, tmp_path, op):
    command = f"--op {op} --device cpu --shapes 512x256x128 --repeats 2 --modes call --timeline"
    rows = [row for row in lines_of(ranks, tmp_path, command) if row["kind"] == "timeline"]
    assert len(rows) == (2 if op == "gemm_alltoall" else 1)
    for row in rows:
        assert (row["op"], row["n"], row["k"]) == (op, 256, 128)
        assert row["gemm_us"] > 0
        assert row["fewer_sms_us"] >= 0
        assert row["tail_us"] >= 0
        assert 0 <= row["hidden"] <= 1
        assert sum(row[part] for part in PARTS) == pytest.approx(row["op_us"], abs=0.1)


def test_bench_traces_no_sweep(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        bench("cli").options_of(["--device", "cpu", "--sweep", "--timeline"])
    assert ended.value.code == 2
    assert "--timeline is for one plan a shape, not for a sweep" in capsys.readouterr().err
