"""Draws the timelines of the documents, as SVG, from the steps of plans: `make pictures`.

    python docs/pictures.py            writes docs/pictures/*.svg
    python docs/pictures.py --check    names those that are not up to date, and fails

Each picture has the sequence and the op's plans for one problem, one below the other on one axis of time. Plans are the
planner's for two or four H200s; steps and times are what `Plan.explain` prints. Nothing is drawn by hand, so a picture
changes with the plans. Needs neither GPU nor matplotlib.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from xml.sax.saxutils import escape

from overlap_torch import _plan
from overlap_torch._watch.drawing import GEMM, Bar, Row
from overlap_torch._watch.drawing import OTHER as PLACE
from overlap_torch.plan import Machine, Plan, Problem
from overlap_torch.plan._explain import H200, chunks_of, walk
from overlap_torch.plan._picture import WAITS
from overlap_torch.plan.templates import hierarchical, row_panels
from overlap_torch.plan.types import Op

FOLDER = Path(__file__).resolve().parent / "pictures"

LINE, TEXT = "#808080", "#202020"
CHUNKS = ("#f2c14e", "#e8923a")  # neighbours differ
PARTS = ("#4878a8", "#2f5d8a")
STUCK = "#e3b7b0"
COMMUNICATES = (
    "collective",
    "send_receive",
    "peer_collective",
    "low_latency",
    "peer_exchange",
    "signal",
)


@dataclass(frozen=True)
class Panel:
    """One plan on one rank: rows of bars with their names, and when chunks' tiles are finished."""

    title: str
    total_us: float
    rows: tuple[Row, ...]
    ticks: tuple[float, ...] = ()
    ends: bool = True


@dataclass(frozen=True)
class Picture:
    """A problem, and how it runs: the sequence first."""

    title: str
    panels: tuple[Panel, ...]
    legend: tuple[tuple[str, str], ...]


# --- what is drawn ----------------------------------------------------------------------------------------------


def nccl_alone() -> Machine:
    """The same GPUs without memory that the ranks map into each other."""
    machine = copy.copy(H200)
    machine.peer_gbps = 0.0
    return machine


def two_hosts() -> Machine:
    """Two such GPUs on each of two hosts, with a network of 50 GB/s for each GPU, nine tenths of which messages reach.

    NCCL's all-reduce sends half of the bytes twice over each GPU's share, as `python -m benchmarks hosts` has it.
    """
    machine = nccl_alone()
    machine.windows = False
    machine.link_gbps, machine.link_latency_us = 45.0, 50.0
    machine.clique, machine.clique_gbps = 2, H200.peer_gbps
    machine.across_gbps, machine.across_latency_us = 45.0, 20.0
    return machine


def panel(
    title: str, plan: Plan, machine: Machine, send_rows: tuple[tuple[int, ...], ...] = ()
) -> Panel:
    """Rank 0's work by this plan."""
    received = tuple(row[0] for row in send_rows)
    made, price = walk(plan, machine, 0, send_rows[0] if send_rows else (), received)
    lanes: dict[str, list[Bar]] = {}
    link: list[Bar] = []
    ring: list[Row] = []
    for step, chunk, (begin, end) in zip(made["steps"], chunks_of(made), price.steps, strict=True):
        if step["step"] in WAITS or end - begin <= 0:
            continue
        lane = lanes.setdefault(step["lane"], [])
        if step["step"] == "gemm" and step.get("announces"):
            ring = ring_rows(plan, step, begin, end, machine)
        elif step["step"] in ("gemm", "library_gemm"):
            lane.append(Bar(begin, end, GEMM, "GEMM"))
            if step["step"] == "gemm" and step["outputs"][0]["to"]["buffer"] == "slot":
                link.append(Bar(begin, end, CHUNKS[0], "the GEMM's stores"))
        elif step["step"] in COMMUNICATES or (
            step["step"] == "copy" and step["destination"]["buffer"] == "slot"
        ):
            number = chunk or 0
            several = len(plan.chunks) > 1
            label = str(number) if several else short_name(step)
            lane.append(Bar(begin, end, CHUNKS[number % 2], label))
        else:
            lane.append(Bar(begin, end, PLACE, "" if chunk is None else str(chunk)))
    names = {"caller": "caller's stream", **{f"side{i}": f"side stream {i}" for i in range(4)}}
    names["copy"] = "copy stream"
    rows = ring + [Row(names[lane], lanes[lane]) for lane in names if lanes.get(lane)]
    if link:
        rows.append(Row("link", link))
    return Panel(title, price.expected.total_us, tuple(rows), tuple(price.computed_us))


