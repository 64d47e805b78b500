"""Cases of steps for the proofs: plans and ranks of every structure that the planner's candidates, and plans by hand, have.

`python -m tests.steps_proof` proves all candidates of the planner's golden grid, and that their structures are all among
those of the cases here.
"""

from __future__ import annotations

import concurrent.futures
import copy
import dataclasses
import functools
import itertools
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from overlap_torch import _plan
from overlap_torch import plan as plans
from overlap_torch._plan import (
    Collective,
    DType,
    Kernel,
    Layout,
    Machine,
    Op,
    Plan,
    Problem,
    Profile,
    Resources,
    Schedule,
    Transport,
)
from tests import _plan_test
from tests.lib.planner_problems import MACHINES, families, problems
from tests.lib.rank_pool import whole_grids

ALL_WORLDS = range(2, 9)
# Between five and seven ranks steps are as between fewer or more.
FEW_WORLDS = (2, 3, 4, 8)
WORLDS = ALL_WORLDS if __name__ == "__main__" or whole_grids() else FEW_WORLDS
PEERS = MACHINES["hopper"]
# A machine whose all-to-alls are in one launch where the plan has that, whatever their rows.
ONE_LAUNCH = copy.copy(PEERS)
ONE_LAUNCH.profile = Profile.load(Path(__file__).parent / "profiles/one_launch.json")

