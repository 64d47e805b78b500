"""vLLM's row-parallel layers, attention's output and the MLP's down projection, by ``gemm_allreduce``, and the norms after them.

A plug-in of vLLM: with ``OVERLAP_VLLM=1`` every process of vLLM calls :func:`enable` before it makes a model.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch

from overlap_torch import gemm_allreduce
from overlap_torch.integrations import _serving, _vllm_norms
from overlap_torch.integrations._release import require

__all__ = ["enable"]

RELEASES = ("0.33",)
_enabled: type | None = None


def enable() -> type:
    """Registers a class that vLLM makes instead of its ``RowParallelLinear`` from now on; a second call does nothing.

    Its layers have vLLM's parameters, loaders and ``quant_method``. Forward is ``gemm_allreduce`` if vLLM's would be an
    unquantized GEMM and an all-reduce of all ranks of the tensor-parallel group. Everything else runs vLLM's forward:
    quantized layers, ``reduce_results=False``, ``disable_tp``, a group of one, and weights packed for a CPU's kernel. With
    ``VLLM_BATCH_INVARIANT=1`` the op is called with ``invariance="batch"``, whatever the number of rows. vLLM's key of
    compiled graphs has that variable already, and ``OVERLAP_VLLM`` becomes part of it.

    In graphs that vLLM compiles, an all-reduce (of these layers or vLLM's own), the addition to the residual and the RMSNorm become
    one op, ``gemm_allreduce_rmsnorm`` or ``allreduce_rmsnorm``, in place of vLLM's own fusion of them.

    Returns:
        The class.

    Raises:
        ImportError: vLLM is not installed, or of a release other than 0.33.
        RuntimeError: another plug-in has registered a ``RowParallelLinear``.
    """
    global _enabled
    if _enabled is None:
        require("vllm", RELEASES, "vllm")
        linear = importlib.import_module("vllm.model_executor.layers.linear")
        registry = importlib.import_module("vllm.model_executor.custom_op").op_registry_oot
        distributed = importlib.import_module("vllm.distributed")
        envs = importlib.import_module("vllm.envs")
        base = linear.RowParallelLinear
        if base.__name__ in registry:
            raise RuntimeError(
                f"OVERLAP_VLLM=1: another plug-in has put {registry[base.__name__]} in the place of vLLM's {base.__name__}; "
                "choose one of them by VLLM_PLUGINS"
            )
        ours = layer_class(
            base,
            linear.UnquantizedLinearMethod,
            tp_group=distributed.get_tp_group,
            batch_invariant=lambda: bool(envs.VLLM_BATCH_INVARIANT),
        )
        _enabled = base.register_oot(ours)
        groups = importlib.import_module("vllm.distributed.parallel_state")
        passes = "vllm.compilation.passes."
        _vllm_norms.add_pass(
            importlib.import_module(f"{passes}pass_manager").PostGradPassManager,
            importlib.import_module(f"{passes}inductor_pass").InductorPass,
            lambda name: groups._groups[name]().device_group.group_name,
        )
        envs.environment_variables["OVERLAP_VLLM"] = lambda: os.environ.get("OVERLAP_VLLM", "0")
    return _enabled


def layer_class(
    base: type[torch.nn.Module],
    unquantized: type,
    *,
    tp_group: Callable[[], Any],
    batch_invariant: Callable[[], bool],
) -> type[torch.nn.Module]:
    """A subclass of ``base``, vLLM's ``RowParallelLinear``, with this forward.

    Making a layer for another number of ranks than the tensor-parallel group's raises a ``RuntimeError``.
    """

    class OverlapRowParallelLinear(base):
        """vLLM's row-parallel layer, which reduces the output beside its GEMM."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.overlap_group, self.overlap_invariant = "", False
            if self.reduce_results and self.tp_size > 1:
                group = tp_group()
                if group.world_size != self.tp_size:
                    raise RuntimeError(
                        f"OVERLAP_VLLM=1: a {base.__name__} is made for {self.tp_size} ranks, but vLLM's tensor-parallel group has "
                        f"{group.world_size}, over which its output would be summed; set OVERLAP_VLLM=0 for this model"
                    )
                # Read here, so that the model's compiler sees constants.
                self.overlap_group = group.device_group.group_name
                self.overlap_invariant = batch_invariant()

        def forward(self, input_: torch.Tensor) -> Any:
            """As vLLM's."""
            if not self.overlap_group or not _serving.takes(self, unquantized, input_):
                return super().forward(input_)
            input = _serving.part_of(self, input_, self.tp_rank, self.tp_size)
            output = _serving.run(
                gemm_allreduce, self, input, self.overlap_group, self.overlap_invariant
            )
            if not self.return_bias:
                return output
            return output, self.bias if self.skip_bias_add else None

    return OverlapRowParallelLinear
