"""Tuning: what is measured and taken, on all ranks the same; caches that hit on one rank, are damaged or cannot be written."""

import errno
import json
import os
import random
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode

import overlap_torch
from checks import Failures
from machines import big, hopper, slow, total
from operands import world_name
from overlap_torch import plan
from overlap_torch._ops import collectives, eager
from overlap_torch._tools.launch import Ranks
from overlap_torch._tune import command as _tune_command
from overlap_torch._tune import files as _tuned_files
from overlap_torch._tune import first_calls as _first_calls
from overlap_torch._tune import session as _session
from overlap_torch._tune import tune as _tune
from overlap_torch._tune.board import Board
from overlap_torch._tune.choose import corrections_of, family, ranked
from overlap_torch._tune.measure import is_close, scaled_keywords
from overlap_torch.plan import Problem
from overlap_torch.plan._names import enum_name
from overlap_torch.plan.types import Op, Schedule

SHAPES = (1024, 64, 64)  # that the planner has candidates for, and makes the sequence of
ALL = ("gemm_allreduce", "gemm_reducescatter", "allgather_gemm")


def problem(op: str = "gemm_allreduce", m: int = SHAPES[0]) -> Problem:
    return Problem(m, *SHAPES[1:], "float32", dist.get_world_size(), op)


def told(results: list[_session.Tuned]) -> list[tuple[Any, ...]]:
    """The results that can be compared between processes."""
    return [
        (one.plan.encode(), one.source, [us for _, us in one.times], one.mode) for one in results
    ]


def held(one: Problem) -> plan.Plan:
    return plan.plan_for(one.m, one.n, one.k, one.dtype, device="cpu", op=one.op)


@contextmanager
def cached(folder: str) -> Iterator[None]:
    """Tuned plans are kept there; none is set in the end."""
    with mock.patch.dict(os.environ, OVERLAP_CACHE=folder):
        yield
        plan.clear_plans()


def tune(folder: str, *problems: Problem, **options: Any) -> list[_session.Tuned]:
    with cached(folder):
        return overlap_torch.tune(problems, device="cpu", repeats=2, **options)


# A scaled problem has these beside its sizes: dtype, recipe, output_dtype and fast_accum.
SCALED = (
    ("float8_e4m3fn", "tensor_wise", "bfloat16", False),
    ("float8_e4m3fn", "row_wise", "bfloat16", True),
    ("float8_e4m3fn", "row_wise", "float16", False),
    ("float8_e5m2", "row_wise", "bfloat16", False),
    ("float8_e4m3fn", "block_wise", "float32", False),
)


def scaled_problem(
    op: str, dtype: str, recipe: str, output_dtype: str, fast_accum: bool
) -> Problem:
    return Problem(64, 144, 160, dtype, dist.get_world_size(), op, recipe, output_dtype, fast_accum)


@pytest.mark.parametrize("modes", [("call", "row"), ("call",)], ids=["usual", "scaled"])
@pytest.mark.ranks((2, "gloo"))
def test_tune_measures_once_and_gives_all_ranks_the_same(
    failures: Failures, tmp_path: Path, modes: tuple[str, ...]
) -> None:
    """Operands as they are, in two modes; and scaled ones by recipe, output and accumulation."""
    scaled = len(modes) == 1
    problems = [problem(op) for op in ALL]
    if scaled:
        problems = [scaled_problem(op, *one) for op in ALL for one in SCALED]
    first, second = (tune(str(tmp_path), *problems, modes=modes) for _ in range(2))
    for tuned in (first, second):
        assert [one.problem for one in tuned] == [each for each in problems for _ in modes]
        assert [one.plan.problem for one in tuned] == [one.problem for one in tuned]
    for one in (*first, *second):
        assert one.times[0][0].schedule == Schedule.SEQUENTIAL and (len(one.times) > 1) != scaled
        assert one.plan in [measured for measured, _ in one.times]
        assert one.gain > 0.0
    if scaled:
        ran = [repr(problem) for problem, _ in _tune.called(world_name(), "cpu")]
        assert [ran.count(repr(one)) for one in problems] == [1] * len(problems)
    failures.alike((told(first), told(second)))
    sources = [{one.source for one in tuned} for tuned in (first, second)]
    failures.equal(sources, [{"measured"}, {"cache"}])
    failures.equal([one.plan for one in first], [one.plan for one in second])
    failures.equal([one.mode for one in first], [*modes] * len(problems))
    failures.equal(len(list(tmp_path.rglob("*.json"))), len(problems), "files")


