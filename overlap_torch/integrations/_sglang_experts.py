"""SGLang's unquantized experts by ``moe``, where the tokens of ranks differ."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from overlap_torch import Gate
from overlap_torch.integrations import _serving

_LAYERS = "sglang.srt.layers.moe"
# Both, as the second calls the first only in some cases. `forward` calls them within SGLang's opaque operators, too.
TARGETS = (
    f"{_LAYERS}.fused_moe_triton.layer.FusedMoE.forward_impl",
    f"{_LAYERS}.ep_moe.layer.DeepEPMoE.forward_impl",
)
# The dispatchers that get a rank's own tokens and return complete sums, and whether routed_scaling_factor is in these.
DISPATCHERS = {"DeepEPDispatcher": False, "FlashinferDispatcher": True}
_HOW = "_overlap_experts"  # a layer's attribute


def reasons(
    layer: torch.nn.Module, context: Any, unquantized: type
) -> Iterator[tuple[object, str]]:
    """Pairs: a condition for SGLang's own code to run a layer's experts, and the reason; the same on all ranks.

    ``context`` is SGLang's module ``runtime_context``, ``unquantized`` the method class of experts that are not quantized.
    """
    yield layer.moe_ep_size == 1, "experts are not divided over ranks by --ep-size"
    dispatchers = [type(each).__name__ for each in _dispatchers(layer)]
    yield (
        dispatchers[0] not in DISPATCHERS,
        f"{dispatchers[0]} is not the dispatcher of --moe-a2a-backend deepep or flashinfer; with none all ranks get the same tokens, "
        "and SGLang adds their experts' results",
    )
    parallel, execution, flags = context.get_parallel(), context.get_exec(), context.get_flags().moe
    ranks = parallel.attn_dp_size * parallel.attn_tp_size
    yield (
        parallel.attn_dp_size == 1 or ranks != layer.moe_ep_size,
        "attention is not data parallel over all ranks of the experts (--enable-dp-attention)",
    )
    yield (
        len(dispatchers) > 1 or flags.tbo_enabled or flags.sbo_enabled,
        "--enable-two-batch-overlap or --enable-single-batch-overlap",
    )
    yield execution.moe.enable_eplb, "--enable-eplb counts tokens in SGLang's dispatcher"
    yield execution.moe.elastic_ep_backend is not None, "elastic expert parallelism"
    yield execution.deterministic.enable_deterministic_inference, "deterministic inference"
    method, config = type(layer.quant_method), layer.moe_runner_config
    yield method is not unquantized, f"the weights are quantized ({method.__name__})"
    runner = getattr(layer.runner_backend, "value", None)
    shape = (layer.num_local_experts, 2 * layer.intermediate_size_per_partition, layer.hidden_size)
    yield (
        runner not in ("triton", "deep_gemm")
        or getattr(layer, "use_intel_amx_backend", False)
        or (config.is_gated and tuple(layer.w13_weight.shape) != shape),
        f"the runner {runner} may have weights in another order; --moe-runner-backend deep_gemm keeps it",
    )
    limits = (config.gemm1_alpha, config.gemm1_clamp_limit)
    yield (
        config.activation != "silu" or not config.is_gated or limits != (None, None),
        f"the activation {config.activation}, without a gate or with SwiGLU-OAI's limits",
    )
    yield layer.with_bias, "biases"
    yield layer.num_fused_shared_experts > 0, "shared experts among the experts"
    yield config.apply_router_weight_on_input, "shares on the input"
    adds = config.no_combine or layer.reduce_results
    yield adds or layer._dwdp_bound, "results that SGLang adds itself, or prefetched weights"


def _dispatchers(layer: torch.nn.Module) -> list[Any]:
    """SGLang has one for each of the batches that overlap, behind a common one."""
    return getattr(layer.dispatcher, "_inners", [layer.dispatcher])


def _how(layer: torch.nn.Module, context: Any, unquantized: type) -> dict[str, Any] | None:
    """`moe`'s arguments that no call of the layer changes; None if SGLang's own code runs."""
    why = _serving.first_of(reasons(layer, context, unquantized))
    if not why:
        group, weight = context.get_parallel().moe_ep_group, layer.w13_weight
        name = _serving.name_of_group("SGLang", group, layer.moe_ep_size, layer.moe_ep_rank)
        token = (layer.hidden_size, weight.dtype, weight.device)
        why = _serving.why_not_captured(token, layer.top_k, 1, name)
    if why:
        _serving.say("SGLang", why)
        return None
    gate = Gate("silu", limit=layer.moe_runner_config.swiglu_limit)
    return {"activation": gate, "group": name}  # every rank has as many experts


def experts_hook(context: Any, attention: Any, unquantized: type) -> Callable[..., Any]:
    """The hook around the experts; ``context`` and ``attention`` are SGLang's modules, or objects with their names.

    Ranks decide by the same facts. A routing that only some ranks may have raises a ``RuntimeError``.
    """
    why_not_captured = functools.cache(_serving.why_not_captured)  # every layer asks in each step

    def forward(
        original: Callable[..., Any],
        layer: torch.nn.Module,
        hidden_states: torch.Tensor,
        topk_output: Any,
        pre_quant_input: Any = None,
    ) -> torch.Tensor:
        if _HOW not in layer.__dict__:
            layer.__dict__[_HOW] = _how(layer, context, unquantized)
        how, batch = layer.__dict__[_HOW], ()
        if how is not None:
            batch, parallel = attention.get_dp_global_num_tokens() or (), context.get_parallel()
            if len(batch) != parallel.attn_dp_size:
                _serving.say("SGLang", "ranks do not know the numbers of each other's tokens")
                how = None
        if how is None:
            more = () if pre_quant_input is None else (pre_quant_input,)
            return original(layer, hidden_states, topk_output, *more)
        if not hasattr(topk_output, "topk_ids") or pre_quant_input is not None:
            raise RuntimeError(
                f"OVERLAP_SGLANG=1: the experts of layer {layer.layer_id} got a {type(topk_output).__name__}, or quantized tokens, which "
                "overlap_torch.moe does not take, and which other ranks may not have; set OVERLAP_SGLANG=0 for this model"
            )
        if not attention.get_is_extend_in_batch():
            # Each rank of an attention's tensor parallel group has a part of its tokens.
            parts = parallel.attn_tp_size
            tokens = [-(-each // parts) for each in batch for _ in range(parts)]
            choices = topk_output.topk_ids.shape[-1]
            limits = _serving.limits(tokens, choices)
            token = (hidden_states.shape[-1], hidden_states.dtype, hidden_states.device)
            most = (choices, limits["max_tokens"])
            if why := why_not_captured(token, *most, how["group"]):
                _serving.say("SGLang", why)
                return original(layer, hidden_states, topk_output)
            how = how | limits
        factor = layer.moe_runner_config.routed_scaling_factor
        shares = topk_output.topk_weights
        if factor is not None and DISPATCHERS[type(_dispatchers(layer)[0]).__name__]:
            shares = shares * factor
        return _serving.run_experts(hidden_states, layer, topk_output.topk_ids, shares, **how)

    return forward
