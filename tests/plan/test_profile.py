"""Profiles: what work takes on a machine, as data; the shipped one, partial ones, files that are wrong, what doctor says."""

import json
import math
import pickle
import random
import re
from copy import deepcopy
from pathlib import Path

import pytest
import torch

import rank_pool
from machines import ada, big, cpu, hopper, slow, total
from overlap_torch import plan
from overlap_torch._tools import doctor as _doctor
from overlap_torch.plan import Machine, Profile
from overlap_torch.plan.types import Op

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "overlap_torch/profiles/h200.json"
HEAD = {"name": "own"}


def numbers() -> dict:
    file = json.loads(SHIPPED.read_text())
    return {name: value for name, value in file.items() if not isinstance(value, str)}


def own(fields: dict[str, object]) -> Profile:
    return Profile.parse(json.dumps(HEAD | fields), "own.json")


def test_profile_shipped_is_the_file_whole():
    shipped = Profile.shipped()
    assert json.loads(shipped.to_json()) == json.loads(SHIPPED.read_text())
    assert (shipped.name, shipped.gpu, shipped.made_by) == ("h200", "NVIDIA H200", "transcribed")
    assert shipped.missing == ()
    assert list(Profile.fields()) == list(json.loads(SHIPPED.read_text()))
    assert Profile.load(SHIPPED) == shipped
    assert Machine().profile == shipped


def test_profile_of_a_part_takes_the_rest_from_the_shipped_one():
    profile = own({"gemm.start_us": 8, "sync.wait_us": 7})
    assert "gemm.start_us" not in profile.missing and "sync.wait_us" not in profile.missing
    assert len(profile.missing) == len(numbers()) - 2
    # The GEMM of the shipped profile starts in 3 us: the sequence takes 5 more, whatever follows.
    for machine in (hopper(), slow(), ada()):
        sequence = plan.templates.make_sequential(big(), machine)
        before = total(sequence, machine)
        machine.profile = profile
        assert total(sequence, machine) == pytest.approx(before + 5.0, rel=1e-12)


def test_profile_changes_what_is_weighed_and_taken():
    ways = own({"ways.plain": [[2, 1]], "schedules.all_reduce": [[1, 1, 1]]})
    _, *candidates = plan.candidates(big(), hopper(profile=ways))
    assert [len(one.chunks) for one in candidates] == [3]
    assert (candidates[0].chunks[0].max_ctas, candidates[0].resources.lanes) == (2, 1)
    never = own({"needed_gain.usual.share": 0.0})
    assert plan.templates.make_plan(big(), hopper()).schedule == plan.types.Schedule.OVERLAPPED
    assert (
        plan.templates.make_plan(big(), hopper(profile=never)).schedule
        == plan.types.Schedule.SEQUENTIAL
    )


