"""The compile pass on all-reduces with a residual and an RMSNorm after them: one op, and what is left alone."""

from __future__ import annotations

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
_BF16 = (torch.bfloat16,) * 5
NORMS = {
    "half layer, rms_norm": Pattern(
        half_layer(plain_norm), _HALF, {"allreduce_rmsnorm": 1}, _BF16[:4]
    ),
    "half layer, Llama": Pattern(
        half_layer(llama_norm), _HALF, {"allreduce_rmsnorm": 1}, _BF16[:4]
    ),
    "half layer, Gemma": Pattern(
        half_layer(gemma_norm), _HALF, {"allreduce_rmsnorm": 1}, _BF16[:4]
    ),
    "half layer in float16": Pattern(
        half_layer(llama_norm), _HALF, {"allreduce_rmsnorm": 1}, (torch.float16,) * 4
    ),
    "half layer with a bias": Pattern(
        lambda c, x, w, residual, gain, b: llama_norm(
            (c.all_reduce(linear(x, w)) + b) + residual, gain
        ),
        (*_HALF, (16,)),
        {"allreduce_rmsnorm": 1},
        _BF16,
    ),
    "two half layers": Pattern(
        two_half_layers, (*_HALF, (16, 16)), {"allreduce_rmsnorm": 2}, _BF16
    ),
    "all-reduce and norm": Pattern(
        embedding_and_norm, ((2, 3, 16), (16,)), {"allreduce_rmsnorm": 1}, _BF16[:2]
    ),
    "GEMM, all-reduce and norm": Pattern(
        norm_of_the_sum_alone, ((6, 5), (16, 5), (16,)), {"allreduce_rmsnorm": 1}, _BF16[:3]
    ),
    # More rows than gain, columns that the kernels do not take, a dtype likewise, another reader in between, another
    # axis, a gain that is computed.
    "more rows": Pattern(
        half_layer(llama_norm),
        ((513, 5), (16, 5), (513, 16), (16,)),
        {"gemm_allreduce": 1},
        _BF16[:4],
    ),
    "odd columns": Pattern(
        half_layer(llama_norm), ((3, 5), (12, 5), (3, 12), (12,)), {"gemm_allreduce": 1}, _BF16[:4]
    ),
    "float32": Pattern(half_layer(plain_norm), _HALF, {"gemm_allreduce": 1}),
    "the product read, too": Pattern(
        lambda c, x, w, residual, gain: (lambda s: (llama_norm(residual + s, gain), s.relu()))(
            c.all_reduce(linear(x, w))
        ),
        _HALF,
        {"gemm_allreduce": 1},
        _BF16[:4],
    ),
    "the squares read, too": Pattern(
        squares_read, ((6, 5), (16, 5), (16,)), {"gemm_allreduce": 1}, _BF16[:3]
    ),
    "a gain of the sum": Pattern(
        lambda c, x, w, residual: (lambda s: llama_norm(s, s[0, 0]))(
            residual + c.all_reduce(linear(x, w))
        ),
        _HALF[:3],
        {"gemm_allreduce": 1},
        _BF16[:3],
    ),
}


@pytest.mark.ranks((2, "gloo"))
def test_inductor_fuses_norms_after_all_reduces(failures: Failures) -> None:
    """Bit for bit as PyTorch's operators without a compiler: the op on CPU is those, and no code is generated beside it."""
    check_patterns(failures, list(NORMS), False, NORMS)
