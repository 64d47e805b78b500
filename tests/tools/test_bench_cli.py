"""The command lines of the benchmark and of its studies, its tables and its plot."""

import argparse
import json
import os
from argparse import Namespace
from pathlib import Path

import pytest
import torch

import overlap_torch
from bench_runs import SEQUENCES, bench
from overlap_torch._tools import arguments
from overlap_torch.plan import Problem
from overlap_torch.plan.files import save
from overlap_torch.plan.templates import row_panels
from tests.tools.test_examples import run

FP8 = ["--dtype", "float8_e4m3fn"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--op", "gemm_broadcast"], "gemm_broadcast"),
        (["--op", "gemm_allreduce,gem"], "--op takes"),
        (["--op", ","], "names no op"),
        (["--op", "gemm"], "needs a GPU"),
        (["--modes", "call,rows"], "--modes takes call, row, graph, not rows"),
        (["--modes", "graph"], "measures nothing on CPU: CUDA graphs need a GPU"),
        (["--modes", ","], "names no mode"),
        (["--baselines", "megatron"], "--baselines takes pytorch"),
        (["--baselines", "pytorch"], "measures nothing on CPU: PyTorch's symmetric memory"),
        (["--replace-symm-mem"], "changes what --baselines pytorch measures"),
        (["--shapes", "4x4"], "neither MxNxK"),
        (["--op", "block", "--blocks", "llama3-8b"], "MODEL@TOKENS"),
        (["--op", "block", "--blocks", "16x3x1x8@8"], "must divide"),
        (["--op", "block", "--blocks", "16x4x1x8@8"], "kv_heads = 1 is not divisible by 2"),
        (["--op", "all", "--sweep"], "no plans to choose from for"),
        (["--shapes", "0x8x8"], "neither MxNxK from 1"),
        (["--shapes", "99999999999999999999x8x8"], "neither MxNxK from 1 to 999999999"),
        (["--plan", "does-not-exist.json"], "does-not-exist.json"),
        (["--plan", "{"], "{ has no plans"),
        (["--plan", "[[1, 2]]"], "allowed is what plan.files or --json wrote"),
        (["--sweep", __file__], "has no plans"),
        (["--repeats", "0"], "--repeats: is '0', allowed are whole numbers from 1"),
        (["--world", "0"], "--world: is '0', allowed are whole numbers from 1"),
        (["--json", "/nowhere/x"], "--json: is /nowhere/x, but there is no folder /nowhere"),
        (["--json", "/tmp"], "--json: is '/tmp', a folder"),
        (
            ["--plot", "/nowhere/x.png"],
            "--plot: is /nowhere/x.png, but there is no folder /nowhere",
        ),
        (["--plot", "x.txt"], "allowed are names that end in .png, .svg, .pdf"),
        (["--sweep", "--timeline"], "--timeline is for one plan a shape, not for a sweep"),
        (["--dtype", "float8_e5m2"], "take --scales tensor, row or block"),
        (["--dtype", "bf16", "--scales", "row"], "take --scales tensor, row or block"),
        (["--fast-accum"], "allowed are tensor and row"),
        (["--fast-accum", *FP8, "--scales", "block"], "allowed are tensor and row"),
    ],
)
def test_bench_refuses_a_bad_command_line(capsys, argv, message):
    with pytest.raises(SystemExit) as ended:
        bench("study").parse("bench", ["--device", "cpu", "--world", "2", *argv])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def checked(option: str, text: str, ops: tuple[str, ...], device: str) -> tuple[str, ...]:
    """An option's value for these ops."""
    (row,) = (row for row in bench("bench").OPTIONS if row.name == option)
    return row.value(Namespace(op=ops, device=device, replace_symm_mem=False, **{option: text}))


@pytest.mark.parametrize(
    ("ops", "option", "value", "message"),
    [
        ("block", "modes", "graph", "measures nothing of block: take call, row"),
        ("gemm_alltoall", "baselines", "pytorch", "measures nothing of gemm_alltoall"),
    ],
)
def test_bench_refuses_to_measure_nothing(ops, option, value, message):
    with pytest.raises(ValueError, match=message):
        checked(option, value, tuple(ops.split(",")), "cuda")


