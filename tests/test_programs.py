"""Plans with a program: right results, gradients and deadlines on CPU, and what is refused."""

from __future__ import annotations

import json
import pickle
import random
import re

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import overlap_torch
import rank_pool
from checks import Failures, check_call, message_of
from operands import Case, rank_device, world_name
from ops import OPS, tensors_of
from overlap_torch import plan as plan_module
from overlap_torch.plan import (
    Editor,
    Machine,
    Memory,
    Plan,
    Problem,
    Program,
    Rectangle,
    Region,
    Transfer,
    Way,
    edit,
    use_plan,
    validate,
)
from programs import (
    EVEN,
    FEW,
    RAGGED,
    TILE,
    disturbed,
    how_to_edit,
    random_program,
    random_statements,
    template_plans,
    templates,
)
from test_autograd import output_gradients, right_gradients

CPU = Machine(arch=0, sm_count=2, sm_gflops=10.0, link_latency_us=50.0, link_gbps=2.0)
REDUCTIONS = ("gemm_allreduce", "gemm_reducescatter")


# --- results --------------------------------------------------------------------------------------------------


def check_templates(ops: list[str], cases: list[Case], chunks: list[int]) -> tuple[int, list[str]]:
    failures = Failures()
    world = dist.get_world_size()
    for op in ops:
        for case in cases:
            for count in chunks:
                for label, plan in template_plans(op, case, world, count):
                    with use_plan(plan):
                        for seed in (1, 2):
                            check_call(failures, case, label, seed=seed, op=op)
    return failures.result()


@pytest.mark.ranks((2, "gloo"))
def test_programs_of_templates_are_exact(ranks):
    ranks.expect_no_failures(check_templates, list(OPS), [RAGGED], [2])


@pytest.mark.long
@pytest.mark.ranks((2, "gloo"), (3, "gloo"), (4, "gloo"), (8, "gloo"))
@pytest.mark.parametrize("op", list(OPS))
def test_programs_of_templates_are_exact_in_chunks_of_any_number(ranks, op):
    ranks.expect_no_failures(check_templates, [op], [RAGGED, EVEN, FEW], [1, 3])


def check_gradients_under_programs() -> tuple[int, list[str]]:
    failures = Failures()
    device, rank, world = rank_device(), dist.get_rank(), dist.get_world_size()
    plans = [
        plan
        for op in ("gemm_allreduce", "gemm_reducescatter", "allgather_gemm", "gemm_alltoall")
        for _, plan in template_plans(op, EVEN, world, 2)[:1]
    ]
    # What their backward calls: the other op, with N and K exchanged.
    back = EVEN.with_(n=EVEN.k, k=EVEN.n)
    plans += [
        plan
        for op in ("gemm_reducescatter", "allgather_gemm", "gemm_alltoall")
        for _, plan in template_plans(op, back, world, 2)[:1]
    ]
    for plan in plans:
        plan_module.set_plan(plan)
    for op in ("gemm_allreduce", "gemm_reducescatter", "allgather_gemm", "gemm_alltoall"):
        arguments = OPS[op].arguments(EVEN, rank, world, device)
        leaves = tensors_of(arguments)
        for leaf in leaves:
            leaf.requires_grad_()
        outputs = tensors_of(OPS[op].wrapper(*arguments, group=world_name()))
        torch.autograd.backward(outputs, output_gradients(op, outputs, rank))
        right = right_gradients(op, EVEN, world, device, 0, range(len(outputs)))
        failures.expect_equal([leaf.grad for leaf in leaves], right, "gradients of", op)
    plan_module.clear_plans()
    return failures.result()


@pytest.mark.ranks((2, "gloo"))
def test_programs_serve_gradients(ranks):
    ranks.expect_no_failures(check_gradients_under_programs)


def run_program(text: str, op: str) -> tuple[int, list[str]]:
    failures = Failures()
    with use_plan(plan_module.from_json(text)):
        check_call(failures, EVEN, seed=3, op=op)
    return failures.result()


def draw_programs(ranks, op: str, examples: int) -> None:
    problem = OPS[op].problem(EVEN, ranks.world)

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(st.integers(0, 2**32))
    def check(seed):
        plan = random_program(problem, seed)
        ranks.expect_no_failures(run_program, plan_module.to_json(plan), op)

    check()


