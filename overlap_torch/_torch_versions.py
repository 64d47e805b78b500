"""The differences between PyTorch 2.11 and 2.15; csrc/cpu/torch_version.h is the C++ half.

torch.autograd.Function: `apply` of its own base takes one of torch.func's levels. In 2.11 that can be called past the class's
own `apply`, in 2.15 the same C++ function serves both and goes by the base of the class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch._functorch.utils import enable_single_level_autograd_function, unwrap_dead_wrappers
from torch.autograd.function import _SingleLevelFunction as SingleLevelFunction

_Function = TypeVar("_Function", bound=Callable)

__all__ = [
    "SingleLevelFunction",
    "constant_in_graphs",
    "enable_single_level_autograd_function",
    "unwrap_dead_wrappers",
]


def constant_in_graphs(function: _Function) -> _Function:
    """The mark that torch.compiler.assume_constant_result sets, without its import of torch._dynamo, which takes a second."""
    function._dynamo_marked_constant = True
    return function
