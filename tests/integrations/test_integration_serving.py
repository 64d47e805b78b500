"""The plug-ins of vLLM and SGLang: their row-parallel layers, and what the plug-ins take as given in the frameworks' code.

Classes stand in for the frameworks'; tests/lib/wheels.py says how long tests get their own.
"""

import ast
import functools
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import overlap_torch_plugins
import serving_sglang
import serving_vllm
from checks import Failures
from layers import integers, my_features, my_part
from operands import difference
from overlap_torch._tools import doctor
from overlap_torch.integrations import _serving, sglang, vllm
from serving import ROWS, Group, K, N, Unquantized, ops_of, set_to
from serving_vllm import Pluggable, VllmLinear, vllm_installed
from wheels import execute, own_code_of, part_of, text_of

ROOT = Path(__file__).resolve().parents[2]
FRAMEWORKS = {"vllm": serving_vllm, "sglang": serving_sglang}
WIDE = 1040  # so many products of fractions that the order in which a GEMM adds them shows
OPS = {"sum": "gemm_allreduce", "rows": "gemm_reducescatter"}


def meaning(options: dict[str, Any], result: str) -> torch.Tensor:
    """The layer's output for the whole input of :func:`check_layers`: a sum over the ranks, this rank's part of it, or rows of it."""
    whole, weight, bias = integers(ROWS, K, seed=3), integers(N, K, seed=1), integers(N, seed=2)
    biased = options.get("bias", True) and not options.get("skip_bias_add", False)
    if result == "rows":
        whole = functional.pad(whole, (0, 0, 0, -ROWS % dist.get_world_size()))
    if result == "part":
        product = my_features(whole) @ my_features(weight).t()
        return product + bias if biased and dist.get_rank() == 0 else product
    total = whole @ weight.t() + (bias if biased else 0)
    return my_part(total, 0) if result == "rows" else total


def filled(layer: nn.Module) -> nn.Module:
    """The frameworks' own classes allocate the bias; loading fills it."""
    if layer.bias is not None:
        layer.bias.data.copy_(integers(N, seed=2))
    return layer


def check_layers(failures: Failures, cases, plugged, invariance: str, *where) -> None:
    """All cases, without the plug-in and with it: as the composition says, by an op where it is to run, or by none."""
    base, original, forward, context = plugged
    whole = integers(ROWS, K, seed=3)
    for options, call, result, ours in cases:
        layer = filled(base(K, N, **options))
        input = whole if options.get("input_is_parallel") is False else my_features(whole)
        keywords = {name: value for name, value in call.items() if "." not in name}
        settings = {name: value for name, value in call.items() if "." in name}
        ours = ours and (dist.get_world_size() > 1 or _serving.ANY_WORLD)
        for run, ops in ((original, []), (forward, [OPS[result] + invariance] if ours else [])):
            case = (*where, options, call, ops)
            with set_to(context, settings):
                found, called = ops_of(lambda: run(layer, input, **keywords))  # noqa: B023
            failures.equal(called, ops, *case)
            output, left = found if options.get("return_bias", True) else (found, None)
            kept = left is (layer.bias if options.get("skip_bias_add") else None)
            failures.expect(None if kept else str(left), *case, "bias")
            if ops:
                failures.equal(type(output), torch.Tensor, *case)
            output = output.as_subclass(torch.Tensor)
            failures.expect(difference(output, meaning(options, result)), *case)


def check_any_batch(failures: Failures, op: str, rows_of, *where) -> torch.Tensor:
    """`op` runs for all numbers of rows in a deterministic mode, and a row has the same bits in every batch.

    ``rows_of`` takes this rank's features, and returns the layer's rows; so does this function, for a whole batch.
    """
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


