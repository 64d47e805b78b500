"""``overlap_torch.replace_symm_mem()``: what calls PyTorch's own fused GEMMs, ``torch.ops.symm_mem.fused_*``, gets these ops.

A stand-in is a kernel of PyTorch's operator, registered over PyTorch's own on CUDA, and on CPU, where PyTorch has none. It
runs the op of this package if that takes the arguments. If not, it runs PyTorch's kernel on CUDA, and a composition of a GEMM
and collectives on CPU.
"""

from __future__ import annotations

import importlib
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.library import Library, get_kernel
from torch.nn.functional import ScalingType

from overlap_torch._ops import allgather_gemm, gemm_reducescatter
from overlap_torch._ops.collectives import start_all_gather, start_reduce_scatter, wait
from overlap_torch._ops.group import group_rank, world_size

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
_DEVICES = ("CUDA", "CPU")
_SCALED = (torch.float8_e4m3fn, torch.float8_e5m2)  # that the ops take, with scales
_SCALED_OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)

Scales = Sequence[torch.Tensor | None]


# --- fused_all_gather_matmul ----------------------------------------------------------------------------------


def _gather(
    A: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    gather_dim: int,
    group_name: str,
    *,
    return_A: bool = True,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """By `allgather_gemm`: the gathered dim in front, as the memory of the results has it in PyTorch's kernel too."""
    outputs, gathered = allgather_gemm(
        A.movedim(gather_dim, 0), [B.t() for B in Bs], group=group_name
    )
    outputs = [output.movedim(0, gather_dim) for output in outputs]
    return gathered.movedim(0, gather_dim) if return_A else None, outputs


def _gather_refused(
    A: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    gather_dim: int,
    group_name: str,
    *,
    return_A: bool = True,
) -> str:
    if not Bs:
        return "no B is given"
    if A.dim() >= 2 and gather_dim in (-1, A.dim() - 1):
        return "the features are gathered, not the rows"
    return _operands_refused(A, Bs)


def _gather_composed(
    A: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    gather_dim: int,
    group_name: str,
    *,
    return_A: bool = True,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    gathered = _all_gather(A, gather_dim, group_name)
    if gather_dim % A.dim() == A.dim() - 1:  # gathered K: contiguous, as PyTorch's is
        gathered = gathered.contiguous()
    outputs = [_in_front(gathered, gather_dim, lambda rows, B=B: rows @ B) for B in Bs]
    return gathered if return_A else None, outputs


def _in_front(
    gathered: torch.Tensor, dim: int, job: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """A product of all rows, whose memory has the gathered dim in front, as PyTorch's has, unless K was gathered."""
    if dim % gathered.dim() == gathered.dim() - 1:
        return job(gathered)
    return job(gathered.movedim(dim, 0)).movedim(0, dim)


# --- fused_matmul_reduce_scatter ------------------------------------------------------------------------------


def _scatter(
    A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> torch.Tensor:
    """By `gemm_reducescatter`; contiguous, as PyTorch's is."""
    output = gemm_reducescatter(A.movedim(scatter_dim, 0), B.t(), group=group_name)
    return output.movedim(0, scatter_dim).contiguous()


def _scatter_refused(
    A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> str:
    if reduce_op != "sum":
        return f"reduce_op is {reduce_op!r}, not 'sum'"
    if A.dim() >= 2 and scatter_dim == A.dim() - 1:
        return "the features are scattered, not the rows"
    if not 0 <= scatter_dim < A.dim():
        return f"scatter_dim is {scatter_dim}"
    if A.shape[scatter_dim] % world_size(group_name) != 0:
        return "the scattered dim does not divide by the ranks"
    return _operands_refused(A, [B])


def _scatter_composed(
    A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> torch.Tensor:
    return _reduce_scatter(A @ B, reduce_op, scatter_dim, group_name)


# --- the scaled ones ------------------------------------------------------------------------------------------


def _scaled_operands_refused(
    A: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    B_scales: Sequence[torch.Tensor],
    result_scales: Scales,
    out_dtypes: Sequence[torch.dtype | None],
) -> str:
    if A.dim() < 2 or any(B.dim() != 2 or B.shape[0] != A.shape[-1] for B in Bs):
        return "the shapes do not fit"
    for B, B_scale, result_scale, out_dtype in zip(
        Bs, B_scales, result_scales, out_dtypes, strict=True
    ):
        pair = (A.dtype, B.dtype)
        if not set(pair) <= set(_SCALED) or torch.float8_e4m3fn not in pair:
            return f"the dtypes are {A.dtype} and {B.dtype}"
        if B.device != A.device:
            return "the operands' devices differ"
        if B_scale.numel() != 1 and (*B_scale.shape,) != (1, B.shape[1]):
            return f"B_scale has the shape {(*B_scale.shape,)}"
        if B_scale.dtype != torch.float32:
            return f"B_scale is {B_scale.dtype}"
        if out_dtype not in _SCALED_OUTPUTS:
            return f"the result is {out_dtype or A.dtype}"
        if result_scale is not None:
            return "the result has a scale"
    return ""


def _scales(
    A: torch.Tensor,
    A_scale: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    B_scales: Sequence[torch.Tensor],
) -> dict[str, Any]:
    """Scales and recipes as the ops take them: TensorWise, or, if any scales rows, RowWise for all."""
    if all(scale.numel() == 1 for scale in (A_scale, *B_scales)):
        recipe = ScalingType.TensorWise
        of_weights = [scale.reshape(1) for scale in B_scales]
        of_input = A_scale.reshape(1)
    else:
        recipe = ScalingType.RowWise
        of_weights = [
            scale.reshape(-1).expand(B.shape[1]) for B, scale in zip(Bs, B_scales, strict=True)
        ]
        of_input = (A_scale.reshape(1) if A_scale.numel() == 1 else A_scale).expand(
            *A.shape[:-1], 1
        )
    return {
        "scale_input": of_input,
        "scale_weight": of_weights,
        "recipe_input": recipe,
        "recipe_weight": recipe,
    }


def _of_own_rows(
    A: torch.Tensor, A_scale: torch.Tensor, gather_dim: int, group: str
) -> torch.Tensor | None:
    """The scale of this rank's rows, given that or all ranks'; None for another shape."""
    own = (*A.shape[:-1], 1)
    if A_scale.numel() == 1 or (*A_scale.shape,) == own:
        return A_scale
    world = world_size(group)
    whole = (*own[:gather_dim], own[gather_dim] * world, *own[gather_dim + 1 :])
    if (*A_scale.shape,) != whole:
        return None
    return A_scale.chunk(world, gather_dim)[group_rank(group)]


def _scaled_gather(
    A: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    A_scale: torch.Tensor,
    B_scales: Sequence[torch.Tensor],
    gather_dim: int,
    group_name: str,
    biases: Scales,
    result_scales: Scales,
    out_dtypes: Sequence[Any],
    use_fast_accum: Sequence[bool],
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """By `allgather_gemm`. One number that scales A is every rank's, as PyTorch's kernel takes it."""
    gather_dim %= A.dim()
    own = _of_own_rows(A, A_scale, gather_dim, group_name)
    front = A.movedim(gather_dim, 0)
    scales = _scales(front, own if own.numel() == 1 else own.movedim(gather_dim, 0), Bs, B_scales)
    outputs, gathered, _ = allgather_gemm(
        front,
        [B.t() for B in Bs],
        list(biases),
        group=group_name,
        output_dtype=_as_dtypes(out_dtypes)[0],
        use_fast_accum=use_fast_accum[0],
        shared_scale_input=scales["recipe_input"] is ScalingType.TensorWise,
        **scales,
    )
    return gathered.movedim(0, gather_dim), [output.movedim(0, gather_dim) for output in outputs]


def _scaled_gather_refused(
    A: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    A_scale: torch.Tensor,
    B_scales: Sequence[torch.Tensor],
    gather_dim: int,
    group_name: str,
    biases: Scales,
    result_scales: Scales,
    out_dtypes: Sequence[Any],
    use_fast_accum: Sequence[bool],
) -> str:
    if not Bs:
        return "no B is given"
    lists = (B_scales, biases, result_scales, out_dtypes, use_fast_accum)
    if any(len(values) != len(Bs) for values in lists):
        return "there is not one value for each B"
    if A.dim() >= 2 and gather_dim in (-1, A.dim() - 1):
        return "the features are gathered, not the rows"
    dtypes = _as_dtypes(out_dtypes)
    if why := _scaled_operands_refused(A, Bs, B_scales, result_scales, dtypes):
        return why
    if len(set(dtypes)) > 1 or len(set(use_fast_accum)) > 1:
        return "the results' dtypes or accumulation differ"
    if any(bias is not None and bias.dtype != dtypes[0] for bias in biases):
        return "a bias is of another dtype than the result"
    if A_scale.dtype != torch.float32:
        return f"A_scale is {A_scale.dtype}"
    if _of_own_rows(A, A_scale, gather_dim % A.dim(), group_name) is None:
        return f"A_scale has the shape {(*A_scale.shape,)}"
    return ""


def _scaled_scatter(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: str,
    output_shape: Sequence[int] | None,
    bias: torch.Tensor | None = None,
    result_scale: torch.Tensor | None = None,
    out_dtype: Any = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """By `gemm_reducescatter`; contiguous, as PyTorch's is."""
    leading = A.shape[:-1] if output_shape is None else output_shape[:-1]
    front = A.reshape(*leading, A.shape[-1]).movedim(orig_scatter_dim, 0)
    if A_scale.numel() != 1:
        A_scale = A_scale.reshape(*leading, 1).movedim(orig_scatter_dim, 0)
    scales = _scales(front, A_scale, [B], [B_scale])
    output = gemm_reducescatter(
        front,
        B.t(),
        group=group_name,
        output_dtype=_as_dtypes([out_dtype])[0],
        use_fast_accum=use_fast_accum,
        **{**scales, "scale_weight": scales["scale_weight"][0]},
    )
    return output.movedim(0, orig_scatter_dim).contiguous()


def _scaled_scatter_refused(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: str,
    output_shape: Sequence[int] | None,
    bias: torch.Tensor | None = None,
    result_scale: torch.Tensor | None = None,
    out_dtype: Any = None,
    use_fast_accum: bool = False,
) -> str:
    if reduce_op != "sum":
        return f"reduce_op is {reduce_op!r}, not 'sum'"
    if bias is not None:
        return "there is a bias, which every rank adds before the reduction"
    leading = A.shape[:-1] if output_shape is None else output_shape[:-1]
    if orig_scatter_dim == len(leading):
        return "the features are scattered, not the rows"
    if not 0 <= orig_scatter_dim < len(leading):
        return f"scatter_dim is {orig_scatter_dim}"
    if leading[orig_scatter_dim] % world_size(group_name) != 0:
        return "the scattered dim does not divide by the ranks"
    if A_scale.dtype != torch.float32:
        return f"A_scale is {A_scale.dtype}"
    if A_scale.numel() != 1 and (*A_scale.shape,) != (*A.shape[:-1], 1):
        return f"A_scale has the shape {(*A_scale.shape,)}"
    return _scaled_operands_refused(A, [B], [B_scale], [result_scale], _as_dtypes([out_dtype]))


def _scaled_gather_composed(
    A: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    A_scale: torch.Tensor,
    B_scales: Sequence[torch.Tensor],
    gather_dim: int,
    group_name: str,
    biases: Scales,
    result_scales: Scales,
    out_dtypes: Sequence[Any],
    use_fast_accum: Sequence[bool],
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    for name, values in (
        ("B_scales", B_scales),
        ("biases", biases),
        ("result_scales", result_scales),
        ("out_dtypes", out_dtypes),
        ("use_fast_accum", use_fast_accum),
    ):
        if len(values) != len(Bs):
            raise ValueError(
                f"fused_all_gather_scaled_matmul: {name} must have one value for each of the {len(Bs)} Bs, but has "
                f"{len(values)}"
            )
    gather_dim %= A.dim()
    gathered = _all_gather(A, gather_dim, group_name)
    if (*A_scale.shape,) == (*A.shape[:-1], 1):  # of this rank's rows
        A_scale = _all_gather(A_scale, gather_dim, group_name)
    elif A_scale.numel() != 1 and (*A_scale.shape,) != (*gathered.shape[:-1], 1):
        raise ValueError(
            f"fused_all_gather_scaled_matmul: A_scale must be one number, {(*A.shape[:-1], 1)} for this rank's rows or "
            f"{(*gathered.shape[:-1], 1)} for all ranks', but its shape is {(*A_scale.shape,)}"
        )
    if A_scale.numel() != 1:
        A_scale = A_scale.movedim(gather_dim, 0)
    rows = gathered.movedim(gather_dim, 0)
    outputs = [
        _scaled_matmul(rows, B, A_scale, B_scale, bias, result_scale, dtype).movedim(0, gather_dim)
        for B, B_scale, bias, result_scale, dtype in zip(
            Bs, B_scales, biases, result_scales, _as_dtypes(out_dtypes), strict=True
        )
    ]
    return gathered, outputs


def _scaled_scatter_composed(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: str,
    output_shape: Sequence[int] | None,
    bias: torch.Tensor | None = None,
    result_scale: torch.Tensor | None = None,
    out_dtype: Any = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    if A_scale.numel() != 1 and (*A_scale.shape,) != (*A.shape[:-1], 1):
        raise ValueError(
            f"fused_scaled_matmul_reduce_scatter: A_scale must be one number or {(*A.shape[:-1], 1)}, one for each row "
            f"of A, but its shape is {(*A_scale.shape,)}"
        )
    (out_dtype,) = _as_dtypes([out_dtype])
    partial = _scaled_matmul(A, B, A_scale, B_scale, bias, result_scale, out_dtype)
    leading = A.shape[:-1] if output_shape is None else output_shape[:-1]
    return _reduce_scatter(
        partial.reshape(*leading, B.shape[1]), reduce_op, orig_scatter_dim, group_name
    )


def _scaled_matmul(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    bias: torch.Tensor | None,
    result_scale: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    """``aten._scaled_mm`` of [..., K] in float32; a result scale means something for an fp8 result alone, as there."""
    if B_scale.numel() != 1 and (*B_scale.shape,) != (1, B.shape[1]):
        raise ValueError(
            f"B_scale must be one number or {(1, B.shape[1])}, one for each column of B, but its shape is "
            f"{(*B_scale.shape,)}"
        )
    if A_scale.numel() == 1:
        A_scale = A_scale.reshape(())
    product = (A.float() @ B.float()) * A_scale * B_scale.reshape(-1)
    if bias is not None:
        product = product + bias
    out_dtype = out_dtype or A.dtype
    if result_scale is not None and out_dtype in _FP8:
        product = product * result_scale
    return product.to(out_dtype)


def _as_dtypes(given: Sequence[Any]) -> list[torch.dtype | None]:
    """A list of dtypes comes through the dispatcher as one of numbers."""
    if all(dtype is None or isinstance(dtype, torch.dtype) for dtype in given):
        return list(given)
    return _symmetric_memory()._maybe_convert_scalar_types_to_dtypes(list(given))


# --- what they share ------------------------------------------------------------------------------------------


def _operands_refused(A: torch.Tensor, Bs: Sequence[torch.Tensor]) -> str:
    if A.dtype not in _DTYPES:
        return f"the dtype is {A.dtype}"
    if A.dim() < 2 or any(B.dim() != 2 or B.shape[0] != A.shape[-1] for B in Bs):
        return "the shapes do not fit"
    if any(B.dtype != A.dtype or B.device != A.device for B in Bs):
        return "the operands' dtypes or devices differ"
    return ""


def _all_gather(tensor: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    """All ranks' parts, one behind the other in ``dim``; dim 0 of the memory is the gathered one."""
    front = tensor.movedim(dim, 0).contiguous()
    as_bytes = front.dtype in _FP8  # gloo sends none of these
    gathered = wait(
        start_all_gather(front.view(torch.uint8) if as_bytes else front, group, world_size(group))
    )
    return (gathered.view(front.dtype) if as_bytes else gathered).movedim(0, dim)


def _reduce_scatter(whole: torch.Tensor, reduce_op: str, dim: int, group: str) -> torch.Tensor:
    if reduce_op not in ("sum", "avg"):
        raise ValueError(f"reduce_op must be 'sum' or 'avg', but it is {reduce_op!r}")
    if whole.shape[dim] % world_size(group) != 0:
        raise ValueError(
            f"dim {dim} of {(*whole.shape,)} does not divide by the {world_size(group)} ranks to which it is scattered; "
            "pad it"
        )
    scattered = wait(start_reduce_scatter(whole.movedim(dim, 0), group))
    if reduce_op == "avg":
        scattered = scattered / world_size(group)
    return scattered.movedim(0, dim).contiguous()


@dataclass(frozen=True)
class _StandIn:
    """Of one operator: functions that take its arguments."""

    name: str
    refused: Callable[..., str]  # why ours does not take the arguments; empty if it does
    ours: Callable[..., Any]
    composed: Callable[..., Any]  # for the CPU


_STAND_INS = (
    _StandIn("fused_all_gather_matmul", _gather_refused, _gather, _gather_composed),
    _StandIn("fused_matmul_reduce_scatter", _scatter_refused, _scatter, _scatter_composed),
    _StandIn(
        "fused_all_gather_scaled_matmul",
        _scaled_gather_refused,
        _scaled_gather,
        _scaled_gather_composed,
    ),
    _StandIn(
        "fused_scaled_matmul_reduce_scatter",
        _scaled_scatter_refused,
        _scaled_scatter,
        _scaled_scatter_composed,
    ),
)


# --- putting them there ---------------------------------------------------------------------------------------


class SymmMemCalls(NamedTuple):
    """How often an operator was called, and what ran.

    ``op``: its name, such as ``fused_all_gather_matmul``. ``device``: ``cuda`` or ``cpu``. ``why``: empty where the op of this
    package ran; else why PyTorch's kernel ran on CUDA, or the composition on CPU. ``calls``: how often.
    """

    op: str
    device: str
    why: str
    calls: int


_lock = threading.Lock()
_held = 0  # handles that have not been undone
_library: Library | None = None
_calls: Counter[tuple[str, str, str]] = Counter()


class SymmMemReplacement:
    """What :func:`overlap_torch.replace_symm_mem` returns: undoes it, once, by :meth:`undo` or at the end of a ``with``."""

    def __init__(self) -> None:
        self._undone = False

    @property
    def calls(self) -> list[SymmMemCalls]:
        """Calls in this process since the operators were replaced, whichever handle they were replaced by."""
        return calls()

    def undo(self) -> None:
        """PyTorch's own kernels are back, unless another handle holds the replacement. A second call does nothing."""
        global _held, _library
        with _lock:
            if self._undone:
                return
            self._undone = True
            _held -= 1
            if _held == 0:
                _library._destroy()
                _library = None
                _calls.clear()

    def __enter__(self) -> SymmMemReplacement:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()


def replace_symm_mem() -> SymmMemReplacement:
    """Callers of ``torch.ops.symm_mem.fused_all_gather_matmul`` and ``fused_matmul_reduce_scatter`` get these ops.

    Inductor's async TP (``torch._inductor.config._micro_pipeline_tp``), torchtitan's ``dist_gemm`` and all other code that
    calls PyTorch's fused ops, eager or compiled, before this call or after it, then runs :func:`overlap_torch.allgather_gemm` and
    :func:`overlap_torch.gemm_reducescatter`, on CUDA and on CPU, where PyTorch has no kernel::

        with overlap_torch.replace_symm_mem():
            compiled_model(tokens).sum().backward()
            print(overlap_torch.report())       # says what ran, and why where it was not ours

    Results have the shapes, strides and dtypes of PyTorch's. Ours takes rows that are gathered or scattered along any
    dim but the last, ``reduce_op="sum"``, and bfloat16, float16, float32 and float64; in ``fused_all_gather_scaled_matmul`` and
    ``fused_scaled_matmul_reduce_scatter`` fp8 with scales of tensors or rows. Everything else runs PyTorch's kernel on CUDA, and
    a GEMM and a collective on CPU. As PyTorch's kernels, they record no gradient and do not know autocast.

    Every rank of a group must have replaced them, or none: PyTorch's kernels and ours do not communicate with each other.

    Returns:
        A handle: ``undo()``, or the end of a ``with`` block, puts PyTorch's own kernels back. A second call of this function
        registers nothing and returns another handle; the last of them to be undone ends the replacement.

    Raises:
        ImportError: a PyTorch without symmetric memory.
    """
    global _held, _library
    with _lock:
        if _library is None:
            _library = _registered()
        _held += 1
        return SymmMemReplacement()


def is_replaced() -> bool:
    """Whether the operators run stand-ins now."""
    return _library is not None


def calls() -> list[SymmMemCalls]:
    """Since the operators were replaced, in the order of operators and devices."""
    return [SymmMemCalls(*key, count) for key, count in sorted(_calls.items())]


def lines() -> list[str]:
    """What the doctor and the report say."""
    if not is_replaced():
        return [
            "torch.ops.symm_mem: PyTorch's own kernels; overlap_torch.replace_symm_mem() puts these ops there"
        ]
    replaced = ", ".join(each.name for each in _STAND_INS)
    said = [f"torch.ops.symm_mem: these ops run {replaced}"]
    for op, device, why, count in calls():
        instead = "PyTorch's kernel" if device == "cuda" else "GEMM and collective"
        ran = f"not ours but {instead}: {why}" if why else "ours"
        said.append(f"  {op} on {device}, {count} call{'s' if count > 1 else ''}: {ran}")
    return said


def _registered() -> Library:
    _symmetric_memory()  # it defines the operators
    library = Library("symm_mem", "IMPL")
    try:
        with warnings.catch_warnings():  # of an override, which this is
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for stand_in in _STAND_INS:
                for device in _DEVICES:
                    kernel = _kernel(stand_in, device)
                    library.impl(
                        stand_in.name, kernel, device, with_keyset=True, allow_override=True
                    )
    except BaseException:
        library._destroy()
        raise
    return library


def _kernel(stand_in: _StandIn, device: str) -> Callable[..., Any]:
    own = None
    if device == "CUDA":
        own = get_kernel(f"symm_mem::{stand_in.name}", device)  # before ours is there

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        why = stand_in.refused(*args, **kwargs)
        with _lock:
            _calls[stand_in.name, device.lower(), why] += 1
        if not why:
            return _as_kernel(stand_in.ours, *args, **kwargs)
        if own is not None:
            return own.call_boxed(keyset, *args, **kwargs)
        return _as_kernel(stand_in.composed, *args, **kwargs)

    return kernel


def _as_kernel(job: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As a kernel computes: it records no gradient, and autocast casts nothing."""
    with torch._C._AutoDispatchBelowAutograd():
        device_type = args[0].device.type
        if not torch.is_autocast_enabled(device_type):
            return job(*args, **kwargs)
        with torch.autocast(device_type, enabled=False):
            return job(*args, **kwargs)


def _symmetric_memory() -> Any:
    # Imported when asked for: it loads torch.distributed's functional collectives and more.
    return importlib.import_module("torch.distributed._symmetric_memory")
