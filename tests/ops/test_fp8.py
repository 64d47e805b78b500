"""Scaled operands: the ops against float64 products of what fp8 and its scales stand for, equal bit for bit."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import ScalingType
from torch.utils import _pytree as pytree

import overlap_torch
import scaled
from checks import Failures, export, message_of
from operands import place, rank_device, world_name
from overlap_torch import plan as plan_api
from scaled import E4M3, E5M2, Case

every_op = pytest.mark.parametrize("op", scaled.OPS)
ONE_WEIGHT = [op for op in scaled.OPS if op != "weights"]


def own_rows(op: str, rows: int) -> dict[str, list[int]]:
    """The counts of an all-to-all in which this rank keeps all of its rows; other ops have none."""
    counts = [rows * (r == dist.get_rank()) for r in range(dist.get_world_size())]
    return {"send_rows": counts, "recv_rows": counts} if op == "gemm_alltoall" else {}


@every_op
@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (3, "gloo"), (1, "nccl"), (2, "nccl"))
def test_fp8_ops_are_exact(failures: Failures, op: str) -> None:
    for seed, case in enumerate(scaled.cases()):
        scaled.check(failures, case, op, seed)


@every_op
@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_fp8_ops_are_the_same_under_autocast(failures: Failures, op: str) -> None:
    for seed, case in enumerate((Case((6,), 16, 32, bias=True), Case((6,), 8, 16, "tensor"))):
        with torch.autocast(rank_device().type, torch.float16):
            scaled.check(failures, case, op, seed)


# --- errors ---------------------------------------------------------------------------------------------------


def bad_calls() -> dict[str, tuple[dict, tuple[str, ...]]]:
    """name -> (what differs from a right call, parts of the message)."""
    device = rank_device()

    def ones(*shape: int) -> torch.Tensor:
        return torch.ones(*shape, device=device)

    x = ones(6, 16)
    tensor, row, block = ScalingType.TensorWise, ScalingType.RowWise, ScalingType.BlockWise1x128
    return {
        "no scales": ({"scale_input": None, "scale_weight": None}, ("scale_input",)),
        "one scale": ({"scale_weight": None}, ("scale_weight is None",)),
        "bf16 with scales": ({"input": x.bfloat16()}, ("BFloat16", "Float8_e4m3fn")),
        "both e5m2": ({"input": x.to(E5M2), "weight": ones(8, 16).to(E5M2)}, ("Float8_e5m2",)),
        "scale of bf16": ({"scale_input": ones(6, 1).bfloat16()}, ("scale_input", "float32")),
        "scale of float64": ({"scale_weight": ones(8, 1).double()}, ("scale_weight", "float32")),
        "scale on meta": ({"scale_weight": ones(8, 1).to("meta")}, ("scale_weight on meta",)),
        "too few scales": ({"scale_input": ones(5, 1)}, ("[5, 1]", "[6, 1]", "[8, 1]")),
        "scales of K": ({"scale_weight": ones(1, 16)}, ("[1, 16]", "[8, 1]")),
        "mixed recipes": ({"scale_weight": ones(1)}, ("[6, 1]", "[1]")),
        "named otherwise": ({"recipe_input": tensor}, ("[6, 1]", "one number each")),
        "recipes that do not go together": (
            {"recipe_input": row, "recipe_weight": tensor},
            ("recipe_input is RowWise", "recipe_weight TensorWise"),
        ),
        "a recipe of mx": (
            {"recipe_input": ScalingType.BlockWise1x32},
            ("BlockWise1x32", "RowWise"),
        ),
        "a weight's recipe for the input": (
            {"recipe_input": ScalingType.BlockWise128x128},
            ("BlockWise128x128", "BlockWise1x128"),
        ),
        "an input's recipe for the weight": ({"recipe_weight": block}, ("BlockWise128x128",)),
        "two recipes": (
            {
                "input": x[:1].to(E4M3),
                "weight": ones(1, 16).to(E4M3),
                "scale_input": ones(1, 1),
                "scale_weight": ones(1, 1),
            },
            ("two recipes", "name recipe_input"),
        ),
        "output of float64": ({"output_dtype": torch.float64}, ("output_dtype", "bfloat16")),
        "output of fp8": ({"output_dtype": E4M3}, ("output_dtype", "bfloat16")),
        "bias of another type": ({"bias": ones(8)}, ("bias is Float", "output_dtype")),
        "K differs": ({"weight": ones(8, 17).to(E4M3)}, ("16", "17")),
        "a list of scales": ({"weight": [ones(8, 16).to(E4M3)]}, ("sequence",)),
        "scales of other recipes": (
            {
                "weight": [ones(8, 16).to(E4M3), ones(4, 16).to(E4M3)],
                "scale_weight": [ones(8, 1), ones(1)],
                "bias": None,
            },
            ("[4, 16]", "[1]"),
        ),
        "shared row scales": ({"shared_scale_input": True}, ("shared_scale_input", "TensorWise")),
        "another dim": (
            {"dim": 1},
            ("with scaled operands dim must be 0, but is 1; move it to the front",),
        ),
    }


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_fp8_errors_say_what_is_allowed(failures: Failures) -> None:
    device = rank_device()
    only_gather = ("a list of scales", "scales of other recipes", "shared row scales")
    for op in ONE_WEIGHT:
        for name, (changes, parts) in bad_calls().items():
            if name in only_gather and op != "allgather_gemm":
                continue
            if name == "another dim" and op not in ("allgather_gemm", "gemm_reducescatter"):
                continue
            if name == "two recipes" and op == "gemm_reducescatter":
                continue  # a row for each rank: more than one
            right = {
                "input": torch.ones(6, 16, device=device).to(E4M3),
                "weight": torch.ones(8, 16, device=device).to(E4M3),
                "scale_input": torch.ones(6, 1, device=device),
                "scale_weight": torch.ones(8, 1, device=device),
                "bias": None,
            }
            keywords = {**right, **changes}
            keywords |= own_rows(op, keywords["input"].shape[0])
            call = getattr(overlap_torch, op)
            with FakeTensorMode() as mode:
                fakes = pytree.tree_map_only(torch.Tensor, mode.from_tensor, keywords)
                failures.holds(op, message_of(call, **fakes), name, "as fake")
            # On this rank alone: nothing has been communicated when it raises.
            failures.says(message_of(call, **keywords), (op, *parts), op, name)


# --- gradients ------------------------------------------------------------------------------------------------


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_fp8_operands_that_require_grad_are_an_error_that_names_the_layers(
    failures: Failures,
) -> None:
    x = torch.ones(4, 16).to(E4M3).to(rank_device())
    w = torch.ones(8, 16).to(E4M3).to(rank_device())
    one = torch.ones(1, device=rank_device())
    bias = torch.zeros(8, dtype=torch.bfloat16, device=rank_device())
    operands = {"input": x, "weight": w, "scale_input": one, "scale_weight": one, "bias": bias}
    for op in ONE_WEIGHT:
        rows = own_rows(op, 4)
        for name, operand in operands.items():
            leaf = operand.detach().clone().requires_grad_()
            changed = {**operands, name: leaf}
            said = message_of(getattr(overlap_torch, op), **rows, **changed)
            parts = (f"{op}: {name} requires grad", "overlap_torch.nn", "Float8Linear")
            failures.says(said, parts, op, name)
            with torch.no_grad():
                result = getattr(overlap_torch, op)(**rows, **changed)
            first = result if isinstance(result, torch.Tensor) else result[0]
            failures.expect("requires grad" if first.requires_grad else None, op, name, "no_grad")


# --- what travels ---------------------------------------------------------------------------------------------


@pytest.mark.ranks((2, "gloo"))
def test_fp8_gathers_carry_fp8_and_reductions_the_outputs_type(failures: Failures) -> None:
    """Types and sizes of what the process group is handed, from the profiler."""
    world, rank = dist.get_world_size(), dist.get_rank()
    bytes_, bf16, floats = "unsigned char", "c10::BFloat16", "float"
    expected = {
        ("gemm_allreduce", "row", False): [("allreduce", bf16, 8 * 6)],
        ("gemm_reducescatter", "row", False): [("reduce_scatter", bf16, 8 * world * 6)],
        ("gemm_alltoall", "row", False): [("recv", bf16, None), ("send", bf16, None)],
        ("allgather_gemm", "row", False): [("allgather", floats, 8), ("allgather", bytes_, 8 * 16)],
        ("allgather_gemm", "block", False): [("allgather", floats, 8), ("allgather", bytes_, 8 * 16)],
        ("allgather_gemm", "tensor", False): [("allgather", floats, 1), ("allgather", bytes_, 8 * 16)],
        ("allgather_gemm", "tensor", True): [("allgather", bytes_, 8 * 16)],
        ("weights", "row", False): [("allgather", floats, 8), ("allgather", bytes_, 8 * 16)],
    }  # fmt: skip
    for (op, recipe, shared), wanted in expected.items():
        case = Case((8,), 6, 16, recipe, shared=shared)
        call = scaled.make(case, op, rank, world, 3)
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
        ) as profile:
            scaled.invoke(case, op, call, rank_device())
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        seen = []
        for event in events:
            name = event.get("name", "")
            if not name.startswith("c10d::") or "Input type" not in event.get("args", {}):
                continue
            kinds, dims = event["args"]["Input type"], event["args"]["Input Dims"]
            sent = [
                (kind, size)
                for kind, size in zip(kinds, dims, strict=True)
                if kind in (bytes_, bf16, floats)
            ]
            seen.append((name, sent))
        failures.equal(len(seen), len(wanted), op, recipe, shared)
        for (name, sent), (kind, dtype, count) in zip(seen, wanted, strict=False):
            sizes = [torch.Size(size).numel() for of, size in sent if of == dtype]
            fits = kind in name.replace("_base_", "") and (
                count is None or count in sizes or not sizes
            )
            failures.expect(None if fits else f"{name} of {sent}", op, recipe, shared)
            wrong = [of for of, _ in sent if of != dtype]
            failures.expect(f"{name} of {sent}" if wrong else None, op, recipe, shared)


# --- compilers ------------------------------------------------------------------------------------------------


def arguments_of(op: str) -> tuple[torch._ops.OpOverload, tuple, dict]:
    """A call of the operator itself."""
    overload = scaled.Overload(op)
    arguments = overload.arguments(Case((4,), 6, 16, "row", bias=True, named=False), *place(), 1)
    positional = sum(not one.kwarg_only for one in overload.operator._schema.arguments)
    return overload.operator, tuple(arguments[:positional]), {"group": world_name()}


@every_op
@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_fp8_ops_pass_opcheck_compile_and_export(failures: Failures, op: str) -> None:
    operator, arguments, keywords = arguments_of(op)
    right = operator(*arguments, **keywords)

    def flat(tree) -> list[torch.Tensor]:
        return [scaled.as_comparable(leaf) for leaf in pytree.tree_leaves(tree)]

    # Without test_schema, which multiplies operands: fp8 has no such kernel in PyTorch.
    tests = ("test_faketensor", "test_aot_dispatch_dynamic")
    found = torch.library.opcheck(
        operator, arguments, keywords, test_utils=tests, raise_exception=False
    )
    for name, result in found.items():
        failures.equal(result, "SUCCESS", op, name)

    def call(*given):
        return operator(*given, **keywords)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    failures.expect_equal(flat(compiled(*arguments)), flat(right), op, "compiled")

    loaded = export(call, *arguments).module()
    failures.expect_equal(flat(loaded(*arguments)), flat(right), op, "exported")


@pytest.mark.ranks((2, "gloo"))
def test_fp8_functions_compile_with_named_recipes(failures: Failures) -> None:
    """The Python functions with recipes named, in one graph."""
    case = Case((4,), 6, 16, "row")
    call = scaled.make(case, "weights", dist.get_rank(), dist.get_world_size(), 1)
    device = rank_device()

    def function(input, weights, scale_input, scale_weights):
        return overlap_torch.allgather_gemm(
            input, weights, scale_input=scale_input, scale_weight=scale_weights,
            recipe_input=ScalingType.RowWise, output_dtype=torch.float32,
        )  # fmt: skip

    arguments = (
        call.input.to(device), [w.to(device) for w in call.weights],
        call.scale_input.to(device), [s.to(device) for s in call.scale_weights],
    )  # fmt: skip
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    results, right = compiled(*arguments), function(*arguments)
    failures.expect_equal(results[0], right[0], "outputs")
    failures.expect_equal([results[2]], [right[2]], "scales")


# --- plans ----------------------------------------------------------------------------------------------------


@pytest.mark.ranks((2, "gloo"))
def test_fp8_plans_reports_and_traces_name_types_and_recipe(failures: Failures) -> None:
    plan = plan_api.plan_for(64, 32, 16, E4M3, device="cpu", recipe="row_wise")
    problem = plan.problem
    said = (problem.dtype.name, problem.recipe.name, problem.output_dtype.name, plan.schedule.name)
    failures.equal(said, ("FLOAT8_E4M3FN", "ROW_WISE", "BFLOAT16", "SEQUENTIAL"), "plan_for")
    fast = plan_api.plan_for(64, 32, 16, E4M3, device="cpu", recipe="row_wise", fast_accum=True)
    failures.equal((problem.fast_accum, fast.problem.fast_accum), (False, True), "plan_for")
    with plan_api.use_plan(fast, device="cpu") as used:
        failures.expect(None if used.problem.fast_accum else str(used), "use_plan")
    case = Case((64,), 32, 16, "row")
    call = scaled.make(case, "gemm_allreduce", dist.get_rank(), dist.get_world_size(), 2)
    with overlap_torch.trace() as trace:
        scaled.invoke(case, "gemm_allreduce", call, rank_device())
        scaled.invoke(
            Case((64,), 32, 16, "row", output=torch.float32), "gemm_allreduce", call, rank_device()
        )
        scaled.invoke(Case((64,), 32, 16, "row", fast=True), "gemm_allreduce", call, rank_device())
    text = str(overlap_torch.report())
    types = "float8_e4m3fn row_wise to "
    right = [types + name for name in ("bfloat16", "float32", "bfloat16 fast_accum")]
    failures.says(text, right, "report")
    failures.equal([one.dtype for one in trace.calls], right, "trace")


@every_op
@pytest.mark.ranks((2, "gloo"), (3, "gloo"))
def test_fp8_ranks_that_accumulate_otherwise_raise(failures: Failures, op: str) -> None:
    """One rank lets sums be less exact: what it calls is another problem."""
    rank, world = dist.get_rank(), dist.get_world_size()
    case, fast = (Case((8,), 6, 16, "row", fast=value) for value in (False, True))
    call = scaled.make(case, op, rank, world, 3)
    message = message_of(
        scaled.invoke, fast if rank == world - 1 else case, op, call, rank_device()
    )
    told = ("rank 0 called", f"rank {world - 1} called", "row_wise bfloat16 fast_accum=1")
    failures.says(message, told, op)
    for seed, both in enumerate((case, fast)):
        scaled.check(failures, both, op, seed)