def check_invariance(failures: Failures, scattered, plugged, *where) -> None:
    """Sums in the framework's deterministic mode; those that are scattered have the bits of those that are not."""
    base, _, forward, context = plugged
    layer = filled(base(WIDE, N))

    def reduced(input: torch.Tensor) -> torch.Tensor:
        return forward(layer, input)[0]

    def gathered(input: torch.Tensor) -> torch.Tensor:
        part = reduced(input)
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part)
        return torch.cat(parts)[: len(input)]

    right = check_any_batch(failures, "gemm_allreduce batch", reduced, *where)
    if scattered:
        with set_to(context, scattered):
            found = check_any_batch(failures, "gemm_reducescatter batch", gathered, *where)
        failures.expect(difference(found, right), *where, "scattered")


OWN = [own_code_of(name, name, True) for name in FRAMEWORKS]


@pytest.mark.ranks((1, "gloo"), (2, "gloo"))
@pytest.mark.parametrize(("name", "own"), [("vllm", False), ("sglang", False), *OWN])
def test_row_parallel_layers_run_the_ops(failures: Failures, name: str, own: bool) -> None:
    framework = FRAMEWORKS[name]
    with framework.layers(failures, own) as plugged:
        check_layers(failures, framework.LAYER_CASES, plugged, "")
        with set_to(plugged[-1], {framework.INVARIANT: True}):
            check_layers(failures, framework.LAYER_CASES, plugged, " batch", "deterministic")
            if dist.get_world_size() > 1:
                check_invariance(failures, framework.SCATTERED, plugged, "deterministic")
            with mock.patch.object(_serving, "ANY_WORLD", True):
                check_layers(failures, framework.LAYER_CASES, plugged, "", "any number of ranks")


@pytest.mark.ranks((2, "gloo"))
@pytest.mark.parametrize("own", [False, own_code_of("vllm", True)])
def test_vllms_models_change_what_layers_reduce(failures: Failures, own: bool) -> None:
    """Models set reduce_results of layers that they have made, and then sum the results themselves, or no longer do."""
    input = my_features(integers(ROWS, K, seed=3))
    with serving_vllm.layers(failures, own) as (base, _, forward, _):
        for made, later, result in ((True, False, "part"), (False, True, "sum")):
            layer = base(K, N, bias=False, reduce_results=made)
            layer.reduce_results = later
            output = forward(layer, input)[0].as_subclass(torch.Tensor)
            failures.expect(difference(output, meaning({"bias": False}, result)), made, later)


@pytest.mark.ranks((1, "gloo"), (2, "gloo"))
def test_vllms_classes_are_registered_once(failures: Failures) -> None:
    before = VllmLinear(K, N)
    with vllm_installed() as modules:
        vllm.enable()
        keyed = modules["vllm.envs"].environment_variables
        with mock.patch.dict(os.environ, {"OVERLAP_VLLM": "1"}):
            keyed = {name: value() for name, value in keyed.items()}
        with (
            mock.patch.object(vllm, "_enabled", None),
            pytest.raises(RuntimeError, match="VLLM_PLUGINS"),
        ):
            vllm.enable()
    groups = str(dist.get_world_size())
    failures.holds(groups, keyed.pop("OVERLAP_GRAPHS").rpartition("((")[2], "groups in the key")
    right = {"OVERLAP_VLLM": "1", "OVERLAP_MOE_ROWS": "", "OVERLAP_INVARIANCE": "none"}
    failures.equal(keyed, right, "the key of compiled graphs")
    _, called = ops_of(lambda: before(my_features(integers(ROWS, K, seed=3))))
    failures.equal(called, [], "a layer made before")


def test_another_plugins_experts_are_refused():
    with mock.patch.dict(Pluggable.registry, {"VllmExperts": int}), vllm_installed():
        with pytest.raises(RuntimeError, match=r"place of vLLM's VllmExperts.*VLLM_PLUGINS"):
            vllm.enable()
        assert Pluggable.registry == {"VllmExperts": int}


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


