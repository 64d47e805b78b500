"""The recorder's cases: calls in a row on one rank of a group, each executor in each mode. The program reads their lines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from overlap_torch.plan import Machine, Plan, Problem
from overlap_torch.plan.files import encode
from overlap_torch.plan.programs import edit
from overlap_torch.plan.templates import (
    at_once,
    make_all_to_all,
    make_sequential,
    packed,
    row_panels,
)
from overlap_torch.plan.types import Kernel, Resources, Transport

PLACES = [(2, 0), (2, 1), (4, 1), (8, 7)]  # ranks and one of them
ROWS = 4096  # of each rank's part, or of an all-reduce
COUNTERS = 4096  # kernels::kDeviceCounters
REDUCE, SCATTER, GATHER = OPS = ("gemm_allreduce", "gemm_reducescatter", "allgather_gemm")
HOW = {"kernel": "sm90_pingpong", "band_rows": 8}
OVER_NCCL = {**HOW, "transport": "nccl", "max_ctas": 8}
OVER_PEERS = {**HOW, "transport": "peer"}
MODES = {
    "in a row": {},
    "captured": {"captured": True},
    "traced": {"traced": True},
    "delayed": {"delay_us": 50},
    "streams": {"other_stream": True},
}


@dataclass(frozen=True)
class Call:
    plan: Plan
    takes: tuple[bool, ...] = (True,)  # for each weight, whether the plan's kernel takes it
    bias: bool = False
    send_rows: tuple[int, ...] = ()  # of an all-to-all, for each rank
    receive_rows: tuple[int, ...] = ()
    finish: bool = False  # the rows get a residual and a norm
    captured: bool = False
    traced: bool = False
    delay_us: int = 0
    other_stream: bool = False  # not the stream of most calls


def case(
    name: str,
    world: int,
    rank: int,
    calls: tuple[Call, ...],
    peers: bool = True,  # the ranks map each other's memory
    prepared: bool = False,  # all plans, before the first call
    failed: int = 0,  # before the first call: 1: a wait's deadline has passed, 2: NCCL has met an error; 3: the first in the call
    hidden: int = 0,  # calls of which no text is kept, the first ones
    refused: int = 0,  # calls that must throw before anything is enqueued, the first ones
    library_gemms: int = -1,  # of the first call; the one after them throws, as where memory is short
) -> str:
    rest = (world, rank, calls, peers, prepared, failed, hidden, refused, library_gemms)
    return f"{name}\n{' '.join(str(n) for one in rest for n in numbers(one))}\n"


def numbers(value: object) -> list[int]:
    """As the program reads the value: field after field, and the length of a list before its items."""
    if isinstance(value, int):
        return [int(value)]
    items = vars(value).values() if isinstance(value, Call) else value
    items = encode(value) if isinstance(value, Plan) else [*items]
    length = [] if isinstance(value, Call) else [len(items)]
    return [*length, *(n for one in items for n in numbers(one))]


def problem(op: str, m: int, world: int) -> Problem:
    return Problem(m, 2048, 1024, "bfloat16", world, op=op)


def panels(op: str, m: int, world: int, chunks: int | list[int], **how: object) -> Plan:
    return row_panels(problem(op, m, world), chunks, **how)


def all_reduce(world: int) -> Call:
    return Call(panels(REDUCE, ROWS, world, 2, comm_sms=16, lanes=2, **OVER_NCCL))


def tiles(world: int, **how: object) -> Plan:
    whole = problem(REDUCE, ROWS, world)
    return packed(whole, [128, 384], comm_sms=16, lanes=2, **OVER_NCCL, **how)


def all_to_all(rows: int, world: int, rank: int, over: str = "peer", **how: object) -> Call:
    """From one rank to another go so many rows, and more by their numbers."""
    resources = Resources(**(how or {"comm_sms": 24}))
    whole = problem("gemm_alltoall", 0, world)
    plan = make_all_to_all(whole, HOW["kernel"], resources, 24, over)
    to = [max(1, rows + 8 * (rank - peer)) for peer in range(world)]
    back = [max(1, rows + 8 * (peer - rank)) for peer in range(world)]
    return Call(plan, send_rows=tuple(to), receive_rows=tuple(back))


@cache
def program(op: str, world: int, engine: str) -> Plan:
    """Each half of the columns goes round in a stream of its own, one of them the other way."""
    kernel = "library" if op == GATHER else HOW["kernel"]
    over = "nccl" if engine == "nccl" else "peer"
    whole = problem(op, 256 * world, world)
    p = edit(whole, comm_sms=16, max_ctas=8, kernel=kernel, transport=over)
    half = (1024 if op == GATHER else 2048) // 2
    for reduces in {REDUCE: (True, False), SCATTER: (True,), GATHER: (False,)}[op]:
        for step in range(reduces, p.world - (not reduces)):
            for stream, way in enumerate((1, -1)):
                part = p.part(p.rank - step * way).columns(stream * half, (stream + 1) * half)
                p.push(part, to=p.rank + way, reduce=reduces, by=engine, stream=stream)
    return p.plan()


def examples(world: int, rank: int) -> dict[str, Call]:
    """A plain call of each executor."""
    rows, window = ROWS * world, {**OVER_NCCL, "comm_sms": 8, "window": True}
    gathering = panels(GATHER, rows, world, 2, **window)
    by_kernel = {
        "packed": tiles(world),
        "window panels": panels(SCATTER, rows, world, 2, **window),
        "ring": panels(REDUCE, rows, world, 1, **OVER_PEERS),
        "scattering ring": panels(SCATTER, 1024 * world, world, 1, **OVER_PEERS),
        "direct": at_once(problem(REDUCE, 256 * world, world), kernel=HOW["kernel"]),
        "gather over NCCL": panels(GATHER, rows, world, [8, 24], comm_sms=8, **OVER_NCCL),
        "gather over peers": panels(GATHER, rows, world, 2, comm_sms=2, **OVER_PEERS),
    }
    stripes = {"transport": "peer", "collective": "stripes"}
    by_library = {
        "one kernel": at_once(problem(SCATTER, 256 * world, world)),
        "stripes": panels(REDUCE, rows - 1, world, 1, **stripes),
        "low latency": at_once(problem(REDUCE, 16, world)),
        "more rows": at_once(problem(REDUCE, 200, world)),
        "gather in one kernel": at_once(problem(GATHER, 128 * world, world)),
    }
    if world == 2:
        by_kernel["exchange"] = tiles(world, collective="exchange", window=True)
        by_library["exchange by the library"] = by_kernel["exchange"]
    for op in OPS:
        whole = problem(op, ROWS if op == REDUCE else rows, world)
        by_library[f"sequential {op}"] = make_sequential(whole, Machine(arch=90))
        # The proof of eight ranks' program takes seconds.
        for engine in ("nccl", "copy_engine") if world < 8 else ():
            made = by_library if op == GATHER else by_kernel
            made[f"{op} program by {engine}"] = program(op, world, engine)
    calls = {name: Call(plan) for name, plan in by_kernel.items()}
    calls |= {name: Call(plan, (False,), bias=True) for name, plan in by_library.items()}
    sequence = make_sequential(Problem(200, 2048, 0, "bfloat16", world), Machine(arch=90))
    plans = {"low latency": None, "more rows": None, "sequence": sequence}
    for name, plan in plans.items():
        calls[f"{name}, finished"] = Call(plan or by_library[name], (False,), finish=True)
    return calls | {
        "panels": all_reduce(world),
        "gather of two weights": Call(gathering, (True, False)),
        "all-to-all over NCCL": all_to_all(12288, world, rank, "nccl"),
        "all-to-all over peers": all_to_all(1024, world, rank),
        "all-to-all in one launch": all_to_all(900, world, rank, one_launch=True),
    }


def cases_of(call: Call) -> Iterator[tuple[str, tuple[Call, ...], dict[str, object]]]:
    """Two calls in a row in each mode; on two streams in turn; or two captured ones between calls outside of the graph,
    the first of which makes what both use. Calls that throw, and leave the next one sound."""
    for mode, how in MODES.items():
        own = replace(call, **how)
        calls = {"captured": (call, own, own, call), "streams": (call, own, call)}
        calls = calls.get(mode, (own, own))
        yield mode, calls, {"hidden": len(calls) // 2}
    captured = replace(call, captured=True)
    for failed in (1, 2):
        yield f"failure {failed}", (call, captured), {"failed": failed, "refused": 2}
    chunk = call.plan.chunks[0]
    counts = call.plan.kernel != Kernel.LIBRARY and not call.plan.problem.traits.gathers
    if chunk.transport == Transport.NCCL and counts and len(call.plan.chunks) > 1:
        yield "failure 3", (call,), {"failed": 3, "refused": 1}
    if chunk.transport == Transport.PEER:
        yield "no peers", (call,), {"peers": False, "refused": 1}
    elif chunk.max_ctas > 0:  # else its communicator is the one that every group has
        yield "captured first", (captured, call, captured), {"refused": 1}
    # The framework's GEMM throws in the midst of a call: what was forked is joined.
    call = replace(call, takes=(False,) * len(call.takes))
    for after in (0, 1, 3):
        yield f"thrown after {after}", (call, call), {"library_gemms": after}


def grid() -> Iterator[str]:
    """All cases' lines."""
    for world, rank in PLACES:
        at = f"{world} ranks: rank {rank}"
        every = examples(world, rank)
        for name, call in every.items():
            for what, calls, how in cases_of(call):
                yield case(f"{name}, {at}, {what}", world, rank, calls, **how)
        # Different executors in a row: chaining, slots, whose memory grows. Then all of them in a graph.
        mixed = [replace(call, other_stream=i % 4 == 3) for i, call in enumerate(every.values())]
        mixed += [replace(call, captured=True) for call in every.values()]
        yield case(f"mixed, {at}", world, rank, tuple(mixed))
        # The room for messages grows when the ranks tell each other.
        rows = (1, 1024, 24000, 900, 12288)
        calls = tuple(all_to_all(number, world, rank) for number in rows)
        yield case(f"growing rows, {at}", world, rank, calls)
    # More chunks than the device has counters: they are zeroed, and begin again.
    before = COUNTERS // 2
    calls = (all_reduce(2),) * (before + 1)
    yield case("counters, 2 ranks: rank 0", 2, 0, calls, hidden=before)
    low, usual = (Call(tiles(2, collective="exchange", low_priority=low)) for low in (True, False))
    yield case("low priority, 2 ranks: rank 0", 2, 0, (usual, low), hidden=1)
    captured = tuple(replace(call, captured=True) for call in (low, usual))
    yield case("prepared, 2 ranks: rank 0", 2, 0, captured, prepared=True)
