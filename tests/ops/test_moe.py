"""A mixture of experts over ranks: what it means, exactly, for any routing, and what its two halves send."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

import overlap_torch
from checks import Failures
from operands import difference, integers, poison, rank_device
from overlap_torch import Gate
from peer_rows import over_peers

WIDTH, INNER = 8, 16
LIMIT = 100.0  # halves up to here are exact in bfloat16


@dataclass(frozen=True)
class Case:
    """Experts and tokens of each rank are the lists' first entries; `ids` names how tokens choose."""

    experts: tuple[int, ...] | int = 2
    tokens: tuple[int, ...] = (5, 0, 7, 3)
    choices: int = 2
    ids: str = "random"
    ids_dtype: torch.dtype = torch.int64
    shares_on: str = "output"
    save: str = "rows"
    form: str = "one"  # of gate_up: one, pair, list, interleaved, strided, no gate
    bias: bool = False
    leading: bool = False  # x is [1, T, H]
    sum_order: str = "choices"
    limited: bool = False  # max_tokens and max_rows, exactly as many rows as the fullest rank has

    def experts_of(self, world: int) -> list[int]:
        if isinstance(self.experts, int):
            return [self.experts] * world
        own = list(self.experts[:world])
        return own if sum(own) > 0 else [1, *own[1:]]


ROUTINGS = [
    Case(),
    Case(experts=1, choices=1),
    Case(experts=(3, 0, 1, 2), choices=3, ids_dtype=torch.int32),
    Case(experts=(0, 2, 5, 1), ids="dropped"),
    Case(experts=9, choices=4, tokens=(17, 16, 1, 2)),
    Case(ids="first expert"),
    Case(ids="last rank", tokens=(3, 4, 0, 2)),
    Case(ids="not the last rank"),
    Case(ids="next rank", tokens=(6, 6, 6, 6)),
    Case(ids="nowhere"),
    Case(tokens=(0, 0, 0, 0)),
    Case(experts=1, choices=4, ids="every expert"),
]
OPTIONS = [
    Case(form="pair", bias=True, shares_on="hidden", leading=True),
    Case(form="list", bias=True, shares_on="input"),
    Case(form="interleaved", bias=True, ids="dropped"),
    Case(form="strided", experts=(1, 3, 0, 2), save="gate_up"),
    Case(
        form="no gate",
        bias=True,
        shares_on="hidden",
        ids="dropped",
        sum_order="ranks",
        save="nothing",
    ),
    Case(experts=(3, 0, 4, 2), choices=4, ids="dropped", sum_order="ranks"),
    Case(experts=1, choices=4, ids="every expert", sum_order="ranks"),
    Case(limited=True, bias=True, shares_on="input"),
    Case(experts=(3, 0, 4, 2), choices=4, ids="dropped", limited=True, sum_order="ranks"),
    Case(ids="last rank", tokens=(3, 4, 0, 2), limited=True, shares_on="hidden", save="gate_up"),
    Case(form="pair", bias=True, limited=True, save="nothing"),
]


def ids_of(case: Case, rank: int, world: int) -> torch.Tensor:
    experts, shape = case.experts_of(world), (case.tokens[rank], case.choices)
    total, device = sum(experts), rank_device()
    drawn = integers(shape, device, "ids", rank, low=0, high=10**6)
    first = [sum(experts[:r]) for r in range(world)]
    if case.ids == "first expert":
        found = drawn * 0
    elif case.ids == "last rank":
        found = first[-1] + drawn % max(1, experts[-1])
    elif case.ids == "not the last rank":
        found = drawn % max(1, first[-1])
    elif case.ids == "next rank":
        found = first[(rank + 1) % world] + drawn % experts[(rank + 1) % world]
    elif case.ids == "nowhere":
        found = torch.where(drawn % 2 == 0, -1, total + drawn)
    elif case.ids == "every expert":
        found = (drawn * 0 + torch.arange(case.choices, device=device)) % total
    else:
        found = drawn % total
        if case.ids == "dropped":
            found = torch.where(drawn % 3 == 0, -1 - drawn % 5, found)
    return found.to(case.ids_dtype)


def sparse(*shape: int, key: object) -> torch.Tensor:
    """Rows with one entry of 1 or -1, so that nothing is rounded in bfloat16."""
    column = integers(shape[:-1], rank_device(), key, "column", low=0, high=shape[-1] - 1)
    sign = integers(shape[:-1], rank_device(), key, "sign", low=0, high=1) * 2 - 1
    return torch.zeros(shape, device=rank_device()).scatter_(
        -1, column[..., None], sign[..., None].float()
    )


def parts_of(case: Case, rank: int, world: int) -> dict[str, torch.Tensor]:
    """A rank's operands in float32; gate_up as [e, 2I, H], the gate first."""
    tokens, own = case.tokens[rank], case.experts_of(world)[rank]
    columns = INNER if case.form == "no gate" else 2 * INNER
    device = rank_device()
    shares = 2.0 ** integers((tokens, case.choices), device, "shares", rank, low=-1, high=1)
    found = {
        "x": integers((tokens, WIDTH), device, "x", rank).float(),
        "shares": shares,
        "gate_up": sparse(own, columns, WIDTH, key=("gate_up", rank)),
        "down": sparse(own, WIDTH, INNER, key=("down", rank)),
    }
    if case.bias:
        found["gate_up_bias"] = integers((own, columns), device, "b", rank, low=-1, high=1).float()
        found["down_bias"] = integers((own, WIDTH), device, "c", rank, low=-1, high=1).float()
    return found


