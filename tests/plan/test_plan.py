"""Properties that every plan has, against what a few lines of Python work out by brute force."""

import pickle
import re
from copy import copy as shallow_copy
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overlap_torch import plan as plans
from overlap_torch.plan import Machine, Plan, Problem, types
from plan_grids import (
    PARTED,
    Grid,
    any_plans_and_grids,
    example,
    parted_plans_and_grids,
    plans_and_grids,
)
from tests._plan_test import buffer_elements, chunk_extent, chunk_rows, packed_offset

GRIDS = st.one_of(any_plans_and_grids(), parted_plans_and_grids(peers=True))


@given(GRIDS)
def test_plan_takes_every_tile_once_in_band_order(case: tuple[Plan, Grid]) -> None:
    plan, grid = case
    plan.validate()
    assert (plan.tiles_m, plan.tiles_n) == (grid.rows, grid.columns)
    taken = [plan.tile_coord(i) for i in range(grid.rows * grid.columns)]
    assert taken == grid.tiles()
    assert sorted(taken) == [(r, c) for r in range(grid.rows) for c in range(grid.columns)]
    assert [plan.tile_index(*place) for place in taken] == list(range(len(taken)))
    assert [plan.tile_chunk(i) for i in range(len(taken))] == grid.chunk_of_tiles()
    # A cluster's rows are adjacent, in one column.
    for first in range(0, len(taken), plan.cluster_m):
        row, column = taken[first]
        assert row % plan.cluster_m == 0
        assert taken[first : first + plan.cluster_m] == [
            (row + i, column) for i in range(plan.cluster_m)
        ]


@pytest.mark.parametrize("copies", [1, 2], ids=["all_reduce", "exchange"])
def test_plan_packed_tiles_follow_each_other_and_fill_their_chunks(copies: int) -> None:
    """An exchange's chunks hold two parts, this rank's and the other's."""
    collective = {1: types.Collective.ALL_REDUCE, 2: types.Collective.EXCHANGE}[copies]

    @given(plans_and_grids(types.Layout.PACKED, collective))
    def check(case: tuple[Plan, Grid]) -> None:
        plan, grid = case
        size, tiles = grid.tile_m * grid.tile_n, grid.rows * grid.columns
        assert buffer_elements(plan) == copies * size * tiles
        if copies == 1:
            offsets = [packed_offset(plan, index) for index in range(tiles)]
            assert offsets == [*range(0, size * tiles, size)]
        first = 0
        for chunk, chunk_tiles in enumerate(grid.chunks):
            assert chunk_extent(plan, chunk) == (copies * first * size, chunk_tiles * size)
            first += chunk_tiles

    check()


AT_ONCE = st.builds(
    lambda op, kernel, rows: plans.templates.at_once(
        Problem(4 * rows, 512, 64, types.DType.BFLOAT16, 4, op), kernel=kernel
    ),
    st.sampled_from([types.Op.GEMM_ALLREDUCE, *PARTED]),
    st.sampled_from(["library", "sm90_pingpong"]),
    st.integers(1, 700),
)


@given(st.one_of(GRIDS.map(lambda case: case[0]), AT_ONCE))
def test_plan_survives_encode_json_pickle_and_copy(plan: Plan) -> None:
    code = plans.files.encode(plan)
    assert all(isinstance(number, int) for number in code)
    assert plans.files.decode(code) == plan
    assert plans.files.encode(plans.files.decode(code)) == code
    assert plans.files.from_json(plans.files.to_json(plan)) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert deepcopy([plan])[0] == plan


@pytest.mark.parametrize(
    ("part", "field"),
    [
        (Problem(3, 5, 7, types.DType.FLOAT64, 4, types.Op.ALLGATHER_GEMM), "m"),
        (Machine(90, 132, 5.5, 90, 7.25, 350.0, True, 375.0), "sm_count"),
        (types.Resources(8, 1024, True, 6, 3), "lanes"),
        (types.Chunk(5, types.Transport.PEER, 16), None),
        (types.BandRun(4, 9), None),
    ],
    ids=lambda value: type(value).__name__ if value is not None else "",
)
def test_plan_parts_survive_pickle_and_copy(part: object, field: str | None) -> None:
    for copied in (pickle.loads(pickle.dumps(part)), deepcopy(part), shallow_copy(part)):
        assert type(copied) is type(part) and copied is not part
        assert repr(copied) == repr(part)
        if not isinstance(part, Machine):
            assert copied == part
        if field is not None:
            setattr(copied, field, getattr(copied, field) + 1)
            assert repr(copied) != repr(part), "they change apart"


