"""Megatron-core's tensor-parallel linears, context-parallel attention and mixture of experts by the ops of this package;
Transformer Engine is not needed.

Importing this module imports Megatron-core, and raises ImportError unless that is release 0.19.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import torch
import torch.distributed as dist

from overlap_torch._layers import maps
from overlap_torch._layers.linear import as_under_autocast
from overlap_torch._layers.maps import Plain
from overlap_torch._ops.collectives import ANY_WORLD
from overlap_torch._ops.gradients import rows
from overlap_torch._watch.report import note_call, note_fallback
from overlap_torch.integrations._release import require

require("megatron-core", ("0.19",), "megatron")

from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider  # noqa: E402
from megatron.core.models.gpt import gpt_layer_specs  # noqa: E402
from megatron.core.tensor_parallel import layers  # noqa: E402
from megatron.core.tensor_parallel.mappings import (  # noqa: E402
    scatter_to_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # noqa: E402
from megatron.core.transformer.transformer_block import (  # noqa: E402
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)

from overlap_torch.integrations._megatron_attention import (  # noqa: E402
    CoreAttention,
    OverlapDotProductAttention,
)
from overlap_torch.integrations._megatron_experts import (  # noqa: E402
    OverlapMoELayer,
    OverlapTokenDispatcher,
)

__all__ = [
    "OverlapColumnParallelLinear", "OverlapDotProductAttention", "OverlapMoELayer",
    "OverlapRowParallelLinear", "OverlapSpecProvider", "OverlapTokenDispatcher", "TorchNorm",
    "gpt_block_spec", "gpt_layer_spec",
]  # fmt: skip


class _InGroup:
    """The layer's properties that the report reads."""

    tp_group: dist.ProcessGroup | None
    _overlap_holds_parts = True

    @property
    def group(self) -> str:
        """Name of the tensor-parallel group; empty if there is none."""
        return "" if self.tp_group is None else self.tp_group.group_name

    @property
    def world_size(self) -> int:
        return 1 if self.tp_group is None else self.tp_group.size()


