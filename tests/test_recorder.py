"""What the CUDA executors enqueue, on a machine without a GPU, is what was pinned; tests/recorder says how."""

from __future__ import annotations

import subprocess

import pytest

import recorder

TRACES = recorder.traces()


@pytest.fixture(scope="module")
def program():
    try:
        return recorder.build()
    except recorder.MissingHeadersError as error:
        pytest.skip(f"the executors need CUDA's and NCCL's headers: {error}")


@pytest.fixture(scope="module")
def records(program):
    return recorder.current()


def test_recorder_finds_what_it_is_there_to_find(program):
    done = subprocess.run([program, "self-check"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_recorder_executors_are_as_pinned(records):
    differences = recorder.compare(recorder.pinned(), records.pins)
    assert not differences, (
        "\n".join(differences)
        + f"\nCase by case: python -m tests.recorder --against COMMIT. If it is wanted: {recorder.REPIN}"
    )


def test_recorder_covers_every_executor_and_world():
    families = recorder.pinned()
    assert sum(pin.cases for pin in families.values()) > 12000
    assert all(pin.cases > 0 for pin in families.values())
    executors = {
        "gemm_allreduce": "panels, window panels, packed, ring, direct, one kernel, low latency, sequential",
        "gemm_reducescatter": "panels, window panels, ring, direct, one kernel, sequential",
        "allgather_gemm": "over NCCL, in a window, over peers, one kernel, sequential",
        "gemm_alltoall": "over NCCL, over peers",
    }
    wanted = {
        f"{op} {name}, {world} ranks"
        for op, names in executors.items()
        for name in names.split(", ")
        for world in range(2, 9)
    }
    missing = wanted - families.keys()
    assert missing == set()


def test_recorder_calls_join_and_stay_in_their_memory_and_capture(records):
    """Each call ends behind all that it enqueued, nothing reaches beyond its buffer, captures hold all of theirs,
    and what is refused enqueues nothing."""
    assert records.violations == []


@pytest.mark.parametrize("name", TRACES, ids=lambda name: TRACES[name].stem)
def test_recorder_trace_is_as_pinned(records, name):
    text = TRACES[name].read_text()
    assert name in records.texts, f"no case '{name}' any more: {recorder.REPIN}"
    difference = recorder.diff(text, records.texts[name], str(TRACES[name]), "this tree")
    assert not difference, difference


def test_recorder_compare_names_what_differs():
    pin = recorder.Pin(cases=3, text="a", canonical="b")
    old = {"same": pin, "gone": pin, "text": pin, "order": pin, "fewer": pin}
    new = {
        "same": pin,
        "text": recorder.Pin(3, "c", "b"),
        "order": recorder.Pin(3, "c", "d"),
        "fewer": recorder.Pin(2, "c", "d"),
        "new": pin,
    }
    lines = recorder.compare(old, new)
    assert [line.split(":")[0] for line in lines] == ["fewer", "gone", "new", "order", "text"]
    assert "has 2 cases, and had 3" in lines[0]
    assert "no case any more" in lines[1]
    assert "is new" in lines[2]
    assert "other operations" in lines[3]
    assert "the text alone" in lines[4]
