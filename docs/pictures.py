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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from overlap_torch import _plan
from overlap_torch._watch.drawing import GEMM, Bar, Row
from overlap_torch._watch.drawing import OTHER as PLACE
from overlap_torch.plan import Machine, Plan, Problem
from overlap_torch.plan._explain import H200, walk
from overlap_torch.plan._picture import lanes
from overlap_torch.plan.templates import hierarchical, row_panels
from overlap_torch.plan.types import Op

FOLDER = Path(__file__).resolve().parent / "pictures"

LINE, TEXT = "#808080", "#202020"
CHUNKS = ("#f2c14e", "#e8923a")  # neighbours differ
PARTS = ("#4878a8", "#2f5d8a")
STUCK = "#e3b7b0"
SENDS = {  # the words for a bar of a step that communicates; a collective has its own kind's
    "collective": "",
    "copy": "copy engine",
    "send_receive": "send, receive",
    "peer_exchange": "places what came",
    "low_latency": "send, add",
    "peer_collective": "send, add",
    "signal": "signal",
}
STREAMS = {"caller": "caller's stream", "copy": "copy stream"}
Legend = tuple[tuple[str, str], ...]


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
    legend: Legend


@dataclass(frozen=True)
class Way:
    """How an op runs: in words, by a plan of `make` for a machine."""

    words: str
    machine: Machine
    make: Callable[[Problem, Machine], Plan] = _plan.make_plan


@dataclass(frozen=True)
class Spec:
    """A picture of one problem: its sequence, two calls in words, and the ways of the op."""

    problem: Problem
    sequence: str
    ways: tuple[Way, ...]
    legend: Legend = ()
    gemm: str = "GEMM"
    communication: str = "communication"
    where: str = ""
    send_rows: tuple[tuple[int, ...], ...] = ()

    def __call__(self) -> Picture:
        problem, machine = self.problem, self.ways[-1].machine
        first = f"one after the other: {self.sequence}"
        if self.send_rows:
            panels = [exchange_panel(first, self)]
        else:
            panels = [panel(first, _plan.make_sequential(problem, machine), machine)]
        for way in self.ways:
            made = way.make(problem, way.machine)
            panels.append(panel(way.words, made, way.machine, self.send_rows))
        m = problem.m or sum(self.send_rows[0])
        shape = f"{m} x {problem.n} x {problem.k}, bfloat16"
        where = self.where or f"rank 0 of {problem.world_size} H200s"
        title = f"{problem.op.name.lower()}, {shape}, {where}"
        legend = ((GEMM, self.gemm), (CHUNKS[0], self.communication), *self.legend)
        return Picture(title, tuple(panels), legend)


# --- what is drawn ----------------------------------------------------------------------------------------------


def changed(machine: Machine, **values: object) -> Machine:
    machine = copy.copy(machine)
    for name, value in values.items():
        setattr(machine, name, value)
    return machine


# The same GPUs without memory that the ranks map into each other.
NCCL_ALONE = changed(H200, peer_gbps=0.0)
# Two such GPUs on each of two hosts, with a network of 50 GB/s for each GPU, nine tenths of which messages reach. NCCL's
# all-reduce sends half of the bytes twice over each GPU's share, as `python -m benchmarks hosts` has it.
TWO_HOSTS = changed(
    NCCL_ALONE,
    windows=False,
    link_gbps=45.0,
    link_latency_us=50.0,
    clique=2,
    clique_gbps=H200.peer_gbps,
    across_gbps=45.0,
    across_latency_us=20.0,
)


