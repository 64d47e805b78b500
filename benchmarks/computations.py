"""Each op beside its sequence on one problem: a GEMM and a collective of torch.distributed, one after the other.

A computation takes one set of operands, input and weight, and returns its results as a tuple. The same functions are first
compared on integers and then timed on normal operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

import overlap_torch
from overlap_torch._tools import verify

from . import measure, pytorch_ops, scaled
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
    """The cases to measure for a shape. Rows that the ranks divide are rounded up to the group, as a layer pads them."""
    if op == "gemm_alltoall":
        return [Case(op, shape, split) for split in ("even", "uneven")]
    if op in ("gemm_reducescatter", "allgather_gemm"):
        shape = replace(shape, m=-(-shape.m // world_size) * world_size)
    return [Case(op, shape)]


class Sides:
    """The op of a case and its sequence, over plain operands or fp8's with their scales."""

    def __init__(
        self,
        case: Case,
        dtype: torch.dtype,
        device: torch.device,
        group: str,
        scaling: scaled.Scaling | None = None,
    ) -> None:
        self._op, self._shape = case.op, case.shape
        self._dtype, self._device, self._scaling = dtype, device, scaling
        self._gathers = case.op == "allgather_gemm"
        world, (m, n, k) = dist.get_world_size(), (case.shape.m, case.shape.n, case.shape.k)
        self.input_rows = m // world if self._gathers else m
        divides = case.op == "gemm_alltoall"
        self._send = case.send_rows(world) if divides else []
        self._receive = [self._send[dist.get_rank()]] * world if divides else []
        self._function = getattr(overlap_torch, case.op)
        self._rows = (self._send, self._receive) if divides else ()
        self._keywords: dict[str, Any] = {"group": group}
        if scaling is not None:
            self._keywords |= scaling.keywords
            self._keywords |= {"shared_scale_input": scaling.shared} if self._gathers else {}
        # A caller with equal counts does not pass them, and gets NCCL's faster path.
        equal = len(set(self._send)) <= 1
        self._splits = () if equal else (self._receive, self._send)
        rows = {"gemm_reducescatter": m // world, "gemm_alltoall": sum(self._receive)}
        self._output_rows = rows.get(case.op, m)
        # Zeros stay finite in any number of sums.
        if self._gathers:
            moved = dtype if scaling is None else torch.uint8
            self._message = torch.zeros(self.input_rows, k, dtype=moved, device=device)
            self._received = self._message.new_zeros(m, k)
        else:
            output = dtype if scaling is None else scaled.OUTPUT
            self._message = torch.zeros(m, n, dtype=output, device=device)
            self._received = self._message.new_zeros(self._output_rows, n)
        self._gathered: Results = ()

    def operands(self, seed: int) -> Results:
        """Normally distributed input and weight; cast, and with both scales, where the case has them."""
        dtype = self._dtype if self._scaling is None else torch.bfloat16
        sizes = (self.input_rows, self._shape.n, self._shape.k)
        operands = verify.normal_operands(*sizes, dtype, self._device, seed)
        return operands if self._scaling is None else self._scaling.cast(*operands, self._dtype)

    def integer_operands(self) -> Results:
        """Operands without rounding in any sum; scales are one."""
        dtype = self._dtype if self._scaling is None else torch.bfloat16
        sizes = (self.input_rows, self._shape.n, self._shape.k)
        rank, world = dist.get_rank(), dist.get_world_size()
        operands = verify.integer_operands(*sizes, dtype, self._device, world, seed=1 + rank)
        return operands if self._scaling is None else self._scaling.ones(*operands, self._dtype)

    def sequence(self, input: torch.Tensor, weight: torch.Tensor, *scales: torch.Tensor) -> Results:
        if self._gathers:
            gathered, *scales = self._gather(input, scales)
            return self._product(gathered, weight, *scales), _bytes(gathered)
        product = self._product(input, weight, *scales)
        if self._op == "gemm_allreduce":
            dist.all_reduce(product)
            return (product,)
        output = product.new_empty(self._output_rows, product.shape[1])
        self._send_to_all(product, output)
        return (output,)

    def op(self, input: torch.Tensor, weight: torch.Tensor, *scales: torch.Tensor) -> Results:
        keywords = self._keywords
        if self._scaling is not None:
            keywords = keywords | {"scale_input": scales[0], "scale_weight": scales[1]}
        result = self._function(input, weight, *self._rows, **keywords)
        return (result[0], _bytes(result[1])) if self._gathers else (result,)

    def gemm(self, input: torch.Tensor, weight: torch.Tensor, *scales: torch.Tensor) -> Results:
        """The sequence's GEMM alone; if rows are gathered, on all ranks' rows, the same each time."""
        if self._gathers and not self._gathered:
            self._gathered = self._gather(input, scales)
        input, *scales = self._gathered or (input, *scales)
        return (self._product(input, weight, *scales),)

    def collective(self) -> None:
        """The sequence's collective alone."""
        if self._gathers:
            dist.all_gather_into_tensor(self._received, self._message)
        elif self._op == "gemm_allreduce":
            dist.all_reduce(self._message)
        else:
            self._send_to_all(self._message, self._received)

    def _product(self, input: torch.Tensor, weight: torch.Tensor, *scales: torch.Tensor):
        if self._scaling is None:
            return torch.mm(input, weight.t())
        return self._scaling.product(input, weight, *scales)

    def _send_to_all(self, message: torch.Tensor, received: torch.Tensor) -> None:
        if self._op == "gemm_reducescatter":
            dist.reduce_scatter_tensor(received, message)
        else:
            dist.all_to_all_single(received, message, *self._splits)

    def _gather(self, input: torch.Tensor, scales: Sequence[torch.Tensor]) -> Results:
        """All ranks' rows, and scales; a single scale is the same on every rank, and does not travel."""

        def whole(own: torch.Tensor) -> torch.Tensor:
            gathered = own.new_empty(dist.get_world_size() * own.shape[0], own.shape[1])
            dist.all_gather_into_tensor(_bytes(gathered), _bytes(own))
            return gathered

        if self._scaling is None or self._scaling.shared:
            return whole(input), *scales
        return whole(input), whole(scales[0]), scales[1]


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    """The same memory, as bytes if it holds fp8, because collectives and comparisons do not take fp8."""
    return rows.view(torch.uint8) if rows.dtype.itemsize == 1 else rows


OPS = ("gemm_allreduce", "gemm_reducescatter", "allgather_gemm", "gemm_alltoall")


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
        self._device = device
        scaling = None if scales is None else scaled.Scaling(scales, fast_accum)
        sides = self._sides = Sides(case, dtype, device, group, scaling)
        self.baselines: dict[str, Computation] = {}
        if "pytorch" in baselines and scaling is None:
            self.baselines = pytorch_ops.baselines(case.op, case.shape, dtype, device, group)
        elif "pytorch" in baselines and device.type == "cuda":
            self.baselines = scaling.pytorch(case.op, case.shape, group)
        shape, seed = case.shape, 100 * dist.get_rank()
        count = measure.operand_sets(
            device, (sides.input_rows + shape.n) * shape.k * dtype.itemsize
        )
        self._operands = [sides.operands(seed + index) for index in range(count)]

    def variants(self) -> list[measure.Variant]:
        """The sequence, the op, the baselines in their order."""
        return self._over_operands(self._sides.sequence, self._sides.op, *self.baselines.values())

    def parts(self) -> list[measure.Variant]:
        """The sequence's GEMM alone, its collective alone."""
        return [*self._over_operands(self._sides.gemm), lambda turn: self._sides.collective()]

    def _over_operands(self, *computations: Computation) -> list[measure.Variant]:
        sets = self._operands
        return [lambda turn, run=run: run(*sets[turn % len(sets)]) for run in computations]

    def exact_op(self) -> bool:
        """True if the op equals the sequence bit for bit on integer operands, on every rank. Collective."""
        return self._exact([self._sides.op])[0]

    def exact_baselines(self) -> dict[str, bool]:
        """As `exact_op`, for the baselines."""
        return dict(zip(self.baselines, self._exact(list(self.baselines.values())), strict=True))

    def _exact(self, computations: list[Computation]) -> list[bool]:
        if not computations:
            return []
        operands = self._sides.integer_operands()
        expected = self._sides.sequence(*operands)
        equal = [
            all(map(torch.equal, computation(*operands), expected)) for computation in computations
        ]
        return measure.on_all_ranks(equal, self._device)
