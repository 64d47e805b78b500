"""Attention kernels: what a caller's looks like, and those that are built in."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import get_device_states, set_device_states

from overlap_torch._attention.work import AttentionWork, Share, one_band, work_of
from overlap_torch._ops.composition import accumulated
from overlap_torch._ops.graphs import constant_in_graphs

_aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
_ALL = (*_HALF, torch.float32, torch.float64)


class AttentionKernel:
    """An attention of your own for :func:`overlap_torch.context_parallel_attention`: subclass it, and say what it takes.

    Attributes:
        name: how errors call it.
        lower_right: True if it takes a causal mask, aligned at the lower right, with fewer queries than keys. If False, it
            gets only calls without a mask, or with as many ``head_parts`` as ranks.
        groups: True if it takes fewer key/value heads than query heads.
        windows: True if it takes ``work.window``.
        documents: True if it takes several documents in one call; if False, each document has a call of its own.
        dtypes: the operands' dtypes that it takes.
    """

    name = "an AttentionKernel"
    lower_right = True
    groups = True
    windows = False
    documents = False
    dtypes: tuple[torch.dtype, ...] = _ALL

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, work: AttentionWork
    ) -> tuple[torch.Tensor, Any]:
        """Returns the output [B, Tq, h, Dv] for q [B, Tq, h, D], k [B, Tk, hkv, D] and v [B, Tk, hkv, Dv], of any strides;
        and a value for ``saved`` of backward. Backward gets q, k and v again: do not keep them."""
        raise NotImplementedError(f"{self.name} has no forward")

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        saved: Any,
        work: AttentionWork,
    ) -> tuple[torch.Tensor, ...]:
        """Returns the gradients of q, k and v, and of each of ``work.per_head``."""
        raise NotImplementedError(f"{self.name} has no backward, but its output requires grad")

    def refused(self, work: AttentionWork, dtype: torch.dtype) -> str:
        """Returns the part of the work that the kernel does not take; "" if it takes all of it."""
        rows, columns = work.queries[1] - work.queries[0], work.keys[1] - work.keys[0]
        if dtype not in self.dtypes:
            return f"operands of {dtype}"
        if work.query_ends and not self.documents:
            return "several documents in one call"
        if work.window is not None and not self.windows:
            return f"a window, {work.window}"
        if work.causal and rows != columns and not self.lower_right:
            return (
                f"a causal mask of {rows} queries with {columns} keys, aligned at the lower right"
            )
        if len(work.kv_heads) != len(work.heads) and not self.groups:
            return f"{len(work.kv_heads)} key/value heads for {len(work.heads)} query heads"
        return ""


@dataclass(frozen=True)
class Traits(AttentionKernel):
    """The attributes of a caller's kernel, by which caches know it: they keep no kernel, and nothing that it reads."""

    name: str
    lower_right: bool
    groups: bool
    windows: bool
    documents: bool
    dtypes: tuple[torch.dtype, ...]


def traits_of(kernel: AttentionKernel) -> AttentionKernel:
    """Its attributes; the kernel itself if it decides by more of its own what it takes."""
    if type(kernel).refused is not AttentionKernel.refused:
        return kernel
    *flags, dtypes = (getattr(kernel, field.name) for field in fields(Traits))
    return Traits(*flags, tuple(dtypes))


