"""Machines and problems on both sides of every distinction that the planner makes, for its tests and the proof's."""

from collections.abc import Iterator

from overlap_torch._plan import DType, Machine, Op, Problem, Recipe
from tests.lib.machines import ampere, cpu, hopper


def _hopper(**changes: object) -> Machine:
    return hopper(**{"windows": True, "peer_gbps": 365.0, **changes})


def _ampere(**changes: object) -> Machine:
    return ampere(**{"link_latency_us": 14.0, "link_gbps": 200.0, **changes})


# On both sides of what the planner distinguishes: links, windows, peers, kernels, SMs.
MACHINES: dict[str, Machine] = {
    "hopper": _hopper(),
    "hopper without peers": _hopper(peer_gbps=0.0),
    "hopper without windows": hopper(),
    "hopper, slower peers": _hopper(link_gbps=140.0, peer_gbps=101.0),
    "hopper, slow peers": _hopper(link_gbps=61.0, peer_gbps=99.0),
    "hopper, fast link": _hopper(link_latency_us=30.0, link_gbps=400.0, peer_gbps=450.0),
    "hopper on PCIe": hopper(sm_count=114, sm_gflops=4200.0, link_gbps=59.0, link_latency_us=25.0),
    "hopper, slow link": hopper(link_gbps=18.0, link_latency_us=60.0),
    "hopper without its kernels": _hopper(kernel_arch=80),
    "hopper of 16 SMs": _hopper(sm_count=16),
    "ampere": _ampere(peer_gbps=240.0),
    "ampere without kernels": _ampere(kernel_arch=0),
    "ada": _ampere(arch=89, sm_count=58, sm_gflops=1500.0, link_latency_us=9.0, link_gbps=12.0),
    "blackwell": _hopper(arch=100, sm_count=148, sm_gflops=8000.0, kernel_arch=80, link_gbps=500.0, peer_gbps=700.0),
    "cpu": cpu(),
    "cpu of 64 cores": cpu(sm_count=64, link_latency_us=60.0, link_gbps=6.0),
    "not measured": Machine(arch=90, sm_count=132),
}  # fmt: skip

WORLDS = (1, 2, 3, 4, 5, 6, 7, 8, 16)

# Rows of the whole GEMM, columns, a rank's inner dimension. The benchmark's ...
SUITE = [
    (m, n, k)
    for n, k in ((8192, 7168), (8192, 2048), (4096, 3584), (16384, 4096))
    for m in (4096, 8192, 16384, 1, 16, 128, 512, 1024, 2048)
] + [(4096, 8192, 32768), (8192, 8192, 32768)]
# ... and small ones, ragged ones, very large ones, and empty ones.
OTHERS = [
    (1026, 28672, 4096),
    (4095, 1000, 1000),
    (3000, 5120, 1368),
    (100, 7, 13),
    (777, 1003, 511),
    (96, 24, 8),
    (32768, 8192, 28672),
    (131072, 12288, 3072),
    (65536, 512, 256),
    (2049, 130, 8192),
    (0, 512, 512),
    (512, 0, 512),
    (512, 512, 0),
]
# Shapes for the types that only the framework's GEMM takes.
OTHER_TYPES = [(8192, 8192, 7168), (512, 4096, 3584), (16, 8192, 2048), (777, 1003, 511)]


# Scaled operands: as training has them, few rows, and what the kernels do not take.
SCALED = [(8192, 8192, 7168), (4096, 8192, 2048), (16384, 4096, 3584), (512, 4096, 3584)]
SCALED += [(16, 8192, 2048), (2052, 1000, 1016), (777, 1003, 511)]
SCALED_MACHINES = ("hopper", "hopper without peers", "hopper, slow link", "ada")
SCALED_TYPES = [
    (Recipe.TENSOR_WISE, DType.BFLOAT16, True),
    (Recipe.TENSOR_WISE, DType.BFLOAT16, False),
    (Recipe.ROW_WISE, DType.BFLOAT16, True),
    (Recipe.ROW_WISE, DType.FLOAT16, True),
    (Recipe.BLOCK_WISE, DType.BFLOAT16, False),
]


def rows_of(op: Op, m: int, world: int) -> int:
    """Rounded up where each rank has an equal part of the rows."""
    if op == Op.GEMM_ALLTOALL:
        return 0
    return -(-m // world) * world if op in (Op.GEMM_REDUCESCATTER, Op.ALLGATHER_GEMM) else m


def scaled_problems(op: Op) -> Iterator[Problem]:
    """An op's with scaled operands."""
    for world in (1, 2, 3, 4, 8):
        for m, n, k in SCALED:
            for recipe, output, fast in SCALED_TYPES:
                shape = (rows_of(op, m, world), n, k)
                yield Problem(*shape, DType.FLOAT8_E4M3FN, world, op, recipe, output, fast)


def problems(op: Op, scaled: bool = False) -> Iterator[Problem]:
    """An op's, each but once."""
    if scaled:
        yield from scaled_problems(op)
        return
    typed = [(DType.BFLOAT16, SUITE + OTHERS)]
    typed += [(dtype, OTHER_TYPES) for dtype in (DType.FLOAT16, DType.FLOAT32, DType.FLOAT64)]
    seen = set()
    for world in WORLDS:
        for dtype, shapes in typed:
            for m, n, k in shapes:
                key = (rows_of(op, m, world), n, k, dtype, world)
                if key not in seen:
                    seen.add(key)
                    yield Problem(*key, op)


def families() -> Iterator[tuple[str, str, Op, bool]]:
    """(family, machine's name, op, whether operands are scaled)."""
    ops = (Op.GEMM_ALLREDUCE, Op.GEMM_REDUCESCATTER, Op.ALLGATHER_GEMM, Op.GEMM_ALLTOALL)
    for name in MACHINES:
        for op in ops:
            yield f"{op.name.lower()} on {name}", name, op, False
    for name in SCALED_MACHINES:
        for op in ops:
            yield f"{op.name.lower()} of fp8 on {name}", name, op, True
