"""A sequence's tokens on the ranks: three ways to cut them, and documents."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.compiler import is_dynamo_compiling

from overlap_torch._layers.sharding import checked_count
from overlap_torch._ops.group import Group, group_name, place_of
from overlap_torch._ops.nested import check_tensors

Tokens = str | Sequence[int]
Span = tuple[int, int]  # the first position and the one after the last


@dataclass(frozen=True)
class Documents:
    """Documents that lie one after the other in a sequence; a token sees only its own document.

    Made once a batch from host integers; all layers share it.

    Args:
        lengths: each document's number of tokens, in order, over the whole sequence (not this rank's part). 0 is no document.

    Raises:
        ValueError: a negative length.
        TypeError: a length that is no integer, or a tensor on a device, which the host would have to wait for.
    """

    lengths: tuple[int, ...]

    def __init__(self, lengths: Iterable[int]) -> None:
        if isinstance(lengths, torch.Tensor) and lengths.device.type != "cpu":
            raise TypeError(
                f"Documents takes host integers, but got a tensor on {lengths.device}: give lengths.tolist() of a tensor on the CPU"
            )
        try:
            found = tuple(map(operator.index, lengths))
        except TypeError as error:
            raise TypeError(f"Documents takes a list of integers, but got {lengths!r}") from error
        if any(length < 0 for length in found):
            raise ValueError(f"a document has at least 0 tokens, but got lengths {list(found)}")
        object.__setattr__(self, "lengths", tuple(length for length in found if length > 0))


@functools.lru_cache(maxsize=256)
def spans_of_ranks(numbers: tuple[int, ...], zigzag: bool) -> tuple[tuple[Span, ...], ...]:
    """The positions that each rank has, in its own order, which is theirs."""
    if not zigzag:
        ends = [sum(numbers[: rank + 1]) for rank in range(len(numbers))]
        return tuple(((end - own, end),) for end, own in zip(ends, numbers, strict=True))
    ranks, chunk = len(numbers), numbers[0] // 2
    pairs = [(rank, 2 * ranks - 1 - rank) for rank in range(ranks)]
    return tuple(tuple((at * chunk, (at + 1) * chunk) for at in pair) for pair in pairs)


def numbers_of(
    what: str, tokens: Tokens, own: int, ranks: int, rank: int
) -> tuple[tuple[int, ...], bool]:
    """Each rank's number of tokens, and whether they lie in a zigzag; ``own`` is this rank's number.

    Raises:
        ValueError: ``tokens`` is none of the three ways, or does not fit ``own``.
    """
    if isinstance(tokens, str):
        if tokens not in ("contiguous", "zigzag"):
            raise ValueError(
                f'{what} takes tokens="contiguous", "zigzag" or a list with each rank\'s number, but got {tokens!r}'
            )
        if tokens == "zigzag" and own % 2 != 0:
            raise ValueError(
                f"{what}: a zigzag is of {2 * ranks} equal chunks, two for each rank, but this rank has {own} tokens; give tokens= "
                "a list with each rank's number"
            )
        return (own,) * ranks, tokens == "zigzag"
    numbers = tuple(map(operator.index, tokens))
    if len(numbers) != ranks or min(numbers) < 0:
        raise ValueError(
            f"{what}: tokens={list(numbers)} for a group of {ranks} ranks; give one number for each rank, at least 0"
        )
    if numbers[rank] != own:
        raise ValueError(
            f"{what}: tokens={list(numbers)} says that rank {rank} has {numbers[rank]} tokens, but it has {own}"
        )
    return numbers, False


def _whole_numbers(what: str, tokens: Tokens, total: int, group: str) -> tuple[Span, ...]:
    """This rank's positions among ``total``."""
    ranks, rank = place_of(group)
    if isinstance(tokens, str):
        parts = 2 * ranks if tokens == "zigzag" else ranks
        if total % parts != 0:
            raise ValueError(
                f"{what}: {total} tokens do not divide into {parts} equal chunks for tokens={tokens!r} on {ranks} ranks; give "
                "tokens= a list with each rank's number"
            )
        numbers, zigzag = numbers_of(what, tokens, total // ranks, ranks, rank)
    else:
        own = tokens[rank] if len(tokens) == ranks else 0
        numbers, zigzag = numbers_of(what, tokens, own, ranks, rank)
        if sum(numbers) != total:
            raise ValueError(
                f"{what}: tokens={list(numbers)} add up to {sum(numbers)}, but the sequence has {total}"
            )
    # A compiler does not call what a cache has.
    spans = spans_of_ranks.__wrapped__ if is_dynamo_compiling() else spans_of_ranks
    return spans(numbers, zigzag)[rank]


def cut_tokens(
    x: torch.Tensor, dim: int, tokens: Tokens = "contiguous", group: Group = None
) -> torch.Tensor:
    """This rank's tokens of a whole sequence, as :func:`context_parallel_attention` takes them. Nothing is communicated.

    Args:
        x: the whole sequence along ``dim``, the same on all ranks: ids, labels, embeddings.
        dim: the dim of the tokens.
        tokens, group: as :func:`context_parallel_attention`.

    Returns:
        This rank's part of ``x``: a view, or a copy where a zigzag has two chunks. Gradients go through.

    Raises:
        ValueError: numbers that do not fit the sequence or the group.
    """
    check_tensors("cut_tokens", x=x)
    spans = _whole_numbers("cut_tokens", tokens, x.size(dim), group_name(group))
    parts = [x.narrow(dim, begin, end - begin) for begin, end in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def token_positions(
    total: int,
    tokens: Tokens = "contiguous",
    group: Group = None,
    *,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """The positions of this rank's tokens in a sequence of ``total``: int64 [T], as rotary embeddings take them.

    Args:
        total: the number S of the whole sequence's tokens.
        tokens, group: as :func:`context_parallel_attention`.
        device: the result's; None: the default device.

    Raises:
        ValueError: as :func:`cut_tokens`.
    """
    total = checked_count("total", total)
    spans = _whole_numbers("token_positions", tokens, total, group_name(group))
    parts = [torch.arange(begin, end, device=device) for begin, end in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
