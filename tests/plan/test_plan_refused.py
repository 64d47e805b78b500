"""Plans that cannot run: what is said of them, and of the calls that would make them."""

from functools import partial

import pytest

from overlap_torch.plan import Machine, Plan, Problem, types
from overlap_torch.plan.programs import one_shot
from overlap_torch.plan.templates import (
    at_once,
    make_all_to_all,
    make_sequential,
    packed,
    row_panels,
)
from plan_grids import example

OPS = [types.Op.GEMM_ALLREDUCE, types.Op.GEMM_REDUCESCATTER, types.Op.ALLGATHER_GEMM]
REDUCTIONS = OPS[:2]
KERNELS = ["library", "sm90_pingpong"]


def problem(
    op: types.Op = types.Op.GEMM_ALLREDUCE, world: int = 2, m: int = 1024, **changes: object
) -> Problem:
    fields = {"n": 512, "k": 64, "dtype": types.DType.BFLOAT16, **changes}
    return Problem(m, world_size=world, op=op, **fields)


def over_peers(one: Problem, chunks: int | list[int] = 1, kernel: str = "sm90_pingpong") -> Plan:
    return row_panels(one, chunks, kernel=kernel, transport="peer")


def owners(one: Problem) -> Plan:
    how = {"kernel": "sm90_pingpong", "transport": "peer", "collective": "owners"}
    return row_panels(one, 1, **how)


def messages(world: int = 2, **changes: object) -> Plan:
    one = problem(types.Op.GEMM_ALLTOALL, world, 0, **changes)
    return make_all_to_all(one, types.Kernel.LIBRARY, types.Resources(), 16, types.Transport.PEER)


def with_chunks(*tiles: int, layout: types.Layout = types.Layout.ROW_MAJOR) -> dict[str, object]:
    return {"chunks": [types.Chunk(t) for t in tiles], "layout": layout}


