"""All-to-alls over memory that the ranks map into each other: right for any numbers of rows, call after call."""

import itertools

import pytest
import torch
import torch.distributed as dist

import rank_pool
from checks import Failures, check_call, check_plan
from operands import INPUT_LAYOUTS, WEIGHT_LAYOUTS, Case, rank_device
from ops import OPS
from overlap_torch import plan as plan_module
from overlap_torch.plan.types import Kernel
from peer_races import Runner, race, so_many_calls
from peers import (
    ALL_TO_ALL,
    ALWAYS_ONE_LAUNCH,
    HALVES,
    KERNELS,
    ONE_LAUNCH,
    alltoall_ways,
    check_other_layouts,
    every_kernel,
    fixed_counts,
    kernel_id,
    parameter_id,
    peer_plan,
)
from plans import chunked_plan
from tests import _plan_test

of_some_ranks = pytest.mark.ranks((2, "nccl"), (4, "nccl"))
by_pingpong = pytest.mark.parametrize("kernel", [Kernel.SM90_PINGPONG], ids=kernel_id)

Counts = list[list[int]]  # [sender][receiver]


@pytest.fixture
def ranks(ranks):
    ranks.environment = ALWAYS_ONE_LAUNCH
    return ranks


def memory_bytes() -> int:
    return torch.cuda.get_device_properties(rank_device()).total_memory


@pytest.fixture
def gpus_of_60_gib(ranks) -> None:
    if min(ranks.run(memory_bytes)) < 60 * 2**30:
        pytest.skip("half a gigabyte of rows, in float64 too, takes a GPU of 60 GiB")


# N and K that the kernels take, and others: rows are whole accesses of 16 bytes in every dtype.
SIZES = [(264, 72), (8, 8), (1000, 136), (520, 33), (16, 1)]
MANY = (4096, 2048)  # of which some thousand rows keep the device busy for longer than they travel


def few_rows(world: int) -> dict[str, Counts]:
    """Numbers of rows between two ranks: as many, none, one, odd, one way only, ..."""
    ranks = range(world)
    last = world - 1
    return {
        "even": [[128] * world] * world,
        "none": [[0] * world] * world,
        "one": [[1] * world] * world,
        "odd": [[(97 * s + 61 * r) % 331 for r in ranks] for s in ranks],
        "own": [[131 if s == r else 0 for r in ranks] for s in ranks],
        "others'": [[0 if s == r else 130 + s for r in ranks] for s in ranks],
        "one way": [[259 if (s, r) == (0, last) else 0 for r in ranks] for s in ranks],
        "to one": [[140 + s if r == last else 0 for r in ranks] for s in ranks],
        "from one": [[257 - r if s == last else 0 for r in ranks] for s in ranks],
        "one among many": [[1 if s < r else 700 for r in ranks] for s in ranks],
    }


def many_rows(world: int) -> dict[str, Counts]:
    ranks = range(world)
    return {
        "even": [[4096] * world] * world,
        "uneven": [[4000 + 37 * s - 61 * r for r in ranks] for s in ranks],
        "some none": [[0 if (s + 1) % world == r else 4100 + r for r in ranks] for s in ranks],
        "few among many": [[3 if r > s else 6000 for r in ranks] for s in ranks],
    }


def stores(case: Case, kernel: Kernel, counts: Counts) -> bool:
    """True if this rank's GEMM stores rows where they go, if it takes the operands."""
    plan = peer_plan(case, ALL_TO_ALL, 1, kernel)
    rank = dist.get_rank()
    machine = plan_module.machine(rank_device())
    return _plan_test.stores_messages(plan, machine, rank, counts[rank])


def check_both(
    failures: Failures, case: Case, kernel: Kernel, counts: Counts, *where: object
) -> None:
    """With a bias and without."""
    for bias in (False, True):
        mine = case.with_(bias=bias)
        with fixed_counts(counts):
            for way in alltoall_ways(kernel):
                plan = peer_plan(mine, ALL_TO_ALL, way, kernel)
                check_plan(failures, mine, plan, *where, kernel.name, way, op=ALL_TO_ALL)


