"""Plans that cannot run: what is said of them, and of the calls that would make them."""

from functools import partial

import pytest

from overlap_torch.plan import Plan, Problem
from overlap_torch.plan.templates import at_once, make_all_to_all, packed, row_panels
from overlap_torch.plan.types import (
    BandRun,
    Chunk,
    Collective,
    DType,
    Kernel,
    Layout,
    Op,
    Resources,
    Schedule,
    Transport,
)
from plan_grids import example

OPS = [Op.GEMM_ALLREDUCE, Op.GEMM_REDUCESCATTER, Op.ALLGATHER_GEMM]
REDUCTIONS = OPS[:2]
KERNELS = ["library", "sm90_pingpong"]


def problem(
    op: Op = Op.GEMM_ALLREDUCE, world: int = 2, m: int = 1024, **changes: object
) -> Problem:
    fields = {"n": 512, "k": 64, "dtype": DType.BFLOAT16, **changes}
    return Problem(m, world_size=world, op=op, **fields)


def over_peers(one: Problem, chunks: int | list[int] = 1, kernel: str = "sm90_pingpong") -> Plan:
    return row_panels(one, chunks, kernel=kernel, transport="peer")


def owners(one: Problem) -> Plan:
    how = {"kernel": "sm90_pingpong", "transport": "peer", "collective": "owners"}
    return row_panels(one, 1, **how)


def messages(world: int = 2, **changes: object) -> Plan:
    one = problem(Op.GEMM_ALLTOALL, world, 0, **changes)
    return make_all_to_all(one, Kernel.LIBRARY, Resources(), 16, Transport.PEER)


def with_chunks(*tiles: int, layout: Layout = Layout.ROW_MAJOR) -> dict[str, object]:
    return {"chunks": [Chunk(t) for t in tiles], "layout": layout}


