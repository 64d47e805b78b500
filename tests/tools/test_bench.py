"""The benchmark: what it measures, checks and writes of ops and of a transformer block, the plans it runs, where the time goes."""

import json
import time

import pytest
import torch
import torch.distributed as dist

import overlap_torch
import rank_pool
from bench_runs import SEQUENCES, bench, check_times, lines_of
from checks import Failures
from overlap_torch.plan import Machine, Plan, Problem, plan_for
from overlap_torch.plan.files import decode, to_dict
from overlap_torch.plan.templates import packed, row_panels
from overlap_torch.plan.types import DType, Kernel, Layout
from plans import HOPPER_KERNELS
from tests._plan_test import buffer_elements, packed_offset


def meet_late(times: int) -> list[tuple[int, int]]:
    """When this rank came and went, ns; each time another rank is late."""
    stopwatch = bench("measure").Stopwatch(torch.device("cpu"))
    stays = []
    for turn in range(times):
        if turn % dist.get_world_size() == dist.get_rank():
            time.sleep(0.02)
        came = time.monotonic_ns()
        stopwatch.meet()
        stays.append((came, time.monotonic_ns()))
    return stays


@pytest.mark.ranks((3, "gloo"))
def test_bench_ranks_meet_before_any_goes_on(ranks):
    for stays in zip(*ranks.run(meet_late, 6), strict=True):
        assert max(came for came, _ in stays) < min(left for _, left in stays)


@pytest.mark.ranks((2, "gloo"))
@pytest.mark.parametrize("op", SEQUENCES)
def test_bench_measures_each_op_and_writes_json(ranks, tmp_path, op):
    command = f"--op {op} --device cpu --shapes 13x8x6,1x4x3 --repeats 2 --modes call,row"
    header, *rows = lines_of(ranks, tmp_path, command)
    assert header["kind"] == "run"
    assert header["world_size"] == 2
    splits = ["even", "uneven"] if op == "gemm_alltoall" else [None]
    rows_of = {13: 14, 1: 2} if op in ("gemm_reducescatter", "allgather_gemm") else {13: 13, 1: 1}
    expected = [
        (rows_of[m], n, k, split, mode)
        for m, n, k in ((13, 8, 6), (1, 4, 3))
        for split in splits
        for mode in ("call", "row")
    ]
    found = [(row["m"], row["n"], row["k"], row.get("split"), row["mode"]) for row in rows]
    assert found == expected
    for row in rows:
        assert (row["kind"], row["op"], row["dtype"]) == ("measurement", op, "float32")
        assert row["checked"] is True
        assert "pytorch_us" not in row
        check_times(row)
        assert ("plan" in row) == (op in bench("plans").OPS)
        if "plan" in row:
            problem = row["plan"]["problem"]
            planned_m = 0 if op == "gemm_alltoall" else row["m"]
            assert (problem["op"], problem["m"], problem["n"]) == (op, planned_m, row["n"])


@pytest.mark.ranks((2, "gloo"))
@pytest.mark.parametrize(
    ("scales", "fast"),
    [
        ("row", True),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [("tensor", True), ("row", False), ("block", False)]
        ),
    ],
)
def test_bench_measures_fp8_operands(ranks, tmp_path, scales, fast):
    command = f"--op {','.join(SEQUENCES)} --device cpu --shapes 14x8x136 --repeats 2 --modes call"
    command += f" --dtype float8_e4m3fn --scales {scales}" + " --fast-accum" * fast
    _, *rows = lines_of(ranks, tmp_path, command)
    said = {(row["dtype"], row["scales"], row["fast_accum"]) for row in rows}
    assert said == {("float8_e4m3fn", scales, fast)}
    assert [row["op"] for row in rows] == [*SEQUENCES, "gemm_alltoall"]  # even and uneven
    for row in rows:
        assert row["checked"] is True
        check_times(row)
        problem = row["plan"]["problem"]
        types = (problem["dtype"], problem["recipe"], problem["output_dtype"])
        assert types == ("float8_e4m3fn", f"{scales}_wise", "bfloat16")
        assert problem["fast_accum"] is fast


