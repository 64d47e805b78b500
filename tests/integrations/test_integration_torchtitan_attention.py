"""torchtitan's FlexAttention over ranks: the whole sequence's results and gradients, and every mask that is refused."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention

from checks import Failures, message_of
from frameworks import needs_torchtitan
from operands import rank_device

pytestmark = [needs_torchtitan, pytest.mark.ranks((2, "gloo"), (2, "nccl"))]


def mesh_of():
    return init_device_mesh(rank_device().type, (dist.get_world_size(),), mesh_dim_names=("cp",))


def mask_of(*mask_mods, batch: int, total: int):
    """The whole sequence's block mask, as a decoder of torchtitan makes it."""
    from torch.nn.attention.flex_attention import and_masks, create_block_mask

    mask_mod = and_masks(*mask_mods) if len(mask_mods) > 1 else mask_mods[0]
    return create_block_mask(mask_mod, batch, None, total, total, device=rank_device())


def packed(positions: torch.Tensor):
    from torchtitan.models.common import attention

    return [
        attention.get_causal_mask_mod(),
        attention.get_efficient_causal_mask_mod_for_packed_document(positions),
    ]


def cut(mask, inputs: list[torch.Tensor], balancer: str | None):
    """This rank's part, as torchtitan's trainer cuts a batch, without the time of a compiler."""
    from torchtitan.distributed.context_parallel import cp_shard

    with mock.patch.object(torch, "compile", lambda function, **_: function):
        return cp_shard(mesh_of(), tuple(inputs), mask, balancer)


def attention(**fields: object):
    """The module that the override makes of torchtitan's configuration."""
    from torchtitan.models.common.attention import FlexAttention

    from overlap_torch.integrations.torchtitan_attention import flex_attention

    config = flex_attention(FlexAttention.Config())
    for name, value in fields.items():
        setattr(config, name, value)
    module = config.build()
    module.over(mesh_of())
    return module


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.ranks(*((ranks, "gloo") for ranks in (1, 2, 3, 4)), (2, "nccl"))
def test_torchtitan_attention_is_the_whole_sequences(failures: Failures, batch: int) -> None:
    """Beside PyTorch's attention with the dense mask, in float64."""
    from torch.nn.attention.flex_attention import create_mask

    total, device = 128 * dist.get_world_size(), rank_device()
    generator = torch.Generator().manual_seed(1)
    whole = [
        torch.randn(batch, total, heads, 8, generator=generator, dtype=torch.float64).to(device)
        for heads in (12, 2, 2, 12)
    ]
    lengths = [total // 3, 1, total - total // 3 - 1] if batch == 1 else [total]
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    for mask_mods in (packed(positions.expand(batch, total)), packed(positions[None])[:1]):
        mask = mask_of(*mask_mods, batch=batch, total=total)
        right = [one.clone().requires_grad_() for one in whole[:3]]
        dense = create_mask(mask.mask_mod, batch, None, total, total, device=device.type)
        operands = [one.transpose(1, 2) for one in right]
        expected = scaled_dot_product_attention(
            *operands, attn_mask=dense, scale=0.3, enable_gqa=True
        ).transpose(1, 2)
        expected.backward(whole[3])
        values = [expected.detach(), *(one.grad for one in right)]
        for balancer in ("headtail", None):
            for parts in (None, 1):
                cut_values, local = cut(mask, [*whole, *values], balancer)
                q, k, v, grad, *parts_of_values = cut_values
                mine = [one.clone().requires_grad_() for one in (q, k, v)]
                found = attention(head_parts=parts)(
                    *mine, attention_masks=local, scale=0.3, enable_gqa=True
                )
                found.backward(grad)
                results = [found, *(one.grad for one in mine)]
                for i, (one, part) in enumerate(zip(results, parts_of_values, strict=True)):
                    where = (i, len(mask_mods), balancer, parts)
                    failures.near(one, part, *where, rtol=0.0, atol=1e-12)


def test_torchtitan_attention_refuses_by_name(failures: Failures) -> None:
    from torchtitan.models.common import attention as own

    total = 256 * dist.get_world_size()
    q = torch.zeros(2, total, 2, 8, device=rank_device())
    positions = torch.arange(total, device=rank_device()).expand(2, total)
    causal = own.get_causal_mask_mod()
    documents = positions % (total // 2)
    cases = (
        ("a sliding window", [own.get_sliding_window_mask_mod(4)], "sliding_window"),
        ("no causal mask", [own.get_document_mask_mod(positions)], "document_mask"),
        ("a chunked mask", [causal, own.get_fixed_block_mask_mod(4)], "blocked_mask_mod"),
        ("documents of a batch", packed(documents), "documents in a local batch of several"),
    )
    for what, mask_mods, expected in cases:
        (own_q,), local = cut(mask_of(*mask_mods, batch=2, total=total), [q], "headtail")
        said = message_of(attention(), own_q, own_q, own_q, attention_masks=local)
        failures.says(said, ("but not", expected), what)
    whole = mask_of(causal, batch=2, total=total)
    (own_q,), local = cut(whole, [q], None)
    _, balanced = cut(whole, [q], "ptrr")
    calls = (
        ("the uncut mask", {"attention_masks": whole}),
        ("a load balancer other than headtail", {"attention_masks": balanced}),
        ("score_mod", {"attention_masks": local, "score_mod": max}),
        ("out_transform", {"attention_masks": local, "out_transform": max}),
        ("a VarlenMetadata as a mask", {"attention_masks": own.VarlenMetadata(q, q, 1, 1)}),
    )
    for expected, keywords in calls:
        failures.raises(f"but not {expected}", attention(), own_q, own_q, own_q, **keywords)
