"""The operators of a mixture over peers, on CPU ranks: what csrc/binding/cuda/moe_peers_cuda.cc computes, route by route."""

import contextlib
from unittest import mock

import torch
import torch.distributed as dist

from operands import from_all_ranks
from overlap_torch._moe import checks

_library = torch.library.Library("overlap", "FRAGMENT")
NONE, PADDING, AFTER = -1, -1, -2


def _everybody(*own: object) -> list:
    """Every rank's; ranks call the same operators with the same numbers, the last of `own`."""
    found = from_all_ranks(own)
    assert len({each[-1] for each in found}) == 1, [each[-1] for each in found]
    return found


def _junk(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def _dispatch(x, ids, experts, align, ranks_first, max_tokens, max_rows, limit, group, _=0):
    alike = ("dispatch", x.shape[1], ids.shape[1], tuple(experts), ranks_first, max_tokens)
    rank, choices, found = dist.get_rank(), ids.shape[1], _everybody(x, ids, alike)
    most = max_tokens or max(tokens.shape[0] for tokens, *_ in found)
    if not max_tokens and most * choices * x.shape[1] * x.element_size() > limit:
        return (x, *(ids.new_empty(0) for _ in range(5)))
    owner = [r for r, own in enumerate(experts) for _ in range(own)]
    home = [-2 - owner[i] if 0 <= i < len(owner) else NONE for i in ids.flatten().tolist()]
    source, counts, ends = [], [], []
    for expert in range(sum(experts[:rank]), sum(experts[: rank + 1])):
        begin = len(source)
        for peer, (_, theirs, _) in enumerate(found):
            for route, chosen in enumerate(theirs.flatten().tolist()):
                if chosen == expert:
                    if peer == rank:
                        home[route] = len(source)
                    source.append(peer * most * choices + route)
        counts.append(len(source) - begin)
        source += [PADDING] * (-counts[-1] % align)
        ends.append(len(source))
    if max_rows and len(source) > max_rows:
        raise RuntimeError(f"rank {rank}: {len(source)} rows, more than max_rows={max_rows}")
    source += [AFTER] * (max_rows - len(source))
    numbers = [torch.tensor(each, dtype=torch.int64) for each in (home, source)]
    splits = torch.zeros((4, len(experts)), dtype=torch.int64)
    splits[0, 0] = -1 - most * choices
    rows = _rows(x.shape[1], source, [tokens for tokens, *_ in found], choices, most)
    offs = torch.tensor(ends, dtype=torch.int32)
    return rows, offs, torch.tensor(counts, dtype=torch.int64), *numbers, splits


def _rows(width, source, everybody, choices, most):
    """Each row's token; rows after the last are junk."""
    rows = _junk(len(source), width, dtype=everybody[0].dtype)
    for row, index in enumerate(source):
        if index == PADDING:
            rows[row] = 0
        elif index >= 0:
            peer, token = divmod(index // choices, most)
            rows[row] = everybody[peer][token]
    return rows


def _spread(x, choices, home, source, stride, group):
    found = [tokens for tokens, _ in _everybody(x, ("spread", x.shape[1], choices, stride))]
    return _rows(x.shape[1], source.tolist(), found, choices, stride // choices)


def _combine(results, shares, home, source, stride, tokens, choices, ranks_first, group):
    """A token's results by choice, of all ranks; summed as the composition sums."""
    alike = ("combine", results.shape[1], choices, stride, ranks_first)
    rank = dist.get_rank()
    found = _everybody(results, source, shares if ranks_first else None, alike)
    wide = torch.float64 if results.dtype == torch.float64 else torch.float32
    factors = torch.ones(tokens * choices) if shares is None or ranks_first else shares.flatten()
    sums: dict[tuple[int, int], torch.Tensor] = {}  # by rank, or 0, and token
    parts = []
    for peer, (rows, routes, row_shares, _) in enumerate(found):
        for row, index in enumerate(routes.tolist()):
            if index >= 0 and index // stride == rank:
                route = index % stride
                share = factors[route] if row_shares is None else row_shares[row]
                parts.append((route, peer, rows[row].to(wide) * share.to(wide)))
    for route, peer, part in sorted(parts, key=lambda each: each[0]):
        key = (peer if ranks_first else 0, route // choices)
        sums[key] = sums.get(key, torch.zeros(results.shape[1], dtype=wide)) + part
    total = torch.zeros((tokens, results.shape[1]), dtype=wide)
    for (_, token), value in sorted(sums.items(), key=lambda each: each[0]):
        total[token] += value.to(results.dtype) if ranks_first else value
    return total.to(results.dtype)


for _name, _kernel in (("dispatch", _dispatch), ("spread", _spread), ("combine", _combine)):
    _library.impl(f"_moe_peer_{_name}", _kernel, "CPU")


@contextlib.contextmanager
def over_peers():
    """Makes ``transport="peer"`` run on CPU."""
    with mock.patch.object(checks, "reaches", lambda device, group: True):
        yield