def test_profile_goes_with_its_machine():
    profile = own({"gemm.start_us": 5})
    machine = hopper(profile=profile)
    for copy in (pickle.loads(pickle.dumps(machine)), deepcopy(machine)):
        assert copy.profile == profile and copy.profile.source == "own.json"
        assert copy.profile.missing == profile.missing
        assert repr(copy) == repr(machine)
    assert hash(own({"gemm.start_us": 5})) == hash(profile) and own({}) != profile
    with pytest.raises(ValueError, match="profile is None, allowed is a Profile"):
        machine.profile = None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": ""}, 'name is ""; allowed is a string'),
        ({"name": 3}, "name is 3; allowed is a string"),
        ({"made.note": "\n"}, r'made.note is "\\n"; .* without escapes but'),
        ({"made.who": "x"}, 'it has "made.who", which is no field; allowed is made.by, made.at'),
        ({"gem": {}}, 'it has "gem", which is no field; allowed is .*gemm.arch, beside'),
        ({"gemm.start": 1}, 'it has "gemm.start", which is no field; .*gemm.start_us'),
        ({"gemm.start_us": "3"}, 'gemm.start_us is "3"; allowed is a number, 0 to'),
        ({"gemm.start_us": None}, "gemm.start_us is null; allowed is a number"),
        ({"gemm.start_us": True}, "gemm.start_us is true; allowed is a number"),
        ({"gemm.start_us": {}}, "gemm.start_us is {}; allowed is a number"),
        ({"gemm.start_us": float("nan")}, "gemm.start_us is NaN; allowed is a number"),
        ({"gemm.start_us": -1}, "gemm.start_us is -1; allowed is a number, 0 to"),
        ({"gemm.mma_sync_rate": 0}, "gemm.mma_sync_rate is 0; allowed is a number, 1e-04 to"),
        ({"gemm.short_k": 2.5}, "gemm.short_k is 2.5; allowed is a whole number"),
        ({"ways.plain": [[8, 5]]}, r"ways.plain is \[\[8, 5\]\]; .* lanes from 1 to 4"),
        ({"ways.plain": []}, r"ways.plain is \[\]; allowed is 1 to 64 lists of two"),
        ({"ways.plain": [8, 2]}, r"ways.plain is \[8, 2\]; allowed is 1 to 64 lists of two"),
        ({"ways.plain": [[[8, 2]]]}, r"ways.plain is \[\[\[8, 2\]\]\]; allowed is 1 to 64"),
        ({"schedules.library": [[1, 0.5]]}, "schedules.library is .* from 1 to 1000"),
        ({"schedules.library": [[1, "a"]]}, "schedules.library is .* from 1 to 1000"),
    ],
    ids=str,
)
def test_profile_that_is_wrong_names_file_field_and_what_is_allowed(tmp_path, given, message):
    file = tmp_path / "wrong.json"
    file.write_text(json.dumps({**HEAD, **given}))
    with pytest.raises(ValueError, match=f"^profile {re.escape(str(file))}: {message}"):
        Profile.load(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1 is not JSON: '{' is missing"),
        ("{", "line 1 is not JSON: a name in quotes is missing"),
        ('{"gemm.arch" 1}', "line 1 is not JSON: ':' is missing"),
        ('{"gemm.arch": }', "line 1 is not JSON: a value is missing"),
        ('{"gemm.arch": 90,\n "gemm.arch": 90}', "gemm.arch is there twice; allowed is each"),
        ('{"gemm.arch": 90\n} 2', "line 2 is not JSON: there is more after the object"),
        ('{"gemm.arch": 90', "line 1 is not JSON: '}' is missing"),
        ('{"name": "a', 'name is "a; allowed is a string'),
        ('{"ways.plain": [[8, 2]', r"ways.plain is \[\[8, 2\]; allowed is 1 to 64"),
        ('{"ways.plain": [[8, 2]]]}', "line 1 is not JSON: '}' is missing"),
        ("{}", "name is missing; allowed is"),
    ],
    ids=str,
)
def test_profile_that_is_not_json_says_where(text, message):
    with pytest.raises(ValueError, match=f"profile here: .*{message}"):
        Profile.parse(text, "here")


def test_profile_that_cannot_be_read_says_so(tmp_path):
    with pytest.raises(ValueError, match="none.json: cannot be read .No such file"):
        Profile.load(tmp_path / "none.json")


@pytest.mark.parametrize("text", ['"\\/', "é", "日本", "🙂", ", ]}"])
def test_profile_text_reads_back(text):
    written = json.dumps({**HEAD, "made.note": text}, ensure_ascii=False)
    assert Profile.parse(written).note == text
    assert json.loads(Profile.parse(written).to_json())["made.note"] == text


def perturbed(random_: random.Random) -> Profile:
    """All numbers of the shipped one moved by 30 %; needed gains, which are shares, are kept."""

    def moved(name: str, value: object) -> object:
        if isinstance(value, list) or name.startswith("needed_gain"):
            return value
        factor = random_.uniform(0.7, 1.3)
        return max(1, round(value * factor)) if isinstance(value, int) else value * factor

    return own({name: moved(name, value) for name, value in numbers().items()})


