"""Timing: variants of one computation in turns, each repetition as long as its slowest rank.

call   one call after a barrier of all ranks, in flushed caches; ranks on GPUs of one host leave it at one moment
row    ten calls in a row, queued after another GEMM, as in a training step; time / 10
graph  ten calls in one CUDA graph, replayed, as in serving; time / 10
"""

from __future__ import annotations

import functools
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import overlap_torch
from overlap_torch._ops.group import broadcast_integers, group_name

MODES = ("call", "row", "graph")
CALLS_IN_A_ROW = 10
# From the agreement on a moment to that moment, ns. An all-reduce and its reading on the host take a tenth of it; once in
# a hundred times they take 1 ms, on a host that is busy.
_LEAD_NS = 2_000_000
_FILLER_SIZE = 8192  # the GEMM before a row: long enough for the host to enqueue the row meanwhile

# Enqueues (on CPU: runs) the i-th call of a computation; i chooses the operands.
Variant = Callable[[int], None]


@dataclass(frozen=True)
class Times:
    """Microseconds for one call, over repetitions."""

    median: float
    p10: float
    p90: float
    host: float  # median time until the call returned to Python

    def spread(self, digits: int = 0) -> str:
        """The median, and the range of four of five repetitions."""
        return f"{self.median:.{digits}f} ({self.p10:.{digits}f} to {self.p90:.{digits}f})"

    def as_dict(self) -> dict[str, float]:
        return {key: round(value, 2) for key, value in asdict(self).items()}


def repeats_of(args: Namespace, mode: str) -> int:
    """How often a mode measures each variant."""
    return args.repeats if mode == "call" else max(3, args.repeats // 4)


def summary(samples: torch.Tensor) -> list[Times]:
    """Each variant's times out of :meth:`Stopwatch.samples`."""
    quantiles = torch.quantile(samples, samples.new_tensor([0.5, 0.1, 0.9]), dim=2)
    return [
        Times(*quantiles[:, 0, index].tolist(), quantiles[0, 1, index].item())
        for index in range(samples.shape[1])
    ]


def operand_sets(device: torch.device, set_bytes: int) -> int:
    """How many sets of operands to rotate so that a set has left the cache when its turn comes again."""
    cache = (
        torch.cuda.get_device_properties(device).L2_cache_size
        if device.type == "cuda"
        else 32 << 20
    )
    return max(1, min(16, -(-2 * cache // max(1, set_bytes))))


class Stopwatch:
    """Times variants on this rank's device: by events on the current stream of a GPU, by the host's clock on a CPU.

    Holds the buffers that measuring needs (a barrier's token, a cache's worth of zeros, a row's filler GEMM), so one
    serves for a whole benchmark.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cuda = device.type == "cuda"
        self._token = torch.zeros(1, device=device)
        self._tiny = torch.zeros(8, 8, device=device, dtype=torch.bfloat16)
        if self._cuda:
            self._one_clock = _one_host(device)
            cache = torch.cuda.get_device_properties(device).L2_cache_size
            self._flush = torch.empty(2 * cache, dtype=torch.int8, device=device)
            self._filler = torch.randn(
                3, _FILLER_SIZE, _FILLER_SIZE, device=device, dtype=torch.bfloat16
            )

    def compare(self, mode: str, variants: Sequence[Variant], repeats: int) -> list[Times]:
        """Times the variants in turns, `repeats` times each. Collective: all ranks call it with the same arguments."""
        return summary(self.samples(mode, variants, repeats))

    def named(self, mode: str, variants: Mapping[str, Variant], repeats: int) -> dict[str, Times]:
        """:meth:`compare` of named variants."""
        times = self.compare(mode, list(variants.values()), repeats)
        return dict(zip(variants, times, strict=True))

    def samples(self, mode: str, variants: Sequence[Variant], repeats: int) -> torch.Tensor:
        """The times that :meth:`compare` sums up: float64 [2, variants, turns], on the device and on the host.

        Microseconds for one call on the slowest rank. Each turn begins with the next variant, so that none always follows the same one.
        Collective.
        """
        calls = 1 if mode == "call" else CALLS_IN_A_ROW
        graphs = [self._capture(variant) for variant in variants] if mode == "graph" else []
        bodies = [graph.replay for graph in graphs] or [
            lambda turn, variant=variant: _row(variant, calls, turn) for variant in variants
        ]
        device_us = torch.zeros(len(variants), repeats, dtype=torch.float64)
        host_us = torch.zeros_like(device_us)
        for turn in range(-1, repeats):  # turn -1 warms up
            for place in range(len(bodies)):
                index = (turn + place) % len(bodies)
                body = bodies[index]
                run = body if graphs else functools.partial(body, turn + 1)
                times = self._time_once(run, flush=mode == "call", filler=mode == "row")
                if turn >= 0:
                    device_us[index, turn], host_us[index, turn] = (
                        value / calls for value in times
                    )
        for graph in graphs:
            graph.reset()
        slowest = torch.stack([device_us, host_us]).to(self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return slowest.cpu()

    def _capture(self, variant: Variant) -> torch.cuda.CUDAGraph:
        _row(variant, CALLS_IN_A_ROW, 0)  # every operand set once outside of a capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Relaxed: other host threads (NCCL's watchdogs) may go on querying events meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="relaxed"):
            _row(variant, CALLS_IN_A_ROW, 0)
        return graph

    def _time_once(
        self, run: Callable[[], None], *, flush: bool, filler: bool
    ) -> tuple[float, float]:
        """Device time and host time of `run` on this rank, in microseconds."""
        if not self._cuda:
            dist.barrier()
            start = time.perf_counter()
            run()
            elapsed_us = (time.perf_counter() - start) * 1e6
            return elapsed_us, elapsed_us
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if flush:
            self._flush.zero_()
        torch.cuda.synchronize()
        if filler:
            torch.mm(self._filler[0], self._filler[1], out=self._filler[2])
        # A barrier: on the device for work that is queued after other work, else on the hosts. Both sides' communicators
        # take part, so that both find their state in the cache, or neither does.
        overlap_torch.gemm_allreduce(self._tiny, self._tiny)
        if filler or not self._one_clock:
            dist.all_reduce(self._token)
        else:
            self.meet()
        begin.record()
        start = time.perf_counter()
        run()
        host_us = (time.perf_counter() - start) * 1e6
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3, host_us

    def meet(self) -> None:
        """Returns on all ranks of a host at the same moment.

        Ranks leave a barrier at times that differ by tens of microseconds, a tenth of the measured times. So they agree on
        a moment a little later, as in window-based synchronisation (Hunold and Carpen-Amarie, "Reproducible MPI
        Benchmarking is Still Not as Easy as You Think", 2016). They share their host's clock.
        """
        moment = torch.tensor([time.monotonic_ns() + _LEAD_NS], device=self.device)
        dist.all_reduce(moment, op=dist.ReduceOp.MAX)
        moment_ns = moment.item()
        while time.monotonic_ns() < moment_ns:
            pass


def _one_host(device: torch.device) -> bool:
    """True if all ranks run on one host. Collective."""
    own = list(Path("/proc/sys/kernel/random/boot_id").read_bytes())
    return on_all_ranks([own == broadcast_integers(own, group_name())], device)[0]


def on_all_ranks(facts: Sequence[bool], device: torch.device) -> list[bool]:
    """True for each fact that holds on every rank. Collective."""
    agreed = torch.tensor(facts, device=device, dtype=torch.int32)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    return [bool(flag) for flag in agreed.tolist()]


def _row(variant: Variant, calls: int, turn: int) -> None:
    for call in range(calls):
        variant(turn * calls + call)