# --- results ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        *itertools.product(KERNELS, HALVES),
        *itertools.product([Kernel.LIBRARY], [torch.float32, torch.float64]),
    ],
    ids=parameter_id,
)
@of_some_ranks
@pytest.mark.peers
def test_peers_alltoall_is_exact(failures: Failures, kernel: Kernel, dtype: torch.dtype) -> None:
    for n, k in SIZES:
        for weight_layout in ("k_contiguous", "n_contiguous"):
            # The counts hold all that is checked of the leading dims.
            case = Case((0,), n, k, dtype, weight_layout=weight_layout)
            for what, counts in few_rows(dist.get_world_size()).items():
                check_both(failures, case, kernel, counts, what)
    case = Case((3, 5), 264, 72, dtype)  # dims between the first and the last
    check_both(failures, case, kernel, [[7] * dist.get_world_size()] * dist.get_world_size())


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@by_pingpong
@of_some_ranks
@pytest.mark.peers
def test_peers_alltoall_is_exact_where_rows_are_stored_where_they_go(
    failures: Failures, kernel: Kernel, dtype: torch.dtype
) -> None:
    """Rows that the GEMM stores where they go, and, with a bias, that the framework computes."""
    world = dist.get_world_size()
    for weight_layout in ("k_contiguous", "n_contiguous"):
        case = Case((0,), *MANY, dtype, weight_layout=weight_layout)
        for what, counts in many_rows(world).items():
            check_both(failures, case, kernel, counts, what)
    case = Case((0,), *MANY, dtype)
    # Within a GPU messages take less than the rounds that they cost.
    if not rank_pool.shares_gpus():
        stored = stores(case, kernel, many_rows(world)["even"])
        failures.expect(None if stored else "many rows are not stored where they go")
    stored = stores(case, kernel, few_rows(world)["one"])
    failures.expect("few rows are stored where they go" if stored else None)


@every_kernel
@of_some_ranks
@pytest.mark.peers
def test_peers_alltoall_takes_layouts_that_differ_between_ranks(
    failures: Failures, kernel: Kernel
) -> None:
    """Operands that the kernel cannot take, on one rank at a time: the others store what that one's kernel sends."""
    rank, world = dist.get_rank(), dist.get_world_size()
    counts = many_rows(world)["uneven"]
    for other in range(world):
        for field, layouts in (("input_layout", INPUT_LAYOUTS), ("weight_layout", WEIGHT_LAYOUTS)):
            for layout in layouts:
                if layout == "expanded":
                    continue
                case = Case((0,), *MANY, torch.bfloat16)
                mine = case.with_(**{field: layout}) if rank == other else case
                # One rank in one launch, the others as ever.
                way = alltoall_ways(kernel)[-1 if rank == other else 0]
                with fixed_counts(counts):
                    plan = peer_plan(mine, ALL_TO_ALL, way, kernel)
                    check_plan(failures, mine, plan, "rank", other, layout, op=ALL_TO_ALL)
    # One rank has many rows to send, another few.
    with fixed_counts([[4000 if s == 0 else 3 for _ in range(world)] for s in range(world)]):
        case = Case((0,), *MANY, torch.bfloat16)
        check_plan(failures, case, peer_plan(case, ALL_TO_ALL, 1, kernel), op=ALL_TO_ALL)
    check_other_layouts(failures, ALL_TO_ALL, kernel, 1)


# --- messages that NCCL takes -----------------------------------------------------------------------

WIDE = 16384  # in bf16: 32 KiB a row


def short_messages(world: int) -> Counts:
    return [[3 + sender] * world for sender in range(world)]


def one_long_message(world: int, rows: int) -> Counts:
    """So many from rank 0 to rank 1, and a few everywhere else."""
    ranks = range(world)
    return [[rows if (s, r) == (0, 1) else 5 + s + r for r in ranks] for s in ranks]


def long_messages(world: int) -> list[Counts]:
    """Messages of more than a slot of 1 GiB takes of each rank, and of just as much."""
    most = 2**30 // world // (2 * WIDE)
    ranks = range(world)
    one_way = one_long_message(world, most + 16)
    other_way = [list(column) for column in zip(*one_way, strict=True)]
    both = [[9 if s == r else most + 16 for r in ranks] for s in ranks]
    return [one_way, other_way, [[most if s != r else 7 for r in ranks] for s in ranks], both]


# Rows that the framework computes, and rows that the GEMM stores.
computed_and_stored = pytest.mark.parametrize("k", [8, 1024])


