"""PyTorch's context_parallel with a gather in place of its ring: its results, its kernels, what is left to it, undoing."""

import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import overlap_torch
from checks import Failures, message_of
from operands import rank_device
from overlap_torch._attention import replace
from overlap_torch._torch_versions import context_parallel_module
from peer_copies import over_peers

aten = torch.ops.aten


def hidden_of(q: torch.Tensor, k: torch.Tensor, is_causal: bool) -> torch.Tensor:
    rows, columns = q.shape[2], k.shape[2]
    hidden = torch.ones(rows, columns, dtype=torch.bool).triu(columns - rows + 1)
    return hidden if is_causal else torch.zeros_like(hidden)


def flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    """Flash attention's contract on CPU: lower right, sums of exponentials, the tuple."""
    scores = q @ k.transpose(2, 3) * (scale or q.shape[3] ** -0.5)
    scores = scores.masked_fill(hidden_of(q, k, is_causal), -torch.inf)
    lse, state = scores.logsumexp(-1), torch.empty((), dtype=torch.int64)
    o = (scores - lse[..., None]).exp() @ v
    return o, lse, None, None, q.shape[2], k.shape[2], state, state, state


def flash_backward(
    grad, q, k, v, o, lse, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, seed, offset, *, scale=None
):  # fmt: skip
    assert (max_q, max_k) == (q.shape[2], k.shape[2]) or not overlap_torch._attention.replace._held
    scale = scale or q.shape[3] ** -0.5
    scores = q @ k.transpose(2, 3) * scale
    shares = (scores - lse[..., None]).exp().masked_fill(hidden_of(q, k, is_causal), 0)
    inner = grad @ v.transpose(2, 3) - (grad * o).sum(-1, keepdim=True)
    inner = shares * inner * scale
    return inner @ k, inner.transpose(2, 3) @ q, shares.transpose(2, 3) @ grad


@functools.cache
def cpu_flash() -> torch.library.Library:
    """A kernel for PyTorch's operators, which have none on CPU."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", flash, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", flash_backward, "CPU")
    return library


def attention(causal: bool) -> list[torch.Tensor]:
    """Output, sums of exponentials, and gradients of this rank's tokens, through PyTorch's dispatch."""
    rank, device = dist.get_rank(), rank_device()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(rank)
    dtype = torch.float64 if device.type == "cpu" else torch.bfloat16
    own = [torch.randn(2, 4, 6, 8, generator=generator).to(device, dtype) for _ in range(4)]
    q, k, v = (DTensor.from_local(one, mesh, [Shard(2)]).requires_grad_() for one in own[:3])
    o, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, is_causal=causal)
    o.backward(DTensor.from_local(own[3], mesh, [Shard(2)]))
    return [one.to_local().detach() for one in (o, lse, q.grad, k.grad, v.grad)]


@pytest.mark.ranks((2, "gloo"), (3, "gloo"), (2, "nccl"))
def test_context_parallel_is_pytorchs(failures: Failures) -> None:
    check_replaced(failures)


@pytest.mark.ranks((3, "gloo"))
def test_context_parallel_over_peers_is_pytorchs(failures: Failures) -> None:
    with mock.patch.object(replace, "chunks_over_peers", lambda *call: 2), over_peers():
        check_replaced(failures)


def check_replaced(failures: Failures) -> None:
    module = context_parallel_module()
    if rank_device().type == "cpu":
        cpu_flash()
    rings = module._templated_ring_attention, module._templated_ring_attention_backward
    bound = 1e-12 if rank_device().type == "cpu" else 0.02  # of bfloat16, some roundings
    # PyTorch adds float64's blocks in float32.
    module._cp_options.convert_to_f32 = rank_device().type != "cpu"
    module._enable_context_parallel_dispatcher()
    try:
        for causal, balance in ((True, True), (True, False), (False, False)):
            module._cp_options.enable_load_balance = balance
            right = attention(causal)
            with overlap_torch.replace_context_parallel() as handle:
                with overlap_torch.replace_context_parallel():
                    found = attention(causal)
                expected = {("forward", ""): 1, ("backward", ""): 1}
                calls = None if handle.calls == expected else f"calls {handle.calls}"
                failures.expect(calls, causal, balance)
                again = message_of(module._templated_ring_attention, dist.group.WORLD, 2,
                    aten._scaled_dot_product_efficient_attention, *[torch.zeros(1, 1, 2, 8)] * 3, is_causal=True, attn_bias=None,
                    compute_log_sumexp=True)  # fmt: skip
                why = "the efficient kernel's sums of exponentials are padded"
                took = (
                    None
                    if ("forward", why) in handle.calls and again
                    else f"{handle.calls} {again}"
                )
                failures.expect(took, "left to PyTorch")
            for name, mine, value in zip(("o", "lse", "dq", "dk", "dv"), found, right, strict=True):
                error = ((mine - value).abs() / value.abs().clamp(min=1)).max().item()
                failures.expect(None if error < bound else f"off by {error}", name, causal, balance)
        back = (module._templated_ring_attention, module._templated_ring_attention_backward)
        failures.equal(back, rings, "not undone")
    finally:
        module._cp_options.enable_load_balance = module._cp_options.convert_to_f32 = True
        module._disable_context_parallel_dispatcher()