@pytest.mark.parametrize("recipe", ["tensor_wise", "row_wise", "block_wise"])
@pytest.mark.parametrize("op", ALL)
def test_tune_scales_differ_by_rank_and_are_not_one(op, recipe):
    """So that a plan that takes a wrong one is found out."""
    wanted = Problem(64, 144, 160, "float8_e4m3fn", 2, op, recipe, "float16", True)
    cpu = torch.device("cpu")
    mine, theirs = (scaled_keywords(wanted, cpu, rank) for rank in range(2))
    rows = 32 if op == "allgather_gemm" else 64
    shapes = {
        "tensor_wise": [(1,), (1,)],
        "row_wise": [(rows, 1), (144, 1)],
        "block_wise": [(rows, 2), (2, 2)],
    }
    names = ("scale_input", "scale_weight")
    assert [tuple(mine[name].shape) for name in names] == shapes[recipe]
    for name in names:
        assert mine[name].dtype == torch.float32
        assert mine[name].min() >= 0.5 and mine[name].max() <= 2.0
        assert mine[name].unique().numel() == mine[name].numel()
        assert not torch.equal(mine[name], theirs[name])
    assert (mine["output_dtype"], mine["use_fast_accum"]) == (torch.float16, True)


@pytest.mark.ranks((2, "gloo"))
def test_tune_sets_what_it_took(failures: Failures, tmp_path: Path) -> None:
    wanted = problem()
    before = held(wanted)

    def time(call, mode, flush):
        """The more chunks a plan has, the faster it looks."""
        call()
        return 1000.0 / len(held(wanted).chunks)

    with cached(str(tmp_path)), mock.patch.object(_session, "time_us", time):
        (one,) = overlap_torch.tune([wanted], device="cpu", repeats=3)
        failures.equal(held(wanted), one.plan)
    failures.expect(None if one.plan != before else "the planner's own plan")


@pytest.mark.ranks((2, "gloo"))
def test_tune_keeps_the_sequence_where_the_fastest_was_lucky(failures: Failures) -> None:
    """Every plan but the sequence is fast while several are measured, and slow beside the sequence alone."""
    wanted, session = problem(), _session.Session.measure
    measured: list[int] = []

    def measure(self, one, plans, mode, turns=None):
        measured.append(len(plans))
        return session(self, one, plans, mode, turns)

    def time(call, mode, flush):
        call()
        overlaps = len(held(wanted).chunks) > 1
        return (10.0 if len(measured) == 1 else 1000.0) if overlaps else 100.0

    with (
        mock.patch.object(_session, "time_us", time),
        mock.patch.object(_session.Session, "measure", measure),
    ):
        (one,) = overlap_torch.tune([wanted], cache=False, device=torch.device("cpu"))
    failures.equal((measured[1:], one.plan.schedule), ([2], Schedule.SEQUENTIAL))


@pytest.mark.parametrize(
    ("before", "right", "looked_at", "us", "right_again", "taken"),
    [
        ("c", [0, 1, 2], "ad", [100.0, 90.0], [0, 1], 2),  # "c" is not among those measured
        ("c", [0, 1, 2], "ad", [100.0, 99.0], [0, 1], 0),
        ("b", [0, 1, 2], "abd", [100.0, 80.0, 70.0], [0, 1, 2], 2),
        ("b", [0, 1, 2], "abd", [100.0, 80.0, 79.0], [0, 1, 2], 1),  # "d" does not gain over "b"
        ("b", [0, 1, 2], "abd", [100.0, 99.0, 90.0], [0, 1, 2], 2),
        ("b", [0, 1, 2], "abd", [100.0, 120.0, 110.0], [0, 1, 2], 0),
        # A plan that was wrong once is not taken in the end.
        ("b", [0, 2], "ad", [100.0, 50.0], [0, 1], 2),
        ("b", [0, 2], "ad", [100.0, 50.0], [0], 0),
    ],
)
def test_tune_looks_again_beside_the_sequence_and_the_plan_from_before(
    before, right, looked_at, us, right_again, taken
):
    """The sequence is "a", the fastest at first "d"."""

    class Session:
        device, repeats = torch.device("cuda"), 10

        def measure(self, wanted, plans, mode, turns):
            assert (plans, mode) == ([*looked_at], "row")
            assert turns == (370 if len(us) == 3 else 400)  # 0.2 s, and 40 times as many at most
            return {"us": us, "right": right_again}

    first_us = [200.0, 190.0, 150.0]
    one = _session._Measured("wanted", "row", True, ["a", "b", "d"], before, first_us, right, 2)
    assert _session.Session._look_again(Session(), one) == taken