@pytest.mark.ranks((2, "gloo"))
@pytest.mark.parametrize("op", [*REDUCTIONS, "allgather_gemm"])
def test_programs_drawn_at_random_are_exact(ranks, op):
    draw_programs(ranks, op, 2)


@pytest.mark.long
@pytest.mark.ranks((3, "gloo"), (4, "gloo"), (8, "gloo"))
@pytest.mark.parametrize("op", [*REDUCTIONS, "allgather_gemm"])
def test_programs_drawn_at_random_are_exact_on_many_ranks(ranks, op):
    draw_programs(ranks, op, 20)


def draw_faults(ranks, op: str, examples: int) -> int:
    """How many were refused; all others gave right results."""
    problem = OPS[op].problem(EVEN, ranks.world)
    refused = []

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(st.integers(0, 2**32))
    def check(seed):
        what, plan = disturbed(random_program(problem, seed), seed + 1)
        try:
            validate(plan)
        except ValueError as error:
            assert "rank" in str(error), what
            refused.append(what)
            return
        ranks.expect_no_failures(run_program, plan_module.to_json(plan), op)

    check()
    return len(refused)


@pytest.mark.ranks((2, "gloo"))
@pytest.mark.parametrize("op", REDUCTIONS)
def test_programs_with_a_fault_are_refused_or_right(ranks, op):
    assert draw_faults(ranks, op, 8) >= 2


@pytest.mark.long
@pytest.mark.ranks((3, "gloo"), (4, "gloo"))
@pytest.mark.parametrize("op", [*REDUCTIONS, "allgather_gemm"])
def test_programs_with_a_fault_are_refused_or_right_on_many_ranks(ranks, op):
    assert draw_faults(ranks, op, 100) > 20


def strange(op: str, world: int, seed: int) -> Plan:
    """A program that is right, and a few statements of any kind behind it or in front of it."""
    problem = OPS[op].problem(EVEN, world)
    draw = random.Random(seed)
    p = edit(problem, **how_to_edit(problem))
    if draw.random() < 0.3:
        random_statements(p, seed, draw.randrange(1, 3))
    if op == "gemm_alltoall":
        for to in range(1, world):
            p.push(p.message(p.rank + to), to=p.rank + to)
    else:
        for step in range(1, world) if op in REDUCTIONS else []:
            part = p.part(p.rank - step)
            p.push(part, to=p.rank + 1, reduce=True, needs=needs_all(p, part))
        for step in range(world - 1) if op != "gemm_reducescatter" else []:
            p.push(p.part(p.rank - step), to=p.rank + 1)
    if draw.random() < 0.8:
        random_statements(p, seed + 1, draw.randrange(1, 3))
    return p.plan()


def draw_strange_programs(ranks, op: str, seeds: range) -> int:
    """How many were plans, all of which gave right results."""
    taken = 0
    for seed in seeds:
        try:
            plan = strange(op, ranks.world, seed)
        except ValueError as error:
            assert str(error)
            continue
        taken += 1
        ranks.expect_no_failures(run_program, plan_module.to_json(plan), op)
    return taken


@pytest.mark.ranks((2, "gloo"))
@pytest.mark.parametrize("op", [*REDUCTIONS, "allgather_gemm", "gemm_alltoall"])
def test_programs_of_any_statements_are_refused_or_right(ranks, op):
    assert 1 <= draw_strange_programs(ranks, op, range(24)) < 24


@pytest.mark.long
@pytest.mark.ranks((3, "gloo"), (4, "gloo"))
@pytest.mark.parametrize("op", [*REDUCTIONS, "allgather_gemm", "gemm_alltoall"])
def test_programs_of_any_statements_are_refused_or_right_on_many_ranks(ranks, op):
    assert draw_strange_programs(ranks, op, range(400)) >= 10


TEMPLATES = ("row_panels", "packed", "ring", "double_ring", "one_shot", "two_shot", "at_once")


