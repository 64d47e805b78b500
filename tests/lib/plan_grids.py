"""Plans for the tests of their properties, each with what a few lines of Python know of it."""

import dataclasses
import math

from hypothesis import strategies as st

from overlap_torch import plan as plans
from overlap_torch.plan import Plan, Problem
from overlap_torch.plan.types import (
    MAX_BAND_RUNS,
    MAX_CHUNKS,
    BandRun,
    Chunk,
    Collective,
    DType,
    Kernel,
    Layout,
    Op,
    Resources,
    Schedule,
    Transport,
)

SHAPES = {  # the kernels' tiles, as their sources have them: tile_m, tile_n, cluster_m
    Kernel.SM80: (128, 128, 1),
    Kernel.SM90_PINGPONG: (128, 128, 2),
    Kernel.SM90_COOPERATIVE: (128, 256, 2),
    Kernel.SM90_PINGPONG_WIDE: (128, 192, 2),
}


@dataclasses.dataclass
class Grid:
    """The tests' knowledge of a plan without asking it."""

    m: int
    n: int
    tile_m: int
    tile_n: int
    rows: int  # of tiles
    columns: int
    bands: list[int]  # heights in tile rows
    chunks: list[int]  # in tiles
    parts: int  # pieces of each chunk in its region of the buffer: copies, or the ranks' parts

    def tiles(self) -> list[tuple[int, int]]:
        """Tiles in tile order: band after band, column after column, top to bottom."""
        order = []
        top = 0
        for height in self.bands:
            for column in range(self.columns):
                for row in range(top, top + height):
                    order.append((row, column))
            top += height
        return order

    def chunk_of_tiles(self) -> list[int]:
        return [chunk for chunk, tiles in enumerate(self.chunks) for _ in range(tiles)]

    def part_rows(self) -> list[tuple[int, int]]:
        """(part, tile row in it) of each tile row, where the rows are parts: a chunk has as many of each part."""
        places = []
        top = 0
        for tiles in self.chunks:
            height = tiles // (self.columns * self.parts)
            places += [(p, top + row) for p in range(self.parts) for row in range(height)]
            top += height
        return places


def cut(draw: st.DrawFn, total: int, most: int) -> list[int]:
    """`total` as a sum of up to `most` positive numbers."""
    limit = min(most, total) - 1
    if limit <= 0:
        return [total]
    inner = draw(st.sets(st.integers(1, total - 1), max_size=limit))
    edges = [0, *sorted(inner), total]
    return [b - a for a, b in zip(edges, edges[1:], strict=False)]


def runs(heights: list[int]) -> list[BandRun]:
    result: list[tuple[int, int]] = []
    for height in heights:
        if result and result[-1][0] == height:
            result[-1] = (height, result[-1][1] + 1)
        else:
            result.append((height, 1))
    return [BandRun(height, count) for height, count in result]


def draw_kernel(
    draw: st.DrawFn, plan: Plan, transports: list[Transport]
) -> tuple[DType, Transport]:
    """Gives the plan a kernel and its tiles; returns a dtype and a transport that go with it."""
    plan.kernel = draw(st.sampled_from([Kernel.LIBRARY, *SHAPES]))
    if plan.kernel == Kernel.LIBRARY:
        plan.tile_m, plan.tile_n = draw(st.integers(1, 40)), draw(st.integers(1, 40))
        plan.cluster_m = draw(st.integers(1, 3))
        dtype = draw(st.sampled_from([DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64]))
        return dtype, draw(st.sampled_from(transports))
    plan.tile_m, plan.tile_n, plan.cluster_m = SHAPES[plan.kernel]
    return draw(st.sampled_from([DType.BFLOAT16, DType.FLOAT16])), Transport.NCCL


def set_chunks(
    draw: st.DrawFn, plan: Plan, bands: list[int], chunks: list[int], transport: Transport
) -> None:
    plan.bands = runs(bands)
    plan.chunks = [Chunk(tiles, transport, draw(st.integers(0, 32))) for tiles in chunks]
    plan.resources = Resources(
        draw(st.integers(0, 64)),
        draw(st.integers(0, 4096)),
        draw(st.booleans()) and transport == Transport.NCCL,
        draw(st.integers(0, 4096)),
        1 if transport == Transport.PEER else draw(st.integers(1, 4)),
    )