def _name_of(function: Callable[..., torch.Tensor]) -> str:
    """A name that is the same on all ranks."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__qualname__", type(function).__qualname__)


class FunctionKernel(AttentionKernel):
    """A function ``(q, k, v, work) -> o``, which autograd differentiates. Backward calls it again, so that nothing gathered is kept:
    with the random numbers and under the autocast of the first call."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        self.function = function
        self.name = _name_of(function)

    def forward(self, q, k, v, work):
        type_ = q.device.type
        cast = torch.is_autocast_enabled(type_), torch.get_autocast_dtype(type_)
        drawn = None  # a generator that is captured into a graph has no state to keep
        if type_ != "cuda" or not torch.cuda.is_current_stream_capturing():
            drawn = torch.get_rng_state(), *get_device_states(q)
        with torch.no_grad():
            return self.function(q, k, v, work), (cast, drawn)

    def backward(self, grad, q, k, v, o, saved, work):
        type_, ((casts, dtype), drawn) = q.device.type, saved
        given = (q, k, v, *work.per_head)
        leaves = [one.detach().requires_grad_(one.is_floating_point()) for one in given]
        changed = AttentionWork(**{**vars(work), "per_head": tuple(leaves[3:])})
        devices = [q.device] if type_ == "cuda" else []
        with contextlib.ExitStack() as restored:
            if drawn is not None:
                restored.enter_context(torch.random.fork_rng(devices))
                torch.set_rng_state(drawn[0])
                set_device_states(*drawn[1:])
            restored.enter_context(torch.autocast(type_, dtype, casts))
            restored.enter_context(torch.enable_grad())
            again = self.function(*leaves[:3], changed)
        self._check_reads(again, leaves)
        asked = [leaf for leaf in leaves if leaf.requires_grad]
        grads = torch.autograd.grad(again, asked, grad, allow_unused=True)
        found = dict(zip(map(id, asked), grads, strict=True))
        return tuple(
            torch.zeros_like(leaf) if (got := found.get(id(leaf))) is None else got
            for leaf in leaves
        )

    def _check_reads(self, output: torch.Tensor, leaves: Sequence[torch.Tensor]) -> None:
        """Raises RuntimeError if the output depends on another tensor that requires grad, which would get none."""
        known, seen, open_ = {id(leaf) for leaf in leaves}, set(), [output.grad_fn]
        while open_:
            node = open_.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if variable is not None and id(variable) not in known:
                raise RuntimeError(
                    f"{self.name} reads a tensor of shape {tuple(variable.shape)} that requires grad and is not among its "
                    "arguments, so it would get no gradient: pass it in per_head, or detach it"
                )
            open_ += [before for before, _ in node.next_functions]


class BuiltInKernel(AttentionKernel):
    """A kernel whose saved things are ``keeps`` tensors; ``widths_fit``: whether it takes sizes of heads."""

    keeps = 1
    scales_mask = False  # a mask's -inf is multiplied by the scale
    pads_keys = False  # a mask hides the end of the last block of keys

    def refused(self, work, dtype):
        masks = self.pads_keys or work.causal or work.window is not None
        if self.scales_mask and masks and work.scale <= 0:
            return f"{'' if self.pads_keys else 'a mask with '}a scale that is not above 0"
        return super().refused(work, dtype)

    def widths_fit(self, width: int, value_width: int) -> bool:
        return True


class _Flash(BuiltInKernel):
    """PyTorch's flash attention, and what ``activate_flash_attention_impl`` puts there; documents are its ragged form."""

    name, windows, documents, dtypes, keeps = "flash", True, True, _HALF, 3
    scales_mask = pads_keys = True

    def widths_fit(self, width, value_width):
        return width == value_width and width % 8 == 0 and width <= 256

    @staticmethod
    def _options(q: torch.Tensor, k: torch.Tensor, work: AttentionWork):
        """The arguments that forward and backward share."""
        limits: dict[str, Any] = {"scale": work.scale}
        if work.window is not None:  # FA4 takes a window that is -1 for a bound
            left, right = (None if side < 0 else side for side in work.window)
            limits |= {"window_size_left": left, "window_size_right": right}
        causal = work.causal and work.window is None
        if work.query_ends:
            return work.cu_seqlens(q.device), causal, limits
        return (None, None, q.shape[1], k.shape[1]), causal, limits

    def forward(self, q, k, v, work):
        lengths, causal, options = self._options(q, k, work)
        operands = [tensor[0] for tensor in (q, k, v)] if work.query_ends else (q, k, v)
        o, lse, state, unused, _ = _aten._flash_attention_forward(
            *operands, *lengths, 0.0, causal, False, **options
        )
        return (o[None] if work.query_ends else o), [lse, state, unused]

    def backward(self, grad, q, k, v, o, saved, work):
        lengths, causal, options = self._options(q, k, work)
        lse, *states = saved
        operands = (grad, q, k, v, o)
        if work.query_ends:
            operands = [tensor[0] for tensor in operands]
        grads = _aten._flash_attention_backward(
            *operands, lse, *lengths, 0.0, causal, *states, **options
        )
        return tuple(one[None] for one in grads) if work.query_ends else tuple(grads)


