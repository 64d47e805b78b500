"""``Plan.explain()``, ``Plan.plot()`` and ``python -m overlap_torch explain``."""

import contextlib
import io
import itertools
import math
import sys
from unittest import mock

import pytest

import rank_pool
from machines import KINDS, big, cpu, hopper, slow
from overlap_torch import _plan
from overlap_torch import plan as plans
from overlap_torch.__main__ import main
from overlap_torch._ops import collectives
from overlap_torch._tools import explain
from overlap_torch.plan import Machine, Plan, templates
from overlap_torch.plan._explain import H200
from overlap_torch.plan._picture import draw, tile_map, walk
from overlap_torch.plan.types import Kernel, Op, Resources

PEERS, WINDOWS = KINDS["peers"], KINDS["windows"]


def panels(chunks: int = 4, **options: object) -> Plan:
    options = {"kernel": "sm90_pingpong", "comm_sms": 16, "max_ctas": 8, "lanes": 2, **options}
    return templates.row_panels(big(), chunks, **options)


@pytest.mark.parametrize("machine", [PEERS, WINDOWS, slow(), cpu()], ids=str)
@pytest.mark.parametrize("op", [Op.GEMM_ALLREDUCE, Op.GEMM_REDUCESCATTER, Op.ALLGATHER_GEMM])
@pytest.mark.parametrize("world", [2, 4])
def test_explain_of_all_candidates_shows_the_steps_as_priced(machine, op, world) -> None:
    problem = big(op=op, world_size=world)
    candidates = plans.candidates(problem, machine)
    for plan in candidates:
        told = plan.explain(machine, rank=world - 1)
        price = _plan.price_steps(plan, world - 1, machine)
        assert [(step.begin_us, step.end_us) for step in told.steps] == price.steps
        assert told.expected.total_us == price.expected.total_us
        text = str(told)
        assert all(step.words in text for step in told.steps)
        assert f"expected {told.expected.total_us:.1f} us" in text
        # The plan is compared with the sequence, and with all others, the fastest first.
        assert told.sequence_us == plans.predict(candidates[0], machine).total_us
        times = [us for _, us in told.others]
        assert times == sorted(times)
        assert len(times) == len(candidates) - 1
        # Chunks: all are communicated, each once for each call that carries it.
        if plan.schedule == plans.types.Schedule.OVERLAPPED:
            chunks = {step.chunk for step in told.steps if step.kind in ("collective", "signal")}
            assert chunks <= set(range(len(plan.chunks)))
            assert chunks == set(range(len(plan.chunks))) or not chunks