PLANS = {
    "example": [example],
    "ring": [lambda: over_peers(problem())],
    "owners": [lambda: owners(problem())],
    "owners of three": [lambda: owners(problem(world=3, m=768))],
    "invariant": [lambda: at_once(problem(invariance="batch"), kernel="sm90_pingpong")],
    "stripes": [lambda: row_panels(problem(), 2, transport="peer", collective="stripes")],
    "all_to_all": [messages],
    "direct": [lambda op=op, kernel=kernel: at_once(problem(op, 4), kernel=kernel) for op in REDUCTIONS for kernel in KERNELS],
    "gather_at_once": [lambda: at_once(problem(types.Op.ALLGATHER_GEMM, 4))],
    "gather": [lambda: over_peers(problem(types.Op.ALLGATHER_GEMM), 2)],
    "scatter": [lambda: row_panels(problem(types.Op.GEMM_REDUCESCATTER, m=2048), [1, 3, 4], kernel="sm90_pingpong")],
}  # fmt: skip
WRONG = {
    "owners": [
        ({"kernel": types.Kernel.LIBRARY}, "kernel library on 2 ranks, allowed are sm90_pingpong, which"),
        ({"schedule": types.Schedule.SEQUENTIAL}, "collective owners, the schedule sequential, .*allowed are ring, owners or stripes")],
    "owners of three": [
        (
            {
                "kernel": types.Kernel.SM90_PINGPONG_WIDE,
                "tile_n": 192,
                "chunks": [types.Chunk(18, types.Transport.PEER)],
            },
            "sm90_pingpong_wide on 3 ranks, .* between two ranks sm90_pingpong_wide: take",
        )
    ],
    "invariant": [
        (
            {"kernel": types.Kernel.LIBRARY, "schedule": types.Schedule.SEQUENTIAL},
            "invariance batch has the kernel library and the collective direct over peer, allowed are this package",
        ),
        (
            {"collective": types.Collective.RING},
            "invariance batch has the kernel sm90_pingpong and the collective ring over peer",
        ),
    ],
    "example": [
        (with_chunks(16, 24), "chunks have 40 tiles .* 8 x 4 = 32: .*covers a tile twice"),
        (with_chunks(16, 8), "chunks have 24 tiles .* 8 x 4 = 32: .*leaves tiles out"),
        (with_chunks(33, -1), "chunk 1 has -1 tiles, allowed is 1 or more"),
        (with_chunks(), "plan has 0 chunks, allowed are 1 to 64"),
        (with_chunks(*[1] * 65, layout=types.Layout.PACKED), "65 chunks, allowed are 1 to 64"),
        (with_chunks(12, 20), "chunk 0 ends 4 tiles into a band of 2 x 4 = 8 .* or take .* packed"),
        ({"bands": [types.BandRun(2, 5)]}, "10 tile rows high, .* 8 x 4 .*cover a tile twice"),
        ({"bands": [types.BandRun(2, 3)]}, "6 tile rows high, .* 8 x 4 .*leaves tiles out"),
        ({"bands": [types.BandRun(3, 1), types.BandRun(5, 1)]}, "bands of 3 .* cluster_m = 2"),
        ({"bands": [types.BandRun(0, 1), types.BandRun(2, 4)]}, "bands of 0 .* positive multiples"),
        ({"bands": [types.BandRun(-2, 1), types.BandRun(2, 5)]}, "bands of -2 .* positive multiples"),
        ({"bands": [types.BandRun(2, -1), types.BandRun(2, 5)]}, "has -1 bands, allowed is 1 or more"),
        ({"bands": [types.BandRun(2, 1)] * 17}, "17 band runs, allowed are 16"),
        ({"bands": [types.BandRun(2**31 - 2, 2**31 - 1)]}, "cover a tile twice"),
        ({"tile_m": 64}, "sm90_pingpong was given tiles of 64x128 .* computes 128x128"),
        ({"cluster_m": 1}, "in clusters of 1, but it computes 128x128 in clusters of 2"),
        ({"kernel": types.Kernel.SM90_COOPERATIVE}, "it computes 128x256"),
        ({"tile_n": 0}, "tile_n = 0, allowed are 1 to"),
        ({"problem": Problem(1024, 512, 64, types.DType.FLOAT32, 2)}, "given float32, but it computes bfloat16, float16 and fp8.*'library'"),
        ({"problem": Problem(-1, 512, 64)}, "m = -1, allowed are 0 to"),
        ({"problem": Problem(1024, 512, 0, world_size=2)}, "empty problem .* take .* sequential"),
        ({"problem": Problem(2**40, 2**40, 64)}, "allowed are 2147483647 in all"),
        ({"chunks": [types.Chunk(32, types.Transport.GLOO)]}, "travel by gloo, which moves host memory"),
        ({"chunks": [types.Chunk(16), types.Chunk(16, types.Transport.GLOO)]}, "chunk 1 travels by gloo, chunk 0"),
        ({"chunks": [types.Chunk(32, max_ctas=65)]}, "max_ctas = 65, allowed are 0 to 64"),
        ({"resources": types.Resources(comm_sms=-1)}, "comm_sms = -1, allowed are 0 to"),
        ({"resources": types.Resources(smem_pad_bytes=2**20)}, "smem_pad_bytes = 1048576, allowed"),
        ({"resources": types.Resources(finish_ctas=4097)}, "finish_ctas = 4097, allowed are 0 to 4096"),
        (
            {"resources": types.Resources(finish_ctas=-1)},
            "finish_ctas = -1, allowed are 0 to 4096: 0 leaves",
        ),
        ({"resources": types.Resources(lanes=0)}, "lanes = 0, allowed are 1 to 4: each lane is a stream"),
        (
            {"collective": types.Collective.EXCHANGE},
            "overlapped, the layout row_major and the transport nccl, allowed .*or the .* all_reduce",
        ),
        (
            {
                "collective": types.Collective.EXCHANGE,
                "schedule": types.Schedule.SEQUENTIAL,
                **with_chunks(32, layout=types.Layout.PACKED),
            },
            "exchange with the schedule sequential, the layout packed .* allowed are overlapped",
        ),
        (
            {
                "collective": types.Collective.EXCHANGE,
                "layout": types.Layout.PACKED,
                "kernel": types.Kernel.LIBRARY,
                "chunks": [types.Chunk(32, types.Transport.GLOO)],
            },
            "exchange .* the layout packed and the transport gloo, allowed are .* and nccl",
        ),
        (
            {
                "collective": types.Collective.EXCHANGE,
                "problem": Problem(1024, 512, 64, types.DType.BFLOAT16, 3),
                "layout": types.Layout.PACKED,
            },
            "world_size = 3, allowed is 2: between more ranks .* all_reduce, take that",
        ),
        ({"schedule": types.Schedule.SEQUENTIAL}, "sequential plan has 2 chunks, allowed is one"),
        (
            {"schedule": types.Schedule.SEQUENTIAL, **with_chunks(32, layout=types.Layout.PACKED)},
            "sequential plan has the layout packed, allowed is row_major",
        ),
    ],
    "ring": [
        (
            {"chunks": [types.Chunk(32)]},
            "collective is ring with the transport nccl, allowed is peer: take that, or the collective all_reduce",
        ),
        (
            {"chunks": [types.Chunk(16, types.Transport.PEER), types.Chunk(16)]},
            "chunk 1 travels by nccl, chunk 0 by peer: take one transport",
        ),
        (
            {"schedule": types.Schedule.SEQUENTIAL, "chunks": [types.Chunk(32, types.Transport.PEER)]},
            "travels by peer .* the schedule sequential, .* allowed are ring, owners or stripes .overlapped. or direct",
        ),
        (
            {"collective": types.Collective.ALL_REDUCE},
            "travels by peer with the collective all_reduce, .*allowed are ring.* or all_gather.*take those, or the transport nccl",
        ),
        ({"collective": types.Collective.EXCHANGE}, "travels by peer with the collective exchange, "),
        (
            {"collective": types.Collective.ALL_GATHER},
            "collective of gemm_allreduce is all_gather, allowed is all_reduce or exchange or ring or direct or stripes or owners: take that",
        ),
        (
            {"chunks": [types.Chunk(16, types.Transport.PEER)] * 2},
            "the collective ring has 2 chunks, allowed is one of all tiles, .* join them",
        ),
    ],
    "stripes": [
        (
            {"schedule": types.Schedule.SEQUENTIAL},
            "collective stripes, the schedule sequential, .*allowed are ring, owners or stripes .overlapped.",
        ),
        (
            {"chunks": [types.Chunk(16)] * 2},
            "collective is stripes with the transport nccl, allowed is peer, or gloo on CPU: take that",
        ),
        (
            {"kernel": types.Kernel.SM80},
            "collective is stripes with the kernel sm80, .*allowed are library, .*overlapped and row_major: take",
        ),
        (
            {"layout": types.Layout.PACKED, "chunks": [types.Chunk(16, types.Transport.GLOO)] * 2},
            "stripes with the kernel library, the schedule overlapped and the layout packed, allowed are library",
        ),
    ],
    "all_to_all": [
        ({"collective": types.Collective.RING}, "of gemm_alltoall is ring, allowed is all_to_all: take"),
        ({"collective": types.Collective.DIRECT}, "of gemm_alltoall is direct, allowed is all_to_all"),
        (
            {"schedule": types.Schedule.SEQUENTIAL},
            "gemm_alltoall travels by peer with the collective all_to_all, the schedule sequential, .*allowed are .*all_to_all .overlapped., .*take those, or the transport nccl",
        ),
        (
            {"problem": Problem(0, 511, 64, types.DType.BFLOAT16, 2, types.Op.GEMM_ALLTOALL)},
            "collective all_to_all and rows of 1022 bytes, allowed are multiples of 16",
        ),
    ],
    "direct": [
        (
            {"chunks": [types.Chunk(16, types.Transport.PEER)] * 2},
            "plan with the collective direct has 2 chunks, allowed is one of all tiles, as nothing",
        ),
        (
            {"chunks": [types.Chunk(32)]},
            "collective is direct with the transport nccl, allowed is peer: take that, or the collective (all_reduce|reduce_scatter)",
        ),
    ],
    "gather_at_once": [
        (
            {"chunks": [types.Chunk(16, types.Transport.PEER)] * 2},
            "sequential plan has 2 chunks, allowed is one of all tiles: join them, or take the schedule overlapped",
        ),
        (
            {"collective": types.Collective.DIRECT},
            "collective of allgather_gemm is direct, allowed is all_gather: take that",
        ),
    ],
    "gather": [({"collective": types.Collective.RING}, "of allgather_gemm is ring, allowed is all_gather")],
    "scatter": [
        (
            {"collective": types.Collective.RING},
            "ring with the transport nccl, allowed is peer: take .* the collective reduce_scatter",
        )
    ],
}  # fmt: skip

