"""An all-reduce, or a GEMM and its all-reduce, with residual, RMSNorm and a cast to fp8 after it."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from overlap_torch._layers.sharding import Sum, checked_number
from overlap_torch._ops import Group, composition, fakes, gemm_allreduce, group_name
from overlap_torch._ops.collectives import USUAL_INVARIANCE
from overlap_torch._ops.fakes import DTYPES
from overlap_torch._ops.gradients import needs_recording, transforms_are_active
from overlap_torch._ops.nested import check_tensors
from overlap_torch._ops.ordering import register_fake

# The arguments of `_composed` beside operands and group.
_HOW = ("eps", "gain_offset", "round_before_gain", "quantize", "return_norm", "invariance")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_QUANTIZE = (None, "tensorwise", "rowwise", "blockwise")
_GRAIN, _MOST_COLUMNS = 8, 16384  # of rows that the kernels take
# Up to this number of rows the compile pass and the integrations fuse the norm: the kernels were faster than a compiled norm after
# an all-reduce in all measured cases (docs/serving.md). Under OVERLAP_INVARIANCE=batch a row's norm may not depend on their number.
MOST_ROWS = 512 if USUAL_INVARIANCE == "none" else 0

# The norm or its cast, the sum, and the norm that was cast.
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Results = tuple[Result, torch.Tensor] | tuple[Result, torch.Tensor, torch.Tensor]
Operand = torch.Tensor | None


def _check_how(op: str, scale: Operand, quantize: str | None, return_norm: bool) -> None:
    if quantize not in _QUANTIZE:
        allowed = ", ".join(map(repr, _QUANTIZE))
        raise ValueError(f"{op}: quantize is {quantize!r}; allowed are {allowed}")
    if (quantize == "tensorwise") != (scale is not None):
        given = "None" if scale is None else "given"
        raise ValueError(
            f"{op}: quantize is {quantize!r} and scale is {given}; give a scale with quantize='tensorwise', and "
            "with nothing else"
        )
    if quantize is None and return_norm:
        raise ValueError(
            f"{op}: return_norm is True and quantize is None, where the first result is the norm already; "
            "leave return_norm out, or name how it is quantized"
        )


def _check_operands(op: str, terms: torch.Tensor, weight: Operand, *others: Operand) -> None:
    """``others``: residual, gain, bias and the cast's scale."""
    if weight is not None and not is_dynamo_compiling():  # a compiler's fakes check these
        fakes.check_operands(op, terms, weight, None)
    if terms.dim() < 1:
        raise ValueError(f"{op}: partial must be [..., N], but is a number")
    if terms.dtype not in DTYPES:
        raise TypeError(
            f"{op}: the operands are {terms.dtype}, but supported are {DTYPES}; convert them"
        )
    columns = terms.shape[-1] if weight is None else weight.shape[0]
    names = ("residual", "norm_weight", "bias", "scale")
    shapes = ((*terms.shape[:-1], columns), (columns,), (columns,), ())
    for name, operand, shape in zip(names, others, shapes, strict=True):
        if operand is None:
            continue
        dtype = torch.float32 if name == "scale" else terms.dtype
        if tuple(operand.shape) != shape and (name != "scale" or operand.numel() != 1):
            raise ValueError(
                f"{op}: {name} must have the shape {shape}, but has {tuple(operand.shape)}"
            )
        if operand.dtype != dtype:
            raise TypeError(f"{op}: {name} is {operand.dtype}, but must be {dtype}; convert it")
        if operand.device != terms.device:
            raise ValueError(
                f"{op}: {name} is on {operand.device}, but the terms on {terms.device}; move them to one device"
            )


@register_fake("overlap::allreduce_rmsnorm")
def _fake(
    input, weight, residual, norm_weight, bias=None, scale=None, *, quantize=None, return_norm=False, **how
):  # fmt: skip
    _check_operands("allreduce_rmsnorm", input, weight, residual, norm_weight, bias, scale)
    shape = (*input.shape[:-1], input.shape[-1] if weight is None else weight.shape[0])
    norm, total = input.new_empty(shape), input.new_empty(shape)
    if quantize is None:
        return [norm, total]
    results = [input.new_empty(shape, dtype=torch.float8_e4m3fn), total]
    if quantize == "rowwise":
        results.append(input.new_empty((*shape[:-1], 1), dtype=torch.float32))
    if quantize == "blockwise":  # block after block: a block's scales for all rows
        blocks = (shape[-1] + 127) // 128
        scales = input.new_empty((blocks, *shape[:-1]), dtype=torch.float32)
        results.append(scales.movedim(0, -1))
    return [*results, norm] if return_norm else results


