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
from overlap_torch.plan.types import Resources, Transport

PLACES = [(2, 0), (2, 1), (4, 0), (4, 1), (4, 3), (8, 7)]  # ranks and one of them
ROWS = 4096  # of each rank's part, or of an all-reduce
PINGPONG = "sm90_pingpong"
COUNTERS = 4096  # kernels::kDeviceCounters
SUMS = ("gemm_allreduce", "gemm_reducescatter")
GATHERS = ("gemm_allreduce", "allgather_gemm")
OPS = (*SUMS, "allgather_gemm")


@dataclass(frozen=True)
class Call:
    """One call; the fields' order is that of `Call` in session.h."""

    plan: Plan
    bias: bool = False
    takes: tuple[bool, ...] = (True,)  # for each weight, whether the plan's kernel takes it
    send_rows: tuple[int, ...] = ()
    receive_rows: tuple[int, ...] = ()
    finish: bool = False
    captured: bool = False
    traced: bool = False
    delay_us: int = 0
    other_stream: bool = False

    def numbers(self) -> list[int]:
        lists = [encode(self.plan), self.bias, self.takes, self.send_rows, self.receive_rows]
        lists += [self.finish, self.captured, self.traced, self.delay_us, self.other_stream]
        return [n for one in lists for n in ([one] if isinstance(one, int) else [len(one), *one])]


@dataclass(frozen=True)
class Case:
    """Calls in a row; the fields' order is that of `Case` in session.h, which says what they mean."""

    name: str
    world: int
    rank: int
    calls: tuple[Call, ...]
    peers: bool = True
    prepared: bool = False
    failed: int = 0  # 1: a wait's deadline has passed, 2: NCCL has met an error
    unrecorded: int = 0
    refused: int = 0
    library_gemms: int = -1

    def line(self) -> str:
        numbers = [self.world, self.rank, self.peers, self.prepared, self.failed, self.unrecorded]
        numbers += [self.refused, self.library_gemms, len(self.calls)]
        numbers += [number for call in self.calls for number in call.numbers()]
        return f"{self.name}\n{' '.join(str(int(number)) for number in numbers)}\n"


MODES = {
    "in a row": {},
    "captured": {"captured": True},
    "traced": {"traced": True},
    "delayed": {"delay_us": 50},
    "streams": {"other_stream": True},
}


