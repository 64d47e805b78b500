"""A plan as a picture: its steps on all ranks with their expected times, and its tiles coloured by chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from overlap_torch import _plan
from overlap_torch._plan import Collective, Machine, Plan, Schedule
from overlap_torch._watch import drawing
from overlap_torch._watch.drawing import GEMM, OTHER, Bar, Row
from overlap_torch.plan._explain import _machine, chunks_of, short, walk

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LANES = ("caller", "side0", "side1", "side2", "side3", "copy")
_WAITS = "wait_for_tiles wait_for_peers wait_for_slots await mark fork join delay".split()


def plot(
    plan: Plan,
    path: str | Path,
    machine: Machine | None = None,
    *,
    send_rows: Sequence[Sequence[int]] = (),
) -> None:
    """Draws the plan's expected timeline and its tiles, in the format of the path's suffix (PNG, SVG, PDF).

    The upper part has the steps of all ranks, a row for each of a rank's streams: GEMMs, with a tick where a chunk's tiles
    are finished, and each chunk's communication and placement, in its colour. The lower part has the tiles of the product
    on rank 0 in the colours of their chunks; if there is only one chunk, colours show the order of computation.

    Args:
        machine: as in :meth:`Plan.explain`.
        send_rows: for ``gemm_alltoall``, ``send_rows[a][b]`` rows go from rank a to rank b.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: as :meth:`Plan.explain` raises.
    """
    draw(plan, _machine(plan) if machine is None else machine, send_rows).savefig(path, dpi=150)


def draw(plan: Plan, machine: Machine, send_rows: Sequence[Sequence[int]] = ()) -> Figure:
    """The figure that :func:`plot` saves."""
    ranks = []
    for rank in range(plan.problem.world_size):
        received = [row[rank] for row in send_rows]
        sent = send_rows[rank] if send_rows else ()
        ranks.append(walk(plan, machine, rank, sent, received))
    rows = [
        row for rank, (made, price) in enumerate(ranks) for row in _rows(plan, rank, made, price)
    ]
    tiles = tile_map(plan, ranks[0][0])
    height = 1.4 + 0.3 * len(rows)
    figure = drawing.figure(11, height + (4.2 if tiles else 0.0), "a plan's picture")
    if tiles:
        above, below = figure.subplots(2, 1, height_ratios=[height, 4.2])
        _draw_tiles(below, plan, tiles)
    else:
        above = figure.subplots()
    total_us = max(price.expected.total_us for _, price in ranks)
    title = f"{plan.problem}\n{short(plan)}: {total_us:.0f} µs"
    since = "the call's start, as expected; ticks: a chunk's tiles are finished"
    drawing.draw_rows(above, rows, total_us, since, title)
    return figure


def tile_map(plan: Plan, made: dict) -> list[tuple[int, int, int]]:
    """(group, tile row, tile column) of each of the product's tiles, in the order in which rank 0 computes them.

    ``made``: that rank's list of steps in JSON.

    The group is the tile's chunk. In an all-gather it is 0 for own rows, and one more than the chunk for the peers' rows.
    If all tiles would be in one group, the groups are 16 equal runs of the order. The list is empty if a plan has no tiles.
    """
    problem = plan.problem
    if problem.traits.rows_by_rank or plan.tiles_m * plan.tiles_n == 0:
        return []
    overlapped = plan.schedule == Schedule.OVERLAPPED
    if overlapped and problem.traits.gathers:
        part_rows = plan.tiles_m // problem.world_size
        return [
            (arrival, part * part_rows + row, column)
            for arrival, column, _, _, part, row in _plan.gather_rows(plan, problem.n, 0)
        ]
    gemms = [step for step in made["steps"] if step["step"] == "gemm"]
    split = [step["rows"] for step in gemms if "round_tile_rows" in step.get("rows", {})]
    if plan.collective == Collective.RING and split:
        parts = problem.world_size
        part_rows = plan.tiles_m // parts
        ring = _plan.ring_tiles(parts, part_rows, plan.tiles_n, split[0]["round_tile_rows"])
        # Rank 0 computes the previous rank's part first, and its own last.
        ordered = [
            (0, (2 * parts - 1 - phase) % parts * part_rows + row, column)
            for phase, row, column in ring
        ]
    else:
        parts = problem.row_parts
        ordered = []
        for index in range(plan.tiles_m * plan.tiles_n):
            row, column = plan.tile_coord(index)
            part, in_part = plan.part_row(row)
            row = part * (plan.tiles_m // parts) + in_part if parts > 1 else row
            ordered.append((plan.tile_chunk(index), row, column))
    if len(plan.chunks) > 1:
        return ordered
    return [
        (16 * index // len(ordered), row, column) for index, (_, row, column) in enumerate(ordered)
    ]


def _color(group: int | None, groups: int) -> tuple[float, ...] | str:
    from matplotlib import colormaps

    if group is None:
        return OTHER
    # From yellow to brown, to differ from the GEMM's blue.
    return colormaps["YlOrBr"](0.25 + 0.65 * group / max(1, groups - 1))


def lanes(
    made: dict,
    price: _plan.Price,
    draw_step: Callable[[dict, int | None, float, float], Bar | None],
) -> dict[str, list[Bar]]:
    """The bars of each lane of a rank's list: `draw_step` draws a step that takes time, of a chunk, from begin to end."""
    used = {step["lane"] for step in made["steps"]} | {"caller"}
    bars: dict[str, list[Bar]] = {lane: [] for lane in _LANES if lane in used}
    for step, chunk, (begin, end) in zip(made["steps"], chunks_of(made), price.steps, strict=True):
        if end > begin and step["step"] not in _WAITS:
            bar = draw_step(step, chunk, begin, end)
            bars[step["lane"]] += [bar] if bar else []
    return bars


def _rows(plan: Plan, rank: int, made: dict, price: _plan.Price) -> list[Row]:
    """A row for each lane of the rank's list, with the steps that take time."""
    groups = max(
        len(plan.chunks), *(1 + chunk for chunk in chunks_of(made) if chunk is not None), 1
    )

    def draw_step(step: dict, chunk: int | None, begin: float, end: float) -> Bar:
        if step["step"] in ("gemm", "library_gemm"):
            return Bar(begin, end, GEMM)
        return Bar(begin, end, _color(chunk, groups), "" if chunk is None else str(chunk))

    return [
        Row(f"rank {rank}: {lane}", bars, price.computed_us, begins_group=lane == "caller")
        for lane, bars in lanes(made, price, draw_step).items()
    ]


def _draw_tiles(axes: Axes, plan: Plan, tiles: Sequence[tuple[int, int, int]]) -> None:
    groups = 1 + max(group for group, _, _ in tiles)
    gathers = plan.problem.traits.gathers and plan.schedule == Schedule.OVERLAPPED
    picture = [[(1.0, 1.0, 1.0, 1.0)] * plan.tiles_n for _ in range(plan.tiles_m)]
    for group, row, column in tiles:
        own = gathers and group == 0
        color = _color(group - gathers, groups - gathers)
        picture[row][column] = (0.28, 0.47, 0.66, 1.0) if own else color
    axes.imshow(picture, aspect="auto", interpolation="nearest")
    axes.set_xlabel(f"tile columns of {plan.tile_n}")
    axes.set_ylabel(f"tile rows of {plan.tile_m}")
    what = "chunk" if len(plan.chunks) > 1 else "the order of computing, in sixteenths"
    if gathers:
        what = "arrival; blue: own rows"
    axes.set_title(f"tiles of the product on rank 0, light to dark by {what}", fontsize=9)
