"""The planner weighs, expects and chooses what was pinned; tests/planner_golden says of what."""

from __future__ import annotations

import difflib

import pytest

import planner_golden as golden


@pytest.fixture(scope="module")
def pins():
    return golden.pins()


def test_planner_golden_is_as_pinned(pins):
    found = golden.compare(golden.pinned(), pins)
    assert not found, (
        "\n".join(found)
        + "\nLine by line: diff what `python -m tests.planner_golden --dump` prints before and after. "
        f"If it is wanted: {golden.REPIN}"
    )


def test_planner_golden_sample_is_as_pinned():
    old, new = golden.SAMPLE.read_text(), golden.sample()
    found = "\n".join(difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=1))
    assert not found, f"{found}\nIf it is wanted: {golden.REPIN}"


def test_planner_golden_weighs_more_than_the_sequence_on_every_machine():
    counts = golden.pinned()
    assert sum(pin["candidates"] for pin in counts.values()) > 200000
    for family, name, op, scaled in golden.families():
        problems = len(list(golden.problems(op, scaled)))
        assert problems > 50
        # An all-to-all of a few SMs leaves none to NCCL.
        alone = name == "not measured" or family == "gemm_alltoall on hopper of 16 SMs"
        assert (counts[family]["candidates"] == problems) == alone, family


def test_planner_golden_compare_names_what_differs():
    pin = {"candidates": 3, "text": "a"}
    old = {"same": pin, "gone": pin, "fewer": pin, "times": pin}
    new = {
        "same": pin,
        "new": pin,
        "fewer": {"candidates": 2, "text": "b"},
        "times": {"candidates": 3, "text": "b"},
    }
    assert golden.compare(old, new) == [
        "fewer: 2 candidates, and there were 3",
        "gone: is gone",
        "new: is new",
        "times: other candidates, times or choices",
    ]
