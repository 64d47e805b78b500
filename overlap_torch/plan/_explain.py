"""A plan's steps, and why it was taken: ``Plan.explain()``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from overlap_torch import _plan
from overlap_torch._plan import Kernel, Machine, Plan, Prediction, Problem, Schedule
from overlap_torch.plan import _library as library
from overlap_torch.plan._names import enum_name

# Measured on two H200s of one host (NV18 links).
H200 = Machine(
    arch=90,
    sm_count=132,
    sm_gflops=5600.0,
    kernel_arch=90,
    link_latency_us=9.3,
    link_gbps=262.7,
    windows=True,
    peer_gbps=365.0,
)


@dataclass(frozen=True)
class Step:
    """One step of a rank's call.

    Attributes:
        lane: the stream that it runs on: ``caller``, ``side0`` to ``side3`` or ``copy``.
        kind: its kind, such as ``gemm``, ``wait_for_tiles`` or ``collective``.
        words: its effect in words.
        chunk: the chunk that it computes, communicates or puts in place; None if it has not exactly one.
        begin_us: when it is expected to begin, in microseconds from the call's start.
        end_us: when it is expected to end.
    """

    lane: str
    kind: str
    words: str
    chunk: int | None
    begin_us: float
    end_us: float


@dataclass(frozen=True)
class Buffer:
    """Memory that a call holds on each rank beside its operands and results: ``bytes`` of it, held by ``whose``."""

    name: str
    bytes: int
    whose: str


@dataclass(frozen=True)
class Explanation:
    """The result of :meth:`Plan.explain`; ``str()`` makes a readable page of it.

    Attributes:
        plan: the explained plan.
        machine: the machine that it is expected to run on.
        rank: the rank with these steps.
        expected: the times of these steps, in microseconds.
        sequence_us: the expected time of a GEMM and one collective, one after the other; None for ``gemm_alltoall``,
            whose rows no plan knows.
        others: the planner's other candidates, each with its expected microseconds, the fastest first.
        why: why this plan runs, or does not.
        steps: in the order in which the host enqueues them.
        buffers: the memory that the call holds.
        computed_us: when each chunk's tiles are finished, for a GEMM that counts them.
        peer_memory: :func:`overlap_torch.plan.peer_memory` of the default group, if its machine was taken; else empty.
    """

    plan: Plan
    machine: Machine
    rank: int
    expected: Prediction
    sequence_us: float | None
    others: tuple[tuple[Plan, float], ...]
    why: str
    steps: tuple[Step, ...]
    buffers: tuple[Buffer, ...]
    computed_us: tuple[float, ...]
    peer_memory: str = ""

    def __str__(self) -> str:
        expected = self.expected
        lines = [f"plan     {self.plan}", f"machine  {self.machine}"]
        if self.peer_memory:
            lines.append(f"peers    {self.peer_memory}")
        lines.append(
            f"expected {expected.total_us:.1f} us: the GEMM {expected.gemm_us:.1f}, communication "
            f"{expected.communication_us:.1f}"
        )
        lines.append(f"why      {self.why}")
        lines += ["", "holds on each rank, beside operands and results"]
        lines += [f"  {one.name:10}{_size(one.bytes):>12}   {one.whose}" for one in self.buffers]
        if not self.buffers:
            lines.append("  nothing")
        lines += [
            "",
            f"steps of rank {self.rank}, from begin to end in us, as expected (a step of no time hides beside others)",
        ]
        for number, step in enumerate(self.steps):
            lines.append(
                f"  #{number:<4}{step.begin_us:9.1f} {step.end_us:9.1f}  {step.lane:7}{step.words}"
            )
        return "\n".join(lines)


def explain(
    plan: Plan,
    machine: Machine | None = None,
    *,
    rank: int = 0,
    send_rows: Sequence[int] = (),
    receive_rows: Sequence[int] = (),
) -> Explanation:
    """Explains a call by this plan: its steps, memory and expected time, and why this plan was chosen::

        print(overlap_torch.plan.plan_for(4096, 8192, 7168).explain())

    It shows the steps of a rank whose operands the plan's kernel takes, without bias and outside CUDA graphs.

    Args:
        machine: the machine for the expected times; None: :func:`overlap_torch.plan.machine`, which all ranks of the
            default group have to call.
        rank: the rank whose steps are shown.
        send_rows: for ``gemm_alltoall``, rows that this rank sends to each rank.
        receive_rows: for ``gemm_alltoall``, rows that it receives from each.

    Raises:
        ValueError: the plan cannot run, or the rows do not fit it.
    """
    peer_memory = _peer_memory(plan) if machine is None else ""
    machine = _machine(plan) if machine is None else machine
    made, price = walk(plan, machine, rank, send_rows, receive_rows)
    problem, element = plan.problem, _element_bytes(plan.problem)
    sequence_us = None
    others: tuple[tuple[Plan, float], ...] = ()
    if not problem.traits.rows_by_rank:
        candidates = _plan.candidates(problem, machine)
        sequence_us = _plan.predict(candidates[0], machine).total_us
        timed = [(one, _plan.predict(one, machine).total_us) for one in candidates if one != plan]
        others = tuple(sorted(timed, key=lambda one: one[1]))
    return Explanation(
        plan=plan,
        machine=machine,
        rank=rank,
        expected=price.expected,
        sequence_us=sequence_us,
        others=others,
        why=_why(plan, machine, price.expected.total_us, sequence_us, others),
        steps=tuple(
            Step(step["lane"], step["step"], _words(plan, step, element), chunk, begin, end)
            for step, chunk, (begin, end) in zip(
                made["steps"], chunks_of(made), price.steps, strict=True
            )
        ),
        buffers=_buffers(made),
        computed_us=tuple(price.computed_us),
        peer_memory=peer_memory,
    )


def walk(
    plan: Plan,
    machine: Machine,
    rank: int,
    send_rows: Sequence[int] = (),
    receive_rows: Sequence[int] = (),
) -> tuple[dict, _plan.Price]:
    """A rank's list of steps, from its JSON, and its expected times."""
    if machine.sm_count < 1 or machine.sm_gflops <= 0:
        raise ValueError(
            f"the machine has sm_count = {machine.sm_count} and sm_gflops = {machine.sm_gflops:g}, allowed are numbers above 0: "
            "take overlap_torch.plan.machine(), or give both"
        )
    rows = {"send_rows": list(send_rows), "receive_rows": list(receive_rows)}
    made = json.loads(_plan.steps_json(plan, rank, machine, **rows))
    return made, _plan.price_steps(plan, rank, machine, **rows)


