"""Programs over peers: their proof and, on GPUs, their results."""

import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import overlap_torch
import rank_pool
import steps_proof
from checks import Failures, check_call, message_of
from operands import Case, rank_device
from ops import OPS
from overlap_torch import plan as plan_module
from overlap_torch._kernels import request
from overlap_torch.plan import Plan, Problem, _library, use_plan, validate
from overlap_torch.plan.programs import from_msccl, from_mscclpp
from overlap_torch.plan.templates import row_panels
from overlap_torch.plan.types import Kernel
from peer_races import Runner, race
from peers import has_bias, skip_unless_it_runs
from plan_files import FILES, text_of
from programs import ENGINES, by_engines, disturbed, random_program, template_plans, templates
from tests import _plan_test
from tests.peers.test_peers_graphs import Captured, Found

PEERS = steps_proof.PEERS
PINGPONG = Kernel.SM90_PINGPONG
REDUCTIONS = ("gemm_allreduce", "gemm_reducescatter")
OP_NAMES = (*REDUCTIONS, "allgather_gemm", "gemm_alltoall")
every_engine = pytest.mark.parametrize("engines", list(ENGINES))
every_op = pytest.mark.parametrize("op", OP_NAMES)


def how(op: str, kernel: Kernel = PINGPONG) -> dict[str, object]:
    """As of ``plan.programs.edit``: only reductions compute by a kernel that counts."""
    return {"transport": "peer", **({"kernel": kernel} if op in REDUCTIONS else {})}


def problem_of(op: str, world: int, rows: int = 256, n: int = 256) -> Problem:
    return Problem(0 if op == "gemm_alltoall" else rows * world, n, 128, "bfloat16", world, op)


def plans_of(op: str, world: int, engines: str, chunks: int = 2) -> list[tuple[str, Plan]]:
    problem = problem_of(op, world)
    return [
        (name, by_engines(make(problem, chunks, **how(op)), ENGINES[engines]))
        for name, make in templates(problem)
    ]


# --- proof ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sms", "refused"), [(23, True), (24, False)])
def test_plan_is_refused_that_needs_more_sms_than_the_device_has(monkeypatch, sms, refused):
    """Set for a device or given to a job, a plan is looked at with the SMs that the device has, before anything hears of it."""
    device = SimpleNamespace(multi_processor_count=sms, total_memory=1 << 36)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    heard = []
    monkeypatch.setattr(torch.ops.overlap, "set_plan", lambda *arguments: heard.append(arguments))
    monkeypatch.setattr(_library, "group_name", lambda group: "0")
    problem = problem_of("gemm_reducescatter", 2)
    plan = row_panels(problem, 2, kernel=PINGPONG, comm_sms=16, max_ctas=12, lanes=2)
    tile, where = (plan.tile_m, plan.tile_n), torch.device("cuda:0")
    looks = [
        lambda: plan_module.set_plan(plan, device=where),
        lambda: request.check_plan("produce", plan, plan.problem, tile, where),  # a job's own
    ]
    for look in looks:
        if not refused:
            look()
        else:
            with pytest.raises(ValueError, match=r"takes 12 of 23 SMs, .* hold 12.*lower max_ctas"):
                look()
    assert len(heard) == (not refused)


@pytest.mark.parametrize(
    ("world", "chunks"),
    [
        (2, 2),
        *(pytest.param(world, 3, marks=pytest.mark.long) for world in (3, 8)),
        pytest.param(4, 3, marks=pytest.mark.whole),
    ],
)
@every_engine
@every_op
def test_templates_over_peers_are_proved(op, engines, world, chunks):
    for _, plan in plans_of(op, world, engines, chunks):
        validate(plan)


@pytest.mark.parametrize("op", REDUCTIONS)
def test_proof_over_peers_misses_each_wait_flag_and_piece_of_work(op):
    """By mutation: with the kernel on all ranks there is no wait that another one makes redundant."""
    for _, plan in plans_of(op, 2, "any", chunks=1):
        for work in (False, True):
            tried, found = _plan_test.unnoticed(plan, PEERS, (True, True), 1, work)
            assert tried > 4
            assert found == []


@pytest.mark.parametrize(("world", "seeds"), [(2, 12), pytest.param(4, 10, marks=pytest.mark.long)])
@every_engine
@pytest.mark.parametrize("op", OP_NAMES[:3])
def test_random_programs_over_peers_are_proved_or_refused(op, engines, world, seeds):
    problem = problem_of(op, world, rows=8 * world, n=64)
    refused = 0
    for seed in range(seeds):
        plan = random_program(problem, seed, **how(op))
        validate(by_engines(plan, ENGINES[engines]))
        what, other = disturbed(plan, seed + 1)
        try:
            validate(by_engines(other, ENGINES[engines]))
        except ValueError as error:
            assert "rank" in str(error), what
            refused += 1
    assert refused >= 1


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in FILES for name in FILES[kind]])
def test_files_over_peers_are_proved(tmp_path, kind, name):
    for engines in ENGINES.values():
        op = FILES[kind][name][0]
        validate(by_engines(file_plan(tmp_path, kind, name, problem_of(op, 2), PINGPONG), engines))


# --- results, on GPUs -----------------------------------------------------------------------------------------------

# Rows in all, n, k: whole tiles, parts that are not, rows that are no whole accesses, few.
SHAPES = [(1024, 512, 256), (730, 264, 72), (96, 33, 40), (9, 128, 64)]


def file_plan(folder: Path, kind: str, name: str, problem: Problem, kernel: Kernel) -> Plan:
    path = folder / f"{kind} {name} {os.getpid()}"
    path.write_text(text_of(kind, name, problem.world_size), encoding="utf-8")
    read = from_msccl if kind == "msccl" else from_mscclpp
    return read(path, problem, **how(problem.op.name.lower(), kernel))


