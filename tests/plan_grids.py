"""Plans for the tests of their properties, each with what a few lines of Python know of it."""

from __future__ import annotations

import dataclasses

from hypothesis import strategies as st

from overlap_torch import plan as plans
from overlap_torch.plan import (
    MAX_BAND_RUNS,
    MAX_CHUNKS,
    BandRun,
    Chunk,
    Collective,
    DType,
    Kernel,
    Layout,
    Plan,
    Problem,
    Resources,
    Schedule,
    Transport,
)

SHAPES = {  # the kernels' tiles, as their sources have them: tile_m, tile_n, cluster_m
    Kernel.SM80: (128, 128, 1),
    Kernel.SM90_PINGPONG: (128, 128, 2),
    Kernel.SM90_COOPERATIVE: (128, 256, 2),
}


@dataclasses.dataclass
class Grid:
    """What the tests know of a plan without asking it."""

    m: int
    n: int
    tile_m: int
    tile_n: int
    rows: int  # of tiles
    columns: int
    bands: list[int]  # heights in tile rows
    chunks: list[int]  # in tiles
    parts: int  # copies of each chunk in its region of the buffer

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


@st.composite
def plans_and_grids(
    draw: st.DrawFn, layout: Layout | None = None, collective: Collective | None = None
) -> tuple[Plan, Grid]:
    """A valid overlapped plan with any kernel, and its grid. An exchange is packed."""
    plan = Plan()
    plan.schedule = Schedule.OVERLAPPED
    plan.kernel = draw(st.sampled_from([Kernel.LIBRARY, *SHAPES]))
    if collective is None:
        collective = draw(st.sampled_from([Collective.ALL_REDUCE, Collective.EXCHANGE]))
    exchange = collective == Collective.EXCHANGE and layout != Layout.ROW_MAJOR
    if exchange:
        plan.collective, plan.layout = Collective.EXCHANGE, Layout.PACKED
    else:
        plan.layout = layout or draw(st.sampled_from([Layout.ROW_MAJOR, Layout.PACKED]))
    if plan.kernel == Kernel.LIBRARY:
        tile_m, tile_n = draw(st.integers(1, 40)), draw(st.integers(1, 40))
        cluster = draw(st.integers(1, 3))
        dtype = draw(st.sampled_from([DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64]))
        transport = draw(st.sampled_from([Transport.NCCL, Transport.GLOO][: 1 if exchange else 2]))
    else:
        tile_m, tile_n, cluster = SHAPES[plan.kernel]
        dtype = draw(st.sampled_from([DType.BFLOAT16, DType.FLOAT16]))
        transport = Transport.NCCL
    m = draw(st.integers(1, 17 * tile_m))
    n = draw(st.integers(1, 9 * tile_n))
    world = 2 if exchange else draw(st.integers(1, 64))
    plan.problem = Problem(m, n, draw(st.integers(1, 10**6)), dtype, world)
    plan.tile_m, plan.tile_n, plan.cluster_m = tile_m, tile_n, cluster

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
    plan.bands = runs(bands)
    plan.chunks = [Chunk(tiles, transport, draw(st.integers(0, 32))) for tiles in chunks]
    plan.resources = Resources(
        draw(st.integers(0, 64)),
        draw(st.integers(0, 4096)),
        draw(st.booleans()) and transport == Transport.NCCL,
        draw(st.integers(0, 4096)),
        draw(st.integers(1, 4)),
    )
    parts = 2 if exchange else 1
    grid = Grid(m, n, tile_m, tile_n, clusters * cluster, columns, bands, chunks, parts)
    return plan, grid


def example() -> Plan:
    """8 x 4 tiles of 128 x 128 in bands of 2, two chunks of 16."""
    problem = Problem(1024, 512, 64, DType.BFLOAT16, 2)
    return plans.row_panels(problem, 2, kernel="sm90_pingpong", band_rows=2, comm_sms=8, max_ctas=8)
