"""The plug-ins of vLLM and SGLang around the frameworks' own experts, out of their wheels."""

import contextlib
import dataclasses
import enum
import functools
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import serving_sglang
import serving_vllm
from checks import Failures
from mixtures import ACTIVATIONS, CHOICES, INNER, H, Make, Mixture, check_exchange, check_left
from overlap_torch.integrations import sglang, vllm
from serving import changed
from serving_vllm import Pluggable
from wheels import execute, own_code_of

# --- vLLM's classes -------------------------------------------------------------------------------------------

FOLDER = "vllm.model_executor"
MOE = f"{FOLDER}.layers.fused_moe"
# Modules, and those of their names that are run, in this order.
VLLMS = (
    f"{FOLDER}.custom_op CustomOp",
    f"{FOLDER}.layers.quantization.base_config QuantizeMethodBase",
    f"{MOE}.fused_moe_method_base FusedMoEMethodBase",
    f"{MOE}.activation MoEActivation",
    f"{MOE}.config FusedMoEParallelConfig FusedMoEConfig",
    f"{MOE}.oracle.unquantized UnquantizedMoeBackend convert_to_unquantized_kernel_format",
    f"{MOE}.unquantized_fused_moe_method UnquantizedFusedMoEMethod",
    f"{MOE}.expert_map_manager determine_expert_map determine_expert_placement_strategy",
    f"{MOE}.routed_experts RoutedExperts.forward_modular",
    "vllm.forward_context _compute_sp_num_tokens DPMetadata",
)
# The class of an activation, which computes it without vLLM's kernels, and the numbers that it reads.
CLAMPS = "SiluAndMulWithClamp"
VLLMS_ACTIVATIONS = {
    "silu": ("SiluAndMul", {}),
    "silu of limited numbers": (CLAMPS, {"swiglu_limit": 0.4, "alpha": 1.0, "beta": 0.0}),
    "swigluoai": ("SwigluOAIAndMul", {"alpha": 1.702, "limit": 7.0}),
    "swigluoai_uninterleave": (CLAMPS, {"swiglu_limit": 0.3, "alpha": 1.5, "beta": 0.5}),
}
PLATFORMS = ("is_rocm", "is_xpu", "is_cpu", "is_tpu", "is_out_of_tree", "is_cuda_alike")


class OwnKernel:
    """Stands in for the FusedMoEKernel that vLLM makes."""

    is_monolithic = can_overlap_shared_experts = False
    fused_experts = SimpleNamespace(process_weights_after_loading=lambda layer: None)

    def apply(self, **arguments: Any) -> str:
        return "vLLM's own"


def vllms_names(tensor_ranks: int) -> dict[str, Any]:
    """vLLM's classes and the names beside them, of a process among data parallel groups of `ranks` ranks."""
    place = divmod(dist.get_rank(), tensor_ranks)
    compiled = SimpleNamespace(enabled_custom_ops=set(), disabled_custom_ops=set())
    compiled.custom_ops = ["all"]
    rocm = dict.fromkeys(("VLLM_ROCM_MOE_PADDING", "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4"), False)
    names: dict[str, Any] = {
        "__name__": __name__,
        "ABC": object,
        "abstractmethod": lambda function: function,
        "Enum": enum.Enum,
        "field": dataclasses.field,
        "contextmanager": contextlib.contextmanager,
        "op_registry": {},
        "op_registry_oot": Pluggable.registry,
        "envs": SimpleNamespace(**rocm),
        "current_platform": SimpleNamespace(**{name: lambda: False for name in PLATFORMS}),
        "get_cached_compilation_config": lambda: compiled,
        "SchedulerConfig": SimpleNamespace(DEFAULT_MAX_NUM_BATCHED_TOKENS_FOR_BATCHED_DP=256),
        "get_tensor_model_parallel_rank": lambda: place[1],
        "get_dp_group": lambda: SimpleNamespace(rank_in_group=place[0]),
        "get_pcp_group": lambda: SimpleNamespace(rank_in_group=0),
        "set_weight_attrs": lambda *arguments: None,
        "replace_parameter": lambda layer, name, new: getattr(layer, name).data.copy_(new),
        "is_weights_pre_processed": lambda: False,
        "FusedMoEQuantConfig": SimpleNamespace(make=mock.Mock()),
        "biased_moe_quant_config": mock.Mock(),
        "make_unquantized_moe_kernel": lambda **arguments: OwnKernel(),
    }
    execute(names, *VLLMS)
    for name in ("FusedMoEParallelConfig", "FusedMoEConfig", "DPMetadata"):
        names[name] = dataclasses.dataclass(names[name])
    names["UnquantizedFusedMoEMethod"].name = "unquantized_fused_moe"
    chosen = (names["UnquantizedMoeBackend"].TRITON, SimpleNamespace(is_monolithic=lambda: False))
    names["select_unquantized_moe_backend"] = lambda moe_config: chosen
    return names


