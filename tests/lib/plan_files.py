"""Algorithms as files of MSCCL and MSCCL++, made for any number of ranks."""

import json
from collections.abc import Callable
from typing import Any

# --- MSCCL: steps of thread blocks ----------------------------------------------------------------------------------

Step = tuple[Any, ...]  # type, source, destination, [count], [(depid, deps)]


def xml(
    coll: str,
    world: int,
    chunks: int,
    blocks: Callable[[int], list[tuple[int, int, int, list[Step]]]],
    inplace: bool = True,
    scratch: int = 0,
) -> str:
    """`blocks` of a rank: (send, recv, chan, steps). A place is a buffer's letter and an index, as "i3"."""
    lines = [
        f'<algo name="made" nchunksperloop="{chunks}" nchannels="2" proto="Simple" ngpus="{world}" coll="{coll}" '
        f'inplace="{int(inplace)}" outofplace="{int(not inplace)}" minBytes="0" maxBytes="0">'
    ]
    sizes = f'i_chunks="{chunks}" o_chunks="{chunks}" s_chunks="{scratch}"'
    for rank in range(world):
        lines.append(f'<gpu id="{rank}" {sizes}>')
        for number, (send, recv, channel, steps) in enumerate(blocks(rank)):
            lines.append(f'<tb id="{number}" send="{send}" recv="{recv}" chan="{channel}">')
            for index, (kind, source, destination, *more) in enumerate(steps):
                count = next((one for one in more if isinstance(one, int)), 1)
                depends = next((one for one in more if isinstance(one, tuple)), (-1, -1))
                lines.append(
                    f'<step s="{index}" type="{kind}" srcbuf="{source[0]}" srcoff="{source[1:]}" '
                    f'dstbuf="{destination[0]}" dstoff="{destination[1:]}" cnt="{count}" '
                    f'depid="{depends[0]}" deps="{depends[1]}" hasdep="0"/>'
                )
            lines.append("</tb>")
        lines.append("</gpu>")
    return "\n".join([*lines, "</algo>"])


def ring_allreduce(world: int, inplace: bool = True) -> str:
    """Sums go round without being stored on the way, then results; a channel for each of two halves."""
    buffer = "i" if inplace else "o"

    def blocks(rank):
        made = []
        for channel in range(2):

            def step(kind, source, number, channel=channel):
                chunk = 2 * (number % world) + channel
                return kind, f"{source}{chunk}", f"{buffer}{chunk}"

            steps = [
                step("s", "i", rank),
                *(step("rrs", "i", rank - back) for back in range(1, world - 1)),
                step("rrcs", "i", rank + 1),
                *(step("rcs", buffer, rank - back) for back in range(world - 2)),
                step("r", buffer, rank + 2),
            ]
            made.append(((rank + 1) % world, (rank - 1) % world, channel, steps))
        return made

    return xml("allreduce", world, 2 * world, blocks, inplace)


def all_pairs_allreduce(world: int) -> str:
    """Everyone's input to everyone's scratch; one thread block adds up behind all."""

    def blocks(rank):
        peers = [peer for peer in range(world) if peer != rank]
        made = [
            (peer, peer, 0, [("s", "i0", f"s{rank * 2}", 2), ("r", "i0", f"s{peer * 2}", 2)])
            for peer in peers
        ]
        waits = [("nop", "i0", "i0", (block, 1)) for block in range(1, len(peers))]
        adds = [("re", f"s{peer * 2}", "i0", 2) for peer in peers]
        made[0][3].extend([*waits, *adds])
        return made

    return xml("allreduce", world, 2, blocks, scratch=2 * world)


def doubling_allreduce(world: int) -> str:
    """Pairs at distance 1, 2, 4 exchange what they have, in place: each sends what it then adds to."""

    def blocks(rank):
        made = []
        distance = 1
        while distance < world:
            peer = rank ^ distance
            depends = (len(made) - 1, 1) if made else (-1, -1)
            made.append((peer, peer, 0, [("s", "i0", "i0", depends), ("rrc", "i0", "i0")]))
            distance *= 2
        return made

    return xml("allreduce", world, 1, blocks)


