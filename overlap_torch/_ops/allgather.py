"""``g = all_gather(input, dim 0)``; ``(g @ weight.T + bias, g)``, for one weight or several."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import overload

import torch
from torch.nn.functional import ScalingType

from overlap_torch._ops import eager, fakes, scaled
from overlap_torch._ops.gradients import register_vmap
from overlap_torch._ops.group import Group, world_size
from overlap_torch._ops.ordering import register_fake

Biases = Sequence[torch.Tensor | None]

_op = eager.Op(torch.ops.overlap.allgather_gemm.default)
_op_weights = eager.Op(torch.ops.overlap.allgather_gemm.weights)
_op_scaled = eager.Op(torch.ops.overlap.allgather_gemm.scaled)
_op_scaled_weights = eager.Op(torch.ops.overlap.allgather_gemm.scaled_weights)


def _fake(
    input, weights, biases, scale_input=None, scale_weights=None, *, dim=0, group, shared_scale_input=False, **how
):  # fmt: skip
    op, world = "allgather_gemm", world_size(group)
    place = fakes.row_dim(op, input, dim)
    fakes.check_number_of_biases(op, weights, biases)
    operands = (weights, biases or [None] * len(weights), scale_input, scale_weights)
    dtype, recipe = scaled.checked(op, input, *operands, dim=dim, **how)
    torch._check_value(
        recipe == "tensor" or not shared_scale_input,
        lambda: f"{op}: shared_scale_input is for TensorWise scales",
    )
    leading = fakes.with_size(input.shape[:-1], place, input.shape[place] * world)
    outputs = [input.new_empty((*leading, weight.shape[0]), dtype=dtype) for weight in weights]
    gathered = input.new_empty((*leading, input.shape[-1]))
    if recipe is None:
        return outputs, gathered
    if recipe == "tensor":
        shape = [1 if shared_scale_input else world]
    else:
        shape = fakes.with_size(scale_input.shape, 0, scale_input.shape[0] * world)
    return outputs, gathered, scale_input.new_empty(shape)


def _fake_of_one(input, weight, bias=None, scales=(), **how):
    (output,), *others = _fake(input, [weight], [bias], *scales, **how)
    return output, *others


register_fake("overlap::allgather_gemm", _fake_of_one)
register_fake("overlap::allgather_gemm.weights", _fake)


@register_fake("overlap::allgather_gemm.scaled")
def _fake_scaled(input, weight, scale_input, scale_weight, bias=None, **how):
    return _fake_of_one(input, weight, bias, (scale_input, [scale_weight]), **how)


@register_fake("overlap::allgather_gemm.scaled_weights")
def _fake_scaled_weights(input, weights, scale_input, scale_weights, biases, **how):
    return _fake(input, weights, biases, scale_input, scale_weights, **how)


register_vmap(_op.overload)
register_vmap(_op_weights.overload)


@overload
def allgather_gemm(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    dim: int = 0,
    group: Group = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def allgather_gemm(
    input: torch.Tensor,
    weight: Sequence[torch.Tensor],
    bias: Biases | None = None,
    *,
    dim: int = 0,
    group: Group = None,
) -> tuple[list[torch.Tensor], torch.Tensor]: ...


@overload
def allgather_gemm(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: Group = None,
    scale_input: torch.Tensor,
    scale_weight: torch.Tensor,
    recipe_input: ScalingType | None = None,
    recipe_weight: ScalingType | None = None,
    output_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
    shared_scale_input: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


@overload
def allgather_gemm(
    input: torch.Tensor,
    weight: Sequence[torch.Tensor],
    bias: Biases | None = None,
    *,
    group: Group = None,
    scale_input: torch.Tensor,
    scale_weight: Sequence[torch.Tensor],
    recipe_input: ScalingType | None = None,
    recipe_weight: ScalingType | None = None,
    output_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
    shared_scale_input: bool = False,
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]: ...


def allgather_gemm(
    input,
    weight,
    bias=None,
    *,
    dim=0,
    group=None,
    scale_input=None,
    scale_weight=None,
    recipe_input=None,
    recipe_weight=None,
    output_dtype=torch.bfloat16,
    use_fast_accum=False,
    shared_scale_input=False,
):
    """``g = all_gather(input, dim)``, then ``(g @ weight.T + bias, g)``, with the GEMM beside the gather.

    The result equals the unfused composition, here for dim 0::

        gathered = input.new_empty(input.shape[0] * world_size, *input.shape[1:])
        torch.distributed.all_gather_into_tensor(gathered, input.contiguous(), group=group)
        torch.nn.functional.linear(gathered, weight, bias), gathered

    Every rank of the group calls it with the same shapes and dtype, in the same order of calls; strides may differ.
    The composition runs if the fast path cannot.

    Args:
        input: [D0, ..., K], this rank's rows.
        weight: [N, K], this rank's part, as in ``torch.nn.Linear``; fastest if it is contiguous along one of its dims. Or a
            sequence of weights [N_i, K] (q, k, v; gate, up), for which the rows are gathered once. The output has the form
            of ``weight``: a tensor for a tensor, a list for a sequence, even with one weight.
        bias: [N] or None, this rank's part; for a sequence of weights None, or a sequence with one of these for each.
        dim: the input's dim along which the ranks' parts are put together, any except the last; for scaled operands 0.
        group: None (the default group), a process group's name, a ``ProcessGroup`` or a one-dimensional ``DeviceMesh``.
        scale_input, scale_weight, recipe_input, recipe_weight, output_dtype, use_fast_accum: for fp8 operands, as in
            :func:`overlap_torch.gemm_allreduce`; scales of several weights are a sequence. fp8 numbers and their
            scales travel, not the dequantised values.
        shared_scale_input: for TensorWise scales: True says that every rank has the same ``scale_input``, so it is not
            gathered.

    Returns:
        ``(output, g)``: fresh, contiguous tensors [world size * D0, ..., N] and [world size * D0, ..., K] of the operands'
        dtype; with another ``dim``, that dim is world size times as long. For a sequence of weights ``output`` is a list of
        tensors [world size * D0, ..., N_i]. Dtypes, accumulation and autocast are as in
        :func:`overlap_torch.gemm_allreduce`. Scaled operands return ``(output, g, scales)``: ``output`` has
        ``output_dtype``, ``g`` the input's dtype. ``scales`` are the gathered scales of ``g``: ``scale_input`` with dim 0
        world size times as long. For TensorWise scales they are [world size], one for each part of the rows, or [1] if they
        are shared.

    Gradients are in reverse mode, of any order. Backward keeps ``input`` and gathers it again, beside the
    :func:`overlap_torch.gemm_reducescatter` that makes its gradient; every rank has to run it. A gradient that reaches
    ``g`` is reduce-scattered and added. Gradients of weights and biases are for this rank's parts. Transforms of ``torch.func``
    and other errors are as in :func:`overlap_torch.gemm_allreduce`.

    Raises:
        ValueError: shapes or devices that do not fit, no such ``dim``, not one bias for each of several weights, or an unknown group.
        TypeError: one bias tensor for a sequence of weights.

    GEMM tiles wait for the arrival of their rows, as in Flux (arXiv 2406.06858).
    """
    scales = (scale_input, scale_weight, recipe_input, recipe_weight)
    unscaled = scaled.given("allgather_gemm", dim, *scales) is None
    if isinstance(weight, torch.Tensor):
        if not (bias is None or isinstance(bias, torch.Tensor)):
            raise TypeError(
                f"allgather_gemm: for one weight bias must be a tensor [N] or None, but it is a {type(bias).__name__}; "
                "give a sequence of weights with a sequence of biases"
            )
        if unscaled:
            return _op.call(group, input, weight, bias, dim)
        op = _op_scaled
    else:
        if not isinstance(weight, Iterable):
            raise TypeError(
                f"allgather_gemm: weight must be a tensor [N, K] or a sequence of them, but it is a {type(weight).__name__}"
            )
        weight = list(weight)
        if isinstance(bias, torch.Tensor):
            raise TypeError(
                f"allgather_gemm: for a sequence of weights (here {len(weight)}) bias must be None or a sequence with a tensor "
                f"[N] or None for each, but it is one tensor of shape {tuple(bias.shape)}; give a list, as bias.split(...) does"
            )
        bias = _listed("bias", bias or [])
        if unscaled:
            return _op_weights.call(group, input, weight, bias, dim)
        if isinstance(scale_weight, torch.Tensor):
            raise TypeError(
                f"allgather_gemm: for a sequence of weights (here {len(weight)}) scale_weight must be a sequence with a tensor "
                f"for each, but it is one tensor of shape {tuple(scale_weight.shape)}; give a list"
            )
        op, scale_weight = _op_scaled_weights, _listed("scale_weight", scale_weight)
    return op.call(
        group, input, weight, scale_input, scale_weight, bias,
        *scaled.numbers(scale_input, recipe_input, recipe_weight, output_dtype), use_fast_accum,
        shared_scale_input,
    )  # fmt: skip


def _listed(name: str, given: Iterable) -> list:
    """A list of one for each of several weights."""
    try:
        return list(given)
    except TypeError:
        kind = type(given).__name__
        raise TypeError(
            f"allgather_gemm: for a sequence of weights {name} must be a sequence, but it is a {kind}"
        ) from None
