"""The benchmark of the signalling GEMM alone."""

import json
from dataclasses import replace

import pytest
import torch

from bench_runs import bench, lines_of
from overlap_torch.plan import Machine, Plan, Problem
from overlap_torch.plan.files import decode, to_dict
from overlap_torch.plan.templates import packed, row_panels
from overlap_torch.plan.types import DType, Kernel, Layout
from plans import HOPPER_KERNELS


def buffer_of(plan: Plan, output: torch.Tensor) -> torch.Tensor:
    """The buffer that a plan's GEMM leaves: the output as it is, or tile by tile in tile order; padding is -1."""
    buffer = output.new_full((plan.buffer_elements(),), -1.0)
    if plan.layout == Layout.ROW_MAJOR:
        buffer[: output.numel()] = output.flatten()
        return buffer
    for index in range(plan.tiles_m * plan.tiles_n):
        row, column = plan.tile_coord(index)
        rows = slice(plan.tile_m * row, plan.tile_m * (row + 1))
        part = output[rows, plan.tile_n * column : plan.tile_n * (column + 1)]
        tile = output.new_full((plan.tile_m, plan.tile_n), -1.0)
        tile[: part.shape[0], : part.shape[1]] = part
        begin = plan.packed_offset(index)
        buffer[begin : begin + tile.numel()] = tile.flatten()
    return buffer


@pytest.mark.parametrize("template", [row_panels, packed])
def test_bench_reads_a_plans_buffer(template):
    problem = Problem(300, 200, 64, DType.BFLOAT16, 2)
    plan = template(problem, 2, tile=(64, 32), band_rows=2)
    output = torch.arange(300 * 200, dtype=torch.float32).view(300, 200)
    assert torch.equal(bench("gemm").output_of(plan, buffer_of(plan, output)), output)


@pytest.mark.parametrize("m", [1, 128, 4096])
@pytest.mark.parametrize("arch", [80, 90])
def test_bench_gemm_plans_fit_the_device(m, arch):
    machine = Machine()
    machine.arch, machine.has_sm80_kernels, machine.has_sm90_kernels = arch, True, arch == 90
    problem = Problem(m, 8192, 2048, DType.BFLOAT16, 2)
    plans = bench("gemm").default_plans(problem, machine)
    assert [(plan.kernel, plan.layout) for plan in plans] == [
        (kernel, layout)
        for kernel in (HOPPER_KERNELS if arch == 90 else [Kernel.SM80])
        for layout in (Layout.ROW_MAJOR, Layout.PACKED)
    ]
    assert all(plan.problem == problem for plan in plans)
    assert all(plan.resources.comm_sms == 0 for plan in plans)
    with pytest.raises(ValueError, match="no signalling kernel"):
        bench("gemm").default_plans(problem, Machine())


def measure_with_gemm(argv: list[str], off_by: float) -> int:
    """Runs the benchmark of the GEMM alone on CPU, with torch.mm for the kernel; returns its exit status."""
    library = torch.library.Library("overlap", "FRAGMENT")
    try:
        if not bench("gemm").available():
            library.define("gemm_alone(Tensor input, Tensor weight, int[] plan) -> Tensor")
        library.impl(
            "gemm_alone",
            lambda input, weight, code: buffer_of(decode(code), input @ weight.t() + off_by),
            "CPU",
        )
        # The command line refuses a CPU, as the kernels are CUDA's; a rank measures what it is told to.
        _, options = bench("cli").options_of(["--device", "cpu", *argv])
        bench("worker").run(replace(options, ops=("gemm",)))
    except SystemExit as error:
        return error.code
    finally:
        library._destroy()
    return 0


@pytest.mark.ranks((1, "gloo"))
@pytest.mark.parametrize("off_by", [0.0, 1.0])
def test_bench_measures_a_gemm(ranks, tmp_path, off_by):
    problem = Problem(48, 40, 32, DType.FLOAT32, 4)
    plans = [row_panels(problem, 2, tile=(8, 8)), packed(problem, 3, tile=(16, 8))]
    given, path = tmp_path / "plans.json", tmp_path / "rows.jsonl"
    given.write_text(json.dumps([to_dict(plan) for plan in plans]))
    argv = ["--shapes", "48x40x32", "--repeats", "2", "--modes", "call,row"]
    argv += ["--plan", str(given), "--json", str(path)]
    assert ranks.run(measure_with_gemm, argv, off_by) == [1 if off_by else 0]
    _, *rows = map(json.loads, path.read_text().splitlines())
    assert [(row["mode"], row["kernel"], row["layout"]) for row in rows] == [
        (mode, "library", layout) for mode in ("call", "row") for layout in ("row_major", "packed")
    ]
    for row in rows:
        assert (row["kind"], row["op"]) == ("gemm", "gemm")
        assert (row["m"], row["n"], row["k"]) == (48, 40, 32)
        assert row["checked"] is (off_by == 0.0)
        assert row["ratio"] > 0
        assert row["library_us"]["median"] > 0 and row["kernel_us"]["median"] > 0
        assert row["plan"] in [to_dict(plan) for plan in plans]


@pytest.mark.ranks((1, "nccl"))
def test_bench_measures_the_gemm_alone(ranks, tmp_path):
    if not bench("gemm").available():
        pytest.skip("this build has no gemm_alone")
    command = "--op gemm --shapes 512x256x256,16x512x64 --repeats 2"
    _, *rows = lines_of(ranks, tmp_path, command)
    kernels = {row["kernel"] for row in rows}
    assert kernels in ({"sm80"}, {kernel.name.lower() for kernel in HOPPER_KERNELS})
    measured = {(row["kernel"], row["layout"]) for row in rows}
    assert measured == {
        (kernel, layout) for kernel in kernels for layout in ("row_major", "packed")
    }
    for row in rows:
        assert (row["kind"], row["checked"]) == ("gemm", True)
        assert row["ratio"] > 0
        assert row["kernel_us"]["median"] > 0