def plans_to_run(
    kind: str, op: str, kernel: Kernel, folder: Path
) -> Iterator[tuple[str, Case, Plan]]:
    """Names, cases and plans of templates, of programs drawn at random, or of files."""
    world = dist.get_world_size()
    if kind == "templates":
        biases = (False, True) if has_bias(op) else (False,)
        for (rows, n, k), bias, chunks in itertools.product(SHAPES, biases, (1, 3)):
            case = Case((rows // world * world,), n, k, torch.bfloat16, bias=bias)
            for name, plan in template_plans(op, case, world, chunks, **how(op, kernel)):
                yield name, case, plan
        return
    case = Case((64 * world,), 264, 72, torch.bfloat16)
    problem = OPS[op].problem(case, world)
    if kind == "random":
        for seed in range(6):
            yield f"seed {seed}", case, random_program(problem, seed, **how(op, kernel))
        return
    for compiler, files in FILES.items():
        for name in [name for name in files if files[name][0] == op]:
            yield name, case, file_plan(folder, compiler, name, problem, kernel)


@pytest.mark.parametrize(
    ("kind", "kernel", "ops"),
    [
        ("templates", PINGPONG, REDUCTIONS),
        ("templates", Kernel.LIBRARY, OP_NAMES),
        ("random", Kernel.LIBRARY, OP_NAMES[:3]),
        ("files", Kernel.LIBRARY, OP_NAMES),
    ],
    ids=lambda value: getattr(value, "name", value if isinstance(value, str) else ""),
)
@every_engine
@pytest.mark.ranks((2, "nccl"), (4, "nccl"))
@pytest.mark.peers
@pytest.mark.seconds(600)
def test_programs_over_peers_are_exact(
    failures: Failures, tmp_path: Path, kind: str, kernel: Kernel, ops: list[str], engines: str
) -> None:
    for op in ops:
        for name, case, plan in plans_to_run(kind, op, kernel, tmp_path):
            with use_plan(by_engines(plan, ENGINES[engines])):
                for seed in (1, 2):
                    check_call(failures, case, op, name, engines, seed=seed, op=op)


# --- order, graphs and deadlines, on GPUs ---------------------------------------------------------------------------


def runner(op: str, engines: str, rows: int, kernel: Kernel, n: int = 776, k: int = 136) -> Runner:
    world = dist.get_world_size()
    case = Case((rows * world,), n, k, torch.bfloat16, bias=has_bias(op))
    name, plan = template_plans(op, case, world, 2, **how(op, kernel))[0]
    return Runner(f"{name} {engines}", op, case, by_engines(plan, ENGINES[engines]))


@pytest.mark.parametrize(
    ("ops", "kernel"),
    [
        (["gemm_allreduce"], PINGPONG),
        (["gemm_reducescatter"], PINGPONG),
        (["allgather_gemm"], Kernel.LIBRARY),
        ([*OP_NAMES[:3]], Kernel.LIBRARY),
    ],
    ids=lambda value: getattr(value, "name", None) or "+".join(value),
)
@pytest.mark.ranks((2, "nccl"), (4, "nccl"))
@pytest.mark.peers
def test_races_of_programs_over_peers(failures: Failures, ops: list[str], kernel: Kernel) -> None:
    runners = [
        runner(op, engines, 321 + 64 * i, kernel) for i, engines in enumerate(ENGINES) for op in ops
    ]
    rows = 16800 // dist.get_world_size() ** 2  # of each rank; what is right is computed in float64
    race(failures, runners, runner(ops[0], "any", rows, kernel, 4096, 4096), 150, len(ops))


@every_engine
@pytest.mark.parametrize("op", OP_NAMES[:3])
@pytest.mark.ranks((2, "nccl"), (4, "nccl"))
@pytest.mark.peers
def test_graphs_of_programs_over_peers(failures: Failures, op: str, engines: str) -> None:
    """One graph of two calls, replayed between plain calls, on operands that change."""
    mine = runner(op, engines, 256, Kernel.LIBRARY)
    with use_plan(mine.plan):
        captured = Captured([mine, mine])
        found = Found()
        draw = random.Random(5)
        for turn in range(12):
            captured.refill(turn % 3)
            if draw.random() < 0.5:
                found.replay(captured, turn)
            else:
                found.call(captured, turn % 2, turn)
        found.report(failures)


def call_alone(engines: str) -> str:
    """Rank 0 makes a call more than the others."""
    world, rank = dist.get_world_size(), dist.get_rank()
    case = Case((128 * world,), 256, 64, torch.bfloat16)
    edited = how("gemm_allreduce", Kernel.LIBRARY)
    _, plan = template_plans("gemm_allreduce", case, world, 1, **edited)[0]
    plan_module.set_plan(by_engines(plan, ENGINES[engines]))
    arguments = OPS["gemm_allreduce"].arguments(case, rank, world, rank_device())
    overlap_torch.gemm_allreduce(*arguments)
    torch.cuda.synchronize()
    if rank != 0:
        return ""
    overlap_torch.gemm_allreduce(*arguments)
    torch.cuda.synchronize()
    return message_of(overlap_torch.check)


@every_engine
@pytest.mark.ranks((2, "nccl"))
def test_programs_over_peers_end_at_the_deadline(ranks, engines):
    skip_unless_it_runs(ranks)
    deadline = {"OVERLAP_TIMEOUT_S": str(rank_pool.under_load(3.0))}
    outcomes = rank_pool.run_fresh(
        2, "nccl", call_alone, engines, environment=deadline, timeout_s=120.0
    )
    message = outcomes[0].result()
    assert "rank 0" in message and "rank 1" in message