def test_explain_says_what_a_call_holds() -> None:
    def held(plan: Plan, machine: Machine = PEERS) -> dict[str, int]:
        return {one.name: one.bytes for one in plan.explain(machine).buffers}

    product = 8192 * 8192 * 2
    assert held(panels(4)) == {"counters": 4 * 4}  # all-reduced in the output
    assert held(panels(4, window=True)) == {"window": product, "counters": 4 * 4}
    exchange = templates.packed(
        big(), 8, collective="exchange", kernel="sm90_pingpong", comm_sms=16, max_ctas=8
    )
    assert held(exchange) == {"staging": 2 * product, "counters": 4 * 8}
    assert held(templates.make_sequential(big(), PEERS)) == {"product": product}
    # A ring's slot: the partial sums of all phases but the last, and of an all-reduce all finished parts.
    ring = templates.row_panels(big(), 1, kernel="sm90_pingpong", transport="peer")
    assert held(ring) == {"slots": 2 * (product // 2 + product)}
    gather = big(op=Op.ALLGATHER_GEMM, world_size=4)
    pushed = templates.row_panels(gather, 1, kernel="sm90_pingpong", transport="peer", comm_sms=2)
    assert held(pushed) == {"slots": 2 * 8192 * 7168 * 2}
    assert "slots        224.0 MiB   the group's, kept: two, each rounded up" in str(
        pushed.explain(PEERS)
    )


def test_explain_says_why_it_is_the_planners_choice() -> None:
    plan = templates.make_plan(big(), PEERS)
    told = plan.explain(PEERS)
    us = told.expected.total_us
    assert plan.schedule == plans.types.Schedule.OVERLAPPED
    assert told.why.startswith(f"the best of {len(plans.candidates(big(), PEERS))} candidates: ")
    assert f"{told.sequence_us / us:.2f}x the sequence, {told.sequence_us:.1f} us" in told.why
    sequence = templates.make_sequential(big(), PEERS)
    _, next_us = next(one for one in told.others if one[0] != sequence)
    assert f"takes {next_us:.1f} us, {next_us / us - 1:+.1%}" in told.why
    assert f"to take less than {0.97 * told.sequence_us - 8:.1f} us" in told.why


def test_explain_says_why_the_sequence_is_the_planners_choice() -> None:
    machine, problem = hopper(link_gbps=61.0), big(m=512, n=1024, k=1024)
    sequence = templates.make_sequential(problem, machine)
    assert templates.make_plan(problem, machine) == sequence
    told = sequence.explain(machine)
    best, us = told.others[0]
    share, margin = _plan.needed_gain(best, machine)
    assert (share, margin) == (0.95, 12.0)
    assert us >= share * told.sequence_us - margin
    assert told.why.startswith(f"the sequence, out of {len(told.others) + 1} candidates: ")
    assert f"is expected to take {us:.1f} us" in told.why
    assert told.why.endswith(f"less than {share * told.sequence_us - margin:.1f}")
    alone = templates.make_sequential(big(world_size=1), machine).explain(machine)
    assert alone.why.startswith("there is nothing to overlap")
    assert alone.others == ()


def test_explain_says_what_the_planner_would_take_in_place_of_a_plan_by_hand() -> None:
    plan = panels(3, max_ctas=3)
    told = plan.explain(PEERS)
    chosen = plans.predict(templates.make_plan(big(), PEERS), PEERS).total_us
    assert told.why.startswith("set by hand; ")
    assert told.why.endswith(
        f"the planner would take ring over peer, sm90_pingpong_wide, 1 chunk, {chosen:.1f} us"
    )
    assert len(told.others) == len(plans.candidates(big(), PEERS))


def test_explain_of_an_all_to_all_takes_its_rows() -> None:
    problem = big(n=4096, k=4096, op=Op.GEMM_ALLTOALL)
    plan = templates.make_all_to_all(
        problem, Kernel.SM90_PINGPONG, Resources(comm_sms=24), 24, "nccl"
    )
    told = plan.explain(WINDOWS, send_rows=[4096, 2048], receive_rows=[4096, 1024])
    (message,) = [step for step in told.steps if step.kind == "send_receive"]
    assert message.words.startswith("send 16.0 MiB, receive 8.0 MiB, 24 CTAs")
    assert (told.sequence_us, told.others) == (None, ())
    with pytest.raises(ValueError, match="send_rows has 0 counts; the plan's op takes one of 0 or"):
        plan.explain(WINDOWS)


def test_explain_refuses_what_cannot_run() -> None:
    plan = panels()
    plan.chunks = plan.chunks[1:]
    for ask in (plan.explain, lambda machine: plan.plot("unused.png", machine)):
        with pytest.raises(ValueError, match="leaves tiles out"):
            ask(PEERS)
    with pytest.raises(ValueError, match="rank 2 is not one of the plan's 2 ranks"):
        panels().explain(PEERS, rank=2)


# --- pictures ---------------------------------------------------------------------------------------

MAPPED = {
    "panels": (panels(4), WINDOWS),
    "exchange": (templates.packed(big(m=1000, n=1000), [40, 24], collective="exchange", kernel="sm90_pingpong", comm_sms=16), WINDOWS),
    "scatter": (templates.row_panels(big(m=2000, op=Op.GEMM_REDUCESCATTER), [6, 2], kernel="sm90_pingpong", comm_sms=16), WINDOWS),
    "gather": (templates.row_panels(big(m=2048, world_size=4, op=Op.ALLGATHER_GEMM), 2, kernel="sm90_pingpong", comm_sms=16), WINDOWS),
    "ring": (templates.row_panels(big(), 1, kernel="sm90_pingpong", transport="peer"), PEERS),
    "direct": (templates.at_once(big(m=512), kernel="sm90_pingpong"), PEERS),
    "sequence": (templates.make_sequential(big(), PEERS), PEERS),
    "cpu": (templates.row_panels(big(m=2048, n=2048), 4, transport="gloo"), cpu()),
}  # fmt: skip


@pytest.mark.parametrize("name", MAPPED)
def test_plan_tile_map_has_each_tile_once(name: str) -> None:
    plan, machine = MAPPED[name]
    made, _ = walk(plan, machine, 0)
    tiles = tile_map(plan, made)
    grid = itertools.product(range(plan.tiles_m), range(plan.tiles_n))
    assert sorted((row, column) for _, row, column in tiles) == list(grid)
    groups = [group for group, _, _ in tiles]
    if name == "gather":  # own rows first, a quarter, then two chunks of the others
        assert groups == sorted(groups)
        counts = [groups.count(group) for group in (0, 1, 2)]
        assert counts == [4 * 64, 6 * 64, 6 * 64]
        assert {row for group, row, _ in tiles if group == 0} == {0, 1, 2, 3}
    elif len(plan.chunks) > 1:
        assert [groups.count(c) for c in range(len(plan.chunks))] == [
            chunk.tiles for chunk in plan.chunks
        ]
        if name == "scatter":  # each chunk has as many rows of both parts
            assert {row for group, row, _ in tiles if group == 0} == {*range(6), *range(8, 14)}
    else:
        assert groups == sorted(groups)
        assert set(groups) == set(range(16))
    if name == "ring":  # rank 0 begins with rank 1's part, and ends with its own
        assert tiles[0][1] >= 32 > tiles[-1][1]


@pytest.mark.parametrize("name", MAPPED)
def test_plan_picture_has_a_bar_for_each_step_that_takes_time(name: str) -> None:
    pytest.importorskip("matplotlib")
    plan, machine = MAPPED[name]
    figure = draw(plan, machine)
    above, below = figure.axes
    world = plan.problem.world_size
    waits = ("wait_for_tiles", "wait_for_peers", "wait_for_slots", "mark", "fork", "join", "delay")
    bars = []
    for rank in range(world):
        steps = plan.explain(machine, rank=rank).steps
        bars += [
            step.end_us - step.begin_us
            for step in steps
            if step.end_us > step.begin_us and step.kind not in waits
        ]
    scale = 1e-3 if max(bars) >= 10_000 or name == "cpu" else 1.0
    drawn = [patch.get_width() for patch in above.patches]
    assert sorted(drawn) == pytest.approx(sorted(scale * us for us in bars))
    labels = [label.get_text() for label in above.get_yticklabels()]
    assert [label for label in labels if label.endswith(": caller")] == [
        f"rank {rank}: caller" for rank in range(world)
    ]
    (image,) = below.images
    assert image.get_array().shape == (plan.tiles_m, plan.tiles_n, 4)


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_plan_plot_writes_a_file(tmp_path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plan.{suffix}"
    panels().plot(path, WINDOWS)
    begins = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    assert path.read_bytes().startswith(begins[suffix])


def test_plan_plot_of_an_all_to_all_has_no_tiles() -> None:
    pytest.importorskip("matplotlib")
    problem = big(n=4096, k=4096, op=Op.GEMM_ALLTOALL)
    plan = templates.make_all_to_all(problem, Kernel.SM90_PINGPONG, Resources(), 24, "peer")
    figure = draw(plan, PEERS, [[4096, 2048], [1024, 4096]])
    assert len(figure.axes) == 1


# --- command line -----------------------------------------------------------------------------------

SHAPE = ["--m", "8192", "--n", "8192", "--k", "7168"]


@pytest.mark.parametrize("op", [name.lower() for name in Op.__members__])
def test_explain_command_prints_the_planners_plan(op: str, capsys) -> None:
    rows = ["--n", "8192", "--k", "7168", "--rows", "4096"] if op == "gemm_alltoall" else SHAPE
    assert main(["explain", "--op", op, *rows, "--machine", "h200"]) == 0
    m = 0 if op == "gemm_alltoall" else 8192
    counts = [4096, 4096] if op == "gemm_alltoall" else []
    plan = templates.make_plan(big(m=m, op=Op.__members__[op.upper()]), H200)
    told = plan.explain(H200, send_rows=counts, receive_rows=counts)
    assert math.isfinite(told.expected.total_us)
    assert capsys.readouterr().out == f"{told}\n"


@pytest.mark.parametrize("op", [name.lower() for name in Op.__members__])
def test_explain_command_knows_the_usual_invariance(op: str, capsys, monkeypatch) -> None:
    """An op that adds between ranks has that of OVERLAP_INVARIANCE."""
    monkeypatch.setattr(collectives, "USUAL_INVARIANCE", "batch")
    rows = ["--n", "8192", "--k", "7168", "--rows", "4096"] if op == "gemm_alltoall" else SHAPE
    assert main(["explain", "--op", op, *rows, "--machine", "h200"]) == 0
    plan = capsys.readouterr().out.partition(":")[0]
    assert plan.endswith(" batch") == (op in ("gemm_allreduce", "gemm_reducescatter"))


def test_explain_command_draws_a_saved_plan_of_a_machine_in_words(tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib")
    plan, path, picture = panels(3), tmp_path / "plan.json", tmp_path / "plan.svg"
    plans.files.save(plan, path)
    command = ["explain", "--plan", str(path), "--machine", repr(WINDOWS), "--plot", str(picture)]
    assert main(command) == 0
    assert capsys.readouterr().out == f"{plan.explain(WINDOWS)}\n\npicture  {picture}\n"
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--machine", "h300"], "--machine is 'h300', allowed are here, h200, or fields like"),
        (
            ["--machine", "h200", "--device", "cpu"],
            "--device is cpu, but no ranks run for --machine h200",
        ),
        (["--machine", "arch=x"], "--machine is 'arch=x', allowed are here, h200"),
        (
            ["--machine", "h200", "--m", "-1"],
            "argument --m: is '-1', allowed are whole numbers from 0",
        ),
        (["--m", "-1"], "argument --m: is '-1', allowed are whole numbers from 0"),
        (["--plan", "/nowhere.json"], "--plan is /nowhere.json, which is no saved plan"),
        (["--plan", __file__], "test_explain.py, which is no saved plan"),
        (["--m", "99999999999999999999"], "allowed are whole numbers from 0 to 2147483647"),
        (
            ["--plot", "/nowhere/x.svg"],
            "--plot: is /nowhere/x.svg, but there is no folder /nowhere",
        ),
        (["--plot", "/tmp/"], "--plot: is '/tmp/', a folder: name a file in it"),
        (["--plot", "x.txt"], "--plot: is 'x.txt', allowed are names that end in .png, .svg, .pdf"),
        (
            ["--rows", "0"],
            "--rows is for gemm_alltoall, not for gemm_allreduce, whose rows are --m",
        ),
        (["--op", "none"], "invalid choice: 'none'"),
    ],
)
def test_explain_command_refuses(arguments: list[str], message: str, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["explain", *SHAPE, *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--m 8", "--world 2", "--fast-accum", "--op allgather_gemm"])
def test_explain_command_refuses_a_problem_beside_a_saved_plan(option, tmp_path, capsys) -> None:
    path = tmp_path / "plan.json"
    plans.files.save(panels(3), path)
    with pytest.raises(SystemExit):
        main(["explain", "--machine", "h200", "--plan", str(path), *option.split()])
    assert f"a problem of its own, without {option.split()[0]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "missing"),
    [("", "--m, --n, --k"), ("--m 8 --k 8", "--n"), ("--op gemm_alltoall --n 8 --k 8", "--rows")],
)
def test_explain_command_asks_for_the_sizes(given, missing, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["explain", "--machine", "h200", *given.split()])
    assert f"error: {missing} missing: give the problem's sizes" in capsys.readouterr().err


def test_commands_take_a_dtype_by_both_names(capsys) -> None:
    for name in ("fp16", "float16"):
        assert main(["explain", *SHAPE, "--machine", "h200", "--dtype", name]) == 0
        assert "k=7168 float16 world_size" in capsys.readouterr().out
    for command in (["tune", "--shapes", "x"], ["bench", "--shapes", "x"]):
        with pytest.raises(SystemExit):
            main([*command, "--dtype", "float16"])
        told = capsys.readouterr().err  # of the next fault, the shape's
        assert "'x'" in told and "invalid choice" not in told


def test_explain_command_says_what_a_picture_needs(tmp_path, capsys) -> None:
    asked = ["explain", *SHAPE, "--machine", "h200", "--plot", str(tmp_path / "plan.svg")]
    with mock.patch.dict(sys.modules, {"matplotlib.figure": None}), pytest.raises(SystemExit):
        main(asked)
    told = capsys.readouterr()
    assert "--plot: a picture needs matplotlib: pip install matplotlib" in told.err and not told.out


HERE = ["--m", "2048", "--n", "2048", "--k", "512", "--dtype", "float32", "--world", "2"]


def told_by_ranks(asked: object) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        explain.run_rank(asked)
    return out.getvalue()


@pytest.mark.ranks((2, "gloo"), (2, "nccl"))
def test_explain_command_measures_the_machine_by_its_ranks(ranks, monkeypatch) -> None:
    if ranks.backend == "nccl" and rank_pool.shares_gpus():
        pytest.skip("the command starts a rank for each GPU")
    started = []
    monkeypatch.setattr(explain, "launch", lambda *what: started.append(what) or 0)
    device = "cpu" if ranks.backend == "gloo" else "cuda"
    assert main(["explain", *HERE, "--device", device]) == 0
    ((on, worker, asked),) = started
    assert (on.world_size, on.device_type, worker) == (2, device, explain.run_rank)
    first, second = ranks.run(told_by_ranks, asked)
    assert first.startswith("plan     gemm_allreduce m=2048 n=2048 k=512 float32 world_size=2: ")
    assert ("\nmachine  arch=0 " in first) == (device == "cpu")
    assert second == ""
