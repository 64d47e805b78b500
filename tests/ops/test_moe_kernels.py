"""The CUDA kernels of a mixture of experts beside their compositions, on one GPU: bit for bit, and activations within rounding."""

from __future__ import annotations

import itertools

import pytest
import torch

from checks import Failures
from operands import difference, integers, poison
from overlap_torch._moe import activation, ops

_ops = torch.ops.overlap
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
WIDTHS = (8, 136, 4104, 7)  # the last: no 16-byte accesses
# (experts of each rank, tokens, choices)
ROUTES = [
    ([1], 5, 1),
    ([3, 0, 2], 65, 2),
    ([64] * 4, 1000, 8),
    ([16] * 8, 8192, 4),
    ([2, 2], 0, 2),
    ([1, 300], 300, 3),
    ([3] * 70, 129, 5),
]


def check_routes(failures: Failures) -> None:
    """Routes counted, met and placed; a rank is taken to get its own message from all."""
    for (experts, tokens, choices), kind in itertools.product(ROUTES, (torch.int32, torch.int64)):
        device, total = torch.device("cuda"), sum(experts)
        ids = integers((tokens, choices), device, "ids", low=-2, high=total + 1).to(kind)
        poison(device, 4096, 1 << 16, 1 << 20)
        message, routes, slots, sent = _ops._moe_count(ids, experts)
        right = ops._count(ids.cpu(), experts)
        pairs = {"message": message, "routes": routes, "slots": slots, "sent": sent}
        for (name, found), expected in zip(pairs.items(), right, strict=True):
            found = found.cpu()[: expected.shape[0]]
            failures.expect(difference(found, expected), name, experts, tokens, choices, kind)
        for rank, align in itertools.product(range(min(2, len(experts))), (1, 8)):
            own = experts[rank]
            met = right[0][rank].repeat(len(experts), 1)
            found = _ops._moe_meet(message, met.cuda(), own, align)
            expected = ops._meet(right[0], met, own, align)
            known, offs, _ = expected
            count = int(met[:, :own].sum())
            slots = integers((count,), device, "slots", low=0, high=99).to(torch.int32)
            found += _ops._moe_arrive(met.cuda(), offs.cuda(), slots, int(known[-1]), choices)
            expected += ops._arrive(met, offs, slots.cpu(), int(known[-1]), choices)
            for mine, whole in zip(found, expected, strict=True):
                failures.expect(difference(mine.cpu(), whole), "arrivals", experts, rank, align)


def check_rows(failures: Failures) -> None:
    """Rows by index, sums of choices, and rows times shares with their dots; all in values that nothing rounds otherwise."""
    device = torch.device("cuda")
    for dtype, width, choices in itertools.product(DTYPES, WIDTHS, (1, 3, 8)):
        place = (dtype, width, choices)
        tokens = 37
        rows = integers((200, width), device, "rows").to(dtype)
        index = integers((90,), device, "index", low=-1, high=199).long()
        for divisor in (1, 3):
            mine, right = (rule(rows, index, divisor) for rule in (_ops._moe_rows, ops._rows))
            failures.expect(difference(mine, right), "rows", divisor, *place)
        count = tokens * choices * 3 // 4
        routes = torch.randperm(tokens * choices, device=device)[:count]
        routes[::7] = -1
        results = torch.randn(count, width, device=device).to(dtype)
        shares = torch.rand(tokens, choices, device=device)
        for given in (None, shares, shares.to(dtype), torch.rand(count, 1, device=device)):
            of_rows = given is not None and given.shape[0] == count
            poison(device, 4096, 1 << 16)
            mine, right = (
                rule(results, routes, given, tokens, choices, of_rows)
                for rule in (_ops._moe_sum, ops._sum)
            )
            failures.expect(difference(mine, right), "sum", *place, given is None, of_rows)
        share = integers((200, 1), device, "share", low=-2, high=2).float()
        others = integers((200, width), device, "others", low=-1, high=1).to(dtype)
        for mine, right in zip(
            _ops._moe_weigh(rows, others, share), ops._weigh(rows, others, share), strict=True
        ):
            failures.expect(difference(mine, right), "weigh", *place)


GATES = [
    activation.Gate(),
    activation.Gate("silu", alpha=1.702, limit=1.5, offset=1.0),
    activation.Gate("gelu", gated=False),
    activation.Gate("gelu"),
    activation.Gate("gelu_tanh", limit=0.5),
    activation.Gate("relu", alpha=0.5, gated=False),
]


