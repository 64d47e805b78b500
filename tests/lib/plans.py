"""Hand-made plans for the op's tests: every schedule, layout and cut into chunks that a problem takes."""

from operands import Case, rank_device
from ops import OPS
from overlap_torch.plan import Machine, Plan, Problem, machine, templates
from overlap_torch.plan.types import Kernel, Op, Resources, Transport

HOPPER_KERNELS = [Kernel.SM90_PINGPONG, Kernel.SM90_COOPERATIVE, Kernel.SM90_PINGPONG_WIDE]
GPU_KERNELS = [Kernel.LIBRARY, Kernel.SM80, *HOPPER_KERNELS]


def available_kernels() -> list[Kernel]:
    """The kernels that this build has for this rank's device."""
    newest = machine(rank_device()).kernel_arch
    return [kernel for kernel in GPU_KERNELS if kernel.traits.least_arch <= newest]


def peers_work() -> bool:
    """True if the ranks map each other's memory. Every rank has to ask."""
    return machine(rank_device()).peer_gbps > 0


def sequential_plan(case: Case, world: int, device_type: str, op: str = "gemm_allreduce") -> Plan:
    # arch 0 is the CPU; a plan over NCCL needs any other.
    machine = Machine(arch=0 if device_type == "cpu" else 80)
    return templates.make_sequential(OPS[op].problem(case, world), machine)


def _thirds(total: int, grain: int) -> list[list[int]]:
    """Unequal cuts of `total` into at most three parts, multiples of `grain`: short first, short last."""
    if total < 3 * grain:
        return []
    return [[grain, grain, total - 2 * grain], [total - grain, grain]]


def overlapped_plans(
    case: Case,
    world: int,
    device_type: str,
    kernel: Kernel = Kernel.LIBRARY,
    tile: tuple[int, int] | None = None,
    op: str = "gemm_allreduce",
    **resources: object,
) -> list[tuple[str, Plan]]:
    """(label, plan): row panels and packed tiles in one chunk, in unequal ones and in as many as there can be.

    `tile` is the library kernel's, `resources` go to the templates (comm_sms, max_ctas, window).
    """
    problem = OPS[op].problem(case, world)
    transport = "gloo" if device_type == "cpu" else "nccl"
    if problem.op == Op.GEMM_ALLTOALL:
        return [("all to all", _all_to_all(problem, kernel, transport, **resources))]
    options = {"kernel": kernel, "tile": tile, "transport": transport, **resources}
    whole = templates.row_panels(problem, 1, **options)
    grain = whole.cluster_m
    rows = whole.tiles_m // problem.row_parts
    plans = [("1 row panel", whole)]
    for heights in [*_thirds(rows, grain), max(1, min(rows // grain, 20))]:
        for band_rows in (grain, 3 * grain):
            plan = templates.row_panels(problem, heights, band_rows=band_rows, **options)
            plans.append((f"row panels {heights}, bands of {band_rows}", plan))
    if device_type == "cpu":
        plans += stripes(problem, "gloo", tile)
    plans += hierarchies(problem, rows, grain, **options)
    if problem.op != Op.GEMM_ALLREDUCE:
        return plans
    tiles = rows * whole.tiles_n
    for sizes in [1, *_thirds(tiles, 1), min(tiles, 20)]:
        for band_rows in (grain, 3 * grain, rows):
            plan = templates.packed(problem, sizes, band_rows=band_rows, **options)
            plans.append((f"packed {sizes}, bands of {band_rows}", plan))
        if device_type == "cuda" and world == 2:
            plan = templates.packed(problem, sizes, collective="exchange", **options)
            plans.append((f"exchange {sizes}", plan))
    return plans


def stripes(
    problem: Problem, transport: str, tile: tuple[int, int] | None = None
) -> list[tuple[str, Plan]]:
    """(label, plan) of each way to cut a reduction's parts into chunks, if its collective can be stripes."""
    if problem.op not in (Op.GEMM_ALLREDUCE, Op.GEMM_REDUCESCATTER):
        return []
    options = {"transport": transport, "tile": tile, "collective": "stripes"}
    rows = templates.row_panels(problem, 1, **options).tiles_m // problem.world_size
    return [
        (f"stripes {cut}", templates.row_panels(problem, cut, **options))
        for cut in [1, *_thirds(rows, 1), min(rows, 20)]
    ]


def hierarchies(
    problem: Problem, rows: int, grain: int, **options: object
) -> list[tuple[str, Plan]]:
    """(label, plan) of each number of ranks that hosts may have, in one chunk and in unequal ones."""
    options["window"] = False
    hosts = [n for n in range(1, problem.world_size) if problem.world_size % n == 0]
    return [
        (f"hosts of {ranks}, {cut}", templates.hierarchical(problem, ranks, cut, **options))
        for ranks in hosts
        for cut in [1, *_thirds(rows, grain)]
    ]


def _all_to_all(problem: Problem, kernel: Kernel, transport: str, **resources: object) -> Plan:
    resources = dict(resources)
    max_ctas = resources.pop("max_ctas", 0)
    return templates.make_all_to_all(
        problem, kernel, Resources(**resources), max_ctas, Transport.__members__[transport.upper()]
    )


def chunked_plan(
    case: Case,
    world: int,
    device_type: str,
    layout: str,
    chunks: int,
    kernel: Kernel = Kernel.LIBRARY,
    tile: tuple[int, int] | None = None,
    op: str = "gemm_allreduce",
    **resources: object,
) -> Plan:
    """One plan, in this many chunks, or as many as the tile grid allows.

    `layout` is "row panels", "packed", "exchange" (packed, two GPUs; with other numbers of ranks it is "packed") or
    "peers" (row panels in the ranks' memory of each other); ops other than gemm_allreduce take the first and the last
    one only. A ring, of reductions over peers, has one chunk. gemm_alltoall travels by NCCL or gloo, or with "peers" over peers, in as many pieces as it does.
    """
    problem = OPS[op].problem(case, world)
    peers = layout == "peers"
    transport = "peer" if peers else "gloo" if device_type == "cpu" else "nccl"
    if problem.op == Op.GEMM_ALLTOALL:
        return _all_to_all(problem, kernel, transport, **resources)
    options = {"kernel": kernel, "tile": tile, "transport": transport, **resources}
    whole = templates.row_panels(problem, 1, **options)
    if peers and problem.op != Op.ALLGATHER_GEMM:
        return whole  # a ring has no chunks
    if layout in ("row panels", "peers"):
        rows = whole.tiles_m // (world if peers else problem.row_parts)
        return templates.row_panels(
            problem, max(1, min(chunks, rows // whole.cluster_m)), **options
        )
    if layout == "exchange" and world == 2:
        options["collective"] = "exchange"
    return templates.packed(problem, min(chunks, whole.tiles_m * whole.tiles_n), **options)