@pytest.mark.ranks((2, "gloo"))
@pytest.mark.parametrize("op", SEQUENCES)
def test_bench_check_sees_one_wrong_element_on_one_rank(failures: Failures, op: str) -> None:
    computations = bench("computations")
    case = computations.Case(op, bench("shapes").Shape("custom", 8, 4, 6), "uneven")
    made = computations.Computations(
        case, torch.float32, torch.device("cpu"), overlap_torch._ops.group_name()
    )
    failures.equal(made.exact_op(), True, "as it is")
    true_op = made._sides.op

    def wrong(*operands: torch.Tensor):
        first, *others = true_op(*operands)
        if dist.get_rank() == dist.get_world_size() - 1:
            first[-1, -1] += 1
        return first, *others

    made._sides.op = wrong
    failures.equal(made.exact_op(), False, "off by one in one place")


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("m", [1, 2, 7, 4096])
def test_bench_splits_all_rows_of_an_all_to_all(world, m):
    computations, shapes = bench("computations"), bench("shapes")
    shape = shapes.Shape("custom", m, 8, 8)
    even, uneven = computations.cases("gemm_alltoall", shape, world)
    for case in (even, uneven):
        counts = case.send_rows(world)
        assert len(counts) == world
        assert sum(counts) == m
        assert min(counts) >= 0
    assert max(even.send_rows(world)) - min(even.send_rows(world)) <= 1
    if world > 1 and m == 4096:
        counts = uneven.send_rows(world)
        assert counts == sorted(counts)
        assert counts[-1] == pytest.approx(world * counts[0], rel=0.01)


def plan_of_panels(op: str) -> dict:
    """A plan of two row panels for an op's problem of 12 x 8 x 6, as JSON data."""
    problem = plan_for(12, 8, 6, torch.float32, device="cpu", op=op).problem
    return to_dict(row_panels(problem, 2, tile=(2, 4), transport="gloo"))


@pytest.mark.ranks((2, "gloo"))
@pytest.mark.parametrize("option", ["--plan", "--plans", "--sweep"])
def test_bench_runs_the_plans_that_are_given(ranks, tmp_path, option):
    plan = ranks.run(plan_of_panels, "gemm_allreduce")[0]
    given = tmp_path / "plans.json"
    given.write_text(json.dumps([plan]))
    command = "--device cpu --shapes 12x8x6 --repeats 1 --modes call"
    _, *rows = lines_of(ranks, tmp_path, command, option, str(given))
    ranks.run(overlap_torch.plan.clear_plans)
    kinds = ["sweep", "best"] if option == "--sweep" else ["measurement"]
    assert [row["kind"] for row in rows] == kinds
    assert all(row["plan"] == plan for row in rows)
    assert rows[0]["checked"] is True
    # A benchmark's output is a list of plans again.
    written = "\n".join(map(json.dumps, rows))
    assert [to_dict(read) for read in bench("plans").parse(written)] == [plan]


@pytest.mark.ranks((2, "gloo"))
def test_bench_sweeps_the_planners_candidates(ranks, tmp_path):
    command = "--device cpu --shapes 64x64x32 --repeats 1 --modes row --sweep"
    _, *rows = lines_of(ranks, tmp_path, command)
    swept = [row for row in rows if row["kind"] == "sweep"]
    best = [row for row in rows if row["kind"] == "best"]
    assert len(swept) >= 1
    assert [row["speedup"] for row in best] == [max(row["speedup"] for row in swept)]


def test_bench_passes_over_lines_without_a_plan():
    lines = [{"kind": "run"}, {"kind": "measurement", "op": "block", "speedup": 1.0}]
    assert bench("plans").parse("\n".join(map(json.dumps, lines))) == []
    with pytest.raises(ValueError, match="plan"):
        bench("plans").parse("[1]")


