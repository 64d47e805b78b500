"""``OVERLAP_TUNE=1``: each problem is tuned at its first call."""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.compiler import is_compiling
from torch.utils._python_dispatch import _get_current_dispatch_mode

from overlap_torch._ops import eager
from overlap_torch._ops.group import process_group
from overlap_torch._tune.tune import called, tune


class FirstCalls:
    """Runs after each call of an op: tunes problems that were called for the first time.

    The key of a call is the same on all ranks of a group: op, sizes, dtypes and how operands are scaled. Rank 0 says which
    problems are new.
    """

    def __init__(self) -> None:
        # Each group has calls, and problems by the kind of device. It may have the name of a group that no longer exists.
        self._seen: weakref.WeakKeyDictionary[dist.ProcessGroup, set[tuple[Any, ...]]]
        self._seen = weakref.WeakKeyDictionary()
        self._busy = False

    def __call__(self, op: object, group: str, arguments: tuple[Any, ...], results: Any) -> None:
        tensors = _tensors(arguments)
        device = tensors[0].device
        # Calls have an invariance. Scaled operands have recipes, the output's type and the accumulation.
        others = (one for one in arguments if isinstance(one, (int, str, torch.dtype)))
        shapes = ((tuple(one.shape), one.dtype) for one in tensors)
        key = (op, device.type, *shapes, *others)
        self._tune_new(group, device, key)
        backward = ("backward", *key)
        if backward not in self._seen_of(group) and (node := _node(results)) is not None:
            node.register_hook(lambda *_: self._tune_new(group, device, backward))

    def _seen_of(self, group: str) -> set[tuple[Any, ...]]:
        return self._seen.setdefault(process_group(group), set())

    def _tune_new(self, group: str, device: torch.device, key: tuple[Any, ...]) -> None:
        """Tunes what was called since the last time, if the key is new."""
        seen = self._seen_of(group)
        if self._busy or key in seen or _hidden(device):
            return
        seen.add(key)
        fresh = [
            problem
            for problem, _ in called(group, device.type)
            if (device.type, repr(problem)) not in seen
        ]
        seen.update((device.type, repr(problem)) for problem in fresh)
        self._busy = True
        try:
            tune(fresh, group=group, device=device)
        finally:
            self._busy = False


def _tensors(values: tuple[Any, ...]) -> list[torch.Tensor]:
    lists = (one if isinstance(one, (list, tuple)) else [one] for one in values)
    return [one for values in lists for one in values if isinstance(one, torch.Tensor)]


def _node(results: Any) -> torch.autograd.graph.Node | None:
    """The node whose backward calls ops, which only C++ sees."""
    results = results if isinstance(results, tuple) else (results,)
    node = next((one.grad_fn for one in _tensors(results) if one.grad_fn is not None), None)
    has_two = node is not None and node.name().endswith("Outputs")
    return node.next_functions[0][0] if has_two else node


def _hidden(device: torch.device) -> bool:
    """True if operations are recorded, traced or transformed now, and not simply run."""
    if device.type not in ("cpu", "cuda") or is_compiling():
        return True
    if torch._C._functorch.peek_interpreter_stack() is not None or _get_current_dispatch_mode():
        return True
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def wanted_at_first_calls() -> FirstCalls | None:
    """The hook if OVERLAP_TUNE is 1, else None. Ops raise for other values than 0 and 1, by C++'s check of the environment."""
    return FirstCalls() if os.environ.get("OVERLAP_TUNE") == "1" else None


eager.behind_calls = wanted_at_first_calls()
