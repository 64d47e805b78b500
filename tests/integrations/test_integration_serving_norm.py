"""The plug-ins of serving frameworks around a norm: all-reduce with residual and norm as one op, and what vLLM's layers refuse."""

import ast
import contextlib
import functools
import hashlib
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.source import ConstantSource
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.nn import functional

from checks import Failures
from operands import difference
from overlap_torch._ops.group import group_name
from overlap_torch.integrations import _vllm_norms, sglang, vllm
from serving import Group, Unquantized
from serving_vllm import PassManager, VllmLinear
from wheels import execute, own_code_of, part_of

N = 16
EPS = 1e-5


def rows_of(rows: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, (rows, N), generator=generator).to(dtype)


@pytest.mark.ranks((1, "gloo"), (2, "gloo"))
def test_sglangs_norm_is_one_op_for_few_rows(failures: Failures) -> None:
    """As the composition says where the op takes the rows; SGLang's own function, with its arguments, elsewhere."""
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = []

    def group_of(*, use_attn_tp_group: bool):
        groups.append(use_attn_tp_group)
        return world, rank, Group()

    hook = sglang.norm_hook(SimpleNamespace(resolve_fusion_group=group_of))
    gain = rows_of(1, 5)[0] / 4
    cases = [
        (rows_of(3, rank), rows_of(3, 9), gain, True),
        (rows_of(512, rank), rows_of(512, 9), gain, True),
        (rows_of(513, rank), rows_of(513, 9), gain, False),
        (rows_of(0, rank), rows_of(0, 9), gain, False),
        (rows_of(3, rank, torch.float32), rows_of(3, 9, torch.float32), gain.float(), False),
        (rows_of(3, rank), rows_of(3, 9), gain.float(), False),
        (rows_of(3, rank)[:, :12].contiguous(), rows_of(3, 9)[:, :12].contiguous(), gain[:12], False),
        (rows_of(3, rank).repeat(1, 2)[:, :N], rows_of(3, 9), gain, False),
    ]  # fmt: skip
    for i, (partial, residual, weight, ours) in enumerate(cases):
        given = []

        def original(*arguments):
            given.append(arguments)  # noqa: B023
            return None, None

        norm, total = hook(
            original,
            input_tensor=partial,
            residual=residual,
            weight=weight,
            eps=1e-5,
            max_token_num=2048,
            use_attn_tp_group=i % 2 == 0,
        )
        if not ours or world == 1:
            right = (1e-5, 2048, None, False, True, i % 2 == 0)
            left = len(given) == 1 and given[0][3:] == right and given[0][0] is partial
            failures.expect(None if left and norm is None else f"{given}", i, "left")
            continue
        sum_ = partial.clone()
        dist.all_reduce(sum_)
        sum_ = sum_ + residual
        failures.expect(difference(total, sum_), i, "sum")
        right_norm = functional.rms_norm(sum_, (N,), weight, 1e-5)
        failures.expect(difference(norm, right_norm), i, "norm")
        failures.expect(None if not given else "SGLang's function ran, too", i)
    failures.equal(groups, [i % 2 == 0 for i in range(len(cases))], "groups")


@pytest.mark.ranks((2, "gloo"))
def test_sglangs_norm_stays_in_compiled_graphs(failures: Failures) -> None:
    """--enable-torch-compile traces the hook in each layer: no graph ends there, for rows that the op takes or leaves."""
    place = dist.get_world_size(), dist.get_rank(), Group()
    hook = sglang.norm_hook(SimpleNamespace(resolve_fusion_group=lambda **_: place))

    def layer(x, residual, gain):
        normed, total = hook(lambda x, residual, *_: (x + 1, residual + 2), x * 2, residual, gain)
        return normed + 1, total

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    gain = rows_of(1, 5)[0]
    for rows in (3, 512, 513):
        operands = rows_of(rows, place[1]), rows_of(rows, 9), gain
        with torch.no_grad():
            found, right = compiled(*operands), layer(*operands)
        failures.expect_equal(list(found), list(right), rows)


