"""What the CUDA executors enqueue, on a machine without a GPU, is what was pinned; tests/recorder says how."""

from __future__ import annotations

import json
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


def test_recorder_steps_are_what_the_executors_enqueue(program):
    done = subprocess.run([program, "steps"], capture_output=True, text=True)
    *differing, summary = done.stdout.splitlines()
    assert not differing, "\n".join(differing[:20])
    assert int(summary.split()[0]) > 5000, summary  # all over NCCL but what gathers or sends rows
    assert done.returncode == 0


def lowered(program, name: str) -> tuple[str, dict]:
    """The list of steps of a case, as text and from JSON."""
    done = subprocess.run([program, "lower", name], capture_output=True, text=True, check=True)
    text, _, json_line = done.stdout.rstrip("\n").rpartition("\n")
    return text, json.loads(json_line)


def test_recorder_steps_of_row_panels(program):
    """4096 x 2048 in bf16: chunks of 8 tile rows, 1024 rows, 4 MiB, and 8 x 16 tiles."""
    mib, count = 4 << 20, 1024 * 2048
    text, list_ = lowered(
        program, "gemm_allreduce panels, 2 ranks: rank 0 chunks 1:1:1:1 lanes 2 kernel, in a row"
    )
    chunks = [
        line
        for chunk in range(4)
        for line in (
            f"#{2 + 2 * chunk} side{chunk % 2} wait_for_tiles chunk={chunk} tiles=128",
            f"#{3 + 2 * chunk} side{chunk % 2} collective kind=all_reduce max_ctas=8 communicator_lane={chunk % 2} "
            f"source=output+{chunk * mib} destination=output+{chunk * mib} count={count}",
        )
    ]
    assert text.splitlines() == [
        "#0 caller fork side_lanes=2 copies=0",
        "#1 caller gemm output=output+0 part=0 parts=1 scattered_rows=0",
        *chunks,
        "#10 caller join",
    ]
    assert list_["counters"] == 4
    assert list_["steps"][5] == {
        "step": "collective",
        "lane": "side1",
        "after": [],
        "unchained": False,
        "kind": "all_reduce",
        "max_ctas": 8,
        "communicator_lane": 1,
        "source": {"buffer": "output", "offset": mib},
        "destination": {"buffer": "output", "offset": mib},
        "count": count,
    }


def test_recorder_steps_of_an_exchange_by_the_library_finish_behind_it(program):
    text, list_ = lowered(
        program,
        "gemm_allreduce exchange, 2 ranks: rank 1 chunks 1:1 lanes 1 window library bias, in a row",
    )
    tile_bytes, chunk_tiles = 128 * 128 * 2, 32 * 16 // 2
    chunk_bytes = chunk_tiles * tile_bytes  # of each of two ranks, one after the other
    count = chunk_tiles * 128 * 128
    assert text.splitlines() == [
        "#0 caller fork side_lanes=1 copies=1",
        "#1 caller library_gemm begin=0 end=4096 output=product+0",
        "#2 caller pack chunk=0 source=product+0 destination=window+0 part=1 parts=2",
        "#3 side0 mark chunk=0 after #2",
        f"#4 side0 collective kind=exchange max_ctas=8 communicator_lane=0 source=window+{chunk_bytes} "
        f"destination=window+0 count={count}",
        "#5 copy unpack chunk=0 source=window+0 destination=output+0 parts=2 bias=1 after #4",
        "#6 caller pack chunk=1 source=product+0 destination=window+0 part=1 parts=2",
        "#7 side0 mark chunk=1 after #6",
        f"#8 side0 collective kind=exchange max_ctas=8 communicator_lane=0 source=window+{3 * chunk_bytes} "
        f"destination=window+{2 * chunk_bytes} count={count}",
        "#9 copy unpack chunk=1 source=window+0 destination=output+0 parts=2 bias=1 after #8",
        "#10 caller join",
    ]
    assert [step["after"] for step in list_["steps"]] == [
        [], [], [], [2], [], [4], [], [6], [], [8], [],
    ]  # fmt: skip


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
