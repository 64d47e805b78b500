"""Operands for the ops' tests; `ops.py` says what the ops must make of them.

Exact data are small integers, so sparse that every sum, in every order and on every rank, is an integer that the dtype
holds: the result has one right value, bit for bit. Every rank can make every rank's operands, so the expected result
needs no communication and nothing of the code under test.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from unittest import mock

import torch
import torch.distributed as dist

# Integers up to here are exact in the dtype. Beyond 2**16 nothing is gained.
EXACT_LIMIT = {
    torch.bfloat16: 2.0**8,
    torch.float16: 2.0**11,
    torch.float32: 2.0**16,
    torch.float64: 2.0**16,
}
_M_PERTURB = -6  # glibc, malloc.h

INPUT_LAYOUTS = (
    "contiguous",
    "offset",
    "padded",
    "k_strided",
    "transposed",
    "expanded",
    "negated",  # lazily: memory holds the negative values
)
WEIGHT_LAYOUTS = (
    "k_contiguous",
    "n_contiguous",
    "k_offset",
    "n_offset",
    "k_padded",
    "n_padded",
    "strided",
    "negated",
)


@dataclass(frozen=True)
class Case:
    """One call: `leading` dims of the input, N, K, how the operands lie in memory, and which dim is cut."""

    leading: tuple[int, ...]
    n: int
    k: int
    dtype: torch.dtype = torch.float32
    bias: bool = False
    input_layout: str = "contiguous"
    weight_layout: str = "k_contiguous"
    dim: int = 0

    @property
    def m(self) -> int:
        return math.prod(self.leading)

    def with_(self, **changes: object) -> Case:
        return replace(self, **changes)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{list(self.leading)} x N={self.n} x K={self.k} {dtype}{' bias' if self.bias else ''} "
            f"input {self.input_layout} weight {self.weight_layout} dim {self.dim}"
        )


def in_layouts_of_rank(case: Case, turn: int, rank: int) -> Case:
    """The case in other strides and alignments on every rank, and in every turn."""
    # "expanded" changes the operands' values, not only their places; all ranks would have to take it.
    inputs = [layout for layout in INPUT_LAYOUTS if layout != "expanded"]
    again = turn // math.lcm(len(inputs), len(WEIGHT_LAYOUTS))  # so that all pairs have a turn
    return case.with_(
        input_layout=inputs[(turn + rank) % len(inputs)],
        weight_layout=WEIGHT_LAYOUTS[(turn + again + 3 * rank) % len(WEIGHT_LAYOUTS)],
    )


@dataclass
class Operands:
    input: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None


def _generator(device: torch.device, *key: object) -> torch.Generator:
    return torch.Generator(device).manual_seed(zlib.crc32(repr(key).encode()))


def _sparse_integers(
    shape: tuple[int, ...], density: float, generator: torch.Generator
) -> torch.Tensor:
    device = generator.device
    values = torch.randint(-2, 3, shape, generator=generator, device=device, dtype=torch.int8)
    kept = torch.rand(shape, generator=generator, device=device) < density
    return values * kept


def integers(
    shape: tuple[int, ...], device: torch.device, *key: object, low: int = -2, high: int = 2
) -> torch.Tensor:
    """Integers from `low` to `high`, the same for the same key."""
    return torch.randint(low, high + 1, shape, generator=_generator(device, key), device=device)


def _exact_parts(
    case: Case, rank: int, world: int, seed: object, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """[M, K], [N, K] and [N], int8."""
    # A product of two such entries has variance 4 * density. The standard deviation of a sum of K * world of them is at
    # most an eighth of the limit, so that nobody comes near the limit.
    limit = EXACT_LIMIT[case.dtype]
    density = min(1.0, (limit / 8) ** 2 / (4.0 * max(1, case.k * world)))
    generator = _generator(device, seed, rank, case.leading, case.n, case.k)
    input = _sparse_integers((case.m, case.k), density, generator)
    weight = _sparse_integers((case.n, case.k), 1.0, generator)
    # The bias is the same on every rank.
    bias = None
    if case.bias:
        bias = _sparse_integers((case.n,), 1.0, _generator(device, seed, "bias", case.n))
    return input, weight, bias


def _nans(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    sizes = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.full(sizes, 0xFF, dtype=torch.uint8, device=device).view(dtype)


def lay_out(values: torch.Tensor, dtype: torch.dtype, layout: str) -> torch.Tensor:
    """The values in this type, in memory as the layout says, between NaNs where it leaves gaps."""
    values = values.to(dtype)
    if layout == "negated":
        return torch._neg_view(-values)
    if layout == "expanded":  # the first row, again and again
        return values[(slice(1),) * (values.dim() - 1)].expand(values.shape)
    turned = layout == "transposed" or layout.startswith("n_")
    shape = values.shape[::-1] if turned else values.shape
    how = {"dtype": dtype, "device": values.device}
    if layout.endswith("offset"):
        place = torch.empty(values.numel() + 1, **how)[1:].view(shape)
    elif layout.endswith("padded"):
        place = _nans(*shape[:-1], shape[-1] + 5, **how)[..., :-5]
    elif layout.endswith("strided"):
        place = _nans(*shape, 2, **how)[..., 1]
    else:
        place = torch.empty(shape, **how)
    return (place.permute(*reversed(range(len(shape)))) if turned else place).copy_(values)


def make_operands(
    case: Case, rank: int, world: int, device: torch.device, seed: object = 0
) -> Operands:
    """The operands of one rank: integers as the module says, in the memory layouts that the case names."""
    input, weight, bias = _exact_parts(case, rank, world, seed, device)
    return Operands(
        lay_out(input.view(*case.leading, case.k), case.dtype, case.input_layout),
        lay_out(weight, case.dtype, case.weight_layout),
        None if bias is None else bias.to(case.dtype),
    )


def difference(actual: torch.Tensor | None, expected: torch.Tensor | None) -> str | None:
    """The fault of `actual`, in words; None if it is `expected`, bit for bit, or neither is there."""
    if actual is None or expected is None:
        return None if actual is expected else f"got {actual}, expected {expected}"
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return (
            f"got {tuple(actual.shape)} {actual.dtype}, "
            f"expected {tuple(expected.shape)} {expected.dtype}"
        )
    if actual.device != expected.device:
        return f"got it on {actual.device}, expected it on {expected.device}"
    wrong = (actual != expected).nonzero()  # NaN differs from everything
    if len(wrong) == 0:
        return None
    first = tuple(wrong[0].tolist())
    last = tuple(wrong[-1].tolist())
    return (
        f"{len(wrong)} of {actual.numel()} elements wrong, first at {first}: "
        f"{actual[first].item()}, expected {expected[first].item()}; last at {last}"
    )


def poison(device: torch.device, *sizes: int) -> None:
    """Leaves junk in the memory that the next allocations of about these numbers of bytes will get.

    CUDA: freed blocks of the caching allocator are filled with NaN bytes. CPU: from the first call on malloc fills what
    it gives out (glibc; other C libraries are left alone).
    """
    if device.type == "cpu":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            # New memory reads 0x7f...: about 3e38 in bfloat16 and float32.
            mallopt(_M_PERTURB, 0x80)
        return
    blocks = [
        torch.full((max(1, size) * scale,), 0xFF, dtype=torch.uint8, device=device)
        for size in sizes
        for scale in (1, 1, 2)
    ]
    del blocks


def rank_device() -> torch.device:
    """Where this rank's operands live: its GPU under NCCL, otherwise the CPU."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def place() -> tuple[int, int, torch.device]:
    return dist.get_rank(), dist.get_world_size(), rank_device()


def from_all_ranks(value: object) -> list:
    """Each rank's value; all call this."""
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


@contextlib.contextmanager
def as_torchrun_places() -> Iterator[None]:
    """The answers to transformers' questions for this rank's device: as torchrun says it, and the
    CPU under gloo also where there are GPUs.
    """
    with (
        mock.patch.dict(os.environ, {"LOCAL_RANK": str(rank_device().index or 0)}),
        mock.patch.object(torch._C, "_get_accelerator", rank_device),
    ):
        yield


def world_name() -> str:
    """Name of the group of all ranks."""
    return dist.group.WORLD.group_name


_subgroups: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = {}


def subgroup(ranks: tuple[int, ...], label: str = "") -> dist.ProcessGroup | None:
    """A process group of these ranks, made once in the life of the pool; None where this rank is not in it.

    All ranks of the pool must ask for it, in the same order.
    """
    key = (ranks, label)
    if key not in _subgroups:
        group = dist.new_group(list(ranks))
        _subgroups[key] = group if dist.get_rank() in ranks else None
    return _subgroups[key]
