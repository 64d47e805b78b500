"""The plug-ins of vLLM and SGLang: with classes that stand in for theirs, and with their own from their wheels.

Neither can be imported where the tests run: their wheels need CUDA and another PyTorch. With OVERLAP_TEST_SOURCES naming a folder that
holds the wheels (pip download --no-deps vllm==0.33.0 sglang==0.5.23) the classes that the plug-ins replace are taken out of them.
"""

import ast
import contextlib
import functools
import importlib
import inspect
import operator
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import overlap_torch_plugins
from checks import Failures
from layers import integers, my_features, my_part
from modes import Observer
from operands import difference
from overlap_torch._tools import doctor
from overlap_torch.integrations import _sglang_experts, _vllm_experts, sglang, vllm

ROOT = Path(__file__).resolve().parents[2]
SOURCES = os.environ.get("OVERLAP_TEST_SOURCES", "")
N, K, ROWS = 6, 8, 5
WIDE = 1040  # so many products of fractions that the order in which a GEMM adds them shows


class SeesOps(Observer, TorchDispatchMode):
    """Names of this package's ops, each with the invariance that the call asks for."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        space, _, name = function._overloadpacket._qualified_op_name.partition("::")
        if space == "overlap":
            invariance = (kwargs or {}).get("invariance")
            self.seen.append(f"{name} {invariance}" if invariance else name)
        return function(*args, **(kwargs or {}))


def ops_of(job) -> tuple[Any, list[str]]:
    """The job's result, and the ops of this package that it calls."""
    with SeesOps() as mode:
        return job(), mode.seen


def check_any_batch(failures: Failures, op: str, rows_of, *where) -> torch.Tensor | None:
    """In a deterministic mode `op` runs for all numbers of rows, and a row has the same bits in every batch.

    ``rows_of`` takes this rank's features, and returns the layer's rows; so does this function, for a whole batch.
    """
    if dist.get_world_size() == 1:
        return None
    batch = torch.randn(600, WIDE, generator=torch.Generator().manual_seed(4))
    bits = rows_of(my_features(batch))
    right = batch.double() @ integers(N, WIDE, seed=1).double().t() + integers(N, seed=2)
    failures.near(bits.double(), right, *where, "value", rtol=1e-5, atol=1e-4)
    for rows in (1, 2, 7, 127, 128, 129, 512, 513):
        for part in (slice(rows), slice(-rows, None)):
            found, called = ops_of(lambda: rows_of(my_features(batch[part])))  # noqa: B023
            failures.equal(called, [op], *where, part)
            failures.expect(difference(found, bits[part]), *where, part)
    return bits


class Weight(nn.Parameter):
    """As frameworks' parameters: a subclass whose results would be of the subclass, too."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return super().__torch_function__(function, types, args, kwargs or {})


class Unquantized:
    def create_weights(self, layer, input_size_per_partition, output_partition_sizes, **others):
        whole = integers(sum(output_partition_sizes), layer.input_size, seed=1)
        layer.weight = Weight(my_features(whole), requires_grad=False)

    def apply(self, layer, x, bias=None):
        return functional.linear(x, layer.weight, bias)


class Quantized(Unquantized):
    """A type other than the method of layers without quantization."""


class Group:
    """As both frameworks' GroupCoordinator."""

    def __init__(self) -> None:
        self.device_group = dist.group.WORLD
        self.world_size, self.rank_in_group = dist.get_world_size(), dist.get_rank()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.as_subclass(torch.Tensor).clone()
        dist.all_reduce(tensor)
        return tensor

    def reduce_scatter_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None:
        dist.reduce_scatter_tensor(output, input.as_subclass(torch.Tensor))


class QuantConfig:
    def get_quant_method(self, layer, prefix):
        return Quantized()


QUANTIZED = {"quant_config": QuantConfig()}


