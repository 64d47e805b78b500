"""A mixture's rows over peers, against its composition over NCCL: races, CUDA graphs, too many rows, a rank that does not come."""

import functools
import random
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

import overlap_torch
import rank_pool
from captures import capture, refill, replayed
from checks import Failures
from operands import poison, rank_device
from overlap_torch._moe.scaled import block_quantized, row_quantized
from peer_races import come_late, so_many_calls, wrong_elements
from tests.peers.test_faults import GROUP_TIMEOUT_S, MARGIN_S, until_error

EXPERTS, CHOICES, DISTINCT = 3, 4, 4  # experts of a rank; operands by turns


@dataclass(frozen=True)
class Form:
    """Sizes and options that all ranks share; the last rank may have no tokens."""

    width: int = 264
    most: int = 300
    max_rows: int | None = None
    sum_order: str = "choices"
    dtype: torch.dtype = torch.bfloat16
    ids: str = "any"
    experts: str = (
        "double"  # or two products each, with gradients or without, or of fp8 weights by a recipe
    )

    def draw(self, seed: int) -> list[torch.Tensor]:
        """x, ids, shares, the gradient of the output, and a factor of rows."""
        rank, world, device = dist.get_rank(), dist.get_world_size(), rank_device()
        made = torch.Generator().manual_seed(100 * seed + rank)
        tokens = 0 if rank == world - 1 and seed == 1 else self.most - 7 * rank
        low, high = (0, EXPERTS) if self.ids == "first rank" else (-1, EXPERTS * world)
        drawn = [
            torch.randn(tokens, self.width, generator=made).to(self.dtype),
            torch.randint(low, high, (tokens, CHOICES), generator=made),
            torch.rand(tokens, CHOICES, generator=made),
            torch.randn(tokens, self.width, generator=made).to(self.dtype),
        ]
        return [tensor.to(device) for tensor in drawn]

    def limits(self) -> dict[str, int]:
        if self.max_rows is None:
            return {}
        return {"max_tokens": self.most, "max_rows": self.max_rows}

    def call(self, transport: str, x, ids, shares, grad) -> list[torch.Tensor]:
        """The output, and the gradients of tokens and shares."""
        limits = self.limits() if transport == "peer" else {}
        if self.experts in ("products without gradients", "rowwise", "blockwise"):
            with torch.no_grad():
                return [self.products(x, ids, shares, transport, limits)]
        x, shares = (tensor.detach().requires_grad_() for tensor in (x, shares))
        if self.experts == "products":
            output = self.products(x, ids, shares, transport, limits)
            return [output.detach(), *torch.autograd.grad(output, (x, shares), grad)]
        rows, route = overlap_torch.moe_dispatch(
            x,
            ids,
            num_experts=EXPERTS * dist.get_world_size(),
            align=4,
            sum_order=self.sum_order,
            transport=transport,
            **limits,
        )
        output = overlap_torch.moe_combine(rows * 2, route, shares)
        return [output.detach(), *torch.autograd.grad(output, (x, shares), grad)]

    @functools.lru_cache  # noqa: B019, a form is one of few; nothing is drawn in a capture
    def weights(self, device: torch.device) -> list[torch.Tensor]:
        made = torch.Generator(device).manual_seed(dist.get_rank())
        fp8 = self.experts in ("rowwise", "blockwise")
        inner = 128 if fp8 else 72
        shapes = ((2 * inner, self.width), (self.width, inner))
        drawn = [torch.randn(EXPERTS, *of, generator=made, device=device) for of in shapes]
        if fp8:
            cast = block_quantized if self.experts == "blockwise" else row_quantized
            return [part for tensor in drawn for part in cast(tensor)]
        return [tensor.to(self.dtype) for tensor in drawn]

    def products(self, x, ids, shares, transport: str, limits: dict[str, int]) -> torch.Tensor:
        how = {"sum_order": self.sum_order, "transport": transport, **limits}
        weights = self.weights(x.device)
        if len(weights) > 2:
            how |= {"scale_gate_up": weights[1], "scale_down": weights[3]}
            weights = weights[::2]
        return overlap_torch.moe(x, ids, shares, *weights, **how)


ROOM = 2 * 4 * 300 * CHOICES  # rows for any routing
FORMS = [
    Form(),
    Form(max_rows=ROOM),
    Form(sum_order="ranks"),
    Form(sum_order="ranks", max_rows=ROOM, width=8, most=1100),
    Form(ids="first rank", dtype=torch.float32),
    Form(ids="first rank", max_rows=ROOM, dtype=torch.float64, width=7),
    Form(most=9000, width=1024),
    Form(width=264, experts="products"),
    Form(width=264, experts="products without gradients", max_rows=ROOM),
    Form(width=1032, experts="products without gradients", dtype=torch.float16),
    Form(most=900, width=136, experts="products", max_rows=ROOM, dtype=torch.float16),
    Form(ids="first rank", width=64, experts="products", sum_order="ranks"),
    Form(width=272, experts="rowwise"),
    Form(width=144, experts="blockwise", max_rows=ROOM),
    Form(ids="first rank", width=528, experts="blockwise", sum_order="ranks"),
]


