"""overlap_torch.trace over user code, what it saves and draws, and the names that profilers show."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.cpp_extension import CUDA_HOME

import overlap_torch
import rank_pool
from checks import Failures, message_of
from frameworks import needs_module
from layers import counted_events
from operands import rank_device
from overlap_torch import plan
from overlap_torch._watch import timeline
from overlap_torch._watch.drawing import Bar
from overlap_torch._watch.timeline import Call, Chunk
from overlap_torch.nn import ColumnParallelLinear, RowParallelLinear
from overlap_torch.plan import Problem, use_plan
from overlap_torch.plan.templates import row_panels
from overlap_torch.plan.types import DType, Op

TOKENS = 32  # of each rank


def mlp() -> torch.nn.Module:
    up = ColumnParallelLinear(8, 40, sequence_parallel=True)
    return torch.nn.Sequential(
        up, torch.nn.ReLU(), RowParallelLinear(40, 8, sequence_parallel=True)
    )


def gather_in_chunks(chunks: int) -> plan.Plan:
    """The plan that the MLP's first layer, and its second one's backward, run."""
    world = dist.get_world_size()
    problem = Problem(world * TOKENS, 20, 8, plan.types.DType.FLOAT32, world, Op.ALLGATHER_GEMM)
    return row_panels(problem, chunks, transport="gloo", tile=(8, 8))


def step(model: torch.nn.Module) -> None:
    model(torch.ones(TOKENS, 8, requires_grad=True)).sum().backward()


def expect_ordered(failures: Failures, calls: list[Call]) -> None:
    """Nothing ends before it begins, and calls follow one another as they do on one thread."""
    begin_us = 0.0
    for call in calls:
        failures.expect(None if call.start_us >= begin_us else f"{call}", "start")
        begin_us = call.start_us + call.end_us
        last = max(chunk.end_us for chunk in call.chunks)
        inside = 0 < call.gemm_end_us <= call.end_us and last <= call.end_us
        failures.expect(None if inside else f"{call}", "end")
        for chunk in call.chunks:
            failures.expect(None if 0 <= chunk.begin_us <= chunk.end_us else f"{call}", "chunk")


@pytest.mark.ranks((2, "gloo"))
def test_trace_sees_forward_and_backward(failures: Failures) -> None:
    model = mlp()
    with use_plan(gather_in_chunks(4)):
        with overlap_torch.trace() as traced:
            failures.equal(traced.calls, [], "while it is on")
            step(model)
        step(model)  # after the trace
    found = [(c.op, c.m, c.n, c.k, len(c.chunks)) for c in traced.calls]
    expected = [
        ("allgather_gemm", 64, 20, 8, 4),
        ("gemm_reducescatter", 64, 8, 20, 1),
        ("allgather_gemm", 64, 20, 8, 4),  # backward
        ("gemm_reducescatter", 64, 8, 20, 1),
    ]
    failures.equal(found, expected, "calls")
    first = traced.calls[0]
    facts = (first.dtype, first.device, first.world_size, first.group, first.start_us)
    failures.equal(facts, ("float32", "cpu", 2, dist.group.WORLD.group_name, 0.0), "facts")
    expect_ordered(failures, traced.calls)


@pytest.mark.ranks((2, "gloo"))
def test_trace_is_off_after_an_error_and_refuses_another_inside(failures: Failures) -> None:
    x, weight = torch.ones(6, 4), torch.ones(5, 4)

    def nest() -> None:
        with overlap_torch.trace(), overlap_torch.trace():
            pass

    failures.holds("recorded already", message_of(nest), "nested")

    traced = overlap_torch.trace()

    def fail() -> None:
        with traced:
            overlap_torch.gemm_allreduce(x, weight)
            raise RuntimeError("the user's own")

    failures.equal(message_of(fail), "the user's own", "an error inside")
    failures.equal([call.op for call in traced.calls], ["gemm_allreduce"], "calls before the error")
    overlap_torch.gemm_allreduce(x, weight)
    with traced:
        pass
    failures.equal(traced.calls, [], "a trace is off after it")
    failures.raises("no trace is being recorded", torch.ops.overlap._trace_stop)


@needs_module("matplotlib")
@pytest.mark.ranks((2, "gloo"))
def test_trace_is_saved_and_drawn(failures: Failures, tmp_path: Path) -> None:
    folder, rank = tmp_path, dist.get_rank()
    model = mlp()
    with use_plan(gather_in_chunks(2)), overlap_torch.trace() as traced:
        step(model)
    traced.save(f"{folder}/trace{rank}.json")
    with open(f"{folder}/trace{rank}.json") as file:
        events = json.load(file)["traceEvents"]
    failures.equal({event["pid"] for event in events}, {rank}, "process")
    names = [event["name"] for event in events if event["ph"] == "X"]
    gather, scatter = "allgather_gemm 64 x 20 x 8 float32", "gemm_reducescatter 64 x 8 x 20 float32"
    failures.equal(names, [gather, "chunk 0", "chunk 1", scatter, "chunk 0"] * 2, "names")
    starts = [event["ts"] for event in events if event["ph"] == "X" and event["name"] == gather]
    wanted = [call.start_us for call in traced.calls if call.op == "allgather_gemm"]
    failures.equal(starts, wanted, "starts")

    traced.plot(f"{folder}/timeline{rank}.png")
    with open(f"{folder}/timeline{rank}.png", "rb") as file:
        failures.equal(file.read(4), b"\x89PNG", "picture", "is no PNG")
    failures.raises("no call to draw", overlap_torch.trace().plot, f"{folder}/none{rank}.png")
    with (
        mock.patch.dict(sys.modules, {"matplotlib.figure": None}),
        pytest.raises(ImportError, match="pip install matplotlib"),
    ):
        traced.plot(f"{folder}/none{rank}.png")


def test_trace_counts_from_the_first_call_of_each_device():
    # call, chunk, ready, begin, end; closing rows: the GEMM's end, the start, the end
    rows = torch.tensor(
        [
            [0, -1, 9, 120, 10],
            [1, 1, 6, 7, 9],
            [1, 0, 1, 2, 6],
            [1, -1, 5, 100, 10],
            [2, -1, 9, 7, 10],
        ],
        dtype=torch.float64,
    )
    problem = {"op": "gemm_allreduce", "m": "3", "n": "4", "k": "5", "dtype": "float32"}
    columns = [
        {**problem, "world_size": "2", "group": "g", "device": device}
        for device in ("cuda:0", "cuda:0", "cpu")
    ]
    calls = timeline.calls_of(rows, columns)
    starts = [(call.device, call.start_us) for call in calls]
    assert starts == [("cpu", 0.0), ("cuda:0", 0.0), ("cuda:0", 20.0)]
    assert calls[1].chunks == (Chunk(0, 1.0, 2.0, 6.0), Chunk(1, 6.0, 7.0, 9.0))
    assert (calls[1].gemm_end_us, calls[1].end_us) == (5.0, 10.0)
    assert calls[1].hidden_fraction == 0.5  # of 4 + 2, what lies before 5
    assert calls[1].title == "gemm_allreduce 3 x 4 x 5 float32"


def test_trace_picture_explains_every_mark_and_has_the_sequence_above(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    chunks = (Chunk(0, 1.0, 2.0, 6.0), Chunk(1, 6.0, 7.0, 9.0))
    call = Call("gemm_allreduce", 3, 4, 5, "float32", 2, "g", "cpu", 0.0, 5.0, 10.0, chunks)
    bars = [Bar(0.0, 6.0, "blue", "GEMM"), Bar(6.0, 20.0, "red", "all-reduce")]
    path = tmp_path / "picture.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # words are text
        timeline.write_picture({"rank 0": [call]}, path, "title", before={"in turn": bars})
    words = re.findall(r">([^<>]+)</text>", path.read_text())
    assert words[words.index("in turn") :][:3] == ["in turn", "rank 0: GEMM", "communication"]
    assert {"GEMM", "all-reduce", "50% hidden", "0", "1", "a chunk is ready"} <= set(words)
    assert {"communication, with the chunk's number", "the GEMM has ended"} <= set(words)


@pytest.mark.ranks((2, "gloo"))
def test_profiles_name_calls_and_chunks(failures: Failures) -> None:
    x, weight = torch.ones(TOKENS, 8), torch.ones(20, 8)
    rows = [TOKENS // 2] * 2

    def both() -> None:
        overlap_torch.allgather_gemm(x, weight)  # the short way
        torch.ops.overlap.allgather_gemm(x, weight, group=dist.group.WORLD.group_name)

    with use_plan(gather_in_chunks(2)):
        names = counted_events(both)
    for name in (
        "overlap::allgather_gemm",
        "overlap::allgather_gemm 64 x 20 x 8",
        "overlap::chunk 0",
        "overlap::chunk 1",
    ):
        failures.equal(names.get(name), 2, name)
    failures.expect(None if "overlap::chunk 2" not in names else "is there", "a third chunk")
    calls = {
        "gemm_allreduce 32 x 20 x 8": lambda: overlap_torch.gemm_allreduce(x, weight),
        "gemm_reducescatter 32 x 20 x 8": lambda: overlap_torch.gemm_reducescatter(x, weight),
        "gemm_alltoall 32 x 20 x 8": lambda: overlap_torch.gemm_alltoall(x, weight, rows, rows),
        "allgather_gemm 64 x 40 x 8": lambda: overlap_torch.allgather_gemm(x, [weight, weight]),
    }
    for title, job in calls.items():
        failures.equal(counted_events(job).get(f"overlap::{title}"), 1, title)


# --- on GPUs ----------------------------------------------------------------------------------------

M, N, K, CHUNKS = 1024, 512, 256, 2


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    device = rank_device()
    own = M // dist.get_world_size()
    return (
        torch.ones(own, K, device=device, dtype=torch.bfloat16),
        torch.ones(N, K, device=device, dtype=torch.bfloat16),
    )


def in_chunks(group: dist.ProcessGroup | None = None):
    world = dist.get_world_size()
    problem = Problem(M, N, K, DType.BFLOAT16, world, Op.ALLGATHER_GEMM)
    return use_plan(row_panels(problem, CHUNKS, transport="nccl", tile=(128, 128)), group=group)


@pytest.mark.ranks((2, "nccl"))
def test_trace_and_report_on_gpus(failures: Failures) -> None:
    group = dist.new_group(list(range(dist.get_world_size())))
    x, weight = operands()
    with in_chunks(group), overlap_torch.trace() as traced:
        overlap_torch.allgather_gemm(x, weight, group=group)
        overlap_torch.allgather_gemm(x, weight, group=group)
    device = str(rank_device())
    found = [(c.op, c.m, c.n, c.k, c.dtype, c.device, len(c.chunks)) for c in traced.calls]
    failures.equal(found, [("allgather_gemm", M, N, K, "bfloat16", device, CHUNKS)] * 2, "calls")
    expect_ordered(failures, traced.calls)
    rows = [row for row in overlap_torch.report() if row["group"] == group.group_name]
    facts = [(row["op"], row["dtype"], row["device"], row["calls"]) for row in rows]
    failures.equal(facts, [("allgather_gemm", "bfloat16", "cuda", 2)], "report")
    # A few rows: whatever is chosen, the report says why.
    overlap_torch.gemm_allreduce(x[:3].float(), weight.float(), group=group)
    rows = [
        row for row in overlap_torch.report() if (row["group"], row["m"]) == (group.group_name, 3)
    ]
    said = [(row["device"], row["overlapped"], bool(row["why"])) for row in rows]
    failures.equal(said, [("cuda", False, True)], "why not")


def call_twice() -> None:
    x, weight = operands()
    with in_chunks():
        overlap_torch.allgather_gemm(x, weight)
        overlap_torch.allgather_gemm(x, weight)
    torch.cuda.synchronize()


@pytest.mark.ranks((2, "nccl"))
def test_profiles_name_calls_and_chunks_on_gpus(failures: Failures) -> None:
    counts = counted_events(call_twice)
    names = [f"allgather_gemm {M} x {N} x {K}", *(f"chunk {chunk}" for chunk in range(CHUNKS))]
    for name in names:
        failures.equal(counts.get(f"overlap::{name}"), 2, name)


@pytest.mark.ranks((2, "nccl"))
def test_nvtx_names_calls_and_chunks(ranks, tmp_path):
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None or CUDA_HOME is None:
        pytest.skip("needs a C++ compiler and CUDA's headers")
    source = Path(__file__).parents[1] / "cuda" / "nvtx_names.cc"
    library = tmp_path / "nvtx_names.so"
    command = [compiler, "-std=c++20", "-shared", "-fPIC", f"-I{CUDA_HOME}/include"]
    subprocess.run([*command, str(source), "-o", str(library)], check=True)
    names = tmp_path / "names"
    environment = {"NVTX_INJECTION64_PATH": str(library), "NVTX_NAMES": str(names)}
    outcomes = rank_pool.run_fresh(ranks.world, "nccl", call_twice, environment=environment)
    assert [outcome.kind for outcome in outcomes] == ["returned"] * ranks.world, outcomes
    lines = names.read_text().splitlines()
    assert lines.count("pop") == len(lines) - lines.count("pop")
    title = f"push allgather_gemm {M} x {N} x {K}"
    assert lines.count(title) == 2 * ranks.world
    chunks = [line for line in lines if line.startswith("push chunk ")]
    expected = [f"push chunk {chunk}" for chunk in range(CHUNKS)] * (2 * ranks.world)
    assert sorted(chunks) == sorted(expected)
