"""A mixture of experts with fp8 weights: beside the same casts in float64, token by token."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from test_moe import carried_by, in_turns, need_peers
from torch.utils._pytree import tree_map

import overlap_torch
from checks import Failures
from operands import poison, rank_device
from overlap_torch import Gate
from overlap_torch._moe import scaled
from scaled import cast, dequantised

HIDDEN, INNER, CHOICES = 144, 192, 3
FP8 = torch.float8_e4m3fn
# A cast of the rows that is left out, or a scale of another row, is off by 0.02 and more; sums in float32 by less than 0.002, and
# those of Hopper's tensor cores by 0.005.
MOST = {"cpu": 4e-3, "cuda": 1e-2}


@dataclass(frozen=True)
class Case:
    form: str = "one"  # of gate_up: one, pair, list, interleaved, no gate
    bias: bool = False
    shares_on: str = "output"
    sum_order: str = "choices"
    limited: bool = False
    by_blocks: bool = False

    @property
    def block(self) -> tuple[int, int] | None:
        """The rows and columns of a weight that share a scale."""
        return (128, 128) if self.by_blocks else None

    experts: tuple[int, ...] = (2, 2, 2)
    tokens: tuple[int, ...] = (150, 0, 37)


CASES = [
    Case(),
    Case(form="pair", bias=True, shares_on="hidden", limited=True),
    Case(form="list", shares_on="input", experts=(1, 2, 0)),
    Case(form="interleaved", bias=True, sum_order="ranks"),
    Case(form="no gate", bias=True, shares_on="input", sum_order="ranks"),
    Case(tokens=(0, 0, 0)),
    Case(limited=True, experts=(0, 3, 1), tokens=(5, 130, 1)),
]
CASES += [replace(case, by_blocks=True) for case in CASES]


def rounded(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.bfloat16().double()


def cast_back(case: Case, numbers: torch.Tensor) -> torch.Tensor:
    block = (1, 128) if case.by_blocks and numbers.numel() else None
    return dequantised(*cast(numbers, block))


def operands_of(case: Case, rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    own, tokens, total = case.experts[rank], case.tokens[rank], sum(case.experts)
    columns = INNER * (1 if case.form == "no gate" else 2)
    found = {
        "x": (draw(tokens, HIDDEN) * 2.0 ** draw(tokens, 1).round()).bfloat16(),
        "ids": draw(tokens, CHOICES).mul(1e3).long() % total,
        "shares": draw(tokens, CHOICES).abs(),
    }
    sizes = {"gate_up": (own, columns, HIDDEN), "down": (own, HIDDEN, INNER)}
    for name, shape in sizes.items():
        numbers = draw(*shape) / 8
        if name == "gate_up" and case.form == "interleaved":
            numbers = in_turns(numbers)
        parts = numbers.chunk(2, 1) if name == "gate_up" and case.form == "pair" else (numbers,)
        values, scales = zip(*(cast(part, case.block) for part in parts), strict=True)
        scales = [scale if case.by_blocks else scale[..., 0] for scale in scales]
        for key, tensors in ((name, values), (f"scale_{name}", scales)):
            found[key] = tensors[0] if len(tensors) == 1 else list(tensors)
        if case.bias:
            found[f"{name}_bias"] = draw(own, shape[1]).bfloat16()
    return found


def whole_weight(case: Case, own: dict, name: str) -> torch.Tensor:
    """In float64, gate and up one after the other."""
    parts = [
        each if isinstance(each, list) else [each] for each in (own[name], own[f"scale_{name}"])
    ]
    made = torch.cat(
        [
            dequantised(values, scale if case.by_blocks else scale[..., None])
            for values, scale in zip(*parts, strict=True)
        ],
        1,
    )
    if name == "gate_up" and case.form == "interleaved":
        made = torch.cat([made[:, 0::2], made[:, 1::2]], 1)
    return made


def meaning(case: Case, everybody: list[dict], rank: int) -> torch.Tensor:
    """This rank's result in float64, by the casts that the page names."""
    weights = {
        name: torch.cat([whole_weight(case, own, name) for own in everybody])
        for name in ("gate_up", "down")
    }
    bias = {
        name: torch.cat([own[f"{name}_bias"].double() for own in everybody]) if case.bias else None
        for name in weights
    }
    own = everybody[rank]
    x, shares = own["x"].double(), own["shares"].double()
    total = torch.zeros(x.shape[0], HIDDEN, dtype=torch.float64)
    for choice in range(CHOICES):
        ids, share = own["ids"][:, choice], shares[:, choice, None]
        given = cast_back(case, own["x"]) * (share if case.shares_on == "input" else 1)
        hidden = rounded(torch.einsum("tk,tnk->tn", given, weights["gate_up"][ids]))
        hidden = hidden if bias["gate_up"] is None else hidden + bias["gate_up"][ids]
        if case.form == "no gate":
            hidden = hidden.relu()
        else:
            gate, up = hidden.chunk(2, 1)
            hidden = torch.nn.functional.silu(gate) * up
        hidden = rounded(hidden * (share if case.shares_on == "hidden" else 1))
        result = rounded(torch.einsum("tk,tnk->tn", cast_back(case, hidden), weights["down"][ids]))
        result = result if bias["down"] is None else rounded(result + bias["down"][ids])
        total += result * (share if case.shares_on == "output" else 1)
    return total


