"""Ranks that differ plan for the slowest, with what all have; or for nothing, where they would plan
differently, or where the kernels of one run one at a time.
"""

import pytest

from machines import big, hopper
from overlap_torch import plan
from overlap_torch._plan import make_kernel_plan
from overlap_torch.plan import Machine, Profile
from overlap_torch.plan.types import Op, Schedule, Transport
from tests._plan_test import agree, serial_by

OPS = (Op.GEMM_ALLREDUCE, Op.GEMM_REDUCESCATTER, Op.ALLGATHER_GEMM, Op.GEMM_ALLTOALL)


def alike(count: int = 3, **changes: object) -> list[Machine]:
    machines = [hopper(windows=True, peer_gbps=365.0) for _ in range(count)]
    for name, value in changes.items():
        setattr(machines[1], name, value)
    return machines


def agreed(machines: list[Machine], nccl: int = 22800, build: int = 7) -> tuple[Machine, str]:
    count = len(machines)
    versions = [22800, nccl, *[22800] * (count - 2)]
    return agree(machines, versions, [7, build, *[7] * (count - 2)])[:2]


def test_agree_leaves_ranks_that_are_alike_as_they_are():
    machine, difference = agreed(alike())
    assert (repr(machine), difference) == (repr(alike()[0]), "")
    # Clocks and power limits change these numbers, and nobody has to hear of it.
    machine, difference = agreed(alike(sm_gflops=5000.0))
    assert (machine.sm_gflops, difference) == (5000.0, "")


def test_agree_plans_for_the_slowest_with_what_all_have():
    machine, difference = agreed(alike(sm_count=114, kernel_arch=80))
    assert (machine.sm_count, machine.kernel_arch) == (114, 80)
    assert machine.link_gbps == 260.0
    assert difference == (
        "rank 1 has SMs 114 (rank 0: 132), another set of kernels: all ranks plan for the slowest, with what all have"
    )
    # Whichever rank asks.
    machines = alike(sm_count=114)
    assert agree(machines[1:] + machines[:1], [1] * 3, [1] * 3)[0].sm_count == 114


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nccl": 22700}, "rank 1 has NCCL 22700 (rank 0: 22800)"),
        ({"build": 8}, "rank 1 has another build of overlap_torch"),
        ({}, "rank 1 has another profile (OVERLAP_PROFILE)"),
    ],
    ids=str,
)
def test_agree_plans_nothing_where_ranks_would_plan_differently(changes, said):
    own = '{"name": "own", "gemm.start_us": 9}'
    machines = alike(**({} if changes else {"profile": Profile.parse(own)}))
    machine, difference = agreed(machines, **changes)
    assert difference == f"{said}: every call runs the sequence until they are the same"
    for op in OPS:
        assert plan.templates.make_plan(big(op=op), machine).schedule == Schedule.SEQUENTIAL


@pytest.mark.parametrize(
    ("found", "name"),
    [
        ((None, "", ""), ""),
        (("0", "", ""), ""),
        (("1", "", ""), "CUDA_LAUNCH_BLOCKING"),
        ((None, "7f00 r-xp /opt/compute-sanitizer/libsanitizer-collection.so\n", ""), "compute-sanitizer"),
        ((None, "", "cuda-gdb\n"), "cuda-gdb"),
        ((None, "", "gdb\n"), ""),
        ((None, "7f00 r-xp /opt/nvidia/nsight-compute/2025.3/libcuda-injection.so\n", ""), "Nsight Compute"),
        ((None, "7f00 r-xp /opt/nvidia/nsight-systems/2025.3/libToolsInjection64.so\n", ""), ""),
    ],
    ids=str,
)  # fmt: skip
def test_serial_by_what_a_process_shows(found, name):
    assert serial_by(*found)[1] == name


@pytest.mark.parametrize("serial", [1, 2, 3, 4])
@pytest.mark.parametrize("rank", [0, 2])
def test_agree_one_rank_whose_kernels_run_one_at_a_time_makes_all_run_the_sequence(rank, serial):
    serials = [serial if r == rank else 0 for r in range(3)]
    machine, difference, why = agree(alike(), [1] * 3, [1] * 3, serials)
    names = ["CUDA_LAUNCH_BLOCKING", "compute-sanitizer", "cuda-gdb", "Nsight Compute"]
    assert (difference, why) == ("", f"rank {rank} by {names[serial - 1]}")
    assert machine.serial and not alike()[0].serial
    for op in OPS:
        problem = big(op=op)
        overlapped = plan.templates.make_plan(problem, alike()[0])
        assert overlapped.schedule == Schedule.OVERLAPPED
        assert plan.templates.make_plan(problem, machine) == plan.candidates(problem, machine)[0]
        assert plan.templates.make_plan(problem, machine).schedule == Schedule.SEQUENTIAL
        if overlapped.chunks[0].transport == Transport.PEER:
            with pytest.raises(ValueError, match="run one at a time .*; use nccl, or run without"):
                plan.validate(overlapped, machine)


def test_agree_a_callers_kernel_has_one_chunk_where_kernels_run_one_at_a_time():
    request = {"tile": (128, 128), "kernel_us": 2000.0, "comm_sms": 16}
    machines = alike(count=1)
    assert len(make_kernel_plan(big(), machines[0], **request).chunks) > 1
    (machine, _, _) = agree(machines, [1], [1], [1])
    made = make_kernel_plan(big(), machine, **request)
    assert (len(made.chunks), made.chunks[0].transport) == (1, Transport.NCCL)