def short_name(step: dict) -> str:
    """A word for the bar of a step that communicates."""
    if step["step"] == "collective":
        return step["kind"].replace("_", "-")
    return {
        "copy": "copy engine",
        "send_receive": "send, receive",
        "peer_exchange": "places what came",
        "low_latency": "send, add",
        "peer_collective": "send, add",
        "signal": "signal",
    }[step["step"]]


def ring_rows(plan: Plan, step: dict, begin: float, end: float, machine: Machine) -> list[Row]:
    """A ring's GEMM: a row of rounds for each phase, and how much of the link's rate its tiles need meanwhile.

    Tiles are finished evenly over the GEMM, in the plan's order. The tiles of all phases but the last travel to the next rank;
    an all-reduce's final ones travel to all.
    """
    world, round_rows = plan.problem.world_size, step["rows"]["round_tile_rows"]
    tiles = _plan.ring_tiles(world, step["rows"]["part_tile_rows"], plan.tiles_n, round_rows)
    tile_us = (end - begin) / len(tiles)
    spans: dict[tuple[int, int], list[int]] = {}
    for place, (phase, row, _) in enumerate(tiles):
        spans.setdefault((phase, row // round_rows), []).append(place)
    rows = []
    for phase in range(world):
        part = (2 * world - 1 - phase) % world
        bars = tuple(
            Bar(
                begin + places[0] * tile_us,
                begin + (places[-1] + 1) * tile_us,
                PARTS[number % 2],
                str(number),
            )
            for (of, number), places in spans.items()
            if of == phase
        )
        rows.append(Row(f"GEMM: part {part}", bars))
    # A band of tiles begins where a round of the first phase does, or, behind those, of the last.
    starts = sorted({places[0] for (phase, _), places in spans.items() if phase == 0})
    last = sorted(places[0] for (phase, _), places in spans.items() if phase == world - 1)
    starts += [place for place in last if place > spans[(0, max(n for _, n in spans))][-1]]
    link = []
    for start, stop in zip(starts, [*starts[1:], len(tiles)], strict=True):
        final = world - 1 if step.get("mirrors") else 0
        sent = sum(1 if phase < world - 1 else final for phase, _, _ in tiles[start:stop])
        load = sent * plan.tile_m * plan.tile_n * 2 / (machine.peer_gbps * 1e3)
        share = load / ((stop - start) * tile_us)
        if sent:
            link.append(
                Bar(
                    begin + start * tile_us,
                    begin + stop * tile_us,
                    CHUNKS[len(link) % 2],
                    f"{share:.0%}",
                )
            )
    return [*rows, Row("link, share used", link)]


def picture(
    problem: Problem,
    collective: str,
    nccl: str | None,
    peers: str,
    legend: tuple[tuple[str, str], ...],
) -> Picture:
    """The sequence, the planner's plans over NCCL, where `nccl` names it, and over peer memory."""
    first, then = "torch.mm", collective
    if problem.op == Op.ALLGATHER_GEMM:
        first, then = then, first
    sequence = _plan.make_sequential(problem, H200)
    panels = [panel(f"one after the other: {first}, then {then}", sequence, H200)]
    for words, machine in ((nccl, nccl_alone()), (peers, H200)):
        if words is not None:
            panels.append(panel(f"the op over {words}", _plan.make_plan(problem, machine), machine))
    shape = f"{problem.m} x {problem.n} x {problem.k}"
    name, world = problem.op.name.lower(), problem.world_size
    title = f"{name}, {shape}, bfloat16, rank 0 of {world} H200s"
    return Picture(title, tuple(panels), ((GEMM, "GEMM"), (CHUNKS[0], "communication"), *legend))


def reduction(op: Op, world: int, name: str) -> Picture:
    legend = ((PLACE, "puts a chunk in place"), ("|", "a chunk's tiles are finished"))
    nccl, peers = "NCCL: chunks", "peer memory: single tiles"
    made = picture(Problem(8192, 8192, 3584, "bfloat16", world, op), name, nccl, peers, legend)
    rounds = "GEMM (over peer memory: rounds of tile rows, a line for each rank's part)"
    chunks = "communication, with the chunk's number"
    return replace(made, legend=((GEMM, rounds), (CHUNKS[0], chunks), *legend))


def all_reduce() -> Picture:
    return reduction(Op.GEMM_ALLREDUCE, 2, "all_reduce")


def reduce_scatter() -> Picture:
    return reduction(Op.GEMM_REDUCESCATTER, 4, "reduce_scatter")


def all_gather() -> Picture:
    return picture(
        Problem(8192, 8192, 3584, "bfloat16", 2, Op.ALLGATHER_GEMM),
        "all_gather",
        "NCCL: own rows first, then what has arrived",
        "peer memory: one GEMM, whose loads wait for rows",
        ((PLACE, "copies own rows"),),
    )


def few_rows() -> Picture:
    problem = Problem(128, 8192, 3584, "bfloat16", 2, Op.GEMM_ALLREDUCE)
    return picture(problem, "all_reduce", None, "peer memory: direct", ())


def all_to_all() -> Picture:
    problem = Problem(0, 8192, 3584, "bfloat16", 2, Op.GEMM_ALLTOALL)
    rows = ((4096, 4096), (4096, 4096))
    # No plan is the sequence: its GEMM is that of an all-reduce, its exchange the one over NCCL.
    alone = Problem(8192, 8192, 3584, "bfloat16", 2, Op.GEMM_ALLREDUCE)
    _, gemm = walk(_plan.make_sequential(alone, H200), H200, 0)
    made, price = walk(_plan.make_plan(problem, nccl_alone()), nccl_alone(), 0, rows[0], rows[0])
    steps = [step["step"] for step in made["steps"]]
    begin, end = price.steps[steps.index("send_receive")]
    computed = gemm.steps[0][1]
    sent = computed + end - begin
    bars = (Bar(0.0, computed, GEMM, "GEMM"), Bar(computed, sent, CHUNKS[0], "all-to-all"))
    first = "one after the other: torch.mm, then all_to_all"
    panels = [Panel(first, sent, (Row("caller's stream", bars),))]
    for words, machine in (
        ("NCCL: the peer's rows first", nccl_alone()),
        ("peer memory: the GEMM stores the peer's rows where they go", H200),
    ):
        plan = _plan.make_plan(problem, machine)
        panels.append(panel(f"the op over {words}", plan, machine, rows))
    return Picture(
        "gemm_alltoall, 8192 x 8192 x 3584, bfloat16, half of the rows to each, rank 0 of 2 H200s",
        tuple(panels),
        ((GEMM, "GEMM"), (CHUNKS[0], "communication")),
    )


def hosts() -> Picture:
    """Two hosts of two GPUs, over a network as described."""
    problem = Problem(16384, 8192, 3584, "bfloat16", 4, Op.GEMM_ALLREDUCE)
    machine = two_hosts()
    how = {"kernel": "sm90_pingpong", "comm_sms": 8, "max_ctas": 8}
    panels = [
        panel(words, plan, machine)
        for words, plan in (
            (
                "one after the other: torch.mm, then all_reduce",
                _plan.make_sequential(problem, machine),
            ),
            ("the op over NCCL", row_panels(problem, 4, transport="nccl", **how)),
            (
                "each row between hosts once: peer memory within, NCCL's messages across",
                hierarchical(problem, 2, 4, transport="peer", **how),
            ),
        )
    ]
    return Picture(
        "gemm_allreduce, 16384 x 8192 x 3584, bfloat16, rank 0 of 2 x 2 H200s, 50 GB/s a GPU between hosts",
        tuple(panels),
        (
            (GEMM, "GEMM"),
            (CHUNKS[0], "communication, with the chunk's number"),
            (PLACE, "adds up, or puts in place"),
            ("|", "a chunk's tiles are finished"),
        ),
    )


def deadlock() -> Picture:
    """A kernel of the caller's that awaits an all-gather: on all SMs, and with some set apart."""
    problem = Problem(8192, 8192, 3584, "bfloat16", 2, Op.ALLGATHER_GEMM)
    machine, kernel_us, apart = nccl_alone(), 300.0, 16
    plan = row_panels(problem, 4, tile=(128, 256), comm_sms=apart, max_ctas=apart, transport="nccl")
    made, tiles, _ = _plan.kernel_steps_json(plan, 0, machine, True)
    steps = json.loads(made)["steps"]
    price = _plan.price_kernel(plan, machine, kernel_us)
    spans = list(zip(steps, price.steps, strict=True))
    begin = next(span[0] for step, span in spans if step["step"] == "callers_kernel")
    arrived = {step["chunk"]: span[1] for step, span in spans if step["step"] == "arrive"}
    calls = [span for step, span in spans if step["step"] == "collective"]

    # Each chunk's tiles as soon as it has arrived and those before are done.
    computes, now = [], begin
    for chunk in sorted(arrived):
        first = max(now, arrived[chunk])
        if computes and first > now:
            computes.append(Bar(now, first, STUCK))
        now = first + price.expected.gemm_us * tiles.count(chunk) / len(tiles)
        label = "own rows" if chunk == 0 else str(chunk - 1)
        computes.append(Bar(first, now, PARTS[chunk % 2], label))
    own, total = computes[0], price.expected.total_us
    gathers = [Bar(*span, CHUNKS[i % 2], str(i)) for i, span in enumerate(calls)]
    stuck = Panel(
        "on all SMs: what the kernel waits for waits for an SM that the kernel keeps",
        total,
        (
            Row(
                f"SM 0 to {machine.sm_count - 1}",
                (own, Bar(own.end, total, STUCK, "every program waits for chunk 0, and keeps its SM")),
            ),
            Row("NCCL", (Bar(calls[0][0], total, STUCK, "chunk 0 waits for an SM"),)),
        ),
        ends=False,
    )  # fmt: skip
    left = machine.sm_count - apart
    goes_on = Panel(
        f"with resources(comm_sms={apart}), and job.programs = {left} programs: every wait ends",
        total,
        (
            Row(f"SM 0 to {left - 1}", computes),
            Row(f"SM {left} to {machine.sm_count - 1}", gathers),
        ),
    )
    return Picture(
        f"consume, a persistent kernel of {kernel_us:.0f} µs, 8192 x 8192 x 3584, bfloat16, rank 0 of 2 H200s",
        (stuck, goes_on),
        (
            (PARTS[0], "the kernel's tiles of a chunk"),
            (CHUNKS[0], "all-gather of a chunk"),
            (STUCK, "waits"),
        ),
    )


PICTURES: dict[str, Callable[[], Picture]] = {
    "allreduce": all_reduce,
    "reducescatter": reduce_scatter,
    "allgather": all_gather,
    "alltoall": all_to_all,
    "few_rows": few_rows,
    "deadlock": deadlock,
    "hosts": hosts,
}


# --- as SVG -----------------------------------------------------------------------------------------------------

WIDTH, LEFT, RIGHT, ROW, BAR = 880, 118, 76, 22, 17


def svg(picture: Picture) -> str:
    """The picture's text: the same for the same plans, whatever draws it."""
    longest = max(panel.total_us for panel in picture.panels)
    step = next(s * 10**e for e in range(6) for s in (1, 2, 5) if longest / (s * 10**e) <= 8)
    scale = (WIDTH - LEFT - RIGHT) / longest
    body: list[str] = [text(12, 20, picture.title, 13, weight="bold")]
    y = 34
    for one in picture.panels:
        body += panel_svg(one, y, scale)
        y += 24 + ROW * len(one.rows) + 8
    body.append(rect(LEFT, y, WIDTH - LEFT - RIGHT, 0.8, LINE))
    ticks = int(longest / step)
    for i in range(ticks + 1):
        x = LEFT + i * step * scale
        body.append(rect(x, y, 0.8, 4, LINE))
        body.append(text(x, y + 16, f"{i * step}", 10, anchor="middle"))
    body.append(text(WIDTH - RIGHT + 6, y + 16, "µs", 10))
    y += 36
    x = 12.0
    for color, words in picture.legend:
        if x + 24 + 6.4 * len(words) > WIDTH:
            x, y = 12.0, y + 18
        if color == "|":
            body.append(rect(x + 5, y - 10, 1.4, 12, "black"))
        else:
            body.append(rect(x, y - 9, 11, 11, color))
        body.append(text(x + 16, y, words, 11))
        x += 34 + 6.4 * len(words)
    height = y + 12
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="Helvetica, Arial, sans-serif">\n'
        f"<title>{escape(picture.title)}</title>\n"
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def panel_svg(one: Panel, y: int, scale: float) -> Iterable[str]:
    yield text(12, y + 16, one.title, 12)
    y += 24
    for number, row in enumerate(one.rows):
        top = y + ROW * number
        yield text(LEFT - 8, top + 13, row.name, 10, anchor="end")
        for bar in row.bars:
            x, width = LEFT + bar.begin * scale, (bar.end - bar.begin) * scale
            yield rect(x, top, max(width - 0.6, 0.6), BAR, bar.color)
            if bar.label and width > 6.2 * len(bar.label) + 2:
                fill = "white" if bar.color in (GEMM, *PARTS) else TEXT
                yield text(x + width / 2, top + 12.5, bar.label, 10, anchor="middle", fill=fill)
        if number == 0:
            for tick in one.ticks:
                yield rect(LEFT + tick * scale - 0.7, top - 2, 1.4, BAR + 4, "black")
    end = LEFT + one.total_us * scale
    yield rect(end, y - 3, 1, ROW * len(one.rows) + 2, LINE)
    words = f"{one.total_us:.0f} µs" if one.ends else "never"
    yield text(end + 6, y + 12.5, words, 11, weight="bold")


def rect(x: float, y: float, width: float, height: float, fill: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"/>'
    )


def text(
    x: float,
    y: float,
    words: str,
    size: int,
    anchor: str = "start",
    weight: str = "normal",
    fill: str = TEXT,
) -> str:
    style = f'font-size="{size}" text-anchor="{anchor}" fill="{fill}"'
    if weight != "normal":
        style += f' font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'


def outdated() -> list[str]:
    """The pictures whose files are missing, or not what would be drawn now."""
    files = {name: FOLDER / f"{name}.svg" for name in PICTURES}
    return [
        name
        for name, path in files.items()
        if not path.exists() or path.read_text(encoding="utf-8") != svg(PICTURES[name]())
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Draws the timelines of the documents.")
    parser.add_argument("--check", action="store_true", help="only say which are not up to date")
    if parser.parse_args().check:
        names = outdated()
        if names:
            print(f"not up to date: {', '.join(names)}; run `make pictures`", file=sys.stderr)
        return 1 if names else 0
    FOLDER.mkdir(exist_ok=True)
    for name, make in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(svg(make()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