@pytest.mark.ranks((2, "gloo"))
def test_vllms_layers_of_other_ranks_are_refused(failures: Failures) -> None:
    others = SimpleNamespace(device_group=dist.group.WORLD, world_size=4, rank_in_group=0)
    ours = vllm.layer_class(
        VllmLinear, Unquantized, tp_group=lambda: others, batch_invariant=lambda: False
    )
    with pytest.raises(RuntimeError, match=r"made for 2 ranks.*has 4.*OVERLAP_VLLM=0"):
        ours(8, 6)
    for options in ({"disable_tp": True}, {"reduce_results": False, "bias": False}):
        failures.equal(ours(8, 6, **options).overlap_group, "", options, "named")


# --- vLLM's compiled graphs -------------------------------------------------------------------------------------


def rms_norm(x, weight, epsilon: float, columns: int | None = None):
    """As vLLM's operator."""
    wide = x.float()
    read = wide if columns is None else wide[..., :columns]
    wide = wide * torch.rsqrt(read.pow(2).mean(-1, keepdim=True) + epsilon)
    return (wide if weight is None else wide.to(weight.dtype) * weight).to(x.dtype)


def fused_add_rms_norm(x, residual, weight, epsilon: float, columns: int | None = None):
    total = x.float() + residual.float()
    return rms_norm(total, weight, epsilon, columns).to(x.dtype), total.to(x.dtype)


@contextlib.contextmanager
def vllm_operators(plain=rms_norm, adds=fused_add_rms_norm) -> Iterator[None]:
    """vLLM's operators of graphs: the all-reduce of its tensor-parallel group, and both norms."""
    after = "Tensor? weight, float epsilon, SymInt? columns=None"
    with (
        torch.library._scoped_library("vllm", "FRAGMENT") as communication,
        torch.library._scoped_library("vllm_ir", "FRAGMENT") as norms,
    ):
        communication.define("all_reduce(Tensor tensor, str group_name) -> Tensor")
        norms.define(f"rms_norm(Tensor x, {after}) -> Tensor")
        norms.define(f"fused_add_rms_norm(Tensor x, Tensor residual, {after}) -> (Tensor, Tensor)")
        implementations = (
            (communication, "all_reduce", lambda x, group_name: Group().all_reduce(x), torch.empty_like),
            (norms, "rms_norm", plain, rms_norm),
            (norms, "fused_add_rms_norm", adds, fused_add_rms_norm),
        )  # fmt: skip
        for library, name, run, fake in implementations:
            library.impl(name, run, "CompositeExplicitAutograd")
            if name == "all_reduce":
                library._register_fake(name, lambda x, group_name: torch.empty_like(x))
            else:
                library._register_fake(name, fake)
        yield


def all_reduced(x):
    return torch.ops.vllm.all_reduce(x, group_name="tp:0")


def two_half_layers(x, residual, gain, weight):
    add = torch.ops.vllm_ir.fused_add_rms_norm
    normed, residual = add(all_reduced(x), residual, gain, EPS)
    return add(all_reduced(normed @ weight), residual, gain, EPS)


def first_norm(x, residual, gain, weight):
    """The embeddings' sum is read by the norm, and as the residual."""
    total = all_reduced(x)
    return torch.ops.vllm_ir.rms_norm(total, gain, EPS), total + residual


def row_parallel_layer(x, residual, gain, weight):
    total = torch.ops.overlap.gemm_allreduce(x, weight.t(), gain, group=group_name(None))
    return torch.ops.vllm_ir.fused_add_rms_norm(total, residual, gain, EPS)


def read_before_the_residual(x, residual, gain, weight):
    total = all_reduced(x)
    return (*torch.ops.vllm_ir.fused_add_rms_norm(total, residual, gain, EPS), total)


def with_norm(**changes):
    """Two results of a norm whose arguments are others."""

    def run(x, residual, gain, weight):
        given = {"weight": gain, "columns": None} | changes
        weight = given["weight"](gain) if callable(given["weight"]) else given["weight"]
        add = torch.ops.vllm_ir.fused_add_rms_norm
        return add(all_reduced(x), residual, weight, EPS, given["columns"])

    return run


