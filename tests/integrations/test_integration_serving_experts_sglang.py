"""The plug-in of SGLang around experts: `moe` where ranks have different tokens, SGLang's own code elsewhere.

As in test_integration_serving.py, classes stand in for SGLang's, and its own are taken out of its wheel.
"""

import contextlib
import functools
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_integration_serving import (
    Group,
    SglangExperts,
    Unquantized,
    installed,
    module,
    sglang_modules,
    source_of,
    wheel,
)
from torch import nn
from torch.nn import functional

from checks import Failures, message_of
from mixtures import ACTIVATIONS, CHOICES, INNER, H, Mixture, limits_of_calls, near, warned
from overlap_torch.integrations import _serving, _sglang_experts, sglang


def named(name: str) -> Any:
    return type(name, (), {})()


# Cases change these: a layer's dispatcher and its inner ones, then members of the layer, of its configuration and of SGLang's context.
SGLANGS_LAYER = {
    "dispatcher": "DeepEPDispatcher",
    "inners": 1,
    "runner": "deep_gemm",
    "method": SglangExperts,
    "with_bias": False,
    "num_fused_shared_experts": 0,
    "reduce_results": False,
    "_dwdp_bound": False,
    "moe_ep_size": None,
}
SGLANGS_CONFIG = {
    "activation": "silu",
    "is_gated": True,
    "gemm1_alpha": None,
    "gemm1_clamp_limit": None,
    "swiglu_limit": None,
    "apply_router_weight_on_input": False,
    "no_combine": False,
    "routed_scaling_factor": None,
}