def panel(
    title: str, plan: Plan, machine: Machine, send_rows: tuple[tuple[int, ...], ...] = ()
) -> Panel:
    """Rank 0's work by this plan."""
    received = tuple(row[0] for row in send_rows)
    made, price = walk(plan, machine, 0, send_rows[0] if send_rows else (), received)
    link: list[Bar] = []
    ring: list[Row] = []

    def draw_step(step: dict, chunk: int | None, begin: float, end: float) -> Bar | None:
        kind = step["step"]
        if kind == "gemm" and step.get("announces"):
            ring.extend(ring_rows(plan, step, begin, end, machine))
            return None
        if kind in ("gemm", "library_gemm"):
            if kind == "gemm" and step["outputs"][0]["to"]["buffer"] == "slot":
                link.append(Bar(begin, end, CHUNKS[0], "the GEMM's stores"))
            return Bar(begin, end, GEMM, "GEMM")
        if kind in SENDS and (kind != "copy" or step["destination"]["buffer"] == "slot"):
            number = chunk or 0
            words = SENDS[kind] or step["kind"].replace("_", "-")
            label = str(number) if len(plan.chunks) > 1 else words
            return Bar(begin, end, CHUNKS[number % 2], label)
        return Bar(begin, end, PLACE, "" if chunk is None else str(chunk))

    rows = [
        Row(STREAMS.get(lane, f"side stream {lane[4:]}"), bars)
        for lane, bars in lanes(made, price, draw_step).items()
        if bars
    ]
    rows = ring + rows + ([Row("link", link)] if link else [])
    return Panel(title, price.expected.total_us, tuple(rows), tuple(price.computed_us))


