"""The checks of a mixture's calls, before anything is launched, and how rows travel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from overlap_torch._layers.sharding import checked_count
from overlap_torch._moe import ops
from overlap_torch._moe.activation import Gate
from overlap_torch._ops.fakes import DTYPES
from overlap_torch._ops.gradients import refuse_tangents, refuse_transforms
from overlap_torch._ops.group import place_of, reaches
from overlap_torch._ops.nested import check_tensors
from overlap_torch._ops.ways import note_way

Weights = torch.Tensor | Sequence[torch.Tensor]
BLOCK = 128  # numbers that share an fp8 scale, of a row; of a weight as many rows of them


class Operands(NamedTuple):
    """Tokens [T, H], ids and shares [T, K], and this rank's experts."""

    tokens: torch.Tensor
    ids: torch.Tensor
    shares: torch.Tensor
    gate_up: torch.Tensor  # or the gate's, with `up` beside it
    up: torch.Tensor | None
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


def experts_of_ranks(num_experts: int | Sequence[int], ranks: int) -> list[int]:
    several = isinstance(num_experts, Sequence) and not isinstance(num_experts, str)
    if several:
        found = [checked_count("a rank's number of experts", each) for each in num_experts]
    else:
        num_experts = checked_count("num_experts", num_experts)
        largest = -(-num_experts // ranks)
        found = [max(0, min(largest, num_experts - rank * largest)) for rank in range(ranks)]
    if len(found) != ranks or sum(found) == 0:
        raise ValueError(
            f"num_experts is {num_experts} for a group of {ranks} ranks: give the number of all experts, at least 1, or a list "
            "with the number of each rank's"
        )
    return found


def check_tokens(what: str, x: torch.Tensor, topk_ids: torch.Tensor) -> None:
    check_tensors(what, x=x, topk_ids=topk_ids)
    refuse_transforms(what)
    refuse_tangents(what, x)
    if x.dtype not in DTYPES:
        raise TypeError(f"{what} takes x in {named(DTYPES)}, but it is {x.dtype}")
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{what} takes topk_ids in int32 or int64, but they are {topk_ids.dtype}")
    if x.dim() < 1 or topk_ids.dim() != x.dim() or x.shape[:-1] != topk_ids.shape[:-1]:
        raise ValueError(
            f"{what} takes x [..., H] and topk_ids [..., K] with the same leading dims, but their shapes are {tuple(x.shape)} "
            f"and {tuple(topk_ids.shape)}"
        )
    if x.is_meta:
        raise ValueError(
            f"{what} reads topk_ids, but meta tensors have no values; trace with FakeTensorMode"
        )
    if x.device != topk_ids.device:
        raise ValueError(
            f"{what} takes x and topk_ids on one device, but they are on {x.device} and {topk_ids.device}"
        )


def check_shares(
    what: str, weights: torch.Tensor, shape: Sequence[int], like: torch.Tensor
) -> None:
    if tuple(weights.shape) != tuple(shape) or weights.device != like.device:
        raise ValueError(
            f"{what} takes topk_weights of the shape of topk_ids, {tuple(shape)}, on {like.device}, but they are "
            f"{tuple(weights.shape)} on {weights.device}"
        )
    refuse_tangents(what, weights)
    if weights.dtype not in DTYPES:
        raise TypeError(
            f"{what} takes topk_weights in {named(DTYPES)}, but they are {weights.dtype}"
        )


def named(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


class Way(NamedTuple):
    """How rows travel: the operator's arguments after ``align``. If ``max_rows`` is 0, the host waits for their number."""

    max_tokens: int
    max_rows: int
    peers: bool
    ranks_first: bool
    group: str


def check_way(sum_order: str, limits: tuple[int | None, int | None], transport: str | None) -> None:
    """Checks the options that say how rows travel."""
    if sum_order not in ("choices", "ranks"):
        raise ValueError(f'sum_order is "choices" or "ranks", but got {sum_order!r}')
    if transport not in (None, "peer", "nccl"):
        raise ValueError(f'transport is None, "peer" or "nccl", but got {transport!r}')
    if limits == (None, None):
        return
    for name, limit in zip(("max_tokens", "max_rows"), limits, strict=True):
        if limit is not None:
            checked_count(name, limit)
    if None in limits or min(limits) < 1:
        raise ValueError(
            f"max_tokens and max_rows are given together, each at least 1, but got {limits[0]} and {limits[1]}"
        )


def way_of(
    what: str,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    sum_order: str,
    limits: tuple[int | None, int | None],
    transport: str | None,
    group: str,
) -> Way:
    """Checks the options, which are the same on all ranks, and chooses what carries the rows. ``what``: the op whose report says so,
    or empty."""
    check_way(sum_order, limits, transport)
    max_tokens, max_rows = (limit or 0 for limit in limits)
    if max_rows and topk_ids.shape[:-1].numel() > max_tokens:
        raise ValueError(
            f"x has {topk_ids.shape[:-1].numel()} tokens, more than max_tokens={max_tokens}"
        )
    ranks, ranks_first = place_of(group)[0], sum_order == "ranks"
    choices, width = topk_ids.shape[-1], x.shape[-1]
    needed = max(ranks, ranks if ranks_first else choices) * max_tokens * width * x.element_size()
    why = ""
    if needed > ops.MOST_BYTES:
        why = f"max_tokens={max_tokens}: {needed} bytes of a rank's memory, more than {ops.MOST_BYTES}"
    elif ranks == 1 or choices == 0 or width == 0:
        why = f"{choices} experts of a token, rows of {width} numbers or a group of {ranks}"
    elif transport == "peer" or (transport is None and x.is_cuda):
        if not reaches(x.device, group):
            why = f"rows on {x.device}: the ranks do not map each other's memory (python -m overlap_torch doctor says why)"
    else:
        why = f"calls on {x.device.type}" if transport is None else f"transport={transport!r}"
    if why and transport == "peer":
        raise ValueError(f"peers do not carry {why}; leave transport out")
    if what and ranks > 1:
        note_way(what, group, why)
    return Way(max_tokens, max_rows, not why, ranks_first, group)


def by_rows(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """[..., N] to [T, N], as many leading dims as they have."""
    return [each.reshape(each.shape[:-1].numel(), each.shape[-1]) for each in tensors]


def one_weight(name: str, weights: Weights, pairs: bool) -> tuple[torch.Tensor, ...]:
    """A tensor [e, N, K], or a pair of them, from tensors or from lists with a tensor for each expert."""
    if isinstance(weights, torch.Tensor):
        return (weights,)
    if not hasattr(weights, "__len__"):  # a list of any kind
        raise TypeError(
            f"moe: {name} must be a tensor or a list of tensors, but it is a {type(weights).__name__}"
        )
    for weight in weights:
        if not isinstance(weight, torch.Tensor):
            raise TypeError(
                f"moe: {name} is a list of tensors, but holds a {type(weight).__name__}"
            )
    if pairs and len(weights) == 2 and all(weight.dim() == 3 for weight in weights):
        return tuple(weights)
    if len(weights) == 0 or any(weight.dim() != 2 for weight in weights):
        raise ValueError(
            f"{name} is a tensor [e, N, K]{', a pair of them,' if pairs else ''} or a list of e tensors [N, K], but got shapes "
            f"{[tuple(weight.shape) for weight in weights]}; a rank without experts gives a tensor [0, N, K]"
        )
    if len({weight.shape for weight in weights}) > 1:
        raise ValueError(
            f"{name} is a list of e tensors of one shape [N, K], but got {[tuple(weight.shape) for weight in weights]}"
        )
    return (torch.stack(tuple(weights)),)


def check_experts(
    x, gate_up, down, gate_up_bias, down_bias, activation: Gate, own: int, dtype: torch.dtype
) -> None:
    """Raises ValueError or TypeError unless weights, of this dtype, and biases, of x's, are those of `own` experts of x's
    width."""
    width, inner = x.shape[-1], down.shape[-1] if down.dim() == 3 else 0
    columns = (2 if activation.gated else 1) * inner // len(gate_up)
    expected = [
        *(("gate_up", weight, (own, columns, width), dtype) for weight in gate_up),
        ("down", down, (own, width, inner), dtype),
        ("gate_up_bias", gate_up_bias, (own, columns * len(gate_up)), x.dtype),
        ("down_bias", down_bias, (own, width), x.dtype),
    ]
    for name, tensor, shape, wanted in expected:
        if tensor is None:
            continue
        refuse_tangents("moe", tensor)
        if tuple(tensor.shape) != shape or tensor.device != x.device:
            raise ValueError(
                f"moe takes {name} of shape {shape} on {x.device} for this rank's {own} experts, x [..., {width}] and down "
                f"{tuple(down.shape)}, but it is {tuple(tensor.shape)} on {tensor.device}"
            )
        if tensor.dtype != wanted:
            whose = "x's dtype" if wanted == x.dtype else "beside fp8 weights or scales"
            raise TypeError(f"moe takes {name} in {wanted}, {whose}, but it is {tensor.dtype}")


def check_scaled(x: torch.Tensor, down: torch.Tensor, has_backward: bool) -> None:
    """Raises ValueError or TypeError for what fp8 weights do not go with."""
    if x.dtype != torch.bfloat16:
        raise TypeError(
            f"moe takes x in bfloat16 beside fp8 weights, but it is {x.dtype} (under autocast: cast)"
        )
    check_scaled_sizes("moe", x.shape[-1], down.shape[-1])
    if has_backward:
        raise ValueError(
            "moe has no gradients beside fp8 weights, but x, topk_weights, a bias or a scale requires one: call it under "
            "torch.no_grad()"
        )


def check_scaled_sizes(what: str, hidden: int, inner: int) -> None:
    if min(hidden, inner) < 16 or hidden % 16 or inner % 16:
        raise ValueError(
            f"{what} takes H and I that are multiples of 16 beside fp8 weights, but they are {hidden} and {inner}"
        )


def present(*tensors: torch.Tensor | None) -> list[torch.Tensor]:
    return [each for each in tensors if each is not None]


def scales_given(scale_gate_up: object, scale_down: object) -> list[torch.Tensor]:
    """The scales of the weights before the gate and of down; none if none are given."""
    if scale_gate_up is None and scale_down is None:
        return []
    pair = isinstance(scale_gate_up, (list, tuple))
    given = [*(scale_gate_up if pair else (scale_gate_up,)), scale_down]
    if any(not isinstance(each, torch.Tensor) for each in given):
        raise TypeError(
            "moe takes scale_gate_up, a tensor or a pair of them, and scale_down, a tensor, both or neither, but got "
            f"{[type(each).__name__ for each in given]}"
        )
    return given


def block_shape(weight: torch.Tensor) -> tuple[int, int, int]:
    """The shape of a weight's scales of blocks."""
    experts, rows, columns = weight.shape
    return experts, -(-rows // BLOCK), -(-columns // BLOCK)


def scales_of(
    given: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], x: torch.Tensor
) -> list[torch.Tensor]:
    """Each weight's scales, contiguous: [e, N], or [e, ceil(N / 128), ceil(K / 128)]. Raises ValueError or TypeError if they do not
    fit."""
    names = [*["scale_gate_up"] * (len(weights) - 1), "scale_down"]
    if len(given) != len(weights):
        raise ValueError(
            f"moe takes scale_gate_up for {len(weights) - 1} tensors gate_up, and scale_down, but got {len(given)} scales in all; "
            "experts' own scales go into one tensor by torch.stack"
        )
    by_blocks = []
    for name, scale, weight in zip(names, given, weights, strict=True):
        refuse_tangents("moe", scale)
        own, rows, _ = weight.shape
        blocks = block_shape(weight)
        if tuple(scale.shape) not in ((own, rows), (own, rows, 1), blocks):
            raise ValueError(
                f"moe takes {name} of shape {(own, rows)} or {(own, rows, 1)}, a number for each row of a weight, or {blocks}, one for "
                f"each block of {BLOCK} rows and columns, but it is {tuple(scale.shape)}"
            )
        by_blocks.append(tuple(scale.shape) == blocks)
        if scale.device != x.device or scale.dtype != torch.float32:
            raise TypeError(
                f"moe takes {name} in float32 on {x.device}, but it is {scale.dtype} on {scale.device}"
            )
    if len(set(by_blocks)) > 1:
        raise ValueError(
            "moe takes scales of rows for all weights, or of blocks for all, but got shapes "
            f"{[tuple(scale.shape) for scale in given]}"
        )
    return [
        (scale if by_blocks[0] else scale.reshape(weight.shape[:2])).contiguous()
        for scale, weight in zip(given, weights, strict=True)
    ]


def check_options(shares_on: str, save: str, interleaved: bool) -> None:
    if not isinstance(interleaved, bool):
        raise TypeError(f"interleaved is True or False, but got {interleaved!r}")
    if shares_on not in ("output", "hidden", "input"):
        raise ValueError(f'shares_on is "output", "hidden" or "input", but got {shares_on!r}')
    if save not in ("rows", "gate_up", "nothing") or (save != "rows" and shares_on == "input"):
        raise ValueError(
            'save is "rows", "gate_up" or "nothing", and only "rows" with shares_on="input", but got '
            f"{save!r} with shares_on={shares_on!r}"
        )
