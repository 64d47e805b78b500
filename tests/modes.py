"""Modes that list what is called while they are on."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class Observer:
    """A mode that lists what was called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def see(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


class SeesFunctions(Observer, TorchFunctionMode):
    __torch_function__ = Observer.see


class SeesDispatches(Observer, TorchDispatchMode):
    __torch_dispatch__ = Observer.see
