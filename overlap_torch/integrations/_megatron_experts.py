"""The mixture of experts of :mod:`overlap_torch.integrations.megatron`; importing it loads Megatron-core 0.19."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

from overlap_torch._moe.functions import Route, moe_combine, moe_dispatch, shares_of_rows
from overlap_torch._watch.report import note_fallback


class OverlapTokenDispatcher(MoETokenDispatcher):
    """Megatron's ``MoEAlltoAllTokenDispatcher`` by :func:`overlap_torch.moe_dispatch` and :func:`overlap_torch.moe_combine`.

    A token travels once to a rank. The experts get Megatron's operands: rows in order of expert, source rank and token, the
    number of each expert's rows, and each row's probability, which multiplies the activation before ``linear_fc2``. A
    token's results are summed in the experts' order in float32, and rounded once. With tensor parallelism of experts a token
    goes to each rank that holds a part of its expert, and the parts' results are terms of the same sum. Megatron would
    gather the rows among these ranks, and reduce-scatter the results.
    """

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: list[int],
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.num_local_experts = num_local_experts
        self._ids = self._route = None

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [..., H], and ``routing_map`` and ``probs`` [T, E], to tokens [T, H] and their experts'
        probabilities [T, K]."""
        self.hidden_shape, experts = hidden_states.shape, routing_map.shape[1]
        numbers = torch.arange(experts, device=routing_map.device)
        # The experts of a token come first, in their order; numbers from `experts` on are no route.
        ids = torch.where(routing_map, numbers, numbers + experts)
        ids = ids.topk(self.config.moe_router_topk, largest=False).values
        shares = probs.gather(1, ids % experts)
        if self.tp_size > 1:
            # Group tp_ep has the ranks of an expert's parts side by side, and to the op each rank's are experts of its own.
            own, parts = self.num_local_experts, torch.arange(self.tp_size, device=ids.device)
            rank, place = ids // own * self.tp_size, ids % own
            ids = ((rank[..., None] + parts) * own + place[..., None]).flatten(1)
            shares = shares.repeat_interleave(self.tp_size, 1)
        self._ids = ids
        return hidden_states.reshape(-1, hidden_states.shape[-1]), shares

    def token_dispatch(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [T, H] and probabilities [T, K] to those of this rank's rows, [R, H] and [R]."""
        experts = self.num_local_experts * self.ep_size * self.tp_size
        rows, self._route = moe_dispatch(
            hidden_states, self._ids, num_experts=experts, group=self.tp_ep_group
        )
        self._ids = None
        return rows, shares_of_rows(probs, self._route).squeeze(1)

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The experts' operands: rows, their number for each expert, and probabilities."""
        return hidden_states, self._route.counts, probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Nothing: the op takes rows as they are."""
        return hidden_states

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Results [R, H] to their sums [T, H]."""
        route: Route = self._route
        self._route = None
        return moe_combine(hidden_states, route)

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states.view(self.hidden_shape)


class OverlapMoELayer(MoELayer):
    """Megatron's mixture of experts, whose tokens travel by :class:`OverlapTokenDispatcher` instead of Megatron's "alltoall".

    Arguments, router, experts, shared experts, parameters and ``sharded_state_dict`` are Megatron's. Megatron's own
    dispatcher stays, with the reason in :func:`overlap_torch.report`, for another ``moe_token_dispatcher_type``, for experts
    padded to their capacity or for quantization, with ``moe_shared_expert_overlap``, ``overlap_moe_expert_parallel_comm``
    and CUDA graphs of the layer, and for Megatron's inference.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **arguments: Any,
    ) -> None:
        groups = get_default_pg_collection() if pg_collection is None else pg_collection
        super().__init__(config, submodules, layer_number, groups, **arguments)
        why = _why_not(config)
        if why:
            note_fallback(self, f"Megatron's own token dispatcher: {why}")
            return
        self.token_dispatcher = OverlapTokenDispatcher(
            self.num_local_experts, self.local_expert_indices, config, groups
        )


def _why_not(config: TransformerConfig) -> str:
    """Why Megatron's own dispatcher has to run; empty if it need not."""
    works = {
        "moe_token_dispatcher_type": "alltoall",
        "moe_pad_expert_input_to_capacity": False,
        "moe_pad_experts_for_cuda_graph_inference": False,
        "moe_router_padding_for_quantization": False,
        "moe_shared_expert_overlap": False,
        "overlap_moe_expert_parallel_comm": False,
    }
    captured = config.cuda_graph_modules  # none: whole layers
    if not captured or any(module.name.startswith("moe") for module in captured):
        works["cuda_graph_impl"] = "none"
    wrong = [name for name, only in works.items() if getattr(config, name) != only]
    if config.transformer_impl == "inference_optimized":
        wrong.append("transformer_impl")
    return ", ".join(f"{name}={getattr(config, name)!r}" for name in wrong)