class StandIn(nn.Module):
    """As both frameworks' RowParallelLinear, with what a layer of theirs has; ``ranks`` is its rank and the number of ranks."""

    def __init__(self, ranks: tuple[int, int], input_size: int, output_size: int, **given) -> None:
        super().__init__()
        self.tp_rank, self.tp_size = ranks
        self.input_size, self.output_size = input_size, output_size
        self.input_size_per_partition = input_size // self.tp_size
        self.input_is_parallel = given.get("input_is_parallel", True)
        self.skip_bias_add = given.get("skip_bias_add", False)
        self.reduce_results = given.get("reduce_results", True)
        self.quant_method = Quantized() if "quant_config" in given else Unquantized()
        self.quant_method.create_weights(self, self.input_size_per_partition, [output_size])
        bias = integers(output_size, seed=2) if given.get("bias", True) else None
        self.bias = None if bias is None else Weight(bias, requires_grad=False)
        self.left = self.bias if self.skip_bias_add else None

    def product(self, input_: torch.Tensor, pad_to: int = 1) -> torch.Tensor:
        """This rank's term of the sum, its rows padded to a multiple of ``pad_to``."""
        part = input_ if self.input_is_parallel else my_features(input_).contiguous()
        part = functional.pad(part, (0, 0, 0, -part.shape[0] % pad_to))
        fused = self.bias if self.tp_rank == 0 and not self.skip_bias_add else None
        return self.quant_method.apply(self, part, fused)


# --- vLLM -----------------------------------------------------------------------------------------------------


class Pluggable(nn.Module):
    """As vLLM's PluggableLayer and CustomOp: what is registered under a class's name is made in its place."""

    registry: dict[str, type] = {}

    def __new__(cls, *args, **kwargs):
        return super().__new__(cls.registry.get(cls.__name__, cls))

    @classmethod
    def register_oot(cls, layer: type) -> type:
        assert cls.__name__ not in cls.registry
        cls.registry[cls.__name__] = layer
        return layer


class VllmExperts(Pluggable):
    """Stands in for vLLM's UnquantizedFusedMoEMethod."""

    def __init__(self, moe: Any) -> None:
        super().__init__()
        self.moe = moe
        self.unquantized_backend = SimpleNamespace(name=moe.backend)

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
        return "vLLM's own"


class VllmLinear(Pluggable, StandIn):
    """Stands in for vLLM's RowParallelLinear."""

    def __init__(self, *sizes: int, return_bias=True, disable_tp=False, **given: Any) -> None:
        group = Group()
        ranks = (0, 1) if disable_tp else (group.rank_in_group, group.world_size)
        super().__init__(ranks, *sizes, **given)
        self.return_bias = return_bias

    def forward(self, input_):
        output = self.product(input_)
        if self.reduce_results and self.tp_size > 1:
            output = Group().all_reduce(output)
        return (output, self.left) if self.return_bias else output