def call(case: Case, own: dict[str, torch.Tensor], transport: str | None) -> torch.Tensor:
    ranks, gate_up, scale = dist.get_world_size(), own["gate_up"], own["scale_gate_up"]
    keywords = {name: own.get(f"{name}_bias") for name in ("gate_up", "down")}
    if case.form == "list":
        gate_up = list(gate_up) or gate_up
    elif case.form == "interleaved":
        keywords["gate_up"] = in_turns(keywords["gate_up"])
    limits = {"max_tokens": 150, "max_rows": 200 * CHOICES} if case.limited else {}
    return overlap_torch.moe(
        own["x"],
        own["ids"],
        own["shares"],
        gate_up,
        own["down"],
        scale_gate_up=scale,
        scale_down=own["scale_down"] if case.by_blocks else own["scale_down"][:, :, None],
        gate_up_bias=keywords["gate_up"],
        down_bias=keywords["down"],
        num_experts=case.experts[:ranks],
        activation=Gate("relu", gated=False) if case.form == "no gate" else "silu",
        interleaved=case.form == "interleaved",
        shares_on=case.shares_on,
        sum_order=case.sum_order,
        transport=transport,
        **limits,
    )


def check_moe(failures: Failures, transport: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for case in CASES:
        if sum(case.experts[:world]) == 0:
            continue
        case = Case(
            **{**vars(case), "experts": case.experts[:world], "tokens": case.tokens[:world]}
        )
        everybody = [operands_of(case, each) for each in range(world)]
        right = meaning(case, everybody, rank)
        own = tree_map(lambda each: each.to(rank_device()), everybody[rank])
        poison(rank_device(), 64, 4096, 1 << 16)
        with carried_by(transport):
            mine = call(case, own, transport)
            again = call(case, own, transport)
        failures.expect(None if torch.equal(mine, again) else "another result", case)
        # The mean of the rows: a single number that is cast up in place of down is a hundredth of its row.
        size, found = right.norm(dim=1), mine.cpu().double()
        each = (found - right).norm(dim=1) / size.clamp(min=1e-9)
        off = each[size > 0].mean() if (size > 0).any() else each.sum()
        failures.expect_equal(found[size == 0], right[size == 0], "tokens without routes", case)
        most = MOST[rank_device().type]
        failures.expect(None if off < most else f"off by {off:.4f}", transport, case)


@pytest.mark.parametrize("transport", ["nccl", "peer"])
@pytest.mark.ranks((1, "gloo"), (3, "gloo"), (1, "nccl"), (2, "nccl"))
def test_moe_of_fp8_weights_is_what_it_means(ranks, transport):
    need_peers(ranks, transport)
    ranks.expect_no_failures(check_moe, transport)


WRONG = [
    (TypeError, "both or neither", {"scale_down": lambda scale: None}),
    (TypeError, "both or neither", {"scale_gate_up": lambda scale: 0.5}),
    (ValueError, "by torch.stack", {"scale_gate_up": list}),
    (ValueError, "scale_gate_up of shape (2, 384)", {"scale_gate_up": lambda scale: scale[:, 1:]}),
    (ValueError, "(2, 3, 2), one for each block", {"scale_gate_up": lambda scale: scale[:, :3]}),
    (ValueError, "or of blocks for all", {"scale_down": lambda scale: scale.new_ones((2, 2, 2))}),
    (TypeError, "scale_down in float32", {"scale_down": torch.Tensor.double}),
    (TypeError, "x in bfloat16 beside fp8", {"x": torch.Tensor.float}),
    (TypeError, "gate_up in torch.float8_e4m3fn, beside", {"gate_up": torch.Tensor.bfloat16}),
    (ValueError, "multiples of 16", {"x": lambda x: x[:, :8], "gate_up": lambda w: w[..., :8]}),
    (ValueError, "no gradients", {"shares": torch.Tensor.requires_grad_}),
    (ValueError, "no gradients", {"scale_down": torch.Tensor.requires_grad_}),
]


@pytest.mark.ranks((1, "gloo"))
def test_moe_of_fp8_weights_names_what_is_wrong(failures: Failures) -> None:
    case = Case(experts=(2,), tokens=(5,))
    for kind, text, changes in WRONG:
        own = operands_of(case, 0)
        if "multiples" in text:
            own["down"], own["scale_down"] = own["down"][:, :8], own["scale_down"][:, :8]
        named = {name: own[name] for name in ("scale_gate_up", "scale_down")}
        for name, change in changes.items():
            place = own if name in own else named
            place[name] = change(own[name]) if callable(change) else change
        named |= {name: own[name] for name in ("scale_gate_up", "scale_down")}
        given = [own[name] for name in ("x", "ids", "shares", "gate_up", "down")]
        with pytest.raises(kind) as raised:
            overlap_torch.moe(*given, **named)
        failures.expect(None if text in str(raised.value) else str(raised.value), text)


def test_packed_rows_have_their_scales() -> None:
    rows = torch.tensor([[0.0] * 16, [448.0, -224.0] + [0.0] * 14, [1e30] + [1.0] * 15])
    packed = torch.ops.overlap._moe_pack(rows, None, False)
    assert packed.dtype == FP8 and packed.shape == (3, 32)
    scales = scaled.scales_of_rows(packed, 16, False)
    assert scales.flatten().tolist()[1] == 1.0
    assert packed[:, :16].float()[1, :2].tolist() == [448.0, -224.0]
    assert packed[:, :16].float()[0].abs().max() == 0
    assert packed[:, :16].float()[2].tolist() == [448.0] + [0.0] * 15
    assert scales[2].item() == pytest.approx(1e30 / 448, rel=1e-6)
    assert packed.view(torch.uint8)[:, 20:].max() == 0


def test_packed_rows_have_scales_of_blocks() -> None:
    rows = torch.zeros(2, 5 * 128 + 16)
    rows[0, [0, 128, 640]] = torch.tensor([448.0, 896.0, 112.0])
    packed = torch.ops.overlap._moe_pack(rows, None, True)
    assert packed.shape == (2, 656 + 32), "six scales, and zeros up to 32 bytes"
    scales = scaled.scales_of_rows(packed, 656, True)
    assert scales[0, [0, 1, 5]].tolist() == [1.0, 2.0, 0.25]
    assert scales.shape == (2, 6) and packed.view(torch.uint8)[:, 656 + 24 :].max() == 0
    assert packed[0, :656].float().unique().tolist() == [0.0, 448.0]


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 144, 272), (0, 128, 128)])
def test_weights_are_cast_by_blocks(shape) -> None:
    numbers = torch.randn(shape)
    values, scales = scaled.block_quantized(numbers)
    right, right_scales = cast(numbers, (128, 128))
    assert values.is_contiguous() and torch.equal(values.float(), right.float())
    assert torch.equal(scales, right_scales)


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
@pytest.mark.ranks((1, "gloo"), (2, "gloo"))
def test_moe_layer_is_cast_to_fp8(failures: Failures, recipe: str) -> None:
    """A layer that was cast computes as the op with the same casts; its state dict loads into another one that was cast."""
    experts = 2 * dist.get_world_size() + 1
    layers = [overlap_torch.nn.MoE(HIDDEN, INNER, experts, bias=True) for _ in range(2)]
    first, second = layers
    own = {name: parameter.to_local().detach() for name, parameter in first.named_parameters()}
    for layer in layers:
        layer.cast_to_fp8(recipe)
    second.load_state_dict(overlap_torch.nn.full_state_dict(first))
    case = Case(tokens=(9,) * dist.get_world_size(), experts=(experts,) + (0,) * 3)
    given = operands_of(case, dist.get_rank()) | {"ids": torch.arange(27).view(9, 3) % experts}
    tokens = [given[name] for name in ("x", "ids", "shares")]
    block = (128, 128) if recipe == "blockwise" else None
    (gate_up, scale_gate_up), (down, scale_down) = (
        cast(own[name], block) for name in ("gate_up", "down")
    )
    right = overlap_torch.moe(
        *tokens,
        gate_up,
        down,
        scale_gate_up=scale_gate_up,
        scale_down=scale_down,
        num_experts=experts,
        gate_up_bias=own["gate_up_bias"].bfloat16(),
        down_bias=own["down_bias"].bfloat16(),
    )
    for layer in layers:
        failures.expect_equal(layer(*tokens), right)
    failures.raises("once, but they are in float8_e4m3fn", first.cast_to_fp8)
    failures.raises("rowwise", first.cast_to_fp8, "tensorwise")