def traced_graph(function, operands: list[torch.Tensor]) -> torch.fx.GraphModule:
    """As vLLM compiles: the rows' number is the only size that is not known."""
    fake = FakeTensorMode(shape_env=ShapeEnv())
    static, dynamic = DimDynamic.STATIC, DimDynamic.DYNAMIC
    sizes = [[dynamic, static], [dynamic, static], [static], [static, static]]
    fakes = [
        fake.from_tensor(
            operand,
            symbolic_context=StatelessSymbolicContext(dynamic_sizes=size),
            source=ConstantSource("rows" if size[0] is dynamic else f"operand{i}"),
        )
        for i, (operand, size) in enumerate(zip(operands, sizes, strict=True))
    ]
    return make_fx(function, _allow_non_fake_inputs=True)(*fakes)


GRAPHS = {  # the function, and how many ops its graph gets
    "two half layers": (two_half_layers, 2),
    "the first norm": (first_norm, 1),
    "a row-parallel layer": (row_parallel_layer, 1),
    "the sum is read, too": (read_before_the_residual, 0),
    "of some columns": (with_norm(columns=8), 0),
    "no gain": (with_norm(weight=None), 0),
    "a gain in float32": (with_norm(weight=lambda gain: gain.float() + 1), 0),
    "a residual in float32": (
        lambda x, r, g, w: torch.ops.vllm_ir.fused_add_rms_norm(all_reduced(x), r.float(), g, EPS), 0),
    "no all-reduce": (lambda x, r, g, w: torch.ops.vllm_ir.fused_add_rms_norm(x, r, g, EPS), 0),
}  # fmt: skip


def check_graphs(failures: Failures, run_pass, *where) -> None:
    """Each graph has its ops, no norm is left that could be one, and results are the graph's before."""
    rank = dist.get_rank()

    def compare(found, right, name: str, *case) -> None:
        """The same bits; the sum of a second layer is no whole number, and vLLM's norm reads it before it is rounded."""
        if name != "two half layers":
            failures.expect_equal(list(found), list(right), *where, name, *case)
            return
        for i, (mine, theirs) in enumerate(zip(found, right, strict=True)):
            near = {"rtol": 2**-7, "atol": 0.0}
            failures.near(mine.double(), theirs.double(), *where, name, *case, i, **near)

    for name, (function, ops) in GRAPHS.items():
        for dtype in (torch.bfloat16, torch.float16):
            operands = [rows_of(3, rank, dtype), rows_of(3, 9, dtype), rows_of(1, 5, dtype)[0], rows_of(N, 4, dtype)]  # fmt: skip
            traced = traced_graph(function, operands)
            right = traced(*operands)
            run_pass(traced.graph)
            traced.graph.lint()
            traced.recompile()
            found = str(traced.graph).count("overlap.allreduce_rmsnorm")
            failures.equal(found, ops, *where, name, dtype)
            compare(traced(*operands), right, name, dtype)
            more = [rows_of(7, rank, dtype), rows_of(7, 9, dtype), *operands[2:]]
            compare(traced(*more), traced_graph(function, more)(*more), name, dtype, "7 rows")
            if name == "two half layers":
                left = [node for node in traced.graph.nodes if "vllm" in str(node.target)]
                failures.equal(left, [], *where, name, dtype)


@pytest.mark.ranks((2, "gloo"))
def test_vllms_norms_become_ops(failures: Failures) -> None:
    with vllm_operators():
        check_graphs(failures, lambda graph: _vllm_norms.fuse(graph, lambda name: group_name(None)))
        wide = [rows_of(3, 1).float(), rows_of(3, 9).float(), rows_of(1, 5)[0].float(), rows_of(N, 4).float()]  # fmt: skip
        traced = traced_graph(two_half_layers, wide)
        failures.equal(_vllm_norms.fuse(traced.graph, str), 0, "float32")


