"""torchtitan's fused linears of tensor parallelism, ``tp_gemm_backend="dist_gemm"``, by the ops of this package."""

from __future__ import annotations

import sys
from types import ModuleType

from overlap_torch._ops.handles import Handle, Held
from overlap_torch.integrations._release import require

__all__ = ["Swap", "enable"]


class Swap(Handle):
    """The result of :func:`enable`: undoes it, once, by :meth:`undo` or at the end of a ``with``."""


def enable() -> Swap:
    """Swaps the autograd Functions of ``torchtitan.distributed.linear`` for ones that run this package's ops.

    The replacements of ``AllGatherLinear``, ``AllGatherLinearMulti`` and ``LinearReduceScatter`` take and return the same
    as torchtitan's. They have the names that torchtitan's modules have imported or will import. Models with
    ``tp_gemm_backend="dist_gemm"``, made before or after, then also overlap on GPUs that PyTorch's symmetric memory does
    not serve, and run on CPU::

        with overlap_torch.integrations.torchtitan.enable():
            trainer.train()

    Forward keeps this rank's rows. These are as many bytes as torchtitan's Functions keep, but without a copy of a part of
    the gathered input. Backward gathers the rows beside its GEMM. A graph that was recorded before a swap runs the backward
    of its own Function. Call ``enable`` before ``torch.compile`` traces the model.

    Returns:
        A handle: ``undo()``, or the end of a ``with`` block, puts torchtitan's Functions back. A second call of this function swaps
        nothing and returns another handle; the last of them to be undone ends it.

    Raises:
        ImportError: torchtitan is not installed, or of another release than 0.3.
    """
    require("torchtitan", ("0.3",), "torchtitan")
    _held.hold()
    return Swap(_held.release)


def _swap(back: bool = False) -> None:
    """Swaps in all modules, because a module that has imported a name holds the class itself."""
    from overlap_torch.integrations import _torchtitan_functions as functions

    pairs = functions.PAIRS
    if back:
        pairs = {ours: theirs for theirs, ours in pairs.items()}
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module is functions:
            continue
        names = vars(module)
        for old, new in pairs.items():
            if names.get(old.__name__) is old:
                names[old.__name__] = new


_held = Held(_swap, lambda: _swap(back=True))