def worst(mine: torch.Tensor, right: torch.Tensor) -> str | None:
    """More than two units in the last place of the dtype from the float64 value."""
    close = torch.allclose(mine.double(), right, rtol=2 * torch.finfo(mine.dtype).eps, atol=1e-5)
    same = mine.shape == right.shape and close
    return None if same else f"off by {(mine.double() - right).abs().max().item()}"


def check_gates(failures: Failures) -> None:
    """Activations and their gradients within the rounding of float64's, with biases, in halves, by turns and as a pair."""
    device = torch.device("cuda")
    forms = ("halves", "turns", "pair")
    for gate, dtype, width, bias, form in itertools.product(
        GATES, DTYPES, (8, 264, 7), (False, True), forms
    ):
        if not gate.gated and form != "halves":
            continue
        rows, experts, columns = 67, 5, width * (2 if gate.gated else 1)
        offs = torch.tensor([0, 10, 11, 60, rows], device=device, dtype=torch.int32)
        hidden = torch.randn(rows, columns, device=device).to(dtype)
        added = torch.randn(experts, columns, device=device).to(dtype) if bias else None
        grad = torch.randn(rows, width, device=device).to(dtype)
        pair = form == "pair"
        parts = [part.contiguous() for part in hidden.chunk(2, 1)] if pair else [hidden, None]
        arguments = (added, offs, *gate.form(form == "turns"))
        place = (gate, dtype, width, bias, form)
        wide = [None if part is None else part.double() for part in (*parts, added)]
        in_double = (*wide, *arguments[1:])
        poison(device, 4096, 1 << 16)
        mine = _ops._moe_gate(*parts, *arguments)
        failures.expect(worst(mine, activation.gate_unrounded(*in_double)), "gate", *place)
        mine = _ops._moe_gate_backward(grad, *parts, *arguments)
        right = activation._gate_backward(grad.double(), *in_double)
        for found, expected in zip(mine[: 1 + pair], right[: 1 + pair], strict=True):
            failures.expect(worst(found, expected), "gradient", *place)


def check_products(failures: Failures) -> None:
    """Experts of none to some 300 rows: every row by its own expert's weight, and nothing after the last one."""
    device = torch.device("cuda")
    if torch.cuda.get_device_capability(device) != (9, 0):
        return failures.expect(None)  # other GPUs take PyTorch's products, which test_moe.py tests
    counts = [0, 1, 63, 64, 65, 127, 128, 129, 0, 300]
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(device)
    offs = torch.tensor(counts, device=device).cumsum(0).to(torch.int32)
    count, room = ids.numel(), 61
    for dtype, inner, width, form, bias in itertools.product(
        (torch.bfloat16, torch.float16),
        (64, 72, 520),
        (8, 264, 1016),
        ("plain", "halves", "turns", "pair"),
        (False, True),
    ):
        if bias and form == "plain":
            continue
        rows = torch.randint(-2, 3, (count + room, inner), device=device).to(dtype)
        columns = width * (1 if form == "plain" else 2)
        weight = torch.randint(-1, 2, (len(counts), columns, inner), device=device).to(dtype)
        added = torch.randint(-3, 4, (len(counts), columns), device=device).to(dtype)
        sums = torch.stack(
            [weight[ids[row]].double() @ rows[row].double() for row in range(0, count, 7)]
        )
        right = sums.to(dtype).double()
        gate = activation.Gate("relu", limit=100.0, offset=1.0).form(form == "turns")
        if form != "plain":
            hidden = (right, None, added.double() if bias else None, offs)
            whole = torch.zeros(count, columns, device=device, dtype=torch.float64)
            whole[::7] = right
            right = activation.gate_unrounded(whole, *hidden[1:], *gate)[::7]
        weights = weight.chunk(2, 1) if form == "pair" else (weight, None)
        weights = [None if each is None else each.contiguous() for each in weights]
        poison(device, 4096, 1 << 16)
        call = (rows, *weights, added if bias else None, offs)
        if form == "plain":
            mine = _ops._moe_linear(rows, weight, offs)
        else:
            mine = _ops._moe_hidden(*call, *gate)
        failures.expect(
            difference(mine[:count:7], right.to(dtype)), dtype, inner, width, form, bias
        )
        raw = _ops._moe_grouped(
            *call,
            *(gate[:4] if form != "plain" else ("", 1.0, 0.0, 0.0)),
            form != "plain",
            form == "turns",
        )
        failures.expect_equal(raw[:count], mine[:count], "as called", dtype, inner, width, form)


@pytest.mark.ranks((1, "nccl"))
@pytest.mark.parametrize("check", [check_routes, check_rows, check_gates, check_products])
def test_moe_kernels_are_their_compositions(ranks, check):
    ranks.expect_no_failures(check)
