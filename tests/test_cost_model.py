"""What the cost model expects of a plan, against the same model in closed forms."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from machines import ada, big, cpu, hopper, slow, total
from overlap_torch import _plan
from overlap_torch import plan as plans
from overlap_torch.plan import Collective, DType, Kernel, Machine, Op, Plan, Problem

# The constants are measurements, which a new fit changes; the formulas below are not. Times in us, rates in GB/s or
# shares of the machine's.
SOURCE = (Path(__file__).resolve().parents[1] / "csrc/plan/cost_model.cc").read_text()


def constant(name: str) -> tuple[float, ...]:
    """The numbers that ``constexpr double|CallModel|int32_t name = ...;`` holds."""
    (text,) = re.findall(rf"^constexpr \w+ {name} =\s*([^;]+);", SOURCE, re.MULTILINE)
    return tuple(float(number) for number in text.strip("{}").split(","))


(GEMM_START,) = constant("kGemmStartUs")
(FORK_JOIN,) = constant("kForkJoinUs")
(WAIT,) = constant("kWaitUs")
(FIRST_ISSUE,) = constant("kFirstIssueUs")
(ISSUE,) = constant("kIssueUs")
(ISSUE_EXCHANGE,) = constant("kIssueExchangeUs")
(BESIDE,) = constant("kBesideCommunication")
(FEWER_SMS_EXPONENT,) = constant("kFewerSmsExponent")
(LOW_BANDS,) = constant("kLowBandRate")
(SM80,) = constant("kSm80Rate")
(SM80_ON_HOPPER,) = constant("kSm80RateOnHopper")
(COPY_START,) = constant("kCopyStartUs")
(COPY_GBPS,) = constant("kCopyGbps")
(FINISH_START,) = constant("kFinishStartUs")
(FINISH_GBPS,) = constant("kFinishGbps")
(SUM_SM_GBPS,) = constant("kSumSmGbps")
(WAIT_CPU,) = constant("kWaitCpuUs")
(FORK_JOIN_CPU,) = constant("kForkJoinCpuUs")
(CALL_CPU,) = constant("kCallCpuUs")
(COPY_CPU_GBPS,) = constant("kCopyCpuGbps")
(ONE_WAY,) = constant("kOneWayRate")
(BESIDE_GATHER,) = constant("kBesideGather")
(BESIDE_MANY_CTAS,) = constant("kBesideManyCtas")
# Start beyond the link's latency, share of the link's rate, a CTA's rate.
ALONE = constant("kAloneCall")[:2]
CALLS = {
    "plain": constant("kPlainCall"),
    "window": constant("kWindowCall"),
    "exchange": constant("kExchangeCall"),
    "scatter": constant("kPlainReduceScatter"),
    "window scatter": constant("kWindowReduceScatter"),
}
# And how many of the link's latencies a call takes.
SLOW_CALL = constant("kSlowLinkCall")
SLOW_EXCHANGE = constant("kSlowLinkExchangeCall")
GATHERS = {"gather": constant("kPlainAllGather"), "window gather": constant("kWindowAllGather")}

SHORT_K = 64  # with it all tiles are computed before the host has issued the first call
MIB = 2**20


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
        return plans.row_panels(problem, chunks, **options)
    if not isinstance(chunks, int):
        chunks = [64 * rows for rows in chunks]
    return plans.packed(problem, chunks, collective=Collective.EXCHANGE, **options)


def gemm_us(machine: Machine, k: int, share: float = 1.0, left: int = 16) -> float:
    """So much of 64 x 64 tiles of 128 x 128, beside communication that has `left` SMs."""
    tile_us = 2 * 128 * 128 * k / (machine.sm_gflops * 1e3)
    slower = BESIDE * (machine.sm_count / (machine.sm_count - left)) ** FEWER_SMS_EXPONENT
    return GEMM_START + share * 64 * 64 / machine.sm_count * tile_us * slower


def start_us(kind: str, machine: Machine) -> float:
    return {**CALLS, **GATHERS}[kind][0] + machine.link_latency_us


def call_us(kind: str, machine: Machine, bytes_: float, ctas: int) -> float:
    """A call that has the link to itself, on a fast link."""
    _, link, cta = {**CALLS, **GATHERS}[kind]
    return start_us(kind, machine) + bytes_ / 1e3 / min(cta * ctas, link * machine.link_gbps)


def finish_us(kind: str, bytes_: float) -> float:
    if kind == "exchange":
        return FINISH_START + bytes_ / 1e3 / FINISH_GBPS
    if kind == "window scatter":
        bytes_ /= 2  # this rank's part
    return COPY_START + bytes_ / 1e3 / COPY_GBPS if kind.startswith("window") else 0.0


@pytest.mark.parametrize(
    ("machine", "dtype", "rate", "call_start", "link_share"),
    [
        (hopper(), DType.BFLOAT16, 1.0, *ALONE),
        (hopper(windows=True), DType.FLOAT16, 1.0, *ALONE),
        (hopper(), DType.FLOAT32, 1 / 13, *ALONE),
        (slow(), DType.BFLOAT16, 1.0, ALONE[0], 1.1),
        (ada(), DType.BFLOAT16, 1.0, ALONE[0], 1.1),
    ],
)
def test_predict_sequence_is_gemm_then_one_call(
    machine, dtype, rate, call_start, link_share
) -> None:
    plan = plans.make_sequential(big(dtype=dtype), machine)
    prediction = plans.predict(plan, machine)
    flops = 2 * 8192 * 8192 * 7168
    bytes_ = 8192 * 8192 * (4 if dtype == DType.FLOAT32 else 2)
    gemm = GEMM_START + flops / (machine.sm_count * machine.sm_gflops * 1e3 * rate)
    call = call_start + machine.link_latency_us + bytes_ / (machine.link_gbps * 1e3 * link_share)
    assert prediction.gemm_us == pytest.approx(gemm)
    assert prediction.communication_us == pytest.approx(call)
    assert prediction.total_us == pytest.approx(gemm + call)


@pytest.mark.parametrize(
    ("op", "width"), [(Op.GEMM_REDUCESCATTER, 8192), (Op.ALLGATHER_GEMM, 7168)]
)
@pytest.mark.parametrize("machine", [hopper(), hopper(windows=True), slow()], ids=str)
def test_predict_sequence_one_way_moves_its_bytes_faster(op, width, machine) -> None:
    prediction = plans.predict(plans.make_sequential(big(op=op), machine), machine)
    start, share = ALONE if machine.link_gbps > 60 else (ALONE[0], 1.0)
    rate = machine.link_gbps * 1e3 * share * ONE_WAY
    call = start + machine.link_latency_us + 8192 * width * 2 / rate
    assert prediction.communication_us == pytest.approx(call)
    assert prediction.total_us == pytest.approx(prediction.gemm_us + call)


@pytest.mark.parametrize("machine", [hopper(), slow(), ada()], ids=str)
@pytest.mark.parametrize("rows", [1026, 1090, 1151])
def test_predict_sequence_computes_no_rows_beyond_the_matrix(rows: int, machine: Machine) -> None:
    def gemm_us(m: int) -> float:
        sequence = plans.make_sequential(big(m=m), machine)
        return plans.predict(sequence, machine).gemm_us - GEMM_START

    assert gemm_us(rows) == pytest.approx(gemm_us(1024) * rows / 1024)


@pytest.mark.parametrize("machine", [hopper(), hopper(peer_gbps=350.0), cpu()], ids=str)
def test_predict_all_to_all_knows_no_rows(machine: Machine) -> None:
    problem = big(m=0, op=Op.GEMM_ALLTOALL)
    assert [total(plan, machine) for plan in plans.candidates(problem, machine)] == [0.0, 0.0]


def test_predict_small_sequence_takes_a_tile_and_alone_no_call() -> None:
    machine = hopper()
    tile_us = 2 * 128 * 128 * 7168 / (machine.sm_gflops * 1e3)
    prediction = plans.predict(plans.make_sequential(big(m=1, n=8, world_size=1), machine), machine)
    assert prediction.total_us == prediction.gemm_us == pytest.approx(GEMM_START + tile_us)
    assert total(plans.make_sequential(big(m=0), machine), machine) == 0.0


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("ctas", [4, 16])
@pytest.mark.parametrize("heights", [[64], [16, 48], [48, 16], [8] * 8, [16, 8, 40]], ids=str)
@pytest.mark.parametrize("k", [SHORT_K, 2048, 28672])
def test_predict_chunks_follow_their_last_tile_and_the_call_before(kind, ctas, heights, k) -> None:
    machine = hopper(windows=True)
    plan = make(kind, heights, problem=big(k=k), max_ctas=ctas)
    end = busy = 0.0
    bytes_ = 0.0
    for i, height in enumerate(heights):
        bytes_ = height * 2 * MIB  # a tile row is 128 x 8192 elements of 2 bytes
        computed = gemm_us(machine, k, sum(heights[: i + 1]) / 64) + WAIT
        call = call_us(kind, machine, bytes_, ctas)
        busy += call
        issue = ISSUE_EXCHANGE if kind == "exchange" else ISSUE
        end = max(computed, end, FIRST_ISSUE + issue * i) + call
    prediction = plans.predict(plan, machine)
    assert prediction.gemm_us == pytest.approx(gemm_us(machine, k))
    assert prediction.communication_us == pytest.approx(busy)
    expected = end + finish_us(kind, bytes_) + FORK_JOIN
    assert prediction.total_us == pytest.approx(expected)


@pytest.mark.parametrize("comm_sms", [8, 9, 10])
def test_predict_sums_that_find_no_sm_wait_for_the_gemm(comm_sms) -> None:
    """Small chunks, more of them than can be summed on the SMs that their exchange leaves."""
    machine, k, ctas = hopper(windows=True), 7168, 8
    plan = make("exchange", [2] * 32, problem=big(k=k), max_ctas=ctas, comm_sms=comm_sms)
    gemm = gemm_us(machine, k, left=comm_sms)
    chunk, all_bytes = 4 * MIB, 128 * MIB
    busy = all_bytes / 1e3 / CALLS["exchange"][2] / gemm  # CTAs, on average
    rate = SUM_SM_GBPS * (comm_sms - busy) * 1e3
    first_end = gemm_us(machine, k, 1 / 32, left=comm_sms) + WAIT
    first_end += call_us("exchange", machine, chunk, ctas)
    left_over = all_bytes - rate * (gemm - first_end)
    last_call = WAIT + call_us("exchange", machine, chunk, ctas)
    assert left_over / 1e3 / FINISH_GBPS > last_call, "or the last chunk comes too late"
    expected = gemm + left_over / 1e3 / FINISH_GBPS + FINISH_START + FORK_JOIN
    assert total(plan, machine) == pytest.approx(expected)


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
def test_predict_chunk_without_room_waits_for_the_gemm(machine, comm_sms, max_ctas, waits) -> None:
    plan = make("plain", [8, 56], comm_sms=comm_sms, max_ctas=max_ctas)
    prediction = plans.predict(plan, machine)
    one_by_one = prediction.gemm_us + WAIT + prediction.communication_us + FORK_JOIN
    assert prediction.gemm_us == pytest.approx(gemm_us(machine, 7168, left=comm_sms))
    if waits:
        assert prediction.total_us == pytest.approx(one_by_one)
    else:
        assert prediction.total_us < one_by_one - 10


def test_predict_library_computes_a_chunk_a_call_and_waits_for_no_sms() -> None:
    machine = hopper()
    plan = make("plain", [16, 48], kernel=Kernel.LIBRARY, comm_sms=4)
    tile_us = 2 * 128 * 128 * 7168 / (machine.sm_gflops * 1e3)
    first, second = (GEMM_START + math.ceil(h * 64 / 128) * tile_us for h in (16, 48))
    calls = [call_us("plain", machine, h * 2 * MIB, 16) for h in (16, 48)]
    prediction = plans.predict(plan, machine)
    assert prediction.gemm_us == pytest.approx(first + second)
    end = max(first + WAIT + calls[0], first + second + WAIT) + calls[1]
    assert prediction.total_us == pytest.approx(end + FORK_JOIN)


@pytest.mark.parametrize(
    ("kind", "ctas", "lanes", "world"),
    [
        *itertools.product(["plain", "scatter", "exchange"], [4, 8], [1], [2]),
        *itertools.product(["plain", "scatter", "exchange"], [2, 4], [2], [2]),
        *itertools.product(["plain", "scatter"], [4, 8], [1], [4]),
    ],
)
def test_predict_slow_link_counts_latencies_and_dislikes_many_ctas(
    kind, ctas, lanes, world
) -> None:
    machine = slow(link_gbps=28.0)
    one_way = ONE_WAY if kind == "scatter" else 1.0
    problem = big(k=32768, world_size=world)
    plan = make(kind, 1, problem=problem, max_ctas=ctas, lanes=lanes, comm_sms=ctas * lanes)
    prediction = plans.predict(plan, machine)
    many = BESIDE_MANY_CTAS if world == 2 and ctas * lanes > 4 else 1.0
    gemm = (gemm_us(machine, 32768, left=ctas * lanes) - GEMM_START) * many + GEMM_START
    assert prediction.gemm_us == pytest.approx(gemm)
    start, share, cta, latencies = SLOW_EXCHANGE if kind == "exchange" else SLOW_CALL
    rate = min(ctas * cta, share * machine.link_gbps) * one_way * 1e3
    call = start + latencies * machine.link_latency_us + 64 * 2 * MIB / rate
    assert prediction.communication_us == pytest.approx(call)
    expected = gemm + WAIT + call + finish_us(kind, 64 * 2 * MIB) + FORK_JOIN
    assert prediction.total_us == pytest.approx(expected)


def gather_launches_us(
    machine: Machine, k: int, arriving: list[int], left: int = 16
) -> list[float]:
    """Each launch of an all-gather's GEMM: on the SMs that are left, and the last one on all SMs."""
    tile_us = 2 * 128 * 128 * k / (machine.sm_gflops * 1e3)
    times = []
    # Which tiles a launch takes: test_plan_rounds.
    launches = _plan.gather_launches(arriving, 2, machine.sm_count - left, machine.sm_count)
    for begin, end, at_once in launches:
        slower = BESIDE_GATHER * (at_once / machine.sm_count) ** (1 - FEWER_SMS_EXPONENT)
        times.append(GEMM_START + math.ceil((end - begin) / at_once) * tile_us * slower)
    return times