def vllms_config(
    names: dict[str, Any], activation: str, tp: int, dp: int, sp: int, expert_parallel: bool = True
) -> Any:
    whole = SimpleNamespace(enable_expert_parallel=expert_parallel, enable_eplb=False)
    whole.all2all_backend = "allgather_reducescatter"
    parallel = names["FusedMoEParallelConfig"].make(
        tp_size_=tp, pcp_size_=1, dp_size_=dp, sp_size_=sp, vllm_parallel_config=whole
    )
    experts, activate = serving_vllm.EXPERTS, names["MoEActivation"](activation.partition(" ")[0])
    own, *_ = names["determine_expert_map"](parallel.ep_size, parallel.ep_rank, experts)
    numbers = {"num_experts": experts, "num_logical_experts": experts, "num_local_experts": own}
    numbers |= {"experts_per_token": CHOICES, "hidden_dim": H, "max_capture_size": 3}
    numbers |= {"intermediate_size": parallel.tp_size * INNER, "moe_parallel_config": parallel}
    numbers |= {"activation": activate, "has_bias": activation == "swigluoai", "device": "cpu"}
    numbers |= {"routing_method": None, "in_dtype": torch.float32}
    return names["FusedMoEConfig"](**numbers, **ACTIVATIONS[activation][0])


def vllms_layer(names: dict[str, Any], config: Any, mixture: Mixture) -> Any:
    """A layer with vLLM's method, whose weights vLLM makes, and processes after they are loaded; returns its forward."""
    parallel = config.moe_parallel_config
    method = names["UnquantizedFusedMoEMethod"](config)
    layer = nn.Module()
    layer.quant_method, layer.moe_config, layer.activation = method, config, config.activation
    layer.apply_router_weight_on_input, layer.expert_map = False, None
    layer.global_num_experts, layer._expert_routing_tables = config.num_experts, lambda: None
    width = config.intermediate_size_per_partition
    method.create_weights(layer, config.num_local_experts, H, width, mixture.dtype)
    own, placed, _ = names["determine_expert_map"](
        parallel.ep_size, parallel.ep_rank, config.num_experts
    )
    held = range(own) if placed is None else (placed >= 0).nonzero()[:, 0].tolist()
    for name, value in vars(mixture.part(held[0], own)).items():
        if name in dict(layer.named_parameters()):
            getattr(layer, name).data.copy_(value)
    method.process_weights_after_loading(layer)
    return lambda x, ids, shares: names["forward_modular"](layer, x, shares, ids)


def vllms_activation(activation: str) -> Any:
    kind, numbers = VLLMS_ACTIVATIONS[activation]
    names = execute({}, f"{FOLDER}.layers.activation {kind}.forward_native")
    forward = names["forward_native"]
    return functools.partial(forward, SimpleNamespace(**numbers)) if numbers else forward


@pytest.mark.ranks((2, "gloo"), (4, "gloo"))
@pytest.mark.parametrize("activation", [own_code_of("vllm", each) for each in VLLMS_ACTIVATIONS])
def test_vllms_own_experts_exchange_tokens(failures: Failures, activation: str) -> None:
    """Two data parallel groups, in which tokens are divided; then configurations that are left to vLLM."""
    ranks = dist.get_world_size()
    tensor_ranks, replicas = ranks // 2, 2
    names, context = vllms_names(tensor_ranks), SimpleNamespace(dp_metadata=None)
    config_of = functools.partial(vllms_config, names, activation)
    mixture = Mixture(torch.float32, 2 * INNER, serving_vllm.EXPERTS)
    own = names["UnquantizedFusedMoEMethod"]

    def make(config: Any) -> Make:
        return functools.partial(vllms_layer, names, config)

    with serving_vllm.vllm_installed(experts=own, metadata=context):
        vllm.enable()
        context.dp_metadata = names["DPMetadata"](torch.tensor([5, 4], dtype=torch.int32))
        with context.dp_metadata.sp_local_sizes(tensor_ranks, 1, True) as numbers:
            tokens = x, ids, shares = mixture.tokens(numbers, CHOICES)
            limits = (3, sum(numbers) * CHOICES) if max(numbers) <= 3 else (None, None)
            config = config_of(tensor_ranks, replicas, tensor_ranks)
            failures.equal(type(own(config)).__mro__[1], own, "made")
            act = vllms_activation(activation)
            right = mixture.meaning(x, ids, shares, act, biased=config.has_bias)
            check_exchange(failures, make(config), mixture, tokens, limits, right, activation)
        left = [
            (ranks, 1, 1, True, "without data parallelism"),
            (tensor_ranks, replicas, 1, False, "--enable-expert-parallel"),
            *([(2, 2, 1, True, "does not divide tokens")] if tensor_ranks == 2 else []),
        ]
        for *sizes, why in left:
            check_left(failures, make(config_of(*sizes)), mixture, tokens, "vllm", why, *sizes)


