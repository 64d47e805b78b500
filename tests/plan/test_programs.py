"""Plans with a program: right results, gradients and deadlines on CPU, and what is refused."""

import itertools
import json
import pickle
import re

import pytest
import torch
import torch.distributed as dist

import overlap_torch
import rank_pool
from checks import Failures, check_call, message_of
from operands import rank_device, world_name
from ops import OPS, every_op
from overlap_torch import plan as plan_module
from overlap_torch.plan import Machine, Plan, Problem, use_plan, validate
from overlap_torch.plan.programs import Editor, Program, Rectangle, Region, edit
from overlap_torch.plan.types import Memory, Way
from programs import (
    EVEN,
    FEW,
    RAGGED,
    TILE,
    changed,
    disturbed,
    how_to_edit,
    random_program,
    template_plans,
    templates,
)
from tests.ops.test_autograd import check_gradients

CPU = Machine(arch=0, sm_count=2, sm_gflops=10.0, link_latency_us=50.0, link_gbps=2.0)


# --- results --------------------------------------------------------------------------------------------------


@pytest.mark.ranks((2, "gloo"), long=[(3, "gloo"), (8, "gloo")], whole=[(4, "gloo")])
@every_op
def test_programs_of_templates_are_exact(failures: Failures, op: str) -> None:
    for case, chunks in ((RAGGED, 2), (RAGGED, 3), (FEW, 3), (EVEN, 1)):
        for label, plan in template_plans(op, case, dist.get_world_size(), chunks):
            with use_plan(plan):
                for seed in (1, 2):
                    check_call(failures, case, label, seed=seed, op=op)


@pytest.mark.ranks((2, "gloo"))
def test_programs_serve_gradients(failures: Failures) -> None:
    world = dist.get_world_size()
    # Backward calls the other op, with N and K exchanged.
    for op, case in itertools.product(OPS, (EVEN, EVEN.with_(n=EVEN.k, k=EVEN.n))):
        plan_module.set_plan(template_plans(op, case, world, 2)[0][1])
    for op in OPS:
        check_gradients(failures, op, EVEN, rank_device(), world_name())
    plan_module.clear_plans()


def run_program(failures: Failures, text: str, op: str) -> None:
    with use_plan(plan_module.files.from_json(text)):
        check_call(failures, EVEN, seed=3, op=op)


DRAWN = {
    "right": random_program,
    "disturbed": lambda problem, seed: disturbed(random_program(problem, seed), seed + 1)[1],
}


def draw(ranks, kind: str, op: str, seeds: range) -> int:
    """How many were refused; all others give right results."""
    problem, refused = OPS[op].problem(EVEN, ranks.world), 0
    for seed in seeds:
        try:
            plan = DRAWN[kind](problem, seed)
            validate(plan)
        except ValueError as error:
            assert str(error)
            refused += 1
            continue
        ranks.expect_no_failures(run_program, plan_module.files.to_json(plan), op)
    return refused


@pytest.mark.ranks((2, "gloo"))
@pytest.mark.parametrize(
    ("kind", "count", "fewest", "most"), [("right", 2, 0, 0), ("disturbed", 8, 2, 8)]
)
@pytest.mark.parametrize("op", [op for op in OPS if op != "gemm_alltoall"])
def test_programs_drawn_at_random_are_refused_or_right(ranks, op, kind, count, fewest, most):
    assert fewest <= draw(ranks, kind, op, range(count)) <= most


@pytest.mark.long
@pytest.mark.ranks((3, "gloo"), (4, "gloo"), (8, "gloo"))
@pytest.mark.parametrize(("kind", "count"), [("right", 6), ("disturbed", 30)])
@pytest.mark.parametrize("op", [op for op in OPS if op != "gemm_alltoall"])
def test_programs_drawn_at_random_on_many_ranks(ranks, op, kind, count):
    count *= 4 if rank_pool.whole_grids() else 1
    refused = draw(ranks, kind, op, range(count))
    assert refused == 0 if kind == "right" else 5 < refused < count


@pytest.mark.ranks((2, "gloo"))
def test_programs_are_tuned_beside_the_planners_plans(failures: Failures) -> None:
    world = dist.get_world_size()
    case = EVEN
    problem = OPS["gemm_allreduce"].problem(case, world)
    ring = plan_module.programs.ring(problem, 2, transport="gloo", tile=TILE)
    tuned = overlap_torch.tune(
        [problem], most=1, repeats=2, cache=False, plans=[ring], device="cpu"
    )
    failures.holds(ring, [plan for plan, _ in tuned[0].times])
    failures.equal(tuned[0].source, "measured")
    check_call(failures, case, "after tuning", op="gemm_allreduce")
    plan_module.clear_plans()


