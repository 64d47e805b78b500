"""Functions that torch.compile takes as constants or leaves out, without an import of torch._dynamo, which takes a second."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def constant_in_graphs(function: _Function) -> _Function:
    """The mark that torch.compiler.assume_constant_result sets, without its import of torch._dynamo, which takes a second."""
    function._dynamo_marked_constant = True
    return function


def outside_graphs(reason: str) -> Callable[[_Function], _Function]:
    """A decorator of a function that torch.compile does not trace, and says why, as torch.compiler.disable does; without its import."""

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
