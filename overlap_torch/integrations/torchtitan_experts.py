"""torchtitan's mixture of experts by ``moe``, or only its token dispatcher by ``moe_dispatch`` and ``moe_combine``.

Either is chosen in torchtitan's configuration, for models with experts divided among ranks::

    --override.imports overlap_torch.integrations.torchtitan_experts.routed_experts
    --override.imports overlap_torch.integrations.torchtitan_experts.token_dispatcher

Importing this module imports torchtitan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from overlap_torch._moe.activation import Gate
from overlap_torch._moe.functions import Route, moe, moe_combine, moe_dispatch
from overlap_torch._watch.report import note_fallback, remove_fallback
from overlap_torch.integrations._release import require

require("torchtitan", ("0.3",), "torchtitan")

import spmd_types  # noqa: E402
from torchtitan.config.override import derive, override  # noqa: E402
from torchtitan.distributed.utils import get_spmd_backend  # noqa: E402
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts  # noqa: E402
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher  # noqa: E402
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts  # noqa: E402

__all__ = ["OverlapRoutedExperts", "OverlapTokenDispatcher", "routed_experts", "token_dispatcher"]


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
    return get_spmd_backend() == "spmd_types" and spmd_types.is_type_checking()


@override(
    target=AllToAllTokenDispatcher.Config,
    exact=True,
    description="overlap_torch: a token travels once to a rank",
)
def token_dispatcher(config: AllToAllTokenDispatcher.Config) -> OverlapTokenDispatcher.Config:
    """The factory that ``--override.imports`` names."""
    return derive(config, OverlapTokenDispatcher.Config)


def _swiglu_operands(experts: GroupedExperts) -> dict[str, Any]:
    return {"gate_up": (experts.w1_EFD, experts.w3_EFD), "down": experts.w2_EDF}


def _gpt_oss_operands(experts: GptOssGroupedExperts) -> dict[str, Any]:
    return {
        "gate_up": experts.mlp1_weight_EGD,
        "gate_up_bias": experts.mlp1_bias_EG,
        "down": experts.mlp2_weight_EDF,
        "down_bias": experts.mlp2_bias_ED,
        "activation": Gate("silu", 1.702, experts.swiglu_limit, 1.0),
        "interleaved": True,
    }


# The classes of experts that `moe` means, and its arguments for them.
_OPERANDS: dict[type, Callable[[Any], dict[str, Any]]] = {
    GroupedExperts: _swiglu_operands,
    GptOssGroupedExperts: _gpt_oss_operands,
}

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _local(value: Any) -> Any:
    """This rank's part of a parameter, or of each of a pair, in bfloat16, in which torchtitan's experts compute."""
    if isinstance(value, tuple):
        return tuple(_local(each) for each in value)
    if not isinstance(value, torch.Tensor):
        return value
    return (value.to_local() if isinstance(value, DTensor) else value).bfloat16()


class OverlapRoutedExperts(RoutedExperts):
    """torchtitan's ``RoutedExperts`` by :func:`overlap_torch.moe`: a token's results are summed in float32, and rounded once.

    Parameters are torchtitan's. Tokens in bfloat16 run ``GroupedExperts`` and ``GptOssGroupedExperts`` so. Otherwise the
    experts' own forward runs behind their token dispatcher, with the reason in :func:`overlap_torch.report`: for subclasses
    of them, hooks on the experts, and other dtypes, under torchtitan's type checks, and without a mesh of experts.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        pass

    def forward(
        self,
        x_BLD: torch.Tensor,
        topk_scores_BLK: torch.Tensor,
        topk_expert_ids_BLK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> torch.Tensor:
        """[B, L, D] to [B, L, D]: this rank's tokens, with their experts and shares [B, L, K]."""
        why = self._why_not(x_BLD)
        if why:
            note_fallback(self, f"torchtitan's own experts: {why}")
            return super().forward(
                x_BLD, topk_scores_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E
            )
        remove_fallback(self)
        experts, dispatcher = self.inner_experts, self.token_dispatcher
        operands = _OPERANDS[type(experts)](experts)
        return moe(
            x_BLD,
            topk_expert_ids_BLK,
            topk_scores_BLK,
            num_experts=dispatcher.num_experts,
            group=dispatcher.ep_mesh.get_group(),
            **{name: _local(value) for name, value in operands.items()},
        )

    def _why_not(self, x: torch.Tensor) -> str:
        """Why the experts' own forward has to run; empty if it need not."""
        experts, dispatcher = self.inner_experts, self.token_dispatcher
        if type(experts) not in _OPERANDS or type(dispatcher) is not OverlapTokenDispatcher:
            return f"{type(experts).__name__} with {type(dispatcher).__name__}"
        if dispatcher.ep_mesh is None:
            return "they are not divided among ranks"
        if x.dtype != torch.bfloat16:
            return f"tokens are {x.dtype}"
        if any(getattr(experts, name) for name in _HOOKS):
            return "they have hooks"
        return "spmd_types checks types" if _type_checks() else ""


@override(
    target=RoutedExperts.Config,
    exact=True,
    description="overlap_torch: experts beside their communication",
)
def routed_experts(config: RoutedExperts.Config) -> RoutedExperts.Config:
    """The factory that ``--override.imports`` names; another token dispatcher than the standard one stays, with its experts."""
    if type(config.token_dispatcher) is not AllToAllTokenDispatcher.Config:
        return config
    dispatcher = token_dispatcher(config.token_dispatcher)
    return derive(config, OverlapRoutedExperts.Config, token_dispatcher=dispatcher)
