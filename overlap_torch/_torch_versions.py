"""The differences between PyTorch 2.11 and 2.15; csrc/cpu/torch_version.h is the C++ half."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch


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
