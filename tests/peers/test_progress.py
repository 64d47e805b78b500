"""Progress: ops in flight on several streams, threads and groups, beside foreign collectives placed anywhere."""

import threading

import pytest
import torch
import torch.distributed as dist

import overlap_torch
from checks import Failures
from operands import Case, Operands, difference, make_operands, place, rank_device, subgroup
from ops import expected_output
from overlap_torch import plan as plan_module
from overlap_torch.plan.types import Kernel
from plans import chunked_plan

ROUNDS = 12


def prepare(case: Case, seeds: range) -> tuple[list[Operands], list[torch.Tensor]]:
    device, world = rank_device(), dist.get_world_size()
    operands = [make_operands(case, *place(), seed) for seed in seeds]
    return operands, [expected_output(case, world, device, seed) for seed in seeds]


def check_foreign(failures: Failures, tensors: list[torch.Tensor], *where: object) -> None:
    world = dist.get_world_size()
    for index, tensor in enumerate(tensors):
        # Rank r contributed r + index + 1 everywhere.
        right = torch.full_like(tensor, sum(r + index + 1 for r in range(world)))
        failures.expect(difference(tensor, right), "foreign all-reduce", index, *where)


def run_beside_foreign(
    failures: Failures, layout: str | None, kernel: Kernel, sizes: tuple[int, int, int]
) -> None:
    """Two ops on two streams and two groups each round, and foreign all-reduces before, between or after them.

    The place of the foreign collectives differs by rank and round; the order of the two ops does not.
    """
    device, rank, world = rank_device(), dist.get_rank(), dist.get_world_size()
    everybody = tuple(range(world))
    groups = [subgroup(everybody, "first"), subgroup(everybody, "second")]
    foreign_group = subgroup(everybody, "foreign")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    m, n, k = sizes
    cases = [Case((m,), n, k, dtype, bias=True), Case((m // 2,), n, 2 * k, dtype)]
    prepared = [prepare(case, range(4)) for case in cases]
    for group, case in zip(groups, cases, strict=True):
        if layout is not None:
            options = {"kernel": kernel, "comm_sms": 16, "max_ctas": 8}
            if device.type == "cpu":
                options = {"tile": (32, 32)}
            plan = chunked_plan(case, world, device.type, layout, 8, **options)
            plan_module.set_plan(plan, group=group)
    # The first call of a group makes its communicators, which blocks the host: before anything foreign is in flight.
    for group, (operands, _) in zip(groups, prepared, strict=True):
        overlap_torch.gemm_allreduce(
            operands[0].input, operands[0].weight, operands[0].bias, group=group
        )
    dist.all_reduce(torch.zeros(1, device=device), group=foreign_group)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()] if device.type == "cuda" else [None, None]
    elements = 1 << 20 if device.type == "cuda" else 1 << 12
    outputs: list[tuple[int, int, torch.Tensor]] = []
    tensors_of_round = []
    works = []
    for turn in range(ROUNDS):
        tensors = [
            torch.full((elements,), float(rank + index + 1), device=device) for index in range(2)
        ]
        tensors_of_round.append(tensors)
        place = (rank + turn) % 3
        for position in range(3):
            if position == place:
                works += [
                    dist.all_reduce(one, group=foreign_group, async_op=True) for one in tensors
                ]
            if position == 2:
                break
            operands = prepared[position][0][turn % 4]
            if streams[position] is not None:
                streams[position].wait_stream(torch.cuda.default_stream())
            with torch.cuda.stream(streams[position]):
                output = overlap_torch.gemm_allreduce(
                    operands.input, operands.weight, operands.bias, group=groups[position]
                )
            outputs.append((position, turn % 4, output))
    for work in works:
        work.wait()
    if device.type == "cuda":
        torch.cuda.synchronize()
    overlap_torch.check()
    for position, seed, output in outputs:
        right = prepared[position][1][seed]
        failures.expect(difference(output, right), "op", position, cases[position])
    for turn, tensors in enumerate(tensors_of_round):
        check_foreign(failures, tensors, "round", turn)
    for group in groups:
        torch.ops.overlap.clear_plans(group.group_name)


@pytest.mark.parametrize("layout", [None, "row panels", "packed"])
@pytest.mark.ranks((2, "gloo"), (3, "gloo"))
def test_progress_beside_foreign_collectives_on_cpu(failures: Failures, layout: str | None) -> None:
    run_beside_foreign(failures, layout, Kernel.LIBRARY, (256, 128, 32))


GPU_PLANS = [
    (None, Kernel.LIBRARY),
    ("row panels", Kernel.LIBRARY),
    ("packed", Kernel.SM80),
    ("row panels", Kernel.SM90_PINGPONG),
    ("packed", Kernel.SM90_COOPERATIVE),
    ("packed", Kernel.SM90_PINGPONG_WIDE),
    *(
        pytest.param("peers", kernel, marks=pytest.mark.peers)
        for kernel in (Kernel.LIBRARY, Kernel.SM90_PINGPONG, Kernel.SM90_PINGPONG_WIDE)
    ),
]


@pytest.mark.parametrize(
    ("layout", "kernel"), GPU_PLANS, ids=lambda value: getattr(value, "name", str(value))
)
@pytest.mark.ranks((2, "nccl"), (4, "nccl"))
def test_progress_beside_foreign_collectives_on_gpu(
    failures: Failures, layout: str | None, kernel: Kernel
) -> None:
    run_beside_foreign(failures, layout, kernel, (4096, 2048, 512))


@pytest.mark.ranks((2, "gloo"), (3, "gloo"))
@pytest.mark.parametrize("count", [3, 1], ids=["groups", "one-group"])
def test_progress_of_threads(failures: Failures, count: int) -> None:
    """Three threads, which start in another order on each rank. Threads of one group make the same calls."""
    workers = 3
    device, rank, world = rank_device(), dist.get_rank(), dist.get_world_size()
    everybody = tuple(range(world))
    groups = [subgroup(everybody, f"thread {index}") for index in range(count)]
    case = Case((96,), 64, 32, torch.float32, bias=True)
    operands, expected = prepare(case, range(4))
    for group in groups:
        plan = chunked_plan(case, world, device.type, "packed", 6, tile=(32, 32))
        plan_module.set_plan(plan, group=group)
    lock = threading.Lock()

    def work(index: int) -> None:
        for turn in range(ROUNDS):
            which = (turn + index) % 4 if count > 1 else 0
            chosen = operands[which]
            try:
                output = overlap_torch.gemm_allreduce(
                    chosen.input, chosen.weight, chosen.bias, group=groups[index % count]
                )
                problem = difference(output, expected[which])
            except RuntimeError as error:
                problem = str(error)
            with lock:
                failures.expect(problem, "thread", index, "turn", turn)

    order = [(index + rank) % workers for index in range(workers)]
    threads = [threading.Thread(target=work, args=(index,)) for index in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for group in groups:
        torch.ops.overlap.clear_plans(group.group_name)
