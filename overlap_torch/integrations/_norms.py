"""Decoder layers like Llama's, in which all-reduce, residual addition and RMSNorm are one op if rows are few.

Such a layer has ``input_layernorm``, ``self_attn.o_proj``, ``post_attention_layernorm`` and ``mlp.down_proj``; its
row-parallel linears are those of :mod:`overlap_torch.parallel`. If asked, a linear also adds the residual and computes the
next norm. The norm then returns this result when it is called with the sum.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch.distributed.tensor import DTensor

from overlap_torch._layers.dtensor import is_foreign
from overlap_torch._layers.rmsnorm import MOST_ROWS, gemm_allreduce_rmsnorm, kernels_finish
from overlap_torch._watch.report import add_note, note_call, remove_note
from overlap_torch.parallel import OverlapRowwiseLinear

_AFTER, _PROMISED, _FUSION, _NEXT = (
    f"_overlap_{name}" for name in ("after", "promised", "fusion", "next")
)


class Fusion:
    """The layers of a model, and the counts of fused and other calls."""

    def __init__(self, layers: Sequence[torch.nn.Module], last_norm: torch.nn.Module) -> None:
        self.calls: Counter[str] = Counter()
        self._layers, self._before = layers, []
        norms = [layer.input_layernorm for layer in layers[1:]] + [last_norm]
        for layer, norm in zip(layers, norms, strict=True):
            layer.__dict__[_FUSION], layer.__dict__[_NEXT] = self, norm
            for module, kind in (
                (layer, Layer),
                (layer.self_attn.o_proj, _Linear),
                (layer.mlp.down_proj, _Linear),
                (layer.post_attention_layernorm, _Norm),
                (norm, _Norm),
            ):
                self._before.append((module, type(module)))
                module.__class__ = _of_both(kind, type(module))
        add_note(layers[0], self.lines)

    def undo(self) -> None:
        for module, kind in self._before:
            module.__class__ = kind
        for layer in self._layers:
            del layer.__dict__[_FUSION], layer.__dict__[_NEXT]
        remove_note(self._layers[0])

    def lines(self) -> Iterator[str]:
        yield f"all-reduce, addition and RMSNorm as one op: {self.calls['']} calls of layers"
        for why, calls in sorted(self.calls.items()):
            if why:
                yield f"all-reduce, addition and RMSNorm one after the other: {calls} calls of layers, {why}"


@functools.cache
def _of_both(first: type, kind: type) -> type:
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (first, kind), names)


def refused(layer: torch.nn.Module) -> str:
    """The part of a layer that no op takes, or ""."""
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        linear = layer.get_submodule(name)
        if not isinstance(linear, OverlapRowwiseLinear):
            return f"{name} is a {type(linear).__name__}, not this package's row-parallel linear"
        replicated = linear.output_layout.is_replicate() and linear.use_local_output
        if not replicated or not linear.input_layout.is_shard():
            return f"{name} has the layouts {linear.input_layout} and {linear.output_layout}"
        if linear.bias is not None or linear.fp8 is not None or is_foreign(linear.weight):
            return f"{name} has a bias or a quantized weight"
        if linear.in_features % linear.world_size != 0:
            return (
                f"{name}'s {linear.in_features} features do not divide by {linear.world_size} ranks"
            )
    for name in ("input_layernorm", "post_attention_layernorm"):
        norm = layer.get_submodule(name)
        if isinstance(norm.weight, DTensor) or "forward" in norm.__dict__:
            return f"{name} has a style or a forward of its own"
    return ""


def _why_not(hidden: torch.Tensor, weight: torch.Tensor) -> str:
    """The reason why a call runs as the model says, or "" if it is fused."""
    if torch.is_grad_enabled():
        return "gradients are recorded"
    if torch.is_inference_mode_enabled():
        return "torch.inference_mode hides changes in place; torch.no_grad does not"
    if hidden.numel() > MOST_ROWS * hidden.shape[-1]:
        return f"more than {MOST_ROWS} rows"
    if not kernels_finish(hidden.dtype, hidden.shape[-1]) or hidden.dtype != weight.dtype:
        return f"rows of {hidden.shape[-1]} {hidden.dtype}, which no kernel takes"
    if type(hidden) is not torch.Tensor or torch.is_autocast_enabled(hidden.device.type):
        return "hidden states of a tensor subclass, or autocast"
    return ""


class Layer:
    """A decoder layer, whose halves end in `_Linear`."""

    def forward(self, hidden_states: torch.Tensor, *args, **keywords):
        if torch.compiler.is_compiling():  # the compile pass finds the norms
            return super().forward(hidden_states, *args, **keywords)
        norm = self.post_attention_layernorm
        why = "positional arguments" if args else _why_not(hidden_states, norm.weight)
        if self.self_attn.o_proj._forward_hooks or self.mlp.down_proj._forward_hooks:
            why = "a linear has forward hooks"
        self.__dict__[_FUSION].calls[why] += 1
        if why:
            return super().forward(hidden_states, *args, **keywords)
        normed = self.input_layernorm(hidden_states)
        out, down = self.self_attn.o_proj.__dict__, self.mlp.down_proj.__dict__
        try:
            out[_AFTER] = hidden_states, norm
            total, *_ = self.self_attn(hidden_states=normed, **keywords)
            total = hidden_states + total if _AFTER in out else total
            down[_AFTER] = total, self.__dict__[_NEXT]
            result = self.mlp(norm(total))
            return total + result if _AFTER in down else result
        finally:  # if an error came before the linear, or a wrapper took its place
            out.pop(_AFTER, None)
            down.pop(_AFTER, None)


class _Linear:
    """A row-parallel linear that, if asked, adds a residual and computes the norm after it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        after = self.__dict__.pop(_AFTER, None)
        if after is None:
            return super().forward(input)
        residual, norm = after
        note_call(self, input)
        weight, _ = self._local_parameters(input)
        normed, total = gemm_allreduce_rmsnorm(
            input,
            weight,
            residual,
            norm.weight,
            group=self.group,
            eps=norm.variance_epsilon,
            round_before_gain=True,
            fused=True,
        )
        norm.__dict__[_PROMISED] = total, total._version, normed
        return total


class _Norm:
    """An RMSNorm whose result may already have been computed."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        total, version, normed = self.__dict__.pop(_PROMISED, (None, 0, None))
        if total is hidden_states and version == hidden_states._version:
            return normed
        return super().forward(hidden_states)