@pytest.mark.ranks((2, "gloo"))
def test_tune_takes_a_plan_only_if_it_gains_in_the_end_too(
    failures: Failures, tmp_path: Path
) -> None:
    """Plans that overlap are fast until all problems were measured, and slow from then on."""
    wanted = [problem(), problem("gemm_reducescatter")]
    measure, to_look_at = _session.Session.measure, _session.Session.to_look_at_again
    later, current, taken = False, wanted[0], []

    def time(call, mode, flush):
        call()
        overlaps = len(held(current).chunks) > 1
        return (1000.0 if later else 10.0) if overlaps else 100.0

    def measure_one(self, one, *rest):
        nonlocal current
        current = one
        return measure(self, one, *rest)

    def come_to_the_end(self):
        nonlocal later
        later = True
        taken.append(to_look_at(self))
        return taken[-1]

    methods = {"measure": measure_one, "to_look_at_again": come_to_the_end}
    for apart_s in (1e9, 0.0):  # too soon for a last look, and not
        later = False
        with (
            mock.patch.multiple(_session, time_us=time, _APART_S=apart_s),
            mock.patch.multiple(_session.Session, **methods),
        ):
            for _ in range(2):
                results = tune(str(tmp_path / str(apart_s)), *wanted)
                taken.append([(one.source, one.plan.schedule.name) for one in results])
    # The problems whose winners were looked at once more, and what was taken; then the same from the cache.
    failures.equal(taken[:2], [[], [("measured", "OVERLAPPED")] * 2])
    failures.equal(taken[2:4], [[], [("cache", "OVERLAPPED")] * 2])
    failures.equal(taken[4:6], [[0, 1], [("measured", "SEQUENTIAL")] * 2])
    failures.equal(taken[6:], [[], [("cache", "SEQUENTIAL")] * 2])


@pytest.mark.ranks((2, "gloo"))
def test_tune_agrees_whatever_each_rank_measures(failures: Failures) -> None:
    noise = random.Random(100 + dist.get_rank())
    changes = {
        "time_us": lambda call, mode, flush: (call(), noise.uniform(1.0, 1000.0))[1],
        "_SHARE": {"cpu": 1.0},  # whatever is faster, by however little
        "_LOOK_US": 0.0,  # the second look is as short as it gets
    }
    taken = set()
    for turn in range(4):
        with mock.patch.multiple(_session, **changes):
            found = told(tune("/nonexistent", *[problem(op) for op in ALL], cache=False))
        failures.alike(found, turn)
        taken |= {str(one[0]) for one in found}
    failures.expect(None if len(taken) > len(ALL) else "always the same plans")


@pytest.mark.parametrize("owner", [0, 1])
@pytest.mark.ranks((2, "gloo"))
def test_tune_takes_rank_0s_cache_alone(failures: Failures, tmp_path: Path, owner: int) -> None:
    mine = tmp_path / str(dist.get_rank())
    if dist.get_rank() == owner:
        mine.mkdir()
    (first,) = tune(str(tmp_path / str(owner)), problem())
    (second,) = tune(str(mine), problem())
    right = ("measured", "cache" if owner == 0 else "measured")
    failures.equal((first.source, second.source), right)


