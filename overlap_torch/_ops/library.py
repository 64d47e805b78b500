"""Loads the op library."""

from __future__ import annotations

from pathlib import Path

import torch

_LIBRARY = Path(__file__).parents[1] / "_C.so"


def _load_library() -> None:
    try:
        torch.ops.load_library(_LIBRARY)
    except OSError as error:
        raise ImportError(
            f"cannot load {_LIBRARY} with torch {torch.__version__}: {error.__cause__ or error}. "
            "The library has to be built against the torch that loads it; rebuild it with "
            "`pip install .` in the project's folder (`make build` in a checkout)."
        ) from error


_load_library()

_check = torch.ops.overlap.check.default


def check() -> None:
    """Raises the failures of ops that had already returned; returns at once if there are none.

    Ops on CUDA are asynchronous: a deadline that passed (a rank that never called the op), an error of NCCL, a peer that
    died or called something else shows later. The error names the rank and the chunk that waited, or the calls that differ;
    results since then are undefined. It does not synchronise. To know that earlier ops went well, synchronise the
    device first; then no failure in them is missed. Over NCCL without peers, a rank that called another problem is
    found within seconds, not at once. Ops on CPU raise by themselves.
    Under ``OVERLAP_ON_FAILURE=abort`` a failure ends the
    process in place of an error.

    Raises:
        RuntimeError: a call failed since the process group was made; so does every later call on it.
    """
    _check()
