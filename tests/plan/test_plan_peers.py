"""Plans whose chunks travel through memory that the ranks map into each other: their form, and what is refused."""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_torch import plan as plans
from overlap_torch.plan import Plan, Problem
from overlap_torch.plan.types import (
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
from plan_grids import SHAPES, Grid, parted_plans_and_grids

settings.register_profile("plan", deadline=None)
settings.load_profile("plan")

COLLECTIVES = {
    Op.GEMM_ALLREDUCE: Collective.RING,
    Op.GEMM_REDUCESCATTER: Collective.RING,
    Op.ALLGATHER_GEMM: Collective.ALL_GATHER,
}
every_op = pytest.mark.parametrize("op", [*COLLECTIVES], ids=lambda op: op.name.lower())


def peer_plan(op: Op = Op.GEMM_ALLREDUCE) -> Plan:
    """2 parts of 4 x 4 tiles of 128 x 128: a ring, or two chunks of 2 tile rows of each part."""
    problem = Problem(1024, 512, 64, DType.BFLOAT16, 2, op)
    return plans.templates.row_panels(
        problem, chunks_of(op), kernel="sm90_pingpong", transport="peer"
    )


def chunks_of(op: Op, most: int = 2) -> int:
    return most if op == Op.ALLGATHER_GEMM else 1


# --- form -------------------------------------------------------------------------------------------


@given(parted_plans_and_grids(peers=True))
def test_plan_over_peers_takes_every_tile_once_in_whole_rows_of_parts(
    case: tuple[Plan, Grid],
) -> None:
    plan, grid = case
    plan.validate()
    assert plan.collective == COLLECTIVES[plan.problem.op]
    tiles = [plan.tile_coord(i) for i in range(grid.rows * grid.columns)]
    assert tiles == grid.tiles()
    places = [plan.part_row(row) for row in range(grid.rows)]
    assert places == grid.part_rows()
    # One part is computed at a time, so no cluster may have tiles of two.
    for row in range(0, grid.rows, plan.cluster_m):
        assert len({places[row + i][0] for i in range(plan.cluster_m)}) == 1
    part_rows = -(-grid.m // grid.parts)
    covered: list[int] = []
    rows_of: list[list[set[int]]] = [[set() for _ in range(grid.parts)] for _ in grid.chunks]
    for (row, _), chunk in zip(tiles, grid.chunk_of_tiles(), strict=True):
        part, top = places[row]
        rows = range(top * grid.tile_m, min((top + 1) * grid.tile_m, part_rows))
        rows_of[chunk][part].update(rows)
    for chunk, of_parts in enumerate(rows_of):
        begin, end = plan.chunk_rows(chunk)
        assert all(rows == set(range(begin, end)) for rows in of_parts)
        covered += range(begin, end)
    assert covered == list(range(part_rows))


@every_op
def test_plan_over_peers_says_so_in_json_and_words(op: Op) -> None:
    plan = peer_plan(op)
    data = json.loads(plans.files.to_json(plan))
    assert data["collective"] == COLLECTIVES[op].name.lower()
    chunks = chunks_of(op)
    tiles = 32 // chunks
    assert data["chunks"] == [{"tiles": tiles, "transport": "peer", "max_ctas": 0}] * chunks
    said = f"{tiles} tiles (peer)" if chunks == 1 else f"{chunks} x {tiles} tiles (peer)"
    assert said in repr(plan)
    assert ("ring" in repr(plan)) == (op != Op.ALLGATHER_GEMM)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([*COLLECTIVES]),
    st.integers(1, 2500),
    st.integers(1, 3000),
    st.integers(2, 8),
    st.integers(1, 8),
    st.sampled_from([*SHAPES]),
)
def test_plan_row_panels_over_peers_splits_one_part_evenly(
    op, rows, n, world, chunks, kernel
) -> None:
    chunks = chunks_of(op, chunks)
    tile_m, tile_n, cluster = SHAPES[kernel]
    clusters = -(-rows // (tile_m * cluster))  # of one part
    problem = Problem(rows * world, n, 64, DType.BFLOAT16, world, op)
    options = {"kernel": kernel, "transport": "peer"}
    if chunks > clusters:
        expected = f"{chunks} chunks of {clusters * cluster} tile rows, allowed are 1 to {clusters}"
        with pytest.raises(ValueError, match=expected):
            plans.templates.row_panels(problem, chunks, **options)
        return
    plan = plans.templates.row_panels(problem, chunks, **options)
    plan.validate()
    assert (plan.collective, plan.layout) == (COLLECTIVES[op], Layout.ROW_MAJOR)
    assert {chunk.transport for chunk in plan.chunks} == {Transport.PEER}
    unit = world * cluster * -(-n // tile_n)
    heights = [chunk.tiles // unit for chunk in plan.chunks]
    assert [chunk.tiles for chunk in plan.chunks] == [unit * height for height in heights]
    assert (len(heights), sum(heights)) == (chunks, clusters)
    assert max(heights) - min(heights) <= 1


@every_op
def test_plan_row_panels_over_peers_wants_clusters_of_one_part(op: Op) -> None:
    problem = Problem(2048, 512, 64, DType.BFLOAT16, 2, op)
    if op != Op.ALLGATHER_GEMM:
        with pytest.raises(ValueError, match="collective ring has 2 chunks, allowed is one of all"):
            plans.templates.row_panels(problem, [4, 4], kernel="sm90_pingpong", transport="peer")
        return
    options = {"kernel": "sm90_pingpong", "transport": "peer"}  # clusters of two tile rows
    with pytest.raises(ValueError, match="chunk 0 has 8 tiles, allowed are multiples of 2 x 2 x 4"):
        plans.templates.row_panels(problem, [1, 3, 4], **options)
    plan = plans.templates.row_panels(problem, [2, 2, 4], **options)
    assert [chunk.tiles for chunk in plan.chunks] == [16, 16, 32]


# --- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["library", "sm90_pingpong", "sm90_pingpong_wide"])
@pytest.mark.parametrize("world", range(2, 9))
def test_plan_of_a_ring_takes_any_rows_of_which_each_rank_has_some(world: int, kernel: str) -> None:
    options = {"kernel": kernel, "transport": "peer"}
    some = [0, 0]
    for m in [*range(1, 8 * world), 4095, 4096, 4097, 5001, 8193]:
        problem = Problem(m, 512, 64, DType.BFLOAT16, world)
        # Equal parts, one after the other, as far as there are rows.
        part = -(-m // world)
        parts = [min(part, m - begin) for begin in range(0, m, part)]
        some[len(parts) == world] += 1
        if len(parts) < world:
            expected = (
                f"the collective ring cuts m = {m} into {world} parts of {part} rows, .*direct"
            )
            with pytest.raises(ValueError, match=expected):
                plans.templates.row_panels(problem, 1, **options)
            continue
        plan = plans.templates.row_panels(problem, 1, **options)
        plan.validate()
        assert plan.collective == Collective.RING
        assert plan.chunk_rows(0) == (0, part)
        cluster = 256 if kernel != "library" else 128
        assert plan.tiles_m == world * -(-part // cluster) * (cluster // 128)
        assert plans.files.decode(plans.files.encode(plan)) == plan
    assert min(some) >= (1 if world == 2 else 2)


@pytest.mark.parametrize(
    ("op", "world", "tile_rows", "tiles"),
    [
        (Op.GEMM_ALLREDUCE, 2, 258, 132096),  # the other rank's finished ones, too
        (Op.GEMM_REDUCESCATTER, 2, 514, 131584),
        (Op.GEMM_ALLREDUCE, 4, 86, 132096),
        (Op.GEMM_REDUCESCATTER, 8, 74, 132608),
    ],
    ids=str,
)
@pytest.mark.parametrize("kernel", ["library", "sm90_pingpong"])
def test_plan_of_a_ring_has_a_flag_for_each_tile_that_it_passes_on(
    op: Op, world: int, tile_rows: int, tiles: int, kernel: str
) -> None:
    def ring(tile_rows: int) -> Plan:
        # Tiles of 128 x 128: 256 columns, and as many rows in each part.
        problem = Problem(world * tile_rows * 128, 32768, 64, DType.BFLOAT16, world, op)
        return plans.templates.row_panels(problem, 1, kernel=kernel, transport="peer")

    expected = (
        f"plan with the collective ring passes on {tiles} tiles, allowed are 131072, as each has a "
        "flag: take the transport nccl"
    )
    with pytest.raises(ValueError, match=expected):
        ring(tile_rows)
    ring(tile_rows - 2).validate()  # whole clusters of two


# --- all-to-all -------------------------------------------------------------------------------------


def all_to_all(transport: Transport = Transport.PEER, **changes: object) -> Plan:
    fields = {"m": 0, "n": 512, "k": 64, "dtype": DType.BFLOAT16, "world_size": 2, **changes}
    problem = Problem(**fields, op=Op.GEMM_ALLTOALL)
    return plans.templates.make_all_to_all(problem, Kernel.LIBRARY, Resources(), 16, transport)


@pytest.mark.parametrize("world", range(2, 9))
@pytest.mark.parametrize(
    ("n", "dtype"), [(8, DType.FLOAT16), (520, DType.BFLOAT16), (4, DType.FLOAT32)], ids=str
)
def test_plan_of_an_all_to_all_travels_by_peer(n: int, dtype: DType, world: int) -> None:
    plan = all_to_all(n=n, k=5, dtype=dtype, world_size=world)
    plan.validate()
    assert (plan.schedule, plan.collective) == (Schedule.OVERLAPPED, Collective.ALL_TO_ALL)
    assert (plan.layout, plan.bands) == (Layout.ROW_MAJOR, ())
    assert plan.chunks == (Chunk(0, Transport.PEER, 16),)
    assert (plan.tiles_m, plan.buffer_elements()) == (0, 0)
    assert plan != all_to_all(Transport.NCCL, n=n, k=5, dtype=dtype, world_size=world)
    assert plans.files.decode(plans.files.encode(plan)) == plan
    assert plans.files.from_json(plans.files.to_json(plan)) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert "peer" in repr(plan)