class OverlapColumnParallelLinear(_InGroup, layers.ColumnParallelLinear):
    """Megatron's column-parallel linear, with communication beside its GEMMs.

    Arguments, parameters, their initialization, ``sharded_state_dict``, and forward's inputs and outputs are those of
    ``megatron.core.tensor_parallel.ColumnParallelLinear``. With ``config.sequence_parallel`` forward is an
    :func:`overlap_torch.allgather_gemm`. The input's gradient is then a ``gemm_reducescatter``, and the input is gathered
    again beside it for the weight's gradient. Without sequence parallelism the input's gradient is a ``gemm_allreduce``.
    ``gradient_accumulation_fusion`` adds to ``weight.main_grad`` by Megatron's own kernel.

    Megatron's own layer runs if Megatron does not communicate (experts, ``disable_grad_reduce``, one rank). It also runs,
    with the reason in :func:`overlap_torch.report`, if it defers the weight's gradient, gathers the weight first (GTP), or
    accumulates gradients for Megatron-FSDP or under autocast.
    """

    _overlap_columns = True

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As Megatron's: input [sequence, batch, input_size], this rank's part of the sequence with sequence parallelism."""
        note_call(self, input_)
        return super().forward(input_, weight, runtime_gather_output)

    def _forward_impl(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        *args: Any,
        bias: torch.Tensor | None,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        **keywords: Any,
    ) -> torch.Tensor:
        why = _why_not(self, weight)
        if not why and keywords.get("grad_output_buffer") is not None:
            why = "the weight's gradient is deferred"
        if why or not (allreduce_dgrad or sequence_parallel):
            if why:
                note_fallback(self, f"Megatron's own layer: {why}")
            return super()._forward_impl(
                input,
                weight,
                *args,
                bias=bias,
                allreduce_dgrad=allreduce_dgrad,
                sequence_parallel=sequence_parallel,
                **keywords,
            )
        by = _policy(self, weight, sequence_parallel)
        input, weight, bias = as_under_autocast(input, weight, bias)
        return maps.column(by, input, [weight], [bias])[0]


class OverlapRowParallelLinear(_InGroup, layers.RowParallelLinear):
    """Megatron's row-parallel linear, with communication beside its GEMMs.

    Arguments, parameters, their initialization, ``sharded_state_dict``, and forward's inputs and outputs are those of
    ``megatron.core.tensor_parallel.RowParallelLinear``. Forward is an :func:`overlap_torch.gemm_allreduce`. With
    ``config.sequence_parallel`` it is a ``gemm_reducescatter``, and backward is one ``allgather_gemm`` for both gradients.
    ``gradient_accumulation_fusion`` adds to ``weight.main_grad`` by Megatron's own kernel.

    Megatron's own layer runs if Megatron does not communicate (experts, one rank). It also runs, with the reason in
    :func:`overlap_torch.report`, if it gathers the weight first (GTP), offloads activations to the CPU, or accumulates
    gradients for Megatron-FSDP or under autocast.
    """

    _overlap_columns = False

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As Megatron's: [sequence, batch, this rank's part of input_size] to [sequence, batch, output_size]. With sequence
        parallelism each rank has its part of the output's sequence."""
        note_call(self, input_)
        why = _why_not(self, self.weight)
        offloading = self.config._cpu_offloading_context
        if not why and offloading is not None and offloading.inside_context:
            why = "activations are offloaded to the CPU"
        alone = self.world_size == 1 and not ANY_WORLD
        if why or alone or self.explicit_expert_comm:
            if why:
                note_fallback(self, f"Megatron's own layer: {why}")
            return super().forward(input_)
        if not self.input_is_parallel:
            input_ = scatter_to_tensor_model_parallel_region(input_, group=self.tp_group)
        by = _policy(self, self.weight, self.sequence_parallel)
        bias = None if self.skip_bias_add else self.bias
        output = maps.row(by, *as_under_autocast(input_, self.weight, bias))
        return output, self.bias if self.skip_bias_add else None


class TorchNorm:
    """Megatron's ``WrappedTorchNorm``, which uses a PyTorch norm, with sequence parallelism, which Megatron's refuses.

    Its parameters are marked like those of Megatron's other norms, so ``megatron.core.distributed.finalize_model_grads``
    sums their gradients over the ranks.
    """

    def __new__(cls, config: TransformerConfig, *args: Any, **keywords: Any) -> torch.nn.Module:
        whole = copy.copy(config)
        whole.sequence_parallel = False
        norm = WrappedTorchNorm(whole, *args, **keywords)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class OverlapSpecProvider(BackendSpecProvider):
    """The modules for Megatron's specs, with this package's column- and row-parallel linears.

    Args:
        fallback: a ``BackendSpecProvider`` for all other modules: norms, attention, activations and the experts, which stay
            as they are. None: Megatron's ``LocalSpecProvider``, which needs neither Transformer Engine nor Apex. Its
            attention refuses context parallelism; :class:`OverlapDotProductAttention` replaces it then.

    Pass the provider to Megatron's functions that take a ``backend``, such as ``get_mlp_module_spec_for_backend``.
    :func:`gpt_layer_spec` builds a GPT's layer with it, :func:`gpt_block_spec` all layers.
    """

    def __init__(self, fallback: BackendSpecProvider | None = None) -> None:
        self.fallback = LocalSpecProvider() if fallback is None else fallback

    def __getattr__(self, name: str) -> Any:
        # A fallback may have more than the protocol. While the provider is unpickled, `fallback` itself does not exist.
        if name == "fallback":
            raise AttributeError(name)
        return getattr(self.fallback, name)

    def column_parallel_linear(self) -> type:
        return OverlapColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return OverlapRowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        """False: a norm is a separate module."""
        return False

    def column_parallel_layer_norm_linear(self) -> None:
        """None: there is no such module."""

    def layer_norm(
        self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False
    ) -> Any:
        """The fallback's norm; :class:`TorchNorm`, which supports sequence parallelism, instead of Megatron's
        ``WrappedTorchNorm``."""
        norm = self.fallback.layer_norm(rms_norm=rms_norm, for_qk=for_qk, has_residual=has_residual)
        return TorchNorm if norm is WrappedTorchNorm else norm

    def core_attention(self) -> type:
        attention = self.fallback.core_attention()
        return CoreAttention if attention is DotProductAttention else attention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        """The fallback's modules, because experts do not change."""
        return self.fallback.grouped_mlp_modules(moe_use_grouped_gemm)

    def moe_layer(self) -> type:
        """The layer around the experts, which :func:`gpt_layer_spec` takes; Megatron's protocol has no such method."""
        return OverlapMoELayer

    def activation_func(self) -> Any:
        return self.fallback.activation_func()


