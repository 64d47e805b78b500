"""``context_parallel_attention``: its checks, and the choice of head parts and of what carries them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from overlap_torch._attention import ops
from overlap_torch._attention.call import Attention
from overlap_torch._attention.cuts import Documents, Tokens, numbers_of
from overlap_torch._attention.kernels import (
    AttentionKernel,
    Form,
    FunctionKernel,
    calls_of,
    default_kernels,
    kernels_of,
    traits_of,
)
from overlap_torch._attention.peers import route_of, takes
from overlap_torch._attention.work import Problem, cut_heads, parts_allowed, seconds, share_of
from overlap_torch._layers.linear import as_under_autocast
from overlap_torch._layers.sharding import checked_integer, checked_number
from overlap_torch._ops.fakes import DTYPES
from overlap_torch._ops.gradients import refuse_tangents, refuse_transforms
from overlap_torch._ops.graphs import constant_in_graphs, outside_graphs
from overlap_torch._ops.group import Group, group_name, place_of, reaches
from overlap_torch._ops.nested import check_tensors
from overlap_torch._ops.ways import note_way

_WHAT = "context_parallel_attention"
_MOST_CHUNKS = 4
_CHUNK_S = 60e-6  # of a chunk's wait, launch and copies
_SLOWED = 0.05  # the part that several chunks add to an attention
_COMPILED = "overlap_torch.context_parallel_attention runs a kernel of the caller's, which torch.compile cannot trace: it breaks the graph"

Kernel = AttentionKernel | Callable[..., torch.Tensor] | str | None


class _Operand(NamedTuple):
    """A tensor as it is checked."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def _check_operands(q: _Operand, k: _Operand, v: _Operand) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if len(tensor.shape) != 4:
            raise ValueError(
                f"{_WHAT} takes q, k and v [B, T, H, D], but {name} is {tuple(tensor.shape)}"
            )
        if tensor.dtype not in DTYPES or tensor.dtype != q.dtype:
            raise TypeError(
                f"{_WHAT} takes q, k and v of one dtype, bfloat16, float16, float32 or float64, but they are {q.dtype}, {k.dtype} "
                f"and {v.dtype}"
            )
        if tensor.device != q.device:
            raise ValueError(
                f"{_WHAT} takes q, k and v on one device, but {name} is on {tensor.device}, q on {q.device}"
            )
    fits = q.shape[:2] == k.shape[:2] == v.shape[:2] and k.shape[2] == v.shape[2]
    if not fits or q.shape[3] != k.shape[3] or 0 in (*q.shape[2:], *v.shape[2:]):
        raise ValueError(
            f"{_WHAT} takes q [B, T, H, D], k [B, T, Hkv, D] and v [B, T, Hkv, Dv], this rank's tokens in each, but they are "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if q.shape[2] % k.shape[2] != 0:
        raise ValueError(
            f"{_WHAT}: {q.shape[2]} query heads are no multiple of {k.shape[2]} key/value heads; repeat k and v so that they are"
        )


def _integer(name: str, value: int | None) -> int | None:
    return None if value is None else operator.index(checked_integer(f"{_WHAT}: {name}", value))


def _band(causal: bool, window) -> tuple[int | None, int | None]:
    """How far before and after itself a token sees; None: without bound."""
    if window is None:
        return None, 0 if causal else None
    if not isinstance(window, tuple) or len(window) != 2:
        raise ValueError(
            f"window is (left, right), how many tokens before and after its own a query sees, None for no bound, but got {window!r}; a "
            "window of W tokens that ends at the query's own is (W - 1, 0)"
        )
    left, right = window
    if any(side is not None and side < 0 for side in (left, right)):
        raise ValueError(
            f"window={window} has a negative side; give None for no bound, or 0 for none of the tokens on that side"
        )
    if causal and right not in (0, None):
        raise ValueError(
            f"causal=True sees no later token, but window={window} asks for {right} of them; give (left, 0)"
        )
    return left, 0 if causal else right


def _documents(documents: Documents | None, total: int, batch: int) -> tuple[int, ...]:
    if documents is None:
        return ()
    lengths = tuple([operator.index(length) for length in documents.lengths])
    if sum(lengths) != total:
        raise ValueError(
            f"documents have {sum(lengths)} tokens, but the whole sequence, over all ranks, has {total}"
        )
    if batch != 1 and len(lengths) > 1:
        raise ValueError(
            f"documents lie in one sequence, B = 1, but B is {batch}; put the sequences of the batch one after the other"
        )
    return lengths if len(lengths) > 1 else ()


def _kernel(kernel: Kernel, device: torch.device) -> Kernel:
    """A key of BUILT_IN, or a caller's kernel or function."""
    if kernel is None:
        return default_kernels(device)
    if isinstance(kernel, str):
        names = ("flash", "cudnn", "cpu", "masked")
        if kernel not in names:
            raise ValueError(
                f"the kernels that are built in are {', '.join(names)}, but got kernel={kernel!r}"
            )
        if (kernel == "cpu") != (device.type == "cpu") and kernel != "masked":
            raise ValueError(f"kernel={kernel!r} does not run on {device}; leave it out")
        return kernel
    if isinstance(kernel, AttentionKernel):
        return kernel
    if not callable(kernel):
        raise TypeError(
            f"kernel is None, a name, an AttentionKernel or a function (q, k, v, work) -> o, but got {type(kernel).__name__}"
        )
    return kernel


@functools.lru_cache(maxsize=256)
def check_calls(
    problem: Problem, kernel: str | AttentionKernel, form: Form, scale: float = 1.0
) -> None:
    """Raises NotImplementedError, on every rank alike, if a call of some rank is one that no kernel takes."""
    for rank in range(problem.ranks):
        for _ in calls_of(share_of(problem, rank), kernels_of(kernel), form, scale):
            pass


@functools.lru_cache(maxsize=256)
def choose_parts(
    problem: Problem,
    kernel: str | AttentionKernel,
    form: Form,
    backward: bool,
    scale: float = 1.0,
) -> int:
    """The head parts of the least expected time, among those that heads and kernels allow; see `seconds`.

    Raises:
        NotImplementedError: the kernel takes none.
    """
    fastest, found, why = kernels_of(kernel)[0], [], []
    for parts in reversed(parts_allowed(problem.ranks, problem.heads, problem.kv_heads)):
        candidate = problem._replace(parts=parts)
        try:
            check_calls(candidate, kernel, form, scale)
        except NotImplementedError as error:
            why.append(error)
            continue
        sizes = (form.width, form.value_width, form.dtype.itemsize, backward)
        taken = seconds(candidate, *sizes, lambda work: fastest.refused(work, form.dtype) != "")
        found.append((taken, parts))
    if not found:
        raise why[0]
    return min(found, key=lambda pair: pair[0])[1]


@constant_in_graphs
def _parts(
    head_parts: int | None, backward: bool, kernel, problem: tuple, form: tuple, sign: int
) -> int:
    """The head parts of a call; a compiler takes them as they are. ``sign``: of the scale, which tells what kernels take."""
    problem, form = Problem(*problem), Form(*form)
    scale = float(sign)
    if head_parts is None:
        return choose_parts(problem, kernel, form, backward, scale)
    allowed = parts_allowed(problem.ranks, problem.heads, problem.kv_heads)
    if head_parts not in allowed:
        raise ValueError(
            f"head_parts={head_parts}: {problem.heads} query heads and {problem.kv_heads} key/value heads on {problem.ranks} ranks allow "
            f"{', '.join(map(str, allowed))} (1: keys and values are gathered; the number of ranks: all is cut by heads)"
        )
    check_calls(problem._replace(parts=head_parts), kernel, form, scale)
    return head_parts


def _most_chunks(problem: Problem, backward: bool) -> int:
    """The most runs of heads that a rank's part allows."""
    share = share_of(problem, 0)
    heads = len(share.kv_heads)
    return heads if heads > 1 or backward else len(share.heads)


@functools.lru_cache(maxsize=256)
def choose_chunks(problem: Problem, form: Form, backward: bool) -> int:
    """The chunks of a call over peers, of the least expected time.

    With n of them 1 / n of the exchange is not hidden. More than one slow the kernels down, which end more often and share memory
    with copies, and each takes a wait, a launch and its copies.
    """
    sizes = (form.width, form.value_width)
    attends = seconds(problem, *sizes, 0, False, lambda work: False)
    travels = seconds(problem, *sizes, form.dtype.itemsize, False, lambda work: False) - attends
    return min(
        range(1, min(_MOST_CHUNKS, _most_chunks(problem, backward)) + 1),
        key=lambda n: (_SLOWED * attends if n > 1 else 0.0) + _CHUNK_S * n + travels / n,
    )


def _refused_by_peers(wanted: tuple, backward: bool, problem: Problem, form: Form) -> str:
    """The reason why copies between peers do not carry a call, on every rank alike; "" if they do."""
    transport, chunks, per_head = wanted
    if problem.ranks == 1:
        return "one rank"
    # Nobody has timed these over peers: only a caller chooses them.
    untimed = "per_head" if per_head else ""
    if problem.parts not in (1, problem.ranks):
        untimed = f"head parts of {problem.parts} on {problem.ranks} ranks"
    if untimed and transport != "peer":
        return untimed
    count = 1 if chunks is None else chunks
    most = _most_chunks(problem, backward)
    if not 1 <= count <= most:
        return f"chunks={chunks}: its parts of {problem.parts} allow 1 to {most}"
    why = _refused_route(problem, form, count, False)
    return _refused_route(problem, form, count, True) if untimed and backward and not why else why


def _refused_route(problem: Problem, form: Form, count: int, backward: bool) -> str:
    share = share_of(problem, 0)
    cut = cut_heads(len(share.heads), len(share.kv_heads), count)
    return takes(route_of(problem, cut, form, backward))


@constant_in_graphs
def _chunks(
    wanted: tuple, backward: bool, device: torch.device, reached: bool, problem: tuple, form: tuple
) -> tuple[int, int, str]:
    """The chunks; the passes that copies carry, as in `Attention`; and why they carry none. A compiler takes all as they are."""
    problem, form = Problem(*problem), Form(*form)
    transport, chunks, _ = wanted
    if transport not in (None, "peer", "nccl"):
        raise ValueError(f"transport is None, 'peer' or 'nccl', but got {transport!r}")
    why = "transport='nccl'" if transport == "nccl" else ""
    if transport is None and device.type != "cuda":
        why = f"calls on {device.type}"
    why = why or _refused_by_peers(wanted, backward, problem, form)
    if not why and not reached:
        why = f"calls on {device}: the ranks do not map each other's memory (python -m overlap_torch doctor says why)"
    if why and transport == "peer":
        raise ValueError(f"copies between peers do not carry {why}; leave transport and chunks out")
    if why:
        most = len(share_of(problem, 0).kv_heads)
        if chunks is not None and not 1 <= chunks <= most:
            raise ValueError(
                f"chunks={chunks}: head parts of {problem.parts} allow 1 to {most} over the group's collectives, as a chunk has whole "
                "key/value heads"
            )
        return chunks or 1, 0, why
    # Gradients without terms to add up were timed over peers; others a caller chooses. The route is asked with as many chunks as in
    # _refused_by_peers: what is refused there without its gradients is not begun.
    back = backward and (transport == "peer" or not problem.adds_terms)
    back = back and not _refused_route(problem, form, chunks or 1, True)
    return chunks or choose_chunks(problem, form, backward), 1 + back, ""


def chunks_over_peers(problem: Problem, form: Form, device: torch.device, group: str) -> int:
    """The chunks that peers carry of a call without options, 0 where the group's collectives do."""
    reached = device.type == "cuda" and reaches(device, group)
    count, copied, _ = _chunks((None, None, False), False, device, reached, problem, form)
    return count if copied else 0


def _check_per_head(per_head: tuple, q: _Operand, built_in: bool) -> None:
    """``per_head``: shape and device of each tensor."""
    if per_head and built_in:
        raise ValueError(
            "per_head goes to the caller's kernel as work.per_head, and the kernels that are built in read none; give kernel="
        )
    for shape, device in per_head:
        if len(shape) == 0 or shape[0] != q.shape[2] or device != q.device:
            raise ValueError(
                f"per_head takes tensors [{q.shape[2]}, ...], an entry for each query head, on {q.device}, but got {shape} on {device}"
            )


def context_parallel_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    tokens: Tokens = "contiguous",
    documents: Documents | None = None,
    head_parts: int | None = None,
    kernel: Kernel = None,
    per_head: Sequence[torch.Tensor] = (),
    transport: str | None = None,
    chunks: int | None = None,
    group: Group = None,
) -> torch.Tensor:
    """Attention over a sequence whose tokens are cut over the ranks: each rank gives its tokens, and gets their results.

    It computes what this composition computes::

        K, V = in_order(all_gather(k, dim=1)), in_order(all_gather(v, dim=1))
        softmax(scale * q @ K.T + mask) @ V        # the mask of the tokens' positions

    ``head_parts`` is the number of parts into which the heads are cut. With as many parts as ranks, each rank computes all queries of some heads
    (Ulysses). With 1, it computes all heads of its own queries, with gathered keys and values. Divisors between do both. None chooses by the bytes
    that move, the slowest rank's work, and the kernels.

    Heads travel in ``chunks``, each while the kernel computes the one before, and so do results on their way home. Over peers, copy engines bring
    heads straight into place, and no SM is given up. Otherwise collectives of the group do, by default one before the attention and one after it.

    Every rank of the group calls it with the same B, H, Hkv, D, Dv, dtype, mask and cut, in the same order of calls.

    Args:
        q: [B, T, H, D], this rank's tokens; bfloat16, float16, float32 or float64, any strides with a dense last dim for speed.
        k, v: [B, T, Hkv, D] and [B, T, Hkv, Dv]; Hkv divides H.
        causal: a token sees no later token.
        window: (left, right), how many tokens before and after its own a query sees; None on either side: no bound.
        scale: the factor of the products; None: ``D ** -0.5``.
        tokens: the cut: ``"contiguous"``, equal parts in order; ``"zigzag"``, chunks r and 2P - 1 - r of 2P equal ones for rank r of P, which
            balances a causal mask; or a list with each rank's number, in order, zeros allowed. :func:`cut_tokens` and
            :func:`token_positions` cut alike.
        documents: a :class:`Documents`, B = 1; a token sees only its own document.
        head_parts: 1, the number of ranks, or a divisor of it that the numbers of heads allow. None: chosen.
        kernel: None: PyTorch's fastest that takes the call (cuDNN, flash, CPU flash), and products with a mask where none does. ``"flash"``,
            ``"cudnn"``, ``"cpu"`` or ``"masked"``: that one or an error. An :class:`AttentionKernel`; or a function
            ``(q, k, v, work) -> o``, which autograd differentiates, by a second call in backward. A function gets no ``window``.
        per_head: tensors [H, ...], such as sinks or slopes, the same on all ranks; your kernel gets the slices of its heads in ``work.per_head``.
        transport: ``"peer"`` (ranks of one host that map each other's memory) or ``"nccl"`` (the group's collectives, gloo's too). None: peers
            where they carry the call, with ``head_parts`` of 1 or all and without ``per_head``; gradients with all head parts only.
        chunks: how many runs of heads travel one after the other: at most the key/value heads of a part, or, over peers, of one such head
            without gradients, its query heads. None: chosen over peers, and 1 over collectives. Over links on which heads travel about as
            long as the kernel runs, several hide most of the exchange.
        group: None (the default group), a process group's name, a ``ProcessGroup`` or a one-dimensional ``DeviceMesh``.

    Returns:
        [B, T, H, Dv], fresh, this rank's tokens. Under autocast operands and result are of its dtype.

    Gradients are in reverse mode, of first order; every rank takes part in backward. The gradients of k and v are summed over the ranks in
    float32 (float64 for float64), in rank order. Gathered keys and values are gathered again in backward. A gradient of ``per_head`` is this
    rank's term; sum it over the group for the whole.

    Built-in kernels are one operator for ``torch.compile``; your own kernel breaks the graph. A CUDA graph can capture the call after one
    call outside.

    Raises:
        ValueError: shapes, devices, a mask, a cut, documents or head parts that do not fit, or an unknown group.
        TypeError: dtypes that do not fit, nested tensors, or a ``group`` or ``kernel`` that is none of the above.
        NotImplementedError: a kernel that was asked for does not take a call; the message says which. Or an operand has a tangent
            (forward mode), or a transform of ``torch.func`` is active.
        RuntimeError: on CPU, ranks whose calls differ (on CUDA under ``OVERLAP_DEBUG=1``); a second derivative.
    """
    name = group_name(group)
    check_tensors(_WHAT, q=q, k=k, v=v)
    if not isinstance(per_head, Sequence) or isinstance(per_head, str):
        raise TypeError(f"per_head is a list of tensors, but it is a {type(per_head).__name__}")
    check_tensors(_WHAT, **{f"per_head[{at}]": each for at, each in enumerate(per_head)})
    if not is_dynamo_compiling():
        refuse_tangents(_WHAT, q, k, v, *per_head)
    refuse_transforms(_WHAT)
    if isinstance(scale, torch.Tensor) and scale.requires_grad:
        raise ValueError(
            "scale is a number and has no gradient, but got a tensor that requires one: multiply q by it, and give scale=1.0"
        )
    if tokens is None or isinstance(tokens, int):
        raise TypeError(
            f'tokens is "contiguous", "zigzag" or a list with each rank\'s number, but got {tokens!r}'
        )
    q, k, v = as_under_autocast(q, k, v)
    chosen = _kernel(kernel, q.device)
    # A compiler takes sizes and numbers as they are, and compiles again where they change.
    head_parts, chunks = _integer("head_parts", head_parts), _integer("chunks", chunks)
    if isinstance(window, (list, tuple)):
        window = tuple([_integer("window", side) for side in window])
    if scale is not None:
        scale = float(scale if isinstance(scale, torch.Tensor) else checked_number("scale", scale))
    tokens = tokens if isinstance(tokens, str) else tuple(map(operator.index, tokens))
    if documents is not None and not isinstance(documents, Documents):
        raise TypeError(
            f"documents is an overlap_torch.Documents(lengths), made once a batch, but got {type(documents).__name__}"
        )
    asked = (causal, window, scale, tokens, documents, head_parts)
    asked = (*asked, transport, chunks)
    if not isinstance(chosen, str):
        return _by_callers_kernel(asked, chosen, name, q, k, v, per_head)
    given = _given(asked, chosen, name, q, k, v, per_head)
    if not is_dynamo_compiling():
        return ops.call(_noted(name, _known_attention(*given)), q, k, v)
    problem, form, scale, (*by, _) = _problem(*given)
    how = ops.arguments(problem, chosen, scale, name, *by, given[-1])
    return torch.ops.overlap.context_parallel_attention(q, k, v, *how)[0]


