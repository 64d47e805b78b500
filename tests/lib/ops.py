"""The ops as tests see them: operands for any case, and what all ranks' results must be.

An op's meaning is one function over all ranks' operands, in float64 and without communication: it says what a call must
return and, by autograd, what its gradients must be. Nothing of the code under test is in it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import overlap_torch
from operands import EXACT_LIMIT, Case, integers, make_operands
from overlap_torch import plan
from overlap_torch._ops import composition as _composition
from overlap_torch.plan import Problem
from overlap_torch.plan.types import DType

Arguments = list[Any]  # positional arguments of an op, in the order of its schema


def tensors_of(tree: object) -> list[torch.Tensor]:
    """All tensors in arguments or results, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """The same arguments with other tensors."""
    return pytree.tree_map_only(torch.Tensor, function, tree)


def operator_of(name: str) -> torch._ops.OpOverload:
    """The operator of an op's name, with its overload's after a dot if it is not the default."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.overlap, packet), overload or "default")


def _sum(parts: Sequence[torch.Tensor], limit: float) -> torch.Tensor:
    magnitude = sum(part.detach().abs() for part in parts)
    assert magnitude.numel() == 0 or magnitude.max() <= limit, "data not exact in their dtype"
    return sum(parts)


def _linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, limit: float
) -> torch.Tensor:
    return _sum([input @ weight.t(), *([] if bias is None else [bias])], limit)


class Op(ABC):
    """An op under test; the subclasses' names are the overloads'."""

    name: str
    replicated = False  # whether all ranks get the same result, and the same gradient of it
    cuts_rows = True  # whether the input must have a dim to cut, so leading dims
    takes_dim = False  # whether that may be another one than the first

    @property
    def operator(self) -> torch._ops.OpOverload:
        return operator_of(self.name)

    @property
    def wrapper(self) -> Callable[..., Any]:
        return getattr(overlap_torch, self.name.partition(".")[0])

    @property
    def composition(self) -> Callable[..., Any]:
        return getattr(_composition, self.name.replace(".", "_"))

    def arguments(
        self, case: Case, rank: int, world: int, device: torch.device, seed: int = 0
    ) -> Arguments:
        """This rank's operands; `case.leading` is what one rank has of the dims that the op cuts or gathers."""
        operands = make_operands(case, rank, world, device, seed)
        return [operands.input, operands.weight, operands.bias]

    def problem(self, case: Case, world: int) -> Problem:
        """The problem of a plan for calls on `arguments`."""
        rows = case.m * (world if self.cuts_rows else 1)
        dtype = str(case.dtype).removeprefix("torch.").upper()
        op = self.name.partition(".")[0].upper()
        return Problem(
            rows, case.n, case.k, DType.__members__[dtype], world, plan.types.Op.__members__[op]
        )

    @abstractmethod
    def meaning(self, ranks: Sequence[Arguments], limit: float) -> list[list[torch.Tensor]]:
        """Every rank's results, from every rank's arguments; fails where a partial sum is beyond `limit`."""

    def expected(
        self, case: Case, rank: int, world: int, device: torch.device, seed: int = 0
    ) -> list[torch.Tensor]:
        """The right results of this rank's call on `arguments` of all ranks, bit for bit."""
        everybody = []
        for r in range(world):
            input, *others = map_tensors(
                torch.Tensor.double, self.arguments(case, r, world, device, seed)
            )
            # The meaning is written for dim 0.
            everybody.append([input.movedim(case.dim, 0) if case.dim else input, *others])
        results = self.meaning(everybody, EXACT_LIMIT[case.dtype])[rank]
        results = [result.movedim(0, case.dim) if case.dim else result for result in results]
        return [result.to(case.dtype) for result in results]

    def keywords(self, case: Case) -> dict[str, int]:
        """The keywords of a call, beside its group; defaults are left out, as the dispatcher does."""
        return {"dim": case.dim} if case.dim else {}

    def takes(self, case: Case) -> bool:
        return (bool(case.leading) or not self.cuts_rows) and (not case.dim or self.takes_dim)

    def of(self, cases: Sequence[Case]) -> list[Case]:
        return [case for case in cases if self.takes(case)]


class GemmAllReduce(Op):
    name = "gemm_allreduce"
    replicated = True
    cuts_rows = False

    def meaning(self, ranks, limit):
        total = _sum([input @ weight.t() for input, weight, _ in ranks], limit)
        return [[total if bias is None else _sum([total, bias], limit)] for _, _, bias in ranks]


