"""transformers with the attention over ranks: what a model makes of the whole sequence, and every mask that is refused."""

import functools

import pytest
import torch
import torch.distributed as dist

import overlap_torch
from checks import Failures
from frameworks import SMALL_MODEL, drawn_model, needs_transformers
from operands import rank_device
from overlap_torch import Documents
from overlap_torch.integrations import transformers as integration

pytestmark = needs_transformers
TOKENS = 16


def model_of(attention: str, **more):
    from transformers import LlamaConfig

    config = LlamaConfig(**SMALL_MODEL | {"hidden_size": 32}, **more)
    model = drawn_model(config, attn_implementation=attention)
    return model.to(rank_device(), torch.float64)


def positions_of(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None].to(rank_device())


@pytest.mark.parametrize("lengths", [(TOKENS,), (3, 9, 4)], ids=["one", "documents"])
@pytest.mark.parametrize("tokens", ["contiguous", "zigzag"])
@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_transformers_attention_is_the_whole_sequences(
    failures: Failures, tokens, lengths: tuple[int, ...]
) -> None:
    """Logits of this rank's tokens, and gradients that add up to the whole sequence's."""
    ids = torch.arange(TOKENS, device=rank_device())[None] * 7 % 60
    positions = positions_of(lengths)
    whole = model_of("sdpa")
    logits = whole(ids, position_ids=positions, use_cache=False).logits
    logits.square().sum().backward()
    documents = Documents(lengths) if len(lengths) > 1 else None
    with integration.register_attention(tokens=tokens, documents=documents) as handle:
        assert handle.documents is documents
        own = model_of("overlap")
        mine = own(
            overlap_torch.cut_tokens(ids, 1, tokens),
            position_ids=overlap_torch.cut_tokens(positions, 1, tokens),
            use_cache=False,
        ).logits
        mine.square().sum().backward()
    pairs = [("logits", mine, overlap_torch.cut_tokens(logits, 1, tokens))]
    for (name, parameter), right in zip(own.named_parameters(), whole.parameters(), strict=True):
        dist.all_reduce(parameter.grad)
        pairs.append((name, parameter.grad, right.grad))
    for name, found, right in pairs:
        error = (found - right).abs().max().item() / right.abs().max().item()
        failures.expect(None if error < 1e-12 else f"off by {error}", name)


@pytest.mark.ranks((2, "gloo"))
def test_transformers_attention_refuses_by_name(failures: Failures) -> None:
    ids = torch.zeros(1, 8, dtype=torch.int64, device=rank_device())
    padded = torch.ones_like(ids)
    padded[0, 0] = 0
    cases = [
        ("padding", {}, {"attention_mask": padded}),
        ("a mask tensor", {}, {"attention_mask": ids.new_zeros(1, 1, 8, 8).double()}),
        ("begin at this rank's tokens [3]", {}, {"position_ids": positions_of((3, 5))}),
        ("a dropout of 0.5", {"attention_dropout": 0.5}, {}),
    ]
    with integration.register_attention() as handle:
        for expected, config, keywords in cases:
            model = model_of("overlap", **config).train()
            failures.raises(expected, model, ids, use_cache=False, **keywords)
        attention = handle._attention
        operands = [torch.zeros(1, 2, 8, 4, dtype=torch.float64, device=rank_device())] * 3
        for name in ("sliding_window", "softcap", "s_aux", "position_bias", "cu_seq_lens_q"):
            given = {name: 4}
            failures.raises(f"but not {name}", attention.attention, None, *operands, None, **given)
        from transformers import masking_utils

        window = masking_utils.sliding_window_causal_mask_function(4)
        failures.raises("the mask of and_masks", attention.mask, 1, 8, 8, mask_function=window)
        made = functools.partial(window)  # it has no name
        failures.raises(
            "the mask of functools.partial", attention.mask, 1, 8, 8, mask_function=made
        )
        failures.raises("a cache (1 queries with 8 keys)", attention.mask, 1, 1, 8)
        failures.raises("has an attention 'overlap'", integration.register_attention)
    failures.raises("overlap", model_of, "overlap")  # undone
