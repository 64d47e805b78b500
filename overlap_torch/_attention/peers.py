"""The exchange by copy engines: heads go straight into their places in the ranks' memory, chunk by chunk, beside the kernels.

A chunk is a run of heads. Its operands lie in a rank's slot as the kernel reads them, [B, rows, heads, width], with the rows of
all ranks in order of positions, so that nothing is packed, sent and put in order. Chunk i's kernel runs while chunk i + 1 travels;
what it computes travels home beside the kernel of chunk i + 1::

    caller   own rows | wait 0 | kernel 0 | wait 1 | kernel 1 | wait | results into place
    copies   heads 0 to their ranks | heads 1 ...  | results 0 home | results 1 home
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

import torch

from overlap_torch._attention.exchange import sums_of_terms
from overlap_torch._attention.kernels import Form
from overlap_torch._attention.work import Chunk, Problem, Rows, part_of, share_of

_ALIGN = 256  # bytes between regions of a slot
_MOST_BYTES = 1 << 30  # of a slot
_MOST_RECTANGLES = 512  # of a direction: each is a copy that the host enqueues
_GRAIN = 16  # bytes of an access


class Kind(NamedTuple):
    """A tensor's part in an exchange: rows of queries or of keys, and a head's width."""

    queries: bool
    width: int


@dataclass(frozen=True, eq=False)
class Route:
    """An exchange as all ranks know it: how heads are cut into chunks, and what goes to the kernels and home from them.

    Two routes are equal only if they are the same object, so that a cache finds a route's tables without comparing its fields.
    """

    problem: Problem
    chunks: tuple[Chunk, ...]
    batch: int
    item: int  # bytes of a number
    sent: tuple[Kind, ...]
    returned: tuple[Kind, ...]

    def rows(self, kind: Kind, rank: int) -> int:
        """The rows of a rank's kernel."""
        share = share_of(self.problem, rank)
        return share.rows if kind.queries else share.total

    def order(self, kind: Kind, rank: int) -> tuple[Rows, ...]:
        share = share_of(self.problem, rank)
        return share.query_order if kind.queries else share.key_order

    def partners(self, kind: Kind, rank: int) -> range:
        """The ranks with which a rank exchanges such rows, itself among them."""
        return share_of(self.problem, rank).sharing if kind.queries else range(self.problem.ranks)

    def all_heads(self, kind: Kind) -> int:
        """The heads of the model."""
        return self.problem.heads if kind.queries else self.problem.kv_heads

    def heads(self, kind: Kind, rank: int) -> range:
        """The heads of a rank's part, counted over the model."""
        return part_of(self.all_heads(kind), self.problem.parts, rank % self.problem.parts)

    def row_bytes(self, kind: Kind, chunk: Chunk) -> int:
        run = chunk.of(kind.queries)
        return len(run) * kind.width * self.item

    def adds_up(self, kind: Kind) -> bool:
        """True if several ranks return terms of a head, which its rows' rank adds up."""
        return not kind.queries and self.problem.adds_terms


def route_of(problem: Problem, chunks: tuple[Chunk, ...], form: Form, backward: bool) -> Route:
    """The exchange of an attention, forward or backward; with head parts of 1 queries stay, and so do results.

    Keys and values go to the kernels again in backward, unless each rank has kept its part of them.
    """
    query, value = Kind(True, form.width), Kind(True, form.value_width)
    keys = (Kind(False, form.width), Kind(False, form.value_width))
    here, home = (query, *keys), (value,)
    if backward:
        here, home = (value, *(keys if problem.parts < problem.ranks else ())), (query, *keys)
    moves = (here, home)
    if problem.parts == 1:
        moves = tuple([tuple([kind for kind in kinds if not kind.queries]) for kinds in moves])
    return Route(problem, chunks, form.batch, form.dtype.itemsize, *moves)


class Place(NamedTuple):
    """Where rows lie one after the other in a slot: the first, and bytes from one to the next."""

    begin: int
    stride: int


class Places(NamedTuple):
    """Where regions begin in a rank's slot."""

    came: dict[tuple[int, int], int]  # by chunk and number of the tensor: [B, rows, heads, width]
    # By sender, chunk and number: a chunk's heads of [B, own tokens, heads, width].
    home: dict[tuple[int, int, int], Place]
    kept_bytes: int  # of what came first and backward reads again
    bytes: int


