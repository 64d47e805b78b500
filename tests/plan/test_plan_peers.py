"""Plans whose chunks travel through memory that the ranks map into each other: their form, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from overlap_torch import plan as plans
from overlap_torch.plan import Plan, Problem
from overlap_torch.plan.types import (
    Collective,
    DType,
    Op,
)
from plan_grids import Grid, parted_plans_and_grids

settings.register_profile("plan", deadline=None)
settings.load_profile("plan")

COLLECTIVES = {
    Op.GEMM_ALLREDUCE: (Collective.RING, Collective.STRIPES),
    Op.GEMM_REDUCESCATTER: (Collective.RING, Collective.STRIPES),
    Op.ALLGATHER_GEMM: (Collective.ALL_GATHER,),
}


# --- form -------------------------------------------------------------------------------------------


@given(parted_plans_and_grids(peers=True))
def test_plan_over_peers_takes_every_tile_once_in_whole_rows_of_parts(
    case: tuple[Plan, Grid],
) -> None:
    plan, grid = case
    plan.validate()
    assert plan.collective in COLLECTIVES[plan.problem.op]
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