OVER_PEERS = ["ring", "stripes", "all_to_all", "direct", "gather_at_once", "gather"]
WRONG_OVER_PEERS = [
    ({"resources": types.Resources(lanes=2)}, "plan of .* travels by peer with the collective .* lanes = 2, allowed are .* one lane"),
    ({"resources": types.Resources(window=True)}, "window = true with the transport peer, but symmetric windows are NCCL's: take nccl"),
    ({"layout": types.Layout.PACKED}, "plan of .* travels by peer with the collective .* the layout packed, .*allowed are .*row_major"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [(name, *row) for name, rows in WRONG.items() for row in rows]
    + [(name, *row) for name in OVER_PEERS for row in WRONG_OVER_PEERS],
)
def test_plan_validate_names_what_is_wrong(name: str, changes: dict, message: str) -> None:
    for make in PLANS[name]:
        plan = make()
        plan.validate()
        for field, value in changes.items():
            setattr(plan, field, value)
        with pytest.raises(ValueError, match=message):
            plan.validate()


HOST = "by peer between {} ranks, allowed are 2 to 8: take the transport nccl"
PARTS = "m = {} on {} ranks, allowed are multiples .* transport nccl"
BYTES = "by peer with the collective {} and rows of {} bytes, allowed are multiples of 16"
CALLS = [
    *[
        (partial(at_once, problem(op, w, 256 * w), kernel=kernel), HOST.format(w))
        for op in OPS for kernel in KERNELS for w in (1, 9, 16)
    ],
    *[(partial(over_peers, problem(op, w, 256 * w)), HOST.format(w)) for op in OPS for w in (1, 9, 16)],
    *[(lambda w=w: messages(w), HOST.format(w)) for w in (1, 9)],
    *[
        (partial(at_once, problem(world=w, m=m), kernel="sm90_pingpong"), PARTS.format(m, w))
        for w in range(3, 9) for m in (1, 128 * w - 1, 128 * w + 1)
    ],
    *[
        (partial(at_once, problem(op, m=1023), kernel=kernel), "m = 1023 rows on 2 ranks, allowed are multiples")
        for op in OPS[1:] for kernel in KERNELS
    ],
    *[
        (partial(at_once, problem(op, 4, n=n, dtype=dtype), kernel=kernel),
         BYTES.format("direct", size) + ", .*take the transport nccl")
        for op in REDUCTIONS
        for kernel, dtype, n, size in (
            ("library", types.DType.BFLOAT16, 12, 24), ("library", types.DType.FLOAT16, 1001, 2002),
            ("library", types.DType.FLOAT32, 1, 4), ("library", types.DType.FLOAT32, 1002, 4008),
            ("library", types.DType.FLOAT64, 513, 4104), ("sm90_pingpong", types.DType.BFLOAT16, 516, 1032),
            ("sm90_pingpong", types.DType.FLOAT16, 7, 14),
        )
    ],
    *[
        (partial(at_once, problem(types.Op.ALLGATHER_GEMM, 4, n=511, k=k, dtype=dtype)), BYTES.format("all_gather", size))
        for dtype, k, size in ((types.DType.BFLOAT16, 68, 136), (types.DType.FLOAT32, 63, 252))
    ],
    *[
        (partial(at_once, problem(op, 4, **{"m": 1024, empty: 0}), kernel=kernel), f"{words} for an empty problem .*{empty}=0")
        for op in OPS for empty in "mnk"
        for kernel, words in (("library", "by peer"), ("sm90_pingpong", "overlapped plan"))
        if (op, empty, kernel) != (types.Op.GEMM_ALLREDUCE, "k", "library")  # the caller gives the product
    ],
    (lambda: at_once(problem(), kernel="fast"), "Kernel is 'fast', allowed are library, sm80, "),
    (lambda: packed(problem(world=3), 2, collective="exchange"), "exchange with world_size = 3, allowed is 2"),
    *[
        (partial(packed, problem(op, 3, 96, n=8, k=8, dtype=types.DType.FLOAT32), 1, tile=(8, 8)), f"plan of {op.name.lower()} has the layout packed")
        for op in OPS[1:]
    ],
    (lambda: row_panels(problem(m=8, n=8, k=8, dtype=types.DType.FLOAT32), 1, transport="gloo", window=True), "window = true with the transport gloo"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_plan_templates_say_what_is_allowed(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("world", [0, -1])
def test_plan_problem_of_no_ranks_is_refused(world):
    with pytest.raises(ValueError, match=f"world_size = {world}, allowed are 1 or more"):
        Problem(1024, 512, 64, world_size=world)


@pytest.mark.parametrize("machine", [Machine(), Machine(arch=90), Machine(sm_count=132)], ids=repr)
@pytest.mark.parametrize(
    "make", [make_sequential, lambda whole, _: one_shot(whole, transport="gloo")]
)
def test_plan_explain_refuses_a_machine_without_sms(make, machine):
    plan = make(Problem(512, 256, 128, "float32", 2), Machine(arch=90, sm_count=132, sm_gflops=1e3))
    with pytest.raises(
        ValueError, match="allowed are numbers above 0: take overlap_torch.plan.machine"
    ):
        plan.explain(machine)
