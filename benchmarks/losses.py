"""Where an op's time goes: its timeline beside its GEMM alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from overlap_torch._watch.timeline import Call
from overlap_torch._watch.trace import trace
from overlap_torch.plan import Plan

from .measure import Variant

CALLS = 10


@dataclass(frozen=True)
class Losses:
    """One call of an op on the slowest rank, in parts that add up; medians over calls, in microseconds."""

    gemm_us: float  # the sequence's GEMM, alone
    fewer_sms_us: float  # the GEMM's extra time because the plan leaves it fewer SMs: computed from their share
    waiting_us: float  # the rest until the last tile: starts, waits for peers, memory and power
    tail_us: float  # from the GEMM's end to the op's
    hidden: float  # share of the communication's time before the GEMM's end

    @property
    def op_us(self) -> float:
        return self.gemm_us + self.fewer_sms_us + self.waiting_us + self.tail_us

    @classmethod
    def of(
        cls, gemm_end_us: float, end_us: float, hidden: float, gemm_us: float, sms_left: float
    ) -> Losses:
        """`sms_left`: the share of the SMs that the GEMM has in the op."""
        slower_us = gemm_us * (1.0 / sms_left - 1.0)
        return cls(
            gemm_us, slower_us, gemm_end_us - gemm_us - slower_us, end_us - gemm_end_us, hidden
        )

    def as_dict(self) -> dict[str, float]:
        return {
            key: round(value, 4 if key == "hidden" else 2) for key, value in asdict(self).items()
        }


def sms_left(plan: Plan, device: torch.device) -> float:
    """The share of a device's SMs that the plan leaves its GEMM; 1 on a CPU."""
    if device.type != "cuda":
        return 1.0
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return 1.0 - min(plan.resources.comm_sms, count - 1) / count


def record(op: Variant, plan: Plan, gemm_us: float, device: torch.device) -> Losses | None:
    """Traces calls, each after a meeting of all ranks. None if the op runs no plan. Collective."""
    token = torch.zeros(1, device=device)
    with trace() as traced:
        for turn in range(1 + CALLS):
            dist.all_reduce(token)
            op(turn)
    calls = traced.calls[1:]  # the first one warms up
    medians = torch.tensor(_medians(calls), dtype=torch.float64, device=device)
    everybody = [torch.empty_like(medians) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, medians)
    if any(torch.isnan(one).any() for one in everybody):
        return None
    slowest = max((one.tolist() for one in everybody), key=lambda one: one[1])
    return Losses.of(*slowest, gemm_us=gemm_us, sms_left=sms_left(plan, device))


def _medians(calls: Sequence[Call]) -> list[float]:
    """The medians of the GEMM's end, the op's end, and the hidden share."""
    if not calls:
        return [float("nan")] * 3
    return [
        statistics.median(column)
        for column in zip(
            *((call.gemm_end_us, call.end_us, call.hidden_fraction) for call in calls), strict=True
        )
    ]