class _Cudnn(BuiltInKernel):
    """cuDNN's, the fastest in PyTorch on Hopper; its causal mask is aligned at the upper left."""

    name, lower_right, dtypes, keeps = "cudnn", False, _HALF, 3
    scales_mask = pads_keys = True

    def refused(self, work, dtype):
        one_key = work.keys[1] - work.keys[0] == 1
        return "one key" if one_key else super().refused(work, dtype)

    def widths_fit(self, width, value_width):
        return max(width, value_width) <= 128 and width % 8 == 0 and value_width % 8 == 0

    def forward(self, q, k, v, work):
        heads_first = [tensor.transpose(1, 2) for tensor in (q, k, v)]
        o, lse, _, _, _, _, seed, offset, _ = _aten._scaled_dot_product_cudnn_attention(
            *heads_first, None, True, 0.0, work.causal, False, scale=work.scale
        )
        return o.transpose(1, 2), [lse, seed, offset]

    def backward(self, grad, q, k, v, o, saved, work):
        lse, seed, offset = saved
        heads_first = [tensor.transpose(1, 2) for tensor in (grad, q, k, v, o)]
        nothing = [None, None, None, q.shape[1], k.shape[1], 0.0]  # bias, lengths, dropout
        grads = _aten._scaled_dot_product_cudnn_attention_backward(
            *heads_first, lse, seed, offset, *nothing, work.causal, scale=work.scale
        )
        return tuple(one.transpose(1, 2) for one in grads)


class _Cpu(BuiltInKernel):
    """PyTorch's flash attention on CPU."""

    name, lower_right, groups, scales_mask = "cpu", False, False, True

    def widths_fit(self, width, value_width):
        return width == value_width

    def forward(self, q, k, v, work):
        heads_first = [tensor.transpose(1, 2) for tensor in (q, k, v)]
        o, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            *heads_first, 0.0, work.causal, scale=work.scale
        )
        return o.transpose(1, 2), [lse]

    def backward(self, grad, q, k, v, o, saved, work):
        heads_first = [tensor.transpose(1, 2) for tensor in (grad, q, k, v, o)]
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *heads_first, saved[0], 0.0, work.causal, scale=work.scale
        )
        return tuple(one.transpose(1, 2) for one in grads)


class _Masked(BuiltInKernel):
    """Any band in any dtype on any device: products and a mask of positions, one key/value head after the other."""

    name, windows = "masked", True

    @staticmethod
    def _hidden(rows: int, columns: int, work: AttentionWork, device) -> torch.Tensor | None:
        left, right = work.window or (-1, 0 if work.causal else -1)
        if left < 0 and right < 0:
            return None
        distance = torch.arange(columns, device=device) - (
            torch.arange(rows, device=device)[:, None] + (columns - rows)
        )
        hidden = distance > right if right >= 0 else distance > columns
        return hidden | (distance < -left) if left >= 0 else hidden

    @staticmethod
    def _by_head(tensor: torch.Tensor, head: int, heads: int) -> torch.Tensor:
        """[B, T, heads * g, D] to [B, g, T, D] of one key/value head, in the dtype of sums."""
        own = tensor.shape[2] // heads
        part = tensor[:, :, head * own : (head + 1) * own]
        return part.transpose(1, 2).to(accumulated(tensor.dtype))

    def _scores(self, q, k, work, head: int, hidden) -> tuple[torch.Tensor, ...]:
        heads = k.shape[2]
        query, key = self._by_head(q, head, heads), self._by_head(k, head, heads)
        scores = query @ key.transpose(2, 3) * work.scale
        return query, key, scores if hidden is None else scores.masked_fill(hidden, float("-inf"))

    def forward(self, q, k, v, work):
        hidden, outputs, sums = self._hidden(q.shape[1], k.shape[1], work, q.device), [], []
        for head in range(k.shape[2]):
            _, _, scores = self._scores(q, k, work, head, hidden)
            lse = scores.logsumexp(-1)
            shares = (scores - lse[..., None]).exp()
            outputs.append((shares @ self._by_head(v, head, k.shape[2])).to(q.dtype))
            sums.append(lse)
        return torch.cat(outputs, 1).transpose(1, 2), [torch.cat(sums, 1)]

    def backward(self, grad, q, k, v, o, saved, work):
        hidden, heads = self._hidden(q.shape[1], k.shape[1], work, q.device), k.shape[2]
        found: tuple[list, list, list] = ([], [], [])
        sums = saved[0].unflatten(1, (heads, -1))
        for head in range(heads):
            query, key, scores = self._scores(q, k, work, head, hidden)
            value, come = self._by_head(v, head, heads), self._by_head(grad, head, heads)
            shares = (scores - sums[:, head, ..., None]).exp()
            products = come @ value.transpose(2, 3)
            inner = shares * (products - (shares * products).sum(-1, keepdim=True)) * work.scale
            found[0].append(inner @ key)
            found[1].append((inner.transpose(2, 3) @ query).sum(1, keepdim=True))
            found[2].append((shares.transpose(2, 3) @ come).sum(1, keepdim=True))
        return tuple(torch.cat(parts, 1).transpose(1, 2).to(q.dtype) for parts in found)


