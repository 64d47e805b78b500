"""Counts of the calls of ops without plans, experts' and attention's, by what carried them, for ``overlap_torch.report()``."""

from __future__ import annotations

from collections.abc import Iterator

from torch.compiler import is_compiling

_MOST = 256  # reasons have numbers of tokens, and groups come and go: those that were noted last are kept
_calls: dict[tuple[str, str, str], int] = {}


def note_way(op: str, group: str, why_not_peers: str) -> None:
    """Counts a call. Compiled code counts nothing. ``why_not_peers``: empty if memory that the ranks map into each other carried it."""
    if is_compiling():
        return
    key = (op, group, why_not_peers)
    _calls[key] = _calls.pop(key, 0) + 1
    if len(_calls) > _MOST:
        _calls.pop(next(iter(_calls)), None)


def lines() -> Iterator[str]:
    """A line for each op, group and way."""
    for (op, group, why), calls in list(_calls.items()):
        by = f"by collectives: peers do not carry {why}" if why else "over peers"
        yield f"group '{group}', {op}: {calls} call{'s' if calls > 1 else ''} {by}"