@pytest.mark.ranks((2, "nccl"), (4, "nccl"))
@pytest.mark.peers
@so_many_calls(120)
def test_peer_rows_race(failures: Failures, calls: int) -> None:
    """No call waits for the one before where the host need not; ranks are late at random, and memory is full of junk."""
    operands = [[form.draw(seed) for seed in range(DISTINCT)] for form in FORMS]
    rights = [
        [form.call("nccl", *drawn) for drawn in own]
        for form, own in zip(FORMS, operands, strict=True)
    ]
    order, chance = random.Random(0), random.Random(1 + dist.get_rank())
    wrong = torch.zeros(calls, dtype=torch.int64, device=rank_device())
    torch.cuda.synchronize()
    for turn in range(calls):
        kind, seed = order.randrange(len(FORMS)), order.randrange(DISTINCT)
        poison(rank_device(), 4096, 1 << 16, 1 << 20)
        found = FORMS[kind].call("peer", *operands[kind][seed])
        wrong[turn] = wrong_elements(found, rights[kind][seed])
        del found
        come_late(chance)
    torch.cuda.synchronize()
    overlap_torch.check()
    order = random.Random(0)
    for turn, count in enumerate(wrong.tolist()):
        kind, seed = order.randrange(len(FORMS)), order.randrange(DISTINCT)
        problem = f"{count} elements wrong" if count else None
        failures.expect(problem, turn, FORMS[kind], seed)


@pytest.mark.ranks((2, "nccl"), (4, "nccl"))
@pytest.mark.peers
def test_peer_rows_in_graphs(failures: Failures) -> None:
    """Graphs of several sizes are replayed by turns, with plain calls between, by ranks that come late."""
    graph = Form(max_rows=ROOM, width=64, experts="products without gradients")
    fp8 = Form(most=200, max_rows=ROOM, width=144, experts="blockwise")
    forms = [graph, Form(most=33, max_rows=600, sum_order="ranks"), fp8, Form(width=64)]
    plain = len(forms) - 1
    operands = [[form.draw(seed) for seed in (0, 2, 3)] for form in forms]
    rights = [
        [form.call("nccl", *drawn) for drawn in own]
        for form, own in zip(forms, operands, strict=True)
    ]
    graphs, given, outputs = [], [], []
    for form, own in zip(forms[:plain], operands, strict=False):
        given.append([tensor.clone() for tensor in own[0]])
        captured, results = capture(functools.partial(form.call, "peer", *given[-1]))
        graphs.append(captured)
        outputs.append(results)
    order, chance = random.Random(0), random.Random(1 + dist.get_rank())
    for turn in range(60):
        kind, seed = order.randrange(len(forms)), order.randrange(3)
        if kind < plain:
            refill(given[kind], operands[kind][seed])
            found = replayed(graphs[kind], outputs[kind])
        else:
            found = forms[plain].call("peer", *operands[plain][seed])
        count = wrong_elements(found, rights[kind][seed])
        come_late(chance)
        failures.expect(f"{count} wrong" if count.item() else None, turn, kind, seed)
    overlap_torch.check()


def all_to_the_last_rank(rows: int) -> dict:
    """Every rank's routes, `rows` of them, go to the last rank's first expert."""
    world, rank = dist.get_world_size(), dist.get_rank()
    own = rows // world + (rank < rows % world)
    ids = torch.full((own, 1), (world - 1) * EXPERTS, device=rank_device())
    return {"topk_ids": ids, "x": torch.ones(own, 8, device=rank_device(), dtype=torch.bfloat16)}


def dispatch(rows: int, limit: int | None = 100) -> torch.Tensor:
    limits = {} if limit is None else {"max_tokens": 200, "max_rows": limit}
    experts = EXPERTS * dist.get_world_size()
    given = all_to_the_last_rank(rows)
    return overlap_torch.moe_dispatch(**given, num_experts=experts, transport="peer", **limits)[0]


def too_many_rows() -> tuple[float, str, bool]:
    fits = dispatch(100)
    torch.cuda.synchronize()
    overlap_torch.check()
    last = dist.get_rank() == dist.get_world_size() - 1
    right = fits.shape == (100, 8) and (not last or bool((fits == 1).all()))
    dispatch(101)
    torch.cuda.synchronize()
    return *until_error(overlap_torch.check, GROUP_TIMEOUT_S + MARGIN_S), right


@pytest.mark.gpu
@pytest.mark.gpu2
def test_peer_rows_too_many_are_an_error_on_all_ranks():
    outcomes = rank_pool.run_fresh(2, "nccl", too_many_rows, group_timeout_s=GROUP_TIMEOUT_S)
    for rank, outcome in enumerate(outcomes):
        _, message, right = outcome.result()
        assert right and "101 rows, more than max_rows=100" in message, (rank, message)
        assert "rank 1" in message, (rank, message)


def leave_results_in_slots() -> None:
    """Where the next calls look for counts and routes."""
    experts = EXPERTS * dist.get_world_size()
    given = all_to_the_last_rank(10)
    rows, route = overlap_torch.moe_dispatch(**given, num_experts=experts, transport="peer")
    for _ in range(2):
        overlap_torch.moe_combine(torch.ones_like(rows), route)


def never_come(limit: int | None) -> tuple[float, str] | None:
    dispatch(10, limit)
    leave_results_in_slots()
    torch.cuda.synchronize()
    if dist.get_rank() == 1:
        time.sleep(GROUP_TIMEOUT_S + MARGIN_S)
        return None

    def step() -> None:
        dispatch(10, limit)
        torch.cuda.synchronize()
        overlap_torch.check()

    return until_error(step, GROUP_TIMEOUT_S + MARGIN_S)


@pytest.mark.gpu
@pytest.mark.gpu2
@pytest.mark.parametrize("limit", [None, 100])
def test_peer_rows_name_a_rank_that_never_comes(limit):
    outcomes = rank_pool.run_fresh(2, "nccl", never_come, limit, group_timeout_s=GROUP_TIMEOUT_S)
    seconds, message = outcomes[0].result()
    assert "from rank 1 passed its deadline" in message, (seconds, message)
