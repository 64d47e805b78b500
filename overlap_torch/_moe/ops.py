"""The operators of a mixture of experts that carry tokens and results, with their fakes and gradients.

A *route* is a token and one of its experts. The routes of a call are tensors, which ``moe_dispatch`` returns:

``routes`` [P]: the numbers ``token * K + choice`` of this rank's routes, in order of (expert, token, choice).
``place`` [P']: the row of each route that came here, in order of (source rank, expert, token, choice).
``sent`` [S]: ``token * W + rank`` of the tokens that this rank sends, in order of (rank, token); each goes to a rank once.
``source`` [R]: ``received token * K + choice`` of each row, by the sender's choices; -1 for a row of padding.
``splits`` [4, W], on the CPU: routes sent to each rank and received from it, tokens sent and received.

Over peers ``routes`` [T * K] has, for each of this rank's routes, its row among this rank's experts, ``-2 - rank`` for
another rank's expert, or -1 for no route. ``place`` and ``sent`` are empty. ``source`` is ``(rank * most tokens of a rank +
token) * K + choice``, and -2 after the last row. ``splits[0, 0]`` is -1 minus the most routes of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from overlap_torch._ops.collectives import all_to_all, start_all_gather, wait
from overlap_torch._ops.composition import accumulated
from overlap_torch._ops.graphs import outside_graphs
from overlap_torch._ops.group import group_rank, process_group
from overlap_torch._ops.ordering import register_fake

library = torch.library.Library("overlap", "FRAGMENT")
_ops = torch.ops.overlap

Routes = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
ROUTES = "Tensor routes, Tensor place, Tensor sent, Tensor source, Tensor splits"


def define(schema: str):
    """Registers a function as an operator's kernel for every device."""

    def registered(kernel):
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
        own = outside_graphs("a kernel of overlap_torch")(kernel)
        library.impl(schema.partition("(")[0], own, "CompositeExplicitAutograd")
        return kernel

    return registered


# The operators over peers, for CUDA only: csrc/binding/cuda/moe_peers_cuda.cc and moe_home_cuda.cc.
for _schema in (
    "_moe_peer_dispatch(Tensor x, Tensor ids, int[] experts, int align, bool ranks_first, int max_tokens, int max_rows, int limit, "
    "str group, int home_bytes=0) -> (Tensor rows, Tensor offs, Tensor counts, Tensor home, Tensor source, Tensor splits)",
    "_moe_peer_spread(Tensor x, int choices, Tensor home, Tensor source, int stride, str group) -> Tensor",
    "_moe_peer_combine(Tensor results, Tensor? shares, Tensor home, Tensor source, int stride, int tokens, int choices, "
    "bool ranks_first, str group) -> Tensor",
):
    library.define(_schema)

MOST_BYTES = 1 << 30  # of a slot of a rank's memory
_HOME = "an all-to-all of results"  # ranks that differ in what they send are told apart by it


def peer_stride(splits: torch.Tensor) -> int | None:
    """The most routes of a rank; None if the group's collectives carry the rows."""
    first = int(splits[0, 0])
    return -1 - first if first < 0 else None


def _starts(lengths: torch.Tensor, dim: int = 0) -> torch.Tensor:
    return lengths.cumsum(dim) - lengths


@define("_moe_count(Tensor ids, int[] experts) -> (Tensor, Tensor, Tensor, Tensor)")
def _count(ids, experts):
    """This rank's message to each rank [W, 1 + the most experts of a rank], the routes in order, for each ``place * K + choice``
    of its token among those that go to its rank, and `sent`.

    A message has the routes to each expert; its last entry is the number of tokens. A CUDA kernel
    leaves entries after the last route and token undefined.
    """
    ranks, total, device = len(experts), sum(experts), ids.device
    tokens, choices = ids.shape
    ids = ids.to(torch.int64).flatten()
    ids = torch.where((ids >= 0) & (ids < total), ids, total)  # the last: no route
    sizes = torch.tensor(experts, device=device)
    # Ids outside all experts belong to no rank: their routes go to a rank beyond the last.
    owner = torch.repeat_interleave(
        torch.arange(ranks + 1, device=device),
        torch.tensor([*experts, 1], device=device),
        output_size=total + 1,
    )
    counts = ids.new_zeros(total + 1).scatter_add_(0, ids, torch.ones_like(ids))[:total]
    visit = owner[ids] * tokens + torch.arange(tokens, device=device).repeat_interleave(choices)
    visits = ids.new_zeros((ranks + 1) * tokens).index_fill_(0, visit, 1)[: ranks * tokens]
    visits = visits.view(ranks, tokens)
    message = ids.new_zeros((ranks, max(experts) + 1))
    column = torch.arange(total, device=device) - _starts(sizes)[owner[:total]]
    message[owner[:total], column] = counts
    message[:, -1] = visits.sum(1)
    routes = ids.argsort(stable=True)[: counts.sum()]
    sent = (1 - visits.flatten()).argsort(stable=True)[: visits.sum()]
    sent = sent % max(tokens, 1) * ranks + sent // max(tokens, 1)
    slots = (visits.cumsum(1) - 1).flatten()[visit[routes]] * choices + routes % choices
    return message, routes, slots.to(torch.int32), sent


