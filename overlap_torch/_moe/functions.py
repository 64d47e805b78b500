"""``moe``, and its two halves: ``moe_dispatch`` and ``moe_combine``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from overlap_torch._layers.linear import as_under_autocast
from overlap_torch._layers.sharding import checked_count
from overlap_torch._moe import expert_op, ops, scaled  # noqa: F401, registers operators
from overlap_torch._moe.activation import Gate
from overlap_torch._moe.checks import (
    Operands,
    Way,
    Weights,
    by_rows,
    check_experts,
    check_options,
    check_scaled,
    check_shares,
    check_tokens,
    experts_of_ranks,
    named,
    one_weight,
    present,
    scales_given,
    scales_of,
    way_of,
)
from overlap_torch._moe.products import gate_fits
from overlap_torch._ops.composition import accumulated
from overlap_torch._ops.eager import is_seen
from overlap_torch._ops.fakes import DTYPES
from overlap_torch._ops.gradients import refuse_tangents, refuse_transforms
from overlap_torch._ops.group import Group, group_name, place_of
from overlap_torch._ops.nested import check_tensors

_ops = torch.ops.overlap


class Route(NamedTuple):
    """How the rows of a :func:`moe_dispatch` travelled; :func:`moe_combine` takes it.

    ``offs``: int32 [e], where each expert's rows end, as ``torch.nn.functional.grouped_mm`` takes it. With ``max_rows``,
    rows after the last end have undefined contents. ``counts``: int64 [e], each expert's number of rows without padding.
    ``shape``: the shape of the call's ``topk_ids``. Only :func:`moe_combine` reads the others.
    """

    offs: torch.Tensor
    counts: torch.Tensor
    shape: tuple[int, ...]
    routes: ops.Routes
    ranks_first: bool
    group: str


def moe_dispatch(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    num_experts: int | Sequence[int],
    align: int = 1,
    sum_order: str = "choices",
    max_tokens: int | None = None,
    max_rows: int | None = None,
    transport: str | None = None,
    group: Group = None,
) -> tuple[torch.Tensor, Route]:
    """Sends each token to the experts that it chose; a token travels once to each rank that holds some of them.

    Every rank of the group calls it, with the same H, K, dtype and ``num_experts``. Ranks may have different numbers of
    tokens, also 0. The host waits once, for the numbers of rows; over peers the tokens travel meanwhile. With ``max_rows``
    the host does not wait over peers, and a CUDA graph can capture the call after a plain one.

    Args:
        x: [..., H], this rank's tokens: bfloat16, float16, float32 or float64.
        topk_ids: [..., K], int32 or int64: each token's experts, numbered over all ranks. Ids outside [0, E) are ignored. A
            token may choose an expert twice.
        num_experts: the number E of all ranks' experts, divided as ``torch.chunk`` divides: rank r has those after rank r -
            1's. A list gives each rank's number, which may be 0.
        align: the rows of an expert are padded with zeros to a multiple of this.
        sum_order: the order in which :func:`moe_combine` sums a token's results, and backward its rows' gradients.
            ``"choices"``: every row travels, and the token's rank sums in the choices' order, so that the sum has the same
            bits in any batch and on any number of ranks. ``"ranks"``: each rank first sums its own experts' rows of a
            token, in the choices' order, rounds the sum, and sends one row; the token's rank adds these rows in the ranks'
            order. Fewer rows travel if a token has several experts on a rank.
        max_tokens, max_rows: the most tokens of any rank, and the number of rows that this call returns; give both or none,
            the same on all ranks. More rows are an error; no row is dropped.
        transport: ``"peer"``: kernels store rows in memory that the ranks map into each other, in slots of up to 1 GiB.
            ``"nccl"``: the group's collectives, gloo's too. None: peers, if they can carry the call (only on CUDA).
        group: None (the default group), a process group's name, a ``ProcessGroup`` or a one-dimensional ``DeviceMesh``.

    Returns:
        The rows of this rank's experts [R, H], fresh, in order of expert, source rank, token and choice; and the
        :class:`Route`. With ``max_rows`` R is ``max_rows``, and rows after ``route.offs[-1]`` have undefined contents.

    Gradients are in reverse mode, of any order. A token's gradient is the sum of its rows' gradients, in the choices'
    order. Every rank takes part in backward.

    Raises:
        ValueError: shapes, devices, numbers of experts or an ``align`` that do not fit, or an unknown group.
        TypeError: dtypes that do not fit, nested tensors, or a ``group`` that is none of the above.
        RuntimeError: on CPU, ranks whose calls differ; see :func:`overlap_torch.check` for CUDA. Or more rows than
            ``max_rows``: over peers the next op or ``check()`` raises on all ranks, and the group cannot be used any more.
    """
    name = group_name(group)
    check_tokens("moe_dispatch", x, topk_ids)
    align = checked_count("align", align)
    if align < 1:
        raise ValueError(f"align is a number of rows, at least 1, but is {align}")
    experts = experts_of_ranks(num_experts, place_of(name)[0])
    way = way_of("moe_dispatch", x, topk_ids, sum_order, (max_tokens, max_rows), transport, name)
    tokens, ids = by_rows(x, topk_ids)
    rows, offs, counts, *routes = _ops.moe_dispatch(tokens, ids, experts, align, *way)
    return rows, Route(offs, counts, tuple(topk_ids.shape), tuple(routes), *way[3:])


def moe_combine(
    results: torch.Tensor, route: Route, topk_weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Sends the experts' results back to their tokens, and sums them there, weighted.

    Products with shares and sums are in float32 (float64 for float64). Each result travels back, and sums are made in the
    choices' order and rounded once. So a sum has the same bits in any batch and for any number of ranks. With the
    dispatch's ``sum_order="ranks"`` a rank sends only its sum of a token's results. Every rank of the dispatch's group
    calls it.

    Args:
        results: [R, D], a row for each row of :func:`moe_dispatch`; bfloat16, float16, float32 or float64. Padding is not read.
        route: the :class:`Route` that the dispatch returned.
        topk_weights: [..., K], the shares, floating point; shares of ignored ids do not count. None: all are 1.

    Returns:
        [..., D], fresh, of the results' dtype; zeros for a token without routes.

    Gradients are in reverse mode, of any order, of results and shares. Backward sends a token's gradient once to a rank.

    Raises:
        ValueError: shapes or devices that do not fit the route.
        TypeError: dtypes that do not fit.
        RuntimeError: as :func:`moe_dispatch`.
    """
    if not isinstance(route, Route):
        raise TypeError(
            f"moe_combine takes the Route that moe_dispatch returned, but got a {type(route).__name__}"
        )
    check_tensors("moe_combine", results=results)
    rows = route.routes[3].shape[0]
    refuse_tangents("moe_combine", results)
    refuse_transforms("moe_combine")
    if results.dim() != 2 or results.shape[0] != rows:
        raise ValueError(
            f"moe_combine takes results [R, D] with the dispatch's R = {rows} rows, but their shape is {tuple(results.shape)}"
        )
    if results.dtype not in DTYPES:
        raise TypeError(
            f"moe_combine takes results in {named(DTYPES)}, but they are {results.dtype}"
        )
    if results.device != route.offs.device:
        raise ValueError(
            f"moe_combine takes results on the dispatch's {route.offs.device}, but they are on {results.device}"
        )
    if topk_weights is not None:
        check_tensors("moe_combine", topk_weights=topk_weights)
        check_shares("moe_combine", topk_weights, route.shape, results)
    *leading, choices = route.shape
    tokens = torch.Size(leading).numel()
    shares = None if topk_weights is None else topk_weights.reshape(tokens, choices)
    output = _ops.moe_combine(results, shares, tokens, choices, *route.routes, *route[4:])
    return output.view(*leading, results.shape[1])


