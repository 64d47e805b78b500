"""Plans that go over peers in one step: right results, the same on all ranks and in every run, call after call."""

import itertools

import pytest
import torch
import torch.distributed as dist

from checks import Failures, check_call, check_plan
from operands import Case, rank_device
from ops import OPS
from overlap_torch import plan as plan_module
from overlap_torch.plan.types import Kernel
from peer_races import Runner, race, so_many_calls
from peers import (
    ALL_TO_ALL,
    DIRECT,
    HALVES,
    KERNELS,
    OWNERS,
    PEER_OPS,
    RING,
    STRIPES,
    Way,
    cases_of_other_dims,
    every_kernel,
    has_bias,
    parameter_id,
    peer_case,
    peer_plan,
)
from plans import chunked_plan, sequential_plan

every_op = pytest.mark.parametrize("op", PEER_OPS)
of_halves = pytest.mark.parametrize("dtype", HALVES, ids=str)
of_some_ranks = pytest.mark.ranks((2, "nccl"), (4, "nccl"))

NCCL = "nccl"
LOW_LATENCY_BYTES = 4 * 2**20  # that a rank sends; above, an all-reduce takes other kernels
# A rank sends all its terms up to this; above, more than two ranks add up a piece each.
ONE_STEP_BYTES = 5 * 2**18

# (rows of one rank's part, n, k). Parts that end inside a tile and inside a cluster of two, odd numbers of tiles, more
# rows than one round of a kernel's blocks takes.
SHAPES = [
    (1, 8, 8), (17, 264, 72), (131, 264, 72), (257, 1000, 136), (384, 384, 64), (3, 4096, 2048),
    (1100, 1032, 264),
]  # fmt: skip
# (rows of all ranks, n, k) of an all-reduce after the framework's GEMM: messages that are no whole numbers of
# low-latency accesses, pieces that begin and end inside rows, pieces of different sizes.
UNEVEN = [(1, 8, 8), (1, 4096, 72), (3, 8, 8), (17, 264, 136), (131, 1000, 72), (2101, 1000, 64),
          (2102, 1000, 64), (5003, 1048, 64)]  # fmt: skip


def check_both(failures: Failures, op: str, case: Case, kernel: Kernel) -> None:
    """With a bias and without."""
    for bias in (False, True):
        case = case.with_(bias=bias)
        check_plan(failures, case, peer_plan(case, op, DIRECT, kernel), kernel.name, op=op)


# --- results ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [*itertools.product(KERNELS, HALVES), (Kernel.LIBRARY, torch.float32)],
    ids=parameter_id,
)
@every_op
@of_some_ranks
@pytest.mark.peers
def test_direct_is_exact(failures: Failures, op: str, kernel: Kernel, dtype: torch.dtype) -> None:
    cases = [peer_case(op, rows, n, k, dtype) for rows, n, k in SHAPES]
    for case in cases + cases_of_other_dims(op, dtype):
        for weight_layout in ("k_contiguous", "n_contiguous"):
            check_both(failures, op, case.with_(weight_layout=weight_layout), kernel)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@of_some_ranks
@pytest.mark.peers
def test_direct_all_reduce_takes_any_number_of_rows(failures: Failures, dtype: torch.dtype) -> None:
    # In a kernel's stores more than two ranks own whole rows.
    any_kernel = dist.get_world_size() == 2 and dtype.itemsize == 2
    for kernel in plan_kernels() if any_kernel else [Kernel.LIBRARY]:
        for rows, n, k in UNEVEN:
            check_both(failures, "gemm_allreduce", Case((rows,), n, k, dtype), kernel)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@of_some_ranks