def test_bench_says_what_is_left_out(capsys):
    ops = ("gemm_allreduce", "block")
    assert checked("modes", "call,graph", ops, "cpu") == ("call",)
    assert checked("modes", "graph", ops, "cuda") == ("graph",)
    assert checked("baselines", "pytorch", (*ops, "gemm_alltoall"), "cuda") == ("pytorch",)
    assert checked("baselines", "pytorch", ops, "cpu") == ("pytorch",)
    assert checked("baselines", "", ops, "cpu") == ()
    printed = capsys.readouterr().err.splitlines()
    assert printed == [
        "mode graph left out: CUDA graphs need a GPU",
        "block: only the modes call, row",
        "gemm_alltoall: without the baselines of PyTorch",
        "gemm_allreduce: without the baselines of PyTorch",
    ]


def test_bench_that_measured_nothing_fails(tmp_path):
    plan = row_panels(Problem(512, 512, 512, "float32", 5), 1, transport="gloo")
    save(plan, tmp_path / "plan.json")
    argv = "--device cpu --world 1 --shapes 8x8x8 --repeats 1 --sweep plan.json"
    output = run("-m", "overlap_torch", "bench", *argv.split(), folder=tmp_path, status=1)
    assert "nothing was measured: no plan of --sweep" in output and "world size (1)" in output


def test_bench_all_names_every_op_once():
    argv = ["--device", "cpu", "--op", "gemm_alltoall,all"]
    options = bench("study").parse("bench", argv)
    assert options.op == ("gemm_alltoall", *SEQUENCES[:3], "block")
    assert options.modes == ("call", "row"), "graphs need a GPU"


def test_bench_of_a_slow_link_leaves_faster_ways_alone(monkeypatch):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "0")
    monkeypatch.setenv("OVERLAP_PEERS", "1")
    options = bench("study").parse("bench", ["--device", "cpu", "--slow-link"])
    assert {(shape.m, shape.k) for shape in options.shapes} == {(4096, 32768), (8192, 32768)}
    assert (os.environ["NCCL_P2P_DISABLE"], os.environ["OVERLAP_PEERS"]) == ("1", "0")


def test_bench_prints_tables_and_draws(tmp_path):
    argv = "--device cpu --op all --shapes 8x8x8 --blocks 16x4x2x24@8 --repeats 1 --plot out.png"
    output = run("-m", "overlap_torch", "bench", *argv.split(), folder=tmp_path)
    for op in (*SEQUENCES, "block"):
        assert f"### {op}\n" in output
    assert output.count("geometric mean") == 5
    assert "WRONG" not in output
    assert "8x8x8 uneven" in output and "16x4x2x24@8" in output
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_bench_tables_show_the_faster_right_baseline():
    report, tables = bench("report"), bench("tables")
    times = bench("measure").Times
    timed = report.Timed(
        times(100.0, 90.0, 110.0, 5.0),
        times(80.0, 70.0, 90.0, 5.0),
        {name: times(us, us, us, 5.0) for name, us in (("a", 50.0), ("b", 125.0), ("c", 200.0))},
        {"a": False, "b": True, "c": True},
    )
    fields = timed.pytorch_fields()
    assert (fields["pytorch_best"], fields["pytorch_speedup"]) == ("b", 0.8)
    row = {
        "m": 1, "label": "1x1x1", "group": "custom", "mode": "call", "checked": True,
        "sequence_us": timed.sequence.as_dict(), "op_us": timed.op.as_dict(), "speedup": 1.25,
    }  # fmt: skip
    text = tables.measurements([row | fields, row])
    assert "125.0 (125.0–125.0) b" in text
    assert "0.800" in text and "**1.250**" in text
    assert "WRONG RESULT" in tables.measurements([row | {"checked": False}])
    assert "1.250" in tables.means([row, row])