def test_templates_are_there_by_name():
    problem = Problem(64, 32, 24, "float32", 4)
    for name in TEMPLATES:
        make = getattr(plan_module, name)
        assert name in plan_module.__all__
        arguments = [problem] if name in ("at_once", "one_shot", "two_shot") else [problem, 2]
        where = {} if name == "at_once" else {"transport": "gloo", "tile": TILE}
        made = make(*arguments, **where)
        validate(made)
        assert bool(made.program.transfers) == (name not in ("row_panels", "packed", "at_once"))
    validate(plan_module.hierarchical(problem, 2, transport="gloo", tile=TILE))


def tune_with_a_program() -> tuple[int, list[str]]:
    failures = Failures()
    world = dist.get_world_size()
    case = EVEN
    problem = OPS["gemm_allreduce"].problem(case, world)
    ring = plan_module.ring(problem, 2, transport="gloo", tile=TILE)
    tuned = overlap_torch.tune(
        [problem], most=1, repeats=2, cache=False, plans=[ring], device="cpu"
    )
    measured = [plan for plan, _ in tuned[0].times]
    failures.expect(None if ring in measured else f"measured {measured}")
    failures.expect(None if tuned[0].source == "measured" else str(tuned[0]))
    check_call(failures, case, "after tuning", op="gemm_allreduce")
    plan_module.clear_plans()
    return failures.result()


@pytest.mark.ranks((2, "gloo"))
def test_programs_are_tuned_beside_the_planners_plans(ranks):
    ranks.expect_no_failures(tune_with_a_program)


# --- deadlines and agreement ----------------------------------------------------------------------------------


def call_late() -> str:
    """In the second call rank 1 is held up in the middle, for longer than the deadline."""
    world, rank = dist.get_world_size(), dist.get_rank()
    _, plan = template_plans("gemm_allreduce", EVEN, world, 2)[0]
    plan_module.set_plan(plan)
    arguments = OPS["gemm_allreduce"].arguments(EVEN, rank, world, rank_device())
    overlap_torch.gemm_allreduce(*arguments)
    if rank == 1:
        torch.ops.overlap.delay_side_stream(6_000_000)
    return message_of(overlap_torch.gemm_allreduce, *arguments)


@pytest.mark.long
def test_programs_end_at_the_deadline_where_a_rank_is_late():
    outcomes = rank_pool.run_fresh(
        2, "gloo", call_late, environment={"OVERLAP_TIMEOUT_S": "3"}, timeout_s=60.0
    )
    assert outcomes[0].kind == "returned", outcomes[0]
    message = outcomes[0].value
    assert "rank 0: the receive from rank 1" in message or "rank 0: the send to rank 1" in message
    assert "did not end within 3 s" in message


def call_differently() -> str:
    """Two programs with as many transfers each, one on each rank."""
    world, rank = dist.get_world_size(), dist.get_rank()
    _, plan = template_plans("gemm_allreduce", EVEN, world, 1)[0]
    if rank == 1:
        transfers = list(plan.program.transfers)
        transfers[0], transfers[1] = transfers[1], transfers[0]
        plan.program = Program(0, transfers)
    plan_module.set_plan(plan)
    arguments = OPS["gemm_allreduce"].arguments(EVEN, rank, world, rank_device())
    return message_of(overlap_torch.gemm_allreduce, *arguments)


@pytest.mark.ranks((2, "gloo"))
def test_programs_that_differ_between_ranks_are_refused_by_all(ranks):
    for message in ranks.run(call_differently):
        assert "plan" in message and "rank" in message


# --- what is refused ------------------------------------------------------------------------------------------

PROBLEM = Problem(64, 32, 24, "float32", 4, "gemm_reducescatter")


def ring_by_hand(needs, steps=(1, 2, 3), problem=PROBLEM, streams=1) -> Plan:
    with edit(problem, tile=TILE, transport="gloo") as p:
        for share in p.chunks(2):
            for step in steps:
                part = p.part(p.rank - step, share)
                stream = step % streams
                p.push(part, to=p.rank + 1, reduce=True, needs=needs(p, part), stream=stream)
    return p.plan()


def needs_all(p, part):
    return [p.tiles(part), p.arrived(part)]