def ring_allgather(world: int, inplace: bool) -> str:
    def blocks(rank):
        own = f"o{rank}" if inplace else "i0"
        steps = [] if inplace else [("cpy", "i0", f"o{rank}")]
        steps.append(("s", own, f"o{rank}"))
        for step in range(1, world - 1):
            steps.append(("rcs", f"o{(rank - step) % world}", f"o{(rank - step) % world}"))
        steps.append(("r", f"o{(rank + 1) % world}", f"o{(rank + 1) % world}"))
        return [((rank + 1) % world, (rank - 1) % world, 0, steps)]

    return xml("allgather", world, world, blocks, inplace)


def ring_reduce_scatter(world: int, inplace: bool) -> str:
    """Two chunks a rank, at a time."""

    def blocks(rank):
        def place(step):
            return f"i{2 * ((rank - step) % world)}"

        steps = [("s", place(1), place(1), 2)]
        steps += [("rrs", place(step), place(step), 2) for step in range(2, world)]
        steps.append(("rrc", f"i{2 * rank}", f"i{2 * rank}" if inplace else "o0", 2))
        return [((rank + 1) % world, (rank - 1) % world, 0, steps)]

    return xml("reduce_scatter", world, 2 * world, blocks, inplace)


def direct_alltoall(world: int) -> str:
    def blocks(rank):
        made = [(-1, -1, 0, [("cpy", f"i{2 * rank}", f"o{2 * rank}", 2)])]
        for peer in range(world):
            if peer != rank:
                steps = [("s", f"i{2 * peer}", f"o{2 * rank}", 2)]
                steps += [("r", f"i{2 * rank}", f"o{2 * peer}", 2)]
                made.append((peer, peer, 0, steps))
        return made

    return xml("alltoall", world, 2 * world, blocks, inplace=False)


MSCCL: dict[str, tuple[str, Callable[[int], str]]] = {
    "ring": ("gemm_allreduce", ring_allreduce),
    "ring out of place": ("gemm_allreduce", lambda world: ring_allreduce(world, False)),
    "all pairs": ("gemm_allreduce", all_pairs_allreduce),
    "doubling": ("gemm_allreduce", doubling_allreduce),
    "all-gather": ("allgather_gemm", lambda world: ring_allgather(world, True)),
    "all-gather out of place": ("allgather_gemm", lambda world: ring_allgather(world, False)),
    "reduce-scatter": ("gemm_reducescatter", lambda world: ring_reduce_scatter(world, True)),
    "reduce-scatter out of place": (
        "gemm_reducescatter",
        lambda world: ring_reduce_scatter(world, False),
    ),
    "all-to-all": ("gemm_alltoall", direct_alltoall),
}


# --- MSCCL++: operations of thread blocks ---------------------------------------------------------------------------


