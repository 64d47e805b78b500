"""transformers' expert parallelism by `moe`: what ``DistributedConfig(ep_implementation="overlap")`` names."""

from __future__ import annotations

import torch
from transformers.activations import ACT2FN
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
from transformers.integrations.moe import _default_apply_gate

from overlap_torch._layers.sharding import GatherParts, TakePart, place_in, shard_range
from overlap_torch._moe.functions import moe, moe_combine, moe_dispatch

REGISTRY = EPImplementationInterface
NAME = "overlap"
_SILU = (torch.nn.SiLU, type(ACT2FN["silu"]))


class OverlapEP(EPImplementation):
    """Sends tokens to their experts' ranks and back, a token once to a rank. Ranks of a TP group hold the same tokens, and
    each sends a part.

    Plain experts, with a SiLU and without biases, run as :func:`overlap_torch.moe`; others run their own forward.
    """

    def __init__(self, experts, ep_mesh, tp_mesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.experts = experts
        self.plain = (
            getattr(type(experts), "_apply_gate", None) is _default_apply_gate
            and isinstance(getattr(experts, "act_fn", None), _SILU)
            and experts.has_gate
            and experts.is_concatenated
            and not (experts.has_bias or experts.is_transposed or experts.has_post_expert_norm)
        )

    def __call__(self, hidden_states, top_k_index, top_k_weights):
        if self.tp_mesh.size() == 1:
            return self._through_experts(hidden_states, top_k_index, top_k_weights)
        group, tokens = self.tp_mesh.get_group().group_name, hidden_states.shape[0]
        place = (0, tokens, group, *place_in(group))
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
        if self.plain and implementation in ("eager", "grouped_mm", "batched_mm"):
            gate_up, down = self.experts.gate_up_proj, self.experts.down_proj
            return moe(hidden, ids, weights, gate_up, down, num_experts=counted, group=group)
        rows, route = moe_dispatch(hidden, ids, num_experts=counted, group=group)
        numbers = torch.arange(rows.shape[0], device=rows.device)
        local = torch.searchsorted(route.offs, numbers, right=True)[:, None]
        given = rows
        if rows.shape[0] == 0:
            # The experts get one row, so that backward, in which every rank takes part, passes through them.
            given, local = rows.sum(0, keepdim=True), local.new_zeros((1, 1))
        results = self.experts_forward(given, local, torch.ones_like(local, dtype=rows.dtype))
        return moe_combine(results[: rows.shape[0]], route, weights)
