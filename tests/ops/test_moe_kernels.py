"""A mixture's CUDA kernels beside their compositions, on one GPU: bit for bit, and activations within rounding; and on CPU the
activations' formulas."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import overlap_torch
from checks import Failures
from operands import difference, integers, poison
from overlap_torch._moe import activation, ops, scaled
from overlap_torch._ops.composition import accumulated
from scaled import spread

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


MEANINGS = {
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu": lambda x: x / 2 * (1 + torch.erf(x / 2**0.5)),
    "gelu_tanh": lambda x: x / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "relu": lambda x: torch.where(x > 0, x, 0),
}


def meant(gate: activation.Gate, form: str, both, bias, shares, offs) -> torch.Tensor:
    """The formula of Gate's docstring."""
    both = both + bias.repeat_interleave(offs.diff(prepend=offs.new_zeros(1)), 0)
    other = None
    if gate.gated:
        both, other = (both[:, ::2], both[:, 1::2]) if form == "turns" else both.chunk(2, 1)
    if gate.limit is not None:
        both, other = both.clamp(max=gate.limit), other.clamp(-gate.limit, gate.limit)
    value = MEANINGS[gate.name](gate.alpha * both) / gate.alpha
    return shares * (value if other is None else value * (other + gate.offset))


@pytest.mark.parametrize("form", ["halves", "turns", "pair"])
@pytest.mark.parametrize("gate", [*GATES, activation.Gate("silu", 1.7, gated=False)], ids=str)
def test_gates_are_what_they_mean(gate: activation.Gate, form: str) -> None:
    """Values, gradients and second derivatives on CPU."""
    torch.manual_seed(1)
    offs = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    sizes = ((8, 12), (4, 12), (8, 1))
    if not gate.gated:
        form = "halves"
    drawn = [torch.randn(size, dtype=torch.float64).requires_grad_() for size in sizes]
    both, bias, shares = drawn
    parts = both.chunk(2, 1) if form == "pair" else (both, None)
    mine = _ops._moe_gate(*parts, bias, shares, offs, *gate.form(form == "turns"))
    found = []
    for value in (mine, meant(gate, form, both, bias, shares, offs)):
        first = torch.autograd.grad((value**2).sum(), drawn, create_graph=True)
        second = torch.autograd.grad(sum((one**2).sum() for one in first), drawn)
        found.append([value, *first, *second])
    for one, right in zip(*found, strict=True):
        torch.testing.assert_close(one, right, rtol=1e-9, atol=1e-9)


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
        shares = torch.rand(rows, 1, device=device, dtype=accumulated(dtype)) if bias else None
        arguments = (offs, *gate.form(form == "turns"))
        place = (gate, dtype, width, bias, form)
        wide = [None if part is None else part.double() for part in (*parts, added, shares)]
        poison(device, 4096, 1 << 16)
        mine = _ops._moe_gate(*parts, added, shares, *arguments)
        failures.expect(worst(mine, activation._gate(*wide, *arguments)), "gate", *place)
        found = _ops._moe_gate_backward(grad, *parts, added, shares, *arguments)
        right = activation.gate_backward(grad.double(), *wide, *arguments)
        for at in (0, 1, 2) if pair else (0, 2):
            failures.expect(worst(found[at], right[at]), "gradient", at, *place)
        of_all = (grad.double() * activation._gate(*wide[:3], None, *arguments)).abs().sum(1)
        off = (found[3].double() - right[3]).abs().squeeze(1)
        largest = (off / (torch.finfo(dtype).eps * of_all + 1e-5)).max().item()
        failures.expect(None if largest < 1 else f"off by {largest}", "shares", *place)


COUNTS = [0, 1, 63, 64, 65, 127, 128, 129, 0, 300]  # rows of each expert
ROOM = 61  # rows after the last one's


def draw(*shape: int, dtype: torch.dtype, turned: bool = False) -> torch.Tensor:
    """Numbers from -2 to 2; turned: contiguous along the dim before the last."""
    shape = (*shape[:-2], shape[-1], shape[-2]) if turned else shape
    drawn = torch.randint(-2, 3, shape, device="cuda").to(dtype)
    return drawn.transpose(-1, -2) if turned else drawn