@pytest.mark.ranks((2, "gloo"))
def test_vllms_passes_begin_with_ours(failures: Failures) -> None:
    manager = type("Manager", (PassManager,), {})
    invariant = [False]
    _vllm_norms.add_pass(manager, object, {"tp:0": group_name(None)}.get, lambda: invariant[0])
    made = manager()
    made.configure("theirs")
    ours, *others = made.passes
    failures.equal(others, ["theirs"], "the passes after it")
    # The joining of additions and norms comes first.
    joins, later = type("AddRMSNormFusionPass", (), {})(), manager()
    later.passes.append(joins)
    later.configure("theirs")
    order = [
        each is right for each, right in zip(later.passes, (joins, ours, "theirs"), strict=True)
    ]
    failures.equal(order, [True, False, True], "behind the pass that makes norms that add")
    before = ours.uuid()
    with mock.patch.object(_vllm_norms, "sizes", lambda: (("other", 8),)):
        failures.expect(None if ours.uuid() != before else before, "key of other groups")
    with vllm_operators():
        check_graphs(failures, ours, "the pass")
        operands = [rows_of(3, 1), rows_of(3, 9), rows_of(1, 5)[0], rows_of(N, 4)]
        traced = traced_graph(two_half_layers, operands)
        invariant[0] = True
        ours(traced.graph)
        failures.equal(str(traced.graph).count("overlap."), 0, "VLLM_BATCH_INVARIANT=1")


@pytest.mark.ranks((2, "gloo"))
@pytest.mark.parametrize("name", [own_code_of("vllm")])
def test_vllms_own_manager_runs_the_pass(failures: Failures, name: str) -> None:
    """vLLM's pass manager and its norms, by the pass that `add_pass` puts in front."""
    norms = execute({}, "vllm.ir.ops.layernorm rms_norm fused_add_rms_norm")
    folder = "vllm.compilation.passes"
    names: dict[str, Any] = {"CustomGraphPass": CustomGraphPass, "functools": functools, "hashlib": hashlib, "json": json}  # fmt: skip
    execute(names, f"{folder}.inductor_pass InductorPass")
    ran = []

    class Theirs(names["InductorPass"]):
        def __init__(self, config: Any) -> None:
            pass

        def __call__(self, graph: Any) -> None:
            ran.append(str(graph))

    passes = ("NoOpEliminationPass", "VllmIRLoweringPass", "UnsafeCloneEliminationPass", "PostCleanupPass", "FixFunctionalizationPass")  # fmt: skip
    range_ = SimpleNamespace(compile_range="(1, 8192)")
    names |= dict.fromkeys(passes, Theirs) | {
        "get_pass_context": lambda: range_,
        "set_current_vllm_config": lambda *a, **k: contextlib.nullcontext(),
        "rocm_aiter_ops": mock.Mock(is_enabled=lambda: False, is_rdna_aiter_enabled=lambda: False),
        "with_pattern_match_debug": lambda function: function,
        "VllmInductorPass": mock.Mock(),
        "VllmPatternMatcherPass": mock.Mock(),
    }
    execute(names, f"{folder}.pass_manager PostGradPassManager")
    manager = names["PostGradPassManager"]
    _vllm_norms.add_pass(
        manager, names["InductorPass"], {"tp:0": group_name(None)}.get, lambda: False
    )
    made = manager()
    read = {
        node.attr
        for node in ast.walk(part_of(f"{folder}.pass_manager", "PostGradPassManager"))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self.pass_config"
    }
    flags = SimpleNamespace(**dict.fromkeys(read, False))
    flags.eliminate_noops, flags.compute_hash = True, lambda: "0"
    config = SimpleNamespace(pass_config=flags)
    made.configure(SimpleNamespace(compilation_config=config, model_config=None))
    for each in (made.post_cleanup, made.ir_lowering, made.clone_elimination, made.fix_functionalization, *made.passes[1:]):  # fmt: skip
        each.uuid = lambda: "theirs"
    failures.equal(len(made.uuid()), 64, "vLLM's key of compiled graphs")
    with vllm_operators(norms["rms_norm"], norms["fused_add_rms_norm"]):
        check_graphs(failures, made, "vLLM's manager")
    failures.expect(None if "allreduce_rmsnorm" in ran[0] else ran[0], "ours is first")
    # Models of the Transformers backend.
    flags.fuse_allreduce_rms = True
    for each in ("AddRMSNormFusionPass", "AllReduceFusionPass", "RMSNormReshapeFusionPass"):
        names[each] = type(each, (Theirs,), {})
    later, model = manager(), SimpleNamespace(using_transformers_backend=lambda: True)
    later.configure(SimpleNamespace(compilation_config=config, model_config=model))
    order = [type(each).__name__ for each in later.passes]
    right = ["AddRMSNormFusionPass", "OverlapNormPass", "AllReduceFusionPass"]
    failures.equal(order[1:4], right, "a model of the Transformers backend")