def gpt_layer_spec(provider: OverlapSpecProvider | None = None, **arguments: Any) -> ModuleSpec:
    """``megatron.core.models.gpt.gpt_layer_specs.get_gpt_layer_local_spec(**arguments)``, built by a provider.

    The provider (None: ``OverlapSpecProvider()``) gives attention and its projections, the dense MLP's and the shared
    experts' linears, norms, the experts' modules and the layer around them. All other modules are those of Megatron's local
    spec.
    """
    provider = OverlapSpecProvider() if provider is None else provider
    submodules = gpt_layer_specs.get_gpt_layer_local_submodules(**arguments)
    rms_norm = arguments.get("normalization") == "RMSNorm"
    local_norm = LocalSpecProvider().layer_norm(rms_norm=rms_norm)
    attention = submodules.self_attention
    attention = dataclasses.replace(
        attention,
        submodules=_replaced(
            attention.submodules,
            {
                layers.ColumnParallelLinear: provider.column_parallel_linear(),
                layers.RowParallelLinear: provider.row_parallel_linear(),
                DotProductAttention: provider.core_attention(),
                local_norm: provider.layer_norm(rms_norm=rms_norm, for_qk=True),
            },
            _BY_IDENTITY,
        ),
    )
    mlp = gpt_layer_specs.get_mlp_module_spec_for_backend(
        backend=provider,
        num_experts=arguments.get("num_experts"),
        moe_grouped_gemm=arguments.get("moe_grouped_gemm", False),
    )
    if mlp.func is MoELayer:
        mlp = functools.partial(provider.moe_layer(), **mlp.keywords)
    norm = provider.layer_norm(rms_norm=rms_norm, has_residual=True)
    submodules = _replaced(submodules, {local_norm: norm})
    return ModuleSpec(
        module=gpt_layer_specs.TransformerLayer,
        submodules=dataclasses.replace(submodules, self_attention=attention, mlp=mlp),
    )


# The arguments of `gpt_layer_spec` that a config has, and its names of them.
_TOLD = {
    "num_experts": "num_moe_experts",
    "moe_grouped_gemm": "moe_grouped_gemm",
    "qk_layernorm": "qk_layernorm",
    "multi_latent_attention": "multi_latent_attention",
    "normalization": "normalization",
}


def gpt_block_spec(
    config: TransformerConfig,
    provider: OverlapSpecProvider | None = None,
    *,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
    **arguments: Any,
) -> TransformerBlockSubmodules:
    """The layers of a GPT's pipeline stage, all with the same spec, and the norm after them::

        GPTModel(config, transformer_layer_spec=gpt_block_spec(config), vocab_size=..., max_sequence_length=...)

    Args:
        config: the model's config, which says what the layers have.
        provider: None: ``OverlapSpecProvider()``.
        vp_stage, pp_rank: as in ``megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec``.
        arguments: the arguments of :func:`gpt_layer_spec`; those not given are as ``config`` says.

    Raises:
        ValueError: ``config.moe_layer_freq`` has experts in some layers only.
    """
    provider = OverlapSpecProvider() if provider is None else provider
    told = {name: getattr(config, field) for name, field in _TOLD.items()}
    arguments = {**told, **arguments}
    freq = config.moe_layer_freq
    everywhere = set(freq if isinstance(freq, list) else [freq]) == {1}
    if arguments["num_experts"] is not None and not everywhere:
        raise ValueError(
            f"gpt_block_spec makes all layers alike, but moe_layer_freq={freq!r} has experts in some only: make a "
            "TransformerBlockSubmodules with a gpt_layer_spec(num_experts=...) for each layer"
        )
    count = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pp_rank)
    return TransformerBlockSubmodules(
        layer_specs=[gpt_layer_spec(provider, **arguments)] * count,
        layer_norm=provider.layer_norm(rms_norm=arguments["normalization"] == "RMSNorm"),
    )


