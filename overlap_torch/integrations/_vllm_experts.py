"""vLLM's unquantized experts by ``moe``, where the tokens of ranks differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from overlap_torch import Gate
from overlap_torch.integrations import _serving

MODULE = "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method"


def gate_of(moe: Any) -> tuple[Gate, bool] | None:
    """The activation of vLLM's experts, and whether rows of gate and up alternate; None if `moe` does not know it.

    ``moe`` is a ``FusedMoEConfig``. Its "swigluoai" has fixed numbers in vLLM.
    """
    limit, alpha, offset = moe.swiglu_limit, moe.swiglu_alpha or 1.0, moe.swiglu_beta or 0.0
    name, gated = moe.activation.value.removesuffix("_no_mul"), moe.activation.is_gated
    known: dict[str, Callable[[], Gate]] = {
        "silu": lambda: Gate("silu", limit=limit if gated else None, gated=gated),
        "gelu": lambda: Gate("gelu", gated=gated),
        "gelu_tanh": lambda: Gate("gelu_tanh", gated=gated),
        "swigluoai": lambda: Gate("silu", alpha=1.702, limit=7.0, offset=1.0),
        "swigluoai_uninterleave": lambda: Gate("silu", alpha=alpha, limit=limit, offset=offset),
    }
    return (known[name](), name == "swigluoai") if name in known else None


def reasons(
    backend: str, moe: Any, parallel_config: Any, batch_invariant: bool
) -> Iterator[tuple[object, str]]:
    """Pairs: a condition for vLLM's own code to run these experts, and the reason; the same on all ranks.

    ``backend`` is the ``UnquantizedMoeBackend`` that vLLM has chosen, ``moe`` a ``FusedMoEConfig``.
    """
    parallel = moe.moe_parallel_config
    alike = "ranks of a tensor-parallel group have the same tokens, and vLLM adds their experts' results"
    yield not parallel.use_ep, "experts are not divided over ranks by --enable-expert-parallel"
    yield parallel.dp_size == 1, f"without data parallelism {alike}"
    yield parallel.pcp_size > 1, "prefill context parallelism"
    yield (
        not parallel.is_sequence_parallel and parallel.ep_size != parallel.dp_size,
        f"this model does not divide tokens: {alike}",
    )
    carrier = parallel.all2all_backend
    yield carrier != "allgather_reducescatter", f"--all2all-backend {carrier} carries tokens"
    yield parallel_config.use_ubatching, "micro-batches overlap each other (--enable-dbo)"
    yield parallel_config.enable_elastic_ep, "elastic expert parallelism"
    yield moe.is_lora_enabled, "LoRA"
    yield batch_invariant, "VLLM_BATCH_INVARIANT=1"
    yield (
        backend != "TRITON",
        f"vLLM's kernels {backend} may have weights in another order; --moe-backend triton keeps it",
    )
    yield gate_of(moe) is None, f"the activation {moe.activation.value}"


def method_class(
    base: type,
    *,
    ep_group: Callable[[], Any],
    config: Callable[[], Any],
    context: Callable[[], Any],
    batch_invariant: Callable[[], bool],
) -> type:
    """A subclass of ``base``, vLLM's ``UnquantizedFusedMoEMethod``, which runs experts by ``moe``.

    vLLM's own kernel stays in place: weights, shared experts and the model's sums are as it says. A group that is not the
    configuration's raises a ``RuntimeError``.
    """

    class OverlapUnquantizedFusedMoEMethod(base):
        """vLLM's unquantized experts, which exchange tokens of data parallel ranks themselves."""

        def __init__(self, moe: Any) -> None:
            super().__init__(moe)
            self.overlap_how: dict[str, Any] | None = None
            self.overlap_captured = moe.max_capture_size or 0
            backend = self.unquantized_backend.name
            why = _serving.first_of(
                reasons(backend, moe, config().parallel_config, batch_invariant())
            )
            if not why:
                self.overlap_how = _how(moe, ep_group())
                if self.overlap_captured:
                    token = (moe.hidden_dim, moe.in_dtype, torch.device(moe.device))
                    most = (moe.experts_per_token, self.overlap_captured)
                    why = _serving.why_not_captured(token, *most, self.overlap_how["group"])
            if why:
                self.overlap_how = None
                _serving.say("vLLM", why)

        def apply(
            self,
            layer: Any,
            x: torch.Tensor,
            topk_weights: torch.Tensor,
            topk_ids: torch.Tensor,
            shared_experts: Any,
            shared_experts_input: torch.Tensor | None,
        ) -> Any:
            """As vLLM's. The runner calls shared experts, as this kernel of vLLM's does not overlap them."""
            if self.overlap_how is None:
                given = (topk_weights, topk_ids, shared_experts, shared_experts_input)
                return super().apply(layer, x, *given)
            how = dict(self.overlap_how)
            # Numbers of all ranks' tokens, which vLLM has exchanged already: ranks decide alike.
            tokens = context().dp_metadata.get_chunk_sizes_across_dp_rank()
            if max(tokens) <= self.overlap_captured:
                how |= _serving.limits(tokens, topk_ids.shape[-1])
            if layer.apply_router_weight_on_input:
                how["shares_on"] = "input"
            if self.moe.has_bias:
                how |= {"gate_up_bias": layer.w13_bias, "down_bias": layer.w2_bias}
            return _serving.run_experts(x, layer, topk_ids, topk_weights, **how)

    return OverlapUnquantizedFusedMoEMethod


def _how(moe: Any, group: Any) -> dict[str, Any]:
    """`moe`'s arguments that no call changes. Ids are physical: each rank's experts follow the previous rank's."""
    ranks, rank = moe.moe_parallel_config.ep_size, moe.moe_parallel_config.ep_rank
    experts = [moe.num_experts // ranks + (each < moe.num_experts % ranks) for each in range(ranks)]
    if experts[rank] != moe.num_local_experts:
        raise RuntimeError(
            f"OVERLAP_VLLM=1: rank {rank} of {ranks} has {moe.num_local_experts} of {moe.num_experts} experts, but {experts[rank]} were "
            "expected; set OVERLAP_VLLM=0 for this model"
        )
    gate, interleaved = gate_of(moe)
    return {
        "num_experts": experts,
        "activation": gate,
        "interleaved": interleaved,
        "group": _serving.name_of_group("vLLM", group, ranks, rank),
    }