def changed(defaults: dict[str, Any], changes: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(**{key: changes.get(key, value) for key, value in defaults.items()})


def sglang_context(changes: dict[str, Any], numbers: list[int] | None, prefill: bool):
    """SGLang's two modules: of data parallel attention without tensor parallelism, unless changed."""
    parallel = {"attn_dp_size": dist.get_world_size(), "attn_tp_size": 1, "moe_ep_group": Group()}
    experts = {"enable_eplb": False, "elastic_ep_backend": None}
    execution = SimpleNamespace(
        moe=changed(experts, changes),
        deterministic=changed({"enable_deterministic_inference": False}, changes),
    )
    flags = SimpleNamespace(moe=changed({"tbo_enabled": False, "sbo_enabled": False}, changes))
    context = SimpleNamespace(
        get_parallel=lambda: changed(parallel, changes),
        get_exec=lambda: execution,
        get_flags=lambda: flags,
    )
    attention = SimpleNamespace(
        get_dp_global_num_tokens=lambda: numbers, get_is_extend_in_batch=lambda: prefill
    )
    return context, attention


def fill(layer: Any, mixture: Mixture, changes: dict[str, Any]) -> Any:
    """The layer with the attributes of SGLang's FusedMoE, and this rank's experts."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    own = mixture.experts // ranks
    vars(layer).update(vars(changed(SGLANGS_LAYER, changes)))
    inners = [named(layer.dispatcher) for _ in range(layer.inners)]
    deep = layer.dispatcher == "DeepEPDispatcher"
    layer.dispatcher = SimpleNamespace(_inners=inners) if deep else inners[0]
    layer.moe_ep_size, layer.moe_ep_rank = layer.moe_ep_size or ranks, rank
    layer.moe_tp_size, layer.layer_id, layer.top_k = 1, 7, CHOICES
    layer.hidden_size, layer.intermediate_size_per_partition = H, INNER
    layer.num_local_experts = own
    layer.runner_backend = SimpleNamespace(value=layer.runner)
    layer.quant_method = layer.method()
    layer.moe_runner_config = changed(SGLANGS_CONFIG, changes)
    part = mixture.part(rank * own, own)
    layer.w13_weight, layer.w2_weight = part.w13_weight, part.w2_weight
    return layer


def routed(ids: torch.Tensor, shares: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(topk_ids=ids, topk_weights=shares, router_logits=None)


def sglangs_own(layer, hidden_states, topk_output, *others):
    return "SGLang's own"


@pytest.mark.ranks((2, "gloo"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_sglangs_experts_exchange_tokens(failures: Failures, dtype: torch.dtype) -> None:
    """Decoding has limits, prefill has none; scaling factors are where SGLang has them."""
    flashinfer = {"dispatcher": "FlashinferDispatcher", "routed_scaling_factor": 2.5}
    cases = [
        ({}, [4, 3], [4, 3], False, 1.0, (4, 21)),
        ({}, [4, 3], [4, 4], False, 1.0, (4, 24)),
        ({}, [5, 0], [5, 0], False, 1.0, (5, 15)),
        ({}, [4, 3], [4, 3], True, 1.0, (None, None)),
        ({"runner": "triton"}, [4, 3], [4, 3], False, 1.0, (4, 21)),
        ({"swiglu_limit": 0.4}, [4, 3], [4, 3], False, 1.0, (4, 21)),
        ({"routed_scaling_factor": 2.5}, [4, 3], [4, 3], False, 1.0, (4, 21)),
        (flashinfer, [4, 3], [4, 3], False, 2.5, (4, 21)),
        (flashinfer | {"routed_scaling_factor": None}, [4, 3], [4, 3], True, 1.0, (None, None)),
        ({}, [4, 3], [7], False, 1.0, None),
    ]
    for changes, numbers, known, prefill, factor, limits in cases:
        where = (changes, numbers, known, prefill)
        mixture = Mixture(dtype, 2 * INNER, 6)
        x, ids, shares = mixture.tokens(numbers, CHOICES)
        layer = fill(SimpleNamespace(), mixture, changes)
        hook = _sglang_experts.experts_hook(*sglang_context(changes, known, prefill), SglangExperts)
        with limits_of_calls() as called, torch.inference_mode():
            found, said = warned(lambda: hook(sglangs_own, layer, x, routed(ids, shares)))  # noqa: B023
        if limits is None:
            failures.equal((found, called), ("SGLang's own", []), *where)
            knows = "ranks do not know the numbers of each other's tokens" in "".join(said)
            failures.expect(None if knows else str(said), *where)
            continue
        failures.equal((called, said), ([limits], []), *where)
        name = "silu of limited numbers" if "swiglu_limit" in changes else "silu"
        right = mixture.meaning(x, ids, shares * factor, ACTIVATIONS[name][1])
        near(failures, found, right, dtype, *where)


def test_sglangs_tokens_are_divided_in_an_attentions_group(monkeypatch):
    """Four ranks: two batches, each in two parts. A rank's part is as large as the first one's."""
    monkeypatch.setattr(_serving, "say", mock.Mock())
    run = mock.Mock()
    monkeypatch.setattr(_serving, "run_experts", run)
    parallel = SimpleNamespace(attn_dp_size=2, attn_tp_size=2)
    context = SimpleNamespace(get_parallel=lambda: parallel)
    attention = SimpleNamespace(
        get_dp_global_num_tokens=lambda: [5, 2], get_is_extend_in_batch=lambda: False
    )
    config = SimpleNamespace(routed_scaling_factor=None)
    layer = SimpleNamespace(_overlap_experts={"group": "ep"}, moe_runner_config=config)
    given = routed(torch.zeros(3, CHOICES, dtype=torch.int32), torch.ones(3, CHOICES))
    _sglang_experts.experts_hook(context, attention, SglangExperts)(
        None, layer, torch.zeros(3, H), given, None
    )
    assert run.call_args.kwargs == {
        "group": "ep",
        "max_tokens": 3,
        "max_rows": (3 + 3 + 1 + 1) * CHOICES,
    }


SGLANGS_OWN = [
    ({"moe_ep_size": 1}, "--ep-size"),
    ({"dispatcher": "StandardDispatcher"}, "with none all ranks get the same tokens"),
    ({"attn_dp_size": 1, "attn_tp_size": 2}, "--enable-dp-attention"),
    ({"attn_dp_size": 2, "attn_tp_size": 2}, "--enable-dp-attention"),
    ({"inners": 2}, "--enable-two-batch-overlap"),
    ({"tbo_enabled": True}, "--enable-two-batch-overlap"),
    ({"sbo_enabled": True}, "--enable-single-batch-overlap"),
    ({"enable_eplb": True}, "--enable-eplb"),
    ({"elastic_ep_backend": "nixl"}, "elastic"),
    ({"enable_deterministic_inference": True}, "deterministic inference"),
    ({"method": Unquantized}, "quantized (Unquantized)"),
    ({"runner": "flashinfer_cutlass"}, "the runner flashinfer_cutlass may have weights"),
    ({"activation": "gelu"}, "the activation gelu"),
    ({"is_gated": False}, "without a gate"),
    ({"gemm1_alpha": 1.702}, "SwiGLU-OAI"),
    ({"gemm1_clamp_limit": 7.0}, "SwiGLU-OAI"),
    ({"with_bias": True}, "biases"),
    ({"num_fused_shared_experts": 1}, "shared experts among the experts"),
    ({"apply_router_weight_on_input": True}, "shares on the input"),
    ({"no_combine": True}, "results that SGLang adds itself"),
    ({"reduce_results": True}, "results that SGLang adds itself"),
    ({"_dwdp_bound": True}, "prefetched weights"),
]


@pytest.mark.ranks((2, "gloo"))
def test_sglangs_experts_say_once_why_they_are_sglangs(failures: Failures) -> None:
    mixture = Mixture(torch.float32, 2 * INNER, 6)
    x, ids, shares = mixture.tokens([2, 2], CHOICES)
    for changes, why in SGLANGS_OWN:
        hook = _sglang_experts.experts_hook(*sglang_context(changes, [2, 2], False), SglangExperts)
        layers = [fill(SimpleNamespace(), mixture, changes) for _ in range(2)]
        found, said = warned(
            lambda: {hook(sglangs_own, layer, x, routed(ids, shares)) for layer in layers}  # noqa: B023
        )
        failures.equal(found, {"SGLang's own"}, changes)
        text = "OVERLAP_SGLANG=1: SGLang's own experts run, without overlap_torch.moe: "
        failures.equal(
            [why in line and line.startswith(text) for line in said], [True], changes, *said
        )


@pytest.mark.ranks((2, "gloo"))
def test_sglangs_experts_refuse_other_tokens(failures: Failures) -> None:
    mixture = Mixture(torch.float32, 2 * INNER, 6)
    x, ids, shares = mixture.tokens([2, 2], CHOICES)
    hook = _sglang_experts.experts_hook(*sglang_context({}, [2, 2], False), SglangExperts)
    layer = fill(SimpleNamespace(), mixture, {})
    for given in ((SimpleNamespace(router_logits=x),), (routed(ids, shares), (x, x))):
        said = message_of(lambda: hook(sglangs_own, layer, x, *given))  # noqa: B023
        failures.holds("the experts of layer 7 got a SimpleNamespace, or quantized", said, given)
    layer = fill(SimpleNamespace(), mixture, {})
    layer.moe_ep_rank = 1 - layer.moe_ep_rank
    said = message_of(lambda: hook(sglangs_own, layer, x, routed(ids, shares)))
    failures.holds("SGLang's group of experts has this process as rank", said, "group")


# --- SGLang's own classes, from its wheel ---------------------------------------------------------------------

MOE = "sglang/srt/layers/moe"
NATIVE = "fused_moe_forward_native"  # SGLang's experts in PyTorch's operators, on one rank
OWN = {
    "sglang.srt.layers.moe.fused_moe_triton.layer": ["FusedMoE"],
    "sglang.srt.layers.moe.ep_moe.layer": ["DeepEPMoE"],
    "sglang.srt.layers.moe.topk": ["StandardTopKOutput"],
    "sglang.srt.layers.moe.fused_moe_native": [NATIVE],
}


def own_names() -> dict[str, Any]:
    """The names that SGLang's modules have beside their classes."""
    no = {name: lambda: False for name in ("is_in_tc_piecewise_cuda_graph", "_is_hip", "_is_npu")}
    return no | {
        "torch": torch,
        "F": functional,
        "NamedTuple": NamedTuple,
        "cached_property": functools.cached_property,
        "is_in_breakable_cuda_graph": lambda: False,
        "eager_on_graph": lambda *_, **__: lambda function: function,
        "StandardCombineInput": lambda hidden_states: hidden_states,
        "use_symmetric_memory": lambda *_, **__: contextlib.nullcontext(),
        "is_allocation_symmetric": lambda: False,
        "get_parallel": lambda: SimpleNamespace(tp_group=None),
        "get_global_dwdp_manager": mock.Mock(),
        "tensor_model_parallel_all_reduce": mock.Mock(),
    }


class OwnDispatcher:
    """Stands in for SGLang's dispatcher of the layers that are left to it."""

    def __init__(self, name: str) -> None:
        self._inners = [named(name)]

    def dispatch(self, hidden_states, topk_output):
        return SimpleNamespace(hidden_states=hidden_states)

    def combine(self, combine_input):
        return torch.full_like(combine_input.hidden_states, 7)


@contextlib.contextmanager
def sglang_hooked(sources: dict[str, str], hooks: str, context, attention):
    """SGLang's modules with these classes, around which its own registry has put the hooks."""
    made = {name: module(name, **own_names()) for name in sources}
    names: list[str] = []
    for dotted in (*sources, "sglang.srt.layers.quantization.unquant", "sglang.srt.plugins.x"):
        parts = dotted.split(".")
        names += [".".join(parts[:end]) for end in range(1, len(parts))]
    parents = [module(name, __path__=[]) for name in dict.fromkeys(names) if name not in made]
    registry = module("sglang.srt.plugins.hook_registry")
    others = [registry, module("sglang.srt.layers.linear"), *sglang_modules(context, attention)]
    for name, source in sources.items():
        if "DeepEPMoE" in source:
            vars(made[name])["FusedMoE"] = made[next(iter(sources))].FusedMoE
        exec(source, vars(made[name]))
    every = {each.__name__: each for each in (*parents, *made.values(), *others)}
    for name, each in every.items():
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(every[parent], own, each)
    with (
        installed("0.5.23", *every.values()),
        mock.patch.object(sglang, "_enabled", False),
    ):
        exec(hooks, vars(registry))
        registry.logger = mock.Mock()  # of targets that these modules do not have
        sglang.enable()
        registry.HookRegistry.apply_hooks()
        yield every


def check_sglangs_own(failures: Failures, sources, hooks: str, dtype: torch.dtype) -> None:
    """Both classes' `forward` leads to `moe`, or to SGLang's dispatcher; results are those of SGLang's operators."""
    mixture = Mixture(dtype, 2 * INNER, 6)
    x, ids, shares = mixture.tokens([2, 1], CHOICES)
    context, attention = sglang_context({}, [2, 1], False)

    def layer_of(kind: type, changes: dict[str, Any]) -> nn.Module:
        layer = kind.__new__(kind)
        nn.Module.__init__(layer)
        layer._use_ascend_fuseep, layer.deprecate_flag = False, True
        return fill(layer, mixture, changes)

    with sglang_hooked(sources, hooks, context, attention) as modules:
        fused, deep, topk, native = (
            getattr(modules[name], names[0]) for name, names in OWN.items()
        )
        routing = topk(shares, ids, None)
        whole = mixture.part(0, mixture.experts)
        whole.moe_runner_config = changed(SGLANGS_CONFIG, {})
        whole.w13_weight, whole.w2_weight = whole.w13_weight.float(), whole.w2_weight.float()
        right = native(whole, SimpleNamespace(hidden_states=x.float(), topk_output=routing))
        for kind, dispatcher in ((fused, "FlashinferDispatcher"), (deep, "DeepEPDispatcher")):
            layer = layer_of(kind, {"dispatcher": dispatcher})
            with limits_of_calls() as called:
                found, said = warned(lambda: layer(x, routing))  # noqa: B023
            failures.equal((called, said), ([(2, 9)], []), dispatcher)
            near(failures, found, right.double(), dtype, dispatcher)
            layer = layer_of(kind, {"dispatcher": dispatcher, "with_bias": True})
            layer.dispatcher = OwnDispatcher(dispatcher)
            layer.quant_method.apply = lambda layer, dispatch_output: dispatch_output
            found, said = warned(lambda: layer(x, routing))  # noqa: B023
            failures.equal(found.unique().tolist(), [7.0], dispatcher)
            failures.equal(["biases" in line for line in said], [True], *said)


@pytest.mark.long
@pytest.mark.ranks((2, "gloo"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_sglangs_own_experts_exchange_tokens(ranks, dtype):
    with wheel("sglang") as archive:
        sources = {
            name: "\n".join(
                source_of(archive, f"{name.replace('.', '/')}.py", each) for each in classes
            )
            for name, classes in OWN.items()
        }
        hooks = archive.read("sglang/srt/plugins/hook_registry.py").decode()
    ranks.expect_no_failures(check_sglangs_own, sources, hooks, dtype)


@pytest.mark.long
def test_sglangs_code_is_as_the_plugin_takes_it():
    with wheel("sglang") as archive:
        read = {
            name: archive.read(f"sglang/srt/{name}.py").decode()
            for name in (
                "layers/dp_attention",
                "layers/moe/fused_moe_triton/layer",
                "layers/moe/token_dispatcher/deepep",
                "layers/moe/token_dispatcher/flashinfer",
                "runtime_context",
            )
        }
        tbo = source_of(
            archive, "sglang/srt/batch_overlap/two_batch_overlap.py", "MaybeTboDeepEPDispatcher"
        )
        runner = f"{MOE}/moe_runner/deep_gemm.py"
        of_all = source_of(archive, runner, "post_permute_deep_gemm_to_standard")
        of_flashinfer = source_of(archive, runner, "post_permute_deep_gemm_to_flashinfer")
        of_deepep = [
            source_of(archive, runner, f"post_permute_deep_gemm_to_deepep_{mode}")
            for mode in ("ll", "normal")
        ]
        sizes: dict[str, Any] = {}
        flashinfer = f"{MOE}/token_dispatcher/flashinfer.py"
        exec(source_of(archive, flashinfer, "_max_tokens_per_scattered_source"), sizes)
    assert "self._inners = [" in tbo
    assert "class DeepEPDispatcher(BaseDispatcher):" in read["layers/moe/token_dispatcher/deepep"]
    assert "class FlashinferDispatcher(" in read["layers/moe/token_dispatcher/flashinfer"]
    for name in ("get_dp_global_num_tokens", "get_is_extend_in_batch"):
        assert f"def {name}()" in read["layers/dp_attention"]
    for name in ("get_parallel", "get_exec", "get_flags"):
        assert f"def {name}()" in read["runtime_context"]
    layer = "quant_method runner_backend moe_ep_size moe_ep_rank num_fused_shared_experts with_bias _dwdp_bound reduce_results"
    for name in (*layer.split(), "top_k", "hidden_size", "layer_id", "num_local_experts"):
        assert f"self.{name} = " in read["layers/moe/fused_moe_triton/layer"], name
    # The factor is in the results of this dispatcher, and not in those of the other.
    assert "post_permute_deep_gemm_to_standard(" in of_flashinfer
    assert "runner_config.routed_scaling_factor" in of_all
    assert not any("routed_scaling_factor" in source for source in of_deepep)
    assert sizes["_max_tokens_per_scattered_source"]([5, 2], 2) == 3