# --- SGLang's classes -----------------------------------------------------------------------------------------

# Modules, and the class or function of each; the last one is experts in PyTorch's operators, on one rank.
SGLANGS = {
    "sglang.srt.layers.moe.fused_moe_triton.layer": "FusedMoE",
    "sglang.srt.layers.moe.ep_moe.layer": "DeepEPMoE",
    "sglang.srt.layers.moe.topk": "StandardTopKOutput",
    "sglang.srt.layers.moe.fused_moe_native": "fused_moe_forward_native",
}


def sglangs_names() -> dict[str, Any]:
    """SGLang's classes and the names beside them."""
    no = ("is_in_tc_piecewise_cuda_graph", "is_in_breakable_cuda_graph", "_is_hip", "_is_npu")
    names: dict[str, Any] = dict.fromkeys((*no, "is_allocation_symmetric"), lambda: False)
    names |= {
        "NamedTuple": NamedTuple,
        "cached_property": functools.cached_property,
        "eager_on_graph": lambda *_, **__: lambda function: function,
        "StandardCombineInput": lambda hidden_states: hidden_states,
        "use_symmetric_memory": lambda *_, **__: contextlib.nullcontext(),
        "get_parallel": lambda: SimpleNamespace(tp_group=None),
        "get_global_dwdp_manager": mock.Mock(),
        "tensor_model_parallel_all_reduce": mock.Mock(),
    }
    return execute(names, *(f"{module} {name}" for module, name in SGLANGS.items()))


class OwnDispatcher:
    """Stands in for SGLang's dispatcher of the layers that are left to it."""

    def __init__(self, name: str) -> None:
        self._inners = [serving_sglang.named(name)]

    def dispatch(self, hidden_states, topk_output):
        return SimpleNamespace(hidden_states=hidden_states)

    def combine(self, combine_input):
        return torch.full_like(combine_input.hidden_states, 7)


def sglangs_layer(kind: type, topk: type, dispatcher: str, biased: bool, mixture: Mixture) -> Any:
    """The call of a layer, which is left to SGLang's dispatcher if it has biases."""
    layer = kind.__new__(kind)
    nn.Module.__init__(layer)
    layer._use_ascend_fuseep, layer.deprecate_flag = False, True
    serving_sglang.fill(layer, mixture, {"dispatcher": dispatcher, "with_bias": biased})
    if not biased:
        return lambda x, ids, shares: layer(x, topk(shares, ids, None))
    layer.dispatcher = OwnDispatcher(dispatcher)
    layer.quant_method.apply = lambda layer, dispatch_output: dispatch_output

    def call(x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> str:
        found = layer(x, topk(shares, ids, None)).unique().tolist()
        return "SGLang's own" if found == [7.0] else str(found)

    return call


@pytest.mark.ranks((2, "gloo"))
@pytest.mark.parametrize(
    "dtype", [own_code_of("sglang", each) for each in (torch.float32, torch.bfloat16)], ids=str
)
def test_sglangs_own_experts_exchange_tokens(failures: Failures, dtype: torch.dtype) -> None:
    """Both classes' `forward` leads to `moe`, or to SGLang's dispatcher; results are those of SGLang's operators."""
    mixture = Mixture(dtype, 2 * INNER, serving_sglang.EXPERTS)
    tokens = x, ids, shares = mixture.tokens([2, 1], CHOICES)
    names = sglangs_names()
    fused, deep, topk, native = (names[name] for name in SGLANGS.values())
    whole = mixture.part(0, mixture.experts)
    whole.moe_runner_config = changed(serving_sglang.CONFIG, {})
    whole.w13_weight, whole.w2_weight = whole.w13_weight.float(), whole.w2_weight.float()
    dispatched = SimpleNamespace(hidden_states=x.float(), topk_output=topk(shares, ids, None))
    right = native(whole, dispatched).double()
    members = {module: {name: names[name]} for module, name in SGLANGS.items()}
    members[serving_sglang.LINEAR] = {}
    context = serving_sglang.context_of({}, [2, 1])
    with serving_sglang.sglang_installed(True, members, *context) as modules:
        sglang.enable()
        modules[serving_sglang.REGISTRY].HookRegistry.apply_hooks()
        for kind, dispatcher in ((fused, "FlashinferDispatcher"), (deep, "DeepEPDispatcher")):
            run, left = (
                functools.partial(sglangs_layer, kind, topk, dispatcher, biased)
                for biased in (False, True)
            )
            check_exchange(failures, run, mixture, tokens, (2, 9), right, dispatcher)
            check_left(failures, left, mixture, tokens, "sglang", "biases", dispatcher)
