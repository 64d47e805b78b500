"""Loads the op library."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

_LIBRARY = Path(__file__).parents[1] / "_C.so"


try:
    torch.ops.load_library(_LIBRARY)
except OSError as error:
    raise ImportError(
        f"cannot load {_LIBRARY} with torch {torch.__version__}: {error.__cause__ or error}. "
        "The library has to be built against the torch that loads it; rebuild it with "
        "`pip install .` in the project's folder (`make build` in a checkout)."
    ) from error

_check = torch.ops.overlap.check.default
OPS = ("gemm_allreduce", "gemm_reducescatter", "allgather_gemm", "gemm_alltoall")


def overloads() -> Iterator[tuple[str, torch._ops.OpOverload]]:
    """The overloads of OPS, with their names in a library."""
    for name in OPS:
        packet = getattr(torch.ops.overlap, name)
        for overload in packet.overloads():
            yield (
                name + ("" if overload == "default" else f".{overload}"),
                getattr(packet, overload),
            )


def check() -> None:
    """Raises failures of ops that had already returned; returns at once if there are none.

    Ops on CUDA are asynchronous, so failures show later: a deadline that passed because a rank never called the op, an
    error of NCCL, a peer that died or called something else. The error names the rank and the chunk that waited, or the
    calls that differ; results since then are undefined. ``check`` does not synchronise. To be sure that earlier ops
    succeeded, synchronise the device first. Over NCCL without peers, a rank that called
    another problem is found within seconds, not at once. Ops on CPU raise themselves. With ``OVERLAP_ON_FAILURE=abort`` a
    failure ends the process instead of raising.

    Raises:
        RuntimeError: a call failed since the process group was made. Every later call on the group raises, too.
    """
    _check()