def test_plan_problem_takes_dtypes_of_torch_and_names() -> None:
    problem = Problem(8, 8, 8, types.DType.FLOAT16, 2, types.Op.GEMM_ALLTOALL)
    assert Problem(8, 8, 8, torch.float16, 2, "gemm_alltoall") == problem
    assert Problem(8, 8, 8, dtype="float16", world_size=2, op=types.Op.GEMM_ALLTOALL) == problem
    for name, dtype in types.DType.__members__.items():
        assert Problem(8, 8, 8, getattr(torch, name.lower())).dtype == dtype
    for wrong in (torch.int8, "torch.float16", "FLOAT16", 1, None):
        with pytest.raises(ValueError, match="DType is .*, allowed are bfloat16, float16") as error:
            Problem(8, 8, 8, wrong)
        assert repr(wrong) in str(error.value)
    with pytest.raises(ValueError, match="Op is 'broadcast', allowed are gemm_allreduce"):
        Problem(8, 8, 8, op="broadcast")


@given(any_plans_and_grids(), st.data())
def test_plan_decode_rejects_lists_that_encode_does_not_make(
    case: tuple[Plan, Grid], data: st.DataObject
) -> None:
    code = plans.files.encode(case[0])
    with pytest.raises(ValueError, match="encoded plan"):
        plans.files.decode(code[: data.draw(st.integers(0, len(code) - 1))])
    with pytest.raises(ValueError, match="encoded plan has .* numbers, expected"):
        plans.files.decode([*code, 0])
    for version in (1, 2, 3, 4, 5, 6, 99):
        with pytest.raises(ValueError, match=f"version = {version}, this release reads 8: make"):
            plans.files.decode([version, *code[1:]])


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Problem, "op m n k dtype world_size recipe output_dtype fast_accum invariance"),
        (types.BandRun, "tile_rows count"),
        (types.Chunk, "tiles transport max_ctas"),
        (types.Resources, "comm_sms smem_pad_bytes window finish_ctas lanes one_launch low_priority"),
        (Plan, "problem schedule kernel tile_m tile_n cluster_m layout bands chunks collective resources program " "clique"),
    ],
)  # fmt: skip
def test_plan_every_field_counts(kind: type, names: str) -> None:
    """Each is listed, encoded, compared, documented and saved."""
    assert [*kind.__fields__] == names.split()
    for name, of in kind.__fields__.items():
        assert f"    {name}: " in kind.__doc__
        plan, other = example(), example()
        if name == "output_dtype":  # which only scaled operands have
            plan.problem.recipe = other.problem.recipe = plans.types.Recipe.ROW_WISE
        owner = {Plan: other, Problem: other.problem, types.Resources: other.resources}.get(kind)
        if owner is None:  # frozen: another one in its place
            sequence = "chunks" if kind is types.Chunk else "bands"
            first, *rest = getattr(plan, sequence)
            values = {field: getattr(first, field) for field in kind.__fields__}
            values[name] = changed(values[name], of)
            setattr(other, sequence, [kind(**values), *rest])
        else:
            setattr(owner, name, changed(getattr(owner, name), of))
        assert plan != other
        assert repr(plan) != repr(other)
        assert plans.files.encode(plan) != plans.files.encode(other)
        assert plans.files.decode(plans.files.encode(other)) == other
        assert plans.files.to_dict(plan) != plans.files.to_dict(other)


def changed(value: Any, kind: Any) -> Any:
    """Another value of that type."""
    if isinstance(kind, tuple):
        return value[1:]
    others = {
        Problem: Problem(1, 1, 1),
        types.Resources: types.Resources(lanes=4),
        plans.programs.Program: plans.programs.Program(8),
    }
    if kind in others:
        return others[kind]
    if hasattr(kind, "__members__"):
        members = [*kind.__members__.values()]
        return members[(members.index(value) + 1) % len(members)]
    return not value if kind is bool else value + 1


