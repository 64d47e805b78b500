"""Modules that stand in for vLLM's, with classes like its own or out of its wheel."""

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import serving
from mixtures import CHOICES, H, Make, Mixture
from overlap_torch.integrations import _vllm_experts, vllm
from serving import LAYERS, Group, StandIn, Unquantized, changed
from wheels import execute

VERSION = "0.33.0"
EXPERTS = 5  # one rank of two has three experts, the other two


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
        output = self.term(input_)
        if self.reduce_results and self.tp_size > 1:
            output = Group().all_reduce(output)
        return (output, self.left) if self.return_bias else output


class PassManager:
    """Stands in for vLLM's PostGradPassManager."""

    def __init__(self) -> None:
        self.passes: list[Any] = []

    def configure(self, config: Any) -> None:
        self.passes.append(config)


def own_linear() -> type:
    """vLLM's RowParallelLinear, LinearBase and PluggableLayer."""
    group = Group()
    names = serving.linear_names(group) | {
        "op_registry": {},
        "op_registry_oot": Pluggable.registry,
        "UnquantizedLinearMethod": Unquantized,
        "BasevLLMParameter": type("NoParameter", (), {}),
        "resolve_quant_method": lambda config, layer, prefix: serving.Quantized(),
        "get_tensor_model_parallel_rank": lambda: group.rank_in_group,
        "get_tensor_model_parallel_world_size": lambda: group.world_size,
    }
    folder = "vllm.model_executor"
    linear = f"{folder}.layers.linear LinearBase RowParallelLinear"
    execute(names, f"{folder}.custom_op PluggableLayer", linear)
    return names["RowParallelLinear"]


@contextlib.contextmanager
def vllm_installed(
    base: type = VllmLinear,
    experts: type = VllmExperts,
    group: Callable[[], Any] = Group,
    metadata: Any = None,
) -> Iterator[dict[str, ModuleType]]:
    """The modules that the plug-in imports, before it is enabled; ``metadata`` has the numbers of the ranks' tokens."""
    aiter = mock.MagicMock(**{"is_fused_moe_enabled.return_value": False})
    config = SimpleNamespace(use_ubatching=False, enable_elastic_ep=False)
    members: dict[str, dict[str, Any]] = {
        "vllm.model_executor.layers.linear": {
            "RowParallelLinear": base,
            "UnquantizedLinearMethod": Unquantized,
        },
        "vllm.model_executor.layers.quantization.online.fp8": {
            "OnlineLinearBase": type("OnlineLinearBase", (), {})
        },
        "vllm.model_executor.custom_op": {"op_registry_oot": Pluggable.registry},
        "vllm.distributed": {"get_tp_group": Group, "get_ep_group": group},
        "vllm.distributed.parallel_state": {"_groups": {"tp:0": Group}},
        "vllm.config": {"get_current_vllm_config": lambda: SimpleNamespace(parallel_config=config)},
        "vllm.forward_context": {"get_forward_context": lambda: metadata},
        _vllm_experts.MODULE: {"UnquantizedFusedMoEMethod": experts},
        "vllm._aiter_ops": {"rocm_aiter_ops": aiter},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False, "environment_variables": {}},
        "vllm.compilation.passes.pass_manager": {
            "PostGradPassManager": type("Manager", (PassManager,), {})
        },
        "vllm.compilation.passes.inductor_pass": {"InductorPass": object},
    }
    with (
        serving.installed(VERSION, members) as modules,
        mock.patch.object(vllm, "_enabled", None),
        mock.patch.dict(Pluggable.registry),
    ):
        yield modules


INVARIANT, SCATTERED = "envs.VLLM_BATCH_INVARIANT", {}  # no layer scatters its sum
LAYER_CASES = [*LAYERS, ({"return_bias": False}, {}, "sum", True)]


@contextlib.contextmanager
def layers(failures, own: bool) -> Iterator[tuple[Any, ...]]:
    """vLLM's class of row-parallel layers, or a stand-in, its forward without the plug-in and with it, and vLLM's settings."""
    base, registry = own_linear() if own else VllmLinear, Pluggable.registry
    with vllm_installed(base) as modules:
        right = {base.__name__, "VllmExperts"}
        serving.plug_in(failures, "vllm", lambda: set(registry), right)
        ours = registry[base.__name__]
        failures.equal(type(base(8, 6)), ours, "made in its place")
        failures.holds(base, ours.__mro__, "class")
        yield base, base.forward, ours.forward, modules["vllm"]


# --- experts --------------------------------------------------------------------------------------------------


def moe_config(changes: dict[str, Any]) -> SimpleNamespace:
    """As a FusedMoEConfig of data parallel ranks with expert parallelism; ``changes`` of both of its parts."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    parallel = {"use_ep": True, "dp_size": ranks, "pcp_size": 1, "ep_size": ranks, "ep_rank": rank}
    parallel |= {"is_sequence_parallel": False, "all2all_backend": "allgather_reducescatter"}
    local = EXPERTS // ranks + (rank < EXPERTS % ranks)
    moe = {"num_experts": EXPERTS, "num_local_experts": local, "experts_per_token": CHOICES}
    moe |= {"hidden_dim": H, "in_dtype": torch.float32, "device": "cpu", "backend": "TRITON"}
    moe |= dict.fromkeys(("swiglu_limit", "swiglu_alpha", "swiglu_beta"))
    moe |= {"has_bias": False, "is_lora_enabled": False, "max_capture_size": 0}
    made = changed(moe, changes)
    name = changes.get("activation", "silu")
    made.activation = SimpleNamespace(value=name, is_gated=not name.endswith("_no_mul"))
    made.moe_parallel_config = changed(parallel, changes)
    return made


@contextlib.contextmanager
def experts(changes: dict[str, Any], numbers: list[int]) -> Iterator[Make]:
    """vLLM's experts with the plug-in; ``numbers`` are those of the ranks' tokens, as vLLM exchanges them."""

    def make(mixture: Mixture) -> Callable[..., Any]:
        method = VllmExperts(moe_config(changes))
        begin, end = ((0, 3), (3, EXPERTS))[dist.get_rank()]
        layer = mixture.part(begin, end - begin)
        layer.apply_router_weight_on_input = changes.get("apply_router_weight_on_input", False)
        return lambda x, ids, shares: method.apply(layer, x, shares, ids, "shared", None)

    sizes = SimpleNamespace(get_chunk_sizes_across_dp_rank=lambda: numbers)
    group = changes.get("group", Group)
    with vllm_installed(group=group, metadata=SimpleNamespace(dp_metadata=sizes)) as modules:
        config = modules["vllm.config"].get_current_vllm_config().parallel_config
        for place in (config, modules["vllm.envs"]):
            vars(place).update({key: changes[key] for key in changes if key in vars(place)})
        vllm.enable()
        yield make
