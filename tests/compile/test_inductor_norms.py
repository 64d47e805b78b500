"""The compile pass on all-reduces with a residual and an RMSNorm after them: one op, and what is left alone."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from test_inductor import Pattern, check_patterns
from torch.nn.functional import linear, rms_norm

from checks import Failures


def llama_norm(rows, gain):
    """As transformers' Llama has it: rounded before the gain."""
    wide = rows.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return gain * wide.to(rows.dtype)


def gemma_norm(rows, gain):
    wide = rows.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (wide * (1.0 + gain.float())).type_as(rows)


def plain_norm(rows, gain):
    return rms_norm(rows, gain.shape, gain, 1e-6)


def half_layer(norm):
    """The sum is read twice: by the norm, and as the next half layer's residual."""

    def run(c, x, w, residual, gain):
        residual = residual + c.all_reduce(linear(x, w))
        return norm(residual, gain), residual * 2

    return run


def two_half_layers(c, x, w, residual, gain, v):
    residual = residual + c.all_reduce(linear(x, w))
    residual = residual + c.all_reduce(linear(llama_norm(residual, gain), v))
    return llama_norm(residual, gain), residual


def embedding_and_norm(c, x, gain):
    """Nothing is added, and no GEMM stands before it."""
    rows = c.all_reduce(x * 2)
    return plain_norm(rows, gain), rows


def squares_read(c, x, w, gain):
    wide = c.all_reduce(linear(x, w)).float()
    squares = wide.pow(2)
    norm = wide * torch.rsqrt(squares.mean(-1, keepdim=True) + 1e-5)
    return gain * norm.to(gain.dtype), squares.sum(-1)


def norm_of_the_sum_alone(c, x, w, gain):
    return llama_norm(c.all_reduce(linear(x, w)), gain)


_HALF = ((2, 3, 5), (16, 5), (2, 3, 16), (16,))
fused = partial(
    Pattern, ops="allreduce_rmsnorm", rows="gemm_allreduce_rmsnorm", dtype=torch.bfloat16
)
apart = partial(Pattern, ops="gemm_allreduce", dtype=torch.bfloat16)
NORMS = {
    "half layer, rms_norm": fused(half_layer(plain_norm), _HALF),
    "half layer, Llama": fused(half_layer(llama_norm), _HALF),
    "half layer, Gemma": fused(half_layer(gemma_norm), _HALF),
    "half layer in float16": fused(half_layer(llama_norm), _HALF, dtype=torch.float16),
    "half layer with a bias": fused(
        lambda c, x, w, residual, gain, b: llama_norm((c.all_reduce(linear(x, w)) + b) + residual, gain), (*_HALF, (16,))),
    "two half layers": fused(
        two_half_layers, (*_HALF, (16, 16)), ops="allreduce_rmsnorm allreduce_rmsnorm",
        rows="gemm_allreduce_rmsnorm gemm_allreduce_rmsnorm"),
    "all-reduce and norm": fused(embedding_and_norm, ((2, 3, 16), (16,)), rows="allreduce_rmsnorm"),
    "GEMM, all-reduce and norm": fused(norm_of_the_sum_alone, ((6, 5), (16, 5), (16,))),
    # More rows than gain, columns that the kernels do not take, a dtype likewise, another reader in between, another
    # axis, a gain that is computed.
    "more rows": apart(half_layer(llama_norm), ((513, 5), (16, 5), (513, 16), (16,))),
    "odd columns": apart(half_layer(llama_norm), ((3, 5), (12, 5), (3, 12), (12,))),
    "float32": apart(half_layer(plain_norm), _HALF, dtype=torch.float32),
    "the product read, too": apart(
        lambda c, x, w, residual, gain: (lambda s: (llama_norm(residual + s, gain), s.relu()))(c.all_reduce(linear(x, w))),
        _HALF),
    "the squares read, too": apart(squares_read, ((6, 5), (16, 5), (16,))),
    "a gain of the sum": apart(
        lambda c, x, w, residual: (lambda s: llama_norm(s, s[0, 0]))(residual + c.all_reduce(linear(x, w))), _HALF[:3]),
}  # fmt: skip


@pytest.mark.ranks((2, "gloo"))
def test_inductor_fuses_norms_after_all_reduces(failures: Failures) -> None:
    """Bit for bit as PyTorch's operators without a compiler: the op on CPU is those, and no code is generated beside it."""
    check_patterns(failures, NORMS)
