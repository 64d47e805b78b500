"""Kernels of a user's for tests: those of the example, and small ones that do wrong."""

import functools
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import overlap_torch
from checks import Failures
from operands import difference, rank_device

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


# Ranks without a GPU need this before Triton is imported, and whatever imports PyTorch may import
# Triton.
INTERPRETED = {"TRITON_INTERPRET": "1"}


@pytest.fixture(autouse=True)
def interpreted(request: pytest.FixtureRequest) -> None:
    """On CPU, in ranks that have had Triton interpret from the start. A test file that imports it has it."""
    if "ranks" in request.fixturenames:
        runner = request.getfixturevalue("ranks")
        if runner.backend == "gloo":
            runner.environment = INTERPRETED


@functools.cache
def example(name: str = "05_triton_kernels") -> ModuleType:
    """The example's module; without a GPU its kernels run in Triton's interpreter."""
    with mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
        spec = importlib.util.spec_from_file_location("example_" + name, EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module


def stock() -> ModuleType:
    """The module of stock kernels, which imports Triton; without a GPU its interpreter runs them."""
    import stock_kernels

    if dist.get_backend() == "gloo":
        _mend_interpreter()
    return stock_kernels


def aligned_and_stock() -> tuple[ModuleType, ModuleType]:
    """overlap_torch.triton, and the stock kernels that it aligns."""
    kernels = stock()
    return importlib.import_module("overlap_torch.triton"), kernels


@functools.cache
def _mend_interpreter() -> None:
    """Bounds of ``range`` that are no constants: NumPy from 2.4 on makes no number of an array of one element unasked."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def mended(tensor: type, scope: object) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = mended


def numbers(*shape: int, seed: int, rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small integers of a rank, whose sums of products every dtype here has exactly."""
    generator = torch.Generator().manual_seed(977 * seed + rank)
    return torch.randint(-1, 2, shape, generator=generator).to(dtype)


def product(m: int, n: int, k: int, seed: int, rank: int) -> torch.Tensor:
    """float64, of the operands of :func:`operands`."""
    a, b = (
        numbers(*shape, seed=seed + i, rank=rank).double()
        for i, shape in enumerate([(m, k), (k, n)])
    )
    return a @ b


def operands(m: int, n: int, k: int, seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """This rank's, [m, k] and [k, n]."""
    return [
        numbers(*shape, seed=seed + i, rank=dist.get_rank(), dtype=dtype).to(rank_device())
        for i, shape in enumerate([(m, k), (k, n)])
    ]


def reduced(m: int, n: int, k: int, seed: int, collective: str = "all_reduce") -> torch.Tensor:
    """float64: the sum of all ranks' products, of a reduce-scatter this rank's part."""
    world = dist.get_world_size()
    total = sum(product(m, n, k, seed, rank) for rank in range(world))
    return total if collective == "all_reduce" else total.chunk(world)[dist.get_rank()]


def expect(failures: Failures, label: str, result: torch.Tensor, expected: torch.Tensor) -> None:
    failures.expect(difference(result.double().cpu(), expected.double().cpu()), label)


def multiply(
    job: overlap_torch.Job, a: torch.Tensor, b: torch.Tensor, tiles: torch.Tensor | None = None
) -> None:
    """The example's GEMM of ``a`` and ``b`` in a job; `tiles`: those of the job unless given."""
    order = job.tile_order if tiles is None else tiles
    example().matmul[(len(order),)](
        a, b, job.output, order, job.tile_chunk, job.counters, len(a), b.shape[1], b.shape[0], **example().blocks()
    )  # fmt: skip


def check_swiglu(
    failures: Failures, label: str, out, gathered, gate, up, tile: tuple[int, int]
) -> None:
    """The result equals the same kernel's on rows that are all there, bit for bit."""
    plain = torch.empty_like(out)
    tiles = -(-out.shape[0] // tile[0]) * -(-out.shape[1] // tile[1])
    order = torch.arange(tiles, dtype=torch.int32, device=out.device)
    example().swiglu[(3,)](
        gathered, gate, up, plain, order, torch.zeros_like(order), torch.ones_like(order), tiles, *out.shape,
        gate.shape[0], **example().blocks(),
    )  # fmt: skip
    expect(failures, label, out, plain.double().cpu())


def check_unchanged(
    failures: Failures, shapes: list[tuple[int, int, int]], dtype: torch.dtype
) -> None:
    """The framework's GEMM, which signals nothing, stores a job's output. Three calls of each, as memory is taken by turns."""
    for collective in ("all_reduce", "reduce_scatter"):
        for m, n, k in shapes:
            if collective == "reduce_scatter" and m % dist.get_world_size():
                continue
            for seed in range(3):
                a, b = operands(m, n, k, seed, dtype)
                job = overlap_torch.produce(collective, (m, n), dtype, tile=(64, 64), signals=False)
                with job:
                    torch.mm(a, b, out=job.output)
                expected = reduced(m, n, k, seed, collective)
                expect(failures, f"{collective} {m, n, k}, call {seed}", job.result(), expected)
    overlap_torch.check()
