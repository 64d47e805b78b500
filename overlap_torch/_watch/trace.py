"""``overlap_torch.trace()``: the timeline of all calls of the ops while it is on."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
import torch.distributed as dist

from overlap_torch._ops import library  # noqa: F401  (the library holds the ops)
from overlap_torch._watch import timeline as _timeline
from overlap_torch._watch.timeline import Call

_ops = torch.ops.overlap


class Trace:
    """The result of :func:`overlap_torch.trace`: the calls of this rank's ops during its block.

    Attributes:
        calls: a :class:`Call` for each, by device in the order of their starts; empty until the block has ended.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __enter__(self) -> Trace:
        _ops._trace_start()
        self.calls = []
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # The caller should see the error of the block.
        quiet = contextlib.suppress(RuntimeError) if kind else contextlib.nullcontext()
        with quiet:
            self.calls = _timeline.calls_of(*_ops._trace_stop())

    def save(self, path: str | Path) -> None:
        """Writes the calls as a Chrome trace (JSON), for ui.perfetto.dev or chrome://tracing.

        The process is this rank; each device has a thread for GEMMs and one for communication. Times are in microseconds,
        as in :class:`Call`.
        """
        _timeline.write_chrome_trace({_rank(): self.calls}, path)

    def plot(self, path: str | Path) -> None:
        """Draws the calls, in the format of the path's suffix (PNG, SVG, PDF).

        Each device has a bar for each GEMM, with a tick where a chunk's tiles were finished, and below it the chunks'
        communication, on one axis of time.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: no call was recorded.
        """
        lanes: dict[str, list[Call]] = {}
        for call in self.calls:
            lanes.setdefault(f"rank {_rank()}, {call.device}", []).append(call)
        calls = f"{len(self.calls)} call{'' if len(self.calls) == 1 else 's'}"
        ops = sorted({call.op for call in self.calls})
        _timeline.write_picture(lanes, path, f"{calls} of {', '.join(ops)}")


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def trace() -> Trace:
    """Records when the ops' GEMMs and their communication run, over any code::

        with overlap_torch.trace() as t:
            loss = model(batch).sum()
            loss.backward()
        for call in t.calls:
            print(call.op, call.m, call.n, call.k, f"{call.hidden_fraction:.0%} of its communication hidden")
        t.save("trace.json")
        t.plot("timeline.png")

    It sees all calls of this process, forward and backward, eager and compiled, on all threads, groups and devices. It
    leaves out calls that communicate nothing (a group of one, empty operands), calls captured into a CUDA graph and their
    replays, and calls on CUDA that run the unfused composition. The end of the block waits on the host until the calls on
    CUDA have ended. A trace makes calls on CUDA a little slower, because kernels on their own stream watch the waits.

    If the block raises, tracing ends, too, and ``calls`` has the calls that had ended before.

    Raises:
        RuntimeError: another trace is on; there is one at a time in a process.
    """
    return Trace()