def chunks_of(made: dict) -> list[int | None]:
    """The chunk of each step of a list in JSON."""
    chunks: list[int | None] = []
    launched = 0
    for step in made["steps"]:
        chunk = step.get("chunk", step["communicates"])
        if chunk < 0 and step["step"] in ("gemm", "library_gemm") and step["after"]:
            chunk, launched = launched, launched + 1  # after what has arrived
        elif chunk < 0 and step["after"]:
            chunk = chunks[step["after"][0]]
        chunks.append(None if chunk is None or chunk < 0 else chunk)
    return chunks


def short(plan: Plan) -> str:
    """A plan in a few words, which distinguish it from the planner's other candidates."""
    kernel, collective = enum_name(plan.kernel), enum_name(plan.collective)
    if plan.program.transfers:
        collective = f"{collective} in {len(plan.program.transfers)} transfers"
    if plan.schedule == Schedule.SEQUENTIAL:
        over_peers = plan.chunks[0].transport.traits.maps_memory
        over = "over peers, in one kernel" if over_peers else "one after the other"
        return f"the framework's GEMM and {collective}, {over}"
    sizes = [chunk.tiles for chunk in plan.chunks]
    chunks = f"{len(sizes)} chunk{'s' if len(sizes) > 1 else ''}"
    if len(set(sizes)) > 1:
        chunks += " of " + ", ".join(str(size) for size in sizes) + " tiles"
    words = [f"{collective} over {enum_name(plan.chunks[0].transport)}", kernel, chunks]
    if plan.chunks[0].max_ctas:
        words.append(f"{plan.resources.lanes} x {plan.chunks[0].max_ctas} CTAs")
    if plan.resources.window:
        words.append("in a window")
    return ", ".join(words)


# --- parts ----------------------------------------------------------------------------------------------------


def _machine(plan: Plan) -> Machine:
    return library.machine(library.device_of(None, plan))


def _peer_memory(plan: Plan) -> str:
    return library.peer_memory(library.device_of(None, plan))


def _why(
    plan: Plan,
    machine: Machine,
    expected_us: float,
    sequence_us: float | None,
    others: Sequence[tuple[Plan, float]],
) -> str:
    if sequence_us is None:
        return "the planner's only plan: rows differ by rank, so each rank decides how it computes its own"
    sequence = f"{sequence_us:.1f} us"
    chosen = _plan.make_plan(plan.problem, machine)
    count = f"{len(others) + 1} candidates"
    if plan != chosen:
        gain = f"{sequence_us / expected_us:.2f}x the sequence, {sequence}"
        us = _plan.predict(chosen, machine).total_us
        return f"set by hand; {gain}; the planner would take {short(chosen)}, {us:.1f} us"
    if plan == _plan.make_sequential(plan.problem, machine):
        if not others:
            return "there is nothing to overlap, or no other plan for this problem"
        best, us = others[0]
        share, margin = _plan.needed_gain(best, machine)
        return (
            f"the sequence, out of {count}: the next best, {short(best)}, is expected to take {us:.1f} us, but would have to "
            f"take less than {share * sequence_us - margin:.1f}"
        )
    why = f"the best of {count}: {sequence_us / expected_us:.2f}x the sequence, {sequence}"
    sequential = _plan.make_sequential(plan.problem, machine)
    rest = [one for one in others if one[0] != sequential]
    if rest:
        best, us = rest[0]
        why += f"; the next, {short(best)}, takes {us:.1f} us, {us / expected_us - 1:+.1%}"
        why += ", and does not gain as surely" if us < expected_us else ""
    share, margin = _plan.needed_gain(plan, machine)
    if share < 1.0:
        why += f"; a plan had to take less than {share * sequence_us - margin:.1f} us"
    return why


