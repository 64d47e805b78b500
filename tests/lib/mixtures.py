"""Mixtures of experts by their meaning, for the plug-ins of serving frameworks; and what these plug-ins call and say."""

import contextlib
import math
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn import functional

import overlap_torch
from checks import Failures
from overlap_torch.integrations import _serving

H, INNER, CHOICES = 16, 8, 3

Tokens = tuple[torch.Tensor, ...]  # hidden states, ids of experts, shares
Make = Callable[["Mixture"], Callable[..., Any]]  # a layer of experts, called with a rank's tokens


def silu(gate: torch.Tensor, alpha: float = 1.0) -> torch.Tensor:
    return gate * torch.sigmoid(alpha * gate)


def gelu(gate: torch.Tensor) -> torch.Tensor:
    return gate * (1 + torch.erf(gate / math.sqrt(2))) / 2


def clamped(
    gate: torch.Tensor, up: torch.Tensor, limit: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return gate.clamp(max=limit), up.clamp(-limit, limit)


def oai(gate, up, limit: float, alpha: float, beta: float) -> torch.Tensor:
    gate, up = clamped(gate, up, limit)
    return silu(gate, alpha) * (up + beta)


# vLLM's names of activations: the options of a configuration, and the meaning of a product's columns.
ACTIVATIONS = {
    "silu": ({}, lambda p: silu(p[:, :INNER]) * p[:, INNER:]),
    "silu of limited numbers": (
        {"swiglu_limit": 0.4},
        lambda p: oai(p[:, :INNER], p[:, INNER:], 0.4, 1.0, 0.0),
    ),
    "gelu": ({}, lambda p: gelu(p[:, :INNER]) * p[:, INNER:]),
    "gelu_tanh": ({}, lambda p: functional.gelu(p[:, :INNER], approximate="tanh") * p[:, INNER:]),
    "silu_no_mul": ({}, silu),
    "gelu_no_mul": ({}, gelu),
    "swigluoai": ({}, lambda p: oai(p[:, 0::2], p[:, 1::2], 7.0, 1.702, 1.0)),
    "swigluoai_uninterleave": (
        {"swiglu_limit": 0.3, "swiglu_alpha": 1.5, "swiglu_beta": 0.5},
        lambda p: oai(p[:, :INNER], p[:, INNER:], 0.3, 1.5, 0.5),
    ),
}


class Mixture:
    """Weights of all experts, the same on all ranks, and each rank's tokens."""

    def __init__(self, dtype: torch.dtype, width: int, experts: int) -> None:
        self.generator, self.dtype, self.experts = torch.Generator().manual_seed(3), dtype, experts
        self.gate_up, self.down = self.draw(experts, width, H), self.draw(experts, H, INNER)
        self.biases = self.draw(experts, width), self.draw(experts, H)

    def draw(self, *shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=self.generator) / 2).to(self.dtype)

    def tokens(self, numbers: list[int], choices: int) -> tuple[torch.Tensor, ...]:
        """This rank's, and distinct experts with their shares; an id of -1 is a token's in a graph's padding."""
        given = []
        for number in numbers:
            order = torch.rand(number, self.experts, generator=self.generator).argsort(1)
            ids = order[:, :choices].to(torch.int32)
            if number > 2:
                ids[-1] = -1
            shares = torch.rand(number, choices, generator=self.generator)
            given.append((self.draw(number, H), ids, shares))
        return given[dist.get_rank()]

    def part(self, begin: int, number: int) -> SimpleNamespace:
        """A rank's experts, as a layer of the frameworks has them."""
        names = ("w13_weight", "w2_weight", "w13_bias", "w2_bias")
        whole = (self.gate_up, self.down, *self.biases)
        parts = [each[begin : begin + number] for each in whole]
        return SimpleNamespace(**dict(zip(names, parts, strict=True)))

    def meaning(self, x, ids, shares, activation, biased=False, on_input=False) -> torch.Tensor:
        """Each choice's expert, one after the other, in float64."""
        x, shares = x.double(), shares.double()
        total = torch.zeros_like(x)
        for token, choice in (ids >= 0).nonzero().tolist():
            expert, share = ids[token, choice].item(), shares[token, choice]
            row = x[token] * share if on_input else x[token]
            product = self.gate_up[expert].double() @ row
            product = product + (self.biases[0][expert].double() if biased else 0)
            result = self.down[expert].double() @ activation(product[None])[0]
            result = result + (self.biases[1][expert].double() if biased else 0)
            total[token] += result if on_input else share * result
        return total


def near(failures: Failures, found: Any, right: torch.Tensor, dtype: torch.dtype, *where) -> None:
    """Within the rounding of the dtype: a product, the hidden numbers, a result, and the sum."""
    same = isinstance(found, torch.Tensor) and found.shape == right.shape and found.dtype == dtype
    failures.expect(None if same else f"found {found!r}"[:200], *where)
    if same:
        step = {torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
        failures.near(found.double(), right, *where, rtol=step, atol=step * 2)


@contextlib.contextmanager
def limits_of_calls():
    """The limits of each of the plug-ins' calls of `moe`, in the end."""
    found: list[tuple[Any, Any]] = []
    with mock.patch.object(_serving, "moe", wraps=overlap_torch.moe) as called:
        yield found
    names = ("max_tokens", "max_rows")
    found += [tuple(call.kwargs.get(name) for name in names) for call in called.call_args_list]


def warned(job) -> tuple[Any, list[str]]:
    """The job's result, and what the plug-ins say for the first time in it."""
    _serving.say.cache_clear()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = job()
    return result, [str(each.message) for each in found]


def check_exchange(
    failures: Failures, make: Make, mixture: Mixture, tokens: Tokens, limits, right, *where
) -> None:
    """One layer's call is one of `moe` with these limits, its result is right, and nothing is said."""
    with limits_of_calls() as called, torch.inference_mode():
        found, said = warned(lambda: make(mixture)(*tokens))
    failures.equal((called, said), ([limits], []), *where)
    near(failures, found, right, mixture.dtype, *where)


def check_left(
    failures: Failures, make: Make, mixture: Mixture, tokens: Tokens, name: str, why: str, *where
) -> None:
    """Calls of two layers are the framework's, which is said once, with the reason."""
    framework = {"vllm": "vLLM", "sglang": "SGLang"}[name]
    with limits_of_calls() as called:
        found, said = warned(lambda: [make(mixture)(*tokens) for _ in range(2)])
    failures.equal((called, found), ([], [f"{framework}'s own"] * 2), *where)
    text = f"OVERLAP_{name.upper()}=1: {framework}'s own experts run, without overlap_torch.moe: "
    failures.equal([why in line and line.startswith(text) for line in said], [True], *where, *said)
