"""transformers' expert parallelism by `moe`: what ``DistributedConfig(ep_implementation="overlap")`` names."""

from __future__ import annotations

import torch
from transformers.activations import ACT2FN
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
from transformers.integrations.finegrained_fp8 import FP8Experts
from transformers.integrations.moe import _default_apply_gate

from overlap_torch._layers.sharding import GatherParts, TakePart, shard_range
from overlap_torch._moe.activation import Gate
from overlap_torch._moe.checks import BLOCK, block_shape
from overlap_torch._moe.functions import moe, moe_combine, moe_dispatch
from overlap_torch._ops.group import place_of

REGISTRY = EPImplementationInterface
NAME = "overlap"
_SILU = (torch.nn.SiLU, type(ACT2FN["silu"]))
# Classes whose own `_apply_gate` is a `Gate`: the attributes with its alpha, if there is one, and its limit, and its offset.
GATES: dict[str, tuple[str | None, str, float]] = {
    "gpt_oss.modeling_gpt_oss.GptOssExperts": ("alpha", "limit", 1.0),
    "minimax_m3_vl.modeling_minimax_m3_vl.MiniMaxM3VLExperts": (
        "swiglu_alpha",
        "swiglu_limit",
        1.0,
    ),
    "deepseek_v4.modeling_deepseek_v4.DeepseekV4Experts": (None, "limit", 0.0),
    "hy_v4.modeling_hy_v4.HYV4Experts": (None, "swiglu_limit", 0.0),
    "glm5_next.modeling_glm5_next.Glm5NextTextExperts": (None, "swiglu_limit", 0.0),
}


def _gate_of(experts: torch.nn.Module) -> Gate | None:
    """The experts' activation; None if `moe` does not know it."""
    kind = type(experts)
    if hasattr(experts, "act_fn") and not isinstance(experts.act_fn, _SILU):
        return None
    if isinstance(experts, FP8Experts):
        return _fp8_gate_of(experts)
    if getattr(kind, "_apply_gate", None) is _default_apply_gate:
        return Gate() if hasattr(experts, "act_fn") and experts.is_concatenated else None
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("transformers.models.")
    if name not in GATES:
        return None
    alpha, limit, offset = GATES[name]
    limit = getattr(experts, limit)
    known = limit is not None and limit > 0
    return Gate("silu", getattr(experts, alpha) if alpha else 1.0, limit, offset) if known else None


def _fp8_gate_of(experts: FP8Experts) -> Gate | None:
    """The same of fp8 experts, if `moe` takes their scales: of blocks of 128, and of the numbers that each call casts."""
    gate_up, down = experts.gate_up_proj, experts.down_proj
    scaled = (
        (gate_up, experts.gate_up_proj_scale_inv),
        (down, experts.down_proj_scale_inv),
    )
    takes = (
        gate_up.dtype == torch.float8_e4m3fn
        and experts.activation_scheme == "dynamic"
        and tuple(experts.block_size or ()) == (BLOCK, BLOCK)
        and all(scale.dtype == torch.float32 for _, scale in scaled)
        and all(scale.shape[1:] == block_shape(weight)[1:] for weight, scale in scaled)
        and experts.hidden_dim % 16 == experts.intermediate_dim % 16 == 0
        and experts.gate_softcap is None
    )
    if not takes:
        return None
    if experts.swiglu_alpha is not None:
        return Gate("silu", experts.swiglu_alpha, experts.swiglu_limit, 1.0)
    return Gate() if experts.limit is None else Gate("silu", 1.0, experts.limit, 0.0)


class OverlapEP(EPImplementation):
    """Sends tokens to their experts' ranks and back, a token once to a rank. Ranks of a TP group hold the same tokens, and
    each sends a part.

    Experts with a SiLU, and those of :data:`GATES`, run as :func:`overlap_torch.moe`; so do ``FP8Experts`` of bfloat16 tokens without
    gradients. Others run their own forward.
    """

    def __init__(self, experts, ep_mesh, tp_mesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.experts = experts
        known = experts.has_gate and not experts.has_post_expert_norm
        self.gate = _gate_of(experts) if known else None

    def __call__(self, hidden_states, top_k_index, top_k_weights):
        if self.tp_mesh.size() == 1:
            return self._through_experts(hidden_states, top_k_index, top_k_weights)
        group, tokens = self.tp_mesh.get_group().group_name, hidden_states.shape[0]
        place = (0, tokens, group, *place_of(group))
        begin, own = shard_range(tokens, *place[3:])
        part = self._through_experts(
            TakePart.apply(hidden_states, *place),
            top_k_index[begin : begin + own],
            TakePart.apply(top_k_weights, *place),
        )
        return GatherParts.apply(part, *place)

    def _through_experts(self, hidden, ids, weights):
        group = self.ep_mesh.get_group()
        counted = self.num_local_experts * self.ep_mesh.size()
        implementation = getattr(self.experts.config, "_experts_implementation", None)
        own, takes, scales = (
            self.experts,
            implementation in ("eager", "grouped_mm", "batched_mm"),
            {},
        )
        if isinstance(own, FP8Experts):
            takes = (takes or implementation == "deepgemm") and not torch.is_grad_enabled()
            takes = takes and hidden.dtype == torch.bfloat16
            scales = {
                "scale_gate_up": own.gate_up_proj_scale_inv,
                "scale_down": own.down_proj_scale_inv,
            }
        if self.gate is not None and takes:
            weights_of = (own.gate_up_proj, own.down_proj)
            if own.is_transposed:
                weights_of = (weight.transpose(1, 2) for weight in weights_of)
            return moe(
                hidden,
                ids,
                weights,
                *weights_of,
                num_experts=counted,
                gate_up_bias=own.gate_up_proj_bias if own.has_bias else None,
                down_bias=own.down_proj_bias if own.has_bias else None,
                activation=self.gate,
                interleaved=not own.is_concatenated,
                group=group,
                **scales,
            )
        rows, route = moe_dispatch(hidden, ids, num_experts=counted, group=group)
        numbers = torch.arange(rows.shape[0], device=rows.device)
        local = torch.searchsorted(route.offs, numbers, right=True)[:, None]
        given = rows
        if rows.shape[0] == 0:
            # The experts get one row, so that backward, in which every rank takes part, passes through them.
            given, local = rows.sum(0, keepdim=True), local.new_zeros((1, 1))
        results = self.experts_forward(given, local, torch.ones_like(local, dtype=rows.dtype))
        return moe_combine(results[: rows.shape[0]], route, weights)