@functools.lru_cache(maxsize=512)
def places_of(route: Route, rank: int) -> Places:
    problem, chunks, at = route.problem, route.chunks, 0
    came: dict[tuple[int, int], int] = {}
    home: dict[tuple[int, int, int], Place] = {}

    def region(rows: int, row_bytes: int) -> int:
        nonlocal at
        begin = at
        at += (route.batch * rows * row_bytes + _ALIGN - 1) // _ALIGN * _ALIGN
        return begin

    for queries in (True, False):
        for c, chunk in enumerate(chunks):
            for i, kind in enumerate(route.sent):
                if kind.queries is not queries:
                    continue
                if kind.queries or chunk.brings_keys:
                    came[c, i] = region(route.rows(kind, rank), route.row_bytes(kind, chunk))
                else:
                    came[c, i] = came[c - 1, i]
        if queries or problem.parts == problem.ranks:
            kept_bytes = at
    own = problem.numbers[rank]
    for i, kind in enumerate(route.returned):
        for sender in route.partners(kind, rank):
            widths = [route.row_bytes(kind, chunk) for chunk in chunks]
            if route.adds_up(kind):  # the chunks' heads beside each other, its own ones too
                begin, whole = region(own, sum(widths)), sum(widths)
                for c, width in enumerate(widths):
                    home[sender, c, i] = Place(begin, whole)
                    begin += width
            elif sender != rank:
                for c, width in enumerate(widths):
                    home[sender, c, i] = Place(region(own, width), width)
    return Places(came, home, kept_bytes, at)


@functools.lru_cache(maxsize=128)
def slot_bytes(route: Route) -> int:
    """The bytes of every rank's slot."""
    return max(_ALIGN, *(places_of(route, rank).bytes for rank in range(route.problem.ranks)))


def _runs(order: Sequence[Rows], rank: int) -> list[tuple[int, int, int]]:
    """A rank's rows in an order: the first row's place there, the first row, and how many."""
    found, at = [], 0
    for rows in order:
        if rows.rank == rank:
            found.append((at, rows.begin, rows.end - rows.begin))
        at += rows.end - rows.begin
    return found


class Strides(NamedTuple):
    """Bytes from a sequence to the next and from a row to the next; heads lie one after the other."""

    batch: int
    row: int


@functools.lru_cache(maxsize=512)
def _lie(shape: torch.Size, strides: tuple[int, ...], item: int) -> Strides | None:
    """Where the rows of [B, T, H, D] lie, None if copies of 16 bytes cannot read them."""
    batch, row, head, number = strides
    heads_lie = number == 1 and (head == shape[3] or shape[2] == 1)
    if not heads_lie or batch * item % _GRAIN or row * item % _GRAIN:
        return None
    return Strides(batch * item, row * item)


def dense(tensor: torch.Tensor) -> tuple[torch.Tensor, Strides]:
    """The tensor [B, T, H, D] as copies of 16 bytes read it, copied where it does not lie so."""
    item = tensor.element_size()
    lie = _lie(tensor.shape, tensor.stride(), item)
    if lie is None or tensor.data_ptr() % _GRAIN:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
        batch, row, _, _ = tensor.stride()
        lie = Strides(batch * item, row * item)
    return tensor, lie


def _table(rows: Sequence[Sequence[int]], columns: int) -> torch.Tensor:
    """Rows of numbers as PeerCopies reads them."""
    return torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, columns)


_PUSHED, _COPIED = 10, 8  # columns


def _lane(world: int, distance: int, tensor: int) -> int:
    """The stream of a tensor's rows: each peer has one, and a single peer one for each tensor."""
    return tensor if world == 2 else distance - 1