@pytest.mark.parametrize("kind", GATHERS)
@pytest.mark.parametrize("ctas", [4, 16])
@pytest.mark.parametrize("heights", [[64], [16, 48], [8] * 8, [4, 20, 40]], ids=str)
@pytest.mark.parametrize("k", [SHORT_K, 2048, 28672])
def test_predict_gather_computes_own_rows_then_what_arrives(kind, ctas, heights, k) -> None:
    machine = hopper(windows=True)
    plan = make(kind, heights, problem=big(k=k), max_ctas=ctas)
    tiles = [height * 64 // 2 for height in heights]
    own, *launches = gather_launches_us(machine, k, [64 * 64 // 2, *tiles])
    # Before anything else this rank's rows are copied.
    start = FORK_JOIN + sum(COPY_START + h * 64 * k * 2 / 1e3 / COPY_GBPS for h in heights)
    now = max(start + own, FIRST_ISSUE + ISSUE * len(heights))
    gemm, busy, arrived = own, 0.0, 0.0
    for i, height in enumerate(heights):
        bytes_ = height * 128 * k * 2  # of both ranks' input rows
        call = call_us(kind, machine, bytes_, ctas)
        busy += call
        arrived = max(start, arrived, FIRST_ISSUE + ISSUE * i) + call
        gemm += launches[i]
        now = max(now, arrived + FORK_JOIN) + launches[i]
    prediction = plans.predict(plan, machine)
    assert prediction.gemm_us == pytest.approx(gemm)
    assert prediction.communication_us == pytest.approx(busy)
    assert prediction.total_us == pytest.approx(now + FORK_JOIN)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_predict_gather_leaves_out_this_ranks_rows(world: int) -> None:
    machine = hopper(windows=True)
    plan = make("window gather", 1, problem=big(world_size=world))
    tiles = 64 * 64 // world
    launches = gather_launches_us(machine, 7168, [tiles, 64 * 64 - tiles])
    assert plans.predict(plan, machine).gemm_us == pytest.approx(sum(launches))


def test_predict_gather_on_cpu_copies_calls_and_computes() -> None:
    machine = cpu()
    problem = big(m=2048, n=2048, k=512, dtype=DType.FLOAT32, op=Op.ALLGATHER_GEMM)
    plan = plans.row_panels(problem, [1, 3], transport="gloo")
    tile_us = 2 * 256 * 512 * 512 / (machine.sm_gflops * 1e3 * machine.sm_count)
    calls, arrived, now = [], WAIT_CPU, 4 * 4 * tile_us
    for rows in (1, 3):
        bytes_ = 2 * rows * 256 * 512 * 4
        calls.append(CALL_CPU + machine.link_latency_us + bytes_ / 1e3)
        arrived += bytes_ / 2 / 1e3 / COPY_CPU_GBPS + calls[-1]
        now = max(now, arrived) + rows * 4 * tile_us
    prediction = plans.predict(plan, machine)
    assert prediction.communication_us == pytest.approx(sum(calls))
    assert prediction.gemm_us == pytest.approx(32 * tile_us)
    assert prediction.total_us == pytest.approx(now + FORK_JOIN_CPU)


def test_predict_two_lanes_share_the_link() -> None:
    machine = hopper()
    plan = make("plain", [40, 24], problem=big(k=SHORT_K), max_ctas=24, comm_sms=24, lanes=2)
    begin = [FIRST_ISSUE, FIRST_ISSUE + ISSUE]
    start = start_us("plain", machine)
    rate = CALLS["plain"][1] * machine.link_gbps * 1e3
    assert rate < 24 * CALLS["plain"][2] * 1e3  # one call fills the link
    # Alone until the second flows, then half the link each until the smaller ends, then alone.
    ends_second = begin[1] + start + 2 * 24 * 2 * MIB / rate
    ends_first = begin[0] + start + 64 * 2 * MIB / rate
    assert ends_second < ends_first
    prediction = plans.predict(plan, machine)
    assert prediction.total_us == pytest.approx(ends_first + FORK_JOIN)
    assert prediction.communication_us == pytest.approx(ends_first + ends_second - sum(begin))


def test_predict_two_lanes_of_few_ctas_do_not_slow_each_other() -> None:
    machine = hopper()
    plan = make("plain", [40, 24], problem=big(k=SHORT_K), max_ctas=8, lanes=2)
    assert 2 * 8 * CALLS["plain"][2] < CALLS["plain"][1] * machine.link_gbps
    calls = [call_us("plain", machine, rows * 2 * MIB, 8) for rows in (40, 24)]
    prediction = plans.predict(plan, machine)
    assert prediction.communication_us == pytest.approx(sum(calls))
    end = max(FIRST_ISSUE + calls[0], FIRST_ISSUE + ISSUE + calls[1])
    assert prediction.total_us == pytest.approx(end + FORK_JOIN)


@pytest.mark.parametrize("kind", CALLS)
def test_predict_two_lanes_hide_call_starts(kind: str) -> None:
    # One call fills the link. In one lane it idles through all 8 starts; in two only through those that
    # coincide, at most the 4 of one lane, and through the time until the second call is issued.
    machine = hopper(windows=True)
    one, two = (
        total(make(kind, 8, problem=big(k=SHORT_K), comm_sms=24, max_ctas=24, lanes=lanes), machine)
        for lanes in (1, 2)
    )
    assert one - two >= 4 * start_us(kind, machine) - ISSUE


# Heights of chunks, multiples of 8 that sum up to 64.
cuts = st.sets(st.integers(1, 7)).map(
    lambda inner: [8 * (b - a) for a, b in itertools.pairwise([0, *sorted(inner), 8])]
)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([*CALLS, *GATHERS]),
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
    for each in (plan, plans.make_sequential(big(k=k), machine)):
        before = total(each, machine)
        if gbps / by >= 60 or gbps < 60:  # between them another model begins
            worse = hopper(windows=True, link_gbps=gbps / by, link_latency_us=latency)
            assert total(each, worse) >= before
        worse = hopper(windows=True, link_gbps=gbps, link_latency_us=latency * by)
        assert total(each, worse) >= before
        if kind not in GATHERS or each != plan:  # own rows may hide all of a gather
            assert total(each, worse) > before
        worse = hopper(windows=True, link_gbps=gbps, link_latency_us=latency, sm_gflops=5600 / by)
        assert total(each, worse) >= before


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([*CALLS]),
    cuts,
    st.sampled_from([SHORT_K, 2048, 8192]),
    st.sampled_from([4, 8, 16]),
    st.integers(2, 4),
    st.floats(60, 500),
)
def test_predict_lanes_lie_between_one_lane_and_the_link(
    kind, heights, k, ctas, lanes, gbps
) -> None:
    machine = hopper(windows=True, link_gbps=gbps)
    one, more = (
        make(kind, heights, problem=big(k=k), max_ctas=ctas, comm_sms=ctas * lanes, lanes=count)
        for count in (1, lanes)
    )
    # Chunks that share the link may all end late, and are summed then.
    sums = 128 * MIB / 1e3 / FINISH_GBPS if kind == "exchange" else 0.0
    assert total(more, machine) <= total(one, machine) * (1 + 1e-9) + sums
    rate = gbps * CALLS[kind][1] * 1e3
    assert total(more, machine) >= FIRST_ISSUE + start_us(kind, machine) + 64 * 2 * MIB / rate
    last_us = call_us(kind, machine, 0, ctas)
    assert total(more, machine) > gemm_us(machine, k, left=ctas * lanes) + WAIT + last_us


@pytest.mark.parametrize("machine", [hopper(windows=True), slow(), cpu()], ids=str)
@pytest.mark.parametrize("field", ["m", "n", "k"])
def test_predict_of_more_work_costs_more(machine: Machine, field: str) -> None:
    gloo = {"transport": "gloo"} if machine.arch == 0 else {"comm_sms": 16, "max_ctas": 16}
    problems = [big(**{field: size}, dtype=DType.FLOAT32) for size in (2048, 4096, 8192, 16384)]
    for make_one in (
        lambda problem: plans.make_sequential(problem, machine),
        lambda problem: plans.row_panels(problem, 4, **gloo),
    ):
        times = [total(make_one(problem), machine) for problem in problems]
        assert all(a < b for a, b in itertools.pairwise(times))


def test_predict_rates_kernels_and_bands() -> None:
    def computing(machine: Machine, **options: object) -> float:
        return plans.predict(make("plain", 4, **options), machine).gemm_us - GEMM_START

    base = computing(hopper())
    assert computing(hopper(), band_rows=2) == pytest.approx(base / LOW_BANDS)
    assert computing(hopper(), kernel=Kernel.SM80) == pytest.approx(base / SM80_ON_HOPPER)
    assert computing(hopper(arch=80), kernel=Kernel.SM80) == pytest.approx(base / SM80)
    assert computing(hopper(sm_gflops=2800.0)) == pytest.approx(base * 2)


def test_predict_on_cpu_waits_and_calls_one_by_one() -> None:
    machine = cpu()
    problem = big(m=2048, n=2048, k=512, dtype=DType.FLOAT32)
    plan = plans.row_panels(problem, [2, 6], transport="gloo")
    tile_us = 2 * 256 * 512 * 512 / (machine.sm_gflops * 1e3 * machine.sm_count)
    ready = [GEMM_START + rows * 4 * tile_us + WAIT_CPU for rows in (2, 8)]
    alone = CALL_CPU + machine.link_latency_us
    calls = [alone + rows * 256 * 2048 * 4 / 1e3 for rows in (2, 6)]
    prediction = plans.predict(plan, machine)
    assert prediction.communication_us == pytest.approx(sum(calls))
    end = max(ready[0] + calls[0], ready[1]) + calls[1]
    assert prediction.total_us == pytest.approx(end + FORK_JOIN_CPU)
    sequential = plans.predict(plans.make_sequential(problem, machine), machine)
    assert sequential.total_us == pytest.approx(
        GEMM_START + 32 * tile_us + machine.link_latency_us + 2048 * 2048 * 4 / 1e3
    )


def test_predict_refuses_an_invalid_plan() -> None:
    plan = make("plain", 8)
    plan.chunks = plan.chunks[1:]
    with pytest.raises(ValueError, match="leaves tiles out"):
        plans.predict(plan, hopper())


def test_machine_text_reads_back_exactly() -> None:
    machine = hopper(sm_gflops=1 / 3, link_gbps=1e-7, windows=True)
    read = plans._parse_machine(repr(machine))
    assert repr(read) == repr(machine)
    assert read.sm_gflops == 1 / 3
    assert (read.arch, read.windows, read.has_sm80_kernels) == (90, True, True)


@pytest.mark.parametrize("field", ["sm_count", "sm_gflops", "link_gbps"])
def test_predict_of_an_unmeasured_machine_is_never(field: str) -> None:
    machine = hopper(windows=True)
    problem = Problem(4096, 4096, 4096, DType.BFLOAT16, 2)
    made = plans.candidates(problem, machine)
    setattr(machine, field, 0)
    for plan in made:
        assert plans.predict(plan, machine).total_us == float("inf")


@pytest.mark.parametrize("op", [Op.GEMM_ALLREDUCE, Op.GEMM_REDUCESCATTER, Op.ALLGATHER_GEMM])
def test_predict_on_cpu_counts_what_of_a_tile_is_in_the_matrix(op: Op) -> None:
    machine = cpu()
    problem = big(m=1500, n=64, k=64, dtype=DType.FLOAT32, op=op)
    gemm_us = 2 * 1500 * 64 * 64 / (machine.sm_gflops * 1e3 * machine.sm_count)
    sequence = plans.predict(plans.make_sequential(problem, machine), machine)
    assert sequence.gemm_us == pytest.approx(GEMM_START + gemm_us)
    overlapped = plans.predict(plans.row_panels(problem, 2, transport="gloo"), machine)
    start_us = 0.0 if op == Op.ALLGATHER_GEMM else GEMM_START
    assert overlapped.gemm_us == pytest.approx(start_us + gemm_us)