@pytest.mark.parametrize(
    ("position", "field"),
    [
        (1, "problem.op"),
        (5, "problem.dtype"),
        (11, "schedule"),
        (12, "kernel"),
        (16, "layout"),
        (17, "number of bands"),
        (20, "number of chunks"),
        (22, r"chunks\[0\].transport"),
        (25, r"chunks\[1\].transport"),
        (27, "collective"),
        (30, "resources.window"),
    ],
)
@pytest.mark.parametrize("value", [-1, 99, 2**62])
def test_plan_decode_names_the_field_out_of_range(position: int, field: str, value: int) -> None:
    code = plans.files.encode(example())
    code[position] = value
    with pytest.raises(ValueError, match=f"{field} = {value} at position {position}, allowed"):
        plans.files.decode(code)


def test_plan_of_an_invalid_shape_answers_nothing_nor_any_out_of_range() -> None:
    plan, none = example(), Plan()  # no tile shape: what would divide by zero raises
    for ask in (
        lambda: none.tiles_m,
        lambda: none.tile_coord(0),
        lambda: chunk_extent(none, 0),
        lambda: buffer_elements(none),
    ):
        with pytest.raises(ValueError, match="tile_m = 0"):
            ask()
    for ask in (
        lambda: plan.tile_coord(32),
        lambda: plan.tile_index(8, 0),
        lambda: plan.tile_chunk(-1),
        lambda: chunk_rows(plan, 2),
    ):
        with pytest.raises(IndexError, match="out of range"):
            ask()


def test_plan_parts_are_frozen() -> None:
    plan = example()
    with pytest.raises(AttributeError):
        plan.chunks.append(types.Chunk(1))
    with pytest.raises(AttributeError):
        plan.chunks[0].tiles = 3
    with pytest.raises(AttributeError):
        plan.bands[0].count = 3