PLANS = {
    "example": [example],
    "ring": [lambda: over_peers(problem())],
    "owners": [lambda: owners(problem())],
    "owners of three": [lambda: owners(problem(world=3, m=768))],
    "invariant": [lambda: at_once(problem(invariance="batch"), kernel="sm90_pingpong")],
    "stripes": [lambda: row_panels(problem(), 2, transport="peer", collective="stripes")],
    "all_to_all": [messages],
    "direct": [lambda op=op, kernel=kernel: at_once(problem(op, 4), kernel=kernel) for op in REDUCTIONS for kernel in KERNELS],
    "gather_at_once": [lambda: at_once(problem(Op.ALLGATHER_GEMM, 4))],
    "gather": [lambda: over_peers(problem(Op.ALLGATHER_GEMM), 2)],
    "scatter": [lambda: row_panels(problem(Op.GEMM_REDUCESCATTER, m=2048), [1, 3, 4], kernel="sm90_pingpong")],
}  # fmt: skip
WRONG = {
    "owners": [
        ({"kernel": Kernel.LIBRARY}, "kernel library on 2 ranks, allowed are sm90_pingpong, which"),
        ({"schedule": Schedule.SEQUENTIAL}, "collective owners, the schedule sequential, .*allowed are ring, owners or stripes")],
    "owners of three": [
        (
            {
                "kernel": Kernel.SM90_PINGPONG_WIDE,
                "tile_n": 192,
                "chunks": [Chunk(18, Transport.PEER)],
            },
            "sm90_pingpong_wide on 3 ranks, .* between two ranks sm90_pingpong_wide: take",
        )
    ],
    "invariant": [
        (
            {"kernel": Kernel.LIBRARY, "schedule": Schedule.SEQUENTIAL},
            "invariance batch has the kernel library and the collective direct over peer, allowed are this package",
        ),
        (
            {"collective": Collective.RING},
            "invariance batch has the kernel sm90_pingpong and the collective ring over peer",
        ),
    ],
    "example": [
        (with_chunks(16, 24), "chunks have 40 tiles .* 8 x 4 = 32: .*covers a tile twice"),
        (with_chunks(16, 8), "chunks have 24 tiles .* 8 x 4 = 32: .*leaves tiles out"),
        (with_chunks(33, -1), "chunk 1 has -1 tiles, allowed is 1 or more"),
        (with_chunks(), "plan has 0 chunks, allowed are 1 to 64"),
        (with_chunks(*[1] * 65, layout=Layout.PACKED), "65 chunks, allowed are 1 to 64"),
        (with_chunks(12, 20), "chunk 0 ends 4 tiles into a band of 2 x 4 = 8 .* or take .* packed"),
        ({"bands": [BandRun(2, 5)]}, "10 tile rows high, .* 8 x 4 .*cover a tile twice"),
        ({"bands": [BandRun(2, 3)]}, "6 tile rows high, .* 8 x 4 .*leaves tiles out"),
        ({"bands": [BandRun(3, 1), BandRun(5, 1)]}, "bands of 3 .* cluster_m = 2"),
        ({"bands": [BandRun(0, 1), BandRun(2, 4)]}, "bands of 0 .* positive multiples"),
        ({"bands": [BandRun(-2, 1), BandRun(2, 5)]}, "bands of -2 .* positive multiples"),
        ({"bands": [BandRun(2, -1), BandRun(2, 5)]}, "has -1 bands, allowed is 1 or more"),
        ({"bands": [BandRun(2, 1)] * 17}, "17 band runs, allowed are 16"),
        ({"bands": [BandRun(2**31 - 2, 2**31 - 1)]}, "cover a tile twice"),
        ({"tile_m": 64}, "sm90_pingpong was given tiles of 64x128 .* computes 128x128"),
        ({"cluster_m": 1}, "in clusters of 1, but it computes 128x128 in clusters of 2"),
        ({"kernel": Kernel.SM90_COOPERATIVE}, "it computes 128x256"),
        ({"tile_n": 0}, "tile_n = 0, allowed are 1 to"),
        ({"problem": Problem(1024, 512, 64, DType.FLOAT32, 2)}, "given float32, .*'library'"),
        ({"problem": Problem(-1, 512, 64)}, "m = -1, allowed are 0 to"),
        ({"problem": Problem(1024, 512, 64, world_size=0)}, "world_size = 0, allowed are 1 to"),
        ({"problem": Problem(1024, 512, 0, world_size=2)}, "empty problem .* take .* sequential"),
        ({"problem": Problem(2**40, 2**40, 64)}, "allowed are 2147483647 in all"),
        ({"chunks": [Chunk(32, Transport.GLOO)]}, "travel by gloo, which moves host memory"),
        ({"chunks": [Chunk(16), Chunk(16, Transport.GLOO)]}, "chunk 1 travels by gloo, chunk 0"),
        ({"chunks": [Chunk(32, max_ctas=65)]}, "max_ctas = 65, allowed are 0 to 64"),
        ({"resources": Resources(comm_sms=-1)}, "comm_sms = -1, allowed are 0 to"),
        ({"resources": Resources(smem_pad_bytes=2**20)}, "smem_pad_bytes = 1048576, allowed"),
        ({"resources": Resources(finish_ctas=4097)}, "finish_ctas = 4097, allowed are 0 to 4096"),
        (
            {"resources": Resources(finish_ctas=-1)},
            "finish_ctas = -1, allowed are 0 to 4096: 0 leaves",
        ),
        ({"resources": Resources(lanes=0)}, "lanes = 0, allowed are 1 to 4: each lane is a stream"),
        (
            {"collective": Collective.EXCHANGE},
            "overlapped, the layout row_major and the transport nccl, allowed .*or the .* all_reduce",
        ),
        (
            {
                "collective": Collective.EXCHANGE,
                "schedule": Schedule.SEQUENTIAL,
                **with_chunks(32, layout=Layout.PACKED),
            },
            "exchange with the schedule sequential, the layout packed .* allowed are overlapped",
        ),
        (
            {
                "collective": Collective.EXCHANGE,
                "layout": Layout.PACKED,
                "kernel": Kernel.LIBRARY,
                "chunks": [Chunk(32, Transport.GLOO)],
            },
            "exchange .* the layout packed and the transport gloo, allowed are .* and nccl",
        ),
        (
            {
                "collective": Collective.EXCHANGE,
                "problem": Problem(1024, 512, 64, DType.BFLOAT16, 3),
                "layout": Layout.PACKED,
            },
            "world_size = 3, allowed is 2: between more ranks .* all_reduce, take that",
        ),
        ({"schedule": Schedule.SEQUENTIAL}, "sequential plan has 2 chunks, allowed is one"),
        (
            {"schedule": Schedule.SEQUENTIAL, **with_chunks(32, layout=Layout.PACKED)},
            "sequential plan has the layout packed, allowed is row_major",
        ),
    ],
    "ring": [
        (
            {"chunks": [Chunk(32)]},
            "collective is ring with the transport nccl, allowed is peer: take that, or the collective all_reduce",
        ),
        (
            {"chunks": [Chunk(32, Transport.GLOO)], "kernel": Kernel.LIBRARY},
            "collective is ring with the transport gloo, allowed is peer",
        ),
        (
            {"chunks": [Chunk(16, Transport.PEER), Chunk(16)]},
            "chunk 1 travels by nccl, chunk 0 by peer: take one transport",
        ),
        (
            {"schedule": Schedule.SEQUENTIAL, "chunks": [Chunk(32, Transport.PEER)]},
            "travels by peer .* the schedule sequential, .* allowed are ring, owners or stripes .overlapped. or direct",
        ),
        (
            {"collective": Collective.ALL_REDUCE},
            "travels by peer with the collective all_reduce, .*allowed are ring.* or all_gather.*take those, or the transport nccl",
        ),
        ({"collective": Collective.EXCHANGE}, "travels by peer with the collective exchange, "),
        (
            {"collective": Collective.ALL_GATHER},
            "collective of gemm_allreduce is all_gather, allowed is all_reduce, exchange, ring, direct, stripes or owners: take that",
        ),
        (
            {"chunks": [Chunk(16, Transport.PEER)] * 2},
            "the collective ring has 2 chunks, allowed is one of all tiles, .* join them",
        ),
        (
            {"collective": Collective.RING, "schedule": Schedule.SEQUENTIAL},
            "collective ring, the schedule sequential, .*overlapped",
        ),
    ],
    "stripes": [
        (
            {"schedule": Schedule.SEQUENTIAL},
            "collective stripes, the schedule sequential, .*allowed are ring, owners or stripes .overlapped.",
        ),
        (
            {"chunks": [Chunk(16)] * 2},
            "collective is stripes with the transport nccl, allowed is peer, or gloo on CPU: take that",
        ),
        (
            {"kernel": Kernel.SM80},
            "collective is stripes with the kernel sm80, .*allowed are library, .*overlapped and row_major: take",
        ),
        (
            {"layout": Layout.PACKED, "chunks": [Chunk(16, Transport.GLOO)] * 2},
            "stripes with the kernel library, the schedule overlapped and the layout packed, allowed are library",
        ),
    ],
    "all_to_all": [
        ({"collective": Collective.RING}, "of gemm_alltoall is ring, allowed is all_to_all: take"),
        ({"collective": Collective.DIRECT}, "of gemm_alltoall is direct, allowed is all_to_all"),
        (
            {"schedule": Schedule.SEQUENTIAL},
            "gemm_alltoall travels by peer with the collective all_to_all, the schedule sequential, .*allowed are .*all_to_all .overlapped., .*take those, or the transport nccl",
        ),
        (
            {"problem": Problem(0, 511, 64, DType.BFLOAT16, 2, Op.GEMM_ALLTOALL)},
            "collective all_to_all and rows of 1022 bytes, allowed are multiples of 16",
        ),
        (
            {"problem": Problem(0, 0, 64, DType.BFLOAT16, 2, Op.GEMM_ALLTOALL)},
            "n = 0, k = 64 with 1 chunks, allowed are n and k of 1 or more",
        ),
    ],
    "direct": [
        (
            {"chunks": [Chunk(16, Transport.PEER)] * 2},
            "plan with the collective direct has 2 chunks, allowed is one of all tiles, as nothing",
        ),
        (
            {"chunks": [Chunk(32)]},
            "collective is direct with the transport nccl, allowed is peer: take that, or the collective (all_reduce|reduce_scatter)",
        ),
        (
            {"chunks": [Chunk(32, Transport.GLOO)]},
            "collective is direct with the transport gloo, allowed is peer",
        ),
    ],
    "gather_at_once": [
        (
            {"chunks": [Chunk(16, Transport.PEER)] * 2},
            "sequential plan has 2 chunks, allowed is one of all tiles: join them, or take the schedule overlapped",
        ),
        (
            {"collective": Collective.DIRECT},
            "collective of allgather_gemm is direct, allowed is all_gather: take that",
        ),
    ],
    "gather": [({"collective": Collective.RING}, "of allgather_gemm is ring, allowed is all_gather")],
    "scatter": [
        (
            {"collective": Collective.RING},
            "ring with the transport nccl, allowed is peer: take .* the collective reduce_scatter",
        )
    ],
}  # fmt: skip

