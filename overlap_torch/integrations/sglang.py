"""SGLang's row-parallel layers, attention's output and the MLP's down projection, by ``gemm_allreduce`` and ``gemm_reducescatter``;
the sums that its layers leave to the next norm by ``allreduce_rmsnorm``; its experts by ``moe``.

A plug-in of SGLang: with ``OVERLAP_SGLANG=1`` every process of SGLang calls :func:`enable` before it makes a model.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from overlap_torch import allreduce_rmsnorm, gemm_allreduce, gemm_reducescatter
from overlap_torch._layers.rmsnorm import MOST_ROWS, kernels_finish
from overlap_torch.integrations import _serving, _sglang_experts
from overlap_torch.integrations._release import require

__all__ = ["TARGET", "enable"]

RELEASES = ("0.5.23",)
TARGET = "sglang.srt.layers.linear.RowParallelLinear.forward"
_FUSION = "sglang.srt.layers.flashinfer_comm_fusion"
NORM_TARGET = f"{_FUSION}.flashinfer_allreduce_residual_rmsnorm"
_enabled = False


def enable() -> None:
    """Registers hooks around the forward of SGLang's ``RowParallelLinear`` and of its experts, and around its all-reduce with
    residual and norm.

    SGLang applies them after it has loaded its plug-ins; a second call does nothing. Forward runs ``gemm_allreduce``, or
    ``gemm_reducescatter`` in SGLang's sequence parallelism, with rows padded to a multiple of the ranks. The norm's hook calls
    ``allreduce_rmsnorm`` for at most 512 contiguous rows that the kernels take. Experts run ``moe`` where ranks have different
    tokens. SGLang's own code runs for everything else, which docs/integrations.md lists; a warning gives the reason once
    for experts.

    Raises:
        ImportError: SGLang is not installed, or of a release other than 0.5.23.
        ValueError: ``OVERLAP_MOE_ROWS`` is no number of rows.
    """
    global _enabled
    if _enabled:
        return
    require("sglang", RELEASES, "sglang")
    _serving.most_rows()
    registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    linear = importlib.import_module("sglang.srt.layers.linear")
    unquant = importlib.import_module("sglang.srt.layers.quantization.unquant")
    hook = forward_hook(linear, unquant.UnquantizedLinearMethod)
    norm = norm_hook(importlib.import_module(_FUSION))
    registry.HookRegistry.register(TARGET, hook, registry.HookType.AROUND)
    registry.HookRegistry.register(NORM_TARGET, norm, registry.HookType.AROUND)
    experts = _sglang_experts.experts_hook(
        importlib.import_module("sglang.srt.runtime_context"),
        importlib.import_module("sglang.srt.layers.dp_attention"),
        unquant.UnquantizedFusedMoEMethod,
    )
    for target in _sglang_experts.TARGETS:
        registry.HookRegistry.register(target, experts, registry.HookType.AROUND)
    _enabled = True


def norm_hook(fusion: Any) -> Callable[..., Any]:
    """The hook around SGLang's ``flashinfer_allreduce_residual_rmsnorm``; ``fusion`` is its module, or an object with its names.

    The hook imports nothing, because --enable-torch-compile traces it in each layer.
    """

    def norm(
        original: Callable[..., Any],
        input_tensor: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float = 1e-6,
        max_token_num: int = 2048,
        use_oneshot: bool | None = None,
        trigger_completion_at_end: bool = False,
        fp32_acc: bool = True,
        use_attn_tp_group: bool = True,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The norm and the sum, or None twice."""
        ranks, _, group = fusion.resolve_fusion_group(use_attn_tp_group=use_attn_tp_group)
        takes = (
            ranks > 1
            and input_tensor.dim() == 2
            and 0 < input_tensor.shape[0] <= MOST_ROWS
            and kernels_finish(input_tensor.dtype, input_tensor.shape[1])
            and residual.shape == input_tensor.shape
            and input_tensor.dtype == residual.dtype == weight.dtype
            and all(tensor.is_contiguous() for tensor in (input_tensor, residual, weight))
        )
        if not takes:
            how = (eps, max_token_num, use_oneshot, trigger_completion_at_end, fp32_acc)
            return original(input_tensor, residual, weight, *how, use_attn_tp_group)
        name = group.device_group.group_name
        with torch._C.DisableTorchFunctionSubclass():
            return allreduce_rmsnorm(
                input_tensor, residual, weight, group=name, eps=eps, fused=True
            )

    return norm


def forward_hook(linear: Any, unquantized: type) -> Callable[..., Any]:
    """The hook; ``linear`` is SGLang's module of linear layers, or an object with its names."""

    def op_of(
        layer: torch.nn.Module, skip_all_reduce: bool, forward_batch: Any, output_tensor: Any
    ) -> Callable[..., Any] | None:
        group = linear.get_parallel().tp_group
        if (
            skip_all_reduce
            or output_tensor is not None
            or layer.tp_group is not group
            or (group.world_size == 1 and not _serving.ANY_WORLD)
            or getattr(layer, "use_intel_amx_backend", False)
        ):
            return None
        if linear.get_forward().sp_active:
            return None if getattr(layer, "_sp_use_cutlass", False) else gemm_reducescatter
        if (
            not layer.reduce_results
            or layer.use_dp_attention_reduce
            or layer.use_decode_attn_tp
            or linear.should_skip_mlp_all_reduce()
        ):
            return None
        if (
            forward_batch is not None
            and linear.get_exec().comm.enable_quant_communications
            and not forward_batch.forward_mode.is_decode_or_idle()
        ):
            return None
        return gemm_allreduce

    def forward(
        original: Callable[..., Any],
        layer: torch.nn.Module,
        input_: torch.Tensor,
        skip_all_reduce: bool = False,
        forward_batch: Any = None,
        output_tensor: torch.Tensor | None = None,
    ) -> Any:
        op = op_of(layer, skip_all_reduce, forward_batch, output_tensor)
        if op is None or not _serving.takes(layer, unquantized, input_):
            return original(layer, input_, skip_all_reduce, forward_batch, output_tensor)
        rank, ranks = linear.get_group_rank_size(layer.tp_group)
        input = _serving.part_of(layer, input_, rank, ranks)
        if op is gemm_reducescatter:
            # Rows of zeros after the last row; SGLang drops them when it gathers.
            behind = (0, 0) * (input.dim() - 1)
            input = functional.pad(input, (*behind, 0, -input.shape[0] % ranks))
        group = layer.tp_group.device_group.group_name
        invariant = linear.get_exec().deterministic.enable_deterministic_inference
        output = _serving.run(op, layer, input, group, invariant)
        return output, layer.bias if layer.skip_bias_add else None

    return forward
