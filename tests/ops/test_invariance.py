"""``invariance="batch"``: a row's bits depend on the row, the weight and the number of ranks alone; ``"world"``: not on the
number of ranks either."""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist

import overlap_torch
from captures import capture, replayed
from checks import Failures, message_of
from operands import poison, rank_device, world_name
from overlap_torch import plan as plans
from overlap_torch._layers.rmsnorm import allreduce_rmsnorm, gemm_allreduce_rmsnorm
from overlap_torch.plan.types import Kernel
from peer_races import come_late, so_many_calls

ROWS = 720  # the ranks of all tests divide them
SOME = (1, 2, 7, 64, 127, 128, 129, 300, 512)
everywhere = pytest.mark.ranks(
    (1, "gloo"), (2, "gloo"), (3, "gloo"), (1, "nccl"), (2, "nccl"), (3, "nccl"), (4, "nccl")
)
over_gpus = pytest.mark.ranks((2, "nccl"), (3, "nccl"), (4, "nccl"))
GROUPS = 8  # of the K of all ranks
any_world = pytest.mark.ranks(
    (1, "gloo"), (2, "gloo"), (4, "gloo"), (1, "nccl"), (2, "nccl"), (4, "nccl")
)


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return values.to(dtype).to(rank_device())


def operands(dtype: torch.dtype, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's. Terms of mixed sizes: their order shows in the sum."""
    rank = dist.get_rank()
    return draw(rank, ROWS, k, dtype=dtype), draw(50 + rank, n, k, dtype=dtype) * 2.0 ** (rank % 3)


def reduced(
    input: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor, invariance: str = "batch"
) -> torch.Tensor:
    return overlap_torch.gemm_allreduce(input, weight, *rest, invariance=invariance)


def scattered(
    input: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor, invariance: str = "batch"
) -> torch.Tensor:
    """All ranks' parts of a reduce-scatter: what an all-reduce has. The rows are padded."""
    world, rows = dist.get_world_size(), input.shape[0]
    padded = torch.nn.functional.pad(input, (0, 0, 0, -rows % world))
    part = overlap_torch.gemm_reducescatter(padded, weight, *rest, invariance=invariance)
    parts = [torch.empty_like(part) for _ in range(world)]
    dist.all_gather(parts, part)
    return torch.cat(parts)[:rows]


def in_order(terms: list[torch.Tensor]) -> torch.Tensor:
    """The sum in rank order, in float32 or wider, rounded once."""
    dtype = terms[0].dtype
    total = torch.zeros_like(terms[0], dtype=dtype if dtype == torch.float64 else torch.float32)
    for term in terms:
        total = total + term
    return total.to(dtype)


def by_pairs(terms: list[torch.Tensor]) -> torch.Tensor:
    """The sum of pairs, pairs of pairs and so on, each rounded."""
    while len(terms) > 1:
        dtype = torch.promote_types(terms[0].dtype, torch.float32)
        pairs = zip(terms[::2], terms[1::2], strict=True)
        terms = [(a.to(dtype) + b.to(dtype)).to(a.dtype) for a, b in pairs]
    return terms[0]


SUMS = {"batch": in_order, "world": by_pairs}


def terms_of(
    call: Callable[..., torch.Tensor], input: torch.Tensor, weight: torch.Tensor
) -> list[torch.Tensor]:
    """Each rank's rounded product: the sum in which the other ranks have zeros."""
    return [
        call(input if rank == dist.get_rank() else torch.zeros_like(input), weight)
        for rank in range(dist.get_world_size())
    ]


@everywhere
@pytest.mark.parametrize("call", [reduced, scattered])
@pytest.mark.parametrize(
    ("dtype", "n", "k"),
    [
        (torch.bfloat16, 264, 520),
        (torch.float16, 1032, 72),
        (torch.float32, 40, 72),
        (torch.bfloat16, 37, 41),  # which no kernel takes
        (torch.float64, 40, 72),
    ],
    ids=str,
)
def test_batch_invariant_rows_have_the_same_bits(
    failures: Failures, call: Callable[..., torch.Tensor], dtype: torch.dtype, n: int, k: int
) -> None:
    """Whatever the number of rows, their places and neighbours, and the op; the sum is in rank order."""
    input, weight = operands(dtype, n, k)
    expect_rows_alike(failures, call, "batch", input, weight)


def expect_rows_alike(
    failures: Failures,
    call: Callable[..., torch.Tensor],
    invariance: str,
    input: torch.Tensor,
    weight: torch.Tensor,
) -> None:
    call = partial(call, invariance=invariance)
    (n, k), dtype = weight.shape, weight.dtype
    right = SUMS[invariance](terms_of(partial(reduced, invariance=invariance), input, weight))
    failures.expect_equal([call(input, weight)], [right], "all rows")
    for rows in SOME:
        failures.expect_equal([call(input[:rows], weight)], [right[:rows]], rows, "rows")
        failures.expect_equal([call(input[-rows:], weight)], [right[-rows:]], rows, "last rows")
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1)).to(input.device)
    failures.expect_equal([call(input[order], weight)], [right[order]], "other places")
    beside = torch.full_like(input, float("nan"))
    beside[5::7] = input[5::7]
    failures.expect_equal([call(beside, weight)[5::7]], [right[5::7]], "beside NaN")
    bias = draw(99, n, dtype=dtype)
    failures.expect_equal([call(input[:300], weight, bias)], [right[:300] + bias], "bias")
    other = weight.t().contiguous().t()
    for rows in (16, 300):
        failures.expect_equal([call(input[:rows], other)], [right[:rows]], rows, "a weight along N")
    shifted = torch.empty(ROWS * k + 1, dtype=dtype, device=input.device)[1:].view(ROWS, k)
    failures.expect_equal([call(shifted.copy_(input), weight)], [right], "an odd address")