@pytest.mark.ranks((2, "gloo"))
def test_vllms_layers_keep_a_chosen_linear_backend(failures: Failures) -> None:
    """vLLM's methods hold such a backend as a partial function, and a plain function otherwise."""
    ours = vllm.layer_class(VllmLinear, Unquantized, tp_group=Group, batch_invariant=bool)
    input = my_features(integers(ROWS, K, seed=3))
    for gemm, ops in (
        (functional.linear, ["gemm_allreduce"]),
        (functools.partial(functional.linear, bias=None), []),
    ):
        layer = filled(ours(K, N))
        layer.quant_method._gemm_impl = gemm
        (output, _), called = ops_of(lambda: layer(input))  # noqa: B023
        failures.equal(called, ops, gemm)
        failures.expect(difference(output.as_subclass(torch.Tensor), meaning({}, "sum")), gemm)


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


# --- the frameworks' code, as the plug-ins take it ------------------------------------------------------------

MOE = "vllm.model_executor.layers.fused_moe"
RUNNER = "sglang.srt.layers.moe.moe_runner.deep_gemm post_permute_deep_gemm_to"
DISPATCHER = "sglang.srt.layers.moe.token_dispatcher"
LAYER = "quant_method runner_backend moe_ep_size moe_ep_rank num_fused_shared_experts with_bias _dwdp_bound reduce_results top_k"
LAYER += " hidden_size layer_id num_local_experts"
# A module, and a part of it if one is named: texts that are in it, with dots between them in this order.
TAKEN = {
    "vllm.plugins": ['DEFAULT_PLUGINS_GROUP = "vllm.general_plugins"'],
    "vllm.distributed.parallel_state": [
        "group = _groups[group_name]()", "self.device_group", "def get_tp_group()",
    ],
    "vllm.envs": ["VLLM_BATCH_INVARIANT"],
    "vllm.model_executor.layers.linear UnquantizedLinearMethod.__init__": [
        "self._gemm_impl = dispatch_unquantized_gemm(linear_backend)"
    ],
    "vllm.model_executor.layers.utils dispatch_unquantized_gemm": [
        "return default_unquantized_gemm ... return functools.partial(cuda_flashinfer_bf16_gemm"
    ],
    # Its own dispatch asks the same numbers.
    "vllm.distributed.device_communicators.all2all AgRsAll2AllManager": [
        "sizes = dp_metadata.get_chunk_sizes_across_dp_rank()"
    ],
    # The sums over a tensor parallel group do not change.
    f"{MOE}.prepare_finalize.naive_dp_ep MoEPrepareAndFinalizeNaiveDPEPModular": [
        "def output_is_reduced(self) -> bool:\n        return False"
    ],
    # Shared experts are the runner's.
    f"{MOE}.runner.moe_runner MoERunner._forward_impl": [
        "with self._sequence_parallel_context ... self._apply_quant_method("
    ],
    "vllm.config.parallel": ['all2all_backend: All2AllBackend = "allgather_reducescatter"'],
    "sglang.srt.plugins": ['GENERAL_PLUGINS_GROUP = "sglang.srt.plugins"'],
    "sglang.srt.layers.quantization.unquant": ["class UnquantizedLinearMethod"],
    "sglang.srt.layers.layer_boundary.residual.add_norm flashinfer_ar_fusion_applies": [
        "comm.flashinfer_allreduce_fusion_backend is not None"
    ],
    "sglang.srt.batch_overlap.two_batch_overlap MaybeTboDeepEPDispatcher": ["self._inners = ["],
    f"{DISPATCHER}.deepep": ["class DeepEPDispatcher(BaseDispatcher):"],
    f"{DISPATCHER}.flashinfer": ["class FlashinferDispatcher("],
    "sglang.srt.layers.dp_attention": [
        "def get_dp_global_num_tokens()", "def get_is_extend_in_batch()",
    ],
    "sglang.srt.runtime_context": ["def get_parallel()", "def get_exec()", "def get_flags()"],
    "sglang.srt.layers.moe.fused_moe_triton.layer": [f"self.{name} = " for name in LAYER.split()],
    # The factor is in the results of this dispatcher, and not in those of the other.
    f"{RUNNER}_flashinfer": ["post_permute_deep_gemm_to_standard("],
    f"{RUNNER}_standard": ["runner_config.routed_scaling_factor"],
}  # fmt: skip
# Texts that are not there.
ABSENT = {
    # The key of compiled graphs has all variables but those that this function names.
    "vllm.envs compile_factors": ["VLLM_BATCH_INVARIANT"],
    f"{MOE}.prepare_finalize.naive_dp_ep MoEPrepareAndFinalizeNaiveDPEPModular": [
        "def supports_async", "supports_async =",
    ],
    f"{RUNNER}_deepep_ll": ["routed_scaling_factor"],
    f"{RUNNER}_deepep_normal": ["routed_scaling_factor"],
}  # fmt: skip


