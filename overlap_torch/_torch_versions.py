"""The differences between PyTorch 2.11 and 2.15; csrc/cpu/torch_version.h is the C++ half.

torch.autograd.Function: `apply` of its own base takes one of torch.func's levels. In 2.11 that can be called past the class's
own `apply`, in 2.15 the same C++ function serves both and goes by the base of the class.
"""

from __future__ import annotations

from torch._functorch.utils import enable_single_level_autograd_function, unwrap_dead_wrappers
from torch.autograd.function import _SingleLevelFunction as SingleLevelFunction

__all__ = [
    "SingleLevelFunction",
    "enable_single_level_autograd_function",
    "unwrap_dead_wrappers",
]
