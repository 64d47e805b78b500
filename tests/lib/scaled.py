"""Calls of the ops with scaled operands: operands for any case, and what all ranks' results must be.

The expected result of a call is written here in float64 from the recipe's definition; nothing of the code under test is in it.
Operands are small, sparse integers and scales are 0.5, 1 and 2, so that every sum, on every rank and in every order,
is a multiple of 1/4 that the output's type holds: the result has one right value, bit for bit.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.functional import ScalingType

import ops
import overlap_torch
from checks import Failures
from operands import difference, lay_out, rank_device
from ops import Arguments, operator_of, tensors_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PAIRS = ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2))
RECIPES = {
    "tensor": (ScalingType.TensorWise, ScalingType.TensorWise),
    "row": (ScalingType.RowWise, ScalingType.RowWise),
    "block": (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128),
}
OPS = ("gemm_allreduce", "gemm_reducescatter", "allgather_gemm", "weights", "gemm_alltoall")
BLOCK = 128
# The Python functions' names of the parameters of several weights.
_SINGULAR = {"weights": "weight", "scale_weights": "scale_weight", "biases": "bias"}
# Multiples of a quarter up to here are exact in the type.
LIMIT = {torch.bfloat16: 2.0**6, torch.float16: 2.0**9, torch.float32: 2.0**20}


@dataclass(frozen=True)
class Case:
    """`leading`: of the input on one rank, before dim 0 is multiplied for what scatters it."""

    leading: tuple[int, ...]
    n: int
    k: int
    recipe: str = "row"
    pair: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3)
    output: torch.dtype = torch.bfloat16
    bias: bool = False
    named: bool = True  # whether the call names the recipes
    # The layout of operands and scales: or "strided", "transposed", "vectors", "leading".
    layout: str = "contiguous"
    shared: bool = False  # every rank has the same scale of the input, and says so
    fast: bool = False  # use_fast_accum, which kernels that signal need


@dataclass(frozen=True)
class Call:
    """One rank's: positional arguments before the bias, and keywords."""

    input: torch.Tensor
    weights: list[torch.Tensor]
    scale_input: torch.Tensor
    scale_weights: list[torch.Tensor]
    biases: list[torch.Tensor | None]
    send_rows: list[int]
    recv_rows: list[int]


def _draw(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=generator)


def _integers(generator: torch.Generator, density: float, *shape: int) -> torch.Tensor:
    signs = (_draw(generator, *shape) < 0.5).double() * 2 - 1
    sizes = 1 + (_draw(generator, *shape) < 0.3).double()
    return signs * sizes * (_draw(generator, *shape) < density)