def test_program_by_hand_lowers_to_steps_that_are_shown_and_priced(tmp_path):
    plan = ring_by_hand(needs_all)
    assert len(plan.program.transfers) == 2 * 3 * 4
    explained = plan.explain(CPU)
    kinds = [step.kind for step in explained.steps]
    assert kinds.count("send_receive") == 2 * 3
    assert kinds.count("copy_rows") == 2 * 3
    assert "program of 24 transfers" in str(explained)
    assert explained.expected.total_us > 6 * 50.0  # each step a message's latency
    plan.plot(tmp_path / "ring.svg", CPU)
    assert (tmp_path / "ring.svg").stat().st_size > 1000


@pytest.mark.parametrize(
    "make, expected",
    [
        (lambda: ring_by_hand(lambda p, part: [p.arrived(part)]), "writes rank .*product.*while"),
        (
            lambda: ring_by_hand(lambda p, part: [p.tiles(part)], streams=2),
            "rank .*product.*while.*add the tiles or the transfer to what the other one needs",
        ),
        (lambda: ring_by_hand(needs_all, range(1, 3)), "rank .*in place of 0 1 2 3"),
        (lambda: ring_by_hand(needs_all, range(1, 5)), "rank .*a second time"),
    ],
    ids=["no tiles", "no arrival", "left out", "twice"],
)
def test_programs_with_a_race_or_a_wrong_sum_are_refused(make, expected):
    with pytest.raises(ValueError, match=f"(?s){expected}"):
        make()


def first_changed(**fields) -> Plan:
    plan = ring_by_hand(needs_all)
    transfers = list(plan.program.transfers)
    one = transfers[4]
    values = {name: getattr(one, name) for name in one.__fields__} | fields
    transfers[4] = Transfer(**values)
    plan.program = Program(0, transfers)
    return plan


def region(rank: int, row: int, rows: int = 8, memory: Memory = Memory.PRODUCT) -> Region:
    return Region(memory, rank, Rectangle(row, rows, 0, 32))


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({"stream": 4}, "transfer 4.*stream 4.*0 to 3"),
        ({"behind": [4]}, "transfer 4.*behind transfer 4.*0 to 3"),
        ({"behind": [2]}, "transfer 4.*behind transfer 2.*from rank 2 to 3.*rank 0 or 1"),
        ({"source": region(0, 60)}, "rows 60 to 68.*allowed are rows 0 to 64"),
        ({"source": region(9, 0)}, "of rank 9, allowed are 0 to 3"),
        ({"source": region(0, 0, 4)}, "4 x 32, the destination 8 x 32"),
        ({"source": region(0, 0, memory=Memory.GATHERED)}, "gathered, which gemm_reducescatter"),
        ({"source": region(0, 0, memory=Memory.SCRATCH)}, "scratch_rows"),
        ({"way": Way.COPY}, "goes to another rank: take the way push or pull"),
        ({"source": region(1, 0)}, "within a rank: take the way copy"),
        ({"tiles": [Rectangle(0, 65, 0, 32)]}, "needed tiles' place is rows 0 to 65"),
    ],
)
def test_transfers_that_cannot_be_made_are_refused_by_their_number(fields, expected):
    with pytest.raises(ValueError, match=f"(?s){expected}"):
        validate(first_changed(**fields))


def test_programs_beside_what_they_do_not_go_with_are_refused():
    def with_field(**fields):
        plan = ring_by_hand(needs_all)
        for name, value in fields.items():
            setattr(plan, name, value)
        return plan

    with pytest.raises(ValueError, match="program and 2 lanes, allowed is 1"):
        validate(with_field(resources=plan_module.Resources(lanes=2)))
    many = ring_by_hand(needs_all)
    many.program = Program(0, list(many.program.transfers) * 43)
    with pytest.raises(ValueError, match="1032 transfers, allowed are 1 to 1024"):
        validate(many)
    roomy = ring_by_hand(needs_all)
    roomy.program = Program(2**50, roomy.program.transfers)
    with pytest.raises(ValueError, match="scratch_rows = .*allowed are 0 to"):
        validate(roomy)
    with pytest.raises(ValueError, match="9 ranks, allowed are 2 to 8"):
        plan_module.ring(Problem(90, 8, 8, "float32", 9), transport="gloo")
    with pytest.raises(ValueError, match="ranks_per_host is 3, allowed are divisors of the 4"):
        plan_module.hierarchical(PROBLEM, 3, transport="gloo")
    with pytest.raises(ValueError, match="take one_shot or hierarchical"):
        plan_module.ring(Problem(0, 8, 8, "float32", 2, "gemm_alltoall"))