def module(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(members)
    return made


def packages(root: str, names: str) -> list[ModuleType]:
    """Packages without members: the root, and these in it."""
    return [module(name) for name in (root, *(f"{root}.{name}" for name in names.split()))]


@contextlib.contextmanager
def installed(version: str, *modules: ModuleType) -> Iterator[None]:
    """As if a framework of this version, with these modules, were installed. Other modules imported meanwhile stay."""
    sys.modules.update({made.__name__: made for made in modules})
    try:
        with mock.patch.object(metadata, "version", lambda name: version):
            yield
    finally:
        for made in modules:
            del sys.modules[made.__name__]


def vllm_modules(
    base: type,
    registry: dict[str, type],
    unquantized: type,
    experts: type = VllmExperts,
    **names: Any,
) -> list[ModuleType]:
    """The modules that the plug-in imports; ``names`` are functions of its experts that tests call."""
    config = SimpleNamespace(use_ubatching=False, enable_elastic_ep=False)
    return [
        *packages("vllm", "model_executor model_executor.layers model_executor.layers.fused_moe"),
        module(
            "vllm.model_executor.layers.linear",
            RowParallelLinear=base,
            UnquantizedLinearMethod=unquantized,
        ),
        module("vllm.model_executor.custom_op", op_registry_oot=registry),
        module("vllm.distributed", get_tp_group=Group, get_ep_group=names.get("group", Group)),
        module(
            "vllm.config",
            get_current_vllm_config=lambda: SimpleNamespace(parallel_config=config),
        ),
        module("vllm.forward_context", get_forward_context=names.get("context")),
        module(_vllm_experts.MODULE, UnquantizedFusedMoEMethod=experts),
        module("vllm.distributed.parallel_state", _groups={"tp:0": Group}),
        module("vllm.envs", VLLM_BATCH_INVARIANT=False, environment_variables={}),
        *packages("vllm.compilation", "passes"),
        module(
            "vllm.compilation.passes.pass_manager",
            PostGradPassManager=type("Manager", (PassManager,), {}),
        ),
        module("vllm.compilation.passes.inductor_pass", InductorPass=object),
    ]


class PassManager:
    """Stands in for vLLM's PostGradPassManager."""

    def __init__(self) -> None:
        self.passes: list[Any] = []

    def configure(self, config: Any) -> None:
        self.passes.append(config)


def check_row_parallel(failures: Failures, base, sees: str, *where) -> None:
    """All kinds of vLLM's layers: as the composition says, by the op `sees` where it is to run, or by none."""
    world = dist.get_world_size()
    whole = integers(ROWS, K, seed=3)
    weight, bias = integers(N, K, seed=1), integers(N, seed=2)
    product = whole @ weight.t()
    kinds = [
        ({}, True, product + bias),
        ({"bias": False}, True, product),
        ({"input_is_parallel": False}, True, product + bias),
        ({"skip_bias_add": True}, True, product),
        ({"return_bias": False}, True, product + bias),
        (QUANTIZED, False, product + bias),
        ({"reduce_results": False, "bias": False}, False, None),
    ]
    for options, ours, right in kinds:
        layer = base(K, N, **options)
        input = whole if options.get("input_is_parallel") is False else my_features(whole)
        result, called = ops_of(lambda: layer(input))  # noqa: B023
        ours = ours and sees and world > 1
        expected = [sees] if ours else []
        failures.equal(called, expected, *where, options)
        output = result
        if options.get("return_bias", True):
            output, left = result
            right_left = bias if options.get("skip_bias_add") else None
            same = left is right_left if right_left is None else torch.equal(left, right_left)
            failures.expect(None if same else str(left), *where, options, "bias")
        if right is None:
            right = my_features(whole) @ my_features(weight).t()
        plain = torch.Tensor if ours else type(output)
        failures.equal(type(output), plain, *where, options)
        failures.expect(difference(output.as_subclass(torch.Tensor), right), *where, options)


def check_vllms_batch_invariance(failures: Failures, base) -> None:
    op, where = "gemm_allreduce batch", "VLLM_BATCH_INVARIANT"
    with mock.patch.object(sys.modules["vllm.envs"], where, True):
        check_row_parallel(failures, base, op, where)
        layer = base(WIDE, N)
    check_any_batch(failures, op, lambda input: layer(input)[0], where)


@pytest.mark.ranks((1, "gloo"), (2, "gloo"))
def test_vllms_row_parallel_layers_run_the_op(failures: Failures) -> None:
    modules = vllm_modules(VllmLinear, VllmLinear.registry, Unquantized)
    made_before = VllmLinear(K, N)
    with installed("0.33.0", *modules), mock.patch.object(vllm, "_enabled", None):
        overlap_torch_plugins.vllm()
        failures.equal(VllmLinear.registry, {}, "without the variable")
        with mock.patch.dict(os.environ, {"OVERLAP_VLLM": "1"}):
            overlap_torch_plugins.vllm()
            overlap_torch_plugins.vllm()
            keyed = sys.modules["vllm.envs"].environment_variables
            keyed = {name: value() for name, value in keyed.items()}
        right = {"OVERLAP_VLLM": "1", "OVERLAP_MOE_ROWS": ""}
        groups = str(dist.get_world_size())
        failures.holds(groups, keyed.pop("OVERLAP_GRAPHS").rpartition("((")[2], "groups in the key")
        failures.equal(keyed, right, "the key of compiled graphs")
        ours = VllmLinear.registry["VllmLinear"]
        failures.equal(type(VllmLinear(K, N)), ours, "class")
        failures.holds(VllmLinear, ours.__mro__, "class")
        check_row_parallel(failures, VllmLinear, "gemm_allreduce", "vLLM")
        check_vllms_batch_invariance(failures, VllmLinear)
        with (
            mock.patch.object(vllm, "_enabled", None),
            pytest.raises(RuntimeError, match="VLLM_PLUGINS"),
        ):
            vllm.enable()
        VllmLinear.registry.clear()
    _, called = ops_of(lambda: made_before(my_features(integers(ROWS, K, seed=3))))
    failures.equal(called, [], "a layer made before")


@pytest.mark.ranks((2, "gloo"))
@pytest.mark.parametrize("invariant", [False, True])
def test_vllms_layers_compile_to_one_graph(failures: Failures, invariant: bool) -> None:
    """vLLM compiles whole graphs: the op is in them."""
    ours = vllm.layer_class(
        VllmLinear, Unquantized, tp_group=Group, batch_invariant=lambda: invariant
    )
    layer = ours(K, N)
    for name, value in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(value.as_subclass(torch.Tensor), requires_grad=False))
    graphs = []

    def keep(gm, inputs):
        graphs.append(str(gm.graph))
        return gm.forward

    torch._dynamo.reset()
    input = my_features(integers(ROWS, K, seed=3))
    output, _ = torch.compile(layer, fullgraph=True, backend=keep)(input)
    failures.expect(difference(output, layer(input)[0]), "output")
    failures.equal([graph.count("overlap.gemm_allreduce") for graph in graphs], [1], "graphs")
    failures.equal(["invariance: batch" in graph for graph in graphs], [invariant], *graphs)