class GemmReduceScatter(Op):
    name = "gemm_reducescatter"
    takes_dim = True

    def arguments(self, case, rank, world, device, seed=0):
        leading = list(case.leading)
        leading[case.dim if case.dim >= 0 else case.dim + 1] *= world
        case = case.with_(leading=tuple(leading))
        return super().arguments(case, rank, world, device, seed)

    def meaning(self, ranks, limit):
        total = _sum([input @ weight.t() for input, weight, _ in ranks], limit)
        parts = total.chunk(len(ranks)) if total.shape[0] > 0 else [total] * len(ranks)
        return [
            [part if bias is None else _sum([part, bias], limit)]
            for part, (_, _, bias) in zip(parts, ranks, strict=True)
        ]


class AllGatherGemm(Op):
    name = "allgather_gemm"
    takes_dim = True

    def meaning(self, ranks, limit):
        gathered = torch.cat([input for input, _, _ in ranks])
        return [[_linear(gathered, weight, bias, limit), gathered] for _, weight, bias in ranks]


class AllGatherGemmWeights(Op):
    """Three weights, N, about N / 2 and 0 or 1 wide; every second one has a bias."""

    name = "allgather_gemm.weights"
    takes_dim = True

    def problem(self, case, world):
        return super().problem(case.with_(n=sum(self.widths(case))), world)

    @staticmethod
    def widths(case: Case) -> tuple[int, ...]:
        return (case.n, (case.n + 1) // 2, case.n % 2)

    def arguments(self, case, rank, world, device, seed=0):
        sizes = self.widths(case)
        parts = [
            make_operands(case.with_(n=n, bias=False), rank, world, device, (seed, i))
            for i, n in enumerate(sizes)
        ]
        biases = [
            None if i % 2 == 0 else integers((n,), device, seed, "bias", i).to(case.dtype)
            for i, n in enumerate(sizes)
        ]
        return [parts[0].input, [part.weight for part in parts], biases if case.bias else []]

    def meaning(self, ranks, limit):
        gathered = torch.cat([input for input, _, _ in ranks])
        return [
            [
                *(
                    _linear(gathered, weight, bias, limit)
                    for weight, bias in zip(weights, biases or [None] * len(weights), strict=True)
                ),
                gathered,
            ]
            for _, weights, biases in ranks
        ]


class GemmAllToAll(Op):
    """Numbers of rows differ by pair of ranks, some are zero."""

    name = "gemm_alltoall"

    def problem(self, case, world):
        return super().problem(case.with_(leading=(0,)), world)

    @staticmethod
    def counts(case: Case, world: int, seed: int = 0) -> list[list[int]]:
        """[sender][receiver]; about `case.leading[0]` rows a rank."""
        if world == 1:
            return [[case.leading[0]]]
        cpu = torch.device("cpu")
        highest = 2 * case.leading[0] // world + 1 if case.leading[0] > 0 else 0
        drawn = integers((world, world), cpu, seed, world, low=0, high=highest)
        kept = integers((world, world), cpu, seed, "kept", low=0, high=3) > 0
        return (drawn * kept).tolist()

    def arguments(self, case, rank, world, device, seed=0):
        counts = self.counts(case, world, seed)
        send, recv = counts[rank], [row[rank] for row in counts]
        leading = (sum(send), *case.leading[1:])
        input, weight, bias = super().arguments(
            case.with_(leading=leading), rank, world, device, seed
        )
        return [input, weight, send, recv, bias]

    def meaning(self, ranks, limit):
        parts = [
            _linear(input, weight, bias, limit).split(send)
            for input, weight, send, _, bias in ranks
        ]
        return [[torch.cat([sent[rank] for sent in parts])] for rank in range(len(ranks))]


OPS: dict[str, Op] = {
    op.name: op
    for op in (
        GemmAllReduce(),
        GemmReduceScatter(),
        AllGatherGemm(),
        AllGatherGemmWeights(),
        GemmAllToAll(),
    )
}
every_op = pytest.mark.parametrize("op", list(OPS))


def expected_output(case: Case, world: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    """The one right result [*leading, N] of gemm_allreduce on `make_operands` of all ranks."""
    return OPS["gemm_allreduce"].expected(case, 0, world, device, seed)[0]