@pytest.mark.ranks((2, "gloo"))
def test_programs_beyond_the_memory_are_refused(ranks):
    for message in ranks.run(set_plan_of_much_scratch):
        assert re.search(
            r"program needs \d{13} bytes on rank 0 beside .*the device has \d+:", message
        )


def set_plan_of_much_scratch() -> str:
    _, plan = template_plans("gemm_allreduce", EVEN, dist.get_world_size(), 1)[0]
    plan.program = Program(2**35, plan.program.transfers)
    return message_of(plan_module.set_plan, plan)


def test_engines_of_peers_are_refused_over_nccl_and_taken_on_cpu():
    def made(by, transport):
        with edit(PROBLEM, tile=TILE, transport=transport) as p:
            for step in range(1, 4):
                p.push(p.part(p.rank - step), to=p.rank + 1, reduce=True, by=by)
        return p.plan()

    for by in ("any", "copy_engine", "sms", "nccl"):
        assert made(by, "gloo").program.transfers[0].by.name.lower() == by
    assert made("nccl", "nccl").program.transfers[0].by.name == "NCCL"
    for by in ("copy_engine", "sms"):
        with pytest.raises(ValueError, match=f"goes by {by}.*take by = nccl or any"):
            made(by, "nccl")


def messages(change) -> Plan:
    p = Editor(Problem(0, 16, 8, "float32", 3, "gemm_alltoall"), transport="gloo")
    change(p)
    return p.plan()


@pytest.mark.parametrize(
    "change, expected",
    [
        (lambda p: p.push(p.message(p.rank + 1), to=p.rank + 1), "leaves out.*from rank 0 to 2"),
        (lambda p: [p.push(p.message(1), to=1) for _ in range(2)], "sends twice.*from rank 0 to 1"),
        (lambda p: p.push(p.message(p.rank + 1), to=p.rank + 2), "shares of one message"),
        (lambda p: p.push(p.message(1).columns(0, 8), to=1), "cut into columns"),
        (lambda p: p.push(p.message(0), to=0, reduce=True), "adds nothing up"),
    ],
    ids=["left out", "twice", "another rank's", "columns", "reduces"],
)
def test_messages_that_do_not_arrive_once_are_refused(change, expected):
    with pytest.raises(ValueError, match=f"(?s){expected}"):
        messages(change)


# --- data -----------------------------------------------------------------------------------------------------


def test_programs_are_saved_compared_and_copied(tmp_path):
    problem = OPS["gemm_allreduce"].problem(RAGGED, 4)
    for name, make in templates(problem):
        plan = make(problem, 2, **how_to_edit(problem))
        plan_module.save(plan, tmp_path / "plan.json")
        again = plan_module.load(tmp_path / "plan.json")
        assert again == plan, name
        assert plan_module.decode(plan_module.encode(plan)) == plan
        assert pickle.loads(pickle.dumps(plan)) == plan
        assert hash(plan.program.transfers[0]) == hash(again.program.transfers[0])
        again.program = Program(again.program.scratch_rows, again.program.transfers[1:])
        assert again != plan
    data = plan_module.to_dict(plan)
    assert data["program"]["version"] == 1
    data["program"]["version"] = 2
    with pytest.raises(ValueError, match="program has version 2, this release reads 1"):
        plan_module.from_dict(data)


def test_plans_without_a_program_are_saved_as_before_and_described_by_the_schema():
    plain = plan_module.row_panels(
        Problem(64, 32, 24, "float32", 2), 2, transport="gloo", tile=TILE
    )
    data = plan_module.to_dict(plain)
    assert "program" not in data
    assert plan_module.from_dict(data) == plain
    schema = plan_module.schema()
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert set(schema["required"]) == set(data)
    with_program = plan_module.to_dict(ring_by_hand(needs_all))
    assert set(schema["properties"]) == set(with_program)
    transfer = schema["properties"]["program"]["properties"]["transfers"]["items"]
    assert set(transfer["required"]) == set(with_program["program"]["transfers"][0])
    assert transfer["properties"]["way"] == {"enum": ["push", "pull", "copy"]}
    json.dumps(schema)
