"""``overlap_torch.replace_symm_mem()``: callers of PyTorch's own fused GEMMs, ``torch.ops.symm_mem.fused_*``, get
these ops.

A stand-in is a kernel of PyTorch's operator. It is registered over PyTorch's own kernel on CUDA, and on CPU, where PyTorch
has none. It runs this package's op if the op takes the arguments. If not, it runs PyTorch's kernel on CUDA, and PyTorch's
composition of a GEMM and a collective on CPU.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.library import Library, get_kernel

from overlap_torch._ops.handles import Handle, Held
from overlap_torch._symm_mem.stand_ins import STAND_INS, symmetric_memory

_DEVICES = ("CUDA", "CPU")


class SymmMemCalls(NamedTuple):
    """How often an operator was called, and what ran.

    ``op``: its name, such as ``fused_all_gather_matmul``. ``device``: ``cuda`` or ``cpu``. ``why``: empty if this package's
    op ran; else why PyTorch's kernel ran on CUDA, or the composition on CPU. ``calls``: the number of calls.
    """

    op: str
    device: str
    why: str
    calls: int


_lock = threading.Lock()  # of the counts
_library: Library | None = None
_calls: Counter[tuple[str, str, str]] = Counter()


class SymmMemReplacement(Handle):
    """The result of :func:`overlap_torch.replace_symm_mem`: undoes it, once, by :meth:`undo` or at the end of a ``with``."""

    @property
    def calls(self) -> list[SymmMemCalls]:
        """Calls in this process since the operators were replaced, by any handle."""
        return calls()


def _put() -> None:
    global _library
    symmetric_memory()  # it defines the operators
    library = Library("symm_mem", "IMPL")
    try:
        with warnings.catch_warnings():  # PyTorch warns of an override, which this is
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for name in STAND_INS:
                for device in _DEVICES:
                    kernel = _kernel(name, device)
                    library.impl(name, kernel, device, with_keyset=True, allow_override=True)
    except BaseException:
        library._destroy()
        raise
    _library = library


def _take() -> None:
    global _library
    _library._destroy()
    _library = None
    with _lock:
        _calls.clear()


_held = Held(_put, _take)


def replace_symm_mem() -> SymmMemReplacement:
    """Replaces ``torch.ops.symm_mem.fused_all_gather_matmul`` and ``fused_matmul_reduce_scatter`` by these ops.

    All code that calls PyTorch's fused ops then runs :func:`overlap_torch.allgather_gemm` and
    :func:`overlap_torch.gemm_reducescatter`: Inductor's async TP (``torch._inductor.config._micro_pipeline_tp``),
    torchtitan's ``dist_gemm`` and others, eager or compiled before or after this call. This works on CUDA, and on CPU,
    where PyTorch has no kernel::

        with overlap_torch.replace_symm_mem():
            compiled_model(tokens).sum().backward()
            print(overlap_torch.report())       # which ops ran, and why PyTorch's did

    Results have the shapes, strides and dtypes of PyTorch's. The ops take rows that are gathered or scattered along any dim
    except the last, ``reduce_op="sum"``, and bfloat16, float16, float32 and float64. In ``fused_all_gather_scaled_matmul``
    and ``fused_scaled_matmul_reduce_scatter`` they take fp8 with scales of tensors or rows. Everything else runs PyTorch's
    kernel on CUDA, and a GEMM and a collective on CPU; there other fp8 raises :exc:`NotImplementedError`. Like PyTorch's
    kernels, the replacements record no gradient and ignore autocast.

    All ranks of a group must replace them, or none, because PyTorch's kernels and these ops do not communicate with each
    other.

    Returns:
        A handle: ``undo()``, or the end of a ``with`` block, puts PyTorch's own kernels back. A second call of this function
        registers nothing and returns another handle; the last of them to be undone ends the replacement.

    Raises:
        ImportError: PyTorch has no symmetric memory.
    """
    _held.hold()
    return SymmMemReplacement(_held.release)


def is_replaced() -> bool:
    """True if the operators run stand-ins now."""
    return _library is not None


def calls() -> list[SymmMemCalls]:
    """The calls since the operators were replaced, in the order of operators and devices."""
    return [SymmMemCalls(*key, count) for key, count in sorted(_calls.items())]


def lines() -> list[str]:
    """The lines of the doctor and the report."""
    if not is_replaced():
        return [
            "torch.ops.symm_mem: PyTorch's own kernels; overlap_torch.replace_symm_mem() puts these ops there"
        ]
    replaced = ", ".join(STAND_INS)
    said = [f"torch.ops.symm_mem: these ops run {replaced}"]
    for op, device, why, count in calls():
        instead = "PyTorch's kernel" if device == "cuda" else "GEMM and collective"
        ran = f"not ours but {instead}: {why}" if why else "ours"
        said.append(f"  {op} on {device}, {count} call{'s' if count > 1 else ''}: {ran}")
    return said


def _kernel(name: str, device: str) -> Callable[..., Any]:
    stand_in = STAND_INS[name]
    # PyTorch's own, before ours is there. Its kernels on Meta compute a GEMM and a collective on any device; but gloo sends no
    # fp8, and PyTorch's GEMM on CPU takes no scales of rows.
    own = None
    if device == "CUDA" or "scaled" not in name:
        own = get_kernel(f"symm_mem::{name}", "CUDA" if device == "CUDA" else "Meta")

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        call = stand_in(name, args, kwargs)
        why = call.refused()
        with _lock:
            _calls[name, device.lower(), why] += 1
        if why and own is None:
            raise NotImplementedError(
                f"symm_mem::{name}: {why}, which no kernel takes on CPU; PyTorch's own takes it on CUDA"
            )
        run = partial(own.call_boxed, keyset, *args, **kwargs) if why else call.ours
        kind = call.A.device.type
        # Operators act as inside a kernel: no gradient is recorded, and autocast casts nothing.
        with torch._C._AutoDispatchBelowAutograd():
            if not torch.is_autocast_enabled(kind):
                return run()
            with torch.autocast(kind, enabled=False):
                return run()

    return kernel
