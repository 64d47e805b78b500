"""Programs for tests: templates of every op, random ones, and what may be wrong with them."""

import random
from collections.abc import Callable

import torch

from operands import Case
from ops import OPS
from overlap_torch import plan as plan_module
from overlap_torch.plan import Plan, Problem
from overlap_torch.plan.programs import Area, Editor, Program, Transfer
from overlap_torch.plan.types import Engine, Way

TILE = (16, 8)
RAGGED = Case((45,), 33, 12, torch.bfloat16, bias=True)
EVEN = Case((64,), 32, 24, torch.float32)
FEW = Case((3,), 5, 8, torch.float64, bias=True)


def how_to_edit(problem: Problem) -> dict[str, object]:
    tile = {} if problem.op == plan_module.types.Op.GEMM_ALLTOALL else {"tile": TILE}
    return {"transport": "gloo", **tile}


def templates(problem: Problem) -> list[tuple[str, Callable[..., Plan]]]:
    """The templates that the op has."""
    rings = [("ring", plan_module.programs.ring), ("double_ring", plan_module.programs.double_ring)]
    shots = [
        ("one_shot", plan_module.programs.one_shot),
        ("two_shot", plan_module.programs.two_shot),
    ]
    return [*([] if problem.op == plan_module.types.Op.GEMM_ALLTOALL else rings), *shots]


def template_plans(
    op: str, case: Case, world: int, chunks: int, **how: object
) -> list[tuple[str, Plan]]:
    """``how``: as of ``plan.programs.edit``, by default over gloo in small tiles."""
    problem = OPS[op].problem(case, world)
    return [
        (f"{name} of {chunks}", make(problem, chunks, **(how or how_to_edit(problem))))
        for name, make in templates(problem)
    ]


# The engines of a program's transfers: the copy engine, or by turns all that there are.
ENGINES: dict[str, list[str]] = {"any": ["any"], "mixed": ["copy_engine", "nccl", "any"]}


def by_engines(plan: Plan, engines: list[str]) -> Plan:
    """The plan whose transfers between ranks go by these, in turns."""
    made = plan.copy()
    transfers = [
        one
        if one.way == Way.COPY
        else changed(one, by=Engine.__members__[engines[i % len(engines)].upper()])
        for i, one in enumerate(plan.program.transfers)
    ]
    made.program = Program(plan.program.scratch_rows, transfers)
    return made


def random_program(problem: Problem, seed: int, **how: object) -> Plan:
    """A random all-reduce, reduce-scatter or all-gather: each block of rows and columns takes a way
    of its own, drawn from all trees; transfers of different blocks are mixed.
    """
    draw = random.Random(seed)
    p = Editor(problem, **(how or how_to_edit(problem)))
    blocks = [_random_block(p, draw, area, owner) for area, owner in _random_areas(p, draw)]
    while blocks:
        block = draw.choice(blocks)
        block.pop(0)()
        blocks = [block for block in blocks if block]
    return p.plan()


def _random_areas(p: Editor, draw: random.Random) -> list[tuple[Area, int | None]]:
    """Blocks, and whose they are: None where all are to have them."""
    gathers = p.problem.op == plan_module.types.Op.ALLGATHER_GEMM
    width = p.problem.k if gathers else p.problem.n
    parts = [(p.part(rank), rank) for rank in range(p.world)]
    found = []
    for area, rank in parts:
        height = area.at(0).rows
        cut_row, cut_column = draw.randint(0, height), draw.randint(0, width)
        for rows in ((0, cut_row), (cut_row, height)):
            for columns in ((0, cut_column), (cut_column, width)):
                if rows[0] < rows[1] and columns[0] < columns[1]:
                    found.append((area.rows(*rows).columns(*columns), rank))
    return found


def _random_block(
    p: Editor, draw: random.Random, area: Area, owner: int
) -> list[Callable[[], object]]:
    """Up a random tree to a root, each rank adding what it gets; and down another one to all."""
    stream = draw.randrange(4)
    steps: list[Callable[[], object]] = []

    def send(source: int, to: int, reduce: bool) -> None:
        lane = draw.choice([stream, draw.randrange(4)])
        if draw.random() < 0.5:
            steps.append(lambda: p.push(area, to=to, rank=source, reduce=reduce, stream=lane))
        else:
            steps.append(lambda: p.pull(area, of=source, rank=to, reduce=reduce, stream=lane))

    root = owner
    if p.problem.op != plan_module.types.Op.ALLGATHER_GEMM:
        if p.problem.op == plan_module.types.Op.GEMM_ALLREDUCE:
            root = draw.randrange(p.world)
        left = [rank for rank in range(p.world) if rank != root]
        while left:
            leaf = left.pop(draw.randrange(len(left)))
            send(leaf, draw.choice([root, *left]), True)
    if p.problem.op != plan_module.types.Op.GEMM_REDUCESCATTER:
        have = [root]
        left = [rank for rank in range(p.world) if rank != root]
        while left:
            leaf = left.pop(draw.randrange(len(left)))
            send(draw.choice(have), leaf, False)
            have.append(leaf)
    return steps


def changed(one: Transfer, **fields: object) -> Transfer:
    """The transfer with other values in these fields."""
    return Transfer(**{name: getattr(one, name) for name in one.__fields__} | fields)


def disturbed(plan: Plan, seed: int) -> tuple[str, Plan]:
    """The plan with one thing in its program left out, doubled or put elsewhere."""
    draw = random.Random(seed)
    transfers = list(plan.program.transfers)
    i = draw.randrange(len(transfers))
    one = transfers[i]
    world = plan.problem.world_size
    what = draw.choice(["drop", "need", "tiles", "twice", "stream", "reduces", "rank", "order"])
    if what == "drop":
        transfers = without(transfers, i)
    elif what == "need":
        kept = [number for number in one.after if draw.random() < 0.5]
        transfers[i] = changed(one, after=kept)
    elif what == "tiles":
        transfers[i] = changed(one, tiles=[])
    elif what == "twice":
        transfers.append(one)
    elif what == "stream":
        transfers[i] = changed(one, stream=draw.randrange(4))
    elif what == "reduces":
        transfers[i] = changed(one, reduces=not one.reduces)
    elif what == "rank":
        other = plan_module.programs.Region(
            one.destination.memory, draw.randrange(world), one.destination.area
        )
        transfers[i] = changed(one, destination=other)
    else:
        j = draw.randrange(len(transfers))
        transfers[i], transfers[j] = transfers[j], transfers[i]
    other_plan = plan.copy()
    other_plan.program = Program(plan.program.scratch_rows, transfers)
    return f"{what} {i}", other_plan


def without(transfers: list[Transfer], i: int) -> list[Transfer]:
    """All but one, each behind the same others."""
    kept = []
    for j, one in enumerate(transfers):
        if j == i:
            continue
        after = [number - (number > i) for number in one.after if number != i]
        kept.append(changed(one, after=after))
    return kept