def moe(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up: Weights,
    down: Weights,
    *,
    num_experts: int | Sequence[int] | None = None,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str | Gate = "silu",
    interleaved: bool = False,
    scale_gate_up: Weights | None = None,
    scale_down: torch.Tensor | None = None,
    shares_on: str = "output",
    save: str = "rows",
    sum_order: str = "choices",
    max_tokens: int | None = None,
    max_rows: int | None = None,
    transport: str | None = None,
    group: Group = None,
) -> torch.Tensor:
    """A mixture of experts over ranks: sends tokens to their experts' ranks, computes there, sends results back, sums them.

    It computes what this composition computes::

        rows, route = moe_dispatch(x, topk_ids, num_experts=num_experts, group=group)
        hidden = grouped_mm(rows, gate_up.transpose(1, 2), offs=route.offs)
        hidden = silu(gate) * up                                # in float32, rounded once
        results = grouped_mm(hidden, down.transpose(1, 2), offs=route.offs)
        moe_combine(results, route, topk_weights)

    Every rank of the group calls it, as :func:`moe_dispatch`, with the same H, K and dtype. Ranks may have different
    numbers of tokens, rows and experts, also 0. docs/experts.md says which operands run by which GEMM.

    **fp8.** Weights may be float8_e4m3fn, with a scale for each of their rows; x is then bfloat16, and H and I are multiples of
    16. Each token, and each row of hidden, is cast to float8_e4m3fn with its own scale: its largest absolute value divided by
    448. Tokens travel in fp8, results in bfloat16. A product is the sum times both scales, rounded to bfloat16; on Hopper the
    tensor cores' sums are less precise than float32. There are no gradients.

    **fp8 by blocks**, as in checkpoints of DeepSeek-V3 and Qwen3: a scale for each block of 128 rows and 128 columns of a
    weight, and one for each 128 numbers of a token and of hidden. A sum over 128 numbers is multiplied by both scales, and these
    sums are added in float32. All ranks give scales of rows, or all give scales of blocks, also a rank without experts.

    Args:
        x, topk_ids, group: as :func:`moe_dispatch`.
        topk_weights: [..., K], the shares, floating point.
        gate_up: [e, 2I, H], the gate's rows first, as in ``torch.nn.Linear``; a pair (gate, up), each [e, I, H]; or a list of e
            tensors. [e, I, H] without a gate.
        down: [e, H, I], or a list of e tensors. Contiguous along either of the last dims for speed.
        num_experts: as :func:`moe_dispatch`; None: every rank has e.
        gate_up_bias, down_bias: [e, 2I] and [e, H], or None.
        activation: a name or a :class:`Gate`.
        interleaved: whether rows of gate and up alternate in ``gate_up``, which is then one tensor or a list.
        scale_gate_up: float32 [e, 2I] or [e, 2I, 1], with fp8 weights: an fp8 number times its scale is the weight. By blocks
            [e, ceil(2I / 128), ceil(H / 128)]. A pair for a pair; I in place of 2I without a gate.
        scale_down: float32 [e, H] or [e, H, 1]; by blocks [e, ceil(H / 128), ceil(I / 128)].
        shares_on: where the shares multiply: ``"output"``, ``"hidden"`` (before down) or ``"input"``.
        save: the tensors kept for backward besides the tokens. ``"rows"``: the experts' rows [R, H], and the products with
            gate_up. ``"gate_up"``: the products; backward dispatches the tokens again. ``"nothing"``: backward also
            computes the products again. With ``shares_on="input"`` only ``"rows"``. The same on all ranks.
        sum_order, max_tokens, max_rows, transport: as :func:`moe_dispatch`.

    Returns:
        [..., H], fresh, of x's dtype; zeros for a token without routes. Under autocast operands and result have autocast's
        dtype.

    x, topk_weights, weights and biases have gradients in reverse mode, of any order; an expert without rows gets zeros.
    Backward sends a token's gradient once to a rank, and every rank takes part in it.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`moe_dispatch`, and for weights, biases or options that do not fit.
        NotImplementedError: an operand has a tangent (forward mode), or a transform of ``torch.func`` is active; the two halves
            raise it, too.
    """
    name = group_name(group)
    gate = Gate.of(activation)
    check_options(shares_on, save, interleaved)
    check_tensors("moe", x=x, topk_ids=topk_ids, topk_weights=topk_weights)
    gate_up, (down,) = one_weight("gate_up", gate_up, gate.gated), one_weight("down", down, False)
    if interleaved and len(gate_up) == 2:
        raise ValueError("interleaved= is for one gate_up, but got a pair (gate, up)")
    operands = (x, gate_up_bias, down_bias, *gate_up, down)
    check_tensors("moe", gate_up=gate_up[0], up=gate_up[-1], down=down)
    for name_of, bias in (("gate_up_bias", gate_up_bias), ("down_bias", down_bias)):
        if bias is not None:
            check_tensors("moe", **{name_of: bias})
    if down.dim() != 3:
        raise ValueError(
            f"moe takes down [e, H, I], or a list of e tensors [H, I], but its shape is {tuple(down.shape)}"
        )
    scales = scales_given(scale_gate_up, scale_down)
    fp8 = len(scales) > 0 or scaled.FP8 in {each.dtype for each in operands[3:]}
    cast = as_under_autocast(*operands[: 3 if fp8 else None])
    x, gate_up_bias, down_bias, *gate_up, down = (*cast, *operands[len(cast) :])
    check_tokens("moe", x, topk_ids)
    check_shares("moe", topk_weights, topk_ids.shape, x)
    (ranks, rank), own = place_of(name), down.shape[0]
    experts = experts_of_ranks([own] * ranks if num_experts is None else num_experts, ranks)
    has_backward = torch.is_grad_enabled() and any(
        each.requires_grad for each in present(*operands, topk_weights, *scales)
    )
    if fp8:
        check_scaled(x, down, has_backward)
    dtype = scaled.FP8 if fp8 else x.dtype
    check_experts(x, gate_up, down, gate_up_bias, down_bias, gate, experts[rank], dtype)

    way = way_of("moe", x, topk_ids, sum_order, (max_tokens, max_rows), transport, name)
    form, up = gate.form(interleaved), gate_up[1] if len(gate_up) == 2 else None
    tokens, ids, shares = by_rows(x, topk_ids, topk_weights)
    given = Operands(tokens, ids, shares, gate_up[0], up, gate_up_bias, down, down_bias)
    if fp8:
        scales = scales_of(scales, [*gate_up, down], x)
        output = scaled.experts(given, scales, form, shares_on, experts, way)
    else:
        keep = has_backward and save != "nothing"
        output = _computed(given, form, shares_on, (keep, save == "rows"), experts, way)
    return output.view(*topk_ids.shape[:-1], down.shape[1])


