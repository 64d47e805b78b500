"""Megatron-core's attention over a context-parallel group: the whole sequence's results, every option that is refused, a GPT."""

import itertools

import pytest
import torch
import torch.distributed as dist

import overlap_torch
from checks import Failures, close
from frameworks import megatron_config as config
from frameworks import megatron_gpt as gpt
from frameworks import megatron_groups, needs_megatron
from operands import rank_device

pytestmark = [needs_megatron, pytest.mark.ranks((2, "gloo"), (2, "nccl"))]


def attention_settings(**fields: object):
    """Twelve heads, which all numbers of ranks divide, and no tensor parallelism."""
    sizes = {"hidden_size": 48, "num_attention_heads": 12, "tensor_model_parallel_size": 1}
    return config(False, **sizes | fields)


def core_attention(settings, kind: str = "causal", build=None, **arguments: object):
    """The first layer's, as a spec builds it; by ``build`` if it is given."""
    from megatron.core.transformer.enums import AttnMaskType

    from overlap_torch.integrations.megatron import OverlapSpecProvider

    given = {"attn_mask_type": AttnMaskType[kind], "attention_type": "self", **arguments}
    build = OverlapSpecProvider().core_attention() if build is None else build
    return build(config=settings, layer_number=1, **given)


@pytest.mark.parametrize("groups", [12, 1])
@pytest.mark.ranks(*((ranks, "gloo") for ranks in (1, 2, 3, 4)), (2, "nccl"))
def test_megatron_attention_is_the_whole_sequences(failures: Failures, groups: int) -> None:
    """Results and gradients of a zigzag beside Megatron's own attention of the whole sequence, in float64."""
    from overlap_torch.integrations.megatron import OverlapDotProductAttention

    ranks, device = dist.get_world_size(), rank_device()
    tokens = "contiguous" if ranks == 1 else "zigzag"
    at = torch.arange(24, device=device)
    distance = at - at[:, None]
    generator = torch.Generator().manual_seed(1)
    whole = [
        torch.randn(24, 2, heads, 4, generator=generator, dtype=torch.float64).to(device)
        for heads in (12, groups, groups, 12)
    ]
    masks = (
        ("causal", None, distance > 0),
        ("no_mask", None, distance > 24),
        ("causal", (5, 0), (distance > 0) | (distance < -5)),
        ("no_mask", (3, 7), (distance > 7) | (distance < -3)),
    )
    for (kind, window, hidden), comm in itertools.product(masks, (None, "all_gather", "a2a")):
        right = [one.clone().requires_grad_() for one in whole[:3]]
        mine = [
            overlap_torch.cut_tokens(one.detach(), 0, tokens).clone().requires_grad_()
            for one in right
        ]
        with megatron_groups(ranks):
            own = core_attention(attention_settings(num_query_groups=groups), "arbitrary")
            settings = attention_settings(
                num_query_groups=groups, context_parallel_size=ranks, window_size=window
            )
            ours = core_attention(settings, kind, OverlapDotProductAttention, cp_comm_type=comm)
            expected, found = own(*right, hidden), ours(*mine, None)
        grad = whole[3].flatten(2)
        expected.backward(grad)
        found.backward(overlap_torch.cut_tokens(grad, 0, tokens))
        pairs = [("output", found, expected)]
        pairs += [
            (f"gradient {i}", one.grad, other.grad)
            for i, (one, other) in enumerate(zip(mine, right, strict=True))
        ]
        for name, one, other in pairs:
            part = overlap_torch.cut_tokens(other, 0, tokens)
            error = (one - part).abs().max().item() / other.abs().max().item()
            where = (name, kind, window, comm)
            failures.expect(None if error < 1e-12 else f"off by {error}", *where)


def test_megatron_attention_refuses_by_name(failures: Failures) -> None:
    """The options and masks that a silent attention would get wrong."""
    from megatron.core.transformer.enums import AttnMaskType

    ranks = dist.get_world_size()
    cases = (
        ("attn_mask_type padding", {}, {"kind": "padding"}),
        ("attn_mask_type causal_bottom_right", {}, {"kind": "causal_bottom_right"}),
        ("cross attention", {}, {"attention_type": "cross"}),
        ("a dropout of 0.5", {"attention_dropout": 0.5}, {}),
        ("a dropout of 0.25", {}, {"attention_dropout": 0.25}),
        ("softmax_type='learnable'", {"softmax_type": "learnable"}, {}),
        ("qk_clip=True", {"qk_clip": True}, {}),
        ("log_max_attention_logit=True", {"log_max_attention_logit": True}, {}),
        ("cp_comm_type='a2a+p2p'", {}, {"cp_comm_type": "a2a+p2p"}),
        ("context_parallel_size=4 with", {"context_parallel_size": 4}, {}),
    )
    with megatron_groups(ranks):
        for expected, fields, arguments in cases:
            settings = attention_settings(**{"context_parallel_size": ranks, **fields})
            failures.raises(f"but not {expected}", core_attention, settings, **arguments)
        attention = core_attention(attention_settings(context_parallel_size=ranks))
    q = torch.zeros(4, 1, 12, 4, device=rank_device())
    calls = (
        ("a mask tensor", (q, q, q, q > 0), {}),
        ("an attention_bias", (q, q, q, None), {"attention_bias": q}),
        ("packed_seq_params", (q, q, q, None), {"packed_seq_params": object()}),
        ("attn_mask_type arbitrary", (q, q, q, None), {"attn_mask_type": AttnMaskType.arbitrary}),
        ("a cache (1 queries with 4 keys)", (q[:1], q, q, None), {}),
    )
    for expected, operands, keywords in calls:
        failures.raises(f"but not {expected}", attention, *operands, **keywords)


def test_megatron_gpt_trains_on_a_cut_sequence(failures: Failures) -> None:
    """Losses of this rank's tokens, and gradients that add up to the whole sequence's, beside Megatron's local spec."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from overlap_torch.integrations import megatron

    ranks, device = dist.get_world_size(), rank_device()
    with megatron_groups(ranks):
        torch.manual_seed(1)
        sizes = {"tensor_model_parallel_size": 1, "num_query_groups": 2}
        settings = config(False, **sizes)
        cut = config(False, context_parallel_size=ranks, **sizes)
        positions = "learned_absolute"  # Megatron cuts rotary embeddings on GPUs only
        own = gpt(get_gpt_layer_local_spec(), settings, positions)
        ours = gpt(megatron.gpt_block_spec(cut), cut, positions)
        ours.load_state_dict(own.state_dict())
        tokens = torch.arange(2 * 12, device=device).view(2, 12) * 7 % 64
        at = torch.arange(12, device=device).expand(2, 12)
        mask = torch.ones(1, 1, 12, 12, dtype=torch.bool, device=device).triu(1)
        right = own(tokens, at, mask, labels=tokens)
        right.sum().backward()
        mine = [overlap_torch.cut_tokens(one, 1, "zigzag") for one in (tokens, at, right)]
        found = ours(*mine[:2], None, labels=mine[0])
        found.sum().backward()
    failures.expect(close(found, mine[2]), "losses")
    for (name, parameter), other in zip(ours.named_parameters(), own.parameters(), strict=True):
        dist.all_reduce(parameter.grad)
        failures.expect(close(parameter.grad, other.grad), "gradient", name)