@define("_moe_meet(Tensor message, Tensor met, int experts, int align) -> (Tensor, Tensor, Tensor)")
def _meet(message, met, experts, align):
    """The numbers [4 * W + 1] sent and received (`splits`, then the rows), and `offs` and `counts` of this rank's
    experts."""
    came = met[:, :experts]
    own = came.sum(0)
    padded = (own + align - 1) // align * align
    numbers = [message[:, :-1].sum(1), came.sum(1), message[:, -1], met[:, -1]]
    return torch.cat([*numbers, padded.sum().view(1)]), padded.cumsum(0).to(torch.int32), own


@define(
    "_moe_arrive(Tensor met, Tensor offs, Tensor slots, int rows, int choices) -> (Tensor, Tensor)"
)
def _arrive(met, offs, slots, rows, choices):
    """`place` and `source`. Rows are ordered by (expert, source rank, token), so blocks of the messages move unchanged."""
    came, routes = met[:, : offs.shape[0]], slots.shape[0]
    lengths = came.flatten()
    begins = offs - offs.diff(prepend=offs.new_zeros(1))
    moved = (begins + _starts(came)).flatten() - _starts(lengths)
    place = torch.arange(routes, device=met.device)
    place = place + moved.repeat_interleave(lengths, output_size=routes)
    begin = _starts(met[:, -1]).repeat_interleave(came.sum(1), output_size=routes)
    return place, met.new_full((rows,), -1).index_copy_(0, place, slots + begin * choices)


def _find_routes(
    ids: torch.Tensor, experts: Sequence[int], align: int, group: str
) -> tuple[torch.Tensor, torch.Tensor, Routes]:
    """The ends of the experts' rows, int32 [e], their numbers without padding [e], and the routes.

    The host waits once: for the numbers of rows to send and to receive.
    """
    ranks, own = len(experts), experts[group_rank(group)]
    message, routes, slots, sent = _ops._moe_count(ids, experts)
    what = f"a mixture of experts, top {ids.shape[1]} of {list(experts)}: an all-to-all of rows"
    met = all_to_all(message, [1] * ranks, [1] * ranks, group, what)
    fake = dist.get_backend(process_group(group)) == "fake"  # from which no numbers come
    if fake:
        met = message
    known, offs, counts = _ops._moe_meet(message, met, own, align)
    known = known.cpu()
    splits, rows = known[:-1].view(4, ranks).clone(), int(known[-1])
    sent_routes, _, sent_tokens, _ = splits.sum(1).tolist()
    slots = all_to_all(slots[:sent_routes], *splits[:2].tolist(), group)
    if fake:
        slots.zero_()
    place, source = _ops._moe_arrive(met, offs, slots, rows, ids.shape[1])
    return offs, counts, (routes[:sent_routes], place, sent[:sent_tokens], source, splits)


