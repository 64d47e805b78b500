"""The cost model's expectations of plans: when each step runs, and what follows for the whole.

Its constants are measurements, which a new fit changes; test_planner_regret.py bounds what choices by them lose. Here is what holds whatever they
are: how times follow from work, and from each other.
"""

import itertools
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import machines
from machines import ada, big, cpu, hopper, slow, total
from overlap_torch import _plan
from overlap_torch import plan as plans
from overlap_torch.plan import Machine, Plan, Problem
from overlap_torch.plan.templates import make_sequential, packed, row_panels
from overlap_torch.plan.types import Collective, DType, Kernel, Op

KINDS = ["plain", "window", "exchange", "scatter", "window scatter"]
GATHERS = ["gather", "window gather"]
ALL_KINDS = [*KINDS, *GATHERS]

SHORT_K = 64  # with it all tiles are computed before the host has issued the first call


def make(kind: str, chunks: int | list[int], **options: object) -> Plan:
    """A plan for 8192 x 8192 in 64 x 64 tiles; `chunks` in tile rows, an eighth of the SMs left."""
    problem = options.pop("problem", big())
    options = {
        **{"kernel": Kernel.SM90_PINGPONG, "comm_sms": 16, "max_ctas": 16, "band_rows": 8},
        **options,
        "window": kind.startswith("window"),
    }
    if kind.endswith(("scatter", "gather")):  # half of each chunk's rows are each rank's
        problem.op = Op.GEMM_REDUCESCATTER if kind.endswith("scatter") else Op.ALLGATHER_GEMM
        if not isinstance(chunks, int):
            chunks = [rows // 2 for rows in chunks]
    if kind != "exchange":
        return row_panels(problem, chunks, **options)
    if not isinstance(chunks, int):
        chunks = [64 * rows for rows in chunks]
    return packed(problem, chunks, collective=Collective.EXCHANGE, **options)


class Timeline:
    """A plan's steps, each with when it begins and ends."""

    def __init__(self, plan: Plan, machine: Machine, rank: int = 0, **variant: object) -> None:
        price = _plan.price_steps(plan, rank, machine, **variant)
        made = json.loads(_plan.steps_json(plan, rank, machine, **variant))
        self.expected, self.computed = price.expected, price.computed_us
        self.steps = made["steps"]
        assert len(self.steps) == len(price.steps)
        for step, (begin, end) in zip(self.steps, price.steps, strict=True):
            step.update(begins=begin, ends=end)

    def of(self, *kinds: str) -> list[dict]:
        return [step for step in self.steps if step["step"] in kinds]

    def spans(self, *kinds: str) -> list[tuple[float, float]]:
        return [(step["begins"], step["ends"]) for step in self.of(*kinds)]


def lengths(spans: list[tuple[float, float]]) -> list[float]:
    return [end - begin for begin, end in spans]


def check(timeline: Timeline, one_thread: bool = False) -> None:
    """Steps of a lane come one after the other, and behind what they wait for; the last one ends the call."""
    free: dict[str, float] = {}
    for step in timeline.steps:
        assert 0.0 <= step["begins"] <= step["ends"] < math.inf, step
        lane = "side" if one_thread and step["lane"].startswith("side") else step["lane"]
        assert step["begins"] >= free.get(lane, 0.0), step
        free[lane] = step["ends"]
        for other in step["after"]:
            assert step["begins"] >= timeline.steps[other]["ends"], step
    assert timeline.expected.total_us == max(free.values()) == free["caller"]


@pytest.mark.parametrize("name", machines.KINDS)
@pytest.mark.parametrize("op", [Op.GEMM_ALLREDUCE, Op.GEMM_REDUCESCATTER, Op.ALLGATHER_GEMM])
def test_price_of_all_candidates_is_a_walk_that_ends_with_the_call(name: str, op: Op) -> None:
    machine = machines.KINDS[name]
    shapes = [(8192, 8192, 7168), (4104, 4096, 1000), (512, 1024, 2048)]
    walked = 0
    for world, (m, n, k) in itertools.product((2, 3, 4, 8), shapes):
        problem = big(m=-(-m // world) * world, n=n, k=k, world_size=world, op=op)
        for plan in plans.candidates(problem, machine):
            timeline = Timeline(plan, machine)
            check(timeline, one_thread=machine.arch == 0)
            assert repr(timeline.expected) == repr(plans.predict(plan, machine))
            # Ranks are taken to be alike.
            last = Timeline(plan, machine, rank=world - 1)
            assert last.expected.total_us == pytest.approx(timeline.expected.total_us, rel=1e-12)
            walked += 1
    assert walked >= 2 * 4 * len(shapes) - 4


# --- sequences --------------------------------------------------------------------------------------

SEQUENTIAL = [hopper(), hopper(windows=True), hopper(peer_gbps=350.0), slow(), ada(), cpu()]


@pytest.mark.parametrize("machine", SEQUENTIAL, ids=str)
@pytest.mark.parametrize("op", [Op.GEMM_ALLREDUCE, Op.GEMM_REDUCESCATTER, Op.ALLGATHER_GEMM])
def test_predict_sequence_is_gemm_then_one_call(op: Op, machine: Machine) -> None:
    def predict(**changes: int) -> object:
        plan = make_sequential(big(**{**changes, "op": op}), machine)
        prediction = plans.predict(plan, machine)
        both = prediction.gemm_us + prediction.communication_us
        assert prediction.total_us == pytest.approx(both)
        return prediction

    # Both have a start, and then go on in proportion to their work: K of the GEMM, N or K of the collective.
    gemms = [predict(k=k).gemm_us for k in (2048, 4096, 16384)]
    assert gemms[2] - gemms[1] == pytest.approx(6 * (gemms[1] - gemms[0]))
    assert gemms[1] - gemms[0] == pytest.approx(gemms[0], rel=0.02)
    tflops = machine.sm_count * machine.sm_gflops / 1e3
    assert gemms[2] == pytest.approx(2 * 8192 * 8192 * 16384 / tflops / 1e6, rel=0.01)
    width = "k" if op == Op.ALLGATHER_GEMM else "n"
    calls = [predict(**{width: size}).communication_us for size in (2048, 4096, 16384)]
    assert calls[2] - calls[1] == pytest.approx(6 * (calls[1] - calls[0]))
    start = calls[0] - (calls[1] - calls[0])
    assert machine.link_latency_us <= start < machine.link_latency_us + 20
    # A link measures an all-reduce's rate; where bytes go one way only they take less time.
    bytes_us = (calls[2] - calls[1]) * machine.link_gbps * 1e3 / (8192 * (16384 - 4096) * 2)
    assert 0.85 < bytes_us < 1.05 if op == Op.GEMM_ALLREDUCE else 0.6 < bytes_us < 0.75


@pytest.mark.parametrize("machine", [hopper(), hopper(peer_gbps=350.0), cpu()], ids=str)
def test_predict_all_to_all_knows_no_rows(machine: Machine) -> None:
    problem = big(op=Op.GEMM_ALLTOALL)
    assert [total(plan, machine) for plan in plans.candidates(problem, machine)] == [0.0, 0.0]


# --- chunks beside a GEMM ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ctas", [4, 16])
@pytest.mark.parametrize("heights", [[64], [16, 48], [48, 16], [8] * 8, [16, 8, 40]], ids=str)
@pytest.mark.parametrize("k", [SHORT_K, 2048, 28672])
def test_price_chunks_follow_their_last_tile_and_the_call_before(kind, ctas, heights, k) -> None:
    timeline = Timeline(make(kind, heights, problem=big(k=k), max_ctas=ctas), hopper(windows=True))
    waits, calls = timeline.of("wait_for_tiles"), timeline.of("collective")
    assert len(waits) == len(calls) == len(heights)
    free, by_host = 0.0, []
    for computed, wait, call in zip(timeline.computed, waits, calls, strict=True):
        assert wait["ends"] >= computed
        assert wait["ends"] - max(computed, wait["begins"]) <= 10.0
        ready = max(wait["ends"], free)
        assert call["begins"] >= ready
        if call["begins"] > ready:  # nothing else holds it up but the host
            by_host.append(call["begins"])
        free = call["ends"]
    # The host issues chunk after chunk.
    assert len({round(b - a, 9) for a, b in itertools.pairwise(by_host)}) <= 1
    assert len(by_host) < 2 or k == SHORT_K
    busy = lengths(timeline.spans("collective"))
    assert timeline.expected.communication_us == pytest.approx(sum(busy))
    # Each has a start, and then its bytes at one rate.
    if len(heights) > 1 and heights[0] != heights[-1]:
        each = (busy[0] - busy[-1]) / (heights[0] - heights[-1])
        start = busy[0] - each * heights[0]
        assert 0.0 < start < 60.0
        assert busy == pytest.approx([start + each * height for height in heights])


@pytest.mark.parametrize(
    ("machine", "comm_sms", "max_ctas", "waits"),
    [
        (hopper(), 16, 16, False),
        (hopper(), 16, 17, True),
        (hopper(), 0, 1, True),
        (hopper(), 23, 0, True),  # NCCL's own choice is 24
        (hopper(), 24, 0, False),
        (slow(), 3, 0, True),  # and 4 on a slow link
        (slow(), 4, 0, False),
    ],
)
def test_price_chunk_without_room_waits_for_the_gemm(machine, comm_sms, max_ctas, waits) -> None:
    timeline = Timeline(make("plain", [8, 56], comm_sms=comm_sms, max_ctas=max_ctas), machine)
    ((_, gemm_end),) = timeline.spans("gemm")
    first, _ = timeline.spans("collective")
    assert (first[0] >= gemm_end) == waits
    assert (first[0] < gemm_end / 2) == (not waits)


# Heights of chunks, multiples of 8 that sum up to 64.
cuts = st.sets(st.integers(1, 7)).map(
    lambda inner: [8 * (b - a) for a, b in itertools.pairwise([0, *sorted(inner), 8])]
)


# --- all-gathers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", GATHERS)
@pytest.mark.parametrize("ctas", [4, 16])
@pytest.mark.parametrize("heights", [[64], [16, 48], [8] * 8, [4, 20, 40]], ids=str)
@pytest.mark.parametrize("k", [SHORT_K, 2048, 28672])
def test_price_gather_computes_own_rows_then_what_arrives(kind, ctas, heights, k) -> None:
    machine = hopper(windows=True)
    timeline = Timeline(make(kind, heights, problem=big(k=k), max_ctas=ctas), machine)
    copies, launches = timeline.of("copy"), timeline.of("gemm")
    calls = timeline.spans("collective")
    # Before anything else this rank's rows are copied.
    assert max(copy["ends"] for copy in copies) <= launches[0]["begins"]
    assert launches[0]["begins"] <= calls[0][0]
    free = launches[0]["ends"]
    for call, launch in zip(calls, launches[1:], strict=True):
        assert launch["begins"] >= max(free, call[1])
        free = launch["ends"]
    assert timeline.expected.gemm_us == pytest.approx(
        sum(launch["ends"] - launch["begins"] for launch in launches)
    )
    # Each takes whole rounds of its tiles, and the last one's has all SMs.
    if k != SHORT_K:
        tile_us = 2 * 128 * 128 * k / (machine.sm_gflops * 1e3)
        for launch in launches:
            rounds = math.ceil((launch["end_tile"] - launch["first_tile"]) / launch["ctas"])
            took = launch["ends"] - launch["begins"]
            assert took == pytest.approx(rounds * tile_us, rel=0.12, abs=4)
    assert launches[-1]["ctas"] == machine.sm_count


# --- CPU --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [Op.GEMM_ALLREDUCE, Op.GEMM_REDUCESCATTER, Op.ALLGATHER_GEMM])
def test_price_on_cpu_calls_one_by_one_and_computes_by_the_tile(op: Op) -> None:
    machine = cpu()
    problem = big(m=2048, n=2048, k=512, dtype=DType.FLOAT32, op=op)
    heights = [2, 6] if op == Op.GEMM_ALLREDUCE else [1, 3]
    timeline = Timeline(row_panels(problem, heights, transport="gloo", lanes=2), machine)
    check(timeline, one_thread=True)
    calls = timeline.spans("send_receive" if op == Op.ALLGATHER_GEMM else "collective")
    assert calls[1][0] >= calls[0][1]
    # A quarter and three of 4 or 16 MiB at 1 GB/s, and as much again.
    bytes_ = 2048 * (512 if op == Op.ALLGATHER_GEMM else 2048) * 4
    few, many = lengths(calls)
    assert many - few == pytest.approx(bytes_ / 2 / 1e3)
    assert few > machine.link_latency_us + bytes_ / 4 / 1e3
    gemm_us = 2 * 2048 * 2048 * 512 / (machine.sm_gflops * 1e3 * machine.sm_count)
    assert timeline.expected.gemm_us == pytest.approx(gemm_us, abs=5)
    assert timeline.expected.communication_us == pytest.approx(sum(lengths(calls)))


# --- machines ---------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(
    st.sampled_from(ALL_KINDS),
    cuts,
    st.sampled_from([SHORT_K, 2048, 8192]),
    st.sampled_from([4, 8, 16]),
    st.floats(20, 500),
    st.floats(1, 100),
    st.floats(1.05, 3.0),
)
def test_predict_of_worse_machines_is_not_better(kind, heights, k, ctas, gbps, latency, by) -> None:
    machine = hopper(windows=True, link_gbps=gbps, link_latency_us=latency)
    plan = make(kind, heights, problem=big(k=k), max_ctas=ctas)
    for each in (plan, make_sequential(big(k=k), machine)):
        before = total(each, machine)
        # Between them numbers of one kind of link become those of the other.
        if gbps / by >= 180 or gbps <= 30:
            worse = hopper(windows=True, link_gbps=gbps / by, link_latency_us=latency)
            assert total(each, worse) >= before
        worse = hopper(windows=True, link_gbps=gbps, link_latency_us=latency * by)
        assert total(each, worse) >= before
        if kind not in GATHERS or each != plan:  # own rows may hide all of a gather
            assert total(each, worse) > before
        worse = hopper(windows=True, link_gbps=gbps, link_latency_us=latency, sm_gflops=5600 / by)
        assert total(each, worse) >= before


@pytest.mark.parametrize("machine", [hopper(windows=True), slow(), cpu()], ids=str)
@pytest.mark.parametrize("field", ["m", "n", "k"])
def test_predict_of_more_work_costs_more(machine: Machine, field: str) -> None:
    gloo = {"transport": "gloo"} if machine.arch == 0 else {"comm_sms": 16, "max_ctas": 16}
    problems = [big(**{field: size}, dtype=DType.FLOAT32) for size in (2048, 4096, 8192, 16384)]
    for make_one in (
        lambda problem: make_sequential(problem, machine),
        lambda problem: row_panels(problem, 4, **gloo),
    ):
        times = [total(make_one(problem), machine) for problem in problems]
        assert all(a < b for a, b in itertools.pairwise(times))


def test_predict_refuses_an_invalid_plan() -> None:
    plan = make("plain", 8)
    plan.chunks = plan.chunks[1:]
    for ask in (plans.predict, lambda plan, machine: _plan.price_steps(plan, 0, machine)):
        with pytest.raises(ValueError, match="leaves tiles out"):
            ask(plan, hopper())


@pytest.mark.parametrize("field", ["sm_count", "sm_gflops", "link_gbps"])
def test_predict_of_an_unmeasured_machine_is_never(field: str) -> None:
    machine = hopper(windows=True)
    problem = Problem(4096, 4096, 4096, DType.BFLOAT16, 2)
    made = plans.candidates(problem, machine)
    setattr(machine, field, 0)
    for plan in made:
        assert plans.predict(plan, machine).total_us == float("inf")
