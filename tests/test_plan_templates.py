"""Plans from the templates, and as JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_torch import plan as plans
from overlap_torch.plan import BandRun, Collective, DType, Kernel, Problem
from plan_grids import SHAPES, example


@settings(max_examples=50, deadline=None)
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


def test_plan_packed_template_exchanges_between_two_ranks_only() -> None:
    problem = Problem(256, 256, 64, DType.BFLOAT16, 2)
    plan = plans.packed(problem, [1, 3], collective="exchange", lanes=2, finish_ctas=7)
    assert plan.collective == Collective.EXCHANGE
    assert (plan.resources.lanes, plan.resources.finish_ctas) == (2, 7)
    assert plan.chunk_extent(1) == (2 * 128 * 128, 3 * 128 * 128)
    problem.world_size = 3
    with pytest.raises(ValueError, match="world_size = 3, allowed is 2"):
        plans.packed(problem, [1, 3], collective="exchange")
    problem.world_size = 2
    with pytest.raises(ValueError, match="the transport gloo"):
        plans.packed(problem, 1, collective="exchange", transport="gloo")


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
