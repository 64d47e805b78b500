"""The CUDA executors enqueue what was pinned, on a machine without a GPU; tests/recorder says how."""

import subprocess

import pytest

import recorder

TRACES = recorder.by_name(recorder.TRACES.read_text())


@pytest.fixture(scope="module")
def program():
    try:
        return recorder.build()
    except recorder.MissingHeadersError as error:
        pytest.skip(f"the executors need CUDA's and NCCL's headers: {error}")


@pytest.fixture(scope="module")
def records(program):
    """The texts of all cases by name, and the violations."""
    return recorder.cases(program)


def test_recorder_program_checks_hold(program):
    checks = [program, "check"]
    done = subprocess.run(checks, input="", capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")


def test_recorder_calls_join_and_stay_in_their_memory_and_capture(records):
    """Each call ends after all that it enqueued, nothing reaches beyond the group's memory, captures hold all of their
    operations, and a refused call enqueues nothing."""
    texts, violations = records
    assert violations == []
    assert len(texts) > 1200


@pytest.mark.parametrize("name", TRACES)
def test_recorder_trace_is_as_pinned(records, name):
    text = records[0].get(name, "no such case")
    assert text.splitlines() == TRACES[name].splitlines(), "python -m tests.recorder --pin"