@pytest.mark.ranks((2, "gloo"))
def test_moe_of_fp8_weights_compiles(failures: Failures) -> None:
    world, ops = dist.get_world_size(), torch.ops.overlap
    whole = Case(experts=(2,) * world, tokens=(9,) * world)
    own = operands_of(whole, dist.get_rank())
    for shares_on, by_blocks, options in (
        ("output", False, {"backend": "aot_eager", "dynamic": True}),
        ("input", False, {"backend": "inductor"}),
        ("input", True, {"backend": "inductor", "dynamic": True}),
    ):
        case = replace(whole, shares_on=shares_on, by_blocks=by_blocks)
        function = functools.partial(call, case, operands_of(case, dist.get_rank()), None)
        with torch.no_grad():
            compiled = torch.compile(function, fullgraph=True, **options)
            failures.expect_equal(compiled(), function(), shares_on)
    packed = ops._moe_pack(own["x"], None, False)
    offs, form = torch.tensor([4, 9], dtype=torch.int32), Gate().form(False)
    arguments = (packed, own["gate_up"], None, own["scale_gate_up"], None, None, None, offs)
    for op, given in (
        (ops._moe_pack, (own["x"], offs, False)),
        (ops._moe_pack, (own["x"], offs, True)),
        (ops._moe_scaled_hidden, (*arguments, *form)),
    ):
        torch.library.opcheck(op, given, test_utils="test_faketensor")
