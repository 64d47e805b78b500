"""Handles that undo a call, such as a replacement of another package's functions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

_Handle = TypeVar("_Handle", bound="Handle")
_lock = threading.Lock()


class Held:
    """Something that several handles hold. It is in place, and this object is true, while at least one handle exists.

    Args:
        begin: puts it in place.
        end: takes it away.
    """

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._begin, self._end = begin, end
        self._lock, self._count = threading.Lock(), 0

    def __bool__(self) -> bool:
        return self._count > 0

    def hold(self) -> None:
        with self._lock:
            if self._count == 0:
                self._begin()
            self._count += 1

    def release(self) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0:
                self._end()


class Handle:
    """Undoes a call, once, by :meth:`undo` or at the end of a ``with``."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo: Callable[[], None] | None = undo

    def undo(self) -> None:
        """Restores the state before the call, unless another handle holds it. A second call does nothing."""
        with _lock:
            undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def __enter__(self: _Handle) -> _Handle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()
