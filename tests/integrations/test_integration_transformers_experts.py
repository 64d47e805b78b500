"""transformers' expert parallelism with ``ep_implementation="overlap"``: what its own implementation computes, and the ops run."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import overlap_torch
from checks import Failures
from frameworks import SMALL_MODEL, needs
from layers import ops_called
from operands import rank_device
from overlap_torch.integrations import transformers as integration

pytestmark = needs("transformers", ("5.23", "5.24"), "transformers")


def config_of(family: str):
    from transformers import GptOssConfig, MixtralConfig, Qwen3MoeConfig

    if family == "gpt_oss":  # experts with biases and a gate of their own
        return GptOssConfig(**SMALL_MODEL, num_local_experts=4, num_experts_per_tok=2, head_dim=8)
    if family == "mixtral":
        return MixtralConfig(**SMALL_MODEL, num_local_experts=8, num_experts_per_tok=3)
    return Qwen3MoeConfig(
        **SMALL_MODEL, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, head_dim=8
    )


def model_of(family: str, implementation: str, shared_batch: bool):
    """A model with random weights, the same on all ranks, whose experts are cut over them."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(family))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model = model.to(rank_device())
    shape = (1, dist.get_world_size()) if shared_batch else (dist.get_world_size(), 1)
    mesh = init_device_mesh(rank_device().type, shape, mesh_dim_names=("fsdp", "tp"))
    ep_mesh = mesh["tp"] if shared_batch else mesh["fsdp"]
    plan = {}
    for name, style in model.config.base_model_ep_plan.items():
        for layer in range(SMALL_MODEL["num_hidden_layers"]):
            plan["model." + name.replace("*", str(layer))] = style
    plan = {name: style for name, style in plan.items() if "router" not in name}
    return apply_expert_parallelism(model, ep_mesh, mesh["tp"], plan, implementation)


def results(family: str, implementation: str, shared_batch: bool) -> dict[str, torch.Tensor]:
    """The logits and every gradient."""
    model = model_of(family, implementation, shared_batch)
    rank = 0 if shared_batch else dist.get_rank()
    tokens = torch.arange(2 * (5 + rank), device=rank_device()).view(2, -1) * (7 + rank) % 60
    logits = model(tokens, use_cache=False).logits
    logits.square().mean().backward()
    found = {"logits": logits.detach()}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if grad is not None:
            found[name] = grad.to_local() if isinstance(grad, DTensor) else grad
    return found


@pytest.mark.parametrize("shared_batch", [False, True], ids=["own_batch", "shared_batch"])
@pytest.mark.parametrize(
    ("family", "plain"), [("qwen3_moe", True), ("mixtral", True), ("gpt_oss", False)]
)
@pytest.mark.ranks((2, "gloo"), (2, "nccl"), long=[(4, "gloo")])
def test_transformers_experts_are_transformers(
    failures: Failures, family: str, shared_batch: bool, plain: bool
) -> None:
    """Plain experts are `moe`'s, others keep the forward that they have between its halves."""
    own = results(family, "all_to_all", shared_batch)
    with (
        integration.register(),
        mock.patch.object(integration._experts(), "moe", wraps=overlap_torch.moe) as moe,
    ):
        ours: dict[str, torch.Tensor] = {}
        called = ops_called(lambda: ours.update(results(family, "overlap", shared_batch)))
    failures.equal(called - {"moe_combine"}, {"moe_dispatch"}, family)
    failures.equal(moe.called, plain, family)
    failures.equal(own.keys(), ours.keys(), family, "other gradients")
    for name, right in own.items():
        bound = 1e-5 * right.abs().max().item() + 1e-9
        error = (ours[name] - right).abs().max().item()
        failures.expect(None if error <= bound else f"off by {error}, bound {bound}", name, family)


def test_transformers_experts_go_with_the_last_handle():
    from transformers.distributed.expert_parallel import EPImplementationInterface

    with integration.register():
        with integration.register(auto=False):
            assert "overlap" in EPImplementationInterface()
        assert "overlap" in EPImplementationInterface()
    assert "overlap" not in EPImplementationInterface()
