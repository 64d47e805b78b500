"""What is checked of every call of the op, whatever the test."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from operands import (
    Case,
    difference,
    expected_output,
    make_operands,
    poison,
    rank_device,
    world_name,
)


class Failures:
    """What a job found: how much it checked, and what was wrong."""

    def __init__(self) -> None:
        self.checks = 0
        self.lines: list[str] = []

    def expect(self, problem: str | None, *where: object) -> None:
        self.checks += 1
        if problem:
            self.lines.append(f"{' '.join(str(part) for part in where)}: {problem}")

    def result(self) -> tuple[int, list[str]]:
        return self.checks, self.lines


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _same(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    """Equal, NaN too (padding around strided operands is NaN)."""
    return torch.equal(tensor.nan_to_num(nan=77.0), copy.nan_to_num(nan=77.0))


def check_call(
    failures: Failures,
    case: Case,
    *where: object,
    seed: int = 0,
    group: dist.ProcessGroup | None = None,
    op: Callable[..., torch.Tensor] | None = None,
) -> torch.Tensor:
    """One call on this rank's operands, checked for all that the contract promises of any call."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    name = world_name() if group is None else group.group_name
    device = rank_device()
    operands = make_operands(case, rank, world, device, seed)
    before = operands.clone()
    expected = expected_output(case, world, device, seed)
    size = max(1, expected.numel()) * expected.element_size()
    poison(device, size, 512)
    output = (op or torch.ops.overlap.gemm_allreduce)(
        operands.input, operands.weight, operands.bias, group=name
    )
    failures.expect(difference(output, expected), *where, case, f"seed {seed}")
    failures.expect(None if output.is_contiguous() else f"strides {output.stride()}", *where, case)
    for field in ("input", "weight", "bias"):
        operand = getattr(operands, field)
        if operand is None:
            continue
        changed = not _same(operand, getattr(before, field))
        failures.expect(f"{field} was modified" if changed else None, *where, case)
        shared = output.numel() > 0 and storage(operand) == storage(output)
        failures.expect(f"the output shares {field}'s memory" if shared else None, *where, case)
    return output