def kernels_finish(dtype: torch.dtype, columns: int | torch.SymInt) -> bool:
    """True if the kernels finish rows of this dtype and number of columns, which must be known."""
    known = isinstance(columns, int) and columns % _GRAIN == 0 and 0 < columns <= _MOST_COLUMNS
    return known and dtype in (torch.bfloat16, torch.float16)


def _kernels_take(terms: torch.Tensor, weight: Operand) -> bool:
    columns = terms.shape[-1] if weight is None else weight.shape[0]
    return terms.is_cuda and kernels_finish(terms.dtype, columns)


def _composed(
    input: torch.Tensor,
    weight: Operand,
    residual: Operand,
    norm_weight: torch.Tensor,
    bias: Operand = None,
    scale: Operand = None,
    *,
    invariance: str | None = None,
    group: str,
    **how: Any,
) -> list[torch.Tensor]:
    """All-reduce, or GEMM and all-reduce, then PyTorch's operators; on CPU this is the op itself."""
    if weight is None:
        total = Sum.apply(input, group, invariance) if input.numel() > 0 else input.clone()
    else:
        total = gemm_allreduce(input, weight, group=group, invariance=invariance)
    return composition.finish(total, residual, norm_weight, bias, scale=scale, **how)


torch.library.impl("overlap::allreduce_rmsnorm", "cpu", _composed)


def _are_plain(*operands: Operand) -> bool:
    """True if nothing about these needs a look, which costs the host 1 us."""
    for operand in operands:
        if operand is None:
            continue
        if type(operand) not in _PLAIN or operand.layout is not torch.strided or operand.is_nested:
            return False
    return True


def _call(
    op: str,
    group: Group,
    terms: torch.Tensor,
    weight: Operand,
    others: tuple[Operand, ...],
    fused: bool,
    *values: Any,
) -> Results:
    """``values``: the arguments of _HOW."""
    name, how = group_name(group), dict(zip(_HOW, values, strict=True))
    *rest, scale = others
    quantize = how["quantize"]
    if terms is None or others[1] is None or not _are_plain(terms, *others):
        required = {"partial" if weight is None else "input": terms, "norm_weight": others[1]}
        optional = zip(("residual", "bias", "scale"), (others[0], *others[2:]), strict=True)
        given = {key: operand for key, operand in optional if operand is not None}
        check_tensors(op, **required, **given)
    for key in ("eps", "gain_offset"):
        if type(how[key]) is not float:  # a call's usual case writes no text
            checked_number(f"{op}: {key}", how[key])
    _check_how(op, scale, quantize, how["return_norm"])
    fakes.check_invariance(op, how["invariance"])
    operands = (terms, weight, *others)
    if is_dynamo_compiling():
        wanted = any(each is not None and each.requires_grad for each in operands)
        records = torch.is_grad_enabled() and wanted
    else:
        records = needs_recording(op, *operands)
    if records and quantize is not None:
        raise NotImplementedError(
            f"{op}: an operand requires grad, but a cast to fp8 has no gradient here (quantize={quantize!r}); leave "
            "quantize out and cast the norm, or detach the operands"
        )
    composes = records or (not is_dynamo_compiling() and transforms_are_active())
    if fused and not composes and _kernels_take(terms, weight):
        results = torch.ops.overlap.allreduce_rmsnorm.default(*operands, **how, group=name)
    else:
        _check_operands(op, *operands)
        results = _composed(*operands, **how, group=name)
    first, total, *rest = results
    if quantize in ("rowwise", "blockwise"):
        scales, *rest = rest
        first = (first, scales)
    return (first, total, *rest)


