"""Decorators of functions that torch.compile takes as constants or leaves out. They avoid importing torch._dynamo, which
takes a second."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def constant_in_graphs(function: _Function) -> _Function:
    """Sets the mark of torch.compiler.assume_constant_result, without importing torch._dynamo."""
    function._dynamo_marked_constant = True
    return function


def outside_graphs(reason: str) -> Callable[[_Function], _Function]:
    """Keeps torch.compile from tracing a function, with a reason, as torch.compiler.disable does, without importing
    torch._dynamo."""

    def decorated(function: _Function) -> _Function:
        @functools.cache
        def disabled() -> _Function:
            return torch.compiler.disable(function, reason=reason)

        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            chosen = disabled() if "torch._dynamo" in sys.modules else function
            return chosen(*arguments, **keywords)

        call._torchdynamo_disable, call._torchdynamo_disable_msg = True, reason
        return call

    return decorated