def _buffers(made: dict) -> tuple[Buffer, ...]:
    found = []
    for scratch in made["scratch"]:
        if scratch["bytes"] > 0:
            kept = scratch["buffer"] == "window"
            whose = "the group's, kept, as large as the largest call's" if kept else "the call's"
            found.append(Buffer(scratch["buffer"], scratch["bytes"], whose))
    if made["slot_bytes"] > 0:
        whose = "the group's, kept: two, each rounded up to a power of two, for what peers write"
        found.append(Buffer("slots", 2 * made["slot_bytes"], whose))
    if made["counters"] > 0:
        whose = "of finished tiles, one a chunk, and of a program's transfers"
        found.append(Buffer("counters", 4 * made["counters"], whose))
    return tuple(found)


_PLAIN_WORDS = {  # of those kinds of steps for which their own numbers are enough
    "wait_for_tiles": "wait for chunk {chunk}: {tiles} tiles",
    "mark": "chunk {chunk} is computed",
    "delay": "delay of {us} us, so that the GEMM has its SMs first",
    "signal": "signal chunk {number} to the peers",
    "wait_for_peers": "wait for the peers' chunk {number}",
    "announce": "tell rank {peer} that it is there",
    "await": "wait for what rank {peer} sends",
}


def _words(plan: Plan, step: dict, element: int) -> str:
    kind = step["step"]
    words = _PLAIN_WORDS.get(kind, kind.replace("_", " ")).format_map(step)
    if kind == "gemm":
        words = f"gemm {enum_name(plan.kernel)}, tiles {step['first_tile']} to {step['end_tile']}"
        words += "" if plan.kernel == Kernel.LIBRARY else f" on {step['ctas']} CTAs"
        words += f" -> {_places(target['to'] for target in step['outputs'])}"
        if step.get("mirrors"):
            words += f" and {_places(step['mirrors'])}"
        words += ", counts chunks" if step.get("counts") else ""
        words += ", passes on single tiles" if step.get("announces") else ""
        words += ", awaits chunks" if step.get("awaits_chunks") else ""
        words += ", copies what has arrived" if step.get("moves") else ""
    elif kind == "library_gemm":
        words = (
            f"framework's gemm, rows {step['begin']} to {step['end']} -> {_place(step['output'])}"
        )
    elif kind == "collective":
        words = f"{step['kind']}, {_size(step['count'] * element)} a rank, {_ctas(plan, step)}"
    elif kind == "send_receive":
        sent, received = (sum(m["bytes"] for m in step[way]) for way in ("sends", "receives"))
        words = f"send {_size(sent)}, receive {_size(received)}, {_ctas(plan, step)}"
    elif kind == "copy":
        words = (
            f"copy {_size(step['bytes'])} {_place(step['source'])} -> {_place(step['destination'])}"
        )
    elif kind == "copy_rows":
        does = "add" if step.get("adds") else "copy"
        words = f"{does} {step['rows']} x {_size(step['row_bytes'])} {_place(step['source'])} -> {_place(step['destination'])}"
    elif kind == "unpack":
        add = ", adding both ranks'" if step["terms"] > 1 else ""
        words = f"unpack chunk {step['chunk']} -> {_place(step['destination'])}{add}"
    elif kind == "pack":
        words = f"pack chunk {step['chunk']} -> {_place(step['destination'])}"
    elif kind == "peer_collective":
        does = [name for name in ("reduces", "gathers") if step[name]]
        words = f"one kernel over peers that {' and '.join(does)}"
    elif kind == "low_latency":
        words = f"low-latency all-reduce of {_size(step['bytes'])}"
    elif kind == "peer_exchange":
        words = f"one kernel that {'sends and ' if step['sends'] else ''}places the peers' messages"
    if step["after"]:
        words += " (after " + ", ".join(f"#{other}" for other in step["after"]) + ")"
    return words


def _ctas(plan: Plan, step: dict) -> str:
    if plan.chunks[0].transport.traits.on_cpu:
        return "by gloo"
    return f"{step['max_ctas']} CTAs" if step["max_ctas"] else "as many CTAs as NCCL takes"


def _place(where: dict) -> str:
    return f"slot of rank {where['index']}" if where["buffer"] == "slot" else where["buffer"]


def _places(wheres: Iterable[dict]) -> str:
    return ", ".join(dict.fromkeys(_place(where) for where in wheres))


def _size(count: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"


def _element_bytes(problem: Problem) -> int:
    """The bytes of one element that travels."""
    dtype = problem.dtype if problem.traits.gathers else problem.output_dtype
    sizes = {"float32": 4, "float64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1}
    return sizes.get(enum_name(dtype), 2)