@pytest.mark.parametrize("seed", range(4))
def test_profile_perturbed_gives_valid_plans_and_the_best_of_them(seed):
    random_ = random.Random(seed)
    profile = perturbed(random_)
    assert profile.missing == ()
    assert Profile.parse(profile.to_json()) == profile
    for machine in (hopper(peer_gbps=365.0), hopper(windows=True), slow(), ada(), cpu()):
        machine.profile = profile
        for op in (Op.GEMM_ALLREDUCE, Op.GEMM_REDUCESCATTER, Op.ALLGATHER_GEMM):
            for world in (2, 4):
                problem = big(m=2 ** random_.randint(6, 13), op=op, world_size=world)
                candidates = plan.candidates(problem, machine)
                times = [total(one, machine) for one in candidates]
                for one, us in zip(candidates, times, strict=True):
                    plan.validate(one)
                    assert math.isfinite(us) and us > 0.0, one
                chosen = plan.templates.make_plan(problem, machine)
                assert chosen in candidates
                assert total(chosen, machine) <= times[0]


def test_profile_holds_what_is_fitted_and_the_sources_do_not():
    # No numbers of a machine's: how long a new group may measure its link, and the most that PCIe brings.
    allowed = {"kNever", "kSlowUs", "kMostPcieGbps"}
    found = [
        f"{file.relative_to(ROOT)}: {name}"
        for folder in ("plan", "planner", "steps", "runtime")
        for file in sorted((ROOT / "csrc" / folder).rglob("*.*"))
        for name in re.findall(r"constexpr (?:double|float) (\w+)", file.read_text())
        if name not in allowed
    ]
    assert found == []


def test_doctor_tells_the_profile():
    lines = _doctor.profile_lines(Profile.shipped(), ["NVIDIA H200"])
    assert lines[0] == "name      h200"
    assert "made      by transcribed, 2026-11-23" in lines
    assert lines[-1] == "complete"
    lacking = {"gemm.start_us", *(name for name in numbers() if name.startswith("ways."))}
    part = own(
        {name: value for name, value in numbers().items() if name not in lacking}
        | {"machine.gpu": "A"}
    )
    lines = _doctor.profile_lines(part, ["B", "A", "B"])
    assert lines == [
        "name      own",
        "from      own.json",
        "made      not known how or when",
        "measured  on A",
        "lacks     gemm.start_us, all of ways: as in the shipped profile 'h200'",
        "WARNING: the profile is for A; it only guesses times on B",
    ]


def test_doctor_reports_the_file_that_is_named(monkeypatch, tmp_path):
    file = tmp_path / "own.json"
    file.write_text(json.dumps(HEAD))
    monkeypatch.setenv("OVERLAP_PROFILE", str(file))
    assert f"  from      {file}\n" in _doctor.report()
    file.write_text(json.dumps({**HEAD, "schema": 0}))
    with pytest.raises(
        ValueError, match=f"OVERLAP_PROFILE: profile {file}: it has .schema., which is no field"
    ):
        torch.ops.overlap.environment()
    report = _doctor.report()
    assert f"WARNING: every op raises: overlap_torch: OVERLAP_PROFILE: profile {file}" in report
    assert "  name      h200\n" in report


def planned() -> tuple[str, str, float]:
    machine = plan.machine("cpu")
    return machine.profile.name, machine.profile.source, machine.sm_gflops


def test_profile_of_the_environment_is_what_ops_plan_by(tmp_path):
    file = tmp_path / "own.json"
    file.write_text(json.dumps({**HEAD, "cpu.core_gflops": 31.5}))
    outcomes = rank_pool.run_fresh(2, "gloo", planned, environment={"OVERLAP_PROFILE": str(file)})
    for outcome in outcomes:
        assert outcome.result() == ("own", str(file), 31.5)