def _scales(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return 2.0 ** torch.randint(-1, 2, shape, generator=generator).float()


def scale_shape(recipe: str, operand: str, rows: int, k: int) -> tuple[int, int]:
    if recipe == "tensor":
        return 1, 1
    if recipe == "row":
        return rows, 1
    return (rows if operand == "input" else -(-rows // BLOCK)), -(-k // BLOCK)


def spread(scales: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The scales of numbers of this shape, where each dim has one for all, for each number or for each block."""
    for dim, size in enumerate(shape[-2:], -2):
        if scales.shape[dim] not in (1, size):
            scales = scales.repeat_interleave(BLOCK, dim).narrow(dim, 0, size)
    return scales


def dequantised(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The meaning of values and their scales, in float64."""
    return values.double() * spread(scales.double(), values.shape)


def cast(
    numbers: torch.Tensor, block: tuple[int, int] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """To float8_e4m3fn, with a scale for each block of these rows and columns, or for each row."""
    (rows, columns), (height, width) = numbers.shape[-2:], block or (1, numbers.shape[-1])
    whole = functional.pad(numbers.float().abs(), (0, -columns % width, 0, -rows % height))
    largest = whole.unflatten(-1, (-1, width)).amax(-1).unflatten(-2, (-1, height)).amax(-2)
    scales = largest.clamp(min=1e-12) / 448
    return (numbers.float() / spread(scales, numbers.shape)).to(E4M3), scales


def counts(case: Case, world: int) -> list[list[int]]:
    """[sender][receiver] of an all-to-all: about as many rows as `case.leading[0]` a rank, some pairs none."""
    rows = case.leading[0]
    return [
        [(rows // world + s + 2 * r) % (rows + 1) if (s + r) % 3 else 0 for r in range(world)]
        for s in range(world)
    ]


def make(case: Case, op: str, rank: int, world: int, seed: int) -> Call:
    """On CPU, contiguous; every rank can make every rank's."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    shared = torch.Generator().manual_seed(1000 * seed + 999)
    d0 = case.leading[0] if case.leading else 1
    sent = counts(case, world) if op == "gemm_alltoall" else [[0] * world] * world
    if op == "gemm_reducescatter":
        d0 *= world
    if op == "gemm_alltoall":
        d0 = sum(sent[rank])
    leading = (d0, *case.leading[1:])
    m = math.prod(leading)
    # A product has variance 11 * density ** 2; a sum of K * world of them stays far below the limit.
    density = min(1.0, LIMIT[case.output] / 24 / math.sqrt(11 * max(1, case.k * world)))
    input = _integers(generator, density, m, case.k)
    widths = [case.n, (case.n + 1) // 2, case.n % 2] if op == "weights" else [case.n]
    weights = [_integers(generator, density, n, case.k) for n in widths]
    of_input = shared if case.shared else generator
    biases = [
        (_integers(shared, 1.0, n) if op in OPS[:2] else _integers(generator, 1.0, n))
        if case.bias and i != 1
        else None
        for i, n in enumerate(widths)
    ]
    return Call(
        input.to(case.pair[0]).view(*leading, case.k),
        [weight.to(case.pair[1]) for weight in weights],
        _scales(of_input, *scale_shape(case.recipe, "input", m, case.k)),
        [_scales(generator, *scale_shape(case.recipe, "weight", n, case.k)) for n in widths],
        [None if bias is None else bias.to(case.output) for bias in biases],
        sent[rank],
        [row[rank] for row in sent],
    )


def _placed(case: Case, call: Call, device: torch.device) -> Call:
    """The call's tensors on a device, laid out as the case says."""

    def move(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        return [None if tensor is None else tensor.to(device) for tensor in tensors]

    def laid_out(tensor: torch.Tensor) -> torch.Tensor:
        return lay_out(tensor, tensor.dtype, case.layout)

    input, *weights = map(laid_out, move([call.input, *call.weights]))
    scale_input, *scale_weights = move([call.scale_input, *call.scale_weights])
    if case.layout == "vectors":
        if case.recipe != "block":
            scale_input, *scale_weights = (s.flatten() for s in (scale_input, *scale_weights))
    elif case.layout == "leading" and case.recipe != "tensor":
        scale_input = scale_input.view(*input.shape[:-1], scale_input.shape[-1])
    else:
        scale_input, *scale_weights = map(laid_out, (scale_input, *scale_weights))
    biases = move(call.biases)
    return Call(input, weights, scale_input, scale_weights, biases, call.send_rows, call.recv_rows)


def invoke(
    case: Case, op: str, call: Call, device: torch.device, group: Any = None
) -> list[torch.Tensor]:
    """The call under test, laid out as the case says; all its results in order."""
    overload = Overload(op)
    arguments = overload.arguments_of(case, _placed(case, call, device))
    return tensors_of(overload.wrapper(*arguments, group=group))


@dataclass(frozen=True)
class Overload:
    """An op with scaled operands, its parameters by position in the order of the schema, all but the group."""

    op: str  # of OPS

    @property
    def name(self) -> str:
        if self.op.startswith("gemm"):
            return self.op
        return {"weights": "allgather_gemm.scaled_weights"}.get(self.op, f"{self.op}.scaled")

    @property
    def operator(self) -> torch._ops.OpOverload:
        return operator_of(self.name)

    def arguments(
        self, case: Case, rank: int, world: int, device: torch.device, seed: int = 0
    ) -> list[Any]:
        return self.arguments_of(
            case, _placed(case, make(case, self.op, rank, world, seed), device)
        )

    def arguments_of(self, case: Case, call: Call) -> list[Any]:
        several = slice(None) if self.op == "weights" else 0
        recipes = RECIPES[case.recipe] if case.named else (None, None)
        recipe_input, recipe_weight = (recipe and recipe.value for recipe in recipes)
        given = {
            "input": call.input,
            "weight": call.weights[several],
            "send_rows": call.send_rows,
            "recv_rows": call.recv_rows,
            "bias": call.biases[several],
            "scale_input": call.scale_input,
            "scale_weight": call.scale_weights[several],
            "dim": 0,
            "invariance": None,
            "recipe_input": recipe_input,
            "recipe_weight": recipe_weight,
            "output_dtype": case.output,
            "use_fast_accum": case.fast,
            "shared_scale_input": case.shared,
        }
        return [given[_SINGULAR.get(name, name)] for name in self.parameters]

    @property
    def parameters(self) -> list[str]:
        return [one.name for one in self.operator._schema.arguments if one.name != "group"]

    def expected(
        self, case: Case, rank: int, world: int, device: torch.device, seed: int = 0
    ) -> list[torch.Tensor]:
        calls = [make(case, self.op, r, world, seed) for r in range(world)]
        return [tensor.to(device) for tensor in expected(case, self.op, calls, rank)]

    def wrapper(self, *arguments: Any, group: Any = None) -> Any:
        """The public function, with arguments as above."""
        names = [_SINGULAR.get(name, name) for name in self.parameters]
        keywords = dict(zip(names, arguments, strict=True))
        for recipe in ("recipe_input", "recipe_weight"):
            if keywords[recipe] is not None:
                keywords[recipe] = ScalingType(keywords[recipe])
        return getattr(overlap_torch, self.name.partition(".")[0])(**keywords, group=group)


def meant(case: Case, op: str, call: Call) -> Arguments:
    """The call's arguments of the op without scales: what its operands stand for, in float64."""
    rows = call.input.reshape(math.prod(call.input.shape[:-1]), case.k)
    input = dequantised(rows, call.scale_input).view(call.input.shape)
    weights = list(map(dequantised, call.weights, call.scale_weights))
    biases = [None if bias is None else bias.double() for bias in call.biases]
    counts = [call.send_rows, call.recv_rows] if op == "gemm_alltoall" else []
    several = slice(None) if op == "weights" else 0
    return [input, weights[several], *counts, biases[several]]


def expected(case: Case, op: str, calls: Sequence[Call], rank: int) -> list[torch.Tensor]:
    """This rank's results, from all ranks' calls; a gather has the operands and scales as they are, too."""
    plain = ops.OPS["allgather_gemm.weights" if op == "weights" else op]
    results = plain.meaning([meant(case, op, call) for call in calls], LIMIT[case.output])[rank]
    if op not in ("allgather_gemm", "weights"):
        return [result.to(case.output) for result in results]
    *results, _ = (result.to(case.output) for result in results)
    results.append(torch.cat([call.input.view(torch.uint8) for call in calls]).view(case.pair[0]))
    scales = [call.scale_input for call in calls[: 1 if case.shared else len(calls)]]
    gathered = torch.cat(scales)
    if case.recipe == "tensor" or (case.layout == "vectors" and case.recipe == "row"):
        gathered = gathered.flatten()
    elif case.layout == "leading":
        gathered = gathered.view(*results[-1].shape[:-1], gathered.shape[-1])
    return [*results, gathered]


def as_comparable(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of fp8."""
    return tensor.view(torch.uint8) if tensor.dtype in (E4M3, E5M2) else tensor


def check(failures: Failures, case: Case, op: str, seed: int = 0) -> None:
    rank, world, device = dist.get_rank(), dist.get_world_size(), rank_device()
    calls = [make(case, op, r, world, seed) for r in range(world)]
    right = expected(case, op, calls, rank)
    results = invoke(case, op, calls[rank], device)
    assert len(results) == len(right)
    for i, (result, value) in enumerate(zip(results, right, strict=True)):
        failures.expect(
            None if result.is_contiguous() else f"strides {result.stride()}", op, case, i
        )
        dtype = None if result.dtype == value.dtype else f"{result.dtype}, expected {value.dtype}"
        failures.expect(dtype, op, case, i)
        failures.expect(difference(as_comparable(result).cpu(), as_comparable(value)), op, case, i)


def cases() -> Iterator[Case]:
    """Every recipe and pair of types, nothing and ragged sizes, dims, biases and types of the output."""
    sizes = [(1, 1, 1), (7, 11, 13), (16, 48, 32), (33, 130, 129), (64, 32, 256), (5, 257, 300)]
    empty = [(0, 8, 8), (8, 0, 8), (8, 8, 0), (0, 0, 0)]
    outputs = itertools.cycle([torch.bfloat16, torch.float32, torch.float16])
    biases = itertools.cycle([False, True, True, False, False])
    for recipe, pair in itertools.product(RECIPES, PAIRS):
        for m, n, k in sizes if pair == PAIRS[0] else sizes[2:4]:
            yield Case((m,), n, k, recipe, pair, next(outputs), next(biases))
    for recipe in RECIPES:
        for m, n, k in empty:
            yield Case((m,), n, k, recipe, bias=next(biases))
        yield Case((3, 4), 9, 130, recipe, bias=True)
        yield Case((3, 4), 9, 130, recipe, named=False, layout="leading")
        for layout in ("strided", "transposed", "vectors"):
            yield Case(
                (24,), 136, 144, recipe, PAIRS[1], next(outputs), next(biases), False, layout
            )
    yield Case((6,), 20, 24, "tensor", shared=True)