_MASKED = _Masked()
# The kernels by name: the first that takes a call computes it.
BUILT_IN: dict[str, tuple[BuiltInKernel, ...]] = {
    "flash": (_Flash(),),
    "cudnn": (_Cudnn(),),
    "cpu": (_Cpu(),),
    "masked": (_MASKED,),
    "cudnn or flash": (_Cudnn(), _Flash(), _MASKED),
    "flash or masked": (_Flash(), _MASKED),
    "cpu or masked": (_Cpu(), _MASKED),
}


def kernels_of(kernel: str | AttentionKernel) -> tuple[AttentionKernel, ...]:
    """The kernels of a name in BUILT_IN, or a caller's."""
    return BUILT_IN[kernel] if isinstance(kernel, str) else (kernel,)


@constant_in_graphs
def default_kernels(device: torch.device) -> str:
    """The name in BUILT_IN of what a device's calls take; flash attention that was put in PyTorch's place comes first."""
    if device.type != "cuda":
        return "cpu or masked"
    takes_cudnn = (
        torch.nn.attention.current_flash_attention_impl() is None
        and torch.backends.cuda.cudnn_sdp_enabled()
        and not torch.are_deterministic_algorithms_enabled()
        and _generation(device) in (9, 10)
    )
    return "cudnn or flash" if takes_cudnn else "flash or masked"


@functools.cache
def _generation(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


class Form(NamedTuple):
    """The operands as a kernel is chosen by: B, their dtype, and the sizes of a query's and a value's head."""

    batch: int
    dtype: torch.dtype
    width: int
    value_width: int


# A kernel, its work, and its rows among the queries that are there and among the keys.
Call = tuple[AttentionKernel, AttentionWork, slice, slice]


def _taker(
    kernels: Sequence[AttentionKernel], work: AttentionWork, form: Form
) -> tuple[AttentionKernel | None, str]:
    """The first of the kernels that takes the work, or None and why."""
    said = []
    for kernel in kernels:
        refused = kernel.refused(work, form.dtype)
        widths = (form.width, form.value_width)
        if not refused and isinstance(kernel, BuiltInKernel) and not kernel.widths_fit(*widths):
            refused = f"heads of sizes {widths[0]} (queries, keys) and {widths[1]} (values)"
        if not refused:
            return kernel, ""
        said.append(f"{kernel.name} does not take {refused}")
    return None, "; ".join(said)


def calls_of(
    share: Share, kernels: Sequence[AttentionKernel], form: Form, scale: float
) -> Iterator[Call]:
    """A rank's calls, in order of queries.

    Several documents are one call where a kernel takes them.

    Raises:
        NotImplementedError: no kernel takes a call.
    """
    at = 0
    for run in share.runs:
        calls = [(piece,) for piece in run]
        if len(run) > 1 and form.batch == 1 and one_band(run):
            work = work_of(share, run, scale)
            if _taker(kernels, work, form)[0] is not None:
                calls = [run]
        for pieces in calls:
            work = work_of(share, pieces, scale)
            kernel, why = _taker(kernels, work, form)
            if kernel is None:
                raise NotImplementedError(
                    f"context_parallel_attention: {why}. Leave kernel= out, or give one that takes it; head_parts="
                    f"{share.problem.ranks} gives every kernel all queries and keys"
                )
            rows = work.queries[1] - work.queries[0]
            yield kernel, work, slice(at, at + rows), slice(*work.keys)
            at += rows
