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
        disabled: _Function | None = None  # a compiler would warn of functools.cache

        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal disabled
            if "torch._dynamo" not in sys.modules:
                return function(*arguments, **keywords)
            if disabled is None:
                disabled = torch.compiler.disable(function, reason=reason)
            return disabled(*arguments, **keywords)

        call._torchdynamo_disable, call._torchdynamo_disable_msg = True, reason
        return call

    return decorated