def in_modes(name: str, world: int, rank: int, call: Call) -> Iterator[Case]:
    """Two calls in a row in each mode; on two streams in turn; or two captured ones between calls outside of the graph,
    the first of which makes what both use."""
    for mode, fields in MODES.items():
        own = replace(call, **fields)
        calls = {"captured": (call, own, own, call), "streams": (call, own, call)}.get(mode)
        calls = calls or (own, own)
        yield Case(f"{name}, {mode}", world, rank, calls, unrecorded=len(calls) // 2)


def problem(op: str, m: int, world: int) -> Problem:
    return Problem(m, 2048, 1024, "bfloat16", world, op=op)


def panels(op: str, m: int, world: int, chunks: int | list[int], **how: object) -> Plan:
    how = {"transport": "nccl", "max_ctas": 8 if how.get("transport") != "peer" else 0} | how
    return row_panels(problem(op, m, world), chunks, kernel=PINGPONG, band_rows=8, **how)


def all_reduce(world: int, chunks: int | list[int] = 2, **how: object) -> Plan:
    return panels("gemm_allreduce", ROWS, world, chunks, comm_sms=16, lanes=2, **how)


def tiles(world: int, sizes: list[int], **how: object) -> Plan:
    whole = problem("gemm_allreduce", ROWS, world)
    how = {"transport": "nccl", "max_ctas": 8, "kernel": PINGPONG, "band_rows": 8} | how
    return packed(whole, sizes, **how)


PATTERNS = {  # an all-to-all's rows from one rank to another
    "even": lambda source, to, world: 1024,
    "uneven": lambda source, to, world: (source * 7 + to * 13) % 5 * 301,
    "one long": lambda source, to, world: 24000 if source == 0 and to == world - 1 else 130,
    "single": lambda source, to, world: 1,
    "many": lambda source, to, world: 12288 + 8 * source - 8 * to,
}


def all_to_all(
    pattern: str, world: int, rank: int, ctas: int = 16, over: str = "PEER", **how: object
) -> Call:
    rows = PATTERNS[pattern]
    plan = make_all_to_all(
        problem("gemm_alltoall", 0, world),
        PINGPONG,
        Resources(**(how or {"comm_sms": ctas})),
        ctas,
        Transport.__members__[over],
    )
    sent = tuple(rows(rank, peer, world) for peer in range(world))
    return Call(
        plan, send_rows=sent, receive_rows=tuple(rows(peer, rank, world) for peer in range(world))
    )


def examples(world: int, rank: int) -> dict[str, Call]:
    """A plain call of each executor."""
    all_rows = ROWS * world
    window = {"comm_sms": 8, "window": True}
    made = {
        "panels": Call(all_reduce(world)),
        "packed": Call(tiles(world, [128, 384], comm_sms=16, lanes=2)),
        "window panels": Call(panels("gemm_reducescatter", all_rows, world, 2, **window)),
        "ring": Call(panels("gemm_allreduce", all_rows, world, 1, transport="peer")),
        "scattering ring": Call(
            panels("gemm_reducescatter", 1024 * world, world, 1, transport="peer")
        ),
        "direct": Call(at_once(problem("gemm_allreduce", 256 * world, world), kernel=PINGPONG)),
        "one kernel": Call(
            at_once(problem("gemm_reducescatter", 256 * world, world)), True, (False,)
        ),
        "low latency": Call(at_once(problem("gemm_allreduce", 16, world)), takes=(False,)),
        "gather over NCCL": Call(panels("allgather_gemm", all_rows, world, [8, 24], comm_sms=8)),
        "gather over peers": Call(
            panels("allgather_gemm", all_rows, world, 2, comm_sms=2, transport="peer")
        ),
        "gather in one kernel": Call(
            at_once(problem("allgather_gemm", 128 * world, world)), takes=(False,)
        ),
        "all-to-all over NCCL": all_to_all("many", world, rank, 24 if world == 2 else 16, "NCCL"),
        "all-to-all over peers": all_to_all("even", world, rank),
        "all-to-all in one launch": all_to_all("uneven", world, rank, one_launch=True),
        "gather of two weights": Call(
            panels("allgather_gemm", all_rows, world, 2, **window), takes=(True, False)
        ),
    }
    stripes = {"transport": "peer", "collective": "stripes"}
    striped = row_panels(problem("gemm_allreduce", all_rows - 1, world), 2, **stripes)
    made["stripes"] = Call(striped, True, (False,))
    if world == 2:
        exchange = {"collective": "exchange", "window": True}
        made["exchange"] = Call(tiles(world, [128, 384], comm_sms=16, lanes=2, **exchange))
        by_library = tiles(world, [256, 256], comm_sms=8, **exchange)
        made["exchange by the library"] = Call(by_library, True, (False,))
    for op in OPS:
        rows = ROWS if op == "gemm_allreduce" else all_rows
        plan = make_sequential(problem(op, rows, world), Machine(arch=90))
        name = {"gemm_allreduce": "all-reduce", "allgather_gemm": "all-gather"}.get(op)
        made[f"sequential {name or 'reduce-scatter'}"] = Call(plan, takes=(False,))
    return made


def finished(world: int) -> dict[str, Call]:
    """All-reduces whose rows are finished: in the sum's kernel, in one step and, of more than two ranks, in two; and after
    the call, whose product the caller gives."""
    few, many = (problem("gemm_allreduce", m, world) for m in (16, 200))
    given = Problem(200, 2048, 0, "bfloat16", world)
    plans = {
        "few rows finished": at_once(few),
        "more rows finished": at_once(many),
        "sequence finished": make_sequential(given, Machine(arch=90)),
    }
    return {name: Call(plan, takes=(False,), finish=True) for name, plan in plans.items()}


@cache
def program(op: str, world: int, engine: str) -> Plan:
    """Each half of the columns goes round in a stream of its own, one of them the other way."""
    how = {"comm_sms": 16, "max_ctas": 8, "kernel": PINGPONG if op in SUMS else "library"}
    how["transport"] = "nccl" if engine == "nccl" else "peer"
    p = edit(problem(op, 256 * world, world), **how)
    half = (1024 if op == "allgather_gemm" else 2048) // 2
    turns = [reduces for reduces in (True, False) if op in (SUMS if reduces else GATHERS)]
    for reduces in turns:
        for step in range(reduces, p.world - (not reduces)):
            for stream, way in enumerate((1, -1)):
                part = p.part(p.rank - step * way).columns(stream * half, (stream + 1) * half)
                how = {"reduce": reduces, "by": engine, "stream": stream}
                p.push(part, to=p.rank + way, **how)
    return p.plan()


def sequences(world: int, rank: int) -> Iterator[Case]:
    """Calls of different executors in a row, each pair of them once: chaining, slots, whose memory grows."""
    every = list(examples(world, rank).values())
    for step in (1, 2, 3):
        for captured in (False, True):
            calls = []
            for i in range(6):
                call = every[i * step % len(every)]
                peers = Transport.PEER in {chunk.transport for chunk in call.plan.chunks}
                # An all-to-all's room and a window are made by a call.
                held = captured and i % 3 == 1 and not peers and not call.plan.resources.window
                calls.append(replace(call, captured=held, other_stream=i % 4 == 3))
            name = f"sequences, {world} ranks: rank {rank} by {step}{', captured' * captured}"
            yield Case(name, world, rank, tuple(calls), prepared=captured)


def counters() -> Iterator[Case]:
    """More chunks than the device has counters: they are zeroed, and begin again."""
    for world in (2, 8):
        for chunks in (3, 16):
            heights = [10, 10, 12] if chunks == 3 else chunks
            for takes in (True, False):
                call = Call(all_reduce(world, heights), takes=(takes,))
                before = COUNTERS // chunks - 2
                name = (
                    f"counters, {world} ranks: chunks {chunks}, {'kernel' if takes else 'library'}"
                )
                yield Case(name, world, 0, (call,) * (before + 4), unrecorded=before)


def low_priority(world: int, captured: bool) -> Case:
    """Streams of low priority in turn with others: no stream is left out."""
    plans = [all_reduce(world, [8, 24], low_priority=low) for low in (True, False, True)]
    calls = tuple(Call(plan, captured=captured) for plan in plans)
    name = f"low priority, {world} ranks: {'captured' if captured else 'in a row'}"
    return Case(name, world, 0, calls, prepared=captured)


def growing_rows(world: int, rank: int, takes: bool) -> Case:
    """Rows of an all-to-all that change from call to call: the room for messages grows when the ranks tell each other."""
    patterns = ["single", "even", "one long", "many", "one long", "uneven", "many", "even"]
    calls = [replace(all_to_all(one, world, rank), takes=(takes,)) for one in patterns]
    name = f"growing rows, {world} ranks: rank {rank} {'kernel' if takes else 'library'}"
    return Case(name, world, rank, tuple(calls))


def refused(name: str, world: int, rank: int, call: Call) -> Iterator[Case]:
    """Calls that throw before they enqueue anything, and leave the next one as it was."""
    name = f"refused, {world} ranks: rank {rank} {name}"
    captured = replace(call, captured=True)
    for failed, what in enumerate(("the group", "NCCL"), 1):
        both = (call, captured)
        yield Case(f"{name}, {what} has failed", world, rank, both, failed=failed, refused=2)
    chunk = call.plan.chunks[0]
    if chunk.transport == Transport.PEER:
        yield Case(f"{name}, no peers", world, rank, (call,), peers=False, refused=1)
    elif chunk.max_ctas > 0:  # else its communicator is the one that every group has
        calls = (captured, call, captured)
        yield Case(f"{name}, the first call is captured", world, rank, calls, refused=1)


def thrown(name: str, world: int, rank: int, call: Call) -> Iterator[Case]:
    """The framework's GEMM throws in the midst of a call: what has been forked is joined, and the next call is sound."""
    call = replace(call, takes=(False,))
    for after in (0, 1, 3):
        full = f"thrown, {world} ranks: rank {rank} {name}, after {after}"
        yield Case(full, world, rank, (call, call), library_gemms=after)


def grid() -> Iterator[Case]:
    """All cases."""
    for world, rank in PLACES:
        plain = examples(world, rank)
        for name, call in (plain | finished(world)).items():
            yield from in_modes(f"{name}, {world} ranks: rank {rank}", world, rank, call)
        for name, call in plain.items():
            yield from refused(name, world, rank, call)
            yield from thrown(name, world, rank, call)
        yield from sequences(world, rank)
        yield from (growing_rows(world, rank, takes) for takes in (True, False))
        for op in OPS if world < 8 else ():  # the proof of eight ranks' program takes seconds
            for engine in ("nccl", "sms", "copy_engine"):
                plan = program(op, world, engine)
                for takes in (True, False) if op in SUMS else (False,):
                    name = f"{op} program by {engine}, {world} ranks: rank {rank}"
                    name += " kernel" if takes else " library"
                    yield from in_modes(name, world, rank, Call(plan, not takes, (takes,)))
    yield from counters()
    yield from (low_priority(2, captured) for captured in (False, True))