def _given(asked: tuple, kernel: str | AttentionKernel, name: str, q, k, v, per_head) -> tuple:
    """All that an `Attention` depends on, in integers, types and names."""
    operands = tuple([_Operand(one.shape, one.dtype, one.device) for one in (q, k, v)])
    backward = torch.is_grad_enabled() and any([one.requires_grad for one in (q, k, v, *per_head)])
    asks_peers = asked[-2] == "peer" or (asked[-2] is None and q.is_cuda)
    place = (*place_of(name), asks_peers and reaches(q.device, name))
    heads = tuple([(tuple(one.shape), one.device) for one in per_head])
    return operands, heads, asked, kernel, name, place, backward


def _problem(
    operands: tuple[_Operand, _Operand, _Operand],
    per_head: tuple,
    asked: tuple,
    kernel: str | AttentionKernel,
    name: str,
    place: tuple[int, int, bool],
    backward: bool,
) -> tuple[Problem, tuple, float, tuple[int, int, str]]:
    """The problem that all ranks know, its form, the scale, and what `_chunks` finds.

    Arguments that do not fit raise.
    """
    _check_operands(*operands)
    q, _, v = operands
    _check_per_head(per_head, q, isinstance(kernel, str))
    causal, window, scale, tokens, documents, head_parts, transport, chunks = asked
    ranks, rank, reached = place
    batch, own, heads, width = map(operator.index, q.shape)
    kv_heads, value_width = map(operator.index, v.shape[2:])
    form = (batch, q.dtype, width, value_width)
    numbers, zigzag = numbers_of(_WHAT, tokens, own, ranks, rank)
    band = _band(causal, window)
    lengths = _documents(documents, sum(numbers), batch)
    problem = (numbers, zigzag, heads, kv_heads, *band, lengths, 1)
    scale = width**-0.5 if scale is None else scale
    sign = 1 if scale > 0 else -1  # a compiler knows it, and not the scale
    problem = (*problem[:-1], _parts(head_parts, backward, kernel, problem, form, sign))
    by = (transport, chunks, len(per_head) > 0)
    by = _chunks(by, backward, q.device, reached, problem, form)
    return Problem(*problem), form, scale, by


@functools.lru_cache(maxsize=256)
def _known_attention(*given) -> tuple[Attention, str]:
    """The calls with these arguments, and why peers do not carry them. A group that has gone may have left its name, in which this rank is another, but nothing else."""
    *_, kernel, name, (_, rank, _), backward = given
    problem, form, scale, (*by, why) = _problem(*given)
    return ops.known(problem, kernel, Form(*form), scale, name, rank, *by, backward), why


def _noted(name: str, known: tuple[Attention, str]) -> Attention:
    """The attention, after its call is counted for the report."""
    attention, why_not_peers = known
    if attention.problem.ranks > 1:
        note_way(_WHAT, name, why_not_peers)
    return attention


@outside_graphs(_COMPILED)
def _by_callers_kernel(asked, kernel, name, q, k, v, per_head) -> torch.Tensor:
    kernel = kernel if isinstance(kernel, AttentionKernel) else FunctionKernel(kernel)
    given = _given(asked, traits_of(kernel), name, q, k, v, per_head)
    return ops.call(_noted(name, _known_attention(*given)), q, k, v, *per_head, kernel=kernel)