# --- SGLang ---------------------------------------------------------------------------------------------------


SGLANGS = "srt srt.layers srt.plugins srt.layers.quantization"


class SglangExperts(nn.Module):
    """Stands in for SGLang's UnquantizedFusedMoEMethod."""


def sglang_modules(context: object = None, attention: object = None) -> list[ModuleType]:
    """The modules of SGLang's experts that the plug-in imports, with the members of these objects."""
    return [
        module(
            "sglang.srt.layers.quantization.unquant",
            UnquantizedLinearMethod=Unquantized,
            UnquantizedFusedMoEMethod=SglangExperts,
        ),
        module("sglang.srt.runtime_context", **(vars(context) if context else {})),
        module("sglang.srt.layers.dp_attention", **(vars(attention) if attention else {})),
    ]


class Context(SimpleNamespace):
    """The context that SGLang's forward asks for in each call."""

    def __init__(self) -> None:
        super().__init__(
            forward=SimpleNamespace(sp_active=False, mlp_reduce_scatter=False),
            execution=SimpleNamespace(
                deterministic=SimpleNamespace(enable_deterministic_inference=False),
                comm=SimpleNamespace(enable_quant_communications=False),
            ),
            parallel=SimpleNamespace(tp_group=Group(), attn_tp_group=Group()),
        )


def sglang_names(context: Context) -> dict[str, Any]:
    """The names of sglang.srt.layers.linear."""
    return {
        "get_forward": lambda: context.forward,
        "get_exec": lambda: context.execution,
        "get_parallel": lambda: context.parallel,
        "should_skip_mlp_all_reduce": lambda: context.forward.mlp_reduce_scatter,
        "get_group_rank_size": lambda group: (
            (0, 1) if group is None else (group.rank_in_group, group.world_size)
        ),
    }


