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
    """The texts of all cases by name, and the violations."""
    violations: list[str] = []
    texts = {case.full_name: case.text for case in recorder.cases(program, violations)}
    return texts, violations


@pytest.mark.parametrize("check", ["self-check", "history-check", "group-check"])
def test_recorder_program_checks_hold(program, check):
    """The record finds what it is there to find; ranks that make other calls find that out over the store; a group finds
    failures while the driver is busy, and agrees on memory where one rank has none left."""
    done = subprocess.run([program, check], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "")


def test_recorder_calls_join_and_stay_in_their_memory_and_capture(records):
    """Each call ends after all that it enqueued, nothing reaches beyond its buffer, captures hold all of their
    operations, and a refused call enqueues nothing."""
    texts, violations = records
    assert violations == []
    assert len(texts) > 1500


@pytest.mark.parametrize("name", TRACES)
def test_recorder_trace_is_as_pinned(records, name):
    texts, _ = records
    assert name in texts, f"no case '{name}' any more: {recorder.REPIN}"
    difference = recorder.diff(TRACES[name], texts[name], "traces.txt", "this tree")
    assert not difference, difference


def lowered(program, name: str) -> tuple[str, dict]:
    """The list of steps of a case, as text and from JSON."""
    done = subprocess.run([program, "lower", name], capture_output=True, text=True, check=True)
    text, _, json_line = done.stdout.rstrip("\n").rpartition("\n")
    return text, json.loads(json_line)


def test_recorder_steps_of_row_panels(program):
    """4096 x 2048 in bf16: chunks of 8 tile rows, 1024 rows, 4 MiB, and 8 x 16 tiles."""
    mib, count = 4 << 20, 1024 * 2048
    text, list_ = lowered(program, "panels, 2 ranks: rank 0, in a row")
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
        "chunks=4 counters=4 scratch=[] communicators=[{max_ctas=8 lane=0} {max_ctas=8 lane=1}] over_peers=0 "
        "slot_bytes=0 takes_slot=0 hears_all=0",
        "order 0: tiles_m=32 tiles_n=16 bands=[{tile_rows=8 count=4}] chunks_end_at=[128 256 384 512]",
        "#0 caller fork side_lanes=2 copies=0",
        "#1 caller gemm begin=0 end=4096 input=input+0 outputs=[{to=output+0}] order=0 first_tile=0 end_tile=512 "
        "ctas=116 counts=1",
        *chunks,
        "#10 caller join",
    ]
    assert (list_["counters"], list_["slot_bytes"]) == (4, 0)
    assert list_["orders"][0]["bands"] == [{"tile_rows": 8, "count": 4}]
    output = {"buffer": "output", "index": 0, "offset": mib}
    assert list_["steps"][5] == {
        "step": "collective",
        "lane": "side1",
        "after": [],
        "unchained": False,
        "held": False,
        "communicates": 1,
        "kind": "all_reduce",
        "max_ctas": 8,
        "communicator_lane": 1,
        "source": output,
        "destination": output,
        "count": count,
    }


def test_recorder_steps_of_an_exchange_by_the_library_finish_behind_it(program):
    text, list_ = lowered(
        program,
        "exchange by the library, 2 ranks: rank 1, in a row",
    )
    tile_bytes, chunk_tiles = 128 * 128 * 2, 32 * 16 // 2
    chunk_bytes = chunk_tiles * tile_bytes  # of each of two ranks, one after the other
    count = chunk_tiles * 128 * 128
    any_ctas = 2**31 - 1
    pack = f"order=0 source=product+0 destination=window+0 term=1 terms=2 ctas={any_ctas}"
    unpack = f"order=0 source=window+0 destination=output+0 terms=2 ctas={any_ctas} bias=1"
    head, order, *steps = text.splitlines()
    assert (
        f" scratch=[{{buffer=window bytes={4 * chunk_bytes}}} {{buffer=product bytes={2 * chunk_bytes}}}] "
        in head
    )
    assert order.startswith("order 0: tiles_m=32 tiles_n=16 ")
    assert steps == [
        "#0 caller fork side_lanes=1 copies=1",
        "#1 caller library_gemm begin=0 end=4096 input=input+0 output=product+0",
        f"#2 caller pack chunk=0 {pack}",
        "#3 side0 mark chunk=0 after #2",
        f"#4 side0 collective kind=exchange max_ctas=8 communicator_lane=0 source=window+{chunk_bytes} "
        f"destination=window+0 count={count}",
        f"#5 copy unpack chunk=0 {unpack} after #4",
        f"#6 caller pack chunk=1 {pack}",
        "#7 side0 mark chunk=1 after #6",
        f"#8 side0 collective kind=exchange max_ctas=8 communicator_lane=0 source=window+{3 * chunk_bytes} "
        f"destination=window+{2 * chunk_bytes} count={count}",
        f"#9 copy unpack chunk=1 {unpack} after #8",
        "#10 caller join",
    ]
    assert [step["after"] for step in list_["steps"]] == [
        [], [], [], [2], [], [4], [], [6], [], [8], [],
    ]  # fmt: skip