DAMAGE = {
    "empty": lambda text: "",
    "cut": lambda text: text[: len(text) // 2],
    "bytes": lambda text: "\x00\xff" + text,
    "another schema": lambda text: text.replace('"schema": 1', '"schema": 99'),
    "another kind": lambda text: text.replace("overlap_torch.tuned", "other"),
    "another machine": lambda text: text.replace('"arch": "0"', '"arch": "90"'),
    "a list": lambda text: "[1, 2]",
    "no time": lambda text: edited(text, us=lambda us: ["x", *us[1:]]),
    "a time that is infinite": lambda text: edited(text, us=lambda us: [1e999, *us[1:]]),
    "a time of 0": lambda text: edited(text, us=lambda us: [0.0, *us[1:]]),
    "a time too few": lambda text: edited(text, us=lambda us: us[1:]),
    "a choice that is none": lambda text: edited(text, chosen=lambda chosen: 99),
    "a plan that is none": lambda text: edited(text, plans=lambda plans: [[1, 2], *plans[1:]]),
    "a plan of another M": lambda text: text.replace('"1024/call"', '"1280/call"'),
}


def edited(text: str, **changes: Any) -> str:
    data = json.loads(text)
    for entry in data["entries"].values():
        for name, change in changes.items():
            entry[name] = change(entry[name])
    return json.dumps(data)


@pytest.mark.ranks((2, "gloo"))
def test_tune_measures_again_what_a_damaged_or_foreign_file_had(
    failures: Failures, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    tune(folder, problem())
    dist.barrier()
    (file,) = tmp_path.rglob("*.json")
    text = file.read_text()
    for name in DAMAGE:
        dist.barrier()
        if dist.get_rank() == 0:
            file.write_text(DAMAGE[name](text))
        wanted = problem(m=1280 if name == "a plan of another M" else SHAPES[0])
        sources = [one.source for one in tune(folder, wanted) + tune(folder, wanted)]
        failures.equal(sources, ["measured", "cache"], name)


@pytest.mark.ranks((2, "gloo"))
def test_tune_on_a_full_disk_warns_and_remembers(failures: Failures, tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        mock.patch.object(os, "fsync", side_effect=full),
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        results = [tune(str(tmp_path), problem())[0] for _ in range(2)]
    failures.equal([one.source for one in results], ["measured", "cache"])
    warned = [str(one.message) for one in said if "not kept" in str(one.message)]
    failures.equal(len(warned), 1 if dist.get_rank() == 0 else 0, "warnings")
    for message in warned:
        failures.holds("No space left on device", message)
    dist.barrier()  # rank 0 takes its attempt away again
    failures.equal([file for file in tmp_path.rglob("*") if file.is_file()], [], "files")


def test_tune_keeps_each_way_to_compute_a_weight_in_a_file_of_its_own() -> None:
    scaled = [
        ("float8_e4m3fn", "tensor_wise", "bfloat16", False),
        ("float8_e4m3fn", "tensor_wise", "bfloat16", True),
        ("float8_e4m3fn", "tensor_wise", "float16", False),
        ("float8_e4m3fn", "row_wise", "bfloat16", False),
        ("float8_e5m2", "tensor_wise", "bfloat16", False),
    ]
    problems = [Problem(64, 16, 8, dtype, 2, ALL[0], *rest) for dtype, *rest in scaled]
    for invariance in ("none", "batch", "world"):
        problems.append(Problem(64, 16, 8, "float32", 2, ALL[0], invariance=invariance))
    files = _tuned_files.Files({})
    assert len({files.path(one) for one in problems}) == len(problems)


@pytest.mark.ranks((2, "gloo"))
def test_tune_keeps_all_m_of_a_weight_in_one_file(failures: Failures, tmp_path: Path) -> None:
    """Two jobs that know nothing of each other write other M of one weight."""
    where = torch.device("cpu"), plan.machine("cpu"), dist.get_world_size()
    for right in ([(1024, "call")], [(1024, "call"), (2048, "call")]):
        tune(str(tmp_path), problem(m=right[-1][0]))
        with cached(str(tmp_path)):
            files = _tuned_files.Files(_tuned_files.environment(*where))
            if dist.get_rank() == 0:
                failures.equal(sorted(files.read(problem())), right)
    failures.equal(len(list(tmp_path.rglob("*.json"))), 1)


def test_tune_jobs_that_write_at_once_lose_nothing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("OVERLAP_CACHE", str(tmp_path))

    def write(job: int) -> None:
        files = _tuned_files.Files({})
        for m in range(job, 64, 8):
            one = big(m=m + 1)
            files.write(
                one, "call", [plan.templates.make_sequential(one, hopper()).encode()], [1.0], 0
            )

    jobs = [threading.Thread(target=write, args=(job,)) for job in range(8)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    found = _tuned_files.Files({}).read(big())
    assert sorted(found) == [(m, "call") for m in range(1, 65)]


@pytest.mark.parametrize("all_of_them", [False, True])
@pytest.mark.ranks((2, "gloo"))
def test_tune_drops_on_all_ranks_what_one_cannot_run(failures: Failures, all_of_them: bool) -> None:
    original = _session.Session._refusal

    def refusal(self: _session.Session, one: plan.Plan) -> str:
        overlapped = one.schedule == Schedule.OVERLAPPED
        refuses = dist.get_rank() == 1 and (all_of_them or (overlapped and len(one.chunks) == 2))
        return "no memory" if refuses else original(self, one)

    with (
        mock.patch.object(_session.Session, "_refusal", refusal),
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        (result,) = tune("/nonexistent", problem(), cache=False)
    chunks = [len(one.chunks) for one, _ in result.times]
    if all_of_them:
        failures.equal((chunks, result.source), ([], "kept: rank 1 cannot run it: no memory"))
    else:
        right = chunks[0] == 1 and 2 not in chunks and len(chunks) > 1
        failures.expect(None if right else f"{chunks}")
        failures.equal(result.source, "measured")
    failures.equal(len(said), 1 if all_of_them and dist.get_rank() == 0 else 0, "warnings")


@pytest.mark.ranks((2, "gloo"))
def test_tune_names_the_rank_that_differs(failures: Failures) -> None:
    own, environment = torch.ops.overlap.build_info(), _tuned_files.environment

    def other(*args: Any) -> dict[str, str]:
        return environment(*args) | ({"build": "other"} if dist.get_rank() == 1 else {})

    with mock.patch.object(_tuned_files, "environment", other), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (result,) = tune("/nonexistent", problem(), cache=False)
    failures.equal(result.source, f"kept: rank 1 has build 'other', rank 0 '{own}'")


@pytest.mark.ranks((2, "gloo"))
@pytest.mark.fresh()
def test_tune_of_nothing_takes_what_was_called(failures: Failures) -> None:
    input, weight = torch.ones(1024, 64), torch.ones(64, 64)
    overlap_torch.gemm_allreduce(input, weight)
    mine = [one.problem for one in overlap_torch.tune(device="cpu", repeats=1, cache=False)]
    failures.equal(mine, [Problem(*SHAPES, "float32", 2, "gemm_allreduce")])


def board(store: dist.Store, rank: int, timeout_s: float = 20.0) -> Board:
    return Board(store, rank, 2, timeout_s, "here")


def test_tune_board_waits_no_longer_than_its_deadline():
    store = dist.HashStore()
    with pytest.raises(RuntimeError, match="rank 0 heard nothing from rank 1 within 0.05 s"):
        board(store, 0, 0.05).gather(1)
    with pytest.raises(RuntimeError, match="rank 1 heard nothing from rank 0 within 0.05 s"):
        board(store, 1, 0.05).broadcast(None)


def test_tune_board_leaves_only_its_last_keys_behind():
    store = dist.HashStore()
    heard: list[Any] = []

    def other() -> None:
        mine = board(store, 1)
        for turn in range(5):
            heard.append(mine.broadcast(None))
            mine.gather(["own", turn])

    thread = threading.Thread(target=other)
    thread.start()
    mine = board(store, 0)
    for turn in range(5):
        assert mine.broadcast({"turn": turn}) == {"turn": turn}
        assert mine.gather("first") == ["first", ["own", turn]]
    thread.join()
    assert heard == [{"turn": turn} for turn in range(5)]
    assert store.num_keys() <= 1


def decided(*ranks_us: list[list[float]], right: list[list[bool]] | None = None) -> int:
    class Session:
        device = torch.device("cuda")

    plans = len(ranks_us[0])
    said = [
        {"us": us, "right": [True] * plans if right is None else right[rank]}
        for rank, us in enumerate(ranks_us)
    ]
    return _session.Session._decide(Session(), said)["chosen"]


def test_tune_takes_the_fastest_by_the_slowest_rank_and_the_sequence_in_doubt():
    assert decided([[100.0], [90.0], [80.0]]) == 2
    assert decided([[100.0], [99.0]]) == 0  # noise
    assert decided([[100.0], [150.0]]) == 0
    assert decided([[100.0], [50.0]], [[100.0], [120.0]]) == 0
    assert decided([[100.0, 100.0, 100.0], [10.0, 130.0, 130.0]]) == 0  # the median
    wrong = [[True, True, True], [True, False, True]]
    assert decided([[100.0], [10.0], [90.0]], [[100.0], [10.0], [90.0]], right=wrong) == 2


def test_tune_progress_is_lines_where_stderr_is_no_terminal(capsys, monkeypatch):
    _tune.draw_bar(3, 4, "gemm_allreduce 8x8x8 call")
    _tune.draw_bar(4, 4, "done")
    assert capsys.readouterr().err == "3/4 gemm_allreduce 8x8x8 call\n4/4 done\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    _tune.draw_bar(1, 2, "gemm_allreduce 8x8x8 call")
    _tune.draw_bar(2, 2, "done")
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.endswith("\n")
    assert said.startswith("\r[###############...............] 1/2 gemm_allreduce 8x8x8 call")


def test_tune_compares_results_with_the_sequences():
    one = torch.tensor([[1.0, -200.0], [3.0, 4.0]])
    assert is_close(one + 1.0, one)
    assert not is_close(one.flip(0), one)
    assert not is_close(one * float("nan"), one)
    assert not is_close(one[:1], one)


@pytest.mark.parametrize("op", [Op.GEMM_ALLREDUCE, Op.GEMM_REDUCESCATTER, Op.ALLGATHER_GEMM])
def test_tune_measures_the_best_of_each_way_beside_the_sequence(op):
    for machine in (hopper(peer_gbps=365.0), hopper(windows=True), slow()):
        wanted = big(op=op, world_size=4)
        sequence, *others = ranked(wanted, machine, 3)
        assert sequence == plan.templates.make_sequential(wanted, machine)
        found = [one for one in plan.candidates(wanted, machine, all=True) if one != sequence]
        assert 1 <= len(others) <= 3 and all(one in found for one in others)
        best = min(total(one, machine) for one in found)
        assert total(others[0], machine) == best
        ways = {communication(one) for one in others}
        assert len(ways) == min(len({communication(one) for one in found}), 3)


def communication(one: plan.Plan) -> tuple[Any, ...]:
    return one.kernel, one.collective, one.chunks[0].transport, one.resources.window


def test_tune_ranks_by_what_was_measured_nearby():
    machine = hopper(windows=True)
    wanted = big(m=16384, world_size=4)
    best = ranked(wanted, machine, 1)[1]

    def entry(m: int, factor: float) -> _tuned_files.Entry:
        """All as expected, but what is of the best one's family."""
        plans = plan.candidates(big(m=m, world_size=4), machine)
        factors = [factor if family(one) == family(best) else 1.0 for one in plans]
        assert factor in factors
        us = [total(one, machine) * by for one, by in zip(plans, factors, strict=True)]
        return _tuned_files.Entry([one.encode() for one in plans], us, 0)

    entries = {(12288, "call"): entry(12288, 2.0), (8192, "call"): entry(8192, 1.5)}
    corrections = corrections_of(wanted, "call", entries, machine)
    assert corrections(best) == pytest.approx(2.0)  # of the nearest M
    assert family(ranked(wanted, machine, 1, corrections)[1]) != family(best)
    assert corrections_of(wanted, "row", entries, machine) is None
    # A family that was not measured has the mean of its way, else of all.
    us = [total(best, machine) * 3.0]
    alone = {(16384, "call"): _tuned_files.Entry([best.encode()], us, 0)}
    corrections = corrections_of(big(m=8192, world_size=4), "call", alone, machine)
    others = plan.candidates(big(m=8192, world_size=4), machine)
    assert {round(corrections(one), 6) for one in others} == {3.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modes": ("graph",)}, r"modes is \('graph',\), allowed are sequences of call, row"),
        ({"modes": "call"}, "modes is 'call', allowed are sequences"),
        ({"modes": ()}, r"modes is \(\), allowed"),
        ({"most": 0}, "most is 0 and repeats 10, allowed are 1 or more"),
        ({"repeats": 0}, "most is 4 and repeats 0, allowed are 1 or more"),
        ({"most": 1.5}, "most must be an integer, but it is a float"),
        ({"repeats": 2.5}, "repeats must be an integer, but it is a float"),
        ({"plans": [3]}, "plans are of overlap_torch.plan, but got a int"),
    ],
    ids=str,
)
def test_tune_says_what_is_allowed(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        overlap_torch.tune([], **options)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--shapes", "10x20"], "--shapes has '10x20', allowed is MxNxK"),
        (["--shapes", "1x2x3", "--op", "gemm"], "--op has 'gemm', allowed are gemm_allreduce"),
        (["--shapes", "1x2x3", "--modes", "graph"], "allowed are sequences of call, row"),
        (["--shapes", "1x2x3", "train.py"], "--record FILE takes a program after it"),
        (["--record", "file"], "--record FILE takes a program after it"),
        (
            ["--record", "no/folder/file", "-m", "train"],
            "--record: is no/folder/file, but there is no folder no/folder",
        ),
        (["--record", "/tmp/", "-m", "json.tool"], "--record: is '/tmp/', a folder: name a file"),
        (
            ["--record", "file", "no.py"],
            "--record runs a script, or -m and a module, but there is no file no.py",
        ),
        (["--record", "file", "-m", "no.such"], "there is no module no.such"),
        (["--shapes", "99999999999999999999x2x3"], "allowed is MxNxK"),
        (["--shapes", "1x2x3", "--most", "0"], "--most: is '0', allowed are whole numbers from 1"),
        ([], "one of the arguments --shapes --recorded --record is required"),
        (
            ["--shapes", "1x2x3", "--dtype", "float8_e5m2"],
            "--dtype float8_e5m2 needs --scales; allowed are tensor, row, block",
        ),
        (
            ["--shapes", "1x2x3", "--dtype", "bf16", "--scales", "row"],
            "--scales and --fast-accum are for fp8, but --dtype is bf16; allowed are float8_e4m3fn, float8_e5m2",
        ),
        (["--shapes", "1x2x3", "--fast-accum"], "but --dtype is fp32"),
    ],
    ids=str,
)
def test_tune_command_says_what_is_allowed(argv, message, capsys):
    with pytest.raises(SystemExit):
        _tune_command.main([*argv, "--device", "cpu"])
    assert message in capsys.readouterr().err


@pytest.mark.long
def test_tune_command_measures_and_remembers(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("OVERLAP_CACHE", str(tmp_path))
    argv = ["--shapes", "1024x64x64", "--device", "cpu", "--repeats", "1", "--modes", "call"]
    for source in ("measured", "cache"):
        assert _tune_command.main(argv) == 0
        said = capfd.readouterr().out
        assert said.startswith("gemm_allreduce 1024x64x64") and source in said.split("\n")[0]
        assert said.count(" us  ") >= 2
    assert len(list(tmp_path.rglob("gemm_allreduce-64x64-float32-w2.json"))) == 1


def test_tune_command_tunes_what_a_process_calls(monkeypatch):
    """Shapes are tuned for OVERLAP_INVARIANCE, as calls without an invariance have it."""
    given = []
    monkeypatch.setattr(_tune_command, "launch", lambda ranks, work, job: given.append(job) or 0)
    monkeypatch.setattr(collectives, "USUAL_INVARIANCE", "batch")
    argv = ["--shapes", "64x16x8", "--op", "gemm_reducescatter,allgather_gemm", "--device", "cpu"]
    assert _tune_command.main(argv) == 0
    assert given[0]["problems"] == (
        Problem(64, 16, 8, "float32", 2, "gemm_reducescatter", invariance="batch"),
        Problem(64, 16, 8, "float32", 2, "allgather_gemm"),
    )


def test_commands_have_the_ranks_of_torchrun(monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    assert Ranks.choose(None, "cpu") == Ranks(3, "cpu")
    with pytest.raises(ValueError, match="world is 4, but torchrun started 3 ranks: leave --world"):
        Ranks.choose(4, "cpu")


def test_tune_files_know_what_times_hold_for(monkeypatch):
    device = torch.device("cpu")
    machine = plan.Machine(sm_count=4)
    before = _tuned_files.environment(device, machine, 2)
    # A program with OVERLAP_TUNE=1, in vLLM too, finds what the command has measured.
    idle = {"CACHE": "/somewhere", "TUNE": "1", "VLLM": "1", "MOE_ROWS": "64", "ARCHS": "sm_90a"}
    for name, value in idle.items():
        monkeypatch.setenv(f"OVERLAP_{name}", value)
    assert _tuned_files.environment(device, machine, 2) == before
    machine.clique = 2  # plans between hosts of two ranks
    assert _tuned_files.environment(device, machine, 2) == {**before, "clique": "2"}
    machine.clique = 0
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    changed = _tuned_files.environment(device, machine, 2)
    assert changed == {**before, "NCCL_ALGO": "Ring"}
    build, _, sources = before["build"].partition(";sources=")
    assert build and len(sources) == 16
    updated = {
        **before,
        "build": f"{build};sources={sources[::-1]}",
    }  # other sources, another folder
    assert len({_tuned_files.Files(one).path(big()) for one in (before, changed, updated)}) == 3


def test_tune_family_is_what_other_m_share():
    machine = hopper(windows=True)

    def families(m: int) -> set[tuple[str, ...]]:
        return {family(one) for one in plan.candidates(big(m=m, world_size=4), machine)}

    for m in (10240, 16384):
        assert len(families(8192) & families(m)) > 0.8 * len(families(8192))
    assert len(families(8192)) > 10


@pytest.mark.ranks((2, "gloo"))
def test_tune_measures_calls_of_the_problems_invariance(failures: Failures, tmp_path: Path) -> None:
    batch = Problem(1064, *SHAPES[1:], "float32", 2, "gemm_allreduce", invariance="batch")
    tune(str(tmp_path), batch)
    failures.equal([one for one, _ in _tune.called(world_name(), "cpu") if one.m == 1064], [batch])


@pytest.mark.ranks((2, "gloo"))
def test_tune_at_first_calls(failures: Failures, tmp_path: Path) -> None:
    """With OVERLAP_TUNE=1: sources of what was tuned, call by call."""
    hook, original = _first_calls.FirstCalls(), _first_calls.tune
    told: list[list[tuple[str, int]]] = []

    def noting(problems: Any, **options: Any) -> Any:
        results = original(problems, repeats=1, **options)
        told[-1] += [(enum_name(one.problem.op), one.problem.m) for one in results]
        return results

    input, weight = torch.ones(1000, 64), torch.ones(64, 64)
    learns = [one.clone().requires_grad_() for one in (input, weight)]
    calls = (
        lambda: overlap_torch.gemm_allreduce(input, weight),
        lambda: overlap_torch.gemm_allreduce(input, weight),
        lambda: overlap_torch.gemm_allreduce(input, weight, invariance="batch"),
        lambda: overlap_torch.gemm_reducescatter(*learns).sum().backward(),
        lambda: overlap_torch.gemm_reducescatter(*learns).sum().backward(),
        lambda: overlap_torch.allgather_gemm(input[:8], [weight, weight]),
        lambda: overlap_torch.gemm_allreduce(input[:0], weight),
    )
    with (
        cached(str(tmp_path)),
        mock.patch.object(_first_calls, "tune", noting),
        mock.patch.object(eager, "behind_calls", hook),
    ):
        plan.clear_plans()
        for problem, _ in _tune.called(world_name(), "cpu"):  # by other tests in these processes
            hook._seen.setdefault(dist.group.WORLD, set()).add(("cpu", repr(problem)))
        for call in calls:
            told.append([])
            call()
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            told.append([])
            overlap_torch.gemm_allreduce(*(mode.from_tensor(one) for one in (input[:24], weight)))
    expected = [
        [("gemm_allreduce", 1000)],
        [],
        [("gemm_allreduce", 1000)],
        [("gemm_reducescatter", 1000), ("allgather_gemm", 1000)],
        [],
        [("allgather_gemm", 16)],
        [("gemm_allreduce", 0)],
        [],
    ]
    failures.equal(told, expected)


@pytest.mark.parametrize(("value", "hooked"), [("1", True), ("0", False), (None, False)])
def test_tune_at_first_calls_is_asked_for_by_a_variable(value, hooked, monkeypatch):
    monkeypatch.delenv("OVERLAP_TUNE", raising=False)
    if value is not None:
        monkeypatch.setenv("OVERLAP_TUNE", value)
    assert (_first_calls.wanted_at_first_calls() is not None) == hooked
    monkeypatch.setenv("OVERLAP_TUNE", "yes")
    assert _first_calls.wanted_at_first_calls() is None
    with pytest.raises(ValueError, match="OVERLAP_TUNE is 'yes'; it must be 0 or 1"):
        torch.ops.overlap.environment()  # as an op reads it


PROGRAM = """
import sys
import torch
import torch.distributed as dist
import overlap_torch

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
for _ in range(3):
    overlap_torch.gemm_reducescatter(torch.ones(32, 16), torch.ones(8, 16))
overlap_torch.gemm_allreduce(torch.ones(24, 16), torch.ones(8, 16), invariance="batch")
overlap_torch.gemm_alltoall(torch.ones(4, 16), torch.ones(8, 16), [4], [4])
scales = {"scale_input": torch.ones(32, 1), "scale_weight": torch.ones(8, 1)}
small = [torch.ones(rows, 16).to(torch.float8_e4m3fn) for rows in (32, 8)]
overlap_torch.gemm_allreduce(*small, **scales, output_dtype=torch.float16, use_fast_accum=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("as_module", [False, True])
def test_tune_command_records_what_a_program_calls(as_module, tmp_path, monkeypatch):
    script, file = tmp_path / "train.py", tmp_path / "problems.json"
    script.write_text(PROGRAM)
    for name in ("argv", "path"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    monkeypatch.delenv("RANK", raising=False)
    destroy = dist.destroy_process_group
    monkeypatch.syspath_prepend(tmp_path)
    program = ["-m", "train"] if as_module else [str(script)]
    command = ["--record", str(file), *program, str(tmp_path / "store")]
    assert _tune_command.main(command) == 0
    assert dist.destroy_process_group is destroy
    sizes = {"n": 8, "k": 16, "dtype": "float32", "world_size": 1, "invariance": "none"}
    scaled = {"recipe": "row_wise", "output_dtype": "float16", "fast_accum": True}
    recorded = json.loads(file.read_text())
    assert recorded["problems"] == [
        {"op": "gemm_reducescatter", "m": 32, **sizes, "calls": 3},
        {"op": "gemm_allreduce", "m": 24, **sizes, "invariance": "batch", "calls": 1},
        {"op": "gemm_allreduce", "m": 32, **sizes, "dtype": "float8_e4m3fn", **scaled, "calls": 1},
    ]
    found = _tune_command._read(str(file), 1)
    assert list(found) == [
        Problem(32, 8, 16, "float32", 1, "gemm_reducescatter"),
        Problem(24, 8, 16, "float32", 1, "gemm_allreduce", invariance="batch"),
        Problem(32, 8, 16, "float8_e4m3fn", 1, "gemm_allreduce", "row_wise", "float16", True),
    ]
    with pytest.raises(ValueError, match=r"problems of \[1\] ranks, but there are 2"):
        _tune_command._read(str(file), 2)
    with pytest.raises(SystemExit):
        _tune_command.main(["--record", str(file), str(tmp_path / "typo.py")])
    assert json.loads(file.read_text()) == recorded


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": 2, "kind": "overlap_torch.problems", "problems": []}']
)
def test_tune_command_says_what_a_record_is(text, tmp_path, capsys):
    file = tmp_path / "problems.json"
    file.write_text(text)
    with pytest.raises(SystemExit):
        _tune_command.main(["--recorded", str(file), "--device", "cpu"])
    assert "allowed is what --record writes" in capsys.readouterr().err