# Linears that Megatron's latent attention takes only if they are of a class that it knows, and not of a subclass.
_BY_IDENTITY = ("linear_q_down_proj", "linear_kv_down_proj")


def _replaced(submodules: Any, others: dict[Any, Any], kept: tuple[str, ...] = ()) -> Any:
    """A dataclass of modules, with the modules that are keys replaced by their values, except in fields that are ``kept``."""
    found = {
        field.name: others[module]
        for field in dataclasses.fields(submodules)
        if field.name not in kept
        and isinstance(module := getattr(submodules, field.name), type)
        and module in others
    }
    return dataclasses.replace(submodules, **found)


def _why_not(layer: torch.nn.Module, weight: torch.Tensor) -> str:
    """Why Megatron's own layer has to run although it communicates; empty if it need not."""
    if layer.gtp_remat_size > 1:
        return "the weight is gathered before its GEMM (GTP)"
    if layer.gradient_accumulation_fusion and weight.requires_grad:
        if hasattr(weight, "__fsdp_param__"):
            return "Megatron-FSDP makes main_grad in backward"
        if torch.is_autocast_enabled(weight.device.type):
            return "gradients are accumulated under autocast"
    return ""


def _policy(layer: torch.nn.Module, weight: torch.Tensor, sequence_parallel: bool) -> Plain:
    """How a call computes; Megatron sums a row's bias gradient over the ranks itself."""
    if not layer.gradient_accumulation_fusion or not weight.requires_grad:
        return Plain(layer.group, sequence_parallel)
    add = functools.partial(_add_to_main_grad, weight, getattr(weight, "main_grad", None))
    return Plain(layer.group, sequence_parallel, weight_gradient=add)


def _add_to_main_grad(
    weight: torch.nn.Parameter,
    main_grad: torch.Tensor | None,
    grad: torch.Tensor,
    input: torch.Tensor,
) -> torch.Tensor | None:
    """Adds the weight's gradient, from [tokens, ..., N] and [tokens, ..., K], to the main_grad that the weight had in
    forward. Returns the value that Megatron's hooks expect."""
    if main_grad is None:
        raise RuntimeError(
            "gradient_accumulation_fusion=True adds to weight.main_grad, but the weight had none in forward: wrap the model "
            "in megatron.core.distributed.DistributedDataParallel, or set it to False"
        )
    weight.main_grad = main_grad
    kernels = layers.fused_weight_gradient_mlp_cuda
    if main_grad.dtype == torch.float32:
        add = kernels.wgrad_gemm_accum_fp32
    elif main_grad.dtype in (torch.float16, torch.bfloat16):
        add = kernels.wgrad_gemm_accum_fp16
    else:
        raise RuntimeError(
            "gradient_accumulation_fusion takes main_grad in float32, bfloat16 or float16, but it is "
            f"{main_grad.dtype}"
        )
    add(rows(input).contiguous(), rows(grad).contiguous(), main_grad)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    # Megatron's data-parallel hooks run when a gradient arrives. Nothing reads its values unless zeros are requested.
    weight.grad_added_to_main_grad = True
    make = input.new_zeros if getattr(weight, "zero_out_wgrad", False) else input.new_empty
    return make(main_grad.shape)
