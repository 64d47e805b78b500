"""diffusers' ``enable_parallelism`` by this package: its attention over a cut sequence, and its tensor-parallel layers.

Importing this module imports diffusers.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from overlap_torch._attention.functions import context_parallel_attention
from overlap_torch._ops.handles import Handle, Held
from overlap_torch.integrations._release import require
from overlap_torch.integrations._serving import first_of
from overlap_torch.parallel import OverlapColwiseParallel, OverlapRowwiseParallel

require("diffusers", ("0.42",), "diffusers")

from diffusers.hooks import tensor_parallel  # noqa: E402
from diffusers.models import attention_dispatch  # noqa: E402
from diffusers.models._modeling_parallel import gather_size_by_comm  # noqa: E402

__all__ = ["Enabled", "enable"]

_ATTENTION = "_templated_context_parallel_attention"
_STYLES = ("_styles", "_hooks_only_styles")
# The kernel that takes the place of a backend of PyTorch's.
_KERNELS = {
    "_native_attention_forward_op": None,
    "_cudnn_attention_forward_op": "cudnn",
    "_native_flash_attention_forward_op": "flash",
}
_OTHER = "a backend that is not PyTorch's"
_before: dict[str, Callable[..., Any]] = {}
_calls: Counter[str] = Counter()


class Enabled(Handle):
    """The result of :func:`enable`: undoes it, once, by :meth:`undo` or at the end of a ``with``."""

    @property
    def calls(self) -> dict[str, int]:
        """How often attention ran outside compiled graphs, by why diffusers' own function ran; "" if it did not."""
        return dict(_calls)


def _put() -> None:
    _before[_ATTENTION] = getattr(attention_dispatch, _ATTENTION)
    setattr(attention_dispatch, _ATTENTION, _attend)
    for name in _STYLES:
        _before[name] = getattr(tensor_parallel, name)
        setattr(tensor_parallel, name, _overlapping(_before[name]))


def _take() -> None:
    setattr(attention_dispatch, _ATTENTION, _before[_ATTENTION])
    for name in _STYLES:
        setattr(tensor_parallel, name, _before[name])
    _calls.clear()


_held = Held(_put, _take)


def enable() -> Enabled:
    """Models that ``enable_parallelism`` or ``from_pretrained(parallel_config=...)`` parallelizes communicate by this package::

        overlap_torch.integrations.diffusers.enable()
        transformer.enable_parallelism(config=ContextParallelConfig(ulysses_degree=4))

    - Context parallelism: :func:`overlap_torch.context_parallel_attention` replaces Ulysses, ring and both together, over
      all their ranks, and chooses the exchange. It takes diffusers' backends of PyTorch (native, cuDNN, flash). Kernels of
      other backends run within it, without gradients and outside ``torch.compile``. diffusers' own function runs for masks,
      dropout, returned sums of exponentials, and keys of another length than queries; :attr:`Enabled.calls` counts calls.
    - Tensor parallelism: layers take :class:`overlap_torch.parallel.OverlapColwiseParallel` and
      :class:`~overlap_torch.parallel.OverlapRowwiseParallel`, packed ones included, if the model is parallelized afterwards.

    All ranks call it, or none.

    Returns:
        A handle: ``undo()``, or the end of a ``with`` block, restores diffusers' functions; layers keep their styles. A second
        call of this function returns another handle; the last of them to be undone restores the functions.

    Raises:
        ImportError: diffusers is not installed, or its release is not known.
    """
    _held.hold()
    return Enabled(_held.release)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    *,
    forward_op: Callable[..., Any],
    backward_op: Callable[..., Any],
    _parallel_config: Any = None,
) -> Any:
    """[B, T, H, D], this rank's tokens, as diffusers' own function."""
    config = _parallel_config.context_parallel_config
    group = config._flattened_mesh.get_group()
    compiles, ours = is_dynamo_compiling(), forward_op.__name__ in _KERNELS
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    grouped = query.shape[2] != key.shape[2]
    # Ranks decide alike: all of them have a mask, say, or none.
    why = first_of(
        (
            (attn_mask is not None, "a mask"),
            (dropout_p != 0.0, "dropout"),
            (return_lse, "sums of exponentials are returned"),
            (not ours and compiles, f"{_OTHER}, compiled"),
            (not ours and (is_causal or grouped), f"{_OTHER}, causal or with groups of heads"),
            (not ours and needs_grad, f"{_OTHER}, with gradients"),
        )
    )
    tokens: str | list[int] = "contiguous"
    if not why:
        queries, keys = query.shape[1], key.shape[1]
        if config.ulysses_anything or config.ring_anything:
            queries, keys = (gather_size_by_comm(side, group) for side in (queries, keys))
            tokens = queries
        if queries != keys:
            why = "keys of another length than queries"
    if not compiles:
        _calls[why] += 1
    if why:
        return _before[_ATTENTION](
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale,
            enable_gqa,
            return_lse,
            forward_op=forward_op,
            backward_op=backward_op,
            _parallel_config=_parallel_config,
        )
    return context_parallel_attention(
        query,
        key,
        value,
        causal=is_causal,
        scale=scale,
        tokens=tokens,
        kernel=_KERNELS[forward_op.__name__] if ours else _kernel_of(forward_op),
        group=group,
    )


@functools.cache
def _kernel_of(forward_op: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """A kernel function of the op by a backend's."""

    @functools.wraps(forward_op)
    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, work: Any) -> torch.Tensor:
        return forward_op(None, q, k, v, scale=work.scale, _save_ctx=False)

    return kernel


def _overlapping(styles: Callable[[dict], dict]) -> Callable[[dict], dict]:
    @functools.wraps(styles)
    def made(relative_plan: dict) -> dict:
        return {path: _overlapped(style) for path, style in styles(relative_plan).items()}

    return made


def _overlapped(theirs: ColwiseParallel | RowwiseParallel) -> ColwiseParallel | RowwiseParallel:
    """This package's style, whose parameters are placed as by ``theirs``: as a whole, by blocks, or not at all if they are."""
    kind = OverlapColwiseParallel if isinstance(theirs, ColwiseParallel) else OverlapRowwiseParallel

    class Placed(kind):
        def _apply(self, module: torch.nn.Module, device_mesh: Any) -> torch.nn.Module:
            theirs._partition_linear_fn("", module, device_mesh)
            return super()._apply(module, device_mesh)

    Placed.__name__ = Placed.__qualname__ = kind.__name__
    return Placed()
