"""The attention of :func:`overlap_torch.integrations.transformers.register_attention`, and its masks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import masking_utils

from overlap_torch._attention.cuts import Documents, Tokens, numbers_of, spans_of_ranks
from overlap_torch._attention.functions import context_parallel_attention
from overlap_torch._ops.group import Group, group_name, group_rank, world_size
from overlap_torch.integrations._masks import closure_of, name_of, refuse

# Arguments that models pass to their attention and that do not change the result.
_HARMLESS = frozenset(
    (
        "position_ids cache_position use_cache num_items_in_batch output_hidden_states output_router_logits return_dict labels "
        "logits_to_keep input_ids"
    ).split()
)


@dataclass(frozen=True)
class CutMask:
    """A mask that the op can make: causal or full, within the documents that the user gave."""

    causal: bool


_refuse = functools.partial(refuse, "transformers", "causal and full masks and told documents")


class CutAttention:
    """An attention function of transformers, and the mask function beside it.

    Attributes:
        documents: the documents of the next batch, or None; may be set before each batch.
    """

    def __init__(
        self, group: Group, tokens: Tokens, documents: Documents | None, head_parts: int | None
    ) -> None:
        self.group, self.tokens = group_name(group), tokens
        self.documents, self.head_parts = documents, head_parts

    def mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int = 0,
        kv_offset: int = 0,
        mask_function: Callable = masking_utils.causal_mask_function,
        attention_mask: torch.Tensor | None = None,
        **_: Any,
    ) -> CutMask:
        """The mask of this rank's tokens; raises ValueError if the op cannot make it."""
        if q_length != kv_length or q_offset != 0 or kv_offset != 0:
            _refuse(
                f"a cache ({q_length} queries with {kv_length} keys)",
                "give use_cache=False; it is for training and prefill",
            )
        if attention_mask is not None and not bool(attention_mask.all()):
            _refuse(
                "padding, an attention_mask with zeros",
                "pack the sequences, and tell documents=overlap_torch.Documents(lengths)",
            )
        if mask_function is masking_utils.bidirectional_mask_function:
            return CutMask(causal=False)
        if mask_function is not masking_utils.causal_mask_function:
            self._check_packed(mask_function, q_length)
        return CutMask(causal=True)

    def _check_packed(self, mask_function: Callable, tokens: int) -> None:
        """Raises unless the mask is causal within runs of positions whose ends are the documents' or a zigzag's."""
        found = closure_of(mask_function, "and_masks")
        inner = found["mask_functions"] if found else ()
        packed = closure_of(inner[1], "packed_sequence_mask_function") if len(inner) == 2 else None
        if packed:
            remapped = closure_of(inner[0], "remap_positions_for_packed_sequence")
            causal = remapped["mask_function"] if remapped else inner[0]
        if not packed or causal is not masking_utils.causal_mask_function:
            _refuse(f"the mask of {name_of(mask_function)}", "give the model a causal or full mask")
        numbers = packed["packed_sequence_mask"]
        breaks = {at + 1 for at in numbers.diff(dim=1).nonzero()[:, 1].tolist()}
        unknown = sorted(breaks - self._known_breaks(tokens))
        if unknown:
            _refuse(
                f"documents that position_ids begin at this rank's tokens {unknown[:8]} but nobody told",
                "give documents=overlap_torch.Documents(lengths) of the whole sequence, or position_ids="
                "overlap_torch.token_positions(...)[None] if there are none",
            )

    def _known_breaks(self, tokens: int) -> set[int]:
        """The rows of this rank at which positions may jump."""
        ranks, rank = world_size(self.group), group_rank(self.group)
        numbers, zigzag = numbers_of("register_attention", self.tokens, tokens, ranks, rank)
        starts, at = {0}, 0
        for length in self.documents.lengths if self.documents else ():
            at += length
            starts.add(at)
        found, row = set(), 0
        for begin, end in spans_of_ranks(numbers, zigzag)[rank]:
            found |= {row} | {row + start - begin for start in starts if begin <= start < end}
            row += end - begin
        return found

    def attention(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: CutMask | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        **more: Any,
    ) -> tuple[torch.Tensor, None]:
        """[B, H, T, D] of this rank's tokens to [B, T, H, D]."""
        told = sorted(
            name
            for name, one in more.items()
            if name not in _HARMLESS and one is not None and one is not False
        )
        if told:
            _refuse(", ".join(told), "configure the model without")
        if dropout != 0.0:
            _refuse(
                f"a dropout of {dropout}, whose draws would depend on the cut",
                "set attention_dropout=0",
            )
        if isinstance(attention_mask, CutMask):
            causal = attention_mask.causal
        elif attention_mask is None:
            causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        else:
            _refuse("a mask tensor", "leave attention_mask out, or give one of [B, T] with ones")
        output = context_parallel_attention(
            *(heads.transpose(1, 2) for heads in (query, key, value)),
            causal=causal,
            scale=scaling,
            tokens=self.tokens,
            documents=self.documents,
            head_parts=self.head_parts,
            group=self.group,
        )
        return output, None
