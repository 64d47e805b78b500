"""The reports of overlap_torch.trace, report and NVTX on calls on GPUs."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.cpp_extension import CUDA_HOME

import overlap_torch
import rank_pool
from checks import Failures
from operands import rank_device
from overlap_torch.plan import Problem, use_plan
from overlap_torch.plan.templates import row_panels
from overlap_torch.plan.types import DType, Op
from tests.tools.test_trace import expect_ordered

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


@pytest.mark.ranks((2, "nccl"))
def test_profiles_name_calls_and_chunks_on_gpus(failures: Failures) -> None:
    x, weight = operands()
    with (
        in_chunks(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
    ):
        overlap_torch.allgather_gemm(x, weight)
        overlap_torch.allgather_gemm(x, weight)
    counts = {event.key: event.count for event in profile.key_averages()}
    names = [f"allgather_gemm {M} x {N} x {K}", *(f"chunk {chunk}" for chunk in range(CHUNKS))]
    for name in names:
        failures.equal(counts.get(f"overlap::{name}"), 2, name)


def call_twice() -> None:
    x, weight = operands()
    with in_chunks():
        overlap_torch.allgather_gemm(x, weight)
        overlap_torch.allgather_gemm(x, weight)
    torch.cuda.synchronize()


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