def test_bench_summary_takes_the_median_of_turns():
    samples = torch.tensor([[[3.0, 1.0, 2.0], [9.0, 9.0, 9.0]], [[0.3, 0.1, 0.2], [1.0, 1.0, 1.0]]])
    first, second = bench("measure").summary(samples.double())
    assert (first.median, first.host) == (2.0, pytest.approx(0.2))
    assert (second.p10, second.p90) == (9.0, 9.0)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["experts", "--models", "gpt-5"], "--models takes qwen3-235b"),
        (["attention", "--models", "gpt-5"], "--models takes llama-3-8b"),
        (["attention", "--modes", "call,graph"], "CUDA graphs need a GPU"),
        (["rmsnorm", "--mode", "graph"], "CUDA graphs need a GPU"),
        (["programs"], "argument study: invalid choice: 'programs'"),
        (["rmsnorm", "--json", "/nowhere/x"], "but there is no folder /nowhere"),
        (["hosts", "--hosts", "1"], "--hosts: is '1', allowed are whole numbers from 2"),
        (["hosts", "--hosts", ","], "allowed are one whole number or more"),
        (["hosts", "--hosts", "100"], "--hosts 100 of 8 ranks do not divide the suite's 4096 rows"),
        (["hosts", "--ranks-per-host", "9"], "--ranks-per-host is 9, allowed are 2 to 8"),
        (["hosts", "--link", "nan"], "--link: is 'nan', allowed are numbers greater than 0"),
        (["rmsnorm", "--rows", "-4"], "--rows: is '-4', allowed are whole numbers from 1"),
        (["rmsnorm", "--k", "1"], "--k is 1, allowed are 2 and more"),
        (["experts", "--tokens", "x"], "--tokens: is 'x', allowed are whole numbers from 1"),
        (["attention", "--ours", "2x"], "--ours has '2x', allowed are chosen, nccl, and PxC"),
        (["attention", "--ours", "2x2"], "--ours has 2x2, which is over peer memory"),
        (["attention", "--tokens", "7"], "--tokens has 7, allowed are multiples of 2"),
        (["attention", "--world", "3"], "cannot be cut into 3 equal parts"),
        (["decode", "--blocks", "16x3x3x8@8"], "heads must divide the hidden size"),
        (["decode", "--blocks", "12x4x2x8@8"], "allowed are even numbers"),
        (["decode", "--world", "3"], "heads = 32 is not divisible by 3 ranks"),
        (["invariance", "--shapes", "0x64"], "--shapes takes N x K from 1"),
        (["invariance", "--world", "3"], "allowed are 1, 2, 4 and 8"),
        (["tuned", "--best", "-1"], "--best: is '-1', allowed are whole numbers from 0"),
        (["transformers_models", "--heads", "3"], ""),  # or that it is not installed
    ],
    ids=str,
)
def test_studies_say_what_is_allowed(argv, message, capsys):
    world = [] if "--world" in argv else ["--world", "2"]
    with pytest.raises(SystemExit) as ended:
        bench("study").main([*argv, "--device", "cpu", *world])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_bench_of_a_checkout_is_its_own():
    """Another checkout may be installed, for editing, in the same environment."""
    own = Path(overlap_torch.__file__).resolve().parents[1] / "benchmarks"
    assert Path(bench("study").__file__).parent in (own, own.parent / "overlap_torch/benchmarks")


def test_outputs_are_looked_at_where_they_are_written(tmp_path, monkeypatch):
    """On rank 0, on whose host the folder is."""
    nowhere = str(tmp_path / "no" / "file.json")
    with pytest.raises(argparse.ArgumentTypeError, match="there is no folder"):
        arguments.output(nowhere)
    monkeypatch.setenv("RANK", "1")
    assert arguments.output(nowhere) == nowhere
    monkeypatch.setenv("RANK", "0")
    assert arguments.output(str(tmp_path / "new.json")) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", bench("study").NAMES)
def test_studies_take_their_own_defaults(name):
    args = bench("study").parse(
        name, ["--device", "cpu"]
    )  # ends the process for what is not allowed
    assert args.study == name
    assert getattr(args, "mode", "row") != "graph"  # CUDA graphs need a GPU


_CALLS, _GRAPHS = {"sequence", "moe", "max_rows", "by ranks"}, {"gathered", "max_rows"}


@pytest.mark.parametrize(
    ("options", "passes", "names"),
    [
        ([], [False, True], _CALLS),
        (["--fp8"], [False], _CALLS | {"GEMMs"}),
        (["--fp8", "blocks"], [False], _CALLS | {"GEMMs"}),
        (["--mode", "graph"], [False], _GRAPHS | {"GEMMs"}),
        (["--mode", "graph", "--fp8"], [False], _GRAPHS | {"GEMMs"}),
    ],
)
def test_bench_experts_measures_every_variant(options, passes, names, tmp_path):
    file = tmp_path / "rows.json"
    argv = ["experts", "--models", "tiny", "--tokens", "8", "--repeats", "1", *options]
    bench("study").main([*argv, "--device", "cpu", "--world", "2", "--json", str(file)])
    rows = json.loads(file.read_text())
    found = [(row["model"], row["tokens"], row["backward"]) for row in rows]
    assert found == [("tiny", 8, backward) for backward in passes]
    for row in rows:
        medians = {name: time["median"] for name, time in row.items() if isinstance(time, dict)}
        assert names <= set(medians)
        assert min(medians.values()) > 0
