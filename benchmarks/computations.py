"""Each op beside its sequence on one problem: a GEMM and a collective of torch.distributed, one after the other.

A computation takes one set of operands, input and weight, and returns its results as a tuple, so that the same
functions are compared on integers first and timed on normal operands then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist

import overlap_torch
from overlap_torch._tools import verify

from . import measure, pytorch_ops
from .scaled import ScaledSides
from .shapes import Shape

Results = tuple[torch.Tensor, ...]
Computation = Callable[..., Results]  # of operands, with their scales if they have any


@dataclass(frozen=True)
class Case:
    """One op on one shape.

    M is the rows of the whole GEMM: of the input that a reduce-scatter sums up, of the gathered input, of each rank's
    input of an all-to-all. `split` says how those of an all-to-all go to the ranks: "even", or "uneven", rank r getting
    r + 1 shares of each rank's rows; it is empty for the other ops.
    """

    op: str
    shape: Shape
    split: str = ""

    def __str__(self) -> str:
        return f"{self.shape} {self.split}".rstrip()

    def send_rows(self, world_size: int) -> list[int]:
        """Rows of an all-to-all for each rank; they add up to M."""
        shares = [1 if self.split == "even" else rank + 1 for rank in range(world_size)]
        total = sum(shares)
        ends = [self.shape.m * sum(shares[: rank + 1]) // total for rank in range(world_size)]
        return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def cases(op: str, shape: Shape, world_size: int) -> list[Case]:
    """The cases to measure for a shape. Rows that the ranks divide are rounded up to the group, as
    a layer pads them.
    """
    if op == "gemm_alltoall":
        return [Case(op, shape, split) for split in ("even", "uneven")]
    if op in ("gemm_reducescatter", "allgather_gemm"):
        shape = replace(shape, m=-(-shape.m // world_size) * world_size)
    return [Case(op, shape)]


class Sides(Protocol):
    """The op and what it is compared with."""

    input_rows: int  # of one rank's input

    def sequence(self, input: torch.Tensor, weight: torch.Tensor) -> Results: ...
    def op(self, input: torch.Tensor, weight: torch.Tensor) -> Results: ...
    def gemm(self, input: torch.Tensor, weight: torch.Tensor) -> Results: ...
    def collective(self) -> None: ...


class _AllReduce:
    def __init__(self, case: Case, like: torch.Tensor, group: str) -> None:
        self._group = group
        self.input_rows = case.shape.m
        # Zeros, here and below, because they stay finite however often they are summed up.
        self._message = like.new_zeros(case.shape.m, case.shape.n)

    def sequence(self, input: torch.Tensor, weight: torch.Tensor) -> Results:
        output = torch.mm(input, weight.t())
        dist.all_reduce(output)
        return (output,)

    def op(self, input: torch.Tensor, weight: torch.Tensor) -> Results:
        return (overlap_torch.gemm_allreduce(input, weight, group=self._group),)

    def gemm(self, input: torch.Tensor, weight: torch.Tensor) -> Results:
        return (torch.mm(input, weight.t()),)

    def collective(self) -> None:
        dist.all_reduce(self._message)


class _ReduceScatter:
    def __init__(self, case: Case, like: torch.Tensor, group: str) -> None:
        self._group = group
        self.input_rows = case.shape.m
        self._rows = case.shape.m // dist.get_world_size()
        self._message = like.new_zeros(case.shape.m, case.shape.n)
        self._received = like.new_zeros(self._rows, case.shape.n)

    def sequence(self, input: torch.Tensor, weight: torch.Tensor) -> Results:
        partial = torch.mm(input, weight.t())
        output = partial.new_empty(self._rows, partial.shape[1])
        dist.reduce_scatter_tensor(output, partial)
        return (output,)

    def op(self, input: torch.Tensor, weight: torch.Tensor) -> Results:
        return (overlap_torch.gemm_reducescatter(input, weight, group=self._group),)

    def gemm(self, input: torch.Tensor, weight: torch.Tensor) -> Results:
        return (torch.mm(input, weight.t()),)

    def collective(self) -> None:
        dist.reduce_scatter_tensor(self._received, self._message)


class _AllGather:
    def __init__(self, case: Case, like: torch.Tensor, group: str) -> None:
        self._group = group
        self._rows = case.shape.m
        self.input_rows = case.shape.m // dist.get_world_size()
        self._message = like.new_zeros(self.input_rows, case.shape.k)
        self._received = like.new_zeros(case.shape.m, case.shape.k)
        self._gathered = torch.randn_like(self._received)

    def sequence(self, input: torch.Tensor, weight: torch.Tensor) -> Results:
        gathered = input.new_empty(self._rows, input.shape[1])
        dist.all_gather_into_tensor(gathered, input)
        return torch.mm(gathered, weight.t()), gathered

    def op(self, input: torch.Tensor, weight: torch.Tensor) -> Results:
        return overlap_torch.allgather_gemm(input, weight, group=self._group)

    def gemm(self, input: torch.Tensor, weight: torch.Tensor) -> Results:
        return (torch.mm(self._gathered, weight.t()),)

    def collective(self) -> None:
        dist.all_gather_into_tensor(self._received, self._message)


class _AllToAll:
    def __init__(self, case: Case, like: torch.Tensor, group: str) -> None:
        self._group = group
        self.input_rows = case.shape.m
        world_size = dist.get_world_size()
        self._send = case.send_rows(world_size)
        self._receive = [self._send[dist.get_rank()]] * world_size
        # Who has equal counts does not name them, and takes NCCL's faster way.
        equal = len(set(self._send)) == 1
        self._splits = () if equal else (self._receive, self._send)
        self._message = like.new_zeros(case.shape.m, case.shape.n)
        self._received = like.new_zeros(sum(self._receive), case.shape.n)

    def sequence(self, input: torch.Tensor, weight: torch.Tensor) -> Results:
        product = torch.mm(input, weight.t())
        output = torch.empty_like(self._received)
        dist.all_to_all_single(output, product, *self._splits)
        return (output,)

    def op(self, input: torch.Tensor, weight: torch.Tensor) -> Results:
        return (
            overlap_torch.gemm_alltoall(
                input, weight, self._send, self._receive, group=self._group
            ),
        )

    def gemm(self, input: torch.Tensor, weight: torch.Tensor) -> Results:
        return (torch.mm(input, weight.t()),)

    def collective(self) -> None:
        dist.all_to_all_single(self._received, self._message, *self._splits)


_SIDES: dict[str, Callable[[Case, torch.Tensor, str], Sides]] = {
    "gemm_allreduce": _AllReduce,
    "gemm_reducescatter": _ReduceScatter,
    "allgather_gemm": _AllGather,
    "gemm_alltoall": _AllToAll,
}
OPS = tuple(_SIDES)


class Computations:
    """A case's computations over rotating sets of operands. Collective: every rank makes it with the same arguments."""

    def __init__(
        self,
        case: Case,
        dtype: torch.dtype,
        device: torch.device,
        group: str,
        baselines: tuple[str, ...] = (),
        scales: str | None = None,
        fast_accum: bool = False,
    ) -> None:
        self._case, self._dtype, self._device = case, dtype, device
        if scales is not None:
            self._take_scaled(scales, fast_accum, group, baselines)
            return
        sides = _SIDES[case.op](case, torch.empty(0, dtype=dtype, device=device), group)
        self._sides = sides
        self.baselines: dict[str, Computation] = (
            pytorch_ops.baselines(case.op, case.shape, dtype, device, group)
            if "pytorch" in baselines
            else {}
        )
        shape, seed = case.shape, 100 * dist.get_rank()
        count = measure.operand_sets(
            device, (sides.input_rows + shape.n) * shape.k * dtype.itemsize
        )
        self._operands = [
            verify.normal_operands(sides.input_rows, shape.n, shape.k, dtype, device, seed + index)
            for index in range(count)
        ]

    def _take_scaled(
        self, scales: str, fast_accum: bool, group: str, baselines: tuple[str, ...]
    ) -> None:
        shape, world = self._case.shape, dist.get_world_size()
        send_rows = self._case.send_rows(world) if self._case.split else None
        sides = self._sides = ScaledSides(
            self._case.op, shape, send_rows, scales, group, fast_accum
        )
        on_gpu = "pytorch" in baselines and self._device.type == "cuda"
        self.baselines = sides.pytorch() if on_gpu else {}
        count = measure.operand_sets(self._device, (sides.input_rows + shape.n) * shape.k)
        seed = 100 * dist.get_rank()
        self._operands = [
            sides.operands(self._dtype, self._device, seed + index) for index in range(count)
        ]

    def variants(self) -> list[measure.Variant]:
        """The sequence, the op, the baselines in their order."""
        return self._over_operands(self._sides.sequence, self._sides.op, *self.baselines.values())

    def parts(self) -> list[measure.Variant]:
        """The sequence's GEMM alone, its collective alone."""
        return [*self._over_operands(self._sides.gemm), lambda turn: self._sides.collective()]

    def _over_operands(self, *computations: Computation) -> list[measure.Variant]:
        def variant(computation: Computation) -> measure.Variant:
            def run(turn: int) -> None:
                computation(*self._operands[turn % len(self._operands)])

            return run

        return [variant(computation) for computation in computations]

    def exact_op(self) -> bool:
        """True if the op equals the sequence bit for bit on integer operands, on every rank. Collective."""
        return self._exact([self._sides.op])[0]

    def exact_baselines(self) -> dict[str, bool]:
        """The same of the baselines."""
        return dict(zip(self.baselines, self._exact(list(self.baselines.values())), strict=True))

    def _exact(self, computations: list[Computation]) -> list[bool]:
        if not computations:
            return []
        if isinstance(self._sides, ScaledSides):
            operands = self._sides.integer_operands(self._dtype, self._device)
        else:
            operands = verify.integer_operands(
                self._sides.input_rows,
                self._case.shape.n,
                self._case.shape.k,
                self._dtype,
                self._device,
                dist.get_world_size(),
                seed=1 + dist.get_rank(),
            )
        expected = self._sides.sequence(*operands)
        equal = [
            all(map(torch.equal, computation(*operands), expected)) for computation in computations
        ]
        agreed = torch.tensor(equal, device=self._device, dtype=torch.int32)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
        return [bool(flag) for flag in agreed.tolist()]
