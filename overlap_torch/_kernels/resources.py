"""The resources that a kernel that is not this package's leaves to communication."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from overlap_torch._kernels.occupancy import MOST_CTAS

WAYS = ("grid", "green_context", "padding")
PRIORITIES = ("high", "low")


@dataclass(frozen=True)
class KernelResources:
    """The resources that the kernel leaves, how it leaves them, and communication's streams; see :func:`resources`."""

    comm_sms: int = 0
    by: str = "grid"
    ctas_per_sm: int = 0
    priority: str = "high"

    def __post_init__(self) -> None:
        for name, allowed in (("by", WAYS), ("priority", PRIORITIES)):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(
                    f"{name} is {value!r}, allowed are {', '.join(map(repr, allowed))}"
                )
        if type(self.comm_sms) is not int or self.comm_sms < 0:
            raise ValueError(f"comm_sms is {self.comm_sms!r}, allowed is an integer of 0 or more")
        pads = self.by == "padding"
        allowed = range(1, MOST_CTAS + 1) if pads else range(1)
        if type(self.ctas_per_sm) is not int or self.ctas_per_sm not in allowed:
            raise ValueError(
                f"ctas_per_sm is {self.ctas_per_sm!r}, allowed are "
                + (f"1 to {MOST_CTAS}" if pads else f'0 with by={self.by!r}: take by="padding"')
            )
        if pads and self.comm_sms:
            raise ValueError(
                f'comm_sms is {self.comm_sms}, allowed is 0 with by="padding", which leaves a part of every SM: take '
                'by="grid" or "green_context" to reserve SMs'
            )

    def programs(self, sm_count: int) -> int:
        """Programs of a persistent kernel: one for each SM that is left to it, with padding as many as an SM has room for."""
        if self.comm_sms >= sm_count:
            raise ValueError(
                f"comm_sms is {self.comm_sms}, allowed are 0 to {sm_count - 1}, as the device has {sm_count} SMs"
            )
        return (sm_count - self.comm_sms) * max(1, self.ctas_per_sm)


class _Current(threading.local):
    resources = KernelResources()


_current = _Current()


def current() -> KernelResources:
    """The resources of the innermost ``with resources(...)`` of this thread."""
    return _current.resources


@contextmanager
def resources(
    comm_sms: int = 0, by: str = "grid", *, ctas_per_sm: int = 0, priority: str = "high"
) -> Iterator[KernelResources]:
    """Sets what the kernels of jobs that begin in this block leave to communication::

        with overlap_torch.resources(16, by="green_context"):
            with overlap_torch.consume("all_gather", x, tile=(128, 128), columns=n) as job:
                ...

    Args:
        comm_sms: the number of SMs to leave free, out of the device's (132 on an H200). ``produce`` and ``consume`` also
            take the value of this block as ``resources=``.
        by: ``"grid"``: a persistent kernel launches only ``job.programs`` programs, one for each remaining SM.
            ``"green_context"``: inside the job's ``with`` a CUDA green context of the remaining SMs is current, so that any
            kernel that is launched there, cuBLAS's too, stays on them. The context's default stream becomes the current
            one. It begins after the previous stream, and the previous stream continues after it; other streams that are
            used inside keep all SMs. CUDA graphs cannot capture it. Numbers of SMs are rounded down to multiples that the
            device can reserve, 8 on Hopper. ``"padding"``: CUDA kernels are launched with ``job.smem_pad_bytes(own)`` more
            bytes of shared memory (by ``overlap/launch.cuh``), so that an SM holds ``ctas_per_sm`` of their blocks, and
            communication has the rest of it. No SM is reserved: ``comm_sms`` is 0.
        ctas_per_sm: with ``by="padding"``, 1 to 32.
        priority: the priority of communication's streams: ``"high"``, so that its blocks get the SMs that become free, or
            ``"low"``, so that the kernel's blocks get them first. In a plan this is ``plan.resources.low_priority``.

    Raises:
        ValueError: a number out of range, or an unknown ``by`` or ``priority``.
    """
    before = _current.resources
    _current.resources = KernelResources(comm_sms, by, ctas_per_sm, priority)
    try:
        yield _current.resources
    finally:
        _current.resources = before


_contexts: dict[tuple[int, int], object] = {}


def green_context(sms: int, device: torch.device) -> object:
    """The green context of this number of SMs of the device, made once.

    Raises:
        RuntimeError: this PyTorch or driver has no green contexts, or a capture is running.
    """
    from torch.cuda import green_contexts

    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            'by="green_context" cannot be captured into a CUDA graph: take by="grid" with a persistent kernel'
        )
    if not green_contexts.SUPPORTED:
        raise RuntimeError(
            f'by="green_context" needs a PyTorch with green contexts, which {torch.__version__} is not: take by="grid"'
        )
    index = device.index if device.index is not None else torch.cuda.current_device()
    key = (index, sms)
    if key not in _contexts:
        _contexts[key] = green_contexts.GreenContext.create(sms, index)
    return _contexts[key]
