"""Plans from the templates, and as JSON."""

import json
import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_torch import plan as plans
from overlap_torch.plan import Plan, Problem
from overlap_torch.plan.templates import make_all_to_all, packed, row_panels
from overlap_torch.plan.types import (
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
from plan_grids import PARTED, SHAPES, example
from tests._plan_test import chunk_extent, chunk_rows
from tests.steps_proof import PEERS, Case


@settings(max_examples=200)
@given(
    st.sampled_from([Op.GEMM_ALLREDUCE, *PARTED]),
    st.sampled_from(["nccl", "peer"]),
    st.integers(1, 2500),
    st.integers(1, 3000),
    st.integers(2, 8),
    st.integers(1, 8),
    st.sampled_from([*SHAPES]),
)
def test_plan_row_panels_splits_every_part_evenly(
    op, transport, rows, n, world, chunks, kernel
) -> None:
    peers = transport == "peer"
    tile_m, tile_n, cluster = SHAPES[kernel]
    collective = PARTED.get(op, Collective.ALL_REDUCE)
    if peers and op != Op.ALLGATHER_GEMM:
        chunks, collective = 1, Collective.RING
    parts = world if peers or op in PARTED else 1
    # A chunk's tile rows of all parts are whole clusters; over peers and in an all-gather those of each part.
    each = peers or op == Op.ALLGATHER_GEMM
    grain = cluster if each else cluster // math.gcd(cluster, parts)
    grains = -(-rows // (tile_m * grain))
    problem = Problem(rows * parts, n, 64, DType.BFLOAT16, world, op)
    options = {"kernel": kernel, "transport": transport}
    if chunks > grains:
        expected = f"{chunks} chunks of {grains * grain} tile rows, allowed are 1 to {grains}"
        with pytest.raises(ValueError, match=expected):
            row_panels(problem, chunks, **options)
        return
    plan = row_panels(problem, chunks, **options)
    plan.validate()
    assert (plan.collective, plan.layout) == (collective, Layout.ROW_MAJOR)
    assert {chunk.transport.name.lower() for chunk in plan.chunks} == {transport}
    unit = parts * grain * -(-n // tile_n)
    heights = [chunk.tiles // unit for chunk in plan.chunks]
    assert [chunk.tiles for chunk in plan.chunks] == [unit * height for height in heights]
    assert (len(heights), sum(heights)) == (chunks, grains)
    assert max(heights) - min(heights) <= 1
    assert plans.files.from_json(plans.files.to_json(plan)) == plan


@pytest.mark.parametrize(
    ("op", "transport"),
    [*((op, Transport.GLOO) for op in PARTED), (Op.ALLGATHER_GEMM, Transport.PEER)],
)
def test_plan_row_panels_takes_heights_of_one_part(op: Op, transport: Transport) -> None:
    problem = Problem(3 * 60, 20, 5, DType.FLOAT32, 3, op)  # parts of 8 tile rows, the last of 4
    lanes = 2 if transport == Transport.GLOO else 1
    options = {"transport": transport, "tile": (8, 10), "lanes": lanes}
    plan = row_panels(problem, [1, 4, 3], **options)
    assert plan.schedule == Schedule.OVERLAPPED
    assert (plan.tiles_m, plan.tiles_n, plan.resources.lanes) == (24, 2, lanes)
    assert plan.chunks == tuple(Chunk(tiles, transport) for tiles in (6, 24, 18))
    assert [chunk_rows(plan, chunk) for chunk in range(3)] == [(0, 8), (8, 40), (40, 60)]
    for heights, message in [
        ([1, 4, 4], "covers a tile twice|cover a tile twice"),
        ([1, 4], "leaves tiles out"),
        ([9], "9 tile rows high, allowed are 1 to 8, the height of one rank's part of the"),
        ([0, 8], "0 tile rows high, allowed are 1 to 8"),
    ]:
        with pytest.raises(ValueError, match=message):
            row_panels(problem, heights, **options)


def test_plan_row_panels_of_a_gather_wants_clusters_of_one_part() -> None:
    options = {"kernel": "sm90_pingpong"}  # clusters of two tile rows
    scatter = Problem(2048, 512, 64, DType.BFLOAT16, 2, Op.GEMM_REDUCESCATTER)
    plan = row_panels(scatter, [1, 3, 4], **options)  # two ranks' make the clusters
    assert [chunk.tiles for chunk in plan.chunks] == [8, 24, 32]
    gather = Problem(2048, 512, 64, DType.BFLOAT16, 2, Op.ALLGATHER_GEMM)
    with pytest.raises(ValueError, match="chunk 0 has 8 tiles, allowed are multiples of 2 x 2 x 4"):
        row_panels(gather, [1, 3, 4], **options)
    assert len(row_panels(gather, [2, 2, 4], **options).chunks) == 3


def test_plan_row_panels_of_many_heights_takes_equal_bands() -> None:
    heights = [4, 6] * 20  # in bands of at most 4: 4, 4 2, 4, 4 2 ..., more runs than a plan holds
    problem = Problem(200 * 128, 512, 64, DType.BFLOAT16, 2)
    plan = row_panels(problem, heights, kernel="sm90_pingpong", band_rows=4)
    assert plan.bands == (BandRun(2, 100),)
    assert [chunk.tiles for chunk in plan.chunks] == [4 * height for height in heights]
    with pytest.raises(ValueError, match="6 tile rows high, .*leaves tiles out"):
        row_panels(problem, [2, 4], kernel="sm90_pingpong", band_rows=4)


def test_plan_packed_template_takes_sizes_and_tile() -> None:
    problem = Problem(10, 7, 3, DType.FLOAT32, 2)
    plan = packed(problem, [1, 4, 7], transport="gloo", tile=(3, 3), band_rows=2)
    assert (plan.tile_m, plan.tile_n, plan.cluster_m) == (3, 3, 1)
    assert [chunk.tiles for chunk in plan.chunks] == [1, 4, 7]
    assert chunk_extent(plan, 1) == (9, 36)
    with pytest.raises(ValueError, match="covers a tile twice"):
        packed(problem, [1, 4, 8], transport="gloo", tile=(3, 3))


def test_plan_packed_template_exchanges_between_two_ranks() -> None:
    problem = Problem(256, 256, 64, DType.BFLOAT16, 2)
    plan = packed(problem, [1, 3], collective="exchange", lanes=2, finish_ctas=7)
    assert plan.collective == Collective.EXCHANGE
    assert (plan.resources.lanes, plan.resources.finish_ctas) == (2, 7)
    assert chunk_extent(plan, 1) == (2 * 128 * 128, 3 * 128 * 128)


@pytest.mark.parametrize("template", [row_panels, packed])
def test_plan_templates_take_the_fields_of_resources(template) -> None:
    problem = Problem(512, 512, 64, DType.BFLOAT16, 2)
    given = {"comm_sms": 4, "lanes": 2, "low_priority": True}
    assert template(problem, 2, **given).resources == Resources(**given)
    some = (
        rf"{template.__name__}\(\) .* 'sms', allowed are kernel, band_rows, .*, comm_sms, .*lanes"
    )
    with pytest.raises(TypeError, match=some):
        template(problem, 2, lanes=2, sms=4)
    with pytest.raises(ValueError, match="has one_launch"):
        template(problem, 2, one_launch=True)


@pytest.mark.parametrize("cuda", [False, True])
def test_plan_templates_travel_as_the_machines_tensors_do(monkeypatch, cuda: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    problem = Problem(512, 512, 64, torch.bfloat16, 2)
    exchange = Problem(0, 512, 64, torch.bfloat16, 2, "gemm_alltoall")
    usual = Transport.NCCL if cuda else Transport.GLOO
    for make in (
        partial(row_panels, problem, 1),
        partial(row_panels, problem, 2, tile=(64, 64), lanes=2),
        partial(packed, problem, 2),
        partial(make_all_to_all, exchange),
        partial(make_all_to_all, exchange, "library", Resources()),
    ):
        assert make().chunks[0].transport == usual
        assert make() == make(transport=usual), "the tiles are the transport's, too"
    for_gpus = [
        *({"kernel": kernel} for kernel in ("sm80", "sm90_pingpong", "sm90_cooperative")),
        *({name: 8} for name in ("comm_sms", "max_ctas", "smem_pad_bytes", "finish_ctas")),
        {"window": True},
        {"low_priority": True},
    ]
    for options in for_gpus:
        for template in (row_panels, packed):
            assert template(problem, 1, **options).chunks[0].transport == Transport.NCCL, options
    alltoall = make_all_to_all(exchange, "sm80", max_ctas=8)
    assert alltoall.chunks[0].transport == Transport.NCCL
    assert packed(problem, 1, collective="exchange").chunks[0].transport == Transport.NCCL
    for transport in ("gloo", "nccl"):
        plan = row_panels(problem, 1, transport=transport)
        assert plan.chunks[0].transport.name == transport.upper()


def test_plan_json_is_readable_and_checked() -> None:
    data = json.loads(plans.files.to_json(example()))
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
        ({"bands": [[2, 4]]}, r"plan's bands\[0\] is .* expected a dict"),
        ({"bands": [{"count": 4}]}, r"bands\[0\] lacks the fields \['tile_rows'\]"),
        ({"problem": 3}, "plan's problem is 3, expected a dict with op, m, n"),
        ({"layout": "tiled"}, "Layout is 'tiled', allowed are row_major, packed"),
        ({"extra": 1}, r"unknown fields \['extra'\]"),
        ({"tile_m": 64}, "given tiles of 64x128"),
    ]:
        with pytest.raises(ValueError, match=message):
            plans.files.from_dict({**data, **change})
    del data["layout"]
    with pytest.raises(ValueError, match=r"lacks the fields \['layout'\]"):
        plans.files.from_dict(data)


# --- memory that the ranks map into each other ------------------------------------------------------


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
        assert chunk_rows(plan, 0) == (0, part)
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


KERNELS = {Kernel.LIBRARY: Schedule.SEQUENTIAL, Kernel.SM90_PINGPONG: Schedule.OVERLAPPED}
BYTES = {DType.BFLOAT16: 2, DType.FLOAT16: 2, DType.FLOAT32: 4}
ACCESS = 16  # bytes


@st.composite
def problems_and_kernels(draw: st.DrawFn) -> tuple[Problem, Kernel]:
    """The problems that a direct plan takes."""
    op = draw(st.sampled_from([Op.GEMM_ALLREDUCE, Op.GEMM_REDUCESCATTER, Op.ALLGATHER_GEMM]))
    kernel, world = draw(st.sampled_from([*KERNELS])), draw(st.integers(2, 8))
    dtype = draw(st.sampled_from([*BYTES][: 3 if kernel == Kernel.LIBRARY else 2]))
    rows = draw(st.integers(1, 700))
    # Two ranks of an all-reduce send each other everything, and the framework's GEMM cuts no rows.
    any_rows = op == Op.GEMM_ALLREDUCE and (world == 2 or kernel == Kernel.LIBRARY)
    elements = ACCESS // BYTES[dtype]
    whole, other = elements * draw(st.integers(1, 1500 // elements)), draw(st.integers(1, 3000))
    n, k = (other, whole) if op == Op.ALLGATHER_GEMM else (whole, other)
    return Problem(rows if any_rows else rows * world, n, k, dtype, world, op), kernel


@settings(max_examples=150)
@given(problems_and_kernels())
def test_plan_direct_is_one_chunk_without_fault(case: tuple[Problem, Kernel]) -> None:
    problem, kernel = case
    plan = plans.templates.at_once(problem, kernel=kernel)
    gathers = problem.op == Op.ALLGATHER_GEMM
    assert (plan.kernel, plan.schedule) == (kernel, KERNELS[kernel])
    assert plan.collective == (Collective.ALL_GATHER if gathers else Collective.DIRECT)
    assert plan.chunks == (Chunk(plan.tiles_m * plan.tiles_n, Transport.PEER),)
    assert Case(plan, PEERS, (True,) * problem.world_size).fault() == ""
    if gathers and kernel != Kernel.LIBRARY:  # one chunk of the plan in phases
        assert plan == plans.templates.row_panels(problem, 1, kernel=kernel, transport="peer")


@pytest.mark.parametrize("make", [row_panels, packed])
def test_templates_take_numpys_numbers_and_arrays_of_sizes(make):
    numpy = pytest.importorskip("numpy")
    problem = Problem(1024, 512, 64, world_size=2)
    two = make(problem, numpy.int64(2), transport="gloo")
    assert len(two.chunks) == 2
    assert two == make(problem, numpy.array([2, 2]), transport="gloo")
