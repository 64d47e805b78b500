"""Attention of a cut sequence: bit for bit what the whole sequence has, for any cut, mask and head parts; and its gradients."""

import contextlib
import itertools
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import overlap_torch
from checks import Failures
from operands import difference, integers, poison, rank_device
from overlap_torch import Documents
from overlap_torch._attention import functions, ops, work
from overlap_torch._ops import collectives
from peer_copies import over_peers

FAR = 2.0**13  # exp(-FAR) is 0 in float64
DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float64)


@dataclass(frozen=True)
class Case:
    """`tokens` is a cut, or the first entries of each rank's numbers; `documents` are parts of 12 of the sequence."""

    heads: tuple[int, int] = (4, 4)
    tokens: str | tuple[int, ...] = "contiguous"
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    documents: tuple[int, ...] = ()
    batch: int = 1

    def numbers(self, world: int) -> list[int]:
        if isinstance(self.tokens, str):
            return [6] * world
        return list(self.tokens[:world])

    def lengths(self, world: int) -> list[int] | None:
        """The documents' lengths: those given, and one that fills the sequence."""
        total, found = sum(self.numbers(world)), []
        for length in self.documents:
            found.append(min(length, total - sum(found)))
        return [*found, total - sum(found)] if found else None

    def hidden(self, world: int) -> torch.Tensor:
        """[S, S]: the keys that each query does not see."""
        total = sum(self.numbers(world))
        query, key = torch.arange(total)[:, None], torch.arange(total)
        hidden = torch.zeros(total, total, dtype=torch.bool)
        left, right = self.window or (None, None)
        if self.causal:
            hidden |= key > query
        if left is not None:
            hidden |= query - key > left
        if right is not None:
            hidden |= key - query > right
        if self.documents:
            lengths = torch.tensor(self.lengths(world))
            number = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
            hidden |= number[:, None] != number
        return hidden.to(rank_device())

    def mine(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's tokens [B, T, ...]; the cut is written again here."""
        rank, world = dist.get_rank(), dist.get_world_size()
        if self.tokens == "zigzag":
            chunks = whole.chunk(2 * world, 1)
            return torch.cat([chunks[rank], chunks[2 * world - 1 - rank]], 1)
        return whole.split(self.numbers(world), 1)[rank]

    def keywords(self, parts: int | None) -> dict:
        world = dist.get_world_size()
        lengths = self.lengths(world)
        return {
            "causal": self.causal,
            "window": self.window,
            "tokens": self.tokens if isinstance(self.tokens, str) else self.numbers(world),
            "documents": None if lengths is None else Documents(lengths),
            "head_parts": parts,
        }


MASKS = [
    {},
    {"causal": True},
    {"causal": True, "window": (3, 0), "batch": 3},
    {"window": (2, 4)},
    {"window": (None, 1), "batch": 3},
    {"causal": True, "documents": (6, 1, 3)},  # the first ends where rank 0 does
    {"documents": (2, 5)},
    {"window": (2, 1), "documents": (3, 7)},
    {"causal": True, "window": (1, None), "documents": (5, 9)},
]
CUTS = ["contiguous", "zigzag", (3, 8, 1, 6), (0, 9, 0, 4), (7, 0, 5, 0)]
HEADS = [(4, 4), (8, 1), (14, 2), (8, 2), (12, 6)]
CASES = [
    Case(heads=HEADS[(i + j) % len(HEADS)], tokens=cut, **mask)
    for (i, cut), (j, mask) in itertools.product(enumerate(CUTS), enumerate(MASKS))
]


def allowed(heads: tuple[int, int], world: int) -> list[int]:
    """Head parts that give each rank whole key/value heads, or a part of one's queries."""
    return [
        parts
        for parts in range(1, world + 1)
        if world % parts == heads[0] % parts == 0
        and (heads[1] % parts == 0 or parts % heads[1] == 0)
    ]


def meaning(q, k, v, hidden: torch.Tensor, scale: float) -> torch.Tensor:
    """The whole sequence's attention, head by head."""
    outputs = []
    for head in range(q.shape[2]):
        own = head * k.shape[2] // q.shape[2]
        scores = q[:, :, head] @ k[:, :, own].transpose(1, 2) * scale
        shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outputs.append(shares @ v[:, :, own])
    return torch.stack(outputs, 2)


def exact_operands(case: Case, hidden: torch.Tensor, seed: object) -> list[torch.Tensor]:
    """q, k, v and the output's gradient. A key is one-hot. A query picks one key that it sees, the first, the last or any, and
    would rather have any that is hidden.
    """
    total, device, (heads, kv_heads) = hidden.shape[0], rank_device(), case.heads
    size = max(8, -(-total // 8) * 8)
    shape = (case.batch, total)
    drawn = integers((*shape, heads), device, seed, "pick", low=0, high=10**6)
    drawn[..., 0], drawn[..., 1 % heads] = 0, -1
    seen = (~hidden).sum(1)
    order = hidden.to(torch.int8).argsort(dim=1, stable=True)  # visible keys first
    picked = torch.gather(order.expand(case.batch, -1, -1), 2, drawn % seen[None, :, None])
    q = hidden.double().mul(2 * FAR)[None, :, None].expand(case.batch, -1, heads, -1).clone()
    q.scatter_(3, picked[..., None], FAR)
    q = torch.nn.functional.pad(q, (0, size - total))
    k = (
        torch.eye(total, size, device=device)
        .double()[None, :, None]
        .expand(case.batch, -1, kv_heads, -1)
    )
    v = integers((*shape, kv_heads, size), device, seed, "v", low=-90, high=90).double()
    grad = integers((*shape, heads, size), device, seed, "grad", low=-1, high=1).double()
    return [q, k.contiguous(), v, grad]


def random_operands(case: Case, hidden: torch.Tensor, seed: int) -> list[torch.Tensor]:
    total, (heads, kv_heads) = hidden.shape[0], case.heads
    generator = torch.Generator(rank_device()).manual_seed(seed)
    return [
        torch.randn(case.batch, total, n, d, generator=generator, device=rank_device()).double()
        for n, d in ((heads, 8), (kv_heads, 8), (kv_heads, 5), (heads, 5))
    ]


def run(
    case: Case,
    operands: list[torch.Tensor],
    dtype: torch.dtype,
    parts: int | None,
    scale: float,
    **by,
):
    """This rank's output and gradients."""
    own = [case.mine(one).to(dtype) for one in operands]
    if parts == 1:  # the same values with heads before tokens in memory
        own[:3] = [one.transpose(1, 2).contiguous().transpose(1, 2) for one in own[:3]]
    leaves = [one.detach().clone().requires_grad_() for one in own[:3]]
    poison(rank_device(), 64, 512, 4096)
    keywords = case.keywords(parts) | by
    output = overlap_torch.context_parallel_attention(*leaves, scale=scale, **keywords)
    output.backward(own[3])
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def right_of(case: Case, operands, hidden, scale: float) -> list[torch.Tensor]:
    whole = [one.clone().requires_grad_() for one in operands[:3]]
    output = meaning(*whole, hidden, scale)
    output.backward(operands[3])
    return [case.mine(one) for one in (output.detach(), *(leaf.grad for leaf in whole))]


def check_exact(failures: Failures, cases: list[Case], transport: str | None = None) -> None:
    """Results and gradients bit for bit; dtypes take turns, and with a transport so do numbers of chunks."""
    world = dist.get_world_size()
    numbers = itertools.count(1)
    dtypes = itertools.cycle(DTYPES)
    for case in cases:
        hidden = case.hidden(world)
        if hidden.numel() == 0:
            continue
        operands = exact_operands(case, hidden, repr(case))
        right = right_of(case, operands, hidden, 1.0)
        for parts in [*allowed(case.heads, world), None]:
            dtype, by = next(dtypes), {}
            # With gradients a chunk has whole key/value heads. The chosen parts may have one.
            most = 1 if parts is None else max(1, case.heads[1] // parts)
            if transport == "nccl" and most == 1:
                continue
            if transport is not None:
                by = {"chunks": 1 + next(numbers) % most, "transport": transport}
            found = run(case, operands, dtype, parts, 1.0, **by)
            for name, mine, value in zip(("o", "dq", "dk", "dv"), found, right, strict=True):
                assert value.numel() == 0 or value.abs().max() <= 256
                failures.expect(difference(mine, value.to(dtype)), name, parts, dtype, case)
            fresh = None if found[0].is_contiguous() else f"strides {found[0].stride()}"
            failures.expect(fresh, "o", parts, case)


@pytest.mark.ranks((1, "gloo"), (2, "gloo"), (3, "gloo"), (4, "gloo"), (2, "nccl"), (4, "nccl"))
def test_attention_is_the_whole_sequences_bit_for_bit(failures: Failures) -> None:
    check_exact(failures, CASES)


@pytest.mark.ranks((2, "gloo"), (3, "gloo"), (4, "gloo"), (2, "nccl"), (4, "nccl"))
def test_attention_over_peers_is_the_whole_sequences_bit_for_bit(failures: Failures) -> None:
    """No collective moves heads, forward or backward."""
    with contextlib.ExitStack() as stack:
        if rank_device().type == "cpu":
            stack.enter_context(over_peers())
        for name in ("start_all_to_all", "start_all_gather"):
            stack.enter_context(mock.patch.object(collectives, name, side_effect=AssertionError))
        check_exact(failures, CASES, "peer")


@pytest.mark.ranks((2, "gloo"), (4, "gloo"), (2, "nccl"), (4, "nccl"))
def test_attention_in_chunks_is_the_whole_sequences_bit_for_bit(failures: Failures) -> None:
    """Chunks of heads over the group's collectives."""
    check_exact(failures, CASES, "nccl")


@pytest.mark.ranks((2, "gloo"), (4, "gloo"), (2, "nccl"))
def test_attention_has_the_whole_sequences_gradients(failures: Failures) -> None:
    """Results and all gradients in float64, where shares are spread over many keys."""
    cases = CASES[::2]
    world = dist.get_world_size()
    for case in cases:
        hidden = case.hidden(world)
        if hidden.numel() == 0:
            continue
        operands = random_operands(case, hidden, len(repr(case)))
        right = right_of(case, operands, hidden, 0.3)
        for parts in allowed(case.heads, world):
            for name, mine, value in zip(
                ("o", "dq", "dk", "dv"),
                run(case, operands, torch.float64, parts, 0.3),
                right,
                strict=True,
            ):
                failures.near(mine, value, name, parts, case, rtol=0.0, atol=1e-13)


def shifted(what: str):
    """A change of each piece of work by one token."""
    real = work._pieces

    def change(piece: work.Piece) -> work.Piece:
        (begin, end), left, right = piece.keys, piece.left, piece.right
        if what == "left wider" and left is not None:
            left += 1
        if what == "left narrower" and left:
            left -= 1
        if what == "right wider" and right is not None:
            right += 1
        if what == "first key missing" and end - begin > 1:
            begin += 1
        if what == "last key missing" and end - begin > 1:
            end -= 1
        if what == "key of the document before" and begin > 0:
            begin -= 1
        return piece._replace(keys=(begin, end), left=left, right=right)

    return mock.patch.object(work, "_pieces", lambda *given: tuple(map(change, real(*given))))


SHIFTS = {
    "left wider": lambda case: bool(case.window and case.window[0]) and not case.documents,
    "left narrower": lambda case: case.window is not None and case.window[0] is not None,
    "right wider": lambda case: case.causal,
    "first key missing": lambda case: case.window is None,
    "last key missing": lambda case: case.causal and case.window is None,
    "key of the document before": lambda case: bool(case.documents) and not case.causal,
}


def forget() -> None:
    work.share_of.cache_clear()
    ops.known.cache_clear()
    functions._known_attention.cache_clear()


@pytest.mark.ranks((1, "gloo"))
def test_attention_tests_notice_a_mask_that_is_wrong_by_one_token(failures: Failures) -> None:
    for what, concerns in SHIFTS.items():
        for case in filter(concerns, CASES[:18]):
            forget()
            found = Failures()
            with shifted(what):
                check_exact(found, [case])
            failures.expect(None if found.lines else "nobody noticed", what, case)
    forget()
