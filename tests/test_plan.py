"""Properties that every plan has, against what a few lines of Python work out by brute force."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_torch import plan as plans
from overlap_torch.plan import (
    MAX_BAND_RUNS,
    MAX_CHUNKS,
    BandRun,
    Chunk,
    DType,
    Kernel,
    Layout,
    Plan,
    Problem,
    Resources,
    Schedule,
    Transport,
)

# A machine that runs other work beside the tests is slow, which is no failure.
settings.register_profile("plan", deadline=None)
settings.load_profile("plan")

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
def plans_and_grids(draw: st.DrawFn, layout: Layout | None = None) -> tuple[Plan, Grid]:
    """A valid overlapped plan with any kernel, and its grid."""
    plan = Plan()
    plan.schedule = Schedule.OVERLAPPED
    plan.kernel = draw(st.sampled_from([Kernel.LIBRARY, *SHAPES]))
    plan.layout = layout or draw(st.sampled_from([Layout.ROW_MAJOR, Layout.PACKED]))
    if plan.kernel == Kernel.LIBRARY:
        tile_m, tile_n = draw(st.integers(1, 40)), draw(st.integers(1, 40))
        cluster = draw(st.integers(1, 3))
        dtype = draw(st.sampled_from([DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64]))
        transport = draw(st.sampled_from([Transport.NCCL, Transport.GLOO]))
    else:
        tile_m, tile_n, cluster = SHAPES[plan.kernel]
        dtype = draw(st.sampled_from([DType.BFLOAT16, DType.FLOAT16]))
        transport = Transport.NCCL
    m = draw(st.integers(1, 17 * tile_m))
    n = draw(st.integers(1, 9 * tile_n))
    plan.problem = Problem(m, n, draw(st.integers(1, 10**6)), dtype, draw(st.integers(1, 64)))
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
    )
    grid = Grid(m, n, tile_m, tile_n, clusters * cluster, columns, bands, chunks)
    return plan, grid


@given(plans_and_grids())
def test_plan_takes_every_tile_once_in_band_order(case: tuple[Plan, Grid]) -> None:
    plan, grid = case
    plan.validate()
    assert (plan.tiles_m, plan.tiles_n) == (grid.rows, grid.columns)
    taken = [plan.tile_coord(i) for i in range(grid.rows * grid.columns)]
    assert taken == grid.tiles()
    assert sorted(taken) == [(r, c) for r in range(grid.rows) for c in range(grid.columns)]


@given(plans_and_grids())
def test_plan_tile_index_inverts_tile_coord(case: tuple[Plan, Grid]) -> None:
    plan, grid = case
    for index, (row, column) in enumerate(grid.tiles()):
        assert plan.tile_index(row, column) == index


@given(plans_and_grids())
def test_plan_tile_chunk_follows_chunk_sizes(case: tuple[Plan, Grid]) -> None:
    plan, grid = case
    expected = grid.chunk_of_tiles()
    assert [plan.tile_chunk(i) for i in range(len(expected))] == expected


@given(plans_and_grids())
def test_plan_cluster_partners_are_adjacent_rows_of_one_column(case: tuple[Plan, Grid]) -> None:
    plan, grid = case
    for first in range(0, grid.rows * grid.columns, plan.cluster_m):
        row, column = plan.tile_coord(first)
        assert row % plan.cluster_m == 0
        for i in range(plan.cluster_m):
            assert plan.tile_coord(first + i) == (row + i, column)


@given(plans_and_grids())
def test_plan_chunks_are_contiguous_and_cover_the_buffer(case: tuple[Plan, Grid]) -> None:
    plan, grid = case
    end = 0
    for chunk in range(len(grid.chunks)):
        offset, count = plan.chunk_extent(chunk)
        assert offset == end
        assert count > 0
        end = offset + count
    assert end == plan.buffer_elements()


@given(plans_and_grids(Layout.ROW_MAJOR))
def test_plan_row_major_chunks_hold_their_tiles_rows(case: tuple[Plan, Grid]) -> None:
    plan, grid = case
    assert plan.buffer_elements() == grid.m * grid.n
    rows_of: list[set[int]] = [set() for _ in grid.chunks]
    for (row, _), chunk in zip(grid.tiles(), grid.chunk_of_tiles(), strict=True):
        rows_of[chunk].update(range(row * grid.tile_m, min((row + 1) * grid.tile_m, grid.m)))
    assert sorted(row for rows in rows_of for row in rows) == list(range(grid.m))
    for chunk, rows in enumerate(rows_of):
        assert plan.chunk_rows(chunk) == (min(rows), max(rows) + 1)
        assert plan.chunk_extent(chunk) == (min(rows) * grid.n, len(rows) * grid.n)


@given(plans_and_grids(Layout.PACKED))
def test_plan_packed_tiles_are_disjoint_and_inside_their_chunk(case: tuple[Plan, Grid]) -> None:
    plan, grid = case
    size = grid.tile_m * grid.tile_n
    chunk_of = grid.chunk_of_tiles()
    assert plan.buffer_elements() == size * len(chunk_of)
    for index, chunk in enumerate(chunk_of):
        offset = plan.packed_offset(index)
        begin, count = plan.chunk_extent(chunk)
        assert offset == index * size
        assert begin <= offset
        assert offset + size <= begin + count


@given(plans_and_grids())
def test_plan_survives_encode_json_pickle_and_copy(case: tuple[Plan, Grid]) -> None:
    plan, _ = case
    code = plans.encode(plan)
    assert all(isinstance(number, int) for number in code)
    assert plans.decode(code) == plan
    assert plans.encode(plans.decode(code)) == code
    assert plans.from_json(plans.to_json(plan)) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan
    copy = plan.copy()
    copy.resources.comm_sms += 1
    assert copy != plan
    assert repr(copy) != repr(plan)


@given(plans_and_grids(), st.data())
def test_plan_decode_rejects_lists_that_encode_does_not_make(
    case: tuple[Plan, Grid], data: st.DataObject
) -> None:
    code = plans.encode(case[0])
    with pytest.raises(ValueError, match="encoded plan"):
        plans.decode(code[: data.draw(st.integers(0, len(code) - 1))])
    with pytest.raises(ValueError, match="encoded plan has .* numbers, expected"):
        plans.decode([*code, 0])
    with pytest.raises(ValueError, match=r"version = 99 .* allowed are 1 to 1"):
        plans.decode([99, *code[1:]])


@pytest.mark.parametrize(
    ("position", "field"),
    [(1, "op"), (5, "dtype"), (7, "schedule"), (8, "kernel"), (12, "layout"), (15, "window")],
)
@pytest.mark.parametrize("value", [-1, 99])
def test_plan_decode_names_the_field_out_of_range(position: int, field: str, value: int) -> None:
    code = plans.encode(example())
    code[position] = value
    with pytest.raises(ValueError, match=f"{field} = {value} at position {position}"):
        plans.decode(code)


@pytest.mark.parametrize("length_at", [19, 22])
def test_plan_decode_rejects_lengths_beyond_the_list(length_at: int) -> None:
    code = plans.encode(example())
    assert len(code) == 29  # 19 fields, 1 band run of 2 numbers, 2 chunks of 3
    code[length_at] = 2**62
    with pytest.raises(ValueError, match="number of"):
        plans.decode(code)


def example() -> Plan:
    """8 x 4 tiles of 128 x 128 in bands of 2, two chunks of 16."""
    problem = Problem(1024, 512, 64, DType.BFLOAT16, 2)
    return plans.row_panels(problem, 2, kernel="sm90_pingpong", band_rows=2, comm_sms=8, max_ctas=8)


def with_chunks(*tiles: int, layout: Layout = Layout.ROW_MAJOR) -> dict[str, object]:
    return {"chunks": [Chunk(t) for t in tiles], "layout": layout}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (with_chunks(16, 24), "chunks have 40 tiles .* 8 x 4 = 32: .*covers a tile twice"),
        (with_chunks(16, 8), "chunks have 24 tiles .* 8 x 4 = 32: .*leaves tiles out"),
        (with_chunks(33, -1), "chunk 1 has -1 tiles, allowed is 1 or more"),
        (with_chunks(), "plan has 0 chunks, allowed are 1 to 64"),
        (with_chunks(*[1] * 65, layout=Layout.PACKED), "65 chunks, allowed are 1 to 64"),
        (with_chunks(12, 20), "chunk 0 ends 4 tiles into a band of 2 x 4 = 8 .* or take .* packed"),
        ({"bands": [BandRun(2, 5)]}, "10 tile rows high, .* 8 x 4 .*cover a tile twice"),
        ({"bands": [BandRun(2, 3)]}, "6 tile rows high, .* 8 x 4 .*leaves tiles out"),
        ({"bands": [BandRun(3, 1), BandRun(5, 1)]}, "bands of 3 .* cluster_m = 2"),
        ({"bands": [BandRun(0, 1), BandRun(2, 4)]}, "bands of 0 .* positive multiples"),
        ({"bands": [BandRun(-2, 1), BandRun(2, 5)]}, "bands of -2 .* positive multiples"),
        ({"bands": [BandRun(2, -1), BandRun(2, 5)]}, "has -1 bands, allowed is 1 or more"),
        ({"bands": [BandRun(2, 1)] * 17}, "17 band runs, allowed are 16"),
        ({"bands": [BandRun(2**31 - 2, 2**31 - 1)]}, "cover a tile twice"),
        ({"tile_m": 64}, "sm90_pingpong was given tiles of 64x128 .* computes 128x128"),
        ({"cluster_m": 1}, "in clusters of 1, but it computes 128x128 in clusters of 2"),
        ({"kernel": Kernel.SM90_COOPERATIVE}, "it computes 128x256"),
        ({"tile_n": 0}, "tile_n = 0, allowed are 1 to"),
        ({"problem": Problem(1024, 512, 64, DType.FLOAT32, 2)}, "given float32, .*'library'"),
        ({"problem": Problem(-1, 512, 64)}, "m = -1, allowed are 0 to"),
        ({"problem": Problem(1024, 512, 64, world_size=0)}, "world_size = 0, allowed are 1 to"),
        ({"problem": Problem(1024, 512, 0, world_size=2)}, "empty problem .* take .* sequential"),
        ({"problem": Problem(2**40, 2**40, 64)}, "allowed are 2147483647 in all"),
        ({"chunks": [Chunk(32, Transport.GLOO)]}, "travel by gloo, which moves host memory"),
        ({"chunks": [Chunk(16), Chunk(16, Transport.GLOO)]}, "chunk 1 travels by gloo, chunk 0"),
        ({"chunks": [Chunk(32, max_ctas=65)]}, "max_ctas = 65, allowed are 0 to 64"),
        ({"resources": Resources(comm_sms=-1)}, "comm_sms = -1, allowed are 0 to"),
        ({"resources": Resources(smem_pad_bytes=2**20)}, "smem_pad_bytes = 1048576, allowed"),
        ({"schedule": Schedule.SEQUENTIAL}, "sequential plan has 2 chunks, allowed is one"),
        (
            {"schedule": Schedule.SEQUENTIAL, **with_chunks(32, layout=Layout.PACKED)},
            "sequential plan has the layout packed, allowed is row_major",
        ),
    ],
)
def test_plan_validate_names_what_is_wrong(changes: dict[str, object], message: str) -> None:
    plan = example()
    plan.validate()
    for field, value in changes.items():
        setattr(plan, field, value)
    with pytest.raises(ValueError, match=message):
        plan.validate()


@given(plans_and_grids(), st.data())
def test_plan_validate_rejects_moved_tiles(case: tuple[Plan, Grid], data: st.DataObject) -> None:
    plan, grid = case
    change = data.draw(st.integers(-3, 3).filter(bool))
    victim = data.draw(st.integers(0, len(grid.chunks) - 1))
    chunks = list(plan.chunks)
    tiles = chunks[victim].tiles + change
    chunks[victim] = Chunk(tiles, chunks[victim].transport)
    plan.chunks = chunks
    expected = "covers a tile twice" if change > 0 else "leaves tiles out"
    with pytest.raises(ValueError, match=expected if tiles > 0 else "allowed is 1 or more"):
        plan.validate()


def test_plan_window_needs_nccl() -> None:
    problem = Problem(8, 8, 8, DType.FLOAT32, 2)
    with pytest.raises(ValueError, match="window = true with the transport gloo"):
        plans.row_panels(problem, 1, transport="gloo", window=True)


def test_plan_of_an_invalid_shape_answers_nothing() -> None:
    plan = Plan()  # no tile shape: what would divide by zero raises
    for ask in (
        lambda: plan.tiles_m,
        lambda: plan.tile_coord(0),
        lambda: plan.chunk_extent(0),
        plan.buffer_elements,
    ):
        with pytest.raises(ValueError, match="tile_m = 0"):
            ask()


def test_plan_index_out_of_range_raises() -> None:
    plan = example()
    for ask in (
        lambda: plan.tile_coord(32),
        lambda: plan.tile_index(8, 0),
        lambda: plan.tile_chunk(-1),
        lambda: plan.chunk_rows(2),
    ):
        with pytest.raises(IndexError, match="out of range"):
            ask()


def test_plan_parts_are_frozen() -> None:
    plan = example()
    with pytest.raises(AttributeError):
        plan.chunks.append(Chunk(1))
    with pytest.raises(AttributeError):
        plan.chunks[0].tiles = 3
    with pytest.raises(AttributeError):
        plan.bands[0].count = 3


@pytest.mark.parametrize(("m", "n"), [(0, 5), (5, 0), (0, 0)])
def test_plan_of_an_empty_output_is_one_empty_chunk(m: int, n: int) -> None:
    machine = plans.Machine(arch=90, sm_count=132, sm_gflops=5000, link_gbps=300)
    plan = plans.make_plan(Problem(m, n, 64, DType.BFLOAT16, 2), machine)
    assert plan.schedule == Schedule.SEQUENTIAL
    assert [chunk.tiles for chunk in plan.chunks] == [0]
    assert plan.chunk_extent(0) == (0, 0)
    assert plan.chunk_rows(0) == (0, m)
    assert plan.buffer_elements() == 0
    assert plans.from_json(plans.to_json(plan)) == plan


@settings(max_examples=50)
@given(st.integers(1, 5000), st.integers(1, 3000), st.integers(1, 8), st.sampled_from([*SHAPES]))
def test_plan_row_panels_splits_evenly(m: int, n: int, parts: int, kernel: Kernel) -> None:
    tile_m, tile_n, cluster = SHAPES[kernel]
    clusters = -(-m // (tile_m * cluster))
    problem = Problem(m, n, 64, DType.BFLOAT16, 2)
    if parts > clusters:
        with pytest.raises(ValueError, match=f"{parts} chunks of {clusters * cluster} tile rows"):
            plans.row_panels(problem, parts, kernel=kernel)
        return
    plan = plans.row_panels(problem, parts, kernel=kernel)
    columns = -(-n // tile_n)
    heights = [chunk.tiles // (cluster * columns) for chunk in plan.chunks]
    assert len(heights) == parts
    assert sum(heights) == clusters
    assert max(heights) - min(heights) <= 1


def test_plan_row_panels_of_many_heights_takes_equal_bands() -> None:
    heights = [4, 6] * 20  # in bands of at most 4: 4, 4 2, 4, 4 2 ..., more runs than a plan holds
    problem = Problem(200 * 128, 512, 64, DType.BFLOAT16, 2)
    plan = plans.row_panels(problem, heights, kernel="sm90_pingpong", band_rows=4)
    assert plan.bands == (BandRun(2, 100),)
    assert [chunk.tiles for chunk in plan.chunks] == [4 * height for height in heights]
    with pytest.raises(ValueError, match="6 tile rows high, .*leaves tiles out"):
        plans.row_panels(problem, [2, 4], kernel="sm90_pingpong", band_rows=4)


def test_plan_packed_template_takes_sizes_and_tile() -> None:
    problem = Problem(10, 7, 3, DType.FLOAT32, 2)
    plan = plans.packed(problem, [1, 4, 7], transport="gloo", tile=(3, 3), band_rows=2)
    assert (plan.tile_m, plan.tile_n, plan.cluster_m) == (3, 3, 1)
    assert [chunk.tiles for chunk in plan.chunks] == [1, 4, 7]
    assert plan.chunk_extent(1) == (9, 36)
    with pytest.raises(ValueError, match="covers a tile twice"):
        plans.packed(problem, [1, 4, 8], transport="gloo", tile=(3, 3))


def test_plan_json_is_readable_and_checked() -> None:
    data = json.loads(plans.to_json(example()))
    assert data["version"] == 1
    assert data["kernel"] == "sm90_pingpong"
    assert data["problem"]["dtype"] == "bfloat16"
    assert data["chunks"][0] == {"tiles": 16, "transport": "nccl", "max_ctas": 8}
    for change, message in [
        ({"version": 2}, "version 2, this release reads 1"),
        ({"kernel": "sm70"}, "Kernel is 'sm70', allowed are library, sm80"),
        ({"tile_m": 128.5}, "wrong type or range"),
        ({"tile_m": 2**40}, "wrong type or range"),
        ({"chunks": None}, "chunks are None, expected a list"),
        ({"bands": [[2, 4]]}, "band run is .* expected a dict"),
        ({"extra": 1}, r"unknown fields \['extra'\]"),
        ({"tile_m": 64}, "given tiles of 64x128"),
    ]:
        with pytest.raises(ValueError, match=message):
            plans.from_dict({**data, **change})
    del data["layout"]
    with pytest.raises(ValueError, match=r"lacks the fields \['layout'\]"):
        plans.from_dict(data)


def test_plan_saves_and_loads(tmp_path) -> None:
    plans.save(example(), tmp_path / "plan.json")
    assert plans.load(tmp_path / "plan.json") == example()