@functools.lru_cache(maxsize=512)
def sending(
    route: Route, rank: int, strides: tuple[Strides, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that a rank sends to the kernels: its pushes, in order of chunks, and its own rows' copies into its slot."""
    pushes, own = [], []
    world = route.problem.ranks
    for c, chunk in enumerate(route.chunks):
        for i, kind in enumerate(route.sent):
            if not kind.queries and not chunk.brings_keys:
                continue
            width, run = route.row_bytes(kind, chunk), chunk.of(kind.queries)
            for distance in range(world):
                peer = (rank + distance) % world
                if peer not in route.partners(kind, rank):
                    continue
                head = route.heads(kind, peer).start + run.start
                place, rows = places_of(route, peer).came[c, i], route.rows(kind, peer)
                for batch in range(route.batch):
                    for at, begin, count in _runs(route.order(kind, peer), rank):
                        source = batch * strides[i].batch + begin * strides[i].row
                        source += head * kind.width * route.item
                        to, stride = place + (batch * rows + at) * width, strides[i].row
                        if peer == rank:
                            own.append([i + 1, source, stride, 0, to, width, width, count])
                        else:
                            lane = _lane(world, distance, i)
                            row = [i + 1, source, stride, peer, to, width, width, count, c, lane]
                            pushes.append(row)
    return _table(pushes, _PUSHED), _table(own, _COPIED)


@functools.lru_cache(maxsize=1024)
def returning(route: Route, rank: int, c: int, strides: tuple[Strides, ...]) -> torch.Tensor:
    """The pushes of a chunk's results to the ranks whose rows they are."""
    pushes = []
    world, chunk = route.problem.ranks, route.chunks[c]
    for i, kind in enumerate(route.returned):
        width, step = route.row_bytes(kind, chunk), len(route.chunks) + c
        for distance in range(1, world):
            peer = (rank + distance) % world
            if peer not in route.partners(kind, rank):
                continue
            place, tokens = places_of(route, peer).home[rank, c, i], route.problem.numbers[peer]
            lane = _lane(world, distance, i)
            for batch in range(route.batch):
                for at, begin, count in _runs(route.order(kind, rank), peer):
                    source = batch * strides[i].batch + at * strides[i].row
                    to = place.begin + (batch * tokens + begin) * place.stride
                    row = [i + 1, source, strides[i].row, peer, to, place.stride, width, count]
                    row += [step, lane]
                    pushes.append(row)
    return _table(pushes, _PUSHED)


@functools.lru_cache(maxsize=512)
def gathering(
    route: Route, rank: int, strides: tuple[tuple[Strides, ...], ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies into a rank's results: of its own rows from each chunk's results, and of the others' from its slot.

    The bases: the results, a tensor for each kind, and after them each chunk's. Own terms of what is added up go into the slot, too.
    """
    own, others, kinds = [], [], route.returned
    tokens, home = route.problem.numbers[rank], places_of(route, rank).home
    for i, kind in enumerate(kinds):
        whole, head = route.all_heads(kind) * kind.width * route.item, kind.width * route.item
        for sender in route.partners(kind, rank):
            for c, chunk in enumerate(route.chunks):
                width = route.row_bytes(kind, chunk)
                first = (route.heads(kind, sender).start + chunk.of(kind.queries).start) * head
                to = (i + 1, first, whole)
                if route.adds_up(kind):
                    to = (0, *home[sender, c, i])
                elif sender != rank:
                    rows = route.batch * tokens
                    others.append([0, *home[sender, c, i], *to, width, rows])
                if sender != rank:
                    continue
                base, lie = len(kinds) * (c + 1) + i + 1, strides[c][i]
                for batch in range(route.batch):
                    for at, begin, count in _runs(route.order(kind, rank), rank):
                        source = batch * lie.batch + at * lie.row
                        row = (batch * tokens + begin) * to[2] + to[1]
                        own.append([base, source, lie.row, to[0], row, to[2], width, count])
    return _table(own, _COPIED), _table(others, _COPIED)


@functools.lru_cache(maxsize=256)
def views_of(route: Route, rank: int) -> list[list[tuple[tuple[int, ...], tuple[int, ...], int]]]:
    """Each chunk's operands in a slot: sizes, strides and first number."""
    found = []
    for c, chunk in enumerate(route.chunks):
        own = []
        for i, kind in enumerate(route.sent):
            rows, heads = route.rows(kind, rank), len(chunk.of(kind.queries))
            sizes = (route.batch, rows, heads, kind.width)
            width = heads * kind.width
            strides = (rows * width, width, kind.width, 1)
            own.append((sizes, strides, places_of(route, rank).came[c, i] // route.item))
        found.append(own)
    return found


def operands_of(route: Route, rank: int, c: int, memory: torch.Tensor) -> list[torch.Tensor]:
    """A chunk's operands [B, rows, heads, D] in a slot."""
    return [memory.as_strided(*view) for view in views_of(route, rank)[c]]


def kept_of(route: Route, rank: int, c: int, memory: torch.Tensor) -> list[torch.Tensor]:
    """A chunk's operands that backward reads again, in a copy of what came first."""
    views = views_of(route, rank)[c]
    kept = views if route.problem.parts == route.problem.ranks else views[:1]
    return [memory.as_strided(*view) for view in kept]


@functools.lru_cache(maxsize=256)
def _shapes(route: Route, rank: int) -> list[tuple[int, int, int, int]]:
    """The results of a rank."""
    rows = (route.batch, route.problem.numbers[rank])
    return [(*rows, route.all_heads(kind), kind.width) for kind in route.returned]


def takes(route: Route) -> str:
    """The reason why copies do not carry this exchange, "" if they do; the same on all ranks."""
    problem = route.problem
    if any(kind.width * route.item % _GRAIN for kind in (*route.sent, *route.returned)):
        return f"heads that are no multiple of {_GRAIN} bytes"
    runs = max(len(_runs(share_of(problem, 0).key_order, rank)) for rank in range(problem.ranks))
    if runs * problem.ranks * route.batch * len(route.chunks) * 3 > _MOST_RECTANGLES:
        return f"a batch of {route.batch} sequences"
    if slot_bytes(route) > _MOST_BYTES:
        return f"{slot_bytes(route)} bytes of a rank's memory, more than {_MOST_BYTES}"
    return ""


@functools.lru_cache(maxsize=256)
def hash_of(text: str) -> int:
    """63 bits of a text, the same on all ranks."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


@functools.cache
def _copies() -> type:
    return torch.classes.overlap.PeerCopies


def _begin(like: torch.Tensor, group: str, bytes_: int, steps: int, text: str):
    """A call of copy engines, csrc/binding/cuda/peer_copies_cuda.cc."""
    return _copies()(like.device, group, bytes_, steps, hash_of(text))


class PeerExchange:
    """An exchange of one call, for one rank; used in a ``with``, after whose end peers write the slot again.

    Args:
        route: what moves.
        rank: this one.
        like: a tensor of the operands' dtype and device.
        group: the group's name.
        text: what is called, the same on all ranks.
    """

    def __init__(self, route: Route, rank: int, like: torch.Tensor, group: str, text: str):
        self.route, self.rank, self.like = route, rank, like
        self.copies = _begin(like, group, slot_bytes(route), len(route.chunks) * 2, text)
        self.slot = self.copies.slot(like.dtype)
        self.read: list[torch.Tensor] = []  # by copies until the call ends
        self.done: list[list[tuple[torch.Tensor, Strides]]] = []  # each chunk's results

    def __enter__(self) -> PeerExchange:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.copies.end()
        else:
            self.copies.abandon(f"an attention half-way: {kind.__name__}: {error}")

    def send(self, *tensors: torch.Tensor) -> None:
        """Begins to send this rank's rows, a tensor [B, T, H, D] for each kind that is sent."""
        laid = [dense(tensor) for tensor in tensors]
        self.read = [tensor for tensor, _ in laid]
        bases = [tensor.data_ptr() for tensor in self.read]
        pushes, own = sending(self.route, self.rank, tuple([strides for _, strides in laid]))
        self.copies.push(bases, pushes, 0, len(self.route.chunks))
        self.copies.copy(bases, own)

    def came(self, c: int) -> list[torch.Tensor]:
        """A chunk's operands [B, rows, heads, D] of all ranks, in order of positions; the stream waits for them."""
        self.copies.await_(c)
        return operands_of(self.route, self.rank, c, self.slot)

    def owned(self, kept: object) -> object:
        """A thing that a caller's kernel keeps, copied if it lies in the slot."""
        if not isinstance(kept, torch.Tensor) or kept.device != self.slot.device:
            return kept
        at = kept.data_ptr() - self.slot.data_ptr()
        return kept.clone() if 0 <= at < self.slot.nbytes else kept

    def send_home(self, c: int, *tensors: torch.Tensor) -> None:
        """Begins to send a chunk's results [B, rows, heads, D], a tensor for each kind that returns, to the ranks whose rows they are."""
        laid = [dense(tensor) for tensor in tensors]
        pushes = returning(self.route, self.rank, c, tuple([strides for _, strides in laid]))
        bases = [tensor.data_ptr() for tensor, _ in laid]
        self.copies.push(bases, pushes, len(self.route.chunks) + c, 1)
        self.done.append(laid)

    def results(self) -> list[torch.Tensor]:
        """This rank's results of all heads, [B, T, H, D] for each kind that returns, fresh."""
        route = self.route
        made = [self.like.new_empty(shape) for shape in _shapes(route, self.rank)]
        lie = tuple([tuple([strides for _, strides in laid]) for laid in self.done])
        own, others = gathering(route, self.rank, lie)
        bases = [tensor.data_ptr() for tensor in made]
        bases += [tensor.data_ptr() for laid in self.done for tensor, _ in laid]
        self.copies.copy(bases, own)
        self.copies.await_(2 * len(route.chunks) - 1)
        self.copies.copy(bases, others)
        for i, kind in enumerate(route.returned):
            if route.adds_up(kind):
                sums_of_terms(made[i], self._terms(i), route.problem.parts)
        return made

    def _terms(self, i: int) -> list[torch.Tensor]:
        """The ranks' terms of a returned tensor, [B, T, heads of their part, width] each."""
        route, kind = self.route, self.route.returned[i]
        rows, found = route.problem.numbers[self.rank], []
        for sender in route.partners(kind, self.rank):
            place = places_of(route, self.rank).home[sender, 0, i]
            row = place.stride // route.item
            sizes = (route.batch, rows, len(route.heads(kind, sender)), kind.width)
            strides = (rows * row, row, kind.width, 1)
            found.append(self.slot.as_strided(sizes, strides, place.begin // route.item))
        return found