def _computed(
    given: Operands, form: tuple, shares_on: str, kept: tuple[bool, bool], experts, way: Way
) -> torch.Tensor:
    """`moe` of operands of one type. ``kept``: whether products stay for backward, and rows."""
    tokens, ids, shares, *weights, down, down_bias = given
    keep, keep_rows = kept
    # The experts' backward sends the tokens' gradients home itself, unless shares come between tokens and rows.
    direct, early = shares_on != "input", shares_on == "hidden"
    # The GPU waits for the host after the number of rows is known: these calls leave the dispatcher out.
    short = direct and not is_seen(*present(*given))
    wide, of_rows = accumulated(tokens.dtype), None
    fits = short and gate_fits(tokens, *weights, down.shape[0], *form[-2:])
    with torch.set_grad_enabled(torch.is_grad_enabled() and not direct):
        dispatch = ops.dispatch if short else _ops.moe_dispatch
        rows, offs, _, *routes = dispatch(tokens, ids, experts, 1, *way)
        if shares_on != "output":
            of_rows = ops.row_shares(shares, routes, way.group, wide)
        if not direct:
            rows = (rows * of_rows).to(tokens.dtype)
    with torch.no_grad():
        multiply = _ops._moe_grouped if fits else _ops._moe_hidden
        how = (of_rows if early else None, offs, *form, keep)
        hidden, product, product_up = multiply(rows, *weights, *how)
    parts = (
        hidden,
        product if keep else None,
        product_up if keep and given.up is not None else None,
    )
    left = (*weights, down, down_bias, shares if direct else None, offs)
    how = (early, *ids.shape, *routes, way.ranks_first, keep_rows, way.group)
    return _ops._moe_experts(tokens if direct else None, rows, *parts, *left, *form, *how)


def shares_of_rows(weights: torch.Tensor, route: Route) -> torch.Tensor:
    """[..., K] to [R, 1]: each row's share."""
    return ops.row_shares(weights, route.routes, route.group, weights.dtype)
