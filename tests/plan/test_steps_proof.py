"""The steps of all ranks, gone through together: no deadlock, no race, the right results; and what is taken out is missed.

One case of each structure that steps have. Changes without harm, to leave out or put elsewhere, stand in HARMLESS with
the reason; everything else is found.
"""

import copy
import dataclasses
import json
import random
from collections.abc import Callable, Iterator

import pytest

from overlap_torch import _plan
from overlap_torch import plan as plans
from overlap_torch._plan import Collective, DType, Kernel, Machine, Op, Plan, Problem, Transport
from overlap_torch.plan.templates import at_once, row_panels
from tests import _plan_test, steps_proof
from tests.lib.planner_problems import MACHINES
from tests.steps_proof import PEERS, Case


def test_steps_proof_of_every_structure_finds_no_fault() -> None:
    cases = steps_proof.classes()
    assert len(cases) > 1500
    assert {case.plan.problem.world_size for case in cases.values()} == set(steps_proof.WORLDS)
    assert {case.plan.problem.op for case in cases.values()} == set(Op.__members__.values())
    faults = [f"{case}: {fault}" for case in cases.values() if (fault := case.fault())]
    assert faults == []


def test_steps_proof_over_nccl_finds_no_fault_where_kernels_run_one_at_a_time() -> None:
    """The host launches each step when the one before has ended: all GEMMs come before what waits for their tiles."""
    machines = {}
    cases = 0
    for case in steps_proof.classes().values():
        if case.plan.chunks[0].transport != Transport.NCCL:
            continue
        serial = machines.setdefault(id(case.machine), copy.copy(case.machine))
        serial.serial = True
        cases += 1
        assert dataclasses.replace(case, machine=serial).fault() == "", case
    assert cases > 1000
    gather = Problem(8192, 1024, 256, DType.BFLOAT16, 4, Op.ALLGATHER_GEMM)
    peers = row_panels(gather, 2, kernel=Kernel.SM90_PINGPONG, transport="peer", comm_sms=2)
    serial = copy.copy(PEERS)
    assert Case(peers, serial, (True,) * 4).fault() == ""
    serial.serial = True
    assert "wait for each other" in Case(peers, serial, (True,) * 4).fault()


