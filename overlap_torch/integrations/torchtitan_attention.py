"""torchtitan's ``FlexAttention`` under context parallelism by ``context_parallel_attention``.

It is chosen in torchtitan's configuration, with ``parallelism.spmd_backend`` "spmd_types" or "full_dtensor"::

    --override.imports overlap_torch.integrations.torchtitan_attention.flex_attention

Importing this module imports torchtitan.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from overlap_torch._attention.cuts import Documents
from overlap_torch._attention.functions import context_parallel_attention
from overlap_torch._ops.graphs import outside_graphs
from overlap_torch._ops.group import Group, group_name, group_rank, world_size
from overlap_torch.integrations._masks import closure_of, name_of, refuse
from overlap_torch.integrations._release import require

require("torchtitan", ("0.3",), "torchtitan")

import spmd_types  # noqa: E402
from spmd_types.runtime import get_partition_spec  # noqa: E402
from torchtitan.config.override import derive, override  # noqa: E402
from torchtitan.distributed.utils import get_spmd_backend  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402

__all__ = ["OverlapFlexAttention", "flex_attention"]

_refuse = functools.partial(
    refuse, "torchtitan", "causal masks and packed documents of one sequence"
)
_COMPILED = "overlap_torch's attention for torchtitan reads each batch's documents on the host, which breaks a graph of torch.compile: compile without it"


class OverlapFlexAttention(FlexAttention):
    """torchtitan's inner attention for a sequence that is cut over ranks, without a gather of keys and values before it.

    It reads the cut from the mask. It takes torchtitan's causal mask and its packed documents, with
    ``context_parallel_load_balancer`` "headtail" or None. Documents need a local batch of 1. Without context parallelism,
    and if torchtitan has gathered the keys itself (``spmd_backend="partial_dtensor"``), torchtitan's own forward runs.

    Raises:
        ValueError: forward got something unsupported, which the message names: other masks and load balancers,
            ``score_mod``, ``out_transform``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        head_parts: int | None = None
        """As of ``overlap_torch.context_parallel_attention``."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.head_parts, self.group = config.head_parts, ""

    def over(self, group: Group) -> None:
        """Sets that the sequence is cut over the ranks of ``group``; keys and values are this rank's, as queries are."""
        self.group = group_name(group)
        sharding = self._sharding_config
        if sharding is None:
            return
        own = dict(sharding.in_src_shardings)
        grads = tuple(own[f"{name}_BLNH"] for name in "qkv")
        self._sharding_config = dataclasses.replace(
            sharding,
            in_dst_shardings=own,
            local_map=dataclasses.replace(sharding.local_map, in_grad_placements=grads),
        )

    def parallelize(self, parallel_dims: Any) -> None:
        """As torchtitan's."""
        if parallel_dims.cp_enabled and parallel_dims.spmd_backend != "partial_dtensor":
            self.over(parallel_dims.get_mesh("cp"))
        super().parallelize(parallel_dims)

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: BlockMask,
        score_mod: Callable | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Callable | None = None,
        **keywords: Any,
    ) -> torch.Tensor:
        """[B, L, N, H], this rank's tokens of each."""
        if not self.group:
            return super().forward(
                q_BLNH,
                k_BLNH,
                v_BLNH,
                attention_masks=attention_masks,
                score_mod=score_mod,
                scale=scale,
                enable_gqa=enable_gqa,
                out_transform=out_transform,
                **keywords,
            )
        for name, given in (("score_mod", score_mod), ("out_transform", out_transform)):
            if given is not None:
                _refuse(name, "use torchtitan's FlexAttention for this model")
        checks = get_spmd_backend() == "spmd_types" and spmd_types.is_type_checking()
        with spmd_types.no_typecheck():
            output = self._attend(q_BLNH, k_BLNH, v_BLNH, attention_masks, scale)
        if checks:
            kind = spmd_types.get_local_type(q_BLNH)
            spmd_types.assert_type(output, kind, get_partition_spec(q_BLNH))
        return output

    @outside_graphs(_COMPILED)
    def _attend(self, q, k, v, mask: BlockMask, scale: float | None) -> torch.Tensor:
        if not isinstance(mask, BlockMask):
            _refuse(f"a {type(mask).__name__} as a mask", "give the one that torchtitan makes")
        return context_parallel_attention(
            q,
            k,
            v,
            causal=True,
            scale=scale,
            head_parts=self.head_parts,
            group=self.group,
            **_read(mask.mask_mod, q.shape[1], self.group),
        )


@functools.lru_cache(maxsize=4)
def _read(mask_mod: Callable, own: int, group: str) -> dict[str, Any]:
    """The cut and the documents of a mask of this rank's queries; read once for each batch, because it waits for the
    device."""
    ranks, rank = world_size(group), group_rank(group)
    rewritten = closure_of(mask_mod, "_create_cp_block_mask.<locals>._rewrite_mask_mod")
    if rewritten is None:
        _refuse(f"the uncut mask {name_of(mask_mod)}", "cut it by torchtitan's cp_shard")
    place = _variables(rewritten["local_q_idx_to_q_idx"])
    if (place["rank"], place["local_q_size"]) != (rank, own):
        _refuse(
            f"a mask of rank {place['rank']} and {place['local_q_size']} queries for rank {rank} and {own} queries",
            "cut mask and tokens over the same mesh",
        )
    order = _variables(rewritten["qkv_idx_restore"])["qkv_rearrange_indices"]
    tokens = "contiguous" if order is None else "zigzag"
    if order is not None:
        chunks = torch.arange(ranks * own, device="cpu").view(2 * ranks, -1)
        zigzag = [chunks[at] for pair in range(ranks) for at in (pair, 2 * ranks - 1 - pair)]
        if order.shape[0] != 1 or not torch.equal(order[0].cpu(), torch.cat(zigzag)):
            _refuse("a load balancer other than headtail", 'set it to "headtail" or None')
    return {"tokens": tokens, "documents": _documents(rewritten["mask_mod"], ranks * own)}


def _variables(function: Callable) -> dict[str, Any]:
    return closure_of(function, name_of(function).rpartition(".<locals>.")[0])


def _documents(mask_mod: Callable, total: int) -> Documents | None:
    """The documents of torchtitan's causal mask, with or without the mask of packed documents."""
    found = closure_of(mask_mod, "and_masks")
    parts = list(found["mask_mods"]) if found else [mask_mod]
    causal = [one for one in parts if closure_of(one, "get_causal_mask_mod") is not None]
    others = [one for one in parts if one not in causal]
    packed = [
        closure_of(one, "get_efficient_causal_mask_mod_for_packed_document") for one in others
    ]
    if not causal or len(packed) > 1 or None in packed:
        names = ", ".join(map(name_of, parts))
        _refuse(f"the mask of {names}", "use torchtitan's FlexAttention for this model")
    if not packed:
        return None
    numbers = packed[0].get("document_id")
    if numbers is None:  # several sequences
        if bool((packed[0]["doc_end_by_token"] == total - 1).all()):
            return None
        _refuse("documents in a local batch of several sequences", "set local_batch_size=1")
    return Documents(torch.bincount(numbers).tolist())


@override(
    target=FlexAttention.Config,
    exact=True,
    description="overlap_torch: keys and values travel by heads or beside the attention",
)
def flex_attention(config: FlexAttention.Config) -> OverlapFlexAttention.Config:
    """The factory that ``--override.imports`` names."""
    return derive(config, OverlapFlexAttention.Config)
