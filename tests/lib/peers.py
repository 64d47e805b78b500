"""Calls over memory that the ranks map into each other."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from checks import Failures, check_plan
from operands import INPUT_LAYOUTS, WEIGHT_LAYOUTS, Case, in_layouts_of_rank
from ops import OPS
from overlap_torch.plan import Plan
from overlap_torch.plan.templates import at_once, row_panels
from overlap_torch.plan.types import Kernel
from plans import chunked_plan, stripes

PEER_OPS = ["gemm_allreduce", "gemm_reducescatter", "allgather_gemm", "allgather_gemm.weights"]
ALL_TO_ALL = "gemm_alltoall"  # has one way only, whatever the number of chunks
DIRECT = "direct"
STRIPES = "stripes"  # of reductions by the framework's GEMM, in unequal chunks where there are rows for them
OWNERS = "owners"  # of reductions, with the ping-pong kernel
ONE_LAUNCH = "one launch"  # of an all-to-all
RING = 1

# Ranks with this have all-to-alls in one launch where the plan has that, whatever their rows.
ALWAYS_ONE_LAUNCH = {"OVERLAP_PROFILE": str(Path(__file__).parents[1] / "profiles/one_launch.json")}

# Over peers: in so many chunks, "direct", "stripes", "owners" or "one launch"; a ring, of reductions, has one.
Way = int | str


# The kernels of every op's plans over peers.
KERNELS = [Kernel.SM90_PINGPONG, Kernel.SM90_PINGPONG_WIDE, Kernel.LIBRARY]


def peer_kernels(op: str) -> list[Kernel]:
    """The kernels of an op's plans over peers: a ring's sources only ping-pong adds."""
    gathers = op.startswith("allgather_gemm")
    return [*KERNELS, Kernel.SM90_COOPERATIVE] if gathers else KERNELS


def kernel_id(value: object) -> str | None:
    """For pytest's parameters."""
    return value.name if isinstance(value, Kernel) else None


every_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=kernel_id)
HALVES = (torch.bfloat16, torch.float16)


def parameter_id(value: object) -> str:
    """For pytest's parameters."""
    return kernel_id(value) or str(value)


def peer_case(op: str, rows: int, n: int, k: int, dtype: torch.dtype, **rest: object) -> Case:
    """A call of which every rank's part is `rows` high."""
    parts = 1 if OPS[op].cuts_rows else dist.get_world_size()
    return Case((parts * rows,), n, k, dtype, **rest)


def cases_of_other_dims(op: str, dtype: torch.dtype) -> list[Case]:
    """Calls that cut dim 1, of rows behind each element of dim 0 that fill tiles, or do not."""
    if not OPS[op].takes_dim:
        return []
    return [
        Case(leading, 264, 72, dtype, dim=1)
        for leading in ((2, 256), (3, 128), (9, 128), (2, 100), (300, 2))
    ]


def peer_plan(case: Case, op: str, way: Way, kernel: Kernel) -> Plan:
    world = dist.get_world_size()
    if way == DIRECT:
        return at_once(OPS[op].problem(case, world), kernel=kernel)
    if way == STRIPES:
        assert kernel == Kernel.LIBRARY
        return stripes(OPS[op].problem(case, world), "peer")[1][1]
    if way == OWNERS:
        how = {"kernel": kernel, "transport": "peer", "collective": way}
        return row_panels(OPS[op].problem(case, world), 1, **how)
    if way == ONE_LAUNCH:
        return chunked_plan(case, world, "cuda", "peers", 1, kernel, op=op, one_launch=True)
    return chunked_plan(case, world, "cuda", "peers", way, kernel, op=op)


def alltoall_ways(kernel: Kernel) -> list[Way]:
    return [1] if kernel == Kernel.LIBRARY else [1, ONE_LAUNCH]


def has_bias(op: str) -> bool:
    """True if the op keeps its kernels where it adds a bias: gathers and all-to-alls leave them."""
    return op in ("gemm_allreduce", "gemm_reducescatter")


@contextmanager
def fixed_counts(counts: list[list[int]] | None = None) -> Iterator[None]:
    """All-to-alls of these numbers of rows, [sender][receiver]; None: of the case's, whatever the seed."""
    op = OPS[ALL_TO_ALL]
    drawn = type(op).counts
    op.counts = lambda case, world, seed=0: counts or drawn(case, world, 2)
    try:
        yield
    finally:
        del op.counts


def skip_unless_it_runs(ranks, kernel: Kernel = Kernel.LIBRARY) -> None:
    ranks.skip_without_kernel(kernel)
    ranks.skip_without_peers()


def check_other_layouts(
    failures: Failures, op: str, kernel: Kernel, way: Way, m: int | None = None
) -> None:
    """Operands that the kernel cannot take, on one rank at a time, and on each rank others. `m`: of an all-reduce."""
    rank, world = dist.get_rank(), dist.get_world_size()
    case = peer_case(op, 260, 264, 64, torch.bfloat16)
    if m is not None:
        case = case.with_(leading=(m,))
    inputs = [layout for layout in INPUT_LAYOUTS if layout != "expanded"]
    for bias in (False, True):
        case = case.with_(bias=bias)
        plan = peer_plan(case, op, way, kernel)
        for other in range(world):
            for field, layouts in (("input_layout", inputs), ("weight_layout", WEIGHT_LAYOUTS)):
                for layout in layouts:
                    mine = case.with_(**{field: layout}) if rank == other else case
                    check_plan(failures, mine, plan, "rank", other, "has", layout, op=op)
        for turn in range(len(WEIGHT_LAYOUTS)):
            mine = in_layouts_of_rank(case, turn, rank)
            check_plan(failures, mine, plan, "turn", turn, op=op)