def ring_rows(plan: Plan, step: dict, begin: float, end: float, machine: Machine) -> list[Row]:
    """A ring's GEMM: a row of rounds for each phase, and how much of the link's rate its tiles need meanwhile.

    Tiles are finished evenly over the GEMM, in the plan's order. The tiles of all phases but the last travel to the next rank;
    an all-reduce's final ones travel to all.
    """
    world, round_rows = plan.problem.world_size, step["rows"]["round_tile_rows"]
    tiles = _plan.ring_tiles(world, step["rows"]["part_tile_rows"], plan.tiles_n, round_rows)
    tile_us = (end - begin) / len(tiles)

    def bar(first: int, stop: int, color: str, label: str) -> Bar:
        return Bar(begin + first * tile_us, begin + stop * tile_us, color, label)

    spans: dict[tuple[int, int], list[int]] = {}
    for place, (phase, row, _) in enumerate(tiles):
        spans.setdefault((phase, row // round_rows), []).append(place)
    rows = []
    for phase in range(world):
        bars = [
            bar(places[0], places[-1] + 1, PARTS[number % 2], str(number))
            for (of, number), places in spans.items()
            if of == phase
        ]
        rows.append(Row(f"GEMM: part {(2 * world - 1 - phase) % world}", bars))
    # A band of tiles begins where a round of the first phase does, or, behind those, of the last.
    starts = sorted({places[0] for (phase, _), places in spans.items() if phase == 0})
    last = sorted(places[0] for (phase, _), places in spans.items() if phase == world - 1)
    starts += [place for place in last if place > spans[(0, max(n for _, n in spans))][-1]]
    final = world - 1 if step.get("mirrors") else 0
    link: list[Bar] = []
    for start, stop in zip(starts, [*starts[1:], len(tiles)], strict=True):
        sent = sum(1 if phase < world - 1 else final for phase, _, _ in tiles[start:stop])
        load = sent * plan.tile_m * plan.tile_n * 2 / (machine.peer_gbps * 1e3)
        if sent:
            share = f"{load / ((stop - start) * tile_us):.0%}"
            link.append(bar(start, stop, CHUNKS[len(link) % 2], share))
    return [*rows, Row("link, share used", link)]


def exchange_panel(title: str, spec: Spec) -> Panel:
    """The sequence of an all-to-all: no plan is that; its GEMM is an all-reduce's, its exchange the one over NCCL."""
    problem, rows = spec.problem, spec.send_rows
    alone = Problem(sum(rows[0]), problem.n, problem.k, "bfloat16", 2, Op.GEMM_ALLREDUCE)
    computed = walk(_plan.make_sequential(alone, H200), H200, 0)[1].steps[0][1]
    made, price = walk(_plan.make_plan(problem, NCCL_ALONE), NCCL_ALONE, 0, rows[0], rows[0])
    steps = [step["step"] for step in made["steps"]]
    begin, end = price.steps[steps.index("send_receive")]
    sent = computed + end - begin
    bars = (Bar(0.0, computed, GEMM, "GEMM"), Bar(computed, sent, CHUNKS[0], "all-to-all"))
    return Panel(title, sent, (Row("caller's stream", bars),))


def deadlock() -> Picture:
    """A kernel of the caller's that awaits an all-gather: on all SMs, and with some set apart."""
    problem = Problem(8192, 8192, 3584, "bfloat16", 2, Op.ALLGATHER_GEMM)
    machine, kernel_us, apart = NCCL_ALONE, 300.0, 16
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


TICKS = ("|", "a chunk's tiles are finished")
NUMBERED = "communication, with the chunk's number"


def over(nccl: str, peers: str) -> tuple[Way, Way]:
    return (
        Way(f"the op over NCCL: {nccl}", NCCL_ALONE),
        Way(f"the op over peer memory: {peers}", H200),
    )


REDUCTION = {
    "ways": over("chunks", "single tiles"),
    "gemm": "GEMM (over peer memory: rounds of tile rows, a line for each rank's part)",
    "communication": NUMBERED,
    "legend": ((PLACE, "puts a chunk in place"), TICKS),
}
ON_HOSTS = {"kernel": "sm90_pingpong", "comm_sms": 8, "max_ctas": 8}


def problem(op: Op, m: int = 8192, world: int = 2) -> Problem:
    return Problem(m, 8192, 3584, "bfloat16", world, op)


PICTURES: dict[str, Callable[[], Picture]] = {
    "allreduce": Spec(problem(Op.GEMM_ALLREDUCE), "torch.mm, then all_reduce", **REDUCTION),
    "reducescatter": Spec(
        problem(Op.GEMM_REDUCESCATTER, world=4), "torch.mm, then reduce_scatter", **REDUCTION
    ),
    "allgather": Spec(
        problem(Op.ALLGATHER_GEMM),
        "all_gather, then torch.mm",
        over("own rows first, then what has arrived", "one GEMM, whose loads wait for rows"),
        ((PLACE, "copies own rows"),),
    ),
    "alltoall": Spec(
        problem(Op.GEMM_ALLTOALL, 0),
        "torch.mm, then all_to_all",
        over("the peer's rows first", "the GEMM stores the peer's rows where they go"),
        where="half of the rows to each, rank 0 of 2 H200s",
        send_rows=((4096, 4096), (4096, 4096)),
    ),
    "few_rows": Spec(
        problem(Op.GEMM_ALLREDUCE, 128),
        "torch.mm, then all_reduce",
        (Way("the op over peer memory: direct", H200),),
    ),
    "deadlock": deadlock,
    "hosts": Spec(
        problem(Op.GEMM_ALLREDUCE, 16384, 4),
        "torch.mm, then all_reduce",
        (
            Way(
                "the op over NCCL",
                TWO_HOSTS,
                lambda problem, _: row_panels(problem, 4, transport="nccl", **ON_HOSTS),
            ),
            Way(
                "each row between hosts once: peer memory within, NCCL's messages across",
                TWO_HOSTS,
                lambda problem, _: hierarchical(problem, 2, 4, transport="peer", **ON_HOSTS),
            ),
        ),
        ((PLACE, "adds up, or puts in place"), TICKS),
        communication=NUMBERED,
        where="rank 0 of 2 x 2 H200s, 50 GB/s a GPU between hosts",
    ),
}


# --- as SVG -----------------------------------------------------------------------------------------------------

WIDTH, LEFT, RIGHT, ROW, BAR = 880, 118, 76, 22, 17
Box = tuple[float, float, float, float]  # x, y, width, height
Word = tuple[float, float, str]  # x, y, a label


def svg(picture: Picture) -> str:
    """The picture's text: the same for the same plans, whatever draws it."""
    longest = max(panel.total_us for panel in picture.panels)
    step = next(s * 10**e for e in range(6) for s in (1, 2, 5) if longest / (s * 10**e) <= 8)
    scale = (WIDTH - LEFT - RIGHT) / longest
    body = [text([(12, 20, picture.title)], 13, weight="bold")]
    y = 34
    for one in picture.panels:
        body += panel_svg(one, y, scale)
        y += 24 + ROW * len(one.rows) + 8
    ticks = [(LEFT + i * step * scale, f"{i * step}") for i in range(int(longest / step) + 1)]
    axis = [(LEFT, y, WIDTH - LEFT - RIGHT, 0.8), *((x, y, 0.8, 4.0) for x, _ in ticks)]
    body += [path(axis, LINE), text([(x, y + 16, us) for x, us in ticks], 10, "middle")]
    body.append(text([(WIDTH - RIGHT + 6, y + 16, "µs")], 10))
    x, y = 12.0, y + 36
    legend: list[Word] = []
    for color, words in picture.legend:
        if x + 24 + 6.4 * len(words) > WIDTH:
            x, y = 12.0, y + 18
        ticked = color == "|"
        box = (x + 5, y - 10, 1.4, 12) if ticked else (x, y - 9, 11, 11)
        body.append(path([box], "black" if ticked else color))
        legend.append((x + 16, y, words))
        x += 34 + 6.4 * len(words)
    body.append(text(legend, 11))
    height = y + 12
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="Helvetica, Arial, sans-serif">\n'
        f"<title>{escape(picture.title)}</title>\n"
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def panel_svg(one: Panel, y: int, scale: float) -> Iterator[str]:
    """A path for each colour of bars, and a text for each of labels."""
    yield text([(12, y + 16, one.title)], 12)
    y += 24
    boxes: dict[str, list[Box]] = {}
    labels: dict[str, list[Word]] = {}
    for top, row in zip(range(y, y + ROW * len(one.rows), ROW), one.rows, strict=True):
        for bar in row.bars:
            x, width = LEFT + bar.begin * scale, (bar.end - bar.begin) * scale
            boxes.setdefault(bar.color, []).append((x, top, max(width - 0.6, 0.6), BAR))
            if bar.label and width > 6.2 * len(bar.label) + 2:
                fill = "white" if bar.color in (GEMM, *PARTS) else TEXT
                labels.setdefault(fill, []).append((x + width / 2, top + 12.5, bar.label))
    names = [(LEFT - 8, y + ROW * i + 13, row.name) for i, row in enumerate(one.rows)]
    yield text(names, 10, "end")
    yield from (path(of, color) for color, of in boxes.items())
    yield from (text(of, 10, "middle", fill=fill) for fill, of in labels.items())
    if one.ticks:
        ticks = [(LEFT + tick * scale - 0.7, y - 2, 1.4, BAR + 4) for tick in one.ticks]
        yield path(ticks, "black")
    end = LEFT + one.total_us * scale
    yield path([(end, y - 3, 1, ROW * len(one.rows) + 2)], LINE)
    words = f"{one.total_us:.0f} µs" if one.ends else "never"
    yield text([(end + 6, y + 12.5, words)], 11, weight="bold")


def path(boxes: Sequence[Box], fill: str) -> str:
    """Rectangles of one colour."""
    lines = " ".join(f"M{x:.1f} {y:.1f}h{w:.1f}v{h:.1f}h-{w:.1f}z" for x, y, w, h in boxes)
    return f'<path fill="{fill}" d="{lines}"/>'


def text(
    words: Sequence[Word],
    size: int,
    anchor: str = "start",
    weight: str = "normal",
    fill: str = TEXT,
) -> str:
    """Words of one look."""
    spans = (f'<tspan x="{x:.1f}" y="{y:.1f}">{escape(word)}</tspan>' for x, y, word in words)
    style = f'font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" fill="{fill}"'
    return f"<text {style}>{''.join(spans)}</text>"


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