def test_recorder_steps_of_a_ring_are_one_launch(program):
    """8192 x 2048 in bf16 between two ranks: parts of 32 tile rows, 16 MiB. A slot holds one phase's sums and, behind
    them, both finished parts."""
    part = 16 << 20
    text, _ = lowered(program, "ring, 2 ranks: rank 0, in a row")
    assert text.splitlines() == [
        f"chunks=1 counters=0 scratch=[] communicators=[] over_peers=1 slot_bytes={3 * part} takes_slot=1 "
        "hears_all=1",
        "order 0: tiles_m=64 tiles_n=16 parts=2 bands=[{tile_rows=8 count=1} {tile_rows=16 count=3} "
        "{tile_rows=8 count=1}] chunks_end_at=[1024]",
        "#0 caller wait_for_slots",
        f"#1 caller gemm begin=0 end=8192 input=input+0 outputs=[{{to=output+0 adds=slot@0+0}} {{to=slot@1+0}}] "
        f"mirrors=[slot@1+{part}] rows={{mode=split part_rows=4096 part_tile_rows=32 round_tile_rows=8 first_part=1 "
        f"part_step=1}} order=0 first_tile=0 end_tile=1024 ctas=132 announces=1 arriving=slot@0+{part} ends_call=1",
    ]


def test_recorder_steps_of_a_gather_over_peers(program):
    """Parts of 4096 x 1024 in bf16 between two ranks, in two chunks: 4 MiB of each rank in each, side by side."""
    own = 4 << 20
    text, list_ = lowered(
        program,
        "gather over peers, 2 ranks: rank 0, in a row",
    )
    steps = text.splitlines()[2:]
    assert steps[0] == "#0 caller fork side_lanes=1 copies=0"
    assert steps[2:] == [
        "#2 side0 wait_for_slots",
        f"#3 side0 copy source=input+0 destination=slot@1+0 bytes={own}",
        "#4 side0 signal number=0 to_self=1",
        f"#5 side0 copy source=input+{own} destination=slot@1+{2 * own} bytes={own}",
        "#6 side0 signal number=1 to_self=1",
        "#7 caller join",
    ]
    gemm = list_["steps"][1]
    assert list_["orders"][0]["chunks_end_at"] == [32 * 16, 48 * 16, 64 * 16]
    assert (gemm["awaits_chunks"], gemm["ends_call"], gemm["ctas"]) == (True, True, 132 - 2)
    assert [(move["from"], move["to"]["offset"], move["bytes"]) for move in gemm["moves"]] == [
        ({"buffer": "input", "index": 0, "offset": 0}, 0, 2 * own),
        ({"buffer": "slot", "index": 0, "offset": own}, 2 * own, own),
        ({"buffer": "slot", "index": 0, "offset": 3 * own}, 3 * own, own),
    ]
    assert [move["arrival"] for move in gemm["moves"]] == [0, 1, 2]


def test_recorder_steps_of_an_all_to_all_are_those_of_its_rows(program):
    """Rank 0 of two keeps 12288 of its rows and sends 12280; rank 1 sends it 12296. Rows of 4 KiB."""
    text, _ = lowered(program, "all-to-all over NCCL, 2 ranks: rank 0, in a row")
    kept, sent, received, row = 12288, 12280, 12296, 4096
    tiles = 96 * 16
    assert text.splitlines()[2:] == [
        "#0 caller fork side_lanes=1 copies=0",
        f"#1 caller gemm begin={kept} end={kept + sent} input=input+{kept * 2048} outputs=[{{to=product+{kept * row}}}] "
        f"order=0 first_tile=0 end_tile={tiles} ctas=132",
        "#2 side0 delay us=4 after #1",
        f"#3 side0 send_receive max_ctas=24 communicator_lane=0 sends=[{{peer=1 at=product+{kept * row} "
        f"bytes={sent * row}}}] receives=[{{peer=1 at=output+{kept * row} bytes={received * row}}}]",
        f"#4 caller gemm begin=0 end={kept} input=input+0 outputs=[{{to=output+0}}] order=0 first_tile=0 "
        f"end_tile={tiles} ctas=108",
        "#5 caller join",
    ]
