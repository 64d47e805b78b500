"""Where routes go, proved for classes of routings on two to eight ranks: each route is followed from its token to its row and home.

All ranks' routes are found in one process, by the operators that a rank runs; only the exchange is the test's. A finding that is
changed on the way has to be noticed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch

import overlap_torch  # noqa: F401, the operators

_ops = torch.ops.overlap
TOKENS = (65, 1, 0, 64, 129, 2, 63, 7)  # of a rank; kernels take 64 at a time
EXPERTS = (3, 0, 2, 5, 1, 1, 4, 2)  # of a rank
Change = Callable[[int, torch.Tensor], torch.Tensor]


def starts(numbers: list[int]) -> list[int]:
    return [sum(numbers[:i]) for i in range(len(numbers) + 1)]


def anywhere(rank, token, first, draw):
    return [draw.randrange(-2, first[-1] + 2) for _ in range(3)]


def next_rank(rank, token, first, draw):
    after = (rank + 1) % (len(first) - 1)
    own = first[after + 1] - first[after]
    return [first[after] + draw.randrange(own) if own else -1 for _ in range(3)]


# The ids of a token of a rank, where each rank's experts begin at `first`.
ROUTINGS = {
    "nobody": lambda rank, token, first, draw: [-1, first[-1], -7],
    "one_route": lambda rank, token, first, draw: [0 if (rank, token) == (0, 3) else -1, -1, -1],
    "anywhere": anywhere,
    "one_expert": lambda rank, token, first, draw: [first[-1] - 1, -1, -1],
    "one_rank": lambda rank, token, first, draw: [draw.randrange(first[1]) for _ in range(3)],
    "next_rank": next_rank,
    "nobody_to_the_last": lambda rank, token, first, draw: [draw.randrange(first[-2]) for _ in range(3)],
    "the_same_twice": lambda rank, token, first, draw: [(expert := draw.randrange(first[-1])), -1, expert],
    "few_ranks_send": lambda rank, *rest: anywhere(rank, *rest) if rank % 3 == 1 else [-1] * 3,
}  # fmt: skip


def faults(ids: list[list[list[int]]], experts: list[int], align: int, device: str, change: Change) -> Iterator[str]:  # fmt: skip
    """Faults of the rows of all ranks, in words. ``change(number, finding)`` is called with each finding, in a fixed order."""
    ranks, first, numbers = len(ids), starts(experts), iter(range(10**6))

    def found(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return [change(next(numbers), tensor.cpu()) for tensor in tensors]

    messages, routes, slots, sent = [], [], [], []
    for own in ids:
        given = torch.tensor(own, device=device).reshape(-1, 3)
        message, *lists = found(*_ops._moe_count(given, experts))
        messages.append(message)
        went, visits = int(message[:, :-1].sum()), int(message[:, -1].sum())
        for kept, each, count in zip((routes, slots, sent), lists, (went, went, visits), strict=True):  # fmt: skip
            kept.append(each[:count].tolist())
    homes: dict[tuple[int, int], int] = {}
    for rank in range(ranks):
        met = torch.stack([message[rank] for message in messages])
        known, offs, counts = found(
            *_ops._moe_meet(messages[rank].to(device), met.to(device), experts[rank], align)
        )
        # The lists of a source are by rank: the part for this one.
        parts = [starts(message[:, :-1].sum(1).tolist())[rank:][:2] for message in messages]
        came = [slot for each, (begin, end) in zip(slots, parts, strict=True) for slot in each[begin:end]]  # fmt: skip
        given = torch.tensor(came, dtype=torch.int32, device=device)
        place, source = found(
            *_ops._moe_arrive(met.to(device), offs.to(device), given, int(known[-1]), 3)
        )
        tokens = []
        for sender, each in enumerate(sent):
            begin, end = starts(messages[sender][:, -1].tolist())[rank:][:2]
            tokens += [(sender, number // ranks) for number in each[begin:end]]
            if any(number % ranks != rank for number in each[begin:end]):
                yield f"rank {rank}: rank {sender} sends {each[begin:end]}"
        order, begin = [], 0
        for expert, end in enumerate(offs.tolist()):
            rows = source[begin:end].tolist()
            real = [row for row in rows if row >= 0]
            if rows[len(real) :] != [-1] * (len(rows) - len(real)) or len(rows) % align:
                yield f"rank {rank}, expert {expert}: padding {rows[len(real) :]}"
            if len(real) != int(counts[expert]):
                yield f"rank {rank}, expert {expert}: {len(real)} rows, counted {counts[expert]}"
            for at, row in enumerate(real):
                sender, token = tokens[row // 3]
                order.append((expert, sender, token, row % 3))
                if ids[sender][token][row % 3] != first[rank] + expert:
                    yield f"rank {rank}, expert {expert}: got the route {order[-1]}"
                homes[begin + at, rank] = sender * 10**6 + token * 3 + row % 3
            begin = end
        if order != sorted(order) or len(set(order)) != len(order):
            yield f"rank {rank}: rows are not in order"
        if known[-1] != begin or known[:-1].tolist() != _splits(messages, rank, experts[rank]):
            yield f"rank {rank}: numbers {known.tolist()}"
        # Results go home by `place`, in the order of the senders' routes.
        home = [(sender, route) for sender, (a, b) in enumerate(parts) for route in routes[sender][a:b]]  # fmt: skip
        for (sender, route), row in zip(home, place.tolist(), strict=True):
            if homes.pop((row, rank), None) != sender * 10**6 + route:
                yield f"rank {rank}: row {row} is not the route {route} of rank {sender}"
    total = sum(0 <= expert < first[-1] for own in ids for token in own for expert in token)
    if homes or total != sum(map(len, routes)):
        yield f"{total} routes, of which {sum(map(len, routes))} went and {len(homes)} came home by none"


def _splits(messages: list[torch.Tensor], rank: int, own: int) -> list[int]:
    mine, met = messages[rank], torch.stack([message[rank] for message in messages])
    return [
        *mine[:, :-1].sum(1).tolist(),
        *met[:, :own].sum(1).tolist(),
        *mine[:, -1].tolist(),
        *met[:, -1].tolist(),
    ]


def drawn(routing, ranks: int) -> tuple[list[list[list[int]]], list[int]]:
    draw, experts = random.Random(ranks), list(EXPERTS[:ranks])
    first = starts(experts)
    ids = [
        [routing(rank, token, first, draw) for token in range(TOKENS[rank])]
        for rank in range(ranks)
    ]
    return ids, experts


devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@devices
@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_every_route_arrives_once_and_comes_home(routing, device) -> None:
    for ranks in range(2, 9):
        for align in (1, 8):
            wrong = list(faults(*drawn(routing, ranks), align, device, lambda _, each: each))
            assert not wrong, (ranks, align, wrong[:5])


def changed(finding: torch.Tensor) -> torch.Tensor | None:
    """The finding with two entries that differ swapped, or with one more; None if it is empty."""
    flat = finding.clone().flatten()
    if flat.numel() == 0:
        return None
    other = next((i for i in range(flat.numel()) if flat[i] != flat[0]), None)
    if other is None:
        flat[0] += 1
    else:
        flat[[0, other]] = flat[[other, 0]]
    return flat.view(finding.shape)


def test_each_finding_matters() -> None:
    """A change of any one finding of any rank is a fault, or an error."""
    ids, experts = drawn(anywhere, 4)
    seen: list[int] = []
    assert not list(faults(ids, experts, 8, "cpu", lambda number, each: (seen.append(number), each)[1]))  # fmt: skip
    unnoticed = []
    for target in seen:
        took = []

        def change(number, each, target=target, took=took):
            other = changed(each) if number == target else None
            took.append(other is not None)
            return each if other is None else other

        try:
            wrong = list(faults(ids, experts, 8, "cpu", change))
        except (IndexError, RuntimeError, ValueError):
            wrong = ["error"]
        if any(took) and not wrong:
            unnoticed.append(target)
    assert len(seen) == 4 * 4 + 4 * 5 and not unnoticed
