"""The attention of :mod:`overlap_torch.integrations.megatron` over a context-parallel group; importing it loads Megatron-core 0.19."""

from __future__ import annotations

import functools

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention

from overlap_torch._attention.functions import context_parallel_attention
from overlap_torch.integrations._masks import refuse

_refuse = functools.partial(
    refuse, "Megatron-core", "causal and full masks and windows, of self attention"
)
_CAUSAL = {AttnMaskType.causal: True, AttnMaskType.no_mask: False}


class OverlapDotProductAttention(MegatronModule):
    """Megatron's core attention by :func:`overlap_torch.context_parallel_attention`; it needs no Transformer Engine, and
    runs on CPU, too.

    Arguments, and forward's inputs and output, are those of
    ``megatron.core.transformer.dot_product_attention.DotProductAttention``, which refuses context parallelism. The sequence
    is cut as Megatron's batches are: rank r of P has chunks r and 2P - 1 - r of 2P. ``cp_comm_type`` "all_gather" gathers
    keys and values, "a2a" divides all by heads; with "p2p", or none, the op chooses.

    Raises:
        ValueError: an unsupported option, which the message names: mask types other than ``causal`` and ``no_mask``, cross
            attention, dropout, sinks (``softmax_type``), ``qk_clip``, ``log_max_attention_logit``, "a2a+p2p"; in forward
            mask tensors, biases, packed sequences and caches.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
        group = pg_collection.cp
        self.group, ranks = group.group_name, group.size()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        head_parts = {None: None, "p2p": None, "all_gather": 1, "a2a": ranks}
        if config.context_parallel_size != ranks:
            _refuse(
                f"context_parallel_size={config.context_parallel_size} with a context-parallel group of {ranks} ranks",
                "give the group's size",
            )
        if attention_type != "self":
            _refuse(f"{attention_type} attention", "use another core_attention there")
        if dropout != 0.0:
            _refuse(
                f"a dropout of {dropout}, whose draws would depend on the cut",
                "set attention_dropout=0",
            )
        for name, only in (
            ("softmax_type", "vanilla"),
            ("qk_clip", False),
            ("log_max_attention_logit", False),
        ):
            if getattr(config, name) != only:
                _refuse(f"{name}={getattr(config, name)!r}", f"set it to {only!r}")
        if cp_comm_type not in head_parts:
            _refuse(
                f"cp_comm_type={cp_comm_type!r}", "give 'p2p', 'all_gather' or 'a2a', or leave it"
            )
        self.head_parts = head_parts[cp_comm_type]
        self.tokens = "contiguous" if ranks == 1 else "zigzag"
        self.attn_mask_type, self.scale, self.window = attn_mask_type, softmax_scale, None
        self._causal(attn_mask_type)
        freq = config.window_attn_skip_freq
        if is_layer_window_attention(config.window_size, freq, layer_number):
            self.window = tuple(None if side < 0 else side for side in config.window_size)

    def _causal(self, kind: AttnMaskType) -> bool:
        if kind not in _CAUSAL:
            _refuse(f"attn_mask_type {kind.name}", "give AttnMaskType.causal or no_mask")
        return _CAUSAL[kind]

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """This rank's query [s, b, heads, d], key and value [s, b, groups, d] to [s, b, heads * d]."""
        given = (
            (attention_mask, "a mask tensor", "attention_mask=None, as attn_mask_type says it all"),
            (attention_bias, "an attention_bias", "attention_bias=None"),
            (packed_seq_params, "packed_seq_params", "sequences that are not packed"),
        )
        for each, what, remedy in given:
            if each is not None:
                _refuse(what, f"give {remedy}")
        if query.shape[0] != key.shape[0]:
            _refuse(
                f"a cache ({query.shape[0]} queries with {key.shape[0]} keys)",
                "it is for training; use another core_attention for generation",
            )
        output = context_parallel_attention(
            *(heads.transpose(0, 1) for heads in (query, key, value)),
            causal=self._causal(attn_mask_type or self.attn_mask_type),
            window=self.window,
            scale=self.scale,
            tokens=self.tokens,
            head_parts=self.head_parts,
            group=self.group,
        )
        return output.transpose(0, 1).flatten(2)


class CoreAttention:
    """Megatron's ``DotProductAttention``; for a model with context parallelism :class:`OverlapDotProductAttention`."""

    def __new__(cls, config: TransformerConfig, *args, **keywords) -> torch.nn.Module:
        kind = (
            DotProductAttention if config.context_parallel_size == 1 else OverlapDotProductAttention
        )
        return kind(config, *args, **keywords)