# --- deadlines and agreement ----------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.ranks((2, "gloo"))
@pytest.mark.fresh(environment={"OVERLAP_TIMEOUT_S": "3"})
@pytest.mark.seconds(60)
def test_programs_end_at_the_deadline_where_a_rank_is_late(failures: Failures) -> None:
    """In the second call rank 1 is held up in the middle, for longer than the deadline."""
    world, rank = dist.get_world_size(), dist.get_rank()
    _, plan = template_plans("gemm_allreduce", EVEN, world, 2)[0]
    plan_module.set_plan(plan)
    arguments = OPS["gemm_allreduce"].arguments(EVEN, rank, world, rank_device())
    overlap_torch.gemm_allreduce(*arguments)
    if rank == 1:
        torch.ops.overlap.delay_side_stream(6_000_000)
    message = message_of(overlap_torch.gemm_allreduce, *arguments)
    found = re.search(
        "(?s)rank 0: the (receive from|send to) rank 1.*did not end within 3 s", message
    )
    failures.expect(None if rank == 1 or found else message)


@pytest.mark.ranks((2, "gloo"))
def test_programs_that_differ_between_ranks_are_refused_by_all(failures: Failures) -> None:
    """Two programs with as many transfers each, one on each rank."""
    world, rank = dist.get_world_size(), dist.get_rank()
    _, plan = template_plans("gemm_allreduce", EVEN, world, 1)[0]
    if rank == 1:
        transfers = list(plan.program.transfers)
        transfers[0], transfers[1] = transfers[1], transfers[0]
        plan.program = Program(0, transfers)
    plan_module.set_plan(plan)
    arguments = OPS["gemm_allreduce"].arguments(EVEN, rank, world, rank_device())
    said = message_of(overlap_torch.gemm_allreduce, *arguments)
    failures.says(said, ("plan", "rank"))
    plan_module.clear_plans()


# --- what is refused ------------------------------------------------------------------------------------------

PROBLEM = Problem(64, 32, 24, "float32", 4, "gemm_reducescatter")
TO_ALL = Problem(0, 8, 8, "float32", 4, "gemm_alltoall")


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


def hand(needs, steps=(1, 2, 3), streams=1):
    return lambda: ring_by_hand(needs, steps, streams=streams)


def with_field(**fields) -> Plan:
    plan = ring_by_hand(needs_all)
    for name, value in fields.items():
        setattr(plan, name, value)
    return plan


def with_program(rows: int, times: int) -> Plan:
    plan = ring_by_hand(needs_all)
    return with_field(program=Program(rows, list(plan.program.transfers) * times))


def over_nccl(by: str) -> Plan:
    with edit(PROBLEM, tile=TILE, transport="nccl") as p:
        for step in range(1, 4):
            p.push(p.part(p.rank - step), to=p.rank + 1, reduce=True, by=by)
    return p.plan()


def messages(change) -> Plan:
    p = Editor(Problem(0, 16, 8, "float32", 3, "gemm_alltoall"), transport="gloo")
    change(p)
    return p.plan()


