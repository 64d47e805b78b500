"""Algorithms of MSCCL and MSCCL++ as plans: right results on CPU, and what is refused, with its place in the file."""

import copy
import json
import random
import re

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import plan_files
from checks import Failures, check_call
from ops import OPS
from overlap_torch import plan as plan_module
from overlap_torch.plan import Plan, Problem, use_plan
from overlap_torch.plan.programs import from_msccl, from_mscclpp
from overlap_torch.plan.types import Op
from programs import EVEN, FEW, RAGGED, how_to_edit

READ = {"msccl": from_msccl, "mscclpp": from_mscclpp}


def read(tmp_path, kind: str, text: str, problem: Problem) -> Plan:
    path = tmp_path / f"made.{'xml' if kind == 'msccl' else 'json'}"
    path.write_text(text, encoding="utf-8")
    return READ[kind](path, problem, **how_to_edit(problem))


def refused(tmp_path, kind: str, text: str, problem: Problem, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        read(tmp_path, kind, text, problem)


@pytest.mark.ranks((2, "gloo"), long=[(3, "gloo"), (4, "gloo"), (8, "gloo")])
def test_files_of_other_compilers_give_right_results(failures: Failures, tmp_path) -> None:
    world, path = dist.get_world_size(), tmp_path / str(dist.get_rank())
    for kind, name in [(each, name) for each in READ for name in plan_files.FILES[each]]:
        if name == "doubling" and world not in (2, 4, 8):
            continue
        op = plan_files.FILES[kind][name][0]
        path.write_text(plan_files.text_of(kind, name, world), encoding="utf-8")
        for case, chunks in ((RAGGED, 1), (RAGGED, 3), (EVEN, 2), (FEW, 2)):
            problem = OPS[op].problem(case, world)
            plan = READ[kind](path, problem, chunks=chunks, **how_to_edit(problem))
            with use_plan(plan):
                for seed in (1, 2):
                    check_call(failures, case, kind, name, seed=seed, op=op)


def test_files_in_chunks_wait_for_the_tiles_of_each(tmp_path):
    whole = read(tmp_path, "msccl", XML, PROBLEM)
    path = tmp_path / "made.xml"
    cut = from_msccl(path, PROBLEM, chunks=3, transport="gloo", tile=(4, 8))
    assert len(cut.program.transfers) == 3 * len(whole.program.transfers)
    assert len(cut.chunks) > 1
    first = {(area.row, area.rows) for one in cut.program.transfers[:8] for area in one.tiles}
    assert all(row < 16 for row, _ in first)  # of 48 rows in 3 chunks
    with pytest.raises(ValueError, match="0 chunks, allowed is 1 or more"):
        from_msccl(path, PROBLEM, chunks=0, transport="gloo")


@pytest.mark.parametrize(
    ("kind", "name", "transfers"),
    [
        ("msccl", "all pairs", 4 * (3 + 3)),  # of two units: to each peer, and as many sums
        ("msccl", "reduce-scatter", 4 * (1 + 2 + 2)),  # passed on twice, after the own rows
        ("msccl", "all-to-all", 4 * 3),
        ("mscclpp", "read", 4 * 2 * (3 + 3)),  # two thread blocks: what each reads and sends
    ],
)
def test_files_of_several_units_a_step_have_one_transfer_for_it(tmp_path, kind, name, transfers):
    op, _ = plan_files.FILES[kind][name]
    problem = OPS[op].problem(EVEN, 4)
    plan = read(tmp_path, kind, plan_files.text_of(kind, name, 4), problem)
    assert len(plan.program.transfers) == transfers


@pytest.mark.parametrize(
    ("units", "chunks", "advice"),
    [(1, 94, "give fewer chunks than 94"), (94, 1, "take a file with fewer steps")],
)
def test_files_of_too_many_transfers_are_named(tmp_path, units, chunks, advice):
    def blocks(rank):
        pairs = [(peer, n) for peer in range(4) for n in range(units) if peer != rank]
        return [
            (
                peer,
                peer,
                n,
                [("s", f"o{units * rank + n}", "o0"), ("r", "i0", f"o{units * peer + n}")],
            )
            for peer, n in pairs
        ]

    path = tmp_path / "made.xml"
    path.write_text(plan_files.xml("allgather", 4, 4 * units, blocks), encoding="utf-8")
    problem = Problem(4 * 94, 32, 24, "float32", 4, Op.ALLGATHER_GEMM)
    with pytest.raises(
        ValueError, match=f"made.xml: 1128 transfers, allowed are 1 to 1024: {advice}"
    ):
        from_msccl(path, problem, chunks=chunks, transport="gloo")


# --- what is refused: MSCCL -----------------------------------------------------------------------------------------

PROBLEM = Problem(48, 32, 24, "float32", 4)
XML = plan_files.ring_allreduce(4)


def step(index: int) -> str:
    """The line of gpu 0, tb 0's step."""
    lines = [line for line in XML.split("</tb>")[0].splitlines() if line.startswith("<step")]
    return lines[index]


@pytest.mark.parametrize(
    "old, new, expected",
    [
        ('coll="allreduce"', 'coll="broadcast"', "made.xml: collective 'broadcast' is not supp"),
        ('coll="allreduce"', 'coll="allgather"', "is an allgather, the problem of gemm_allreduce"),
        ('ngpus="4"', 'ngpus="5"', "for 5 ranks, the problem has 4"),
        ('nchunksperloop="8"', 'nchunksperloop="x"', "nchunksperloop='x', expected an integer"),
        ('s_chunks="0"', f's_chunks="{1 << 64}"', f"{1 << 64} chunks of a buffer, allowed are at most 65536"),
        ("<algo", "<plan", "made.xml is <plan>, expected <algo>|is no XML"),
        (step(1), step(1).replace("rrs", "rx"), "gpu 0, tb 0, step 1: type 'rx' is not supported"),
        (step(0), step(0).replace('srcoff="0"', 'srcoff="8"'), "gpu 0, tb 0, step 0: chunks 8 to 9 of buffer i, which has 8"),
        (step(0), step(0).replace('srcbuf="i"', 'srcbuf="x"'), "gpu 0, tb 0, step 0: buffer is 'x', allowed are i, o and s"),
        (
            step(0),
            step(0).replace('depid="-1" deps="-1"', 'depid="7" deps="0"'),
            "step 0: depends on step 0 of tb 7, which is not there",
        ),
        (step(0), "", "gpu 1, tb 0, step 6: rank 0 sends nothing for it on channel 0"),
        (step(0), step(0).replace('depid="-1" deps="-1"', 'depid="0" deps="3"'), "gpu 0, tb 0, step 0: rank 0 cannot end"),
        (
            step(0),
            step(0).replace('cnt="1"', 'cnt="2"'),
            "gpu 1, tb 0, step 1: receives 1 chunks, and gpu 0, tb 0, step 0 sends 2",
        ),
    ],
)  # fmt: skip
def test_xml_is_refused_with_the_place(tmp_path, old, new, expected):
    assert old in XML
    refused(tmp_path, "msccl", XML.replace(old, new, 1), PROBLEM, expected)


@pytest.mark.parametrize(
    ("to", "more", "expected"),
    [
        # The sum does not wait for what it adds.
        ("s0", [(-1, -1, 0, [("re", "s0", "i0")])], "gpu 0, tb 1, step 0: a race.*buffer i of rank 0|a race.*s of"),
        ("i0", [], "rank 1.*in place of 0 1"),
    ],
    ids=["a race", "a rank left out"],
)  # fmt: skip
def test_xml_that_is_no_all_reduce_is_refused(tmp_path, to, more, expected):
    def blocks(rank):
        return [(1 - rank, 1 - rank, 0, [("s", "i0", to), ("r", "i0", "s0")]), *more]

    text = plan_files.xml("allreduce", 2, 1, blocks, scratch=1)
    refused(tmp_path, "msccl", text, Problem(48, 32, 24, "float32", 2), expected)


# --- what is refused: MSCCL++ ---------------------------------------------------------------------------------------


def changed(data: dict, *keys: object, value: object) -> str:
    """The file with this in place of what is there; the last key may be new."""
    data = copy.deepcopy(data)
    at = data
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    return json.dumps(data)


OPS_OF_BLOCK = ("gpus", 0, "threadblocks", 0, "ops")
READS, PUTS = plan_files.read_allreduce(4), plan_files.put_allgather(4)


@pytest.mark.parametrize(
    "keys, value, expected",
    [
        (("collective",), "broadcast", "made.json: collective 'broadcast' is not supported"),
        (("protocol",), "LL128", "protocol 'LL128' is not supported, allowed are Simple and LL"),
        (("gpus", 1, "id"), 3, "not in the order of their ids"),
        (("gpus", 0, "input_chunks"), 6, "chunks, allowed are multiples|chunks"),
        (("gpus", 0, "input_chunks"), 1 << 64, "made.json: [0-9]{20} chunks of a buffer, allowed are at most 65536"),
        (
            ("gpus", 0, "channels", 0, "channel_type"), "switch",
            "gpu 0: channel_type 'switch' is not supported, allowed are memory and port"),
        ((*OPS_OF_BLOCK, 0), {"name": "glres"}, r"gpu 0, threadblock 0, op 0 \(glres\): .*not supp"),
        ((*OPS_OF_BLOCK, 0), {"name": "pipeline"}, r"op 0 \(pipeline\)"),
        ((*OPS_OF_BLOCK, 7, "reduce_op"), "min", r"op 7 \(rres\): reduce_op 'min' is not supp"),
        (
            (*OPS_OF_BLOCK, 0), {"name": "nop"},
            r"gpu 1, threadblock 0, op 1 \(wait\): waits for signal 1, and 1 are given for 2 waits"),
        ((*OPS_OF_BLOCK, 6), {"name": "nop"}, r"barrier 0 of rank 0 is for 2 thread blocks, and 1"),
        (
            (*OPS_OF_BLOCK, 7, "src_buff", 1), {"switch_channel_id": 0, "index": 0, "size": 1},
            "switch channels .multimem. are not supported"),
        ((*OPS_OF_BLOCK, 7, "src_buff", 1, "buffer_id"), 99, "buffer 99 is not one of its thread block's 9"),
        ((*OPS_OF_BLOCK, 0, "channel_ids"), [9], "channel 9 is not one of its thread block's 6"),
        (("gpus",), None, "not in the form of an execution plan"),
    ],
)  # fmt: skip
def test_execution_plans_are_refused_with_the_place(tmp_path, keys, value, expected):
    refused(tmp_path, "mscclpp", changed(READS, *keys, value=value), PROBLEM, expected)


def test_execution_plans_with_a_race_or_a_circle_are_refused(tmp_path):
    # The peers' parts are put before anyone said that they may be: harmless; but read before they have come: not.
    data = plan_files.scratch_allreduce(4)
    ops = data["gpus"][0]["threadblocks"][1]["ops"]
    assert ops.pop(0)["name"] == "sem_acquire"
    expected = r"gpu 0, threadblock 1, op 0 \(re\): a race|a race: it"
    refused(tmp_path, "mscclpp", json.dumps(data), PROBLEM, expected)
    data = plan_files.put_allgather(2)
    for gpu in data["gpus"]:
        ops = gpu["threadblocks"][0]["ops"]
        ops.insert(0, ops.pop(1))  # waits before it signals
        assert ops[0]["name"] == "rlxwait"
    problem = Problem(48, 32, 24, "float32", 2, Op.ALLGATHER_GEMM)
    refused(tmp_path, "mscclpp", json.dumps(data), problem, "rank 0 cannot end")


def test_execution_plan_that_is_no_json_is_refused(tmp_path):
    refused(tmp_path, "mscclpp", "{", PROBLEM, r"made\.json is no JSON")


def test_packets_that_nobody_writes_or_that_are_written_twice_are_refused(tmp_path):
    data = plan_files.packet_allreduce(4)
    ops = data["gpus"][1]["threadblocks"][0]["ops"]
    kept = ops.pop(0)
    expected = r"gpu 0, threadblock 1, op 0 \(recpkt\): reads packets of"
    refused(tmp_path, "mscclpp", json.dumps(data), PROBLEM, expected)
    ops.append(kept)
    again = {**kept, "src_buff": [{"type": "i", "index": 2, "size": 1}]}
    blocks = data["gpus"][1]["threadblocks"]
    blocks.append({**blocks[0], "id": 9, "ops": [again]})
    refused(tmp_path, "mscclpp", json.dumps(data), PROBLEM, "cannot end|a race")


def test_files_become_plans_that_are_saved_and_shown(tmp_path):
    plan = read(tmp_path, "msccl", XML, PROBLEM)
    assert plan_module.files.from_json(plan_module.files.to_json(plan)) == plan
    machine = plan_module.Machine(0, 2, 10.0, link_latency_us=50.0, link_gbps=2.0)
    assert "transfers" in str(plan.explain(machine))


# --- damaged files --------------------------------------------------------------------------------------------------


def damaged_xml(seed: int) -> str:
    """One attribute with another value, or one line less."""
    draw = random.Random(seed)
    lines = XML.splitlines()
    i = draw.randrange(len(lines))
    attributes = re.findall(r'(\w+)="([^"]*)"', lines[i])
    if not attributes or draw.random() < 0.2:
        return "\n".join(lines[:i] + lines[i + 1 :])
    name, value = draw.choice(attributes)
    other = draw.choice(["-2", "-1", "0", "1", "7", "99", "", "o", "s", "r", "nop", "re"])
    lines[i] = lines[i].replace(f'{name}="{value}"', f'{name}="{other}"', 1)
    return "\n".join(lines)


def damaged_json(seed: int) -> str:
    """One value in place of another, or left out, somewhere."""
    draw = random.Random(seed)
    data = copy.deepcopy(READS)
    at: object = data
    while True:
        keys = [*at] if isinstance(at, dict) else [*range(len(at))]
        key = draw.choice(keys)
        if not isinstance(at[key], (dict, list)) or not at[key] or draw.random() < 0.1:
            break
        at = at[key]
    if draw.random() < 0.2:
        del at[key]
    else:
        at[key] = draw.choice([-1, 0, 1, 5, 99, "", "s", "put", "wait", None, [], {}, 1.5])
    return json.dumps(data)


@pytest.mark.parametrize("kind, damage", [("msccl", damaged_xml), ("mscclpp", damaged_json)])
def test_damaged_files_are_refused_or_right(tmp_path, kind, damage):
    """Nothing but ValueError comes out, and what is read has passed the proof."""

    @settings(max_examples=40, derandomize=True, database=None)
    @given(st.integers(0, 2**32))
    def check(seed):
        try:
            plan = read(tmp_path, kind, damage(seed), PROBLEM)
        except ValueError:
            return
        plan_module.validate(plan)

    check()