@define("_moe_rows(Tensor source, Tensor index, int divisor) -> Tensor")
def _rows(source, index, divisor):
    """The source's rows by ``index // divisor``; zeros for -1."""
    if source.shape[0] == 0:
        return source.new_zeros((index.shape[0], source.shape[1]))
    rows = source.index_select(0, index.clamp(min=0) // divisor)
    return rows.masked_fill_((index < 0)[:, None], 0)


@define(
    "_moe_sum(Tensor rows, Tensor routes, Tensor? shares, SymInt tokens, int choices, bool row_shares) -> Tensor"
)
def _sum(rows, routes, shares, tokens, choices, row_shares):
    """[P, D] to [T, D]: each token's results times their shares, summed in the choices' order, rounded once.

    So a token's result depends on no other token. A route of -1 is ignored. Shares are [T, K], or [P] with `row_shares`;
    shares without a route are ignored.
    """
    wide = accumulated(rows.dtype)
    known = routes >= 0
    if row_shares and shares is not None:
        shares = shares.reshape(-1)[known]
    rows, routes = rows[known], routes[known]
    parts = rows.new_zeros((tokens * choices, rows.shape[1])).index_copy_(0, routes, rows)
    parts = parts.view(tokens, choices, rows.shape[1])
    if shares is not None:
        flat = shares.reshape(-1).to(wide)
        flat = flat if row_shares else flat.index_select(0, routes)
        shares = flat.new_zeros(tokens * choices).index_copy_(0, routes, flat)
        shares = shares.view(tokens, choices)
    total = rows.new_zeros((tokens, rows.shape[1]), dtype=wide)
    for choice in range(choices):
        part = parts[:, choice].to(wide)
        total = total + (part if shares is None else part * shares[:, choice, None])
    return total.to(rows.dtype)


@define("_moe_weigh(Tensor grad, Tensor results, Tensor shares) -> (Tensor, Tensor)")
def _weigh(grad, results, shares):
    """Rows times their shares [R, 1], rounded; and their dots with the results [R, 1], not rounded."""
    wide = accumulated(results.dtype)
    grad = grad.to(wide)
    dots = (grad * results.to(wide)).sum(1, keepdim=True)
    return (grad * shares.to(wide)).to(results.dtype), dots


@define(f"_moe_spread(Tensor x, int choices, {ROUTES}, bool ranks_first, str group) -> Tensor")
def _spread(x, choices, routes, place, sent, source, splits, ranks_first, group):
    """[T, H] to [R, H]: each token to its rows, once to a rank."""
    stride, ranks = peer_stride(splits), splits.shape[1]
    if stride is not None:
        return _ops._moe_peer_spread(x, choices, routes, source, stride, group)
    came = all_to_all(_ops._moe_rows(x, sent, ranks), *splits[2:].tolist(), group)
    return _ops._moe_rows(came, source, choices)


@define(
    "moe_dispatch(Tensor x, Tensor topk_ids, int[] experts, int align, int max_tokens, int max_rows, bool peers, bool ranks_first, "
    f"str group, int home_bytes=0) -> (Tensor rows, Tensor offs, Tensor counts, {ROUTES})"
)
def dispatch(
    x, topk_ids, experts, align, max_tokens, max_rows, peers, ranks_first, group, home_bytes=0
):
    """With a `max_rows` of 0 the host waits for the number of arriving rows. ``home_bytes``: of a result's row; 0: as x's."""
    if peers:
        how = (align, ranks_first, max_tokens, max_rows, MOST_BYTES, group, home_bytes)
        rows, offs, counts, home, source, splits = _ops._moe_peer_dispatch(
            x, topk_ids, experts, *how
        )
        if splits.numel() > 0:  # else some rank has too many tokens
            none = (home.new_empty(0), home.new_empty(0))
            return rows, offs, counts, home, *none, source, splits
    offs, counts, (home, place, sent, source, splits) = _find_routes(
        topk_ids, experts, align, group
    )
    if max_rows:
        source = _with_room(source, max_rows, group)
    routes = (home, place, sent, source, splits)
    return _spread(x, topk_ids.shape[1], *routes, ranks_first, group), offs, counts, *routes


def _with_room(source: torch.Tensor, max_rows: int, group: str) -> torch.Tensor:
    """Raises RuntimeError on all ranks if one of them has more rows."""
    rows = source.shape[0]
    counts = wait(start_all_gather(source.new_tensor([rows]), group)).tolist()
    for rank, came in enumerate(counts):
        if came > max_rows:
            raise RuntimeError(
                f"overlap_torch: group '{group}', rank {rank}: its experts got {came} rows, more than max_rows={max_rows}. Give "
                "room for the most that may come, or leave max_rows out."
            )
    return torch.cat([source, source.new_full((max_rows - rows,), -1)])


@define(
    "_moe_home(Tensor rows, Tensor routes, Tensor place, Tensor source, Tensor splits, SymInt total, str group) -> Tensor"
)
def _home(rows, routes, place, source, splits, total, group):
    """[R, D] to [T * K, D]: each row to its token and choice; zeros where there is no route."""
    stride = peer_stride(splits)
    if stride is not None:
        form = (stride, total, 1, False, group)
        return _ops._moe_peer_combine(rows, None, routes, source, *form)
    out, came = splits[:2].tolist()
    back = all_to_all(_ops._moe_rows(rows, place, 1), came, out, group, _HOME)
    return rows.new_zeros((total, rows.shape[1])).index_copy_(0, routes, back)


@define(
    "_moe_away(Tensor parts, Tensor routes, Tensor place, Tensor source, Tensor splits, str group) -> Tensor"
)
def _away(parts, routes, place, source, splits, group):
    """[T * K, D] to [R, D]: the transpose of `_home`."""
    stride, rows = peer_stride(splits), source.shape[0]
    if stride is not None:
        return _ops._moe_peer_spread(parts, 1, routes, source, stride, group)
    came = all_to_all(parts.index_select(0, routes), *splits[:2].tolist(), group)
    return parts.new_zeros((rows, parts.shape[1])).index_copy_(0, place, came)


@define("_moe_after(Tensor x, Tensor grad) -> Tensor")
def _after(x, grad):
    return x.clone()


def after(x, grad):
    """``x``, for a collective of backward. In a compiler's graph it depends on ``grad``: a partitioner may move a collective of
    other tensors to forward, on one rank and not on another."""
    return _ops._moe_after(x, grad) if torch._C._len_torch_dispatch_stack() > 0 else x


@define(
    f"moe_combine(Tensor results, Tensor? topk_weights, SymInt tokens, int choices, {ROUTES}, bool ranks_first, str group) -> Tensor"
)
def combine(results, topk_weights, tokens, choices, *how):
    """Sends every result back. With `ranks_first`, each rank sends its sum of a token's results, and the sums are added in
    the ranks' order."""
    routes, place, sent, source, splits, ranks_first, group = how
    stride = peer_stride(splits)
    if stride is not None:
        shares = topk_weights
        if ranks_first and shares is not None:
            shares = _ops._moe_away(shares.reshape(-1, 1), routes, place, source, splits, group)
        form = (stride, tokens, choices, ranks_first, group)
        return _ops._moe_peer_combine(results, shares, routes, source, *form)
    if not ranks_first:
        out, came = splits[:2].tolist()
        back = all_to_all(_ops._moe_rows(results, place, 1), came, out, group, _HOME)
        return _ops._moe_sum(back, routes, topk_weights, tokens, choices, False)
    out, came = splits[2:].tolist()
    shares = None
    if topk_weights is not None:
        flat = topk_weights.reshape(-1, 1)
        shares = _ops._moe_away(flat, routes, place, source, splits, group)
    sums = _ops._moe_sum(results, source, shares, sum(came), choices, True)
    home = all_to_all(sums, came, out, group, _HOME)
    return _ops._moe_sum(home, sent, None, tokens, splits.shape[1], False)


def _fake_dispatch(
    x, topk_ids, experts, align, max_tokens, max_rows, peers, ranks_first, group, home_bytes=0
):
    dynamic = torch.library.get_ctx().new_dynamic_size
    rows, own = max_rows or dynamic(), experts[group_rank(group)]
    ids = topk_ids.new_empty(0, dtype=torch.int64)
    return (
        x.new_empty((rows, x.shape[1])),
        ids.new_empty(own, dtype=torch.int32),
        ids.new_empty(own),
        ids.new_empty(dynamic()),
        ids.new_empty(dynamic()),
        ids.new_empty(dynamic()),
        ids.new_empty(rows),
        ids.new_empty((4, len(experts)), device="cpu"),
    )


_FAKES = {
    "moe_dispatch": _fake_dispatch,
    "_moe_spread": lambda x, choices, *routes: x.new_empty((routes[3].shape[0], x.shape[1])),
    "_moe_home": lambda rows, r, p, s, t, total, g: rows.new_empty((total, rows.shape[1])),
    "_moe_away": lambda parts, r, p, s, t, g: parts.new_empty((s.shape[0], parts.shape[1])),
    "_moe_after": lambda x, grad: torch.empty_like(x),
    "moe_combine": lambda results, w, tokens, *_: results.new_empty((tokens, results.shape[1])),
    "_moe_weigh": lambda grad, results, shares: (
        grad.new_empty(grad.shape),
        shares.new_empty(shares.shape),
    ),
}


def _keep_dispatch(ctx, inputs, output) -> None:
    x, ids, *_, ctx.ranks_first, ctx.group, _ = inputs
    ctx.tokens, ctx.choices = x.shape[0], ids.shape[1]
    ctx.save_for_backward(*output[3:])
    ctx.set_materialize_grads(False)


def _keep_spread(ctx, inputs, output) -> None:
    x, ctx.choices, *routes, ctx.ranks_first, ctx.group = inputs
    ctx.tokens = x.shape[0]
    ctx.save_for_backward(*routes)


def _rows_backward(ctx, grad, *_):
    """Dispatch and spread have the same one."""
    if grad is None:
        return (None,) * len(ctx.needs_input_grad)
    how = (*ctx.saved_tensors, ctx.ranks_first, ctx.group)
    of_x = _ops.moe_combine(grad, None, ctx.tokens, ctx.choices, *how)
    return of_x, *(None,) * (len(ctx.needs_input_grad) - 1)


def _keep_combine(ctx, inputs, output) -> None:
    results, weights, _, ctx.choices, *routes, ctx.ranks_first, ctx.group = inputs
    ctx.save_for_backward(results, weights, *routes)


def _combine_backward(ctx, grad):
    """A token's gradient goes once to a rank. The results are there, so shares' gradients are dots of rows."""
    results, weights, *routes = ctx.saved_tensors
    rows = _ops._moe_spread(grad, ctx.choices, *routes, ctx.ranks_first, ctx.group)
    if weights is None:
        return rows, *(None,) * 10
    # A second derivative follows the composition; the operator has none of its own.
    compute = _weigh if torch.is_grad_enabled() else _ops._moe_weigh
    wide = accumulated(results.dtype)
    for_results, dots = compute(
        rows, results, row_shares(after(weights, grad), routes, ctx.group, wide)
    )
    needs_shares = ctx.needs_input_grad[1]
    for_shares = share_gradients(dots, weights, routes, ctx.group) if needs_shares else None
    return for_results, for_shares, *(None,) * 9


def row_shares(weights, routes, group: str, dtype: torch.dtype) -> torch.Tensor:
    """[..., K] to [R, 1]: each row's share, in a dtype."""
    home, place, _, source, splits = routes
    return _ops._moe_away(weights.reshape(-1, 1).to(dtype), home, place, source, splits, group)


def share_gradients(dots, weights, routes, group: str) -> torch.Tensor:
    """[R, 1] to [T, K]: the transpose of `row_shares`."""
    home, place, _, source, splits = routes
    came = _ops._moe_home(dots, home, place, source, splits, weights.numel(), group)
    return came.view(weights.shape).to(weights.dtype)


def _keep_home(ctx, inputs, output) -> None:
    _, *routes, _, ctx.group = inputs
    ctx.save_for_backward(*routes)


def _home_backward(ctx, grad):
    return _ops._moe_away(grad, *ctx.saved_tensors, ctx.group), *(None,) * 6


def _keep_away(ctx, inputs, output) -> None:
    parts, *routes, ctx.group = inputs
    ctx.total = parts.shape[0]
    ctx.save_for_backward(*routes)


def _away_backward(ctx, grad):
    return _ops._moe_home(grad, *ctx.saved_tensors, ctx.total, ctx.group), *(None,) * 5


def _after_backward(ctx, grad):
    return grad, None


_GRADIENTS = {
    "moe_dispatch": (_rows_backward, _keep_dispatch),
    "_moe_spread": (_rows_backward, _keep_spread),
    "moe_combine": (_combine_backward, _keep_combine),
    "_moe_home": (_home_backward, _keep_home),
    "_moe_away": (_away_backward, _keep_away),
    "_moe_after": (_after_backward, None),
}


def complete(fakes: dict, gradients: dict) -> None:
    """Registers operators' fakes, and the backward and context of those that have gradients."""
    for name, fake in fakes.items():
        register_fake(f"overlap::{name}", fake, lib=library)
    for name, (backward, keep) in gradients.items():
        torch.library.register_autograd(
            f"overlap::{name}", backward, setup_context=keep, lib=library
        )


complete(_FAKES, _GRADIENTS)
