"""The differences between PyTorch 2.11 and 2.15; csrc/cpu/torch_version.h is the C++ half.

torch.autograd.Function: `apply` of its own base takes one of torch.func's levels. In 2.11 code can call that `apply`
instead of the class's own. In 2.15 one C++ function serves both, and depends on the base of the class.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
from torch._functorch.utils import enable_single_level_autograd_function, unwrap_dead_wrappers
from torch.autograd.function import _SingleLevelFunction as SingleLevelFunction

__all__ = [
    "SingleLevelFunction",
    "context_parallel_module",
    "enable_single_level_autograd_function",
    "unwrap_dead_wrappers",
]


def context_parallel_module() -> ModuleType:
    """The module of PyTorch's ring attention; both releases have its functions, which are private.

    Raises:
        ImportError: this PyTorch does not have it.
    """
    name = "torch.distributed.tensor.experimental._context_parallel._attention"
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"torch {torch.__version__} has no {name}: replace_context_parallel knows 2.11 to 2.15"
        ) from error
    wanted = ("_templated_ring_attention", "_templated_ring_attention_backward", "_cp_options")
    if not all(hasattr(module, one) for one in wanted):
        raise ImportError(
            f"torch {torch.__version__} has another context_parallel than 2.11 to 2.15, which replace_context_parallel knows"
        )
    return module