@pytest.mark.parametrize("op", [types.Op.GEMM_ALLREDUCE, *PARTED])
@pytest.mark.parametrize(("m", "n"), [(0, 6), (6, 0), (0, 0)])
def test_plan_of_an_empty_output_is_one_empty_chunk(m: int, n: int, op: types.Op) -> None:
    machine = Machine(arch=90, sm_count=132, sm_gflops=5000, link_gbps=300)
    plan = plans.templates.make_plan(Problem(m, n, 64, types.DType.BFLOAT16, 2, op), machine)
    assert plan.schedule == types.Schedule.SEQUENTIAL
    assert [chunk.tiles for chunk in plan.chunks] == [0]
    assert chunk_rows(plan, 0) == (0, m // plan.problem.row_parts)
    if op != types.Op.ALLGATHER_GEMM:  # which gathers its input whatever the weights
        assert chunk_extent(plan, 0) == (0, 0)
        assert buffer_elements(plan) == 0
    assert plans.files.from_json(plans.files.to_json(plan)) == plan


# --- rows cut into the ranks' parts -----------------------------------------------------------------


IN_PARTS = st.one_of(parted_plans_and_grids(), parted_plans_and_grids(peers=True))
IN_ONE_PART = plans_and_grids(types.Layout.ROW_MAJOR)


@given(IN_PARTS)
def test_plan_part_row_puts_every_tile_row_into_one_part(case: tuple[Plan, Grid]) -> None:
    plan, grid = case
    plan.validate()
    places = [plan.part_row(row) for row in range(grid.rows)]
    assert places == grid.part_rows()
    height = grid.rows // grid.parts
    assert sorted(places) == [(p, row) for p in range(grid.parts) for row in range(height)]


@given(IN_PARTS | IN_ONE_PART)
def test_plan_chunks_hold_the_same_rows_of_each_part(case: tuple[Plan, Grid]) -> None:
    plan, grid = case
    part_rows = -(-grid.m // grid.parts)  # the last part may have fewer
    rows_of: list[dict[int, set[int]]] = [{} for _ in grid.chunks]
    for (row, _), chunk in zip(grid.tiles(), grid.chunk_of_tiles(), strict=True):
        part, top = grid.part_rows()[row]
        rows = range(top * grid.tile_m, min((top + 1) * grid.tile_m, part_rows))
        rows_of[chunk].setdefault(part, set()).update(rows)
    covered: list[int] = []
    for chunk, of_parts in enumerate(rows_of):
        begin, end = chunk_rows(plan, chunk)
        assert begin < end
        assert sorted(of_parts) == list(range(grid.parts))
        assert all(rows == set(range(begin, end)) for rows in of_parts.values())
        covered += range(begin, end)
    assert covered == list(range(part_rows))


@given(st.one_of(IN_ONE_PART, *(parted_plans_and_grids(op) for op in PARTED)))
def test_plan_chunks_in_memory_are_part_after_part(case: tuple[Plan, Grid]) -> None:
    """Rows of the output, or of a gather's input. Kernels store whole tiles of each part; on CPU the framework's GEMM makes rows."""
    plan, grid = case
    width = plan.problem.k if plan.problem.op == types.Op.ALLGATHER_GEMM else grid.n
    scatters = plan.problem.op == types.Op.GEMM_REDUCESCATTER
    whole_tiles = scatters and plan.chunks[0].transport != types.Transport.GLOO
    assert buffer_elements(plan) == width * (grid.rows * grid.tile_m if whole_tiles else grid.m)
    for chunk, tiles in enumerate(grid.chunks):
        begin, end = chunk_rows(plan, chunk)
        rows = tiles // (grid.columns * grid.parts) * grid.tile_m if whole_tiles else end - begin
        assert chunk_extent(plan, chunk) == (grid.parts * begin * width, rows * width)


# --- all-to-all: rows differ by rank, so a plan has none --------------------------------------------


def all_to_all(**changes: int) -> Plan:
    """As the planner makes it, for either schedule the same problem."""
    fields = {"m": 0, "n": 8, "k": 16, **changes}
    problem = Problem(**fields, dtype=types.DType.FLOAT32, world_size=3, op=types.Op.GEMM_ALLTOALL)
    return plans.templates.make_plan(
        problem, Machine(sm_count=2, sm_gflops=50.0, link_gbps=1.0, link_latency_us=200.0)
    )


def test_plan_of_all_to_all_is_one_empty_chunk() -> None:
    plan = all_to_all()
    plan.validate()
    assert (plan.schedule, plan.collective) == (
        types.Schedule.OVERLAPPED,
        types.Collective.ALL_TO_ALL,
    )
    assert [chunk.tiles for chunk in plan.chunks] == [0]
    assert plan.bands == ()
    assert (plan.tiles_m, buffer_elements(plan), chunk_extent(plan, 0)) == (0, 0, (0, 0))
    assert plans.files.decode(plans.files.encode(plan)) == plan
    assert plans.files.from_json(plans.files.to_json(plan)) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert "gemm_alltoall m=0 n=8 k=16 float32 world_size=3: overlapped" in repr(plan)


def test_plan_of_all_to_all_has_no_rows_of_its_own() -> None:
    plan = all_to_all()
    plan.problem.m = 4
    with pytest.raises(ValueError, match="gemm_alltoall has m = 4, allowed is 0: its rows differ"):
        plan.validate()
    with pytest.raises(ValueError, match="gemm_alltoall has m = 4, allowed is 0: its rows differ"):
        all_to_all(m=4)


@pytest.mark.parametrize(
    ("n", "k", "chunks"), [(0, 16, 1), (8, 0, 1), (0, 0, 1), (8, 16, 2)], ids=str
)
def test_plan_of_all_to_all_overlapped_is_of_one_chunk_and_some_work(n, k, chunks) -> None:
    plan = all_to_all()
    plan.problem.n, plan.problem.k = n, k
    plan.chunks = [types.Chunk(0, types.Transport.GLOO)] * chunks
    expected = f"n = {n}, k = {k} with {chunks} chunks, allowed are n and k of 1 or more and one"
    with pytest.raises(ValueError, match=re.escape(expected)):
        plan.validate()
    plan.schedule = types.Schedule.SEQUENTIAL
    if chunks == 1:
        plan.validate()
