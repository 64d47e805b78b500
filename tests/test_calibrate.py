"""Calibration on machines that are simulated: every number moved by up to 30 %, and noise; and the file that holds what was measured."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

import machine_table
from overlap_torch import _calibrate, _tune, plan
from overlap_torch.plan import Problem, Profile

DATA = Path(__file__).parents[1] / "benchmarks/data"
OPS = ("gemm_allreduce", "gemm_reducescatter", "allgather_gemm")
SHAPES = [(m, n, k) for m in (512, 2048, 8192) for n, k in ((8192, 4096), (4096, 2048))]
COPIES = [1 << 20, 16 << 20, 256 << 20]


def moved(seed: int) -> Profile:
    """The shipped profile with each of its numbers off by some 30 %."""
    text = json.loads(Profile.shipped().to_json())
    numbers = {
        name: value * math.exp(random.Random(f"{seed} {name}").uniform(-0.3, 0.3))
        for name, value in _calibrate._numbers(text)
        if name.split(".")[0] in _calibrate._GPU
        and Profile.fields()[name].startswith("a number")
        and value > 0.0
        and name not in _calibrate._CHOICES
    }
    return _calibrate._profile(text, numbers)


def measured_on(name: str, truth: Profile, seed: int, noise: float = 0.03) -> _calibrate.Recording:
    """What a machine that takes what `truth` says would have measured."""
    generator = random.Random(seed)
    machine = machine_table.machine(name)
    fields = {field: getattr(machine, field) for field in _calibrate._MACHINE}
    empty = _calibrate.Recording("simulated", fields, ())
    numbers = dict(_calibrate._numbers(json.loads(truth.to_json())))
    on, usual = empty.on(truth), empty.on(Profile.shipped())
    times = [_calibrate.Time("copy", 1.0, bytes=size) for size in COPIES]
    for op in OPS:
        for shape in SHAPES:
            problem = Problem(*shape, "bfloat16", machine_table.MACHINES[name][1], op)
            plans = _tune.ranked(problem, usual, 8)
            times += [_calibrate.Time("plan", 1.0, one) for one in plans]
            times.append(_calibrate.Time("gemm", 1.0, plans[0]))
    real = [
        _calibrate.Time(
            one.what,
            _calibrate.expected_us(one, on, numbers) * math.exp(generator.gauss(0.0, noise)),
            one.plan,
            one.bytes,
        )
        for one in times
    ]
    return _calibrate.Recording("simulated", fields, tuple(real))


@pytest.mark.parametrize("name", ["H200 NVLink x4", "A100 PCIe4 x2"])
def test_calibrate_finds_a_machine_whose_numbers_are_others(name):
    recording = measured_on(name, moved(1), 2)
    found = _calibrate.fit(recording)
    before, now = found.rms["all"]
    assert before > 0.1
    assert now <= 0.07
    # Against what the machine takes without the noise that was measured.
    quiet = measured_on(name, moved(1), 3, noise=0.0)
    on = recording.on(found.profile)
    numbers = dict(_calibrate._numbers(json.loads(found.profile.to_json())))
    expected = [math.log(_calibrate.expected_us(one, on, numbers)) for one in quiet.times]
    errors = [found - math.log(one.us) for found, one in zip(expected, quiet.times, strict=True)]
    assert math.sqrt(sum(error**2 for error in errors) / len(errors)) <= 0.05
    assert _calibrate._regret(quiet.times, expected) <= 0.015


def test_calibrate_fits_what_one_gpu_measured():
    recording = _calibrate.read(DATA / "h100x1.jsonl")
    assert (recording.gpu, len(recording.times)) == ("NVIDIA H100 80GB HBM3", 97)
    found = _calibrate.fit(recording)
    before, now = found.rms["all"]
    assert before > 0.15 and now <= 0.07
    assert found.rms["copy"][1] <= 0.02  # which are nothing but a start and a rate


def test_calibrate_fits_what_two_gpus_measured():
    recording = _calibrate.read(DATA / "h100x2.jsonl")
    found = _calibrate.fit(recording)
    before, now = found.rms["all"]
    assert before > 0.15 and now <= 0.09
    # What is lost by taking the plan that is expected to be fastest.
    assert found.regret[1] <= 0.015


def test_calibrate_undoes_the_moves_that_make_choices_worse():
    cost = {"a": 0.04, "b": 0.0, "c": 0.01}
    moved = dict.fromkeys(cost, 1.0)
    kept = _calibrate._without_worse_choices(moved, lambda moves: sum(cost[one] for one in moves))
    assert kept == {"b": 1.0}
    kept = _calibrate._without_worse_choices(
        moved, lambda moves: 0.2 - sum(cost[one] for one in moves)
    )
    assert kept == moved
    assert _calibrate._without_worse_choices({}, lambda moves: 0.3) == {}


@pytest.mark.long
def test_calibrate_leaves_what_is_right_as_it_is():
    recording = measured_on("H200 NVLink x4", Profile.shipped(), 0, noise=0.0)
    found = _calibrate.fit(recording)
    assert found.moved == {} and found.rms["all"][1] < 1e-6 and found.regret == (0.0, 0.0)
    assert found.profile.made_by == "calibrate" and found.profile.gpu == "simulated"


def test_calibrate_reads_what_it_wrote_and_fits_the_same_again(tmp_path, capsys):
    recording = measured_on("A100 NVLink x2", moved(4), 5)
    recording = _calibrate.Recording("simulated", recording.machine, recording.times[:40])
    file, out = tmp_path / "times.jsonl", tmp_path / "own.json"
    _calibrate.write(file, recording)
    again = _calibrate.read(file)
    assert (again.gpu, again.machine) == (recording.gpu, recording.machine)
    assert [one.us for one in again.times] == pytest.approx(
        [one.us for one in recording.times], rel=1e-3
    )
    assert [one.plan for one in again.times] == [one.plan for one in recording.times]
    profiles = []
    for _ in range(2):
        assert _calibrate.main(["--from", str(file), "--out", str(out)]) == 0
        profiles.append(Profile.load(out))
    assert profiles[0] == profiles[1] != Profile.shipped()
    assert profiles[0].missing == ()
    said = capsys.readouterr().out
    assert f"OVERLAP_PROFILE={out}" in said and "root mean square error" in said
    plan.validate(plan.make_plan(recording.times[-1].plan.problem, again.on(profiles[0])))


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "x", '{"schema": 2, "kind": "overlap_torch.recording"}']
    + [
        '{"schema": 1, "kind": "overlap_torch.recording", "gpu": "", "machine": {"arch": 90}}\n'
        + line
        for line in (
            '{"what": "copy", "us": 0, "bytes": 1}',
            '{"what": "plan", "us": 1, "plan": [1]}',
        )
    ],
)
def test_calibrate_says_what_a_recording_is(text, tmp_path, capsys):
    file = tmp_path / "times.jsonl"
    file.write_text(text)
    with pytest.raises(SystemExit):
        _calibrate.main(["--from", str(file)])
    assert "allowed is what `calibrate --record` writes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--from", "a", "--record", "b"], "--record measures and --from does not: give one"),
        (["--turns", "0"], "--turns is 0, allowed are 1 and more"),
    ],
)
def test_calibrate_says_what_is_allowed(argv, message, capsys):
    with pytest.raises(SystemExit):
        _calibrate.main([*argv, "--device", "cpu"])
    assert message in capsys.readouterr().err


def test_calibrate_needs_times():
    with pytest.raises(ValueError, match="nothing was measured"):
        _calibrate.fit(_calibrate.Recording("", {"arch": 90}, ()))


# --- NCCL's CTAs ----------------------------------------------------------------------------------------------


def curve(cta_gbps: float, link_gbps: float) -> list[_calibrate.Time]:
    """Collectives of which each CTA carries so much, up to what the link does; gathers half as long as an all-reduce."""
    return [
        _calibrate.Time(what, share * 64e3 / min(ctas * cta_gbps, link_gbps), None, 64 << 20, ctas)
        for what, share in (("all_reduce", 1.0), ("reduce_scatter", 0.5), ("all_gather", 0.5))
        for ctas in (1, 2, 4, 8, 12, 16, 24, 32)
    ]


@pytest.mark.parametrize(
    ("cta_gbps", "link_gbps", "limits"),
    [
        (13.0, 260.0, (8, 24)),  # 16 CTAs reach 208, which is 80 %; 24 all of it
        (32.0, 260.0, (4, 8)),  # 8 reach 256
        (5.0, 10.0, (1, 2)),
        (5.0, 20.0, (2, 4)),
        (1.0, 1000.0, (16, 32)),  # the most that was measured
    ],
)
def test_calibrate_takes_the_fewest_ctas(cta_gbps, link_gbps, limits):
    assert _calibrate.cta_limits(curve(cta_gbps, link_gbps)) == limits


@pytest.mark.long
def test_calibrate_takes_no_limits_that_were_not_measured():
    assert _calibrate.cta_limits([_calibrate.Time("copy", 1.0, bytes=8)]) is None
    shipped = Profile.shipped()
    recording = measured_on("H200 NVLink x4", shipped, 0, noise=0.0)
    same = json.loads(_calibrate.fit(recording).profile.to_json())
    assert same["ways"] == json.loads(shipped.to_json())["ways"]


@pytest.mark.parametrize("name", ["H200 NVLink x2", "A100 NVLink x4", "A100 PCIe4 x2"])
def test_calibrate_leaves_two_limits_on_a_machine(name, tmp_path):
    recording = measured_on(name, Profile.shipped(), 0, noise=0.0)
    world = machine_table.MACHINES[name][1]
    times = (*recording.times[:12], *curve(13.0, recording.machine["link_gbps"]))
    _calibrate.write(
        tmp_path / "times", _calibrate.Recording("simulated", recording.machine, times)
    )
    read = _calibrate.read(tmp_path / "times")
    assert [(one.what, one.ctas, one.bytes) for one in read.times[12:]] == [
        (one.what, one.ctas, one.bytes) for one in times[12:]
    ]
    each_of_two, one = _calibrate.cta_limits(read.times)
    found = _calibrate.fit(read).profile
    on = read.on(found)
    for op in (*OPS, "gemm_alltoall"):
        lanes: set[tuple[int, int]] = set()
        for m, n, k in [(0, 8192, 4096)] if op == "gemm_alltoall" else SHAPES:
            problem = Problem(m, n, k, "bfloat16", world, op)
            for weighed in plan.candidates(problem, on, True):
                plan.validate(weighed)
                for number, chunk in enumerate(weighed.chunks):
                    lanes.add((chunk.max_ctas, number % weighed.resources.lanes))
        # No limit is NCCL's own choice, of the communicator that every group has.
        assert {ctas for ctas, _ in lanes} <= {0, each_of_two, one}
    ways = json.loads(found.to_json())["ways"]
    assert all(
        [ctas * of for ctas, of in way] == sorted(c * n for c, n in way) for way in ways.values()
    )