@pytest.mark.parametrize("replaced", [False, True], ids=["own", "replaced"])
@pytest.mark.ranks((2, "nccl"))
def test_bench_measures_pytorchs_own_ops(ranks, tmp_path, replaced):
    if rank_pool.shares_gpus():
        pytest.skip("PyTorch's symmetric memory wants a GPU for each rank")
    command = f"--op {','.join(SEQUENCES)} --shapes 512x256x256 --repeats 2 --baselines pytorch"
    _, *rows = lines_of(ranks, tmp_path, command + " --replace-symm-mem" * replaced)
    names = {
        "gemm_allreduce": {"two_shot_all_reduce_", "one_shot_all_reduce"},
        "gemm_reducescatter": {"fused_matmul_reduce_scatter"},
        "allgather_gemm": {"fused_all_gather_matmul"},
        "gemm_alltoall": set(),
    }
    assert {row["mode"] for row in rows} == {"call", "row", "graph"}
    for row in rows:
        assert row["checked"] is True
        assert set(row.get("pytorch_us", {})) == names[row["op"]]
        assert all(row.get("pytorch_checked", {}).values())


BLOCK = "--op block --device cpu --blocks 32x4x2x48@8 --repeats 2 --modes row"


@pytest.mark.ranks((2, "gloo"))
@pytest.mark.parametrize(("dtype", "baselines"), [("fp32", "pytorch"), ("bf16", "")])
def test_bench_measures_a_block(ranks, tmp_path, dtype, baselines):
    _, row = lines_of(ranks, tmp_path, BLOCK, "--dtype", dtype, "--baselines", baselines)
    assert (row["op"], row["block"], row["mode"]) == ("block", "custom", "row")
    sizes = ("hidden", "heads", "kv_heads", "intermediate", "tokens")
    assert [row[name] for name in sizes] == [32, 4, 2, 48, 8]
    assert row["checked"] is True
    assert "plan" not in row
    check_times(row)
    assert ("pytorch_us" in row) == bool(baselines)
    if not baselines:
        return
    assert row["pytorch_checked"] == {"styles": True} and row["pytorch_best"] == "styles"
    ratio = row["sequence_us"]["median"] / row["pytorch_us"]["styles"]["median"]
    assert row["pytorch_speedup"] == pytest.approx(ratio, abs=1e-3)


PARTS = ("gemm_us", "fewer_sms_us", "waiting_us", "tail_us")


def test_losses_add_up_to_the_op() -> None:
    """A GEMM of 110 us that has 110 of 132 SMs, ends after 150 us in an op of 170 us; and a faster one, which is a gain."""
    lost = bench("losses").Losses.of(150.0, 170.0, 0.75, gemm_us=110.0, sms_left=110 / 132)
    assert [getattr(lost, part) for part in PARTS] == pytest.approx([110.0, 22.0, 18.0, 20.0])
    assert lost.op_us == pytest.approx(170.0)
    assert lost.hidden == 0.75
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


# --- the benchmark of GEMMs -------------------------------------------------------------------------


def buffer_of(plan: Plan, output: torch.Tensor) -> torch.Tensor:
    """The buffer that a plan's GEMM leaves: the output as it is, or tile by tile in tile order; padding is -1."""
    buffer = output.new_full((buffer_elements(plan),), -1.0)
    if plan.layout == Layout.ROW_MAJOR:
        buffer[: output.numel()] = output.flatten()
        return buffer
    for index in range(plan.tiles_m * plan.tiles_n):
        row, column = plan.tile_coord(index)
        rows = slice(plan.tile_m * row, plan.tile_m * (row + 1))
        part = output[rows, plan.tile_n * column : plan.tile_n * (column + 1)]
        tile = output.new_full((plan.tile_m, plan.tile_n), -1.0)
        tile[: part.shape[0], : part.shape[1]] = part
        begin = packed_offset(plan, index)
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
    machine.arch = machine.kernel_arch = arch
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
        args = bench("study").parse("bench", ["--device", "cpu", *argv])
        args.op = ("gemm",)
        bench("study").run_rank(args)
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
