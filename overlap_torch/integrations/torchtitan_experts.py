"""torchtitan's token dispatcher by ``moe_dispatch`` and ``moe_combine``: a token travels once to a rank.

It is chosen in torchtitan's configuration, for models with experts divided among ranks; nothing overlaps yet::

    --override.imports overlap_torch.integrations.torchtitan_experts.token_dispatcher

Importing this module imports torchtitan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.config.override import derive, override
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

from overlap_torch._moe.functions import Route, moe_combine, moe_dispatch
from overlap_torch.integrations._release import require

__all__ = ["OverlapTokenDispatcher", "token_dispatcher"]

require("torchtitan", ("0.3",), "torchtitan")


class OverlapTokenDispatcher(AllToAllTokenDispatcher):
    """torchtitan's ``AllToAllTokenDispatcher``: the same rows in the same order, and shares in float32 after the experts.

    A token's results are summed in the choices' order in float32 and rounded once. Under torchtitan's type checks of
    ``spmd_types``, and with ``ep_mesh=None``, torchtitan's own dispatcher runs.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        pass

    def dispatch(
        self,
        x_TD: torch.Tensor,
        topk_scores_TK: torch.Tensor,
        topk_expert_ids_TK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """[T, D] to the rows [R, D] of this rank's experts, their numbers [e], and the state for ``combine``."""
        if self.ep_mesh is None or _type_checks():
            return super().dispatch(
                x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E
            )
        experts, group = self.num_experts, self.ep_mesh.get_group()
        rows, route = moe_dispatch(x_TD, topk_expert_ids_TK, num_experts=experts, group=group)
        return rows, route.counts, (route, topk_scores_TK)

    def combine(self, routed_output_RD: torch.Tensor, metadata: Any, x_TD: torch.Tensor):
        """[R, D] to [T, D]: each token's results, weighted and summed."""
        if not (isinstance(metadata, tuple) and isinstance(metadata[0], Route)):
            return super().combine(routed_output_RD, metadata, x_TD)
        route, scores = metadata
        return moe_combine(routed_output_RD, route, scores)


def _type_checks() -> bool:
    import spmd_types
    from torchtitan.distributed.utils import get_spmd_backend

    return get_spmd_backend() == "spmd_types" and spmd_types.is_type_checking()


@override(
    target=AllToAllTokenDispatcher.Config,
    exact=True,
    description="overlap_torch: a token travels once to a rank",
)
def token_dispatcher(config: AllToAllTokenDispatcher.Config) -> OverlapTokenDispatcher.Config:
    """The factory that ``--override.imports`` names."""
    return derive(config, OverlapTokenDispatcher.Config)