class SglangLinear(StandIn):
    """Stands in for SGLang's RowParallelLinear."""

    context: Context

    def __init__(
        self, *sizes: int, attention=False, use_dp_attention_reduce=False, **given
    ) -> None:
        parallel = self.context.parallel
        self.tp_group = parallel.attn_tp_group if attention else parallel.tp_group
        super().__init__((self.tp_group.rank_in_group, self.tp_group.world_size), *sizes, **given)
        self.use_dp_attention_reduce, self.use_decode_attn_tp = use_dp_attention_reduce, False

    def forward(self, input_, skip_all_reduce=False, forward_batch=None, output_tensor=None):
        names, group = sglang_names(self.context), self.context.parallel.tp_group
        if names["get_forward"]().sp_active and not skip_all_reduce:
            whole = self.product(input_, pad_to=group.world_size)
            output = whole.new_empty((whole.shape[0] // group.world_size, whole.shape[1]))
            group.reduce_scatter_tensor(output.as_subclass(torch.Tensor), whole)
            return output, self.left
        output = self.product(input_)
        reduced = skip_all_reduce or names["should_skip_mlp_all_reduce"]()
        if self.reduce_results and not reduced:
            output = group.all_reduce(output)
        return output, self.left


class Hooks:
    """Stands in for SGLang's HookRegistry."""

    registered: list[tuple[str, Any, str]] = []

    @classmethod
    def register(cls, target, hook, hook_type) -> None:
        cls.registered.append((target, hook, hook_type))


def check_sglang_layers(failures: Failures, base: type, forward, context: Context, *where) -> None:
    """With the hook and without it: the same, and which calls are ours."""
    world = dist.get_world_size()
    whole = integers(ROWS, K, seed=3)
    decode = SimpleNamespace(forward_mode=SimpleNamespace(is_decode_or_idle=lambda: True))
    extend = SimpleNamespace(forward_mode=SimpleNamespace(is_decode_or_idle=lambda: False))
    reduced, scattered = ["gemm_allreduce"], ["gemm_reducescatter"]
    quantized = {"execution.comm.enable_quant_communications": True}
    deterministic = {"execution.deterministic.enable_deterministic_inference": True}
    cases = [
        ({}, {}, {}, reduced),
        ({"bias": False}, {}, {}, reduced),
        ({"skip_bias_add": True}, {}, {}, reduced),
        ({"input_is_parallel": False}, {}, {}, reduced),
        (QUANTIZED, {}, {}, []),
        ({"reduce_results": False}, {}, {}, []),
        ({"use_dp_attention_reduce": True}, {}, {}, []),
        ({"attention": True}, {}, {}, []),
        ({}, {"skip_all_reduce": True}, {}, []),
        ({}, {}, {"forward.mlp_reduce_scatter": True}, []),
        ({}, {}, {"forward.sp_active": True}, scattered),
        ({"reduce_results": False}, {}, {"forward.sp_active": True}, scattered),
        ({}, {"skip_all_reduce": True}, {"forward.sp_active": True}, []),
        (QUANTIZED, {}, {"forward.sp_active": True}, []),
        ({}, {"forward_batch": decode}, quantized, reduced),
        ({}, {"forward_batch": extend}, {}, reduced),
        ({}, {}, deterministic, ["gemm_allreduce batch"]),
        ({"input_is_parallel": False}, {}, deterministic, ["gemm_allreduce batch"]),
        ({}, {}, {"forward.sp_active": True, **deterministic}, ["gemm_reducescatter batch"]),
        (QUANTIZED, {}, deterministic, []),
        ({"reduce_results": False}, {}, deterministic, []),
    ]
    for options, keywords, settings, expected in cases:
        layer = base(K, N, **options)
        input = whole if options.get("input_is_parallel") is False else my_features(whole)
        with contextlib.ExitStack() as stack:
            for path, value in settings.items():
                parent, _, name = path.rpartition(".")
                place = operator.attrgetter(parent)(context)
                stack.enter_context(mock.patch.object(place, name, value))
            right, right_left = base.forward(layer, input, **keywords)
            (output, left), called = ops_of(lambda: forward(layer, input, **keywords))  # noqa: B023
        case = (*where, options, keywords, settings)
        expected = expected if world > 1 else []
        failures.equal(called, expected, *case)
        failures.expect(
            difference(output.as_subclass(torch.Tensor), right.as_subclass(torch.Tensor)), *case
        )
        failures.expect(None if left is right_left else str(left), *case, "bias")
    check_sglangs_any_batch(failures, base(WIDE, N), forward, context, *where)


def check_sglangs_any_batch(failures: Failures, layer, forward, context: Context, *where) -> None:
    """Sums that are scattered have the bits of those that are not."""

    def reduced(input: torch.Tensor) -> torch.Tensor:
        return forward(layer, input)[0]

    def gathered(input: torch.Tensor) -> torch.Tensor:
        part = reduced(input)
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part)
        return torch.cat(parts)[: len(input)]

    with mock.patch.object(context.execution.deterministic, "enable_deterministic_inference", True):
        right = check_any_batch(failures, "gemm_allreduce batch", reduced, *where)
        with mock.patch.object(context.forward, "sp_active", True):
            found = check_any_batch(failures, "gemm_reducescatter batch", gathered, *where)
    if right is not None:
        failures.expect(difference(found, right), *where, "scattered")


@pytest.mark.ranks((1, "gloo"), (2, "gloo"))
def test_sglangs_row_parallel_layers_run_the_ops(failures: Failures) -> None:
    context = SglangLinear.context = Context()
    Hooks.registered.clear()
    framework = installed(
        "0.5.23",
        *packages("sglang", SGLANGS),
        module(
            "sglang.srt.plugins.hook_registry",
            HookRegistry=Hooks,
            HookType=SimpleNamespace(AROUND="around"),
        ),
        module("sglang.srt.layers.linear", **sglang_names(context)),
        *sglang_modules(),
    )
    with framework, mock.patch.object(sglang, "_enabled", False):
        overlap_torch_plugins.sglang()
        failures.equal(Hooks.registered, [], "without the variable")
        with mock.patch.dict(os.environ, {"OVERLAP_SGLANG": "1"}):
            overlap_torch_plugins.sglang()
            overlap_torch_plugins.sglang()
    hooks = {target: hook for target, hook, kind in Hooks.registered if kind == "around"}
    targets = [sglang.TARGET, sglang.NORM_TARGET, *_sglang_experts.TARGETS]
    failures.equal(list(hooks), targets, "registered")
    hook = hooks[sglang.TARGET]

    def forward(*args, **keywords):
        return hook(SglangLinear.forward, *args, **keywords)

    check_sglang_layers(failures, SglangLinear, forward, context, "SGLang")


# --- entry points, variables, versions ------------------------------------------------------------------------


def test_entry_points_name_the_plugins():
    text = (ROOT / "pyproject.toml").read_text()
    for group, name in (("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang")):
        found = re.search(
            rf'^\[project.entry-points."{group}"\]\noverlap_torch = "(.*)"$', text, re.M
        )
        place, _, function = found[1].partition(":")
        named = getattr(importlib.import_module(place), function)
        assert named is vars(overlap_torch_plugins)[name]
    assert '"overlap_torch_plugins"' in (ROOT / "setup.py").read_text()


def test_plugins_import_nothing_until_asked():
    code = (
        "import sys, overlap_torch_plugins as plugins\n"
        "plugins.vllm(); plugins.sglang()\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'overlap_torch', 'vllm', 'sglang')))\n"
    )
    environment = {name: value for name, value in os.environ.items() if "OVERLAP" not in name}
    environment |= {"OVERLAP_VLLM": "0", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment)


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_plugins_refuse_other_versions_and_values(name, monkeypatch):
    variable = f"OVERLAP_{name.upper()}"
    assert variable in {each.name for each in doctor.ENVIRONMENT}
    monkeypatch.setenv(variable, "yes")
    with pytest.raises(ValueError, match=f"{variable} must be 0 or 1, but it is 'yes'"):
        getattr(overlap_torch_plugins, name)()
    monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(metadata, "version", lambda distribution: "0.4.1")
    with pytest.raises(ImportError, match=f"{name} 0.4.1 is installed, but this integration knows"):
        getattr(overlap_torch_plugins, name)()


# --- the frameworks' own classes, from their wheels -----------------------------------------------------------


def wheel(name: str) -> zipfile.ZipFile:
    found = sorted(Path(SOURCES).glob(f"{name}-*.whl")) if SOURCES else []
    if not found:
        pytest.skip(
            f"no wheel of {name}: OVERLAP_TEST_SOURCES={SOURCES!r} names no folder that holds it; see the top of this file"
        )
    return zipfile.ZipFile(found[0])


def source_of(archive: zipfile.ZipFile, path: str, name: str) -> str:
    """A class, a function, or a class's method (with a dot), without its decorators and the annotations' names."""
    body, kinds = ast.parse(archive.read(path).decode()).body, ast.ClassDef | ast.FunctionDef
    for each in name.split("."):
        (found,) = [node for node in body if isinstance(node, kinds) and node.name == each]
        body = found.body
    found.decorator_list = []
    return "from __future__ import annotations\n" + ast.unparse(found)


def linear_names(group: Group) -> dict[str, Any]:
    """The names that both frameworks' modules of linear layers import."""
    return {
        "torch": torch,
        "Parameter": nn.Parameter,
        "WEIGHT_LOADER_V2_SUPPORTED": [],
        "divide": operator.floordiv,
        "set_weight_attrs": lambda *arguments: None,
        "tensor_model_parallel_all_reduce": group.all_reduce,
        "split_tensor_along_last_dim": lambda tensor, num_partitions: tensor.chunk(
            num_partitions, -1
        ),
    }


def loaded(base: type, *sizes: int, **options: Any) -> nn.Module:
    """A layer of a framework's class, which allocates the bias; loading fills it."""
    layer = base(*sizes, **options)
    if layer.bias is not None:
        layer.bias.data.copy_(integers(N, seed=2))
    return layer


def check_vllms_own(failures: Failures, sources: list[str]) -> None:
    """vLLM's PluggableLayer, LinearBase and RowParallelLinear, with ours in its place and without."""
    group = Group()
    registry: dict[str, type] = {}
    quantization = "vllm.model_executor.layers.quantization.online.fp8"
    names = linear_names(group) | {
        "nn": nn,
        "op_registry": {},
        "op_registry_oot": registry,
        "logger": mock.Mock(),
        "UnquantizedLinearMethod": Unquantized,
        "BasevLLMParameter": type("NoParameter", (), {}),
        "resolve_quant_method": lambda config, layer, prefix: Quantized(),
        "get_tensor_model_parallel_rank": lambda: group.rank_in_group,
        "get_tensor_model_parallel_world_size": lambda: group.world_size,
    }
    for source in sources:
        exec(source, names)
    base = names["RowParallelLinear"]
    layer_of = functools.partial(loaded, base)
    framework = installed(
        "0.33.0",
        *vllm_modules(base, registry, Unquantized),
        module(quantization, OnlineLinearBase=type("OnlineLinearBase", (), {})),
    )
    with framework, mock.patch.object(vllm, "_enabled", None):
        check_row_parallel(failures, layer_of, "", "vLLM's own class")
        vllm.enable()
        made = layer_of(K, N)
        ours = registry["RowParallelLinear"]
        failures.equal(type(made), ours, "made in its place")
        check_row_parallel(failures, layer_of, "gemm_allreduce", "in its place")
        check_vllms_batch_invariance(failures, layer_of)
    Pluggable.registry.clear()


@pytest.mark.long
@pytest.mark.ranks((2, "gloo"))
def test_vllms_own_layer_runs_the_op(ranks):
    with wheel("vllm") as archive:
        folder = "vllm/model_executor"
        sources = [
            source_of(archive, f"{folder}/custom_op.py", "PluggableLayer"),
            source_of(archive, f"{folder}/layers/linear.py", "LinearBase"),
            source_of(archive, f"{folder}/layers/linear.py", "RowParallelLinear"),
        ]
        groups = archive.read("vllm/plugins/__init__.py").decode()
        assert 'DEFAULT_PLUGINS_GROUP = "vllm.general_plugins"' in groups
        assert "def get_tp_group()" in archive.read("vllm/distributed/parallel_state.py").decode()
        assert "VLLM_BATCH_INVARIANT" in archive.read("vllm/envs.py").decode()
        # The key of compiled graphs has all variables but those that this function names.
        assert "VLLM_BATCH_INVARIANT" not in source_of(archive, "vllm/envs.py", "compile_factors")
    ranks.expect_no_failures(check_vllms_own, sources)


class SGLangsLinearBase(nn.Module):
    """The base that SGLang's RowParallelLinear inherits."""

    def __init__(self, input_size, output_size, skip_bias_add, dtype, config, prefix) -> None:
        super().__init__()
        self.input_size, self.output_size = input_size, output_size
        self.skip_bias_add, self.params_dtype = skip_bias_add, dtype
        self.scheme = None
        self.quant_method = config.get_quant_method(self, prefix) if config else Unquantized()


def sglang_linear_names(context: Context) -> dict[str, object]:
    """The names that the module of SGLang's linear layers has beside them."""

    def scattered(layer, x, bias):
        """As layernorm_sp.row_parallel_gbar_matmul."""
        x = functional.pad(x, (0, 0, 0, -x.shape[0] % context.parallel.tp_group.world_size))
        output = layer.quant_method.apply(layer, x, bias).as_subclass(torch.Tensor)
        part = my_part(output, 0).clone()
        context.parallel.tp_group.reduce_scatter_tensor(part, output)
        return part

    return linear_names(context.parallel.tp_group) | {
        "Literal": Literal,
        "LinearBase": SGLangsLinearBase,
        "_resolve_linear_group": lambda name: context.parallel.tp_group,
        "_disable_hip_linear_quant": False,
        "_is_cpu": False,
        "layernorm_sp": SimpleNamespace(row_parallel_gbar_matmul=scattered),
        "use_symmetric_memory": lambda *a, **k: mock.MagicMock(),
        "is_allocation_symmetric": lambda: False,
    }


def check_sglangs_own(failures: Failures, source: str, hooks: str) -> None:
    """SGLang's RowParallelLinear with the hook that its own HookRegistry puts around its forward."""
    context = Context()
    module_of = module("sglang.srt.layers.linear", **sglang_names(context))
    names = vars(module_of)
    names |= sglang_linear_names(context)
    exec(source, names)
    base = names["RowParallelLinear"]
    registry = module("sglang.srt.plugins.hook_registry")
    parents = packages("sglang", SGLANGS)
    fusion = module(sglang.NORM_TARGET.rpartition(".")[0])
    fusion.flashinfer_allreduce_residual_rmsnorm = lambda *arguments: (None, None)
    for parent in parents:
        parent.__path__ = []
    framework = installed(
        "0.5.23",
        *parents,
        registry,
        module_of,
        fusion,
        *sglang_modules(),
    )

    def layer_of(*sizes, attention=False, **given):
        layer = loaded(base, *sizes, **given)
        if attention:
            layer.tp_group = context.parallel.attn_tp_group
        return layer

    layer_of.forward = base.forward
    with framework, mock.patch.object(sglang, "_enabled", False):
        exec(hooks, vars(registry))
        # Whom dotted names lead to.
        parents[0].srt, parents[1].layers, parents[2].linear = parents[1], parents[2], module_of
        sglang.enable()
        registry.HookRegistry.apply_hooks()
        hooked = base.forward
        failures.expect(None if hooked is not layer_of.forward else "is not", "hooked")
        check_sglang_layers(
            failures,
            layer_of,
            lambda layer, *args, **keywords: layer(*args, **keywords),
            context,
            "SGLang's own class",
        )


@pytest.mark.long
@pytest.mark.ranks((2, "gloo"))
def test_sglangs_own_layer_runs_the_ops(ranks):
    with wheel("sglang") as archive:
        source = source_of(archive, "sglang/srt/layers/linear.py", "RowParallelLinear")
        hooks = archive.read("sglang/srt/plugins/hook_registry.py").decode()
        text = archive.read("sglang/srt/layers/linear.py").decode()
        imported = {
            alias.name
            for node in ast.parse(text).body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        assert {"get_forward", "get_exec", "get_parallel"} <= imported
        assert {"should_skip_mlp_all_reduce", "get_group_rank_size"} <= imported
        plugins = archive.read("sglang/srt/plugins/__init__.py").decode()
        assert 'GENERAL_PLUGINS_GROUP = "sglang.srt.plugins"' in plugins
        unquant = archive.read("sglang/srt/layers/quantization/unquant.py").decode()
        assert "class UnquantizedLinearMethod" in unquant
        fusion = archive.read("sglang/srt/layers/flashinfer_comm_fusion.py").decode()
        functions = {
            n.name: n.args for n in ast.parse(fusion).body if isinstance(n, ast.FunctionDef)
        }
        theirs = functions[sglang.NORM_TARGET.rpartition(".")[2]].args
        assert [a.arg for a in theirs] == list(inspect.signature(sglang._norm).parameters)[1:]
        assert ast.unparse(functions["resolve_fusion_group"]) == "*, use_attn_tp_group: bool"
        # Deterministic inference names no backend of the fusion, without which SGLang does not call the function.
        names: dict[str, Any] = {"logger": mock.Mock()}
        decides = "_deterministic_allreduce_fusion_disable"
        exec(source_of(archive, "sglang/srt/arg_groups/overrides.py", decides), names)
        view = {"flashinfer_allreduce_fusion_backend": "auto", "enable_deterministic_inference": 1}
        named = names[decides](SimpleNamespace(**view))
        assert named == {"flashinfer_allreduce_fusion_backend": None}
        assert "comm.flashinfer_allreduce_fusion_backend is not None" in source_of(
            archive,
            "sglang/srt/layers/layer_boundary/residual/add_norm.py",
            "flashinfer_ar_fusion_applies",
        )
    ranks.expect_no_failures(check_sglangs_own, source, hooks)
