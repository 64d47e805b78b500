"""Modules that stand in for SGLang's, with classes like its own or out of its wheel."""

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import serving
from layers import my_part
from mixtures import CHOICES, INNER, H, Make, Mixture
from overlap_torch.integrations import _sglang_experts, sglang
from serving import LAYERS, QUANTIZED, Group, StandIn, Unquantized, changed
from wheels import execute, text_of

VERSION = "0.5.23"
EXPERTS = 6
LINEAR, REGISTRY = "sglang.srt.layers.linear", "sglang.srt.plugins.hook_registry"
FUSION, _, NORM = sglang.NORM_TARGET.rpartition(".")


class Hooks:
    """Stands in for SGLang's HookRegistry."""

    _hooks: dict[str, list[Any]] = defaultdict(list)

    @classmethod
    def register(cls, target, hook, hook_type) -> None:
        cls._hooks[target].append((hook_type, hook))


class SglangExperts(nn.Module):
    """Stands in for SGLang's UnquantizedFusedMoEMethod."""


@contextlib.contextmanager
def sglang_installed(
    own: bool, members: dict[str, dict[str, Any]], context: Any = None, attention: Any = None
) -> Iterator[dict[str, ModuleType]]:
    """The modules that the plug-in imports, and these, before it is enabled; the registry of hooks is SGLang's own or a stand-in."""
    Hooks._hooks.clear()
    around = SimpleNamespace(AROUND="around")
    members = (
        {FUSION: {}}
        | members
        | {
            REGISTRY: {} if own else {"HookRegistry": Hooks, "HookType": around},
            "sglang.srt.layers.quantization.unquant": {
                "UnquantizedLinearMethod": Unquantized,
                "UnquantizedFusedMoEMethod": SglangExperts,
            },
            "sglang.srt.runtime_context": vars(context) if context else {},
            "sglang.srt.layers.dp_attention": vars(attention) if attention else {},
        }
    )
    with (
        serving.installed(VERSION, members) as modules,
        mock.patch.object(sglang, "_enabled", False),
    ):
        if own:
            exec(text_of(REGISTRY), vars(modules[REGISTRY]))
            modules[REGISTRY].logger = mock.Mock()  # of targets that these modules do not have
        yield modules


# --- row-parallel layers --------------------------------------------------------------------------------------


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


def forward_names(context: Context) -> dict[str, Any]:
    """The names of SGLang's module of linear layers that its forward calls."""
    return {
        "get_forward": lambda: context.forward,
        "get_exec": lambda: context.execution,
        "get_parallel": lambda: context.parallel,
        "should_skip_mlp_all_reduce": lambda: context.forward.mlp_reduce_scatter,
        "get_group_rank_size": lambda group: (
            (0, 1) if group is None else (group.rank_in_group, group.world_size)
        ),
    }


def group_of(context: Context, name: str | None) -> Group:
    return context.parallel.attn_tp_group if name else context.parallel.tp_group