@any_world
@pytest.mark.parametrize("call", [reduced, scattered])
@pytest.mark.parametrize(
    ("dtype", "n", "k"),
    [
        (torch.bfloat16, 264, 512),
        (torch.float16, 1032, 1536),
        (torch.float32, 40, 72),
        (torch.bfloat16, 37, 40),  # which no kernel takes
    ],
    ids=str,
)
def test_world_invariant_rows_have_the_same_bits(
    failures: Failures, call: Callable[..., torch.Tensor], dtype: torch.dtype, n: int, k: int
) -> None:
    input, weight = operands(dtype, n, k)
    expect_rows_alike(failures, call, "world", input, weight)


@any_world
@pytest.mark.parametrize(
    ("dtype", "n", "k"),
    [
        (torch.bfloat16, 264, 512),
        (torch.bfloat16, 1032, 4096),
        (torch.bfloat16, 8200, 512),  # three tiles for each thread block
        (torch.float16, 136, 1536),
        (torch.bfloat16, 264, 8 * 40),  # groups that are no multiple of the kernel's step
        (torch.float32, 40, 72),
        (torch.float64, 37, 72),
    ],
    ids=str,
)
def test_world_invariant_sums_are_those_of_any_number_of_ranks(
    failures: Failures, dtype: torch.dtype, n: int, k: int
) -> None:
    """Products of small integers are exact in float32: each group's has one value, and so has the sum of all by pairs."""
    generator = torch.Generator().manual_seed(3)
    input = torch.randint(-7, 8, (ROWS, k), generator=generator).to(rank_device(), torch.float64)
    weight = torch.randint(-7, 8, (n, k), generator=generator).to(rank_device(), torch.float64)
    weight *= 2.0 ** (torch.arange(k, device=weight.device) * GROUPS // k % 3)  # groups differ
    products = [
        (a @ b.t()).to(dtype)
        for a, b in zip(input.chunk(GROUPS, 1), weight.chunk(GROUPS, 1), strict=True)
    ]
    right = by_pairs(products)
    if dtype.itemsize == 2:
        failures.equal(bool((right != in_order(products)).any()), True, "the order shows")
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = input.to(dtype).chunk(world, 1)[rank]
    weights = weight.to(dtype).chunk(world, 1)[rank]
    bias = draw(99, n, dtype=dtype)
    for call in (reduced, scattered):
        for rows in (1, 17, 128, 129, ROWS):
            found = call(mine[:rows], weights, invariance="world")
            failures.expect_equal([found], [right[:rows]], call.__name__, rows, "rows")
        found = call(mine, weights, bias, invariance="world")
        failures.expect_equal([found], [right + bias], call.__name__, "bias")


@any_world
@pytest.mark.parametrize(("n", "k"), [(264, 512), (8200, 1024), (37, 40)])
def test_world_invariant_ranks_have_the_bits_of_one(failures: Failures, n: int, k: int) -> None:
    """Numbers whose order along K shows; and products so small that each is -0."""
    rank, world = dist.get_rank(), dist.get_world_size()
    alone = [dist.new_group([one]) for one in range(world)][rank]
    input, weight = draw(1, ROWS, k), draw(2, n, k)
    small = torch.zeros_like(input)
    small[:, :: k // GROUPS] = 1e-30
    for name, x, w in (("drawn", input, weight), ("small", small, torch.full_like(weight, -1e-30))):
        mine, weights = x.chunk(world, 1)[rank], w.chunk(world, 1)[rank]
        for rows in (1, 128, ROWS):
            right = overlap_torch.gemm_allreduce(x[:rows], w, group=alone, invariance="world")
            for call in (reduced, scattered):
                for part in (weights, weights.contiguous()):
                    found = call(mine[:rows], part, invariance="world")
                    bits = [found.view(torch.int16)]
                    failures.expect_equal(bits, [right.view(torch.int16)], name, rows, "rows")


def plans_of(
    rows: int, n: int, k: int, op: str, kernel: Kernel, invariance: str
) -> list[plans.Plan]:
    world = dist.get_world_size()
    problem = plans.Problem(rows, n, k, "bfloat16", world, op, invariance=invariance)
    made = [plans.templates.at_once(problem, kernel=kernel, schedule="sequential")]
    if rows % world == 0 or (world == 2 and op == "gemm_allreduce"):
        made.append(plans.templates.at_once(problem, kernel=kernel))
    adds_terms = kernel == Kernel.SM90_PINGPONG or world == 2
    if adds_terms and (world - 1) * -(-rows // world) < rows:
        owners = {"kernel": kernel, "transport": "peer", "collective": "owners"}
        made.append(plans.templates.row_panels(problem, 1, **owners))
    return made


@over_gpus
@pytest.mark.peers
@pytest.mark.parametrize(
    ("invariance", "kernel"),
    [
        ("batch", Kernel.SM90_PINGPONG),
        ("batch", Kernel.SM90_PINGPONG_WIDE),
        ("world", Kernel.SM90_PINGPONG),
    ],
    ids=str,
)
@pytest.mark.parametrize("op", ["gemm_allreduce", "gemm_reducescatter"])
def test_invariant_plans_have_the_same_bits(
    failures: Failures, op: str, invariance: str, kernel: Kernel
) -> None:
    """Each plan that a mode allows, at rows on both sides of where plans change; in graphs, too."""
    call = partial(reduced if op == "gemm_allreduce" else scattered, invariance=invariance)
    k = 520 if invariance == "batch" else 512
    input, weight = operands(torch.bfloat16, 1032, k)
    if invariance == "world" and dist.get_world_size() == 3:
        failures.holds("allowed are 1, 2, 4 and 8", message_of(call, input, weight))
        return
    right = SUMS[invariance](terms_of(partial(reduced, invariance=invariance), input, weight))
    bias = draw(99, 1032)
    for rows in (1, 3, 128, 240, ROWS - 1, ROWS):
        if op == "gemm_reducescatter" and rows % dist.get_world_size() != 0:
            continue
        for plan in plans_of(rows, 1032, k, op, kernel, invariance):
            with plans.use_plan(plan):
                for turn in range(3):
                    found = call(input[:rows], weight)
                    failures.expect_equal([found], [right[:rows]], rows, str(plan), turn)
                found = call(input[:rows], weight, bias)
                failures.expect_equal([found], [right[:rows] + bias], rows, str(plan), "bias")
                if op == "gemm_allreduce":
                    graph, output = capture(lambda rows=rows: call(input[:rows], weight))
                    found = replayed(graph, output)
                    failures.expect_equal([found], [right[:rows]], rows, str(plan), "graph")


@so_many_calls(100)
@pytest.mark.ranks((2, "nccl"), (4, "nccl"))
@pytest.mark.peers
@pytest.mark.seconds(900)
def test_races_of_world_invariant_plans(failures: Failures, calls: int) -> None:
    """No call waits for the one before; ranks are late, and memory is poisoned between calls."""
    n, k, chance = 8200, 512, random.Random(dist.get_rank())  # three tiles for each thread block
    input, weight = operands(torch.bfloat16, n, k)
    call = partial(reduced, invariance="world")
    right = by_pairs(terms_of(call, input, weight))
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    for rows in (16, ROWS):
        for plan in plans_of(rows, n, k, "gemm_allreduce", Kernel.SM90_PINGPONG, "world"):
            wrong = torch.zeros(calls, dtype=torch.int64, device=input.device)
            torch.cuda.synchronize()
            with plans.use_plan(plan):
                for turn in range(calls):
                    with torch.cuda.stream(streams[turn // 16 % len(streams)]):
                        if chance.random() < 0.1:
                            torch.cuda._sleep(chance.randrange(400_000))
                        poison(input.device, rows * n * 2, rows * n * 4, 8 * rows * n * 2)
                        wrong[turn] += (call(input[:rows], weight) != right[:rows]).sum()
                    come_late(chance)
            torch.cuda.synchronize()
            failures.equal(wrong.nonzero().flatten().tolist(), [], rows, str(plan))


@pytest.mark.ranks((2, "gloo"), (2, "nccl"), (4, "nccl"))
@pytest.mark.parametrize("invariance", ["batch", "world"])
def test_invariant_norms_have_the_same_bits(failures: Failures, invariance: str) -> None:
    """A few rows and many have other kernels that add them up."""
    n, device = 1024, rank_device()
    input, weight = operands(torch.bfloat16, n, 512)
    residual, gain, bias = draw(7, ROWS, n), draw(8, n), draw(9, n)
    fused = {"invariance": invariance, "fused": device.type == "cuda"}
    partial = draw(60 + dist.get_rank(), ROWS, n)
    for name, call, terms in (
        ("gemm", lambda x, r: gemm_allreduce_rmsnorm(x, weight, r, gain, bias, **fused), input),
        ("given", lambda x, r: allreduce_rmsnorm(x, r, gain, bias, **fused), partial),
    ):
        right = call(terms, residual)
        for rows in SOME:
            found = call(terms[:rows], residual[:rows])
            failures.expect_equal(found, [one[:rows] for one in right], name, rows, "rows")


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_invariant_calls_compile_and_have_gradients(failures: Failures) -> None:
    input, weight = operands(torch.float32, 24, 16)
    usual = overlap_torch.gemm_allreduce(input, weight)
    failures.near(reduced(input, weight), usual, "value", rtol=1e-5, atol=1e-4)
    compiled = torch.compile(reduced, fullgraph=True, dynamic=True)
    for rows in (3, 130):
        failures.expect_equal(
            [compiled(input[:rows], weight)], [reduced(input[:rows], weight)], rows
        )
    for op in (overlap_torch.gemm_allreduce, overlap_torch.gemm_reducescatter):
        grads = []
        for invariance in ("none", "batch", "world"):
            x, w = input.clone().requires_grad_(), weight.clone().requires_grad_()
            op(x, w, invariance=invariance).square().sum().backward()
            grads.append((x.grad, w.grad))
        for found, right in zip(grads[1] + grads[2], grads[0] * 2, strict=True):
            failures.near(found, right, op.__name__, rtol=1e-4, atol=1e-3)


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_invariance_is_checked(failures: Failures) -> None:
    input, weight = operands(torch.bfloat16, 16, 16)
    for call in (
        overlap_torch.gemm_allreduce,
        overlap_torch.gemm_reducescatter,
        torch.compile(overlap_torch.gemm_allreduce, fullgraph=True),
    ):
        text = message_of(call, input, weight, invariance="rank")
        failures.holds("invariance is 'rank'; allowed are None", text)
    text = message_of(reduced, input[:, :6], weight[:, :6], invariance="world")
    failures.holds("gemm_allreduce: problem with the invariance world has k = 6", text)
    failures.holds("multiples of 4, as K of all ranks is cut into 8 groups", text)
    scaled = plans.Problem(
        8, 8, 8, "float8_e4m3fn", 2, recipe="row_wise", output_dtype="bfloat16", invariance="world"
    )
    for problem, says in (
        (plans.Problem(8, 8, 24, "bfloat16", 3, invariance="world"), "allowed are 1, 2, 4 and 8"),
        (scaled, "has scaled operands, allowed are none with scales"),
    ):
        text = message_of(plans.templates.make_sequential, problem, plans.machine())
        failures.holds(says, text)
    gather = plans.Problem(8, 8, 8, "bfloat16", 2, "allgather_gemm", invariance="batch")
    text = message_of(plans.templates.make_sequential, gather, plans.machine())
    failures.holds("allowed is none, as the op adds nothing between ranks", text)
    # Calls that differ in nothing else are other problems.
    if input.device.type == "cpu":
        mine = "batch" if dist.get_rank() == 0 else "none"
        text = message_of(overlap_torch.gemm_allreduce, input, weight, invariance=mine)
        failures.holds("k=16 bfloat16 world_size=2 batch, rank 1 called", text)
    rows = [row for row in torch.ops.overlap.plan_table() if row["group"] == world_name()]
    failures.equal({row["invariance"] for row in rows} <= {"none", "batch", "world"}, True)


def test_invariance_by_the_environment() -> None:
    program = """
import torch, torch.distributed as dist, overlap_torch
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x, w = torch.ones(3, 8), torch.ones(4, 8)
overlap_torch.gemm_allreduce(x, w)
overlap_torch.gemm_allreduce(x, w, invariance="none")
overlap_torch.allgather_gemm(x, w)
print(sorted((row["op"], row["invariance"]) for row in torch.ops.overlap.plan_table()))
from overlap_torch.integrations import _norms
hidden = torch.ones(1, 4096, dtype=torch.bfloat16)
with torch.no_grad():
    print("norm:", _norms._why_not(hidden, hidden[0]))
"""

    def made(value: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "OVERLAP_INVARIANCE": value}
        command = [sys.executable, "-c", program]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    right = [("allgather_gemm", "none"), ("gemm_allreduce", "batch"), ("gemm_allreduce", "none")]
    # Norms are fused up to a number of rows, so that a row's bits would depend on it.
    assert made("batch").stdout.splitlines() == [str(right), "norm: more than 0 rows"]
    assert made("none").stdout.splitlines()[1] == "norm: "
    right = sorted((op, kind.replace("batch", "world")) for op, kind in right)
    assert made("world").stdout.splitlines()[0] == str(right)
    assert "OVERLAP_INVARIANCE is 'all'; it must be none, batch or world" in made("all").stderr
