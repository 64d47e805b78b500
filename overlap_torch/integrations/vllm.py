"""vLLM's row-parallel layers by ``gemm_allreduce``, the norms after them in the same op, and its experts by ``moe``.

A plug-in of vLLM: with ``OVERLAP_VLLM=1`` every process of vLLM calls :func:`enable` before it makes a model.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

import torch

from overlap_torch import gemm_allreduce
from overlap_torch.integrations import _serving, _vllm_experts, _vllm_norms
from overlap_torch.integrations._release import require

__all__ = ["enable"]

RELEASES = ("0.33",)
_enabled: type | None = None


def enable() -> type:
    """Registers classes that vLLM makes instead of its own from now on, and a pass of its compiler; a second call does nothing.

    Layers of ``RowParallelLinear`` run ``gemm_allreduce``, and experts of ``UnquantizedFusedMoEMethod`` run ``moe`` where ranks have
    different tokens. A norm after an all-reduce in compiled graphs becomes one op with it. vLLM's own code runs for everything
    else, which docs/integrations.md lists; a warning gives the reason once for experts. vLLM's key of compiled graphs gets
    ``OVERLAP_VLLM`` and ``OVERLAP_MOE_ROWS``.

    Returns:
        The class of row-parallel layers.

    Raises:
        ImportError: vLLM is not installed, or of a release other than 0.33.
        RuntimeError: another plug-in has registered one of these classes.
        ValueError: ``OVERLAP_MOE_ROWS`` is no number of rows.
    """
    global _enabled
    if _enabled is None:
        require("vllm", RELEASES, "vllm")
        _serving.most_rows()
        linear = importlib.import_module("vllm.model_executor.layers.linear")
        experts = importlib.import_module(_vllm_experts.MODULE)
        registry = importlib.import_module("vllm.model_executor.custom_op").op_registry_oot
        distributed = importlib.import_module("vllm.distributed")
        config = importlib.import_module("vllm.config")
        forward = importlib.import_module("vllm.forward_context")
        envs = importlib.import_module("vllm.envs")
        groups = importlib.import_module("vllm.distributed.parallel_state")
        passes = importlib.import_module("vllm.compilation.passes.pass_manager")
        base, method = linear.RowParallelLinear, experts.UnquantizedFusedMoEMethod
        for name in (base.__name__, method.__name__):
            if name in registry:
                raise RuntimeError(
                    f"OVERLAP_VLLM=1: another plug-in has put {registry[name]} in the place of vLLM's {name}; choose one of them by "
                    "VLLM_PLUGINS"
                )

        def batch_invariant() -> bool:
            return bool(envs.VLLM_BATCH_INVARIANT)

        ours = layer_class(
            base,
            linear.UnquantizedLinearMethod,
            tp_group=distributed.get_tp_group,
            batch_invariant=batch_invariant,
        )
        method.register_oot(
            _vllm_experts.method_class(
                method,
                ep_group=distributed.get_ep_group,
                config=config.get_current_vllm_config,
                context=forward.get_forward_context,
                batch_invariant=batch_invariant,
            )
        )
        _vllm_norms.add_pass(
            passes.PostGradPassManager,
            importlib.import_module("vllm.compilation.passes.inductor_pass").InductorPass,
            lambda name: groups._groups[name]().device_group.group_name,
            batch_invariant,
        )
        _enabled = base.register_oot(ours)
        usual = (("OVERLAP_VLLM", "0"), (_serving.ROWS, ""), ("OVERLAP_INVARIANCE", "none"))
        for name, default in usual:
            envs.environment_variables[name] = functools.partial(os.environ.get, name, default)
        envs.environment_variables["OVERLAP_GRAPHS"] = (
            _vllm_norms.key
        )  # read when a graph is compiled
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
            alone = self.tp_size == 1 and not (_serving.ANY_WORLD and tp_group().world_size == 1)
            if self.reduce_results and not alone:
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
            # Models change reduce_results of layers that they have made.
            reduces = self.overlap_group and self.reduce_results
            # vLLM binds the backend that --linear-backend chose for layers without quantization.
            chosen = getattr(self.quant_method, "_gemm_impl", None)
            if isinstance(chosen, functools.partial):
                reduces = False
            if not reduces or not _serving.takes(self, unquantized, input_):
                return super().forward(input_)
            input = _serving.part_of(self, input_, self.tp_rank, self.tp_size)
            output = _serving.run(
                gemm_allreduce, self, input, self.overlap_group, self.overlap_invariant
            )
            if not self.return_bias:
                return output
            return output, self.bias if self.skip_bias_add else None

    return OverlapRowParallelLinear