# Where the planner's candidates have all structures that they have anywhere, as `make test-plans` checks.
CANDIDATES = {
    Op.GEMM_ALLREDUCE: [
        ("hopper", (96, 24, 8)), ("hopper", (2049, 130, 8192)), ("hopper", (3000, 5120, 1368)), ("hopper", (4095, 1000, 1000)),
        ("hopper", (131072, 12288, 3072)), ("hopper without peers", (512, 8192, 7168)),
        ("hopper without windows", (1024, 8192, 7168)), ("hopper without windows", (16384, 8192, 7168)),
        ("hopper, slow peers", (1024, 16384, 4096)), ("hopper on PCIe", (1024, 8192, 7168)),
        ("hopper on PCIe", (16384, 8192, 7168)), ("hopper of 16 SMs", (3000, 5120, 1368)),
        ("hopper of 16 SMs", (4095, 1000, 1000)), ("hopper of 16 SMs", (131072, 12288, 3072)), ("ampere", (128, 8192, 7168)),
        ("cpu", (4096, 8192, 7168)),
        ("hopper of 16 SMs", (777, 1003, 511)), ("hopper, slower peers", (96, 24, 8)),
        ("hopper, slower peers", (4096, 8192, 32768)), ("blackwell", (1, 4096, 3584)), ("blackwell", (16, 4096, 3584)),
        ("blackwell", (1024, 16384, 4096)), ("blackwell", (1026, 28672, 4096)), ("blackwell", (4096, 8192, 7168)),
        ("blackwell", (4096, 16384, 4096)), ("blackwell", (8192, 8192, 2048)), ("blackwell", (8192, 16384, 4096)),
        ("blackwell", (16384, 8192, 7168)), ("blackwell", (16384, 16384, 4096)), ("blackwell", (32768, 8192, 28672)),
        ("blackwell", (131072, 12288, 3072))],
    Op.GEMM_REDUCESCATTER: [
        ("hopper", (3000, 5120, 1368)), ("hopper", (4095, 1000, 1000)), ("hopper", (16384, 8192, 7168)),
        ("hopper without peers", (3000, 5120, 1368)), ("hopper without peers", (131072, 12288, 3072)),
        ("hopper without windows", (3000, 5120, 1368)), ("hopper without windows", (8192, 8192, 2048)),
        ("hopper on PCIe", (3000, 5120, 1368)), ("hopper on PCIe", (131072, 12288, 3072)),
        ("ampere without kernels", (3000, 5120, 1368)), ("ampere without kernels", (4096, 8192, 7168)),
        ("cpu", (3000, 5120, 1368)), ("cpu", (4096, 8192, 7168)), ("cpu", (8192, 8192, 7168)),
        ("hopper, slower peers", (4, 16384, 4096)), ("hopper, slower peers", (8, 8192, 2048)),
        ("hopper, slower peers", (8, 8192, 7168)), ("blackwell", (2049, 7, 13))],
    Op.ALLGATHER_GEMM: [
        ("hopper", (16384, 8192, 7168)), ("hopper without peers", (32768, 8192, 28672)),
        ("hopper without its kernels", (16384, 8192, 7168)), ("hopper on PCIe", (32768, 8192, 28672)),
        ("hopper of 16 SMs", (2049, 130, 8192)), ("ada", (16384, 8192, 7168)), ("ampere", (4096, 8192, 7168)),
        ("cpu", (4096, 8192, 7168)), ("cpu", (8192, 8192, 7168))],
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """All ranks of a call. The fields are find_fault's arguments."""

    plan: Plan
    machine: Machine
    kernel_takes: tuple[bool, ...]
    bias: bool = False
    weights: tuple[tuple[int, bool], ...] = ()
    rows: tuple[tuple[int, ...], ...] = ()
    longest_message: int = 0
    finish: bool = False

    @functools.cached_property
    def arguments(self) -> dict:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def fault(self) -> str:
        return _plan_test.find_fault(**self.arguments)

    def structures(self) -> list[tuple[int, int]]:
        return _plan_test.structures(**self.arguments)

    def unnoticed(self, rank: int, work: bool = False) -> tuple[int, list[tuple[int, str, bool]]]:
        return _plan_test.unnoticed(**self.arguments, rank=rank, work=work)

    def __str__(self) -> str:
        ranks = "".join("k" if takes else "-" for takes in self.kernel_takes)
        finish = ", finished" if self.finish else ""
        return f"{self.plan}, kernel {ranks}, bias {self.bias}, {self.weights} {self.rows}{finish}"


def takers(plan: Plan) -> Iterator[tuple[bool, ...]]:
    """The ranks whose operands the kernel takes: all, all but the first, none."""
    world = plan.problem.world_size
    # On CPU the framework's GEMM takes a kernel's part for packed tiles.
    by_tile = plan.chunks[0].transport == Transport.GLOO and plan.layout == Layout.PACKED
    for without in [0, 1, world] if plan.kernel != Kernel.LIBRARY or by_tile else [world]:
        yield tuple(rank >= without for rank in range(world))


def variants(plan: Plan, machine: Machine) -> Iterator[Case]:
    """A plan's cases: rank-local operands, a bias where steps add it, and an all-reduce whose rows are finished."""
    biased = plan.problem.op in (Op.GEMM_ALLREDUCE, Op.GEMM_REDUCESCATTER)
    for takes in takers(plan):
        for bias in [False, True] if biased else [False]:
            yield Case(plan, machine, takes, bias)
        if plan.problem.op == Op.GEMM_ALLREDUCE and plan.schedule == Schedule.SEQUENTIAL:
            yield Case(plan, machine, takes, finish=True)


def of_candidates(problems: Iterable[tuple[Machine, Problem]]) -> Iterator[Case]:
    for machine, problem in problems:
        for plan in _plan.candidates(problem, machine):
            yield from variants(plan, machine)


def covering_problems() -> Iterator[tuple[Machine, Problem]]:
    for op, places in CANDIDATES.items():
        parted = op != Op.GEMM_ALLREDUCE
        for (name, (m, n, k)), world in itertools.product(places, WORLDS):
            rows = -(-m // world) * world if parted else m
            yield MACHINES[name], Problem(rows, n, k, DType.BFLOAT16, world, op)


def by_hand() -> Iterator[Case]:
    """Plans that users set and the planner does not: other chunks, lanes, kernels, layouts; several weights."""
    over_nccl = {"transport": "nccl"}
    for world in (2, 3, 8):
        problems = {
            op: Problem(2048 * world, 2048 - 40, 512, DType.BFLOAT16, world, op)
            for op in (Op.GEMM_ALLREDUCE, Op.GEMM_REDUCESCATTER, Op.ALLGATHER_GEMM)
        }
        for problem, chunks, lanes in itertools.product(problems.values(), (1, 3), (1, 4)):
            for kernel, window in itertools.product(
                (Kernel.LIBRARY, Kernel.SM80, Kernel.SM90_COOPERATIVE), (False, True)
            ):
                how = {"kernel": kernel, "lanes": lanes, "window": window, "comm_sms": 32}
                made = plans.templates.row_panels(problem, chunks, max_ctas=8, **how, **over_nccl)
                yield from variants(made, PEERS)
        reduces = problems[Op.GEMM_ALLREDUCE]
        for collective in (Collective.ALL_REDUCE, Collective.EXCHANGE)[: 2 if world == 2 else 1]:
            for chunks, lanes, window in itertools.product((1, 5), (1, 2), (False, True)):
                how = {"lanes": lanes, "window": window, "comm_sms": 16, "collective": collective}
                how |= {"kernel": Kernel.SM90_PINGPONG, "max_ctas": 8}
                yield from variants(
                    plans.templates.packed(reduces, chunks, **how, **over_nccl), PEERS
                )
        for kernel, comm_sms in itertools.product((Kernel.SM80, Kernel.SM90_PINGPONG), (0, 2)):
            gather = plans.templates.row_panels(
                problems[Op.ALLGATHER_GEMM], 3, kernel=kernel, comm_sms=comm_sms, transport="peer"
            )
            for takes in takers(gather):
                for weights in itertools.product((True, False), repeat=2):
                    columns = ((1500, weights[0]), (500, weights[1]), (8, True))
                    yield Case(gather, PEERS, takes, weights=columns)
        for op, chunks in itertools.product((Op.GEMM_ALLREDUCE, Op.GEMM_REDUCESCATTER), (1, 3)):
            for transport, machine in (("peer", PEERS), ("gloo", MACHINES["cpu"])):
                made = plans.templates.row_panels(
                    problems[op], chunks, transport=transport, collective="stripes"
                )
                yield from variants(made, machine)
        for op in (Op.GEMM_ALLREDUCE, Op.GEMM_REDUCESCATTER):
            for rows, kernel in itertools.product(
                (16, 1024), (Kernel.LIBRARY, Kernel.SM90_PINGPONG)
            ):
                problem = Problem(rows * world, 2048, 512, DType.BFLOAT16, world, op)
                yield from variants(plans.templates.at_once(problem, kernel=kernel), PEERS)


def rings() -> Iterator[Case]:
    """Rings with parts that are not equal: by hand, as the planner has them where it may choose."""
    kernels = (Kernel.LIBRARY, Kernel.SM90_PINGPONG, Kernel.SM90_PINGPONG_WIDE)
    # At the larger inner size there is room to spread stores.
    for world, kernel, inner in itertools.product(WORLDS, kernels, (512, 8192)):
        for rows in (1024 * world + 1, 1024 * world - 1, 64 * world - 1):
            problem = Problem(rows, 2048 - 40, inner, DType.BFLOAT16, world, Op.GEMM_ALLREDUCE)
            ring = plans.templates.row_panels(problem, 1, kernel=kernel, transport="peer")
            yield from variants(ring, PEERS)


def hierarchies() -> Iterator[Case]:
    """Ranks on several hosts: parts that are not equal, and none for the last ranks."""
    ops = (Op.GEMM_ALLREDUCE, Op.GEMM_REDUCESCATTER, Op.ALLGATHER_GEMM)
    for (world, clique), op, chunks, lanes in itertools.product(
        ((2, 1), (4, 2), (8, 4)), ops, (1, 3), (1, 2)
    ):
        uneven = 5 * (op == Op.GEMM_ALLREDUCE)
        problem = Problem(1024 * world + uneven, 2048 - 40, 512, DType.BFLOAT16, world, op)
        for transport in ("nccl", "gloo") if clique == 1 else ("peer", "nccl", "gloo"):
            kernel = Kernel.LIBRARY if transport == "gloo" or chunks == 1 else Kernel.SM90_PINGPONG
            options = {"kernel": kernel, "lanes": lanes, "transport": transport}
            if kernel != Kernel.LIBRARY:
                options |= {"comm_sms": 32, "max_ctas": 8}
            plan = plans.templates.hierarchical(problem, clique, chunks, **options)
            yield from variants(plan, MACHINES["cpu"] if transport == "gloo" else PEERS)
    few = Problem(3, 2048, 512, DType.BFLOAT16, 4)
    yield from variants(plans.templates.hierarchical(few, 2, transport="peer"), PEERS)


def rows_patterns(world: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    yield tuple((3000,) * world for _ in range(world))
    yield tuple(tuple((a * 5 + b * 3) % 7 * 2500 for b in range(world)) for a in range(world))
    yield tuple(tuple(8 * (b + 1) if a == 0 else 0 for b in range(world)) for a in range(world))
    yield tuple((0,) * world for _ in range(world))


def all_to_alls() -> Iterator[Case]:
    for world, transport in itertools.product((2, 3, 4, 8), (Transport.NCCL, Transport.PEER)):
        problem = Problem(0, 4096, 1024, DType.BFLOAT16, world, Op.GEMM_ALLTOALL)
        ways = [(Kernel.SM90_PINGPONG, False), (Kernel.LIBRARY, False)]
        if transport == Transport.PEER:
            ways.append((Kernel.SM90_PINGPONG, True))
        for kernel, one_launch in ways:
            resources = Resources(comm_sms=16, one_launch=one_launch)
            plan = _plan.make_all_to_all(problem, kernel, resources, 16, transport)
            machine = ONE_LAUNCH if one_launch else PEERS
            for rows, takes in itertools.product(rows_patterns(world), takers(plan)):
                # Messages of 8 KiB a row: longer ones than ranks have heard of travel by NCCL.
                for longest in {1, max(1, max(map(max, rows)) * 8192)}:
                    yield Case(plan, machine, takes, rows=rows, longest_message=longest)


def structure(case: Case) -> tuple:
    problem = case.plan.problem
    return problem.op.value, problem.world_size, (has_short_part(case), *case.structures())


def has_short_part(case: Case) -> bool:
    """True if it is a ring whose parts have unequal numbers of rows: steps then differ only by numbers."""
    problem = case.plan.problem
    ring = case.plan.collective == Collective.RING
    return ring and problem.m % problem.world_size != 0


@functools.cache
def classes() -> dict[tuple, Case]:
    """One case of each structure of all ranks' steps, of the smallest problem that has it."""
    found: dict[tuple, Case] = {}
    made = (of_candidates(covering_problems()), by_hand(), rings(), hierarchies(), all_to_alls())
    for case in itertools.chain(*made):
        key = structure(case)
        before = found.get(key)
        if before is None or size(case) < size(before):
            found[key] = case
    return found


def size(case: Case) -> int:
    return case.plan.problem.m * case.plan.problem.n + sum(map(sum, case.rows))


def lists() -> Iterator[tuple[Case, int]]:
    """One case and rank for each structure of one rank's steps, with the fewest ranks that have it."""
    seen = set()
    for (op, _, structures), case in sorted(classes().items(), key=lambda item: item[0][1]):
        short, *of_ranks = structures
        for rank, hashes in enumerate(of_ranks):
            if (op, short, hashes) not in seen:
                seen.add((op, short, hashes))
                yield case, rank


# --- all candidates ---


def of_family(name: str, op: Op, scaled: bool) -> Iterator[Plan]:
    """The candidates of an op's problems on a machine, but for one rank, more than can share memory, and nothing."""
    for problem in problems(op, scaled):
        empty = 0 in (problem.n, problem.k) or (problem.m == 0 and op != Op.GEMM_ALLTOALL)
        if problem.world_size in WORLDS and not empty:
            yield from _plan.candidates(problem, MACHINES[name])


def with_rows(case: Case) -> Iterator[Case]:
    if case.plan.problem.op != Op.GEMM_ALLTOALL:
        yield case
        return
    for rows in rows_patterns(case.plan.problem.world_size):
        yield dataclasses.replace(case, rows=rows)


def check(batch: list[tuple[str, tuple[int, ...]]]) -> tuple[int, set, list[str]]:
    """Cases, structures and faults of plans on machines."""
    count, structures, faults = 0, set(), []
    for name, code in batch:
        plan = _plan.decode(code)
        op = plan.problem.op
        for takes in takers(plan):
            biased = op in (Op.GEMM_ALLREDUCE, Op.GEMM_REDUCESCATTER) and all(takes)
            for case in with_rows(Case(plan, MACHINES[name], takes, biased)):
                count += 1
                # All-to-alls differ by rows, not by plan.
                if op != Op.GEMM_ALLTOALL:
                    structures.add(structure(case))
                if fault := case.fault():
                    faults.append(f"{name}: {case}: {fault}")
    return count, structures, faults


def main() -> int:
    begin = time.monotonic()
    todo: dict[tuple, str] = {}  # of machines alike in what decides steps
    for _, name, op, scaled in families():
        machine = MACHINES[name]
        for plan in of_family(name, op, scaled):
            todo.setdefault((tuple(plan.encode()), machine.sm_count, machine.arch), name)
    each = [(name, code) for (code, _, _), name in todo.items()]
    batches = [each[i : i + 200] for i in range(0, len(each), 200)]
    covered = set(classes())
    cases, missing = len(covered), set()
    faults = [f"{case}: {fault}" for case in classes().values() if (fault := case.fault())]
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count()) as pool:
        for count, structures, found in pool.map(check, batches):
            cases += count
            missing |= structures - covered
            faults += found
    for fault in faults[:20]:
        print(fault)
    print(
        f"{len(each)} candidates, {cases} cases of ranks and operands: {len(faults)} faults, "
        f"{len(missing)} structures that tests/plan/test_steps_proof.py does not have "
        f"({time.monotonic() - begin:.0f} s)"
    )
    return 1 if faults or missing else 0


if __name__ == "__main__":
    sys.exit(main())
