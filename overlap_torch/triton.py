"""The functions by which a Triton kernel signals and awaits the communication of its tiles; see
:func:`overlap_torch.produce`.

    import overlap_torch.triton as ot

    @triton.jit
    def kernel(..., tile_order, tile_chunk, counters, ...):
        tile = ot.tile(tile_order, tl.program_id(0))         # in place of the program's number
        ...
        tl.store(...)
        ot.signal(counters, tl.load(tile_chunk + tile))      # after the last store of the tile

Under ``TRITON_INTERPRET=1`` they work on CPU.

Raises:
    ImportError: there is no Triton. It comes with PyTorch's CUDA builds.
"""

from __future__ import annotations

import os
import sys

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError(
        "overlap_torch.triton needs Triton, which is not installed: `pip install triton`, or a CUDA build of PyTorch, which "
        "has it. Kernels in CUDA take overlap/signal.cuh"
    ) from error

__all__ = ["aligned", "signal", "signal_bulk", "tile", "wait", "wait_bulk"]

_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")
_POLLS = tl.constexpr(1 << 16)  # in the interpreter, where everything has arrived before the kernel
# As csrc/binding/kernels/kernel_job.h and csrc/runtime/group.h have them.
_REPORT = tl.constexpr(64)
_DEADLINE = tl.constexpr(66)
_LATE = tl.constexpr(1 << 30)  # in a flag: a kernel has given up waiting for it
_CALLERS_KERNEL = tl.constexpr(254)


@triton.jit
def tile(tile_order, index):
    """The tile to take as the ``index``-th: its row times the number of columns of tiles, plus its column."""
    return tl.load(tile_order + index)


@triton.jit
def signal(counters, chunk):
    """[A] Counts one more stored tile of the chunk; this program stored it by ``tl.store`` or ``tl.atomic_*``.

    Stores through tensor descriptors (TMA) complete later than the program's own; use :func:`signal_bulk` for them.
    """
    # All threads' stores come before the barrier, and the barrier before the one thread that adds.
    tl.debug_barrier()
    tl.atomic_add(counters + chunk, 1, sem="release", scope="gpu")


@triton.jit
def signal_bulk(counters, chunk):
    """[A] The same for a tile that was stored through tensor descriptors: waits until these stores are complete."""
    if not _INTERPRETED:
        # The thread that issued the stores waits for them; other threads have none. Then plain accesses see them.
        tl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0; fence.proxy.async; mov.b32 $0, $1;",
            "=r,r",
            [chunk],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    signal(counters, chunk)


@triton.jit
def _now_ns():
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def _report_late(arrived, chunk):
    # As csrc/kernels/signal: chunk, peer, and 1 expected; one plain store, as host memory may take no atomics.
    report = tl.load((arrived + _REPORT).to(tl.pointer_type(tl.int64)))
    failure = tl.full((), 0, tl.int64) + chunk
    failure = (failure * 256 + _CALLERS_KERNEL) * (1 << 48) + (1 << 24)
    tl.store(report.to(tl.pointer_type(tl.int64)), failure)


@triton.jit
def wait(arrived, chunk):
    """[D] Returns when the chunk has arrived; later loads read the arrived rows.

    At the group's deadline it returns in any case, and :func:`overlap_torch.check` and the next op raise.
    """
    flag = arrived + chunk
    if _INTERPRETED:
        seen = tl.atomic_or(flag, 0, sem="acquire", scope="gpu")
        polls = 0
        while (seen == 0) & (polls < _POLLS):
            seen = tl.atomic_or(flag, 0, sem="acquire", scope="gpu")
            polls += 1
        if seen == 0:
            tl.atomic_or(flag, _LATE, sem="relaxed", scope="gpu")
    else:
        # One thread polls, and its answer holds for the whole program. The time differs between threads, so it goes into
        # the flag before the program reads the flag.
        deadline = tl.load((arrived + _DEADLINE).to(tl.pointer_type(tl.int64)))
        start = _now_ns()
        seen = tl.atomic_or(flag, 0, sem="acquire", scope="gpu")
        while seen == 0:
            late = tl.where(_now_ns() - start > deadline, _LATE, 0)
            seen = tl.atomic_or(flag, late, sem="acquire", scope="gpu")
        if seen >= _LATE:
            _report_late(arrived, chunk)


@triton.jit
def wait_bulk(arrived, chunk):
    """[D] The same before loads through tensor descriptors (TMA)."""
    wait(arrived, chunk)
    if not _INTERPRETED:
        tl.inline_asm_elementwise(
            "fence.proxy.async; mov.b32 $0, $1;",
            "=r,r",
            [chunk],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


def aligned(kernel, output: str, input: str | None = None):
    """Makes a stock kernel take its tiles from a job, and signal or await their chunks, without a changed line::

        matmul = ot.aligned(matmul, output="c_ptr")
        with overlap_torch.produce("all_reduce", (M, N), a.dtype, tile=(128, 256), chunks=8) as job:
            matmul[grid](a, b, job.output, M, N, K, ...)       # as ever; no table is passed

    The kernel's source is followed from ``tl.program_id`` to the stores through ``output``. The number of a program, or of a turn
    of a persistent kernel's loop, comes from the job's table, and a signal follows the last store. With ``input``, for
    :func:`overlap_torch.consume`, a wait precedes the first load of the input. ``aligned.diff()`` shows the changed lines. The
    first launch with some arguments in a job computes only the kernel's addresses, checks that each number is one tile of
    the job, and copies the answer to the host. Outside a job the stock kernel runs.

    Args:
        kernel: a ``@triton.jit`` function, also below ``@triton.autotune`` and ``@triton.heuristics``. Autotuning chooses
            only among the configurations with the job's tile; the interpreter takes the first.
        output: the argument through which tiles are stored, row-major: ``job.output``, or the product of a kernel that
            waits.
        input: for a kernel that waits, the argument that gets ``job.gathered``. A tile loads only the rows with its own row
            numbers.

    Raises:
        ValueError: the pass cannot follow the kernel. This call raises, or a launch before any part of the kernel runs. The
            message names file, line and reason, and has the lines to write by hand.
        RuntimeError: the first launch is captured into a CUDA graph.
    """
    from overlap_torch._kernels.aligned import Aligned

    return Aligned(kernel, output, input, sys.modules[__name__])