REFUSED = {
    "no tiles": (hand(lambda p, part: [p.arrived(part)]), "writes rank .*product.*while"),
    "no arrival": (
        hand(lambda p, part: [p.tiles(part)], streams=2),
        "rank .*product.*while.*add the tiles or the transfer to what the other one needs"),
    "left out": (hand(needs_all, range(1, 3)), "rank .*in place of 0 1 2 3"),
    "twice": (hand(needs_all, range(1, 5)), "rank .*a second time"),
    "lanes": (lambda: validate(with_field(resources=plan_module.types.Resources(lanes=2))), "program and 2 lanes, allowed is 1"),
    "many": (lambda: validate(with_program(0, 43)), "1032 transfers, allowed are 1 to 1024"),
    "scratch": (lambda: validate(with_program(2**50, 1)), "scratch_rows = .*allowed are 0 to"),
    "ranks": (
        lambda: plan_module.programs.ring(Problem(90, 8, 8, "float32", 9), transport="gloo"), "9 ranks, allowed are 2 to 8"),
    "a ring of messages": (lambda: plan_module.programs.ring(TO_ALL), "take one_shot"),
    "copies over nccl": (lambda: over_nccl("copy_engine"), "goes by copy_engine.*take by = nccl or any"),
    "message left out": (
        lambda: messages(lambda p: p.push(p.message(p.rank + 1), to=p.rank + 1)), "leaves out.*from rank 0 to 2"),
    "message twice": (
        lambda: messages(lambda p: [p.push(p.message(1), to=1) for _ in range(2)]), "sends twice.*from rank 0 to 1"),
    "another rank's message": (lambda: messages(lambda p: p.push(p.message(p.rank + 1), to=p.rank + 2)), "shares of one message"),
    "message in columns": (lambda: messages(lambda p: p.push(p.message(1).columns(0, 8), to=1)), "cut into columns"),
    "message added": (lambda: messages(lambda p: p.push(p.message(0), to=0, reduce=True)), "adds nothing up"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
def test_programs_that_cannot_run_are_refused(name):
    make, expected = REFUSED[name]
    with pytest.raises(ValueError, match=f"(?s){expected}"):
        make()


@pytest.mark.parametrize("by", ["any", "copy_engine", "nccl"])
def test_engines_are_taken_on_cpu_whatever_they_are(by):
    with edit(PROBLEM, tile=TILE, transport="gloo") as p:
        for step in range(1, 4):
            p.push(p.part(p.rank - step), to=p.rank + 1, reduce=True, by=by)
    assert {one.by.name.lower() for one in p.plan().program.transfers} == {by}


def first_changed(**fields) -> Plan:
    plan = ring_by_hand(needs_all)
    transfers = list(plan.program.transfers)
    transfers[4] = changed(transfers[4], **fields)
    plan.program = Program(0, transfers)
    return plan


def region(rank: int, row: int, rows: int = 8, memory: Memory = Memory.PRODUCT) -> Region:
    return Region(memory, rank, Rectangle(row, rows, 0, 32))


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({"stream": 4}, "transfer 4.*stream 4.*0 to 3"),
        ({"after": [4]}, "transfer 4.*waits for transfer 4.*0 to 3"),
        ({"after": [2]}, "transfer 4.*waits for transfer 2.*from rank 2 to 3.*rank 0 or 1"),
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


@pytest.mark.ranks((2, "gloo"))
def test_programs_beyond_the_memory_are_refused(failures: Failures) -> None:
    _, plan = template_plans("gemm_allreduce", EVEN, dist.get_world_size(), 1)[0]
    plan.program = Program(2**35, plan.program.transfers)
    said = message_of(plan_module.set_plan, plan)
    pattern = r"program needs \d{13} bytes on rank 0 beside .*the device has \d+:"
    failures.expect(None if re.search(pattern, said) else said)


# --- data -----------------------------------------------------------------------------------------------------


def test_programs_are_saved_compared_and_copied(tmp_path):
    problem = OPS["gemm_allreduce"].problem(RAGGED, 4)
    for name, make in templates(problem):
        plan = make(problem, 2, **how_to_edit(problem))
        plan_module.files.save(plan, tmp_path / "plan.json")
        again = plan_module.files.load(tmp_path / "plan.json")
        assert again == plan, name
        assert plan_module.files.decode(plan_module.files.encode(plan)) == plan
        assert pickle.loads(pickle.dumps(plan)) == plan
        assert hash(plan.program.transfers[0]) == hash(again.program.transfers[0])
        again.program = Program(again.program.scratch_rows, again.program.transfers[1:])
        assert again != plan
    data = plan_module.files.to_dict(plan)
    assert data["program"]["version"] == 1
    data["program"]["version"] = 2
    with pytest.raises(ValueError, match="program has version 2, this release reads 1"):
        plan_module.files.from_dict(data)


def test_plans_without_a_program_are_saved_as_before_and_described_by_the_schema():
    plain = plan_module.templates.row_panels(
        Problem(64, 32, 24, "float32", 2), 2, transport="gloo", tile=TILE
    )
    data = plan_module.files.to_dict(plain)
    assert "program" not in data
    assert plan_module.files.from_dict(data) == plain
    schema = plan_module.files.schema()
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert set(schema["required"]) == set(data)
    with_program = plan_module.files.to_dict(ring_by_hand(needs_all))
    assert set(schema["properties"]) == {*with_program, "clique"}
    transfer = schema["properties"]["program"]["properties"]["transfers"]["items"]
    assert set(transfer["required"]) == set(with_program["program"]["transfers"][0])
    assert transfer["properties"]["way"] == {"enum": ["push", "pull", "copy"]}
    json.dumps(schema)