def meaning(case: Case, everybody: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    """Every rank's result, token by token and choice by choice, by all ranks' experts."""
    world = len(everybody)
    whole = {
        name: torch.cat([own[name] for own in everybody])
        for name in everybody[0]
        if name not in ("x", "shares")
    }
    results = []
    for rank, own in enumerate(everybody):
        rows = []
        for token, chosen in enumerate(ids_of(case, rank, world).tolist()):
            row = own["x"][token] * 0
            for choice, expert in enumerate(chosen):
                if not 0 <= expert < whole["down"].shape[0]:
                    continue
                share = own["shares"][token, choice]
                given = own["x"][token] * (share if case.shares_on == "input" else 1)
                hidden = whole["gate_up"][expert] @ given
                hidden = hidden + whole["gate_up_bias"][expert] if case.bias else hidden
                if case.form == "no gate":
                    hidden = hidden.relu()
                else:
                    hidden = hidden[:INNER].relu() * hidden[INNER:]
                result = whole["down"][expert] @ (
                    hidden * (share if case.shares_on == "hidden" else 1)
                )
                result = result + whole["down_bias"][expert] if case.bias else result
                row = row + result * (share if case.shares_on == "output" else 1)
            rows.append(row)
        results.append(torch.stack(rows) if rows else own["x"] * 1)
    return results


def in_turns(gate_up: torch.Tensor) -> torch.Tensor:
    return torch.stack(gate_up.chunk(2, 1), 2).flatten(1, 2)


def laid_out(case: Case, gate_up: torch.Tensor):
    """The weights as the case gives them, and keywords."""
    if case.form == "pair":
        return tuple(gate_up.chunk(2, 1)), {}
    if case.form == "list":
        return list(gate_up) or gate_up, {}
    if case.form == "interleaved":
        return in_turns(gate_up), {"interleaved": True}
    if case.form == "strided":
        return gate_up.transpose(1, 2).contiguous().transpose(1, 2), {}
    return gate_up, {}


def most_rows(case: Case, world: int) -> int:
    """The rows of the rank that has most; at least one."""
    ends = torch.tensor(case.experts_of(world)).cumsum(0)
    ids = torch.cat([ids_of(case, rank, world).flatten().cpu() for rank in range(world)])
    own = torch.searchsorted(ends, ids[(ids >= 0) & (ids < ends[-1])].long(), right=True)
    return max(1, int(own.bincount(minlength=1).max()))


def call(
    case: Case, own: dict[str, torch.Tensor], ids: torch.Tensor, transport: str | None
) -> torch.Tensor:
    world, x, shares = dist.get_world_size(), own["x"], own["shares"]
    gate_up, keywords = laid_out(case, own["gate_up"])
    bias = own.get("gate_up_bias")
    if case.form == "interleaved" and bias is not None:
        bias = in_turns(bias)
    if case.leading:
        x, ids, shares = x[None], ids[None], shares[None]
    if case.limited:
        keywords |= {"max_tokens": 7, "max_rows": most_rows(case, world)}
    if not isinstance(case.experts, int):
        keywords["num_experts"] = case.experts_of(world)
    output = overlap_torch.moe(
        x,
        ids,
        shares,
        gate_up,
        own["down"],
        gate_up_bias=bias,
        down_bias=own.get("down_bias"),
        activation=Gate("relu", gated=case.form != "no gate"),
        shares_on=case.shares_on,
        save=case.save,
        sum_order=case.sum_order,
        transport=transport,
        **keywords,
    )
    return output[0] if case.leading else output


def carried_by(transport: str | None):
    """Whatever a transport needs to run on this rank's device."""
    on_cpu = transport == "peer" and rank_device().type == "cpu"
    return over_peers() if on_cpu else contextlib.nullcontext()


def check_moe(failures: Failures, cases: list[Case], transport: str) -> None:
    """Results and all gradients, bit for bit, from memory full of junk."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for case in cases:
        everybody = [
            {
                name: part.double().requires_grad_()
                for name, part in parts_of(case, r, world).items()
            }
            for r in range(world)
        ]
        right = meaning(case, everybody)
        grads = [
            integers(tuple(result.shape), rank_device(), "grad", r, low=-1, high=1)
            for r, result in enumerate(right)
        ]
        torch.autograd.backward(right, [grad.double() for grad in grads])
        expected = [right[rank].detach(), *(part.grad for part in everybody[rank].values())]
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            own = {
                name: part.to(torch.float32 if name == "shares" else dtype).requires_grad_()
                for name, part in parts_of(case, rank, world).items()
            }
            poison(rank_device(), 64, 512, 4096)
            with carried_by(transport):
                output = call(case, own, ids_of(case, rank, world), transport)
                output.backward(grads[rank].to(dtype))
                poison(rank_device(), 64, 512, 4096)
                with torch.no_grad():
                    again = call(case, own, ids_of(case, rank, world), transport)
            failures.expect(difference(again, output), "without gradients", dtype, case)
            found = [output, *(part.grad for part in own.values())]
            for name, mine, value in zip(("output", *own), found, expected, strict=True):
                value = torch.zeros_like(own[name]) if value is None else value
                assert value.numel() == 0 or value.abs().max() <= LIMIT, (name, case)
                problem = difference(mine, value.to(mine.dtype))
                failures.expect(problem, name, dtype, case)


def need_peers(ranks, transport: str) -> None:
    if transport == "peer" and ranks.world == 1:
        pytest.skip("a rank of its own has no peers")
    if transport == "peer" and ranks.device_type == "cuda":
        ranks.skip_without_peers()


@pytest.mark.parametrize("transport", ["nccl", "peer"])
@pytest.mark.parametrize("cases", [ROUTINGS, OPTIONS], ids=["routings", "options"])
def test_moe_is_what_it_means(ranks, cases, transport):
    need_peers(ranks, transport)
    ranks.expect_no_failures(check_moe, cases, transport)
