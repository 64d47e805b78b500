"""Copies between peers on CPU: what a push sends lies in the slot once its step has been awaited, and not before."""

import contextlib
import ctypes
from unittest import mock

import torch
import torch.distributed as dist

from operands import from_all_ranks
from overlap_torch._attention import functions, peers

POISON = 0x7F  # a NaN in bfloat16, and no small integer elsewhere


class GlooCopies:
    """The calls of PeerCopies over the default group. Ranks meet in every push."""

    def __init__(self, like: torch.Tensor, group: str, bytes_: int, steps: int, text: str):
        self.memory = torch.full((bytes_,), POISON, dtype=torch.uint8, device="cpu")
        self.steps, self.text, self.open = steps, text, True
        self.pending: dict[int, list[tuple[int, int, list[bytes]]]] = {}

    def slot(self, dtype: torch.dtype) -> torch.Tensor:
        return self.memory.view(dtype)

    def copy(self, bases: list[int], numbers: torch.Tensor) -> None:
        assert self.open
        bases = [self.memory.data_ptr(), *bases]
        for base, begin, stride, other, to, to_stride, width, rows in numbers.tolist():
            source, to = bases[base] + begin, bases[other] + to
            assert all(number % 16 == 0 for number in (source, to, stride, to_stride, width))
            for row in range(rows):
                ctypes.memmove(to + row * to_stride, source + row * stride, width)

    def push(self, bases: list[int], numbers: torch.Tensor, first: int, steps: int) -> None:
        assert self.open and first + steps <= self.steps
        sent, rows_of = [], numbers.tolist()
        assert [row[8] for row in rows_of] == sorted(row[8] for row in rows_of)
        for base, source, stride, peer, offset, to_stride, width, rows, step, _ in rows_of:
            assert first <= step < first + steps and peer != dist.get_rank() and base > 0
            begin = bases[base - 1] + source
            data = [ctypes.string_at(begin + row * stride, width) for row in range(rows)]
            sent.append((peer, step, offset, to_stride, data))
        everyone = from_all_ranks((self.text, first, sent))
        assert {(text, at) for text, at, _ in everyone} == {(self.text, first)}
        for _, _, messages in everyone:
            for peer, step, *message in messages:
                if peer == dist.get_rank():
                    self.pending.setdefault(step, []).append(message)

    def await_(self, step: int) -> None:
        assert self.open
        for earlier in [known for known in self.pending if known <= step]:
            for offset, stride, data in self.pending.pop(earlier):
                for row, one in enumerate(data):
                    begin = offset + row * stride
                    assert begin + len(one) <= len(self.memory)
                    ctypes.memmove(self.memory.data_ptr() + begin, one, len(one))

    def end(self) -> None:
        assert self.open and not self.pending
        self.open = False
        self.memory.fill_(POISON)

    def abandon(self, why: str) -> None:
        self.open = False


@contextlib.contextmanager
def over_peers():
    """Makes ``transport="peer"`` run on CPU."""
    with (
        mock.patch.object(peers, "_begin", GlooCopies),
        mock.patch.object(functions, "reaches", lambda device, group: True),
    ):
        yield