def check_products(failures: Failures) -> None:
    """Experts of none to some 300 rows: each row by its own expert's weight, and weights' gradients; exactly, and untouched by
    the rows of others."""
    offs = torch.tensor(COUNTS, device="cuda").cumsum(0).to(torch.int32)
    ends = [0, *offs.tolist()]
    for dtype, inner, width in itertools.product(
        (torch.bfloat16, torch.float16), (64, 72, 376, 520), (8, 264, 1016)
    ):
        rows = draw(ends[-1] + ROOM, inner, dtype=dtype)
        rows[ends[-1] :] = float("nan")
        for turned in (False, True):
            weight = draw(len(COUNTS), width, inner, dtype=dtype, turned=turned)
            poison(rows.device, 4096, 1 << 16)
            mine = _ops._moe_linear(rows, weight, offs)[: ends[-1]]
            parts = [rows[a:b].double() for a, b in itertools.pairwise(ends)]
            right = [part @ one.double().t() for part, one in zip(parts, weight, strict=True)]
            failures.expect_equal(mine, torch.cat(right).to(dtype), dtype, inner, width, turned)
            bias = draw(len(COUNTS), width, dtype=dtype)
            call = (rows, weight, None, bias, None, offs, *activation.NO_ACTIVATION, False)
            mine = _ops._moe_grouped(*call)[0][: ends[-1]]
            added = bias.repeat_interleave(offs.diff(prepend=offs.new_zeros(1)), 0)
            right = (torch.cat(right).to(dtype).float() + added.float()).to(dtype)
            failures.expect_equal(mine, right, "bias", dtype, inner, width, turned)
        if width < 64:
            continue
        grad = draw(rows.shape[0], width, dtype=dtype)
        grad[ends[3] : ends[4]] = float("nan")  # of one expert
        for others in (rows, rows[:, :8].contiguous()):
            poison(rows.device, 1 << 16)
            mine = _ops._moe_grouped_weights(grad, others, offs)
            spans = [slice(*span) for span in itertools.pairwise(ends)]
            parts = [grad[span].double().t() @ others[span].double() for span in spans]
            right = torch.stack(parts).to(dtype)
            failures.equal(right[3].isnan().all().item(), True)
            failures.expect_equal(mine.nan_to_num(-7), right.nan_to_num(-7), "weights", dtype)


def check_experts(failures: Failures) -> None:
    """The GEMM's gate has the bits of the product, then the gate's kernel; what it keeps, those of the product."""
    offs = torch.tensor(COUNTS, device="cuda").cumsum(0).to(torch.int32)
    count, experts = int(offs[-1]), len(COUNTS)
    for gate, dtype, (inner, width), form, turned, (biased, shared) in itertools.product(
        (activation.Gate(), activation.Gate("gelu_tanh", alpha=1.7, limit=1.0, offset=1.0)),
        (torch.bfloat16, torch.float16),
        ((64, 72), (520, 264), (2056, 72)),  # a SwiGLU has another kernel up to 2048
        ("halves", "turns", "pair"),
        (False, True),
        ((False, False), (False, True), (True, True)),
    ):
        rows = torch.randn(count + ROOM, inner, device="cuda").to(dtype)
        rows[count:] = float("nan")
        scale = inner**-0.5
        weight = draw(experts, 2 * width, inner, dtype=dtype, turned=turned) * scale
        pair = form == "pair"
        weights = [weight[:, :width], weight[:, width:]] if pair else [weight, None]
        if pair:
            weights = [
                each.transpose(1, 2).contiguous().transpose(1, 2) if turned else each.contiguous()
                for each in weights
            ]
        bias = draw(experts, 2 * width, dtype=dtype) if biased else None
        shares = torch.rand(count + ROOM, 1, device="cuda") if shared else None
        operands = (bias, shares, offs, *gate.form(form == "turns"))
        place = (gate, dtype, inner, width, form, turned, biased, shared)
        poison(rows.device, 4096, 1 << 16)
        hidden, *kept = _ops._moe_hidden(rows, *weights, *operands, True)
        parts = [None if each is None else _ops._moe_linear(rows, each, offs) for each in weights]
        for mine, right in list(zip(kept, parts, strict=True))[: 1 + pair]:
            failures.expect_equal(mine[:count], right[:count], "kept", *place)
        right = _ops._moe_gate(*parts, *operands)
        failures.expect_equal(hidden[:count], right[:count], "hidden", *place)
        plain = _ops._moe_hidden(rows, *weights, *operands, False)[0]
        failures.expect_equal(plain[:count], right[:count], "not kept", *place)