@pytest.mark.parametrize("name", [own_code_of("vllm"), own_code_of("sglang")])
def test_the_code_is_as_the_plugin_takes_it(name):
    def beside(table: dict[str, list[str]]) -> Iterator[tuple[str, str]]:
        """Each text of this framework, and the code that is to have it or not."""
        for place, texts in table.items():
            module, *part = place.split()
            if module.startswith(f"{name}."):
                code = ast.unparse(part_of(module, *part)) if part else text_of(module)
                yield from ((text, code) for text in texts)

    for text, code in beside(TAKEN):
        begins = [code.find(each) for each in text.split(" ... ")]
        assert -1 not in begins and begins == sorted(begins), text
    assert [text for text, code in beside(ABSENT) if text in code] == []


@pytest.mark.parametrize("name", [own_code_of("vllm")])
def test_vllms_experts_are_placed_in_order(name):
    """Experts of the plug-in cannot ask for vLLM's "passthrough"."""
    names: dict[str, Any] = {"FLASHINFER_MOE_EP_BACKENDS": frozenset()}
    names["PASSTHROUGH_ALL2ALL_BACKEND"] = "passthrough"
    binds, places = "bind_passthrough_all2all_backend", "determine_expert_placement_strategy"
    execute(names, f"vllm.config.kernel {binds}", f"{MOE}.expert_map_manager {places}")
    with pytest.raises(ValueError, match=r"only valid with a moe_backend that"):
        names[binds]("triton", SimpleNamespace(all2all_backend="passthrough"))
    kernels = {"use_all2all_kernels": True, "needs_round_robin_routing_tables": False}
    kernels = SimpleNamespace(**kernels, all2all_backend="ag")
    assert names[places]("round_robin", kernels, 4, 0, False) == "linear"


@pytest.mark.parametrize("name", [own_code_of("sglang")])
def test_sglangs_norm_and_sizes_are_as_the_plugin_takes_them(name):
    imported = {
        alias.name
        for node in ast.parse(text_of(serving_sglang.LINEAR)).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(serving_sglang.forward_names(SimpleNamespace())) <= imported
    theirs = part_of(serving_sglang.FUSION, serving_sglang.NORM).args.args
    ours = inspect.signature(sglang.norm_hook(None)).parameters
    assert [each.arg for each in theirs] == list(ours)[1:]
    group = part_of(serving_sglang.FUSION, "resolve_fusion_group").args
    assert ast.unparse(group) == "*, use_attn_tp_group: bool"
    # Deterministic inference names no backend of the fusion, without which SGLang does not call the function.
    decides = "_deterministic_allreduce_fusion_disable"
    view = {"flashinfer_allreduce_fusion_backend": "auto", "enable_deterministic_inference": 1}
    sizes = "_max_tokens_per_scattered_source"
    overrides = f"sglang.srt.arg_groups.overrides {decides}"
    names = execute({}, overrides, f"{DISPATCHER}.flashinfer {sizes}")
    assert names[decides](SimpleNamespace(**view)) == {"flashinfer_allreduce_fusion_backend": None}
    assert names[sizes]([5, 2], 2) == 3