@pytest.mark.peers
def test_direct_is_exact_around_the_low_latency_limit(
    failures: Failures, dtype: torch.dtype
) -> None:
    """Small and large calls by turns: they signal in different ways, and share no memory."""
    peers = dist.get_world_size() - 1
    for n in (8, 1000, 1024):
        row_bytes = n * dtype.itemsize
        limits = [LOW_LATENCY_BYTES // (peers * row_bytes)]
        if peers > 1:
            in_pieces = LOW_LATENCY_BYTES * (peers + 1) // (2 * peers * row_bytes)
            limits = [ONE_STEP_BYTES // (peers * row_bytes), in_pieces]
        for most in limits:
            for rows in (most - 1, most, most + 1, most, 2 * most, 1):
                case = Case((rows,), n, 64, dtype)
                check_both(failures, "gemm_allreduce", case, Kernel.LIBRARY)


@every_kernel
@every_op
@of_some_ranks
@pytest.mark.peers
def test_direct_is_exact_where_much_is_sent(failures: Failures, op: str, kernel: Kernel) -> None:
    rows, n, k = (1024, 264, 8192) if op.startswith("allgather") else (2048, 8192, 136)
    for rows_of_part in (rows, rows + 1):
        check_both(failures, op, peer_case(op, rows_of_part, n, k, torch.bfloat16), kernel)


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements, contiguous, one element behind an aligned address."""
    return torch.cat([tensor[:1], tensor])[1:]


# A misaligned access ends the process's context: on ranks of its own.
@of_some_ranks
@pytest.mark.peers
@pytest.mark.fresh(group_timeout_s=30.0)
def test_direct_takes_a_bias_at_any_address(failures: Failures) -> None:
    """A bias that no wide load may read; the ways of a small call and of a large one, and a ring's."""
    for op in ("gemm_allreduce", "gemm_reducescatter"):

        def call(input, weight, bias, group, op=op):
            return OPS[op].operator(input, weight, misaligned(bias), group=group)

        ways: list[tuple[Way, Kernel]] = [(DIRECT, kernel) for kernel in plan_kernels()]
        for way, kernel in [*ways, (RING, Kernel.LIBRARY), (STRIPES, Kernel.LIBRARY)]:
            for rows in (17, 2100):
                case = peer_case(op, rows, 1032, 64, torch.bfloat16, bias=True)
                with plan_module.use_plan(peer_plan(case, op, way, kernel)):
                    check_call(failures, case, way, kernel.name, op=op, call=call)
                    torch.cuda.synchronize()


def plan_kernels() -> list[Kernel]:
    has_kernel = plan_module.machine(rank_device()).kernel_arch >= 90
    return KERNELS if has_kernel else [Kernel.LIBRARY]


# --- the same bits everywhere -----------------------------------------------------------------------

REDUCING = [
    (DIRECT, Kernel.LIBRARY), (DIRECT, Kernel.SM90_PINGPONG), (RING, Kernel.SM90_PINGPONG),
    (RING, Kernel.LIBRARY), (STRIPES, Kernel.LIBRARY),
]  # fmt: skip
RUNS = 4


def normal(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=generator.device).to(dtype)


@pytest.mark.parametrize(("way", "kernel"), REDUCING, ids=str)
@of_halves
@of_some_ranks
@pytest.mark.peers
def test_direct_all_reduce_has_the_same_bits_everywhere(
    failures: Failures, way: Way, kernel: Kernel, dtype: torch.dtype
) -> None:
    """Normal data, whose sums depend on the order: all ranks and runs must take the same."""
    rank, world, device = dist.get_rank(), dist.get_world_size(), rank_device()
    integer = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    for m, n, k in ((world, 256, 512), (16 * world, 1024, 512), (768 * world, 3072, 512)):
        generators = [torch.Generator(device).manual_seed(seed) for seed in range(world)]
        operands = [(normal(own, dtype, m, k), normal(own, dtype, n, k)) for own in generators]
        bias = normal(torch.Generator(device).manual_seed(world), dtype, n)
        case = Case((m,), n, k, dtype, bias=True)
        terms = [input.double() @ weight.double().t() for input, weight in operands]
        # Each rank's term, and each sum on the way, is rounded once.
        magnitude = sum(term.abs() for term in terms) + bias.double().abs()
        bound = magnitude * (2 + world) * torch.finfo(dtype).eps + 2**-12
        plan = peer_plan(case, "gemm_allreduce", way, kernel)
        with plan_module.use_plan(plan):
            outputs = [OPS["gemm_allreduce"].wrapper(*operands[rank], bias) for _ in range(RUNS)]
        error = (outputs[0].double() - (sum(terms) + bias.double())).abs()
        wrong = int((~(error <= bound)).sum())
        failures.expect(f"{wrong} elements off" if wrong else None, case)
        bits = [output.view(integer) for output in outputs]
        for run in range(1, RUNS):
            same = torch.equal(bits[0], bits[run])
            failures.expect(None if same else f"run {run} has other bits than run 0", case)
        everybody = [torch.empty_like(outputs[0]) for _ in range(world)]
        dist.all_gather(everybody, outputs[0])
        for other, output in enumerate(everybody):
            same = torch.equal(bits[0], output.view(integer))
            failures.expect(None if same else f"rank {other} has other bits", case)


# --- order ------------------------------------------------------------------------------------------


def runners_of(kernel: Kernel) -> list[Runner]:
    """Direct plans, rings, stripes, chunked gathers, and the sequence over NCCL, of every op; each of a K of its own.

    All-to-alls over peers and over NCCL, too.
    """
    runners: list[Runner] = []
    world = dist.get_world_size()

    def add(op: str, way: Way, case: Case) -> None:
        case = case.with_(k=136 + 8 * len(runners), bias=has_bias(op))
        if way == NCCL:
            plan = sequential_plan(case, world, "cuda", op)
        else:
            plan = peer_plan(case, op, way, Kernel.LIBRARY if way == STRIPES else kernel)
        runners.append(Runner(f"{kernel.name} {way}", op, case, plan))

    for op in PEER_OPS:
        others = [STRIPES] if has_bias(op) else []
        others += [OWNERS] if has_bias(op) and kernel == Kernel.SM90_PINGPONG else []
        for way in (DIRECT, RING, NCCL, DIRECT, *others):
            add(op, way, peer_case(op, 643, 776, 8, torch.bfloat16))
    # The rows of a low-latency call, and far from it.
    for rows in (1, 17, 2100):
        add("gemm_allreduce", DIRECT, Case((rows * world,), 1032, 8, torch.bfloat16))
    to_all = Case((643,), 776, 8, torch.bfloat16)
    add(ALL_TO_ALL, 1, to_all)
    add(ALL_TO_ALL, 1, to_all.with_(leading=(2100,), n=4096))
    case = to_all.with_(k=136 + 8 * len(runners))
    over_nccl = chunked_plan(case, world, "cuda", "row panels", 1, kernel, op=ALL_TO_ALL)
    return [*runners, Runner(f"{kernel.name} over NCCL", ALL_TO_ALL, case, over_nccl)]


@so_many_calls(150)
@every_kernel
@of_some_ranks
@pytest.mark.peers
@pytest.mark.seconds(600)
def test_direct_beside_other_plans_back_to_back(
    failures: Failures, kernel: Kernel, calls: int
) -> None:
    # The all-to-alls' slots grow with the ranks.
    case = Case((4096 * dist.get_world_size(),), 4096, 1024, torch.bfloat16, bias=True)
    larger = Runner(
        "larger", "gemm_allreduce", case, peer_plan(case, "gemm_allreduce", RING, kernel)
    )
    race(failures, runners_of(kernel), larger, calls, calls)


@so_many_calls(100)
@every_kernel
@every_op
@of_some_ranks
@pytest.mark.peers
@pytest.mark.seconds(600)
def test_direct_back_to_back(failures: Failures, op: str, kernel: Kernel, calls: int) -> None:
    """Calls of one plan, small or large: nothing but their own signals keeps them apart."""
    # The first slots hold 32 MiB, the larger call takes more.
    for rows in (2, 643):
        first, larger = (
            Runner(f"{kernel.name} {case.m} rows", op, case, peer_plan(case, op, DIRECT, kernel))
            for size, n, k in ((rows, 776, 1032), (4200, 4096, 4096))
            for case in [peer_case(op, size, n, k, torch.bfloat16, bias=has_bias(op))]
        )
        race(failures, [first], larger, calls, rows)