class Gpu:
    """One GPU's part of an execution plan: to each peer a channel for block 0 and one for others; and one remote buffer of each
    kind there."""

    def __init__(self, rank: int, world: int, chunks: tuple[int, int, int]) -> None:
        self.rank = rank
        self.peers = [peer for peer in range(world) if peer != rank]
        self.kinds = ("i", "o", "s")
        self.blocks: list[list[dict[str, Any]]] = [[]]
        self.semaphores: list[dict[str, int]] = []
        self.chunks = chunks

    def local(self, place: str, size: int = 1) -> dict[str, Any]:
        return {"type": place[0], "index": int(place[1:]), "size": size}

    def remote(self, peer: int, place: str, size: int = 1) -> dict[str, Any]:
        number = self.peers.index(peer) * len(self.kinds) + self.kinds.index(place[0])
        return {"buffer_id": number, "index": int(place[1:]), "size": size}

    def op(self, name: str, block: int = 0, **fields: Any) -> None:
        while len(self.blocks) <= block:
            self.blocks.append([])
        self.blocks[block].append({"name": name, **fields})

    def at(self, name: str, peer: int, block: int = 0, **fields: Any) -> None:
        """An operation on the channel to a peer."""
        ids = [self.peers.index(peer) + min(block, 1) * len(self.peers)]
        self.op(name, block, channel_ids=ids, channel_type="memory", **fields)

    def send(self, name: str, peer: int, source: str, target: str, block: int = 0) -> None:
        """From a place of its own to one of a peer's."""
        buffers = {"src_buff": [self.local(source)], "dst_buff": [self.remote(peer, target)]}
        self.at(name, peer, block, **buffers)

    def at_all(self, *names: str, block: int = 0) -> None:
        """These operations on the channel to each peer."""
        for peer in self.peers:
            for name in names:
                self.at(name, peer, block)

    def data(self) -> dict[str, Any]:
        channels = list(range(2 * len(self.peers)))
        buffers = list(range(len(self.peers) * len(self.kinds)))
        return {
            "id": self.rank,
            "input_chunks": self.chunks[0],
            "output_chunks": self.chunks[1],
            "scratch_chunks": self.chunks[2],
            "threadblocks": [
                {
                    "id": number,
                    "ops": ops,
                    "channels": [{"channel_type": "memory", "channel_ids": channels}],
                    "remote_buffer_refs": [
                        {"access_channel_type": "memory", "remote_buffer_ids": buffers}
                    ],
                }
                for number, ops in enumerate(self.blocks)
            ],
            "channels": [{"channel_type": "memory", "connected_to": 2 * self.peers}],
            "remote_buffers": [
                {"rank": peer, "type": kind, "access_channel_types": ["memory"]}
                for peer in self.peers
                for kind in self.kinds
            ],
            "semaphores": self.semaphores,
        }


def execution_plan(
    collective: str,
    chunks: Callable[[int], tuple[int, int, int]],
    inplace: bool = True,
    protocol: str = "Simple",
) -> Callable[[Callable[[Gpu], None]], Callable[[int], dict[str, Any]]]:
    """Makes a plan for any number of ranks of a function that writes one GPU's part of it. ``chunks``: of input, output and
    scratch, by the number of ranks."""

    def decorator(write: Callable[[Gpu], None]) -> Callable[[int], dict[str, Any]]:
        def made(world: int) -> dict[str, Any]:
            gpus = [Gpu(rank, world, chunks(world)) for rank in range(world)]
            for gpu in gpus:
                write(gpu)
            return {
                "name": "made",
                "collective": collective,
                "protocol": protocol,
                "inplace": inplace,
                "reuse_resources": False,
                "gpus": [gpu.data() for gpu in gpus],
                "num_threads_per_block": 1024,
                "use_double_scratch_buffer": False,
                "buffer_alignment": 16,
                "min_message_size": 0,
                "max_message_size": 2**64 - 1,
            }

        return made

    return decorator


@execution_plan("allgather", lambda world: (1, world, 0))
def put_allgather(gpu: Gpu) -> None:
    """Everyone puts its part into all outputs, in place, behind a signal that they are ready."""
    gpu.at_all("rlxsignal", "rlxwait")
    for peer in gpu.peers:
        gpu.send("put", peer, "i0", f"o{gpu.rank}")
        gpu.op("nop")
        gpu.at("signal", peer)
    gpu.at_all("wait")
    gpu.op("nop")


@execution_plan("allreduce", lambda world: (world, world, 0))
def read_allreduce(gpu: Gpu) -> None:
    """Each rank reads its chunk of all peers and adds it up, then puts the sum into all; shared by two thread blocks, which
    meet at barriers."""
    own = f"i{gpu.rank}"
    gpu.at_all("signal", "wait")
    for block in range(2):
        gpu.op("barrier", block, barrier_id=0, num_threadblocks=2)
        sources, targets = (
            [gpu.local(own), *(gpu.remote(peer, own) for peer in gpu.peers)] for _ in range(2)
        )
        gpu.op(
            "rres", block, src_buff=sources, dst_buff=targets, channel_type="memory",
            reduce_op="sum", tbg_info={"tb_id": block, "tbg_size": 2},
        )  # fmt: skip
        gpu.op("barrier", block, barrier_id=1, num_threadblocks=2)
    gpu.at_all("signal", "wait")