def check_packs(failures: Failures) -> None:
    """Packed rows, bit for bit, up to the last end; rows that are not aligned to 16 bytes, too."""
    device = torch.device("cuda")
    for by_blocks, width, start in itertools.product((False, True), (16, 80, 512, 4112), (0, 1)):
        place = (by_blocks, width, start)
        numbers = torch.randn(37 * width + start, device=device).bfloat16()
        rows = numbers[start:].view(37, width)
        rows[3], rows[4, 5], rows[5, 0], rows[6] = 0, float("nan"), float("inf"), rows[6] * 1e-9
        offs = torch.tensor([5, 20], device=device, dtype=torch.int32)
        poison(device, 4096, 1 << 16)
        mine = _ops._moe_pack(rows, None, by_blocks).view(torch.uint8)
        right = scaled._pack(rows, None, by_blocks).view(torch.uint8)
        failures.expect_equal(mine, right, *place)
        mine = _ops._moe_pack(rows, offs, by_blocks).view(torch.uint8)
        failures.expect_equal(mine[:20], right[:20], "to the end", *place)


def powers(*shape: int) -> torch.Tensor:
    return 2.0 ** torch.randint(-3, 3, shape, device="cuda")


def scaled_product(rows, scales, ends, weight, scale) -> torch.Tensor:
    """Each expert's rows [R, K], whose scales are [R, 1] or of blocks, times its weight [N, K], whose scales are [N] or of blocks."""
    left = rows * spread(scales, rows.shape)
    right = weight * spread(scale if scale.dim() == 3 else scale[:, :, None], weight.shape)
    parts = [
        left[a:b].double() @ one.double().t()
        for (a, b), one in zip(itertools.pairwise(ends), right, strict=True)
    ]
    return torch.cat(parts).bfloat16()


