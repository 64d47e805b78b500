"""What the planner chooses, and what its cost model expects."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_torch import plan as plans
from overlap_torch.plan import (
    DType,
    Kernel,
    Layout,
    Machine,
    Plan,
    Problem,
    Schedule,
    Transport,
)

TRAIN_NK = [(8192, 7168), (8192, 2048), (4096, 3584), (16384, 4096)]


def hopper(**changes: object) -> Machine:
    """Two GPUs of 132 SMs on a fast link."""
    fields = {
        "arch": 90,
        "sm_count": 132,
        "sm_gflops": 5000.0,
        "has_sm80_kernels": True,
        "has_sm90_kernels": True,
        "link_latency_us": 35.0,
        "link_gbps": 300.0,
    }
    return Machine(**{**fields, **changes})


def ada(**changes: object) -> Machine:
    """GPUs without wgmma on PCIe."""
    fields = {"arch": 89, "sm_count": 58, "sm_gflops": 1500.0, "link_gbps": 12.0}
    return hopper(**{**fields, "has_sm90_kernels": False, **changes})


def cpu(**changes: object) -> Machine:
    fields = {"arch": 0, "sm_count": 2, "sm_gflops": 50.0, "link_latency_us": 200.0}
    return Machine(**{**fields, "link_gbps": 1.0, **changes})


def big(**changes: object) -> Problem:
    fields = {"m": 8192, "n": 8192, "k": 7168, "dtype": DType.BFLOAT16, "world_size": 2}
    return Problem(**{**fields, **changes})


machines = st.sampled_from([hopper(), hopper(windows=True), hopper(link_gbps=18.0), ada(), cpu()])
sizes = st.one_of(st.integers(0, 300), st.integers(0, 20_000), st.sampled_from([4096, 8192]))
problems = st.builds(
    Problem,
    m=sizes,
    n=sizes,
    k=sizes,
    dtype=st.sampled_from([DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32, DType.FLOAT64]),
    world_size=st.integers(1, 8),
)


@settings(max_examples=200, deadline=None)
@given(problems, machines)
def test_planner_candidates_are_valid_and_distinct(problem: Problem, machine: Machine) -> None:
    found = plans.candidates(problem, machine)
    assert found[0] == plans.make_sequential(problem, machine)
    assert found[0].schedule == Schedule.SEQUENTIAL
    for plan in found:
        plan.validate()
        assert plan.problem == problem
    for plan in found[1:]:
        assert plan.schedule == Schedule.OVERLAPPED
    assert len({tuple(plans.encode(plan)) for plan in found}) == len(found)


@settings(max_examples=200, deadline=None)
@given(problems, machines)
def test_planner_choice_is_a_candidate_clearly_better_than_the_sequence(
    problem: Problem, machine: Machine
) -> None:
    chosen = plans.make_plan(problem, machine)
    found = plans.candidates(problem, machine)
    assert chosen in found
    assert plans.make_plan(problem, machine) == chosen
    if chosen == found[0]:
        return
    times = [plans.predict(plan, machine).total_us for plan in found]
    assert plans.predict(chosen, machine).total_us == min(times)
    assert min(times) < 0.97 * times[0]


@pytest.mark.parametrize(
    "problem",
    [
        big(world_size=1),
        big(m=0),
        big(n=0),
        big(k=0),
        big(m=1),
        big(m=128),
        big(m=512, n=4096, k=3584),
    ],
)
def test_planner_takes_the_sequence_where_nothing_can_hide(problem: Problem) -> None:
    plan = plans.make_plan(problem, hopper())
    assert plan.schedule == Schedule.SEQUENTIAL
    assert plan.kernel == Kernel.LIBRARY
    assert plan.layout == Layout.ROW_MAJOR


@pytest.mark.parametrize("changes", [{"link_gbps": 0.0}, {"sm_gflops": 0.0}, {"sm_count": 0}])
def test_planner_takes_the_sequence_on_an_unmeasured_machine(changes: dict[str, object]) -> None:
    assert plans.make_plan(big(), hopper(**changes)).schedule == Schedule.SEQUENTIAL


@pytest.mark.parametrize(("m", "nk"), list(itertools.product([8192, 16384], TRAIN_NK)), ids=str)
def test_planner_overlaps_training_shapes_on_hopper(m: int, nk: tuple[int, int]) -> None:
    problem = big(m=m, n=nk[0], k=nk[1])
    plan = plans.make_plan(problem, hopper())
    assert plan.schedule == Schedule.OVERLAPPED
    assert plan.kernel in (Kernel.SM90_PINGPONG, Kernel.SM90_COOPERATIVE)
    assert plan.layout == Layout.ROW_MAJOR
    limits = {chunk.max_ctas for chunk in plan.chunks}
    assert limits == {plan.resources.comm_sms}
    assert limits <= {8, 16, 24}
    assert not plan.resources.window
    gain = plans.predict(plans.make_sequential(problem, hopper()), hopper()).total_us
    assert gain / plans.predict(plan, hopper()).total_us > 1.1


def test_planner_starts_small_where_communication_is_the_longer_part() -> None:
    plan = plans.make_plan(big(m=4096, k=2048), hopper())
    tiles = [chunk.tiles for chunk in plan.chunks]
    assert plan.schedule == Schedule.OVERLAPPED
    assert tiles[0] < max(tiles)


def test_planner_leaves_few_sms_on_a_slow_link() -> None:
    plan = plans.make_plan(big(m=4096, k=32768), hopper(link_gbps=18.0, link_latency_us=60.0))
    assert plan.schedule == Schedule.OVERLAPPED
    assert plan.resources.comm_sms in (4, 8)
    assert {chunk.max_ctas for chunk in plan.chunks} == {plan.resources.comm_sms}


def test_planner_tries_windows_only_where_they_work() -> None:
    def windows(machine: Machine) -> set[bool]:
        return {plan.resources.window for plan in plans.candidates(big(), machine)}

    assert windows(hopper()) == {False}
    assert windows(hopper(windows=True)) == {False, True}
    assert windows(hopper(windows=True, link_gbps=18.0)) == {False}


@pytest.mark.parametrize(
    ("problem", "machine", "kernels"),
    [
        (big(), hopper(), {Kernel.SM90_PINGPONG, Kernel.SM90_COOPERATIVE}),
        (big(dtype=DType.FLOAT16), hopper(), {Kernel.SM90_PINGPONG, Kernel.SM90_COOPERATIVE}),
        (big(), hopper(has_sm90_kernels=False), {Kernel.SM80}),
        (big(), ada(), {Kernel.SM80}),
        (big(), ada(has_sm80_kernels=False), {Kernel.LIBRARY}),
        (big(dtype=DType.FLOAT32), hopper(), {Kernel.LIBRARY}),
        (big(n=8190), hopper(), {Kernel.LIBRARY}),
        (big(k=7167), hopper(), {Kernel.LIBRARY}),
        (big(dtype=DType.FLOAT32), cpu(), {Kernel.LIBRARY}),
    ],
)
def test_planner_candidates_use_kernels_that_take_the_problem(
    problem: Problem, machine: Machine, kernels: set[Kernel]
) -> None:
    found = plans.candidates(problem, machine)[1:]
    assert {plan.kernel for plan in found} == kernels
    transport = Transport.GLOO if machine.arch == 0 else Transport.NCCL
    assert {chunk.transport for plan in found for chunk in plan.chunks} == {transport}


def test_planner_packs_only_flat_outputs() -> None:
    def layouts(m: int) -> set[Layout]:
        return {plan.layout for plan in plans.candidates(big(m=m, n=65536), hopper())[1:]}

    assert layouts(512) == {Layout.ROW_MAJOR, Layout.PACKED}
    assert layouts(4096) == {Layout.ROW_MAJOR}


def test_planner_overlaps_on_cpu() -> None:
    plan = plans.make_plan(big(m=2048, n=2048, k=2048, dtype=DType.FLOAT32), cpu())
    assert plan.schedule == Schedule.OVERLAPPED
    assert 2 <= len(plan.chunks) <= 4
    small = plans.make_plan(big(m=64, n=64, k=64, dtype=DType.FLOAT32), cpu())
    assert small.schedule == Schedule.SEQUENTIAL


def test_predict_sequence_is_gemm_then_one_call() -> None:
    machine = hopper()
    prediction = plans.predict(plans.make_sequential(big(), machine), machine)
    # 64 x 64 tiles in rounds of 132, each 2 * 128 * 128 * 7168 FLOP at 5000 GFLOP/s; 3 us before.
    gemm_us = 3 + -(-64 * 64 // 132) * 2 * 128 * 128 * 7168 / 5000e3
    call_us = 35 + 8192 * 8192 * 2 / 300e3
    assert prediction.gemm_us == pytest.approx(gemm_us)
    assert prediction.communication_us == pytest.approx(call_us)
    assert prediction.total_us == pytest.approx(gemm_us + call_us)


def panels(chunks: int | list[int], **changes: object) -> Plan:
    options = {"kernel": Kernel.SM90_COOPERATIVE, "comm_sms": 16, "max_ctas": 16}
    return plans.row_panels(big(), chunks, **{**options, **changes})


def test_predict_chunks_follow_their_last_tile_and_the_call_before() -> None:
    plan = panels([16, 48])
    tile_us = 2 * 128 * 256 * 7168 / 5000e3
    bytes_ = 8192 * 8192 * 2
    first_us = 35 + bytes_ / 4 / (0.91 * 300e3)
    second_us = 35 + bytes_ * 3 / 4 / (0.91 * 300e3)
    first_ready = 3 + -(-16 * 32 // 116) * tile_us
    gemm_us = 3 + -(-64 * 32 // 116) * tile_us
    end = max(first_ready + 4 + first_us, gemm_us + 4) + second_us
    prediction = plans.predict(plan, hopper())
    assert prediction.gemm_us == pytest.approx(gemm_us)
    assert prediction.communication_us == pytest.approx(first_us + second_us)
    assert prediction.total_us == pytest.approx(end + 6)


def test_predict_charges_what_a_plan_costs() -> None:
    machine = hopper(windows=True)

    def total(plan: Plan) -> float:
        return plans.predict(plan, machine).total_us

    assert total(panels(64 // 2)) > total(panels(8))  # each call has its latency
    assert total(panels(8, max_ctas=4)) > total(panels(8, max_ctas=8))
    # More CTAs than the GEMM leaves SMs to: nothing starts before its end.
    late = plans.predict(panels(8, comm_sms=4, max_ctas=16), machine)
    assert late.total_us > late.gemm_us + late.communication_us
    packed = plans.packed(
        big(), 8, kernel=Kernel.SM90_COOPERATIVE, comm_sms=16, max_ctas=16, band_rows=8
    )
    assert total(packed) > total(panels(8))  # the last chunk's unpacking shows


def test_predict_refuses_an_invalid_plan() -> None:
    plan = panels(8)
    plan.chunks = plan.chunks[1:]
    with pytest.raises(ValueError, match="leaves tiles out"):
        plans.predict(plan, hopper())


def test_machine_text_reads_back_exactly() -> None:
    machine = hopper(sm_gflops=1 / 3, link_gbps=1e-7, windows=True)
    read = plans._parse_machine(repr(machine))
    assert repr(read) == repr(machine)
    assert read.sm_gflops == 1 / 3
    assert (read.arch, read.windows, read.has_sm80_kernels) == (90, True, True)