OVER_PEERS = ["ring", "stripes", "all_to_all", "direct", "gather_at_once", "gather"]
WRONG_OVER_PEERS = [
    ({"resources": Resources(lanes=2)}, "plan of .* travels by peer with the collective .* lanes = 2, allowed are .* one lane"),
    ({"resources": Resources(window=True)}, "window = true with the transport peer, but symmetric windows are NCCL's: take nccl"),
    ({"layout": Layout.PACKED}, "plan of .* travels by peer with the collective .* the layout packed, .*allowed are .*row_major"),
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
            ("library", DType.BFLOAT16, 12, 24), ("library", DType.FLOAT16, 1001, 2002),
            ("library", DType.FLOAT32, 1, 4), ("library", DType.FLOAT32, 1002, 4008),
            ("library", DType.FLOAT64, 513, 4104), ("sm90_pingpong", DType.BFLOAT16, 516, 1032),
            ("sm90_pingpong", DType.FLOAT16, 7, 14),
        )
    ],
    *[
        (partial(at_once, problem(Op.ALLGATHER_GEMM, 4, n=511, k=k, dtype=dtype)), BYTES.format("all_gather", size))
        for dtype, k, size in ((DType.BFLOAT16, 68, 136), (DType.FLOAT32, 63, 252))
    ],
    *[
        (partial(at_once, problem(op, 4, **{"m": 1024, empty: 0}), kernel=kernel), f"{words} for an empty problem .*{empty}=0")
        for op in OPS for empty in "mnk"
        for kernel, words in (("library", "by peer"), ("sm90_pingpong", "overlapped plan"))
        if (op, empty, kernel) != (Op.GEMM_ALLREDUCE, "k", "library")  # the caller gives the product
    ],
    *[
        (lambda kernel=kernel: at_once(problem(Op.GEMM_ALLTOALL, m=0), kernel=kernel), "collective of gemm_alltoall is direct, allowed is all_to_all: take that")
        for kernel in KERNELS
    ],
    (lambda: at_once(problem(dtype=DType.FLOAT32), kernel="sm90_pingpong"), "sm90_pingpong was given float32, but it computes bfloat16, float16 and fp8"),
    (lambda: at_once(problem(), kernel="fast"), "Kernel is 'fast', allowed are library, sm80, "),
    *[
        (partial(packed, problem(op), 1, kernel="sm90_pingpong", transport="peer"), "packed.*allowed .*row_major|row_major.*allowed .*packed")
        for op in OPS
    ],
    *[
        (partial(over_peers, problem(op, m=2048), [4, 4]), "collective ring has 2 chunks, allowed is one of all")
        for op in REDUCTIONS
    ],
    *[
        (partial(packed, problem(op, 3, 96, n=8, k=8, dtype=DType.FLOAT32), 1, tile=(8, 8)), f"plan of {op.name.lower()} has the layout packed")
        for op in OPS[1:]
    ],
    *[
        (partial(row_panels, problem(op, 3, 100, n=8, k=8, dtype=DType.FLOAT32), 1), "m = 100 rows on 3 ranks, allowed are multiples of the")
        for op in OPS[1:]
    ],
    (lambda: row_panels(problem(m=8, n=8, k=8, dtype=DType.FLOAT32), 1, transport="gloo", window=True), "window = true with the transport gloo"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_plan_templates_say_what_is_allowed(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
