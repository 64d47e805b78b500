"""`python -m tests.lib.machine_table`: what the planner takes on GPUs that were not measured, and what it expects to gain.

Rates of links and copies are assumptions (GB/s, and microseconds of a small all-reduce); SMs' rates follow from the GPU's
SMs, its clock and its tensor cores' operations, as the runtime takes them. Nothing here was measured on such a GPU.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from overlap_torch import plan
from overlap_torch.plan import Machine, Problem
from overlap_torch.plan.types import Op, Schedule

OPS = (Op.GEMM_ALLREDUCE, Op.GEMM_REDUCESCATTER, Op.ALLGATHER_GEMM)
SUSTAINED = 0.69
# Architecture, SMs, GHz, operations of an SM and clock.
GPUS = {
    "H200": (90, 132, 1.98, 4096),
    "H100 PCIe": (90, 114, 1.755, 4096),
    "A100": (80, 108, 1.41, 2048),
    "L40S": (89, 142, 2.52, 1024),
    "B200": (100, 148, 1.965, 8192),
    "H20": (90, 78, 1.98, 958),  # as measured: the chip is cut down
}
# GPU, ranks, latency, link, copies into a peer's memory (0: none), windows.
MACHINES = {
    "H200 NVLink x2": ("H200", 2, 9.3, 262.7, 365.0, True),
    "H200 NVLink x4": ("H200", 4, 13.0, 230.0, 365.0, True),
    "H200 NVLink x8": ("H200", 8, 18.0, 200.0, 365.0, True),
    "H100 PCIe5 x2": ("H100 PCIe", 2, 16.0, 42.0, 50.0, True),
    "H100 PCIe5 without access x2": ("H100 PCIe", 2, 40.0, 22.0, 0.0, False),
    "A100 NVLink x4": ("A100", 4, 15.0, 160.0, 260.0, True),
    "A100 PCIe4 x4": ("A100", 4, 30.0, 12.0, 24.0, True),
    "L40S PCIe4 x2": ("L40S", 2, 20.0, 18.0, 24.0, True),
    "B200 NVLink x2": ("B200", 2, 9.0, 500.0, 720.0, True),
    "B200 NVLink x8": ("B200", 8, 18.0, 380.0, 720.0, True),
    "H20 NVLink x4": ("H20", 4, 13.0, 230.0, 365.0, True),
}
TRAIN = [
    (m, n, k)
    for n, k in ((8192, 7168), (8192, 2048), (4096, 3584), (16384, 4096))
    for m in (4096, 8192, 16384)
]


def machine(name: str) -> Machine:
    gpu, _, latency_us, gbps, peer_gbps, windows = MACHINES[name]
    arch, sms, ghz, operations = GPUS[gpu]
    return Machine(
        arch=arch,
        sm_count=sms,
        sm_gflops=operations * SUSTAINED * ghz,
        has_sm80_kernels=True,
        has_sm90_kernels=arch == 90,
        link_latency_us=latency_us,
        link_gbps=gbps,
        windows=windows,
        peer_gbps=peer_gbps,
    )


def shapes(world: int) -> Iterator[tuple[int, int, int]]:
    """The benchmark's, few rows, and random ones."""
    yield from TRAIN
    random_ = random.Random(1)
    for _ in range(28):
        m = round(2 ** random_.uniform(4, 14.5))
        yield (
            -(-m // world) * world,
            128 * random_.randint(8, 128),
            128 * random_.randint(4, 64),
        )


def row(name: str, op: Op) -> tuple[float, float, float]:
    """Share of the problems that overlap, expected gain over all of them, and over TRAIN."""
    on, world = machine(name), MACHINES[name][1]
    overlapped, gains = 0, []
    for m, n, k in shapes(world):
        problem = Problem(m, n, k, "bfloat16", world, op)
        chosen = plan.templates.make_plan(problem, on)
        overlapped += chosen.schedule == Schedule.OVERLAPPED
        sequence = plan.predict(plan.templates.make_sequential(problem, on), on).total_us
        gains.append(math.log(sequence / plan.predict(chosen, on).total_us))
    train = gains[: len(TRAIN)]
    mean = math.exp(sum(gains) / len(gains))
    return overlapped / len(gains), mean, math.exp(sum(train) / len(train))


def main() -> None:
    print(f"{'machine':30}" + "".join(f"{op.name.lower():>32}" for op in OPS))
    print(f"{'':30}" + f"{'overlap   all  4096 rows and more':>32}" * len(OPS))
    for name in MACHINES:
        cells = [row(name, op) for op in OPS]
        text = "".join(f"{share:>14.0%} {mean:6.2f}x {train:9.2f}x" for share, mean, train in cells)
        print(f"{name:30}{text}")


if __name__ == "__main__":
    main()
