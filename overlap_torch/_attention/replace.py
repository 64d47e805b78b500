"""``overlap_torch.replace_context_parallel()``: callers of PyTorch's ``context_parallel`` get one gather in place of its ring.

PyTorch calls its attention kernel once for each rank's keys, and adds the results by elementwise kernels. Here keys and values are
gathered once, and each run of this rank's queries has one call with all keys that it sees. The kernel is the one that PyTorch
chose, and so are the tensors that it returns.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from overlap_torch._attention.call import total_of
from overlap_torch._attention.exchange import Exchange
from overlap_torch._attention.functions import chunks_over_peers
from overlap_torch._attention.kernels import Form
from overlap_torch._attention.peers import PeerExchange, Route, route_of
from overlap_torch._attention.work import Chunk, Problem, Share, cut_heads, share_of
from overlap_torch._ops.handles import Handle, Held
from overlap_torch._torch_versions import context_parallel_module

_MOST_CHUNKS = 4
_NAMES = ("_templated_ring_attention", "_templated_ring_attention_backward")
_before: dict[str, Callable[..., Any]] = {}
_calls: Counter[tuple[str, str]] = Counter()


class ContextParallelReplacement(Handle):
    """The result of :func:`replace_context_parallel`: undoes it, once, by :meth:`undo` or at the end of a ``with``."""

    @property
    def calls(self) -> dict[tuple[str, str], int]:
        """How often attention ran here, by ("forward" or "backward", why PyTorch's ring ran; "" where it did not)."""
        return dict(_calls)


def _put() -> None:
    module = context_parallel_module()
    for name, function in zip(_NAMES, (_forward, _backward), strict=True):
        _before[name] = getattr(module, name)
        setattr(module, name, function)


def _take() -> None:
    for name, function in _before.items():
        setattr(context_parallel_module(), name, function)
    _before.clear()
    _calls.clear()


_held = Held(_put, _take)


def replace_context_parallel() -> ContextParallelReplacement:
    """Attention under ``torch.distributed.tensor.experimental.context_parallel`` gathers keys and values once, in place of a ring::

        with overlap_torch.replace_context_parallel():
            with context_parallel(mesh, buffers=[tokens, labels], buffer_seq_dims=[1, 1]):
                loss = model(tokens, labels)        # its scaled_dot_product_attention
                loss.backward()

    All ranks of the mesh must replace it, or none. Flash attention's calls take it, causal with PyTorch's load balance (a
    zigzag) or without, and cuDNN's without a mask. PyTorch's own ring runs for others, and ``handle.calls`` counts them with the reason:
    cuDNN's and the efficient kernel's causal masks are aligned at the upper left. Gradients of keys and values are sums in float32,
    in rank order, of terms in their dtype.

    Returns:
        A handle: ``undo()``, or the end of a ``with`` block, puts PyTorch's ring back. A second call of this function returns another
        handle; the last of them to be undone ends the replacement.

    Raises:
        ImportError: a PyTorch whose context_parallel is another.
    """
    _held.hold()
    return ContextParallelReplacement(_held.release)


def _refused(op: Any, is_causal: bool, module: ModuleType) -> str:
    """The reason for PyTorch's own ring, "" if there is none."""
    name = getattr(op, "_qualified_op_name", None) or op.name()
    if "efficient" in name:
        return "the efficient kernel's sums of exponentials are padded"
    if "cudnn" in name and is_causal:
        return "cuDNN's causal mask is aligned at the upper left"
    if not is_causal and module._cp_options.enable_load_balance:
        return "PyTorch refuses load balance without a causal mask"
    return ""


def _share(group: dist.ProcessGroup, query: torch.Tensor, key: torch.Tensor, causal: bool) -> Share:
    zigzag = causal and context_parallel_module()._cp_options.enable_load_balance
    numbers = (query.shape[2],) * group.size()
    right = 0 if causal else None
    problem = Problem(numbers, zigzag, query.shape[1], key.shape[1], None, right, (), 1)
    return share_of(problem, group.rank())


def _exchange(share: Share, query: torch.Tensor, value: torch.Tensor, group: str) -> Exchange:
    form = Form(query.shape[0], query.dtype, query.shape[3], value.shape[3])
    return _known_exchange(share.problem, share.rank, form, group)


@functools.lru_cache(maxsize=64)
def _known_exchange(problem: Problem, rank: int, *others: Any) -> Exchange:
    return Exchange(share_of(problem, rank), *others)


@functools.lru_cache(maxsize=64)
def _route(problem: Problem, form: Form, count: int) -> tuple[Route, str]:
    """The exchange, and what ranks compare of it."""
    chunks = cut_heads(problem.heads, problem.kv_heads, count)
    text = f"a gather of context_parallel, {problem}, {form}"
    return route_of(problem, chunks, form, False), text


@contextlib.contextmanager
def _gathered(
    share: Share, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: str, most: int
) -> Iterator[Iterator[tuple[Chunk, torch.Tensor, torch.Tensor]]]:
    """All keys and values, [B, h, S, D], in at most ``most`` chunks of heads; those that peers carry last until the ``with`` ends."""
    form = Form(query.shape[0], query.dtype, query.shape[3], value.shape[3])
    own = [tensor.transpose(1, 2) for tensor in (key, value)]
    count = min(most, chunks_over_peers(share.problem, form, query.device, group))
    if count == 0:
        exchange = _exchange(share, query, value, group)
        came = exchange.start_in(own[0], *own)()
        keys, values = exchange.heads(came, own[0], *own)[1:]
        (whole,) = cut_heads(query.shape[1], key.shape[1], 1)
        yield iter([(whole, keys.transpose(1, 2), values.transpose(1, 2))])
        return
    route, text = _route(share.problem, form, count)
    with PeerExchange(route, share.rank, query, group, text) as exchange:
        exchange.send(*own)
        yield (
            (chunk, *(one.transpose(1, 2) for one in exchange.came(c)))
            for c, chunk in enumerate(route.chunks)
        )


def _runs(share: Share) -> list[tuple[slice, slice]]:
    """The rows of each run's queries, and of the keys that it sees."""
    found, at = [], 0
    for (piece,) in share.runs:
        rows = piece.queries[1] - piece.queries[0]
        found.append((slice(at, at + rows), slice(*piece.keys)))
        at += rows
    return found


def _forward(group, seq_dim, op, query, key, value, is_causal=False, **options):
    why = _refused(op, is_causal, context_parallel_module())
    _calls["forward", why] += 1
    if why:
        return _before[_NAMES[0]](group, seq_dim, op, query, key, value, is_causal, **options)
    share, name = _share(group, query, key, is_causal), group.group_name
    outputs, sums, rest = [], [], []
    with _gathered(share, query, key, value, name, _MOST_CHUNKS) as came:
        for chunk, keys, values in came:
            own, parts = query[:, chunk.heads.start : chunk.heads.stop], []
            for rows, seen in _runs(share):
                operands = (own[:, :, rows], keys[:, :, seen], values[:, :, seen])
                parts.append(op(*operands, is_causal=is_causal, **options))
            outputs.append(_joined([part[0] for part in parts], 2))
            sums.append(_joined([part[1] for part in parts], 2))
            rest = parts[-1][2:]
    return _joined(outputs, 1), _joined(sums, 1), *rest


def _joined(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _backward(
    group,
    seq_dim,
    op,
    grad_out,
    grad_out_name,
    query,
    key,
    value,
    out,
    logsumexp,
    is_causal,
    **options,
):
    why = _refused(op, is_causal, context_parallel_module())
    _calls["backward", why] += 1
    if why:
        given = (grad_out, grad_out_name, query, key, value, out, logsumexp, is_causal)
        return _before[_NAMES[1]](group, seq_dim, op, *given, **options)
    share, name = _share(group, query, key, is_causal), group.group_name
    for_q, for_k, for_v, rest = [], [], [], []
    with _gathered(share, query, key, value, name, 1) as came:
        ((_, keys, values),) = came
        for rows, seen in _runs(share):
            options[grad_out_name] = grad_out[:, :, rows]
            if "max_q" in options:
                options |= {"max_q": rows.stop - rows.start, "max_k": seen.stop}
            dq, dk, dv, *rest = op(
                query=query[:, :, rows],
                key=keys[:, :, seen],
                value=values[:, :, seen],
                out=out[:, :, rows],
                logsumexp=logsumexp[:, :, rows].contiguous(),
                is_causal=is_causal,
                **options,
            )
            for_q.append((rows, dq.transpose(1, 2)))
            for_k.append((seen, dk.transpose(1, 2)))
            for_v.append((seen, dv.transpose(1, 2)))
    pairs = ((query, for_q), (keys, for_k), (values, for_v))
    start = _exchange(share, query, value, name).start_gradients
    grads = start(*(total_of(like.transpose(1, 2), terms) for like, terms in pairs))()
    return *(grad.transpose(1, 2) for grad in grads), *rest