def check_scaled(failures: Failures) -> None:
    """Products of packed rows and fp8 weights, exactly; through gate and up as the products, then the gate's kernel. Widths of 16 and
    272 leave gate and up by blocks to the composition, except as a pair."""
    offs = torch.tensor(COUNTS, device="cuda").cumsum(0).to(torch.int32)
    fp8, experts = torch.float8_e4m3fn, len(COUNTS)
    cases = [
        (inner, width, by_blocks, offs)
        for inner, width, by_blocks in itertools.product(
            (64, 80, 528), (16, 192, 272, 1024), (False, True)
        )
    ]
    # Several tiles of each cluster, and more blocks than stages.
    more = (
        torch.tensor([3000, 1, 0, 2000, 64, 0, 0, 0, 0, 0], device="cuda").cumsum(0).to(torch.int32)
    )
    cases += [(inner, 1024, True, more) for inner in (912, 1424)]
    for inner, width, by_blocks, offs in cases:
        ends = [0, *offs.tolist()]
        rows = draw(ends[-1] + ROOM, inner, dtype=torch.float32)
        packed = _ops._moe_pack(rows.bfloat16(), None, by_blocks)
        packed[:, :inner] = rows.to(fp8)
        blocks = -(-inner // 128)
        scales = powers(rows.shape[0], blocks if by_blocks else 1)
        scaled.scales_of_rows(packed, inner, by_blocks).copy_(scales)
        weight = draw(experts, 2 * width, inner, dtype=torch.float32)
        scale = powers(experts, *((-(-2 * width // 128), blocks) if by_blocks else (2 * width,)))

        product = functools.partial(scaled_product, rows, scales, ends)
        right, place = product(weight, scale), (inner, width, by_blocks)
        cast = weight.to(fp8)
        poison(rows.device, 4096, 1 << 16)
        bias = draw(experts, 2 * width, dtype=torch.bfloat16)
        mine = scaled.packed_linear(packed, cast, scale, None, offs)[: ends[-1]]
        failures.expect_equal(mine, right, "product", *place)
        mine = scaled.packed_linear(packed, cast, scale, bias, offs)[: ends[-1]]
        added = bias.repeat_interleave(offs.diff(prepend=offs.new_zeros(1)), 0)
        failures.expect_equal(mine, right + added, "bias", *place)
        shares = torch.rand(rows.shape[0], 1, device="cuda")
        # Without a bias a SwiGLU has a form of its own.
        for form, of_form in itertools.product(("halves", "turns", "pair"), (bias, None)):
            how = (of_form, shares, offs, *activation.Gate().form(form == "turns"))
            room = right.new_zeros((ROOM, width))
            if form == "pair":
                weights = [part.contiguous() for part in cast.chunk(2, 1)]
                of_weights = (
                    [powers(experts, -(-width // 128), blocks) for _ in range(2)]
                    if by_blocks
                    else [part.contiguous() for part in scale.chunk(2, 1)]
                )
                plain = weight.chunk(2, 1)
                parts = [
                    torch.cat([product(*both), room])
                    for both in zip(plain, of_weights, strict=True)
                ]
            else:
                weights, of_weights = [cast, None], [scale, None]
                parts = [torch.cat([right, room.repeat(1, 2)]), None]
            mine = _ops._moe_scaled_hidden(packed, *weights, *of_weights, *how)
            hidden = _ops._moe_gate(*parts, *how)
            given = form, of_form is not None, *place
            failures.expect_equal(mine[: ends[-1]], hidden[: ends[-1]], *given)


def results(operands, of: slice, weights: list[torch.Tensor], **how) -> list[torch.Tensor]:
    """Output and gradient of some tokens."""
    x, ids, shares, grad = (one[of] for one in operands)
    x = x.detach().requires_grad_()
    output = overlap_torch.moe(x, ids, shares, *weights, **how)
    output.backward(grad)
    return [output, x.grad]


def check_bits(failures: Failures) -> None:
    """A token's result, and its gradient, have the bits that they have in a group of one rank, among few tokens or many."""
    rank, world = dist.get_rank(), dist.get_world_size()
    alone = [dist.new_group([one]) for one in range(world)][rank]
    experts, hidden, inner, tokens, choices = 8, 256, 384, 300, 3
    own = slice(experts // world * rank, experts // world * (rank + 1))
    for dtype, skew in itertools.product((torch.bfloat16, torch.float16), (0, 1)):
        generator = torch.Generator("cuda").manual_seed(3)
        draw = functools.partial(torch.randn, device="cuda", generator=generator)
        weights = [draw(experts, 2 * inner, hidden) / 16, draw(experts, hidden, inner) / 19]
        weights = [one.to(dtype) for one in weights]
        x, grad = (draw(world, tokens, hidden)[rank].to(dtype) for _ in range(2))
        score = draw(world, tokens, experts)[rank] + skew * torch.arange(experts, device="cuda")
        shares, ids = score.softmax(-1).topk(choices)
        operands = (x, ids, shares, grad)
        for transport in ("nccl", "peer") if world > 1 else (None,):
            parts = [one[own] for one in weights]
            among_all = results(operands, slice(0, tokens), parts, transport=transport)
            for begin, end in ((0, tokens), (0, 1), (7, 12), (100, 117), (40, 104), (9, 209)):
                right = results(operands, slice(begin, end), weights, group=alone)
                for name, mine, expected in zip(("output", "x"), among_all, right, strict=True):
                    problem = difference(mine[begin:end], expected)
                    failures.expect(problem, name, dtype, skew, transport, begin, end)


def on_hopper(failures: Failures, check: Callable[[Failures], None]) -> None:
    if torch.cuda.get_device_capability() == (9, 0):
        check(failures)
    else:  # other GPUs take PyTorch's products, which test_moe.py tests
        failures.expect(None)


@pytest.mark.ranks((1, "nccl"))
@pytest.mark.parametrize("check", [check_routes, check_rows, check_gates, check_packs])
def test_moe_kernels_are_their_compositions(ranks, check):
    ranks.expect_no_failures(check)


@pytest.mark.ranks((1, "nccl"))
@pytest.mark.parametrize("check", [check_products, check_experts, check_scaled])
def test_moe_grouped_gemms_are_exact(ranks, check):
    ranks.expect_no_failures(on_hopper, check)


@pytest.mark.ranks((1, "nccl"), (2, "nccl"), (4, "nccl"))
@pytest.mark.peers
def test_moe_bits_are_of_row_and_weights(ranks):
    ranks.expect_no_failures(on_hopper, check_bits)
