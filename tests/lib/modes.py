"""Modes that list what is called while they are on."""

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
    """Without the ranks' comparison of calls, which moves no tensor."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = self.see(function, types, args, kwargs)
        if function.name() == "overlap::_compare_collective":
            self.seen.remove(function)
        return result