def scattered(layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """As layernorm_sp.row_parallel_gbar_matmul."""
    x = functional.pad(x, (0, 0, 0, -x.shape[0] % layer.tp_group.world_size))
    output = layer.quant_method.apply(layer, x, bias).as_subclass(torch.Tensor)
    part = my_part(output, 0).clone()
    layer.tp_group.reduce_scatter_tensor(part, output)
    return part


class SglangLinear(StandIn):
    """Stands in for SGLang's RowParallelLinear."""

    context: Context

    def __init__(
        self, *sizes: int, parallel_group=None, use_dp_attention_reduce=False, **given
    ) -> None:
        self.tp_group = group_of(self.context, parallel_group)
        super().__init__((self.tp_group.rank_in_group, self.tp_group.world_size), *sizes, **given)
        self.use_dp_attention_reduce, self.use_decode_attn_tp = use_dp_attention_reduce, False

    def forward(self, input_, skip_all_reduce=False, forward_batch=None, output_tensor=None):
        flags = self.context.forward
        if flags.sp_active and not skip_all_reduce:
            return self.term(input_, scattered), self.left
        output = self.term(input_)
        if self.reduce_results and not (skip_all_reduce or flags.mlp_reduce_scatter):
            output = self.context.parallel.tp_group.all_reduce(output)
        return output, self.left


class OwnBase(nn.Module):
    """The base that SGLang's RowParallelLinear inherits."""

    def __init__(self, input_size, output_size, skip_bias_add, dtype, config, prefix) -> None:
        super().__init__()
        self.input_size, self.output_size = input_size, output_size
        self.skip_bias_add, self.params_dtype = skip_bias_add, dtype
        self.scheme = None
        self.quant_method = config.get_quant_method(self, prefix) if config else Unquantized()


def own_linear(context: Context, names: dict[str, Any]) -> type:
    """SGLang's RowParallelLinear, in the names of its module."""
    names |= serving.linear_names(context.parallel.tp_group) | {
        "Literal": Literal,
        "LinearBase": OwnBase,
        "_resolve_linear_group": lambda name: group_of(context, name),
        "_disable_hip_linear_quant": False,
        "_is_cpu": False,
        "layernorm_sp": SimpleNamespace(row_parallel_gbar_matmul=scattered),
        "use_symmetric_memory": lambda *a, **k: mock.MagicMock(),
        "is_allocation_symmetric": lambda: False,
    }
    return execute(names, f"{LINEAR} RowParallelLinear")["RowParallelLinear"]


def batch(decodes: bool) -> SimpleNamespace:
    return SimpleNamespace(forward_mode=SimpleNamespace(is_decode_or_idle=lambda: decodes))


INVARIANT = "execution.deterministic.enable_deterministic_inference"
SCATTERED = {"forward.sp_active": True}
QUANTIZES = {"execution.comm.enable_quant_communications": True}
LAYER_CASES = [
    *LAYERS,
    ({"reduce_results": False}, {}, "part", False),
    ({"use_dp_attention_reduce": True}, {}, "sum", False),
    ({"parallel_group": "attention"}, {}, "sum", False),
    ({}, {"skip_all_reduce": True}, "part", False),
    ({}, {"forward.mlp_reduce_scatter": True}, "part", False),
    ({}, SCATTERED, "rows", True),
    ({"reduce_results": False}, SCATTERED, "rows", True),
    ({}, {"skip_all_reduce": True} | SCATTERED, "part", False),
    (QUANTIZED, SCATTERED, "rows", False),
    ({}, {"forward_batch": batch(True)} | QUANTIZES, "sum", True),
    ({}, {"forward_batch": batch(False)}, "sum", True),
]


@contextlib.contextmanager
def layers(failures, own: bool) -> Iterator[tuple[Any, ...]]:
    """SGLang's class of row-parallel layers, or a stand-in, its forward without the plug-in and with it, and SGLang's settings."""
    context = SglangLinear.context = Context()
    members = {LINEAR: forward_names(context), FUSION: {NORM: lambda *arguments: (None, None)}}
    with sglang_installed(own, members) as modules:
        base = own_linear(context, vars(modules[LINEAR])) if own else SglangLinear
        original, registry = base.forward, modules[REGISTRY].HookRegistry
        targets = [sglang.TARGET, sglang.NORM_TARGET, *_sglang_experts.TARGETS]
        right = {target: [modules[REGISTRY].HookType.AROUND] for target in targets}
        hooks = registry._hooks

        def registered() -> dict[str, list[Any]]:
            return {name: [kind for kind, *_ in hooks[name]] for name in hooks}

        serving.plug_in(failures, "sglang", registered, right)
        forward = functools.partial(hooks[sglang.TARGET][0][1], original)
        if own:
            registry.apply_hooks()
            forward = base.forward
            failures.expect(None if forward is not original else "is not", "hooked")
        yield base, original, forward, context


# --- experts --------------------------------------------------------------------------------------------------


def named(name: str) -> Any:
    return type(name, (), {})()


# Cases change these: a layer's dispatcher and its inner ones, then members of the layer, of its configuration and of SGLang's context.
LAYER = {"dispatcher": "DeepEPDispatcher", "inners": 1, "runner": "deep_gemm"}
LAYER |= {"method": SglangExperts, "num_fused_shared_experts": 0, "moe_ep_size": None}
LAYER |= dict.fromkeys(("with_bias", "reduce_results", "_dwdp_bound"), False)
CONFIG = {"activation": "silu", "is_gated": True}
CONFIG |= dict.fromkeys(("apply_router_weight_on_input", "no_combine"), False)
CONFIG |= dict.fromkeys(
    ("gemm1_alpha", "gemm1_clamp_limit", "swiglu_limit", "routed_scaling_factor")
)


def context_of(changes: dict[str, Any], numbers: list[int]) -> tuple[Any, Any]:
    """SGLang's two modules: of data parallel attention without tensor parallelism, unless changed."""
    parallel = {"attn_dp_size": dist.get_world_size(), "attn_tp_size": 1}
    elastic = {"enable_eplb": False, "elastic_ep_backend": None}
    execution = SimpleNamespace(
        moe=changed(elastic, changes),
        deterministic=changed({"enable_deterministic_inference": False}, changes),
    )
    flags = SimpleNamespace(moe=changed({"tbo_enabled": False, "sbo_enabled": False}, changes))
    groups = changed(parallel, changes)
    groups.moe_ep_group = changes.get("group", Group)()
    known, prefill = changes.get("known", numbers), changes.get("prefill", False)
    context = SimpleNamespace(
        get_parallel=lambda: groups, get_exec=lambda: execution, get_flags=lambda: flags
    )
    attention = SimpleNamespace(
        get_dp_global_num_tokens=lambda: known, get_is_extend_in_batch=lambda: prefill
    )
    return context, attention


def fill(layer: Any, mixture: Mixture, changes: dict[str, Any]) -> Any:
    """The layer with the attributes of SGLang's FusedMoE, and this rank's experts."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    own = mixture.experts // ranks
    vars(layer).update(vars(changed(LAYER, changes)))
    inners = [named(layer.dispatcher) for _ in range(layer.inners)]
    deep = layer.dispatcher == "DeepEPDispatcher"
    layer.dispatcher = SimpleNamespace(_inners=inners) if deep else inners[0]
    layer.moe_ep_size, layer.moe_ep_rank = layer.moe_ep_size or ranks, rank
    layer.moe_tp_size, layer.layer_id, layer.top_k = 1, 7, CHOICES
    layer.hidden_size, layer.intermediate_size_per_partition = H, INNER
    layer.num_local_experts = own
    layer.runner_backend = SimpleNamespace(value=layer.runner)
    layer.quant_method = layer.method()
    layer.moe_runner_config = changed(CONFIG, changes)
    part = mixture.part(rank * own, own)
    layer.w13_weight, layer.w2_weight = part.w13_weight, part.w2_weight
    return layer


def routed(ids: torch.Tensor, shares: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(topk_ids=ids, topk_weights=shares, router_logits=None)


@contextlib.contextmanager
def experts(changes: dict[str, Any], numbers: list[int]) -> Iterator[Make]:
    """SGLang's experts with the plug-in's hook; ``numbers`` are those of the ranks' tokens."""
    hook = _sglang_experts.experts_hook(*context_of(changes, numbers), SglangExperts)
    routing, more = changes.get("routing", routed), changes.get("more", ())

    def make(mixture: Mixture) -> Callable[..., Any]:
        layer = fill(SimpleNamespace(), mixture, changes)
        return lambda x, ids, shares: hook(
            lambda *arguments: "SGLang's own", layer, x, routing(ids, shares), *more
        )

    yield make