@st.composite
def plans_and_grids(
    draw: st.DrawFn, layout: Layout | None = None, collective: Collective | None = None
) -> tuple[Plan, Grid]:
    """A valid overlapped plan of gemm_allreduce with any kernel, and its grid. An exchange is packed."""
    plan = Plan()
    plan.schedule = Schedule.OVERLAPPED
    if collective is None:
        collective = draw(st.sampled_from([Collective.ALL_REDUCE, Collective.EXCHANGE]))
    exchange = collective == Collective.EXCHANGE and layout != Layout.ROW_MAJOR
    if exchange:
        plan.collective, plan.layout = Collective.EXCHANGE, Layout.PACKED
    else:
        plan.layout = layout or draw(st.sampled_from([Layout.ROW_MAJOR, Layout.PACKED]))
    transports = [Transport.NCCL] if exchange else [Transport.NCCL, Transport.GLOO]
    dtype, transport = draw_kernel(draw, plan, transports)
    tile_m, tile_n, cluster = plan.tile_m, plan.tile_n, plan.cluster_m
    m = draw(st.integers(1, 17 * tile_m))
    n = draw(st.integers(1, 9 * tile_n))
    world = 2 if exchange else draw(st.integers(1, 64))
    plan.problem = Problem(m, n, draw(st.integers(1, 10**6)), dtype, world)

    clusters = -(-m // (tile_m * cluster))
    columns = -(-n // tile_n)
    bands = [cluster * height for height in cut(draw, clusters, MAX_BAND_RUNS)]
    if plan.layout == Layout.ROW_MAJOR:
        groups = iter(bands)
        chunks = [
            sum(next(groups) for _ in range(count)) * columns
            for count in cut(draw, len(bands), MAX_CHUNKS)
        ]
    else:
        chunks = cut(draw, clusters * cluster * columns, MAX_CHUNKS)
    set_chunks(draw, plan, bands, chunks, transport)
    parts = 2 if exchange else 1
    grid = Grid(m, n, tile_m, tile_n, clusters * cluster, columns, bands, chunks, parts)
    return plan, grid


PARTED = {  # ops whose rows are parts of the ranks
    Op.GEMM_REDUCESCATTER: Collective.REDUCE_SCATTER,
    Op.ALLGATHER_GEMM: Collective.ALL_GATHER,
}


@st.composite
def parted_plans_and_grids(
    draw: st.DrawFn, op: Op | None = None, peers: bool = False
) -> tuple[Plan, Grid]:
    """The same of an op whose rows are parts, one for each of 1 to 5 ranks; over peers any op's but all-to-all's are."""
    plan = Plan()
    plan.schedule = Schedule.OVERLAPPED
    op = op or draw(st.sampled_from([*PARTED, Op.GEMM_ALLREDUCE] if peers else [*PARTED]))
    reduces = peers and op != Op.ALLGATHER_GEMM
    plan.collective = Collective.RING if reduces else PARTED[op]
    dtype, transport = draw_kernel(draw, plan, [Transport.NCCL, Transport.GLOO])
    world = draw(st.integers(2 if peers else 1, 5))
    rows = draw(st.integers(1, 9 * plan.tile_m))  # of a part
    n = draw(st.integers(1, 5 * plan.tile_n))
    m = world * rows
    if reduces and plan.kernel == Kernel.LIBRARY:
        plan.collective = draw(st.sampled_from([Collective.RING, Collective.STRIPES]))
    if reduces and op == Op.GEMM_ALLREDUCE:  # whose last part may be shorter
        m -= draw(st.integers(0, min(world, rows) - 1))
    plan.problem = Problem(m, n, draw(st.integers(1, 10**6)), dtype, world, op)

    # Tile rows of a part come in grains, so that a chunk has whole clusters; those of an all-gather, and of a ring, lie
    # in one part.
    cluster = plan.cluster_m
    one_part = peers or op == Op.ALLGATHER_GEMM
    grain = cluster if one_part else math.lcm(cluster, world) // world
    columns = -(-n // plan.tile_n)
    chunks, bands = [], []
    for grains in cut(draw, -(-rows // (plan.tile_m * grain)), MAX_BAND_RUNS // 2):
        height = world * grain * grains
        chunks.append(height * columns)
        bands += [cluster * band for band in cut(draw, height // cluster, 2)]
    if plan.collective == Collective.RING:  # what travels is single tiles
        chunks = [sum(chunks)]
    set_chunks(draw, plan, bands, chunks, Transport.PEER if peers else transport)
    grid = Grid(
        plan.problem.m, n, plan.tile_m, plan.tile_n, sum(bands), columns, bands, chunks, world
    )
    return plan, grid


def any_plans_and_grids() -> st.SearchStrategy[tuple[Plan, Grid]]:
    """Plans of every op that cuts one rank's output or input into chunks."""
    return plans_and_grids() | parted_plans_and_grids()


def example() -> Plan:
    """8 x 4 tiles of 128 x 128 in bands of 2, two chunks of 16."""
    problem = Problem(1024, 512, 64, DType.BFLOAT16, 2)
    return plans.templates.row_panels(
        problem, 2, kernel="sm90_pingpong", band_rows=2, comm_sms=8, max_ctas=8
    )