@computed_and_stored
@by_pingpong
@of_some_ranks
@pytest.mark.peers
def test_peers_alltoall_sends_long_messages_by_nccl(
    failures: Failures, gpus_of_60_gib: None, kernel: Kernel, k: int
) -> None:
    """Long messages beside short ones, and between calls that have only those."""
    world = dist.get_world_size()
    group = dist.new_group()  # which takes its slots with it
    case = Case((0,), WIDE, k, torch.bfloat16)
    plan = peer_plan(case, ALL_TO_ALL, 1, kernel)
    short = short_messages(world)
    for counts in long_messages(world):
        for rows in (counts, short):
            with fixed_counts(rows):
                check_plan(failures, case, plan, rows[0], group=group, op=ALL_TO_ALL)
            torch.cuda.empty_cache()
    with fixed_counts(long_messages(world)[0]):
        case = case.with_(bias=True)
        plan = peer_plan(case, ALL_TO_ALL, 1, kernel)
        check_plan(failures, case, plan, "bias", group=group, op=ALL_TO_ALL)
    dist.destroy_process_group(group)


@computed_and_stored
@by_pingpong
@pytest.mark.ranks((4, "nccl"))
@pytest.mark.peers
def test_peers_alltoall_makes_room_for_long_messages(
    failures: Failures, kernel: Kernel, k: int
) -> None:
    """With a message that one pair of ranks alone knows: once all have heard of it, in the fourth call."""
    world = dist.get_world_size()
    group = dist.new_group()
    case = Case((0,), WIDE, k, torch.bfloat16)
    plan = peer_plan(case, ALL_TO_ALL, 1, kernel)
    short = short_messages(world)
    most = 2**25 // (2 * WIDE)  # with which groups begin
    longer = one_long_message(world, most + 1)
    held = []
    with plan_module.use_plan(plan, group=group):
        for call, counts in enumerate((short, short, longer, longer, short, longer), 1):
            with fixed_counts(counts):
                check_call(failures, case, f"call {call}", seed=call, group=group, op=ALL_TO_ALL)
            held.append(torch.ops.overlap.memory(group.group_name)[1])
    room = 2 * world * 2**26  # two slots of a message of 64 MiB from each rank
    more = [after - before for before, after in itertools.pairwise(held)]
    failures.expect("" if more == [0, 0, room, 0, 0] else f"{more} bytes more, call by call")
    dist.destroy_process_group(group)


# --- order ------------------------------------------------------------------------------------------


def all_to_alls(kernel: Kernel) -> list[Runner]:
    """All-to-alls of few and of many rows, with a bias and over NCCL; numbers of rows differ from call to call."""
    world = dist.get_world_size()
    cases = {
        "few": Case((643,), 776, 136, torch.bfloat16),
        "a row": Case((1,), 4096, 144, torch.bfloat16),
        "many": Case((2100,), 4096, 1024, torch.bfloat16),
        "bias": Case((643,), 776, 152, torch.bfloat16, bias=True),
        "float32": Case((300,), 520, 160, torch.float32),
    }
    runners = []
    for what, case in cases.items():
        own = kernel if case.dtype == torch.bfloat16 else Kernel.LIBRARY
        runners.append(Runner(what, ALL_TO_ALL, case, peer_plan(case, ALL_TO_ALL, 1, own)))
    for rows, k in ((643, 168), (2100, 1032)):
        case = Case((rows,), 4096, k, torch.bfloat16)
        plan = chunked_plan(
            case, world, "cuda", "row panels", 1, kernel, op=ALL_TO_ALL, comm_sms=16, max_ctas=16
        )
        runners.append(Runner(f"{rows} rows over NCCL", ALL_TO_ALL, case, plan))
    if kernel != Kernel.LIBRARY:
        for rows, n, k in ((643, 776, 184), (1, 4096, 192), (2100, 4096, 1040)):
            case = Case((rows,), n, k, torch.bfloat16)
            plan = peer_plan(case, ALL_TO_ALL, ONE_LAUNCH, kernel)
            runners.append(Runner(f"{rows} rows in one launch", ALL_TO_ALL, case, plan))
    # The planner's.
    runners.append(Runner("planned", ALL_TO_ALL, Case((643,), 776, 176, torch.bfloat16), None))
    return runners


@so_many_calls(100)
@every_kernel
@of_some_ranks
@pytest.mark.peers
@pytest.mark.seconds(600)
def test_peers_alltoall_back_to_back(failures: Failures, kernel: Kernel, calls: int) -> None:
    case = Case((8400,), 8192, 1024, torch.bfloat16)
    counts = OPS[ALL_TO_ALL].counts(case, dist.get_world_size())
    assert max(map(max, counts)) > 2048, "for more than 32 MiB, with which groups begin"
    larger = Runner("larger", ALL_TO_ALL, case, peer_plan(case, ALL_TO_ALL, 1, kernel))
    race(failures, all_to_alls(kernel), larger, calls, calls)