@execution_plan("allreduce", lambda world: (world, world, world))
def scratch_allreduce(gpu: Gpu) -> None:
    """Chunks to their rank's scratch; a second thread block adds them up behind a semaphore, and all get the sum."""
    gpu.semaphores.append({"init_value": 0})
    for peer in gpu.peers:
        gpu.send("pws", peer, f"i{peer}", f"s{gpu.rank}")
    gpu.at_all("wait")
    gpu.op("sem_release", semaphore_ids=[0])
    own = gpu.local(f"i{gpu.rank}")
    gpu.op("sem_acquire", 1, semaphore_ids=[0])
    terms = [gpu.local(f"s{peer}") for peer in gpu.peers]
    gpu.op("re", 1, src_buff=[own, *terms], dst_buff=[own], reduce_op="sum")
    for peer in gpu.peers:
        gpu.send("put", peer, f"i{gpu.rank}", f"o{gpu.rank}", block=1)
    gpu.op("flush", 1)
    gpu.at_all("signal", "wait", block=1)


@execution_plan("reducescatter", lambda world: (world, 1, 1), inplace=False)
def get_reduce_scatter(gpu: Gpu) -> None:
    """Each rank fetches its chunk of one peer after the other into scratch, and adds it to its output."""
    gpu.op("copy", src_buff=[gpu.local(f"i{gpu.rank}")], dst_buff=[gpu.local("o0")])
    for peer in gpu.peers:
        gpu.at("signal", peer)
        gpu.at("wait", peer)
        theirs = gpu.remote(peer, f"i{gpu.rank}")
        gpu.at("get", peer, src_buff=[theirs], dst_buff=[gpu.local("s0")])
        gpu.op("nop")
        gpu.op("re", src_buff=[gpu.local("o0"), gpu.local("s0")], dst_buff=[gpu.local("o0")])


@execution_plan("alltoall", lambda world: (world, world, 0), inplace=False)
def put_alltoall(gpu: Gpu) -> None:
    gpu.op("copy", src_buff=[gpu.local(f"i{gpu.rank}")], dst_buff=[gpu.local(f"o{gpu.rank}")])
    for peer in gpu.peers:
        gpu.send("put", peer, f"i{peer}", f"o{gpu.rank}")
        gpu.at("signal", peer)
    gpu.at_all("wait")


@execution_plan("allreduce", lambda world: (world, world, 2 * world), protocol="LL")
def packet_allreduce(gpu: Gpu) -> None:
    """Chunks to their rank's scratch as packets, where a second thread block adds them up, and sends the sum on; a third one
    unpacks what comes. Nothing but the packets says what waits for what."""
    world, own = 1 + len(gpu.peers), gpu.local(f"i{gpu.rank}")
    for peer in gpu.peers:
        gpu.send("ppkt", peer, f"i{peer}", f"s{gpu.rank}")
    sums = [gpu.remote(peer, f"s{world + gpu.rank}") for peer in gpu.peers]
    terms = [gpu.local(f"s{peer}") for peer in gpu.peers]
    copy = gpu.local(f"s{world + gpu.rank}")
    gpu.op("recpkt", 1, src_buff=[own, *terms], dst_buff=[own, copy], reduce_op="sum")
    gpu.op("rppkt", 1, src_buff=[copy], dst_buff=sums, channel_type="memory")
    for peer in gpu.peers:
        packets = gpu.local(f"s{world + peer}")
        gpu.op("upkt", 2, src_buff=[packets], dst_buff=[gpu.local(f"i{peer}")])


MSCCLPP: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "put": ("allgather_gemm", put_allgather),
    "read": ("gemm_allreduce", read_allreduce),
    "scratch": ("gemm_allreduce", scratch_allreduce),
    "packets": ("gemm_allreduce", packet_allreduce),
    "get": ("gemm_reducescatter", get_reduce_scatter),
    "messages": ("gemm_alltoall", put_alltoall),
}


FILES: dict[str, dict[str, tuple[str, Callable[[int], Any]]]] = {"msccl": MSCCL, "mscclpp": MSCCLPP}


def text_of(kind: str, name: str, world: int) -> str:
    """The file's text."""
    made = FILES[kind][name][1](world)
    return made if isinstance(made, str) else json.dumps(made, indent=1)