def allreduce_rmsnorm(
    partial: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: Group = None,
    eps: float = 1e-6,
    gain_offset: float = 0.0,
    round_before_gain: bool = False,
    quantize: str | None = None,
    scale: torch.Tensor | None = None,
    return_norm: bool = False,
    fused: bool = False,
    invariance: str | None = None,
) -> Results:
    """``all_reduce(partial)``, plus bias and residual, and the RMSNorm of the sum.

    The results are those of the unfused composition::

        total = all_reduce(partial, group=group)
        total = total if bias is None else total + bias
        total = total if residual is None else total + residual
        rows = total.float()
        norm = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
        if round_before_gain:
            norm = norm.to(total.dtype).float()
        norm = (norm * (norm_weight.float() + gain_offset)).to(total.dtype)
        return norm, total

    Every rank of the group calls it with the same shapes and dtype, in the same order of calls. The operands
    other than ``partial`` are the same on every rank, and so are the results.

    Args:
        partial: [..., N], this rank's term; bfloat16 or float16 for speed.
        residual: [..., N] or None, the same on every rank.
        norm_weight: [N], the gain of the norm.
        bias: [N] or None; added once, to the rounded sum.
        group: None (the default group), a process group's name, a ``ProcessGroup`` or a one-dimensional ``DeviceMesh``.
        eps: added to the mean of the squares.
        gain_offset: added to ``norm_weight``: 1.0 for Gemma's norms.
        round_before_gain: rounds the norm to the dtype before the gain, as transformers' Llama does; else once, after
            the gain, as ``torch.nn.functional.rms_norm`` does.
        quantize: None; or the norm is cast to ``float8_e4m3fn``: ``"tensorwise"`` by the given ``scale``,
            ``"rowwise"`` with a scale for each row, or ``"blockwise"`` with one for each 128 columns of a row. A row's
            scale is its largest absolute value divided by 448.
        scale: float32, one number, with ``quantize="tensorwise"``: values are ``norm / scale``.
        return_norm: returns the norm in ``partial``'s dtype, too, beside its cast.
        fused: False: the process group's all-reduce (after a GEMM: ``gemm_allreduce``), then PyTorch's addition and norm.
            True: on CUDA kernels of this package finish the rows, few rows in the all-reduce's own kernel. All ranks pass
            the same value.
        invariance: of the sum, as in :func:`overlap_torch.gemm_allreduce`; ``fused=True`` keeps the norm's rows apart, too.

    Returns:
        The norm and the sum, both [..., N], fresh, and equal on all ranks. With ``quantize`` the first result is the values
        in ``float8_e4m3fn``; with scales of rows or blocks it is a pair of values and scales. Scales are float32 [..., 1],
        or [..., ceil(N / 128)] with the rows of one block next to each other in memory, as ``torch._scaled_mm`` takes them.
        With ``return_norm`` the norm comes third.

    Gradients follow the composition, in reverse mode and of any order. The gradient of ``partial`` is the sum's: it is the
    same on every rank, and backward does not communicate. Casts have none. docs/serving.md says what runs when.

    Raises:
        ValueError: shapes or devices that do not fit, an unknown ``quantize``, a ``scale`` without it, or an unknown group.
        TypeError: operands of several dtypes, or of a dtype that the ops do not take.
        NotImplementedError: an operand has a tangent (forward mode), or requires grad and ``quantize`` is not None.
        RuntimeError: a first call inside a CUDA graph capture, or an earlier op that failed after it had returned (see
            :func:`overlap_torch.check`).
    """
    others, numbers = (residual, norm_weight, bias, scale), (eps, gain_offset, round_before_gain)
    how = (*numbers, quantize, return_norm, invariance)
    return _call("allreduce_rmsnorm", group, partial, None, others, fused, *how)


def gemm_allreduce_rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: Group = None,
    eps: float = 1e-6,
    gain_offset: float = 0.0,
    round_before_gain: bool = False,
    quantize: str | None = None,
    scale: torch.Tensor | None = None,
    return_norm: bool = False,
    fused: bool = False,
    invariance: str | None = None,
) -> Results:
    """:func:`allreduce_rmsnorm` of ``input @ weight.T``: the end of a decoder's half layer.

    Args:
        input: [..., K], this rank's part of the features.
        weight: [N, K], this rank's part, as in ``torch.nn.Linear``.
        residual: [..., N] or None, the same on every rank.

    The other arguments, the results, gradients and errors are as in :func:`allreduce_rmsnorm`. The product is rounded to
    the operands' dtype before it is summed, as in :func:`gemm_allreduce`.
    """
    check_tensors("gemm_allreduce_rmsnorm", weight=weight)
    others, numbers = (residual, norm_weight, bias, scale), (eps, gain_offset, round_before_gain)
    how = (*numbers, quantize, return_norm, invariance)
    return _call("gemm_allreduce_rmsnorm", group, input, weight, others, fused, *how)