@pytest.mark.parametrize("world", steps_proof.WORLDS)
def test_steps_proof_of_rings_owners_and_stripes_finds_no_fault_whatever_the_rows(
    world: int,
) -> None:
    """Last parts shorter by a row, by a tile and by whole clusters of them; of one row; of as many as the others."""
    cases = 0
    for kernel in (Kernel.LIBRARY, Kernel.SM90_PINGPONG, Kernel.SM90_PINGPONG_WIDE):
        for m in (*range(1, 3 * world), *range(127 * world, 129 * world + 1), 4097, 5001):
            problem = Problem(m, 264, 64, DType.BFLOAT16, world)
            made = []
            if (world - 1) * -(-m // world) < m:
                made.append(row_panels(problem, 1, kernel=kernel, transport="peer"))
            if made and (
                kernel == Kernel.SM90_PINGPONG or (world == 2 and kernel != Kernel.LIBRARY)
            ):
                options = {"transport": "peer", "collective": "owners"}
                made.append(row_panels(problem, 1, kernel=kernel, **options))
            if kernel == Kernel.LIBRARY:
                options = {"tile": (32, 64), "transport": "peer", "collective": "stripes"}
                heights = min(3, -(-m // (32 * world)))
                made.append(row_panels(problem, heights, **options))
            for case in (case for plan in made for case in steps_proof.variants(plan, PEERS)):
                cases += 1
                assert case.fault() == "", case
    assert cases > 100


def test_steps_proof_communication_is_alike_whatever_a_ranks_operands_are() -> None:
    texts: dict[tuple, set[str]] = {}
    for case in steps_proof.classes().values():
        # An all-to-all's steps depend on the rows, which differ by call.
        key = (str(case.plan), repr(case.machine), case.rows, case.longest_message)
        texts.setdefault(key, set()).update(_plan_test.communication(**case.arguments))
    assert len(texts) > 600
    assert [key for key, found in texts.items() if len(found) != 1] == []


# --- several plans in a row ---


def over_peers(world: int) -> list[Plan]:
    """One plan of each way over peers, with slots of unlike sizes."""

    def problem(op: Op, rows: int = 1024) -> Problem:
        return Problem(rows * world, 1024, 256, DType.BFLOAT16, world, op)

    ring = {"kernel": Kernel.SM90_PINGPONG, "transport": "peer"}
    reductions = (Op.GEMM_ALLREDUCE, Op.GEMM_REDUCESCATTER)
    made = [row_panels(problem(op), 1, **ring) for op in reductions]
    uneven = Problem(1024 * world + 1, 1024, 256, DType.BFLOAT16, world)
    made.append(row_panels(uneven, 1, **ring))
    made += [row_panels(p, 1, collective="owners", **ring) for p in (made[1].problem, uneven)]
    stripes = {"transport": "peer", "collective": "stripes"}
    made += [row_panels(problem(op, 768), 3, **stripes) for op in reductions]
    in_pieces = Problem(8192 * world, 1024, 256, DType.BFLOAT16, world)
    made.append(row_panels(in_pieces, 1, **stripes))
    made += [at_once(problem(op, 512), kernel=Kernel.SM90_PINGPONG) for op in reductions]
    made += [at_once(problem(op, 512)) for op in (*reductions, Op.ALLGATHER_GEMM)]
    few = Problem(8, 1024, 256, DType.BFLOAT16, world)
    made += [at_once(few), at_once(few, kernel=Kernel.SM90_PINGPONG, schedule="sequential")]
    for comm_sms in (0, 2):
        gather = problem(Op.ALLGATHER_GEMM)
        made.append(row_panels(gather, 2, comm_sms=comm_sms, **ring))
    return made


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_steps_proof_of_several_plans_in_a_row_finds_no_fault(world: int) -> None:
    draw = random.Random(world)
    choices = over_peers(world)
    for _ in range(60 if world < 8 else 15):
        calls = draw.choices(choices, k=6)
        takes = [draw.random() < 0.7 for _ in range(world)]
        assert _plan_test.find_fault_in_a_row(calls, PEERS, takes) == "", (calls, takes)


# --- by mutation ---

Steps = dict  # steps_json's


def steps_of(case: Case, rank: int, captured: bool) -> Steps:
    takes = case.kernel_takes[rank]
    return json.loads(
        _plan.steps_json(
            case.plan,
            rank,
            case.machine,
            kernel_takes=takes,
            bias=case.bias,
            captured=captured,
            weights=[(columns, takes and fast) for columns, fast in case.weights],
            send_rows=list(case.rows[rank]) if case.rows else [],
            receive_rows=[row[rank] for row in case.rows],
            longest_message=case.longest_message,
        )
    )


@dataclasses.dataclass(frozen=True)
class Change:
    """A change of a rank's steps."""

    case: Case
    rank: int
    made: Steps
    index: int
    what: str

    @property
    def step(self) -> dict:
        return self.made["steps"][self.index]

    @property
    def before(self) -> list[dict]:
        return self.made["steps"][: self.index]

    @property
    def behind(self) -> list[dict]:
        return self.made["steps"][self.index + 1 :]


def is_signalled_later(change: Change) -> bool:
    numbers = [step["number"] for step in change.behind if step["step"] == "signal"]
    return any(number > change.step["number"] for number in numbers)


def lanes_begin_behind_the_caller(change: Change) -> bool:
    """True if the side lanes that are not forked carry nothing, or begin after a step that another lane has since."""
    forked = int(change.what.split()[2])
    begun = set()
    for step in change.behind:
        lane = step["lane"]
        if not lane.startswith("side") or int(lane[4:]) < forked or lane in begun:
            continue
        begun.add(lane)
        if not any(i > change.index for i in step["after"]):
            return False
    return True


def lanes_end_before_the_caller(change: Change) -> bool:
    """True if the caller waits for each lane's last step without the join, or for a step that comes after it."""
    steps = change.made["steps"]
    last = {step["lane"]: i for i, step in enumerate(steps) if step["lane"] != "caller"}
    waited = {i for step in steps if step["lane"] == "caller" for i in step["after"]}
    for i in sorted(range(len(steps)), reverse=True):
        if i in waited:
            waited.update(steps[i]["after"])
    return set(last.values()) <= waited


def stores_into_no_slot(change: Change) -> bool:
    """True if all that this rank sends is longer than a slot's room for it."""
    case = change.case
    if case.plan.problem.op != Op.GEMM_ALLTOALL or case.plan.problem.world_size == 2:
        return False
    room = max(1 << 25, 1 << max(0, case.longest_message - 1).bit_length())
    row_bytes = case.plan.problem.n * 2
    sent = [n * row_bytes for peer, n in enumerate(case.rows[change.rank]) if peer != change.rank]
    return all(n == 0 or n > room for n in sent)


def takes_own_rows_alone(change: Change) -> bool:
    gemm = change.step
    if gemm["step"] != "gemm" or gemm.get("rows", {}).get("mode") != "gather":
        return False
    return gemm["end_tile"] <= change.made["orders"][gemm["order"]]["chunks_end_at"][0]


def comes_behind_all_chunks(change: Change) -> bool:
    """True if a launch before, on the same lane, awaits all chunks."""
    ends = [order["chunks_end_at"][-1] for order in change.made["orders"]]
    return any(
        step.get("awaits_chunks") and step["end_tile"] == ends[step["order"]]
        for step in change.before
        if step["lane"] == change.step["lane"]
    )


def is_empty(step: Steps) -> bool:
    if step["step"] == "library_gemm":
        return step["begin"] == step["end"]
    return step.get({"copy": "bytes", "add_terms": "rows"}.get(step["step"])) == 0


def announces_nothing(change: Change) -> bool:
    steps = [change.made["steps"][index] for index in change.step["after"]]
    return bool(steps) and all(map(is_empty, steps))


def takes_nothing(change: Change) -> bool:
    steps = [step for step in change.behind if step["lane"] == change.step["lane"]]
    return bool(steps) and all(map(is_empty, steps))


# Each change, why it may do no harm, and when.
HARMLESS: list[tuple[str, str, Callable[[Change], bool]]] = [
    ("signal left out", "numbers only grow: a later step's stands for this one's", is_signalled_later),
    (
        "signal without to_self", "a rank awaits its own last step alone, and only in a GEMM that ends the call",
        lambda change: is_signalled_later(change) or not any(step.get("ends_call") for step in change.made["steps"])),
    ("fork of ", "the lane carries nothing, or begins behind a step that comes behind the fork", lanes_begin_behind_the_caller),
    (
        "wait_for_peers without after",
        "it would look earlier, and hold its SM for longer, on a lane that waits for nothing else",
        lambda change: change.step["lane"] == "copy"),
    ("join left out", "the caller's last launches wait for the last step of each lane", lanes_end_before_the_caller),
    (
        "send_receive without after", "it names the fork, behind which its lane is anyway",
        lambda change: change.made["steps"][int(change.what.rpartition("#")[2])]["step"] == "fork"),
    ("wait_for_slots left out", "all of this rank's messages travel by NCCL", stores_into_no_slot),
    (
        "gemm without awaits_chunks", "it takes the own rows alone, or comes behind a launch that has awaited all chunks",
        lambda change: takes_own_rows_alone(change) or comes_behind_all_chunks(change)),
    (
        "wait_for_peers", "this rank has no rows of the chunk, whose terms it would add up",
        lambda change: (change.behind[0]["step"], change.behind[0].get("rows")) == ("add_terms", 0)),
    ("", "the step has no rows", lambda change: is_empty(change.step)),
    ("signal without after", "the copies or GEMMs that it announces have no rows", announces_nothing),
    ("wait_for_peers left out", "the copies of what it waits for have no bytes", takes_nothing),
    ("gemm without rounds", "the same terms are added, one of them with more bits",
     lambda change: change.case.plan.collective == Collective.OWNERS),
    (
        "gemm with place 0 shifted", "a launch of the own rows' tiles reads the op's input, not the gathered rows",
        takes_own_rows_alone),
]  # fmt: skip


def harmful(case: Case, rank: int, work: bool) -> Iterator[str]:
    """Changes that nothing noticed and nothing excuses."""
    made: dict[bool, Steps] = {}
    for index, what, captured in case.unnoticed(rank, work)[1]:
        if captured not in made:
            made[captured] = steps_of(case, rank, captured)
        change = Change(case, rank, made[captured], index, what)
        if not any(what.startswith(name) and harmless(change) for name, _, harmless in HARMLESS):
            yield f"rank {rank} #{index} {what} of {case}"


FEW_RANKS, MANY_RANKS = range(2, 5), range(5, 9)


@pytest.mark.parametrize(
    ("worlds", "most_chunks", "work"),
    [
        pytest.param(FEW_RANKS, 64, False, id="each wait, dependency, signal and join"),
        pytest.param(MANY_RANKS, 64, False, id="each of many ranks", marks=pytest.mark.long),
        pytest.param(range(2, 3), 3, True, id="work left out, or done elsewhere"),
        pytest.param(range(2, 4), 64, True, id="work of many chunks", marks=pytest.mark.long),
    ],
)
def test_steps_proof_misses(worlds: range, most_chunks: int, work: bool) -> None:
    cases = [
        (case, rank)
        for case, rank in steps_proof.lists()
        if case.plan.problem.world_size in worlds and len(case.plan.chunks) <= most_chunks
    ]
    assert len(cases) > 100
    assert [found for case, rank in cases for found in harmful(case, rank, work)] == []


# --- what users are told ---


def panels(max_ctas: int, lanes: int) -> Plan:
    problem = Problem(8192, 8192, 1024, DType.BFLOAT16, 2)
    return row_panels(
        problem, 4, kernel=Kernel.SM90_PINGPONG, comm_sms=32, max_ctas=max_ctas, lanes=lanes
    )


def test_validate_refuses_more_communication_than_there_are_sms() -> None:
    plan = panels(max_ctas=32, lanes=4)
    plan.validate()
    plan.chunks = [plans.types.Chunk(chunk.tiles, chunk.transport, 40) for chunk in plan.chunks]
    with pytest.raises(ValueError) as refused:
        plan.validate()
    text = str(refused.value)
    assert "rank 0, call 0, step #3 (collective on side0) takes 40 of 132 SMs" in text
    assert "hold 120: rank 0, call 0, step #6 (collective on side1)" in text
    assert "lower max_ctas or lanes, or raise comm_sms" in text
    with pytest.raises(ValueError, match="takes 40 of 132 SMs"):
        plans.validate(plan)
    with pytest.raises(ValueError, match="takes 40 of 132 SMs"):
        plans.files.from_json(plans.files.to_json(plan))


def test_validate_counts_the_sms_of_the_machine_that_it_is_given() -> None:
    plan = panels(max_ctas=12, lanes=2)
    plans.validate(plan)
    plans.validate(plan, MACHINES["hopper"])
    with pytest.raises(ValueError, match="takes 12 of 16 SMs"):
        plans.validate(plan, MACHINES["hopper of 16 SMs"])
    plans.validate(plan, Machine())  # a CPU has none to hold
